//! What a function finds in its environment, and what that changes (C-8.4).

use std::{process::Command, time::Duration};

use kruntimes_proto::failure::{Dispatched, Reason};
use tonic::Code;

use crate::harness::{Server, Source};

const ENVIRON: &str = "import os\ndef handler(event):\n    return {k: v for k, v in os.environ.items() if k.startswith(event)}\n";

fn with(mut source: Source, env: &[(&str, &str)]) -> Source {
    source.env = env
        .iter()
        .map(|&(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    source
}

/// C-8.4: the registration's environment arrives, the server's own does not leak.
#[tokio::test]
async fn a_function_sees_its_environment_and_not_the_servers() {
    let server = Server::with(&[], &[("SECRET_OF_SERVER", "x"), ("TZ", "UTC")]).await;
    let env = [
        ("FUNC_NAME", "f"),
        ("Ä", "ö=\n"),
        ("KRUNTIME_OUTPUTS", "/some/file"),
    ];
    let function = server
        .ready(&with(server.source(&[("main.py", ENVIRON)]), &env))
        .await;
    assert_eq!(function.call("\"SECRET\"").await.as_deref(), Ok("{}"));
    assert_eq!(function.call("\"Ä\"").await.as_deref(), Ok(r#"{"Ä":"ö=\n"}"#));
    assert_eq!(
        function.call("\"KRUNTIME_OUTPUTS\"").await.as_deref(),
        Ok(r#"{"KRUNTIME_OUTPUTS":"/some/file"}"#)
    );
    let all = function.call("\"\"").await.expect("all");
    for name in ["TZ", "PATH", "TMPDIR", "KRUNTIME_RUN_UID"] {
        assert!(all.contains(&format!("\"{name}\":")), "{name} in {all}");
    }
}

/// C-8.4: defaults inside the runtime; the operator's word beats them, the Run's beats both.
#[tokio::test]
async fn the_fourteen_names_come_from_run_operator_or_runtime() {
    let operator = [
        ("PUBLISHER_PROXY_ADDRESS", "http://operator/publish"),
        ("TRACE_COLLECTOR_ENDPOINT", "http://operator/v1/traces"),
        ("SERVER_NUMTHREADS", "7"),
        ("SERVER_CALL_TIMEOUT", "12.5"),
    ];
    let server = Server::with(&[], &operator).await;
    let run = [
        ("FUNC_NAME", "f"),
        ("FUNC_NAMESPACE", "ns"),
        ("FUNC_LABELS", "a=b"),
        ("FUNC_RUNTIME", "python"),
        ("TRACE_COLLECTOR_ENDPOINT", "http://run"),
    ];
    let function = server
        .ready(&with(server.source(&[("main.py", ENVIRON)]), &run))
        .await;
    for (prefix, want) in [
        (
            "FUNC_",
            r#"{"FUNC_ANNOTATIONS":"","FUNC_LABELS":"a=b","FUNC_NAME":"f","FUNC_NAMESPACE":"ns","FUNC_RUNTIME":"python"}"#,
        ),
        (
            "SERVER_",
            r#"{"SERVER_CALL_TIMEOUT":"12.5","SERVER_HOST":"0.0.0.0","SERVER_NUMTHREADS":"7","SERVER_PORT":"8080"}"#,
        ),
        (
            "HANDLER_",
            r#"{"HANDLER_FOLDER":"/","HANDLER_FUNCTION_NAME":"handler","HANDLER_MODULE_NAME":"main"}"#,
        ),
        ("TRACE_", r#"{"TRACE_COLLECTOR_ENDPOINT":"http://run"}"#),
        (
            "PUBLISHER_",
            r#"{"PUBLISHER_PROXY_ADDRESS":"http://operator/publish"}"#,
        ),
    ] {
        assert_eq!(function.call(&format!("\"{prefix}\"")).await.as_deref(), Ok(want));
    }
}

/// C-8.4: `HANDLER_*` choose folder, module and function.
#[tokio::test]
async fn handler_names_choose_what_runs() {
    let server = Server::start().await;
    let say = |word: &str| {
        format!(
            "import os\nword = '{word}'\ndef handler(event):\n    return word\ndef other(event):\n    return 'other ' + word\n"
        )
    };
    let (root, below, named) = (say("root"), say("below"), say("named"));
    let files = [
        ("main.py", root.as_str()),
        ("src/app/main.py", &below),
        ("named.py", &named),
    ];
    let cases: [(&[(&str, &str)], &str); 7] = [
        (&[], "root"),
        (&[("HANDLER_FOLDER", "/")], "root"),
        (&[("HANDLER_FOLDER", "src/app")], "below"),
        (&[("HANDLER_FOLDER", "/src/app/")], "below"),
        (&[("HANDLER_MODULE_NAME", "named")], "named"),
        (&[("HANDLER_FUNCTION_NAME", "other")], "other root"),
        (
            &[
                ("HANDLER_FOLDER", "src/app"),
                ("HANDLER_FUNCTION_NAME", "other"),
                ("HANDLER_MODULE_NAME", ""),
            ],
            "other below",
        ),
    ];
    for (env, want) in cases {
        let function = server.ready(&with(server.source(&files), env)).await;
        assert_eq!(function.call("1").await, Ok(format!("\"{want}\"")), "{env:?}");
    }
    let outside = server.source(&files);
    std::os::unix::fs::symlink("/usr", outside.working_dir.join("link")).expect("link");
    for folder in ["..", "src/../..", "link", "missing", "main.py"] {
        let refused = server
            .register(&with(outside.clone(), &[("HANDLER_FOLDER", folder)]))
            .await
            .expect_err(folder);
        assert_eq!(refused.code(), Code::InvalidArgument, "{folder}");
        assert!(
            refused.message().contains("HANDLER_FOLDER"),
            "{}",
            refused.message()
        );
    }
}

/// C-8.4, C-8.5: the same names, with the same effect, in Bash.
#[tokio::test]
async fn bash_has_the_same_names_and_start_lines() {
    let server = Server::with(&["--adapter", "bash"], &[("SERVER_CALL_TIMEOUT", "1.5")]).await;
    let say = |word: &str| {
        format!(
            "handler() {{ printf '{word} %s' \"$SERVER_CALL_TIMEOUT $HANDLER_FOLDER $FUNC_RUNTIME\"; }}\nother() {{ sleep 60; }}\n"
        )
    };
    let (root, below) = (say("root"), say("below"));
    let files = [("main.sh", root.as_str()), ("src/app/named.sh", &below)];
    let mut plain = server.source(&files);
    plain.handler = "main.handler".into();
    let function = server.ready(&plain).await;
    let starting = server.said.wait_for(&["Starting bash"]).await;
    let name = starting.split(' ').nth(1).expect("name").to_owned();
    assert_eq!(function.call("1").await, Ok(format!("root 1.5 / {name}")));
    let env = [("HANDLER_FOLDER", "src/app"), ("HANDLER_MODULE_NAME", "named")];
    let function = server.ready(&with(server.source(&files), &env)).await;
    assert_eq!(function.call("1").await, Ok(format!("below 1.5 /src/app {name}")));
    server
        .said
        .wait_for(&["Importing function sources from ", "/src/app/named.sh:handler"])
        .await;
    let env = [("HANDLER_FUNCTION_NAME", "other")];
    let function = server.ready(&with(server.source(&files), &env)).await;
    let failure = function.call("1").await.expect_err("too long");
    assert_eq!(failure.reason, Reason::DeadlineExceeded);
}

/// C-8.4, C-5.3, scenario 37: no call is longer than the operator allows, and a shorter
/// wish is a shorter limit; the answer says which.
#[tokio::test]
async fn the_longest_call_is_the_operators_to_say() {
    let server = Server::with(&[], &[("SERVER_CALL_TIMEOUT", "1.5")]).await;
    let code = "import time\ndef handler(event, context):\n    time.sleep(event)\n    return context.remaining <= 1.5\n";
    for (wish, limit) in [
        (Duration::ZERO, "1.5s"),
        (Duration::from_secs(300), "1.5s"),
        (Duration::from_millis(300), "300ms"),
    ] {
        // A new one each time: the call after a deadline spends its time waiting for a process.
        let function = server.function(code).await;
        let failure = function.call_within("60", wish).await.expect_err("too long");
        assert_eq!(
            (failure.reason, failure.dispatched),
            (Reason::DeadlineExceeded, Dispatched::Yes)
        );
        assert!(failure.detail.contains(limit), "{}", failure.detail);
    }
    let function = server.function(code).await;
    let in_time = function.call_within("0.3", Duration::from_secs(300)).await;
    assert_eq!(in_time.as_deref(), Ok("true"));
}

/// C-8.4: nonsense is refused when the server starts, by its name.
#[test]
fn a_longest_call_that_is_none_stops_the_server() {
    let server = Command::new(env!("CARGO_BIN_EXE_kruntimes-runtime-server"))
        .env("SERVER_CALL_TIMEOUT", "soon")
        .output()
        .expect("start the server");
    let text = String::from_utf8_lossy(&server.stderr);
    assert!(
        !server.status.success() && text.contains("SERVER_CALL_TIMEOUT"),
        "{text}"
    );
}
