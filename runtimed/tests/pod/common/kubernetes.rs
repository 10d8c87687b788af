//! The part of the Kubernetes API that runtimed uses, in memory: Runs with status subresource, merge
//! patches guarded by version and UID, finalizers, a watch by field selector, and Leases.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Path, RawQuery, State},
    http::{Method, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, patch, post},
};
use kruntimes_api::Run;
use serde_json::{Value, json};
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::Notify,
};

use super::Fate;

/// Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Kubernetes(Arc<Shared>);

#[derive(Default)]
struct Shared {
    store: Mutex<Store>,
    changed: Notify,
    fate: Fate,
}

#[derive(Default)]
struct Store {
    version: u64,
    runs: BTreeMap<String, Value>,
    leases: BTreeMap<String, Value>,
    /// (version, before, after) of each change of a Run.
    history: Vec<(u64, Option<Value>, Option<Value>)>,
    writes: Vec<String>,
    renewals: usize,
    /// Reasons of Events, by Run.
    events: Vec<(String, String)>,
    reads: usize,
    down: bool,
    leases_down: bool,
    /// Watches that began before this version end with 410.
    gone_before: u64,
    hidden_once: HashSet<String>,
    /// The next list shows these as they were.
    old_once: Vec<Value>,
    /// Field by dotted path and text: a status patch that sets it meets a conflict, once.
    conflict_once: usize,
    /// What watches tell is this old.
    watch_delay: Duration,
}

const RUNS: &str = "/apis/kruntimes.io/v1alpha1/namespaces/{namespace}/runs";
const EVENTS: &str = "/apis/events.k8s.io/v1/namespaces/{namespace}/events";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}";

impl Kubernetes {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn client(&self) -> kube::Client {
        let router = Router::new()
            .route(RUNS, get(list_or_watch))
            .route(&format!("{RUNS}/{{name}}"), get(read).patch(write))
            .route(&format!("{RUNS}/{{name}}/status"), patch(write_status))
            .route(LEASES, patch(write_lease))
            .route(EVENTS, post(write_event))
            .route(&format!("{EVENTS}/{{name}}"), patch(write_event))
            .with_state(self.clone());
        kube::Client::new(router, "ns")
    }

    /// Creates or replaces a Run, as a user or the scheduler would.
    pub(crate) fn put(&self, run: &Run) {
        let name = run.metadata.name.clone().expect("a name");
        let after = serde_json::to_value(run).expect("JSON");
        self.store().change(&name, Some(after));
        self.0.changed.notify_waiters();
    }

    /// Changes a Run in place.
    pub(crate) fn edit(&self, name: &str, change: impl FnOnce(&mut Run)) {
        let mut run = self.run(name).expect("the Run exists");
        change(&mut run);
        self.put(&run);
    }

