//! Owners are lost and Runs move (C-7.3), and what is deleted goes (C-7.4).

use kruntimes_api::{fixtures, run::Phase};
use kruntimes_scheduler::lease::Timing;
use serde_json::json;

use crate::common::*;

/// Bug scenario 1, the scheduler's part. (C-7.3)
#[tokio::test]
async fn the_route_goes_then_the_assignment_then_another_pod_gets_it() {
    let api = installation();
    let uid = make_pod(&api, "pod-a", 2);
    ready_on(&api, "moved", "pod-a", &uid);
    let _scheduler = Scheduler::start(&api, "a");
    until_caught_up(&api, "sentinel").await;
    assert_eq!(
        api.lock().status_writes("moved").len(),
        0,
        "a Run that is well is left alone"
    );
    api.remove("pods", NS, "pod-a");
    make_pod(&api, "pod-b", 2);
    let moved = until_run(&api, "moved", |it| pod_of(it) == Some("pod-b")).await;
    assert_eq!(moved.attempt().map(|it| it.get()), Some(2));
    assert_eq!(moved.status.as_ref().and_then(|it| it.failed_attempts), Some(1));

    let store = api.lock();
    let writes = store.status_writes("moved");
    let first = &writes[0].body;
    assert_eq!(
        says(first, "Ready"),
        Some(("False".to_owned(), "Recovering".to_owned()))
    );
    assert_eq!(first["status"]["owner"], json!(null));
    assert!(
        first["status"].get("assignedPod").is_none(),
        "the route goes alone"
    );
    let second = &writes[1].body["status"];
    for field in ["assignedPod", "assignedPodUID"] {
        assert_eq!(second.get(field), Some(&json!(null)), "{field}");
    }
    assert_eq!(second["phase"], "Pending");
    let last = &writes[writes.len() - 1].body["status"];
    assert_eq!(
        (&last["assignedPod"], &last["attempt"]),
        (&json!("pod-b"), &json!(2))
    );
}

/// Bug scenario 12.
#[tokio::test]
async fn a_pod_that_only_the_watch_has_lost_keeps_its_runs() {
    let api = installation();
    let uid = make_pod(&api, "pod-a", 2);
    ready_on(&api, "well", "pod-a", &uid);
    let _scheduler = Scheduler::start(&api, "a");
    until_caught_up(&api, "sentinel").await;
    api.lie_deleted("pods", NS, "pod-a");
    // Behind the Run that the lie wakes; placed, so the Pods' change has been seen.
    make_run(&api, fixtures::run(NS, "behind"));
    until_waits(&api, "behind", "NoPodReady").await;
    make_run(&api, fixtures::run(NS, "after").runtime("none"));
    until_waits(&api, "after", "NoRuntime").await;
    assert_eq!(api.lock().status_writes("well").len(), 0);
    assert!(run(&api, "well").is_ready());
}

/// C-7.3: the exact UID.
#[tokio::test]
async fn a_pod_of_the_same_name_is_another_pod() {
    let api = installation();
    let uid = make_pod(&api, "pod-a", 2);
    ready_on(&api, "moved", "pod-a", &uid);
    let _scheduler = Scheduler::start(&api, "a");
    until_caught_up(&api, "sentinel").await;
    api.remove("pods", NS, "pod-a");
    let other = make_pod(&api, "pod-a", 2);
    assert_ne!(uid, other);
    let moved = until_run(&api, "moved", |it| it.attempt().is_some_and(|it| it.get() == 2)).await;
    assert_eq!(moved.assignment().map(|it| it.1.as_str().to_owned()), Some(other));
}

/// C-7.3, C-7.4: nothing vouches for the end of a Pod that this leader never saw, so 40 s pass.
#[tokio::test(start_paused = true)]
async fn what_was_lost_while_nobody_looked_is_found_at_the_start() {
    let api = installation();
    ready_on(&api, "ready", "pod-x", "gone");
    make_run(&api, fixtures::run(NS, "unclaimed").scheduled_on("pod-x"));
    make_run(&api, fixtures::run(NS, "cancelled").ready_on("pod-x").cancelled());
    make_run(&api, fixtures::run(NS, "deleted").ready_on("pod-x").deleting());
    make_run(&api, fixtures::run(NS, "task").task().running_on("pod-x"));
    let uid = make_pod(&api, "pod-b", 4);
    let _scheduler = Scheduler::start_with(&api, "a", Timing::default());
    beating(&api, &[("pod-b", &uid)], all_is_found(&api)).await;
}

async fn all_is_found(api: &Api) {
    until_run(api, "ready", |it| pod_of(it) == Some("pod-b")).await;
    let unclaimed = until_run(api, "unclaimed", |it| pod_of(it) == Some("pod-b")).await;
    assert_eq!(
        unclaimed.status.and_then(|it| it.failed_attempts),
        None,
        "nothing of it had run"
    );
    until_run(api, "cancelled", |it| it.phase() == Phase::Cancelled).await;
    let task = until_run(api, "task", |it| it.phase() == Phase::Failed).await;
    assert_eq!(
        task.condition("Completed").map(|it| it.reason.as_str()),
        Some("RetriesExhausted")
    );
    // Bug scenario 92: nobody is left to take the finalizer off.
    api.until("the deleted one is gone", |api| {
        find_run(api, "deleted").is_none().then_some(())
    })
    .await;
}

/// C-7.3: a drained, confirmed hand-over costs no attempt.
#[tokio::test]
async fn a_confirmed_hand_over_moves_at_once_while_the_pod_lives() {
    let api = installation();
    let uid = make_pod(&api, "pod-a", 2);
    ready_on(&api, "handed", "pod-a", &uid);
    let _scheduler = Scheduler::start(&api, "a");
    make_pod(&api, "pod-b", 2);
    until_caught_up(&api, "sentinel").await;
    // pod-a drains: it is not ready any more and confirms that it holds nothing.
    api.edit("pods", NS, "pod-a", |it| {
        it["status"]["conditions"][0]["status"] = json!("False")
    });
    api.edit("runs", NS, "handed", |it| {
        let status = &mut it["status"];
        status["releasedAttempt"] = json!(1);
        status["phase"] = json!("Running");
        status.as_object_mut().expect("an object").remove("owner");
        for condition in status["conditions"].as_array_mut().expect("a list") {
            if condition["type"] == "Ready" {
                condition["status"] = json!("False");
                condition["reason"] = json!("Draining");
            }
        }
    });
    let handed = until_run(&api, "handed", |it| pod_of(it) == Some("pod-b")).await;
    let status = handed.status.expect("a status");
    assert_eq!(
        (status.attempt, status.failed_attempts),
        (Some(2), None),
        "a hand-over costs no attempt"
    );
}

/// C-7.4: the finalizer is cleared by a fence and by nothing else.
#[tokio::test]
async fn a_deleted_run_is_left_to_its_living_owner() {
    let api = installation();
    let uid = make_pod(&api, "pod-a", 2);
    let owned = uid.clone();
    make_run(
        &api,
        fixtures::run(NS, "held")
            .ready_on("pod-a")
            .deleting()
            .with(move |it| {
                it.status.get_or_insert_default().assigned_pod_uid = Some(owned);
            }),
    );
    let _scheduler = Scheduler::start(&api, "a");
    until_caught_up(&api, "sentinel").await;
    assert!(find_run(&api, "held").is_some());
    api.remove("pods", NS, "pod-a");
    api.until("it is gone with its Pod", |api| {
        find_run(api, "held").is_none().then_some(())
    })
    .await;
}
