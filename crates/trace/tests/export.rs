//! What a collector gets, and what happens without one (conventions of OpenTelemetry's OTLP exporters).

#![expect(clippy::unwrap_used, reason = "a test that panics fails")]

use std::{net::TcpListener, time::Duration};

use http::HeaderValue;
use kruntimes_trace::{Flush, Settings, SpanKind, Trace, Tracer, export, rpc::Rpc, testing::Collector};
use prometheus_client::{encoding::text, registry::Registry};
use tonic::Code;

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn start(names: &[(&str, &str)]) -> (Tracer, Flush) {
    let find = |name: &str| names.iter().find(|(known, _)| *known == name);
    let get = |name: &str| find(name).map(|(_, value)| (*value).to_owned());
    let settings = Settings::read("kruntimes-test", get).unwrap();
    export::start(settings.expect("an endpoint")).unwrap()
}

fn to(endpoint: &str) -> (Tracer, Flush) {
    start(&[("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)])
}

fn received(parent: &'static str) -> Trace {
    Trace::received(
        Some(HeaderValue::from_static(parent)),
        Some(HeaderValue::from_static("vendor=x:1")),
    )
}

/// The value of a counter.
fn counted(tracer: &Tracer, name: &str) -> u64 {
    let mut registry = Registry::default();
    tracer.register(&mut registry);
    let mut page = String::new();
    text::encode(&mut page, &registry).unwrap();
    let line = page
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix("_total "));
    line.unwrap().parse().unwrap()
}

#[tokio::test]
async fn a_tree_of_spans_reaches_the_collector() {
    let collector = Collector::start();
    let (tracer, _flush) = to(&collector.endpoint());
    let mut trace = received(PARENT);
    let mut server = tracer.begin(SpanKind::Server, "GET /x", &mut trace);
    server.set("http.response.status_code", 200_i64);
    let mut onward = trace.clone();
    let client = Rpc::client(&tracer, "a.B/C", &mut onward);
    client.end(Some(Code::ResourceExhausted), "Busy");
    drop(Rpc::client(&tracer, "a.B/D", &mut trace.clone()));
    Rpc::server(&tracer, "a.B/E", &mut trace.clone()).end(Some(Code::ResourceExhausted), "Busy");
    assert!(server.ids().is_some());
    drop(server);
    let spans = collector.spans(4).await;
    let named = |name: &str| spans.iter().find(|span| span.name == name).unwrap();
    let (server, client) = (named("GET /x"), named("a.B/C"));
    assert_eq!((server.kind.as_str(), client.kind.as_str()), ("SERVER", "CLIENT"));
    assert_eq!(server.trace, PARENT[3..35]);
    assert_eq!(
        (server.parent.as_str(), server.parent_is_remote),
        (&PARENT[36..52], true)
    );
    assert_eq!((&client.parent, client.parent_is_remote), (&server.id, false));
    assert_eq!(
        (server.state.as_str(), client.state.as_str()),
        ("vendor=x:1", "vendor=x:1")
    );
    assert_eq!(
        trace.traceparent().unwrap().to_str().unwrap(),
        server.traceparent()
    );
    assert_eq!(
        onward.traceparent().unwrap().to_str().unwrap(),
        client.traceparent()
    );
    assert_eq!(onward.tracestate().unwrap(), "vendor=x:1");
    assert_eq!(server.service, "kruntimes-test");
    assert_eq!(
        (server.get("http.response.status_code"), server.failed),
        ("200", false)
    );
    assert_eq!((client.get("error.type"), client.failed), ("Busy", true));
    assert_eq!(client.get("rpc.response.status_code"), "RESOURCE_EXHAUSTED");
    let given_up = named("a.B/D");
    assert_eq!(given_up.get("rpc.response.status_code"), "CANCELLED");
    assert!(!named("a.B/E").failed, "its server did what it should");
    assert_eq!(counted(&tracer, "trace_spans_lost"), 0);
}

#[tokio::test]
async fn what_waits_is_sent_at_the_end() {
    let collector = Collector::start();
    let (tracer, flush) = to(&collector.endpoint());
    for _ in 0..1500 {
        drop(tracer.begin(SpanKind::Internal, "late", &mut Trace::default()));
    }
    drop(flush);
    assert_eq!(collector.seen().len(), 1500);
    assert_eq!(counted(&tracer, "trace_spans_exported"), 1500);
}

#[tokio::test]
async fn a_collector_that_is_gone_or_says_nothing_holds_nobody_up() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    for address in [gone, silent.local_addr().unwrap()] {
        let (tracer, flush) = to(&format!("http://{address}"));
        for _ in 0..10_000 {
            drop(tracer.begin(SpanKind::Internal, "x", &mut Trace::default()));
        }
        assert!(
            counted(&tracer, "trace_spans_lost") > 1000,
            "there is no room for so many"
        );
        let began = std::time::Instant::now();
        drop(flush);
        assert!(began.elapsed() < Duration::from_secs(10));
    }
}

#[tokio::test]
async fn what_the_caller_does_not_sample_is_told_nowhere() {
    let collector = Collector::start();
    let (tracer, flush) = to(&collector.endpoint());
    let not = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
    let mut trace = received(not);
    assert!(!tracer.begin(SpanKind::Server, "x", &mut trace).is_live());
    assert_eq!(trace.traceparent().unwrap(), not, "passed on as it came");
    assert_eq!(trace.tracestate().unwrap(), "vendor=x:1");
    drop(flush);
    assert_eq!(collector.seen(), []);
}

/// The first process decides for all that follow.
#[tokio::test]
async fn a_trace_that_loses_the_draw_is_told_nowhere() {
    let collector = Collector::start();
    let endpoint = collector.endpoint();
    let (tracer, flush) = start(&[
        ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
        ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
        ("OTEL_TRACES_SAMPLER_ARG", "0"),
    ]);
    let mut trace = Trace::default();
    assert!(!tracer.begin(SpanKind::Server, "x", &mut trace).is_live());
    let told = trace.traceparent().unwrap().to_str().unwrap().to_owned();
    assert!(told.starts_with("00-") && told.ends_with("-00"), "{told}");
    assert!(!tracer.begin(SpanKind::Client, "y", &mut trace).is_live());
    assert!(
        tracer
            .begin(SpanKind::Server, "z", &mut received(PARENT))
            .is_live()
    );
    drop(flush);
    assert_eq!(collector.seen().len(), 1);
}

/// Off means off: nothing is read and nothing is written.
#[test]
fn without_a_collector_headers_pass_as_they_came() {
    let tracer = Tracer::default();
    let mut trace = received("whatever it is");
    assert!(!tracer.begin(SpanKind::Server, "x", &mut trace).is_live());
    assert_eq!(trace.traceparent().unwrap(), "whatever it is");
    assert_eq!(trace.tracestate().unwrap(), "vendor=x:1");
    let mut none = Trace::default();
    drop(tracer.begin(SpanKind::Server, "x", &mut none));
    assert!(none.traceparent().is_none());
}

#[tokio::test]
async fn a_collector_with_a_certificate_of_its_own_is_verified() {
    let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let collector = Collector::with_tls(&own.cert.pem(), &own.signing_key.serialize_pem());
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ca.pem");
    let file = file.to_str().unwrap();
    let endpoint = collector.endpoint();
    let names = [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str()),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", file),
    ];
    let stranger = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    for (trusted, arrive) in [(&stranger, 0), (&own, 1)] {
        std::fs::write(file, trusted.cert.pem()).unwrap();
        let (tracer, flush) = start(&names);
        drop(tracer.begin(SpanKind::Internal, "x", &mut Trace::default()));
        drop(flush);
        assert_eq!(collector.seen().len(), arrive);
    }
}
