//! The connection to the Runtime Server: made when it is needed, and again when it was lost.
//!
//! No pings are sent: servers in other languages answer them with GOAWAY.

use std::{
    fmt, io,
    path::PathBuf,
    pin::Pin,
    str::FromStr,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{FutureExt as _, future::BoxFuture};
use http::{Request, Response, uri::Authority};
use kruntimes_peer::unary::{NeverSent, Settings, UnaryChannel};
use kruntimes_proto::{limits, local::LocalStream};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::Mutex,
    time::timeout,
};
use tonic::{Status, body::Body};
use tower::Service;

/// Connecting within one Pod takes microseconds, or the server is not there.
const CONNECT: Duration = Duration::from_secs(2);

/// A message and some more, so that it needs no update of a window on its way.
const WINDOW: u32 = 4 * 1024 * 1024;

/// Where the server listens: `--server`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerAddress {
    /// A Unix socket.
    Unix(PathBuf),
    /// HOST:PORT on the Pod's loopback.
    Tcp(Authority),
}

/// Clones share one connection.
#[derive(Clone)]
pub struct ServerChannel {
    shared: Arc<Shared>,
}

/// A stream to the server, whatever kind it is.
pub trait Io: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Io for T {}

type Connect = Box<dyn Fn() -> BoxFuture<'static, io::Result<Box<dyn Io>>> + Send + Sync>;

struct Shared {
    connect: Connect,
    authority: Authority,
    open: Mutex<Option<UnaryChannel>>,
}

// === impl ServerAddress ===

impl FromStr for ServerAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unix = || {
            let path = text.strip_prefix("unix://")?;
            (path.starts_with('/') && path.len() > 1).then(|| Self::Unix(path.into()))
        };
        let tcp = || {
            let authority: Authority = text.strip_prefix("http://")?.parse().ok()?;
            let local = ["127.0.0.1", "localhost", "[::1]"].contains(&authority.host());
            (local && authority.port().is_some()).then_some(Self::Tcp(authority))
        };
        unix().or_else(tcp).ok_or_else(|| {
            "write unix:///path/of/socket or http://127.0.0.1:PORT; the server is in this Pod".to_owned()
        })
    }
}

// === impl ServerChannel ===

impl ServerChannel {
    /// Connects when first used.
    #[must_use]
    pub fn new(address: ServerAddress) -> Self {
        Self::by(move || {
            let address = address.clone();
            async move {
                Ok(match address {
                    ServerAddress::Unix(path) => Box::new(LocalStream::connect(&path).await?) as Box<dyn Io>,
                    ServerAddress::Tcp(authority) => {
                        let socket = TcpStream::connect(authority.as_str()).await?;
                        socket.set_nodelay(true)?;
                        Box::new(socket)
                    }
                })
            }
        })
    }

    /// Connects with `connect`, for a server in the same process.
    #[must_use]
    pub fn by<F>(connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = io::Result<Box<dyn Io>>> + Send + 'static,
    {
        Self {
            shared: Arc::new(Shared {
                connect: Box::new(move || connect().boxed()),
                authority: Authority::from_static("runtime-server"),
                open: Mutex::default(),
            }),
        }
    }

    /// The connection, which is made when there is none.
    ///
    /// # Errors
    /// When it cannot be made.
    pub async fn get(&self) -> Result<UnaryChannel, NeverSent> {
        self.shared.channel().await
    }
}

impl fmt::Debug for ServerChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerChannel").finish_non_exhaustive()
    }
}

impl Service<Request<Body>> for ServerChannel {
    type Response = Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move { shared.channel().await?.call(request).await })
    }
}

// === impl Shared ===

impl Shared {
    async fn channel(&self) -> Result<UnaryChannel, NeverSent> {
        let mut open = self.open.lock().await;
        if let Some(channel) = &*open
            && !channel.is_over()
        {
            return Ok(channel.clone());
        }
        *open = None;
        let channel = match timeout(CONNECT, self.connect()).await {
            Ok(Ok(channel)) => channel,
            Ok(Err(error)) => return Err(NeverSent(error.to_string())),
            Err(_) => return Err(NeverSent(format!("it accepts nobody within {CONNECT:?}"))),
        };
        *open = Some(channel.clone());
        Ok(channel)
    }

    async fn connect(&self) -> io::Result<UnaryChannel> {
        let settings = Settings {
            answer: limits::MESSAGE_BYTES,
            stream_window: WINDOW,
            connection_window: WINDOW,
            ping: None,
            ..Settings::default()
        };
        let stream = (self.connect)().await?;
        Ok(UnaryChannel::open(stream, &self.authority, settings))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_is_in_this_pod() {
        for good in [
            "unix:///run/kruntimes/runtime.sock",
            "http://127.0.0.1:8080",
            "http://[::1]:80",
        ] {
            assert!(good.parse::<ServerAddress>().is_ok(), "{good}");
        }
        for bad in [
            "",
            "unix:///",
            "unix://rel",
            "http://10.0.0.1:80",
            "http://127.0.0.1",
            "https://127.0.0.1:1",
            "127.0.0.1:1",
        ] {
            assert!(bad.parse::<ServerAddress>().is_err(), "{bad}");
        }
    }
}
