//! An HTTPS caller that shows everything of an answer.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Either, Full};
use hyper::body::{Frame, SizeHint};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::{CertificateDer, ServerName, pem::PemObject as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Which HTTP the caller speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// HTTP/1.1.
    Http1,
    /// HTTP/2, by ALPN.
    Http2,
}

/// Where the gateway is and how to know it.
#[derive(Debug, Clone)]
pub struct Gateway {
    /// Address to connect to.
    pub address: SocketAddr,
    /// Name its certificate must carry.
    pub name: String,
    /// PEM bundle its certificate must chain to.
    pub ca: Vec<u8>,
}

/// One request.
#[derive(Debug, Clone)]
pub struct Call {
    /// HTTP/1.1 or HTTP/2.
    pub version: Version,
    /// Method, POST unless changed.
    pub method: Method,
    /// Path and query.
    pub path: String,
    /// Header names and values, in order.
    pub headers: Vec<(String, String)>,
    /// Body.
    pub body: Bytes,
    /// Announces a body of this many bytes and sends none of it.
    pub withheld: Option<u64>,
}

/// One answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Status.
    pub status: StatusCode,
    /// Headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
}

impl Call {
    /// An invocation with a JSON body and this bearer token.
    #[must_use]
    pub fn invoke(path: &str, token: &str, body: impl Into<Bytes>) -> Self {
        Self {
            version: Version::Http1,
            method: Method::POST,
            path: path.to_owned(),
            headers: vec![
                ("authorization".to_owned(), format!("Bearer {token}")),
                ("content-type".to_owned(), "application/json".to_owned()),
            ],
            body: body.into(),
            withheld: None,
        }
    }

    /// Announces a body of this length without sending it.
    #[must_use]
    pub fn withholding(mut self, length: u64) -> Self {
        self.withheld = Some(length);
        self
    }

    /// Speaks this version.
    #[must_use]
    pub fn over(mut self, version: Version) -> Self {
        self.version = version;
        self
    }

    /// Sends one more header.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }
}

impl Gateway {
    /// Sends one request on a connection of its own and reads the whole answer.
    pub async fn send(&self, call: &Call) -> Result<Answer> {
        let stream = self.connect(call.version).await?;
        Box::pin(self.send_over(stream, call)).await
    }

    /// The same on a connection that [`Gateway::connect`] made for the call's version. Until here
    /// nothing of the call has left.
    pub async fn send_over(
        &self,
        stream: tokio_rustls::client::TlsStream<TcpStream>,
        call: &Call,
    ) -> Result<Answer> {
        let authority = &self.name;
        let mut request = Request::builder().method(call.method.clone());
        request = match call.version {
            Version::Http1 => request.uri(&call.path).header("host", authority),
            Version::Http2 => request.uri(format!("https://{authority}{}", call.path)),
        };
        for (name, value) in &call.headers {
            request = request.header(name, value);
        }
        let request = request.body(match call.withheld {
            Some(length) => Either::Right(Withheld(length)),
            None => Either::Left(Full::new(call.body.clone())),
        })?;
        let io = TokioIo::new(stream);
        match call.version {
            Version::Http1 => {
                let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await?;
                let driver = spawn(connection);
                let answer = read(sender.send_request(request).await?).await;
                driver.abort();
                answer
            }
            Version::Http2 => {
                let (mut sender, connection) =
                    hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await?;
                let driver = spawn(connection);
                let answer = read(sender.send_request(request).await?).await;
                driver.abort();
                answer
            }
        }
    }

    /// The certificate that a new connection is shown, DER.
    pub async fn certificate(&self) -> Result<Vec<u8>> {
        let stream = self.connect(Version::Http1).await?;
        let (_, session) = stream.get_ref();
        let chain = session
            .peer_certificates()
            .context("a server has a certificate")?;
        Ok(chain.first().context("a chain has a leaf")?.to_vec())
    }

    /// A TLS connection whose certificate was checked.
    pub async fn connect(&self, version: Version) -> Result<tokio_rustls::client::TlsStream<TcpStream>> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&self.ca) {
            roots.add(certificate?)?;
        }
        let mut config = ClientConfig::builder()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![match version {
            Version::Http1 => b"http/1.1".to_vec(),
            Version::Http2 => b"h2".to_vec(),
        }];
        let tcp = tokio::time::timeout(Duration::from_secs(10), TcpStream::connect(self.address))
            .await
            .context("connecting took over 10 s")??;
        tcp.set_nodelay(true)?;
        let name = ServerName::try_from(self.name.clone())?;
        Ok(TlsConnector::from(Arc::new(config)).connect(name, tcp).await?)
    }
}

impl Answer {
    /// The body as JSON; null when it is none.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// One header as text; empty when absent.
    #[must_use]
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    }

    /// A field of the problem document; empty when absent.
    #[must_use]
    pub fn problem(&self, field: &str) -> String {
        self.json()[field].as_str().unwrap_or_default().to_owned()
    }
}

/// A body that is announced and never comes.
struct Withheld(u64);

impl hyper::body::Body for Withheld {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Pending
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0)
    }
}

pub(crate) async fn read(response: http::Response<hyper::body::Incoming>) -> Result<Answer> {
    let (head, body) = response.into_parts();
    let body = body
        .collect()
        .await
        .context("the answer's body broke off")?
        .to_bytes();
    Ok(Answer {
        status: head.status,
        headers: head.headers,
        body,
    })
}

/// Runs in the background until its test ends.
#[expect(
    clippy::disallowed_methods,
    reason = "a test's background work ends with its runtime"
)]
pub fn spawn<F>(connection: F) -> tokio::task::JoinHandle<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    tokio::spawn(connection)
}
