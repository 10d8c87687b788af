use std::sync::Mutex;

use http::{HeaderMap, HeaderValue, Method};
use kruntimes_proto::failure::Dispatched;

use super::*;
use crate::{
    hop::Answer,
    request::{Head, Request, Timeouts, parse},
    routes::{
        Next, NotReady,
        table::tests::{entry, ready},
    },
};

/// Answers in order; the last answer stays.
struct Fakes {
    found: Mutex<Vec<Result<Entry, Miss>>>,
    verdict: Verdict,
    hops: Mutex<Vec<Result<&'static str, HopError>>>,
    sent_to: Mutex<Vec<i32>>,
    reviews: Mutex<usize>,
}

fn next<T: Clone>(answers: &Mutex<Vec<T>>) -> T {
    let mut answers = answers.lock().unwrap();
    if answers.len() > 1 {
        answers.remove(0)
    } else {
        answers[0].clone()
    }
}

impl Routes for Arc<Fakes> {
    fn find(&self, _uid: kruntimes_api::keys::RunUid) -> Result<Arc<Entry>, Miss> {
        next(&self.found).map(Arc::new)
    }

    async fn appear(&self, uid: kruntimes_api::keys::RunUid) -> Result<Arc<Entry>, Miss> {
        self.find(uid)
    }

    async fn moved(&self, uid: kruntimes_api::keys::RunUid, wait: Wait<'_>) -> Option<Arc<Entry>> {
        let entry = self.find(uid).ok()?;
        (wait.next(&entry, Instant::now()) == Next::Go).then_some(entry)
    }
}

impl Authorize for Arc<Fakes> {
    async fn authorize(&self, _bearer: &Bearer, verb: &'static str, key: &RunKey) -> Verdict {
        assert_eq!((verb, key.name.as_str()), ("get", "hello"));
        *self.reviews.lock().unwrap() += 1;
        self.verdict
    }
}

impl Hop for Arc<Fakes> {
    async fn call(&self, call: Call<'_>) -> Result<Answer, HopError> {
        self.sent_to.lock().unwrap().push(call.route.attempt.get());
        let body = next(&self.hops)?;
        let output = Output {
            body: body.into(),
            content_type: "x/y".into(),
            outputs: Default::default(),
        };
        Ok(Answer {
            output,
            handler: Some(Duration::from_micros(7)),
        })
    }
}

type Faked = Invoke<Arc<Fakes>, Arc<Fakes>, Arc<Fakes>>;

fn path(fakes: Fakes) -> (Arc<Fakes>, Faked) {
    let fakes = Arc::new(fakes);
    let invoke = Invoke {
        routes: Arc::clone(&fakes),
        authorizer: Arc::clone(&fakes),
        admission: Admission::new(1, 1),
        hop: Arc::clone(&fakes),
        questions: Questions::default(),
        handover: Duration::from_secs(3),
    };
    (fakes, invoke)
}

fn fakes(found: Vec<Result<Entry, Miss>>, hops: Vec<Result<&'static str, HopError>>) -> Fakes {
    Fakes {
        found: Mutex::new(found),
        verdict: Verdict::Allowed { cached: true },
        hops: Mutex::new(hops),
        sent_to: Mutex::default(),
        reviews: Mutex::default(),
    }
}

fn call(target: &str) -> Invocation {
    let mut headers = HeaderMap::new();
    headers.insert("authorization", HeaderValue::from_static("Bearer t"));
    let head = Head {
        method: &Method::POST,
        target: target.as_bytes(),
        headers: &headers,
        raw: None,
        no_body: true,
    };
    let timeouts = Timeouts {
        default: Duration::from_secs(30),
        max: Duration::from_secs(300),
    };
    match parse(&head, timeouts).unwrap() {
        Request::Invoke(call) => call,
        other => panic!("{other:?}"),
    }
}

fn good_call() -> Invocation {
    call("/v1/namespaces/demo/runtimes/python/functions/2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6:invoke")
}

