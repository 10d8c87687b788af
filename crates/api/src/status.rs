//! Conditions, and status patches that cannot overwrite what they have not seen.
//!
//! Scheduler and runtimed both write a Run's status. Each computes the status it
//! wants from the object it read and sends the difference as a merge patch that
//! names that object's resourceVersion and UID: if anything moved meanwhile, the
//! API server answers 409 and the writer decides again from the live object.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::run::{MESSAGE_MAX, Phase, Run, RunStatus};

/// The Run has a Pod.
pub const SCHEDULED: &str = "Scheduled";
/// The reason of a Run that has lost its assignment, until the scheduler has looked for another Pod.
pub const UNASSIGNED: &str = "Unassigned";
/// The Run is being prepared, registered or executed.
pub const RUNNING: &str = "Running";
/// The function can be called.
pub const READY: &str = "Ready";
/// The Run ended, in whatever way, so that `kubectl wait` returns.
pub const COMPLETED: &str = "Completed";
/// Which way it ended.
pub const SUCCEEDED: &str = "Succeeded";

/// What a condition should say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Says<'a> {
    /// One of the condition types above.
    pub kind: &'a str,
    /// True or False.
    pub holds: bool,
    /// CamelCase, from a closed list.
    pub reason: &'a str,
    /// One line for people, cut to the API's bound.
    pub message: &'a str,
}

/// Sets a condition. `lastTransitionTime` moves only when True becomes False or
/// the reverse.
pub fn set_condition(
    conditions: &mut Vec<Condition>,
    says: Says<'_>,
    generation: Option<i64>,
    now: Timestamp,
) {
    let status = if says.holds { "True" } else { "False" };
    let message = bounded(says.message);
    let Some(known) = conditions
        .iter_mut()
        .find(|condition| condition.type_ == says.kind)
    else {
        conditions.push(Condition {
            type_: says.kind.to_owned(),
            status: status.to_owned(),
            reason: says.reason.to_owned(),
            message,
            observed_generation: generation,
            last_transition_time: Time(now),
        });
        return;
    };
    if known.status != status {
        status.clone_into(&mut known.status);
        known.last_transition_time = Time(now);
    }
    says.reason.clone_into(&mut known.reason);
    known.message = message;
    known.observed_generation = generation;
}

impl RunStatus {
    /// Sets a condition of this status, see [`set_condition`].
    pub fn set(&mut self, says: Says<'_>, generation: Option<i64>, now: Timestamp) {
        set_condition(self.conditions.get_or_insert_default(), says, generation, now);
    }

    /// Forgets Pod, UID, owner and endpoint's readiness together (C-2.2). The
    /// endpoint itself may stay: its URL holds across attempts.
    pub fn clear_assignment(&mut self) {
        self.assigned_pod = None;
        self.assigned_pod_uid = None;
        self.owner = None;
    }

    /// Ends the Run: phase, completion time, Ready=False, Completed=True and
    /// Succeeded as the phase says.
    pub fn finish(
        &mut self,
        phase: Phase,
        reason: &str,
        message: &str,
        generation: Option<i64>,
        now: Timestamp,
    ) {
        self.phase = Some(phase);
        self.completion_time = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime(now));
        self.message = Some(bounded(message));
        self.retry_after = None;
        self.owner = None;
        let mut set = |kind, holds| {
            self.set(
                Says {
                    kind,
                    holds,
                    reason,
                    message,
                },
                generation,
                now,
            )
        };
        set(READY, false);
        set(RUNNING, false);
        set(COMPLETED, true);
        set(SUCCEEDED, phase == Phase::Succeeded);
    }
}

/// The merge patch for the status subresource that turns `run`'s status into
/// `wanted`; `None` when nothing would change.
#[must_use]
pub fn patch(run: &Run, wanted: &RunStatus) -> Option<Value> {
    let before = run.status.as_ref().map_or_else(|| json!({}), as_value);
    let change = difference(&before, &as_value(wanted))?;
    Some(json!({
        "metadata": { "resourceVersion": run.metadata.resource_version, "uid": run.metadata.uid },
        "status": change,
    }))
}

