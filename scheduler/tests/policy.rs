//! What follows the loss of an owner (C-7.3): how soon, how often, and when it is given up. And what is deleted
//! while everything around it goes too (C-7.4).

use std::time::Duration;

use kruntimes_api::{Run, fixtures, run::Phase};
use kruntimes_scheduler::lease::Timing;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::common::*;

fn start(api: &Api) -> Scheduler {
    Scheduler::start_with(api, "a", Timing::default())
}

/// What the owner writes when the function can be called.
fn claim(api: &Api, name: &str) {
    let at = now().to_string();
    api.edit("runs", NS, name, |it| {
        let status = &mut it["status"];
        status["phase"] = json!("Ready");
        status["startTime"] = json!(at);
        status["owner"] = json!({ "address": "10.0.0.1:9443", "peerKey": "ab".repeat(32) });
        let conditions = status["conditions"].as_array_mut().expect("a list");
        conditions.retain(|it| it["type"] != "Ready");
        conditions.push(json!({
            "type": "Ready", "status": "True", "reason": "FunctionRegistered", "message": "",
            "observedGeneration": 1, "lastTransitionTime": at,
        }));
    });
}

/// Deletes the Pod that owns the Run, as its kubelet reports its end, and makes another one; returns its UID.
fn lose(api: &Api, owner: &str, next: &str) -> String {
    api.remove("pods", NS, owner);
    make_pod_on_node(api, next, 2)
}

fn failed(run: &Run) -> Option<i32> {
    run.status.as_ref().and_then(|it| it.failed_attempts)
}

fn is_about(time: Duration, wanted: Duration) -> bool {
    // ±20 %, and what a machine needs.
    let (least, most) = (
        wanted.mul_f64(0.79),
        wanted.mul_f64(1.21) + Duration::from_secs(1),
    );
    (least..=most).contains(&time)
}

/// C-7.3: nobody has to call: the route goes within 2 s of the deletion, the next attempt follows after the
/// policy's pause, which doubles, and the last loss ends the Run.
#[tokio::test(start_paused = true)]
async fn losses_are_followed_by_attempts_as_the_policy_says() {
    let api = installation();
    make_pod_on_node(&api, "pod-0", 2);
    let _scheduler = start(&api);
    let run = fixtures::run(NS, "n").with(|it| {
        let policy = json!({ "maxAttempts": 3, "backoff": "4s" });
        it.spec.retry_policy = serde_json::from_value(policy).expect("a policy");
    });
    make_run(&api, run);
    until_assigned(&api, "n").await;
    for (loss, pause) in [(1, 4), (2, 8)] {
        claim(&api, "n");
        let lost = Instant::now();
        let next = format!("pod-{loss}");
        lose(&api, &format!("pod-{}", loss - 1), &next);
        until_run(&api, "n", |it| !it.is_ready()).await;
        assert!(lost.elapsed() < Duration::from_secs(2), "{:?}", lost.elapsed());
        let moved = until_run(&api, "n", |it| pod_of(it) == Some(next.as_str())).await;
        assert!(
            is_about(lost.elapsed(), Duration::from_secs(pause)),
            "{pause}: {:?}",
            lost.elapsed()
        );
        assert_eq!(
            (failed(&moved), moved.attempt().map(|it| it.get())),
            (Some(loss), Some(loss + 1))
        );
    }
    claim(&api, "n");
    lose(&api, "pod-2", "pod-3");
    let ended = until_run(&api, "n", |it| it.phase() == Phase::Failed).await;
    for kind in ["Completed", "Succeeded", "Ready"] {
        let condition = ended.condition(kind).expect(kind);
        assert_eq!(condition.reason, "RetriesExhausted", "{kind}");
    }
    assert_eq!((failed(&ended), ended.assignment()), (Some(3), None));
}

