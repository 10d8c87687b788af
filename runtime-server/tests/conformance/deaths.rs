//! Workers that die, hang or are abandoned (C-5.6, C-8.6; scenarios 39, 69, 70).

use std::time::Duration;

use kruntimes_proto::{
    executor::{FunctionRegistrationState as State, InvokeFunctionRequest},
    failure::{Dispatched, Reason},
};
use nix::{sys::signal::kill, unistd::Pid};

use crate::harness::{Server, appears, failure, processes};

/// Scenario 69, C-5.6: whatever the handler does to its process, the call fails, the next one
/// works, and the neighbour does not notice.
#[tokio::test]
async fn a_dead_worker_costs_its_call_and_nothing_else() {
    let server = Server::start().await;
    let neighbour = server
        .function("count = 0\ndef handler(event):\n    global count\n    count += 1\n    return count\n")
        .await;
    let code = r#"
import ctypes, os, signal, sys, threading
def handler(event):
    if event == 'exit 0': sys.exit(0)
    if event == 'exit text': sys.exit('bye')
    if event == '_exit 1': os._exit(1)
    if event == 'kill': os.kill(os.getpid(), signal.SIGKILL)
    if event == 'abort': os.abort()
    if event == 'fault': ctypes.string_at(0)
    if event == 'wire': os.close(200)
    return 'alive'
"#;
    let function = server.function(code).await;
    let cases = [
        ("exit 0", "code 0"),
        ("exit text", "code 1"),
        ("_exit 1", "code 1"),
        ("kill", "SIGKILL"),
        ("abort", "SIGABRT"),
        ("fault", "SIGSEGV"),
        ("wire", "exited"),
    ];
    for (round, (event, how)) in cases.into_iter().enumerate() {
        let failure = function.call(&format!("\"{event}\"")).await.expect_err(event);
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
            function.call("1").await.as_deref(),
            Ok("\"alive\""),
            "after {event}"
        );
        assert_eq!(
            neighbour.call("1").await.expect("neighbour"),
            (round + 1).to_string(),
            "{event}"
        );
    }
}

/// Scenario 69.
#[tokio::test]
async fn a_handler_that_closes_descriptors_or_exits_in_a_thread_harms_nobody() {
    let server = Server::start().await;
    let code = r#"
import os, sys, threading
def handler(event):
    if event == 'close':
        os.closerange(0, 20)
    if event == 'thread':
        thread = threading.Thread(target=lambda: sys.exit(3))
        thread.start()
        thread.join()
    return 'alive'
"#;
    let function = server.function(code).await;
    for event in ["thread", "close"] {
        // Both are the function's own affair: it may answer or die, but not hang.
        let _ = function.call(&format!("\"{event}\"")).await;
        assert_eq!(
            function.call("1").await.as_deref(),
            Ok("\"alive\""),
            "after {event}"
        );
    }
}

/// A worker that writes on the wire itself cannot answer for another call.
#[tokio::test]
async fn a_forged_frame_fails_the_call_and_ends_the_worker() {
    let server = Server::start().await;
    let code = r#"
import os, struct
def handler(event):
    if event == 'forge':
        head = struct.pack('>QQHI', 999, 0, 3, 0) + b'a/b'
        os.write(200, struct.pack('>IB', len(head) + 4, 4) + head + b'fake')
    if event == 'garbage':
        os.write(200, b'\xff' * 64)
    return 'real'
"#;
    let function = server.function(code).await;
    for event in ["forge", "garbage"] {
        assert_eq!(
            function.reason(&format!("\"{event}\"")).await,
            Reason::RuntimeServerError,
            "{event}"
        );
        assert_eq!(
            function.call("1").await.as_deref(),
            Ok("\"real\""),
            "after {event}"
        );
    }
}

