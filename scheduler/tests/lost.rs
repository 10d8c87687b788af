//! Owners that never come back while their Pods stay, and Pods that go without having ended: every fence of
//! C-7.3, by the scheduler's real clocks. The clock of the tests is paused and jumps.

use std::time::Duration;

use kruntimes_api::{fixtures, run::Phase};
use kruntimes_scheduler::lease::Timing;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::common::*;

fn start(api: &Api) -> Scheduler {
    Scheduler::start_with(api, "a", Timing::default())
}

fn is_deleting(api: &Api, pod: &str) -> bool {
    api.get("pods", NS, pod)
        .is_some_and(|it| it["metadata"]["deletionTimestamp"].is_string())
}

async fn until_unrouted(api: &Api, name: &str) {
    let run = until_run(api, name, |it| !it.is_ready()).await;
    assert_eq!(
        run.condition("Ready").map(|it| it.reason.as_str()),
        Some("Recovering")
    );
    assert_eq!(pod_of(&run), Some("pod-a"), "the route goes alone");
    assert_eq!(run.status.and_then(|it| it.owner), None);
}

fn is_within(time: Duration, from: u64, to: u64) -> bool {
    (from..=to).contains(&time.as_secs())
}

/// C-7.3: a crash-looping runtimed, or a node that went dark. 30 s: route and Pod. 40 s and out of the
/// endpoints: the assignment.
#[tokio::test(start_paused = true)]
async fn a_silent_owner_loses_its_pod_and_the_run_moves() {
    let api = installation();
    let a = make_pod_on_node(&api, "pod-a", 2);
    ready_on(&api, "moved", "pod-a", &a);
    let _scheduler = start(&api);
    beating(&api, &[("pod-a", &a)], sleep(Duration::from_secs(95))).await;
    assert_eq!(
        api.lock().status_writes("moved").len(),
        0,
        "it beats, so it is left alone"
    );
    assert!(!is_deleting(&api, "pod-a"));

    beat(&api, "pod-a", &a, "function");
    let last = Instant::now();
    let b = make_pod_on_node(&api, "pod-b", 2);
    let story = async {
        until_unrouted(&api, "moved").await;
        assert!(is_within(last.elapsed(), 30, 31), "{:?}", last.elapsed());
        api.until("its Pod is deleted", |api| {
            is_deleting(api, "pod-a").then_some(())
        })
        .await;
        assert!(is_within(last.elapsed(), 30, 31), "{:?}", last.elapsed());
        // The kubelet says nothing, and the endpoints still list it: no fence, however long.
        sleep(Duration::from_secs(60)).await;
        assert_eq!(pod_of(&run(&api, "moved")), Some("pod-a"));
        api.edit("pods", NS, "pod-a", |it| {
            it["status"]["conditions"][0]["status"] = json!("False")
        });
        let moved = until_run(&api, "moved", |it| pod_of(it) == Some("pod-b")).await;
        assert_eq!(moved.attempt().map(|it| it.get()), Some(2));
        assert_eq!(moved.status.and_then(|it| it.failed_attempts), Some(1));
    };
    beating(&api, &[("pod-b", &b)], story).await;
}

/// C-7.3: when many are silent at once, their way to Kubernetes is ill. Their routes go at once, their Pods
/// three a minute: what answers again meanwhile stays.
#[tokio::test(start_paused = true)]
async fn many_silent_pods_are_not_deleted_at_once() {
    let api = installation();
    let pods = ["pod-a", "pod-b", "pod-c", "pod-d", "pod-e"];
    for pod in pods {
        let uid = make_pod_on_node(&api, pod, 2);
        ready_on(&api, &format!("on-{pod}"), pod, &uid);
    }
    let healthy = make_pod_on_node(&api, "pod-z", 2);
    let _scheduler = start(&api);
    let deleted = || pods.iter().filter(|it| is_deleting(&api, it)).count();
    let story = async {
        for pod in pods {
            until_run(&api, &format!("on-{pod}"), |it| !it.is_ready()).await;
        }
        sleep(Duration::from_secs(15)).await;
        assert_eq!(deleted(), 3);
        sleep(Duration::from_secs(60)).await;
        assert_eq!(deleted(), 5);
    };
    beating(&api, &[("pod-z", &healthy)], story).await;
}

