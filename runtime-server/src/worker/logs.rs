//! What a worker prints, from its two pipes into the log (C-8.6).

use std::{
    convert::Infallible,
    io,
    os::fd::{AsFd as _, OwnedFd},
};

use tokio::{io::AsyncReadExt as _, net::unix::pipe};
use tracing::info;

use super::capture::{Budget, Lines};

/// What a worker prints, on its way to the log.
#[derive(Debug)]
pub struct Logs {
    run_uid: String,
    invocation_id: String,
    budget: Budget,
    stdout: Pipe,
    stderr: Pipe,
    last_line: String,
}

#[derive(Debug)]
struct Pipe {
    name: &'static str,
    read: Option<pipe::Receiver>,
    lines: Lines,
    chunk: Box<[u8; 8192]>,
}

impl Pipe {
    fn new(name: &'static str, fd: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            name,
            read: Some(pipe::Receiver::from_owned_fd(fd)?),
            lines: Lines::default(),
            chunk: Box::new([0; 8192]),
        })
    }

    /// Reads once; waits for ever after the end. Cancel safe.
    async fn read(&mut self) -> usize {
        let Some(pipe) = &mut self.read else {
            return std::future::pending().await;
        };
        match pipe.read(&mut self.chunk[..]).await {
            Ok(count @ 1..) => count,
            Ok(0) | Err(_) => {
                self.read = None;
                std::future::pending().await
            }
        }
    }
}

impl Logs {
    /// Reads these two pipes.
    ///
    /// # Errors
    /// When they cannot be watched.
    pub fn new(run_uid: &str, stdout: OwnedFd, stderr: OwnedFd) -> io::Result<Self> {
        Ok(Self {
            run_uid: run_uid.to_owned(),
            invocation_id: String::new(),
            budget: Budget::new(),
            stdout: Pipe::new("stdout", stdout)?,
            stderr: Pipe::new("stderr", stderr)?,
            last_line: String::new(),
        })
    }

    /// The last line printed; empty when nothing was.
    #[must_use]
    pub fn last_line(&self) -> &str {
        &self.last_line
    }

    /// From now on printed text belongs to this call; it gets a new budget.
    pub fn call_begins(&mut self, invocation_id: &str) {
        invocation_id.clone_into(&mut self.invocation_id);
        self.budget = Budget::new();
    }

    /// Reads and logs for ever; drop it to stop. Nothing read is lost.
    pub async fn pump(&mut self) -> Infallible {
        loop {
            tokio::select! {
                count = self.stdout.read() => self.take(true, count),
                count = self.stderr.read() => self.take(false, count),
            }
        }
    }

    /// Reads what is there already, so that it is logged with the call that
    /// printed it. Asks the kernel and not tokio, which learns of it later.
    pub fn drain(&mut self) {
        for is_stdout in [true, false] {
            // Bounded: a child in the background may print without end.
            for _ in 0..64 {
                let pipe = if is_stdout {
                    &mut self.stdout
                } else {
                    &mut self.stderr
                };
                let Some(read) = &pipe.read else { break };
                match nix::unistd::read(read.as_fd(), &mut pipe.chunk[..]) {
                    Ok(count @ 1..) => self.take(is_stdout, count),
                    Ok(0) | Err(_) => break,
                }
            }
        }
    }

    /// Logs unfinished lines.
    pub fn flush(&mut self) {
        let Self {
            run_uid,
            invocation_id,
            budget,
            stdout,
            stderr,
            last_line,
        } = self;
        for pipe in [stdout, stderr] {
            let name = pipe.name;
            pipe.lines.flush(budget, &mut |line| {
                log_line(run_uid, invocation_id, name, line, last_line)
            });
        }
    }

    fn take(&mut self, is_stdout: bool, count: usize) {
        let Self {
            run_uid,
            invocation_id,
            budget,
            stdout,
            stderr,
            last_line,
        } = self;
        let pipe = if is_stdout { stdout } else { stderr };
        let name = pipe.name;
        pipe.lines.push(&pipe.chunk[..count], budget, &mut |line| {
            log_line(run_uid, invocation_id, name, line, last_line);
        });
    }
}

fn log_line(run_uid: &str, invocation_id: &str, stream: &str, line: &str, last_line: &mut String) {
    info!(target: "function", run_uid, invocation_id, stream, "{line}");
    if !line.trim().is_empty() {
        line.clone_into(last_line);
    }
}
