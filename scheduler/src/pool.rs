//! Runtime → the objects its pool needs (C-7.2), or why there will be none.
//!
//! The Deployment's Pods are the Runtime's template with the runtimed container, the volumes
//! both share, and those that only runtimed mounts: its token, its journal, the gateway's
//! certificates (C-6.6). What the template says and is not refused passes through.

pub mod apply;

use std::collections::BTreeMap;

use kruntimes_api::{
    Runtime, RuntimeSpec, names,
    quantity::Amount,
    runtime::{Container, DEFAULT_REPLICAS, DEFAULT_RUNS, OnCallerGone},
};
use serde_json::{Map, Value, json};

use crate::{args::PullPolicy, facts::Amounts};

/// Label of every object made here.
pub const LABEL_MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "kruntimes-scheduler");

/// User and group of both containers: the owner of a 0700 directory must be able to delete it.
const USER: i64 = 65532;
/// Time that a Pod gets to end when its template names none: the 300 s a call may take, and some.
const GRACE_SECONDS: i64 = 330;
/// What runtimed keeps of it for the kubelet and for itself.
const GRACE_MARGIN_SECONDS: i64 = 30;
const CONTAINER_RUNTIMED: &str = "runtimed";
const VOLUME_RUN: &str = "kruntimes-run";
const VOLUME_WORKSPACE: &str = "workspace";
const VOLUME_JOURNAL: &str = "kruntimes-journal";
const VOLUME_TOKEN: &str = "kruntimes-token";
const VOLUME_GATEWAY: &str = "kruntimes-gateway";
const RESERVED_VOLUMES: [&str; 5] = [
    VOLUME_RUN,
    VOLUME_WORKSPACE,
    VOLUME_JOURNAL,
    VOLUME_TOKEN,
    VOLUME_GATEWAY,
];

/// What the operator decides for every pool.
#[derive(Debug, Clone)]
pub struct Config {
    pub image: String,
    pub pull_policy: PullPolicy,
    pub cluster_role: String,
    pub gateway_namespace: String,
    pub extra_args: Vec<String>,
}

/// Why a Runtime gets no pool; the reason and message of its Accepted condition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub reason: &'static str,
    pub message: String,
}

/// One object to apply.
#[derive(Debug, Clone, PartialEq)]
pub struct Object {
    pub kind: Kind,
    pub value: Value,
}

/// Kinds that a pool is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    ServiceAccount,
    RoleBinding,
    Service,
    NetworkPolicy,
    ConfigMap,
    Deployment,
}

/// Everything of one Runtime but the ConfigMap, in the order to apply. `replicas`: whether the
/// number of Pods is still ours to say.
///
/// # Errors
/// When the template asks for what is refused (C-2).
pub fn objects(runtime: &Runtime, config: &Config, replicas: bool) -> Result<Vec<Object>, Refusal> {
    refuse(&runtime.spec)?;
    let mut objects = Vec::new();
    let account = template_account(&runtime.spec).map_or_else(|| pool_name(runtime), str::to_owned);
    if template_account(&runtime.spec).is_none() {
        objects.push(Object {
            kind: Kind::ServiceAccount,
            value: object(
                runtime,
                "v1",
                "ServiceAccount",
                json!({ "automountServiceAccountToken": false }),
            ),
        });
    }
    let binding = json!({
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": config.cluster_role },
        "subjects": [{ "kind": "ServiceAccount", "name": account, "namespace": namespace(runtime) }],
    });
    objects.push(Object {
        kind: Kind::RoleBinding,
        value: object(runtime, "rbac.authorization.k8s.io/v1", "RoleBinding", binding),
    });
    objects.push(Object {
        kind: Kind::Service,
        value: object(runtime, "v1", "Service", service(runtime)),
    });
    objects.push(Object {
        kind: Kind::NetworkPolicy,
        value: object(
            runtime,
            "networking.k8s.io/v1",
            "NetworkPolicy",
            network_policy(runtime, config),
        ),
    });
    let deployment = deployment(runtime, config, &account, replicas);
    objects.push(Object {
        kind: Kind::Deployment,
        value: object(runtime, "apps/v1", "Deployment", deployment),
    });
    Ok(objects)
}

/// The ConfigMap of a namespace, owned by every Runtime there: it goes with the last one.
pub fn config_map(namespace: &str, runtimes: &[&Runtime], data: &BTreeMap<String, String>) -> Object {
    let value = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": names::CONFIGMAP_GATEWAY,
            "namespace": namespace,
            "labels": { LABEL_MANAGED_BY.0: LABEL_MANAGED_BY.1 },
            "ownerReferences": runtimes.iter().map(|it| owner(it, false)).collect::<Vec<_>>(),
        },
        "data": data,
    });
    Object {
        kind: Kind::ConfigMap,
        value,
    }
}

