//! As much of a Kubernetes API as a gateway asks for: pages of Runs, a watch, and access reviews.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
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
use kruntimes_peer::PeerKey;
use serde_json::{Value, json};

use crate::functions;

/// After this long a watch ends, as the gateway asks for.
const WATCH: Duration = Duration::from_secs(30);

/// How many of the functions that come and go are there at once.
const PASSING: usize = 100;

/// What the answers are made from.
pub(crate) struct Cluster {
    /// How many Runs there are.
    pub(crate) routes: usize,
    /// Where the owner of all of them listens.
    pub(crate) owner: SocketAddr,
    /// The key it is known by.
    pub(crate) key: PeerKey,
    /// Who may call all of them; so may whoever differs in the signature only.
    pub(crate) token: String,
    /// How long an access review takes.
    pub(crate) review: Duration,
    /// Access reviews so far.
    pub(crate) reviews: Reviews,
    /// How many functions come and go each second, besides those; nobody calls them. For one watch at a time.
    pub(crate) churn: u32,
    /// How many have come.
    pub(crate) came: AtomicUsize,
}

/// How many access reviews there were, and how many at once.
#[derive(Debug, Default)]
pub(crate) struct Reviews {
    total: AtomicUsize,
    now: AtomicUsize,
    peak: AtomicUsize,
}

/// Serves `cluster`.
pub(crate) fn api(cluster: Cluster) -> Router {
    Router::new()
        .route("/apis/kruntimes.io/v1alpha1/runs", get(runs))
        .route(
            "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
            post(review),
        )
        .route("/reviews", get(reviews))
        .with_state(Arc::new(cluster))
}

async fn runs(State(cluster): State<Arc<Cluster>>, uri: Uri) -> Response {
    let asked = |name: &str| {
        uri.query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .find_map(|(key, value)| (key == name).then_some(value))
    };
    if asked("watch") == Some("true") {
        return watch(cluster);
    }
    let number = |name: &str| asked(name).and_then(|value| value.parse::<usize>().ok());
    let from = number("continue").unwrap_or(0).min(cluster.routes);
    let to = number("limit").map_or(cluster.routes, |limit| (from + limit).min(cluster.routes));
    let next = if to < cluster.routes {
        to.to_string()
    } else {
        String::new()
    };
    let items: Vec<Value> = (from..to).map(|number| cluster.run(number)).collect();
    Json(json!({
        "apiVersion": "kruntimes.io/v1alpha1", "kind": "RunList",
        "metadata": { "resourceVersion": "1", "continue": next }, "items": items,
    }))
    .into_response()
}

/// A watch, in which functions come and go or nothing happens.
fn watch(cluster: Arc<Cluster>) -> Response {
    let ends = tokio::time::Instant::now() + WATCH;
    let pause = match cluster.churn {
        0 => WATCH,
        churn => Duration::from_secs(1) / churn,
    };
    let news = futures::stream::unfold(cluster, move |cluster| async move {
        let now = tokio::time::Instant::now();
        if now >= ends {
            return None;
        }
        tokio::time::sleep_until((now + pause).min(ends)).await;
        let news = if cluster.churn == 0 {
            Bytes::new()
        } else {
            cluster.pass()
        };
        Some((Ok::<_, Infallible>(news), cluster))
    });
    Response::new(Body::from_stream(news))
}

async fn review(State(cluster): State<Arc<Cluster>>, headers: HeaderMap) -> Response {
    let token = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
    let known = cluster.token.rsplit_once('.').map(|(signed, _)| signed);
    if token
        .and_then(|token| token.rsplit_once('.'))
        .map(|(signed, _)| signed)
        != known
    {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let reviews = &cluster.reviews;
    reviews.total.fetch_add(1, Ordering::Relaxed);
    let now = reviews.now.fetch_add(1, Ordering::Relaxed) + 1;
    reviews.peak.fetch_max(now, Ordering::Relaxed);
    if !cluster.review.is_zero() {
        tokio::time::sleep(cluster.review).await;
    }
    reviews.now.fetch_sub(1, Ordering::Relaxed);
    let answer = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "status": { "allowed": true },
    });
    (StatusCode::CREATED, Json(answer)).into_response()
}

/// Since it was last asked.
async fn reviews(State(cluster): State<Arc<Cluster>>) -> Json<Value> {
    let reviews = &cluster.reviews;
    Json(json!({
        "total": reviews.total.swap(0, Ordering::Relaxed),
        "peak": reviews.peak.swap(0, Ordering::Relaxed),
    }))
}

// === impl Cluster ===

impl Cluster {
    /// One function comes, and the one that is there the longest goes: events of a watch.
    fn pass(&self) -> Bytes {
        let came = self.came.fetch_add(1, Ordering::Relaxed);
        let event = |kind: &str, number: usize| {
            let mut run = self.run(self.routes + number);
            run["metadata"]["resourceVersion"] = json!((came + 2).to_string());
            format!("{}\n", json!({ "type": kind, "object": run }))
        };
        let mut events = event("ADDED", came);
        if let Some(oldest) = came.checked_sub(PASSING) {
            events += &event("DELETED", oldest);
        }
        events.into()
    }

    /// A Ready function, with what a stored one has besides.
    fn run(&self, number: usize) -> Value {
        json!({
            "apiVersion": "kruntimes.io/v1alpha1", "kind": "Run",
            "metadata": {
                "namespace": functions::NAMESPACE, "name": format!("function-{number:06}"),
                "uid": functions::uid(number), "resourceVersion": "1", "generation": 1,
                "creationTimestamp": "2026-01-01T00:00:00Z",
            },
            "spec": {
                "runtime": functions::RUNTIME,
                "mode": { "function": { "handler": "main.handler" } },
                "source": { "inline": "def handler(event, context):\n    return event\n" },
            },
            "status": {
                "phase": "Ready", "attempt": 1, "observedGeneration": 1,
                "assignedPod": "python-0", "assignedPodUID": "8a9d8b6e-3b1f-4a54-9c0e-2f6a1f0f6d10",
                "owner": { "address": self.owner.to_string(), "peerKey": self.key.to_string() },
                "conditions": [{
                    "type": "Ready", "status": "True", "reason": "FunctionRegistered", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:01Z",
                }],
            },
        })
    }
}
