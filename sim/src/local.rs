//! What a driver does inside its Pod: registering, asking for health, cleaning up, as in the product's
//! `lifecycle::act::local` and `lifecycle::drive`.

use std::{sync::Arc, time::Duration};

use kruntimes_api::keys::RunUid;
use kruntimes_proto::{executor::FunctionRegistrationState as State, failure::Reason, ids::RegistrationId};
use kruntimes_runtimed::{
    held::{Gate, Registered},
    lifecycle::{
        decide::{Expired, Fault, Step},
        health::{Health, Verdict},
        timers::POLL,
    },
    runtime_server::{Observed, ServerError, says_gone},
};

use crate::{
    clock::{SECOND, Time, micros},
    driver::{Cleaning, Doing, Driver, Registering},
    server::{Question, Word},
    sim::Sim,
};

/// How long a registration may take.
const REGISTRATION: Time = 120 * SECOND;
/// Between two looks at a registration that is being made, at first and at most.
const LOOKS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// Running calls may go on this long when the process stops.
const PATIENCE: Time = 15 * SECOND;
/// A stopping process waits this long for a server that cannot be reached.
const GIVE_UP_AFTER: Time = 10 * SECOND;
/// For the answer to a call that had the same deadline as the Run.
const LAST_ANSWER: Time = SECOND;

impl Sim {
    /// Shows callers that this Pod has the Run, with a closed gate.
    pub(crate) fn enter(&mut self, pod: u32, driver: &mut Driver) {
        let Some(attempt) = driver.local.held.map(|held| held.attempt) else {
            return;
        };
        let key = driver.key.clone();
        let ends = driver.ends();
        if let Some(daemon) = self.daemon(pod)
            && driver.entry.as_ref().is_none_or(|entry| entry.attempt != attempt)
        {
            driver.entry = Some(daemon.held.insert(key, attempt, ends));
        }
    }

    pub(crate) fn begin_register(&mut self, pod: u32, driver: &mut Driver) {
        self.enter(pod, driver);
        let run = driver.key.uid;
        let Some(record) = self.pods.get(&pod).and_then(|it| it.journal.get(&run)).cloned() else {
            return driver.fail(failed("the record of the registration is lost"));
        };
        driver.token = self.number();
        driver.doing = Doing::Register(Box::new(Registering {
            record,
            id: None,
            pause: LOOKS.0,
            deadline: self.now + REGISTRATION,
        }));
        self.look_at_registration(pod, driver);
    }

    /// Asks for the registration, or how far it is.
    pub(crate) fn look_at_registration(&mut self, pod: u32, driver: &mut Driver) {
        let Doing::Register(registering) = &driver.doing else {
            return;
        };
        if registering.deadline <= self.now {
            driver.fail(failed("the function was not ready in time"));
            driver.doing = Doing::Nothing;
            return;
        }
        let run = driver.key.uid;
        let question = match &registering.id {
            None => Question::Register(Box::new(registering.record.clone()), run),
            Some(id) => Question::Status(run, id.clone()),
        };
        if let Some(origin) = self.origin(pod, driver, driver.token) {
            self.ask_server(pod, origin, question);
        }
    }

    /// The Runtime Server has answered a driver.
    pub(crate) fn server_word(&mut self, pod: u32, run: RunUid, token: u64, word: Word) {
        let Some(mut driver) = self.daemon(pod).and_then(|it| it.drivers.remove(&run)) else {
            return;
        };
        if driver.token == token {
            match (std::mem::replace(&mut driver.doing, Doing::Nothing), word) {
                (Doing::Register(registering), word) => {
                    self.registration_word(pod, &mut driver, registering, word);
                }
                (Doing::Ask(slot), Word::Status(observed)) => {
                    self.health_word(&mut driver, slot.is_some(), observed);
                    drop(slot);
                }
                (Doing::Unregister(patient), word) => {
                    if !self.clean_up_word(pod, &mut driver, patient, word) {
                        return self.driver_ended(pod);
                    }
                }
                (doing, _) => driver.doing = doing,
            }
        }
        self.go_driver(pod, driver);
    }

