//! Authorization against a scripted API server (C-3.6; bug scenarios 51, 53, 56, 59).

mod common;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{Api, Script, bearer, breaking, jwt, pass, question, skip, until};
use kruntimes_authz::{
    Authorizer, Caps, Limits, NoObserver, Observer, Verdict, review::DEADLINE, turns::SHARE,
};
use tokio::task::JoinSet;

/// The wall clock of tests that care: seconds since the epoch.
const NOW: f64 = 1_800_000_000.0;
const FRESH: Verdict = Verdict::Allowed { cached: false };
const CACHED: Verdict = Verdict::Allowed { cached: true };

/// C-3.6: only `allowed` passes; no answer is no denial.
#[tokio::test]
async fn each_answer_of_the_api_server_has_its_verdict() {
    let api = Api::start().await;
    let authorizer = api.authorizer();
    for (script, verdict) in [
        (Script::Allow, FRESH),
        (Script::Deny, Verdict::Denied),
        (Script::Status(401), Verdict::Rejected),
        (Script::Status(403), Verdict::Denied),
        (Script::Status(404), Verdict::Unavailable),
        (Script::Status(429), Verdict::Unavailable),
        (Script::Status(500), Verdict::Unavailable),
        (Script::Status(503), Verdict::Unavailable),
        (Script::Garbage, Verdict::Unavailable),
    ] {
        let token = format!("token-{script:?}").replace(['(', ')'], "");
        api.say(&token, script);
        let got = authorizer.authorize(&bearer(&token), &question("f")).await;
        assert_eq!(got, verdict, "{script:?}");
    }
    let attributes = &api.bodies()[0]["spec"]["resourceAttributes"];
    assert_eq!(attributes["namespace"], "team");
    assert_eq!(attributes["name"], "f");
}

/// C-3.6
#[tokio::test]
async fn an_api_server_that_is_gone_is_no_refusal() {
    let config = {
        let api = Api::start().await;
        let config = api.config();
        drop(api);
        config
    };
    let authorizer = Authorizer::new(&config, Limits::default(), NoObserver).expect("authorizer");
    let verdict = authorizer.authorize(&bearer("t"), &question("f")).await;
    assert_eq!(verdict, Verdict::Unavailable);
}

/// C-3.6
#[tokio::test]
async fn an_api_server_that_is_silent_is_no_refusal() {
    let api = Api::start().await;
    let authorizer = api.authorizer();
    api.say("t", Script::Silence);
    tokio::time::pause();
    // The paused clock jumps to the deadline as soon as nothing else can happen.
    let verdict = authorizer.authorize(&bearer("t"), &question("f")).await;
    assert_eq!(verdict, Verdict::Unavailable);
}

/// C-3.6: a review that is on its way when its connection breaks is sent again, once.
#[tokio::test]
async fn a_broken_connection_is_no_answer_and_tried_again_once() {
    for (breaks, verdict) in [(1, FRESH), (2, Verdict::Unavailable)] {
        let (config, _server) = breaking(breaks).await;
        let authorizer = Authorizer::new(&config, Limits::default(), NoObserver).expect("authorizer");
        let got = authorizer.authorize(&bearer("t"), &question("f")).await;
        assert_eq!(got, verdict, "{breaks}");
    }
}

/// C-3.6: one review in flight per key.
#[tokio::test]
async fn a_hundred_callers_make_one_review() {
    let api = Api::start().await;
    let authorizer = api.authorizer();
    api.say("t", Script::Allow);
    api.close();
    let mut callers = JoinSet::new();
    for _ in 0..100 {
        let authorizer = authorizer.clone();
        callers.spawn(async move { authorizer.authorize(&bearer("t"), &question("f")).await });
    }
    while api.reviews() == 0 {
        tokio::task::yield_now().await;
    }
    api.open();
    let verdicts = callers.join_all().await;
    assert!(verdicts.iter().all(|v| matches!(v, Verdict::Allowed { .. })));
    let fresh = verdicts.iter().filter(|verdict| **verdict == FRESH).count();
    assert_eq!((fresh, api.reviews()), (1, 1));
}

