//! The server itself: health, who may connect, how it ends.

use std::time::Duration;

use kruntimes_proto::executor::{ExecuteRequest, HealthRequest, runtime_client::RuntimeClient};
use nix::sys::signal::Signal;
use tonic::{Code, transport::Endpoint};

use crate::harness::{Server, appears, failure, processes};

const ECHO: &str = "def handler(event):\n    return event\n";

/// C-5.7: runtimed asks the first before it offers functions.
#[tokio::test]
async fn it_tells_its_health_and_says_what_it_does_not_do() {
    let server = Server::start().await;
    let health = server
        .runtime()
        .health(HealthRequest {})
        .await
        .expect("health")
        .into_inner();
    assert!(health.healthy);
    assert!(
        health.message.contains("python 3.") && health.message.contains("isolation level"),
        "{}",
        health.message
    );
    let refused = server
        .runtime()
        .execute(ExecuteRequest::default())
        .await
        .expect_err("no tasks");
    assert_eq!(refused.code(), Code::Unimplemented);
    assert!(
        refused.message().contains("FunctionRuntime"),
        "{}",
        refused.message()
    );
}

/// C-5.1: a process of the same PID namespace, as every function is, is turned away.
#[tokio::test]
async fn a_process_beside_the_functions_cannot_use_the_api() {
    let guarded = Server::with(&["--peer-check", "on"], &[]).await;
    let socket = guarded.directory.path().join("run").join("runtime.sock");
    let endpoint = Endpoint::try_from(format!("unix://{}", socket.display())).expect("endpoint");
    let refused = RuntimeClient::new(endpoint.connect_lazy())
        .health(HealthRequest {})
        .await;
    assert!(refused.is_err());
    guarded.log.wait_for(&["tried to use the server's API"]).await;
}

/// C-5.1, as in a Pod: runtimed comes from another PID namespace, a function does not.
#[tokio::test]
async fn the_first_process_of_a_container_serves_others_and_no_function() {
    let server = Server::in_namespace(&["--peer-check", "on"]).await;
    let code = r#"
import os, socket, subprocess
def handler(path):
    if path == 'orphan':
        shell = ['sh', '-c', 'setsid sleep 0.01 >/dev/null 2>&1 & echo $!']
        return int(subprocess.run(shell, stdout=subprocess.PIPE).stdout)
    if isinstance(path, int):
        return os.path.exists(f'/proc/{path}')
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    try:
        return client.recv(1).decode()
    except ConnectionResetError:
        return ''
"#;
    let function = server.function(code).await;
    let socket = server.directory.path().join("run").join("runtime.sock");
    assert_eq!(
        function
            .call(&format!("\"{}\"", socket.display()))
            .await
            .as_deref(),
        Ok("\"\"")
    );
    server.log.wait_for(&["tried to use the server's API"]).await;
    let orphan = function.call("\"orphan\"").await.expect("pid");
    let reaped = async { while function.call(&orphan).await.as_deref() != Ok("false") {} };
    tokio::time::timeout(Duration::from_secs(20), reaped)
        .await
        .expect("the first process reaps orphans");
    function.unregister(true, 0).await.expect("unregister");
}

/// C-5.1: a TCP address has no guard, and the server says so.
#[tokio::test]
async fn a_tcp_address_serves_as_well() {
    let server = Server::with(&["--listen", "tcp://127.0.0.1:0"], &[]).await;
    assert_eq!(
        server.function(ECHO).await.call("[1]").await.as_deref(),
        Ok("[1]")
    );
    server.log.wait_for(&["functions can use the server's API"]).await;
    let starting = server.said.wait_for(&["Starting"]).await;
    assert!(starting.contains(" server 127.0.0.1:"), "{starting}");
}

/// C-8.5: three lines when the server starts, one when a function is registered, each on
/// a line of its own on standard output and nothing else there.
#[tokio::test]
async fn the_four_start_lines_are_printed() {
    let env = [
        (
            "TRACE_COLLECTOR_ENDPOINT",
            "http://user:secret@collector:4318/v1/traces",
        ),
        ("FUNC_RUNTIME", "python314"),
    ];
    let server = Server::with(&[], &env).await;
    let mut source = server.source(&[("src/pkg/mod.py", ECHO)]);
    source.handler = "pkg.mod.handler".into();
    source.env = vec![("HANDLER_FOLDER".into(), "src".into())];
    let function = server.ready(&source).await;
    server.register(&source).await.expect("the same wish again");
    let second = server.function(ECHO).await;
    let socket = server.directory.path().join("run").join("runtime.sock");
    let path = |file: std::path::PathBuf| file.canonicalize().expect("file").display().to_string();
    let want = [
        "Tracing configured with endpoint http://collector:4318/v1/traces".to_owned(),
        "Publisher Proxy available on address (not set)".to_owned(),
        format!("Starting python314 server unix://{}", socket.display()),
        format!(
            "Importing function sources from {}:handler",
            path(function.file("src/pkg/mod.py"))
        ),
        format!(
            "Importing function sources from {}:handler",
            path(second.file("main.py"))
        ),
    ];
    server.said.wait_for(&[&want[4]]).await;
    assert_eq!(server.said.lines(), want);
}

