//! What identities there should be, from what there is and the time (C-4, scenario 49). No I/O.
//!
//! A new CA is published beside the old one at once; the gateway's certificate changes to it at its own
//! next renewal and not before pools had time to learn the new CA. A Secret without our annotation belongs
//! to somebody else, such as cert-manager: it is used and left alone, and what it replaces stays published
//! for as long as gateways may still show it.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kruntimes_api::names::{ANNOTATION_NOT_AFTER, SECRET_GATEWAY_PEER, SECRET_PEER_CA};
use kruntimes_ops::certificate::not_after_of_pem;
use kube::{ResourceExt as _, api::ObjectMeta};

use super::issue::{self, Ca, Pair, fingerprint};
use crate::pool::LABEL_MANAGED_BY;

/// A new CA signs nothing before pools had this time to learn it, and what is no longer current stays
/// published for this time.
const SPREAD: Duration = Duration::from_secs(600);
const CA_LIFE: Duration = Duration::from_secs(365 * 86_400);
const LEAF_LIFE: Duration = Duration::from_secs(30 * 86_400);

const TLS_CRT: &str = "tls.crt";
const TLS_KEY: &str = "tls.key";
const CA_CRT: &str = "ca.crt";
/// Key in the CA's Secret: the CA before this one, while its certificates may still be shown.
const PREVIOUS_CRT: &str = "previous.crt";
/// When a certificate was made, RFC 3339.
const ANNOTATION_MADE_AT: &str = "kruntimes.io/made-at";
/// On the gateway's certificate: SHA-256 of the CA certificate that it is made under.
const ANNOTATION_ISSUER: &str = "kruntimes.io/issuer-sha256";

/// What there should be.
#[derive(Default)]
pub(super) struct Kept {
    /// The CA's Secret, if it is to be stored.
    pub(super) ca: Option<Secret>,
    /// The gateway's Secret, if it is to be stored.
    pub(super) leaf: Option<Secret>,
    pub(super) leaf_not_after: Option<Timestamp>,
    /// CAs of ours that owners are to trust, PEM, the newest first.
    pub(super) own: Vec<String>,
    /// CAs of others that owners are to trust, PEM.
    pub(super) foreign: Vec<String>,
}

/// Why there cannot be identities.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Issue(#[from] issue::Error),
    #[error("Secret {0} has no usable tls.crt and is not ours to change; fill it or delete it")]
    Foreign(&'static str),
    #[error(
        "Secret kruntimes-peer-ca has no tls.key in PKCS #8, so that no client certificate can be made; provide Secret kruntimes-gateway-peer too"
    )]
    NoCaKey,
    #[error(
        "Secret kruntimes-gateway-peer is not ours and does not say who signed it; give it ca.crt, or provide Secret kruntimes-peer-ca with that CA's tls.crt"
    )]
    UnknownIssuer,
}

/// Decides from the two Secrets as they are.
pub(super) fn keep(ca: Option<&Secret>, leaf: Option<&Secret>, now: Timestamp) -> Result<Kept, Error> {
    let now = seconds(now);
    if let Some(secret) = leaf.filter(|it| !is_ours(it)) {
        return foreign_leaf(ca, secret);
    }
    let (authority, stored) = authority(ca, now)?;
    let mut kept = Kept {
        ca: stored,
        ..Kept::default()
    };
    let known = leaf.and_then(Stored::of);
    let fresh = known.as_ref().filter(|it| authority.keeps(it, now));
    let bundle = authority.certificates.concat();
    let bundle_is_known = leaf.is_some_and(|it| text(it, CA_CRT).as_ref() == Some(&bundle));
    let pair = match (fresh, &authority.ca) {
        (Some(known), _) => Pair::known(
            known.cert.clone(),
            known.key.clone(),
            known.not_after.unwrap_or(now),
            known.issuer.clone().unwrap_or_default(),
        ),
        (None, Some(ca)) => ca.gateway(now, LEAF_LIFE)?,
        (None, None) => return Err(Error::NoCaKey),
    };
    kept.leaf_not_after = Some(pair.not_after);
    if fresh.is_none() || !bundle_is_known {
        let mut data = pair_data(&pair);
        data.insert(CA_CRT.to_owned(), bytes(&bundle));
        kept.leaf = Some(secret(SECRET_GATEWAY_PEER, leaf, data, &pair, now));
    }
    if authority.ours {
        kept.own = authority.certificates;
    } else {
        kept.foreign = authority.certificates;
    }
    Ok(kept)
}

