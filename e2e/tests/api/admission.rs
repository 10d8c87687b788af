//! The chart's admission policies on a real API server, asked by tokens that are bound to Pods: what a
//! runtimed writes every day passes, and everything else it could write is refused (C-6.6).

use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use k8s_openapi::api::{
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    coordination::v1::Lease,
    core::v1::{Namespace, Pod, ServiceAccount},
};
use kruntimes_api::{Run, names};
use kruntimes_e2e::{
    charts,
    cluster::{Cluster, eventually},
    world::{refusal, refused_with, unique},
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

const ACCOUNT: &str = "runtime-python";

/// A namespace with the policies, the pool's ServiceAccount and two of its Pods.
struct Stage {
    cluster: Cluster,
    namespace: String,
}

/// What somebody wants to write.
struct Write {
    what: &'static str,
    target: Target,
    patch: Value,
}

enum Target {
    Run(&'static str),
    Status(&'static str),
    Lease(String),
}

impl Stage {
    async fn set() -> Result<Self> {
        let cluster = Cluster::api().await?;
        let namespace = unique("own");
        install(&cluster.kubeconfig).await?;
        let object = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace } });
        Api::<Namespace>::all(cluster.client.clone())
            .create(&PostParams::default(), &serde_json::from_value(object)?)
            .await?;
        let stage = Self { cluster, namespace };
        stage.account(ACCOUNT, json!([])).await?;
        stage.bind(ACCOUNT, "ClusterRole", "kruntimes-runtimed").await?;
        Ok(stage)
    }

    fn api<K>(&self, client: &Client) -> Api<K>
    where
        K: kube::Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(client.clone(), &self.namespace)
    }

    /// A ServiceAccount; with rules, also a Role of its name that it is bound to.
    async fn account(&self, name: &str, rules: Value) -> Result<()> {
        let bound = rules.as_array().is_some_and(|it| !it.is_empty());
        let mut objects = vec![
            json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": name, "namespace": self.namespace } }),
        ];
        if bound {
            objects.push(json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
                "metadata": { "name": name, "namespace": self.namespace }, "rules": rules,
            }));
        }
        charts::apply(&self.cluster.kubeconfig, &objects).await?;
        if bound {
            self.bind(name, "Role", name).await?;
        }
        Ok(())
    }

    async fn bind(&self, account: &str, kind: &str, role: &str) -> Result<()> {
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": { "name": account, "namespace": self.namespace },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role },
            "subjects": [{ "kind": "ServiceAccount", "name": account, "namespace": self.namespace }],
        });
        charts::apply(&self.cluster.kubeconfig, &[binding]).await
    }

    /// Makes a Pod that uses the ServiceAccount; returns its UID and a client with a token bound to it.
    async fn pod(&self, name: &str, account: &str) -> Result<(String, Client)> {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": { "name": name },
            "spec": { "serviceAccountName": account, "containers": [{ "name": "runtime", "image": "none" }] },
        }))?;
        let pod = self
            .api::<Pod>(&self.cluster.client)
            .create(&PostParams::default(), &pod)
            .await?;
        let uid = pod.uid().context("a Pod has a UID")?;
        let bound = BoundObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: Some(name.to_owned()),
            uid: Some(uid.clone()),
        };
        Ok((uid, self.client(account, Some(bound)).await?))
    }

    /// A client with a token of the ServiceAccount.
    async fn client(&self, account: &str, bound: Option<BoundObjectReference>) -> Result<Client> {
        let request = TokenRequest {
            spec: Some(TokenRequestSpec {
                expiration_seconds: Some(3600),
                bound_object_ref: bound,
                ..TokenRequestSpec::default()
            }),
            ..TokenRequest::default()
        };
        let answer = self
            .api::<ServiceAccount>(&self.cluster.client)
            .create_token_request(account, &PostParams::default(), &request)
            .await?;
        let token = answer.status.and_then(|it| it.token).context("a token")?;
        self.cluster.with_token(&token).await
    }

    /// A function Run, assigned when a Pod is given.
    async fn run(&self, name: &str, pod: Option<(&str, &str)>) -> Result<()> {
        let run: Run = serde_json::from_value(json!({
            "apiVersion": "kruntimes.io/v1alpha1", "kind": "Run", "metadata": { "name": name },
            "spec": { "runtime": "python", "mode": { "function": { "handler": "main.handler" } },
                "source": { "inline": "x", "inlinePath": "main.py" } },
        }))?;
        let runs = self.api::<Run>(&self.cluster.client);
        runs.create(&PostParams::default(), &run).await?;
        if let Some((pod, uid)) = pod {
            let status = json!({ "status": {
                "phase": "Scheduled", "assignedPod": pod, "assignedPodUID": uid, "attempt": 1,
            } });
            runs.patch_status(name, &PatchParams::default(), &Patch::Merge(status))
                .await?;
        }
        Ok(())
    }

    async fn write(&self, client: &Client, write: &Write) -> Result<(), kube::Error> {
        let params = PatchParams::default();
        let patch = Patch::Merge(&write.patch);
        let runs = self.api::<Run>(client);
        match &write.target {
            Target::Run(name) => runs.patch(name, &params, &patch).await.map(drop),
            Target::Status(name) => runs.patch_status(name, &params, &patch).await.map(drop),
            Target::Lease(name) => {
                let apply = PatchParams::apply(names::MANAGER_RUNTIMED).force();
                let mut lease = write.patch.clone();
                lease["apiVersion"] = json!("coordination.k8s.io/v1");
                lease["kind"] = json!("Lease");
                self.api::<Lease>(client)
                    .patch(name, &apply, &Patch::Apply(&lease))
                    .await
                    .map(drop)
            }
        }
    }

    async fn passes(&self, client: &Client, write: Write) -> Result<()> {
        let written = self.write(client, &write).await;
        written.with_context(|| format!("{} must pass", write.what))
    }

    async fn refuses(&self, client: &Client, needle: &str, write: Write) -> Result<()> {
        match self.write(client, &write).await {
            Ok(()) => bail!("{} passed", write.what),
            Err(error) => {
                ensure!(refused_with(&error, 403), "{}: {error}", write.what);
                ensure!(refusal(&error).contains(needle), "{}: {error}", write.what);
                Ok(())
            }
        }
    }

    /// Policies take a moment to hold after they were written.
    async fn holds(&self, client: &Client, foreign: &'static str) -> Result<()> {
        eventually("the admission policies hold", || async {
            let write = status("a foreign status", foreign, json!({ "message": unique("probe") }));
            Ok(self.write(client, &write).await.is_err().then_some(()))
        })
        .await
    }
}

