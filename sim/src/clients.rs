//! Who uses the system: people who make, cancel and delete Runs, and callers who call them all the time.
//! Every call is written down on both sides, and the two must agree.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use kruntimes_api::{
    Run, fixtures,
    keys::{Attempt, RunUid},
    run::RetryPolicy,
};
use kruntimes_gateway::{error::InvokeError, reply::Output};
use kruntimes_proto::failure::Dispatched;

use crate::{
    api::NAMESPACE,
    clock::{MS, SECOND},
    events::Event,
    gateway::Letter,
    sim::{GATEWAYS, Sim},
};

/// Runs that exist at once; together they fit into the pool with one Pod missing.
const RUNS: usize = 4;

/// What callers remember.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    pub(crate) calls: u64,
    pub(crate) answered: u64,
    /// How often the code of a call began, by invocation id.
    executed: BTreeMap<String, u32>,
    /// Calls whose callers were told that the code did not run.
    refused: BTreeSet<String>,
    /// Of which Run each open call is.
    open: BTreeMap<u64, RunUid>,
    /// Every Run there ever was, the newest last.
    known: Vec<RunUid>,
}

// === impl Sim ===

impl Sim {
    pub(crate) fn user(&mut self) {
        if self.quiet {
            return;
        }
        let names: Vec<String> = self.api.runs.keys().cloned().collect();
        match self.rng.range(0, 10) {
            0..6 => self.make_run(),
            6 => {
                if let Some(name) = self.rng.pick(&names) {
                    self.cancel_run(&name);
                }
            }
            7..9 => {
                if let Some(name) = self.rng.pick(&names) {
                    self.trace(|| format!("user deletes {name}"));
                    self.api.delete_run(&name, self.now);
                }
            }
            _ => {}
        }
        let pause = self.rng.range(200 * MS, 4 * SECOND);
        self.at(self.now + pause, Event::User);
    }

    fn make_run(&mut self) {
        if self.api.runs.len() >= RUNS {
            return;
        }
        let free = (0..6)
            .map(|it| format!("fn-{it}"))
            .find(|it| !self.api.runs.contains_key(it));
        let Some(name) = free else { return };
        let number = self.number();
        let uid = fixtures::uid(&format!("run/{number}"));
        let (idle, timeout, ttl, policy) = (
            self.rng.chance(200).then(|| self.rng.range(2, 12)),
            self.rng.chance(150).then(|| self.rng.range(3, 30)),
            self.rng.chance(300).then(|| self.rng.range(0, 6)),
            self.rng.chance(300).then(|| self.rng.range(1, 5)),
        );
        let small = |it: u64| i32::try_from(it).unwrap_or(1);
        let run = fixtures::run(NAMESPACE, &name)
            .uid(&uid)
            .with(|run| {
                run.spec.source = None;
                if let Some(function) = &mut run.spec.mode.function {
                    function.idle_timeout_seconds = idle.map(small);
                }
                run.spec.timeout = timeout.map(|it| format!("{it}s"));
                run.spec.ttl_seconds_after_finished = ttl.map(small);
                run.spec.retry_policy = policy.map(|attempts| RetryPolicy {
                    max_attempts: Some(small(attempts)),
                    backoff: Some("300ms".to_owned()),
                    retryable_reasons: None,
                });
            })
            .build();
        self.clients.known.extend(run.run_uid());
        self.trace(|| format!("user makes {name} ({uid})"));
        self.api.put_run(run, self.now);
    }

    fn cancel_run(&mut self, name: &str) {
        if let Some(run) = self.api.runs.get(name) {
            let mut run: Run = (**run).clone();
            run.spec.cancel_requested = Some(true);
            self.trace(|| format!("user cancels {name}"));
            self.api.put_run(run, self.now);
        }
    }

    pub(crate) fn caller(&mut self) {
        let mut some: Vec<RunUid> = self.api.runs.values().filter_map(|it| it.run_uid()).collect();
        if self.rng.chance(100) {
            // Also what is long gone is called.
            some = self.clients.known.clone();
        }
        let index = self.rng.index(GATEWAYS);
        if let Some(run) = self.rng.pick(&some)
            && self.gateways[index].alive
        {
            let timeout = Duration::from_millis(self.rng.range(200, 15_000));
            self.clients.calls += 1;
            let number = self.number();
            self.clients.open.insert(number, run);
            self.call(index, number, run, timeout);
        }
        let pause = self.rng.range(10 * MS, 400 * MS);
        self.at(self.now + pause, Event::Caller);
    }

    /// The code of a call begins in the registration that was made for `made`.
    pub(crate) fn executed(&mut self, letter: &Letter, made: Option<(RunUid, Attempt)>) {
        let id = letter.id.as_str().to_owned();
        self.trace(|| format!("{id} runs for {} attempt {}", letter.run, letter.route.attempt));
        let times = self.clients.executed.entry(id.clone()).or_default();
        *times += 1;
        if *times > 1 {
            self.violated(format!("C-3.7: {id} is executed twice"));
        }
        if self.clients.refused.contains(&id) {
            self.violated(format!("C-3.2: {id} runs after its caller heard that it did not"));
        }
        if made != Some((letter.run, letter.route.attempt)) {
            self.violated(format!(
                "C-4: {id} was sent to {} attempt {} and reached {made:?}",
                letter.run, letter.route.attempt
            ));
        }
    }

    /// A caller has an answer, or lost its gateway.
    pub(crate) fn call_over(&mut self, number: u64, result: Option<Result<Output, InvokeError>>) {
        let run = self.clients.open.remove(&number);
        let id = format!("call-{number}");
        let times = self.clients.executed.get(&id).copied().unwrap_or_default();
        match result {
            None => {}
            Some(Ok(output)) => {
                self.clients.answered += 1;
                let of = run.map(|it| it.to_string()).unwrap_or_default();
                if output.body != of.as_bytes() || times != 1 {
                    self.violated(format!("C-8.6: {id} was answered by another function"));
                }
            }
            Some(Err(error)) => {
                self.trace(|| format!("{id} ends: {error:?}"));
                if error.row().dispatched == Dispatched::No {
                    if times > 0 {
                        self.violated(format!("C-3.2: {id} ran and its caller hears that it did not"));
                    }
                    self.clients.refused.insert(id);
                }
            }
        }
    }
}
