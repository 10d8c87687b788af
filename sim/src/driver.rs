//! The task of one Run in a runtimed process: look, decide, do one step, and again, as in the product's
//! `lifecycle::drive`. Facts, decision, statuses, health and timers are the product's own; here a step is a
//! request that leaves and an answer that comes.

use std::{path::Path, sync::Arc, time::Duration};

use kruntimes_api::{
    Run, RunStatus,
    keys::{Attempt, RunKey, RunUid},
    run::{Endpoint, EndpointProtocol},
    status,
};
use kruntimes_runtimed::{
    admission,
    held::{Entry, Gate, Registered},
    journal::Record,
    lifecycle::{
        decide::{Action, Expired, Fault, Holding, Local, Step, decide},
        drivers::Seen,
        facts::Facts,
        health::Health,
        statuses, timers,
    },
    registration,
    slots::Taken,
};
use tokio::time::Instant;

use crate::{
    Variant,
    api::{NAMESPACE, RUNTIME, Reply, Request},
    clock::{Time, micros},
    events::Event,
    sim::{Origin, Sim},
};

/// After a failure, at first and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));
/// How long a request to Kubernetes may take.
const REQUEST: Duration = Duration::from_secs(10);

/// What is known and held of one Run.
pub(crate) struct Driver {
    pub(crate) key: RunKey,
    pub(crate) mail: Option<Seen>,
    pub(crate) run: Option<Arc<Run>>,
    version: Option<u64>,
    pub(crate) local: Local,
    pub(crate) entry: Option<Arc<Entry>>,
    pub(crate) registration: Option<(Arc<Registered>, Health)>,
    pub(crate) cleaning: Option<Cleaning>,
    ends: Option<Instant>,
    backoff: Duration,
    pub(crate) doing: Doing,
    /// Of what is being done; what else comes back is of something given up.
    pub(crate) token: u64,
    /// A live read beside what is being done.
    beside: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Cleaning {
    pub(crate) began: Time,
    pub(crate) asked: Option<Time>,
}

pub(crate) enum Doing {
    Nothing,
    Wait,
    /// Then the object is read, or not.
    Pause(bool),
    Read,
    Write,
    Register(Box<Registering>),
    /// The clean-up waits for the slot until then.
    Slot(bool, Time),
    Unregister(bool),
    Ask(Option<Taken>),
}

pub(crate) struct Registering {
    pub(crate) record: Record,
    pub(crate) id: Option<kruntimes_proto::ids::RegistrationId>,
    pub(crate) pause: Duration,
    pub(crate) deadline: Time,
}

// === impl Driver ===

impl Driver {
    pub(crate) fn new(key: RunKey, seen: Seen, held: Option<Holding>) -> Self {
        Self {
            key,
            mail: Some(seen),
            run: None,
            version: None,
            local: Local {
                held,
                ..Local::default()
            },
            entry: None,
            registration: None,
            cleaning: None,
            ends: None,
            backoff: BACKOFF.0,
            doing: Doing::Nothing,
            token: 0,
            beside: None,
        }
    }

    /// Whether it has the slot, to look whether the function is idle.
    pub(crate) fn looks(&self) -> bool {
        matches!(self.doing, Doing::Ask(Some(_)))
    }

    fn take_in(&mut self, run: Arc<Run>) {
        let mail = version(&run);
        let old = matches!(
            (mail, self.version),
            (Some(mail), Some(known)) if mail < known || (mail == known && self.run.is_none())
        );
        if !old {
            self.version = mail.or(self.version);
            self.run = Some(run);
        }
    }

    fn take_live(&mut self, live: Option<Arc<Run>>) {
        let live = live.filter(|run| run.run_uid() == Some(self.key.uid));
        self.version = live.as_deref().and_then(version).or(self.version);
        self.run = live;
    }

    pub(crate) fn set_step(&mut self, step: Step) {
        if let Some(attempt) = self.run.as_ref().and_then(|run| run.attempt()) {
            self.local.held = Some(Holding { attempt, step });
        }
    }

    pub(crate) fn fail(&mut self, fault: Fault) {
        if let Some(entry) = &self.entry {
            entry.close(Gate::Recovering);
        }
        if let Some(attempt) = self.run.as_ref().and_then(|run| run.attempt()) {
            self.local.fault = Some((attempt, fault));
        }
    }

