//! A Run → what the Runtime Server is asked to register.

use std::{collections::BTreeMap, path::Path};

use kruntimes_api::{
    Run,
    keys::{Attempt, RunKey},
};

use crate::{
    journal::{Record, Request},
    source::digest,
};

/// The record of a registration that is about to be made; `None` for a task.
#[must_use]
pub fn record(run: &Run, key: &RunKey, attempt: Attempt, dir: &Path) -> Option<Record> {
    let function = run.spec.mode.function.as_ref()?;
    let idle_timeout_seconds = function.idle_timeout_seconds.map_or(0, i64::from);
    let mut env = environment(run, key, attempt);
    // Before the labels: they may change while the function runs, and are no input.
    let digest = digest::of(run, &function.handler, &env, idle_timeout_seconds);
    env.insert("FUNC_LABELS".to_owned(), pairs(run.metadata.labels.as_ref()));
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

/// `spec.env` and what the runtime cannot know (contract 8.4).
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

/// `a=b,c=d`, as the downward API and kubectl write labels.
fn pairs(map: Option<&BTreeMap<String, String>>) -> String {
    let pairs: Vec<_> = map
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    pairs.join(",")
}

#[cfg(test)]
mod tests {
    use kruntimes_api::{fixtures, run::EnvVar};

    use super::*;

    #[test]
    fn the_function_is_told_what_it_cannot_know_contract_8_4() {
        let run = fixtures::run("ns", "n")
            .with(|run| {
                run.metadata.labels = Some(BTreeMap::from([("team".to_owned(), "a".to_owned())]));
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
            ("FUNC_LABELS", "team=a"),
        ] {
            assert_eq!(env.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert_eq!(record.to_message(key.uid).working_dir, "/workspace/x");
    }

    #[test]
    fn a_new_label_does_not_change_the_digest() {
        let run = fixtures::run("ns", "n").build();
        let key = run.key().unwrap();
        let labelled = fixtures::run("ns", "n")
            .with(|run| run.metadata.labels = Some(BTreeMap::from([("a".to_owned(), "b".to_owned())])))
            .build();
        let digest = |run: &Run| record(run, &key, Attempt::FIRST, Path::new("/w")).unwrap().digest;
        assert_eq!(digest(&run), digest(&labelled));
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
