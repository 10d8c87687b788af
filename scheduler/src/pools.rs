//! The loop over Runtimes: objects of the pool → apply → what became of it, in the status.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kruntimes_api::{
    Runtime, RuntimeStatus,
    names::MANAGER_SCHEDULER,
    status::{Says, difference, set_condition},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{sync::watch, time::timeout};

use crate::{
    facts::{DeploymentFacts, ObjectKey},
    hub::Hub,
    lease::Term,
    metrics::{Metrics, PoolLabels},
    pool::{
        self, Config, Object,
        apply::{Applier, Outcome},
    },
    world::pool_deployment,
};

const ACCEPTED: &str = "Accepted";
const READY: &str = "Ready";
/// Everything is looked at this often even if nothing wakes it.
const SAFETY_LOOK: Duration = Duration::from_secs(600);
const TRY_AGAIN: Duration = Duration::from_secs(5);
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// What pool namespaces are told about the gateway; `None` while it is not known.
pub(crate) type Published = Option<BTreeMap<String, String>>;

/// Looks at Runtimes for one term.
pub(crate) struct PoolLoop<'a> {
    hub: &'a Hub,
    client: Client,
    term: Term,
    applier: Applier,
    config: &'a Config,
    published: watch::Receiver<Published>,
    metrics: &'a Metrics,
}

/// How making the objects went.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Made {
    All,
    Refused(pool::Refusal),
    Failed(String),
}

// === impl PoolLoop ===

impl<'a> PoolLoop<'a> {
    pub(crate) fn new(
        hub: &'a Hub,
        client: Client,
        term: Term,
        config: &'a Config,
        published: watch::Receiver<Published>,
        metrics: &'a Metrics,
    ) -> Self {
        let applier = Applier::new(client.clone(), term.clone());
        Self {
            hub,
            client,
            term,
            applier,
            config,
            published,
            metrics,
        }
    }

    /// Runs until dropped.
    pub(crate) async fn run(mut self) {
        loop {
            tokio::select! {
                key = self.hub.runtimes.next() => self.look(&key).await,
                Ok(()) = self.published.changed() => self.publish_everywhere().await,
            }
        }
    }

    async fn publish_everywhere(&mut self) {
        let namespaces = self.hub.lock().world.pool_namespaces();
        for namespace in namespaces {
            if let Outcome::Failed(error) = self.publish(&namespace).await {
                tracing::warn!(namespace, error, "cannot publish the gateway's certificates");
                let runtimes: Vec<_> = self
                    .hub
                    .lock()
                    .world
                    .runtimes_in(&namespace)
                    .into_iter()
                    .cloned()
                    .collect();
                for key in runtimes.iter().filter_map(|it| ObjectKey::of(it.as_ref())) {
                    self.hub.runtimes.wake_after(key, TRY_AGAIN);
                }
            }
        }
    }

    /// The ConfigMap `kruntimes-gateway` of one namespace.
    async fn publish(&mut self, namespace: &str) -> Outcome {
        let Some(data) = self.published.borrow().clone() else {
            return Outcome::Known;
        };
        let runtimes: Vec<Arc<Runtime>> = self
            .hub
            .lock()
            .world
            .runtimes_in(namespace)
            .into_iter()
            .cloned()
            .collect();
        let living: Vec<&Runtime> = runtimes
            .iter()
            .map(AsRef::as_ref)
            .filter(|it| it.metadata.deletion_timestamp.is_none())
            .collect();
        if living.is_empty() {
            return Outcome::Known;
        }
        let object = pool::config_map(namespace, &living, &data);
        self.apply(&object, None).await
    }

