//! One runtimed process: its watch, its heartbeat and the calls that reach it. What it holds and whether a
//! call may begin is decided by the product (`fence`, `held`, `slots`, `admission`, `heartbeat::Contact`).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kruntimes_api::{
    Run,
    keys::{RunKey, RunUid},
    names::{self, MODE_FUNCTION},
    quantity::Amount,
    run::Owner,
};
use kruntimes_gateway::hop::{Answer, HopError};
use kruntimes_gateway::reply::Output;
use kruntimes_peer::PeerKey;
use kruntimes_proto::failure::{Failure, Reason};
use kruntimes_runtimed::{
    admission::{self, Admission, Vector},
    fence::{self, Expected},
    heartbeat::{Contact, RENEW},
    held::{Entry, Held},
    lifecycle::{
        decide::{Holding, Step},
        drivers::Seen,
        facts::Me,
    },
    request,
    runtime_server::says_gone,
    slots::Taken,
};
use kruntimes_scheduler::facts::{BeatFacts, ObjectKey};

use crate::{
    Variant,
    api::{Kind, NAMESPACE, Object, RUNTIME, Reply, Request},
    clock::{MS, SECOND, Time, micros},
    driver::Driver,
    events::Event,
    gateway::Letter,
    pods::CAPACITY,
    server::Running,
    sim::{Actor, Origin, Sim},
    watch::News,
};

/// After a renewal that failed.
const RENEW_AGAIN: Time = 2 * SECOND;
/// How long one renewal may take.
const RENEW_PATIENCE: Duration = Duration::from_secs(5);

/// One process.
pub(crate) struct Daemon {
    pub(crate) life: u64,
    pub(crate) me: Me,
    pub(crate) key: PeerKey,
    pub(crate) held: Held,
    pub(crate) admission: Admission,
    pub(crate) contact: Contact,
    pub(crate) drivers: BTreeMap<RunUid, Driver>,
    pub(crate) listed: bool,
    pub(crate) draining: bool,
    pub(crate) calls: BTreeMap<u64, OwnerCall>,
}

/// A call that runs.
#[derive(Debug)]
pub(crate) struct OwnerCall {
    /// Gateway, its life, and the letter.
    back: (usize, u64, u64),
    run: RunUid,
    pub(crate) entry: Arc<Entry>,
    taken: Option<Taken>,
}

// === impl Sim ===

impl Sim {
    pub(crate) fn start_daemon(&mut self, pod: u32) {
        let life = self.number();
        let Some(it) = self
            .pods
            .get_mut(&pod)
            .filter(|it| it.runs && it.daemon.is_none())
        else {
            return;
        };
        let key = PeerKey::of_spki(format!("{pod}/{life}").as_bytes());
        let me = Me {
            namespace: NAMESPACE.to_owned(),
            pod: it.name.clone(),
            pod_uid: it.uid.clone(),
            runtime: RUNTIME.to_owned(),
            owner: Owner {
                address: it.address.to_string(),
                peer_key: key.to_string(),
            },
        };
        let capacity = Vector::from([(names::RESOURCE_RUNS.to_owned(), Amount::whole(CAPACITY))]);
        let name = it.name.clone();
        it.daemon = Some(Daemon {
            life,
            me,
            key,
            held: Held::new(),
            admission: Admission::new(capacity),
            contact: Contact::new(),
            drivers: BTreeMap::new(),
            listed: false,
            draining: false,
            calls: BTreeMap::new(),
        });
        self.begin_watch(Actor::Runtimed(pod), life, Kind::Run, Some(name));
        let at = self.now + self.rng.range(MS, 50 * MS);
        self.at(at, Event::Beat { pod, life });
    }

    /// It dies without a word. Its calls go on in the server.
    pub(crate) fn kill_daemon(&mut self, pod: u32) {
        let Some(daemon) = self.pods.get_mut(&pod).and_then(|it| it.daemon.take()) else {
            return;
        };
        self.frozen.remove(&Actor::Runtimed(pod));
        self.end_watches(Actor::Runtimed(pod));
        for call in daemon.calls.into_values() {
            let at = self.now + self.rng.range(MS, 20 * MS);
            let error = HopError::Unknown("the connection to the owner failed".to_owned());
            self.answer_from(pod, call.back, Err(error), at);
        }
        self.probe_soon(pod);
    }

