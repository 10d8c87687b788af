//! HTTP/2 by hand: frames as they are on the wire, for what no client library shows (bug scenario 24).

use std::sync::Arc;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, ReadHalf, WriteHalf},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::World;

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const CONTINUATION: u8 = 9;
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
const ACK: u8 = 1;

/// One frame.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).expect("short").to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}

/// A frame that arrived.
#[derive(Debug, Clone)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

/// A client's connection.
pub(crate) struct Frames {
    tls: TlsStream<TcpStream>,
}

/// How a stream ended.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    /// The body, when the stream was ended by the other side.
    pub(crate) body: Option<Vec<u8>>,
    /// The code of a reset, also of one after the end.
    pub(crate) reset: Option<u32>,
}

impl Frames {
    pub(crate) async fn open(world: &World) -> Self {
        let tcp = TcpStream::connect(world.gateway.https).await.expect("connect");
        Self::over(world, tcp).await
    }

    pub(crate) async fn over(world: &World, tcp: TcpStream) -> Self {
        let config = Arc::new(world.pki.caller(&[b"h2"]));
        let name = "localhost".try_into().expect("a name");
        let tls = TlsConnector::from(config).connect(name, tcp).await;
        let mut frames = Self {
            tls: tls.expect("a handshake"),
        };
        frames.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await;
        frames.send(&frame(SETTINGS, 0, 0, &[])).await;
        frames
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        self.tls.write_all(bytes).await.expect("write");
        self.tls.flush().await.expect("flush");
    }

    /// A head with these fields, as [`block`] writes it.
    pub(crate) async fn head(
        &mut self,
        stream: u32,
        method: &str,
        path: &str,
        fields: &[(&str, &str)],
        end: bool,
    ) {
        let flags = END_HEADERS | if end { END_STREAM } else { 0 };
        self.send(&frame(HEADERS, flags, stream, &block(method, path, fields)))
            .await;
    }

    /// The bytes both ways, for who reads and writes at the same time.
    pub(crate) fn split(self) -> (ReadHalf<TlsStream<TcpStream>>, WriteHalf<TlsStream<TcpStream>>) {
        tokio::io::split(self.tls)
    }

    pub(crate) async fn data(&mut self, stream: u32, bytes: &[u8], end: bool) {
        let flags = if end { END_STREAM } else { 0 };
        self.send(&frame(DATA, flags, stream, bytes)).await;
    }

    /// The next frame; `None` when the connection is over.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        self.tls.read_exact(&mut head).await.ok()?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        self.tls.read_exact(&mut payload).await.ok()?;
        let frame = Frame {
            kind: head[3],
            flags: head[4],
            stream: u32::from_be_bytes([head[5], head[6], head[7], head[8]]),
            payload,
        };
        if frame.kind == SETTINGS && frame.flags & ACK == 0 {
            self.send(&self::frame(SETTINGS, ACK, 0, &[])).await;
        }
        Some(frame)
    }

    /// Reads until the stream has ended, and on until nothing more can follow.
    pub(crate) async fn ended(&mut self, stream: u32) -> Ended {
        let mut ended = Ended::default();
        let mut body = Vec::new();
        while ended.body.is_none() && ended.reset.is_none() {
            let Some(frame) = self.next().await else {
                return ended;
            };
            self.note(&frame, stream, &mut ended, &mut body);
        }
        // What comes before the answer to a ping was sent before it.
        self.send(&frame(PING, 0, 0, b"the end?")).await;
        while let Some(frame) = self.next().await {
            if frame.kind == PING {
                break;
            }
            self.note(&frame, stream, &mut ended, &mut body);
        }
        ended
    }

    fn note(&self, frame: &Frame, stream: u32, ended: &mut Ended, body: &mut Vec<u8>) {
        if frame.stream != stream {
            return;
        }
        match frame.kind {
            RST_STREAM => ended.reset = frame.payload.first_chunk().map(|code| u32::from_be_bytes(*code)),
            DATA => body.extend_from_slice(&frame.payload),
            _ => {}
        }
        if matches!(frame.kind, DATA | HEADERS) && frame.flags & END_STREAM != 0 {
            ended.body = Some(std::mem::take(body));
        }
    }
}

/// The header block of a request of `path` with these fields.
pub(crate) fn block(method: &str, path: &str, fields: &[(&str, &str)]) -> Vec<u8> {
    let pseudo = [
        (":method", method),
        (":scheme", "https"),
        (":authority", "localhost"),
        (":path", path),
    ];
    let mut block = Vec::new();
    for (name, value) in pseudo.iter().chain(fields) {
        // A literal that is never indexed, nothing compressed (RFC 7541, 6.2.3).
        block.push(0x10);
        text(&mut block, name);
        text(&mut block, value);
    }
    block
}

/// A string of HPACK: its length in a prefix of seven bits, then its bytes.
fn text(block: &mut Vec<u8>, text: &str) {
    let mut rest = text.len();
    if rest < 127 {
        block.push(u8::try_from(rest).expect("short"));
    } else {
        block.push(127);
        rest -= 127;
        while rest >= 128 {
            block.push(u8::try_from(rest % 128).expect("short") | 128);
            rest /= 128;
        }
        block.push(u8::try_from(rest).expect("short"));
    }
    block.extend_from_slice(text.as_bytes());
}
