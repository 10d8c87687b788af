//! Which of the feasible Pods is best: preferred neighbours and the least load, each 0..=100 and
//! of the same weight; then the smaller load, then the name, so that the same input always gives
//! the same Pod.

use std::cmp::Ordering;

use crate::{cycle::Ask, filter, snapshot::Candidate};

/// How good a Pod is for a Run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// 0..=200.
    points: u32,
    load: Load,
}

/// How full a Pod would be with the Run on it: the fullest resource first, then all together.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Load {
    /// Share of the fullest resource, 0.0..=1.0.
    fullest: f64,
    /// Sum of the shares of all resources.
    sum: f64,
}

/// The best of `pods`; `None` when there are none.
pub fn best<'a>(ask: &Ask, pods: &[&'a Candidate]) -> Option<&'a Candidate> {
    let most = pods.iter().map(|pod| preference(ask, pod)).max().unwrap_or(0);
    pods.iter()
        .map(|pod| (*pod, Score::of(ask, pod, most)))
        .min_by(|(a, score), (b, other)| score.order(other).then_with(|| a.name.cmp(&b.name)))
        .map(|(pod, _)| pod)
}

// === impl Score ===

impl Score {
    fn of(ask: &Ask, pod: &Candidate, most_preferred: u32) -> Self {
        let preferred = (preference(ask, pod) * 100)
            .checked_div(most_preferred)
            .unwrap_or(0);
        let load = Load::of(ask, pod);
        // Truncation and sign: the share is within 0..=1, as the Pod has room.
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0.0..=100.0"
        )]
        let free = ((1.0 - load.fullest.clamp(0.0, 1.0)) * 100.0).round() as u32;
        Self {
            points: preferred + free,
            load,
        }
    }

    /// Better first.
    fn order(&self, other: &Self) -> Ordering {
        other
            .points
            .cmp(&self.points)
            .then_with(|| self.load.fullest.total_cmp(&other.load.fullest))
            .then_with(|| self.load.sum.total_cmp(&other.load.sum))
    }
}

// === impl Load ===

impl Load {
    fn of(ask: &Ask, pod: &Candidate) -> Self {
        let mut load = Self {
            fullest: 0.0,
            sum: 0.0,
        };
        for (name, whole) in &pod.capacity {
            let used = pod.used.get(name).copied().unwrap_or_default();
            let used = used.plus(ask.demand.get(name).copied().unwrap_or_default());
            if whole.nanos() == 0 {
                continue;
            }
            #[expect(clippy::cast_precision_loss, reason = "a ratio for comparing, not an account")]
            let share = used.nanos() as f64 / whole.nanos() as f64;
            load.fullest = load.fullest.max(share);
            load.sum += share;
        }
        load
    }
}

/// Sum of the weights of the preferred terms that hold.
fn preference(ask: &Ask, pod: &Candidate) -> u32 {
    let weight = |weight: i32| u32::try_from(weight).unwrap_or(0).min(100);
    let near = ask
        .preferred
        .iter()
        .filter(|it| filter::has(pod, &it.run_affinity_term));
    let apart = ask
        .anti_preferred
        .iter()
        .filter(|it| !filter::has(pod, &it.run_affinity_term));
    near.chain(apart).map(|it| weight(it.weight)).sum()
}

#[cfg(test)]
mod tests {
    use kruntimes_api::{fixtures, quantity::Amount};
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::snapshot::Labels;

    fn ask() -> Ask {
        Ask::of(&fixtures::run("ns", "n").build()).unwrap()
    }

    fn used(name: &str, runs: u64) -> Candidate {
        let mut pod = Candidate::free(name, &[("runs", 10)]);
        pod.used.insert("runs".to_owned(), Amount::whole(runs));
        pod
    }

    /// C-7.1
    #[test]
    fn the_least_loaded_wins_then_the_name() {
        let pods = [used("c", 1), used("b", 1), used("a", 5)];
        assert_eq!(best(&ask(), &pods.iter().collect::<Vec<_>>()).unwrap().name, "b");
        assert_eq!(best(&ask(), &[]), None);
    }

    #[test]
    fn the_fullest_resource_counts() {
        let mut starved = Candidate::free("a", &[("runs", 10), ("memory", 10)]);
        starved.used.insert("memory".to_owned(), Amount::whole(9));
        let roomy = used("b", 4);
        assert_eq!(best(&ask(), &[&starved, &roomy]).unwrap().name, "b");
    }

    /// C-7.1: preferred affinity.
    #[test]
    fn a_preferred_neighbour_outweighs_load() {
        let run = fixtures::run("ns", "n").with(|it| {
            it.spec.affinity = serde_json::from_value(json!({ "runAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{ "weight": 7, "runAffinityTerm": {
                    "labelSelector": { "matchLabels": { "app": "db" } }, "topologyKey": "kruntimes.io/runtime-pod" } }],
            } }))
            .unwrap();
        });
        let ask = Ask::of(&run.build()).unwrap();
        let mut friend = used("z", 8);
        friend.neighbours = vec![Labels::from([("app".to_owned(), "db".to_owned())])];
        assert_eq!(best(&ask, &[&used("a", 0), &friend]).unwrap().name, "z");
    }

    proptest! {
        /// C-7.1: a stable tie-break.
        #[test]
        fn the_order_of_the_input_does_not_matter(loads in proptest::collection::vec(0u64..10, 1..8), seed: u64) {
            let pods: Vec<_> = loads.iter().enumerate().map(|(i, runs)| used(&format!("p{i}"), *runs)).collect();
            let straight: Vec<_> = pods.iter().collect();
            let mut turned = straight.clone();
            let middle = usize::try_from(seed % pods.len() as u64).unwrap();
            turned.rotate_left(middle);
            prop_assert_eq!(best(&ask(), &straight), best(&ask(), &turned));
        }
    }
}
