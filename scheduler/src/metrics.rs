//! Every metric of this binary. All are alpha; labels come from closed lists.

use kruntimes_ops::metrics::{Metrics as Registry, latency};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
};

/// Handles to the metrics; clones share them.
#[derive(Debug, Clone)]
pub struct Metrics {
    /// `kruntimes_scheduler_leader`: 1 while this process leads.
    pub leader: Gauge,
    /// `kruntimes_scheduler_waiting_runs`: Runs that wait for a Pod, at the last look.
    pub waiting_runs: Gauge,
    /// `kruntimes_scheduler_assumed_runs`: assignments that the watch has not shown yet.
    pub assumed_runs: Gauge,
    /// `kruntimes_scheduler_queue_length`: Runs that are to be looked at, now or later.
    pub queue_length: Gauge,
    /// `kruntimes_scheduler_cycle_duration_seconds`: one look at one Run, its write included.
    pub cycle: Histogram,
    /// `kruntimes_scheduler_run_writes_total{about,result}`.
    pub run_writes: Family<WriteLabels, Counter>,
    /// `kruntimes_scheduler_pool_writes_total{kind,result}`.
    pub pool_writes: Family<PoolLabels, Counter>,
    /// `kruntimes_scheduler_peer_certificate_not_after_seconds`: end of the gateway's client certificate.
    pub peer_not_after: Gauge,
}

/// One write to a Run.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WriteLabels {
    /// `assign`, `wait`, `recover`, …
    pub about: &'static str,
    /// `done`, `conflict`, `refused`, `unknown`.
    pub result: &'static str,
}

/// One write to an object of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PoolLabels {
    /// Kind of the object.
    pub kind: &'static str,
    /// `done` or `failed`.
    pub result: &'static str,
}

// === impl Metrics ===

impl Metrics {
    /// Registers all of them.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            leader: Gauge::default(),
            waiting_runs: Gauge::default(),
            assumed_runs: Gauge::default(),
            queue_length: Gauge::default(),
            cycle: latency(),
            run_writes: Family::default(),
            pool_writes: Family::default(),
            peer_not_after: Gauge::default(),
        };
        let r = registry.kruntimes();
        r.register(
            "scheduler_leader",
            "1 while this process leads",
            metrics.leader.clone(),
        );
        r.register(
            "scheduler_waiting_runs",
            "Runs that wait for a Pod",
            metrics.waiting_runs.clone(),
        );
        r.register(
            "scheduler_assumed_runs",
            "Assignments the watch has not shown yet",
            metrics.assumed_runs.clone(),
        );
        r.register(
            "scheduler_queue_length",
            "Runs to be looked at, now or later",
            metrics.queue_length.clone(),
        );
        r.register(
            "scheduler_cycle_duration_seconds",
            "One look at one Run, its write included",
            metrics.cycle.clone(),
        );
        r.register(
            "scheduler_run_writes",
            "Writes to Runs",
            metrics.run_writes.clone(),
        );
        r.register(
            "scheduler_pool_writes",
            "Writes to objects of pools",
            metrics.pool_writes.clone(),
        );
        r.register(
            "scheduler_peer_certificate_not_after_seconds",
            "End of the gateway's client certificate, since the epoch",
            metrics.peer_not_after.clone(),
        );
        metrics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_scrape() {
        let mut registry = Registry::new();
        let metrics = Metrics::register(&mut registry);
        metrics.leader.set(1);
        metrics
            .run_writes
            .get_or_create(&WriteLabels {
                about: "assign",
                result: "done",
            })
            .inc();
        let page = registry.encode().unwrap();
        for line in [
            "kruntimes_scheduler_leader 1\n",
            "kruntimes_scheduler_run_writes_total{about=\"assign\",result=\"done\"} 1\n",
            "kruntimes_scheduler_cycle_duration_seconds_count 0\n",
        ] {
            assert!(page.contains(line), "{line} in\n{page}");
        }
    }
}
