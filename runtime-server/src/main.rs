//! Entry point of `kruntimes-runtime-server`.

use std::process::ExitCode;

use clap::Parser as _;
use kruntimes_runtime_server::{
    app,
    args::{Args, Role},
    worker::exec,
};

fn main() -> ExitCode {
    let args = Args::parse();
    match args.role {
        Some(Role::WorkerExec(role)) => exec::run(&role),
        None => serve(args),
    }
}

fn serve(args: Args) -> ExitCode {
    let run = || -> anyhow::Result<()> {
        let _flush = kruntimes_ops::log::init(&args.server.ops)?;
        let (tracer, _spans) = kruntimes_trace::from_environment("kruntimes-runtime-server")?;
        let runtime = kruntimes_ops::threads::runtime(args.server.threads)?;
        runtime.block_on(app::run(args.server, tracer))
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("kruntimes-runtime-server: {error:#}");
            ExitCode::FAILURE
        }
    }
}
