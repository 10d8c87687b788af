//! The callers' side of a supervisor: one call at a time, the wish to end, and what is
//! promised to a call that waits while there is no worker.

use std::time::Duration;

use bytes::Bytes;
use kruntimes_proto::{
    failure::{Dispatched, Failure, Reason},
    ids::InvocationId,
};
use kruntimes_trace::Trace;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};

use crate::{functions::Slot, outcome::Answer};

/// One call on its way through the server.
#[derive(Debug)]
pub struct Call {
    /// Correlation id.
    pub id: InvocationId,
    /// W3C trace context.
    pub trace: Trace,
    /// The JSON input.
    pub input: Bytes,
    /// How long it may take.
    pub timeout: Duration,
    /// When it must have ended.
    pub deadline: Instant,
    /// The only slot of its function; free when this drops.
    pub slot: Slot,
    /// Who waits for it.
    pub reply: oneshot::Sender<Result<Answer, Failure>>,
}

impl Call {
    /// Frees the slot, then answers: whoever hears the answer may call again.
    pub(super) fn answer(self, answer: Result<Answer, Failure>) {
        drop(self.slot);
        let _ = self.reply.send(answer);
    }
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

/// What comes to a supervisor from outside.
#[derive(Debug)]
pub struct Desk {
    calls: mpsc::Receiver<Call>,
    stop: watch::Receiver<Stop>,
    /// A call that came while no worker was ready.
    waiting: Option<Call>,
}

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
    pub(super) async fn take(&mut self) -> Option<Call> {
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
    pub(super) fn over(&mut self) -> bool {
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
    pub(super) async fn stop_due(&mut self) {
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
    pub(super) async fn cut_off(&mut self) {
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

    /// The end: who still waits is told so.
    pub(super) fn close(&mut self) {
        self.calls.close();
        let ended = || Failure::new(Reason::Draining, "the function takes no more calls");
        self.refuse(ended());
        while let Ok(call) = self.calls.try_recv() {
            call.answer(Err(ended()));
        }
    }

    pub(super) fn refuse(&mut self, failure: Failure) {
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
