//! One watch on function Runs → the table. Knows nothing of what an entry means.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use futures::StreamExt as _;
use kruntimes_api::names;
use kruntimes_cluster::Pauses;
use kruntimes_ops::{
    drain::Drain,
    readiness::{Guard, Readiness},
};
use kube::{
    Api, Client, Config,
    core::{ApiResource, GroupVersionKind},
    runtime::{WatchStreamExt as _, watcher},
};
use tower::util::MapResponseLayer;

use super::{
    Entry,
    facts::SeenRun,
    shared::Shared,
    table::{News, Scope},
};

/// The API server ends each watch after this many seconds; so a watch that went silent is noticed (C-3.14).
const WATCH_TIMEOUT_SECONDS: u32 = 30;

/// Only functions: a Run without the field is not delivered.
const FUNCTIONS: &str = "spec.mode.function.handler!=";

/// How many pieces of news make one snapshot at most. Copying 10,000 entries takes some 100 µs.
const BATCH: usize = 1024;

/// When the watch last connected or delivered; clones share it.
#[derive(Debug, Clone)]
pub struct RouteAge {
    last: Arc<Mutex<Instant>>,
}

/// Watches `scopes` until the process ends. Readiness waits for the first list of each.
///
/// # Errors
/// When no client can be made of `config`.
pub fn start(
    config: &Config,
    scopes: &[Scope],
    table: &Arc<Shared>,
    readiness: &Readiness,
    drain: &Drain,
) -> Result<RouteAge, kube::Error> {
    let age = RouteAge::default();
    let client = client(config, age.clone())?;
    for scope in scopes {
        let api = api(client.clone(), scope);
        let guard = readiness.register("routes");
        let watch = run(api, scope.clone(), Arc::clone(table), age.clone(), guard);
        drain.spawn_background("route watch", watch);
    }
    Ok(age)
}

/// Every answer that is not an error counts as contact, also those that deliver nothing.
fn client(config: &Config, age: RouteAge) -> Result<Client, kube::Error> {
    let noting = MapResponseLayer::new(move |response: http::Response<_>| {
        if response.status().is_success() {
            age.touch();
        }
        response
    });
    Ok(kruntimes_cluster::builder(config)?.with_layer(&noting).build())
}

fn api(client: Client, scope: &Scope) -> Api<SeenRun> {
    let kind = GroupVersionKind::gvk(names::GROUP, names::VERSION, "Run");
    let resource = ApiResource::from_gvk_with_plural(&kind, names::RUNS);
    match scope {
        Scope::All => Api::all_with(client, &resource),
        Scope::Namespace(namespace) => Api::namespaced_with(client, namespace, &resource),
    }
}

async fn run(api: Api<SeenRun>, scope: Scope, table: Arc<Shared>, age: RouteAge, guard: Guard) {
    let config = watcher::Config::default()
        .fields(FUNCTIONS)
        .timeout(WATCH_TIMEOUT_SECONDS);
    let mut batches = watcher(api, config)
        .backoff(Pauses::default())
        .ready_chunks(BATCH)
        .boxed();
    let mut guard = Some(guard);
    let mut listing = Vec::new();
    let mut failing = false;
    while let Some(batch) = batches.next().await {
        let mut news = Vec::with_capacity(batch.len());
        for event in batch {
            match event {
                Ok(event) => {
                    age.touch();
                    if std::mem::take(&mut failing) {
                        tracing::info!("the watch on Runs works again");
                    }
                    news.extend(digest(event, &mut listing));
                }
                // One line when it begins; the age of the routes says how long it lasts.
                Err(error) if !failing => {
                    failing = true;
                    tracing::warn!(%error, "the watch on Runs fails; known routes stay in use");
                }
                Err(error) => tracing::debug!(%error, "the watch on Runs still fails"),
            }
        }
        let listed = news.iter().any(|piece| matches!(piece, News::Reset(_)));
        table.take_in(&scope, news);
        if listed && guard.take().is_some() {
            tracing::info!(functions = table.count().0, "the Runs are listed");
        }
    }
}

fn digest(event: watcher::Event<SeenRun>, listing: &mut Vec<Entry>) -> Option<News> {
    match event {
        watcher::Event::Apply(run) => Entry::of(&run).map(News::Apply),
        watcher::Event::Delete(run) => Entry::of(&run).map(News::Delete),
        watcher::Event::Init => {
            listing.clear();
            None
        }
        watcher::Event::InitApply(run) => {
            listing.extend(Entry::of(&run));
            None
        }
        watcher::Event::InitDone => Some(News::Reset(std::mem::take(listing))),
    }
}

// === impl RouteAge ===

impl Default for RouteAge {
    /// Nothing, as of now.
    fn default() -> Self {
        Self {
            last: Arc::new(Mutex::new(Instant::now())),
        }
    }
}

impl RouteAge {
    fn touch(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Time since the watch last connected or delivered.
    #[must_use]
    pub fn get(&self) -> Duration {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }
}
