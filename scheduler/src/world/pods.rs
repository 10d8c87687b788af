//! Pods and their heartbeats. A heartbeat is aged from when we saw it change, on our own clock:
//! what its author's clock says does not count (C-7.1).

use std::time::Duration;

use jiff::Timestamp;
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

/// A Pod that drains is passed over for this long. Its own readiness takes a moment to say so, and
/// a Run that went back to it at once would go round and round.
const DRAINING_PASSED_OVER: Duration = Duration::from_secs(5);

// === impl World ===

impl World {
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
            // The Pod that held them is gone, or another one has its name.
            if new.as_ref().is_none_or(|new| new.uid != old.uid) {
                wakes
                    .runs
                    .extend(self.assigned.get(old.uid.as_str()).into_iter().flatten().cloned());
            }
        }
        if let Some(new) = &new {
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
        let rows: Vec<_> = beats
            .into_iter()
            .map(|facts| {
                let seen = match self.beats.rows.get(&facts.key) {
                    Some(known) if known.facts == facts => known.seen,
                    Some(_) => Some(now),
                    None => is_recent(&facts, wall).then_some(now),
                };
                (facts.key.clone(), Beat { facts, seen })
            })
            .collect();
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
