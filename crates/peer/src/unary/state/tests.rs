//! What the other side may not do, and what it may do at bad times.

use std::task::{Context, Poll, Waker};

use bytes::{Bytes, BytesMut};

use super::*;
use crate::unary::stream::PREFIX_BYTES;

const SETTINGS: Settings = Settings {
    stream_window: 1000,
    connection_window: 100_000,
    frame: 20_000,
    headers: 2000,
    answer: 0,
    ping: None,
};
/// `:status 200`, from the table that everybody has.
const OK: &[u8] = &[0x88];
/// The longest message that is taken; more than a stream's window.
const LIMIT: usize = 5000;

fn frame(kind: Kind, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    [&head(kind, flags, stream, payload.len()), payload].concat()
}

fn answer_head(stream: u32) -> Vec<u8> {
    frame(Kind::Headers, flag::END_HEADERS, stream, OK)
}

fn data(stream: u32, bytes: usize) -> Vec<u8> {
    frame(Kind::Data, 0, stream, &vec![0; bytes])
}

fn settings(pairs: &[(u16, u32)]) -> Vec<u8> {
    let mut payload = BytesMut::new();
    for (name, value) in pairs {
        payload.put_u16(*name);
        payload.put_u32(*value);
    }
    frame(Kind::Settings, 0, 0, &payload)
}

fn context() -> Context<'static> {
    Context::from_waker(Waker::noop())
}

/// All frames that it wants to send, without the preface.
fn sent(state: &mut State) -> Vec<(Kind, u8, u32, Vec<u8>)> {
    let mut all = Vec::new();
    loop {
        let mut out = Output::default();
        state.output(&mut out, &context());
        if out.is_empty() {
            break;
        }
        while !out.is_empty() {
            let mut room = [std::io::IoSlice::new(&[]); Output::PIECES];
            let count = out.pieces(&mut room);
            let bytes: Vec<u8> = room[..count].iter().flat_map(|piece| piece.to_vec()).collect();
            out.written(bytes.len());
            all.extend_from_slice(&bytes);
        }
    }
    let mut rest = all.strip_prefix(frame::PREFACE).unwrap_or(&all);
    let mut frames = Vec::new();
    while let Some(head) = Head::read(rest) {
        let (now, next) = rest[HEAD_BYTES..].split_at(head.length);
        frames.push((head.kind, head.flags, head.stream, now.to_vec()));
        rest = next;
    }
    assert!(rest.is_empty(), "only whole frames");
    frames
}

fn begin(state: &mut State, bytes: usize) -> Result<u32, NotNow> {
    state.begin(Sent {
        path: "/a.B/C",
        authority: "owner",
        fields: [&[], &[]],
        message: [vec![1; bytes].into(), Bytes::new()],
        limit: LIMIT,
    })
}

fn receive(state: &mut State, frames: &[Vec<u8>]) -> Result<(), frame::Violation> {
    state.receive(&mut BytesMut::from(&*frames.concat()))
}

/// One on which both have spoken, with a call each in `messages`.
fn open(messages: &[usize]) -> State {
    let mut state = State::new(SETTINGS);
    receive(&mut state, &[settings(&[])]).expect("it begins");
    for bytes in messages {
        begin(&mut state, *bytes).expect("sent");
    }
    sent(&mut state);
    state
}

fn outcome(state: &mut State, id: u32) -> Option<Result<Reply, Broken>> {
    match state.poll(id, &context()) {
        Poll::Ready(outcome) => Some(outcome),
        Poll::Pending => None,
    }
}

