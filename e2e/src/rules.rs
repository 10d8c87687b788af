//! Trying the rules of the two kinds against a real API server: specs to begin with, what must be
//! said to them, and the comparison.

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client,
    api::{DynamicObject, ObjectMeta, PostParams},
    core::{ApiResource, Resource},
};
use serde_json::{Value, json};

use self::Verdict::{Accepted, Refused};
use crate::{cluster::Cluster, world::unique};

/// What the API server must say; a refusal must hold every one of the words.
pub enum Verdict {
    /// It takes it.
    Accepted,
    /// It does not, and says these words.
    Refused(&'static [&'static str]),
}

/// The smallest function.
#[must_use]
pub fn function() -> Value {
    json!({
        "runtime": "python",
        "source": { "inline": "def handler(event): return event", "inlinePath": "main.py" },
        "mode": { "function": { "handler": "main.handler" } },
    })
}

/// The smallest task.
#[must_use]
pub fn task() -> Value {
    json!({ "runtime": "python", "source": { "inline": "print(1)" }, "mode": { "task": {} } })
}

/// A task from a repository.
#[must_use]
pub fn git() -> Value {
    json!({
        "runtime": "python", "mode": { "task": { "entrypoint": "run.py" } },
        "source": { "repoURL": "https://git.example/a/b.git", "commitSHA": "a".repeat(40) },
    })
}

/// A namespace of its own on the API server, with the CRDs of this tree.
///
/// # Errors
/// When there is no API server.
pub async fn namespace(prefix: &str) -> Result<(Client, String)> {
    let cluster = Cluster::api().await?;
    let name = unique(prefix);
    let metadata = ObjectMeta {
        name: Some(name.clone()),
        ..ObjectMeta::default()
    };
    Api::all(cluster.client.clone())
        .create(
            &PostParams::default(),
            &Namespace {
                metadata,
                ..Namespace::default()
            },
        )
        .await?;
    Ok((cluster.client, name))
}

/// Objects of a kind as they are, unknown fields included.
#[must_use]
pub fn dynamic<K: Resource<DynamicType = ()>>(client: &Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &ApiResource::erase::<K>(&()))
}

/// An object to create.
///
/// # Errors
/// When the parts make no object.
pub fn object<K: Resource<DynamicType = ()>>(name: &str, spec: Value) -> Result<DynamicObject> {
    Ok(serde_json::from_value(json!({
        "apiVersion": K::api_version(&()), "kind": K::kind(&()), "metadata": { "name": name }, "spec": spec,
    }))?)
}

/// Compares an answer with the verdict.
///
/// # Errors
/// When they differ.
pub fn check(what: &str, answer: kube::Result<DynamicObject>, verdict: &Verdict) -> Result<()> {
    match (answer, verdict) {
        (Ok(_), Accepted) => Ok(()),
        (Ok(_), Refused(words)) => anyhow::bail!("accepted, but must be refused with {words:?}: {what}"),
        (Err(error), Accepted) => {
            Err(error).with_context(|| format!("refused, but must be accepted: {what}"))
        }
        (Err(error), Refused(words)) => {
            let message = crate::world::refusal(&error);
            let named = words.iter().all(|word| message.contains(word));
            ensure!(
                named,
                "refused as {message:?}, which does not say {words:?}: {what}"
            );
            Ok(())
        }
    }
}

/// RFC 7386.
#[must_use]
pub fn merged(mut base: Value, change: &Value) -> Value {
    match (&mut base, change) {
        (Value::Object(fields), Value::Object(changes)) => {
            for (key, value) in changes {
                if value.is_null() {
                    fields.remove(key);
                } else {
                    let before = fields.remove(key).unwrap_or(Value::Null);
                    fields.insert(key.clone(), merged(before, value));
                }
            }
            base
        }
        (_, change) => {
            // Nulls inside a new object mean absence, too.
            if let Value::Object(changes) = change {
                return merged(json!({}), &Value::Object(changes.clone()));
            }
            change.clone()
        }
    }
}

/// A value for messages, cut.
#[must_use]
pub fn shown(value: &Value) -> String {
    value.to_string().chars().take(160).collect()
}
