use kruntimes_api::{fixtures, run::RetryPolicy};
use proptest::prelude::*;

use super::*;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn condition(status: &RunStatus, kind: &str) -> (String, String) {
    let found = status
        .conditions
        .as_ref()
        .unwrap()
        .iter()
        .find(|it| it.type_ == kind)
        .unwrap();
    (found.status.clone(), found.reason.clone())
}

fn says(status: &str, reason: &str) -> (String, String) {
    (status.to_owned(), reason.to_owned())
}

fn after(run: &Run, step: Step) -> Run {
    let mut run = run.clone();
    run.status = Some(step.status);
    run
}

/// C-7.3
#[test]
fn the_route_goes_before_the_assignment() {
    let run = fixtures::run("ns", "n").ready_on("pod-a").build();
    let first = step(&run, Fence::PodGone, at(60), 0.5);
    assert_eq!(first.kind, Kind::Recovering);
    assert_eq!(condition(&first.status, READY), says("False", "Recovering"));
    assert_eq!(first.status.owner, None);
    assert_eq!(
        first.status.assigned_pod.as_deref(),
        Some("pod-a"),
        "still assigned"
    );
    assert_eq!(first.status.attempt, Some(1));

    let second = step(&after(&run, first), Fence::PodGone, at(61), 0.5);
    assert_eq!(second.kind, Kind::Retrying);
    assert_eq!(second.status.phase, Some(Phase::Pending));
    assert_eq!(
        (
            second.status.assigned_pod.as_deref(),
            second.status.assigned_pod_uid.as_deref()
        ),
        (None, None)
    );
    assert_eq!(
        second.status.attempt,
        Some(1),
        "it grows with the next assignment"
    );
    assert_eq!(second.status.failed_attempts, Some(1));
    assert_eq!(second.status.retry_after, Some(MicroTime(at(62))));
    assert!(second.status.endpoint.is_some(), "the URL holds across attempts");
}

#[test]
fn a_pod_that_dies_before_the_claim_costs_nothing() {
    let run = fixtures::run("ns", "n").task().scheduled_on("pod-a").build();
    let step = step(&run, Fence::PodGone, at(1), 0.5);
    assert_eq!(
        (step.kind, step.status.phase),
        (Kind::HandedOver, Some(Phase::Pending))
    );
    assert_eq!(
        (step.status.failed_attempts, step.status.retry_after),
        (None, None)
    );
}

/// C-7.3
#[test]
fn a_drained_hand_over_costs_no_attempt_and_a_failure_does() {
    let released = |reason: &str| {
        fixtures::run("ns", "n")
            .running_on("pod-a")
            .not_ready(reason)
            .with(|it| it.status.as_mut().unwrap().released_attempt = Some(1))
            .build()
    };
    let drained = step(&released("Draining"), Fence::Released, at(1), 0.5);
    assert_eq!(
        (drained.kind, drained.status.failed_attempts),
        (Kind::HandedOver, None)
    );
    for reason in ["RegistrationFailed", "HandlerInvalid", "SourceInvalid"] {
        let failed = step(&released(reason), Fence::Released, at(1), 0.5);
        assert_eq!(
            (failed.kind, failed.status.failed_attempts),
            (Kind::Retrying, Some(1)),
            "{reason}"
        );
        assert!(failed.status.message.unwrap().contains(reason));
    }
}

/// C-7.3, C-6.1: what never was claimed has not failed, whoever says why it came back; but who refuses is
/// not asked again at once.
#[test]
fn what_comes_back_unclaimed_costs_nothing() {
    for (reason, kind, pause) in [
        ("CapacityRefused", Kind::TurnedAway, Some(15)),
        ("Draining", Kind::HandedOver, None),
    ] {
        let run = fixtures::run("ns", "n")
            .scheduled_on("pod-a")
            .not_ready(reason)
            .with(|it| it.status.as_mut().unwrap().released_attempt = Some(1))
            .build();
        let step = step(&run, Fence::Released, at(1), 0.5);
        assert_eq!(
            (step.kind, step.status.failed_attempts, step.status.retry_after),
            (kind, None, pause.map(|it| MicroTime(at(1 + it)))),
            "{reason}"
        );
        assert!(step.status.message.unwrap().contains(reason));
    }
}

