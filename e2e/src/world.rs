//! What a test sees of an installation, whatever it runs on: a namespace with a
//! Runtime of its own, the gateway, callers with and without rights.

use std::path::PathBuf;

use anyhow::{Context as _, Result};
use k8s_openapi::api::{
    authentication::v1::{TokenRequest, TokenRequestSpec},
    core::v1::{Namespace, Pod, ServiceAccount},
    rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject},
};
use kruntimes_api::{
    Run, fixtures,
    keys::RunUid,
    run::{Phase, RunSpec},
};
use kube::{
    Api, Client, ResourceExt as _,
    api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams},
    core::Status,
};
use serde_json::json;

use crate::{
    call::{Answer, Call, Gateway},
    cluster::eventually,
};

/// ServiceAccount that may `get` every Run of the namespace.
pub const CALLER: &str = "caller";
/// ServiceAccount without rights.
pub const STRANGER: &str = "stranger";

/// One namespace of one installation.
#[derive(Clone)]
pub struct World {
    /// A client with all rights.
    pub client: Client,
    /// The namespace, this test's alone.
    pub namespace: String,
    /// Name of the Runtime in it.
    pub runtime: String,
    /// The gateway.
    pub gateway: Gateway,
    /// The API server's audit log.
    pub audit_log: PathBuf,
    /// Token of [`CALLER`].
    pub token: String,
}

/// A function Run of the world.
#[derive(Debug, Clone)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: RunUid,
    /// Where it is called.
    pub path: String,
}

/// A name nobody else uses.
#[must_use]
pub fn unique(prefix: &str) -> String {
    format!("{prefix}-{}", &uuid::Uuid::new_v4().simple().to_string()[..8])
}

/// Makes the namespace with its two ServiceAccounts and the caller's right.
pub async fn make_namespace(client: &Client, namespace: &str) -> Result<()> {
    let meta = |name: &str| ObjectMeta {
        name: Some(name.to_owned()),
        ..ObjectMeta::default()
    };
    let create = PostParams::default();
    Api::<Namespace>::all(client.clone())
        .create(
            &create,
            &Namespace {
                metadata: meta(namespace),
                ..Namespace::default()
            },
        )
        .await?;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    for name in [CALLER, STRANGER] {
        accounts
            .create(
                &create,
                &ServiceAccount {
                    metadata: meta(name),
                    ..ServiceAccount::default()
                },
            )
            .await?;
    }
    let role = Role {
        metadata: meta("invoke"),
        rules: Some(vec![PolicyRule {
            api_groups: Some(vec!["kruntimes.io".to_owned()]),
            resources: Some(vec!["runs".to_owned()]),
            verbs: vec!["get".to_owned()],
            ..PolicyRule::default()
        }]),
    };
    Api::<Role>::namespaced(client.clone(), namespace)
        .create(&create, &role)
        .await?;
    let binding = RoleBinding {
        metadata: meta("invoke"),
        role_ref: RoleRef {
            api_group: Some("rbac.authorization.k8s.io".to_owned()),
            kind: "Role".to_owned(),
            name: "invoke".to_owned(),
        },
        subjects: Some(vec![Subject {
            kind: "ServiceAccount".to_owned(),
            name: CALLER.to_owned(),
            namespace: Some(namespace.to_owned()),
            ..Subject::default()
        }]),
    };
    Api::<RoleBinding>::namespaced(client.clone(), namespace)
        .create(&create, &binding)
        .await?;
    Ok(())
}

/// A real token of a ServiceAccount, valid for an hour.
pub async fn token(client: &Client, namespace: &str, account: &str) -> Result<String> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let request = TokenRequest {
        spec: Some(TokenRequestSpec {
            expiration_seconds: Some(3600),
            ..TokenRequestSpec::default()
        }),
        ..TokenRequest::default()
    };
    let answer = accounts
        .create_token_request(account, &PostParams::default(), &request)
        .await?;
    answer
        .status
        .and_then(|status| status.token)
        .context("a TokenRequest is answered with a token")
}

impl World {
    /// Deletes the namespace with all that is in it.
    pub async fn close(&self) -> Result<()> {
        Api::<Namespace>::all(self.client.clone())
            .delete(&self.namespace, &DeleteParams::default())
            .await?;
        Ok(())
    }

    /// The namespace's Runs.
    #[must_use]
    pub fn runs(&self) -> Api<Run> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// The namespace's Pods.
    #[must_use]
    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// A function spec for inline Python whose handler is `main.handler`.
    #[must_use]
    pub fn spec(&self, source: &str) -> RunSpec {
        fixtures::function(&self.runtime, "main.py", "main.handler", source)
    }

