//! A Run as a watch delivers it → only what routing needs.
//!
//! The fields are read loosely (texts, everything optional) and not through the types of `kruntimes-api`:
//! one object that a newer version wrote must not cost this gateway all its routes, and the source of a
//! function, which is most of its bytes, is skipped while parsing.

use std::net::SocketAddr;

use jiff::Timestamp;
use kruntimes_api::{
    keys::{Attempt, PodUid, RunKey},
    status::UNASSIGNED,
};
use kruntimes_peer::PeerKey;
use kruntimes_proto::limits::clip;
use kube::core::Object;
use serde::{Deserialize, Serialize};

use super::{Entry, NotReady, Owner, Route, State};

/// A Run, as far as routing reads it.
pub type SeenRun = Object<Spec, Status>;

/// Part of `Run.spec`.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Spec {
    runtime: String,
    mode: Mode,
    timeout: Option<String>,
    cancel_requested: Option<bool>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
struct Mode {
    #[serde(skip_serializing_if = "Option::is_none")]
    function: Option<Present>,
}

/// Something is there; what, does not matter.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
struct Present {}

/// Part of `Run.status`.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    phase: Option<String>,
    #[serde(rename = "assignedPodUID")]
    assigned_pod_uid: Option<String>,
    owner: Option<SeenOwner>,
    attempt: Option<i32>,
    start_time: Option<String>,
    conditions: Option<Vec<SeenCondition>>,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", default)]
struct SeenOwner {
    address: String,
    peer_key: String,
}

#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[serde(default)]
struct SeenCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    reason: String,
    message: String,
}

/// Longest text that is kept of a Run's conditions, bytes.
const WHY_BYTES: usize = 512;

impl Entry {
    /// What routing needs of `run`; `None` for a task, and for an object without a name or UID.
    #[must_use]
    pub fn of(run: &SeenRun) -> Option<Self> {
        run.spec.mode.function.as_ref()?;
        let key = RunKey {
            namespace: run.metadata.namespace.clone()?,
            name: run.metadata.name.clone()?,
            uid: run.metadata.uid.as_deref()?.parse().ok()?,
        };
        let status = run.status.as_ref();
        let state = state(run);
        // What has ended has nobody to ask.
        let route = match state {
            State::Ended { .. } => None,
            _ => status.and_then(route),
        };
        Some(Self {
            key,
            runtime: run.spec.runtime.clone(),
            attempt: status.and_then(|status| status.attempt).unwrap_or(0),
            ends_at: status.and_then(|status| ends_at(&run.spec, status)),
            state,
            route,
            why: status.and_then(why),
            nowhere: status.is_some_and(is_nowhere),
            handed_over: None,
        })
    }
}

/// Whether the scheduler has looked for a Pod and says why there is none, or lets the Run pause. That a Run has just
/// lost its assignment says nothing yet.
fn is_nowhere(status: &Status) -> bool {
    condition(status, "Scheduled")
        .is_some_and(|condition| condition.status == "False" && condition.reason != UNASSIGNED)
}

/// `Scheduled=CapacityFull: every Pod is full; …`: the conditions that are False.
fn why(status: &Status) -> Option<String> {
    let against = status
        .conditions
        .iter()
        .flatten()
        .filter(|condition| condition.status == "False");
    let texts: Vec<String> = against
        .map(|condition| {
            let colon = if condition.message.is_empty() { "" } else { ": " };
            format!(
                "{}={}{colon}{}",
                condition.kind, condition.reason, condition.message
            )
        })
        .collect();
    (!texts.is_empty()).then(|| clip(&texts.join("; "), WHY_BYTES))
}

fn state(run: &SeenRun) -> State {
    let empty = Status::default();
    let status = run.status.as_ref().unwrap_or(&empty);
    let phase = status.phase.as_deref().unwrap_or("Pending");
    if matches!(phase, "Succeeded" | "Failed" | "Timeout" | "Cancelled") {
        let reason = ["Succeeded", "Completed"]
            .iter()
            .filter_map(|kind| condition(status, kind))
            .map(|condition| condition.reason.as_str())
            .find(|reason| !reason.is_empty());
        return State::Ended {
            phase: phase.to_owned(),
            reason: reason.unwrap_or("Unknown").to_owned(),
        };
    }
    if run.metadata.deletion_timestamp.is_some() || run.spec.cancel_requested == Some(true) {
        return State::NotReady(NotReady::Terminating);
    }
    let ready = condition(status, "Ready");
    if phase == "Ready"
        && ready.is_some_and(|ready| ready.status == "True")
        && let Some(route) = route(status)
    {
        return State::Ready(route);
    }
    State::NotReady(why_not(
        phase,
        status,
        ready.map_or("", |ready| ready.reason.as_str()),
    ))
}

