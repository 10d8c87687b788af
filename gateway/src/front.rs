//! A Pingora session ⇄ plain head, body and reply. Pingora's types end here; nothing is decided here but
//! when to stop waiting.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use http::{Method, header};
use jiff::Timestamp;
use kruntimes_api::keys::RunKey;
use kruntimes_authz::{Authorizer, Bearer, Question, Verdict};
use kruntimes_proto::{failure::Component, ids::InvocationId, limits};
use pingora_core::{
    ErrorType,
    apps::{HttpPersistentSettings, HttpServerApp, HttpServerOptions, ReusedHttpStream},
    protocols::http::{
        ServerSession,
        v2::server::{H2Options, default_h2_options},
    },
    server::ShutdownWatch,
};
use pingora_http::ResponseHeader;
use tokio::sync::watch;

use crate::{
    args::Patience,
    error::InvokeError,
    hop::client::Client,
    invoke::{Authorize, Invoke},
    listen::stream::Arrivals,
    metrics::{Ended, Metrics},
    reply::{self, Output, Reply, Timing},
    request::{self, Head, Invocation, Timeouts},
    routes::table::Shared,
};

/// What answers; shared by all connections.
pub struct Front {
    invoke: Invoke<Arc<Shared>, Authorizer, Client>,
    timeouts: Timeouts,
    patience: Patience,
    metrics: Metrics,
    options: HttpServerOptions,
}

/// One connection of a caller.
pub struct Connection {
    front: Arc<Front>,
    arrivals: Arc<Arrivals>,
    remote: SocketAddr,
    active: watch::Sender<usize>,
}

/// How much of a body that nobody wants is read before answering over HTTP/2, so that the answer is not lost
/// (C-3.5).
const DRAIN_BYTES: usize = 64 * 1024;
/// How much of it is read after an answer, before closing on a client that has not stopped sending: a body a
/// little over the limit, as honest mistakes are.
const LINGER_BYTES: usize = 2 * limits::INPUT_BYTES;
/// How long either may take.
const DRAIN_TIME: Duration = Duration::from_millis(500);
/// Windows for callers: what a stranger can make this process hold, per stream and per connection.
const STREAM_WINDOW: u32 = 128 * 1024;
const CONNECTION_WINDOW: u32 = 256 * 1024;
/// Calls at once on one connection.
const STREAMS: u32 = 128;

/// Why there is no output.
enum Stop {
    Refused(InvokeError),
    CallerGone,
}

/// How reading a head ended.
enum Read {
    Complete,
    Refused(InvokeError),
    /// The connection is over, or idle while the process stops.
    Nothing,
}

// === impl Front ===

impl Front {
    /// Answers with `invoke`.
    #[must_use]
    pub fn new(
        invoke: Invoke<Arc<Shared>, Authorizer, Client>,
        timeouts: Timeouts,
        patience: Patience,
        metrics: Metrics,
    ) -> Self {
        let mut options = HttpServerOptions::default();
        options.h2_idle_timeout = Some(patience.idle);
        Self {
            invoke,
            timeouts,
            patience,
            metrics,
            options,
        }
    }

    /// How long callers may take.
    #[must_use]
    pub fn patience(&self) -> Patience {
        self.patience
    }

    /// What is counted.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }
}

impl Authorize for Authorizer {
    async fn authorize(&self, bearer: &Bearer, key: &RunKey) -> Verdict {
        let question = Question {
            verb: "get",
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            uid: key.uid.to_string(),
        };
        Self::authorize(self, bearer, &question).await
    }
}

// === impl Connection ===

impl Connection {
    /// A connection on which nothing happened yet.
    #[must_use]
    pub fn new(front: Arc<Front>, arrivals: Arc<Arrivals>, remote: SocketAddr) -> Self {
        front.metrics.connections.inc();
        Self {
            front,
            arrivals,
            remote,
            active: watch::Sender::new(0),
        }
    }

    /// How many requests are being answered on it.
    #[must_use]
    pub fn active(&self) -> watch::Receiver<usize> {
        self.active.subscribe()
    }

