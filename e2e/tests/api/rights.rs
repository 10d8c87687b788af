//! C-7.5: the scheduler has the rights it uses and no others. It runs with exactly the rules of its chart
//! through a story that needs all of them, and the API server's audit log tells which it used.

use std::{collections::BTreeSet, fs, time::Duration};

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::{
    core::v1::{Pod, Secret},
    rbac::v1::PolicyRule,
};
use kruntimes_api::{Run, names::FINALIZER, run::Phase};
use kruntimes_e2e::{
    charts,
    cluster::eventually,
    stack,
    stage::{Stage, attempt, reason},
};
use kube::{
    Api,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};

const ACCOUNT: &str = "scheduler";

/// Needed where the audit log shows nothing: to create by server-side apply is to patch, a role is bound
/// and an owner is named within another request.
fn is_silent(right: &Right) -> bool {
    let (group, resource, verb) = (right.0.as_str(), right.1.as_str(), right.2.as_str());
    let applied = [
        "deployments",
        "services",
        "serviceaccounts",
        "configmaps",
        "networkpolicies",
        "rolebindings",
    ];
    verb == "create" && applied.contains(&resource)
        || (group, resource, verb) == ("rbac.authorization.k8s.io", "clusterroles", "bind")
        || (group, resource, verb) == ("kruntimes.io", "runtimes/finalizers", "update")
        // Only when a watch is late by seconds.
        || (group, resource, verb) == ("kruntimes.io", "runs", "get")
}

/// Group, resource with subresource, verb.
type Right = (String, String, String);

/// Every rule that the chart gives to the scheduler.
async fn rules(stage: &Stage) -> Result<Vec<PolicyRule>> {
    let objects = charts::rendered(&stage.cluster.kubeconfig, &stage.system, &[]).await?;
    let mut rules = Vec::new();
    for object in &objects {
        let is_role = ["Role", "ClusterRole"].iter().any(|kind| object["kind"] == *kind);
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        if is_role && name.starts_with("kruntimes-scheduler") {
            rules.extend(serde_json::from_value::<Vec<PolicyRule>>(
                object["rules"].clone(),
            )?);
        }
    }
    for rule in &mut rules {
        for name in rule.resource_names.iter_mut().flatten() {
            // The name that `rendered` gives to the serving Secret.
            if name == "cert" {
                "kruntimes-gateway-tls".clone_into(name);
            }
        }
    }
    ensure!(rules.len() > 10, "{rules:?}");
    Ok(rules)
}

fn rights(rules: &[PolicyRule]) -> BTreeSet<Right> {
    let mut rights = BTreeSet::new();
    for rule in rules {
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                for verb in &rule.verbs {
                    rights.insert((group.clone(), resource.clone(), verb.clone()));
                }
            }
        }
    }
    rights
}

/// What the account asked for, and what it was refused.
fn used(stage: &Stage) -> Result<(BTreeSet<Right>, Vec<Value>)> {
    let user = format!("system:serviceaccount:{}:{ACCOUNT}", stage.system);
    let log = fs::read_to_string(stage.cluster.audit_log())?;
    let (mut used, mut refused) = (BTreeSet::new(), Vec::new());
    for line in log.lines().filter(|line| line.contains(&user)) {
        let Ok(event) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let about = &event["objectRef"];
        let resource = match about["subresource"].as_str() {
            Some(sub) => format!("{}/{sub}", text(&about["resource"])),
            None => text(&about["resource"]),
        };
        used.insert((text(&about["apiGroup"]), resource, text(&event["verb"])));
        if event["responseStatus"]["code"] == 403 {
            refused.push(event);
        }
    }
    Ok((used, refused))
}

