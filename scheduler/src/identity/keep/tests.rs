use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn given(pairs: &[(&str, &str)], ours: bool) -> Secret {
    let mut secret = Secret {
        data: Some(
            pairs
                .iter()
                .map(|(key, value)| ((*key).to_owned(), bytes(value)))
                .collect(),
        ),
        ..Secret::default()
    };
    if ours {
        secret
            .annotations_mut()
            .insert(ANNOTATION_NOT_AFTER.to_owned(), "whatever".to_owned());
    }
    secret
}

#[test]
fn ours_is_renewed_in_its_last_third_and_a_foreign_one_never() {
    let made = Ca::make(at(0), Duration::from_secs(3000)).unwrap();
    let pairs = [
        (TLS_CRT, made.pair.cert.as_str()),
        (TLS_KEY, made.pair.key.as_str()),
    ];
    let ours = Stored::of(&given(&pairs, true)).unwrap();
    let life = Duration::from_secs(3000);
    assert!(!due(Some(&ours), life, at(1999)));
    assert!(due(Some(&ours), life, at(2001)));
    let foreign = Stored::of(&given(&pairs, false)).unwrap();
    assert!(!due(Some(&foreign), life, at(1_000_000)));
    assert!(due(None, life, at(0)));
    assert!(Stored::of(&given(&[(TLS_CRT, "rubbish")], true)).is_none());
}

#[test]
fn a_new_ca_is_published_with_the_old_and_spreads_before_it_signs() {
    let (old, new) = (
        Ca::make(at(0), CA_LIFE).unwrap(),
        Ca::make(at(10), CA_LIFE).unwrap(),
    );
    let mut stored = given(
        &[
            (TLS_CRT, &new.pair.cert),
            (TLS_KEY, &new.pair.key),
            (PREVIOUS_CRT, &old.pair.cert),
        ],
        true,
    );
    stored
        .annotations_mut()
        .insert(ANNOTATION_MADE_AT.to_owned(), at(10).to_string());
    let authority = Authority::of(&Stored::of(&stored).unwrap(), at(20)).unwrap();
    assert_eq!(authority.certificates, [new.pair.cert.as_str(), &old.pair.cert]);
    assert!(authority.is_spreading(at(20)));
    assert!(!authority.is_spreading(at(10 + 600)));
    let alone = [(TLS_CRT, new.pair.cert.as_str()), (TLS_KEY, &new.pair.key)];
    let first = Authority::of(&Stored::of(&given(&alone, true)).unwrap(), at(20)).unwrap();
    assert!(!first.is_spreading(at(20)), "nobody knows another one");
}

/// C-4
#[test]
fn a_certificate_of_a_ca_that_was_deleted_or_replaced_is_made_anew() {
    let (lost, new) = (
        Ca::make(at(0), CA_LIFE).unwrap(),
        Ca::make(at(10), CA_LIFE).unwrap(),
    );
    let leaf = |ca: &Ca| {
        let made = ca.gateway(at(0), LEAF_LIFE).unwrap();
        let mut leaf = given(&[(TLS_CRT, &made.cert), (TLS_KEY, &made.key)], true);
        leaf.annotations_mut()
            .insert(ANNOTATION_ISSUER.to_owned(), made.issuer);
        Stored::of(&leaf).unwrap()
    };
    let authority = |previous: &[(&str, &str)]| {
        let mut pairs = vec![
            (TLS_CRT, new.pair.cert.as_str()),
            (TLS_KEY, new.pair.key.as_str()),
        ];
        pairs.extend(previous);
        Authority::of(&Stored::of(&given(&pairs, true)).unwrap(), at(20)).unwrap()
    };
    assert!(authority(&[]).keeps(&leaf(&new), at(20)));
    assert!(!authority(&[]).keeps(&leaf(&lost), at(20)));
    let rotated = authority(&[(PREVIOUS_CRT, &lost.pair.cert)]);
    assert!(rotated.keeps(&leaf(&lost), at(20)));
}

#[test]
fn a_foreign_ca_may_have_a_key_that_we_cannot_use() {
    let made = Ca::make(at(0), CA_LIFE).unwrap();
    let pairs = [(TLS_CRT, made.pair.cert.as_str()), (TLS_KEY, "of another kind")];
    let foreign = Authority::of(&Stored::of(&given(&pairs, false)).unwrap(), at(0)).unwrap();
    assert!(foreign.ca.is_none() && foreign.certificates == [made.pair.cert.clone()]);
    assert!(Authority::of(&Stored::of(&given(&pairs, true)).unwrap(), at(0)).is_err());
}

#[test]
fn clients_trust_the_ca_beside_the_certificate_else_the_certificate() {
    let ca = Ca::make(at(0), CA_LIFE).unwrap();
    let leaf = ca.gateway(at(0), LEAF_LIFE).unwrap();
    let both = given(&[(TLS_CRT, &leaf.cert), (CA_CRT, &ca.pair.cert)], false);
    assert_eq!(serving_ca(&both).as_deref(), Some(ca.pair.cert.as_str()));
    for alone in [
        given(&[(TLS_CRT, &leaf.cert)], false),
        given(&[(TLS_CRT, &leaf.cert), (CA_CRT, "")], false),
    ] {
        assert_eq!(serving_ca(&alone).as_deref(), Some(leaf.cert.as_str()));
    }
    assert_eq!(serving_ca(&given(&[], false)), None);
}

/// What one side of the hop has, and since when the other side may have had it.
struct World {
    ca: Option<Secret>,
    leaf: Option<Secret>,
}

