//! Functions end when their time is over, and never during a call (C-6.2, scenario 101).

use std::time::Duration;

use kruntimes_api::run::Phase;
use tokio::time::Instant;

use super::common::{
    Pod,
    pod::{assigned, request},
};

async fn ready(idle: Option<i32>, timeout: Option<&str>) -> (Pod, kruntimes_api::Run) {
    let pod = Pod::start().await;
    let run = assigned("n")
        .with(|run| {
            run.spec.mode.function.as_mut().unwrap().idle_timeout_seconds = idle;
            run.spec.timeout = timeout.map(ToOwned::to_owned);
        })
        .build();
    pod.kubernetes.put(&run);
    let run = pod.kubernetes.ready("n").await;
    (pod, run)
}

/// C-6.2, scenario 101: Timeout with reason IdleTimeout, within the idle time and one poll.
#[tokio::test(start_paused = true)]
async fn an_idle_function_ends_within_idle_and_one_poll() {
    let (pod, _) = ready(Some(60), None).await;
    let began = Instant::now();
    pod.kubernetes
        .until("n", |run| run.is_some_and(|run| run.phase().is_terminal()))
        .await;
    let took = began.elapsed();
    assert!(
        took >= Duration::from_secs(55) && took <= Duration::from_secs(63),
        "{took:?}"
    );
    pod.kubernetes
        .until("n", |run| {
            run.is_some_and(|run| run.metadata.finalizers.is_none())
        })
        .await;
    let run = pod.kubernetes.run("n").unwrap();
    assert_eq!(run.phase(), Phase::Timeout);
    assert_eq!(run.condition("Completed").unwrap().reason, "IdleTimeout");
    assert!(pod.server.live().is_empty() && pod.records() == 0 && !pod.has_directory(&run));
}

#[tokio::test(start_paused = true)]
async fn calls_keep_a_function_alive() {
    let (pod, run) = ready(Some(5), None).await;
    for _ in 0..20 {
        pod.app.invoker().serve(request(&run, "1")).await.unwrap();
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert!(pod.kubernetes.run("n").unwrap().is_ready());
    }
    pod.kubernetes
        .until("n", |run| run.is_some_and(|run| run.phase() == Phase::Timeout))
        .await;
}

/// Scenario 101: never during a call.
#[tokio::test(start_paused = true)]
async fn a_call_longer_than_the_idle_time_is_not_idle() {
    let (pod, run) = ready(Some(1), None).await;
    let call = async {
        let mut request = request(&run, "wait");
        request.get_mut().timeout_millis = 200_000;
        pod.app.invoker().serve(request).await
    };
    let meanwhile = async {
        pod.server.until_invoked(1).await;
        tokio::time::sleep(Duration::from_secs(120)).await;
        assert!(pod.kubernetes.run("n").unwrap().is_ready());
        pod.server.go();
    };
    let (call, ()) = tokio::join!(call, meanwhile);
    call.unwrap();
    pod.kubernetes
        .until("n", |run| run.is_some_and(|run| run.phase() == Phase::Timeout))
        .await;
}

/// C-6.2: refused calls are not activity.
#[tokio::test(start_paused = true)]
async fn refused_calls_are_no_activity() {
    let (pod, run) = ready(Some(30), None).await;
    let began = Instant::now();
    while pod.kubernetes.run("n").unwrap().is_ready() {
        let mut stale = request(&run, "1");
        stale
            .metadata_mut()
            .insert("kruntime-attempt", "9".parse().unwrap());
        let _ = pod.app.invoker().serve(stale).await.unwrap_err();
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert!(
        began.elapsed() <= Duration::from_secs(33),
        "{:?}",
        began.elapsed()
    );
}

/// Scenario 101: the life is shorter than the idle time.
#[tokio::test(start_paused = true)]
async fn a_life_shorter_than_the_idle_time_ends_the_function() {
    let (pod, _) = ready(Some(600), Some("30s")).await;
    let began = Instant::now();
    pod.kubernetes
        .until("n", |run| run.is_some_and(|run| run.phase() == Phase::Timeout))
        .await;
    assert!(
        began.elapsed() <= Duration::from_secs(32),
        "{:?}",
        began.elapsed()
    );
    let run = pod.kubernetes.run("n").unwrap();
    assert_eq!(run.condition("Completed").unwrap().reason, "Lifetime");
}

/// C-6.2: a life that ends during a call ends the call, and the clean-up comes before the status.
#[tokio::test(start_paused = true)]
async fn a_call_does_not_outlive_the_run() {
    let (pod, run) = ready(None, Some("20s")).await;
    let mut long = request(&run, "wait");
    long.get_mut().timeout_millis = 300_000;
    let call = pod.app.invoker().serve(long);
    let ended = pod
        .kubernetes
        .until("n", |run| run.is_some_and(|run| run.phase() == Phase::Timeout));
    let (answer, ()) = tokio::join!(call, ended);
    assert!(answer.is_err());
    assert!(pod.server.live().is_empty() && pod.records() == 0);
}

/// Scenario 101: an idle time of one second, which is less than a poll.
#[tokio::test(start_paused = true)]
async fn an_idle_time_shorter_than_a_poll_counts() {
    let (pod, _) = ready(Some(1), None).await;
    let began = Instant::now();
    pod.kubernetes
        .until("n", |run| run.is_some_and(|run| run.phase() == Phase::Timeout))
        .await;
    assert!(began.elapsed() <= Duration::from_secs(4), "{:?}", began.elapsed());
}

/// C-6.2: Timeout after the life, and no call may last longer (C-3.9).
#[tokio::test(start_paused = true)]
async fn a_life_ends_after_its_timeout() {
    let (pod, run) = ready(None, Some("90s")).await;
    let began = Instant::now();
    // A call may last as long as the life at most.
    let mut long = request(&run, "1");
    long.get_mut().timeout_millis = 300_000;
    pod.app.invoker().serve(long).await.unwrap();
    assert!(pod.server.invoked()[0].timeout_millis <= 90_000);
    pod.kubernetes
        .until("n", |run| run.is_some_and(|run| run.phase() == Phase::Timeout))
        .await;
    let took = began.elapsed();
    assert!(
        took >= Duration::from_secs(80) && took <= Duration::from_secs(92),
        "{took:?}"
    );
    let run = pod.kubernetes.run("n").unwrap();
    assert_eq!(run.condition("Completed").unwrap().reason, "Lifetime");
    assert!(pod.server.live().is_empty());
}

#[tokio::test(start_paused = true)]
async fn without_either_a_function_stays() {
    let (pod, _) = ready(None, None).await;
    tokio::time::sleep(Duration::from_secs(10_000)).await;
    assert!(pod.kubernetes.run("n").unwrap().is_ready());
}
