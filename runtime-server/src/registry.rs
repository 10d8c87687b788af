//! Which functions are registered and what each may do: generations, idempotency,
//! supersession, draining and the one call in flight (C-5.2, C-5.3).
//!
//! Pure: no process, no clock, no lock. Whoever holds it passes [`Moment`]s in and
//! acts on what comes back. `tests/registry_model.rs` compares it with a smaller
//! model under random operations.

use std::{collections::HashMap, time::Instant};

use kruntimes_proto::{
    failure::{Failure, Reason},
    ids::RegistrationId,
    limits,
};

/// One reading of both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// For deadlines.
    pub monotonic: Instant,
    /// For people and for `last_activity_unix_nano`.
    pub unix_nano: i64,
}

/// Where a registration is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// The first worker is starting.
    Registering,
    /// Calls are taken; also while a dead worker is being replaced (C-5.6).
    Ready,
    /// No new calls; goes away when the running one ends.
    Draining,
    /// No worker can be started; stays until unregistered.
    Failed,
}

/// What a status poll reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Where it is in its life.
    pub state: State,
    /// Calls running: 0 or 1.
    pub in_flight: i32,
    /// Unix time in nanoseconds when it became ready, or a call began or ended;
    /// 0 before it became ready.
    pub last_activity_unix_nano: i64,
    /// Why it failed, at most 4 KiB; empty otherwise.
    pub fatal_error: String,
}

/// What became of a wish to register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Registered {
    /// A new generation: start a worker, after ending the one it replaces.
    New {
        /// The generation that is no longer valid.
        replaces: Option<RegistrationId>,
    },
    /// The same wish again: nothing is initialised twice.
    Known(RegistrationId),
}

/// All registrations of one server.
#[derive(Debug, Default)]
pub struct Registry {
    runs: HashMap<String, Registration>,
}

#[derive(Debug)]
struct Registration {
    id: RegistrationId,
    attempt: i32,
    digest: String,
    state: State,
    /// Latest end of the running call.
    in_flight: Option<Instant>,
    last_activity_unix_nano: i64,
    fatal_error: String,
}

impl Registry {
    /// Creates a generation, or finds it again. `id` is used only for a new one.
    ///
    /// # Errors
    /// `RegistrationConflict` for the same attempt with another digest,
    /// `StaleRegistration` for a lower attempt.
    pub fn register(
        &mut self,
        run_uid: &str,
        attempt: i32,
        digest: &str,
        id: &RegistrationId,
    ) -> Result<Registered, Failure> {
        let replaces = match self.runs.get(run_uid) {
            Some(held) if attempt < held.attempt => {
                return Err(Failure::new(
                    Reason::StaleRegistration,
                    format!(
                        "registration_attempt {attempt} is below {}, which is registered",
                        held.attempt
                    ),
                ));
            }
            Some(held) if attempt == held.attempt && digest != held.digest => {
                return Err(Failure::new(
                    Reason::RegistrationConflict,
                    format!(
                        "registration_attempt {attempt} is registered with another registration_digest; raise the attempt"
                    ),
                ));
            }
            Some(held) if attempt == held.attempt => return Ok(Registered::Known(held.id.clone())),
            Some(held) => Some(held.id.clone()),
            None => None,
        };
        let registration = Registration {
            id: id.clone(),
            attempt,
            digest: digest.to_owned(),
            state: State::Registering,
            in_flight: None,
            last_activity_unix_nano: 0,
            fatal_error: String::new(),
        };
        self.runs.insert(run_uid.to_owned(), registration);
        Ok(Registered::New { replaces })
    }

    /// The first worker loaded the handler. Without effect on a generation that is
    /// draining, failed, superseded or gone.
    pub fn ready(&mut self, run_uid: &str, id: &RegistrationId, now: Moment) {
        if let Some(held) = self.held(run_uid, id)
            && held.state == State::Registering
        {
            held.state = State::Ready;
            held.last_activity_unix_nano = now.unix_nano;
        }
    }

    /// No worker can be started. Without effect on a generation that is draining,
    /// superseded or gone.
    pub fn failed(&mut self, run_uid: &str, id: &RegistrationId, why: &str) {
        if let Some(held) = self.held(run_uid, id)
            && matches!(held.state, State::Registering | State::Ready)
        {
            held.state = State::Failed;
            held.fatal_error = limits::clip(why, limits::FATAL_ERROR_BYTES);
        }
    }

