//! How a daemon reaches Kubernetes, and notices soon when it does not.
//!
//! A network that is cut says nothing. Left alone, a client waits for minutes on connections that lead
//! nowhere, half a minute for new ones, and then pauses half a minute more between two tries of a watch: long
//! after the network is back, routes and assignments are still those of before. Here every one
//! of these waits is a few seconds.

mod connections;
mod pauses;

pub use self::{
    connections::{Service, builder, client},
    pauses::Pauses,
};
