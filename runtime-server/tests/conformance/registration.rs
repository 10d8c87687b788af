//! Registering, superseding, unregistering (C-5.2; scenarios 73, 103, 104, 106).

use kruntimes_proto::{
    executor::{FunctionRegistrationState as State, FunctionStatusRequest, UnregisterFunctionRequest},
    failure::Reason,
};
use tonic::Code;

use crate::harness::{Function, Server, appears, failure, processes};

const ECHO: &str = "def handler(event):\n    return event\n";

#[tokio::test]
async fn the_same_wish_again_is_the_same_registration() {
    let server = Server::start().await;
    let code = "open('imports', 'a').write('x')\ndef handler(event):\n    return event\n";
    let source = server.source(&[("main.py", code)]);
    let first = server.ready(&source).await;
    let again = server.register(&source).await.expect("again");
    assert_eq!(again.registration, Some(first.registration.clone()));
    assert_eq!(again.state(), State::Ready);
    assert_eq!(
        std::fs::read_to_string(first.file("imports")).expect("imports"),
        "x",
        "one initialisation"
    );

    let mut other = source.clone();
    other.digest = "sha256:11".into();
    let refused = server.register(&other).await.expect_err("conflict");
    assert_eq!(
        (refused.code(), failure(&refused).reason),
        (Code::AlreadyExists, Reason::RegistrationConflict)
    );
    assert_eq!(first.call("1").await.as_deref(), Ok("1"), "nothing was replaced");
}

#[tokio::test]
async fn a_higher_attempt_replaces_and_a_stale_id_can_do_nothing() {
    let server = Server::start().await;
    let mut source = server.source(&[("main.py", ECHO)]);
    let first = server.ready(&source).await;
    source.attempt = 2;
    source.digest = "sha256:22".into();
    let second = server.ready(&source).await;
    assert_ne!(
        first.registration.registration_id,
        second.registration.registration_id
    );
    assert_eq!(first.reason("1").await, Reason::StaleRegistration);
    assert_eq!(
        first.status().await.expect_err("stale").code(),
        Code::FailedPrecondition
    );
    assert_eq!(
        first.unregister(true, 0).await.expect_err("stale").code(),
        Code::FailedPrecondition
    );
    assert_eq!(second.call("2").await.as_deref(), Ok("2"), "untouched");
    source.attempt = 1;
    assert_eq!(
        failure(&server.register(&source).await.expect_err("lower")).reason,
        Reason::StaleRegistration
    );
    let mark = format!("KRUNTIME_REGISTRATION_ID={}", first.registration.registration_id);
    assert!(
        processes(nix::unistd::Pid::from_raw(-1), &mark).is_empty(),
        "the old worker is gone"
    );
}

/// Scenario 106: a call runs under the old attempt while the new one registers.
#[tokio::test]
async fn a_replaced_registration_ends_its_call_and_starts_only_then() {
    let server = Server::start().await;
    let code = "import os, time\ndef handler(event):\n    if event == 'wait':\n        open('started', 'w').write('x')\n        time.sleep(1000)\n    return os.environ['KRUNTIME_REGISTRATION_ID']\n";
    let mut source = server.source(&[("main.py", code)]);
    let first = server.ready(&source).await;
    let running = tokio::spawn({
        let first = first.clone();
        async move { first.call("\"wait\"").await }
    });
    appears(&first.file("started")).await;
    source.attempt = 2;
    let second = server.ready(&source).await;
    assert_eq!(
        running.await.expect("join").expect_err("ended").reason,
        Reason::Cancelled
    );
    assert_eq!(
        second.call("1").await,
        Ok(format!("\"{}\"", second.registration.registration_id))
    );
    second.unregister(true, 0).await.expect("unregister");
    assert_eq!(
        failure(&second.status().await.expect_err("gone")).reason,
        Reason::RegistrationNotFound
    );
}

#[tokio::test]
async fn unknown_runs_are_not_found_and_unregistering_them_is_done() {
    let server = Server::start().await;
    let source = server.source(&[]);
    let mut client = server.functions();
    let unknown = FunctionStatusRequest {
        registration: Some(source.reference("reg_x")),
    };
    assert_eq!(
        client.function_status(unknown).await.expect_err("unknown").code(),
        Code::NotFound
    );
    let gone = UnregisterFunctionRequest {
        registration: Some(source.reference("reg_x")),
        ..Default::default()
    };
    client.unregister_function(gone).await.expect("nothing to do");
    let empty = FunctionStatusRequest {
        registration: Some(source.reference("")),
    };
    assert_eq!(
        client.function_status(empty).await.expect_err("no id").code(),
        Code::InvalidArgument
    );
}

