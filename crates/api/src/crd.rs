//! The CRDs, as the chart ships them and as people may install them by hand.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray, JSONSchemaPropsOrBool,
};
use kube::CustomResourceExt as _;

use crate::{Run, Runtime};

/// The CRD of [`Run`].
#[must_use]
pub fn run() -> CustomResourceDefinition {
    finished(Run::crd())
}

/// The CRD of [`Runtime`].
#[must_use]
pub fn runtime() -> CustomResourceDefinition {
    finished(Runtime::crd())
}

/// A CRD as YAML, one document without a marker.
pub fn to_yaml(crd: &CustomResourceDefinition) -> Result<String, serde_saphyr::ser::Error> {
    serde_saphyr::to_string(crd)
}

/// An absent field and `null` mean the same to every rule only when no field is
/// nullable: the API server then drops a `null` before it validates.
fn finished(mut crd: CustomResourceDefinition) -> CustomResourceDefinition {
    for version in &mut crd.spec.versions {
        if let Some(schema) = version
            .schema
            .as_mut()
            .and_then(|schema| schema.open_api_v3_schema.as_mut())
        {
            never_null(schema);
        }
    }
    crd
}

fn never_null(schema: &mut JSONSchemaProps) {
    schema.nullable = None;
    schema
        .properties
        .iter_mut()
        .flat_map(|properties| properties.values_mut())
        .for_each(never_null);
    if let Some(JSONSchemaPropsOrBool::Schema(inner)) = &mut schema.additional_properties {
        never_null(inner);
    }
    match &mut schema.items {
        Some(JSONSchemaPropsOrArray::Schema(inner)) => never_null(inner),
        Some(JSONSchemaPropsOrArray::Schemas(all)) => all.iter_mut().for_each(never_null),
        None => {}
    }
}
