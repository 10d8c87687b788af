//! What kruntimes processes say to each other.
//!
//! [`executor`] holds the generated messages and services of `executor.v1`,
//! [`owner`] those of `kruntimes.owner.v1`,
//! [`limits`] every bound of the wire with its unit, [`ids`] the bounded ids,
//! [`failure`] the closed set of failures and how they travel in a gRPC status,
//! [`frame`] how a call is framed without copying its payload,
//! [`hop`] the names of the metadata that the gateway adds for the owner,
//! [`local`] the stream that carries it within a Pod.

pub mod failure;
pub mod frame;
pub mod hop;
pub mod ids;
pub mod limits;
pub mod local;

/// Messages, clients and servers of `executor.v1`, generated from
/// `executor/v1/executor.proto` (see `tests/committed_stubs.rs`).
#[allow(
    missing_docs,
    clippy::all,
    unreachable_pub,
    unused_qualifications,
    reason = "generated code"
)]
#[allow(
    clippy::unwrap_used,
    clippy::or_fun_call,
    clippy::panic,
    reason = "generated code"
)]
pub mod executor {
    include!("gen/executor.v1.rs");
}

/// Messages, client and server of `kruntimes.owner.v1`, generated from
/// `owner/v1/owner.proto`.
#[allow(
    missing_docs,
    clippy::all,
    unreachable_pub,
    unused_qualifications,
    reason = "generated code"
)]
#[allow(
    clippy::unwrap_used,
    clippy::or_fun_call,
    clippy::panic,
    reason = "generated code"
)]
pub mod owner {
    include!("gen/kruntimes.owner.v1.rs");
}
