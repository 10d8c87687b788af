//! Traces: what a collector is told of a request, and what the owner is told of its trace (contract 4; conventions of
//! OpenTelemetry).

use std::{collections::BTreeMap, net::TcpListener, sync::Arc};

use http::{Method, Version};
use kruntimes_api::fixtures;
use kruntimes_proto::failure::{Failure, Reason};
use kruntimes_trace::{
    Flush, Settings, Tracer,
    testing::{Collector, Seen},
};

use crate::common::{ALICE, Logs, Owner, World, admin, eventually, owner};

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const UNSAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
const STATE: &str = "vendor=a:b, other=1";

const INVOKE: &str = "POST /v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}:invoke";

fn tracer(endpoint: &str) -> (Tracer, Flush) {
    let get = |name: &str| (name == "OTEL_EXPORTER_OTLP_ENDPOINT").then(|| endpoint.to_owned());
    let settings = Settings::read("kruntimes-gateway", get).unwrap().unwrap();
    kruntimes_trace::export::start(settings).unwrap()
}

async fn traced(endpoint: &str) -> (World, Flush) {
    let (tracer, flush) = tracer(endpoint);
    (World::with(&[], |config| config.tracer = tracer).await, flush)
}

/// What the owner was told with its call number `at`: traceparent and tracestate.
fn told(owner: &Owner, at: usize) -> (Option<String>, Option<String>) {
    let (metadata, _) = &owner.calls()[at];
    let get = |name: &str| Some(metadata.get(name)?.to_str().unwrap().to_owned());
    (get("traceparent"), get("tracestate"))
}

fn named<'a>(spans: &'a [Seen], name: &str) -> &'a Seen {
    let found = spans.iter().find(|span| span.name == name);
    found.unwrap_or_else(|| panic!("no {name} in {spans:#?}"))
}

/// Contract 4, and the conventions: the caller's span, the gateway's, that of the hop, and the owner knows the last. The
/// request's line has the ids.
#[tokio::test]
async fn one_trace_goes_from_the_caller_to_the_owner() {
    let logs = Logs::with_filter("info");
    let collector = Collector::start();
    let (world, _flush) = traced(&collector.endpoint()).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let path = format!("{}?key=secret-query", function.path);
    let mut request = caller.with(&path, "traceparent", PARENT);
    for (name, value) in [("tracestate", STATE), ("x-kruntime-invocation-id", "my-id")] {
        request.headers_mut().insert(name, value.parse().unwrap());
    }
    assert_eq!(caller.send(request, Version::HTTP_2).await.status, 200);
    let spans = collector.spans(2).await;
    let (server, hop) = (
        named(&spans, INVOKE),
        named(&spans, "executor.v1.FunctionRuntime/InvokeFunction"),
    );
    assert_eq!((server.kind.as_str(), hop.kind.as_str()), ("SERVER", "CLIENT"));
    assert_eq!(
        (server.trace.as_str(), server.parent.as_str()),
        (&PARENT[3..35], &PARENT[36..52])
    );
    assert_eq!((&hop.trace, &hop.parent), (&server.trace, &server.id));
    assert_eq!((server.parent_is_remote, hop.parent_is_remote), (true, false));
    assert_eq!(
        told(&world.owner, 0),
        (Some(hop.traceparent()), Some(STATE.to_owned()))
    );
    assert_eq!(server.service, "kruntimes-gateway");
    let attributes = |pairs: &[(&str, &str)]| -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    };
    let expected = attributes(&[
        ("http.request.method", "POST"),
        (
            "http.route",
            "/v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}:invoke",
        ),
        ("http.response.status_code", "200"),
        ("url.scheme", "https"),
        ("url.path", &function.path),
        ("network.protocol.version", "2"),
        ("kruntimes.namespace", "demo"),
        ("kruntimes.runtime", "python"),
        ("kruntimes.run_uid", &function.uid),
        ("kruntimes.invocation_id", "my-id"),
        ("kruntimes.reason", "OK"),
        ("kruntimes.component", "function"),
        ("kruntimes.dispatched", "yes"),
    ]);
    assert_eq!(server.attributes, expected);
    let (host, port) = world
        .owner
        .address()
        .split_once(':')
        .map(|(a, b)| (a.to_owned(), b.to_owned()))
        .unwrap();
    let expected = attributes(&[
        ("rpc.system.name", "grpc"),
        ("rpc.method", "executor.v1.FunctionRuntime/InvokeFunction"),
        ("rpc.response.status_code", "OK"),
        ("server.address", &host),
        ("server.port", &port),
    ]);
    assert_eq!(hop.attributes, expected);
    assert!(!server.failed && !hop.failed);
    let line = eventually("its line is written", || async { logs.access().first().cloned() }).await;
    assert_eq!(
        (&line["trace_id"], &line["span_id"]),
        (&server.trace.as_str().into(), &server.id.as_str().into())
    );
    let page = admin(&world.gateway, "/metrics").await;
    let exemplar = format!("# {{trace_id=\"{}\"}}", server.trace);
    let bucket = |line: &&str| line.starts_with("http_server_request_duration_seconds_bucket{");
    assert!(
        page.lines().filter(bucket).any(|line| line.contains(&exemplar)),
        "{page}"
    );
    let bytes = String::from_utf8_lossy(&collector.bytes()).into_owned();
    assert!(bytes.contains("my-id"));
    for secret in [ALICE, "Bearer", "secret-query"] {
        assert!(!bytes.contains(secret), "{secret}");
    }
}

