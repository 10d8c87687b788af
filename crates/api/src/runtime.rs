//! `Runtime`: a pool of warm Pods that can run one kind of code (C-2).

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    quantity::Resources,
    run::{QUANTITIES_RULE, anything_object},
};

/// Pods of a Runtime that names no number.
pub const DEFAULT_REPLICAS: i32 = 1;
/// Runs a Pod holds at once when the Runtime names no number.
pub const DEFAULT_RUNS: u64 = 2;

/// How the Pods of a pool look and what they can hold.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "kruntimes.io",
    version = "v1alpha1",
    kind = "Runtime",
    plural = "runtimes",
    shortname = "rt",
    category = "kruntimes",
    namespaced,
    status = "RuntimeStatus",
    derive = "PartialEq",
    doc = "Runtime is a pool of warm Pods that run the code of Runs.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(name = "Replicas", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(name = "Available", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        priority = "1"
    ),
    printcolumn(name = "Image", type_ = "string", json_path = ".spec.template.spec.containers[0].image", priority = "1"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name.size() <= 50 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')")
        .message("metadata.name of a Runtime must be a DNS label of at most 50 characters"),
)]
pub struct RuntimeSpec {
    /// The Pods. The first container is named `runtime`; the others are passed through.
    pub template: PodTemplate,
    /// Set: the server speaks gRPC on this port of the Pod's loopback. Unset: on a Unix socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    #[x_kube(validation = Rule::new("!(self in [9090, 9443])").message("spec.port must not be 9090 or 9443: runtimed listens there"))]
    pub port: Option<i32>,
    /// Pods in the pool; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub replicas: Option<i32>,
    /// What each Pod can hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Capacity>,
    /// The volume mounted at /workspace, as in a Pod; an emptyDir when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "anything_object")]
    pub workspace: Option<Value>,
    /// Where artifacts of tasks go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "anything_object")]
    pub artifact_store: Option<Value>,
    /// How calls behave.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub invocation: Option<Invocation>,
    /// Whether a Pod is replaced after a Run. Only `Never` is supported yet; another value is not accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recycle: Option<Recycle>,
    /// Who places Runs: kruntimes on Pods, or the Runtime Server itself. Only `Pods` is supported yet; another
    /// value is not accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduling: Option<Scheduling>,
}

/// A Pod template whose schema stays small: what is not named here passes through.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PodTemplate {
    /// Labels and annotations of the Pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<TemplateMetadata>,
    /// The Pods themselves.
    pub spec: PodSpec,
}

/// Labels and annotations.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct TemplateMetadata {
    /// Labels of the Pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Annotations of the Pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
}

/// A Pod spec of which only the containers are typed.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[x_kube(validation = Rule::new("self.containers[0].name == 'runtime'")
    .message("the first container of spec.template.spec.containers must be named runtime"))]
pub struct PodSpec {
    /// The first is named `runtime`; it runs the Runtime Server.
    #[schemars(length(min = 1, max = 16))]
    pub containers: Vec<Container>,
    /// Every other field of a Pod spec.
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

/// A container of which only name and image are typed.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct Container {
    /// Name; the first is `runtime`.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// Image reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 2048))]
    pub image: Option<String>,
    /// Every other field of a container.
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

/// What one Pod can hold.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Capacity {
    /// Amounts by resource. `runs` is 2 when absent; `cpu`, `memory` and `storage`
    /// come from the runtime container's limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxProperties" = 32))]
    #[x_kube(validation = Rule::new(QUANTITIES_RULE).message("capacity must be quantities of at least 0, for example 2, 500m or 1Gi"))]
    pub resources: Option<Resources>,
}

/// How calls behave.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Invocation {
    /// What happens to a call whose caller went away; Cancel when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_caller_gone: Option<OnCallerGone>,
    /// Whether callers see type and message of what a function raised; false when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expose_errors: Option<bool>,
}

/// What happens to a call whose caller went away.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnCallerGone {
    /// The call is ended.
    #[default]
    Cancel,
    /// The call goes on; its answer is dropped.
    Finish,
}

/// Whether a Pod is replaced after a Run.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recycle {
    /// Pods stay.
    #[default]
    Never,
    /// A Pod that held a Run is replaced when the Run is gone.
    AfterRun,
}

/// Who places Runs.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scheduling {
    /// kruntimes places Runs on Pods.
    #[default]
    Pods,
    /// The Runtime Server hands Runs to a system of its own.
    RuntimeServer,
}

/// What became of a pool.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeStatus {
    /// Generation the status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Pods that exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Pods that are ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<i32>,
    /// Label selector of the Pods, for the scale subresource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub selector: Option<String>,
    /// Accepted, Ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Option<Vec<Condition>>,
}
