//! The steps, each idempotent: reserve, prepare, register, clean up, write.

use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use kruntimes_api::{
    Run, RunStatus,
    keys::{Attempt, RunKey},
    names::{FINALIZER, MANAGER_RUNTIMED},
    run::Endpoint,
    status,
};
use kruntimes_ops::drain::Drain;
use kruntimes_proto::{executor::FunctionRegistrationState as State, failure::Reason, ids::RegistrationId};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{
    sync::{Semaphore, watch},
    time::{Instant, Interval, sleep, timeout, timeout_at},
};

use super::{decide::Fault, facts::Me};
use crate::{
    admission::{self, Admission},
    gateway_config::GatewayConfig,
    held::Held,
    journal::{Journal, Record, blocking},
    metrics::{Numbers, count},
    registration,
    runtime_server::{RuntimeServer, ServerError},
    source::{SourceError, Workspace},
};

/// Registrations that may be made at once (contract 6.1): each starts an interpreter.
pub const REGISTERING: usize = 4;
/// How long a registration may take, waiting for its turn not counted.
const REGISTRATION: Duration = Duration::from_secs(120);
/// One RegisterFunction call; a repeated one joins what the first began.
const REGISTER_CALL: Duration = Duration::from_secs(10);
/// Between two looks at a registration that is being made, at first and at most.
const LOOKS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// One request to Kubernetes.
const REQUEST: Duration = Duration::from_secs(10);
/// How long the server gets to end a call that outlived the drain.
const LAST_DRAIN: Duration = Duration::from_secs(5);

/// Everything the Runs of this Pod share.
pub struct Pod {
    /// Who this is.
    pub me: Me,
    /// The Runs of the Pod's namespace.
    pub runs: Api<Run>,
    /// The Runtime Server.
    pub server: RuntimeServer,
    /// Whether it knows functions; set once it was asked, which is before any Run is looked at.
    pub functions: OnceLock<bool>,
    /// What the invoker sees.
    pub held: Held,
    /// Capacity.
    pub admission: Mutex<Admission>,
    /// What survives a restart.
    pub journal: Journal,
    /// Where code is put.
    pub workspace: Workspace,
    /// Where callers find the gateway.
    pub gateway: watch::Receiver<GatewayConfig>,
    /// Turns for registering.
    pub registering: Semaphore,
    /// Paces rewriting of Runs that are Ready already.
    pub refresh: tokio::sync::Mutex<Interval>,
    /// Metrics.
    pub numbers: Numbers,
    /// The life of the process.
    pub drain: Drain,
    /// How long running calls may take to finish when the process stops.
    pub grace: Duration,
    /// The wall clock.
    pub wall: fn() -> Timestamp,
}

/// What became of a write.
#[derive(Debug)]
pub enum Written {
    /// Nothing would have changed.
    Same,
    /// The object as it is now.
    Done(Box<Run>),
    /// Something moved meanwhile, or the object is gone: read it and decide again.
    Conflict,
    /// Kubernetes did not answer, or refused.
    Failed(String),
}

// === impl Pod ===

impl Pod {
    /// Reads the object; `None` when it is gone or another one has its name.
    ///
    /// # Errors
    /// When Kubernetes does not answer.
    pub async fn live(&self, key: &RunKey) -> Result<Option<Run>, String> {
        let read = timeout(REQUEST, self.runs.get_opt(&key.name)).await;
        let read = read.map_err(|_| format!("no answer within {REQUEST:?}"))?;
        let run = read.map_err(|error| error.to_string())?;
        Ok(run.filter(|run| run.run_uid() == Some(key.uid)))
    }

    /// What the Run's endpoint should be.
    #[must_use]
    pub fn endpoint(&self, key: &RunKey) -> Option<Endpoint> {
        self.gateway.borrow().endpoint(key, &self.me.runtime)
    }

    /// Writes the difference between `run`'s status and `wanted`, if there is one.
    pub async fn write_status(&self, run: &Run, wanted: &RunStatus) -> Written {
        match status::patch(run, wanted) {
            Some(patch) => self.patch(run, patch, true).await,
            None => Written::Same,
        }
    }

    /// Puts our finalizer on the Run, or takes it off.
    pub async fn write_finalizer(&self, run: &Run, present: bool) -> Written {
        let mut finalizers = run.metadata.finalizers.clone().unwrap_or_default();
        finalizers.retain(|it| it != FINALIZER);
        if present {
            finalizers.push(FINALIZER.to_owned());
        }
        let patch = json!({ "metadata": {
            "resourceVersion": run.metadata.resource_version,
            "uid": run.metadata.uid,
            "finalizers": finalizers,
        }});
        self.patch(run, patch, false).await
    }

