//! The whole path as processes on loopback, against a real API server: scheduler,
//! gateway, and for every Pod that Kubernetes makes a runtimed and a Runtime Server.

use std::{fs, net::SocketAddr, path::Path, time::Duration};

use anyhow::{Context as _, Result, ensure};
use base64::Engine as _;
use k8s_openapi::api::{
    core::v1::{Namespace, Secret, ServiceAccount},
    rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule, RoleRef, Subject},
};
use kruntimes_api::Runtime;
use kube::{
    Api, Client,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use serde_json::json;
use tempfile::TempDir;

use crate::{
    call::Gateway,
    cluster::{Cluster, eventually},
    kubelet::{self, Kubelet, Node},
    processes::{Process, free_address},
    world::{self, CALLER, World},
};

/// Name the gateway's serving certificate carries.
pub const GATEWAY_NAME: &str = "kruntimes-gateway.kruntimes-system.svc.cluster.local";
const RUNTIMED_ROLE: &str = "kruntimes-e2e-runtimed";
/// How long a process that is told to end may take.
const GOODBYE: Duration = Duration::from_secs(60);

/// What a test may choose.
pub struct Choices {
    /// Language of the pool, and its name.
    pub language: &'static str,
    /// Pods of the pool.
    pub replicas: i32,
    /// Runs a Pod holds.
    pub runs: u32,
    /// Gives the gateway an administrator's kubeconfig with a client certificate.
    pub gateway_with_client_certificate: bool,
    /// Further flags of the gateway.
    pub gateway_flags: Vec<String>,
    /// Where every process sends spans.
    pub collector: Option<String>,
}

impl Default for Choices {
    fn default() -> Self {
        Self {
            language: "python",
            replicas: 1,
            runs: 8,
            gateway_with_client_certificate: false,
            gateway_flags: Vec::new(),
            collector: None,
        }
    }
}

/// A running installation; everything ends when it is dropped.
pub struct Stack {
    /// How tests look at it.
    pub world: World,
    /// The gateway's process.
    pub gateway: Process,
    /// The scheduler's process.
    pub scheduler: Process,
    /// The stand-in that runs Pods.
    pub kubelet: Kubelet,
    folder: TempDir,
    serving: Serving,
}

/// A certificate and its key, in PEM.
pub struct Pair {
    /// tls.crt
    pub certificate: String,
    /// tls.key
    pub key: String,
}

impl Stack {
    /// The folder the gateway reads its serving certificate from.
    #[must_use]
    pub fn tls_folder(&self) -> std::path::PathBuf {
        self.folder.path().join("tls")
    }

    /// Ends every process as Kubernetes would, and waits until all of them are gone.
    ///
    /// # Errors
    /// When one of them stays, or ends by something else.
    pub async fn end(mut self) -> Result<()> {
        // Their folders stay until they have ended.
        let mut pods = self.kubelet.end().await;
        let mut all = vec![&mut self.gateway, &mut self.scheduler];
        for pod in pods.values_mut() {
            all.extend([&mut pod.runtimed, &mut pod.server]);
        }
        for process in &all {
            process.signal("TERM")?;
        }
        for process in all {
            let code = process.wait(GOODBYE)?;
            ensure!(code == Some(0), "{code:?}, and not 0:\n{}", process.output());
        }
        Ok(())
    }

    /// Another serving certificate by the same CA.
    pub fn renewed_certificate(&self) -> Result<Pair> {
        self.serving.issue()
    }

    /// Starts everything in namespaces of its own and waits until the gateway is up.
    pub async fn start(cluster: &Cluster, choices: Choices) -> Result<Self> {
        let client = &cluster.client;
        let namespace = world::unique("fn");
        let system = world::unique("sys");
        let folder = tempfile::Builder::new().prefix("krs-").tempdir()?;
        let at = |part: &str| folder.path().join(part);
        for part in ["tls", "peer"] {
            fs::create_dir(at(part))?;
        }
        world::make_namespace(client, &namespace).await?;
        let meta = ObjectMeta {
            name: Some(system.clone()),
            ..ObjectMeta::default()
        };
        Api::<Namespace>::all(client.clone())
            .create(
                &PostParams::default(),
                &Namespace {
                    metadata: meta,
                    ..Namespace::default()
                },
            )
            .await?;

        let serving = Serving::new()?;
        let ca = serving.write(&at("tls"))?;
        publish_serving_certificate(client, &system, &at("tls")).await?;
        for (account, rules) in identities() {
            grant(client, &system, account, rules).await?;
            let token = world::token(client, &system, account).await?;
            fs::write(at(&format!("{account}.kubeconfig")), kubeconfig(cluster, &token)?)?;
        }

        let mut flags = strings(&[
            &["--system-namespace", &system, "--identity", "scheduler-0"],
            &[
                "--gateway-url",
                &format!("https://{GATEWAY_NAME}"),
                "--serving-secret",
                "kruntimes-gateway-tls",
            ],
            &[
                "--runtimed-image",
                "kruntimes/runtimed:0.1.0",
                "--runtimed-cluster-role",
                RUNTIMED_ROLE,
            ],
            &[
                "--gateway-namespace",
                &system,
                "--namespaces",
                &namespace,
                "--admin-address",
                "127.0.0.1:0",
            ],
        ]);
        let otel: Vec<_> = choices
            .collector
            .iter()
            .map(|endpoint| ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.clone()))
            .collect();
        flags.extend(
            otel.iter()
                .map(|(name, value)| format!("--pool-otel={name}={value}")),
        );
        let scheduler = Process::start(
            "kruntimes-scheduler",
            &format!("{namespace}-scheduler"),
            &flags,
            &[("KUBECONFIG", at("scheduler.kubeconfig").display().to_string())],
        )?;
        eventually("the gateway's client certificate is published", || async {
            let name = kruntimes_api::names::SECRET_GATEWAY_PEER;
            Ok(kubelet::carry_secret(client, &system, name, &at("peer"))
                .await?
                .then_some(()))
        })
        .await
        .with_context(|| scheduler.output())?;

        let listen = free_address()?;
        let admin = free_address()?;
        let gateway_config = if choices.gateway_with_client_certificate {
            cluster.kubeconfig.clone()
        } else {
            at("gateway.kubeconfig")
        };
        let mut flags = strings(&[
            &[
                "--listen",
                &listen.to_string(),
                "--tls-dir",
                &at("tls").display().to_string(),
            ],
            &[
                "--peer-dir",
                &at("peer").display().to_string(),
                "--namespaces",
                &namespace,
            ],
            &[
                "--allow-local-owners",
                "--shutdown-delay",
                "0s",
                "--admin-address",
                &admin.to_string(),
            ],
        ]);
        flags.extend(choices.gateway_flags);
        let gateway = Process::start(
            "kruntimes-gateway",
            &format!("{namespace}-gateway"),
            &flags,
            &[&[("KUBECONFIG", gateway_config.display().to_string())], &otel[..]].concat(),
        )?;
        eventually("the gateway is ready", || async {
            Ok(is_ready(admin).await.then_some(()))
        })
        .await
        .with_context(|| gateway.output())?;

        make_runtime(
            client,
            &namespace,
            choices.language,
            choices.replicas,
            choices.runs,
        )
        .await?;
        let kubelet = Kubelet::start(Node {
            client: client.clone(),
            namespace: namespace.clone(),
            runtime: choices.language.to_owned(),
            runtimed_kubeconfig: at("runtimed.kubeconfig"),
            capacity: format!("runs={}", choices.runs),
            server_env: Vec::new(),
        });
        let token = world::token(client, &namespace, CALLER).await?;
        let world = World {
            client: client.clone(),
            namespace,
            runtime: choices.language.to_owned(),
            gateway: Gateway {
                address: listen,
                name: GATEWAY_NAME.to_owned(),
                ca,
            },
            audit_log: cluster.audit_log(),
            token,
        };
        Ok(Self {
            world,
            gateway,
            scheduler,
            kubelet,
            folder,
            serving,
        })
    }
}

