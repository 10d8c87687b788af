//! Pools are made, kept and rolled (C-7.2), and told what they must know of the gateway (C-4).

use kruntimes_api::fixtures;
use serde_json::json;

use crate::common::*;

/// C-7.2
#[tokio::test]
async fn a_pool_is_made_once_and_its_status_follows() {
    let api = installation();
    let _scheduler = Scheduler::start(&api, "a");
    let condition = |api: &Api, kind: &str| {
        let runtime = api.get("runtimes", NS, "python")?;
        let reason = says(&runtime, kind)?;
        Some(reason.1)
    };
    api.until("not ready yet", |api| {
        (condition(api, "Ready").as_deref() == Some("NoPodReady")).then_some(())
    })
    .await;
    for plural in [
        "deployments",
        "services",
        "serviceaccounts",
        "rolebindings",
        "networkpolicies",
    ] {
        assert!(api.get(plural, NS, "runtime-python").is_some(), "{plural}");
    }
    // A controller reports, over and over.
    for _ in 0..5 {
        api.edit("deployments", NS, "runtime-python", |it| {
            let seen = it["status"]["observedGeneration"].as_i64().unwrap_or(0);
            it["status"] = json!({ "replicas": 1, "readyReplicas": 1, "observedGeneration": seen + 1 });
        });
    }
    api.until("ready", |api| {
        (condition(api, "Ready").as_deref() == Some("PodsReady")).then_some(())
    })
    .await;
    let applied = api
        .lock()
        .writes
        .iter()
        .filter(|it| it.what == "deployments")
        .count();
    assert_eq!(applied, 1, "an unchanged Deployment is not applied again");
    // An edit of the spec is put right.
    api.edit("deployments", NS, "runtime-python", |it| {
        it["spec"]["template"]["spec"]["containers"][1]["image"] = json!("stranger");
        it["metadata"]["generation"] = json!(2);
    });
    api.until("put right", |api| {
        let deployment = api.get("deployments", NS, "runtime-python")?;
        let image = deployment.pointer("/spec/template/spec/containers/1/image")?;
        (image == "kruntimes/runtimed:test").then_some(())
    })
    .await;
}

/// C-4
#[tokio::test]
async fn identities_are_made_and_published_when_there_is_something_to_call() {
    let api = installation();
    let _scheduler = Scheduler::start(&api, "a");
    let map = |api: &Api| api.get("configmaps", NS, "kruntimes-gateway");
    let early = api.until("the peer CA is published", map).await;
    assert!(early["data"]["peer-ca.crt"].is_string());
    assert!(early["data"].get("url").is_none(), "no gateway to call yet");
    let gateway = api
        .get("secrets", "system", "kruntimes-gateway-peer")
        .expect("made");
    for key in ["tls.crt", "tls.key", "ca.crt"] {
        assert!(gateway["data"][key].is_string(), "{key}");
    }
    let own = gateway["data"]["tls.crt"].clone();
    api.put(
        "secrets",
        json!({
            "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
            "metadata": { "name": "kruntimes-gateway-tls", "namespace": "system" },
            // Any certificate serves for this.
            "data": { "tls.crt": own },
        }),
    );
    let late = api
        .until("the URL is published", |api| {
            map(api).filter(|it| it["data"]["url"].is_string())
        })
        .await;
    assert_eq!(late["data"]["url"], "https://gateway.example");
    assert!(
        late["data"]["ca.crt"]
            .as_str()
            .is_some_and(|it| it.contains("BEGIN CERTIFICATE"))
    );
    let peers = api.lock().writes.iter().filter(|it| it.what == "secrets").count();
    assert_eq!(peers, 2, "the CA and the certificate, once each");
}

fn change_template(api: &Api, runtime: &str) {
    api.edit("runtimes", NS, runtime, |it| {
        it["spec"]["template"]["metadata"]["labels"]["team"] = json!("a")
    });
}

fn is_changed(api: &Api, runtime: &str) -> bool {
    api.get("deployments", NS, &format!("runtime-{runtime}"))
        .is_some_and(|it| it.pointer("/spec/template/metadata/labels/team").is_some())
}

/// What the Deployment's controller says of it.
fn report(api: &Api, runtime: &str, reason: &str) {
    api.edit("deployments", NS, &format!("runtime-{runtime}"), |it| {
        it["status"] = json!({
            "observedGeneration": it["metadata"]["generation"], "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1,
            "conditions": [{ "type": "Progressing", "status": "True", "reason": reason }],
        });
    });
}