fn why_not(phase: &str, status: &Status, reason: &str) -> NotReady {
    match (reason, phase) {
        ("Draining", _) => NotReady::Draining,
        ("Deleting" | "Cancelled", _) => NotReady::Terminating,
        ("Recovering" | "PodGone" | "Retrying", _) => NotReady::Recovering,
        (_, "Running" | "Ready") => NotReady::Registering,
        // It had a Pod once.
        (_, "Pending") if status.attempt.is_some() => NotReady::Recovering,
        _ => NotReady::Pending,
    }
}

fn route(status: &Status) -> Option<Route> {
    let owner = status.owner.as_ref()?;
    Some(Route {
        owner: Owner {
            address: owner.address.parse::<SocketAddr>().ok()?,
            key: owner.peer_key.parse::<PeerKey>().ok()?,
        },
        attempt: status.attempt.and_then(Attempt::new)?,
        pod_uid: PodUid::new(status.assigned_pod_uid.clone()?)?,
    })
}

fn condition<'a>(status: &'a Status, kind: &str) -> Option<&'a SeenCondition> {
    status
        .conditions
        .as_deref()?
        .iter()
        .find(|condition| condition.kind == kind)
}

/// `timeout` of a function is the life of its reservation from `startTime` (C-2).
fn ends_at(spec: &Spec, status: &Status) -> Option<Timestamp> {
    let life = std::time::Duration::from(spec.timeout.as_deref()?.parse::<kube::core::Duration>().ok()?);
    let start: Timestamp = status.start_time.as_deref()?.parse().ok()?;
    start.checked_add(life).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const UID: &str = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";

    fn run(spec: Value, status: Value) -> SeenRun {
        let mut all = json!({
            "apiVersion": "kruntimes.io/v1alpha1", "kind": "Run",
            "metadata": { "namespace": "demo", "name": "hello", "uid": UID },
            "spec": { "runtime": "python", "mode": { "function": { "handler": "main.handler" } },
                      "source": { "inline": "x" } },
            "status": status,
        });
        for (key, value) in spec.as_object().unwrap() {
            all["spec"][key] = value.clone();
        }
        serde_json::from_value(all).unwrap()
    }

    fn ready() -> Value {
        json!({
            "phase": "Ready", "attempt": 3, "assignedPod": "p", "assignedPodUID": "pod-uid",
            "owner": { "address": "10.1.2.3:9443", "peerKey": "ab".repeat(32) },
            "conditions": [{ "type": "Ready", "status": "True", "reason": "FunctionRegistered" }],
        })
    }

    fn state_of(spec: Value, status: Value) -> State {
        Entry::of(&run(spec, status)).unwrap().state
    }

    /// C-3.11
    #[test]
    fn what_speaks_against_calling_is_kept_for_people() {
        let mut status = ready();
        assert_eq!(Entry::of(&run(json!({}), status.clone())).unwrap().why, None);
        status["conditions"] = json!([
            { "type": "Scheduled", "status": "True", "reason": "Assigned", "message": "" },
            { "type": "Running", "status": "False", "reason": "CapacityRefused", "message": "no room" },
            { "type": "Ready", "status": "False", "reason": "Draining" },
        ]);
        let entry = Entry::of(&run(json!({}), status.clone())).unwrap();
        assert_eq!(
            entry.why.as_deref(),
            Some("Running=CapacityRefused: no room; Ready=Draining")
        );
        status["conditions"][1]["message"] = json!("x".repeat(5000));
        let entry = Entry::of(&run(json!({}), status)).unwrap();
        assert_eq!(entry.why.unwrap().len(), WHY_BYTES);
    }

    /// C-3.10: a call may still run there.
    #[test]
    fn who_holds_a_function_that_takes_no_more_calls_is_known() {
        let mut status = ready();
        status["conditions"][0]["status"] = json!("False");
        status["conditions"][0]["reason"] = json!("Draining");
        let entry = Entry::of(&run(json!({}), status)).unwrap();
        assert_eq!(entry.state, State::NotReady(NotReady::Draining));
        assert_eq!(entry.route.unwrap().pod_uid.as_str(), "pod-uid");
    }

    /// Contract 4
    #[test]
    fn a_ready_function_has_a_route_with_its_fence() {
        let entry = Entry::of(&run(json!({}), ready())).unwrap();
        assert_eq!((entry.runtime.as_str(), entry.attempt), ("python", 3));
        let State::Ready(route) = entry.state else {
            panic!("{:?}", entry.state)
        };
        assert_eq!(route.owner.address, "10.1.2.3:9443".parse().unwrap());
        assert_eq!((route.attempt.get(), route.pod_uid.as_str()), (3, "pod-uid"));
    }

    #[test]
    fn a_task_is_no_route() {
        let mut task = run(json!({}), ready());
        task.spec.mode.function = None;
        assert_eq!(Entry::of(&task), None);
    }

    #[test]
    fn ready_needs_phase_condition_and_owner() {
        let mut no_condition = ready();
        no_condition["conditions"] = json!([]);
        let mut no_owner = ready();
        no_owner["owner"] = Value::Null;
        let mut bad_key = ready();
        bad_key["owner"]["peerKey"] = json!("AB");
        let mut bad_address = ready();
        bad_address["owner"]["address"] = json!("example.com:9443");
        let mut no_attempt = ready();
        no_attempt["attempt"] = Value::Null;
        for status in [no_condition, no_owner, bad_key, bad_address, no_attempt] {
            assert_eq!(
                state_of(json!({}), status),
                State::NotReady(NotReady::Registering)
            );
        }
    }

    #[test]
    fn why_a_function_is_not_ready() {
        let with = |reason: &str| json!([{ "type": "Ready", "status": "False", "reason": reason }]);
        for (status, expected) in [
            (json!({}), NotReady::Pending),
            (json!({ "phase": "Scheduled", "attempt": 1 }), NotReady::Pending),
            (json!({ "phase": "Pending", "attempt": 1 }), NotReady::Recovering),
            (json!({ "phase": "Running", "attempt": 1 }), NotReady::Registering),
            (
                json!({ "phase": "Running", "conditions": with("Recovering") }),
                NotReady::Recovering,
            ),
            (
                json!({ "phase": "Ready", "conditions": with("Draining") }),
                NotReady::Draining,
            ),
            (
                json!({ "phase": "Ready", "conditions": with("Deleting") }),
                NotReady::Terminating,
            ),
        ] {
            assert_eq!(
                state_of(json!({}), status.clone()),
                State::NotReady(expected),
                "{status}"
            );
        }
        let cancelled = state_of(json!({ "cancelRequested": true }), ready());
        assert_eq!(cancelled, State::NotReady(NotReady::Terminating));
        let mut deleting = run(json!({}), ready());
        deleting.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        assert_eq!(
            Entry::of(&deleting).unwrap().state,
            State::NotReady(NotReady::Terminating)
        );
    }

    #[test]
    fn the_scheduler_says_when_no_pod_can_take_a_run() {
        let nowhere = |scheduled: Value| {
            let status = json!({ "phase": "Pending", "conditions": [scheduled] });
            Entry::of(&run(json!({}), status)).unwrap().nowhere
        };
        let scheduled =
            |status: &str, reason: &str| json!({ "type": "Scheduled", "status": status, "reason": reason });
        for reason in ["CapacityFull", "NoPodReady", "Retrying", "SomethingNew"] {
            assert!(nowhere(scheduled("False", reason)), "{reason}");
        }
        assert!(
            !nowhere(scheduled("False", "Unassigned")),
            "it has not looked yet"
        );
        assert!(!nowhere(scheduled("True", "Assigned")));
        assert!(!nowhere(
            json!({ "type": "Ready", "status": "False", "reason": "Recovering" })
        ));
    }

    #[test]
    fn the_end_has_a_phase_and_a_reason() {
        let status = json!({
            "phase": "Timeout",
            "conditions": [{ "type": "Succeeded", "status": "False", "reason": "IdleTimeout" }],
        });
        let ended = |reason: &str| State::Ended {
            phase: "Timeout".into(),
            reason: reason.into(),
        };
        assert_eq!(state_of(json!({}), status), ended("IdleTimeout"));
        assert_eq!(
            state_of(json!({}), json!({ "phase": "Timeout" })),
            ended("Unknown")
        );
    }

    #[test]
    fn the_remaining_life_counts_from_the_start() {
        let mut status = ready();
        status["startTime"] = json!("2026-01-01T00:00:00.500000Z");
        let entry = Entry::of(&run(json!({ "timeout": "90s" }), status)).unwrap();
        assert_eq!(entry.ends_at, Some("2026-01-01T00:01:30.5Z".parse().unwrap()));
        assert_eq!(
            Entry::of(&run(json!({ "timeout": "90s" }), ready()))
                .unwrap()
                .ends_at,
            None
        );
    }

    #[test]
    fn what_a_newer_version_writes_is_read_as_far_as_possible() {
        let mut status = ready();
        status["phase"] = json!("Hibernating");
        status["owner"]["region"] = json!("x");
        assert_eq!(
            state_of(json!({ "mode": { "function": {} } }), status),
            State::NotReady(NotReady::Pending)
        );
    }
}
