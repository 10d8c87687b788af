//! When an ended Run is deleted, and when the clean-up finalizer of one that is being deleted can
//! go because its Pod is provably out (C-7.4).

use std::time::Duration;

use jiff::Timestamp;
use kruntimes_api::{Run, names::FINALIZER};

use crate::fence::Fence;

/// What becomes of an ended Run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expiry {
    /// It is kept.
    Never,
    /// It is deleted after this time.
    In(Duration),
    /// It is deleted now.
    Now,
}

/// When the Run is to be deleted; counts from `completionTime`.
pub fn expiry(run: &Run, now: Timestamp) -> Expiry {
    let Some(ttl) = run
        .spec
        .ttl_seconds_after_finished
        .and_then(|it| u64::try_from(it).ok())
    else {
        return Expiry::Never;
    };
    let completed = run.status.as_ref().and_then(|it| it.completion_time.as_ref());
    // Without a time it cannot be judged; whoever ended it writes one.
    let (true, Some(completed)) = (run.phase().is_terminal(), completed) else {
        return Expiry::Never;
    };
    let lived = Duration::try_from(now.duration_since(completed.0)).unwrap_or_default();
    match Duration::from_secs(ttl).saturating_sub(lived) {
        Duration::ZERO => Expiry::Now,
        left => Expiry::In(left),
    }
}

/// Whether the clean-up finalizer holds a Run that is being deleted.
pub fn is_held(run: &Run) -> bool {
    run.is_deleting() && run.metadata.finalizers.iter().flatten().any(|it| it == FINALIZER)
}

/// Whether the finalizer can go: nobody owns the Run, or its owner is provably out. Otherwise it
/// is the owner who cleans up and removes it.
pub fn may_release(run: &Run, fence: Option<Fence>) -> bool {
    is_held(run) && (run.assignment().is_none() || fence.is_some())
}

#[cfg(test)]
mod tests {
    use kruntimes_api::{fixtures, run::Phase};

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// C-7.4
    #[test]
    fn the_ttl_counts_from_the_end_and_stays_mutable() {
        let ended = |ttl| {
            fixtures::run("ns", "n")
                .ended(Phase::Failed, "RetriesExhausted")
                .with(|it| it.spec.ttl_seconds_after_finished = ttl)
                .build()
        };
        assert_eq!(expiry(&ended(None), at(1_000_000)), Expiry::Never);
        assert_eq!(
            expiry(&ended(Some(60)), at(20)),
            Expiry::In(Duration::from_secs(40))
        );
        assert_eq!(expiry(&ended(Some(60)), at(60)), Expiry::Now);
        assert_eq!(expiry(&ended(Some(0)), at(0)), Expiry::Now);
        let running = fixtures::run("ns", "n")
            .ready_on("p")
            .with(|it| it.spec.ttl_seconds_after_finished = Some(0));
        assert_eq!(expiry(&running.build(), at(1_000_000)), Expiry::Never);
    }

    /// C-7.4
    #[test]
    fn the_finalizer_goes_only_when_nobody_can_clean_up() {
        let held = fixtures::run("ns", "n").ready_on("p").deleting().build();
        assert!(!may_release(&held, None), "its owner does");
        assert!(may_release(&held, Some(Fence::PodGone)));
        assert!(
            may_release(&fixtures::run("ns", "n").deleting().build(), None),
            "nobody owns it"
        );
        assert!(
            !may_release(
                &fixtures::run("ns", "n").ready_on("p").build(),
                Some(Fence::PodGone)
            ),
            "not deleting"
        );
    }
}
