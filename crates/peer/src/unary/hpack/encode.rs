//! Writes headers, without Huffman coding.
//!
//! On a connection within a cluster the bytes that it saves cost more than they are worth: coding a token of 900
//! bytes takes as long as encrypting it, and reading it again longer.

use bytes::{BufMut as _, BytesMut};

use super::{ENTRY_BYTES, Field, KNOWN, Keep, TABLE_BYTES};

/// Headers that may be remembered; each list is short, so that looking into all is cheap.
const ENTRIES: usize = 32;

/// Writes lists of headers for one connection, and knows what its other side remembers.
///
/// Nothing is ever forgotten there: when the table is full, no more is added to it.
#[derive(Debug, Default)]
pub(crate) struct Encoder {
    /// Oldest first.
    entries: Vec<(Box<str>, Box<[u8]>)>,
    bytes: usize,
    /// The other side has given less room than what is used: from then on nothing is remembered.
    spent: Spent,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Spent {
    #[default]
    No,
    /// It is to be told with the next list.
    Untold,
    Told,
}

// === impl Encoder ===

impl Encoder {
    /// The other side keeps tables of at most `bytes`.
    pub(crate) fn limit(&mut self, bytes: usize) {
        if bytes < TABLE_BYTES && self.spent == Spent::No {
            self.entries = Vec::new();
            self.spent = Spent::Untold;
        }
    }

    /// Begins a list.
    pub(crate) fn begin(&mut self, out: &mut BytesMut) {
        if self.spent == Spent::Untold {
            // A table of no bytes (RFC 7541, section 6.3).
            out.put_u8(0x20);
            self.spent = Spent::Told;
        }
    }

    /// Adds one header.
    pub(crate) fn put(&mut self, out: &mut BytesMut, field: Field<'_>) {
        if field.keep == Keep::Always
            && let Some(at) = self.remembered(field)
        {
            return integer(out, 0x80, 7, at);
        }
        if field.keep != Keep::Never
            && let Some(at) = known(|(name, value)| *name == field.name && value.as_bytes() == field.value)
        {
            return integer(out, 0x80, 7, at);
        }
        let (first, bits) = match field.keep {
            Keep::Always if self.remember(field) => (0x40, 6),
            Keep::Always | Keep::No => (0, 4),
            Keep::Never => (0x10, 4),
        };
        match known(|(name, _)| *name == field.name) {
            Some(at) => integer(out, first, bits, at),
            None => {
                out.put_u8(first);
                string(out, field.name.as_bytes());
            }
        }
        string(out, field.value);
    }

    /// Its place in the table of both sides.
    fn remembered(&self, field: Field<'_>) -> Option<usize> {
        let same = |(name, value): &(Box<str>, Box<[u8]>)| {
            value.len() == field.value.len() && **value == *field.value && **name == *field.name
        };
        let at = self.entries.iter().rposition(same)?;
        Some(KNOWN.len() + self.entries.len() - at)
    }

    fn remember(&mut self, field: Field<'_>) -> bool {
        let bytes = self.bytes + field.name.len() + field.value.len() + ENTRY_BYTES;
        if self.spent != Spent::No || bytes > TABLE_BYTES || self.entries.len() == ENTRIES {
            return false;
        }
        self.bytes = bytes;
        self.entries.push((field.name.into(), field.value.into()));
        true
    }
}

/// The place in the table that everybody has, from 1.
fn known(is: impl Fn(&(&str, &str)) -> bool) -> Option<usize> {
    KNOWN.iter().position(is).map(|at| at + 1)
}

/// A number behind the first bits of a byte (RFC 7541, section 5.1).
fn integer(out: &mut BytesMut, first: u8, bits: u32, number: usize) {
    let most = (1_u8 << bits) - 1;
    if let Ok(small) = u8::try_from(number)
        && small < most
    {
        return out.put_u8(first | small);
    }
    out.put_u8(first | most);
    let mut left = number - usize::from(most);
    while left >= 0x80 {
        out.put_u8(0x80 | (left & 0x7f) as u8);
        left >>= 7;
    }
    out.put_u8(left as u8);
}

/// A text as it is.
fn string(out: &mut BytesMut, text: &[u8]) {
    integer(out, 0, 7, text.len());
    out.put_slice(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(name: &'static str, value: &'static str, keep: Keep) -> Field<'static> {
        Field {
            name,
            value: value.as_bytes(),
            keep,
        }
    }

    fn put(encoder: &mut Encoder, field: Field<'_>) -> Vec<u8> {
        let mut out = BytesMut::new();
        encoder.begin(&mut out);
        encoder.put(&mut out, field);
        out.to_vec()
    }

    /// RFC 7541, appendix C.1 and C.2.
    #[test]
    fn numbers_and_headers_are_written_as_the_standard_does() {
        for (number, bits, bytes) in [
            (10, 5, &[0x0a][..]),
            (1337, 5, &[0x1f, 0x9a, 0x0a]),
            (42, 8, &[0x2a]),
            (31, 5, &[0x1f, 0]),
        ] {
            let mut out = BytesMut::new();
            integer(&mut out, 0, bits.min(7), number);
            assert_eq!(out.as_ref(), bytes, "{number}");
        }
        let encoder = &mut Encoder::default();
        let custom = field("custom-key", "custom-header", Keep::Always);
        assert_eq!(put(encoder, custom), b"\x40\x0acustom-key\x0dcustom-header");
        assert_eq!(put(encoder, custom), [0xbe], "the newest entry is 62");
        assert_eq!(
            put(encoder, field("password", "secret", Keep::Never)),
            b"\x10\x08password\x06secret"
        );
        assert_eq!(put(encoder, field(":method", "POST", Keep::No)), [0x83]);
        assert_eq!(
            put(encoder, field("authorization", "a", Keep::Never)),
            [0x1f, 8, 1, b'a']
        );
        put(encoder, field("another", "one", Keep::Always));
        assert_eq!(put(encoder, custom), [0xbf]);
    }

    #[test]
    fn a_table_that_is_full_or_small_takes_no_more() {
        let encoder = &mut Encoder::default();
        let long = "x".repeat(2000).leak();
        for (name, first) in [("a", 0x40), ("b", 0x40), ("c", 0)] {
            assert_eq!(put(encoder, field(name, long, Keep::Always))[0], first, "{name}");
        }
        let custom = field("custom-key", "custom-header", Keep::Always);
        encoder.limit(TABLE_BYTES);
        assert_eq!(put(encoder, field("a", long, Keep::Always)), [0xbf]);
        encoder.limit(0);
        assert_eq!(put(encoder, custom)[..2], [0x20, 0]);
        assert_eq!(put(encoder, custom)[0], 0, "it is told once");
    }
}
