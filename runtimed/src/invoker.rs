//! The hop's service: `executor.v1.FunctionRuntime/InvokeFunction` and nothing else (contract 4).
//!
//! hop mark → fence → caller → contact → gate → slot → Runtime Server → bounds → audit. Nothing here
//! reads or writes Kubernetes, except one access review when no answer is kept.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use kruntimes_api::keys::{Attempt, PodUid, RunUid};
use kruntimes_ops::drain::Drain;
use kruntimes_proto::{
    executor::{
        FunctionRegistration, FunctionStatusRequest, FunctionStatusResponse, InvokeFunctionRequest,
        InvokeFunctionResponse, RegisterFunctionRequest, RegisterFunctionResponse, UnregisterFunctionRequest,
        UnregisterFunctionResponse, function_runtime_server::FunctionRuntime,
    },
    failure::{Component, Dispatched, Failure, Reason},
    hop,
    ids::InvocationId,
    limits,
};
use tokio::time::Instant;
use tonic::{
    Request, Response, Status,
    metadata::{AsciiMetadataValue, MetadataMap},
};

use crate::{
    audit::Audit,
    bounds,
    caller::Callers,
    fence::{self, Expected},
    heartbeat::Contact,
    held::{Entry, Held},
    runtime_server::{Answer, RuntimeServer, Trace},
};

/// Serves calls; clones share everything.
#[derive(Clone)]
pub struct Invoker {
    /// This Pod.
    pub pod: PodUid,
    /// What it holds.
    pub held: Held,
    /// Who answers.
    pub server: RuntimeServer,
    /// Who may call.
    pub callers: Arc<dyn Callers>,
    /// Whether Kubernetes hears us.
    pub contact: Contact,
    /// Where each call is written down.
    pub audit: Audit,
    /// Counts running calls.
    pub drain: Drain,
}

/// A call whose form is right.
struct Call {
    expected: Expected,
    id: InvocationId,
    message: InvokeFunctionRequest,
}

// === impl Invoker ===

impl Invoker {
    /// One call, from its form to its audit line.
    ///
    /// # Errors
    /// What the caller is told.
    pub async fn serve(&self, request: Request<InvokeFunctionRequest>) -> Result<Answer, Failure> {
        let _in_flight = self.drain.guard();
        let arrived = Instant::now();
        let (metadata, _, message) = request.into_parts();
        let call = parse(&metadata, message)?;
        let line = self.audit.begin(call.expected.run, call.id.as_str());
        let result = self.call(&metadata, call, arrived).await;
        line.end(result.as_ref().map(|_| ()));
        result
    }

    async fn call(&self, metadata: &MetadataMap, call: Call, arrived: Instant) -> Result<Answer, Failure> {
        let entry = self.held.get(call.expected.run);
        fence::check(
            &call.expected,
            &self.pod,
            entry.as_ref().map(|entry| entry.attempt),
        )?;
        let Some(entry) = entry else {
            return Err(Failure::new(
                Reason::StaleRoute,
                "the Run is not held by this Pod",
            ));
        };
        self.callers.may_invoke(metadata, &entry.key).await?;
        bounds::check_request(&call.message)?;
        if self.contact.is_lost(Instant::now()) {
            return Err(Failure::new(
                Reason::OwnerIsolated,
                "this Pod has no contact to Kubernetes and refuses calls on its own",
            ));
        }
        let registration = entry.callable()?;
        // Asking Kubernetes was part of the caller's time: the gateway does not wait longer for it.
        let until = arrived + deadline(call.message.timeout_millis, entry.ends, arrived)?;
        let now = Instant::now();
        let timeout = until.saturating_duration_since(now);
        if timeout < Duration::from_millis(1) {
            return Err(Failure::new(
                Reason::DeadlineExceeded,
                "the time was over before the call began",
            )
            .dispatched(Dispatched::No)
            .by(Component::Runtimed));
        }
        let taken = match entry.slot.take(until) {
            Ok(taken) => taken,
            Err(busy) => {
                // Whoever ends the Run takes the slot first and closes the gate then.
                entry.callable()?;
                let left = busy.until.saturating_duration_since(now);
                return Err(
                    Failure::new(Reason::Busy, "a call of this function is running").busy_at_most(left)
                );
            }
        };
        // The gate may have closed, or opened for another registration, before the slot was ours.
        if entry.callable()? != registration {
            return Err(Failure::new(
                Reason::Recovering,
                "the function is being registered again",
            ));
        }
        let message = InvokeFunctionRequest {
            registration: Some(FunctionRegistration {
                run_uid: call.expected.run.to_string(),
                registration_id: registration.as_str().to_owned(),
            }),
            invocation_id: call.id.as_str().to_owned(),
            timeout_millis: i64::try_from(timeout.as_millis()).unwrap_or(i64::MAX),
            ..call.message
        };
        let trace = Trace {
            parent: metadata.get(hop::TRACEPARENT).cloned(),
            state: metadata.get(hop::TRACESTATE).cloned(),
        };
        let answer = self.server.invoke(message, timeout, &trace).await;
        drop(taken);
        let mut answer = answer.map_err(|failure| lost(&entry, failure))?;
        bounds::check_response(&answer.response, registration.as_str())?;
        // The registration's id stays in the Pod.
        answer.response.registration = Some(FunctionRegistration {
            run_uid: call.expected.run.to_string(),
            registration_id: String::new(),
        });
        answer.response.invocation_id = call.id.as_str().to_owned();
        Ok(answer)
    }
}

