//! What the server's answers about a registration mean, over time.

use std::time::Duration;

use jiff::Timestamp;
use kruntimes_api::Run;
use kruntimes_proto::{executor::FunctionRegistrationState as State, failure::Reason};
use tokio::time::Instant;

use super::{
    decide::Fault,
    timers::{Idle, POLL},
};
use crate::runtime_server::{Observed, ServerError};

/// A server that does not answer for this long is taken for gone, for the time being.
const SILENT_AFTER: Duration = Duration::from_secs(10);

/// A registration that drains this soon after it became ready has failed: handed over at no cost, it would go
/// round without end.
const SETTLED_AFTER: Duration = Duration::from_secs(10);

/// Of one registration.
#[derive(Debug, Clone)]
pub struct Health {
    /// When it became ready.
    began: Instant,
    idle: Option<Idle>,
    /// After a look that found it busy, the next poll comes first.
    idle_not_before: Instant,
    next_poll: Instant,
    silent_since: Option<Instant>,
}

/// What an answer means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It can be called.
    Ready,
    /// No answer, or not a clear one, but not for long yet.
    Doubtful,
    /// No answer for too long.
    Silent,
    /// It will never be called again.
    Lost(Fault),
}

// === impl Health ===

impl Health {
    /// Of a registration that has just become ready; it is to be asked at once.
    #[must_use]
    pub fn new(run: Option<&Run>, now: Instant) -> Self {
        Self {
            began: now,
            idle: run.and_then(Idle::new),
            idle_not_before: now,
            next_poll: now,
            silent_since: None,
        }
    }

    /// When something is to be done.
    #[must_use]
    pub fn next(&self) -> Instant {
        self.idle_at().map_or(self.next_poll, |at| at.min(self.next_poll))
    }

    /// Whether it is to be ended for idleness, if it still is idle.
    #[must_use]
    pub fn is_idle(&self, now: Instant) -> bool {
        self.idle_at().is_some_and(|at| at <= now)
    }

    /// The server is asked now.
    pub fn asking(&mut self, now: Instant) {
        self.next_poll = now + POLL;
        if self.is_idle(now) {
            self.idle_not_before = now + POLL;
        }
    }

    /// Whether it has been idle for its whole time, by the newest answer.
    #[must_use]
    pub fn has_expired(&self, now: Instant) -> bool {
        self.idle
            .as_ref()
            .and_then(Idle::expires)
            .is_some_and(|at| at <= now)
    }

    /// Takes in an answer.
    pub fn judge(
        &mut self,
        observed: Result<Observed, ServerError>,
        wall: Timestamp,
        now: Instant,
    ) -> Verdict {
        let fault = |message: String| {
            Verdict::Lost(Fault {
                reason: "RegistrationFailed",
                message,
            })
        };
        match observed {
            Ok(observed) => match observed.state {
                State::Ready => {
                    self.silent_since = None;
                    if let Some(idle) = &mut self.idle {
                        idle.observe(&observed, wall, now);
                    }
                    Verdict::Ready
                }
                State::Failed => fault(observed.fatal_error),
                State::Draining => {
                    let message = "the Runtime Server ends the registration";
                    if now.saturating_duration_since(self.began) < SETTLED_AFTER {
                        fault(message.to_owned())
                    } else {
                        Verdict::Lost(Fault::draining(message))
                    }
                }
                State::Registering | State::Unspecified => self.doubt(now),
            },
            Err(ServerError::Answered(failure))
                if matches!(
                    failure.reason,
                    Reason::RegistrationNotFound | Reason::StaleRegistration
                ) =>
            {
                fault("the Runtime Server lost the registration".to_owned())
            }
            Err(_) => self.doubt(now),
        }
    }

    fn doubt(&mut self, now: Instant) -> Verdict {
        let since = *self.silent_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= SILENT_AFTER {
            Verdict::Silent
        } else {
            Verdict::Doubtful
        }
    }

    fn idle_at(&self) -> Option<Instant> {
        let at = self.idle.as_ref()?.expires()?;
        Some(at.max(self.idle_not_before))
    }
}

#[cfg(test)]
mod tests {
    use kruntimes_api::fixtures;
    use kruntimes_proto::failure::Failure;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn answer(state: State) -> Result<Observed, ServerError> {
        Ok(Observed {
            state,
            in_flight: 0,
            last_activity_unix_nano: 0,
            fatal_error: "boom".to_owned(),
        })
    }

    fn health(now: Instant) -> Health {
        let run = fixtures::run("ns", "n")
            .with(|run| run.spec.mode.function.as_mut().unwrap().idle_timeout_seconds = Some(10))
            .build();
        Health::new(Some(&run), now)
    }

    #[tokio::test(start_paused = true)]
    async fn silence_counts_from_the_first_missing_answer() {
        let now = Instant::now();
        let mut health = health(now);
        let mut at =
            |seconds: u32, observed| health.judge(observed, Timestamp::UNIX_EPOCH, now + seconds * SECOND);
        let silent = || Err(ServerError::Silent("no".to_owned()));
        assert_eq!(at(0, silent()), Verdict::Doubtful);
        assert_eq!(at(9, answer(State::Registering)), Verdict::Doubtful);
        assert_eq!(at(10, silent()), Verdict::Silent);
        assert_eq!(at(11, answer(State::Ready)), Verdict::Ready);
        assert_eq!(at(12, silent()), Verdict::Doubtful, "counted anew");
    }

    #[tokio::test(start_paused = true)]
    async fn a_clear_word_ends_it_at_once() {
        let now = Instant::now();
        for observed in [
            answer(State::Failed),
            answer(State::Draining),
            Err(ServerError::Answered(Failure::new(
                Reason::RegistrationNotFound,
                "",
            ))),
            Err(ServerError::Answered(Failure::new(Reason::StaleRegistration, ""))),
        ] {
            let verdict = health(now).judge(observed, Timestamp::UNIX_EPOCH, now);
            assert!(
                matches!(&verdict, Verdict::Lost(fault) if fault.reason == "RegistrationFailed"),
                "{verdict:?}"
            );
        }
    }

    /// C-7.3: a server that drains hands over at no cost; one that drains whatever it is given does not.
    #[tokio::test(start_paused = true)]
    async fn a_server_that_drains_hands_over_what_it_had_served() {
        let now = Instant::now();
        for (after, draining) in [(9, false), (10, true)] {
            let verdict = health(now).judge(
                answer(State::Draining),
                Timestamp::UNIX_EPOCH,
                now + after * SECOND,
            );
            assert!(
                matches!(&verdict, Verdict::Lost(fault) if fault.is_draining() == draining),
                "{after}: {verdict:?}"
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_busy_look_at_idleness_is_not_repeated_before_the_next_poll() {
        let now = Instant::now();
        let mut health = health(now);
        health.judge(answer(State::Ready), Timestamp::UNIX_EPOCH, now);
        let due = now + 10 * SECOND;
        health.asking(now + 9 * SECOND);
        assert!(health.next() == due && health.is_idle(due) && !health.is_idle(now));
        health.asking(due);
        assert_eq!(health.next(), due + POLL);
        assert!(health.has_expired(due));
    }
}
