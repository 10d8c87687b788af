//! Wires the scheduler together and waits for its end.

use std::{process::ExitCode, sync::Arc};

use anyhow::Context as _;
use kruntimes_ops::{admin, drain::Drain, log, metrics::Metrics as Registry, readiness::Readiness};
use kube::{Client, Config};

use crate::{
    args::Args,
    leader::{self, Context},
    lease::Timing,
    metrics::Metrics,
    pool,
};

/// Runs until a signal.
///
/// # Errors
/// When it cannot start: a flag, the Kubernetes configuration, the admin port.
pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let _flush = log::init(&args.ops)?;
    let mut registry = Registry::new();
    let metrics = Metrics::register(&mut registry);
    let readiness = Readiness::new();
    let drain = Drain::new();
    drain.stop_on_signals().context("install signal handlers")?;
    let starting = readiness.register("kubernetes configuration");
    let admin = admin::serve(args.ops.admin_address, Arc::new(registry), readiness.clone())?;
    let config = Config::infer()
        .await
        .context("read the Kubernetes configuration (KUBECONFIG or in-cluster)")?;
    tracing::info!(cluster = %config.cluster_url, "starting");
    let client = kruntimes_cluster::client(&config).context("make a Kubernetes client")?;
    // A standby is ready: it is there to take over, and nobody calls it.
    drop(starting);
    drain.spawn(
        "leader",
        leader::run(context(&args, client, metrics), drain.stopping()),
    );
    let outcome = drain.wait(args.ops.grace_period).await;
    drop(admin);
    Ok(if outcome.is_clean() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn context(args: &Args, client: Client, metrics: Metrics) -> Context {
    Context {
        client,
        identity: args
            .identity
            .clone()
            .unwrap_or_else(|| uuid::Uuid::new_v4().to_string()),
        system_namespace: args.system_namespace.clone(),
        scopes: args.scopes(),
        pool: pool::Config {
            image: args.runtimed_image.clone(),
            pull_policy: args.image_pull_policy,
            cluster_role: args.runtimed_cluster_role.clone(),
            gateway_namespace: args.gateway_namespace.clone(),
            extra_args: args.runtimed_extra_arg.clone(),
            egress: args.pool_egress.clone(),
            otel: args.pool_otel.clone(),
        },
        gateway_url: args.gateway_url.clone(),
        serving_secret: args.serving_secret.clone(),
        timing: Timing::default(),
        clock: jiff::Timestamp::now,
        metrics,
    }
}
