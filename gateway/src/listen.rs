//! Accepts callers: TCP, TLS with the newest good certificate, then Pingora. Bounded, and drained.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use kruntimes_ops::{drain::Drain, tls_files::TlsFiles};
use kruntimes_peer::Crowd;
use pingora_core::{
    apps::ServerApp as _,
    listeners::tls::Acceptor,
    protocols::{Stream, l4::stream::Stream as L4Stream},
};
use rustls::{
    ServerConfig, SupportedProtocolVersion,
    crypto::ring::default_provider,
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};

use crate::{
    args::TlsVersion,
    front::{Connection, Front},
};

pub mod stream;

/// How many handshakes may be open, apart from the connections: slow ones give way to new ones and keep nobody
/// out (bug scenario 64).
const HANDSHAKES: usize = 512;
/// A pause after an error of accepting itself, which is nearly always a lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a connection without calls may take to say goodbye while the process stops.
const GOODBYE: Duration = Duration::from_secs(1);

/// Accepts on one socket.
pub struct Listener {
    /// The socket.
    pub socket: TcpListener,
    /// TLS.
    pub tls: Arc<ServerConfig>,
    /// What answers.
    pub front: Arc<Front>,
    /// How many connections may be open at once; handshakes have a bound of their own.
    pub connections: usize,
}

/// TLS for callers: HTTP/2 and HTTP/1.1, whatever certificate is newest when they come (C-3.12).
///
/// # Errors
/// None that input could cause; the TLS library's own checks are passed on.
pub fn server_config(
    certificates: TlsFiles<Arc<CertifiedKey>>,
    oldest: TlsVersion,
) -> Result<Arc<ServerConfig>, rustls::Error> {
    let versions: &[&'static SupportedProtocolVersion] = match oldest {
        TlsVersion::V1_2 => &[&rustls::version::TLS13, &rustls::version::TLS12],
        TlsVersion::V1_3 => &[&rustls::version::TLS13],
    };
    let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(versions)?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(Newest(certificates)));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

// === impl Listener ===

impl Listener {
    /// Accepts until the process stops; the connections go on until their calls are done.
    pub async fn serve(self, drain: Drain) {
        let acceptor = Arc::new(Acceptor::from_server_config(self.tls));
        let (stop, stopping) = watch::channel(false);
        let connections = Connections {
            front: self.front,
            room: Arc::new(Semaphore::new(self.connections)),
            stopping,
            drain,
        };
        let metrics = connections.front.metrics();
        let mut handshakes = Crowd::new(HANDSHAKES);
        let stopped = connections.drain.stopping();
        let mut complained = false;
        loop {
            let accepted = tokio::select! {
                () = stopped.cancelled() => break,
                Some(shaken) = handshakes.next() => {
                    connections.begin(shaken);
                    continue;
                }
                accepted = self.socket.accept() => accepted,
            };
            match accepted {
                Ok((tcp, remote)) => {
                    complained = false;
                    let shake =
                        shake_hands(tcp, remote, Arc::clone(&acceptor), Arc::clone(&connections.front));
                    if handshakes.begin(shake) {
                        metrics.shaken("displaced");
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Once, until one is accepted again.
                    if !std::mem::replace(&mut complained, true) {
                        tracing::warn!(%error, "callers' connections cannot be accepted");
                    }
                    sleep(PAUSE).await;
                }
            }
        }
        // Closing the socket comes first, so that nobody gets a connection that would not be served.
        drop(self.socket);
        stop.send_replace(true);
        let last = async {
            while let Some(shaken) = handshakes.next().await {
                connections.begin(shaken);
            }
        };
        // Those who do not end it soon have said nothing yet.
        let _ = timeout(GOODBYE, last).await;
        // Connections must go on seeing the value: the sender lives as long as they do.
        drop(connections);
        stop.closed().await;
    }
}

/// What each connection needs.
struct Connections {
    front: Arc<Front>,
    room: Arc<Semaphore>,
    stopping: watch::Receiver<bool>,
    drain: Drain,
}

/// A stream that speaks TLS, and who is at its other end; nothing when the handshake failed.
type Shaken = Option<(Stream, SocketAddr)>;

// === impl Connections ===

impl Connections {
    fn begin(&self, shaken: Shaken) {
        let Some((stream, remote)) = shaken else { return };
        let Ok(permit) = Arc::clone(&self.room).try_acquire_owned() else {
            self.front.metrics().shaken("refused");
            return;
        };
        self.front.metrics().shaken("ok");
        let (front, stopping) = (Arc::clone(&self.front), self.stopping.clone());
        self.drain.spawn("connection", async move {
            serve_one(stream, remote, front, stopping).await;
            drop(permit);
        });
    }
}

async fn shake_hands(
    tcp: TcpStream,
    remote: SocketAddr,
    acceptor: Arc<Acceptor>,
    front: Arc<Front>,
) -> Shaken {
    tcp.set_nodelay(true).ok()?;
    let shake = acceptor.tls_handshake(L4Stream::from(tcp));
    match timeout(front.patience().handshake, shake).await {
        Ok(Ok(tls)) => Some((Box::new(tls), remote)),
        Ok(Err(error)) => {
            // Debug only: a port scan must not fill the log.
            tracing::debug!(%remote, %error, "a caller's handshake failed");
            front.metrics().shaken("failed");
            None
        }
        Err(_) => {
            front.metrics().shaken("timeout");
            None
        }
    }
}

/// Serves one connection until it ends, or carries no call while the process stops.
pub async fn serve_one(
    stream: Stream,
    remote: SocketAddr,
    front: Arc<Front>,
    stopping: watch::Receiver<bool>,
) {
    let (stream, arrivals) = stream::Noting::new(stream, front.patience().head);
    let connection = Arc::new(Connection::new(front, arrivals, remote));
    let mut next: Option<Stream> = Some(Box::new(stream));
    let serve = async {
        while let Some(stream) = next.take() {
            next = connection.process_new(stream, &stopping).await;
        }
    };
    tokio::select! {
        () = serve => {}
        () = goodbye(&connection, stopping.clone()) => {}
    }
}

/// Returns once the process stops and the connection has carried no call for a moment. A client that never
/// hangs up must not keep the process alive.
async fn goodbye(connection: &Connection, mut stopping: watch::Receiver<bool>) {
    if stopping.wait_for(|stop| *stop).await.is_err() {
        return;
    }
    let active = connection.active();
    loop {
        active.until(|calls| calls == 0).await;
        if timeout(GOODBYE, active.until(|calls| calls > 0)).await.is_err() {
            return;
        }
    }
}

/// The newest good pair, at every handshake.
#[derive(Debug)]
struct Newest(TlsFiles<Arc<CertifiedKey>>);

impl ResolvesServerCert for Newest {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0.newest()?.value))
    }
}
