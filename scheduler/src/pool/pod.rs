//! The Deployment of a pool and its Pods.
//!
//! The Runtime's template with the runtimed container, the volumes both share, and those that
//! only runtimed mounts: its token, its journal, the gateway's certificates (C-6.6). What the
//! template says and is not refused passes through.

use kruntimes_api::{
    Runtime, RuntimeSpec, names,
    runtime::{Container, OnCallerGone},
};
use serde_json::{Map, Value, json};

use super::{Config, USER, capacity, default, list, map, name, pod_labels, replicas};

/// Time that a Pod gets to end when its template names none: the 300 s a call may take, and some.
const GRACE_SECONDS: i64 = 330;
/// What runtimed keeps of it for the kubelet and for itself.
const GRACE_MARGIN_SECONDS: i64 = 30;
pub(super) const CONTAINER_RUNTIMED: &str = "runtimed";
const VOLUME_RUN: &str = "kruntimes-run";
pub(super) const VOLUME_WORKSPACE: &str = "workspace";
const VOLUME_JOURNAL: &str = "kruntimes-journal";
const VOLUME_TOKEN: &str = "kruntimes-token";
const VOLUME_GATEWAY: &str = "kruntimes-gateway";
pub(super) const RESERVED_VOLUMES: [&str; 5] = [
    VOLUME_RUN,
    VOLUME_WORKSPACE,
    VOLUME_JOURNAL,
    VOLUME_TOKEN,
    VOLUME_GATEWAY,
];

/// Spec of the Deployment. `with_replicas`: whether the number of Pods is ours to say.
pub(super) fn deployment(runtime: &Runtime, config: &Config, account: &str, with_replicas: bool) -> Value {
    let spec = &runtime.spec;
    let mut pod: Map<String, Value> = spec.template.spec.rest.clone().into_iter().collect();
    let grace = pod
        .get("terminationGracePeriodSeconds")
        .and_then(Value::as_i64)
        .unwrap_or(GRACE_SECONDS);
    pod.insert("terminationGracePeriodSeconds".to_owned(), json!(grace));
    pod.remove("serviceAccount");
    pod.insert("serviceAccountName".to_owned(), json!(account));
    // The token is in a volume that only runtimed mounts; code of functions never sees it.
    pod.insert("automountServiceAccountToken".to_owned(), json!(false));
    // The variables of Services could be taken for flags (KRUNTIMES_…) or settings (SERVER_…).
    default(&mut pod, "enableServiceLinks", json!(false));
    let mut security = map(pod.get("securityContext"));
    default(&mut security, "runAsNonRoot", json!(true));
    default(&mut security, "runAsUser", json!(USER));
    default(&mut security, "runAsGroup", json!(USER));
    default(&mut security, "fsGroup", json!(USER));
    default(
        &mut security,
        "seccompProfile",
        json!({ "type": "RuntimeDefault" }),
    );
    pod.insert("securityContext".to_owned(), Value::Object(security));
    let mut volumes: Vec<Value> = list(pod.get("volumes")).cloned().collect();
    volumes.extend(our_volumes(spec));
    pod.insert("volumes".to_owned(), Value::Array(volumes));

    let mut containers = Vec::new();
    for (at, container) in spec.template.spec.containers.iter().enumerate() {
        containers.push(if at == 0 {
            runtime_container(spec, container, config)
        } else {
            plain_container(container)
        });
    }
    containers.push(runtimed_container(runtime, config, grace));
    pod.insert("containers".to_owned(), Value::Array(containers));

    let template = spec.template.metadata.clone().unwrap_or_default();
    let mut labels = template.labels.unwrap_or_default();
    labels.extend(pod_labels(runtime));
    let mut annotations = template.annotations.unwrap_or_default();
    // A template cannot claim more than the Runtime declares.
    annotations.retain(|name, _| !name.starts_with(names::CAPACITY_PREFIX));
    for (resource, amount) in capacity(spec) {
        annotations.insert(
            format!("{}{resource}", names::CAPACITY_PREFIX),
            amount.to_string(),
        );
    }
    let mut deployment = json!({
        "selector": { "matchLabels": pod_labels(runtime) },
        "strategy": { "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": 0, "maxSurge": 1 } },
        "template": { "metadata": { "labels": labels, "annotations": annotations }, "spec": pod },
    });
    if with_replicas {
        deployment["replicas"] = json!(replicas(spec));
    }
    json!({ "spec": deployment })
}

fn our_volumes(spec: &RuntimeSpec) -> Vec<Value> {
    let mut workspace = map(spec.workspace.as_ref());
    if workspace.is_empty() {
        workspace.insert("emptyDir".to_owned(), json!({}));
    }
    workspace.insert("name".to_owned(), json!(VOLUME_WORKSPACE));
    let token = json!({ "sources": [
        { "serviceAccountToken": { "path": "token", "expirationSeconds": 3600 } },
        { "configMap": { "name": "kube-root-ca.crt", "items": [{ "key": "ca.crt", "path": "ca.crt" }] } },
        { "downwardAPI": { "items": [{ "path": "namespace", "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.namespace" } }] } },
    ] });
    vec![
        json!({ "name": VOLUME_RUN, "emptyDir": {} }),
        Value::Object(workspace),
        json!({ "name": VOLUME_JOURNAL, "emptyDir": {} }),
        json!({ "name": VOLUME_TOKEN, "projected": token }),
        json!({ "name": VOLUME_GATEWAY, "configMap": { "name": names::CONFIGMAP_GATEWAY, "optional": true } }),
    ]
}

