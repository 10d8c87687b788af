//! The steps, each idempotent: reserve and write here; prepare, register and clean up in [`local`].

use std::{
    sync::{Mutex, OnceLock, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use kruntimes_api::{
    Run, RunStatus,
    keys::RunKey,
    names::{FINALIZER, MANAGER_RUNTIMED},
    run::Endpoint,
    status,
};
use kruntimes_ops::drain::Drain;
use kube::{
    Api,
    api::{Patch, PatchParams, ValidationDirective},
};
use serde_json::{Value, json};
use tokio::{
    sync::{Semaphore, watch},
    time::{Interval, timeout},
};

use super::{decide::Fault, facts::Me};
use crate::{
    admission::{self, Admission},
    events::Events,
    gateway_config::GatewayConfig,
    heartbeat::Contact,
    held::Held,
    journal::Journal,
    metrics::{Numbers, count},
    runtime_server::RuntimeServer,
    server_watch::ServerSilence,
    source::Workspace,
};

mod local;

/// Registrations that may be made at once (C-6.1): each starts an interpreter.
pub const REGISTERING: usize = 4;
/// One request to Kubernetes.
const REQUEST: Duration = Duration::from_secs(10);
/// Everything the Runs of this Pod share.
pub struct Pod {
    /// Who this is.
    pub me: Me,
    /// The Runs of the Pod's namespace.
    pub runs: Api<Run>,
    /// The Runtime Server.
    pub server: RuntimeServer,
    /// Whether it answers and obeys.
    pub silence: ServerSilence,
    /// Whether Kubernetes hears us.
    pub contact: Contact,
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
    /// Where transitions are told.
    pub events: Events,
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
            // An older CRD refuses what it does not know; by default it would drop that and take the rest.
            field_validation: Some(ValidationDirective::Strict),
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
            Ok(Err(error)) => (Written::Failed(status::refusal(&error.to_string())), "failed"),
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
}
