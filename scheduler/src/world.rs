//! What the watches have told us: a plain index with apply, delete and reset, which answers with
//! the Runs and Runtimes that are worth a look now.
//!
//! It knows no watch; it is tested by hand-fed changes.

mod pods;
mod pools;
mod table;

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use kruntimes_api::{Run, Runtime, keys::RunUid, names};
use tokio::time::Instant;

pub use self::pods::{Beat, HEARTBEAT_FRESH};
use self::{pods::Life, table::Table};
use crate::facts::{BeatFacts, DeploymentFacts, ObjectKey, PodFacts};

/// Everything the watches have told us.
#[derive(Debug, Default)]
pub struct World {
    runs: Table<Arc<Run>>,
    pods: Table<PodFacts>,
    beats: Table<Beat>,
    runtimes: Table<Arc<Runtime>>,
    deployments: Table<DeploymentFacts>,
    /// Runs that have a Pod and have not ended, by the Pod's UID.
    assigned: HashMap<String, BTreeSet<ObjectKey>>,
    /// Runs that wait for a Pod, by Runtime.
    waiting: HashMap<ObjectKey, BTreeSet<ObjectKey>>,
    /// Pods that have just handed a Run back because they drain, by UID.
    draining: HashMap<String, Instant>,
    /// Pods that have refused a Run of late, by UID of the Run.
    refused: HashMap<RunUid, (String, Instant)>,
    /// Pods by UID, also those that are gone, for a while.
    lives: HashMap<String, Life>,
    /// When we began to listen; `None` in tests that do not care.
    born: Option<Instant>,
    /// Pods by Runtime.
    pools: HashMap<ObjectKey, BTreeSet<ObjectKey>>,
}

/// Who is worth a look.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wakes {
    pub runs: BTreeSet<ObjectKey>,
    pub runtimes: BTreeSet<ObjectKey>,
}

// === impl World ===

impl World {
    pub fn run(&self, key: &ObjectKey) -> Option<&Arc<Run>> {
        self.runs.rows.get(key)
    }

    pub fn runtime(&self, key: &ObjectKey) -> Option<&Arc<Runtime>> {
        self.runtimes.rows.get(key)
    }

    pub fn deployment(&self, key: &ObjectKey) -> Option<&DeploymentFacts> {
        self.deployments.rows.get(key)
    }

    /// A heartbeat as the watch has shown it.
    pub fn beat(&self, key: &ObjectKey) -> Option<&BeatFacts> {
        self.beats.rows.get(key).map(|it| &it.facts)
    }

    /// The Pod of this name, if the watch has shown it.
    pub fn pod(&self, key: &ObjectKey) -> Option<&PodFacts> {
        self.pods.rows.get(key)
    }

    /// Pods of a Runtime, by name.
    pub fn pods_of(&self, runtime: &ObjectKey) -> impl Iterator<Item = &PodFacts> {
        self.pools
            .get(runtime)
            .into_iter()
            .flatten()
            .filter_map(|key| self.pods.rows.get(key))
    }

    /// Runs that a Pod holds, by name: they have not ended and take its capacity.
    pub fn runs_on(&self, pod_uid: &str) -> impl Iterator<Item = &Arc<Run>> {
        self.assigned
            .get(pod_uid)
            .into_iter()
            .flatten()
            .filter_map(|key| self.runs.rows.get(key))
    }

    /// Runtimes of a namespace, by name.
    pub fn runtimes_in(&self, namespace: &str) -> Vec<&Arc<Runtime>> {
        let mut found: Vec<_> = self
            .runtimes
            .rows
            .iter()
            .filter(|(key, _)| key.namespace == namespace)
            .collect();
        found.sort_unstable_by_key(|(key, _)| *key);
        found.into_iter().map(|(_, runtime)| runtime).collect()
    }

    /// Namespaces that hold a Runtime.
    pub fn pool_namespaces(&self) -> BTreeSet<String> {
        self.runtimes
            .rows
            .keys()
            .map(|key| key.namespace.clone())
            .collect()
    }

    /// How many Runs wait for a Pod.
    pub fn waiting_runs(&self) -> usize {
        self.waiting.values().map(BTreeSet::len).sum()
    }

    /// Everybody: for the first look of a new leader.
    pub fn everybody(&self) -> Wakes {
        Wakes {
            runs: self.runs.rows.keys().cloned().collect(),
            runtimes: self.runtimes.rows.keys().cloned().collect(),
        }
    }

    // --- Runs ---

    pub fn apply_run(&mut self, run: Run, wakes: &mut Wakes) {
        let Some((key, run)) = slim(run) else { return };
        // A live read may be ahead of the watch; what comes late from there is no news.
        if self
            .runs
            .rows
            .get(&key)
            .is_some_and(|known| is_older(&run, known))
        {
            return;
        }
        let old = self.runs.rows.insert(key.clone(), Arc::clone(&run));
        self.run_changed(&key, old, Some(run), wakes);
    }

    /// A live read of a Run that is known. One that the watch has seen go meanwhile stays gone: nothing
    /// would remove it again.
    pub fn refresh_run(&mut self, run: Run, wakes: &mut Wakes) {
        let known = ObjectKey::of(&run).and_then(|key| self.runs.rows.get(&key));
        if known.is_some_and(|it| it.metadata.uid == run.metadata.uid) {
            self.apply_run(run, wakes);
        }
    }