/// Scenario 70, C-8.6: after a timeout no process of the call is left, however it hid.
#[tokio::test]
async fn a_timed_out_call_leaves_no_process() {
    let server = Server::start().await;
    let code = r#"
import multiprocessing, os, subprocess, threading, time
def handler(event):
    if event != 'hang':
        return os.getpid()
    subprocess.Popen(['sleep', '1000'])
    subprocess.Popen(['sleep', '1000'], start_new_session=True)
    subprocess.Popen(['sh', '-c', "trap '' TERM HUP; (setsid sleep 1000 &) ; sleep 1000"])
    subprocess.Popen(['env', '-i', 'sh', '-c', '(setsid sleep 1000 &)'])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
    pool = multiprocessing.get_context('fork').Pool(2)
    threading.Thread(target=time.sleep, args=(1000,)).start()
    time.sleep(1000)
"#;
    let function = server.function(code).await;
    let mark = format!(
        "KRUNTIME_REGISTRATION_ID={}",
        function.registration.registration_id
    );
    for round in 0..10 {
        let failure = function
            .call_within("\"hang\"", Duration::from_millis(400))
            .await
            .expect_err("hangs");
        assert_eq!(
            (failure.reason, failure.dispatched),
            (Reason::DeadlineExceeded, Dispatched::Yes),
            "{round}"
        );
        // The answer to this call comes from a new worker, so the old ones are gone.
        let pid: i32 = function.call("1").await.expect("next call").parse().expect("pid");
        let left = processes(server.pid(), &mark);
        assert!(
            left.len() == 1 && left[0].starts_with(&format!("{pid} ")),
            "round {round}, worker {pid}:\n{}",
            left.join("")
        );
    }
    function.unregister(true, 0).await.expect("unregister");
    assert_eq!(processes(server.pid(), &mark), Vec::<String>::new());
}

/// Scenario 39, C-8.6: a late answer never reaches the next caller.
#[tokio::test]
async fn a_late_answer_is_never_the_next_callers() {
    let server = Server::start().await;
    let code = "import time\ndef handler(event):\n    if event == 'A':\n        time.sleep(0.05)\n    return event\n";
    let function = server.function(code).await;
    for round in 0..20 {
        let late = function
            .call_within("\"A\"", Duration::from_millis(46 + round % 8))
            .await;
        match late {
            Ok(answer) => assert_eq!(answer, "\"A\""),
            Err(failure) => assert_eq!(failure.reason, Reason::DeadlineExceeded),
        }
        assert_eq!(
            function.call("\"B\"").await.as_deref(),
            Ok("\"B\""),
            "round {round}"
        );
    }
}

/// C-3.8 and scenario 40: a caller that hangs up ends its call; the slot comes back.
#[tokio::test]
async fn a_call_whose_caller_is_gone_is_ended() {
    let server = Server::start().await;
    let code = "import os, time\ndef handler(event):\n    if event == 'wait':\n        open('pid', 'w').write(str(os.getpid()))\n        time.sleep(1000)\n    return event\n";
    let function = server.function(code).await;
    for _ in 0..5 {
        let call = tokio::spawn({
            let function = function.clone();
            async move { function.call("\"wait\"").await }
        });
        let pid: i32 = appears(&function.file("pid")).await.parse().expect("pid");
        call.abort();
        let _ = call.await;
        function.until(|status| status.in_flight == 0).await;
        assert!(kill(Pid::from_raw(pid), None).is_err(), "worker {pid} lives");
        std::fs::remove_file(function.file("pid")).expect("remove");
        assert_eq!(function.call("\"B\"").await.as_deref(), Ok("\"B\""));
    }
    assert!(
        !server.log.lines().iter().any(|line| line.contains("ERROR")),
        "{}",
        server.log.lines().join("\n")
    );
}

/// C-3.8.
#[tokio::test]
async fn a_call_may_be_left_to_finish_without_its_caller() {
    let server = Server::with(&[], &[("SERVER_ON_CALLER_GONE", "Finish")]).await;
    let code = "import os, time\ndef handler(event):\n    if event == 'wait':\n        open('started', 'w').write('x')\n        \
                while not os.path.exists('go'): time.sleep(0.002)\n        open('finished', 'w').write('x')\n    return event\n";
    let function = server.function(code).await;
    let call = tokio::spawn({
        let function = function.clone();
        async move { function.call("\"wait\"").await }
    });
    appears(&function.file("started")).await;
    call.abort();
    let _ = call.await;
    assert_eq!(function.reason("\"B\"").await, Reason::Busy);
    std::fs::write(function.file("go"), "x").expect("go");
    appears(&function.file("finished")).await;
    function.until(|status| status.in_flight == 0).await;
    assert_eq!(
        function.call("\"B\"").await.as_deref(),
        Ok("\"B\""),
        "the abandoned answer went nowhere"
    );
}

