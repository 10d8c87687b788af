//! Is this process ready, and if not, what is missing.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

/// Ready once every registered part has reported and nothing has failed. Clones share one state.
#[derive(Debug, Clone)]
pub struct Readiness {
    state: Arc<watch::Sender<State>>,
}

/// A part that is not ready yet; it becomes ready when this drops.
#[derive(Debug)]
#[must_use = "dropping the guard reports the part as ready"]
pub struct Guard {
    readiness: Readiness,
    part: &'static str,
}

/// What is known at one instant.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// Every part ever registered, with the number of guards that still hold it back.
    pub parts: BTreeMap<&'static str, usize>,
    /// Why the process will not become ready again, for example `draining`.
    pub failed: Option<&'static str>,
}

// === impl Readiness ===

impl Default for Readiness {
    fn default() -> Self {
        Self::new()
    }
}

impl Readiness {
    /// Ready, until a part registers.
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: Arc::new(watch::Sender::new(State::default())),
        }
    }

    /// Holds readiness back until the guard drops. A part may register again later.
    pub fn register(&self, part: &'static str) -> Guard {
        self.state
            .send_modify(|state| *state.parts.entry(part).or_default() += 1);
        Guard {
            readiness: self.clone(),
            part,
        }
    }

    /// Not ready from now on and for good. The first reason stays.
    pub fn fail(&self, reason: &'static str) {
        self.state.send_modify(|state| {
            state.failed.get_or_insert(reason);
        });
    }

    /// What is known now.
    #[must_use]
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Whether traffic may come.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.state.borrow().is_ready()
    }

    /// Returns once ready; never, if the process failed before.
    pub async fn ready(&self) {
        let mut changes = self.state.subscribe();
        // The sender lives as long as `self`, so that an error cannot happen.
        let _ = changes.wait_for(State::is_ready).await;
    }
}

// === impl Guard ===

impl Drop for Guard {
    fn drop(&mut self) {
        let part = self.part;
        self.readiness.state.send_modify(|state| {
            if let Some(guards) = state.parts.get_mut(part) {
                *guards = guards.saturating_sub(1);
            }
        });
    }
}

// === impl State ===

impl State {
    /// Whether traffic may come.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.failed.is_none() && self.missing().next().is_none()
    }

    /// The parts that are not ready, in alphabetical order.
    pub fn missing(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.parts
            .iter()
            .filter(|(_, guards)| **guards > 0)
            .map(|(part, _)| *part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_when_the_last_guard_drops() {
        let readiness = Readiness::new();
        assert!(readiness.is_ready(), "nothing is missing");
        let routes = readiness.register("routes");
        let peer = readiness.register("peer certificate");
        let missing = |r: &Readiness| r.state().missing().collect::<Vec<_>>();
        assert_eq!(missing(&readiness), ["peer certificate", "routes"]);
        drop(routes);
        assert_eq!(missing(&readiness), ["peer certificate"]);
        drop(peer);
        assert!(readiness.is_ready());
        let again = readiness.register("routes");
        assert_eq!(missing(&readiness), ["routes"]);
        drop(again);
        assert!(readiness.is_ready());
    }

    #[test]
    fn failing_is_for_good_and_keeps_the_first_reason() {
        let readiness = Readiness::new();
        readiness.fail("draining");
        readiness.fail("another");
        drop(readiness.register("routes"));
        assert!(!readiness.is_ready());
        assert_eq!(readiness.state().failed, Some("draining"));
    }

    #[tokio::test]
    async fn waiting_ends_with_the_last_guard() {
        let readiness = Readiness::new();
        let guard = readiness.register("routes");
        let (_, ()) = tokio::join!(readiness.ready(), async { drop(guard) });
    }
}
