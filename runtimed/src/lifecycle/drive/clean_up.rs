//! Everything of a Run is given back: gate, calls, registration, directory, record, capacity.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::{Action, Driver, Expired};
use crate::held::Gate;

/// A stopping process waits this long for a server that cannot be reached.
const GIVE_UP_AFTER: Duration = Duration::from_secs(10);
/// Of the grace period, what is kept for unregistering and for the last writes.
const RESERVE: Duration = Duration::from_secs(15);
/// After the end of a Run's life, for the answer to a call that had the same deadline.
const LAST_ANSWER: Duration = Duration::from_secs(1);

/// A clean-up that is not done yet. It lasts several rounds: what happens meanwhile may change how
/// patient it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cleaning {
    /// The first round.
    began: Instant,
    /// The first time the server was asked to confirm, which it did not.
    asked: Option<Instant>,
}

/// How a round ended.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Round {
    /// Nothing is held any more.
    Done,
    /// To be decided anew.
    Again,
    /// The process stops and the server cannot be reached.
    GivenUp,
}

impl Driver {
    /// One round.
    pub(super) async fn clean_up(&mut self, patient: bool) -> Round {
        let cleaning = *self.cleaning.get_or_insert_with(|| Cleaning {
            began: Instant::now(),
            asked: None,
        });
        self.close(patient);
        if let Some(entry) = self.entry.clone() {
            let patience = match self.local.expired {
                _ if patient => self.pod.grace.saturating_sub(RESERVE),
                // A call never outlives the Run; it is told of its deadline, not of a cancellation.
                Some(Expired::Lifetime) => LAST_ANSWER,
                _ => Duration::ZERO,
            };
            let free = timeout_at(cleaning.began + patience, entry.slot.free());
            // Somebody may cancel or delete the Run while it waits for a call.
            if self
                .while_next(&Action::CleanUp { patient }, free)
                .await
                .is_none()
            {
                return Round::Again;
            }
        }
        let drain = (patient && cleaning.asked.is_none()).then_some(self.pod.grace);
        let asked = cleaning.asked.unwrap_or_else(Instant::now);
        if let Err(error) = self.pod.clean_up(&self.key, drain, patient).await {
            tracing::warn!(error, run = %self.key, "cleaning up is tried again");
            self.cleaning = Some(Cleaning {
                asked: Some(asked),
                ..cleaning
            });
            if self.pod.drain.is_stopping() && asked.elapsed() >= GIVE_UP_AFTER {
                tracing::error!(run = %self.key, "the process stops without having cleaned up");
                return Round::GivenUp;
            }
            self.delay().await;
            return Round::Again;
        }
        self.reset_backoff();
        self.local.held = None;
        self.entry = None;
        self.registration = None;
        self.cleaning = None;
        Round::Done
    }

    /// No call begins any more.
    fn close(&self, patient: bool) {
        let ending = self.local.expired.is_some()
            || self
                .run
                .as_ref()
                .is_none_or(|run| run.is_deleting() || run.cancel_requested());
        let gate = match (patient, ending) {
            (true, _) => Gate::Draining,
            (false, false) if self.local.fault.is_some() => Gate::Recovering,
            (false, _) => Gate::Terminating,
        };
        if let Some(entry) = &self.entry {
            entry.close(gate);
        }
    }
}
