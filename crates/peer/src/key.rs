//! A key made at start, and the SHA-256 by which the other side knows it.

use std::{fmt, str::FromStr, sync::Arc};

use ring::digest;
use rustls::{crypto::ring::default_provider, sign::CertifiedKey};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use thiserror::Error;

/// SHA-256 of a public key (the DER of its SubjectPublicKeyInfo), written as 64 lower-case hex
/// digits: the value of `Run.status.owner.peerKey`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerKey([u8; 32]);

/// Not the SHA-256 of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("a peer key is 64 lower-case hexadecimal digits")]
pub struct ParseError;

/// This process's key and self-signed certificate; both live in memory only.
#[derive(Clone)]
pub struct OwnKey {
    certified: Arc<CertifiedKey>,
    peer_key: PeerKey,
}

/// Why no key could be made.
#[derive(Debug, Error)]
pub enum KeyError {
    /// The random generator or the encoder failed.
    #[error("making the key of the hop: {0}")]
    Generate(#[from] rcgen::Error),
    /// The TLS library does not take the key.
    #[error("using the key of the hop: {0}")]
    Use(#[from] rustls::Error),
}

// === impl PeerKey ===

impl PeerKey {
    /// The key of a certificate. The certificate is parsed, not judged.
    ///
    /// # Errors
    /// When it does not parse.
    pub fn of_certificate(certificate: &CertificateDer<'_>) -> Result<Self, rustls::Error> {
        let parsed = rustls::server::ParsedCertificate::try_from(certificate)?;
        Ok(Self::of_spki(&parsed.subject_public_key_info()))
    }

    /// The key whose SubjectPublicKeyInfo is `der`.
    #[must_use]
    pub fn of_spki(der: &[u8]) -> Self {
        let mut sha256 = [0; 32];
        sha256.copy_from_slice(digest::digest(&digest::SHA256, der).as_ref());
        Self(sha256)
    }
}

impl FromStr for PeerKey {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(ParseError),
        };
        let mut sha256 = [0; 32];
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        if pairs.len() != sha256.len() || !rest.is_empty() {
            return Err(ParseError);
        }
        for (byte, [high, low]) in sha256.iter_mut().zip(pairs) {
            *byte = digit(*high)? << 4 | digit(*low)?;
        }
        Ok(Self(sha256))
    }
}

impl fmt::Display for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for PeerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerKey({self})")
    }
}

// === impl OwnKey ===

impl OwnKey {
    /// Makes a new key and certificate. The certificate carries no name: it is known by its key.
    ///
    /// # Errors
    /// When the operating system gives no random numbers.
    pub fn generate() -> Result<Self, KeyError> {
        let key = rcgen::KeyPair::generate()?;
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params
            .distinguished_name
            .push(rcgen::DnType::CommonName, "kruntimes-runtimed");
        let certificate = params.self_signed(&key)?.der().clone();
        let private = PrivateKeyDer::try_from(key.serialize_der())
            .map_err(|error| rustls::Error::General(error.to_owned()))?;
        let peer_key = PeerKey::of_certificate(&certificate)?;
        let certified = CertifiedKey::from_der(vec![certificate], private, &default_provider())?;
        Ok(Self {
            certified: Arc::new(certified),
            peer_key,
        })
    }

    /// What the other side must be told: the value of `Run.status.owner.peerKey`.
    #[must_use]
    pub fn peer_key(&self) -> PeerKey {
        self.peer_key
    }

    /// For a TLS configuration.
    #[must_use]
    pub fn certified(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.certified)
    }
}

impl fmt::Debug for OwnKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnKey")
            .field("peer_key", &self.peer_key)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let key = OwnKey::generate().expect("a key").peer_key();
        let text = key.to_string();
        assert_eq!(text.len(), 64);
        assert_eq!(text.parse(), Ok(key));
    }

    #[test]
    fn anything_else_is_no_key() {
        let good = "0a".repeat(32);
        assert!(good.parse::<PeerKey>().is_ok());
        for bad in [
            "",
            &good[1..],
            &format!("{good}0a"),
            &good.to_uppercase(),
            &good.replace("0a", "0g"),
            &"é".repeat(32),
            &format!(" {}", &good[1..]),
        ] {
            assert_eq!(bad.parse::<PeerKey>(), Err(ParseError), "{bad}");
        }
    }

    #[test]
    fn sha256_of_an_empty_text_is_the_published_one() {
        assert_eq!(
            PeerKey::of_spki(b"").to_string(),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        );
    }

    #[test]
    fn each_start_makes_another_key() {
        let one = OwnKey::generate().expect("a key");
        let two = OwnKey::generate().expect("a key");
        assert_ne!(one.peer_key(), two.peer_key());
    }
}
