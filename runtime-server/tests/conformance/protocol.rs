//! The protocol between runtimed and a Runtime Server, tried on every built-in language
//! and on any server at an address (C-5.8).
//!
//! Nothing here knows a language or a server from inside: each case registers fixture
//! functions, which docs/custom-runtime-server.md describes, and asks over gRPC.

use std::{fs, time::Duration};

use kruntimes_proto::executor::{
    FunctionRegistrationState as State, FunctionStatusRequest, HealthRequest, InvokeFunctionRequest,
    UnregisterFunctionRequest,
};
use tonic::Code;

use crate::{
    harness::{Function, PATIENCE, appears},
    target::Target,
};

/// Each case once for each language of ours on a Unix socket, and once at an address.
macro_rules! everywhere {
    ($($case:ident)*) => {
        on! { python Target::own("python"), $($case)* }
        on! { bash Target::own("bash"), $($case)* }
        on! { address Target::at_an_address(), $($case)* }
    };
}

macro_rules! on {
    ($module:ident $target:expr, $($case:ident)*) => {
        mod $module {
            use super::Target;

            $(#[tokio::test] async fn $case() {
                let target = $target.await;
                super::$case(&target).await;
                target.end().await;
            })*
        }
    };
}

everywhere! {
    it_tells_its_health
    the_same_wish_again_is_the_same_registration
    a_higher_attempt_replaces_and_a_stale_id_can_do_nothing
    an_attempt_that_failed_leaves_nothing_to_the_next
    unknown_registrations_are_not_found_and_unregistering_them_is_done
    a_wish_that_cannot_be_is_refused
    what_cannot_be_loaded_is_failed_and_never_ready
    json_goes_in_and_comes_out
    an_invocation_id_is_kept_or_made
    a_call_that_cannot_be_is_refused
    inputs_end_at_one_mebibyte
    outputs_end_at_one_mebibyte
    one_call_of_a_function_runs_at_a_time
    a_question_does_not_wait_for_calls
    a_call_ends_at_its_deadline_and_its_late_answer_is_nobodys
    an_error_costs_its_call_and_nothing_else
    a_death_costs_its_call_and_nothing_else
    printed_text_is_no_part_of_the_answer
    draining_lets_the_running_call_end
    a_drain_ends_at_its_time
    cancelling_ends_the_running_call
    a_caller_that_leaves_frees_the_function
    no_process_outlives_its_call
    functions_do_not_share_their_environment
    calls_are_activity_and_polls_are_not
}

fn text(word: &str) -> String {
    format!("\"{word}\"")
}

async fn answer(function: &Function, input: &str) -> String {
    let answer = function.send(function.request(input)).await.expect("an answer");
    String::from_utf8(answer.into_inner().output.to_vec()).expect("UTF-8")
}

fn within(function: &Function, input: &str, timeout: Duration) -> InvokeFunctionRequest {
    InvokeFunctionRequest {
        timeout_millis: i64::try_from(timeout.as_millis()).expect("millis"),
        ..function.request(input)
    }
}

type Running = tokio::task::JoinHandle<Result<String, tonic::Status>>;

/// Starts a call that waits for the file `go`, and returns once it runs.
async fn running(function: &Function, timeout: Duration) -> Running {
    let call = tokio::spawn({
        let function = function.clone();
        async move {
            let request = within(&function, &text("go"), timeout);
            let answer = function.send(request).await?.into_inner();
            Ok(String::from_utf8_lossy(&answer.output).into_owned())
        }
    });
    function.until(|status| status.in_flight == 1).await;
    call
}

fn go(function: &Function) {
    fs::write(function.file("go"), "x").expect("the file `go`");
}

async fn it_tells_its_health(target: &Target) {
    let health = target.runtime().health(HealthRequest {}).await.expect("health");
    assert!(health.into_inner().healthy);
}

/// C-5.2: registering again, after an uncertain answer, initialises nothing twice.
async fn the_same_wish_again_is_the_same_registration(target: &Target) {
    let source = target.source("fixtures.echo_back");
    let first = target.ready(&source).await;
    let again = target.register(&source).await.expect("again");
    assert_eq!(again.registration, first.registration);
    assert_eq!(again.status().await.expect("status").state(), State::Ready);
    let mut other = source.clone();
    other.digest = format!("sha256:{}", "1".repeat(64));
    assert_eq!(
        target.code(target.register(&other).await.map(drop)),
        Code::AlreadyExists
    );
    assert_eq!(answer(&first, "1").await, "1", "nothing was replaced");
}

