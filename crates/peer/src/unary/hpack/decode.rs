//! Reads headers.

use std::collections::VecDeque;

use bytes::{Buf as _, Bytes};
use http::{HeaderName, HeaderValue};

use super::{ENTRY_BYTES, Fields, KNOWN, TABLE_BYTES, huffman};
use crate::unary::frame::{Code, Violation};

/// Reads the lists of headers of one connection.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    /// Newest first.
    table: VecDeque<(Entry, usize)>,
    bytes: usize,
    /// How large the other side lets it become.
    room: Room,
}

#[derive(Debug)]
struct Room(usize);

/// One list.
#[derive(Debug, Default)]
pub(crate) struct List {
    /// `:status`.
    pub(crate) status: Option<u16>,
    pub(crate) fields: Fields,
    /// What is wrong with it; the connection goes on (RFC 9113, section 8.1.1).
    pub(crate) malformed: Option<&'static str>,
}

/// One header.
#[derive(Debug, Clone)]
enum Entry {
    Status(u16),
    Field(HeaderName, HeaderValue),
    Malformed(&'static str),
}

const SHORT: Violation = Code::COMPRESSION.because("a list of headers that is cut");

// === impl Decoder ===

impl Decoder {
    /// Reads a whole list. Of one that is longer than `limit` bytes nothing is kept.
    pub(crate) fn read(&mut self, mut block: &[u8], limit: usize) -> Result<List, Violation> {
        let mut list = List::default();
        let mut bytes = 0;
        let mut begun = false;
        while let Some(first) = block.first().copied() {
            let (entry, size) = match first {
                0x80.. => {
                    let at = integer(&mut block, 7)?;
                    self.at(at)?
                }
                0x40.. => {
                    let (entry, size) = self.literal(&mut block, 6)?;
                    self.remember(entry.clone(), size);
                    (entry, size)
                }
                0x20.. => {
                    let size = integer(&mut block, 5)?;
                    if begun || size > TABLE_BYTES {
                        return Err(Code::COMPRESSION.because("a change of the table that is not allowed"));
                    }
                    self.room = Room(size);
                    self.forget(size);
                    continue;
                }
                _ => self.literal(&mut block, 4)?,
            };
            begun = true;
            bytes += size;
            if bytes > limit {
                list.malformed = Some("its headers are too long");
                list.fields = Fields::default();
            } else {
                list.add(entry);
            }
        }
        Ok(list)
    }

    fn literal(&self, block: &mut &[u8], bits: u32) -> Result<(Entry, usize), Violation> {
        let name = match integer(block, bits)? {
            0 => Name::Text(string(block)?),
            at => self.name(at)?,
        };
        let value = string(block)?;
        let size = name.len() + value.len() + ENTRY_BYTES;
        Ok((name.with(value), size))
    }

    fn at(&self, at: usize) -> Result<(Entry, usize), Violation> {
        if let Some((name, value)) = at.checked_sub(1).and_then(|at| KNOWN.get(at)) {
            let entry =
                Name::Text(Bytes::from_static(name.as_bytes())).with(Bytes::from_static(value.as_bytes()));
            return Ok((entry, name.len() + value.len() + ENTRY_BYTES));
        }
        self.kept(at).cloned()
    }

    fn name(&self, at: usize) -> Result<Name, Violation> {
        if let Some((name, _)) = at.checked_sub(1).and_then(|at| KNOWN.get(at)) {
            return Ok(Name::Text(Bytes::from_static(name.as_bytes())));
        }
        Ok(match &self.kept(at)?.0 {
            Entry::Status(_) => Name::Text(Bytes::from_static(b":status")),
            Entry::Field(name, _) => Name::Header(name.clone()),
            Entry::Malformed(why) => Name::Malformed(why),
        })
    }

    fn kept(&self, at: usize) -> Result<&(Entry, usize), Violation> {
        at.checked_sub(KNOWN.len() + 1)
            .and_then(|at| self.table.get(at))
            .ok_or(Code::COMPRESSION.because("a header that nobody has sent"))
    }

    /// An entry that is larger than the table empties it (RFC 7541, section 4.4).
    fn remember(&mut self, entry: Entry, size: usize) {
        self.forget(self.room.0.saturating_sub(size));
        if size <= self.room.0 {
            self.bytes += size;
            self.table.push_front((entry, size));
        }
    }