async fn run(fakes: Fakes) -> (Arc<Fakes>, Result<Output, InvokeError>) {
    let (fakes, invoke) = path(fakes);
    let mut timing = Timing::default();
    let call = good_call();
    let result = match invoke.open(&call, Instant::now(), &mut timing).await {
        Err(error) => Err(error),
        Ok(ticket) => {
            let now = Timestamp::UNIX_EPOCH;
            invoke
                .send(&call, &ticket, Bytes::new(), Instant::now(), || now, &mut timing)
                .await
        }
    };
    (fakes, result)
}

fn reason(result: Result<Output, InvokeError>) -> &'static str {
    result.unwrap_err().row().reason
}

fn stale() -> HopError {
    HopError::Answered(Failure::new(Reason::StaleRoute, "not mine"))
}

/// C-3.7
#[tokio::test]
async fn a_call_reaches_its_owner_once() {
    let (fakes, result) = run(fakes(vec![Ok(ready(2, "p"))], vec![Ok("out")])).await;
    assert_eq!(&result.unwrap().body[..], b"out");
    assert_eq!(*fakes.sent_to.lock().unwrap(), [2]);
}

/// C-3.5
#[tokio::test]
async fn what_does_not_belong_together_is_unknown_and_reviewed_by_nobody() {
    let uid = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";
    for target in [
        format!("/v1/namespaces/other/runtimes/python/functions/{uid}:invoke"),
        format!("/v1/namespaces/demo/runtimes/node/functions/{uid}:invoke"),
    ] {
        let (fakes, invoke) = path(fakes(vec![Ok(ready(1, "p"))], vec![Ok("out")]));
        let error = invoke
            .open(&call(&target), Instant::now(), &mut Timing::default())
            .await
            .unwrap_err();
        assert_eq!(error, InvokeError::NoSuchFunction);
        assert_eq!(*fakes.reviews.lock().unwrap(), 0);
    }
}

/// C-3.5: authorize comes before ready.
#[tokio::test]
async fn a_state_is_told_only_to_those_who_may_know() {
    for state in [
        State::NotReady(NotReady::Recovering),
        State::Ended {
            phase: "Failed".into(),
            reason: "x".into(),
        },
    ] {
        let mut denied = fakes(vec![Ok(entry(1, state.clone()))], vec![Ok("out")]);
        denied.verdict = Verdict::Denied;
        assert_eq!(reason(run(denied).await.1), "PermissionDenied");
        let told = reason(run(fakes(vec![Ok(entry(1, state))], vec![Ok("out")])).await.1);
        assert!(matches!(told, "Recovering" | "FunctionEnded"), "{told}");
    }
}

/// C-3.5
#[tokio::test]
async fn no_verdict_is_never_taken_for_a_denial() {
    for (verdict, expected) in [
        (Verdict::Denied, (403, "PermissionDenied")),
        (Verdict::Rejected, (401, "Unauthenticated")),
        (Verdict::Unavailable, (503, "AuthorizationUnavailable")),
    ] {
        let mut fakes = fakes(vec![Ok(ready(1, "p"))], vec![Ok("out")]);
        fakes.verdict = verdict;
        let row = run(fakes).await.1.unwrap_err().row();
        assert_eq!((row.status, row.reason), expected);
    }
}

/// C-3.5
#[tokio::test]
async fn a_uid_that_appears_while_waiting_is_called() {
    let (_, result) = run(fakes(
        vec![Err(Miss::Unknown), Ok(ready(1, "p"))],
        vec![Ok("out")],
    ))
    .await;
    assert!(result.is_ok());
    assert_eq!(
        reason(run(fakes(vec![Err(Miss::Unknown)], vec![Ok("out")])).await.1),
        "NoSuchFunction"
    );
    assert_eq!(
        reason(run(fakes(vec![Err(Miss::NotListed)], vec![Ok("out")])).await.1),
        "Starting"
    );
}