    async fn look(&mut self, key: &ObjectKey) {
        let (runtime, deployment) = {
            let state = self.hub.lock();
            let Some(runtime) = state.world.runtime(key).cloned() else {
                return;
            };
            (runtime, state.world.deployment(&pool_deployment(key)).cloned())
        };
        if runtime.metadata.deletion_timestamp.is_some() {
            // What it owns goes with it.
            return;
        }
        let made = self.make(&runtime, deployment.as_ref()).await;
        match &made {
            Made::Failed(error) => {
                tracing::warn!(
                    namespace = key.namespace,
                    runtime = key.name,
                    error,
                    "cannot make a pool"
                );
                self.hub.runtimes.wake_after(key.clone(), TRY_AGAIN);
            }
            Made::All | Made::Refused(_) => self.hub.runtimes.wake_after(key.clone(), SAFETY_LOOK),
        }
        let wanted = status(&runtime, deployment.as_ref(), &made, Timestamp::now());
        if let Err(error) = self.write_status(key, &runtime, &wanted).await {
            tracing::warn!(
                namespace = key.namespace,
                runtime = key.name,
                error,
                "cannot write a Runtime's status"
            );
            self.hub.runtimes.wake_after(key.clone(), TRY_AGAIN);
        }
    }

    async fn make(&mut self, runtime: &Runtime, deployment: Option<&DeploymentFacts>) -> Made {
        let ours = deployment.is_none_or(|it| !it.scaled_by_others);
        let objects = match pool::objects(runtime, self.config, ours) {
            Ok(objects) => objects,
            Err(refusal) => return Made::Refused(refusal),
        };
        let namespace = runtime.metadata.namespace.clone().unwrap_or_default();
        // Before the Pods, so that the kubelet finds it when it mounts the volume.
        if let Outcome::Failed(error) = self.publish(&namespace).await {
            return Made::Failed(error);
        }
        for object in &objects {
            let live = match object.kind {
                pool::Kind::Deployment => Some(deployment.map(|it| it.generation)),
                _ => None,
            };
            if let Outcome::Failed(error) = self.apply(object, live).await {
                return Made::Failed(error);
            }
        }
        Made::All
    }

    async fn apply(&mut self, object: &Object, live: Option<Option<i64>>) -> Outcome {
        let outcome = self.applier.apply(object, live).await;
        let result = match &outcome {
            Outcome::Known => return outcome,
            Outcome::Applied => "done",
            Outcome::Failed(_) => "failed",
        };
        self.metrics
            .pool_writes
            .get_or_create(&PoolLabels {
                kind: object.kind.as_str(),
                result,
            })
            .inc();
        outcome
    }

    async fn write_status(
        &self,
        key: &ObjectKey,
        runtime: &Runtime,
        wanted: &RuntimeStatus,
    ) -> Result<(), String> {
        let Some(patch) = patch(runtime, wanted) else {
            return Ok(());
        };
        if !self.term.holds() {
            return Ok(());
        }
        let api: Api<Runtime> = Api::namespaced(self.client.clone(), &key.namespace);
        let params = PatchParams {
            field_manager: Some(MANAGER_SCHEDULER.to_owned()),
            ..PatchParams::default()
        };
        match timeout(
            WRITE_TIMEOUT,
            api.patch_status(&key.name, &params, &Patch::Merge(patch)),
        )
        .await
        {
            Ok(Ok(_)) => Ok(()),
            // It has moved on and is in the queue again, or it is gone.
            Ok(Err(kube::Error::Api(status))) if status.is_conflict() || status.is_not_found() => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("no answer".to_owned()),
        }
    }
}

/// What a Runtime's status should say.
fn status(
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
    status.selector = Some(pool::selector_text(name));
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
        Made::Failed(error) => set(ACCEPTED, false, "ApplyFailed", error),
    }
    let wanted = pool::replicas(&runtime.spec);
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

/// The guarded merge patch; `None` when nothing would change.
fn patch(runtime: &Runtime, wanted: &RuntimeStatus) -> Option<Value> {
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
            replicas: 2,
            ready,
            failure: None,
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

    #[test]
    fn a_refusal_is_a_condition_that_says_why_c_2() {
        let refusal = pool::Refusal {
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
}
