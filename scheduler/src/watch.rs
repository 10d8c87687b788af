//! kube → index and wake-ups: one watch for each kind and namespace, all of the same shape.

use std::{collections::HashSet, fmt::Debug};

use futures::{StreamExt as _, future::join_all};
use k8s_openapi::api::{apps::v1::Deployment, coordination::v1::Lease, core::v1::Pod};
use kruntimes_api::{
    Run, Runtime,
    names::{LABEL_RUNTIME, LEASE_LABEL_RUNTIME},
};
use kruntimes_cluster::Pauses;
use kube::{
    Api, Client, Resource,
    core::NamespaceResourceScope,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use crate::{
    facts::{BeatFacts, DeploymentFacts, ObjectKey, PodFacts},
    hub::{Hub, State},
    pool::LABEL_MANAGED_BY,
    world::Wakes,
};

/// Kinds that are watched.
const KINDS: usize = 5;

/// A watch is made anew, from where it was, after this time: a connection that died without a word
/// hides a lost Pod no longer than this and kube's margin.
const WATCH_SECONDS: u32 = 30;

/// How many watches [`run`] makes; each reports to the hub once.
pub(crate) fn count(scopes: &[String]) -> usize {
    KINDS * scopes.len().max(1)
}

/// Watches until dropped. No scopes means all namespaces.
pub(crate) async fn run(client: &Client, scopes: &[String], hub: &Hub) {
    let scopes: Vec<Option<&str>> = if scopes.is_empty() {
        vec![None]
    } else {
        scopes.iter().map(|it| Some(it.as_str())).collect()
    };
    join_all(scopes.into_iter().map(|scope| async move {
        tokio::join!(
            follow::<Run>(client, scope, hub),
            follow::<Pod>(client, scope, hub),
            follow::<Lease>(client, scope, hub),
            follow::<Runtime>(client, scope, hub),
            follow::<Deployment>(client, scope, hub),
        )
    }))
    .await;
}

/// How one kind gets into the index.
trait Watched:
    Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + Debug + DeserializeOwned + Send + 'static
{
    /// Only objects that matter.
    fn config() -> watcher::Config;
    fn apply(self, state: &mut State, wakes: &mut Wakes);
    fn delete(self, state: &mut State, wakes: &mut Wakes);
    fn reset(scope: Option<&str>, all: Vec<Self>, state: &mut State, wakes: &mut Wakes);
}

async fn follow<K: Watched>(client: &Client, scope: Option<&str>, hub: &Hub) {
    let api = match scope {
        None => Api::<K>::all(client.clone()),
        Some(namespace) => Api::<K>::namespaced(client.clone(), namespace),
    };
    let kind = K::kind(&());
    let config = K::config().timeout(WATCH_SECONDS);
    let mut events = watcher(api, config).backoff(Pauses::default()).boxed();
    let mut listed = Vec::new();
    let mut first = true;
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Init) => listed.clear(),
            Ok(watcher::Event::InitApply(object)) => listed.push(object),
            Ok(watcher::Event::InitDone) => {
                let all = std::mem::take(&mut listed);
                tracing::debug!(%kind, count = all.len(), "listed");
                hub.change(|state, wakes| K::reset(scope, all, state, wakes));
                if std::mem::take(&mut first) {
                    hub.listed();
                }
            }
            Ok(watcher::Event::Apply(object)) => hub.change(|state, wakes| object.apply(state, wakes)),
            Ok(watcher::Event::Delete(object)) => hub.change(|state, wakes| object.delete(state, wakes)),
            Err(error) => tracing::warn!(%kind, %error, "cannot watch; trying again"),
        }
    }
}

impl Watched for Run {
    fn config() -> watcher::Config {
        watcher::Config::default()
    }

    fn apply(self, state: &mut State, wakes: &mut Wakes) {
        state.assumed.settle(&self);
        state.world.apply_run(self, wakes);
    }

    fn delete(self, state: &mut State, wakes: &mut Wakes) {
        if let Some(uid) = self.run_uid() {
            state.assumed.gone(uid);
        }
        state.world.delete_run(&self, wakes);
    }

    fn reset(scope: Option<&str>, all: Vec<Self>, state: &mut State, wakes: &mut Wakes) {
        let listed: HashSet<_> = all.iter().filter_map(Run::run_uid).collect();
        for key in state.world.everybody().runs {
            let known = state.world.run(&key).and_then(|run| run.run_uid());
            if let Some(uid) = known.filter(|uid| !listed.contains(uid))
                && scope.is_none_or(|it| it == key.namespace)
            {
                // Its deletion fell between two watches; nothing else gives its room back.
                state.assumed.gone(uid);
            }
        }
        for run in &all {
            state.assumed.settle(run);
        }
        state.world.reset_runs(scope, all, wakes);
    }
}

