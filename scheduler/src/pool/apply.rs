//! Server-side apply with one field manager, and none when nothing changed.
//!
//! What we applied last is remembered, so that an unchanged object costs no request. It is never
//! compared field by field with the stored one, which the API server has filled with defaults. A
//! Deployment whose generation moved has been edited by somebody and is applied again; everything
//! is, once in a while, which the API server answers without a write when nothing differs.

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    hash::{Hash as _, Hasher as _},
    time::Duration,
};

use kruntimes_api::names::MANAGER_SCHEDULER;
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, Patch, PatchParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use crate::{
    facts::{DeploymentFacts, ObjectKey},
    lease::Term,
    pool::{Kind, Object, report::Failure},
};

/// Everything is applied again after this, in case somebody edited what we do not watch.
const TRUST: Duration = Duration::from_secs(600);
const APPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Applies objects for one term.
pub(crate) struct Applier {
    client: Client,
    term: Term,
    last: HashMap<(Kind, ObjectKey), Applied>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Applied {
    digest: u64,
    generation: Option<i64>,
    at: Instant,
}

/// What became of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// As we applied it last; nothing was sent.
    Known,
    /// Sent and accepted; the generation it has now.
    Applied(Option<i64>),
    /// Not accepted, or not answered.
    Failed(Failure),
}

// === impl Applier ===

impl Applier {
    pub(crate) fn new(client: Client, term: Term) -> Self {
        Self {
            client,
            term,
            last: HashMap::new(),
        }
    }

    /// Applies `object` unless it is known to be there. `live_generation` is what the watch shows
    /// of it: `None` for kinds without a watch, `Some(None)` when it is not there.
    pub(crate) async fn apply(&mut self, object: &Object, live_generation: Option<Option<i64>>) -> Outcome {
        let text = |pointer: &str| {
            object
                .value
                .pointer(pointer)
                .and_then(|it| it.as_str())
                .unwrap_or_default()
        };
        let key = ObjectKey::new(text("/metadata/namespace"), text("/metadata/name"));
        let digest = digest(object);
        let id = (object.kind, key.clone());
        if self
            .last
            .get(&id)
            .is_some_and(|it| it.holds(digest, live_generation, Instant::now()))
        {
            return Outcome::Known;
        }
        let params = PatchParams::apply(MANAGER_SCHEDULER).force();
        let patch = Patch::Apply(&object.value);
        match self.send(object.kind, &key, &params, &patch).await {
            Ok(generation) => {
                let applied = Applied {
                    digest,
                    generation,
                    at: Instant::now(),
                };
                self.last.insert(id, applied);
                Outcome::Applied(generation)
            }
            Err(failure) => {
                self.last.remove(&id);
                Outcome::Failed(failure)
            }
        }
    }

    /// Changes the number of Pods of exactly this Deployment and nothing else.
    pub(crate) async fn scale(&self, live: &DeploymentFacts, replicas: i32) -> Outcome {
        let params = PatchParams {
            field_manager: Some(MANAGER_SCHEDULER.to_owned()),
            ..PatchParams::default()
        };
        let patch = json!({ "metadata": { "uid": live.uid }, "spec": { "replicas": replicas } });
        let patch = Patch::Merge(&patch);
        match self.send(Kind::Deployment, &live.key, &params, &patch).await {
            Ok(generation) => Outcome::Applied(generation),
            Err(failure) => Outcome::Failed(failure),
        }
    }

    /// The generation that the object has then.
    async fn send(
        &self,
        kind: Kind,
        key: &ObjectKey,
        params: &PatchParams,
        patch: &Patch<&Value>,
    ) -> Result<Option<i64>, Failure> {
        let failed = |class, detail| Failure {
            class: format!("{}: {class}", kind.as_str()),
            detail,
        };
        if !self.term.holds() {
            return Err(failed("this process leads no more".to_owned(), String::new()));
        }
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &key.namespace, &kind.resource());
        match timeout(APPLY_TIMEOUT, api.patch(&key.name, params, patch)).await {
            Ok(Ok(stored)) => Ok(stored.metadata.generation),
            Ok(Err(kube::Error::Api(status))) => Err(failed(
                format!("{} {}", status.code, status.reason),
                status.message.clone(),
            )),
            Ok(Err(error)) => Err(failed("no answer".to_owned(), error.to_string())),
            Err(_) => Err(failed(
                "no answer".to_owned(),
                format!("within {APPLY_TIMEOUT:?}"),
            )),
        }
    }
}

// === impl Applied ===

impl Applied {
    fn holds(&self, digest: u64, live_generation: Option<Option<i64>>, now: Instant) -> bool {
        let untouched = match live_generation {
            None => true,
            Some(live) => live == self.generation,
        };
        self.digest == digest && untouched && now.saturating_duration_since(self.at) < TRUST
    }
}

// === impl Kind ===

impl Kind {
    fn resource(self) -> ApiResource {
        let (group, version) = match self {
            Self::ServiceAccount | Self::Service | Self::ConfigMap => ("", "v1"),
            Self::RoleBinding => ("rbac.authorization.k8s.io", "v1"),
            Self::NetworkPolicy => ("networking.k8s.io", "v1"),
            Self::Deployment => ("apps", "v1"),
        };
        let plural = match self {
            Self::NetworkPolicy => "networkpolicies",
            Self::ServiceAccount => "serviceaccounts",
            Self::RoleBinding => "rolebindings",
            Self::Service => "services",
            Self::ConfigMap => "configmaps",
            Self::Deployment => "deployments",
        };
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, self.as_str()), plural)
    }

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::ServiceAccount => "ServiceAccount",
            Self::RoleBinding => "RoleBinding",
            Self::Service => "Service",
            Self::NetworkPolicy => "NetworkPolicy",
            Self::ConfigMap => "ConfigMap",
            Self::Deployment => "Deployment",
        }
    }
}

/// Maps of `serde_json` are ordered, so that equal objects print alike.
fn digest(object: &Object) -> u64 {
    let mut hasher = DefaultHasher::new();
    object.value.to_string().hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C-7.2: no write when nothing changed.
    #[test]
    fn known_until_it_changes_is_edited_or_is_old() {
        let now = Instant::now();
        let applied = Applied {
            digest: 7,
            generation: Some(3),
            at: now,
        };
        assert!(applied.holds(7, None, now));
        assert!(applied.holds(7, Some(Some(3)), now));
        assert!(!applied.holds(8, Some(Some(3)), now), "we want something else");
        assert!(!applied.holds(7, Some(Some(4)), now), "somebody edited it");
        assert!(!applied.holds(7, Some(None), now), "somebody deleted it");
        assert!(!applied.holds(7, Some(Some(3)), now + TRUST));
    }
}
