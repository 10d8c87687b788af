//! One attempt at the owner, never two.

use std::time::Duration;

use bytes::Bytes;
use kruntimes_proto::{failure::Failure, ids::InvocationId, owner::ExplainResponse};
use tokio::time::Instant;

use crate::{
    reply::Output,
    request::{Invocation, Subject},
    routes::Route,
};

pub mod channels;
pub mod client;

/// What is sent, and where to.
#[derive(Debug)]
pub struct Call<'a> {
    /// The caller's request.
    pub invocation: &'a Invocation,
    /// The owner, and the fence it must confirm.
    pub route: &'a Route,
    /// The payload.
    pub input: Bytes,
    /// The time; reading it once more would cost as much as looking up the route.
    pub now: Instant,
    /// When the caller has waited long enough.
    pub deadline: Instant,
}

/// What came back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// What the function returned.
    pub output: Output,
    /// How long it took, as its server says.
    pub handler: Option<Duration>,
}

/// Why nothing came back. What matters is what the owner may have done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HopError {
    /// Nothing left this process.
    NotSent(String),
    /// Nothing left this process before the deadline.
    TooLate,
    /// The owner said why; only a status with our ErrorInfo counts (C-3.5).
    Answered(Failure),
    /// Something left, and what came back says nothing.
    Unknown(String),
    /// Something left, and nothing came back in time.
    Deadline,
    /// The owner answered with something that is none.
    BadAnswer(&'static str),
}

/// Calls an owner.
pub trait Hop: Send + Sync {
    /// One attempt. Dropping the future gives the call up; the owner is told.
    fn call(&self, call: Call<'_>) -> impl Future<Output = Result<Answer, HopError>> + Send;
}

/// Asks an owner about a Run, or to end one of its calls.
pub trait Ask: Send + Sync {
    /// Ends that call. Says whether it was running.
    fn cancel(
        &self,
        subject: &Subject,
        route: &Route,
        invocation: &InvocationId,
    ) -> impl Future<Output = Result<bool, HopError>> + Send;

    /// What the owner knows of the function.
    fn explain(
        &self,
        subject: &Subject,
        route: &Route,
    ) -> impl Future<Output = Result<ExplainResponse, HopError>> + Send;
}
