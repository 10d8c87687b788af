//! What the watches have told us: a plain index with apply, delete and reset, which answers with
//! the Runs and Runtimes that are worth a look now.
//!
//! It knows no watch; it is tested by hand-fed changes.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use kruntimes_api::{Run, Runtime, names};
use tokio::time::Instant;

use crate::facts::{BeatFacts, DeploymentFacts, ObjectKey, PodFacts};

/// A heartbeat younger than this is fresh: three missed renewals of 10 s (C-6.7, C-7.3).
pub const HEARTBEAT_FRESH: Duration = Duration::from_secs(30);

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
    /// Pods by Runtime.
    pools: HashMap<ObjectKey, BTreeSet<ObjectKey>>,
}

/// A heartbeat and when it was seen to change.
#[derive(Debug, Clone, PartialEq)]
pub struct Beat {
    pub facts: BeatFacts,
    /// `None`: only ever seen in a list, already old by the wall clock.
    seen: Option<Instant>,
}

/// Who is worth a look.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wakes {
    pub runs: BTreeSet<ObjectKey>,
    pub runtimes: BTreeSet<ObjectKey>,
}

/// Objects of one kind by key.
#[derive(Debug)]
struct Table<V> {
    rows: HashMap<ObjectKey, V>,
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

    /// The Pod of this name, if the watch has shown it.
    pub fn pod(&self, key: &ObjectKey) -> Option<&PodFacts> {
        self.pods.rows.get(key)
    }

