//! A world in an installation that Helm made.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::{Secret, Service};
use kube::Api;

use crate::{
    call::Gateway,
    cluster::Cluster,
    stack,
    world::{self, CALLER, World},
};

/// Namespace of the release; `KRUNTIMES_SYSTEM_NAMESPACE` names another.
const SYSTEM: &str = "kruntimes-system";

/// Where the charts are installed.
#[must_use]
pub fn system_namespace() -> String {
    std::env::var("KRUNTIMES_SYSTEM_NAMESPACE").unwrap_or_else(|_| SYSTEM.to_owned())
}

/// The gateway behind its Service, and the CA in the Secret that cert-manager fills.
pub async fn gateway(cluster: &Cluster) -> Result<Gateway> {
    let client = &cluster.client;
    let system = system_namespace();
    let services: Api<Service> = Api::namespaced(client.clone(), &system);
    let Some(service) = services.get_opt("kruntimes-gateway").await? else {
        bail!(
            "no Service kruntimes-gateway in namespace {system}: run `make e2e`, which installs the charts"
        );
    };
    let address = service
        .spec
        .and_then(|spec| spec.cluster_ip)
        .context("the Service has an address")?;
    let secret = Api::<Secret>::namespaced(client.clone(), &system)
        .get("kruntimes-gateway-tls")
        .await?;
    let ca = secret
        .data
        .as_ref()
        .and_then(|data| data.get("ca.crt"))
        .context("the Secret has ca.crt")?;
    Ok(Gateway {
        address: SocketAddr::new(address.parse()?, 443),
        name: format!("kruntimes-gateway.{system}.svc"),
        ca: ca.0.clone(),
    })
}

/// Makes a namespace with a Runtime of `replicas` Pods that hold `runs` Runs each.
pub async fn world(cluster: &Cluster, replicas: i32, runs: u32) -> Result<World> {
    let world = bare_world(cluster, "python").await?;
    stack::make_runtime(&world.client, &world.namespace, &world.runtime, replicas, runs).await?;
    Ok(world)
}

/// Makes a namespace for a Runtime of this name, which is the caller's to make.
pub async fn bare_world(cluster: &Cluster, runtime: &str) -> Result<World> {
    let client = &cluster.client;
    let gateway = gateway(cluster).await?;
    let namespace = world::unique("fn");
    world::make_namespace(client, &namespace).await?;
    Ok(World {
        client: client.clone(),
        runtime: runtime.to_owned(),
        gateway,
        audit_log: cluster.audit_log(),
        token: world::token(client, &namespace, CALLER).await?,
        namespace,
    })
}
