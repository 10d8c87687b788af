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
    Entry, Miss, Next, Owner, Routes, State, Wait,
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

/// How much later than its caller the gateway may hear of a function (C-3.5): how long an unknown UID may take to
/// appear, and one that is being registered to become Ready.
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
        let now = Instant::now();
        for piece in news {
            changed |= match piece {
                News::Apply(entry) => writer.table.apply(entry, now),
                News::Delete(last) => writer.table.delete(&last),
                News::Reset(all) => {
                    let first = writer.not_listed.remove(scope);
                    writer.table.reset(scope, all, now) || first
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

    async fn moved(&self, uid: RunUid, wait: Wait<'_>) -> Option<Arc<Entry>> {
        let since = Instant::now();
        let mut news = self.listed.subscribe();
        loop {
            let entry = self.find(uid).ok()?;
            let until = match wait.next(&entry, since) {
                Next::Go => return Some(entry),
                Next::Until(until) => until,
            };
            if until <= Instant::now() || !matches!(timeout_at(until, news.changed()).await, Ok(Ok(()))) {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes::{
        NotReady,
        table::tests::{UID, entry, not_ready, other_life, ready},
    };

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

    const SECOND: Duration = Duration::from_secs(1);

    /// A call that may wait for 300 ms for late news, and for 3 s for a hand-over.
    fn wait(from: Option<&super::super::Route>) -> Wait<'_> {
        Wait {
            from,
            late: APPEAR,
            handover: 3 * SECOND,
            deadline: Instant::now() + 10 * SECOND,
        }
    }

    /// C-3.7, C-6.4
    #[tokio::test(start_paused = true)]
    async fn a_call_waits_for_the_end_of_a_hand_over() {
        let uid = UID.parse().unwrap();
        let shared = Shared::new([]);
        let says = |entry| shared.take_in(&Scope::All, [News::Apply(entry)]);
        let first = ready(1, "p1");
        says(first.clone());
        let owner = first.route.as_ref();
        let before = Instant::now();
        let (moved, ()) = tokio::join!(shared.moved(uid, wait(owner)), async {
            tokio::time::sleep(APPEAR / 2).await;
            says(entry(1, State::NotReady(NotReady::Draining)));
            tokio::time::sleep(SECOND).await;
            says(entry(2, State::NotReady(NotReady::Registering)));
            tokio::time::sleep(SECOND).await;
            says(ready(2, "p2"));
        });
        assert_eq!(*moved.unwrap(), ready(2, "p2"));
        assert_eq!(before.elapsed(), APPEAR / 2 + 2 * SECOND);
    }

    /// C-3.5: a caller may know that a function is Ready before the gateway does.
    #[tokio::test(start_paused = true)]
    async fn a_function_that_is_being_registered_may_be_ready_within_300_ms() {
        let uid = UID.parse().unwrap();
        let shared = Shared::new([]);
        let says = |entry| shared.take_in(&Scope::All, [News::Apply(entry)]);
        says(entry(1, State::NotReady(NotReady::Registering)));
        let before = Instant::now();
        let (ready_soon, ()) = tokio::join!(shared.moved(uid, wait(None)), async {
            tokio::time::sleep(APPEAR / 2).await;
            says(ready(1, "p1"));
        });
        assert_eq!(*ready_soon.unwrap(), ready(1, "p1"));
        assert_eq!(before.elapsed(), APPEAR / 2);
    }

    /// C-3.5: what is not to be expected is not waited for.
    #[tokio::test(start_paused = true)]
    async fn a_call_does_not_wait_in_vain() {
        let uid = UID.parse().unwrap();
        let shared = Shared::new([]);
        let says = |entry| shared.take_in(&Scope::All, [News::Apply(entry)]);
        let first = ready(1, "p1");
        let owner = first.route.as_ref();
        let took = async |from, deadline| {
            let (before, wait) = (Instant::now(), wait(from));
            let deadline = Instant::now() + deadline;
            assert_eq!(shared.moved(uid, Wait { deadline, ..wait }).await, None);
            before.elapsed()
        };
        assert_eq!(
            took(owner, 9 * SECOND).await,
            Duration::ZERO,
            "there is no such function"
        );
        says(first.clone());
        assert_eq!(took(owner, 9 * SECOND).await, APPEAR, "news may be late");
        says(not_ready(1));
        assert_eq!(took(owner, 9 * SECOND).await, Duration::ZERO, "its owner is lost");
        for state in [NotReady::Pending, NotReady::Registering] {
            says(entry(1, State::NotReady(state)));
            assert_eq!(
                took(None, 9 * SECOND).await,
                APPEAR,
                "{state:?}: news may be late"
            );
        }
        let nowhere = |state| Entry {
            nowhere: true,
            ..entry(1, State::NotReady(state))
        };
        says(nowhere(NotReady::Pending));
        assert_eq!(took(None, 9 * SECOND).await, Duration::ZERO, "no Pod has room");
        says(entry(1, State::NotReady(NotReady::Draining)));
        assert_eq!(took(None, SECOND).await, SECOND, "the caller waits no longer");
        says(entry(1, State::NotReady(NotReady::Recovering)));
        assert_eq!(
            took(None, 9 * SECOND).await,
            2 * SECOND,
            "a hand-over has 3 s in all"
        );
        assert_eq!(took(None, 9 * SECOND).await, Duration::ZERO, "it has had them");

        says(ready(1, "p1"));
        says(entry(1, State::NotReady(NotReady::Draining)));
        let (waited, ()) = tokio::join!(took(None, 9 * SECOND), async {
            tokio::time::sleep(SECOND).await;
            says(nowhere(NotReady::Recovering));
        });
        assert_eq!(waited, SECOND, "nobody takes it over");
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
