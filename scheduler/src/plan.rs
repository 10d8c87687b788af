//! One Run × what is known → the one next thing to do with it.
//!
//! The order of the questions is the point of this file: going away, ended, owned, and only then
//! waiting for a Pod.

use std::time::Duration;

use jiff::Timestamp;
use kruntimes_api::{
    Run, RunStatus,
    keys::{Attempt, PodUid},
    retry::parse_duration,
    run::Phase,
    status::{READY, SCHEDULED, Says},
};

use crate::{
    cycle::{self, Ask, Outcome, Wait},
    expire::{self, Expiry},
    facts::Amounts,
    recover::{self, Fence},
    snapshot::Snapshot,
};

/// A waiting Run is looked at this often even if nothing wakes it.
const SAFETY_LOOK: Duration = Duration::from_secs(30);

/// What is known around a Run.
#[derive(Debug)]
pub struct View<'a> {
    pub run: &'a Run,
    pub pod: Pod,
    /// Capacity that the Runtime gives each Pod; `None`: there is no such Runtime.
    pub declared: Option<Amounts>,
    /// The Pods of the Runtime.
    pub snapshot: Snapshot,
    pub now: Timestamp,
    /// From 0.0..1.0.
    pub jitter: f64,
}

/// What is known of the Pod a Run is assigned to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pod {
    /// The watch shows a Pod of exactly that UID, or a live read did.
    There,
    /// The watch does not show it: a hint, never a verdict (C-2.3).
    NotSeen,
    /// A live read found no Pod of that UID.
    Gone,
}

/// The next thing to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Plan {
    /// Something will wake us.
    Nothing,
    /// Look again after this time.
    Later(Duration),
    /// Read the Pod live.
    ConfirmPod { name: String, uid: PodUid },
    /// Write a status.
    Write { status: Box<RunStatus>, why: Why },
    /// Write an assignment, after reserving its room.
    Bind {
        status: Box<RunStatus>,
        uid: PodUid,
        attempt: Attempt,
        ask: Box<Ask>,
    },
    /// Take our finalizer off.
    RemoveFinalizer,
    /// Delete the object.
    Delete,
}

/// What a status write is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    Waits(Wait),
    NeverFits,
    Cancelled,
    Lifetime,
    /// Long Ready: failures before it count no more.
    Healthy,
    Recover(recover::Kind),
}

/// Decides.
pub fn plan(view: View<'_>) -> Plan {
    let run = view.run;
    if expire::is_held(run) || (run.is_deleting() && run.assignment().is_none()) {
        return deleting(&view);
    }
    if run.phase().is_terminal() {
        return match expire::expiry(run, view.now) {
            Expiry::Never => Plan::Nothing,
            Expiry::In(left) => Plan::Later(left),
            Expiry::Now if run.is_deleting() => Plan::Nothing,
            Expiry::Now => Plan::Delete,
        };
    }
    match run.assignment() {
        Some((name, uid)) => owned(&view, name, uid),
        None => waiting(view),
    }
}

fn deleting(view: &View<'_>) -> Plan {
    let fence = recover::fence(view.run, view.pod == Pod::Gone);
    if expire::may_release(view.run, fence) {
        return Plan::RemoveFinalizer;
    }
    match view.run.assignment() {
        Some((name, uid)) if view.pod == Pod::NotSeen => Plan::ConfirmPod {
            name: name.to_owned(),
            uid,
        },
        _ => Plan::Nothing,
    }
}

fn owned(view: &View<'_>, name: &str, uid: PodUid) -> Plan {
    let fence = recover::fence(view.run, view.pod == Pod::Gone);
    if let Some(fence) = fence {
        return lost(view, fence);
    }
    if view.pod == Pod::NotSeen {
        return Plan::ConfirmPod {
            name: name.to_owned(),
            uid,
        };
    }
    match recover::healthy_in(view.run, view.now) {
        None => Plan::Nothing,
        Some(Duration::ZERO) => {
            let mut status = view.run.status.clone().unwrap_or_default();
            status.failed_attempts = None;
            Plan::Write {
                status: Box::new(status),
                why: Why::Healthy,
            }
        }
        Some(left) => Plan::Later(left),
    }
}

