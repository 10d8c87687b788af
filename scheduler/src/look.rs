//! One look at one Run: what is known around it at this instant, and what was written of it that the
//! watch has not shown yet.
//!
//! A version that was written over is not decided on again before the watch, or a live read, has shown
//! what became of it: the same decision would be taken twice.

use std::{collections::HashMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use kruntimes_api::{
    Run,
    keys::{PodUid, RunUid},
};
use tokio::time::Instant;

use crate::{
    assumed::Assumed,
    bind::Written,
    facts::{BeatFacts, ObjectKey},
    fence::{Node, Owner, Presence},
    plan::{Plan, View, Why, plan},
    pool,
    recover::Kind,
    snapshot::Snapshot,
    world::{Wakes, World},
};

/// After a write the watch normally answers within milliseconds; when it has not after this, the
/// object is read.
pub const WATCH_PATIENCE: Duration = Duration::from_secs(2);
/// Pause after a failure that time may heal.
pub const TRY_AGAIN: Duration = Duration::from_secs(5);
/// After a live read, which is then what is known.
pub const AFTER_READ: Duration = Duration::from_millis(100);
/// Pods of silent owners that are deleted within [`DELETIONS_PERIOD`]. When more are silent at once, what
/// is ill is their way to Kubernetes; they would all answer again, and deletion cannot be taken back.
const DELETIONS: usize = 3;
const DELETIONS_PERIOD: Duration = Duration::from_secs(60);
/// Writes that are remembered before old ones are forgotten.
const REMEMBERED: usize = 1024;

/// What one term remembers of its own acts.
#[derive(Debug, Default)]
pub struct Looks {
    /// Versions that we have written over and that the watch still shows.
    written: HashMap<RunUid, (Option<String>, Instant)>,
    /// When Pods were deleted, of late.
    deleted: Vec<Instant>,
}

/// What a look at a Run leads to.
#[derive(Debug)]
pub enum Look {
    /// It is not there.
    Gone,
    /// The watch has not shown yet what we wrote.
    Wait(Duration),
    /// The watch is late, or an assignment has an unknown outcome: read it live.
    Read(Arc<Run>),
    Do(Arc<Run>, Plan),
}

/// What live reads said of an owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confirmed {
    pub uid: PodUid,
    pub presence: Presence,
    pub node: Node,
}

/// The instant of a look.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    pub monotonic: Instant,
    pub wall: Timestamp,
    /// From 0.0..1.0.
    pub jitter: f64,
}

// === impl Looks ===

impl Looks {
    /// What to do with the Run as the watch shows it.
    pub fn look(
        &mut self,
        world: &World,
        assumed: &Assumed,
        key: &ObjectKey,
        confirmed: Option<&Confirmed>,
        now: Now,
    ) -> Look {
        let Some((run, uid)) = world
            .run(key)
            .and_then(|run| Some((Arc::clone(run), run.run_uid()?)))
        else {
            return Look::Gone;
        };
        match self.written.get(&uid) {
            Some((version, since)) if *version == run.metadata.resource_version => {
                let waited = now.monotonic.saturating_duration_since(*since);
                let left = WATCH_PATIENCE.saturating_sub(waited);
                return if left.is_zero() {
                    Look::Read(run)
                } else {
                    Look::Wait(left)
                };
            }
            Some(_) => self.written.remove(&uid),
            None => None,
        };
        if assumed.of(uid).is_some() {
            // Its assignment is under way, and the watch shows something older.
            return Look::Read(run);
        }
        let plan = plan(view(world, assumed, key, &run, confirmed, now));
        Look::Do(run, plan)
    }

    /// Whatever became of a write, this version is not decided on again before the watch or a read has
    /// shown it. Says when to look again; `None`: never in this term.
    pub fn settle(&mut self, run: &Run, result: &Written, now: Instant) -> Option<Duration> {
        match result {
            Written::Same => return Some(TRY_AGAIN),
            Written::NotLeader => return None,
            Written::Refused(_) => return Some(6 * TRY_AGAIN),
            Written::Done | Written::Conflict | Written::Unknown(_) => {}
        }
        if self.written.len() > REMEMBERED {
            // Runs that are gone leave nothing behind.
            let recent = |since| now.saturating_duration_since(since) < 10 * WATCH_PATIENCE;
            self.written.retain(|_, (_, since)| recent(*since));
        }
        if let Some(uid) = run.run_uid() {
            self.written
                .insert(uid, (run.metadata.resource_version.clone(), now));
        }
        Some(WATCH_PATIENCE)
    }

    /// Takes in a live read of `run`.
    pub fn refreshed(
        &mut self,
        run: &Run,
        live: Option<Run>,
        world: &mut World,
        assumed: &mut Assumed,
        wakes: &mut Wakes,
    ) {
        let uid = run.run_uid();
        if let Some(uid) = uid {
            self.written.remove(&uid);
            // Live and still without the assignment: the write never arrived. If it yet does, the
            // next write that is guarded by this version is refused.
            assumed.forget(uid);
        }
        match live {
            Some(live) if live.run_uid() == uid => world.refresh_run(live, wakes),
            // Gone, or another one has its name, which the watch brings.
            _ => world.delete_run(run, wakes),
        }
    }

