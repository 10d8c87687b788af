//! How slow callers may be (C-3.5; bug scenario 33). Time is an input here: the pauses are what is tried, not
//! something to wait for.

use std::time::Duration;

use tokio::io::AsyncWriteExt as _;

use crate::common::{
    ALICE, World,
    caller::{head, read_all, read_until},
    frames::Frames,
};

/// A caller's pause.
async fn rest(millis: u64) {
    tokio::time::sleep(Duration::from_millis(millis)).await;
}

async fn impatient() -> World {
    World::with(&[], |config| {
        config.patience.head = Duration::from_millis(500);
        config.patience.body_gap = Duration::from_millis(500);
        config.patience.idle = Duration::from_millis(3000);
    })
    .await
}

/// C-3.5: slow sender.
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

/// C-3.5; scenario 33.
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

/// C-3.5
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
        rest(100).await;
        stream.write_all(&[*byte]).await.unwrap();
        stream.flush().await.unwrap();
    }
    let answer = read_all(&mut stream).await;
    assert!(
        answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("12345"),
        "{answer}"
    );
}

/// C-3.5
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
        rest(50).await;
        stream.write_all(number.to_string().as_bytes()).await.unwrap();
        stream.flush().await.unwrap();
        let text = read_until(&mut stream, &format!("\r\n\r\n{number}")).await;
        assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
        // Longer than a head may take, shorter than a connection may rest.
        rest(700).await;
    }
}

/// C-3.5: over HTTP/2 a body that stops is 408 too, and the connection goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_body_over_http2_is_408_for_its_stream() {
    let world = impatient().await;
    let function = world.function("demo", "hello");
    let token = format!("Bearer {ALICE}");
    let fields = [
        ("authorization", token.as_str()),
        ("content-type", "application/json"),
    ];
    let mut frames = Frames::open(&world).await;
    frames.head(1, "POST", &function.path, &fields, false).await;
    frames.data(1, b"[", false).await;
    let body = frames.ended(1).await.body.unwrap();
    let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(
        (problem["status"].as_u64(), problem["reason"].as_str()),
        (Some(408), Some("RequestTimeout"))
    );
    frames.head(3, "POST", &function.path, &fields, false).await;
    frames.data(3, b"3", true).await;
    assert_eq!(frames.ended(3).await.body.as_deref(), Some(&b"3"[..]));
    assert_eq!(world.owner.calls().len(), 1);
}
