//! Every metric of this binary: name, unit, labels. Prefix `kruntimes_`.

use std::time::Duration;

use kruntimes_ops::metrics::latency;
use kruntimes_proto::failure::Failure;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::outcome::Answer;

/// All of them.
#[derive(Debug)]
pub struct Metrics {
    calls: Family<Outcome, Counter>,
    call_duration: Histogram,
    starts: Family<Started, Counter>,
    isolation_level: Gauge,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Started {
    result: &'static str,
}

impl Metrics {
    /// Registers them.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            calls: Family::default(),
            call_duration: latency(),
            starts: Family::default(),
            isolation_level: Gauge::default(),
        };
        registry.register(
            "runtime_server_invocations",
            "Calls that reached a worker, by outcome: ok or the reason of the failure",
            metrics.calls.clone(),
        );
        registry.register(
            "runtime_server_invocation_duration_seconds",
            "From a worker's free moment to the end of the call, seconds",
            metrics.call_duration.clone(),
        );
        registry.register(
            "runtime_server_worker_starts",
            "Worker processes started, by result: ready or failed",
            metrics.starts.clone(),
        );
        registry.register(
            "runtime_server_isolation_level",
            "Isolation of workers: 0 session and limits, 1 also Landlock and seccomp",
            metrics.isolation_level.clone(),
        );
        metrics
    }

    /// A call ended.
    pub fn call(&self, answer: &Result<Answer, Failure>, took: Duration) {
        let outcome = answer
            .as_ref()
            .map_or_else(|failure| failure.reason.as_str(), |_| "ok");
        self.calls.get_or_create(&Outcome { outcome }).inc();
        self.call_duration.observe(took.as_secs_f64());
    }

    /// A start ended.
    pub fn start(&self, ready: bool) {
        let result = if ready { "ready" } else { "failed" };
        self.starts.get_or_create(&Started { result }).inc();
    }

    /// What was found at start.
    pub fn isolation_level(&self, level: u8) {
        self.isolation_level.set(i64::from(level));
    }
}
