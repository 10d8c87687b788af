//! A registered function is looked at: is it there, is it idle, does it obey?

use std::sync::Arc;

use tokio::time::{Instant, sleep_until};

use super::{
    super::{decide::Step, health::Verdict, timers::POLL},
    Action, Driver, Expired, Fault,
};
use crate::{
    held::{Gate, Registered},
    slots::Running,
};

/// How often a server may fail to let go of a registration with a call that does not end.
const ANEW_AT_MOST: u32 = 3;

/// Why waiting ended.
enum Woken {
    News,
    /// The server is to be asked.
    Ask,
    /// A call runs on that was to end.
    Stuck,
}

impl Driver {
    /// Until something changes, or the server is to be asked.
    pub(super) async fn wait(&mut self) {
        let Some((registered, health)) = &self.registration else {
            return self.news().await;
        };
        let (registered, next) = (Arc::clone(registered), health.next());
        let entry = self.entry.clone();
        let (suspect, stuck) = (
            async {
                match &entry {
                    Some(entry) => entry.suspect.notified().await,
                    None => std::future::pending().await,
                }
            },
            async {
                match &entry {
                    Some(entry) => entry.stuck.notified().await,
                    None => std::future::pending().await,
                }
            },
        );
        let woken = tokio::select! {
            () = self.news() => Woken::News,
            () = stuck => Woken::Stuck,
            () = suspect => Woken::Ask,
            () = sleep_until(next) => Woken::Ask,
        };
        match woken {
            Woken::News => {}
            Woken::Ask => self.ask(&registered).await,
            Woken::Stuck => self.register_anew(&registered).await,
        }
    }

    /// Asks the server for the registration. An idle one gives its own slot for that, so that no call
    /// begins meanwhile, and ends if it still is idle (C-6.2).
    async fn ask(&mut self, registered: &Arc<Registered>) {
        let now = Instant::now();
        let Some((_, health)) = &mut self.registration else {
            return;
        };
        let idle = health.is_idle(now);
        health.asking(now);
        let entry = self.entry.clone().filter(|_| idle);
        let slot = entry.as_ref().and_then(|entry| entry.slot.look(now + POLL).ok());
        let (server, uid) = (self.pod.server.clone(), self.key.uid);
        let asked = server.status(uid, &registered.id);
        let Some(observed) = self.while_next(&Action::Wait, asked).await else {
            return;
        };
        let in_flight = observed.as_ref().map_or(1, |observed| observed.in_flight);
        let (wall, now) = ((self.pod.wall)(), Instant::now());
        let Some((_, health)) = &mut self.registration else {
            return;
        };
        match health.judge(observed, wall, now) {
            Verdict::Ready => {
                let expired = health.has_expired(now);
                if in_flight == 0 {
                    self.stuck = 0;
                }
                if self.is_silent() {
                    if let Some(entry) = &self.entry {
                        entry.open(Arc::clone(registered));
                    }
                    self.set_step(Step::Registered);
                }
                if let (Some(entry), Some(_)) = (&entry, &slot)
                    && expired
                    && in_flight == 0
                {
                    entry.close(Gate::Terminating);
                    self.local.expired = Some(Expired::Idle);
                }
            }
            Verdict::Doubtful => {
                tracing::warn!(run = %self.key, "the Runtime Server does not answer for a function");
            }
            Verdict::Silent => self.silent(),
            Verdict::Lost(fault) => self.fail(fault),
        }
    }

    /// Ends a registration with the call that does not end, and lets the next steps make it anew under
    /// the same attempt: a call is no failure of the Run (C-5.6).
    async fn register_anew(&mut self, registered: &Registered) {
        let now = Instant::now();
        let overdue = |call: Running| call.cancelled || call.until <= now;
        match &self.entry {
            Some(entry) if entry.slot.running().is_some_and(overdue) => entry.close(Gate::Recovering),
            // It has ended after all, and perhaps another one has begun.
            _ => return,
        }
        match self.pod.unregister(&self.key, &registered.id).await {
            Ok(()) => {
                self.stuck = 0;
                self.registration = None;
                self.set_step(Step::Prepared);
            }
            Err(error) => {
                self.stuck += 1;
                if self.stuck >= ANEW_AT_MOST {
                    let message =
                        format!("the Runtime Server neither ends a call nor its registration: {error}");
                    return self.fail(Fault {
                        reason: "RegistrationFailed",
                        message,
                    });
                }
                tracing::warn!(error, run = %self.key, "a function cannot be registered anew");
                self.silent();
            }
        }
    }

    fn silent(&mut self) {
        if let Some(entry) = &self.entry {
            entry.close(Gate::Recovering);
        }
        self.set_step(Step::Silent);
    }

    fn is_silent(&self) -> bool {
        self.local.held.is_some_and(|held| held.step == Step::Silent)
    }
}
