//! The gateway as its callers see it, between an API server in memory and fake owners. One binary, because
//! linking takes longer than running.

#![expect(clippy::unwrap_used, reason = "a test that panics fails")]
#![expect(clippy::panic, reason = "a test that panics fails")]

mod common;

mod authorization;
mod bodies;
mod cancel;
mod deadlines;
mod drain;
mod early;
mod explain;
mod floods;
mod handover;
mod heads;
mod hop;
mod limits;
mod observe;
mod once;
mod origins;
mod outputs;
mod route_lag;
mod secrets;
mod status;
mod strangers;
mod tls_rotation;
mod trace;
