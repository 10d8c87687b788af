//! An in-memory Kubernetes API: just what the scheduler asks of one, with the faults that tests
//! need. It stores JSON, checks resourceVersions and UIDs, and streams watches.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::State,
    http::{Method, Request, StatusCode},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use futures::stream;
use kruntimes_api::{fixtures, status::difference};
use serde_json::{Map, Value, json};
use tokio::sync::watch;

/// Plural, namespace and name.
type Id = (String, String, String);

/// Clones share one store.
#[derive(Clone)]
pub(crate) struct Api {
    store: Arc<Mutex<Store>>,
    /// Moves with every change, of objects and of faults.
    version: watch::Sender<u64>,
}

#[derive(Default)]
pub(crate) struct Store {
    objects: BTreeMap<Id, Value>,
    version: u64,
    history: Vec<(u64, String, Value)>,
    /// Requests that change something, as they were answered.
    pub(crate) writes: Vec<Write>,
    faults: Faults,
}

/// One changing request.
#[derive(Debug, Clone)]
pub(crate) struct Write {
    /// For example `runs/status`.
    pub(crate) what: String,
    pub(crate) name: String,
    pub(crate) body: Value,
    pub(crate) status: u16,
}

/// What goes wrong until it is lifted.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faults {
    /// Kinds whose watches deliver nothing.
    pub(crate) silent: Vec<&'static str>,
    /// Kinds whose lists are not answered.
    pub(crate) unlisted: Vec<&'static str>,
    /// Writes to these (`runs/status`) are refused with 409, once each.
    pub(crate) conflict_once: Vec<&'static str>,
    /// Writes to these happen but are answered with 500, once each.
    pub(crate) lose_answer_once: Vec<&'static str>,
    /// Leases of these holders cannot be renewed: no answer.
    pub(crate) mute_holders: Vec<String>,
    /// Writes to Pods of these names are not answered.
    pub(crate) stuck: Vec<&'static str>,
    /// Watches of these end with 410, once each.
    pub(crate) expire_once: Vec<&'static str>,
    /// Lists of these miss every second object, once each.
    pub(crate) halve_once: Vec<&'static str>,
}

impl Api {
    pub(crate) fn new() -> Self {
        Self {
            store: Arc::default(),
            version: watch::Sender::new(0),
        }
    }

    pub(crate) fn client(&self) -> kube::Client {
        let router = Router::new().fallback(answer).with_state(self.clone());
        kube::Client::new(router, "default")
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the faults; watches look again.
    pub(crate) fn faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.lock().faults);
        self.version.send_modify(|it| *it += 1);
    }

    /// Whether everything that was to happen once has happened.
    pub(crate) fn faults_are_spent(&self) -> bool {
        let store = self.lock();
        let faults = &store.faults;
        [
            &faults.expire_once,
            &faults.halve_once,
            &faults.conflict_once,
            &faults.lose_answer_once,
        ]
        .iter()
        .all(|it| it.is_empty())
    }

    /// Creates or replaces an object as its author would, without checks; returns its UID.
    pub(crate) fn put(&self, plural: &str, mut object: Value) -> String {
        let id = id(plural, &object);
        let uid = {
            let mut store = self.lock();
            let known = store.objects.get(&id).cloned();
            let meta = &mut object["metadata"];
            meta["uid"] = match known.as_ref().map(|it| it["metadata"]["uid"].clone()) {
                Some(uid) => uid,
                None if meta["uid"].is_string() => meta["uid"].clone(),
                None => json!(fixtures::uid(&format!("{id:?}{}", store.version))),
            };
            meta["generation"] = json!(1);
            let uid = meta["uid"].as_str().unwrap_or_default().to_owned();
            let kind = if known.is_some() { "MODIFIED" } else { "ADDED" };
            store.save(id, object, kind);
            uid
        };
        self.version.send_modify(|it| *it += 1);
        uid
    }

    /// Changes an object in place.
    pub(crate) fn edit(&self, plural: &str, namespace: &str, name: &str, change: impl FnOnce(&mut Value)) {
        let id = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        {
            let mut store = self.lock();
            let mut object = store
                .objects
                .get(&id)
                .cloned()
                .unwrap_or_else(|| panic!("{id:?} does not exist"));
            change(&mut object);
            store.save(id, object, "MODIFIED");
        }
        self.version.send_modify(|it| *it += 1);
    }

    /// Removes an object at once.
    pub(crate) fn remove(&self, plural: &str, namespace: &str, name: &str) {
        let id = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        self.lock().remove(&id);
        self.version.send_modify(|it| *it += 1);
    }

    /// Makes the watches say that an object is gone while it is there.
    pub(crate) fn lie_deleted(&self, plural: &str, namespace: &str, name: &str) {
        let id = (plural.to_owned(), namespace.to_owned(), name.to_owned());
        {
            let mut store = self.lock();
            let object = store
                .objects
                .get(&id)
                .cloned()
                .unwrap_or_else(|| panic!("{id:?} does not exist"));
            store.version += 1;
            let event = json!({ "type": "DELETED", "object": object });
            let version = store.version;
            store.history.push((version, plural.to_owned(), event));
        }
        self.version.send_modify(|it| *it += 1);
    }

    pub(crate) fn get(&self, plural: &str, namespace: &str, name: &str) -> Option<Value> {
        self.lock()
            .objects
            .get(&(plural.to_owned(), namespace.to_owned(), name.to_owned()))
            .cloned()
    }

    /// Waits until something is true of the store.
    pub(crate) async fn until<T>(&self, what: &str, mut ask: impl FnMut(&Self) -> Option<T>) -> T {
        let mut changes = self.version.subscribe();
        let wait = async {
            loop {
                changes.mark_unchanged();
                if let Some(answer) = ask(self) {
                    return answer;
                }
                if changes.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(120), wait)
            .await
            .unwrap_or_else(|_| panic!("did not come true: {what}\n{:#?}", self.lock().objects.values()))
    }
}

