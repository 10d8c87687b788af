//! The fixed side of `make bench`: what gateways stand between, and one gateway as many would write it.

mod functions;
mod grpc;
mod http1;
mod kubernetes;
mod pki;
mod plain;
mod stand;

use clap::Parser;
use kruntimes_ops::threads;

#[derive(Debug, Parser)]
#[command(name = "kruntimes-bench-stand", version, about)]
enum Command {
    /// Serves what gateways need, on loopback, until it is ended.
    Serve(stand::Args),
    /// A gateway of axum and tonic whose routes and token never change.
    Plain(plain::Args),
}

fn main() -> anyhow::Result<()> {
    // Every TLS of this process uses ring; a second call cannot happen this early.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match Command::parse() {
        // One thread: the backend's share of the machine stays small, and the same for every gateway.
        Command::Serve(args) => threads::runtime(1)?.block_on(stand::serve(args)),
        Command::Plain(args) => threads::runtime(args.threads)?.block_on(plain::serve(args)),
    }
}
