//! A caller that hangs up: the slot is free when the server runs the call no more, and not before
//! (C-3.8, scenario 40).

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use kruntimes_api::Run;
use kruntimes_proto::failure::{Dispatched, Reason};
use tokio::time::{Instant, sleep};

use super::common::{
    Pod, call,
    pod::{assigned, request},
};

/// A Run with one call that has begun and whose caller is gone.
async fn hung_up(finishes: bool) -> (Pod, Run) {
    let pod = Pod::start().await;
    if finishes {
        pod.server.set_finishes();
    }
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    let channel = pod.dial().await;
    {
        let first = call(channel, request(&run, "wait"));
        tokio::pin!(first);
        tokio::select! {
            _ = &mut first => panic!("nobody let it end"),
            () = pod.server.until_invoked(1) => {}
        }
    }
    pod.server.until_abandoned(1).await;
    (pod, run)
}

/// Calls until one is let through.
async fn until_free(pod: &Pod, run: &Run) {
    let began = Instant::now();
    while let Err(failure) = pod.invoke(run, "2").await {
        assert_eq!(
            (failure.reason, failure.dispatched),
            (Reason::Busy, Dispatched::No)
        );
        assert!(began.elapsed() < Duration::from_secs(30), "never free");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Counts what is logged as an error on this thread.
#[derive(Clone, Default)]
struct Errors(Arc<AtomicUsize>);

impl tracing::Subscriber for Errors {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::ERROR
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// Scenario 40 with `onCallerGone: Cancel`: no error to anybody.
#[tokio::test]
async fn a_caller_that_hangs_up_frees_the_slot_and_is_written_down() {
    kruntimes_ops::log::listen_by_thread();
    let errors = Errors::default();
    let _subscriber = tracing::subscriber::set_default(errors.clone());
    let (pod, run) = hung_up(false).await;
    until_free(&pod, &run).await;
    assert_eq!(errors.0.load(Ordering::SeqCst), 0);
    tracing::error!("the counter counts");
    assert_eq!(errors.0.load(Ordering::SeqCst), 1);
    let line = pod.audit.first().await;
    assert_eq!(
        (line["outcome"].as_str(), line["code"].as_str()),
        (Some("CallerGone"), Some("Cancelled"))
    );
    assert!(pod.server.unregistered().is_empty());
}

/// Scenario 40 with `onCallerGone: Finish`: the call goes on, the next caller is told that it does, and
/// what the first leaves is not the second's (C-8.6).
#[tokio::test]
async fn a_call_that_finishes_without_its_caller_keeps_the_slot_until_then() {
    let (pod, run) = hung_up(true).await;
    for _ in 0..3 {
        let failure = pod.invoke(&run, "2").await.unwrap_err();
        assert_eq!(
            (failure.reason, failure.dispatched),
            (Reason::Busy, Dispatched::No)
        );
        assert!(failure.busy_at_most.is_some());
    }
    let outputs = pod.server.outputs_file(run.metadata.uid.as_deref().unwrap());
    std::fs::write(outputs, "late=1").unwrap();
    assert_eq!(pod.audit.first().await["outcome"], "CallerGone");
    pod.server.go();
    until_free(&pod, &run).await;
    assert!(pod.invoke(&run, "3").await.unwrap().outputs.is_empty());
    assert_eq!(pod.server.live(), ["reg_1"], "the same registration");
}

/// A server that neither ends an abandoned call nor finishes it by its deadline: the registration is
/// made anew, under the same attempt and without a write.
#[tokio::test(start_paused = true)]
async fn a_call_that_never_ends_does_not_keep_the_function_for_ever() {
    let pod = Pod::start().await;
    pod.server.set_finishes();
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    let writes = pod.kubernetes.writes().len();
    {
        let first = pod.app.invoker().serve(request(&run, "wait"));
        tokio::pin!(first);
        tokio::select! {
            _ = &mut first => panic!("nobody let it end"),
            () = pod.server.until_invoked(1) => {}
        }
    }
    let began = Instant::now();
    while pod.app.invoker().serve(request(&run, "2")).await.is_err() {
        sleep(Duration::from_millis(100)).await;
    }
    let took = began.elapsed();
    assert!(
        took >= Duration::from_secs(20) && took < Duration::from_secs(40),
        "{took:?}"
    );
    assert_eq!(pod.server.unregistered(), ["reg_1"]);
    assert_eq!(pod.server.live(), ["reg_2"]);
    assert_eq!(pod.kubernetes.writes().len(), writes);
}

/// A Run with one call whose caller is gone and that the server never ends, on a clock of the test.
async fn abandoned() -> (Pod, Run) {
    let pod = Pod::start().await;
    pod.server.set_finishes();
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    let first = pod.app.invoker().serve(request(&run, "wait"));
    tokio::select! {
        _ = first => panic!("nobody let it end"),
        () = pod.server.until_invoked(1) => {}
    }
    (pod, run)
}

/// C-5.6: a server that does not let go of the call at first is asked again, and no call meets the old one.
#[tokio::test(start_paused = true)]
async fn a_call_that_survives_one_end_is_ended_again() {
    let (pod, run) = abandoned().await;
    pod.server.keep(2);
    let began = Instant::now();
    while let Err(failure) = pod.app.invoker().serve(request(&run, "2")).await {
        assert_eq!(failure.dispatched, Dispatched::No, "{failure}");
        assert!(
            began.elapsed() < Duration::from_secs(120),
            "never free: {failure}"
        );
        sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(pod.server.unregistered(), ["reg_1"]);
    assert_eq!(pod.server.live(), ["reg_2"]);
    let status = pod.kubernetes.ready("n").await.status.unwrap();
    assert_eq!((status.attempt, status.released_attempt), (Some(1), None));
}

/// C-5.6, C-6.4: a server that never lets go fails the registration, and as only the end of the Pod makes sure
/// that the call has ended, the heartbeat stops. Nothing is handed over that may run on.
#[tokio::test(start_paused = true)]
async fn a_server_that_keeps_a_call_asks_for_the_end_of_its_pod() {
    let (pod, run) = abandoned().await;
    pod.server.keep(usize::MAX);
    sleep(Duration::from_secs(65)).await;
    let refused = pod.app.invoker().serve(request(&run, "2")).await.unwrap_err();
    assert_eq!(refused.reason, Reason::Recovering);
    sleep(Duration::from_secs(120)).await;
    let renewals = pod.kubernetes.renewals();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(pod.kubernetes.renewals(), renewals);
    let status = pod.kubernetes.run("n").unwrap().status.unwrap();
    assert_eq!(status.released_attempt, None);
    // And if it lets go after all, the Run goes elsewhere by its policy.
    pod.server.keep(0);
    let released = pod.kubernetes.until_reason("n", "RegistrationFailed").await;
    assert_eq!(released.status.unwrap().released_attempt, Some(1));
    sleep(Duration::from_secs(15)).await;
    assert!(pod.kubernetes.renewals() > renewals);
}

/// A call from before a restart, which the server still runs: nobody waits for it, and it must not keep the
/// function for ever either.
#[tokio::test(start_paused = true)]
async fn a_call_that_nobody_knows_of_ends_like_any_other() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    pod.server.occupy();
    let began = Instant::now();
    while let Err(failure) = pod.app.invoker().serve(request(&run, "2")).await {
        assert_eq!(failure.dispatched, Dispatched::No, "{failure}");
        assert!(
            began.elapsed() < Duration::from_secs(400),
            "never free: {failure}"
        );
        sleep(Duration::from_millis(100)).await;
    }
    assert!(
        began.elapsed() > Duration::from_secs(300),
        "it has the time that any call may have: {:?}",
        began.elapsed()
    );
    assert_eq!(pod.server.live(), ["reg_2"]);
}
