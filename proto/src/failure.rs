//! The closed set of failures of a call and how they travel in a gRPC status.
//!
//! Only a status that carries `google.rpc.ErrorInfo` of domain `kruntimes.io` is
//! an answer (C-3.5): transports invent codes of their own, and a bare code says
//! nothing about whether the function ran. [`Failure::to_status`] and
//! [`Failure::from_status`] are inverse to each other for what peers may see.

use std::{collections::HashMap, error::Error as _, time::Duration};

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::limits::{self, clip};

/// The `domain` of every ErrorInfo this project writes.
pub const DOMAIN: &str = "kruntimes.io";

const DISPATCHED: &str = "dispatched";
const COMPONENT: &str = "component";
const BUSY_AT_MOST_MILLIS: &str = "busyAtMostMillis";

/// Whether the function may have run (C-3.2): what a caller needs to know before
/// trying again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Dispatched {
    /// The function did not start.
    No,
    /// The function started.
    Yes,
    /// Nobody can tell.
    Unknown,
}

impl Dispatched {
    /// The word in answers and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::No => "no",
            Self::Yes => "yes",
            Self::Unknown => "unknown",
        }
    }

    fn parse(word: &str) -> Option<Self> {
        [Self::No, Self::Yes, Self::Unknown]
            .into_iter()
            .find(|it| it.as_str() == word)
    }
}

/// Who gave the answer (C-3.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Component {
    /// The HTTPS front.
    Gateway,
    /// The owner of the Run.
    Runtimed,
    /// The server beside it, or the process it runs functions in.
    RuntimeServer,
    /// The user's code.
    Function,
}

impl Component {
    /// The word in answers and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Runtimed => "runtimed",
            Self::RuntimeServer => "runtime-server",
            Self::Function => "function",
        }
    }

    fn parse(word: &str) -> Option<Self> {
        [Self::Gateway, Self::Runtimed, Self::RuntimeServer, Self::Function]
            .into_iter()
            .find(|it| it.as_str() == word)
    }
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident => $code:ident, $dispatched:ident, $component:ident;)*) => {
        /// Why a call failed beyond the gateway. A closed list: adding one is a
        /// change of the contract.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Reason { $($(#[$doc])* $name,)* }

        impl Reason {
            /// Every reason, in order of declaration.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The word in answers, logs and ErrorInfo.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            /// The gRPC code this reason travels under.
            #[must_use]
            pub fn code(self) -> Code {
                match self { $(Self::$name => Code::$code,)* }
            }

            /// What is true of this reason unless the failure says otherwise.
            #[must_use]
            pub fn usually(self) -> (Dispatched, Component) {
                match self { $(Self::$name => (Dispatched::$dispatched, Component::$component),)* }
            }
        }
    };
}

reasons! {
    /// A call of that function is in flight (429).
    Busy => ResourceExhausted, No, Runtimed;
    /// The Run, its attempt or its Pod is not the one the caller routed by (503);
    /// nothing was started, so a route that moved may be tried once.
    StaleRoute => FailedPrecondition, No, Runtimed;
    /// The registration is being made (503).
    Registering => FailedPrecondition, No, Runtimed;
    /// The owner or the registration takes no more calls (503).
    Draining => FailedPrecondition, No, Runtimed;
    /// The registration was lost and is being made again (503).
    Recovering => FailedPrecondition, No, Runtimed;
    /// The Run is being deleted or cancelled (503).
    Terminating => FailedPrecondition, No, Runtimed;
    /// The owner has had no contact with Kubernetes and refuses on its own (503, C-6.4).
    OwnerIsolated => FailedPrecondition, No, Runtimed;
    /// The Runtime Server cannot take work, or cannot be reached (503).
    ServerUnavailable => Unavailable, No, RuntimeServer;
    /// The registration id is unknown to the server (503 for callers).
    RegistrationNotFound => NotFound, No, RuntimeServer;
    /// The attempt is registered with another digest.
    RegistrationConflict => AlreadyExists, No, RuntimeServer;
    /// The registration id or attempt was superseded.
    StaleRegistration => FailedPrecondition, No, RuntimeServer;
    /// The server does not offer functions.
    FunctionsUnsupported => Unimplemented, No, RuntimeServer;
    /// A message of the hop breaks the protocol, for example a missing hop mark.
    BadHop => InvalidArgument, No, Runtimed;
    /// The payload or another field of the request is not acceptable (400).
    InvalidPayload => InvalidArgument, No, RuntimeServer;
    /// Kubernetes refused the caller's token (401).
    Unauthenticated => Unauthenticated, No, Runtimed;
    /// The caller may not `get` the Run (403).
    PermissionDenied => PermissionDenied, No, Runtimed;
    /// No access review was possible (503); never a denial.
    AuthorizationUnavailable => Unavailable, No, Runtimed;
    /// The deadline passed (504).
    DeadlineExceeded => DeadlineExceeded, Yes, RuntimeServer;
    /// Somebody with the right to do so cancelled the call (499).
    Cancelled => Cancelled, Yes, Runtimed;
    /// The function raised (500).
    HandlerError => Unknown, Yes, Function;
    /// The process that ran the function died (502).
    WorkerExited => Aborted, Yes, Function;
    /// The output is too large or cannot be encoded (502).
    InvalidOutput => OutOfRange, Yes, Function;
    /// The Runtime Server broke its protocol (502).
    RuntimeServerError => Internal, Unknown, RuntimeServer;
    /// The request left and nobody can tell what became of it (502).
    OutcomeUnknown => Internal, Unknown, Runtimed;
}

