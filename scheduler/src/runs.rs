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
    facts::ObjectKey,
    hub::{Hub, State},
    metrics::{Metrics, WriteLabels},
    plan::{Plan, Pod, View, Why, plan},
    pool,
    recover::Kind,
    snapshot::Snapshot,
};

/// After a write the watch normally answers within milliseconds; when it has not after this, the
/// object is read.
const WATCH_PATIENCE: Duration = Duration::from_secs(2);
/// A Run whose Pod exists and is not shown by the watch is looked at this often.
const UNSEEN_POD_LOOK: Duration = Duration::from_secs(30);
/// Pause after a failure that time may heal.
const TRY_AGAIN: Duration = Duration::from_secs(5);

/// Looks at Runs for one term.
pub(crate) struct RunLoop<'a> {
    pub(crate) hub: &'a Hub,
    pub(crate) writer: Writer,
    pub(crate) metrics: &'a Metrics,
    events: Events,
    /// Versions that we have written over and that the watch still shows.
    written: HashMap<RunUid, (Option<String>, Instant)>,
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
        let Plan::ConfirmPod { name, uid } = plan else {
            return self.act(key, &run, plan).await;
        };
        let Some(pod) = self.confirm(key, &name, &uid).await else {
            return self.hub.runs.wake_after(key.clone(), TRY_AGAIN);
        };
        if pod == Pod::There {
            // The watch is behind, or has lost the Pod's label; then it will not tell of its end.
            self.hub.runs.wake_after(key.clone(), UNSEEN_POD_LOOK);
        }
        match self.decide(key, Some((&uid, pod))) {
            Look::Do(now, plan) if now == run => self.act(key, &run, plan).await,
            // It has moved on during the read.
            _ => self.hub.runs.wake(key.clone()),
        }
    }

    /// What to do with the Run as the watch shows it.
    fn decide(&mut self, key: &ObjectKey, confirmed: Option<(&PodUid, Pod)>) -> Look {
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
        let plan = plan(view(&state, key, &run, confirmed));
        drop(state);
        Look::Do(run, plan)
    }

    async fn confirm(&self, key: &ObjectKey, pod: &str, uid: &PodUid) -> Option<Pod> {
        match self.writer.pod_is_gone(&key.namespace, pod, uid).await {
            Ok(true) => Some(Pod::Gone),
            Ok(false) => Some(Pod::There),
            Err(error) => {
                tracing::warn!(run = %Name(key), pod, error, "cannot read the Pod of a Run");
                None
            }
        }
    }

    async fn act(&mut self, key: &ObjectKey, run: &Arc<Run>, plan: Plan) {
        match plan {
            Plan::Nothing => {}
            Plan::Later(pause) => self.hub.runs.wake_after(key.clone(), pause),
            // It was confirmed before; another Pod is meant now.
            Plan::ConfirmPod { .. } => self.hub.runs.wake_after(key.clone(), TRY_AGAIN),
            Plan::Write { status, why } => {
                if why == Why::Recover(Kind::HandedOver)
                    && let Some((_, pod)) = run.assignment()
                {
                    self.hub.lock().world.pass_over(pod.as_str(), Instant::now());
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
        self.hub.change(|state, wakes| match live {
            Some(live) => {
                if let Some(uid) = uid {
                    // Live and still without the assignment: the write never arrived. If it yet
                    // does, the next write that is guarded by this version is refused.
                    state.assumed.forget(uid);
                }
                state.world.apply_run(live, wakes);
            }
            None => {
                if let Some(uid) = uid {
                    state.assumed.gone(uid);
                }
                state.world.delete_run(run, wakes);
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
fn view<'a>(state: &State, key: &ObjectKey, run: &'a Run, confirmed: Option<(&PodUid, Pod)>) -> View<'a> {
    let world = &state.world;
    let pod = run.assignment().map_or(Pod::NotSeen, |(name, uid)| {
        let seen = world.pod(&ObjectKey::new(key.namespace.clone(), name));
        match confirmed {
            Some((asked, verdict)) if *asked == uid => verdict,
            _ if seen.is_some_and(|it| it.uid == uid) => Pod::There,
            _ => Pod::NotSeen,
        }
    });
    let runtime = ObjectKey::new(key.namespace.clone(), run.spec.runtime.clone());
    let waits = run.assignment().is_none();
    View {
        run,
        pod,
        declared: world.runtime(&runtime).map(|it| pool::capacity(&it.spec)),
        snapshot: if waits {
            Snapshot::take(world, &state.assumed, &runtime, Instant::now())
        } else {
            Snapshot::default()
        },
        now: Timestamp::now(),
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
        Why::Recover(Kind::HandedOver) => "hand_over",
        Why::Recover(Kind::Exhausted) => "exhaust",
        Why::Recover(Kind::Cancelled) => "cancel",
    }
}

fn log_write(key: &ObjectKey, why: Why, detail: Option<&str>) {
    let run = Name(key);
    let about = about(why);
    match why {
        Why::Waits(_) | Why::Healthy => tracing::debug!(%run, about, detail, "status written"),
        Why::NeverFits | Why::Recover(Kind::Exhausted) => {
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
