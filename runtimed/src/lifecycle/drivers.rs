//! The drivers of this Pod: one mailbox and one task a Run.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use kruntimes_api::{
    Run,
    keys::{RunKey, RunUid},
};
use tokio::sync::watch;

use super::{
    Facts,
    act::Pod,
    decide::{Holding, Step},
    drive::Driver,
    facts::Me,
};

/// What the watch tells a driver.
#[derive(Debug, Clone)]
pub enum Seen {
    /// The object, as it was at some time.
    Object(Arc<Run>),
    /// Gone from the watch, or never in it: a hint to read the live object, never a verdict
    /// (C-2.3).
    Doubt,
}

/// The drivers of this Pod, by Run. Clones share them.
#[derive(Clone)]
pub struct Drivers {
    pod: Arc<Pod>,
    mailboxes: Arc<Mutex<HashMap<RunUid, watch::Sender<Seen>>>>,
    /// How many there are.
    count: Arc<watch::Sender<usize>>,
}

// === impl Seen ===

impl Seen {
    /// Whether the live object must be read first; `known` is the newest version that was ever seen. A Run that is
    /// said to be claimed here, of which this driver knows nothing yet, was claimed by a process before, or by this
    /// one before it gave the Run back: a list may be so old that it shows what was before that.
    #[must_use]
    pub fn is_doubtful(&self, me: &Me, known: Option<u64>) -> bool {
        match self {
            Self::Doubt => true,
            Self::Object(run) => {
                let facts = Facts::of(run, me, None);
                known.is_none() && facts.mine && facts.claimed
            }
        }
    }
}

// === impl Drivers ===

impl Drivers {
    /// None yet.
    #[must_use]
    pub fn new(pod: Arc<Pod>) -> Self {
        Self {
            pod,
            mailboxes: Arc::default(),
            count: Arc::default(),
        }
    }

    /// Returns once no Run is driven.
    pub async fn none_left(&self) {
        // The sender lives as long as `self`, so that an error cannot happen.
        let _ = self.count.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Tells the driver of the Run, which is started when there is none. A doubt about a Run that
    /// nobody drives is none, except for what the journal remembers.
    pub fn tell(&self, key: RunKey, seen: Seen) {
        let mut mailboxes = self.lock();
        // A mailbox that nobody reads is that of a task that panicked: another one begins anew.
        if let Some(mailbox) = mailboxes.get(&key.uid).filter(|mailbox| !mailbox.is_closed()) {
            mailbox.send_replace(seen);
            return;
        }
        let record = self.pod.journal.get(key.uid);
        if record.is_none() && matches!(seen, Seen::Doubt) {
            return;
        }
        if record.is_some() {
            // Here and now: nobody may be given its capacity before its driver first runs.
            let object = match &seen {
                Seen::Object(run) => Some(&**run),
                Seen::Doubt => None,
            };
            self.pod.restore(&key, object);
        }
        let (sender, mut mailbox) = watch::channel(seen);
        mailbox.mark_changed();
        mailboxes.insert(key.uid, sender);
        self.counted(&mailboxes);
        drop(mailboxes);
        let held = record
            .as_ref()
            .and_then(|record| record.attempt())
            .map(|attempt| Holding {
                attempt,
                step: Step::Prepared,
            });
        let driver = Driver::new(Arc::clone(&self.pod), self.clone(), key, mailbox, held);
        self.pod.drain.spawn("run", driver.run());
    }

    /// Every Run that is driven.
    #[must_use]
    pub fn all(&self) -> Vec<RunUid> {
        self.lock().keys().copied().collect()
    }

    /// Doubts the Run `uid`, whatever its name.
    pub fn doubt(&self, uid: RunUid) {
        if let Some(mailbox) = self.lock().get(&uid) {
            mailbox.send_replace(Seen::Doubt);
        }
    }

    /// Ends a driver unless it has unread mail.
    pub(super) fn end(&self, uid: RunUid, mailbox: &watch::Receiver<Seen>) -> bool {
        let mut mailboxes = self.lock();
        if mailbox.has_changed().unwrap_or(false) {
            return false;
        }
        mailboxes.remove(&uid);
        self.counted(&mailboxes);
        true
    }

    /// Ends a driver that could not finish.
    pub(super) fn abandon(&self, uid: RunUid) {
        let mut mailboxes = self.lock();
        mailboxes.remove(&uid);
        self.counted(&mailboxes);
    }

    fn counted(&self, mailboxes: &HashMap<RunUid, watch::Sender<Seen>>) {
        let count = mailboxes.len();
        self.pod
            .numbers
            .runs
            .set(i64::try_from(count).unwrap_or(i64::MAX));
        self.count.send_replace(count);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunUid, watch::Sender<Seen>>> {
        self.mailboxes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
