//! What the Run says × what is held here → the next step.

use kruntimes_api::keys::Attempt;

use super::{Facts, Told};

/// What this process holds of one Run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Local {
    /// What must be given back before the Run may go anywhere else.
    pub held: Option<Holding>,
    /// Why an attempt cannot go on here.
    pub fault: Option<(Attempt, Fault)>,
    /// The Run's time is over.
    pub expired: Option<Expired>,
    /// The process stops.
    pub draining: bool,
    /// The gateway's URL is known, so that a Run can be made Ready.
    pub gateway_known: bool,
    /// Calls are refused, because Kubernetes does not hear this Pod (C-6.4).
    pub isolated: bool,
}

/// Capacity, and perhaps a directory, a record and a registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holding {
    /// The attempt it is held for.
    pub attempt: Attempt,
    /// How far it is.
    pub step: Step,
}

/// How far an attempt is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Capacity is reserved.
    Admitted,
    /// The code is in place and the journal knows.
    Prepared,
    /// The server has it ready.
    Registered,
    /// The server has it, but has not answered for it lately.
    Silent,
}

/// Why an attempt ends without the Run ending. The scheduler decides what follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// Reason of the Ready condition.
    pub reason: &'static str,
    /// Text for people, bounded when written.
    pub message: String,
}

/// The reason of a hand-over that is no failure (C-7.3).
const DRAINING: &str = "Draining";

/// Which time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expired {
    /// `spec.timeout` since `startTime`.
    Lifetime,
    /// `idleTimeoutSeconds` since the last activity.
    Idle,
}

/// The next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Nothing, until something changes.
    Wait,
    /// Reserve capacity.
    Admit,
    /// Put our finalizer on the Run.
    AddFinalizer,
    /// Write that the Run is being registered, and `startTime` if it has none.
    Claim,
    /// Put the code in place.
    Prepare,
    /// Register, and wait until the server is ready. May be broken off at any time.
    Register,
    /// Write Ready with owner and endpoint.
    Announce,
    /// Write Ready=False, because the server does not answer.
    Withdraw,
    /// Close the gate, end or await calls, unregister, remove directory and record, free capacity.
    CleanUp {
        /// Running calls may finish.
        patient: bool,
    },
    /// Take our finalizer off the Run.
    RemoveFinalizer,
    /// Write the terminal status.
    Finish(End),
    /// Write `releasedAttempt` and why.
    Release(Fault),
    /// Nothing of this Run is ours any more.
    Forget,
}

/// How a Run ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// On request.
    Cancelled,
    /// Deleted, while somebody else's finalizer keeps the object.
    Deleted,
    /// Its time was over.
    Expired(Expired),
}

/// Why the Pod must not hold this attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Why {
    NotMine,
    Ended,
    Released,
    Deleted,
    Cancelled,
    Expired(Expired),
    Superseded,
    Fault(Fault),
    Draining,
}

// === impl Fault ===

impl Fault {
    /// Nothing failed: running calls may end, and the Run goes elsewhere at no cost.
    #[must_use]
    pub fn draining(message: &str) -> Self {
        Self {
            reason: DRAINING,
            message: message.to_owned(),
        }
    }

    /// Whether it is one of these.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.reason == DRAINING
    }
}

// === impl Why ===

impl Why {
    /// Whether running calls may finish.
    fn is_patient(&self) -> bool {
        match self {
            Self::Draining => true,
            Self::Fault(fault) => fault.is_draining(),
            _ => false,
        }
    }
}

/// The next step. Pure: the same facts give the same step.
#[must_use]
pub fn decide(facts: &Facts, local: &Local) -> Action {
    match (why_not(facts, local), local.held) {
        (Some(why), Some(_)) => Action::CleanUp {
            patient: why.is_patient(),
        },
        (Some(why), None) => conclude(facts, why),
        (None, held) => advance(facts, local, held.map(|it| it.step)),
    }
}

/// The first that holds wins: what the world decided comes before what happened here.
fn why_not(facts: &Facts, local: &Local) -> Option<Why> {
    if !facts.mine {
        return Some(Why::NotMine);
    }
    if facts.ended {
        return Some(Why::Ended);
    }
    if facts.released {
        return Some(Why::Released);
    }
    if facts.deleting {
        return Some(Why::Deleted);
    }
    if facts.cancelled {
        return Some(Why::Cancelled);
    }
    if let Some(expired) = local.expired {
        return Some(Why::Expired(expired));
    }
    if local.held.is_some_and(|held| held.attempt != facts.attempt) {
        return Some(Why::Superseded);
    }
    if let Some((attempt, fault)) = &local.fault
        && *attempt == facts.attempt
    {
        return Some(Why::Fault(fault.clone()));
    }
    local.draining.then_some(Why::Draining)
}

/// Nothing is held any more: tell Kubernetes, the finalizer before the hand-over, because after it
/// the finalizer may be another owner's.
fn conclude(facts: &Facts, why: Why) -> Action {
    let release = |fault| {
        if facts.finalizer {
            Action::RemoveFinalizer
        } else {
            Action::Release(fault)
        }
    };
    match why {
        Why::NotMine | Why::Released => Action::Forget,
        Why::Deleted if facts.foreign_finalizer => Action::Finish(End::Deleted),
        Why::Ended | Why::Deleted if facts.finalizer => Action::RemoveFinalizer,
        Why::Ended | Why::Deleted => Action::Forget,
        Why::Cancelled => Action::Finish(End::Cancelled),
        Why::Expired(expired) => Action::Finish(End::Expired(expired)),
        Why::Fault(fault) => release(fault),
        Why::Draining => release(Fault::draining("the Pod stops and handed the Run over")),
        // Holds only while something is held.
        Why::Superseded => Action::Wait,
    }
}

fn advance(facts: &Facts, local: &Local, step: Option<Step>) -> Action {
    match step {
        None => Action::Admit,
        Some(_) if !facts.finalizer => Action::AddFinalizer,
        Some(Step::Admitted | Step::Prepared) if !facts.claimed => Action::Claim,
        Some(Step::Admitted) => Action::Prepare,
        Some(Step::Prepared) => Action::Register,
        Some(Step::Registered) if facts.told == Told::Ready || !local.gateway_known => Action::Wait,
        // The scheduler says that it is not, and would say so again.
        Some(Step::Registered) if local.isolated => Action::Wait,
        Some(Step::Registered) => Action::Announce,
        Some(Step::Silent) if facts.told == Told::NotReady => Action::Wait,
        Some(Step::Silent) => Action::Withdraw,
    }
}

#[cfg(test)]
mod tests;
