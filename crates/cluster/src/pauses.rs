//! Pauses between the tries of a watch that fails.

use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    time::Duration,
};

use kube::runtime::utils::Backoff;

/// First pause.
const FIRST: Duration = Duration::from_millis(250);
/// Longest, before spreading: what is out of date is known soon after Kubernetes answers again.
const LONGEST: Duration = Duration::from_secs(3);

/// Pauses that double up to 3 s, spread by a fifth so that not everybody asks at once.
#[derive(Debug)]
pub struct Pauses {
    next: Duration,
}

// === impl Pauses ===

impl Default for Pauses {
    fn default() -> Self {
        Self { next: FIRST }
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let pause = self.next;
        self.next = (pause * 2).min(LONGEST);
        // Differently keyed each time: enough of chance.
        let chance = RandomState::new().build_hasher().finish() % 401;
        let thousandths = u32::try_from(chance).unwrap_or_default() + 800;
        Some(pause * thousandths / 1000)
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        self.next = FIRST;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_three_seconds_and_begin_anew() {
        let mut pauses = Pauses::default();
        for expected in [250, 500, 1000, 2000, 3000, 3000, 3000] {
            let pause = pauses.next().unwrap().as_millis();
            assert!(
                (expected * 8 / 10..=expected * 12 / 10).contains(&pause),
                "{pause} {expected}"
            );
        }
        pauses.reset();
        assert!(pauses.next().unwrap() <= Duration::from_millis(300));
    }
}