/// C-7.3: all three at once are the fence, and not before 40 s.
#[tokio::test(start_paused = true)]
async fn a_deleted_unready_silent_pod_is_out_after_40_s() {
    let api = installation();
    let a = make_pod_on_node(&api, "pod-a", 2);
    ready_on(&api, "moved", "pod-a", &a);
    let _scheduler = start(&api);
    until_caught_up(&api, "sentinel").await;
    beat(&api, "pod-a", &a, "function");
    let last = Instant::now();
    api.edit("pods", NS, "pod-a", |it| {
        it["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        it["status"]["conditions"][0]["status"] = json!("False");
    });
    let b = make_pod_on_node(&api, "pod-b", 2);
    let story = async {
        until_unrouted(&api, "moved").await;
        until_run(&api, "moved", |it| it.assignment().is_none()).await;
        assert!(is_within(last.elapsed(), 40, 42), "{:?}", last.elapsed());
        until_run(&api, "moved", |it| pod_of(it) == Some("pod-b")).await;
    };
    beating(&api, &[("pod-b", &b)], story).await;
}

/// C-7.3: a Pod deleted by force has lost its object and nothing else, if nobody reaches its node; which
/// Kubernetes says late, and the heartbeat sooner.
#[tokio::test(start_paused = true)]
async fn a_pod_forced_off_an_unreachable_node_is_waited_for() {
    for (ready, silent, from, to) in [("True", 0, 0, 1), ("Unknown", 0, 40, 42), ("True", 20, 40, 42)] {
        let api = installation();
        let a = make_pod_on_node(&api, "pod-a", 2);
        ready_on(&api, "moved", "pod-a", &a);
        let _scheduler = start(&api);
        until_caught_up(&api, "sentinel").await;
        make_node(&api, "node-1", ready);
        beat(&api, "pod-a", &a, "function");
        let last = Instant::now();
        sleep(Duration::from_secs(silent)).await;
        api.remove("pods", NS, "pod-a");
        until_run(&api, "moved", |it| !it.is_ready()).await;
        assert!(
            is_within(last.elapsed(), silent, silent + 1),
            "the route goes at once"
        );
        until_run(&api, "moved", |it| it.assignment().is_none()).await;
        assert!(
            is_within(last.elapsed(), from, to),
            "{ready}: {:?}",
            last.elapsed()
        );
    }
}

/// C-7.3: the 40 s of a Pod without an object are those of its heartbeat, and not of our watch on it.
#[tokio::test(start_paused = true)]
async fn a_heartbeat_of_a_pod_without_an_object_counts() {
    let api = installation();
    let a = make_pod_on_node(&api, "pod-a", 2);
    ready_on(&api, "moved", "pod-a", &a);
    let _scheduler = start(&api);
    until_caught_up(&api, "sentinel").await;
    make_node(&api, "node-1", "Unknown");
    api.faults(|it| it.silent = vec!["leases"]);
    api.remove("pods", NS, "pod-a");
    beating(&api, &[("pod-a", &a)], async {
        until_unrouted(&api, "moved").await;
        sleep(Duration::from_secs(115)).await;
    })
    .await;
    assert_eq!(pod_of(&run(&api, "moved")), Some("pod-a"), "it may still serve");
    let last = Instant::now();
    until_run(&api, "moved", |it| it.assignment().is_none()).await;
    // The last heartbeat may be seen as late as the next look at it.
    assert!(is_within(last.elapsed(), 30, 80), "{:?}", last.elapsed());
}

/// C-7.3: an evicted Pod stays as an object until somebody removes it.
#[tokio::test(start_paused = true)]
async fn an_evicted_pod_is_removed_and_its_runs_move() {
    let api = installation();
    let a = make_pod_on_node(&api, "pod-a", 2);
    ready_on(&api, "moved", "pod-a", &a);
    let _scheduler = start(&api);
    until_caught_up(&api, "sentinel").await;
    let evicted = Instant::now();
    api.edit("pods", NS, "pod-a", |it| {
        it["status"] = json!({ "phase": "Failed", "reason": "Evicted" })
    });
    until_unrouted(&api, "moved").await;
    api.until("the Pod is deleted", |api| {
        is_deleting(api, "pod-a").then_some(())
    })
    .await;
    assert!(is_within(evicted.elapsed(), 0, 1), "{:?}", evicted.elapsed());
    // Its containers have ended, so the kubelet lets it go.
    api.remove("pods", NS, "pod-a");
    make_pod_on_node(&api, "pod-b", 2);
    until_run(&api, "moved", |it| pod_of(it) == Some("pod-b")).await;
}

/// C-2.3, C-7.3: it is our watch that is silent, not the owner; the live Lease tells.
#[tokio::test(start_paused = true)]
async fn a_heartbeat_that_only_the_watch_misses_counts() {
    let api = installation();
    let a = make_pod_on_node(&api, "pod-a", 2);
    ready_on(&api, "well", "pod-a", &a);
    let _scheduler = start(&api);
    until_caught_up(&api, "sentinel").await;
    api.faults(|it| it.silent = vec!["leases"]);
    beating(&api, &[("pod-a", &a)], sleep(Duration::from_secs(200))).await;
    assert_eq!(api.lock().status_writes("well").len(), 0);
    assert!(!is_deleting(&api, "pod-a") && run(&api, "well").is_ready());
}

/// C-7.3: a new leader has heard nobody, and takes its time to listen before it calls anybody silent.
#[tokio::test(start_paused = true)]
async fn a_new_leader_counts_silence_from_its_own_start() {
    let api = installation();
    let a = make_pod_on_node(&api, "pod-a", 2);
    ready_on(&api, "well", "pod-a", &a);
    // Nobody could write for a while, the heartbeats neither.
    sleep(Duration::from_secs(300)).await;
    let _scheduler = start(&api);
    until_caught_up(&api, "sentinel").await;
    sleep(Duration::from_secs(25)).await;
    beating(&api, &[("pod-a", &a)], async {
        beat(&api, "pod-a", &a, "function");
        sleep(Duration::from_secs(60)).await;
    })
    .await;
    assert_eq!(api.lock().status_writes("well").len(), 0);
    assert!(!is_deleting(&api, "pod-a"));
}

/// C-7.4, scenario 92: the owner of a deleted Run never comes back, and its Pod stays.
#[tokio::test(start_paused = true)]
async fn the_finalizer_of_a_silent_owner_is_cleared() {
    let api = installation();
    let a = make_pod_on_node(&api, "pod-a", 2);
    for (name, ended) in [("living", false), ("ended", true)] {
        let owner = a.clone();
        let run = fixtures::run(NS, name).ready_on("pod-a").with(move |it| {
            it.status.get_or_insert_default().assigned_pod_uid = Some(owner);
        });
        let run = if ended { run.ended(Phase::Failed, "X") } else { run };
        make_run(&api, run.deleting());
    }
    let _scheduler = start(&api);
    let began = Instant::now();
    api.until("the Pod is deleted", |api| {
        is_deleting(api, "pod-a").then_some(())
    })
    .await;
    api.edit("pods", NS, "pod-a", |it| {
        it["status"]["conditions"][0]["status"] = json!("False")
    });
    for name in ["living", "ended"] {
        api.until("it is gone", |api| find_run(api, name).is_none().then_some(()))
            .await;
    }
    assert!(is_within(began.elapsed(), 40, 60), "{:?}", began.elapsed());
}

/// C-7.3: a cancelled Run whose owner is lost ends Cancelled.
#[tokio::test(start_paused = true)]
async fn a_cancelled_run_of_a_silent_owner_ends_cancelled() {
    let api = installation();
    let a = make_pod_on_node(&api, "pod-a", 2);
    ready_on(&api, "cancelled", "pod-a", &a);
    let _scheduler = start(&api);
    api.edit("runs", NS, "cancelled", |it| {
        it["spec"]["cancelRequested"] = json!(true)
    });
    api.until("the Pod is deleted", |api| {
        is_deleting(api, "pod-a").then_some(())
    })
    .await;
    api.remove("pods", NS, "pod-a");
    let run = until_run(&api, "cancelled", |it| it.phase() == Phase::Cancelled).await;
    assert_eq!(
        run.condition("Completed").map(|it| it.status.as_str()),
        Some("True")
    );
}
