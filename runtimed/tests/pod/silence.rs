//! A Runtime Server that takes requests and answers nothing (a stopped process, a full disk): nothing
//! of runtimed waits for it without end, and the Pod tells of it.

use std::time::Duration;

use kruntimes_api::{Run, run::Phase};
use kruntimes_proto::{
    executor::FunctionRegistrationState as State,
    failure::{Dispatched, Reason},
};
use tokio::time::{Instant, sleep, timeout};

use super::common::{
    Pod,
    pod::{assigned, request},
};

const HOUR: Duration = Duration::from_secs(3600);

async fn ready() -> (Pod, Run) {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    pod.app.readiness.ready().await;
    (pod, run)
}

async fn refused(pod: &Pod, run: &Run) -> Reason {
    let failure = pod.app.invoker().serve(request(run, "1")).await.unwrap_err();
    assert_eq!(failure.dispatched, Dispatched::No, "{failure}");
    failure.reason
}

/// C-6.2: the gateway drops the route within seconds, the Pod is unready, and both come back by themselves.
#[tokio::test(start_paused = true)]
async fn a_hanging_server_makes_the_pod_unready_until_it_answers() {
    let (pod, run) = ready().await;
    pod.server.set_hanging(true);
    let began = Instant::now();
    pod.kubernetes.until_reason("n", "Recovering").await;
    while pod.app.readiness.is_ready() {
        sleep(Duration::from_millis(100)).await;
    }
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    let state = pod.app.readiness.state();
    assert!(state.missing().any(|part| part == "runtime-server"));
    assert_eq!(refused(&pod, &run).await, Reason::Recovering);
    pod.server.set_hanging(false);
    pod.kubernetes.ready("n").await;
    timeout(HOUR, pod.app.readiness.ready())
        .await
        .expect("ready again");
    pod.app.invoker().serve(request(&run, "1")).await.unwrap();
}

/// C-6.4: a Pod that cannot make sure that its functions have stopped asks for its own end: the heartbeat
/// stops, and calls are refused. A server that answers again brings both back.
#[tokio::test(start_paused = true)]
async fn a_server_that_hangs_for_long_stops_the_heartbeat() {
    let (pod, run) = ready().await;
    pod.server.set_hanging(true);
    sleep(Duration::from_secs(60)).await;
    let renewals = pod.kubernetes.renewals();
    sleep(Duration::from_secs(120)).await;
    assert_eq!(pod.kubernetes.renewals(), renewals);
    assert_eq!(refused(&pod, &run).await, Reason::OwnerIsolated);
    let status = pod.kubernetes.run("n").unwrap().status.unwrap();
    assert_eq!(status.released_attempt, None, "nobody knows that it has let go");
    pod.server.set_hanging(false);
    pod.kubernetes.ready("n").await;
    sleep(Duration::from_secs(10)).await;
    assert!(pod.kubernetes.renewals() > renewals);
    pod.app.invoker().serve(request(&run, "1")).await.unwrap();
}

/// C-6.4: a server that answers anything at all is there.
#[tokio::test(start_paused = true)]
async fn a_server_that_answers_something_is_not_silent() {
    let (pod, run) = ready().await;
    pod.server.set_ignores_strangers();
    sleep(Duration::from_secs(120)).await;
    let renewals = pod.kubernetes.renewals();
    sleep(Duration::from_secs(60)).await;
    assert!(pod.kubernetes.renewals() > renewals);
    assert!(pod.app.readiness.is_ready());
    pod.app.invoker().serve(request(&run, "1")).await.unwrap();
}

/// C-7.3: a server that says that it drains lets its calls end, and the Run goes elsewhere at no cost.
#[tokio::test(start_paused = true)]
async fn a_server_that_drains_hands_its_functions_over() {
    let (pod, run) = ready().await;
    sleep(Duration::from_secs(15)).await;
    let running = pod.app.invoker().serve(request(&run, "wait"));
    let meanwhile = async {
        pod.server.until_invoked(1).await;
        pod.server.set_all(State::Draining);
        sleep(Duration::from_secs(5)).await;
        assert_eq!(refused(&pod, &run).await, Reason::Draining);
        assert!(pod.server.unregistered().is_empty(), "patient");
        pod.server.go();
    };
    let (answer, ()) = tokio::join!(running, meanwhile);
    assert_eq!(answer.unwrap().response.output, "wait");
    let released = pod.kubernetes.until_reason("n", "Draining").await;
    assert_eq!(released.status.unwrap().released_attempt, Some(1));
    assert!(pod.server.live().is_empty());
}

/// C-6.2: no end of a Run waits behind a question to the server: each closes the gate at once, and is
/// written as soon as the server confirms.
#[tokio::test(start_paused = true)]
async fn ends_during_a_hang_are_done_when_the_server_answers() {
    let pod = Pod::start().await;
    for name in ["cancelled", "deleted"] {
        pod.kubernetes.put(&assigned(name).build());
        pod.kubernetes.ready(name).await;
    }
    let run = pod.kubernetes.run("cancelled").unwrap();
    pod.server.set_hanging(true);
    // In the middle of a poll.
    sleep(Duration::from_secs(3)).await;
    pod.kubernetes
        .edit("cancelled", |run| run.spec.cancel_requested = Some(true));
    pod.kubernetes.delete("deleted");
    sleep(Duration::from_millis(100)).await;
    assert_eq!(refused(&pod, &run).await, Reason::Terminating);
    sleep(Duration::from_secs(60)).await;
    let phase = pod.kubernetes.run("cancelled").unwrap().phase();
    assert!(!phase.is_terminal(), "a terminal status comes after the clean-up");
    pod.server.set_hanging(false);
    let ended = |run: Option<&Run>| run.is_some_and(|run| run.phase() == Phase::Cancelled);
    pod.kubernetes.until("cancelled", ended).await;
    pod.kubernetes.until("deleted", |run| run.is_none()).await;
    let finalized = |run: Option<&Run>| run.is_some_and(|run| run.metadata.finalizers.is_none());
    pod.kubernetes.until("cancelled", finalized).await;
    assert!(pod.server.live().is_empty() && pod.records() == 0);
}

/// C-3.9: a call to a server that hangs ends at its deadline, not later.
#[tokio::test(start_paused = true)]
async fn a_call_of_a_hanging_server_ends_at_its_deadline() {
    let (pod, run) = ready().await;
    pod.server.set_hanging(true);
    let began = Instant::now();
    let mut call = request(&run, "1");
    call.get_mut().timeout_millis = 4_000;
    let failure = pod.app.invoker().serve(call).await.unwrap_err();
    assert_eq!(
        (failure.reason, failure.dispatched),
        (Reason::DeadlineExceeded, Dispatched::Yes)
    );
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
}

/// C-6.4: a stop does not wait for a hanging server without end, and nothing is handed over that may run on.
#[tokio::test(start_paused = true)]
async fn a_stop_during_a_hang_ends_without_a_false_hand_over() {
    let (pod, _) = ready().await;
    pod.server.set_hanging(true);
    let kubernetes = pod.kubernetes.clone();
    let began = Instant::now();
    pod.stop().await;
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    let run = kubernetes.run("n").unwrap();
    assert_eq!(run.status.as_ref().unwrap().released_attempt, None);
    assert!(run.metadata.finalizers.is_some());
}