fn lost(view: &View<'_>, fence: Fence) -> Plan {
    let step = recover::step(view.run, fence, view.now, view.jitter);
    Plan::Write {
        status: Box::new(step.status),
        why: Why::Recover(step.kind),
    }
}

fn waiting(view: View<'_>) -> Plan {
    let View { run, now, .. } = view;
    let mut status = run.status.clone().unwrap_or_default();
    let generation = run.metadata.generation;
    let mut end = |phase, reason: &str, message: &str| {
        status.set(
            Says {
                kind: SCHEDULED,
                holds: false,
                reason,
                message,
            },
            generation,
            now,
        );
        status.finish(phase, reason, message, generation, now);
        Box::new(std::mem::take(&mut status))
    };
    if run.cancel_requested() {
        let status = end(Phase::Cancelled, "Cancelled", "cancelled before it had a Pod");
        return Plan::Write {
            status,
            why: Why::Cancelled,
        };
    }
    let lifetime = lifetime_left(run, now);
    if lifetime == Some(Duration::ZERO) {
        let status = end(
            Phase::Timeout,
            "Lifetime",
            "spec.timeout has passed while waiting for another Pod",
        );
        return Plan::Write {
            status,
            why: Why::Lifetime,
        };
    }
    let safety = SAFETY_LOOK.min(lifetime.unwrap_or(SAFETY_LOOK));
    if let Some(pause) = retry_pause(run, now) {
        return Plan::Later(pause.min(lifetime.unwrap_or(pause)));
    }
    let ask = match Ask::of(run) {
        Ok(ask) => ask,
        Err(error) => {
            let message = format!("spec.resources.requests: {error}");
            return Plan::Write {
                status: end(Phase::Failed, "InvalidResources", &message),
                why: Why::NeverFits,
            };
        }
    };
    let outcome = match &view.declared {
        None => Outcome::Wait(Wait::NoRuntime),
        declared => cycle::place(&ask, &view.snapshot, declared.as_ref()),
    };
    match outcome {
        Outcome::Placed { pod, uid } => {
            let attempt = run.attempt().map_or(Attempt::FIRST, Attempt::next);
            let status = Box::new(assigned(run, &pod, &uid, attempt, now));
            Plan::Bind {
                status,
                uid,
                attempt,
                ask: Box::new(ask),
            }
        }
        Outcome::NeverFits { resource } => {
            let message = format!(
                "spec.resources.requests.{resource} is more than a whole Pod of Runtime {} has; ask for less or raise spec.capacity.resources.{resource} of the Runtime",
                run.spec.runtime
            );
            Plan::Write {
                status: end(Phase::Failed, "NeverFits", &message),
                why: Why::NeverFits,
            }
        }
        Outcome::Wait(wait) => {
            let status = waits(run, wait, now);
            if Some(&status) == run.status.as_ref() {
                Plan::Later(safety)
            } else {
                Plan::Write {
                    status: Box::new(status),
                    why: Why::Waits(wait),
                }
            }
        }
    }
}

/// The status that says why a Run waits. The same wait always gives the same status.
fn waits(run: &Run, wait: Wait, now: Timestamp) -> RunStatus {
    let mut status = run.status.clone().unwrap_or_default();
    let generation = run.metadata.generation;
    let message = wait.message(&run.spec.runtime);
    let reason = wait.reason();
    let says = |kind| Says {
        kind,
        holds: false,
        reason,
        message: &message,
    };
    status.phase = Some(Phase::Pending);
    status.retry_after = None;
    status.set(says(SCHEDULED), generation, now);
    // After a first attempt Ready goes on to say that it is recovering.
    if run.attempt().is_none() {
        status.set(says(READY), generation, now);
    }
    status.message = Some(message);
    status
}

fn assigned(run: &Run, pod: &str, uid: &PodUid, attempt: Attempt, now: Timestamp) -> RunStatus {
    let mut status = run.status.clone().unwrap_or_default();
    let generation = run.metadata.generation;
    let message = format!("attempt {attempt} is assigned to Pod {pod}");
    status.phase = Some(Phase::Scheduled);
    status.assigned_pod = Some(pod.to_owned());
    status.assigned_pod_uid = Some(uid.as_str().to_owned());
    status.attempt = Some(attempt.get());
    status.retry_after = None;
    status.message = None;
    status.owner = None;
    let says = |kind, holds| Says {
        kind,
        holds,
        reason: "Assigned",
        message: &message,
    };
    status.set(says(SCHEDULED, true), generation, now);
    status.set(says(READY, false), generation, now);
    status
}

