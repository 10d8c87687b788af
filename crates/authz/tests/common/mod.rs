//! A scripted API server that answers access reviews and counts them.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    extract::State,
    http::{HeaderMap, StatusCode, header::AUTHORIZATION},
    response::{IntoResponse, Response},
    routing::post,
};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use kruntimes_authz::{Authorizer, Bearer, Limits, NoObserver, Question};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    sync::watch,
    task::JoinSet,
};

/// What the server says to one token.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Script {
    Allow,
    Deny,
    Status(u16),
    /// Never answers.
    Silence,
    Garbage,
}

pub(crate) struct Api {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    // Dropping it stops the server.
    _server: JoinSet<()>,
}

struct Shared {
    scripts: Mutex<HashMap<String, Script>>,
    once: Mutex<HashMap<String, Script>>,
    bodies: Mutex<Vec<Value>>,
    reviews: AtomicUsize,
    open: watch::Sender<bool>,
}

impl Api {
    /// Tokens without a script get 401, as Kubernetes does it.
    pub(crate) async fn start() -> Self {
        let shared = Arc::new(Shared {
            scripts: Mutex::default(),
            once: Mutex::default(),
            bodies: Mutex::default(),
            reviews: AtomicUsize::new(0),
            open: watch::Sender::new(true),
        });
        let routes = Router::new()
            .route(
                "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
                post(review),
            )
            .with_state(Arc::clone(&shared));
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let mut server = JoinSet::new();
        server.spawn(async move {
            axum::serve(listener, routes).await.expect("serve");
        });
        Self {
            address,
            shared,
            _server: server,
        }
    }

    pub(crate) fn say(&self, token: &str, script: Script) {
        let mut scripts = self.shared.scripts.lock().expect("lock");
        scripts.insert(format!("Bearer {token}"), script);
    }

    /// Says this to the next review of the token, and then what it said before.
    pub(crate) fn say_once(&self, token: &str, script: Script) {
        let mut once = self.shared.once.lock().expect("lock");
        once.insert(format!("Bearer {token}"), script);
    }

    pub(crate) fn reviews(&self) -> usize {
        self.shared.reviews.load(Ordering::SeqCst)
    }

    pub(crate) fn bodies(&self) -> Vec<Value> {
        self.shared.bodies.lock().expect("lock").clone()
    }

    /// Holds answers back until `open`.
    pub(crate) fn close(&self) {
        self.shared.open.send_replace(false);
    }

    pub(crate) fn open(&self) {
        self.shared.open.send_replace(true);
    }

    pub(crate) fn config(&self) -> kube::Config {
        kube::Config::new(format!("http://{}", self.address).parse().expect("uri"))
    }

    pub(crate) fn authorizer(&self) -> Authorizer {
        Authorizer::new(&self.config(), Limits::default(), NoObserver).expect("authorizer")
    }
}

async fn review(State(shared): State<Arc<Shared>>, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    shared.reviews.fetch_add(1, Ordering::SeqCst);
    shared.bodies.lock().expect("lock").push(body);
    let mut open = shared.open.subscribe();
    let _ = open.wait_for(|open| *open).await;
    let token = headers
        .get(AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let once = shared.once.lock().expect("lock").remove(token);
    let script = once.or_else(|| shared.scripts.lock().expect("lock").get(token).copied());
    let review = |allowed: bool| {
        let status = json!({"allowed": allowed, "reason": "scripted"});
        (StatusCode::CREATED, Json(json!({"status": status}))).into_response()
    };
    match script {
        Some(Script::Allow) => review(true),
        Some(Script::Deny) => review(false),
        Some(Script::Status(code)) => StatusCode::from_u16(code).expect("a status").into_response(),
        Some(Script::Silence) => std::future::pending().await,
        Some(Script::Garbage) => (StatusCode::CREATED, "allowed: true").into_response(),
        None => StatusCode::UNAUTHORIZED.into_response(),
    }
}

/// A server that hangs up on so many requests and says yes to all others; it ends with what is returned.
pub(crate) async fn breaking(requests: usize) -> (kube::Config, JoinSet<()>) {
    const YES: &str = r#"{"status":{"allowed":true}}"#;
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let mut server = JoinSet::new();
    server.spawn(async move {
        for number in 0.. {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut request = Vec::new();
            // Where the question ends.
            while !request.ends_with(b"}}}") {
                stream.read_buf(&mut request).await.expect("a request");
            }
            if number >= requests {
                let length = YES.len();
                let answer = format!(
                    "HTTP/1.1 201 Created\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{YES}"
                );
                stream.write_all(answer.as_bytes()).await.expect("written");
            }
        }
    });
    (
        kube::Config::new(format!("http://{address}").parse().expect("uri")),
        server,
    )
}

pub(crate) fn bearer(token: &str) -> Bearer {
    Bearer::parse([format!("Bearer {token}")]).expect("well-formed")
}

/// A token that says when it ends, seconds since the epoch.
pub(crate) fn jwt(expires: f64) -> String {
    let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
    let (head, claims) = (part(json!({"alg": "RS256"})), part(json!({"exp": expires})));
    format!("{head}.{claims}.c2ln")
}

pub(crate) fn question(name: &str) -> Question<'static> {
    Question {
        verb: "get",
        namespace: "team".into(),
        name: name.to_owned().into(),
        uid: format!("uid-of-{name}").into(),
    }
}

/// Moves the paused clock.
pub(crate) async fn pass(time: Duration) {
    tokio::time::advance(time).await;
}

/// Moves a clock that runs, and lets it run on.
pub(crate) async fn skip(time: Duration) {
    tokio::time::pause();
    tokio::time::advance(time).await;
    tokio::time::resume();
}

/// Lets other tasks run until `seen`.
pub(crate) async fn until(seen: impl Fn() -> bool) {
    let wait = async {
        while !seen() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait)
        .await
        .expect("it is never seen");
}
