//! How long an answer may be kept (C-3.6).

use std::time::Duration;

use thiserror::Error;

/// No answer is kept longer, whatever the flags say.
pub const MAX_ALLOWED: Duration = Duration::from_secs(30);

/// A refusal is kept this long at most: a binding that was just made works soon.
pub const MAX_REFUSED: Duration = Duration::from_secs(2);

/// An allowance that is kept for a shorter time ends without having been renewed: those are of tokens about to end.
const WORTH_RENEWING: Duration = Duration::from_secs(1);

/// What a token looks like, unverified.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TokenKind {
    /// Three parts with claims in the middle.
    Jwt {
        /// Claim `exp`, in seconds since the epoch.
        expires: Option<f64>,
    },
    /// Anything else; when it ends is not known.
    Opaque,
}

/// What the API server said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The token is good and may.
    Allowed,
    /// The token is good and may not.
    Denied,
    /// The token is not good (401).
    Rejected,
    /// Nobody said anything: never kept.
    Unavailable,
}

/// How long an `Allowed` may be kept at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caps {
    allowed: Duration,
    opaque: Duration,
}

/// A cap that is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{flag} is {given:?}; at most {MAX_ALLOWED:?} is allowed, because revocation waits for it")]
pub struct CapsError {
    /// The flag.
    pub flag: &'static str,
    /// Its value.
    pub given: Duration,
}

// === impl Caps ===

impl Default for Caps {
    /// 10 s, and 5 s for opaque tokens.
    fn default() -> Self {
        Self {
            allowed: Duration::from_secs(10),
            opaque: Duration::from_secs(5),
        }
    }
}

impl Caps {
    /// Values of `--authorization-ttl` and `--authorization-opaque-ttl`. Zero keeps nothing.
    ///
    /// # Errors
    /// When one is above [`MAX_ALLOWED`].
    pub fn new(allowed: Duration, opaque: Duration) -> Result<Self, CapsError> {
        for (flag, given) in [
            ("--authorization-ttl", allowed),
            ("--authorization-opaque-ttl", opaque),
        ] {
            if given > MAX_ALLOWED {
                return Err(CapsError { flag, given });
            }
        }
        Ok(Self { allowed, opaque })
    }

    /// How long `answer` may be kept, counted from before the question was sent. `now` is in
    /// seconds since the epoch.
    #[must_use]
    pub fn keep(&self, answer: Answer, token: TokenKind, now: f64) -> Duration {
        let cap = match answer {
            Answer::Unavailable => return Duration::ZERO,
            Answer::Denied | Answer::Rejected => MAX_REFUSED,
            Answer::Allowed => match token {
                TokenKind::Jwt { .. } => self.allowed,
                TokenKind::Opaque => self.opaque,
            },
        };
        match token {
            TokenKind::Jwt {
                expires: Some(expires),
            } => {
                // An `exp` that is no time or past gives zero: let the API server say 401.
                Duration::try_from_secs_f64(expires - now)
                    .map_or_else(|_| far(expires, now, cap), |left| left.min(cap))
            }
            _ => cap,
        }
    }
}

/// After how much of `kept`, the time for which `answer` is kept, whoever uses it has it renewed: three quarters, so that
/// the new answer is there before the old one ends. Only allowances are; `kept` itself means never.
#[must_use]
pub fn renewed_after(answer: Answer, kept: Duration) -> Duration {
    if answer == Answer::Allowed && kept >= WORTH_RENEWING {
        kept / 4 * 3
    } else {
        kept
    }
}

/// What a difference means that is no duration: too far to matter, or over.
fn far(expires: f64, now: f64, cap: Duration) -> Duration {
    if expires > now { cap } else { Duration::ZERO }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NOW: f64 = 1_800_000_000.0;

    fn jwt(left: f64) -> TokenKind {
        TokenKind::Jwt {
            expires: Some(NOW + left),
        }
    }

    /// C-3.6
    #[test]
    fn the_table_of_the_contract() {
        let none = TokenKind::Jwt { expires: None };
        for (answer, token, milliseconds) in [
            (Answer::Allowed, jwt(600.0), 10_000),
            (Answer::Allowed, none, 10_000),
            (Answer::Allowed, jwt(1.5), 1_500),
            (Answer::Allowed, jwt(0.0), 0),
            (Answer::Allowed, jwt(-5.0), 0),
            (Answer::Allowed, jwt(f64::NAN), 0),
            (Answer::Allowed, jwt(1e300), 10_000),
            (Answer::Allowed, TokenKind::Opaque, 5_000),
            (Answer::Denied, jwt(600.0), 2_000),
            (Answer::Denied, TokenKind::Opaque, 2_000),
            (Answer::Denied, jwt(0.5), 500),
            (Answer::Rejected, jwt(600.0), 2_000),
            (Answer::Rejected, jwt(-600.0), 0),
            (Answer::Unavailable, jwt(600.0), 0),
        ] {
            assert_eq!(
                Caps::default().keep(answer, token, NOW),
                Duration::from_millis(milliseconds),
                "{answer:?} {token:?}"
            );
        }
    }

    /// C-3.6: who may go on may go on without waiting; a refusal is asked for by nobody but its caller.
    #[test]
    fn only_allowances_that_last_are_renewed() {
        let millis = Duration::from_millis;
        for (answer, kept, after) in [
            (Answer::Allowed, millis(10_000), millis(7_500)),
            (Answer::Allowed, millis(1_000), millis(750)),
            (Answer::Allowed, millis(999), millis(999)),
            (Answer::Denied, MAX_REFUSED, MAX_REFUSED),
            (Answer::Rejected, MAX_REFUSED, MAX_REFUSED),
            (Answer::Unavailable, Duration::ZERO, Duration::ZERO),
        ] {
            assert_eq!(renewed_after(answer, kept), after, "{answer:?} {kept:?}");
        }
    }

    #[test]
    fn a_cap_above_thirty_seconds_names_its_flag() {
        let (short, long) = (Duration::from_secs(30), Duration::from_millis(30_001));
        assert!(Caps::new(short, short).is_ok());
        let flag = |result: Result<Caps, CapsError>| result.expect_err("long").flag;
        assert_eq!(flag(Caps::new(long, short)), "--authorization-ttl");
        assert_eq!(flag(Caps::new(short, long)), "--authorization-opaque-ttl");
    }

    proptest! {
        #[test]
        fn never_beyond_the_cap_nor_the_token(left in -1e6_f64..1e6, seconds in 0_u64..=30) {
            let cap = Duration::from_secs(seconds);
            let caps = Caps::new(cap, cap).expect("in range");
            for answer in [Answer::Allowed, Answer::Denied, Answer::Rejected, Answer::Unavailable] {
                let kept = caps.keep(answer, jwt(left), NOW);
                prop_assert!(kept <= cap.max(MAX_REFUSED));
                prop_assert!(kept.is_zero() || kept.as_secs_f64() <= left + 1e-3);
            }
        }
    }
}
