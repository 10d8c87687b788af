//! Runs the functions of one Pod: `executor.v1.FunctionRuntime` on one side, one
//! warm worker process per registration on the other.
//!
//! ```text
//! runtimed ─gRPC, Unix socket─▶ listen ▶ service ▶ request ▶ functions ─▶ registry (pure)
//!                                                               │
//!                                     one supervisor per registration (worker::supervise)
//!                                                               │ frames over a socket pair
//!                                     worker-exec (worker::exec) ▶ interpreter ▶ shims/…
//! ```
//!
//! What no part may do: keep a lock across an await, give a worker a second call
//! before the first ended by itself, or hand one call's frame to another (C-8.6).

pub mod adapter;
pub mod app;
pub mod args;
pub mod environment;
pub mod functions;
pub mod handler;
pub mod listen;
pub mod metrics;
pub mod outcome;
pub mod registry;
pub mod request;
pub mod service;
pub mod start_lines;
pub mod worker;
