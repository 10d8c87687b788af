//! The Runtime Server of a Pod: the product's registry, and workers that take their time.

use std::collections::BTreeMap;

use kruntimes_api::keys::{Attempt, RunUid};
use kruntimes_proto::{
    executor::FunctionRegistrationState,
    failure::{Failure, Reason},
    ids::RegistrationId,
};
use kruntimes_runtime_server::registry::{Registered, Registry, State};
use kruntimes_runtimed::{
    journal::Record,
    runtime_server::{Observed, ServerError, says_gone},
};

use crate::{
    clock::{MS, SECOND, Time},
    events::Event,
    sim::{Origin, Sim},
};

/// One process of the server.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) life: u64,
    pub(crate) alive: bool,
    pub(crate) registry: Registry,
    /// What each registration was made for.
    pub(crate) made: BTreeMap<String, (RunUid, Attempt)>,
    /// Running calls by Run; the number is the owner's, or gone with it.
    pub(crate) running: BTreeMap<String, Running>,
    /// Unregistrations that wait for a call to end.
    draining: BTreeMap<String, (Origin, RegistrationId)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Running {
    pub(crate) execution: u64,
    pub(crate) id: RegistrationId,
}

/// What runtimed asks of the server in its Pod.
#[derive(Debug)]
pub(crate) enum Question {
    Register(Box<Record>, RunUid),
    Status(RunUid, RegistrationId),
    Unregister(RunUid, RegistrationId, bool),
}

#[derive(Debug)]
pub(crate) enum Word {
    Registered(Result<(RegistrationId, FunctionRegistrationState), ServerError>),
    Status(Result<Observed, ServerError>),
    Unregistered(Result<(), ServerError>),
}

// === impl Server ===

impl Server {
    pub(crate) fn new(life: u64) -> Self {
        Self {
            life,
            alive: true,
            registry: Registry::default(),
            made: BTreeMap::new(),
            running: BTreeMap::new(),
            draining: BTreeMap::new(),
        }
    }
}

// === impl Sim ===

impl Sim {
    /// Asks the server of a Pod; the answer comes in a moment, or what says that none does.
    pub(crate) fn ask_server(&mut self, pod: u32, origin: Origin, question: Question) {
        let pause = self.rng.range(MS / 10, 3 * MS);
        let at = self.now + pause;
        let alive = self.pods.get(&pod).is_some_and(|it| it.server.alive);
        let word = if alive {
            match self.server_answer(pod, origin, question) {
                Some(word) => word,
                None => return,
            }
        } else {
            let silent = || ServerError::Silent("connection refused".to_owned());
            match question {
                Question::Register(..) => Word::Registered(Err(silent())),
                Question::Status(..) => Word::Status(Err(silent())),
                Question::Unregister(..) => Word::Unregistered(Err(silent())),
            }
        };
        let word = Box::new(word);
        self.at(at, Event::ServerWord { origin, word });
    }

    /// `None`: later.
    fn server_answer(&mut self, pod: u32, origin: Origin, question: Question) -> Option<Word> {
        match question {
            Question::Register(record, run) => Some(Word::Registered(self.register(pod, &record, run))),
            Question::Status(run, id) => {
                let server = &self.pods.get(&pod)?.server;
                let status = server.registry.status(&run.to_string(), &id);
                Some(Word::Status(status.map_err(ServerError::Answered).map(|it| {
                    Observed {
                        state: state(it.state),
                        in_flight: it.in_flight,
                        last_activity_unix_nano: it.last_activity_unix_nano,
                        fatal_error: it.fatal_error,
                    }
                })))
            }
            Question::Unregister(run, id, drain) => self.unregister(pod, origin, run, &id, drain),
        }
    }

    fn register(
        &mut self,
        pod: u32,
        record: &Record,
        run: RunUid,
    ) -> Result<(RegistrationId, FunctionRegistrationState), ServerError> {
        let number = self.number();
        let fresh = RegistrationId::parse(format!("reg-{number}").as_bytes())
            .map_err(|error| ServerError::Silent(error.to_string()))?;
        let message = record.to_message(run);
        let server = match self.pods.get_mut(&pod) {
            Some(it) => &mut it.server,
            None => return Err(ServerError::Silent("gone".to_owned())),
        };
        let attempt = message.registration_attempt;
        let registered = server
            .registry
            .register(&message.run_uid, attempt, &message.registration_digest, &fresh)
            .map_err(ServerError::Answered)?;
        match registered {
            Registered::Known(id) => {
                let status = server.registry.status(&message.run_uid, &id);
                let status = status.map_err(ServerError::Answered)?;
                Ok((id, state(status.state)))
            }
            Registered::New { .. } => {
                let attempt = Attempt::new(attempt).unwrap_or(Attempt::FIRST);
                server.made.insert(fresh.as_str().to_owned(), (run, attempt));
                let life = server.life;
                // The worker of a generation that is replaced ends with its call.
                self.end_execution(pod, &message.run_uid, Reason::Cancelled);
                let loads = !self
                    .rng
                    .chance(if self.quiet { 0 } else { self.profile.bad_workers });
                let at = self.now + self.rng.range(10 * MS, 400 * MS);
                self.at(
                    at,
                    Event::Worker {
                        pod,
                        life,
                        run: message.run_uid,
                        id: fresh.clone(),
                        loads,
                    },
                );
                Ok((fresh, FunctionRegistrationState::Registering))
            }
        }
    }

