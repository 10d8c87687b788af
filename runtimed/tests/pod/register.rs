//! An assigned Run becomes callable, once, in the promised order (C-6.1).

use kruntimes_api::{Run, fixtures, run::Phase};
use kruntimes_proto::executor::FunctionRegistrationState as State;
use kruntimes_runtimed::caller::GatewayIsEnough;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

use super::common::{FakeServer, Kubernetes, Pod, Starts, pod::assigned};

const FINALIZER: &str = "kruntimes.io/registration-cleanup";

/// C-6.1: finalizer, claim, registration, Ready; owner and endpoint are told (C-2.2, C-2.4).
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
    pod.kubernetes
        .until("n", |_| {
            pod.kubernetes.events("n") == ["Claimed", "FunctionRegistered"]
        })
        .await;
}

/// C-6.1: at most four registrations at once, and every Run gets its turn.
#[tokio::test(start_paused = true)]
async fn four_at_most_are_registered_at_once() {
    let pod = Pod::of_size(7).await;
    pod.server.starts(Starts::Slowly);
    let names = ["a", "b", "c", "d", "e", "f", "g"];
    for name in names {
        pod.kubernetes.put(&assigned(name).build());
    }
    pod.server.until_registered(4).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(pod.server.live().len(), 4);
    pod.server.starts(Starts::Ready);
    pod.server.set_all(State::Ready);
    for name in names {
        pod.kubernetes.ready(name).await;
    }
}

/// C-4: a new URL reaches every Run, one write each, at a bounded rate.
#[tokio::test(start_paused = true)]
async fn many_endpoints_are_refreshed_one_after_another() {
    let pod = Pod::of_size(10).await;
    let names: Vec<String> = (0..10).map(|it| format!("n{it}")).collect();
    for name in &names {
        pod.kubernetes.put(&assigned(name).build());
        pod.kubernetes.ready(name).await;
    }
    let before = pod.kubernetes.writes().len();
    pod.configure("url", "https://new.example");
    let follows = |run: Option<&Run>| {
        let endpoint = run.and_then(|run| run.status.as_ref()?.endpoint.as_ref());
        endpoint.is_some_and(|endpoint| endpoint.url.starts_with("https://new.example/v1/"))
    };
    while pod.kubernetes.writes().len() == before {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let began = Instant::now();
    for name in &names {
        pod.kubernetes.until(name, follows).await;
    }
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(8 * 200), "{took:?}");
    assert_eq!(pod.kubernetes.writes().len(), before + names.len());
}

/// Scenario 108: deleted and created again before it was first seen, and changed at once.
#[tokio::test(start_paused = true)]
async fn the_last_object_counts_also_when_the_first_was_never_seen() {
    let pod = Pod::start().await;
    pod.app.readiness.ready().await;
    pod.kubernetes.delay_watch(Duration::from_secs(3));
    let first = assigned("n").build();
    pod.kubernetes.put(&first);
    pod.kubernetes.delete("n");
    let source = "def handler(event): return 2";
    let second = assigned("n")
        .uid("2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6")
        .with(|run| run.spec.source.as_mut().unwrap().inline = Some(source.to_owned()))
        .build();
    pod.kubernetes.put(&second);
    pod.kubernetes.edit("n", |run| {
        run.metadata.labels = Some([("team".to_owned(), "b".to_owned())].into());
        run.spec.ttl_seconds_after_finished = Some(7);
    });
    let ready = pod.kubernetes.ready("n").await;
    assert_eq!(ready.metadata.uid, second.metadata.uid);
    assert_eq!(ready.spec.ttl_seconds_after_finished, Some(7));
    while pod.server.live().len() != 1 || pod.has_directory(&first) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let registered = pod.server.registered();
    let last = registered.last().unwrap();
    assert_eq!(Some(&last.run_uid), second.metadata.uid.as_ref());
    let code = std::fs::read_to_string(format!("{}/main.py", last.working_dir)).unwrap();
    assert_eq!(code, source);
    pod.kubernetes
        .edit("n", |run| run.spec.cancel_requested = Some(true));
    pod.kubernetes
        .until("n", |run| run.is_some_and(|run| run.phase() == Phase::Cancelled))
        .await;
}

