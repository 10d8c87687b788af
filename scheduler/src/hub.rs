//! What the parts of one term share: the index, the reservations, and who is to be looked at.

use std::sync::{Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use tokio::{sync::watch, time::Instant};

use crate::{
    assumed::Assumed,
    facts::ObjectKey,
    queue::Queue,
    world::{Wakes, World},
};

/// Shared by the watches, who write, and the loops, who read. It lives for one term: a new leader
/// begins with an empty one.
pub(crate) struct Hub {
    state: Mutex<State>,
    pub(crate) runs: Queue<ObjectKey>,
    pub(crate) runtimes: Queue<ObjectKey>,
    clock: Clock,
    /// Watches that have not listed yet.
    unlisted: watch::Sender<usize>,
}

/// Index and reservations; one lock, because a look needs both at one instant.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) world: World,
    pub(crate) assumed: Assumed,
    pub(crate) clock: Clock,
}

/// Reads the wall clock.
pub(crate) type Clock = fn() -> Timestamp;

// === impl State ===

impl State {
    pub(crate) fn new(clock: Clock) -> Self {
        Self {
            world: World::born(Instant::now()),
            assumed: Assumed::default(),
            clock,
        }
    }
}

// === impl Hub ===

impl Hub {
    /// `watches` is how many will report that they have listed.
    pub(crate) fn new(watches: usize, clock: Clock) -> Self {
        Self {
            state: Mutex::new(State::new(clock)),
            clock,
            runs: Queue::new(),
            runtimes: Queue::new(),
            unlisted: watch::Sender::new(watches),
        }
    }

    /// Now, by the wall clock.
    pub(crate) fn now(&self) -> Timestamp {
        (self.clock)()
    }

    /// Nothing that holds the lock can panic half-way, so a poisoned one is still good.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a change and queues whom it concerns. Before every watch has listed nobody is
    /// queued: they all are then.
    pub(crate) fn change(&self, change: impl FnOnce(&mut State, &mut Wakes)) {
        let mut wakes = Wakes::default();
        change(&mut self.lock(), &mut wakes);
        if *self.unlisted.borrow() == 0 {
            self.queue(wakes);
        }
    }

    /// One watch has listed for the first time.
    pub(crate) fn listed(&self) {
        self.unlisted.send_modify(|left| *left = left.saturating_sub(1));
    }

    /// Waits until every watch has listed, then queues everybody. The lists are consistent reads
    /// made within this term, so that what an earlier leader wrote is in them (C-7.1).
    pub(crate) async fn caught_up(&self) {
        let mut unlisted = self.unlisted.subscribe();
        // The sender lives as long as `self`, so that an error cannot happen.
        let _ = unlisted.wait_for(|left| *left == 0).await;
        let everybody = self.lock().world.everybody();
        self.queue(everybody);
    }

    fn queue(&self, wakes: Wakes) {
        for key in wakes.runs {
            self.runs.wake(key);
        }
        for key in wakes.runtimes {
            self.runtimes.wake(key);
        }
    }
}
