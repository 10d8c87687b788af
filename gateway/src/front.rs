//! From a request to its answer: head, call, body, reply, and one line and one count at the end.
//!
//! What is read from and written to Pingora's sessions is in [`session`]; nothing is decided here but when to
//! stop waiting.

use std::{
    net::SocketAddr,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Instant,
};

use async_trait::async_trait;
use bytes::Bytes;
use jiff::Timestamp;
use kruntimes_authz::Authorizer;
use kruntimes_proto::{
    failure::{Component, Dispatched},
    ids::InvocationId,
};
use kruntimes_trace::{Span, Tracer};
use pingora_core::{
    apps::{HttpPersistentSettings, HttpServerApp, HttpServerOptions, ReusedHttpStream},
    protocols::http::{
        ServerSession,
        v2::server::{H2Options, default_h2_options},
    },
    server::ShutdownWatch,
};
use tokio::sync::Notify;

use crate::{
    args::Patience,
    hop::client::Client,
    invoke::Invoke,
    listen::stream::Arrivals,
    metrics::{Ended, Metrics},
    reply::{self, Output, Reply, Timing},
    request::{self, Invocation, Request, Timeouts},
    routes::shared::Shared,
    spans,
};

mod session;

use session::{Read, Stop};

/// What answers; shared by all connections.
pub struct Front {
    invoke: Invoke<Arc<Shared>, Authorizer, Client>,
    timeouts: Timeouts,
    patience: Patience,
    metrics: Metrics,
    options: HttpServerOptions,
    tracer: Tracer,
    leaving: AtomicBool,
}

/// One connection of a caller.
pub struct Connection {
    front: Arc<Front>,
    arrivals: Arc<Arrivals>,
    /// As each line of its requests names it.
    remote: Box<str>,
    active: Active,
}

/// How many requests are being answered on a connection.
#[derive(Debug, Default)]
pub struct Active {
    count: AtomicUsize,
    changed: Notify,
}

/// Windows for callers: what a stranger can make this process hold, per stream and per connection.
const STREAM_WINDOW: u32 = 128 * 1024;
const CONNECTION_WINDOW: u32 = 256 * 1024;
/// Calls at once on one connection.
const STREAMS: u32 = 128;

/// Longest header list over HTTP/2, bytes, as clients are told. Twice ours: a head between the two gets our 431,
/// with its id and reason; a longer one gets the bare 431 of the protocol library.
const HEADER_LIST: usize = 2 * request::HEAD_BYTES;

/// One request, from its head on.
struct Exchange {
    started: Instant,
    version: &'static str,
    id: InvocationId,
    request: Option<Request>,
    timing: Timing,
    span: Span,
}

