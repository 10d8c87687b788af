//! What is told of a request and of its hops where somebody traces, in the words of OpenTelemetry's conventions for
//! HTTP and RPC; what they have no word for begins with `kruntimes.` and is called as in the access log.
//!
//! No header, no body and no text of an error is told; reasons are words of a closed list (docs/reasons.md).

use kruntimes_proto::failure::Dispatched;
use kruntimes_trace::{Span, SpanKind, Trace, Tracer, rpc::Rpc};
use tonic::Code;

use crate::{hop::HopError, metrics::Ended, request::Request, routes::Route};

/// The method that ends a call.
pub const CANCEL: &str = "/kruntimes.owner.v1.Owner/Cancel";
/// The method that asks about a function.
pub const EXPLAIN: &str = "/kruntimes.owner.v1.Owner/Explain";

/// Begins the span of a request, which then belongs to it.
pub fn begin(tracer: &Tracer, request: &mut Request, version: &'static str) -> Span {
    let (name, route) = match request {
        Request::Invoke(_) => (
            "POST /v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}:invoke",
            "/v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}:invoke",
        ),
        Request::Explain(_) => (
            "GET /v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}",
            "/v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}",
        ),
        Request::Cancel(..) => (
            "DELETE /v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}/invocations/{id}",
            "/v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}/invocations/{id}",
        ),
    };
    let mut span = tracer.begin(SpanKind::Server, name, &mut request.subject_mut().trace);
    if span.is_live() {
        span.set("http.request.method", request.method());
        span.set("http.route", route);
        span.set("url.scheme", "https");
        span.set("url.path", path(request));
        span.set("network.protocol.version", version);
        let subject = request.subject();
        span.set("kruntimes.namespace", subject.namespace.clone());
        span.set("kruntimes.runtime", subject.runtime.clone());
        span.set("kruntimes.run_uid", subject.uid.to_string());
        span.set("kruntimes.invocation_id", subject.id.as_str().to_owned());
    }
    span
}

/// Without the query, which nothing here reads and which may hold anything.
fn path(request: &Request) -> String {
    let subject = request.subject();
    let (namespace, runtime, uid) = (&subject.namespace, &subject.runtime, subject.uid);
    let function = format!("/v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}");
    match request {
        Request::Invoke(_) => function + ":invoke",
        Request::Explain(_) => function,
        Request::Cancel(_, id) => function + "/invocations/" + id.as_str(),
    }
}

/// How it was answered. An error of the server's is 500 and above; with the others it did what it should.
pub fn end(span: &mut Span, ended: &Ended, dispatched: Dispatched) {
    if !span.is_live() {
        return;
    }
    span.set("http.response.status_code", i64::from(ended.status));
    span.set("kruntimes.reason", ended.reason);
    span.set("kruntimes.component", ended.component);
    span.set("kruntimes.dispatched", dispatched.as_str());
    if ended.status >= 500 {
        span.fail(ended.reason);
    }
}

/// One call of an owner.
#[derive(Debug)]
#[must_use = "a call that is not ended is told as cancelled"]
pub struct HopSpan(Rpc);

// === impl HopSpan ===

impl HopSpan {
    /// Begins it; the owner is to be told `trace`.
    pub fn begin(tracer: &Tracer, method: &'static str, trace: &mut Trace, route: &Route) -> Self {
        let mut rpc = Rpc::client(tracer, method, trace);
        let span = rpc.span();
        if span.is_live() {
            let address = route.owner.address;
            span.set("server.address", address.ip().to_string());
            span.set("server.port", i64::from(address.port()));
        }
        Self(rpc)
    }

    /// How it ended.
    pub fn end<T>(self, result: Result<T, HopError>) -> Result<T, HopError> {
        let (code, reason) = match &result {
            Ok(_) => (Some(Code::Ok), "OK"),
            Err(HopError::Answered(failure)) => (Some(failure.reason.code()), failure.reason.as_str()),
            Err(HopError::NotSent(_)) => (None, "OwnerUnreachable"),
            Err(HopError::TooLate) => (None, "DeadlineExceeded"),
            Err(HopError::Deadline) => (Some(Code::DeadlineExceeded), "DeadlineExceeded"),
            Err(HopError::Unknown(_)) => (None, "OutcomeUnknown"),
            Err(HopError::BadAnswer(_)) => (None, "RuntimeServerError"),
        };
        self.0.end(code, reason);
        result
    }
}
