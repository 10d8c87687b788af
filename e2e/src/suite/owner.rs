//! What the owner of a function does with it: outputs, time that is over, and what people are told.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::events::v1::Event;
use kruntimes_api::run::Phase;
use kube::{Api, api::ListParams};
use tokio::time::Instant;

use super::answers::expect_problem;
use crate::{
    call::{Answer, Call},
    cluster::eventually,
    world::{Function, World},
};

/// Leaves what it is told, and returns what it is told.
const LEAVES: &str = r#"
import os
def handler(event, context):
    if event.get("file") is not None:
        with open(os.environ["KRUNTIME_OUTPUTS"], "a") as file:
            file.write(event["file"])
    return event.get("result", {})
"#;

async fn call(world: &World, function: &Function, body: &str) -> Result<Answer> {
    let call = Call::invoke(&function.path, &world.token, body.to_owned())
        .with("Accept", "application/vnd.kruntimes.invocation+json");
    world.gateway.send(&call).await
}

/// C-5.4 and C-3.1: a worker in its confinement can write the file, each call's outputs are its own, and
/// what breaks a rule is a 502 that quotes nothing.
pub async fn outputs(world: &World) -> Result<()> {
    let function = world.function("leaves", LEAVES).await?;
    world.invoke_until(&function, "{}", 200).await?;
    let answer = call(world, &function, r#"{"file": "a=1\nb=x y\n", "result": 7}"#).await?;
    ensure!(answer.status == 200, "{answer:?}");
    let envelope = answer.json();
    ensure!(
        envelope["outputs"] == serde_json::json!({ "a": "1", "b": "x y" }) && envelope["output"] == 7,
        "{envelope}"
    );
    let answer = call(world, &function, "{}").await?;
    ensure!(
        answer.status == 200 && answer.json()["outputs"] == serde_json::json!({}),
        "{answer:?}"
    );
    for wrong in [r#"{"file": "secret"}"#, r#"{"file": "secret=1\nsecret=2"}"#] {
        let answer = call(world, &function, wrong).await?;
        expect_problem(&answer, 502, "InvalidOutput", "yes")?;
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        ensure!(!text.contains("secret"), "{text}");
    }
    let answer = call(world, &function, "{}").await?;
    ensure!(answer.status == 200, "{answer:?}");
    world.delete("leaves").await
}

/// C-6.2, C-2.4, scenario 101: a function ends when it was idle or when its life is over, never during a
/// call, says which in its conditions and Events, and calls are then told so.
pub async fn time_is_over(world: &World) -> Result<()> {
    const SLEEPS: &str =
        "import time\ndef handler(event, context):\n    time.sleep(event)\n    return event\n";
    let mut idle = world.spec(SLEEPS);
    idle.mode
        .function
        .as_mut()
        .context("a function")?
        .idle_timeout_seconds = Some(6);
    let mut life = world.spec(SLEEPS);
    life.timeout = Some("30s".to_owned());
    life.mode
        .function
        .as_mut()
        .context("a function")?
        .idle_timeout_seconds = Some(600);
    let idle = world.create("idle", idle).await?;
    let life = world.create("life", life).await?;
    world.ready(&idle).await?;
    world.ready(&life).await?;
    let began = Instant::now();
    let answer = world.invoke_until(&idle, "8", 200).await?;
    ensure!(
        answer.json() == 8 && began.elapsed() >= Duration::from_secs(8),
        "{answer:?}"
    );
    for (function, reason) in [(&idle, "IdleTimeout"), (&life, "Lifetime")] {
        let run = world.phase(&function.name, Phase::Timeout).await?;
        for kind in ["Completed", "Succeeded", "Ready"] {
            let condition = run.condition(kind).context("a condition of an end")?;
            ensure!(
                condition.reason == reason && condition.observed_generation == run.metadata.generation,
                "{condition:?}"
            );
        }
        let answer = world.invoke_until(function, "0", 410).await?;
        expect_problem(&answer, 410, "FunctionEnded", "no")?;
        told(world, &function.name, &["Claimed", "FunctionRegistered", reason]).await?;
        world.delete(&function.name).await?;
        world.gone(&function.name).await?;
    }
    Ok(())
}

/// Waits until `kubectl describe` would show these reasons by runtimed.
async fn told(world: &World, name: &str, reasons: &[&str]) -> Result<()> {
    let events: Api<Event> = Api::namespaced(world.client.clone(), &world.namespace);
    eventually(&format!("Events of Run {name} say {reasons:?}"), || async {
        let listed = events.list(&ListParams::default()).await?;
        let said: Vec<&str> = listed
            .iter()
            .filter(|event| event.reporting_controller.as_deref() == Some("kruntimes-runtimed"))
            .filter(|event| event.regarding.as_ref().and_then(|it| it.name.as_deref()) == Some(name))
            .filter_map(|event| event.reason.as_deref())
            .collect();
        Ok(reasons.iter().all(|reason| said.contains(reason)).then_some(()))
    })
    .await
}
