//! Which registrations this Pod holds, and whether each may be called.
//!
//! The lifecycle writes, the invoker reads. An invocation finds its entry here and nowhere else: it
//! reads nothing from Kubernetes (C-1.2).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
};

use kruntimes_api::keys::{Attempt, RunKey, RunUid};
use kruntimes_proto::{
    failure::{Dispatched, Failure, Reason},
    ids::{InvocationId, RegistrationId},
};
use tokio::{sync::Notify, time::Instant};

use crate::{
    outputs::OutputsDir,
    slots::{Slot, Taken},
};

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
    /// Told when the server runs a call on that it was to end.
    pub stuck: Notify,
    state: Mutex<State>,
    told: Mutex<Trouble>,
}

/// A registration that can be called.
#[derive(Debug)]
pub struct Registered {
    /// How the server names it.
    pub id: RegistrationId,
    /// Since when.
    pub since: Instant,
    /// Where calls leave their outputs.
    pub outputs: OutputsDir,
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
    /// Never again: a newer attempt has its own entry.
    Superseded,
}

/// The last calls that went wrong, for who asks why.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Trouble {
    /// The last that was refused before it started.
    pub refused: Option<(Reason, Instant)>,
    /// The last that may have run.
    pub failed: Option<(Reason, Instant)>,
}

#[derive(Debug)]
struct State {
    gate: Gate,
    registered: Option<Arc<Registered>>,
}

// === impl Held ===

