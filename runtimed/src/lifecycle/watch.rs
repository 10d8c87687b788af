//! Runs assigned to this Pod's name → their drivers.
//!
//! This file knows objects by key only. What an event means is decided elsewhere, and a Run that
//! vanishes from the watch is doubted, not dropped.

use std::collections::HashSet;

use futures::{StreamExt as _, TryStreamExt as _};
use kruntimes_api::Run;
use kruntimes_cluster::Pauses;
use kruntimes_ops::readiness::Guard;
use kube::{
    Api,
    runtime::{
        WatchStreamExt as _,
        watcher::{self, Event, watcher},
    },
};

use super::drivers::{Drivers, Seen};

/// Seconds after which the API server ends a watch, so that a dead connection is noticed.
const WATCH_SECONDS: u32 = 30;

/// Watches for ever. `ready` drops after the first whole list.
pub async fn run(
    runs: Api<Run>,
    pod: &str,
    drivers: Drivers,
    journal: crate::journal::Journal,
    ready: Guard,
) {
    let config = watcher::Config::default()
        .fields(&format!("status.assignedPod={pod}"))
        .timeout(WATCH_SECONDS);
    let events = watcher(runs, config).backoff(Pauses::default());
    let mut events = std::pin::pin!(events.map_err(|error| error.to_string()));
    let mut listed = HashSet::new();
    let mut first = Vec::new();
    let mut ready = Some(ready);
    let mut failing = false;
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => {
                listed.clear();
                first.clear();
            }
            Ok(Event::InitApply(run)) => {
                listed.extend(run.run_uid());
                if ready.is_some() {
                    first.push(run);
                } else {
                    tell(&drivers, run);
                }
            }
            Ok(Event::InitDone) => {
                let first_list = ready.take();
                // What is registered here already comes before what is new: it holds its capacity, also when
                // the list is too old to show it.
                if first_list.is_some() {
                    for (uid, record) in journal.all() {
                        if !listed.contains(&uid) {
                            drivers.tell(record.key(uid), Seen::Doubt);
                        }
                    }
                } else {
                    for uid in drivers.all() {
                        if !listed.contains(&uid) {
                            drivers.doubt(uid);
                        }
                    }
                }
                first.sort_by_key(|run| run.run_uid().is_none_or(|uid| journal.get(uid).is_none()));
                for run in first.drain(..) {
                    tell(&drivers, run);
                }
                drop(first_list);
            }
            Ok(Event::Apply(run)) => tell(&drivers, run),
            Ok(Event::Delete(run)) => {
                if let Some(uid) = run.run_uid() {
                    drivers.doubt(uid);
                }
            }
            Err(error) => {
                if !failing {
                    tracing::warn!(error, "the watch on Runs fails");
                }
                failing = true;
                continue;
            }
        }
        failing = false;
    }
}

fn tell(drivers: &Drivers, run: Run) {
    if let Some(key) = run.key() {
        drivers.tell(key, Seen::Object(std::sync::Arc::new(run)));
    }
}
