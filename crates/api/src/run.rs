//! `Run`: one program on one warm Pod, as a one-shot task or as a function that
//! stays registered and is called many times (C-2).
//!
//! Everything in `spec` but `cancelRequested` and `ttlSecondsAfterFinished` is
//! frozen at creation. The rules sit on `spec` as a whole: a rule on the field
//! itself would miss adding and removing it.

use std::collections::BTreeMap;

use k8s_openapi::{
    ByteString,
    apimachinery::pkg::apis::meta::v1::{Condition, MicroTime},
};
use kube::{CustomResource, KubeSchema, ResourceExt as _};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::{
    keys::{Attempt, PodUid, RunKey, RunUid},
    quantity::Resources,
};

/// Most key-value pairs `outputs` may have.
pub const OUTPUTS_MAX: usize = 64;
/// Longest `status.message`, bytes.
pub const MESSAGE_MAX: usize = 4096;

/// What to run, where, and within which bounds.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[kube(
    group = "kruntimes.io",
    version = "v1alpha1",
    kind = "Run",
    plural = "runs",
    shortname = "rn",
    category = "kruntimes",
    namespaced,
    status = "RunStatus",
    derive = "PartialEq",
    doc = "Run executes code on a warm Pod of a Runtime: once (task) or for every call (function).",
    selectable = ".spec.runtime",
    selectable = ".spec.mode.function.handler",
    selectable = ".status.phase",
    selectable = ".status.assignedPod",
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Runtime", type_ = "string", json_path = ".spec.runtime"),
    printcolumn(name = "Pod", type_ = "string", json_path = ".status.assignedPod"),
    printcolumn(name = "Attempt", type_ = "integer", json_path = ".status.attempt", priority = "1"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        priority = "1"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("!has(oldSelf.status) || has(self.status)").message("status cannot be removed"),
)]
#[x_kube(
    validation = Rule::new("self.runtime == oldSelf.runtime")
        .message("spec.runtime is frozen at creation; create a new Run").field_path(".runtime"),
    validation = Rule::new("has(self.source) == has(oldSelf.source) && (!has(self.source) || self.source == oldSelf.source)")
        .message("spec.source is frozen at creation; create a new Run").field_path(".source"),
    validation = Rule::new("self.mode == oldSelf.mode")
        .message("spec.mode is frozen at creation; create a new Run").field_path(".mode"),
    validation = Rule::new("has(self.env) == has(oldSelf.env) && (!has(self.env) || self.env == oldSelf.env)")
        .message("spec.env is frozen at creation; create a new Run").field_path(".env"),
    validation = Rule::new("has(self.resources) == has(oldSelf.resources) && (!has(self.resources) || self.resources == oldSelf.resources)")
        .message("spec.resources is frozen at creation; create a new Run").field_path(".resources"),
    validation = Rule::new("has(self.affinity) == has(oldSelf.affinity) && (!has(self.affinity) || self.affinity == oldSelf.affinity)")
        .message("spec.affinity is frozen at creation; create a new Run").field_path(".affinity"),
    validation = Rule::new("has(self.timeout) == has(oldSelf.timeout) && (!has(self.timeout) || self.timeout == oldSelf.timeout)")
        .message("spec.timeout is frozen at creation; create a new Run").field_path(".timeout"),
    validation = Rule::new("has(self.retryPolicy) == has(oldSelf.retryPolicy) && (!has(self.retryPolicy) || self.retryPolicy == oldSelf.retryPolicy)")
        .message("spec.retryPolicy is frozen at creation; create a new Run").field_path(".retryPolicy"),
    validation = Rule::new("!has(oldSelf.cancelRequested) || !oldSelf.cancelRequested || (has(self.cancelRequested) && self.cancelRequested)")
        .message("spec.cancelRequested cannot be taken back").field_path(".cancelRequested"),
    validation = Rule::new("!has(self.source) || !has(self.source.inlinePath) || (has(self.mode.function) && has(self.source.inline))")
        .message("spec.source.inlinePath is only for a function with inline source").field_path(".source.inlinePath"),
    validation = Rule::new("!has(self.mode.function) || !has(self.source) || !has(self.source.inline) || has(self.source.inlinePath)")
        .message("spec.source.inlinePath is required for a function with inline source; for example main.py").field_path(".source.inlinePath"),
)]
pub struct RunSpec {
    /// Name of the Runtime, in the Run's own namespace, whose Pods run this.
    #[schemars(
        length(min = 1, max = 50),
        regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    )]
    pub runtime: String,
    /// Where the code comes from. Without it the work directory is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Source>,
    /// Task or function.
    pub mode: Mode,
    /// Environment of the code. `FUNC_*`, `SERVER_*` and `KRUNTIME_*` belong to the platform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub env: Option<Vec<EnvVar>>,
    /// What the Run takes of a Pod's capacity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<RunResources>,
    /// Which Runs to be beside, or apart from, on one Runtime Pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub affinity: Option<Affinity>,
    /// Task: execution deadline of each attempt. Function: life of the reservation from
    /// `status.startTime`. A duration above zero, for example `90s` or `1h30m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    #[x_kube(validation = Rule::new(r"self.matches('^([0-9]+(\\.[0-9]+)?(ns|us|ms|s|m|h))+$') && duration(self) > duration('0s')")
        .message("spec.timeout must be a duration above zero, for example 90s or 1h30m"))]
    pub timeout: Option<String>,
    /// What happens after a failed attempt. Absent: a task has one attempt, a function ten.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_policy: Option<RetryPolicy>,
    /// Ends the Run as Cancelled. Cannot be taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cancel_requested: Option<bool>,
    /// Deletes the Run this many seconds after it ended. Stays mutable; absent keeps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub ttl_seconds_after_finished: Option<i32>,
}

