//! A namespace with Pods, heartbeats and Runs, and schedulers that look after it.

pub(crate) mod api;

use std::time::Duration;

use jiff::Timestamp;
use kruntimes_api::{Run, fixtures::RunBuilder, run::Phase};
use kruntimes_ops::{
    drain::{CancellationToken, Drain},
    metrics::Metrics as Registry,
};
use kruntimes_scheduler::{
    args::PullPolicy,
    leader::{self, Context},
    lease::Timing,
    metrics::Metrics,
    pool,
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

pub(crate) use api::Api;

pub(crate) const NS: &str = "ns";

/// Short enough for tests, long enough for a busy machine.
pub(crate) const TIMING: Timing = Timing {
    lease: Duration::from_millis(3000),
    renew_deadline: Duration::from_millis(2000),
    retry: Duration::from_millis(100),
};

thread_local! {
    static ORIGIN: (Timestamp, Instant) = (Timestamp::now(), Instant::now());
}

/// The wall clock, which goes as fast as the clock of tokio: a paused test has both.
pub(crate) fn now() -> Timestamp {
    ORIGIN.with(|(wall, origin)| *wall + Instant::now().saturating_duration_since(*origin))
}

/// A running scheduler. It ends without a word when this drops, as a killed process does.
pub(crate) struct Scheduler {
    stopping: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

impl Scheduler {
    pub(crate) fn start(api: &Api, identity: &str) -> Self {
        Self::start_with(api, identity, TIMING)
    }

    pub(crate) fn start_with(api: &Api, identity: &str, timing: Timing) -> Self {
        let mut registry = Registry::new();
        let context = Context {
            client: api.client(),
            identity: identity.to_owned(),
            system_namespace: "system".to_owned(),
            scopes: Vec::new(),
            pool: pool::Config {
                image: "kruntimes/runtimed:test".to_owned(),
                pull_policy: PullPolicy::IfNotPresent,
                cluster_role: "kruntimes-runtimed".to_owned(),
                gateway_namespace: "system".to_owned(),
                extra_args: Vec::new(),
                egress: None,
                otel: Vec::new(),
            },
            gateway_url: "https://gateway.example".to_owned(),
            serving_secret: "kruntimes-gateway-tls".to_owned(),
            timing,
            clock: now,
            metrics: Metrics::register(&mut registry),
        };
        let stopping = CancellationToken::new();
        let task = Drain::new().spawn("leader", leader::run(context, stopping.clone()));
        Self { stopping, task }
    }

    /// Stops as on SIGTERM.
    pub(crate) async fn stop(mut self) {
        self.stopping.cancel();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An API with Runtime `python` and the gateway's serving certificate.
pub(crate) fn installation() -> Api {
    let api = Api::new();
    make_runtime(&api, "python");
    api
}

pub(crate) fn make_runtime(api: &Api, name: &str) {
    api.put(
        "runtimes",
        json!({
            "apiVersion": "kruntimes.io/v1alpha1", "kind": "Runtime",
            "metadata": { "name": name, "namespace": NS },
            "spec": { "template": { "spec": { "containers": [{ "name": "runtime", "image": "python" }] } } },
        }),
    );
}

/// A Pod that is ready, with a heartbeat; returns its UID.
pub(crate) fn make_pod(api: &Api, name: &str, runs: u32) -> String {
    let uid = api.put(
        "pods",
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "namespace": NS, "labels": { "runtime": "python", "app": "kruntimes-python" },
                "annotations": { "kruntimes.io/capacity.runs": runs.to_string() },
            },
            "spec": { "containers": [{ "name": "runtime", "image": "python" }] },
            "status": { "phase": "Running", "podIP": "10.0.0.1", "conditions": [{ "type": "Ready", "status": "True" }] },
        }),
    );
    beat(api, name, &uid, "function");
    uid
}

pub(crate) fn beat(api: &Api, pod: &str, uid: &str, modes: &str) {
    api.put(
        "leases",
        json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {
                "name": format!("runtimed-{pod}"), "namespace": NS, "labels": { "kruntimes.io/runtime": "python" },
                "annotations": { "kruntimes.io/modes": modes },
            },
            "spec": { "holderIdentity": uid, "renewTime": format!("{:.6}", now()) },
        }),
    );
}

