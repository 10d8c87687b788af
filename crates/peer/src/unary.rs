//! A gRPC channel for unary calls: one HTTP/2 connection, and nothing between it and the call.
//!
//! Tonic's own channel serves every use: it has a queue with a task of its own, connects again, and streams. A
//! message that is whole needs none of that. Here its head, the message and the end of the stream go out in one
//! write, so that the other side wakes up once; and of HTTP/2 there is only what such calls need ([`state`]).
//!
//! A connection that is over stays over: the call that meets it fails, and says that nothing was sent
//! ([`never_sent`]), because only the caller knows whether there is somewhere else to try (C-3.7).

use std::{
    error::Error as StdError,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response, StatusCode, uri::Authority};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use thiserror::Error;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Notify,
};
use tonic::{Status, body::Body};
use tower::Service;

mod drive;
mod frame;
mod hpack;
pub mod message;
#[cfg(test)]
mod model;
mod output;
mod state;
mod stream;

pub use self::{
    hpack::{Field, Fields, Keep},
    stream::Broken,
};
use self::{
    state::{NotNow, Sent, State},
    stream::Reply,
};

/// Sizes and pings of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// What the other side may send on one stream before it is read, bytes.
    pub stream_window: u32,
    /// The same on all streams together.
    pub connection_window: u32,
    /// Largest frame that is taken, bytes.
    pub frame: u32,
    /// Largest list of headers that is taken, bytes.
    pub headers: u32,
    /// Largest message that a client of tonic is answered with, bytes.
    pub answer: usize,
    /// While calls run: how often the other side is pinged, and how long it may then be silent.
    pub ping: Option<(Duration, Duration)>,
}

/// Those of the hop: a payload of 1 MiB needs few frames (measured: CPU -28 %) and no update of a window on its
/// way, and an owner that froze is found out.
impl Default for Settings {
    fn default() -> Self {
        Self {
            stream_window: 2 * 1024 * 1024,
            connection_window: 16 * 1024 * 1024,
            frame: 256 * 1024,
            headers: 64 * 1024,
            answer: 4 * 1024 * 1024,
            ping: Some((Duration::from_secs(1), Duration::from_secs(10))),
        }
    }
}

/// The channel. Clones share the connection, which ends with the last of them and the last call.
#[derive(Debug, Clone)]
pub struct UnaryChannel(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    authority: Box<str>,
}

/// What calls and the connection's task have in common.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    limit: usize,
    over: AtomicBool,
    /// There is no channel any more.
    unused: AtomicBool,
    /// Nobody pings until somebody calls.
    resting: AtomicBool,
    called: Notify,
    ponged: Notify,
    /// Calls that wait for a place among those that the other side takes.
    queue: AtomicUsize,
    places: Notify,
}

/// One call while it runs. Dropping it gives it up.
#[derive(Debug)]
struct Call<'a> {
    shared: &'a Shared,
    id: u32,
}

/// Counts a call that waits.
struct Queued<'a>(&'a AtomicUsize);

/// The connection of this channel is over; the call that met this error was not sent.
#[derive(Debug, Error)]
#[error("the connection is over: {0}")]
pub struct NeverSent(pub String);

