//! An assigned Run becomes callable, once, in the promised order (contract 6.1).

use kruntimes_api::{Run, fixtures, run::Phase};
use kruntimes_proto::executor::FunctionRegistrationState as State;
use kruntimes_runtimed::caller::GatewayIsEnough;
use std::sync::Arc;

use super::common::{FakeServer, Kubernetes, Pod, Starts, pod::assigned};

const FINALIZER: &str = "kruntimes.io/registration-cleanup";

#[tokio::test(start_paused = true)]
async fn an_assigned_run_becomes_ready() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    let status = run.status.as_ref().unwrap();
    assert_eq!(status.phase, Some(Phase::Ready));
    assert_eq!(status.owner.as_ref(), Some(&pod.app.owner));
    let endpoint = status.endpoint.as_ref().unwrap();
    let uid = run.metadata.uid.as_deref().unwrap();
    assert_eq!(
        endpoint.url,
        format!("https://gateway.example/v1/namespaces/ns/runtimes/python/functions/{uid}:invoke")
    );
    assert_eq!(endpoint.ca_bundle.as_ref().unwrap().0, b"PEM");
    assert!(status.start_time.is_some());
    let ready = run.condition("Ready").unwrap();
    assert_eq!(
        (ready.reason.as_str(), ready.observed_generation),
        ("FunctionRegistered", Some(1))
    );
    assert_eq!(
        run.metadata.finalizers.as_deref(),
        Some(&[FINALIZER.to_owned()][..])
    );
    let [registered] = &pod.server.registered()[..] else {
        panic!("registered once")
    };
    assert_eq!(
        (registered.handler.as_str(), registered.registration_attempt),
        ("main.handler", 1)
    );
    assert_eq!(registered.env["KRUNTIME_RUN_UID"], uid);
    let code = std::fs::read_to_string(format!("{}/main.py", registered.working_dir)).unwrap();
    assert!(code.starts_with("def handler"));
    assert_eq!(
        pod.kubernetes.writes(),
        ["run n", "status n", "status n"],
        "finalizer, claim, Ready"
    );
}

#[tokio::test(start_paused = true)]
async fn the_heartbeat_tells_modes_and_goes_with_the_pod_contract_6_7() {
    let pod = Pod::start().await;
    pod.app.readiness.ready().await;
    let lease = pod.kubernetes.lease("runtimed-pod-a").unwrap();
    assert_eq!(lease["metadata"]["annotations"]["kruntimes.io/modes"], "function");
    assert_eq!(
        lease["metadata"]["ownerReferences"][0]["uid"],
        fixtures::uid("pod-a")
    );
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_while_nothing_changes_contract_6_7() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    pod.kubernetes.ready("n").await;
    let before = pod.kubernetes.writes().len();
    tokio::time::sleep(std::time::Duration::from_secs(600)).await;
    assert_eq!(pod.kubernetes.writes().len(), before);
    assert!(pod.kubernetes.run("n").unwrap().is_ready());
}

#[tokio::test(start_paused = true)]
async fn another_pod_s_run_is_left_alone() {
    let pod = Pod::start().await;
    pod.kubernetes
        .put(&fixtures::run("ns", "other").scheduled_on("pod-b").build());
    let reused = assigned("reused")
        .with(|run| run.status.as_mut().unwrap().assigned_pod_uid = Some(fixtures::uid("an older pod-a")))
        .build();
    pod.kubernetes.put(&reused);
    pod.kubernetes.put(&assigned("mine").build());
    pod.kubernetes.ready("mine").await;
    let about_mine = |write: &String| write.ends_with(" mine");
    assert!(
        pod.kubernetes.writes().iter().all(about_mine),
        "{:?}",
        pod.kubernetes.writes()
    );
}

/// Bug scenario 16: never callable before the server is ready.
#[tokio::test(start_paused = true)]
async fn it_is_not_ready_before_the_server_says_so() {
    let pod = Pod::start().await;
    pod.server.starts(Starts::Slowly);
    pod.kubernetes.put(&assigned("n").build());
    pod.server.until_registered(1).await;
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    let run = pod.kubernetes.until_reason("n", "Registering").await;
    assert_eq!(run.phase(), Phase::Running);
    pod.server.set_all(State::Ready);
    pod.kubernetes.ready("n").await;
    assert_eq!(
        pod.server.live().len(),
        1,
        "one registration, however often it was asked for"
    );
}

