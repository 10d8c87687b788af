//! `Run`: one program on one warm Pod, as a one-shot task or as a function that
//! stays registered and is called many times (C-2).
//!
//! Everything in `spec` but `cancelRequested` and `ttlSecondsAfterFinished` is
//! frozen at creation. The rules sit on `spec` as a whole: a rule on the field
//! itself would miss adding and removing it.
//!
//! `affinity` holds the terms of placement, `outcome` the status.

mod affinity;
mod outcome;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema, ResourceExt as _};
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

pub use self::{
    affinity::{
        Affinity, AffinityTerm, AffinityTerms, LabelOperator, LabelRequirement, LabelSelector,
        WeightedAffinityTerm,
    },
    outcome::{ArtifactRef, Endpoint, EndpointProtocol, MESSAGE_MAX, Owner, Phase, RunStatus},
};

use crate::{
    keys::{Attempt, PodUid, RunKey, RunUid},
    quantity::Resources,
};

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

pub(crate) fn anything_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}
