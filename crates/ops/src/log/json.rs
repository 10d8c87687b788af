//! One event → one line with one JSON object: `timestamp`, `level`, the event's fields as they come (`message` is one
//! of them), `span` when there is one, `target`.
//!
//! A call leaves a line, so its cost is a part of each call's: the fields go straight into one buffer of each thread,
//! without a map, without copies of their texts, and without a virtual call for each comma.

use std::{
    cell::Cell,
    fmt::{self, Write},
};

use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_log::NormalizeEvent as _;
use tracing_subscriber::{
    fmt::{FmtContext, FormatEvent, FormatFields, FormattedFields, format::Writer},
    registry::LookupSpan,
};

use super::time;

/// The format. The fields of spans must be formatted as JSON objects.
pub(super) struct Json;

/// Fields on their way into a line.
struct Fields<'a> {
    line: &'a mut String,
    result: fmt::Result,
}

/// A text inside quotation marks.
struct Quoted<'a>(&'a mut String);

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'s> LookupSpan<'s>,
    N: for<'w> FormatFields<'w> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        // Formatting a field may leave a line of its own: that one finds an empty buffer.
        let mut line = LINE.take();
        line.clear();
        let written = put_event(context, &mut line, event).and_then(|()| writer.write_str(&line));
        if line.capacity() <= KEPT {
            LINE.set(line);
        }
        written
    }
}

thread_local! {
    static LINE: Cell<String> = const { Cell::new(String::new()) };
}
/// Longer lines do not keep their room.
const KEPT: usize = 16 * 1024;

fn put_event<S, N>(context: &FmtContext<'_, S, N>, line: &mut String, event: &Event<'_>) -> fmt::Result
where
    S: Subscriber + for<'s> LookupSpan<'s>,
    N: for<'w> FormatFields<'w> + 'static,
{
    // Of a record of the `log` crate the event's own metadata say nothing.
    let normal = event.normalized_metadata();
    let metadata = normal.as_ref().unwrap_or_else(|| event.metadata());
    line.push_str("{\"timestamp\":\"");
    time::put_now(line);
    line.push_str("\",\"level\":\"");
    line.push_str(metadata.level().as_str());
    line.push('"');
    let mut fields = Fields { line, result: Ok(()) };
    event.record(&mut fields);
    fields.result?;
    if let Some(span) = context.lookup_current() {
        line.push_str(",\"span\":{\"name\":");
        quote(line, span.name())?;
        let extensions = span.extensions();
        let object = extensions.get::<FormattedFields<N>>();
        let inner = object
            .and_then(|object| object.fields.strip_prefix('{')?.strip_suffix('}'))
            .unwrap_or_default();
        if !inner.is_empty() {
            line.push(',');
            line.push_str(inner);
        }
        line.push('}');
    }
    line.push_str(",\"target\":");
    quote(line, metadata.target())?;
    line.push_str("}\n");
    Ok(())
}

impl Fields<'_> {
    fn put(&mut self, field: &Field, value: impl FnOnce(&mut String) -> fmt::Result) {
        let name = field.name();
        // Where a record of the `log` crate came from.
        if self.result.is_err() || name.starts_with("log.") {
            return;
        }
        self.line.push(',');
        self.result = quote(self.line, name.strip_prefix("r#").unwrap_or(name));
        self.line.push(':');
        self.result = self.result.and_then(|()| value(self.line));
    }

    fn put_shown(&mut self, field: &Field, shown: fmt::Arguments<'_>) {
        self.put(field, |line| {
            line.push('"');
            Quoted(line).write_fmt(shown)?;
            line.push('"');
            Ok(())
        });
    }
}

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put_shown(field, format_args!("{value:?}"));
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.put_shown(field, format_args!("{value}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, |line| quote(line, value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, |line| {
            line.push_str(if value { "true" } else { "false" });
            Ok(())
        });
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, |line| write!(line, "{value}"));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, |line| write!(line, "{value}"));
    }

    fn record_i128(&mut self, field: &Field, value: i128) {
        self.put(field, |line| write!(line, "{value}"));
    }

    fn record_u128(&mut self, field: &Field, value: u128) {
        self.put(field, |line| write!(line, "{value}"));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, |line| put_number(line, value));
    }
}

impl Write for Quoted<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if is_plain(text.as_bytes()) {
            self.0.push_str(text);
            return Ok(());
        }
        let mut written = 0;
        for (at, byte) in text.bytes().enumerate() {
            if !is_escaped(byte) {
                continue;
            }
            // Those bytes are whole characters, so the text may be cut at them.
            self.0.push_str(&text[written..at]);
            match byte {
                b'"' => self.0.push_str("\\\""),
                b'\\' => self.0.push_str("\\\\"),
                b'\n' => self.0.push_str("\\n"),
                b'\r' => self.0.push_str("\\r"),
                b'\t' => self.0.push_str("\\t"),
                _ => write!(self.0, "\\u{byte:04x}")?,
            }
            written = at + 1;
        }
        self.0.push_str(&text[written..]);
        Ok(())
    }
}

/// Whether a byte cannot stand in a text as it is (RFC 8259, section 7).
fn is_escaped(byte: u8) -> bool {
    (byte < b' ') | (byte == b'"') | (byte == b'\\')
}

/// Whether none of these bytes is. Most texts are short and plain: eight bytes at a time.
fn is_plain(text: &[u8]) -> bool {
    const ONES: u64 = u64::from_ne_bytes([1; 8]);
    const TOPS: u64 = u64::from_ne_bytes([0x80; 8]);
    // The top bit of some byte, if one of them is smaller than the limit.
    let below = |word: u64, limit: u8| word.wrapping_sub(ONES * u64::from(limit)) & !word & TOPS;
    let (words, rest) = text.as_chunks();
    let mut found = 0;
    for word in words {
        let word = u64::from_ne_bytes(*word);
        let quotes = word ^ (ONES * u64::from(b'"'));
        let slashes = word ^ (ONES * u64::from(b'\\'));
        found |= below(word, b' ') | below(quotes, 1) | below(slashes, 1);
    }
    found == 0 && !rest.iter().any(|byte| is_escaped(*byte))
}

