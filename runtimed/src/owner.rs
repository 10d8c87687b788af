//! What the gateway asks of this Pod besides running functions: cancel one call, explain one function
//! (C-3.10, C-3.11). Same fence and same review as for a call; nothing of it reaches the server's code.

use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use kruntimes_proto::{
    executor::FunctionRegistrationState,
    failure::{Failure, Reason},
    owner::{
        CancelRequest, CancelResponse, ExplainRequest, ExplainResponse, Registration, RunningCall, Told,
        owner_server::Owner,
    },
};
use kruntimes_trace::{Trace, rpc::Rpc};
use tokio::time::{Instant, timeout};
use tonic::{Request, Response, Status, metadata::MetadataMap};

use crate::{
    caller::Wish,
    held::{Entry, Registered},
    invoker::Invoker,
    request,
    runtime_server::{Observed, ServerError},
    spans,
};

/// How long a cancellation waits for the end of the call: less than a gateway waits for its answer (5 s).
const ENDS_WITHIN: Duration = Duration::from_secs(4);
/// How long an explanation waits for the Runtime Server.
const ASKED: Duration = Duration::from_secs(1);

/// Serves `kruntimes.owner.v1.Owner`. Clones share everything.
#[derive(Clone)]
pub struct OwnerService {
    invoker: Invoker,
    wall: fn() -> Timestamp,
}

// === impl OwnerService ===

impl OwnerService {
    /// About what `invoker` serves.
    #[must_use]
    pub fn new(invoker: Invoker, wall: fn() -> Timestamp) -> Self {
        Self { invoker, wall }
    }

    /// Ends a running call, and returns when it has ended.
    ///
    /// # Errors
    /// What the caller is told.
    pub async fn cancel(&self, request: Request<CancelRequest>) -> Result<CancelResponse, Failure> {
        let _in_flight = self.invoker.drain.guard();
        let (metadata, _, message) = request.into_parts();
        let expected = request::expected(&metadata, &message.run_uid)?;
        let id = request::invocation_id(&message.invocation_id)?;
        let entry = self.invoker.entry(Wish::Cancel, &metadata, &expected).await?;
        let Some(running) = entry.slot.cancel(&id) else {
            return Ok(CancelResponse { was_running: false });
        };
        tracing::info!(run = %entry.key, invocation_id = id.as_str(), "a call is cancelled on request");
        let _ = timeout(ENDS_WITHIN, entry.slot.given_back(&running)).await;
        Ok(CancelResponse { was_running: true })
    }

    /// Tells whether a call made now would be let through.
    ///
    /// # Errors
    /// What the caller is told.
    pub async fn explain(&self, request: Request<ExplainRequest>) -> Result<ExplainResponse, Failure> {
        let _in_flight = self.invoker.drain.guard();
        let (metadata, _, message) = request.into_parts();
        let expected = request::expected(&metadata, &message.run_uid)?;
        let entry = self.invoker.entry(Wish::Invoke, &metadata, &expected).await?;
        let registered = entry.registered();
        let observed = match &registered {
            Some(registered) => Some(self.observe(&entry, registered).await),
            None => None,
        };
        let now = Instant::now();
        let refusal = self.refusal(&entry, observed.as_ref(), now);
        let (reason, detail) = match &refusal {
            Some(failure) => (failure.reason.as_str(), failure.detail.as_str()),
            None => ("", "a call would be let through"),
        };
        let trouble = entry.trouble();
        let told = |(reason, at): (Reason, Instant)| Told {
            reason: reason.as_str().to_owned(),
            millis_ago: millis(now.saturating_duration_since(at)),
        };
        Ok(ExplainResponse {
            run_uid: message.run_uid,
            attempt: entry.attempt.get(),
            state: entry.gate().as_str().to_owned(),
            callable: refusal.is_none(),
            reason: reason.to_owned(),
            detail: detail.to_owned(),
            registration: registered.map(|it| self.registration(&it, observed, now)),
            running: entry.slot.running().map(|running| RunningCall {
                invocation_id: running.id.as_str().to_owned(),
                running_millis: millis(now.saturating_duration_since(running.since)),
                at_most_millis: millis(running.until.saturating_duration_since(now)),
                cancelled: running.cancelled,
            }),
            last_refusal: trouble.refused.map(told),
            last_failure: trouble.failed.map(told),
            heard_millis_ago: self.invoker.contact.silence(now).map(millis),
            life_left_millis: entry.ends.map(|ends| millis(ends.saturating_duration_since(now))),
        })
    }

