//! `spec.affinity`: which Runs to be beside, or apart from, on one Runtime Pod.

use std::collections::BTreeMap;

use kube::KubeSchema;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

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

fn label_map(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties": { "type": "string", "maxLength": 63 }, "maxProperties": 16,
    })
}