fn quote(line: &mut String, text: &str) -> fmt::Result {
    line.push('"');
    Quoted(line).write_str(text)?;
    line.push('"');
    Ok(())
}

/// As Rust writes it.
fn put_number(line: &mut String, value: f64) -> fmt::Result {
    // Durations are such numbers, and finding the shortest text of any number takes longer than all other fields.
    let thousandths = value * 1000.0;
    if (0.0..1e12).contains(&thousandths) && thousandths.round() / 1000.0 == value && value.is_sign_positive()
    {
        put_thousandths(line, thousandths.round() as u64);
        Ok(())
    } else if value.is_finite() {
        write!(line, "{value:?}")
    } else {
        line.push_str("null");
        Ok(())
    }
}

/// `12.5`, `12.0`.
fn put_thousandths(line: &mut String, thousandths: u64) {
    let digits = |number: u64| char::from(b'0' + (number % 10) as u8);
    let (whole, part) = (thousandths / 1000, thousandths % 1000);
    if whole < 10 {
        line.push(digits(whole));
    } else {
        // Writing to a text cannot fail.
        let _ = write!(line, "{whole}");
    }
    line.push('.');
    line.push(digits(part / 100));
    if part % 100 > 0 {
        line.push(digits(part / 10));
    }
    if part % 10 > 0 {
        line.push(digits(part));
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use clap::Parser;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use crate::{args::OpsArgs, log};

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        ops: OpsArgs,
    }

    /// What is logged by `say`, line by line.
    fn heard(say: impl FnOnce()) -> Vec<Value> {
        #[derive(Clone, Default)]
        struct Ears(Arc<Mutex<Vec<u8>>>);
        impl io::Write for Ears {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                self.0.lock().unwrap().extend_from_slice(bytes);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        log::listen_by_thread();
        let ears = Ears::default();
        let writer = ears.clone();
        let args = Program::parse_from(["test"]).ops;
        let dispatch = log::dispatch(&args, move || writer.clone()).unwrap();
        tracing::dispatcher::with_default(&dispatch, say);
        let bytes = ears.0.lock().unwrap().clone();
        let text = String::from_utf8(bytes).unwrap();
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    }

    #[test]
    fn every_kind_of_field_is_the_json_of_its_kind() {
        let error = io::Error::other("it \"broke\"");
        let lines = heard(|| {
            let absent: Option<&str> = None;
            tracing::warn!(
                target: "a::target",
                text = "a",
                shown = %"b",
                debugged = ?["c"],
                error = &error as &(dyn std::error::Error + 'static),
                yes = true,
                less = -1,
                many = u64::MAX,
                part = 0.5,
                whole = 12.0,
                nothing = f64::NAN,
                absent,
                r#type = "d",
                "said {}",
                1
            );
        });
        let mut line = lines[0].clone();
        let timestamp = line.as_object_mut().unwrap().remove("timestamp").unwrap();
        assert!(timestamp.as_str().unwrap().parse::<jiff::Timestamp>().is_ok());
        let expected = json!({
            "level": "WARN", "target": "a::target", "message": "said 1", "text": "a", "shown": "b",
            "debugged": "[\"c\"]", "error": "it \"broke\"", "yes": true, "less": -1, "many": u64::MAX, "part": 0.5,
            "whole": 12.0, "nothing": null, "type": "d",
        });
        assert_eq!(line, expected);
    }

    #[test]
    fn an_event_in_a_span_names_it() {
        let lines = heard(|| {
            tracing::info_span!("outer", peer = "p\"q").in_scope(|| {
                tracing::info!("one");
                tracing::info_span!("inner").in_scope(|| tracing::info!("two"));
            });
        });
        assert_eq!(lines[0]["span"], json!({ "name": "outer", "peer": "p\"q" }));
        assert_eq!(lines[1]["span"], json!({ "name": "inner" }));
    }

    proptest! {
        #[test]
        fn what_is_plain_has_nothing_to_escape(bytes in prop::collection::vec(
            prop_oneof![4 => any::<u8>(), 1 => 0x1e_u8..0x24, 1 => 0x5b_u8..0x5e], 0..20,
        )) {
            let plain = bytes.iter().all(|byte| !matches!(byte, ..0x20 | b'"' | b'\\'));
            prop_assert_eq!(super::is_plain(&bytes), plain);
        }

        /// A number reads as it was, in the shortest text that does.
        #[test]
        fn numbers_are_as_rust_writes_them(number in prop_oneof![
            any::<f64>().prop_filter("a number", |number| number.is_finite()),
            (0..10_000_000_u32).prop_map(|micros| f64::from(micros) / 1000.0),
            (0..1_000_u32).prop_map(f64::from),
        ]) {
            let mut text = String::new();
            super::put_number(&mut text, number).unwrap();
            prop_assert_eq!(text, format!("{number:?}"));
        }

        /// Nobody can end a line or add a field.
        #[test]
        fn any_text_stays_one_value_of_one_line(text in any::<String>()) {
            let lines = heard(|| tracing::info!(plain = text.as_str(), shown = %text, "{text}"));
            prop_assert_eq!(lines.len(), 1);
            for name in ["plain", "shown", "message"] {
                prop_assert_eq!(lines[0][name].as_str(), Some(text.as_str()));
            }
        }
    }
}