/// Makes a Runtime whose Pods run functions of the language of that name.
pub async fn make_runtime(
    client: &Client,
    namespace: &str,
    name: &str,
    replicas: i32,
    runs: u32,
) -> Result<()> {
    apply_runtime(client, &runtime(namespace, name, replicas, runs)).await
}

/// A Runtime as [`make_runtime`] makes it, to be changed first.
#[must_use]
pub fn runtime(namespace: &str, name: &str, replicas: i32, runs: u32) -> serde_json::Value {
    json!({
        "apiVersion": "kruntimes.io/v1alpha1", "kind": "Runtime",
        "metadata": { "name": name, "namespace": namespace },
        "spec": {
            "replicas": replicas,
            "capacity": { "resources": { "runs": runs } },
            "template": { "spec": { "containers": [{
                "name": "runtime", "image": format!("kruntimes/runtime-{name}:0.1.0"), "imagePullPolicy": "IfNotPresent",
                "resources": { "requests": { "cpu": "10m", "memory": "32Mi" }, "limits": { "memory": "512Mi" } },
            }]}},
        },
    })
}

/// Makes or changes a Runtime.
pub async fn apply_runtime(client: &Client, manifest: &serde_json::Value) -> Result<()> {
    let runtime: Runtime = serde_json::from_value(manifest.clone())?;
    let (namespace, name) = (&runtime.metadata.namespace, &runtime.metadata.name);
    let namespace = namespace.as_deref().context("a Runtime has a namespace")?;
    let name = name.as_deref().context("a Runtime has a name")?;
    Api::<Runtime>::namespaced(client.clone(), namespace)
        .patch(
            name,
            &PatchParams::apply("kruntimes-e2e").force(),
            &Patch::Apply(&runtime),
        )
        .await?;
    Ok(())
}

