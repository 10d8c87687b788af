//! The loop over Runs: one look at one Run at a time, view → plan → write.

use std::{collections::HashMap, sync::Arc, time::Duration};

use jiff::Timestamp;
use kruntimes_api::{
    Run,
    keys::{PodUid, RunUid},
};
use ring::rand::{SecureRandom as _, SystemRandom};
use tokio::time::Instant;

use crate::{
    assumed::Reservation,
    bind::{Writer, Written},
    cycle::Ask,
    events::Events,
    facts::{ObjectKey, Signs},
    fence::{Node, Owner, Presence},
    hub::{Hub, State},
    metrics::{Metrics, WriteLabels},
    plan::{Plan, View, Why, plan},
    pool,
    recover::Kind,
    snapshot::Snapshot,
};

/// After a write the watch normally answers within milliseconds; when it has not after this, the
/// object is read.
const WATCH_PATIENCE: Duration = Duration::from_secs(2);
/// Pause after a failure that time may heal.
const TRY_AGAIN: Duration = Duration::from_secs(5);
/// Pods of silent owners that are deleted within [`DELETIONS_PERIOD`]. When more are silent at once, what
/// is ill is their way to Kubernetes; they would all answer again, and deletion cannot be taken back.
const DELETIONS: usize = 3;
const DELETIONS_PERIOD: Duration = Duration::from_secs(60);

/// Looks at Runs for one term.
pub(crate) struct RunLoop<'a> {
    pub(crate) hub: &'a Hub,
    pub(crate) writer: Writer,
    pub(crate) metrics: &'a Metrics,
    events: Events,
    /// Versions that we have written over and that the watch still shows.
    written: HashMap<RunUid, (Option<String>, Instant)>,
    /// When Pods were deleted, of late.
    deleted: Vec<Instant>,
}

/// What live reads said of an owner.
struct Confirmed {
    uid: PodUid,
    presence: Presence,
    node: Node,
}

/// What a look at a Run leads to.
enum Look {
    /// It is not there.
    Gone,
    /// The watch has not shown yet what we wrote.
    Wait(Duration),
    /// The watch is late, or an assignment has an unknown outcome: read it live.
    Read(Arc<Run>),
    Do(Arc<Run>, Plan),
}

// === impl RunLoop ===

impl<'a> RunLoop<'a> {
    pub(crate) fn new(hub: &'a Hub, writer: Writer, events: Events, metrics: &'a Metrics) -> Self {
        Self {
            hub,
            writer,
            metrics,
            events,
            written: HashMap::new(),
            deleted: Vec::new(),
        }
    }

    /// Runs until dropped.
    pub(crate) async fn run(mut self) {
        loop {
            let key = self.hub.runs.next().await;
            let began = Instant::now();
            self.look(&key).await;
            self.metrics.cycle.observe(began.elapsed().as_secs_f64());
            self.observe();
        }
    }

    async fn look(&mut self, key: &ObjectKey) {
        let (run, plan) = match self.decide(key, None) {
            Look::Wait(pause) => return self.hub.runs.wake_after(key.clone(), pause),
            Look::Read(run) => return self.refresh(key, &run).await,
            Look::Do(run, plan) => (run, plan),
            Look::Gone => return,
        };
        let Plan::ConfirmOwner { name, uid } = plan else {
            return self.act(key, &run, plan).await;
        };
        let Some(confirmed) = self.confirm(key, &name, uid).await else {
            return self.hub.runs.wake_after(key.clone(), TRY_AGAIN);
        };
        match self.decide(key, Some(&confirmed)) {
            Look::Do(now, plan) if now == run => self.act(key, &run, plan).await,
            // It has moved on during the read.
            _ => self.hub.runs.wake(key.clone()),
        }
    }