/// What a request that worked is answered with.
enum Done {
    Output(Output),
    Page(Bytes),
    Cancelled,
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
            tracer: Tracer::default(),
            leaving: AtomicBool::default(),
        }
    }

    /// From now on each answer over HTTP/1.1 ends its connection: callers go elsewhere between two calls. A connection that
    /// is closed while it rests meets the next call on its way, and nobody knows what became of that.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Relaxed);
    }

    /// Tells this tracer of requests.
    #[must_use]
    pub fn tracing(mut self, tracer: Tracer) -> Self {
        self.tracer = tracer;
        self
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

// === impl Connection ===

impl Connection {
    /// A connection on which nothing happened yet.
    #[must_use]
    pub fn new(front: Arc<Front>, arrivals: Arc<Arrivals>, remote: SocketAddr) -> Self {
        front.metrics.connections.inc();
        Self {
            front,
            arrivals,
            remote: remote.to_string().into(),
            active: Active::default(),
        }
    }

    /// How many requests are being answered on it.
    #[must_use]
    pub fn active(&self) -> &Active {
        &self.active
    }

    /// Everything between a head and the end of its answer; `true` when the connection may go on.
    async fn exchange(&self, session: &mut ServerSession, read: Read, shutdown: &ShutdownWatch) -> bool {
        let parsed = match read {
            Read::Complete => session::parse(session, self.front.timeouts),
            Read::Refused(error) => Err(error),
            Read::Nothing => return false,
        };
        let mut exchange = Exchange {
            started: Instant::now(),
            version: if session.is_http2() { "2" } else { "1.1" },
            id: match &parsed {
                Ok(request) => request.subject().id.clone(),
                Err(_) => session::id_for_answer(session),
            },
            request: None,
            timing: Timing::default(),
            span: Span::default(),
        };
        let result = match parsed {
            Ok(mut request) => {
                exchange.span = spans::begin(&self.front.tracer, &mut request, exchange.version);
                let result = self.answer(session, &request, &mut exchange.timing).await;
                exchange.request = Some(request);
                result
            }
            Err(error) => Err(Stop::Refused(error)),
        };
        let (ended, dispatched) = exchange.ended(&result);
        let written = match exchange.reply(result) {
            Some(reply) => {
                let stopping = *shutdown.borrow() || self.front.leaving.load(Ordering::Relaxed);
                session::write(session, reply, self.front.patience, stopping)
                    .await
                    .is_ok()
            }
            None => false,
        };
        spans::end(&mut exchange.span, &ended, dispatched);
        self.note(&exchange, ended, dispatched);
        written
    }

    async fn answer(
        &self,
        session: &mut ServerSession,
        request: &Request,
        timing: &mut Timing,
    ) -> Result<Done, Stop> {
        let invoke = &self.front.invoke;
        match request {
            Request::Invoke(call) => self.call(session, call, timing).await.map(Done::Output),
            // Boxed: a call's state, which each open connection has, is not to have room for these.
            Request::Explain(subject) => Box::pin(invoke.explain(subject, timing))
                .await
                .map(Done::Page)
                .map_err(Stop::Refused),
            Request::Cancel(subject, invocation) => Box::pin(invoke.cancel(subject, invocation, timing))
                .await
                .map(|()| Done::Cancelled)
                .map_err(Stop::Refused),
        }
    }

    async fn call(
        &self,
        session: &mut ServerSession,
        call: &Invocation,
        timing: &mut Timing,
    ) -> Result<Output, Stop> {
        let invoke = &self.front.invoke;
        let started = tokio::time::Instant::now();
        let ticket = invoke.open(call, started, timing).await.map_err(Stop::Refused)?;
        if call.expects_continue {
            session::say_continue(session).await?;
        }
        let input = session::read_body(session, self.front.patience).await?;
        let input = if input.is_empty() {
            Bytes::from_static(b"null")
        } else {
            input
        };
        let send = invoke.send(call, &ticket, input, started, Timestamp::now, timing);
        tokio::select! {
            biased;
            result = send => result.map_err(Stop::Refused),
            () = session::caller_gone(session) => Err(Stop::CallerGone(Dispatched::Unknown)),
        }
    }

    fn note(&self, exchange: &Exchange, mut ended: Ended, dispatched: Dispatched) {
        ended.took = exchange.started.elapsed();
        let subject = exchange.request.as_ref().map(Request::subject);
        let (trace_id, span_id) = exchange.span.ids().unzip();
        self.front.metrics.answered(&ended, trace_id.as_ref());
        tracing::info!(
            target: "kruntimes_gateway::access",
            status = ended.status,
            reason = ended.reason,
            component = ended.component,
            dispatched = dispatched.as_str(),
            invocation_id = exchange.id.as_str(),
            trace_id = trace_id.map(tracing::field::display),
            span_id = span_id.map(tracing::field::display),
            namespace = subject.map(|subject| subject.namespace.as_str()),
            runtime = subject.map(|subject| subject.runtime.as_str()),
            run_uid = subject.map(|subject| tracing::field::display(subject.uid)),
            method = ended.method,
            remote = &*self.remote,
            http = ended.version,
            took_ms = micros(ended.took) / 1000.0,
            "request"
        );
    }
}

/// Whole ones: more digits would be noise, and cost more than all other fields.
fn micros(took: std::time::Duration) -> f64 {
    f64::from(u32::try_from(took.as_micros()).unwrap_or(u32::MAX))
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
        let read = session::read_head(&mut session, &self.arrivals, self.front.patience, shutdown).await;
        let _counted = self.active.one();
        if !self.exchange(&mut session, read, shutdown).await {
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
            .max_header_list_size(u32::try_from(HEADER_LIST).unwrap_or(u32::MAX));
        Some(options)
    }

    fn server_options(&self) -> Option<&HttpServerOptions> {
        Some(&self.front.options)
    }
}

// === impl Exchange ===

impl Exchange {
    /// How it is counted, but for the time.
    fn ended(&self, result: &Result<Done, Stop>) -> (Ended, Dispatched) {
        let ended = Ended {
            status: 200,
            reason: "OK",
            component: Component::Gateway.as_str(),
            // Without a request that makes sense the method may be anything, and callers must not make labels.
            method: self.request.as_ref().map_or("other", Request::method),
            version: self.version,
            took: std::time::Duration::ZERO,
        };
        match result {
            Ok(Done::Output(_)) => {
                let component = Component::Function.as_str();
                (Ended { component, ..ended }, Dispatched::Yes)
            }
            Ok(Done::Page(_)) => (ended, Dispatched::No),
            Ok(Done::Cancelled) => (Ended { status: 204, ..ended }, Dispatched::No),
            Err(Stop::Refused(error)) => (ended.with(error.row()), error.row().dispatched),
            Err(Stop::CallerGone(dispatched)) => {
                let (status, reason) = (499, "CallerGone");
                (
                    Ended {
                        status,
                        reason,
                        ..ended
                    },
                    *dispatched,
                )
            }
        }
    }

    /// What is written; nothing for a caller that is gone.
    fn reply(&self, result: Result<Done, Stop>) -> Option<Reply> {
        match result {
            Ok(Done::Output(output)) => {
                let envelope = matches!(&self.request, Some(Request::Invoke(call)) if call.envelope);
                Some(reply::success(output, &self.id, envelope, self.timing))
            }
            Ok(Done::Page(page)) => Some(reply::page(page, &self.id, self.timing)),
            Ok(Done::Cancelled) => Some(reply::cancelled(&self.id, self.timing)),
            Err(Stop::Refused(error)) => Some(reply::problem(&error, &self.id, self.timing)),
            Err(Stop::CallerGone(_)) => None,
        }
    }
}

// === impl Active ===

impl Active {
    /// Returns when there are as many as that.
    pub async fn until(&self, enough: impl Fn(usize) -> bool) {
        loop {
            let mut changed = pin!(self.changed.notified());
            // From here on no change is missed.
            changed.as_mut().enable();
            if enough(self.count.load(Ordering::SeqCst)) {
                return;
            }
            changed.await;
        }
    }

    fn one(&self) -> Counted<'_> {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.changed.notify_waiters();
        Counted(self)
    }
}

/// Counts one request until it drops.
struct Counted<'a>(&'a Active);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::SeqCst);
        self.0.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size<A, F: Future>(_: impl Fn(A) -> F) -> usize {
        size_of::<F>()
    }

    /// Each open connection over HTTP/1.1 has this state, also while it rests: what is rare must not have its room in it.
    #[test]
    fn a_resting_connection_is_small() {
        type Parts = (
            &'static Connection,
            &'static mut ServerSession,
            Read,
            &'static ShutdownWatch,
        );
        let bytes =
            size(|(connection, session, read, shutdown): Parts| connection.exchange(session, read, shutdown));
        assert!(bytes < 5 * 1024, "{bytes} bytes");
    }
}
