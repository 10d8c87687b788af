//! Finding the API server under test, and waiting for things to come true.

use std::{future::Future, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result, bail};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client, Config,
    api::{Patch, PatchParams},
    config::{AuthInfo, KubeConfigOptions, Kubeconfig},
    runtime::{conditions, wait::await_condition},
};

/// How long anything may take to come true before a test gives up.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// One reachable API server.
#[derive(Clone)]
pub struct Cluster {
    /// A client with all rights.
    pub client: Client,
    /// Its configuration: URL and CA are used for further identities.
    pub config: Config,
    /// The kubeconfig file.
    pub kubeconfig: PathBuf,
}

impl Cluster {
    /// The API server of level `api`, with the CRDs of this tree.
    pub async fn api() -> Result<Self> {
        let cluster =
            Self::from_env("KRUNTIMES_API_KUBECONFIG", "dev/up api", "build/api/kubeconfig").await?;
        cluster.install_crds().await?;
        Ok(cluster)
    }

    /// The cluster of level `node`, where the charts are installed.
    pub async fn node() -> Result<Self> {
        Self::from_env(
            "KRUNTIMES_NODE_KUBECONFIG",
            "dev/up node",
            "build/node/kubeconfig",
        )
        .await
    }

    async fn from_env(name: &str, up: &str, usual: &str) -> Result<Self> {
        // Whoever comes first installs the provider; the others find it there.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let Some(path) = std::env::var_os(name).map(PathBuf::from) else {
            bail!("{name} is not set: run `make e2e`, or `{up}` and {name}=$PWD/{usual}");
        };
        let kubeconfig = Kubeconfig::read_from(&path).with_context(|| format!("read {}", path.display()))?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        let client = Client::try_from(config.clone())?;
        client
            .apiserver_version()
            .await
            .with_context(|| format!("no API server answers; run `{up}`"))?;
        Ok(Self {
            client,
            config,
            kubeconfig: path,
        })
    }

    /// The audit log of the API server, one JSON object a line.
    #[must_use]
    pub fn audit_log(&self) -> PathBuf {
        self.kubeconfig.with_file_name("audit.log")
    }

    /// A client whose only identity is this token.
    pub async fn with_token(&self, token: &str) -> Result<Client> {
        let mut kubeconfig = Kubeconfig::read_from(&self.kubeconfig)?;
        for user in &mut kubeconfig.auth_infos {
            user.auth_info = Some(AuthInfo {
                token: Some(token.to_owned().into()),
                ..AuthInfo::default()
            });
        }
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        Ok(Client::try_from(config)?)
    }

    async fn install_crds(&self) -> Result<()> {
        let api: Api<CustomResourceDefinition> = Api::all(self.client.clone());
        for crd in [kruntimes_api::crd::run(), kruntimes_api::crd::runtime()] {
            let name = crd.metadata.name.clone().context("a CRD has a name")?;
            api.patch(
                &name,
                &PatchParams::apply("kruntimes-e2e").force(),
                &Patch::Apply(&crd),
            )
            .await?;
            let established = await_condition(api.clone(), &name, conditions::is_crd_established());
            tokio::time::timeout(PATIENCE, established)
                .await
                .context("CRD is not established")??;
        }
        Ok(())
    }
}

/// Asks until the answer is `Some`; fails naming `what` when patience ends.
pub async fn eventually<T, F>(what: &str, mut ask: impl FnMut() -> F) -> Result<T>
where
    F: Future<Output = Result<Option<T>>>,
{
    let end = tokio::time::Instant::now() + PATIENCE;
    let mut last = None;
    while tokio::time::Instant::now() < end {
        match ask().await {
            Ok(Some(answer)) => return Ok(answer),
            Ok(None) => {}
            Err(error) => last = Some(error),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    match last {
        Some(error) => Err(error.context(format!("not within {PATIENCE:?}: {what}"))),
        None => bail!("not within {PATIENCE:?}: {what}"),
    }
}