/// Where the code comes from.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(has(self.inline) && has(self.repoURL))")
        .message("inline and repoURL exclude each other; give one of them").field_path(".repoURL"),
    validation = Rule::new("!has(self.commitSHA) || has(self.repoURL)")
        .message("commitSHA needs repoURL").field_path(".commitSHA"),
)]
pub struct Source {
    /// The program text itself, at most 256 KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 262_144))]
    pub inline: Option<String>,
    /// File the inline text is written to, relative to the work directory; for example `main.py`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    #[x_kube(validation = Rule::new(r"!self.matches('(^|/)(\\.{0,2})(/|$)') && !self.matches('[\\x00-\\x1f]')")
        .message("inlinePath must be relative, without an empty, `.` or `..` segment; for example main.py"))]
    pub inline_path: Option<String>,
    /// Git repository, https or ssh, without user information.
    #[serde(default, rename = "repoURL", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new(r"self.matches('^(https|ssh)://[^/@?#\\s]+(/[^\\s]*)?$')")
        .message("repoURL must begin with https:// or ssh:// and hold no user information"))]
    pub repo_url: Option<String>,
    /// Commit to check out: 40 or 64 hex digits.
    #[serde(default, rename = "commitSHA", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), regex(pattern = r"^([0-9a-f]{40}|[0-9a-f]{64})$"))]
    pub commit_sha: Option<String>,
}

/// Exactly one of task and function.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.task) != has(self.function)")
    .message("spec.mode needs exactly one of task and function"))]
pub struct Mode {
    /// Runs once and ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<TaskMode>,
    /// Stays registered and is called many times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub function: Option<FunctionMode>,
}

/// A program that runs once.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct TaskMode {
    /// File to run, relative to the work directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    #[x_kube(validation = Rule::new(r"!self.startsWith('/') && !self.matches('(^|/)\\.\\.(/|$)')")
        .message("entrypoint must be relative and hold no `..` segment"))]
    pub entrypoint: Option<String>,
    /// Arguments of the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256), inner(length(max = 8192)))]
    pub args: Option<Vec<String>>,
}

