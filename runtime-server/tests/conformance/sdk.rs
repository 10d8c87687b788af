//! The package that Python functions import, against a collector and a publisher proxy
//! on this machine (C-8.3).

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    time::Duration,
};

use kruntimes_proto::executor::InvokeFunctionRequest;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tonic::Request;

use crate::harness::{Function, PATIENCE, Server, Source};

const TRACE_ID: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT_ID: &str = "00f067aa0ba902b7";

/// How the peer behaves.
#[derive(Clone, Copy)]
enum Manner {
    Answers(u16),
    /// Reads and says nothing.
    Silent,
    /// One byte of an answer that never ends, again and again.
    Drips,
}

struct Got {
    line: String,
    headers: String,
    body: Value,
}

/// An HTTP server for one test; its threads end with the process.
struct Peer {
    address: String,
    requests: mpsc::UnboundedReceiver<Got>,
}

impl Peer {
    fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}", listener.local_addr().expect("address"));
        let (got, requests) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let got = got.clone();
                std::thread::spawn(move || {
                    let _ = converse(stream, manner, &got);
                });
            }
        });
        Self { address, requests }
    }

    async fn next(&mut self) -> Got {
        tokio::time::timeout(PATIENCE, self.requests.recv())
            .await
            .expect("no request came")
            .expect("the peer is there")
    }
}

