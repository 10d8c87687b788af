//! Pools roll one per namespace at a time (C-7.2): which pool must wait, for which other.
//!
//! A new runtimed image changes every pool at once. Were all of them rolled together, every function of a
//! namespace would move at the same time, and the namespace would need twice its Pods.

use std::{collections::HashMap, time::Duration};

use tokio::time::Instant;

use crate::facts::{DeploymentFacts, ObjectKey};

/// A roll is waited for no longer than this. Of one that makes no progress the Deployment says so after
/// 10 minutes; but its controller may say nothing at all, or every Pod take its time to end.
const LONGEST: Duration = Duration::from_secs(15 * 60);

/// The last roll that we began in each namespace.
#[derive(Debug, Default)]
pub(crate) struct Rolls {
    begun: HashMap<String, Begun>,
    /// Since when a roll has been waited for, by Runtime; of which Deployment and template.
    awaited: HashMap<ObjectKey, (Roll, Instant)>,
}

/// UID of the Deployment and digest of its template.
type Roll = (String, Option<String>);

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
    pub(crate) fn blocked_by(
        &mut self,
        pool: &ObjectKey,
        deployments: &[DeploymentFacts],
        now: Instant,
    ) -> Option<String> {
        self.awaited.retain(|key, _| {
            let is = |it: &DeploymentFacts| it.runtime.as_ref() == Some(&key.name);
            key.namespace != pool.namespace || deployments.iter().any(is)
        });
        let mut found = None;
        for deployment in deployments {
            let Some(runtime) = deployment.runtime.as_ref().filter(|it| **it != pool.name) else {
                continue;
            };
            let key = ObjectKey::new(pool.namespace.clone(), runtime.clone());
            if !self.is_rolling(&key, deployment) {
                self.awaited.remove(&key);
                continue;
            }
            let roll = (deployment.uid.clone(), deployment.template.clone());
            let awaited = self.awaited.entry(key).or_insert_with(|| (roll.clone(), now));
            if awaited.0 != roll {
                *awaited = (roll, now);
            }
            if now.saturating_duration_since(awaited.1) < LONGEST {
                found.get_or_insert_with(|| runtime.clone());
            }
        }
        found
    }

    fn is_rolling(&self, pool: &ObjectKey, deployment: &DeploymentFacts) -> bool {
        // What the watch shows may be from before our own change.
        let unseen = self.begun.get(&pool.namespace).is_some_and(|begun| {
            begun.runtime == pool.name
                && begun.uid == deployment.uid
                && Some(deployment.generation) < begun.generation
        });
        deployment.rolls || unseen
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
            wanted: Some(1),
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
        let now = Instant::now();
        let (bash, python) = (ObjectKey::new("ns", "bash"), ObjectKey::new("ns", "python"));
        let mut rolls = Rolls::default();
        let deployments = [pool("bash", 1, false), pool("python", 2, true)];
        assert_eq!(
            rolls.blocked_by(&bash, &deployments, now).as_deref(),
            Some("python")
        );
        assert_eq!(
            rolls.blocked_by(&python, &deployments, now),
            None,
            "a further change of its own"
        );
    }

    #[test]
    fn a_roll_counts_before_the_watch_shows_it() {
        let now = Instant::now();
        let (bash, python) = (ObjectKey::new("ns", "bash"), ObjectKey::new("ns", "python"));
        let mut rolls = Rolls::default();
        rolls.begun(&python, "python", Some(2));
        let late = [pool("bash", 1, false), pool("python", 1, false)];
        assert_eq!(rolls.blocked_by(&bash, &late, now).as_deref(), Some("python"));
        let done = [pool("bash", 1, false), pool("python", 2, false)];
        assert_eq!(rolls.blocked_by(&bash, &done, now), None);
        assert_eq!(
            rolls.blocked_by(&bash, &[pool("bash", 1, false)], now),
            None,
            "deleted meanwhile"
        );
        let mut anew = pool("python", 1, false);
        anew.uid = "another".to_owned();
        assert_eq!(
            rolls.blocked_by(&bash, &[pool("bash", 1, false), anew], now),
            None,
            "deleted and made anew"
        );
    }

    /// C-7.2: a roll that does not end holds up the others for a time and not for ever; the next one again.
    #[test]
    fn a_roll_is_waited_for_a_quarter_of_an_hour() {
        let (now, minute) = (Instant::now(), Duration::from_secs(60));
        let bash = ObjectKey::new("ns", "bash");
        let mut rolls = Rolls::default();
        let mut python = pool("python", 2, true);
        let mut blocked = |python: &DeploymentFacts, at| {
            let deployments = [pool("bash", 1, false), python.clone()];
            rolls.blocked_by(&bash, &deployments, now + at * minute).is_some()
        };
        assert!(blocked(&python, 0) && blocked(&python, 14));
        python.generation = 3;
        assert!(!blocked(&python, 15), "a scaler has changed its number meanwhile");
        python.template = Some("another".to_owned());
        assert!(blocked(&python, 16) && blocked(&python, 30) && !blocked(&python, 31));
        python.rolls = false;
        assert!(!blocked(&python, 32));
        python.rolls = true;
        assert!(blocked(&python, 33));
    }
}