    async fn read_head(&self, session: &mut ServerSession, shutdown: &ShutdownWatch) -> Read {
        if session.is_http2() {
            return Read::Complete;
        }
        let waiting_since = Instant::now();
        let mut stopping = shutdown.clone();
        let patience = self.front.patience;
        let mut read = Box::pin(session.read_request());
        loop {
            let (first, left) = match self.arrivals.first() {
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
            match self.arrivals.first() {
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

    /// Everything between a complete head and a reply; `None` when the caller is gone.
    async fn answer(&self, session: &mut ServerSession, refused: Option<InvokeError>) -> Option<Reply> {
        let started = Instant::now();
        let mut timing = Timing::default();
        let mut call = match refused {
            Some(error) => Err(error),
            None => parse(session, self.front.timeouts),
        };
        let id = match &call {
            Ok(call) => call.id.clone(),
            Err(_) => id_for_answer(session),
        };
        let result = match &mut call {
            Ok(call) => self.call(session, call, &mut timing).await,
            Err(error) => Err(Stop::Refused(error.clone())),
        };
        let reply = match &result {
            Ok(output) => {
                let envelope = call.as_ref().is_ok_and(|call| call.envelope);
                Some(reply::success(output.clone(), &id, envelope, timing))
            }
            Err(Stop::Refused(error)) => Some(reply::problem(error, &id, timing)),
            Err(Stop::CallerGone) => None,
        };
        self.note(session, call.as_ref().ok(), &id, &result, started);
        reply
    }

    async fn call(
        &self,
        session: &mut ServerSession,
        call: &Invocation,
        timing: &mut Timing,
    ) -> Result<Output, Stop> {
        let invoke = &self.front.invoke;
        let started = tokio::time::Instant::now();
        let ticket = invoke.open(call, timing).await.map_err(Stop::Refused)?;
        if call.expects_continue && !session.is_body_done() {
            // HTTP/2 has no use for it here, and Pingora ignores it there.
            session
                .write_continue_response()
                .await
                .map_err(|_| Stop::CallerGone)?;
        }
        let input = self.read_body(session).await?;
        let input = if input.is_empty() {
            Bytes::from_static(b"null")
        } else {
            input
        };
        let send = invoke.send(call, &ticket, input, started, Timestamp::now(), timing);
        tokio::select! {
            biased;
            result = send => result.map_err(Stop::Refused),
            () = caller_gone(session) => Err(Stop::CallerGone),
        }
    }

    async fn read_body(&self, session: &mut ServerSession) -> Result<Bytes, Stop> {
        let patience = self.front.patience;
        let deadline = Instant::now() + patience.body;
        let mut body = Bytes::new();
        let mut more = BytesMut::new();
        while !session.is_body_done() {
            let wait = patience
                .body_gap
                .min(deadline.saturating_duration_since(Instant::now()));
            let chunk = match pingora_timeout::timeout(wait, session.read_request_body()).await {
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

    fn note(
        &self,
        session: &ServerSession,
        call: Option<&Invocation>,
        id: &InvocationId,
        result: &Result<Output, Stop>,
        started: Instant,
    ) {
        let version = if session.is_http2() { "2" } else { "1.1" };
        let ended = Ended {
            status: 200,
            reason: "OK",
            component: Component::Function.as_str(),
            // A broken head is refused before there is a call.
            method: if call.is_some() { "POST" } else { "other" },
            version,
            took: started.elapsed(),
        };
        let (ended, dispatched) = match result {
            Ok(_) => (ended, "yes"),
            Err(Stop::Refused(error)) => (ended.with(error.row()), error.row().dispatched.as_str()),
            Err(Stop::CallerGone) => (
                Ended {
                    status: 499,
                    reason: "CallerGone",
                    component: Component::Gateway.as_str(),
                    ..ended
                },
                "unknown",
            ),
        };
        self.front.metrics.answered(&ended);
        tracing::info!(
            target: "kruntimes_gateway::access",
            status = ended.status,
            reason = ended.reason,
            component = ended.component,
            dispatched,
            invocation_id = id.as_str(),
            namespace = call.map(|call| call.namespace.as_str()),
            runtime = call.map(|call| call.runtime.as_str()),
            run_uid = call.map(|call| tracing::field::display(call.uid)),
            remote = %self.remote,
            http = version,
            took_ms = ended.took.as_secs_f64() * 1000.0,
            "request"
        );
    }

    async fn write(
        &self,
        session: &mut ServerSession,
        reply: Reply,
        stopping: bool,
    ) -> pingora_core::Result<()> {
        let unread = !reply.close && !session.is_body_done();
        let sends = session.is_http2() || unread && !request::expects_continue(&session.req_header().headers);
        if reply.close || stopping {
            session.set_keepalive(None);
        }
        // Over HTTP/2 an answer is followed by a reset of what is still being sent, and then lost.
        if unread && session.is_http2() {
            discard(session, DRAIN_BYTES).await;
        }
        session.set_write_timeout(Some(self.front.patience.write));
        let mut head = ResponseHeader::build(reply.status, Some(reply.headers.len() + 4))?;
        for (name, value) in reply.headers {
            head.append_header(name, value)?;
        }
        head.insert_header(header::CONTENT_LENGTH, reply.body.len())?;
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
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.front.metrics.connections.dec();
    }
}

#[async_trait]
impl HttpServerApp for Connection {
    async fn process_new_http(
        self: &Arc<Self>,
        mut session: ServerSession,
        shutdown: &ShutdownWatch,
    ) -> Option<ReusedHttpStream> {
        let refused = match self.read_head(&mut session, shutdown).await {
            Read::Complete => None,
            Read::Refused(error) => Some(error),
            Read::Nothing => return None,
        };
        let _active = Active::new(&self.active);
        self.arrivals.expect_next();
        let Some(reply) = self.answer(&mut session, refused).await else {
            session.shutdown().await;
            return None;
        };
        let stopping = *shutdown.borrow();
        if self.write(&mut session, reply, stopping).await.is_err() {
            session.shutdown().await;
            return None;
        }
        let settings = HttpPersistentSettings::for_session(&session);
        let stream = session.finish().await.ok()??;
        Some(ReusedHttpStream::from_reusable_stream(stream, settings))
    }

    fn h2_options(&self) -> Option<H2Options> {
        let mut options = default_h2_options();
        options
            .max_concurrent_streams(STREAMS)
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(u32::try_from(request::HEAD_BYTES).unwrap_or(u32::MAX));
        Some(options)
    }

    fn server_options(&self) -> Option<&HttpServerOptions> {
        Some(&self.front.options)
    }
}

fn parse(session: &mut ServerSession, timeouts: Timeouts) -> Result<Invocation, InvokeError> {
    let no_body = session.is_body_done();
    let raw = session.as_http1().map(|http1| http1.get_headers_raw_bytes());
    if raw.as_ref().is_some_and(|raw| raw.len() > request::HEAD_BYTES) {
        return Err(InvokeError::HeadersTooLarge);
    }
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

/// Of a head that could not be read there may be no header at all, and asking for all of them would panic.
fn id_for_answer(session: &ServerSession) -> InvocationId {
    match session.as_http1() {
        Some(http1) => http1
            .get_header(request::INVOCATION_ID)
            .and_then(|value| InvocationId::parse(value.as_bytes()).ok())
            .unwrap_or_else(InvocationId::generate),
        None => request::id_for_answer(&session.req_header().headers),
    }
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
        _ => Stop::CallerGone,
    }
}

/// Returns when the caller hangs up or resets its stream.
async fn caller_gone(session: &mut ServerSession) {
    // Anything but an error would be a body after its end.
    if let Err(error) = session.read_body_or_idle(true).await
        && *error.etype() == ErrorType::ConnectError
    {
        // The next request came early, and its first byte is lost: answer this one and close.
        session.set_keepalive(None);
        std::future::pending::<()>().await;
    }
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

/// Counts one request until it drops.
struct Active<'a>(&'a watch::Sender<usize>);

impl<'a> Active<'a> {
    fn new(active: &'a watch::Sender<usize>) -> Self {
        active.send_modify(|count| *count += 1);
        Self(active)
    }
}

impl Drop for Active<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}