/// C-3.6
#[tokio::test]
async fn a_caller_who_hangs_up_does_not_take_the_answer_of_others_along() {
    let api = Api::start().await;
    let authorizer = api.authorizer();
    api.say("t", Script::Allow);
    api.close();
    let call =
        |authorizer: Authorizer| async move { authorizer.authorize(&bearer("t"), &question("f")).await };
    let mut callers = JoinSet::new();
    let first = callers.spawn(call(authorizer.clone()));
    while api.reviews() == 0 {
        tokio::task::yield_now().await;
    }
    callers.spawn(call(authorizer.clone()));
    tokio::task::yield_now().await;
    first.abort();
    api.open();
    let mut verdicts = Vec::new();
    while let Some(ended) = callers.join_next().await {
        verdicts.extend(ended);
    }
    assert!(matches!(verdicts[..], [Verdict::Allowed { .. }]), "{verdicts:?}");
}

/// C-3.6: no sliding expiry, 5 s for opaque tokens; scenario 51.
#[tokio::test]
async fn an_allowance_ends_after_its_cap_however_often_it_is_used() {
    let api = Api::start().await;
    let limits = Limits {
        caps: Caps::new(Duration::from_secs(10), Duration::from_secs(5)).expect("in range"),
        ..Limits::default()
    };
    let authorizer = Authorizer::new(&api.config(), limits, NoObserver).expect("authorizer");
    let (token, run) = (bearer("opaque"), question("f"));
    let ask = || authorizer.authorize(&token, &run);
    api.say("opaque", Script::Allow);
    assert_eq!(ask().await, FRESH);
    // The binding is removed now, and it takes the API server a while to say so.
    api.say("opaque", Script::Deny);
    api.close();
    tokio::time::pause();
    for _ in 0..24 {
        pass(Duration::from_millis(200)).await;
        assert_eq!(ask().await, CACHED, "no call prolongs it");
    }
    pass(Duration::from_millis(200)).await;
    tokio::time::resume();
    assert_eq!(authorizer.renewing(), 1);
    let (verdict, ()) = tokio::join!(ask(), async { api.open() });
    assert_eq!(verdict, Verdict::Denied);
    assert_eq!(
        api.reviews(),
        2,
        "the call waited for the renewal and made no review of its own"
    );
}

/// C-3.6: who calls often seldom waits for a review; one is made for all that use the answer.
#[tokio::test]
async fn an_allowance_in_use_is_renewed_before_it_ends() {
    let api = Api::start().await;
    let authorizer = api.authorizer();
    let (token, run) = (bearer("t"), question("f"));
    let ask = || authorizer.authorize(&token, &run);
    api.say("t", Script::Allow);
    assert_eq!(ask().await, FRESH);
    for renewals in 1..=3 {
        skip(Duration::from_millis(3_700)).await;
        assert_eq!((ask().await, api.reviews()), (CACHED, renewals), "not due yet");
        skip(Duration::from_millis(100)).await;
        api.close();
        for _ in 0..100 {
            assert_eq!((ask().await, authorizer.renewing()), (CACHED, 1));
        }
        api.open();
        until(|| authorizer.renewing() == 0).await;
        assert_eq!(api.reviews(), renewals + 1);
    }
    // Nobody calls: nobody asks, and the answer ends.
    skip(Duration::from_secs(5)).await;
    assert_eq!((ask().await, api.reviews()), (FRESH, 5));
}

/// C-3.6: who waits for a renewal that fails has the time of its own for an answer.
#[tokio::test]
async fn who_joins_a_renewal_that_fails_asks_itself() {
    let api = Api::start().await;
    let authorizer = api.authorizer();
    let (token, run) = (bearer("t"), question("f"));
    let ask = || authorizer.authorize(&token, &run);
    api.say("t", Script::Allow);
    assert_eq!(ask().await, FRESH);
    api.close();
    tokio::time::pause();
    pass(Duration::from_millis(4_500)).await;
    assert_eq!(ask().await, CACHED);
    pass(Duration::from_millis(600)).await;
    tokio::time::resume();
    assert_eq!(authorizer.renewing(), 1);
    let meanwhile = async {
        until(|| api.reviews() == 2).await;
        // Both wait for the one review; it fails, and the next one is answered.
        api.say_once("t", Script::Status(503));
        api.open();
    };
    let (verdict, ()) = tokio::join!(ask(), meanwhile);
    assert_eq!((verdict, api.reviews()), (FRESH, 3));
}