impl Reason {
    /// Finds a reason by its word; `None` for words of a newer version.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|it| it.as_str() == word)
    }
}

/// One failed call, as processes tell each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {detail}", reason.as_str())]
pub struct Failure {
    /// The closed reason.
    pub reason: Reason,
    /// Whether the function may have run.
    pub dispatched: Dispatched,
    /// Who says so.
    pub component: Component,
    /// Text for people; at most 1 KiB on the wire, never a payload or a token.
    pub detail: String,
    /// With [`Reason::Busy`]: how long the running call may still take.
    pub busy_at_most: Option<Duration>,
}

impl Failure {
    /// A failure with what is usual for its reason.
    #[must_use]
    pub fn new(reason: Reason, detail: impl Into<String>) -> Self {
        let (dispatched, component) = reason.usually();
        Self {
            reason,
            dispatched,
            component,
            detail: detail.into(),
            busy_at_most: None,
        }
    }

    /// Replaces the usual `dispatched`.
    #[must_use]
    pub fn dispatched(mut self, dispatched: Dispatched) -> Self {
        self.dispatched = dispatched;
        self
    }

    /// Replaces the usual component.
    #[must_use]
    pub fn by(mut self, component: Component) -> Self {
        self.component = component;
        self
    }

    /// Says how long the running call may still take (C-3.4).
    #[must_use]
    pub fn busy_at_most(mut self, left: Duration) -> Self {
        self.busy_at_most = Some(left);
        self
    }

    /// The gRPC status that carries this failure.
    #[must_use]
    pub fn to_status(&self) -> Status {
        let mut metadata = HashMap::from([
            (DISPATCHED.to_owned(), self.dispatched.as_str().to_owned()),
            (COMPONENT.to_owned(), self.component.as_str().to_owned()),
        ]);
        if let Some(left) = self.busy_at_most {
            metadata.insert(BUSY_AT_MOST_MILLIS.to_owned(), left.as_millis().to_string());
        }
        Status::with_error_details(
            self.reason.code(),
            clip(&self.detail, limits::DETAIL_BYTES),
            ErrorDetails::with_error_info(self.reason.as_str(), DOMAIN, metadata),
        )
    }

    /// Reads an answer; `None` when the status carries none of ours, which means
    /// that a transport or a custom server made it up.
    ///
    /// A reason this version does not know (one minor version of skew is
    /// supported, C-9) becomes the nearest by its code, with the peer's word on
    /// `dispatched`.
    #[must_use]
    pub fn from_status(status: &Status) -> Option<Self> {
        let info = status
            .get_details_error_info()
            .filter(|info| info.domain == DOMAIN)?;
        let reason = Reason::parse(&info.reason).unwrap_or_else(|| nearest(status.code()));
        let (_, component) = reason.usually();
        let word = |key: &str| info.metadata.get(key).map(String::as_str);
        Some(Self {
            reason,
            dispatched: word(DISPATCHED)
                .and_then(Dispatched::parse)
                .unwrap_or(Dispatched::Unknown),
            component: word(COMPONENT).and_then(Component::parse).unwrap_or(component),
            detail: clip(status.message(), limits::DETAIL_BYTES),
            busy_at_most: word(BUSY_AT_MOST_MILLIS)
                .and_then(|millis| millis.parse().ok())
                .map(Duration::from_millis),
        })
    }

