//! What must hold after every step, and what must become true once faults have stopped.

use std::{collections::BTreeMap, sync::Arc};

use kruntimes_api::{keys::RunUid, names::RESOURCE_RUNS, quantity::Amount};
use kruntimes_runtime_server::registry::State;
use kruntimes_runtimed::{fence, held::Gate};

use crate::{
    clock::{SECOND, Time},
    driver::Driver,
    pods::{CAPACITY, Pod},
    sim::{Actor, Sim},
};

/// After the last fault: a lease (15 s), a silent owner (40 s), deletions that are paced (3 in 60 s), a pause
/// between two attempts (72 s at most), what stands still until then (60 s), and the time of the steps.
const SETTLED_WITHIN: Time = 300 * SECOND;
/// After everything was deleted.
const GONE_WITHIN: Time = 120 * SECOND;

impl Sim {
    /// After every step.
    pub(crate) fn check(&mut self) {
        let found = self
            .callable_twice()
            .or_else(|| self.pods.values().find_map(Pod::broken));
        if let Some(text) = found {
            self.violated(text);
        }
    }

    /// C-7.3: no two registrations of one Run can be called at once.
    fn callable_twice(&self) -> Option<String> {
        let mut callable: BTreeMap<RunUid, u32> = BTreeMap::new();
        for pod in self.pods.values() {
            let Some(daemon) = &pod.daemon else { continue };
            for driver in daemon.drivers.values() {
                if self.takes_calls(pod, driver)
                    && let Some(other) = callable.insert(driver.key.uid, pod.id)
                {
                    return Some(format!(
                        "C-7.3: {} can be called on pod {other} and on pod {}",
                        driver.key, pod.id
                    ));
                }
            }
        }
        None
    }

    /// Whether a call that is sent to this very assignment would run.
    fn takes_calls(&self, pod: &Pod, driver: &Driver) -> bool {
        let (Some(daemon), Some(entry)) = (&pod.daemon, &driver.entry) else {
            return false;
        };
        if entry.gate() != Gate::Open || !pod.server.alive {
            return false;
        }
        let expected = fence::Expected {
            run: driver.key.uid,
            attempt: entry.attempt,
            pod: daemon.me.pod_uid.clone(),
        };
        let held = daemon.held.get(driver.key.uid).map(|it| it.attempt);
        let frozen = self
            .frozen
            .get(&Actor::Runtimed(pod.id))
            .is_some_and(|it| *it > self.now);
        if frozen
            || daemon.contact.is_lost(self.clock.instant(self.now))
            || fence::check(&expected, &pod.uid, held).is_err()
        {
            return false;
        }
        let Ok(registered) = entry.callable() else {
            return false;
        };
        let status = pod
            .server
            .registry
            .status(&driver.key.uid.to_string(), &registered.id);
        status.is_ok_and(|it| it.state == State::Ready)
    }

    /// When nothing goes wrong any more, everything comes to rest, and what is deleted goes.
    pub(crate) fn settle(&mut self) {
        let end = self.now + SETTLED_WITHIN;
        if !self.run_until(end, |sim| sim.unsettled().is_none()) && self.violation.is_none() {
            let what = self.unsettled().unwrap_or_default();
            self.violated(format!("C-7.3: not at rest after the last fault: {what}"));
        }
        if self.violation.is_some() {
            return;
        }
        let names: Vec<String> = self.api.runs.keys().cloned().collect();
        for name in names {
            self.api.delete_run(&name, self.now);
        }
        self.wake_watches();
        let end = self.now + GONE_WITHIN;
        if !self.run_until(end, |sim| sim.left_behind().is_none()) && self.violation.is_none() {
            let what = self.left_behind().unwrap_or_default();
            self.violated(format!("C-6.2, C-7.4: left behind after deletion: {what}"));
        }
    }

    /// A Run that has neither ended nor can be called through every gateway.
    fn unsettled(&self) -> Option<String> {
        self.api.runs.values().find_map(|run| {
            let name = run.metadata.name.as_deref().unwrap_or_default();
            let status = run.status.as_ref();
            let told = format!(
                "{name}: phase {:?}, Pod {:?}, attempt {:?}",
                run.phase(),
                status.and_then(|it| it.assigned_pod.as_ref()),
                run.attempt()
            );
            if run.is_deleting() {
                return Some(format!("{told}, being deleted"));
            }
            if run.phase().is_terminal() {
                return None;
            }
            if !run.is_ready() {
                return Some(told);
            }
            let uid = run.run_uid()?;
            let (_, pod_uid) = run.assignment()?;
            let owner = self.pods.values().find(|it| it.uid == pod_uid);
            let driver = owner.and_then(|it| it.daemon.as_ref()?.drivers.get(&uid));
            let (Some(owner), Some(driver)) = (owner, driver) else {
                return Some(format!("{told}, and nobody owns it"));
            };
            if !self.takes_calls(owner, driver) {
                return Some(format!("{told}, and its owner takes no calls"));
            }
            let daemon = owner.daemon.as_ref()?;
            for gateway in &self.gateways {
                let route = gateway.route(uid);
                let right = route.as_ref().is_some_and(|route| {
                    route.owner.address == owner.address
                        && route.owner.key == daemon.key
                        && route.pod_uid == owner.uid
                        && Some(route.attempt) == run.attempt()
                });
                if !right {
                    return Some(format!("{told}, and a gateway has {route:?}"));
                }
            }
            None
        })
    }

    /// What is there although every Run was deleted.
    fn left_behind(&self) -> Option<String> {
        if let Some(run) = self.api.runs.values().next() {
            return Some(format!("{:?} {:?}", run.metadata.name, run.metadata.finalizers));
        }
        self.pods.values().find_map(|pod| {
            let Some(daemon) = &pod.daemon else {
                return pod
                    .runs
                    .then(|| format!("runtimed of pod {} is starting", pod.id));
            };
            let taken = daemon.admission.taken(RESOURCE_RUNS);
            let clean = daemon.drivers.is_empty()
                && daemon.held.is_empty()
                && taken == Amount::ZERO
                && pod.server.registry.is_empty()
                && pod.journal.is_empty();
            (!clean).then(|| {
                format!(
                    "pod {}: {} drivers, {} held, {taken} taken, {} registered, {} journaled",
                    pod.id,
                    daemon.drivers.len(),
                    daemon.held.len(),
                    pod.server.registry.len(),
                    pod.journal.len()
                )
            })
        })
    }
}

impl Pod {
    /// C-5.3, C-6.1: no slot is taken for nothing, and no Pod holds more than it can.
    fn broken(&self) -> Option<String> {
        let capacity = usize::try_from(CAPACITY).unwrap_or(usize::MAX);
        if self.server.alive && self.server.registry.len() > capacity {
            return Some(format!("C-6.1: pod {} has more registrations than room", self.id));
        }
        let daemon = self.daemon.as_ref()?;
        if daemon.admission.taken(RESOURCE_RUNS) > Amount::whole(CAPACITY) {
            return Some(format!(
                "C-6.1: pod {} has admitted more than its capacity",
                self.id
            ));
        }
        daemon.drivers.values().find_map(|driver| {
            let entry = driver.entry.as_ref().filter(|it| !it.slot.is_free())?;
            let called = daemon.calls.values().any(|it| Arc::ptr_eq(&it.entry, entry));
            let leaked = !called && !driver.looks();
            leaked.then(|| {
                format!(
                    "C-5.3: the slot of {} on pod {} is taken by nobody",
                    driver.key, self.id
                )
            })
        })
    }
}
