//! An invocation, or a question, and its route → one RPC, with deadline and fence.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use kruntimes_peer::{
    UnaryChannel, never_sent,
    unary::{Field, message},
};
use kruntimes_proto::{
    executor::InvokeFunctionResponse,
    failure::{Failure, Reason},
    frame::{self, Framed, INVOKE_FUNCTION},
    hop,
    ids::InvocationId,
    limits,
    owner::{CancelRequest, ExplainRequest, ExplainResponse, owner_client::OwnerClient},
};
use kruntimes_trace::{Trace, Tracer};
use prost::Message as _;
use tokio::time::Instant;
use tonic::{Code, Request, Status, metadata::MetadataMap};

use super::{Answer, Ask, Call, Hop, HopError, channels::Channels};
use crate::{
    reply::Output,
    request::Subject,
    routes::{Owner, Route},
    spans::{self, HopSpan},
};

/// The owner ends a call at its deadline and says so; only an owner that says nothing is given up, this much
/// later.
const PATIENCE: Duration = Duration::from_millis(250);

/// Whether the owner gets the caller's token, to authorize again (C-3.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum CallerCredential {
    /// It does.
    Forward,
    /// It does not, and relies on this gateway.
    Omit,
}

/// Calls owners over their channels.
#[derive(Debug)]
pub struct Client {
    channels: std::sync::Arc<Channels>,
    credential: CallerCredential,
    tracer: Tracer,
}

/// How long an owner may take to answer a question; it asks its Runtime Server at most.
const QUESTION: Duration = Duration::from_secs(5);

impl Client {
    /// Uses `channels`.
    #[must_use]
    pub fn new(channels: std::sync::Arc<Channels>, credential: CallerCredential) -> Self {
        Self {
            channels,
            credential,
            tracer: Tracer::default(),
        }
    }

    /// Tells this tracer of calls.
    #[must_use]
    pub fn tracing(mut self, tracer: Tracer) -> Self {
        self.tracer = tracer;
        self
    }

    /// One call of the owner, whatever method. A pooled connection may be over without anybody having noticed.
    /// Then nothing was sent, and a new one is made; that is still one attempt at the same owner.
    async fn once<T, F>(
        &self,
        owner: &Owner,
        now: Instant,
        deadline: Instant,
        rpc: impl Fn(UnaryChannel, Duration) -> F + Send + Sync,
    ) -> Result<T, HopError>
    where
        F: Future<Output = Result<T, Status>> + Send,
    {
        // A loop, so that there is room for one attempt only in the call's memory.
        let mut now = now;
        for _ in 0..2 {
            if let Ok(result) = self.attempt(owner, now, deadline, &rpc).await {
                return result;
            }
            now = Instant::now();
        }
        Err(HopError::NotSent("the connection ends at once".to_owned()))
    }

    async fn attempt<T, F>(
        &self,
        owner: &Owner,
        now: Instant,
        deadline: Instant,
        rpc: &(impl Fn(UnaryChannel, Duration) -> F + Send + Sync),
    ) -> Result<Result<T, HopError>, NeverSent>
    where
        F: Future<Output = Result<T, Status>> + Send,
    {
        let (lease, now) = match self.channels.get(owner, now, deadline).await {
            Ok(got) => got,
            Err(error) => return Ok(Err(error)),
        };
        let left = deadline.saturating_duration_since(now);
        if left.is_zero() {
            return Ok(Err(HopError::TooLate));
        }
        match pingora_timeout::timeout(left + PATIENCE, rpc(lease.channel(), left)).await {
            Ok(Ok(answer)) => Ok(Ok(answer)),
            Ok(Err(status)) if never_sent(&status) => {
                lease.discard();
                Err(NeverSent)
            }
            Ok(Err(status)) => {
                if status_is_local(&status) {
                    // The connection is in doubt; the next call gets another.
                    lease.discard();
                }
                Ok(Err(refusal(&status)))
            }
            Err(_) => {
                lease.doubt();
                Ok(Err(HopError::Deadline))
            }
        }
    }

    /// The metadata that every request on the hop carries (contract 4), but for the attempt, which is `attempt`.
    fn metadata<'a>(
        &self,
        subject: &'a Subject,
        trace: &'a Trace,
        route: &'a Route,
        attempt: &'a str,
    ) -> Vec<Field<'a>> {
        let mut metadata = Vec::with_capacity(6);
        metadata.push(Field::kept(hop::HOP, hop::HOP_VALUE));
        metadata.push(Field::kept(hop::POD_UID, route.pod_uid.as_str()));
        metadata.push(Field::kept(hop::ATTEMPT, attempt));
        if self.credential == CallerCredential::Forward {
            metadata.push(Field::secret(
                hop::AUTHORIZATION,
                subject.bearer.header().as_bytes(),
            ));
        }
        for (name, value) in [
            (hop::TRACEPARENT, trace.traceparent()),
            (hop::TRACESTATE, trace.tracestate()),
        ] {
            if let Some(value) = value {
                metadata.push(Field::once(name, value.as_bytes()));
            }
        }
        metadata
    }

    /// A question with that metadata.
    fn marked<T>(&self, subject: &Subject, trace: &Trace, route: &Route, message: T) -> Request<T> {
        let attempt = route.attempt.get().to_string();
        let mut headers = HeaderMap::new();
        for field in self.metadata(subject, trace, route, &attempt) {
            // What Kubernetes wrote is visible ASCII. What is not stays away, and the owner refuses the request.
            let name = HeaderName::from_bytes(field.name.as_bytes());
            if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(field.value)) {
                headers.insert(name, value);
            }
        }
        let mut request = Request::new(message);
        *request.metadata_mut() = MetadataMap::from_headers(headers);
        request
    }
}