/// The policies and the role, as the chart makes them.
async fn install(kubeconfig: &Path) -> Result<()> {
    let mut objects = charts::rendered(kubeconfig, "kruntimes-system", &[]).await?;
    objects.retain(|it| {
        let kind = it["kind"].as_str().unwrap_or_default();
        kind.starts_with("ValidatingAdmissionPolicy")
            || kind == "ClusterRole" && it["metadata"]["name"] == "kruntimes-runtimed"
    });
    ensure!(
        objects.len() == 5,
        "the chart has two policies with bindings, and the role"
    );
    charts::apply(kubeconfig, &objects).await
}

fn status(what: &'static str, run: &'static str, fields: Value) -> Write {
    Write {
        what,
        target: Target::Status(run),
        patch: json!({ "status": fields }),
    }
}

fn object(what: &'static str, run: &'static str, patch: Value) -> Write {
    Write {
        what,
        target: Target::Run(run),
        patch,
    }
}

fn lease(what: &'static str, name: &str, holder: &str) -> Write {
    Write {
        what,
        target: Target::Lease(name.to_owned()),
        patch: json!({ "metadata": { "name": name }, "spec": { "holderIdentity": holder } }),
    }
}

fn finalizers(of: &[&str]) -> Value {
    json!({ "metadata": { "finalizers": of } })
}

