//! The whole scheduler, leader election included, against an in-memory Kubernetes API.

mod common;

mod capacity_race;
mod failover;
mod place;
mod recover;
