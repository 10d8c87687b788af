//! The same questions as on loopback, on a real cluster: charts installed by Helm,
//! real kubelet, real Pods, a serving certificate from cert-manager.

use anyhow::Result;
use kruntimes_e2e::{
    cluster::Cluster,
    install,
    suite::{answers, lifecycle},
};

/// C-3.2, C-3.4, C-3.5, C-3.6, C-3.9.
#[tokio::test]
async fn every_answer_has_its_status_reason_and_id() -> Result<()> {
    let world = install::world(&Cluster::node().await?, 1, 8).await?;
    answers::every_status(&world).await?;
    lifecycle::no_api_traffic(&world, 50).await?;
    lifecycle::same_names(&world).await?;
    lifecycle::recreated(&world, 3).await?;
    lifecycle::late_answers(&world, 10).await?;
    world.close().await
}

/// C-7.3: the Pod is deleted, callers get 503, then 200 from another Pod.
#[tokio::test]
async fn a_lost_pods_functions_move() -> Result<()> {
    let world = install::world(&Cluster::node().await?, 2, 2).await?;
    lifecycle::pod_loss(&world).await?;
    world.close().await
}

/// C-6.1, C-6.2.
#[tokio::test]
async fn cancel_and_delete_release_slot_and_finalizer() -> Result<()> {
    let world = install::world(&Cluster::node().await?, 1, 2).await?;
    lifecycle::ends_release_the_slot(&world, 2).await?;
    lifecycle::tasks_wait(&world).await?;
    world.close().await
}
