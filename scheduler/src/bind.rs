//! Writes to Runs: each names the resourceVersion and UID it was decided on, and is sent only
//! while this process leads. A conflict is dropped, never forced: whoever was first is right, and
//! we decide again from what is there.

use std::time::Duration;

use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Node, Pod},
};
use kruntimes_api::{
    Run, RunStatus,
    keys::PodUid,
    names::{FINALIZER, MANAGER_SCHEDULER, heartbeat_lease},
    status,
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions, ValidationDirective},
};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    facts::{ANNOTATION_DELETION_COST, BeatFacts, COST_OWNER, ObjectKey, PodFacts},
    lease::Term,
};

/// A write that takes longer has an unknown outcome.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Writes as the leader of one term.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    term: Term,
}

/// How a write ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Written {
    /// It is there.
    Done,
    /// Nothing was to be written.
    Same,
    /// The object has moved on, or is gone: nothing was written.
    Conflict,
    /// The API refuses it, and will again.
    Refused(String),
    /// It may or may not be there.
    Unknown(String),
    /// This process leads no more; nothing was sent.
    NotLeader,
}

// === impl Writer ===

impl Writer {
    pub fn new(client: Client, term: Term) -> Self {
        Self { client, term }
    }

    /// Writes the difference between the Run's status and `wanted`.
    pub async fn status(&self, run: &Run, wanted: &RunStatus) -> Written {
        let Some(patch) = status::patch(run, wanted) else {
            return Written::Same;
        };
        let (api, name) = self.runs(run);
        self.send(async move {
            api.patch_status(&name, &params(), &Patch::Merge(patch))
                .await
                .map(drop)
        })
        .await
    }

    /// Takes our finalizer off.
    pub async fn remove_finalizer(&self, run: &Run) -> Written {
        let patch = without_finalizer(run);
        let (api, name) = self.runs(run);
        self.send(async move { api.patch(&name, &params(), &Patch::Merge(patch)).await.map(drop) })
            .await
    }

    /// Deletes exactly this object, as it is.
    pub async fn delete(&self, run: &Run) -> Written {
        let (api, name) = self.runs(run);
        let exactly = Preconditions {
            uid: run.uid(),
            resource_version: run.resource_version(),
        };
        let params = DeleteParams {
            preconditions: Some(exactly),
            ..DeleteParams::default()
        };
        self.send(async move { api.delete(&name, &params).await.map(drop) })
            .await
    }

    /// Deletes the Pod of exactly this UID, as it is now, with the time to end that its template gives; only
    /// a Pod of this pool, whatever a status says.
    pub async fn delete_pod(&self, pool: &ObjectKey, name: &str, uid: &PodUid) -> Written {
        let live = match self.pod(&pool.namespace, name, uid).await {
            Ok(Some(live)) if live.metadata.deletion_timestamp.is_none() => live,
            Ok(_) => return Written::Same,
            Err(error) => return Written::Unknown(error),
        };
        if PodFacts::of(&live).is_none_or(|it| it.pool() != *pool) {
            return Written::Refused(format!("it is no Pod of Runtime {}", pool.name));
        }
        let exactly = Preconditions {
            uid: live.uid(),
            resource_version: live.resource_version(),
        };
        let params = DeleteParams {
            preconditions: Some(exactly),
            ..DeleteParams::default()
        };
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pool.namespace);
        self.send(async move { api.delete(name, &params).await.map(drop) })
            .await
    }

    /// Says on a Pod whether it owns Runs, so that it goes last when some have to go (C-7.2).
    pub async fn mark_pod(&self, pod: &PodFacts, owns: bool) -> Written {
        let patch = mark(pod, owns);
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.key.namespace);
        self.send(async move {
            api.patch_metadata(&pod.key.name, &params(), &Patch::Merge(patch))
                .await
                .map(drop)
        })
        .await
    }

    /// The Pod of exactly this UID, read live.
    ///
    /// # Errors
    /// When the API does not answer: then nothing is known.
    pub async fn pod(&self, namespace: &str, name: &str, uid: &PodUid) -> Result<Option<Pod>, String> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let live = answered(api.get_opt(name)).await?;
        Ok(live.filter(|pod| pod.metadata.uid.as_deref() == Some(uid.as_str())))
    }

    /// The heartbeat of a Pod, read live.
    ///
    /// # Errors
    /// When the API does not answer.
    pub async fn beat(&self, namespace: &str, pod: &str) -> Result<Option<BeatFacts>, String> {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), namespace);
        let live = answered(api.get_opt(&heartbeat_lease(pod))).await?;
        Ok(live.as_ref().and_then(BeatFacts::of))
    }

    /// Whether Kubernetes hears of the node. One that cannot be read, or is gone, counts as unreachable:
    /// then more time passes before a Pod that was on it is taken for ended.
    pub async fn node_is_reachable(&self, name: &str) -> bool {
        let api: Api<Node> = Api::all(self.client.clone());
        match answered(api.get_opt(name)).await {
            Ok(node) => node.as_ref().is_some_and(reports),
            Err(error) => {
                tracing::debug!(node = name, error, "cannot read a node");
                false
            }
        }
    }

    /// The Run as it is now.
    ///
    /// # Errors
    /// When the API does not answer.
    pub async fn live(&self, namespace: &str, name: &str) -> Result<Option<Run>, String> {
        let api: Api<Run> = Api::namespaced(self.client.clone(), namespace);
        answered(api.get_opt(name)).await
    }

    fn runs(&self, run: &Run) -> (Api<Run>, String) {
        let namespace = run.namespace().unwrap_or_default();
        (Api::namespaced(self.client.clone(), &namespace), run.name_any())
    }

    async fn send(&self, write: impl Future<Output = Result<(), kube::Error>>) -> Written {
        if !self.term.holds() {
            return Written::NotLeader;
        }
        match timeout(WRITE_TIMEOUT, write).await {
            Ok(Ok(())) => Written::Done,
            Ok(Err(error)) => Written::of(&error),
            Err(_) => Written::Unknown("no answer".to_owned()),
        }
    }
}

