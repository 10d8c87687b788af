//! Entries by UID: `apply`, `delete`, `reset`.
//!
//! A plain struct with one rule against late news: facts of a lower attempt never replace or
//! remove facts of a higher one, and what has ended stays ended. UIDs are never used twice, so news of
//! another life of the same name cannot meet here at all.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use kruntimes_api::keys::RunUid;
use tokio::time::Instant;

use super::{Entry, NotReady, State};

/// What a watch covers; its list replaces exactly that.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Every namespace.
    All,
    /// One namespace.
    Namespace(String),
}

/// One piece of news from a watch.
#[derive(Debug, Clone)]
pub enum News {
    /// The object is like this now.
    Apply(Entry),
    /// The object is gone; these are its last facts.
    Delete(Entry),
    /// These are all objects of the watch's scope.
    Reset(Vec<Entry>),
}

/// The entries, without any sharing.
#[derive(Debug, Default)]
pub struct Table {
    entries: HashMap<RunUid, Arc<Entry>>,
}

// === impl Table ===

impl Table {
    /// The object is like this at `now`. Says whether anything changed.
    pub fn apply(&mut self, mut entry: Entry, now: Instant) -> bool {
        let held = self.entries.get(&entry.key.uid);
        entry.handed_over = handed_over(&entry, held.and_then(|held| held.handed_over), now);
        if let Some(held) = held
            && (is_late(&entry, held) || **held == entry)
        {
            return false;
        }
        self.entries.insert(entry.key.uid, Arc::new(entry));
        true
    }

    /// The object is gone; `last` are its last facts. Says whether anything changed.
    pub fn delete(&mut self, last: &Entry) -> bool {
        let late = self
            .entries
            .get(&last.key.uid)
            .is_none_or(|held| last.attempt < held.attempt);
        !late && self.entries.remove(&last.key.uid).is_some()
    }

    /// All entries.
    #[must_use]
    pub fn entries(&self) -> &HashMap<RunUid, Arc<Entry>> {
        &self.entries
    }

    /// `all` is everything in `scope` at `now`. Says whether anything changed.
    pub fn reset(&mut self, scope: &Scope, all: Vec<Entry>, now: Instant) -> bool {
        let listed: HashSet<RunUid> = all.iter().map(|entry| entry.key.uid).collect();
        let before = self.entries.len();
        self.entries
            .retain(|uid, entry| !scope.covers(entry) || listed.contains(uid));
        let mut changed = self.entries.len() != before;
        for entry in all {
            changed |= self.apply(entry, now);
        }
        changed
    }
}

/// Since when the function is handed over. It begins with an owner that says so (C-6.4), and lasts over all steps
/// until it can be called again; a function that has lost its owner is not handed over, and one that no Pod can take
/// no longer.
fn handed_over(news: &Entry, before: Option<Instant>, now: Instant) -> Option<Instant> {
    match news.state {
        State::NotReady(_) if news.nowhere => None,
        State::NotReady(NotReady::Draining) => before.or(Some(now)),
        State::NotReady(NotReady::Pending | NotReady::Registering | NotReady::Recovering) => before,
        State::NotReady(NotReady::Terminating) | State::Ready(_) | State::Ended { .. } => None,
    }
}

/// Whether `news` is of a time before `held`.
fn is_late(news: &Entry, held: &Entry) -> bool {
    let ended = |entry: &Entry| matches!(entry.state, State::Ended { .. });
    news.attempt < held.attempt || ended(held) && !ended(news)
}

// === impl Scope ===

