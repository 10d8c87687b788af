//! Keeps one registration's worker alive and gives every call exactly one answer.
//!
//! One task owns the worker: starting it, calls, deadlines, hang-ups, deaths and the
//! end all happen here in sequence, so that an answer cannot meet another call.
//! A worker whose call did not end by itself is never used again.

use std::{sync::Arc, time::Duration};

use kruntimes_proto::{
    failure::{Dispatched, Failure, Reason},
    ids::{InvocationId, RegistrationId},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout},
};
use tracing::{debug, info, warn};

use super::{
    desk::{Call, Desk},
    frame::{CallError, ErrorKind, Frame, Invoke},
    lines,
    logs::Logs,
    process::{Exit, Plan, Spawner, Worker},
    starts::FailedStarts,
    wire::{Broken, Wire},
};
use crate::{args::OnCallerGone, functions::Held, metrics::Metrics, outcome};

/// How long to look for a frame that a worker wrote just before it died.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// How long a worker that closed its end may take to die, before it is killed and its
/// caller told so: on a busy machine, closing and dying are some way apart.
const OWN_DEATH: Duration = Duration::from_secs(1);

/// How far a supervisor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The first worker is not ready yet.
    Starting,
    /// It is, or never will be: the registry says which.
    Settled,
    /// No process is left and none will come.
    Gone,
}

/// What is the same for all functions of a server.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How long an import may take.
    pub start_timeout: Duration,
    /// What to do when nobody waits for the answer any more.
    pub on_caller_gone: OnCallerGone,
    /// Whether callers see what the function raised.
    pub expose_errors: bool,
}

/// Everything a supervisor is given.
#[derive(Debug)]
pub struct Supervisor {
    /// The registration it works for.
    pub id: RegistrationId,
    /// How to start its worker.
    pub plan: Arc<Plan>,
    /// Where workers are started.
    pub spawner: Spawner,
    /// Where to report.
    pub held: Held,
    /// Behaviour common to all.
    pub settings: Settings,
    /// Numbers.
    pub metrics: Arc<Metrics>,
    /// Calls and the wish to end.
    pub desk: Desk,
    /// Tells how far it is.
    pub phase: watch::Sender<Phase>,
}

impl Supervisor {
    /// Runs until told to stop; `before` is the generation that must be gone first.
    pub async fn run(mut self, before: Option<watch::Receiver<Phase>>) {
        if let Some(mut before) = before {
            let _ = before.wait_for(|phase| *phase == Phase::Gone).await;
        }
        self.keep_running().await;
        let plan = Arc::clone(&self.plan);
        let _ = tokio::task::spawn_blocking(move || plan.remove_private()).await;
        // What waits at the desk gets its answer before the registration goes.
        self.desk.close();
    }

    async fn keep_running(&mut self) {
        let mut failed_starts = FailedStarts::default();
        let mut loaded = false;
        while !self.desk.over() {
            let failure = match self.start().await {
                Start::Stopped => return,
                Start::Failed(why) => Some(why),
                Start::Ready(worker) => {
                    loaded = true;
                    self.held.ready(&self.plan.run_uid, &self.id);
                    self.phase
                        .send_if_modified(|phase| std::mem::replace(phase, Phase::Settled) != Phase::Settled);
                    match self.serve(*worker).await {
                        Served::Stopped => return,
                        Served::Lost => None,
                        Served::LostUnused(why) => Some(why),
                    }
                }
            };
            let Some(why) = failure else { continue };
            warn!(run_uid = self.plan.run_uid, registration_id = %self.id, why, "a worker could not be started");
            if failed_starts.add(Instant::now().into_std()) || !loaded {
                self.give_up(&why).await;
                return;
            }
            tokio::select! {
                () = self.desk.stop_due() => return,
                () = sleep(failed_starts.pause()) => {}
            }
        }
    }