    /// Leaves at most so many bytes.
    fn forget(&mut self, bytes: usize) {
        while self.bytes > bytes {
            let Some((_, size)) = self.table.pop_back() else {
                break;
            };
            self.bytes -= size;
        }
    }
}

impl Default for Room {
    fn default() -> Self {
        Self(TABLE_BYTES)
    }
}

// === impl List ===

impl List {
    fn add(&mut self, entry: Entry) {
        match entry {
            Entry::Malformed(why) => self.malformed = Some(why),
            Entry::Status(_) if self.status.is_some() || !self.fields.0.is_empty() => {
                self.malformed = Some("a status that is not the first header");
            }
            Entry::Status(status) => self.status = Some(status),
            Entry::Field(name, value) => self.fields.0.push((name, value)),
        }
    }
}

/// The name of a header that is being read.
enum Name {
    Text(Bytes),
    Header(HeaderName),
    Malformed(&'static str),
}

// === impl Name ===

impl Name {
    fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Header(name) => name.as_str().len(),
            Self::Malformed(_) => 0,
        }
    }

    fn with(self, value: Bytes) -> Entry {
        let name = match self {
            Self::Malformed(why) => return Entry::Malformed(why),
            Self::Header(name) => name,
            Self::Text(text) if &*text == b":status" => {
                return match std::str::from_utf8(&value).map(str::parse) {
                    Ok(Ok(status @ 100..1000)) => Entry::Status(status),
                    _ => Entry::Malformed("a status that is no number"),
                };
            }
            // This also refuses other names with a colon.
            Self::Text(text) => match HeaderName::from_lowercase(&text) {
                Ok(name) => name,
                Err(_) => return Entry::Malformed("the name of a header"),
            },
        };
        match HeaderValue::from_maybe_shared(value) {
            Ok(value) => Entry::Field(name, value),
            Err(_) => Entry::Malformed("the value of a header"),
        }
    }
}

// === reading ===

