//! Where functions say that they run: one line each over plain TCP, acknowledged once it is kept.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

use super::{clock::Clock, history::Recorded};
use crate::call;

/// Longest line, bytes.
const LINE: u64 = 4096;
/// How long a line may take to come.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running collector; ends when dropped.
pub struct Collector {
    /// Where functions reach it: the port.
    pub port: u16,
    log: Arc<Mutex<Log>>,
    accepting: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Log {
    records: Vec<Recorded>,
    /// Lines that no function of ours wrote.
    unreadable: Vec<String>,
}

/// What a function writes.
#[derive(Debug, Deserialize)]
struct Line {
    function: String,
    invocation: String,
    attempt: i64,
    /// Unix milliseconds.
    at: i64,
}

// === impl Collector ===

impl Collector {
    /// Listens on every address of this network namespace.
    pub async fn start(clock: Clock) -> Result<Self> {
        let listener = TcpListener::bind(SocketAddr::from(([0, 0, 0, 0], 0)))
            .await
            .context("listen for functions")?;
        let port = listener.local_addr()?.port();
        let log = Arc::new(Mutex::new(Log::default()));
        let accepting = call::spawn(accept(listener, clock, Arc::clone(&log)));
        Ok(Self { port, log, accepting })
    }

    /// Everything that arrived so far.
    ///
    /// # Errors
    /// When something arrived that no function of ours writes: then nothing can be concluded.
    pub fn records(&self) -> Result<Vec<Recorded>> {
        let log = lock(&self.log);
        ensure!(
            log.unreadable.is_empty(),
            "unreadable lines were written to the collector: {:?}",
            log.unreadable
        );
        Ok(log.records.clone())
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

async fn accept(listener: TcpListener, clock: Clock, log: Arc<Mutex<Log>>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let log = Arc::clone(&log);
                call::spawn(async move {
                    // A function that breaks off has told nothing.
                    let _ = tokio::time::timeout(PATIENCE, take(stream, clock, &log)).await;
                });
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn take(stream: TcpStream, clock: Clock, log: &Mutex<Log>) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(stream);
    let mut line = String::new();
    (&mut stream).take(LINE).read_line(&mut line).await?;
    if !line.ends_with('\n') {
        return Ok(());
    }
    match serde_json::from_str::<Line>(&line) {
        Ok(said) => lock(log).records.push(Recorded {
            function: said.function,
            invocation: said.invocation,
            attempt: said.attempt,
            at: clock.at(said.at),
        }),
        Err(_) => lock(log).unreadable.push(line),
    }
    stream.write_all(b"ok\n").await?;
    Ok(())
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn say(port: u16, text: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        stream.write_all(text.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn a_line_is_kept_before_it_is_acknowledged_and_half_a_line_is_nothing() {
        let collector = Collector::start(Clock::start()).await.unwrap();
        let line = r#"{"function": "f01", "invocation": "f01-7", "attempt": 2, "at": 0}"#;
        assert_eq!(say(collector.port, line).await, "");
        assert_eq!(collector.records().unwrap(), []);
        assert_eq!(say(collector.port, &format!("{line}\n")).await, "ok\n");
        let expected = Recorded {
            function: "f01".to_owned(),
            invocation: "f01-7".to_owned(),
            attempt: 2,
            at: 0,
        };
        assert_eq!(collector.records().unwrap(), [expected]);
    }

    #[tokio::test]
    async fn what_no_function_wrote_spoils_the_log() {
        let collector = Collector::start(Clock::start()).await.unwrap();
        say(collector.port, "GET / HTTP/1.1\n").await;
        assert!(collector.records().is_err());
    }
}
