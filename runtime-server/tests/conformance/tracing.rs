//! Traces: the server's span stands between runtimed's and those that a function makes (conventions of OpenTelemetry).

use std::process::Command;

use kruntimes_proto::executor::InvokeFunctionRequest;
use kruntimes_trace::testing::Collector;
use serde_json::{Value, json};
use tonic::Request;

use super::harness::Server;

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const UNSAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";
const STATE: &str = "vendor=a:b, other=1";

const CODE: &str = "
import os
def handler(event, context):
    if event == 'raise':
        raise KeyError('hunter2')
    return [context.traceparent, context.tracestate, [name for name in os.environ if name.startswith('OTEL')]]
";

/// C-8.2, C-8.3: what the function sees is the server's span, so that its own hang below that; what the caller does not
/// sample is told by nobody. The server's own settings are not the function's.
#[tokio::test]
async fn a_functions_trace_goes_on_below_the_servers_span() {
    let collector = Collector::start();
    let endpoint = collector.endpoint();
    let server = Server::with(&[], &[("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint)]).await;
    let function = server.function(CODE).await;
    let call = async |input: &str, parent: &str| {
        let mut request = Request::new(InvokeFunctionRequest {
            invocation_id: "my-id".into(),
            ..function.request(input)
        });
        for (name, value) in [("traceparent", parent), ("tracestate", STATE)] {
            request.metadata_mut().insert(name, value.parse().expect("ASCII"));
        }
        let answer = function.client.clone().invoke_function(request).await;
        answer.map(|answer| serde_json::from_slice::<Value>(&answer.into_inner().output).expect("JSON"))
    };
    assert_eq!(
        call("1", UNSAMPLED).await.expect("an answer"),
        json!([UNSAMPLED, STATE, []])
    );
    let seen = call("1", PARENT).await.expect("an answer");
    call("\"raise\"", PARENT).await.expect_err("it raises");
    let spans = collector.spans(2).await;
    let [good, bad] = &spans[..] else {
        panic!("two sampled calls: {spans:#?}")
    };
    assert_eq!(seen, json!([good.traceparent(), STATE, []]));
    assert_eq!(
        (good.trace.as_str(), good.parent.as_str()),
        (&PARENT[3..35], &PARENT[36..52])
    );
    assert_eq!(
        (good.kind.as_str(), good.service.as_str()),
        ("SERVER", "kruntimes-runtime-server")
    );
    for (key, value) in [
        ("rpc.method", "executor.v1.FunctionRuntime/InvokeFunction"),
        ("rpc.response.status_code", "OK"),
        ("kruntimes.invocation_id", "my-id"),
        ("kruntimes.run_uid", function.registration.run_uid.as_str()),
    ] {
        assert_eq!(good.get(key), value);
    }
    assert_eq!((good.failed, bad.failed), (false, true));
    assert_eq!(
        (bad.get("error.type"), bad.message.as_str()),
        ("HandlerError", "")
    );
    assert!(!String::from_utf8_lossy(&collector.bytes()).contains("hunter2"));
}

/// A setting that makes no sense is told at the start, by its name.
#[test]
fn nonsense_in_the_environment_stops_the_server() {
    let output = Command::new(env!("CARGO_BIN_EXE_kruntimes-runtime-server"))
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
        .env("OTEL_TRACES_SAMPLER", "sometimes")
        .output()
        .expect("run the server");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(
        said.contains("OTEL_TRACES_SAMPLER") && said.contains("parentbased_traceidratio"),
        "{said}"
    );
}
