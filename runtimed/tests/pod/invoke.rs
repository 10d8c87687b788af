//! Calls over the hop: what arrives, what comes back, what is written down.

use std::{sync::Arc, time::Duration};

use kruntimes_api::keys::RunKey;
use kruntimes_proto::{
    executor::InvokeFunctionResponse,
    failure::{Component, Dispatched, Failure, Reason},
    limits,
};
use kruntimes_runtimed::caller::{Callers, Wish};
use tonic::{Status, metadata::MetadataMap};

use super::common::{
    FakeServer, Kubernetes, Pod, call,
    pod::{assigned, request},
};

async fn ready() -> (Pod, kruntimes_api::Run) {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    (pod, run)
}

#[tokio::test]
async fn a_call_reaches_the_function_and_its_answer_comes_back() {
    let (pod, run) = ready().await;
    let response = call(pod.dial().await, request(&run, "{\"a\":1}")).await.unwrap();
    assert_eq!(response.metadata().get("kruntime-handler-us").unwrap(), "123");
    let response = response.into_inner();
    assert_eq!(response.output, "{\"a\":1}");
    assert_eq!(response.invocation_id, "inv_test");
    assert_eq!(
        response.registration.unwrap().registration_id,
        "",
        "the id stays in the Pod"
    );
    let [invoked] = &pod.server.invoked()[..] else {
        panic!("once")
    };
    assert!(
        invoked
            .registration
            .as_ref()
            .unwrap()
            .registration_id
            .starts_with("reg_")
    );
    assert!(
        (1..=20_000).contains(&invoked.timeout_millis),
        "{}",
        invoked.timeout_millis
    );
}

/// C-6.7 and C-1.2: an invocation creates no object and writes no status.
#[tokio::test]
async fn a_call_neither_writes_nor_reads_at_the_api_server() {
    let (pod, run) = ready().await;
    let before = (pod.kubernetes.writes().len(), pod.kubernetes.reads());
    for _ in 0..50 {
        pod.invoke(&run, "1").await.unwrap();
    }
    assert_eq!((pod.kubernetes.writes().len(), pod.kubernetes.reads()), before);
}

/// C-3.4 and C-5.3: one call in flight, no queue; the second hears how long the first may take.
#[tokio::test]
async fn one_call_at_a_time_and_the_second_is_told_how_long() {
    let (pod, run) = ready().await;
    let channel = pod.dial().await;
    let first = call(channel.clone(), request(&run, "wait"));
    let second = async {
        pod.server.until_invoked(1).await;
        let busy = call(channel.clone(), request(&run, "2")).await.unwrap_err();
        pod.server.go();
        busy
    };
    let (first, busy) = tokio::join!(first, second);
    assert_eq!(first.unwrap().into_inner().output, "wait");
    assert_eq!((busy.reason, busy.dispatched), (Reason::Busy, Dispatched::No));
    assert!(
        busy.busy_at_most.is_some_and(|left| left.as_millis() <= 20_000),
        "{busy:?}"
    );
    pod.invoke(&run, "3").await.unwrap();
}

/// Scenario 13: the Run is annotated and its status patched five times during a call.
#[tokio::test]
async fn writes_to_the_run_do_not_cost_its_slot() {
    let (pod, run) = ready().await;
    let first = pod.invoke(&run, "wait");
    let meanwhile = async {
        pod.server.until_invoked(1).await;
        for number in 0..5 {
            pod.kubernetes.edit("n", |run| {
                run.metadata.annotations = Some([("number".to_owned(), number.to_string())].into());
                run.status.as_mut().unwrap().message = Some(number.to_string());
            });
        }
        pod.server.go();
    };
    let (first, ()) = tokio::join!(first, meanwhile);
    first.unwrap();
    pod.invoke(&run, "2").await.unwrap();
}