    pub(crate) fn daemon(&mut self, pod: u32) -> Option<&mut Daemon> {
        self.pods.get_mut(&pod)?.daemon.as_mut()
    }

    // --- the heartbeat ---

    pub(crate) fn beat(&mut self, pod: u32, life: u64) {
        let renewed = MicroTime(self.clock.wall(self.now));
        let sent = self.now;
        let Some(daemon) = self.daemon(pod).filter(|it| it.life == life) else {
            return;
        };
        let beat = BeatFacts {
            key: ObjectKey::new(NAMESPACE, names::heartbeat_lease(&daemon.me.pod)),
            runtime: RUNTIME.to_owned(),
            holder: daemon.me.pod_uid.as_str().to_owned(),
            renewed: Some(renewed),
            modes: BTreeSet::from([MODE_FUNCTION.to_owned()]),
        };
        self.ask(
            Origin::Beat { pod, life, sent },
            Request::Renew(beat),
            RENEW_PATIENCE,
        );
    }

    pub(crate) fn beat_answer(&mut self, pod: u32, life: u64, sent: Time, reply: &Reply) {
        let instant = self.clock.instant(sent);
        let Some(daemon) = self.daemon(pod).filter(|it| it.life == life) else {
            return;
        };
        let done = matches!(reply, Reply::Done(_));
        if done {
            daemon.contact.heard(instant);
            self.probe_soon(pod);
            self.nudge_all(pod);
        }
        let pause = if done { micros(RENEW) } else { RENEW_AGAIN };
        self.at(self.now + pause, Event::Beat { pod, life });
    }

    // --- the watch ---

    pub(crate) fn runtimed_news(&mut self, pod: u32, news: News) {
        match news {
            News::Apply(Object::Run(run), _) => self.tell_driver(pod, run),
            News::Delete(Object::Run(run), _) => {
                if let Some(uid) = run.run_uid() {
                    self.doubt(pod, uid);
                }
            }
            News::Reset(all) => {
                let mut runs: Vec<Arc<Run>> = all
                    .into_iter()
                    .filter_map(|(object, _)| match object {
                        Object::Run(run) => Some(run),
                        _ => None,
                    })
                    .collect();
                self.runtimed_listed(pod, &mut runs);
            }
            _ => {}
        }
    }

    fn runtimed_listed(&mut self, pod: u32, runs: &mut Vec<Arc<Run>>) {
        let Some(it) = self.pods.get_mut(&pod) else { return };
        let Some(daemon) = &mut it.daemon else { return };
        let first = !std::mem::replace(&mut daemon.listed, true);
        let driven: Vec<RunUid> = daemon.drivers.keys().copied().collect();
        let journal: Vec<RunUid> = it.journal.keys().copied().collect();
        let listed: BTreeSet<RunUid> = runs.iter().filter_map(|run| run.run_uid()).collect();
        if first {
            // What is registered here already comes before what is new, as in the product's `watch`.
            for uid in journal.iter().filter(|uid| !listed.contains(uid)) {
                let record = self.pods.get(&pod).and_then(|it| it.journal.get(uid));
                if let Some(key) = record.map(|it| it.key(*uid)) {
                    self.tell(pod, key, Seen::Doubt);
                }
            }
            runs.sort_by_key(|run| run.run_uid().is_none_or(|uid| !journal.contains(&uid)));
        }
        for run in runs.drain(..) {
            self.tell_driver(pod, run);
        }
        for uid in driven.into_iter().filter(|uid| !listed.contains(uid)) {
            self.doubt(pod, uid);
        }
        if first {
            self.probe_soon(pod);
        }
    }

    fn tell_driver(&mut self, pod: u32, run: Arc<Run>) {
        if let Some(key) = run.key() {
            self.tell(pod, key, Seen::Object(run));
        }
    }

    fn doubt(&mut self, pod: u32, run: RunUid) {
        if let Some(driver) = self.daemon(pod).and_then(|it| it.drivers.get_mut(&run)) {
            driver.mail = Some(Seen::Doubt);
            self.nudge(pod, run);
        }
    }