/// The conventions: below 500 the server did what it should. What was raised is told nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_are_told_by_their_reason() {
    let collector = Collector::start();
    let (world, flush) = traced(&collector.endpoint()).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let send = async |request| caller.send(request, Version::HTTP_11).await.status;
    assert_eq!(send(caller.by(&function.path, "garbage-token")).await, 401);
    for reason in [Reason::Busy, Reason::HandlerError] {
        let failure = Failure::new(reason, "KeyError: hunter2").to_status();
        world
            .owner
            .answers(move |_| std::future::ready(Err(failure.clone())));
        send(caller.post(&function.path, "\"payload-secret\"")).await;
    }
    world
        .owner
        .answers(|request| std::future::ready(owner::echo(request)));
    assert_eq!(send(caller.ask(Method::GET, &function.page())).await, 200);
    assert_eq!(
        send(caller.ask(Method::DELETE, &function.invocation("none"))).await,
        404
    );
    // Who sends nonsense gets no span: there is no route that it could be counted under.
    assert_eq!(send(caller.post("/nowhere", "1")).await, 404);
    assert_eq!(world.gateway.stop("test").await.unfinished, 0);
    drop(flush);
    let spans = collector.seen();
    let told: Vec<_> = spans
        .iter()
        .filter(|span| span.kind == "SERVER")
        .map(|span| {
            (
                span.get("http.response.status_code"),
                span.get("kruntimes.reason"),
                span.failed,
                span.get("error.type"),
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            ("401", "Unauthenticated", false, ""),
            ("429", "Busy", false, ""),
            ("500", "HandlerError", true, "HandlerError"),
            ("200", "OK", false, ""),
            ("404", "NoSuchInvocation", false, ""),
        ]
    );
    let told: Vec<_> = spans
        .iter()
        .filter(|span| span.kind == "CLIENT")
        .map(|span| {
            (
                span.name.rsplit('/').next().unwrap(),
                span.get("rpc.response.status_code"),
                span.get("error.type"),
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            ("InvokeFunction", "RESOURCE_EXHAUSTED", "Busy"),
            ("InvokeFunction", "UNKNOWN", "HandlerError"),
            ("Explain", "OK", ""),
            ("Cancel", "OK", ""),
        ]
    );
    assert!(spans.iter().all(|span| span.message.is_empty()));
    let bytes = String::from_utf8_lossy(&collector.bytes()).into_owned();
    for secret in [ALICE, "garbage-token", "hunter2", "KeyError", "payload-secret"] {
        assert!(!bytes.contains(secret), "{secret}");
    }
}

/// C-3.7: each attempt is a span, and each owner knows its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_attempt_has_a_span() {
    let collector = Collector::start();
    let (world, _flush) = traced(&collector.endpoint()).await;
    let old = Owner::start(&world.pki).await;
    let owned = |owner: &Owner, attempt| {
        fixtures::run("demo", "hello")
            .attempt(attempt)
            .ready_on(&format!("pod-{attempt}"))
            .owner(&owner.address(), &owner.key())
            .build()
    };
    let function = world.put(&owned(&old, 1));
    let caller = world.caller();
    let stale = Failure::new(Reason::StaleRoute, "not here").to_status();
    old.answers(move |_| std::future::ready(Err(stale.clone())));
    let moving = async {
        old.arrived(1).await;
        world.api.put(&owned(&world.owner, 2));
    };
    let (answer, ()) = tokio::join!(caller.call(&function.path, "2"), moving);
    assert_eq!(answer.status, 200);
    let spans = collector.spans(3).await;
    let hops: Vec<_> = spans.iter().filter(|span| span.kind == "CLIENT").collect();
    let server = named(&spans, INVOKE);
    assert_eq!(server.parent, "", "nobody sent a trace");
    assert!(hops.iter().all(|hop| hop.parent == server.id));
    let parents = [told(&old, 0).0, told(&world.owner, 0).0].map(Option::unwrap);
    assert_eq!(parents, [hops[0].traceparent(), hops[1].traceparent()]);
    assert_eq!(
        (hops[0].get("error.type"), hops[1].get("error.type")),
        ("StaleRoute", "")
    );
}

