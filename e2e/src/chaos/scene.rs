//! Where it happens: a namespace with a pool of three Pods, and functions that tell the collector of each
//! execution before they answer.

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Node;
use kruntimes_api::run::{RetryPolicy, RunSpec};
use kube::{Api, api::ListParams};
use serde_json::json;

use super::{clock::Clock, collector::Collector, targets::Targets};
use crate::{
    cluster::{Cluster, eventually},
    install, stack,
    world::{Function, World},
};

/// Pods of the pool. One alone has room for all functions.
const PODS: i32 = 3;
const RUNS: u32 = 16;
/// Size of the pool's workspaces: disks of their own, that may be filled.
const WORKSPACE: &str = "16Mi";

/// A function that says what it is and what it runs, waits until that is kept, and answers the same.
/// Where nobody can be told it raises: it has run, and nothing says so.
const SOURCE: &str = r#"
import json
import os
import socket
import time

ME = "@ME@"
COLLECTOR = ("@HOST@", @PORT@)


def handler(event, context):
    told = {"function": ME, "invocation": context.invocation_id}
    line = {**told, "attempt": int(os.environ["KRUNTIME_ATTEMPT"]), "at": int(time.time() * 1000)}
    with socket.create_connection(COLLECTOR, timeout=1.5) as collector:
        collector.sendall(json.dumps(line).encode() + b"\n")
        if collector.recv(3) != b"ok\n":
            raise RuntimeError("the collector did not take it")
    return told
"#;

/// Everything a run needs.
pub struct Scene {
    /// Namespace and gateway.
    pub world: World,
    /// What can be hit.
    pub targets: Targets,
    /// Where functions tell.
    pub collector: Collector,
    /// The time of all.
    pub clock: Clock,
    node: String,
}

// === impl Scene ===

impl Scene {
    /// Makes namespace and pool and waits for its Pods.
    pub async fn set(cluster: &Cluster) -> Result<Self> {
        let clock = Clock::start();
        let world = install::bare_world(cluster, "python").await?;
        let mut runtime = stack::runtime(&world.namespace, &world.runtime, PODS, RUNS);
        runtime["spec"]["workspace"] = json!({ "emptyDir": { "medium": "Memory", "sizeLimit": WORKSPACE } });
        stack::apply_runtime(&world.client, &runtime).await?;
        let scene = Self {
            targets: Targets::new(&world),
            collector: Collector::start(clock).await?,
            node: node_address(&world).await?,
            world,
            clock,
        };
        scene.whole().await?;
        Ok(scene)
    }

    /// Waits until every Pod of the pool is Ready and none is on its way out.
    pub async fn whole(&self) -> Result<()> {
        eventually("the pool is whole", || async {
            let pods = self.targets.pods(super::plan::Role::Pool).await?;
            let ready = pods.iter().filter(|pod| {
                let status = pod.status.as_ref();
                let conditions = status.and_then(|it| it.conditions.as_ref());
                conditions
                    .into_iter()
                    .flatten()
                    .any(|it| it.type_ == "Ready" && it.status == "True")
            });
            Ok((pods.len() == PODS.unsigned_abs() as usize && ready.count() == pods.len()).then_some(()))
        })
        .await
    }

    /// Makes a function that knows its own name.
    pub async fn function(&self, name: &str, retry: Option<RetryPolicy>) -> Result<Function> {
        let spec = RunSpec {
            retry_policy: retry,
            ..self.world.spec(&self.source(name))
        };
        self.world.create(name, spec).await
    }

    fn source(&self, name: &str) -> String {
        SOURCE
            .replace("@ME@", name)
            .replace("@HOST@", &self.node)
            .replace("@PORT@", &self.collector.port.to_string())
    }
}

/// The address under which Pods reach us: we are in the node's network.
async fn node_address(world: &World) -> Result<String> {
    let nodes: Api<Node> = Api::all(world.client.clone());
    let list = nodes.list(&ListParams::default()).await?;
    let [node] = list.items.as_slice() else {
        anyhow::bail!("chaos needs a cluster of one node, to be on it; start one with: make up");
    };
    let status = node.status.as_ref();
    let addresses = status.and_then(|it| it.addresses.as_ref());
    addresses
        .into_iter()
        .flatten()
        .find(|address| address.type_ == "InternalIP")
        .map(|address| address.address.clone())
        .context("the node has an InternalIP")
}
