//! The stream between processes of one Pod: a Unix socket that wakes its owner for what arrives, and for nothing else.
//!
//! On a Unix socket Linux reports "can be written again" each time that the other side has read, full or not. A stream that
//! waits for both, as Tokio's does, therefore wakes up once more for every message it has sent. This one asks for
//! that only while the socket is full.

use std::{
    io::{self, IoSlice, Read as _, Write as _},
    os::{fd::OwnedFd, unix::net::UnixStream},
    path::Path,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, unix::AsyncFd};
use tonic::transport::server::Connected;

mod watched;

/// At most so much is read at once, bytes; the room for it has to be cleared first.
const CHUNK: usize = 64 * 1024;

/// A connected Unix stream socket.
#[derive(Debug)]
pub struct LocalStream {
    socket: AsyncFd<UnixStream>,
    /// Registered for writing: the socket is full.
    full: Option<AsyncFd<OwnedFd>>,
}

impl LocalStream {
    /// Takes over `socket`, which need not be non-blocking yet.
    ///
    /// # Errors
    /// When the runtime cannot watch it: no descriptors are left.
    pub fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        Ok(Self {
            socket: watched::for_reading(socket)?,
            full: None,
        })
    }

    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// When nobody listens there.
    pub async fn connect(path: &Path) -> io::Result<Self> {
        Self::new(tokio::net::UnixStream::connect(path).await?.into_std()?)
    }

    /// Calls `write` until it does anything but refuse because the socket is full.
    fn poll_until_written(
        &mut self,
        cx: &mut Context<'_>,
        write: impl Fn(&UnixStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match write(self.socket.get_ref()) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                done => {
                    self.full = None;
                    return Poll::Ready(done);
                }
            }
            let full = match &mut self.full {
                Some(full) => full,
                none => none.insert(watched::for_writing(self.socket.get_ref())?),
            };
            ready!(full.poll_write_ready(cx))?.clear_ready();
        }
    }
}

impl AsyncRead for LocalStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let room = buf.remaining().min(CHUNK);
        loop {
            let mut ready = ready!(self.socket.poll_read_ready(cx))?;
            match self.socket.get_ref().read(buf.initialize_unfilled_to(room)) {
                Ok(count) => {
                    buf.advance(count);
                    // What did not fill the room was all there is; the end is not cleared.
                    if count > 0 && count < room {
                        ready.clear_ready();
                    }
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncWrite for LocalStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_until_written(cx, |mut socket| socket.write(buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_until_written(cx, |mut socket| socket.write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.socket.get_ref().shutdown(std::net::Shutdown::Write) {
            // The other side was faster.
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Poll::Ready(Ok(())),
            done => Poll::Ready(done),
        }
    }
}

impl Connected for LocalStream {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    fn pair() -> (LocalStream, LocalStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (LocalStream::new(ours).unwrap(), LocalStream::new(theirs).unwrap())
    }

    /// More than any socket holds, so that both sides have to wait for each other again and again.
    #[tokio::test]
    async fn what_is_larger_than_the_socket_arrives_whole() {
        let sent: Vec<u8> = (0..3_000_000_u32)
            .map(|at| at.to_le_bytes()[at as usize % 4])
            .collect();
        let (mut ours, mut theirs) = pair();
        let send = async {
            ours.write_all(&sent).await.unwrap();
            ours.shutdown().await.unwrap();
        };
        let mut received = Vec::new();
        let (_, read) = tokio::join!(send, theirs.read_to_end(&mut received));
        read.unwrap();
        assert!(received == sent);
        assert!(ours.full.is_none());
    }

    #[tokio::test]
    async fn what_came_before_the_end_is_read_and_then_the_end() {
        let (mut ours, mut theirs) = pair();
        ours.write_all(b"last words").await.unwrap();
        drop(ours);
        let mut received = [0; 64];
        assert_eq!(theirs.read(&mut received).await.unwrap(), 10);
        assert_eq!(theirs.read(&mut received).await.unwrap(), 0);
        assert_eq!(theirs.read(&mut received).await.unwrap(), 0);
        let refused = theirs.write(b"?").await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn who_waits_is_woken_by_each_message() {
        let (mut ours, mut theirs) = pair();
        let reader = async {
            let mut byte = [0];
            for wanted in 0..100 {
                theirs.read_exact(&mut byte).await.unwrap();
                assert_eq!(byte[0], wanted);
                theirs.write_all(&byte).await.unwrap();
            }
        };
        let writer = async {
            for byte in 0..100 {
                ours.write_all(&[byte]).await.unwrap();
                assert_eq!(ours.read_u8().await.unwrap(), byte);
            }
        };
        tokio::join!(reader, writer);
    }

    /// The room of one read ends exactly where the message does: nothing says that this was all.
    #[tokio::test]
    async fn a_read_that_fills_its_room_forgets_nothing() {
        let (mut ours, mut theirs) = pair();
        ours.write_all(b"eightyes").await.unwrap();
        let mut received = [0; 4];
        for part in [b"eigh", b"tyes"] {
            assert_eq!(theirs.read(&mut received).await.unwrap(), 4);
            assert_eq!(&received, part);
        }
        let (read, ()) = tokio::join!(theirs.read(&mut received), async {
            ours.write_all(b"more").await.unwrap();
        });
        assert_eq!((read.unwrap(), &received), (4, b"more"));
    }
}
