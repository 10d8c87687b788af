//! What will happen, and to whom it happens.

use kruntimes_api::keys::RunUid;
use kruntimes_gateway::hop::{Answer, HopError};
use kruntimes_proto::{failure::Failure, ids::RegistrationId};

use crate::{
    api::{Reply, Request},
    clock::Time,
    faults::Heal,
    gateway::Letter,
    server::Word,
    sim::{Actor, Origin, Sim},
};

/// What will happen.
#[derive(Debug)]
pub(crate) enum Event {
    ApiArrive {
        origin: Origin,
        request: Box<Request>,
        until: Time,
    },
    ApiReply {
        origin: Origin,
        reply: Box<Reply>,
    },
    Deliver {
        watch: u64,
        epoch: u64,
    },
    Reconnect {
        watch: u64,
        epoch: u64,
    },
    Listed {
        watch: u64,
        epoch: u64,
        position: usize,
    },
    Election {
        index: usize,
        life: u64,
    },
    Look {
        index: usize,
        number: u64,
    },
    Beat {
        pod: u32,
        life: u64,
    },
    Wake {
        origin: Origin,
    },
    Nudge {
        pod: u32,
        run: RunUid,
    },
    Suspect {
        pod: u32,
        run: RunUid,
    },
    ServerWord {
        origin: Origin,
        word: Box<Word>,
    },
    Worker {
        pod: u32,
        life: u64,
        run: String,
        id: RegistrationId,
        loads: bool,
    },
    Execution {
        pod: u32,
        life: u64,
        run: String,
        execution: u64,
        in_time: bool,
    },
    HopArrive {
        index: usize,
        life: u64,
        letter: Letter,
    },
    /// A call that was not sent, or not taken, waits for its function to be elsewhere.
    Waits {
        index: usize,
        life: u64,
        call: u64,
    },
    HopReply {
        index: usize,
        life: u64,
        letter: u64,
        result: Box<Result<Answer, HopError>>,
    },
    Pool,
    Kubelets,
    PodStart {
        pod: u32,
    },
    PodKill {
        pod: u32,
    },
    DaemonStart {
        pod: u32,
    },
    ServerStart {
        pod: u32,
    },
    Sigterm {
        pod: u32,
    },
    Drained {
        pod: u32,
    },
    Probe {
        pod: u32,
    },
    NodeSilent {
        node: usize,
        epoch: u64,
    },
    NodeHeard {
        node: usize,
        epoch: u64,
    },
    Fault,
    Heal(Heal),
    User,
    Caller,
}

// === impl Sim ===

impl Sim {
    /// A process that stands still does what comes to it later.
    fn thaw(&self, event: &Event) -> Option<Time> {
        if self.frozen.is_empty() {
            return None;
        }
        let actor = match event {
            Event::ApiReply { origin, .. } | Event::Wake { origin } | Event::ServerWord { origin, .. } => {
                origin.actor()
            }
            Event::Deliver { watch, .. } | Event::Listed { watch, .. } | Event::Reconnect { watch, .. } => {
                self.watches.get(watch)?.actor
            }
            Event::Election { index, .. } | Event::Look { index, .. } => Actor::Scheduler(*index),
            Event::Beat { pod, .. }
            | Event::Nudge { pod, .. }
            | Event::Suspect { pod, .. }
            | Event::Execution { pod, .. }
            | Event::Drained { pod } => Actor::Runtimed(*pod),
            Event::HopArrive { letter, .. } => {
                let address = letter.route.owner.address;
                let found = self.pods.values().find(|it| it.address == address)?;
                Actor::Runtimed(found.id)
            }
            _ => return None,
        };
        self.frozen.get(&actor).copied().filter(|it| *it > self.now)
    }

    pub(crate) fn dispatch(&mut self, event: Event) {
        if let Some(thaw) = self.thaw(&event) {
            return self.at(thaw, event);
        }
        match event {
            Event::ApiArrive {
                origin,
                request,
                until,
            } => self.api_arrive(origin, *request, until),
            Event::ApiReply { origin, reply } => self.api_reply(origin, *reply),
            Event::Deliver { watch, epoch } => self.deliver(watch, epoch),
            Event::Reconnect { watch, epoch } => self.reconnect(watch, epoch),
            Event::Listed {
                watch,
                epoch,
                position,
            } => self.listed(watch, epoch, position),
            Event::Election { index, life } => self.election(index, life),
            Event::Look { index, number } => self.scheduler_look(index, number),
            Event::Beat { pod, life } => self.beat(pod, life),
            Event::Wake { origin } => {
                if let Origin::Driver {
                    pod,
                    life,
                    run,
                    token,
                } = origin
                    && self.life_of(Actor::Runtimed(pod)) == Some(life)
                {
                    self.driver_wakes(pod, run, token);
                }
            }
            Event::Nudge { pod, run } => self.nudge(pod, run),
            Event::Suspect { pod, run } => self.suspect(pod, run),
            Event::ServerWord { origin, word } => {
                if let Origin::Driver {
                    pod,
                    life,
                    run,
                    token,
                } = origin
                    && self.life_of(Actor::Runtimed(pod)) == Some(life)
                {
                    self.server_word(pod, run, token, *word);
                }
            }
            Event::Worker {
                pod,
                life,
                run,
                id,
                loads,
            } => self.worker(pod, life, &run, &id, loads),
            Event::Execution {
                pod,
                life,
                run,
                execution,
                in_time,
            } => {
                if self.server(pod, life).is_some() {
                    let late = Failure::new(
                        kruntimes_proto::failure::Reason::DeadlineExceeded,
                        "the time is over",
                    );
                    let result = if in_time { Ok(()) } else { Err(late) };
                    self.execution_over(pod, &run, execution, result);
                }
            }
            Event::HopArrive { index, life, letter } => self.hop_arrive(index, life, letter),
            Event::HopReply {
                index,
                life,
                letter,
                result,
            } => self.hop_reply(index, life, letter, *result),
            Event::Waits { index, life, call } => self.waits(index, life, call),
            Event::Pool => self.keep_pool(),
            Event::Kubelets => self.sync_kubelets(),
            Event::PodStart { pod } => self.pod_start(pod),
            Event::PodKill { pod } => self.pod_kill(pod),
            Event::DaemonStart { pod } => self.start_daemon(pod),
            Event::ServerStart { pod } => self.start_server(pod),
            Event::Sigterm { pod } => self.sigterm(pod),
            Event::Drained { pod } => self.drained(pod),
            Event::Probe { pod } => self.probe(pod),
            Event::NodeSilent { node, epoch } => self.node_silent(node, epoch),
            Event::NodeHeard { node, epoch } => self.node_heard(node, epoch),
            Event::Fault => self.fault(),
            Event::Heal(heal) => self.heal(heal),
            Event::User => self.user(),
            Event::Caller => self.caller(),
        }
    }
}