    /// What to do with the Run as the watch shows it.
    fn decide(&mut self, key: &ObjectKey, confirmed: Option<&Confirmed>) -> Look {
        let state = self.hub.lock();
        let Some((run, uid)) = state
            .world
            .run(key)
            .and_then(|run| Some((Arc::clone(run), run.run_uid()?)))
        else {
            return Look::Gone;
        };
        match self.written.get(&uid) {
            Some((version, since)) if *version == run.metadata.resource_version => {
                let left = WATCH_PATIENCE.saturating_sub(since.elapsed());
                return if left.is_zero() {
                    Look::Read(run)
                } else {
                    Look::Wait(left)
                };
            }
            Some(_) => self.written.remove(&uid),
            None => None,
        };
        if state.assumed.of(uid).is_some() {
            // Its assignment is under way, and the watch shows something older.
            return Look::Read(run);
        }
        let plan = plan(view(&state, key, &run, confirmed, self.hub.now()));
        drop(state);
        Look::Do(run, plan)
    }

    /// Reads the owner live; `None` when the API does not tell.
    async fn confirm(&self, key: &ObjectKey, pod: &str, uid: PodUid) -> Option<Confirmed> {
        let failed = |error| {
            tracing::warn!(run = %Name(key), pod, error, "cannot read the owner of a Run");
            None
        };
        let live = match self.writer.pod(&key.namespace, pod, &uid).await {
            Ok(live) => live,
            Err(error) => return failed(error),
        };
        match self.writer.beat(&key.namespace, pod).await {
            // Also of a Pod that is gone: deleted by force, it may live on. News here is what the watch is late with.
            Ok(Some(beat)) if beat.holder == uid.as_str() => {
                let now = Instant::now();
                self.hub
                    .change(|state, wakes| state.world.apply_beat(beat, now, wakes));
            }
            Ok(_) => {}
            Err(error) => return failed(error),
        }
        if let Some(live) = live {
            return Some(Confirmed {
                uid,
                presence: Presence::There(Signs::of(&live)),
                node: Node::Silent,
            });
        }
        let seen_on = {
            let state = self.hub.lock();
            state.world.node_of(uid.as_str()).map(|it| it.map(str::to_owned))
        };
        let node = match seen_on {
            // We never saw the Pod, so nothing vouches for its end.
            None => Node::Silent,
            Some(None) => Node::Never,
            Some(Some(node)) if self.writer.node_is_reachable(&node).await => Node::Reports,
            Some(Some(_)) => Node::Silent,
        };
        Some(Confirmed {
            uid,
            presence: Presence::Gone,
            node,
        })
    }

    async fn act(&mut self, key: &ObjectKey, run: &Arc<Run>, plan: Plan) {
        match plan {
            Plan::Nothing => {}
            Plan::Later(pause) => self.hub.runs.wake_after(key.clone(), pause),
            // It was confirmed before; another Pod is meant now.
            Plan::ConfirmOwner { .. } => self.hub.runs.wake_after(key.clone(), TRY_AGAIN),
            Plan::DeletePod { name, uid } => self.delete_pod(key, &run.spec.runtime, &name, &uid).await,
            Plan::Write { status, why } => {
                if let Some((_, pod)) = run.assignment() {
                    let (mut state, now) = (self.hub.lock(), Instant::now());
                    match (why, run.run_uid()) {
                        (Why::Recover(Kind::HandedOver), _) => state.world.pass_over(pod.as_str(), now),
                        (Why::Recover(Kind::TurnedAway), Some(uid)) => {
                            state.world.turned_away(uid, pod.as_str(), now);
                        }
                        _ => {}
                    }
                }
                let result = self.writer.status(run, &status).await;
                if result == Written::Done {
                    log_write(key, why, status.message.as_deref());
                    self.events.written(run, why, status.message.as_deref());
                }
                self.settle(key, run, about(why), result);
            }
            Plan::Bind {
                status,
                uid,
                attempt,
                ask,
            } => {
                let Some(run_uid) = run.run_uid() else { return };
                let Ask { demand, labels, .. } = *ask;
                let reservation = Reservation {
                    pod: uid,
                    attempt,
                    demand,
                    labels,
                };
                self.hub.lock().assumed.reserve(run_uid, reservation);
                let result = self.writer.status(run, &status).await;
                match &result {
                    Written::Done => {
                        let pod = status.assigned_pod.as_deref();
                        tracing::info!(run = %Name(key), uid = %run_uid, pod, %attempt, "assigned");
                        self.events.assigned(run, pod.unwrap_or_default());
                    }
                    // It may be there: the room stays taken until a read tells.
                    Written::Unknown(_) => {}
                    _ => self.hub.lock().assumed.forget(run_uid),
                }
                self.settle(key, run, "assign", result);
            }
            Plan::RemoveFinalizer => {
                let result = self.writer.remove_finalizer(run).await;
                if result == Written::Done {
                    tracing::info!(run = %Name(key), "the clean-up finalizer is removed: no Pod holds the Run");
                }
                self.settle(key, run, "finalize", result);
            }
            Plan::Delete => {
                let result = self.writer.delete(run).await;
                if result == Written::Done {
                    tracing::info!(run = %Name(key), "deleted after its TTL");
                }
                self.settle(key, run, "expire", result);
            }
        }
    }