    /// Creates a Run and says where it would be called; it need not be Ready yet.
    pub async fn create(&self, name: &str, spec: RunSpec) -> Result<Function> {
        let runtime = spec.runtime.clone();
        let run = self
            .runs()
            .create(&PostParams::default(), &Run::new(name, spec))
            .await?;
        let uid = run.run_uid().context("a created Run has a UID")?;
        let path = kruntimes_api::invoke_path::build(&self.namespace, &runtime, uid);
        Ok(Function {
            name: run.name_any(),
            uid,
            path,
        })
    }

    /// Creates a Python function and waits until it is Ready.
    pub async fn function(&self, name: &str, source: &str) -> Result<Function> {
        let function = self.create(name, self.spec(source)).await?;
        self.ready(&function).await?;
        Ok(function)
    }

    /// Waits until the function is Ready.
    pub async fn ready(&self, function: &Function) -> Result<Run> {
        self.run_until(&function.name, "Ready", |run| {
            run.run_uid() == Some(function.uid) && run.is_ready()
        })
        .await
    }

    /// Waits until the Run has this phase.
    pub async fn phase(&self, name: &str, phase: Phase) -> Result<Run> {
        self.run_until(name, &format!("{phase:?}"), |run| run.phase() == phase)
            .await
    }

    /// Waits until the Run is as wanted; the error shows its last state.
    pub async fn run_until(&self, name: &str, what: &str, wanted: impl Fn(&Run) -> bool) -> Result<Run> {
        let runs = self.runs();
        let last = std::sync::Mutex::new(None);
        let what = format!("Run {name} is {what}");
        let found = eventually(&what, || async {
            let run = runs.get(name).await?;
            if wanted(&run) {
                return Ok(Some(run));
            }
            if let Ok(mut last) = last.lock() {
                *last = run.status;
            }
            Ok(None)
        });
        found.await.with_context(|| {
            format!(
                "its last status: {:?}",
                last.lock().ok().and_then(|it| it.clone())
            )
        })
    }

    /// Waits until no Run of this name is left.
    pub async fn gone(&self, name: &str) -> Result<()> {
        let runs = self.runs();
        eventually(&format!("Run {name} is gone"), || async {
            Ok(runs.get_opt(name).await?.is_none().then_some(()))
        })
        .await
    }

    /// Deletes a Run without waiting.
    pub async fn delete(&self, name: &str) -> Result<()> {
        self.runs().delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Asks for the Run to be cancelled.
    pub async fn cancel(&self, name: &str) -> Result<()> {
        let patch = Patch::Merge(json!({ "spec": { "cancelRequested": true } }));
        self.runs().patch(name, &PatchParams::default(), &patch).await?;
        Ok(())
    }

    /// Deletes a Pod without grace.
    pub async fn kill_pod(&self, name: &str) -> Result<()> {
        self.pods()
            .delete(name, &DeleteParams::default().grace_period(0))
            .await?;
        Ok(())
    }

    /// Names of the Runtime's Pods.
    pub async fn pod_names(&self) -> Result<Vec<String>> {
        let selector = ListParams::default().labels(&format!("runtime={}", self.runtime));
        Ok(self
            .pods()
            .list(&selector)
            .await?
            .iter()
            .map(kube::ResourceExt::name_any)
            .collect())
    }

    /// Calls a function as [`CALLER`].
    pub async fn invoke(&self, function: &Function, body: &str) -> Result<Answer> {
        self.gateway
            .send(&Call::invoke(&function.path, &self.token, body.to_owned()))
            .await
    }

    /// Calls until the answer has this status; the gateway may see a change a
    /// moment later than its author.
    pub async fn invoke_until(&self, function: &Function, body: &str, status: u16) -> Result<Answer> {
        eventually(&format!("{} answers {status}", function.name), || async {
            let answer = self.invoke(function, body).await?;
            if answer.status.as_u16() == status {
                return Ok(Some(answer));
            }
            anyhow::bail!(
                "it answered {} {}",
                answer.status,
                String::from_utf8_lossy(&answer.body)
            )
        })
        .await
    }
}

/// Whether the API server refused with this code.
#[must_use]
pub fn refused_with(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

/// The message of an API refusal; the error's own text otherwise.
#[must_use]
pub fn refusal(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => Status::clone(status).message,
        other => other.to_string(),
    }
}
