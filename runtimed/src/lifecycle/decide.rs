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

/// The next step. Pure: the same facts give the same step.
#[must_use]
pub fn decide(facts: &Facts, local: &Local) -> Action {
    match (why_not(facts, local), local.held) {
        (Some(why), Some(_)) => Action::CleanUp {
            patient: why == Why::Draining,
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
        Why::Draining => release(Fault {
            reason: "Draining",
            message: "the Pod stops and handed the Run over".to_owned(),
        }),
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
        Some(Step::Registered) => Action::Announce,
        Some(Step::Silent) if facts.told == Told::NotReady => Action::Wait,
        Some(Step::Silent) => Action::Withdraw,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn fresh() -> Facts {
        Facts {
            mine: true,
            deleting: false,
            ..Facts::gone()
        }
    }

    fn holding(step: Step) -> Local {
        Local {
            held: Some(Holding {
                attempt: Attempt::FIRST,
                step,
            }),
            gateway_known: true,
            ..Local::default()
        }
    }

    /// Does what an action does to facts and local state, when everything succeeds.
    fn perform(action: &Action, facts: &mut Facts, local: &mut Local) {
        let step = |local: &mut Local, step| {
            local.held = Some(Holding {
                attempt: facts.attempt,
                step,
            });
        };
        match action {
            Action::Wait | Action::Forget => {}
            Action::Admit => step(local, Step::Admitted),
            Action::AddFinalizer => facts.finalizer = true,
            Action::Claim => {
                facts.claimed = true;
                facts.told = Told::NotReady;
            }
            Action::Prepare => step(local, Step::Prepared),
            Action::Register => step(local, Step::Registered),
            Action::Announce => facts.told = Told::Ready,
            Action::Withdraw => facts.told = Told::NotReady,
            Action::CleanUp { .. } => local.held = None,
            Action::RemoveFinalizer => {
                facts.finalizer = false;
                if facts.deleting && !facts.foreign_finalizer {
                    *facts = Facts::gone();
                }
            }
            Action::Finish(_) => {
                facts.ended = true;
                facts.told = Told::NotReady;
            }
            Action::Release(_) => {
                facts.released = true;
                facts.told = Told::NotReady;
            }
        }
    }

    /// Every action until nothing is left to do.
    fn run(facts: &mut Facts, local: &mut Local) -> Vec<Action> {
        let mut done = Vec::new();
        for _ in 0..16 {
            let action = decide(facts, local);
            if matches!(action, Action::Wait | Action::Forget) {
                return done;
            }
            perform(&action, facts, local);
            done.push(action);
        }
        panic!("does not come to rest: {done:?}");
    }

    #[test]
    fn a_run_becomes_ready_finalizer_before_registration_contract_6_1() {
        let (mut facts, mut local) = (
            fresh(),
            Local {
                gateway_known: true,
                ..Local::default()
            },
        );
        assert_eq!(
            run(&mut facts, &mut local),
            [
                Action::Admit,
                Action::AddFinalizer,
                Action::Claim,
                Action::Prepare,
                Action::Register,
                Action::Announce
            ]
        );
    }

    #[test]
    fn nothing_is_announced_before_the_gateway_is_known() {
        let mut local = holding(Step::Registered);
        local.gateway_known = false;
        let facts = Facts {
            finalizer: true,
            claimed: true,
            ..fresh()
        };
        assert_eq!(decide(&facts, &local), Action::Wait);
    }

    #[test]
    fn a_terminal_status_comes_after_the_clean_up_contract_6_2() {
        let ready = || Facts {
            finalizer: true,
            claimed: true,
            told: Told::Ready,
            ..fresh()
        };
        let impatient = Action::CleanUp { patient: false };
        let mut facts = Facts {
            cancelled: true,
            ..ready()
        };
        assert_eq!(
            run(&mut facts, &mut holding(Step::Registered)),
            [
                impatient.clone(),
                Action::Finish(End::Cancelled),
                Action::RemoveFinalizer
            ]
        );
        for expired in [Expired::Lifetime, Expired::Idle] {
            let mut local = holding(Step::Registered);
            local.expired = Some(expired);
            assert_eq!(
                run(&mut ready(), &mut local),
                [
                    impatient.clone(),
                    Action::Finish(End::Expired(expired)),
                    Action::RemoveFinalizer
                ]
            );
        }
    }

    #[test]
    fn a_deleted_run_loses_the_finalizer_last() {
        let mut facts = Facts {
            finalizer: true,
            deleting: true,
            ..fresh()
        };
        assert_eq!(
            run(&mut facts, &mut holding(Step::Prepared)),
            [Action::CleanUp { patient: false }, Action::RemoveFinalizer]
        );
        let mut kept = Facts {
            finalizer: true,
            deleting: true,
            foreign_finalizer: true,
            ..fresh()
        };
        assert_eq!(
            run(&mut kept, &mut holding(Step::Registered)),
            [
                Action::CleanUp { patient: false },
                Action::Finish(End::Deleted),
                Action::RemoveFinalizer
            ]
        );
    }

    #[test]
    fn a_draining_pod_waits_for_calls_and_hands_over() {
        let mut local = Local {
            draining: true,
            ..holding(Step::Registered)
        };
        let mut facts = Facts {
            finalizer: true,
            claimed: true,
            told: Told::Ready,
            ..fresh()
        };
        let done = run(&mut facts, &mut local);
        assert_eq!(
            done[..2],
            [Action::CleanUp { patient: true }, Action::RemoveFinalizer]
        );
        assert!(matches!(&done[2], Action::Release(fault) if fault.reason == "Draining"));
        let unclaimed = decide(
            &fresh(),
            &Local {
                draining: true,
                ..Local::default()
            },
        );
        assert!(matches!(unclaimed, Action::Release(_)));
    }

    #[test]
    fn an_old_fault_does_not_touch_the_next_attempt() {
        let fault = Fault {
            reason: "RegistrationFailed",
            message: "boom".to_owned(),
        };
        let mut local = Local {
            fault: Some((Attempt::FIRST, fault.clone())),
            ..holding(Step::Prepared)
        };
        let mut facts = Facts {
            finalizer: true,
            claimed: true,
            ..fresh()
        };
        assert_eq!(
            run(&mut facts, &mut local),
            [
                Action::CleanUp { patient: false },
                Action::RemoveFinalizer,
                Action::Release(fault)
            ]
        );
        facts = Facts {
            attempt: Attempt::FIRST.next(),
            ..fresh()
        };
        assert_eq!(decide(&facts, &local), Action::Admit);
    }

    #[test]
    fn a_higher_attempt_first_cleans_up_after_the_lower() {
        let mut facts = Facts {
            attempt: Attempt::FIRST.next(),
            finalizer: true,
            ..fresh()
        };
        let done = run(&mut facts, &mut holding(Step::Registered));
        assert_eq!(
            done[..3],
            [Action::CleanUp { patient: false }, Action::Admit, Action::Claim]
        );
    }

    #[test]
    fn another_owners_finalizer_stays() {
        let facts = Facts {
            mine: false,
            finalizer: true,
            ..fresh()
        };
        assert_eq!(
            decide(&facts, &holding(Step::Registered)),
            Action::CleanUp { patient: false }
        );
        assert_eq!(decide(&facts, &Local::default()), Action::Forget);
    }

    #[test]
    fn a_silent_server_takes_ready_back_and_gives_it_again() {
        let mut facts = Facts {
            finalizer: true,
            claimed: true,
            told: Told::Ready,
            ..fresh()
        };
        assert_eq!(run(&mut facts, &mut holding(Step::Silent)), [Action::Withdraw]);
        assert_eq!(
            run(&mut facts, &mut holding(Step::Registered)),
            [Action::Announce]
        );
    }

    fn any_facts() -> impl Strategy<Value = Facts> {
        let told = prop_oneof![Just(Told::NotReady), Just(Told::Ready), Just(Told::Outdated)];
        (any::<[bool; 9]>(), 1..4i32, told).prop_map(|(bits, attempt, told)| Facts {
            mine: bits[0],
            attempt: Attempt::new(attempt).unwrap(),
            released: bits[1],
            ended: bits[2],
            deleting: bits[3],
            cancelled: bits[4],
            finalizer: bits[5],
            foreign_finalizer: bits[6],
            function: bits[7],
            claimed: bits[8],
            told,
        })
    }

    fn any_local() -> impl Strategy<Value = Local> {
        let step = prop_oneof![
            Just(Step::Admitted),
            Just(Step::Prepared),
            Just(Step::Registered),
            Just(Step::Silent)
        ];
        let held = proptest::option::of((1..4i32, step));
        let expired = proptest::option::of(prop_oneof![Just(Expired::Lifetime), Just(Expired::Idle)]);
        (
            held,
            expired,
            proptest::option::of(1..4i32),
            any::<bool>(),
            any::<bool>(),
        )
            .prop_map(|(held, expired, fault, draining, gateway_known)| Local {
                held: held.map(|(attempt, step)| Holding {
                    attempt: Attempt::new(attempt).unwrap(),
                    step,
                }),
                expired,
                fault: fault.map(|attempt| {
                    let fault = Fault {
                        reason: "RegistrationFailed",
                        message: String::new(),
                    };
                    (Attempt::new(attempt).unwrap(), fault)
                }),
                draining,
                gateway_known,
            })
    }

    proptest! {
        #[test]
        fn it_always_comes_to_rest_and_breaks_no_promise(facts in any_facts(), local in any_local()) {
            let (mut facts, mut local) = (facts, local);
            for step in 0..16 {
                let action = decide(&facts, &local);
                match &action {
                    // Every write of an end, of a hand-over and of the finalizer's removal is after the clean-up.
                    Action::Finish(_) | Action::Release(_) | Action::RemoveFinalizer | Action::Forget => {
                        prop_assert!(local.held.is_none());
                    }
                    Action::Announce => {
                        prop_assert!(facts.finalizer && !local.draining && !facts.deleting && !facts.cancelled);
                    }
                    Action::Register => prop_assert!(facts.finalizer && facts.claimed),
                    Action::Wait => {
                        prop_assert!(local.held.is_some(), "waits only for what it holds");
                        return Ok(());
                    }
                    _ => {}
                }
                if let Action::Finish(_) = &action {
                    prop_assert!(!facts.ended, "a terminal phase is never overwritten");
                }
                if action == Action::Forget {
                    return Ok(());
                }
                prop_assert!(facts.mine || matches!(action, Action::CleanUp { .. }), "writes only to its own");
                perform(&action, &mut facts, &mut local);
                prop_assert!(step < 15, "does not come to rest");
            }
        }
    }
}
