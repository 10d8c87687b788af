//! A gRPC channel for unary calls: one HTTP/2 connection, and nothing between it and the call.
//!
//! Tonic's own channel serves every use: it has a queue with a task of its own, connects again, and streams. A
//! message that is whole needs none of that. Here its head, the message and the end of the stream go out in one
//! write, so that the other side wakes up once.
//!
//! A connection that is over stays over: the call that meets it fails, and says that nothing was sent
//! ([`never_sent`]), because only the caller knows whether there is somewhere else to try (C-3.7).

use std::{
    error::Error as StdError,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use h2::{Ping, PingPong, RecvStream, client::SendRequest};
use http::{
    Request, Response, Uri,
    uri::{Authority, Scheme},
};
use http_body::{Body as HttpBody, Frame};
use http_body_util::BodyExt as _;
use thiserror::Error;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::Notify,
    time::{sleep, timeout},
};
use tonic::{Status, body::Body};
use tower::Service;

pub mod message;

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
            ping: Some((Duration::from_secs(1), Duration::from_secs(10))),
        }
    }
}

/// The channel. Clones share the connection, which ends with the last of them and the last call.
#[derive(Debug, Clone)]
pub struct UnaryChannel {
    send: SendRequest<Bytes>,
    authority: Authority,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Running calls.
    calls: AtomicUsize,
    /// Nobody pings until somebody calls.
    resting: AtomicBool,
    called: Notify,
    over: AtomicBool,
}

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

/// One call while it runs.
#[derive(Debug)]
struct Running(Arc<State>);

/// What comes back, as it comes.
#[derive(Debug)]
struct Incoming {
    stream: RecvStream,
    data_ended: bool,
    _running: Running,
}

// === impl UnaryChannel ===

impl UnaryChannel {
    /// Begins HTTP/2 on `io`. `authority` is what requests name; no address is looked up.
    ///
    /// # Errors
    /// When the other side does not begin as HTTP/2 does.
    pub async fn open<T>(io: T, authority: Authority, settings: Settings) -> Result<Self, h2::Error>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (send, mut connection) = h2::client::Builder::new()
            .initial_window_size(settings.stream_window)
            .initial_connection_window_size(settings.connection_window)
            .max_frame_size(settings.frame)
            .max_header_list_size(settings.headers)
            .enable_push(false)
            .handshake::<_, Bytes>(io)
            .await?;
        let state = Arc::new(State::default());
        let pings = connection.ping_pong().zip(settings.ping);
        let shared = Arc::clone(&state);
        let drive = async move {
            let ended = tokio::select! {
                ended = connection => ended,
                () = silence(pings, &shared) => Ok(()),
            };
            shared.over.store(true, Ordering::Relaxed);
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection ended");
            }
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "ends with its connection, and that with its channel"
        )]
        tokio::spawn(drive);
        Ok(Self {
            send,
            authority,
            state,
        })
    }

    /// Whether the connection is known to be over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.state.over.load(Ordering::Relaxed)
    }

    async fn run(self, request: Request<Body>) -> Result<Response<Body>, Status> {
        let (mut head, body) = request.into_parts();
        let message = whole(body).await?;
        let mut uri = head.uri.into_parts();
        uri.scheme = Some(Scheme::HTTP);
        uri.authority = Some(self.authority);
        head.uri = Uri::from_parts(uri).map_err(|error| Status::internal(error.to_string()))?;
        head.version = http::Version::HTTP_2;
        let running = Running::begin(self.state);
        let over = |error: h2::Error| Status::from(NeverSent(error.to_string()));
        let mut send = self.send.ready().await.map_err(over)?;
        let request = Request::from_parts(head, ());
        let (response, mut stream) = send.send_request(request, false).map_err(over)?;
        // Windows are respected below: what does not fit yet waits there, and is bounded by the message.
        stream.send_data(message, true).map_err(broken)?;
        let response = response.await.map_err(broken)?;
        Ok(response.map(|stream| {
            Body::new(Incoming {
                stream,
                data_ended: false,
                _running: running,
            })
        }))
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

/// The one message, framed. It is there already: no time passes here.
async fn whole(mut body: Body) -> Result<Bytes, Status> {
    let mut all = Bytes::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        if all.is_empty() {
            all = data;
        } else {
            let mut joined = BytesMut::with_capacity(all.len() + data.len());
            joined.extend_from_slice(&all);
            joined.extend_from_slice(&data);
            all = joined.freeze();
        }
    }
    Ok(all)
}

/// Nothing is known of a call that left. Not even when its stream is refused: that nobody looked at it is the word
/// of a side that just broke off.
fn broken(error: h2::Error) -> Status {
    Status::from_error(Box::new(error))
}

// === pings ===

/// Returns when the other side does not answer a ping while calls run.
async fn silence(pings: Option<(PingPong, (Duration, Duration))>, state: &State) {
    let Some((mut pings, (interval, patience))) = pings else {
        return std::future::pending().await;
    };
    loop {
        state.called().await;
        sleep(interval).await;
        if state.calls.load(Ordering::Relaxed) == 0 {
            continue;
        }
        match timeout(patience, pings.ping(Ping::opaque())).await {
            Ok(Ok(_)) => {}
            // The connection itself says what is wrong.
            Ok(Err(_)) => return std::future::pending().await,
            Err(_) => return,
        }
    }
}

impl State {
    /// Returns when a call runs.
    async fn called(&self) {
        while self.calls.load(Ordering::SeqCst) == 0 {
            self.resting.store(true, Ordering::SeqCst);
            if self.calls.load(Ordering::SeqCst) > 0 {
                break;
            }
            self.called.notified().await;
        }
        self.resting.store(false, Ordering::SeqCst);
    }
}

// === impl Running ===

impl Running {
    fn begin(state: Arc<State>) -> Self {
        state.calls.fetch_add(1, Ordering::SeqCst);
        if state.resting.swap(false, Ordering::SeqCst) {
            state.called.notify_one();
        }
        Self(state)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.calls.fetch_sub(1, Ordering::SeqCst);
    }
}

// === impl Incoming ===

impl HttpBody for Incoming {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        if !self.data_ended {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(data)) => {
                    // Fails only on a stream that has ended.
                    let _ = self.stream.flow_control().release_capacity(data.len());
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(broken(error)))),
                None => self.data_ended = true,
            }
        }
        let trailers = ready!(self.stream.poll_trailers(cx)).map_err(broken)?;
        Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use h2::{Reason, server};
    use tokio::io::{DuplexStream, duplex};

    use super::*;

    async fn open(io: DuplexStream) -> UnaryChannel {
        UnaryChannel::open(io, "owner".parse().expect("an authority"), Settings::default())
            .await
            .expect("HTTP/2 begins")
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
            let channel = open(ours).await;
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
            let channel = open(ours).await;
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
            let (channel, ()) = tokio::join!(open(ours), serve);
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
            let channel = open(ours).await;
            tokio::select! {
                _ = send(&channel, b"message") => panic!("nobody answers"),
                _ = waits => {}
            }
            channel
        };
        tokio::join!(serve, call);
    }
}
