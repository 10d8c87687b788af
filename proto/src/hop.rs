//! Names of the gRPC metadata on the hop from gateway to owner (C-4).
//!
//! Client headers of these names never pass the gateway: it builds the metadata
//! of a call from nothing.

/// The caller's bearer token, forwarded so that the owner can authorize again (C-3.6).
pub const AUTHORIZATION: &str = "authorization";
/// W3C trace context: the caller's as it came, or the span of whoever sends this, where somebody traces.
pub const TRACEPARENT: &str = "traceparent";
/// W3C trace state, passed through as it came with its trace context.
pub const TRACESTATE: &str = "tracestate";
/// `status.attempt` the gateway routed by, decimal.
pub const ATTEMPT: &str = "kruntime-attempt";
/// `status.assignedPodUID` the gateway routed by.
pub const POD_UID: &str = "kruntime-pod-uid";
/// Marks a call that crossed the gateway; exactly one, and exactly `1`.
pub const HOP: &str = "kruntime-hop";
/// The only value [`HOP`] may have: a runtimed never forwards.
pub const HOP_VALUE: &str = "1";
/// Response metadata: microseconds the handler took, decimal (C-3.3).
pub const HANDLER_US: &str = "kruntime-handler-us";
