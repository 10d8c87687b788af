//! The hop's service: `executor.v1.FunctionRuntime/InvokeFunction` and nothing else (C-4).
//!
//! hop mark → fence → caller → contact → gate → slot → Runtime Server → outputs → bounds → audit.
//! Nothing here reads or writes Kubernetes, except one access review when no answer is kept.

use std::{io, sync::Arc, time::Duration};

use async_trait::async_trait;
use kruntimes_api::keys::PodUid;
use kruntimes_ops::drain::Drain;
use kruntimes_proto::{
    executor::{
        FunctionRegistration, FunctionStatusRequest, FunctionStatusResponse, InvokeFunctionRequest,
        InvokeFunctionResponse, RegisterFunctionRequest, RegisterFunctionResponse, UnregisterFunctionRequest,
        UnregisterFunctionResponse, function_runtime_server::FunctionRuntime,
    },
    failure::{Component, Dispatched, Failure, Reason},
    frame::INVOKE_FUNCTION,
    hop,
};
use kruntimes_trace::{Trace, Tracer, rpc::Rpc};
use tokio::time::Instant;
use tonic::{
    Request, Response, Status,
    metadata::{AsciiMetadataValue, MetadataMap},
};

use crate::{
    audit::Audit,
    bounds,
    caller::{Callers, Wish},
    fence::{self, Expected},
    heartbeat::Contact,
    held::{Entry, Held},
    outputs::{self, Left},
    request::{self, Call},
    running::Occupied,
    runtime_server::{Answer, RuntimeServer, says_gone},
    spans,
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
    /// Whom spans are told.
    pub tracer: Tracer,
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
        let call = Call::parse(&metadata, message)?;
        let mut trace = Trace::of(&metadata);
        let mut span = Rpc::server(&self.tracer, INVOKE_FUNCTION, &mut trace);
        spans::name_call(&mut span, &call);
        let line = self.audit.begin(call.expected.run, call.id.as_str());
        let line = line.traced(span.span().ids());
        let result = self.call(&metadata, &trace, call, arrived).await;
        spans::end(span, result.as_ref().map(|_| ()));
        line.end(result.as_ref().map(|_| ()));
        result
    }

    /// The assignment that `expected` names, if this Pod holds it and the caller may.
    ///
    /// # Errors
    /// What the caller is told.
    pub async fn entry(
        &self,
        wish: Wish,
        metadata: &MetadataMap,
        expected: &Expected,
    ) -> Result<Arc<Entry>, Failure> {
        let entry = self.held.get(expected.run);
        let attempt = entry.as_ref().map(|entry| entry.attempt);
        fence::check(expected, &self.pod, attempt)?;
        let entry =
            entry.ok_or_else(|| Failure::new(Reason::StaleRoute, "the Run is not held by this Pod"))?;
        self.callers.may(wish, metadata, &entry.key).await?;
        Ok(entry)
    }

    /// Whether Kubernetes hears this Pod.
    ///
    /// # Errors
    /// [`Reason::OwnerIsolated`].
    pub fn heard(&self, now: Instant) -> Result<(), Failure> {
        if self.contact.is_lost(now) {
            return Err(Failure::new(
                Reason::OwnerIsolated,
                "this Pod has no contact to Kubernetes and refuses calls on its own",
            ));
        }
        Ok(())
    }

    async fn call(
        &self,
        metadata: &MetadataMap,
        trace: &Trace,
        call: Call,
        arrived: Instant,
    ) -> Result<Answer, Failure> {
        let entry = self.entry(Wish::Invoke, metadata, &call.expected).await?;
        let result = self.admitted(&entry, trace, call, arrived).await;
        if let Err(failure) = &result {
            entry.note(failure, Instant::now());
        }
        result
    }

    /// A call of somebody who may.
    async fn admitted(
        &self,
        entry: &Arc<Entry>,
        trace: &Trace,
        call: Call,
        arrived: Instant,
    ) -> Result<Answer, Failure> {
        bounds::check_request(&call.message)?;
        self.heard(Instant::now())?;
        entry.callable()?;
        // Asking Kubernetes was part of the caller's time: the gateway does not wait longer for it.
        let until = arrived + request::deadline(call.message.timeout_millis, entry.ends, arrived)?;
        let now = Instant::now();
        let time = until.saturating_duration_since(now);
        if time < Duration::from_millis(1) {
            return Err(Failure::new(
                Reason::DeadlineExceeded,
                "the time was over before the call began",
            )
            .dispatched(Dispatched::No)
            .by(Component::Runtimed));
        }
        let (registered, taken) = entry.begin(call.id.clone(), now, until)?;
        registered
            .outputs
            .empty()
            .await
            .map_err(|error| no_place(&error))?;
        let message = InvokeFunctionRequest {
            registration: Some(FunctionRegistration {
                run_uid: call.expected.run.to_string(),
                registration_id: registered.id.as_str().to_owned(),
            }),
            invocation_id: call.id.as_str().to_owned(),
            timeout_millis: i64::try_from(time.as_millis()).unwrap_or(i64::MAX),
            ..call.message
        };
        let mut running = Occupied::new(&self.server, &self.drain, entry, &registered, taken, until);
        let answer = running.call(message, time, trace).await;
        let mut answer = answer.map_err(|failure| lost(entry, failure))?;
        let left = registered.outputs.read().await;
        drop(running);
        add_outputs(&mut answer.response, left)?;
        bounds::check_response(&answer.response, registered.id.as_str())?;
        // The registration's id stays in the Pod.
        answer.response.registration = Some(FunctionRegistration {
            run_uid: call.expected.run.to_string(),
            registration_id: String::new(),
        });
        answer.response.invocation_id = call.id.as_str().to_owned();
        Ok(answer)
    }
}

/// What the function left in its file joins what it returned (C-5.4).
fn add_outputs(response: &mut InvokeFunctionResponse, left: io::Result<Left>) -> Result<(), Failure> {
    let file = match left {
        Ok(Left::Nothing) => return Ok(()),
        Ok(Left::Bytes(bytes)) => outputs::parse(&bytes),
        Ok(Left::Unusable) => Err("it is no regular file that can be read".to_owned()),
        Ok(Left::Removed) => Err("the call removed the directory of the file".to_owned()),
        Err(error) => Err(format!("it cannot be read: {}", error.kind())),
    };
    file.and_then(|file| outputs::merge(&mut response.outputs, file))
        .map_err(|error| Failure::new(Reason::InvalidOutput, format!("KRUNTIME_OUTPUTS: {error}")))
}

fn no_place(error: &io::Error) -> Failure {
    Failure::new(
        Reason::ServerUnavailable,
        format!("the place of KRUNTIME_OUTPUTS cannot be emptied: {error}"),
    )
    .by(Component::Runtimed)
}

/// What a server says of a registration is not what a caller is told; it makes the lifecycle look.
fn lost(entry: &Entry, failure: Failure) -> Failure {
    match failure.reason {
        reason if says_gone(reason) => {
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