impl Store {
    fn save(&mut self, id: Id, mut object: Value, kind: &str) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.history.push((
            self.version,
            id.0.clone(),
            json!({ "type": kind, "object": object }),
        ));
        self.objects.insert(id, object);
    }

    fn remove(&mut self, id: &Id) {
        if let Some(mut object) = self.objects.remove(id) {
            self.version += 1;
            object["metadata"]["resourceVersion"] = json!(self.version.to_string());
            self.history.push((
                self.version,
                id.0.clone(),
                json!({ "type": "DELETED", "object": object }),
            ));
        }
    }

    /// Changing requests but those to Leases, which beat.
    pub(crate) fn lasting_writes(&self) -> usize {
        self.writes.iter().filter(|it| it.what != "leases").count()
    }

    /// Changes of the status of a Run, in order, with the status code of the answer.
    pub(crate) fn status_writes(&self, run: &str) -> Vec<&Write> {
        self.writes
            .iter()
            .filter(|it| it.what == "runs/status" && it.name == run)
            .collect()
    }
}

/// Whether a fault that happens once was planned.
fn take(faults: &mut Vec<&'static str>, what: &str) -> bool {
    let at = faults.iter().position(|it| *it == what);
    at.map(|at| faults.remove(at)).is_some()
}

/// What a request is about.
struct Target {
    plural: String,
    namespace: Option<String>,
    name: Option<String>,
    sub: Option<String>,
}

async fn answer(State(api): State<Api>, request: Request<Body>) -> Response {
    let target = parse(request.uri().path());
    let query: BTreeMap<String, String> = request
        .uri()
        .query()
        .unwrap_or_default()
        .split('&')
        .filter_map(|it| it.split_once('='))
        .map(|(key, value)| (key.to_owned(), value.replace("%3D", "=").replace("%2F", "/")))
        .collect();
    let method = request.method().clone();
    let applies = request
        .headers()
        .get("content-type")
        .is_some_and(|it| it == "application/apply-patch+yaml");
    let body = to_bytes(request.into_body(), 1 << 20).await.unwrap_or_default();
    let body: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
    match (method, &target.name) {
        (Method::GET, None) if query.contains_key("watch") => stream_events(api, target, &query),
        (Method::GET, None) => list(&api, &target, &query).await,
        (Method::GET, Some(_)) => get(&api, &target),
        (method, _) => write(&api, method, target, applies, body).await,
    }
}

fn parse(path: &str) -> Target {
    let mut parts = path.trim_start_matches('/').split('/');
    // /api/v1 or /apis/GROUP/VERSION
    let skip = if parts.next() == Some("api") { 1 } else { 2 };
    let parts: Vec<_> = parts.skip(skip).map(str::to_owned).collect();
    let (namespace, rest) = match parts.split_first() {
        Some((first, rest)) if first == "namespaces" && rest.len() > 1 => (rest.first().cloned(), &rest[1..]),
        _ => (None, &parts[..]),
    };
    let mut rest = rest.iter().cloned();
    Target {
        plural: rest.next().unwrap_or_default(),
        namespace,
        name: rest.next(),
        sub: rest.next(),
    }
}

