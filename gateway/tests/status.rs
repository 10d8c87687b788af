//! The table of statuses, a test for each of its rows, each over HTTP/1.1 and HTTP/2 (C-3.5, C-3.2, C-3.4; bug
//! scenarios 24 and 45). `Caller::refused` checks what every refusal must have.

use std::{sync::Arc, time::Duration};

use http::Method;
use kruntimes_api::{
    fixtures::{self, RunBuilder},
    run::Phase,
};
use kruntimes_proto::failure::{Failure, Reason};
use tonic::{Code, Status};

use crate::common::{ALICE, MALLORY, World, owner, path, wait_for};

const GATEWAY: &str = "gateway";
const NO: &str = "no";

fn no_such_route(reason: &'static str) -> (u16, &'static str, &'static str, &'static str) {
    (404, reason, GATEWAY, NO)
}

/// C-3.5: path, method.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_path_is_404_and_another_method_405() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let elsewhere = || caller.with("/v1/functions", "x-kruntime-invocation-id", "mine");
    caller.refused(elsewhere, no_such_route("NoSuchRoute")).await;
    for (path, allowed, others) in [
        (
            function.path.clone(),
            "POST",
            [Method::GET, Method::DELETE, Method::PUT],
        ),
        (
            function.page(),
            "GET",
            [Method::POST, Method::DELETE, Method::PATCH],
        ),
        (
            function.invocation("a"),
            "DELETE",
            [Method::GET, Method::POST, Method::PUT],
        ),
    ] {
        for method in others {
            let answer = caller
                .refused(
                    || caller.ask(method.clone(), &path),
                    (405, "MethodNotAllowed", GATEWAY, NO),
                )
                .await;
            assert_eq!(answer.header("allow"), Some(allowed));
        }
    }
}

/// C-3.5: headers, invocation id, timeout. Framing and slow senders have no equal over HTTP/2: `bodies`, `limits`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_headers_are_400_and_too_many_431() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let long = "a".repeat(70_000);
    for (name, value, status, reason) in [
        ("x-kruntime-invocation-id", "a b", 400, "InvalidInvocationId"),
        ("x-kruntime-timeout-millis", "soon", 400, "InvalidTimeout"),
        ("x-long", long.as_str(), 431, "HeadersTooLarge"),
    ] {
        let answer = caller
            .refused(
                || caller.with(&function.path, name, value),
                (status, reason, GATEWAY, NO),
            )
            .await;
        let id = answer.header("x-kruntime-invocation-id").unwrap();
        assert!(id.starts_with("inv_"), "generated: {id}");
    }
    let twice = || {
        let mut request = caller.with(&function.path, "x-kruntime-invocation-id", "mine");
        let again = "mine".parse().unwrap();
        request.headers_mut().append("x-kruntime-invocation-id", again);
        request
    };
    let answer = caller
        .refused(twice, (400, "InvalidInvocationId", GATEWAY, NO))
        .await;
    let id = answer.header("x-kruntime-invocation-id").unwrap();
    assert!(id.starts_with("inv_"), "not the first of the two: {id}");
}

/// C-3.5: Authorization absent, twice, not Bearer, empty; scenario 55.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_token_it_is_401() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let says = (401, "Unauthenticated", GATEWAY, NO);
    for value in [
        "Basic x",
        "Bearer",
        "Bearer ",
        "Bearer  x",
        "Bearer\tx",
        "Bearer a,b",
        "bearerx",
    ] {
        let answer = caller
            .refused(|| caller.with(&function.path, "authorization", value), says)
            .await;
        assert_eq!(
            answer.header("www-authenticate"),
            Some("Bearer realm=\"kruntimes\"")
        );
    }
    let absent = || {
        let mut request = caller.post(&function.path, "1");
        request.headers_mut().remove("authorization");
        request
    };
    caller.refused(absent, says).await;
    let twice = || {
        let mut request = caller.post(&function.path, "1");
        let again = format!("Bearer {ALICE}").parse().unwrap();
        request.headers_mut().append("authorization", again);
        request
    };
    caller.refused(twice, says).await;
    assert_eq!(
        caller
            .send(
                caller.with(&function.path, "authorization", format!("bEARER {ALICE}")),
                http::Version::HTTP_2
            )
            .await
            .status,
        200
    );
    assert_eq!(world.api.reviews(), 1, "only for the one that was a token");
}

