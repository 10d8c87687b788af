//! One JSONL line an invocation on standard output (C-6.5): who was called, what came of it,
//! how long it took; never a body or an output value.
//!
//! A line is handed to a thread over a bounded queue. When nobody reads standard output, lines are
//! dropped and counted; no call waits.

use std::{
    io::{self, Write},
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{SyncSender, TrySendError, sync_channel},
    },
    thread::{self, JoinHandle},
};

use jiff::Timestamp;
use kruntimes_api::keys::RunUid;
use kruntimes_proto::failure::Failure;
use serde::Serialize;
use tokio::time::Instant;
use tonic::Code;

use crate::metrics::{Numbers, count};

/// Lines that may wait: about 256 KiB.
const QUEUE: usize = 1024;

/// The audit log. Clones share it.
#[derive(Debug, Clone)]
pub struct Audit {
    runtime: Arc<str>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Option<SyncSender<Vec<u8>>>>,
    writer: Mutex<Option<JoinHandle<()>>>,
    numbers: Numbers,
}

/// One call; its line is written when it ends, also when the caller went away.
#[derive(Debug)]
#[must_use = "the line is written when the call ends"]
pub struct Call {
    audit: Audit,
    run: RunUid,
    invocation_id: String,
    began: Instant,
    told: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Line<'a> {
    time: Timestamp,
    runtime: &'a str,
    run: String,
    invocation_id: &'a str,
    operation: &'static str,
    outcome: &'a str,
    code: String,
    duration_ms: u64,
}

// === impl Audit ===

impl Audit {
    /// Writes to `output` from a thread of its own.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn new(runtime: &str, output: impl Write + Send + 'static, numbers: Numbers) -> io::Result<Self> {
        let (queue, lines) = sync_channel::<Vec<u8>>(QUEUE);
        let mut output = output;
        let writer = thread::Builder::new().name("audit".into()).spawn(move || {
            let mut failing = false;
            for line in lines {
                let written = output.write_all(&line).and_then(|()| output.flush());
                if let Err(error) = &written
                    && !failing
                {
                    tracing::warn!(%error, "audit lines cannot be written");
                }
                failing = written.is_err();
            }
        })?;
        Ok(Self {
            runtime: runtime.into(),
            shared: Arc::new(Shared {
                queue: Mutex::new(Some(queue)),
                writer: Mutex::new(Some(writer)),
                numbers,
            }),
        })
    }

    /// A call begins.
    pub fn begin(&self, run: RunUid, invocation_id: &str) -> Call {
        Call {
            audit: self.clone(),
            run,
            invocation_id: invocation_id.to_owned(),
            began: Instant::now(),
            told: false,
        }
    }

    /// Writes what is queued and ends the thread. Later lines are dropped. Blocks.
    pub fn finish(&self) {
        drop(lock(&self.shared.queue).take());
        if let Some(writer) = lock(&self.shared.writer).take() {
            let _ = writer.join();
        }
    }

    fn write(&self, line: &Line<'_>) {
        let Ok(mut bytes) = serde_json::to_vec(line) else {
            return;
        };
        bytes.push(b'\n');
        let sent = match lock(&self.shared.queue).as_ref() {
            Some(queue) => queue.try_send(bytes),
            None => Err(TrySendError::Disconnected(bytes)),
        };
        if sent.is_err() {
            self.shared.numbers.audit_dropped.inc();
        }
    }
}

// === impl Call ===

impl Call {
    /// The call ended like this.
    pub fn end(mut self, result: Result<(), &Failure>) {
        let (outcome, code) = match result {
            Ok(()) => ("ok", Code::Ok),
            Err(failure) => (failure.reason.as_str(), failure.reason.code()),
        };
        self.tell(outcome, code);
    }

    fn tell(&mut self, outcome: &'static str, code: Code) {
        self.told = true;
        count(&self.audit.shared.numbers.invocations, outcome);
        let duration = self.began.elapsed();
        self.audit.write(&Line {
            time: Timestamp::now(),
            runtime: &self.audit.runtime,
            run: self.run.to_string(),
            invocation_id: &self.invocation_id,
            operation: "InvokeFunction",
            outcome,
            code: format!("{code:?}"),
            duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
        });
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if !self.told {
            self.tell("CallerGone", Code::Cancelled);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use kruntimes_proto::failure::Reason;
    use serde_json::Value;

    use super::*;

    #[derive(Clone, Default)]
    struct Pipe(Arc<Mutex<Vec<u8>>>);

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            lock(&self.0).extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const RUN: &str = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";

    /// C-6.5: one line a call.
    #[tokio::test]
    async fn one_line_a_call() {
        let pipe = Pipe::default();
        let audit = Audit::new("python", pipe.clone(), Numbers::default()).unwrap();
        let run = RUN.parse().unwrap();
        audit.begin(run, "inv\"1").end(Ok(()));
        let failure = Failure::new(Reason::HandlerError, "secret text");
        audit.begin(run, "2").end(Err(&failure));
        drop(audit.begin(run, "3"));
        audit.finish();
        let text = String::from_utf8(lock(&pipe.0).clone()).unwrap();
        let lines: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let told: Vec<_> = lines
            .iter()
            .map(|line| {
                (
                    line["invocationId"].as_str().unwrap(),
                    line["outcome"].as_str().unwrap(),
                )
            })
            .collect();
        assert_eq!(
            told,
            [("inv\"1", "ok"), ("2", "HandlerError"), ("3", "CallerGone")]
        );
        let mut keys: Vec<_> = lines[0].as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(
            keys,
            [
                "code",
                "durationMs",
                "invocationId",
                "operation",
                "outcome",
                "run",
                "runtime",
                "time"
            ]
        );
        assert!(!text.contains("secret"));
    }

    #[tokio::test]
    async fn nobody_waits_for_a_full_pipe() {
        struct Stuck(Arc<Mutex<()>>);
        impl Write for Stuck {
            fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
                drop(lock(&self.0));
                Ok(bytes.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let gate = Arc::new(Mutex::new(()));
        let held = lock(&gate);
        let numbers = Numbers::default();
        let audit = Audit::new("python", Stuck(Arc::clone(&gate)), numbers.clone()).unwrap();
        for _ in 0..QUEUE + 10 {
            audit.begin(RUN.parse().unwrap(), "x").end(Ok(()));
        }
        assert!(
            numbers.audit_dropped.get() >= 9,
            "one may be in the writer's hands"
        );
        drop(held);
        audit.finish();
    }
}
