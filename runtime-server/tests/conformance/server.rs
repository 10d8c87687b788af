//! The server itself: health, who may connect, how it ends.

use std::time::Duration;

use kruntimes_proto::executor::{ExecuteRequest, HealthRequest, runtime_client::RuntimeClient};
use nix::sys::signal::Signal;
use tonic::{Code, transport::Endpoint};

use crate::harness::{Server, appears, failure, processes};

const ECHO: &str = "def handler(event):\n    return event\n";

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

#[tokio::test]
async fn a_tcp_address_serves_as_well() {
    let server = Server::with(&["--listen", "tcp://127.0.0.1:0"], &[]).await;
    assert_eq!(
        server.function(ECHO).await.call("[1]").await.as_deref(),
        Ok("[1]")
    );
    server.log.wait_for(&["functions can use the server's API"]).await;
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