impl Watched for Pod {
    fn config() -> watcher::Config {
        watcher::Config::default().labels(LABEL_RUNTIME)
    }

    fn apply(self, state: &mut State, wakes: &mut Wakes) {
        if let Some(facts) = PodFacts::of(&self) {
            state.world.apply_pod(facts, wakes);
        }
    }

    fn delete(self, state: &mut State, wakes: &mut Wakes) {
        if let Some(facts) = PodFacts::of(&self) {
            state.world.delete_pod(&facts, wakes);
        }
    }

    fn reset(scope: Option<&str>, all: Vec<Self>, state: &mut State, wakes: &mut Wakes) {
        let all = all.iter().filter_map(PodFacts::of).collect();
        state.world.reset_pods(scope, all, wakes);
    }
}

impl Watched for Lease {
    fn config() -> watcher::Config {
        watcher::Config::default().labels(LEASE_LABEL_RUNTIME)
    }

    fn apply(self, state: &mut State, wakes: &mut Wakes) {
        if let Some(facts) = BeatFacts::of(&self) {
            state.world.apply_beat(facts, Instant::now(), wakes);
        }
    }

    fn delete(self, state: &mut State, _: &mut Wakes) {
        if let Some(key) = ObjectKey::of(&self) {
            state.world.delete_beat(&key);
        }
    }

    fn reset(scope: Option<&str>, all: Vec<Self>, state: &mut State, wakes: &mut Wakes) {
        let all = all.iter().filter_map(BeatFacts::of).collect();
        let wall = (state.clock)();
        state.world.reset_beats(scope, all, Instant::now(), wall, wakes);
    }
}

impl Watched for Runtime {
    fn config() -> watcher::Config {
        watcher::Config::default()
    }

    fn apply(mut self, state: &mut State, wakes: &mut Wakes) {
        self.metadata.managed_fields = None;
        state.world.apply_runtime(self, wakes);
    }

    fn delete(self, state: &mut State, wakes: &mut Wakes) {
        state.world.delete_runtime(&self, wakes);
    }

    fn reset(scope: Option<&str>, mut all: Vec<Self>, state: &mut State, wakes: &mut Wakes) {
        for runtime in &mut all {
            runtime.metadata.managed_fields = None;
        }
        state.world.reset_runtimes(scope, all, wakes);
    }
}

impl Watched for Deployment {
    fn config() -> watcher::Config {
        let (key, value) = LABEL_MANAGED_BY;
        watcher::Config::default().labels(&format!("{key}={value}"))
    }

    fn apply(self, state: &mut State, wakes: &mut Wakes) {
        if let Some(facts) = DeploymentFacts::of(&self) {
            state.world.apply_deployment(facts, wakes);
        }
    }

    fn delete(self, state: &mut State, wakes: &mut Wakes) {
        if let Some(key) = ObjectKey::of(&self) {
            state.world.delete_deployment(&key, wakes);
        }
    }

    fn reset(scope: Option<&str>, all: Vec<Self>, state: &mut State, wakes: &mut Wakes) {
        let all = all.iter().filter_map(DeploymentFacts::of).collect();
        state.world.reset_deployments(scope, all, wakes);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use jiff::Timestamp;
    use kruntimes_api::{
        fixtures,
        keys::{Attempt, PodUid},
    };

    use super::*;
    use crate::assumed::Reservation;

    #[test]
    fn a_run_that_vanishes_between_two_watches_gives_its_room_back() {
        let (mut state, mut wakes) = (State::new(Timestamp::now), Wakes::default());
        for (namespace, name) in [("ns", "gone"), ("ns", "kept"), ("other", "elsewhere")] {
            let run = fixtures::run(namespace, name).build();
            let reservation = Reservation {
                pod: PodUid::new(fixtures::uid("pod-a")).unwrap(),
                attempt: Attempt::FIRST,
                demand: BTreeMap::new(),
                labels: BTreeMap::new(),
            };
            state.assumed.reserve(run.run_uid().unwrap(), reservation);
            run.apply(&mut state, &mut wakes);
        }
        let kept = fixtures::run("ns", "kept").build();
        Run::reset(Some("ns"), vec![kept.clone()], &mut state, &mut wakes);
        assert!(state.assumed.of(kept.run_uid().unwrap()).is_some());
        assert_eq!(state.assumed.count(), 2, "and those of other namespaces");
    }
}
