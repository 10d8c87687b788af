//! A gateway on port 0 between an in-memory API server and a fake owner, for tests of what callers see.

pub(crate) mod api;
pub(crate) mod caller;
pub(crate) mod frames;
pub(crate) mod logs;
pub(crate) mod owner;
pub(crate) mod pki;

use std::{path::Path, time::Duration};

use clap::Parser as _;
use kruntimes_api::{Run, fixtures};
use kruntimes_gateway::{
    app::{self, Running},
    args::{Args, Config},
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

pub(crate) use self::{api::Api, caller::Caller, logs::Logs, owner::Owner, pki::Pki};

/// The token that may everything.
pub(crate) const ALICE: &str = "alice-token";
/// A token that may call functions, and not end the calls of others.
pub(crate) const BOB: &str = "bob-token";
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
        kruntimes_ops::log::listen_by_thread();
        let _ = rustls::crypto::ring::default_provider().install_default();
        let pki = Pki::new();
        let api = Api::start().await;
        api.allow(ALICE, &["get", "update"]);
        api.allow(BOB, &["get"]);
        api.allow(MALLORY, &[]);
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
        let run = fixtures::run(namespace, name).ready_on("pod-a");
        self.put(&run.owner(&owner.address(), &owner.key()).build())
    }

    /// The function that this Run is.
    pub(crate) fn put(&self, run: &Run) -> Function {
        let uid = run.metadata.uid.clone().expect("a UID");
        self.api.put(run);
        Function {
            path: path(
                run.metadata.namespace.as_deref().expect("a namespace"),
                "python",
                &uid,
            ),
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

impl Function {
    /// Where it is explained.
    pub(crate) fn page(&self) -> String {
        self.path.trim_end_matches(":invoke").to_owned()
    }

    /// Where that call of it is cancelled.
    pub(crate) fn invocation(&self, id: &str) -> String {
        format!("{}/invocations/{id}", self.page())
    }
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
    let mut config = args(dir, flags).check().expect("a configuration");
    change(&mut config);
    config
}

pub(crate) fn args(dir: &Path, flags: &[&str]) -> Args {
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
    Args::try_parse_from(all).expect("flags")
}

/// What the admin server answers.
pub(crate) async fn admin(gateway: &Running, path: &str) -> String {
    let address = gateway.admin.expect("an admin server");
    let mut stream = TcpStream::connect(address).await.expect("connect");
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("write");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("read");
    text
}

/// One value of the metrics; 0 when it is not there yet. `name` is everything before the blank.
pub(crate) async fn metric(gateway: &Running, name: &str) -> f64 {
    let page = admin(gateway, "/metrics").await;
    page.lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
        .unwrap_or(0.0)
}

/// Waits until the gateway knows this function, without any access review that succeeds.
pub(crate) async fn wait_for(caller: &Caller, function: &Function) {
    eventually("the function is known", || async {
        let request = caller.by(&function.path, "garbage");
        let answer = caller.send(request, http::Version::HTTP_11).await;
        (answer.status == 401).then_some(())
    })
    .await;
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
