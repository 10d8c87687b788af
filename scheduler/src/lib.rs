//! Run → Pod, Runtime → pool of Pods; one active by Lease (C-7).
//!
//! ```text
//!            Lease ── lease ──▶ leader: one term, from an empty index
//!                                 │
//! kube ── watch ──▶ facts ──▶ world ──wakes──▶ queue ──▶ runs ── plan ──▶ bind ──▶ kube
//!                                │                                ├ expire   (ended, going away)
//!                                │                                ├ recover  (owned, owner lost)
//!                                │                                └ cycle    (waiting: filter, score)
//!                                └─wakes──▶ queue ──▶ pools ── pool ──▶ pool/apply ──▶ kube
//! Secrets ── identity ──▶ ConfigMap kruntimes-gateway of every pool namespace
//! ```
//!
//! | Pure | Question it answers |
//! | --- | --- |
//! | [`facts`] | which fields of an object can change a decision |
//! | [`world`] | what have the watches told us, and who is worth a look |
//! | [`assumed`] | which assignments has the watch not shown yet |
//! | [`snapshot`] | Pods, capacity and use at one instant |
//! | [`look`] | what is known around a Run, and has what we wrote come back |
//! | [`plan`] | what is the one next thing to do with a Run |
//! | [`cycle`], [`filter`], [`score`] | which Pod, or why none |
//! | [`fence`] | is the owner lost, and is it provably out |
//! | [`recover`] | owner lost: next attempt, hand-over or end |
//! | [`expire`] | when does an ended Run go, when its finalizer |
//! | [`pool`] | which objects does a Runtime need, or why is it refused |
//!
//! What must never happen: a write that was not decided on the version it overwrites; a write
//! without the Lease; an assignment taken away without a fence; the same status written again.

pub mod app;
pub mod args;
pub mod assumed;
pub mod bind;
pub mod cycle;
mod events;
pub mod expire;
pub mod facts;
pub mod fence;
pub mod filter;
mod hub;
mod identity;
pub mod leader;
pub mod lease;
pub mod look;
pub mod metrics;
mod owners;
pub mod plan;
pub mod pool;
mod pools;
pub mod queue;
pub mod recover;
mod runs;
pub mod score;
pub mod snapshot;
mod watch;
pub mod world;
