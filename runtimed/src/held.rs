//! Which registrations this Pod holds, and whether each may be called.
//!
//! The lifecycle writes, the invoker reads. An invocation finds its entry here and nowhere else: it
//! reads nothing from Kubernetes (contract 1.2).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use kruntimes_api::keys::{Attempt, RunKey, RunUid};
use kruntimes_proto::{
    failure::{Failure, Reason},
    ids::RegistrationId,
};
use tokio::{sync::Notify, time::Instant};

use crate::slots::Slot;

/// Every registration of this Pod. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Held {
    entries: Arc<RwLock<HashMap<RunUid, Arc<Entry>>>>,
}

/// One assignment that this Pod has claimed.
#[derive(Debug)]
pub struct Entry {
    /// The Run.
    pub key: RunKey,
    /// The attempt that was claimed.
    pub attempt: Attempt,
    /// The end of the Run's life, if it has one.
    pub ends: Option<Instant>,
    /// Its single slot.
    pub slot: Slot,
    /// Told when a call met a server that does not know the registration any more.
    pub suspect: Notify,
    state: Mutex<State>,
}

/// Whether calls may come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Not yet.
    Registering,
    /// Yes.
    Open,
    /// Not now: the server does not answer for the registration.
    Recovering,
    /// Never again: this Pod hands its Runs over.
    Draining,
    /// Never again: the Run ends.
    Terminating,
}

#[derive(Debug)]
struct State {
    gate: Gate,
    registration: Option<RegistrationId>,
}

// === impl Held ===

impl Held {
    /// Holds nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins to hold an assignment, with a closed gate. One of an older attempt is replaced.
    pub fn insert(&self, key: RunKey, attempt: Attempt, ends: Option<Instant>) -> Arc<Entry> {
        let uid = key.uid;
        let entry = Arc::new(Entry {
            key,
            attempt,
            ends,
            slot: Slot::default(),
            suspect: Notify::new(),
            state: Mutex::new(State {
                gate: Gate::Registering,
                registration: None,
            }),
        });
        self.write().insert(uid, Arc::clone(&entry));
        entry
    }

    /// The assignment that is held of this Run.
    #[must_use]
    pub fn get(&self, run: RunUid) -> Option<Arc<Entry>> {
        self.entries
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&run)
            .cloned()
    }

    /// Holds it no more.
    pub fn remove(&self, run: RunUid) {
        self.write().remove(&run);
    }

    /// Closes every gate, because the process stops.
    pub fn drain(&self) {
        for entry in self.write().values() {
            entry.close(Gate::Draining);
        }
    }

    /// How many are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn write(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<RunUid, Arc<Entry>>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Entry ===

impl Entry {
    /// The registration to call.
    ///
    /// # Errors
    /// Why it may not be called; nothing was started.
    pub fn callable(&self) -> Result<RegistrationId, Failure> {
        let state = self.state();
        let (reason, detail) = match (state.gate, &state.registration) {
            (Gate::Open, Some(registration)) => return Ok(registration.clone()),
            (Gate::Open | Gate::Registering, _) => (Reason::Registering, "the function is being registered"),
            (Gate::Recovering, _) => (
                Reason::Recovering,
                "the Runtime Server does not answer for the function",
            ),
            (Gate::Draining, _) => (Reason::Draining, "this Pod hands its functions over"),
            (Gate::Terminating, _) => (Reason::Terminating, "the function is ending"),
        };
        Err(Failure::new(reason, detail))
    }

    /// The gate as it is.
    #[must_use]
    pub fn gate(&self) -> Gate {
        self.state().gate
    }

    /// Lets calls through to this registration. `false`, and nothing happens, when the gate was
    /// closed for good.
    pub fn open(&self, registration: RegistrationId) -> bool {
        let mut state = self.state();
        if state.gate.is_final() {
            return false;
        }
        *state = State {
            gate: Gate::Open,
            registration: Some(registration),
        };
        true
    }

    /// Closes the gate. What was closed for good stays so.
    pub fn close(&self, gate: Gate) {
        let mut state = self.state();
        if !state.gate.is_final() {
            state.gate = gate;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Gate ===

impl Gate {
    fn is_final(self) -> bool {
        matches!(self, Self::Draining | Self::Terminating)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry() -> (Held, Arc<Entry>) {
        let held = Held::new();
        let key = kruntimes_api::fixtures::run("ns", "n").build().key().unwrap();
        let entry = held.insert(key, Attempt::FIRST, None);
        (held, entry)
    }

    #[test]
    fn callable_only_while_open() {
        let (_, entry) = entry();
        let reason = |entry: &Entry| entry.callable().map_err(|failure| failure.reason);
        assert_eq!(reason(&entry), Err(Reason::Registering));
        let id = RegistrationId::generate();
        assert!(entry.open(id.clone()));
        assert_eq!(reason(&entry), Ok(id.clone()));
        entry.close(Gate::Recovering);
        assert_eq!(reason(&entry), Err(Reason::Recovering));
        assert!(entry.open(id));
        entry.close(Gate::Terminating);
        assert_eq!(reason(&entry), Err(Reason::Terminating));
    }

    #[test]
    fn what_drains_is_never_ready_again() {
        let (held, entry) = entry();
        held.drain();
        assert!(!entry.open(RegistrationId::generate()));
        entry.close(Gate::Recovering);
        assert_eq!(entry.gate(), Gate::Draining);
    }

    #[test]
    fn a_new_attempt_has_a_slot_of_its_own() {
        let (held, old) = entry();
        let _call = old.slot.take(Instant::now()).expect("free");
        let new = held.insert(old.key.clone(), Attempt::FIRST.next(), None);
        assert!(new.slot.is_free() && !old.slot.is_free());
        held.remove(old.key.uid);
        assert!(held.is_empty());
    }
}