/// C-3.5: content type not JSON, any content encoding.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_plain_json_is_415() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    for (name, value, reason) in [
        ("content-type", "text/plain", "UnsupportedMediaType"),
        (
            "content-type",
            "application/json; charset=latin1",
            "UnsupportedMediaType",
        ),
        ("content-encoding", "gzip", "UnsupportedContentEncoding"),
        ("content-encoding", "identity", "UnsupportedContentEncoding"),
    ] {
        caller
            .refused(
                || caller.with(&function.path, name, value),
                (415, reason, GATEWAY, NO),
            )
            .await;
    }
}

/// C-3.5: declared length over 1,048,576 bytes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_declared_length_over_the_limit_is_413() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let over = vec![b'1'; 1_048_577];
    caller
        .refused(
            || caller.post(&function.path, over.clone()),
            (413, "PayloadTooLarge", GATEWAY, NO),
        )
        .await;
    assert_eq!(world.api.reviews(), 0, "syntax comes first");
}

/// C-3.5: unknown UID, what does not belong together, a task: one answer for all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_function_is_404_and_one_answer_for_all() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let task = world.put(&fixtures::run("demo", "task").task().ready_on("p").build());
    let caller = world.caller();
    let mut bodies = Vec::new();
    for bad in [
        path("demo", "python", &fixtures::uid("nobody")),
        path("other", "python", &function.uid),
        path("demo", "node", &function.uid),
        task.path,
    ] {
        let answer = caller
            .refused(|| caller.post(&bad, "1"), no_such_route("NoSuchFunction"))
            .await;
        let mut body = answer.json();
        body["invocationId"].take();
        bodies.push(body);
    }
    bodies.dedup();
    assert_eq!(bodies.len(), 1, "{bodies:?}");
    assert_eq!(world.api.reviews(), 0, "strangers learn nothing, also by time");
}

/// C-3.5: token rejected by Kubernetes, not allowed to `get` that Run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_is_401_and_a_stranger_403() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let garbage = caller
        .refused(
            || caller.by(&function.path, "garbage"),
            (401, "Unauthenticated", GATEWAY, NO),
        )
        .await;
    assert!(
        garbage
            .header("www-authenticate")
            .unwrap()
            .contains("invalid_token")
    );
    let stranger = caller
        .refused(
            || caller.by(&function.path, MALLORY),
            (403, "PermissionDenied", GATEWAY, NO),
        )
        .await;
    for answer in [garbage, stranger] {
        assert!(!answer.text().contains("garbage") && !answer.text().contains(MALLORY));
    }
    assert!(world.owner.calls().is_empty());
}

/// C-3.5: access review impossible and nothing cached; never taken as a denial.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_access_review_is_503() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    // It must be known before the API goes away.
    wait_for(&caller, &function).await;
    world.api.down(true);
    caller
        .refused(
            || caller.by(&function.path, MALLORY),
            (503, "AuthorizationUnavailable", GATEWAY, NO),
        )
        .await;
}

/// C-3.5: Run ended, with its phase and reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ended_function_is_410() {
    let world = World::start().await;
    let caller = world.caller();
    let run = fixtures::run("demo", "e")
        .ready_on("p")
        .ended(Phase::Timeout, "IdleTimeout");
    let function = world.put(&run.build());
    let answer = caller
        .refused(
            || caller.post(&function.path, "1"),
            (410, "FunctionEnded", GATEWAY, NO),
        )
        .await;
    let detail = answer.json()["detail"].as_str().unwrap().to_owned();
    assert!(
        detail.contains("Timeout") && detail.contains("IdleTimeout"),
        "{detail}"
    );
}

