//! Owners that never come back while their Pods stay (C-7.3), with the scheduler's real clocks on a real API
//! server.

use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kruntimes_e2e::{
    cluster::eventually,
    stage::{Stage, attempt, make_node, reason},
    world::unique,
};
use tokio::time::Instant;

async fn until_unrouted(stage: &Stage, run: &str) -> Result<()> {
    stage
        .until(run, "has lost its route", |it| {
            reason(it, "Ready") == Some("Recovering") && it.assignment().is_some()
        })
        .await?;
    Ok(())
}

/// C-7.3: 30 s without a heartbeat: the route goes and the Pod is deleted; 40 s and out of the endpoints: the Run
/// moves.
#[tokio::test]
async fn the_pod_of_a_silent_owner_is_deleted_and_its_run_moves() -> Result<()> {
    let stage = Stage::set().await?;
    stage.runtime().await?;
    let _scheduler = stage.scheduler("a")?;
    stage.pod("pod-a").await?;
    let last = Instant::now();
    stage.run("moves", |_| {}).await?;
    stage.until_on("moves", "pod-a").await?;
    stage.make_ready("moves").await?;
    until_unrouted(&stage, "moves").await?;
    ensure!(last.elapsed() > Duration::from_secs(29), "{:?}", last.elapsed());
    eventually("its Pod is deleted", || async {
        let pod = stage.api::<Pod>().get("pod-a").await?;
        Ok(pod.metadata.deletion_timestamp.map(|_| ()))
    })
    .await?;
    // The Pod keeps its grace period: it is there, and nobody knows what it does.
    stage.report("pod-a", false).await?;
    stage.pod("pod-b").await?;
    let moved = stage.until_on("moves", "pod-b").await?;
    ensure!(last.elapsed() > Duration::from_secs(39), "{:?}", last.elapsed());
    ensure!(attempt(&moved) == Some(2), "{:?}", moved.status);
    ensure!(
        stage.api::<Pod>().get_opt("pod-a").await?.is_some(),
        "the fence was not the end of the Pod"
    );
    Ok(())
}

/// C-7.3: a Pod deleted by force from a node that nobody hears of.
#[tokio::test]
async fn a_pod_forced_off_a_silent_node_is_waited_for() -> Result<()> {
    let stage = Stage::set().await?;
    stage.runtime().await?;
    let _scheduler = stage.scheduler("a")?;
    let node = unique("e2e-silent");
    make_node(&stage.client, &node, "Unknown").await?;
    stage.pod_on("pod-a", &node).await?;
    let last = Instant::now();
    stage.run("moves", |_| {}).await?;
    stage.until_on("moves", "pod-a").await?;
    stage.make_ready("moves").await?;
    stage.lose("pod-a").await?;
    until_unrouted(&stage, "moves").await?;
    ensure!(last.elapsed() < Duration::from_secs(30), "the route goes at once");
    stage
        .until("moves", "is taken away", |it| it.assignment().is_none())
        .await?;
    ensure!(last.elapsed() > Duration::from_secs(39), "{:?}", last.elapsed());
    Ok(())
}
