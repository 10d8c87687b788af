//! What became of a pool → the status of its Runtime (C-2).

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kruntimes_api::{
    Runtime, RuntimeStatus,
    status::{Says, difference, set_condition},
};
use serde_json::{Value, json};

use super::{Refusal, replicas, selector_text};
use crate::facts::DeploymentFacts;

const ACCEPTED: &str = "Accepted";
const READY: &str = "Ready";
const APPLY_FAILED: &str = "ApplyFailed";

/// How making the objects went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Made {
    All,
    /// All but a new template: another pool of the namespace is being rolled.
    RollsLater {
        other: String,
    },
    Refused(Refusal),
    Failed(Failure),
}

/// Why an object could not be applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// Kind and answer, the same for the same trouble: `Deployment: 403 Forbidden`.
    pub(crate) class: String,
    /// What the API said, which may differ each time: a time, a request's id.
    pub(crate) detail: String,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.class, self.detail)
    }
}

/// What a Runtime's status should say.
pub(crate) fn status(
    runtime: &Runtime,
    deployment: Option<&DeploymentFacts>,
    made: &Made,
    now: Timestamp,
) -> RuntimeStatus {
    let generation = runtime.metadata.generation;
    let name = runtime.metadata.name.as_deref().unwrap_or_default();
    let mut status = runtime.status.clone().unwrap_or_default();
    let ready = deployment.map_or(0, |it| it.ready);
    status.observed_generation = generation;
    status.replicas = Some(deployment.map_or(0, |it| it.replicas));
    status.ready_replicas = Some(ready);
    status.selector = Some(selector_text(name));
    let conditions: &mut Vec<Condition> = status.conditions.get_or_insert_default();
    let mut set = |kind, holds, reason, message: &str| {
        set_condition(
            conditions,
            Says {
                kind,
                holds,
                reason,
                message,
            },
            generation,
            now,
        );
    };
    match made {
        Made::All => set(ACCEPTED, true, "Accepted", "the pool is made as asked"),
        Made::Refused(refusal) => set(ACCEPTED, false, refusal.reason, &refusal.message),
        Made::RollsLater { other } => {
            let message = format!("the Pods are replaced when those of Runtime {other} have been");
            set(ACCEPTED, true, "RollsLater", &message);
        }
        Made::Failed(failure) => {
            let message = stable_message(&runtime.status, failure, generation);
            set(ACCEPTED, false, APPLY_FAILED, &message);
        }
    }
    let wanted = replicas(&runtime.spec);
    match deployment {
        _ if ready > 0 && ready >= wanted => set(READY, true, "PodsReady", "every Pod of the pool is ready"),
        _ if ready > 0 => set(READY, true, "SomePodsReady", "some Pods of the pool are ready"),
        Some(DeploymentFacts {
            failure: Some(failure),
            ..
        }) => set(READY, false, "PodsRefused", failure),
        _ if matches!(made, Made::Refused(_)) => {
            set(READY, false, "NotAccepted", "the Runtime is not accepted")
        }
        _ if wanted == 0 => set(READY, false, "ScaledToZero", "spec.replicas is 0"),
        _ => set(READY, false, "NoPodReady", "no Pod of the pool is ready"),
    }
    status
}

/// The first text of the same trouble stays: a condition that changes with each try would be written with
/// each try.
fn stable_message(known: &Option<RuntimeStatus>, failure: &Failure, generation: Option<i64>) -> String {
    let class = format!("{}: ", failure.class);
    let said = known
        .iter()
        .flat_map(|it| it.conditions.iter().flatten())
        .find(|it| {
            it.type_ == ACCEPTED
                && it.reason == APPLY_FAILED
                && it.observed_generation == generation
                && it.message.starts_with(&class)
        });
    said.map_or_else(|| failure.to_string(), |it| it.message.clone())
}

