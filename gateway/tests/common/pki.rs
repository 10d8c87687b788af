//! Certificates for tests: the serving one, the peer CA and the gateway's client certificate.

use std::{fs, path::Path, sync::Arc};

use kruntimes_peer::TrustBundle;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, Issuer, KeyPair, SanType,
};
use rustls::{ClientConfig, RootCertStore, pki_types::CertificateDer};

pub(crate) struct Pki {
    serving: CertificateDer<'static>,
    serving_issuer: Issuer<'static, KeyPair>,
    peer: String,
    peer_issuer: Issuer<'static, KeyPair>,
}

impl Pki {
    pub(crate) fn new() -> Self {
        let (serving, _, serving_issuer) = ca("serving");
        let (_, peer, peer_issuer) = ca("peer");
        Self {
            serving,
            serving_issuer,
            peer,
            peer_issuer,
        }
    }

    /// Writes a serving certificate for localhost whose common name is `name`.
    pub(crate) fn serve_as(&self, dir: &Path, name: &str) {
        let (cert, key) = self.serving_pair(name);
        write(&dir.join("tls"), &cert, &key);
    }

    pub(crate) fn serving_pair(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().expect("a key");
        let mut params =
            CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).expect("names");
        params.distinguished_name = named(name);
        let cert = params
            .signed_by(&key, &self.serving_issuer)
            .expect("a certificate");
        (cert.pem(), key.serialize_pem())
    }

    /// Writes the certificate that owners know the gateway by.
    pub(crate) fn be_gateway(&self, dir: &Path) {
        let (cert, key) = self.gateway_pair();
        write(&dir.join("peer"), &cert, &key);
    }

    pub(crate) fn gateway_pair(&self) -> (String, String) {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.distinguished_name = named("gateway");
        let uri = kruntimes_peer::GATEWAY_URI.try_into().expect("a URI");
        params.subject_alt_names = vec![SanType::URI(uri)];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let cert = params.signed_by(&key, &self.peer_issuer).expect("a certificate");
        (cert.pem(), key.serialize_pem())
    }

    /// The CA of gateways, PEM.
    pub(crate) fn peer_ca(&self) -> &str {
        &self.peer
    }

    /// Whom owners trust.
    pub(crate) fn peer_trust(&self) -> TrustBundle {
        let trust = TrustBundle::new();
        trust.replace(self.peer.as_bytes()).expect("a bundle");
        trust
    }

    /// Whom callers trust.
    pub(crate) fn roots(&self) -> RootCertStore {
        roots(&[self])
    }

    /// A caller that trusts the serving CA and offers `alpn`.
    pub(crate) fn caller(&self, alpn: &[&[u8]]) -> ClientConfig {
        trusting(&[self], alpn)
    }
}

/// A caller that trusts all of these serving CAs and offers `alpn`.
pub(crate) fn trusting(all: &[&Pki], alpn: &[&[u8]]) -> ClientConfig {
    let mut config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots(all))
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    config
}

fn roots(all: &[&Pki]) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    for pki in all {
        roots.add(pki.serving.clone()).expect("a root");
    }
    roots
}

pub(crate) fn write(dir: &Path, cert: &str, key: &str) {
    fs::create_dir_all(dir).expect("mkdir");
    fs::write(dir.join("tls.crt"), cert).expect("write");
    fs::write(dir.join("tls.key"), key).expect("write");
}

fn ca(name: &str) -> (CertificateDer<'static>, String, Issuer<'static, KeyPair>) {
    let key = KeyPair::generate().expect("a key");
    let mut params = CertificateParams::default();
    params.distinguished_name = named(name);
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let cert = params.self_signed(&key).expect("a certificate");
    (cert.der().clone(), cert.pem(), Issuer::new(params, key))
}

fn named(name: &str) -> DistinguishedName {
    let mut distinguished = DistinguishedName::new();
    distinguished.push(DnType::CommonName, name);
    distinguished
}
