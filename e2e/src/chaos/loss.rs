//! How long the loss of a Pod is felt: a Pod that owns functions is deleted without grace while they are
//! called, again and again.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures::future::{join_all, try_join_all};
use kruntimes_api::keys::PodUid;

use super::{
    callers::Callers,
    figures::Spread,
    history::{Called, Millis},
    plan::Role,
    scene::Scene,
};
use crate::{cluster::eventually, world::Function};

/// Functions of each time; a third of them is hit.
const FUNCTIONS: usize = 6;
/// Between two calls of a function.
const PERIOD: Duration = Duration::from_millis(50);
/// First refusal after the deletion, 95th percentile.
pub const REFUSED_WITHIN: Millis = 1_000;
/// Ready elsewhere after the fence, 95th percentile. Without grace the Pod's end is the fence, so
/// that it counts from the deletion; the pause of the usual retry policy, 0.8 to 1.2 s, is part of it.
pub const READY_WITHIN: Millis = 3_000;

/// What was felt, in milliseconds since the deletion was asked for, by who felt it longest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Felt {
    /// Until the first call was refused; 0 when none was.
    pub refused: Millis,
    /// Until the function was Ready on another Pod.
    pub ready: Millis,
    /// Until a call was answered there.
    pub answered: Millis,
    /// The slowest call meanwhile: nobody hangs.
    pub slowest: Millis,
}

/// Everything that was seen.
#[derive(Debug, Default)]
pub struct Losses {
    /// One for each deletion.
    pub felt: Vec<Felt>,
    /// All calls, for the checker.
    pub calls: Vec<Called>,
}

/// Deletes a Pod `times` times, each time with functions that have lost none before.
pub async fn measure(scene: &Scene, times: usize) -> Result<Losses> {
    let mut losses = Losses::default();
    for time in 0..times {
        scene.whole().await?;
        let (felt, calls) = one(scene, time)
            .await
            .with_context(|| format!("deletion {time}"))?;
        println!(
            "Pod deleted at once, {} of {times}: refused after {} ms, Ready elsewhere after {} ms, answered after {} ms, slowest call {} ms",
            time + 1,
            felt.refused,
            felt.ready,
            felt.answered,
            felt.slowest
        );
        losses.felt.push(felt);
        losses.calls.extend(calls);
    }
    Ok(losses)
}

async fn one(scene: &Scene, time: usize) -> Result<(Felt, Vec<Called>)> {
    let world = &scene.world;
    let mut functions = Vec::new();
    for index in 0..FUNCTIONS {
        functions.push(scene.function(&format!("l{time}-{index}"), None).await?);
    }
    try_join_all(functions.iter().map(|function| world.ready(function))).await?;
    let callers = Callers::start(world, &functions, PERIOD, scene.clock);
    try_join_all(functions.iter().map(|function| answers(&callers, function, 0))).await?;

    let pods = scene.targets.running(Role::Pool).await?;
    let owners = try_join_all(functions.iter().map(|function| owner(scene, function))).await?;
    let pod = pods
        .iter()
        .max_by_key(|pod| owners.iter().filter(|owner| owner.as_str() == pod.uid).count())
        .context("the pool has Pods")?;
    let hit: Vec<&Function> = functions
        .iter()
        .zip(&owners)
        .filter(|(_, owner)| owner.as_str() == pod.uid)
        .map(|(function, _)| function)
        .collect();
    ensure!(!hit.is_empty(), "no Pod of the pool owns any function");

    let start = scene.clock.now();
    scene.targets.delete(pod, false).await?;
    let felt = join_all(
        hit.iter()
            .map(|function| feel(scene, &callers, function, &pod.uid, start)),
    );
    let mut worst = Felt::default();
    for felt in felt.await {
        let felt = felt?;
        worst = Felt {
            refused: worst.refused.max(felt.refused),
            ready: worst.ready.max(felt.ready),
            answered: worst.answered.max(felt.answered),
            slowest: worst.slowest.max(felt.slowest),
        };
    }
    let calls = callers.stop().await?;
    for function in &functions {
        world.delete(&function.name).await?;
    }
    try_join_all(functions.iter().map(|function| world.gone(&function.name))).await?;
    Ok((worst, calls))
}

