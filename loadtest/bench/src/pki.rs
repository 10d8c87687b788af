//! Certificates of one comparison: what gateways serve with, what they show to backends, and whom backends trust.

use std::{fs, path::Path};

use anyhow::Context as _;
use base64::{Engine as _, engine::general_purpose::STANDARD};
use kruntimes_peer::{GATEWAY_URI, OwnKey, TrustBundle};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType,
};

/// Writes `tls/` and `peer/` (each with tls.crt and tls.key) and the owner's certificate `owner.crt` into `dir`.
/// Returns whom the backends trust.
///
/// # Errors
/// When a file cannot be written.
pub(crate) fn write(dir: &Path, owner: &OwnKey) -> anyhow::Result<TrustBundle> {
    let (serving, _) = authority("bench serving")?;
    let mut params = CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()])?;
    params
        .distinguished_name
        .push(DnType::CommonName, "bench gateway");
    pair(&dir.join("tls"), params, &serving)?;

    let (peers, peers_pem) = authority("bench peers")?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "gateway");
    params.subject_alt_names = vec![SanType::URI(GATEWAY_URI.try_into()?)];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    pair(&dir.join("peer"), params, &peers)?;

    let certified = owner.certified();
    let certificate = certified.cert.first().context("the owner has a certificate")?;
    fs::write(dir.join("owner.crt"), pem(certificate))?;

    let trust = TrustBundle::new();
    trust.replace(peers_pem.as_bytes())?;
    Ok(trust)
}

fn authority(name: &str) -> anyhow::Result<(Issuer<'static, KeyPair>, String)> {
    let key = KeyPair::generate()?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let certificate = params.self_signed(&key)?.pem();
    Ok((Issuer::new(params, key), certificate))
}

fn pair(dir: &Path, params: CertificateParams, issuer: &Issuer<'static, KeyPair>) -> anyhow::Result<()> {
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, issuer)?;
    fs::create_dir_all(dir)?;
    fs::write(dir.join("tls.crt"), certificate.pem())?;
    fs::write(dir.join("tls.key"), key.serialize_pem())?;
    Ok(())
}

fn pem(der: &[u8]) -> String {
    let text = STANDARD.encode(der);
    let mut lines = vec!["-----BEGIN CERTIFICATE-----".to_owned()];
    lines.extend(
        text.as_bytes()
            .chunks(64)
            .map(|line| String::from_utf8_lossy(line).into_owned()),
    );
    lines.push("-----END CERTIFICATE-----\n".to_owned());
    lines.join("\n")
}
