//! What servers and functions do, tried on real processes over real gRPC (C-5.8).
//!
//! `protocol` holds for every language and every server, also somebody's own (see
//! `target`); the other modules try what is special to Python and to our server.

#![expect(clippy::panic, reason = "a test fails by panicking")]
#![expect(
    clippy::disallowed_methods,
    reason = "each test awaits or aborts the tasks it spawns"
)]

mod bash;
mod calls;
mod deaths;
mod environment;
mod harness;
mod isolation;
mod outputs;
mod protocol;
mod registration;
mod sdk;
mod server;
mod target;
mod tracing;
