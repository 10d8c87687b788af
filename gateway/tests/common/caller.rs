//! Callers: a real HTTP client for both versions, and raw bytes over TLS.

use std::{convert::Infallible, net::SocketAddr, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Version};
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::{Frame, Incoming};
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

use super::{ALICE, Pki, pki};

type Https = Client<hyper_rustls::HttpsConnector<HttpConnector>, Full<Bytes>>;

pub(crate) struct Caller {
    gateway: SocketAddr,
    http1: Https,
    http2: Https,
    tls: rustls::ClientConfig,
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
        Self::trusting(gateway, &[pki])
    }

    /// Who has all of these CAs in its bundle.
    pub(crate) fn trusting(gateway: SocketAddr, pkis: &[&Pki]) -> Self {
        let tls = pki::trusting(pkis, &[]);
        let builder = || {
            HttpsConnectorBuilder::new()
                .with_tls_config(tls.clone())
                .https_only()
        };
        Self {
            gateway,
            http1: Client::builder(TokioExecutor::new()).build(builder().enable_http1().build()),
            http2: Client::builder(TokioExecutor::new())
                .http2_only(true)
                .build(builder().enable_http2().build()),
            raw: Arc::new(pki::trusting(pkis, &[b"http/1.1"])),
            tls,
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

    /// A good call with this body.
    pub(crate) fn post(&self, path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
        self.request(path).body(body.into().into()).expect("a request")
    }

    /// A good call with one header more, or another one.
    pub(crate) fn with(&self, path: &str, name: &str, value: impl AsRef<[u8]>) -> Request<Full<Bytes>> {
        let mut request = self.post(path, "1");
        let value = HeaderValue::from_bytes(value.as_ref()).expect("a value");
        let name: HeaderName = name.parse().expect("a name");
        request.headers_mut().insert(name, value);
        request
    }

    /// A good call by somebody else.
    pub(crate) fn by(&self, path: &str, token: &str) -> Request<Full<Bytes>> {
        self.with(path, "authorization", format!("Bearer {token}"))
    }

    /// With another method, and nothing of a call but the token.
    pub(crate) fn ask(&self, method: Method, path: &str) -> Request<Full<Bytes>> {
        let mut request = self.post(path, "");
        request.headers_mut().remove("content-type");
        *request.method_mut() = method;
        request
    }

    /// Sends it over both versions: each answer must be that refusal, whole (C-3.2, C-3.4). `says` is status,
    /// reason, component and dispatched. Returns the first answer.
    pub(crate) async fn refused(
        &self,
        request: impl Fn() -> Request<Full<Bytes>>,
        says: (u16, &str, &str, &str),
    ) -> Answer {
        let mut first = None;
        for version in [Version::HTTP_11, Version::HTTP_2] {
            let request = request();
            let id = request.headers().get("x-kruntime-invocation-id").cloned();
            let answer = self.send(request, version).await;
            let problem = answer.json();
            let text = |field: &str| problem[field].as_str().unwrap_or_default().to_owned();
            assert_eq!(
                (
                    answer.status,
                    answer.reason(),
                    text("component"),
                    text("dispatched")
                ),
                (says.0, says.1.to_owned(), says.2.to_owned(), says.3.to_owned()),
                "{version:?}: {problem}"
            );
            assert_eq!(answer.header("www-authenticate").is_some(), says.0 == 401);
            assert_eq!(answer.header("allow").is_some(), says.0 == 405);
            if says.1 != "InvalidInvocationId"
                && let Some(id) = id
            {
                assert_eq!(
                    answer.headers["x-kruntime-invocation-id"], id,
                    "the caller's own id"
                );
            }
            assert!(!answer.text().contains(ALICE), "no token in an answer");
            first.get_or_insert(answer);
        }
        first.expect("two answers")
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
        whole(response).await
    }

    /// A good call over HTTP/2 whose length nobody declares.
    pub(crate) async fn stream(&self, path: &str, body: String) -> Answer {
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(self.tls.clone())
            .https_only()
            .enable_http2()
            .build();
        let client = Client::builder(TokioExecutor::new())
            .http2_only(true)
            .build(connector);
        let pieces = [Ok::<_, Infallible>(Frame::data(Bytes::from(body)))];
        let body = StreamBody::new(futures::stream::iter(pieces));
        let request = self.request(path).body(body).expect("a request");
        let response = client.request(request).await.expect("an answer");
        whole(response).await.expect("an answer")
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

async fn whole(response: Response<Incoming>) -> Result<Answer, Box<dyn std::error::Error + Send + Sync>> {
    let (parts, body) = response.into_parts();
    let answer = Answer {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body: body.collect().await?.to_bytes(),
    };
    assert!(
        answer.header("x-kruntime-invocation-id").is_some(),
        "C-3.2: {answer:?}"
    );
    Ok(answer)
}

/// The head of a good call over HTTP/1.1, for bytes that no client library would send; `rest` are further lines.
pub(crate) fn head(path: &str, rest: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\nContent-Type: application/json\r\n\
         {rest}\r\n"
    )
}

/// Reads what follows until it ends like this.
pub(crate) async fn read_until(stream: &mut TlsStream<TcpStream>, end: &str) -> String {
    let mut text = String::new();
    while !text.ends_with(end) {
        let mut piece = [0; 4096];
        let read = stream.read(&mut piece).await.expect("read");
        assert!(read > 0, "it ends too early: {text}");
        text.push_str(std::str::from_utf8(&piece[..read]).expect("UTF-8"));
    }
    text
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
        if matches!(self.status, 200 | 204) {
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