/// C-5.7: a server found without function mode after the assignment is a permanent failure.
#[test]
fn a_missing_mode_ends_the_run_at_once() {
    for builder in [
        fixtures::run("ns", "n").scheduled_on("pod-a"),
        fixtures::run("ns", "n").running_on("pod-a"),
    ] {
        let run = builder
            .not_ready("FunctionModeUnsupported")
            .with(|it| it.status.as_mut().unwrap().released_attempt = Some(1))
            .build();
        let step = step(&run, Fence::Released, at(1), 0.5);
        assert_eq!(
            (step.kind, step.status.phase),
            (Kind::Permanent, Some(Phase::Failed))
        );
        assert_eq!(
            condition(&step.status, "Completed"),
            says("True", "FunctionModeUnsupported")
        );
        assert_eq!(step.status.assigned_pod, None);
    }
}

/// C-7.3: the route goes once, and a Run without one has none to lose.
#[test]
fn only_a_route_can_be_taken_away() {
    let ready = fixtures::run("ns", "n").ready_on("pod-a").build();
    let step = unroute(&ready, "the owning Pod sends no heartbeat", at(3)).unwrap();
    assert_eq!(step.kind, Kind::Recovering);
    assert_eq!(step.status.assigned_pod.as_deref(), Some("pod-a"));
    assert_eq!(unroute(&after(&ready, step), "again", at(4)), None);
    assert_eq!(
        unroute(&fixtures::run("ns", "n").running_on("pod-a").build(), "x", at(3)),
        None
    );
}

/// C-2, `retryPolicy`; C-2.2: Completed is True for any end.
#[test]
fn a_spent_budget_ends_the_run_and_says_why() {
    let run = fixtures::run("ns", "n").task().running_on("pod-a").build();
    let step = step(&run, Fence::PodGone, at(7), 0.5);
    assert_eq!(
        (step.kind, step.status.phase),
        (Kind::Exhausted, Some(Phase::Failed))
    );
    assert_eq!(
        condition(&step.status, "Completed"),
        says("True", "RetriesExhausted")
    );
    assert_eq!(
        condition(&step.status, "Succeeded"),
        says("False", "RetriesExhausted")
    );
    assert_eq!(step.status.completion_time, Some(MicroTime(at(7))));
    assert!(step.status.message.unwrap().contains("PodGone"));
}

/// C-7.3
#[test]
fn a_cancelled_run_whose_owner_is_lost_ends_cancelled() {
    let run = fixtures::run("ns", "n").ready_on("pod-a").cancelled().build();
    let first = step(&run, Fence::PodGone, at(1), 0.5);
    let second = step(&after(&run, first), Fence::PodGone, at(2), 0.5);
    assert_eq!(
        (second.kind, second.status.phase),
        (Kind::Cancelled, Some(Phase::Cancelled))
    );
    assert_eq!(condition(&second.status, "Completed"), says("True", "Cancelled"));
}

/// C-2, `retryPolicy`: the count starts anew after 10 min Ready.
#[test]
fn ten_minutes_of_service_begin_a_new_count() {
    let run = fixtures::run("ns", "n")
        .ready_on("pod-a")
        .with(|it| it.status.as_mut().unwrap().failed_attempts = Some(9))
        .build();
    assert_eq!(healthy_in(&run, at(590)), Some(Duration::from_secs(10)));
    let young = after(&run, step(&run, Fence::PodGone, at(590), 0.5));
    assert_eq!(step(&young, Fence::PodGone, at(591), 0.5).kind, Kind::Exhausted);
    let old = after(&run, step(&run, Fence::PodGone, at(600), 0.5));
    let next = step(&old, Fence::PodGone, at(601), 0.5);
    assert_eq!(
        (next.kind, next.status.failed_attempts),
        (Kind::Retrying, Some(1))
    );
}

