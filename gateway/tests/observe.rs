//! What an operator sees (C-3.14).

use crate::common::World;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

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
