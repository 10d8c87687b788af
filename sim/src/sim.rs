//! The world of one simulation: virtual time, the queue of what will happen, and who it happens to.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::LazyLock,
    time::Duration,
};

use kruntimes_api::keys::RunUid;
use kruntimes_runtimed::outputs::OutputsDir;

use crate::{
    Outcome, Variant,
    api::{Api, Reply, Request},
    clients::Clients,
    clock::{Clock, MS, SECOND, Time, micros},
    events::Event,
    faults::Profile,
    gateway::Gateway,
    pods::{NODES, Node, Pod},
    rng::Rng,
    scheduler::Scheduler,
    watch::{Behind, Watch},
};

/// One for all: an open directory that is removed already.
static PLACE: LazyLock<Option<OutputsDir>> = LazyLock::new(|| {
    let root = tempfile::tempdir().ok()?;
    OutputsDir::open(root.path(), ".").ok()
});

pub(crate) const SCHEDULERS: usize = 2;
pub(crate) const GATEWAYS: usize = 2;

/// A process that talks to the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Actor {
    Scheduler(usize),
    Gateway(usize),
    Runtimed(u32),
}

/// Who waits for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    Scheduler {
        index: usize,
        life: u64,
        token: u64,
    },
    Driver {
        pod: u32,
        life: u64,
        run: RunUid,
        token: u64,
    },
    Beat {
        pod: u32,
        life: u64,
        sent: Time,
    },
}

pub(crate) struct Sim {
    pub(crate) seed: u64,
    pub(crate) variant: Option<Variant>,
    pub(crate) profile: Profile,
    pub(crate) rng: Rng,
    pub(crate) clock: Clock,
    pub(crate) now: Time,
    queue: BTreeMap<(Time, u64), Event>,
    numbers: u64,
    pub(crate) steps: u64,
    /// No more faults.
    pub(crate) quiet: bool,
    pub(crate) api: Api,
    /// Changes that watches were told of.
    pub(crate) announced: usize,
    pub(crate) watches: BTreeMap<u64, Watch>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) pods: BTreeMap<u32, Pod>,
    pub(crate) schedulers: Vec<Scheduler>,
    pub(crate) gateways: Vec<Gateway>,
    /// Until when a process stands still.
    pub(crate) frozen: BTreeMap<Actor, Time>,
    /// Schedulers and gateways that do not reach the API server.
    pub(crate) cut: BTreeSet<Actor>,
    /// One of two API servers is behind.
    pub(crate) behind: Option<Behind>,
    /// Gateways and nodes that do not reach each other.
    pub(crate) cut_hops: BTreeSet<(usize, usize)>,
    pub(crate) clients: Clients,
    pub(crate) faults: BTreeMap<&'static str, u64>,
    pub(crate) violation: Option<String>,
    /// Registrations have a place for outputs; here nothing is ever put there.
    pub(crate) outputs: Option<OutputsDir>,
    tracing: bool,
    trace: Vec<String>,
}

// === impl Origin ===

impl Origin {
    /// Whose request it is.
    pub(crate) fn actor(self) -> Actor {
        match self {
            Self::Scheduler { index, .. } => Actor::Scheduler(index),
            Self::Driver { pod, .. } | Self::Beat { pod, .. } => Actor::Runtimed(pod),
        }
    }
}

// === impl Sim ===

impl Sim {
    pub(crate) fn new(seed: u64, variant: Option<Variant>, tracing: bool) -> Self {
        let clock = Clock::new();
        let mut rng = Rng::new(seed);
        let profile = Profile::draw(&mut rng);
        let mut sim = Self {
            seed,
            variant,
            profile,
            rng,
            clock,
            now: 0,
            queue: BTreeMap::new(),
            numbers: 0,
            steps: 0,
            quiet: false,
            api: Api::new(clock, NODES),
            announced: 0,
            watches: BTreeMap::new(),
            nodes: vec![Node::default(); NODES],
            pods: BTreeMap::new(),
            schedulers: (0..SCHEDULERS).map(|_| Scheduler::new(0)).collect(),
            gateways: (0..GATEWAYS).map(|_| Gateway::new(0, false)).collect(),
            frozen: BTreeMap::new(),
            behind: None,
            cut: BTreeSet::new(),
            cut_hops: BTreeSet::new(),
            clients: Clients::default(),
            faults: BTreeMap::new(),
            violation: None,
            outputs: PLACE.clone(),
            tracing,
            trace: Vec::new(),
        };
        for index in 0..SCHEDULERS {
            sim.start_scheduler(index);
        }
        for index in 0..GATEWAYS {
            sim.start_gateway(index);
        }
        sim.at(0, Event::Pool);
        sim.at(SECOND / 2, Event::User);
        sim.at(2 * SECOND, Event::Caller);
        sim.at(3 * SECOND, Event::Fault);
        sim
    }

    /// Runs to the end, or to the first violation.
    pub(crate) fn run(mut self) -> Outcome {
        let faults_until = self.profile.length;
        self.run_until(faults_until, |_| false);
        self.heal_all();
        self.settle();
        self.outcome()
    }

