//! Watches: each delivers the changes of its kind in order, as late as it likes; a broken one goes on from
//! where it was, or, when that is too old (410), lists anew. A list may be of an older state.

use kruntimes_gateway::routes::Entry;

use crate::{
    api::{Change, Kind, Object},
    clock::{MS, SECOND, Time},
    events::Event,
    rng::Rng,
    sim::{Actor, Sim},
};

#[derive(Debug)]
pub(crate) struct Watch {
    pub(crate) actor: Actor,
    /// Of the process that watches; another process has another one.
    life: u64,
    pub(crate) kind: Kind,
    /// Only Runs assigned to the Pod of this name.
    filter: Option<String>,
    /// Changes before this one are delivered.
    position: usize,
    connected: bool,
    /// No list has come yet, or what it had is too old to go on from.
    must_list: bool,
    scheduled: bool,
    /// Grows with every break: what was on its way is lost.
    epoch: u64,
    /// Until when deliveries are slow, and how slow.
    slow: (Time, Time),
}

/// What a watch tells.
#[derive(Debug)]
pub(crate) enum News {
    Apply(Object, Option<Entry>),
    Delete(Object, Option<Entry>),
    Reset(Vec<(Object, Option<Entry>)>),
}

/// An API server that is behind: the lists and watches that it serves show what was. Writes and reads of one
/// object are never behind. The watches of one process may be served by different servers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Behind {
    pub(crate) until: Time,
    pub(crate) lag: Time,
    /// Decides which watches it serves.
    pub(crate) salt: u64,
}

/// How a watch breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Break {
    /// It goes on from where it was.
    Resume,
    /// 410: it lists anew.
    Expire,
}

// === impl Watch ===

impl Watch {
    /// What a change is on this watch, if anything.
    fn sees(&self, change: &Change) -> Option<News> {
        if change.kind != self.kind {
            return None;
        }
        let matches = |object: &&Object| match (&self.filter, object) {
            (Some(pod), Object::Run(run)) => {
                run.status.as_ref().and_then(|it| it.assigned_pod.as_ref()) == Some(pod)
            }
            _ => true,
        };
        let after = change.after.as_ref().filter(matches).cloned();
        let before = change.before.as_ref().filter(matches).cloned();
        let entry = change.entry.clone();
        match (after, before) {
            (Some(object), _) => Some(News::Apply(object, entry)),
            (None, Some(object)) => Some(News::Delete(object, entry)),
            (None, None) => None,
        }
    }
}

// === impl Sim ===

impl Sim {
    /// Begins a watch with a list.
    pub(crate) fn begin_watch(&mut self, actor: Actor, life: u64, kind: Kind, filter: Option<String>) -> u64 {
        let id = self.number();
        self.watches.insert(
            id,
            Watch {
                actor,
                life,
                kind,
                filter,
                position: 0,
                connected: false,
                must_list: true,
                scheduled: false,
                epoch: 0,
                slow: (0, 0),
            },
        );
        self.begin_list(id);
        id
    }

    /// Changes that nobody was told of yet are put on their way.
    pub(crate) fn wake_watches(&mut self) {
        if self.api.log.len() == self.announced {
            return;
        }
        let kinds: Vec<Kind> = self.api.log[self.announced..].iter().map(|it| it.kind).collect();
        self.announced = self.api.log.len();
        let idle: Vec<u64> = self
            .watches
            .iter()
            .filter(|(_, it)| it.connected && !it.scheduled && kinds.contains(&it.kind))
            .map(|(id, _)| *id)
            .collect();
        for id in idle {
            self.schedule_delivery(id);
        }
    }

    fn schedule_delivery(&mut self, id: u64) {
        let usual = self.rng.range(MS, 20 * MS);
        let now = self.now;
        let behind = self.behind_for(id);
        let Some(watch) = self.watches.get_mut(&id) else {
            return;
        };
        let lag = if watch.slow.0 > now { watch.slow.1 } else { 0 };
        let lag = lag.max(behind);
        watch.scheduled = true;
        let epoch = watch.epoch;
        self.at(now + usual + lag, Event::Deliver { watch: id, epoch });
    }

    pub(crate) fn deliver(&mut self, id: u64, epoch: u64) {
        let now = self.now;
        let Some(watch) = self.watches.get_mut(&id).filter(|it| it.epoch == epoch) else {
            return;
        };
        watch.scheduled = false;
        let (actor, life, kind) = (watch.actor, watch.life, watch.kind);
        if self.life_of(actor) != Some(life) {
            self.watches.remove(&id);
            return;
        }
        if !self.reaches_api(actor) {
            // The connection is dead and nobody has noticed yet.
            return self.break_watch(id, Break::Resume);
        }
        let Some(watch) = self.watches.get_mut(&id) else {
            return;
        };
        let from = watch.position;
        let next = self.api.log[from..]
            .iter()
            .enumerate()
            .find_map(|(at, change)| Some((from + at, watch.sees(change)?)));
        let Some((at, news)) = next else {
            watch.position = self.api.log.len();
            return;
        };
        watch.position = at + 1;
        let more = self.api.log[at + 1..].iter().any(|it| it.kind == kind);
        if more {
            watch.scheduled = true;
            let slow = watch.slow.0 > now;
            let pause = if slow {
                self.rng.range(0, 200 * MS)
            } else {
                self.rng.range(0, 2 * MS)
            };
            self.at(now + pause, Event::Deliver { watch: id, epoch });
        }
        self.deliver_news(actor, kind, news);
    }

