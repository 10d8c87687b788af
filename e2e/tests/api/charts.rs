//! The charts on a real API server: every set of values is accepted, and each account may do what it needs and no
//! more (C-7.5).

use anyhow::{Context as _, Result, ensure};
use k8s_openapi::api::{
    authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec},
    core::v1::Namespace,
};
use kruntimes_e2e::{
    charts,
    cluster::{Cluster, eventually},
    world::unique,
};
use kube::{Api, api::PostParams};
use serde_json::{Value, json};

/// One question: verb, group, resource (`resource/subresource=name`), and whether the answer is yes.
type Question = (&'static str, &'static str, &'static str, bool);

const KRUNTIMES: &str = "kruntimes.io";
const CORE: &str = "";
const RBAC: &str = "rbac.authorization.k8s.io";

struct Stage {
    cluster: Cluster,
    /// Namespace with Runs.
    pool: String,
    /// Namespace of the release.
    system: String,
}

impl Stage {
    async fn set() -> Result<Self> {
        let cluster = Cluster::api().await?;
        let stage = Self {
            cluster,
            pool: unique("roles"),
            system: unique("roles-system"),
        };
        for name in [&stage.pool, &stage.system] {
            // Whatever Pods the charts make must pass the strictest standard.
            let object = json!({
                "apiVersion": "v1", "kind": "Namespace",
                "metadata": { "name": name, "labels": { "pod-security.kubernetes.io/enforce": "restricted" } },
            });
            Api::<Namespace>::all(stage.cluster.client.clone())
                .create(&PostParams::default(), &serde_json::from_value(object)?)
                .await?;
        }
        Ok(stage)
    }

    /// Applies what the chart says about rights. Cluster-wide bindings get a name of their own, so that
    /// tests do not take them from each other.
    async fn install(&self, flags: &[&str]) -> Result<()> {
        let mut objects = charts::rendered(&self.cluster.kubeconfig, &self.system, flags).await?;
        objects.retain(|it| it["apiVersion"] == "rbac.authorization.k8s.io/v1");
        for object in &mut objects {
            if object["kind"] == "ClusterRoleBinding" {
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                object["metadata"]["name"] = json!(format!("{name}-{}", self.system));
            }
        }
        charts::apply(&self.cluster.kubeconfig, &objects).await
    }

    /// Binds somebody to a ClusterRole in the namespace with Runs.
    async fn bind(&self, user: &str, role: &str) -> Result<()> {
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": { "name": role, "namespace": self.pool },
            "roleRef": { "apiGroup": RBAC, "kind": "ClusterRole", "name": role },
            "subjects": [{ "apiGroup": RBAC, "kind": "User", "name": user }],
        });
        charts::apply(&self.cluster.kubeconfig, &[binding]).await
    }

    fn account(&self, name: &str) -> String {
        format!("system:serviceaccount:{}:{name}", self.system)
    }

    async fn asks(&self, user: &str, namespace: &str, question: Question) -> Result<bool> {
        let (verb, group, what, _) = question;
        let (what, name) = what.split_once('=').unwrap_or((what, ""));
        let (resource, subresource) = what.split_once('/').unwrap_or((what, ""));
        let text = |it: &str| (!it.is_empty()).then(|| it.to_owned());
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(user.to_owned()),
                resource_attributes: Some(ResourceAttributes {
                    namespace: text(namespace),
                    verb: Some(verb.to_owned()),
                    group: Some(group.to_owned()),
                    resource: Some(resource.to_owned()),
                    subresource: text(subresource),
                    name: text(name),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let api: Api<SubjectAccessReview> = Api::all(self.cluster.client.clone());
        let answer = api.create(&PostParams::default(), &review).await?;
        Ok(answer.status.context("a review is answered")?.allowed)
    }

    /// Rights take a moment to arrive; what is not allowed is asked once all that is has come.
    async fn answers(&self, user: &str, namespace: &str, questions: &[Question]) -> Result<()> {
        for question in questions.iter().filter(|it| it.3) {
            eventually(&format!("{user} may {question:?} in {namespace:?}"), || async {
                Ok(self.asks(user, namespace, *question).await?.then_some(()))
            })
            .await?;
        }
        for question in questions.iter().filter(|it| !it.3) {
            ensure!(
                !self.asks(user, namespace, *question).await?,
                "{user} may {question:?} in {namespace:?}"
            );
        }
        Ok(())
    }
}

/// C-7.5: `get` on a Run is the right to call it; edit and admin have it, view has not. Only admin writes Runtimes,
/// and nobody writes a status.
#[tokio::test]
async fn people_get_what_their_role_says() -> Result<()> {
    let stage = Stage::set().await?;
    stage.install(&[]).await?;
    for role in ["view", "edit", "admin"] {
        stage.bind(&format!("{}-{role}", stage.pool), role).await?;
    }
    // Whether view, edit and admin may.
    let table: [(&str, &str, [bool; 3]); 12] = [
        ("list", "runs", [true, true, true]),
        ("watch", "runs", [true, true, true]),
        ("get", "runs", [false, true, true]),
        ("create", "runs", [false, true, true]),
        ("patch", "runs", [false, true, true]),
        ("delete", "runs", [false, true, true]),
        ("patch", "runs/status", [false, false, false]),
        ("hold", "runs/ownership", [false, false, false]),
        ("get", "runtimes", [true, true, true]),
        ("create", "runtimes", [false, false, true]),
        ("patch", "runtimes/scale", [false, false, true]),
        ("patch", "runtimes/status", [false, false, false]),
    ];
    for (at, role) in ["view", "edit", "admin"].into_iter().enumerate() {
        let questions = table.map(|(verb, what, may)| (verb, KRUNTIMES, what, may[at]));
        let user = format!("{}-{role}", stage.pool);
        stage.answers(&user, &stage.pool, &questions).await?;
    }
    Ok(())
}

const GATEWAY: [Question; 8] = [
    ("list", KRUNTIMES, "runs", true),
    ("watch", KRUNTIMES, "runs", true),
    // It decides by the caller's token, never by its own.
    ("get", KRUNTIMES, "runs=a", false),
    ("patch", KRUNTIMES, "runs/status", false),
    ("get", CORE, "secrets=kruntimes-gateway-peer", false),
    ("list", CORE, "secrets", false),
    ("get", CORE, "pods", false),
    ("create", "authentication.k8s.io", "tokenreviews", false),
];
const SCHEDULER: [Question; 14] = [
    ("list", KRUNTIMES, "runs", true),
    ("patch", KRUNTIMES, "runs/status", true),
    ("patch", "apps", "deployments", true),
    ("patch", CORE, "configmaps=kruntimes-gateway", true),
    ("bind", RBAC, "clusterroles=kruntimes-runtimed", true),
    ("patch", CORE, "configmaps=other", false),
    ("bind", RBAC, "clusterroles=cluster-admin", false),
    ("escalate", RBAC, "clusterroles=kruntimes-runtimed", false),
    ("get", CORE, "secrets=kruntimes-peer-ca", false),
    ("list", CORE, "secrets", false),
    ("create", KRUNTIMES, "runs", false),
    ("patch", KRUNTIMES, "runtimes", false),
    ("create", CORE, "pods/exec", false),
    ("hold", KRUNTIMES, "runs/ownership", false),
];
/// Of the scheduler, in the release's own namespace.
const SYSTEM: [Question; 6] = [
    ("get", CORE, "secrets=kruntimes-peer-ca", true),
    ("update", CORE, "secrets=kruntimes-gateway-peer", true),
    ("get", CORE, "secrets=cert", true),
    (
        "update",
        "coordination.k8s.io",
        "leases=kruntimes-scheduler",
        true,
    ),
    ("get", CORE, "secrets=other", false),
    ("update", CORE, "secrets=cert", false),
];
const RUNTIMED: [Question; 13] = [
    ("get", KRUNTIMES, "runs", true),
    ("watch", KRUNTIMES, "runs", true),
    ("patch", KRUNTIMES, "runs/status", true),
    ("patch", "coordination.k8s.io", "leases", true),
    ("hold", KRUNTIMES, "runs/ownership", true),
    ("create", "events.k8s.io", "events", true),
    ("patch", "events.k8s.io", "events", true),
    ("create", KRUNTIMES, "runs", false),
    ("delete", KRUNTIMES, "runs", false),
    ("list", KRUNTIMES, "runtimes", false),
    ("get", CORE, "secrets", false),
    ("get", CORE, "pods", false),
    ("list", "coordination.k8s.io", "leases", false),
];

/// C-7.5: each component may do its work and no more.
#[tokio::test]
async fn components_have_few_rights() -> Result<()> {
    let stage = Stage::set().await?;
    stage.install(&[]).await?;
    let (gateway, scheduler) = (
        stage.account("kruntimes-gateway"),
        stage.account("kruntimes-scheduler"),
    );
    for namespace in [stage.pool.as_str(), ""] {
        stage.answers(&gateway, namespace, &GATEWAY).await?;
        stage.answers(&scheduler, namespace, &SCHEDULER).await?;
    }
    stage.answers(&scheduler, &stage.system, &SYSTEM).await?;
    let runtimed = format!("{}-runtimed", stage.pool);
    stage.bind(&runtimed, "kruntimes-runtimed").await?;
    stage.answers(&runtimed, &stage.pool, &RUNTIMED).await?;
    let nothing = RUNTIMED.map(|(verb, group, what, _)| (verb, group, what, false));
    stage.answers(&runtimed, &stage.system, &nothing).await
}

/// C-7.5: with `scope.namespaces` the same rights, in these namespaces only.
#[tokio::test]
async fn a_scope_ends_at_its_namespaces() -> Result<()> {
    let stage = Stage::set().await?;
    let scope = format!("scope.namespaces={{{}}}", stage.pool);
    stage.install(&["--set", &scope]).await?;
    let none = |questions: &[Question]| -> Vec<Question> {
        questions
            .iter()
            .map(|(verb, group, what, _)| (*verb, *group, *what, false))
            .collect()
    };
    for (account, questions) in [
        ("kruntimes-gateway", &GATEWAY[..]),
        ("kruntimes-scheduler", &SCHEDULER[..]),
    ] {
        let account = stage.account(account);
        stage.answers(&account, &stage.pool, questions).await?;
        for outside in ["", "default"] {
            stage.answers(&account, outside, &none(questions)).await?;
        }
    }
    stage
        .answers(&stage.account("kruntimes-scheduler"), &stage.system, &SYSTEM)
        .await
}

/// Rules that a role would not need are noticed here: every verb the chart grants is one that the code uses.
#[tokio::test]
async fn no_role_has_a_wildcard() -> Result<()> {
    let stage = Stage::set().await?;
    let kubeconfig = &stage.cluster.kubeconfig;
    let objects = charts::rendered(kubeconfig, &stage.system, &[]).await?;
    let rules: Vec<&Value> = objects
        .iter()
        .filter_map(|it| it["rules"].as_array())
        .flatten()
        .collect();
    ensure!(rules.len() > 10, "the chart has roles");
    for rule in rules {
        ensure!(!rule.to_string().contains("\"*\""), "{rule}");
    }
    Ok(())
}

/// Every set of values of `charts/*/ci` makes objects that an API server takes.
#[tokio::test]
async fn an_api_server_takes_what_is_rendered() -> Result<()> {
    let stage = Stage::set().await?;
    let kubeconfig = &stage.cluster.kubeconfig;
    let teams = ["team-a", "team-b"]
        .map(|name| json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } }));
    charts::apply(kubeconfig, &teams).await?;
    let mut sets = 0;
    for chart in ["kruntimes", "kruntimes-runtimes"] {
        for entry in std::fs::read_dir(charts::chart(chart).join("ci"))? {
            let path = entry?.path().display().to_string();
            let mut objects = charts::render(kubeconfig, chart, &stage.system, &["-f", &path]).await?;
            // What belongs to cert-manager and Prometheus is unknown to this API server.
            objects.retain(|it| {
                let group = it["apiVersion"].as_str().unwrap_or_default();
                !group.starts_with("cert-manager.io/") && !group.starts_with("monitoring.coreos.com/")
            });
            ensure!(!objects.is_empty(), "{path} makes nothing");
            // A Pod is only looked at when its account is there.
            let accounts: Vec<Value> = objects
                .iter()
                .filter(|it| it["kind"] == "ServiceAccount")
                .cloned()
                .collect();
            charts::apply(kubeconfig, &accounts).await?;
            charts::dry_run(kubeconfig, &objects)
                .await
                .with_context(|| path.clone())?;
            sets += 1;
        }
    }
    ensure!(sets >= 5, "only {sets} sets of values were found");
    Ok(())
}