    async fn patch(&self, run: &Run, patch: Value, is_status: bool) -> Written {
        let name = run.metadata.name.as_deref().unwrap_or_default();
        let params = PatchParams {
            field_manager: Some(MANAGER_RUNTIMED.to_owned()),
            ..PatchParams::default()
        };
        let patch = Patch::Merge(patch);
        let request = async {
            if is_status {
                self.runs.patch_status(name, &params, &patch).await
            } else {
                self.runs.patch(name, &params, &patch).await
            }
        };
        let (written, outcome) = match timeout(REQUEST, request).await {
            Ok(Ok(run)) => (Written::Done(Box::new(run)), "ok"),
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => (Written::Conflict, "conflict"),
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => (Written::Conflict, "gone"),
            Ok(Err(error)) => (Written::Failed(error.to_string()), "failed"),
            Err(_) => (Written::Failed(format!("no answer within {REQUEST:?}")), "failed"),
        };
        count(&self.numbers.writes, outcome);
        written
    }

    /// Reserves capacity.
    ///
    /// # Errors
    /// When this Pod cannot take such a Run, or not now.
    pub fn admit(&self, key: &RunKey, run: &Run) -> Result<(), Fault> {
        let fault = |reason, message: String| Err(Fault { reason, message });
        if run.spec.mode.function.is_none() {
            return fault("TaskModeUnsupported", "this Pod executes no task Runs".to_owned());
        }
        if self.functions.get() != Some(&true) {
            let message = "the Runtime Server of this Pod does not offer executor.v1.FunctionRuntime";
            return fault("FunctionModeUnsupported", message.to_owned());
        }
        let requests = match admission::requests(run) {
            Ok(requests) => requests,
            Err(error) => return fault("CapacityRefused", error.to_string()),
        };
        let mut admission = self.admission.lock().unwrap_or_else(PoisonError::into_inner);
        admission.admit(key.uid, requests).map_err(|refused| Fault {
            reason: "CapacityRefused",
            message: refused.to_string(),
        })
    }

    /// Reserves for what the journal says is here already.
    pub fn restore(&self, key: &RunKey, run: Option<&Run>) {
        let requests = run.and_then(|run| admission::requests(run).ok());
        let one = || {
            admission::Vector::from([(
                kruntimes_api::names::RESOURCE_RUNS.to_owned(),
                kruntimes_api::quantity::Amount::whole(1),
            )])
        };
        self.admission
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .restore(key.uid, requests.unwrap_or_else(one));
    }

    /// Puts the code in place, then tells the journal.
    ///
    /// # Errors
    /// A fault when the source is not acceptable; a text when this Pod's disk does not work.
    pub async fn prepare(
        &self,
        key: &RunKey,
        attempt: Attempt,
        run: &Run,
    ) -> Result<Result<(), Fault>, String> {
        let uid = key.uid;
        let workspace = self.workspace.clone();
        let object = run.clone();
        let prepared = blocking(move || Ok(workspace.prepare(uid, &object)))
            .await
            .map_err(|error| error.to_string())?;
        let dir = match prepared {
            Ok(dir) => dir,
            Err(SourceError::Io(error)) => return Err(error.to_string()),
            Err(error) => {
                return Ok(Err(Fault {
                    reason: "SourceInvalid",
                    message: error.to_string(),
                }));
            }
        };
        let Some(record) = registration::record(run, key, attempt, &dir) else {
            return Ok(Err(Fault {
                reason: "TaskModeUnsupported",
                message: "this Pod executes no task Runs".to_owned(),
            }));
        };
        self.journal
            .put(uid, record)
            .await
            .map_err(|error| error.to_string())?;
        Ok(Ok(()))
    }

    /// Makes the registration, or finds it again, and waits until it is ready. May be dropped at any
    /// time: the journal knows what to ask the server.
    ///
    /// # Errors
    /// Why this attempt cannot go on.
    pub async fn register(self: Arc<Self>, key: RunKey) -> Result<RegistrationId, Fault> {
        let fault = |reason, message: String| Fault { reason, message };
        let _turn = self.registering.acquire().await;
        let Some(record) = self.journal.get(key.uid) else {
            return Err(fault(
                "RegistrationFailed",
                "the record of the registration is lost".to_owned(),
            ));
        };
        let deadline = Instant::now() + REGISTRATION;
        let made = timeout_at(deadline, self.until_ready(&key, record)).await;
        let result = made.unwrap_or_else(|_| {
            Err(fault(
                "RegistrationFailed",
                format!("the function was not ready within {} s", REGISTRATION.as_secs()),
            ))
        });
        let outcome = result.as_ref().map_or_else(|fault| fault.reason, |_| "ok");
        count(&self.numbers.registrations, outcome);
        result
    }

