//! Identities as types of their own, so that a Run's UID can never stand where a
//! Pod's is meant, and a name never where a UID is.

use std::{fmt, str::FromStr};

/// UID of a Run: the stable identity of a function, never its name, which may be
/// used again. Sixteen bytes, so that looking one up allocates nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunUid([u8; 16]);

/// Why a text is not a [`RunUid`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a UID: 36 characters are expected, lower-case hex with hyphens, as Kubernetes writes them")]
pub struct InvalidUid;

/// Where the hyphens are, and where the digits of each byte begin.
const HYPHENS: [usize; 4] = [8, 13, 18, 23];
const PLACES: [usize; 16] = [0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34];

/// What a digit stands for; more than 15 if it is none.
fn value(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        b'a'..=b'f' => digit - b'a' + 10,
        _ => 0xff,
    }
}

impl FromStr for RunUid {
    type Err = InvalidUid;

    /// Accepts the canonical form alone: two texts never name one Run.
    fn from_str(text: &str) -> Result<Self, InvalidUid> {
        let text: &[u8; 36] = text.as_bytes().try_into().map_err(|_| InvalidUid)?;
        let mut uid = [0; 16];
        // All are looked at before one is judged: a way out at each costs more.
        let mut wrong = HYPHENS.iter().fold(0, |wrong, at| wrong | (text[*at] ^ b'-'));
        for (byte, at) in uid.iter_mut().zip(PLACES) {
            let (high, low) = (value(text[at]), value(text[at + 1]));
            wrong |= (high | low) & 0xf0;
            *byte = high << 4 | low & 15;
        }
        if wrong == 0 {
            Ok(Self(uid))
        } else {
            Err(InvalidUid)
        }
    }
}

impl fmt::Display for RunUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Every call is full of them: one write, and no formatting of numbers.
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [b'-'; 36];
        for (byte, at) in self.0.iter().zip(PLACES) {
            text[at] = DIGITS[usize::from(byte >> 4)];
            text[at + 1] = DIGITS[usize::from(byte & 15)];
        }
        f.write_str(std::str::from_utf8(&text).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for RunUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One Run object of one life: namespace, name and UID.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunKey {
    /// Namespace of the Run.
    pub namespace: String,
    /// Name of the Run; another Run may get it after this one is gone.
    pub name: String,
    /// UID of the Run.
    pub uid: RunUid,
}

impl fmt::Display for RunKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} ({})", self.namespace, self.name, self.uid)
    }
}

/// UID of a Pod. Kept as text: it is compared, never parsed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodUid(String);

impl PodUid {
    /// Wraps what Kubernetes wrote; `None` for an empty text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Option<Self> {
        let text = text.into();
        (!text.is_empty()).then_some(Self(text))
    }

    /// The UID as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `status.attempt`: counts assignments of a Run from 1. It is the fence (C-2.2),
/// not the retry budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Attempt(i32);

impl Attempt {
    /// The first assignment.
    pub const FIRST: Self = Self(1);

    /// Wraps a stored number; `None` below 1.
    #[must_use]
    pub fn new(number: i32) -> Option<Self> {
        (number >= 1).then_some(Self(number))
    }

    /// The number, at least 1.
    #[must_use]
    pub fn get(self) -> i32 {
        self.0
    }

    /// The attempt after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn only_the_canonical_form_is_a_uid() {
        let text = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";
        assert_eq!(text.parse::<RunUid>().unwrap().to_string(), text);
        for bad in [
            "",
            "2C24C1F0-9F8F-4F80-82D5-3DD16A12D1E6",
            "2c24c1f09f8f4f8082d53dd16a12d1e6",
            "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e",
            "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6 ",
            "2c24c1f0_9f8f-4f80-82d5-3dd16a12d1e6",
            "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1eg",
            "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1é6",
        ] {
            assert_eq!(bad.parse::<RunUid>(), Err(InvalidUid), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn parsing_and_printing_are_inverse(bytes: [u8; 16]) {
            let uid = RunUid(bytes);
            prop_assert_eq!(uid.to_string().parse::<RunUid>(), Ok(uid));
        }

        #[test]
        fn parsing_never_panics(text in "\\PC*") {
            let _ = text.parse::<RunUid>();
        }
    }

    #[test]
    fn attempts_count_from_one() {
        assert_eq!(Attempt::new(0), None);
        assert_eq!(Attempt::FIRST.next().get(), 2);
    }
}
