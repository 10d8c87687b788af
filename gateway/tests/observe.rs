//! What an operator sees: health, metrics and one line a request (C-3.14, C-3.2; bug scenarios 40 and 45).

use http::{Method, Version};
use serde_json::Value;
use tokio::io::AsyncWriteExt as _;

use crate::common::{Logs, MALLORY, World, admin, caller::head, eventually, metric, start};

/// C-3.14: the names of metrics that are promised, each documented.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_have_the_names_that_are_promised() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    assert_eq!(caller.call("/", "1").await.status, 404);
    let explained = caller
        .send(caller.ask(Method::GET, &function.page()), Version::HTTP_2)
        .await;
    assert_eq!(explained.status, 200);
    let page = admin(&world.gateway, "/metrics").await;
    for line in [
        "kruntimes_gateway_requests_total{status=\"200\",reason=\"OK\",component=\"function\"} 1",
        "kruntimes_gateway_requests_total{status=\"200\",reason=\"OK\",component=\"gateway\"} 1",
        "kruntimes_gateway_requests_total{status=\"404\",reason=\"NoSuchRoute\",component=\"gateway\"} 1",
        "kruntimes_gateway_authorizations_total{result=\"allowed\",cached=\"false\"} 1",
        "kruntimes_gateway_authorizations_total{result=\"allowed\",cached=\"true\"} 1",
        "kruntimes_gateway_review_duration_seconds_count 1",
        "kruntimes_gateway_handshakes_total{result=\"ok\"} ",
        "kruntimes_gateway_connections ",
        "kruntimes_gateway_routes 1",
        "kruntimes_gateway_routes_ready 1",
        "kruntimes_gateway_route_age_seconds ",
        "kruntimes_gateway_owners 1",
        "kruntimes_gateway_certificate_not_after_seconds ",
        "kruntimes_gateway_peer_certificate_not_after_seconds ",
        "kruntimes_gateway_calls_in_flight 0",
        "http_server_request_duration_seconds_count{http_request_method=\"POST\",http_response_status_code=\"200\"",
        "http_server_request_duration_seconds_count{http_request_method=\"GET\",http_response_status_code=\"200\"",
        "http_server_request_duration_seconds_count{http_request_method=\"other\",http_response_status_code=\"404\"",
        "process_cpu_seconds_total ",
    ] {
        assert!(page.contains(line), "{line}\n{page}");
    }
    assert!(!page.contains("certificate_not_after_seconds 0\n"), "{page}");
    assert!(
        !page.contains(&function.uid) && !page.contains("hello"),
        "no names of objects as labels"
    );
    let documented = include_str!("../../docs/metrics.md");
    for name in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = name.split_once(' ').unwrap();
        let total = if kind == "counter" { "_total" } else { "" };
        assert!(
            documented.contains(&format!("| `{name}{total}` | {kind} |")),
            "docs/metrics.md lacks {name} {kind}"
        );
    }
}

/// C-3.14
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_is_told_on_a_port_of_its_own() {
    let world = World::start().await;
    for path in ["/livez", "/readyz"] {
        assert!(
            admin(&world.gateway, path).await.starts_with("HTTP/1.1 200 "),
            "{path}"
        );
    }
    // While nobody can say which Runs there are it is alive, and not ready.
    let api = crate::common::Api::start().await;
    api.hold_lists(true);
    let waiting = start(world.dirs.path(), &api, &[], |_| {}).await;
    assert!(admin(&waiting, "/livez").await.starts_with("HTTP/1.1 200 "));
    let page = admin(&waiting, "/readyz").await;
    assert!(
        page.starts_with("HTTP/1.1 503 ") && page.contains("routes"),
        "{page}"
    );
    let caller = crate::common::Caller::new(waiting.https, &world.pki);
    let path = world.function("demo", "hello").path;
    caller
        .refused(|| caller.post(&path, "1"), (503, "Starting", "gateway", "no"))
        .await;
    api.hold_lists(false);
    waiting.readiness.ready().await;
    assert!(admin(&waiting, "/readyz").await.starts_with("HTTP/1.1 200 "));
}

