//! On a real cluster with the product installed: calls into Pods, and what an operator does meanwhile.

mod operations;
mod path;
mod rollout;