    /// The heartbeat of a Pod, if it is this very Pod's and fresh at `now`.
    pub fn fresh_beat(&self, pod: &PodFacts, now: Instant) -> Option<&BeatFacts> {
        let beat = self.beats.rows.get(&pod.beat())?;
        (beat.facts.holder == pod.uid.as_str() && beat.is_fresh(now)).then_some(&beat.facts)
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

    // --- Pods and their heartbeats ---

    pub fn apply_pod(&mut self, pod: PodFacts, wakes: &mut Wakes) {
        let key = pod.key.clone();
        let old = self.pods.rows.insert(key.clone(), pod.clone());
        self.pod_changed(&key, old, Some(pod), wakes);
    }

    pub fn delete_pod(&mut self, pod: &PodFacts, wakes: &mut Wakes) {
        if self
            .pods
            .rows
            .get(&pod.key)
            .is_some_and(|known| known.uid == pod.uid)
        {
            let old = self.pods.rows.remove(&pod.key);
            self.pod_changed(&pod.key, old, None, wakes);
        }
    }

    pub fn reset_pods(&mut self, scope: Option<&str>, pods: Vec<PodFacts>, wakes: &mut Wakes) {
        let rows = pods.into_iter().map(|it| (it.key.clone(), it));
        for (key, old, new) in self.pods.reset(scope, rows) {
            self.pod_changed(&key, old, new, wakes);
        }
    }

    fn pod_changed(
        &mut self,
        key: &ObjectKey,
        old: Option<PodFacts>,
        new: Option<PodFacts>,
        wakes: &mut Wakes,
    ) {
        if old == new {
            return;
        }
        if let Some(old) = &old {
            remove(&mut self.pools, &old.pool(), key);
            // The Pod that held them is gone, or another one has its name.
            if new.as_ref().is_none_or(|new| new.uid != old.uid) {
                wakes
                    .runs
                    .extend(self.assigned.get(old.uid.as_str()).into_iter().flatten().cloned());
            }
        }
        if let Some(new) = &new {
            self.pools.entry(new.pool()).or_default().insert(key.clone());
            if new.serves {
                self.wake_waiting(&new.pool(), wakes);
            }
        }
    }

    pub fn apply_beat(&mut self, facts: BeatFacts, now: Instant, wakes: &mut Wakes) {
        let old = self.beats.rows.get(&facts.key);
        let unchanged = old.is_some_and(|it| it.facts == facts);
        let news = old.is_none_or(|it| {
            !it.is_fresh(now) || it.facts.modes != facts.modes || it.facts.holder != facts.holder
        });
        if unchanged {
            return;
        }
        // A renewal of a fresh heartbeat changes no decision and wakes nobody.
        if news {
            self.wake_waiting(
                &ObjectKey::new(facts.key.namespace.clone(), facts.runtime.clone()),
                wakes,
            );
        }
        self.beats.rows.insert(
            facts.key.clone(),
            Beat {
                facts,
                seen: Some(now),
            },
        );
    }

    pub fn delete_beat(&mut self, key: &ObjectKey) {
        self.beats.rows.remove(key);
    }

    /// A listed heartbeat that we have not seen change counts from now if the wall clock does not
    /// contradict it; otherwise it must change before it counts.
    pub fn reset_beats(
        &mut self,
        scope: Option<&str>,
        beats: Vec<BeatFacts>,
        now: Instant,
        wall: Timestamp,
        wakes: &mut Wakes,
    ) {
        let rows: Vec<_> = beats
            .into_iter()
            .map(|facts| {
                let seen = match self.beats.rows.get(&facts.key) {
                    Some(known) if known.facts == facts => known.seen,
                    Some(_) => Some(now),
                    None => is_recent(&facts, wall).then_some(now),
                };
                (facts.key.clone(), Beat { facts, seen })
            })
            .collect();
        for (key, old, new) in self.beats.reset(scope, rows) {
            if let Some(new) = new.filter(|new| old.as_ref() != Some(new)) {
                self.wake_waiting(&ObjectKey::new(key.namespace, new.facts.runtime), wakes);
            }
        }
    }

    // --- Runtimes and their Deployments ---

    pub fn apply_runtime(&mut self, runtime: Runtime, wakes: &mut Wakes) {
        let Some(key) = ObjectKey::of(&runtime) else {
            return;
        };
        let runtime = Arc::new(runtime);
        let old = self.runtimes.rows.insert(key.clone(), Arc::clone(&runtime));
        self.runtime_changed(key, old, Some(runtime), wakes);
    }

    pub fn delete_runtime(&mut self, runtime: &Runtime, wakes: &mut Wakes) {
        let Some(key) = ObjectKey::of(runtime) else { return };
        if self
            .runtimes
            .rows
            .get(&key)
            .is_some_and(|known| known.metadata.uid == runtime.metadata.uid)
        {
            let old = self.runtimes.rows.remove(&key);
            self.runtime_changed(key, old, None, wakes);
        }
    }

    pub fn reset_runtimes(&mut self, scope: Option<&str>, runtimes: Vec<Runtime>, wakes: &mut Wakes) {
        let rows = runtimes
            .into_iter()
            .filter_map(|it| Some((ObjectKey::of(&it)?, Arc::new(it))));
        for (key, old, new) in self.runtimes.reset(scope, rows) {
            self.runtime_changed(key, old, new, wakes);
        }
    }

    fn runtime_changed(
        &mut self,
        key: ObjectKey,
        old: Option<Arc<Runtime>>,
        new: Option<Arc<Runtime>>,
        wakes: &mut Wakes,
    ) {
        if old == new {
            return;
        }
        if old.as_ref().map(|it| &it.spec) != new.as_ref().map(|it| &it.spec) {
            self.wake_waiting(&key, wakes);
        }
        wakes.runtimes.insert(key);
    }

    pub fn apply_deployment(&mut self, facts: DeploymentFacts, wakes: &mut Wakes) {
        let old = self.deployments.rows.insert(facts.key.clone(), facts.clone());
        deployment_changed(old.as_ref(), Some(&facts), wakes);
    }

    pub fn delete_deployment(&mut self, key: &ObjectKey, wakes: &mut Wakes) {
        let old = self.deployments.rows.remove(key);
        deployment_changed(old.as_ref(), None, wakes);
    }

    pub fn reset_deployments(&mut self, scope: Option<&str>, all: Vec<DeploymentFacts>, wakes: &mut Wakes) {
        let rows = all.into_iter().map(|it| (it.key.clone(), it));
        for (_, old, new) in self.deployments.reset(scope, rows) {
            deployment_changed(old.as_ref(), new.as_ref(), wakes);
        }
    }
}

fn deployment_changed(old: Option<&DeploymentFacts>, new: Option<&DeploymentFacts>, wakes: &mut Wakes) {
    if old == new {
        return;
    }
    for facts in old.into_iter().chain(new) {
        if let Some(runtime) = &facts.runtime {
            wakes
                .runtimes
                .insert(ObjectKey::new(facts.key.namespace.clone(), runtime.clone()));
        }
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

// === impl Beat ===

impl Beat {
    fn is_fresh(&self, now: Instant) -> bool {
        self.seen
            .is_some_and(|seen| now.saturating_duration_since(seen) < HEARTBEAT_FRESH)
    }
}

fn is_recent(facts: &BeatFacts, wall: Timestamp) -> bool {
    let Some(renewed) = &facts.renewed else {
        return false;
    };
    let age = wall.duration_since(renewed.0);
    // The clock of another machine may be ahead.
    age.unsigned_abs() < HEARTBEAT_FRESH
}

// === impl Table ===

impl<V> Default for Table<V> {
    fn default() -> Self {
        Self { rows: HashMap::new() }
    }
}

impl<V: Clone> Table<V> {
    /// Takes a whole list, of one namespace or of all; yields what was and what is for each key.
    fn reset(
        &mut self,
        scope: Option<&str>,
        rows: impl IntoIterator<Item = (ObjectKey, V)>,
    ) -> Vec<(ObjectKey, Option<V>, Option<V>)> {
        let mut changes = Vec::new();
        let mut kept = BTreeSet::new();
        for (key, new) in rows {
            let old = self.rows.insert(key.clone(), new.clone());
            kept.insert(key.clone());
            changes.push((key, old, Some(new)));
        }
        let gone: Vec<_> = self
            .rows
            .keys()
            .filter(|key| scope.is_none_or(|it| it == key.namespace) && !kept.contains(*key))
            .cloned()
            .collect();
        for key in gone {
            let old = self.rows.remove(&key);
            changes.push((key, old, None));
        }
        changes
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
