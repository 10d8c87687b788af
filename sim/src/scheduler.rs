//! One scheduler process: the election, then the loop over Runs. Every decision is the product's (`lease`,
//! `look`, `plan` with all that is below it, `assumed`, `world`, `queue`); here is only the order in which
//! requests leave and answers come.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use kruntimes_api::{Run, keys::PodUid};
use kruntimes_scheduler::{
    assumed::{Assumed, Reservation},
    bind::Written,
    facts::{ObjectKey, Signs},
    fence::{Node, Presence},
    lease::{Judge, Timing},
    look::{AFTER_READ, Confirmed, Look, Looks, Now, TRY_AGAIN, given_back, heard_live},
    plan::Plan,
    queue::Due,
    world::{Wakes, World},
};

use crate::{
    Variant,
    api::{Kind, NAMESPACE, Object, Reply, Request},
    clock::Time,
    events::Event,
    sim::{Origin, Sim},
    watch::News,
};

/// Everything a process of the scheduler remembers.
#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(crate) life: u64,
    pub(crate) alive: bool,
    pub(crate) judge: Judge,
    /// When the try to take or renew the Lease began, and its request.
    pub(crate) trying: Option<(Time, u64)>,
    pub(crate) term: Option<Term>,
}

/// One time of being leader.
#[derive(Debug)]
pub(crate) struct Term {
    pub(crate) number: u64,
    /// The renew deadline.
    pub(crate) until: Time,
    pub(crate) world: World,
    pub(crate) assumed: Assumed,
    pub(crate) looks: Looks,
    pub(crate) due: Due<ObjectKey>,
    pub(crate) unlisted: Vec<Kind>,
    pub(crate) busy: Option<(u64, Busy)>,
    /// When a look is on its way.
    pub(crate) next_look: Option<Time>,
}

/// What the loop waits for.
#[derive(Debug)]
pub(crate) enum Busy {
    Read(ObjectKey, Arc<Run>),
    Pod(ObjectKey, Arc<Run>, String, PodUid),
    /// The signs of the Pod, if it is there.
    Beat(ObjectKey, Arc<Run>, PodUid, Option<Signs>),
    Node(ObjectKey, Arc<Run>, PodUid),
    Write(ObjectKey, Arc<Run>, Act),
    DeletePod(ObjectKey),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    Bind,
    Other,
}

// === impl Scheduler ===

impl Scheduler {
    pub(crate) fn new(life: u64) -> Self {
        Self {
            life,
            alive: true,
            judge: Judge::new(format!("scheduler-{life}"), Timing::default()),
            trying: None,
            term: None,
        }
    }

    pub(crate) fn leads(&self) -> bool {
        self.term.is_some()
    }
}

// === impl Sim ===

impl Sim {
    pub(crate) fn scheduler_news(&mut self, index: usize, kind: Kind, news: News) {
        let (clock, now) = (self.clock, self.now);
        let no_fence = self.variant == Some(Variant::FenceOff);
        let Some(term) = &mut self.schedulers[index].term else {
            return;
        };
        let mut wakes = Wakes::default();
        let reset = matches!(news, News::Reset(_));
        match news {
            News::Apply(Object::Run(run), _) => {
                term.assumed.settle(&run);
                term.world.apply_run((*run).clone(), &mut wakes);
            }
            News::Delete(Object::Run(run), _) => {
                if let Some(uid) = run.run_uid() {
                    term.assumed.gone(uid);
                }
                term.world.delete_run(&run, &mut wakes);
            }
            News::Apply(Object::Pod(pod), _) => {
                if no_fence && (pod.signs.deleting || !pod.signs.ready) {
                    // Broken on purpose: what looks lost is lost.
                    term.world.delete_pod(&pod, &mut wakes);
                } else {
                    term.world.apply_pod((*pod).clone(), &mut wakes);
                }
            }
            News::Delete(Object::Pod(pod), _) => term.world.delete_pod(&pod, &mut wakes),
            News::Apply(Object::Beat(beat), _) => {
                let instant = clock.instant(now);
                term.world.apply_beat((*beat).clone(), instant, &mut wakes);
            }
            News::Delete(Object::Beat(beat), _) => term.world.delete_beat(&beat.key),
            News::Reset(all) => term.reset(kind, all, clock.instant(now), clock.wall(now), &mut wakes),
        }
        if reset && term.unlisted.contains(&kind) {
            term.unlisted.retain(|it| *it != kind);
            if term.unlisted.is_empty() {
                wakes = term.world.everybody();
            }
        }
        if term.unlisted.is_empty() {
            for key in wakes.runs {
                term.due.add(key, clock.instant(now));
            }
            self.pump_scheduler(index);
        }
    }