/// C-3.5 and C-5.5: codes of a server that knows no ErrorInfo.
#[tokio::test]
async fn a_custom_server_s_bare_codes_get_their_meaning() {
    let (pod, run) = ready().await;
    for (status, reason, dispatched) in [
        (
            Status::unknown("ValueError"),
            Reason::HandlerError,
            Dispatched::Yes,
        ),
        (Status::aborted("exit 1"), Reason::WorkerExited, Dispatched::Yes),
        (
            Status::out_of_range("NaN"),
            Reason::InvalidOutput,
            Dispatched::Yes,
        ),
        (
            Status::invalid_argument("depth"),
            Reason::InvalidPayload,
            Dispatched::No,
        ),
        (
            Status::deadline_exceeded("20 s"),
            Reason::DeadlineExceeded,
            Dispatched::Yes,
        ),
        (
            Status::cancelled("nobody asked for that"),
            Reason::RuntimeServerError,
            Dispatched::Unknown,
        ),
        (
            Status::unavailable("starting"),
            Reason::ServerUnavailable,
            Dispatched::No,
        ),
        (Status::resource_exhausted("busy"), Reason::Busy, Dispatched::No),
    ] {
        pod.server.answer_once(status);
        let failure = pod.invoke(&run, "1").await.unwrap_err();
        assert_eq!((failure.reason, failure.dispatched), (reason, dispatched));
        assert!(
            !failure.detail.contains("ValueError"),
            "what was raised is for the log: {failure}"
        );
    }
    // Busy with nothing is soon over.
    while let Err(failure) = pod.invoke(&run, "1").await {
        assert_eq!(failure.reason, Reason::Busy);
    }
    assert!(
        pod.kubernetes.run("n").unwrap().is_ready(),
        "failures of calls are none of the Run"
    );
}

#[tokio::test]
async fn a_failure_of_ours_passes_whole() {
    let (pod, run) = ready().await;
    let said = Failure::new(Reason::HandlerError, "ValueError: x").by(Component::Function);
    pod.server.answer_once(said.to_status());
    assert_eq!(pod.invoke(&run, "1").await.unwrap_err(), said);
}

/// C-5.3, scenario 28 and scenario 60: the limits themselves work, and beyond them is a typed answer.
#[tokio::test]
async fn bodies_of_a_mebibyte_pass_and_larger_ones_are_refused() {
    let (pod, run) = ready().await;
    let large = "x".repeat(limits::INPUT_BYTES);
    assert_eq!(
        pod.invoke(&run, &large).await.unwrap().output.len(),
        limits::INPUT_BYTES
    );
    let failure = pod.invoke(&run, &format!("{large}x")).await.unwrap_err();
    assert_eq!(
        (failure.reason, failure.component),
        (Reason::InvalidPayload, Component::Runtimed)
    );
    pod.server.set_output(InvokeFunctionResponse {
        output: vec![b'x'; limits::OUTPUT_BYTES + 1].into(),
        ..InvokeFunctionResponse::default()
    });
    assert_eq!(
        pod.invoke(&run, "1").await.unwrap_err().reason,
        Reason::InvalidOutput
    );
    pod.server.set_output(InvokeFunctionResponse {
        output: vec![b'x'; limits::OUTPUT_BYTES].into(),
        outputs: (0..7).map(|it| (it.to_string(), "v".repeat(8 * 1024))).collect(),
        ..InvokeFunctionResponse::default()
    });
    assert_eq!(pod.invoke(&run, "1").await.unwrap().outputs.len(), 7);
}

/// C-6.5: one line a call, without bodies.
#[tokio::test]
async fn every_call_is_one_audit_line_without_bodies() {
    let (pod, run) = ready().await;
    pod.invoke(&run, "\"secret\"").await.unwrap();
    pod.server.answer_once(Status::unknown("boom"));
    pod.invoke(&run, "\"secret\"").await.unwrap_err();
    let audit = pod.audit.clone();
    assert!(pod.stop().await.is_clean());
    let lines = audit.all();
    let told: Vec<_> = lines
        .iter()
        .map(|line| line["outcome"].as_str().unwrap())
        .collect();
    assert_eq!(told, ["ok", "HandlerError"]);
    for line in &lines {
        assert_eq!(line["run"].as_str(), run.metadata.uid.as_deref());
        assert_eq!(
            (line["runtime"].as_str(), line["invocationId"].as_str()),
            (Some("python"), Some("inv_test"))
        );
        assert!(!line.to_string().contains("secret") && !line.to_string().contains("boom"));
    }
}

struct Nobody;

#[async_trait::async_trait]
impl Callers for Nobody {
    async fn may(&self, wish: Wish, metadata: &MetadataMap, run: &RunKey) -> Result<(), Failure> {
        assert_eq!(wish, Wish::Invoke);
        assert_eq!(metadata.get("authorization").unwrap(), "Bearer token");
        assert_eq!((run.namespace.as_str(), run.name.as_str()), ("ns", "n"));
        Err(Failure::new(Reason::PermissionDenied, "no"))
    }
}