fn id(plural: &str, object: &Value) -> Id {
    let text = |key: &str| object["metadata"][key].as_str().unwrap_or_default().to_owned();
    (plural.to_owned(), text("namespace"), text("name"))
}

fn refuse(code: u16, reason: &str) -> Response {
    let body = json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason });
    (
        StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
        axum::Json(body),
    )
        .into_response()
}

fn matches(object: &Value, namespace: Option<&str>, selector: Option<&String>) -> bool {
    let labels = &object["metadata"]["labels"];
    let selected = selector.is_none_or(|it| match it.split_once('=') {
        Some((key, value)) => labels[key] == json!(value),
        None => labels[it.as_str()].is_string(),
    });
    selected && namespace.is_none_or(|it| object["metadata"]["namespace"] == json!(it))
}

async fn list(api: &Api, target: &Target, query: &BTreeMap<String, String>) -> Response {
    api.until("lists are answered", |api| {
        let blocked = api.lock().faults.unlisted.iter().any(|it| *it == target.plural);
        (!blocked).then_some(())
    })
    .await;
    let mut store = api.lock();
    let halved = take(&mut store.faults.halve_once, &target.plural);
    let store = &*store;
    let items: Vec<_> = store
        .objects
        .iter()
        .filter(|(id, _)| id.0 == target.plural)
        .map(|(_, object)| object)
        .filter(|it| matches(it, target.namespace.as_deref(), query.get("labelSelector")))
        .enumerate()
        .filter(|(at, _)| !halved || at % 2 == 0)
        .map(|(_, object)| object)
        .collect();
    let version = store.version.to_string();
    if halved {
        api.version.send_modify(|it| *it += 1);
    }
    axum::Json(json!({ "kind": "List", "apiVersion": "v1", "metadata": { "resourceVersion": version }, "items": items }))
        .into_response()
}

fn stream_events(api: Api, target: Target, query: &BTreeMap<String, String>) -> Response {
    let from: u64 = query
        .get("resourceVersion")
        .and_then(|it| it.parse().ok())
        .unwrap_or(0);
    let selector = query.get("labelSelector").cloned();
    let changes = api.version.subscribe();
    let events = stream::unfold((api, target, from, selector, changes), |state| async move {
        let (api, target, from, selector, mut changes) = state;
        loop {
            changes.mark_unchanged();
            if take(&mut api.lock().faults.expire_once, &target.plural) {
                api.version.send_modify(|it| *it += 1);
                let status = json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                    "code": 410, "reason": "Expired", "message": "too old resource version" });
                let line = format!("{}\n", json!({ "type": "ERROR", "object": status }));
                let over = (api, target, u64::MAX, selector, changes);
                return Some((Ok(Bytes::from(line)), over));
            }
            let next = {
                let store = api.lock();
                let silent = store.faults.silent.iter().any(|it| *it == target.plural);
                store
                    .history
                    .iter()
                    .find(|(version, plural, event)| {
                        *version > from
                            && *plural == target.plural
                            && matches(&event["object"], target.namespace.as_deref(), selector.as_ref())
                    })
                    .filter(|_| !silent)
                    .map(|(version, _, event)| (*version, format!("{event}\n")))
            };
            if let Some((version, line)) = next {
                let line = Ok::<_, std::io::Error>(Bytes::from(line));
                return Some((line, (api, target, version, selector, changes)));
            }
            if changes.changed().await.is_err() {
                return None;
            }
        }
    });
    Body::from_stream(events).into_response()
}

fn get(api: &Api, target: &Target) -> Response {
    let id = (
        target.plural.clone(),
        target.namespace.clone().unwrap_or_default(),
        target.name.clone().unwrap_or_default(),
    );
    match api.lock().objects.get(&id) {
        Some(object) => axum::Json(object.clone()).into_response(),
        None => refuse(404, "NotFound"),
    }
}