/// C-6.6: the token of a Pod opens the Runs that are assigned to that very Pod.
#[tokio::test]
async fn a_runtimed_writes_the_runs_of_its_own_pod_and_no_other() -> Result<()> {
    let stage = Stage::set().await?;
    let (uid, mine) = stage.pod("runtime-python-a", ACCOUNT).await?;
    let (other_uid, _) = stage.pod("runtime-python-b", ACCOUNT).await?;
    stage.run("mine", Some(("runtime-python-a", &uid))).await?;
    stage
        .run("theirs", Some(("runtime-python-b", &other_uid)))
        .await?;
    stage.run("nobodys", None).await?;
    stage.holds(&mine, "theirs").await?;

    let ours = [
        finalizers(&[names::FINALIZER]),
        json!({ "phase": "Running", "startTime": "2026-01-01T00:00:00.000000Z" }),
        json!({ "phase": "Ready", "owner": { "address": "10.0.0.7:9443", "peerKey": "0a".repeat(32) } }),
        json!({ "phase": "Running", "owner": null, "releasedAttempt": 1, "message": "handed back" }),
    ];
    for (at, patch) in ours.into_iter().enumerate() {
        let write = match at {
            0 => object("its finalizer", "mine", patch),
            _ => status("its status", "mine", patch),
        };
        stage.passes(&mine, write).await?;
    }

    let runs = stage.api::<Run>(&stage.cluster.client);
    let before = runs.list(&kube::api::ListParams::default()).await?;
    let message = json!({ "message": "taken" });
    for (run, needle) in [("theirs", "its own Pod"), ("nobodys", "its own Pod")] {
        stage
            .refuses(&mine, needle, status("a foreign status", run, message.clone()))
            .await?;
        stage
            .refuses(
                &mine,
                needle,
                object("a foreign finalizer", run, finalizers(&[names::FINALIZER])),
            )
            .await?;
    }
    let stolen = json!({ "assignedPod": "runtime-python-b", "assignedPodUID": other_uid });
    for (what, fields) in [
        ("giving a Run away", stolen),
        (
            "a Run without a Pod",
            json!({ "assignedPod": null, "assignedPodUID": null }),
        ),
        ("another attempt", json!({ "attempt": 2 })),
    ] {
        stage
            .refuses(&mine, "the scheduler does", status(what, "mine", fields))
            .await?;
    }
    let foreign = [names::FINALIZER, "example.com/other"];
    for (what, patch) in [
        ("a cancellation", json!({ "spec": { "cancelRequested": true } })),
        ("another ttl", json!({ "spec": { "ttlSecondsAfterFinished": 0 } })),
        ("a label", json!({ "metadata": { "labels": { "a": "b" } } })),
        (
            "an annotation",
            json!({ "metadata": { "annotations": { "a": "b" } } }),
        ),
        ("a foreign finalizer", finalizers(&foreign)),
    ] {
        stage
            .refuses(&mine, "changes nothing", object(what, "mine", patch))
            .await?;
    }
    let unbound = stage.client(ACCOUNT, None).await?;
    stage
        .refuses(
            &unbound,
            "bound to none",
            status("an unbound token", "mine", message.clone()),
        )
        .await?;
    let after = runs.list(&kube::api::ListParams::default()).await?;
    ensure!(
        before.metadata.resource_version.is_some() && versions(&before.items) == versions(&after.items),
        "a refused write has changed something"
    );

    stage
        .passes(&mine, object("its finalizer's end", "mine", finalizers(&[])))
        .await?;
    // A Pod of the same name is another Pod.
    let pods = stage.api::<Pod>(&stage.cluster.client);
    let at_once = DeleteParams::default().grace_period(0);
    pods.delete("runtime-python-a", &at_once).await?;
    let (_, successor) = stage.pod("runtime-python-a", ACCOUNT).await?;
    stage
        .refuses(
            &successor,
            "its own Pod",
            status("the successor", "mine", message),
        )
        .await
}

