//! One task a Run: look, decide, do one step, and again. No step keeps it from looking: what takes
//! time is left when it is not the next step any more.

use std::{sync::Arc, time::Duration};

use kruntimes_api::{
    Run,
    keys::{Attempt, RunKey},
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};

use super::{
    Facts, Told,
    act::{Pod, Written},
    decide::{Action, Expired, Fault, Holding, Local, Step, decide},
    drivers::{Drivers, Seen},
    health::Health,
    statuses, timers,
};
use crate::{
    gateway_config::GatewayConfig,
    held::{Entry, Gate, Registered},
};

mod clean_up;
mod poll;

use clean_up::{Cleaning, Round};

/// After a failure, at first and at most.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));

/// The task of one Run.
pub(super) struct Driver {
    pod: Arc<Pod>,
    drivers: Drivers,
    gateway: watch::Receiver<GatewayConfig>,
    key: RunKey,
    mailbox: watch::Receiver<Seen>,
    /// Mail that was announced and is not taken in yet.
    unread: bool,
    /// The newest version; `None` means, once looked, that it is gone.
    run: Option<Arc<Run>>,
    /// The version of the newest that was ever seen, also of one that is gone.
    version: Option<u64>,
    local: Local,
    entry: Option<Arc<Entry>>,
    registration: Option<(Arc<Registered>, Health)>,
    cleaning: Option<Cleaning>,
    /// How often in a row the server did not let go of a registration with a call that does not end.
    stuck: u32,
    ends: Option<Instant>,
    backoff: Duration,
}

// === impl Driver ===

impl Driver {
    /// With what an earlier process left in this Pod, if anything.
    pub(super) fn new(
        pod: Arc<Pod>,
        drivers: Drivers,
        key: RunKey,
        mailbox: watch::Receiver<Seen>,
        held: Option<Holding>,
    ) -> Self {
        Self {
            gateway: pod.gateway.clone(),
            pod,
            drivers,
            key,
            mailbox,
            unread: true,
            run: None,
            version: None,
            local: Local {
                held,
                ..Local::default()
            },
            entry: None,
            registration: None,
            cleaning: None,
            stuck: 0,
            ends: None,
            backoff: BACKOFF.0,
        }
    }

    /// Until nothing of the Run is here.
    pub(super) async fn run(mut self) {
        loop {
            if let Err(error) = self.look().await {
                self.pause("reading the Run", &error).await;
                continue;
            }
            let action = self.decision();
            tracing::debug!(run = %self.key, ?action, "next step");
            match action {
                Action::Wait => self.wait().await,
                Action::Forget => {
                    self.pod.held.remove(self.key.uid);
                    if self.drivers.end(self.key.uid, &self.mailbox) {
                        return;
                    }
                }
                Action::CleanUp { patient } => {
                    if self.clean_up(patient).await == Round::GivenUp {
                        self.drivers.abandon(self.key.uid);
                        return;
                    }
                }
                Action::Register => self.register().await,
                step => self.step(step).await,
            }
        }
    }

    /// Takes in new mail; reads the live object where there is doubt. Each piece of mail counts once:
    /// what a write or a read has shown since is newer than it.
    async fn look(&mut self) -> Result<(), String> {
        let arrived = self.mailbox.has_changed().unwrap_or(false);
        if !std::mem::take(&mut self.unread) && !arrived {
            return Ok(());
        }
        let seen = self.mailbox.borrow_and_update().clone();
        match seen {
            seen if seen.is_doubtful(&self.pod.me, self.version) => self.read_live().await?,
            Seen::Object(run) if !self.is_old(&run) => {
                self.version = version(&run).or(self.version);
                self.run = Some(run);
            }
            Seen::Object(_) | Seen::Doubt => {}
        }
        Ok(())
    }

    /// Takes what is live for the newest version.
    async fn read_live(&mut self) -> Result<(), String> {
        match self.pod.live(&self.key).await {
            Ok(live) => {
                self.unread = false;
                self.version = live.as_ref().and_then(version).or(self.version);
                self.run = live.map(Arc::new);
                Ok(())
            }
            Err(error) => {
                // Still in doubt.
                self.unread = true;
                Err(error)
            }
        }
    }

