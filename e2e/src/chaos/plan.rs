//! What breaks when, and for how long: drawn from a seed, so that a run can be had again.
//!
//! Names of Pods and ids of processes differ from run to run; the plan says the kind of victim and
//! carries a number that chooses among those there are.

use std::{fmt, time::Duration};

/// Quiet time at the start, for calls that show that all is well.
const CALM: Duration = Duration::from_secs(3);
/// Between two faults: up to this long.
const GAP: Duration = Duration::from_secs(8);
/// A process is frozen for up to this long: shorter than any lease or probe, and longer.
const FROZEN: Duration = Duration::from_secs(20);
/// A disk is full for up to this long.
const FULL: Duration = Duration::from_secs(20);
/// A short cut of a network, and one that outlasts heartbeats and fences.
const CUT: [Duration; 2] = [Duration::from_secs(12), Duration::from_secs(60)];

/// A process of the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Process {
    /// runtimed of a pool Pod.
    Runtimed,
    /// The Runtime Server of a pool Pod.
    RuntimeServer,
    /// The process of one function.
    Worker,
    /// A gateway.
    Gateway,
    /// A scheduler, leading or not.
    Scheduler,
}

/// Which Pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Those that hold functions.
    Pool,
    /// Gateways.
    Gateway,
    /// Schedulers.
    Scheduler,
}

/// A volume of a pool Pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Volume {
    /// Where runtimed remembers registrations.
    Journal,
    /// Where sources lie.
    Workspace,
}

/// What breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// SIGKILL; Kubernetes, or its parent, starts it again.
    Kill(Process),
    /// SIGSTOP, healed by SIGCONT.
    Freeze(Process),
    /// Nothing reaches the Pod and nothing leaves it, without a word to anybody.
    Cut(Role),
    /// No byte can be written.
    Fill(Volume),
    /// The Pod is deleted; with its grace period, or without.
    Delete {
        /// Which.
        of: Role,
        /// Whether it may say goodbye.
        grace: bool,
    },
}

/// A fault at its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// Since the start.
    pub at: Duration,
    /// What.
    pub fault: Fault,
    /// Until it is healed; zero for what Kubernetes heals.
    pub lasts: Duration,
    /// Chooses the victim: this modulo their number.
    pub dice: usize,
}

/// Each fault with its weight: what holds functions breaks more often than what serves it.
const FAULTS: [(Fault, u64); 20] = [
    (Fault::Kill(Process::Runtimed), 3),
    (Fault::Kill(Process::RuntimeServer), 3),
    (Fault::Kill(Process::Worker), 3),
    (Fault::Kill(Process::Gateway), 2),
    (Fault::Kill(Process::Scheduler), 2),
    (Fault::Freeze(Process::Runtimed), 3),
    (Fault::Freeze(Process::RuntimeServer), 3),
    (Fault::Freeze(Process::Worker), 3),
    (Fault::Freeze(Process::Gateway), 2),
    (Fault::Freeze(Process::Scheduler), 2),
    (Fault::Cut(Role::Pool), 3),
    (Fault::Cut(Role::Gateway), 2),
    (Fault::Cut(Role::Scheduler), 1),
    (Fault::Fill(Volume::Journal), 2),
    (Fault::Fill(Volume::Workspace), 2),
    (delete(Role::Pool, true), 2),
    (delete(Role::Pool, false), 2),
    (delete(Role::Gateway, true), 1),
    (delete(Role::Gateway, false), 1),
    (delete(Role::Scheduler, false), 1),
];

const fn delete(of: Role, grace: bool) -> Fault {
    Fault::Delete { of, grace }
}

