//! A whole runtimed in this process, against an API server in memory and a Runtime Server that does
//! what a test tells it to. Each file is one group of promises.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; a failed unwrap is a failed test"
)]
#![expect(clippy::panic, reason = "helpers of tests; a panic is a failed test")]

mod common;

mod cancel;
mod fence;
mod hang_up;
mod idle;
mod invoke;
mod outputs;
mod owner;
mod register;
mod restart;
mod silence;
mod trace;