    /// Reads one registration.
    ///
    /// # Errors
    /// `RegistrationNotFound` when the Run has none, `StaleRegistration` when it
    /// has another.
    pub fn status(&self, run_uid: &str, id: &RegistrationId) -> Result<Status, Failure> {
        let held = self.current(run_uid, id)?;
        Ok(Status {
            state: held.state,
            in_flight: i32::from(held.in_flight.is_some()),
            last_activity_unix_nano: held.last_activity_unix_nano,
            fatal_error: held.fatal_error.clone(),
        })
    }

    /// Takes the only slot for a call that ends at `deadline` at the latest.
    ///
    /// # Errors
    /// As [`Self::status`], `Registering`, `Draining`, `Recovering` (after a
    /// failure), or `Busy` with how long the running call may still take.
    pub fn begin(
        &mut self,
        run_uid: &str,
        id: &RegistrationId,
        deadline: Instant,
        now: Moment,
    ) -> Result<(), Failure> {
        self.current(run_uid, id)?;
        let Some(held) = self.held(run_uid, id) else {
            return Err(not_found(run_uid));
        };
        match (held.state, held.in_flight) {
            (State::Registering, _) => Err(Failure::new(Reason::Registering, "the function is being loaded")),
            (State::Draining, _) => Err(Failure::new(Reason::Draining, "the function takes no more calls")),
            (State::Failed, _) => Err(Failure::new(Reason::Recovering, "the function cannot be started")),
            (State::Ready, Some(running_until)) => {
                let left = running_until.saturating_duration_since(now.monotonic);
                Err(Failure::new(Reason::Busy, "a call of this function is running").busy_at_most(left))
            }
            (State::Ready, None) => {
                held.in_flight = Some(deadline);
                held.last_activity_unix_nano = now.unix_nano;
                Ok(())
            }
        }
    }

    /// Gives the slot back. Without effect when the generation is no longer held.
    pub fn end(&mut self, run_uid: &str, id: &RegistrationId, now: Moment) {
        if let Some(held) = self.held(run_uid, id)
            && held.in_flight.take().is_some()
        {
            held.last_activity_unix_nano = now.unix_nano;
        }
    }

    /// Takes no more calls. `false` when the Run has no registration, which is what
    /// the caller wants to reach anyway.
    ///
    /// # Errors
    /// `StaleRegistration` when the Run has another registration: it stays.
    pub fn drain(&mut self, run_uid: &str, id: &RegistrationId) -> Result<bool, Failure> {
        match self.current(run_uid, id) {
            Err(failure) if failure.reason == Reason::RegistrationNotFound => Ok(false),
            Err(failure) => Err(failure),
            Ok(_) => {
                if let Some(held) = self.held(run_uid, id) {
                    held.state = State::Draining;
                }
                Ok(true)
            }
        }
    }

    /// Forgets a generation whose worker has ended. Another generation of the same
    /// Run stays.
    pub fn remove(&mut self, run_uid: &str, id: &RegistrationId) {
        if self.held(run_uid, id).is_some() {
            self.runs.remove(run_uid);
        }
    }

    /// Whether this attempt is registered already, so that registering it again
    /// starts nothing.
    #[must_use]
    pub fn holds(&self, run_uid: &str, attempt: i32) -> bool {
        self.runs.get(run_uid).is_some_and(|held| held.attempt == attempt)
    }

    /// How many registrations are held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    fn held(&mut self, run_uid: &str, id: &RegistrationId) -> Option<&mut Registration> {
        self.runs.get_mut(run_uid).filter(|held| held.id == *id)
    }

    fn current(&self, run_uid: &str, id: &RegistrationId) -> Result<&Registration, Failure> {
        match self.runs.get(run_uid) {
            None => Err(not_found(run_uid)),
            Some(held) if held.id != *id => Err(Failure::new(
                Reason::StaleRegistration,
                "registration_id was superseded by a later registration",
            )),
            Some(held) => Ok(held),
        }
    }
}

fn not_found(run_uid: &str) -> Failure {
    Failure::new(
        Reason::RegistrationNotFound,
        format!("run_uid {run_uid} has no registration"),
    )
}
