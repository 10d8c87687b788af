//! Runtimes and the Deployments of their pools.

use std::sync::Arc;

use kruntimes_api::Runtime;

use super::{Wakes, World};
use crate::facts::{DeploymentFacts, ObjectKey};

impl World {
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
        let same_spec = old.as_ref().map(|it| &it.spec) == new.as_ref().map(|it| &it.spec);
        if !same_spec {
            self.wake_waiting(&key, wakes);
        }
        // A status is ours: to look again at what we have just written would never end if it said
        // something else each time.
        let life = |it: &Arc<Runtime>| (it.metadata.uid.clone(), it.metadata.deletion_timestamp.clone());
        if !same_spec || old.as_ref().map(life) != new.as_ref().map(life) {
            wakes.runtimes.insert(key);
        }
    }

    /// The Deployments of pools in a namespace, by name.
    pub fn deployments_in(&self, namespace: &str) -> Vec<DeploymentFacts> {
        let mut found: Vec<_> = self
            .deployments
            .rows
            .values()
            .filter(|it| it.key.namespace == namespace)
            .cloned()
            .collect();
        found.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        found
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
