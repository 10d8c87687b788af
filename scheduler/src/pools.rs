//! The loop over Runtimes: objects of the pool → apply → what became of it, in the status.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use kruntimes_api::{Runtime, RuntimeStatus, names::MANAGER_SCHEDULER, status};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, ValidationDirective},
};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

use crate::{
    bind::Writer,
    facts::{DeploymentFacts, ObjectKey},
    hub::Hub,
    lease::Term,
    metrics::{Metrics, PoolLabels},
    owners,
    pool::{
        self, Config, Object,
        apply::{Applier, Outcome},
        report::{self, Made},
        roll::Rolls,
    },
    world::pool_deployment,
};

/// Everything is looked at this often even if nothing wakes it.
const SAFETY_LOOK: Duration = Duration::from_secs(600);
const TRY_AGAIN: Duration = Duration::from_secs(5);
const CONFLICT_PAUSE: Duration = Duration::from_secs(1);
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// What pool namespaces are told about the gateway; `None` while it is not known.
pub(crate) type Published = Option<BTreeMap<String, String>>;

/// Looks at Runtimes for one term.
pub(crate) struct PoolLoop<'a> {
    hub: &'a Hub,
    writer: Writer,
    client: Client,
    term: Term,
    rolls: Rolls,
    applier: Applier,
    config: &'a Config,
    published: watch::Receiver<Published>,
    metrics: &'a Metrics,
}

// === impl PoolLoop ===

impl<'a> PoolLoop<'a> {
    pub(crate) fn new(
        hub: &'a Hub,
        writer: Writer,
        client: Client,
        term: Term,
        config: &'a Config,
        published: watch::Receiver<Published>,
        metrics: &'a Metrics,
    ) -> Self {
        let applier = Applier::new(client.clone(), term.clone());
        Self {
            hub,
            writer,
            client,
            term,
            rolls: Rolls::default(),
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
            if let Outcome::Failed(failure) = self.publish(&namespace).await {
                tracing::warn!(namespace, error = %failure, "cannot publish the gateway's certificates");
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
        let made = self.make(key, &runtime, deployment.as_ref()).await;
        match &made {
            Made::Failed(failure) => {
                tracing::warn!(
                    namespace = key.namespace,
                    runtime = key.name,
                    error = %failure,
                    "cannot make a pool"
                );
                self.hub.runtimes.wake_after(key.clone(), TRY_AGAIN);
            }
            // Nothing else tells that the other pool is done.
            Made::RollsLater { .. } => self.hub.runtimes.wake_after(key.clone(), TRY_AGAIN),
            Made::All | Made::Refused(_) => self.hub.runtimes.wake_after(key.clone(), SAFETY_LOOK),
        }
        let wanted = report::status(&runtime, deployment.as_ref(), &made, self.hub.now());
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

    async fn make(
        &mut self,
        key: &ObjectKey,
        runtime: &Runtime,
        deployment: Option<&DeploymentFacts>,
    ) -> Made {
        let ours = deployment.is_none_or(|it| !it.scaled_by_others);
        let objects = match pool::objects(runtime, self.config, ours) {
            Ok(objects) => objects,
            Err(refusal) => return Made::Refused(refusal),
        };
        // Before the Pods, so that the kubelet finds it when it mounts the volume.
        if let Outcome::Failed(failure) = self.publish(&key.namespace).await {
            return Made::Failed(failure);
        }
        for object in &objects {
            let is_deployment = object.kind == pool::Kind::Deployment;
            let rolls = is_deployment && object.rolls(deployment);
            if rolls {
                let others = self.hub.lock().world.deployments_in(&key.namespace);
                if let Some(other) = self.rolls.blocked_by(key, &others, Instant::now()) {
                    // How many there are does not wait for what they are.
                    let number = ours.then(|| pool::replicas(&runtime.spec));
                    if let Some((live, number)) = deployment.zip(number)
                        && live.wanted != Some(number)
                        && let Outcome::Failed(failure) = self.scale(live, number).await
                    {
                        return Made::Failed(failure);
                    }
                    return Made::RollsLater { other };
                }
                // The ReplicaSet that shrinks asks the Pods who goes first.
                owners::mark(self.hub, &self.writer, self.metrics, Some(key), None).await;
            }
            let live = is_deployment.then(|| deployment.map(|it| it.generation));
            match self.apply(object, live).await {
                Outcome::Failed(failure) => return Made::Failed(failure),
                Outcome::Applied(generation) if rolls => {
                    let uid = deployment.map_or("", |it| &it.uid);
                    self.rolls.begun(key, uid, generation);
                }
                Outcome::Applied(_) | Outcome::Known => {}
            }
        }
        Made::All
    }

    async fn apply(&mut self, object: &Object, live: Option<Option<i64>>) -> Outcome {
        let outcome = self.applier.apply(object, live).await;
        self.counted(object.kind, outcome)
    }

    async fn scale(&mut self, live: &DeploymentFacts, replicas: i32) -> Outcome {
        let outcome = self.applier.scale(live, replicas).await;
        self.counted(pool::Kind::Deployment, outcome)
    }

    fn counted(&self, kind: pool::Kind, outcome: Outcome) -> Outcome {
        let result = match &outcome {
            Outcome::Known => return outcome,
            Outcome::Applied(_) => "done",
            Outcome::Failed(_) => "failed",
        };
        let labels = PoolLabels {
            kind: kind.as_str(),
            result,
        };
        self.metrics.pool_writes.get_or_create(&labels).inc();
        outcome
    }

    async fn write_status(
        &self,
        key: &ObjectKey,
        runtime: &Runtime,
        wanted: &RuntimeStatus,
    ) -> Result<(), String> {
        let Some(patch) = report::patch(runtime, wanted) else {
            return Ok(());
        };
        if !self.term.holds() {
            return Ok(());
        }
        let api: Api<Runtime> = Api::namespaced(self.client.clone(), &key.namespace);
        let params = PatchParams {
            field_manager: Some(MANAGER_SCHEDULER.to_owned()),
            field_validation: Some(ValidationDirective::Strict),
            ..PatchParams::default()
        };
        match timeout(
            WRITE_TIMEOUT,
            api.patch_status(&key.name, &params, &Patch::Merge(patch)),
        )
        .await
        {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(kube::Error::Api(status))) if status.is_not_found() => Ok(()),
            // It has moved on; a change of its status alone wakes nobody.
            Ok(Err(kube::Error::Api(status))) if status.is_conflict() => {
                self.hub.runtimes.wake_after(key.clone(), CONFLICT_PAUSE);
                Ok(())
            }
            Ok(Err(error)) => Err(status::refusal(&error.to_string())),
            Err(_) => Err("no answer".to_owned()),
        }
    }
}
