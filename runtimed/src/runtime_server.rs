//! Client of the Pod-local Runtime Server (C-5), over a Unix socket or the Pod's loopback.
//!
//! Everything about the server's statuses ends here: what comes out is an answer, or that there was
//! none.

use std::{
    error::Error as StdError,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use kruntimes_api::keys::RunUid;
use kruntimes_peer::{never_sent, unary::Field};
use kruntimes_proto::{
    executor::{
        FunctionRegistration, FunctionRegistrationState, FunctionStatusRequest, InvokeFunctionRequest,
        InvokeFunctionResponse, RegisterFunctionRequest, UnregisterFunctionRequest,
        function_runtime_client::FunctionRuntimeClient,
    },
    failure::{Component, Dispatched, Failure, Reason},
    frame::{self, Framed, INVOKE_FUNCTION},
    hop,
    ids::RegistrationId,
    limits,
};
use kruntimes_trace::{Trace, Tracer, rpc::Rpc};
use prost::Message as _;
use tokio::time::Instant;
use tonic::{Code, ConnectError, Request, Status};

use crate::{
    server_channel::{ServerAddress, ServerChannel},
    spans,
};

/// Status and unregistration of what does not run are answered from memory.
const QUICK: Duration = Duration::from_secs(5);

/// How much earlier than ours a server's clock of a call may run out: the time travels in whole
/// milliseconds.
const SAME_TIME: Duration = Duration::from_millis(10);

/// How much longer than its deadline the server gets to answer that the deadline passed.
const SLACK: Duration = Duration::from_millis(500);

/// A UID that no Run has, to ask the server whether it knows functions at all.
const NOBODY: &str = "00000000-0000-0000-0000-000000000000";

/// What a caller is told instead of what the function raised.
const RAISED: &str = "the function raised an error";

/// The server. Clones share one connection, which is made when needed and again when lost.
#[derive(Debug, Clone)]
pub struct RuntimeServer {
    channel: ServerChannel,
    client: FunctionRuntimeClient<ServerChannel>,
    /// When it last answered anything.
    answered: Arc<Mutex<Option<Instant>>>,
    expose_errors: bool,
    tracer: Tracer,
}

/// What the server says of a registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observed {
    /// Whether it can be called.
    pub state: FunctionRegistrationState,
    /// Running calls.
    pub in_flight: i32,
    /// Nanoseconds since 1970, by the server's clock, which is the node's.
    pub last_activity_unix_nano: i64,
    /// Why it failed, at most 4 KiB.
    pub fatal_error: String,
}

/// An output, and how long the handler took by the server's own clock.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The message.
    pub response: InvokeFunctionResponse,
    /// Microseconds, as the server wrote them.
    pub handler_us: Option<u64>,
}

/// A call without success.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallFailed {
    /// What the caller is told.
    pub failure: Failure,
    /// The server has said so itself, or never got the call: it does not run it any more.
    pub over: bool,
    /// What the function raised, when the caller is not shown it.
    pub hidden: Option<String>,
}

/// A lifecycle call without success.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServerError {
    /// The server said so.
    #[error("the Runtime Server answered {0}")]
    Answered(Failure),
    /// It did not answer, or not in time; what it did is unknown.
    #[error("the Runtime Server does not answer: {0}")]
    Silent(String),
}

/// Whether a server says with this that it does not have the registration.
#[must_use]
pub fn says_gone(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::RegistrationNotFound | Reason::StaleRegistration | Reason::FunctionsUnsupported
    )
}

// === impl ServerError ===

impl ServerError {
    fn of(status: &Status) -> Self {
        match Failure::from_server_status(status) {
            Some(failure) => Self::Answered(failure),
            None => Self::Silent(limits::clip(&chain(status), limits::DETAIL_BYTES)),
        }
    }

    /// The server's reason, if it gave one.
    #[must_use]
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Self::Answered(failure) => Some(failure.reason),
            Self::Silent(_) => None,
        }
    }
}

// === impl CallFailed ===

impl CallFailed {
    fn new(failure: Failure, over: bool) -> Self {
        Self {
            failure,
            over,
            hidden: None,
        }
    }
}

// === impl RuntimeServer ===

impl RuntimeServer {
    /// Connects when first used.
    #[must_use]
    pub fn connect_lazy(address: &ServerAddress) -> Self {
        Self::over(ServerChannel::new(address.clone()))
    }

    /// Over that channel.
    #[must_use]
    pub fn over(channel: ServerChannel) -> Self {
        Self {
            channel: channel.clone(),
            client: FunctionRuntimeClient::new(channel)
                .max_decoding_message_size(limits::MESSAGE_BYTES)
                .max_encoding_message_size(limits::MESSAGE_BYTES),
            answered: Arc::default(),
            expose_errors: false,
            tracer: Tracer::default(),
        }
    }

