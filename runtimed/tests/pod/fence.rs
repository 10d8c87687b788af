//! Calls that were routed to something else are refused before anything starts (C-4).

use kruntimes_api::{
    fixtures,
    keys::RunKey,
    run::Phase,
    status::{READY, Says},
};
use kruntimes_ops::drain::Cause;
use kruntimes_proto::{
    executor::{
        FunctionStatusRequest, InvokeFunctionRequest, function_runtime_client::FunctionRuntimeClient,
    },
    failure::{Dispatched, Failure, Reason},
};
use kruntimes_runtimed::caller::GatewayIsEnough;
use std::{sync::Arc, time::Duration};
use tonic::{Code, Request};

use super::common::{
    FakeServer, Kubernetes, Pod, Starts, call, comes_true,
    pod::{assigned, request},
};

/// What the owner says to a call that is changed on its way.
async fn refused(
    pod: &Pod,
    run: &kruntimes_api::Run,
    change: impl FnOnce(&mut Request<InvokeFunctionRequest>),
) -> Failure {
    let mut request = request(run, "1");
    change(&mut request);
    let failure = call(pod.dial().await, request).await.unwrap_err();
    assert_eq!(failure.dispatched, Dispatched::No, "{failure:?}");
    failure
}

fn set(name: &'static str, value: &'static str) -> impl FnOnce(&mut Request<InvokeFunctionRequest>) {
    move |request| {
        request.metadata_mut().insert(name, value.parse().unwrap());
    }
}

/// Scenario 15, behind a key that fits: Run UID, attempt and Pod UID must all fit too (C-3.7).
#[tokio::test]
async fn every_mismatch_is_a_stale_route() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    for failure in [
        refused(&pod, &run, set("kruntime-attempt", "2")).await,
        refused(&pod, &run, set("kruntime-pod-uid", "another")).await,
        refused(&pod, &run, |request| {
            let other = fixtures::uid("another Run");
            request.get_mut().registration.as_mut().unwrap().run_uid = other;
        })
        .await,
    ] {
        assert_eq!(failure.reason, Reason::StaleRoute);
    }
    for failure in [
        refused(&pod, &run, set("kruntime-hop", "2")).await,
        refused(&pod, &run, |request| {
            request.metadata_mut().remove("kruntime-hop");
        })
        .await,
        refused(&pod, &run, |request| {
            request
                .metadata_mut()
                .append("kruntime-hop", "1".parse().unwrap());
        })
        .await,
    ] {
        assert_eq!(failure.reason, Reason::BadHop);
    }
    assert!(pod.server.invoked().is_empty());
}

#[tokio::test]
async fn a_run_that_is_being_registered_says_so() {
    let pod = Pod::start().await;
    pod.server.starts(Starts::Slowly);
    pod.kubernetes.put(&assigned("n").build());
    pod.server.until_registered(1).await;
    let run = pod.kubernetes.run("n").unwrap();
    assert_eq!(refused(&pod, &run, |_| {}).await.reason, Reason::Registering);
}

#[tokio::test]
async fn the_hop_serves_invocations_only() {
    let pod = Pod::start().await;
    let mut client = FunctionRuntimeClient::new(pod.dial().await);
    let status = client
        .function_status(FunctionStatusRequest::default())
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Unimplemented);
}

/// C-6.4, on a clock of the test: no contact for 30 s, then contact again.
#[tokio::test(start_paused = true)]
async fn without_contact_to_kubernetes_calls_are_refused_and_resume() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    let local = pod.app.invoker();
    let invoke = || local.serve(request(&run, "1"));
    invoke().await.unwrap();
    pod.kubernetes.set_down(true);
    tokio::time::sleep(Duration::from_secs(45)).await;
    let failure = invoke().await.unwrap_err();
    assert_eq!(
        (failure.reason, failure.dispatched),
        (Reason::OwnerIsolated, Dispatched::No)
    );
    assert!(
        pod.server.unregistered().is_empty(),
        "isolation alone ends no function"
    );
    pod.kubernetes.set_down(false);
    tokio::time::sleep(Duration::from_secs(5)).await;
    invoke().await.unwrap();
}

/// C-6.4, C-6.7: only heartbeats fail. What the scheduler takes back then stays so until there is contact
/// again, or the two would write in turn for ever.
#[tokio::test(start_paused = true)]
async fn what_was_taken_back_without_contact_is_told_again_with_it() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    pod.kubernetes.ready("n").await;
    pod.kubernetes.set_leases_down(true);
    tokio::time::sleep(Duration::from_secs(45)).await;
    assert!(
        pod.kubernetes.run("n").unwrap().is_ready(),
        "the scheduler decides"
    );
    pod.kubernetes.edit("n", |run| {
        let status = run.status.as_mut().unwrap();
        status.phase = Some(Phase::Running);
        status.owner = None;
        let says = Says {
            kind: READY,
            holds: false,
            reason: "Recovering",
            message: "the owning Pod sends no heartbeat",
        };
        status.set(says, Some(1), jiff::Timestamp::now());
    });
    let writes = pod.kubernetes.writes().len();
    tokio::time::sleep(Duration::from_secs(300)).await;
    assert_eq!(pod.kubernetes.writes().len(), writes);
    assert!(
        pod.server.unregistered().is_empty(),
        "isolation alone ends no function"
    );
    pod.kubernetes.set_leases_down(false);
    let began = tokio::time::Instant::now();
    pod.kubernetes.ready("n").await;
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

/// C-2.3: an un-assignment arrives as a deletion from the watch; the live object decides.
#[tokio::test]
async fn a_run_that_was_taken_away_is_let_go() {
    let pod = Pod::with(Kubernetes::new(), FakeServer::new(), Arc::new(GatewayIsEnough)).await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    pod.kubernetes.edit("n", |run| {
        let status = run.status.as_mut().unwrap();
        status.assigned_pod = Some("pod-b".to_owned());
        status.assigned_pod_uid = Some(fixtures::uid("pod-b"));
        status.attempt = Some(2);
    });
    while !pod.server.live().is_empty() || pod.has_directory(&run) {
        tokio::task::yield_now().await;
    }
    assert_eq!(refused(&pod, &run, |_| {}).await.reason, Reason::StaleRoute);
    let now = pod.kubernetes.run("n").unwrap();
    assert!(
        now.metadata.finalizers.is_some(),
        "the finalizer is the new owner's"
    );
    let key: RunKey = now.key().unwrap();
    assert_eq!(key.name, "n");
}

/// C-7.3: a Pod that has handed a Run over says so until Kubernetes knows it, because a gateway waits for the new owner of
/// what is handed over, and only a moment for late news of an old one.
#[tokio::test(start_paused = true)]
async fn what_is_handed_over_is_draining_until_kubernetes_knows() {
    let pod = Pod::with(Kubernetes::new(), FakeServer::new(), Arc::new(GatewayIsEnough)).await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    let said = async || {
        let answer = pod.app.invoker().serve(request(&run, "1")).await;
        answer.map(|_| ()).unwrap_err().reason
    };
    pod.kubernetes.set_down(true);
    pod.app.drain.stop(Cause::Asked("SIGTERM"));
    comes_true("it is let go", || pod.records() == 0).await;
    // On the paused clock: several tries to write that it is released.
    for _ in 0..10 {
        assert_eq!(said().await, Reason::Draining);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    pod.kubernetes.set_down(false);
    pod.kubernetes.until_reason("n", "Draining").await;
    // Its driver has one step left, and nothing to wait for.
    for _ in 0..1_000 {
        if said().await == Reason::StaleRoute {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("{:?}", said().await);
}