impl World {
    /// One look of the scheduler; the fingerprints that owners trust, and of the certificate's issuer.
    fn look(&mut self, now: Timestamp) -> (Vec<String>, String, Timestamp) {
        let kept = keep(self.ca.as_ref(), self.leaf.as_ref(), now).unwrap();
        self.ca = kept.ca.or_else(|| self.ca.take());
        self.leaf = kept.leaf.or_else(|| self.leaf.take());
        let leaf = Stored::of(self.leaf.as_ref().unwrap()).unwrap();
        let trusted = kept.own.iter().map(|it| fingerprint(it)).collect();
        (trusted, leaf.issuer.unwrap(), leaf.not_after.unwrap())
    }
}

/// C-4, scenario 49: over three years with every rotation in them, a gateway and an owner of which one is
/// as of ten minutes ago always verify each other, and no certificate comes near its end.
#[test]
fn both_sides_verify_each_other_all_the_time() {
    let mut world = World { ca: None, leaf: None };
    let mut before = world.look(at(0));
    let (mut cas, mut leaves) = (
        std::collections::BTreeSet::new(),
        std::collections::BTreeSet::new(),
    );
    let (mut now, mut step) = (0, 0);
    while now < 3 * 365 * 86_400 {
        // Ten minutes at a time around a rotation, half a day otherwise.
        now += step;
        let (trusted, issuer, not_after) = world.look(at(now));
        assert!(trusted.contains(&issuer), "{now}: both are new");
        assert!(before.0.contains(&issuer), "{now}: the owner is late");
        assert!(trusted.contains(&before.1), "{now}: the gateway is late");
        let left = not_after.duration_since(at(now)).as_secs();
        assert!(left > 8 * 86_400, "{now}: {left} s are left");
        let changed = before.1 != issuer || before.0 != trusted;
        step = if changed { 600 } else { 43_200 };
        cas.insert(trusted[0].clone());
        leaves.insert(not_after);
        before = (trusted, issuer, not_after);
    }
    assert!(
        cas.len() >= 4 && leaves.len() >= 36,
        "{} and {}",
        cas.len(),
        leaves.len()
    );
    let unchanged = keep(world.ca.as_ref(), world.leaf.as_ref(), at(now)).unwrap();
    assert!(
        unchanged.ca.is_none() && unchanged.leaf.is_none(),
        "and nothing is written meanwhile"
    );
}

/// C-4: who signs the gateway's certificate is what owners are told to trust.
#[test]
fn a_foreign_certificate_brings_its_own_ca() {
    let theirs = Ca::make(at(0), CA_LIFE).unwrap();
    let leaf = theirs.gateway(at(0), LEAF_LIFE).unwrap();
    let pair = [(TLS_CRT, leaf.cert.as_str()), (TLS_KEY, leaf.key.as_str())];
    let with_ca = [&pair[..], &[(CA_CRT, theirs.pair.cert.as_str())]].concat();
    let kept = keep(None, Some(&given(&with_ca, false)), at(9)).unwrap();
    assert_eq!(kept.foreign, [theirs.pair.cert.as_str()]);
    assert!(
        kept.own.is_empty() && kept.ca.is_none() && kept.leaf.is_none(),
        "nothing of ours is made"
    );

    let alone = given(&pair, false);
    assert!(matches!(
        keep(None, Some(&alone), at(9)),
        Err(Error::UnknownIssuer)
    ));
    let ca = given(&[(TLS_CRT, &theirs.pair.cert)], false);
    assert_eq!(
        keep(Some(&ca), Some(&alone), at(9)).unwrap().foreign,
        [theirs.pair.cert.as_str()]
    );
    let ours = keep(None, None, at(0)).unwrap();
    assert!(
        matches!(
            keep(ours.ca.as_ref(), Some(&alone), at(9)),
            Err(Error::UnknownIssuer)
        ),
        "a CA of ours has not signed it"
    );
    let empty = given(&[(TLS_KEY, "x")], false);
    assert!(matches!(
        keep(None, Some(&empty), at(9)),
        Err(Error::Foreign(SECRET_GATEWAY_PEER))
    ));
}

/// C-4, scenario 49: another's new CA stands beside its certificate of the old one until that is renewed,
/// and a moment longer.
#[test]
fn what_others_replace_stays_published_for_a_while() {
    let (old, new) = (
        Ca::make(at(0), CA_LIFE).unwrap(),
        Ca::make(at(5), CA_LIFE).unwrap(),
    );
    let leaf = old.gateway(at(0), LEAF_LIFE).unwrap();
    let leaf = given(
        &[
            (TLS_CRT, &leaf.cert),
            (TLS_KEY, &leaf.key),
            (CA_CRT, &old.pair.cert),
        ],
        false,
    );
    let ca = given(&[(TLS_CRT, &new.pair.cert)], false);
    let kept = keep(Some(&ca), Some(&leaf), at(9)).unwrap();
    assert_eq!(kept.foreign, [new.pair.cert.clone(), old.pair.cert.clone()]);

    let mut recent = Recent::default();
    let mut look = |current: &Ca, second, max| {
        recent.bundle(vec![current.pair.cert.clone()], Vec::new(), at(second), max)
    };
    let both = [new.pair.cert.as_str(), &old.pair.cert].concat();
    look(&old, 0, usize::MAX);
    assert_eq!(look(&new, 30, usize::MAX), both);
    assert_eq!(look(&new, 599, usize::MAX), both);
    assert_eq!(
        look(&new, 599, both.len() - 1),
        new.pair.cert,
        "the current one is what fits"
    );
    assert_eq!(look(&new, 600, usize::MAX), new.pair.cert);
}