/// A function that is called over the gateway.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct FunctionMode {
    /// `file.function` or `pkg.module.function`.
    #[schemars(length(min = 3, max = 512))]
    #[x_kube(validation = Rule::new(r"self.matches('^[A-Za-z_][A-Za-z0-9_-]*(\\.[A-Za-z_][A-Za-z0-9_-]*)+$')")
        .message("handler must be file.function or pkg.module.function, for example main.handler"))]
    pub handler: String,
    /// Ends the Run as Timeout after this many seconds without a call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub idle_timeout_seconds: Option<i32>,
}

/// One environment entry.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.valueFrom)")
        .message("valueFrom is not supported; give value").field_path(".valueFrom"),
    validation = Rule::new("!self.name.matches('^(FUNC|SERVER|KRUNTIME)_')")
        .message("names that begin with FUNC_, SERVER_ or KRUNTIME_ are reserved").field_path(".name"),
)]
pub struct EnvVar {
    /// Name: letters, digits and underscores, not beginning with a digit.
    #[schemars(length(min = 1, max = 256), regex(pattern = r"^[A-Za-z_][A-Za-z0-9_]*$"))]
    pub name: String,
    /// Value, empty when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32_768))]
    pub value: Option<String>,
    /// Refused. Declared so that it is not pruned away in silence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "anything_object")]
    pub value_from: Option<serde_json::Value>,
}

/// What a Run takes of a Pod's capacity.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RunResources {
    /// Amounts by resource: `runs` (1 when absent), `cpu`, `memory`, `storage` and whatever the Runtime declares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxProperties" = 32))]
    #[x_kube(validation = Rule::new(QUANTITIES_RULE).message("requests must be quantities of at least 0, for example 1, 500m or 128Mi"))]
    pub requests: Option<Resources>,
}

/// CEL: every value of the map is a quantity of at least zero.
pub(crate) const QUANTITIES_RULE: &str = "self.all(k, type(self[k]) == int ? self[k] >= 0 : (isQuantity(self[k]) && !quantity(self[k]).isLessThan(quantity('0'))))";

/// Placement beside or apart from other Runs.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Affinity {
    /// Be on a Pod with these Runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_affinity: Option<AffinityTerms>,
    /// Be on a Pod without these Runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_anti_affinity: Option<AffinityTerms>,
}

/// Terms that must hold and terms that should.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AffinityTerms {
    /// Every term must hold when the Run is placed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub required_during_scheduling_ignored_during_execution: Option<Vec<AffinityTerm>>,
    /// Pods where more weight holds are preferred.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub preferred_during_scheduling_ignored_during_execution: Option<Vec<WeightedAffinityTerm>>,
}

/// Selects Runs of the same namespace by label.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AffinityTerm {
    /// Which Runs; not empty.
    #[x_kube(validation = Rule::new("(has(self.matchLabels) && size(self.matchLabels) > 0) || (has(self.matchExpressions) && size(self.matchExpressions) > 0)")
        .message("labelSelector must not be empty; give matchLabels or matchExpressions"))]
    pub label_selector: LabelSelector,
    /// What counts as one place: `kruntimes.io/runtime-pod`.
    #[schemars(extend("enum" = ["kruntimes.io/runtime-pod"]))]
    pub topology_key: String,
}

/// A preferred term.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct WeightedAffinityTerm {
    /// 1 to 100.
    #[schemars(range(min = 1, max = 100))]
    pub weight: i32,
    /// The term.
    pub run_affinity_term: AffinityTerm,
}

/// A label selector with bounds.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels with exactly these values.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxProperties" = 16), schema_with = "label_map")]
    pub match_labels: Option<BTreeMap<String, String>>,
    /// Further requirements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub match_expressions: Option<Vec<LabelRequirement>>,
}

/// One requirement of a label selector.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.operator in ['In', 'NotIn'] ? (has(self.values) && size(self.values) > 0) : (!has(self.values) || size(self.values) == 0)")
    .message("In and NotIn need values; Exists and DoesNotExist take none").field_path(".values"))]
pub struct LabelRequirement {
    /// Label key.
    #[schemars(length(min = 1, max = 317))]
    pub key: String,
    /// How the label is compared.
    pub operator: LabelOperator,
    /// Values for `In` and `NotIn`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), inner(length(max = 63)))]
    pub values: Option<Vec<String>>,
}

