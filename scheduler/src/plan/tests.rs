use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kruntimes_api::{fixtures, quantity::Amount};

use super::*;
use crate::{
    facts::Signs,
    fence::{
        Node,
        Presence::{self, Gone, NotSeen},
        SUSPECT_AFTER,
        tests::{owner, there},
    },
    snapshot::Candidate,
};

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn view(run: &Run, presence: Presence) -> View<'_> {
    View {
        run,
        owner: run.assignment().map(|_| owner(presence)),
        declared: Some(Amounts::from([("runs".to_owned(), Amount::whole(2))])),
        snapshot: Snapshot {
            pods: vec![Candidate::free("pod-a", &[("runs", 2)])],
        },
        now: at(100),
        jitter: 0.5,
    }
}

fn written(plan: Plan) -> (RunStatus, Why) {
    match plan {
        Plan::Write { status, why } => {
            // C-2.2: each condition with a reason and the generation it speaks of.
            for condition in status.conditions.iter().flatten() {
                assert!(!condition.reason.is_empty(), "{condition:?}");
                assert_eq!(condition.observed_generation, Some(1), "{condition:?}");
            }
            (*status, why)
        }
        other => unreachable!("{other:?}"),
    }
}

/// C-2.2
#[test]
fn a_new_run_is_assigned_with_pod_uid_and_attempt() {
    let run = fixtures::run("ns", "n").build();
    let Plan::Bind {
        status, uid, attempt, ..
    } = plan(view(&run, NotSeen))
    else {
        unreachable!()
    };
    assert_eq!((status.phase, attempt), (Some(Phase::Scheduled), Attempt::FIRST));
    assert_eq!(status.assigned_pod.as_deref(), Some("pod-a"));
    assert_eq!(status.assigned_pod_uid.as_deref(), Some(uid.as_str()));
    let scheduled = status
        .conditions
        .as_ref()
        .unwrap()
        .iter()
        .find(|it| it.type_ == SCHEDULED)
        .unwrap();
    assert_eq!(
        (scheduled.status.as_str(), scheduled.observed_generation),
        ("True", Some(1))
    );
}

#[test]
fn the_next_assignment_has_the_next_attempt() {
    let run = fixtures::run("ns", "n").attempt(4).build();
    let Plan::Bind { status, .. } = plan(view(&run, NotSeen)) else {
        unreachable!()
    };
    assert_eq!(status.attempt, Some(5));
}

/// C-2: a Run naming no existing Runtime says so, once.
#[test]
fn a_waiting_run_is_written_once() {
    let mut run = fixtures::run("ns", "n").build();
    let look = |run: &Run, second| {
        plan(View {
            declared: None,
            now: at(second),
            snapshot: Snapshot::default(),
            ..view(run, NotSeen)
        })
    };
    let (status, why) = written(look(&run, 100));
    assert_eq!(why, Why::Waits(Wait::NoRuntime));
    run.status = Some(status);
    assert_eq!(
        look(&run, 130),
        Plan::Later(SAFETY_LOOK),
        "nothing changed, nothing is written"
    );
    assert_eq!(run.condition(SCHEDULED).unwrap().reason, "NoRuntime");
    assert_eq!(run.condition(READY).unwrap().status, "False");
}

/// C-7.1
#[test]
fn more_than_a_pod_has_is_refused_with_the_field() {
    let run = fixtures::run("ns", "n").with(|it| {
        it.spec.resources = serde_json::from_value(serde_json::json!({ "requests": { "runs": 3 } })).unwrap();
    });
    let (status, _) = written(plan(view(&run.build(), NotSeen)));
    assert_eq!(status.phase, Some(Phase::Failed));
    assert!(status.message.unwrap().contains("spec.resources.requests.runs"));
    let completed = status
        .conditions
        .unwrap()
        .into_iter()
        .find(|it| it.type_ == "Completed")
        .unwrap();
    assert_eq!(
        (completed.status.as_str(), completed.reason.as_str()),
        ("True", "NeverFits")
    );
}