impl Held {
    /// Holds nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Begins to hold an assignment, with a closed gate. One of an older attempt is replaced, and
    /// closed for good to calls that have found it already.
    pub fn insert(&self, key: RunKey, attempt: Attempt, ends: Option<Instant>) -> Arc<Entry> {
        let uid = key.uid;
        let entry = Arc::new(Entry {
            key,
            attempt,
            ends,
            slot: Slot::default(),
            suspect: Notify::new(),
            stuck: Notify::new(),
            state: Mutex::new(State {
                gate: Gate::Registering,
                registered: None,
            }),
            told: Mutex::default(),
        });
        let replaced = self.write().insert(uid, Arc::clone(&entry));
        if let Some(replaced) = replaced {
            replaced.close(Gate::Superseded);
        }
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

    /// The server has nothing of it any more; its gate stays as it is closed.
    pub fn let_go(&self, run: RunUid) {
        if let Some(entry) = self.get(run) {
            entry.state().registered = None;
        }
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
    pub fn callable(&self) -> Result<Arc<Registered>, Failure> {
        let state = self.state();
        let (reason, detail) = match (state.gate, &state.registered) {
            (Gate::Open, Some(registered)) => return Ok(Arc::clone(registered)),
            (Gate::Open | Gate::Registering, _) => (Reason::Registering, "the function is being registered"),
            (Gate::Recovering, _) => (
                Reason::Recovering,
                "the Runtime Server does not answer for the function",
            ),
            (Gate::Draining, _) => (Reason::Draining, "this Pod hands its functions over"),
            (Gate::Terminating, _) => (Reason::Terminating, "the function is ending"),
            (Gate::Superseded, _) => (Reason::StaleRoute, "a newer attempt has replaced this one"),
        };
        Err(Failure::new(reason, detail))
    }

    /// Takes the slot for a call that ends at `until` at the latest.
    ///
    /// # Errors
    /// Why it may not begin; nothing was started.
    pub fn begin(
        &self,
        id: InvocationId,
        now: Instant,
        until: Instant,
    ) -> Result<(Arc<Registered>, Taken), Failure> {
        let registered = self.callable()?;
        let taken = match self.slot.take(id, now, until) {
            Ok(taken) => taken,
            Err(busy) => {
                // Whoever ends the Run takes the slot first and closes the gate then.
                self.callable()?;
                let left = busy.until.saturating_duration_since(now);
                return Err(
                    Failure::new(Reason::Busy, "a call of this function is running").busy_at_most(left)
                );
            }
        };
        // The gate may have closed, or opened for another registration, before the slot was ours.
        if !Arc::ptr_eq(&self.callable()?, &registered) {
            return Err(Failure::new(
                Reason::Recovering,
                "the function is being registered again",
            ));
        }
        Ok((registered, taken))
    }

    /// The gate as it is.
    #[must_use]
    pub fn gate(&self) -> Gate {
        self.state().gate
    }

    /// The newest registration, also behind a closed gate.
    #[must_use]
    pub fn registered(&self) -> Option<Arc<Registered>> {
        self.state().registered.clone()
    }

    /// Lets calls through to this registration. `false`, and nothing happens, when the gate was
    /// closed for good.
    pub fn open(&self, registered: Arc<Registered>) -> bool {
        let mut state = self.state();
        if state.gate.is_final() {
            return false;
        }
        *state = State {
            gate: Gate::Open,
            registered: Some(registered),
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

    /// Remembers how a call of somebody who may call went wrong.
    pub fn note(&self, failure: &Failure, now: Instant) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let place = match failure.dispatched {
            Dispatched::No => &mut told.refused,
            Dispatched::Yes | Dispatched::Unknown => &mut told.failed,
        };
        *place = Some((failure.reason, now));
    }

    /// How the last calls went wrong.
    #[must_use]
    pub fn trouble(&self) -> Trouble {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Gate ===

impl Gate {
    /// The word for people.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Registering => "Registering",
            Self::Open => "Ready",
            Self::Recovering => "Recovering",
            Self::Draining => "Draining",
            Self::Terminating | Self::Superseded => "Terminating",
        }
    }

    /// Whether it never opens again.
    #[must_use]
    pub fn is_final(self) -> bool {
        matches!(self, Self::Draining | Self::Terminating | Self::Superseded)
    }
}

// === impl Registered ===

impl Registered {
    /// From now on.
    #[must_use]
    pub fn new(id: RegistrationId, outputs: OutputsDir, now: Instant) -> Arc<Self> {
        Arc::new(Self {
            id,
            since: now,
            outputs,
        })
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

    fn registered() -> Arc<Registered> {
        let root = tempfile::tempdir().unwrap();
        let outputs = OutputsDir::open(root.path(), ".").unwrap();
        Registered::new(RegistrationId::generate(), outputs, Instant::now())
    }

    #[test]
    fn callable_only_while_open() {
        let (_, entry) = entry();
        let reason = |entry: &Entry| {
            let callable = entry.callable();
            callable.map(|it| it.id.clone()).map_err(|failure| failure.reason)
        };
        assert_eq!(reason(&entry), Err(Reason::Registering));
        let one = registered();
        assert!(entry.open(Arc::clone(&one)));
        assert_eq!(reason(&entry), Ok(one.id.clone()));
        entry.close(Gate::Recovering);
        assert_eq!(reason(&entry), Err(Reason::Recovering));
        assert!(entry.open(one));
        entry.close(Gate::Terminating);
        assert_eq!(reason(&entry), Err(Reason::Terminating));
    }

    /// Scenario 104: what drains is never ready again.
    #[test]
    fn what_drains_is_never_ready_again() {
        let (held, entry) = entry();
        held.drain();
        assert!(!entry.open(registered()));
        entry.close(Gate::Recovering);
        assert_eq!(entry.gate(), Gate::Draining);
    }

    /// A call that found the old entry before it was replaced must not start through it.
    #[test]
    fn a_new_attempt_has_a_slot_of_its_own_and_closes_the_old_gate() {
        let (held, old) = entry();
        assert!(old.open(registered()));
        let _call = old.slot.look(Instant::now()).expect("free");
        let new = held.insert(old.key.clone(), Attempt::FIRST.next(), None);
        assert!(new.slot.is_free() && !old.slot.is_free());
        assert_eq!(old.callable().unwrap_err().reason, Reason::StaleRoute);
        assert!(!old.open(registered()), "for good");
        held.remove(old.key.uid);
        assert!(held.is_empty());
    }

    #[test]
    fn refusals_and_failures_are_remembered_apart() {
        let (_, entry) = entry();
        let now = Instant::now();
        entry.note(&Failure::new(Reason::Busy, ""), now);
        entry.note(&Failure::new(Reason::WorkerExited, ""), now);
        let trouble = Trouble {
            refused: Some((Reason::Busy, now)),
            failed: Some((Reason::WorkerExited, now)),
        };
        assert_eq!(entry.trouble(), trouble);
    }
}