/// C-5.2: generations.
async fn a_higher_attempt_replaces_and_a_stale_id_can_do_nothing(target: &Target) {
    let mut source = target.source("fixtures.echo_back");
    let first = target.ready(&source).await;
    source.attempt = 2;
    source.digest = format!("sha256:{}", "2".repeat(64));
    let second = target.ready(&source).await;
    assert_ne!(
        second.registration.registration_id,
        first.registration.registration_id
    );
    assert_eq!(target.code(first.status().await), Code::FailedPrecondition);
    assert_eq!(
        target.code(first.send(first.request("1")).await),
        Code::FailedPrecondition
    );
    assert_eq!(
        target.code(first.unregister(true, 0).await),
        Code::FailedPrecondition
    );
    assert_eq!(answer(&second, "2").await, "2", "untouched");
    source.attempt = 1;
    assert_eq!(
        target.code(target.register(&source).await.map(drop)),
        Code::FailedPrecondition
    );
}

/// Scenario 19: what went wrong with one attempt is told of that attempt alone (C-5.2).
async fn an_attempt_that_failed_leaves_nothing_to_the_next(target: &Target) {
    let mut source = target.source("loading.echo_back");
    let first = target.register(&source).await.expect("registered");
    let failed = first.until(|status| status.state() == State::Failed).await;
    assert!(!failed.fatal_error.is_empty());
    source.attempt = 2;
    source.env = vec![("LOADS".to_owned(), "yes".to_owned())];
    let second = target.ready(&source).await;
    assert_eq!(answer(&second, "1").await, "1");
    assert_eq!(second.status().await.expect("status").fatal_error, "");
}

/// C-5.2: NotFound for a Run without registration; to unregister it is done already.
async fn unknown_registrations_are_not_found_and_unregistering_them_is_done(target: &Target) {
    let source = target.source("fixtures.echo_back");
    let mut client = target.functions();
    let status = |id: &str| FunctionStatusRequest {
        registration: Some(source.reference(id)),
    };
    let unregister = UnregisterFunctionRequest {
        registration: Some(source.reference("reg_unknown")),
        ..Default::default()
    };
    let invoke = InvokeFunctionRequest {
        registration: Some(source.reference("reg_unknown")),
        input: b"1".to_vec().into(),
        content_type: "application/json".into(),
        ..Default::default()
    };
    assert_eq!(
        target.code(client.function_status(status("reg_unknown")).await),
        Code::NotFound
    );
    assert_eq!(target.code(client.invoke_function(invoke).await), Code::NotFound);
    client
        .unregister_function(unregister)
        .await
        .expect("nothing to do");
    let nameless = client.function_status(status("")).await;
    assert_eq!(
        target.code(nameless),
        Code::InvalidArgument,
        "an id is always needed here"
    );
}

/// C-5.2, C-5.3: the server checks a wish before it takes any work.
async fn a_wish_that_cannot_be_is_refused(target: &Target) {
    let source = target.source("fixtures.echo_back");
    let request = source.request();
    let mut wishes = vec![("no attempt", request.clone()); 7];
    wishes[0].1.registration_attempt = 0;
    wishes[1] = ("no digest", request.clone());
    wishes[1].1.registration_digest.clear();
    wishes[2] = ("a long digest", request.clone());
    wishes[2].1.registration_digest = "x".repeat(129);
    wishes[3] = ("a relative directory", request.clone());
    wishes[3].1.working_dir = source.run_uid.clone();
    wishes[4] = ("no such directory", request.clone());
    wishes[4].1.working_dir = source.working_dir.join("missing").display().to_string();
    wishes[5] = ("no handler", request.clone());
    wishes[5].1.handler.clear();
    wishes[6] = ("no Run", request.clone());
    wishes[6].1.run_uid.clear();
    for (what, wish) in wishes {
        let refused = target.functions().register_function(wish).await;
        assert_eq!(target.code(refused), Code::InvalidArgument, "{what}");
    }
    target.ready(&source).await;
}

