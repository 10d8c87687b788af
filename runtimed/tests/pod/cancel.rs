//! Ends on request: cancel, delete, SIGTERM. Always clean-up first, terminal status or hand-over next.

use std::time::Duration;

use kruntimes_api::{Run, run::Phase};
use kruntimes_ops::drain::Cause;
use kruntimes_proto::failure::Reason;

use super::common::{
    Pod, Starts, call,
    pod::{assigned, request},
};

fn nothing_is_left(pod: &Pod, run: &Run) {
    assert!(pod.server.live().is_empty(), "registration");
    assert_eq!(pod.records(), 0, "journal");
    assert!(!pod.has_directory(run), "directory");
}

/// C-6.2: cancelled after the clean-up, with every condition of an end.
#[tokio::test(start_paused = true)]
async fn cancelling_ends_a_ready_run() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    pod.kubernetes.ready("n").await;
    pod.kubernetes
        .edit("n", |run| run.spec.cancel_requested = Some(true));
    let ended = |run: Option<&Run>| {
        run.is_some_and(|run| run.phase() == Phase::Cancelled && run.metadata.finalizers.is_none())
    };
    pod.kubernetes.until("n", ended).await;
    let run = pod.kubernetes.run("n").unwrap();
    nothing_is_left(&pod, &run);
    let status = run.status.as_ref().unwrap();
    assert!(status.completion_time.is_some() && status.owner.is_none());
    for (kind, holds) in [
        ("Completed", "True"),
        ("Succeeded", "False"),
        ("Ready", "False"),
        ("Running", "False"),
    ] {
        let condition = run.condition(kind).unwrap();
        assert_eq!(
            (condition.status.as_str(), condition.reason.as_str()),
            (holds, "Cancelled"),
            "{kind}"
        );
        assert_eq!(condition.observed_generation, run.metadata.generation, "{kind}");
    }
    let told = ["Claimed", "FunctionRegistered", "Cancelled"];
    pod.kubernetes
        .until("n", |_| pod.kubernetes.events("n") == told)
        .await;
}

/// Scenario 103: the registration does not end, the cancellation does (C-6.2).
#[tokio::test(start_paused = true)]
async fn cancelling_does_not_wait_for_a_registration() {
    let pod = Pod::start().await;
    pod.server.starts(Starts::Slowly);
    pod.kubernetes.put(&assigned("n").build());
    pod.server.until_registered(1).await;
    pod.kubernetes
        .edit("n", |run| run.spec.cancel_requested = Some(true));
    pod.kubernetes
        .until("n", |run| run.is_some_and(|run| run.phase() == Phase::Cancelled))
        .await;
    nothing_is_left(&pod, &pod.kubernetes.run("n").unwrap());
}

#[tokio::test(start_paused = true)]
async fn cancelling_before_the_claim_needs_no_server() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").cancelled().build());
    pod.kubernetes
        .until("n", |run| run.is_some_and(|run| run.phase() == Phase::Cancelled))
        .await;
    assert!(pod.server.registered().is_empty());
}

/// C-6.2: a call that runs does not keep a Run from being cancelled or deleted, also not while the Pod
/// drains and waits for that call.
#[tokio::test(start_paused = true)]
async fn cancelling_and_deleting_do_not_wait_for_a_call() {
    for (drains, deletes) in [(false, false), (false, true), (true, false), (true, true)] {
        let pod = Pod::start().await;
        pod.kubernetes.put(&assigned("n").build());
        let run = pod.kubernetes.ready("n").await;
        let mut long = request(&run, "wait");
        long.get_mut().timeout_millis = 300_000;
        let call = pod.app.invoker().serve(long);
        let meanwhile = async {
            pod.server.until_invoked(1).await;
            if drains {
                pod.app.drain.stop(Cause::Asked("SIGTERM"));
                tokio::time::sleep(Duration::from_secs(5)).await;
                assert_eq!(pod.server.live().len(), 1, "patient");
            }
            if deletes {
                pod.kubernetes.delete("n");
            } else {
                pod.kubernetes
                    .edit("n", |run| run.spec.cancel_requested = Some(true));
            }
            let over = |run: Option<&Run>| match run {
                Some(run) => run.phase() == Phase::Cancelled && run.metadata.finalizers.is_none(),
                None => deletes,
            };
            let began = tokio::time::Instant::now();
            pod.kubernetes.until("n", over).await;
            assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        };
        let (answer, ()) = tokio::join!(call, meanwhile);
        assert_eq!(answer.unwrap_err().reason, Reason::Cancelled);
        nothing_is_left(&pod, &run);
    }
}

/// C-6.1: the finalizer goes after registration, record, directory and capacity.
#[tokio::test(start_paused = true)]
async fn deleting_cleans_up_and_then_lets_the_object_go() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    pod.kubernetes.delete("n");
    pod.kubernetes.until("n", |run| run.is_none()).await;
    nothing_is_left(&pod, &run);
    // And its capacity is free again.
    for name in ["a", "b"] {
        pod.kubernetes.put(&assigned(name).build());
        pod.kubernetes.ready(name).await;
    }
}

