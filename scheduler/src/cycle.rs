//! One Run × snapshot → a Pod, or why none.

use kruntimes_api::{
    Run,
    keys::PodUid,
    names::{MODE_FUNCTION, MODE_TASK},
    quantity::InvalidQuantity,
    run::{AffinityTerm, WeightedAffinityTerm},
};

use crate::{
    facts::{Amounts, demand, fits},
    filter::{self, Rejection},
    score,
    snapshot::{Labels, Snapshot},
};

/// What a Run asks of a Pod.
#[derive(Debug, Clone, PartialEq)]
pub struct Ask {
    /// The word of its mode in heartbeats.
    pub mode: &'static str,
    pub demand: Amounts,
    pub labels: Labels,
    pub affinity: Vec<AffinityTerm>,
    pub anti_affinity: Vec<AffinityTerm>,
    pub preferred: Vec<WeightedAffinityTerm>,
    pub anti_preferred: Vec<WeightedAffinityTerm>,
}

/// Where a Run goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// To this Pod.
    Placed { pod: String, uid: PodUid },
    /// Nowhere for now.
    Wait(Wait),
    /// Nowhere ever: it asks for more of this resource than any Pod has.
    NeverFits { resource: String },
}

/// Why a Run waits; a closed list, so that the same state always reads the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wait {
    NoRuntime,
    NoPodReady,
    FunctionModeUnsupported,
    TaskModeUnsupported,
    CapacityFull,
    UnsatisfiedRunAffinity,
    UnsatisfiedRunAntiAffinity,
}

/// Finds the Pod for a Run. `declared` is the capacity that the Runtime gives each Pod.
pub fn place(ask: &Ask, snapshot: &Snapshot, declared: Option<&Amounts>) -> Outcome {
    let mut feasible = Vec::new();
    let mut closest: Option<Rejection> = None;
    for pod in &snapshot.pods {
        match filter::feasible(ask, pod, snapshot) {
            Ok(()) => feasible.push(pod),
            Err(rejection) => closest = closest.max(Some(rejection)),
        }
    }
    if let Some(pod) = score::best(ask, &feasible) {
        return Outcome::Placed {
            pod: pod.name.clone(),
            uid: pod.uid.clone(),
        };
    }
    // Pods of an older template may have more than the Runtime now gives.
    let none = Amounts::new();
    if let Some(declared) = declared
        && !snapshot
            .pods
            .iter()
            .any(|pod| fits(&ask.demand, &none, &pod.capacity))
        && let Some(resource) = lacking(&ask.demand, declared)
    {
        return Outcome::NeverFits { resource };
    }
    Outcome::Wait(match closest {
        None | Some(Rejection::NotAvailable) => Wait::NoPodReady,
        Some(Rejection::ModeUnsupported) if ask.mode == MODE_TASK => Wait::TaskModeUnsupported,
        Some(Rejection::ModeUnsupported) => Wait::FunctionModeUnsupported,
        Some(Rejection::Full) => Wait::CapacityFull,
        Some(Rejection::Affinity) => Wait::UnsatisfiedRunAffinity,
        Some(Rejection::AntiAffinity) => Wait::UnsatisfiedRunAntiAffinity,
    })
}

/// The first resource of which an empty Pod has too little.
fn lacking(demand: &Amounts, capacity: &Amounts) -> Option<String> {
    let short = |(name, amount): &(&String, _)| capacity.get(*name).is_none_or(|whole| *amount > whole);
    demand.iter().find(short).map(|(name, _)| name.clone())
}

// === impl Ask ===

impl Ask {
    /// Reads what the Run asks.
    ///
    /// # Errors
    /// When a request is no quantity.
    pub fn of(run: &Run) -> Result<Self, InvalidQuantity> {
        let affinity = run.spec.affinity.clone().unwrap_or_default();
        let near = affinity.run_affinity.unwrap_or_default();
        let apart = affinity.run_anti_affinity.unwrap_or_default();
        Ok(Self {
            mode: if run.spec.mode.function.is_some() {
                MODE_FUNCTION
            } else {
                MODE_TASK
            },
            demand: demand(run)?,
            labels: run.metadata.labels.clone().unwrap_or_default(),
            affinity: near
                .required_during_scheduling_ignored_during_execution
                .unwrap_or_default(),
            anti_affinity: apart
                .required_during_scheduling_ignored_during_execution
                .unwrap_or_default(),
            preferred: near
                .preferred_during_scheduling_ignored_during_execution
                .unwrap_or_default(),
            anti_preferred: apart
                .preferred_during_scheduling_ignored_during_execution
                .unwrap_or_default(),
        })
    }
}

// === impl Wait ===

impl Wait {
    /// Every reason, for metrics.
    pub const ALL: [Self; 7] = [
        Self::NoRuntime,
        Self::NoPodReady,
        Self::FunctionModeUnsupported,
        Self::TaskModeUnsupported,
        Self::CapacityFull,
        Self::UnsatisfiedRunAffinity,
        Self::UnsatisfiedRunAntiAffinity,
    ];

