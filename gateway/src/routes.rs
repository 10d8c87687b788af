//! Who owns a function, as the gateway knows it: a trait for the path, and what it answers.

use std::{fmt, sync::Arc};

use jiff::Timestamp;
use kruntimes_api::keys::{Attempt, PodUid, RunKey, RunUid};
use kruntimes_peer::PeerKey;

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
}

impl<T: Routes> Routes for Arc<T> {
    fn find(&self, uid: RunUid) -> Result<Arc<Entry>, Miss> {
        T::find(self, uid)
    }

    async fn appear(&self, uid: RunUid) -> Result<Arc<Entry>, Miss> {
        T::appear(self, uid).await
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