/// Whether a call failed before anything of it was sent. `false` means: unknown.
#[must_use]
pub fn never_sent(status: &Status) -> bool {
    let mut next: Option<&(dyn StdError + 'static)> = status.source();
    while let Some(error) = next {
        if error.is::<NeverSent>() {
            return true;
        }
        next = error.source();
    }
    false
}

impl From<NeverSent> for Status {
    fn from(error: NeverSent) -> Self {
        let mut status = Self::unavailable(error.to_string());
        status.set_source(Arc::new(error));
        status
    }
}

// === impl UnaryChannel ===

impl UnaryChannel {
    /// Begins HTTP/2 on `io`. `authority` is what requests name; no address is looked up.
    #[must_use]
    pub fn open<T>(io: T, authority: &Authority, settings: Settings) -> Self
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let shared = Arc::new(Shared::new(settings));
        let drive = drive::drive(io, Arc::clone(&shared), settings.ping);
        #[expect(
            clippy::disallowed_methods,
            reason = "ends with its connection, and that with its channel"
        )]
        tokio::spawn(drive);
        Self(Arc::new(Handle {
            shared,
            authority: authority.as_str().into(),
        }))
    }

    /// Whether the connection is known to be over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.shared.over.load(Ordering::Relaxed)
    }

    /// One message there, and what comes back.
    async fn exchange(
        &self,
        path: &str,
        own: &[Field<'_>],
        fields: &[Field<'_>],
        message: [Bytes; 2],
        limit: usize,
    ) -> Result<Reply, Status> {
        let Handle { shared, authority } = &*self.0;
        let sent = || Sent {
            path,
            authority,
            fields: [own, fields],
            message: message.clone(),
            limit,
        };
        let id = match shared.with(|state| state.begin(sent())) {
            Ok(id) => id,
            Err(NotNow::Over(why)) => return Err(NeverSent(why).into()),
            Err(NotNow::Full) => shared.begin(sent).await?,
        };
        // The call holds it as long as it is not sent.
        drop(message);
        Ok(Call { shared, id }.await?)
    }

    async fn run(self, request: Request<Body>) -> Result<Response<Body>, Status> {
        let (head, body) = request.into_parts();
        let message = body.collect().await?.to_bytes();
        let fields: Vec<_> = head
            .headers
            .iter()
            .map(
                |(name, value)| match value.is_sensitive() || name == http::header::AUTHORIZATION {
                    true => Field::secret(name.as_str(), value.as_bytes()),
                    false => Field::once(name.as_str(), value.as_bytes()),
                },
            )
            .collect();
        let limit = self.0.shared.limit;
        let reply = self
            .exchange(head.uri.path(), &[], &fields, [message, Bytes::new()], limit)
            .await?;
        let frames = [
            (!reply.body.is_empty()).then(|| Frame::data(reply.body)),
            reply
                .trailers
                .map(|trailers| Frame::trailers(trailers.into_map())),
        ];
        let frames = frames.into_iter().flatten().map(Ok::<_, Status>);
        let mut response = Response::new(Body::new(StreamBody::new(tokio_stream::iter(frames))));
        *response.status_mut() =
            StatusCode::from_u16(reply.status).map_err(|error| Status::internal(error.to_string()))?;
        *response.headers_mut() = reply.head.into_map();
        Ok(response)
    }
}

impl Service<Request<Body>> for UnaryChannel {
    type Response = Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.clone().run(request))
    }
}

// === impl Broken ===

/// What a call that broke off is told (gRPC over HTTP/2, "Errors"). Nothing is known of a call that left. Not even when
/// its stream is refused: that nobody looked at it is the word of a side that just broke off.
impl From<Broken> for Status {
    fn from(error: Broken) -> Self {
        let code = match &error {
            Broken::Reset(code) | Broken::GoAway(code) => match *code {
                frame::Code::REFUSED => tonic::Code::Unavailable,
                frame::Code::CANCEL => tonic::Code::Cancelled,
                frame::Code::CALM_DOWN => tonic::Code::ResourceExhausted,
                frame::Code::SECURITY => tonic::Code::PermissionDenied,
                _ => tonic::Code::Internal,
            },
            Broken::Malformed(_) => tonic::Code::Internal,
            Broken::Ended(_) => tonic::Code::Unknown,
            // The connection is as good as before.
            Broken::TooLong(_) => return Self::out_of_range(error.to_string()),
        };
        let mut status = Self::new(code, error.to_string());
        status.set_source(Arc::new(error));
        status
    }
}

// === impl Handle ===

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.unused.store(true, Ordering::Relaxed);
        self.shared.with(State::wake);
    }
}

// === impl Shared ===

impl Shared {
    fn new(settings: Settings) -> Self {
        Self {
            limit: settings.answer,
            state: Mutex::new(State::new(settings)),
            over: AtomicBool::default(),
            unused: AtomicBool::default(),
            resting: AtomicBool::default(),
            called: Notify::new(),
            ponged: Notify::new(),
            queue: AtomicUsize::default(),
            places: Notify::new(),
        }
    }

