//! One count of milliseconds for callers, functions and Kubernetes: all of them are on one machine.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::{Instant, sleep_until};

use super::history::Millis;

/// Counts from its making. Copies agree.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    start: Instant,
    wall: i64,
}

// === impl Clock ===

impl Clock {
    /// Zero is now.
    #[must_use]
    pub fn start() -> Self {
        Self {
            start: Instant::now(),
            wall: Timestamp::now().as_millisecond(),
        }
    }

    /// Since the start.
    #[must_use]
    pub fn now(&self) -> Millis {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(Millis::MAX)
    }

    /// What the wall clock showed, in Unix milliseconds; what lies before the start is zero.
    #[must_use]
    pub fn at(&self, unix: i64) -> Millis {
        u64::try_from(unix.saturating_sub(self.wall)).unwrap_or_default()
    }

    /// Waits for a moment; returns at once when it has passed.
    pub async fn until(&self, moment: Millis) {
        sleep_until(self.start + Duration::from_millis(moment)).await;
    }
}
