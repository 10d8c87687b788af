//! On how many threads a process serves.

use std::io;

use tokio::runtime::{Builder, Runtime};

/// Far above any use; the chart knows the same bound.
const MOST: usize = 256;

/// A Tokio runtime for so many threads. One thread serves everything itself and so never wakes another: per call
/// that is the cheapest, and enough for many thousand calls a second. More threads share their work.
///
/// # Errors
/// When the system refuses.
pub fn runtime(threads: usize) -> io::Result<Runtime> {
    let mut builder = match threads {
        0 | 1 => Builder::new_current_thread(),
        more => {
            let mut builder = Builder::new_multi_thread();
            builder.worker_threads(more);
            builder
        }
    };
    builder.enable_all().build()
}

/// Reads a `--threads` flag.
///
/// # Errors
/// Says what is allowed.
pub fn parse(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|threads| (1..=MOST).contains(threads))
        .ok_or_else(|| format!("give 1 to {MOST}; no more than the Pod has CPUs"))
}
