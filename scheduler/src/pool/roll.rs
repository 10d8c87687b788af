//! Pools roll one per namespace at a time (C-7.2): which pool must wait, for which other.
//!
//! A new runtimed image changes every pool at once. Were all of them rolled together, every function of a
//! namespace would move at the same time, and the namespace would need twice its Pods.

use std::collections::HashMap;

use crate::facts::{DeploymentFacts, ObjectKey};

/// The last roll that we began in each namespace.
#[derive(Debug, Default)]
pub(crate) struct Rolls {
    begun: HashMap<String, Begun>,
}

#[derive(Debug)]
struct Begun {
    runtime: String,
    /// Of the Deployment: one that was made anew counts from 1 again.
    uid: String,
    /// Of the Deployment, with the new template.
    generation: Option<i64>,
}

// === impl Rolls ===

impl Rolls {
    /// A new template of this pool has been applied.
    pub(crate) fn begun(&mut self, pool: &ObjectKey, uid: &str, generation: Option<i64>) {
        let begun = Begun {
            runtime: pool.name.clone(),
            uid: uid.to_owned(),
            generation,
        };
        self.begun.insert(pool.namespace.clone(), begun);
    }

    /// The Runtime of another pool that is being rolled, among the Deployments of the namespace.
    pub(crate) fn blocked_by(&self, pool: &ObjectKey, deployments: &[DeploymentFacts]) -> Option<String> {
        let begun = self.begun.get(&pool.namespace);
        deployments
            .iter()
            .filter_map(|it| Some((it.runtime.as_ref()?, it)))
            .filter(|(runtime, _)| **runtime != pool.name)
            .find(|(runtime, it)| {
                // What the watch shows may be from before our own change.
                let unseen = begun.is_some_and(|begun| {
                    begun.runtime == **runtime
                        && begun.uid == it.uid
                        && Some(it.generation) < begun.generation
                });
                it.rolls || unseen
            })
            .map(|(runtime, _)| runtime.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(runtime: &str, generation: i64, rolls: bool) -> DeploymentFacts {
        DeploymentFacts {
            key: ObjectKey::new("ns", format!("runtime-{runtime}")),
            uid: runtime.to_owned(),
            generation,
            runtime: Some(runtime.to_owned()),
            scaled_by_others: false,
            replicas: 1,
            ready: 1,
            failure: None,
            template: None,
            rolls,
        }
    }

    /// C-7.2: pools roll one per namespace at a time.
    #[test]
    fn a_pool_waits_for_another_that_rolls_and_not_for_itself() {
        let (bash, python) = (ObjectKey::new("ns", "bash"), ObjectKey::new("ns", "python"));
        let rolls = Rolls::default();
        let deployments = [pool("bash", 1, false), pool("python", 2, true)];
        assert_eq!(rolls.blocked_by(&bash, &deployments).as_deref(), Some("python"));
        assert_eq!(
            rolls.blocked_by(&python, &deployments),
            None,
            "a further change of its own"
        );
    }

    #[test]
    fn a_roll_counts_before_the_watch_shows_it() {
        let (bash, python) = (ObjectKey::new("ns", "bash"), ObjectKey::new("ns", "python"));
        let mut rolls = Rolls::default();
        rolls.begun(&python, "python", Some(2));
        let late = [pool("bash", 1, false), pool("python", 1, false)];
        assert_eq!(rolls.blocked_by(&bash, &late).as_deref(), Some("python"));
        let done = [pool("bash", 1, false), pool("python", 2, false)];
        assert_eq!(rolls.blocked_by(&bash, &done), None);
        assert_eq!(
            rolls.blocked_by(&bash, &[pool("bash", 1, false)]),
            None,
            "deleted meanwhile"
        );
        let mut anew = pool("python", 1, false);
        anew.uid = "another".to_owned();
        assert_eq!(
            rolls.blocked_by(&bash, &[pool("bash", 1, false), anew]),
            None,
            "deleted and made anew"
        );
    }
}
