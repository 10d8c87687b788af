//! The client's side of one connection of HTTP/2 (RFC 9113), without its I/O: calls and bytes in, bytes and answers out.
//!
//! It knows calls of one message each way, and so needs little of the protocol: no priorities, no pushes, no bodies that
//! are read while they come. A call's headers and its small message are written at once; large messages wait for their
//! turn and for windows.

use std::{
    collections::{BTreeMap, VecDeque},
    task::{Context, Poll, Waker},
};

use bytes::{BufMut as _, Bytes, BytesMut};

use super::{
    Settings,
    frame::{self, Code, HEAD_BYTES, Head, Kind, flag, setting},
    hpack::{Field, decode::Decoder, encode::Encoder},
    output::Output,
    stream::{Broken, Reply, Stream},
};

mod receive;
#[cfg(test)]
mod tests;

/// How many calls may run before the other side has said what it takes: more might be refused, and nobody would know
/// what became of them.
const FIRST_STREAMS: usize = 1;
/// So much is written before the next large message has its turn, bytes.
const ENOUGH: usize = 64 * 1024;
/// A message up to this many bytes is sent with its headers.
const SMALL: usize = 8 * 1024;
/// A piece of an answer up to this many bytes is copied, so that it does not hold the whole of what was read.
const COPIED: usize = 4 * 1024;
/// What the other side may make us write without reading it, bytes: answers to pings and settings, resets.
const OWED: usize = 256 * 1024;

/// One connection.
#[derive(Debug)]
pub(super) struct State {
    settings: Settings,
    out: Output,
    encoder: Encoder,
    decoder: Decoder,
    streams: BTreeMap<u32, Stream>,
    /// The next call's number.
    next: u32,
    /// Calls without an outcome.
    running: usize,
    theirs: Theirs,
    /// How much the other side takes on all calls together.
    window: i64,
    /// How much of what it sent was not given back yet, bytes.
    kept: u32,
    /// Calls with a message that waits for its turn.
    waiting: VecDeque<u32>,
    /// A list of headers whose end has not come.
    block: Option<Block>,
    /// A piece of a body whose end has not come.
    piece: Option<Piece>,
    /// Written because the other side wanted it, since all was written.
    owed: usize,
    over: Option<String>,
    writer: Option<Waker>,
    ponged: bool,
}

/// What the other side has said of itself.
#[derive(Debug)]
struct Theirs {
    frame: usize,
    streams: usize,
    window: u32,
    /// It has spoken at all.
    begun: bool,
}

#[derive(Debug)]
struct Block {
    stream: u32,
    ends: bool,
    bytes: BytesMut,
}

/// A frame of a body that is taken as it comes.
#[derive(Debug, Clone, Copy)]
struct Piece {
    head: Head,
    /// Bytes that have not come.
    left: usize,
}

/// A call to be sent.
#[derive(Debug)]
pub(super) struct Sent<'a> {
    pub(super) path: &'a str,
    pub(super) authority: &'a str,
    /// Two lists that follow each other.
    pub(super) fields: [&'a [Field<'a>]; 2],
    /// Two parts that follow each other.
    pub(super) message: [Bytes; 2],
    /// The longest message that is taken as the answer, bytes.
    pub(super) limit: usize,
}

/// Why a call cannot be sent now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum NotNow {
    /// Nor later.
    Over(String),
    /// As many run as the other side takes.
    Full,
}

// === impl State: calls ===

impl State {
    /// A connection on which everything is still to be said.
    pub(super) fn new(settings: Settings) -> Self {
        let mut state = Self {
            settings,
            out: Output::default(),
            encoder: Encoder::default(),
            decoder: Decoder::default(),
            streams: BTreeMap::new(),
            next: 1,
            running: 0,
            theirs: Theirs {
                frame: frame::LEAST_FRAME,
                streams: FIRST_STREAMS,
                window: frame::FIRST_WINDOW,
                begun: false,
            },
            window: frame::FIRST_WINDOW.into(),
            kept: 0,
            waiting: VecDeque::new(),
            block: None,
            piece: None,
            owed: 0,
            over: None,
            writer: None,
            ponged: false,
        };
        state.greet();
        state
    }

