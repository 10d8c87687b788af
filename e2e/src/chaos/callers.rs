//! One caller for each function: at a steady pace, each call with an id of its own, in turn over a kept
//! connection, a new HTTP/2 and a new HTTP/1.1 connection. Every end is written down.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use tokio::{
    task::JoinHandle,
    time::{MissedTickBehavior, timeout},
};

use super::{
    clock::Clock,
    history::{Answered, Called, End, Millis},
};
use crate::{
    call::{self, Answer, Call, Version},
    load::Line,
    world::{Function, World},
};

/// What callers ask for as the deadline.
const DEADLINE: Duration = Duration::from_secs(4);
/// When they hang up.
const HANG_UP: Duration = Duration::from_secs(6);
/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(3);

/// Running callers and what they wrote.
pub struct Callers {
    stop: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<()>>,
    log: Arc<Mutex<Vec<Called>>>,
}

struct Caller {
    world: World,
    function: Function,
    line: Line,
    clock: Clock,
    log: Arc<Mutex<Vec<Called>>>,
    made: u64,
}

// === impl Callers ===

impl Callers {
    /// Starts a caller for each function; each calls every `period`.
    #[must_use]
    pub fn start(world: &World, functions: &[Function], period: Duration, clock: Clock) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let log = Arc::new(Mutex::new(Vec::new()));
        let tasks = functions
            .iter()
            .map(|function| {
                let caller = Caller {
                    world: world.clone(),
                    function: function.clone(),
                    line: Line::new(&world.gateway),
                    clock,
                    log: Arc::clone(&log),
                    made: 0,
                };
                call::spawn(caller.go_on(period, Arc::clone(&stop)))
            })
            .collect();
        Self { stop, tasks, log }
    }

    /// The calls of all functions that ended at `since` or later, in that order.
    #[must_use]
    pub fn since(&self, since: Millis) -> Vec<Called> {
        let log = lock(&self.log);
        log[log.partition_point(|call| call.ended < since)..].to_vec()
    }

    /// Ends them, waits for their last calls, and hands out what they wrote.
    pub async fn stop(mut self) -> Result<Vec<Called>> {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks.drain(..) {
            task.await.context("a caller failed")?;
        }
        Ok(std::mem::take(&mut *lock(&self.log)))
    }
}

impl Drop for Callers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

// === impl Caller ===

impl Caller {
    async fn go_on(mut self, period: Duration, stop: Arc<AtomicBool>) {
        let mut ticks = tokio::time::interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !stop.load(Ordering::Relaxed) {
            ticks.tick().await;
            let sent = self.clock.now();
            self.made += 1;
            let invocation = format!("{}-{}", self.function.name, self.made);
            let end = self.call(&invocation).await;
            let mut log = lock(&self.log);
            // Read under the lock, so that the log is in order.
            let ended = self.clock.now();
            log.push(Called {
                function: self.function.name.clone(),
                invocation,
                sent,
                ended,
                end,
            });
        }
    }

    async fn call(&mut self, invocation: &str) -> End {
        let body = serde_json::json!({ "function": self.function.name }).to_string();
        let call = Call::invoke(&self.function.path, &self.world.token, body)
            .with("X-Kruntime-Invocation-ID", invocation)
            .with("X-Kruntime-Timeout-Millis", &DEADLINE.as_millis().to_string());
        match self.made % 3 {
            0 => self.on_the_line(&call).await,
            1 => self.on_a_connection(&call.over(Version::Http2)).await,
            _ => self.on_a_connection(&call).await,
        }
    }

    async fn on_the_line(&mut self, call: &Call) -> End {
        if let Err(end) = connected(timeout(CONNECT, self.line.connect()).await) {
            return end;
        }
        ended(timeout(HANG_UP, self.line.send(call)).await)
    }

    async fn on_a_connection(&self, call: &Call) -> End {
        let gateway = &self.world.gateway;
        let stream = match connected(timeout(CONNECT, gateway.connect(call.version)).await) {
            Ok(stream) => stream,
            Err(end) => return end,
        };
        ended(timeout(HANG_UP, gateway.send_over(stream, call)).await)
    }
}

fn connected<T>(result: Result<Result<T>, tokio::time::error::Elapsed>) -> Result<T, End> {
    match result {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(error)) => Err(End::NotSent(format!("{error:#}"))),
        Err(_) => Err(End::NotSent(format!("no connection within {CONNECT:?}"))),
    }
}

fn ended(result: Result<Result<Answer>, tokio::time::error::Elapsed>) -> End {
    match result {
        Ok(Ok(answer)) => End::Answered(Answered {
            status: answer.status.as_u16(),
            invocation: answer.header("x-kruntime-invocation-id").to_owned(),
            body: String::from_utf8_lossy(&answer.body).into_owned(),
        }),
        Ok(Err(error)) => End::Broken(format!("{error:#}")),
        Err(_) => End::Broken(format!("no answer within {HANG_UP:?}")),
    }
}

fn lock(log: &Mutex<Vec<Called>>) -> MutexGuard<'_, Vec<Called>> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}