fn converse(stream: TcpStream, manner: Manner, got: &mpsc::UnboundedSender<Got>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let (mut line, mut headers) = (String::new(), String::new());
    reader.read_line(&mut line)?;
    loop {
        let start = headers.len();
        reader.read_line(&mut headers)?;
        if headers[start..].trim().is_empty() {
            break;
        }
    }
    let headers = headers.to_ascii_lowercase();
    let length = headers
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "))
        .and_then(|length| length.trim().parse().ok())
        .unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    let _ = got.send(Got { line, headers, body });
    let mut stream = reader.into_inner();
    match manner {
        Manner::Answers(status) => {
            let answer =
                format!("HTTP/1.1 {status} Word\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n");
            stream.write_all(answer.as_bytes())
        }
        Manner::Silent => stream.read(&mut [0; 16]).map(drop),
        Manner::Drips => {
            stream.write_all(b"HTTP/1.1 200 OK\r\nX: ")?;
            loop {
                stream.write_all(b"x")?;
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

fn source(server: &Server, code: &str, env: &[(&str, &str)]) -> Source {
    let mut source = server.source(&[("main.py", code)]);
    source.env = [("FUNC_NAME", "shop"), ("FUNC_NAMESPACE", "demo")]
        .iter()
        .chain(env)
        .map(|&(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    source
}

async fn call_traced(function: &Function, input: &str, flags: &str) -> Value {
    let mut request = Request::new(InvokeFunctionRequest {
        ..function.request(input)
    });
    let trace = format!("00-{TRACE_ID}-{PARENT_ID}-{flags}");
    request
        .metadata_mut()
        .insert("traceparent", trace.parse().expect("ascii"));
    let answer = function
        .client
        .clone()
        .invoke_function(request)
        .await
        .expect("answer");
    serde_json::from_slice(&answer.into_inner().output).expect("JSON")
}

fn spans(got: &Got) -> Vec<Value> {
    let resources = got.body["resourceSpans"].as_array().expect("resourceSpans");
    resources
        .iter()
        .flat_map(|resource| resource["scopeSpans"].as_array().expect("scopeSpans"))
        .flat_map(|scope| scope["spans"].as_array().expect("spans").clone())
        .collect()
}

fn attribute<'a>(of: &'a Value, key: &str) -> &'a Value {
    let attributes = of["attributes"].as_array().expect("attributes");
    let found = attributes.iter().find(|it| it["key"] == key);
    found.map_or(&Value::Null, |it| &it["value"])
}

const TRACING: &str = r#"
from kruntimes_function import get_tracer
tracer = get_tracer('shop')
def handler(event):
    try:
        with tracer.start_as_current_span('outer', attributes={'n': 3, 'who': 'é', 'sizes': [1.5, 2]}) as span:
            span.add_event('packed', {'ok': True})
            with tracer.start_as_current_span('inner'):
                raise KeyError('missing')
    except KeyError:
        pass
    return event
"#;

/// C-8.3: spans of the function are children of the caller's, and arrive as OTLP in JSON.
#[tokio::test]
async fn spans_reach_the_collector_under_the_callers_trace() {
    let (server, mut collector) = (Server::start().await, Peer::start(Manner::Answers(200)));
    let env = [("TRACE_COLLECTOR_ENDPOINT", collector.address.as_str())];
    let function = server.ready(&source(&server, TRACING, &env)).await;
    assert_eq!(call_traced(&function, "1", "01").await, json!(1));
    let mut found: Vec<Value> = Vec::new();
    while found.len() < 2 {
        let got = collector.next().await;
        assert!(got.line.starts_with("POST /v1/traces "), "{}", got.line);
        assert!(
            got.headers.contains("content-type: application/json"),
            "{}",
            got.headers
        );
        let resource = &got.body["resourceSpans"][0]["resource"];
        assert_eq!(
            attribute(resource, "service.name"),
            &json!({ "stringValue": "shop" })
        );
        found.extend(spans(&got));
    }
    let by_name = |name: &str| found.iter().find(|span| span["name"] == name).expect("span");
    let (outer, inner) = (by_name("outer"), by_name("inner"));
    assert_eq!(
        (&outer["traceId"], &outer["parentSpanId"]),
        (&json!(TRACE_ID), &json!(PARENT_ID))
    );
    assert_eq!(
        (&inner["traceId"], &inner["parentSpanId"]),
        (&json!(TRACE_ID), &outer["spanId"])
    );
    assert_eq!(attribute(outer, "n"), &json!({ "intValue": "3" }));
    assert_eq!(attribute(outer, "who"), &json!({ "stringValue": "é" }));
    assert_eq!(
        attribute(outer, "sizes"),
        &json!({ "arrayValue": { "values": [{ "doubleValue": 1.5 }, { "intValue": "2" }] } })
    );
    assert_eq!(outer["events"][0]["name"], "packed");
    assert_eq!(inner["status"]["code"], 2);
    assert_eq!(
        attribute(&inner["events"][0], "exception.type"),
        &json!({ "stringValue": "KeyError" })
    );
    let nanos = |span: &Value, name: &str| span[name].as_str().expect("text").parse::<u64>().expect("number");
    assert!(nanos(outer, "startTimeUnixNano") <= nanos(inner, "startTimeUnixNano"));
    assert!(nanos(inner, "endTimeUnixNano") <= nanos(outer, "endTimeUnixNano"));
}

/// C-8.3: the caller's word that a trace is not sampled holds.
#[tokio::test]
async fn a_trace_that_is_not_sampled_is_not_exported() {
    let (server, mut collector) = (Server::start().await, Peer::start(Manner::Answers(200)));
    let code = "from kruntimes_function import get_tracer\ndef handler(event):\n    get_tracer().start_span(event).end()\n    return event\n";
    let endpoint = format!("{}/own/path", collector.address);
    let function = server
        .ready(&source(&server, code, &[("TRACE_COLLECTOR_ENDPOINT", &endpoint)]))
        .await;
    call_traced(&function, "\"unsampled\"", "00").await;
    call_traced(&function, "\"sampled\"", "01").await;
    let got = collector.next().await;
    assert!(got.line.starts_with("POST /own/path "), "{}", got.line);
    let names: Vec<Value> = spans(&got).iter().map(|span| span["name"].clone()).collect();
    assert_eq!(names, [json!("sampled")]);
}

/// C-8.3: a tracer costs a function nothing where there is no collector, or a bad one.
#[tokio::test]
async fn a_function_does_not_notice_a_missing_or_broken_collector() {
    let server = Server::start().await;
    let (silent, refusing) = (Peer::start(Manner::Silent), Peer::start(Manner::Answers(500)));
    for endpoint in [
        "",
        "127.0.0.1:1",
        "nonsense://x",
        &silent.address,
        &refusing.address,
    ] {
        let env = [("TRACE_COLLECTOR_ENDPOINT", endpoint)];
        let function = server.ready(&source(&server, TRACING, &env)).await;
        for round in 0..20 {
            let number = round.to_string();
            assert_eq!(function.call(&number).await, Ok(number), "{endpoint}");
        }
    }
    server.log.wait_for(&["spans are lost", "answered 500"]).await;
    let told = server
        .log
        .lines()
        .iter()
        .filter(|line| line.contains("answered 500"))
        .count();
    assert_eq!(told, 1, "once a minute is enough");
}

const PUBLISHING: &str = r#"
import time
import kruntimes_function
def handler(event):
    begin = time.monotonic()
    if 'bytes' in event:
        event['data'] = bytes(event.pop('bytes'))
    try:
        return kruntimes_function.publish_cloud_event(event, **event.pop('keywords', {}))
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - begin]
"#;

/// C-8.3: one POST in structured mode, with defaults for what the function leaves out.
#[tokio::test]
async fn an_event_reaches_the_publisher_proxy() {
    let (server, mut proxy) = (Server::start().await, Peer::start(Manner::Answers(204)));
    let address = format!("{}/publish?x=1", proxy.address);
    let function = server
        .ready(&source(
            &server,
            PUBLISHING,
            &[("PUBLISHER_PROXY_ADDRESS", &address)],
        ))
        .await;
    let id = call_traced(
        &function,
        r#"{"type":"order.created","data":{"é":[1,null]}}"#,
        "01",
    )
    .await;
    let got = proxy.next().await;
    assert!(got.line.starts_with("POST /publish?x=1 "), "{}", got.line);
    assert!(
        got.headers.contains("content-type: application/cloudevents+json"),
        "{}",
        got.headers
    );
    let time = got.body["time"].as_str().expect("time").to_owned();
    assert!(time.ends_with('Z') && time.contains('T'), "{time}");
    let want = json!({
        "specversion": "1.0", "id": id, "type": "order.created", "source": "/namespaces/demo/runs/shop", "time": time,
        "traceparent": format!("00-{TRACE_ID}-{PARENT_ID}-01"),
        "datacontenttype": "application/json", "data": { "é": [1, null] },
    });
    assert_eq!(got.body, want);

    let own = r#"{"id":"7","source":"mine","subject":"s","bytes":[0,255],"keywords":{"type":"t","attempt":3,"time":"2026-01-01T00:00:00Z"}}"#;
    assert_eq!(function.call(own).await.as_deref(), Ok("\"7\""));
    let got = proxy.next().await;
    let want = json!({
        "specversion": "1.0", "id": "7", "type": "t", "source": "mine", "subject": "s", "attempt": 3,
        "time": "2026-01-01T00:00:00Z", "datacontenttype": "application/octet-stream", "data_base64": "AP8=",
    });
    assert_eq!(got.body, want);
}

/// C-8.3: an event that is none is refused before anything is sent.
#[tokio::test]
async fn an_event_that_cannot_be_is_refused_by_its_attribute() {
    let (server, mut proxy) = (Server::start().await, Peer::start(Manner::Answers(204)));
    let env = [("PUBLISHER_PROXY_ADDRESS", proxy.address.as_str())];
    let function = server.ready(&source(&server, PUBLISHING, &env)).await;
    for (event, attribute) in [
        ("{}", "'type'"),
        (r#"{"type":""}"#, "'type'"),
        (r#"{"type":"t","source":""}"#, "'source'"),
        (r#"{"type":"t","id":3}"#, "'id'"),
        (r#"{"type":"t","Upper":"x"}"#, "'Upper'"),
        (r#"{"type":"t","data_base64":"x"}"#, "'data_base64'"),
        (r#"{"type":"t","ext":[1]}"#, "'ext'"),
        (r#"{"type":"t","specversion":"0.3"}"#, "'specversion'"),
    ] {
        let answer: Value = serde_json::from_str(&function.call(event).await.expect("answer")).expect("JSON");
        assert!(
            answer[1].as_str().is_some_and(|text| text.contains(attribute)),
            "{event}: {answer}"
        );
    }
    let large = format!(r#"{{"type":"t","data":"{}"}}"#, "x".repeat(1_048_500));
    let answer = function.call(&large).await.expect("answer");
    assert!(answer.contains("at most 1048576"), "{answer}");
    assert!(proxy.requests.try_recv().is_err(), "nothing was sent");
}

/// C-8.3: what goes wrong is told as a PublishError, in bounded time, and nothing is sent twice.
#[tokio::test]
async fn an_event_that_does_not_arrive_is_an_error_in_bounded_time() {
    let server = Server::start().await;
    let unset = server.ready(&source(&server, PUBLISHING, &[])).await;
    let answer = unset.call(r#"{"type":"t"}"#).await.expect("answer");
    assert!(
        answer.contains("PublishError") && answer.contains("PUBLISHER_PROXY_ADDRESS is not set"),
        "{answer}"
    );

    for (manner, why) in [
        (Some(Manner::Answers(503)), "answered 503"),
        (Some(Manner::Answers(307)), "answered 307"),
        (Some(Manner::Silent), "no answer within 0.3 s"),
        (Some(Manner::Drips), "no answer within 0.3 s"),
        (None, "refused"),
    ] {
        let mut proxy = manner.map(Peer::start);
        let address = proxy
            .as_ref()
            .map_or("http://me:secret@127.0.0.1:1", |proxy| proxy.address.as_str());
        let function = server
            .ready(&source(
                &server,
                PUBLISHING,
                &[("PUBLISHER_PROXY_ADDRESS", address)],
            ))
            .await;
        let answer = function
            .call(r#"{"type":"t","keywords":{"timeout":0.3}}"#)
            .await
            .expect("answer");
        assert!(
            answer.contains("PublishError") && answer.contains(why),
            "{answer}"
        );
        assert!(!answer.contains("secret"), "{answer}");
        if let Some(proxy) = &mut proxy {
            proxy.next().await;
            assert!(proxy.requests.try_recv().is_err(), "sent twice");
        }
    }
    let bad = server
        .ready(&source(
            &server,
            PUBLISHING,
            &[("PUBLISHER_PROXY_ADDRESS", "ftp://x")],
        ))
        .await;
    let answer = bad.call(r#"{"type":"t"}"#).await.expect("answer");
    assert!(
        answer.contains("PublishError") && answer.contains("no http or https address"),
        "{answer}"
    );
}

/// C-8.3: an exchange is never longer than the call, so that its error can be told.
#[tokio::test]
async fn publishing_ends_with_the_time_of_the_call() {
    let (server, proxy) = (Server::start().await, Peer::start(Manner::Silent));
    let code = "from kruntimes_function import PublishError, publish_cloud_event\ndef handler(event):\n    try:\n        \
                publish_cloud_event(type='t', timeout=1000)\n    except PublishError:\n        return 'told'\n";
    let env = [("PUBLISHER_PROXY_ADDRESS", proxy.address.as_str())];
    let function = server.ready(&source(&server, code, &env)).await;
    let answer = function.call_within("1", Duration::from_secs(4)).await;
    assert_eq!(answer.as_deref(), Ok("\"told\""));
}

/// C-8.3: outside of a runtime, in a unit test of the function, the package works as well.
#[test]
fn the_package_can_be_used_without_a_runtime() {
    let code = "from kruntimes_function import *\nwith get_tracer().start_as_current_span('x'): pass\n\
                try: publish_cloud_event(type='t')\nexcept PublishError as error: print(error)\nprint(Response('x', 'text/plain'))\n";
    let output = std::process::Command::new("python3")
        .args(["-B", "-c", code])
        .env("PYTHONPATH", concat!(env!("CARGO_MANIFEST_DIR"), "/shims/python"))
        .env_remove("PUBLISHER_PROXY_ADDRESS")
        .env_remove("TRACE_COLLECTOR_ENDPOINT")
        .output()
        .expect("python3");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        text.contains("is not set") && text.contains("Response(1 bytes"),
        "{text}"
    );
}