async fn write(api: &Api, method: Method, target: Target, applies: bool, body: Value) -> Response {
    if target.plural == "leases" {
        let holder = body["spec"]["holderIdentity"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let muted = api.lock().faults.mute_holders.contains(&holder);
        if muted {
            std::future::pending::<()>().await;
        }
    }
    if target.plural == "pods" {
        let name = target.name.clone().unwrap_or_default();
        let stuck = api.lock().faults.stuck.iter().any(|it| *it == name);
        if stuck {
            std::future::pending::<()>().await;
        }
    }
    let what = target
        .sub
        .as_ref()
        .map_or_else(|| target.plural.clone(), |sub| format!("{}/{sub}", target.plural));
    let name = target
        .name
        .clone()
        .or_else(|| body["metadata"]["name"].as_str().map(str::to_owned))
        .unwrap_or_default();
    let response = {
        let mut store = api.lock();
        let response = if take(&mut store.faults.conflict_once, &what) {
            refuse(409, "Conflict")
        } else {
            let lost = take(&mut store.faults.lose_answer_once, &what);
            let response = change(&mut store, &method, &target, &name, applies, &body);
            if lost {
                refuse(500, "InternalError")
            } else {
                response
            }
        };
        store.writes.push(Write {
            what,
            name,
            body,
            status: response.status().as_u16(),
        });
        response
    };
    api.version.send_modify(|it| *it += 1);
    response
}

fn change(
    store: &mut Store,
    method: &Method,
    target: &Target,
    name: &str,
    applies: bool,
    body: &Value,
) -> Response {
    let id = (
        target.plural.clone(),
        target.namespace.clone().unwrap_or_default(),
        name.to_owned(),
    );
    let known = store.objects.get(&id).cloned();
    let Some(known) = known else {
        if *method != Method::POST && !applies {
            return refuse(404, "NotFound");
        }
        let mut object = body.clone();
        object["metadata"]["namespace"] = json!(id.1);
        object["metadata"]["uid"] = json!(fixtures::uid(&format!("{id:?}{}", store.version)));
        object["metadata"]["generation"] = json!(1);
        store.save(id.clone(), object, "ADDED");
        return (StatusCode::CREATED, axum::Json(store.objects[&id].clone())).into_response();
    };
    if *method == Method::POST {
        return refuse(409, "AlreadyExists");
    }
    // A delete carries its preconditions elsewhere than a write its metadata.
    let guard = if *method == Method::DELETE {
        &body["preconditions"]
    } else {
        &body["metadata"]
    };
    for field in ["resourceVersion", "uid"] {
        if guard[field].is_string() && guard[field] != known["metadata"][field] {
            return refuse(409, "Conflict");
        }
    }
    if *method == Method::DELETE {
        // A Pod on a node stays until its kubelet says that it has ended.
        let on_a_node = id.0 == "pods" && known["spec"]["nodeName"].is_string();
        if on_a_node
            || known["metadata"]["finalizers"]
                .as_array()
                .is_some_and(|it| !it.is_empty())
        {
            let mut object = known;
            object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
            store.save(id, object, "MODIFIED");
        } else {
            store.remove(&id);
        }
        return axum::Json(json!({ "kind": "Status", "apiVersion": "v1", "status": "Success", "code": 200 }))
            .into_response();
    }
    let mut object = known.clone();
    if *method == Method::PUT {
        object = body.clone();
        object["metadata"]["uid"] = known["metadata"]["uid"].clone();
    } else {
        let mut body = body.clone();
        if let Some(meta) = body["metadata"].as_object_mut() {
            meta.remove("resourceVersion");
            meta.remove("uid");
        }
        merge(&mut object, &body);
    }
    if difference(&known, &object).is_none() {
        return axum::Json(known).into_response();
    }
    if object["spec"] != known["spec"] {
        object["metadata"]["generation"] = json!(known["metadata"]["generation"].as_i64().unwrap_or(1) + 1);
    }
    let is_over = id.0 != "pods"
        && object["metadata"]["deletionTimestamp"].is_string()
        && object["metadata"]["finalizers"]
            .as_array()
            .is_none_or(Vec::is_empty);
    if is_over {
        store.remove(&id);
        return axum::Json(object).into_response();
    }
    store.save(id.clone(), object, "MODIFIED");
    axum::Json(store.objects[&id].clone()).into_response()
}

/// RFC 7386.
fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *object = patch.clone();
        return;
    };
    if !object.is_object() {
        *object = Value::Object(Map::new());
    }
    for (key, value) in patch {
        if value.is_null() {
            if let Some(object) = object.as_object_mut() {
                object.remove(key);
            }
        } else {
            merge(&mut object[key.as_str()], value);
        }
    }
}
