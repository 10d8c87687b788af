//! `status` of a Run: where it stands, who owns it, how it is called, how it ended (C-2.2).

use std::collections::BTreeMap;

use k8s_openapi::{
    ByteString,
    apimachinery::pkg::apis::meta::v1::{Condition, MicroTime},
};
use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::anything_object;

/// Longest `status.message`, bytes.
pub const MESSAGE_MAX: usize = 4096;

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

fn ca_bundle(_: &mut SchemaGenerator) -> Schema {
    // 16 KiB in base64.
    json_schema!({ "type": "string", "format": "byte", "maxLength": 21848 })
}
