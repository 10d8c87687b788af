//! Spans of OpenTelemetry, sent to a collector by OTLP; off unless the environment names one.
//!
//! | Module | Question it answers |
//! | --- | --- |
//! | [`context`] | which trace a request belongs to, and what the next process is told |
//! | [`span`] | how a piece of work is told |
//! | [`rpc`] | what is told of a call by gRPC |
//! | [`settings`] | what the `OTEL_` names say |
//! | [`export`] | how spans leave without holding anybody up |
//!
//! Off, everything here is one branch, and trace headers pass through as they came. The `tracing` registry is not
//! asked: it serves the log, and would make every call pay for spans.

#![warn(missing_docs)]

pub mod context;
pub mod export;
pub mod rpc;
pub mod settings;
pub mod span;
#[cfg(feature = "testing")]
pub mod testing;

pub use context::Trace;
pub use export::Flush;
pub use opentelemetry::trace::SpanKind;
pub use settings::{Error, Settings};
pub use span::{Span, Tracer};

/// What the process's environment says: a tracer that is off, or one and the guard that sends its last spans.
/// `service` is its name unless the environment has another.
///
/// # Errors
/// When a name has a value that makes no sense; the text says which and what to write.
pub fn from_environment(service: &'static str) -> Result<(Tracer, Option<Flush>), Error> {
    match Settings::read(service, |name| std::env::var(name).ok())? {
        Some(settings) => {
            let (tracer, flush) = export::start(settings)?;
            Ok((tracer, Some(flush)))
        }
        None => Ok((Tracer::default(), None)),
    }
}
