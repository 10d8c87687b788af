//! The first path as processes on loopback: HTTPS POST with a real token, through
//! gateway and owner, into a Python function, against a real API server.

use anyhow::{Result, ensure};
use kruntimes_e2e::{
    call::Call,
    cluster::Cluster,
    stack::{Choices, Stack},
    suite::{answers, lifecycle},
};

async fn stack(choices: Choices) -> Result<Stack> {
    Stack::start(&Cluster::api().await?, choices).await
}

/// C-3.2, C-3.4, C-3.5, C-3.6, C-3.9.
#[tokio::test]
async fn every_answer_has_its_status_reason_and_id() -> Result<()> {
    let stack = stack(Choices::default()).await?;
    answers::every_status(&stack.world).await
}

/// C-1.1, C-1.2.
#[tokio::test]
async fn a_cached_invocation_neither_reads_nor_writes_runs() -> Result<()> {
    let stack = stack(Choices::default()).await?;
    lifecycle::no_api_traffic(&stack.world, 50).await
}

/// C-7.3, the fence "exact Pod UID gone".
#[tokio::test]
async fn a_lost_pods_functions_move() -> Result<()> {
    let stack = stack(Choices {
        replicas: 2,
        ..Choices::default()
    })
    .await?;
    lifecycle::pod_loss(&stack.world).await
}

/// C-6.1, C-6.2: capacity is held by live functions only.
#[tokio::test]
async fn cancel_and_delete_release_slot_and_finalizer() -> Result<()> {
    let stack = stack(Choices {
        runs: 2,
        ..Choices::default()
    })
    .await?;
    lifecycle::ends_release_the_slot(&stack.world, 2).await?;
    lifecycle::tasks_wait(&stack.world).await
}

/// Bug scenarios 5 and 68.
#[tokio::test]
async fn names_are_not_identities() -> Result<()> {
    let stack = stack(Choices::default()).await?;
    lifecycle::same_names(&stack.world).await?;
    lifecycle::recreated(&stack.world, 50).await
}

/// Bug scenario 39.
#[tokio::test]
async fn a_late_answer_reaches_nobody() -> Result<()> {
    let stack = stack(Choices::default()).await?;
    lifecycle::late_answers(&stack.world, 60).await
}

/// C-3.6: with a client certificate on the review's connection the API server would
/// answer for the certificate. The gateway's kubeconfig has one here, and a garbage
/// token is refused all the same.
#[tokio::test]
async fn the_gateways_own_identity_never_answers_for_a_caller() -> Result<()> {
    let stack = stack(Choices {
        gateway_with_client_certificate: true,
        ..Choices::default()
    })
    .await?;
    let world = &stack.world;
    let function = world
        .function("mine", "def handler(event, context):\n    return event\n")
        .await?;
    world.invoke_until(&function, "1", 200).await?;
    let answer = world
        .gateway
        .send(&Call::invoke(&function.path, "garbage", "1"))
        .await?;
    answers::expect_problem(&answer, 401, "Unauthenticated", "no")?;
    ensure!(
        !stack.gateway.output().contains("garbage"),
        "the gateway logged a token"
    );
    ensure!(
        !stack.gateway.output().contains(&world.token),
        "the gateway logged a token"
    );
    Ok(())
}
