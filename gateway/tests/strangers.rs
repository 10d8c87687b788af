//! Who is no caller at all: port scans, plain HTTP, handshakes that never end (bug scenario 64).

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use crate::common::{Logs, World, args, eventually, metric};

/// The beginning of a handshake: a record of TLS that announces more than it holds.
const HALF: &[u8] = b"\x16\x03\x01\x02\x00\x01";

/// C-3.5's kind, scenario 64: a thousand half handshakes keep nobody out, and fill no log.
#[tokio::test]
async fn a_thousand_half_handshakes_keep_nobody_out() {
    let flags = args(&std::env::temp_dir(), &[]).log();
    let logs = Logs::capture(&flags);
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let mut half = Vec::new();
    for _ in 0..1000 {
        let mut stream = TcpStream::connect(world.gateway.https).await.unwrap();
        stream.write_all(HALF).await.unwrap();
        half.push(stream);
    }
    for _ in 0..3 {
        assert_eq!(world.caller().call(&function.path, "1").await.status, 200);
    }
    let displaced = "kruntimes_gateway_handshakes_total{result=\"displaced\"}";
    assert!(
        metric(&world.gateway, displaced).await >= 400.0,
        "the oldest give way"
    );
    assert_eq!(
        metric(
            &world.gateway,
            "kruntimes_gateway_handshakes_total{result=\"refused\"}"
        )
        .await,
        0.0
    );
    drop(half);
    let quiet: Vec<_> = logs
        .lines()
        .into_iter()
        .filter(|line| line["level"] != "INFO")
        .collect();
    assert!(quiet.is_empty(), "{quiet:?}");
    assert!(logs.lines().len() < 30, "{}", logs.text());
}

/// Scenario 64: a port scan, plain HTTP, and TLS with nonsense inside.
#[tokio::test]
async fn nonsense_is_closed_and_fills_no_log() {
    let flags = args(&std::env::temp_dir(), &[]).log();
    let logs = Logs::capture(&flags);
    let world = World::with(&[], |config| config.patience.idle = Duration::from_millis(500)).await;
    let function = world.function("demo", "hello");
    for _ in 0..100 {
        drop(TcpStream::connect(world.gateway.https).await.unwrap());
    }
    for nonsense in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0\0\0\0\0\0\0\0",
        b"SSH-2.0-x\r\n",
    ] {
        let mut stream = TcpStream::connect(world.gateway.https).await.unwrap();
        stream.write_all(nonsense).await.unwrap();
        // It closes; whether it says something before does not matter.
        let _ = stream.read_to_end(&mut Vec::new()).await;
    }
    for nonsense in [
        &b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\0\0",
    ] {
        let tcp = TcpStream::connect(world.gateway.https).await.unwrap();
        let connector = TlsConnector::from(std::sync::Arc::new(world.pki.caller(&[b"h2"])));
        let mut tls = connector
            .connect("localhost".try_into().unwrap(), tcp)
            .await
            .unwrap();
        tls.write_all(nonsense).await.unwrap();
        tls.flush().await.unwrap();
        let _ = tls.read_to_end(&mut Vec::new()).await;
    }
    assert_eq!(world.caller().call(&function.path, "1").await.status, 200);
    eventually("all of them are counted", || async {
        let failed = metric(
            &world.gateway,
            "kruntimes_gateway_handshakes_total{result=\"failed\"}",
        )
        .await;
        (failed >= 104.0).then_some(())
    })
    .await;
    let loud: Vec<_> = logs
        .lines()
        .into_iter()
        .filter(|line| line["level"] != "INFO")
        .collect();
    assert!(loud.is_empty(), "{loud:?}");
}

/// C-3.5: a connection that says nothing is closed, before and after its handshake.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_connection_is_closed_without_a_word() {
    let world = World::with(&[], |config| {
        config.patience.handshake = Duration::from_millis(300);
        config.patience.idle = Duration::from_millis(300);
    })
    .await;
    assert_eq!(world.caller().raw(b"").await, "");
    let mut silent = TcpStream::connect(world.gateway.https).await.unwrap();
    let mut bytes = Vec::new();
    let _ = silent.read_to_end(&mut bytes).await;
    assert!(bytes.is_empty());
    let timeouts = "kruntimes_gateway_handshakes_total{result=\"timeout\"}";
    assert_eq!(metric(&world.gateway, timeouts).await, 1.0);
    let function = world.function("demo", "hello");
    assert_eq!(world.caller().call(&function.path, "1").await.status, 200);
}

/// C-3.14's kind: connections are bounded. One too many is closed, and there is room again when one ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_connection_too_many_is_closed() {
    let world = World::with(&[], |config| config.connections = 1).await;
    let function = world.function("demo", "hello");
    let first = world.caller().connect().await;
    let refused = "kruntimes_gateway_handshakes_total{result=\"refused\"}";
    eventually("the first one is served", || async {
        (metric(&world.gateway, "kruntimes_gateway_connections").await == 1.0).then_some(())
    })
    .await;
    assert_eq!(world.caller().raw(b"").await, "");
    assert_eq!(metric(&world.gateway, refused).await, 1.0);
    drop(first);
    eventually("there is room again", || async {
        let caller = world.caller();
        let answer = caller
            .try_send(caller.post(&function.path, "1"), http::Version::HTTP_2)
            .await;
        answer.is_ok_and(|answer| answer.status == 200).then_some(())
    })
    .await;
}
