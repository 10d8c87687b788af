//! Provider, parse, run.

use std::process::ExitCode;

use clap::Parser as _;

/// A call allocates some seventy times, mostly in libraries, and frees that in batches, which glibc's own allocator is
/// slow at: this one takes 6 % off the processor time of a call, for 6 MiB.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    // Every TLS of this process uses ring; a second call cannot happen this early.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let args = kruntimes_gateway::args::Args::parse();
    match kruntimes_gateway::app::run(args) {
        Ok(code) => code,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "the gateway ends");
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
