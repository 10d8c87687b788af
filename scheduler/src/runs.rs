//! The loop over Runs: one look at one Run at a time, view → plan → write.

use std::sync::Arc;

use kruntimes_api::{Run, keys::PodUid};
use ring::rand::{SecureRandom as _, SystemRandom};
use tokio::time::Instant;

use crate::{
    assumed::Reservation,
    bind::{Writer, Written},
    cycle::Ask,
    events::Events,
    facts::{ObjectKey, Signs},
    fence::{Node, Presence},
    hub::Hub,
    look::{AFTER_READ, Confirmed, Look, Looks, Now, TRY_AGAIN, given_back, heard_live},
    metrics::{Metrics, WriteLabels},
    plan::{Plan, Why},
    recover::Kind,
};

/// Looks at Runs for one term.
pub(crate) struct RunLoop<'a> {
    pub(crate) hub: &'a Hub,
    pub(crate) writer: Writer,
    pub(crate) metrics: &'a Metrics,
    events: Events,
    looks: Looks,
}

// === impl RunLoop ===

impl<'a> RunLoop<'a> {
    pub(crate) fn new(hub: &'a Hub, writer: Writer, events: Events, metrics: &'a Metrics) -> Self {
        Self {
            hub,
            writer,
            metrics,
            events,
            looks: Looks::default(),
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
        let now = Now {
            monotonic: Instant::now(),
            wall: self.hub.now(),
            jitter: jitter(),
        };
        self.looks.look(&state.world, &state.assumed, key, confirmed, now)
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
            // Also of a Pod that is gone: deleted by force, it may live on.
            Ok(beat) => self.hub.change(|state, wakes| {
                heard_live(&mut state.world, &uid, beat, Instant::now(), wakes);
            }),
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
                given_back(&mut self.hub.lock().world, run, why, Instant::now());
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
        if !self.looks.may_delete_pod(Instant::now()) {
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
                self.looks.deleted_pod(Instant::now());
                tracing::warn!(run = %Name(key), pod = name, "its silent owner's Pod is deleted");
            }
            Written::Refused(error) | Written::Unknown(error) => {
                tracing::error!(run = %Name(key), pod = name, error, "cannot delete the Pod of a silent owner");
            }
            Written::Same | Written::Conflict | Written::NotLeader => {}
        }
        self.hub.runs.wake_after(key.clone(), TRY_AGAIN);
    }

    /// Tells what became of a write.
    fn settle(&mut self, key: &ObjectKey, run: &Run, about: &'static str, result: Written) {
        let labels = WriteLabels {
            about,
            result: result.label(),
        };
        self.metrics.run_writes.get_or_create(&labels).inc();
        match &result {
            Written::Same | Written::NotLeader | Written::Done => {}
            Written::Conflict => {
                tracing::debug!(run = %Name(key), about, "the Run has moved on; deciding again")
            }
            Written::Refused(error) => {
                tracing::error!(run = %Name(key), about, error, "the API refuses a write");
            }
            Written::Unknown(error) => {
                tracing::warn!(run = %Name(key), about, error, "the outcome of a write is unknown")
            }
        }
        if let Some(pause) = self.looks.settle(run, &result, Instant::now()) {
            self.hub.runs.wake_after(key.clone(), pause);
        }
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
        let looks = &mut self.looks;
        self.hub.change(|state, wakes| {
            looks.refreshed(run, live, &mut state.world, &mut state.assumed, wakes);
        });
        self.hub.runs.wake_after(key.clone(), AFTER_READ);
    }

    fn observe(&self) {
        let state = self.hub.lock();
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
