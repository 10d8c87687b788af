//! The life of an installation on a real cluster: `helm test`, an upgrade under load, another certificate, a
//! narrower scope, an uninstall with live functions, and back. One test, because there is one installation a cluster.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context as _, Result, bail, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use k8s_openapi::{
    api::{
        apps::v1::Deployment,
        core::v1::{Namespace, Pod},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kruntimes_e2e::{
    charts,
    cluster::{Cluster, eventually},
    install,
    world::{self, Function, World},
};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, LogParams, PostParams},
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use serde_json::json;
use tempfile::TempDir;

const SYSTEM: &str = "kruntimes-system";
const DEMO: &str = "kruntimes-demo";
const ECHO: &str = "def handler(event, context):\n    return event\n";
/// Nothing listens there.
const NOWHERE: &str = "test.gatewayAddress=127.0.0.1:1";
const SECRET: &str = "install-test";

/// The installation, and how to change it.
struct Release {
    cluster: Cluster,
    kubeconfig: PathBuf,
    folder: TempDir,
    /// The values it had when the test began, of both charts.
    values: String,
    runtimes: String,
}

impl Release {
    async fn found() -> Result<Self> {
        let cluster = Cluster::node().await?;
        let folder = tempfile::tempdir()?;
        let kubeconfig = cluster.kubeconfig.clone();
        let mut paths = Vec::new();
        for (release, namespace) in [("kruntimes", SYSTEM), ("kruntimes-runtimes", DEMO)] {
            let values = charts::helm(
                &kubeconfig,
                &[
                    "get",
                    "values",
                    release,
                    "--namespace",
                    namespace,
                    "--output",
                    "yaml",
                ],
            )
            .await
            .context("the charts are installed by `make e2e`")?;
            let path = folder.path().join(format!("{release}.yaml"));
            std::fs::write(&path, values)?;
            paths.push(path.display().to_string());
        }
        let [values, runtimes] = paths.try_into().ok().context("two releases")?;
        Ok(Self {
            cluster,
            kubeconfig,
            folder,
            values,
            runtimes,
        })
    }

    /// `helm upgrade --install` of kruntimes, with the first values and these.
    async fn upgrade(&self, chart: &Path, flags: &[&str]) -> Result<()> {
        let chart = chart.display().to_string();
        let mut args = vec!["upgrade", "--install", "kruntimes", &chart, "--namespace", SYSTEM];
        args.extend(["--wait", "--timeout", "120s", "-f", &self.values]);
        args.extend(flags);
        charts::helm(&self.kubeconfig, &args).await?;
        Ok(())
    }

    async fn upgrade_runtimes(&self, flags: &[&str]) -> Result<()> {
        let chart = charts::chart("kruntimes-runtimes").display().to_string();
        let mut args = vec!["upgrade", "kruntimes-runtimes", &chart, "--namespace", DEMO];
        args.extend(["-f", &self.runtimes]);
        args.extend(flags);
        charts::helm(&self.kubeconfig, &args).await?;
        Ok(())
    }

    /// `helm test` of the Runtimes.
    async fn test(&self) -> Result<String> {
        let args = [
            "test",
            "kruntimes-runtimes",
            "--namespace",
            DEMO,
            "--logs",
            "--timeout",
            "90s",
        ];
        charts::helm(&self.kubeconfig, &args).await
    }

    /// The chart as its next version, with a change of a CRD.
    fn next_chart(&self) -> Result<PathBuf> {
        let to = self.folder.path().join("next");
        let copied = Command::new("cp")
            .arg("-r")
            .arg(charts::chart("kruntimes"))
            .arg(&to)
            .status()?;
        ensure!(copied.success(), "the chart cannot be copied");
        for (file, from, into) in [
            ("Chart.yaml", "0.1.0", "9.9.9"),
            (
                "files/crds/run.yaml",
                "    shortNames:\n",
                "    shortNames:\n    - nextrun\n",
            ),
        ] {
            let path = to.join(file);
            let text = std::fs::read_to_string(&path)?;
            ensure!(text.contains(from), "{file} has no {from:?}");
            std::fs::write(path, text.replace(from, into))?;
        }
        Ok(to)
    }

    /// The image a Deployment runs.
    async fn image(&self, deployment: &str) -> Result<String> {
        let api: Api<Deployment> = Api::namespaced(self.cluster.client.clone(), SYSTEM);
        let spec = api.get(deployment).await?.spec.and_then(|it| it.template.spec);
        spec.and_then(|it| it.containers.into_iter().next()?.image)
            .with_context(|| format!("{deployment} has an image"))
    }

