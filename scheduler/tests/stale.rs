//! Views that are late, partial or gone: what is decided on them does no harm, and nothing is written while
//! nothing changes.

use std::time::Duration;

use kruntimes_api::{fixtures, run::Phase};
use kruntimes_scheduler::lease::Timing;
use serde_json::json;
use tokio::time::sleep;

use crate::common::*;

/// Scenario 12: 410 on the watches, then lists that miss half of everything, then whole ones.
#[tokio::test(start_paused = true)]
async fn half_a_list_after_410_harms_nobody() {
    let api = installation();
    let pods: Vec<_> = ["pod-a", "pod-b", "pod-c"]
        .into_iter()
        .map(|pod| (pod, make_pod_on_node(&api, pod, 8)))
        .collect();
    let names: Vec<_> = (0..12).map(|it| format!("r{it}")).collect();
    for (index, name) in names.iter().enumerate() {
        let (pod, uid) = &pods[index % pods.len()];
        ready_on(&api, name, pod, uid);
    }
    let _scheduler = Scheduler::start_with(&api, "a", Timing::default());
    let hearts: Vec<_> = pods.iter().map(|(name, uid)| (*name, uid.as_str())).collect();
    beating(&api, &hearts, lose_views(&api)).await;
    for name in &names {
        assert_eq!(api.lock().status_writes(name).len(), 0, "{name}");
        assert!(run(&api, name).is_ready(), "{name}");
    }
    let harm = ["runs", "pods"];
    let marks = |it: &&api::Write| it.what == "pods" && it.body["metadata"]["annotations"].is_object();
    let store = api.lock();
    let done: Vec<_> = store
        .writes
        .iter()
        .filter(|it| harm.contains(&it.what.as_str()) && !marks(it))
        .collect();
    assert!(done.is_empty(), "{done:?}");
}

async fn lose_views(api: &Api) {
    until_caught_up(api, "before").await;
    for kinds in [
        vec!["pods"],
        vec!["runs"],
        vec!["leases"],
        vec!["runs", "pods", "leases", "runtimes"],
    ] {
        api.faults(|it| {
            it.halve_once = kinds.clone();
            it.expire_once = kinds.clone();
        });
        api.until("the half lists are read", |api| {
            api.faults_are_spent().then_some(())
        })
        .await;
        let sentinel = format!("behind-{}-{}", kinds.len(), kinds[0]);
        until_caught_up(api, &sentinel).await;
        // The whole list again.
        api.faults(|it| it.expire_once = kinds.clone());
        api.until("they are read again", |api| api.faults_are_spent().then_some(()))
            .await;
        until_caught_up(api, &format!("{sentinel}-again")).await;
    }
    make_run(api, fixtures::run(NS, "next"));
    until_assigned(api, "next").await;
}

/// Scenario 18: the watch is late by a whole attempt, and the Run is cancelled meanwhile.
#[tokio::test]
async fn what_an_old_view_decides_never_overwrites() {
    let api = installation();
    let uid = make_pod(&api, "pod-a", 2);
    ready_on(&api, "late", "pod-a", &uid);
    let _scheduler = Scheduler::start(&api, "a");
    until_caught_up(&api, "sentinel").await;
    api.faults(|it| it.silent = vec!["runs"]);
    api.edit("runs", NS, "late", |it| {
        it["spec"]["cancelRequested"] = json!(true);
        it["status"]["phase"] = json!("Cancelled");
        it["status"]["message"] = json!("by its owner");
    });
    // It still sees a Ready Run on a Pod that is lost.
    api.remove("pods", NS, "pod-a");
    api.until("it is tried", |api| {
        let refused = api.lock().status_writes("late").iter().any(|it| it.status == 409);
        refused.then_some(())
    })
    .await;
    let late = run(&api, "late");
    assert_eq!(late.phase(), Phase::Cancelled);
    assert_eq!(
        late.status.and_then(|it| it.message).as_deref(),
        Some("by its owner")
    );
}

/// Scenario 108: created, deleted, made anew and patched before it is first seen.
#[tokio::test]
async fn the_last_object_of_a_name_counts() {
    let api = installation();
    make_pod(&api, "pod-a", 4);
    let _scheduler = Scheduler::start(&api, "a");
    until_caught_up(&api, "sentinel").await;
    api.faults(|it| it.silent = vec!["runs"]);
    for life in ["first", "second"] {
        make_run(
            &api,
            fixtures::run(NS, "same")
                .uid(&fixtures::uid(life))
                .runtime("none"),
        );
        api.remove("runs", NS, "same");
    }
    let last = fixtures::uid("third");
    make_run(&api, fixtures::run(NS, "same").uid(&last));
    api.edit("runs", NS, "same", |it| {
        it["spec"]["cancelRequested"] = json!(true);
        it["spec"]["ttlSecondsAfterFinished"] = json!(3600);
    });
    api.faults(|it| it.silent.clear());
    let same = until_run(&api, "same", |it| it.phase() == Phase::Cancelled).await;
    assert_eq!(same.metadata.uid, Some(last));
    assert_eq!(same.spec.ttl_seconds_after_finished, Some(3600));
    assert_eq!(same.attempt(), None, "it was cancelled before it had a Pod");
}