/// The tenant's container, with the shared volumes, restricted where it says nothing.
fn runtime_container(spec: &RuntimeSpec, container: &Container, config: &Config) -> Value {
    let mut value = map(Some(&plain_container(container)));
    let mut mounts: Vec<Value> = list(value.get("volumeMounts")).cloned().collect();
    mounts.push(json!({ "name": VOLUME_RUN, "mountPath": "/run/kruntimes" }));
    mounts.push(json!({ "name": VOLUME_WORKSPACE, "mountPath": "/workspace" }));
    value.insert("volumeMounts".to_owned(), Value::Array(mounts));
    let mut security = map(value.get("securityContext"));
    default(&mut security, "allowPrivilegeEscalation", json!(false));
    default(&mut security, "capabilities", json!({ "drop": ["ALL"] }));
    value.insert("securityContext".to_owned(), Value::Object(security));
    if let Some(invocation) = &spec.invocation {
        let mut env: Vec<Value> = list(value.get("env")).cloned().collect();
        let mut say = |name: &str, said: &str| {
            env.retain(|it| it.get("name").and_then(Value::as_str) != Some(name));
            env.push(json!({ "name": name, "value": said }));
        };
        if let Some(gone) = invocation.on_caller_gone {
            say(
                "SERVER_ON_CALLER_GONE",
                match gone {
                    OnCallerGone::Cancel => "Cancel",
                    OnCallerGone::Finish => "Finish",
                },
            );
        }
        if let Some(expose) = invocation.expose_errors {
            say("SERVER_EXPOSE_ERRORS", if expose { "true" } else { "false" });
        }
        value.insert("env".to_owned(), Value::Array(env));
    }
    let own: Vec<Value> = list(value.get("env")).cloned().collect();
    let named = |name: &str| {
        own.iter()
            .any(|it| it.get("name").and_then(Value::as_str) == Some(name))
    };
    let more: Vec<Value> = otel(config)
        .filter(|it| !it["name"].as_str().is_some_and(named))
        .collect();
    if !more.is_empty() {
        value.insert("env".to_owned(), Value::Array([own, more].concat()));
    }
    Value::Object(value)
}

/// Where spans go, as the operator says.
fn otel(config: &Config) -> impl Iterator<Item = Value> {
    config
        .otel
        .iter()
        .map(|(name, value)| json!({ "name": name, "value": value }))
}

fn plain_container(container: &Container) -> Value {
    let mut value: Map<String, Value> = container.rest.clone().into_iter().collect();
    value.insert("name".to_owned(), json!(container.name));
    if let Some(image) = &container.image {
        value.insert("image".to_owned(), json!(image));
    }
    Value::Object(value)
}

fn runtimed_container(runtime: &Runtime, config: &Config, grace: i64) -> Value {
    let spec = &runtime.spec;
    let server = spec.port.map_or_else(
        || "unix:///run/kruntimes/runtime.sock".to_owned(),
        |port| format!("http://127.0.0.1:{port}"),
    );
    let capacity = capacity(spec)
        .iter()
        .map(|(name, it)| format!("{name}={it}"))
        .collect::<Vec<_>>()
        .join(",");
    let mut args = vec![
        format!("--server={server}"),
        format!("--capacity={capacity}"),
        format!("--grace-period={}s", (grace - GRACE_MARGIN_SECONDS).max(1)),
    ];
    args.extend(config.extra_args.iter().cloned());
    let expose = spec.invocation.as_ref().and_then(|it| it.expose_errors);
    let expose =
        (expose == Some(true)).then(|| json!({ "name": "KRUNTIMES_EXPOSE_ERRORS", "value": "true" }));
    let field = |name: &str, path: &str| json!({ "name": name, "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": path } } });
    let probe = |path: &str, period: i32| json!({ "httpGet": { "path": path, "port": "admin" }, "periodSeconds": period, "timeoutSeconds": 5 });
    let mut env = vec![
        field("KRUNTIMES_NAMESPACE", "metadata.namespace"),
        field("KRUNTIMES_POD_NAME", "metadata.name"),
        field("KRUNTIMES_POD_UID", "metadata.uid"),
        field("KRUNTIMES_POD_IP", "status.podIP"),
        json!({ "name": "KRUNTIMES_RUNTIME", "value": name(runtime) }),
    ];
    env.extend(expose);
    env.extend(otel(config));
    json!({
        "name": CONTAINER_RUNTIMED,
        "image": config.image,
        "imagePullPolicy": config.pull_policy.as_str(),
        "args": args,
        "env": env,
        "ports": [
            { "name": "hop", "containerPort": names::PORT_HOP, "protocol": "TCP" },
            { "name": "admin", "containerPort": names::PORT_ADMIN, "protocol": "TCP" },
        ],
        "livenessProbe": probe("/livez", 10),
        "readinessProbe": probe("/readyz", 2),
        // No CPU limit: a throttled sidecar is a slow hop for every function of the Pod.
        "resources": { "requests": { "cpu": "20m", "memory": "32Mi" }, "limits": { "memory": "512Mi" } },
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": { "drop": ["ALL"] },
            "privileged": false,
            "readOnlyRootFilesystem": true,
            "runAsNonRoot": true,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        "volumeMounts": [
            { "name": VOLUME_RUN, "mountPath": "/run/kruntimes" },
            { "name": VOLUME_WORKSPACE, "mountPath": "/workspace" },
            { "name": VOLUME_JOURNAL, "mountPath": "/var/lib/kruntimes" },
            { "name": VOLUME_TOKEN, "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true },
            { "name": VOLUME_GATEWAY, "mountPath": "/etc/kruntimes/gateway", "readOnly": true },
        ],
    })
}
