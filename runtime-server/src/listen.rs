//! Where runtimed connects: a Unix socket that only other PID namespaces may use, or
//! a TCP address.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::{FileTypeExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    str::FromStr,
};

use futures::{Stream, StreamExt as _};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_stream::wrappers::{TcpListenerStream, UnixListenerStream};
use tracing::warn;

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
pub fn unix_connections(
    listener: UnixListener,
    check_peer: bool,
) -> impl Stream<Item = io::Result<UnixStream>> {
    UnixListenerStream::new(listener).filter(move |connection| {
        let refused = check_peer && connection.as_ref().is_ok_and(|stream| !is_foreign(stream));
        if refused {
            warn!("a process of this container tried to use the server's API; --peer-check off allows it");
        }
        std::future::ready(!refused)
    })
}

/// TCP connections; there is no telling who is at the other end.
///
/// # Errors
/// When the address cannot be used.
pub async fn bind_tcp(address: SocketAddr) -> io::Result<(TcpListenerStream, SocketAddr)> {
    let listener = TcpListener::bind(address).await?;
    let bound = listener.local_addr()?;
    Ok((TcpListenerStream::new(listener), bound))
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