/// C-7.5
#[tokio::test]
async fn the_scheduler_has_the_rights_it_uses() -> Result<()> {
    let stage = Stage::set().await?;
    let granted = rules(&stage).await?;
    let kubeconfig = stack::account(&stage.cluster, &stage.system, ACCOUNT, granted.clone()).await?;
    let _scheduler = stage.scheduler_as("a", kubeconfig.path())?;
    stage.runtime().await?;
    story(&stage).await?;
    let granted = rights(&granted);
    let mut last = BTreeSet::new();
    for _ in 0..20 {
        let (used, refused) = used(&stage)?;
        ensure!(refused.is_empty(), "refused: {refused:?}");
        last = granted
            .difference(&used)
            .filter(|right| !is_silent(right))
            .cloned()
            .collect();
        if last.is_empty() {
            return Ok(());
        }
        // The log is written behind the answer.
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    anyhow::bail!("granted and never used: {last:?}")
}

/// Everything that the scheduler ever does.
async fn story(stage: &Stage) -> Result<()> {
    let (runs, pods) = (stage.api::<Run>(), stage.api::<Pod>());
    for pod in ["pod-a", "pod-b", "pod-c"] {
        stage.pod(pod).await?;
    }
    // Assigned twice, so that the second Event is a patch of the first.
    stage.run("again", |_| {}).await?;
    stage
        .until("again", "is assigned", |it| it.assignment().is_some())
        .await?;
    let released = json!({ "status": { "releasedAttempt": 1 } });
    runs.patch_status("again", &PatchParams::default(), &Patch::Merge(released))
        .await?;
    stage
        .until("again", "is assigned again", |it| attempt(it) == Some(2))
        .await?;
    // It ends and expires.
    stage
        .run("expires", |it| {
            it.spec.cancel_requested = Some(true);
            it.spec.ttl_seconds_after_finished = Some(0);
        })
        .await?;
    eventually("it has expired", || async {
        Ok(runs.get_opt("expires").await?.is_none().then_some(()))
    })
    .await?;
    // Its Pod is gone, its finalizer stays.
    stage
        .run("held", |it| {
            it.metadata.finalizers = Some(vec![FINALIZER.to_owned()])
        })
        .await?;
    let held = stage
        .until("held", "is assigned", |it| it.assignment().is_some())
        .await?;
    let owner = held
        .assignment()
        .map(|(name, _)| name.to_owned())
        .context("assigned")?;
    runs.delete("held", &DeleteParams::default()).await?;
    stage.lose(&owner).await?;
    eventually("its finalizer is removed", || async {
        Ok(runs.get_opt("held").await?.is_none().then_some(()))
    })
    .await?;
    // An evicted Pod is deleted for its Run's sake.
    stage.run("evicted", |_| {}).await?;
    let evicted = stage
        .until("evicted", "is assigned", |it| it.assignment().is_some())
        .await?;
    let owner = evicted
        .assignment()
        .map(|(name, _)| name.to_owned())
        .context("assigned")?;
    eventually("a Pod that owns Runs is marked", || async {
        let marked = pods.get(&owner).await?.metadata.annotations.unwrap_or_default();
        Ok(marked
            .contains_key("controller.kubernetes.io/pod-deletion-cost")
            .then_some(()))
    })
    .await?;
    let failed = json!({ "status": { "phase": "Failed", "reason": "Evicted" } });
    pods.patch_status(&owner, &PatchParams::default(), &Patch::Strategic(failed))
        .await?;
    // Its containers have ended, so the API server keeps it no longer.
    eventually("the Pod is deleted", || async {
        Ok(pods.get_opt(&owner).await?.is_none().then_some(()))
    })
    .await?;
    stage
        .until("evicted", "has moved", |it| {
            attempt(it) == Some(2) || it.phase() == Phase::Pending
        })
        .await?;
    // Who deletes the CA gets another one, and another certificate for gateways.
    let secrets: Api<Secret> = Api::namespaced(stage.client.clone(), &stage.system);
    let peer = "kruntimes-gateway-peer";
    let before = eventually("the certificate is made", || async {
        Ok(secrets.get_opt(peer).await?.and_then(|it| it.data))
    })
    .await?;
    secrets
        .delete("kruntimes-peer-ca", &DeleteParams::default())
        .await?;
    eventually("it is renewed", || async {
        let now = secrets.get_opt(peer).await?.and_then(|it| it.data);
        Ok(now.filter(|it| *it != before).map(|_| ()))
    })
    .await?;
    // A Run that waits, and the Runtime's own status.
    stage
        .run("typo", |it| it.spec.runtime = "pyhton".to_owned())
        .await?;
    stage
        .until("typo", "says so", |it| {
            reason(it, "Scheduled") == Some("NoRuntime")
        })
        .await?;
    Ok(())
}