/// C-7.2: pools roll one per namespace at a time, and scale at any time; a Pod that owns Runs goes last.
#[tokio::test(start_paused = true)]
async fn pools_roll_one_after_the_other_and_owners_go_last() {
    let api = installation();
    make_runtime(&api, "bash");
    let uid = make_pod(&api, "pod-a", 2);
    make_pod(&api, "pod-b", 2);
    ready_on(&api, "held", "pod-a", &uid);
    let _scheduler = Scheduler::start(&api, "a");
    for runtime in ["python", "bash"] {
        api.until("the pools are made", |api| {
            api.get("deployments", NS, &format!("runtime-{runtime}"))
        })
        .await;
        report(&api, runtime, "NewReplicaSetAvailable");
    }
    until_caught_up(&api, "sentinel").await;
    change_template(&api, "python");
    api.until("the first rolls", |api| is_changed(api, "python").then_some(()))
        .await;
    // Its controller has begun.
    report(&api, "python", "ReplicaSetUpdated");
    change_template(&api, "bash");
    let reason = |api: &Api| {
        let runtime = api.get("runtimes", NS, "bash")?;
        says(&runtime, "Accepted").map(|it| it.1)
    };
    api.until("the second waits and says so", |api| {
        (reason(api).as_deref() == Some("RollsLater")).then_some(())
    })
    .await;
    // The number of Pods is no matter of a roll.
    api.edit("runtimes", NS, "bash", |it| it["spec"]["replicas"] = json!(3));
    api.until("it scales meanwhile", |api| {
        let deployment = api.get("deployments", NS, "runtime-bash")?;
        (deployment.pointer("/spec/replicas")? == 3).then_some(())
    })
    .await;
    assert!(!is_changed(&api, "bash"));
    report(&api, "python", "NewReplicaSetAvailable");
    api.until("the second rolls", |api| is_changed(api, "bash").then_some(()))
        .await;
    api.until("and says so", |api| {
        (reason(api).as_deref() == Some("Accepted")).then_some(())
    })
    .await;

    let store = api.lock();
    let marks: Vec<_> = store
        .writes
        .iter()
        .enumerate()
        .filter(|(_, it)| it.what == "pods")
        .collect();
    let [(at, mark)] = marks.as_slice() else {
        panic!("one Pod is marked: {marks:?}")
    };
    assert_eq!(mark.name, "pod-a");
    let cost = &mark.body["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"];
    assert_eq!(cost, "1000");
    let rolled = store
        .writes
        .iter()
        .enumerate()
        .filter(|(_, it)| it.what == "deployments")
        .nth(2);
    assert!(
        rolled.is_some_and(|(roll, _)| roll > *at),
        "before the first roll"
    );
}

/// C-7.2: a roll that is stuck does not hold back the others for ever.
#[tokio::test(start_paused = true)]
async fn a_stuck_roll_is_not_waited_for() {
    let api = installation();
    make_runtime(&api, "bash");
    let _scheduler = Scheduler::start(&api, "a");
    for runtime in ["python", "bash"] {
        api.until("the pools are made", |api| {
            api.get("deployments", NS, &format!("runtime-{runtime}"))
        })
        .await;
    }
    report(&api, "bash", "NewReplicaSetAvailable");
    api.edit("deployments", NS, "runtime-python", |it| {
        it["status"] = json!({
            "observedGeneration": it["metadata"]["generation"], "replicas": 2, "updatedReplicas": 1,
            "conditions": [{ "type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded" }],
        });
    });
    until_caught_up(&api, "sentinel").await;
    change_template(&api, "bash");
    api.until("it rolls", |api| is_changed(api, "bash").then_some(()))
        .await;
}

/// C-7.2: a Pod that cannot be marked does not keep the others from it.
#[tokio::test(start_paused = true)]
async fn every_owner_is_marked_in_its_turn() {
    let api = installation();
    let pods: Vec<_> = ["pod-a", "pod-b", "pod-c"]
        .into_iter()
        .map(|pod| (pod, make_pod(&api, pod, 8)))
        .collect();
    for (pod, uid) in &pods {
        ready_on(&api, &format!("on-{pod}"), pod, uid);
    }
    api.faults(|it| it.stuck = vec!["pod-a", "pod-b"]);
    let _scheduler = Scheduler::start(&api, "a");
    let hearts: Vec<_> = pods.iter().map(|(name, uid)| (*name, uid.as_str())).collect();
    let cost = "/metadata/annotations/controller.kubernetes.io~1pod-deletion-cost";
    let marked = api.until("the last one is marked", |api| {
        let pod = api.get("pods", NS, "pod-c")?;
        (pod.pointer(cost)? == "1000").then_some(())
    });
    beating(&api, &hearts, marked).await;
}

/// C-7.2: a mark goes when the last Run goes, and is not written with every Run.
#[tokio::test(start_paused = true)]
async fn marks_follow_once_in_a_while() {
    let api = installation();
    let uid = make_pod(&api, "pod-a", 8);
    let _scheduler = Scheduler::start(&api, "a");
    let marks = |api: &Api| api.lock().writes.iter().filter(|it| it.what == "pods").count();
    for life in 0..20 {
        let name = format!("r{life}");
        make_run(&api, fixtures::run(NS, &name));
        until_assigned(&api, &name).await;
        if life < 19 {
            api.remove("runs", NS, &name);
        }
    }
    let cost = "/metadata/annotations/controller.kubernetes.io~1pod-deletion-cost";
    let story = async {
        api.until("it is marked", |api| {
            let pod = api.get("pods", NS, "pod-a")?;
            (pod.pointer(cost)? == "1000").then_some(())
        })
        .await;
        assert_eq!(marks(&api), 1, "twenty Runs came, nineteen went");
        api.remove("runs", NS, "r19");
        api.until("it is not", |api| {
            let pod = api.get("pods", NS, "pod-a")?;
            pod.pointer(cost).is_none().then_some(())
        })
        .await;
    };
    beating(&api, &[("pod-a", &uid)], story).await;
}