/// What a server says of a registration is not what a caller is told; it makes the lifecycle look.
fn lost(entry: &Entry, failure: Failure) -> Failure {
    match failure.reason {
        Reason::RegistrationNotFound | Reason::StaleRegistration | Reason::FunctionsUnsupported => {
            entry.suspect.notify_one();
            Failure::new(
                Reason::Recovering,
                "the Runtime Server does not know the registration",
            )
            .dispatched(Dispatched::No)
        }
        Reason::ServerUnavailable | Reason::OutcomeUnknown => {
            entry.suspect.notify_one();
            failure
        }
        _ => failure,
    }
}

/// At most what was asked, the maximum and the Run's remaining life (contract 3.9).
fn deadline(asked_millis: i64, ends: Option<Instant>, now: Instant) -> Result<Duration, Failure> {
    let asked = match u64::try_from(asked_millis) {
        Ok(0) | Err(_) => limits::DEFAULT_TIMEOUT,
        Ok(millis) => Duration::from_millis(millis),
    };
    let left = ends.map_or(limits::MAX_TIMEOUT, |ends| ends.saturating_duration_since(now));
    let timeout = asked.min(limits::MAX_TIMEOUT).min(left);
    // Zero would mean the default to the server.
    if timeout < Duration::from_millis(1) {
        return Err(Failure::new(
            Reason::Terminating,
            "the life of the function is over",
        ));
    }
    Ok(timeout)
}

/// Form only: what a gateway of this or a neighbouring version sends.
fn parse(metadata: &MetadataMap, message: InvokeFunctionRequest) -> Result<Call, Failure> {
    let bad = |detail: &str| Failure::new(Reason::BadHop, detail);
    if only(metadata, hop::HOP)? != hop::HOP_VALUE {
        return Err(bad("kruntime-hop must be exactly 1: a call crosses one hop"));
    }
    let attempt = only(metadata, hop::ATTEMPT)?.parse().ok().and_then(Attempt::new);
    let attempt = attempt.ok_or_else(|| bad("kruntime-attempt must be a number of at least 1"))?;
    let pod = PodUid::new(only(metadata, hop::POD_UID)?);
    let pod = pod.ok_or_else(|| bad("kruntime-pod-uid must not be empty"))?;
    let registration = message.registration.clone().unwrap_or_default();
    if !registration.registration_id.is_empty() {
        return Err(bad("registration_id must be empty on this hop"));
    }
    let run: RunUid = registration
        .run_uid
        .parse()
        .map_err(|_| bad("registration.run_uid must be the UID of a Run"))?;
    let id = if message.invocation_id.is_empty() {
        InvocationId::generate()
    } else {
        InvocationId::parse(message.invocation_id.as_bytes()).map_err(|error| bad(&error.to_string()))?
    };
    Ok(Call {
        expected: Expected { run, attempt, pod },
        id,
        message,
    })
}

fn only<'a>(metadata: &'a MetadataMap, name: &str) -> Result<&'a str, Failure> {
    let mut values = metadata.get_all(name).iter();
    let value: Option<&AsciiMetadataValue> = values.next();
    match (value.and_then(|value| value.to_str().ok()), values.next()) {
        (Some(value), None) => Ok(value),
        _ => Err(Failure::new(
            Reason::BadHop,
            format!("metadata {name} must be there exactly once"),
        )),
    }
}

