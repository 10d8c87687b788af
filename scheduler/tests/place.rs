//! Runs find Pods, or say why not (C-7.1).

use std::collections::BTreeMap;

use kruntimes_api::{fixtures, run::Phase};
use serde_json::json;

use crate::common::*;

/// C-7.1
#[tokio::test]
async fn a_run_gets_a_pod_as_soon_as_one_beats() {
    let api = installation();
    let _scheduler = Scheduler::start(&api, "a");
    make_run(&api, fixtures::run(NS, "first"));
    until_waits(&api, "first", "NoPodReady").await;
    let uid = make_pod(&api, "pod-a", 2);
    let run = until_assigned(&api, "first").await;
    assert_eq!(
        run.assignment()
            .map(|(name, uid)| (name, uid.as_str().to_owned())),
        Some(("pod-a", uid))
    );
    assert_eq!(
        (run.phase(), run.attempt().map(|it| it.get())),
        (Phase::Scheduled, Some(1))
    );
    assert_eq!(run.condition("Ready").map(|it| it.status.as_str()), Some("False"));
}

/// C-7.1: least loaded; a full pool is waited for.
#[tokio::test]
async fn load_is_spread_and_a_full_pool_says_so_until_room_is_free() {
    let api = installation();
    make_pod(&api, "pod-a", 2);
    make_pod(&api, "pod-b", 2);
    let _scheduler = Scheduler::start(&api, "a");
    let mut per_pod = BTreeMap::new();
    for index in 0..4 {
        let name = format!("r{index}");
        make_run(&api, fixtures::run(NS, &name));
        let run = until_assigned(&api, &name).await;
        *per_pod.entry(pod_of(&run).map(str::to_owned)).or_insert(0) += 1;
    }
    assert_eq!(per_pod.values().copied().collect::<Vec<_>>(), [2, 2]);
    make_run(&api, fixtures::run(NS, "fifth"));
    until_waits(&api, "fifth", "CapacityFull").await;
    let freed = pod_of(&run(&api, "r0")).map(str::to_owned);
    api.edit("runs", NS, "r0", |it| it["status"]["phase"] = json!("Timeout"));
    let fifth = until_assigned(&api, "fifth").await;
    assert_eq!(pod_of(&fifth).map(str::to_owned), freed);
}

/// C-2
#[tokio::test]
async fn a_run_of_no_runtime_says_so_and_goes_on_when_there_is_one() {
    let api = installation();
    let _scheduler = Scheduler::start(&api, "a");
    make_run(&api, fixtures::run(NS, "typo").runtime("pyhton"));
    let waiting = until_waits(&api, "typo", "NoRuntime").await;
    assert!(
        waiting
            .status
            .and_then(|it| it.message)
            .is_some_and(|it| it.contains("pyhton"))
    );
    make_runtime(&api, "pyhton");
    until_waits(&api, "typo", "NoPodReady").await;
}

/// Bug scenario 99, and prior art 20.22: a heartbeat wakes nobody for nothing.
#[tokio::test]
async fn a_waiting_run_is_not_written_again_and_again() {
    let api = installation();
    let uid = make_pod(&api, "pod-a", 1);
    let _scheduler = Scheduler::start(&api, "a");
    make_run(&api, fixtures::run(NS, "first"));
    until_assigned(&api, "first").await;
    make_run(&api, fixtures::run(NS, "waits"));
    until_waits(&api, "waits", "CapacityFull").await;
    for _ in 0..20 {
        beat(&api, "pod-a", &uid, "function");
        // It wakes those who wait for a place, and they find none.
        api.edit("runs", NS, "waits", |it| {
            it["metadata"]["labels"] = json!({ "n": "1" })
        });
    }
    // A sentinel behind all of that in the queue.
    make_run(&api, fixtures::run(NS, "sentinel").runtime("none"));
    until_waits(&api, "sentinel", "NoRuntime").await;
    assert_eq!(api.lock().status_writes("waits").len(), 1);
}

/// Bug scenario 5.
#[tokio::test]
async fn a_recreated_run_is_a_new_run() {
    let api = installation();
    make_pod(&api, "pod-a", 2);
    let _scheduler = Scheduler::start(&api, "a");
    for life in 0..10 {
        let uid = fixtures::uid(&format!("life {life}"));
        make_run(&api, fixtures::run(NS, "same").uid(&uid));
        let run = until_run(&api, "same", |it| {
            it.metadata.uid.as_deref() == Some(&uid) && it.assignment().is_some()
        })
        .await;
        assert_eq!(run.attempt().map(|it| it.get()), Some(1));
        api.remove("runs", NS, "same");
    }
}

/// C-7.1: cancel before assignment. C-7.4: TTL after the end.
#[tokio::test]
async fn a_cancel_before_the_assignment_and_a_ttl_after_the_end() {
    let api = installation();
    let _scheduler = Scheduler::start(&api, "a");
    make_run(&api, fixtures::run(NS, "kept").cancelled());
    make_run(
        &api,
        fixtures::run(NS, "gone")
            .cancelled()
            .with(|it| it.spec.ttl_seconds_after_finished = Some(0)),
    );
    let kept = until_run(&api, "kept", |it| it.phase() == Phase::Cancelled).await;
    assert_eq!(
        kept.condition("Completed").map(|it| it.status.as_str()),
        Some("True")
    );
    api.until("the other is deleted", |api| {
        find_run(api, "gone").is_none().then_some(())
    })
    .await;
    assert!(find_run(&api, "kept").is_some());
}

/// C-6.7
#[tokio::test]
async fn modes_come_from_the_heartbeat() {
    let api = installation();
    let uid = make_pod(&api, "pod-a", 2);
    beat(&api, "pod-a", &uid, "");
    let _scheduler = Scheduler::start(&api, "a");
    make_run(&api, fixtures::run(NS, "function"));
    make_run(&api, fixtures::run(NS, "task").task());
    until_waits(&api, "function", "FunctionModeUnsupported").await;
    until_waits(&api, "task", "TaskModeUnsupported").await;
    beat(&api, "pod-a", &uid, "function");
    until_assigned(&api, "function").await;
    assert_eq!(scheduled_reason(&run(&api, "task")), Some("TaskModeUnsupported"));
}
