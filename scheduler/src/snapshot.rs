//! The Pods of one Runtime, their capacity and use, at one instant.

use std::collections::{BTreeMap, BTreeSet};

use kruntimes_api::keys::PodUid;
use tokio::time::Instant;

use crate::{
    assumed::Assumed,
    facts::{Amounts, ObjectKey, add, demand},
    world::World,
};

/// Labels of a Run.
pub type Labels = BTreeMap<String, String>;

/// What placing decides on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// By name.
    pub pods: Vec<Candidate>,
}

/// One Pod.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    pub name: String,
    pub uid: PodUid,
    /// Serves, has a fresh heartbeat of its own and does not drain.
    pub available: bool,
    /// Modes its Runtime Server supports; empty without a heartbeat.
    pub modes: BTreeSet<String>,
    pub capacity: Amounts,
    /// Taken by the Runs it holds and by assumed ones.
    pub used: Amounts,
    /// Labels of those Runs.
    pub neighbours: Vec<Labels>,
}

// === impl Snapshot ===

impl Snapshot {
    /// The Pods of `runtime` as known at `now`.
    pub fn take(world: &World, assumed: &Assumed, runtime: &ObjectKey, now: Instant) -> Self {
        let pods = world
            .pods_of(runtime)
            .map(|pod| {
                let mut used = Amounts::new();
                let mut neighbours = Vec::new();
                let mut held = BTreeSet::new();
                for run in world.runs_on(pod.uid.as_str()) {
                    // A request that cannot be read was never assigned by us.
                    add(&mut used, &demand(run).unwrap_or_default());
                    neighbours.push(run.metadata.labels.clone().unwrap_or_default());
                    held.extend(run.run_uid());
                }
                for (run, reservation) in assumed.on(&pod.uid) {
                    if !held.contains(run) {
                        add(&mut used, &reservation.demand);
                        neighbours.push(reservation.labels.clone());
                    }
                }
                let beat = world.fresh_beat(pod, now);
                Candidate {
                    name: pod.key.name.clone(),
                    uid: pod.uid.clone(),
                    available: pod.serves && beat.is_some() && !world.is_passed_over(pod.uid.as_str(), now),
                    modes: beat.map(|it| it.modes.clone()).unwrap_or_default(),
                    capacity: pod.capacity.clone(),
                    used,
                    neighbours,
                }
            })
            .collect();
        Self { pods }
    }

    /// Leaves out this Pod, unless there is no other one.
    pub fn avoid(&mut self, pod_uid: &str) {
        let is = |it: &Candidate| it.uid.as_str() == pod_uid;
        if self.pods.iter().any(|it| it.available && !is(it)) {
            for pod in self.pods.iter_mut().filter(|it| is(it)) {
                pod.available = false;
            }
        }
    }
}

// === impl Candidate ===

impl Candidate {
    /// Whether functions can be registered here (C-6.7).
    pub fn supports(&self, mode: &str) -> bool {
        self.modes.contains(mode)
    }

