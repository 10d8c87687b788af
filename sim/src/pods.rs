//! What Kubernetes does with Pods: nodes, the kubelet of each, and a controller that keeps the pool at its
//! size. Names and addresses are used again as soon as they are free.

use std::{collections::BTreeMap, net::SocketAddr};

use kruntimes_api::{
    fixtures,
    keys::{PodUid, RunUid},
    names::RESOURCE_RUNS,
    quantity::Amount,
};
use kruntimes_proto::failure::{Failure, Reason};
use kruntimes_runtimed::journal::Record;
use kruntimes_scheduler::facts::{Amounts, ObjectKey, PodFacts, Signs};

use crate::{
    api::{NAMESPACE, RUNTIME},
    clock::{MS, SECOND, Time},
    events::Event,
    runtimed::Daemon,
    server::Server,
    sim::{Actor, Sim},
};

/// Runs that a Pod may hold.
pub(crate) const CAPACITY: u64 = 2;
/// Pods of the pool.
pub(crate) const POOL: usize = 3;
pub(crate) const NODES: usize = 3;
/// The time a Pod gets to end.
const GRACE: Time = 30 * SECOND;
/// After which Kubernetes takes a silent node for unreachable.
const NODE_SILENT: Time = 40 * SECOND;

/// A Pod as its node has it.
pub(crate) struct Pod {
    pub(crate) id: u32,
    pub(crate) name: String,
    pub(crate) uid: PodUid,
    pub(crate) node: usize,
    pub(crate) address: SocketAddr,
    /// Its containers run.
    pub(crate) runs: bool,
    pub(crate) daemon: Option<Daemon>,
    pub(crate) server: Server,
    /// In a volume of the Pod.
    pub(crate) journal: BTreeMap<RunUid, Record>,
    /// SIGTERM was sent.
    terminating: bool,
}

/// A machine.
#[derive(Debug, Clone, Default)]
pub(crate) struct Node {
    /// It does not reach the API server.
    pub(crate) cut: bool,
    pub(crate) down: bool,
    /// Grows when any of that changes.
    pub(crate) epoch: u64,
}

// === impl Sim ===

impl Sim {
    /// The pool's controller, and the kubelet of every node that can be heard.
    pub(crate) fn keep_pool(&mut self) {
        let living = self.api.pods.values().filter(|it| !it.signs.deleting).count();
        if living < POOL {
            self.create_pod();
        }
        self.sync_kubelets();
        let pause = self.rng.range(300 * MS, SECOND);
        self.at(self.now + pause, Event::Pool);
    }

    fn create_pod(&mut self) {
        let known: Vec<usize> = (0..NODES).filter(|it| !self.api.silent_nodes[*it]).collect();
        let Some(node) = self.rng.pick(&known) else { return };
        let Some(name) = (0..8).map(|it| format!("pod-{it}")).find(|it| {
            !self.api.pods.contains_key(it) && self.pods.values().all(|pod| pod.name != *it || !pod.runs)
        }) else {
            return;
        };
        let Some(address) = (1..16)
            .map(|it| SocketAddr::from(([10, 0, 0, it], 9443)))
            .find(|it| self.pods.values().all(|pod| pod.address != *it))
        else {
            return;
        };
        let number = self.number();
        let id = u32::try_from(number).unwrap_or(u32::MAX);
        let Some(uid) = PodUid::new(fixtures::uid(&format!("pod/{id}"))) else {
            return;
        };
        self.api.put_pod(
            PodFacts {
                key: ObjectKey::new(NAMESPACE, name.clone()),
                uid: uid.clone(),
                runtime: RUNTIME.to_owned(),
                serves: false,
                signs: Signs::default(),
                node: Some(format!("node-{node}")),
                goes_last: false,
                capacity: Amounts::from([(RESOURCE_RUNS.to_owned(), Amount::whole(CAPACITY))]),
            },
            self.now,
        );
        self.trace(|| format!("Pod {name} (pod {id}) is made on node {node} at {address}"));
        let mut server = Server::new(number);
        server.alive = false;
        self.pods.insert(
            id,
            Pod {
                id,
                name,
                uid,
                node,
                address,
                runs: false,
                daemon: None,
                server,
                journal: BTreeMap::new(),
                terminating: false,
            },
        );
        let pause = self.rng.range(100 * MS, 800 * MS);
        self.at(self.now + pause, Event::PodStart { pod: id });
    }