    /// The Pod's end, or what its deletion says of it, wakes the Run.
    async fn delete_pod(&mut self, key: &ObjectKey, runtime: &str, name: &str, uid: &PodUid) {
        self.deleted.retain(|at| at.elapsed() < DELETIONS_PERIOD);
        if self.deleted.len() >= DELETIONS {
            self.hub.runs.wake_after(key.clone(), TRY_AGAIN);
            return;
        }
        let pool = ObjectKey::new(key.namespace.clone(), runtime.to_owned());
        let result = self.writer.delete_pod(&pool, name, uid).await;
        let labels = WriteLabels {
            about: "delete_pod",
            result: result.label(),
        };
        self.metrics.run_writes.get_or_create(&labels).inc();
        match result {
            Written::Done => {
                self.deleted.push(Instant::now());
                tracing::warn!(run = %Name(key), pod = name, "its silent owner's Pod is deleted");
            }
            Written::Refused(error) | Written::Unknown(error) => {
                tracing::error!(run = %Name(key), pod = name, error, "cannot delete the Pod of a silent owner");
            }
            Written::Same | Written::Conflict | Written::NotLeader => {}
        }
        self.hub.runs.wake_after(key.clone(), TRY_AGAIN);
    }

    /// Whatever happened, this version is not decided on again before the watch or a read has
    /// shown what became of it.
    fn settle(&mut self, key: &ObjectKey, run: &Run, about: &'static str, result: Written) {
        let labels = WriteLabels {
            about,
            result: result.label(),
        };
        self.metrics.run_writes.get_or_create(&labels).inc();
        match &result {
            Written::Same => return self.hub.runs.wake_after(key.clone(), TRY_AGAIN),
            Written::NotLeader => return,
            Written::Done => {}
            Written::Conflict => {
                tracing::debug!(run = %Name(key), about, "the Run has moved on; deciding again")
            }
            Written::Refused(error) => {
                tracing::error!(run = %Name(key), about, error, "the API refuses a write");
                return self.hub.runs.wake_after(key.clone(), 6 * TRY_AGAIN);
            }
            Written::Unknown(error) => {
                tracing::warn!(run = %Name(key), about, error, "the outcome of a write is unknown")
            }
        }
        if let Some(uid) = run.run_uid() {
            self.written
                .insert(uid, (run.metadata.resource_version.clone(), Instant::now()));
        }
        self.hub.runs.wake_after(key.clone(), WATCH_PATIENCE);
    }

