//! What callers may take: bytes, time, places (C-3.5).

use std::{sync::Arc, time::Duration};

use crate::common::{ALICE, World, caller::read_all, eventually, owner};
use http::Version;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::Notify,
};

fn head(path: &str, rest: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\n\
         Content-Type: application/json\r\n{rest}\r\n"
    )
}

async fn impatient() -> World {
    World::with(&[], |config| {
        config.patience.handshake = Duration::from_millis(300);
        config.patience.head = Duration::from_millis(300);
        config.patience.body_gap = Duration::from_millis(300);
        config.patience.idle = Duration::from_millis(900);
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_head_and_a_slow_body_are_408_and_the_connection_closes() {
    let world = impatient().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let half_head = head(&function.path, "")[..40].to_owned();
    let no_body = head(&function.path, "Content-Length: 5\r\n");
    let half_body = format!("{no_body}12");
    let chunked = format!(
        "{}1\r\n1\r\n",
        head(&function.path, "Transfer-Encoding: chunked\r\n")
    );
    for bytes in [half_head, no_body, half_body, chunked] {
        let answer = caller.raw(bytes.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 408 "), "{bytes}: {answer}");
        let lower = answer.to_lowercase();
        assert!(
            lower.contains("x-kruntime-invocation-id: ") && lower.contains("connection: close"),
            "{answer}"
        );
        assert!(answer.contains("\"reason\":\"RequestTimeout\""), "{answer}");
    }
    assert!(world.owner.calls().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_is_withheld_after_continue_is_408() {
    let world = impatient().await;
    let function = world.function("demo", "hello");
    let request = head(&function.path, "Content-Length: 5\r\nExpect: 100-continue\r\n");
    let answer = world.caller().raw(request.as_bytes()).await;
    assert!(
        answer.starts_with("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 408 "),
        "{answer}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_is_closed_without_a_word() {
    let world = impatient().await;
    let answer = world.caller().raw(b"").await;
    assert_eq!(answer, "");
    // No TLS at all, and a handshake that never ends.
    let mut silent = TcpStream::connect(world.gateway.https).await.unwrap();
    let mut plain = TcpStream::connect(world.gateway.https).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let mut bytes = Vec::new();
    let _ = silent.read_to_end(&mut bytes).await;
    assert!(bytes.is_empty());
    let _ = plain.read_to_end(&mut bytes).await;
    let function = world.function("demo", "hello");
    assert_eq!(
        world.caller().call(&function.path, "1").await.status,
        200,
        "still serving"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_sends_slowly_but_steadily_is_served() {
    let world = impatient().await;
    let function = world.function("demo", "hello");
    let mut stream = world.caller().connect().await;
    stream
        .write_all(head(&function.path, "Content-Length: 5\r\nConnection: close\r\n").as_bytes())
        .await
        .unwrap();
    for byte in b"12345" {
        tokio::time::sleep(Duration::from_millis(100)).await;
        stream.write_all(&[*byte]).await.unwrap();
        stream.flush().await.unwrap();
    }
    let answer = read_all(&mut stream).await;
    assert!(
        answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("12345"),
        "{answer}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_declared_length_over_the_limit_is_refused_before_the_body() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let request = head(&function.path, "Content-Length: 1048577\r\n");
    let answer = world.caller().raw(request.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    assert_eq!(world.api.reviews(), 0, "syntax comes first");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_have_a_limit() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let long = head(&function.path, &format!("X-Long: {}\r\n", "a".repeat(70_000)));
    let many = head(&function.path, &"X-Many: 1\r\n".repeat(300));
    for request in [long, many] {
        let answer = caller.raw(request.as_bytes()).await;
        assert!(
            answer.starts_with("HTTP/1.1 431 "),
            "{}",
            &answer[..answer.len().min(300)]
        );
        assert!(answer.contains("\"reason\":\"HeadersTooLarge\""));
    }
    for garbage in [
        "\r\n\r\n\r\n\0\0\r\n\r\n",
        "GET\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let answer = caller.raw(garbage.as_bytes()).await;
        assert!(
            answer.starts_with("HTTP/1.1 400 ") || answer.starts_with("HTTP/1.1 404 "),
            "{garbage:?}: {answer}"
        );
    }
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_errors_survive_a_body_that_is_still_coming() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let body = vec![b'1'; 200_000];
    for round in 0..10 {
        let request = || {
            let mut request = caller.request(&function.path).body(body.clone().into()).unwrap();
            request
                .headers_mut()
                .insert("authorization", "Bearer garbage".parse().unwrap());
            request
        };
        let answer = caller.both(request).await;
        assert_eq!(
            (answer.status, answer.reason().as_str()),
            (401, "Unauthenticated"),
            "round {round}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_namespace_cannot_take_all_places() {
    let flags = ["--max-in-flight", "3", "--max-in-flight-per-namespace", "2"];
    let world = World::with(&flags, |_| {}).await;
    let (a, b) = (world.function("a", "hello"), world.function("b", "hello"));
    let release = Arc::new(Notify::new());
    let wait = Arc::clone(&release);
    world.owner.answers(move |request| {
        let wait = Arc::clone(&wait);
        async move {
            wait.notified().await;
            owner::echo(request)
        }
    });
    let caller = world.caller();
    let call = |path: &str| {
        let request = caller.request(path).body("1".into()).unwrap();
        caller.send(request, Version::HTTP_2)
    };
    let rest = async {
        world.owner.arrived(2).await;
        let refused = call(&a.path).await;
        assert_eq!((refused.status, refused.reason().as_str()), (503, "Overloaded"));
        assert_eq!(
            (refused.dispatched().as_str(), refused.header("retry-after")),
            ("no", Some("1"))
        );
        let (other, ()) = tokio::join!(call(&b.path), async {
            world.owner.arrived(3).await;
            assert_eq!(call(&b.path).await.reason(), "Overloaded");
            release.notify_waiters();
        });
        assert_eq!(other.status, 200);
    };
    let (first, second, ()) = tokio::join!(call(&a.path), call(&a.path), rest);
    assert_eq!((first.status, second.status), (200, 200));
    world
        .owner
        .answers(|request| std::future::ready(owner::echo(request)));
    eventually("the places are free again", || async {
        (call(&a.path).await.status == 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_rested_is_tried_before_it_carries_a_call_contract_4() {
    let world = World::with(&[], |config| config.rested = Duration::ZERO).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    for calls in 1..4 {
        assert_eq!(caller.call(&function.path, "1").await.status, 200);
        assert_eq!(world.owner.calls().len(), calls, "trying is no call");
    }
    world.owner.freeze();
    // Nobody says that the connection is over. The call must neither hang nor be sent.
    let answer = caller.call(&function.path, "1").await;
    assert_eq!(
        (answer.status, answer.reason().as_str()),
        (503, "OwnerUnreachable")
    );
    assert_eq!(answer.dispatched(), "no");
    world.owner.thaw();
    eventually("the owner is found again", || async {
        (caller.call(&function.path, "1").await.status == 200).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rest_between_two_requests_is_no_slow_head() {
    let world = impatient().await;
    let function = world.function("demo", "hello");
    let mut stream = world.caller().connect().await;
    for number in 0..3 {
        stream
            .write_all(head(&function.path, "Content-Length: 1\r\n").as_bytes())
            .await
            .unwrap();
        stream.flush().await.unwrap();
        // The body comes in a piece of its own, and belongs to no head.
        tokio::time::sleep(Duration::from_millis(50)).await;
        stream.write_all(number.to_string().as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        let mut text = String::new();
        while !text.ends_with(&format!("\r\n\r\n{number}")) {
            let mut piece = [0; 4096];
            let read = stream.read(&mut piece).await.unwrap();
            assert!(read > 0, "{text}");
            text.push_str(std::str::from_utf8(&piece[..read]).unwrap());
        }
        assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
        // Longer than a head may take, shorter than a connection may rest.
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Bug scenario 61: a Pod vanishes. Trying its connection must not make the connection look used and thereby
/// good, neither for those who come meanwhile nor after the one who tried has given up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_a_connection_is_tried_nobody_else_is_sent_over_it_contract_4() {
    let world = World::with(&[], |config| config.rested = Duration::ZERO).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    world.owner.freeze();
    let calls = (0..8).map(|_| caller.call(&function.path, "1"));
    for answer in futures::future::join_all(calls).await {
        assert_eq!(
            (answer.status, answer.reason().as_str()),
            (503, "OwnerUnreachable"),
            "{}",
            answer.dispatched()
        );
    }
    world.owner.thaw();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_silence_a_connection_is_tried_before_the_next_call() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    world.owner.freeze();
    let short = caller
        .request(&function.path)
        .header("x-kruntime-timeout-millis", "100")
        .body("1".into())
        .unwrap();
    let lost = caller.send(short, Version::HTTP_11).await;
    assert_eq!((lost.status, lost.dispatched().as_str()), (504, "unknown"));
    let next = caller.call(&function.path, "1").await;
    assert_eq!((next.status, next.reason().as_str()), (503, "OwnerUnreachable"));
    assert_eq!(next.dispatched(), "no");
    world.owner.thaw();
}

/// A stranger that announces a body and never sends it would otherwise keep a connection for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_early_error_closes_and_waits_for_no_body_c_3_5() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    for body in [
        "Content-Length: 100\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Content-Length: 100\r\nExpect: 100-continue\r\n",
    ] {
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{body}\r\n",
            function.path
        );
        let answer = world.caller().raw(head.as_bytes()).await.to_lowercase();
        assert!(answer.starts_with("http/1.1 401 "), "{body}: {answer}");
        assert!(answer.contains("connection: close"), "{body}: {answer}");
    }
}
