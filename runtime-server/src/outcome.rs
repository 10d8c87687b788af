//! What a worker's last word means for the caller: an answer within all bounds, or
//! one failure of the closed list (C-5.3, C-5.5).

use std::{collections::HashMap, time::Duration};

use bytes::Bytes;
use kruntimes_proto::{
    failure::{Failure, Reason},
    limits,
};

use crate::worker::frame::{CallError, CallResult, ErrorKind};

/// A good end of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// At most 1 MiB.
    pub output: Bytes,
    /// A media type, at most 256 bytes of printable ASCII.
    pub content_type: String,
    /// Within the bounds of C-5.3.
    pub outputs: HashMap<String, String>,
    /// How long the user's code ran.
    pub handler: Duration,
}

/// Checks a result; the worker runs the user's code, so nothing of it is trusted.
///
/// # Errors
/// `InvalidOutput`, naming the part and the bound.
pub fn answer(result: CallResult) -> Result<Answer, Failure> {
    if result.output.len() > limits::OUTPUT_BYTES {
        let text = format!(
            "output of {} bytes; at most {} are allowed",
            result.output.len(),
            limits::OUTPUT_BYTES
        );
        return Err(invalid(text));
    }
    Ok(Answer {
        content_type: content_type(&result.content_type)?,
        outputs: outputs(&result.outputs)?,
        output: result.output,
        handler: result.handler,
    })
}

/// What the caller is told about a call without a result. What the function raised
/// is told only when the operator allows it (`exposeErrors`).
#[must_use]
pub fn failure(error: &CallError, expose_errors: bool) -> Failure {
    let trouble = &error.trouble;
    match error.kind {
        ErrorKind::Raised if expose_errors => Failure::new(
            Reason::HandlerError,
            format!("{}: {}", trouble.kind, trouble.message),
        ),
        ErrorKind::Raised => Failure::new(Reason::HandlerError, "the function raised an error"),
        ErrorKind::InvalidOutput => invalid(trouble.message.clone()),
        ErrorKind::InvalidInput => Failure::new(
            Reason::InvalidPayload,
            format!("the input is no JSON: {}", trouble.message),
        ),
    }
}

fn invalid(text: impl Into<String>) -> Failure {
    Failure::new(Reason::InvalidOutput, text)
}

fn content_type(bytes: &[u8]) -> Result<String, Failure> {
    if bytes.len() > limits::CONTENT_TYPE_BYTES {
        return Err(invalid(format!(
            "content type of {} bytes; at most {} are allowed",
            bytes.len(),
            limits::CONTENT_TYPE_BYTES
        )));
    }
    let text = std::str::from_utf8(bytes).unwrap_or_default();
    let printable = text.bytes().all(|byte| (0x20..=0x7e).contains(&byte));
    let has_form = text
        .split_once('/')
        .is_some_and(|(kind, rest)| !kind.is_empty() && !rest.is_empty());
    if printable && has_form && !text.starts_with(' ') && !text.ends_with(' ') {
        Ok(text.to_owned())
    } else {
        Err(invalid(
            "the content type is not of the form type/subtype in printable ASCII",
        ))
    }
}

fn outputs(json: &[u8]) -> Result<HashMap<String, String>, Failure> {
    if json.is_empty() {
        return Ok(HashMap::new());
    }
    let outputs: HashMap<String, String> =
        serde_json::from_slice(json).map_err(|_| invalid("`outputs` must be a map of strings"))?;
    if outputs.len() > limits::OUTPUTS_KEYS {
        return Err(invalid(format!(
            "`outputs` has {} keys; at most {} are allowed",
            outputs.len(),
            limits::OUTPUTS_KEYS
        )));
    }
    for (key, value) in &outputs {
        let whole = !key.is_empty() && !key.contains(['=', '\n', '\r', '\0']);
        if !whole || key.len() > limits::OUTPUTS_KEY_BYTES {
            let text = format!(
                "a key of `outputs` is empty, longer than {} bytes, or holds `=` or a line end",
                limits::OUTPUTS_KEY_BYTES
            );
            return Err(invalid(text));
        }
        if value.len() > limits::OUTPUTS_VALUE_BYTES {
            let text = format!(
                "a value of `outputs` has {} bytes; at most {} are allowed",
                value.len(),
                limits::OUTPUTS_VALUE_BYTES
            );
            return Err(invalid(text));
        }
    }
    let total: usize = outputs.iter().map(|(key, value)| key.len() + value.len()).sum();
    if total > limits::OUTPUTS_TOTAL_BYTES {
        return Err(invalid(format!(
            "`outputs` has {total} bytes together; at most {} are allowed",
            limits::OUTPUTS_TOTAL_BYTES
        )));
    }
    Ok(outputs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::frame::Trouble;

    fn result(content_type: &str, outputs: &str, output: Vec<u8>) -> CallResult {
        CallResult {
            call: 1,
            handler: Duration::ZERO,
            content_type: Bytes::copy_from_slice(content_type.as_bytes()),
            outputs: Bytes::copy_from_slice(outputs.as_bytes()),
            output: output.into(),
        }
    }

    fn refused(content_type: &str, outputs: &str) -> bool {
        answer(result(content_type, outputs, vec![]))
            .is_err_and(|failure| failure.reason == Reason::InvalidOutput)
    }

    #[test]
    fn an_output_of_one_mebibyte_passes_and_one_byte_more_does_not() {
        assert!(answer(result("a/b", "", vec![0; 1_048_576])).is_ok());
        let failure = answer(result("a/b", "", vec![0; 1_048_577])).unwrap_err();
        assert!(
            failure.detail.contains("1048577") && failure.detail.contains("1048576"),
            "{failure}"
        );
    }

    #[test]
    fn a_content_type_that_could_split_a_header_is_refused() {
        assert!(!refused("text/plain; charset=utf-8", ""));
        for bad in [
            "",
            "text",
            "/",
            "a/b\r\nx: y",
            "a/ü",
            &format!("a/{}", "b".repeat(300)),
        ] {
            assert!(refused(bad, ""), "{bad:?}");
        }
    }

    #[test]
    fn outputs_keep_to_their_four_bounds() {
        let map = |keys: usize, value: usize| {
            let map: HashMap<String, String> = (0..keys)
                .map(|key| (format!("{key:03}"), "v".repeat(value)))
                .collect();
            serde_json::to_string(&map).unwrap()
        };
        assert!(!refused("a/b", &map(64, 1021)));
        assert!(
            refused("a/b", &map(64, 1022)),
            "64 * (3 + 1022) bytes are above 64 KiB"
        );
        assert!(refused("a/b", &map(65, 1)));
        assert!(!refused("a/b", &map(1, 8192)));
        assert!(refused("a/b", &map(1, 8193)));
        assert!(refused("a/b", &format!("{{\"{}\":\"\"}}", "k".repeat(129))));
        for bad in ["{\"\":\"x\"}", "{\"a=b\":\"x\"}", "{\"a\":1}", "[]", "nonsense"] {
            assert!(refused("a/b", bad), "{bad}");
        }
    }

    #[test]
    fn what_was_raised_is_told_only_when_allowed() {
        let trouble = Trouble {
            kind: "KeyError".into(),
            message: "secret".into(),
            trace: "secret".into(),
        };
        let error = CallError {
            call: 1,
            handler: Duration::ZERO,
            kind: ErrorKind::Raised,
            trouble,
        };
        assert!(!failure(&error, false).detail.contains("secret"));
        assert_eq!(failure(&error, true).detail, "KeyError: secret");
        assert_eq!(failure(&error, true).reason, Reason::HandlerError);
    }
}
