//! C-2.2: the rules of a Run's status, and C-2: those of Runtimes, tried against a real API server.

use anyhow::{Context as _, Result, ensure};
use kruntimes_api::{Run, Runtime};
use kruntimes_e2e::rules::{
    Verdict::{self, Accepted, Refused},
    check, dynamic, function, merged, namespace, object, shown, task,
};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

fn outputs(count: usize) -> Value {
    (0..count).map(|it| (format!("k{it}"), json!("v"))).collect()
}

fn artifacts(count: usize) -> Value {
    (0..count)
        .map(|it| json!({ "name": format!("a{it}"), "driver": "filesystem", "type": "file", "location": {} }))
        .collect()
}

fn condition(kind: &str, reason: &str) -> Value {
    json!({
        "type": kind, "status": "False", "reason": reason, "message": "", "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    })
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
        (
            json!({}),
            json!({ "endpoint": { "protocol": "HTTPS", "url": "https://x", "caBundle": "QUFB".repeat(5461) } }),
            Accepted,
        ),
        (
            json!({}),
            json!({ "endpoint": { "protocol": "HTTPS", "url": "https://x", "caBundle": "QUFB".repeat(5463) } }),
            Refused(&["status.endpoint.caBundle"]),
        ),
        (json!({}), json!({ "outputs": outputs(64) }), Accepted),
        (
            json!({}),
            json!({ "outputs": outputs(65) }),
            Refused(&["status.outputs"]),
        ),
        (json!({}), json!({ "artifactRefs": artifacts(32) }), Accepted),
        (
            json!({}),
            json!({ "artifactRefs": artifacts(33) }),
            Refused(&["status.artifactRefs"]),
        ),
        (
            json!({}),
            json!({ "conditions": [condition("Ready", "Registering"), condition("Scheduled", "Assigned")] }),
            Accepted,
        ),
        (
            json!({}),
            json!({ "conditions": [condition("Ready", "Registering"), condition("Ready", "Draining")] }),
            Refused(&["status.conditions", "uplicate"]),
        ),
        (
            json!({}),
            json!({ "conditions": [{ "type": "Ready", "status": "True" }] }),
            Refused(&["status.conditions[0].reason"]),
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

/// C-2.2: what a status may hold, and what never goes back.
#[tokio::test]
async fn rules_of_status() -> Result<()> {
    let (client, namespace) = namespace("status").await?;
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

/// C-2: `Runtime.spec`.
#[tokio::test]
async fn rules_of_runtimes() -> Result<()> {
    let (client, namespace) = namespace("runtime").await?;
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

/// C-2: the scale subresource, as a scaler uses it.
#[tokio::test]
async fn a_runtime_can_be_scaled() -> Result<()> {
    let (client, namespace) = namespace("scale").await?;
    let api = dynamic::<Runtime>(&client, &namespace);
    let spec = json!({ "template": { "spec": { "containers": [{ "name": "runtime", "image": "i" }] } }, "replicas": 1 });
    api.create(&PostParams::default(), &object::<Runtime>("python", spec)?)
        .await?;
    let status = Patch::Merge(json!({ "status": { "replicas": 3, "selector": "runtime=python" } }));
    api.patch_status("python", &PatchParams::default(), &status)
        .await?;
    let scale = api.get_scale("python").await?;
    let (spec, status) = (scale.spec.unwrap_or_default(), scale.status.unwrap_or_default());
    ensure!(
        (spec.replicas, status.replicas, status.selector.as_deref()) == (Some(1), 3, Some("runtime=python")),
        "{spec:?} {status:?}"
    );
    let five = Patch::Merge(json!({ "spec": { "replicas": 5 } }));
    api.patch_scale("python", &PatchParams::default(), &five).await?;
    let scaled = api.get("python").await?;
    ensure!(scaled.data["spec"]["replicas"] == 5, "{:?}", scaled.data);
    Ok(())
}

/// C-2.3: what the watches of gateway and runtimed select by.
#[tokio::test]
async fn functions_can_be_selected_by_field() -> Result<()> {
    let (client, namespace) = namespace("select").await?;
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
        let found = api.list(&ListParams::default().fields(selector)).await?;
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
