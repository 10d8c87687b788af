use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kruntimes_api::{fixtures, quantity::Amount};

use super::*;
use crate::snapshot::Candidate;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn view(run: &Run, pod: Pod) -> View<'_> {
    View {
        run,
        pod,
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
        Plan::Write { status, why } => (*status, why),
        other => unreachable!("{other:?}"),
    }
}

#[test]
fn a_new_run_is_assigned_with_pod_uid_and_attempt_c_2_2() {
    let run = fixtures::run("ns", "n").build();
    let Plan::Bind {
        status, uid, attempt, ..
    } = plan(view(&run, Pod::NotSeen))
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
    let Plan::Bind { status, .. } = plan(view(&run, Pod::NotSeen)) else {
        unreachable!()
    };
    assert_eq!(status.attempt, Some(5));
}

#[test]
fn a_waiting_run_is_written_once() {
    let mut run = fixtures::run("ns", "n").build();
    let look = |run: &Run, second| {
        plan(View {
            declared: None,
            now: at(second),
            snapshot: Snapshot::default(),
            ..view(run, Pod::NotSeen)
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

#[test]
fn more_than_a_pod_has_is_refused_with_the_field_c_7_1() {
    let run = fixtures::run("ns", "n").with(|it| {
        it.spec.resources = serde_json::from_value(serde_json::json!({ "requests": { "runs": 3 } })).unwrap();
    });
    let (status, _) = written(plan(view(&run.build(), Pod::NotSeen)));
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

#[test]
fn a_cancel_before_the_assignment_ends_the_run_c_7_1() {
    let run = fixtures::run("ns", "n").cancelled().build();
    let (status, why) = written(plan(view(&run, Pod::NotSeen)));
    assert_eq!((status.phase, why), (Some(Phase::Cancelled), Why::Cancelled));
}

#[test]
fn the_next_attempt_waits_out_its_pause() {
    let run = fixtures::run("ns", "n")
        .attempt(1)
        .with(|it| it.status.as_mut().unwrap().retry_after = Some(MicroTime(at(103))))
        .build();
    assert_eq!(
        plan(view(&run, Pod::NotSeen)),
        Plan::Later(Duration::from_secs(3))
    );
    let due = View {
        now: at(103),
        ..view(&run, Pod::NotSeen)
    };
    assert!(matches!(plan(due), Plan::Bind { .. }));
}

#[test]
fn a_pod_that_the_watch_does_not_show_is_read_before_anything_is_taken_away_c_2_3() {
    let run = fixtures::run("ns", "n").ready_on("pod-a").build();
    assert_eq!(plan(view(&run, Pod::There)), Plan::Nothing);
    assert!(matches!(plan(view(&run, Pod::NotSeen)), Plan::ConfirmPod { .. }));
    assert_eq!(
        written(plan(view(&run, Pod::Gone))).1,
        Why::Recover(recover::Kind::Recovering)
    );
}

#[test]
fn a_deleted_run_is_released_only_when_its_pod_is_gone() {
    let run = fixtures::run("ns", "n").ready_on("pod-a").deleting().build();
    assert_eq!(plan(view(&run, Pod::There)), Plan::Later(SAFETY_LOOK));
    assert!(matches!(plan(view(&run, Pod::NotSeen)), Plan::ConfirmPod { .. }));
    assert_eq!(plan(view(&run, Pod::Gone)), Plan::RemoveFinalizer);
    let ended = fixtures::run("ns", "n")
        .ready_on("pod-a")
        .ended(Phase::Failed, "X")
        .deleting()
        .build();
    assert_eq!(
        plan(view(&ended, Pod::There)),
        Plan::Later(SAFETY_LOOK),
        "it is in no index that the end of the Pod would wake"
    );
    assert_eq!(plan(view(&ended, Pod::Gone)), Plan::RemoveFinalizer);
    let unowned = fixtures::run("ns", "n").deleting().build();
    assert_eq!(plan(view(&unowned, Pod::NotSeen)), Plan::RemoveFinalizer);
}

#[test]
fn a_deleted_run_without_our_finalizer_is_not_placed() {
    let run = fixtures::run("ns", "n")
        .deleting()
        .with(|it| it.metadata.finalizers = None)
        .build();
    assert_eq!(plan(view(&run, Pod::NotSeen)), Plan::Nothing);
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
    let (status, why) = written(plan(view(&run, Pod::NotSeen)));
    assert_eq!((status.phase, why), (Some(Phase::Timeout), Why::Lifetime));
}

#[test]
fn failures_are_forgotten_after_ten_minutes_of_service() {
    let run = fixtures::run("ns", "n")
        .ready_on("pod-a")
        .with(|it| it.status.as_mut().unwrap().failed_attempts = Some(3))
        .build();
    assert_eq!(
        plan(view(&run, Pod::There)),
        Plan::Later(Duration::from_secs(500))
    );
    let (status, why) = written(plan(View {
        now: at(600),
        ..view(&run, Pod::There)
    }));
    assert_eq!((status.failed_attempts, why), (None, Why::Healthy));
}