    fn greet(&mut self) {
        let Settings {
            stream_window,
            connection_window,
            frame,
            headers,
            ..
        } = self.settings;
        let out = self.out.small();
        out.put_slice(frame::PREFACE);
        let said = [
            (setting::PUSH, 0),
            (setting::WINDOW, stream_window),
            (setting::FRAME, frame),
            (setting::HEADERS, headers),
        ];
        out.put_slice(&head(Kind::Settings, 0, 0, said.len() * 6));
        for (name, value) in said {
            out.put_u16(name);
            out.put_u32(value);
        }
        // The connection's own window can only grow.
        let more = connection_window.saturating_sub(frame::FIRST_WINDOW);
        if more > 0 {
            self.put(Kind::WindowUpdate, 0, 0, &more.to_be_bytes());
        }
    }

    /// Sends a call; it gets this number.
    pub(super) fn begin(&mut self, sent: Sent<'_>) -> Result<u32, NotNow> {
        if let Some(why) = &self.over {
            return Err(NotNow::Over(why.clone()));
        }
        if self.next > frame::LARGEST_WINDOW {
            return Err(NotNow::Over("it has carried all calls that it can".to_owned()));
        }
        if self.is_full() {
            return Err(NotNow::Full);
        }
        let id = self.next;
        self.next += 2;
        self.running += 1;
        let window = self.theirs.window.into();
        let stream = Stream::new(sent.message, window, sent.limit);
        let bytes = stream.unsent();
        self.write_headers(id, bytes == 0, sent.path, sent.authority, sent.fields);
        self.streams.insert(id, stream);
        if bytes > SMALL || bytes > 0 && self.send_some(id) != Some(0) {
            self.waiting.push_back(id);
        }
        self.wake();
        Ok(id)
    }

    /// Whether another call has to wait until one ends.
    pub(super) fn is_full(&self) -> bool {
        self.running >= self.theirs.streams
    }

    /// Calls that have no outcome yet.
    pub(super) fn running(&self) -> usize {
        self.running
    }

    /// Why no call can be sent any more.
    pub(super) fn over(&self) -> Option<&str> {
        self.over.as_deref()
    }

    /// The outcome of a call, once; until then `cx` is woken when there is one.
    pub(super) fn poll(&mut self, id: u32, cx: &Context<'_>) -> Poll<Result<Reply, Broken>> {
        match self.streams.get_mut(&id) {
            Some(stream) if stream.runs() => {
                stream.wait(cx.waker());
                Poll::Pending
            }
            _ => Poll::Ready(match self.streams.remove(&id) {
                Some(stream) => stream.into_reply(),
                None => Err(Broken::Ended("its outcome was taken".to_owned())),
            }),
        }
    }

    /// Nobody waits for the call any more; the other side is told if it may still run there.
    pub(super) fn give_up(&mut self, id: u32) {
        if self.streams.remove(&id).is_some_and(|stream| stream.runs()) {
            self.running -= 1;
            self.reset(id, Code::CANCEL);
            self.wake();
        }
    }

    /// Asks whether anybody is there.
    pub(super) fn ping(&mut self) {
        self.put(Kind::Ping, 0, 0, b"kruntime");
        self.wake();
    }

    /// Whether that was answered since this was last asked.
    pub(super) fn ponged(&mut self) -> bool {
        std::mem::take(&mut self.ponged)
    }

    /// The connection is over: what runs has no answer.
    pub(super) fn end(&mut self, why: &str) {
        self.over.get_or_insert_with(|| why.to_owned());
        for stream in self.streams.values_mut().filter(|stream| stream.runs()) {
            stream.end(Err(Broken::Ended(why.to_owned())));
        }
        self.running = 0;
        self.waiting.clear();
    }

    /// Says goodbye, with the reason.
    pub(super) fn leave(&mut self, code: Code) {
        let [[a, b, c, d], [e, f, g, h]] = [[0; 4], code.0.to_be_bytes()];
        self.put(Kind::GoAway, 0, 0, &[a, b, c, d, e, f, g, h]);
    }
}

// === impl State: writing ===

impl State {
    /// Moves what is to be written into `out`, which is empty. If there is nothing, `cx` is woken when there is.
    pub(super) fn output(&mut self, out: &mut Output, cx: &Context<'_>) {
        self.fill();
        std::mem::swap(&mut self.out, out);
        if out.is_empty() {
            self.owed = 0;
            self.watch(cx);
        }
    }

