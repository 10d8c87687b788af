//! One invocation per Run: a slot, and a guard that frees it.
//!
//! The slot belongs to the held registration and not to a version of the Run object, so that status
//! writes during a call can neither lose nor double it. Nothing queues (C-5.3).

use std::sync::{Arc, Mutex, PoisonError};

use kruntimes_proto::ids::InvocationId;
use tokio::{sync::Notify, time::Instant};

/// The single slot of one registration. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Slot {
    shared: Arc<Shared>,
}

/// Whoever has it, has the slot; dropping frees it.
#[derive(Debug)]
#[must_use = "the slot is free again when the guard drops"]
pub struct Taken {
    slot: Slot,
}

/// The slot is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Busy {
    /// When its holder gives it back at the latest.
    pub until: Instant,
}

/// A call that has the slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    /// Which.
    pub id: InvocationId,
    /// Since when.
    pub since: Instant,
    /// Until when at the latest.
    pub until: Instant,
    /// Somebody with the right to do so wants it to end (C-3.10).
    pub cancelled: bool,
}

#[derive(Debug, Default)]
struct Shared {
    holder: Mutex<Option<Holder>>,
    freed: Notify,
    cancelled: Notify,
}

#[derive(Debug)]
enum Holder {
    Call(Running),
    /// The lifecycle looks whether the function is idle.
    Look(Instant),
}

// === impl Slot ===

impl Slot {
    /// Takes the slot for a call; `until` is when it is free again at the latest, and is told to others.
    ///
    /// # Errors
    /// When it is taken.
    pub fn take(&self, id: InvocationId, now: Instant, until: Instant) -> Result<Taken, Busy> {
        self.hold(Holder::Call(Running {
            id,
            since: now,
            until,
            cancelled: false,
        }))
    }

    /// Takes the slot so that no call can begin meanwhile.
    ///
    /// # Errors
    /// When it is taken.
    pub fn look(&self, until: Instant) -> Result<Taken, Busy> {
        self.hold(Holder::Look(until))
    }

    /// The call that has the slot.
    #[must_use]
    pub fn running(&self) -> Option<Running> {
        match &*self.lock() {
            Some(Holder::Call(running)) => Some(running.clone()),
            _ => None,
        }
    }

    /// Asks the call of this id to end, and returns it; `None`: it does not run.
    pub fn cancel(&self, id: &InvocationId) -> Option<Running> {
        let mut holder = self.lock();
        let Some(Holder::Call(running)) = &mut *holder else {
            return None;
        };
        if running.id != *id {
            return None;
        }
        running.cancelled = true;
        let running = running.clone();
        drop(holder);
        self.shared.cancelled.notify_waiters();
        Some(running)
    }

    /// Whether nobody has it.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.lock().is_none()
    }

    /// Returns once nobody has it.
    pub async fn free(&self) {
        until(&self.shared.freed, || self.is_free()).await;
    }

    /// Returns once this call has given it back.
    pub async fn given_back(&self, call: &Running) {
        let another = |now: Running| (now.id, now.since) != (call.id.clone(), call.since);
        until(&self.shared.freed, || self.running().is_none_or(another)).await;
    }

    fn hold(&self, wish: Holder) -> Result<Taken, Busy> {
        let mut holder = self.lock();
        match &*holder {
            Some(Holder::Call(Running { until, .. }) | Holder::Look(until)) => Err(Busy { until: *until }),
            None => {
                *holder = Some(wish);
                Ok(Taken { slot: self.clone() })
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Holder>> {
        self.shared.holder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Taken ===

impl Taken {
    /// Returns once the call is to end.
    pub async fn cancelled(&self) {
        let asked = || matches!(&*self.slot.lock(), Some(Holder::Call(running)) if running.cancelled);
        until(&self.slot.shared.cancelled, asked).await;
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        *self.slot.lock() = None;
        self.slot.shared.freed.notify_waiters();
    }
}

/// Returns once `holds`, which whoever changes it announces.
async fn until(changed: &Notify, holds: impl Fn() -> bool) {
    loop {
        let change = changed.notified();
        tokio::pin!(change);
        // Listening first: a change between the two would be missed.
        change.as_mut().enable();
        if holds() {
            return;
        }
        change.await;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn take(slot: &Slot) -> Result<Taken, Busy> {
        let now = Instant::now();
        slot.take(id("inv_1"), now, now + Duration::from_secs(3))
    }

    fn id(text: &str) -> InvocationId {
        InvocationId::parse(text.as_bytes()).unwrap()
    }

    /// C-5.3: one call in flight, no queue.
    #[tokio::test(start_paused = true)]
    async fn one_at_a_time_and_free_after_the_guard() {
        let slot = Slot::default();
        let until = Instant::now() + Duration::from_secs(3);
        let first = take(&slot).expect("free");
        assert_eq!(take(&slot).err(), Some(Busy { until }));
        assert_eq!(slot.look(until).err(), Some(Busy { until }));
        drop(first);
        assert!(slot.is_free());
        let _second = take(&slot).expect("free again");
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_ends_when_the_guard_drops() {
        let slot = Slot::default();
        let guard = slot.look(Instant::now()).expect("free");
        let waiter = slot.free();
        tokio::pin!(waiter);
        assert!(futures::poll!(waiter.as_mut()).is_pending());
        drop(guard);
        waiter.await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_in_a_call_frees_the_slot() {
        let slot = Slot::default();
        let inner = slot.clone();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _guard = take(&inner).expect("free");
            panic!("a call");
        }));
        assert!(result.is_err() && slot.is_free());
    }

    /// C-3.10: only the call that was named, and not the one after it.
    #[tokio::test(start_paused = true)]
    async fn a_cancellation_reaches_the_named_call_only() {
        let slot = Slot::default();
        assert_eq!(slot.cancel(&id("inv_1")), None, "nothing runs");
        let look = slot.look(Instant::now()).expect("free");
        assert_eq!(slot.cancel(&id("inv_1")), None, "the lifecycle's look is no call");
        drop(look);
        let first = take(&slot).expect("free");
        assert_eq!(slot.cancel(&id("inv_2")), None);
        let mut waiter = Box::pin(first.cancelled());
        assert!(futures::poll!(waiter.as_mut()).is_pending());
        let cancelled = slot.cancel(&id("inv_1")).expect("it runs");
        assert_eq!(slot.cancel(&id("inv_1")).as_ref(), Some(&cancelled), "twice");
        waiter.await;
        let gone = slot.given_back(&cancelled);
        tokio::pin!(gone);
        assert!(futures::poll!(gone.as_mut()).is_pending());
        drop(first);
        tokio::time::advance(Duration::from_millis(1)).await;
        let second = take(&slot).expect("free");
        gone.await;
        assert!(futures::poll!(Box::pin(second.cancelled())).is_pending());
    }
}
