//! One event → one line with one JSON object: `timestamp`, `level`, the event's fields as they come (`message` is one
//! of them), `span` when there is one, `target`.
//!
//! A call leaves a line, so its cost is a part of each call's: the fields go straight into the buffer, without a map and
//! without a copy of their texts.

use std::fmt::{self, Write};

use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_log::NormalizeEvent as _;
use tracing_subscriber::{
    fmt::{
        FmtContext, FormatEvent, FormatFields, FormattedFields,
        format::Writer,
        time::{FormatTime as _, SystemTime},
    },
    registry::LookupSpan,
};

/// The format. The fields of spans must be formatted as JSON objects.
pub(super) struct Json;

/// Fields on their way into a line.
struct Fields<'a, W> {
    line: &'a mut W,
    result: fmt::Result,
}

/// A text inside quotation marks.
struct Quoted<'a, W>(&'a mut W);

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'s> LookupSpan<'s>,
    N: for<'w> FormatFields<'w> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut line: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        // Of a record of the `log` crate the event's own metadata say nothing.
        let normal = event.normalized_metadata();
        let metadata = normal.as_ref().unwrap_or_else(|| event.metadata());
        line.write_str("{\"timestamp\":\"")?;
        SystemTime.format_time(&mut line)?;
        line.write_str("\",\"level\":\"")?;
        line.write_str(metadata.level().as_str())?;
        line.write_char('"')?;
        let mut fields = Fields {
            line: &mut line,
            result: Ok(()),
        };
        event.record(&mut fields);
        fields.result?;
        if let Some(span) = context.lookup_current() {
            line.write_str(",\"span\":{\"name\":")?;
            quote(&mut line, span.name())?;
            let extensions = span.extensions();
            let object = extensions.get::<FormattedFields<N>>();
            let inner = object
                .and_then(|object| object.fields.strip_prefix('{')?.strip_suffix('}'))
                .unwrap_or_default();
            if !inner.is_empty() {
                line.write_char(',')?;
                line.write_str(inner)?;
            }
            line.write_char('}')?;
        }
        line.write_str(",\"target\":")?;
        quote(&mut line, metadata.target())?;
        line.write_str("}\n")
    }
}

impl<W: Write> Fields<'_, W> {
    fn put(&mut self, field: &Field, value: impl FnOnce(&mut W) -> fmt::Result) {
        let name = field.name();
        // Where a record of the `log` crate came from.
        if self.result.is_err() || name.starts_with("log.") {
            return;
        }
        self.result = self
            .line
            .write_char(',')
            .and_then(|()| quote(self.line, name.strip_prefix("r#").unwrap_or(name)))
            .and_then(|()| self.line.write_char(':'))
            .and_then(|()| value(self.line));
    }

    fn put_shown(&mut self, field: &Field, shown: fmt::Arguments<'_>) {
        self.put(field, |line| {
            line.write_char('"')?;
            Quoted(line).write_fmt(shown)?;
            line.write_char('"')
        });
    }
}

impl<W: Write> Visit for Fields<'_, W> {
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
        self.put(field, |line| line.write_str(if value { "true" } else { "false" }));
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
        self.put(field, |line| {
            if value.is_finite() {
                write!(line, "{value:?}")
            } else {
                line.write_str("null")
            }
        });
    }
}

impl<W: Write> Write for Quoted<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let escaped = |byte: u8| (byte < b' ') | (byte == b'"') | (byte == b'\\');
        // Without a way out in between, so that many bytes are compared at once: most texts are plain.
        if !text.bytes().fold(false, |any, byte| any | escaped(byte)) {
            return self.0.write_str(text);
        }
        let mut written = 0;
        for (at, byte) in text.bytes().enumerate() {
            if !escaped(byte) {
                continue;
            }
            // Those bytes are whole characters, so the text may be cut at them.
            self.0.write_str(&text[written..at])?;
            match byte {
                b'"' => self.0.write_str("\\\"")?,
                b'\\' => self.0.write_str("\\\\")?,
                b'\n' => self.0.write_str("\\n")?,
                b'\r' => self.0.write_str("\\r")?,
                b'\t' => self.0.write_str("\\t")?,
                _ => write!(self.0, "\\u{byte:04x}")?,
            }
            written = at + 1;
        }
        self.0.write_str(&text[written..])
    }
}

fn quote<W: Write>(line: &mut W, text: &str) -> fmt::Result {
    line.write_char('"')?;
    Quoted(line).write_str(text)?;
    line.write_char('"')
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
