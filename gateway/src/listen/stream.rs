//! A caller's stream that notes when bytes arrive, so that a slow head and an idle connection can be told
//! apart; Pingora's own timers cannot. And it writes head and body of an answer at once: as one record of TLS, with
//! one system call, and the caller wakes up once.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use bytes::{Buf as _, BytesMut};
use pingora_core::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, IO, Peek, Shutdown, SocketDigest, Ssl, Stream,
    TimingDigest, UniqueID, UniqueIDType, raw_connect::ProxyDigest, tls::SslDigest,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    time::Sleep,
};

/// When bytes arrived on a connection. Shared by the stream, which writes, and the front, which reads.
#[derive(Debug)]
pub struct Arrivals {
    opened: Instant,
    /// Microseconds from `opened` to the first byte since [`Arrivals::expect_next`], plus 1; 0 for none.
    first: AtomicU64,
}

/// The stream below Pingora's sessions.
#[derive(Debug)]
pub struct Noting {
    inner: Stream,
    arrivals: Arc<Arrivals>,
    /// Runs until as many bytes are there as HTTP/2 begins with.
    opening: Option<Pin<Box<Sleep>>>,
    received: usize,
    /// Written, but not yet flushed.
    unsent: BytesMut,
}

/// What is kept until it is flushed: as much as one record of TLS holds.
const RECORD_BYTES: usize = 16 * 1024;

/// Length of the preface of HTTP/2; no request of HTTP/1.1 is shorter by much.
const PREFACE_BYTES: usize = 24;

// === impl Arrivals ===

impl Arrivals {
    fn new() -> Self {
        Self {
            opened: Instant::now(),
            first: AtomicU64::new(0),
        }
    }

    /// From now on the next byte is the first of a request.
    pub fn expect_next(&self) {
        self.first.store(0, Ordering::Relaxed);
    }

    /// When the first byte of the request arrived, if any did.
    #[must_use]
    pub fn first(&self) -> Option<Instant> {
        match self.first.load(Ordering::Relaxed) {
            0 => None,
            micros => Some(self.opened + Duration::from_micros(micros - 1)),
        }
    }

    fn note(&self) {
        if self.first.load(Ordering::Relaxed) == 0 {
            let micros = u64::try_from(self.opened.elapsed().as_micros()).unwrap_or(u64::MAX - 1);
            self.first.store(micros + 1, Ordering::Relaxed);
        }
    }
}

// === impl Noting ===

impl Noting {
    /// Wraps `inner`. A client that says next to nothing for `patience` is cut off.
    #[must_use]
    pub fn new(inner: Stream, patience: Duration) -> (Self, Arc<Arrivals>) {
        let arrivals = Arc::new(Arrivals::new());
        let stream = Self {
            inner,
            arrivals: Arc::clone(&arrivals),
            opening: Some(Box::pin(tokio::time::sleep(patience))),
            received: 0,
            unsent: BytesMut::new(),
        };
        (stream, arrivals)
    }

    /// Hands down what was kept.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.unsent.is_empty() {
            let sent = ready!(Pin::new(&mut self.inner).poll_write(cx, &self.unsent))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unsent.advance(sent);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Noting {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(cx, buf);
        let received = buf.filled().len() - before;
        if received > 0 {
            self.arrivals.note();
        }
        if let Some(opening) = self.opening.as_mut() {
            if polled.is_pending() && opening.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.received += received;
            if self.received >= PREFACE_BYTES {
                self.opening = None;
            }
        }
        polled
    }
}

impl AsyncWrite for Noting {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.unsent.len() + buf.len() > RECORD_BYTES {
            ready!(self.poll_send(cx))?;
            if buf.len() >= RECORD_BYTES {
                return Pin::new(&mut self.inner).poll_write(cx, buf);
            }
        }
        self.unsent.extend_from_slice(buf);
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let length: usize = bufs.iter().map(|buf| buf.len()).sum();
        if self.unsent.len() + length > RECORD_BYTES {
            ready!(self.poll_send(cx))?;
            if length >= RECORD_BYTES {
                return Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
            }
        }
        for buf in bufs {
            self.unsent.extend_from_slice(buf);
        }
        Poll::Ready(Ok(length))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(cx))?;
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(cx))?;
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[async_trait]
impl Shutdown for Noting {
    async fn shutdown(&mut self) {
        // A caller that reads no more is no reason to stay.
        let _ = self.flush().await;
        Shutdown::shutdown(&mut *self.inner).await;
    }
}

impl UniqueID for Noting {
    fn id(&self) -> UniqueIDType {
        self.inner.id()
    }
}

impl Ssl for Noting {
    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.inner.get_ssl_digest()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.inner.selected_alpn_proto()
    }
}

impl GetTimingDigest for Noting {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        self.inner.get_timing_digest()
    }
}

impl GetProxyDigest for Noting {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.inner.get_proxy_digest()
    }
}

impl GetSocketDigest for Noting {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.inner.get_socket_digest()
    }
}

impl Peek for Noting {}

// The stream must fit where Pingora takes one.
const _: fn(Noting) -> Box<dyn IO> = |stream| Box::new(stream);
