//! Schedulers come and go, and one of them leads: the product's `lease::Judge`, asked as its `Candidate`
//! asks.

use kruntimes_api::{Runtime, names::LEASE_SCHEDULER};
use kruntimes_scheduler::{
    assumed::Assumed,
    lease::{Timing, Verdict},
    look::Looks,
    queue::Due,
    world::{Wakes, World},
};

use crate::{
    api::{Kind, NAMESPACE, RUNTIME, Reply, Request},
    clock::{MS, Time, micros},
    events::Event,
    scheduler::{Scheduler, Term},
    sim::{Actor, Sim},
};

impl Sim {
    pub(crate) fn start_scheduler(&mut self, index: usize) {
        let life = self.number();
        self.schedulers[index] = Scheduler::new(life);
        let at = self.now + self.rng.range(MS, 100 * MS);
        self.at(at, Event::Election { index, life });
    }

    pub(crate) fn kill_scheduler(&mut self, index: usize) {
        self.schedulers[index].alive = false;
        self.schedulers[index].term = None;
        self.frozen.remove(&Actor::Scheduler(index));
        self.end_watches(Actor::Scheduler(index));
    }

    /// One try to take or renew the Lease.
    pub(crate) fn election(&mut self, index: usize, life: u64) {
        let scheduler = &self.schedulers[index];
        if !scheduler.alive || scheduler.life != life || scheduler.trying.is_some() {
            return;
        }
        if scheduler.term.as_ref().is_some_and(|it| it.until <= self.now) {
            self.lose_term(index, "the renew deadline has passed");
        }
        let patience = Timing::default().renew_deadline;
        let token = self.ask_scheduler(index, Request::GetLease, patience);
        self.schedulers[index].trying = Some((self.now, token));
    }

    pub(crate) fn election_answer(&mut self, index: usize, began: Time, reply: Reply) {
        let (clock, now) = (self.clock, self.now);
        let timing = Timing::default();
        let patience = timing.renew_deadline;
        match reply {
            Reply::Lease(live) => {
                let judge = &mut self.schedulers[index].judge;
                let wall = clock.wall(now);
                match judge.judge(live.map(|it| *it), LEASE_SCHEDULER, clock.instant(began), wall) {
                    Verdict::Create(lease) | Verdict::Replace(lease) => {
                        let token = self.ask_scheduler(index, Request::PutLease(Box::new(lease)), patience);
                        self.schedulers[index].trying = Some((began, token));
                        return;
                    }
                    Verdict::Others => self.lose_term(index, "somebody else holds the Lease"),
                }
            }
            Reply::Done(_) => {
                let until = began + micros(timing.renew_deadline);
                match &mut self.schedulers[index].term {
                    Some(term) if now < term.until => term.until = until,
                    Some(_) => self.lose_term(index, "the renew deadline has passed"),
                    None => self.begin_term(index, until),
                }
            }
            Reply::Conflict => self.lose_term(index, "somebody else has taken the Lease"),
            _ => {
                if self.schedulers[index]
                    .term
                    .as_ref()
                    .is_some_and(|it| it.until <= now)
                {
                    self.lose_term(index, "the renew deadline has passed");
                }
            }
        }
        self.schedulers[index].trying = None;
        let life = self.schedulers[index].life;
        self.at(now + micros(timing.retry), Event::Election { index, life });
    }

    fn begin_term(&mut self, index: usize, until: Time) {
        let number = self.number();
        self.trace(|| format!("scheduler-{index} leads"));
        let mut world = World::born(self.clock.instant(self.now));
        if let Some(runtime) = runtime() {
            world.apply_runtime(runtime, &mut Wakes::default());
        }
        let life = self.schedulers[index].life;
        self.schedulers[index].term = Some(Term {
            number,
            until,
            world,
            assumed: Assumed::default(),
            looks: Looks::default(),
            due: Due::default(),
            unlisted: vec![Kind::Run, Kind::Pod, Kind::Beat],
            busy: None,
            next_look: None,
        });
        for kind in [Kind::Run, Kind::Pod, Kind::Beat] {
            self.begin_watch(Actor::Scheduler(index), life, kind, None);
        }
    }

    fn lose_term(&mut self, index: usize, why: &str) {
        if self.schedulers[index].term.take().is_some() {
            self.trace(|| format!("scheduler-{index} leads no more: {why}"));
            self.end_watches(Actor::Scheduler(index));
        }
    }
}

/// The Runtime that all Runs are of.
fn runtime() -> Option<Runtime> {
    let object = serde_json::json!({
        "apiVersion": "kruntimes.io/v1alpha1", "kind": "Runtime",
        "metadata": { "namespace": NAMESPACE, "name": RUNTIME, "uid": "runtime" },
        "spec": { "template": { "spec": { "containers": [{ "name": "runtime", "image": "x" }] } } },
    });
    serde_json::from_value(object).ok()
}