    /// Whether one more Pod may be deleted now.
    pub fn may_delete_pod(&mut self, now: Instant) -> bool {
        self.deleted
            .retain(|at| now.saturating_duration_since(*at) < DELETIONS_PERIOD);
        self.deleted.len() < DELETIONS
    }

    /// A Pod was deleted.
    pub fn deleted_pod(&mut self, now: Instant) {
        self.deleted.push(now);
    }
}

/// Takes in a heartbeat of the Pod `uid` that was read live. News here is what the watch is late with.
pub fn heard_live(world: &mut World, uid: &PodUid, live: Option<BeatFacts>, now: Instant, wakes: &mut Wakes) {
    if let Some(beat) = live.filter(|beat| beat.holder == uid.as_str()) {
        world.apply_beat(beat, now, wakes);
    }
}

/// Remembers who gives `run` back with the write `why`, so that it goes elsewhere next.
pub fn given_back(world: &mut World, run: &Run, why: Why, now: Instant) {
    let Some((_, pod)) = run.assignment() else { return };
    match (why, run.run_uid()) {
        (Why::Recover(Kind::HandedOver), _) => world.pass_over(pod.as_str(), now),
        (Why::Recover(Kind::TurnedAway), Some(uid)) => world.turned_away(uid, pod.as_str(), now),
        _ => {}
    }
}

/// What is known around `run` at this instant.
fn view<'a>(
    world: &World,
    assumed: &Assumed,
    key: &ObjectKey,
    run: &'a Run,
    confirmed: Option<&Confirmed>,
    now: Now,
) -> View<'a> {
    let owner = run.assignment().map(|(name, uid)| {
        let silence = world.silence(uid.as_str(), now.monotonic);
        if let Some(confirmed) = confirmed.filter(|it| it.uid == uid) {
            return Owner {
                presence: confirmed.presence,
                silence,
                confirmed: true,
                node: confirmed.node,
            };
        }
        let seen = world.pod(&ObjectKey::new(key.namespace.clone(), name));
        let presence = seen
            .filter(|it| it.uid == uid)
            .map_or(Presence::NotSeen, |it| Presence::There(it.signs));
        Owner {
            presence,
            silence,
            confirmed: false,
            node: Node::Silent,
        }
    });
    let runtime = ObjectKey::new(key.namespace.clone(), run.spec.runtime.clone());
    let snapshot = || {
        let mut snapshot = Snapshot::take(world, assumed, &runtime, now.monotonic);
        let uid = run.run_uid();
        if let Some(pod) = uid.and_then(|uid| world.refused_by(uid, now.monotonic)) {
            snapshot.avoid(pod);
        }
        snapshot
    };
    View {
        run,
        declared: world.runtime(&runtime).map(|it| pool::capacity(&it.spec)),
        snapshot: if owner.is_none() {
            snapshot()
        } else {
            Snapshot::default()
        },
        owner,
        now: now.wall,
        jitter: now.jitter,
    }
}

#[cfg(test)]
mod tests {
    use kruntimes_api::fixtures;

    use super::*;

    fn now(at: Instant) -> Now {
        Now {
            monotonic: at,
            wall: fixtures::NOW,
            jitter: 0.5,
        }
    }

    /// A version that was written over is looked at again only when the watch moves, or by a live read.
    #[test]
    fn what_was_written_over_is_not_decided_on_again() {
        let (mut world, assumed, mut looks) = (World::default(), Assumed::default(), Looks::default());
        let mut wakes = Wakes::default();
        let run = fixtures::run("ns", "n").build();
        let key = ObjectKey::of(&run).unwrap();
        let start = Instant::now();
        world.apply_run(run.clone(), &mut wakes);
        assert!(matches!(
            looks.look(&world, &assumed, &key, None, now(start)),
            Look::Do(..)
        ));
        assert_eq!(
            looks.settle(&run, &Written::Unknown(String::new()), start),
            Some(WATCH_PATIENCE)
        );
        assert!(matches!(
            looks.look(&world, &assumed, &key, None, now(start)),
            Look::Wait(WATCH_PATIENCE)
        ));
        let late = start + WATCH_PATIENCE;
        assert!(matches!(
            looks.look(&world, &assumed, &key, None, now(late)),
            Look::Read(_)
        ));
        let moved = fixtures::run("ns", "n").version("2").build();
        world.apply_run(moved, &mut wakes);
        assert!(matches!(
            looks.look(&world, &assumed, &key, None, now(start)),
            Look::Do(..)
        ));
    }

    #[test]
    fn few_pods_are_deleted_within_a_minute() {
        let (mut looks, start) = (Looks::default(), Instant::now());
        for _ in 0..DELETIONS {
            assert!(looks.may_delete_pod(start));
            looks.deleted_pod(start);
        }
        assert!(!looks.may_delete_pod(start + DELETIONS_PERIOD / 2));
        assert!(looks.may_delete_pod(start + DELETIONS_PERIOD));
    }
}
