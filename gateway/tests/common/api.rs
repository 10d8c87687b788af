//! A Kubernetes API in memory: list and watch of Runs, and access reviews.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, StatusCode, Uri, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use kruntimes_api::Run;
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch, task::AbortHandle};

#[derive(Clone)]
pub(crate) struct Api {
    inner: Arc<Inner>,
    url: String,
    _server: Arc<Server>,
}

struct Server(AbortHandle);

struct Inner {
    state: Mutex<Store>,
    version: watch::Sender<u64>,
}

#[derive(Default)]
struct Store {
    version: u64,
    runs: BTreeMap<String, Value>,
    log: Vec<(u64, Value)>,
    tokens: HashMap<String, Vec<&'static str>>,
    everybody: bool,
    down: bool,
    lists_held: bool,
    reviews: usize,
    reads: usize,
    cut: u64,
}

impl Api {
    pub(crate) async fn start() -> Self {
        let inner = Arc::new(Inner {
            state: Mutex::default(),
            version: watch::Sender::new(0),
        });
        let socket = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", socket.local_addr().expect("an address"));
        let routes = Router::new()
            .route("/apis/kruntimes.io/v1alpha1/runs", get(runs))
            .route(
                "/apis/kruntimes.io/v1alpha1/namespaces/{namespace}/runs",
                get(runs),
            )
            .route(
                "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                post(review),
            )
            .with_state(Arc::clone(&inner));
        #[expect(clippy::disallowed_methods, reason = "ends with the test")]
        let server = tokio::spawn(async move { axum::serve(socket, routes).await });
        Self {
            inner,
            url,
            _server: Arc::new(Server(server.abort_handle())),
        }
    }

    pub(crate) fn config(&self) -> kube::Config {
        kube::Config::new(self.url.parse().expect("a URL"))
    }

    pub(crate) fn put(&self, run: &Run) {
        let mut store = self.lock();
        let version = store.next();
        let mut run = serde_json::to_value(run).expect("JSON");
        run["metadata"]["resourceVersion"] = json!(version.to_string());
        let key = run["metadata"]["uid"].as_str().expect("a UID").to_owned();
        let kind = if store.runs.contains_key(&key) {
            "MODIFIED"
        } else {
            "ADDED"
        };
        store.runs.insert(key, run.clone());
        store.log.push((version, json!({ "type": kind, "object": run })));
        drop(store);
        self.inner.version.send_replace(version);
    }

    pub(crate) fn delete(&self, uid: &str) {
        let mut store = self.lock();
        let version = store.next();
        let mut run = store.runs.remove(uid).expect("an object");
        run["metadata"]["resourceVersion"] = json!(version.to_string());
        store
            .log
            .push((version, json!({ "type": "DELETED", "object": run })));
        drop(store);
        self.inner.version.send_replace(version);
    }