/// C-7.3: ten minutes Ready, and failures before them do not count any more.
#[tokio::test(start_paused = true)]
async fn the_budget_begins_anew_after_ten_good_minutes() {
    let api = installation();
    make_pod_on_node(&api, "pod-0", 2);
    let _scheduler = start(&api);
    make_run(&api, fixtures::run(NS, "n"));
    until_assigned(&api, "n").await;
    claim(&api, "n");
    let uid = lose(&api, "pod-0", "pod-1");
    let moved = until_run(&api, "n", |it| pod_of(it) == Some("pod-1")).await;
    assert_eq!(failed(&moved), Some(1));
    claim(&api, "n");
    beating(&api, &[("pod-1", &uid)], async {
        sleep(Duration::from_secs(590)).await;
        assert_eq!(failed(&run(&api, "n")), Some(1));
        sleep(Duration::from_secs(20)).await;
        assert_eq!(failed(&run(&api, "n")), None);
    })
    .await;
    assert!(run(&api, "n").is_ready());
    lose(&api, "pod-1", "pod-2");
    let moved = until_run(&api, "n", |it| pod_of(it) == Some("pod-2")).await;
    assert_eq!(failed(&moved), Some(1), "the first of a new count");
}

/// C-7.3: a Pod that dies before it has claimed the Run: nothing failed, so nothing is counted or waited for.
#[tokio::test(start_paused = true)]
async fn what_was_not_claimed_moves_at_once_and_for_free() {
    let api = installation();
    make_pod_on_node(&api, "pod-0", 2);
    let _scheduler = start(&api);
    make_run(&api, fixtures::run(NS, "n"));
    until_assigned(&api, "n").await;
    let lost = Instant::now();
    lose(&api, "pod-0", "pod-1");
    let moved = until_run(&api, "n", |it| pod_of(it) == Some("pod-1")).await;
    assert!(lost.elapsed() < Duration::from_secs(2), "{:?}", lost.elapsed());
    assert_eq!(
        (failed(&moved), moved.attempt().map(|it| it.get())),
        (None, Some(2))
    );
}

/// C-7.3: an unready Pod whose heart beats keeps its Runs, however long.
#[tokio::test(start_paused = true)]
async fn an_unready_pod_alone_is_left_alone() {
    let api = installation();
    let uid = make_pod_on_node(&api, "pod-a", 2);
    ready_on(&api, "n", "pod-a", &uid);
    let _scheduler = start(&api);
    until_caught_up(&api, "sentinel").await;
    api.edit("pods", NS, "pod-a", |it| {
        it["status"]["conditions"][0]["status"] = json!("False")
    });
    beating(&api, &[("pod-a", &uid)], sleep(Duration::from_secs(300))).await;
    assert_eq!(api.lock().status_writes("n").len(), 0);
    assert!(run(&api, "n").is_ready());
    let pod = api.get("pods", NS, "pod-a").expect("it is there");
    assert!(!pod["metadata"]["deletionTimestamp"].is_string());
}

/// C-7.4, scenario 92: a namespace is deleted, or everything of a Runtime, in whatever order: no finalizer stays,
/// whether the node can be asked or not.
#[tokio::test(start_paused = true)]
async fn a_deleted_run_goes_whatever_goes_before_it() {
    let gone = ["runtimes", "pods", "leases", "nodes"];
    for first in 0..gone.len() {
        let api = installation();
        let uid = make_pod_on_node(&api, "pod-a", 2);
        for (name, claimed) in [("ready", true), ("scheduled", false)] {
            let owner = uid.clone();
            let run = fixtures::run(NS, name);
            let run = if claimed {
                run.ready_on("pod-a")
            } else {
                run.scheduled_on("pod-a")
            };
            let owned = run.with(move |it| it.status.get_or_insert_default().assigned_pod_uid = Some(owner));
            make_run(&api, owned.deleting());
        }
        let _scheduler = start(&api);
        until_caught_up(&api, "sentinel").await;
        for at in 0..gone.len() {
            let plural = gone[(first + at) % gone.len()];
            let name = match plural {
                "runtimes" => "python",
                "pods" => "pod-a",
                "leases" => "runtimed-pod-a",
                _ => "node-1",
            };
            // Nodes have no namespace.
            api.remove(plural, if plural == "nodes" { "" } else { NS }, name);
            sleep(Duration::from_secs(1)).await;
        }
        let began = Instant::now();
        for name in ["ready", "scheduled"] {
            api.until("it is gone", |api| find_run(api, name).is_none().then_some(()))
                .await;
        }
        assert!(
            began.elapsed() < Duration::from_secs(45),
            "{}: {:?}",
            gone[first],
            began.elapsed()
        );
    }
}
