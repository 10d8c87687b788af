//! What the gateway writes to its log, as the product writes it. It is heard on the test's own thread only, so
//! such tests use a runtime of one thread.

use std::{
    io::{self, Write},
    sync::{Arc, Mutex},
};

use kruntimes_ops::{args::OpsArgs, log};
use serde_json::Value;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::{fmt::MakeWriter, util::SubscriberInitExt as _};

pub(crate) struct Logs {
    lines: Lines,
    _guard: DefaultGuard,
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Logs {
    /// Everything from now on that these flags let through.
    pub(crate) fn capture(flags: &OpsArgs) -> Self {
        log::listen_by_thread();
        let lines = Lines::default();
        let guard = log::dispatch(flags, lines.clone())
            .expect("a filter")
            .set_default();
        Self { lines, _guard: guard }
    }

    /// As with `--log-filter FILTER`.
    pub(crate) fn with_filter(filter: &str) -> Self {
        let mut flags = super::args(&std::env::temp_dir(), &["--log-filter", filter]).ops;
        flags.log_format = kruntimes_ops::args::LogFormat::Json;
        Self::capture(&flags)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.lines.0.lock().expect("not poisoned")).into_owned()
    }

    /// Every line; each must be one JSON object.
    pub(crate) fn lines(&self) -> Vec<Value> {
        self.text()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
            .collect()
    }

    /// The line of each request, in order.
    pub(crate) fn access(&self) -> Vec<Value> {
        let mut lines = self.lines();
        lines.retain(|line| line["target"] == "kruntimes_gateway::access");
        lines
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("not poisoned").extend_from_slice(bytes);
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