/// C-7.1
#[test]
fn a_cancel_before_the_assignment_ends_the_run() {
    let run = fixtures::run("ns", "n").cancelled().build();
    let (status, why) = written(plan(view(&run, NotSeen)));
    assert_eq!((status.phase, why), (Some(Phase::Cancelled), Why::Cancelled));
}

#[test]
fn the_next_attempt_waits_out_its_pause() {
    let run = fixtures::run("ns", "n")
        .attempt(1)
        .with(|it| it.status.as_mut().unwrap().retry_after = Some(MicroTime(at(103))))
        .build();
    assert_eq!(plan(view(&run, NotSeen)), Plan::Later(Duration::from_secs(3)));
    let due = View {
        now: at(103),
        ..view(&run, NotSeen)
    };
    assert!(matches!(plan(due), Plan::Bind { .. }));
}

/// C-7.3: the scheduler that wrote the time had a clock that ran ahead.
#[test]
fn a_pause_that_no_policy_makes_is_not_waited_out() {
    let after = |second| {
        fixtures::run("ns", "n")
            .attempt(1)
            .with(|it| it.status.as_mut().unwrap().retry_after = Some(MicroTime(at(second))))
            .build()
    };
    let longest = Plan::Later(Duration::from_secs(72));
    assert_eq!(plan(view(&after(172), NotSeen)), longest);
    for ahead in [173, 100 + 3600] {
        let run = after(ahead);
        assert!(matches!(plan(view(&run, NotSeen)), Plan::Bind { .. }), "{ahead}");
    }
}

/// C-2.3
#[test]
fn a_pod_that_the_watch_does_not_show_is_read_before_anything_is_taken_away() {
    let run = fixtures::run("ns", "n").ready_on("pod-a").build();
    assert_eq!(
        plan(view(&run, there(false, true))),
        Plan::Later(SUSPECT_AFTER),
        "nobody tells when a heartbeat stays away"
    );
    assert!(matches!(plan(view(&run, NotSeen)), Plan::ConfirmOwner { .. }));
    assert_eq!(
        written(plan(view(&run, Gone))).1,
        Why::Recover(recover::Kind::Recovering)
    );
}

#[test]
fn a_deleted_run_is_released_only_when_its_pod_is_gone() {
    let run = fixtures::run("ns", "n").ready_on("pod-a").deleting().build();
    assert_eq!(plan(view(&run, there(false, true))), Plan::Later(SAFETY_LOOK));
    assert!(matches!(plan(view(&run, NotSeen)), Plan::ConfirmOwner { .. }));
    assert_eq!(plan(view(&run, Gone)), Plan::RemoveFinalizer);
    let ended = fixtures::run("ns", "n")
        .ready_on("pod-a")
        .ended(Phase::Failed, "X")
        .deleting()
        .build();
    assert_eq!(
        plan(view(&ended, there(false, true))),
        Plan::Later(SAFETY_LOOK),
        "it is in no index that the end of the Pod would wake"
    );
    assert_eq!(plan(view(&ended, Gone)), Plan::RemoveFinalizer);
    let unowned = fixtures::run("ns", "n").deleting().build();
    assert_eq!(plan(view(&unowned, NotSeen)), Plan::RemoveFinalizer);
}

#[test]
fn a_deleted_run_without_our_finalizer_is_not_placed() {
    let run = fixtures::run("ns", "n")
        .deleting()
        .with(|it| it.metadata.finalizers = None)
        .build();
    assert_eq!(plan(view(&run, NotSeen)), Plan::Nothing);
}

#[test]
fn a_reservation_whose_time_is_over_does_not_come_back() {
    let run = fixtures::run("ns", "n")
        .attempt(1)
        .with(|it| {
            it.spec.timeout = Some("1m".to_owned());
            it.status.as_mut().unwrap().start_time = Some(MicroTime(at(30)));
        })
        .build();
    let (status, why) = written(plan(view(&run, NotSeen)));
    assert_eq!((status.phase, why), (Some(Phase::Timeout), Why::Lifetime));
}

