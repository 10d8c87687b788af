//! One unary gRPC call by hand: a framed message out, a message and a status back.
//!
//! Tonic's client is for every kind of call and serves all others here. On the path of each call its layers (a boxed
//! body, a stream of messages, buffers of their own) cost more than the protocol itself: a prefix of five bytes, and a
//! status in the headers or in the trailers.

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::{
    HeaderMap, HeaderValue, Method, Request, StatusCode, Uri, Version,
    header::{CONTENT_TYPE, TE},
    response,
    uri::{PathAndQuery, Scheme},
};
use tonic::{Code, Status};

use super::{NeverSent, Running, UnaryChannel, broken};

/// The answer of a call that succeeded.
#[derive(Debug)]
pub struct Answer {
    /// What came before the message, gRPC's own headers among it.
    pub metadata: HeaderMap,
    /// The message, not decoded.
    pub message: Bytes,
}

/// A flag for compression, and the length.
const PREFIX_BYTES: usize = 5;

impl UnaryChannel {
    /// Calls `path`, such as `/package.Service/Method`. `head` is gRPC's prefix and the message or its beginning, `tail`
    /// the rest, which is not copied. An answer of more than `limit` bytes is not taken.
    ///
    /// # Errors
    /// The status of the other side, or one that was made here: with a source where the connection broke, and such
    /// that [`never_sent`](super::never_sent) tells whether anything left.
    pub async fn unary(
        &self,
        path: &'static str,
        metadata: HeaderMap,
        head: Bytes,
        tail: Bytes,
        limit: usize,
    ) -> Result<Answer, Status> {
        let mut uri = http::uri::Parts::default();
        uri.scheme = Some(Scheme::HTTP);
        uri.authority = Some(self.authority.clone());
        uri.path_and_query = Some(PathAndQuery::from_static(path));
        let mut request = Request::new(());
        *request.method_mut() = Method::POST;
        *request.version_mut() = Version::HTTP_2;
        *request.uri_mut() = Uri::from_parts(uri).map_err(|error| Status::internal(error.to_string()))?;
        *request.headers_mut() = metadata;
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(TE, HeaderValue::from_static("trailers"));

        let _running = Running::begin(std::sync::Arc::clone(&self.state));
        let over = |error: h2::Error| Status::from(NeverSent(error.to_string()));
        let mut send = self.send.clone().ready().await.map_err(over)?;
        let (response, mut stream) = send.send_request(request, false).map_err(over)?;
        // What does not fit into the windows yet waits there, and is bounded by the message.
        stream.send_data(head, tail.is_empty()).map_err(broken)?;
        if !tail.is_empty() {
            stream.send_data(tail, true).map_err(broken)?;
        }
        let (head, body) = response.await.map_err(broken)?.into_parts();
        read(head, body, limit).await
    }
}

async fn read(head: response::Parts, mut body: RecvStream, limit: usize) -> Result<Answer, Status> {
    if head.status != StatusCode::OK {
        return Err(Status::new(
            code_of(head.status),
            format!("HTTP status {}", head.status),
        ));
    }
    // An answer without a message has its status here.
    if let Some(status) = Status::from_header_map(&head.headers) {
        return Err(match status.code() {
            Code::Ok => Status::internal("an answer without a message"),
            _ => status,
        });
    }
    let framed = collect(&mut body, PREFIX_BYTES + limit).await?;
    let trailers = body.trailers().await.map_err(broken)?;
    match trailers.as_ref().and_then(Status::from_header_map) {
        Some(status) if status.code() == Code::Ok => {}
        Some(status) => return Err(status),
        None => return Err(Status::unknown("an answer without a status")),
    }
    Ok(Answer {
        metadata: head.headers,
        message: unframe(framed)?,
    })
}

/// All of the body. One piece, as small answers are, is not copied.
async fn collect(body: &mut RecvStream, limit: usize) -> Result<Bytes, Status> {
    let mut first = Bytes::new();
    let mut more = BytesMut::new();
    while let Some(piece) = body.data().await {
        let piece = piece.map_err(broken)?;
        // Fails only on a stream that has ended.
        let _ = body.flow_control().release_capacity(piece.len());
        let so_far = first.len() + more.len() + piece.len();
        if so_far > limit {
            return Err(Status::out_of_range(format!(
                "an answer of more than {limit} bytes"
            )));
        }
        if first.is_empty() && more.is_empty() {
            first = piece;
            continue;
        }
        if more.is_empty() {
            more.reserve(whole(&first).clamp(so_far, limit));
            more.extend_from_slice(&std::mem::take(&mut first));
        }
        more.extend_from_slice(&piece);
    }
    Ok(if more.is_empty() { first } else { more.freeze() })
}

/// How long the frame that begins so says it is; 0 while that is not known.
fn whole(begin: &[u8]) -> usize {
    match begin {
        [_, a, b, c, d, ..] => PREFIX_BYTES.saturating_add(u32::from_be_bytes([*a, *b, *c, *d]) as usize),
        _ => 0,
    }
}

/// The one message.
fn unframe(mut framed: Bytes) -> Result<Bytes, Status> {
    match framed.first() {
        Some(0) if whole(&framed) == framed.len() => Ok(framed.split_off(PREFIX_BYTES)),
        Some(1) => Err(Status::internal("a compressed answer, which nobody asked for")),
        _ => Err(Status::internal("an answer that is not one whole message")),
    }
}

/// What a status of HTTP means where gRPC expects none of its own (gRPC, "HTTP to gRPC Status Code Mapping").
fn code_of(status: StatusCode) -> Code {
    match status.as_u16() {
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
    use http::Response;
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
            let channel = UnaryChannel::open(ours, "owner".parse().unwrap(), Settings::default())
                .await
                .unwrap();
            channel
                .unary("/package.Service/Method", map(&[("x", "y")]), head, tail, 1000)
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
            assert_eq!(answer.metadata["kruntime-handler-us"], "7");
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
            let channel = UnaryChannel::open(ours, "owner".parse().unwrap(), Settings::default())
                .await
                .unwrap();
            let message = Bytes::from_static(b"m");
            tokio::select! {
                _ = channel.unary("/a.B/C", HeaderMap::new(), message, Bytes::new(), 9) => panic!("nobody answers"),
                _ = waits => channel,
            }
        };
        assert_eq!(tokio::join!(serve, ask).0, Reason::CANCEL);
    }
}
