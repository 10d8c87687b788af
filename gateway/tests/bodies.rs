//! How a payload may be framed, and how not (C-3, C-3.5; bug scenarios 25, 26 and 33).

use std::time::Duration;

use http_body_util::Full;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::common::{
    ALICE, MALLORY, World,
    caller::{head, read_all, read_until},
    frames::Frames,
};

/// C-3: an empty body is `null`, however it is said; scenario 26.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_payload_is_the_same_however_it_is_framed() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let chunks: String = "{\"a\":1}"
        .chars()
        .map(|byte| format!("1\r\n{byte}\r\n"))
        .collect();
    for (rest, body, expected) in [
        ("Content-Length: 7\r\n", "{\"a\":1}".to_owned(), "{\"a\":1}"),
        (
            "Transfer-Encoding: chunked\r\n",
            format!("{chunks}0\r\n\r\n"),
            "{\"a\":1}",
        ),
        ("Transfer-Encoding: chunked\r\n", "0\r\n\r\n".to_owned(), "null"),
        ("Content-Length: 0\r\n", String::new(), "null"),
        ("", String::new(), "null"),
    ] {
        let request = head(&function.path, &format!("Connection: close\r\n{rest}")) + &body;
        let answer = caller.raw(request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert!(answer.ends_with(&format!("\r\n\r\n{expected}")), "{answer}");
    }
    // Nothing at all needs no type either.
    let bare = format!(
        "POST {} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\nConnection: close\r\n\r\n",
        function.path
    );
    assert!(caller.raw(bare.as_bytes()).await.ends_with("\r\n\r\nnull"));
    let request = || caller.request(&function.path).body(Full::default()).unwrap();
    assert_eq!(caller.both(request).await.text(), "null");
    let calls = world.owner.calls();
    let inputs: Vec<&[u8]> = calls.iter().map(|(_, call)| &call.input[..]).collect();
    assert_eq!(inputs[..2], [b"{\"a\":1}", b"{\"a\":1}"]);
    assert!(inputs[2..].iter().all(|input| *input == b"null"), "{inputs:?}");
}

/// C-3.5: a streamed body over the limit, without a declared length, over both versions; scenario 28's kind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_mebibyte_passes_both_ways_and_no_byte_more() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let full = format!("\"{}\"", "a".repeat(1_048_574));
    let answer = caller.both(|| caller.post(&function.path, full.clone())).await;
    assert_eq!((answer.status, answer.body.len()), (200, 1_048_576));
    let over = format!("{full} ");
    let chunked = format!(
        "{}{:x}\r\n{over}\r\n0\r\n\r\n",
        head(&function.path, "Transfer-Encoding: chunked\r\n"),
        over.len(),
    );
    let answer = caller.raw(chunked.as_bytes()).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    let answer = caller.stream(&function.path, over).await;
    assert_eq!(
        (answer.status, answer.reason().as_str()),
        (413, "PayloadTooLarge")
    );
    assert_eq!(world.owner.calls().len(), 2);
}

/// C-3.5: closed where framing is in doubt, and nothing hidden behind it runs; scenario 25.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_framings_are_refused_and_nothing_hidden_runs() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let hidden = head(&function.path, "Content-Length: 1\r\n") + "1";
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
        let request = head(&function.path, framing) + "0\r\n\r\n" + &hidden;
        let answer = caller.raw(request.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{framing:?}: {answer}");
        assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{framing:?}: {answer}");
        let lower = answer.to_lowercase();
        for part in [
            "x-kruntime-invocation-id: inv_",
            "connection: close",
            "\"reason\":\"badrequest\"",
        ] {
            assert!(lower.contains(part), "{framing:?}: {answer}");
        }
        assert!(!answer.contains(ALICE));
    }
    assert_eq!(world.owner.calls().len(), 0);
    assert_eq!(world.api.reviews(), 0);
}

/// C-3.5: over HTTP/2 lengths that do not add up reset the stream and nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_length_that_lies_over_http2_concerns_its_stream_only() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let mut frames = Frames::open(&world).await;
    let token = format!("Bearer {ALICE}");
    let call = |length: &'static str| {
        [
            ("authorization", token.clone()),
            ("content-type", "application/json".to_owned()),
            ("content-length", length.to_owned()),
        ]
    };
    for (stream, length) in [(1, "5"), (3, "5, 6"), (5, "+1")] {
        let fields = call(length);
        let fields: Vec<_> = fields
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        frames.head(stream, "POST", &function.path, &fields, false).await;
        frames.data(stream, b"1", true).await;
        let ended = frames.ended(stream).await;
        assert!(
            ended.reset.is_some() || ended.body.is_some_and(|body| body.starts_with(b"{")),
            "{length}"
        );
    }
    let fields = call("1");
    let fields: Vec<_> = fields
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    frames.head(7, "POST", &function.path, &fields, false).await;
    frames.data(7, b"2", true).await;
    assert_eq!(frames.ended(7).await.body.as_deref(), Some(&b"2"[..]));
    let calls = world.owner.calls();
    assert!(
        calls.iter().all(|(_, call)| call.input == "2"),
        "no shortened call"
    );
}

/// C-3.5; scenario 33.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn continue_is_said_to_those_who_may_and_wait_for_it() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let head = |token: &str, length: usize| {
        head(
            &function.path,
            &format!("Content-Length: {length}\r\nexpect: 100-Continue\r\n"),
        )
        .replace(ALICE, token)
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
    let answer = read_until(&mut stream, "\r\n\r\ntrue").await;
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

/// C-3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_used_again() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let mut stream = world.caller().connect().await;
    for number in 0..3 {
        let request = head(&function.path, "Content-Length: 1\r\n") + &number.to_string();
        stream.write_all(request.as_bytes()).await.unwrap();
        read_until(&mut stream, &format!("\r\n\r\n{number}")).await;
    }
}

/// C-3: whatever the moment at which the second one comes, the first is answered and no call is cut.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipelined_request_does_not_end_the_one_before_it() {
    let world = World::with(&[], |config| config.patience.idle = Duration::from_millis(900)).await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let request = head(&function.path, "Content-Length: 1\r\n") + "1";
    for in_one_piece in [true, false] {
        let gate = world.owner.gate();
        let before = world.owner.calls().len();
        let mut stream = caller.connect().await;
        if in_one_piece {
            stream.write_all(request.repeat(2).as_bytes()).await.unwrap();
            world.owner.arrived(before + 1).await;
        } else {
            stream.write_all(request.as_bytes()).await.unwrap();
            world.owner.arrived(before + 1).await;
            stream.write_all(request.as_bytes()).await.unwrap();
        }
        stream.flush().await.unwrap();
        // Round trips on another connection leave time for the second request to be seen.
        for _ in 0..20 {
            assert_eq!(caller.call("/", "1").await.status, 404);
        }
        gate.add_permits(2);
        let end = "\r\n\r\n1";
        let first = read_until(&mut stream, end).await;
        assert!(first.starts_with("HTTP/1.1 200 "), "{first}");
        // The second is answered, or the connection closed before anything of it ran.
        let second = read_all(&mut stream).await;
        let calls = world.owner.calls().len() - before;
        let answered = first.matches("HTTP/1.1 200 ").count() + second.matches("HTTP/1.1 200 ").count();
        assert_eq!(answered, calls, "{first}{second}");
    }
}
