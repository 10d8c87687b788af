//! Where runtimed connects: a Unix socket that only other PID namespaces may use, or
//! a TCP address.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use futures::{Stream, stream};
use kruntimes_proto::local::LocalStream;
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tracing::warn;

/// Before the next try to accept after an error, so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// `--listen`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    /// A path.
    Unix(PathBuf),
    /// A host's own address; port 0 takes any free one.
    Tcp(SocketAddr),
}

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let help = || format!("`{text}` is no address: write unix:///path/to/socket or tcp://127.0.0.1:PORT");
        if let Some(path) = text.strip_prefix("unix://") {
            return if path.starts_with('/') {
                Ok(Self::Unix(PathBuf::from(path)))
            } else {
                Err(help())
            };
        }
        let address = text.strip_prefix("tcp://").ok_or_else(help)?;
        address.parse().map(Self::Tcp).map_err(|_| help())
    }
}

/// Binds the socket, replacing one that a dead server left behind.
///
/// # Errors
/// When another server listens there, or the path cannot be used.
pub fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            return Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                "another server listens there",
            ));
        }
        fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    // Both containers of the Pod run as the same user; nobody else needs it.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Connections that may use the API. With `check_peer` a process of this PID
/// namespace, which is where functions run, is turned away (C-5.1).
///
/// Never an error and never the end: one connection that fails, or a moment without
/// free descriptors, is no reason to stop serving.
pub fn unix_connections(
    listener: UnixListener,
    check_peer: bool,
) -> impl Stream<Item = io::Result<LocalStream>> {
    stream::unfold((listener, false), move |(listener, mut told)| async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) if !check_peer || is_foreign(&stream) => {
                    match stream.into_std().and_then(LocalStream::new) {
                        Ok(stream) => return Some((Ok(stream), (listener, told))),
                        Err(error) => accept_failed(&error).await,
                    }
                }
                // Told once: a function could fill the log otherwise.
                Ok(_) if told => {}
                Ok(_) => {
                    warn!(
                        "a process of this container tried to use the server's API; --peer-check off allows it"
                    );
                    told = true;
                }
                Err(error) => accept_failed(&error).await,
            }
        }
    })
}

/// Takes a TCP port.
///
/// # Errors
/// When the address cannot be used.
pub async fn bind_tcp(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await?;
    let bound = listener.local_addr()?;
    Ok((listener, bound))
}

/// TCP connections; there is no telling who is at the other end. Never an error and
/// never the end, as above.
pub fn tcp_connections(listener: TcpListener) -> impl Stream<Item = io::Result<TcpStream>> {
    stream::unfold(listener, |listener| async move {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    // Answers are small: waiting to fill a segment would cost 40 ms.
                    let _ = stream.set_nodelay(true);
                    return Some((Ok(stream), listener));
                }
                Err(error) => accept_failed(&error).await,
            }
        }
    })
}

async fn accept_failed(error: &io::Error) {
    warn!(%error, "cannot accept a connection");
    tokio::time::sleep(ACCEPT_PAUSE).await;
}

/// The kernel shows a peer of another PID namespace as process 0.
fn is_foreign(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.pid() == Some(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_says_what_it_is() {
        assert_eq!(
            "unix:///run/a.sock".parse(),
            Ok(ListenAddress::Unix("/run/a.sock".into()))
        );
        assert_eq!(
            "tcp://127.0.0.1:0".parse(),
            Ok(ListenAddress::Tcp(([127, 0, 0, 1], 0).into()))
        );
        for bad in [
            "",
            "/run/a.sock",
            "unix://relative",
            "http://127.0.0.1:1",
            "tcp://localhost",
        ] {
            let error = bad.parse::<ListenAddress>().unwrap_err();
            assert!(error.contains("unix:///path"), "{error}");
        }
    }

    #[tokio::test]
    async fn a_socket_left_by_a_dead_server_is_replaced_and_a_live_one_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.sock");
        let live = bind_unix(&path).unwrap();
        assert_eq!(bind_unix(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        drop(live);
        assert!(path.exists());
        bind_unix(&path).unwrap();
    }
}
