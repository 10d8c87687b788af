//! One gateway process: the product's table and the product's path (`invoke`), polled by hand. The hop is
//! the simulation's network.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
    time::Duration,
};

use bytes::Bytes;
use kruntimes_api::keys::{RunKey, RunUid};
use kruntimes_authz::{Bearer, Verdict};
use kruntimes_gateway::{
    admit::Admission,
    ask::Questions,
    error::InvokeError,
    hop::{Answer, Call, Hop, HopError},
    invoke::{Authorize, Invoke},
    reply::{Output, Timing},
    request::{Invocation, Subject},
    routes::{
        Entry, Miss, Next, Route, Routes, State, Wait,
        table::{Scope, Table},
    },
};
use kruntimes_proto::ids::InvocationId;
use tokio::time::Instant;

use crate::{
    Variant,
    api::{Kind, NAMESPACE, RUNTIME},
    clock::{MS, SECOND, Time},
    events::Event,
    sim::{Actor, Sim},
    watch::News,
};

/// How long calls wait for a hand-over, and how often they look.
const HANDOVER: Duration = Duration::from_secs(3);
const LOOK_EVERY: Time = 20 * MS;

/// What the path and the simulation share.
#[derive(Debug, Clone, Default)]
struct Desk(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    table: Table,
    listed: bool,
    /// Sent, and not on the network yet.
    outbox: Vec<Letter>,
    answers: BTreeMap<u64, Result<Answer, HopError>>,
    sent: u64,
    /// What calls that wait go by.
    now: Option<Instant>,
    /// Broken on purpose: what may have run is sent again.
    sends_again: bool,
}

/// One attempt at an owner.
#[derive(Debug, Clone)]
pub(crate) struct Letter {
    pub(crate) number: u64,
    pub(crate) run: RunUid,
    pub(crate) route: Route,
    pub(crate) id: InvocationId,
    pub(crate) deadline: Instant,
}

type Path = Invoke<Desk, Desk, Desk>;
type Going = Pin<Box<dyn Future<Output = Result<Output, InvokeError>> + Send>>;

pub(crate) struct Gateway {
    pub(crate) life: u64,
    pub(crate) alive: bool,
    desk: Desk,
    path: Arc<Path>,
    /// Calls in flight, and the letters each has sent.
    calls: BTreeMap<u64, (Going, Vec<u64>)>,
}

// === impl Desk ===

impl Desk {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(&self, call: &Call<'_>) -> u64 {
        let mut inner = self.lock();
        inner.sent += 1;
        let number = inner.sent;
        inner.outbox.push(Letter {
            number,
            run: call.invocation.subject.uid,
            route: call.route.clone(),
            id: call.invocation.subject.id.clone(),
            deadline: call.deadline,
        });
        number
    }

    async fn attempt(&self, call: &Call<'_>) -> Result<Answer, HopError> {
        let number = self.post(call);
        poll_fn(|_| match self.lock().answers.remove(&number) {
            Some(answer) => Poll::Ready(answer),
            None => Poll::Pending,
        })
        .await
    }
}

impl Routes for Desk {
    fn find(&self, uid: RunUid) -> Result<Arc<Entry>, Miss> {
        let inner = self.lock();
        match inner.table.entries().get(&uid) {
            Some(entry) => Ok(Arc::clone(entry)),
            None if inner.listed => Err(Miss::Unknown),
            None => Err(Miss::NotListed),
        }
    }

    async fn appear(&self, uid: RunUid) -> Result<Arc<Entry>, Miss> {
        self.find(uid)
    }

    async fn moved(&self, uid: RunUid, wait: Wait<'_>) -> Option<Arc<Entry>> {
        let since = self.lock().now?;
        poll_fn(|_| {
            let (Ok(entry), Some(now)) = (self.find(uid), self.lock().now) else {
                return Poll::Ready(None);
            };
            match wait.next(&entry, since) {
                Next::Go => Poll::Ready(Some(entry)),
                Next::Until(until) if until <= now => Poll::Ready(None),
                Next::Until(_) => Poll::Pending,
            }
        })
        .await
    }
}

impl Authorize for Desk {
    async fn authorize(&self, _: &Bearer, _: &'static str, _: &RunKey) -> Verdict {
        Verdict::Allowed { cached: true }
    }
}

impl Hop for Desk {
    async fn call(&self, call: Call<'_>) -> Result<Answer, HopError> {
        let first = self.attempt(&call).await;
        let again = self.lock().sends_again;
        match first {
            Err(HopError::Unknown(_)) if again => self.attempt(&call).await,
            first => first,
        }
    }
}

// === impl Gateway ===

impl Gateway {
    pub(crate) fn new(life: u64, sends_again: bool) -> Self {
        let desk = Desk::default();
        desk.lock().sends_again = sends_again;
        let path = Invoke {
            routes: desk.clone(),
            authorizer: desk.clone(),
            admission: Admission::new(1000, 1000),
            hop: desk.clone(),
            questions: Questions::default(),
            handover: HANDOVER,
        };
        Self {
            life,
            alive: true,
            desk,
            path: Arc::new(path),
            calls: BTreeMap::new(),
        }
    }

    /// Where it would send a call of the Run.
    pub(crate) fn route(&self, run: RunUid) -> Option<Route> {
        let inner = self.desk.lock();
        match &inner.table.entries().get(&run)?.state {
            State::Ready(route) => Some(route.clone()),
            _ => None,
        }
    }
}

