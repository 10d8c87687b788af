//! The one door: token and question in, verdict out.

use std::{
    collections::HashSet,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use kube::Config;
use thiserror::Error;
use tokio::time::{Instant, timeout};

use crate::{
    cache::{Answers, Kept},
    review::{self, BuildError, NotAnonymous, Question, Reviewer},
    token::{Bearer, Digest, HmacKey},
    ttl::{Answer, Caps, renewed_after},
};

/// May the caller? `Unavailable` is never to be taken for a refusal (C-3.5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Yes.
    Allowed {
        /// Nobody was asked for this call.
        cached: bool,
    },
    /// No: 403.
    Denied,
    /// The token is not good: 401.
    Rejected,
    /// It cannot be found out now: 503.
    Unavailable,
}

/// How much is kept, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// How long answers are kept.
    pub caps: Caps,
    /// How many answers are kept; each takes about 200 bytes.
    pub entries: u64,
}

/// Counts what happens; called once a question, and once a review.
pub trait Observer: Send + Sync {
    /// `result` is `allowed`, `denied`, `rejected` or `unavailable`.
    fn authorized(&self, result: &'static str, cached: bool);
    /// A review took so long, whatever it said.
    fn reviewed(&self, took: Duration);
}

/// Counts nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

/// Answers questions of access; clones share everything.
#[derive(Clone)]
pub struct Authorizer {
    shared: Arc<Shared>,
}

/// Why there is no authorizer.
#[derive(Debug, Error)]
pub enum NewError {
    /// The pool.
    #[error(transparent)]
    Pool(#[from] BuildError),
    /// The operating system gave no random numbers.
    #[error("no random numbers for the key of the authorization cache")]
    Random,
}

struct Shared {
    reviewer: Reviewer,
    answers: Answers,
    key: HmacKey,
    caps: Caps,
    clock: Box<dyn Fn() -> f64 + Send + Sync>,
    observer: Box<dyn Observer>,
    failing: AtomicBool,
    renewals: Mutex<HashSet<Digest>>,
}

/// One answer that is being renewed, until it drops.
struct Renewal {
    shared: Arc<Shared>,
    key: Digest,
}

/// How many answers are renewed at once. Each holds a token for as long. Others end, and their callers ask.
const RENEWALS: usize = 256;

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            caps: Caps::default(),
            entries: 100_000,
        }
    }
}

// === impl Authorizer ===

impl Authorizer {
    /// Takes from `config` where the API server is and whom to trust, and no identity.
    ///
    /// # Errors
    /// When TLS cannot be set up, or there are no random numbers.
    pub fn new(config: &Config, limits: Limits, observer: impl Observer + 'static) -> Result<Self, NewError> {
        Self::with_clock(config, limits, observer, unix_seconds)
    }

    /// The same with another clock for a token's `exp`: seconds since the epoch. How long an answer is kept once
    /// that is settled depends on no such clock.
    ///
    /// # Errors
    /// As there.
    pub fn with_clock(
        config: &Config,
        limits: Limits,
        observer: impl Observer + 'static,
        clock: impl Fn() -> f64 + Send + Sync + 'static,
    ) -> Result<Self, NewError> {
        Ok(Self {
            shared: Arc::new(Shared {
                reviewer: Reviewer::new(config)?,
                answers: Answers::new(limits.entries),
                key: HmacKey::generate().map_err(|_| NewError::Random)?,
                caps: limits.caps,
                clock: Box::new(clock),
                observer: Box::new(observer),
                failing: AtomicBool::new(false),
                renewals: Mutex::default(),
            }),
        })
    }

    /// May the token's owner do this? A kept answer, or a review with the caller's own token; at
    /// most about 4 s. Must be called in a Tokio runtime: an answer that ends soon is renewed in a task.
    /// Dropping the call is safe: others who wait for the same answer go on.
    pub async fn authorize(&self, bearer: &Bearer, question: &Question<'_>) -> Verdict {
        let shared = &*self.shared;
        let parts: [&str; 4] = [question.verb, &question.namespace, &question.name, &question.uid];
        let key = bearer.digest(&shared.key, &parts);
        let (answer, cached) = match shared.answers.get(&key).await {
            Some((answer, due)) => {
                if due {
                    self.renew(key, bearer, question);
                }
                (answer, true)
            }
            // Boxed: it is rare, and callers that need no review are not to hold the room for one.
            None => Box::pin(shared.wait_for(key, bearer, question)).await,
        };
        shared.observer.authorized(label(answer), cached);
        match answer {
            Answer::Allowed => Verdict::Allowed { cached },
            Answer::Denied => Verdict::Denied,
            Answer::Rejected => Verdict::Rejected,
            Answer::Unavailable => Verdict::Unavailable,
        }
    }

