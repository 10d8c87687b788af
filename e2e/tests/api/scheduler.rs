//! Runs find Pods, lose them and end (C-7.1, C-7.3, C-7.4), written by the scheduler's process to a real API
//! server.

use anyhow::{Result, ensure};
use k8s_openapi::api::events::v1::Event;
use kruntimes_api::{Run, run::Phase};
use kruntimes_e2e::{
    cluster::eventually,
    stage::{Stage, attempt, reason},
};
use kube::api::{DeleteParams, ListParams};
use serde_json::json;

/// C-7.1, C-7.3: every transition that the scheduler writes passes the rules on status.
#[tokio::test]
async fn a_run_is_assigned_loses_its_pod_and_moves() -> Result<()> {
    let stage = Stage::set().await?;
    stage.runtime().await?;
    let _scheduler = stage.scheduler("a")?;
    stage.run("moves", |_| {}).await?;
    stage
        .until("moves", "waits", |it| {
            reason(it, "Scheduled") == Some("NoPodReady")
        })
        .await?;
    stage.pod("pod-a").await?;
    stage.until_on("moves", "pod-a").await?;
    stage.make_ready("moves").await?;
    stage.lose("pod-a").await?;
    let lost = stage
        .until("moves", "is taken away", |it| it.assignment().is_none())
        .await?;
    ensure!(reason(&lost, "Ready") == Some("Recovering"), "{:?}", lost.status);
    stage.pod("pod-b").await?;
    let moved = stage.until_on("moves", "pod-b").await?;
    ensure!(attempt(&moved) == Some(2), "{:?}", moved.status);
    ensure!(
        moved.status.as_ref().and_then(|it| it.failed_attempts) == Some(1),
        "{:?}",
        moved.status
    );
    ensure!(
        moved.status.as_ref().is_some_and(|it| it.owner.is_none()),
        "{:?}",
        moved.status
    );
    for condition in moved.status.iter().flat_map(|it| it.conditions.iter().flatten()) {
        ensure!(
            !condition.reason.is_empty() && condition.observed_generation == Some(1),
            "C-2.2: {condition:?}"
        );
    }
    // C-2.4: what `kubectl describe` shows of it.
    let events = stage.api::<Event>();
    let reasons = ["NoPodReady", "Assigned", "Recovering", "Retrying"];
    eventually("its transitions are told as Events", || async {
        let all = events.list(&ListParams::default()).await?;
        let of_it = all.iter().filter(|it| {
            it.regarding
                .as_ref()
                .is_some_and(|it| it.name.as_deref() == Some("moves") && it.kind.as_deref() == Some("Run"))
        });
        let told: Vec<_> = of_it.filter_map(|it| it.reason.as_deref()).collect();
        Ok(reasons.iter().all(|it| told.contains(it)).then_some(()))
    })
    .await
}

/// C-2, C-7.1, C-7.4: each way a Run ends without an owner.
#[tokio::test]
async fn ends_without_an_owner_are_complete() -> Result<()> {
    let stage = Stage::set().await?;
    stage.runtime().await?;
    let _scheduler = stage.scheduler("a")?;
    stage
        .run("typo", |it| it.spec.runtime = "pyhton".to_owned())
        .await?;
    stage
        .run("cancelled", |it| it.spec.cancel_requested = Some(true))
        .await?;
    stage
        .run("big", |it| {
            it.spec.resources = serde_json::from_value(json!({ "requests": { "runs": 3 } })).ok();
            it.spec.ttl_seconds_after_finished = Some(0);
        })
        .await?;
    stage
        .run("once", |it| {
            it.spec.retry_policy = serde_json::from_value(json!({ "maxAttempts": 1 })).ok()
        })
        .await?;
    stage
        .until("typo", "names no Runtime", |it| {
            reason(it, "Scheduled") == Some("NoRuntime")
        })
        .await?;
    let cancelled = stage
        .until("cancelled", "is Cancelled", |it| it.phase() == Phase::Cancelled)
        .await?;
    ensure!(
        cancelled
            .condition("Completed")
            .is_some_and(|it| it.status == "True"),
        "{:?}",
        cancelled.status
    );
    let runs = stage.api::<Run>();
    eventually("the refused Run has expired", || async {
        Ok(runs.get_opt("big").await?.is_none().then_some(()))
    })
    .await?;
    stage.pod("pod-a").await?;
    stage.until_on("once", "pod-a").await?;
    stage.make_ready("once").await?;
    stage.lose("pod-a").await?;
    let failed = stage
        .until("once", "has Failed", |it| it.phase() == Phase::Failed)
        .await?;
    ensure!(
        reason(&failed, "Completed") == Some("RetriesExhausted"),
        "{:?}",
        failed.status
    );
    Ok(())
}

/// Bug scenario 92: a finalizer whose handler is gone.
#[tokio::test]
async fn a_deleted_run_of_a_lost_pod_goes() -> Result<()> {
    let stage = Stage::set().await?;
    stage.runtime().await?;
    let _scheduler = stage.scheduler("a")?;
    stage.pod("pod-a").await?;
    stage
        .run("held", |it| {
            it.metadata.finalizers = Some(vec![kruntimes_api::names::FINALIZER.to_owned()])
        })
        .await?;
    stage.until_on("held", "pod-a").await?;
    stage.make_ready("held").await?;
    let runs = stage.api::<Run>();
    runs.delete("held", &DeleteParams::default()).await?;
    // A living owner is left to clean up: another Run is placed meanwhile, and this one is still there.
    stage.run("other", |_| {}).await?;
    stage.until_on("other", "pod-a").await?;
    ensure!(
        runs.get_opt("held").await?.is_some(),
        "taken from its living owner"
    );
    stage.lose("pod-a").await?;
    eventually("the finalizer is removed", || async {
        Ok(runs.get_opt("held").await?.is_none().then_some(()))
    })
    .await
}

/// Bug scenario 97: the leader is stopped for longer than its lease and comes back.
#[tokio::test]
async fn a_stopped_leader_comes_back_as_a_standby() -> Result<()> {
    let stage = Stage::set().await?;
    stage.runtime().await?;
    stage.pod("pod-a").await?;
    stage.pod("pod-b").await?;
    let mut first = stage.scheduler("first")?;
    eventually("first leads", || async {
        Ok((stage.leader().await? == "first").then_some(()))
    })
    .await?;
    let _second = stage.scheduler("second")?;
    stage.run("before", |_| {}).await?;
    stage
        .until("before", "is assigned", |it| it.assignment().is_some())
        .await?;
    first.signal("STOP")?;
    stage.run("between", |_| {}).await?;
    stage
        .until("between", "is assigned by the second", |it| {
            it.assignment().is_some()
        })
        .await?;
    ensure!(stage.leader().await? == "second");
    first.signal("CONT")?;
    eventually("the first has noticed", || async {
        Ok(first.output().contains("leading no more").then_some(()))
    })
    .await?;
    stage.run("after", |_| {}).await?;
    stage
        .until("after", "is assigned", |it| it.assignment().is_some())
        .await?;
    for name in ["before", "between", "after"] {
        let run = stage.api::<Run>().get(name).await?;
        ensure!(attempt(&run) == Some(1), "{name}: {:?}", run.status);
    }
    ensure!(stage.leader().await? == "second");
    ensure!(first.is_running(), "it stands by");
    Ok(())
}