/// C-3.6: the owner authorizes again.
#[tokio::test]
async fn the_owner_asks_again_whether_the_caller_may() {
    let pod = Pod::with(Kubernetes::new(), FakeServer::new(), Arc::new(Nobody)).await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    assert_eq!(
        pod.invoke(&run, "1").await.unwrap_err().reason,
        Reason::PermissionDenied
    );
    assert!(pod.server.invoked().is_empty());
}

struct Slow;

#[async_trait::async_trait]
impl Callers for Slow {
    async fn may(&self, _: Wish, _: &MetadataMap, _: &RunKey) -> Result<(), Failure> {
        tokio::time::sleep(Duration::from_secs(3)).await;
        Ok(())
    }
}

/// C-3.9: asking Kubernetes is part of the caller's time.
#[tokio::test(start_paused = true)]
async fn asking_kubernetes_is_part_of_the_callers_time() {
    let pod = Pod::with(Kubernetes::new(), FakeServer::new(), Arc::new(Slow)).await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    pod.app.invoker().serve(request(&run, "1")).await.unwrap();
    assert!(pod.server.invoked()[0].timeout_millis <= 17_000);
    let mut short = request(&run, "1");
    short.get_mut().timeout_millis = 2_000;
    let failure = pod.app.invoker().serve(short).await.unwrap_err();
    assert_eq!(
        (failure.reason, failure.dispatched),
        (Reason::DeadlineExceeded, Dispatched::No)
    );
    assert_eq!(pod.server.invoked().len(), 1);
}

/// C-3.5: 400 for what nests deeper than 128.
#[tokio::test]
async fn json_nests_at_most_128_deep() {
    let (pod, run) = ready().await;
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    pod.invoke(&run, &nested(limits::JSON_DEPTH)).await.unwrap();
    let failure = pod
        .invoke(&run, &nested(limits::JSON_DEPTH + 1))
        .await
        .unwrap_err();
    assert_eq!(
        (failure.reason, failure.dispatched),
        (Reason::InvalidPayload, Dispatched::No)
    );
    assert_eq!(pod.server.invoked().len(), 1);
}

#[tokio::test]
async fn a_registration_the_server_lost_is_not_dispatched_and_is_looked_at_at_once() {
    let (pod, run) = ready().await;
    pod.server.restart();
    let failure = pod.invoke(&run, "1").await.unwrap_err();
    // The poll may have been faster; either way nothing ran.
    assert!(
        matches!(failure.reason, Reason::Recovering | Reason::StaleRoute),
        "{failure:?}"
    );
    assert_eq!(failure.dispatched, Dispatched::No);
    pod.kubernetes.until_reason("n", "RegistrationFailed").await;
}

/// C-3.5: many frameworks call their own deadline `Cancelled`; it is a 504 all the same.
#[tokio::test(start_paused = true)]
async fn a_custom_server_that_cancels_at_the_deadline_is_a_timeout() {
    let (pod, run) = ready().await;
    pod.server.answer_once(Status::cancelled("context canceled"));
    let mut call = request(&run, "wait");
    call.get_mut().timeout_millis = 5_000;
    let at_the_deadline = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        pod.server.go();
    };
    let (answer, ()) = tokio::join!(pod.app.invoker().serve(call), at_the_deadline);
    let failure = answer.unwrap_err();
    assert_eq!(
        (failure.reason, failure.dispatched),
        (Reason::DeadlineExceeded, Dispatched::Yes)
    );
}

/// Scenario 32: whatever the id is, the line is one valid JSON object (C-6.5).
#[tokio::test]
async fn any_id_makes_a_valid_audit_line() {
    let (pod, run) = ready().await;
    let ids = [
        "\"}\\",
        "<script>alert(1)</script>",
        "%0d%0a",
        "{\"a\":1}",
        "~!@#$&*()'`",
    ];
    for id in ids {
        let mut request = request(&run, "1");
        request.get_mut().invocation_id = id.to_owned();
        let answer = call(pod.dial().await, request).await.unwrap();
        assert_eq!(answer.into_inner().invocation_id, id);
    }
    for id in ["a b", "a\nb", "\u{7f}", "é", &"x".repeat(129)] {
        let mut request = request(&run, "1");
        request.get_mut().invocation_id = id.to_owned();
        let failure = call(pod.dial().await, request).await.unwrap_err();
        assert_eq!(
            (failure.reason, failure.dispatched),
            (Reason::BadHop, Dispatched::No)
        );
    }
    let audit = pod.audit.clone();
    assert!(pod.stop().await.is_clean());
    let told: Vec<_> = audit
        .all()
        .iter()
        .map(|line| line["invocationId"].clone())
        .collect();
    assert_eq!(told, ids);
}