    fn registration_word(&mut self, pod: u32, driver: &mut Driver, mut it: Box<Registering>, word: Word) {
        let run = driver.key.uid;
        match word {
            Word::Registered(Ok((id, state))) => {
                self.set_id(pod, run, Some(&id));
                if state == State::Ready {
                    return self.registered(driver, &id);
                }
                it.id = Some(id);
            }
            Word::Registered(Err(ServerError::Answered(failure))) => match failure.reason {
                Reason::ServerUnavailable | Reason::DeadlineExceeded | Reason::Busy => {}
                _ => return driver.fail(failed(&failure.detail)),
            },
            Word::Status(Ok(observed)) => match (observed.state, it.id.clone()) {
                (State::Ready, Some(id)) => return self.registered(driver, &id),
                (State::Failed | State::Draining, _) => return driver.fail(failed(&observed.fatal_error)),
                _ => {}
            },
            Word::Status(Err(ServerError::Answered(failure))) if says_gone(failure.reason) => {
                return driver.fail(failed("the Runtime Server lost the registration"));
            }
            _ => {}
        }
        let at = self.now + micros(it.pause);
        it.pause = (it.pause * 2).min(LOOKS.1);
        driver.doing = Doing::Register(it);
        self.wake_driver(pod, driver, at);
    }

    fn registered(&mut self, driver: &mut Driver, id: &RegistrationId) {
        let now = self.clock.instant(self.now);
        let Some(outputs) = self.outputs.clone() else {
            return;
        };
        let registered = Registered::new(id.clone(), outputs, now);
        if let Some(entry) = &driver.entry {
            entry.open(Arc::clone(&registered));
        }
        driver.registration = Some((registered, Health::new(driver.run.as_deref(), now)));
        driver.set_step(Step::Registered);
    }

    fn set_id(&mut self, pod: u32, run: RunUid, id: Option<&RegistrationId>) {
        if let Some(record) = self.pods.get_mut(&pod).and_then(|it| it.journal.get_mut(&run)) {
            record.registration_id = id.map(|id| id.as_str().to_owned());
        }
    }

    /// Something is wrong with a registration; the server is asked at once.
    pub(crate) fn suspect(&mut self, pod: u32, run: RunUid) {
        self.nudge(pod, run);
        let Some(mut driver) = self.daemon(pod).and_then(|it| it.drivers.remove(&run)) else {
            return;
        };
        if matches!(driver.doing, Doing::Wait) && driver.registration.is_some() {
            self.ask_health(pod, &mut driver);
        }
        self.go_driver(pod, driver);
    }

    pub(crate) fn ask_health(&mut self, pod: u32, driver: &mut Driver) {
        let now = self.clock.instant(self.now);
        let Some((registered, health)) = &mut driver.registration else {
            driver.doing = Doing::Nothing;
            return;
        };
        let idle = health.is_idle(now);
        health.asking(now);
        let entry = driver.entry.as_ref().filter(|_| idle);
        let slot = entry.and_then(|entry| entry.slot.look(now + POLL).ok());
        let question = Question::Status(driver.key.uid, registered.id.clone());
        driver.doing = Doing::Ask(slot);
        driver.token = self.number();
        if let Some(origin) = self.origin(pod, driver, driver.token) {
            self.ask_server(pod, origin, question);
        }
    }

    fn health_word(&mut self, driver: &mut Driver, slot: bool, observed: Result<Observed, ServerError>) {
        let (now, wall) = (self.clock.instant(self.now), self.clock.wall(self.now));
        let in_flight = observed.as_ref().map_or(1, |observed| observed.in_flight);
        let Some((registered, health)) = &mut driver.registration else {
            return;
        };
        match health.judge(observed, wall, now) {
            Verdict::Ready => {
                let expired = health.has_expired(now);
                let registered = Arc::clone(registered);
                if driver.local.held.is_some_and(|held| held.step == Step::Silent) {
                    if let Some(entry) = &driver.entry {
                        entry.open(registered);
                    }
                    driver.set_step(Step::Registered);
                }
                if let Some(entry) = &driver.entry
                    && slot
                    && expired
                    && in_flight == 0
                {
                    entry.close(Gate::Terminating);
                    driver.local.expired = Some(Expired::Idle);
                }
            }
            Verdict::Doubtful => {}
            Verdict::Silent => {
                if let Some(entry) = &driver.entry {
                    entry.close(Gate::Recovering);
                }
                driver.set_step(Step::Silent);
            }
            Verdict::Lost(fault) => driver.fail(fault),
        }
    }