    /// As the product's `Drivers::tell`.
    fn tell(&mut self, pod: u32, key: RunKey, seen: Seen) {
        let run = key.uid;
        let Some(it) = self.pods.get_mut(&pod) else { return };
        let Some(daemon) = &mut it.daemon else { return };
        if let Some(driver) = daemon.drivers.get_mut(&run) {
            driver.mail = Some(seen);
            return self.nudge(pod, run);
        }
        let record = it.journal.get(&run);
        if record.is_none() && matches!(seen, Seen::Doubt) {
            return;
        }
        if record.is_some() {
            let object = match &seen {
                Seen::Object(run) => Some(&**run),
                Seen::Doubt => None,
            };
            let one = || Vector::from([(names::RESOURCE_RUNS.to_owned(), Amount::whole(1))]);
            let requests = object.and_then(|run| admission::requests(run).ok());
            daemon.admission.restore(run, requests.unwrap_or_else(one));
        }
        let held = record.and_then(|it| it.attempt()).map(|attempt| Holding {
            attempt,
            step: Step::Prepared,
        });
        daemon.drivers.insert(run, Driver::new(key, seen, held));
        self.nudge(pod, run);
    }

    // --- calls ---

    /// A call arrives at the address of its route, wherever that leads by now.
    pub(crate) fn hop_arrive(&mut self, index: usize, life: u64, letter: Letter) {
        let back = (index, life, letter.number);
        let address = letter.route.owner.address;
        let found = self.pods.values().find(|it| it.runs && it.address == address);
        let (pod, node) = match found {
            Some(it) => (it.id, it.node),
            None => {
                let refused = HopError::NotSent("connection refused".to_owned());
                return self.answer(back, Err(refused), self.now + MS);
            }
        };
        if self.cut_hops.contains(&(index, node)) {
            let deadline = self.clock.time(letter.deadline);
            let at = (self.now + 2 * SECOND).min(deadline.max(self.now));
            let silent = HopError::NotSent("cannot connect in time".to_owned());
            return self.answer(back, Err(silent), at);
        }
        let key = self
            .pods
            .get(&pod)
            .and_then(|it| it.daemon.as_ref())
            .map(|it| it.key);
        match key {
            None => {
                let refused = HopError::NotSent("connection refused".to_owned());
                self.answer(back, Err(refused), self.now + MS);
            }
            Some(key) if key != letter.route.owner.key => {
                let stranger = HopError::NotSent("another key than the owner's".to_owned());
                self.answer(back, Err(stranger), self.now + MS);
            }
            Some(_) => {
                let result = self.begin_call(pod, back, &letter);
                if let Err(failure) = result {
                    let at = self.now + self.rng.range(MS / 5, 10 * MS);
                    self.answer_from(pod, back, Err(HopError::Answered(failure)), at);
                }
            }
        }
    }