/// How long until the next attempt may begin.
fn retry_pause(run: &Run, now: Timestamp) -> Option<Duration> {
    let after = run.status.as_ref()?.retry_after.as_ref()?;
    Duration::try_from(after.0.duration_since(now))
        .ok()
        .filter(|it| !it.is_zero())
}

/// What is left of a function's reservation; `None` without a limit or before its first claim.
fn lifetime_left(run: &Run, now: Timestamp) -> Option<Duration> {
    run.spec.mode.function.as_ref()?;
    let limit = parse_duration(run.spec.timeout.as_deref()?)?;
    let start = run.status.as_ref()?.start_time.as_ref()?;
    let lived = Duration::try_from(now.duration_since(start.0)).unwrap_or_default();
    Some(limit.saturating_sub(lived))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
    use kruntimes_api::{fixtures, quantity::Amount};

    use super::*;
    use crate::snapshot::Candidate;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn view(run: &Run, pod: Pod) -> View<'_> {
        View {
            run,
            pod,
            declared: Some(Amounts::from([("runs".to_owned(), Amount::whole(2))])),
            snapshot: Snapshot {
                pods: vec![Candidate::free("pod-a", &[("runs", 2)])],
            },
            now: at(100),
            jitter: 0.5,
        }
    }

    fn written(plan: Plan) -> (RunStatus, Why) {
        match plan {
            Plan::Write { status, why } => (*status, why),
            other => unreachable!("{other:?}"),
        }
    }

    #[test]
    fn a_new_run_is_assigned_with_pod_uid_and_attempt_c_2_2() {
        let run = fixtures::run("ns", "n").build();
        let Plan::Bind {
            status, uid, attempt, ..
        } = plan(view(&run, Pod::NotSeen))
        else {
            unreachable!()
        };
        assert_eq!((status.phase, attempt), (Some(Phase::Scheduled), Attempt::FIRST));
        assert_eq!(status.assigned_pod.as_deref(), Some("pod-a"));
        assert_eq!(status.assigned_pod_uid.as_deref(), Some(uid.as_str()));
        let scheduled = status
            .conditions
            .as_ref()
            .unwrap()
            .iter()
            .find(|it| it.type_ == SCHEDULED)
            .unwrap();
        assert_eq!(
            (scheduled.status.as_str(), scheduled.observed_generation),
            ("True", Some(1))
        );
    }

    #[test]
    fn the_next_assignment_has_the_next_attempt() {
        let run = fixtures::run("ns", "n").attempt(4).build();
        let Plan::Bind { status, .. } = plan(view(&run, Pod::NotSeen)) else {
            unreachable!()
        };
        assert_eq!(status.attempt, Some(5));
    }

    #[test]
    fn a_waiting_run_is_written_once() {
        let mut run = fixtures::run("ns", "n").build();
        let look = |run: &Run, second| {
            plan(View {
                declared: None,
                now: at(second),
                snapshot: Snapshot::default(),
                ..view(run, Pod::NotSeen)
            })
        };
        let (status, why) = written(look(&run, 100));
        assert_eq!(why, Why::Waits(Wait::NoRuntime));
        run.status = Some(status);
        assert_eq!(
            look(&run, 130),
            Plan::Later(SAFETY_LOOK),
            "nothing changed, nothing is written"
        );
        assert_eq!(run.condition(SCHEDULED).unwrap().reason, "NoRuntime");
        assert_eq!(run.condition(READY).unwrap().status, "False");
    }

    #[test]
    fn more_than_a_pod_has_is_refused_with_the_field_c_7_1() {
        let run = fixtures::run("ns", "n").with(|it| {
            it.spec.resources =
                serde_json::from_value(serde_json::json!({ "requests": { "runs": 3 } })).unwrap();
        });
        let (status, _) = written(plan(view(&run.build(), Pod::NotSeen)));
        assert_eq!(status.phase, Some(Phase::Failed));
        assert!(status.message.unwrap().contains("spec.resources.requests.runs"));
        let completed = status
            .conditions
            .unwrap()
            .into_iter()
            .find(|it| it.type_ == "Completed")
            .unwrap();
        assert_eq!(
            (completed.status.as_str(), completed.reason.as_str()),
            ("True", "NeverFits")
        );
    }

    #[test]
    fn a_cancel_before_the_assignment_ends_the_run_c_7_1() {
        let run = fixtures::run("ns", "n").cancelled().build();
        let (status, why) = written(plan(view(&run, Pod::NotSeen)));
        assert_eq!((status.phase, why), (Some(Phase::Cancelled), Why::Cancelled));
    }

    #[test]
    fn the_next_attempt_waits_out_its_pause() {
        let run = fixtures::run("ns", "n")
            .attempt(1)
            .with(|it| it.status.as_mut().unwrap().retry_after = Some(MicroTime(at(103))))
            .build();
        assert_eq!(
            plan(view(&run, Pod::NotSeen)),
            Plan::Later(Duration::from_secs(3))
        );
        let due = View {
            now: at(103),
            ..view(&run, Pod::NotSeen)
        };
        assert!(matches!(plan(due), Plan::Bind { .. }));
    }

    #[test]
    fn a_pod_that_the_watch_does_not_show_is_read_before_anything_is_taken_away_c_2_3() {
        let run = fixtures::run("ns", "n").ready_on("pod-a").build();
        assert_eq!(plan(view(&run, Pod::There)), Plan::Nothing);
        assert!(matches!(plan(view(&run, Pod::NotSeen)), Plan::ConfirmPod { .. }));
        assert_eq!(
            written(plan(view(&run, Pod::Gone))).1,
            Why::Recover(recover::Kind::Recovering)
        );
    }

    #[test]
    fn a_deleted_run_is_released_only_when_its_pod_is_gone() {
        let run = fixtures::run("ns", "n").ready_on("pod-a").deleting().build();
        assert_eq!(plan(view(&run, Pod::There)), Plan::Nothing);
        assert!(matches!(plan(view(&run, Pod::NotSeen)), Plan::ConfirmPod { .. }));
        assert_eq!(plan(view(&run, Pod::Gone)), Plan::RemoveFinalizer);
        let ended = fixtures::run("ns", "n")
            .ready_on("pod-a")
            .ended(Phase::Failed, "X")
            .deleting()
            .build();
        assert_eq!(plan(view(&ended, Pod::Gone)), Plan::RemoveFinalizer);
        let unowned = fixtures::run("ns", "n").deleting().build();
        assert_eq!(plan(view(&unowned, Pod::NotSeen)), Plan::RemoveFinalizer);
    }

    #[test]
    fn a_deleted_run_without_our_finalizer_is_not_placed() {
        let run = fixtures::run("ns", "n")
            .deleting()
            .with(|it| it.metadata.finalizers = None)
            .build();
        assert_eq!(plan(view(&run, Pod::NotSeen)), Plan::Nothing);
    }

    #[test]
    fn a_reservation_whose_time_is_over_does_not_come_back() {
        let run = fixtures::run("ns", "n")
            .attempt(1)
            .with(|it| {
                it.spec.timeout = Some("1m".to_owned());
                it.status.as_mut().unwrap().start_time = Some(MicroTime(at(30)));
            })
            .build();
        let (status, why) = written(plan(view(&run, Pod::NotSeen)));
        assert_eq!((status.phase, why), (Some(Phase::Timeout), Why::Lifetime));
    }

    #[test]
    fn failures_are_forgotten_after_ten_minutes_of_service() {
        let run = fixtures::run("ns", "n")
            .ready_on("pod-a")
            .with(|it| it.status.as_mut().unwrap().failed_attempts = Some(3))
            .build();
        assert_eq!(
            plan(view(&run, Pod::There)),
            Plan::Later(Duration::from_secs(500))
        );
        let (status, why) = written(plan(View {
            now: at(600),
            ..view(&run, Pod::There)
        }));
        assert_eq!((status.failed_attempts, why), (None, Why::Healthy));
    }
}