    /// Breaks a watch; it is made anew after a while.
    pub(crate) fn break_watch(&mut self, id: u64, how: Break) {
        let pause = if self.quiet {
            self.rng.range(50 * MS, SECOND)
        } else {
            self.rng.range(50 * MS, 8 * SECOND)
        };
        let now = self.now;
        let Some(watch) = self.watches.get_mut(&id) else {
            return;
        };
        watch.epoch += 1;
        watch.connected = false;
        watch.scheduled = false;
        watch.must_list |= how == Break::Expire;
        let epoch = watch.epoch;
        self.at(now + pause, Event::Reconnect { watch: id, epoch });
    }

    pub(crate) fn reconnect(&mut self, id: u64, epoch: u64) {
        let Some(watch) = self.watches.get(&id).filter(|it| it.epoch == epoch) else {
            return;
        };
        if self.life_of(watch.actor) != Some(watch.life) {
            self.watches.remove(&id);
        } else if !self.reaches_api(watch.actor) {
            self.break_watch(id, Break::Resume);
        } else if watch.must_list {
            self.begin_list(id);
        } else {
            self.connect(id);
        }
    }

    fn connect(&mut self, id: u64) {
        if let Some(watch) = self.watches.get_mut(&id) {
            watch.connected = true;
            self.schedule_delivery(id);
        }
    }

    fn begin_list(&mut self, id: u64) {
        let mut position = self.api.log.len();
        let behind = self.behind_for(id);
        if behind > 0 {
            let since = self.now.saturating_sub(behind);
            position = self.api.log.partition_point(|it| it.at <= since);
        } else if !self.quiet && self.rng.chance(self.profile.stale_lists) {
            // From a server that lags behind, with its watches too.
            let most = if self.rng.chance(self.profile.old_lists) {
                40
            } else {
                6
            };
            let lag = self.rng.range(0, most * SECOND);
            let since = self.now.saturating_sub(lag);
            position = self.api.log.partition_point(|it| it.at <= since);
            self.slow_watch(id, self.now + lag, lag);
            self.injected("stale list");
        }
        let pause = self.rng.range(2 * MS, 80 * MS);
        let Some(watch) = self.watches.get(&id) else {
            return;
        };
        let epoch = watch.epoch;
        self.at(
            self.now + pause,
            Event::Listed {
                watch: id,
                epoch,
                position,
            },
        );
    }

    pub(crate) fn listed(&mut self, id: u64, epoch: u64, position: usize) {
        let Some(watch) = self.watches.get_mut(&id).filter(|it| it.epoch == epoch) else {
            return;
        };
        let (actor, life, kind) = (watch.actor, watch.life, watch.kind);
        if self.life_of(actor) != Some(life) {
            self.watches.remove(&id);
            return;
        }
        if !self.reaches_api(actor) {
            return self.break_watch(id, Break::Resume);
        }
        let Some(watch) = self.watches.get_mut(&id) else {
            return;
        };
        watch.must_list = false;
        watch.position = position;
        let filter = watch.filter.clone();
        let all = self.api.list(kind, position);
        let all = all
            .into_iter()
            .filter(|(object, _)| match (&filter, object) {
                (Some(pod), Object::Run(run)) => {
                    run.status.as_ref().and_then(|it| it.assigned_pod.as_ref()) == Some(pod)
                }
                _ => true,
            })
            .map(|(object, entry)| (object, entry.cloned()))
            .collect();
        self.connect(id);
        self.deliver_news(actor, kind, News::Reset(all));
    }

    /// How far behind the API server is that serves this watch.
    pub(crate) fn behind_for(&self, id: u64) -> Time {
        let Some(it) = self.behind.filter(|it| it.until > self.now) else {
            return 0;
        };
        if Rng::new(it.salt ^ id).chance(500) {
            it.lag
        } else {
            0
        }
    }

    /// Makes a watch slow for a while.
    pub(crate) fn slow_watch(&mut self, id: u64, until: Time, lag: Time) {
        if let Some(watch) = self.watches.get_mut(&id) {
            watch.slow = (until, lag);
        }
    }

    pub(crate) fn end_watches(&mut self, actor: Actor) {
        self.watches.retain(|_, it| it.actor != actor);
    }

    fn deliver_news(&mut self, actor: Actor, kind: Kind, news: News) {
        match actor {
            Actor::Scheduler(index) => self.scheduler_news(index, kind, news),
            Actor::Gateway(index) => self.gateway_news(index, news),
            Actor::Runtimed(pod) => self.runtimed_news(pod, news),
        }
    }
}