    /// Tells this tracer of calls.
    #[must_use]
    pub fn tracing(mut self, tracer: Tracer) -> Self {
        self.tracer = tracer;
        self
    }

    /// Whether callers are shown the text of a bare Unknown: frameworks put there what was raised. Servers
    /// that send ErrorInfo decide that themselves (C-3.5).
    #[must_use]
    pub fn exposing_errors(mut self, expose: bool) -> Self {
        self.expose_errors = expose;
        self
    }

    /// When the server last answered anything, to a call or a question.
    #[must_use]
    pub fn last_answer(&self) -> Option<Instant> {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the server has the service for functions (C-5.7).
    ///
    /// # Errors
    /// When it cannot be asked.
    pub async fn supports_functions(&self) -> Result<bool, ServerError> {
        let id = RegistrationId::generate();
        let answer = self.raw_status(NOBODY, &id).await;
        match answer.as_ref().map_err(ServerError::reason) {
            Err(Some(Reason::FunctionsUnsupported)) => Ok(false),
            // Any word about a registration that cannot exist shows that it keeps some.
            Ok(_) | Err(Some(Reason::RegistrationNotFound | Reason::StaleRegistration)) => Ok(true),
            Err(_) => answer.map(|_| true),
        }
    }

    /// Makes, or finds again, a registration; waits at most `wait` for the answer.
    ///
    /// # Errors
    /// When the server refuses or does not answer.
    pub async fn register(
        &self,
        message: RegisterFunctionRequest,
        wait: Duration,
    ) -> Result<(RegistrationId, FunctionRegistrationState), ServerError> {
        let mut request = Request::new(message);
        request.set_timeout(wait);
        let call = async {
            let mut client = self.client.clone();
            client.register_function(request).await
        };
        let response = self.within(wait, call).await?;
        let id = response
            .registration
            .as_ref()
            .map_or("", |it| it.registration_id.as_str());
        let id = RegistrationId::parse(id.as_bytes()).map_err(|error| {
            ServerError::Answered(Failure::new(Reason::RuntimeServerError, error.to_string()))
        })?;
        Ok((id, response.state()))
    }

    /// Reads the state of a registration.
    ///
    /// # Errors
    /// When the server does not know it or does not answer.
    pub async fn status(&self, run: RunUid, id: &RegistrationId) -> Result<Observed, ServerError> {
        self.raw_status(&run.to_string(), id).await
    }

    async fn raw_status(&self, run: &str, id: &RegistrationId) -> Result<Observed, ServerError> {
        let mut request = Request::new(FunctionStatusRequest {
            registration: Some(FunctionRegistration {
                run_uid: run.to_owned(),
                registration_id: id.as_str().to_owned(),
            }),
        });
        request.set_timeout(QUICK);
        let mut client = self.client.clone();
        let response = self.within(QUICK, client.function_status(request)).await?;
        Ok(Observed {
            state: response.state(),
            in_flight: response.in_flight,
            last_activity_unix_nano: response.last_activity_unix_nano,
            fatal_error: limits::clip(&response.fatal_error, limits::FATAL_ERROR_BYTES),
        })
    }

    /// Ends a registration: drains at most `drain`, or cancels at once when that is `None`. One that
    /// is not there, or was superseded, is a success.
    ///
    /// # Errors
    /// When the server refuses or does not answer.
    pub async fn unregister(
        &self,
        run: RunUid,
        id: &RegistrationId,
        drain: Option<Duration>,
    ) -> Result<(), ServerError> {
        let drain_millis = drain.map_or(0, |drain| drain.min(limits::MAX_DRAIN).as_millis());
        let mut request = Request::new(UnregisterFunctionRequest {
            registration: Some(FunctionRegistration {
                run_uid: run.to_string(),
                registration_id: id.as_str().to_owned(),
            }),
            cancel_in_flight: drain.is_none(),
            drain_timeout_millis: i64::try_from(drain_millis).unwrap_or(i64::MAX),
        });
        // Cancelling takes a moment too: processes are ended.
        let wait = drain.unwrap_or_default() + QUICK;
        request.set_timeout(wait);
        let mut client = self.client.clone();
        match self.within(wait, client.unregister_function(request)).await {
            Ok(_) => Ok(()),
            Err(ServerError::Answered(failure)) if says_gone(failure.reason) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Runs one call. Dropping the future resets the stream: the server then does what the Runtime
    /// wants done when a caller is gone.
    ///
    /// # Errors
    /// What the caller is told, and whether the server may still run it.
    pub async fn invoke(
        &self,
        message: InvokeFunctionRequest,
        timeout: Duration,
        trace: &Trace,
    ) -> Result<Answer, CallFailed> {
        let mut trace = trace.clone();
        let span = Rpc::client(&self.tracer, INVOKE_FUNCTION, &mut trace);
        let result = self.send(message, timeout, &trace).await;
        spans::end(
            span,
            result.as_ref().map(|_| ()).map_err(|failed| &failed.failure),
        );
        result
    }

    async fn send(
        &self,
        mut message: InvokeFunctionRequest,
        timeout: Duration,
        trace: &Trace,
    ) -> Result<Answer, CallFailed> {
        let input = std::mem::take(&mut message.input);
        let registration = message.registration.as_ref();
        let fields = frame::Fields {
            run_uid: registration.map_or("", |it| &it.run_uid),
            registration_id: registration.map_or("", |it| &it.registration_id),
            invocation_id: &message.invocation_id,
            content_type: &message.content_type,
            timeout_millis: message.timeout_millis,
        };
        let Framed { head, tail } = frame::invoke_request(fields, input);
        let sent = Instant::now();
        let wait = timeout + SLACK;
        let grpc_timeout = grpc_timeout(wait);
        let mut metadata = vec![Field::once("grpc-timeout", grpc_timeout.as_bytes())];
        for (name, value) in [
            (hop::TRACEPARENT, trace.traceparent()),
            (hop::TRACESTATE, trace.tracestate()),
        ] {
            metadata.extend(value.map(|value| Field::once(name, value.as_bytes())));
        }
        let call = async {
            let channel = self.channel.get().await?;
            channel
                .unary(INVOKE_FUNCTION, &metadata, [head, tail], limits::MESSAGE_BYTES)
                .await
        };
        let Ok(answer) = tokio::time::timeout(wait, call).await else {
            let failure = Failure::new(
                Reason::DeadlineExceeded,
                "the Runtime Server did not keep the deadline of the call",
            );
            return Err(CallFailed::new(failure, false));
        };
        let late = sent.elapsed() + SAME_TIME >= timeout;
        if answer
            .as_ref()
            .err()
            .is_none_or(|status| Failure::from_server_status(status).is_some())
        {
            self.heard();
        }
        let answer = answer.and_then(|answer| {
            let handler_us = answer.metadata.get(hop::HANDLER_US);
            let handler_us = handler_us.and_then(|value| value.to_str().ok()?.parse().ok());
            let response = InvokeFunctionResponse::decode(answer.message)
                .map_err(|error| Status::internal(error.to_string()))?;
            Ok(Answer { response, handler_us })
        });
        answer.map_err(|status| call_failed(&status, late, self.expose_errors))
    }

    async fn within<T>(
        &self,
        wait: Duration,
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, ServerError> {
        let answer = match tokio::time::timeout(wait, call).await {
            Ok(Ok(response)) => Ok(response.into_inner()),
            // Also made by the transport, on our side, out of the timeout of the request.
            Ok(Err(status))
                if status.code() == Code::DeadlineExceeded && Failure::from_status(&status).is_none() =>
            {
                Err(ServerError::Silent(format!("within {wait:?}")))
            }
            Ok(Err(status)) => Err(ServerError::of(&status)),
            Err(_) => Err(ServerError::Silent(format!("within {wait:?}"))),
        };
        if !matches!(answer, Err(ServerError::Silent(_))) {
            self.heard();
        }
        answer
    }

    fn heard(&self) {
        *self.answered.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
}

/// What a status of InvokeFunction means; `late`: it came when the time of the call was over.
fn call_failed(status: &Status, late: bool, expose_errors: bool) -> CallFailed {
    if let Some(failure) = Failure::from_server_status(status) {
        let made_up = Failure::from_status(status).is_none();
        if made_up && failure.reason == Reason::HandlerError && !expose_errors {
            return CallFailed {
                hidden: Some(failure.detail),
                ..CallFailed::new(Failure::new(Reason::HandlerError, RAISED), true)
            };
        }
        let failure = match failure.reason {
            // The gateway authenticates, not a server: a caller must not be told to log in again.
            Reason::Unauthenticated | Reason::PermissionDenied | Reason::AuthorizationUnavailable => {
                Failure {
                    reason: Reason::RuntimeServerError,
                    dispatched: Dispatched::Unknown,
                    ..failure
                }
            }
            // Many frameworks name their own deadline so.
            Reason::Cancelled if made_up && late => {
                Failure::new(Reason::DeadlineExceeded, "the deadline of the call passed")
            }
            _ => failure,
        };
        return CallFailed::new(failure, true);
    }
    if never_connected(status) {
        let failure = Failure::new(Reason::ServerUnavailable, "the Runtime Server cannot be reached");
        return CallFailed::new(failure, true);
    }
    let failure = if status.code() == Code::DeadlineExceeded || is_timeout(status) {
        Failure::new(Reason::DeadlineExceeded, "the deadline of the call passed")
    } else {
        tracing::warn!(
            error = chain(status),
            "a call broke off on its way to the Runtime Server"
        );
        Failure::new(
            Reason::OutcomeUnknown,
            "the connection to the Runtime Server broke during the call",
        )
        .by(Component::RuntimeServer)
    };
    CallFailed::new(failure, false)
}

/// A duration as gRPC writes it: at most eight digits, and a unit.
fn grpc_timeout(wait: Duration) -> String {
    match wait.as_millis() {
        millis @ ..100_000_000 => format!("{millis}m"),
        _ => format!("{}S", wait.as_secs().min(99_999_999)),
    }
}

fn never_connected(status: &Status) -> bool {
    never_sent(status) || causes(status).any(|error| error.is::<ConnectError>())
}

fn is_timeout(status: &Status) -> bool {
    causes(status).any(|error| error.is::<tonic::TimeoutExpired>())
}

fn causes(status: &Status) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    let mut next = status.source();
    std::iter::from_fn(move || {
        let error = next?;
        next = error.source();
        Some(error)
    })
}

fn chain(status: &Status) -> String {
    let mut text = format!("{:?}: {}", status.code(), status.message());
    for error in causes(status) {
        text.push_str(": ");
        text.push_str(&error.to_string());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// gRPC over HTTP/2, "Timeout": at most eight digits.
    #[test]
    fn a_deadline_is_written_as_grpc_does() {
        let text = |millis| grpc_timeout(Duration::from_millis(millis));
        assert_eq!(text(0), "0m");
        assert_eq!(text(30_500), "30500m");
        assert_eq!(text(99_999_999), "99999999m");
        assert_eq!(text(100_000_000), "100000S");
        assert_eq!(grpc_timeout(Duration::MAX), "99999999S");
    }

    #[tokio::test]
    async fn a_server_that_is_not_there_got_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let address = format!("unix://{}", dir.path().join("none.sock").display());
        let server = RuntimeServer::connect_lazy(&address.parse().unwrap());
        let failed = server
            .invoke(
                InvokeFunctionRequest::default(),
                Duration::from_secs(1),
                &Trace::default(),
            )
            .await
            .unwrap_err();
        assert_eq!(
            (failed.failure.reason, failed.failure.dispatched, failed.over),
            (Reason::ServerUnavailable, Dispatched::No, true)
        );
        assert!(matches!(
            server.supports_functions().await,
            Err(ServerError::Silent(_))
        ));
    }

    #[test]
    fn a_server_cannot_send_the_caller_to_the_login() {
        let failure = call_failed(&Status::unauthenticated("who?"), false, false).failure;
        assert_eq!(
            (failure.reason, failure.dispatched),
            (Reason::RuntimeServerError, Dispatched::Unknown)
        );
    }

    /// C-3.5: what a function raised is for callers only with `exposeErrors`, whoever serves it.
    #[test]
    fn what_was_raised_is_shown_only_where_the_runtime_says_so() {
        let bare = Status::unknown("KeyError: secret");
        let hidden = call_failed(&bare, false, false);
        assert_eq!(hidden.failure, Failure::new(Reason::HandlerError, RAISED));
        assert_eq!(hidden.hidden.as_deref(), Some("KeyError: secret"), "for the log");
        let shown = call_failed(&bare, false, true);
        assert_eq!(
            (shown.failure.detail.as_str(), shown.hidden),
            ("KeyError: secret", None)
        );
        let said = Failure::new(Reason::HandlerError, "what the server chose to say");
        assert_eq!(call_failed(&said.to_status(), false, false).failure, said);
    }

    /// C-3.5: 504 at the deadline, whatever a custom server's framework calls it.
    #[test]
    fn a_bare_cancelled_at_the_deadline_is_the_deadline() {
        let bare = Status::cancelled("context canceled");
        let ours = Failure::new(Reason::Cancelled, "unregistered").to_status();
        for (status, late, reason) in [
            (&bare, true, Reason::DeadlineExceeded),
            (&bare, false, Reason::Cancelled),
            (&ours, true, Reason::Cancelled),
        ] {
            let failed = call_failed(status, late, false);
            assert_eq!(
                (failed.failure.reason, failed.failure.dispatched, failed.over),
                (reason, Dispatched::Yes, true)
            );
        }
    }
}