    /// The CA that the Run names, once it is as wanted; where callers find the gateway then.
    async fn endpoint(
        &self,
        world: &mut World,
        function: &Function,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<()> {
        let run = world
            .run_until(&function.name, "Ready with the gateway's CA", |run| {
                run.is_ready() && ca(run).is_some_and(|ca| wanted(&ca))
            })
            .await?;
        world.gateway.ca = ca(&run).context("a CA")?.into_bytes();
        let mut fresh = install::gateway(&self.cluster).await?;
        fresh.ca.clone_from(&world.gateway.ca);
        world.gateway = fresh;
        Ok(())
    }
}

fn ca(run: &kruntimes_api::Run) -> Option<String> {
    let bundle = run.status.as_ref()?.endpoint.as_ref()?.ca_bundle.as_ref()?;
    String::from_utf8(bundle.0.clone()).ok()
}

/// C-2, C-3.12, C-3.13, C-6.6, C-7.5; scenarios 92, 94 and 95.
#[tokio::test]
async fn an_installation_lives_through_changes() -> Result<()> {
    let release = Release::found().await?;
    helm_test_calls_a_function(&release).await?;

    let mut world = install::world(&release.cluster, 1, 4).await?;
    let first = world.function("first", ECHO).await?;
    let second = world.function("second", ECHO).await?;
    upgrade_fails_no_call(&release, &world, &[&first, &second]).await?;
    old_crds_fail_closed(&release, &world, &first).await?;
    let authority = Authority::new()?;
    existing_secret(&release, &mut world, &first, &authority).await?;
    scoped_with_an_issuer(&release, &mut world, &first, &authority).await?;
    uninstall_and_install(&release, &mut world, &first, &second).await?;
    a_namespace_with_live_functions_goes(&release, &world).await?;

    let objects = format!("secret/{SECRET},secret/{SECRET}-ca,issuer.cert-manager.io/{SECRET}");
    charts::delete(&release.kubeconfig, SYSTEM, &objects).await
}

/// It says yes only to a function that answers.
async fn helm_test_calls_a_function(release: &Release) -> Result<()> {
    let said = release.test().await?;
    ensure!(said.contains("200 in") && said.contains("verified"), "{said}");
    release
        .upgrade_runtimes(&["--set", NOWHERE, "--set", "test.timeoutSeconds=1"])
        .await?;
    match release.test().await {
        Ok(said) => bail!("helm test passed without a gateway: {said}"),
        Err(error) => ensure!(
            format!("{error:#}").contains("FAILED: POST https://"),
            "{error:#}"
        ),
    }
    release.upgrade_runtimes(&[]).await
}

/// The next version takes over Pod by Pod, its CRDs with it, and callers see nothing of it.
async fn upgrade_fails_no_call(release: &Release, world: &World, functions: &[&Function]) -> Result<()> {
    let mut flags = Vec::new();
    for name in ["gateway", "scheduler"] {
        flags.push("--set".to_owned());
        flags.push(format!(
            "{name}.image={}",
            release.image(&format!("kruntimes-{name}")).await?
        ));
    }
    let runtimed = pool_image(world, "runtimed").await?;
    flags.extend(["--set".to_owned(), format!("runtimed.image={runtimed}")]);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let chart = release.next_chart()?;

    let done = AtomicBool::new(false);
    let load = async {
        let mut calls = 0;
        while !done.load(Ordering::Relaxed) {
            for function in functions {
                let body = calls.to_string();
                let answer = world
                    .invoke(function, &body)
                    .await
                    .with_context(|| format!("call {calls}"))?;
                ensure!(
                    answer.status == 200 && answer.body == body.as_bytes(),
                    "call {calls}: {answer:?}"
                );
                calls += 1;
            }
        }
        Ok(calls)
    };
    let change = async {
        let changed = release.upgrade(&chart, &flags).await;
        let gone = match changed {
            Ok(()) => only_new_gateways(world).await,
            Err(error) => Err(error),
        };
        done.store(true, Ordering::Relaxed);
        gone
    };
    let (calls, changed) = tokio::join!(load, change);
    changed?;
    let calls: usize = calls?;
    ensure!(calls > 20, "only {calls} calls were made during the upgrade");
    let crds: Api<CustomResourceDefinition> = Api::all(world.client.clone());
    let run = crds.get("runs.kruntimes.io").await?;
    ensure!(
        run.spec
            .names
            .short_names
            .iter()
            .flatten()
            .any(|it| it == "nextrun"),
        "the CRD was not upgraded: {:?}",
        run.spec.names.short_names
    );
    Ok(())
}

/// C-7.5: a CRD of before refuses what it does not know and drops nothing. What was Ready stays callable, what is
/// new waits, the log says what to do, and once that is done all goes on.
async fn old_crds_fail_closed(release: &Release, world: &World, ready: &Function) -> Result<()> {
    let crds: Api<CustomResourceDefinition> = Api::all(release.cluster.client.clone());
    let bundle = knowing_of_bundles(&crds, None).await?;
    ensure!(bundle.is_some(), "the CRD has no status.endpoint.caBundle");

    let new = world.create("new", world.spec(ECHO)).await?;
    eventually("the owner says what is wrong", || async {
        let mut said = String::new();
        for pod in world.pod_names().await? {
            let runtimed = LogParams {
                container: Some("runtimed".to_owned()),
                ..LogParams::default()
            };
            said.push_str(&world.pods().logs(&pod, &runtimed).await?);
        }
        let named = said.contains("unknown field") && said.contains("status.endpoint.caBundle");
        Ok((named && said.contains("apply those of its chart")).then_some(()))
    })
    .await?;
    let run = world.runs().get(&new.name).await?;
    ensure!(!run.is_ready() && !run.phase().is_terminal(), "{:?}", run.status);
    world.invoke_until(ready, "1", 200).await?;

    knowing_of_bundles(&crds, bundle).await?;
    world.ready(&new).await?;
    world.invoke_until(&new, "1", 200).await?;
    world.delete(&new.name).await?;
    world.gone(&new.name).await
}

/// Sets the schema of `status.endpoint.caBundle` in the CRD of Runs, and returns the one of before.
async fn knowing_of_bundles(
    crds: &Api<CustomResourceDefinition>,
    schema: Option<serde_json::Value>,
) -> Result<Option<serde_json::Value>> {
    let mut crd = serde_json::to_value(crds.get("runs.kruntimes.io").await?)?;
    let endpoint = crd
        .pointer_mut(
            "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/endpoint/properties",
        )
        .and_then(serde_json::Value::as_object_mut)
        .context("the CRD describes status.endpoint")?;
    let before = match schema {
        Some(schema) => endpoint.insert("caBundle".to_owned(), schema),
        None => endpoint.remove("caBundle"),
    };
    let crd = serde_json::from_value(crd)?;
    crds.replace("runs.kruntimes.io", &PostParams::default(), &crd)
        .await?;
    Ok(before)
}

async fn pool_image(world: &World, container: &str) -> Result<String> {
    let deployments: Api<Deployment> = Api::namespaced(world.client.clone(), &world.namespace);
    let pool = deployments.get(&format!("runtime-{}", world.runtime)).await?;
    let containers = pool.spec.and_then(|it| it.template.spec).map(|it| it.containers);
    let mut containers = containers.into_iter().flatten();
    containers
        .find(|it| it.name == container)
        .and_then(|it| it.image)
        .context("an image")
}

async fn only_new_gateways(world: &World) -> Result<()> {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), SYSTEM);
    let gateways = ListParams::default().labels("app.kubernetes.io/name=kruntimes-gateway");
    eventually("the old gateways are gone", || async {
        let pods = pods.list(&gateways).await?;
        let new = |pod: &Pod| {
            pod.labels()
                .get("app.kubernetes.io/version")
                .is_some_and(|it| it == "9.9.9")
        };
        Ok(pods.iter().all(new).then_some(()))
    })
    .await
}

