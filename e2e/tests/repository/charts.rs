//! The charts' values: what `values.yaml` lists is what `values.schema.json` knows, so that a misspelt value is
//! refused and every value is found by reading one file.

use std::path::Path;

use serde_json::Value;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts").join(path);
    std::fs::read_to_string(&path)
        .map_err(|error| format!("{}: {error}", path.display()))
        .expect("a file of a chart")
}

/// The schema itself, or what it refers to.
fn resolve<'a>(root: &'a Value, schema: &'a Value) -> &'a Value {
    match schema["$ref"].as_str().and_then(|it| it.strip_prefix('#')) {
        Some(pointer) => root.pointer(pointer).expect("what a $ref points to"),
        None => schema,
    }
}

/// Compares what both know about one place; `problems` names the differences.
fn compare(root: &Value, schema: &Value, values: &Value, at: &str, problems: &mut Vec<String>) {
    let schema = resolve(root, schema);
    let known = schema["properties"].as_object();
    let Some(known) = known else {
        // A map of the user's own keys, a list, or a scalar.
        let said = ["type", "enum", "anyOf"]
            .iter()
            .any(|it| schema.get(it).is_some());
        if !said {
            problems.push(format!("{at} has no type in the schema"));
        }
        return;
    };
    if schema["additionalProperties"] != Value::Bool(false) {
        problems.push(format!("{at} lets unknown values pass"));
    }
    let Some(listed) = values.as_object() else {
        problems.push(format!("{at} is no map in values.yaml"));
        return;
    };
    for name in listed.keys().filter(|name| !known.contains_key(*name)) {
        problems.push(format!("{at}/{name} is not in the schema"));
    }
    for (name, inner) in known {
        match listed.get(name) {
            Some(value) => compare(root, inner, value, &format!("{at}/{name}"), problems),
            // Helm's own, for charts that have this one as a part.
            None if at.is_empty() && name == "global" => {}
            // Free-form: what Kubernetes calls resources, defaults for some of it.
            None if at.ends_with("/resources") => {}
            None => problems.push(format!("{at}/{name} is not in values.yaml")),
        }
    }
}

#[test]
fn values_and_schema_know_the_same() {
    for chart in ["kruntimes", "kruntimes-runtimes"] {
        let schema: Value = serde_json::from_str(&read(&format!("{chart}/values.schema.json"))).unwrap();
        let values: Value = serde_saphyr::from_str(&read(&format!("{chart}/values.yaml"))).unwrap();
        let mut problems = Vec::new();
        compare(&schema, &schema, &values, "", &mut problems);
        assert!(problems.is_empty(), "{chart}: {problems:#?}");
    }
}

#[test]
fn the_versions_are_those_of_the_code() {
    for chart in ["kruntimes", "kruntimes-runtimes"] {
        let about: Value = serde_saphyr::from_str(&read(&format!("{chart}/Chart.yaml"))).unwrap();
        assert_eq!(about["appVersion"], env!("CARGO_PKG_VERSION"), "{chart}");
    }
}
