//! How a call can end: statuses, signals, deadlines.

use std::time::Duration;

use kruntimes_proto::{
    executor::FunctionRegistrationState as State,
    failure::{Dispatched, Reason},
};

use nix::unistd::Pid;

use super::{function, server, with};
use crate::harness::processes;

/// A status other than 0 is how a function raises, however it comes about.
#[tokio::test]
async fn a_status_is_an_error_of_the_function_and_the_shell_stays_warm() {
    let server = with(&[], &[("SERVER_EXPOSE_ERRORS", "true")]).await;
    let code = r#"
echo x >>sourced
handler() {
  echo output
  case $1 in
    '"return 3"') return 3 ;;
    '"exit 3"') exit 3 ;;
    '"return 255"') return 255 ;;
    '"exit 137"') exit 137 ;;
    '"last"') false ;;
    '"killed child"') sh -c 'kill -9 $$' ;;
    '"set -e"') set -e; sh -c 'exit 4'; echo not reached ;;
    '"pipefail"') set -eo pipefail; yes | head -n 1; echo not reached ;;
    '"set -u"') set -u; echo "$nothing" ;;
    '"own trap"') trap 'true' EXIT; exit 5 ;;
    '"own trap, pipefail"') trap 'true' EXIT; set -eo pipefail; yes | head -n 1 ;;
    '"exit 0"') exit 0 ;;
  esac
}
"#;
    let function = function(&server, code).await;
    for (event, status) in [
        ("return 3", 3),
        ("exit 3", 3),
        ("return 255", 255),
        ("exit 137", 137),
        ("last", 1),
        ("killed child", 137),
        ("set -e", 4),
        ("pipefail", 141),
        ("set -u", 1),
        ("own trap", 5),
        ("own trap, pipefail", 141),
    ] {
        let failure = function.call(&format!("\"{event}\"")).await.expect_err(event);
        assert_eq!(
            (failure.reason, failure.dispatched),
            (Reason::HandlerError, Dispatched::Yes),
            "{event}: {}",
            failure.detail
        );
        assert!(
            failure.detail.ends_with(&format!("ended with status {status}")),
            "{event}: {}",
            failure.detail
        );
        assert_eq!(
            function.call("\"exit 0\"").await.as_deref(),
            Ok("output\n"),
            "{event}"
        );
    }
    let sourced = std::fs::read_to_string(function.file("sourced")).expect("sourced");
    assert_eq!(sourced, "x\n", "one shell for all of it");
}

#[tokio::test]
async fn a_status_is_told_only_when_the_operator_allows_it() {
    let server = server().await;
    let function = function(&server, "handler() { echo secret-word >&2; return 77; }\n").await;
    let failure = function.call("1").await.expect_err("raised");
    assert_eq!(failure.reason, Reason::HandlerError);
    assert!(
        !failure.detail.contains("77") && !failure.detail.contains("secret-word"),
        "{}",
        failure.detail
    );
    server.log.wait_for(&["ended with status 77"]).await;
}

/// What the file switches on is on in every call.
#[tokio::test]
async fn options_and_traps_of_the_file_hold_inside_the_function() {
    let server = server().await;
    let code = r#"
set -Eeuo pipefail
shopt -s nullglob nocasematch
trap 'echo "trapped $?" >&2' ERR
handler() {
  case $1 in
    1) false; echo not reached ;;
    2) echo "$nothing"; echo not reached ;;
    3) false | true; echo not reached ;;
    4) local files=(*.none); echo "${#files[@]} $-" ;;
  esac
}
"#;
    let function = function(&server, code).await;
    for event in ["1", "2", "3"] {
        assert_eq!(function.reason(event).await, Reason::HandlerError, "{event}");
    }
    server.log.wait_for(&["trapped 1"]).await;
    let options = function.call("4").await.expect("answer");
    assert!(
        options.starts_with("0 ") && options.contains('e') && options.contains('u'),
        "{options}"
    );
}