/// A CA of the operator's own.
struct Authority {
    params: CertificateParams,
    key: KeyPair,
    pem: String,
}

impl Authority {
    fn new() -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let pem = params.self_signed(&key)?.pem();
        Ok(Self { params, key, pem })
    }
}

fn secret(name: &str, fields: &[(&str, &str)]) -> serde_json::Value {
    let data: serde_json::Map<_, _> = fields
        .iter()
        .map(|(key, value)| ((*key).to_owned(), json!(BASE64.encode(value))))
        .collect();
    json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
        "metadata": { "name": name, "namespace": SYSTEM }, "data": data,
    })
}

/// A certificate without cert-manager; Runs that are Ready already name the new CA by themselves.
async fn existing_secret(
    release: &Release,
    world: &mut World,
    function: &Function,
    authority: &Authority,
) -> Result<()> {
    let key = KeyPair::generate()?;
    let names = ["svc", "svc.cluster.local"].map(|end| format!("kruntimes-gateway.{SYSTEM}.{end}"));
    let leaf = CertificateParams::new(names)?
        .signed_by(&key, &Issuer::from_params(&authority.params, &authority.key))?;
    let fields = [
        ("tls.crt", leaf.pem()),
        ("tls.key", key.serialize_pem()),
        ("ca.crt", authority.pem.clone()),
    ];
    let fields = fields.each_ref().map(|(name, value)| (*name, value.as_str()));
    charts::apply(&release.kubeconfig, &[secret(SECRET, &fields)]).await?;
    let existing = format!("gateway.tls.existingSecret={SECRET}");
    release
        .upgrade(
            &charts::chart("kruntimes"),
            &[
                "--set",
                "gateway.tls.certManager.enabled=false",
                "--set",
                &existing,
            ],
        )
        .await?;
    release
        .endpoint(world, function, |ca| ca.trim() == authority.pem.trim())
        .await?;
    world.invoke_until(function, "1", 200).await?;
    Ok(())
}