    /// As `kubectl delete`: at once without finalizers, else marked.
    pub(crate) fn delete(&self, name: &str) {
        let mut store = self.store();
        let mut run = store.runs.get(name).cloned().expect("the Run exists");
        if has_finalizers(&run) {
            run["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            store.change(name, Some(run));
        } else {
            store.change(name, None);
        }
        drop(store);
        self.0.changed.notify_waiters();
    }

    pub(crate) fn run(&self, name: &str) -> Option<Run> {
        let value = self.store().runs.get(name).cloned()?;
        Some(serde_json::from_value(value).expect("a Run"))
    }

    pub(crate) fn lease(&self, name: &str) -> Option<Value> {
        self.store().leases.get(name).cloned()
    }

    /// Every write of a Run so far: `status n`, `run n`.
    pub(crate) fn writes(&self) -> Vec<String> {
        self.store().writes.clone()
    }

    /// How often a Lease was renewed.
    pub(crate) fn renewals(&self) -> usize {
        self.store().renewals
    }

    /// Reasons of the Events about a Run, in order.
    pub(crate) fn events(&self, name: &str) -> Vec<String> {
        let store = self.store();
        let about = store.events.iter().filter(|(run, _)| run == name);
        about.map(|(_, reason)| reason.clone()).collect()
    }

    /// How often a Run was read by name.
    pub(crate) fn reads(&self) -> usize {
        self.store().reads
    }

    /// Answers nothing but 503 while `down`.
    pub(crate) fn set_down(&self, down: bool) {
        self.store().down = down;
        self.0.changed.notify_waiters();
    }

    /// Answers heartbeats with 503 while `down`, and everything else as ever.
    pub(crate) fn set_leases_down(&self, down: bool) {
        self.store().leases_down = down;
    }

    /// Of the process that writes Runs.
    pub(crate) fn fate(&self) -> Fate {
        self.0.fate.clone()
    }

    /// The next write of a status meets a conflict, as if somebody had been faster.
    pub(crate) fn conflict_once(&self) {
        self.store().conflict_once = 1;
    }

    /// From now on watches tell what happened this long ago.
    pub(crate) fn delay_watch(&self, delay: Duration) {
        self.store().watch_delay = delay;
    }

    /// Ends every watch with 410; the next list misses these Runs, the one after has them again.
    pub(crate) fn relist_without(&self, names: &[&str]) {
        let mut store = self.store();
        store.hidden_once = names.iter().map(|name| (*name).to_owned()).collect();
        store.version += 1;
        store.gone_before = store.version;
        drop(store);
        self.0.changed.notify_waiters();
    }

    /// The next list shows the Run as it was.
    pub(crate) fn list_shows(&self, run: &Run) {
        let mut old = serde_json::to_value(run).expect("JSON");
        old["apiVersion"] = json!("kruntimes.io/v1alpha1");
        old["kind"] = json!("Run");
        self.store().old_once.push(old);
    }

    /// Waits until the Run is as wanted; `None` is a Run that is gone.
    pub(crate) async fn until(&self, name: &str, wanted: impl Fn(Option<&Run>) -> bool) {
        let wait = async {
            loop {
                let changed = self.0.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                if wanted(self.run(name).as_ref()) {
                    return;
                }
                changed.await;
            }
        };
        if tokio::time::timeout(patience(), wait).await.is_err() {
            panic!("never as wanted: {:#?}", self.run(name));
        }
    }

    /// Waits until Ready=True, and returns it.
    pub(crate) async fn ready(&self, name: &str) -> Run {
        self.until(name, |run| run.is_some_and(Run::is_ready)).await;
        self.run(name).expect("it exists")
    }

    /// Waits until the Ready condition has this reason.
    pub(crate) async fn until_reason(&self, name: &str, reason: &str) -> Run {
        let has = |run: Option<&Run>| {
            run.and_then(|run| run.condition("Ready"))
                .is_some_and(|it| it.reason == reason)
        };
        self.until(name, has).await;
        self.run(name).expect("it exists")
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.0.store.lock().expect("not poisoned")
    }
}

impl Store {
    fn change(&mut self, name: &str, after: Option<Value>) {
        self.version += 1;
        let before = self.runs.remove(name);
        let after = after.map(|mut after| {
            after["metadata"]["resourceVersion"] = json!(self.version.to_string());
            after["apiVersion"] = json!("kruntimes.io/v1alpha1");
            after["kind"] = json!("Run");
            self.runs.insert(name.to_owned(), after.clone());
            after
        });
        self.history.push((self.version, before, after));
    }
}

type Params = BTreeMap<String, String>;

/// How long something may take to come true: an hour where the clock can be paused, which only a runtime of one thread
/// allows.
fn patience() -> Duration {
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::CurrentThread => Duration::from_secs(3600),
        _ => Duration::from_secs(60),
    }
}

/// Waits until it is so, in a test with a clock that runs.
pub(crate) async fn comes_true(what: &str, is_so: impl Fn() -> bool) {
    let wait = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    let waited = tokio::time::timeout(patience(), wait).await;
    assert!(waited.is_ok(), "not within {:?}: {what}", patience());
}

/// Of what kube writes, only `=` in a selector is escaped.
fn params(query: &str) -> Params {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs
        .map(|(key, value)| (key.to_owned(), value.replace("%3D", "=")))
        .collect()
}