#[tokio::test]
async fn a_wish_that_cannot_be_is_refused_by_its_field() {
    let server = Server::start().await;
    let source = server.source(&[("main.py", ECHO)]);
    let outside = tempfile::tempdir().expect("directory");
    let link = server.directory.path().join("workspace").join("link");
    std::os::unix::fs::symlink(outside.path(), &link).expect("link");
    let cases = [
        ("working_dir", {
            let mut it = source.clone();
            it.working_dir = link;
            it
        }),
        ("working_dir", {
            let mut it = source.clone();
            it.working_dir = outside.path().to_owned();
            it
        }),
        ("working_dir", {
            let mut it = source.clone();
            it.working_dir = source.working_dir.join("missing");
            it
        }),
        ("working_dir", {
            let mut it = source.clone();
            it.working_dir = source.working_dir.join("main.py");
            it
        }),
        ("handler", {
            let mut it = source.clone();
            it.handler = "main".into();
            it
        }),
        ("handler", {
            let mut it = source.clone();
            it.handler = "main.handler; import os".into();
            it
        }),
        ("registration_attempt", {
            let mut it = source.clone();
            it.attempt = 0;
            it
        }),
    ];
    for (field, wish) in cases {
        let refused = server.register(&wish).await.expect_err(field);
        assert_eq!(refused.code(), Code::InvalidArgument, "{field}");
        assert!(
            refused.message().contains(field),
            "{field}: {}",
            refused.message()
        );
    }
    server.ready(&source).await;
}

/// Scenario 73: what cannot be loaded fails at registration, with a bounded reason.
#[tokio::test]
async fn what_cannot_be_loaded_is_never_ready() {
    let server = Server::with(&["--start-timeout", "2s", "--register-wait", "20s"], &[]).await;
    let cases = [
        ("def handler(:\n", "SyntaxError"),
        ("import nonsense_module\n", "nonsense_module"),
        ("def other(event):\n    pass\n", "no function 'handler'"),
        ("handler = 3\n", "not callable"),
        ("def handler():\n    pass\n", "(event, context)"),
        ("def handler(a, b, c):\n    pass\n", "(event, context)"),
        ("import sys\nsys.exit(4)\n", "exits when it is imported"),
        ("import os\nos._exit(7)\n", "exited with code 7"),
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
            "SIGKILL",
        ),
        ("import time\ntime.sleep(1000)\n", "not loaded within 2s"),
        (
            "print('x' * 10_000_000)\nraise ValueError('y' * 100_000)\n",
            "ValueError",
        ),
        ("import os\nos.write(200, b'\\x00' * 64)\n", "broke its protocol"),
        (
            "import os\nprint('last-words', flush=True)\nos._exit(1)\n",
            "last-words",
        ),
    ];
    for (code, reason) in cases {
        let source = server.source(&[("main.py", code)]);
        let answer = server.register(&source).await.expect("registered");
        assert_eq!(answer.state(), State::Failed, "{code:.40}");
        let function = Function {
            client: server.functions(),
            registration: answer.registration.expect("registration"),
            working_dir: source.working_dir.clone(),
        };
        let status = function.status().await.expect("status");
        assert_eq!(status.state(), State::Failed);
        assert!(
            status.fatal_error.contains(reason),
            "{code:.40}: {}",
            status.fatal_error
        );
        assert!(!status.fatal_error.is_empty() && status.fatal_error.len() <= 4096);
        assert_eq!(function.reason("1").await, Reason::Recovering);
        function.unregister(false, 0).await.expect("unregister");
    }
    let missing = server.source(&[("other.py", ECHO)]);
    assert_eq!(
        server.register(&missing).await.expect("registered").state(),
        State::Failed
    );
    let mut package = server.source(&[
        ("pkg/__init__.py", ""),
        ("pkg/mod.py", "def go(event):\n    return 'pkg'\n"),
    ]);
    package.handler = "pkg.mod.go".into();
    assert_eq!(
        server.ready(&package).await.call("1").await.as_deref(),
        Ok("\"pkg\"")
    );
}

