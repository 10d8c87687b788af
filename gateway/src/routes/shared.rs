//! The table between its writers and its readers: watches write, the path reads finished snapshots and is never
//! blocked.

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

use super::{
    Entry, Miss, Owner, Routes, State,
    table::{News, Scope, Table},
};

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
            self.snapshot.store(Arc::new(writer.table.entries().clone()));
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
mod tests {
    use super::*;
    use crate::routes::table::tests::{UID, not_ready, other_life, ready};

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

    /// C-3.5
    #[tokio::test(start_paused = true)]
    async fn an_unknown_uid_may_appear_within_300_ms() {
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
}