/// How a label is compared.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the words of Kubernetes label selectors")]
pub enum LabelOperator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

/// What happens after a failed attempt.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RetryPolicy {
    /// Attempts in all, the first included; 1 to 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100))]
    pub max_attempts: Option<i32>,
    /// Pause before the second attempt, 1 s when absent; doubles up to 60 s, ±20 %.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    #[x_kube(validation = Rule::new(r"self.matches('^([0-9]+(\\.[0-9]+)?(ns|us|ms|s|m|h))+$')")
        .message("spec.retryPolicy.backoff must be a duration, for example 500ms or 2s"))]
    pub backoff: Option<String>,
    /// Reasons that may be tried again; empty or absent: every reason but Cancelled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32), inner(length(min = 1, max = 128)))]
    pub retryable_reasons: Option<Vec<String>>,
}

/// What became of a Run; written by scheduler and runtimed only.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(oldSelf.phase) || !(oldSelf.phase in ['Succeeded', 'Failed', 'Timeout', 'Cancelled']) || (has(self.phase) && self.phase == oldSelf.phase)")
        .message("a phase that ended the Run never changes").field_path(".phase"),
    validation = Rule::new("!has(oldSelf.attempt) || (has(self.attempt) && self.attempt >= oldSelf.attempt)")
        .message("attempt never falls").field_path(".attempt"),
    validation = Rule::new("has(self.assignedPod) == has(self.assignedPodUID)")
        .message("assignedPod and assignedPodUID are set and cleared together").field_path(".assignedPodUID"),
    validation = Rule::new("!has(oldSelf.startTime) || (has(self.startTime) && self.startTime == oldSelf.startTime)")
        .message("startTime is set once").field_path(".startTime"),
)]
pub struct RunStatus {
    /// Summary for people; absent means Pending. Programs read conditions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// Pod that owns the Run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub assigned_pod: Option<String>,
    /// UID of that Pod: a name may be used again, a UID never.
    #[serde(default, rename = "assignedPodUID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub assigned_pod_uid: Option<String>,
    /// Where the owner listens and which key it has; set while Ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// How to call the function. Readiness is told by the condition, not by presence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<Endpoint>,
    /// Counts assignments from 1: the fence of the data path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub attempt: Option<i32>,
    /// The attempt whose owner confirmed that it holds the Run no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub released_attempt: Option<i32>,
    /// Attempts that failed and count against the retry policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub failed_attempts: Option<i32>,
    /// Not before this time is the next attempt assigned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after: Option<MicroTime>,
    /// When the Run was first claimed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<MicroTime>,
    /// When the Run ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<MicroTime>,
    /// What a task wrote to `KRUNTIME_OUTPUTS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxProperties" = 64))]
    pub outputs: Option<BTreeMap<String, String>>,
    /// Artifacts a task left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub artifact_refs: Option<Vec<ArtifactRef>>,
    /// One line for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub message: Option<String>,
    /// Scheduled, Running, Ready, Completed, Succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Option<Vec<Condition>>,
}

/// Where a Run stands.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Waits for a Pod.
    Pending,
    /// Has a Pod that has not claimed it yet.
    Scheduled,
    /// Is being prepared, registered or executed.
    Running,
    /// Is a function that can be called.
    Ready,
    /// A task ended well.
    Succeeded,
    /// Ended by failure.
    Failed,
    /// Ended by its lifetime, its deadline or its idle time.
    Timeout,
    /// Ended on request.
    Cancelled,
}

impl Phase {
    /// Whether the Run has ended for good.
    #[must_use]
    pub fn is_terminal(self) -> bool {
        matches!(
            self,
            Self::Succeeded | Self::Failed | Self::Timeout | Self::Cancelled
        )
    }

    /// Whether the Run takes capacity of its Pod.
    #[must_use]
    pub fn is_active(self) -> bool {
        matches!(self, Self::Scheduled | Self::Running | Self::Ready)
    }
}