    /// The kubelet starts the containers, if the Pod is still wanted.
    pub(crate) fn pod_start(&mut self, pod: u32) {
        let Some(it) = self.pods.get_mut(&pod).filter(|it| !it.runs) else {
            return;
        };
        let node = &self.nodes[it.node];
        if node.down || node.cut {
            return self.at(self.now + SECOND, Event::PodStart { pod });
        }
        let object = self.api.pods.get(&it.name).filter(|api| api.uid == it.uid);
        if object.is_none_or(|it| it.signs.deleting) {
            return self.finish_pod(pod);
        }
        it.runs = true;
        self.start_server(pod);
        let pause = self.rng.range(50 * MS, 300 * MS);
        self.at(self.now + pause, Event::DaemonStart { pod });
    }

    /// Every kubelet that is heard does what the API says of its Pods.
    pub(crate) fn sync_kubelets(&mut self) {
        let all: Vec<u32> = self.pods.keys().copied().collect();
        for pod in all {
            let Some(it) = self.pods.get(&pod) else { continue };
            let node = &self.nodes[it.node];
            if node.down || node.cut {
                continue;
            }
            let object = self.api.pods.get(&it.name).filter(|api| api.uid == it.uid);
            match object.map(|it| it.signs.deleting) {
                None => self.finish_pod(pod),
                Some(true) if !it.terminating => self.terminate(pod),
                Some(true) if !it.runs => self.finish_pod(pod),
                Some(_) => {}
            }
        }
    }

    /// SIGTERM now, SIGKILL when the time is over.
    fn terminate(&mut self, pod: u32) {
        self.trace(|| format!("pod {pod} is asked to end"));
        let Some(it) = self.pods.get_mut(&pod) else { return };
        it.terminating = true;
        if !it.runs || it.daemon.is_none() {
            return self.finish_pod(pod);
        }
        let grace = self.now + GRACE;
        self.at(grace, Event::PodKill { pod });
        let thaw = self
            .frozen
            .get(&Actor::Runtimed(pod))
            .copied()
            .unwrap_or(self.now);
        self.at(thaw.max(self.now), Event::Sigterm { pod });
    }

    pub(crate) fn sigterm(&mut self, pod: u32) {
        if let Some(daemon) = self.daemon(pod) {
            daemon.draining = true;
            daemon.held.drain();
            self.probe_soon(pod);
            self.nudge_all(pod);
            self.driver_ended(pod);
        }
    }

    /// The process has handed everything over and ends.
    pub(crate) fn drained(&mut self, pod: u32) {
        if self
            .daemon(pod)
            .is_some_and(|it| it.draining && it.drivers.is_empty() && it.calls.is_empty())
        {
            self.kill_daemon(pod);
            self.finish_pod(pod);
        }
    }

    /// The time to end is over.
    pub(crate) fn pod_kill(&mut self, pod: u32) {
        if self.pods.get(&pod).is_some_and(|it| it.terminating) {
            self.finish_pod(pod);
        }
    }

    /// The Pod's processes end now, and its object goes, as soon as the kubelet can say so.
    pub(crate) fn finish_pod(&mut self, pod: u32) {
        self.stop_containers(pod);
        let node = self.pods.get(&pod).map(|it| &self.nodes[it.node]);
        if node.is_none_or(|it| it.cut || it.down) {
            return;
        }
        let Some(it) = self.pods.remove(&pod) else { return };
        self.trace(|| format!("pod {pod} ({}) is over", it.name));
        if self.api.pods.get(&it.name).is_some_and(|api| api.uid == it.uid) {
            self.api.remove_pod(&it.name, self.now);
        }
    }

