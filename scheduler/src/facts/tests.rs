use kruntimes_api::fixtures;
use serde_json::{Value, json};

use super::*;

pub(crate) fn pod(value: Value) -> Pod {
    serde_json::from_value(value).unwrap()
}

/// C-7.1
#[test]
fn a_pod_serves_when_running_ready_and_not_deleting() {
    let base = json!({
        "metadata": { "namespace": "ns", "name": "p", "uid": "u", "labels": { "runtime": "python", "app": "kruntimes-python" },
            "annotations": { "kruntimes.io/capacity.memory": "1Gi", "kruntimes.io/capacity.cpu": "rubbish" } },
        "status": { "phase": "Running", "conditions": [{ "type": "Ready", "status": "True" }] },
    });
    let facts = PodFacts::of(&pod(base.clone())).unwrap();
    assert!(facts.serves);
    assert_eq!(facts.capacity["runs"], Amount::whole(2), "the default");
    assert_eq!(facts.capacity["memory"], Amount::whole(1 << 30));
    assert!(
        !facts.capacity.contains_key("cpu"),
        "what cannot be read is not there"
    );
    for (path, value) in [
        ("/status/phase", json!("Pending")),
        ("/status/conditions/0/status", json!("False")),
        ("/status", json!({})),
    ] {
        let mut other = base.clone();
        *other.pointer_mut(path).unwrap() = value;
        assert!(!PodFacts::of(&pod(other)).unwrap().serves, "{path}");
    }
    let mut deleting = base.clone();
    deleting["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    assert!(!PodFacts::of(&pod(deleting)).unwrap().serves);
    let mut stranger = base;
    stranger["metadata"]["labels"] = json!({});
    assert_eq!(PodFacts::of(&pod(stranger)), None);
}

/// C-7.2
#[test]
fn a_scaler_has_taken_over_when_only_others_manage_replicas() {
    let entry = |manager: &str, fields: Value| -> ManagedFieldsEntry {
        serde_json::from_value(json!({ "manager": manager, "fieldsV1": fields })).unwrap()
    };
    let replicas = json!({ "f:spec": { "f:replicas": {} } });
    let ours = entry(MANAGER_SCHEDULER, replicas.clone());
    let others = entry("kube-controller-manager", replicas);
    let bystander = entry("kubectl", json!({ "f:metadata": {} }));
    assert!(!scaled_by_others(&[ours.clone(), bystander.clone()]));
    assert!(
        !scaled_by_others(&[ours, others.clone()]),
        "both agree on the number"
    );
    assert!(scaled_by_others(&[others, bystander.clone()]));
    assert!(!scaled_by_others(&[bystander]));
}

#[test]
fn a_run_takes_one_run_and_zeros_take_nothing() {
    let run = |requests: Value| {
        let resources = serde_json::from_value(json!({ "requests": requests })).unwrap();
        fixtures::run("ns", "n")
            .with(|it| it.spec.resources = Some(resources))
            .build()
    };
    assert_eq!(
        demand(&fixtures::run("ns", "n").build()).unwrap()["runs"],
        Amount::whole(1)
    );
    let asked = demand(&run(json!({ "runs": 0, "cpu": "0", "memory": "1Ki" }))).unwrap();
    assert_eq!(asked["runs"], Amount::whole(1));
    assert!(!asked.contains_key("cpu"));
    assert_eq!(asked["memory"], Amount::whole(1024));
    assert!(demand(&run(json!({ "cpu": "much" }))).is_err());
}

#[test]
fn what_is_not_advertised_fits_nothing() {
    let amounts = |it: &[(&str, u64)]| -> Amounts {
        it.iter()
            .map(|(name, amount)| ((*name).to_owned(), Amount::whole(*amount)))
            .collect()
    };
    let capacity = amounts(&[("runs", 2), ("memory", 10)]);
    assert!(fits(
        &amounts(&[("runs", 1), ("memory", 4)]),
        &amounts(&[("runs", 1), ("memory", 6)]),
        &capacity
    ));
    assert!(!fits(
        &amounts(&[("memory", 5)]),
        &amounts(&[("memory", 6)]),
        &capacity
    ));
    assert!(!fits(&amounts(&[("gpu", 1)]), &Amounts::new(), &capacity));
}

#[test]
fn a_pod_tells_its_end() {
    let signs = |value: Value| Signs::of(&pod(value));
    assert_eq!(signs(json!({ "metadata": {} })), Signs::default());
    let ready =
        json!([{ "type": "ContainersReady", "status": "False" }, { "type": "Ready", "status": "True" }]);
    let running = signs(json!({ "metadata": {}, "status": { "phase": "Running", "conditions": ready } }));
    assert_eq!(
        running,
        Signs {
            ready: true,
            ..Signs::default()
        }
    );
    for phase in ["Failed", "Succeeded"] {
        assert!(signs(json!({ "metadata": {}, "status": { "phase": phase } })).over);
    }
    assert!(signs(json!({ "metadata": { "deletionTimestamp": "2026-01-01T00:00:00Z" } })).deleting);
}

/// C-7.2: when a roll has begun, and when it is over or given up.
#[test]
fn a_deployment_rolls_until_its_controller_says_that_it_is_done() {
    let rolls = |observed: i64, updated: i64, status: &str, reason: &str| {
        let deployment: Deployment = serde_json::from_value(json!({
            "metadata": { "namespace": "ns", "name": "d", "uid": "u", "generation": 2 },
            "status": { "observedGeneration": observed, "replicas": 2, "updatedReplicas": updated,
                "conditions": [{ "type": "Progressing", "status": status, "reason": reason }] },
        }))
        .unwrap();
        DeploymentFacts::of(&deployment).unwrap().rolls
    };
    assert!(
        rolls(1, 2, "True", "NewReplicaSetAvailable"),
        "the change has not been seen"
    );
    assert!(rolls(2, 1, "True", "ReplicaSetUpdated"));
    assert!(rolls(2, 1, "True", "NewReplicaSetAvailable"), "an old word");
    assert!(
        rolls(2, 2, "True", "ReplicaSetUpdated"),
        "the new Pods are not available"
    );
    assert!(!rolls(2, 2, "True", "NewReplicaSetAvailable"));
    assert!(
        !rolls(2, 1, "False", "ProgressDeadlineExceeded"),
        "it holds back nobody"
    );
}