#[test]
fn failures_are_forgotten_after_ten_minutes_of_service() {
    let run = fixtures::run("ns", "n")
        .ready_on("pod-a")
        .with(|it| it.status.as_mut().unwrap().failed_attempts = Some(3))
        .build();
    let young = View {
        now: at(590),
        ..view(&run, there(false, true))
    };
    assert_eq!(plan(young), Plan::Later(Duration::from_secs(10)));
    let (status, why) = written(plan(View {
        now: at(600),
        ..view(&run, there(false, true))
    }));
    assert_eq!((status.failed_attempts, why), (None, Why::Healthy));
}

fn silent(run: &Run, presence: Presence, seconds: u64) -> View<'_> {
    let mut view = view(run, presence);
    if let Some(owner) = &mut view.owner {
        owner.silence = Duration::from_secs(seconds);
    }
    view
}

/// C-7.3: the route goes, then the Pod, then the assignment; in this order, whatever happens meanwhile.
#[test]
fn a_silent_owner_loses_the_route_then_its_pod_then_the_run() {
    let mut run = fixtures::run("ns", "n").ready_on("pod-a").build();
    let mut hearsay = silent(&run, there(false, true), 30);
    hearsay.owner.as_mut().unwrap().confirmed = false;
    assert!(matches!(plan(hearsay), Plan::ConfirmOwner { .. }));
    let (status, why) = written(plan(silent(&run, there(false, true), 30)));
    assert_eq!(why, Why::Recover(recover::Kind::Recovering));
    assert_eq!(
        (status.owner.clone(), status.assigned_pod.as_deref()),
        (None, Some("pod-a"))
    );
    run.status = Some(status);
    assert!(matches!(
        plan(silent(&run, there(false, true), 30)),
        Plan::DeletePod { .. }
    ));
    assert_eq!(
        plan(silent(&run, there(true, false), 32)),
        Plan::Later(Duration::from_secs(8)),
        "it is asked for, and may still serve"
    );
    let (status, why) = written(plan(silent(&run, there(true, false), 40)));
    assert_eq!(why, Why::Recover(recover::Kind::Retrying));
    assert_eq!((status.assigned_pod, status.assigned_pod_uid), (None, None));
}

/// C-7.3: an evicted Pod stays as an object; it is removed, so that its Runs can go on.
#[test]
fn a_pod_that_has_ended_is_deleted_at_once() {
    let run = fixtures::run("ns", "n").running_on("pod-a").build();
    let evicted = Presence::There(Signs {
        over: true,
        ..Signs::default()
    });
    assert!(matches!(plan(view(&run, evicted)), Plan::DeletePod { .. }));
}

/// C-7.3: a Pod deleted by force from a node that nobody reaches may still serve: only the route goes.
#[test]
fn a_pod_gone_from_an_unreachable_node_keeps_its_runs_for_40_s() {
    let mut run = fixtures::run("ns", "n").ready_on("pod-a").build();
    fn lost(run: &Run, seconds: u64) -> View<'_> {
        let mut view = silent(run, Gone, seconds);
        view.owner.as_mut().unwrap().node = Node::Silent;
        view
    }
    let (status, why) = written(plan(lost(&run, 5)));
    assert_eq!(why, Why::Recover(recover::Kind::Recovering));
    run.status = Some(status);
    assert_eq!(plan(lost(&run, 5)), Plan::Later(Duration::from_secs(35)));
    assert_eq!(
        written(plan(lost(&run, 40))).1,
        Why::Recover(recover::Kind::Retrying)
    );
}

/// C-7.4, scenario 92: the finalizer of a Run whose owner never comes back goes by the same fences.
#[test]
fn a_deleted_run_of_a_silent_owner_is_released() {
    let run = fixtures::run("ns", "n").ready_on("pod-a").deleting().build();
    assert!(matches!(
        plan(silent(&run, there(false, false), 30)),
        Plan::DeletePod { .. }
    ));
    assert_eq!(
        plan(silent(&run, there(true, false), 35)),
        Plan::Later(Duration::from_secs(5))
    );
    assert_eq!(plan(silent(&run, there(true, false), 40)), Plan::RemoveFinalizer);
}
