//! The client of HTTP/2 against a server of the library that everybody uses: whatever sizes, windows, frames and
//! headers there are, each call ends as its own plan says, and the connection is as good as before.

use std::{future::poll_fn, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::future::join_all;
use h2::{Reason, RecvStream, server, server::SendResponse};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use proptest::prelude::*;
use tokio::{
    io::{DuplexStream, duplex},
    sync::Notify,
    time::timeout,
};
use tonic::{Code, Status};

use super::{Field, Settings, UnaryChannel, message::Answer, never_sent};

/// How the server is set.
#[derive(Debug, Clone)]
struct Server {
    stream_window: u32,
    connection_window: u32,
    frame: u32,
    streams: u32,
    table: u32,
    /// Bytes between the two that nobody has read.
    pipe: usize,
}

/// What happens to one call.
#[derive(Debug, Clone)]
struct Plan {
    message: [usize; 2],
    answer: usize,
    headers: Vec<(String, String)>,
    end: End,
}

#[derive(Debug, Clone)]
enum End {
    /// It is answered, in pieces of so many bytes.
    Answer(usize),
    /// Its answer is longer than what is taken.
    TooLong,
    /// It is refused before its message was read.
    Refuse,
    Reset(u32),
    /// Its caller goes when the server has its headers.
    GiveUp,
    /// Its caller goes in the middle of the answer.
    GiveUpLate,
}

/// The longest answer that is taken.
const LIMIT: usize = 400_000;

fn server() -> impl Strategy<Value = Server> {
    let window = || prop_oneof![1_u32..200, Just(65_535), 65_536_u32..1_000_000];
    let table = prop_oneof![Just(4096_u32), Just(0), 1_u32..4096, Just(65_536)];
    let pipe = prop_oneof![1_usize..100, Just(4096), Just(1 << 20)];
    (window(), window(), 16_384_u32..300_000, 1_u32..20, table, pipe).prop_map(
        |(stream_window, connection_window, frame, streams, table, pipe)| Server {
            stream_window: stream_window.max(if pipe < 100 { 1 } else { 50 }),
            connection_window,
            frame,
            streams,
            table,
            pipe,
        },
    )
}

fn plan() -> impl Strategy<Value = Plan> {
    let size = || prop_oneof![6 => 0_usize..300, 2 => 3_000_usize..20_000, 1 => 20_000_usize..300_000];
    let header = ("x-[a-z]{1,8}", "[ -~]{0,40}").prop_map(|(name, value)| (name, value.trim().to_owned()));
    let end = prop_oneof![
        6 => prop_oneof![Just(usize::MAX), 1_usize..5_000].prop_map(End::Answer),
        1 => Just(End::TooLong),
        1 => Just(End::Refuse),
        1 => (0_u32..14).prop_map(End::Reset),
        1 => Just(End::GiveUp),
        1 => Just(End::GiveUpLate),
    ];
    let headers = prop::collection::vec(header, 0..6);
    (size(), size(), size(), headers, end).prop_map(|(head, tail, answer, headers, end)| Plan {
        message: [head, tail],
        answer,
        headers,
        end,
    })
}

/// One call's plan, and a sign that it is time for its caller to go.
struct Planned {
    plan: Plan,
    go: Notify,
}

fn framed(bytes: usize) -> Bytes {
    let length = u32::try_from(bytes).unwrap().to_be_bytes();
    let body: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    [&[0], length.as_slice(), &body].concat().into()
}

fn map(headers: &[(String, String)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.append(
            name.parse::<HeaderName>().unwrap(),
            HeaderValue::from_str(value).unwrap(),
        );
    }
    map
}

#[expect(clippy::disallowed_methods, reason = "ends with its connection")]
async fn serve(io: DuplexStream, set: Server, plans: Arc<Vec<Planned>>) {
    let connection = server::Builder::new()
        .initial_window_size(set.stream_window)
        .initial_connection_window_size(set.connection_window)
        .max_frame_size(set.frame)
        .max_concurrent_streams(set.streams)
        .header_table_size(set.table)
        .max_concurrent_reset_streams(1000)
        .handshake::<_, Bytes>(io);
    let mut connection = connection.await.expect("HTTP/2");
    while let Some(call) = connection.accept().await {
        let (request, respond) = call.expect("the connection goes on");
        tokio::spawn(answer(request, respond, Arc::clone(&plans)));
    }
}

/// One piece, when there is room for it; `false` when the call is over.
async fn send(stream: &mut h2::SendStream<Bytes>, mut bytes: Bytes) -> bool {
    while !bytes.is_empty() {
        stream.reserve_capacity(bytes.len());
        let Some(Ok(room)) = poll_fn(|cx| stream.poll_capacity(cx)).await else {
            return false;
        };
        if stream
            .send_data(bytes.split_to(room.min(bytes.len())), false)
            .is_err()
        {
            return false;
        }
    }
    true
}

async fn read(body: &mut RecvStream) -> Vec<u8> {
    let mut all = Vec::new();
    while let Some(Ok(piece)) = body.data().await {
        body.flow_control()
            .release_capacity(piece.len())
            .expect("it was received");
        all.extend_from_slice(&piece);
    }
    all
}

async fn answer(request: Request<RecvStream>, mut respond: SendResponse<Bytes>, plans: Arc<Vec<Planned>>) {
    let number: usize = request.headers()["number"].to_str().unwrap().parse().unwrap();
    let planned = &plans[number];
    let plan = &planned.plan;
    let expected = map(&plan.headers);
    for name in expected.keys() {
        let all = |map: &HeaderMap| map.get_all(name).iter().cloned().collect::<Vec<_>>();
        assert_eq!(all(request.headers()), all(&expected));
    }
    assert_eq!(request.headers()["always"], "the same");
    assert_eq!(request.uri().to_string(), "http://owner/a.B/C");
    assert_eq!(request.headers()["authorization"], "t".repeat(900));
    let mut body = request.into_body();
    let mut response = Response::new(());
    match plan.end {
        End::Refuse => {
            let status = Status::failed_precondition("not mine");
            status.add_header(response.headers_mut()).unwrap();
            respond.send_response(response, true).expect("it waits");
            return;
        }
        End::Reset(code) => return respond.send_reset(code.into()),
        End::GiveUp => {
            planned.go.notify_one();
            // Windows may keep the rest of its message from coming.
            let reason = poll_fn(|cx| respond.poll_reset(cx)).await;
            assert_eq!(reason.ok(), Some(Reason::CANCEL));
            return;
        }
        End::Answer(_) | End::TooLong | End::GiveUpLate => {}
    }
    let message = read(&mut body).await;
    let parts = plan.message.map(framed);
    assert!(message == parts.concat(), "the message arrives as it is");
    *response.headers_mut() = expected;
    let mut stream = respond.send_response(response, false).expect("it waits");
    let (bytes, pieces) = match plan.end {
        End::Answer(pieces) => (plan.answer, pieces),
        End::TooLong => (LIMIT + 1, usize::MAX),
        _ => (plan.answer, usize::MAX),
    };
    let mut left = framed(bytes);
    if matches!(plan.end, End::GiveUpLate) {
        let half = left.split_to(plan.answer / 2);
        assert!(send(&mut stream, half).await, "it waits");
        planned.go.notify_one();
        let reason = poll_fn(|cx| stream.poll_reset(cx)).await;
        assert_eq!(reason.ok(), Some(Reason::CANCEL));
        return;
    }
    while !left.is_empty() {
        let piece = left.split_to(pieces.min(left.len()));
        if !send(&mut stream, piece).await {
            assert!(matches!(plan.end, End::TooLong), "it waits");
            return;
        }
    }
    let mut trailers = map(&plan.headers);
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    // Who has heard too much listens no more.
    let _ = stream.send_trailers(trailers);
}

/// What a caller has; nothing if it went.
async fn call(channel: &UnaryChannel, number: usize, planned: &Planned) -> Option<Result<Answer, Status>> {
    let plan = &planned.plan;
    let number = number.to_string();
    let token = "t".repeat(900);
    let mut metadata = vec![
        Field::kept("always", "the same"),
        Field::once("number", number.as_bytes()),
        Field::secret("authorization", token.as_bytes()),
    ];
    metadata.extend(
        plan.headers
            .iter()
            .map(|(name, value)| Field::once(name, value.as_bytes())),
    );
    let answer = channel.unary("/a.B/C", &metadata, plan.message.map(framed), LIMIT);
    let gone = async {
        match plan.end {
            End::GiveUp | End::GiveUpLate => planned.go.notified().await,
            _ => std::future::pending().await,
        }
    };
    tokio::select! {
        answer = answer => Some(answer),
        () = gone => None,
    }
}

fn check(plan: &Plan, outcome: Option<Result<Answer, Status>>) {
    match (&plan.end, outcome) {
        (End::GiveUp | End::GiveUpLate, None) => {}
        (End::Answer(_), Some(Ok(answer))) => {
            assert!(answer.message == framed(plan.answer).slice(5..));
            for (name, value) in &map(&plan.headers) {
                let first = map(&plan.headers).get(name).cloned();
                assert_eq!(answer.metadata.get(name.as_str()), first.as_ref(), "{value:?}");
            }
        }
        (End::Refuse, Some(Err(status))) => {
            assert_eq!(
                (status.code(), status.message()),
                (Code::FailedPrecondition, "not mine")
            );
        }
        (End::TooLong, Some(Err(status))) => assert_eq!(status.code(), Code::OutOfRange),
        (End::Reset(_), Some(Err(status))) => {
            assert!(!never_sent(&status) && std::error::Error::source(&status).is_some());
        }
        (end, outcome) => panic!("{end:?}: {outcome:?}"),
    }
}

#[expect(clippy::disallowed_methods, reason = "its end is waited for")]
async fn run(mut set: Server, plans: Vec<Plan>) {
    if plans.iter().any(|plan| !matches!(plan.end, End::Answer(_))) {
        // This server counts a call that was reset until it has thrown away what it had to say to that, and refuses
        // others meanwhile.
        set.streams = 100;
    }
    let (ours, theirs) = duplex(set.pipe);
    let mut planned: Vec<_> = plans
        .into_iter()
        .map(|plan| Planned {
            plan,
            go: Notify::new(),
        })
        .collect();
    // At last one that needs windows and tables as they should be.
    planned.push(Planned {
        plan: Plan {
            message: [300_000, 10],
            answer: 300_000,
            headers: vec![("x-last".to_owned(), "the end".to_owned())],
            end: End::Answer(usize::MAX),
        },
        go: Notify::new(),
    });
    let planned = Arc::new(planned);
    let server = tokio::spawn(serve(theirs, set, Arc::clone(&planned)));
    let channel = UnaryChannel::open(ours, &"owner".parse().unwrap(), Settings::default());
    let last = planned.len() - 1;
    let calls = planned[..last].iter().enumerate().map(async |(number, planned)| {
        let outcome = call(&channel, number, planned).await;
        check(&planned.plan, outcome);
    });
    join_all(calls).await;
    check(&planned[last].plan, call(&channel, last, &planned[last]).await);
    assert!(!channel.is_over());
    drop(channel);
    server.await.expect("the connection ends as it should");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn calls_end_as_planned(set in server(), plans in prop::collection::vec(plan(), 0..30)) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            // Time passes only when nothing else can happen: a call that hangs is found out at once.
            .start_paused(true)
            .build()
            .unwrap();
        let done = runtime.block_on(async { timeout(Duration::from_secs(3600), run(set, plans)).await });
        prop_assert!(done.is_ok(), "something waits for what never comes");
    }
}
