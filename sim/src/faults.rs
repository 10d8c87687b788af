//! What goes wrong. Each seed draws which kinds of faults it has and how often, so that some seeds try one
//! kind hard and others many kinds together.
//!
//! Deletion by force is kept away from nodes that Kubernetes cannot hear but does not yet know to be
//! silent: there it breaks the promise of Kubernetes itself that one Pod of a name runs at a time, and no
//! fence of C-7.3 is meant to hold against it.

use crate::{
    clock::{MS, SECOND, Time},
    events::Event,
    pods::NODES,
    rng::Rng,
    sim::{Actor, GATEWAYS, SCHEDULERS, Sim},
    watch::{Behind, Break},
};

/// What a seed tries.
#[derive(Debug, Clone)]
pub(crate) struct Profile {
    /// How long faults go on.
    pub(crate) length: Time,
    kinds: Vec<Kind>,
    pace: Time,
    // The rest: how often in a thousand times.
    pub(crate) stale_lists: u64,
    /// How many of those are very old.
    pub(crate) old_lists: u64,
    pub(crate) slow_network: u64,
    pub(crate) slow_api: u64,
    pub(crate) api_errors: u64,
    pub(crate) resets: u64,
    pub(crate) bad_workers: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    DeletePod,
    DeletePodByForce,
    CrashDaemon,
    FreezeDaemon,
    CrashServer,
    CutNode,
    StopNode,
    CrashScheduler,
    FreezeScheduler,
    CutScheduler,
    CrashGateway,
    CutGateway,
    CutHop,
    BreakWatch,
    ExpireWatch,
    SlowWatch,
    ServerBehind,
}

const KINDS: [Kind; 17] = [
    Kind::DeletePod,
    Kind::DeletePodByForce,
    Kind::CrashDaemon,
    Kind::FreezeDaemon,
    Kind::CrashServer,
    Kind::CutNode,
    Kind::StopNode,
    Kind::CrashScheduler,
    Kind::FreezeScheduler,
    Kind::CutScheduler,
    Kind::CrashGateway,
    Kind::CutGateway,
    Kind::CutHop,
    Kind::BreakWatch,
    Kind::ExpireWatch,
    Kind::SlowWatch,
    Kind::ServerBehind,
];

/// Together with lists of long ago: who starts or lists anew believes in Pods that Runs have left, and in the time
/// before new Pods.
const OLD_NEWS: [[Kind; 3]; 3] = [
    [Kind::CrashServer, Kind::CrashDaemon, Kind::CrashDaemon],
    [Kind::CrashServer, Kind::CrashServer, Kind::CrashDaemon],
    [Kind::ExpireWatch, Kind::SlowWatch, Kind::DeletePodByForce],
];

/// What becomes good again.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Heal {
    Node(usize),
    Cut(Actor),
    Hop(usize, usize),
    Scheduler(usize),
    Gateway(usize),
}

// === impl Profile ===

impl Profile {
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        // Many kinds together meet in many ways, few of them meet often, and old news needs time and its own kinds.
        let old_news = rng.chance(400);
        let share = if rng.chance(500) { 450 } else { 200 };
        let mut kinds: Vec<Kind> = KINDS.into_iter().filter(|_| rng.chance(share)).collect();
        if old_news {
            kinds = OLD_NEWS[rng.index(OLD_NEWS.len())].to_vec();
        }
        if kinds.is_empty() {
            kinds.push(Kind::DeletePod);
        }
        let mut often = |most: u64| if rng.chance(500) { rng.range(1, most) } else { 0 };
        let (stale_lists, slow_network, slow_api) = (often(600), often(80), often(60));
        let (stale_lists, old_lists) = if old_news { (700, 900) } else { (stale_lists, 300) };
        let (api_errors, resets, bad_workers) = (often(80), often(60), often(150));
        Self {
            length: if old_news {
                100 * SECOND
            } else {
                rng.range(20 * SECOND, 70 * SECOND)
            },
            kinds,
            pace: rng.range(SECOND / 2, if old_news { 3 * SECOND } else { 8 * SECOND }),
            stale_lists,
            old_lists,
            slow_network,
            slow_api,
            api_errors,
            resets,
            bad_workers,
        }
    }
}

// === impl Sim ===

impl Sim {
    pub(crate) fn fault(&mut self) {
        if self.quiet {
            return;
        }
        let kinds = self.profile.kinds.clone();
        if let Some(kind) = self.rng.pick(&kinds) {
            self.inject(kind);
        }
        let pause = self.rng.range(200 * MS, self.profile.pace);
        self.at(self.now + pause, Event::Fault);
    }

