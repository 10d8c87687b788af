//! A piece of work, told while somebody listens.

use std::fmt;

use opentelemetry::{
    Context, KeyValue, Value,
    trace::{Span as _, SpanKind, Status, TraceContextExt as _, Tracer as _},
};
use opentelemetry_sdk::trace::{SdkTracer, Span as Recording};
use prometheus_client::registry::Registry;

use crate::{context::Trace, export::Numbers};

/// Makes spans, or does not; clones share everything. The default is off.
#[derive(Debug, Clone, Default)]
pub struct Tracer(Option<On>);

#[derive(Debug, Clone)]
struct On {
    tracer: SdkTracer,
    numbers: Numbers,
}

/// One span. It ends when it drops.
#[derive(Default)]
pub struct Span(Option<Box<Recording>>);

// === impl Tracer ===

impl Tracer {
    pub(crate) fn on(tracer: SdkTracer, numbers: Numbers) -> Self {
        Self(Some(On { tracer, numbers }))
    }

    /// Whether there is anybody to tell.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// How many spans left, and how many did not. Off, there is nothing to count.
    pub fn register(&self, registry: &mut Registry) {
        if let Some(on) = &self.0 {
            on.numbers.register(registry);
        }
    }

    /// Begins a span in the trace of a request, or a new trace, and lets the request go on as part of it. Where the
    /// trace is not sampled nothing is told, here or further on.
    pub fn begin(&self, kind: SpanKind, name: &'static str, trace: &mut Trace) -> Span {
        let Some(on) = &self.0 else { return Span(None) };
        let parent = trace.span();
        if parent.as_ref().is_some_and(|parent| !parent.is_sampled()) {
            return Span(None);
        }
        let context = match parent {
            Some(parent) => Context::new().with_remote_span_context(parent),
            None => Context::new(),
        };
        let span = on
            .tracer
            .span_builder(name)
            .with_kind(kind)
            .start_with_context(&on.tracer, &context);
        // Also when it is not sampled: the next process must not decide anew.
        trace.enter(span.span_context().clone());
        Span(span.is_recording().then(|| Box::new(span)))
    }
}

// === impl Span ===

impl Span {
    /// Whether what is set is told to anybody; ask before preparing much.
    #[must_use]
    pub fn is_live(&self) -> bool {
        self.0.is_some()
    }

    /// Says something more. Each key once: a second value would stand beside the first.
    pub fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        if let Some(span) = &mut self.0 {
            span.set_attribute(KeyValue::new(key, value));
        }
    }

    /// It did not work; `kind` is a word of a closed list, never a text.
    pub fn fail(&mut self, kind: &'static str) {
        if let Some(span) = &mut self.0 {
            span.set_attribute(KeyValue::new("error.type", kind));
            span.set_status(Status::error(""));
        }
    }

    /// For log lines: trace id and span id.
    #[must_use]
    pub fn ids(&self) -> Option<(impl fmt::Display + use<>, impl fmt::Display + use<>)> {
        let context = self.0.as_ref()?.span_context();
        Some((context.trace_id(), context.span_id()))
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Span").field(&self.is_live()).finish()
    }
}
