//! What end-to-end tests share.
//!
//! Tests in `tests/api` run on a real API server without nodes: every process of
//! the path runs on loopback, and [`kubelet`] stands in for the kubelet. Those in
//! `tests/cluster` and the files beside it run on a real cluster, inside its network. Both look through
//! one [`world::World`], so that [`suite`] can ask both the same questions.
//!
//! A missing cluster is an error with a remedy, never a skip.

pub mod call;
pub mod chaos;
pub mod charts;
pub mod cluster;
pub mod install;
pub mod kubelet;
pub mod load;
pub mod processes;
pub mod processor;
pub mod rules;
pub mod stack;
pub mod stage;
pub mod suite;
pub mod world;