/// C-3.5: Run not Ready: pending, registering, recovering, draining, terminating; that word is the reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_function_that_is_not_ready_is_503_with_a_word() {
    let world = World::start().await;
    let caller = world.caller();
    let ready = |name: &str| fixtures::run("demo", name).ready_on("p");
    let all: [(RunBuilder, &str); 7] = [
        (fixtures::run("demo", "a"), "Pending"),
        (fixtures::run("demo", "b").scheduled_on("p"), "Pending"),
        (fixtures::run("demo", "c").running_on("p"), "Registering"),
        (ready("d").not_ready("Recovering"), "Recovering"),
        (ready("e").not_ready("Draining"), "Draining"),
        (ready("f").cancelled(), "Terminating"),
        (ready("g").deleting(), "Terminating"),
    ];
    for (run, reason) in all {
        let function = world.put(&run.build());
        caller
            .refused(|| caller.post(&function.path, "1"), (503, reason, GATEWAY, NO))
            .await;
    }
}

/// C-3.5: gateway at its own limit, or one namespace over its share.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_gateway_is_503() {
    let flags = ["--max-in-flight", "3", "--max-in-flight-per-namespace", "2"];
    let world = World::with(&flags, |_| {}).await;
    let (a, b) = (world.function("a", "hello"), world.function("b", "hello"));
    let gate = world.owner.gate();
    let caller = world.caller();
    let call = |path: &str| caller.send(caller.post(path, "1"), http::Version::HTTP_2);
    let says = (503, "Overloaded", GATEWAY, NO);
    let rest = async {
        world.owner.arrived(2).await;
        let refused = caller.refused(|| caller.post(&a.path, "1"), says).await;
        assert!(refused.text().contains("of this namespace"), "{}", refused.text());
        let (third, ()) = tokio::join!(call(&b.path), async {
            world.owner.arrived(3).await;
            let refused = caller.refused(|| caller.post(&b.path, "1"), says).await;
            assert!(refused.text().contains("in all"), "{}", refused.text());
            gate.add_permits(3);
        });
        assert_eq!(third.status, 200);
    };
    let (first, second, ()) = tokio::join!(call(&a.path), call(&a.path), rest);
    assert_eq!((first.status, second.status), (200, 200));
    world
        .owner
        .answers(|request| std::future::ready(owner::echo(request)));
    assert_eq!(call(&a.path).await.status, 200, "the places are free again");
}

/// C-3.5: a call of that function is in flight; C-3.4: `Retry-After` of 1 s, and for how long it may take.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_function_is_429() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    world.owner.answers(|_| {
        let busy = Failure::new(Reason::Busy, "one at a time").busy_at_most(Duration::from_millis(2500));
        std::future::ready(Err(busy.to_status()))
    });
    let caller = world.caller();
    let answer = caller
        .refused(|| caller.post(&function.path, "1"), (429, "Busy", "runtimed", NO))
        .await;
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(answer.json()["busyAtMostMillis"], 2500);
}

