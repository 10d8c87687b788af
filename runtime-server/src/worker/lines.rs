//! What server and worker say to each other where the language cannot hold a NUL
//! byte, and so cannot speak frames: control lines.
//!
//! ```text
//! worker ▶ ready VERSION      or      failed REASON
//! server ▶ CALL DEADLINE_MILLIS INVOCATION_ID \n TRACEPARENT \n TRACESTATE \n STEM
//! worker ▶ done CALL STATUS
//! ```
//!
//! Payload and output do not cross the wire: the payload is in the file `STEM.in`, the
//! output goes into the named pipe `STEM.out` (see [`exchange`](super::exchange)).
//! Pure: bytes in, lines out.

use std::{os::unix::ffi::OsStrExt as _, path::Path, time::Duration};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use kruntimes_proto::limits;

use super::frame::{CallError, CallResult, ErrorKind, Frame, Invoke, Malformed, Trouble};

/// Longest line, bytes: a reason with the path of a file.
const MAX_LINE_BYTES: usize = 4096;

/// What a worker says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Line {
    /// The handler is loaded; the language's version for the log.
    Ready { version: String },
    /// The handler cannot be loaded; no further line follows.
    Failed { reason: String },
    /// A call has ended.
    Done {
        /// The number given with the call.
        call: u64,
        /// Its exit status.
        status: u8,
    },
}

/// Takes one line off the front of `buffer`; `None` while it is incomplete.
///
/// # Errors
/// When it is too long, or none of the above.
pub fn take(buffer: &mut BytesMut) -> Result<Option<Line>, Malformed> {
    let Some(end) = buffer.iter().take(MAX_LINE_BYTES).position(|&byte| byte == b'\n') else {
        return if buffer.len() < MAX_LINE_BYTES {
            Ok(None)
        } else {
            Err(Malformed::Line)
        };
    };
    let line = buffer.split_to(end);
    buffer.advance(1);
    let text = std::str::from_utf8(&line).map_err(|_| Malformed::Line)?;
    match text.split_once(' ') {
        Some(("ready", version)) => Ok(Some(Line::Ready {
            version: version.to_owned(),
        })),
        Some(("failed", reason)) => Ok(Some(Line::Failed {
            reason: reason.to_owned(),
        })),
        Some(("done", rest)) => {
            let (call, status) = rest.split_once(' ').ok_or(Malformed::Line)?;
            Ok(Some(Line::Done {
                call: call.parse().map_err(|_| Malformed::Line)?,
                status: status.parse().map_err(|_| Malformed::Line)?,
            }))
        }
        _ => Err(Malformed::Line),
    }
}

/// The lines that start a call.
#[must_use]
pub fn call(invoke: &Invoke<'_>, unix_now: Duration, stem: &Path) -> Bytes {
    let deadline = unix_now.saturating_add(invoke.timeout).as_millis();
    let mut lines = BytesMut::new();
    lines.put_slice(
        format!(
            "{} {deadline} {}\n{}\n{}\n",
            invoke.call, invoke.id, invoke.traceparent, invoke.tracestate
        )
        .as_bytes(),
    );
    lines.put_slice(stem.as_os_str().as_bytes());
    lines.put_u8(b'\n');
    lines.freeze()
}

/// The payload as the function gets it; no payload is `null`.
///
/// # Errors
/// When it is not JSON: then the function does not start.
pub fn payload(input: Bytes) -> Result<Bytes, Trouble> {
    if input.is_empty() {
        return Ok(Bytes::from_static(b"null"));
    }
    let trouble = |message: String| Trouble {
        kind: "InvalidInput".to_owned(),
        message,
        trace: String::new(),
    };
    let text = std::str::from_utf8(&input).map_err(|error| trouble(error.to_string()))?;
    if limits::nests_deeper(&input, limits::JSON_DEPTH) {
        return Err(trouble(format!("it nests deeper than {}", limits::JSON_DEPTH)));
    }
    match serde_json::from_str::<serde::de::IgnoredAny>(text) {
        Ok(_) => Ok(input),
        Err(error) => Err(trouble(error.to_string())),
    }
}

/// What a call amounts to that ended with `status`; no output means too much of it.
#[must_use]
pub fn ended(call: u64, status: u8, handler: Duration, output: Option<Bytes>) -> Frame {
    let error = |kind, name: &str, message: String| {
        let trouble = Trouble {
            kind: name.to_owned(),
            trace: message.clone(),
            message,
        };
        Frame::Error(CallError {
            call,
            handler,
            kind,
            trouble,
        })
    };
    match (status, output) {
        (_, None) => error(ErrorKind::InvalidOutput, "InvalidOutput", too_long()),
        (0, Some(output)) => Frame::Result(CallResult {
            call,
            handler,
            content_type: Bytes::from_static(content_type(&output).as_bytes()),
            outputs: Bytes::new(),
            output,
        }),
        (status, Some(_)) => error(
            ErrorKind::Raised,
            "ExitStatus",
            format!("the function ended with status {status}"),
        ),
    }
}

