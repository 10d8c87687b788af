//! Who owns a function, as the gateway knows it: a trait for the path, and what it answers.

use std::{fmt, sync::Arc, time::Duration};

use jiff::Timestamp;
use kruntimes_api::keys::{Attempt, PodUid, RunKey, RunUid};
use kruntimes_peer::PeerKey;
use tokio::time::Instant;

pub mod facts;
pub mod shared;
pub mod table;
pub mod watch;

/// Everything the path may learn of one Run, from memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Namespace, name and UID: what an access review asks about.
    pub key: RunKey,
    /// The Runtime it belongs to.
    pub runtime: String,
    /// The attempt these facts are of; 0 before the first assignment. It never falls.
    pub attempt: i32,
    /// When its reservation ends, if it has a lifetime and has started.
    pub ends_at: Option<Timestamp>,
    /// Whether it can be called, and where.
    pub state: State,
    /// Who holds it now, whether or not it can be called: a call may still run there.
    pub route: Option<Route>,
    /// What its conditions say against calling it, for people (C-3.11).
    pub why: Option<String>,
    /// No Pod can take it now, so that nobody knows when it can be called.
    pub nowhere: bool,
    /// Since when its owner hands it over to another one, until it can be called again or it is known that no other
    /// one can take it. The table notes it.
    pub handed_over: Option<Instant>,
}

/// Whether a Run can be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Its owner says so.
    Ready(Route),
    /// Not now.
    NotReady(NotReady),
    /// Never again.
    Ended {
        /// Terminal phase.
        phase: String,
        /// Reason of the condition that says so, or `Unknown`.
        reason: String,
    },
}

/// Where to send a call, and what the owner must confirm before it starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Which process.
    pub owner: Owner,
    /// The fence: exactly this assignment.
    pub attempt: Attempt,
    /// The fence: exactly this Pod.
    pub pod_uid: PodUid,
}

/// One owning process: an address may be used again, a key never is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner {
    /// Where it listens.
    pub address: std::net::SocketAddr,
    /// SHA-256 of its public key.
    pub key: PeerKey,
}

/// Why a function cannot be called now; the word is the reason of the 503 (C-3.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NotReady {
    /// Waits for a Pod, or for its Pod to claim it.
    Pending,
    /// Is being prepared and registered.
    Registering,
    /// Lost its owner and waits for the next one.
    Recovering,
    /// Its owner takes no more calls.
    Draining,
    /// Is being cancelled or deleted.
    Terminating,
}

/// Why there is no entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Miss {
    /// No such UID.
    Unknown,
    /// Nobody can tell, because the Runs were not listed yet.
    NotListed,
}

/// A call that cannot be sent to where its function was, and how long it waits for it to be elsewhere.
#[derive(Debug, Clone, Copy)]
pub struct Wait<'a> {
    /// Where the function was; `None` when that is not known any more.
    pub from: Option<&'a Route>,
    /// For news that are late: how long the table may go on saying that nothing has changed, or that the function is
    /// about to be callable.
    pub late: Duration,
    /// How long a hand-over may last, from its beginning.
    pub handover: Duration,
    /// Of the call.
    pub deadline: Instant,
}

/// What a call that waits does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// It is sent: the function can be called elsewhere.
    Go,
    /// It looks again when there are news, and gives up at this time.
    Until(Instant),
}

/// Finds entries without asking anybody.
pub trait Routes: Send + Sync {
    /// What is known now.
    ///
    /// # Errors
    /// Says why there is none.
    fn find(&self, uid: RunUid) -> Result<Arc<Entry>, Miss>;

    /// Like [`Routes::find`], but gives an unknown UID a moment to appear: its creator may know it sooner
    /// than the watch does. The number of those who wait is bounded.
    ///
    /// # Errors
    /// As for [`Routes::find`].
    fn appear(&self, uid: RunUid) -> impl Future<Output = Result<Arc<Entry>, Miss>> + Send;

    /// The entry once the function can be called elsewhere than at `wait.from`; `None` as soon as that is not
    /// to be expected, or after the time that `wait` allows. The caller bounds the number of those who wait.
    fn moved(&self, uid: RunUid, wait: Wait<'_>) -> impl Future<Output = Option<Arc<Entry>>> + Send;
}

impl<T: Routes> Routes for Arc<T> {
    fn find(&self, uid: RunUid) -> Result<Arc<Entry>, Miss> {
        T::find(self, uid)
    }

    async fn appear(&self, uid: RunUid) -> Result<Arc<Entry>, Miss> {
        T::appear(self, uid).await
    }

    async fn moved(&self, uid: RunUid, wait: Wait<'_>) -> Option<Arc<Entry>> {
        T::moved(self, uid, wait).await
    }
}

// === impl Wait ===

impl Wait<'_> {
    /// What these facts mean for a call that began to wait at `since`.
    #[must_use]
    pub fn next(&self, entry: &Entry, since: Instant) -> Next {
        let until = match (&entry.state, entry.handed_over) {
            (State::Ready(route), _) if Some(route) != self.from => return Next::Go,
            (State::Ready(_), _) => since + self.late,
            (State::NotReady(_), Some(began)) => began + self.handover,
            (State::NotReady(NotReady::Pending | NotReady::Registering), None) if !entry.nowhere => {
                since + self.late
            }
            (State::NotReady(_) | State::Ended { .. }, _) => since,
        };
        Next::Until(until.min(self.deadline))
    }
}

// === impl NotReady ===

impl NotReady {
    /// Every word.
    pub const ALL: &'static [Self] = &[
        Self::Pending,
        Self::Registering,
        Self::Recovering,
        Self::Draining,
        Self::Terminating,
    ];

    /// The reason in answers.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Registering => "Registering",
            Self::Recovering => "Recovering",
            Self::Draining => "Draining",
            Self::Terminating => "Terminating",
        }
    }

    /// When it makes sense to try again, seconds.
    #[must_use]
    pub fn retry_after_seconds(self) -> u32 {
        match self {
            Self::Registering | Self::Draining => 1,
            Self::Pending => 2,
            Self::Recovering | Self::Terminating => 5,
        }
    }
}

impl fmt::Display for NotReady {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pending => "it waits for a Pod",
            Self::Registering => "it is being registered",
            Self::Recovering => "it lost its Pod and waits for another",
            Self::Draining => "its Pod takes no more calls",
            Self::Terminating => "it is being ended",
        })
    }
}
