//! `make chaos`: breaks things on the cluster under load and compares what callers and functions saw.

use std::{process::ExitCode, time::Duration};

use anyhow::Result;
use jiff::Timestamp;
use kruntimes_api::run::RetryPolicy;
use kruntimes_e2e::{
    chaos::{
        callers::Callers,
        check::{self, Kind, Verdict},
        drive::{self, Deeds, seconds},
        history::{Called, Recorded},
        loss, plan,
        scene::Scene,
        settle::{self, Settled, Wanted},
        undo::{HealAtEnd, Undos},
        wishes::Wishes,
    },
    cluster::Cluster,
};
use tokio::signal::unix::{SignalKind, signal};

const FUNCTIONS: usize = 12;
/// Between two calls of a function: all together make 40 a second.
const PERIOD: Duration = Duration::from_millis(300);
/// How much around a violation is shown.
const AROUND: u64 = 30_000;

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let chance = u64::from(Timestamp::now().subsec_nanosecond().unsigned_abs());
    let wishes = Wishes::parse(std::env::args().skip(1), chance)?;
    let undos = Undos::default();
    let _heal = HealAtEnd(undos.clone());
    let mut terminated = signal(SignalKind::terminate())?;
    // Whichever comes first: what is broken then is healed on the way out.
    tokio::select! {
        good = Box::pin(run(wishes, &undos)) => Ok(if good? { ExitCode::SUCCESS } else { ExitCode::FAILURE }),
        _ = tokio::signal::ctrl_c() => Ok(ExitCode::from(130)),
        _ = terminated.recv() => Ok(ExitCode::from(143)),
    }
}

/// Whether everything was as promised.
async fn run(wishes: Wishes, undos: &Undos) -> Result<bool> {
    let scene = Scene::set(&Cluster::node().await?).await?;
    println!("namespace {}", scene.world.namespace);
    let mut calls = Vec::new();
    let mut good = true;
    if wishes.deletions > 0 {
        let losses = loss::measure(&scene, wishes.deletions).await?;
        good &= losses.report();
        calls.extend(losses.calls);
    }
    let mut deeds = Deeds::default();
    let mut settled = None;
    if !wishes.length.is_zero() {
        let of_chaos = chaos(&scene, wishes, undos).await?;
        calls.extend(of_chaos.calls);
        deeds = of_chaos.deeds;
        // The histories are worth reading also when something stays away.
        settled = of_chaos.settled.inspect_err(|error| println!("{error:#}")).ok();
        let longest = settled.as_ref().map(Settled::longest);
        good &= longest.is_some_and(|longest| longest <= settle::READY_WITHIN);
    }
    let records = scene.collector.records()?;
    let verdict = check::check(&calls, &records);
    report(&verdict, &deeds, settled.as_ref());
    for violation in &verdict.violations {
        println!("\n{violation}");
        show(&violation.invocation, &calls, &records, &deeds);
    }
    good &= verdict.violations.is_empty();
    if good {
        scene.world.close().await?;
    } else {
        println!("\nnamespace {} is left as it is", scene.world.namespace);
    }
    println!(
        "RESULT calls={} double_executions={} wrong_function={} disagreements={} unknown={} late_attempts={} \
         executions={} faults={} recovered_ms={} seed={}",
        calls.len(),
        verdict.count(Kind::Double),
        verdict.count(Kind::WrongFunction),
        verdict.count(Kind::Disagreement),
        verdict.unknown,
        verdict.count(Kind::LateAttempt),
        records.len(),
        deeds.counts.values().map(|(made, _)| made).sum::<usize>(),
        settled.map_or(0, |settled| settled.longest()),
        wishes.seed,
    );
    Ok(good)
}

/// What came of it.
struct Chaos {
    calls: Vec<Called>,
    deeds: Deeds,
    settled: Result<Settled>,
}

async fn chaos(scene: &Scene, wishes: Wishes, undos: &Undos) -> Result<Chaos> {
    // Tries again at once and often: what is measured is recovery, not the pause that a policy asks for.
    let retry = RetryPolicy {
        max_attempts: Some(100),
        backoff: Some("0s".to_owned()),
        retryable_reasons: None,
    };
    scene.whole().await?;
    let mut functions = Vec::new();
    for index in 0..FUNCTIONS {
        let name = format!("f{index:02}");
        functions.push(scene.function(&name, Some(retry.clone())).await?);
    }
    for function in &functions {
        scene.world.ready(function).await?;
    }
    let wanted = Wanted::now(scene).await?;
    let names: Vec<String> = functions.iter().map(|it| it.name.clone()).collect();
    println!(
        "chaos for {} s, seed {}; {FUNCTIONS} functions, one call each every {} ms",
        wishes.length.as_secs(),
        wishes.seed,
        PERIOD.as_millis()
    );
    let callers = Callers::start(&scene.world, &functions, PERIOD, scene.clock);
    let plan = plan::draw(wishes.seed, wishes.length);
    let deeds = drive::drive(&plan, &scene.targets, undos, scene.clock).await?;
    let healed = deeds.told.last().map_or(0, |(at, _)| *at);
    let settled = settle::wait(scene, &callers, &names, wanted, healed).await;
    Ok(Chaos {
        calls: callers.stop().await?,
        deeds,
        settled,
    })
}

fn report(verdict: &Verdict, deeds: &Deeds, settled: Option<&Settled>) {
    println!("calls by how they ended:");
    for (word, count) in &verdict.ends {
        println!("  {word:32} {count:7}");
    }
    if !deeds.counts.is_empty() {
        println!("faults made (and not made, for want of a victim):");
    }
    for (kind, (made, missed)) in &deeds.counts {
        println!("  {kind:32} {made:7} ({missed})");
    }
    if let Some(settled) = settled {
        settled.report();
    }
}

/// The whole history of one invocation, and what broke around it.
fn show(invocation: &str, calls: &[Called], records: &[Recorded], deeds: &Deeds) {
    let mut history = Vec::new();
    for call in calls.iter().filter(|it| it.invocation == invocation) {
        history.push((call.sent, format!("called {}", call.function)));
        history.push((call.ended, format!("ended {:?}", call.end)));
    }
    for record in records.iter().filter(|it| it.invocation == invocation) {
        let what = format!("{} ran it, attempt {}", record.function, record.attempt);
        history.push((record.at, what));
    }
    let from = history.iter().map(|(at, _)| *at).min().unwrap_or_default();
    let to = history.iter().map(|(at, _)| *at).max().unwrap_or_default();
    let around = from.saturating_sub(AROUND)..=to + AROUND;
    history.extend(deeds.told.iter().filter(|(at, _)| around.contains(at)).cloned());
    history.sort_by_key(|(at, _)| *at);
    for (at, what) in history {
        println!("{:9.3} {what}", seconds(at));
    }
}
