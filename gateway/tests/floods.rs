//! Too much of what HTTP/2 allows, on one connection. It ends, or is served like any other; nobody else notices.

use crate::common::{
    World,
    frames::{
        CONTINUATION, DATA, END_HEADERS, END_STREAM, Frames, GOAWAY, HEADERS, PING, RST_STREAM, SETTINGS,
        block, frame,
    },
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// Frames of a flood.
const PLENTY: u32 = 20_000;
/// The code of [`GOAWAY`] that asks for less (RFC 9113, 7).
const ENHANCE_YOUR_CALM: u32 = 11;

/// How a flooded connection went on.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    /// Closed, with this code if one was told.
    Closed(Option<u32>),
    /// It answered a ping that came last.
    Served,
}

/// Sends the bytes for each number as fast as they are taken, then a ping.
async fn flood(world: &World, bytes: impl Fn(u32) -> Vec<u8>) -> Ended {
    let (mut from, mut to) = Frames::open(world).await.split();
    let write = async {
        let mut batch = Vec::new();
        for number in 0..PLENTY {
            batch.extend(bytes(number));
            if batch.len() > 8192 {
                to.write_all(&batch).await?;
                batch.clear();
            }
        }
        batch.extend(frame(PING, 0, 0, b"the end?"));
        to.write_all(&batch).await?;
        to.flush().await
    };
    let read = async {
        let mut told = None;
        let mut head = [0; 9];
        while from.read_exact(&mut head).await.is_ok() {
            let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
            if from.read_exact(&mut payload).await.is_err() {
                break;
            }
            match head[3] {
                GOAWAY => {
                    told = payload
                        .get(4..8)
                        .and_then(|code| Some(u32::from_be_bytes(code.try_into().ok()?)))
                }
                PING if payload == b"the end?" => return Ended::Served,
                _ => {}
            }
        }
        Ended::Closed(told)
    };
    // A connection that was closed cannot be written to.
    let (_, ended) = tokio::join!(write, read);
    ended
}

fn stream(number: u32) -> u32 {
    2 * number + 1
}

async fn others_are_served(world: &World, path: &str) {
    let answer = world.caller().call(path, "1").await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// C-3.5: requests that are taken back at once (rapid reset, CVE-2023-44487).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_are_reset_at_once_end_their_connection() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let head = block("POST", &function.path, &[("authorization", "Bearer nobody")]);
    let ended = flood(&world, |number| {
        let mut both = frame(HEADERS, END_HEADERS | END_STREAM, stream(number), &head);
        both.extend(frame(RST_STREAM, 0, stream(number), &8_u32.to_be_bytes()));
        both
    })
    .await;
    assert_eq!(ended, Ended::Closed(Some(ENHANCE_YOUR_CALM)));
    others_are_served(&world, &function.path).await;
}

/// C-3.5: a header block without an end (CVE-2024-27316).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_without_end_ends_its_connection() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let head = block("POST", &function.path, &[]);
    let more = block("POST", &function.path, &[("x-more", &"a".repeat(1000))]);
    let ended = flood(&world, |number| match number {
        0 => frame(HEADERS, 0, 1, &head),
        _ => frame(CONTINUATION, 0, 1, &more),
    })
    .await;
    assert!(matches!(ended, Ended::Closed(_)), "{ended:?}");
    others_are_served(&world, &function.path).await;
}

/// C-3.5: what must be answered (settings, pings), and what says nothing (empty pieces of a body).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_that_cost_an_answer_or_say_nothing_harm_nobody() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let head = block("POST", &function.path, &[("authorization", "Bearer nobody")]);
    let settings = flood(&world, |_| frame(SETTINGS, 0, 0, &[])).await;
    let pings = flood(&world, |number| {
        frame(PING, 0, 0, &u64::from(number).to_be_bytes())
    })
    .await;
    let empty = flood(&world, |number| match number {
        0 => frame(HEADERS, END_HEADERS, 1, &head),
        _ => frame(DATA, 0, 1, &[]),
    })
    .await;
    for (what, ended) in [("settings", settings), ("pings", pings), ("empty data", empty)] {
        let fine = matches!(ended, Ended::Served | Ended::Closed(Some(_)));
        assert!(fine, "{what}: {ended:?}");
    }
    others_are_served(&world, &function.path).await;
}

/// C-3.5: more requests at once than a connection may have are refused one by one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_without_end_are_bounded() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let head = block("POST", &function.path, &[("authorization", "Bearer nobody")]);
    let ended = flood(&world, |number| {
        frame(HEADERS, END_HEADERS, stream(number), &head)
    })
    .await;
    assert!(
        matches!(ended, Ended::Served | Ended::Closed(Some(_))),
        "{ended:?}"
    );
    others_are_served(&world, &function.path).await;
}