    /// Whether mail is of a version before the one that is known. What is gone comes back in no version
    /// that was seen already.
    fn is_old(&self, run: &Run) -> bool {
        matches!(
            (version(run), self.version),
            (Some(mail), Some(known)) if mail < known || (mail == known && self.run.is_none())
        )
    }

    fn decision(&mut self) -> Action {
        let now = Instant::now();
        self.local.draining = self.pod.drain.is_stopping();
        self.local.isolated = self.pod.contact.is_lost(now);
        let endpoint = self.pod.endpoint(&self.key);
        let Some(run) = &self.run else {
            return decide(&Facts::gone(), &self.local);
        };
        self.local.gateway_known = endpoint.is_some()
            || run
                .status
                .as_ref()
                .is_some_and(|status| status.endpoint.is_some());
        if self.ends.is_none() {
            self.ends = timers::lifetime(run, (self.pod.wall)(), now);
        }
        if self.ends.is_some_and(|ends| ends <= now) {
            self.local.expired.get_or_insert(Expired::Lifetime);
        }
        decide(&Facts::of(run, &self.pod.me, endpoint.as_ref()), &self.local)
    }

    fn set_step(&mut self, step: Step) {
        if let Some(attempt) = self.run.as_ref().and_then(|run| run.attempt()) {
            self.local.held = Some(Holding { attempt, step });
        }
    }

    fn fail(&mut self, fault: Fault) {
        tracing::warn!(run = %self.key, reason = fault.reason, message = fault.message, "the attempt ends");
        if let Some(entry) = &self.entry {
            entry.close(Gate::Recovering);
        }
        if let Some(attempt) = self.run.as_ref().and_then(|run| run.attempt()) {
            self.local.fault = Some((attempt, fault));
        }
    }

    /// The steps that are one write, or quick.
    async fn step(&mut self, action: Action) {
        let Some(run) = self.run.clone() else { return };
        let pod = Arc::clone(&self.pod);
        let now = (pod.wall)();
        let told = Facts::of(&run, &pod.me, None).told;
        let written = match &action {
            Action::Admit => {
                match pod.admit(&self.key, &run) {
                    Ok(()) => self.set_step(Step::Admitted),
                    Err(fault) => self.fail(fault),
                }
                return;
            }
            Action::Prepare => {
                self.enter();
                let attempt = run.attempt().unwrap_or(Attempt::FIRST);
                match pod.prepare(&self.key, attempt, &run).await {
                    Ok(Ok(())) => self.set_step(Step::Prepared),
                    Ok(Err(fault)) => self.fail(fault),
                    Err(error) => self.pause("preparing the Run", &error).await,
                }
                return;
            }
            Action::AddFinalizer => pod.write_finalizer(&run, true).await,
            Action::RemoveFinalizer => pod.write_finalizer(&run, false).await,
            Action::Claim => pod.write_status(&run, &statuses::claimed(&run, now)).await,
            Action::Announce => {
                let endpoint = pod.endpoint(&self.key);
                if Facts::of(&run, &pod.me, endpoint.as_ref()).told == Told::Outdated {
                    pod.refresh.lock().await.tick().await;
                }
                let wanted = statuses::ready(&run, &pod.me.owner, endpoint.as_ref(), now);
                pod.write_status(&run, &wanted).await
            }
            Action::Withdraw => pod.write_status(&run, &statuses::recovering(&run, now)).await,
            Action::Finish(end) => pod.write_status(&run, &statuses::ended(&run, *end, now)).await,
            Action::Release(fault) => {
                pod.write_status(&run, &statuses::released(&run, fault, now))
                    .await
            }
            Action::Wait | Action::Forget | Action::Register | Action::CleanUp { .. } => return,
        };
        if let Written::Done(run) = &written {
            pod.events.written(run, &action, told);
        }
        self.after(written).await;
    }