/// What a reader of C-7.3 and of `retryPolicy` would compute, without conditions and messages.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Model {
    routed: bool,
    assigned: bool,
    failed: i32,
    ended: Option<Phase>,
}

impl Model {
    fn step(self, claimed: bool, costs: bool, cancelled: bool, budget: i32) -> Self {
        if self.routed {
            return Self {
                routed: false,
                ..self
            };
        }
        let gone = Self {
            assigned: false,
            ..self
        };
        if cancelled {
            return Self {
                ended: Some(Phase::Cancelled),
                ..gone
            };
        }
        if !costs || !claimed {
            return gone;
        }
        let failed = self.failed + 1;
        Self {
            failed,
            ended: (failed >= budget).then_some(Phase::Failed),
            ..gone
        }
    }

    fn of(run: &Run) -> Self {
        let status = run.status.as_ref().unwrap();
        Self {
            routed: run.is_ready() || status.owner.is_some(),
            assigned: run.assignment().is_some(),
            failed: status.failed_attempts.unwrap_or_default(),
            ended: Some(run.phase()).filter(|it| it.is_terminal()),
        }
    }
}

proptest! {
    #[test]
    fn it_does_what_the_reference_model_does(
        ready: bool,
        claimed: bool,
        function: bool,
        cancelled: bool,
        released: Option<bool>,
        out: bool,
        failed in 0..12,
        budget in proptest::option::of(1..12),
        jitter in 0.0..1.0,
    ) {
        let builder = fixtures::run("ns", "n").attempt(3);
        let mut builder = match (claimed, ready) {
            (false, _) => builder.scheduled_on("pod-a"),
            (true, false) => builder.running_on("pod-a"),
            (true, true) => builder.ready_on("pod-a"),
        };
        if !function {
            builder = builder.task();
        }
        if cancelled {
            builder = builder.cancelled();
        }
        let drained = released == Some(true);
        let lost = if out { Fence::PodOut } else { Fence::PodGone };
        let mut run = builder.with(|it| {
            it.spec.retry_policy = budget.map(|it| RetryPolicy { max_attempts: Some(it), ..RetryPolicy::default() });
            let status = it.status.as_mut().unwrap();
            status.failed_attempts = Some(failed);
            if released.is_some() {
                status.released_attempt = Some(3);
                // Its owner says why in the same write, and gives up its address.
                status.owner = None;
                status.set(Says {
                    kind: READY, holds: false, reason: if drained { "Draining" } else { "RegistrationFailed" }, message: "",
                }, Some(1), at(0));
            }
        }).build();
        let budget = budget.unwrap_or(if function { 10 } else { 1 });
        let fence = if released.is_some() { Fence::Released } else { lost };
        let mut model = Model::of(&run);
        // At most two steps: the route, then the assignment.
        for _ in 0..2 {
            if !model.assigned {
                break;
            }
            let never_claimed = run.phase() == Phase::Scheduled;
            let costs = !(fence == Fence::Released && drained);
            let next = step(&run, fence, at(30), jitter);
            model = model.step(!never_claimed, costs, cancelled, budget);
            run.status = Some(next.status);
            prop_assert_eq!(Model::of(&run), model);
            prop_assert_eq!(run.attempt().unwrap().get(), 3);
            let status = run.status.as_ref().unwrap();
            prop_assert_eq!(status.assigned_pod.is_some(), status.assigned_pod_uid.is_some());
            if let Some(MicroTime(retry)) = &status.retry_after {
                let pause = retry.duration_since(at(30));
                prop_assert!(pause.as_secs_f64() >= 0.8 && pause.as_secs_f64() <= 72.0, "{pause:?}");
            }
        }
        prop_assert!(!model.assigned);
    }
}