    fn span(&self, method: &'static str, metadata: &MetadataMap) -> Rpc {
        Rpc::server(&self.invoker.tracer, method, &mut Trace::of(metadata))
    }

    async fn observe(&self, entry: &Entry, registered: &Registered) -> Result<Observed, ServerError> {
        let asked = self.invoker.server.status(entry.key.uid, &registered.id);
        timeout(ASKED, asked)
            .await
            .unwrap_or_else(|_| Err(ServerError::Silent(format!("within {ASKED:?}"))))
    }

    /// What a call made now would be told, in the order in which a call is checked.
    fn refusal(
        &self,
        entry: &Entry,
        observed: Option<&Result<Observed, ServerError>>,
        now: Instant,
    ) -> Option<Failure> {
        if let Err(failure) = self.invoker.heard(now) {
            return Some(failure);
        }
        if let Err(failure) = entry.callable() {
            return Some(failure);
        }
        if let Err(failure) = request::deadline(0, entry.ends, now) {
            return Some(failure);
        }
        if !entry.slot.is_free() {
            return Some(Failure::new(Reason::Busy, "a call of this function is running"));
        }
        match observed? {
            Ok(observed) if observed.state == FunctionRegistrationState::Ready => None,
            Ok(_) => Some(Failure::new(
                Reason::Recovering,
                "the Runtime Server does not have the function ready",
            )),
            Err(error) => Some(Failure::new(Reason::ServerUnavailable, error.to_string())),
        }
    }

    fn registration(
        &self,
        registered: &Registered,
        observed: Option<Result<Observed, ServerError>>,
        now: Instant,
    ) -> Registration {
        let held_millis = millis(now.saturating_duration_since(registered.since));
        let Some(Ok(observed)) = observed else {
            return Registration {
                held_millis,
                ..Registration::default()
            };
        };
        let wall = i64::try_from((self.wall)().as_nanosecond()).unwrap_or(i64::MAX);
        let idle = wall.saturating_sub(observed.last_activity_unix_nano).max(0);
        Registration {
            held_millis,
            answers: true,
            state: word(observed.state).to_owned(),
            in_flight: observed.in_flight,
            idle_millis: idle / 1_000_000,
            fatal_error: observed.fatal_error,
        }
    }
}

#[async_trait]
impl Owner for OwnerService {
    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<CancelResponse>, Status> {
        let span = self.span(spans::CANCEL, request.metadata());
        let answer = Box::pin(Self::cancel(self, request)).await;
        spans::end(span, answer.as_ref().map(|_| ()));
        answer.map(Response::new).map_err(|failure| failure.to_status())
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        let span = self.span(spans::EXPLAIN, request.metadata());
        let answer = Box::pin(Self::explain(self, request)).await;
        spans::end(span, answer.as_ref().map(|_| ()));
        answer.map(Response::new).map_err(|failure| failure.to_status())
    }
}

fn word(state: FunctionRegistrationState) -> &'static str {
    match state {
        FunctionRegistrationState::Unspecified => "UNSPECIFIED",
        FunctionRegistrationState::Registering => "REGISTERING",
        FunctionRegistrationState::Ready => "READY",
        FunctionRegistrationState::Draining => "DRAINING",
        FunctionRegistrationState::Failed => "FAILED",
    }
}

fn millis(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}
