//! One unary gRPC call by hand: a framed message out, a message and a status back.
//!
//! Tonic's client is for every kind of call and serves all others here. On the path of each call its layers (a boxed
//! body, a stream of messages, buffers of their own) cost more than the protocol itself: a prefix of five bytes, and a
//! status in the headers or in the trailers.

use bytes::Bytes;
use tonic::{Code, Status};

use super::{
    Field, Fields, UnaryChannel,
    stream::{PREFIX_BYTES, Reply, whole},
};

/// The answer of a call that succeeded.
#[derive(Debug)]
pub struct Answer {
    /// What came before the message, gRPC's own headers among it.
    pub metadata: Fields,
    /// The message, not decoded.
    pub message: Bytes,
}

/// What gRPC wants in each call.
const OWN: [Field<'_>; 2] = [
    Field::kept("content-type", "application/grpc"),
    Field::kept("te", "trailers"),
];

impl UnaryChannel {
    /// Calls `path`, such as `/package.Service/Method`. `message` is gRPC's prefix and the message, in two parts that
    /// follow each other; neither is copied if it is large. An answer of more than `limit` bytes is not taken.
    ///
    /// # Errors
    /// The status of the other side, or one that was made here: with a source where the connection broke, and such
    /// that [`never_sent`](super::never_sent) tells whether anything left.
    pub async fn unary(
        &self,
        path: &'static str,
        metadata: &[Field<'_>],
        message: [Bytes; 2],
        limit: usize,
    ) -> Result<Answer, Status> {
        read(self.exchange(path, &OWN, metadata, message, limit).await?)
    }
}

fn read(reply: Reply) -> Result<Answer, Status> {
    if reply.status != 200 {
        return Err(Status::new(
            code_of(reply.status),
            format!("HTTP status {}", reply.status),
        ));
    }
    // An answer without a message has its status in its only headers.
    let alone = reply.trailers.is_none() && reply.body.is_empty();
    let last = if alone {
        Some(&reply.head)
    } else {
        reply.trailers.as_ref()
    };
    match last.and_then(|fields| fields.get("grpc-status")) {
        Some(status) if status == "0" => {}
        Some(_) => return Err(refusal(last)),
        None => return Err(Status::unknown("an answer without a status")),
    }
    Ok(Answer {
        metadata: reply.head,
        message: unframe(reply.body)?,
    })
}

/// The status in those fields.
fn refusal(fields: Option<&Fields>) -> Status {
    let map = fields.cloned().unwrap_or_default().into_map();
    match Status::from_header_map(&map) {
        Some(status) if status.code() != Code::Ok => status,
        _ => Status::unknown("an answer without a status"),
    }
}

/// The one message.
fn unframe(mut framed: Bytes) -> Result<Bytes, Status> {
    match framed.first() {
        None => Err(Status::internal("an answer without a message")),
        Some(0) if whole(&framed) == framed.len() => Ok(framed.split_off(PREFIX_BYTES)),
        Some(1) => Err(Status::internal("a compressed answer, which nobody asked for")),
        _ => Err(Status::internal("an answer that is not one whole message")),
    }
}

/// What a status of HTTP means where gRPC expects none of its own (gRPC, "HTTP to gRPC Status Code Mapping").
fn code_of(status: u16) -> Code {
    match status {
        400 => Code::Internal,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::Unimplemented,
        429 | 502 | 503 | 504 => Code::Unavailable,
        _ => Code::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use h2::{Reason, server};
    use http::{HeaderMap, Response, StatusCode};
    use tokio::io::duplex;

    use super::*;
    use crate::unary::{Settings, never_sent};

    /// What a server answers: a status of HTTP, headers, pieces of a body, trailers.
    #[derive(Default)]
    struct Script {
        http: u16,
        headers: Vec<(&'static str, &'static str)>,
        pieces: Vec<Vec<u8>>,
        trailers: Option<Vec<(&'static str, &'static str)>>,
    }

    fn map(list: &[(&'static str, &'static str)]) -> HeaderMap {
        list.iter()
            .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
            .collect()
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap();
        [&[0], length.to_be_bytes().as_slice(), message].concat()
    }

    fn ok(pieces: Vec<Vec<u8>>) -> Script {
        Script {
            http: 200,
            pieces,
            trailers: Some(vec![("grpc-status", "0")]),
            ..Script::default()
        }
    }

    /// One call against `script`; also what the server received.
    async fn call(script: Script, head: Bytes, tail: Bytes) -> (Vec<u8>, Result<Answer, Status>) {
        let (ours, theirs) = duplex(64 * 1024);
        let serve = async {
            let mut connection = server::handshake(theirs).await.unwrap();
            let (request, mut respond) = connection.accept().await.unwrap().unwrap();
            assert_eq!(request.uri().path(), "/package.Service/Method");
            assert_eq!(request.headers()["content-type"], "application/grpc");
            assert_eq!(request.headers()["te"], "trailers");
            assert_eq!(request.headers()["x"], "y");
            let mut body = request.into_body();
            let answer = async {
                let mut received = Vec::new();
                while let Some(piece) = body.data().await {
                    let piece = piece.unwrap();
                    body.flow_control().release_capacity(piece.len()).unwrap();
                    received.extend_from_slice(&piece);
                }
                let mut response = Response::new(());
                *response.status_mut() = StatusCode::from_u16(script.http).unwrap();
                *response.headers_mut() = map(&script.headers);
                let ends = script.pieces.is_empty() && script.trailers.is_none();
                let mut stream = respond.send_response(response, ends).unwrap();
                let last = script.pieces.len();
                for (number, piece) in script.pieces.into_iter().enumerate() {
                    let ends = number + 1 == last && script.trailers.is_none();
                    // The caller may have heard enough.
                    let _ = stream.send_data(piece.into(), ends);
                }
                if let Some(trailers) = script.trailers {
                    let _ = stream.send_trailers(map(&trailers));
                }
                received
            };
            let (received, ()) = tokio::join!(answer, async { while connection.accept().await.is_some() {} });
            received
        };
        let ask = async {
            let channel = UnaryChannel::open(ours, &"owner".parse().unwrap(), Settings::default());
            let metadata = [Field::once("x", b"y")];
            channel
                .unary("/package.Service/Method", &metadata, [head, tail], 1000)
                .await
        };
        tokio::join!(serve, ask)
    }

    async fn answered(script: Script) -> Result<Answer, Status> {
        call(script, Bytes::from_static(b"m"), Bytes::new()).await.1
    }

    #[tokio::test]
    async fn both_parts_arrive_and_the_answer_may_come_in_pieces() {
        let tail = Bytes::from(vec![b't'; 300_000]);
        let (received, answer) = call(ok(vec![framed(b"whole")]), Bytes::from_static(b"head"), tail).await;
        assert_eq!((&received[..5], received.len()), (&b"headt"[..], 300_004));
        assert_eq!(answer.unwrap().message, b"whole"[..]);

        let bytes = framed(&[b'a'; 700]);
        for cut in [1, 3, 5, 300] {
            let pieces = bytes.chunks(cut).map(<[u8]>::to_vec).collect();
            let script = Script {
                headers: vec![("kruntime-handler-us", "7")],
                ..ok(pieces)
            };
            let answer = answered(script).await.unwrap();
            assert_eq!(answer.message.len(), 700);
            assert_eq!(answer.metadata.get("kruntime-handler-us").unwrap(), "7");
        }
        assert!(answered(ok(vec![framed(b"")])).await.unwrap().message.is_empty());
    }

    #[tokio::test]
    async fn the_status_counts_wherever_it_stands() {
        let refused = [("grpc-status", "9"), ("grpc-message", "not%20mine")];
        let early = Script {
            http: 200,
            headers: refused.to_vec(),
            ..Script::default()
        };
        let late = Script {
            trailers: Some(refused.to_vec()),
            ..ok(vec![framed(b"a beginning")])
        };
        let bare = Script {
            trailers: Some(refused.to_vec()),
            ..ok(vec![])
        };
        for script in [early, late, bare] {
            let status = answered(script).await.unwrap_err();
            assert_eq!(
                (status.code(), status.message()),
                (Code::FailedPrecondition, "not mine")
            );
            assert!(
                std::error::Error::source(&status).is_none(),
                "it came over the wire"
            );
        }
    }

    #[tokio::test]
    async fn what_is_no_answer_is_an_error() {
        let mut compressed = framed(b"x");
        compressed[0] = 1;
        let scripts = [
            ("compressed", ok(vec![compressed])),
            ("cut", ok(vec![framed(b"whole")[..7].to_vec()])),
            ("two", ok(vec![framed(b"one"), framed(b"two")])),
            ("none", ok(vec![])),
            ("long", ok(vec![framed(&[b'x'; 600]), vec![b'x'; 600]])),
            (
                "no message",
                Script {
                    headers: vec![("grpc-status", "0")],
                    ..ok(vec![])
                },
            ),
            (
                "no status",
                Script {
                    trailers: Some(vec![]),
                    ..ok(vec![framed(b"x")])
                },
            ),
            (
                "no trailers",
                Script {
                    trailers: None,
                    ..ok(vec![framed(b"x")])
                },
            ),
        ];
        for (what, script) in scripts {
            let status = answered(script).await.expect_err(what);
            assert!(
                [Code::Internal, Code::Unknown, Code::OutOfRange].contains(&status.code()),
                "{what}: {status:?}"
            );
            assert!(!never_sent(&status), "{what}");
        }
        for (http, code) in [
            (503, Code::Unavailable),
            (404, Code::Unimplemented),
            (302, Code::Unknown),
        ] {
            let script = Script { http, ..ok(vec![]) };
            assert_eq!(answered(script).await.unwrap_err().code(), code);
        }
    }

    /// C-3.8: who gives up tells the other side.
    #[tokio::test]
    async fn a_call_that_is_given_up_is_reset() {
        let (ours, theirs) = duplex(64 * 1024);
        let (arrived, waits) = tokio::sync::oneshot::channel();
        let serve = async {
            let mut connection = server::handshake(theirs).await.unwrap();
            let (_request, mut respond) = connection.accept().await.unwrap().unwrap();
            arrived.send(()).unwrap();
            tokio::select! {
                reason = std::future::poll_fn(|cx| respond.poll_reset(cx)) => reason.unwrap(),
                _ = connection.accept() => panic!("only one call"),
            }
        };
        let ask = async {
            let channel = UnaryChannel::open(ours, &"owner".parse().unwrap(), Settings::default());
            let message = [Bytes::from_static(b"m"), Bytes::new()];
            tokio::select! {
                _ = channel.unary("/a.B/C", &[], message, 9) => panic!("nobody answers"),
                _ = waits => channel,
            }
        };
        assert_eq!(tokio::join!(serve, ask).0, Reason::CANCEL);
    }
}
