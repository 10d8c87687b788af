//! Every bound of the wire, with its unit (C-5.3).

use std::time::Duration;

/// Largest input of an invocation, bytes.
pub const INPUT_BYTES: usize = 1024 * 1024;
/// Largest output of an invocation, bytes.
pub const OUTPUT_BYTES: usize = 1024 * 1024;
/// Longest invocation id, bytes.
pub const INVOCATION_ID_BYTES: usize = 128;
/// Longest registration id, bytes.
pub const REGISTRATION_ID_BYTES: usize = 128;
/// Longest registration digest, bytes.
pub const DIGEST_BYTES: usize = 128;
/// Longest `fatal_error`, bytes.
pub const FATAL_ERROR_BYTES: usize = 4 * 1024;
/// Longest detail of a failure that travels in a status, bytes. Header lists
/// carry it, so it stays well below what peers accept.
pub const DETAIL_BYTES: usize = 1024;
/// Longest handler name, bytes.
pub const HANDLER_BYTES: usize = 512;
/// Longest content type of an output, bytes.
pub const CONTENT_TYPE_BYTES: usize = 256;
/// Deepest nesting of a JSON payload, levels.
pub const JSON_DEPTH: usize = 128;
/// Most keys in `outputs`.
pub const OUTPUTS_KEYS: usize = 64;
/// Longest key in `outputs`, bytes.
pub const OUTPUTS_KEY_BYTES: usize = 128;
/// Longest value in `outputs`, bytes.
pub const OUTPUTS_VALUE_BYTES: usize = 8 * 1024;
/// All keys and values of `outputs` together, bytes.
pub const OUTPUTS_TOTAL_BYTES: usize = 64 * 1024;
/// Most environment entries of a registration.
pub const ENV_ENTRIES: usize = 256 + 64;
/// Longest message on the hop: the input (or output and outputs) plus room for
/// ids and framing, bytes.
pub const MESSAGE_BYTES: usize = INPUT_BYTES + OUTPUTS_TOTAL_BYTES + 64 * 1024;
/// Deadline of an invocation that names none.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest deadline of an invocation; longer wishes are clamped.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(300);
/// Drain of an unregistration that names none.
pub const DEFAULT_DRAIN: Duration = Duration::from_secs(30);
/// Longest drain of an unregistration.
pub const MAX_DRAIN: Duration = Duration::from_secs(300);

/// Shortens `text` to at most `max` bytes at a character boundary and marks the cut.
///
/// ```
/// assert_eq!(kruntimes_proto::limits::clip("short", 16), "short");
/// assert_eq!(kruntimes_proto::limits::clip("a longer text", 8), "a lon…");
/// ```
#[must_use]
pub fn clip(text: &str, max: usize) -> String {
    const MARK: &str = "…";
    if text.len() <= max {
        return text.to_owned();
    }
    let mut end = max.saturating_sub(MARK.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{MARK}", &text[..end])
}

/// Whether arrays and objects nest deeper than `most`. Whether it is JSON at all is
/// for others to say.
#[must_use]
pub fn nests_deeper(json: &[u8], most: usize) -> bool {
    let (mut depth, mut in_text, mut escaped) = (0_usize, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b'[' | b'{' => {
                depth += 1;
                if depth > most {
                    return true;
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_nesting_is_nesting() {
        for (json, depth) in [
            (r#"{"a":[1,{"b":[]}]}"#, 4),
            (r#"["[[[[","\"[[[[","\\"]"#, 1),
            ("[][][]", 1),
            ("]]]]", 0),
            ("\"[[", 0),
        ] {
            assert!(!nests_deeper(json.as_bytes(), depth), "{json}");
            assert!(depth == 0 || nests_deeper(json.as_bytes(), depth - 1), "{json}");
        }
    }
}
