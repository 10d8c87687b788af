//! Installs the TLS provider, reads the flags, runs.

use std::process::ExitCode;

use clap::Parser as _;
use kruntimes_ops::{drain::Drain, log, threads};
use kruntimes_runtimed::{
    app::{App, Outside},
    args::Args,
};
use kruntimes_trace::Tracer;

fn main() -> ExitCode {
    // Fails only when a provider is there already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let args = Args::parse();
    let _flush = match log::init(&args.ops) {
        Ok(flush) => flush,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let run = || {
        let (tracer, _spans) = kruntimes_trace::from_environment("kruntimes-runtimed")?;
        threads::runtime(args.threads)?.block_on(run(args, tracer))
    };
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args, tracer: Tracer) -> anyhow::Result<bool> {
    let drain = Drain::new();
    drain.stop_on_signals()?;
    let outside = Outside {
        tracer,
        ..Outside::from_environment(&args).await?
    };
    let app = App::start(args, drain, outside).await?;
    Ok(app.wait().await?.is_clean())
}
