//! Whom each side accepts: a pinned key, or a certificate of the peer CA with the gateway's URI.

use std::{fmt, sync::Arc};

use arc_swap::ArcSwapOption;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{WebPkiSupportedAlgorithms, ring::default_provider, verify_tls13_signature},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject};

use crate::{GATEWAY_URI, key::PeerKey};

/// Accepts the server that has exactly this key, whatever else its certificate says.
///
/// The pin comes from the Run's status, which only the owning Pod can write; neither a name nor an
/// expiry would add to that. The handshake's signature proves that the server holds the key.
#[derive(Debug)]
pub struct PinnedServer {
    pin: PeerKey,
    algorithms: WebPkiSupportedAlgorithms,
}

/// Accepts clients whose certificate chains to the trusted bundle, is valid now and for clients,
/// and carries exactly one URI, [`GATEWAY_URI`].
#[derive(Debug)]
pub struct GatewayClient {
    trust: TrustBundle,
    algorithms: WebPkiSupportedAlgorithms,
}

/// The certificates of the peer CA, old and new during a rotation. Clones share it; while it is
/// empty nobody is accepted.
#[derive(Clone, Default)]
pub struct TrustBundle {
    roots: Arc<ArcSwapOption<RootCertStore>>,
}

/// Why a bundle is not used; the one before stays.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// Not PEM, or not certificates.
    #[error("the peer CA bundle is not PEM: {0}")]
    Pem(#[from] rustls_pki_types::pem::Error),
    /// A certificate that cannot be an anchor.
    #[error("the peer CA bundle: certificate {number} cannot be used: {source}")]
    Certificate {
        /// Counted from 1.
        number: usize,
        /// What is wrong.
        source: Error,
    },
    /// No certificate at all.
    #[error("the peer CA bundle contains no certificate")]
    Empty,
}

/// What both verifiers say of signatures: those of TLS 1.3, by the algorithms of ring.
macro_rules! tls13_only {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _cert: &CertificateDer<'_>,
            _dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("the hop speaks TLS 1.3 only".to_owned()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            cert: &CertificateDer<'_>,
            dss: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            verify_tls13_signature(message, cert, dss, &self.algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.algorithms.supported_schemes()
        }
    };
}

// === impl PinnedServer ===

impl PinnedServer {
    /// Accepts this key only.
    #[must_use]
    pub fn new(pin: PeerKey) -> Self {
        Self {
            pin,
            algorithms: default_provider().signature_verification_algorithms,
        }
    }
}

impl ServerCertVerifier for PinnedServer {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        // Both are public, so that comparing them needs no constant time.
        if PeerKey::of_certificate(end_entity)? == self.pin {
            Ok(ServerCertVerified::assertion())
        } else {
            Err(CertificateError::ApplicationVerificationFailure.into())
        }
    }

    tls13_only!();
}

// === impl GatewayClient ===

impl GatewayClient {
    /// Asks `trust` anew at every handshake.
    #[must_use]
    pub fn new(trust: TrustBundle) -> Self {
        Self {
            trust,
            algorithms: default_provider().signature_verification_algorithms,
        }
    }
}

impl ClientCertVerifier for GatewayClient {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // A gateway has one certificate and needs no hint; hints would tell scanners about us.
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let Some(roots) = self.trust.roots.load_full() else {
            return Err(CertificateError::UnknownIssuer.into());
        };
        let cert = webpki::EndEntityCert::try_from(end_entity).map_err(|_| CertificateError::BadEncoding)?;
        cert.verify_for_usage(
            self.algorithms.all,
            &roots.roots,
            intermediates,
            now,
            webpki::KeyUsage::client_auth(),
            None,
            None,
        )
        .map_err(refusal)?;
        let mut uris = cert.valid_uri_names();
        if uris.next() == Some(GATEWAY_URI) && uris.next().is_none() {
            Ok(ClientCertVerified::assertion())
        } else {
            Err(CertificateError::ApplicationVerificationFailure.into())
        }
    }

    tls13_only!();
}

/// The reason as it is told to the other side in the alert and to our log.
fn refusal(error: webpki::Error) -> Error {
    match error {
        webpki::Error::CertExpired { .. } => CertificateError::Expired,
        webpki::Error::CertNotValidYet { .. } => CertificateError::NotValidYet,
        webpki::Error::UnknownIssuer => CertificateError::UnknownIssuer,
        other => CertificateError::Other(rustls::OtherError(Arc::new(other))),
    }
    .into()
}

// === impl TrustBundle ===

impl TrustBundle {
    /// Trusts nobody yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Trusts exactly the certificates in `pem` from now on and returns how many there are.
    /// Connections that exist stay until they are [`crate::accept::MAX_AGE`] old.
    ///
    /// # Errors
    /// When any of them cannot be used: then nothing changes.
    pub fn replace(&self, pem: &[u8]) -> Result<usize, BundleError> {
        let mut roots = RootCertStore::empty();
        for (index, certificate) in CertificateDer::pem_slice_iter(pem).enumerate() {
            roots
                .add(certificate?)
                .map_err(|source| BundleError::Certificate {
                    number: index + 1,
                    source,
                })?;
        }
        let count = roots.len();
        if count == 0 {
            return Err(BundleError::Empty);
        }
        self.roots.store(Some(Arc::new(roots)));
        Ok(count)
    }

    /// Whether nobody is trusted yet.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.roots.load().is_none()
    }
}

impl fmt::Debug for TrustBundle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let anchors = self.roots.load().as_ref().map_or(0, |roots| roots.len());
        f.debug_struct("TrustBundle").field("anchors", &anchors).finish()
    }
}
