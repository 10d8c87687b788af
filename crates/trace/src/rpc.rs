//! What OpenTelemetry's conventions say of a call by gRPC, on either side.

use opentelemetry::trace::SpanKind;
use tonic::Code;

use crate::{
    context::Trace,
    span::{Span, Tracer},
};

/// The span of one call. When it drops without an end, whoever waited gave up: the call counts as cancelled.
#[derive(Debug)]
#[must_use = "a call that is not ended is told as cancelled"]
pub struct Rpc {
    span: Span,
    client: bool,
    ended: bool,
}

// === impl Rpc ===

impl Rpc {
    /// A call that goes out; `method` is /SERVICE/METHOD, the path of the call.
    pub fn client(tracer: &Tracer, method: &'static str, trace: &mut Trace) -> Self {
        Self::begin(tracer, SpanKind::Client, method, trace)
    }

    /// A call that came in.
    pub fn server(tracer: &Tracer, method: &'static str, trace: &mut Trace) -> Self {
        Self::begin(tracer, SpanKind::Server, method, trace)
    }

    fn begin(tracer: &Tracer, kind: SpanKind, method: &'static str, trace: &mut Trace) -> Self {
        let client = kind == SpanKind::Client;
        let method = method.trim_start_matches('/');
        let mut span = tracer.begin(kind, method, trace);
        if span.is_live() {
            span.set("rpc.system.name", "grpc");
            span.set("rpc.method", method);
        }
        Self {
            span,
            client,
            ended: false,
        }
    }

    /// To say more.
    pub fn span(&mut self) -> &mut Span {
        &mut self.span
    }

    /// It ended with this code, if there was any, and for this reason, a word of a closed list.
    pub fn end(mut self, code: Option<Code>, reason: &'static str) {
        self.finish(code, reason);
    }

    fn finish(&mut self, code: Option<Code>, reason: &'static str) {
        self.ended = true;
        if !self.span.is_live() {
            return;
        }
        if let Some(code) = code {
            self.span.set("rpc.response.status_code", name(code));
        }
        let failed = match code {
            Some(Code::Ok) => false,
            Some(code) => self.client || is_the_servers(code),
            None => true,
        };
        if failed {
            self.span.fail(reason);
        }
    }
}

impl Drop for Rpc {
    fn drop(&mut self) {
        if !self.ended {
            self.finish(Some(Code::Cancelled), "Cancelled");
        }
    }
}

/// The codes that are errors of the side that answers; with the others it did what it should.
fn is_the_servers(code: Code) -> bool {
    matches!(
        code,
        Code::Unknown
            | Code::DeadlineExceeded
            | Code::Unimplemented
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss
    )
}

/// As the conventions write it.
fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
