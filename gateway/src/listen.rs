//! Accepts callers: TCP, TLS with the newest good certificate, then Pingora. Bounded, and drained.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use kruntimes_ops::{drain::Drain, tls_files::TlsFiles};
use pingora_core::{
    apps::ServerApp as _, listeners::tls::Acceptor, protocols::l4::stream::Stream as L4Stream,
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
    args::{CONNECTIONS, TlsVersion},
    front::{Connection, Front},
};

pub mod stream;

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
        let room = Arc::new(Semaphore::new(CONNECTIONS));
        let (stop, stopping) = watch::channel(false);
        let stopped = drain.stopping();
        loop {
            let accepted = tokio::select! {
                () = stopped.cancelled() => break,
                accepted = self.socket.accept() => accepted,
            };
            let (tcp, remote) = match accepted {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    tracing::warn!(%error, "a caller's connection cannot be accepted");
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
                self.front.metrics().shaken("refused");
                continue;
            };
            let acceptor = Arc::clone(&acceptor);
            let front = Arc::clone(&self.front);
            let stopping = stopping.clone();
            drain.spawn("connection", async move {
                serve_one(tcp, remote, &acceptor, front, stopping).await;
                drop(permit);
            });
        }
        // Closing the socket comes first, so that nobody gets a connection that would not be served.
        drop(self.socket);
        stop.send_replace(true);
        // Connections must go on seeing the value: the sender lives as long as they do.
        drop(stopping);
        stop.closed().await;
    }
}

async fn serve_one(
    tcp: TcpStream,
    remote: SocketAddr,
    acceptor: &Acceptor,
    front: Arc<Front>,
    stopping: watch::Receiver<bool>,
) {
    if tcp.set_nodelay(true).is_err() {
        return;
    }
    let patience = front.patience();
    let tls = match timeout(patience.handshake, acceptor.tls_handshake(L4Stream::from(tcp))).await {
        Ok(Ok(tls)) => tls,
        Ok(Err(error)) => {
            // Debug only: a port scan must not fill the log.
            tracing::debug!(%remote, %error, "a caller's handshake failed");
            front.metrics().shaken("failed");
            return;
        }
        Err(_) => {
            front.metrics().shaken("timeout");
            return;
        }
    };
    front.metrics().shaken("ok");
    let (stream, arrivals) = stream::Noting::new(Box::new(tls), patience.idle);
    let connection = Arc::new(Connection::new(front, arrivals, remote));
    let mut next: Option<pingora_core::protocols::Stream> = Some(Box::new(stream));
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
    let mut active = connection.active();
    loop {
        if active.wait_for(|calls| *calls == 0).await.is_err() {
            return;
        }
        if timeout(GOODBYE, active.wait_for(|calls| *calls > 0))
            .await
            .is_err()
        {
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
