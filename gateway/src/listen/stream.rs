//! A caller's stream that notes when bytes arrive, so that a slow head and an idle connection can be told
//! apart; Pingora's own timers cannot.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use pingora_core::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, IO, Peek, Shutdown, SocketDigest, Ssl, Stream,
    TimingDigest, UniqueID, UniqueIDType, raw_connect::ProxyDigest, tls::SslDigest,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
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
}

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
        };
        (stream, arrivals)
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
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[async_trait]
impl Shutdown for Noting {
    async fn shutdown(&mut self) {
        self.inner.shutdown().await;
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