/// The owning runtimed as the gateway must find it (C-4).
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Owner {
    /// IP address and port.
    #[schemars(length(min = 1, max = 64))]
    pub address: String,
    /// SHA-256 of its public key, lower-case hex.
    #[schemars(length(min = 64, max = 64), regex(pattern = "^[0-9a-f]{64}$"))]
    pub peer_key: String,
}

/// How to call the function.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Endpoint {
    /// HTTPS; HTTP is reserved.
    pub protocol: EndpointProtocol,
    /// The whole invoke URL.
    #[schemars(length(min = 1, max = 2048))]
    pub url: String,
    /// PEM bundle the gateway's certificate chains to, at most 16 KiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "ca_bundle")]
    pub ca_bundle: Option<ByteString>,
}

/// Protocol of an endpoint.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum EndpointProtocol {
    HTTP,
    HTTPS,
}

/// One artifact a task left in the Runtime's store.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct ArtifactRef {
    /// Name within the Run.
    #[schemars(length(min = 1, max = 255))]
    pub name: String,
    /// `filesystem` or `s3`.
    #[schemars(extend("enum" = ["filesystem", "s3"]))]
    pub driver: String,
    /// `file` or `directory`.
    #[serde(rename = "type")]
    #[schemars(extend("enum" = ["file", "directory", "archive", "blob"]))]
    pub kind: String,
    /// Where it is; the shape depends on the driver.
    #[schemars(schema_with = "anything_object")]
    pub location: serde_json::Value,
    /// Size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub size_bytes: Option<i64>,
    /// `sha256:` and hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub digest: Option<String>,
    /// Media type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 255))]
    pub content_type: Option<String>,
    /// When it was stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<MicroTime>,
}

impl Run {
    /// Namespace, name and UID; `None` for an object that never was in a cluster.
    #[must_use]
    pub fn key(&self) -> Option<RunKey> {
        Some(RunKey {
            namespace: self.namespace()?,
            name: self.metadata.name.clone()?,
            uid: self.run_uid()?,
        })
    }

    /// The UID; `None` for an object that never was in a cluster.
    #[must_use]
    pub fn run_uid(&self) -> Option<RunUid> {
        self.metadata.uid.as_deref()?.parse().ok()
    }

    /// The phase; absent means Pending.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.status
            .as_ref()
            .and_then(|status| status.phase)
            .unwrap_or(Phase::Pending)
    }

    /// The attempt; `None` before the first assignment.
    #[must_use]
    pub fn attempt(&self) -> Option<Attempt> {
        self.status.as_ref()?.attempt.and_then(Attempt::new)
    }

    /// Name and UID of the Pod that owns the Run.
    #[must_use]
    pub fn assignment(&self) -> Option<(&str, PodUid)> {
        let status = self.status.as_ref()?;
        Some((
            status.assigned_pod.as_deref()?,
            PodUid::new(status.assigned_pod_uid.as_deref()?)?,
        ))
    }

    /// The condition of this type.
    #[must_use]
    pub fn condition(&self, kind: &str) -> Option<&Condition> {
        self.status
            .as_ref()?
            .conditions
            .as_deref()?
            .iter()
            .find(|condition| condition.type_ == kind)
    }

    /// Whether the owner says that the function can be called.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.phase() == Phase::Ready
            && self
                .condition("Ready")
                .is_some_and(|ready| ready.status == "True")
    }

    /// Whether somebody asked to end the Run.
    #[must_use]
    pub fn cancel_requested(&self) -> bool {
        self.spec.cancel_requested.unwrap_or(false)
    }

    /// Whether the object is being deleted.
    #[must_use]
    pub fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }
}

fn anything_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

fn label_map(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties": { "type": "string", "maxLength": 63 }, "maxProperties": 16,
    })
}

fn ca_bundle(_: &mut SchemaGenerator) -> Schema {
    // 16 KiB in base64.
    json_schema!({ "type": "string", "format": "byte", "maxLength": 21848 })
}