/// Somebody else makes the gateway's certificate, so somebody else has the CA: the one beside the
/// certificate, and the one in the CA's Secret unless that is a leftover of ours.
fn foreign_leaf(ca: Option<&Secret>, leaf: &Secret) -> Result<Kept, Error> {
    let known = Stored::of(leaf).ok_or(Error::Foreign(SECRET_GATEWAY_PEER))?;
    let mut foreign: Vec<String> = ca
        .filter(|it| !is_ours(it))
        .and_then(Stored::of)
        .map(|it| it.cert)
        .into_iter()
        .chain(text(leaf, CA_CRT).filter(|it| is_pem(it)))
        .collect();
    foreign.dedup();
    if foreign.is_empty() {
        return Err(Error::UnknownIssuer);
    }
    Ok(Kept {
        leaf_not_after: known.not_after,
        foreign,
        ..Kept::default()
    })
}

/// The CA: found, made or rotated; with its Secret if that is to be stored.
fn authority(stored: Option<&Secret>, now: Timestamp) -> Result<(Authority, Option<Secret>), Error> {
    let known = stored.and_then(Stored::of);
    if let Some(known) = known.as_ref().filter(|it| !due(Some(it), CA_LIFE, now)) {
        return Ok((Authority::of(known, now)?, None));
    }
    if stored.is_some_and(|it| !is_ours(it)) {
        return Err(Error::Foreign(SECRET_PEER_CA));
    }
    let made = Ca::make(now, CA_LIFE)?;
    let mut data = pair_data(&made.pair);
    // Certificates under the old one may be shown until they are renewed.
    let previous = known
        .as_ref()
        .filter(|it| it.not_after.is_some_and(|end| end > now))
        .map(|it| it.cert.clone());
    if let Some(previous) = &previous {
        data.insert(PREVIOUS_CRT.to_owned(), bytes(previous));
    }
    let secret = secret(SECRET_PEER_CA, stored, data, &made.pair, now);
    let mut certificates = vec![made.pair.cert.clone()];
    certificates.extend(previous);
    let authority = Authority {
        rotated: certificates.len() > 1,
        ca: Some(made),
        certificates,
        made_at: Some(now),
        ours: true,
    };
    Ok((authority, Some(secret)))
}

/// The CA as it is used.
struct Authority {
    /// `None` when only its certificate is here.
    ca: Option<Ca>,
    /// New and old, PEM.
    certificates: Vec<String>,
    made_at: Option<Timestamp>,
    rotated: bool,
    ours: bool,
}

impl Authority {
    fn of(known: &Stored, now: Timestamp) -> Result<Self, Error> {
        let ca = match Ca::load(&known.cert, &known.key) {
            Ok(ca) => Some(ca),
            // It may be there for its certificate only, beside a certificate for gateways from elsewhere.
            Err(error) if !known.ours => {
                tracing::debug!(%error, "the key of the peer CA is not used");
                None
            }
            Err(error) => return Err(error.into()),
        };
        let alive = |pem: &String| not_after_of_pem(pem.as_bytes()).is_some_and(|end| end > now.as_second());
        let mut certificates = vec![known.cert.clone()];
        certificates.extend(known.previous.clone().filter(alive));
        Ok(Self {
            ca,
            certificates,
            made_at: known.made_at,
            rotated: known.previous.is_some(),
            ours: known.ours,
        })
    }

    /// Whether a certificate for gateways stays. One of a CA that nobody trusts any more does not,
    /// however young it is: the CA's Secret was deleted or replaced.
    fn keeps(&self, leaf: &Stored, now: Timestamp) -> bool {
        let trusted = leaf
            .issuer
            .as_ref()
            .is_some_and(|it| self.certificates.iter().any(|pem| fingerprint(pem) == *it));
        trusted && (!due(Some(leaf), LEAF_LIFE, now) || self.is_spreading(now))
    }

    /// Whether pools may not know it yet: the old certificate is still the better one.
    fn is_spreading(&self, now: Timestamp) -> bool {
        let age = self
            .made_at
            .map(|made| Duration::try_from(now.duration_since(made)).unwrap_or_default());
        self.rotated && age.is_some_and(|age| age < SPREAD)
    }
}

/// Certificates that others keep: what is current, and what was until a moment ago.
#[derive(Debug, Default)]
pub(super) struct Recent {
    seen: Vec<(String, Timestamp)>,
}

