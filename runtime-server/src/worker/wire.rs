//! The socket between server and worker, whichever way the worker speaks: frames, or
//! control lines with files beside them.

use std::{io, path::PathBuf};

use bytes::{Buf as _, Bytes, BytesMut};
use kruntimes_proto::local::LocalStream;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{
    exchange::Exchange,
    frame::{self, CallError, ErrorKind, Frame, Invoke, Malformed, Trouble},
    lines::{self, Line},
};

/// How a language's workers speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speech {
    /// [`frame`]: everything crosses the wire.
    Frames,
    /// [`lines`]: for a language that cannot hold a NUL byte.
    Lines,
}

/// The conversation with one worker.
#[derive(Debug)]
pub struct Wire {
    stream: LocalStream,
    buffer: BytesMut,
    talk: Talk,
}

#[derive(Debug)]
enum Talk {
    Frames,
    Lines {
        /// Where the files of calls go.
        private: PathBuf,
        /// The running call.
        exchange: Option<Exchange>,
        /// The answer to a call that need not start.
        refused: Option<Box<CallError>>,
    },
}

/// The wire cannot be used any more, except after [`Broken::NotSent`].
#[derive(Debug, thiserror::Error)]
pub enum Broken {
    /// The worker closed its end.
    #[error("the worker closed its end")]
    Closed,
    /// The worker sent what it must not.
    #[error("the worker sent {0}")]
    Malformed(#[from] Malformed),
    /// The socket failed.
    #[error("talk to the worker: {0}")]
    Io(#[from] io::Error),
    /// The function goes on writing, beyond the limit.
    #[error("the worker sent {}", lines::too_long())]
    OutputTooLong,
    /// The files of a call cannot be made; the worker knows nothing of it.
    #[error("make the files of a call: {0}")]
    NotSent(io::Error),
}

impl Wire {
    /// Talks over `stream`; files go into `private`.
    #[must_use]
    pub fn new(stream: LocalStream, speech: Speech, private: PathBuf) -> Self {
        Self {
            stream,
            buffer: BytesMut::with_capacity(16 * 1024),
            talk: match speech {
                Speech::Frames => Talk::Frames,
                Speech::Lines => Talk::Lines {
                    private,
                    exchange: None,
                    refused: None,
                },
            },
        }
    }

    /// Sends a call. The input is not copied.
    pub async fn send(&mut self, invoke: &Invoke<'_>, input: Bytes) -> Result<(), Broken> {
        match &mut self.talk {
            Talk::Frames => self.stream.write_all_buf(&mut invoke.head().chain(input)).await?,
            Talk::Lines {
                private,
                exchange,
                refused,
            } => match lines::payload(input) {
                Ok(payload) => {
                    let new = Exchange::open(private, payload).await.map_err(Broken::NotSent)?;
                    let mut lines = lines::call(invoke, unix_now(), new.stem());
                    *exchange = Some(new);
                    self.stream.write_all_buf(&mut lines).await?;
                }
                Err(trouble) => {
                    *refused = Some(Box::new(CallError {
                        call: invoke.call,
                        handler: std::time::Duration::ZERO,
                        kind: ErrorKind::InvalidInput,
                        trouble,
                    }));
                }
            },
        }
        Ok(())
    }

    /// Reads what the worker says next. Cancel safe.
    pub async fn next(&mut self) -> Result<Frame, Broken> {
        loop {
            let running = match &mut self.talk {
                Talk::Frames => {
                    if let Some(frame) = frame::take(&mut self.buffer)? {
                        return Ok(frame);
                    }
                    None
                }
                Talk::Lines {
                    exchange, refused, ..
                } => {
                    if let Some(error) = refused.take() {
                        return Ok(Frame::Error(*error));
                    }
                    if let Some(line) = lines::take(&mut self.buffer)? {
                        return understand(line, exchange);
                    }
                    exchange.as_mut()
                }
            };
            if self.buffer.capacity() == 0 {
                // A fresh buffer instead of the room left by a large answer, which
                // would stay in memory for as long as the function.
                self.buffer = BytesMut::with_capacity(16 * 1024);
            } else if self.buffer.capacity() == self.buffer.len() {
                self.buffer.reserve(16 * 1024);
            }
            tokio::select! {
                biased;
                read = self.stream.read_buf(&mut self.buffer) => if read? == 0 {
                    return Err(Broken::Closed);
                },
                filled = fill(running) => {
                    filled?;
                    return Err(Broken::OutputTooLong);
                }
            }
        }
    }
}

fn understand(line: Line, exchange: &mut Option<Exchange>) -> Result<Frame, Broken> {
    match line {
        Line::Ready { version } => Ok(Frame::Ready { version }),
        Line::Failed { reason } => Ok(Frame::Failed(Trouble {
            kind: "Refused".to_owned(),
            trace: reason.clone(),
            message: reason,
        })),
        Line::Done { call, status } => match exchange.take() {
            Some(running) => Ok(running.end(call, status)),
            None => Err(Malformed::Line.into()),
        },
    }
}

async fn fill(running: Option<&mut Exchange>) -> io::Result<()> {
    match running {
        Some(exchange) => exchange.fill().await,
        None => std::future::pending().await,
    }
}

/// Now, since 1970: the deadline is told in the time that scripts can ask for.
fn unix_now() -> std::time::Duration {
    let now = jiff::Timestamp::now().as_duration();
    now.try_into().unwrap_or_default()
}