/// Each renewal holds a token: there are few at once, and who gets none is answered all the same.
#[tokio::test]
async fn few_answers_are_renewed_at_once() {
    let api = Api::start().await;
    // Long, so that asking them all for the first time makes no difference.
    let caps = Caps::new(Duration::from_secs(30), Duration::from_secs(30)).expect("in range");
    let limits = Limits {
        caps,
        ..Limits::default()
    };
    let authorizer = Authorizer::new(&api.config(), limits, NoObserver).expect("authorizer");
    let token = bearer("t");
    api.say("t", Script::Allow);
    let runs: Vec<_> = (0..300).map(|number| question(&format!("f{number}"))).collect();
    for run in &runs {
        assert_eq!(authorizer.authorize(&token, run).await, FRESH);
    }
    skip(Duration::from_secs(23)).await;
    api.close();
    for run in &runs {
        assert_eq!(authorizer.authorize(&token, run).await, CACHED);
    }
    assert_eq!(authorizer.renewing(), 256);
}

/// C-3.6: errors are no answer and make no difference; a refusal counts at once.
#[tokio::test]
async fn what_a_renewal_says_counts_and_silence_does_not() {
    let api = Api::start().await;
    let authorizer = api.authorizer();
    let (token, run) = (bearer("t"), question("f"));
    let ask = || authorizer.authorize(&token, &run);
    api.say("t", Script::Allow);
    assert_eq!(ask().await, FRESH);
    api.say("t", Script::Status(503));
    skip(Duration::from_millis(4_000)).await;
    assert_eq!(ask().await, CACHED);
    until(|| authorizer.renewing() == 0).await;
    for _ in 0..10 {
        assert_eq!(ask().await, CACHED, "as before");
    }
    assert_eq!(
        (authorizer.renewing(), api.reviews()),
        (0, 2),
        "asked once, not with each call"
    );
    skip(Duration::from_millis(1_000)).await;
    assert_eq!(
        ask().await,
        Verdict::Unavailable,
        "no longer than it would have been kept"
    );

    api.say("t", Script::Allow);
    assert_eq!(ask().await, FRESH);
    api.say("t", Script::Deny);
    skip(Duration::from_millis(4_000)).await;
    assert_eq!(ask().await, CACHED);
    until(|| authorizer.renewing() == 0).await;
    assert_eq!(ask().await, Verdict::Denied);
}

/// C-3.6: allowed answers of a JWT are kept for 10 s, never beyond its `exp`.
#[tokio::test]
async fn an_allowance_ends_with_its_token() {
    let api = Api::start().await;
    let authorizer =
        Authorizer::with_clock(&api.config(), Limits::default(), NoObserver, || NOW).expect("authorizer");
    for (lives, kept) in [(3_600.0, 10_000), (3.0, 3_000)] {
        let token = jwt(NOW + lives);
        let (caller, run) = (bearer(&token), question("f"));
        let ask = || authorizer.authorize(&caller, &run);
        api.say(&token, Script::Allow);
        assert_eq!(ask().await, FRESH);
        tokio::time::pause();
        // Not yet due to be renewed.
        pass(Duration::from_millis(kept / 2)).await;
        assert_eq!(ask().await, CACHED, "{lives}");
        pass(Duration::from_millis(kept / 2)).await;
        tokio::time::resume();
        assert_eq!(ask().await, FRESH, "{lives}: asked again");
    }
}

