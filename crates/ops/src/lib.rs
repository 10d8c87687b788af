//! What a daemon owes its operator: flags, logs, metrics, health, drain and watched certificates.
//!
//! | Module | Question it answers |
//! | --- | --- |
//! | [`args`] | which flags every binary has, how a duration is written |
//! | [`log`] | where log lines go and in which form |
//! | [`lines`] | how lines reach a slow output without holding anybody up |
//! | [`metrics`] | where a metric is registered and how it is encoded |
//! | [`readiness`] | is this process ready, and if not, what is missing |
//! | [`admin`] | `/livez`, `/readyz`, `/metrics` on their own port and thread |
//! | [`threads`] | on how many threads a process serves |
//! | [`drain`] | which tasks run, and how they end when a signal arrives |
//! | [`files`] | did a mounted file change |
//! | [`tls_files`] | which certificate and key are the newest good ones |
//! | [`certificate`] | when does a certificate end |
//!
//! This crate knows neither Kubernetes nor gRPC.

#![warn(missing_docs)]

pub mod admin;
pub mod args;
pub mod certificate;
pub mod drain;
pub mod files;
pub mod lines;
pub mod log;
pub mod metrics;
pub mod readiness;
pub mod threads;
pub mod tls_files;