/// Draws what happens within `length`. All of it is healed by then.
#[must_use]
pub fn draw(seed: u64, length: Duration) -> Vec<Planned> {
    let mut random = Random(seed);
    let mut plan = Vec::new();
    let mut at = CALM;
    loop {
        at += random.up_to(GAP);
        if at >= length {
            return plan;
        }
        let fault = random.fault();
        let lasts = match fault {
            Fault::Kill(_) | Fault::Delete { .. } => Duration::ZERO,
            Fault::Freeze(_) => random.up_to(FROZEN),
            Fault::Fill(_) => random.up_to(FULL),
            Fault::Cut(_) => {
                let most = CUT[usize::from(random.below(3) == 0)];
                random.up_to(most)
            }
        };
        plan.push(Planned {
            at,
            fault,
            lasts: lasts.min(length - at),
            dice: usize::try_from(random.below(1 << 30)).unwrap_or_default(),
        });
    }
}

/// `SplitMix64`: small, and the same everywhere.
struct Random(u64);

// === impl Random ===

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn up_to(&mut self, most: Duration) -> Duration {
        let millis = u64::try_from(most.as_millis()).unwrap_or(u64::MAX);
        Duration::from_millis(1 + self.below(millis.max(1)))
    }

    fn fault(&mut self) -> Fault {
        let all = FAULTS.iter().map(|(_, weight)| weight).sum();
        let mut left = self.below(all);
        for (fault, weight) in FAULTS {
            if left < weight {
                return fault;
            }
            left -= weight;
        }
        FAULTS[0].0
    }
}

// === impl Process ===

impl Process {
    /// The Pods it is in.
    #[must_use]
    pub fn role(self) -> Role {
        match self {
            Self::Runtimed | Self::RuntimeServer | Self::Worker => Role::Pool,
            Self::Gateway => Role::Gateway,
            Self::Scheduler => Role::Scheduler,
        }
    }

    /// The container it is in.
    #[must_use]
    pub fn container(self) -> &'static str {
        match self {
            Self::Runtimed => "runtimed",
            Self::RuntimeServer | Self::Worker => "runtime",
            Self::Gateway => "gateway",
            Self::Scheduler => "scheduler",
        }
    }
}

// === impl Fault ===

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kill(process) => write!(f, "kill {process:?}"),
            Self::Freeze(process) => write!(f, "freeze {process:?}"),
            Self::Cut(role) => write!(f, "cut {role:?}"),
            Self::Fill(volume) => write!(f, "fill {volume:?}"),
            Self::Delete { of, grace: true } => write!(f, "delete {of:?}"),
            Self::Delete { of, grace: false } => write!(f, "delete {of:?} at once"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const TEN_MINUTES: Duration = Duration::from_secs(600);

    #[test]
    fn a_seed_is_a_plan_and_another_seed_is_another() {
        assert_eq!(draw(7, TEN_MINUTES), draw(7, TEN_MINUTES));
        assert_ne!(draw(7, TEN_MINUTES), draw(8, TEN_MINUTES));
    }

    #[test]
    fn everything_is_healed_in_time_and_nothing_lasts_longer_than_it_may() {
        for seed in 0..50 {
            for length in [TEN_MINUTES, Duration::from_secs(60), Duration::ZERO] {
                for planned in draw(seed, length) {
                    assert!(planned.at + planned.lasts <= length, "{planned:?}");
                    let most = match planned.fault {
                        Fault::Freeze(_) | Fault::Fill(_) => FROZEN,
                        Fault::Cut(_) => CUT[1],
                        Fault::Kill(_) | Fault::Delete { .. } => Duration::ZERO,
                    };
                    assert!(planned.lasts <= most, "{planned:?}");
                }
            }
        }
    }

    #[test]
    fn ten_minutes_have_every_fault_and_several_at_once() {
        let plan = draw(1, TEN_MINUTES);
        let kinds: BTreeSet<Fault> = plan.iter().map(|it| it.fault).collect();
        let all: BTreeSet<Fault> = FAULTS.iter().map(|(fault, _)| *fault).collect();
        assert_eq!(kinds, all);
        let overlaps = plan
            .windows(2)
            .filter(|two| two[0].at + two[0].lasts > two[1].at)
            .count();
        assert!(overlaps > 10, "{overlaps}");
    }
}