#[tokio::test(start_paused = true)]
async fn what_does_not_fit_is_handed_back_and_fits_later() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("a").build());
    pod.kubernetes.put(&assigned("b").build());
    pod.kubernetes.ready("a").await;
    pod.kubernetes.ready("b").await;
    pod.kubernetes.put(&assigned("c").build());
    let refused = pod.kubernetes.until_reason("c", "CapacityRefused").await;
    let status = refused.status.as_ref().unwrap();
    assert_eq!(
        (refused.phase(), status.released_attempt),
        (Phase::Scheduled, Some(1))
    );
    assert!(status.message.as_ref().unwrap().contains("runs"), "{status:?}");
    assert_eq!(refused.metadata.finalizers, None);
    pod.kubernetes
        .edit("a", |run| run.spec.cancel_requested = Some(true));
    pod.kubernetes
        .until("a", |run| run.is_some_and(|run| run.phase() == Phase::Cancelled))
        .await;
    // As the scheduler does after a release: another attempt.
    pod.kubernetes
        .edit("c", |run| run.status.as_mut().unwrap().attempt = Some(2));
    pod.kubernetes.ready("c").await;
}

/// Bug scenario 19: the first attempt fails at import, the second works.
#[tokio::test(start_paused = true)]
async fn a_failed_start_is_released_and_forgotten_by_the_next_attempt() {
    let pod = Pod::start().await;
    pod.server
        .starts(Starts::Failed("ImportError: no such module".to_owned()));
    pod.kubernetes.put(&assigned("n").build());
    let failed = pod.kubernetes.until_reason("n", "RegistrationFailed").await;
    let status = failed.status.as_ref().unwrap();
    assert_eq!(status.released_attempt, Some(1));
    assert!(status.message.as_ref().unwrap().contains("ImportError"));
    assert_eq!(
        failed.phase(),
        Phase::Running,
        "whether it is tried again is the scheduler's decision"
    );
    assert!(pod.server.live().is_empty() && pod.records() == 0 && !pod.has_directory(&failed));
    pod.server.starts(Starts::Ready);
    pod.kubernetes
        .edit("n", |run| run.status.as_mut().unwrap().attempt = Some(2));
    let ready = pod.kubernetes.ready("n").await;
    assert!(
        !serde_json::to_string(&ready.status)
            .unwrap()
            .contains("ImportError")
    );
    assert_eq!(pod.server.registered().last().unwrap().registration_attempt, 2);
}

#[tokio::test(start_paused = true)]
async fn a_refused_handler_and_a_bad_path_say_what_is_wrong() {
    let pod = Pod::start().await;
    pod.server
        .starts(Starts::Refused("main.py has no function `handler`".to_owned()));
    pod.kubernetes.put(&assigned("handler").build());
    let refused = pod.kubernetes.until_reason("handler", "HandlerInvalid").await;
    assert!(refused.status.unwrap().message.unwrap().contains("no function"));
    let bad = assigned("path")
        .with(|run| run.spec.source.as_mut().unwrap().inline_path = Some("../main.py".to_owned()))
        .build();
    pod.kubernetes.put(&bad);
    pod.kubernetes.until_reason("path", "SourceInvalid").await;
}

#[tokio::test(start_paused = true)]
async fn tasks_and_servers_without_functions_are_refused_with_a_reason() {
    let server = FakeServer::new();
    server.set_unsupported();
    let pod = Pod::with(Kubernetes::new(), server, Arc::new(GatewayIsEnough)).await;
    pod.kubernetes.put(&assigned("function").build());
    pod.kubernetes
        .until_reason("function", "FunctionModeUnsupported")
        .await;
    pod.kubernetes.put(&assigned("task").task().build());
    let task = pod.kubernetes.until_reason("task", "TaskModeUnsupported").await;
    assert_eq!(task.status.unwrap().released_attempt, Some(1));
    assert_eq!(
        pod.kubernetes.lease("runtimed-pod-a").unwrap()["metadata"]["annotations"]["kruntimes.io/modes"],
        ""
    );
}

/// Bug scenario 18: somebody was faster.
#[tokio::test(start_paused = true)]
async fn a_conflicting_write_is_decided_anew() {
    let pod = Pod::start().await;
    pod.kubernetes.conflict_once();
    pod.kubernetes.put(&assigned("n").build());
    pod.kubernetes.ready("n").await;
    assert_eq!(pod.server.live().len(), 1);
}

