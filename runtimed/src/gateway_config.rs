//! What the installation says about the gateway: the mounted ConfigMap `kruntimes-gateway`.
//!
//! Its URL and CA bundle become the endpoint of Runs; its peer CA decides who may use the hop. The
//! directory may be empty at first: then nobody may, and no Run becomes Ready.

use std::sync::Arc;

use kruntimes_api::{
    invoke_path,
    keys::RunKey,
    names::{GATEWAY_CA, GATEWAY_PEER_CA, GATEWAY_URL},
    run::{Endpoint, EndpointProtocol},
};
use kruntimes_ops::{
    drain::Drain,
    files::{Contents, WatchedDir},
};
use kruntimes_peer::TrustBundle;
use tokio::sync::watch;

/// Largest CA bundle of an endpoint, bytes (C-4).
const CA_BYTES: usize = 16 * 1024;
/// Longest URL of an endpoint, bytes (C-2.2).
const URL_BYTES: usize = 2048;

/// Where callers find the gateway.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GatewayConfig {
    url: Option<String>,
    ca: Option<Vec<u8>>,
}

// === impl GatewayConfig ===

impl GatewayConfig {
    /// Reads the mounted files. What is no https URL, or too large, counts as absent, with a warning.
    #[must_use]
    pub fn of(contents: &Contents) -> Self {
        let url = contents.text(GATEWAY_URL).map(|url| url.trim_end_matches('/'));
        let url = url.filter(|url| {
            let fine = url.starts_with("https://") && url.bytes().all(|byte| byte.is_ascii_graphic());
            if !fine {
                tracing::warn!("the gateway's url is no https URL and is not used");
            }
            fine
        });
        let ca = contents.get(GATEWAY_CA).filter(|ca| {
            if ca.len() > CA_BYTES {
                tracing::warn!(
                    bytes = ca.len(),
                    "the gateway's ca.crt is too large for an endpoint"
                );
            }
            !ca.is_empty() && ca.len() <= CA_BYTES
        });
        Self {
            url: url.map(ToOwned::to_owned),
            ca: ca.map(ToOwned::to_owned),
        }
    }

    /// How to call a Run; `None` while the URL is not known.
    #[must_use]
    pub fn endpoint(&self, key: &RunKey, runtime: &str) -> Option<Endpoint> {
        let url = format!(
            "{}{}",
            self.url.as_ref()?,
            invoke_path::build(&key.namespace, runtime, key.uid)
        );
        (url.len() <= URL_BYTES).then(|| Endpoint {
            protocol: EndpointProtocol::HTTPS,
            url,
            ca_bundle: self.ca.clone().map(k8s_openapi::ByteString),
        })
    }

    /// For tests and for composition without files.
    #[must_use]
    pub fn new(url: &str, ca: Option<Vec<u8>>) -> Self {
        Self {
            url: Some(url.to_owned()),
            ca,
        }
    }
}

/// Watches the directory by content: the returned channel has each new configuration, and `trust`
/// each new peer CA. A bad peer CA keeps the one before.
pub fn watch(dir: WatchedDir, trust: TrustBundle, drain: &Drain) -> watch::Receiver<GatewayConfig> {
    let mut files = dir.watch("gateway config", drain);
    let apply = move |contents: &Arc<Contents>| {
        if let Some(pem) = contents.get(GATEWAY_PEER_CA) {
            match trust.replace(pem) {
                Ok(certificates) => tracing::info!(certificates, "the peer CA of gateways is in use"),
                Err(error) => tracing::warn!(%error, "peer-ca.crt cannot be used; the one before stays"),
            }
        }
        GatewayConfig::of(contents)
    };
    let first = apply(&files.borrow_and_update());
    let (sender, receiver) = watch::channel(first);
    drain.spawn_background("gateway config use", async move {
        while files.changed().await.is_ok() {
            let contents = Arc::clone(&files.borrow_and_update());
            let config = apply(&contents);
            sender.send_if_modified(|known| {
                let changed = *known != config;
                *known = config;
                changed
            });
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str, ca: &[u8]) -> GatewayConfig {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("url"), url).unwrap();
        std::fs::write(dir.path().join("ca.crt"), ca).unwrap();
        GatewayConfig::of(
            &WatchedDir::new(dir.path(), &[GATEWAY_URL, GATEWAY_CA])
                .read()
                .unwrap(),
        )
    }

    #[test]
    fn the_endpoint_is_url_and_path() {
        let key = kruntimes_api::fixtures::run("ns", "n").build().key().unwrap();
        let endpoint = read("https://gw.example/\n", b"PEM")
            .endpoint(&key, "python")
            .unwrap();
        let path = format!("/v1/namespaces/ns/runtimes/python/functions/{}:invoke", key.uid);
        assert_eq!(endpoint.url, format!("https://gw.example{path}"));
        assert_eq!(endpoint.ca_bundle.unwrap().0, b"PEM");
    }

    #[test]
    fn without_an_https_url_there_is_no_endpoint() {
        let key = kruntimes_api::fixtures::run("ns", "n").build().key().unwrap();
        for url in ["", "http://gw", "https://g w", "gw"] {
            assert_eq!(read(url, b"PEM").endpoint(&key, "python"), None, "{url}");
        }
    }

    /// C-4: a bundle over 16 kib is left out.
    #[test]
    fn a_bundle_over_16_kib_is_left_out() {
        let key = kruntimes_api::fixtures::run("ns", "n").build().key().unwrap();
        let endpoint = read("https://gw", &[b'x'; CA_BYTES + 1])
            .endpoint(&key, "python")
            .unwrap();
        assert_eq!(endpoint.ca_bundle, None);
    }
}
