//! After the last healing: how long until every function answers again.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Result, bail};
use k8s_openapi::api::core::v1::Pod;
use tokio::time::sleep;

use super::{
    callers::Callers,
    drive::seconds,
    figures::Spread,
    history::{Called, Millis},
    plan::Role,
    scene::Scene,
};

/// A function is back when its calls have succeeded for this long.
const STEADY: Millis = 3_000;
/// When waiting is over.
const PATIENCE: Duration = Duration::from_secs(180);
const LOOK: Duration = Duration::from_millis(100);
/// How long a function may take beside what the restart of containers took.
pub const READY_WITHIN: Millis = 5_000;

/// How many Pods of each role there should be.
#[derive(Debug, Clone, Copy)]
pub struct Wanted([(Role, usize); 3]);

/// When things were as before, in milliseconds since the last healing.
#[derive(Debug)]
pub struct Settled {
    /// Each function.
    pub functions: BTreeMap<String, Millis>,
    /// The last container that Kubernetes had to start.
    pub containers: Millis,
}

// === impl Wanted ===

impl Wanted {
    /// As many as there are now.
    pub async fn now(scene: &Scene) -> Result<Self> {
        let mut wanted = [(Role::Pool, 0), (Role::Gateway, 0), (Role::Scheduler, 0)];
        for (role, count) in &mut wanted {
            *count = scene.targets.running(*role).await?.len();
        }
        Ok(Self(wanted))
    }
}

/// Waits until all functions answer and all containers run.
///
/// # Errors
/// Naming the functions that do not come back.
pub async fn wait(
    scene: &Scene,
    callers: &Callers,
    functions: &[String],
    wanted: Wanted,
    healed: Millis,
) -> Result<Settled> {
    let end = tokio::time::Instant::now() + PATIENCE;
    let mut containers = None;
    loop {
        if containers.is_none() {
            containers = containers_back(scene, wanted, healed).await?;
        }
        let calls = callers.since(healed);
        let now = scene.clock.now();
        let back: BTreeMap<String, Option<Millis>> = functions
            .iter()
            .map(|name| (name.clone(), back(&calls, name, healed, now)))
            .collect();
        if let Some(containers) = containers
            && back.values().all(Option::is_some)
        {
            let functions = back
                .into_iter()
                .filter_map(|(name, at)| Some((name, at? - healed)))
                .collect();
            return Ok(Settled {
                functions,
                containers: containers - healed,
            });
        }
        if tokio::time::Instant::now() >= end {
            let missing: Vec<String> = back
                .into_iter()
                .filter(|(_, at)| at.is_none())
                .map(|(name, _)| format!("{name} ({})", last_word(&calls, &name)))
                .collect();
            bail!(
                "not as before {PATIENCE:?} after the last healing: {missing:?}; all containers run: {}",
                containers.is_some()
            );
        }
        sleep(LOOK).await;
    }
}

/// When a function was back for good; `None` while it is not known to be.
fn back(calls: &[Called], name: &str, healed: Millis, now: Millis) -> Option<Millis> {
    let mut since = None;
    for call in calls.iter().filter(|it| it.function == name && it.sent >= healed) {
        if call.succeeded() {
            since.get_or_insert(call.ended);
        } else {
            since = None;
        }
    }
    since.filter(|since| now >= since + STEADY)
}

fn last_word(calls: &[Called], name: &str) -> String {
    let last = calls.iter().rfind(|call| call.function == name);
    last.map_or_else(|| "no call ended".to_owned(), Called::word)
}

/// When the last container was started, once all there should be run.
async fn containers_back(scene: &Scene, wanted: Wanted, healed: Millis) -> Result<Option<Millis>> {
    let mut last = healed;
    for (role, count) in wanted.0 {
        let pods = scene.targets.pods(role).await?;
        let starts: Vec<Millis> = pods
            .iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
            .filter_map(|pod| started(scene, pod))
            .collect();
        if starts.len() < count {
            return Ok(None);
        }
        last = starts.into_iter().fold(last, Millis::max);
    }
    Ok(Some(last))
}

/// When the last of the Pod's containers was started; `None` while one does not run. Whole seconds,
/// rounded down: what is left of the wait counts against us.
fn started(scene: &Scene, pod: &Pod) -> Option<Millis> {
    let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
    let mut last = 0;
    for status in statuses {
        let running = status.state.as_ref()?.running.as_ref()?;
        let at = running.started_at.as_ref()?.0.as_millisecond();
        last = last.max(scene.clock.at(at));
    }
    (!statuses.is_empty()).then_some(last)
}

// === impl Settled ===

impl Settled {
    /// Longest time of a function, beside what the restart of containers took.
    #[must_use]
    pub fn longest(&self) -> Millis {
        Spread::of(self.beside()).max
    }

    fn beside(&self) -> impl Iterator<Item = Millis> {
        self.functions
            .values()
            .map(|at| at.saturating_sub(self.containers))
    }

    /// Prints the times.
    pub fn report(&self) {
        println!("after the last healing:");
        println!("  last container started: {:.1} s", seconds(self.containers));
        println!(
            "  functions answered:     {}",
            Spread::of(self.functions.values().copied())
        );
        println!(
            "  beside that start:      {} (at most {READY_WITHIN} ms)",
            Spread::of(self.beside())
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chaos::history::{Answered, End};

    fn call(sent: Millis, status: u16) -> Called {
        Called {
            function: "f".to_owned(),
            invocation: String::new(),
            sent,
            ended: sent + 10,
            end: End::Answered(Answered {
                status,
                invocation: String::new(),
                body: String::new(),
            }),
        }
    }

    #[test]
    fn a_function_is_back_with_the_first_of_its_steady_answers() {
        let calls = [
            call(90, 200),
            call(100, 200),
            call(400, 503),
            call(700, 200),
            call(1000, 200),
        ];
        let back = |calls: &[Called], now| back(calls, "f", 100, now);
        assert_eq!(back(&calls, 710 + STEADY), Some(710));
        assert_eq!(back(&calls, 709 + STEADY), None, "not steady yet");
        assert_eq!(back(&calls[..3], 99_999), None, "its last call failed");
        assert_eq!(back(&calls[..1], 99_999), None, "before the healing");
        assert_eq!(back(&calls[..2], 99_999), Some(110), "it never failed");
    }
}
