//! Lost owner → fenced → next attempt, or the end (C-7.3).
//!
//! Two writes, in this order: first Ready=False/`Recovering` without owner, so that gateways drop
//! the route; then, under a [`Fence`], the assignment is cleared.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kruntimes_api::{
    Run, RunStatus,
    retry::{self, HEALTHY_AFTER, Next},
    run::Phase,
    status::{READY, RUNNING, SCHEDULED, Says, UNASSIGNED},
};

use crate::fence::Fence;

/// What to write next.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    pub status: RunStatus,
    pub kind: Kind,
    /// The failure that led here, for people and metrics; empty for a hand-over.
    pub reason: String,
}

/// Which transition a step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The route goes; the assignment stays.
    Recovering,
    /// Back to the queue, after a pause.
    Retrying,
    /// Back to the queue, at no cost: nothing had failed.
    HandedOver,
    /// The same, after a pause: its Pod would not have it.
    TurnedAway,
    /// The budget is spent.
    Exhausted,
    /// Another attempt would end alike.
    Permanent,
    /// It was to be cancelled, and nobody is left who could be asked to.
    Cancelled,
}

/// The reason of failures that the loss of a Pod is.
pub const POD_GONE: &str = "PodGone";
/// The reason of a hand-over that costs no attempt.
const DRAINING: &str = "Draining";
/// How long a Run that was refused waits at least before it asks again, and at most twice as long.
const REFUSED_PAUSE: Duration = Duration::from_secs(10);
/// Reasons that are no accident of one attempt: the server lacks what the Run needs (C-5.7).
const PERMANENT: [&str; 2] = ["FunctionModeUnsupported", "TaskModeUnsupported"];

/// The write that takes the route away and nothing else; `None` when there is none.
pub fn unroute(run: &Run, message: &str, now: Timestamp) -> Option<Step> {
    let mut status = run.status.clone().unwrap_or_default();
    if run.condition(READY).is_none_or(|it| it.status != "True") && status.owner.is_none() {
        return None;
    }
    // The transition time of Ready is lost by this write, so a long good life is noted now.
    if is_healthy(run, now) {
        status.failed_attempts = None;
    }
    status.owner = None;
    if status.phase == Some(Phase::Ready) {
        status.phase = Some(Phase::Running);
    }
    status.message = Some(message.to_owned());
    let says = Says {
        kind: READY,
        holds: false,
        reason: "Recovering",
        message,
    };
    status.set(says, run.metadata.generation, now);
    Some(Step {
        status,
        kind: Kind::Recovering,
        reason: String::new(),
    })
}

