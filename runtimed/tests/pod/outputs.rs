//! `KRUNTIME_OUTPUTS`: what a call leaves in its file comes back with its answer, and with no other
//! (C-5.4).

use std::{os::unix::fs::symlink, path::PathBuf};

use kruntimes_api::Run;
use kruntimes_proto::{
    executor::InvokeFunctionResponse,
    failure::{Component, Dispatched, Reason},
};
use tonic::Status;

use super::common::{Pod, pod::assigned};

async fn ready() -> (Pod, Run, PathBuf) {
    let pod = Pod::start().await;
    pod.kubernetes.put(&assigned("n").build());
    let run = pod.kubernetes.ready("n").await;
    let file = pod.server.outputs_file(run.metadata.uid.as_deref().unwrap());
    (pod, run, file)
}

async fn refused(pod: &Pod, run: &Run) {
    let failure = pod.invoke(run, "1").await.unwrap_err();
    assert_eq!(
        (failure.reason, failure.dispatched, failure.component),
        (Reason::InvalidOutput, Dispatched::Yes, Component::Function),
        "{failure}"
    );
    assert!(!failure.detail.contains("secret"), "{failure}");
}

fn returning(keys: impl Iterator<Item = &'static str>) -> InvokeFunctionResponse {
    InvokeFunctionResponse {
        outputs: keys.map(|key| (key.to_owned(), "returned".to_owned())).collect(),
        ..InvokeFunctionResponse::default()
    }
}

/// C-5.4: the file is the call's own: emptied before, read after success.
#[tokio::test]
async fn what_a_call_leaves_comes_back_with_it_alone() {
    let (pod, run, file) = ready().await;
    assert!(pod.invoke(&run, "1").await.unwrap().outputs.is_empty());
    pod.server.set_leaves(Some("a=1\nb = x=y\n"));
    let outputs = pod.invoke(&run, "1").await.unwrap().outputs;
    assert_eq!(outputs.len(), 2);
    assert_eq!((outputs["a"].as_str(), outputs["b"].as_str()), ("1", "x=y"));
    pod.server.answer_once(Status::unknown("raised"));
    assert_eq!(
        pod.invoke(&run, "1").await.unwrap_err().reason,
        Reason::HandlerError
    );
    pod.server.set_leaves(None);
    assert!(file.exists(), "the failed call left it");
    assert!(pod.invoke(&run, "1").await.unwrap().outputs.is_empty());
    assert!(!file.exists());
}

/// C-5.4: both sources join, and must not share keys.
#[tokio::test]
async fn returned_and_written_outputs_join_and_do_not_share_keys() {
    let (pod, run, _) = ready().await;
    pod.server.set_output(returning(["a"].into_iter()));
    pod.server.set_leaves(Some("b=written"));
    let outputs = pod.invoke(&run, "1").await.unwrap().outputs;
    assert_eq!(
        (outputs["a"].as_str(), outputs["b"].as_str()),
        ("returned", "written")
    );
    pod.server.set_leaves(Some("a=secret"));
    refused(&pod, &run).await;
    pod.server.set_leaves(None);
    pod.invoke(&run, "1").await.unwrap();
}

/// C-5.3 and C-5.4: every limit, also of both sources together, and every malformed line fails the call.
#[tokio::test]
async fn what_breaks_a_rule_fails_the_call_without_being_quoted() {
    let (pod, run, _) = ready().await;
    let many: String = (0..65).map(|it| format!("secret{it}=x\n")).collect();
    let large: String = (0..9)
        .map(|it| format!("secret{it}={}\n", "v".repeat(8000)))
        .collect();
    for text in [
        "secret",
        "=secret",
        "secret=1\nsecret=1",
        "secret=a\0b",
        &format!("secret={}", "v".repeat(8193)),
        &many,
        &large,
        &"\n".repeat(1 << 20),
    ] {
        pod.server.set_leaves(Some(text));
        refused(&pod, &run).await;
    }
    let half: String = (0..5).map(|it| format!("f{it}={}\n", "v".repeat(8000))).collect();
    pod.server.set_leaves(Some(&half));
    pod.invoke(&run, "1").await.unwrap();
    pod.server.set_output(InvokeFunctionResponse {
        outputs: (0..5).map(|it| (it.to_string(), "v".repeat(8000))).collect(),
        ..InvokeFunctionResponse::default()
    });
    refused(&pod, &run).await;
    assert!(
        pod.kubernetes.run("n").unwrap().is_ready(),
        "failures of calls are none of the Run"
    );
}

/// C-5.4: outputs whose place the function removed are missed by its caller, and by no later one.
#[tokio::test]
async fn a_removed_place_fails_the_call_and_is_there_for_the_next() {
    let (pod, run, file) = ready().await;
    let call = pod.invoke(&run, "wait");
    let remove = async {
        pod.server.until_invoked(1).await;
        std::fs::remove_dir_all(file.parent().unwrap()).unwrap();
        pod.server.go();
    };
    let (answer, ()) = tokio::join!(call, remove);
    let failure = answer.unwrap_err();
    assert_eq!(failure.reason, Reason::InvalidOutput);
    assert!(failure.detail.contains("KRUNTIME_OUTPUTS"), "{failure}");
    pod.server.set_leaves(Some("a=1"));
    assert_eq!(pod.invoke(&run, "1").await.unwrap().outputs["a"], "1");
}

/// C-5.4: beneath a directory that runtimed owns, without symbolic links, regular files only.
#[tokio::test]
async fn a_link_in_the_file_s_place_is_not_read_and_does_no_harm() {
    let (pod, run, file) = ready().await;
    let elsewhere = pod.disk.path().join("elsewhere");
    std::fs::write(&elsewhere, "secret=1").unwrap();
    let call = pod.invoke(&run, "wait");
    let swap = async {
        pod.server.until_invoked(1).await;
        symlink(&elsewhere, &file).unwrap();
        pod.server.go();
    };
    let (answer, ()) = tokio::join!(call, swap);
    assert_eq!(answer.unwrap_err().reason, Reason::InvalidOutput);
    assert!(pod.invoke(&run, "1").await.unwrap().outputs.is_empty());
    assert_eq!(std::fs::read(&elsewhere).unwrap(), b"secret=1");
}
