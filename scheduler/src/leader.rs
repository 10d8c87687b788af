//! One term of being leader: watches, then the loops. Dropping the future ends all of it.

use jiff::Timestamp;
use kruntimes_api::names::LEASE_SCHEDULER;
use kruntimes_ops::drain::CancellationToken;
use kube::Client;
use tokio::sync::watch as channel;

use crate::{
    bind::Writer,
    events,
    hub::Hub,
    identity::Identity,
    lease::{Candidate, Term, Timing},
    metrics::Metrics,
    owners, pool,
    pools::PoolLoop,
    runs::RunLoop,
    watch,
};

/// What every term needs.
#[derive(Clone)]
pub struct Context {
    pub client: Client,
    /// Who this process is in the Lease.
    pub identity: String,
    pub system_namespace: String,
    /// Namespaces to serve; none means all.
    pub scopes: Vec<String>,
    pub pool: pool::Config,
    pub gateway_url: String,
    pub serving_secret: String,
    pub timing: Timing,
    /// Reads the wall clock.
    pub clock: fn() -> Timestamp,
    pub metrics: Metrics,
}

/// Campaigns and leads, term after term, until `stopping`.
pub async fn run(context: Context, stopping: CancellationToken) {
    let Context {
        client,
        identity,
        system_namespace,
        timing,
        ..
    } = context.clone();
    let mut candidate = Candidate::new(client, &system_namespace, LEASE_SCHEDULER, identity, timing);
    loop {
        let term = tokio::select! {
            term = candidate.acquire() => term,
            () = stopping.cancelled() => return,
        };
        tracing::info!(identity = context.identity, "leading");
        context.metrics.leader.set(1);
        let stopped = tokio::select! {
            () = candidate.keep(&term) => false,
            () = lead(&context, &term) => false,
            () = stopping.cancelled() => true,
        };
        term.end();
        context.metrics.leader.set(0);
        tracing::info!(identity = context.identity, "leading no more");
        if stopped {
            return candidate.release().await;
        }
    }
}

/// Everything a leader does. It begins with an empty index: what is decided on has been read
/// within this very term.
async fn lead(context: &Context, term: &Term) {
    let hub = Hub::new(watch::count(&context.scopes), context.clock);
    let (published, publishing) = channel::channel(None);
    let identity = Identity::new(context, term.clone(), published);
    let loops = async {
        hub.caught_up().await;
        tracing::info!("caught up with the cluster");
        let writer = Writer::new(context.client.clone(), term.clone());
        let (events, publisher) = events::channel(context.client.clone(), &context.identity);
        let marks = owners::mark_for_ever(&hub, &writer, &context.metrics);
        let runs = RunLoop::new(&hub, writer.clone(), events, &context.metrics);
        let pools = PoolLoop::new(
            &hub,
            writer.clone(),
            context.client.clone(),
            term.clone(),
            &context.pool,
            publishing,
            &context.metrics,
        );
        tokio::join!(runs.run(), pools.run(), marks, publisher.run());
    };
    tokio::join!(
        watch::run(&context.client, &context.scopes, &hub),
        loops,
        identity.run()
    );
}
