//! `make chaos`: callers and functions each write down what they saw while processes are killed and
//! frozen, networks are cut, disks run full and Pods are deleted; then the two histories are compared.
//!
//! [`plan`] draws what is to break, [`faults`] breaks it and [`undo`] heals it; [`callers`] and
//! [`collector`] write, [`check`] judges. [`loss`] measures how long the loss of a Pod is felt. It needs
//! to be on the cluster's one node, as root.

pub mod callers;
pub mod check;
pub mod clock;
pub mod collector;
pub mod drive;
pub mod faults;
pub mod figures;
pub mod history;
pub mod loss;
pub mod mounts;
pub mod plan;
pub mod processes;
pub mod scene;
pub mod settle;
pub mod targets;
pub mod undo;
pub mod wishes;
