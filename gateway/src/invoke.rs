//! The path of a call, top to bottom, on three traits: `open` (route, authorize, ready, admit), then `send`.
//!
//! Opening comes before the body is read, so that a stranger cannot make the gateway buffer one.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use jiff::Timestamp;
use kruntimes_api::keys::RunKey;
use kruntimes_authz::{Bearer, Verdict};
use kruntimes_proto::failure::{Dispatched, Failure, Reason};
use tokio::time::Instant;

use crate::{
    admit::{Admission, Admitted, Full},
    ask::Questions,
    error::InvokeError,
    hop::{Call, Hop, HopError},
    reply::{Output, Timing},
    request::{Invocation, Subject},
    routes::{Entry, Miss, Route, Routes, State, Wait, shared::APPEAR},
};

/// May this token do that with this Run?
pub trait Authorize: Send + Sync {
    /// Asks, or remembers.
    fn authorize(
        &self,
        bearer: &Bearer,
        verb: &'static str,
        key: &RunKey,
    ) -> impl Future<Output = Verdict> + Send;
}

/// What calling a function, and asking about it, needs (C-3.6, C-3.11).
pub const GET: &str = "get";

/// An owner that has let go of a function has one or two writes to make before Kubernetes knows, on a busy API server.
const LEFT: Duration = Duration::from_secs(1);

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
    /// What is needed besides for questions that are no calls.
    pub questions: Questions,
    /// How long calls wait for a function that one Pod hands over to another; zero: not at all.
    pub handover: Duration,
}

/// A call that may be sent: its route at the time, and its place among the calls in flight.
#[derive(Debug)]
pub struct Ticket {
    entry: Arc<Entry>,
    route: Route,
    _admitted: Admitted,
}

impl<R: Routes, A: Authorize, H> Invoke<R, A, H> {
    /// The route, for those who may do that with it. What is known of a Run is told to nobody else. It is `started` now.
    pub(crate) async fn permitted(
        &self,
        subject: &Subject,
        verb: &'static str,
        started: Instant,
        timing: &mut Timing,
    ) -> Result<Arc<Entry>, InvokeError> {
        let entry = match self.routes.find(subject.uid) {
            Err(Miss::Unknown) => self.routes.appear(subject.uid).await,
            known => known,
        };
        let asked = Instant::now();
        timing.route = Some(asked - started);
        let entry = entry.map_err(unknown)?;
        if entry.key.namespace != subject.namespace || entry.runtime != subject.runtime {
            return Err(InvokeError::NoSuchFunction);
        }
        let verdict = self.authorizer.authorize(&subject.bearer, verb, &entry.key).await;
        timing.authz = Some(asked.elapsed());
        match verdict {
            Verdict::Allowed { .. } => Ok(entry),
            Verdict::Denied => Err(InvokeError::PermissionDenied(verb)),
            Verdict::Rejected => Err(InvokeError::TokenRejected),
            Verdict::Unavailable => Err(InvokeError::AuthorizationUnavailable(
                "Kubernetes does not answer".to_owned(),
            )),
        }
    }
}