    pub(crate) fn ends(&self) -> Option<Instant> {
        self.ends
    }

    pub(crate) fn reset_backoff(&mut self) {
        self.backoff = BACKOFF.0;
    }
}

// === impl Sim ===

impl Sim {
    /// Something may have changed for the Run.
    pub(crate) fn nudge(&mut self, pod: u32, run: RunUid) {
        let Some(mut driver) = self.take_driver(pod, run) else {
            return;
        };
        match &driver.doing {
            Doing::Wait => driver.doing = Doing::Nothing,
            Doing::Register(_) => self.reconsider(pod, &mut driver, &Action::Register),
            Doing::Ask(_) => self.reconsider(pod, &mut driver, &Action::Wait),
            Doing::Slot(patient, until) => {
                let (patient, until) = (*patient, *until);
                let free = driver.entry.as_ref().is_none_or(|it| it.slot.is_free());
                if free || until <= self.now {
                    driver.doing = Doing::Nothing;
                } else {
                    self.reconsider(pod, &mut driver, &Action::CleanUp { patient });
                }
            }
            Doing::Nothing | Doing::Pause(_) | Doing::Read | Doing::Write | Doing::Unregister(_) => {}
        }
        self.go_driver(pod, driver);
    }

    pub(crate) fn nudge_all(&mut self, pod: u32) {
        let all: Vec<RunUid> = match self.daemon(pod) {
            Some(daemon) => daemon.drivers.keys().copied().collect(),
            None => return,
        };
        for run in all {
            self.nudge(pod, run);
        }
    }

    fn take_driver(&mut self, pod: u32, run: RunUid) -> Option<Driver> {
        self.daemon(pod)?.drivers.remove(&run)
    }

    /// Takes in mail without stopping what is being done, and gives that up if it is not the next step any
    /// more.
    fn reconsider(&mut self, pod: u32, driver: &mut Driver, step: &Action) {
        match driver.mail.take() {
            Some(Seen::Object(run)) => driver.take_in(run),
            Some(Seen::Doubt) => {
                if self.variant == Some(Variant::StaleListTruth) {
                    driver.run = None;
                } else {
                    let token = self.number();
                    driver.beside = Some(token);
                    self.read(pod, driver, token);
                    return;
                }
            }
            None => {}
        }
        if self.decision(pod, driver) != *step {
            driver.token = self.number();
            driver.doing = Doing::Nothing;
        }
    }

    /// Goes on until something must be waited for; puts the driver back, unless nothing is left of it.
    pub(crate) fn go_driver(&mut self, pod: u32, mut driver: Driver) {
        let truth = self.variant == Some(Variant::StaleListTruth);
        let Some(me) = self.daemon(pod).map(|it| it.me.clone()) else {
            return;
        };
        while matches!(driver.doing, Doing::Nothing) {
            match driver.mail.take() {
                // Broken on purpose: what a list shows is so, and what it does not show is gone.
                Some(Seen::Doubt) if truth => driver.run = None,
                Some(Seen::Object(run)) if truth => driver.take_in(run),
                Some(seen) if seen.is_doubtful(&me, driver.version) => {
                    driver.token = self.number();
                    driver.doing = Doing::Read;
                    self.read(pod, &driver, driver.token);
                    break;
                }
                Some(Seen::Object(run)) => driver.take_in(run),
                Some(Seen::Doubt) => {}
                None => {}
            }
            let action = self.decision(pod, &mut driver);
            if action != Action::Wait {
                self.trace(|| format!("pod {pod} {}: {}", driver.key.name, brief(&action)));
            }
            match action {
                Action::Wait => self.wait(pod, &mut driver),
                Action::Forget => {
                    if let Some(daemon) = self.daemon(pod) {
                        daemon.held.remove(driver.key.uid);
                    }
                    return self.driver_ended(pod);
                }
                Action::CleanUp { patient } => self.clean_up(pod, &mut driver, patient),
                Action::Register => self.begin_register(pod, &mut driver),
                step => self.step(pod, &mut driver, &step),
            }
        }
        if let Some(daemon) = self.daemon(pod) {
            daemon.drivers.insert(driver.key.uid, driver);
        }
    }

    /// Nothing of a Run is left here; a stopping process ends with the last one.
    pub(crate) fn driver_ended(&mut self, pod: u32) {
        let over = self
            .daemon(pod)
            .is_some_and(|it| it.draining && it.drivers.is_empty());
        if over {
            self.at(self.now, Event::Drained { pod });
        }
    }