impl Scope {
    fn covers(&self, entry: &Entry) -> bool {
        match self {
            Self::All => true,
            Self::Namespace(namespace) => entry.key.namespace == *namespace,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use kruntimes_api::keys::{Attempt, PodUid, RunKey};
    use kruntimes_peer::PeerKey;
    use proptest::prelude::*;

    use super::*;
    use crate::routes::{NotReady, Owner, Route};

    pub(crate) const UID: &str = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";

    pub(crate) fn entry(attempt: i32, state: State) -> Entry {
        Entry {
            key: RunKey {
                namespace: "demo".into(),
                name: "hello".into(),
                uid: UID.parse().unwrap(),
            },
            runtime: "python".into(),
            attempt,
            ends_at: None,
            route: match &state {
                State::Ready(route) => Some(route.clone()),
                _ => None,
            },
            state,
            why: None,
            nowhere: false,
            handed_over: None,
        }
    }

    pub(crate) fn ready(attempt: i32, pod: &str) -> Entry {
        let route = Route {
            owner: Owner {
                address: "10.0.0.1:9443".parse().unwrap(),
                key: PeerKey::of_spki(pod.as_bytes()),
            },
            attempt: Attempt::new(attempt).unwrap(),
            pod_uid: PodUid::new(pod).unwrap(),
        };
        entry(attempt, State::Ready(route))
    }

    pub(crate) fn not_ready(attempt: i32) -> Entry {
        entry(attempt, State::NotReady(NotReady::Recovering))
    }

    pub(crate) fn other_life(entry: &Entry) -> Entry {
        let mut other = entry.clone();
        other.key.uid = "00000000-0000-4000-8000-000000000001".parse().unwrap();
        other
    }

    fn ended() -> State {
        State::Ended {
            phase: "Failed".into(),
            reason: "x".into(),
        }
    }

    #[test]
    fn late_news_of_an_old_owner_never_harms_its_successor() {
        let mut table = Table::default();
        table.apply(ready(1, "p1"), Instant::now());
        table.apply(ready(2, "p2"), Instant::now());
        assert!(!table.delete(&ready(1, "p1")));
        assert!(!table.apply(not_ready(1), Instant::now()));
        assert!(!table.apply(ready(1, "p1"), Instant::now()));
        assert_eq!(*table.entries[&UID.parse().unwrap()], ready(2, "p2"));
    }

    #[test]
    fn late_news_of_an_old_life_never_harms_the_new_one() {
        let mut table = Table::default();
        let new = other_life(&ready(1, "p2"));
        table.apply(ready(5, "p1"), Instant::now());
        table.apply(new.clone(), Instant::now());
        table.delete(&ready(5, "p1"));
        assert!(!table.delete(&ready(5, "p1")));
        assert_eq!(*table.entries[&new.key.uid], new);
        assert_eq!(table.entries.len(), 1);
    }

    #[test]
    fn a_ready_owner_may_become_not_ready_and_ready_again() {
        let mut table = Table::default();
        assert!(table.apply(ready(1, "p1"), Instant::now()));
        assert!(table.apply(not_ready(1), Instant::now()));
        assert!(table.apply(ready(1, "p1"), Instant::now()));
        assert!(!table.apply(ready(1, "p1"), Instant::now()), "nothing changed");
        assert!(table.delete(&ready(1, "p1")));
    }

    /// C-6.4
    #[test]
    fn a_hand_over_lasts_until_the_function_can_be_called_again() {
        let mut table = Table::default();
        let uid = UID.parse().unwrap();
        let began = Instant::now();
        let later = began + std::time::Duration::from_secs(1);
        let draining = || entry(1, State::NotReady(NotReady::Draining));
        table.apply(ready(1, "p1"), began);
        assert!(table.apply(draining(), began));
        assert!(!table.apply(draining(), later), "nothing new");
        for state in [NotReady::Recovering, NotReady::Pending, NotReady::Registering] {
            table.apply(entry(2, State::NotReady(state)), later);
            assert_eq!(table.entries[&uid].handed_over, Some(began), "{state:?}");
        }
        table.apply(ready(2, "p2"), later);
        assert_eq!(table.entries[&uid].handed_over, None);
        // Its owner was lost.
        table.apply(not_ready(2), later);
        assert_eq!(table.entries[&uid].handed_over, None);
    }

    #[test]
    fn what_has_ended_stays_ended() {
        let mut table = Table::default();
        table.apply(entry(1, ended()), Instant::now());
        assert!(!table.apply(ready(1, "p1"), Instant::now()));
        assert!(!table.apply(ready(2, "p1"), Instant::now()));
    }

    #[test]
    fn a_list_replaces_its_scope_only() {
        let mut table = Table::default();
        table.apply(ready(2, "p2"), Instant::now());
        let mut elsewhere = other_life(&ready(1, "p1"));
        elsewhere.key.namespace = "elsewhere".into();
        table.apply(elsewhere, Instant::now());
        assert!(
            !table.reset(
                &Scope::Namespace("demo".into()),
                vec![ready(1, "p1")],
                Instant::now()
            ),
            "the list is older"
        );
        assert!(table.reset(&Scope::Namespace("demo".into()), vec![], Instant::now()));
        assert_eq!(table.entries.len(), 1);
        assert!(table.reset(&Scope::All, vec![], Instant::now()));
        assert!(table.entries.is_empty());
    }

    proptest! {
        /// Whatever arrives in whatever order: the attempt of an entry never falls while it is there.
        #[test]
        fn attempts_never_fall(news in proptest::collection::vec((0..3_u8, 0..5_i32), 0..40)) {
            let mut table = Table::default();
            let uid = UID.parse().unwrap();
            for (kind, attempt) in news {
                let before = table.entries.get(&uid).map(|held| held.attempt);
                match kind {
                    0 => table.apply(ready(attempt.max(1), "p"), Instant::now()),
                    1 => table.apply(not_ready(attempt), Instant::now()),
                    _ => table.delete(&not_ready(attempt)),
                };
                let after = table.entries.get(&uid).map(|held| held.attempt);
                if let (Some(before), Some(after)) = (before, after) {
                    prop_assert!(before <= after);
                }
                if let (Some(before), None) = (before, after) {
                    prop_assert!(kind == 2 && attempt >= before);
                }
            }
        }
    }
}
