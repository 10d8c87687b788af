//! Kubernetes objects → only the fields that can change a decision of ours.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{apps::v1::Deployment, coordination::v1::Lease, core::v1::Pod},
    apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, MicroTime},
};
use kruntimes_api::{
    Run,
    keys::PodUid,
    names::{
        ANNOTATION_MODES, CAPACITY_PREFIX, LABEL_APP, LABEL_RUNTIME, MANAGER_SCHEDULER, RESOURCE_RUNS,
        app_label, heartbeat_lease,
    },
    quantity::{Amount, InvalidQuantity, Resources},
    runtime::DEFAULT_RUNS,
};
use kube::ResourceExt as _;

/// Pod annotation that ReplicaSets read when they have to remove some: the lowest goes first.
pub const ANNOTATION_DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";
/// Its value on a Pod that owns Runs; without the annotation it counts as 0.
pub const COST_OWNER: &str = "1000";
/// Deployment annotation: digest of the Pod template that we applied.
pub const ANNOTATION_TEMPLATE: &str = "kruntimes.io/template-digest";

/// Namespace and name of an object; who it is while it exists.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    pub namespace: String,
    pub name: String,
}

/// Amounts by resource name.
pub type Amounts = BTreeMap<String, Amount>;

/// A Pod of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodFacts {
    pub key: ObjectKey,
    pub uid: PodUid,
    /// Name of the Runtime, by label.
    pub runtime: String,
    /// Running, Ready and not being deleted.
    pub serves: bool,
    pub signs: Signs,
    /// The node it is bound to.
    pub node: Option<String>,
    /// Whether it says that it is to go last, as a Pod that owns Runs does.
    pub goes_last: bool,
    /// By annotation; `runs` is always there.
    pub capacity: Amounts,
}

/// What a Pod's object says of its end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Signs {
    /// Its deletion has begun.
    pub deleting: bool,
    /// Its Ready condition is True: endpoints list it.
    pub ready: bool,
    /// Its containers have ended for good: evicted, or failed with its node.
    pub over: bool,
}

/// A heartbeat as written; its age is counted by whoever sees it change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BeatFacts {
    /// Namespace and name of the Lease.
    pub key: ObjectKey,
    pub runtime: String,
    /// UID of the Pod that beats.
    pub holder: String,
    pub renewed: Option<MicroTime>,
    /// Modes that the Pod's Runtime Server supports.
    pub modes: BTreeSet<String>,
}

/// The Deployment of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeploymentFacts {
    pub key: ObjectKey,
    pub uid: String,
    /// Grows when anybody changes the spec.
    pub generation: i64,
    /// Name of the owning Runtime.
    pub runtime: Option<String>,
    /// Whether a scaler has taken `spec.replicas` over from us.
    pub scaled_by_others: bool,
    /// `spec.replicas`.
    pub wanted: Option<i32>,
    pub replicas: i32,
    pub ready: i32,
    /// Why Pods cannot be made, as the Deployment says.
    pub failure: Option<String>,
    /// Digest of the Pod template that we applied last.
    pub template: Option<String>,
    /// Whether Pods of an older template are being replaced, as far as its controller has told.
    pub rolls: bool,
}

// === impl ObjectKey ===

impl ObjectKey {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }

    /// The key of an object; `None` without namespace or name.
    pub fn of(object: &impl kube::Resource) -> Option<Self> {
        Some(Self::new(
            object.meta().namespace.clone()?,
            object.meta().name.clone()?,
        ))
    }
}

// === impl PodFacts ===