/// C-6.2: every step of the clean-up is tried again until it is done, and does no harm when it was already:
/// the server refuses at first, then Kubernetes does not answer.
#[tokio::test(start_paused = true)]
async fn deleting_gets_through_failures_of_every_step() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    pod.server.keep(2);
    pod.kubernetes.delete("n");
    while pod.server.live().len() == 1 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    pod.kubernetes.set_down(true);
    tokio::time::sleep(Duration::from_secs(20)).await;
    nothing_is_left(&pod, &run);
    pod.kubernetes.set_down(false);
    pod.kubernetes.until("n", |run| run.is_none()).await;
    nothing_is_left(&pod, &run);
    assert_eq!(pod.server.unregistered(), ["reg_1"], "once");
}

/// The answer to the last write says that the object is gone: nothing more is written or asked,
/// although the watch tells it later.
#[tokio::test(start_paused = true)]
async fn a_deletion_costs_one_write() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    let before = (pod.kubernetes.writes().len(), pod.kubernetes.reads());
    pod.kubernetes.delay_watch(Duration::from_secs(5));
    pod.kubernetes.delete("n");
    pod.kubernetes.until("n", |run| run.is_none()).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    nothing_is_left(&pod, &run);
    assert_eq!(pod.kubernetes.writes()[before.0..], ["run n"]);
    assert_eq!(pod.kubernetes.reads(), before.1);
}

/// Scenario 106: deleted while a new attempt replaces an old one.
#[tokio::test(start_paused = true)]
async fn deleting_in_the_middle_of_recovery_leaves_no_generation_behind() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    pod.server.starts(Starts::Slowly);
    pod.kubernetes
        .edit("n", |run| run.status.as_mut().unwrap().attempt = Some(2));
    pod.server.until_registered(2).await;
    pod.kubernetes.delete("n");
    pod.kubernetes.until("n", |run| run.is_none()).await;
    nothing_is_left(&pod, &run);
    let mut unregistered = pod.server.unregistered();
    unregistered.dedup();
    assert_eq!(unregistered, ["reg_1", "reg_2"]);
}

/// Scenario 18: a terminal phase is never overwritten (C-2.2).
#[tokio::test(start_paused = true)]
async fn an_end_that_somebody_else_wrote_is_not_overwritten() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    pod.kubernetes.edit("n", |run| {
        run.status.as_mut().unwrap().finish(
            Phase::Failed,
            "RetriesExhausted",
            "",
            None,
            jiff::Timestamp::now(),
        );
        run.spec.cancel_requested = Some(true);
    });
    pod.kubernetes
        .until("n", |run| {
            run.is_some_and(|run| run.metadata.finalizers.is_none())
        })
        .await;
    assert_eq!(pod.kubernetes.run("n").unwrap().phase(), Phase::Failed);
    nothing_is_left(&pod, &run);
}

/// C-6.4, scenario 43 and scenario 104: a running call ends, new ones are refused, then every Run is
/// handed over.
#[tokio::test]
async fn sigterm_drains_and_hands_over() {
    let pod = Pod::start().await;
    for name in ["busy", "quiet"] {
        pod.kubernetes.put(&assigned(name).build());
    }
    let run = pod.kubernetes.ready("busy").await;
    pod.kubernetes.ready("quiet").await;
    let channel = pod.dial().await;
    let running = call(channel.clone(), request(&run, "wait"));
    let stopping = async {
        pod.server.until_invoked(1).await;
        pod.app.drain.stop(Cause::Asked("SIGTERM"));
        pod.kubernetes.until_reason("quiet", "Draining").await;
        assert!(
            pod.server.live().iter().any(|id| id == "reg_1" || id == "reg_2"),
            "the busy one is there still"
        );
        let refused = pod.app.invoker().serve(request(&run, "2")).await.unwrap_err();
        assert_eq!(refused.reason, Reason::Draining);
        // A label patch does not wake it up again.
        pod.kubernetes.edit("busy", |run| {
            run.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into())
        });
        let refused = call(channel.clone(), request(&run, "3")).await.unwrap_err();
        assert_eq!(
            refused.reason,
            Reason::Draining,
            "an answer, over the connection that is there"
        );
        pod.server.go();
    };
    let (answer, ()) = tokio::join!(running, stopping);
    assert_eq!(answer.unwrap().into_inner().output, "wait");
    let (kubernetes, server) = (pod.kubernetes.clone(), pod.server.clone());
    drop(channel);
    let outcome = tokio::time::timeout(Duration::from_secs(60), pod.stop())
        .await
        .expect("exits");
    assert!(outcome.is_clean(), "{outcome:?}");
    assert!(server.live().is_empty());
    for name in ["busy", "quiet"] {
        let run = kubernetes.run(name).unwrap();
        let status = run.status.as_ref().unwrap();
        assert_eq!(status.released_attempt, Some(1), "{name}");
        assert_eq!(run.condition("Ready").unwrap().reason, "Draining");
        assert!(run.metadata.finalizers.is_none() && !run.phase().is_terminal());
    }
}