    /// As the product's `Invoker`: fence, contact, gate, slot, Runtime Server.
    fn begin_call(&mut self, pod: u32, back: (usize, u64, u64), letter: &Letter) -> Result<(), Failure> {
        let (clock, now) = (self.clock, self.now);
        let instant = clock.instant(now);
        let execution = self.number();
        let epoch_ignored = self.variant == Some(Variant::EpochIgnored);
        let gone = || Failure::new(Reason::ServerUnavailable, "gone");
        let it = self.pods.get_mut(&pod).ok_or_else(gone)?;
        let daemon = it.daemon.as_mut().ok_or_else(gone)?;
        let mut expected = Expected {
            run: letter.run,
            attempt: letter.route.attempt,
            pod: letter.route.pod_uid.clone(),
        };
        let entry = daemon.held.get(expected.run);
        let attempt = entry.as_ref().map(|entry| entry.attempt);
        if epoch_ignored && let Some(attempt) = attempt {
            // Broken on purpose: whatever attempt is held is the right one.
            expected.attempt = attempt;
        }
        fence::check(&expected, &daemon.me.pod_uid, attempt)?;
        let entry = entry.ok_or_else(gone)?;
        if daemon.contact.is_lost(instant) {
            return Err(Failure::new(Reason::OwnerIsolated, ""));
        }
        entry.callable()?;
        let left = letter.deadline.saturating_duration_since(instant);
        let millis = i64::try_from(left.as_millis()).unwrap_or(i64::MAX).max(1);
        let until = instant + request::deadline(millis, entry.ends, instant)?;
        let (registered, taken) = entry.begin(letter.id.clone(), instant, until)?;
        let run = expected.run.to_string();
        let server = &mut it.server;
        let begun = if server.alive {
            let moment = clock.moment(now);
            server
                .registry
                .begin(&run, &registered.id, until.into_std(), moment)
        } else {
            Err(gone())
        };
        if let Err(failure) = begun {
            drop(taken);
            self.at(now, Event::Suspect { pod, run: letter.run });
            return Err(if says_gone(failure.reason) {
                Failure::new(
                    Reason::Recovering,
                    "the Runtime Server does not know the registration",
                )
            } else {
                failure
            });
        }
        let made = server.made.get(registered.id.as_str()).copied();
        let life = server.life;
        let id = registered.id.clone();
        server.running.insert(run.clone(), Running { execution, id });
        daemon.calls.insert(
            execution,
            OwnerCall {
                back,
                run: letter.run,
                entry,
                taken: Some(taken),
            },
        );
        self.executed(letter, made);
        let length = match self.rng.range(0, 100) {
            0..60 => self.rng.range(MS, 40 * MS),
            60..95 => self.rng.range(40 * MS, SECOND),
            _ => self.rng.range(SECOND, 12 * SECOND),
        };
        let limit = clock.time(until);
        let at = (now + length).min(limit);
        let in_time = now + length < limit;
        self.at(
            at,
            Event::Execution {
                pod,
                life,
                run,
                execution,
                in_time,
            },
        );
        Ok(())
    }

    /// A call ends in the server, one way or another.
    pub(crate) fn execution_over(
        &mut self,
        pod: u32,
        run: &str,
        execution: u64,
        result: Result<(), Failure>,
    ) {
        let moment = self.clock.moment(self.now);
        let Some(it) = self.pods.get_mut(&pod) else { return };
        let running = it.server.running.get(run);
        let Some(running) = running.filter(|it| it.execution == execution).cloned() else {
            return;
        };
        it.server.running.remove(run);
        it.server.registry.end(run, &running.id, moment);
        self.execution_ended(pod, run);
        let leaks = self.variant == Some(Variant::SlotNotFreed) && self.rng.chance(200);
        let Some(mut call) = self.daemon(pod).and_then(|it| it.calls.remove(&execution)) else {
            return;
        };
        if leaks {
            // Broken on purpose: the guard never drops.
            std::mem::forget(call.taken.take());
        }
        drop(call.taken.take());
        let uid = call.run;
        let suspect = result
            .as_ref()
            .is_err_and(|it| matches!(it.reason, Reason::ServerUnavailable | Reason::OutcomeUnknown));
        let event = if suspect {
            Event::Suspect { pod, run: uid }
        } else {
            Event::Nudge { pod, run: uid }
        };
        self.at(self.now, event);
        let answer = match result {
            Ok(()) => Ok(Answer {
                output: Output {
                    body: run.to_owned().into(),
                    content_type: "application/json".to_owned(),
                    outputs: Default::default(),
                },
                handler: None,
            }),
            Err(failure) => Err(HopError::Answered(failure)),
        };
        let at = self.now + self.rng.range(MS / 5, 10 * MS);
        self.answer_from(pod, call.back, answer, at);
    }

    /// Sends an answer from a Pod: it may be lost on the way, and then nobody knows.
    fn answer_from(&mut self, pod: u32, back: (usize, u64, u64), answer: Result<Answer, HopError>, at: Time) {
        let node = self.pods.get(&pod).map_or(usize::MAX, |it| it.node);
        if self.cut_hops.contains(&(back.0, node)) {
            // The gateway waits until its patience ends.
            return;
        }
        let reset = !self.quiet && self.rng.chance(self.profile.resets);
        if reset {
            self.injected("connection reset");
            let unknown = HopError::Unknown("the connection to the owner failed".to_owned());
            return self.answer(back, Err(unknown), at);
        }
        self.answer(back, answer, at);
    }
}