/// The guarded merge patch; `None` when nothing would change.
pub(crate) fn patch(runtime: &Runtime, wanted: &RuntimeStatus) -> Option<Value> {
    let value = |status: &RuntimeStatus| serde_json::to_value(status).unwrap_or_else(|_| json!({}));
    let before = runtime.status.as_ref().map_or_else(|| json!({}), value);
    let change = difference(&before, &value(wanted))?;
    let meta = &runtime.metadata;
    Some(
        json!({ "metadata": { "resourceVersion": meta.resource_version, "uid": meta.uid }, "status": change }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::ObjectKey;

    fn runtime() -> Runtime {
        serde_json::from_value(json!({
            "apiVersion": "kruntimes.io/v1alpha1", "kind": "Runtime",
            "metadata": { "name": "python", "namespace": "ns", "uid": "u", "resourceVersion": "9", "generation": 4 },
            "spec": { "template": { "spec": { "containers": [{ "name": "runtime", "image": "x" }] } }, "replicas": 2 },
        }))
        .unwrap()
    }

    fn deployment(ready: i32) -> DeploymentFacts {
        DeploymentFacts {
            key: ObjectKey::new("ns", "runtime-python"),
            uid: "d".to_owned(),
            generation: 1,
            runtime: Some("python".to_owned()),
            scaled_by_others: false,
            wanted: Some(2),
            replicas: 2,
            ready,
            failure: None,
            template: None,
            rolls: false,
        }
    }

    fn condition<'a>(status: &'a RuntimeStatus, kind: &str) -> (&'a str, &'a str, Option<i64>) {
        let found = status
            .conditions
            .as_ref()
            .unwrap()
            .iter()
            .find(|it| it.type_ == kind)
            .unwrap();
        (&found.status, &found.reason, found.observed_generation)
    }

    /// C-2: status of a Runtime.
    #[test]
    fn readiness_follows_the_pods() {
        let look = |deployment: Option<&DeploymentFacts>| {
            status(&runtime(), deployment, &Made::All, Timestamp::UNIX_EPOCH)
        };
        assert_eq!(condition(&look(None), READY), ("False", "NoPodReady", Some(4)));
        assert_eq!(condition(&look(Some(&deployment(1))), READY).1, "SomePodsReady");
        let all = look(Some(&deployment(2)));
        assert_eq!(condition(&all, READY), ("True", "PodsReady", Some(4)));
        assert_eq!(condition(&all, ACCEPTED), ("True", "Accepted", Some(4)));
        assert_eq!((all.replicas, all.ready_replicas), (Some(2), Some(2)));
        assert_eq!(
            all.selector.as_deref(),
            Some("app=kruntimes-python,runtime=python")
        );
        let refused = DeploymentFacts {
            failure: Some("violates PodSecurity".to_owned()),
            ..deployment(0)
        };
        assert_eq!(condition(&look(Some(&refused)), READY).1, "PodsRefused");
    }

    /// C-2
    #[test]
    fn a_refusal_is_a_condition_that_says_why() {
        let refusal = Refusal {
            reason: "HostPath",
            message: "volumes[0]".to_owned(),
        };
        let status = status(&runtime(), None, &Made::Refused(refusal), Timestamp::UNIX_EPOCH);
        assert_eq!(condition(&status, ACCEPTED), ("False", "HostPath", Some(4)));
        assert_eq!(condition(&status, READY).1, "NotAccepted");
    }

    #[test]
    fn an_unchanged_status_is_not_written_and_a_changed_one_is_guarded() {
        let mut runtime = runtime();
        let wanted = status(&runtime, Some(&deployment(2)), &Made::All, Timestamp::UNIX_EPOCH);
        let patch_ = patch(&runtime, &wanted).unwrap();
        assert_eq!(patch_["metadata"], json!({ "resourceVersion": "9", "uid": "u" }));
        runtime.status = Some(wanted);
        let later = Timestamp::from_second(60).unwrap();
        let again = status(&runtime, Some(&deployment(2)), &Made::All, later);
        assert_eq!(patch(&runtime, &again), None);
    }

    /// Scenario 99: the text of a refusal may hold a time or an id; the status does not follow it.
    #[test]
    fn a_refusal_that_words_itself_anew_is_written_once() {
        let mut runtime = runtime();
        let failed = |runtime: &Runtime, class: &str, detail: &str| {
            let failure = Failure {
                class: class.to_owned(),
                detail: detail.to_owned(),
            };
            status(runtime, None, &Made::Failed(failure), Timestamp::UNIX_EPOCH)
        };
        let first = failed(&runtime, "Deployment: 403 Forbidden", "request 1");
        runtime.status = Some(first.clone());
        assert_eq!(failed(&runtime, "Deployment: 403 Forbidden", "request 2"), first);
        let other = failed(&runtime, "Deployment: 422 Invalid", "request 3");
        let accepted = other.conditions.iter().flatten().find(|it| it.type_ == ACCEPTED);
        assert_eq!(
            accepted.map(|it| it.message.as_str()),
            Some("Deployment: 422 Invalid: request 3")
        );
        runtime.metadata.generation = Some(5);
        assert_ne!(
            failed(&runtime, "Deployment: 403 Forbidden", "request 4"),
            first,
            "another spec, another try"
        );
    }
}
