//! Times told in three numbers.

use std::fmt;

use super::history::Millis;

/// Median, 95th percentile and maximum, by nearest rank, milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spread {
    /// Median.
    pub p50: Millis,
    /// What 19 of 20 do not exceed.
    pub p95: Millis,
    /// The greatest.
    pub max: Millis,
}

// === impl Spread ===

impl Spread {
    /// Of these; zero for none.
    #[must_use]
    pub fn of(times: impl IntoIterator<Item = Millis>) -> Self {
        let mut times: Vec<Millis> = times.into_iter().collect();
        times.sort_unstable();
        let rank = |percent: usize| {
            let rank = (times.len() * percent).div_ceil(100).max(1);
            times.get(rank - 1).copied().unwrap_or_default()
        };
        Self {
            p50: rank(50),
            p95: rank(95),
            max: rank(100),
        }
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p50 {} ms, p95 {} ms, max {} ms", self.p50, self.p95, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_twenty_the_nineteenth_is_the_95th_percentile() {
        let spread = Spread::of((1..=20).rev());
        let expected = Spread {
            p50: 10,
            p95: 19,
            max: 20,
        };
        assert_eq!(spread, expected);
        let one = Spread {
            p50: 7,
            p95: 7,
            max: 7,
        };
        assert_eq!(Spread::of([7]), one);
        assert_eq!(Spread::of([]), Spread::default());
    }
}
