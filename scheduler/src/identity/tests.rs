use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn secret(pairs: &[(&str, &str)], ours: bool) -> Secret {
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
    let ours = Stored::of(&secret(&pairs, true)).unwrap();
    let life = Duration::from_secs(3000);
    assert!(!due(Some(&ours), life, at(1999)));
    assert!(due(Some(&ours), life, at(2001)));
    let foreign = Stored::of(&secret(&pairs, false)).unwrap();
    assert!(!due(Some(&foreign), life, at(1_000_000)));
    assert!(due(None, life, at(0)));
    assert!(Stored::of(&secret(&[(TLS_CRT, "rubbish")], true)).is_none());
}

#[test]
fn a_new_ca_is_published_with_the_old_and_spreads_before_it_signs() {
    let (old, new) = (
        Ca::make(at(0), CA_LIFE).unwrap(),
        Ca::make(at(10), CA_LIFE).unwrap(),
    );
    let mut stored = secret(
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
    let authority = Authority::of(&Stored::of(&stored).unwrap()).unwrap();
    assert!(authority.bundle.contains(&old.pair.cert) && authority.bundle.contains(&new.pair.cert));
    assert!(authority.is_spreading(at(20)));
    assert!(!authority.is_spreading(at(10 + 600)));
    let alone = [(TLS_CRT, new.pair.cert.as_str()), (TLS_KEY, &new.pair.key)];
    let first = Authority::of(&Stored::of(&secret(&alone, true)).unwrap()).unwrap();
    assert!(!first.is_spreading(at(20)), "nobody knows another one");
}

#[test]
fn a_certificate_of_a_ca_that_was_deleted_or_replaced_is_made_anew_c_4() {
    let (lost, new) = (
        Ca::make(at(0), CA_LIFE).unwrap(),
        Ca::make(at(10), CA_LIFE).unwrap(),
    );
    let leaf = |ca: &Ca| {
        let made = ca.gateway(at(0), LEAF_LIFE).unwrap();
        let mut leaf = secret(&[(TLS_CRT, &made.cert), (TLS_KEY, &made.key)], true);
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
        Authority::of(&Stored::of(&secret(&pairs, true)).unwrap()).unwrap()
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
    let foreign = Authority::of(&Stored::of(&secret(&pairs, false)).unwrap()).unwrap();
    assert!(foreign.ca.is_none() && foreign.bundle == made.pair.cert);
    assert!(Authority::of(&Stored::of(&secret(&pairs, true)).unwrap()).is_err());
}

#[test]
fn clients_trust_the_ca_beside_the_certificate_else_the_certificate() {
    let ca = Ca::make(at(0), CA_LIFE).unwrap();
    let leaf = ca.gateway(at(0), LEAF_LIFE).unwrap();
    let both = secret(&[(TLS_CRT, &leaf.cert), (CA_CRT, &ca.pair.cert)], false);
    assert_eq!(serving_ca(&both).as_deref(), Some(ca.pair.cert.as_str()));
    for alone in [
        secret(&[(TLS_CRT, &leaf.cert)], false),
        secret(&[(TLS_CRT, &leaf.cert), (CA_CRT, "")], false),
    ] {
        assert_eq!(serving_ca(&alone).as_deref(), Some(leaf.cert.as_str()));
    }
    assert_eq!(serving_ca(&secret(&[], false)), None);
}
