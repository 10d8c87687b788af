use super::{pod::RESERVED_VOLUMES, *};

fn config() -> Config {
    Config {
        image: "kruntimes/runtimed:dev".to_owned(),
        pull_policy: PullPolicy::IfNotPresent,
        cluster_role: "kruntimes-runtimed".to_owned(),
        gateway_namespace: "kruntimes-system".to_owned(),
        extra_args: vec!["--log-filter=debug".to_owned()],
        egress: None,
        otel: Vec::new(),
    }
}

fn runtime(spec: Value) -> Runtime {
    serde_json::from_value(json!({
        "apiVersion": "kruntimes.io/v1alpha1", "kind": "Runtime",
        "metadata": { "name": "python", "namespace": "ns", "uid": "u" }, "spec": spec,
    }))
    .unwrap()
}

fn minimal() -> Value {
    json!({ "template": { "spec": { "containers": [{ "name": "runtime", "image": "kruntimes/runtime-python:dev" }] } } })
}

fn with(pointer: &str, key: &str, value: Value) -> Value {
    let mut spec = minimal();
    spec.pointer_mut(pointer).unwrap()[key] = value;
    spec
}

fn made(spec: Value, kind: Kind) -> Value {
    let objects = objects(&runtime(spec), &config(), true).unwrap();
    objects.into_iter().find(|it| it.kind == kind).unwrap().value
}

fn pod(spec: Value) -> Value {
    made(spec, Kind::Deployment)
        .pointer("/spec/template/spec")
        .unwrap()
        .clone()
}

fn mounts(container: &Value) -> Vec<&str> {
    list(container.get("volumeMounts"))
        .map(|it| it["mountPath"].as_str().unwrap())
        .collect()
}

