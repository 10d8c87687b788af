//! Entries by UID: `apply`, `delete`, `reset`, and the finished snapshots that the path reads.
//!
//! The table is a plain struct with one rule against late news: facts of a lower attempt never replace or
//! remove facts of a higher one, and what has ended stays ended. UIDs are never used twice, so news of
//! another life of the same name cannot meet here at all.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use kruntimes_api::keys::RunUid;
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, timeout_at},
};

use super::{Entry, Miss, Owner, Routes, State};

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

/// A finished table, as readers see it.
type Snapshot = HashMap<RunUid, Arc<Entry>>;

/// The table shared between watches (which write) and the path (which reads finished snapshots).
#[derive(Debug)]
pub struct Shared {
    table: Mutex<Writer>,
    snapshot: ArcSwap<Snapshot>,
    listed: watch::Sender<Version>,
    waiters: Semaphore,
}

#[derive(Debug)]
struct Writer {
    table: Table,
    not_listed: HashSet<Scope>,
}

/// Grows with every snapshot; tells also whether every watch has listed once.
#[derive(Debug, Clone, Copy, Default)]
struct Version {
    number: u64,
    complete: bool,
}

/// How long an unknown UID may take to appear (C-3.5).
pub const APPEAR: Duration = Duration::from_millis(300);

/// How many calls may wait for that at once. Strangers can make a call wait, so it is few.
pub const WAITERS: usize = 256;

// === impl Table ===

