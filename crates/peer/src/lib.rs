//! Who is at the other end of the hop: pinned keys, client identities, the TLS that checks them, and the channel
//! that carries a call ([`unary`], also within a Pod).
//!
//! ```text
//! gateway ── dial ── TLS 1.3, HTTP/2 ── accept ── runtimed
//!    shows a certificate of the peer CA with      shows a self-signed certificate;
//!    URI SAN spiffe://kruntimes.io/gateway        its key's SHA-256 is in Run.status.owner.peerKey
//! ```
//!
//! Each side checks the other before a byte of a call, and so of a token, is sent (contract 4).
//! The process installs no provider for this crate: every configuration here names ring itself.

pub mod accept;
pub mod crowd;
pub mod dial;
pub mod identity;
pub mod key;
pub mod unary;
pub mod verify;

pub use accept::{Incoming, PeerInfo};
pub use crowd::Crowd;
pub use dial::{AddressRule, DialError, Dialer};
pub use identity::RotatingIdentity;
pub use key::{OwnKey, PeerKey};
pub use unary::{UnaryChannel, never_sent};
pub use verify::{GatewayClient, PinnedServer, TrustBundle};

/// The URI in the client certificate of every gateway (contract 4).
pub const GATEWAY_URI: &str = "spiffe://kruntimes.io/gateway";

/// The protocol of the hop, in ALPN's spelling.
const H2: &[u8] = b"h2";
