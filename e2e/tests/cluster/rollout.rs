//! A pool gets new Pods, one after another, while its functions are called.

use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use kruntimes_api::{Run, Runtime};
use kruntimes_e2e::{
    cluster::{Cluster, eventually},
    install,
    load::Callers,
    suite::operations,
    world::{Function, World},
};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

/// How often the pool is replaced.
const ROUNDS: usize = 3;

/// C-6.4, C-7.2, C-7.3: functions move to new Pods without costing an attempt. A call that comes meanwhile waits for
/// its function; where that takes too long, it is told that nothing has run.
#[tokio::test]
async fn a_pool_is_replaced_under_load() -> Result<()> {
    let world = install::world(&Cluster::node().await?, 2, 8).await?;
    let functions = operations::echoes(&world, 8).await?;
    let callers = Callers::start(&world, &functions, Duration::from_millis(80), false);

    for round in 0..ROUNDS {
        let before = world.pod_names().await?;
        replace_pool(&world, &round.to_string()).await?;
        for function in &functions {
            moves(&world, function, &before).await?;
        }
    }

    let tally = callers.stop().await?;
    for failure in &tally.failures {
        ensure!(
            failure.starts_with("503 ") && failure.contains("\"dispatched\":\"no\""),
            "of {} calls: {:?}",
            tally.calls,
            tally.failures
        );
    }
    ensure!(tally.calls > 500, "only {} calls were made", tally.calls);
    println!(
        "RESULT pools_replaced={ROUNDS} functions={} calls={} refused={}",
        functions.len(),
        tally.calls,
        tally.failures.len()
    );
    world.close().await
}

/// Waits until the function is Ready on another Pod than these; no attempt of it has failed.
async fn moves(world: &World, function: &Function, from: &[String]) -> Result<()> {
    let elsewhere = |run: &Run| {
        let pod = run.assignment().map(|(pod, _)| pod.to_owned());
        run.is_ready() && pod.is_some_and(|pod| !from.contains(&pod))
    };
    let run = world
        .run_until(&function.name, "Ready on a new Pod", elsewhere)
        .await?;
    let failed = run.status.as_ref().and_then(|it| it.failed_attempts);
    ensure!(
        failed.unwrap_or_default() == 0,
        "a hand-over costs no attempt: {:?}",
        run.status
    );
    Ok(())
}

/// Changes the template of the Runtime's Pods and waits until all of them are new.
async fn replace_pool(world: &World, mark: &str) -> Result<()> {
    let runtimes: Api<Runtime> = Api::namespaced(world.client.clone(), &world.namespace);
    let change = json!({ "spec": { "template": { "metadata": { "annotations": { "e2e/round": mark } } } } });
    runtimes
        .patch(&world.runtime, &PatchParams::default(), &Patch::Merge(change))
        .await?;
    let deployments: Api<Deployment> = Api::namespaced(world.client.clone(), &world.namespace);
    eventually("all Pods of the pool are new", || async {
        let deployment = deployments.get(&format!("runtime-{}", world.runtime)).await?;
        let template = deployment.spec.as_ref().map(|spec| &spec.template);
        let marked = template
            .and_then(|it| it.metadata.as_ref()?.annotations.as_ref()?.get("e2e/round"))
            .is_some_and(|it| it == mark);
        Ok((marked && operations::is_rolled_out(&deployment)).then_some(()))
    })
    .await
}
