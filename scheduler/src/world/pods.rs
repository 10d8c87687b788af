//! Pods and their heartbeats. A heartbeat is aged from when we saw it change, on our own clock:
//! what its author's clock says does not count (C-7.1).

use std::{collections::HashSet, time::Duration};

use jiff::Timestamp;
use kruntimes_api::keys::RunUid;
use tokio::time::Instant;

use super::{Wakes, World, remove};
use crate::facts::{BeatFacts, ObjectKey, PodFacts};

/// A heartbeat younger than this is fresh: three missed renewals of 10 s (C-6.7, C-7.3).
pub const HEARTBEAT_FRESH: Duration = Duration::from_secs(30);

/// A heartbeat and when it was seen to change.
#[derive(Debug, Clone, PartialEq)]
pub struct Beat {
    pub facts: BeatFacts,
    /// `None`: only ever seen in a list, already old by the wall clock.
    seen: Option<Instant>,
}

/// What is known of a Pod beside its object, and after it: a fence may ask for it.
#[derive(Debug, Clone, Default)]
pub(super) struct Life {
    /// When its heartbeat was last seen to change.
    heard: Option<Instant>,
    /// The node it was seen on, which is none until it is bound; `None` until the Pod is seen.
    node: Option<Option<String>>,
}

/// The life of a Pod that is gone is forgotten after this, which no fence waits for.
const LIFE_KEPT: Duration = Duration::from_secs(120);

/// A Pod that drains is passed over for this long. Its own readiness takes a moment to say so, and
/// a Run that went back to it at once would go round and round.
const DRAINING_PASSED_OVER: Duration = Duration::from_secs(5);

/// A Run goes rather to another Pod than to the one that refused it this recently: longer than it pauses.
const REFUSAL_KEPT: Duration = Duration::from_secs(60);

// === impl World ===

impl World {
    /// An empty index whose owner begins to listen at `now`: what was before, it has not heard.
    pub fn born(now: Instant) -> Self {
        Self {
            born: Some(now),
            ..Self::default()
        }
    }

    /// A sign of life of the Pod, whoever saw it.
    pub fn heard(&mut self, pod_uid: &str, now: Instant) {
        self.lives.entry(pod_uid.to_owned()).or_default().heard = Some(now);
    }

