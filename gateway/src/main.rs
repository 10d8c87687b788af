//! Provider, parse, run.

use std::process::ExitCode;

use clap::Parser as _;

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