#[test]
fn what_breaks_the_protocol_ends_the_connection() {
    let pad = |payload: &[u8]| frame(Kind::Data, flag::PADDED, 1, payload);
    let headers = |flags, payload: &[u8]| frame(Kind::Headers, flags, 1, payload);
    let continuation = |flags, payload: &[u8]| frame(Kind::Continuation, flags, 1, payload);
    let update = |stream, more: u32| frame(Kind::WindowUpdate, 0, stream, &more.to_be_bytes());
    let ping = || frame(Kind::Ping, 0, 0, &[0; 8]);
    let cases = [
        ("a frame over the limit", vec![data(1, 20_001)], 6),
        ("headers of no call", vec![answer_head(0)], 1),
        ("headers of a call to come", vec![answer_head(5)], 1),
        ("a call that servers make", vec![answer_head(2)], 1),
        ("data of no call", vec![data(0, 1)], 1),
        ("data of a call to come", vec![data(5, 1)], 1),
        ("too much padding", vec![pad(&[2, 0])], 1),
        ("no length of padding", vec![pad(&[])], 6),
        (
            "headers that are cut",
            vec![headers(flag::END_HEADERS, &[0x40])],
            9,
        ),
        (
            "no priority",
            vec![headers(flag::END_HEADERS | flag::PRIORITY, &[0; 4])],
            6,
        ),
        ("headers within headers", vec![headers(0, OK), headers(0, OK)], 1),
        ("a ping within headers", vec![headers(0, OK), ping()], 1),
        (
            "another call's continuation",
            vec![headers(0, OK), frame(Kind::Continuation, 0, 3, OK)],
            1,
        ),
        ("a continuation of nothing", vec![continuation(0, OK)], 1),
        (
            "an empty continuation",
            vec![headers(0, OK), continuation(0, &[])],
            11,
        ),
        (
            "headers without an end",
            vec![headers(0, &[0; 1500]), continuation(0, &[0; 1500])],
            11,
        ),
        (
            "a push",
            vec![frame(Kind::Push, flag::END_HEADERS, 1, &[0; 4])],
            1,
        ),
        ("a short reset", vec![frame(Kind::Reset, 0, 1, &[0; 3])], 6),
        ("a reset of no call", vec![frame(Kind::Reset, 0, 0, &[0; 4])], 1),
        ("a short goodbye", vec![frame(Kind::GoAway, 0, 0, &[0; 7])], 6),
        ("a goodbye of a call", vec![frame(Kind::GoAway, 0, 1, &[0; 8])], 1),
        ("a long ping", vec![frame(Kind::Ping, 0, 0, &[0; 9])], 6),
        ("a ping of a call", vec![frame(Kind::Ping, 0, 1, &[0; 8])], 1),
        ("pings that are never read", vec![ping(); 20_000], 11),
        ("settings of a call", vec![frame(Kind::Settings, 0, 1, &[])], 1),
        (
            "settings that are cut",
            vec![frame(Kind::Settings, 0, 0, &[0; 5])],
            6,
        ),
        (
            "a receipt with settings",
            vec![frame(Kind::Settings, flag::ACK, 0, &[0; 6])],
            6,
        ),
        ("pushes wanted", vec![settings(&[(setting::PUSH, 1)])], 1),
        ("small frames", vec![settings(&[(setting::FRAME, 16_383)])], 1),
        ("huge frames", vec![settings(&[(setting::FRAME, 1 << 24)])], 1),
        (
            "a huge first window",
            vec![settings(&[(setting::WINDOW, 1 << 31)])],
            3,
        ),
        ("no growth", vec![update(0, 0)], 1),
        ("too much growth", vec![update(0, 0x7fff_ffff)], 3),
        (
            "a short growth",
            vec![frame(Kind::WindowUpdate, 0, 0, &[0; 3])],
            6,
        ),
    ];
    for (what, frames, code) in cases {
        let mut state = open(&[10, 10]);
        let violation = receive(&mut state, &frames).expect_err(what);
        assert_eq!(violation.code, Code(code), "{what}: {violation}");
        let last = sent(&mut state).pop().expect(what);
        assert_eq!(
            (last.0, last.3[4..].to_vec()),
            (Kind::GoAway, vec![0, 0, 0, code as u8]),
            "{what}"
        );
        for id in [1, 3] {
            assert!(
                matches!(outcome(&mut state, id), Some(Err(Broken::Ended(_)))),
                "{what}"
            );
        }
        assert!(matches!(begin(&mut state, 1), Err(NotNow::Over(_))), "{what}");
        assert_eq!(state.running(), 0, "{what}");
    }
}

