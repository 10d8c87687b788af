//! Payload and output of one call whose worker speaks [`super::lines`].
//!
//! The payload is a file, which Bash reads fast and without a process. The output is a
//! named pipe of the call's own: what a process left behind by an earlier call still
//! prints finds no reader (C-8.6), nothing fills a disk, and reading stops at the limit.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    os::{
        fd::AsFd as _,
        unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use bytes::{Bytes, BytesMut};
use kruntimes_proto::limits;
use nix::{sys::stat::Mode, unistd::mkfifo};
use tokio::{io::AsyncReadExt as _, net::unix::pipe, runtime::Handle, time::Instant};

use super::{frame::Frame, lines};

/// As much as a pipe holds.
const CHUNK_BYTES: usize = 64 * 1024;

static NEXT: AtomicU64 = AtomicU64::new(1);

/// One call on its way.
#[derive(Debug)]
pub struct Exchange {
    began: Instant,
    files: Files,
    reader: pipe::Receiver,
    output: BytesMut,
}

impl Exchange {
    /// Makes the files of one call. Their names never come again in this process: a call that was given up
    /// on while its files were made must not touch those of a later one.
    ///
    /// # Errors
    /// When the file system refuses, for example because it is full.
    pub async fn open(private: &Path, payload: Bytes) -> io::Result<Self> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let files = Files {
            stem: private.join(format!(".call-{number}")),
        };
        let make = move || files.make(&payload).map(|()| files);
        let files = tokio::task::spawn_blocking(make)
            .await
            .map_err(io::Error::other)??;
        // Also open for writing: without any writer it would be at its end.
        let reader = pipe::OpenOptions::new()
            .read_write(true)
            .open_receiver(files.path("out"))?;
        Ok(Self {
            began: Instant::now(),
            files,
            reader,
            output: BytesMut::new(),
        })
    }

    /// What the files' names have in common.
    #[must_use]
    pub fn stem(&self) -> &Path {
        &self.files.stem
    }

    /// Reads output; returns when there is too much of it, or the pipe fails. Cancel safe.
    pub async fn fill(&mut self) -> io::Result<()> {
        while self.output.len() <= limits::OUTPUT_BYTES {
            if self.output.capacity() - self.output.len() < CHUNK_BYTES / 4 {
                self.output.reserve(CHUNK_BYTES);
            }
            self.reader.read_buf(&mut self.output).await?;
        }
        Ok(())
    }

    /// The call has ended: what it wrote is in the pipe, or was read already. Asks
    /// the kernel and not tokio, which learns of it later.
    #[must_use]
    pub fn end(mut self, call: u64, status: u8) -> Frame {
        let mut chunk = vec![0; CHUNK_BYTES];
        while self.output.len() <= limits::OUTPUT_BYTES {
            match nix::unistd::read(self.reader.as_fd(), &mut chunk) {
                Ok(count @ 1..) => self.output.extend_from_slice(&chunk[..count]),
                Ok(0) | Err(_) => break,
            }
        }
        let fits = self.output.len() <= limits::OUTPUT_BYTES;
        let output = fits.then(|| self.output.freeze());
        lines::ended(call, status, self.began.elapsed(), output)
    }
}

/// Removed when it drops.
#[derive(Debug)]
struct Files {
    stem: PathBuf,
}

impl Files {
    fn path(&self, part: &str) -> PathBuf {
        path(&self.stem, part)
    }

    /// Blocking.
    fn make(&self, payload: &[u8]) -> io::Result<()> {
        // The function may have tidied up too much.
        if let Some(private) = self.stem.parent() {
            fs::DirBuilder::new()
                .mode(0o700)
                .recursive(true)
                .create(private)?;
        }
        remove(&self.stem);
        mkfifo(&self.path("out"), Mode::S_IRUSR | Mode::S_IWUSR)?;
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(self.path("in"))?
            .write_all(payload)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let stem = std::mem::take(&mut self.stem);
        match Handle::try_current() {
            // A busy disk takes its time, and this thread has the calls of other functions.
            Ok(runtime) => drop(runtime.spawn_blocking(move || remove(&stem))),
            Err(_) => remove(&stem),
        }
    }
}

fn path(stem: &Path, part: &str) -> PathBuf {
    let mut path = stem.as_os_str().to_owned();
    path.push(".");
    path.push(part);
    path.into()
}

/// Blocking.
fn remove(stem: &Path) {
    // `end` is the mark of the worker; see the shim.
    for part in ["in", "out", "end"] {
        let _ = fs::remove_file(path(stem, part));
    }
}
