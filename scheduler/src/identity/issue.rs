//! Certificates of the hop: a CA of our own and client certificates for gateways.

use std::time::Duration;

use jiff::Timestamp;
use kruntimes_api::names::GATEWAY_IDENTITY;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, date_time_ymd,
};
use ring::digest;

/// Clocks of Pods may be behind ours.
const BACKDATE: Duration = Duration::from_secs(300);

/// A CA that can sign.
pub(super) struct Ca {
    pub(super) pair: Pair,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate and its key, PEM. The key never prints.
pub(super) struct Pair {
    pub(super) cert: String,
    pub(super) key: String,
    pub(super) not_after: Timestamp,
    /// Fingerprint of the CA certificate it is made under; a CA's own.
    pub(super) issuer: String,
}

/// Why a certificate cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot make a certificate: {0}")]
pub(super) struct Error(#[from] rcgen::Error);

// === impl Ca ===

impl Ca {
    /// A new CA that may sign leaves only.
    pub(super) fn make(now: Timestamp, life: Duration) -> Result<Self, Error> {
        let mut params = params(now, life, "kruntimes peer CA");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate()?;
        let cert = params.self_signed(&key)?.pem();
        let pair = Pair {
            issuer: fingerprint(&cert),
            cert,
            key: key.serialize_pem(),
            not_after: end(now, life),
        };
        Ok(Self {
            pair,
            issuer: Issuer::new(params, key),
        })
    }

    /// A CA from its Secret.
    pub(super) fn load(cert: &str, key: &str) -> Result<Self, Error> {
        let issuer = Issuer::from_ca_cert_pem(cert, KeyPair::from_pem(key)?)?;
        let pair = Pair::known(cert.to_owned(), key.to_owned(), Timestamp::MAX, fingerprint(cert));
        Ok(Self { pair, issuer })
    }

    /// A client certificate for gateways: its URI SAN is all that owners look at (C-4).
    pub(super) fn gateway(&self, now: Timestamp, life: Duration) -> Result<Pair, Error> {
        let mut params = params(now, life, "kruntimes gateway");
        params.subject_alt_names = vec![SanType::URI(GATEWAY_IDENTITY.try_into()?)];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?.pem();
        Ok(Pair {
            cert,
            key: key.serialize_pem(),
            not_after: end(now, life),
            issuer: self.pair.issuer.clone(),
        })
    }
}

/// Names a certificate: SHA-256 of its PEM text, hex.
pub(super) fn fingerprint(pem: &str) -> String {
    let digest = digest::digest(&digest::SHA256, pem.trim().as_bytes());
    digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

// === impl Pair ===

impl Pair {
    pub(super) fn known(cert: String, key: String, not_after: Timestamp, issuer: String) -> Self {
        Self {
            cert,
            key,
            not_after,
            issuer,
        }
    }
}

fn params(now: Timestamp, life: Duration, name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    let epoch = date_time_ymd(1970, 1, 1);
    let second = |at: Timestamp| Duration::from_secs(u64::try_from(at.as_second()).unwrap_or(0));
    params.not_before = epoch + second(now).saturating_sub(BACKDATE);
    params.not_after = epoch + second(end(now, life));
    params
}

fn end(now: Timestamp, life: Duration) -> Timestamp {
    now.checked_add(life).unwrap_or(Timestamp::MAX)
}

#[cfg(test)]
mod tests {
    use kruntimes_ops::certificate::not_after_of_pem;
    use rustls_pki_types::{CertificateDer, pem::PemObject};

    use super::*;

    fn now() -> Timestamp {
        Timestamp::from_second(1_800_000_000).unwrap()
    }

    #[test]
    fn a_certificate_ends_when_its_annotation_says() {
        let ca = Ca::make(now(), Duration::from_secs(1000)).unwrap();
        assert_eq!(not_after_of_pem(ca.pair.cert.as_bytes()), Some(1_800_001_000));
        assert_eq!(ca.pair.not_after.as_second(), 1_800_001_000);
    }

    /// C-4
    #[test]
    fn a_stored_ca_signs_what_the_new_one_would() {
        let made = Ca::make(now(), Duration::from_secs(1000)).unwrap();
        let loaded = Ca::load(&made.pair.cert, &made.pair.key).unwrap();
        let leaf = loaded.gateway(now(), Duration::from_secs(500)).unwrap();
        let der = CertificateDer::from_pem_slice(leaf.cert.as_bytes()).unwrap();
        let holds = |text: &str| der.windows(text.len()).any(|it| it == text.as_bytes());
        assert!(holds(GATEWAY_IDENTITY), "the URI SAN");
        assert!(holds("kruntimes peer CA"), "the issuer's name");
        assert!(Ca::load(&leaf.cert, &leaf.key).is_ok() || Ca::load("", "").is_err());
    }
}