    fn inject(&mut self, kind: Kind) {
        let pods: Vec<u32> = self.pods.keys().copied().collect();
        let pod = self.rng.pick(&pods);
        let long = self.now + self.rng.range(2 * SECOND, 60 * SECOND);
        let short = self.now + self.rng.range(100 * MS, 12 * SECOND);
        let node = self.rng.index(NODES);
        let scheduler = self.rng.index(SCHEDULERS);
        let gateway = self.rng.index(GATEWAYS);
        let watches: Vec<u64> = self.watches.keys().copied().collect();
        let watch = self.rng.pick(&watches);
        match kind {
            Kind::DeletePod => self.delete_pod(pod, false),
            Kind::DeletePodByForce => self.delete_pod(pod, true),
            Kind::CrashDaemon => {
                if let Some(pod) = pod.filter(|it| self.pods.get(it).is_some_and(|it| it.daemon.is_some())) {
                    self.injected("runtimed crashes");
                    self.kill_daemon(pod);
                    let restart = self.now + self.rng.range(50 * MS, 4 * SECOND);
                    self.at(restart, Event::DaemonStart { pod });
                }
            }
            Kind::FreezeDaemon => {
                if let Some(pod) = pod {
                    self.injected("runtimed freezes");
                    self.frozen.insert(Actor::Runtimed(pod), long);
                    self.at(self.now + 10 * SECOND, Event::Probe { pod });
                    self.at(long, Event::Probe { pod });
                }
            }
            Kind::CrashServer => {
                if let Some(pod) = pod.filter(|it| self.pods.get(it).is_some_and(|it| it.server.alive)) {
                    self.injected("Runtime Server crashes");
                    self.crash_server(pod);
                }
            }
            Kind::CutNode => {
                if !self.nodes[node].down {
                    self.injected("node cut off");
                    self.set_node(node, true, false);
                    self.at(long, Event::Heal(Heal::Node(node)));
                }
            }
            Kind::StopNode => {
                self.injected("node stops");
                self.set_node(node, false, true);
                self.at(long, Event::Heal(Heal::Node(node)));
            }
            Kind::CrashScheduler => {
                if self.schedulers[scheduler].alive {
                    self.injected("scheduler crashes");
                    self.kill_scheduler(scheduler);
                    self.at(short, Event::Heal(Heal::Scheduler(scheduler)));
                }
            }
            Kind::FreezeScheduler => {
                self.injected("scheduler freezes");
                self.frozen.insert(Actor::Scheduler(scheduler), long);
            }
            Kind::CutScheduler => self.cut_actor(Actor::Scheduler(scheduler), long),
            Kind::CrashGateway => {
                if self.gateways[gateway].alive {
                    self.injected("gateway crashes");
                    self.kill_gateway(gateway);
                    self.at(short, Event::Heal(Heal::Gateway(gateway)));
                }
            }
            Kind::CutGateway => self.cut_actor(Actor::Gateway(gateway), long),
            Kind::CutHop => {
                self.injected("gateway and node cut off");
                self.cut_hops.insert((gateway, node));
                self.at(long, Event::Heal(Heal::Hop(gateway, node)));
            }
            Kind::BreakWatch => {
                if let Some(watch) = watch {
                    self.injected("watch breaks");
                    self.break_watch(watch, Break::Resume);
                }
            }
            Kind::ExpireWatch => {
                if let Some(watch) = watch {
                    self.injected("watch expires (410)");
                    self.break_watch(watch, Break::Expire);
                }
            }
            Kind::SlowWatch => {
                if let Some(watch) = watch {
                    self.injected("watch lags");
                    let lag = self.rng.range(200 * MS, 10 * SECOND);
                    self.slow_watch(watch, long, lag);
                }
            }
            Kind::ServerBehind => {
                self.injected("API server behind");
                let (lag, salt) = (self.rng.range(SECOND, 40 * SECOND), self.rng.next());
                self.behind = Some(Behind {
                    until: long,
                    lag,
                    salt,
                });
                // Clients are moved to it, and it does not know the versions that they have seen.
                for watch in watches {
                    if self.behind_for(watch) > 0 {
                        self.break_watch(watch, Break::Expire);
                    }
                }
            }
        }
    }

    fn cut_actor(&mut self, actor: Actor, until: Time) {
        self.injected(match actor {
            Actor::Scheduler(_) => "scheduler cut off",
            _ => "gateway cut off",
        });
        self.cut.insert(actor);
        self.at(until, Event::Heal(Heal::Cut(actor)));
    }

    fn delete_pod(&mut self, pod: Option<u32>, force: bool) {
        let Some(it) = pod.and_then(|pod| self.pods.get(&pod)) else {
            return;
        };
        let (name, node) = (it.name.clone(), &self.nodes[it.node]);
        let known_silent = self.api.silent_nodes[it.node];
        if !force {
            self.injected("Pod deleted");
            self.api
                .change_pod(&name, self.now, |pod| pod.signs.deleting = true);
        } else if node.down || !node.cut || known_silent {
            self.injected("Pod deleted by force");
            self.api.remove_pod(&name, self.now);
        }
        let soon = self.now + self.rng.range(5 * MS, 30 * MS);
        self.at(soon, Event::Kubelets);
    }

    pub(crate) fn heal(&mut self, heal: Heal) {
        match heal {
            Heal::Node(node) => self.set_node(node, false, false),
            Heal::Cut(actor) => {
                self.cut.remove(&actor);
            }
            Heal::Hop(gateway, node) => {
                self.cut_hops.remove(&(gateway, node));
            }
            Heal::Scheduler(index) => {
                if !self.schedulers[index].alive {
                    self.start_scheduler(index);
                }
            }
            Heal::Gateway(index) => {
                if !self.gateways[index].alive {
                    self.start_gateway(index);
                }
            }
        }
    }

    /// From now on nothing goes wrong any more.
    pub(crate) fn heal_all(&mut self) {
        self.trace(|| "no more faults".to_owned());
        self.quiet = true;
        self.cut.clear();
        self.cut_hops.clear();
        self.behind = None;
        for node in 0..NODES {
            self.set_node(node, false, false);
        }
        for index in 0..SCHEDULERS {
            self.heal(Heal::Scheduler(index));
        }
        for index in 0..GATEWAYS {
            self.heal(Heal::Gateway(index));
        }
        let watches: Vec<u64> = self.watches.keys().copied().collect();
        for watch in watches {
            self.slow_watch(watch, 0, 0);
        }
    }
}
