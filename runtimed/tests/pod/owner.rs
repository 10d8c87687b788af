//! Cancelling a call and explaining a function over the hop (C-3.10, C-3.11).

use std::{sync::Arc, time::Duration};

use kruntimes_api::{Run, keys::RunKey};
use kruntimes_proto::{
    executor::FunctionRegistrationState as State,
    failure::{Dispatched, Failure, Reason},
    owner::{CancelRequest, ExplainRequest},
};
use kruntimes_runtimed::caller::{Callers, Wish};
use tonic::{Status, metadata::MetadataMap};

use super::common::{
    FakeServer, Kubernetes, Pod, Starts,
    pod::{assigned, routed},
};

async fn ready() -> (Pod, Run) {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    (pod, run)
}

/// C-3.10: its caller gets `Cancelled`, dispatched yes; the call is over at the server, the slot is free.
#[tokio::test]
async fn a_cancelled_call_ends_and_its_caller_is_told() {
    let (pod, run) = ready().await;
    let call = pod.invoke(&run, "wait");
    let cancel = async {
        pod.server.until_invoked(1).await;
        assert!(!pod.cancel(&run, "inv_other").await.unwrap(), "another id");
        assert!(pod.cancel(&run, "inv_test").await.unwrap());
        pod.invoke(&run, "2").await.unwrap();
        assert!(!pod.cancel(&run, "inv_test").await.unwrap(), "it is over");
    };
    let (answer, ()) = tokio::join!(call, cancel);
    let failure = answer.unwrap_err();
    assert_eq!(
        (failure.reason, failure.dispatched),
        (Reason::Cancelled, Dispatched::Yes)
    );
    assert_eq!(pod.server.live(), ["reg_1"]);
    assert!(pod.kubernetes.run("n").unwrap().is_ready());
    let audit = pod.audit.clone();
    assert!(pod.stop().await.is_clean());
    let told: Vec<_> = audit.all().iter().map(|it| it["outcome"].clone()).collect();
    assert_eq!(told, ["Cancelled", "ok"]);
}