async fn is_ready(admin: SocketAddr) -> bool {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let ask = async {
        let mut stream = tokio::net::TcpStream::connect(admin).await?;
        stream
            .write_all(b"GET /readyz HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n")
            .await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok::<_, std::io::Error>(answer.starts_with("HTTP/1.1 200"))
    };
    ask.await.unwrap_or(false)
}

fn strings(parts: &[&[&str]]) -> Vec<String> {
    parts
        .iter()
        .flat_map(|part| part.iter().map(|it| (*it).to_owned()))
        .collect()
}

/// The CA of the gateway's serving certificates.
struct Serving {
    params: CertificateParams,
    key: KeyPair,
}

impl Serving {
    fn new() -> Result<Self> {
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        Ok(Self {
            params,
            key: KeyPair::generate()?,
        })
    }

    /// A certificate for [`GATEWAY_NAME`].
    fn issue(&self) -> Result<Pair> {
        let key = KeyPair::generate()?;
        let leaf = CertificateParams::new(vec![GATEWAY_NAME.to_owned()])?
            .signed_by(&key, &Issuer::from_params(&self.params, &self.key))?;
        Ok(Pair {
            certificate: leaf.pem(),
            key: key.serialize_pem(),
        })
    }

    /// Writes tls.crt, tls.key and ca.crt; returns the CA in PEM.
    fn write(&self, folder: &Path) -> Result<Vec<u8>> {
        let ca = self.params.self_signed(&self.key)?.pem();
        let pair = self.issue()?;
        fs::write(folder.join("tls.crt"), pair.certificate)?;
        fs::write(folder.join("tls.key"), pair.key)?;
        fs::write(folder.join("ca.crt"), &ca)?;
        Ok(ca.into_bytes())
    }
}

async fn publish_serving_certificate(client: &Client, system: &str, folder: &Path) -> Result<()> {
    let encode = |file: &str| -> Result<String> {
        Ok(base64::engine::general_purpose::STANDARD.encode(fs::read(folder.join(file))?))
    };
    let secret: Secret = serde_json::from_value(json!({
        "metadata": { "name": "kruntimes-gateway-tls" }, "type": "kubernetes.io/tls",
        "data": { "tls.crt": encode("tls.crt")?, "tls.key": encode("tls.key")?, "ca.crt": encode("ca.crt")? },
    }))?;
    Api::<Secret>::namespaced(client.clone(), system)
        .create(&PostParams::default(), &secret)
        .await?;
    Ok(())
}

