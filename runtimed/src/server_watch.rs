//! Does the Runtime Server answer at all? What holds for all of its functions: the Pod's readiness,
//! so that no new Run comes, and in the end its heartbeat, so that the scheduler fetches a fence.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

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
/// The part of readiness.
pub const PART: &str = "runtime-server";

/// Since when the server is silent. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct ServerSilence {
    since: Arc<Mutex<Option<Instant>>>,
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
        self.lasts(now).is_some_and(|silence| silence >= LOST_AFTER)
    }

    fn lasts(&self, now: Instant) -> Option<Duration> {
        self.lock().map(|since| now.saturating_duration_since(since))
    }

    /// Takes in an answer, or that there was none to a question `asked` then.
    fn heard(&self, answered: bool, asked: Instant) {
        let mut since = self.lock();
        if answered {
            *since = None;
        } else {
            since.get_or_insert(asked);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
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
        silence.heard(!matches!(answer, Err(ServerError::Silent(_))), asked);
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
        silence.heard(false, start);
        silence.heard(false, start + EVERY);
        assert!(!silence.is_lost(start + LOST_AFTER - Duration::from_millis(1)));
        assert!(silence.is_lost(start + LOST_AFTER));
        silence.heard(true, start + LOST_AFTER);
        assert!(!silence.is_lost(start + 2 * LOST_AFTER), "resumes by itself");
    }
}