    /// Steps until then, or until `done`, which is asked now and then.
    pub(crate) fn run_until(&mut self, end: Time, done: impl Fn(&Self) -> bool) -> bool {
        let mut ask_at = self.now;
        while self.violation.is_none() {
            if ask_at <= self.now {
                if done(self) {
                    return true;
                }
                ask_at = self.now + SECOND;
            }
            let Some(((at, _), event)) = self.queue.pop_first() else {
                break;
            };
            if at > end {
                self.at(at, event);
                self.now = end;
                break;
            }
            self.now = at;
            self.steps += 1;
            self.dispatch(event);
            self.wake_watches();
            self.check();
        }
        done(self)
    }

    /// Every number is given once: it names processes, requests, Runs and calls, and breaks ties.
    pub(crate) fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    pub(crate) fn at(&mut self, at: Time, event: Event) {
        let number = self.number();
        self.queue.insert((at.max(self.now), number), event);
    }

    pub(crate) fn trace(&mut self, text: impl FnOnce() -> String) {
        if self.tracing {
            let (seconds, micros) = (self.now / SECOND, self.now % SECOND);
            self.trace.push(format!("{seconds:>4}.{micros:06} {}", text()));
        }
    }

    pub(crate) fn violated(&mut self, text: String) {
        self.trace(|| format!("VIOLATION {text}"));
        self.violation.get_or_insert(text);
    }

    pub(crate) fn injected(&mut self, fault: &'static str) {
        *self.faults.entry(fault).or_default() += 1;
        self.trace(|| format!("fault: {fault}"));
    }

    fn outcome(self) -> Outcome {
        Outcome {
            seed: self.seed,
            steps: self.steps,
            calls: self.clients.calls,
            answered: self.clients.answered,
            faults: self.faults,
            violation: self.violation,
            trace: self.trace,
        }
    }

    /// The process that an actor is now.
    pub(crate) fn life_of(&self, actor: Actor) -> Option<u64> {
        match actor {
            Actor::Scheduler(index) => {
                let it = &self.schedulers[index];
                (it.alive && it.leads()).then_some(it.life)
            }
            Actor::Gateway(index) => {
                let it = &self.gateways[index];
                it.alive.then_some(it.life)
            }
            Actor::Runtimed(pod) => Some(self.pods.get(&pod)?.daemon.as_ref()?.life),
        }
    }

    pub(crate) fn reaches_api(&self, actor: Actor) -> bool {
        match actor {
            Actor::Runtimed(pod) => self.pods.get(&pod).is_some_and(|it| {
                let node = &self.nodes[it.node];
                !node.cut && !node.down
            }),
            other => !self.cut.contains(&other),
        }
    }

    // --- requests to the API server ---

    /// Sends a request. An answer always comes, if only the one that there was none in time.
    pub(crate) fn ask(&mut self, origin: Origin, request: Request, patience: Duration) {
        let way = self.way();
        let until = self.now + micros(patience);
        let request = Box::new(request);
        self.at(
            self.now + way,
            Event::ApiArrive {
                origin,
                request,
                until,
            },
        );
    }

    fn way(&mut self) -> Time {
        if !self.quiet && self.rng.chance(self.profile.slow_api) {
            self.rng.range(100 * MS, 4 * SECOND)
        } else {
            self.rng.range(MS, 20 * MS)
        }
    }

    pub(crate) fn api_arrive(&mut self, origin: Origin, request: Request, until: Time) {
        if !self.reaches_api(origin.actor()) {
            let at = if self.rng.chance(300) {
                self.now + 100 * MS
            } else {
                until
            };
            return self.reply(origin, Reply::Unknown, at.min(until));
        }
        let fails = !self.quiet && self.rng.chance(self.profile.api_errors);
        if fails {
            let writes = request.writes();
            match self.rng.range(0, 4) {
                0 => self.injected("500 before"),
                1 if writes => {
                    self.injected("500 after");
                    self.apply(request);
                }
                2 if writes => {
                    self.injected("409 without reason");
                    let at = self.now + MS;
                    return self.reply(origin, Reply::Conflict, at.min(until));
                }
                3 if writes => {
                    self.injected("answer lost");
                    self.apply(request);
                    return self.reply(origin, Reply::Unknown, until);
                }
                _ => self.injected("500"),
            }
            let at = self.now + MS;
            return self.reply(origin, Reply::Unknown, at.min(until));
        }
        let reply = self.apply(request);
        let at = self.now + self.way();
        let reply = if at > until { Reply::Unknown } else { reply };
        self.reply(origin, reply, at.min(until));
    }

    fn apply(&mut self, request: Request) -> Reply {
        let reply = self.api.apply(request, self.now);
        for text in std::mem::take(&mut self.api.violations) {
            self.violated(text);
        }
        reply
    }

    fn reply(&mut self, origin: Origin, reply: Reply, at: Time) {
        let reply = Box::new(reply);
        self.at(at, Event::ApiReply { origin, reply });
    }

    pub(crate) fn api_reply(&mut self, origin: Origin, reply: Reply) {
        let reply = if self.reaches_api(origin.actor()) {
            reply
        } else {
            Reply::Unknown
        };
        match origin {
            Origin::Scheduler { index, life, token } => self.scheduler_reply(index, life, token, reply),
            Origin::Driver {
                pod,
                life,
                run,
                token,
            } => {
                if self.life_of(Actor::Runtimed(pod)) == Some(life) {
                    self.driver_reply(pod, run, token, reply);
                }
            }
            Origin::Beat { pod, life, sent } => self.beat_answer(pod, life, sent, &reply),
        }
    }
}
