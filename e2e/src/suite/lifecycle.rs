//! What happens to functions when Pods, Runs and requests to end them come and go.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use kruntimes_api::{names::FINALIZER, run::Phase};

use super::answers::expect_problem;
use crate::world::World;

const ECHO: &str = "def handler(event, context):\n    return event\n";

/// The Pod of a Ready function goes. Until another one has it, callers get its output (a Pod that is told to end hands its
/// functions over, and calls wait for that), a 503 that says that nothing ran, or a 502 that says that nobody knows.
pub async fn pod_loss(world: &World) -> Result<()> {
    let function = world.function("lost", ECHO).await?;
    world.invoke_until(&function, "1", 200).await?;
    let before = world.ready(&function).await?;
    let (pod, uid) = before.assignment().context("a Ready Run has a Pod")?;
    world.kill_pod(pod).await?;
    let calls = async {
        loop {
            let answer = world.invoke(&function, "1").await?;
            match answer.status.as_u16() {
                200 => ensure!(answer.json() == 1, "{:?}", answer.body),
                503 => {
                    ensure!(answer.problem("dispatched") == "no", "{:?}", answer.body);
                    ensure!(!answer.header("retry-after").is_empty(), "{:?}", answer.headers);
                }
                502 => ensure!(answer.problem("dispatched") == "unknown", "{:?}", answer.body),
                status => bail!("{status} {:?}", answer.body),
            }
        }
    };
    let moved = world.run_until("lost", "Ready elsewhere", |run| {
        run.is_ready() && run.assignment().is_some_and(|(_, now)| now != uid)
    });
    tokio::select! {
        moved = moved => drop(moved?),
        failed = calls => return failed,
    }
    let answer = world.invoke_until(&function, "2", 200).await?;
    ensure!(answer.json() == 2, "{:?}", answer.body);
    let after = world.ready(&function).await?;
    ensure!(
        after.attempt() > before.attempt(),
        "the fence did not grow: {:?}",
        after.attempt()
    );
    world.delete("lost").await?;
    world.gone("lost").await
}

/// With room for `runs` functions, the next one waits; cancelling one and deleting
/// another lets two more in.
pub async fn ends_release_the_slot(world: &World, runs: usize) -> Result<()> {
    let mut functions = Vec::new();
    for index in 0..runs {
        functions.push(world.function(&format!("held-{index}"), ECHO).await?);
    }
    let next = world.create("next-0", world.spec(ECHO)).await?;
    let waiting = world
        .run_until("next-0", "told that no Pod has room", |run| {
            run.condition("Scheduled")
                .is_some_and(|it| it.reason == "CapacityFull")
        })
        .await?;
    ensure!(waiting.phase() == Phase::Pending, "{:?}", waiting.phase());

    world.cancel("held-0").await?;
    let ended = world
        .run_until("held-0", "Cancelled and free of the finalizer", |run| {
            let held = run.metadata.finalizers.iter().flatten().any(|it| it == FINALIZER);
            run.phase() == Phase::Cancelled && !held
        })
        .await?;
    let completed = ended
        .condition("Completed")
        .context("a cancelled Run is Completed")?;
    ensure!(completed.status == "True", "{completed:?}");
    world.ready(&next).await.context("a cancel frees the slot")?;
    expect_problem(
        &world.invoke_until(&functions[0], "1", 410).await?,
        410,
        "FunctionEnded",
        "no",
    )?;

    let next = world.create("next-1", world.spec(ECHO)).await?;
    world.delete("held-1").await?;
    world.gone("held-1").await.context("the finalizer goes")?;
    world.ready(&next).await.context("a deletion frees the slot")?;
    expect_problem(
        &world.invoke_until(&functions[1], "1", 404).await?,
        404,
        "NoSuchFunction",
        "no",
    )?;
    for name in (2..runs)
        .map(|index| format!("held-{index}"))
        .chain(["next-0", "next-1", "held-0"].map(String::from))
    {
        world.delete(&name).await?;
    }
    Ok(())
}

/// Bug scenario 5: the same manifest, deleted and made again, is another Run each
/// time and becomes Ready each time.
pub async fn recreated(world: &World, times: usize) -> Result<()> {
    let mut last = None;
    for round in 0..times {
        let function = world
            .function("again", ECHO)
            .await
            .with_context(|| format!("round {round}"))?;
        ensure!(last != Some(function.uid), "the UID was used twice");
        let answer = world.invoke_until(&function, "7", 200).await?;
        ensure!(answer.json() == 7, "{:?}", answer.body);
        last = Some(function.uid);
        world.delete("again").await?;
        world.gone("again").await?;
    }
    Ok(())
}