#[async_trait]
impl FunctionRuntime for Invoker {
    async fn invoke_function(
        &self,
        request: Request<InvokeFunctionRequest>,
    ) -> Result<Response<InvokeFunctionResponse>, Status> {
        let answer = Box::pin(self.serve(request)).await;
        let answer = answer.map_err(|failure| failure.to_status())?;
        let mut response = Response::new(answer.response);
        if let Some(micros) = answer.handler_us {
            response
                .metadata_mut()
                .insert(hop::HANDLER_US, AsciiMetadataValue::from(micros));
        }
        Ok(response)
    }

    async fn register_function(
        &self,
        _: Request<RegisterFunctionRequest>,
    ) -> Result<Response<RegisterFunctionResponse>, Status> {
        Err(pod_local())
    }

    async fn function_status(
        &self,
        _: Request<FunctionStatusRequest>,
    ) -> Result<Response<FunctionStatusResponse>, Status> {
        Err(pod_local())
    }

    async fn unregister_function(
        &self,
        _: Request<UnregisterFunctionRequest>,
    ) -> Result<Response<UnregisterFunctionResponse>, Status> {
        Err(pod_local())
    }
}

fn pod_local() -> Status {
    Status::unimplemented("only InvokeFunction is served on the hop; the rest stays inside the Pod")
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";

    fn metadata(pairs: &[(&'static str, &str)]) -> MetadataMap {
        let mut metadata = MetadataMap::new();
        for (name, value) in pairs {
            metadata.append(*name, value.parse().unwrap());
        }
        metadata
    }

    fn message(change: impl FnOnce(&mut InvokeFunctionRequest)) -> InvokeFunctionRequest {
        let mut message = InvokeFunctionRequest {
            registration: Some(FunctionRegistration {
                run_uid: RUN.to_owned(),
                registration_id: String::new(),
            }),
            ..InvokeFunctionRequest::default()
        };
        change(&mut message);
        message
    }

    const GOOD: [(&str, &str); 3] = [
        ("kruntime-hop", "1"),
        ("kruntime-attempt", "2"),
        ("kruntime-pod-uid", "pod-a"),
    ];

    #[test]
    fn a_missing_or_second_hop_mark_is_refused_contract_4() {
        assert!(parse(&metadata(&GOOD), message(|_| {})).is_ok());
        let twice = [GOOD.as_slice(), &[("kruntime-hop", "1")]].concat();
        let two = [("kruntime-hop", "2"), GOOD[1], GOOD[2]];
        for bad in [&GOOD[1..], &twice, &two] {
            let failure = parse(&metadata(bad), message(|_| {})).err().unwrap();
            assert_eq!(
                (failure.reason, failure.dispatched),
                (Reason::BadHop, Dispatched::No)
            );
        }
    }

    #[test]
    fn a_call_without_a_whole_fence_is_refused() {
        for missing in 1..3 {
            let mut pairs = GOOD.to_vec();
            pairs.remove(missing);
            assert!(parse(&metadata(&pairs), message(|_| {})).is_err());
        }
        for attempt in ["0", "-1", "x", ""] {
            let pairs = [GOOD[0], ("kruntime-attempt", attempt), GOOD[2]];
            assert!(parse(&metadata(&pairs), message(|_| {})).is_err(), "{attempt}");
        }
        let with_id = message(|it| it.registration.as_mut().unwrap().registration_id = "reg_1".to_owned());
        assert!(parse(&metadata(&GOOD), with_id).is_err());
        let no_uid = message(|it| it.registration = None);
        assert!(parse(&metadata(&GOOD), no_uid).is_err());
        let bad_id = message(|it| it.invocation_id = "a b".to_owned());
        assert!(parse(&metadata(&GOOD), bad_id).is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_is_the_least_of_three_contract_3_9() {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let of = |asked, ends: Option<u32>| deadline(asked, ends.map(|it| now + it * second), now).ok();
        assert_eq!(of(5_000, None), Some(5 * second));
        assert_eq!(of(0, None), Some(30 * second), "zero is the default");
        assert_eq!(of(900_000, None), Some(300 * second));
        assert_eq!(of(900_000, Some(7)), Some(7 * second));
        assert_eq!(of(5_000, Some(0)), None);
    }
}