/// Says what is wrong with an output above the limit.
#[must_use]
pub fn too_long() -> String {
    format!(
        "an output of more than {0} bytes; at most {0} are allowed",
        limits::OUTPUT_BYTES
    )
}

/// What the bytes are (C-8.2). Text that is no UTF-8 must not be called text: whoever
/// decodes it would change it.
fn content_type(output: &[u8]) -> &'static str {
    match std::str::from_utf8(output) {
        Ok(text) if serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok() => "application/json",
        Ok(_) => "text/plain",
        Err(_) => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_are_taken_one_by_one_and_kept_until_they_are_whole() {
        let mut buffer = BytesMut::from(&b"ready 5.2\nfailed no file a b\ndone 7 3\ndone 8"[..]);
        let mut next = || take(&mut buffer).unwrap();
        assert_eq!(
            next(),
            Some(Line::Ready {
                version: "5.2".into()
            })
        );
        assert_eq!(
            next(),
            Some(Line::Failed {
                reason: "no file a b".into()
            })
        );
        assert_eq!(next(), Some(Line::Done { call: 7, status: 3 }));
        assert_eq!(next(), None);
        assert_eq!(&buffer[..], b"done 8");
    }

    #[test]
    fn what_is_no_line_of_ours_is_refused() {
        for bad in [
            "\n",
            "done\n",
            "done 1\n",
            "done 1 256\n",
            "done -1 0\n",
            "done 1 0 0\n",
            "hello x\n",
        ] {
            assert_eq!(take(&mut BytesMut::from(bad)), Err(Malformed::Line), "{bad:?}");
        }
        let mut endless = BytesMut::from(&[b'x'; MAX_LINE_BYTES][..]);
        assert_eq!(take(&mut endless), Err(Malformed::Line));
    }

    #[test]
    fn a_call_is_four_lines() {
        let invoke = Invoke {
            call: 3,
            timeout: Duration::from_millis(500),
            id: "inv_1",
            traceparent: "",
            tracestate: "a=1",
            input_bytes: 0,
        };
        let lines = call(&invoke, Duration::from_secs(1), Path::new("/a b/.call-3"));
        assert_eq!(&lines[..], b"3 1500 inv_1\n\na=1\n/a b/.call-3\n");
    }

    /// C-8.2: and the bytes stay as they are, whatever they are called.
    #[test]
    fn an_output_is_json_text_or_bytes() {
        let cases: [(&[u8], &str); 8] = [
            (b"{\"a\":1}\n", "application/json"),
            (b"42", "application/json"),
            (b"", "text/plain"),
            (b"hello\n\n", "text/plain"),
            (b"NaN", "text/plain"),
            (b"1\n2\n", "text/plain"),
            (b"a\0b\n", "text/plain"),
            (b"\"\xff\"", "application/octet-stream"),
        ];
        for (output, content_type) in cases {
            let Frame::Result(result) = ended(1, 0, Duration::ZERO, Some(Bytes::from_static(output))) else {
                panic!("no result")
            };
            assert_eq!(
                (&result.output[..], &result.content_type[..]),
                (output, content_type.as_bytes())
            );
        }
    }

    #[test]
    fn a_status_is_an_error_and_too_much_output_another() {
        let kind = |frame| match frame {
            Frame::Error(error) => error.kind,
            other => panic!("{other:?}"),
        };
        let some = Some(Bytes::from_static(b"1"));
        assert_eq!(kind(ended(1, 3, Duration::ZERO, some)), ErrorKind::Raised);
        assert_eq!(kind(ended(1, 0, Duration::ZERO, None)), ErrorKind::InvalidOutput);
        assert_eq!(
            kind(ended(1, 141, Duration::ZERO, None)),
            ErrorKind::InvalidOutput
        );
    }

    #[test]
    fn only_json_reaches_the_function() {
        assert_eq!(payload(Bytes::new()).as_deref(), Ok(&b"null"[..]));
        for good in ["1", " {\"a\": [1, \"\\u0000\"]}\n\n", "\"$(id)`id`\""] {
            assert_eq!(payload(good.into()).as_deref(), Ok(good.as_bytes()));
        }
        let deep = "[".repeat(129) + &"]".repeat(129);
        for bad in ["{", "NaN", "[1,]", "1 2", "\"\0\"", "1\0", deep.as_str()] {
            assert!(
                payload(Bytes::copy_from_slice(bad.as_bytes())).is_err(),
                "{bad:?}"
            );
        }
        assert!(payload(Bytes::from_static(b"\"\xff\"")).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_line_an_error_or_a_wait_and_never_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut buffer = BytesMut::from(&bytes[..]);
            while let Ok(Some(_)) = take(&mut buffer) {}
        }
    }
}