/// Bug scenario 68: two functions whose files have the same names, in one Pod.
pub async fn same_names(world: &World) -> Result<()> {
    let source =
        |answer: &str| format!("VALUE = {answer:?}\ndef handler(event, context):\n    return VALUE\n");
    let one = world.function("same-1", &source("one")).await?;
    let two = world.function("same-2", &source("two")).await?;
    for _ in 0..10 {
        ensure!(
            world.invoke_until(&one, "null", 200).await?.json() == "one",
            "the other function answered"
        );
        ensure!(
            world.invoke_until(&two, "null", 200).await?.json() == "two",
            "the other function answered"
        );
    }
    world.delete("same-1").await?;
    world.gone("same-1").await?;
    let one = world.function("same-1", &source("new")).await?;
    ensure!(
        world.invoke_until(&one, "null", 200).await?.json() == "new",
        "an old file answered"
    );
    world.delete("same-1").await?;
    world.delete("same-2").await
}

/// C-5.7: task Runs are not executed yet; they wait and say why.
pub async fn tasks_wait(world: &World) -> Result<()> {
    let mut spec = world.spec(ECHO);
    spec.mode.function = None;
    spec.mode.task = Some(kruntimes_api::run::TaskMode::default());
    if let Some(source) = &mut spec.source {
        source.inline_path = None;
    }
    let task = world.create("task", spec).await?;
    let run = world
        .run_until("task", "told that no Pod supports its mode", |run| {
            run.condition("Scheduled")
                .is_some_and(|it| it.reason == "TaskModeUnsupported")
        })
        .await?;
    ensure!(run.phase() == Phase::Pending, "{:?}", run.phase());
    expect_problem(&world.invoke(&task, "1").await?, 404, "NoSuchFunction", "no")?;
    world.delete("task").await?;
    world.gone("task").await
}

/// C-1.1, C-1.2: a cached invocation neither reads nor writes Runs.
pub async fn no_api_traffic(world: &World, calls: usize) -> Result<()> {
    let function = world.function("quiet", ECHO).await?;
    world.invoke_until(&function, "0", 200).await?;
    // Whatever made the function Ready is written down by now; a marker of our own says from where to count.
    let before = run_requests(world)?;
    let marker = world.runs().get("quiet").await?;
    ensure!(marker.is_ready(), "the marker read a Run");
    let seen = eventually_more(world, before).await?;
    for call in 0..calls {
        let answer = world.invoke(&function, &call.to_string()).await?;
        ensure!(answer.status == 200, "{} {:?}", answer.status, answer.body);
    }
    // The log is written in order: once a second marker is there, so is all before it.
    world.runs().get("quiet").await?;
    let after = eventually_more(world, seen).await?;
    ensure!(
        after == seen + 1,
        "{} requests for Runs during {calls} cached calls",
        after - seen - 1
    );
    world.delete("quiet").await
}

async fn eventually_more(world: &World, than: usize) -> Result<usize> {
    crate::cluster::eventually("the audit log has the marker", || async {
        let now = run_requests(world)?;
        Ok((now > than).then_some(now))
    })
    .await
}

/// Completed requests for Runs of this namespace, watches aside.
fn run_requests(world: &World) -> Result<usize> {
    let log = fs::read_to_string(&world.audit_log)
        .with_context(|| format!("read the audit log {}", world.audit_log.display()))?;
    Ok(log
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|event| event["stage"] == "ResponseComplete" && event["verb"] != "watch")
        .filter(|event| {
            event["objectRef"]["resource"] == "runs"
                && event["objectRef"]["namespace"] == world.namespace.as_str()
        })
        .count())
}

/// Bug scenario 39: a call that timed out answers nobody, however late it ends.
pub async fn late_answers(world: &World, rounds: usize) -> Result<()> {
    const SLOW: &str = r#"
import time
def handler(event, context):
    if event == "A":
        time.sleep(0.25)
    return event
"#;
    let function = world.function("late", SLOW).await?;
    world.invoke_until(&function, "0", 200).await?;
    let slow = crate::call::Call::invoke(&function.path, &world.token, "\"A\"");
    for round in 0..rounds {
        if round % 2 == 0 {
            let answer = world
                .gateway
                .send(&slow.clone().with("X-Kruntime-Timeout-Millis", "100"))
                .await?;
            expect_problem(&answer, 504, "DeadlineExceeded", "yes")?;
        } else {
            // The client hangs up instead.
            let hung_up = tokio::time::timeout(Duration::from_millis(100), world.gateway.send(&slow)).await;
            ensure!(hung_up.is_err(), "the slow call ended within 100 ms");
        }
        let answer = world.invoke_until(&function, "\"B\"", 200).await?;
        ensure!(
            answer.json() == "B",
            "round {round}: B was answered {:?}",
            answer.body
        );
    }
    world.delete("late").await
}
