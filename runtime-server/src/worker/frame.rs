//! The frames between server and worker: u32 big-endian length, u8 type, payload.
//!
//! Pure: bytes in, frames out. The length counts the payload alone and is checked
//! before anything is allocated, because the worker runs the user's code and may
//! write what it likes.

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use kruntimes_proto::limits;

/// Bytes before each payload.
pub const HEADER_BYTES: usize = 5;

/// Longest payload a worker may send: the largest output, the `outputs` map with
/// every character escaped in JSON, and room for the fixed part.
pub const MAX_PAYLOAD_BYTES: usize = limits::OUTPUT_BYTES + 6 * limits::OUTPUTS_TOTAL_BYTES + 16 * 1024;

/// Longest parts of a [`Trouble`] that are kept, bytes.
const KIND_BYTES: usize = 256;
const MESSAGE_BYTES: usize = 4 * 1024;
const TRACE_BYTES: usize = 16 * 1024;
/// Longest version of a language that is kept, bytes.
const VERSION_BYTES: usize = 64;

const READY: u8 = 1;
const FAILED: u8 = 2;
const INVOKE: u8 = 3;
const RESULT: u8 = 4;
const ERROR: u8 = 5;

/// What a worker says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// The handler is loaded; the language's version for the log.
    Ready { version: String },
    /// The handler cannot be loaded; no further frame follows.
    Failed(Trouble),
    /// A call ended well.
    Result(CallResult),
    /// A call ended badly.
    Error(CallError),
}

/// A call that returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallResult {
    /// The number given with the call.
    pub call: u64,
    /// How long the user's code ran.
    pub handler: Duration,
    /// Content type of the output, unchecked.
    pub content_type: Bytes,
    /// JSON object of strings, unchecked; empty when there is none.
    pub outputs: Bytes,
    /// The output itself.
    pub output: Bytes,
}

/// A call that did not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallError {
    /// The number given with the call.
    pub call: u64,
    /// How long the user's code ran.
    pub handler: Duration,
    /// Which failure it is.
    pub kind: ErrorKind,
    /// What happened, in words.
    pub trouble: Trouble,
}

/// Why a call has no output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The handler raised.
    Raised,
    /// What it returned cannot be sent.
    InvalidOutput,
    /// The input is not JSON; the handler did not start.
    InvalidInput,
}

/// An error as the worker's language tells it, for people. All three are cut when they
/// are parsed, because they go to the log, and the worker may say what it likes.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default)]
pub struct Trouble {
    /// Name of the type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Its message.
    pub message: String,
    /// Where it came from, several lines.
    pub trace: String,
}

/// One call on its way to the worker.
#[derive(Debug, Clone, Copy)]
pub struct Invoke<'a> {
    /// Echoed in the answer, so that no answer can be taken for another call's.
    pub call: u64,
    /// What is left until the deadline.
    pub timeout: Duration,
    /// Correlation id.
    pub id: &'a str,
    /// W3C trace context; empty when the caller sent none.
    pub traceparent: &'a str,
    /// What belongs to it, as it came, or empty.
    pub tracestate: &'a str,
    /// Length of the input, which follows the returned bytes.
    pub input_bytes: usize,
}

impl Invoke<'_> {
    /// Everything of the frame before the input; the input itself is not copied.
    #[must_use]
    pub fn head(&self) -> Bytes {
        let fixed = 8 + 8 + 2 + 2 + 2;
        let texts = [self.id, self.traceparent, self.tracestate];
        let payload = fixed + texts.iter().map(|text| text.len()).sum::<usize>() + self.input_bytes;
        let mut head = BytesMut::with_capacity(HEADER_BYTES + payload - self.input_bytes);
        head.put_u32(u32::try_from(payload).unwrap_or(u32::MAX));
        head.put_u8(INVOKE);
        head.put_u64(self.call);
        head.put_u64(u64::try_from(self.timeout.as_micros()).unwrap_or(u64::MAX));
        for text in texts {
            head.put_u16(u16::try_from(text.len()).unwrap_or(u16::MAX));
        }
        for text in texts {
            head.put_slice(text.as_bytes());
        }
        head.freeze()
    }
}

