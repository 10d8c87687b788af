//! Reservations of assignments that the watch has not shown yet.
//!
//! Between the write of an assignment and its return by the watch, the index still shows the Run
//! as waiting and its Pod as free. What is assumed here is counted as used, so that no second
//! Run gets the same room.

use std::collections::{BTreeMap, HashMap};

use kruntimes_api::{
    Run,
    keys::{Attempt, PodUid, RunUid},
};

use crate::facts::Amounts;

/// Assignments under way, by Run.
#[derive(Debug, Default)]
pub struct Assumed {
    by_run: HashMap<RunUid, Reservation>,
}

/// What one assignment takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reservation {
    pub pod: PodUid,
    /// The attempt that the assignment begins.
    pub attempt: Attempt,
    pub demand: Amounts,
    /// Labels of the Run, for the affinity of others.
    pub labels: BTreeMap<String, String>,
}

// === impl Assumed ===

impl Assumed {
    /// Takes the room, before the assignment is written.
    pub fn reserve(&mut self, run: RunUid, reservation: Reservation) {
        self.by_run.insert(run, reservation);
    }

    /// Gives the room back: the write was refused, so the assignment does not exist.
    pub fn forget(&mut self, run: RunUid) {
        self.by_run.remove(&run);
    }

    /// What is assumed for a Run.
    pub fn of(&self, run: RunUid) -> Option<&Reservation> {
        self.by_run.get(&run)
    }

