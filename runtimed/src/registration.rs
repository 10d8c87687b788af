//! A Run → what the Runtime Server is asked to register.

use std::{collections::BTreeMap, path::Path};

use kruntimes_api::{
    Run,
    keys::{Attempt, RunKey},
};

use crate::{
    journal::{Record, Request},
    outputs,
    source::digest,
};

/// Most bytes of labels, and of annotations, in one variable: the kernel takes 128 KiB at most.
const METADATA_BYTES: usize = 32 * 1024;
/// The whole object once more, by kubectl.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// The record of a registration that is about to be made; `None` for a task.
#[must_use]
pub fn record(run: &Run, key: &RunKey, attempt: Attempt, dir: &Path) -> Option<Record> {
    let function = run.spec.mode.function.as_ref()?;
    let idle_timeout_seconds = function.idle_timeout_seconds.map_or(0, i64::from);
    let mut env = environment(run, key, attempt);
    // Before labels and annotations, which may change while the function runs, and before the place
    // of outputs: none of them is an input.
    let digest = digest::of(run, &function.handler, &env, idle_timeout_seconds);
    let mut add = |name: &str, value| env.insert(name.to_owned(), value);
    add("FUNC_LABELS", json(run.metadata.labels.as_ref()));
    add("FUNC_ANNOTATIONS", json(run.metadata.annotations.as_ref()));
    let file: std::path::PathBuf = [dir, Path::new(outputs::RESERVED_DIR), Path::new(outputs::FILE)]
        .iter()
        .collect();
    add("KRUNTIME_OUTPUTS", file.display().to_string());
    Some(Record {
        namespace: key.namespace.clone(),
        name: key.name.clone(),
        attempt: attempt.get(),
        digest,
        registration_id: None,
        request: Request {
            working_dir: dir.display().to_string(),
            handler: function.handler.clone(),
            env,
            idle_timeout_seconds,
        },
    })
}

/// `spec.env` and what the runtime cannot know (C-8.4).
fn environment(run: &Run, key: &RunKey, attempt: Attempt) -> BTreeMap<String, String> {
    let mut env: BTreeMap<_, _> = run
        .spec
        .env
        .iter()
        .flatten()
        .map(|pair| (pair.name.clone(), pair.value.clone().unwrap_or_default()))
        .collect();
    let mut platform = |name: &str, value: String| env.insert(name.to_owned(), value);
    platform("KRUNTIME_RUN_NAME", key.name.clone());
    platform("KRUNTIME_RUN_UID", key.uid.to_string());
    platform("KRUNTIME_NAMESPACE", key.namespace.clone());
    platform("KRUNTIME_RUNTIME", run.spec.runtime.clone());
    platform("KRUNTIME_ATTEMPT", attempt.to_string());
    platform("FUNC_NAME", key.name.clone());
    platform("FUNC_NAMESPACE", key.namespace.clone());
    platform("FUNC_RUNTIME", run.spec.runtime.clone());
    env
}

/// A JSON object, with keys in order as far as they fit: values of annotations hold anything, so
/// that no separator would do. What kubectl keeps there for itself is not the function's.
fn json(map: Option<&BTreeMap<String, String>>) -> String {
    let mut kept = serde_json::Map::new();
    let mut size = 2;
    let pairs = map.into_iter().flatten();
    for (key, value) in pairs.filter(|(key, _)| *key != LAST_APPLIED) {
        // Two pairs of quotes, colon and comma; escapes are counted by writing them.
        let written = serde_json::Value::from(value.as_str());
        size += key.len() + written.to_string().len() + 4;
        if size > METADATA_BYTES {
            break;
        }
        kept.insert(key.clone(), written);
    }
    serde_json::Value::Object(kept).to_string()
}

#[cfg(test)]
mod tests {
    use kruntimes_api::{fixtures, run::EnvVar};

    use super::*;

    /// C-8.4: the platform sets what the runtime cannot know.
    #[test]
    fn the_function_is_told_what_it_cannot_know() {
        let run = fixtures::run("ns", "n")
            .with(|run| {
                run.metadata.labels = Some(BTreeMap::from([("team".to_owned(), "a".to_owned())]));
                run.metadata.annotations = Some(BTreeMap::from([
                    ("note".to_owned(), "a=b,\"c\"\n".to_owned()),
                    (LAST_APPLIED.to_owned(), "{}".to_owned()),
                ]));
                run.spec.env = Some(vec![EnvVar {
                    name: "COLOUR".to_owned(),
                    value: Some("blue".to_owned()),
                    value_from: None,
                }]);
            })
            .build();
        let key = run.key().unwrap();
        let record = record(&run, &key, Attempt::FIRST, Path::new("/workspace/x")).unwrap();
        let env = &record.request.env;
        for (name, value) in [
            ("COLOUR", "blue"),
            ("KRUNTIME_RUN_NAME", "n"),
            ("KRUNTIME_NAMESPACE", "ns"),
            ("KRUNTIME_RUNTIME", "python"),
            ("KRUNTIME_ATTEMPT", "1"),
            ("FUNC_NAME", "n"),
            ("FUNC_NAMESPACE", "ns"),
            ("FUNC_RUNTIME", "python"),
            ("FUNC_LABELS", r#"{"team":"a"}"#),
            ("FUNC_ANNOTATIONS", r#"{"note":"a=b,\"c\"\n"}"#),
            ("KRUNTIME_OUTPUTS", "/workspace/x/.kruntimes/outputs"),
        ] {
            assert_eq!(env.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert_eq!(record.to_message(key.uid).working_dir, "/workspace/x");
    }

    /// An environment that the kernel refuses would keep the function from starting.
    #[test]
    fn large_annotations_are_left_out_and_the_rest_is_valid() {
        let value = "\n".repeat(10 * 1024);
        let large = (0..8).map(|it| (it.to_string(), value.clone())).collect();
        let text = json(Some(&large));
        assert!(text.len() <= METADATA_BYTES, "{}", text.len());
        let read: BTreeMap<String, String> = serde_json::from_str(&text).unwrap();
        assert_eq!(read.get("0"), Some(&value));
        assert_eq!(json(None), "{}");
    }

    #[test]
    fn labels_and_the_place_do_not_change_the_digest() {
        let run = fixtures::run("ns", "n").build();
        let key = run.key().unwrap();
        let labelled = fixtures::run("ns", "n")
            .with(|run| run.metadata.labels = Some(BTreeMap::from([("a".to_owned(), "b".to_owned())])))
            .build();
        let digest = |run: &Run, dir: &str| {
            let record = record(run, &key, Attempt::FIRST, Path::new(dir));
            record.unwrap().digest
        };
        assert_eq!(digest(&run, "/w"), digest(&labelled, "/elsewhere"));
    }

    #[test]
    fn a_task_is_not_registered() {
        let run = fixtures::run("ns", "n").task().build();
        assert_eq!(
            record(&run, &run.key().unwrap(), Attempt::FIRST, Path::new("/w")),
            None
        );
    }
}
