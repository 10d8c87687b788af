//! Why a call fails, and what its caller is told: one table of status, reason, component and whether the
//! function may have run (C-3.2, C-3.5).

use std::time::Duration;

use http::StatusCode;
use kruntimes_proto::{
    failure::{Component, Dispatched, Failure, Reason},
    ids::InvalidId,
};

use crate::routes::NotReady;

/// A call that does not end with the function's output. The text is for the caller: it never holds a token
/// or a payload.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvokeError {
    /// The path names nothing here.
    #[error("no such route; expected POST /v1/namespaces/NAMESPACE/runtimes/RUNTIME/functions/UID:invoke")]
    NoSuchRoute,
    /// The route exists, for this method.
    #[error("this route is called with {0}")]
    MethodNotAllowed(&'static str),
    /// Where the message ends is in doubt; the connection closes.
    #[error("the request cannot be read: {0}")]
    BadRequest(&'static str),
    /// `X-Kruntime-Invocation-ID` is present and not an id.
    #[error("X-Kruntime-Invocation-ID: {0}")]
    InvalidInvocationId(InvalidId),
    /// `X-Kruntime-Invocation-ID` is there more than once.
    #[error("X-Kruntime-Invocation-ID is given more than once")]
    RepeatedInvocationId,
    /// `X-Kruntime-Timeout-Millis` is not a number.
    #[error("X-Kruntime-Timeout-Millis must be one whole number of milliseconds, written in digits")]
    InvalidTimeout,
    /// The head or the body did not arrive in time.
    #[error("the {0} of the request did not arrive in time")]
    SlowRequest(&'static str),
    /// Too many or too long headers.
    #[error("the headers of the request are too large")]
    HeadersTooLarge,
    /// No usable `Authorization`.
    #[error("{0}; send `Authorization: Bearer TOKEN` once")]
    NoBearer(&'static str),
    /// The content is not JSON.
    #[error("the content type must be application/json, in UTF-8")]
    UnsupportedMediaType,
    /// The content is encoded.
    #[error("a content encoding is not supported; send the JSON as it is")]
    UnsupportedContentEncoding,
    /// The body is over the limit.
    #[error("the body has more than {0} bytes")]
    PayloadTooLarge(usize),
    /// Nobody with that UID in that namespace and runtime can be called.
    #[error("no function with this UID is known in this namespace and runtime")]
    NoSuchFunction,
    /// No call of that id runs; there is nothing to cancel (C-3.10).
    #[error("no call of this function with this invocation id is running")]
    NoSuchInvocation,
    /// Kubernetes refuses the token.
    #[error("Kubernetes does not accept the token")]
    TokenRejected,
    /// The caller may not do this with that Run.
    #[error("the caller may not `{0}` this Run, which is what this request needs")]
    PermissionDenied(&'static str),
    /// Nobody could say whether the caller may.
    #[error("the access review cannot be made at the moment: {0}")]
    AuthorizationUnavailable(String),
    /// The Run is over.
    #[error("the function has ended: {phase} ({reason})")]
    FunctionEnded {
        /// Terminal phase of the Run.
        phase: String,
        /// Why it ended, or `Unknown`.
        reason: String,
    },
    /// The Run cannot be called yet, or no more.
    #[error("the function cannot be called at the moment: {0}")]
    NotReady(NotReady),
    /// The gateway has not listed the Runs yet.
    #[error("the gateway is starting and does not know its routes yet")]
    Starting,
    /// The gateway is at one of its own limits.
    #[error("the gateway is at its limit of {0}")]
    Overloaded(&'static str),
    /// No connection to the owner; nothing was sent.
    #[error("the owner of the function cannot be reached: {0}")]
    OwnerUnreachable(String),
    /// The request left and nobody can tell what became of it.
    #[error("the outcome is unknown: {0}; the function may have run")]
    OutcomeUnknown(String),
    /// The deadline passed before anything was sent.
    #[error("the deadline passed before the call was sent")]
    TooLate,
    /// The deadline passed and the owner did not say anything.
    #[error("no answer within the deadline; the function may have run")]
    DeadlineExceeded,
    /// The owner's answer is not one.
    #[error("the answer of the owner breaks the protocol: {0}")]
    BadAnswer(&'static str),
    /// The owner said why.
    #[error("{}", .0.detail)]
    Answered(Failure),
}

/// What the caller is told of an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// HTTP status.
    pub status: u16,
    /// A word of the closed list.
    pub reason: &'static str,
    /// Who says so.
    pub component: Component,
    /// Whether the function may have run.
    pub dispatched: Dispatched,
    /// Seconds after which another try makes sense; on every 429 and 503 (C-3.4).
    pub retry_after: Option<u32>,
}

impl InvokeError {
    /// The one table.
    #[must_use]
    pub fn row(&self) -> Row {
        use Dispatched::{No, Unknown, Yes};
        match self {
            Self::NoSuchRoute => own(404, "NoSuchRoute", No),
            Self::MethodNotAllowed(_) => own(405, "MethodNotAllowed", No),
            Self::BadRequest(_) => own(400, "BadRequest", No),
            Self::InvalidInvocationId(_) | Self::RepeatedInvocationId => own(400, "InvalidInvocationId", No),
            Self::InvalidTimeout => own(400, "InvalidTimeout", No),
            Self::SlowRequest(_) => own(408, "RequestTimeout", No),
            Self::HeadersTooLarge => own(431, "HeadersTooLarge", No),
            Self::NoBearer(_) | Self::TokenRejected => own(401, "Unauthenticated", No),
            Self::UnsupportedMediaType => own(415, "UnsupportedMediaType", No),
            Self::UnsupportedContentEncoding => own(415, "UnsupportedContentEncoding", No),
            Self::PayloadTooLarge(_) => own(413, "PayloadTooLarge", No),
            Self::NoSuchFunction => own(404, "NoSuchFunction", No),
            Self::NoSuchInvocation => own(404, "NoSuchInvocation", No),
            Self::PermissionDenied(_) => own(403, "PermissionDenied", No),
            Self::AuthorizationUnavailable(_) => again(503, "AuthorizationUnavailable", 2),
            Self::FunctionEnded { .. } => own(410, "FunctionEnded", No),
            Self::NotReady(state) => again(503, state.as_str(), state.retry_after_seconds()),
            Self::Starting => again(503, "Starting", 1),
            Self::Overloaded(_) => again(503, "Overloaded", 1),
            Self::OwnerUnreachable(_) => again(503, "OwnerUnreachable", 2),
            Self::OutcomeUnknown(_) => own(502, "OutcomeUnknown", Unknown),
            Self::TooLate => own(504, "DeadlineExceeded", No),
            Self::DeadlineExceeded => own(504, "DeadlineExceeded", Unknown),
            Self::BadAnswer(_) => Row {
                component: Component::Runtimed,
                ..own(502, "RuntimeServerError", Yes)
            },
            Self::Answered(failure) => answered(failure),
        }
    }

    /// How long the running call may still take, for a 429.
    #[must_use]
    pub fn busy_at_most(&self) -> Option<Duration> {
        match self {
            Self::Answered(failure) => failure.busy_at_most,
            _ => None,
        }
    }

    /// Whether the connection must close, because nobody knows where the next request begins.
    #[must_use]
    pub fn closes(&self) -> bool {
        matches!(
            self,
            Self::BadRequest(_) | Self::SlowRequest(_) | Self::HeadersTooLarge
        )
    }
}

impl Row {
    /// Short name of the status, for people.
    #[must_use]
    pub fn title(&self) -> &'static str {
        match self.status {
            499 => "Cancelled",
            status => StatusCode::from_u16(status)
                .ok()
                .and_then(|status| status.canonical_reason())
                .unwrap_or("Error"),
        }
    }
}

fn own(status: u16, reason: &'static str, dispatched: Dispatched) -> Row {
    Row {
        status,
        reason,
        component: Component::Gateway,
        dispatched,
        retry_after: None,
    }
}

fn again(status: u16, reason: &'static str, seconds: u32) -> Row {
    Row {
        retry_after: Some(seconds),
        ..own(status, reason, Dispatched::No)
    }
}

fn answered(failure: &Failure) -> Row {
    let (status, retry_after) = match failure.reason {
        Reason::Busy => (429, Some(1)),
        Reason::StaleRoute | Reason::Registering | Reason::Draining | Reason::ServerUnavailable => {
            (503, Some(1))
        }
        Reason::Recovering
        | Reason::Terminating
        | Reason::OwnerIsolated
        | Reason::RegistrationNotFound
        | Reason::RegistrationConflict
        | Reason::StaleRegistration
        | Reason::FunctionsUnsupported => (503, Some(5)),
        Reason::AuthorizationUnavailable => (503, Some(2)),
        Reason::InvalidPayload => (400, None),
        Reason::Unauthenticated => (401, None),
        Reason::PermissionDenied => (403, None),
        Reason::DeadlineExceeded => (504, None),
        Reason::Cancelled => (499, None),
        Reason::HandlerError => (500, None),
        Reason::BadHop
        | Reason::WorkerExited
        | Reason::InvalidOutput
        | Reason::RuntimeServerError
        | Reason::OutcomeUnknown => (502, None),
    };
    Row {
        status,
        reason: failure.reason.as_str(),
        component: failure.component,
        dispatched: failure.dispatched,
        retry_after,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn examples() -> Vec<InvokeError> {
        let mut all = vec![
            InvokeError::NoSuchRoute,
            InvokeError::MethodNotAllowed("POST"),
            InvokeError::BadRequest("x"),
            InvokeError::RepeatedInvocationId,
            InvokeError::InvalidTimeout,
            InvokeError::SlowRequest("body"),
            InvokeError::HeadersTooLarge,
            InvokeError::NoBearer("x"),
            InvokeError::UnsupportedMediaType,
            InvokeError::UnsupportedContentEncoding,
            InvokeError::PayloadTooLarge(1),
            InvokeError::NoSuchFunction,
            InvokeError::TokenRejected,
            InvokeError::PermissionDenied("get"),
            InvokeError::NoSuchInvocation,
            InvokeError::AuthorizationUnavailable("x".into()),
            InvokeError::FunctionEnded {
                phase: "Failed".into(),
                reason: "x".into(),
            },
            InvokeError::Starting,
            InvokeError::Overloaded("x"),
            InvokeError::OwnerUnreachable("x".into()),
            InvokeError::OutcomeUnknown("x".into()),
            InvokeError::TooLate,
            InvokeError::DeadlineExceeded,
            InvokeError::BadAnswer("x"),
        ];
        all.extend(NotReady::ALL.iter().map(|state| InvokeError::NotReady(*state)));
        all.extend(
            Reason::ALL
                .iter()
                .map(|reason| InvokeError::Answered(Failure::new(*reason, "x"))),
        );
        all
    }

    /// C-3.4
    #[test]
    fn every_429_and_503_says_when_to_come_back() {
        for error in examples() {
            let row = error.row();
            assert_eq!(
                row.retry_after.is_some(),
                matches!(row.status, 429 | 503),
                "{error:?}"
            );
        }
    }

    /// C-3.2
    #[test]
    fn nothing_was_dispatched_when_the_gateway_itself_refuses() {
        for error in examples() {
            let row = error.row();
            if row.status < 500 && row.component == Component::Gateway || row.status == 503 {
                assert_eq!(row.dispatched, Dispatched::No, "{error:?}");
            }
            assert_ne!(row.title(), "Error", "{error:?}");
        }
    }

    /// C-3.5
    #[test]
    fn the_statuses_of_the_contract() {
        for (reason, status) in [
            (Reason::Busy, 429),
            (Reason::StaleRoute, 503),
            (Reason::Draining, 503),
            (Reason::ServerUnavailable, 503),
            (Reason::InvalidPayload, 400),
            (Reason::DeadlineExceeded, 504),
            (Reason::HandlerError, 500),
            (Reason::WorkerExited, 502),
            (Reason::InvalidOutput, 502),
            (Reason::RuntimeServerError, 502),
            (Reason::Cancelled, 499),
        ] {
            let row = InvokeError::Answered(Failure::new(reason, "x")).row();
            assert_eq!((row.status, row.reason), (status, reason.as_str()));
        }
    }

    /// C-3.2
    #[test]
    fn the_owner_s_word_on_dispatched_is_passed_on() {
        let failure = Failure::new(Reason::WorkerExited, "x").dispatched(Dispatched::Unknown);
        assert_eq!(
            InvokeError::Answered(failure).row().dispatched,
            Dispatched::Unknown
        );
    }

    /// C-3.2: reasons are a closed, documented list.
    #[test]
    fn every_reason_is_documented_with_its_status() {
        let page = include_str!("../../docs/reasons.md");
        for error in examples() {
            let row = error.row();
            let line = format!("| {} | `{}` |", row.status, row.reason);
            assert!(page.contains(&line), "docs/reasons.md lacks {line}");
        }
    }
}