fn versions(runs: &[Run]) -> Vec<Option<String>> {
    runs.iter().map(kube::ResourceExt::resource_version).collect()
}

/// C-6.6, C-6.7: a heartbeat comes from its own Pod, and a runtimed writes no other Lease.
#[tokio::test]
async fn a_runtimed_renews_its_own_heartbeat_and_no_other() -> Result<()> {
    let stage = Stage::set().await?;
    let (uid, mine) = stage.pod("runtime-python-a", ACCOUNT).await?;
    let (other_uid, theirs) = stage.pod("runtime-python-b", ACCOUNT).await?;
    stage
        .run("theirs", Some(("runtime-python-b", &other_uid)))
        .await?;
    stage.holds(&mine, "theirs").await?;
    let own = names::heartbeat_lease("runtime-python-a");
    let other = names::heartbeat_lease("runtime-python-b");
    // The two policies need not take hold in the same moment.
    eventually("the policy on Leases holds", || async {
        let write = lease("another Lease", &unique("probe"), &uid);
        Ok(stage.write(&mine, &write).await.is_err().then_some(()))
    })
    .await?;
    stage.passes(&mine, lease("the first beat", &own, &uid)).await?;
    stage.passes(&mine, lease("the second beat", &own, &uid)).await?;
    stage
        .passes(&theirs, lease("the other's beat", &other, &other_uid))
        .await?;
    let needle = "its own Pod";
    for (what, name) in [
        ("a beat for the other", other.as_str()),
        ("the scheduler's Lease", names::LEASE_SCHEDULER),
    ] {
        stage.refuses(&mine, needle, lease(what, name, &uid)).await?;
    }
    stage
        .refuses(
            &mine,
            "UID of its Pod",
            lease("a borrowed name", &own, &other_uid),
        )
        .await?;
    let unbound = stage.client(ACCOUNT, None).await?;
    stage
        .refuses(&unbound, needle, lease("an unbound token", &own, &uid))
        .await
}

/// C-6.6: who is no runtimed is not held, whatever its Pod is called.
#[tokio::test]
async fn other_service_accounts_keep_their_rights() -> Result<()> {
    let stage = Stage::set().await?;
    let (_, runtimed) = stage.pod("runtime-python-a", ACCOUNT).await?;
    let people = json!([
        { "apiGroups": ["kruntimes.io"], "resources": ["runs"], "verbs": ["get", "patch"] },
        { "apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "patch"] },
    ]);
    let everything = json!([{ "apiGroups": ["*"], "resources": ["*"], "verbs": ["*"] }]);
    stage.account("runtime-people", people).await?;
    stage.account("operators", everything).await?;
    stage.run("work", Some(("runtime-python-z", "a-uid"))).await?;
    stage.holds(&runtimed, "work").await?;

    let (_, people) = stage.pod("runtime-people-1", "runtime-people").await?;
    let labels = json!({ "metadata": { "labels": { "a": "b" } } });
    stage
        .passes(&people, object("people's labels", "work", labels))
        .await?;
    stage
        .passes(&people, lease("people's Lease", "election", "me"))
        .await?;
    let (_, operators) = stage.pod("operators-1", "operators").await?;
    stage
        .passes(&operators, lease("an operator's Lease", "operator", "me"))
        .await?;
    let message = json!({ "message": "looked at" });
    stage
        .passes(&operators, status("an operator's status", "work", message))
        .await?;
    let cancel = json!({ "spec": { "cancelRequested": true } });
    stage
        .passes(&people, object("people's cancellation", "work", cancel))
        .await
}
