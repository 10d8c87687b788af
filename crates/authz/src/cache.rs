//! Answers that are kept for seconds: bounded, one question in flight per key, no sliding expiry.

use std::time::Duration;

use moka::{Expiry, future::Cache};
use tokio::time::Instant;

use crate::{token::Digest, ttl::Answer};

/// An answer, and until when it may be used. The clock is monotonic (bug scenario 53).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// What the API server said.
    pub answer: Answer,
    /// From then on it must be asked again. Not after the asking: kept for nobody.
    pub expires: Instant,
    /// From then on whoever uses it has it asked again beforehand; not before `expires`: nobody does.
    pub due: Instant,
}

/// Kept answers by digest of token and question.
#[derive(Debug, Clone)]
pub struct Answers {
    entries: Cache<Digest, Kept>,
}

// === impl Answers ===

impl Answers {
    /// At most about `capacity` answers.
    #[must_use]
    pub fn new(capacity: u64) -> Self {
        let entries = Cache::builder()
            .max_capacity(capacity)
            .expire_after(AsTheySay)
            .build();
        Self { entries }
    }

    /// A kept answer that may still be used, and whether it is due to be asked again.
    pub async fn get(&self, key: &Digest) -> Option<(Answer, bool)> {
        let kept = self.entries.get(key).await?;
        let now = Instant::now();
        (!kept.is_over(now)).then_some((kept.answer, now >= kept.due))
    }

    /// Replaces an answer that is due by the one of `ask`. Until then it is used; who comes when it is over waits for this
    /// `ask` and makes none of its own. When nothing is said the old answer ends when it would have, and no other try is
    /// made before.
    pub async fn renew(&self, key: Digest, ask: impl Future<Output = Kept>) {
        let Some(before) = self.entries.get(&key).await else {
            return;
        };
        let ask = async {
            let said = ask.await;
            if said.answer == Answer::Unavailable && !before.is_over(Instant::now()) {
                Kept {
                    due: before.expires,
                    ..before
                }
            } else {
                said
            }
        };
        let is_due = |kept: &Kept| Instant::now() >= kept.due;
        let entry = self.entries.entry(key);
        entry.or_insert_with_if(ask, is_due).await;
    }

    /// A kept answer, or the one of `ask`. While one caller asks, others of the same key wait for
    /// its answer, even if that answer is not kept. The flag says that nobody asked for this call.
    pub async fn get_or_ask(&self, key: Digest, ask: impl Future<Output = Kept>) -> (Answer, bool) {
        let entry = self
            .entries
            .entry(key)
            // The cache's own clock removes entries; what counts is the time in the entry.
            .or_insert_with_if(ask, |kept| kept.is_over(Instant::now()))
            .await;
        (entry.value().answer, !entry.is_fresh())
    }
}

// === impl Kept ===

impl Kept {
    fn is_over(&self, now: Instant) -> bool {
        now >= self.expires
    }
}

/// Tells the cache when each entry is garbage. Reading prolongs nothing.
struct AsTheySay;

// === impl AsTheySay ===

impl Expiry<Digest, Kept> for AsTheySay {
    fn expire_after_create(&self, _key: &Digest, kept: &Kept, _now: std::time::Instant) -> Option<Duration> {
        Some(kept.expires.saturating_duration_since(Instant::now()))
    }

    fn expire_after_update(
        &self,
        key: &Digest,
        kept: &Kept,
        now: std::time::Instant,
        _left: Option<Duration>,
    ) -> Option<Duration> {
        self.expire_after_create(key, kept, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::token::{Bearer, HmacKey};

    /// C-3.6: bounded entries.
    #[tokio::test]
    async fn strangers_cannot_make_it_keep_more_than_it_has_room_for() {
        let answers = Answers::new(10);
        let key = HmacKey::generate().expect("random");
        let bearer = Bearer::parse(["Bearer t"]).expect("well-formed");
        let kept = Kept {
            answer: Answer::Allowed,
            expires: Instant::now() + Duration::from_secs(10),
            due: Instant::now() + Duration::from_secs(10),
        };
        for number in 0..1000 {
            let digest = bearer.digest(&key, &[&number.to_string()]);
            answers.get_or_ask(digest, async { kept }).await;
        }
        answers.entries.run_pending_tasks().await;
        assert!(
            answers.entries.entry_count() <= 10,
            "{}",
            answers.entries.entry_count()
        );
    }
}
