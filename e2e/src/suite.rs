//! Questions that every installation must answer alike, on loopback and on a
//! cluster. Each takes a world whose Runtime has room for eight Runs a Pod.

pub mod answers;
pub mod lifecycle;
pub mod operations;
pub mod owner;