impl Hop for Client {
    async fn call(&self, call: Call<'_>) -> Result<Answer, HopError> {
        let mut trace = call.invocation.subject.trace.clone();
        let span = HopSpan::begin(&self.tracer, INVOKE_FUNCTION, &mut trace, call.route);
        let rpc = |channel: UnaryChannel, left| {
            let Framed { head, tail } = invocation(&call, left);
            let attempt = call.route.attempt.get().to_string();
            let (subject, trace) = (&call.invocation.subject, &trace);
            async move {
                let metadata = self.metadata(subject, trace, call.route, &attempt);
                channel
                    .unary(INVOKE_FUNCTION, &metadata, [head, tail], limits::MESSAGE_BYTES)
                    .await
            }
        };
        let answered = self.once(&call.route.owner, call.now, call.deadline, rpc).await;
        span.end(answered.and_then(answer))
    }
}

impl Ask for Client {
    async fn cancel(
        &self,
        subject: &Subject,
        route: &Route,
        invocation: &InvocationId,
    ) -> Result<bool, HopError> {
        let mut trace = subject.trace.clone();
        let span = HopSpan::begin(&self.tracer, spans::CANCEL, &mut trace, route);
        let rpc = |channel, _left| {
            let message = CancelRequest {
                run_uid: subject.uid.to_string(),
                invocation_id: invocation.as_str().to_owned(),
            };
            let request = self.marked(subject, &trace, route, message);
            async move { OwnerClient::new(channel).cancel(request).await.map_err(older) }
        };
        let now = Instant::now();
        let response = span.end(self.once(&route.owner, now, now + QUESTION, rpc).await)?;
        Ok(response.into_inner().was_running)
    }

    async fn explain(&self, subject: &Subject, route: &Route) -> Result<ExplainResponse, HopError> {
        let mut trace = subject.trace.clone();
        let span = HopSpan::begin(&self.tracer, spans::EXPLAIN, &mut trace, route);
        let rpc = |channel, _left| {
            let message = ExplainRequest {
                run_uid: subject.uid.to_string(),
            };
            let request = self.marked(subject, &trace, route, message);
            async move { OwnerClient::new(channel).explain(request).await.map_err(older) }
        };
        let now = Instant::now();
        let response = span.end(self.once(&route.owner, now, now + QUESTION, rpc).await)?;
        Ok(response.into_inner())
    }
}

/// The connection was over before the call.
struct NeverSent;

fn invocation(call: &Call<'_>, left: Duration) -> Framed {
    let subject = &call.invocation.subject;
    let fields = frame::Fields {
        run_uid: &subject.uid.to_string(),
        registration_id: "",
        invocation_id: subject.id.as_str(),
        content_type: "application/json",
        // Zero would mean the server's default.
        timeout_millis: i64::try_from(left.as_millis()).unwrap_or(i64::MAX).max(1),
    };
    frame::invoke_request(fields, call.input.clone())
}

fn answer(answer: message::Answer) -> Result<Answer, HopError> {
    let handler = answer
        .metadata
        .get(hop::HANDLER_US)
        .and_then(|value| value.to_str().ok()?.parse().ok())
        .map(Duration::from_micros);
    let message = InvokeFunctionResponse::decode(answer.message)
        .map_err(|_| HopError::Unknown("the owner's answer is no message of this protocol".to_owned()))?;
    if message.output.len() > limits::OUTPUT_BYTES {
        return Err(HopError::BadAnswer("the output is over the limit"));
    }
    Ok(Answer {
        output: Output {
            body: message.output,
            content_type: message.content_type,
            outputs: message.outputs,
        },
        handler,
    })
}

/// Only a status with our ErrorInfo is an answer: transports invent codes of their own (C-3.5).
fn refusal(status: &Status) -> HopError {
    match Failure::from_status(status) {
        Some(failure) => HopError::Answered(failure),
        // The text may come from a peer; it goes to the log, not to the caller.
        None => {
            tracing::warn!(code = ?status.code(), text = limits::clip(status.message(), 256),
                "an owner's answer says nothing");
            HopError::Unknown(format!(
                "the connection to the owner failed ({:?})",
                status.code()
            ))
        }
    }
}

/// An owner of an older version does not know the service, and did nothing.
fn older(status: Status) -> Status {
    if status.code() == Code::Unimplemented && !status_is_local(&status) {
        Failure::new(Reason::BadHop, "the owner's version does not know this request").to_status()
    } else {
        status
    }
}

/// A status that this side made of a broken connection has a source; one that came over the wire has none.
fn status_is_local(status: &Status) -> bool {
    std::error::Error::source(status).is_some()
}
