//! Accepted connections of gateways, for tonic's `serve_with_incoming`.
//!
//! Handshakes run side by side, each with a deadline. When too many are open the oldest gives way,
//! so that a thousand of them that never end hold nobody up.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use rustls::{
    ServerConfig,
    crypto::ring::default_provider,
    server::{ClientHello, NoServerSessionStorage, ResolvesServerCert},
    sign::CertifiedKey,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    time::{Sleep, sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_stream::Stream;
use tonic::transport::server::Connected;

use crate::{
    H2,
    crowd::Crowd,
    key::OwnKey,
    verify::{GatewayClient, TrustBundle},
};

/// How long a handshake may take. On a Pod network it takes milliseconds.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// How many handshakes may be open. Each holds a socket and some kilobytes.
const HANDSHAKES: usize = 256;

/// How long a connection may live: then its client shakes hands again, and so shows a certificate that is valid
/// and trusted now. For tonic's `max_connection_age`, which lets running calls finish.
pub const MAX_AGE: Duration = Duration::from_secs(20 * 60);

/// A pause after an error of accepting itself, which is nearly always a lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// A stream of connections whose client is a gateway. It never ends and never fails.
#[derive(Debug)]
pub struct Incoming {
    listener: TcpListener,
    acceptor: Acceptor,
    handshakes: Crowd<Option<PeerStream>>,
    pause: Option<Pin<Box<Sleep>>>,
    counts: Arc<Counts>,
}

/// How handshakes ended, since the start.
#[derive(Debug, Default)]
pub struct Counts {
    accepted: AtomicU64,
    failed: AtomicU64,
    timed_out: AtomicU64,
    displaced: AtomicU64,
}

/// A connection of a gateway.
#[derive(Debug)]
pub struct PeerStream {
    tls: TlsStream<TcpStream>,
    remote: SocketAddr,
}

/// What is known of the other side; in the extensions of each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerInfo {
    /// Where the gateway calls from.
    pub remote: SocketAddr,
}

#[derive(Clone)]
struct Acceptor(TlsAcceptor);

/// TLS of the hop's server: TLS 1.3 and h2 only, own key, clients of `trust` only.
///
/// # Errors
/// None that input could cause; the TLS library's own checks are passed on.
pub fn server_config(own: &OwnKey, trust: TrustBundle) -> Result<Arc<ServerConfig>, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(GatewayClient::new(trust)))
        .with_cert_resolver(Arc::new(Fixed(own.certified())));
    config.alpn_protocols = vec![H2.to_vec()];
    // A resumed session would outlive the removal of its CA from the bundle.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

// === impl Incoming ===

impl Incoming {
    /// Accepts from `listener` when polled.
    #[must_use]
    pub fn new(listener: TcpListener, config: Arc<ServerConfig>) -> Self {
        Self {
            listener,
            acceptor: Acceptor(TlsAcceptor::from(config)),
            handshakes: Crowd::new(HANDSHAKES),
            pause: None,
            counts: Arc::default(),
        }
    }

    /// How handshakes end; keep it before giving the stream away.
    #[must_use]
    pub fn counts(&self) -> Arc<Counts> {
        Arc::clone(&self.counts)
    }

    fn begin(&mut self, tcp: TcpStream, remote: SocketAddr) {
        let acceptor = self.acceptor.clone();
        let counts = Arc::clone(&self.counts);
        let displaced = self.handshakes.begin(async move {
            let shaken = timeout(HANDSHAKE, acceptor.accept(tcp)).await;
            counts.note(&shaken, remote);
            let tls = shaken.ok()?.ok()?;
            Some(PeerStream { tls, remote })
        });
        if displaced {
            self.counts.displaced.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Stream for Incoming {
    type Item = io::Result<PeerStream>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match self.handshakes.poll_next(cx) {
                Poll::Ready(Some(Some(stream))) => return Poll::Ready(Some(Ok(stream))),
                // Failed, which concerns that one connection.
                Poll::Ready(Some(None)) => continue,
                // None: no handshake is open.
                Poll::Ready(None) | Poll::Pending => {}
            }
            if let Some(pause) = self.pause.as_mut() {
                ready!(pause.as_mut().poll(cx));
                self.pause = None;
            }
            match ready!(self.listener.poll_accept(cx)) {
                Ok((tcp, remote)) => self.begin(tcp, remote),
                // The client went away between arriving and being accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, "the hop cannot accept a connection");
                    self.pause = Some(Box::pin(sleep(PAUSE)));
                }
            }
        }
    }
}

// === impl Acceptor ===

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Acceptor")
    }
}

impl Acceptor {
    async fn accept(&self, tcp: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        tcp.set_nodelay(true)?;
        let tls = self.0.accept(tcp).await?;
        if tls.get_ref().1.alpn_protocol() == Some(H2) {
            Ok(tls)
        } else {
            Err(io::Error::other("the client does not speak h2"))
        }
    }
}

// === impl Counts ===

impl Counts {
    /// Handshakes that ended well.
    #[must_use]
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Handshakes that failed: no TLS, no or a wrong certificate, hung up.
    #[must_use]
    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }

    /// Handshakes that were not done in time.
    #[must_use]
    pub fn timed_out(&self) -> u64 {
        self.timed_out.load(Ordering::Relaxed)
    }

    /// Handshakes that gave way to newer ones.
    #[must_use]
    pub fn displaced(&self) -> u64 {
        self.displaced.load(Ordering::Relaxed)
    }

    fn note<T, E>(&self, shaken: &Result<io::Result<T>, E>, remote: SocketAddr) {
        let count = match shaken {
            Ok(Ok(_)) => &self.accepted,
            Ok(Err(error)) => {
                // Debug only: a port scan must not fill the log.
                tracing::debug!(%remote, %error, "a handshake on the hop failed");
                &self.failed
            }
            Err(_) => {
                tracing::debug!(%remote, "a handshake on the hop took too long");
                &self.timed_out
            }
        };
        count.fetch_add(1, Ordering::Relaxed);
    }
}

// === impl PeerStream ===

impl Connected for PeerStream {
    type ConnectInfo = PeerInfo;

    fn connect_info(&self) -> PeerInfo {
        PeerInfo { remote: self.remote }
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_read(cx, buf)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tls).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tls).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.tls.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_shutdown(cx)
    }
}

/// The one certificate of this process, whatever name the client asks for.
#[derive(Debug)]
struct Fixed(Arc<CertifiedKey>);

impl ResolvesServerCert for Fixed {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}