    async fn after(&mut self, written: Written) {
        match written {
            Written::Done(run) => {
                self.backoff = BACKOFF.0;
                // Gone with its last finalizer: the answer is the object as it was deleted.
                let gone = run.is_deleting() && run.metadata.finalizers.as_ref().is_none_or(Vec::is_empty);
                self.version = version(&run).max(self.version);
                self.run = (!gone).then(|| Arc::new(*run));
            }
            Written::Same => {
                // Facts said otherwise; reading again settles it.
                self.pause("writing the Run", "nothing would change").await;
                self.reread().await;
            }
            Written::Conflict => {
                // Not at once: a server that says this every time must not be asked without pause.
                self.delay().await;
                self.reread().await;
            }
            Written::Failed(error) => self.pause("writing the Run", &error).await,
        }
    }

    async fn reread(&mut self) {
        while let Err(error) = self.read_live().await {
            self.pause("reading the Run", &error).await;
        }
    }

    /// Shows callers that this Pod has the Run, with a closed gate.
    fn enter(&mut self) {
        let Some(attempt) = self.local.held.map(|held| held.attempt) else {
            return;
        };
        if self.entry.as_ref().is_none_or(|entry| entry.attempt != attempt) {
            self.entry = Some(self.pod.held.insert(self.key.clone(), attempt, self.ends));
        }
    }

    /// Registers, unless something happens meanwhile after which that is not the next step.
    async fn register(&mut self) {
        self.enter();
        let work = Arc::clone(&self.pod).register(self.key.clone());
        match self.while_next(&Action::Register, work).await {
            None => {}
            Some(Ok(registered)) => {
                if let Some(entry) = &self.entry {
                    entry.open(Arc::clone(&registered));
                }
                tracing::info!(run = %self.key, registration = %registered.id, "the function is registered");
                self.registration = Some((registered, Health::new(self.run.as_deref(), Instant::now())));
                self.set_step(Step::Registered);
            }
            Some(Err(fault)) => self.fail(fault),
        }
    }

    /// Works for as long as `step` stays the next step; `None` when it does not.
    async fn while_next<T>(&mut self, step: &Action, work: impl Future<Output = T>) -> Option<T> {
        tokio::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return Some(done),
                () = self.news() => {}
            }
            if let Err(error) = self.look().await {
                self.pause("reading the Run", &error).await;
            } else if self.decision() != *step {
                return None;
            }
        }
    }

    /// Returns when the decision may be another one.
    async fn news(&mut self) {
        let stopping = self.pod.drain.stopping();
        let stop = async {
            if self.local.draining {
                std::future::pending().await
            } else {
                stopping.cancelled().await
            }
        };
        let end = async {
            match self.ends.filter(|_| self.local.expired.is_none()) {
                Some(ends) => sleep_until(ends).await,
                None => std::future::pending().await,
            }
        };
        let gateway = async {
            if self.gateway.changed().await.is_err() {
                std::future::pending().await
            }
        };
        let contact = self.pod.contact.clone();
        let heard = async {
            if self.local.isolated {
                contact.found().await;
            } else {
                std::future::pending().await
            }
        };
        tokio::select! {
            changed = self.mailbox.changed() => {
                self.unread = true;
                if changed.is_err() {
                    // The map of drivers is gone; only stopping is left to wait for.
                    stopping.cancelled().await;
                }
            }
            () = gateway => {}
            () = heard => {}
            () = stop => {}
            () = end => {}
        }
    }

    async fn pause(&mut self, doing: &str, error: &str) {
        tracing::warn!(error, run = %self.key, "{doing} is tried again");
        self.delay().await;
    }

    fn reset_backoff(&mut self) {
        self.backoff = BACKOFF.0;
    }

    async fn delay(&mut self) {
        let pause = self.backoff;
        self.backoff = (self.backoff * 2).min(BACKOFF.1);
        sleep(pause).await;
    }
}

/// Versions that are no numbers cannot be compared; then the later to arrive counts, and a write
/// decided on it would meet a conflict.
fn version(run: &Run) -> Option<u64> {
    run.metadata.resource_version.as_deref()?.parse().ok()
}
