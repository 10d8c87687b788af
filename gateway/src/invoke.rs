//! The path of a call, top to bottom, on three traits: `open` (route, authorize, ready, admit), then `send`.
//!
//! Opening comes before the body is read, so that a stranger cannot make the gateway buffer one.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use jiff::Timestamp;
use kruntimes_api::keys::RunKey;
use kruntimes_authz::{Bearer, Verdict};
use kruntimes_proto::failure::{Failure, Reason};
use tokio::time::Instant;

use crate::{
    admit::{Admission, Admitted, Full},
    error::InvokeError,
    hop::{Call, Hop, HopError},
    reply::{Output, Timing},
    request::Invocation,
    routes::{Entry, Miss, Route, Routes, State},
};

/// May this token `get` this Run?
pub trait Authorize: Send + Sync {
    /// Asks, or remembers.
    fn authorize(&self, bearer: &Bearer, key: &RunKey) -> impl Future<Output = Verdict> + Send;
}

/// The path. Shared by all calls.
#[derive(Debug)]
pub struct Invoke<R, A, H> {
    /// Who owns a function.
    pub routes: R,
    /// Who may call it.
    pub authorizer: A,
    /// How many at once.
    pub admission: Admission,
    /// One attempt at the owner.
    pub hop: H,
}

/// A call that may be sent: its route at the time, and its place among the calls in flight.
#[derive(Debug)]
pub struct Ticket {
    entry: Arc<Entry>,
    route: Route,
    _admitted: Admitted,
}

impl<R: Routes, A: Authorize, H: Hop> Invoke<R, A, H> {
    /// Route, authorize, ready, admit.
    ///
    /// # Errors
    /// The first of them that fails; nothing was sent.
    pub async fn open(&self, call: &Invocation, timing: &mut Timing) -> Result<Ticket, InvokeError> {
        let started = Instant::now();
        let entry = match self.routes.find(call.uid) {
            Err(Miss::Unknown) => self.routes.appear(call.uid).await,
            known => known,
        };
        timing.route = Some(started.elapsed());
        let entry = entry.map_err(|miss| match miss {
            Miss::Unknown => InvokeError::NoSuchFunction,
            Miss::NotListed => InvokeError::Starting,
        })?;
        if entry.key.namespace != call.namespace || entry.runtime != call.runtime {
            return Err(InvokeError::NoSuchFunction);
        }
        let asked = Instant::now();
        let verdict = self.authorizer.authorize(&call.bearer, &entry.key).await;
        timing.authz = Some(asked.elapsed());
        match verdict {
            Verdict::Allowed { .. } => {}
            Verdict::Denied => return Err(InvokeError::PermissionDenied),
            Verdict::Rejected => return Err(InvokeError::TokenRejected),
            Verdict::Unavailable => {
                return Err(InvokeError::AuthorizationUnavailable(
                    "Kubernetes does not answer".to_owned(),
                ));
            }
        }
        let route = match &entry.state {
            State::Ready(route) => route.clone(),
            State::NotReady(state) => return Err(InvokeError::NotReady(*state)),
            State::Ended { phase, reason } => {
                return Err(InvokeError::FunctionEnded {
                    phase: phase.clone(),
                    reason: reason.clone(),
                });
            }
        };
        let admitted = self.admission.admit(&entry.key.namespace).map_err(|full| {
            InvokeError::Overloaded(match full {
                Full::Gateway => "in all",
                Full::Namespace => "of this namespace",
            })
        })?;
        Ok(Ticket {
            entry,
            route,
            _admitted: admitted,
        })
    }

    /// Sends the call to the owner, once. If nothing was started there and the route has moved meanwhile,
    /// the new owner is tried, once (C-3.7). `now` is compared with the end of the Run's life.
    ///
    /// # Errors
    /// Says whether the function may have run.
    pub async fn send(
        &self,
        call: &Invocation,
        ticket: &Ticket,
        input: Bytes,
        started: Instant,
        now: Timestamp,
        timing: &mut Timing,
    ) -> Result<Output, InvokeError> {
        let deadline = started + lifetime(call.timeout, &ticket.entry, now);
        let sent = Instant::now();
        let first = self.attempt(call, &ticket.route, input.clone(), deadline).await;
        let result = match first {
            Err(error) if may_try_again(&error) => match self.moved(call, &ticket.route) {
                Some(route) => self.attempt(call, &route, input, deadline).await,
                None => Err(error),
            },
            result => result,
        };
        timing.hop = Some(sent.elapsed());
        let answer = result.map_err(|error| match error {
            HopError::NotSent(why) => InvokeError::OwnerUnreachable(why),
            HopError::TooLate => InvokeError::TooLate,
            HopError::Answered(failure) => InvokeError::Answered(failure),
            HopError::Unknown(why) => InvokeError::OutcomeUnknown(why),
            HopError::Deadline => InvokeError::DeadlineExceeded,
            HopError::BadAnswer(what) => InvokeError::BadAnswer(what),
        })?;
        timing.handler = answer.handler;
        Ok(answer.output)
    }

    async fn attempt(
        &self,
        call: &Invocation,
        route: &Route,
        input: Bytes,
        deadline: Instant,
    ) -> Result<crate::hop::Answer, HopError> {
        self.hop
            .call(Call {
                invocation: call,
                route,
                input,
                deadline,
            })
            .await
    }

