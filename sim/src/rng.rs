//! The one source of chance of a simulation: the same seed gives the same numbers on every machine.

/// SplitMix64: small, fast, and good enough to mix schedules.
#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

// === impl Rng ===

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5eed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From `low..high`; `low` when that is empty.
    pub(crate) fn range(&mut self, low: u64, high: u64) -> u64 {
        match high.checked_sub(low) {
            None | Some(0) => low,
            Some(width) => low + self.next() % width,
        }
    }

    /// `true` this often in a thousand times.
    pub(crate) fn chance(&mut self, per_mille: u64) -> bool {
        self.next() % 1000 < per_mille
    }

    /// An index below `len`, which is not 0.
    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(len).unwrap_or(1).max(1)).unwrap_or(0)
    }

    /// One of them; `None` when there is none.
    pub(crate) fn pick<T: Clone>(&mut self, from: &[T]) -> Option<T> {
        if from.is_empty() {
            return None;
        }
        let at = self.index(from.len());
        from.get(at).cloned()
    }

    /// From 0.0..1.0.
    pub(crate) fn unit(&mut self) -> f64 {
        let bits = u32::try_from(self.next() >> 32).unwrap_or(0);
        f64::from(bits) / (f64::from(u32::MAX) + 1.0)
    }
}
