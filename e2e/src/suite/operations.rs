//! What callers must not notice, and what they must notice soon: rights withdrawn,
//! statuses written beneath a running call, a function that is not ready yet.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::ServiceAccount,
    rbac::v1::{RoleBinding, RoleRef, Subject},
};
use kube::{
    Api,
    api::{DeleteParams, ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::time::Instant;

use super::answers::expect_problem;
use crate::{
    call::{self, Answer, Call, Version},
    cluster::eventually,
    world::{self, Function, World},
};

/// How long a withdrawn right may still work: the cache's 10 s and the API server's own 10 s.
const REVOKED_WITHIN: Duration = Duration::from_secs(20);
/// How often its holder tries.
const TRY_EVERY: Duration = Duration::from_millis(100);

const ECHO: &str = "def handler(event, context):\n    return event\n";

/// C-3.6, bug scenario 51: a RoleBinding is deleted; its subject is refused 20 s later
/// at the latest, however often it calls meanwhile. A right given anew works again.
pub async fn revocation(world: &World) -> Result<()> {
    let function = world.function("revoked", ECHO).await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(world.client.clone(), &world.namespace);
    let account = ServiceAccount {
        metadata: ObjectMeta {
            name: Some("leaver".to_owned()),
            ..ObjectMeta::default()
        },
        ..ServiceAccount::default()
    };
    accounts.create(&PostParams::default(), &account).await?;
    let bindings: Api<RoleBinding> = Api::namespaced(world.client.clone(), &world.namespace);
    let binding = binding(world);
    bindings.create(&PostParams::default(), &binding).await?;
    let leaver = World {
        token: world::token(&world.client, &world.namespace, "leaver").await?,
        ..world.clone()
    };
    leaver.invoke_until(&function, "1", 200).await?;

    bindings.delete("leaver", &DeleteParams::default()).await?;
    let deleted = Instant::now();
    loop {
        let answer = leaver.invoke(&function, "1").await?;
        match answer.status.as_u16() {
            403 => {
                expect_problem(&answer, 403, "PermissionDenied", "no")?;
                break;
            }
            200 => {}
            other => bail!("{other} while a right is being withdrawn: {:?}", answer.body),
        }
        ensure!(
            deleted.elapsed() < REVOKED_WITHIN,
            "a deleted RoleBinding still works after {REVOKED_WITHIN:?}"
        );
        tokio::time::sleep(TRY_EVERY).await;
    }
    // Others are not concerned.
    world.invoke_until(&function, "1", 200).await?;
    bindings.create(&PostParams::default(), &binding).await?;
    leaver.invoke_until(&function, "1", 200).await?;
    world.delete("revoked").await
}

fn binding(world: &World) -> RoleBinding {
    RoleBinding {
        metadata: ObjectMeta {
            name: Some("leaver".to_owned()),
            ..ObjectMeta::default()
        },
        role_ref: RoleRef {
            api_group: Some("rbac.authorization.k8s.io".to_owned()),
            kind: "Role".to_owned(),
            name: "invoke".to_owned(),
        },
        subjects: Some(vec![Subject {
            kind: "ServiceAccount".to_owned(),
            name: "leaver".to_owned(),
            namespace: Some(world.namespace.clone()),
            ..Subject::default()
        }]),
    }
}

/// C-5.3, bug scenario 13: annotations and status writes during a call do not cost the
/// function its slot.
pub async fn a_slot_survives_writes(world: &World) -> Result<()> {
    const SLOW: &str =
        "import time\n\ndef handler(event, context):\n    time.sleep(event or 0)\n    return event\n";
    let function = world.function("written", SLOW).await?;
    world.invoke_until(&function, "0", 200).await?;
    let running = hold(world, &function, "3", Version::Http1).await?;
    let runs = world.runs();
    for count in 0..5 {
        let annotate = json!({ "metadata": { "annotations": { "e2e/count": count.to_string() } } });
        runs.patch("written", &PatchParams::default(), &Patch::Merge(annotate))
            .await?;
        let status = json!({ "status": { "message": format!("written {count} times") } });
        runs.patch_status("written", &PatchParams::default(), &Patch::Merge(status))
            .await?;
    }
    let answer = running.await??;
    ensure!(answer.status == 200, "{} {:?}", answer.status, answer.body);
    let next = world.invoke(&function, "0").await?;
    ensure!(
        next.status == 200,
        "the slot was lost: {} {:?}",
        next.status,
        next.body
    );
    world.delete("written").await
}

/// C-2.2, bug scenario 16: called from the moment of its creation, a function that takes
/// three seconds to load answers 404 and 503 until it is loaded, and nothing else.
pub async fn never_before_it_is_loaded(world: &World) -> Result<()> {
    const SLOW_IMPORT: &str =
        "import time\ntime.sleep(3)\nLOADED = True\n\ndef handler(event, context):\n    return LOADED\n";
    let function = world.create("loading", world.spec(SLOW_IMPORT)).await?;
    let mut refusals = 0;
    let first = loop {
        let answer = world.invoke(&function, "1").await?;
        match answer.status.as_u16() {
            404 | 503 => {
                ensure!(answer.problem("dispatched") == "no", "{:?}", answer.body);
                refusals += 1;
            }
            _ => break answer,
        }
    };
    ensure!(
        first.status == 200 && first.json() == true,
        "{} {:?}",
        first.status,
        first.body
    );
    ensure!(refusals > 0, "it was called before it could be ready");
    world.delete("loading").await
}

/// C-5.6, bug scenario 91: a function that allocates until the kernel ends it answers
/// 502, and both it and its neighbour in the Pod can be called again.
pub async fn out_of_memory(world: &World) -> Result<()> {
    const GREEDY: &str = r#"
def handler(event, context):
    held = []
    while event == "eat":
        held.append(bytearray(16 * 1024 * 1024))
    return event
"#;
    let greedy = world.function("greedy", GREEDY).await?;
    let neighbour = world.function("neighbour", ECHO).await?;
    for function in [&greedy, &neighbour] {
        world.invoke_until(function, "1", 200).await?;
    }
    let answer = world.invoke(&greedy, "\"eat\"").await?;
    ensure!(
        answer.status == 502 && ["WorkerExited", "OutcomeUnknown"].contains(&&*answer.problem("reason")),
        "{} {:?}",
        answer.status,
        answer.body
    );
    ensure!(answer.problem("dispatched") != "no", "{:?}", answer.body);
    for function in [&greedy, &neighbour] {
        let answer = world
            .invoke_until(function, "2", 200)
            .await
            .with_context(|| format!("{} after the kill", function.name))?;
        ensure!(answer.json() == 2, "{:?}", answer.body);
    }
    world.delete("greedy").await?;
    world.delete("neighbour").await
}

/// Starts a call that takes long, and returns once it holds the function's slot. `null`
/// must be a quick call.
pub async fn hold(
    world: &World,
    function: &Function,
    body: &str,
    version: Version,
) -> Result<tokio::task::JoinHandle<Result<Answer>>> {
    let call = Call::invoke(&function.path, &world.token, body.to_owned()).over(version);
    let gateway = world.gateway.clone();
    let running = call::spawn(async move {
        loop {
            // Refused while one of the quick calls below runs.
            let answer = gateway.send(&call).await?;
            if answer.status != 429 {
                return Ok(answer);
            }
        }
    });
    eventually("the long call holds the slot", || async {
        let answer = world.invoke(function, "null").await?;
        Ok((answer.status == 429).then_some(()))
    })
    .await?;
    Ok(running)
}

/// Whether all Pods of the Deployment as it is are new and available, as `kubectl rollout status` sees it. Old ones
/// may still be ending.
#[must_use]
pub fn is_rolled_out(deployment: &Deployment) -> bool {
    let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas);
    deployment.status.as_ref().is_some_and(|status| {
        status.observed_generation >= deployment.metadata.generation
            && status.updated_replicas == wanted
            && status.available_replicas == wanted
            && status.replicas == wanted
    })
}

/// Functions that answer at once, one for each caller.
pub async fn echoes(world: &World, count: usize) -> Result<Vec<Function>> {
    let mut functions = Vec::new();
    for index in 0..count {
        functions.push(echo(world, &format!("echo-{index}")).await?);
    }
    Ok(functions)
}

/// A function that has answered.
pub async fn echo(world: &World, name: &str) -> Result<Function> {
    let function = world.function(name, ECHO).await?;
    world.invoke_until(&function, "1", 200).await?;
    Ok(function)
}