    /// The reason of the Scheduled condition.
    pub fn reason(self) -> &'static str {
        match self {
            Self::NoRuntime => "NoRuntime",
            Self::NoPodReady => "NoPodReady",
            Self::FunctionModeUnsupported => "FunctionModeUnsupported",
            Self::TaskModeUnsupported => "TaskModeUnsupported",
            Self::CapacityFull => "CapacityFull",
            Self::UnsatisfiedRunAffinity => "UnsatisfiedRunAffinity",
            Self::UnsatisfiedRunAntiAffinity => "UnsatisfiedRunAntiAffinity",
        }
    }

    /// One line for people. It names the Runtime and nothing that changes from look to look.
    pub fn message(self, runtime: &str) -> String {
        match self {
            Self::NoRuntime => {
                format!(
                    "no Runtime named {runtime} in this namespace; create it, or create the Run with another spec.runtime"
                )
            }
            Self::NoPodReady => {
                format!(
                    "no Pod of Runtime {runtime} is ready with a fresh heartbeat; see `kubectl get pods -l runtime={runtime}`"
                )
            }
            Self::FunctionModeUnsupported => format!("no Pod of Runtime {runtime} supports function mode"),
            Self::TaskModeUnsupported => {
                format!(
                    "no Pod supports task mode yet: the Pods of Runtime {runtime} register functions only"
                )
            }
            Self::CapacityFull => format!("every ready Pod of Runtime {runtime} is full"),
            Self::UnsatisfiedRunAffinity => {
                format!(
                    "no Pod of Runtime {runtime} with room holds the Runs that spec.affinity.runAffinity requires"
                )
            }
            Self::UnsatisfiedRunAntiAffinity => {
                format!(
                    "every Pod of Runtime {runtime} with room holds a Run that spec.affinity.runAntiAffinity forbids"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kruntimes_api::{fixtures, quantity::Amount};
    use serde_json::json;

    use super::*;
    use crate::snapshot::Candidate;

    fn ask(requests: serde_json::Value) -> Ask {
        let run = fixtures::run("ns", "n").with(|it| {
            it.spec.resources = serde_json::from_value(json!({ "requests": requests })).unwrap();
        });
        Ask::of(&run.build()).unwrap()
    }

    fn pods(pods: Vec<Candidate>) -> Snapshot {
        Snapshot { pods }
    }

    /// C-7.1
    #[test]
    fn a_run_goes_to_a_pod_that_fits_every_requested_resource() {
        let mut small = Candidate::free("a", &[("runs", 8), ("memory", 10)]);
        small.used.insert("memory".to_owned(), Amount::whole(8));
        let big = Candidate::free("b", &[("runs", 1), ("memory", 10)]);
        let outcome = place(
            &ask(json!({ "memory": 5 })),
            &pods(vec![small, big.clone()]),
            None,
        );
        assert_eq!(
            outcome,
            Outcome::Placed {
                pod: "b".to_owned(),
                uid: big.uid
            }
        );
    }

    #[test]
    fn the_reason_is_that_of_the_pod_that_came_closest() {
        let plain = ask(json!({}));
        let down = Candidate {
            available: false,
            ..Candidate::free("down", &[("runs", 2)])
        };
        let mut full = Candidate::free("full", &[("runs", 2)]);
        full.used.insert("runs".to_owned(), Amount::whole(2));
        let other_mode = Candidate {
            modes: ["task".to_owned()].into(),
            ..Candidate::free("t", &[("runs", 2)])
        };
        let wait = |pods: Vec<Candidate>| match place(&plain, &self::pods(pods), None) {
            Outcome::Wait(wait) => wait,
            other => unreachable!("{other:?}"),
        };
        assert_eq!(wait(vec![]), Wait::NoPodReady);
        assert_eq!(wait(vec![down.clone()]), Wait::NoPodReady);
        assert_eq!(
            wait(vec![down.clone(), other_mode.clone()]),
            Wait::FunctionModeUnsupported
        );
        assert_eq!(wait(vec![full, down, other_mode]), Wait::CapacityFull);
    }

    /// C-5.7
    #[test]
    fn a_task_waits_where_only_functions_run() {
        let task = Ask::of(&fixtures::run("ns", "n").task().build()).unwrap();
        let outcome = place(&task, &pods(vec![Candidate::free("a", &[("runs", 2)])]), None);
        assert_eq!(outcome, Outcome::Wait(Wait::TaskModeUnsupported));
        assert!(
            Wait::TaskModeUnsupported
                .message("python")
                .starts_with("no Pod supports task mode yet")
        );
    }

    /// C-7.1: a request no Pod could ever fit.
    #[test]
    fn more_than_a_whole_pod_never_fits_but_a_full_pod_is_waited_for() {
        let declared = Amounts::from([("runs".to_owned(), Amount::whole(2))]);
        let never = |requests, snapshot: &Snapshot| place(&ask(requests), snapshot, Some(&declared));
        let none = pods(vec![]);
        assert_eq!(
            never(json!({ "runs": 3 }), &none),
            Outcome::NeverFits {
                resource: "runs".to_owned()
            }
        );
        assert_eq!(
            never(json!({ "gpu": 1 }), &none),
            Outcome::NeverFits {
                resource: "gpu".to_owned()
            }
        );
        assert_eq!(
            never(json!({ "runs": 2 }), &none),
            Outcome::Wait(Wait::NoPodReady)
        );
        let mut older = Candidate::free("older", &[("runs", 4)]);
        older.used.insert("runs".to_owned(), Amount::whole(4));
        assert_eq!(
            never(json!({ "runs": 3 }), &pods(vec![older])),
            Outcome::Wait(Wait::CapacityFull)
        );
    }
}