impl PodFacts {
    /// `None` for what is no Pod of a pool.
    pub fn of(pod: &Pod) -> Option<Self> {
        let key = ObjectKey::of(pod)?;
        let uid = PodUid::new(pod.metadata.uid.clone()?)?;
        let runtime = pod.labels().get(LABEL_RUNTIME)?.clone();
        // The label `runtime` alone may be anybody's; nothing is written to Pods of others.
        if pod.labels().get(LABEL_APP) != Some(&app_label(&runtime)) {
            return None;
        }
        let mut capacity = Amounts::new();
        for (name, value) in pod.annotations() {
            let Some(resource) = name.strip_prefix(CAPACITY_PREFIX) else {
                continue;
            };
            // What cannot be read is not there: the Pod takes fewer Runs, not more.
            if let Ok(amount) = value.parse() {
                capacity.insert(resource.to_owned(), amount);
            }
        }
        capacity
            .entry(RESOURCE_RUNS.to_owned())
            .or_insert(Amount::whole(DEFAULT_RUNS));
        let signs = Signs::of(pod);
        let phase = pod.status.as_ref().and_then(|it| it.phase.as_deref());
        Some(Self {
            key,
            uid,
            runtime,
            serves: phase == Some("Running") && signs.ready && !signs.deleting,
            signs,
            node: pod.spec.as_ref().and_then(|it| it.node_name.clone()),
            goes_last: pod
                .annotations()
                .get(ANNOTATION_DELETION_COST)
                .is_some_and(|it| it == COST_OWNER),
            capacity,
        })
    }

    /// Key of the Runtime whose pool it is in.
    pub fn pool(&self) -> ObjectKey {
        ObjectKey::new(self.key.namespace.clone(), self.runtime.clone())
    }

    /// Key of its heartbeat Lease.
    pub fn beat(&self) -> ObjectKey {
        ObjectKey::new(self.key.namespace.clone(), heartbeat_lease(&self.key.name))
    }
}

// === impl Signs ===

impl Signs {
    pub fn of(pod: &Pod) -> Self {
        let status = pod.status.as_ref();
        let ready = status
            .and_then(|it| it.conditions.as_deref())
            .unwrap_or_default()
            .iter()
            .any(|it| it.type_ == "Ready" && it.status == "True");
        let phase = status.and_then(|it| it.phase.as_deref());
        Self {
            deleting: pod.metadata.deletion_timestamp.is_some(),
            ready,
            over: matches!(phase, Some("Failed" | "Succeeded")),
        }
    }
}

// === impl BeatFacts ===

impl BeatFacts {
    /// `None` for what is no heartbeat.
    pub fn of(lease: &Lease) -> Option<Self> {
        let key = ObjectKey::of(lease)?;
        let runtime = lease
            .labels()
            .get(kruntimes_api::names::LEASE_LABEL_RUNTIME)?
            .clone();
        let spec = lease.spec.as_ref()?;
        let modes = lease
            .annotations()
            .get(ANNOTATION_MODES)
            .map(|it| {
                it.split(',')
                    .map(str::trim)
                    .filter(|it| !it.is_empty())
                    .map(str::to_owned)
                    .collect()
            })
            .unwrap_or_default();
        Some(Self {
            key,
            runtime,
            holder: spec.holder_identity.clone().unwrap_or_default(),
            renewed: spec.renew_time.clone(),
            modes,
        })
    }
}

// === impl DeploymentFacts ===

impl DeploymentFacts {
    /// `None` without a name.
    pub fn of(deployment: &Deployment) -> Option<Self> {
        let meta = &deployment.metadata;
        let status = deployment.status.as_ref();
        let conditions = status.and_then(|it| it.conditions.as_deref()).unwrap_or_default();
        let failure = conditions
            .iter()
            .find(|it| it.type_ == "ReplicaFailure" && it.status == "True")
            .map(|it| it.message.clone().unwrap_or_default());
        Some(Self {
            key: ObjectKey::of(deployment)?,
            uid: meta.uid.clone()?,
            generation: meta.generation.unwrap_or_default(),
            runtime: meta
                .owner_references
                .as_deref()
                .unwrap_or_default()
                .iter()
                .find(|it| it.kind == "Runtime")
                .map(|it| it.name.clone()),
            scaled_by_others: scaled_by_others(meta.managed_fields.as_deref().unwrap_or_default()),
            wanted: deployment.spec.as_ref().and_then(|it| it.replicas),
            replicas: status.and_then(|it| it.replicas).unwrap_or_default(),
            ready: status.and_then(|it| it.ready_replicas).unwrap_or_default(),
            failure,
            template: meta
                .annotations
                .as_ref()
                .and_then(|it| it.get(ANNOTATION_TEMPLATE).cloned()),
            rolls: rolls(deployment),
        })
    }
}

