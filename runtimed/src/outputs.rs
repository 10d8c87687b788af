//! `KRUNTIME_OUTPUTS`: a file that a function may leave `KEY=VALUE` lines in during a call (C-5.4).
//!
//! [`parse`] reads the lines, [`merge`] joins them with what the handler returned, and
//! [`OutputsDir`] is the place. No text made here quotes what the function wrote.

use std::collections::{HashMap, hash_map::Entry};

use kruntimes_proto::limits;

mod file;

pub use file::{FILE, Left, OutputsDir, RESERVED_DIR};

/// Most bytes of the file: every key and value at its limit together, with some room for line ends,
/// blanks and comments.
pub const FILE_BYTES: usize = limits::OUTPUTS_TOTAL_BYTES + 16 * 1024;

/// Reads the lines of the file: LF or CRLF; blanks around line, key and value do not count; empty
/// lines and lines that begin with `#` are skipped; the first `=` splits.
///
/// # Errors
/// What is wrong, with the number of the line.
pub fn parse(bytes: &[u8]) -> Result<HashMap<String, String>, String> {
    if bytes.len() > FILE_BYTES {
        return Err(format!(
            "the file has more than {FILE_BYTES} bytes; keys and values may have {} together",
            limits::OUTPUTS_TOTAL_BYTES
        ));
    }
    let mut outputs = HashMap::new();
    for (number, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let number = number + 1;
        let line = std::str::from_utf8(line).map_err(|_| format!("line {number} is not UTF-8"))?;
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (key, value) = line
            .split_once('=')
            .ok_or_else(|| format!("line {number} is no KEY=VALUE"))?;
        let (key, value) = (key.trim_end(), value.trim_start());
        if key.is_empty() {
            return Err(format!("line {number} has no key before `=`"));
        }
        if line.contains('\0') {
            return Err(format!("line {number} holds a NUL byte"));
        }
        for (what, text, most) in [
            ("key", key, limits::OUTPUTS_KEY_BYTES),
            ("value", value, limits::OUTPUTS_VALUE_BYTES),
        ] {
            if text.len() > most {
                let length = text.len();
                return Err(format!(
                    "the {what} of line {number} has {length} bytes; at most {most} are accepted"
                ));
            }
        }
        if outputs.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(format!("line {number} repeats a key"));
        }
        if outputs.len() > limits::OUTPUTS_KEYS {
            return Err(format!(
                "line {number} is one key too many; at most {} are accepted",
                limits::OUTPUTS_KEYS
            ));
        }
    }
    Ok(outputs)
}

/// Adds the file's outputs to the handler's.
///
/// # Errors
/// When both have a key.
pub fn merge(returned: &mut HashMap<String, String>, file: HashMap<String, String>) -> Result<(), String> {
    for (key, value) in file {
        match returned.entry(key) {
            Entry::Vacant(place) => {
                place.insert(value);
            }
            Entry::Occupied(_) => {
                return Err("the handler returned a key that the file has too".to_owned());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        let owned = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
        owned.collect()
    }

    /// C-5.4: `KEY=VALUE` lines.
    #[test]
    fn lines_are_keys_and_values() {
        for (text, outputs) in [
            ("", &[][..]),
            ("\n \r\n# a=b\n  # c\n", &[]),
            ("a=1", &[("a", "1")]),
            ("a=1\r\nb=2\r\n", &[("a", "1"), ("b", "2")]),
            (
                " a = 1 \nb= x=y=z\nc=\nd.e-f=é",
                &[("a", "1"), ("b", "x=y=z"), ("c", ""), ("d.e-f", "é")],
            ),
            ("a=${HOME} $(id) %s\\n", &[("a", "${HOME} $(id) %s\\n")]),
        ] {
            assert_eq!(parse(text.as_bytes()), Ok(map(outputs)), "{text:?}");
        }
    }

    /// C-5.4: a duplicate key, an invalid line or value, or a limit fails the call, and nothing is quoted.
    #[test]
    fn what_is_wrong_is_refused_and_not_quoted() {
        let long_key = format!("{}=secret", "k".repeat(129));
        let long_value = format!("secret={}", "v".repeat(8193));
        for (text, needle) in [
            (&b"secret"[..], "line 1 is no KEY=VALUE"),
            (b"a=1\n=secret", "line 2 has no key"),
            (b" = secret", "line 1 has no key"),
            (b"secret=1\nb=2\nsecret=1", "line 3 repeats a key"),
            (b"secret=\xff", "line 1 is not UTF-8"),
            (b"secret=a\0b", "line 1 holds a NUL"),
            (long_key.as_bytes(), "the key of line 1 has 129 bytes"),
            (long_value.as_bytes(), "the value of line 1 has 8193 bytes"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(needle), "{needle}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    /// C-5.3: 64 keys, and the limits themselves work.
    #[test]
    fn the_limits_themselves_work() {
        let lines = |count: usize| -> String { (0..count).map(|it| format!("{it}=x\n")).collect() };
        assert_eq!(parse(lines(64).as_bytes()).unwrap().len(), 64);
        assert!(parse(lines(65).as_bytes()).unwrap_err().contains("too many"));
        let edge = format!("{}={}", "k".repeat(128), "v".repeat(8192));
        assert_eq!(parse(edge.as_bytes()).unwrap().len(), 1);
        // As much as all limits together allow is no matter of the file's size.
        let whole: String = (0..64)
            .map(|it| format!("{it:03}={}\r\n", "v".repeat(1021)))
            .collect();
        assert_eq!(parse(whole.as_bytes()).unwrap().len(), 64);
        assert!(parse(&vec![b'\n'; FILE_BYTES + 1]).is_err());
    }

    /// C-5.4: file and return value must not share keys.
    #[test]
    fn a_key_of_both_is_refused_whatever_its_values() {
        let mut returned = map(&[("a", "1")]);
        merge(&mut returned, map(&[("b", "2")])).unwrap();
        assert_eq!(returned, map(&[("a", "1"), ("b", "2")]));
        let error = merge(&mut returned, map(&[("a", "1")])).unwrap_err();
        assert!(!error.contains("`a`"), "{error}");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            if let Ok(outputs) = parse(&bytes) {
                for (key, value) in outputs {
                    prop_assert!(!key.is_empty() && !key.contains(['=', '\n', '\0']));
                    prop_assert!(!value.contains(['\n', '\0']));
                }
            }
        }

        #[test]
        fn what_was_written_is_read(pairs in proptest::collection::hash_map("[A-Za-z_][A-Za-z0-9_]{0,8}", "[ -~]{0,20}", 0..8)) {
            let trimmed: HashMap<_, _> = pairs.iter().map(|(k, v)| (k.clone(), v.trim().to_owned())).collect();
            let text: String = pairs.iter().map(|(k, v)| format!("{k}={v}\n")).collect();
            prop_assert_eq!(parse(text.as_bytes()), Ok(trimmed));
        }
    }
}
