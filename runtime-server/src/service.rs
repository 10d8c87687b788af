//! The two gRPC services: messages in, [`Functions`] asked, messages out.

use std::{path::PathBuf, sync::Arc, time::Duration};

use kruntimes_proto::{
    executor::{
        self as wire, FunctionRegistration, FunctionRegistrationState,
        function_runtime_server::FunctionRuntime, runtime_server::Runtime,
    },
    failure::{Failure, Reason},
    frame::INVOKE_FUNCTION,
    hop,
};
use kruntimes_trace::{Trace, Tracer, rpc::Rpc};
use tokio::time::Instant;
use tonic::{Code, Request, Response, Status};

use crate::{
    functions::Functions,
    registry::State,
    request::{self, Reference},
};

/// `executor.v1.FunctionRuntime`.
#[derive(Debug, Clone)]
pub struct FunctionService {
    functions: Functions,
    workspace: Arc<PathBuf>,
    longest_call: Duration,
    tracer: Tracer,
}

impl FunctionService {
    /// Serves `functions` whose working directories lie beneath `workspace`, and whose
    /// calls take at most `longest_call`; `tracer` is told of them.
    #[must_use]
    pub fn new(functions: Functions, workspace: PathBuf, longest_call: Duration, tracer: Tracer) -> Self {
        Self {
            functions,
            workspace: Arc::new(workspace),
            longest_call,
            tracer,
        }
    }

    async fn run(
        &self,
        message: wire::InvokeFunctionRequest,
        trace: Trace,
        rpc: &mut Rpc,
    ) -> Result<Response<wire::InvokeFunctionResponse>, Failure> {
        let wish = request::invoke(message, trace, self.longest_call, Instant::now())?;
        let (function, invocation_id) = (wish.function.clone(), wish.invocation_id.as_str().to_owned());
        let span = rpc.span();
        if span.is_live() {
            span.set("kruntimes.run_uid", function.run_uid.clone());
            span.set("kruntimes.invocation_id", invocation_id.clone());
        }
        let answer = self.functions.invoke(wish).await?;
        let mut response = Response::new(wire::InvokeFunctionResponse {
            registration: echo(function),
            invocation_id,
            output: answer.output,
            content_type: answer.content_type,
            outputs: answer.outputs,
        });
        response.metadata_mut().insert(
            hop::HANDLER_US,
            u64::try_from(answer.handler.as_micros())
                .unwrap_or(u64::MAX)
                .into(),
        );
        Ok(response)
    }
}

#[tonic::async_trait]
impl FunctionRuntime for FunctionService {
    async fn register_function(
        &self,
        request: Request<wire::RegisterFunctionRequest>,
    ) -> Result<Response<wire::RegisterFunctionResponse>, Status> {
        let mut wish = request::register(request.into_inner()).map_err(refuse)?;
        let workspace = Arc::clone(&self.workspace);
        let checked = tokio::task::spawn_blocking(move || {
            wish.working_dir = request::working_dir(&wish.working_dir, &workspace)?;
            let folder = request::folder(&wish.handler.folder, &wish.working_dir)?;
            Ok::<_, Failure>((wish, folder))
        });
        let (wish, folder) = checked
            .await
            .unwrap_or_else(|error| Err(Failure::new(Reason::RuntimeServerError, error.to_string())))
            .map_err(refuse)?;
        let run_uid = wish.run_uid.clone();
        let (id, state) = self.functions.register(wish, folder).await.map_err(refuse)?;
        Ok(Response::new(wire::RegisterFunctionResponse {
            registration: echo(Reference { run_uid, id }),
            state: wire_state(state).into(),
        }))
    }

