//! A few thousand schedules that no cluster run would reach, and a proof that the checks can fail.

use kruntimes_sim::{Variant, caught, many, run};

/// C-3.7, C-4, C-5.3, C-6.1, C-6.2, C-7.1, C-7.3, C-7.4 under crashes, partitions, late and stale watches.
#[test]
fn thousands_of_schedules_break_no_promise() {
    let totals = many(1, 2000, None);
    assert!(totals.violations.is_empty(), "{:#?}", totals.violations);
    assert!(totals.faults.len() > 15 && totals.answered > 5_000, "{totals:?}");
}

#[test]
fn every_broken_variant_is_caught() {
    for variant in Variant::ALL {
        let found = caught(1, 1000, variant);
        assert!(found.is_some(), "nobody noticed: {}", variant.name());
    }
}

#[test]
fn a_seed_replays_exactly() {
    for seed in 1..=10 {
        let (one, two) = (run(seed, None, true), run(seed, None, true));
        assert_eq!((one.steps, one.trace), (two.steps, two.trace));
    }
}