/// Accounts of the three daemons. The charts' narrow roles are tried on the cluster.
fn identities() -> [(&'static str, Vec<PolicyRule>); 3] {
    let rule = |groups: &[&str], resources: &[&str], verbs: &[&str]| {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        PolicyRule {
            api_groups: Some(owned(groups)),
            resources: Some(owned(resources)),
            verbs: owned(verbs),
            ..PolicyRule::default()
        }
    };
    let runtimed = vec![
        rule(
            &["kruntimes.io"],
            &["runs"],
            &["get", "list", "watch", "patch", "update"],
        ),
        rule(
            &["kruntimes.io"],
            &["runs/status", "runs/finalizers"],
            &["get", "patch", "update"],
        ),
        rule(
            &["coordination.k8s.io"],
            &["leases"],
            &["get", "create", "update", "patch"],
        ),
        rule(&["", "events.k8s.io"], &["events"], &["create", "patch"]),
    ];
    [
        (
            "gateway",
            vec![rule(&["kruntimes.io"], &["runs"], &["get", "list", "watch"])],
        ),
        ("runtimed", runtimed),
        ("scheduler", vec![rule(&["*"], &["*"], &["*"])]),
    ]
}

/// A ServiceAccount with these rights everywhere; its kubeconfig.
///
/// # Errors
/// When Kubernetes refuses one of the objects.
pub async fn account(
    cluster: &Cluster,
    namespace: &str,
    name: &str,
    rules: Vec<PolicyRule>,
) -> Result<tempfile::NamedTempFile> {
    grant(&cluster.client, namespace, name, rules).await?;
    let token = world::token(&cluster.client, namespace, name).await?;
    let file = tempfile::NamedTempFile::new()?;
    fs::write(file.path(), kubeconfig(cluster, &token)?)?;
    Ok(file)
}

async fn grant(client: &Client, system: &str, account: &str, rules: Vec<PolicyRule>) -> Result<()> {
    let meta = |name: String| ObjectMeta {
        name: Some(name),
        ..ObjectMeta::default()
    };
    let create = PostParams::default();
    let service_account = ServiceAccount {
        metadata: meta(account.to_owned()),
        ..ServiceAccount::default()
    };
    Api::<ServiceAccount>::namespaced(client.clone(), system)
        .create(&create, &service_account)
        .await?;
    let role_name = if account == "runtimed" {
        RUNTIMED_ROLE.to_owned()
    } else {
        format!("{system}-{account}")
    };
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": { "name": role_name }, "rules": rules,
    });
    Api::<ClusterRole>::all(client.clone())
        .patch(
            &role_name,
            &PatchParams::apply("kruntimes-e2e").force(),
            &Patch::Apply(&role),
        )
        .await?;
    let binding = ClusterRoleBinding {
        metadata: meta(format!("{system}-{account}")),
        role_ref: RoleRef {
            api_group: Some("rbac.authorization.k8s.io".to_owned()),
            kind: "ClusterRole".to_owned(),
            name: role_name,
        },
        subjects: Some(vec![Subject {
            kind: "ServiceAccount".to_owned(),
            name: account.to_owned(),
            namespace: Some(system.to_owned()),
            ..Subject::default()
        }]),
    };
    Api::<ClusterRoleBinding>::all(client.clone())
        .create(&create, &binding)
        .await?;
    Ok(())
}

/// A kubeconfig whose only identity is a token.
fn kubeconfig(cluster: &Cluster, token: &str) -> Result<String> {
    let mut whole: serde_json::Value = serde_saphyr::from_str(&fs::read_to_string(&cluster.kubeconfig)?)?;
    for user in whole["users"].as_array_mut().context("a kubeconfig has users")? {
        user["user"] = json!({ "token": token });
    }
    Ok(serde_json::to_string(&whole)?)
}
