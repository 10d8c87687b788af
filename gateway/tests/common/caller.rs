//! Callers: a real HTTP client for both versions, and raw bytes over TLS.

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode, Version};
use http_body_util::{BodyExt as _, Full};
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{ALICE, Pki};

type Https = Client<hyper_rustls::HttpsConnector<HttpConnector>, Full<Bytes>>;

pub(crate) struct Caller {
    gateway: SocketAddr,
    http1: Https,
    http2: Https,
    raw: Arc<rustls::ClientConfig>,
}

/// A whole answer.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Caller {
    pub(crate) fn new(gateway: SocketAddr, pki: &Pki) -> Self {
        let builder = || {
            HttpsConnectorBuilder::new()
                .with_tls_config(pki.caller(&[]))
                .https_only()
        };
        Self {
            gateway,
            http1: Client::builder(TokioExecutor::new()).build(builder().enable_http1().build()),
            http2: Client::builder(TokioExecutor::new())
                .http2_only(true)
                .build(builder().enable_http2().build()),
            raw: Arc::new(pki.caller(&[b"http/1.1"])),
        }
    }

    /// A good call of that path, to be changed.
    pub(crate) fn request(&self, path: &str) -> http::request::Builder {
        Request::builder()
            .method(Method::POST)
            .uri(format!("https://localhost:{}{path}", self.gateway.port()))
            .header("authorization", format!("Bearer {ALICE}"))
            .header("content-type", "application/json")
    }

    /// Over HTTP/1.1 and HTTP/2; both answers must agree in status and reason, and carry an invocation id.
    pub(crate) async fn both(&self, request: impl Fn() -> Request<Full<Bytes>>) -> Answer {
        let first = self.send(request(), Version::HTTP_11).await;
        let second = self.send(request(), Version::HTTP_2).await;
        assert_eq!(
            (first.status, first.try_reason()),
            (second.status, second.try_reason())
        );
        first
    }

    pub(crate) async fn call(&self, path: &str, body: &str) -> Answer {
        let body = body.to_owned();
        self.send(
            self.request(path).body(body.into()).expect("a request"),
            Version::HTTP_11,
        )
        .await
    }

    pub(crate) async fn send(&self, request: Request<Full<Bytes>>, version: Version) -> Answer {
        self.try_send(request, version).await.expect("an answer")
    }

    pub(crate) async fn try_send(
        &self,
        mut request: Request<Full<Bytes>>,
        version: Version,
    ) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
        *request.version_mut() = version;
        let client = if version == Version::HTTP_2 {
            &self.http2
        } else {
            &self.http1
        };
        let response = client.request(request).await?;
        assert_eq!(response.version(), version);
        let (parts, body) = response.into_parts();
        let body = body.collect().await?.to_bytes();
        let answer = Answer {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body,
        };
        assert!(
            answer.header("x-kruntime-invocation-id").is_some(),
            "C-3.2: {answer:?}"
        );
        Ok(answer)
    }

    /// A TLS connection for bytes that no client library would send.
    pub(crate) async fn connect(&self) -> TlsStream<TcpStream> {
        let tcp = TcpStream::connect(self.gateway).await.expect("connect");
        let name = "localhost".try_into().expect("a name");
        TlsConnector::from(Arc::clone(&self.raw))
            .connect(name, tcp)
            .await
            .expect("a handshake")
    }

    /// Sends these bytes and reads until the gateway closes.
    pub(crate) async fn raw(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect().await;
        stream.write_all(bytes).await.expect("write");
        read_all(&mut stream).await
    }
}

pub(crate) async fn read_all(stream: &mut TlsStream<TcpStream>) -> String {
    let mut bytes = Vec::new();
    // A missing close_notify is no matter here.
    let _ = stream.read_to_end(&mut bytes).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("UTF-8")
    }

    /// The reason of a problem; checks that everything of C-3.2 is there.
    pub(crate) fn reason(&self) -> String {
        self.try_reason()
            .unwrap_or_else(|| panic!("no problem: {self:?}"))
    }

    pub(crate) fn dispatched(&self) -> String {
        self.json()["dispatched"].as_str().expect("dispatched").to_owned()
    }

    fn try_reason(&self) -> Option<String> {
        if self.status == StatusCode::OK {
            return None;
        }
        let problem = self.json();
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        assert_eq!(problem["status"], self.status);
        assert_eq!(
            problem["invocationId"].as_str(),
            self.header("x-kruntime-invocation-id")
        );
        for field in ["title", "detail", "component"] {
            assert!(
                problem[field].as_str().is_some_and(|text| !text.is_empty()),
                "{field}: {problem}"
            );
        }
        assert!(["no", "yes", "unknown"].contains(&problem["dispatched"].as_str().expect("dispatched")));
        assert_eq!(
            self.header("retry-after").is_some(),
            matches!(self.status, 429 | 503),
            "C-3.4: {problem}"
        );
        Some(problem["reason"].as_str().expect("a reason").to_owned())
    }
}