/// C-6.6
#[test]
fn only_runtimed_mounts_token_journal_and_certificates() {
    let pod = pod(minimal());
    assert_eq!(pod["automountServiceAccountToken"], json!(false));
    assert_eq!(mounts(&pod["containers"][0]), ["/run/kruntimes", "/workspace"]);
    assert_eq!(
        mounts(&pod["containers"][1]),
        [
            "/run/kruntimes",
            "/workspace",
            "/var/lib/kruntimes",
            "/var/run/secrets/kubernetes.io/serviceaccount",
            "/etc/kruntimes/gateway",
        ]
    );
    let names: Vec<_> = list(pod.get("volumes"))
        .map(|it| it["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, RESERVED_VOLUMES);
}

#[test]
fn both_containers_are_restricted_and_of_one_user() {
    let pod = pod(minimal());
    for (field, value) in [
        ("runAsUser", json!(65532)),
        ("fsGroup", json!(65532)),
        ("runAsNonRoot", json!(true)),
    ] {
        assert_eq!(pod["securityContext"][field], value, "{field}");
    }
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    for container in list(pod.get("containers")) {
        assert_eq!(
            container["securityContext"]["allowPrivilegeEscalation"],
            json!(false)
        );
        assert_eq!(
            container["securityContext"]["capabilities"]["drop"],
            json!(["ALL"])
        );
    }
    let runtimed = &pod["containers"][1];
    assert_eq!(runtimed["resources"]["limits"].get("cpu"), None);
    assert_eq!(runtimed["securityContext"]["readOnlyRootFilesystem"], json!(true));
}

#[test]
fn runtimed_is_told_where_it_is_and_what_it_holds() {
    let mut spec = with(
        "/template/spec/containers/0",
        "resources",
        json!({ "limits": { "memory": "1Gi", "cpu": "500m" } }),
    );
    spec["capacity"] = json!({ "resources": { "runs": 4, "cpu": "2" } });
    let deployment = made(spec, Kind::Deployment);
    let runtimed = deployment.pointer("/spec/template/spec/containers/1").unwrap();
    let args: Vec<_> = list(runtimed.get("args"))
        .map(|it| it.as_str().unwrap())
        .collect();
    assert_eq!(
        args,
        [
            "--server=unix:///run/kruntimes/runtime.sock",
            "--capacity=cpu=2,memory=1073741824,runs=4",
            "--grace-period=300s",
            "--log-filter=debug",
        ]
    );
    let env: Vec<_> = list(runtimed.get("env"))
        .map(|it| it["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        env,
        [
            "KRUNTIMES_NAMESPACE",
            "KRUNTIMES_POD_NAME",
            "KRUNTIMES_POD_UID",
            "KRUNTIMES_POD_IP",
            "KRUNTIMES_RUNTIME"
        ]
    );
    let metadata = deployment.pointer("/spec/template/metadata").unwrap();
    assert_eq!(metadata["annotations"]["kruntimes.io/capacity.runs"], "4");
    assert_eq!(
        metadata["annotations"]["kruntimes.io/capacity.memory"],
        "1073741824"
    );
    assert_eq!(
        metadata["labels"],
        json!({ "runtime": "python", "app": "kruntimes-python" })
    );
}

/// C-2: `Runtime.spec.port`.
#[test]
fn a_port_means_grpc_on_loopback() {
    let mut spec = minimal();
    spec["port"] = json!(9091);
    assert_eq!(
        pod(spec)["containers"][1]["args"][0],
        "--server=http://127.0.0.1:9091"
    );
}

/// C-2: `Runtime.spec.template`.
#[test]
fn a_template_passes_through() {
    let mut spec = with("/template/spec", "nodeSelector", json!({ "disk": "ssd" }));
    spec["template"]["spec"]["volumes"] = json!([{ "name": "models", "emptyDir": {} }]);
    spec["template"]["spec"]["terminationGracePeriodSeconds"] = json!(60);
    spec["template"]["spec"]["containers"][0]["volumeMounts"] =
        json!([{ "name": "models", "mountPath": "/models" }]);
    spec["template"]["spec"]["containers"]
        .as_array_mut()
        .unwrap()
        .push(json!({ "name": "helper", "image": "h" }));
    spec["template"]["metadata"] = json!({ "labels": { "team": "a", "runtime": "stolen" },
        "annotations": { "kruntimes.io/capacity.runs": "99", "x": "y" } });
    let deployment = made(spec, Kind::Deployment);
    let pod = deployment.pointer("/spec/template/spec").unwrap();
    assert_eq!(pod["nodeSelector"], json!({ "disk": "ssd" }));
    assert_eq!(pod["volumes"][0]["name"], "models");
    assert_eq!(
        mounts(&pod["containers"][0]),
        ["/models", "/run/kruntimes", "/workspace"]
    );
    assert_eq!(pod["containers"][1]["name"], "helper");
    assert_eq!(pod["containers"][2]["args"][2], "--grace-period=30s");
    let metadata = deployment.pointer("/spec/template/metadata").unwrap();
    assert_eq!(metadata["labels"]["team"], "a");
    assert_eq!(
        metadata["labels"]["runtime"], "python",
        "the selector's labels are ours"
    );
    assert_eq!(
        metadata["annotations"]["kruntimes.io/capacity.runs"], "2",
        "so is the capacity"
    );
}

/// C-2
#[test]
fn what_a_pool_may_not_have_is_refused_with_field_and_reason() {
    let volume = |volume: Value| with("/template/spec", "volumes", json!([volume]));
    let mut workspace = minimal();
    workspace["workspace"] = json!({ "hostPath": { "path": "/" } });
    for (spec, reason, field) in [
        (
            with("/template/spec", "hostNetwork", json!(true)),
            "HostNamespace",
            "hostNetwork",
        ),
        (
            with("/template/spec", "hostPID", json!(true)),
            "HostNamespace",
            "hostPID",
        ),
        (
            with("/template/spec", "hostIPC", json!(true)),
            "HostNamespace",
            "hostIPC",
        ),
        (
            with("/template/spec", "shareProcessNamespace", json!(true)),
            "SharedProcessNamespace",
            "shareProcessNamespace",
        ),
        (
            volume(json!({ "name": "x", "hostPath": { "path": "/" } })),
            "HostPath",
            "volumes[0]",
        ),
        (
            volume(json!({ "name": "kruntimes-token", "emptyDir": {} })),
            "ReservedName",
            "kruntimes-token",
        ),
        (workspace, "HostPath", "workspace"),
        (
            with(
                "/template/spec",
                "initContainers",
                json!([{ "name": "runtimed" }]),
            ),
            "ReservedName",
            "runtimed",
        ),
        (
            with(
                "/template/spec/containers/0",
                "volumeMounts",
                json!([{ "name": "kruntimes-token", "mountPath": "/stolen" }]),
            ),
            "ReservedName",
            "kruntimes-token",
        ),
        (
            with("", "recycle", json!("AfterRun")),
            "NotSupported",
            "spec.recycle",
        ),
        (
            with("", "scheduling", json!("RuntimeServer")),
            "NotSupported",
            "spec.scheduling",
        ),
        (
            with("/template/spec", "restartPolicy", json!("Never")),
            "RestartPolicy",
            "restartPolicy",
        ),
        (
            with("/template/spec", "securityContext", json!({ "fsGroup": 1 })),
            "ReservedGroup",
            "fsGroup",
        ),
        (
            with("/template/spec", "securityContext", json!({ "runAsUser": 1000 })),
            "ReservedUser",
            "spec.template.spec.securityContext.runAsUser",
        ),
        (
            with(
                "/template/spec/containers/0",
                "securityContext",
                json!({ "runAsUser": 0 }),
            ),
            "ReservedUser",
            "containers[0].securityContext.runAsUser",
        ),
    ] {
        let refusal = objects(&runtime(spec), &config(), true).unwrap_err();
        assert_eq!(refusal.reason, reason);
        assert!(refusal.message.contains(field), "{}", refusal.message);
    }
    let mut own = with("/template/spec", "securityContext", json!({ "runAsUser": 1000 }));
    own["template"]["spec"]["containers"][0]["securityContext"] = json!({ "runAsUser": 65532 });
    for harmless in [with("/template/spec", "hostNetwork", json!(false)), own] {
        assert!(objects(&runtime(harmless), &config(), true).is_ok());
    }
}

/// C-7.2
#[test]
fn replicas_are_left_to_a_scaler() {
    let mut spec = minimal();
    spec["replicas"] = json!(3);
    assert_eq!(made(spec.clone(), Kind::Deployment)["spec"]["replicas"], 3);
    let objects = objects(&runtime(spec), &config(), false).unwrap();
    let deployment = objects.iter().find(|it| it.kind == Kind::Deployment).unwrap();
    assert_eq!(deployment.value["spec"].get("replicas"), None);
}

#[test]
fn the_account_is_ours_unless_the_template_names_one() {
    assert_eq!(
        made(minimal(), Kind::RoleBinding)["subjects"][0]["name"],
        "runtime-python"
    );
    assert_eq!(
        made(minimal(), Kind::RoleBinding)["roleRef"]["name"],
        "kruntimes-runtimed"
    );
    assert_eq!(pod(minimal())["serviceAccountName"], "runtime-python");
    let own = with("/template/spec", "serviceAccountName", json!("mine"));
    assert_eq!(
        made(own.clone(), Kind::RoleBinding)["subjects"][0]["name"],
        "mine"
    );
    let objects = objects(&runtime(own), &config(), true).unwrap();
    assert!(objects.iter().all(|it| it.kind != Kind::ServiceAccount));
}

/// C-7.2
#[test]
fn the_runtime_owns_everything_and_all_runtimes_the_config_map() {
    for object in objects(&runtime(minimal()), &config(), true).unwrap() {
        let owner = &object.value["metadata"]["ownerReferences"][0];
        assert_eq!(
            (&owner["uid"], &owner["controller"]),
            (&json!("u"), &json!(true)),
            "{:?}",
            object.kind
        );
        assert_eq!(object.value["metadata"]["name"], "runtime-python");
    }
    let (a, b) = (runtime(minimal()), runtime(minimal()));
    let data = BTreeMap::from([("url".to_owned(), "https://gw".to_owned())]);
    let map = config_map("ns", &[&a, &b], &data).value;
    assert_eq!(map["metadata"]["ownerReferences"].as_array().unwrap().len(), 2);
    assert_eq!(map["data"]["url"], "https://gw");
}

/// C-2: `Runtime.spec.invocation`.
#[test]
fn how_calls_behave_is_said_to_the_server() {
    let mut spec = minimal();
    spec["invocation"] = json!({ "onCallerGone": "Finish", "exposeErrors": true });
    let env = pod(spec)["containers"][0]["env"].clone();
    assert_eq!(
        env,
        json!([
            { "name": "SERVER_ON_CALLER_GONE", "value": "Finish" },
            { "name": "SERVER_EXPOSE_ERRORS", "value": "true" },
        ])
    );
}

/// C-3.5: runtimed decides for servers that say no more than Unknown.
#[test]
fn runtimed_is_told_whether_errors_are_shown() {
    let told = |invocation: Value| {
        let mut spec = minimal();
        spec["invocation"] = invocation;
        let env = pod(spec)["containers"][1]["env"].clone();
        let found = env
            .as_array()
            .unwrap()
            .iter()
            .find(|it| it["name"] == "KRUNTIMES_EXPOSE_ERRORS");
        found.map(|it| it["value"].clone())
    };
    assert_eq!(told(json!({ "exposeErrors": true })), Some(json!("true")));
    assert_eq!(
        told(json!({ "exposeErrors": false })),
        None,
        "no other template than ever"
    );
}

/// Where spans go is the operator's to say; a template may send those of its own server elsewhere.
#[test]
fn a_pods_containers_know_the_collector() {
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let config = Config {
        otel: vec![
            pair("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317"),
            pair("OTEL_TRACES_SAMPLER", "x"),
        ],
        ..config()
    };
    let mut spec = minimal();
    spec["template"]["spec"]["containers"][0]["env"] =
        json!([{ "name": "OTEL_TRACES_SAMPLER", "value": "own" }]);
    let objects = objects(&runtime(spec), &config, true).unwrap();
    let deployment = objects
        .into_iter()
        .find(|it| it.kind == Kind::Deployment)
        .unwrap();
    let containers = deployment.value["spec"]["template"]["spec"]["containers"].clone();
    let told = |at: usize, name: &str| -> Vec<Value> {
        let env = containers[at]["env"].as_array().unwrap();
        env.iter()
            .filter(|it| it["name"] == name)
            .map(|it| it["value"].clone())
            .collect()
    };
    for at in [0, 1] {
        assert_eq!(told(at, "OTEL_EXPORTER_OTLP_ENDPOINT"), ["http://c:4317"]);
    }
    assert_eq!(
        (told(0, "OTEL_TRACES_SAMPLER"), told(1, "OTEL_TRACES_SAMPLER")),
        (vec![json!("own")], vec![json!("x")])
    );
}

/// C-7.2: the optional egress policy.
#[test]
fn egress_is_free_unless_the_operator_says() {
    let policy = |config: &Config| {
        let objects = objects(&runtime(minimal()), config, true).unwrap();
        let policy = objects.into_iter().find(|it| it.kind == Kind::NetworkPolicy);
        policy.unwrap().value["spec"].clone()
    };
    let free = policy(&config());
    assert_eq!(
        (&free["policyTypes"], free.get("egress")),
        (&json!(["Ingress"]), None)
    );
    let rules = json!([{ "to": [{ "namespaceSelector": {} }] }]);
    let bound = policy(&Config {
        egress: Some(rules.clone()),
        ..config()
    });
    assert_eq!(bound["policyTypes"], json!(["Ingress", "Egress"]));
    assert_eq!(bound["egress"], rules);
}

/// C-7.2: no Pod is taken away before another one is there, and what is no new template rolls nothing.
#[test]
fn a_roll_adds_before_it_takes() {
    let made = |spec: Value| {
        let objects = objects(&runtime(spec), &config(), true).unwrap();
        objects
            .into_iter()
            .find(|it| it.kind == Kind::Deployment)
            .unwrap()
    };
    let first = made(minimal());
    let strategy = first.value.pointer("/spec/strategy/rollingUpdate").unwrap();
    assert_eq!(strategy, &json!({ "maxUnavailable": 0, "maxSurge": 1 }));
    let live = |of: &Object| DeploymentFacts {
        key: crate::facts::ObjectKey::new("ns", "runtime-python"),
        uid: "d".to_owned(),
        generation: 1,
        runtime: Some("python".to_owned()),
        scaled_by_others: false,
        wanted: Some(1),
        replicas: 1,
        ready: 1,
        failure: None,
        template: of.value["metadata"]["annotations"][ANNOTATION_TEMPLATE]
            .as_str()
            .map(str::to_owned),
        rolls: false,
    };
    assert!(!first.rolls(None), "it is made");
    assert!(!first.rolls(Some(&live(&first))));
    let mut more = minimal();
    more["replicas"] = json!(3);
    assert!(!made(more).rolls(Some(&live(&first))), "only more Pods");
    let other = with("/template/spec", "nodeSelector", json!({ "disk": "ssd" }));
    assert!(made(other).rolls(Some(&live(&first))));
}

/// C-7.2: gateway → 9443, monitoring → metrics.
#[test]
fn only_gateways_reach_the_hop() {
    let policy = made(minimal(), Kind::NetworkPolicy);
    let hop = &policy["spec"]["ingress"][0];
    assert_eq!(hop["ports"][0]["port"], 9443);
    assert_eq!(
        hop["from"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"],
        "kruntimes-system"
    );
    assert_eq!(made(minimal(), Kind::Service)["spec"]["clusterIP"], "None");
}