    /// Where the function is now, if that is elsewhere.
    fn moved(&self, call: &Invocation, from: &Route) -> Option<Route> {
        let entry = self.routes.find(call.uid).ok()?;
        match &entry.state {
            State::Ready(route) if route != from => Some(route.clone()),
            _ => None,
        }
    }
}

/// Only when it is certain that nothing was started.
fn may_try_again(error: &HopError) -> bool {
    match error {
        HopError::NotSent(_) => true,
        HopError::Answered(Failure {
            reason, dispatched, ..
        }) => *reason == Reason::StaleRoute && *dispatched == kruntimes_proto::failure::Dispatched::No,
        HopError::TooLate | HopError::Unknown(_) | HopError::Deadline | HopError::BadAnswer(_) => false,
    }
}

/// The caller's wish, at most what is left of the Run's life (C-3.9). The owner enforces that end itself, so
/// a clock that is ahead must not make a call impossible: a millisecond is left in any case.
fn lifetime(wish: Duration, entry: &Entry, now: Timestamp) -> Duration {
    let Some(ends_at) = entry.ends_at else { return wish };
    let left = Duration::try_from(ends_at.duration_since(now)).unwrap_or_default();
    wish.min(left.max(Duration::from_millis(1)))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use http::{HeaderMap, HeaderValue, Method};
    use kruntimes_proto::failure::Dispatched;

    use super::*;
    use crate::{
        hop::Answer,
        request::{Head, Timeouts, parse},
        routes::{
            NotReady,
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
    }

    impl Authorize for Arc<Fakes> {
        async fn authorize(&self, _bearer: &Bearer, key: &RunKey) -> Verdict {
            assert_eq!(key.name, "hello");
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
        parse(&head, timeouts).unwrap()
    }

    fn good_call() -> Invocation {
        call("/v1/namespaces/demo/runtimes/python/functions/2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6:invoke")
    }

    async fn run(fakes: Fakes) -> (Arc<Fakes>, Result<Output, InvokeError>) {
        let (fakes, invoke) = path(fakes);
        let mut timing = Timing::default();
        let call = good_call();
        let result = match invoke.open(&call, &mut timing).await {
            Err(error) => Err(error),
            Ok(ticket) => {
                let now = Timestamp::UNIX_EPOCH;
                invoke
                    .send(&call, &ticket, Bytes::new(), Instant::now(), now, &mut timing)
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

    #[tokio::test]
    async fn a_call_reaches_its_owner_once() {
        let (fakes, result) = run(fakes(vec![Ok(ready(2, "p"))], vec![Ok("out")])).await;
        assert_eq!(&result.unwrap().body[..], b"out");
        assert_eq!(*fakes.sent_to.lock().unwrap(), [2]);
    }

    #[tokio::test]
    async fn what_does_not_belong_together_is_unknown_and_reviewed_by_nobody() {
        let uid = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";
        for target in [
            format!("/v1/namespaces/other/runtimes/python/functions/{uid}:invoke"),
            format!("/v1/namespaces/demo/runtimes/node/functions/{uid}:invoke"),
        ] {
            let (fakes, invoke) = path(fakes(vec![Ok(ready(1, "p"))], vec![Ok("out")]));
            let error = invoke
                .open(&call(&target), &mut Timing::default())
                .await
                .unwrap_err();
            assert_eq!(error, InvokeError::NoSuchFunction);
            assert_eq!(*fakes.reviews.lock().unwrap(), 0);
        }
    }

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

    #[tokio::test]
    async fn no_verdict_is_never_taken_for_a_denial_c_3_5() {
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

    #[tokio::test]
    async fn a_second_try_only_if_nothing_started_and_the_route_moved_c_3_7() {
        let (old, new) = (Ok(ready(1, "p1")), Ok(ready(2, "p2")));
        for error in [HopError::NotSent("x".into()), stale()] {
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
        let started =
            HopError::Answered(Failure::new(Reason::StaleRoute, "x").dispatched(Dispatched::Unknown));
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

    #[tokio::test]
    async fn a_call_keeps_its_place_until_its_ticket_drops() {
        let (_, invoke) = path(fakes(vec![Ok(ready(1, "p"))], vec![Ok("out")]));
        let ticket = invoke.open(&good_call(), &mut Timing::default()).await.unwrap();
        let full = invoke
            .open(&good_call(), &mut Timing::default())
            .await
            .unwrap_err();
        assert_eq!(full.row().reason, "Overloaded");
        drop(ticket);
        assert!(invoke.open(&good_call(), &mut Timing::default()).await.is_ok());
    }

    #[test]
    fn a_call_ends_with_the_life_of_its_run_c_3_9() {
        let mut entry = ready(1, "p");
        let wish = Duration::from_secs(30);
        let now = Timestamp::from_second(1000).unwrap();
        assert_eq!(lifetime(wish, &entry, now), wish);
        for (end, expected) in [
            (1010, Duration::from_secs(10)),
            (2000, wish),
            (900, Duration::from_millis(1)),
        ] {
            entry.ends_at = Some(Timestamp::from_second(end).unwrap());
            assert_eq!(lifetime(wish, &entry, now), expected);
        }
    }
}
