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

/// C-6.1: a run becomes ready finalizer before registration.
#[test]
fn a_run_becomes_ready_finalizer_before_registration() {
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

/// C-6.4: the scheduler takes Ready back while nobody hears the Pod; they must not write in turn.
#[test]
fn nothing_is_announced_without_contact() {
    for told in [Told::NotReady, Told::Outdated] {
        let mut facts = Facts {
            finalizer: true,
            claimed: true,
            told,
            ..fresh()
        };
        let mut local = Local {
            isolated: true,
            ..holding(Step::Registered)
        };
        assert_eq!(decide(&facts, &local), Action::Wait);
        local.isolated = false;
        assert_eq!(run(&mut facts, &mut local), [Action::Announce]);
    }
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

/// C-6.2: a terminal status comes after the clean up.
#[test]
fn a_terminal_status_comes_after_the_clean_up() {
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

/// C-7.3: what the server drains is handed over as by a stopping Pod.
#[test]
fn a_draining_server_waits_for_calls_and_hands_over() {
    let fault = Fault::draining("the server says so");
    let mut local = Local {
        fault: Some((Attempt::FIRST, fault.clone())),
        ..holding(Step::Registered)
    };
    let mut facts = Facts {
        finalizer: true,
        claimed: true,
        told: Told::Ready,
        ..fresh()
    };
    assert_eq!(
        run(&mut facts, &mut local),
        [
            Action::CleanUp { patient: true },
            Action::RemoveFinalizer,
            Action::Release(fault)
        ]
    );
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
        any::<bool>(),
    )
        .prop_map(
            |(held, expired, fault, draining, gateway_known, isolated)| Local {
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
                isolated,
            },
        )
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
                    prop_assert!(!local.isolated);
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