#[test]
fn what_is_wrong_with_one_call_ends_that_one() {
    let list = |flags, block: &[u8]| frame(Kind::Headers, flag::END_HEADERS | flags, 1, block);
    let update = |more: u32| frame(Kind::WindowUpdate, 0, 1, &more.to_be_bytes());
    let body = |bytes| data(1, bytes);
    let end = flag::END_STREAM;
    let cases = [
        ("no status", vec![list(0, b"\0\x01a\x01b")], 1),
        ("a name in upper case", vec![list(0, b"\x88\0\x01A\x01b")], 1),
        ("a body first", vec![body(1)], 1),
        (
            "trailers that are not the end",
            vec![list(0, OK), list(0, b"\0\x01a\x01b")],
            1,
        ),
        ("a second status", vec![list(0, OK), list(end, OK)], 1),
        ("an announcement as the end", vec![list(end, b"\x08\x03103")], 1),
        ("no growth", vec![update(0)], 1),
        ("too much growth", vec![update(0x7fff_ffff)], 3),
    ];
    for (what, frames, code) in cases {
        let mut state = open(&[10, 10]);
        receive(&mut state, &frames).expect(what);
        assert!(
            matches!(outcome(&mut state, 1), Some(Err(Broken::Malformed(_)))),
            "{what}"
        );
        let told = (Kind::Reset, 0, 1, vec![0, 0, 0, code]);
        assert_eq!(sent(&mut state).pop(), Some(told), "{what}");
        // The other one is as it was.
        let end = frame(Kind::Headers, flag::END_HEADERS | flag::END_STREAM, 3, OK);
        receive(&mut state, &[end]).expect(what);
        assert_eq!(outcome(&mut state, 3).expect(what).expect(what).status, 200);
    }
}

#[test]
fn it_must_begin_as_http_2_does() {
    for (what, first) in [
        ("HTTP/1.1", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()),
        ("a receipt", frame(Kind::Settings, flag::ACK, 0, &[])),
        ("a ping", frame(Kind::Ping, 0, 0, &[0; 8])),
    ] {
        assert!(receive(&mut State::new(SETTINGS), &[first]).is_err(), "{what}");
    }
}

#[test]
fn frames_for_what_has_ended_are_ignored() {
    let mut state = open(&[10, 10, 10]);
    state.give_up(1);
    assert_eq!(sent(&mut state), [(Kind::Reset, 0, 1, vec![0, 0, 0, 8])]);
    let reset = frame(Kind::Reset, 0, 3, &[0; 4]);
    receive(&mut state, std::slice::from_ref(&reset)).expect("its right");
    let late = [
        // Both sides remember the same, whoever wanted it.
        frame(Kind::Headers, flag::END_HEADERS, 1, b"\x88\x40\x01a\x01b"),
        data(1, 500),
        frame(Kind::WindowUpdate, 0, 3, &[0, 0, 0, 1]),
        frame(Kind::Reset, 0, 1, &[0; 4]),
        reset,
        frame(Kind::Other, 0xff, 7, b"what is this"),
        frame(Kind::Priority, 0, 9, &[0; 5]),
        frame(
            Kind::Headers,
            flag::END_HEADERS | flag::END_STREAM,
            5,
            &[0x88, 0xbe],
        ),
    ];
    receive(&mut state, &late).expect("late, and allowed");
    assert_eq!(outcome(&mut state, 3), Some(Err(Broken::Reset(Code::NO_ERROR))));
    let reply = outcome(&mut state, 5).expect("answered").expect("well");
    assert_eq!(reply.head.get("a").expect("a header"), "b");
    assert!(sent(&mut state).is_empty(), "there is nothing to say to that");
}

#[test]
fn an_announcement_is_no_answer_and_padding_no_body() {
    let mut state = open(&[10]);
    let padded = |kind, flags, payload: &[u8]| {
        frame(kind, flags | flag::PADDED, 1, &[&[3], payload, &[0; 3]].concat())
    };
    let headers = flag::END_HEADERS | flag::PRIORITY;
    receive(
        &mut state,
        &[
            frame(Kind::Headers, flag::END_HEADERS, 1, b"\x08\x03103"),
            padded(Kind::Headers, headers, &[&[0; 5], OK].concat()),
            padded(Kind::Data, 0, b"half "),
            padded(Kind::Data, flag::END_STREAM, b"and half"),
        ],
    )
    .expect("allowed");
    let reply = outcome(&mut state, 1).expect("ended").expect("well");
    assert_eq!(
        (reply.status, &*reply.body, reply.trailers),
        (200, &b"half and half"[..], None)
    );
}

