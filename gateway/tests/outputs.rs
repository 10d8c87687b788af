//! What a function returned, as its caller gets it (C-3.1, C-3.3; bug scenario 46).

use std::collections::HashMap;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use kruntimes_proto::{
    executor::InvokeFunctionRequest,
    failure::{Failure, Reason},
};
use serde_json::{Value, json};

use crate::common::{World, owner};

const ENVELOPE: &str = "application/vnd.kruntimes.invocation+json";

/// C-3.1, C-3.3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_body_is_the_output_and_headers_say_where_the_time_went() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let answer = caller.both(|| caller.post(&function.path, "{\"n\":1}")).await;
    assert_eq!((answer.status, answer.text()), (200, "{\"n\":1}"));
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let timing = answer.header("server-timing").unwrap();
    for part in ["authz;dur=", "route;dur=", "hop;dur=", "handler;dur=1.500"] {
        assert!(timing.contains(part), "{timing}");
    }
    let runs = function.path.replace("/functions/", "/runs/");
    assert_eq!(caller.both(|| caller.post(&runs, "1")).await.status, 200);
    // Of an error, as far as it came.
    world
        .owner
        .answers(|_| std::future::ready(Err(Failure::new(Reason::HandlerError, "x").to_status())));
    let failed = caller.both(|| caller.post(&function.path, "1")).await;
    let timing = failed.header("server-timing").unwrap();
    assert!(
        timing.contains("hop;dur=") && !timing.contains("handler"),
        "{timing}"
    );
    assert_eq!(
        caller
            .both(|| caller.post("/", "1"))
            .await
            .header("server-timing"),
        None
    );
}

/// C-3.1; scenario 46: empty is empty, `null` is `null`, and both keep their type and the id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_output_keeps_its_bytes_and_its_type() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    for (body, content_type) in [
        (&b""[..], "text/plain"),
        (b"", "application/json"),
        (b"null", "application/json"),
        (b"\"\"", "application/json"),
        (b"a\0b\n\n", "application/octet-stream"),
        (b"\xff\xfe", "image/x-odd; q=\"1\""),
    ] {
        world
            .owner
            .answers(move |request| std::future::ready(owner::output(request, body, content_type)));
        for version in [http::Version::HTTP_11, http::Version::HTTP_2] {
            let request = caller.with(&function.path, "x-kruntime-invocation-id", "mine");
            let answer = caller.send(request, version).await;
            assert_eq!((answer.status, &answer.body[..]), (200, body));
            assert_eq!(answer.header("content-type"), Some(content_type));
            assert_eq!(
                answer.header("content-length"),
                Some(body.len().to_string().as_str())
            );
            assert_eq!(answer.header("x-kruntime-invocation-id"), Some("mine"));
        }
    }
}

/// C-3.1: the only way to read `outputs`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outputs_are_read_through_an_envelope() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    world.owner.answers(|request: InvokeFunctionRequest| {
        let mut answer = owner::output(request, "[1e3]", "application/json").unwrap();
        answer.get_mut().outputs = HashMap::from([("k".to_owned(), "v".to_owned())]);
        std::future::ready(Ok(answer))
    });
    let plain = caller.both(|| caller.post(&function.path, "1")).await;
    assert_eq!(plain.text(), "[1e3]");
    let wrapped = caller
        .both(|| caller.with(&function.path, "accept", ENVELOPE))
        .await;
    assert_eq!(wrapped.header("content-type"), Some(ENVELOPE));
    assert!(wrapped.text().contains("\"output\":[1e3]"), "{}", wrapped.text());
    assert_eq!(wrapped.json()["outputs"]["k"], "v");
    assert_eq!(
        wrapped.json()["invocationId"].as_str(),
        wrapped.header("x-kruntime-invocation-id")
    );
}

/// C-3.1: `outputBase64` for what is neither JSON nor text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_envelope_shows_every_kind_of_output() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    for (body, content_type, output) in [
        (&b"{\"a\":[1]}"[..], "application/json", Some(json!({"a": [1]}))),
        (b"null", "application/json", Some(Value::Null)),
        ("é".as_bytes(), "text/plain", Some(json!("é"))),
        (b"", "text/plain", Some(json!(""))),
        (b"no json", "application/json", Some(json!("no json"))),
        (b"\xff\x00", "application/octet-stream", None),
        (b"\"\xff\"", "application/json", None),
    ] {
        world
            .owner
            .answers(move |request| std::future::ready(owner::output(request, body, content_type)));
        let envelope = caller
            .both(|| caller.with(&function.path, "accept", ENVELOPE))
            .await
            .json();
        assert_eq!(envelope["contentType"], content_type);
        match output {
            Some(output) => {
                assert_eq!(envelope.get("output"), Some(&output), "{envelope}");
                assert!(envelope.get("outputBase64").is_none(), "{envelope}");
            }
            None => {
                assert_eq!(envelope["outputBase64"], BASE64_STANDARD.encode(body));
                assert!(envelope.get("output").is_none(), "{envelope}");
            }
        }
    }
}

/// C-3.1: an error is no envelope, whoever asks for one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_is_a_problem_also_for_those_who_want_an_envelope() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    world
        .owner
        .answers(|_| std::future::ready(Err(Failure::new(Reason::WorkerExited, "x").to_status())));
    caller
        .refused(
            || caller.with(&function.path, "accept", ENVELOPE),
            (502, "WorkerExited", "function", "yes"),
        )
        .await;
}

/// C-3.1: nothing of one call in another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_side_by_side_do_not_mix() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let calls = (0..60).map(|number| {
        let version = if number % 2 == 0 {
            http::Version::HTTP_11
        } else {
            http::Version::HTTP_2
        };
        let request = caller.post(&function.path, number.to_string());
        let caller = &caller;
        async move { (number, caller.send(request, version).await) }
    });
    for (number, answer) in futures::future::join_all(calls).await {
        assert_eq!((answer.status, answer.text()), (200, number.to_string().as_str()));
    }
    assert_eq!(world.owner.calls().len(), 60);
}
