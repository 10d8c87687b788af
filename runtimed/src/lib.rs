//! The daemon that owns the Runs of one Pod (C-6).
//!
//! ```text
//! gateway ── hop ──▶ invoker ── held ─ fence ─ slot ──▶ runtime_server ──▶ the Pod's Runtime Server
//!                                 ▲                          ▲
//! Kubernetes ── lifecycle::watch ─┴─ drive ─ decide ─ act ───┘
//!            ◀─ heartbeat
//! ```
//!
//! `lifecycle` makes assigned Runs callable and takes them apart again; it alone writes to
//! Kubernetes. `invoker` serves calls out of memory. They meet in [`held`].

pub mod admission;
pub mod app;
pub mod args;
pub mod audit;
pub mod bounds;
pub mod caller;
pub mod events;
pub mod fence;
pub mod gateway_config;
pub mod heartbeat;
pub mod held;
pub mod invoker;
pub mod journal;
pub mod lifecycle;
pub mod metrics;
pub mod outputs;
pub mod owner;
pub mod registration;
pub mod request;
pub mod running;
pub mod runtime_server;
pub mod server_channel;
pub mod server_watch;
pub mod slots;
pub mod source;
pub mod spans;