    /// Does something with the state, and tells whom it concerns.
    fn with<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut state);
        if state.over().is_some() {
            self.over.store(true, Ordering::Relaxed);
        }
        if self.resting.load(Ordering::Relaxed) && state.running() > 0 {
            self.resting.store(false, Ordering::Relaxed);
            self.called.notify_one();
        }
        if state.ponged() {
            self.ponged.notify_one();
        }
        if self.queue.load(Ordering::Relaxed) > 0 && (state.over().is_some() || !state.is_full()) {
            // Who gets it comes by here again, so that each free place is found by one of those who wait.
            self.places.notify_one();
        }
        result
    }

    /// Sends a call as soon as there is a place for it.
    async fn begin<'a>(&self, sent: impl Fn() -> Sent<'a>) -> Result<u32, NeverSent> {
        self.queue.fetch_add(1, Ordering::Relaxed);
        let _queued = Queued(&self.queue);
        loop {
            let place = self.places.notified();
            match self.with(|state| state.begin(sent())) {
                Ok(id) => return Ok(id),
                Err(NotNow::Over(why)) => return Err(NeverSent(why)),
                Err(NotNow::Full) => place.await,
            }
        }
    }

    /// Returns when a call runs.
    async fn called(&self) {
        let runs = || {
            self.with(|state| {
                let runs = state.running() > 0;
                self.resting.store(!runs, Ordering::Relaxed);
                runs
            })
        };
        while !runs() {
            self.called.notified().await;
        }
    }

    /// Whether no call can come any more, and none runs.
    fn is_unused(&self) -> bool {
        self.unused.load(Ordering::Relaxed) && self.with(|state| state.running()) == 0
    }
}

// === impl Queued ===

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

// === impl Call ===

impl Future for Call<'_> {
    type Output = Result<Reply, Broken>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.shared.with(|state| state.poll(self.id, cx))
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.shared.with(|state| state.give_up(self.id));
    }
}

#[cfg(test)]
mod tests {
    use h2::{Reason, server};
    use tokio::{
        io::{DuplexStream, duplex},
        time::sleep,
    };

    use super::*;

    fn open(io: DuplexStream) -> UnaryChannel {
        let authority = "owner".parse().expect("an authority");
        UnaryChannel::open(io, &authority, Settings::default())
    }

    fn request(message: &'static [u8]) -> Request<Body> {
        let body = http_body_util::Full::new(Bytes::from_static(message));
        Request::post("/executor.v1.FunctionRuntime/InvokeFunction")
            .body(Body::new(body.map_err(|never| match never {})))
            .expect("a request")
    }

    async fn send(channel: &UnaryChannel, message: &'static [u8]) -> Result<Response<Body>, Status> {
        let mut channel = channel.clone();
        channel.call(request(message)).await
    }

    #[tokio::test]
    async fn a_message_and_its_answer_arrive_whole() {
        let (ours, theirs) = duplex(64 * 1024);
        let serve = async {
            let mut connection = server::handshake(theirs).await.expect("HTTP/2");
            let (request, mut respond) = connection.accept().await.expect("a call").expect("whole");
            let (head, mut body) = request.into_parts();
            assert_eq!(head.uri.authority().expect("named").as_str(), "owner");
            let answer = async {
                let data = body.data().await.expect("a message").expect("whole");
                assert_eq!((&*data, body.is_end_stream()), (&b"message"[..], true));
                let mut stream = respond.send_response(Response::new(()), false).expect("sent");
                stream.send_data(data, false).expect("sent");
                let mut trailers = http::HeaderMap::new();
                trailers.insert("grpc-status", "0".parse().expect("a value"));
                stream.send_trailers(trailers).expect("sent");
            };
            tokio::join!(answer, async { connection.accept().await.is_none() });
        };
        let call = async {
            let channel = open(ours);
            let answer = send(&channel, b"message").await.expect("answered");
            let collected = answer.into_body().collect().await.expect("whole");
            assert_eq!(collected.trailers().expect("trailers")["grpc-status"], "0");
            assert_eq!(&*collected.to_bytes(), b"message");
        };
        tokio::join!(serve, call);
    }