/// C-3.10 with `onCallerGone: Finish`: a cancellation is obeyed all the same.
#[tokio::test]
async fn a_cancelled_call_ends_also_where_hang_ups_do_not_end_calls() {
    let (pod, run) = ready().await;
    pod.server.set_finishes();
    let call = pod.invoke(&run, "wait");
    let cancel = async {
        pod.server.until_invoked(1).await;
        assert!(pod.cancel(&run, "inv_test").await.unwrap());
    };
    let (answer, ()) = tokio::join!(call, cancel);
    assert_eq!(answer.unwrap_err().reason, Reason::Cancelled);
    while let Err(failure) = pod.invoke(&run, "2").await {
        assert_eq!(failure.dispatched, Dispatched::No, "{failure}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(pod.server.unregistered(), ["reg_1"]);
    assert_eq!(pod.server.live(), ["reg_2"]);
    let run = pod.kubernetes.run("n").unwrap();
    assert_eq!(run.attempt().unwrap().get(), 1, "no failure of the Run");
}

/// Says yes to one wish only.
struct Only(Wish);

#[async_trait::async_trait]
impl Callers for Only {
    async fn may(&self, wish: Wish, metadata: &MetadataMap, run: &RunKey) -> Result<(), Failure> {
        assert_eq!(metadata.get("authorization").unwrap(), "Bearer token");
        assert_eq!((run.namespace.as_str(), run.name.as_str()), ("ns", "n"));
        if wish == self.0 {
            Ok(())
        } else {
            Err(Failure::new(Reason::PermissionDenied, wish.verb()))
        }
    }
}

/// C-3.10 and C-3.11: cancelling needs `update`, explaining what invoking needs.
#[tokio::test]
async fn cancelling_and_explaining_are_authorized() {
    for (allowed, denied) in [(Wish::Invoke, "update"), (Wish::Cancel, "get")] {
        let callers = Arc::new(Only(allowed));
        let pod = Pod::with(Kubernetes::new(), FakeServer::new(), callers).await;
        pod.kubernetes.put(&assigned("n").build());
        let run = pod.kubernetes.ready("n").await;
        let answers = [
            pod.cancel(&run, "inv_test").await.err(),
            pod.explain(&run).await.err(),
        ];
        let refused: Vec<_> = answers.into_iter().flatten().collect();
        let [refused] = &refused[..] else {
            panic!("one of both")
        };
        assert_eq!(
            (refused.reason, refused.detail.as_str()),
            (Reason::PermissionDenied, denied)
        );
    }
}

/// C-3.10 and C-3.11 over the hop of C-4: the fence of a call.
#[tokio::test]
async fn cancelling_and_explaining_are_fenced() {
    let (pod, run) = ready().await;
    let service = pod.app.owner_service();
    let run_uid = run.metadata.uid.clone().unwrap();
    for (name, value, reason) in [
        ("kruntime-attempt", "2", Reason::StaleRoute),
        ("kruntime-pod-uid", "another", Reason::StaleRoute),
        ("kruntime-hop", "2", Reason::BadHop),
    ] {
        let message = ExplainRequest {
            run_uid: run_uid.clone(),
        };
        let mut explain = routed(&run, message);
        explain.metadata_mut().insert(name, value.parse().unwrap());
        assert_eq!(service.explain(explain).await.unwrap_err().reason, reason);
        let message = CancelRequest {
            run_uid: run_uid.clone(),
            invocation_id: "inv_test".to_owned(),
        };
        let mut cancel = routed(&run, message);
        cancel.metadata_mut().insert(name, value.parse().unwrap());
        assert_eq!(service.cancel(cancel).await.unwrap_err().reason, reason);
    }
}

/// C-3.11: a page for each state, and what it says of a call is what a call is told.
#[tokio::test]
async fn an_explanation_says_what_a_call_would_be_told() {
    let pod = Pod::start().await;
    pod.server.starts(Starts::Slowly);
    pod.kubernetes.put(&assigned("n").build());
    pod.server.until_registered(1).await;
    let run = pod.kubernetes.run("n").unwrap();
    let page = pod.explain(&run).await.unwrap();
    assert_eq!(
        (page.state.as_str(), page.callable, page.reason.as_str()),
        ("Registering", false, "Registering")
    );
    assert_eq!((page.registration, page.running), (None, None));
    pod.server.set_all(State::Ready);
    let run = pod.kubernetes.ready("n").await;

    let page = pod.explain(&run).await.unwrap();
    assert_eq!(
        (page.state.as_str(), page.callable, page.reason.as_str()),
        ("Ready", true, "")
    );
    assert_eq!(
        (page.attempt, Some(&page.run_uid)),
        (1, run.metadata.uid.as_ref())
    );
    let registration = page.registration.unwrap();
    assert!(registration.answers && registration.state == "READY");
    assert!(page.heard_millis_ago.is_some() && page.life_left_millis.is_none());
    assert!(page.last_failure.is_none());

    let call = pod.invoke(&run, "wait");
    let meanwhile = async {
        pod.server.until_invoked(1).await;
        let page = pod.explain(&run).await.unwrap();
        assert_eq!((page.callable, page.reason.as_str()), (false, "Busy"));
        let running = page.running.unwrap();
        assert_eq!(running.invocation_id, "inv_test");
        assert!(running.at_most_millis <= 20_000 && !running.cancelled);
        assert_eq!(page.registration.unwrap().in_flight, 1);
        let busy = pod.invoke(&run, "2").await.unwrap_err();
        assert_eq!(busy.reason.as_str(), page.reason);
        pod.server.go();
    };
    let (answer, ()) = tokio::join!(call, meanwhile);
    answer.unwrap();
    pod.server.answer_once(Status::aborted("exit 1"));
    pod.invoke(&run, "3").await.unwrap_err();
    let page = pod.explain(&run).await.unwrap();
    assert!(page.callable && page.running.is_none());
    assert_eq!(page.last_refusal.unwrap().reason, "Busy");
    assert_eq!(page.last_failure.unwrap().reason, "WorkerExited");

    pod.server.set_silent(true);
    let page = pod.explain(&run).await.unwrap();
    assert!(!page.callable && !page.registration.unwrap().answers);
    assert_eq!(page.reason, "ServerUnavailable");
}
