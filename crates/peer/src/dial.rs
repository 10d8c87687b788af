//! One connection to the owner of a Run: exactly that key, HTTP/2 over TLS 1.3.
//!
//! A channel made here never connects again by itself. A lost connection is an error that says so
//! ([`crate::never_sent`]), because only the caller knows whether the route has moved (C-3.7).

use std::{
    fmt,
    io::{self, Cursor},
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::uri::Authority;
use rustls::{
    ClientConfig,
    client::{ResolvesClientCert, Resumption},
    crypto::ring::default_provider,
};
use rustls_pki_types::ServerName;
use thiserror::Error;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::{Instant, timeout_at},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{
    H2,
    key::PeerKey,
    unary::{Settings, UnaryChannel},
    verify::PinnedServer,
};

/// The only port that a gateway dials, unless local owners are allowed (contract 4).
pub const HOP_PORT: u16 = 9443;

/// Which addresses may be dialled (contract 4).
///
/// An address comes from a Run's status. Whoever can write one must not be able to make the
/// gateway knock at the node's own services.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressRule {
    /// No loopback, link-local, multicast, broadcast or unspecified address, and only [`HOP_PORT`].
    PodsOnly,
    /// Loopback and every port too: for development and tests on one machine.
    AllowLocal,
}

/// Why an address is not dialled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum AddressError {
    /// Not the address of a Pod.
    #[error("{0} is a {1} address, which no Pod has")]
    Kind(IpAddr, &'static str),
    /// Not the hop's port.
    #[error("port {0} is not the hop's port {HOP_PORT}")]
    Port(u16),
}