/// What each Pod can hold: as declared, with `runs` 2 and the rest from the runtime container's
/// limits (C-2). Admission refuses what is no quantity; what gets past it is left out.
pub fn capacity(spec: &RuntimeSpec) -> Amounts {
    let declared = spec.capacity.as_ref().and_then(|it| it.resources.as_ref());
    let mut capacity: Amounts = declared
        .into_iter()
        .flatten()
        .filter_map(|(name, it)| Some((name.clone(), it.amount().ok()?)))
        .collect();
    let limits = spec
        .template
        .spec
        .containers
        .first()
        .and_then(|it| it.rest.get("resources")?.get("limits"));
    for (resource, limit) in [
        ("cpu", "cpu"),
        ("memory", "memory"),
        ("storage", "ephemeral-storage"),
    ] {
        let Some(amount) = limits.and_then(|it| quantity(it.get(limit)?)) else {
            continue;
        };
        capacity.entry(resource.to_owned()).or_insert(amount);
    }
    capacity
        .entry(names::RESOURCE_RUNS.to_owned())
        .or_insert(Amount::whole(DEFAULT_RUNS));
    capacity
}

/// Pods that the pool shall have.
pub fn replicas(spec: &RuntimeSpec) -> i32 {
    spec.replicas.unwrap_or(DEFAULT_REPLICAS)
}

/// Label selector of the pool's Pods, as the scale subresource wants it.
pub fn selector_text(name: &str) -> String {
    format!(
        "{}={},{}={name}",
        names::LABEL_APP,
        names::app_label(name),
        names::LABEL_RUNTIME
    )
}

// === refusals ===

fn refuse(spec: &RuntimeSpec) -> Result<(), Refusal> {
    let refusal = |reason, message: String| Err(Refusal { reason, message });
    let pod = &spec.template.spec.rest;
    let on = |field: &str| pod.get(field).and_then(Value::as_bool) == Some(true);
    for field in ["hostNetwork", "hostPID", "hostIPC"] {
        if on(field) {
            return refusal(
                "HostNamespace",
                format!(
                    "spec.template.spec.{field} is refused: a pool shares no namespace with its node; remove it"
                ),
            );
        }
    }
    if on("shareProcessNamespace") {
        return refusal(
            "SharedProcessNamespace",
            "spec.template.spec.shareProcessNamespace is refused: functions would see runtimed; remove it"
                .to_owned(),
        );
    }
    for (at, volume) in list(pod.get("volumes")).enumerate() {
        let name = volume.get("name").and_then(Value::as_str).unwrap_or_default();
        if volume.get("hostPath").is_some() {
            return refusal(
                "HostPath",
                format!("spec.template.spec.volumes[{at}].hostPath is refused; use another kind of volume"),
            );
        }
        if RESERVED_VOLUMES.contains(&name) {
            return refusal(
                "ReservedName",
                format!("spec.template.spec.volumes[{at}].name {name} is reserved; choose another"),
            );
        }
    }
    if spec
        .workspace
        .as_ref()
        .is_some_and(|it| it.get("hostPath").is_some())
    {
        return refusal(
            "HostPath",
            "spec.workspace.hostPath is refused; use another kind of volume".to_owned(),
        );
    }
    let init = list(pod.get("initContainers")).filter_map(|it| it.get("name").and_then(Value::as_str));
    let own = spec.template.spec.containers.iter().map(|it| it.name.as_str());
    if own.chain(init).any(|name| name == CONTAINER_RUNTIMED) {
        return refusal(
            "ReservedName",
            "spec.template.spec holds a container named runtimed, which is reserved; choose another name"
                .to_owned(),
        );
    }
    let runtimes = spec
        .template
        .spec
        .containers
        .iter()
        .filter(|it| it.name == "runtime")
        .count();
    if runtimes != 1
        || spec
            .template
            .spec
            .containers
            .first()
            .is_none_or(|it| it.name != "runtime")
    {
        return refusal(
            "NoRuntimeContainer",
            "the first container of spec.template.spec.containers must be named runtime".to_owned(),
        );
    }
    if list(pod.get("ephemeralContainers")).next().is_some() {
        return refusal(
            "EphemeralContainers",
            "spec.template.spec.ephemeralContainers is refused; remove it".to_owned(),
        );
    }
    if pod
        .get("restartPolicy")
        .and_then(Value::as_str)
        .is_some_and(|it| it != "Always")
    {
        return refusal(
            "RestartPolicy",
            "spec.template.spec.restartPolicy must be Always or absent".to_owned(),
        );
    }
    let group = pod
        .get("securityContext")
        .and_then(|it| it.get("fsGroup"))
        .and_then(Value::as_i64);
    if group.is_some_and(|it| it != USER) {
        return refusal(
            "ReservedGroup",
            format!(
                "spec.template.spec.securityContext.fsGroup must be {USER} or absent: runtimed reads its token as that group"
            ),
        );
    }
    Ok(())
}

// === the Deployment ===

