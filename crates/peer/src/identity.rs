//! The certificate that a client shows: asked for at every handshake, so that it can rotate.

use std::{fmt, sync::Arc};

use rustls::{
    SignatureScheme, client::ResolvesClientCert, crypto::ring::default_provider, sign::CertifiedKey,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use thiserror::Error;

/// Shows whatever `source` says is newest, at each handshake.
pub struct RotatingIdentity {
    source: Box<dyn Fn() -> Option<Arc<CertifiedKey>> + Send + Sync>,
}

/// Why a certificate and key cannot be used.
#[derive(Debug, Error)]
pub enum PairError {
    /// The certificate file.
    #[error("the certificate is not PEM: {0}")]
    Cert(#[source] rustls_pki_types::pem::Error),
    /// The certificate file holds none.
    #[error("the certificate file contains no certificate")]
    NoCert,
    /// The key file.
    #[error("the private key is not PEM: {0}")]
    Key(#[source] rustls_pki_types::pem::Error),
    /// The key is of another certificate or of an unknown kind.
    #[error("certificate and key do not fit: {0}")]
    Mismatch(#[from] rustls::Error),
}

/// Parses `tls.crt` (certificate first, then intermediates) and `tls.key`, and checks that the key
/// belongs to the certificate.
///
/// # Errors
/// Says which of the two is wrong; never quotes the key.
pub fn certified_key(cert_pem: &[u8], key_pem: &[u8]) -> Result<Arc<CertifiedKey>, PairError> {
    let chain = CertificateDer::pem_slice_iter(cert_pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(PairError::Cert)?;
    if chain.is_empty() {
        return Err(PairError::NoCert);
    }
    let key = PrivateKeyDer::from_pem_slice(key_pem).map_err(PairError::Key)?;
    let certified = CertifiedKey::from_der(chain, key, &default_provider())?;
    Ok(Arc::new(certified))
}

// === impl RotatingIdentity ===

impl RotatingIdentity {
    /// For example `RotatingIdentity::new(move || files.newest().map(|pair| pair.value.clone()))`.
    pub fn new(source: impl Fn() -> Option<Arc<CertifiedKey>> + Send + Sync + 'static) -> Self {
        Self {
            source: Box::new(source),
        }
    }

    /// Always the same.
    #[must_use]
    pub fn fixed(identity: Arc<CertifiedKey>) -> Self {
        Self::new(move || Some(Arc::clone(&identity)))
    }
}

impl ResolvesClientCert for RotatingIdentity {
    fn resolve(
        &self,
        _root_hint_subjects: &[&[u8]],
        _sigschemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        (self.source)()
    }

    fn has_certs(&self) -> bool {
        (self.source)().is_some()
    }
}

impl fmt::Debug for RotatingIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RotatingIdentity")
            .field("has_certs", &self.has_certs())
            .finish()
    }
}