    pub(crate) fn decision(&mut self, pod: u32, driver: &mut Driver) -> Action {
        let (instant, wall) = (self.clock.instant(self.now), self.clock.wall(self.now));
        let Some(daemon) = self.daemon(pod) else {
            return Action::Wait;
        };
        driver.local.draining = daemon.draining;
        driver.local.isolated = daemon.contact.is_lost(instant);
        let me = daemon.me.clone();
        let Some(run) = &driver.run else {
            return decide(&Facts::gone(), &driver.local);
        };
        driver.local.gateway_known = true;
        if driver.ends.is_none() {
            driver.ends = timers::lifetime(run, wall, instant);
            if let Some(ends) = driver.ends {
                let at = self.clock.time(ends).max(self.now);
                self.at(
                    at,
                    Event::Nudge {
                        pod,
                        run: driver.key.uid,
                    },
                );
            }
        }
        if driver.ends.is_some_and(|ends| ends <= instant) {
            driver.local.expired.get_or_insert(Expired::Lifetime);
        }
        decide(&Facts::of(run, &me, Some(&endpoint(&driver.key))), &driver.local)
    }

    fn step(&mut self, pod: u32, driver: &mut Driver, action: &Action) {
        let Some(run) = driver.run.clone() else { return };
        let now = self.clock.wall(self.now);
        let Some(daemon) = self.daemon(pod) else { return };
        let owner = daemon.me.owner.clone();
        let wanted = match action {
            Action::Admit => {
                let requests = admission::requests(&run).unwrap_or_default();
                match daemon.admission.admit(driver.key.uid, requests) {
                    Ok(()) => driver.set_step(Step::Admitted),
                    Err(refused) => driver.fail(Fault {
                        reason: "CapacityRefused",
                        message: refused.to_string(),
                    }),
                }
                return;
            }
            Action::Prepare => {
                self.enter(pod, driver);
                let attempt = run.attempt().unwrap_or(Attempt::FIRST);
                let record = registration::record(&run, &driver.key, attempt, Path::new("/workspace/x"));
                if let Some((it, record)) = self.pods.get_mut(&pod).zip(record) {
                    it.journal.insert(driver.key.uid, record);
                    driver.set_step(Step::Prepared);
                }
                return;
            }
            Action::AddFinalizer | Action::RemoveFinalizer => {
                let present = *action == Action::AddFinalizer;
                return self.write(pod, driver, Request::WriteFinalizer { run, present });
            }
            Action::Claim => statuses::claimed(&run, now),
            Action::Announce => statuses::ready(&run, &owner, Some(&endpoint(&driver.key)), now),
            Action::Withdraw => statuses::recovering(&run, now),
            Action::Finish(end) => statuses::ended(&run, *end, now),
            Action::Release(fault) => statuses::released(&run, fault, now),
            Action::Wait | Action::Forget | Action::Register | Action::CleanUp { .. } => return,
        };
        self.write_wanted(pod, driver, run, wanted);
    }

    fn write_wanted(&mut self, pod: u32, driver: &mut Driver, run: Arc<Run>, wanted: RunStatus) {
        if status::patch(&run, &wanted).is_none() {
            // Facts said otherwise; reading again settles it.
            return self.pause(pod, driver, true);
        }
        let status = Box::new(wanted);
        self.write(pod, driver, Request::WriteStatus { run, status });
    }

    fn write(&mut self, pod: u32, driver: &mut Driver, request: Request) {
        driver.token = self.number();
        driver.doing = Doing::Write;
        if let Some(origin) = self.origin(pod, driver, driver.token) {
            self.ask(origin, request, REQUEST);
        }
    }

    fn read(&mut self, pod: u32, driver: &Driver, token: u64) {
        if let Some(origin) = self.origin(pod, driver, token) {
            self.ask(origin, Request::GetRun(driver.key.name.clone()), REQUEST);
        }
    }

    pub(crate) fn origin(&mut self, pod: u32, driver: &Driver, token: u64) -> Option<Origin> {
        let life = self.daemon(pod)?.life;
        let run = driver.key.uid;
        Some(Origin::Driver {
            pod,
            life,
            run,
            token,
        })
    }