/// Scenario 91: killed from outside, as for lack of memory, alone or with its group, while
/// a neighbour is at work. The answer says so, and the next call waits for the new worker.
#[tokio::test]
async fn a_killed_worker_is_told_of_and_its_neighbour_works_on() {
    let server = Server::start().await;
    let code = "import os, time\ndef handler(event):\n    if event == 'wait':\n        open('pid', 'w').write(str(os.getpid()))\n        \
                while not os.path.exists('go'): time.sleep(0.002)\n    return event\n";
    let (function, neighbour) = (server.function(code).await, server.function(code).await);
    let wait = |function: &crate::harness::Function| {
        let function = function.clone();
        tokio::spawn(async move { function.call("\"wait\"").await })
    };
    let working = wait(&neighbour);
    appears(&neighbour.file("pid")).await;
    for group in [false, true] {
        let killed = wait(&function);
        let pid: i32 = appears(&function.file("pid")).await.parse().expect("pid");
        let target = if group { -pid } else { pid };
        kill(Pid::from_raw(target), nix::sys::signal::Signal::SIGKILL).expect("kill");
        let next = function.call("1");
        let failure = killed.await.expect("join").expect_err("killed");
        assert_eq!(
            (failure.reason, failure.dispatched),
            (Reason::WorkerExited, Dispatched::Yes)
        );
        assert!(failure.detail.contains("killed by SIGKILL"), "{}", failure.detail);
        assert_eq!(function.status().await.expect("status").state(), State::Ready);
        match next.await {
            Ok(answer) => assert_eq!(answer, "1"),
            Err(failure) => assert_eq!(failure.reason, Reason::Busy, "sent before the death was seen"),
        }
        assert_eq!(function.call("2").await.as_deref(), Ok("2"));
        std::fs::remove_file(function.file("pid")).expect("remove");
    }
    std::fs::write(neighbour.file("go"), "x").expect("go");
    assert_eq!(working.await.expect("join").as_deref(), Ok("\"wait\""));
}

/// C-5.6: the call after a death waits for the new worker within its own deadline.
#[tokio::test]
async fn a_call_waits_for_the_new_worker_but_not_beyond_its_deadline() {
    let server = Server::start().await;
    let code = r#"
import os, time
if os.path.exists('slow'):
    time.sleep(1.5)
def handler(event):
    if event == 'die':
        open('slow', 'w').close()
        os._exit(9)
    return event
"#;
    let function = server.function(code).await;
    assert_eq!(function.reason("\"die\"").await, Reason::WorkerExited);
    let failure = function
        .call_within("1", Duration::from_millis(100))
        .await
        .expect_err("too early");
    assert_eq!(
        (failure.reason, failure.dispatched),
        (Reason::DeadlineExceeded, Dispatched::No),
        "it never started"
    );
    assert_eq!(function.call("2").await.as_deref(), Ok("2"));
}

/// C-5.6: three failed starts and the registration has failed; its calls say so.
#[tokio::test]
async fn a_function_that_cannot_be_started_again_fails() {
    let server = Server::start().await;
    let code = r#"
import os
if os.path.exists('broken'):
    raise ImportError('broken-now')
def handler(event):
    open('broken', 'w').close()
    os._exit(9)
"#;
    let function = server.function(code).await;
    assert_eq!(function.reason("1").await, Reason::WorkerExited);
    let waiting = function.call("1").await.expect_err("no worker comes");
    assert_eq!(
        (waiting.reason, waiting.dispatched),
        (Reason::Recovering, Dispatched::No)
    );
    let status = function.until(|status| status.state() == State::Failed).await;
    assert!(
        status.fatal_error.contains("broken-now"),
        "{}",
        status.fatal_error
    );
    assert_eq!(function.reason("1").await, Reason::Recovering);
    function.unregister(false, 0).await.expect("unregister");
}

/// Scenario 36.
#[tokio::test]
async fn a_deadline_that_fires_with_the_answer_gives_one_of_both_and_a_free_slot() {
    let server = Server::start().await;
    let function = server
        .function("import time\ndef handler(event):\n    time.sleep(event)\n    return 1\n")
        .await;
    for step in 0..20_i32 {
        let input = format!("{}", 0.020 + f64::from(step - 10) * 0.0004);
        match function.call_within(&input, Duration::from_millis(22)).await {
            Ok(answer) => assert_eq!(answer, "1"),
            Err(failure) => assert_eq!(failure.reason, Reason::DeadlineExceeded),
        }
        function.until(|status| status.in_flight == 0).await;
    }
    let request = InvokeFunctionRequest {
        timeout_millis: -1,
        ..function.request("0")
    };
    assert_eq!(
        failure(&function.send(request).await.expect_err("refused")).reason,
        Reason::InvalidPayload
    );
}