/// Bug scenario 5 and 108: the same name, another life.
#[tokio::test(start_paused = true)]
async fn a_recreated_run_is_another_run() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let first = pod.kubernetes.ready("n").await;
    pod.kubernetes.delete("n");
    pod.kubernetes.until("n", |run| run.is_none()).await;
    let second = assigned("n").uid("2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6").build();
    pod.kubernetes.put(&second);
    let again = pod.kubernetes.ready("n").await;
    assert_eq!(again.metadata.uid, second.metadata.uid);
    assert!(!pod.has_directory(&first) && pod.has_directory(&again));
    let registered: Vec<_> = pod
        .server
        .registered()
        .iter()
        .map(|it| it.run_uid.clone())
        .collect();
    assert_eq!(
        registered,
        [first.metadata.uid.unwrap(), again.metadata.uid.unwrap()]
    );
}

/// Bug scenario 12: 410, then a list that misses a Run, then a whole one.
#[tokio::test(start_paused = true)]
async fn a_list_with_a_hole_unregisters_nothing() {
    let pod = Pod::start().await;
    for name in ["a", "b"] {
        pod.kubernetes.put(&assigned(name).build());
        pod.kubernetes.ready(name).await;
    }
    let reads = pod.kubernetes.reads();
    pod.kubernetes.relist_without(&["a"]);
    // The hole is noticed, and the live object read.
    while pod.kubernetes.reads() == reads {
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    assert!(pod.server.unregistered().is_empty());
    assert!(pod.kubernetes.run("a").is_some_and(|run| Run::is_ready(&run)));
}

#[tokio::test(start_paused = true)]
async fn a_lost_registration_is_handed_back() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    pod.kubernetes.ready("n").await;
    pod.server.restart();
    let lost = pod.kubernetes.until_reason("n", "RegistrationFailed").await;
    let status = lost.status.unwrap();
    assert_eq!((status.released_attempt, status.owner), (Some(1), None));
}

#[tokio::test(start_paused = true)]
async fn a_silent_server_is_recovering_until_it_speaks() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    pod.kubernetes.ready("n").await;
    pod.server.set_silent(true);
    let silent = pod.kubernetes.until_reason("n", "Recovering").await;
    assert_eq!(
        silent.status.unwrap().released_attempt,
        None,
        "nobody knows that it has let go"
    );
    pod.server.set_silent(false);
    pod.kubernetes.ready("n").await;
    assert_eq!(pod.server.registered().len(), 1);
}

/// Contract 4: the endpoint follows the installation, also for Runs that are Ready.
#[tokio::test(start_paused = true)]
async fn a_new_gateway_url_is_published_once() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    pod.kubernetes.ready("n").await;
    let before = pod.kubernetes.writes().len();
    pod.configure("url", "https://new.example");
    let follows = |run: Option<&Run>| {
        let endpoint = run.and_then(|run| run.status.as_ref()?.endpoint.as_ref());
        endpoint.is_some_and(|endpoint| endpoint.url.starts_with("https://new.example/v1/"))
    };
    pod.kubernetes.until("n", follows).await;
    assert!(pod.kubernetes.run("n").unwrap().is_ready());
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    assert_eq!(pod.kubernetes.writes().len(), before + 1);
}

#[tokio::test(start_paused = true)]
async fn no_run_is_ready_before_the_gateway_is_known() {
    let pod = Pod::start().await;
    pod.configure("url", "");
    // Read every two seconds.
    tokio::time::sleep(std::time::Duration::from_secs(5)).await;
    pod.kubernetes.put(&assigned("n").build());
    pod.server.until_registered(1).await;
    tokio::time::sleep(std::time::Duration::from_secs(60)).await;
    assert!(!pod.kubernetes.run("n").unwrap().is_ready());
    pod.configure("url", "https://gateway.example");
    pod.kubernetes.ready("n").await;
}

/// Bug scenario 62: servers in other languages answer pings with GOAWAY.
#[tokio::test(start_paused = true)]
async fn an_idle_server_is_not_pinged() {
    let pod = Pod::start().await;
    pod.app.readiness.ready().await;
    tokio::time::sleep(std::time::Duration::from_secs(900)).await;
    assert_eq!(pod.server.pings(), 0);
    pod.kubernetes.put(&assigned("n").build());
    pod.kubernetes.ready("n").await;
}
