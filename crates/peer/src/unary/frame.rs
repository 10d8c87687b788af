//! Frames of HTTP/2 (RFC 9113, sections 4 and 6): a head of nine bytes, and names for what is in it.

use bytes::BytesMut;
use thiserror::Error;

/// Bytes of a frame's head.
pub(super) const HEAD_BYTES: usize = 9;
/// What a client says first (section 3.4).
pub(super) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// The largest frame that everybody takes without having said so, bytes (section 6.5.2).
pub(super) const LEAST_FRAME: usize = 16 * 1024;
/// A window that nobody has changed, bytes (section 6.9.2).
pub(super) const FIRST_WINDOW: u32 = 65_535;
/// No window is larger (section 6.9.1).
pub(super) const LARGEST_WINDOW: u32 = 0x7fff_ffff;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Data,
    Headers,
    Priority,
    Reset,
    Settings,
    Push,
    Ping,
    GoAway,
    WindowUpdate,
    Continuation,
    /// An extension, which is ignored.
    Other,
}

/// Flags; which of them mean something depends on the kind.
pub(super) mod flag {
    pub(crate) const ACK: u8 = 0x1;
    pub(crate) const END_STREAM: u8 = 0x1;
    pub(crate) const END_HEADERS: u8 = 0x4;
    pub(crate) const PADDED: u8 = 0x8;
    pub(crate) const PRIORITY: u8 = 0x20;
}

/// Names of settings (section 6.5.2).
pub(super) mod setting {
    pub(crate) const TABLE: u16 = 1;
    pub(crate) const PUSH: u16 = 2;
    pub(crate) const STREAMS: u16 = 3;
    pub(crate) const WINDOW: u16 = 4;
    pub(crate) const FRAME: u16 = 5;
    pub(crate) const HEADERS: u16 = 6;
}

/// Why a stream or a connection ended (section 7).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u32);

/// A connection that cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{why} ({code})")]
pub(super) struct Violation {
    /// What the other side is told.
    pub code: Code,
    /// What it did.
    pub why: &'static str,
}

/// Head of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    /// Bytes that follow.
    pub(super) length: usize,
    pub(super) kind: Kind,
    pub(super) flags: u8,
    pub(super) stream: u32,
}

// === impl Code ===

impl Code {
    pub(super) const NO_ERROR: Self = Self(0);
    pub(super) const PROTOCOL: Self = Self(1);
    pub(super) const FLOW_CONTROL: Self = Self(3);
    pub(super) const FRAME_SIZE: Self = Self(6);
    pub(super) const REFUSED: Self = Self(7);
    pub(super) const CANCEL: Self = Self(8);
    pub(super) const COMPRESSION: Self = Self(9);
    pub(super) const CALM_DOWN: Self = Self(11);
    pub(super) const SECURITY: Self = Self(12);

    /// A violation with this code.
    pub(super) const fn because(self, why: &'static str) -> Violation {
        Violation { code: self, why }
    }
}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = [
            "NO_ERROR",
            "PROTOCOL_ERROR",
            "INTERNAL_ERROR",
            "FLOW_CONTROL_ERROR",
            "SETTINGS_TIMEOUT",
            "STREAM_CLOSED",
            "FRAME_SIZE_ERROR",
            "REFUSED_STREAM",
            "CANCEL",
            "COMPRESSION_ERROR",
            "CONNECT_ERROR",
            "ENHANCE_YOUR_CALM",
            "INADEQUATE_SECURITY",
            "HTTP_1_1_REQUIRED",
        ];
        match names.get(self.0 as usize) {
            Some(name) => f.write_str(name),
            None => write!(f, "error {:#x}", self.0),
        }
    }
}

// === impl Kind ===

impl Kind {
    const fn read(byte: u8) -> Self {
        match byte {
            0 => Self::Data,
            1 => Self::Headers,
            2 => Self::Priority,
            3 => Self::Reset,
            4 => Self::Settings,
            5 => Self::Push,
            6 => Self::Ping,
            7 => Self::GoAway,
            8 => Self::WindowUpdate,
            9 => Self::Continuation,
            _ => Self::Other,
        }
    }

    const fn byte(self) -> u8 {
        match self {
            Self::Data => 0,
            Self::Headers => 1,
            Self::Priority => 2,
            Self::Reset => 3,
            Self::Settings => 4,
            Self::Push => 5,
            Self::Ping => 6,
            Self::GoAway => 7,
            Self::WindowUpdate => 8,
            Self::Continuation => 9,
            Self::Other => 0xff,
        }
    }
}

// === impl Head ===

impl Head {
    /// The head that `bytes` begin with; nothing while it is not whole.
    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let [a, b, c, kind, flags, d, e, f, g, ..] = *bytes else {
            return None;
        };
        Some(Self {
            length: u32::from_be_bytes([0, a, b, c]) as usize,
            kind: Kind::read(kind),
            flags,
            // The first bit is reserved.
            stream: u32::from_be_bytes([d, e, f, g]) & LARGEST_WINDOW,
        })
    }

    pub(super) fn is(self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// The bytes of this head.
    pub(super) fn bytes(self) -> [u8; HEAD_BYTES] {
        // Frames are cut to what the other side takes, which has 24 bits.
        let [_, a, b, c] = u32::try_from(self.length).unwrap_or(u32::MAX).to_be_bytes();
        let [d, e, f, g] = self.stream.to_be_bytes();
        [a, b, c, self.kind.byte(), self.flags, d, e, f, g]
    }

    /// What is in a frame that may be padded (section 6.1).
    pub(super) fn unpadded(self, mut payload: BytesMut) -> Result<BytesMut, Violation> {
        if !self.is(flag::PADDED) {
            return Ok(payload);
        }
        let Some(padding) = payload.first().copied() else {
            return Err(Code::FRAME_SIZE.because("a frame without its padding's length"));
        };
        let rest = payload.len() - 1;
        let Some(kept) = rest.checked_sub(usize::from(padding)) else {
            return Err(Code::PROTOCOL.because("more padding than frame"));
        };
        let _ = payload.split_to(1);
        payload.truncate(kept);
        Ok(payload)
    }
}

/// The first four bytes as a number.
pub(super) fn number(payload: &[u8]) -> Option<u32> {
    payload.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_reads_as_it_was_written() {
        for kind in 0..=10 {
            let head = Head {
                length: 0x01_02_03,
                kind: Kind::read(kind),
                flags: flag::END_HEADERS,
                stream: 5,
            };
            assert_eq!(Head::read(&head.bytes()), Some(head));
        }
        assert_eq!(Head::read(&[0; 8]), None);
        let reserved = [0, 0, 0, 6, 0, 0x80, 0, 0, 1];
        assert_eq!(Head::read(&reserved).map(|head| head.stream), Some(1));
    }

    #[test]
    fn padding_goes() {
        let padded = |bytes: &[u8]| {
            let head = Head {
                length: bytes.len(),
                kind: Kind::Data,
                flags: flag::PADDED,
                stream: 1,
            };
            head.unpadded(bytes.into()).map(|kept| kept.to_vec())
        };
        assert_eq!(padded(&[2, b'a', 0, 0]), Ok(b"a".to_vec()));
        assert_eq!(padded(&[0, b'a']), Ok(b"a".to_vec()));
        assert_eq!(padded(&[1, 0]), Ok(Vec::new()));
        for bad in [&[][..], &[1], &[3, 0, 0]] {
            assert!(padded(bad).is_err(), "{bad:?}");
        }
    }
}
