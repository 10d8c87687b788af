//! The scheduler's process.

use std::process::ExitCode;

use clap::Parser as _;
use kruntimes_scheduler::{app, args::Args};

fn main() -> anyhow::Result<ExitCode> {
    // Everything that speaks TLS asks for the process's provider; there is one.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let args = Args::parse();
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?
        .block_on(app::run(args))
}
