//! Many seeds, on every core; what they add up to.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use crate::{Outcome, Variant, run};

/// What many seeds did.
#[derive(Debug, Clone, Default)]
pub struct Totals {
    pub seeds: u64,
    pub steps: u64,
    pub calls: u64,
    pub answered: u64,
    pub faults: BTreeMap<&'static str, u64>,
    /// Seeds that broke a promise, and which.
    pub violations: BTreeMap<u64, String>,
}

// === impl Totals ===

impl Totals {
    fn add(&mut self, outcome: Outcome) {
        self.seeds += 1;
        self.steps += outcome.steps;
        self.calls += outcome.calls;
        self.answered += outcome.answered;
        for (fault, times) in outcome.faults {
            *self.faults.entry(fault).or_default() += times;
        }
        if let Some(text) = outcome.violation {
            self.violations.insert(outcome.seed, text);
        }
    }
}

/// Runs the seeds `first..first + count`.
#[must_use]
pub fn many(first: u64, count: u64, variant: Option<Variant>) -> Totals {
    each(first, count, variant, |_| false)
}

/// The first found seed of `first..first + count` that catches the broken variant, with what it says.
#[must_use]
pub fn caught(first: u64, count: u64, variant: Variant) -> Option<(u64, String)> {
    let totals = each(first, count, Some(variant), |outcome| outcome.violation.is_some());
    totals.violations.into_iter().next()
}

fn each(
    first: u64,
    count: u64,
    variant: Option<Variant>,
    enough: impl Fn(&Outcome) -> bool + Sync,
) -> Totals {
    let (next, totals) = (AtomicU64::new(0), Mutex::new(Totals::default()));
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                return;
            }
            let outcome = run(first + at, variant, false);
            if enough(&outcome) {
                next.store(count, Ordering::Relaxed);
            }
            totals.lock().unwrap_or_else(PoisonError::into_inner).add(outcome);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    totals.into_inner().unwrap_or_else(PoisonError::into_inner)
}