/// Whether Pods are being replaced. A roll that has exceeded its progress deadline is given up on: it
/// must not hold back others for ever.
fn rolls(deployment: &Deployment) -> bool {
    // Whoever paused it holds it; that must not hold back others.
    if deployment.spec.as_ref().and_then(|it| it.paused) == Some(true) {
        return false;
    }
    let status = deployment.status.clone().unwrap_or_default();
    if status.observed_generation < deployment.metadata.generation {
        return true;
    }
    let progressing = status
        .conditions
        .iter()
        .flatten()
        .find(|it| it.type_ == "Progressing");
    let done = match progressing {
        Some(it) if it.status == "False" => return false,
        Some(it) => it.reason.as_deref() == Some("NewReplicaSetAvailable"),
        None => true,
    };
    !done || status.updated_replicas.unwrap_or_default() < status.replicas.unwrap_or_default()
}

/// Whether somebody else manages `spec.replicas` and we do not: then it has been set to another
/// number than ours, which takes the field away from us.
fn scaled_by_others(managers: &[ManagedFieldsEntry]) -> bool {
    let manages = |entry: &&ManagedFieldsEntry| {
        let spec = entry.fields_v1.as_ref().and_then(|it| it.0.get("f:spec"));
        spec.is_some_and(|it| it.get("f:replicas").is_some())
    };
    let mut others = managers.iter().filter(manages).peekable();
    others.peek().is_some() && others.all(|it| it.manager.as_deref() != Some(MANAGER_SCHEDULER))
}

/// What a Run takes of a Pod (C-2, `resources.requests`): zeros left out, `runs` at least there.
///
/// # Errors
/// When a value is no quantity.
pub fn demand(run: &Run) -> Result<Amounts, InvalidQuantity> {
    let requests = run.spec.resources.as_ref().and_then(|it| it.requests.as_ref());
    let mut demand = amounts(requests)?;
    demand.retain(|_, amount| *amount > Amount::ZERO);
    demand.entry(RESOURCE_RUNS.to_owned()).or_insert(Amount::whole(1));
    Ok(demand)
}

/// Reads quantities.
///
/// # Errors
/// When a value is no quantity.
pub fn amounts(resources: Option<&Resources>) -> Result<Amounts, InvalidQuantity> {
    resources
        .into_iter()
        .flatten()
        .map(|(name, it)| Ok((name.clone(), it.amount()?)))
        .collect()
}

/// Whether `demand` fits into what `capacity` leaves beside `used`. A resource that is not
/// advertised fits nothing.
pub fn fits(demand: &Amounts, used: &Amounts, capacity: &Amounts) -> bool {
    demand.iter().all(|(name, amount)| {
        let taken = used.get(name).copied().unwrap_or_default();
        capacity
            .get(name)
            .is_some_and(|whole| taken.plus(*amount) <= *whole)
    })
}

/// Adds up.
pub fn add(sum: &mut Amounts, demand: &Amounts) {
    for (name, amount) in demand {
        let entry = sum.entry(name.clone()).or_default();
        *entry = entry.plus(*amount);
    }
}

/// A ready Pod of Runtime `python` in namespace `ns`, for tests.
#[cfg(test)]
pub(crate) fn serving(name: &str, runs: u64) -> PodFacts {
    PodFacts {
        key: ObjectKey::new("ns", name),
        uid: PodUid::new(kruntimes_api::fixtures::uid(name)).expect("not empty"),
        runtime: "python".to_owned(),
        serves: true,
        signs: Signs {
            ready: true,
            ..Signs::default()
        },
        node: Some("node-1".to_owned()),
        goes_last: false,
        capacity: Amounts::from([(RESOURCE_RUNS.to_owned(), Amount::whole(runs))]),
    }
}

#[cfg(test)]
mod tests;
