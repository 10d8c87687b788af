//! Where log lines go: standard error, as JSON or text, filtered.

use std::io;

use thiserror::Error;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber, span, subscriber::Interest};
use tracing_subscriber::{
    EnvFilter,
    fmt::{self, MakeWriter, format::JsonFields},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

use crate::{
    args::{LogFormat, OpsArgs},
    lines::Lines,
};

mod json;
mod time;

/// Why logging could not be set up.
#[derive(Debug, Error)]
pub enum Error {
    /// The filter does not parse.
    #[error("--log-filter `{filter}` is invalid: {source}; write a level or target=level,…")]
    Filter {
        /// What was given.
        filter: String,
        /// What is wrong with it.
        source: tracing_subscriber::filter::ParseError,
    },
    /// A subscriber exists already in this process.
    #[error("logging is already set up in this process")]
    Twice,
    /// The system has no room for the thread that writes.
    #[error("the thread that writes log lines cannot be started: {0}")]
    NoThread(io::Error),
}

/// Everything logged so far is written when this drops; what is logged later is written as it comes.
#[derive(Debug)]
#[must_use = "lines that wait are lost when the process ends without it"]
pub struct Flush(Lines);

/// Sends this process's events to standard error and its panics through the same channel. Nobody waits for
/// whoever reads them, warnings and errors are written at once, and others within milliseconds.
///
/// # Errors
/// When the filter does not parse, or when called twice.
pub fn init(args: &OpsArgs) -> Result<Flush, Error> {
    // Standard output is not ours: audit lines and `--help` live there.
    let lines = Lines::start("log", io::stderr(), confession(args.log_format)).map_err(Error::NoThread)?;
    dispatch(args, Writer(lines.clone()))?
        .try_init()
        .map_err(|_| Error::Twice)?;
    log_panics();
    Ok(Flush(lines))
}

impl Drop for Flush {
    fn drop(&mut self) {
        self.0.finish();
    }
}

/// What is said after lines were lost.
fn confession(format: LogFormat) -> fn(u64) -> Vec<u8> {
    match format {
        LogFormat::Json => |lost| {
            format!("{{\"level\":\"WARN\",\"message\":\"log lines were lost: nobody took them in time\",\"lines\":{lost}}}\n")
                .into_bytes()
        },
        LogFormat::Plain => {
            |lost| format!("WARN {lost} log lines were lost: nobody took them in time\n").into_bytes()
        }
    }
}

/// Hands each line over.
struct Writer(Lines);

/// One line on its way; the formatter writes it whole.
struct Line<'a> {
    lines: &'a Lines,
    urgent: bool,
}

impl<'a> MakeWriter<'a> for Writer {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        Line {
            lines: &self.0,
            urgent: true,
        }
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> Self::Writer {
        Line {
            lines: &self.0,
            urgent: *event.level() <= Level::WARN,
        }
    }
}

impl io::Write for Line<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.lines.push(line, self.urgent);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What [`init`] installs, with another place to write to.
///
/// # Errors
/// When the filter does not parse.
pub fn dispatch<W>(args: &OpsArgs, writer: W) -> Result<Dispatch, Error>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let registry = tracing_subscriber::registry().with(filter(&args.log_filter)?);
    let layer = fmt::layer().with_writer(writer);
    Ok(match args.log_format {
        LogFormat::Json => registry
            .with(layer.fmt_fields(JsonFields::new()).event_format(json::Json))
            .into(),
        LogFormat::Plain => registry.with(layer.with_ansi(false)).into(),
    })
}

/// For tests whose dispatcher listens on one thread only: lets no event be judged by the thread that happens to
/// meet it first. With a single dispatcher `tracing` asks the current thread's one, and remembers for the whole
/// process that nobody listens. Call it before anything is logged; again does nothing.
pub fn listen_by_thread() {
    // Fails when there is a global subscriber, which undoes the same mistake.
    let _ = tracing::subscriber::set_global_default(Undecided);
}

/// Hears nothing, but rules nothing out for others either.
struct Undecided;

impl Subscriber for Undecided {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        false
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

fn filter(text: &str) -> Result<EnvFilter, Error> {
    EnvFilter::builder().parse(text).map_err(|source| Error::Filter {
        filter: text.to_owned(),
        source,
    })
}

/// A panic is a line like any other, so that it is found where people look.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.payload_as_str().unwrap_or("a value that is not a text");
        let location = panic.location().map(ToString::to_string);
        let thread = std::thread::current();
        tracing::error!(
            location = location.as_deref().unwrap_or("unknown"),
            thread = thread.name().unwrap_or("unnamed"),
            "panicked: {message}"
        );
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_targets_are_filters() {
        for text in ["info", "warn,kruntimes_gateway=debug", "off"] {
            assert!(filter(text).is_ok(), "{text}");
        }
    }

    /// The thread that meets an event first has no ears; the one that has still hears it.
    #[test]
    fn a_deaf_thread_deafens_nobody() {
        fn say() {
            tracing::error!("heard");
        }
        struct Ears(std::sync::mpsc::Sender<()>);
        impl io::Write for Ears {
            fn write(&mut self, line: &[u8]) -> io::Result<usize> {
                let _ = self.0.send(());
                Ok(line.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        listen_by_thread();
        let (said, heard) = std::sync::mpsc::channel();
        let dispatch = Dispatch::new(
            tracing_subscriber::registry().with(fmt::layer().with_writer(move || Ears(said.clone()))),
        );
        tracing::dispatcher::with_default(&dispatch, || {
            std::thread::spawn(say).join().expect("says it to nobody");
            say();
        });
        assert_eq!(heard.try_iter().count(), 1);
    }

    #[test]
    fn a_wrong_filter_is_named() {
        let error = filter("kruntimes=loud").expect_err("no level").to_string();
        assert!(error.contains("--log-filter `kruntimes=loud`"), "{error}");
    }
}
