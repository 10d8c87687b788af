//! One invocation per Run: a slot, and a guard that frees it.
//!
//! The slot belongs to the held registration and not to a version of the Run object, so that status
//! writes during a call can neither lose nor double it. Nothing queues (contract 5.3).

use std::sync::{Arc, Mutex, PoisonError};

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

#[derive(Debug, Default)]
struct Shared {
    until: Mutex<Option<Instant>>,
    freed: Notify,
}

// === impl Slot ===

impl Slot {
    /// Takes the slot; `until` is when it is free again at the latest, and is told to others.
    ///
    /// # Errors
    /// When it is taken.
    pub fn take(&self, until: Instant) -> Result<Taken, Busy> {
        let mut taken = self.lock();
        match *taken {
            Some(until) => Err(Busy { until }),
            None => {
                *taken = Some(until);
                Ok(Taken { slot: self.clone() })
            }
        }
    }

    /// Whether nobody has it.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.lock().is_none()
    }

    /// Returns once nobody has it.
    pub async fn free(&self) {
        loop {
            let freed = self.shared.freed.notified();
            tokio::pin!(freed);
            // Listening first: a guard dropped between the two would be missed.
            freed.as_mut().enable();
            if self.is_free() {
                return;
            }
            freed.await;
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.shared.until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Taken ===

impl Drop for Taken {
    fn drop(&mut self) {
        *self.slot.lock() = None;
        self.slot.shared.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_at_a_time_and_free_after_the_guard_contract_5_3() {
        let slot = Slot::default();
        let until = Instant::now() + Duration::from_secs(3);
        let first = slot.take(until).expect("free");
        assert_eq!(slot.take(until).err(), Some(Busy { until }));
        drop(first);
        assert!(slot.is_free());
        let _second = slot.take(until).expect("free again");
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_ends_when_the_guard_drops() {
        let slot = Slot::default();
        let guard = slot.take(Instant::now()).expect("free");
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
            let _guard = inner.take(Instant::now()).expect("free");
            panic!("a call");
        }));
        assert!(result.is_err() && slot.is_free());
    }
}