/// C-6.7 and C-5.7: the Lease is owned by the Pod and carries the modes.
#[tokio::test(start_paused = true)]
async fn the_heartbeat_tells_modes_and_goes_with_the_pod() {
    let pod = Pod::start().await;
    pod.app.readiness.ready().await;
    let lease = pod.kubernetes.lease("runtimed-pod-a").unwrap();
    assert_eq!(lease["metadata"]["annotations"]["kruntimes.io/modes"], "function");
    assert_eq!(
        lease["metadata"]["ownerReferences"][0]["uid"],
        fixtures::uid("pod-a")
    );
}

/// C-6.7: one renewal of the Lease every 10 s, and nothing else; scenario 99.
#[tokio::test(start_paused = true)]
async fn nothing_is_written_while_nothing_changes() {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    pod.kubernetes.ready("n").await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = (
        pod.kubernetes.writes().len(),
        pod.kubernetes.reads(),
        pod.kubernetes.events("n").len(),
        pod.kubernetes.renewals(),
    );
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(pod.kubernetes.writes().len(), before.0);
    assert_eq!(pod.kubernetes.reads(), before.1);
    assert_eq!(pod.kubernetes.events("n").len(), before.2);
    let renewals = pod.kubernetes.renewals() - before.3;
    assert!((59..=61).contains(&renewals), "{renewals}");
    assert!(pod.kubernetes.run("n").unwrap().is_ready());
}

/// C-6.1: a Pod's Runs are those of its name and UID.
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

/// Scenario 16: never callable before the server is ready (C-6.1).
#[tokio::test(start_paused = true)]
async fn it_is_not_ready_before_the_server_says_so() {
    let pod = Pod::start().await;
    pod.server.starts(Starts::Slowly);
    pod.kubernetes.put(&assigned("n").build());
    pod.server.until_registered(1).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
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

/// C-6.1: a Run that does not fit stays Scheduled, with a reason, and is handed back.
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

/// Scenario 19: the first attempt fails at import, the second works.
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
    let message = refused.status.as_ref().unwrap().message.clone().unwrap();
    assert!(message.contains("no function"), "{message}");
    let bad = assigned("path")
        .with(|run| run.spec.source.as_mut().unwrap().inline_path = Some("../main.py".to_owned()))
        .build();
    pod.kubernetes.put(&bad);
    let bad = pod.kubernetes.until_reason("path", "SourceInvalid").await;
    for (run, reason) in [(&refused, "HandlerInvalid"), (&bad, "SourceInvalid")] {
        let ready = run.condition("Ready").unwrap();
        assert_eq!((ready.reason.as_str(), ready.status.as_str()), (reason, "False"));
        assert_eq!(ready.observed_generation, Some(1));
        assert!(!run.phase().is_terminal(), "whether it is tried again is policy");
        assert_eq!(run.status.as_ref().unwrap().released_attempt, Some(1));
    }
    pod.kubernetes
        .until("path", |_| {
            pod.kubernetes.events("path") == ["Claimed", "SourceInvalid"]
        })
        .await;
}

/// C-5.7: a server without FunctionRuntime, and a mode nobody executes.
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

/// Scenario 18: somebody was faster.
#[tokio::test(start_paused = true)]
async fn a_conflicting_write_is_decided_anew() {
    let pod = Pod::start().await;
    pod.kubernetes.conflict_once();
    pod.kubernetes.put(&assigned("n").build());
    pod.kubernetes.ready("n").await;
    assert_eq!(pod.server.live().len(), 1);
}

/// Scenario 5: the same name, another life.
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

/// Scenario 12: 410, then a list that misses a Run, then a whole one (C-2.3).
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
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
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

/// C-4 and C-2.2: the endpoint follows the installation, also for Runs that are Ready.
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
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(pod.kubernetes.writes().len(), before + 1);
}

#[tokio::test(start_paused = true)]
async fn no_run_is_ready_before_the_gateway_is_known() {
    let pod = Pod::start().await;
    pod.configure("url", "");
    // Read every two seconds.
    tokio::time::sleep(Duration::from_secs(5)).await;
    pod.kubernetes.put(&assigned("n").build());
    pod.server.until_registered(1).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!pod.kubernetes.run("n").unwrap().is_ready());
    pod.configure("url", "https://gateway.example");
    pod.kubernetes.ready("n").await;
}

/// Scenario 62: servers in other languages answer pings with GOAWAY.
#[tokio::test(start_paused = true)]
async fn an_idle_server_is_not_pinged() {
    let pod = Pod::start().await;
    pod.app.readiness.ready().await;
    tokio::time::sleep(Duration::from_secs(900)).await;
    assert_eq!(pod.server.pings(), 0);
    pod.kubernetes.put(&assigned("n").build());
    pod.kubernetes.ready("n").await;
}