    /// What runtimed makes of a status of the Pod-local server: ours as it is, a
    /// custom server's bare code by the table of C-5.5. `None` when the transport
    /// made the status up, so that its code means nothing.
    #[must_use]
    pub fn from_server_status(status: &Status) -> Option<Self> {
        if let Some(failure) = Self::from_status(status) {
            return Some(failure);
        }
        if status.source().is_some() {
            return None;
        }
        Some(Self::new(
            nearest(status.code()),
            clip(status.message(), limits::DETAIL_BYTES),
        ))
    }
}

/// The meaning of a bare code of C-5.5.
fn nearest(code: Code) -> Reason {
    match code {
        Code::ResourceExhausted => Reason::Busy,
        Code::FailedPrecondition => Reason::StaleRegistration,
        Code::Unavailable => Reason::ServerUnavailable,
        Code::NotFound => Reason::RegistrationNotFound,
        Code::AlreadyExists => Reason::RegistrationConflict,
        Code::InvalidArgument => Reason::InvalidPayload,
        Code::Unauthenticated => Reason::Unauthenticated,
        Code::PermissionDenied => Reason::PermissionDenied,
        Code::DeadlineExceeded => Reason::DeadlineExceeded,
        Code::Cancelled => Reason::Cancelled,
        Code::Unknown => Reason::HandlerError,
        Code::Aborted => Reason::WorkerExited,
        Code::OutOfRange => Reason::InvalidOutput,
        Code::Unimplemented => Reason::FunctionsUnsupported,
        Code::Ok | Code::Internal | Code::DataLoss => Reason::RuntimeServerError,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_failure_survives_the_wire() {
        for &reason in Reason::ALL {
            for dispatched in [Dispatched::No, Dispatched::Yes, Dispatched::Unknown] {
                let mut failure = Failure::new(reason, "because")
                    .dispatched(dispatched)
                    .by(Component::Gateway);
                if reason == Reason::Busy {
                    failure = failure.busy_at_most(Duration::from_millis(1500));
                }
                assert_eq!(Failure::from_status(&failure.to_status()), Some(failure));
            }
        }
    }

    #[test]
    fn a_bare_status_is_no_answer_on_the_hop() {
        for code in [
            Code::Unavailable,
            Code::ResourceExhausted,
            Code::OutOfRange,
            Code::Unknown,
        ] {
            assert_eq!(Failure::from_status(&Status::new(code, "made up")), None);
        }
        let foreign = Status::with_error_details(
            Code::Unavailable,
            "made up",
            ErrorDetails::with_error_info("Busy", "example.com", HashMap::new()),
        );
        assert_eq!(Failure::from_status(&foreign), None);
    }

    #[test]
    fn a_custom_servers_bare_code_keeps_its_meaning_inside_the_pod() {
        let busy = Failure::from_server_status(&Status::resource_exhausted("one at a time")).unwrap();
        assert_eq!((busy.reason, busy.dispatched), (Reason::Busy, Dispatched::No));
        let raised = Failure::from_server_status(&Status::unknown("boom")).unwrap();
        assert_eq!(
            (raised.reason, raised.dispatched),
            (Reason::HandlerError, Dispatched::Yes)
        );
    }

    #[test]
    fn an_unknown_reason_of_a_newer_peer_keeps_its_dispatched() {
        let newer = Status::with_error_details(
            Code::Aborted,
            "text",
            ErrorDetails::with_error_info(
                "SomethingNew",
                DOMAIN,
                HashMap::from([(DISPATCHED.to_owned(), "no".to_owned())]),
            ),
        );
        let read = Failure::from_status(&newer).unwrap();
        assert_eq!(
            (read.reason, read.dispatched),
            (Reason::WorkerExited, Dispatched::No)
        );
    }

    #[test]
    fn a_long_detail_is_cut_before_it_travels() {
        let failure = Failure::new(Reason::HandlerError, "é".repeat(4096));
        assert!(failure.to_status().message().len() <= limits::DETAIL_BYTES);
    }
}
