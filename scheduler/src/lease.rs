//! One leader, by a Lease.
//!
//! Whether another's lease has run out is judged by how long *we* have seen it unchanged, never
//! by its timestamps: clocks differ. A leader gives up by itself when it could not renew within
//! the renew deadline, which is shorter than the lease, so that it has stopped before the next
//! one begins. Every write of a leader is guarded by resourceVersion besides.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kruntimes_api::names::MANAGER_SCHEDULER;
use kruntimes_ops::drain::CancellationToken;
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// How long things take.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Others wait this long after the last renewal they saw.
    pub lease: Duration,
    /// The leader gives up this long after its last renewal.
    pub renew_deadline: Duration,
    /// Pause between two tries.
    pub retry: Duration,
}

/// Takes part in the election.
#[derive(Debug)]
pub struct Candidate {
    api: Api<Lease>,
    name: String,
    judge: Judge,
}

/// The deciding part of an election: the Lease as read → whether it may be taken. Pure: `now` is passed
/// in.
#[derive(Debug)]
pub struct Judge {
    identity: String,
    timing: Timing,
    /// The Lease as last seen to change, and when.
    seen: Option<(Record, Instant)>,
}

/// What to do about the Lease.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// Create it.
    Create(Lease),
    /// Replace it, guarded by its resourceVersion.
    Replace(Lease),
    /// Somebody else holds it.
    Others,
}

/// One time of being leader. Clones share it.
#[derive(Debug, Clone)]
pub struct Term {
    ended: CancellationToken,
    until: Arc<Mutex<Instant>>,
}

/// What shows that somebody is alive: any change of it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Record {
    holder: String,
    renewed: Option<MicroTime>,
    version: Option<String>,
}

/// How a try to take or renew ended.
enum Try {
    Held,
    /// Somebody else holds it, or has just changed it.
    Others,
    /// The API did not answer.
    Failed(String),
}

// === impl Timing ===

impl Default for Timing {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry: Duration::from_secs(2),
        }
    }
}

// === impl Candidate ===

impl Candidate {
    pub fn new(client: Client, namespace: &str, name: &str, identity: String, timing: Timing) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            judge: Judge::new(identity, timing),
        }
    }

    /// Waits until this process is the leader.
    pub async fn acquire(&mut self) -> Term {
        loop {
            let began = Instant::now();
            match self.attempt(began).await {
                // Counted from before the write: others count from after it.
                Try::Held => return Term::new(began + self.judge.timing.renew_deadline),
                Try::Others => {}
                Try::Failed(error) => {
                    tracing::warn!(%error, lease = self.name, "cannot take the leader lease")
                }
            }
            sleep(self.judge.timing.retry).await;
        }
    }

    /// Renews until the term is lost; ends it then.
    pub async fn keep(&mut self, term: &Term) {
        loop {
            sleep(self.judge.timing.retry).await;
            let began = Instant::now();
            let until = term.until();
            let outcome = timeout_at(until, self.attempt(began)).await;
            match outcome {
                Ok(Try::Held) if Instant::now() < until => {
                    term.extend(began + self.judge.timing.renew_deadline)
                }
                Ok(Try::Held) | Err(_) => {
                    tracing::error!(
                        lease = self.name,
                        "the renew deadline has passed; leadership is dropped"
                    );
                    break;
                }
                Ok(Try::Others) => {
                    tracing::error!(lease = self.name, "somebody else has taken the leader lease");
                    break;
                }
                Ok(Try::Failed(error)) => {
                    tracing::warn!(%error, lease = self.name, "cannot renew the leader lease");
                    if Instant::now() >= until {
                        tracing::error!(
                            lease = self.name,
                            "the renew deadline has passed; leadership is dropped"
                        );
                        break;
                    }
                }
            }
        }
        term.end();
    }

    /// Gives the lease back, so that the next leader need not wait. Best effort.
    pub async fn release(&mut self) {
        let release = async {
            let Ok(Some(mut lease)) = self.api.get_opt(&self.name).await else {
                return;
            };
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_deref() != Some(&self.judge.identity) {
                return;
            }
            spec.holder_identity = None;
            // The shortest that the API accepts; our successors judge by what they see anyway.
            spec.lease_duration_seconds = Some(1);
            if let Err(error) = self.api.replace(&self.name, &post(), &lease).await {
                tracing::warn!(%error, "cannot release the leader lease");
            }
        };
        // On the way out nobody waits longer than this for a favour to others.
        let _ = timeout(Duration::from_secs(2), release).await;
    }

    /// Reads, judges, and takes or renews guarded by resourceVersion.
    async fn attempt(&mut self, now: Instant) -> Try {
        let patience = self.judge.timing.renew_deadline;
        match timeout(patience, self.attempt_inner(now)).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(kube::Error::Api(status))) if status.is_conflict() || status.is_already_exists() => {
                Try::Others
            }
            Ok(Err(error)) => Try::Failed(error.to_string()),
            Err(_) => Try::Failed("no answer".to_owned()),
        }
    }

    async fn attempt_inner(&mut self, now: Instant) -> Result<Try, kube::Error> {
        let live = self.api.get_opt(&self.name).await?;
        match self.judge.judge(live, &self.name, now, Timestamp::now()) {
            Verdict::Create(lease) => self.api.create(&post(), &lease).await.map(drop)?,
            Verdict::Replace(lease) => self.api.replace(&self.name, &post(), &lease).await.map(drop)?,
            Verdict::Others => return Ok(Try::Others),
        }
        Ok(Try::Held)
    }
}