/// C-3.5: every other row that the owner, the Runtime Server or the function decides. A 500 has the title
/// `Internal Server Error`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_owner_says_keeps_its_meaning() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    world
        .owner
        .answers(|request| std::future::ready(owner::fail(request)));
    for (reason, status, component, dispatched) in [
        // The owner refuses.
        (Reason::StaleRoute, 503, "runtimed", NO),
        (Reason::Draining, 503, "runtimed", NO),
        (Reason::Registering, 503, "runtimed", NO),
        (Reason::Recovering, 503, "runtimed", NO),
        (Reason::Terminating, 503, "runtimed", NO),
        (Reason::OwnerIsolated, 503, "runtimed", NO),
        (Reason::AuthorizationUnavailable, 503, "runtimed", NO),
        (Reason::Unauthenticated, 401, "runtimed", NO),
        (Reason::PermissionDenied, 403, "runtimed", NO),
        (Reason::BadHop, 502, "runtimed", NO),
        // The server cannot take work.
        (Reason::ServerUnavailable, 503, "runtime-server", NO),
        (Reason::RegistrationNotFound, 503, "runtime-server", NO),
        (Reason::RegistrationConflict, 503, "runtime-server", NO),
        (Reason::StaleRegistration, 503, "runtime-server", NO),
        (Reason::FunctionsUnsupported, 503, "runtime-server", NO),
        // Invalid payload, deadline, cancelled.
        (Reason::InvalidPayload, 400, "runtime-server", NO),
        (Reason::DeadlineExceeded, 504, "runtime-server", "yes"),
        (Reason::Cancelled, 499, "runtimed", "yes"),
        // The function raised; died; its output is bad; its server broke the protocol.
        (Reason::HandlerError, 500, "function", "yes"),
        (Reason::WorkerExited, 502, "function", "yes"),
        (Reason::InvalidOutput, 502, "function", "yes"),
        (Reason::RuntimeServerError, 502, "runtime-server", "unknown"),
        (Reason::OutcomeUnknown, 502, "runtimed", "unknown"),
    ] {
        let payload = format!("\"{}\"", reason.as_str());
        let answer = caller
            .refused(
                || caller.post(&function.path, payload.clone()),
                (status, reason.as_str(), component, dispatched),
            )
            .await;
        assert_eq!(answer.json()["detail"], "the words of the owner");
        if status == 500 {
            assert_eq!(answer.json()["title"], "Internal Server Error");
        }
    }
}

/// C-3.5: the answer of the owner is none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_output_over_the_limit_is_502() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    world.owner.answers(|request| {
        std::future::ready(owner::output(request, vec![b'1'; 1_048_577], "application/json"))
    });
    caller
        .refused(
            || caller.post(&function.path, "1"),
            (502, "RuntimeServerError", "runtimed", "yes"),
        )
        .await;
}

/// C-3.5: anything ambiguous after the request left. Only our own ErrorInfo makes a status an answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_code_without_our_word_is_an_unknown_outcome() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let codes = [
        Code::Unavailable,
        Code::ResourceExhausted,
        Code::OutOfRange,
        Code::Unknown,
        Code::PermissionDenied,
        Code::Unimplemented,
    ];
    for code in codes {
        world
            .owner
            .answers(move |_| std::future::ready(Err(Status::new(code, "made up"))));
        let answer = caller
            .refused(
                || caller.post(&function.path, "1"),
                (502, "OutcomeUnknown", GATEWAY, "unknown"),
            )
            .await;
        assert!(!answer.text().contains("made up"));
    }
    assert_eq!(
        world.owner.calls().len(),
        2 * codes.len(),
        "nothing is sent twice"
    );
}

/// C-3.4, C-3.5: two calls that overlap; scenario 29.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_second_of_two_calls_is_429_at_once_and_the_first_unharmed() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let slot = Arc::new(tokio::sync::Semaphore::new(1));
    let release = Arc::new(tokio::sync::Notify::new());
    let wait = Arc::clone(&release);
    world.owner.answers(move |request| {
        let (slot, wait) = (Arc::clone(&slot), Arc::clone(&wait));
        async move {
            let Ok(_permit) = slot.try_acquire_owned() else {
                return Err(Failure::new(Reason::Busy, "one at a time").to_status());
            };
            wait.notified().await;
            owner::echo(request)
        }
    });
    let second = async {
        world.owner.arrived(1).await;
        // The first one runs until it is released here: this answer does not wait for it.
        caller
            .refused(|| caller.post(&function.path, "2"), (429, "Busy", "runtimed", NO))
            .await;
        release.notify_one();
    };
    let (first, ()) = tokio::join!(caller.call(&function.path, "1"), second);
    assert_eq!((first.status, first.text()), (200, "1"));
}