/// The next step for an assigned Run that has not ended, under `fence`.
///
/// `jitter` is drawn from 0.0..1.0.
pub fn step(run: &Run, fence: Fence, now: Timestamp, jitter: f64) -> Step {
    let generation = run.metadata.generation;
    let message = match fence {
        Fence::PodGone => "the owning Pod is gone",
        Fence::PodOut => "the owning Pod is being deleted and sends no heartbeat",
        Fence::Released => "the owning Pod gave the function back",
    };
    if let Some(step) = unroute(run, message, now) {
        return step;
    }

    let mut status = run.status.clone().unwrap_or_default();
    let ready = run.condition(READY);
    let (reason, detail) = match fence {
        Fence::PodGone | Fence::PodOut => (POD_GONE, String::new()),
        Fence::Released => (
            ready.map_or("Released", |it| it.reason.as_str()),
            ready.map(|it| it.message.clone()).unwrap_or_default(),
        ),
    };
    // Never claimed: nothing of it has run, so nothing has failed.
    let cost = run.phase() != Phase::Scheduled && reason != DRAINING;
    let reason = reason.to_owned();
    let pod = status.assigned_pod.clone().unwrap_or_default();
    let attempt = status.attempt.unwrap_or_default();
    status.clear_assignment();

    if run.cancel_requested() {
        let message = format!("cancelled; attempt {attempt} on Pod {pod} is over ({reason})");
        unschedule(&mut status, UNASSIGNED, &message, generation, now);
        status.finish(Phase::Cancelled, "Cancelled", &message, generation, now);
        return Step {
            status,
            kind: Kind::Cancelled,
            reason,
        };
    }
    let detail = if detail.is_empty() {
        String::new()
    } else {
        format!(": {detail}")
    };
    if fence == Fence::Released && PERMANENT.contains(&reason.as_str()) {
        let message = format!(
            "attempt {attempt} on Pod {pod} failed ({reason}{detail}); another Pod of this Runtime would not do better"
        );
        unschedule(&mut status, &reason, &message, generation, now);
        status.finish(Phase::Failed, &reason, &message, generation, now);
        return Step {
            status,
            kind: Kind::Permanent,
            reason,
        };
    }
    if !cost {
        let message = format!("attempt {attempt} on Pod {pod} is over ({reason}); waiting for another Pod");
        // Who refuses for no cost must not be asked without pause.
        let turned_away = fence == Fence::Released && reason != DRAINING;
        let pause = REFUSED_PAUSE.mul_f64(1.0 + jitter);
        status.phase = Some(Phase::Pending);
        status.retry_after = turned_away.then(|| later(now, pause));
        status.message = Some(message.clone());
        pending(&mut status, UNASSIGNED, &message, generation, now);
        return Step {
            status,
            kind: if turned_away {
                Kind::TurnedAway
            } else {
                Kind::HandedOver
            },
            reason,
        };
    }

    let before = status.failed_attempts.unwrap_or_default();
    match retry::next(
        &run.spec.mode,
        run.spec.retry_policy.as_ref(),
        &reason,
        before,
        None,
        jitter,
    ) {
        Next::Retry { failed, after } => {
            let message = format!("attempt {attempt} on Pod {pod} failed ({reason}{detail}); trying again");
            status.phase = Some(Phase::Pending);
            status.failed_attempts = Some(failed);
            status.retry_after = Some(later(now, after));
            status.message = Some(kruntimes_api::status::bounded(&message));
            pending(&mut status, "Retrying", &message, generation, now);
            Step {
                status,
                kind: Kind::Retrying,
                reason,
            }
        }
        Next::Exhausted { failed } => {
            let message =
                format!("attempt {attempt} on Pod {pod} failed ({reason}{detail}); no attempt is left");
            status.failed_attempts = Some(failed);
            unschedule(&mut status, "RetriesExhausted", &message, generation, now);
            status.finish(Phase::Failed, "RetriesExhausted", &message, generation, now);
            Step {
                status,
                kind: Kind::Exhausted,
                reason,
            }
        }
    }
}

fn later(now: Timestamp, pause: Duration) -> MicroTime {
    MicroTime(now.checked_add(pause).unwrap_or(now))
}

/// Whether a function has been Ready so long that its count of failures begins anew (C-2,
/// `retryPolicy`), and a count is there.
pub fn is_healthy(run: &Run, now: Timestamp) -> bool {
    healthy_in(run, now).is_some_and(|left| left.is_zero())
}

/// How long until [`is_healthy`]; `None` when it never will be or nothing is to be forgotten.
pub fn healthy_in(run: &Run, now: Timestamp) -> Option<Duration> {
    let failures = run.status.as_ref()?.failed_attempts.unwrap_or_default();
    if failures <= 0 || !run.is_ready() || run.spec.mode.function.is_none() {
        return None;
    }
    let since = run.condition(READY)?.last_transition_time.0;
    let lived = Duration::try_from(now.duration_since(since)).unwrap_or_default();
    Some(HEALTHY_AFTER.saturating_sub(lived))
}

fn pending(status: &mut RunStatus, reason: &str, message: &str, generation: Option<i64>, now: Timestamp) {
    unschedule(status, reason, message, generation, now);
    // A Run that was never claimed has no Running condition, and needs none.
    let claimed = status.conditions.iter().flatten().any(|it| it.type_ == RUNNING);
    let says = |kind, reason| Says {
        kind,
        holds: false,
        reason,
        message,
    };
    if claimed {
        status.set(says(RUNNING, reason), generation, now);
    }
    status.set(says(READY, "Recovering"), generation, now);
}

fn unschedule(status: &mut RunStatus, reason: &str, message: &str, generation: Option<i64>, now: Timestamp) {
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
}

#[cfg(test)]
mod tests;
