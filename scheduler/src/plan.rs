//! One Run × what is known → the one next thing to do with it.
//!
//! The order of the questions is the point of this file: going away, ended, owned, and only then
//! waiting for a Pod. Of an owned Run, first whether a fence holds, then whether one is needed.

use std::time::Duration;

use jiff::Timestamp;
use kruntimes_api::{
    Run, RunStatus,
    keys::{Attempt, PodUid},
    retry::{LONGEST_PAUSE, parse_duration},
    run::Phase,
    status::{READY, SCHEDULED, Says},
};

use crate::{
    cycle::{self, Ask, Outcome, Wait},
    expire::{self, Expiry},
    facts::Amounts,
    fence::{Fence, Owner, fence},
    recover,
    snapshot::Snapshot,
};

/// A Run that waits for a Pod or for its owner's clean-up is looked at this often even if nothing
/// wakes it.
const SAFETY_LOOK: Duration = Duration::from_secs(30);

/// What is known around a Run.
#[derive(Debug)]
pub struct View<'a> {
    pub run: &'a Run,
    /// The Pod it is assigned to; `None` when it is on none.
    pub owner: Option<Owner>,
    /// Capacity that the Runtime gives each Pod; `None`: there is no such Runtime.
    pub declared: Option<Amounts>,
    /// The Pods of the Runtime.
    pub snapshot: Snapshot,
    pub now: Timestamp,
    /// From 0.0..1.0.
    pub jitter: f64,
}

/// The next thing to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Plan {
    /// Something will wake us.
    Nothing,
    /// Look again after this time.
    Later(Duration),
    /// Read the owner live: Pod, heartbeat and, if the Pod is gone, its node.
    ConfirmOwner { name: String, uid: PodUid },
    /// Delete the owner's Pod, to obtain a fence.
    DeletePod { name: String, uid: PodUid },
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
    match (run.assignment(), &view.owner) {
        (Some((name, uid)), Some(owner)) => owned(&view, owner, name, uid),
        _ => waiting(view),
    }
}

fn deleting(view: &View<'_>) -> Plan {
    let Some((owner, (name, uid))) = view.owner.as_ref().zip(view.run.assignment()) else {
        return if expire::is_held(view.run) {
            Plan::RemoveFinalizer
        } else {
            Plan::Nothing
        };
    };
    if expire::may_release(view.run, fence(view.run, owner)) {
        return Plan::RemoveFinalizer;
    }
    if owner.is_suspect() {
        return suspect(owner, name, uid);
    }
    // Its owner removes the finalizer. Should the owner go before it did, nobody tells: an ended Run is
    // on no Pod any more.
    Plan::Later(SAFETY_LOOK.min(owner.look_again()))
}

fn owned(view: &View<'_>, owner: &Owner, name: &str, uid: PodUid) -> Plan {
    if let Some(fence) = fence(view.run, owner) {
        return lost(view, fence);
    }
    if owner.is_suspect() {
        // The route goes first, and not by hearsay.
        let unrouted = recover::unroute(view.run, owner.complaint(), view.now).filter(|_| owner.confirmed);
        return unrouted.map_or_else(|| suspect(owner, name, uid), write);
    }
    // Nobody tells when a heartbeat stays away.
    let look = owner.look_again();
    match recover::healthy_in(view.run, view.now) {
        None => Plan::Later(look),
        Some(Duration::ZERO) => {
            let mut status = view.run.status.clone().unwrap_or_default();
            status.failed_attempts = None;
            Plan::Write {
                status: Box::new(status),
                why: Why::Healthy,
            }
        }
        Some(left) => Plan::Later(left.min(look)),
    }
}

/// Nothing proves yet that the owner is out.
fn suspect(owner: &Owner, name: &str, uid: PodUid) -> Plan {
    let name = name.to_owned();
    if !owner.confirmed {
        Plan::ConfirmOwner { name, uid }
    } else if owner.may_be_deleted() {
        Plan::DeletePod { name, uid }
    } else {
        Plan::Later(owner.look_again())
    }
}

fn lost(view: &View<'_>, fence: Fence) -> Plan {
    write(recover::step(view.run, fence, view.now, view.jitter))
}

fn write(step: recover::Step) -> Plan {
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

/// How long until the next attempt may begin. A time further away than any pause is from a clock that runs
/// ahead, of a scheduler that led before: it counts as past.
fn retry_pause(run: &Run, now: Timestamp) -> Option<Duration> {
    let after = run.status.as_ref()?.retry_after.as_ref()?;
    Duration::try_from(after.0.duration_since(now))
        .ok()
        .filter(|it| !it.is_zero() && *it <= LONGEST_PAUSE)
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
mod tests;