/// C-5.5, C-5.6: the process of the call, or of the shell, is gone: the call fails, the
/// next one works.
#[tokio::test]
async fn a_killed_process_costs_its_call_and_nothing_else() {
    let server = server().await;
    let neighbour = function(&server, "handler() { echo fine; }\n").await;
    let code = r#"
handler() {
  case $1 in
    1) kill -9 "$BASHPID" ;;
    2) kill "$BASHPID"; sleep 1000 ;;
    3) kill -9 $$; sleep 1000 ;;
    4) kill $$; sleep 1000 ;;
    5) kill -SEGV $$; sleep 1000 ;;
    *) echo alive ;;
  esac
}
"#;
    let function = function(&server, code).await;
    let mark = format!(
        "KRUNTIME_REGISTRATION_ID={}",
        function.registration.registration_id
    );
    for (event, how) in [
        ("1", "SIGKILL"),
        ("2", "SIGTERM"),
        ("3", "SIGKILL"),
        ("4", "SIGTERM"),
        ("5", "SIGSEGV"),
    ] {
        let failure = function.call(event).await.expect_err(event);
        assert_eq!(
            (failure.reason, failure.dispatched),
            (Reason::WorkerExited, Dispatched::Yes),
            "{event}"
        );
        assert!(failure.detail.contains(how), "{event}: {}", failure.detail);
        assert_eq!(
            function.status().await.expect("status").state(),
            State::Ready,
            "{event}"
        );
        assert_eq!(
            function.call("0").await.as_deref(),
            Ok("alive\n"),
            "after {event}"
        );
        assert_eq!(processes(Pid::from_raw(-1), &mark).len(), 1, "after {event}");
        assert_eq!(neighbour.call("0").await.as_deref(), Ok("fine\n"), "{event}");
    }
}

/// C-8.6, scenarios 37 and 84: after the deadline nothing of the call is left.
#[tokio::test]
async fn a_timed_out_call_leaves_no_process() {
    let server = server().await;
    let code = r#"
handler() {
  case $1 in
    1) trap '' TERM HUP INT; sleep 1000 ;;
    2) yes >&2 | sleep 1000 ;;
    3) setsid sleep 1000 & sleep 1000 ;;
    4) ( (setsid sh -c 'sleep 1000 & sleep 1000' &) & ); sleep 1000 ;;
    5) env -i setsid sleep 1000 & sleep 1000 ;;
    6) set -m; sleep 1000 & wait ;;
    7) while :; do :; done ;;
    *) echo "$$" ;;
  esac
}
"#;
    let function = function(&server, code).await;
    let mark = format!(
        "KRUNTIME_REGISTRATION_ID={}",
        function.registration.registration_id
    );
    for event in 1..=7 {
        let failure = function
            .call_within(&event.to_string(), Duration::from_millis(300))
            .await
            .expect_err("hangs");
        assert_eq!(
            (failure.reason, failure.dispatched),
            (Reason::DeadlineExceeded, Dispatched::Yes),
            "{event}"
        );
        let shell = function.call("0").await.expect("next call");
        let left = processes(server.pid(), &mark);
        assert!(
            left.len() == 1 && left[0].starts_with(&format!("{} ", shell.trim())),
            "{event}, shell {shell}:\n{}",
            left.join("")
        );
    }
    function.unregister(true, 0).await.expect("unregister");
    assert_eq!(processes(server.pid(), &mark), Vec::<String>::new());
}

/// Scenario 85: timed-out commands do not pile up.
#[tokio::test]
async fn thirty_timed_out_commands_leave_the_process_table_as_it_was() {
    let server = server().await;
    let code = "handler() { if [[ $1 == 0 ]]; then echo works; else sleep 1000; fi; }\n";
    let function = function(&server, code).await;
    let mark = format!(
        "KRUNTIME_REGISTRATION_ID={}",
        function.registration.registration_id
    );
    for round in 0..30 {
        let failure = function.call_within("1", Duration::from_millis(30)).await;
        assert_eq!(
            failure.expect_err("hangs").reason,
            Reason::DeadlineExceeded,
            "{round}"
        );
    }
    assert_eq!(function.call("0").await.as_deref(), Ok("works\n"));
    let left = processes(server.pid(), &mark);
    assert_eq!(left.len(), 1, "{}", left.join(""));
}