/// C-3.6: the decision is the API server's and the clock of the cache is monotonic; scenario 53.
#[tokio::test]
async fn a_wrong_clock_prolongs_nothing_and_refuses_nobody() {
    let api = Api::start().await;
    let wall = Arc::new(Mutex::new(NOW));
    let read = Arc::clone(&wall);
    let clock = move || *read.lock().expect("lock");
    let authorizer =
        Authorizer::with_clock(&api.config(), Limits::default(), NoObserver, clock).expect("authorizer");
    // Two minutes fast: a fresh token looks over. The API server is asked each time, and it says yes.
    let token = jwt(NOW + 60.0);
    api.say(&token, Script::Allow);
    *wall.lock().expect("lock") = NOW + 120.0;
    for _ in 0..2 {
        assert_eq!(authorizer.authorize(&bearer(&token), &question("f")).await, FRESH);
    }
    // Two minutes slow, and back by an hour while an answer is kept: it is kept no longer for that.
    for (name, skew) in [("slow", -120.0), ("right", 0.0)] {
        *wall.lock().expect("lock") = NOW + skew;
        let token = jwt(NOW + 3_600.0);
        api.say(&token, Script::Allow);
        let (caller, run) = (bearer(&token), question(name));
        assert_eq!(authorizer.authorize(&caller, &run).await, FRESH);
        *wall.lock().expect("lock") = NOW - 3_600.0;
        api.say(&token, Script::Deny);
        tokio::time::pause();
        pass(Duration::from_secs(9)).await;
        assert_eq!(authorizer.authorize(&caller, &run).await, CACHED, "{name}");
        pass(Duration::from_secs(1)).await;
        tokio::time::resume();
        assert_eq!(
            authorizer.authorize(&caller, &run).await,
            Verdict::Denied,
            "{name}"
        );
    }
}

/// C-3.6: denials at most 2 s, 401s never longer.
#[tokio::test]
async fn a_refusal_is_kept_for_two_seconds_at_most() {
    let api = Api::start().await;
    let authorizer = api.authorizer();
    for (token, script, verdict) in [
        ("denied", Script::Deny, Verdict::Denied),
        ("rejected", Script::Status(401), Verdict::Rejected),
    ] {
        let (caller, run) = (bearer(token), question("f"));
        let ask = || authorizer.authorize(&caller, &run);
        let before = api.reviews();
        api.say(token, script);
        assert_eq!(ask().await, verdict);
        api.say(token, Script::Allow);
        tokio::time::pause();
        pass(Duration::from_millis(1_500)).await;
        assert_eq!(ask().await, verdict, "kept");
        assert_eq!(api.reviews(), before + 1);
        pass(Duration::from_millis(500)).await;
        tokio::time::resume();
        assert_eq!(ask().await, FRESH, "asked again");
    }
}

/// C-3.6: errors never.
#[tokio::test]
async fn errors_are_never_kept() {
    let api = Api::start().await;
    let authorizer = api.authorizer();
    api.say("t", Script::Status(503));
    for reviews in 1..=3 {
        let verdict = authorizer.authorize(&bearer("t"), &question("f")).await;
        assert_eq!((verdict, api.reviews()), (Verdict::Unavailable, reviews));
    }
    api.say("t", Script::Allow);
    assert_eq!(authorizer.authorize(&bearer("t"), &question("f")).await, FRESH);
}

/// C-3.6: the key is token, verb, namespace, name and UID; scenario 59.
#[tokio::test]
async fn tokens_and_questions_do_not_mix() {
    let api = Api::start().await;
    let authorizer = api.authorizer();
    api.say("token-a", Script::Allow);
    api.say("token-b", Script::Deny);
    let (a, b) = (bearer("token-a"), bearer("token-b"));
    let run = question("f");
    for _ in 0..1_000 {
        let verdict = authorizer.authorize(&a, &run).await;
        assert!(matches!(verdict, Verdict::Allowed { .. }));
        assert_eq!(authorizer.authorize(&b, &run).await, Verdict::Denied);
    }
    // Another verb, namespace, name or UID is another question.
    let mut others = [run.clone(), run.clone(), run.clone(), run.clone()];
    others[0].verb = "update";
    others[1].namespace = "other".into();
    others[2].name = "g".into();
    others[3].uid.to_mut().push('2');
    for other in &others {
        assert_eq!(authorizer.authorize(&a, other).await, FRESH, "{other:?}");
    }
    let mut every = run.clone();
    every.name.to_mut().clear();
    let verdict = authorizer.authorize(&a, &every).await;
    assert_eq!(verdict, Verdict::Denied, "an empty name would mean all Runs");
}