    /// One round of giving everything back.
    pub(crate) fn clean_up(&mut self, pod: u32, driver: &mut Driver, patient: bool) {
        let now = self.now;
        let cleaning = *driver.cleaning.get_or_insert(Cleaning {
            began: now,
            asked: None,
        });
        driver.close(patient);
        let patience = match driver.local.expired {
            _ if patient => PATIENCE,
            Some(Expired::Lifetime) => LAST_ANSWER,
            _ => 0,
        };
        let until = cleaning.began + patience;
        if driver.entry.as_ref().is_some_and(|it| !it.slot.is_free()) && now < until {
            driver.token = self.number();
            driver.doing = Doing::Slot(patient, until);
            return self.wake_driver(pod, driver, until);
        }
        let run = driver.key.uid;
        let Some(record) = self.pods.get(&pod).and_then(|it| it.journal.get(&run)).cloned() else {
            return self.cleaned(pod, driver, patient);
        };
        driver.token = self.number();
        driver.doing = Doing::Unregister(patient);
        let Some(origin) = self.origin(pod, driver, driver.token) else {
            return;
        };
        let question = match record.registration_id() {
            Some(id) => Question::Unregister(run, id, patient && cleaning.asked.is_none()),
            // Its answer was lost: it is found again by asking again.
            None => Question::Register(Box::new(record), run),
        };
        self.ask_server(pod, origin, question);
    }

    /// `false`: the process stops without having cleaned up.
    fn clean_up_word(&mut self, pod: u32, driver: &mut Driver, patient: bool, word: Word) -> bool {
        let now = self.now;
        let failed = match word {
            Word::Unregistered(Ok(())) => {
                self.cleaned(pod, driver, patient);
                return true;
            }
            Word::Registered(Ok((id, _))) => {
                driver.token = self.number();
                driver.doing = Doing::Unregister(patient);
                let Some(origin) = self.origin(pod, driver, driver.token) else {
                    return true;
                };
                self.ask_server(pod, origin, Question::Unregister(driver.key.uid, id, patient));
                return true;
            }
            Word::Registered(Err(ServerError::Answered(failure))) => matches!(
                failure.reason,
                Reason::ServerUnavailable | Reason::DeadlineExceeded | Reason::Busy
            ),
            Word::Registered(Err(_)) | Word::Unregistered(Err(_)) | Word::Status(_) => true,
        };
        if !failed {
            self.cleaned(pod, driver, patient);
            return true;
        }
        let began = driver.cleaning.map_or(now, |it| it.began);
        let asked = driver.cleaning.and_then(|it| it.asked).unwrap_or(now);
        driver.cleaning = Some(Cleaning {
            began,
            asked: Some(asked),
        });
        if driver.local.draining && now >= asked + GIVE_UP_AFTER {
            return false;
        }
        self.pause(pod, driver, false);
        true
    }

    /// Nothing is held any more.
    fn cleaned(&mut self, pod: u32, driver: &mut Driver, patient: bool) {
        let run = driver.key.uid;
        if let Some(it) = self.pods.get_mut(&pod) {
            it.journal.remove(&run);
            if let Some(daemon) = &mut it.daemon {
                if !patient {
                    daemon.held.remove(run);
                }
                daemon.admission.release(run);
            }
        }
        driver.reset_backoff();
        driver.local.held = None;
        driver.entry = None;
        driver.registration = None;
        driver.cleaning = None;
        driver.doing = Doing::Nothing;
    }
}

impl Driver {
    /// No call begins any more.
    fn close(&self, patient: bool) {
        let ending = self.local.expired.is_some()
            || self
                .run
                .as_ref()
                .is_none_or(|run| run.is_deleting() || run.cancel_requested());
        let gate = match (patient, ending) {
            (true, _) => Gate::Draining,
            (false, false) if self.local.fault.is_some() => Gate::Recovering,
            (false, _) => Gate::Terminating,
        };
        if let Some(entry) = &self.entry {
            entry.close(gate);
        }
    }
}

fn failed(message: &str) -> Fault {
    Fault {
        reason: "RegistrationFailed",
        message: message.to_owned(),
    }
}
