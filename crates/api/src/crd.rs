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

#[cfg(test)]
mod tests {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinitionVersion;

    use super::*;

    fn version(crd: &CustomResourceDefinition) -> &CustomResourceDefinitionVersion {
        let [version] = crd.spec.versions.as_slice() else {
            panic!("one version is served")
        };
        version
    }

    fn undescribed(path: &str, schema: &JSONSchemaProps, found: &mut Vec<String>) {
        for (name, property) in schema.properties.iter().flatten() {
            let path = format!("{path}.{name}");
            if property.description.as_deref().unwrap_or_default().is_empty() {
                found.push(path.clone());
            }
            // What is below belongs to Kubernetes and passes through.
            if path != ".spec.template.spec" {
                undescribed(&path, property, found);
            }
        }
        if let Some(JSONSchemaPropsOrArray::Schema(items)) = &schema.items {
            undescribed(&format!("{path}[]"), items, found);
        }
        if let Some(JSONSchemaPropsOrBool::Schema(values)) = &schema.additional_properties {
            undescribed(&format!("{path}{{}}"), values, found);
        }
    }

    /// C-2.4: `kubectl explain` says something about every field.
    #[test]
    fn every_field_is_explained() {
        for crd in [run(), runtime()] {
            let schema = version(&crd)
                .schema
                .as_ref()
                .and_then(|it| it.open_api_v3_schema.as_ref())
                .unwrap();
            assert!(schema.description.is_some(), "{}", crd.spec.names.kind);
            let mut found = Vec::new();
            undescribed("", schema, &mut found);
            assert_eq!(found, [""; 0], "{}", crd.spec.names.kind);
        }
    }

    /// C-2, C-2.4: what people type, and what `kubectl get` shows; what only `-o wide` shows is in brackets.
    #[test]
    fn names_and_columns_are_those_of_the_contract() {
        for (crd, plural, short, columns) in [
            (
                run(),
                "runs",
                "rn",
                "Phase Ready Runtime Pod [Attempt] [Reason] Age",
            ),
            (
                runtime(),
                "runtimes",
                "rt",
                "Ready Replicas Available [Reason] [Image] Age",
            ),
        ] {
            let names = &crd.spec.names;
            assert_eq!(names.plural, plural);
            assert_eq!(names.short_names.as_deref(), Some(&[short.to_owned()][..]));
            assert_eq!(names.categories.as_deref(), Some(&["kruntimes".to_owned()][..]));
            assert_eq!(crd.spec.scope, "Namespaced");
            let shown: Vec<_> = version(&crd)
                .additional_printer_columns
                .iter()
                .flatten()
                .map(|it| match it.priority {
                    Some(1..) => format!("[{}]", it.name),
                    _ => it.name.clone(),
                })
                .collect();
            assert_eq!(shown.join(" "), columns);
            let subresources = version(&crd).subresources.as_ref().unwrap();
            assert!(subresources.status.is_some());
            assert_eq!(subresources.scale.is_some(), plural == "runtimes");
        }
    }

    /// C-2.3: what watches can select by.
    #[test]
    fn fields_that_can_be_selected() {
        let crd = run();
        let fields: Vec<_> = version(&crd)
            .selectable_fields
            .iter()
            .flatten()
            .map(|it| it.json_path.as_str())
            .collect();
        assert_eq!(
            fields,
            [
                ".spec.runtime",
                ".spec.mode.function.handler",
                ".status.phase",
                ".status.assignedPod"
            ]
        );
    }
}