    /// For how long nothing has been heard of the Pod; counted from when we began to listen if it was
    /// never heard, so that it is never longer than true.
    pub fn silence(&self, pod_uid: &str, now: Instant) -> Duration {
        let heard = self.lives.get(pod_uid).and_then(|it| it.heard);
        heard
            .or(self.born)
            .map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// The node of a Pod, also of one that is gone; `None` if we never saw the Pod, `Some(None)` if it
    /// was on none.
    pub fn node_of(&self, pod_uid: &str) -> Option<Option<&str>> {
        self.lives.get(pod_uid)?.node.as_ref().map(|it| it.as_deref())
    }

    /// Living Pods, of one Runtime or of all, that do not say rightly whether they own Runs and so go
    /// last; with what they should say.
    pub fn mismarked(&self, pool: Option<&ObjectKey>) -> Vec<(PodFacts, bool)> {
        let mut found: Vec<_> = self
            .pods
            .rows
            .values()
            .filter(|pod| pool.is_none_or(|it| pod.pool() == *it) && !pod.signs.deleting && !pod.signs.over)
            .map(|pod| (pod, self.assigned.contains_key(pod.uid.as_str())))
            .filter(|(pod, owns)| pod.goes_last != *owns)
            .map(|(pod, owns)| (pod.clone(), owns))
            .collect();
        found.sort_unstable_by(|(a, _), (b, _)| a.key.cmp(&b.key));
        found
    }

    /// Pods that are gone leave nothing behind.
    fn forget_lives(&mut self, now: Instant) {
        if self.lives.len() <= 2 * self.pods.rows.len() + 64 {
            return;
        }
        let there: HashSet<&str> = self.pods.rows.values().map(|it| it.uid.as_str()).collect();
        self.lives.retain(|uid, life| {
            let recent = |since| now.saturating_duration_since(since) < LIFE_KEPT;
            there.contains(uid.as_str()) || life.heard.is_some_and(recent)
        });
    }

    /// The Pod has handed a Run back because it drains.
    pub fn pass_over(&mut self, pod_uid: &str, now: Instant) {
        self.draining
            .retain(|_, since| now.saturating_duration_since(*since) < DRAINING_PASSED_OVER);
        self.draining.insert(pod_uid.to_owned(), now);
    }

    /// Whether the Pod has just done so.
    pub fn is_passed_over(&self, pod_uid: &str, now: Instant) -> bool {
        self.draining
            .get(pod_uid)
            .is_some_and(|since| now.saturating_duration_since(*since) < DRAINING_PASSED_OVER)
    }

    /// The Pod would not have this Run.
    pub fn turned_away(&mut self, run: RunUid, pod_uid: &str, now: Instant) {
        self.refused
            .retain(|_, (_, since)| now.saturating_duration_since(*since) < REFUSAL_KEPT);
        self.refused.insert(run, (pod_uid.to_owned(), now));
    }

    /// The Pod that would not have this Run a short while ago.
    pub fn refused_by(&self, run: RunUid, now: Instant) -> Option<&str> {
        let (pod, since) = self.refused.get(&run)?;
        (now.saturating_duration_since(*since) < REFUSAL_KEPT).then_some(pod)
    }

    /// The heartbeat of a Pod, if it is this very Pod's and fresh at `now`.
    pub fn fresh_beat(&self, pod: &PodFacts, now: Instant) -> Option<&BeatFacts> {
        let beat = self.beats.rows.get(&pod.beat())?;
        (beat.facts.holder == pod.uid.as_str() && beat.is_fresh(now)).then_some(&beat.facts)
    }

    pub fn apply_pod(&mut self, pod: PodFacts, wakes: &mut Wakes) {
        let key = pod.key.clone();
        let old = self.pods.rows.insert(key.clone(), pod.clone());
        self.pod_changed(&key, old, Some(pod), wakes);
    }

    pub fn delete_pod(&mut self, pod: &PodFacts, wakes: &mut Wakes) {
        if self
            .pods
            .rows
            .get(&pod.key)
            .is_some_and(|known| known.uid == pod.uid)
        {
            let old = self.pods.rows.remove(&pod.key);
            self.pod_changed(&pod.key, old, None, wakes);
        }
    }

    pub fn reset_pods(&mut self, scope: Option<&str>, pods: Vec<PodFacts>, wakes: &mut Wakes) {
        let rows = pods.into_iter().map(|it| (it.key.clone(), it));
        for (key, old, new) in self.pods.reset(scope, rows) {
            self.pod_changed(&key, old, new, wakes);
        }
    }

    fn pod_changed(
        &mut self,
        key: &ObjectKey,
        old: Option<PodFacts>,
        new: Option<PodFacts>,
        wakes: &mut Wakes,
    ) {
        if old == new {
            return;
        }
        if let Some(old) = &old {
            remove(&mut self.pools, &old.pool(), key);
            // The Pod that held them is gone, or another one has its name, or it is on its way out.
            let out = |it: &PodFacts| it.signs.deleting || it.signs.over;
            if new
                .as_ref()
                .is_none_or(|new| new.uid != old.uid || out(new) && !out(old))
            {
                wakes
                    .runs
                    .extend(self.assigned.get(old.uid.as_str()).into_iter().flatten().cloned());
            }
        }
        if let Some(new) = &new {
            let life = self.lives.entry(new.uid.as_str().to_owned()).or_default();
            life.node = Some(new.node.clone());
            self.pools.entry(new.pool()).or_default().insert(key.clone());
            if new.serves {
                self.wake_waiting(&new.pool(), wakes);
            }
        }
    }

    pub fn apply_beat(&mut self, facts: BeatFacts, now: Instant, wakes: &mut Wakes) {
        let old = self.beats.rows.get(&facts.key);
        let unchanged = old.is_some_and(|it| it.facts == facts);
        let news = old.is_none_or(|it| {
            !it.is_fresh(now) || it.facts.modes != facts.modes || it.facts.holder != facts.holder
        });
        if unchanged {
            return;
        }
        self.heard(&facts.holder, now);
        self.forget_lives(now);
        // A renewal of a fresh heartbeat changes no decision and wakes nobody.
        if news {
            self.wake_waiting(
                &ObjectKey::new(facts.key.namespace.clone(), facts.runtime.clone()),
                wakes,
            );
        }
        self.beats.rows.insert(
            facts.key.clone(),
            Beat {
                facts,
                seen: Some(now),
            },
        );
    }

    pub fn delete_beat(&mut self, key: &ObjectKey) {
        self.beats.rows.remove(key);
    }

    /// A listed heartbeat that we have not seen change counts from now if the wall clock does not
    /// contradict it; otherwise it must change before it counts.
    pub fn reset_beats(
        &mut self,
        scope: Option<&str>,
        beats: Vec<BeatFacts>,
        now: Instant,
        wall: Timestamp,
        wakes: &mut Wakes,
    ) {
        let mut fresh = Vec::new();
        let rows: Vec<_> = beats
            .into_iter()
            .map(|facts| {
                let known = self.beats.rows.get(&facts.key);
                if known.is_none_or(|it| it.facts != facts) {
                    fresh.push(facts.holder.clone());
                }
                let seen = match known {
                    Some(known) if known.facts == facts => known.seen,
                    Some(_) => Some(now),
                    None => is_recent(&facts, wall).then_some(now),
                };
                (facts.key.clone(), Beat { facts, seen })
            })
            .collect();
        // Whether it is old or not, this is the first we hear of it.
        for holder in fresh {
            self.heard(&holder, now);
        }
        for (key, old, new) in self.beats.reset(scope, rows) {
            if let Some(new) = new.filter(|new| old.as_ref() != Some(new)) {
                self.wake_waiting(&ObjectKey::new(key.namespace, new.facts.runtime), wakes);
            }
        }
    }
}

// === impl Beat ===

impl Beat {
    fn is_fresh(&self, now: Instant) -> bool {
        self.seen
            .is_some_and(|seen| now.saturating_duration_since(seen) < HEARTBEAT_FRESH)
    }
}

fn is_recent(facts: &BeatFacts, wall: Timestamp) -> bool {
    let Some(renewed) = &facts.renewed else {
        return false;
    };
    let age = wall.duration_since(renewed.0);
    // The clock of another machine may be ahead.
    age.unsigned_abs() < HEARTBEAT_FRESH
}