    /// Kubernetes knows this token from now on, and lets it do these.
    pub(crate) fn allow(&self, token: &str, verbs: &[&'static str]) {
        self.lock().tokens.insert(token.to_owned(), verbs.to_vec());
    }

    /// Whatever token comes, it may.
    pub(crate) fn allow_everybody(&self) {
        self.lock().everybody = true;
    }

    /// Everything fails from now on, running watches included.
    pub(crate) fn down(&self, down: bool) {
        let mut store = self.lock();
        store.down = down;
        store.cut += 1;
        let version = store.next();
        drop(store);
        self.inner.version.send_replace(version);
    }

    /// Lists of Runs fail from now on; reviews are answered.
    pub(crate) fn hold_lists(&self, held: bool) {
        self.lock().lists_held = held;
    }

    /// How many access reviews were asked for.
    pub(crate) fn reviews(&self) -> usize {
        self.lock().reviews
    }

    /// How many lists and watches of Runs were begun.
    pub(crate) fn reads(&self) -> usize {
        self.lock().reads
    }

    fn lock(&self) -> MutexGuard<'_, Store> {
        self.inner.state.lock().expect("not poisoned")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Store {
    fn next(&mut self) -> u64 {
        self.version += 1;
        self.version
    }
}

async fn runs(State(inner): State<Arc<Inner>>, uri: Uri) -> Response {
    let query = uri
        .query()
        .unwrap_or_default()
        .replace("%21", "!")
        .replace("%3D", "=");
    let query: HashMap<&str, &str> = query.split('&').filter_map(|pair| pair.split_once('=')).collect();
    let namespace = uri
        .path()
        .split("/namespaces/")
        .nth(1)
        .map(|rest| rest.trim_end_matches("/runs").to_owned());
    assert_eq!(
        query.get("fieldSelector").copied(),
        Some("spec.mode.function.handler!=")
    );
    let mut store = inner.state.lock().expect("not poisoned");
    store.reads += 1;
    if store.down || store.lists_held {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    if query.get("watch").is_some_and(|watch| *watch == "true") {
        assert_eq!(query.get("timeoutSeconds").copied(), Some("30"), "C-3.14");
        let from = query
            .get("resourceVersion")
            .and_then(|version| version.parse().ok())
            .unwrap_or(0);
        let cut = store.cut;
        drop(store);
        return Response::new(Body::from_stream(events(inner, namespace, from, cut)));
    }
    let items: Vec<&Value> = store
        .runs
        .values()
        .filter(|run| is_in(run, namespace.as_deref()))
        .collect();
    let list = json!({
        "apiVersion": "kruntimes.io/v1alpha1", "kind": "RunList",
        "metadata": { "resourceVersion": store.version.to_string() }, "items": items,
    });
    Json(list).into_response()
}

fn is_in(run: &Value, namespace: Option<&str>) -> bool {
    namespace.is_none_or(|namespace| run["metadata"]["namespace"] == namespace)
}

fn events(
    inner: Arc<Inner>,
    namespace: Option<String>,
    from: u64,
    cut: u64,
) -> impl futures::Stream<Item = Result<Bytes, Infallible>> {
    let news = inner.version.subscribe();
    futures::stream::unfold(
        (inner, news, from, namespace),
        move |(inner, mut news, mut from, namespace)| async move {
            loop {
                let (lines, seen) = {
                    let store = inner.state.lock().expect("not poisoned");
                    if store.cut != cut {
                        return None;
                    }
                    let lines: String = store
                        .log
                        .iter()
                        .filter(|(version, event)| {
                            *version > from && is_in(&event["object"], namespace.as_deref())
                        })
                        .map(|(_, event)| format!("{event}\n"))
                        .collect();
                    (lines, store.version)
                };
                if !lines.is_empty() {
                    return Some((Ok(Bytes::from(lines)), (inner, news, seen, namespace)));
                }
                from = seen;
                tokio::time::timeout(Duration::from_secs(30), news.changed())
                    .await
                    .ok()?
                    .ok()?;
            }
        },
    )
}

async fn review(State(inner): State<Arc<Inner>>, headers: HeaderMap, Json(review): Json<Value>) -> Response {
    let mut store = inner.state.lock().expect("not poisoned");
    let token = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let attributes = &review["spec"]["resourceAttributes"];
    let verb = attributes["verb"].as_str().expect("a verb");
    let known = token
        .and_then(|token| store.tokens.get(token))
        .map(|verbs| verbs.contains(&verb))
        .or_else(|| store.everybody.then_some(true));
    if store.down {
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    let Some(allowed) = known else {
        return StatusCode::UNAUTHORIZED.into_response();
    };
    store.reviews += 1;
    assert_eq!(attributes["resource"], "runs");
    assert!(attributes["name"].as_str().is_some_and(|name| !name.is_empty()));
    (
        StatusCode::CREATED,
        Json(json!({ "status": { "allowed": allowed } })),
    )
        .into_response()
}
