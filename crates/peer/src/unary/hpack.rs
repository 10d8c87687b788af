//! Lists of headers as HTTP/2 writes them (RFC 7541).

use http::{HeaderMap, HeaderName, HeaderValue};

pub(super) mod decode;
pub(super) mod encode;
mod huffman;

/// What of a header may be remembered on its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// All of it: the same comes again with most calls, and then takes one byte.
    Always,
    /// Nothing: it comes once.
    No,
    /// Nothing, and nobody on the way may do so either: it is a secret (RFC 7541, section 7.1.3).
    Never,
}

/// A header to be sent.
#[derive(Debug, Clone, Copy)]
pub struct Field<'a> {
    /// In lower case.
    pub name: &'a str,
    /// Visible ASCII.
    pub value: &'a [u8],
    /// Whether the connection remembers it.
    pub keep: Keep,
}

/// Headers that were received, in their order.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Fields(pub(super) Vec<(HeaderName, HeaderValue)>);

/// What each entry of a table costs besides its bytes (RFC 7541, section 4.1).
const ENTRY_BYTES: usize = 32;
/// Size of a table that nobody has changed (RFC 9113, section 6.5.2).
pub(super) const TABLE_BYTES: usize = 4096;

/// The table that everybody has (RFC 7541, appendix A).
#[rustfmt::skip]
const KNOWN: [(&str, &str); 61] = [
    (":authority", ""), (":method", "GET"), (":method", "POST"), (":path", "/"), (":path", "/index.html"),
    (":scheme", "http"), (":scheme", "https"), (":status", "200"), (":status", "204"), (":status", "206"),
    (":status", "304"), (":status", "400"), (":status", "404"), (":status", "500"), ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"), ("accept-language", ""), ("accept-ranges", ""), ("accept", ""),
    ("access-control-allow-origin", ""), ("age", ""), ("allow", ""), ("authorization", ""), ("cache-control", ""),
    ("content-disposition", ""), ("content-encoding", ""), ("content-language", ""), ("content-length", ""),
    ("content-location", ""), ("content-range", ""), ("content-type", ""), ("cookie", ""), ("date", ""), ("etag", ""),
    ("expect", ""), ("expires", ""), ("from", ""), ("host", ""), ("if-match", ""), ("if-modified-since", ""),
    ("if-none-match", ""), ("if-range", ""), ("if-unmodified-since", ""), ("last-modified", ""), ("link", ""),
    ("location", ""), ("max-forwards", ""), ("proxy-authenticate", ""), ("proxy-authorization", ""), ("range", ""),
    ("referer", ""), ("refresh", ""), ("retry-after", ""), ("server", ""), ("set-cookie", ""),
    ("strict-transport-security", ""), ("transfer-encoding", ""), ("user-agent", ""), ("vary", ""), ("via", ""),
    ("www-authenticate", ""),
];

// === impl Field ===

impl<'a> Field<'a> {
    /// One that comes again with most calls of its connection.
    #[must_use]
    pub const fn kept(name: &'a str, value: &'a str) -> Self {
        Self {
            name,
            value: value.as_bytes(),
            keep: Keep::Always,
        }
    }

    /// One that comes once.
    #[must_use]
    pub const fn once(name: &'a str, value: &'a [u8]) -> Self {
        Self {
            name,
            value,
            keep: Keep::No,
        }
    }

    /// One that nobody is to remember.
    #[must_use]
    pub const fn secret(name: &'a str, value: &'a [u8]) -> Self {
        Self {
            name,
            value,
            keep: Keep::Never,
        }
    }
}

// === impl Fields ===

impl Fields {
    /// The first value of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&HeaderValue> {
        let mut all = self.0.iter();
        all.find_map(|(key, value)| (key.as_str() == name).then_some(value))
    }

    /// The same as a map.
    #[must_use]
    pub fn into_map(self) -> HeaderMap {
        let mut map = HeaderMap::with_capacity(self.0.len());
        for (name, value) in self.0 {
            map.append(name, value);
        }
        map
    }
}