    /// A Pod for tests: available, function mode, nothing on it.
    #[cfg(test)]
    pub(crate) fn free(name: &str, capacity: &[(&str, u64)]) -> Self {
        use kruntimes_api::{fixtures, names::MODE_FUNCTION, quantity::Amount};
        Self {
            name: name.to_owned(),
            uid: PodUid::new(fixtures::uid(name)).expect("not empty"),
            available: true,
            modes: [MODE_FUNCTION.to_owned()].into(),
            capacity: capacity
                .iter()
                .map(|(name, it)| ((*name).to_owned(), Amount::whole(*it)))
                .collect(),
            used: Amounts::new(),
            neighbours: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
    use kruntimes_api::{fixtures, names::MODE_FUNCTION, quantity::Amount};

    use super::*;
    use crate::{
        facts::{self, BeatFacts, PodFacts},
        world::{HEARTBEAT_FRESH, Wakes},
    };

    fn pod(name: &str) -> PodFacts {
        facts::serving(name, 2)
    }

    fn beat(pod: &PodFacts, second: i64) -> BeatFacts {
        BeatFacts {
            key: pod.beat(),
            runtime: "python".to_owned(),
            holder: pod.uid.as_str().to_owned(),
            renewed: Some(MicroTime(Timestamp::from_second(second).unwrap())),
            modes: [MODE_FUNCTION.to_owned()].into(),
        }
    }

    fn available(world: &World, now: Instant) -> bool {
        let pool = ObjectKey::new("ns", "python");
        Snapshot::take(world, &Assumed::default(), &pool, now).pods[0].available
    }

    /// C-7.1
    #[test]
    fn a_heartbeat_is_aged_from_when_we_saw_it_change() {
        let mut world = World::default();
        let mut wakes = Wakes::default();
        let start = Instant::now();
        world.apply_pod(pod("a"), &mut wakes);
        assert!(!available(&world, start), "no heartbeat");
        // Its own clock is years behind ours: that says nothing about its age.
        world.apply_beat(beat(&pod("a"), 0), start, &mut wakes);
        assert!(available(&world, start));
        // The same object again (a re-list, a label) does not make it younger.
        world.apply_beat(beat(&pod("a"), 0), start + Duration::from_secs(20), &mut wakes);
        assert!(!available(&world, start + HEARTBEAT_FRESH));
        world.apply_beat(beat(&pod("a"), 10), start + HEARTBEAT_FRESH, &mut wakes);
        assert!(available(&world, start + HEARTBEAT_FRESH));
    }

    #[test]
    fn a_draining_pod_is_passed_over_for_a_moment() {
        let mut world = World::default();
        let mut wakes = Wakes::default();
        let start = Instant::now();
        world.apply_pod(pod("a"), &mut wakes);
        world.apply_beat(beat(&pod("a"), 0), start, &mut wakes);
        world.pass_over(pod("a").uid.as_str(), start);
        assert!(!available(&world, start + Duration::from_secs(4)));
        assert!(available(&world, start + Duration::from_secs(5)));
    }

    #[test]
    fn an_old_heartbeat_found_in_a_list_counts_only_after_it_changes() {
        let mut world = World::default();
        let mut wakes = Wakes::default();
        let start = Instant::now();
        let wall = Timestamp::from_second(1000).unwrap();
        world.apply_pod(pod("a"), &mut wakes);
        world.reset_beats(None, vec![beat(&pod("a"), 900)], start, wall, &mut wakes);
        assert!(!available(&world, start));
        world.apply_beat(beat(&pod("a"), 901), start, &mut wakes);
        assert!(available(&world, start));
        let mut recent = World::default();
        recent.apply_pod(pod("a"), &mut wakes);
        recent.reset_beats(None, vec![beat(&pod("a"), 995)], start, wall, &mut wakes);
        assert!(available(&recent, start));
    }

    #[test]
    fn a_heartbeat_of_another_pod_of_that_name_does_not_count() {
        let mut world = World::default();
        let mut wakes = Wakes::default();
        let mut stranger = beat(&pod("a"), 0);
        stranger.holder = fixtures::uid("another");
        world.apply_beat(stranger, Instant::now(), &mut wakes);
        world.apply_pod(pod("a"), &mut wakes);
        assert!(!available(&world, Instant::now()));
    }

    #[test]
    fn use_is_what_the_pod_holds_and_what_is_assumed_once_each() {
        let mut world = World::default();
        let mut wakes = Wakes::default();
        world.apply_pod(pod("a"), &mut wakes);
        let held = fixtures::run("ns", "held").ready_on("a").build();
        let mut assumed = Assumed::default();
        for run in [&held, &fixtures::run("ns", "coming").build()] {
            let reservation = crate::assumed::Reservation {
                pod: pod("a").uid,
                attempt: kruntimes_api::keys::Attempt::FIRST,
                demand: demand(run).unwrap(),
                labels: Labels::new(),
            };
            assumed.reserve(run.run_uid().unwrap(), reservation);
        }
        world.apply_run(held, &mut wakes);
        let ended = fixtures::run("ns", "ended")
            .ready_on("a")
            .ended(kruntimes_api::run::Phase::Timeout, "IdleTimeout");
        world.apply_run(ended.build(), &mut wakes);
        let pool = ObjectKey::new("ns", "python");
        let snapshot = Snapshot::take(&world, &assumed, &pool, Instant::now());
        assert_eq!(snapshot.pods[0].used["runs"], Amount::whole(2));
    }
}
