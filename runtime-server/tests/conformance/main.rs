//! What every language's functions do, tried on the real binary over real gRPC on a
//! Unix socket (C-5.8). Python first.

#![expect(clippy::panic, reason = "a test fails by panicking")]
#![expect(
    clippy::disallowed_methods,
    reason = "each test awaits or aborts the tasks it spawns"
)]

mod bash;
mod calls;
mod deaths;
mod harness;
mod isolation;
mod outputs;
mod registration;
mod server;
