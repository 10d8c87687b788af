//! The whole scheduler, leader election included, against an in-memory Kubernetes API.

#![expect(clippy::panic, reason = "a helper that cannot go on fails its test")]

mod common;

mod capacity_race;
mod failover;
mod lost;
mod place;
mod policy;
mod pools;
mod recover;
mod stale;