    /// Waits for news, and for the time to ask the server.
    fn wait(&mut self, pod: u32, driver: &mut Driver) {
        driver.doing = Doing::Wait;
        driver.token = self.number();
        if let Some((_, health)) = &driver.registration {
            let at = self.clock.time(health.next());
            self.wake_driver(pod, driver, at);
        }
    }

    pub(crate) fn wake_driver(&mut self, pod: u32, driver: &Driver, at: Time) {
        let Some(origin) = self.origin(pod, driver, driver.token) else {
            return;
        };
        self.at(at.max(self.now), Event::Wake { origin });
    }

    pub(crate) fn pause(&mut self, pod: u32, driver: &mut Driver, read: bool) {
        driver.token = self.number();
        driver.doing = Doing::Pause(read);
        let at = self.now + micros(driver.backoff);
        driver.backoff = (driver.backoff * 2).min(BACKOFF.1);
        self.wake_driver(pod, driver, at);
    }

    /// The time of a driver has come.
    pub(crate) fn driver_wakes(&mut self, pod: u32, run: RunUid, token: u64) {
        let Some(mut driver) = self.take_driver(pod, run) else {
            return;
        };
        if driver.token == token {
            match &driver.doing {
                Doing::Wait => self.ask_health(pod, &mut driver),
                Doing::Pause(false) => driver.doing = Doing::Nothing,
                Doing::Pause(true) => {
                    driver.token = self.number();
                    driver.doing = Doing::Read;
                    self.read(pod, &driver, driver.token);
                }
                Doing::Register(_) => self.look_at_registration(pod, &mut driver),
                Doing::Slot(..) => driver.doing = Doing::Nothing,
                _ => {}
            }
        }
        self.go_driver(pod, driver);
    }

    /// The API has answered a driver.
    pub(crate) fn driver_reply(&mut self, pod: u32, run: RunUid, token: u64, reply: Reply) {
        let Some(mut driver) = self.take_driver(pod, run) else {
            return;
        };
        if driver.beside == Some(token) {
            driver.beside = None;
            match reply {
                Reply::Run(live) => driver.take_live(live),
                _ => {
                    // Still in doubt.
                    driver.mail.get_or_insert(Seen::Doubt);
                    self.at(self.now + micros(BACKOFF.0), Event::Nudge { pod, run });
                    return self.go_driver(pod, driver);
                }
            }
            let step = match &driver.doing {
                Doing::Register(_) => Some(Action::Register),
                Doing::Slot(patient, _) => Some(Action::CleanUp { patient: *patient }),
                Doing::Ask(_) => Some(Action::Wait),
                _ => None,
            };
            if let Some(step) = step {
                self.reconsider(pod, &mut driver, &step);
            }
        } else if driver.token == token {
            self.api_answered(pod, &mut driver, reply);
        }
        self.go_driver(pod, driver);
    }

    fn api_answered(&mut self, pod: u32, driver: &mut Driver, reply: Reply) {
        match (&driver.doing, reply) {
            (Doing::Read, Reply::Run(live)) => {
                driver.take_live(live);
                driver.doing = Doing::Nothing;
            }
            (Doing::Read, _) => self.pause(pod, driver, true),
            (Doing::Write, Reply::Done(Some(run))) => {
                driver.reset_backoff();
                let gone = run.is_deleting() && run.metadata.finalizers.as_ref().is_none_or(Vec::is_empty);
                driver.version = version(&run).max(driver.version);
                driver.run = (!gone).then_some(run);
                driver.doing = Doing::Nothing;
            }
            (Doing::Write, Reply::Conflict) => self.pause(pod, driver, true),
            (Doing::Write, _) => self.pause(pod, driver, false),
            _ => {}
        }
    }
}

/// What callers are told of where to call; nothing here depends on it.
fn endpoint(key: &RunKey) -> Endpoint {
    Endpoint {
        protocol: EndpointProtocol::HTTPS,
        url: format!(
            "https://gateway/v1/namespaces/{NAMESPACE}/runtimes/{RUNTIME}/functions/{}:invoke",
            key.uid
        ),
        ca_bundle: None,
    }
}

fn version(run: &Run) -> Option<u64> {
    run.metadata.resource_version.as_deref()?.parse().ok()
}

fn brief(action: &Action) -> String {
    match action {
        Action::Release(fault) => format!("Release({})", fault.reason),
        other => format!("{other:?}"),
    }
}