/// C-3.2; scenario 45: one line of JSON a request, with the id and the status that the caller got.
#[tokio::test]
async fn each_request_has_one_line_with_its_id_and_status() {
    let logs = Logs::with_filter("info");
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let mut expected = Vec::new();
    for version in [Version::HTTP_11, Version::HTTP_2] {
        for request in [
            caller.post(&function.path, "1"),
            caller.with(&function.path, "x-kruntime-invocation-id", "\"mine\"{}"),
            caller.with(&function.path, "x-kruntime-invocation-id", "a b"),
            caller.with(&function.path, "content-type", "text/plain"),
            caller.by(&function.path, "garbage"),
            caller.by(&function.path, MALLORY),
            caller.post("/nowhere", "1"),
            caller.ask(Method::PUT, &function.path),
            caller.ask(Method::GET, &function.page()),
            caller.ask(Method::DELETE, &function.invocation("none")),
        ] {
            let answer = caller.send(request, version).await;
            let id = answer.header("x-kruntime-invocation-id").unwrap().to_owned();
            expected.push((id, u64::from(answer.status)));
        }
    }
    let lines = eventually("all lines are written", || async {
        let lines = logs.access();
        (lines.len() >= expected.len()).then_some(lines)
    })
    .await;
    let said: Vec<_> = lines
        .iter()
        .map(|line| {
            (
                line["invocation_id"].as_str().unwrap().to_owned(),
                line["status"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(said, expected);
    let first = &lines[0];
    for (field, value) in [
        ("reason", "OK"),
        ("component", "function"),
        ("dispatched", "yes"),
        ("namespace", "demo"),
        ("runtime", "python"),
        ("run_uid", function.uid.as_str()),
        ("method", "POST"),
        ("http", "1.1"),
        ("level", "INFO"),
    ] {
        assert_eq!(first[field], value, "{field}: {first}");
    }
    assert!(
        first["took_ms"].is_f64() && first["timestamp"].is_string(),
        "{first}"
    );
}

/// C-3.8, C-3.2; scenario 40: a caller that leaves is no error, and the line says whether anything was dispatched.
#[tokio::test]
async fn a_caller_that_leaves_is_a_line_and_no_error() {
    let logs = Logs::with_filter("info");
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    world.owner.answers(|_| std::future::pending());
    let line = async |number: usize| -> Value {
        eventually("its line is written", || async {
            logs.access().get(number).cloned()
        })
        .await
    };
    // Before its body was whole.
    let mut stream = caller.connect().await;
    let half = head(&function.path, "Content-Length: 5\r\n") + "12";
    stream.write_all(half.as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    eventually("the call is admitted", || async {
        (metric(&world.gateway, "kruntimes_gateway_calls_in_flight").await == 1.0).then_some(())
    })
    .await;
    drop(stream);
    let left = line(0).await;
    assert_eq!(
        (left["status"].as_u64(), left["reason"].as_str()),
        (Some(499), Some("CallerGone"))
    );
    assert_eq!(left["dispatched"], "no", "nothing was sent");
    assert!(world.owner.calls().is_empty());
    // While it ran.
    let mut stream = caller.connect().await;
    let whole = head(&function.path, "Content-Length: 1\r\n") + "1";
    stream.write_all(whole.as_bytes()).await.unwrap();
    world.owner.arrived(1).await;
    drop(stream);
    let left = line(1).await;
    assert_eq!(
        (left["reason"].as_str(), left["dispatched"].as_str()),
        (Some("CallerGone"), Some("unknown"))
    );
    let loud: Vec<_> = logs
        .lines()
        .into_iter()
        .filter(|line| line["level"] != "INFO")
        .collect();
    assert!(loud.is_empty(), "{loud:?}");
}
