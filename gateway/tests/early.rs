//! Answers that come before the body does: HTTP/1.1 answers and closes, HTTP/2 ends its stream without an error
//! (C-3.5; bug scenario 24).

use kruntimes_api::{fixtures, run::Phase};
use tokio::io::AsyncWriteExt as _;

use crate::common::{
    ALICE, MALLORY, World,
    caller::{head, read_all},
    frames::Frames,
    owner,
};

/// Every status, over HTTP/2 frame by frame: a whole JSON body, an end, and no reset that means an error, while
/// the client has not ended its own half, and when it has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_over_http2_is_whole_and_ends_its_stream_cleanly() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let ended = fixtures::run("demo", "ended")
        .ready_on("p")
        .ended(Phase::Failed, "x");
    let (ended, pending) = (
        world.put(&ended.build()),
        world.put(&fixtures::run("demo", "p").build()),
    );
    world
        .owner
        .answers(|request| std::future::ready(owner::fail(request)));
    let token = |token: &str| ("authorization", format!("Bearer {token}"));
    let json = ("content-type", "application/json".to_owned());
    let more = |name: &'static str, value: &str| (name, value.to_owned());
    let (good, path) = (vec![token(ALICE), json.clone()], function.path.as_str());
    let plus = |field| [good.clone(), vec![field]].concat();
    // With a body that is not whole the owner is not called.
    let early = [
        (400, path, plus(more("x-kruntime-timeout-millis", "soon"))),
        (401, path, vec![token("garbage"), json.clone()]),
        (401, path, vec![json.clone()]),
        (403, path, vec![token(MALLORY), json.clone()]),
        (404, "/v1", good.clone()),
        (405, function.path.trim_end_matches(":invoke"), good.clone()),
        (410, ended.path.as_str(), good.clone()),
        (413, path, plus(more("content-length", "1048577"))),
        (415, path, vec![token(ALICE), more("content-type", "text/plain")]),
        (503, pending.path.as_str(), good.clone()),
    ];
    let late = [
        (400, "InvalidPayload"),
        (429, "Busy"),
        (499, "Cancelled"),
        (500, "HandlerError"),
        (502, "WorkerExited"),
        (503, "Draining"),
        (504, "DeadlineExceeded"),
    ];
    let mut frames = Frames::open(&world).await;
    let mut stream = 1;
    let mut check = async |status: u16, path: &str, fields: &[(&str, String)], body: &[u8], end: bool| {
        let fields: Vec<_> = fields
            .iter()
            .map(|(name, value)| (*name, value.as_str()))
            .collect();
        frames.head(stream, "POST", path, &fields, false).await;
        frames.data(stream, body, end).await;
        let ended = frames.ended(stream).await;
        let body = ended
            .body
            .unwrap_or_else(|| panic!("{status}: no end, reset {:?}", ended.reset));
        let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(problem["status"], status, "{problem}");
        // NO_ERROR only says that no more of the body is wanted.
        assert!(
            matches!(ended.reset, None | Some(0)),
            "{status}: {:?}",
            ended.reset
        );
        stream += 2;
    };
    for (status, path, fields) in &early {
        check(*status, path, fields, b"[", false).await;
        check(*status, path, fields, b"[]", *status != 413).await;
    }
    for (status, reason) in late {
        check(status, path, &good, format!("\"{reason}\"").as_bytes(), true).await;
    }
}

/// C-3.5
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_errors_survive_a_body_that_is_still_coming() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    let body = vec![b'1'; 200_000];
    for _ in 0..10 {
        let request = || {
            let mut request = caller.post(&function.path, body.clone());
            let garbage = "Bearer garbage".parse().unwrap();
            request.headers_mut().insert("authorization", garbage);
            request
        };
        caller
            .refused(request, (401, "Unauthenticated", "gateway", "no"))
            .await;
    }
}

/// C-3.5: a stranger that announces a body and never sends it would otherwise keep a connection for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_early_error_closes_and_waits_for_no_body() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    for body in [
        "Content-Length: 100\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Content-Length: 100\r\nExpect: 100-continue\r\n",
    ] {
        let request = head(&function.path, body).replace(ALICE, "garbage");
        let answer = world.caller().raw(request.as_bytes()).await.to_lowercase();
        assert!(answer.starts_with("http/1.1 401 "), "{body}: {answer}");
        assert!(answer.contains("connection: close"), "{body}: {answer}");
    }
}

/// C-3
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_wants_to_close_is_closed() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let mut stream = world.caller().connect().await;
    let request = head(&function.path, "Content-Length: 1\r\nConnection: close\r\n") + "1";
    stream.write_all(request.as_bytes()).await.unwrap();
    let answer = read_all(&mut stream).await;
    assert!(
        answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\n1"),
        "{answer}"
    );
}
