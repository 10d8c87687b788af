//! Stands in for the kubelet where no node is: for every Pod of a pool it starts
//! the two processes on loopback and says that the Pod is ready; when the Pod is
//! gone, so are they. It also carries Secrets and ConfigMaps into folders.

use std::{collections::BTreeMap, fs, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::Mutex;

use crate::processes::{Process, free_address};

/// How often the API server is asked: the stand-in's reaction time.
const PERIOD: Duration = Duration::from_millis(50);

/// What the stand-in needs to know of the installation.
#[derive(Clone)]
pub struct Node {
    /// A client with all rights.
    pub client: Client,
    /// Namespace whose Pods are run.
    pub namespace: String,
    /// The runtime whose Pods are run, named like its language.
    pub runtime: String,
    /// Kubeconfig of the runtimeds.
    pub runtimed_kubeconfig: std::path::PathBuf,
    /// Capacity flag of the runtimeds, for example `runs=2`.
    pub capacity: String,
    /// Further environment of the Runtime Servers.
    pub server_env: Vec<(&'static str, String)>,
}

/// The two processes of one Pod.
pub struct PodProcesses {
    /// The owner.
    pub runtimed: Process,
    /// The server beside it.
    pub server: Process,
    /// Where the owner takes the hop.
    pub hop: SocketAddr,
    folder: TempDir,
}

/// Running Pods by UID.
pub type Pods = Arc<Mutex<BTreeMap<String, PodProcesses>>>;

/// Runs the Pods of a namespace until dropped.
pub struct Kubelet {
    /// What runs right now.
    pub pods: Pods,
    task: tokio::task::JoinHandle<()>,
}

impl Kubelet {
    /// Starts the loop.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "the stand-in ends with its test")]
    pub fn start(node: Node) -> Self {
        let pods = Pods::default();
        let running = pods.clone();
        let task = tokio::spawn(async move {
            loop {
                if let Err(error) = sync(&node, &running).await {
                    eprintln!("kubelet stand-in: {error:#}");
                }
                tokio::time::sleep(PERIOD).await;
            }
        });
        Self { pods, task }
    }

    /// Starts no more Pods, and gives away those that run.
    pub async fn end(&mut self) -> BTreeMap<String, PodProcesses> {
        self.task.abort();
        std::mem::take(&mut *self.pods.lock().await)
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn sync(node: &Node, running: &Pods) -> Result<()> {
    let api: Api<Pod> = Api::namespaced(node.client.clone(), &node.namespace);
    let wanted = api
        .list(&ListParams::default().labels(&format!("runtime={}", node.runtime)))
        .await?;
    let live: Vec<String> = wanted.iter().filter_map(kube::ResourceExt::uid).collect();
    let mut running = running.lock().await;
    running.retain(|uid, _| live.contains(uid));
    let config = Api::<ConfigMap>::namespaced(node.client.clone(), &node.namespace)
        .get_opt(kruntimes_api::names::CONFIGMAP_GATEWAY)
        .await?;
    for processes in running.values() {
        carry(&config, &processes.folder.path().join("gateway"))?;
    }
    for pod in &wanted {
        let (name, uid) = (pod.name_any(), pod.uid().context("a Pod has a UID")?);
        if running.contains_key(&uid) || pod.metadata.deletion_timestamp.is_some() {
            continue;
        }
        let processes = start(node, pod, &uid, &config)?;
        running.insert(uid, processes);
        let ready = json!({ "status": {
            "phase": "Running", "podIP": "127.0.0.1", "podIPs": [{ "ip": "127.0.0.1" }],
            "conditions": [
                { "type": "Ready", "status": "True", "lastTransitionTime": jiff::Timestamp::now() },
                { "type": "ContainersReady", "status": "True", "lastTransitionTime": jiff::Timestamp::now() },
            ],
        }});
        api.patch_status(&name, &PatchParams::default(), &Patch::Strategic(ready))
            .await?;
    }
    Ok(())
}

fn start(node: &Node, pod: &Pod, uid: &str, config: &Option<ConfigMap>) -> Result<PodProcesses> {
    let name = &pod.name_any();
    let folder = tempfile::Builder::new().prefix("kr-").tempdir()?;
    let at = |part: &str| folder.path().join(part);
    for part in ["run", "workspace", "journal", "gateway"] {
        fs::create_dir(at(part))?;
    }
    carry(config, &at("gateway"))?;
    let socket = format!("unix://{}", at("run/runtime.sock").display());
    let flags = |pairs: &[(&str, String)]| -> Vec<String> {
        pairs
            .iter()
            .flat_map(|(flag, value)| [format!("--{flag}"), value.clone()])
            .collect()
    };
    let server = Process::start(
        "kruntimes-runtime-server",
        &format!("{name}-server"),
        &flags(&[
            ("adapter", node.runtime.clone()),
            ("listen", socket.clone()),
            ("workspace", at("workspace").display().to_string()),
            ("peer-check", "off".to_owned()),
        ]),
        &[&node.server_env[..], &otel(pod, false)].concat(),
    )?;
    let hop = free_address()?;
    let runtimed = Process::start(
        "kruntimes-runtimed",
        &format!("{name}-runtimed"),
        &flags(&[
            ("namespace", node.namespace.clone()),
            ("pod-name", name.to_owned()),
            ("pod-uid", uid.to_owned()),
            ("pod-ip", "127.0.0.1".to_owned()),
            ("runtime", node.runtime.clone()),
            ("listen", hop.to_string()),
            ("advertise-address", hop.to_string()),
            ("admin-address", "127.0.0.1:0".to_owned()),
            ("server", socket),
            ("workspace", at("workspace").display().to_string()),
            ("journal-dir", at("journal").display().to_string()),
            ("gateway-config-dir", at("gateway").display().to_string()),
            ("capacity", node.capacity.clone()),
        ]),
        &[
            &[("KUBECONFIG", node.runtimed_kubeconfig.display().to_string())],
            &otel(pod, true)[..],
        ]
        .concat(),
    )?;
    Ok(PodProcesses {
        runtimed,
        server,
        hop,
        folder,
    })
}

/// OpenTelemetry's variables of a Pod's container: the only ones of its template that count here.
fn otel(pod: &Pod, runtimed: bool) -> Vec<(&str, String)> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    containers
        .filter(|container| (container.name == "runtimed") == runtimed)
        .flat_map(|container| container.env.iter().flatten())
        .filter(|variable| variable.name.starts_with("OTEL_"))
        .map(|variable| (variable.name.as_str(), variable.value.clone().unwrap_or_default()))
        .collect()
}

/// Writes the keys of a ConfigMap as files, like a mounted volume.
fn carry(config: &Option<ConfigMap>, folder: &Path) -> Result<()> {
    for (name, value) in config.iter().flat_map(|config| config.data.iter().flatten()) {
        write_if_new(&folder.join(name), value.as_bytes())?;
    }
    Ok(())
}

/// Writes the keys of a Secret as files, like a mounted volume; `false` while there is none.
pub async fn carry_secret(client: &Client, namespace: &str, name: &str, folder: &Path) -> Result<bool> {
    let secret = Api::<Secret>::namespaced(client.clone(), namespace)
        .get_opt(name)
        .await?;
    for (key, value) in secret.iter().flat_map(|secret| secret.data.iter().flatten()) {
        write_if_new(&folder.join(key), &value.0)?;
    }
    Ok(secret.is_some())
}

fn write_if_new(path: &Path, bytes: &[u8]) -> Result<()> {
    if fs::read(path).is_ok_and(|known| known == bytes) {
        return Ok(());
    }
    let next = path.with_extension("next");
    fs::write(&next, bytes)?;
    Ok(fs::rename(next, path)?)
}