    fn stop_containers(&mut self, pod: u32) {
        self.kill_daemon(pod);
        let Some(it) = self.pods.get_mut(&pod) else { return };
        it.runs = false;
        it.server.alive = false;
        let running: Vec<(String, u64)> = it
            .server
            .running
            .iter()
            .map(|(run, it)| (run.clone(), it.execution))
            .collect();
        for (run, execution) in running {
            let gone = Failure::new(Reason::OutcomeUnknown, "the Pod is gone");
            self.execution_over(pod, &run, execution, Err(gone));
        }
    }

    // --- readiness ---

    pub(crate) fn probe_soon(&mut self, pod: u32) {
        let pause = self.rng.range(50 * MS, 800 * MS);
        self.at(self.now + pause, Event::Probe { pod });
    }

    pub(crate) fn probe(&mut self, pod: u32) {
        let now = self.now;
        let frozen = self.frozen.get(&Actor::Runtimed(pod)).is_some_and(|it| *it > now);
        let instant = self.clock.instant(now);
        let Some(it) = self.pods.get(&pod) else { return };
        if self.nodes[it.node].cut || self.nodes[it.node].down {
            return;
        }
        let ready = it.runs
            && !frozen
            && it
                .daemon
                .as_ref()
                .is_some_and(|it| it.listed && !it.draining && it.contact.silence(instant).is_some());
        let name = it.name.clone();
        if self
            .api
            .pods
            .get(&name)
            .is_some_and(|api| api.uid == it.uid && api.signs.ready != ready)
        {
            self.api.change_pod(&name, now, |pod| pod.signs.ready = ready);
        }
    }

    // --- nodes ---

    /// A node loses its way to the API server, its power, or gets both back.
    pub(crate) fn set_node(&mut self, node: usize, cut: bool, down: bool) {
        // What was deleted by force is still killed; see `faults`.
        self.sync_kubelets();
        let it = &mut self.nodes[node];
        if (it.cut, it.down) == (cut, down) {
            return;
        }
        let was_down = it.down;
        it.epoch += 1;
        (it.cut, it.down) = (cut, down);
        let epoch = it.epoch;
        let pods: Vec<u32> = self
            .pods
            .values()
            .filter(|it| it.node == node)
            .map(|it| it.id)
            .collect();
        if down && !was_down {
            for pod in &pods {
                self.stop_containers(*pod);
            }
        }
        if cut || down {
            self.at(self.now + NODE_SILENT, Event::NodeSilent { node, epoch });
            return;
        }
        self.at(self.now + SECOND, Event::NodeHeard { node, epoch });
        for pod in pods {
            if was_down && self.pods.get(&pod).is_some_and(|it| !it.runs) {
                // The containers are started anew, or the Pod goes.
                let pause = self.rng.range(500 * MS, 3 * SECOND);
                self.at(self.now + pause, Event::PodStart { pod });
            }
            self.probe_soon(pod);
        }
    }

    /// Kubernetes has not heard of the node for too long.
    pub(crate) fn node_silent(&mut self, node: usize, epoch: u64) {
        if self.nodes[node].epoch != epoch {
            return;
        }
        self.api.silent_nodes[node] = true;
        let here = format!("node-{node}");
        let pods: Vec<String> = self
            .api
            .pods
            .values()
            .filter(|it| it.node.as_ref() == Some(&here))
            .map(|it| it.key.name.clone())
            .collect();
        for name in pods {
            self.api
                .change_pod(&name, self.now, |pod| pod.signs.ready = false);
        }
    }

    pub(crate) fn node_heard(&mut self, node: usize, epoch: u64) {
        if self.nodes[node].epoch == epoch {
            self.api.silent_nodes[node] = false;
            let pods: Vec<u32> = self
                .pods
                .values()
                .filter(|it| it.node == node)
                .map(|it| it.id)
                .collect();
            for pod in pods {
                self.probe_soon(pod);
            }
        }
    }
}
