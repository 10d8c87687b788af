//! The deciding parts of all processes, run together under a seeded scheduler with virtual time (C-3 to
//! C-7 under faults).
//!
//! ```text
//!            clients ──▶ gateway (routes::table, invoke) ──hop──▶ runtimed (fence, held, slots)
//!                           ▲ watch                                  │ registry of the Runtime Server
//! users ──▶ api ────────────┼──────────▶ driver (decide, statuses, health, timers, admission)
//!            ▲              └──────────▶ scheduler (lease, look, plan, world, assumed, …)
//!         faults, pods (nodes, kubelets, the pool's controller)
//! ```
//!
//! The product decides; what is simulated is everything around it: the API server and its watches, the
//! network, nodes and kubelets, workers, clocks, and the order in which things happen. One random number
//! generator, ordered maps and virtual time make a seed replay exactly.

mod api;
mod clients;
mod clock;
mod driver;
mod election;
mod events;
mod faults;
mod gateway;
mod invariants;
mod local;
mod pods;
mod rng;
mod runtimed;
mod scheduler;
mod server;
mod sim;
mod totals;
mod watch;

use std::collections::BTreeMap;

pub use totals::{Totals, caught, many};

/// A product that is broken on purpose; a check that cannot fail proves nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// The scheduler takes for gone whatever looks lost.
    FenceOff,
    /// An owner takes calls of any attempt.
    EpochIgnored,
    /// A call that ends may keep its slot.
    SlotNotFreed,
    /// What a list or the watch does not show does not exist; nobody reads the live object.
    StaleListTruth,
    /// A gateway sends again what may have run.
    RetryAfterDispatch,
}

/// What one seed did.
#[derive(Debug, Clone)]
pub struct Outcome {
    pub seed: u64,
    pub steps: u64,
    /// Calls of clients, and those that were answered by the function.
    pub calls: u64,
    pub answered: u64,
    /// Faults by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// The first promise that was broken.
    pub violation: Option<String>,
    /// What happened, when it was asked for.
    pub trace: Vec<String>,
}

// === impl Variant ===

impl Variant {
    /// Every one.
    pub const ALL: [Self; 5] = [
        Self::FenceOff,
        Self::EpochIgnored,
        Self::SlotNotFreed,
        Self::StaleListTruth,
        Self::RetryAfterDispatch,
    ];

    /// For people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FenceOff => "fence off",
            Self::EpochIgnored => "epoch ignored",
            Self::SlotNotFreed => "slot not freed",
            Self::StaleListTruth => "list taken as truth while stale",
            Self::RetryAfterDispatch => "retry after dispatch",
        }
    }
}

/// Runs one seed.
#[must_use]
pub fn run(seed: u64, variant: Option<Variant>, trace: bool) -> Outcome {
    sim::Sim::new(seed, variant, trace).run()
}