/// A Pod that is ready, with a heartbeat, on a node that Kubernetes hears of; returns its UID.
pub(crate) fn make_pod_on_node(api: &Api, name: &str, runs: u32) -> String {
    let uid = make_pod(api, name, runs);
    make_node(api, "node-1", "True");
    api.edit("pods", NS, name, |it| it["spec"]["nodeName"] = json!("node-1"));
    uid
}

pub(crate) fn make_node(api: &Api, name: &str, ready: &str) {
    api.put(
        "nodes",
        json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": name },
            "status": { "conditions": [{ "type": "Ready", "status": ready }] },
        }),
    );
}

/// Renews the heartbeats of these Pods every 10 s for as long as the story takes.
pub(crate) async fn beating<T>(api: &Api, pods: &[(&str, &str)], story: impl Future<Output = T>) -> T {
    let hearts = async {
        loop {
            sleep(Duration::from_secs(10)).await;
            for (pod, uid) in pods {
                beat(api, pod, uid, "function");
            }
        }
    };
    tokio::select! {
        told = story => told,
        () = hearts => unreachable!("hearts beat for ever"),
    }
}

/// A Run that `pod` has made Ready.
pub(crate) fn ready_on(api: &Api, name: &str, pod: &str, uid: &str) {
    let uid = uid.to_owned();
    let run = kruntimes_api::fixtures::run(NS, name)
        .ready_on(pod)
        .with(move |it| {
            it.status.get_or_insert_default().assigned_pod_uid = Some(uid);
        });
    make_run(api, run);
}

/// Waits until the scheduler has worked off what is queued now.
pub(crate) async fn until_caught_up(api: &Api, sentinel: &str) {
    make_run(api, kruntimes_api::fixtures::run(NS, sentinel).runtime("none"));
    until_waits(api, sentinel, "NoRuntime").await;
}

/// Stores a Run as its author, and those before us, left it.
pub(crate) fn make_run(api: &Api, run: RunBuilder) -> Run {
    let run = run.build();
    api.put("runs", serde_json::to_value(&run).expect("a Run is JSON"));
    run
}

pub(crate) fn run(api: &Api, name: &str) -> Run {
    find_run(api, name).unwrap_or_else(|| panic!("no Run {name}"))
}

pub(crate) fn find_run(api: &Api, name: &str) -> Option<Run> {
    api.get("runs", NS, name)
        .map(|it| serde_json::from_value(it).expect("a Run"))
}

/// Waits until a Run satisfies `is`.
pub(crate) async fn until_run(api: &Api, name: &str, is: impl Fn(&Run) -> bool) -> Run {
    api.until(&format!("Run {name}"), |api| {
        find_run(api, name).filter(|run| is(run))
    })
    .await
}

pub(crate) async fn until_assigned(api: &Api, name: &str) -> Run {
    until_run(api, name, |it| it.assignment().is_some()).await
}

pub(crate) async fn until_waits(api: &Api, name: &str, reason: &str) -> Run {
    until_run(api, name, |it| {
        scheduled_reason(it) == Some(reason) && it.phase() == Phase::Pending
    })
    .await
}

pub(crate) fn scheduled_reason(run: &Run) -> Option<&str> {
    run.condition("Scheduled").map(|it| it.reason.as_str())
}

pub(crate) fn pod_of(run: &Run) -> Option<&str> {
    run.assignment().map(|(name, _)| name)
}

/// What `body` says of a condition: status and reason.
pub(crate) fn says(body: &Value, kind: &str) -> Option<(String, String)> {
    let found = body["status"]["conditions"]
        .as_array()?
        .iter()
        .find(|it| it["type"] == kind)?;
    Some((
        found["status"].as_str()?.to_owned(),
        found["reason"].as_str()?.to_owned(),
    ))
}
