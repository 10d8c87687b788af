//! What happens inside the Pod: code in place, registration, clean-up.

use std::{sync::Arc, sync::PoisonError, time::Duration};

use kruntimes_api::{
    Run,
    keys::{Attempt, RunKey},
};
use kruntimes_proto::{executor::FunctionRegistrationState as State, failure::Reason, ids::RegistrationId};
use tokio::time::{Instant, sleep, timeout_at};

use super::{Fault, Pod};
use crate::{
    held::Registered,
    journal::{Record, blocking},
    metrics::count,
    outputs::OutputsDir,
    registration,
    runtime_server::{ServerError, says_gone},
    source::SourceError,
};

/// How long a registration may take, waiting for its turn not counted.
const REGISTRATION: Duration = Duration::from_secs(120);
/// One RegisterFunction call; a repeated one joins what the first began.
const REGISTER_CALL: Duration = Duration::from_secs(10);
/// Between two looks at a registration that is being made, at first and at most.
const LOOKS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));
/// How long the server gets to end a call that outlived the drain.
const LAST_DRAIN: Duration = Duration::from_secs(5);

impl Pod {
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
    pub async fn register(self: Arc<Self>, key: RunKey) -> Result<Arc<Registered>, Fault> {
        let fault = |reason, message: String| Fault { reason, message };
        let _turn = self.registering.acquire().await;
        let Some(record) = self.journal.get(key.uid) else {
            return Err(fault(
                "RegistrationFailed",
                "the record of the registration is lost".to_owned(),
            ));
        };
        let made = async {
            // Before any of its code runs: what the function makes of the directory later does not matter.
            // Without this place its outputs would be lost and nobody told.
            let outputs = self.outputs(&key).await?;
            let deadline = Instant::now() + REGISTRATION;
            let ready = timeout_at(deadline, self.until_ready(&key, record)).await;
            let id = ready.unwrap_or_else(|_| {
                Err(fault(
                    "RegistrationFailed",
                    format!("the function was not ready within {} s", REGISTRATION.as_secs()),
                ))
            })?;
            Ok(Registered::new(id, outputs, Instant::now()))
        };
        let result: Result<_, Fault> = made.await;
        let outcome = result.as_ref().map_or_else(|fault| fault.reason, |_| "ok");
        count(&self.numbers.registrations, outcome);
        result
    }

    async fn outputs(&self, key: &RunKey) -> Result<OutputsDir, Fault> {
        let (workspace, uid) = (self.workspace.clone(), key.uid);
        let opened = blocking(move || workspace.outputs(uid)).await;
        opened.map_err(|error| Fault {
            reason: "RegistrationFailed",
            message: format!(
                "the place of KRUNTIME_OUTPUTS cannot be opened on this Pod (openat2 of Linux 5.6 or later): {error}"
            ),
        })
    }

    /// Ends the registration with what runs in it; the Run keeps its place here and is registered anew.
    ///
    /// # Errors
    /// When the server does not confirm.
    pub async fn unregister(&self, key: &RunKey, id: &RegistrationId) -> Result<(), String> {
        let ended = self.server.unregister(key.uid, id, None).await;
        ended.map_err(|error| error.to_string())?;
        let forgotten = self.journal.set_id(key.uid, None).await;
        forgotten.map_err(|error| format!("writing the journal's record: {error}"))
    }

    async fn until_ready(&self, key: &RunKey, record: Record) -> Result<RegistrationId, Fault> {
        let (id, state) = self.ask_to_register(key, &record).await?;
        if let Err(error) = self.journal.set_id(key.uid, Some(&id)).await {
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
                Err(ServerError::Answered(failure)) if says_gone(failure.reason) => {
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
    /// With `drain` running calls may finish that long, else they are cancelled. What is `handed_over` keeps its entry until
    /// Kubernetes knows: a gateway waits longer for a new owner than for late news of an old one.
    ///
    /// # Errors
    /// When the server does not confirm, or the disk refuses; then it must be called again.
    pub async fn clean_up(
        &self,
        key: &RunKey,
        drain: Option<Duration>,
        handed_over: bool,
    ) -> Result<(), String> {
        if let Err(error) = self.let_go(key, drain).await {
            self.silence.keeps(key.uid, Instant::now());
            return Err(error);
        }
        self.silence.lets_go(key.uid);
        if handed_over {
            self.held.let_go(key.uid);
        } else {
            self.held.remove(key.uid);
        }
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

    /// The server has nothing of the Run any more.
    async fn let_go(&self, key: &RunKey, drain: Option<Duration>) -> Result<(), String> {
        let Some(record) = self.journal.get(key.uid) else {
            return Ok(());
        };
        let id = match record.registration_id() {
            Some(id) => Some(id),
            None => self.find_again(key, &record).await?,
        };
        let Some(id) = id else { return Ok(()) };
        let drain = drain.map(|drain| drain.min(LAST_DRAIN));
        let ended = self.server.unregister(key.uid, &id, drain).await;
        ended.map_err(|error| error.to_string())
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