// === impl Sim ===

impl Sim {
    pub(crate) fn start_gateway(&mut self, index: usize) {
        let life = self.number();
        self.gateways[index] = Gateway::new(life, self.variant == Some(Variant::RetryAfterDispatch));
        self.begin_watch(Actor::Gateway(index), life, Kind::Run, None);
    }

    pub(crate) fn kill_gateway(&mut self, index: usize) {
        let gateway = &mut self.gateways[index];
        gateway.alive = false;
        let lost: Vec<u64> = std::mem::take(&mut gateway.calls).into_keys().collect();
        self.end_watches(Actor::Gateway(index));
        for call in lost {
            self.call_over(call, None);
        }
    }

    pub(crate) fn gateway_news(&mut self, index: usize, news: News) {
        let now = self.clock.instant(self.now);
        let mut inner = self.gateways[index].desk.lock();
        match news {
            News::Apply(_, Some(entry)) => {
                inner.table.apply(entry, now);
            }
            News::Delete(_, Some(last)) => {
                inner.table.delete(&last);
            }
            News::Reset(all) => {
                let all = all.into_iter().filter_map(|(_, entry)| entry).collect();
                inner.table.reset(&Scope::All, all, now);
                inner.listed = true;
            }
            News::Apply(_, None) | News::Delete(_, None) => {}
        }
    }

    /// A client calls a function through a gateway.
    pub(crate) fn call(&mut self, index: usize, number: u64, run: RunUid, timeout: Duration) {
        let Some(subject) = subject(run, number) else {
            return;
        };
        let call = Invocation {
            subject,
            timeout,
            envelope: false,
            expects_continue: false,
        };
        let (started, wall) = (self.clock.instant(self.now), self.clock.wall(self.now));
        let path = Arc::clone(&self.gateways[index].path);
        let going: Going = Box::pin(async move {
            let mut timing = Timing::default();
            let ticket = path.open(&call, started, &mut timing).await?;
            path.send(&call, &ticket, Bytes::new(), started, || wall, &mut timing)
                .await
        });
        self.gateways[index].calls.insert(number, (going, Vec::new()));
        self.go_on(index, number);
    }

    /// Lets a call go on as far as it can.
    fn go_on(&mut self, index: usize, number: u64) {
        let now = self.clock.instant(self.now);
        let gateway = &mut self.gateways[index];
        let Some((going, letters)) = gateway.calls.get_mut(&number) else {
            return;
        };
        gateway.desk.lock().now = Some(now);
        let polled = going.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let posted = std::mem::take(&mut gateway.desk.lock().outbox);
        letters.extend(posted.iter().map(|it| it.number));
        let waits = polled.is_pending() && letters.is_empty();
        let life = gateway.life;
        for letter in posted {
            self.post(index, life, letter);
        }
        if let Poll::Ready(result) = polled {
            self.gateways[index].calls.remove(&number);
            self.call_over(number, Some(result));
        }
        if waits {
            let call = number;
            self.at(self.now + LOOK_EVERY, Event::Waits { index, life, call });
        }
    }

    /// A call looks whether the hand-over that it waits for is over.
    pub(crate) fn waits(&mut self, index: usize, life: u64, call: u64) {
        let gateway = &self.gateways[index];
        if gateway.alive && gateway.life == life {
            self.go_on(index, call);
        }
    }

    fn post(&mut self, index: usize, life: u64, letter: Letter) {
        let slow = !self.quiet && self.rng.chance(self.profile.slow_network);
        let way = if slow {
            self.rng.range(20 * MS, 3 * SECOND)
        } else {
            self.rng.range(MS / 5, 10 * MS)
        };
        let patience = self.clock.time(letter.deadline) + 250 * MS;
        self.at(
            patience.max(self.now),
            Event::HopReply {
                index,
                life,
                letter: letter.number,
                result: Box::new(Err(HopError::Deadline)),
            },
        );
        self.at(self.now + way, Event::HopArrive { index, life, letter });
    }

    /// Something comes back to a gateway.
    pub(crate) fn hop_reply(
        &mut self,
        index: usize,
        life: u64,
        letter: u64,
        result: Result<Answer, HopError>,
    ) {
        let gateway = &mut self.gateways[index];
        if !gateway.alive || gateway.life != life {
            return;
        }
        let waits = gateway
            .calls
            .iter()
            .find(|(_, (_, letters))| letters.contains(&letter));
        let Some(number) = waits.map(|(number, _)| *number) else {
            return;
        };
        if let Some((_, letters)) = gateway.calls.get_mut(&number) {
            letters.retain(|it| *it != letter);
        }
        gateway.desk.lock().answers.insert(letter, result);
        self.go_on(index, number);
    }

    /// Sends an answer back, unless it is lost on the way.
    pub(crate) fn answer(
        &mut self,
        (index, life, letter): (usize, u64, u64),
        result: Result<Answer, HopError>,
        at: Time,
    ) {
        let result = Box::new(result);
        self.at(
            at,
            Event::HopReply {
                index,
                life,
                letter,
                result,
            },
        );
    }
}

fn subject(run: RunUid, number: u64) -> Option<Subject> {
    Some(Subject {
        namespace: NAMESPACE.to_owned(),
        runtime: RUNTIME.to_owned(),
        uid: run,
        id: InvocationId::parse(format!("call-{number}").as_bytes()).ok()?,
        bearer: Bearer::parse(["Bearer token"]).ok()?,
        trace: Default::default(),
    })
}