    /// Starts a worker and waits until its handler is loaded.
    async fn start(&mut self) -> Start {
        if let Err(error) = self.plan.create_private() {
            return Start::Failed(format!("cannot create a directory for temporary files: {error}"));
        }
        let mut worker = match Worker::spawn(&self.plan, &self.spawner).await {
            Ok(worker) => worker,
            Err(error) => return Start::Failed(format!("cannot start a process: {error}")),
        };
        enum First {
            Frame(Result<Frame, Broken>),
            Late,
            Stopped,
        }
        let first = {
            let Worker { exit, wire, logs } = &mut worker;
            tokio::select! {
                biased;
                frame = wire.next() => First::Frame(frame),
                _ = exit.wait() => First::Frame(last_frame(wire).await),
                () = self.desk.stop_due() => First::Stopped,
                () = sleep(self.settings.start_timeout) => First::Late,
                never = logs.pump() => match never {},
            }
        };
        self.metrics
            .start(matches!(first, First::Frame(Ok(Frame::Ready { .. }))));
        match first {
            First::Frame(Ok(Frame::Ready { version })) => {
                worker.logs.drain();
                info!(run_uid = self.plan.run_uid, registration_id = %self.id, version, "function loaded");
                Start::Ready(Box::new(worker))
            }
            First::Frame(Ok(Frame::Failed(trouble))) => {
                worker.kill().await;
                warn!(
                    run_uid = self.plan.run_uid,
                    "the handler cannot be loaded\n{}", trouble.trace
                );
                Start::Failed(match trouble.kind.as_str() {
                    "Refused" => trouble.message,
                    kind => format!("loading the handler raised {kind}: {}", trouble.message),
                })
            }
            First::Frame(Ok(_) | Err(Broken::Malformed(_))) => {
                worker.kill().await;
                Start::Failed("the worker broke its protocol while it started".to_owned())
            }
            First::Frame(Err(_)) => {
                let _ = timeout(LAST_WORDS, worker.exit.wait()).await;
                let remains = worker.kill().await;
                Start::Failed(format!(
                    "the worker {} before the handler was loaded; {}",
                    remains.gone,
                    remains.last_words()
                ))
            }
            First::Late => {
                let remains = worker.kill().await;
                let limit = self.settings.start_timeout;
                Start::Failed(format!(
                    "the handler was not loaded within {limit:?}; {}",
                    remains.last_words()
                ))
            }
            First::Stopped => {
                worker.kill().await;
                Start::Stopped
            }
        }
    }

    /// Gives calls to a worker until it or the registration ends.
    async fn serve(&mut self, mut worker: Worker) -> Served {
        #[expect(clippy::large_enum_variant, reason = "it is taken apart at once")]
        enum Next {
            Call(Call),
            Stopped,
            Gone,
            Odd,
        }
        let mut used = 0_u64;
        loop {
            let next = {
                let Worker { exit, wire, logs } = &mut worker;
                tokio::select! {
                    biased;
                    call = self.desk.take() => call.map_or(Next::Stopped, Next::Call),
                    _ = exit.wait() => Next::Gone,
                    _ = wire.next() => Next::Odd,
                    never = logs.pump() => match never {},
                }
            };
            match next {
                Next::Call(call) => {
                    used += 1;
                    match self.call(worker, call, used).await {
                        Some(fit) => worker = fit,
                        None => return Served::Lost,
                    }
                }
                Next::Stopped => {
                    worker.kill().await;
                    return Served::Stopped;
                }
                Next::Gone | Next::Odd => {
                    let remains = worker.kill().await;
                    info!(run_uid = self.plan.run_uid, gone = %remains.gone, "a worker ended between calls");
                    // A caller cannot use up starts: what ran a call was started well.
                    return if used > 0 {
                        Served::Lost
                    } else {
                        Served::LostUnused(format!(
                            "the worker {} before its first call; {}",
                            remains.gone,
                            remains.last_words()
                        ))
                    };
                }
            }
        }
    }

    /// Runs one call; gives the worker back if it may be used again.
    async fn call(&mut self, mut worker: Worker, mut call: Call, number: u64) -> Option<Worker> {
        let began = Instant::now();
        worker.logs.call_begins(call.id.as_str());
        let end = self.run_call(&mut worker, &mut call, number).await;
        let fits = |echoed: u64| echoed == number;
        let (answer, fit) = match end {
            End::Frame(Ok(Frame::Result(result))) if fits(result.call) => (outcome::answer(result), true),
            End::Frame(Ok(Frame::Error(error))) if fits(error.call) => {
                self.log_trouble(&error, &call.id);
                (Err(outcome::failure(&error, self.settings.expose_errors)), true)
            }
            End::Frame(Err(Broken::NotSent(error))) => {
                let text = format!("the payload cannot be handed to the function: {error}");
                (
                    Err(Failure::new(Reason::ServerUnavailable, text).dispatched(Dispatched::No)),
                    true,
                )
            }
            End::Frame(Err(Broken::OutputTooLong)) => {
                (Err(Failure::new(Reason::InvalidOutput, lines::too_long())), false)
            }
            End::Frame(Err(Broken::Closed | Broken::Io(_))) => {
                // It is dying, or has closed its end by mistake: let it die its own death.
                let _ = timeout(OWN_DEATH, worker.exit.wait()).await;
                (Err(Failure::new(Reason::WorkerExited, "")), false)
            }
            End::Frame(Ok(_) | Err(Broken::Malformed(_))) => {
                let text = "the worker broke its protocol: the function writes where results are written";
                (
                    Err(Failure::new(Reason::RuntimeServerError, text).dispatched(Dispatched::Yes)),
                    false,
                )
            }
            End::Deadline => (
                Err(Failure::new(
                    Reason::DeadlineExceeded,
                    format!("the function did not end within {:?}", call.timeout),
                )),
                false,
            ),
            End::CallerGone => (Err(Failure::new(Reason::Cancelled, "the caller is gone")), false),
            End::Stopped => (
                Err(Failure::new(
                    Reason::Cancelled,
                    "the function is being unregistered",
                )),
                false,
            ),
        };
        if fit {
            worker.logs.drain();
            worker.logs.flush();
            self.metrics.call(&answer, began.elapsed());
            call.answer(answer);
            return Some(worker);
        }
        // First the end, then the answer: when a caller hears of a timeout, the code
        // has stopped.
        let remains = worker.kill().await;
        let answer = answer.map_err(|mut failure| {
            if failure.reason == Reason::WorkerExited {
                failure.detail = format!("the process that ran the function {}", remains.gone);
            }
            info!(
                run_uid = self.plan.run_uid,
                invocation_id = call.id.as_str(),
                reason = failure.reason.as_str(),
                gone = %remains.gone,
                "a call ended with its worker: {}",
                failure.detail
            );
            failure
        });
        self.metrics.call(&answer, began.elapsed());
        call.answer(answer);
        None
    }

