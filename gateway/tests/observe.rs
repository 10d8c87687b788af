//! What an operator sees (C-3.14), and what nobody sees (C-3.6).

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use http::Version;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use tracing_subscriber::{fmt::MakeWriter, util::SubscriberInitExt as _};

use crate::common::{ALICE, World};

async fn get(world: &World, path: &str) -> String {
    let mut stream = TcpStream::connect(world.gateway.admin.unwrap()).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_have_the_names_that_are_promised() {
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    assert_eq!(caller.call(&function.path, "1").await.status, 200);
    assert_eq!(caller.call("/", "1").await.status, 404);
    let page = get(&world, "/metrics").await;
    for line in [
        "kruntimes_gateway_requests_total{status=\"200\",reason=\"OK\",component=\"function\"} 1",
        "kruntimes_gateway_requests_total{status=\"404\",reason=\"NoSuchRoute\",component=\"gateway\"} 1",
        "kruntimes_gateway_authorizations_total{result=\"allowed\",cached=\"false\"} 1",
        "kruntimes_gateway_review_duration_seconds_count 1",
        "kruntimes_gateway_routes 1",
        "kruntimes_gateway_routes_ready 1",
        "kruntimes_gateway_route_age_seconds ",
        "kruntimes_gateway_certificate_not_after_seconds ",
        "kruntimes_gateway_calls_in_flight 0",
        "http_server_request_duration_seconds_count{http_request_method=\"POST\",http_response_status_code=\"200\"",
    ] {
        assert!(page.contains(line), "{line}\n{page}");
    }
    assert!(!page.contains("certificate_not_after_seconds 0\n"), "{page}");
    assert!(get(&world, "/readyz").await.starts_with("HTTP/1.1 200 "));
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// One thread on purpose: the subscriber is that thread's, and the whole gateway runs on it.
#[tokio::test]
async fn no_token_in_any_line_at_any_level() {
    let lines = Lines::default();
    let _guard = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(lines.clone())
        .finish()
        .set_default();
    let world = World::start().await;
    let function = world.function("demo", "hello");
    let caller = world.caller();
    for version in [Version::HTTP_11, Version::HTTP_2] {
        // From raw bytes: what this test's own client logs is its own matter.
        let request = caller.request(&function.path).body("1".into()).unwrap();
        let (mut parts, body) = request.into_parts();
        parts
            .headers
            .get_mut("authorization")
            .unwrap()
            .set_sensitive(true);
        assert_eq!(
            caller
                .send(http::Request::from_parts(parts, body), version)
                .await
                .status,
            200
        );
    }
    let head = format!(
        "POST {} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\n",
        function.path
    );
    for rest in [
        "Content-Type: x\r\n\r\n",
        "Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        "\0\r\n\r\n",
    ] {
        assert!(
            caller
                .raw(format!("{head}Connection: close\r\n{rest}").as_bytes())
                .await
                .contains(" 4")
        );
    }
    let text = String::from_utf8_lossy(&lines.0.lock().unwrap()).into_owned();
    assert!(text.contains("kruntimes_gateway::access"), "something is logged");
    let quoted: Vec<&str> = text.lines().filter(|line| line.contains(&ALICE[2..9])).collect();
    assert!(quoted.is_empty(), "{quoted:#?}");
}
