//! A runtimed that ends without a word and starts again finds what it held (C-6.3).

use std::sync::Arc;

use kruntimes_api::run::Phase;
use kruntimes_proto::{executor::FunctionRegistrationState as State, failure::Dispatched};
use kruntimes_runtimed::caller::GatewayIsEnough;

use super::common::{FakeServer, Kubernetes, Pod, Starts, pod::assigned};

/// A runtimed in a runtime of its own, which can be ended as by SIGKILL.
struct Doomed {
    runtime: Option<tokio::runtime::Runtime>,
    pod: Option<Pod>,
}

impl Doomed {
    async fn start(kubernetes: &Kubernetes, server: &FakeServer) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let pod = Pod::with(kubernetes.clone(), server.clone(), Arc::new(GatewayIsEnough));
        let pod = runtime.spawn(pod).await.unwrap();
        Self {
            runtime: Some(runtime),
            pod: Some(pod),
        }
    }

    fn kill(mut self) -> Arc<tempfile::TempDir> {
        let pod = self.pod.take().unwrap();
        self.runtime.take().unwrap().shutdown_background();
        Arc::clone(&pod.disk)
    }
}

async fn again(kubernetes: &Kubernetes, server: &FakeServer, disk: Arc<tempfile::TempDir>) -> Pod {
    Pod::on(
        kubernetes.clone(),
        server.clone(),
        Arc::new(GatewayIsEnough),
        disk,
    )
    .await
}

/// C-6.3 and C-4: RegisterFunction is repeated for live Runs, and the new key published.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn live_runs_are_registered_again_and_published_under_the_new_key() {
    let (kubernetes, server) = (Kubernetes::new(), FakeServer::new());
    let doomed = Doomed::start(&kubernetes, &server).await;
    kubernetes.put(&assigned("n").build());
    let before = kubernetes.ready("n").await;
    let disk = doomed.kill();
    let pod = again(&kubernetes, &server, disk).await;
    let owner = pod.app.owner.clone();
    let published = |run: Option<&kruntimes_api::Run>| {
        run.is_some_and(|run| run.is_ready() && run.status.as_ref().unwrap().owner.as_ref() == Some(&owner))
    };
    kubernetes.until("n", published).await;
    let after = kubernetes.run("n").unwrap();
    assert_ne!(before.status.unwrap().owner.unwrap().peer_key, owner.peer_key);
    assert_eq!(
        after.status.as_ref().unwrap().attempt,
        Some(1),
        "a restart costs no attempt"
    );
    assert_eq!(server.live(), ["reg_1"], "the same registration");
    let [first, second] = &server.registered()[..] else {
        panic!("asked twice")
    };
    assert_eq!(first, second);
    pod.invoke(&after, "1").await.unwrap();
}

/// C-6.3: the rest is unregistered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_live_any_more_is_unregistered() {
    let (kubernetes, server) = (Kubernetes::new(), FakeServer::new());
    let doomed = Doomed::start(&kubernetes, &server).await;
    for name in ["moved", "cancelled"] {
        kubernetes.put(&assigned(name).build());
        kubernetes.ready(name).await;
    }
    let disk = doomed.kill();
    kubernetes.edit("moved", |run| run.status.as_mut().unwrap().clear_assignment());
    kubernetes.edit("cancelled", |run| run.spec.cancel_requested = Some(true));
    let pod = again(&kubernetes, &server, disk).await;
    kubernetes
        .until("cancelled", |run| {
            run.is_some_and(|run| run.phase() == Phase::Cancelled)
        })
        .await;
    while !server.live().is_empty() || pod.records() > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(
        kubernetes.run("moved").unwrap().phase(),
        Phase::Ready,
        "not ours to write"
    );
}

/// Scenario 104: a restart in the middle of a drain does not make the Run Ready again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_draining_is_not_ready_after_a_restart() {
    let (kubernetes, server) = (Kubernetes::new(), FakeServer::new());
    let doomed = Doomed::start(&kubernetes, &server).await;
    kubernetes.put(&assigned("n").build());
    let run = kubernetes.ready("n").await;
    server.set_all(State::Draining);
    let disk = doomed.kill();
    let pod = again(&kubernetes, &server, disk).await;
    let released = kubernetes.until_reason("n", "RegistrationFailed").await;
    assert_eq!(released.status.as_ref().unwrap().released_attempt, Some(1));
    let failure = pod.invoke(&run, "1").await.unwrap_err();
    assert_eq!(failure.dispatched, Dispatched::No, "{failure}");
    assert!(server.live().is_empty() && pod.records() == 0);
}

/// The answer to RegisterFunction never came: the id is learned by asking again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_whose_id_was_lost_is_found_and_ended() {
    let (kubernetes, server) = (Kubernetes::new(), FakeServer::new());
    let doomed = Doomed::start(&kubernetes, &server).await;
    server.starts(Starts::Slowly);
    kubernetes.put(&assigned("n").build());
    server.until_registered(1).await;
    let disk = doomed.kill();
    let journal = disk.path().join("journal");
    for file in std::fs::read_dir(&journal).unwrap() {
        let path = file.unwrap().path();
        let mut record: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        record.as_object_mut().unwrap().remove("registrationId");
        std::fs::write(&path, record.to_string()).unwrap();
    }
    kubernetes.delete("n");
    let pod = again(&kubernetes, &server, disk).await;
    kubernetes.until("n", |run| run.is_none()).await;
    assert_eq!(server.unregistered(), ["reg_1"]);
    assert_eq!(pod.records(), 0);
}

/// What is registered here keeps its capacity against what the scheduler sent meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_runs_do_not_push_out_old_ones() {
    let (kubernetes, server) = (Kubernetes::new(), FakeServer::new());
    let doomed = Doomed::start(&kubernetes, &server).await;
    for name in ["x", "y"] {
        kubernetes.put(&assigned(name).build());
        kubernetes.ready(name).await;
    }
    let disk = doomed.kill();
    kubernetes.put(&assigned("a-new-one").build());
    let _pod = again(&kubernetes, &server, disk).await;
    kubernetes.until_reason("a-new-one", "CapacityRefused").await;
    for name in ["x", "y"] {
        kubernetes.ready(name).await;
    }
}

/// The same when the first list is so old that it does not show them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_runs_do_not_push_out_old_ones_that_a_list_lacks() {
    let (kubernetes, server) = (Kubernetes::new(), FakeServer::new());
    let doomed = Doomed::start(&kubernetes, &server).await;
    for name in ["x", "y"] {
        kubernetes.put(&assigned(name).build());
        kubernetes.ready(name).await;
    }
    let disk = doomed.kill();
    kubernetes.put(&assigned("a-new-one").build());
    kubernetes.relist_without(&["x", "y"]);
    let _pod = again(&kubernetes, &server, disk).await;
    kubernetes.until_reason("a-new-one", "CapacityRefused").await;
    for name in ["x", "y"] {
        kubernetes.ready(name).await;
    }
}
