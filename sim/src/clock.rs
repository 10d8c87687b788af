//! Virtual time. Everything is counted in microseconds from the beginning of a simulation; the product's
//! own types of time are made from that.

use std::time::Duration;

use jiff::Timestamp;
use kruntimes_runtime_server::registry::Moment;
use tokio::time::Instant;

/// Microseconds since the beginning.
pub(crate) type Time = u64;

pub(crate) const MS: Time = 1_000;
pub(crate) const SECOND: Time = 1_000_000;

/// Where the wall clock of every simulation begins, seconds since 1970.
const WALL: i64 = 1_800_000_000;

/// Makes the product's times.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    /// Some instant; only differences to it ever count. There is no other way to make one.
    base: Instant,
}

// === impl Clock ===

impl Clock {
    pub(crate) fn new() -> Self {
        Self {
            // Far enough ahead that nothing subtracts its way below the first instant there is.
            base: Instant::now() + Duration::from_secs(86_400),
        }
    }

    pub(crate) fn instant(self, at: Time) -> Instant {
        self.base + Duration::from_micros(at)
    }

    /// The virtual time of an instant made from this clock, rounded up.
    pub(crate) fn time(self, at: Instant) -> Time {
        let since = at.saturating_duration_since(self.base);
        u64::try_from(since.as_nanos().div_ceil(1000)).unwrap_or(Time::MAX)
    }

    pub(crate) fn wall(self, at: Time) -> Timestamp {
        let seconds = WALL + i64::try_from(at / SECOND).unwrap_or(0);
        let nanos = i32::try_from(at % SECOND).unwrap_or(0) * 1000;
        Timestamp::new(seconds, nanos).unwrap_or(Timestamp::UNIX_EPOCH)
    }

    pub(crate) fn moment(self, at: Time) -> Moment {
        Moment {
            monotonic: self.instant(at).into_std(),
            unix_nano: i64::try_from(self.wall(at).as_nanosecond()).unwrap_or(i64::MAX),
        }
    }
}

pub(crate) fn micros(duration: Duration) -> Time {
    u64::try_from(duration.as_micros()).unwrap_or(Time::MAX / 4)
}