    /// Reservations on a Pod, with the Runs they are for.
    pub fn on<'a>(&'a self, pod: &'a PodUid) -> impl Iterator<Item = (&'a RunUid, &'a Reservation)> {
        self.by_run.iter().filter(move |(_, it)| it.pod == *pod)
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.by_run.len()
    }

    /// Compares with what the watch shows: from the assumed attempt on, the Run counts by itself.
    /// An older state of it, delivered late, changes nothing.
    pub fn settle(&mut self, run: &Run) {
        let Some(uid) = run.run_uid() else { return };
        let Some(reservation) = self.by_run.get(&uid) else {
            return;
        };
        if run.phase().is_terminal() || run.attempt().is_some_and(|it| it >= reservation.attempt) {
            self.by_run.remove(&uid);
        }
    }

    /// The Run is gone.
    pub fn gone(&mut self, run: RunUid) {
        self.by_run.remove(&run);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap as Map;

    use kruntimes_api::{fixtures, quantity::Amount};
    use proptest::prelude::*;
    use tokio::time::Instant;

    use super::*;
    use crate::{
        cycle::{self, Outcome},
        facts::{self, BeatFacts, ObjectKey},
        snapshot::Snapshot,
        world::{Wakes, World},
    };

    fn reservation(pod: &str, attempt: i32) -> Reservation {
        Reservation {
            pod: PodUid::new(fixtures::uid(pod)).unwrap(),
            attempt: Attempt::new(attempt).unwrap(),
            demand: Amounts::from([("runs".to_owned(), Amount::whole(1))]),
            labels: BTreeMap::new(),
        }
    }

    #[test]
    fn a_late_older_state_does_not_free_the_room() {
        let mut assumed = Assumed::default();
        let pending = fixtures::run("ns", "n").build();
        let uid = pending.run_uid().unwrap();
        assumed.reserve(uid, reservation("pod-a", 2));
        assumed.settle(&pending);
        assumed.settle(&fixtures::run("ns", "n").attempt(1).scheduled_on("pod-a").build());
        assert_eq!(assumed.count(), 1);
        assumed.settle(&fixtures::run("ns", "n").attempt(2).scheduled_on("pod-a").build());
        assert_eq!(assumed.count(), 0);
    }

    #[test]
    fn an_end_frees_the_room() {
        let mut assumed = Assumed::default();
        let ended = fixtures::run("ns", "n")
            .ended(kruntimes_api::run::Phase::Cancelled, "Cancelled")
            .build();
        assumed.reserve(ended.run_uid().unwrap(), reservation("pod-a", 1));
        assumed.settle(&ended);
        assert_eq!(assumed.count(), 0);
    }

    /// What may happen, in any order: the API holds the truth, the watch shows it late.
    #[derive(Debug, Clone)]
    enum Event {
        Create(u8, u8),
        Place(u8),
        /// The write is refused by the API (somebody wrote between).
        Refuse(u8),
        /// The watch delivers the oldest change that it has not delivered yet.
        Deliver,
        End(u8),
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let run = 0u8..12;
        let event = prop_oneof![
            (run.clone(), 1u8..4).prop_map(|(run, size)| Event::Create(run, size)),
            run.clone().prop_map(Event::Place),
            run.clone().prop_map(Event::Place),
            run.clone().prop_map(Event::Refuse),
            Just(Event::Deliver),
            run.prop_map(Event::End),
        ];
        proptest::collection::vec(event, 1..80)
    }

    const CAPACITY: u64 = 4;

    fn world() -> World {
        let mut world = World::default();
        let mut wakes = Wakes::default();
        for name in ["pod-a", "pod-b"] {
            let pod = facts::serving(name, CAPACITY);
            let beat = BeatFacts {
                key: pod.beat(),
                runtime: "python".to_owned(),
                holder: pod.uid.as_str().to_owned(),
                renewed: None,
                modes: ["function".to_owned()].into(),
            };
            world.apply_beat(beat, Instant::now(), &mut wakes);
            world.apply_pod(pod, &mut wakes);
        }
        world
    }

    fn sized(run: u8, size: u8) -> fixtures::RunBuilder {
        fixtures::run("ns", &format!("r{run}")).with(|it| {
            it.spec.resources =
                serde_json::from_value(serde_json::json!({ "requests": { "runs": size } })).unwrap();
        })
    }

    proptest! {
        /// C-7.1
        #[test]
        fn no_pod_is_ever_over_its_capacity(events in events()) {
            let mut world = world();
            let mut assumed = Assumed::default();
            let mut wakes = Wakes::default();
            // The API: Run → (size, Pod while assigned, attempt).
            let mut api: Map<u8, (u8, Option<String>, i32)> = Map::new();
            let mut undelivered: Vec<Run> = Vec::new();
            for event in events {
                match event {
                    Event::Create(run, size) => {
                        if let std::collections::hash_map::Entry::Vacant(entry) = api.entry(run) {
                            entry.insert((size, None, 0));
                            undelivered.push(sized(run, size).build());
                        }
                    }
                    Event::Place(run) | Event::Refuse(run) => {
                        let key = ObjectKey::new("ns", format!("r{run}"));
                        let Some(seen) = world.run(&key).cloned() else { continue };
                        let uid = seen.run_uid().unwrap();
                        if seen.assignment().is_some() || assumed.of(uid).is_some() {
                            continue;
                        }
                        let pool = ObjectKey::new("ns", "python");
                        let snapshot = Snapshot::take(&world, &assumed, &pool, Instant::now());
                        let ask = cycle::Ask::of(&seen).unwrap();
                        let Outcome::Placed { pod, uid: pod_uid } = cycle::place(&ask, &snapshot, None) else { continue };
                        let attempt = seen.attempt().map_or(Attempt::FIRST, Attempt::next);
                        let demand = ask.demand.clone();
                        assumed.reserve(uid, Reservation { pod: pod_uid, attempt, demand, labels: BTreeMap::new() });
                        let truth = api.get_mut(&run).unwrap();
                        // Guarded by resourceVersion: it passes only if what we saw is the newest.
                        let stale = truth.2 != seen.attempt().map_or(0, Attempt::get) || truth.1.is_some();
                        if stale || matches!(event, Event::Refuse(_)) {
                            assumed.forget(uid);
                            continue;
                        }
                        *truth = (truth.0, Some(pod.clone()), attempt.get());
                        undelivered.push(sized(run, truth.0).attempt(attempt.get()).scheduled_on(&pod).build());
                    }
                    Event::Deliver => {
                        if !undelivered.is_empty() {
                            let run = undelivered.remove(0);
                            assumed.settle(&run);
                            world.apply_run(run, &mut wakes);
                        }
                    }
                    Event::End(run) => {
                        if let Some(truth) = api.get_mut(&run).filter(|it| it.1.is_some()) {
                            truth.1 = None;
                            undelivered.push(sized(run, truth.0).attempt(truth.2).build());
                        }
                    }
                }
                for pod in ["pod-a", "pod-b"] {
                    let used: u64 = api.values().filter(|it| it.1.as_deref() == Some(pod)).map(|it| u64::from(it.0)).sum();
                    prop_assert!(used <= CAPACITY, "{pod} holds {used}");
                }
            }
        }
    }
}