    pub(crate) fn scheduler_look(&mut self, index: usize, number: u64) {
        if let Some(term) = self.schedulers[index]
            .term
            .as_mut()
            .filter(|it| it.number == number)
        {
            term.next_look = None;
            self.pump_scheduler(index);
        }
    }

    /// Looks at what is due, one Run at a time, until something must be waited for.
    fn pump_scheduler(&mut self, index: usize) {
        loop {
            let (clock, now) = (self.clock, self.now);
            let Some(term) = &mut self.schedulers[index].term else {
                return;
            };
            if term.busy.is_some() || !term.unlisted.is_empty() {
                return;
            }
            match term.due.take(clock.instant(now)) {
                Ok(key) => self.look(index, key, None),
                Err(None) => return,
                Err(Some(at)) => {
                    let at = clock.time(at).max(now + 1);
                    if term.next_look.is_none_or(|it| at < it) {
                        term.next_look = Some(at);
                        let number = term.number;
                        self.at(at, Event::Look { index, number });
                    }
                    return;
                }
            }
        }
    }

    fn look(&mut self, index: usize, key: ObjectKey, confirmed: Option<(Confirmed, Arc<Run>)>) {
        let now = Now {
            monotonic: self.clock.instant(self.now),
            wall: self.clock.wall(self.now),
            jitter: self.rng.unit(),
        };
        let truth = self.variant == Some(Variant::StaleListTruth);
        let no_fence = self.variant == Some(Variant::FenceOff);
        let Some(term) = &mut self.schedulers[index].term else {
            return;
        };
        let looked = term.looks.look(
            &term.world,
            &term.assumed,
            &key,
            confirmed.as_ref().map(|(it, _)| it),
            now,
        );
        let (run, plan) = match (looked, &confirmed) {
            (Look::Gone, _) => return,
            (Look::Wait(pause), None) => return self.wake_after(index, key, pause),
            (Look::Read(run), None) => {
                let request = Request::GetRun(key.name.clone());
                return self.go(index, Busy::Read(key, run), request);
            }
            (Look::Do(run, plan), None) => (run, plan),
            (Look::Do(run, plan), Some((_, before))) if run == *before => (run, plan),
            // It has moved on during the read.
            _ => return self.wake_after(index, key, Duration::ZERO),
        };
        match plan {
            Plan::ConfirmOwner { name, uid } if confirmed.is_none() => {
                if no_fence || truth {
                    // Broken on purpose: nobody is asked.
                    let seen = term.world.pod(&ObjectKey::new(NAMESPACE, name));
                    let presence = match seen.filter(|it| it.uid == uid && !no_fence) {
                        Some(pod) => Presence::There(pod.signs),
                        None => Presence::Gone,
                    };
                    let confirmed = Confirmed {
                        uid,
                        presence,
                        node: Node::Never,
                    };
                    return self.look(index, key, Some((confirmed, run)));
                }
                let request = Request::GetPod {
                    name: name.clone(),
                    uid: uid.as_str().to_owned(),
                };
                self.go(index, Busy::Pod(key, run, name, uid), request);
            }
            plan => self.act(index, key, run, plan),
        }
    }

