//! One call as its connection sees it: what is left to send, and what has come back.

use std::task::Waker;

use bytes::{Bytes, BytesMut};
use thiserror::Error;

use super::{frame::Code, hpack::Fields, hpack::decode::List};

/// A flag for compression, and the length: what comes before a message of gRPC.
pub(super) const PREFIX_BYTES: usize = 5;

/// All that came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) head: Fields,
    pub(super) body: Bytes,
    /// Absent if the body was the last.
    pub(super) trailers: Option<Fields>,
}

/// Why a call that was sent has no answer. Nothing is known of what became of it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Broken {
    /// Its stream was.
    #[error("the other side reset the call: {0}")]
    Reset(Code),
    /// It came too late on a connection that ends.
    #[error("the other side ends the connection: {0}")]
    GoAway(Code),
    /// The answer is none.
    #[error("the answer breaks the rules of HTTP/2: {0}")]
    Malformed(&'static str),
    /// The answer is longer than allowed, bytes.
    #[error("an answer of more than {0} bytes")]
    TooLong(usize),
    /// The connection broke.
    #[error("the connection ended: {0}")]
    Ended(String),
}

/// One call.
#[derive(Debug)]
pub(super) struct Stream {
    /// The message, as far as it is not sent: two parts that follow each other.
    unsent: [Bytes; 2],
    /// How much of it the other side takes now. Negative after it has changed its mind.
    pub(super) window: i64,
    /// How much of what it sent was not given back yet, bytes.
    kept: u32,
    limit: usize,
    head: Option<(u16, Fields)>,
    body: Body,
    trailers: Option<Fields>,
    waker: Option<Waker>,
    outcome: Option<Result<(), Broken>>,
}

/// A body that comes in pieces. One piece, as small answers are, is not copied.
#[derive(Debug, Default)]
struct Body {
    first: Bytes,
    more: BytesMut,
}

/// What is wrong with a frame, for one call only.
#[derive(Debug)]
pub(super) struct Wrong {
    pub(super) code: Code,
    pub(super) error: Broken,
}

// === impl Stream ===

impl Stream {
    pub(super) fn new(message: [Bytes; 2], window: i64, limit: usize) -> Self {
        Self {
            unsent: message,
            window,
            kept: 0,
            limit,
            head: None,
            body: Body::default(),
            trailers: None,
            waker: None,
            outcome: None,
        }
    }

    pub(super) fn runs(&self) -> bool {
        self.outcome.is_none()
    }

    /// Bytes that are not sent.
    pub(super) fn unsent(&self) -> usize {
        self.unsent.iter().map(Bytes::len).sum()
    }

    /// The next `bytes` to send.
    pub(super) fn take(&mut self, bytes: usize) -> [Bytes; 2] {
        let [head, tail] = &mut self.unsent;
        let of_head = bytes.min(head.len());
        [head.split_to(of_head), tail.split_to(bytes - of_head)]
    }

    /// Ends it and wakes who waits.
    pub(super) fn end(&mut self, outcome: Result<(), Broken>) {
        self.outcome = Some(outcome);
        self.unsent = Default::default();
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    pub(super) fn wait(&mut self, waker: &Waker) {
        if !self.waker.as_ref().is_some_and(|held| held.will_wake(waker)) {
            self.waker = Some(waker.clone());
        }
    }

    /// What it ended with.
    pub(super) fn into_reply(self) -> Result<Reply, Broken> {
        self.outcome
            .unwrap_or_else(|| Err(Broken::Ended("it still runs".to_owned())))?;
        let (status, head) = self.head.ok_or(Broken::Malformed("no headers"))?;
        Ok(Reply {
            status,
            head,
            body: self.body.whole(),
            trailers: self.trailers,
        })
    }

    /// Takes headers, or trailers. Says whether it has ended.
    pub(super) fn headers(&mut self, list: List, ends: bool) -> Result<bool, Wrong> {
        if let Some(why) = list.malformed {
            return Err(Wrong::protocol(why));
        }
        match (list.status, &self.head) {
            // An answer that is only announced.
            (Some(100..=199), None) if !ends => return Ok(false),
            (Some(status @ 200..), None) => self.head = Some((status, list.fields)),
            (None, Some(_)) if ends => self.trailers = Some(list.fields),
            (None, Some(_)) => return Err(Wrong::protocol("trailers that are not the end")),
            (Some(_), Some(_)) => return Err(Wrong::protocol("a status in the trailers")),
            (_, None) => return Err(Wrong::protocol("no status")),
        }
        Ok(ends)
    }

    /// Whether `bytes` of a body may come now.
    pub(super) fn expects(&self, bytes: usize) -> Result<(), Wrong> {
        if self.head.is_none() {
            return Err(Wrong::protocol("a body before its headers"));
        }
        if self.body.len() + bytes > self.most() {
            return Err(Wrong {
                code: Code::CANCEL,
                error: Broken::TooLong(self.limit),
            });
        }
        Ok(())
    }

    /// Takes a whole piece of the body.
    pub(super) fn add(&mut self, piece: Bytes) {
        if self.body.len() == 0 {
            self.body.first = piece;
        } else {
            self.append(&piece);
        }
    }

    /// Takes the beginning of a piece, or more of it.
    pub(super) fn append(&mut self, part: &[u8]) {
        let most = self.most();
        self.body.append(part, most);
    }

    /// Where `bytes` more of a piece can be read into. It is to be given back.
    pub(super) fn lend(&mut self, bytes: usize) -> BytesMut {
        self.body.more.reserve(bytes);
        std::mem::take(&mut self.body.more)
    }

    pub(super) fn give_back(&mut self, body: BytesMut) {
        self.body.more = body;
    }

    /// A frame was taken of `bytes`, padding included. How much is to be given back of a window of `whole`.
    pub(super) fn taken(&mut self, bytes: u32, whole: u32) -> u32 {
        self.kept += bytes;
        if self.kept < whole / 2 {
            return 0;
        }
        std::mem::take(&mut self.kept)
    }

    /// The longest body that is taken.
    fn most(&self) -> usize {
        PREFIX_BYTES + self.limit
    }
}

// === impl Body ===

impl Body {
    fn len(&self) -> usize {
        self.first.len() + self.more.len()
    }

    fn append(&mut self, part: &[u8], most: usize) {
        if self.more.is_empty() {
            let first = std::mem::take(&mut self.first);
            let begin = if first.is_empty() { part } else { &first };
            let so_far = first.len() + part.len();
            self.more.reserve(whole(begin).clamp(so_far, most.max(so_far)));
            self.more.extend_from_slice(&first);
        }
        self.more.extend_from_slice(part);
    }

    fn whole(self) -> Bytes {
        if self.more.is_empty() {
            self.first
        } else {
            self.more.freeze()
        }
    }
}

/// How long the message that begins so says it is, with its prefix; 0 while that is not known.
pub(super) fn whole(begin: &[u8]) -> usize {
    match begin {
        [_, a, b, c, d, ..] => PREFIX_BYTES.saturating_add(u32::from_be_bytes([*a, *b, *c, *d]) as usize),
        _ => 0,
    }
}

// === impl Wrong ===

impl Wrong {
    pub(super) fn new(code: Code, why: &'static str) -> Self {
        Self {
            code,
            error: Broken::Malformed(why),
        }
    }

    fn protocol(why: &'static str) -> Self {
        Self::new(Code::PROTOCOL, why)
    }
}