/// An issuer of the operator's, rights in two namespaces only, and everything optional switched on.
async fn scoped_with_an_issuer(
    release: &Release,
    world: &mut World,
    function: &Function,
    authority: &Authority,
) -> Result<()> {
    let name = format!("{SECRET}-ca");
    let key = authority.key.serialize_pem();
    let issuer = json!({
        "apiVersion": "cert-manager.io/v1", "kind": "Issuer",
        "metadata": { "name": SECRET, "namespace": SYSTEM }, "spec": { "ca": { "secretName": name } },
    });
    let secret = secret(&name, &[("tls.crt", &authority.pem), ("tls.key", &key)]);
    charts::apply(&release.kubeconfig, &[secret, issuer]).await?;
    let outside = world::unique("outside");
    world::make_namespace(&world.client, &outside).await?;
    let scope = format!("scope.namespaces={{{},{DEMO}}}", world.namespace);
    let issuer = format!("gateway.tls.certManager.issuerRef.name={SECRET}");
    let flags = [
        "--set",
        &scope,
        "--set",
        &issuer,
        "--set",
        "gateway.networkPolicy.enabled=true",
        "--set",
        "scheduler.networkPolicy.enabled=true",
        "--set-string",
        "gateway.tls.minVersion=1.3",
        "--set",
        "gateway.authorization.ttlSeconds=0",
        "--set",
        "scheduler.replicas=1",
    ];
    release.upgrade(&charts::chart("kruntimes"), &flags).await?;
    release
        .endpoint(world, function, |ca| ca.trim() == authority.pem.trim())
        .await?;

    let elsewhere = World {
        namespace: outside,
        ..world.clone()
    };
    elsewhere.create("unseen", world.spec(ECHO)).await?;
    // A scheduler with too few rights would neither assign nor end one.
    let new = world.function("scoped", ECHO).await?;
    world.invoke_until(&new, "2", 200).await?;
    world.invoke_until(function, "3", 200).await?;
    world.cancel("scoped").await?;
    world
        .phase("scoped", kruntimes_api::run::Phase::Cancelled)
        .await?;
    let unseen = elsewhere.runs().get("unseen").await?;
    ensure!(
        unseen.status.is_none(),
        "a Run outside the scope was looked at: {unseen:?}"
    );
    elsewhere.close().await
}

/// Runs, and Pods that can clean up after them, outlive kruntimes; a function that lives through it is called again.
async fn uninstall_and_install(
    release: &Release,
    world: &mut World,
    first: &Function,
    second: &Function,
) -> Result<()> {
    let args = [
        "uninstall",
        "kruntimes",
        "--namespace",
        SYSTEM,
        "--wait",
        "--timeout",
        "120s",
    ];
    charts::helm(&release.kubeconfig, &args).await?;
    // Its Pod finishes what it has begun, and goes on for the 5 s that others need to notice.
    eventually("nobody answers any more", || async {
        Ok(world.invoke(first, "1").await.is_err().then_some(()))
    })
    .await?;
    let run = world.runs().get(&first.name).await?;
    ensure!(run.is_ready(), "a live function was touched: {:?}", run.status);
    world.delete(&second.name).await?;
    world.gone(&second.name).await?;

    release.upgrade(&charts::chart("kruntimes"), &[]).await?;
    let old = String::from_utf8_lossy(&world.gateway.ca).into_owned();
    release.endpoint(world, first, |ca| ca != old).await?;
    world.invoke_until(first, "4", 200).await?;
    // The Service has another address now.
    let address = format!("test.gatewayAddress={}", world.gateway.address);
    release.upgrade_runtimes(&["--set", &address]).await?;
    release.test().await?;
    let again = world.ready(first).await?;
    ensure!(
        again.attempt() == run.attempt(),
        "the function was started anew: {again:?}"
    );
    Ok(())
}

/// Whatever of it goes first, no finalizer is left behind.
async fn a_namespace_with_live_functions_goes(release: &Release, world: &World) -> Result<()> {
    let namespaces: Api<Namespace> = Api::all(release.cluster.client.clone());
    namespaces
        .delete(&world.namespace, &DeleteParams::default())
        .await?;
    eventually("the namespace is gone", || async {
        Ok(namespaces
            .get_opt(&world.namespace)
            .await?
            .is_none()
            .then_some(()))
    })
    .await
}