impl<R: Routes, A: Authorize, H: Hop> Invoke<R, A, H> {
    /// Route, authorize, ready, admit. A function that is handed over is waited for, and one that may be Ready
    /// already without the gateway having heard of it; `started` is when the call's time began.
    ///
    /// # Errors
    /// The first of them that fails; nothing was sent.
    pub async fn open(
        &self,
        call: &Invocation,
        started: Instant,
        timing: &mut Timing,
    ) -> Result<Ticket, InvokeError> {
        let mut entry = self.permitted(&call.subject, GET, started, timing).await?;
        let mut place = None;
        if let State::NotReady(state) = &entry.state {
            // Who waits counts as a call, so that they are bounded.
            let taken = self.admit(&entry).map_err(|_| InvokeError::NotReady(*state))?;
            let waited = Instant::now();
            let moved = self.moved(call, None, APPEAR, started + call.timeout).await;
            timing.route = timing.route.map(|took| took + waited.elapsed());
            entry = match moved {
                Some(entry) => entry,
                // It may have changed for another reason.
                None => self.routes.find(call.subject.uid).map_err(unknown)?,
            };
            place = Some(taken);
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
        let admitted = match place {
            Some(place) => place,
            None => self.admit(&entry)?,
        };
        Ok(Ticket {
            entry,
            route,
            _admitted: admitted,
        })
    }

    fn admit(&self, entry: &Entry) -> Result<Admitted, InvokeError> {
        self.admission.admit(&entry.key.namespace).map_err(|full| {
            InvokeError::Overloaded(match full {
                Full::Gateway => "calls in all",
                Full::Namespace => "calls of this namespace",
            })
        })
    }

    /// Sends the call to the owner, once. If nothing was started there and the route has moved meanwhile,
    /// the new owner is tried, once (C-3.7); it moves when the owner hands it over. The end of the Run's life, if it
    /// has one, is compared with `now`.
    ///
    /// # Errors
    /// Says whether the function may have run.
    pub async fn send(
        &self,
        call: &Invocation,
        ticket: &Ticket,
        input: Bytes,
        started: Instant,
        now: impl Fn() -> Timestamp,
        timing: &mut Timing,
    ) -> Result<Output, InvokeError> {
        let deadline = started + lifetime(call.timeout, &ticket.entry, now);
        let sent = Instant::now();
        let mut begun = sent;
        let mut moved = None;
        // A loop, so that there is room for one attempt only in the call's memory.
        let result = loop {
            let route = moved.as_ref().unwrap_or(&ticket.route);
            match self.attempt(call, route, input.clone(), begun, deadline).await {
                Err(error) if moved.is_none() => {
                    match self.elsewhere(call, &ticket.route, &error, deadline).await {
                        Some(route) => moved = Some(route),
                        None => break Err(error),
                    }
                    begun = Instant::now();
                }
                result => break result,
            }
        };
        timing.hop = Some(sent.elapsed());
        let answer = result?;
        timing.handler = answer.handler;
        Ok(answer.output)
    }

    async fn attempt(
        &self,
        call: &Invocation,
        route: &Route,
        input: Bytes,
        now: Instant,
        deadline: Instant,
    ) -> Result<crate::hop::Answer, HopError> {
        self.hop
            .call(Call {
                invocation: call,
                route,
                input,
                now,
                deadline,
            })
            .await
    }

    /// Where the call may be tried a second time.
    async fn elsewhere(
        &self,
        call: &Invocation,
        from: &Route,
        error: &HopError,
        deadline: Instant,
    ) -> Option<Route> {
        let late = self.may_try_again(error)?;
        let entry = self.moved(call, Some(from), late, deadline).await?;
        match &entry.state {
            State::Ready(route) => Some(route.clone()),
            State::NotReady(_) | State::Ended { .. } => None,
        }
    }

    async fn moved(
        &self,
        call: &Invocation,
        from: Option<&Route>,
        late: Duration,
        deadline: Instant,
    ) -> Option<Arc<Entry>> {
        let wait = Wait {
            from,
            late,
            handover: self.handover,
            deadline,
        };
        self.routes.moved(call.subject.uid, wait).await
    }

    /// Only when it is certain that nothing was started. How long news of the new owner may take when the table
    /// has none: a Pod that is left waits for a running call of the function before it says so to Kubernetes, and
    /// one that has left is saying so.
    fn may_try_again(&self, error: &HopError) -> Option<Duration> {
        match error {
            HopError::NotSent(_) => Some(Duration::ZERO),
            HopError::Answered(Failure {
                reason,
                dispatched: Dispatched::No,
                ..
            }) => match reason {
                Reason::StaleRoute => Some(LEFT.min(self.handover)),
                Reason::Draining => Some(self.handover),
                _ => None,
            },
            HopError::Answered(_)
            | HopError::TooLate
            | HopError::Unknown(_)
            | HopError::Deadline
            | HopError::BadAnswer(_) => None,
        }
    }
}

impl From<HopError> for InvokeError {
    fn from(error: HopError) -> Self {
        match error {
            HopError::NotSent(why) => Self::OwnerUnreachable(why),
            HopError::TooLate => Self::TooLate,
            HopError::Answered(failure) => Self::Answered(failure),
            HopError::Unknown(why) => Self::OutcomeUnknown(why),
            HopError::Deadline => Self::DeadlineExceeded,
            HopError::BadAnswer(what) => Self::BadAnswer(what),
        }
    }
}

fn unknown(miss: Miss) -> InvokeError {
    match miss {
        Miss::Unknown => InvokeError::NoSuchFunction,
        Miss::NotListed => InvokeError::Starting,
    }
}

/// The caller's wish, at most what is left of the Run's life (C-3.9). The owner enforces that end itself, so
/// a clock that is ahead must not make a call impossible: a millisecond is left in any case.
fn lifetime(wish: Duration, entry: &Entry, now: impl Fn() -> Timestamp) -> Duration {
    let Some(ends_at) = entry.ends_at else { return wish };
    let left = Duration::try_from(ends_at.duration_since(now())).unwrap_or_default();
    wish.min(left.max(Duration::from_millis(1)))
}

#[cfg(test)]
mod tests;