/// The RFC 7386 merge patch from `before` to `after`; `None` when they are equal.
#[must_use]
pub fn difference(before: &Value, after: &Value) -> Option<Value> {
    if before == after {
        return None;
    }
    let (Value::Object(before), Value::Object(after)) = (before, after) else {
        return Some(after.clone());
    };
    let mut change = Map::new();
    for (key, value) in after {
        match before.get(key) {
            Some(known) => {
                if let Some(inner) = difference(known, value) {
                    change.insert(key.clone(), inner);
                }
            }
            None => {
                change.insert(key.clone(), value.clone());
            }
        }
    }
    for key in before.keys().filter(|key| !after.contains_key(*key)) {
        change.insert(key.clone(), Value::Null);
    }
    Some(Value::Object(change))
}

/// Cuts a message to what the API accepts, at a character boundary.
#[must_use]
pub fn bounded(message: &str) -> String {
    // maxLength counts characters; bytes are never fewer.
    let end = message
        .char_indices()
        .map(|(at, c)| at + c.len_utf8())
        .take_while(|end| *end <= MESSAGE_MAX)
        .last();
    message[..end.unwrap_or(0)].to_owned()
}

fn as_value(status: &impl Serialize) -> Value {
    serde_json::to_value(status).unwrap_or_else(|_| json!({}))
}

/// What a refused write says to people. Writes are sent with `fieldValidation=Strict`, so that a CRD that is older
/// than the writer refuses what it does not know, where it would else drop it and take the rest.
#[must_use]
pub fn refusal(message: &str) -> String {
    if message.contains("unknown field") {
        format!(
            "{message}; the CRDs are older than this program: apply those of its chart, or set crds.enabled"
        )
    } else {
        message.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    const NOW: Timestamp = Timestamp::UNIX_EPOCH;

    fn later() -> Timestamp {
        Timestamp::from_second(60).unwrap()
    }

    #[test]
    fn an_old_crd_is_named_with_its_remedy() {
        let told = refusal("strict decoding error: unknown field \"status.owner\"");
        assert!(
            told.contains("status.owner") && told.contains("apply those of its chart"),
            "{told}"
        );
        assert_eq!(refusal("denied by policy"), "denied by policy");
    }

    #[test]
    fn a_transition_moves_the_time_and_a_new_reason_does_not() {
        let mut status = RunStatus::default();
        let says = |holds, reason| Says {
            kind: READY,
            holds,
            reason,
            message: "m",
        };
        status.set(says(false, "Registering"), Some(1), NOW);
        status.set(says(false, "Recovering"), Some(1), later());
        let ready = &status.conditions.as_ref().unwrap()[0];
        assert_eq!(
            (ready.reason.as_str(), ready.last_transition_time.0),
            ("Recovering", NOW)
        );
        status.set(says(true, "FunctionRegistered"), Some(2), later());
        let ready = &status.conditions.as_ref().unwrap()[0];
        assert_eq!(
            (ready.last_transition_time.0, ready.observed_generation),
            (later(), Some(2))
        );
    }

    #[test]
    fn a_patch_names_what_it_saw_and_clears_what_is_gone() {
        let run = fixtures::run("ns", "n").ready_on("pod-a").build();
        let mut wanted = run.status.clone().unwrap();
        wanted.clear_assignment();
        let patch = patch(&run, &wanted).unwrap();
        assert_eq!(
            patch["metadata"]["resourceVersion"],
            json!(run.metadata.resource_version)
        );
        assert_eq!(patch["metadata"]["uid"], json!(run.metadata.uid));
        assert_eq!(
            patch["status"],
            json!({ "assignedPod": null, "assignedPodUID": null, "owner": null })
        );
    }

    /// C-6.7: nothing is written while nothing changes.
    #[test]
    fn an_unchanged_status_is_not_written() {
        let run = fixtures::run("ns", "n").ready_on("pod-a").build();
        assert_eq!(patch(&run, run.status.as_ref().unwrap()), None);
    }

    /// C-2.2
    #[test]
    fn an_end_completes_whatever_it_was() {
        let mut status = RunStatus::default();
        status.finish(Phase::Cancelled, "Cancelled", "on request", Some(1), NOW);
        let holds = |kind: &str| {
            let conditions = status.conditions.as_ref().unwrap();
            conditions
                .iter()
                .find(|it| it.type_ == kind)
                .map(|it| it.status.clone())
        };
        assert_eq!(holds(COMPLETED).as_deref(), Some("True"));
        assert_eq!(holds(SUCCEEDED).as_deref(), Some("False"));
        assert_eq!(holds(READY).as_deref(), Some("False"));
    }

    #[test]
    fn a_long_message_is_cut_at_a_character() {
        let cut = bounded(&"é".repeat(4096));
        assert!(cut.len() <= MESSAGE_MAX && cut.chars().all(|c| c == 'é'));
    }
}
