//! The scheduler's process against a real API server, whose rules judge every write of it. Pods and
//! heartbeats are made by hand: no kubelet and no runtimed is involved.

use std::path::Path;

use anyhow::{Context as _, Result};
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{Namespace, Node, Pod},
};
use kruntimes_api::{Run, fixtures, run::Phase};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::json;

use crate::{
    cluster::{Cluster, eventually},
    processes::Process,
    stack::make_runtime,
    world::unique,
};

/// The Runtime of a stage.
pub const RUNTIME: &str = "python";
/// A node that Kubernetes hears of.
pub const HEALTHY_NODE: &str = "e2e-healthy";

/// Two namespaces of a test, and the schedulers in them.
pub struct Stage {
    /// The API server.
    pub cluster: Cluster,
    /// A client with all rights.
    pub client: Client,
    /// Where Runs and pools are.
    pub namespace: String,
    /// Where schedulers keep what is theirs.
    pub system: String,
}

impl Stage {
    /// Makes the namespaces.
    pub async fn set() -> Result<Self> {
        let cluster = Cluster::api().await?;
        let client = cluster.client.clone();
        let stage = Self {
            namespace: unique("sched"),
            system: unique("sched-system"),
            client,
            cluster,
        };
        make_node(&stage.client, HEALTHY_NODE, "True").await?;
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

    /// Starts a scheduler with all rights.
    pub fn scheduler(&self, identity: &str) -> Result<Process> {
        self.scheduler_as(identity, &self.cluster.kubeconfig)
    }

    /// Starts a scheduler with the rights of a kubeconfig.
    pub fn scheduler_as(&self, identity: &str, kubeconfig: &Path) -> Result<Process> {
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
        let env = [("KUBECONFIG", kubeconfig.display().to_string())];
        Process::start(
            "kruntimes-scheduler",
            &format!("{}-{identity}", self.namespace),
            &flags,
            &env,
        )
    }

    /// Objects of the namespace.
    #[must_use]
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Makes Runtime [`RUNTIME`] of two Pods, which hold two Runs each.
    pub async fn runtime(&self) -> Result<()> {
        make_runtime(&self.client, &self.namespace, RUNTIME, 2, 2).await
    }

    /// A Pod that says it is ready, and its heartbeat, on a node that Kubernetes hears of.
    pub async fn pod(&self, name: &str) -> Result<()> {
        self.pod_on(name, HEALTHY_NODE).await
    }

    /// The same on a certain node. Nobody runs it, and unless it is deleted by force it stays.
    pub async fn pod_on(&self, name: &str, node: &str) -> Result<()> {
        let restricted = json!({ "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] } });
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": name, "labels": { "runtime": RUNTIME, "app": "kruntimes-python" },
                "annotations": { "kruntimes.io/capacity.runs": "2" },
            },
            "spec": {
                "nodeName": node,
                "securityContext": { "runAsNonRoot": true, "seccompProfile": { "type": "RuntimeDefault" } },
                "containers": [{ "name": "runtime", "image": "none", "securityContext": restricted }],
            },
        });
        self.api::<Pod>()
            .create(&PostParams::default(), &serde_json::from_value(pod)?)
            .await?;
        self.report(name, true).await?;
        self.beat(name).await
    }

    /// What the kubelet says of a Pod.
    pub async fn report(&self, pod: &str, ready: bool) -> Result<()> {
        let status = json!({ "status": {
            "phase": "Running", "podIP": "10.0.0.1", "podIPs": [{ "ip": "10.0.0.1" }],
            "conditions": [{ "type": "Ready", "status": if ready { "True" } else { "False" } }],
        } });
        self.api::<Pod>()
            .patch_status(pod, &PatchParams::default(), &Patch::Strategic(status))
            .await?;
        Ok(())
    }

    /// What runtimed says every 10 s.
    pub async fn beat(&self, pod: &str) -> Result<()> {
        let uid = self.api::<Pod>().get(pod).await?.metadata.uid;
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {
                "name": format!("runtimed-{pod}"), "labels": { "kruntimes.io/runtime": RUNTIME },
                "annotations": { "kruntimes.io/modes": "function" },
            },
            "spec": { "holderIdentity": uid, "renewTime": format!("{:.6}", jiff::Timestamp::now()) },
        });
        let params = PatchParams::apply("e2e").force();
        self.api::<Lease>()
            .patch(&format!("runtimed-{pod}"), &params, &Patch::Apply(&lease))
            .await?;
        Ok(())
    }

    /// Removes a Pod by force, whose heart has beaten until then.
    pub async fn lose(&self, pod: &str) -> Result<()> {
        self.beat(pod).await?;
        let params = DeleteParams {
            grace_period_seconds: Some(0),
            ..DeleteParams::default()
        };
        self.api::<Pod>().delete(pod, &params).await?;
        Ok(())
    }

    /// Creates a Run of [`RUNTIME`], changed as wanted.
    pub async fn run(&self, name: &str, change: impl FnOnce(&mut Run)) -> Result<()> {
        let mut run = fixtures::run(&self.namespace, name).with(change).build();
        run.metadata.uid = None;
        run.metadata.resource_version = None;
        self.api::<Run>().create(&PostParams::default(), &run).await?;
        Ok(())
    }

    /// Waits until a Run is as wanted; the error shows its last state.
    pub async fn until(&self, name: &str, what: &str, is: impl Fn(&Run) -> bool) -> Result<Run> {
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

    /// Waits until a Run is on this Pod.
    pub async fn until_on(&self, name: &str, pod: &str) -> Result<Run> {
        self.until(name, &format!("is on {pod}"), |it| {
            it.assignment().is_some_and(|(known, _)| known == pod)
        })
        .await
    }

    /// What runtimed writes when the function can be called.
    pub async fn make_ready(&self, name: &str) -> Result<()> {
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

    /// Who leads.
    pub async fn leader(&self) -> Result<String> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), &self.system);
        let lease = leases.get_opt("kruntimes-scheduler").await?;
        Ok(lease
            .and_then(|it| it.spec)
            .and_then(|it| it.holder_identity)
            .unwrap_or_default())
    }
}

/// A node whose kubelet reports, or has fallen silent; clusters of this level have none that is real.
pub async fn make_node(client: &Client, name: &str, ready: &str) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let params = PatchParams::apply("kruntimes-e2e").force();
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
    nodes.patch(name, &params, &Patch::Apply(node)).await?;
    let status = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name },
        "status": { "conditions": [{ "type": "Ready", "status": ready, "reason": "Said", "message": "" }] } });
    nodes.patch_status(name, &params, &Patch::Apply(status)).await?;
    Ok(())
}

/// The attempt of a Run.
#[must_use]
pub fn attempt(run: &Run) -> Option<i32> {
    run.attempt().map(|it| it.get())
}

/// The reason of a condition.
#[must_use]
pub fn reason<'a>(run: &'a Run, kind: &str) -> Option<&'a str> {
    run.condition(kind).map(|it| it.reason.as_str())
}
