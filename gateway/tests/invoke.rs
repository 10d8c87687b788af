//! What a caller of a function sees (C-3.1 to C-3.5, C-3.7 to C-3.9).

use std::{collections::HashMap, time::Duration};

use crate::common::{ALICE, Answer, Caller, MALLORY, World, caller::read_all, eventually, owner, path};
use bytes::Bytes;
use http::{Method, Request, Version};
use http_body_util::Full;
use kruntimes_api::{fixtures, run::Phase};
use kruntimes_proto::{
    executor::InvokeFunctionRequest,
    failure::{Dispatched, Failure, Reason},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::Semaphore,
};
use tonic::{Code, Status};

fn post(caller: &Caller, path: &str, body: impl Into<Bytes>) -> Request<Full<Bytes>> {
    caller.request(path).body(body.into().into()).unwrap()
}

fn with(caller: &Caller, path: &str, name: &str, value: impl AsRef<[u8]>) -> Request<Full<Bytes>> {
    let mut request = post(caller, path, "1");
    let name: http::HeaderName = name.parse().unwrap();
    request
        .headers_mut()
        .insert(name, http::HeaderValue::from_bytes(value.as_ref()).unwrap());
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_function_answers_over_both_versions() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let answer = caller.both(|| post(&caller, &function.path, "{\"n\":1}")).await;
    assert_eq!((answer.status, answer.text()), (200, "{\"n\":1}"));
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let timing = answer.header("server-timing").unwrap();
    for part in ["authz;dur=", "route;dur=", "hop;dur=", "handler;dur=1.500"] {
        assert!(timing.contains(part), "C-3.3: {timing}");
    }
    let runs = function.path.replace("/functions/", "/runs/");
    assert_eq!(caller.both(|| post(&caller, &runs, "1")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_owner_gets_the_fence_and_nothing_of_the_client_s_own_contract_4() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let mut request = with(&caller, &function.path, "x-kruntime-invocation-id", "my-id");
    for (name, value) in [
        (
            "traceparent",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ),
        ("kruntime-attempt", "99"),
        ("kruntime-hop", "7"),
        ("kruntime-pod-uid", "mine"),
        ("x-kruntime-timeout-millis", "5000"),
        ("proxy-authorization", "secret"),
        ("te", "trailers"),
        ("x-mine", "1"),
    ] {
        request.headers_mut().insert(name, value.parse().unwrap());
    }
    let answer = caller.send(request, Version::HTTP_11).await;
    assert_eq!(answer.header("x-kruntime-invocation-id"), Some("my-id"));
    let calls = world.owner.calls();
    let (metadata, message) = &calls[0];
    let get = |name: &str| metadata.get(name).map(|value| value.to_str().unwrap());
    assert_eq!(get("authorization"), Some(format!("Bearer {ALICE}").as_str()));
    assert_eq!(get("kruntime-attempt"), Some("1"));
    assert_eq!(get("kruntime-hop"), Some("1"));
    assert_eq!(get("kruntime-pod-uid"), Some(fixtures::uid("pod-a").as_str()));
    assert!(get("traceparent").unwrap().starts_with("00-0af7"));
    assert_eq!((get("x-mine"), get("proxy-authorization")), (None, None));
    assert_eq!(metadata.get_all("kruntime-hop").iter().count(), 1);
    let registration = message.registration.clone().unwrap();
    assert_eq!(
        (
            registration.run_uid.as_str(),
            registration.registration_id.as_str()
        ),
        (function.uid.as_str(), "")
    );
    assert_eq!(
        (message.invocation_id.as_str(), message.content_type.as_str()),
        ("my-id", "application/json")
    );
    assert!(
        (1..=5000).contains(&message.timeout_millis),
        "{}",
        message.timeout_millis
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_token_may_stay_here_c_3_6() {
    let world = World::with(&["--caller-credential", "omit"], |_| {}).await;
    let function = world.function("demo", "hello");
    assert_eq!(world.caller().call(&function.path, "1").await.status, 200);
    assert!(world.owner.calls()[0].0.get("authorization").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_exact_route_and_post() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let good = function.path.as_str();
    assert_eq!(
        caller
            .both(|| post(&caller, &format!("{good}?x=1"), "1"))
            .await
            .status,
        200
    );
    for bad in [
        format!("{good}/"),
        good.replace(":invoke", "%3Ainvoke"),
        good.replace(":invoke", ":Invoke"),
        good.replace("/v1/", "/v1/./"),
        good.replace("/v1/", "/%2e%2e/v1/"),
        good.replace(&function.uid, &function.uid.to_uppercase()),
        format!("/{good}"),
        "/".to_owned(),
    ] {
        let answer = caller.both(|| post(&caller, &bad, "1")).await;
        assert_eq!(
            (answer.status, answer.reason().as_str()),
            (404, "NoSuchRoute"),
            "{bad}"
        );
    }
    for method in [Method::GET, Method::PUT, Method::DELETE, Method::OPTIONS] {
        let answer = caller
            .both(|| {
                let mut request = post(&caller, good, "");
                *request.method_mut() = method.clone();
                request
            })
            .await;
        assert_eq!(
            (answer.status, answer.header("allow")),
            (405, Some("POST")),
            "{method}"
        );
    }
    assert_eq!(world.owner.calls().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_heads_are_told_what_is_wrong() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let long = "a".repeat(129);
    for (name, value, status, reason) in [
        (
            "x-kruntime-invocation-id",
            &b"\xff"[..],
            400,
            "InvalidInvocationId",
        ),
        (
            "x-kruntime-invocation-id",
            long.as_bytes(),
            400,
            "InvalidInvocationId",
        ),
        ("x-kruntime-timeout-millis", b"soon", 400, "InvalidTimeout"),
        ("authorization", b"Basic x", 401, "Unauthenticated"),
        ("authorization", b"Bearer \xff", 401, "Unauthenticated"),
        ("authorization", b"Bearer a,b", 401, "Unauthenticated"),
        ("authorization", b"Bearer ", 401, "Unauthenticated"),
        ("content-type", b"text/plain", 415, "UnsupportedMediaType"),
        ("content-encoding", b"gzip", 415, "UnsupportedContentEncoding"),
    ] {
        let answer = caller.both(|| with(&caller, &function.path, name, value)).await;
        assert_eq!(
            (answer.status, answer.reason().as_str()),
            (status, reason),
            "{name}"
        );
        assert_eq!(answer.dispatched(), "no");
        assert!(
            answer
                .header("x-kruntime-invocation-id")
                .unwrap()
                .starts_with("inv_")
        );
        assert_eq!(answer.header("www-authenticate").is_some(), status == 401);
    }
    let twice = || {
        let mut request = post(&caller, &function.path, "1");
        request
            .headers_mut()
            .append("authorization", "Bearer other".parse().unwrap());
        request
    };
    assert_eq!(caller.both(twice).await.status, 401);
    let odd = caller
        .both(|| {
            with(
                &caller,
                &function.path,
                "x-kruntime-invocation-id",
                "\"<script>%0d%0a",
            )
        })
        .await;
    assert_eq!(odd.header("x-kruntime-invocation-id"), Some("\"<script>%0d%0a"));
    assert_eq!(world.owner.calls().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payload_is_the_same_however_it_is_framed() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let head = format!(
        "POST {} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ALICE}\r\nConnection: close\r\n",
        function.path
    );
    let typed = "Content-Type: application/json\r\n";
    for (rest, expected) in [
        (
            format!("{typed}Content-Length: 7\r\n\r\n{{\"a\":1}}"),
            "{\"a\":1}",
        ),
        (
            format!(
                "{typed}Transfer-Encoding: chunked\r\n\r\n{}0\r\n\r\n",
                "1\r\n{\r\n1\r\n\"\r\n1\r\na\r\n1\r\n\"\r\n1\r\n:\r\n1\r\n1\r\n1\r\n}\r\n"
            ),
            "{\"a\":1}",
        ),
        (
            format!("{typed}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
            "null",
        ),
        (format!("{typed}Content-Length: 0\r\n\r\n"), "null"),
        ("\r\n".to_owned(), "null"),
    ] {
        let answer = caller.raw(format!("{head}{rest}").as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert!(answer.ends_with(&format!("\r\n\r\n{expected}")), "{answer}");
    }
    let request = || caller.request(&function.path).body(Full::default()).unwrap();
    assert_eq!(caller.both(request).await.text(), "null");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_mebibyte_passes_both_ways_and_no_byte_more() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let full = format!("\"{}\"", "a".repeat(1_048_574));
    let answer = caller.both(|| post(&caller, &function.path, full.clone())).await;
    assert_eq!((answer.status, answer.body.len()), (200, 1_048_576));
    let over = format!("{full} ");
    let answer = caller.both(|| post(&caller, &function.path, over.clone())).await;
    assert_eq!(
        (answer.status, answer.reason().as_str()),
        (413, "PayloadTooLarge")
    );
    let chunked = format!(
        "POST {} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ALICE}\r\n\
         Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n{over}\r\n0\r\n\r\n",
        function.path,
        over.len(),
    );
    let answer = caller.raw(chunked.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert_eq!(world.owner.calls().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_framings_are_refused_and_nothing_hidden_runs() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let head = format!(
        "POST {} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ALICE}\r\nContent-Type: application/json\r\n",
        function.path
    );
    let hidden = format!("{head}Content-Length: 1\r\n\r\n1");
    for framing in [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 5\r\nContent-Length: 5\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: 5, 5\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Content-Length : 5\r\n",
        "Content-Length: 5\n",
        "X: a\r\n b\r\nContent-Length: 5\r\n",
    ] {
        let answer = caller
            .raw(format!("{head}{framing}\r\n0\r\n\r\n{hidden}").as_bytes())
            .await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{framing:?}: {answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{framing:?}: {answer}");
        let lower = answer.to_lowercase();
        assert!(
            lower.contains("x-kruntime-invocation-id: inv_"),
            "{framing:?}: {answer}"
        );
        assert!(lower.contains("connection: close"), "{framing:?}: {answer}");
        assert!(
            lower.contains("\"reason\":\"badrequest\""),
            "{framing:?}: {answer}"
        );
        assert!(!answer.contains(ALICE));
    }
    assert_eq!(world.owner.calls().len(), 0);
    assert_eq!(world.api.reviews(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_used_again() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let mut stream = world.caller().connect().await;
    for number in 0..3 {
        let request = format!(
            "POST {} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\nContent-Type: application/json\r\n\
             Content-Length: 1\r\n\r\n{number}",
            function.path
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        while !text.ends_with(&format!("\r\n\r\n{number}")) {
            let mut piece = [0; 4096];
            let read = stream.read(&mut piece).await.unwrap();
            assert!(read > 0, "{text}");
            text.push_str(std::str::from_utf8(&piece[..read]).unwrap());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn continue_is_said_to_those_who_may_and_wait_for_it() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let head = |token: &str, length: usize| {
        format!(
            "POST {} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\nexpect: 100-Continue\r\n\r\n",
            function.path
        )
    };
    for (token, length, status) in [("garbage", 1, 401), (MALLORY, 1, 403), (ALICE, 2 << 20, 413)] {
        let answer = caller.raw(head(token, length).as_bytes()).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    }
    let mut stream = caller.connect().await;
    stream.write_all(head(ALICE, 4).as_bytes()).await.unwrap();
    let mut said = [0; 25];
    stream.read_exact(&mut said).await.unwrap();
    assert_eq!(&said, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"true").await.unwrap();
    let mut answer = vec![0; 1024];
    let read = stream.read(&mut answer).await.unwrap();
    assert!(answer[..read].starts_with(b"HTTP/1.1 200 "));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_failure_of_the_owner_keeps_its_meaning() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    for (reason, status, dispatched) in [
        (Reason::Busy, 429, "no"),
        (Reason::Draining, 503, "no"),
        (Reason::Registering, 503, "no"),
        (Reason::OwnerIsolated, 503, "no"),
        (Reason::ServerUnavailable, 503, "no"),
        (Reason::InvalidPayload, 400, "no"),
        (Reason::Unauthenticated, 401, "no"),
        (Reason::PermissionDenied, 403, "no"),
        (Reason::DeadlineExceeded, 504, "yes"),
        (Reason::HandlerError, 500, "yes"),
        (Reason::WorkerExited, 502, "yes"),
        (Reason::InvalidOutput, 502, "yes"),
        (Reason::RuntimeServerError, 502, "unknown"),
    ] {
        let failure = Failure::new(reason, "the words of the owner");
        world
            .owner
            .answers(move |_| std::future::ready(Err(failure.to_status())));
        let answer = caller.both(|| post(&caller, &function.path, "1")).await;
        assert_eq!(
            (answer.status, answer.reason().as_str()),
            (status, reason.as_str())
        );
        assert_eq!(answer.dispatched(), dispatched, "{reason:?}");
        assert_eq!(answer.json()["detail"], "the words of the owner");
    }
    world.owner.answers(|_| {
        let busy = Failure::new(Reason::Busy, "x").busy_at_most(Duration::from_millis(2500));
        std::future::ready(Err(busy.to_status()))
    });
    assert_eq!(
        caller.call(&function.path, "1").await.json()["busyAtMostMillis"],
        2500
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_code_without_our_word_is_no_answer() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    for code in [
        Code::Unavailable,
        Code::ResourceExhausted,
        Code::OutOfRange,
        Code::Unknown,
        Code::PermissionDenied,
    ] {
        world
            .owner
            .answers(move |_| std::future::ready(Err(Status::new(code, "made up"))));
        let answer = caller.both(|| post(&caller, &function.path, "1")).await;
        assert_eq!(
            (answer.status, answer.reason().as_str()),
            (502, "OutcomeUnknown"),
            "{code:?}"
        );
        assert_eq!(answer.dispatched(), "unknown");
        assert!(!answer.text().contains("made up"));
    }
    assert_eq!(world.owner.calls().len(), 10, "nothing is sent twice");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outputs_are_read_through_an_envelope_c_3_1() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    world.owner.answers(|request: InvokeFunctionRequest| {
        let mut answer = owner::output(request, "[1e3]", "application/json").unwrap();
        answer.get_mut().outputs = HashMap::from([("k".to_owned(), "v".to_owned())]);
        std::future::ready(Ok(answer))
    });
    let plain = caller.both(|| post(&caller, &function.path, "1")).await;
    assert_eq!(plain.text(), "[1e3]");
    let media = "application/vnd.kruntimes.invocation+json";
    let wrapped = caller
        .both(|| with(&caller, &function.path, "accept", media))
        .await;
    assert_eq!(wrapped.header("content-type"), Some(media));
    assert!(wrapped.text().contains("\"output\":[1e3]"), "{}", wrapped.text());
    assert_eq!(wrapped.json()["outputs"]["k"], "v");
    assert_eq!(
        wrapped.json()["invocationId"].as_str(),
        wrapped.header("x-kruntime-invocation-id")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_ready_is_said_with_a_word() {
    let world = World::start().await;
    let caller = world.caller();
    for (name, run, status, reason) in [
        ("a", fixtures::run("demo", "a"), 503, "Pending"),
        (
            "b",
            fixtures::run("demo", "b").running_on("p"),
            503,
            "Registering",
        ),
        (
            "c",
            fixtures::run("demo", "c").ready_on("p").not_ready("Recovering"),
            503,
            "Recovering",
        ),
        (
            "d",
            fixtures::run("demo", "d").ready_on("p").not_ready("Draining"),
            503,
            "Draining",
        ),
    ] {
        let run = run.build();
        world.api.put(&run);
        let path = path("demo", "python", run.metadata.uid.as_deref().unwrap());
        let answer = caller.both(|| post(&caller, &path, "1")).await;
        assert_eq!(
            (answer.status, answer.reason().as_str()),
            (status, reason),
            "{name}"
        );
        assert_eq!(answer.dispatched(), "no");
    }
    let mut ended = fixtures::run("demo", "e").ready_on("p").build();
    ended.status.as_mut().unwrap().phase = Some(Phase::Failed);
    world.api.put(&ended);
    let path = path("demo", "python", ended.metadata.uid.as_deref().unwrap());
    let answer = caller.both(|| post(&caller, &path, "1")).await;
    assert_eq!((answer.status, answer.reason().as_str()), (410, "FunctionEnded"));
    assert!(answer.json()["detail"].as_str().unwrap().contains("Failed"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_is_504_and_the_next_call_is_its_own() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    // This owner is slow and says nothing at its deadline; the next call must not get its late answer.
    world.owner.answers(|request: InvokeFunctionRequest| async move {
        if request.input == "\"A\"" {
            std::future::pending::<()>().await;
        }
        owner::echo(request)
    });
    for version in [Version::HTTP_11, Version::HTTP_2] {
        let mut request = with(&caller, &function.path, "x-kruntime-timeout-millis", "200");
        *request.body_mut() = Full::from("\"A\"");
        let late = caller.send(request, version).await;
        assert_eq!((late.status, late.reason().as_str()), (504, "DeadlineExceeded"));
        assert_eq!(late.dispatched(), "unknown");
        let next = caller.send(post(&caller, &function.path, "\"B\""), version).await;
        assert_eq!(next.text(), "\"B\"");
    }
    world.owner.ended(4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_learns_that_its_caller_is_gone_c_3_8() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    world.owner.answers(|_| std::future::pending());
    let mut stream = caller.connect().await;
    let request = format!(
        "POST {} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\nContent-Type: application/json\r\n\
         Content-Length: 1\r\n\r\n1",
        function.path
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    world.owner.arrived(1).await;
    drop(stream);
    world.owner.ended(1).await;
    // Over HTTP/2 the stream is reset and the connection stays.
    let call = caller.try_send(post(&caller, &function.path, "1"), Version::HTTP_2);
    tokio::select! {
        _ = call => panic!("nobody answers"),
        () = world.owner.arrived(2) => {}
    }
    world.owner.ended(2).await;
    world
        .owner
        .answers(|request| std::future::ready(owner::echo(request)));
    assert_eq!(caller.call(&function.path, "2").await.text(), "2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_side_by_side_do_not_mix() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let calls = (0..60).map(|number| {
        let version = if number % 2 == 0 {
            Version::HTTP_11
        } else {
            Version::HTTP_2
        };
        let request = post(&caller, &function.path, number.to_string());
        let caller = &caller;
        async move { (number, caller.send(request, version).await) }
    });
    for (number, answer) in futures::future::join_all(calls).await {
        assert_eq!((answer.status, answer.text()), (200, number.to_string().as_str()));
    }
    assert_eq!(world.owner.calls().len(), 60);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_function_is_429_and_the_first_call_unharmed() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let slot = std::sync::Arc::new(Semaphore::new(1));
    let release = std::sync::Arc::new(tokio::sync::Notify::new());
    let wait = std::sync::Arc::clone(&release);
    let taken = std::sync::Arc::clone(&slot);
    world.owner.answers(move |request| {
        let (slot, wait) = (std::sync::Arc::clone(&slot), std::sync::Arc::clone(&wait));
        async move {
            let Ok(_permit) = slot.try_acquire_owned() else {
                return Err(Failure::new(Reason::Busy, "one at a time").to_status());
            };
            wait.notified().await;
            owner::echo(request)
        }
    });
    let first = caller.call(&function.path, "1");
    let second = async {
        eventually("the slot is taken", || async {
            (taken.available_permits() == 0).then_some(())
        })
        .await;
        let answer = caller.call(&function.path, "2").await;
        release.notify_one();
        answer
    };
    let (first, second): (Answer, Answer) = tokio::join!(first, second);
    assert_eq!((first.status, first.text()), (200, "1"));
    assert_eq!((second.status, second.header("retry-after")), (429, Some("1")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_cannot_be_reached_is_503_and_back_by_itself() {
    let world = World::start().await;
    let caller = world.caller();
    let gone = owner::Owner::start(&world.pki).await;
    let function = world.function_of(&gone, "demo", "hello");
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    gone.stop();
    let answer = eventually("the owner is found to be gone", || async {
        let answer = caller.call(&function.path, "1").await;
        (answer.status == 503).then_some(answer)
    })
    .await;
    assert_eq!(
        (answer.reason().as_str(), answer.dispatched().as_str()),
        ("OwnerUnreachable", "no")
    );
    // The same process cannot come back; a new one at the same address has another key.
    let back = owner::Owner::start_at(&world.pki, &gone.address()).await;
    let run = fixtures::run("demo", "hello")
        .attempt(2)
        .ready_on("pod-b")
        .owner(&back.address(), &back.key());
    world.api.put(&run.build());
    eventually("the new owner answers", || async {
        (caller.call(&function.path, "1").await.status == 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_used_again_address_gets_neither_call_nor_token() {
    let world = World::start().await;
    let caller = world.caller();
    let first = owner::Owner::start(&world.pki).await;
    let function = world.function_of(&first, "demo", "hello");
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    first.stop();
    // Another process takes the address; the old route stays.
    let other = eventually("the address is free", || async {
        let free = std::net::TcpListener::bind(first.address()).is_ok();
        if free {
            Some(owner::Owner::start_at(&world.pki, &first.address()).await)
        } else {
            None
        }
    })
    .await;
    for _ in 0..3 {
        let answer = caller.both(|| post(&caller, &function.path, "1")).await;
        assert_eq!((answer.status, answer.dispatched().as_str()), (503, "no"));
    }
    assert!(other.calls().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stale_route_is_tried_again_once_when_it_moved_c_3_7() {
    let world = World::start().await;
    let caller = world.caller();
    let old = owner::Owner::start(&world.pki).await;
    let function = world.function_of(&old, "demo", "hello");
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    let moved = fixtures::run("demo", "hello")
        .attempt(2)
        .ready_on("pod-b")
        .owner(&world.owner.address(), &world.owner.key())
        .build();
    let api = world.api.clone();
    let probe = world.gateway.https;
    old.answers(move |_| {
        api.put(&moved);
        async move {
            // Long enough for the watch to deliver; if it were not, the answer would be the 503.
            let _ = probe;
            tokio::time::sleep(Duration::from_millis(500)).await;
            Err(Failure::new(Reason::StaleRoute, "not mine").to_status())
        }
    });
    let answer = caller.call(&function.path, "2").await;
    assert_eq!((answer.status, answer.text()), (200, "2"));
    assert_eq!((old.calls().len(), world.owner.calls().len()), (2, 1));
    let stale = Failure::new(Reason::StaleRoute, "not mine");
    world
        .owner
        .answers(move |_| std::future::ready(Err(stale.to_status())));
    let answer = caller.both(|| post(&caller, &function.path, "3")).await;
    assert_eq!((answer.status, answer.reason().as_str()), (503, "StaleRoute"));
    assert_eq!(world.owner.calls().len(), 3, "the route has not moved");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_started_call_is_never_tried_again() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let failure = Failure::new(Reason::StaleRoute, "half-way").dispatched(Dispatched::Unknown);
    world
        .owner
        .answers(move |_| std::future::ready(Err(failure.to_status())));
    assert_eq!(caller.call(&function.path, "1").await.dispatched(), "unknown");
    assert_eq!(world.owner.calls().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipelined_request_does_not_end_the_one_before_it() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let release = std::sync::Arc::new(tokio::sync::Notify::new());
    let wait = std::sync::Arc::clone(&release);
    world.owner.answers(move |request| {
        let wait = std::sync::Arc::clone(&wait);
        async move {
            wait.notified().await;
            owner::echo(request)
        }
    });
    let request = format!(
        "POST {} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\nContent-Type: application/json\r\n\
         Content-Length: 1\r\n\r\n1",
        function.path
    );
    let mut stream = world.caller().connect().await;
    stream.write_all(request.as_bytes()).await.unwrap();
    world.owner.arrived(1).await;
    stream.write_all(request.as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(50)).await;
    release.notify_one();
    let answer = read_all(&mut stream).await;
    assert!(
        answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\n1"),
        "{answer}"
    );
    assert_eq!(world.owner.calls().len(), 1);
}
