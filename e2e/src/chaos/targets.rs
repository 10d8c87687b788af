//! The Pods that may be hit, as Kubernetes has them now.

use std::{cmp::Reverse, collections::BTreeMap};

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams},
};

use super::{
    plan::{self, Role},
    processes::{self, Process},
};
use crate::{install, world::World};

/// Where to look.
#[derive(Clone)]
pub struct Targets {
    client: Client,
    pool: Place,
    gateways: Place,
    schedulers: Place,
}

#[derive(Clone)]
struct Place {
    namespace: String,
    labels: String,
}

/// A Pod that runs.
#[derive(Debug, Clone)]
pub struct Target {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// Ids of its running containers, by name.
    containers: BTreeMap<String, String>,
}

// === impl Targets ===

impl Targets {
    /// The pool of a world, and the installation that serves it.
    #[must_use]
    pub fn new(world: &World) -> Self {
        let system = |name: &str| Place {
            namespace: install::system_namespace(),
            labels: format!("app.kubernetes.io/name={name}"),
        };
        Self {
            client: world.client.clone(),
            pool: Place {
                namespace: world.namespace.clone(),
                labels: format!("runtime={}", world.runtime),
            },
            gateways: system("kruntimes-gateway"),
            schedulers: system("kruntimes-scheduler"),
        }
    }

    /// Every Pod of a role, whatever its state.
    pub async fn pods(&self, role: Role) -> Result<Vec<Pod>> {
        let place = self.place(role);
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &place.namespace);
        let list = pods.list(&ListParams::default().labels(&place.labels)).await?;
        Ok(list.items)
    }

    /// Those with a running container and not on their way out, by name.
    pub async fn running(&self, role: Role) -> Result<Vec<Target>> {
        let pods = self.pods(role).await?;
        let mut found: Vec<Target> = pods
            .iter()
            .filter(|pod| pod.metadata.deletion_timestamp.is_none())
            .map(Target::new)
            .filter(|target| !target.containers.is_empty())
            .collect();
        found.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        Ok(found)
    }

    /// Deletes this very Pod; `false` when it is gone already.
    pub async fn delete(&self, target: &Target, grace: bool) -> Result<bool> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &target.namespace);
        let mut params = DeleteParams::default().preconditions(kube::api::Preconditions {
            uid: Some(target.uid.clone()),
            resource_version: None,
        });
        if !grace {
            params = params.grace_period(0);
        }
        match pods.delete(&target.name, &params).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.is_not_found() || status.is_conflict() => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn place(&self, role: Role) -> &Place {
        match role {
            Role::Pool => &self.pool,
            Role::Gateway => &self.gateways,
            Role::Scheduler => &self.schedulers,
        }
    }
}

// === impl Target ===

impl Target {
    fn new(pod: &Pod) -> Self {
        let statuses = pod
            .status
            .iter()
            .flat_map(|status| status.container_statuses.iter().flatten());
        let containers = statuses
            .filter(|status| status.state.as_ref().is_some_and(|state| state.running.is_some()))
            .filter_map(|status| {
                let (_, id) = status.container_id.as_deref()?.split_once("://")?;
                Some((status.name.clone(), id.to_owned()))
            })
            .collect();
        Self {
            namespace: pod.namespace().unwrap_or_default(),
            name: pod.name_any(),
            uid: pod.uid().unwrap_or_default(),
            containers,
        }
    }

    /// The process of this kind; of workers the one that `dice` chooses. `None` when there is none now.
    pub fn process(&self, kind: plan::Process, dice: usize) -> Result<Option<Process>> {
        let Some(container) = self.containers.get(kind.container()) else {
            return Ok(None);
        };
        let all = processes::of(&self.uid, container)?;
        if kind == plan::Process::Worker {
            let workers: Vec<_> = all.into_iter().filter(|process| process.inside != 1).collect();
            return Ok((!workers.is_empty()).then(|| workers[dice % workers.len()]));
        }
        Ok(all.into_iter().find(|process| process.inside == 1))
    }

    /// Any process in the Pod's network.
    pub fn anyone(&self) -> Result<Option<Process>> {
        for container in self.containers.values() {
            let mut all = processes::of(&self.uid, container)?;
            // The first of a container lives longest.
            all.sort_by_key(|process| Reverse(process.inside == 1));
            if let Some(process) = all.into_iter().next() {
                return Ok(Some(process));
            }
        }
        Ok(None)
    }
}