/// The worker broke the protocol; it must not be used again.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A length above [`MAX_PAYLOAD_BYTES`].
    #[error("a frame of {0} bytes; at most {MAX_PAYLOAD_BYTES} are allowed")]
    TooLong(usize),
    /// A type this version does not know.
    #[error("a frame of unknown type {0}")]
    UnknownType(u8),
    /// A payload shorter than its fixed part, or with lengths beyond its end.
    #[error("a {0} frame that is cut short")]
    Short(&'static str),
    /// An inner part that is not what it should be.
    #[error("a {0} frame that does not parse")]
    Unreadable(&'static str),
    /// A control line that is none, or comes when none may (see `lines`).
    #[error("a control line that does not parse")]
    Line,
}

/// Takes one frame off the front of `buffer`; `None` while it is incomplete, with
/// room reserved for the rest. The payload is split off, not copied.
pub fn take(buffer: &mut BytesMut) -> Result<Option<Frame>, Malformed> {
    if buffer.len() < HEADER_BYTES {
        return Ok(None);
    }
    let length = u32::from_be_bytes([buffer[0], buffer[1], buffer[2], buffer[3]]) as usize;
    if length > MAX_PAYLOAD_BYTES {
        return Err(Malformed::TooLong(length));
    }
    let total = HEADER_BYTES + length;
    if buffer.len() < total {
        buffer.reserve(total - buffer.len());
        return Ok(None);
    }
    let mut payload = buffer.split_to(total).freeze();
    let kind = payload[4];
    payload.advance(HEADER_BYTES);
    parse(kind, payload).map(Some)
}

fn parse(kind: u8, mut payload: Bytes) -> Result<Frame, Malformed> {
    match kind {
        READY => Ok(Frame::Ready {
            version: limits::clip(&String::from_utf8_lossy(&payload), VERSION_BYTES),
        }),
        FAILED => trouble("failed", &payload).map(Frame::Failed),
        RESULT => {
            need(&payload, 8 + 8 + 2 + 4, "result")?;
            let (call, handler) = (payload.get_u64(), Duration::from_micros(payload.get_u64()));
            let content_type_bytes = usize::from(payload.get_u16());
            let outputs_bytes = payload.get_u32() as usize;
            need(
                &payload,
                content_type_bytes.saturating_add(outputs_bytes),
                "result",
            )?;
            let content_type = payload.split_to(content_type_bytes);
            let outputs = payload.split_to(outputs_bytes);
            Ok(Frame::Result(CallResult {
                call,
                handler,
                content_type,
                outputs,
                output: payload,
            }))
        }
        ERROR => {
            need(&payload, 8 + 8 + 1, "error")?;
            let (call, handler) = (payload.get_u64(), Duration::from_micros(payload.get_u64()));
            let kind = match payload.get_u8() {
                1 => ErrorKind::Raised,
                2 => ErrorKind::InvalidOutput,
                3 => ErrorKind::InvalidInput,
                _ => return Err(Malformed::Unreadable("error")),
            };
            Ok(Frame::Error(CallError {
                call,
                handler,
                kind,
                trouble: trouble("error", &payload)?,
            }))
        }
        other => Err(Malformed::UnknownType(other)),
    }
}

fn need(payload: &Bytes, bytes: usize, what: &'static str) -> Result<(), Malformed> {
    if payload.remaining() < bytes {
        Err(Malformed::Short(what))
    } else {
        Ok(())
    }
}

fn trouble(what: &'static str, json: &[u8]) -> Result<Trouble, Malformed> {
    let said: Trouble = serde_json::from_slice(json).map_err(|_| Malformed::Unreadable(what))?;
    Ok(Trouble {
        kind: limits::clip(&said.kind, KIND_BYTES),
        message: limits::clip(&said.message, MESSAGE_BYTES),
        trace: clip_front(&said.trace, TRACE_BYTES),
    })
}

/// Keeps the end of a text, which says most in a traceback.
fn clip_front(text: &str, max: usize) -> String {
    const MARK: &str = "…";
    if text.len() <= max {
        return text.to_owned();
    }
    let mut start = text.len() - max + MARK.len();
    while !text.is_char_boundary(start) {
        start += 1;
    }
    format!("{MARK}{}", &text[start..])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> BytesMut {
        let mut out = BytesMut::new();
        out.put_u32(u32::try_from(payload.len()).unwrap());
        out.put_u8(kind);
        out.put_slice(payload);
        out
    }

    fn result(call: u64, content_type: &str, outputs: &str, output: &[u8]) -> BytesMut {
        let mut payload = BytesMut::new();
        payload.put_u64(call);
        payload.put_u64(1500);
        payload.put_u16(u16::try_from(content_type.len()).unwrap());
        payload.put_u32(u32::try_from(outputs.len()).unwrap());
        payload.put_slice(content_type.as_bytes());
        payload.put_slice(outputs.as_bytes());
        payload.put_slice(output);
        frame(RESULT, &payload)
    }

    #[test]
    fn a_result_is_split_into_its_parts() {
        let mut buffer = result(7, "text/plain", "{}", b"hello");
        let Ok(Some(Frame::Result(read))) = take(&mut buffer) else {
            panic!("no result")
        };
        assert_eq!((read.call, read.handler), (7, Duration::from_micros(1500)));
        assert_eq!(
            (&read.content_type[..], &read.outputs[..], &read.output[..]),
            (&b"text/plain"[..], &b"{}"[..], &b"hello"[..])
        );
        assert!(buffer.is_empty());
    }

    #[test]
    fn a_length_above_the_bound_is_refused_before_anything_is_reserved() {
        let mut buffer = BytesMut::from(&[0xff, 0xff, 0xff, 0xff, RESULT][..]);
        assert_eq!(take(&mut buffer), Err(Malformed::TooLong(u32::MAX as usize)));
        assert!(buffer.capacity() < 1024);
    }

    #[test]
    fn inner_lengths_beyond_the_payload_are_refused() {
        let mut buffer = result(1, "abc", "", b"");
        let lie = HEADER_BYTES + 16;
        buffer[lie..lie + 2].copy_from_slice(&u16::MAX.to_be_bytes());
        assert_eq!(take(&mut buffer), Err(Malformed::Short("result")));
        assert_eq!(take(&mut frame(99, b"x")), Err(Malformed::UnknownType(99)));
        assert_eq!(
            take(&mut frame(FAILED, b"not json")),
            Err(Malformed::Unreadable("failed"))
        );
    }

    /// C-8.6: whatever a worker says, what reaches the log and the caller is bounded.
    #[test]
    fn everything_a_worker_says_in_words_is_cut() {
        let long = "é".repeat(200_000);
        let words = serde_json::json!({ "type": long, "message": long, "trace": format!("{long}the end") });
        let words = words.to_string();
        let error = [&[0_u8; 16][..], &[1], words.as_bytes()].concat();
        let troubles =
            [(FAILED, words.as_bytes().to_vec()), (ERROR, error)].map(|(kind, payload)| {
                match take(&mut frame(kind, &payload)) {
                    Ok(Some(Frame::Failed(trouble))) => trouble,
                    Ok(Some(Frame::Error(error))) => error.trouble,
                    other => panic!("{other:?}"),
                }
            });
        for trouble in troubles {
            assert!(trouble.kind.len() <= KIND_BYTES && trouble.message.len() <= MESSAGE_BYTES);
            assert!(trouble.trace.len() <= TRACE_BYTES && trouble.trace.ends_with("the end"));
        }
        let Ok(Some(Frame::Ready { version })) = take(&mut frame(READY, long.as_bytes())) else {
            panic!("not ready")
        };
        assert!(version.len() <= VERSION_BYTES);
    }

    #[test]
    fn the_head_of_a_call_announces_the_input_that_follows() {
        let head = Invoke {
            call: 9,
            timeout: Duration::from_millis(2),
            id: "inv_1",
            traceparent: "",
            tracestate: "",
            input_bytes: 10,
        }
        .head();
        let announced = u32::from_be_bytes(head[..4].try_into().unwrap()) as usize;
        assert_eq!(announced, head.len() - HEADER_BYTES + 10);
        assert_eq!(head[4], INVOKE);
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_frame_an_error_or_a_wait_and_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut buffer = BytesMut::from(&bytes[..]);
            while let Ok(Some(_)) = take(&mut buffer) {}
        }

        #[test]
        fn frames_survive_any_split(cut in 0_usize..60) {
            let whole = [result(1, "a/b", "", b"one"), result(2, "", "{}", b"two")].concat();
            let cut = cut.min(whole.len());
            let mut buffer = BytesMut::new();
            let mut calls = Vec::new();
            for part in [&whole[..cut], &whole[cut..]] {
                buffer.put_slice(part);
                while let Some(Frame::Result(read)) = take(&mut buffer).unwrap() {
                    calls.push(read.call);
                }
            }
            prop_assert_eq!(calls, vec![1, 2]);
        }
    }
}
