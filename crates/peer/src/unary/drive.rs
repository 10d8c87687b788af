//! Moves bytes between a connection's state and its socket, until it is over.

use std::{
    io::{self, IoSlice},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{BufMut as _, BytesMut};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite},
    time::{sleep, timeout},
};

use super::{Shared, frame::Code, output::Output};

/// What is read at once at first; twice as much whenever that was too little, up to the second.
const READ: usize = 4 * 1024;
const READ_MOST: usize = 64 * 1024;
/// How long saying goodbye may take.
const GOODBYE: Duration = Duration::from_secs(1);

const CLOSED: &str = "the other side closed it";

struct Driver<T> {
    io: T,
    shared: Arc<Shared>,
    input: BytesMut,
    /// How much is read at once.
    room: usize,
    output: Output,
    /// Something was written, but may still be held back by `io`.
    unflushed: bool,
}

/// Runs the connection. Returns when it is over and nobody holds its socket any more.
pub(super) async fn drive<T>(io: T, shared: Arc<Shared>, pings: Option<(Duration, Duration)>)
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let mut driver = Driver {
        io,
        shared: Arc::clone(&shared),
        input: BytesMut::new(),
        room: READ,
        output: Output::default(),
        unflushed: false,
    };
    let why = tokio::select! {
        biased;
        why = std::future::poll_fn(|cx| driver.poll(cx)) => why,
        () = silence(pings, &shared) => "it does not answer".to_owned(),
    };
    tracing::debug!(why, "a connection ended");
    shared.with(|state| state.end(&why));
    // Nobody depends on it.
    let _ = timeout(GOODBYE, std::future::poll_fn(|cx| driver.close(cx))).await;
}

// === impl Driver ===

impl<T: AsyncRead + AsyncWrite + Unpin> Driver<T> {
    /// Why the connection is over, when it is.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<String> {
        loop {
            let read = self.read(cx);
            if let Poll::Ready(Err(why)) = read {
                return Poll::Ready(why);
            }
            let written = match self.write(cx) {
                Poll::Ready(Err(error)) => return Poll::Ready(error.to_string()),
                written => written.is_ready(),
            };
            if read.is_pending() {
                if !written {
                    // Who does not read may never let us write again.
                    self.shared.with(|state| state.watch(cx));
                }
                return if self.shared.is_unused() {
                    self.shared.with(|state| state.leave(Code::NO_ERROR));
                    Poll::Ready("nobody uses it".to_owned())
                } else {
                    Poll::Pending
                };
            }
        }
    }

    fn read(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), String>> {
        if self.input.is_empty() {
            if let Some((body, left)) = self.shared.with(|state| state.lend()) {
                return self.read_piece(body, left, cx);
            }
            if self.input.capacity() > READ_MOST {
                self.input = BytesMut::new();
            }
        }
        self.input.reserve(self.room);
        match ready!(pin!(self.io.read_buf(&mut self.input)).poll(cx)) {
            Ok(0) => Poll::Ready(Err(CLOSED.to_owned())),
            Err(error) => Poll::Ready(Err(error.to_string())),
            Ok(read) => {
                self.room = match read {
                    _ if read >= self.room => (self.room * 2).min(READ_MOST),
                    _ if read < self.room / 8 => (self.room / 2).max(READ),
                    _ => self.room,
                };
                let received = self.shared.with(|state| state.receive(&mut self.input));
                Poll::Ready(received.map_err(|violation| violation.to_string()))
            }
        }
    }

    /// Reads more of a large piece of an answer to where it belongs.
    fn read_piece(
        &mut self,
        mut body: BytesMut,
        left: usize,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), String>> {
        let mut most = (&mut body).limit(left);
        let read = pin!(self.io.read_buf(&mut most)).poll(cx);
        let bytes = match &read {
            Poll::Ready(Ok(bytes)) => *bytes,
            Poll::Ready(Err(_)) | Poll::Pending => 0,
        };
        self.shared.with(|state| state.give_back(body, bytes));
        match ready!(read) {
            Ok(0) => Poll::Ready(Err(CLOSED.to_owned())),
            Err(error) => Poll::Ready(Err(error.to_string())),
            Ok(_) => Poll::Ready(Ok(())),
        }
    }

    /// Writes all that there is.
    fn write(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            if self.output.is_empty() {
                self.shared.with(|state| state.output(&mut self.output, cx));
            }
            if self.output.is_empty() {
                break;
            }
            let mut room = [IoSlice::new(&[]); Output::PIECES];
            let count = self.output.pieces(&mut room);
            let pieces = room.get(..count).unwrap_or_default();
            let written = ready!(Pin::new(&mut self.io).poll_write_vectored(cx, pieces))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.output.written(written);
            self.unflushed = true;
        }
        if self.unflushed {
            ready!(Pin::new(&mut self.io).poll_flush(cx))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }

    fn close(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.write(cx))?;
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// Returns when the other side does not answer a ping while calls run.
async fn silence(pings: Option<(Duration, Duration)>, shared: &Shared) {
    let Some((interval, patience)) = pings else {
        return std::future::pending().await;
    };
    loop {
        shared.called().await;
        sleep(interval).await;
        if shared.with(|state| state.running()) == 0 {
            continue;
        }
        shared.with(|state| state.ping());
        if timeout(patience, shared.ponged.notified()).await.is_err() {
            return;
        }
    }
}
