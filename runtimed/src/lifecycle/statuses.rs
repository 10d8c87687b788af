//! The status that each step writes, computed from the object it was decided on.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kruntimes_api::{
    Run,
    run::{Endpoint, Owner, Phase, RunStatus},
    status::{READY, RUNNING, Says, bounded},
};

use super::decide::{End, Expired, Fault};

/// Claimed: Running, not Ready yet. `startTime` is set once in a Run's life.
#[must_use]
pub fn claimed(run: &Run, now: Timestamp) -> RunStatus {
    let mut status = status_of(run);
    status.phase = Some(Phase::Running);
    status.start_time.get_or_insert(MicroTime(now));
    // What an earlier attempt said must not be read as this one's.
    status.message = None;
    status.owner = None;
    set(run, &mut status, RUNNING, true, "Claimed", "", now);
    set(run, &mut status, READY, false, "Registering", "", now);
    status
}

/// Ready: who owns it and how to call it.
#[must_use]
pub fn ready(run: &Run, owner: &Owner, endpoint: Option<&Endpoint>, now: Timestamp) -> RunStatus {
    let mut status = status_of(run);
    status.phase = Some(Phase::Ready);
    status.owner = Some(owner.clone());
    if let Some(endpoint) = endpoint {
        status.endpoint = Some(endpoint.clone());
    }
    status.message = None;
    set(run, &mut status, RUNNING, true, "Claimed", "", now);
    set(run, &mut status, READY, true, "FunctionRegistered", "", now);
    status
}

/// Not Ready for the moment: gateways drop the route.
#[must_use]
pub fn recovering(run: &Run, now: Timestamp) -> RunStatus {
    let mut status = status_of(run);
    status.phase = Some(Phase::Running);
    status.owner = None;
    let message = "the Runtime Server does not answer for the function";
    set(run, &mut status, READY, false, "Recovering", message, now);
    status
}

/// Handed back: this Pod holds nothing of the attempt any more. A Run that was never claimed stays
/// Scheduled.
#[must_use]
pub fn released(run: &Run, fault: &Fault, now: Timestamp) -> RunStatus {
    let mut status = status_of(run);
    if status.phase == Some(Phase::Ready) {
        status.phase = Some(Phase::Running);
    }
    status.released_attempt = status.attempt;
    status.owner = None;
    status.message = Some(bounded(&fault.message));
    set(
        run,
        &mut status,
        RUNNING,
        false,
        fault.reason,
        &fault.message,
        now,
    );
    set(run, &mut status, READY, false, fault.reason, &fault.message, now);
    status
}

/// Ended.
#[must_use]
pub fn ended(run: &Run, end: End, now: Timestamp) -> RunStatus {
    let (phase, reason, message) = match end {
        End::Cancelled => (Phase::Cancelled, "Cancelled", "cancelled on request"),
        End::Deleted => (Phase::Cancelled, "Deleting", "deleted"),
        End::Expired(Expired::Lifetime) => (Phase::Timeout, "Lifetime", "spec.timeout has passed"),
        End::Expired(Expired::Idle) => (
            Phase::Timeout,
            "IdleTimeout",
            "no call within spec.mode.function.idleTimeoutSeconds",
        ),
    };
    let mut status = status_of(run);
    status.finish(phase, reason, message, run.metadata.generation, now);
    status
}

fn status_of(run: &Run) -> RunStatus {
    run.status.clone().unwrap_or_default()
}

fn set(
    run: &Run,
    status: &mut RunStatus,
    kind: &str,
    holds: bool,
    reason: &str,
    message: &str,
    now: Timestamp,
) {
    let says = Says {
        kind,
        holds,
        reason,
        message,
    };
    status.set(says, run.metadata.generation, now);
}

#[cfg(test)]
mod tests {
    use kruntimes_api::{fixtures, status::patch};

    use super::*;

    /// C-2.2: the start is set once.
    #[test]
    fn the_start_is_set_once() {
        let first = Timestamp::from_second(10).unwrap();
        let mut run = fixtures::run("ns", "n").scheduled_on("pod-a").build();
        run.status = Some(claimed(&run, first));
        run.status = Some(claimed(&run, Timestamp::from_second(99).unwrap()));
        assert_eq!(run.status.unwrap().start_time, Some(MicroTime(first)));
    }

    #[test]
    fn an_old_failure_is_gone_from_the_next_attempt() {
        let mut run = fixtures::run("ns", "n").running_on("pod-a").build();
        let fault = Fault {
            reason: "RegistrationFailed",
            message: "boom".to_owned(),
        };
        run.status = Some(released(&run, &fault, fixtures::NOW));
        assert_eq!(run.status.as_ref().unwrap().released_attempt, Some(1));
        run.status = Some(claimed(&run, fixtures::NOW));
        let text = serde_json::to_string(&run.status).unwrap();
        assert!(
            !text.contains("boom") && !text.contains("RegistrationFailed"),
            "{text}"
        );
    }

    /// C-6.1: what does not fit stays scheduled.
    #[test]
    fn what_does_not_fit_stays_scheduled() {
        let run = fixtures::run("ns", "n").scheduled_on("pod-a").build();
        let fault = Fault {
            reason: "CapacityRefused",
            message: "memory".to_owned(),
        };
        let status = released(&run, &fault, fixtures::NOW);
        assert_eq!(status.phase, Some(Phase::Scheduled));
        assert_eq!(
            status.assigned_pod.as_deref(),
            Some("pod-a"),
            "clearing it is the scheduler's part"
        );
    }

    /// C-6.7: writing the same again is no write.
    #[test]
    fn writing_the_same_again_is_no_write() {
        let mut run = fixtures::run("ns", "n").running_on("pod-a").build();
        let owner = crate::lifecycle::facts::tests::me().owner;
        run.status = Some(ready(&run, &owner, None, fixtures::NOW));
        let again = ready(&run, &owner, None, Timestamp::from_second(60).unwrap());
        assert_eq!(patch(&run, &again), None);
    }

    #[test]
    fn an_end_clears_the_owner_and_says_why() {
        let run = fixtures::run("ns", "n").ready_on("pod-a").build();
        let status = ended(&run, End::Expired(Expired::Idle), fixtures::NOW);
        assert_eq!(status.phase, Some(Phase::Timeout));
        assert_eq!(status.owner, None);
        let conditions = status.conditions.unwrap();
        let ready = conditions.iter().find(|it| it.type_ == READY).unwrap();
        assert_eq!(
            (ready.status.as_str(), ready.reason.as_str()),
            ("False", "IdleTimeout")
        );
    }
}