/// Scenario 73, C-5.3: FAILED with a bounded reason, and no call.
async fn what_cannot_be_loaded_is_failed_and_never_ready(target: &Target) {
    for handler in [
        "fixtures.is_not_there",
        "no_such_file.echo_back",
        "loading.echo_back",
    ] {
        let function = target
            .register(&target.source(handler))
            .await
            .expect("registered");
        let status = function
            .until(|status| status.state() != State::Registering)
            .await;
        assert_eq!(status.state(), State::Failed, "{handler}");
        let length = status.fatal_error.len();
        assert!(
            (1..=4096).contains(&length),
            "{handler}: a reason of {length} bytes"
        );
        let refused = function.send(function.request("1")).await;
        assert_eq!(target.code(refused), Code::FailedPrecondition, "{handler}");
        function.unregister(false, 0).await.expect("unregister");
        assert_eq!(target.code(function.status().await), Code::NotFound, "{handler}");
    }
}

/// C-8.1, C-8.2.
async fn json_goes_in_and_comes_out(target: &Target) {
    let function = target.function("echo_back").await;
    let same = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("JSON");
    for value in [
        "null",
        "true",
        "-1.5e3",
        "[]",
        r#"{"a":[1,{"b":null}],"ä":"ö \" \\ \n €"}"#,
        r#""$(id) `id` '; id # %s%n {}""#,
    ] {
        assert_eq!(same(&answer(&function, value).await), same(value));
    }
    assert_eq!(answer(&function, "").await, "null", "nothing is null");
    let answer = function
        .send(function.request("[1]"))
        .await
        .expect("answer")
        .into_inner();
    assert_eq!(answer.content_type, "application/json");
    assert_eq!(answer.registration.as_ref(), Some(&function.registration));
    let with_parameter = InvokeFunctionRequest {
        content_type: "application/json; charset=utf-8".into(),
        ..function.request("1")
    };
    function.send(with_parameter).await.expect("answer");
}

/// C-5.3.
async fn an_invocation_id_is_kept_or_made(target: &Target) {
    let function = target.function("echo_back").await;
    let call = |id: String| InvokeFunctionRequest {
        invocation_id: id,
        ..function.request("1")
    };
    let longest = "i".repeat(128);
    let kept = function
        .send(call(longest.clone()))
        .await
        .expect("answer")
        .into_inner();
    assert_eq!(kept.invocation_id, longest);
    let made = function
        .send(call(String::new()))
        .await
        .expect("answer")
        .into_inner();
    assert!((1..=128).contains(&made.invocation_id.len()));
    let too_long = function.send(call("i".repeat(129))).await;
    assert_eq!(target.code(too_long), Code::InvalidArgument);
}

async fn a_call_that_cannot_be_is_refused(target: &Target) {
    let function = target.function("echo_back").await;
    let cases = [
        ("no JSON", function.request("{")),
        (
            "another type",
            InvokeFunctionRequest {
                content_type: "text/xml".into(),
                ..function.request("1")
            },
        ),
        (
            "a time before now",
            InvokeFunctionRequest {
                timeout_millis: -1,
                ..function.request("1")
            },
        ),
        (
            "no registration",
            InvokeFunctionRequest {
                registration: None,
                ..function.request("1")
            },
        ),
    ];
    for (what, request) in cases {
        assert_eq!(
            target.code(function.send(request).await),
            Code::InvalidArgument,
            "{what}"
        );
    }
    assert_eq!(answer(&function, "1").await, "1");
}

/// C-5.3, scenario 60.
async fn inputs_end_at_one_mebibyte(target: &Target) {
    let function = target.function("echo_back").await;
    let sized = |bytes: usize| text(&"x".repeat(bytes - 2));
    for bytes in [131_072, 1_048_575, 1_048_576] {
        let input = sized(bytes);
        assert!(answer(&function, &input).await == input, "{bytes} bytes");
    }
    let refused = function.send(function.request(sized(1_048_577))).await;
    assert_eq!(target.code(refused), Code::InvalidArgument);
}

/// C-5.3, scenario 28: a typed error, never a cut answer.
async fn outputs_end_at_one_mebibyte(target: &Target) {
    let function = target.function("big_output").await;
    for bytes in [1_048_575, 1_048_576] {
        assert_eq!(answer(&function, &bytes.to_string()).await.len(), bytes);
    }
    let refused = function.send(function.request("1048577")).await;
    assert_eq!(target.code(refused), Code::OutOfRange);
    assert_eq!(answer(&function, "3").await, "\"x\"");
}

