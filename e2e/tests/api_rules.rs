//! C-2: every validation and transition rule of the two kinds, tried against a real
//! API server: what it accepts, and what it refuses by naming the field.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Namespace;
use kruntimes_api::{Run, Runtime};
use kruntimes_e2e::{cluster::Cluster, world::unique};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, ObjectMeta, Patch, PatchParams, PostParams},
    core::{ApiResource, Resource},
};
use serde_json::{Value, json};

/// What the API server must say; a refusal must hold every one of the words.
enum Verdict {
    Accepted,
    Refused(&'static [&'static str]),
}
use Verdict::{Accepted, Refused};

fn function() -> Value {
    json!({
        "runtime": "python",
        "source": { "inline": "def handler(event): return event", "inlinePath": "main.py" },
        "mode": { "function": { "handler": "main.handler" } },
    })
}

fn task() -> Value {
    json!({ "runtime": "python", "source": { "inline": "print(1)" }, "mode": { "task": {} } })
}

fn git() -> Value {
    json!({
        "runtime": "python", "mode": { "task": { "entrypoint": "run.py" } },
        "source": { "repoURL": "https://git.example/a/b.git", "commitSHA": "a".repeat(40) },
    })
}

fn affinity(term: Value) -> Value {
    json!({ "affinity": { "runAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [term] } } })
}

/// Specs at creation: the base, a merge patch onto it, the verdict.
fn creations() -> Vec<(Value, Value, Verdict)> {
    let selector = json!({ "matchLabels": { "a": "b" } });
    let topology = "kruntimes.io/runtime-pod";
    vec![
        (function(), json!({}), Accepted),
        (task(), json!({}), Accepted),
        (git(), json!({}), Accepted),
        // runtime
        (function(), json!({ "runtime": null }), Refused(&["spec.runtime"])),
        (function(), json!({ "runtime": "p".repeat(50) }), Accepted),
        (
            function(),
            json!({ "runtime": "p".repeat(51) }),
            Refused(&["spec.runtime"]),
        ),
        (
            function(),
            json!({ "runtime": "Python" }),
            Refused(&["spec.runtime"]),
        ),
        (
            function(),
            json!({ "runtime": "-python" }),
            Refused(&["spec.runtime"]),
        ),
        // source
        (function(), json!({ "source": null }), Accepted),
        (
            function(),
            json!({ "source": { "inline": "x".repeat(262_144) } }),
            Accepted,
        ),
        (
            function(),
            json!({ "source": { "inline": "x".repeat(262_145) } }),
            Refused(&["spec.source.inline"]),
        ),
        (
            function(),
            json!({ "source": { "repoURL": "https://git.example/a" } }),
            Refused(&["inline and repoURL exclude"]),
        ),
        (
            function(),
            json!({ "source": { "inlinePath": null } }),
            Refused(&["spec.source.inlinePath", "required"]),
        ),
        (
            task(),
            json!({ "source": { "inlinePath": "main.py" } }),
            Refused(&["spec.source.inlinePath", "only for a function"]),
        ),
        (
            function(),
            json!({ "source": { "inlinePath": "pkg/main.py" } }),
            Accepted,
        ),
        (
            function(),
            json!({ "source": { "inlinePath": ".hidden/..main.py" } }),
            Accepted,
        ),
        (
            function(),
            json!({ "source": { "inlinePath": "/main.py" } }),
            Refused(&["inlinePath must be relative"]),
        ),
        (
            function(),
            json!({ "source": { "inlinePath": "../main.py" } }),
            Refused(&["inlinePath must be relative"]),
        ),
        (
            function(),
            json!({ "source": { "inlinePath": "a/../main.py" } }),
            Refused(&["inlinePath must be relative"]),
        ),
        (
            function(),
            json!({ "source": { "inlinePath": "a/./main.py" } }),
            Refused(&["inlinePath must be relative"]),
        ),
        (
            function(),
            json!({ "source": { "inlinePath": "a//main.py" } }),
            Refused(&["inlinePath must be relative"]),
        ),
        (
            function(),
            json!({ "source": { "inlinePath": "main.py/" } }),
            Refused(&["inlinePath must be relative"]),
        ),
        (
            function(),
            json!({ "source": { "inlinePath": "m".repeat(4097) } }),
            Refused(&["spec.source.inlinePath"]),
        ),
        (
            task(),
            json!({ "source": { "commitSHA": "a".repeat(40) } }),
            Refused(&["commitSHA needs repoURL"]),
        ),
        (
            git(),
            json!({ "source": { "commitSHA": "a".repeat(64) } }),
            Accepted,
        ),
        (
            git(),
            json!({ "source": { "commitSHA": "main" } }),
            Refused(&["spec.source.commitSHA"]),
        ),
        (
            git(),
            json!({ "source": { "commitSHA": "A".repeat(40) } }),
            Refused(&["spec.source.commitSHA"]),
        ),
        (
            git(),
            json!({ "source": { "repoURL": "ssh://git.example/a" } }),
            Accepted,
        ),
        (
            git(),
            json!({ "source": { "repoURL": "http://git.example/a" } }),
            Refused(&["repoURL must begin"]),
        ),
        (
            git(),
            json!({ "source": { "repoURL": "https://user:secret@git.example/a" } }),
            Refused(&["repoURL must begin"]),
        ),
        (
            git(),
            json!({ "source": { "repoURL": format!("https://git.example/{}", "a".repeat(2048)) } }),
            Refused(&["spec.source.repoURL"]),
        ),
        // mode
        (function(), json!({ "mode": null }), Refused(&["spec.mode"])),
        (
            function(),
            json!({ "mode": { "function": null } }),
            Refused(&["exactly one of task and function"]),
        ),
        (
            function(),
            json!({ "mode": { "task": {} } }),
            Refused(&["exactly one of task and function"]),
        ),
        (
            task(),
            json!({ "mode": { "task": { "entrypoint": "a/b.sh", "args": ["x", ""] } } }),
            Accepted,
        ),
        (
            task(),
            json!({ "mode": { "task": { "entrypoint": "/b.sh" } } }),
            Refused(&["entrypoint must be relative"]),
        ),
        (
            task(),
            json!({ "mode": { "task": { "entrypoint": "a/../b.sh" } } }),
            Refused(&["entrypoint must be relative"]),
        ),
        (
            task(),
            json!({ "mode": { "task": { "args": vec!["x"; 257] } } }),
            Refused(&["spec.mode.task.args"]),
        ),
        (
            task(),
            json!({ "mode": { "task": { "args": ["x".repeat(8193)] } } }),
            Refused(&["spec.mode.task.args"]),
        ),
        (
            function(),
            json!({ "mode": { "function": { "handler": null } } }),
            Refused(&["handler"]),
        ),
        (
            function(),
            json!({ "mode": { "function": { "handler": "pkg.mod.handle_it" } } }),
            Accepted,
        ),
        (
            function(),
            json!({ "mode": { "function": { "handler": "handler" } } }),
            Refused(&["handler must be file.function"]),
        ),
        (
            function(),
            json!({ "mode": { "function": { "handler": "main.handler; rm -rf" } } }),
            Refused(&["handler must be file.function"]),
        ),
        (
            function(),
            json!({ "mode": { "function": { "handler": format!("m.{}", "h".repeat(511)) } } }),
            Refused(&["handler"]),
        ),
        (
            function(),
            json!({ "mode": { "function": { "idleTimeoutSeconds": 1 } } }),
            Accepted,
        ),
        (
            function(),
            json!({ "mode": { "function": { "idleTimeoutSeconds": 0 } } }),
            Refused(&["idleTimeoutSeconds"]),
        ),
        (
            function(),
            json!({ "mode": { "function": { "idleTimeoutSeconds": -1 } } }),
            Refused(&["idleTimeoutSeconds"]),
        ),
        // env
        (
            function(),
            json!({ "env": [{ "name": "A" }, { "name": "HANDLER_X", "value": "y" }] }),
            Accepted,
        ),
        (
            function(),
            json!({ "env": [{ "name": "A" }, { "name": "A" }] }),
            Refused(&["spec.env", "uplicate"]),
        ),
        (
            function(),
            json!({ "env": [{ "name": "1A" }] }),
            Refused(&["spec.env[0].name"]),
        ),
        (
            function(),
            json!({ "env": [{ "name": "FUNC_NAME", "value": "x" }] }),
            Refused(&["spec.env[0].name", "reserved"]),
        ),
        (
            function(),
            json!({ "env": [{ "name": "SERVER_HOST", "value": "x" }] }),
            Refused(&["reserved"]),
        ),
        (
            function(),
            json!({ "env": [{ "name": "KRUNTIME_RUN_UID", "value": "x" }] }),
            Refused(&["reserved"]),
        ),
        (
            function(),
            json!({ "env": [{ "name": "A", "valueFrom": { "secretKeyRef": { "name": "s", "key": "k" } } }] }),
            Refused(&["valueFrom is not supported"]),
        ),
        (
            function(),
            json!({ "env": (0..257).map(|i| json!({ "name": format!("A{i}") })).collect::<Vec<_>>() }),
            Refused(&["spec.env"]),
        ),
        // resources
        (
            function(),
            json!({ "resources": { "requests": { "runs": 1, "cpu": "500m", "memory": "1Gi", "example.com/gpu": 0 } } }),
            Accepted,
        ),
        (
            function(),
            json!({ "resources": { "requests": { "cpu": "-1" } } }),
            Refused(&["spec.resources.requests", "quantities"]),
        ),
        (
            function(),
            json!({ "resources": { "requests": { "runs": -1 } } }),
            Refused(&["spec.resources.requests", "quantities"]),
        ),
        (
            function(),
            json!({ "resources": { "requests": { "cpu": "much" } } }),
            Refused(&["spec.resources.requests", "quantities"]),
        ),
        // affinity
        (
            function(),
            affinity(json!({ "labelSelector": selector, "topologyKey": topology })),
            Accepted,
        ),
        (
            function(),
            affinity(json!({ "labelSelector": selector, "topologyKey": "zone" })),
            Refused(&["topologyKey"]),
        ),
        (
            function(),
            affinity(json!({ "labelSelector": {}, "topologyKey": topology })),
            Refused(&["labelSelector must not be empty"]),
        ),
        (
            function(),
            affinity(
                json!({ "labelSelector": { "matchExpressions": [{ "key": "a", "operator": "In", "values": ["b"] }] }, "topologyKey": topology }),
            ),
            Accepted,
        ),
        (
            function(),
            affinity(
                json!({ "labelSelector": { "matchExpressions": [{ "key": "a", "operator": "In" }] }, "topologyKey": topology }),
            ),
            Refused(&["In and NotIn need values"]),
        ),
        (
            function(),
            affinity(
                json!({ "labelSelector": { "matchExpressions": [{ "key": "a", "operator": "Exists", "values": ["b"] }] }, "topologyKey": topology }),
            ),
            Refused(&["Exists and DoesNotExist take none"]),
        ),
        (
            function(),
            json!({ "affinity": { "runAntiAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [{ "weight": 101, "runAffinityTerm": { "labelSelector": selector, "topologyKey": topology } }] } } }),
            Refused(&["weight"]),
        ),
        // timeout
        (function(), json!({ "timeout": "1h30m" }), Accepted),
        (function(), json!({ "timeout": "1.5s" }), Accepted),
        (
            function(),
            json!({ "timeout": "0s" }),
            Refused(&["spec.timeout", "above zero"]),
        ),
        (
            function(),
            json!({ "timeout": "-5s" }),
            Refused(&["spec.timeout"]),
        ),
        (function(), json!({ "timeout": "5" }), Refused(&["spec.timeout"])),
        (
            function(),
            json!({ "timeout": "soon" }),
            Refused(&["spec.timeout"]),
        ),
        // retryPolicy
        (
            function(),
            json!({ "retryPolicy": { "maxAttempts": 100, "backoff": "500ms", "retryableReasons": ["PodGone"] } }),
            Accepted,
        ),
        (
            function(),
            json!({ "retryPolicy": { "maxAttempts": 0 } }),
            Refused(&["spec.retryPolicy.maxAttempts"]),
        ),
        (
            function(),
            json!({ "retryPolicy": { "maxAttempts": 101 } }),
            Refused(&["spec.retryPolicy.maxAttempts"]),
        ),
        (
            function(),
            json!({ "retryPolicy": { "backoff": "fast" } }),
            Refused(&["spec.retryPolicy.backoff"]),
        ),
        (
            function(),
            json!({ "retryPolicy": { "retryableReasons": vec!["x"; 33] } }),
            Refused(&["spec.retryPolicy.retryableReasons"]),
        ),
        // the rest
        (function(), json!({ "cancelRequested": true }), Accepted),
        (function(), json!({ "ttlSecondsAfterFinished": 0 }), Accepted),
        (
            function(),
            json!({ "ttlSecondsAfterFinished": -1 }),
            Refused(&["spec.ttlSecondsAfterFinished"]),
        ),
    ]
}

/// Changes of a spec after creation: what it is made with, the change, the verdict.
fn transitions() -> Vec<(Value, Value, Verdict)> {
    let full = json!({
        "env": [{ "name": "A", "value": "b" }], "resources": { "requests": { "runs": 1 } }, "timeout": "1h",
        "affinity": { "runAffinity": {} }, "retryPolicy": { "maxAttempts": 2 },
    });
    let mut cases = vec![
        (json!({}), json!({ "cancelRequested": true }), Accepted),
        (
            json!({ "cancelRequested": true }),
            json!({ "cancelRequested": false }),
            Refused(&["spec.cancelRequested"]),
        ),
        (
            json!({ "cancelRequested": true }),
            json!({ "cancelRequested": null }),
            Refused(&["spec.cancelRequested"]),
        ),
        (json!({}), json!({ "ttlSecondsAfterFinished": 5 }), Accepted),
        (
            json!({ "ttlSecondsAfterFinished": 5 }),
            json!({ "ttlSecondsAfterFinished": null }),
            Accepted,
        ),
        (
            full.clone(),
            json!({ "runtime": "bash" }),
            Refused(&["spec.runtime is frozen"]),
        ),
        (
            full.clone(),
            json!({ "source": { "inline": "other" } }),
            Refused(&["spec.source is frozen"]),
        ),
        (
            full.clone(),
            json!({ "source": null }),
            Refused(&["spec.source is frozen"]),
        ),
        (
            full.clone(),
            json!({ "mode": { "function": { "handler": "main.other" } } }),
            Refused(&["spec.mode is frozen"]),
        ),
        (
            full.clone(),
            json!({ "mode": { "function": { "idleTimeoutSeconds": 9 } } }),
            Refused(&["spec.mode is frozen"]),
        ),
    ];
    let fields: [(&str, &[&str], Value); 5] = [
        (
            "env",
            &["spec.env is frozen"],
            json!([{ "name": "A", "value": "c" }]),
        ),
        (
            "resources",
            &["spec.resources is frozen"],
            json!({ "requests": { "runs": 2 } }),
        ),
        (
            "affinity",
            &["spec.affinity is frozen"],
            json!({ "runAntiAffinity": {} }),
        ),
        ("timeout", &["spec.timeout is frozen"], json!("2h")),
        (
            "retryPolicy",
            &["spec.retryPolicy is frozen"],
            json!({ "maxAttempts": 3 }),
        ),
    ];
    for (field, words, other) in fields {
        cases.push((full.clone(), json!({ field: other }), Refused(words)));
        cases.push((full.clone(), json!({ field: null }), Refused(words)));
        cases.push((json!({}), json!({ field: other }), Refused(words)));
    }
    cases
}

/// Status writes: the status before, the change, the verdict.
fn statuses() -> Vec<(Value, Value, Verdict)> {
    let assigned = json!({ "phase": "Scheduled", "assignedPod": "p", "assignedPodUID": "u", "attempt": 2 });
    let mut cases = vec![
        (json!({}), assigned.clone(), Accepted),
        (
            assigned.clone(),
            json!({ "assignedPod": null, "assignedPodUID": null }),
            Accepted,
        ),
        (
            assigned.clone(),
            json!({ "assignedPod": null }),
            Refused(&["assignedPodUID", "together"]),
        ),
        (
            assigned.clone(),
            json!({ "assignedPodUID": null }),
            Refused(&["assignedPodUID", "together"]),
        ),
        (assigned.clone(), json!({ "attempt": 3 }), Accepted),
        (
            assigned.clone(),
            json!({ "attempt": 1 }),
            Refused(&["attempt never falls"]),
        ),
        (
            assigned,
            json!({ "attempt": null }),
            Refused(&["attempt never falls"]),
        ),
        (json!({}), json!({ "attempt": 0 }), Refused(&["status.attempt"])),
        (json!({}), json!({ "phase": "Done" }), Refused(&["status.phase"])),
        (
            json!({ "startTime": "2026-01-01T00:00:00.000000Z" }),
            json!({ "startTime": "2026-01-02T00:00:00.000000Z" }),
            Refused(&["startTime is set once"]),
        ),
        (
            json!({}),
            json!({ "message": "m".repeat(4097) }),
            Refused(&["status.message"]),
        ),
        (
            json!({}),
            json!({ "owner": { "address": "10.0.0.1:9443", "peerKey": "ab".repeat(32) } }),
            Accepted,
        ),
        (
            json!({}),
            json!({ "owner": { "address": "10.0.0.1:9443", "peerKey": "AB".repeat(32) } }),
            Refused(&["peerKey"]),
        ),
        (
            json!({}),
            json!({ "endpoint": { "protocol": "FTP", "url": "ftp://x" } }),
            Refused(&["protocol"]),
        ),
        (
            json!({}),
            json!({ "endpoint": { "protocol": "HTTPS", "url": "u".repeat(2049) } }),
            Refused(&["status.endpoint.url"]),
        ),
    ];
    for end in ["Succeeded", "Failed", "Timeout", "Cancelled"] {
        cases.push((
            json!({ "phase": end }),
            json!({ "phase": "Pending" }),
            Refused(&["never changes"]),
        ));
        cases.push((
            json!({ "phase": end }),
            json!({ "phase": null }),
            Refused(&["never changes"]),
        ));
        cases.push((
            json!({ "phase": end }),
            json!({ "message": "still editable" }),
            Accepted,
        ));
    }
    cases
}

/// Runtimes: name, a merge patch onto a plain one, the verdict.
fn runtimes() -> Vec<(String, Value, Verdict)> {
    let name = || "python".to_owned();
    let containers = |value: Value| json!({ "template": { "spec": { "containers": value } } });
    vec![
        (name(), json!({}), Accepted),
        (
            name(),
            json!({ "replicas": 0, "recycle": "AfterRun", "scheduling": "Pods", "port": 50051 }),
            Accepted,
        ),
        (
            name(),
            json!({ "template": { "spec": { "nodeSelector": { "a": "b" }, "containers": [{ "name": "runtime", "image": "i", "env": [{ "name": "A", "value": "b" }] }, { "name": "side", "image": "s" }] } } }),
            Accepted,
        ),
        (
            "r".repeat(51),
            json!({}),
            Refused(&["metadata.name", "50 characters"]),
        ),
        (
            "a.b".to_owned(),
            json!({}),
            Refused(&["metadata.name", "DNS label"]),
        ),
        (name(), json!({ "template": null }), Refused(&["spec.template"])),
        (name(), containers(json!([])), Refused(&["containers"])),
        (
            name(),
            containers(json!([{ "name": "main", "image": "i" }])),
            Refused(&["must be named runtime"]),
        ),
        (name(), json!({ "port": 0 }), Refused(&["spec.port"])),
        (name(), json!({ "port": 65536 }), Refused(&["spec.port"])),
        (
            name(),
            json!({ "port": 9443 }),
            Refused(&["spec.port", "runtimed listens there"]),
        ),
        (name(), json!({ "replicas": -1 }), Refused(&["spec.replicas"])),
        (
            name(),
            json!({ "capacity": { "resources": { "runs": 4, "example.com/gpu": "1" } } }),
            Accepted,
        ),
        (
            name(),
            json!({ "capacity": { "resources": { "runs": "-1" } } }),
            Refused(&["spec.capacity.resources"]),
        ),
        (
            name(),
            json!({ "invocation": { "onCallerGone": "Finish", "exposeErrors": true } }),
            Accepted,
        ),
        (
            name(),
            json!({ "invocation": { "onCallerGone": "Ignore" } }),
            Refused(&["onCallerGone"]),
        ),
        (name(), json!({ "recycle": "Always" }), Refused(&["spec.recycle"])),
    ]
}

#[tokio::test]
async fn rules_at_creation() -> Result<()> {
    let (client, namespace) = ready("create").await?;
    let api = dynamic::<Run>(&client, &namespace);
    for (index, (base, change, verdict)) in creations().into_iter().enumerate() {
        let name = format!("c{index}");
        let answer = api
            .create(
                &PostParams::default(),
                &object::<Run>(&name, merged(base, &change))?,
            )
            .await;
        check(&format!("create with {}", shown(&change)), answer, &verdict)?;
    }
    Ok(())
}

#[tokio::test]
async fn rules_of_change() -> Result<()> {
    let (client, namespace) = ready("change").await?;
    let api = dynamic::<Run>(&client, &namespace);
    for (index, (made_with, change, verdict)) in transitions().into_iter().enumerate() {
        let name = format!("t{index}");
        let made = object::<Run>(&name, merged(function(), &made_with))?;
        api.create(&PostParams::default(), &made)
            .await
            .context("the object to change")?;
        let patch = Patch::Merge(json!({ "spec": change }));
        let answer = api.patch(&name, &PatchParams::default(), &patch).await;
        check(
            &format!("from {} change {}", shown(&made_with), shown(&change)),
            answer,
            &verdict,
        )?;
    }
    Ok(())
}

#[tokio::test]
async fn rules_of_status() -> Result<()> {
    let (client, namespace) = ready("status").await?;
    let api = dynamic::<Run>(&client, &namespace);
    for (index, (before, change, verdict)) in statuses().into_iter().enumerate() {
        let name = format!("s{index}");
        api.create(&PostParams::default(), &object::<Run>(&name, function())?)
            .await?;
        let write = async |status: &Value| {
            let patch = Patch::Merge(json!({ "status": status }));
            api.patch_status(&name, &PatchParams::default(), &patch).await
        };
        write(&before)
            .await
            .with_context(|| format!("status to change: {before}"))?;
        check(
            &format!("from status {} change {}", shown(&before), shown(&change)),
            write(&change).await,
            &verdict,
        )?;
    }
    // A status as a whole cannot be taken away either.
    let mut run = api.get("s0").await?;
    if let Some(fields) = run.data.as_object_mut() {
        fields.remove("status");
    }
    let answer = api.replace_status("s0", &PostParams::default(), &run).await;
    check("remove status", answer, &Refused(&["status cannot be removed"]))
}

#[tokio::test]
async fn rules_of_runtimes() -> Result<()> {
    let (client, namespace) = ready("runtime").await?;
    let api = dynamic::<Runtime>(&client, &namespace);
    let plain = json!({ "template": { "spec": { "containers": [{ "name": "runtime", "image": "i" }] } } });
    for (name, change, verdict) in runtimes() {
        let made = object::<Runtime>(&name, merged(plain.clone(), &change))?;
        let answer = api.create(&PostParams::default(), &made).await;
        let accepted = answer.is_ok();
        check(
            &format!("Runtime {name} with {}", shown(&change)),
            answer,
            &verdict,
        )?;
        if accepted {
            api.delete(&name, &DeleteParams::default()).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn functions_can_be_selected_by_field() -> Result<()> {
    let (client, namespace) = ready("select").await?;
    let api = dynamic::<Run>(&client, &namespace);
    api.create(&PostParams::default(), &object::<Run>("function", function())?)
        .await?;
    api.create(&PostParams::default(), &object::<Run>("task", task())?)
        .await?;
    for (selector, expected) in [
        ("spec.mode.function.handler!=", vec!["function"]),
        ("spec.runtime=python", vec!["function", "task"]),
        ("status.phase=Ready", vec![]),
        ("status.assignedPod=", vec!["function", "task"]),
    ] {
        let found = api
            .list(&kube::api::ListParams::default().fields(selector))
            .await?;
        let names: Vec<_> = found
            .iter()
            .filter_map(|it| it.metadata.name.as_deref())
            .collect();
        ensure!(
            names == expected,
            "{selector} selects {names:?}, not {expected:?}"
        );
    }
    Ok(())
}

async fn ready(prefix: &str) -> Result<(Client, String)> {
    let cluster = Cluster::api().await?;
    let name = unique(prefix);
    let metadata = ObjectMeta {
        name: Some(name.clone()),
        ..ObjectMeta::default()
    };
    Api::all(cluster.client.clone())
        .create(
            &PostParams::default(),
            &Namespace {
                metadata,
                ..Namespace::default()
            },
        )
        .await?;
    Ok((cluster.client, name))
}

fn dynamic<K: Resource<DynamicType = ()>>(client: &Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &ApiResource::erase::<K>(&()))
}

fn object<K: Resource<DynamicType = ()>>(name: &str, spec: Value) -> Result<DynamicObject> {
    Ok(serde_json::from_value(json!({
        "apiVersion": K::api_version(&()), "kind": K::kind(&()), "metadata": { "name": name }, "spec": spec,
    }))?)
}

fn check(what: &str, answer: kube::Result<DynamicObject>, verdict: &Verdict) -> Result<()> {
    match (answer, verdict) {
        (Ok(_), Accepted) => Ok(()),
        (Ok(_), Refused(words)) => anyhow::bail!("accepted, but must be refused with {words:?}: {what}"),
        (Err(error), Accepted) => {
            Err(error).with_context(|| format!("refused, but must be accepted: {what}"))
        }
        (Err(error), Refused(words)) => {
            let message = kruntimes_e2e::world::refusal(&error);
            let named = words.iter().all(|word| message.contains(word));
            ensure!(
                named,
                "refused as {message:?}, which does not say {words:?}: {what}"
            );
            Ok(())
        }
    }
}

/// RFC 7386.
fn merged(mut base: Value, change: &Value) -> Value {
    match (&mut base, change) {
        (Value::Object(fields), Value::Object(changes)) => {
            for (key, value) in changes {
                if value.is_null() {
                    fields.remove(key);
                } else {
                    let before = fields.remove(key).unwrap_or(Value::Null);
                    fields.insert(key.clone(), merged(before, value));
                }
            }
            base
        }
        (_, change) => {
            // Nulls inside a new object mean absence, too.
            if let Value::Object(changes) = change {
                return merged(json!({}), &Value::Object(changes.clone()));
            }
            change.clone()
        }
    }
}

fn shown(value: &Value) -> String {
    value.to_string().chars().take(160).collect()
}