    async fn function_status(
        &self,
        request: Request<wire::FunctionStatusRequest>,
    ) -> Result<Response<wire::FunctionStatusResponse>, Status> {
        let reference = request::reference(request.into_inner().registration).map_err(refuse)?;
        let status = self.functions.status(&reference).map_err(refuse)?;
        Ok(Response::new(wire::FunctionStatusResponse {
            registration: echo(reference),
            state: wire_state(status.state).into(),
            in_flight: status.in_flight,
            last_activity_unix_nano: status.last_activity_unix_nano,
            fatal_error: status.fatal_error,
        }))
    }

    async fn invoke_function(
        &self,
        request: Request<wire::InvokeFunctionRequest>,
    ) -> Result<Response<wire::InvokeFunctionResponse>, Status> {
        let mut trace = Trace::of(request.metadata());
        // The function's own spans are to hang below this one.
        let mut rpc = Rpc::server(&self.tracer, INVOKE_FUNCTION, &mut trace);
        let result = self.run(request.into_inner(), trace, &mut rpc).await;
        match &result {
            Ok(_) => rpc.end(Some(Code::Ok), "OK"),
            Err(failure) => rpc.end(Some(failure.reason.code()), failure.reason.as_str()),
        }
        result.map_err(refuse)
    }

    async fn unregister_function(
        &self,
        request: Request<wire::UnregisterFunctionRequest>,
    ) -> Result<Response<wire::UnregisterFunctionResponse>, Status> {
        let wish = request::unregister(request.into_inner(), Instant::now()).map_err(refuse)?;
        let reference = wish.function.clone();
        self.functions.unregister(wish).await.map_err(refuse)?;
        Ok(Response::new(wire::UnregisterFunctionResponse {
            registration: echo(reference),
        }))
    }
}

/// `executor.v1.Runtime`: this server can be asked how it is; it runs no one-shot work.
#[derive(Debug, Clone)]
pub struct RuntimeService {
    about: Arc<str>,
}

impl RuntimeService {
    /// `about` is the health text: language and isolation level.
    #[must_use]
    pub fn new(about: &str) -> Self {
        Self { about: about.into() }
    }
}

#[tonic::async_trait]
impl Runtime for RuntimeService {
    async fn health(
        &self,
        _: Request<wire::HealthRequest>,
    ) -> Result<Response<wire::HealthResponse>, Status> {
        Ok(Response::new(wire::HealthResponse {
            healthy: true,
            message: self.about.to_string(),
        }))
    }

    async fn execute(
        &self,
        _: Request<wire::ExecuteRequest>,
    ) -> Result<Response<wire::ExecuteResponse>, Status> {
        Err(no_tasks())
    }

    async fn status(
        &self,
        _: Request<wire::StatusRequest>,
    ) -> Result<Response<wire::StatusResponse>, Status> {
        Err(no_tasks())
    }

    async fn list(&self, _: Request<wire::ListRequest>) -> Result<Response<wire::ListResponse>, Status> {
        Err(no_tasks())
    }

    async fn cancel(
        &self,
        _: Request<wire::CancelRequest>,
    ) -> Result<Response<wire::CancelResponse>, Status> {
        Err(no_tasks())
    }

    async fn forget(
        &self,
        _: Request<wire::ForgetRequest>,
    ) -> Result<Response<wire::ForgetResponse>, Status> {
        Err(no_tasks())
    }
}

fn no_tasks() -> Status {
    Status::unimplemented("this server runs functions only: register them with executor.v1.FunctionRuntime")
}

fn refuse(failure: Failure) -> Status {
    failure.to_status()
}

fn echo(reference: Reference) -> Option<FunctionRegistration> {
    Some(FunctionRegistration {
        run_uid: reference.run_uid,
        registration_id: reference.id.to_string(),
    })
}

fn wire_state(state: State) -> FunctionRegistrationState {
    match state {
        State::Registering => FunctionRegistrationState::Registering,
        State::Ready => FunctionRegistrationState::Ready,
        State::Draining => FunctionRegistrationState::Draining,
        State::Failed => FunctionRegistrationState::Failed,
    }
}
