//! A check that cannot fail proves nothing: each kind of violation is shown to be caught, and what is
//! allowed is shown to pass.

use super::*;

fn call(end: End) -> Called {
    Called {
        function: "f01".to_owned(),
        invocation: "f01-7".to_owned(),
        sent: 100,
        ended: 110,
        end,
    }
}

fn answer(status: u16, body: &str) -> End {
    End::Answered(Answered {
        status,
        invocation: "f01-7".to_owned(),
        body: body.to_owned(),
    })
}

fn success() -> End {
    answer(200, r#"{"function":"f01","invocation":"f01-7"}"#)
}

fn problem(status: u16, dispatched: &str) -> End {
    answer(
        status,
        &format!(r#"{{"reason":"Some","dispatched":"{dispatched}","detail":""}}"#),
    )
}

fn record() -> Recorded {
    Recorded {
        function: "f01".to_owned(),
        invocation: "f01-7".to_owned(),
        attempt: 1,
        at: 105,
    }
}

/// The kinds that one call with these records is found guilty of.
fn kinds(end: End, records: &[Recorded]) -> Vec<Kind> {
    let verdict = check(&[call(end)], records);
    verdict.violations.iter().map(|it| it.kind).collect()
}

#[test]
fn what_is_promised_passes() {
    assert_eq!(kinds(success(), &[record()]), []);
    assert_eq!(kinds(problem(503, "no"), &[]), []);
    for ran in [vec![], vec![record()]] {
        assert_eq!(
            kinds(problem(500, "yes"), &ran),
            [],
            "it may have died before it could tell"
        );
        assert_eq!(kinds(problem(502, "unknown"), &ran), []);
        assert_eq!(kinds(End::Broken("reset".to_owned()), &ran), []);
    }
    assert_eq!(kinds(End::NotSent("refused".to_owned()), &[]), []);
}

#[test]
fn a_call_that_ran_twice_is_caught_however_it_ended() {
    let twice = [record(), record()];
    for end in [
        success(),
        problem(500, "yes"),
        problem(502, "unknown"),
        End::Broken(String::new()),
    ] {
        assert_eq!(kinds(end, &twice), [Kind::Double]);
    }
}

#[test]
fn a_call_that_another_function_ran_or_answered_is_caught() {
    let other = Recorded {
        function: "f02".to_owned(),
        ..record()
    };
    assert_eq!(kinds(End::Broken(String::new()), &[other]), [Kind::WrongFunction]);
    for body in [
        r#"{"function":"f02","invocation":"f01-7"}"#,
        r#"{"function":"f01","invocation":"f01-6"}"#,
        "null",
        "",
    ] {
        assert_eq!(
            kinds(answer(200, body), &[record()]),
            [Kind::WrongFunction],
            "{body}"
        );
    }
    let under_another_id = End::Answered(Answered {
        status: 200,
        invocation: "f01-6".to_owned(),
        body: r#"{"function":"f01","invocation":"f01-7"}"#.to_owned(),
    });
    assert_eq!(kinds(under_another_id, &[record()]), [Kind::WrongFunction]);
}

#[test]
fn an_execution_that_nobody_asked_for_is_caught() {
    let verdict = check(&[], &[record()]);
    assert_eq!(verdict.count(Kind::WrongFunction), 1);
}

#[test]
fn an_answer_that_the_log_contradicts_is_caught() {
    assert_eq!(kinds(success(), &[]), [Kind::Disagreement], "200 and not run");
    assert_eq!(kinds(problem(503, "no"), &[record()]), [Kind::Disagreement]);
    assert_eq!(
        kinds(End::NotSent(String::new()), &[record()]),
        [Kind::Disagreement]
    );
}

#[test]
fn an_error_that_does_not_say_whether_it_ran_is_caught() {
    for body in ["", "<html>", "{}", r#"{"reason":"Some","dispatched":"perhaps"}"#] {
        assert_eq!(kinds(answer(502, body), &[]), [Kind::Disagreement], "{body}");
    }
}

#[test]
fn an_attempt_that_goes_on_beside_the_next_is_caught() {
    let ran = |attempt, at, number: u64| Recorded {
        invocation: format!("f01-{number}"),
        attempt,
        at,
        ..record()
    };
    let calls: Vec<Called> = (1..=3)
        .map(|number| Called {
            invocation: format!("f01-{number}"),
            ..call(End::Broken(String::new()))
        })
        .collect();
    let kinds = |late| {
        let records = [ran(1, 0, 1), ran(3, 1_000, 2), ran(2, late, 3)];
        check(&calls, &records).violations
    };
    assert_eq!(kinds(1_000 + OVERLAP), []);
    let caught = kinds(1_001 + OVERLAP);
    assert_eq!(caught.len(), 1);
    assert_eq!(
        (caught[0].kind, caught[0].invocation.as_str()),
        (Kind::LateAttempt, "f01-3")
    );
}

#[test]
fn ends_are_counted_by_what_the_caller_saw() {
    let calls = [
        call(success()),
        call(problem(503, "no")),
        call(problem(502, "unknown")),
        call(End::Broken(String::new())),
        call(End::NotSent(String::new())),
    ];
    let verdict = check(&calls, &[]);
    let ends: Vec<(&str, usize)> = verdict
        .ends
        .iter()
        .map(|(word, count)| (word.as_str(), *count))
        .collect();
    assert_eq!(
        ends,
        [
            ("200", 1),
            ("502 Some", 1),
            ("503 Some", 1),
            ("no answer", 1),
            ("not sent", 1)
        ]
    );
    assert_eq!(verdict.unknown, 2);
}
