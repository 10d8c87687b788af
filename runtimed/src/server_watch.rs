//! Does the Runtime Server answer at all, and does it obey? What holds for all of its functions: the
//! Pod's readiness, so that no new Run comes, and in the end its heartbeat, so that the scheduler fetches
//! a fence.
//!
//! An answer to anything is one: a server that does one thing at a time answers a question after the calls
//! that came before it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kruntimes_api::keys::RunUid;
use kruntimes_ops::readiness::Readiness;
use tokio::time::{Instant, sleep};

use crate::runtime_server::{RuntimeServer, ServerError};

/// Between two questions.
const EVERY: Duration = Duration::from_secs(5);
/// The Pod is not ready when its server has been silent for this long.
const UNREADY_AFTER: Duration = Duration::from_secs(10);
/// The Pod is as good as gone when its server has been silent for this long: only its end makes sure
/// that nothing of its Runs goes on.
const LOST_AFTER: Duration = Duration::from_secs(30);
/// The same when it has kept a function that was to end for this long.
const KEPT_AFTER: Duration = Duration::from_secs(60);
/// The part of readiness.
pub const PART: &str = "runtime-server";

/// Since when the server is silent, or does not let go of functions. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ServerSilence {
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    silent: Option<Instant>,
    kept: HashMap<RunUid, Instant>,
}

// === impl ServerSilence ===

impl ServerSilence {
    /// It has answered.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether it must be taken for lost.
    #[must_use]
    pub fn is_lost(&self, now: Instant) -> bool {
        let state = self.lock();
        let past = |since: Instant, limit| now.saturating_duration_since(since) >= limit;
        state.silent.is_some_and(|since| past(since, LOST_AFTER))
            || state.kept.values().any(|since| past(*since, KEPT_AFTER))
    }

    /// The server did not confirm that it holds nothing of this Run any more.
    pub fn keeps(&self, run: RunUid, now: Instant) {
        self.lock().kept.entry(run).or_insert(now);
    }

    /// It did.
    pub fn lets_go(&self, run: RunUid) {
        self.lock().kept.remove(&run);
    }

    fn lasts(&self, now: Instant) -> Option<Duration> {
        self.lock()
            .silent
            .map(|since| now.saturating_duration_since(since))
    }

    /// Takes in an answer, or that there was none to a question `asked` then; `last` is when it last
    /// answered anything else.
    fn heard(&self, answered: bool, asked: Instant, last: Option<Instant>) {
        let mut state = self.lock();
        state.silent = if answered {
            None
        } else {
            state.silent.or(Some(asked)).max(last)
        };
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks for ever.
pub async fn run(server: RuntimeServer, silence: ServerSilence, readiness: Readiness) {
    let mut unready = None;
    loop {
        sleep(EVERY).await;
        let asked = Instant::now();
        let answer = server.supports_functions().await;
        // Whatever it says, it is there: one that refuses is not silent.
        let answered = !matches!(answer, Err(ServerError::Silent(_)));
        silence.heard(answered, asked, server.last_answer());
        let lasts = silence.lasts(Instant::now());
        match (lasts, &unready) {
            (None, Some(_)) => {
                tracing::info!("the Runtime Server answers again");
                unready = None;
            }
            (Some(lasts), None) if lasts >= UNREADY_AFTER => {
                tracing::warn!(
                    error = answer.err().map(|error| error.to_string()),
                    "the Runtime Server does not answer; the Pod is not ready"
                );
                unready = Some(readiness.register(PART));
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn silence_counts_from_the_first_missing_answer() {
        let silence = ServerSilence::new();
        let start = Instant::now();
        assert!(!silence.is_lost(start + LOST_AFTER));
        silence.heard(false, start, None);
        silence.heard(false, start + EVERY, None);
        assert!(!silence.is_lost(start + LOST_AFTER - Duration::from_millis(1)));
        assert!(silence.is_lost(start + LOST_AFTER));
        silence.heard(true, start + LOST_AFTER, None);
        assert!(!silence.is_lost(start + 2 * LOST_AFTER), "resumes by itself");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_to_anything_breaks_the_silence() {
        let silence = ServerSilence::new();
        let start = Instant::now();
        silence.heard(false, start, Some(start - EVERY));
        assert!(
            silence.is_lost(start + LOST_AFTER),
            "from the first missing answer on"
        );
        silence.heard(false, start + LOST_AFTER, Some(start + 5 * EVERY));
        assert!(!silence.is_lost(start + LOST_AFTER));
        assert!(silence.is_lost(start + 5 * EVERY + LOST_AFTER));
    }

    /// C-6.4: only the Pod's end makes sure that what a server keeps has ended.
    #[tokio::test(start_paused = true)]
    async fn a_server_that_keeps_what_was_to_end_is_lost() {
        let silence = ServerSilence::new();
        let start = Instant::now();
        let run = kruntimes_api::fixtures::run("ns", "n").build().run_uid().unwrap();
        silence.keeps(run, start);
        silence.keeps(run, start + EVERY);
        assert!(!silence.is_lost(start + KEPT_AFTER - Duration::from_millis(1)));
        assert!(silence.is_lost(start + KEPT_AFTER));
        silence.lets_go(run);
        assert!(!silence.is_lost(start + KEPT_AFTER), "resumes by itself");
    }
}