fn deployment(runtime: &Runtime, config: &Config, account: &str, with_replicas: bool) -> Value {
    let spec = &runtime.spec;
    let mut pod: Map<String, Value> = spec.template.spec.rest.clone().into_iter().collect();
    let grace = pod
        .get("terminationGracePeriodSeconds")
        .and_then(Value::as_i64)
        .unwrap_or(GRACE_SECONDS);
    pod.insert("terminationGracePeriodSeconds".to_owned(), json!(grace));
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
            runtime_container(spec, container)
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
fn runtime_container(spec: &RuntimeSpec, container: &Container) -> Value {
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
    Value::Object(value)
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
    let field = |name: &str, path: &str| json!({ "name": name, "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": path } } });
    let probe = |path: &str, period: i32| json!({ "httpGet": { "path": path, "port": "admin" }, "periodSeconds": period, "timeoutSeconds": 5 });
    json!({
        "name": CONTAINER_RUNTIMED,
        "image": config.image,
        "imagePullPolicy": config.pull_policy.as_str(),
        "args": args,
        "env": [
            field("KRUNTIMES_NAMESPACE", "metadata.namespace"),
            field("KRUNTIMES_POD_NAME", "metadata.name"),
            field("KRUNTIMES_POD_UID", "metadata.uid"),
            field("KRUNTIMES_POD_IP", "status.podIP"),
            { "name": "KRUNTIMES_RUNTIME", "value": name(runtime) },
        ],
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

// === the smaller objects ===

fn service(runtime: &Runtime) -> Value {
    json!({ "spec": {
        "clusterIP": "None",
        "selector": pod_labels(runtime),
        "ports": [{ "name": "hop", "port": names::PORT_HOP, "targetPort": "hop", "protocol": "TCP" }],
    } })
}

/// Nothing reaches the Pods but gateways on the hop and scrapers on the metrics.
fn network_policy(runtime: &Runtime, config: &Config) -> Value {
    json!({ "spec": {
        "podSelector": { "matchLabels": pod_labels(runtime) },
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [{ "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": config.gateway_namespace } } }],
                "ports": [{ "port": names::PORT_HOP, "protocol": "TCP" }],
            },
            { "from": [{ "namespaceSelector": {} }], "ports": [{ "port": names::PORT_ADMIN, "protocol": "TCP" }] },
        ],
    } })
}

/// Names, labels and owner that every object of a pool has.
fn object(runtime: &Runtime, api_version: &str, kind: &str, body: Value) -> Value {
    let mut labels = pod_labels(runtime);
    labels.insert(LABEL_MANAGED_BY.0.to_owned(), LABEL_MANAGED_BY.1.to_owned());
    let mut object = map(Some(&body));
    object.insert("apiVersion".to_owned(), json!(api_version));
    object.insert("kind".to_owned(), json!(kind));
    object.insert(
        "metadata".to_owned(),
        json!({
            "name": pool_name(runtime),
            "namespace": namespace(runtime),
            "labels": labels,
            "ownerReferences": [owner(runtime, true)],
        }),
    );
    Value::Object(object)
}

fn owner(runtime: &Runtime, controller: bool) -> Value {
    let mut owner = json!({
        "apiVersion": format!("{}/{}", names::GROUP, names::VERSION),
        "kind": "Runtime",
        "name": name(runtime),
        "uid": runtime.metadata.uid,
    });
    if controller {
        owner["controller"] = json!(true);
    }
    owner
}

fn pod_labels(runtime: &Runtime) -> BTreeMap<String, String> {
    BTreeMap::from([
        (names::LABEL_RUNTIME.to_owned(), name(runtime).to_owned()),
        (names::LABEL_APP.to_owned(), names::app_label(name(runtime))),
    ])
}

fn name(runtime: &Runtime) -> &str {
    runtime.metadata.name.as_deref().unwrap_or_default()
}

fn namespace(runtime: &Runtime) -> &str {
    runtime.metadata.namespace.as_deref().unwrap_or_default()
}

fn pool_name(runtime: &Runtime) -> String {
    names::pool(name(runtime))
}

fn template_account(spec: &RuntimeSpec) -> Option<&str> {
    spec.template
        .spec
        .rest
        .get("serviceAccountName")
        .and_then(Value::as_str)
        .filter(|it| !it.is_empty())
}

fn quantity(value: &Value) -> Option<Amount> {
    match value {
        Value::String(text) => text.parse().ok(),
        Value::Number(number) => number.to_string().parse().ok(),
        _ => None,
    }
}

fn list(value: Option<&Value>) -> impl Iterator<Item = &Value> {
    value.and_then(Value::as_array).into_iter().flatten()
}

fn map(value: Option<&Value>) -> Map<String, Value> {
    value.and_then(Value::as_object).cloned().unwrap_or_default()
}

fn default(map: &mut Map<String, Value>, key: &str, value: Value) {
    map.entry(key.to_owned()).or_insert(value);
}

#[cfg(test)]
mod tests;