/// C-5.3: no queue.
async fn one_call_of_a_function_runs_at_a_time(target: &Target) {
    let (function, other) = (
        target.function("wait_for_file").await,
        target.function("echo_back").await,
    );
    let first = running(&function, PATIENCE).await;
    let second = function.send(function.request(text("go"))).await;
    assert_eq!(target.code(second), Code::ResourceExhausted);
    assert_eq!(answer(&other, "1").await, "1", "another function is free");
    go(&function);
    assert_eq!(first.await.expect("join").expect("answer"), text("go"));
    assert_eq!(
        answer(&function, &text("go")).await,
        text("go"),
        "free with the answer"
    );
}

/// C-5.8, C-6.4: a server whose calls keep it from answering is taken for one that hangs.
async fn a_question_does_not_wait_for_calls(target: &Target) {
    let mut calls = Vec::new();
    for _ in 0..4 {
        let function = target.function("wait_for_file").await;
        let call = running(&function, PATIENCE).await;
        calls.push((function, call));
    }
    let source = target.source("fixtures.echo_back");
    let unknown = FunctionStatusRequest {
        registration: Some(source.reference("reg_unknown")),
    };
    let mut client = target.functions();
    let questions = async {
        assert_eq!(target.code(client.function_status(unknown).await), Code::NotFound);
        for (function, _) in &calls {
            assert_eq!(function.status().await.expect("status").in_flight, 1);
        }
    };
    // What runtimed waits for one answer.
    let answered = tokio::time::timeout(Duration::from_secs(5), questions).await;
    answered.expect("answers while four calls run");
    for (function, call) in calls {
        go(&function);
        assert_eq!(call.await.expect("join").expect("answer"), text("go"));
    }
}

/// Scenarios 37 and 39, C-8.6.
async fn a_call_ends_at_its_deadline_and_its_late_answer_is_nobodys(target: &Target) {
    let function = target.function("wait_for_file").await;
    for round in 0..3 {
        let late = within(&function, &text("go"), Duration::from_millis(200));
        assert_eq!(target.code(function.send(late).await), Code::DeadlineExceeded);
        // Now the first one would have an answer.
        go(&function);
        fs::write(function.file("there"), "x").expect("the file `there`");
        assert_eq!(
            answer(&function, &text("there")).await,
            text("there"),
            "round {round}"
        );
        let status = function.status().await.expect("status");
        assert_eq!((status.state(), status.in_flight), (State::Ready, 0));
        fs::remove_file(function.file("go")).expect("remove");
    }
}

/// C-5.5, scenario 80: whatever the error says.
async fn an_error_costs_its_call_and_nothing_else(target: &Target) {
    let function = target.function("raise_error").await;
    let megabyte = "e".repeat(1_000_000);
    for word in ["plain", "two\\nlines", "🎉 é \\u0000", &megabyte, "%s%n {} $(id)"] {
        let raised = function.send(function.request(text(word))).await;
        assert_eq!(target.code(raised), Code::Unknown, "{word:.20}");
    }
    assert_eq!(function.status().await.expect("status").state(), State::Ready);
}

/// C-5.5, C-5.6, scenarios 69 and 91: the next call waits for the new process.
async fn a_death_costs_its_call_and_nothing_else(target: &Target) {
    let function = target.function("end_process").await;
    let neighbour = target.function("wait_for_file").await;
    let call = running(&neighbour, PATIENCE).await;
    for _ in 0..2 {
        let died = function.send(function.request("1")).await;
        assert_eq!(target.code(died), Code::Aborted);
        assert_eq!(function.status().await.expect("status").state(), State::Ready);
    }
    go(&neighbour);
    assert_eq!(call.await.expect("join").expect("answer"), text("go"));
}

/// C-8.6, scenario 67.
async fn printed_text_is_no_part_of_the_answer(target: &Target) {
    let function = target.function("print_text").await;
    for _ in 0..2 {
        assert_eq!(answer(&function, &text("printed")).await, text("said"));
    }
}