async fn owner(scene: &Scene, function: &Function) -> Result<PodUid> {
    let run = scene.world.ready(function).await?;
    let (_, uid) = run.assignment().context("a Ready Run has a Pod")?;
    Ok(uid)
}

/// Waits until the function is served by another Pod, and says how long each step took.
async fn feel(
    scene: &Scene,
    callers: &Callers,
    function: &Function,
    pod: &str,
    start: Millis,
) -> Result<Felt> {
    let elsewhere = scene.world.run_until(&function.name, "Ready elsewhere", |run| {
        run.is_ready() && run.assignment().is_some_and(|(_, uid)| uid.as_str() != pod)
    });
    elsewhere.await?;
    let ready = scene.clock.now();
    answers(callers, function, ready).await?;
    felt(&calls_of(callers, function, start), start, ready).context("nobody called")
}

/// Waits for a 200 to a call that was made at `since` or later.
async fn answers(callers: &Callers, function: &Function, since: Millis) -> Result<()> {
    eventually(&format!("{} answers", function.name), || async {
        let calls = calls_of(callers, function, since);
        Ok(calls
            .iter()
            .any(|call| call.sent >= since && call.succeeded())
            .then_some(()))
    })
    .await
}

fn calls_of(callers: &Callers, function: &Function, since: Millis) -> Vec<Called> {
    let mut calls = callers.since(since);
    calls.retain(|call| call.function == function.name);
    calls
}

/// Reads it off the calls that ended since the deletion. Where the Pod still had the time to hand the function over,
/// calls have waited for its next owner, and none was refused.
fn felt(calls: &[Called], start: Millis, ready: Millis) -> Option<Felt> {
    let Some(first) = calls.iter().position(|call| !call.succeeded()) else {
        return Some(Felt {
            refused: 0,
            ready: ready - start,
            answered: 0,
            slowest: calls.iter().map(|call| call.ended - call.sent).max()?,
        });
    };
    let answered = calls[first..].iter().find(|call| call.succeeded())?.ended;
    let meanwhile = calls.iter().filter(|call| call.ended <= answered);
    Some(Felt {
        refused: calls[first].ended - start,
        ready: ready - start,
        answered: answered - start,
        slowest: meanwhile.map(|call| call.ended - call.sent).max()?,
    })
}

// === impl Losses ===

impl Losses {
    /// Prints the times; `false` when they are longer than promised.
    #[must_use]
    pub fn report(&self) -> bool {
        let of = |time: fn(&Felt) -> Millis| Spread::of(self.felt.iter().map(time));
        let (refused, ready) = (of(|it| it.refused), of(|it| it.ready));
        println!("Pod deleted at once, {} times:", self.felt.len());
        println!("  refused:         {refused} (p95 at most {REFUSED_WITHIN} ms)");
        println!("  Ready elsewhere: {ready} (p95 at most {READY_WITHIN} ms from the fence)");
        println!("  answered:        {}", of(|it| it.answered));
        println!("  slowest call:    {}", of(|it| it.slowest));
        refused.p95 <= REFUSED_WITHIN && ready.p95 <= READY_WITHIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chaos::history::{Answered, End};

    fn call(sent: Millis, ended: Millis, status: u16) -> Called {
        Called {
            function: "f".to_owned(),
            invocation: String::new(),
            sent,
            ended,
            end: End::Answered(Answered {
                status,
                invocation: String::new(),
                body: String::new(),
            }),
        }
    }

    #[test]
    fn what_is_felt_begins_with_the_first_failure_and_ends_with_the_next_success() {
        let calls = [
            call(990, 1010, 200),
            call(1050, 1080, 503),
            call(1100, 1400, 502),
            call(2000, 2030, 200),
            call(2050, 3000, 200),
        ];
        let expected = Felt {
            refused: 80,
            ready: 900,
            answered: 1030,
            slowest: 300,
        };
        assert_eq!(felt(&calls, 1000, 1900), Some(expected));
        let unnoticed = felt(&calls[..1], 1000, 1900).unwrap();
        assert_eq!((unnoticed.refused, unnoticed.ready), (0, 900));
        assert_eq!(felt(&[], 1000, 1900), None);
    }
}
