//! Every metric of this binary: name, unit, labels, once.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64},
    },
    time::Duration,
};

use kruntimes_ops::metrics::{self, Metrics as Registered};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric},
    metrics::{
        MetricType, counter::Counter, exemplar::HistogramWithExemplars, family::Family, gauge::ConstGauge,
        gauge::Gauge, histogram::Histogram,
    },
    registry::Unit,
};

use crate::{
    admit::Admission,
    error::Row,
    hop::channels::Channels,
    routes::{shared::Shared, watch::RouteAge},
};

/// Handles of what is counted while it happens; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Metrics {
    requests: Family<Answered, Counter>,
    durations: Durations,
    authorizations: Family<Authorized, Counter>,
    reviews: Reviews,
    handshakes: Family<Handshake, Counter>,
    /// Open connections of callers.
    pub connections: Gauge<i64, AtomicI64>,
    /// End of the serving certificate, seconds since the epoch; 0 while there is none.
    pub certificate_not_after: Gauge<i64, AtomicI64>,
    /// The same of the certificate that owners know this gateway by.
    pub peer_certificate_not_after: Gauge<i64, AtomicI64>,
}

/// Where sizes are read at scrape time.
#[derive(Debug)]
pub struct Sources {
    /// The route table.
    pub routes: Arc<Shared>,
    /// When the watch last said anything.
    pub age: RouteAge,
    /// Calls in flight.
    pub admission: Admission,
    /// Connections to owners.
    pub channels: Arc<Channels>,
}

/// How one request ended.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    status: u16,
    reason: &'static str,
    component: &'static str,
}

/// OpenTelemetry's names, without its dots.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Served {
    http_request_method: &'static str,
    http_response_status_code: u16,
    network_protocol_version: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Authorized {
    result: &'static str,
    cached: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Handshake {
    result: &'static str,
}

/// The exemplar of a bucket: the last sampled request that fell into it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Traced {
    trace_id: String,
}

#[derive(Debug, Clone)]
struct Durations(Family<Served, HistogramWithExemplars<Traced>>);

#[derive(Debug, Clone)]
struct Reviews(Histogram);

/// How one request is counted.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    /// HTTP status; 499 when the caller went away.
    pub status: u16,
    /// Reason of the closed list; `OK` for success.
    pub reason: &'static str,
    /// Who answered.
    pub component: &'static str,
    /// `POST`, `GET`, `DELETE` or `other`: callers must not be able to make label values.
    pub method: &'static str,
    /// `1.1` or `2`.
    pub version: &'static str,
    /// From the end of the head to the end of the answer.
    pub took: Duration,
}

// === impl Metrics ===

impl Metrics {
    /// Registers everything under the product's prefix, and OpenTelemetry's histogram under its own name.
    pub fn register(&self, registered: &mut Registered, sources: Sources) {
        registered.unprefixed().register_with_unit(
            "http_server_request_duration",
            "Time from the head of a request to the end of its answer",
            Unit::Seconds,
            self.durations.0.clone(),
        );
        let ours = registered.kruntimes();
        ours.register(
            "gateway_requests",
            "Answers by status, reason and the component that gave them",
            self.requests.clone(),
        );
        ours.register(
            "gateway_authorizations",
            "Access decisions, and whether Kubernetes was asked",
            self.authorizations.clone(),
        );
        ours.register_with_unit(
            "gateway_review_duration",
            "Time of an access review at the API server",
            Unit::Seconds,
            self.reviews.0.clone(),
        );
        ours.register(
            "gateway_handshakes",
            "TLS handshakes of callers by result",
            self.handshakes.clone(),
        );
        ours.register(
            "gateway_connections",
            "Open connections of callers",
            self.connections.clone(),
        );
        ours.register_with_unit(
            "gateway_certificate_not_after",
            "End of the serving certificate since the epoch",
            Unit::Seconds,
            self.certificate_not_after.clone(),
        );
        ours.register_with_unit(
            "gateway_peer_certificate_not_after",
            "End of the certificate that owners know the gateway by, since the epoch",
            Unit::Seconds,
            self.peer_certificate_not_after.clone(),
        );
        ours.register_collector(Box::new(sources));
    }

    /// Counts one answer. The trace of a sampled request becomes the exemplar of its duration.
    pub fn answered(&self, ended: &Ended, trace_id: Option<&impl fmt::Display>) {
        self.requests
            .get_or_create(&Answered {
                status: ended.status,
                reason: ended.reason,
                component: ended.component,
            })
            .inc();
        self.durations
            .0
            .get_or_create(&Served {
                http_request_method: ended.method,
                http_response_status_code: ended.status,
                network_protocol_version: ended.version,
            })
            .observe(
                ended.took.as_secs_f64(),
                trace_id.map(|trace_id| Traced {
                    trace_id: trace_id.to_string(),
                }),
                None,
            );
    }

    /// Counts one handshake: `ok`, `failed`, `timeout`, `displaced` (too many handshakes) or `refused` (too many
    /// connections).
    pub fn shaken(&self, result: &'static str) {
        self.handshakes.get_or_create(&Handshake { result }).inc();
    }
}

impl kruntimes_authz::Observer for Metrics {
    fn authorized(&self, result: &'static str, cached: bool) {
        self.authorizations
            .get_or_create(&Authorized { result, cached })
            .inc();
    }

    fn reviewed(&self, took: Duration) {
        self.reviews.0.observe(took.as_secs_f64());
    }
}

// === impl Sources ===

impl Collector for Sources {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let (known, ready) = self.routes.count();
        let mut gauge = |name: &str, help: &str, value: usize| {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            ConstGauge::new(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?)
        };
        gauge("gateway_routes", "Functions that are known", known)?;
        gauge("gateway_routes_ready", "Functions that can be called", ready)?;
        gauge(
            "gateway_calls_in_flight",
            "Calls that were admitted and are not answered",
            self.admission.in_flight(),
        )?;
        gauge(
            "gateway_owners",
            "Owners that have or had a connection",
            self.channels.count(),
        )?;
        let age = ConstGauge::new(self.age.get().as_secs_f64());
        age.encode(encoder.encode_descriptor(
            "gateway_route_age",
            "Time since the watch on Runs last connected or delivered",
            Some(&Unit::Seconds),
            MetricType::Gauge,
        )?)
    }
}

// === impl Ended ===

impl Ended {
    /// Takes status, reason and component from `row`.
    #[must_use]
    pub fn with(mut self, row: Row) -> Self {
        self.status = row.status;
        self.reason = row.reason;
        self.component = row.component.as_str();
        self
    }
}

impl Default for Durations {
    fn default() -> Self {
        Self(Family::new_with_constructor(|| {
            HistogramWithExemplars::new(metrics::LATENCY_SECONDS.into_iter())
        }))
    }
}

impl Default for Reviews {
    fn default() -> Self {
        Self(metrics::latency())
    }
}

// A counter's type is named once, so that a change of its width is a decision.
const _: fn() -> Counter<u64, AtomicU64> = Counter::default;
