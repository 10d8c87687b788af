//! Carries out a plan: several faults at once, each healed at its time.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Result, ensure};
use futures::future;

use super::{
    clock::Clock,
    faults,
    history::Millis,
    plan::Planned,
    targets::Targets,
    undo::{Id, Undos},
};

/// Between two tries to heal, and their number; then it is left to the end.
const HEAL_AGAIN: Duration = Duration::from_millis(200);
const TRIES: u32 = 50;

/// What became of a plan.
#[derive(Debug, Default)]
pub struct Deeds {
    /// Every fault and every healing, in order.
    pub told: Vec<(Millis, String)>,
    /// Of each kind: how often it was made, and how often there was no victim or it did not work.
    pub counts: BTreeMap<String, (usize, usize)>,
}

struct Driver<'a> {
    targets: &'a Targets,
    undos: &'a Undos,
    clock: Clock,
    deeds: Mutex<Deeds>,
}

/// Returns when everything is healed.
///
/// # Errors
/// When a kind of fault never worked: then the run shows less than it says.
pub async fn drive(plan: &[Planned], targets: &Targets, undos: &Undos, clock: Clock) -> Result<Deeds> {
    let driver = Driver {
        targets,
        undos,
        clock,
        deeds: Mutex::default(),
    };
    let start = clock.now();
    future::join_all(plan.iter().map(|planned| driver.one(start, planned))).await;
    let deeds = driver.deeds.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (kind, (made, missed)) in &deeds.counts {
        ensure!(
            *made > 0 || *missed < 3,
            "{kind} was tried {missed} times and never worked"
        );
    }
    Ok(deeds)
}

// === impl Driver ===

impl Driver<'_> {
    async fn one(&self, start: Millis, planned: &Planned) {
        let at = start + millis(planned.at);
        self.clock.until(at).await;
        let kind = planned.fault.to_string();
        let made = faults::make(planned.fault, planned.dice, self.targets, self.undos).await;
        let broken = match made {
            Ok(broken) => broken,
            Err(error) => {
                self.tell(format!("{kind}: not done: {error:#}"));
                return self.count(&kind, false);
            }
        };
        self.count(&kind, broken.is_some());
        let Some(broken) = broken else {
            return self.tell(format!("{kind}: no victim"));
        };
        self.tell(format!("{kind}: {}", broken.what));
        let Some(id) = broken.undo else {
            return;
        };
        self.clock.until(at + millis(planned.lasts)).await;
        self.heal(id).await;
        self.tell(format!("healed: {kind}: {}", broken.what));
    }

    async fn heal(&self, id: Id) {
        for _ in 0..TRIES {
            match self.undos.heal(id) {
                Ok(()) => return,
                Err(error) => self.tell(format!("not healed: {error:#}")),
            }
            tokio::time::sleep(HEAL_AGAIN).await;
        }
    }

    fn tell(&self, what: String) {
        let now = self.clock.now();
        println!("{:9.3} {what}", seconds(now));
        self.deeds().told.push((now, what));
    }

    fn count(&self, kind: &str, made: bool) {
        let mut deeds = self.deeds();
        let (done, missed) = deeds.counts.entry(kind.to_owned()).or_default();
        *(if made { done } else { missed }) += 1;
    }

    fn deeds(&self) -> MutexGuard<'_, Deeds> {
        self.deeds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Seconds of a moment, to be shown.
#[must_use]
pub fn seconds(moment: Millis) -> f64 {
    Duration::from_millis(moment).as_secs_f64()
}

fn millis(time: Duration) -> Millis {
    u64::try_from(time.as_millis()).unwrap_or(Millis::MAX)
}