/// Scenario 103: a slow load, wished for again and again, happens once.
#[tokio::test]
async fn a_slow_load_is_joined_and_survives_a_cancelled_wish() {
    let server = Server::with(&["--register-wait", "50ms"], &[]).await;
    let code = "import os, time\nopen('imports', 'a').write('x')\nwhile not os.path.exists('go'): time.sleep(0.002)\ndef handler(event):\n    return event\n";
    let source = server.source(&[("main.py", code)]);
    let first = server.register(&source).await.expect("first");
    assert_eq!(first.state(), State::Registering, "a quick answer");
    let function = Function {
        client: server.functions(),
        registration: first.registration.clone().expect("registration"),
        working_dir: source.working_dir.clone(),
    };
    assert_eq!(function.reason("1").await, Reason::Registering);
    for _ in 0..3 {
        let again = server.functions();
        let request = source.request();
        let cancelled = tokio::spawn(async move {
            let mut again = again;
            again.register_function(request).await.map(drop)
        });
        cancelled.abort();
        let joined = server.register(&source).await.expect("joined");
        assert_eq!(joined.registration, first.registration);
    }
    std::fs::write(function.file("go"), "x").expect("go");
    function.until(|status| status.state() == State::Ready).await;
    assert_eq!(function.call("1").await.as_deref(), Ok("1"));
    assert_eq!(
        std::fs::read_to_string(function.file("imports")).expect("imports"),
        "x"
    );
}

#[tokio::test]
async fn a_load_that_hangs_can_be_cancelled() {
    let server = Server::with(&["--register-wait", "50ms"], &[]).await;
    let source = server.source(&[("main.py", "import time\ntime.sleep(1000)\n")]);
    let answer = server.register(&source).await.expect("registered");
    let function = Function {
        client: server.functions(),
        registration: answer.registration.expect("registration"),
        working_dir: source.working_dir.clone(),
    };
    function
        .unregister(false, 60_000)
        .await
        .expect("at once: no call is running");
    assert_eq!(function.status().await.expect_err("gone").code(), Code::NotFound);
}

/// Scenario 104: draining lets the running call end, and only that.
#[tokio::test]
async fn draining_lets_the_running_call_end() {
    let server = Server::start().await;
    let code = "import os, time\ndef handler(event):\n    open('started', 'w').write('x')\n    while not os.path.exists('go'): time.sleep(0.002)\n    return event\n";
    let source = server.source(&[("main.py", code)]);
    let function = server.ready(&source).await;
    let running = tokio::spawn({
        let function = function.clone();
        async move { function.call("1").await }
    });
    appears(&function.file("started")).await;
    let draining = tokio::spawn({
        let function = function.clone();
        async move { function.unregister(false, 60_000).await }
    });
    function.until(|status| status.state() == State::Draining).await;
    assert_eq!(function.reason("2").await, Reason::Draining);
    assert_eq!(
        server.register(&source).await.expect("joined").state(),
        State::Draining,
        "never Ready again"
    );
    std::fs::write(function.file("go"), "x").expect("go");
    assert_eq!(running.await.expect("join").as_deref(), Ok("1"));
    draining.await.expect("join").expect("drained");
    assert_eq!(function.status().await.expect_err("gone").code(), Code::NotFound);
}

#[tokio::test]
async fn a_drain_ends_at_its_time_and_a_cancel_ends_it_sooner() {
    let server = Server::start().await;
    let code =
        "import time\ndef handler(event):\n    open('started', 'w').write('x')\n    time.sleep(1000)\n";
    for (drain_millis, then_cancel) in [(100, false), (60_000, true)] {
        let function = server.function(code).await;
        let running = tokio::spawn({
            let function = function.clone();
            async move { function.call("1").await }
        });
        appears(&function.file("started")).await;
        let draining = tokio::spawn({
            let function = function.clone();
            async move { function.unregister(false, drain_millis).await }
        });
        if then_cancel {
            function.until(|status| status.state() == State::Draining).await;
            function.unregister(true, 0).await.expect("cancelled");
        }
        draining.await.expect("join").expect("drained");
        assert_eq!(
            running.await.expect("join").expect_err("ended").reason,
            Reason::Cancelled
        );
    }
}
