//! What nobody sees: a token (C-3.6). A binary of its own, because it listens to every line of the process.

#![expect(clippy::unwrap_used, reason = "a test that panics fails")]
#![expect(clippy::panic, reason = "a test that panics fails")]

mod common;

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use common::{ALICE, World};
use http::Version;
use tracing_subscriber::fmt::MakeWriter;

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_token_in_any_line_at_any_level() {
    let lines = Lines::default();
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_ansi(false)
        .with_writer(lines.clone())
        .init();
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
    for logged in ["kruntimes_gateway::access", "TRACE h", "hyper_util", "h2::"] {
        assert!(text.contains(logged), "{logged} is logged");
    }
    let quoted: Vec<&str> = text.lines().filter(|line| line.contains(&ALICE[2..9])).collect();
    assert!(quoted.is_empty(), "{quoted:#?}");
}
