//! A Pingora session ⇄ plain head, body and reply. Pingora's types end here.

use std::{
    future::poll_fn,
    pin::pin,
    task::Poll,
    time::{Duration, Instant},
};

use bytes::{Bytes, BytesMut};
use http::{Method, StatusCode, header};
use kruntimes_proto::{failure::Dispatched, ids::InvocationId, limits};
use pingora_core::{ErrorType, protocols::http::ServerSession, server::ShutdownWatch};
use pingora_http::ResponseHeader;

use crate::{
    args::Patience,
    error::InvokeError,
    listen::stream::Arrivals,
    reply::Reply,
    request::{self, Head, Request, Timeouts},
};

/// Why there is no output.
pub(super) enum Stop {
    Refused(InvokeError),
    /// Nobody is there to be answered; the call may have been dispatched or not.
    CallerGone(Dispatched),
}

/// How reading a head ended.
pub(super) enum Read {
    Complete,
    Refused(InvokeError),
    /// The connection is over, or idle while the process stops.
    Nothing,
}

/// How much of a body that nobody wants is read before answering over HTTP/2, so that the answer is not lost
/// (C-3.5).
const DRAIN_BYTES: usize = 64 * 1024;
/// How much of it is read after an answer, before closing on a client that has not stopped sending: a body a
/// little over the limit, as honest mistakes are.
const LINGER_BYTES: usize = 2 * limits::INPUT_BYTES;
/// How long either may take.
const DRAIN_TIME: Duration = Duration::from_millis(500);

/// Waits for a request and reads its head. An idle connection is closed without a word, a slow head is told.
pub(super) async fn read_head(
    session: &mut ServerSession,
    arrivals: &Arrivals,
    patience: Patience,
    shutdown: &ShutdownWatch,
) -> Read {
    if session.is_http2() {
        return Read::Complete;
    }
    // Bytes of the body before belong to no head.
    arrivals.expect_next();
    let waiting_since = Instant::now();
    let mut stopping = shutdown.clone();
    let mut read = Box::pin(session.read_request());
    loop {
        let (first, left) = match arrivals.first() {
            // The first byte may come at any time: look again before its head could be late.
            None => (None, patience.head.min(patience.idle)),
            Some(first) => (Some(first), patience.head.saturating_sub(first.elapsed())),
        };
        tokio::select! {
            biased;
            result = &mut read => return match result {
                Ok(true) => Read::Complete,
                Ok(false) => Read::Nothing,
                Err(error) => refuse_head(&error),
            },
            _ = stopping.wait_for(|stop| *stop), if first.is_none() && !*shutdown.borrow() => {}
            () = pingora_timeout::sleep(left) => {}
        }
        match arrivals.first() {
            Some(first) if first.elapsed() >= patience.head => {
                return Read::Refused(InvokeError::SlowRequest("head"));
            }
            None if *shutdown.borrow() || waiting_since.elapsed() >= patience.idle => {
                return Read::Nothing;
            }
            _ => {}
        }
    }
}

/// Reads the head that Pingora received.
pub(super) fn parse(session: &mut ServerSession, timeouts: Timeouts) -> Result<Request, InvokeError> {
    let no_body = session.is_body_done();
    let raw = session.as_http1().map(|http1| http1.get_headers_raw_bytes());
    let received = session.req_header();
    let head = Head {
        method: &received.method,
        target: received.raw_path(),
        headers: &received.headers,
        raw: raw.as_deref(),
        no_body,
    };
    request::parse(&head, timeouts)
}

/// Of a head that could not be read there may be no headers at all, and asking for all of them would panic.
pub(super) fn id_for_answer(session: &ServerSession) -> InvocationId {
    let absent = session
        .as_http1()
        .is_some_and(|http1| http1.get_header(request::INVOCATION_ID).is_none());
    if absent {
        InvocationId::generate()
    } else {
        request::id_for_answer(&session.req_header().headers)
    }
}

/// Tells a caller over HTTP/1.1 that its body is wanted. HTTP/2 has no use for it here, and Pingora ignores it
/// there.
pub(super) async fn say_continue(session: &mut ServerSession) -> Result<(), Stop> {
    if session.is_body_done() {
        return Ok(());
    }
    session
        .write_continue_response()
        .await
        .map_err(|_| Stop::CallerGone(Dispatched::No))
}