/// The caller's word holds; what is no trace context begins a new trace and breaks nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_decides_and_nonsense_begins_anew() {
    let collector = Collector::start();
    let (world, _flush) = traced(&collector.endpoint()).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let call = async |parent: &str| {
        let mut request = caller.with(&function.path, "traceparent", parent);
        request.headers_mut().insert("tracestate", STATE.parse().unwrap());
        assert_eq!(caller.send(request, Version::HTTP_11).await.status, 200);
    };
    call(UNSAMPLED).await;
    let malformed = ["nonsense", "00-0-0-01", &PARENT.to_uppercase()];
    for parent in malformed {
        call(parent).await;
    }
    let spans = collector.spans(2 * malformed.len()).await;
    assert_eq!(
        spans.len(),
        2 * malformed.len(),
        "nothing of the first: {spans:#?}"
    );
    assert_eq!(
        told(&world.owner, 0),
        (Some(UNSAMPLED.to_owned()), Some(STATE.to_owned()))
    );
    for at in 1..=malformed.len() {
        let (parent, state) = told(&world.owner, at);
        let parent = parent.unwrap();
        assert!(
            spans
                .iter()
                .any(|span| span.kind == "CLIENT" && span.traceparent() == parent)
        );
        assert_eq!(state, None, "a state of no trace is nobody's");
    }
}

/// Contract 4: without a collector the headers arrive as they were sent, whatever they are.
#[tokio::test]
async fn without_a_collector_headers_pass_byte_for_byte() {
    let logs = Logs::with_filter("info");
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    for (at, parent) in [PARENT, UNSAMPLED, "Not A Trace"].into_iter().enumerate() {
        let mut request = caller.with(&function.path, "traceparent", parent);
        request.headers_mut().insert("tracestate", STATE.parse().unwrap());
        assert_eq!(caller.send(request, Version::HTTP_11).await.status, 200);
        assert_eq!(
            told(&world.owner, at),
            (Some(parent.to_owned()), Some(STATE.to_owned()))
        );
    }
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    assert_eq!(told(&world.owner, 3), (None, None));
    let lines = eventually("all lines are written", || async {
        let lines = logs.access();
        (lines.len() == 4).then_some(lines)
    })
    .await;
    assert!(
        lines.iter().all(|line| line.get("trace_id").is_none()),
        "{lines:?}"
    );
}

/// A collector that is not there, or takes nothing, costs spans, which are counted, and no call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_collector_harms_no_call() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    for address in [gone, silent.local_addr().unwrap()] {
        let (world, flush) = traced(&format!("http://{address}")).await;
        let function = world.function("demo", "hello");
        let caller = Arc::new(world.caller());
        for _ in 0..200 {
            assert_eq!(caller.call(&function.path, "1").await.status, 200);
        }
        if address == gone {
            eventually("lost spans are counted", || async {
                let page = admin(&world.gateway, "/metrics").await;
                let documented = include_str!("../../docs/metrics.md");
                assert!(documented.contains("`kruntimes_trace_spans_lost_total`"));
                assert!(documented.contains("`kruntimes_trace_spans_exported_total`"));
                let lost = page
                    .lines()
                    .find_map(|line| line.strip_prefix("kruntimes_trace_spans_lost_total "));
                (lost? != "0").then_some(())
            })
            .await;
        }
        assert_eq!(world.gateway.stop("test").await.unfinished, 0);
        drop(flush);
    }
}