// === impl Judge ===

impl Judge {
    pub fn new(identity: String, timing: Timing) -> Self {
        Self {
            identity,
            timing,
            seen: None,
        }
    }

    /// What to do about the Lease `name`, which is `live`.
    pub fn judge(&mut self, live: Option<Lease>, name: &str, now: Instant, wall: Timestamp) -> Verdict {
        let Some(mut lease) = live else {
            let metadata = ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            };
            let mut lease = Lease {
                metadata,
                spec: Some(LeaseSpec::default()),
            };
            self.sign(&mut lease, true, wall);
            return Verdict::Create(lease);
        };
        let record = Record::of(&lease);
        let mine = record.holder == self.identity;
        if !mine && !record.holder.is_empty() && !self.has_run_out(record, now) {
            return Verdict::Others;
        }
        self.sign(&mut lease, !mine, wall);
        Verdict::Replace(lease)
    }

    /// Whether the record has been the same for a whole lease, by our own clock.
    fn has_run_out(&mut self, record: Record, now: Instant) -> bool {
        match &self.seen {
            Some((known, since)) if *known == record => {
                now.saturating_duration_since(*since) >= self.timing.lease
            }
            _ => {
                self.seen = Some((record, now));
                false
            }
        }
    }

    fn sign(&self, lease: &mut Lease, takes_over: bool, wall: Timestamp) {
        let now = MicroTime(wall);
        let spec = lease.spec.get_or_insert_default();
        if takes_over {
            spec.acquire_time = Some(now.clone());
            spec.lease_transitions = Some(spec.lease_transitions.map_or(0, |it| it.saturating_add(1)));
        }
        spec.holder_identity = Some(self.identity.clone());
        spec.lease_duration_seconds =
            Some(i32::try_from(self.timing.lease.as_secs().max(1)).unwrap_or(i32::MAX));
        spec.renew_time = Some(now);
    }
}

// === impl Record ===

impl Record {
    fn of(lease: &Lease) -> Self {
        let spec = lease.spec.clone().unwrap_or_default();
        Self {
            holder: spec.holder_identity.unwrap_or_default(),
            renewed: spec.renew_time,
            version: lease.metadata.resource_version.clone(),
        }
    }
}

// === impl Term ===

impl Term {
    fn new(until: Instant) -> Self {
        Self {
            ended: CancellationToken::new(),
            until: Arc::new(Mutex::new(until)),
        }
    }

    /// Whether this process may write as the leader. Ask right before each write: after a stop of
    /// the whole process the timers have not fired yet, but the time has passed.
    pub fn holds(&self) -> bool {
        !self.ended.is_cancelled() && Instant::now() < self.until()
    }

    /// Ends the term for everybody who shares it.
    pub fn end(&self) {
        self.ended.cancel();
    }

    fn until(&self) -> Instant {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn extend(&self, until: Instant) {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }

    /// A term without end, for tests of what happens within one.
    #[doc(hidden)]
    #[must_use]
    pub fn endless() -> Self {
        Self::new(Instant::now() + Duration::from_secs(1_000_000))
    }
}

fn post() -> PostParams {
    PostParams {
        dry_run: false,
        field_manager: Some(MANAGER_SCHEDULER.to_owned()),
    }
}
