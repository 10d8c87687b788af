//! On a real API server, without nodes: objects and their rules, and the product as processes on loopback.

mod admission;
mod bash;
mod charts;
mod h2spec;
mod operations;
mod owner;
mod path;
mod pools;
mod recovery;
mod rights;
mod rules_spec;
mod rules_status;
mod scheduler;
mod trace;