/// C-5.2, scenario 104: DRAINING refuses what is new and waits for what runs.
async fn draining_lets_the_running_call_end(target: &Target) {
    let source = target.source("fixtures.wait_for_file");
    let function = target.ready(&source).await;
    let call = running(&function, PATIENCE).await;
    let draining = tokio::spawn({
        let function = function.clone();
        async move { function.unregister(false, 60_000).await }
    });
    function.until(|status| status.state() == State::Draining).await;
    let refused = function.send(function.request("1")).await;
    assert_eq!(target.code(refused), Code::FailedPrecondition);
    go(&function);
    assert_eq!(call.await.expect("join").expect("answer"), text("go"));
    draining.await.expect("join").expect("drained");
    assert_eq!(target.code(function.status().await), Code::NotFound);
    function.unregister(false, 0).await.expect("already done");
}

async fn a_drain_ends_at_its_time(target: &Target) {
    let function = target.function("wait_for_file").await;
    let call = running(&function, PATIENCE).await;
    function.unregister(false, 100).await.expect("drained");
    target.code(call.await.expect("join"));
    assert_eq!(target.code(function.status().await), Code::NotFound);
}

async fn cancelling_ends_the_running_call(target: &Target) {
    let function = target.function("wait_for_file").await;
    let call = running(&function, PATIENCE).await;
    function.unregister(true, 0).await.expect("cancelled");
    assert_eq!(target.code(call.await.expect("join")), Code::Cancelled);
    assert_eq!(target.code(function.status().await), Code::NotFound);
}

/// C-3.8, scenario 40: a server may let such a call finish, but not past its deadline.
async fn a_caller_that_leaves_frees_the_function(target: &Target) {
    let function = target.function("wait_for_file").await;
    let call = running(&function, Duration::from_secs(10)).await;
    call.abort();
    let _ = call.await;
    function.until(|status| status.in_flight == 0).await;
    go(&function);
    assert_eq!(answer(&function, &text("go")).await, text("go"));
}

/// C-8.6, scenarios 70, 84 and 85. The children of the call write on for as long as they live.
async fn no_process_outlives_its_call(target: &Target) {
    let function = target.function("leave_children").await;
    let beats = ["beat-1", "beat-2"].map(|name| function.file(name));
    // They may need a while to start.
    let mut timeout = Duration::from_secs(2);
    loop {
        let late = within(&function, "null", timeout);
        assert_eq!(target.code(function.send(late).await), Code::DeadlineExceeded);
        if beats.iter().all(|beat| beat.exists()) {
            break;
        }
        timeout *= 4;
    }
    assert_silent(&beats).await;
    for beat in &beats {
        fs::remove_file(beat).expect("remove");
    }
    let call = tokio::spawn({
        let function = function.clone();
        async move { function.send(within(&function, "null", PATIENCE)).await }
    });
    for beat in &beats {
        appears(beat).await;
    }
    function.unregister(true, 0).await.expect("cancelled");
    assert_eq!(target.code(call.await.expect("join")), Code::Cancelled);
    assert_silent(&beats).await;
}

/// Nobody writes any more. They would every 20 ms.
async fn assert_silent(beats: &[std::path::PathBuf; 2]) {
    let sizes = || {
        beats
            .each_ref()
            .map(|beat| fs::metadata(beat).map_or(0, |file| file.len()))
    };
    let before = sizes();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(sizes(), before, "a process of the call lives on");
}

/// C-8.7.
async fn functions_do_not_share_their_environment(target: &Target) {
    let mut sources = [
        target.source("fixtures.read_env"),
        target.source("fixtures.read_env"),
    ];
    let mut functions = Vec::new();
    for (source, word) in sources.iter_mut().zip(["one", "two"]) {
        source.env = vec![("WORD".to_owned(), word.to_owned())];
        functions.push(target.ready(source).await);
    }
    for _ in 0..2 {
        assert_eq!(answer(&functions[0], &text("WORD")).await, text("one"));
        assert_eq!(answer(&functions[1], &text("WORD")).await, text("two"));
    }
}

/// C-5.2: what idle time is measured by.
async fn calls_are_activity_and_polls_are_not(target: &Target) {
    let function = target.function("echo_back").await;
    let ready = function.status().await.expect("status").last_activity_unix_nano;
    assert!(ready > 0, "idle since it became ready");
    assert_eq!(
        function.status().await.expect("status").last_activity_unix_nano,
        ready
    );
    answer(&function, "1").await;
    assert!(function.status().await.expect("status").last_activity_unix_nano > ready);
}