    fn act(&mut self, index: usize, key: ObjectKey, run: Arc<Run>, plan: Plan) {
        let (clock, now) = (self.clock, self.now);
        self.trace(|| format!("scheduler-{index} {}: {}", key.name, brief(&plan)));
        let Some(term) = &mut self.schedulers[index].term else {
            return;
        };
        match plan {
            Plan::Nothing => {}
            Plan::Later(pause) => self.wake_after(index, key, pause),
            Plan::ConfirmOwner { .. } => self.wake_after(index, key, TRY_AGAIN),
            Plan::DeletePod { name, uid } => {
                if !term.looks.may_delete_pod(clock.instant(now)) {
                    return self.wake_after(index, key, TRY_AGAIN);
                }
                let request = Request::DeletePod {
                    name,
                    uid: uid.as_str().to_owned(),
                };
                self.go(index, Busy::DeletePod(key), request);
            }
            Plan::Write { status, why } => {
                given_back(&mut term.world, &run, why, clock.instant(now));
                self.write_status(index, key, run, status, Act::Other);
            }
            Plan::Bind {
                status,
                uid,
                attempt,
                ask,
            } => {
                let Some(run_uid) = run.run_uid() else { return };
                let reservation = Reservation {
                    pod: uid,
                    attempt,
                    demand: ask.demand,
                    labels: ask.labels,
                };
                term.assumed.reserve(run_uid, reservation);
                self.write_status(index, key, run, status, Act::Bind);
            }
            Plan::RemoveFinalizer => {
                let request = Request::WriteFinalizer {
                    run: Arc::clone(&run),
                    present: false,
                };
                self.go(index, Busy::Write(key, run, Act::Other), request);
            }
            Plan::Delete => {
                let request = Request::DeleteRun {
                    run: Arc::clone(&run),
                };
                self.go(index, Busy::Write(key, run, Act::Other), request);
            }
        }
    }

    fn write_status(
        &mut self,
        index: usize,
        key: ObjectKey,
        run: Arc<Run>,
        status: Box<kruntimes_api::RunStatus>,
        act: Act,
    ) {
        if kruntimes_api::status::patch(&run, &status).is_none() {
            return self.written(index, key, &run, act, Written::Same);
        }
        let request = Request::WriteStatus {
            run: Arc::clone(&run),
            status,
        };
        self.go(index, Busy::Write(key, run, act), request);
    }

    /// Sends a request, if it is a read or this process may still write.
    fn go(&mut self, index: usize, busy: Busy, request: Request) {
        let holds = self.schedulers[index]
            .term
            .as_ref()
            .is_some_and(|it| self.now < it.until);
        if request.writes() && !holds {
            if let Busy::Write(key, run, act) = busy {
                self.written(index, key, &run, act, Written::NotLeader);
            }
            return;
        }
        let token = self.ask_scheduler(index, request, Duration::from_secs(10));
        if let Some(term) = &mut self.schedulers[index].term {
            term.busy = Some((token, busy));
        }
    }

    pub(crate) fn ask_scheduler(&mut self, index: usize, request: Request, patience: Duration) -> u64 {
        let life = self.schedulers[index].life;
        let token = self.number();
        let origin = Origin::Scheduler { index, life, token };
        self.ask(origin, request, patience);
        token
    }

    pub(crate) fn scheduler_reply(&mut self, index: usize, life: u64, token: u64, reply: Reply) {
        let scheduler = &mut self.schedulers[index];
        if !scheduler.alive || scheduler.life != life {
            return;
        }
        if let Some((began, _)) = scheduler.trying.filter(|(_, it)| *it == token) {
            self.election_answer(index, began, reply);
        } else if let Some(term) = &mut scheduler.term
            && term.busy.as_ref().is_some_and(|(it, _)| *it == token)
            && let Some((_, busy)) = term.busy.take()
        {
            self.answered(index, busy, reply);
        }
        self.pump_scheduler(index);
    }