#[test]
fn windows_are_given_back_while_a_body_comes() {
    let mut state = open(&[10]);
    receive(&mut state, &[answer_head(1), data(1, 499)]).expect("allowed");
    assert!(sent(&mut state).is_empty(), "not for each piece");
    receive(&mut state, &[data(1, 1)]).expect("allowed");
    let grown = (Kind::WindowUpdate, 0, 1, 500_u32.to_be_bytes().to_vec());
    assert_eq!(sent(&mut state), [grown]);
    receive(&mut state, &[data(1, 1000)]).expect("all of it again");
    // One call's answers are limited, whatever is given back.
    let mut taken = 1500;
    while taken <= LIMIT + PREFIX_BYTES {
        sent(&mut state);
        receive(&mut state, &[data(1, 500)]).expect("allowed");
        taken += 500;
    }
    assert_eq!(outcome(&mut state, 1), Some(Err(Broken::TooLong(LIMIT))));
    assert_eq!(sent(&mut state), [(Kind::Reset, 0, 1, vec![0, 0, 0, 8])]);
    // The connection's window is given back for calls that nobody waits for, too.
    let mut given = 0;
    for _ in 0..20 {
        receive(&mut state, &[data(1, 10_000)]).expect("allowed");
        given += sent(&mut state).len();
    }
    assert_eq!(given, 4);
}

/// What is read where it belongs, or in parts, or at once, is the same.
#[test]
fn a_large_piece_may_come_in_parts() {
    let message: Vec<u8> = (0..4_900_u32).flat_map(|at| [(at % 251) as u8]).collect();
    let framed = [&[0, 0, 0, 19, 36], &*message].concat();
    let (begin, end) = framed.split_at(500);
    let all = [
        answer_head(1),
        frame(Kind::Data, 0, 1, begin),
        frame(Kind::Data, flag::END_STREAM, 1, end),
        answer_head(3),
        frame(
            Kind::Headers,
            flag::END_HEADERS | flag::END_STREAM,
            3,
            b"\0\x01a\x01b",
        ),
    ]
    .concat();
    for part in [1, 7, 530, 541, 600, 5000, 9000] {
        for gone in [false, true] {
            let mut state = open(&[10, 10]);
            let mut input = BytesMut::new();
            let mut rest = &*all;
            while !rest.is_empty() {
                if input.is_empty()
                    && let Some((mut body, left)) = state.lend()
                {
                    let (now, next) = rest.split_at(part.min(left).min(rest.len()));
                    body.extend_from_slice(now);
                    state.give_back(body, now.len());
                    rest = next;
                } else {
                    let (now, next) = rest.split_at(part.min(rest.len()));
                    input.extend_from_slice(now);
                    state.receive(&mut input).expect("allowed");
                    rest = next;
                }
                if gone && rest.len() < 3000 {
                    state.give_up(1);
                }
            }
            assert!(input.is_empty(), "all was taken");
            if !gone {
                let reply = outcome(&mut state, 1).expect("ended").expect("well");
                assert!(*reply.body == *framed, "in parts of {part}");
            }
            assert!(
                outcome(&mut state, 3).expect("ended").is_ok(),
                "in parts of {part}"
            );
            assert_eq!(state.running(), 0);
        }
    }
}

/// A token may be longer than a frame (RFC 9113, section 6.10).
#[test]
fn long_headers_go_out_in_frames_that_the_other_side_takes() {
    let mut state = open(&[]);
    let token = vec![b't'; 40_000];
    let fields = [Field::secret("authorization", &token)];
    for (message, ends) in [
        (Bytes::from_static(b"message"), 0),
        (Bytes::new(), flag::END_STREAM),
    ] {
        let has_message = !message.is_empty();
        let call = Sent {
            path: "/a.B/C",
            authority: "owner",
            fields: [&fields, &[]],
            message: [message, Bytes::new()],
            limit: LIMIT,
        };
        state.begin(call).expect("sent");
        let frames = sent(&mut state);
        let shape: Vec<_> = frames.iter().map(|(kind, flags, ..)| (*kind, *flags)).collect();
        let (headers, rest) = shape.split_at(3);
        assert_eq!(
            headers,
            [
                (Kind::Headers, ends),
                (Kind::Continuation, 0),
                (Kind::Continuation, flag::END_HEADERS)
            ]
        );
        assert_eq!(rest.len(), usize::from(has_message));
        assert!(frames.iter().all(|(.., bytes)| bytes.len() <= frame::LEAST_FRAME));
        let block: Vec<u8> = frames[..3].iter().flat_map(|(.., bytes)| bytes.clone()).collect();
        assert!(block.ends_with(&token), "all of it, in its order");
    }
}

/// Else it would keep the call until the rest of its message comes, which it never does.
#[test]
fn who_answers_before_it_has_heard_all_is_told_that_this_is_the_end() {
    let mut state = open(&[70_000]);
    let end = frame(Kind::Headers, flag::END_HEADERS | flag::END_STREAM, 1, OK);
    receive(&mut state, &[end]).expect("its right");
    assert_eq!(sent(&mut state), [(Kind::Reset, 0, 1, vec![0, 0, 0, 8])]);
    assert_eq!(outcome(&mut state, 1).expect("ended").expect("well").status, 200);
}

