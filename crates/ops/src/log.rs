//! Where log lines go: standard error, as JSON or text, filtered.

use std::io;

use thiserror::Error;
use tracing::Dispatch;
use tracing_subscriber::{
    EnvFilter,
    fmt::{self, MakeWriter},
    layer::SubscriberExt,
    util::SubscriberInitExt,
};

use crate::args::{LogFormat, OpsArgs};

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
}

/// Sends this process's events to standard error and its panics through the same channel.
///
/// # Errors
/// When the filter does not parse, or when called twice.
pub fn init(args: &OpsArgs) -> Result<(), Error> {
    // Standard output is not ours: audit lines and `--help` live there.
    dispatch(args, io::stderr)?.try_init().map_err(|_| Error::Twice)?;
    log_panics();
    Ok(())
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
            .with(layer.json().flatten_event(true).with_current_span(true))
            .into(),
        LogFormat::Plain => registry.with(layer.with_ansi(false)).into(),
    })
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

    #[test]
    fn a_wrong_filter_is_named() {
        let error = filter("kruntimes=loud").expect_err("no level").to_string();
        assert!(error.contains("--log-filter `kruntimes=loud`"), "{error}");
    }
}