    /// Has a kept answer asked again behind the back of a caller who uses it, so that whoever calls often seldom waits for a
    /// review, also while strangers queue up for theirs. Nothing is kept longer for that: the old answer ends when it
    /// would have, the new one is as young as any.
    fn renew(&self, key: Digest, bearer: &Bearer, question: &Question<'_>) {
        let Some(turn) = Renewal::begin(&self.shared, key) else {
            return;
        };
        let (bearer, question) = (bearer.clone(), question.clone().into_owned());
        let renew = async move {
            let shared = &*turn.shared;
            let ask = shared.ask(&bearer, &question);
            // As for a caller: turn and review each have their deadline.
            let _ = timeout(review::DEADLINE * 2, shared.answers.renew(key, ask)).await;
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "there are few of them, and none lasts longer than a review"
        )]
        tokio::spawn(renew);
    }

    /// How many answers are being renewed now.
    #[must_use]
    pub fn renewing(&self) -> usize {
        self.shared.renewals().len()
    }

    /// Sends a made-up token until the API server answers.
    ///
    /// # Errors
    /// When it is not answered with 401: the process must not start (C-3.6).
    pub async fn verify_pool_is_anonymous(&self) -> Result<(), NotAnonymous> {
        self.shared.reviewer.verify_anonymous().await
    }
}

impl fmt::Debug for Authorizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authorizer")
            .field("reviewer", &self.shared.reviewer)
            .field("caps", &self.shared.caps)
            .finish_non_exhaustive()
    }
}

// === impl Shared ===

impl Shared {
    /// An answer of the API server, which others may have asked for already.
    async fn wait_for(&self, key: Digest, bearer: &Bearer, question: &Question<'_>) -> (Answer, bool) {
        let asked = async {
            let (answer, joined) = self.answers.get_or_ask(key, self.ask(bearer, question)).await;
            if answer == Answer::Unavailable && joined {
                // What others began had less time left than this caller has.
                return self.answers.get_or_ask(key, self.ask(bearer, question)).await;
            }
            (answer, joined)
        };
        // Turn and review each have their deadline; this one is for who waits for others.
        timeout(review::DEADLINE * 2, asked)
            .await
            .unwrap_or((Answer::Unavailable, false))
    }

    async fn ask(&self, bearer: &Bearer, question: &Question<'_>) -> Kept {
        // Counted from before asking, so that an answer is never older than its cap.
        let asked = Instant::now();
        let answer = self.reviewer.ask(bearer, question).await;
        self.observer.reviewed(asked.elapsed());
        self.note(answer);
        let keep = self.caps.keep(answer, bearer.kind(), (self.clock)());
        Kept {
            answer,
            expires: asked + keep,
            due: asked + renewed_after(answer, keep),
        }
    }

    fn renewals(&self) -> MutexGuard<'_, HashSet<Digest>> {
        self.renewals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One line when reviews begin to fail and one when they work again.
    fn note(&self, answer: Answer) {
        let failing = answer == Answer::Unavailable;
        if self.failing.swap(failing, Ordering::Relaxed) != failing {
            if failing {
                tracing::warn!("access reviews fail; callers without a kept answer get 503");
            } else {
                tracing::info!("access reviews work again");
            }
        }
    }
}

// === impl Renewal ===

impl Renewal {
    /// `None` when that answer is being renewed already, or too many are.
    fn begin(shared: &Arc<Shared>, key: Digest) -> Option<Self> {
        let mut running = shared.renewals();
        if running.len() >= RENEWALS || !running.insert(key) {
            return None;
        }
        Some(Self {
            shared: Arc::clone(shared),
            key,
        })
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.shared.renewals().remove(&self.key);
    }
}

// === impl NoObserver ===

impl Observer for NoObserver {
    fn authorized(&self, _result: &'static str, _cached: bool) {}
    fn reviewed(&self, _took: Duration) {}
}

fn label(answer: Answer) -> &'static str {
    match answer {
        Answer::Allowed => "allowed",
        Answer::Denied => "denied",
        Answer::Rejected => "rejected",
        Answer::Unavailable => "unavailable",
    }
}

/// Only ever compared with a token's `exp`, to keep an answer for a shorter time.
#[expect(
    clippy::disallowed_methods,
    reason = "the edge where the clock is read; `ttl` takes it as an argument"
)]
fn unix_seconds() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}