impl Table {
    /// The object is like this now. Says whether anything changed.
    pub fn apply(&mut self, entry: Entry) -> bool {
        if let Some(held) = self.entries.get(&entry.key.uid)
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

    /// `all` is everything in `scope`. Says whether anything changed.
    pub fn reset(&mut self, scope: &Scope, all: Vec<Entry>) -> bool {
        let listed: HashSet<RunUid> = all.iter().map(|entry| entry.key.uid).collect();
        let before = self.entries.len();
        self.entries
            .retain(|uid, entry| !scope.covers(entry) || listed.contains(uid));
        let mut changed = self.entries.len() != before;
        for entry in all {
            changed |= self.apply(entry);
        }
        changed
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

// === impl Shared ===

impl Shared {
    /// Empty, until each of `scopes` has been listed.
    #[must_use]
    pub fn new(scopes: impl IntoIterator<Item = Scope>) -> Self {
        let writer = Writer {
            table: Table::default(),
            not_listed: scopes.into_iter().collect(),
        };
        let version = Version {
            number: 0,
            complete: writer.not_listed.is_empty(),
        };
        Self {
            table: Mutex::new(writer),
            snapshot: ArcSwap::default(),
            listed: watch::Sender::new(version),
            waiters: Semaphore::new(WAITERS),
        }
    }

    /// Takes in all of `news` of a watch over `scope` and publishes at most one snapshot.
    pub fn take_in(&self, scope: &Scope, news: impl IntoIterator<Item = News>) {
        // Nothing below can panic half-way, so a poisoned lock is still good.
        let mut writer = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = false;
        for piece in news {
            changed |= match piece {
                News::Apply(entry) => writer.table.apply(entry),
                News::Delete(last) => writer.table.delete(&last),
                News::Reset(all) => {
                    let first = writer.not_listed.remove(scope);
                    writer.table.reset(scope, all) || first
                }
            };
        }
        if changed {
            self.snapshot.store(Arc::new(writer.table.entries.clone()));
            let complete = writer.not_listed.is_empty();
            self.listed.send_modify(|version| {
                *version = Version {
                    number: version.number + 1,
                    complete,
                }
            });
        }
    }

    /// How many functions are known, and how many of them can be called.
    #[must_use]
    pub fn count(&self) -> (usize, usize) {
        let snapshot = self.snapshot.load();
        let ready = snapshot
            .values()
            .filter(|entry| matches!(entry.state, State::Ready(_)))
            .count();
        (snapshot.len(), ready)
    }

    /// Every owner that some route leads to.
    #[must_use]
    pub fn owners(&self) -> HashSet<Owner> {
        let route = |entry: &Arc<Entry>| match &entry.state {
            State::Ready(route) => Some(route.owner),
            _ => None,
        };
        self.snapshot.load().values().filter_map(route).collect()
    }
}

impl Routes for Shared {
    fn find(&self, uid: RunUid) -> Result<Arc<Entry>, Miss> {
        match self.snapshot.load().get(&uid) {
            Some(entry) => Ok(Arc::clone(entry)),
            None if self.listed.borrow().complete => Err(Miss::Unknown),
            None => Err(Miss::NotListed),
        }
    }

    async fn appear(&self, uid: RunUid) -> Result<Arc<Entry>, Miss> {
        let mut news = self.listed.subscribe();
        let mut found = self.find(uid);
        if found != Err(Miss::Unknown) {
            return found;
        }
        // Full: they wait for nothing, and this one answers at once.
        let Ok(_waiting) = self.waiters.try_acquire() else {
            return found;
        };
        let deadline = Instant::now() + APPEAR;
        while found == Err(Miss::Unknown) && matches!(timeout_at(deadline, news.changed()).await, Ok(Ok(())))
        {
            found = self.find(uid);
        }
        found
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use kruntimes_api::keys::{Attempt, PodUid, RunKey};
    use kruntimes_peer::PeerKey;
    use proptest::prelude::*;

    use super::*;
    use crate::routes::{NotReady, Route};

    const UID: &str = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";

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
            state,
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

    fn not_ready(attempt: i32) -> Entry {
        entry(attempt, State::NotReady(NotReady::Recovering))
    }

    fn other_life(entry: &Entry) -> Entry {
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
        table.apply(ready(1, "p1"));
        table.apply(ready(2, "p2"));
        assert!(!table.delete(&ready(1, "p1")));
        assert!(!table.apply(not_ready(1)));
        assert!(!table.apply(ready(1, "p1")));
        assert_eq!(*table.entries[&UID.parse().unwrap()], ready(2, "p2"));
    }

    #[test]
    fn late_news_of_an_old_life_never_harms_the_new_one() {
        let mut table = Table::default();
        let new = other_life(&ready(1, "p2"));
        table.apply(ready(5, "p1"));
        table.apply(new.clone());
        table.delete(&ready(5, "p1"));
        assert!(!table.delete(&ready(5, "p1")));
        assert_eq!(*table.entries[&new.key.uid], new);
        assert_eq!(table.entries.len(), 1);
    }

    #[test]
    fn a_ready_owner_may_become_not_ready_and_ready_again() {
        let mut table = Table::default();
        assert!(table.apply(ready(1, "p1")));
        assert!(table.apply(not_ready(1)));
        assert!(table.apply(ready(1, "p1")));
        assert!(!table.apply(ready(1, "p1")), "nothing changed");
        assert!(table.delete(&ready(1, "p1")));
    }

    #[test]
    fn what_has_ended_stays_ended() {
        let mut table = Table::default();
        table.apply(entry(1, ended()));
        assert!(!table.apply(ready(1, "p1")));
        assert!(!table.apply(ready(2, "p1")));
    }

    #[test]
    fn a_list_replaces_its_scope_only() {
        let mut table = Table::default();
        table.apply(ready(2, "p2"));
        let mut elsewhere = other_life(&ready(1, "p1"));
        elsewhere.key.namespace = "elsewhere".into();
        table.apply(elsewhere);
        assert!(
            !table.reset(&Scope::Namespace("demo".into()), vec![ready(1, "p1")]),
            "the list is older"
        );
        assert!(table.reset(&Scope::Namespace("demo".into()), vec![]));
        assert_eq!(table.entries.len(), 1);
        assert!(table.reset(&Scope::All, vec![]));
        assert!(table.entries.is_empty());
    }

    #[test]
    fn readers_know_whether_the_runs_were_listed() {
        let uid = UID.parse().unwrap();
        let (a, b) = (Scope::Namespace("demo".into()), Scope::Namespace("b".into()));
        let shared = Shared::new([a.clone(), b.clone()]);
        shared.take_in(&a, [News::Reset(vec![])]);
        assert_eq!(shared.find(uid), Err(Miss::NotListed));
        shared.take_in(&b, [News::Reset(vec![])]);
        assert_eq!(shared.find(uid), Err(Miss::Unknown));
        shared.take_in(&a, [News::Apply(not_ready(1)), News::Apply(ready(1, "p1"))]);
        assert_eq!(*shared.find(uid).unwrap(), ready(1, "p1"));
        assert_eq!((shared.count(), shared.owners().len()), ((1, 1), 1));
    }

    #[tokio::test(start_paused = true)]
    async fn an_unknown_uid_may_appear_within_300_ms_c_3_5() {
        let uid = UID.parse().unwrap();
        let shared = Shared::new([]);
        let before = Instant::now();
        assert_eq!(shared.appear(uid).await, Err(Miss::Unknown));
        assert_eq!(before.elapsed(), APPEAR);
        let (found, ()) = tokio::join!(shared.appear(uid), async {
            shared.take_in(&Scope::All, [News::Apply(other_life(&ready(1, "p2")))]);
            tokio::time::sleep(APPEAR / 2).await;
            shared.take_in(&Scope::All, [News::Apply(ready(1, "p1"))]);
        });
        assert_eq!(*found.unwrap(), ready(1, "p1"));
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_wait_are_bounded() {
        let uid = UID.parse().unwrap();
        let shared = Shared::new([]);
        let all = shared
            .waiters
            .try_acquire_many(u32::try_from(WAITERS).unwrap())
            .unwrap();
        let before = Instant::now();
        assert_eq!(shared.appear(uid).await, Err(Miss::Unknown));
        assert_eq!(before.elapsed(), Duration::ZERO);
        drop(all);
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
                    0 => table.apply(ready(attempt.max(1), "p")),
                    1 => table.apply(not_ready(attempt)),
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
