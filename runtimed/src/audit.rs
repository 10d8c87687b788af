//! One JSONL line an invocation on standard output (C-6.5): who was called, what came of it,
//! how long it took; never a body or an output value.
//!
//! Lines are handed to a thread. When nobody reads standard output, lines are dropped and counted; no call
//! waits.

use std::{
    fmt::Display,
    io::{self, Write},
    sync::Arc,
};

use jiff::Timestamp;
use kruntimes_api::keys::RunUid;
use kruntimes_ops::lines::Lines;
use kruntimes_proto::failure::Failure;
use serde::Serialize;
use tokio::time::Instant;
use tonic::Code;

use crate::metrics::{Numbers, count};

/// The audit log. Clones share it.
#[derive(Debug, Clone)]
pub struct Audit {
    runtime: Arc<str>,
    lines: Lines,
    numbers: Numbers,
}

/// One call; its line is written when it ends, also when the caller went away.
#[derive(Debug)]
#[must_use = "the line is written when the call ends"]
pub struct Call {
    audit: Audit,
    run: RunUid,
    invocation_id: String,
    trace: Option<(String, String)>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    trace_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    span_id: Option<&'a str>,
}

// === impl Audit ===

impl Audit {
    /// Writes to `output` from a thread of its own.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn new(runtime: &str, output: impl Write + Send + 'static, numbers: Numbers) -> io::Result<Self> {
        // A line about lost lines would be no audit line; the metric tells.
        let lines = Lines::start("audit", output, |_| Vec::new())?;
        Ok(Self {
            runtime: runtime.into(),
            lines,
            numbers,
        })
    }

    /// A call begins.
    pub fn begin(&self, run: RunUid, invocation_id: &str) -> Call {
        Call {
            audit: self.clone(),
            run,
            invocation_id: invocation_id.to_owned(),
            trace: None,
            began: Instant::now(),
            told: false,
        }
    }

    /// Writes what waits and ends the thread. Blocks.
    pub fn finish(&self) {
        self.lines.finish();
    }

    fn write(&self, line: &Line<'_>) {
        let Ok(mut bytes) = serde_json::to_vec(line) else {
            return;
        };
        bytes.push(b'\n');
        if !self.lines.push(&bytes, false) {
            self.numbers.audit_dropped.inc();
        }
    }
}

// === impl Call ===

impl Call {
    /// The call has this trace id and span id, if any.
    pub fn traced(mut self, ids: Option<(impl Display, impl Display)>) -> Self {
        self.trace = ids.map(|(trace, span)| (trace.to_string(), span.to_string()));
        self
    }

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
        count(&self.audit.numbers.invocations, outcome);
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
            trace_id: self.trace.as_ref().map(|(trace, _)| trace.as_str()),
            span_id: self.trace.as_ref().map(|(_, span)| span.as_str()),
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

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, MutexGuard};

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

    fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap()
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
        for _ in 0..20_000 {
            audit.begin(RUN.parse().unwrap(), "x").end(Ok(()));
        }
        assert!(numbers.audit_dropped.get() > 0, "it cannot hold so many");
        drop(held);
        audit.finish();
    }
}