    /// The first worker of a registration has loaded the handler, or cannot.
    pub(crate) fn worker(&mut self, pod: u32, life: u64, run: &str, id: &RegistrationId, loads: bool) {
        let moment = self.clock.moment(self.now);
        let Some(server) = self.server(pod, life) else {
            return;
        };
        if loads {
            server.registry.ready(run, id, moment);
        } else {
            server.registry.failed(run, id, "the handler cannot be loaded");
        }
    }

    fn unregister(
        &mut self,
        pod: u32,
        origin: Origin,
        run: RunUid,
        id: &RegistrationId,
        drain: bool,
    ) -> Option<Word> {
        let text = run.to_string();
        let server = &mut self.pods.get_mut(&pod)?.server;
        match server.registry.drain(&text, id) {
            Ok(false) => return Some(Word::Unregistered(Ok(()))),
            Ok(true) => {}
            Err(failure) if says_gone(failure.reason) => return Some(Word::Unregistered(Ok(()))),
            Err(failure) => return Some(Word::Unregistered(Err(ServerError::Answered(failure)))),
        }
        let busy = server.running.get(&text).is_some_and(|it| it.id == *id);
        if busy && drain {
            server.draining.insert(text, (origin, id.clone()));
            return None;
        }
        self.end_execution(pod, &text, Reason::Cancelled);
        let server = &mut self.pods.get_mut(&pod)?.server;
        server.registry.remove(&text, id);
        Some(Word::Unregistered(Ok(())))
    }

    /// A call has ended in the server; whoever waits for that to unregister goes on.
    pub(crate) fn execution_ended(&mut self, pod: u32, run: &str) {
        let Some(it) = self.pods.get_mut(&pod) else { return };
        if let Some((origin, id)) = it.server.draining.remove(run) {
            it.server.registry.remove(run, &id);
            let at = self.now + MS;
            let word = Box::new(Word::Unregistered(Ok(())));
            self.at(at, Event::ServerWord { origin, word });
        }
    }

    fn end_execution(&mut self, pod: u32, run: &str, reason: Reason) {
        let Some(it) = self.pods.get_mut(&pod) else { return };
        if let Some(running) = it.server.running.get(run).cloned() {
            let failure = Failure::new(reason, "the registration ends");
            self.execution_over(pod, run, running.execution, Err(failure));
        }
    }

    pub(crate) fn server(&mut self, pod: u32, life: u64) -> Option<&mut Server> {
        let server = &mut self.pods.get_mut(&pod)?.server;
        (server.alive && server.life == life).then_some(server)
    }

    /// The process dies with all its workers, and is started again.
    pub(crate) fn crash_server(&mut self, pod: u32) {
        let running: Vec<(String, u64)> = match self.pods.get_mut(&pod) {
            Some(it) => {
                it.server.alive = false;
                let running = it.server.running.iter();
                running.map(|(run, it)| (run.clone(), it.execution)).collect()
            }
            None => return,
        };
        for (run, execution) in running {
            let failure = Failure::new(Reason::OutcomeUnknown, "the Runtime Server is gone");
            self.execution_over(pod, &run, execution, Err(failure));
        }
        let waiting = match self.pods.get_mut(&pod) {
            Some(it) => std::mem::take(&mut it.server.draining),
            None => return,
        };
        for (origin, _) in waiting.into_values() {
            let word = Word::Unregistered(Err(ServerError::Silent("gone".to_owned())));
            let word = Box::new(word);
            self.at(self.now + MS, Event::ServerWord { origin, word });
        }
        let pause: Time = self.rng.range(50 * MS, 5 * SECOND);
        self.at(self.now + pause, Event::ServerStart { pod });
    }

    pub(crate) fn start_server(&mut self, pod: u32) {
        let life = self.number();
        if let Some(it) = self.pods.get_mut(&pod).filter(|it| it.runs && !it.server.alive) {
            it.server = Server::new(life);
        }
    }
}

fn state(state: State) -> FunctionRegistrationState {
    match state {
        State::Registering => FunctionRegistrationState::Registering,
        State::Ready => FunctionRegistrationState::Ready,
        State::Draining => FunctionRegistrationState::Draining,
        State::Failed => FunctionRegistrationState::Failed,
    }
}