/// The whole body, bounded in bytes and time.
pub(super) async fn read_body(session: &mut ServerSession, patience: Patience) -> Result<Bytes, Stop> {
    let mut deadline = None;
    let mut body = Bytes::new();
    let mut more = BytesMut::new();
    while !session.is_body_done() {
        let mut read = pin!(session.read_request_body());
        // What came with the head is there at once, and needs no clock.
        let at_once = poll_fn(|cx| Poll::Ready(read.as_mut().poll(cx))).await;
        let chunk = match at_once {
            Poll::Ready(chunk) => Ok(chunk),
            Poll::Pending => {
                let now = Instant::now();
                let deadline = deadline.get_or_insert(now + patience.body);
                let wait = patience.body_gap.min(deadline.saturating_duration_since(now));
                pingora_timeout::timeout(wait, read).await
            }
        };
        let chunk = match chunk {
            Ok(Ok(Some(chunk))) => chunk,
            Ok(Ok(None)) => break,
            Ok(Err(error)) => return Err(refuse_body(&error)),
            Err(_) => return Err(Stop::Refused(InvokeError::SlowRequest("body"))),
        };
        if body.len() + more.len() + chunk.len() > limits::INPUT_BYTES {
            return Err(Stop::Refused(InvokeError::PayloadTooLarge(limits::INPUT_BYTES)));
        }
        // Most bodies come in one piece, which is then not copied.
        if body.is_empty() && more.is_empty() {
            body = chunk;
        } else {
            if more.is_empty() {
                more.reserve(body.len() + chunk.len());
                more.extend_from_slice(&std::mem::take(&mut body));
            }
            more.extend_from_slice(&chunk);
        }
    }
    Ok(if more.is_empty() { body } else { more.freeze() })
}

/// Returns when the caller hangs up or resets its stream.
pub(super) async fn caller_gone(session: &mut ServerSession) {
    // Anything but an error would be a body after its end.
    if let Err(error) = session.read_body_or_idle(true).await
        && *error.etype() == ErrorType::ConnectError
    {
        // The next request came early, and its first byte is lost: answer this one and close.
        session.set_keepalive(None);
        std::future::pending::<()>().await;
    }
}

/// Writes a reply so that it arrives, whatever the caller is still sending.
pub(super) async fn write(
    session: &mut ServerSession,
    reply: Reply,
    patience: Patience,
    stopping: bool,
) -> pingora_core::Result<()> {
    let unread = !reply.close && !session.is_body_done();
    let sends = session.is_http2() || unread && !request::expects_continue(&session.req_header().headers);
    // Over HTTP/1.1 Pingora itself closes after an answer to a body that was not read to its end.
    if reply.close || stopping {
        session.set_keepalive(None);
    }
    // Over HTTP/2 an answer is followed by a reset of what is still being sent, and then lost.
    if unread && session.is_http2() {
        discard(session, DRAIN_BYTES).await;
    }
    session.set_write_timeout(Some(patience.write));
    // Names go out as the library writes them: there is no upstream whose spelling is to be kept.
    let mut head = ResponseHeader::build_no_case(reply.status, Some(reply.headers.len() + 4))?;
    for (name, value) in reply.headers {
        head.append_header(name, value)?;
    }
    // 204 says by itself that nothing follows.
    if reply.status != StatusCode::NO_CONTENT {
        head.insert_header(header::CONTENT_LENGTH, reply.body.len())?;
    }
    session.write_response_header(Box::new(head)).await?;
    // The head of a broken request has no method, and is not HEAD.
    let body = if reply.close || session.req_header().method != Method::HEAD {
        reply.body
    } else {
        Bytes::new()
    };
    session.write_response_body(body, true).await?;
    // Closing on a client that still sends makes its kernel forget the answer.
    if unread && sends {
        discard(session, LINGER_BYTES).await;
    }
    Ok(())
}

/// Reads a bounded part of a body and throws it away.
async fn discard(session: &mut ServerSession, most: usize) {
    let read = async {
        let mut bytes = 0;
        while bytes < most && !session.is_body_done() {
            match session.read_request_body().await {
                Ok(Some(chunk)) => bytes += chunk.len(),
                Ok(None) | Err(_) => break,
            }
        }
    };
    // Whether it was enough cannot be known; the answer follows in any case.
    let _ = pingora_timeout::timeout(DRAIN_TIME, read).await;
}

/// Pingora's text quotes the head, and so may quote a token: it goes nowhere.
fn refuse_head(error: &pingora_core::Error) -> Read {
    match error.etype() {
        ErrorType::InvalidHTTPHeader => {
            let cause = error.cause.as_ref().map(ToString::to_string).unwrap_or_default();
            let context = error
                .context
                .as_ref()
                .map(|context| context.as_str())
                .unwrap_or_default();
            if cause.contains("too many headers") || context.starts_with("Request header larger") {
                Read::Refused(InvokeError::HeadersTooLarge)
            } else {
                Read::Refused(InvokeError::BadRequest("its head is malformed"))
            }
        }
        _ => Read::Nothing,
    }
}

fn refuse_body(error: &pingora_core::Error) -> Stop {
    match error.etype() {
        ErrorType::ReadTimedout => Stop::Refused(InvokeError::SlowRequest("body")),
        // Pingora makes this type up where it reads chunks.
        kind if kind.as_str() == "InvalidChunk" => {
            Stop::Refused(InvokeError::BadRequest("a chunk of the body is malformed"))
        }
        _ => Stop::CallerGone(Dispatched::No),
    }
}
