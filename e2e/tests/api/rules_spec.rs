//! C-2: every validation and transition rule of a Run's spec, tried against a real API server: what it
//! accepts, and what it refuses by naming the field.

use anyhow::{Context as _, Result};
use kruntimes_api::Run;
use kruntimes_e2e::rules::{
    Verdict::{self, Accepted, Refused},
    check, dynamic, function, git, merged, namespace, object, shown, task,
};
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};

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

/// C-2: the table of `Run.spec`.
#[tokio::test]
async fn rules_at_creation() -> Result<()> {
    let (client, namespace) = namespace("create").await?;
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

/// C-2.1: everything but `cancelRequested` and `ttlSecondsAfterFinished` is frozen, adding and removing included.
#[tokio::test]
async fn rules_of_change() -> Result<()> {
    let (client, namespace) = namespace("change").await?;
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