    /// The whole story of a failure goes to the log, whatever the caller may see.
    fn log_trouble(&self, error: &CallError, id: &InvocationId) {
        let (run_uid, invocation_id, trouble) = (&self.plan.run_uid, id.as_str(), &error.trouble);
        match error.kind {
            ErrorKind::Raised => info!(run_uid, invocation_id, "the handler raised\n{}", trouble.trace),
            ErrorKind::InvalidOutput => info!(
                run_uid,
                invocation_id, "the output cannot be sent: {}", trouble.message
            ),
            ErrorKind::InvalidInput => debug!(
                run_uid,
                invocation_id, "the input is no JSON: {}", trouble.message
            ),
        }
    }

    /// Waits for the first thing that ends a call.
    async fn run_call(&mut self, worker: &mut Worker, call: &mut Call, number: u64) -> End {
        let Worker { exit, wire, logs } = worker;
        let cancels = self.settings.on_caller_gone == OnCallerGone::Cancel;
        let input = call.input.clone();
        let (traceparent, tracestate) = call.trace.texts();
        let invoke = Invoke {
            call: number,
            timeout: call.deadline.saturating_duration_since(Instant::now()),
            id: call.id.as_str(),
            traceparent,
            tracestate,
            input_bytes: input.len(),
        };
        let exchange = async {
            wire.send(&invoke, input).await?;
            wire.next().await
        };
        tokio::pin!(exchange);
        tokio::select! {
            biased;
            frame = &mut exchange => End::Frame(frame),
            () = died(exit, logs) => End::Frame(timeout(LAST_WORDS, exchange).await.unwrap_or(Err(Broken::Closed))),
            () = sleep_until(call.deadline) => End::Deadline,
            () = call.reply.closed(), if cancels => End::CallerGone,
            () = self.desk.cut_off() => End::Stopped,
        }
    }

    /// The registration has failed: says so, and waits to be unregistered.
    async fn give_up(&mut self, why: &str) {
        self.held.failed(&self.plan.run_uid, &self.id, why);
        self.phase.send_replace(Phase::Settled);
        self.desk
            .refuse(Failure::new(Reason::Recovering, "the function cannot be started"));
        while !self.desk.over() {
            self.desk.stop_due().await;
        }
    }
}

impl Drop for Supervisor {
    /// Also after a panic: nobody may wait for a supervisor that is not there.
    fn drop(&mut self) {
        self.held.gone(&self.plan.run_uid, &self.id);
        self.phase.send_replace(Phase::Gone);
    }
}

enum Start {
    Ready(Box<Worker>),
    Failed(String),
    Stopped,
}

enum Served {
    Stopped,
    Lost,
    LostUnused(String),
}

enum End {
    Frame(Result<Frame, Broken>),
    Deadline,
    CallerGone,
    Stopped,
}

/// Logs until the worker has died.
async fn died(exit: &mut Exit, logs: &mut Logs) {
    tokio::select! {
        _ = exit.wait() => {}
        never = logs.pump() => match never {},
    }
}

async fn last_frame(wire: &mut Wire) -> Result<Frame, Broken> {
    timeout(LAST_WORDS, wire.next())
        .await
        .unwrap_or(Err(Broken::Closed))
}