/// Scenario 99, C-6.7: 200 Ready Runs, nine minutes, heartbeats: no write but those of Leases.
#[tokio::test(start_paused = true)]
async fn nothing_is_written_while_nothing_changes() {
    let api = installation();
    let pods: Vec<_> = (0..4)
        .map(|it| format!("pod-{it}"))
        .map(|name| (name.clone(), make_pod_on_node(&api, &name, 50)))
        .collect();
    for index in 0..200 {
        let (pod, uid) = &pods[index % pods.len()];
        ready_on(&api, &format!("r{index}"), pod, uid);
    }
    let _scheduler = Scheduler::start_with(&api, "a", Timing::default());
    let hearts: Vec<_> = pods
        .iter()
        .map(|(name, uid)| (name.as_str(), uid.as_str()))
        .collect();
    beating(&api, &hearts, async {
        until_caught_up(&api, "sentinel").await;
        // Marks on the Pods that own Runs, and whatever else a start brings.
        sleep(Duration::from_secs(30)).await;
        let before = api.lock().lasting_writes();
        sleep(Duration::from_secs(540)).await;
        assert_eq!(api.lock().lasting_writes(), before);
    })
    .await;
    assert!(run(&api, "r7").is_ready());
}

/// C-6.1, C-7.3: runtimed has no room after all; that is no failure of the Run, which goes to another Pod.
#[tokio::test(start_paused = true)]
async fn a_refused_admission_costs_no_attempt() {
    let api = installation();
    let a = make_pod(&api, "pod-a", 2);
    let _scheduler = Scheduler::start_with(&api, "a", Timing::default());
    make_run(&api, fixtures::run(NS, "refused"));
    until_assigned(&api, "refused").await;
    let b = make_pod(&api, "pod-b", 2);
    let story = async {
        release(&api, "refused", "CapacityRefused");
        let moved = until_run(&api, "refused", |it| it.attempt().is_some_and(|it| it.get() == 2)).await;
        assert_eq!(pod_of(&moved), Some("pod-b"), "not the Pod that refused it");
        assert_eq!(moved.status.and_then(|it| it.failed_attempts), None);
    };
    beating(&api, &[("pod-a", &a), ("pod-b", &b)], story).await;
}

/// C-7.3: what costs no attempt is paced: the only Pod refuses the Run again and again.
#[tokio::test(start_paused = true)]
async fn a_pod_that_refuses_is_not_asked_without_pause() {
    let api = installation();
    let a = make_pod(&api, "pod-a", 2);
    let _scheduler = Scheduler::start_with(&api, "a", Timing::default());
    make_run(&api, fixtures::run(NS, "refused"));
    let refuse = async {
        loop {
            until_assigned(&api, "refused").await;
            release(&api, "refused", "CapacityRefused");
            until_run(&api, "refused", |it| it.assignment().is_none()).await;
        }
    };
    let story = async {
        tokio::select! {
            () = refuse => {}
            () = sleep(Duration::from_secs(100)) => {}
        }
    };
    beating(&api, &[("pod-a", &a)], story).await;
    let run = run(&api, "refused");
    let attempts = run.attempt().map_or(0, |it| it.get());
    assert!((5..=11).contains(&attempts), "{attempts} in 100 s");
    assert_eq!(run.status.and_then(|it| it.failed_attempts), None);
}

/// C-5.7: another Pod of that Runtime has the same server.
#[tokio::test]
async fn a_server_without_functions_fails_the_run_at_once() {
    let api = installation();
    make_pod(&api, "pod-a", 2);
    let _scheduler = Scheduler::start(&api, "a");
    make_run(&api, fixtures::run(NS, "tasks-only"));
    until_assigned(&api, "tasks-only").await;
    release(&api, "tasks-only", "FunctionModeUnsupported");
    let failed = until_run(&api, "tasks-only", |it| it.phase() == Phase::Failed).await;
    for kind in ["Completed", "Succeeded", "Scheduled"] {
        let condition = failed.condition(kind).expect(kind);
        assert_eq!(condition.reason, "FunctionModeUnsupported", "{kind}");
    }
    assert_eq!(
        (failed.attempt().map(|it| it.get()), failed.assignment()),
        (Some(1), None)
    );
}

/// What runtimed writes when it gives an attempt back.
fn release(api: &Api, name: &str, reason: &str) {
    api.edit("runs", NS, name, |it| {
        let status = &mut it["status"];
        status["releasedAttempt"] = status["attempt"].clone();
        for condition in status["conditions"].as_array_mut().expect("a list") {
            if condition["type"] == "Ready" {
                condition["status"] = json!("False");
                condition["reason"] = json!(reason);
            }
        }
    });
}