// === impl Written ===

impl Written {
    pub(crate) fn of(error: &kube::Error) -> Self {
        let kube::Error::Api(status) = error else {
            return Self::Unknown(error.to_string());
        };
        match status.code {
            404 | 409 | 410 => Self::Conflict,
            // Throttled or broken before or after the write: only a read can tell.
            429 | 500.. => Self::Unknown(error.to_string()),
            _ => Self::Refused(status::refusal(&status.message)),
        }
    }

    /// As a label of a metric.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Same => "same",
            Self::Conflict => "conflict",
            Self::Refused(_) => "refused",
            Self::Unknown(_) => "unknown",
            Self::NotLeader => "not_leader",
        }
    }
}

async fn answered<T>(read: impl Future<Output = Result<T, kube::Error>>) -> Result<T, String> {
    match timeout(WRITE_TIMEOUT, read).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("no answer".to_owned()),
    }
}

fn params() -> PatchParams {
    PatchParams {
        field_manager: Some(MANAGER_SCHEDULER.to_owned()),
        // An older CRD refuses what it does not know; by default it would drop that and take the rest.
        field_validation: Some(ValidationDirective::Strict),
        ..PatchParams::default()
    }
}

/// Its Ready condition is not Unknown, which is what a silent kubelet makes of it.
fn reports(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|it| it.conditions.as_deref());
    conditions
        .unwrap_or_default()
        .iter()
        .any(|it| it.type_ == "Ready" && it.status != "Unknown")
}

fn mark(pod: &PodFacts, owns: bool) -> Value {
    let cost = owns.then_some(COST_OWNER);
    json!({ "metadata": { "uid": pod.uid.as_str(), "annotations": { ANNOTATION_DELETION_COST: cost } } })
}

fn without_finalizer(run: &Run) -> Value {
    let left: Vec<_> = run.finalizers().iter().filter(|it| *it != FINALIZER).collect();
    json!({ "metadata": {
        "resourceVersion": run.metadata.resource_version, "uid": run.metadata.uid, "finalizers": left,
    } })
}

#[cfg(test)]
mod tests {
    use kruntimes_api::fixtures;

    use super::*;

    #[test]
    fn only_our_finalizer_goes_and_the_patch_is_guarded() {
        let run = fixtures::run("ns", "n")
            .deleting()
            .version("7")
            .with(|it| {
                it.metadata
                    .finalizers
                    .as_mut()
                    .unwrap()
                    .push("example.com/other".to_owned())
            })
            .build();
        let patch = without_finalizer(&run);
        assert_eq!(patch["metadata"]["finalizers"], json!(["example.com/other"]));
        assert_eq!(patch["metadata"]["resourceVersion"], json!("7"));
        assert_eq!(patch["metadata"]["uid"], json!(run.metadata.uid));
    }

    /// C-7.3: only a node that is heard of vouches for the end of its Pods.
    #[test]
    fn a_silent_or_missing_node_is_unreachable() {
        let node = |status: &str| -> Node {
            serde_json::from_value(json!({ "metadata": {}, "status": { "conditions": [
                { "type": "MemoryPressure", "status": "False" }, { "type": "Ready", "status": status },
            ] } }))
            .unwrap()
        };
        assert!(reports(&node("True")) && reports(&node("False")), "it speaks");
        assert!(!reports(&node("Unknown")));
        assert!(!reports(&Node::default()));
    }

    #[test]
    fn a_mark_is_set_and_taken_off_this_very_pod() {
        let pod = crate::facts::serving("p", 1);
        let cost = |owns| mark(&pod, owns)["metadata"]["annotations"][ANNOTATION_DELETION_COST].clone();
        assert_eq!((cost(true), cost(false)), (json!("1000"), json!(null)));
        assert_eq!(mark(&pod, true)["metadata"]["uid"], json!(pod.uid.as_str()));
    }

    #[test]
    fn what_may_have_been_written_is_told_from_what_was_not() {
        let api = |code| {
            kube::Error::Api(Box::new(kube::core::Status {
                code,
                ..kube::core::Status::default()
            }))
        };
        assert_eq!(Written::of(&api(409)), Written::Conflict);
        assert_eq!(Written::of(&api(404)), Written::Conflict);
        assert!(matches!(Written::of(&api(422)), Written::Refused(_)));
        assert!(matches!(Written::of(&api(500)), Written::Unknown(_)));
        assert!(matches!(Written::of(&api(504)), Written::Unknown(_)));
    }
}
