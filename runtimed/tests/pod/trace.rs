//! Traces: what a collector is told of a call, and what the Runtime Server is told of its trace (contract 4; conventions
//! of OpenTelemetry).

use kruntimes_api::Run;
use kruntimes_proto::failure::Reason;
use kruntimes_trace::{Flush, Settings, Tracer, testing::Collector};
use tonic::{Request, Status, metadata::MetadataMap};

use super::common::{
    Pod, call,
    pod::{assigned, request},
};

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const UNSAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
const STATE: &str = "vendor=a:b, other=1";
const METHOD: &str = "executor.v1.FunctionRuntime/InvokeFunction";

fn tracer(collector: &Collector) -> (Tracer, Flush) {
    let get = |name: &str| (name == "OTEL_EXPORTER_OTLP_ENDPOINT").then(|| collector.endpoint());
    let settings = Settings::read("kruntimes-runtimed", get).unwrap().unwrap();
    kruntimes_trace::export::start(settings).unwrap()
}

async fn ready(tracer: Tracer) -> (Pod, Run) {
    let pod = Pod::traced(tracer).await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    (pod, run)
}

/// What the Runtime Server was told: `traceparent` and `tracestate` of each call.
fn told(pod: &Pod) -> Vec<[Option<String>; 2]> {
    let text = |metadata: &MetadataMap, name| Some(metadata.get(name)?.to_str().unwrap().to_owned());
    let calls = pod.server.metadata();
    calls
        .iter()
        .map(|metadata| ["traceparent", "tracestate"].map(|name| text(metadata, name)))
        .collect()
}

fn traced<T>(mut request: Request<T>, parent: &str) -> Request<T> {
    for (name, value) in [("traceparent", parent), ("tracestate", STATE)] {
        request.metadata_mut().insert(name, value.parse().unwrap());
    }
    request
}

/// Contract 4 and C-6.5: a span for the hop, one below it for the Runtime Server, which is told the last; the audit line
/// has the ids.
#[tokio::test]
async fn one_trace_goes_from_the_gateway_to_the_runtime_server() {
    let collector = Collector::start();
    let (tracer, _flush) = tracer(&collector);
    let (pod, run) = ready(tracer).await;
    call(pod.dial().await, traced(request(&run, "\"payload\""), PARENT))
        .await
        .unwrap();
    let spans = collector.spans(2).await;
    let of = |kind: &str| spans.iter().find(|span| span.kind == kind).unwrap();
    let (server, client) = (of("SERVER"), of("CLIENT"));
    assert_eq!((server.name.as_str(), client.name.as_str()), (METHOD, METHOD));
    assert_eq!(
        (server.trace.as_str(), server.parent.as_str()),
        (&PARENT[3..35], &PARENT[36..52])
    );
    assert_eq!((&client.trace, &client.parent), (&server.trace, &server.id));
    assert_eq!((server.parent_is_remote, client.parent_is_remote), (true, false));
    assert_eq!(told(&pod), [[Some(client.traceparent()), Some(STATE.to_owned())]]);
    for (key, value) in [
        ("rpc.system.name", "grpc"),
        ("rpc.method", METHOD),
        ("rpc.response.status_code", "OK"),
        ("kruntimes.invocation_id", "inv_test"),
        ("kruntimes.run_uid", run.metadata.uid.as_deref().unwrap()),
    ] {
        assert_eq!(server.get(key), value);
    }
    assert_eq!(server.service, "kruntimes-runtimed");
    let line = pod.audit.first().await;
    assert_eq!(
        (line["traceId"].as_str(), line["spanId"].as_str()),
        (Some(&*server.trace), Some(&*server.id))
    );
    let bytes = String::from_utf8_lossy(&collector.bytes()).into_owned();
    for secret in ["Bearer", "payload"] {
        assert!(!bytes.contains(secret), "{secret}");
    }
}

/// The conventions: a failure of the function is one of both spans, Busy is none of the server's; what was raised is told
/// nobody. A call that its caller gives up is cancelled.
#[tokio::test]
async fn failures_are_told_by_their_reason() {
    let collector = Collector::start();
    let (tracer, flush) = tracer(&collector);
    let (pod, run) = ready(tracer).await;
    pod.server.answer_once(Status::unknown("KeyError: hunter2"));
    pod.invoke(&run, "1").await.unwrap_err();
    let first = pod.invoke(&run, "wait");
    let second = async {
        pod.server.until_invoked(2).await;
        let busy = pod.invoke(&run, "2").await.unwrap_err();
        assert_eq!(busy.reason, Reason::Busy);
        assert!(!pod.cancel(&run, "none").await.unwrap());
        pod.explain(&run).await.unwrap();
    };
    tokio::select! {
        answer = first => panic!("nobody let it end: {answer:?}"),
        () = second => {}
    }
    // The call that waited is given up here.
    let spans = collector.spans(7).await;
    let mut told: Vec<_> = spans
        .iter()
        .map(|span| {
            let method = span.name.rsplit('/').next().unwrap();
            (
                method,
                span.kind.as_str(),
                span.get("rpc.response.status_code"),
                span.get("error.type"),
            )
        })
        .collect();
    told.sort_unstable();
    assert_eq!(
        told,
        [
            ("Cancel", "SERVER", "OK", ""),
            ("Explain", "SERVER", "OK", ""),
            ("InvokeFunction", "CLIENT", "CANCELLED", "Cancelled"),
            ("InvokeFunction", "CLIENT", "UNKNOWN", "HandlerError"),
            ("InvokeFunction", "SERVER", "CANCELLED", ""),
            ("InvokeFunction", "SERVER", "RESOURCE_EXHAUSTED", ""),
            ("InvokeFunction", "SERVER", "UNKNOWN", "HandlerError"),
        ]
    );
    assert!(spans.iter().all(|span| span.message.is_empty()));
    drop(flush);
    assert!(!String::from_utf8_lossy(&collector.bytes()).contains("hunter2"));
}

/// Contract 4: without a collector, and for what the caller does not sample, the headers arrive as they were sent.
#[tokio::test]
async fn otherwise_headers_pass_byte_for_byte() {
    let collector = Collector::start();
    let (on, flush) = tracer(&collector);
    for (tracer, parents) in [
        (Tracer::default(), &[PARENT, UNSAMPLED, "Not A Trace"][..]),
        (on, &[UNSAMPLED]),
    ] {
        let (pod, run) = ready(tracer).await;
        for parent in parents {
            call(pod.dial().await, traced(request(&run, "1"), parent))
                .await
                .unwrap();
        }
        let expected: Vec<_> = parents
            .iter()
            .map(|parent| [Some((*parent).to_owned()), Some(STATE.to_owned())])
            .collect();
        assert_eq!(told(&pod), expected);
        assert!(pod.audit.first().await.get("traceId").is_none());
    }
    drop(flush);
    assert_eq!(collector.seen(), []);
}
