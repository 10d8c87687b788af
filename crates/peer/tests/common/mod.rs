//! A peer CA, certificates of it, and an owner with a gRPC method that answers its caller's words.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Response};
use kruntimes_peer::{
    AddressRule, Dialer, GATEWAY_URI, Incoming, OwnKey, PeerInfo, RotatingIdentity, TrustBundle,
    accept::{Counts, server_config},
    identity::certified_key,
};
use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};
use rustls::sign::CertifiedKey;
use tokio::{
    net::TcpListener,
    runtime::{Builder, Runtime},
};
use tonic::{Status, body::Body, transport::Server};
use tower::Service;

/// A certificate authority.
pub(crate) struct Ca {
    pub(crate) pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// What a client certificate says.
#[derive(Clone)]
pub(crate) struct Says {
    pub(crate) uris: Vec<&'static str>,
    pub(crate) usage: ExtendedKeyUsagePurpose,
    pub(crate) years: (i32, i32),
}

impl Default for Says {
    fn default() -> Self {
        Self {
            uris: vec![GATEWAY_URI],
            usage: ExtendedKeyUsagePurpose::ClientAuth,
            years: (2020, 2100),
        }
    }
}

impl Ca {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    pub(crate) fn issue(&self, says: &Says) -> Arc<CertifiedKey> {
        let mut params = CertificateParams::default();
        params.subject_alt_names = says
            .uris
            .iter()
            .map(|uri| SanType::URI((*uri).try_into().expect("a URI")))
            .collect();
        params.extended_key_usages = vec![says.usage.clone()];
        params.not_before = rcgen::date_time_ymd(says.years.0, 1, 1);
        params.not_after = rcgen::date_time_ymd(says.years.1, 1, 1);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        certified_key(certificate.pem().as_bytes(), key.serialize_pem().as_bytes()).expect("they fit")
    }
}

/// An owner that listens on loopback.
pub(crate) struct Owner {
    pub(crate) address: SocketAddr,
    pub(crate) key: OwnKey,
    pub(crate) trust: TrustBundle,
    pub(crate) counts: Arc<Counts>,
    pub(crate) calls: Arc<AtomicUsize>,
    // Of its own, because tonic's connections outlive the future that serves them.
    runtime: Option<Runtime>,
}

impl Owner {
    pub(crate) async fn start(ca: &Ca) -> Self {
        let trust = TrustBundle::new();
        trust.replace(ca.pem.as_bytes()).expect("a bundle");
        Self::with(OwnKey::generate().expect("a key"), trust).await
    }

    pub(crate) async fn with(key: OwnKey, trust: TrustBundle) -> Self {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let listener = runtime
            .spawn(TcpListener::bind(("127.0.0.1", 0)))
            .await
            .expect("no panic")
            .expect("a port");
        let address = listener.local_addr().expect("bound");
        let config = server_config(&key, trust.clone()).expect("a configuration");
        let incoming = Incoming::new(listener, config);
        let counts = incoming.counts();
        let echo = Echo::default();
        let calls = Arc::clone(&echo.calls);
        runtime.spawn(async move {
            Server::builder()
                .serve_with_incoming(echo, incoming)
                .await
                .expect("serve");
        });
        Self {
            address,
            key,
            trust,
            counts,
            calls,
            runtime: Some(runtime),
        }
    }

    /// As when its Pod is killed: every socket closes, soon.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Answers every call with the caller's address as a trailer, status OK and no message.
#[derive(Clone, Default)]
struct Echo {
    calls: Arc<AtomicUsize>,
}

impl Service<Request<Body>> for Echo {
    type Response = Response<Body>;
    type Error = std::convert::Infallible;
    type Future = std::future::Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let remote = request
            .extensions()
            .get::<PeerInfo>()
            .map(|peer| peer.remote.ip().to_string());
        let status = Status::failed_precondition(remote.unwrap_or_default());
        std::future::ready(Ok(status.into_http()))
    }
}

pub(crate) fn dialer(identity: Arc<CertifiedKey>) -> Dialer {
    rotating(RotatingIdentity::fixed(identity))
}

pub(crate) fn rotating(identity: RotatingIdentity) -> Dialer {
    Dialer::new(
        Arc::new(identity),
        AddressRule::AllowLocal,
        Duration::from_secs(10),
    )
}

/// One call; the text is what the owner saw as the caller's address.
pub(crate) async fn call(channel: &mut kruntimes_peer::UnaryChannel) -> Result<String, Status> {
    let request = Request::post("http://owner/test.Test/Echo")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(Body::empty())
        .expect("a request");
    let response = channel.call(request).await?;
    let status = Status::from_header_map(response.headers()).expect("a gRPC answer");
    Ok(status.message().to_owned())
}