/// C-3.7; scenario 20.
#[tokio::test]
async fn a_second_try_only_if_nothing_started_and_the_route_moved() {
    let (old, new) = (Ok(ready(1, "p1")), Ok(ready(2, "p2")));
    let draining = HopError::Answered(Failure::new(Reason::Draining, "not mine for long"));
    for error in [HopError::NotSent("x".into()), stale(), draining] {
        let moved = fakes(
            vec![old.clone(), new.clone()],
            vec![Err(error.clone()), Ok("out")],
        );
        let (seen, result) = run(moved).await;
        assert_eq!((*seen.sent_to.lock().unwrap()).as_slice(), [1, 2]);
        assert!(result.is_ok());
        let (seen, result) = run(fakes(vec![old.clone()], vec![Err(error.clone()), Ok("out")])).await;
        assert_eq!(
            (*seen.sent_to.lock().unwrap()).as_slice(),
            [1],
            "the route has not moved"
        );
        assert_eq!(result.unwrap_err().row().dispatched, Dispatched::No);
        let (seen, _) = run(fakes(vec![old.clone(), new.clone()], vec![Err(error)])).await;
        assert_eq!(
            (*seen.sent_to.lock().unwrap()).as_slice(),
            [1, 2],
            "never a third"
        );
    }
    let started = HopError::Answered(Failure::new(Reason::StaleRoute, "x").dispatched(Dispatched::Unknown));
    for error in [
        HopError::Unknown("x".into()),
        HopError::Deadline,
        HopError::BadAnswer("x"),
        started,
    ] {
        let (seen, _) = run(fakes(vec![old.clone(), new.clone()], vec![Err(error), Ok("out")])).await;
        assert_eq!((*seen.sent_to.lock().unwrap()).as_slice(), [1], "it may have run");
    }
}

/// C-3.5
#[tokio::test]
async fn a_call_keeps_its_place_until_its_ticket_drops() {
    let (_, invoke) = path(fakes(vec![Ok(ready(1, "p"))], vec![Ok("out")]));
    let ticket = invoke
        .open(&good_call(), Instant::now(), &mut Timing::default())
        .await
        .unwrap();
    let full = invoke
        .open(&good_call(), Instant::now(), &mut Timing::default())
        .await
        .unwrap_err();
    assert_eq!(full.row().reason, "Overloaded");
    drop(ticket);
    assert!(
        invoke
            .open(&good_call(), Instant::now(), &mut Timing::default())
            .await
            .is_ok()
    );
}

/// C-6.4: who waits for a hand-over has a place among the calls; when all are taken it is refused as it would be
/// without waiting.
#[tokio::test]
async fn a_function_that_is_handed_over_is_waited_for() {
    let mut draining = entry(1, State::NotReady(NotReady::Draining));
    draining.handed_over = Some(Instant::now());
    let handed_over = vec![Ok(draining.clone()), Ok(ready(2, "p2"))];
    let (seen, result) = run(fakes(handed_over, vec![Ok("out")])).await;
    assert!(result.is_ok());
    assert_eq!(*seen.sent_to.lock().unwrap(), [2]);

    let (_, result) = run(fakes(vec![Ok(draining.clone())], vec![Ok("out")])).await;
    assert_eq!(reason(result), "Draining");

    let registering = entry(1, State::NotReady(NotReady::Registering));
    let late = vec![Ok(registering), Ok(ready(1, "p1"))];
    let (_, result) = run(fakes(late, vec![Ok("out")])).await;
    assert!(result.is_ok(), "its caller knows sooner that it is Ready");

    let (_, invoke) = path(fakes(vec![Ok(draining), Ok(ready(2, "p2"))], vec![Ok("out")]));
    let _all = invoke.admission.admit("demo").unwrap();
    let refused = invoke
        .open(&good_call(), Instant::now(), &mut Timing::default())
        .await
        .unwrap_err();
    assert_eq!(refused.row().reason, "Draining");
}

/// C-3.9
#[test]
fn a_call_ends_with_the_life_of_its_run() {
    let mut entry = ready(1, "p");
    let wish = Duration::from_secs(30);
    let now = Timestamp::from_second(1000).unwrap();
    assert_eq!(lifetime(wish, &entry, || now), wish);
    for (end, expected) in [
        (1010, Duration::from_secs(10)),
        (2000, wish),
        (900, Duration::from_millis(1)),
    ] {
        entry.ends_at = Some(Timestamp::from_second(end).unwrap());
        assert_eq!(lifetime(wish, &entry, || now), expected);
    }
}
