//! Pools and identities (C-7.2, C-4), made by the scheduler's process on a real API server with the real
//! controllers of Deployments.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Pod, Secret},
};
use kruntimes_api::Runtime;
use kruntimes_e2e::{
    cluster::eventually,
    stack::make_runtime,
    stage::{RUNTIME, Stage},
};
use kube::{
    Api, ResourceExt as _,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

/// C-2, C-7.2: the pool passes the restricted Pod Security Standard, is not rewritten, and leaves
/// `replicas` to a scaler.
#[tokio::test]
async fn a_pool_is_made_once_restricted_and_left_to_a_scaler() -> Result<()> {
    let stage = Stage::set().await?;
    let _scheduler = stage.scheduler("a")?;
    stage.runtime().await?;
    let deployments = stage.api::<Deployment>();
    let name = "runtime-python";
    let made = eventually("the Deployment is made", || async {
        Ok(deployments.get_opt(name).await?)
    })
    .await?;
    ensure!(
        made.spec.as_ref().and_then(|it| it.replicas) == Some(2),
        "{:?}",
        made.spec
    );
    // The template as a Pod: admission of the API server judges it.
    let template = made
        .spec
        .as_ref()
        .map(|it| it.template.clone())
        .context("a template")?;
    let mut pod: Value = serde_json::to_value(template)?;
    pod["apiVersion"] = json!("v1");
    pod["kind"] = json!("Pod");
    pod["metadata"]["name"] = json!("trial");
    let dry_run = PostParams {
        dry_run: true,
        ..PostParams::default()
    };
    let trial = eventually("the Pod is admitted", || async {
        Ok(Some(
            stage
                .api::<Pod>()
                .create(&dry_run, &serde_json::from_value(pod.clone())?)
                .await?,
        ))
    })
    .await?;
    let tokens = trial.spec.iter().flat_map(|it| &it.containers).filter(|it| {
        it.volume_mounts
            .iter()
            .flatten()
            .any(|it| it.mount_path.starts_with("/var/run/secrets"))
    });
    ensure!(
        tokens.map(|it| it.name.as_str()).eq(["runtimed"]),
        "who mounts a token"
    );

    let scale = json!({ "spec": { "replicas": 5 } });
    let scaler = PatchParams {
        field_manager: Some("scaler".to_owned()),
        ..PatchParams::default()
    };
    deployments
        .patch_scale(name, &scaler, &Patch::Merge(scale))
        .await?;
    // A change of the template rolls the pool and leaves the number alone.
    let change = json!({ "spec": { "template": { "metadata": { "labels": { "team": "a" } } } } });
    let runtimes = stage.api::<Runtime>();
    runtimes
        .patch(RUNTIME, &PatchParams::default(), &Patch::Merge(change))
        .await?;
    let rolled = eventually("the template has changed", || async {
        let deployment = deployments.get(name).await?;
        let labels = deployment
            .spec
            .as_ref()
            .and_then(|it| it.template.metadata.as_ref()?.labels.clone());
        Ok(labels
            .is_some_and(|it| it.contains_key("team"))
            .then_some(deployment))
    })
    .await?;
    ensure!(
        rolled.spec.as_ref().and_then(|it| it.replicas) == Some(5),
        "the scaler's number is kept"
    );

    // Status changes of the Deployment, as its controller makes them, cause no further write of ours.
    let status = json!({ "status": { "replicas": 5, "readyReplicas": 5, "observedGeneration": 1 } });
    eventually("the Runtime says so", || async {
        // The Deployment's own controller may still write what it sees, which is another number.
        deployments
            .patch_status(name, &PatchParams::default(), &Patch::Merge(status.clone()))
            .await?;
        let runtime = runtimes.get(RUNTIME).await?;
        Ok(runtime
            .status
            .and_then(|it| it.ready_replicas)
            .filter(|it| *it == 5))
    })
    .await?;
    let after = deployments.get(name).await?;
    ensure!(
        after.metadata.generation == rolled.metadata.generation,
        "nobody wrote the spec again"
    );
    Ok(())
}

/// C-2: a refusal is a condition that says why.
#[tokio::test]
async fn a_refused_runtime_says_why_and_gets_nothing() -> Result<()> {
    let stage = Stage::set().await?;
    let _scheduler = stage.scheduler("a")?;
    let runtime: Runtime = serde_json::from_value(json!({
        "apiVersion": "kruntimes.io/v1alpha1", "kind": "Runtime", "metadata": { "name": "greedy" },
        "spec": { "template": { "spec": {
            "containers": [{ "name": "runtime", "image": "x" }],
            "volumes": [{ "name": "host", "hostPath": { "path": "/" } }],
        } } },
    }))?;
    let runtimes = stage.api::<Runtime>();
    runtimes.create(&PostParams::default(), &runtime).await?;
    let refused = eventually("the refusal is written", || async {
        let conditions = runtimes
            .get("greedy")
            .await?
            .status
            .and_then(|it| it.conditions)
            .unwrap_or_default();
        Ok(conditions.into_iter().find(|it| it.type_ == "Accepted"))
    })
    .await?;
    ensure!(
        refused.status == "False" && refused.reason == "HostPath",
        "{refused:?}"
    );
    ensure!(refused.message.contains("volumes[0]"), "{refused:?}");
    ensure!(
        stage
            .api::<Deployment>()
            .get_opt("runtime-greedy")
            .await?
            .is_none(),
        "no pool is made"
    );
    Ok(())
}

/// C-4: the identities of the hop, and what pools are told.
#[tokio::test]
async fn identities_and_certificates_are_published() -> Result<()> {
    let stage = Stage::set().await?;
    let _scheduler = stage.scheduler("a")?;
    stage.runtime().await?;
    let secrets: Api<Secret> = Api::namespaced(stage.client.clone(), &stage.system);
    let peer = eventually("the client certificate is made", || async {
        Ok(secrets.get_opt("kruntimes-gateway-peer").await?)
    })
    .await?;
    let data = peer.data.clone().unwrap_or_default();
    ensure!(
        ["tls.crt", "tls.key", "ca.crt"]
            .iter()
            .all(|key| data.contains_key(*key)),
        "{:?}",
        data.keys()
    );
    let annotations = peer.metadata.annotations.clone().unwrap_or_default();
    ensure!(
        annotations.contains_key("kruntimes.io/not-after"),
        "{annotations:?}"
    );
    let certificate = data.get("tls.crt").cloned().context("a certificate")?;
    let serving = json!({
        "metadata": { "name": "kruntimes-gateway-tls" }, "type": "kubernetes.io/tls",
        "data": { "tls.crt": certificate, "tls.key": data.get("tls.key") },
    });
    secrets
        .create(&PostParams::default(), &serde_json::from_value(serving)?)
        .await?;
    let maps = stage.api::<ConfigMap>();
    let published = eventually("the gateway is published", || async {
        let data = maps
            .get_opt("kruntimes-gateway")
            .await?
            .and_then(|it| it.data)
            .unwrap_or_default();
        Ok(data.contains_key("url").then_some(data))
    })
    .await?;
    ensure!(published["url"] == "https://gateway.example", "{published:?}");
    let pem = String::from_utf8(certificate.0)?;
    ensure!(
        published["ca.crt"] == pem,
        "without ca.crt the certificate itself is the anchor"
    );
    let ca = data
        .get("ca.crt")
        .map(|it| String::from_utf8_lossy(&it.0).into_owned());
    ensure!(
        ca.as_ref() == published.get("peer-ca.crt"),
        "one bundle for both sides"
    );
    Ok(())
}

/// C-7.2: pools roll one per namespace at a time, a new Pod comes before an old one goes, and the Pod that owns
/// Runs goes last.
#[tokio::test]
async fn pools_roll_one_at_a_time_and_owners_go_last() -> Result<()> {
    let stage = Stage::set().await?;
    let _scheduler = stage.scheduler("a")?;
    stage.runtime().await?;
    make_runtime(&stage.client, &stage.namespace, "bash", 1, 2).await?;
    let old = ready_pods(&stage, RUNTIME, 2).await?;
    ready_pods(&stage, "bash", 1).await?;
    for pod in &old {
        stage.beat(pod).await?;
    }
    stage.run("held", |_| {}).await?;
    let held = stage
        .until("held", "is assigned", |it| it.assignment().is_some())
        .await?;
    let owner = held
        .assignment()
        .map(|(name, _)| name.to_owned())
        .context("assigned")?;
    for runtime in [RUNTIME, "bash"] {
        until_complete(&stage, runtime).await?;
    }

    stage.beat(&owner).await?;
    let change = json!({ "spec": { "template": { "metadata": { "labels": { "team": "a" } } } } });
    let runtimes = stage.api::<Runtime>();
    for runtime in [RUNTIME, "bash"] {
        runtimes
            .patch(runtime, &PatchParams::default(), &Patch::Merge(&change))
            .await?;
        if runtime == RUNTIME {
            eventually("the first rolls", || async {
                Ok((new_pods(&stage, RUNTIME).await?.len() == 1).then_some(()))
            })
            .await?;
        }
    }
    eventually("the second waits and says so", || async {
        let conditions = runtimes.get("bash").await?.status.and_then(|it| it.conditions);
        let waits = conditions.iter().flatten().any(|it| it.reason == "RollsLater");
        Ok(waits.then_some(()))
    })
    .await?;
    ensure!(
        living(&stage, RUNTIME, &old).await?.len() == 2,
        "nothing goes before something is there"
    );
    for round in 1..=2 {
        // Nobody runs it, so nobody else keeps it alive.
        stage.beat(&owner).await?;
        let new = eventually("a new Pod is there", || async {
            let new = new_pods(&stage, RUNTIME).await?;
            Ok((new.len() == round).then_some(new))
        })
        .await?;
        ensure!(
            new_pods(&stage, "bash").await?.is_empty(),
            "the second has not begun"
        );
        for pod in &new {
            stage.report(pod, true).await?;
        }
        let now = eventually("an old Pod goes", || async {
            let now = living(&stage, RUNTIME, &old).await?;
            Ok((now.len() == 2 - round).then_some(now))
        })
        .await?;
        if round == 1 {
            ensure!(
                now == [owner.clone()],
                "{now:?} is left, and {owner} owns the Run"
            );
        }
    }
    eventually("the second rolls", || async {
        Ok((new_pods(&stage, "bash").await?.len() == 1).then_some(()))
    })
    .await
}

/// Makes the Pods of a pool say that they are ready; their names, sorted.
async fn ready_pods(stage: &Stage, runtime: &str, count: usize) -> Result<Vec<String>> {
    let names = eventually("the Pods are made", || async {
        let names = pods(stage, runtime, "").await?;
        Ok((names.len() == count).then_some(names))
    })
    .await?;
    for name in &names {
        stage.report(name, true).await?;
    }
    Ok(names)
}

async fn until_complete(stage: &Stage, runtime: &str) -> Result<()> {
    let deployments = stage.api::<Deployment>();
    eventually("the Deployment is complete", || async {
        let status = deployments.get(&format!("runtime-{runtime}")).await?.status;
        let conditions = status.and_then(|it| it.conditions);
        let done = conditions
            .iter()
            .flatten()
            .any(|it| it.reason.as_deref() == Some("NewReplicaSetAvailable"));
        Ok(done.then_some(()))
    })
    .await
}

async fn new_pods(stage: &Stage, runtime: &str) -> Result<Vec<String>> {
    pods(stage, runtime, ",team=a").await
}

async fn living(stage: &Stage, runtime: &str, of: &[String]) -> Result<Vec<String>> {
    let mut names = pods(stage, runtime, "").await?;
    names.retain(|it| of.contains(it));
    Ok(names)
}

/// Names of the Pods that are not on their way out.
async fn pods(stage: &Stage, runtime: &str, more: &str) -> Result<Vec<String>> {
    let selector = ListParams::default().labels(&format!("runtime={runtime}{more}"));
    let pods = stage.api::<Pod>().list(&selector).await?;
    Ok(pods
        .iter()
        .filter(|it| it.metadata.deletion_timestamp.is_none())
        .map(|it| it.name_any())
        .collect())
}