#[test]
fn a_goodbye_lets_finish_what_was_heard() {
    let mut state = open(&[10, 10, 10]);
    let goodbye = |last: u32| frame(Kind::GoAway, 0, 0, &[last.to_be_bytes(), [0; 4]].concat());
    receive(&mut state, &[goodbye(0x7fff_ffff)]).expect("its right");
    assert!(matches!(begin(&mut state, 1), Err(NotNow::Over(_))));
    assert_eq!(state.running(), 3);
    receive(&mut state, &[goodbye(3)]).expect("its right");
    assert_eq!(outcome(&mut state, 5), Some(Err(Broken::GoAway(Code::NO_ERROR))));
    assert_eq!((outcome(&mut state, 1), state.running()), (None, 2));
}

#[test]
fn no_more_calls_than_the_other_side_takes() {
    let mut state = State::new(SETTINGS);
    begin(&mut state, 1).expect("a place");
    assert_eq!(
        begin(&mut state, 1),
        Err(NotNow::Full),
        "until it has said how many"
    );
    receive(&mut state, &[settings(&[])]).expect("it begins");
    for _ in 0..100 {
        begin(&mut state, 1).expect("any number");
    }
    receive(&mut state, &[settings(&[(setting::STREAMS, 5)])]).expect("its right");
    for id in 0..96 {
        assert!(state.is_full(), "{id}");
        state.give_up(2 * id + 1);
    }
    assert!(state.is_full());
    state.give_up(2 * 96 + 1);
    begin(&mut state, 1).expect("a place again");
}

/// One large message after the other would make each small one wait.
#[test]
fn large_messages_take_turns() {
    let mut state = open(&[]);
    let growth = |stream| frame(Kind::WindowUpdate, 0, stream, &1_000_000_u32.to_be_bytes());
    receive(
        &mut state,
        &[settings(&[(setting::WINDOW, 1_000_000)]), growth(0)],
    )
    .expect("allowed");
    sent(&mut state);
    for bytes in [100_000, 100_000, 10] {
        begin(&mut state, bytes).expect("sent");
    }
    let frames = sent(&mut state);
    let order: Vec<_> = frames
        .iter()
        .map(|(kind, _, id, bytes)| (*kind, *id, bytes.len()))
        .collect();
    let position = |wanted| {
        order
            .iter()
            .position(|(kind, id, _)| (*kind, *id) == (Kind::Data, wanted))
    };
    assert!(position(5) < position(1), "a small one first: {order:?}");
    let large: Vec<u32> = order
        .iter()
        .filter(|(kind, id, _)| *kind == Kind::Data && *id != 5)
        .map(|(_, id, _)| *id)
        .collect();
    assert!(large.starts_with(&[1, 3, 1, 3]), "{order:?}");
    let all: usize = order
        .iter()
        .filter(|it| it.0 == Kind::Data && it.1 == 1)
        .map(|it| it.2)
        .sum();
    assert_eq!(all, 100_000);
    assert!(
        order.iter().all(|(_, _, bytes)| *bytes <= frame::LEAST_FRAME),
        "{order:?}"
    );
}

#[test]
fn a_window_that_shrinks_is_respected() {
    let mut state = open(&[60_000]);
    // All of the message is on its way; the next one has 5535 bytes of the connection's window.
    begin(&mut state, 10_000).expect("sent");
    let bytes = |frames: &[(Kind, u8, u32, Vec<u8>)]| -> usize {
        frames
            .iter()
            .filter(|it| it.0 == Kind::Data)
            .map(|it| it.3.len())
            .sum()
    };
    assert_eq!(bytes(&sent(&mut state)), 5535);
    receive(&mut state, &[settings(&[(setting::WINDOW, 100)])]).expect("its right");
    let growth = |stream, more: u32| frame(Kind::WindowUpdate, 0, stream, &more.to_be_bytes());
    receive(&mut state, &[growth(0, 50_000)]).expect("its right");
    assert_eq!(bytes(&sent(&mut state)), 0, "its own window is below nothing");
    receive(&mut state, &[growth(3, 5_435 + 1)]).expect("its right");
    assert_eq!(bytes(&sent(&mut state)), 1);
}
