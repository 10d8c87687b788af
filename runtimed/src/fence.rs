//! What the caller expects × what this Pod holds → pass or refuse (C-4).
//!
//! The gateway routes by a table that may be old, and a Pod's address may be used again. Run UID,
//! attempt and Pod UID together name one assignment; a call that names another is refused before
//! anything starts, so that the gateway may try once more where the Run is now.

use kruntimes_api::keys::{Attempt, PodUid, RunUid};
use kruntimes_proto::failure::{Failure, Reason};

/// The assignment a call was routed by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// UID of the Run.
    pub run: RunUid,
    /// `status.attempt`.
    pub attempt: Attempt,
    /// `status.assignedPodUID`.
    pub pod: PodUid,
}

/// Whether the call means the assignment that is held: `held` is the attempt this Pod holds of that
/// Run, if any, and `own` is this Pod.
///
/// # Errors
/// [`Reason::StaleRoute`], which says that nothing was started.
pub fn check(expected: &Expected, own: &PodUid, held: Option<Attempt>) -> Result<(), Failure> {
    let stale = |detail: String| Err(Failure::new(Reason::StaleRoute, detail));
    if expected.pod != *own {
        // First: behind a reused address nothing else may be told.
        return stale("this is not the Pod that the call was routed to".to_owned());
    }
    match held {
        None => stale(format!("Run {} is not held by this Pod", expected.run)),
        Some(held) if held != expected.attempt => stale(format!(
            "attempt {held} is held and the call was routed to attempt {}",
            expected.attempt
        )),
        Some(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use kruntimes_proto::failure::Dispatched;

    use super::*;

    fn expected(attempt: i32, pod: &str) -> Expected {
        Expected {
            run: "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6".parse().unwrap(),
            attempt: Attempt::new(attempt).unwrap(),
            pod: PodUid::new(pod).unwrap(),
        }
    }

    /// C-4: only the held assignment passes.
    #[test]
    fn only_the_held_assignment_passes() {
        let own = PodUid::new("pod-a").unwrap();
        let held = Attempt::new(2);
        assert_eq!(check(&expected(2, "pod-a"), &own, held), Ok(()));
        for (call, held) in [
            (expected(1, "pod-a"), held),
            (expected(3, "pod-a"), held),
            (expected(2, "pod-b"), held),
            (expected(2, "pod-a"), None),
        ] {
            let failure = check(&call, &own, held).unwrap_err();
            assert_eq!(
                (failure.reason, failure.dispatched),
                (Reason::StaleRoute, Dispatched::No)
            );
        }
    }

    #[test]
    fn another_pod_learns_nothing_about_what_is_held() {
        let own = PodUid::new("pod-b").unwrap();
        let of_another = check(&expected(2, "pod-a"), &own, Attempt::new(2)).unwrap_err();
        let of_nobody = check(&expected(2, "pod-a"), &own, None).unwrap_err();
        assert_eq!(of_another, of_nobody);
    }
}
