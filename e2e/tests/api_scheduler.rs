//! The scheduler's process against a real API server, whose rules judge every write of it. Pods
//! and heartbeats are made by hand: no node and no runtimed is involved.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::{
    apps::v1::Deployment,
    coordination::v1::Lease,
    core::v1::{ConfigMap, Namespace, Pod, Secret},
};
use kruntimes_api::{Run, Runtime, fixtures, run::Phase};
use kruntimes_e2e::{
    cluster::{Cluster, eventually},
    processes::Process,
    stack::make_runtime,
    world::unique,
};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

const RUNTIME: &str = "python";

/// Two namespaces of a test, and the schedulers in them.
struct Stage {
    cluster: Cluster,
    client: Client,
    namespace: String,
    system: String,
}

impl Stage {
    async fn set() -> Result<Self> {
        let cluster = Cluster::api().await?;
        let client = cluster.client.clone();
        let stage = Self {
            namespace: unique("sched"),
            system: unique("sched-system"),
            client,
            cluster,
        };
        for name in [&stage.namespace, &stage.system] {
            let namespace = json!({
                "apiVersion": "v1", "kind": "Namespace",
                // Whatever a pool is made of must pass the strictest standard.
                "metadata": { "name": name, "labels": { "pod-security.kubernetes.io/enforce": "restricted" } },
            });
            let namespaces: Api<Namespace> = Api::all(stage.client.clone());
            namespaces
                .create(&PostParams::default(), &serde_json::from_value(namespace)?)
                .await?;
        }
        Ok(stage)
    }

    fn scheduler(&self, identity: &str) -> Result<Process> {
        let flags = [
            "--system-namespace",
            &self.system,
            "--namespaces",
            &self.namespace,
            "--identity",
            identity,
            "--runtimed-image",
            "kruntimes/runtimed:test",
            "--gateway-url",
            "https://gateway.example",
            "--admin-address",
            "off",
            "--grace-period",
            "5s",
        ]
        .map(str::to_owned);
        let env = [("KUBECONFIG", self.cluster.kubeconfig.display().to_string())];
        Process::start(
            "kruntimes-scheduler",
            &format!("{}-{identity}", self.namespace),
            &flags,
            &env,
        )
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn runtime(&self) -> Result<()> {
        make_runtime(&self.client, &self.namespace, RUNTIME, 2, 2).await
    }

    /// A Pod that says it is ready, and its heartbeat.
    async fn pod(&self, name: &str) -> Result<()> {
        let restricted = json!({ "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } });
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "labels": { "runtime": RUNTIME, "app": "kruntimes-python" },
                "annotations": { "kruntimes.io/capacity.runs": "2" },
            },
            "spec": {
                // A node that does not exist: nobody runs it, and it is gone as soon as it is deleted by force.
                "nodeName": "nowhere",
                "securityContext": { "runAsNonRoot": true, "seccompProfile": { "type": "RuntimeDefault" } },
                "containers": [{ "name": "runtime", "image": "none", "securityContext": restricted }],
            },
        });
        let pods = self.api::<Pod>();
        let made = pods
            .create(&PostParams::default(), &serde_json::from_value(pod)?)
            .await?;
        let ready = json!({ "status": {
            "phase": "Running", "podIP": "10.0.0.1", "podIPs": [{ "ip": "10.0.0.1" }],
            "conditions": [{ "type": "Ready", "status": "True" }],
        } });
        pods.patch_status(name, &PatchParams::default(), &Patch::Strategic(ready))
            .await?;
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {
                "name": format!("runtimed-{name}"), "labels": { "kruntimes.io/runtime": RUNTIME },
                "annotations": { "kruntimes.io/modes": "function" },
            },
            "spec": { "holderIdentity": made.metadata.uid, "renewTime": format!("{:.6}", jiff::Timestamp::now()) },
        });
        let params = PatchParams::apply("e2e").force();
        self.api::<Lease>()
            .patch(&format!("runtimed-{name}"), &params, &Patch::Apply(&lease))
            .await?;
        Ok(())
    }

    /// Removes a Pod at once, as a lost node's Pods are.
    async fn lose(&self, pod: &str) -> Result<()> {
        let params = DeleteParams {
            grace_period_seconds: Some(0),
            ..DeleteParams::default()
        };
        self.api::<Pod>().delete(pod, &params).await?;
        Ok(())
    }

    async fn run(&self, name: &str, change: impl FnOnce(&mut Run)) -> Result<()> {
        let mut run = fixtures::run(&self.namespace, name).with(change).build();
        run.metadata.uid = None;
        run.metadata.resource_version = None;
        self.api::<Run>().create(&PostParams::default(), &run).await?;
        Ok(())
    }

    async fn until(&self, name: &str, what: &str, is: impl Fn(&Run) -> bool) -> Result<Run> {
        let runs = self.api::<Run>();
        let asked = eventually(&format!("Run {name} {what}"), || async {
            Ok(runs.get_opt(name).await?.filter(|run| is(run)))
        })
        .await;
        match asked {
            Ok(run) => Ok(run),
            Err(error) => Err(error.context(format!("{:?}", runs.get_opt(name).await?.map(|it| it.status)))),
        }
    }

    async fn until_on(&self, name: &str, pod: &str) -> Result<Run> {
        self.until(name, &format!("is on {pod}"), |it| {
            it.assignment().is_some_and(|(known, _)| known == pod)
        })
        .await
    }

    /// What runtimed writes when the function can be called.
    async fn make_ready(&self, name: &str) -> Result<()> {
        let run = self.api::<Run>().get(name).await?;
        let ready = fixtures::run(&self.namespace, name)
            .ready_on("x")
            .build()
            .status
            .context("a status")?;
        let mut wanted = run.status.clone().context("assigned")?;
        wanted.phase = Some(Phase::Ready);
        wanted.owner = ready.owner;
        wanted.start_time = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime(
            jiff::Timestamp::now(),
        ));
        for condition in ready.conditions.unwrap_or_default() {
            let known = wanted.conditions.get_or_insert_default();
            known.retain(|it| it.type_ != condition.type_);
            known.push(condition);
        }
        let patch = kruntimes_api::status::patch(&run, &wanted).context("a change")?;
        self.api::<Run>()
            .patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
            .await?;
        Ok(())
    }

    async fn leader(&self) -> Result<String> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), &self.system);
        let lease = leases.get_opt("kruntimes-scheduler").await?;
        Ok(lease
            .and_then(|it| it.spec)
            .and_then(|it| it.holder_identity)
            .unwrap_or_default())
    }
}

fn attempt(run: &Run) -> Option<i32> {
    run.attempt().map(|it| it.get())
}

fn reason<'a>(run: &'a Run, kind: &str) -> Option<&'a str> {
    run.condition(kind).map(|it| it.reason.as_str())
}

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
    Ok(())
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
    deployments
        .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
        .await?;
    eventually("the Runtime says so", || async {
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
