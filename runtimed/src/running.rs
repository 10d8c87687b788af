//! One call at the Runtime Server, and the slot it has until the server has let go of it.
//!
//! A call can end here before it ends there: its caller hangs up, somebody cancels it, the server
//! misses the deadline. The slot is free only when the server runs nothing of the call any more, so
//! that neither its outputs nor its processes meet the next one (C-8.6).

use std::{sync::Arc, time::Duration};

use kruntimes_ops::drain::Drain;
use kruntimes_proto::{
    executor::InvokeFunctionRequest,
    failure::{Failure, Reason},
    ids::InvocationId,
    limits,
};
use kruntimes_trace::Trace;
use tokio::{
    runtime::Handle,
    time::{Instant, sleep, timeout},
};

use crate::{
    held::{Entry, Gate, Registered},
    runtime_server::{Answer, RuntimeServer, ServerError, says_gone},
    slots::Taken,
};

/// How long a server gets to end a call that was cancelled, before the registration is made anew.
const OBEYS_WITHIN: Duration = Duration::from_secs(1);
/// How long the caller of a cancelled call waits at most to be told so.
const TOLD_WITHIN: Duration = Duration::from_secs(5);
/// After its deadline a call that nobody waits for is ended by other means.
const OVERTIME: Duration = Duration::from_secs(2);
/// How long other means get before they are tried again.
const LAST_MEANS: Duration = Duration::from_secs(10);
/// Between two looks whether the server still runs a call, at first and at most.
const LOOKS: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(250));

/// A call that has the slot.
pub struct Occupied<'a> {
    server: &'a RuntimeServer,
    drain: &'a Drain,
    entry: &'a Arc<Entry>,
    registered: &'a Arc<Registered>,
    taken: Option<Taken>,
    until: Instant,
    /// The server has the call, as far as is known.
    there: bool,
}

// === impl Occupied ===

impl<'a> Occupied<'a> {
    /// Nothing is sent yet. `until` is the deadline of the call.
    pub fn new(
        server: &'a RuntimeServer,
        drain: &'a Drain,
        entry: &'a Arc<Entry>,
        registered: &'a Arc<Registered>,
        taken: Taken,
        until: Instant,
    ) -> Self {
        Self {
            server,
            drain,
            entry,
            registered,
            taken: Some(taken),
            until,
            there: false,
        }
    }

    /// Sends it and waits for its end. The slot stays taken until this drops, and longer if the
    /// server may still run the call.
    ///
    /// # Errors
    /// What the caller is told.
    pub async fn call(
        &mut self,
        message: InvokeFunctionRequest,
        time: Duration,
        trace: &Trace,
    ) -> Result<Answer, Failure> {
        self.there = true;
        let cancelled = async {
            match &self.taken {
                Some(taken) => taken.cancelled().await,
                None => std::future::pending().await,
            }
        };
        let answered = tokio::select! {
            biased;
            answered = self.server.invoke(message, time, trace) => answered,
            () = cancelled => return Err(self.cancel().await),
        };
        match answered {
            Ok(answer) => {
                self.there = false;
                Ok(answer)
            }
            Err(failed) => {
                if let Some(raised) = &failed.hidden {
                    let id = self.entry.slot.running().map(|it| it.id);
                    let invocation_id = id.as_ref().map(InvocationId::as_str);
                    tracing::info!(run = %self.entry.key, invocation_id, raised, "the function raised an error");
                }
                self.there = !failed.over;
                if failed.failure.reason == Reason::Busy {
                    // Nobody calls but we, and we have the slot: it runs a call that nobody here knows of any
                    // more, such as one from before a restart. That one ends by its own deadline, if ever.
                    self.there = true;
                    self.until = Instant::now() + limits::MAX_TIMEOUT;
                }
                Err(self.of_the_server(failed.failure))
            }
        }
    }

    /// A server may say `Cancelled` only when this process ended the registration: who cancels a call
    /// is answered here.
    fn of_the_server(&self, failure: Failure) -> Failure {
        if failure.reason == Reason::Cancelled && self.entry.gate() == Gate::Open {
            return Failure::new(
                Reason::RuntimeServerError,
                "the Runtime Server cancelled a call that nobody cancelled",
            );
        }
        failure
    }

    /// First the end, then the answer: who hears that a call was cancelled may rely on it.
    async fn cancel(&mut self) -> Failure {
        let gone = gone(
            self.server,
            self.entry,
            self.registered,
            Instant::now() + OBEYS_WITHIN,
        );
        if timeout(TOLD_WITHIN, gone).await.is_ok() {
            self.there = false;
        } else {
            // Its deadline is of no interest any more.
            self.until = Instant::now();
        }
        Failure::new(Reason::Cancelled, "the call was cancelled on request")
    }
}

impl Drop for Occupied<'_> {
    fn drop(&mut self) {
        let taken = self.taken.take();
        // Without a runtime the process is ending.
        if !self.there || Handle::try_current().is_err() {
            return;
        }
        let server = self.server.clone();
        let (entry, registered) = (Arc::clone(self.entry), Arc::clone(self.registered));
        let limit = self.until + OVERTIME;
        self.drain.spawn("abandoned call", async move {
            gone(&server, &entry, &registered, limit).await;
            drop(taken);
        });
    }
}

/// Returns when the server runs no call of the registration. From `limit` on the lifecycle is told, again
/// and again, to make the registration anew. A call that is known to run is not given up on: the next one
/// would only meet it. Of a server that says nothing, and behind a gate that is closed for good, it is.
async fn gone(server: &RuntimeServer, entry: &Entry, registered: &Registered, limit: Instant) {
    let mut pause = LOOKS.0;
    let mut next = limit;
    loop {
        let runs = match server.status(entry.key.uid, &registered.id).await {
            Ok(observed) if observed.in_flight <= 0 => return,
            Err(ServerError::Answered(failure)) if says_gone(failure.reason) => return,
            Ok(_) => true,
            Err(_) => false,
        };
        let now = Instant::now();
        if now >= limit + LAST_MEANS && (!runs || entry.gate().is_final()) {
            return;
        }
        if now >= next {
            tracing::warn!(run = %entry.key, "the Runtime Server does not end a call; its registration is made anew");
            entry.stuck.notify_one();
            next = now + LAST_MEANS;
        }
        sleep(pause).await;
        pause = (pause * 2).min(LOOKS.1);
    }
}