    /// `cx` is woken when there is something to do.
    pub(super) fn watch(&mut self, cx: &Context<'_>) {
        if !self
            .writer
            .as_ref()
            .is_some_and(|held| held.will_wake(cx.waker()))
        {
            self.writer = Some(cx.waker().clone());
        }
    }

    /// Lets the task of the connection look.
    pub(super) fn wake(&mut self) {
        if let Some(writer) = self.writer.take() {
            writer.wake();
        }
    }

    /// Large messages, one frame each in turn, until enough is there to be written.
    fn fill(&mut self) {
        let mut blocked = 0;
        while self.window > 0 && self.out.len() < ENOUGH && blocked < self.waiting.len() {
            let Some(id) = self.waiting.pop_front() else {
                return;
            };
            let before = self.out.len();
            match self.send_some(id) {
                None | Some(0) => {}
                Some(_) => self.waiting.push_back(id),
            }
            if self.out.len() == before {
                blocked += 1;
            } else {
                blocked = 0;
            }
        }
    }

    /// One frame of that call's message, as long as windows and the other side's frames allow. How much is left.
    fn send_some(&mut self, id: u32) -> Option<usize> {
        let stream = self.streams.get_mut(&id).filter(|stream| stream.runs())?;
        let window = usize::try_from(self.window.min(stream.window)).unwrap_or(0);
        let bytes = stream.unsent().min(window).min(self.theirs.frame);
        if bytes == 0 {
            return Some(stream.unsent());
        }
        let pieces = stream.take(bytes);
        let taken = i64::try_from(bytes).unwrap_or(i64::MAX);
        stream.window -= taken;
        self.window -= taken;
        let left = stream.unsent();
        let flags = if left == 0 { flag::END_STREAM } else { 0 };
        self.out.small().put_slice(&head(Kind::Data, flags, id, bytes));
        for piece in pieces {
            self.out.push(piece);
        }
        Some(left)
    }

    fn write_headers(&mut self, id: u32, ends: bool, path: &str, authority: &str, fields: [&[Field<'_>]; 2]) {
        let out = self.out.small();
        let at = out.len();
        out.put_bytes(0, HEAD_BYTES);
        self.encoder.begin(out);
        let pseudo = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", authority),
        ];
        for (name, value) in pseudo {
            self.encoder.put(out, Field::kept(name, value));
        }
        for field in fields.into_iter().flatten() {
            self.encoder.put(out, *field);
        }
        let ends = if ends { flag::END_STREAM } else { 0 };
        let length = out.len() - at - HEAD_BYTES;
        if length <= self.theirs.frame {
            let head = head(Kind::Headers, flag::END_HEADERS | ends, id, length);
            if let Some(room) = out.get_mut(at..at + HEAD_BYTES) {
                room.copy_from_slice(&head);
            }
            return;
        }
        // A token may be longer than a frame.
        let block = out.split_off(at + HEAD_BYTES);
        out.truncate(at);
        let pieces = block.chunks(self.theirs.frame);
        let last = pieces.len() - 1;
        for (number, piece) in pieces.enumerate() {
            let kind = if number == 0 {
                Kind::Headers
            } else {
                Kind::Continuation
            };
            let flags =
                if number == 0 { ends } else { 0 } | if number == last { flag::END_HEADERS } else { 0 };
            out.put_slice(&head(kind, flags, id, piece.len()));
            out.put_slice(piece);
        }
    }

    fn put(&mut self, kind: Kind, flags: u8, stream: u32, payload: &[u8]) {
        let out = self.out.small();
        out.put_slice(&head(kind, flags, stream, payload.len()));
        out.put_slice(payload);
    }

    /// The same, because the other side made us.
    fn owe(&mut self, kind: Kind, flags: u8, stream: u32, payload: &[u8]) {
        self.owed += HEAD_BYTES + payload.len();
        self.put(kind, flags, stream, payload);
    }

    fn reset(&mut self, id: u32, code: Code) {
        self.owe(Kind::Reset, 0, id, &code.0.to_be_bytes());
    }
}

fn head(kind: Kind, flags: u8, stream: u32, length: usize) -> [u8; HEAD_BYTES] {
    Head {
        length,
        kind,
        flags,
        stream,
    }
    .bytes()
}