impl Recent {
    /// The bundle to publish: what is current first, then our own, then what others have replaced, as far
    /// as `max` bytes hold it.
    pub(super) fn bundle(
        &mut self,
        current: Vec<String>,
        own: Vec<String>,
        now: Timestamp,
        max: usize,
    ) -> String {
        self.seen.retain(|(pem, last)| {
            let age = Duration::try_from(now.duration_since(*last)).unwrap_or_default();
            !current.contains(pem) && age < SPREAD
        });
        let before: Vec<String> = self.seen.iter().map(|(pem, _)| pem.clone()).collect();
        for pem in &current {
            self.seen.push((pem.clone(), now));
        }
        let mut bundle = String::new();
        for pem in current.into_iter().chain(own).chain(before) {
            if bundle.contains(pem.trim()) || !bundle.is_empty() && bundle.len() + pem.len() >= max {
                continue;
            }
            if !bundle.is_empty() && !bundle.ends_with('\n') {
                bundle.push('\n');
            }
            bundle.push_str(&pem);
        }
        bundle
    }
}

/// A certificate as a Secret holds it.
struct Stored {
    cert: String,
    key: String,
    previous: Option<String>,
    not_after: Option<Timestamp>,
    made_at: Option<Timestamp>,
    issuer: Option<String>,
    ours: bool,
}

impl Stored {
    /// `None` without a certificate that parses.
    fn of(secret: &Secret) -> Option<Self> {
        let cert = text(secret, TLS_CRT)?;
        let not_after = Timestamp::from_second(not_after_of_pem(cert.as_bytes())?).ok();
        let made_at = secret
            .annotations()
            .get(ANNOTATION_MADE_AT)
            .and_then(|it| it.parse().ok());
        let key = text(secret, TLS_KEY).unwrap_or_default();
        Some(Self {
            cert,
            key,
            previous: text(secret, PREVIOUS_CRT),
            not_after,
            made_at,
            issuer: secret.annotations().get(ANNOTATION_ISSUER).cloned(),
            ours: is_ours(secret),
        })
    }
}

/// Whether a certificate is missing, or ours and within its last third.
fn due(known: Option<&Stored>, life: Duration, now: Timestamp) -> bool {
    let Some(known) = known else { return true };
    if !known.ours {
        return false;
    }
    let Some(end) = known.not_after else { return true };
    let left = Duration::try_from(end.duration_since(now)).unwrap_or_default();
    left < life / 3
}

/// The Secret as it is to be stored: exactly the one that was read, with new content, or a new one.
fn secret(
    name: &str,
    stored: Option<&Secret>,
    data: BTreeMap<String, ByteString>,
    pair: &Pair,
    now: Timestamp,
) -> Secret {
    let mut secret = stored.cloned().unwrap_or_else(|| Secret {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        type_: Some("kubernetes.io/tls".to_owned()),
        ..Secret::default()
    });
    secret
        .labels_mut()
        .insert(LABEL_MANAGED_BY.0.to_owned(), LABEL_MANAGED_BY.1.to_owned());
    let annotations = secret.annotations_mut();
    annotations.insert(ANNOTATION_NOT_AFTER.to_owned(), pair.not_after.to_string());
    annotations.insert(ANNOTATION_ISSUER.to_owned(), pair.issuer.clone());
    annotations.insert(ANNOTATION_MADE_AT.to_owned(), now.to_string());
    secret.data = Some(data);
    secret
}

/// Certificates count in whole seconds.
fn seconds(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second()).unwrap_or(at)
}

fn is_ours(secret: &Secret) -> bool {
    secret.annotations().contains_key(ANNOTATION_NOT_AFTER)
}

/// What clients must trust: the CA beside the serving certificate, else the certificate itself.
pub(super) fn serving_ca(secret: &Secret) -> Option<String> {
    text(secret, CA_CRT)
        .filter(|it| is_pem(it))
        .or_else(|| text(secret, TLS_CRT).filter(|it| is_pem(it)))
}

fn is_pem(text: &str) -> bool {
    not_after_of_pem(text.as_bytes()).is_some()
}

fn text(secret: &Secret, key: &str) -> Option<String> {
    let bytes = secret.data.as_ref()?.get(key)?;
    let text = String::from_utf8(bytes.0.clone()).ok()?;
    (!text.trim().is_empty()).then_some(text)
}

fn pair_data(pair: &Pair) -> BTreeMap<String, ByteString> {
    BTreeMap::from([
        (TLS_CRT.to_owned(), bytes(&pair.cert)),
        (TLS_KEY.to_owned(), bytes(&pair.key)),
    ])
}

fn bytes(text: &str) -> ByteString {
    ByteString(text.as_bytes().to_vec())
}

#[cfg(test)]
mod tests;
