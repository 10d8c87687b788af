//! Counts failed starts, to tell bad luck from a function that cannot run (C-5.6).

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// Failed starts within [`FAILED_STARTS_WINDOW`] that end a registration (C-5.6).
const FAILED_STARTS: usize = 3;
const FAILED_STARTS_WINDOW: Duration = Duration::from_secs(60);

/// The failed starts of the last minute.
#[derive(Debug, Default)]
pub struct FailedStarts(VecDeque<Instant>);

impl FailedStarts {
    /// Notes one; `true` when it was one too many (C-5.6).
    pub fn add(&mut self, now: Instant) -> bool {
        self.0.push_back(now);
        while self
            .0
            .front()
            .is_some_and(|first| now.duration_since(*first) >= FAILED_STARTS_WINDOW)
        {
            self.0.pop_front();
        }
        self.0.len() >= FAILED_STARTS
    }

    /// How long to wait before the next one.
    #[must_use]
    pub fn pause(&self) -> Duration {
        Duration::from_millis(250) * u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C-5.6.
    #[test]
    fn three_failed_starts_within_a_minute_are_too_many() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut starts = FailedStarts::default();
        assert!(!starts.add(at(0)));
        assert!(!starts.add(at(30)));
        assert!(!starts.add(at(60)), "the first is a minute old");
        assert!(starts.add(at(61)));
    }
}