    async fn until_ready(&self, key: &RunKey, record: Record) -> Result<RegistrationId, Fault> {
        let (id, state) = self.ask_to_register(key, &record).await?;
        if let Err(error) = self.journal.set_id(key.uid, &id).await {
            // Without the id the server is asked again after a restart.
            tracing::warn!(%error, run = %key, "the journal does not know the registration's id");
        }
        if state == State::Ready {
            return Ok(id);
        }
        let mut pause = LOOKS.0;
        loop {
            sleep(pause).await;
            pause = (pause * 2).min(LOOKS.1);
            match self.server.status(key.uid, &id).await {
                Ok(observed) => match observed.state {
                    State::Ready => return Ok(id),
                    State::Failed | State::Draining => {
                        return Err(Fault {
                            reason: "RegistrationFailed",
                            message: observed.fatal_error,
                        });
                    }
                    State::Registering | State::Unspecified => {}
                },
                Err(ServerError::Answered(failure))
                    if matches!(
                        failure.reason,
                        Reason::RegistrationNotFound | Reason::StaleRegistration
                    ) =>
                {
                    return Err(Fault {
                        reason: "RegistrationFailed",
                        message: format!("the Runtime Server lost the registration: {}", failure.detail),
                    });
                }
                Err(error) => tracing::debug!(%error, run = %key, "a registration cannot be looked at"),
            }
        }
    }

    async fn ask_to_register(&self, key: &RunKey, record: &Record) -> Result<(RegistrationId, State), Fault> {
        let mut pause = LOOKS.0;
        loop {
            match self
                .server
                .register(record.to_message(key.uid), REGISTER_CALL)
                .await
            {
                Ok(answer) => return Ok(answer),
                Err(ServerError::Answered(failure)) => {
                    let reason = match failure.reason {
                        // Not a verdict: the server is starting, or too slow.
                        Reason::ServerUnavailable | Reason::DeadlineExceeded | Reason::Busy => None,
                        Reason::InvalidPayload => Some("HandlerInvalid"),
                        Reason::FunctionsUnsupported => Some("FunctionModeUnsupported"),
                        _ => Some("RegistrationFailed"),
                    };
                    if let Some(reason) = reason {
                        return Err(Fault {
                            reason,
                            message: failure.detail,
                        });
                    }
                }
                Err(ServerError::Silent(error)) => {
                    tracing::debug!(error, run = %key, "the Runtime Server does not answer a registration");
                }
            }
            sleep(pause).await;
            pause = (pause * 2).min(LOOKS.1);
        }
    }

    /// Takes everything of the Run out of this Pod, except its entry for callers, which is closed.
    /// With `drain` running calls may finish that long, else they are cancelled.
    ///
    /// # Errors
    /// When the server does not confirm, or the disk refuses; then it must be called again.
    pub async fn clean_up(&self, key: &RunKey, drain: Option<Duration>) -> Result<(), String> {
        if let Some(record) = self.journal.get(key.uid) {
            let id = match record.registration_id() {
                Some(id) => Some(id),
                None => self.find_again(key, &record).await?,
            };
            if let Some(id) = id {
                let drain = drain.map(|drain| drain.min(LAST_DRAIN));
                self.server
                    .unregister(key.uid, &id, drain)
                    .await
                    .map_err(|error| error.to_string())?;
            }
        }
        self.held.remove(key.uid);
        let (workspace, uid) = (self.workspace.clone(), key.uid);
        let removed = blocking(move || workspace.remove(uid)).await;
        removed.map_err(|error| format!("removing the work directory: {error}"))?;
        let forgotten = self.journal.remove(key.uid).await;
        forgotten.map_err(|error| format!("removing the journal's record: {error}"))?;
        self.admission
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .release(key.uid);
        Ok(())
    }

    /// The id of a registration whose answer was lost; `None` when the server has none.
    async fn find_again(&self, key: &RunKey, record: &Record) -> Result<Option<RegistrationId>, String> {
        match self
            .server
            .register(record.to_message(key.uid), REGISTER_CALL)
            .await
        {
            Ok((id, _)) => Ok(Some(id)),
            Err(ServerError::Answered(failure))
                if !matches!(
                    failure.reason,
                    Reason::ServerUnavailable | Reason::DeadlineExceeded | Reason::Busy
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error.to_string()),
        }
    }
}