    /// C-3.7: what met a connection that was over may be sent elsewhere; nothing else may.
    #[tokio::test]
    async fn what_was_never_sent_is_known() {
        let (ours, theirs) = duplex(64 * 1024);
        let serve = async {
            let mut connection = server::handshake(theirs).await.expect("HTTP/2");
            for reason in [Reason::REFUSED_STREAM, Reason::INTERNAL_ERROR] {
                let (_request, mut respond) = connection.accept().await.expect("a call").expect("whole");
                respond.send_reset(reason);
            }
            // A third one begins, and the connection breaks.
            let third = connection.accept().await.expect("a call").expect("whole");
            drop((connection, third));
        };
        let call = async {
            let channel = open(ours);
            let mut never = Vec::new();
            for _ in 0..3 {
                let status = send(&channel, b"message").await.expect_err("no answer");
                never.push(never_sent(&status));
            }
            assert_eq!(never, [false; 3]);
            let status = send(&channel, b"message").await.expect_err("it is over");
            assert!(
                never_sent(&status) && status.code() == tonic::Code::Unavailable,
                "{status:?}"
            );
        };
        tokio::join!(serve, call);
    }

    /// A peer that is frozen keeps its sockets open: only its silence shows.
    #[tokio::test(start_paused = true)]
    async fn a_silent_peer_is_given_up_while_calls_run_and_only_then() {
        let (ours, theirs) = duplex(64 * 1024);
        let mut connection = None;
        let channel = {
            let serve = async { connection = server::handshake(theirs).await.ok() };
            let (channel, ()) = tokio::join!(async { open(ours) }, serve);
            channel
        };
        sleep(Duration::from_secs(3600)).await;
        assert!(!channel.is_over(), "at rest nobody is pinged");
        let began = tokio::time::Instant::now();
        let status = send(&channel, b"message").await.expect_err("no answer");
        assert!(!never_sent(&status), "it may have arrived");
        assert!(
            began.elapsed() <= Duration::from_secs(12),
            "{:?}",
            began.elapsed()
        );
        assert!(channel.is_over());
        drop(connection);
    }

    /// Nor may its connection stay when nobody uses it any more.
    #[tokio::test(start_paused = true)]
    async fn a_peer_that_does_not_read_cannot_keep_the_connection() {
        let (ours, theirs) = duplex(1024);
        let channel = open(ours);
        // More than fits: the rest of it is never taken.
        let call = send(&channel, &[0; 8 * 1024]);
        assert!(
            tokio::time::timeout(Duration::from_millis(1), call)
                .await
                .is_err()
        );
        drop(channel);
        sleep(Duration::from_secs(2)).await;
        let mut written = Vec::new();
        let mut theirs = theirs;
        let read = tokio::io::AsyncReadExt::read_to_end(&mut theirs, &mut written);
        let read = tokio::time::timeout(Duration::from_millis(1), read).await;
        assert!(matches!(read, Ok(Ok(1..=1024))), "it goes on: {read:?}");
    }

    /// C-3.8: who gives up tells the other side.
    #[tokio::test]
    async fn a_call_that_is_given_up_is_reset() {
        let (ours, theirs) = duplex(64 * 1024);
        let (arrived, waits) = tokio::sync::oneshot::channel();
        let serve = async {
            let mut connection = server::handshake(theirs).await.expect("HTTP/2");
            let (_request, mut respond) = connection.accept().await.expect("a call").expect("whole");
            arrived.send(()).expect("somebody waits");
            let reason = tokio::select! {
                reason = std::future::poll_fn(|cx| respond.poll_reset(cx)) => reason,
                _ = connection.accept() => panic!("only one call"),
            };
            assert_eq!(reason.expect("a reset"), Reason::CANCEL);
        };
        let call = async {
            let channel = open(ours);
            tokio::select! {
                _ = send(&channel, b"message") => panic!("nobody answers"),
                _ = waits => {}
            }
            channel
        };
        tokio::join!(serve, call);
    }
}