fn selected(params: &Params, run: &Value) -> bool {
    let selector = params
        .get("fieldSelector")
        .map(String::as_str)
        .unwrap_or_default();
    let pod = selector.strip_prefix("status.assignedPod=");
    pod.is_none_or(|pod| run["status"]["assignedPod"] == json!(pod))
}

async fn list_or_watch(State(kubernetes): State<Kubernetes>, RawQuery(query): RawQuery) -> Response {
    let params = params(&query.unwrap_or_default());
    let mut store = kubernetes.store();
    if store.down {
        return failure(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable");
    }
    if params.get("watch").is_some_and(|it| it == "true") {
        let from: u64 = params
            .get("resourceVersion")
            .and_then(|it| it.parse().ok())
            .unwrap_or(0);
        drop(store);
        return Body::from_stream(events(kubernetes, params, from)).into_response();
    }
    let mut hidden = std::mem::take(&mut store.hidden_once);
    let mut items = std::mem::take(&mut store.old_once);
    hidden.extend(
        items
            .iter()
            .filter_map(|run| Some(run["metadata"]["name"].as_str()?.to_owned())),
    );
    let others = store.runs.iter().filter(|(name, _)| !hidden.contains(*name));
    items.extend(others.map(|(_, run)| run.clone()));
    items.retain(|run| selected(&params, run));
    let list = json!({
        "apiVersion": "kruntimes.io/v1alpha1", "kind": "RunList",
        "metadata": { "resourceVersion": store.version.to_string() }, "items": items,
    });
    axum::Json(list).into_response()
}

fn events(
    kubernetes: Kubernetes,
    params: Params,
    from: u64,
) -> impl futures::Stream<Item = Result<Bytes, std::io::Error>> {
    futures::stream::unfold(
        (kubernetes, params, from, false),
        |(kubernetes, params, mut at, over)| async move {
            if over {
                return None;
            }
            loop {
                let shared = Arc::clone(&kubernetes.0);
                let changed = shared.changed.notified();
                tokio::pin!(changed);
                changed.as_mut().enable();
                let delay = kubernetes.store().watch_delay;
                if !delay.is_zero() && kubernetes.store().version > at {
                    tokio::time::sleep(delay).await;
                }
                {
                    let store = kubernetes.store();
                    if store.down {
                        return None;
                    }
                    if at < store.gone_before {
                        let event = json!({ "type": "ERROR", "object": {
                        "kind": "Status", "apiVersion": "v1", "status": "Failure",
                        "message": "too old resource version", "reason": "Expired", "code": 410 } });
                        drop(store);
                        return Some((Ok(line(&event)), (kubernetes, params, at, true)));
                    }
                    let next = store.history.iter().find(|(version, ..)| *version > at).cloned();
                    drop(store);
                    if let Some((version, before, after)) = next {
                        at = version;
                        let was = before.as_ref().is_some_and(|run| selected(&params, run));
                        let is = after.as_ref().is_some_and(|run| selected(&params, run));
                        let (kind, object) = match (was, is) {
                            (false, false) => continue,
                            (false, true) => ("ADDED", after),
                            (true, true) => ("MODIFIED", after),
                            (true, false) => ("DELETED", after.or(before)),
                        };
                        let event = json!({ "type": kind, "object": object });
                        return Some((Ok(line(&event)), (kubernetes, params, at, false)));
                    }
                }
                changed.await;
            }
        },
    )
}

fn line(event: &Value) -> Bytes {
    let mut text = event.to_string();
    text.push('\n');
    text.into()
}

async fn read(State(kubernetes): State<Kubernetes>, Path((_, name)): Path<(String, String)>) -> Response {
    let mut store = kubernetes.store();
    if store.down {
        return failure(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable");
    }
    store.reads += 1;
    match store.runs.get(&name) {
        Some(run) => axum::Json(run.clone()).into_response(),
        None => failure(StatusCode::NOT_FOUND, "NotFound"),
    }
}

async fn write(state: State<Kubernetes>, path: Path<(String, String)>, body: Bytes) -> Response {
    fated(&state.0, || patched(&state.0, &path.0.1, &body, false)).await
}

async fn write_status(state: State<Kubernetes>, path: Path<(String, String)>, body: Bytes) -> Response {
    fated(&state.0, || patched(&state.0, &path.0.1, &body, true)).await
}

async fn fated(kubernetes: &Kubernetes, write: impl FnOnce() -> Response) -> Response {
    let fate = kubernetes.fate();
    fate.pass().await;
    let answer = write();
    fate.pass().await;
    answer
}

fn patched(kubernetes: &Kubernetes, name: &str, body: &[u8], is_status: bool) -> Response {
    let patch: Value = serde_json::from_slice(body).expect("a JSON patch");
    let mut store = kubernetes.store();
    if store.down {
        return failure(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable");
    }
    store
        .writes
        .push(format!("{} {name}", if is_status { "status" } else { "run" }));
    let Some(before) = store.runs.get(name).cloned() else {
        return failure(StatusCode::NOT_FOUND, "NotFound");
    };
    let guard = |field: &str| patch["metadata"][field] != before["metadata"][field];
    if guard("resourceVersion") || guard("uid") {
        return failure(StatusCode::CONFLICT, "Conflict");
    }
    if is_status && store.conflict_once > 0 {
        store.conflict_once -= 1;
        let same = before.clone();
        store.change(name, Some(same));
        drop(store);
        kubernetes.0.changed.notify_waiters();
        return failure(StatusCode::CONFLICT, "Conflict");
    }
    let mut after = before.clone();
    let part = if is_status { "status" } else { "metadata" };
    merge(&mut after[part], &patch[part]);
    if !has_finalizers(&after) {
        // Kubernetes keeps no empty list.
        after["metadata"]
            .as_object_mut()
            .expect("an object")
            .remove("finalizers");
    }
    let ended = |run: &Value| {
        let phase = run["status"]["phase"].as_str().unwrap_or_default().to_owned();
        matches!(phase.as_str(), "Succeeded" | "Failed" | "Timeout" | "Cancelled").then_some(phase)
    };
    if ended(&before).is_some_and(|phase| ended(&after) != Some(phase)) {
        return failure(StatusCode::UNPROCESSABLE_ENTITY, "Invalid");
    }
    let gone = after["metadata"]["deletionTimestamp"].is_string() && !has_finalizers(&after);
    store.change(name, (!gone).then(|| after.clone()));
    after["metadata"]["resourceVersion"] = json!(store.version.to_string());
    drop(store);
    kubernetes.0.changed.notify_waiters();
    axum::Json(after).into_response()
}

async fn write_lease(
    State(kubernetes): State<Kubernetes>,
    Path((_, name)): Path<(String, String)>,
    method: Method,
    body: Bytes,
) -> Response {
    assert_eq!(method, Method::PATCH);
    let lease: Value = serde_json::from_slice(&body).expect("a JSON document");
    let mut store = kubernetes.store();
    if store.down || store.leases_down {
        return failure(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable");
    }
    store.renewals += 1;
    store.leases.insert(name, lease.clone());
    axum::Json(lease).into_response()
}

async fn write_event(State(kubernetes): State<Kubernetes>, body: Bytes) -> Response {
    let event: Value = serde_json::from_slice(&body).expect("a JSON document");
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let mut store = kubernetes.store();
    if store.down {
        return failure(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable");
    }
    let told = (text(&event["regarding"]["name"]), text(&event["reason"]));
    store.events.push(told);
    drop(store);
    kubernetes.0.changed.notify_waiters();
    axum::Json(event).into_response()
}

fn has_finalizers(run: &Value) -> bool {
    run["metadata"]["finalizers"]
        .as_array()
        .is_some_and(|it| !it.is_empty())
}

fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            target.as_object_mut().expect("an object").remove(key);
        } else {
            merge(&mut target[key], value);
        }
    }
}

fn failure(code: StatusCode, reason: &str) -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure",
        "message": reason, "reason": reason, "code": code.as_u16(),
    });
    (code, axum::Json(status)).into_response()
}