/// A number behind the first bits of a byte (RFC 7541, section 5.1).
fn integer(block: &mut &[u8], bits: u32) -> Result<usize, Violation> {
    let most = (1_u8 << bits) - 1;
    let mut number = usize::from(block.try_get_u8().map_err(|_| SHORT)? & most);
    if number < usize::from(most) {
        return Ok(number);
    }
    // More than 28 bits would be longer than any list.
    for shift in [0, 7, 14, 21] {
        let byte = block.try_get_u8().map_err(|_| SHORT)?;
        number += usize::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(Code::COMPRESSION.because("a number that is too large"))
}

/// A text, which is copied: what was received is not to be kept for it.
fn string(block: &mut &[u8]) -> Result<Bytes, Violation> {
    let coded = block.first().ok_or(SHORT)? & 0x80 != 0;
    let length = integer(block, 7)?;
    let text = block.get(..length).ok_or(SHORT)?;
    let text = if coded {
        huffman::decode(text).map_or_else(
            || Err(Code::COMPRESSION.because("a text that is badly coded")),
            |text| Ok(Bytes::from(text)),
        )
    } else {
        Ok(Bytes::copy_from_slice(text))
    };
    block.advance(length);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 1000;

    fn read(decoder: &mut Decoder, block: &[u8]) -> Result<List, Violation> {
        decoder.read(block, LIMIT)
    }

    fn texts(list: &List) -> Vec<(&str, &str)> {
        let text = |(name, value): &'_ (HeaderName, HeaderValue)| (name.as_str().to_owned(), value.clone());
        list.fields
            .0
            .iter()
            .map(|field| {
                let (name, value) = text(field);
                (&*name.leak(), &*value.to_str().unwrap().to_owned().leak())
            })
            .collect()
    }

    /// RFC 7541, appendix C.6, but with a table that nothing falls out of.
    #[test]
    fn answers_of_the_standard_are_read() {
        let decoder = &mut Decoder::default();
        let first = [
            0x48, 0x82, 0x64, 0x02, 0x58, 0x85, 0xae, 0xc3, 0x77, 0x1a, 0x4b, 0x61, 0x96, 0xd0, 0x7a, 0xbe,
            0x94, 0x10, 0x54, 0xd4, 0x44, 0xa8, 0x20, 0x05, 0x95, 0x04, 0x0b, 0x81, 0x66, 0xe0, 0x82, 0xa6,
            0x2d, 0x1b, 0xff, 0x6e, 0x91, 0x9d, 0x29, 0xad, 0x17, 0x18, 0x63, 0xc7, 0x8f, 0x0b, 0x97, 0xc8,
            0xe9, 0xae, 0x82, 0xae, 0x43, 0xd3,
        ];
        let list = read(decoder, &first).unwrap();
        assert_eq!(list.status, Some(302));
        let expected = [
            ("cache-control", "private"),
            ("date", "Mon, 21 Oct 2013 20:13:21 GMT"),
            ("location", "https://www.example.com"),
        ];
        assert_eq!(texts(&list), expected);
        let list = read(decoder, &[0x48, 0x83, 0x64, 0x0e, 0xff, 0xc1, 0xc0, 0xbf]).unwrap();
        assert_eq!((list.status, texts(&list)), (Some(307), expected.to_vec()));
    }

    #[test]
    fn what_falls_out_of_the_table_is_unknown() {
        let decoder = &mut Decoder::default();
        let literal = |name: u8, length: usize| {
            let mut block = vec![0x40, 1, name, 0x7f];
            let mut left = length - 0x7f;
            while left >= 0x80 {
                block.push(0x80 | (left & 0x7f) as u8);
                left >>= 7;
            }
            block.push(left as u8);
            block.resize(block.len() + length, b'v');
            block
        };
        for name in *b"ab" {
            assert!(read(decoder, &literal(name, 2000)).is_ok());
        }
        assert!(read(decoder, &[0xbf]).is_ok(), "both have room");
        assert!(read(decoder, &literal(b'c', 2000)).is_ok());
        assert!(read(decoder, &[0xbf]).is_ok(), "b and c");
        assert!(read(decoder, &[0xc0]).is_err(), "a is forgotten");
        assert!(read(decoder, &literal(b'd', 5000)).is_ok());
        assert!(
            read(decoder, &[0xbe]).is_err(),
            "one that is too large empties it"
        );
        assert!(read(decoder, &literal(b'e', 200)).is_ok());
        assert!(read(decoder, &[0x20]).is_ok(), "nothing is kept any more");
        assert!(read(decoder, &[0xbe]).is_err());
    }

    #[test]
    fn what_is_no_list_ends_the_connection() {
        let cases: [(&str, &[u8]); 9] = [
            ("index 0", &[0x80]),
            ("an index that nobody sent", &[0xbe]),
            ("a number without its end", &[0xff, 0x80]),
            (
                "a number that is too large",
                &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0],
            ),
            ("a text without its end", &[0x40, 3, b'a']),
            ("no value", &[0x40, 1, b'a']),
            ("a bad code", &[0x40, 0x81, 0xff, 0]),
            ("a table that is too large", &[0x3f, 0xe2, 0x1f]),
            ("a table that changes within a list", &[0x88, 0x20]),
        ];
        for (what, block) in cases {
            assert!(read(&mut Decoder::default(), block).is_err(), "{what}");
        }
    }

    #[test]
    fn what_is_no_answer_is_only_malformed() {
        let cases: [(&str, &[u8]); 6] = [
            ("a name in upper case", b"\x88\0\x01A\x01b"),
            ("a header of requests", b"\x88\x82"),
            ("a second status", b"\x88\x88"),
            ("a status behind other headers", b"\0\x01a\x01b\x88"),
            ("a status that is none", b"\x08\x02ok"),
            ("a line within a value", b"\x88\0\x01a\x03b\nc"),
        ];
        for (what, block) in cases {
            let list = read(&mut Decoder::default(), block).expect(what);
            assert!(list.malformed.is_some(), "{what}");
        }
    }

    #[test]
    fn a_list_that_is_too_long_is_not_kept() {
        let decoder = &mut Decoder::default();
        let mut block = b"\x40\x01a\x64".to_vec();
        block.resize(104, b'v');
        assert!(read(decoder, &block).unwrap().malformed.is_none());
        // One byte each, and the same hundred again and again.
        let list = read(decoder, &[0xbe; 100]).unwrap();
        assert!(list.malformed.is_some() && list.fields.0.is_empty());
        assert!(read(decoder, &[0xbe; 7]).unwrap().malformed.is_none());
    }
}