/// Why there is no connection. Whatever the variant: nothing of a call was sent.
#[derive(Debug, Error)]
pub enum DialError {
    /// Not an address that may be dialled.
    #[error("the owner's address is refused: {0}")]
    Address(#[from] AddressError),
    /// There is no client certificate yet.
    #[error("the client certificate of the hop is not there yet")]
    NoIdentity,
    /// TCP did not connect.
    #[error("connecting to the owner: {0}")]
    Connect(#[source] io::Error),
    /// TLS failed; a wrong key ends here.
    #[error("handshake with the owner: {0}")]
    Handshake(#[source] io::Error),
    /// The owner ended the connection after the handshake: it does not accept our certificate.
    #[error("the owner refuses this client: {0}")]
    Refused(#[source] io::Error),
    /// Not done in time.
    #[error("no connection to the owner within {0:?}")]
    Timeout(Duration),
}

/// Makes connections to owners.
#[derive(Clone)]
pub struct Dialer {
    identity: Arc<dyn ResolvesClientCert>,
    rule: AddressRule,
    timeout: Duration,
}

// === impl AddressRule ===

impl AddressRule {
    /// Whether `address` may be dialled.
    ///
    /// # Errors
    /// Says what kind of address it is.
    pub fn check(self, address: SocketAddr) -> Result<(), AddressError> {
        // An IPv4 address written as IPv6 is judged as what it is.
        let ip = address.ip().to_canonical();
        let never = match ip {
            IpAddr::V4(v4) if v4.is_broadcast() => Some("broadcast"),
            IpAddr::V4(v4) if v4.is_link_local() => Some("link-local"),
            IpAddr::V6(v6) if v6.is_unicast_link_local() => Some("link-local"),
            ip if ip.is_unspecified() => Some("unspecified"),
            ip if ip.is_multicast() => Some("multicast"),
            _ => None,
        };
        let local = ip.is_loopback().then_some("loopback");
        match (self, never, local) {
            (_, Some(kind), _) | (Self::PodsOnly, None, Some(kind)) => {
                Err(AddressError::Kind(address.ip(), kind))
            }
            (Self::PodsOnly, None, None) if address.port() != HOP_PORT => {
                Err(AddressError::Port(address.port()))
            }
            _ => Ok(()),
        }
    }
}

// === impl Dialer ===

impl Dialer {
    /// Shows what `identity` resolves to; each attempt takes at most `timeout`, all steps together.
    #[must_use]
    pub fn new(identity: Arc<dyn ResolvesClientCert>, rule: AddressRule, timeout: Duration) -> Self {
        Self {
            identity,
            rule,
            timeout,
        }
    }

    /// Connects to the owner at `address` if it holds exactly the key `pin`.
    ///
    /// It returns once the owner has spoken first: with TLS 1.3 a client is done before the server
    /// has judged the client's certificate, and a refusal must be known before a call is sent.
    ///
    /// # Errors
    /// Nothing of a call was sent, whatever the error.
    pub async fn dial(&self, address: SocketAddr, pin: &PeerKey) -> Result<UnaryChannel, DialError> {
        self.rule.check(address)?;
        if !self.identity.has_certs() {
            return Err(DialError::NoIdentity);
        }
        let deadline = Instant::now() + self.timeout;
        let late = |_| DialError::Timeout(self.timeout);
        let stream = timeout_at(deadline, self.connect(address, *pin))
            .await
            .map_err(late)??;
        let authority = Authority::try_from(address.to_string())
            .map_err(|error| DialError::Connect(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
        Ok(UnaryChannel::open(stream, &authority, Settings::default()))
    }

    async fn connect(&self, address: SocketAddr, pin: PeerKey) -> Result<Primed, DialError> {
        let tcp = TcpStream::connect(address).await.map_err(DialError::Connect)?;
        tcp.set_nodelay(true).map_err(DialError::Connect)?;
        let config = self
            .tls(pin)
            .map_err(|error| DialError::Handshake(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
        let mut tls = TlsConnector::from(Arc::new(config))
            // An address instead of a name: no SNI is sent, the key is what is checked.
            .connect(ServerName::IpAddress(address.ip().into()), tcp)
            .await
            .map_err(DialError::Handshake)?;
        if tls.get_ref().1.alpn_protocol() != Some(H2) {
            let error = io::Error::new(io::ErrorKind::InvalidData, "the owner does not speak h2");
            return Err(DialError::Handshake(error));
        }
        let mut first = Vec::with_capacity(256);
        match tls.read_buf(&mut first).await {
            Ok(0) => Err(DialError::Refused(io::ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(DialError::Refused(error)),
            Ok(_) => Ok(Primed {
                first: Cursor::new(first),
                tls,
            }),
        }
    }

    fn tls(&self, pin: PeerKey) -> Result<ClientConfig, rustls::Error> {
        let mut config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(PinnedServer::new(pin)))
            .with_client_cert_resolver(Arc::clone(&self.identity));
        config.alpn_protocols = vec![H2.to_vec()];
        // A resumed session would skip the check of the key.
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer")
            .field("identity", &self.identity)
            .field("rule", &self.rule)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// A connection whose first bytes were read already, to see that the other side speaks.
struct Primed {
    first: Cursor<Vec<u8>>,
    tls: TlsStream<TcpStream>,
}

// === impl Primed ===

impl AsyncRead for Primed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let unread = self.first.position() < self.first.get_ref().len() as u64;
        if unread {
            Pin::new(&mut self.first).poll_read(cx, buf)
        } else {
            Pin::new(&mut self.tls).poll_read(cx, buf)
        }
    }
}

impl AsyncWrite for Primed {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: AddressRule, address: &str) -> Result<(), AddressError> {
        rule.check(address.parse().expect(address))
    }

    /// Contract 4
    #[test]
    fn only_pods_on_the_hop_s_port() {
        for good in ["10.1.2.3:9443", "192.168.0.9:9443", "[fd00::9]:9443"] {
            assert_eq!(check(AddressRule::PodsOnly, good), Ok(()), "{good}");
        }
        for bad in [
            "127.0.0.1:9443",
            "127.9.9.9:9443",
            "[::1]:9443",
            "[::ffff:127.0.0.1]:9443",
            "169.254.169.254:9443",
            "[::ffff:169.254.169.254]:9443",
            "[fe80::1]:9443",
            "224.0.0.1:9443",
            "[ff02::1]:9443",
            "0.0.0.0:9443",
            "[::]:9443",
            "255.255.255.255:9443",
            "10.1.2.3:443",
            "10.1.2.3:0",
        ] {
            assert!(check(AddressRule::PodsOnly, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn local_owners_lift_loopback_and_port_only() {
        for good in ["127.0.0.1:1234", "[::1]:9443", "10.1.2.3:80"] {
            assert_eq!(check(AddressRule::AllowLocal, good), Ok(()), "{good}");
        }
        for bad in ["169.254.169.254:80", "0.0.0.0:9443", "224.0.0.1:1"] {
            assert!(check(AddressRule::AllowLocal, bad).is_err(), "{bad}");
        }
    }
}
