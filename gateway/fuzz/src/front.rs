//! A whole connection: bytes of a stranger in, the gateway's answers out. The token `good` may call the one function
//! that there is; nobody listens where its owner should be.

use std::{net::Ipv4Addr, sync::Arc, time::Duration};

use kruntimes_authz::{Authorizer, Limits, NoObserver};
use kruntimes_gateway::{
    admit::Admission,
    args::Patience,
    ask::Questions,
    front::Front,
    hop::{
        channels::Channels,
        client::{CallerCredential, Client},
    },
    invoke::Invoke,
    listen,
    metrics::Metrics,
    routes::{
        Entry,
        facts::SeenRun,
        shared::Shared,
        table::{News, Scope},
    },
};
use kruntimes_peer::{AddressRule, Dialer, RotatingIdentity};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    sync::watch,
};

use crate::{TIMEOUTS, stream::Pipe};

/// The only function.
const UID: &str = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";
/// A connection that is not over by then hangs. What the gateway itself waits for is shorter.
const HANGS: Duration = Duration::from_secs(20);

struct Gateway {
    runtime: Runtime,
    front: Arc<Front>,
    stopping: watch::Sender<bool>,
}

thread_local! {
    static GATEWAY: Gateway = Gateway::start();
}

/// HTTP/1.1: every answer has a status line and an id.
pub fn front_h1(data: &[u8]) {
    let answers = exchange(data, false);
    if answers.is_empty() {
        return;
    }
    assert!(
        answers.starts_with(b"HTTP/1.1 "),
        "{}",
        String::from_utf8_lossy(&answers)
    );
    let text = String::from_utf8_lossy(&answers).to_ascii_lowercase();
    let promised = text.contains("x-kruntime-invocation-id: ") || text.starts_with("http/1.1 100 ");
    assert!(promised, "{text}");
}

/// HTTP/2 behind its preface: nothing panics, and nothing hangs.
pub fn front_h2(data: &[u8]) {
    let bytes = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".as_slice(),
        data,
    ]
    .concat();
    let _ = exchange(&bytes, true);
}

/// Sends all of it and hangs up; what came back.
fn exchange(data: &[u8], http2: bool) -> Vec<u8> {
    GATEWAY.with(|gateway| {
        let (mut caller, stream) = tokio::io::duplex(256 * 1024);
        let remote = (Ipv4Addr::LOCALHOST, 1).into();
        let serve = listen::serve_one(
            Box::new(Pipe { inner: stream, http2 }),
            remote,
            Arc::clone(&gateway.front),
            gateway.stopping.subscribe(),
        );
        let call = async {
            // It may close before it has read everything.
            let _ = caller.write_all(data).await;
            let _ = caller.shutdown().await;
            let mut answers = Vec::new();
            let _ = caller.read_to_end(&mut answers).await;
            answers
        };
        let both = async { tokio::join!(serve, call).1 };
        let ended = gateway
            .runtime
            .block_on(async { tokio::time::timeout(HANGS, both).await });
        ended.expect("a connection hangs")
    })
}

impl Gateway {
    fn start() -> Self {
        // Another target may have been first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let front = runtime.block_on(async {
            let api = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
            let address = api.local_addr().expect("an address");
            tokio::spawn(review(api));
            let config = kube::Config::new(format!("http://{address}").parse().expect("a URI"));
            let authorizer = Authorizer::new(&config, Limits::default(), NoObserver).expect("a pool");
            let routes = Arc::new(Shared::new([]));
            routes.take_in(&Scope::All, [News::Apply(function())]);
            let identity = RotatingIdentity::new(|| None);
            let dialer = Dialer::new(
                Arc::new(identity),
                AddressRule::AllowLocal,
                Duration::from_millis(50),
            );
            let channels = Channels::new(dialer, Duration::from_secs(5), Duration::from_secs(600));
            let invoke = Invoke {
                routes,
                authorizer,
                admission: Admission::new(16, 16),
                hop: Client::new(Arc::new(channels), CallerCredential::Forward),
                questions: Questions::default(),
                handover: Duration::ZERO,
            };
            let patience = Patience {
                head: Duration::from_secs(1),
                body: Duration::from_secs(1),
                body_gap: Duration::from_secs(1),
                idle: Duration::from_secs(1),
                write: Duration::from_secs(1),
                ..Patience::default()
            };
            Arc::new(Front::new(invoke, TIMEOUTS, patience, Metrics::default()))
        });
        Self {
            runtime,
            front,
            stopping: watch::Sender::new(false),
        }
    }
}

fn function() -> Entry {
    let run = serde_json::json!({
        "apiVersion": "kruntimes.io/v1alpha1", "kind": "Run",
        "metadata": { "namespace": "demo", "name": "hello", "uid": UID },
        "spec": { "runtime": "python", "mode": { "function": {} } },
        "status": {
            "phase": "Ready", "attempt": 1, "assignedPod": "p", "assignedPodUID": "pod-uid",
            "owner": { "address": "127.0.0.1:1", "peerKey": "ab".repeat(32) },
            "conditions": [{ "type": "Ready", "status": "True", "reason": "FunctionRegistered" }],
        },
    });
    let run: SeenRun = serde_json::from_value(run).expect("a Run");
    Entry::of(&run).expect("a function")
}

/// Answers access reviews: yes to `good`, no to `bad`, and anybody else is nobody.
async fn review(socket: TcpListener) {
    while let Ok((stream, _)) = socket.accept().await {
        tokio::spawn(answer(stream));
    }
}

async fn answer(mut stream: TcpStream) -> Option<()> {
    let mut request = Vec::new();
    let body = loop {
        stream
            .read_buf(&mut request)
            .await
            .ok()
            .filter(|read| *read > 0)?;
        let text = String::from_utf8_lossy(&request).to_ascii_lowercase();
        let Some(end) = text.find("\r\n\r\n") else {
            continue;
        };
        let length = text
            .split("content-length: ")
            .nth(1)?
            .split('\r')
            .next()?
            .parse::<usize>()
            .ok()?;
        if request.len() >= end + 4 + length {
            break request.get(end + 4..)?.to_vec();
        }
    };
    let head = String::from_utf8_lossy(&request);
    let (status, answer) = if head.contains("Bearer good\r\n") || head.contains("Bearer bad\r\n") {
        let mut review: serde_json::Value = serde_json::from_slice(&body).ok()?;
        review["status"] = serde_json::json!({ "allowed": head.contains("Bearer good\r\n") });
        ("201 Created", review)
    } else {
        let status = serde_json::json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Unauthorized", "code": 401,
        });
        ("401 Unauthorized", status)
    };
    let answer = answer.to_string();
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        answer.len()
    );
    stream.write_all(format!("{head}{answer}").as_bytes()).await.ok()
}
