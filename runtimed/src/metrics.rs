//! Every metric of this binary: name, unit, labels.

use kruntimes_ops::metrics::Metrics;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
};

/// Clones share the numbers.
#[derive(Debug, Clone, Default)]
pub struct Numbers {
    /// `kruntimes_runtimed_invocations_total{outcome}`: calls of the hop by outcome: `ok`,
    /// `CallerGone` or the reason of the failure.
    pub invocations: Family<Outcome, Counter>,
    /// `kruntimes_runtimed_audit_dropped_total`: audit lines nobody took in time.
    pub audit_dropped: Counter,
    /// `kruntimes_runtimed_registrations_total{outcome}`: `ok` or the reason of the fault.
    pub registrations: Family<Outcome, Counter>,
    /// `kruntimes_runtimed_status_writes_total{outcome}`: `ok`, `conflict`, `gone` or `failed`.
    pub writes: Family<Outcome, Counter>,
    /// `kruntimes_runtimed_runs`: Runs this Pod holds.
    pub runs: Gauge,
    /// `kruntimes_runtimed_isolated`: 1 while calls are refused for lack of contact to Kubernetes.
    pub isolated: Gauge,
}

/// A word of a closed list.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Outcome {
    /// The word.
    pub outcome: &'static str,
}

// === impl Numbers ===

impl Numbers {
    /// Names them all.
    #[must_use]
    pub fn register(metrics: &mut Metrics) -> Self {
        let numbers = Self::default();
        let registry = metrics.kruntimes();
        registry.register(
            "runtimed_invocations",
            "Calls of the hop by outcome",
            numbers.invocations.clone(),
        );
        registry.register(
            "runtimed_audit_dropped",
            "Audit lines that were dropped because nobody took them in time",
            numbers.audit_dropped.clone(),
        );
        registry.register(
            "runtimed_registrations",
            "Registrations by outcome",
            numbers.registrations.clone(),
        );
        registry.register(
            "runtimed_status_writes",
            "Writes of Runs by outcome",
            numbers.writes.clone(),
        );
        registry.register("runtimed_runs", "Runs this Pod holds", numbers.runs.clone());
        registry.register(
            "runtimed_isolated",
            "1 while calls are refused for lack of contact to Kubernetes",
            numbers.isolated.clone(),
        );
        numbers
    }
}

/// Counts one.
pub fn count(family: &Family<Outcome, Counter>, outcome: &'static str) {
    family.get_or_create(&Outcome { outcome }).inc();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_manual() {
        let mut metrics = Metrics::new();
        let numbers = Numbers::register(&mut metrics);
        count(&numbers.invocations, "ok");
        numbers.audit_dropped.inc();
        let page = metrics.encode().unwrap();
        for line in [
            "kruntimes_runtimed_invocations_total{outcome=\"ok\"} 1\n",
            "kruntimes_runtimed_audit_dropped_total 1\n",
        ] {
            assert!(page.contains(line), "{line} in {page}");
        }
    }
}
