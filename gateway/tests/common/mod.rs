//! A gateway on port 0 between an in-memory API server and a fake owner, for tests of what callers see.

#![allow(dead_code, unused_imports, reason = "each test binary uses a part")]

pub(crate) mod api;
pub(crate) mod caller;
pub(crate) mod owner;
pub(crate) mod pki;

use std::{path::Path, time::Duration};

use clap::Parser as _;
use kruntimes_api::fixtures;
use kruntimes_gateway::{
    app::{self, Running},
    args::{Args, Config},
};
use tempfile::TempDir;

pub(crate) use self::{api::Api, caller::Answer, caller::Caller, owner::Owner, pki::Pki};

/// The token that may everything.
pub(crate) const ALICE: &str = "alice-token";
/// A token that Kubernetes knows and that may nothing.
pub(crate) const MALLORY: &str = "mallory-token";

/// Everything that a call passes.
pub(crate) struct World {
    pub(crate) api: Api,
    pub(crate) owner: Owner,
    pub(crate) gateway: Running,
    pub(crate) pki: Pki,
    pub(crate) dirs: TempDir,
}

/// A function that can be called.
#[derive(Debug, Clone)]
pub(crate) struct Function {
    pub(crate) uid: String,
    pub(crate) path: String,
}

impl World {
    pub(crate) async fn start() -> Self {
        Self::with(&[], |_| {}).await
    }

    /// With further flags, and changes of the configuration that no flag makes.
    pub(crate) async fn with(flags: &[&str], change: impl FnOnce(&mut Config)) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let pki = Pki::new();
        let api = Api::start().await;
        api.allow(ALICE);
        api.deny(MALLORY);
        let owner = Owner::start(&pki).await;
        let dirs = tempfile::tempdir().expect("a directory");
        pki.serve_as(dirs.path(), "one");
        pki.be_gateway(dirs.path());
        let gateway = start(dirs.path(), &api, flags, change).await;
        gateway.readiness.ready().await;
        Self {
            api,
            owner,
            gateway,
            pki,
            dirs,
        }
    }

    /// A Ready function of the fake owner.
    pub(crate) fn function(&self, namespace: &str, name: &str) -> Function {
        self.function_of(&self.owner, namespace, name)
    }

    /// A Ready function of that owner.
    pub(crate) fn function_of(&self, owner: &Owner, namespace: &str, name: &str) -> Function {
        let run = fixtures::run(namespace, name)
            .ready_on("pod-a")
            .owner(&owner.address(), &owner.key())
            .build();
        let uid = run.metadata.uid.clone().expect("a UID");
        self.api.put(&run);
        Function {
            path: path(namespace, "python", &uid),
            uid,
        }
    }

    pub(crate) fn caller(&self) -> Caller {
        Caller::new(self.gateway.https, &self.pki)
    }
}

pub(crate) fn path(namespace: &str, runtime: &str, uid: &str) -> String {
    format!("/v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}:invoke")
}

pub(crate) async fn start(
    dir: &Path,
    api: &Api,
    flags: &[&str],
    change: impl FnOnce(&mut Config),
) -> Running {
    app::start(config(dir, flags, change), api.config())
        .await
        .expect("the gateway starts")
}

pub(crate) fn config(dir: &Path, flags: &[&str], change: impl FnOnce(&mut Config)) -> Config {
    let tls = dir.join("tls").display().to_string();
    let peer = dir.join("peer").display().to_string();
    let mut all = vec![
        "kruntimes-gateway",
        "--listen=127.0.0.1:0",
        "--admin-address=127.0.0.1:0",
        "--allow-local-owners",
        "--shutdown-delay=0s",
        "--tls-dir",
        &tls,
        "--peer-dir",
        &peer,
    ];
    all.extend(flags);
    let mut config = Args::try_parse_from(all)
        .expect("flags")
        .check()
        .expect("a configuration");
    change(&mut config);
    config
}

/// Tries again until it holds.
pub(crate) async fn eventually<F, T>(what: &str, mut condition: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let wait = async {
        loop {
            if let Some(value) = condition().await {
                return value;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait)
        .await
        .unwrap_or_else(|_| panic!("never: {what}"))
}