    /// Reads the Run live, because the watch is late.
    async fn refresh(&mut self, key: &ObjectKey, run: &Arc<Run>) {
        let live = match self.writer.live(&key.namespace, &key.name).await {
            Ok(live) => live,
            Err(error) => {
                tracing::warn!(run = %Name(key), error, "cannot read a Run");
                return self.hub.runs.wake_after(key.clone(), TRY_AGAIN);
            }
        };
        let uid = run.run_uid();
        if let Some(uid) = uid {
            self.written.remove(&uid);
        }
        self.hub.change(|state, wakes| {
            if let Some(uid) = uid {
                // Live and still without the assignment: the write never arrived. If it yet does, the
                // next write that is guarded by this version is refused.
                state.assumed.forget(uid);
            }
            match live {
                Some(live) if live.run_uid() == uid => state.world.refresh_run(live, wakes),
                // Gone, or another one has its name, which the watch brings.
                _ => state.world.delete_run(run, wakes),
            }
        });
        self.hub.runs.wake_after(key.clone(), Duration::from_millis(100));
    }

    fn observe(&mut self) {
        let state = self.hub.lock();
        // Runs that are gone leave nothing behind.
        if self.written.len() > 1024 {
            self.written
                .retain(|_, (_, since)| since.elapsed() < 10 * WATCH_PATIENCE);
        }
        self.metrics
            .waiting_runs
            .set(i64::try_from(state.world.waiting_runs()).unwrap_or(i64::MAX));
        self.metrics
            .assumed_runs
            .set(i64::try_from(state.assumed.count()).unwrap_or(i64::MAX));
        self.metrics
            .queue_length
            .set(i64::try_from(self.hub.runs.len()).unwrap_or(i64::MAX));
    }
}

/// What is known around `run` at this instant.
fn view<'a>(
    state: &State,
    key: &ObjectKey,
    run: &'a Run,
    confirmed: Option<&Confirmed>,
    now: Timestamp,
) -> View<'a> {
    let world = &state.world;
    let owner = run.assignment().map(|(name, uid)| {
        let silence = world.silence(uid.as_str(), Instant::now());
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
        let now = Instant::now();
        let mut snapshot = Snapshot::take(world, &state.assumed, &runtime, now);
        if let Some(pod) = run.run_uid().and_then(|uid| world.refused_by(uid, now)) {
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
        now,
        jitter: jitter(),
    }
}

/// From 0.0..1.0; the middle when the system has no randomness.
fn jitter() -> f64 {
    let mut bytes = [0; 4];
    match SystemRandom::new().fill(&mut bytes) {
        Ok(()) => f64::from(u32::from_le_bytes(bytes)) / (f64::from(u32::MAX) + 1.0),
        Err(_) => 0.5,
    }
}

fn about(why: Why) -> &'static str {
    match why {
        Why::Waits(_) => "wait",
        Why::NeverFits => "refuse",
        Why::Cancelled => "cancel",
        Why::Lifetime => "lifetime",
        Why::Healthy => "healthy",
        Why::Recover(Kind::Recovering) => "unroute",
        Why::Recover(Kind::Retrying) => "retry",
        Why::Recover(Kind::HandedOver | Kind::TurnedAway) => "hand_over",
        Why::Recover(Kind::Exhausted) => "exhaust",
        Why::Recover(Kind::Permanent) => "fail",
        Why::Recover(Kind::Cancelled) => "cancel",
    }
}

fn log_write(key: &ObjectKey, why: Why, detail: Option<&str>) {
    let run = Name(key);
    let about = about(why);
    match why {
        Why::Waits(_) | Why::Healthy => tracing::debug!(%run, about, detail, "status written"),
        Why::NeverFits | Why::Recover(Kind::Exhausted | Kind::Permanent) => {
            tracing::warn!(%run, about, detail, "the Run has failed");
        }
        _ => tracing::info!(%run, about, detail, "status written"),
    }
}

/// `namespace/name`.
struct Name<'a>(&'a ObjectKey);

impl std::fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.0.namespace, self.0.name)
    }
}