/// C-8.4: without `FUNC_RUNTIME` the server names language and version.
#[tokio::test]
async fn a_server_knows_its_own_name() {
    let server = Server::start().await;
    let line = server.said.wait_for(&["Starting python3"]).await;
    let name = line.split(' ').nth(1).expect("name");
    let code = "import os, sys\ndef handler(event):\n    return [os.environ['FUNC_RUNTIME'], 'python%d%d' % sys.version_info[:2]]\n";
    let answer = server.function(code).await.call("1").await;
    assert_eq!(answer, Ok(format!(r#"["{name}","{name}"]"#)));
}

/// C-6.4: SIGTERM waits for the last registration, whatever it takes.
#[tokio::test]
async fn sigterm_waits_until_the_last_function_is_gone() {
    let mut server = Server::start().await;
    let function = server.function(ECHO).await;
    server.signal(Signal::SIGTERM);
    server
        .log
        .wait_for(&["stopping when the last function is gone"])
        .await;
    assert_eq!(function.call("1").await.as_deref(), Ok("1"), "still serving");
    let refused = server
        .register(&server.source(&[("main.py", ECHO)]))
        .await
        .expect_err("nothing new");
    assert_eq!(refused.code(), Code::Unavailable);
    function.unregister(false, 0).await.expect("unregister");
    let (pid, mark) = (
        server.pid(),
        format!(
            "KRUNTIME_REGISTRATION_ID={}",
            function.registration.registration_id
        ),
    );
    assert_eq!(server.exit_code().await, Some(0));
    assert!(processes(pid, &mark).is_empty());
}

/// C-6.4.
#[tokio::test]
async fn sigterm_without_functions_ends_it_and_removes_its_files() {
    let mut server = Server::start().await;
    let (socket, state) = (
        server.directory.path().join("run/runtime.sock"),
        server.directory.path().join("state"),
    );
    assert_eq!(std::fs::read_dir(&state).expect("state").count(), 1);
    server.signal(Signal::SIGTERM);
    assert_eq!(server.exit_code().await, Some(0));
    assert!(!socket.exists());
    assert_eq!(std::fs::read_dir(&state).expect("state").count(), 0);
}

/// A server that is killed takes its workers with it.
#[tokio::test]
async fn workers_do_not_outlive_a_killed_server() {
    let server = Server::start().await;
    let code = "import os, time\ndef handler(event):\n    open('pid', 'w').write(str(os.getpid()))\n    time.sleep(1000)\n";
    let function = server.function(code).await;
    let mark = format!(
        "KRUNTIME_REGISTRATION_ID={}",
        function.registration.registration_id
    );
    let call = tokio::spawn({
        let function = function.clone();
        async move { function.send(function.request("1")).await }
    });
    appears(&function.file("pid")).await;
    let pid = server.pid();
    server.signal(Signal::SIGKILL);
    assert!(call.await.expect("join").is_err());
    let gone = async {
        while !processes(pid, &mark).is_empty() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone)
        .await
        .expect("workers live on");
    drop(server);
}

/// Scenario 60: the largest input, output and outputs pass the transport.
#[tokio::test]
async fn the_largest_messages_pass_and_larger_ones_get_an_answer_of_ours() {
    let server = Server::start().await;
    let code = "def handler(event):\n    return {'outputs': {f'{i:03}': 'v' * 1000 for i in range(64)}, 'x': 'y' * event}\n";
    let function = server.function(code).await;
    let answer = function
        .send(function.request("980000"))
        .await
        .expect("answer")
        .into_inner();
    assert_eq!(answer.outputs.len(), 64);
    assert!(answer.output.len() > 1_040_000);
    let refused = function
        .send(function.request(vec![b' '; 1_048_577]))
        .await
        .expect_err("too large");
    assert_eq!(
        (refused.code(), failure(&refused).reason.as_str()),
        (Code::InvalidArgument, "InvalidPayload")
    );
}
