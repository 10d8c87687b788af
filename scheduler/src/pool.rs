//! Runtime → the objects its pool needs (C-7.2), or why there will be none.
//!
//! [`pod`] writes the Deployment and its Pods, [`refuse`] says what a template may not have,
//! [`apply`] brings the objects into the cluster, `roll` says when a template may change, and `report`
//! tells what became of it.

pub mod apply;
mod pod;
mod refuse;
pub(crate) mod report;
pub(crate) mod roll;

use std::collections::BTreeMap;

use kruntimes_api::{
    Runtime, RuntimeSpec, names,
    quantity::Amount,
    runtime::{DEFAULT_REPLICAS, DEFAULT_RUNS},
};
use serde_json::{Map, Value, json};

use crate::{
    args::PullPolicy,
    facts::{ANNOTATION_TEMPLATE, Amounts, DeploymentFacts},
};

/// Label of every object made here.
pub const LABEL_MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "kruntimes-scheduler");

/// User and group of both containers: the owner of a 0700 directory must be able to delete it.
const USER: i64 = 65532;

/// What the operator decides for every pool.
#[derive(Debug, Clone)]
pub struct Config {
    pub image: String,
    pub pull_policy: PullPolicy,
    pub cluster_role: String,
    pub gateway_namespace: String,
    pub extra_args: Vec<String>,
    /// Egress rules of every pool, a list; `None`: egress is free.
    pub egress: Option<Value>,
    /// OpenTelemetry's variables of every Pod: name and value.
    pub otel: Vec<(String, String)>,
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
    refuse::refuse(&runtime.spec)?;
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
    let deployment = pod::deployment(runtime, config, &account, replicas);
    let template = digest(&deployment["spec"]["template"]);
    let mut deployment = object(runtime, "apps/v1", "Deployment", deployment);
    deployment["metadata"]["annotations"] = json!({ ANNOTATION_TEMPLATE: template });
    objects.push(Object {
        kind: Kind::Deployment,
        value: deployment,
    });
    Ok(objects)
}

// === impl Object ===

impl Object {
    /// Whether applying this Deployment replaces the Pods of the one that is there.
    pub(crate) fn rolls(&self, live: Option<&DeploymentFacts>) -> bool {
        let wanted = self
            .value
            .pointer("/metadata/annotations")
            .and_then(|it| it.get(ANNOTATION_TEMPLATE)?.as_str());
        live.and_then(|it| it.template.as_deref())
            .is_some_and(|known| Some(known) != wanted)
    }
}

/// The same for equal templates, whoever computes it: maps of `serde_json` are ordered.
fn digest(template: &Value) -> String {
    let digest = ring::digest::digest(&ring::digest::SHA256, template.to_string().as_bytes());
    digest.as_ref()[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
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

// === the smaller objects ===

fn service(runtime: &Runtime) -> Value {
    json!({ "spec": {
        "clusterIP": "None",
        "selector": pod_labels(runtime),
        "ports": [{ "name": "hop", "port": names::PORT_HOP, "targetPort": "hop", "protocol": "TCP" }],
    } })
}

/// Nothing reaches the Pods but gateways on the hop and scrapers on the metrics; what they may reach is the
/// operator's to say.
fn network_policy(runtime: &Runtime, config: &Config) -> Value {
    let mut spec = json!({
        "podSelector": { "matchLabels": pod_labels(runtime) },
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [{ "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": config.gateway_namespace } } }],
                "ports": [{ "port": names::PORT_HOP, "protocol": "TCP" }],
            },
            { "from": [{ "namespaceSelector": {} }], "ports": [{ "port": names::PORT_ADMIN, "protocol": "TCP" }] },
        ],
    });
    if let Some(egress) = &config.egress {
        spec["policyTypes"] = json!(["Ingress", "Egress"]);
        spec["egress"] = egress.clone();
    }
    json!({ "spec": spec })
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
    // The second is the old name of the first.
    let named = |field: &str| spec.template.spec.rest.get(field).and_then(Value::as_str);
    named("serviceAccountName")
        .or_else(|| named("serviceAccount"))
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
