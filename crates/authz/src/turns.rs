//! Whose access review is next: so many at once in all, and half of them for one namespace, so that a storm of
//! tokens that nobody knows, at the functions of one, does not keep the callers of another waiting.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};

/// How many reviews run at once: a small part of what an API server takes from everybody.
pub const AT_ONCE: usize = 64;

/// How many of them for one namespace.
pub const SHARE: usize = AT_ONCE / 2;

/// Gives turns in the order in which they are asked for, among those whose namespace has one left.
#[derive(Debug)]
pub struct Turns {
    all: Semaphore,
    /// Of namespaces somebody waits or has a turn for.
    shares: Mutex<HashMap<Arc<str>, Arc<Semaphore>>>,
}

/// A turn, until it drops.
#[derive(Debug)]
#[must_use = "the turn is over when this drops"]
pub struct Turn<'a> {
    // In this order: the share is free before it is looked at.
    _all: SemaphorePermit<'a>,
    _share: OwnedSemaphorePermit,
    _asked: Asked<'a>,
}

/// Somebody waits or has a turn for this namespace; the last one takes its share away.
#[derive(Debug)]
struct Asked<'a> {
    turns: &'a Turns,
    namespace: Arc<str>,
    share: Option<Arc<Semaphore>>,
}

// === impl Turns ===

impl Turns {
    /// Nobody has a turn.
    #[must_use]
    pub fn new() -> Self {
        Self {
            all: Semaphore::new(AT_ONCE),
            shares: Mutex::default(),
        }
    }

    /// Waits for a turn; `None` never comes, as turns are never closed. Cancel safe: who goes away has no turn.
    pub async fn take(&self, namespace: &str) -> Option<Turn<'_>> {
        let asked = self.ask(namespace);
        // The share first: who waits for that must not hold what another namespace could use.
        let share = Arc::clone(asked.share.as_ref()?).acquire_owned().await.ok()?;
        let all = self.all.acquire().await.ok()?;
        Some(Turn {
            _all: all,
            _share: share,
            _asked: asked,
        })
    }

    fn ask(&self, namespace: &str) -> Asked<'_> {
        let mut shares = self.shares();
        let (namespace, share) = match shares.get_key_value(namespace) {
            Some((name, share)) => (Arc::clone(name), Arc::clone(share)),
            None => {
                let (name, share) = (Arc::<str>::from(namespace), Arc::new(Semaphore::new(SHARE)));
                shares.insert(Arc::clone(&name), Arc::clone(&share));
                (name, share)
            }
        };
        Asked {
            turns: self,
            namespace,
            share: Some(share),
        }
    }

    fn shares(&self) -> MutexGuard<'_, HashMap<Arc<str>, Arc<Semaphore>>> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Turns {
    fn default() -> Self {
        Self::new()
    }
}

// === impl Asked ===

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let mut shares = self.turns.shares();
        // Let go while the table is locked, so that of two who leave at once the second sees that it is the last.
        let mine = self.share.take();
        // Ours and the table's: nobody else waits or has a turn, and none can come meanwhile.
        if mine.is_some_and(|share| Arc::strong_count(&share) == 2) {
            shares.remove(&self.namespace);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, task::Poll};

    use super::*;

    /// As many turns for `namespace` as there are now.
    async fn all_for<'a>(turns: &'a Turns, namespace: &str) -> Vec<Turn<'a>> {
        let mut taken = Vec::new();
        while let Some(turn) = now(turns, namespace).await {
            taken.push(turn);
        }
        taken
    }

    async fn now<'a>(turns: &'a Turns, namespace: &str) -> Option<Turn<'a>> {
        once(&mut pin!(turns.take(namespace))).await.flatten()
    }

    /// What `future` says when it is asked once; Tokio would let a test have so many turns only.
    async fn once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        let asked = std::future::poll_fn(|cx| match pin!(&mut *future).poll(cx) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => Poll::Ready(None),
        });
        tokio::task::unconstrained(asked).await
    }

    /// C-3.6, bounded concurrent reviews: a namespace has half of the turns, and all together have no more than there are.
    #[tokio::test]
    async fn one_namespace_leaves_turns_for_others() {
        let turns = Turns::new();
        let storm = all_for(&turns, "storm").await;
        let other = all_for(&turns, "other").await;
        assert_eq!((storm.len(), other.len()), (SHARE, AT_ONCE - SHARE));
        assert!(now(&turns, "third").await.is_none());
        drop(other);
        assert!(now(&turns, "storm").await.is_none(), "its share is taken");
        assert!(now(&turns, "third").await.is_some());
        drop(storm);
        assert!(now(&turns, "storm").await.is_some());
    }

    /// Who waits for a share holds no turn that another namespace could use, and who stops waiting leaves nothing behind.
    #[tokio::test]
    async fn waiting_takes_nothing_and_leaves_nothing() {
        let turns = Turns::new();
        let storm = all_for(&turns, "storm").await;
        let mut waiting: Vec<_> = (0..1000).map(|_| Box::pin(turns.take("storm"))).collect();
        for one in &mut waiting {
            assert!(once(one).await.is_none());
        }
        assert_eq!(all_for(&turns, "other").await.len(), AT_ONCE - SHARE);
        drop(waiting);
        drop(storm);
        assert_eq!(all_for(&turns, "storm").await.len(), SHARE);
        assert!(turns.shares().is_empty(), "nobody waits or has a turn");
    }

    #[tokio::test]
    async fn a_turn_that_is_over_goes_to_who_waits() {
        let turns = Turns::new();
        let mut storm = all_for(&turns, "storm").await;
        let mut next = Box::pin(turns.take("storm"));
        assert!(once(&mut next).await.is_none());
        storm.pop();
        assert!(next.await.is_some());
    }
}
