//! Keeps one registration's worker alive and gives every call exactly one answer.
//!
//! One task owns the worker: starting it, calls, deadlines, hang-ups, deaths and the
//! end all happen here in sequence, so that an answer cannot meet another call.
//! A worker whose call did not end by itself is never used again.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bytes::Bytes;
use kruntimes_proto::{
    failure::{Dispatched, Failure, Reason},
    ids::{InvocationId, RegistrationId},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tracing::{debug, info, warn};

use super::{
    frame::{CallError, ErrorKind, Frame, Invoke},
    process::{Broken, Exit, Logs, Plan, Spawner, Wire, Worker},
};
use crate::{
    args::OnCallerGone,
    functions::{Held, Slot},
    metrics::Metrics,
    outcome::{self, Answer},
};

/// How long to look for a frame that a worker wrote just before it died.
const LAST_WORDS: Duration = Duration::from_millis(100);
/// Failed starts within [`FAILED_STARTS_WINDOW`] that end a registration (C-5.6).
const FAILED_STARTS: usize = 3;
const FAILED_STARTS_WINDOW: Duration = Duration::from_secs(60);

/// One call on its way through the server.
#[derive(Debug)]
pub struct Call {
    /// Correlation id.
    pub id: InvocationId,
    /// W3C trace context, or empty.
    pub traceparent: String,
    /// The JSON input.
    pub input: Bytes,
    /// When it must have ended.
    pub deadline: Instant,
    /// The only slot of its function; free when this drops.
    pub slot: Slot,
    /// Who waits for it.
    pub reply: oneshot::Sender<Result<Answer, Failure>>,
}

impl Call {
    /// Frees the slot, then answers: whoever hears the answer may call again.
    fn answer(self, answer: Result<Answer, Failure>) {
        drop(self.slot);
        let _ = self.reply.send(answer);
    }
}

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

/// What a supervisor shall do about its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    /// Go on.
    No,
    /// End after the running call, at this time at the latest.
    Drain(Instant),
    /// End now.
    Cancel,
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

/// What comes to a supervisor from outside.
#[derive(Debug)]
pub struct Desk {
    calls: mpsc::Receiver<Call>,
    stop: watch::Receiver<Stop>,
    /// A call that came while no worker was ready.
    waiting: Option<Call>,
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
        self.desk.calls.close();
        while let Ok(call) = self.desk.calls.try_recv() {
            call.answer(Err(ended()));
        }
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
            if failed_starts.add(Instant::now()) || !loaded {
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
        let head = Invoke {
            call: number,
            timeout: call.deadline.saturating_duration_since(began),
            id: call.id.as_str(),
            traceparent: &call.traceparent,
            input_bytes: call.input.len(),
        }
        .head();
        worker.logs.call_begins(call.id.as_str());
        let end = self.run_call(&mut worker, &mut call, head).await;
        let fits = |echoed: u64| echoed == number;
        let (answer, fit) = match end {
            End::Frame(Ok(Frame::Result(result))) if fits(result.call) => (outcome::answer(result), true),
            End::Frame(Ok(Frame::Error(error))) if fits(error.call) => {
                self.log_trouble(&error, &call.id);
                (Err(outcome::failure(&error, self.settings.expose_errors)), true)
            }
            End::Frame(Err(Broken::Closed | Broken::Io(_))) => {
                // It is dying, or has closed its end by mistake: let it die its own death.
                let _ = timeout(LAST_WORDS, worker.exit.wait()).await;
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
                    "the function did not end in time",
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
    async fn run_call(&mut self, worker: &mut Worker, call: &mut Call, head: Bytes) -> End {
        let Worker { exit, wire, logs } = worker;
        let cancels = self.settings.on_caller_gone == OnCallerGone::Cancel;
        let input = call.input.clone();
        let exchange = async {
            wire.send(head, input).await?;
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

fn ended() -> Failure {
    Failure::new(Reason::Draining, "the function takes no more calls")
}

// === impl Desk ===

impl Desk {
    /// A desk at which calls arrive one at a time.
    #[must_use]
    pub fn new(calls: mpsc::Receiver<Call>, stop: watch::Receiver<Stop>) -> Self {
        Self {
            calls,
            stop,
            waiting: None,
        }
    }

    /// The next call; `None` when the supervisor shall end. Cancel safe.
    async fn take(&mut self) -> Option<Call> {
        if let Some(call) = self.waiting.take() {
            return Some(call);
        }
        tokio::select! {
            biased;
            call = self.calls.recv() => call,
            () = ordered(&mut self.stop) => None,
        }
    }

    /// Whether to end now: told to, and nobody waits who came before that.
    fn over(&mut self) -> bool {
        self.look();
        match *self.stop.borrow() {
            Stop::No => self.stop.has_changed().is_err(),
            Stop::Drain(_) => self.waiting.is_none(),
            Stop::Cancel => true,
        }
    }

    fn look(&mut self) {
        if self.waiting.is_none() {
            self.waiting = self.calls.try_recv().ok();
        }
    }

    /// While there is no worker: keeps the promises made to a waiting call, and
    /// returns when the supervisor shall end. Cancel safe.
    async fn stop_due(&mut self) {
        loop {
            if self.over() {
                self.refuse(
                    Failure::new(Reason::Cancelled, "the function is being unregistered")
                        .dispatched(Dispatched::No),
                );
                return;
            }
            let until = match *self.stop.borrow_and_update() {
                Stop::Drain(until) => Some(until),
                Stop::No | Stop::Cancel => None,
            };
            tokio::select! {
                _ = self.stop.changed() => {}
                call = self.calls.recv(), if self.waiting.is_none() => match call {
                    Some(call) => self.waiting = Some(call),
                    None => return,
                },
                () = at(until) => {
                    self.refuse(Failure::new(Reason::Cancelled, "the function is being unregistered").dispatched(Dispatched::No));
                    return;
                }
                () = given_up(self.waiting.as_mut()) => {
                    let text = "the function was being started again and was not ready in time";
                    self.refuse(Failure::new(Reason::DeadlineExceeded, text).dispatched(Dispatched::No));
                }
            }
        }
    }

    /// While a call runs: returns when it must not run on. Cancel safe.
    async fn cut_off(&mut self) {
        loop {
            let stop = *self.stop.borrow_and_update();
            let until = match stop {
                Stop::Cancel => return,
                Stop::Drain(until) => Some(until),
                Stop::No => None,
            };
            tokio::select! {
                changed = self.stop.changed() => if changed.is_err() { return },
                () = at(until) => return,
            }
        }
    }

    fn refuse(&mut self, failure: Failure) {
        self.look();
        if let Some(call) = self.waiting.take() {
            call.answer(Err(failure));
        }
    }
}

/// Waits for any order to end.
async fn ordered(stop: &mut watch::Receiver<Stop>) {
    let _ = stop.wait_for(|stop| *stop != Stop::No).await;
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// A waiting call whose deadline has passed or whose caller left; it never started.
async fn given_up(call: Option<&mut Call>) {
    let Some(call) = call else {
        return std::future::pending().await;
    };
    tokio::select! {
        () = sleep_until(call.deadline) => {}
        () = call.reply.closed() => {}
    }
}

/// Counts starts that failed, to tell bad luck from a function that cannot run.
#[derive(Debug, Default)]
struct FailedStarts(VecDeque<Instant>);

impl FailedStarts {
    /// Notes one; `true` when it was one too many (C-5.6).
    fn add(&mut self, now: Instant) -> bool {
        self.0.push_back(now);
        while self
            .0
            .front()
            .is_some_and(|first| now.duration_since(*first) >= FAILED_STARTS_WINDOW)
        {
            self.0.pop_front();
        }
        self.0.len() >= FAILED_STARTS
    }

    /// How long to wait before the next one.
    fn pause(&self) -> Duration {
        Duration::from_millis(250) * u32::try_from(self.0.len()).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_failed_starts_within_a_minute_are_too_many() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut starts = FailedStarts::default();
        assert!(!starts.add(at(0)));
        assert!(!starts.add(at(30)));
        assert!(!starts.add(at(60)), "the first is a minute old");
        assert!(starts.add(at(61)));
    }
}