    fn answered(&mut self, index: usize, busy: Busy, reply: Reply) {
        let (clock, now) = (self.clock, self.now);
        let Some(term) = &mut self.schedulers[index].term else {
            return;
        };
        match (busy, reply) {
            (Busy::Read(key, run), Reply::Run(live)) => {
                let mut wakes = Wakes::default();
                let live = live.map(|it| (*it).clone());
                let Term {
                    looks,
                    world,
                    assumed,
                    due,
                    ..
                } = term;
                looks.refreshed(&run, live, world, assumed, &mut wakes);
                for key in wakes.runs {
                    due.add(key, clock.instant(now));
                }
                self.wake_after(index, key, AFTER_READ);
            }
            (Busy::Pod(key, run, name, uid), Reply::Pod(pod)) => {
                let signs = pod.map(|pod| pod.signs);
                self.go(index, Busy::Beat(key, run, uid, signs), Request::GetBeat(name));
            }
            (Busy::Beat(key, run, uid, signs), Reply::Beat(beat)) => {
                let mut wakes = Wakes::default();
                let beat = beat.map(|it| (*it).clone());
                heard_live(&mut term.world, &uid, beat, clock.instant(now), &mut wakes);
                for key in wakes.runs {
                    term.due.add(key, clock.instant(now));
                }
                if let Some(signs) = signs {
                    return self.confirmed(index, key, run, uid, Presence::There(signs), Node::Silent);
                }
                let node = term.world.node_of(uid.as_str()).map(|it| it.map(str::to_owned));
                let node = match node {
                    None => Node::Silent,
                    Some(None) => Node::Never,
                    Some(Some(node)) => {
                        let number = node.trim_start_matches("node-").parse().unwrap_or(usize::MAX);
                        return self.go(index, Busy::Node(key, run, uid), Request::GetNode(number));
                    }
                };
                self.confirmed(index, key, run, uid, Presence::Gone, node);
            }
            (Busy::Node(key, run, uid), reply) => {
                // One that cannot be read counts as silent.
                let node = match reply {
                    Reply::Node(true) => Node::Reports,
                    _ => Node::Silent,
                };
                self.confirmed(index, key, run, uid, Presence::Gone, node);
            }
            (Busy::Write(key, run, act), reply) => {
                let written = match reply {
                    Reply::Done(_) => Written::Done,
                    Reply::Conflict => Written::Conflict,
                    Reply::Refused => Written::Refused(String::new()),
                    _ => Written::Unknown(String::new()),
                };
                self.written(index, key, &run, act, written);
            }
            (Busy::DeletePod(key), reply) => {
                if matches!(reply, Reply::Done(_)) {
                    term.looks.deleted_pod(clock.instant(now));
                }
                self.wake_after(index, key, TRY_AGAIN);
            }
            (Busy::Read(key, _) | Busy::Pod(key, ..) | Busy::Beat(key, ..), _) => {
                self.wake_after(index, key, TRY_AGAIN);
            }
        }
    }

    fn confirmed(
        &mut self,
        index: usize,
        key: ObjectKey,
        run: Arc<Run>,
        uid: PodUid,
        presence: Presence,
        node: Node,
    ) {
        let confirmed = Confirmed { uid, presence, node };
        self.look(index, key, Some((confirmed, run)));
    }

    fn written(&mut self, index: usize, key: ObjectKey, run: &Run, act: Act, written: Written) {
        let now = self.clock.instant(self.now);
        let Some(term) = &mut self.schedulers[index].term else {
            return;
        };
        if act == Act::Bind
            && !matches!(written, Written::Done | Written::Unknown(_))
            && let Some(uid) = run.run_uid()
        {
            term.assumed.forget(uid);
        }
        if let Some(pause) = term.looks.settle(run, &written, now) {
            self.wake_after(index, key, pause);
        }
    }

    fn wake_after(&mut self, index: usize, key: ObjectKey, pause: Duration) {
        let at = self.clock.instant(self.now) + pause;
        if let Some(term) = &mut self.schedulers[index].term {
            term.due.add(key, at);
        }
    }
}

// === impl Term ===

impl Term {
    fn reset(
        &mut self,
        kind: Kind,
        all: Vec<(Object, Option<kruntimes_gateway::routes::Entry>)>,
        now: tokio::time::Instant,
        wall: jiff::Timestamp,
        wakes: &mut Wakes,
    ) {
        let (mut runs, mut pods, mut beats) = (Vec::new(), Vec::new(), Vec::new());
        for (object, _) in all {
            match object {
                Object::Run(run) => runs.push((*run).clone()),
                Object::Pod(pod) => pods.push((*pod).clone()),
                Object::Beat(beat) => beats.push((*beat).clone()),
            }
        }
        match kind {
            Kind::Run => {
                let listed: BTreeSet<_> = runs.iter().filter_map(Run::run_uid).collect();
                for key in self.world.everybody().runs {
                    let known = self.world.run(&key).and_then(|run| run.run_uid());
                    if let Some(uid) = known.filter(|uid| !listed.contains(uid)) {
                        self.assumed.gone(uid);
                    }
                }
                for run in &runs {
                    self.assumed.settle(run);
                }
                self.world.reset_runs(None, runs, wakes);
            }
            Kind::Pod => self.world.reset_pods(None, pods, wakes),
            Kind::Beat => self.world.reset_beats(None, beats, now, wall, wakes),
        }
    }
}

fn brief(plan: &Plan) -> String {
    match plan {
        Plan::Write { status, why } => {
            format!("write {why:?} {:?} attempt {:?}", status.phase, status.attempt)
        }
        Plan::Bind { status, attempt, .. } => {
            format!("bind to {:?} attempt {attempt}", status.assigned_pod)
        }
        other => format!("{other:?}"),
    }
}
