//! Ids that are bounded once, where they are parsed, and trusted afterwards.

use std::fmt;

use crate::limits;

/// Why a text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidId {
    /// The text has no bytes.
    #[error("the {what} is empty; give 1 to {max} visible ASCII characters")]
    Empty { what: &'static str, max: usize },
    /// The text is too long.
    #[error("the {what} has {length} bytes; at most {max} are allowed")]
    TooLong {
        what: &'static str,
        length: usize,
        max: usize,
    },
    /// The text holds a blank, a control character or a byte above 0x7e.
    #[error("the {what} holds a byte outside visible ASCII (0x21-0x7e) at position {position}")]
    NotVisible { what: &'static str, position: usize },
}

fn check(what: &'static str, max: usize, bytes: &[u8]) -> Result<String, InvalidId> {
    if bytes.is_empty() {
        return Err(InvalidId::Empty { what, max });
    }
    if bytes.len() > max {
        return Err(InvalidId::TooLong {
            what,
            length: bytes.len(),
            max,
        });
    }
    if let Some(position) = bytes.iter().position(|byte| !(0x21..=0x7e).contains(byte)) {
        return Err(InvalidId::NotVisible { what, position });
    }
    Ok(bytes.iter().map(|&byte| char::from(byte)).collect())
}

/// Correlates one call across client, gateway, owner, function and audit log
/// (C-3.2). 1 to 128 visible ASCII bytes; never a key for deduplication.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct InvocationId(String);

impl InvocationId {
    /// Checks an id that somebody else chose.
    pub fn parse(bytes: &[u8]) -> Result<Self, InvalidId> {
        check("invocation id", limits::INVOCATION_ID_BYTES, bytes).map(Self)
    }

    /// Makes an id: `inv_` and 32 hex digits, ordered by time of making.
    #[must_use]
    pub fn generate() -> Self {
        Self(format!("inv_{}", uuid::Uuid::now_v7().simple()))
    }

    /// The id as text, safe in a header and in a log line.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Names one registration generation inside one Runtime Server (C-5.2).
/// 1 to 128 visible ASCII bytes, opaque to everybody else.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegistrationId(String);

impl RegistrationId {
    /// Checks an id that a peer sent.
    pub fn parse(bytes: &[u8]) -> Result<Self, InvalidId> {
        check("registration id", limits::REGISTRATION_ID_BYTES, bytes).map(Self)
    }

    /// Makes an id: `reg_` and 32 random hex digits.
    #[must_use]
    pub fn generate() -> Self {
        Self(format!("reg_{}", uuid::Uuid::new_v4().simple()))
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for InvocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for InvocationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for RegistrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for RegistrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_id_has_1_to_128_visible_ascii_bytes() {
        assert!(InvocationId::parse(&[b'a'; 128]).is_ok());
        assert_eq!(
            InvocationId::parse(&[b'a'; 129]),
            Err(InvalidId::TooLong {
                what: "invocation id",
                length: 129,
                max: 128
            })
        );
        assert!(matches!(InvocationId::parse(b""), Err(InvalidId::Empty { .. })));
        for bad in [&b"a b"[..], b"a\tb", b"\xff", b"a\r\nb", b"\x7f", b"\0"] {
            assert!(
                matches!(InvocationId::parse(bad), Err(InvalidId::NotVisible { .. })),
                "{bad:?}"
            );
        }
        assert_eq!(
            InvocationId::parse(b"\"<script>\"").unwrap().as_str(),
            "\"<script>\""
        );
    }

    #[test]
    fn made_ids_are_valid_and_differ() {
        let (a, b) = (InvocationId::generate(), InvocationId::generate());
        assert_ne!(a, b);
        assert_eq!(InvocationId::parse(a.as_str().as_bytes()), Ok(a));
        let id = RegistrationId::generate();
        assert_eq!(RegistrationId::parse(id.as_str().as_bytes()), Ok(id));
    }

    proptest! {
        #[test]
        fn parsing_never_panics_and_keeps_what_it_accepts(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(id) = InvocationId::parse(&bytes) {
                prop_assert_eq!(id.as_str().as_bytes(), &bytes[..]);
            }
        }
    }
}
