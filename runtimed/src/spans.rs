//! What is told of a call where somebody traces: one span for the hop, one for the Runtime Server (`crates/trace`).
//!
//! No token, no payload and no text of an error is told; reasons are words of a closed list.

use kruntimes_proto::failure::{Failure, Reason};
use kruntimes_trace::rpc::Rpc;
use tonic::Code;

use crate::request::Call;

/// The method that ends a call.
pub const CANCEL: &str = "/kruntimes.owner.v1.Owner/Cancel";
/// The method that asks about a function.
pub const EXPLAIN: &str = "/kruntimes.owner.v1.Owner/Explain";

/// Which call it is.
pub fn name_call(rpc: &mut Rpc, call: &Call) {
    let span = rpc.span();
    if span.is_live() {
        span.set("kruntimes.run_uid", call.expected.run.to_string());
        span.set("kruntimes.invocation_id", call.id.as_str().to_owned());
    }
}

/// How it ended.
pub fn end(rpc: Rpc, result: Result<(), &Failure>) {
    match result.map_err(|failure| failure.reason) {
        Ok(()) => rpc.end(Some(Code::Ok), "OK"),
        // The connection broke: nobody gave a code.
        Err(reason @ Reason::OutcomeUnknown) => rpc.end(None, reason.as_str()),
        Err(reason) => rpc.end(Some(reason.code()), reason.as_str()),
    }
}