    pub fn delete_run(&mut self, run: &Run, wakes: &mut Wakes) {
        let Some(key) = ObjectKey::of(run) else { return };
        if self
            .runs
            .rows
            .get(&key)
            .is_some_and(|known| known.metadata.uid == run.metadata.uid)
        {
            let old = self.runs.rows.remove(&key);
            self.run_changed(&key, old, None, wakes);
        }
    }

    pub fn reset_runs(&mut self, scope: Option<&str>, runs: Vec<Run>, wakes: &mut Wakes) {
        for (key, old, new) in self.runs.reset(scope, runs.into_iter().filter_map(slim)) {
            self.run_changed(&key, old, new, wakes);
        }
    }

    fn run_changed(
        &mut self,
        key: &ObjectKey,
        old: Option<Arc<Run>>,
        new: Option<Arc<Run>>,
        wakes: &mut Wakes,
    ) {
        let before = old.as_deref().map(Place::of);
        let after = new.as_deref().map(Place::of);
        if before != after {
            if let Some((place, run)) = before.as_ref().zip(old.as_deref()) {
                self.leave(key, place);
                // Room on a Pod, or a neighbour gone: somebody else may fit now.
                if matches!(place, Place::On(_)) {
                    self.wake_waiting(&pool_of(key, run), wakes);
                }
            }
            if let Some((place, run)) = after.as_ref().zip(new.as_deref()) {
                match place {
                    Place::On(uid) => {
                        self.assigned.entry(uid.clone()).or_default().insert(key.clone());
                        self.wake_companions(&pool_of(key, run), wakes);
                    }
                    Place::Waiting(runtime) => {
                        let pool = ObjectKey::new(key.namespace.clone(), runtime.clone());
                        self.waiting.entry(pool).or_default().insert(key.clone());
                    }
                    Place::Nowhere => {}
                }
            }
        }
        if new.is_some() && old != new {
            wakes.runs.insert(key.clone());
        }
    }

    fn leave(&mut self, key: &ObjectKey, place: &Place) {
        match place {
            Place::On(uid) => remove(&mut self.assigned, uid, key),
            Place::Waiting(runtime) => {
                let pool = ObjectKey::new(key.namespace.clone(), runtime.clone());
                remove(&mut self.waiting, &pool, key);
            }
            Place::Nowhere => {}
        }
    }

    /// Those who wait for a Pod of this Runtime.
    fn wake_waiting(&self, pool: &ObjectKey, wakes: &mut Wakes) {
        wakes
            .runs
            .extend(self.waiting.get(pool).into_iter().flatten().cloned());
    }

    /// Those who wait to be beside somebody.
    fn wake_companions(&self, pool: &ObjectKey, wakes: &mut Wakes) {
        let wants = |key: &&ObjectKey| {
            let affinity = self
                .runs
                .rows
                .get(*key)
                .and_then(|run| run.spec.affinity.as_ref());
            affinity.is_some_and(|it| it.run_affinity.is_some())
        };
        wakes.runs.extend(
            self.waiting
                .get(pool)
                .into_iter()
                .flatten()
                .filter(wants)
                .cloned(),
        );
    }
}

/// Where a Run stands in our indexes.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    /// On the Pod of this UID.
    On(String),
    /// In the queue of this Runtime.
    Waiting(String),
    /// Ended, or going away without a Pod.
    Nowhere,
}

// === impl Place ===

impl Place {
    fn of(run: &Run) -> Self {
        if run.phase().is_terminal() {
            return Self::Nowhere;
        }
        match run.assignment() {
            Some((_, uid)) => Self::On(uid.as_str().to_owned()),
            None if run.is_deleting() => Self::Nowhere,
            None => Self::Waiting(run.spec.runtime.clone()),
        }
    }
}

// === impl Wakes ===

impl Wakes {
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty() && self.runtimes.is_empty()
    }
}

/// Without what no decision of ours reads: code and environment may be 256 KiB a Run, and
/// `names` of managers are many.
fn slim(mut run: Run) -> Option<(ObjectKey, Arc<Run>)> {
    run.metadata.managed_fields = None;
    run.spec.source = None;
    run.spec.env = None;
    Some((ObjectKey::of(&run)?, Arc::new(run)))
}

/// Whether `run` is an older state of the very object `known`. Versions of one kind are ordered
/// numbers; where they are not, nothing is older.
fn is_older(run: &Run, known: &Run) -> bool {
    let version = |run: &Run| run.metadata.resource_version.as_deref()?.parse::<u64>().ok();
    run.metadata.uid == known.metadata.uid
        && version(run)
            .zip(version(known))
            .is_some_and(|(new, old)| new < old)
}

fn pool_of(key: &ObjectKey, run: &Run) -> ObjectKey {
    ObjectKey::new(key.namespace.clone(), run.spec.runtime.clone())
}

fn remove<K: std::hash::Hash + Eq>(index: &mut HashMap<K, BTreeSet<ObjectKey>>, entry: &K, key: &ObjectKey) {
    if let Some(keys) = index.get_mut(entry) {
        keys.remove(key);
        if keys.is_empty() {
            index.remove(entry);
        }
    }
}

/// Name of the Deployment of a Runtime's pool.
pub fn pool_deployment(runtime: &ObjectKey) -> ObjectKey {
    ObjectKey::new(runtime.namespace.clone(), names::pool(&runtime.name))
}

#[cfg(test)]
mod tests;