/// C-3.6: bounded concurrent reviews, callers queue up to 2 s; those of another namespace do not wait for them.
#[tokio::test]
async fn too_many_reviews_at_once_wait_and_then_are_unavailable() {
    let api = Api::start().await;
    let authorizer = api.authorizer();
    api.say("t", Script::Silence);
    let mut callers = JoinSet::new();
    for number in 0..SHARE + 1 {
        let authorizer = authorizer.clone();
        let question = question(&format!("f{number}"));
        callers.spawn(async move { authorizer.authorize(&bearer("t"), &question).await });
    }
    while api.reviews() < SHARE {
        tokio::task::yield_now().await;
    }
    api.say("other", Script::Allow);
    let mut elsewhere = question("f");
    elsewhere.namespace = "other".into();
    assert_eq!(authorizer.authorize(&bearer("other"), &elsewhere).await, FRESH);
    tokio::time::pause();
    pass(DEADLINE / 2).await;
    assert_eq!(api.reviews(), SHARE + 1, "the last one waits for its turn");
    let verdicts = callers.join_all().await;
    assert!(verdicts.iter().all(|verdict| *verdict == Verdict::Unavailable));
}

/// C-3.6: the pool carries no identity of its own.
#[tokio::test]
async fn a_pool_that_is_somebody_is_refused_at_start() {
    let api = Api::start().await;
    let made_up = "kruntimes-made-up-token-that-must-be-refused";
    assert!(api.authorizer().verify_pool_is_anonymous().await.is_ok());
    for script in [Script::Allow, Script::Deny, Script::Status(403)] {
        api.say(made_up, script);
        let error = api
            .authorizer()
            .verify_pool_is_anonymous()
            .await
            .expect_err("an identity answers");
        assert!(error.to_string().contains("client certificate"), "{error}");
    }
    // While the API server does not answer, the check goes on.
    api.say(made_up, Script::Status(503));
    let authorizer = api.authorizer();
    let before = api.reviews();
    let mut check = JoinSet::new();
    check.spawn(async move { authorizer.verify_pool_is_anonymous().await });
    while api.reviews() == before {
        tokio::task::yield_now().await;
    }
    api.say(made_up, Script::Status(401));
    let checked = check.join_next().await.expect("one").expect("no panic");
    assert_eq!(checked, Ok(()));
}

/// C-3.14; scenario 59: allows and denials are counted apart.
#[tokio::test]
async fn results_and_reviews_are_counted_apart() {
    #[derive(Default)]
    struct Seen(Mutex<(Vec<(&'static str, bool)>, usize)>);
    struct Recorder(Arc<Seen>);
    impl Observer for Recorder {
        fn authorized(&self, result: &'static str, cached: bool) {
            self.0.0.lock().expect("lock").0.push((result, cached));
        }
        fn reviewed(&self, _took: Duration) {
            self.0.0.lock().expect("lock").1 += 1;
        }
    }
    let api = Api::start().await;
    api.say("good", Script::Allow);
    api.say("bad", Script::Deny);
    let seen = Arc::new(Seen::default());
    let recorder = Recorder(Arc::clone(&seen));
    let authorizer = Authorizer::new(&api.config(), Limits::default(), recorder).expect("authorizer");
    for token in ["good", "good", "bad", "bad"] {
        authorizer.authorize(&bearer(token), &question("f")).await;
    }
    let (results, reviews) = &*seen.0.lock().expect("lock");
    assert_eq!(
        results[..],
        [
            ("allowed", false),
            ("allowed", true),
            ("denied", false),
            ("denied", true)
        ]
    );
    assert_eq!(*reviews, 2);
}
