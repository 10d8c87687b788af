//! No Pod gets more than it can hold, whatever the watch and the API do.

use std::collections::BTreeSet;

use kruntimes_api::{fixtures, run::Phase};
use serde_json::json;

use crate::common::*;

fn assigned(api: &Api, runs: usize) -> BTreeSet<String> {
    (0..runs)
        .map(|index| format!("r{index}"))
        .filter(|name| run(api, name).assignment().is_some())
        .collect()
}

/// C-7.1
#[tokio::test]
async fn assignments_that_the_watch_has_not_shown_take_room() {
    let api = installation();
    make_pod(&api, "pod-a", 2);
    make_pod(&api, "pod-b", 2);
    for index in 0..10 {
        make_run(&api, fixtures::run(NS, &format!("r{index}")));
    }
    let _scheduler = Scheduler::start(&api, "a");
    // From its list on it sees no Run change any more.
    api.faults(|it| it.silent = vec!["runs"]);
    api.until("four are assigned", |api| {
        (assigned(api, 10).len() >= 4).then_some(())
    })
    .await;
    // Each of the six others has been looked at and waits.
    let waits = |api: &Api| {
        (0..10)
            .filter(|it| scheduled_reason(&run(api, &format!("r{it}"))) == Some("CapacityFull"))
            .count()
    };
    api.until("six wait", |api| (waits(api) == 6).then_some(())).await;
    assert_eq!(assigned(&api, 10).len(), 4);
}

/// C-7.1: conflicts re-queue.
#[tokio::test]
async fn a_conflict_frees_the_room_and_is_decided_again() {
    let api = installation();
    make_pod(&api, "pod-a", 1);
    let _scheduler = Scheduler::start(&api, "a");
    make_run(&api, fixtures::run(NS, "sentinel").runtime("none"));
    until_waits(&api, "sentinel", "NoRuntime").await;
    api.faults(|it| it.conflict_once = vec!["runs/status"]);
    make_run(&api, fixtures::run(NS, "first"));
    let first = until_assigned(&api, "first").await;
    assert_eq!(first.attempt().map(|it| it.get()), Some(1));
    let codes: Vec<_> = api
        .lock()
        .status_writes("first")
        .iter()
        .map(|it| it.status)
        .collect();
    assert_eq!(codes, [409, 200]);
}

#[tokio::test]
async fn an_assignment_whose_answer_was_lost_is_not_made_twice() {
    let api = installation();
    make_pod(&api, "pod-a", 1);
    let _scheduler = Scheduler::start(&api, "a");
    make_run(&api, fixtures::run(NS, "sentinel").runtime("none"));
    until_waits(&api, "sentinel", "NoRuntime").await;
    // Nor does the watch tell.
    api.faults(|it| {
        it.lose_answer_once = vec!["runs/status"];
        it.silent = vec!["runs"];
    });
    make_run(&api, fixtures::run(NS, "first"));
    make_run(&api, fixtures::run(NS, "second"));
    api.faults(|it| it.silent.clear());
    let first = until_assigned(&api, "first").await;
    until_waits(&api, "second", "CapacityFull").await;
    assert_eq!(first.attempt().map(|it| it.get()), Some(1));
    assert_eq!(api.lock().status_writes("first").len(), 1);
}

/// Bug scenario 18: a decision made on an old view never overwrites.
#[tokio::test]
async fn a_write_that_was_decided_on_an_old_view_is_dropped() {
    let api = installation();
    make_run(&api, fixtures::run(NS, "late"));
    let _scheduler = Scheduler::start(&api, "a");
    until_waits(&api, "late", "NoPodReady").await;
    api.faults(|it| it.silent = vec!["runs"]);
    // Somebody ends it, and the scheduler does not see that.
    api.edit("runs", NS, "late", |it| {
        it["status"]["phase"] = json!("Cancelled");
        it["spec"]["cancelRequested"] = json!(true);
    });
    make_pod(&api, "pod-a", 1);
    api.until("it is tried", |api| {
        let refused = api.lock().status_writes("late").iter().any(|it| it.status == 409);
        refused.then_some(())
    })
    .await;
    let late = run(&api, "late");
    assert_eq!((late.phase(), late.assignment()), (Phase::Cancelled, None));
}
