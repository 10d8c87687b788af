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
