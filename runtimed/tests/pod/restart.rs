//! A runtimed that ends without a word and starts again finds what it held (C-6.3).

use std::sync::Arc;

use kruntimes_api::{Run, run::Phase};
use kruntimes_proto::{executor::FunctionRegistrationState as State, failure::Dispatched};
use kruntimes_runtimed::caller::GatewayIsEnough;

use super::common::{FakeServer, Kubernetes, Pod, Starts, comes_true, pod::assigned};

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
    let published = |run: Option<&Run>| {
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
    comes_true("nothing is left", || {
        server.live().is_empty() && pod.records() == 0
    })
    .await;
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
    old_ones_stay_when_the_first_list_lacks(&[]).await;
}

/// The same when the first list is so old that it does not show them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_runs_do_not_push_out_old_ones_that_a_list_lacks() {
    old_ones_stay_when_the_first_list_lacks(&["x", "y"]).await;
}

async fn old_ones_stay_when_the_first_list_lacks(lacking: &[&str]) {
    let (kubernetes, server) = (Kubernetes::new(), FakeServer::new());
    let doomed = Doomed::start(&kubernetes, &server).await;
    for name in ["x", "y"] {
        kubernetes.put(&assigned(name).build());
        kubernetes.ready(name).await;
    }
    let disk = doomed.kill();
    kubernetes.put(&assigned("a-new-one").build());
    kubernetes.relist_without(lacking);
    let _pod = again(&kubernetes, &server, disk).await;
    kubernetes.until_reason("a-new-one", "CapacityRefused").await;
    for name in ["x", "y"] {
        kubernetes.ready(name).await;
    }
}

/// C-7.3: a first list that is old shows a Run as Ready here which has gone to another Pod since. Nothing of it is
/// registered again: its new owner may be called already.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_given_back_does_not_come_back_with_an_old_list() {
    let (kubernetes, server) = (Kubernetes::new(), FakeServer::new());
    let doomed = Doomed::start(&kubernetes, &server).await;
    for name in ["moved", "gone"] {
        kubernetes.put(&assigned(name).build());
        let ready = kubernetes.ready(name).await;
        kubernetes.list_shows(&ready);
    }
    kubernetes.edit("moved", |run| run.status.as_mut().unwrap().clear_assignment());
    kubernetes.delete("gone");
    comes_true("nothing is registered", || server.live().is_empty()).await;
    kubernetes.until("gone", |run| run.is_none()).await;
    let (disk, registered) = (doomed.kill(), server.registered().len());
    kubernetes.put(&assigned("new").build());
    let pod = again(&kubernetes, &server, disk).await;
    // The old ones come before it, and there is room for two.
    let answered = |run: Option<&Run>| {
        let ready = run.and_then(|run| run.condition("Ready"));
        ready.is_some_and(|it| it.status == "True" || it.reason == "CapacityRefused")
    };
    kubernetes.until("new", answered).await;
    assert!(kubernetes.run("new").unwrap().is_ready());
    assert_eq!(
        server.registered().len(),
        registered + 1,
        "{:?}",
        server.registered()
    );
    assert_eq!(pod.records(), 1);
}

/// How a Run ends.
#[derive(Debug, Clone, Copy)]
enum End {
    Deleted,
    Cancelled,
}

impl End {
    fn begin(self, kubernetes: &Kubernetes) {
        match self {
            Self::Deleted => kubernetes.delete("n"),
            Self::Cancelled => kubernetes.edit("n", |run| run.spec.cancel_requested = Some(true)),
        }
    }

    fn is_over(self, run: Option<&Run>) -> bool {
        match self {
            Self::Deleted => run.is_none(),
            Self::Cancelled => {
                run.is_some_and(|run| run.phase() == Phase::Cancelled && run.metadata.finalizers.is_none())
            }
        }
    }
}

/// C-6.2, C-6.3: the process ends before or after any step of a clean-up that others see, also between the removal of
/// the work directory and of the journal's record; the next process finishes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clean_up_that_was_interrupted_is_finished() {
    for end in [End::Deleted, End::Cancelled] {
        let steps = interrupted(end, None, false).await;
        assert!(steps >= 4, "{end:?} has {steps} steps");
        for step in 0..steps {
            for without_directory in [false, true] {
                interrupted(end, Some(step), without_directory).await;
            }
        }
    }
}

/// Ends a Run, and the process after `step` steps; how many steps there were.
async fn interrupted(end: End, step: Option<usize>, without_directory: bool) -> usize {
    let (kubernetes, server) = (Kubernetes::new(), FakeServer::new());
    let fate = kubernetes.fate();
    let answered = || fate.passed() % 2 == 0;
    server.set_fate(fate.clone());
    let doomed = Doomed::start(&kubernetes, &server).await;
    kubernetes.put(&assigned("n").build());
    let run = kubernetes.ready("n").await;
    comes_true("the write that made it Ready is answered", answered).await;
    let before = fate.passed();
    if let Some(step) = step {
        fate.ends_after(step);
    }
    end.begin(&kubernetes);
    if step.is_some() {
        fate.met().await;
    } else {
        kubernetes.until("n", |run| end.is_over(run)).await;
        comes_true("the last write is answered", answered).await;
    }
    let steps = fate.passed() - before;
    let disk = doomed.kill();
    fate.is_over();
    if without_directory {
        let uid = run.metadata.uid.as_deref().unwrap();
        // It may have gone already.
        let _ = std::fs::remove_dir_all(disk.path().join("workspace").join(uid));
    }

    let pod = again(&kubernetes, &server, disk).await;
    kubernetes.until("n", |run| end.is_over(run)).await;
    comes_true("nothing is left", || {
        server.live().is_empty() && pod.records() == 0 && !pod.has_directory(&run)
    })
    .await;
    // All of its capacity is free again.
    for name in ["x", "y"] {
        kubernetes.put(&assigned(name).build());
        kubernetes.ready(name).await;
    }
    steps
}
