//! The composition root: the one file that knows every part. It returns what it bound, so that a test can
//! start the same thing on port 0.

use std::{net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use kruntimes_api::keys::RunKey;
use kruntimes_authz::{Authorizer, Bearer, Limits, Question, Verdict};
use kruntimes_ops::{
    admin::{self, Admin},
    args::OpsArgs,
    drain::{Cause, Drain, Outcome, Signals},
    log,
    metrics::Metrics as Registered,
    readiness::{Guard, Readiness},
    threads,
    tls_files::{self, TlsFiles},
};
use kruntimes_peer::{AddressRule, Dialer, RotatingIdentity, identity::certified_key};
use kruntimes_trace::Tracer;
use rustls::sign::CertifiedKey;
use tokio::net::TcpListener;

use crate::{
    admit::Admission,
    args::{Args, Config},
    ask::Questions,
    front::Front,
    hop::{
        channels::{self, Channels},
        client::Client,
    },
    invoke::{Authorize, Invoke},
    listen::{self, Listener},
    metrics::{Metrics, Sources},
    routes::{shared::Shared, watch},
};

/// How often channels of owners without routes are dropped.
const SWEEP: Duration = Duration::from_secs(10);

/// A gateway that serves.
pub struct Running {
    /// Where HTTPS is served.
    pub https: SocketAddr,
    /// Where health and metrics are served, unless that is off.
    pub admin: Option<SocketAddr>,
    /// Whether it is ready, and what is missing.
    pub readiness: Readiness,
    front: Arc<Front>,
    drain: Drain,
    delay: Duration,
    grace: Duration,
    _admin: Admin,
}

/// The program: logs, threads, start, and the end by signal.
///
/// # Errors
/// When something is missing that will not come by itself; the text says what to do.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let _flush = log::init(&args.log())?;
    let (tracer, _spans) = kruntimes_trace::from_environment("kruntimes-gateway")?;
    let config = Config {
        tracer,
        ..args.check()?
    };
    threads::runtime(config.args.threads)?.block_on(async {
        let kube = kube::Config::infer()
            .await
            .context("no Kubernetes configuration: run in a Pod, or set KUBECONFIG")?;
        let mut signals = Signals::new()?;
        let running = tokio::select! {
            running = start(config, kube) => running?,
            signal = signals.next() => {
                tracing::info!(signal, "stopped while starting");
                return Ok(ExitCode::SUCCESS);
            }
        };
        let signal = signals.next().await;
        tracing::info!(signal, "stopping");
        let outcome = tokio::select! {
            outcome = running.stop(signal) => outcome,
            signal = signals.next() => {
                tracing::warn!(signal, "stopping at once");
                return Ok(ExitCode::FAILURE);
            }
        };
        Ok(if outcome.is_clean() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    })
}

/// Starts everything and returns once HTTPS is served. Readiness comes later: it waits for certificates and
/// for the first list of Runs.
///
/// # Errors
/// When an address is taken, or the connections for access reviews carry an identity (C-3.6).
pub async fn start(config: Config, kube: kube::Config) -> anyhow::Result<Running> {
    let args = &config.args;
    let (drain, readiness, metrics) = (Drain::new(), Readiness::new(), Metrics::default());
    let reviews = readiness.register("access reviews");
    let limits = Limits {
        caps: config.caps,
        ..Limits::default()
    };
    let authorizer = Authorizer::new(&kube, limits, metrics.clone())?;
    let routes = Arc::new(Shared::new(config.scopes.iter().cloned()));
    let age = watch::start(&kube, &config.scopes, &routes, &readiness, &drain)?;
    let admission = Admission::new(args.max_in_flight, args.max_in_flight_per_namespace);
    let identity = peer_certificate(args, &readiness, &drain);
    let dialer = dialer(args, identity.clone());
    let channels = Arc::new(Channels::new(dialer, config.rested, config.max_age));
    renew(identity, &channels, &metrics, &drain);
    sweep(&channels, &routes, &drain);
    let certificates = serving_certificate(args, &readiness, &metrics, &drain);
    let admin = admin(
        &args.ops,
        &metrics,
        &readiness,
        &config.tracer,
        Sources {
            routes: Arc::clone(&routes),
            age: age.clone(),
            admission: admission.clone(),
            channels: Arc::clone(&channels),
        },
    )?;

    // Nobody may be let in before it is certain that a garbage token gets nobody in.
    authorizer
        .verify_pool_is_anonymous()
        .await
        .context("the gateway refuses to start")?;
    drop(reviews);

    let invoke = Invoke {
        routes,
        authorizer,
        admission,
        hop: Client::new(channels, args.caller_credential).tracing(config.tracer.clone()),
        questions: Questions::new(age),
        handover: args.handover_wait,
    };
    let socket = TcpListener::bind(args.listen)
        .await
        .with_context(|| format!("--listen {}", args.listen))?;
    let https = socket.local_addr()?;
    let front = Front::new(invoke, config.timeouts, config.patience, metrics).tracing(config.tracer.clone());
    let front = Arc::new(front);
    let listener = Listener {
        socket,
        tls: listen::server_config(certificates, args.tls_min_version)?,
        front: Arc::clone(&front),
        connections: config.connections,
    };
    drain.spawn("listener", listener.serve(drain.clone()));
    tracing::info!(address = %https, "HTTPS is served");
    Ok(Running {
        https,
        admin: admin.address(),
        readiness,
        front,
        drain,
        delay: args.shutdown_delay,
        grace: args.ops.grace_period,
        _admin: admin,
    })
}

// === impl Running ===

impl Running {
    /// Fails readiness, waits for endpoints to notice while answers ask callers to leave, closes the listener, waits
    /// for running calls (C-3.13).
    pub async fn stop(self, why: &'static str) -> Outcome {
        self.readiness.fail("draining");
        self.front.leave();
        tokio::time::sleep(self.delay).await;
        self.drain.stop(Cause::Asked(why));
        self.drain.wait(self.grace).await
    }
}

fn peer_certificate(args: &Args, readiness: &Readiness, drain: &Drain) -> TlsFiles<Arc<CertifiedKey>> {
    let files = tls_files::watch("peer certificate", &args.peer_dir, drain, |pair| {
        Ok(certified_key(&pair.cert_pem, &pair.key_pem)?)
    });
    hold_until_first(files.clone(), readiness.register("peer certificate"), drain);
    files
}

fn dialer(args: &Args, files: TlsFiles<Arc<CertifiedKey>>) -> Dialer {
    let identity = RotatingIdentity::new(move || Some(Arc::clone(&files.newest()?.value)));
    let rule = if args.allow_local_owners {
        AddressRule::AllowLocal
    } else {
        AddressRule::PodsOnly
    };
    Dialer::new(Arc::new(identity), rule, channels::DIAL_TIMEOUT)
}

/// With each new certificate of the hop new connections.
fn renew(mut files: TlsFiles<Arc<CertifiedKey>>, channels: &Arc<Channels>, metrics: &Metrics, drain: &Drain) {
    let (channels, gauge) = (Arc::clone(channels), metrics.peer_certificate_not_after.clone());
    drain.spawn_background("peer certificate in use", async move {
        let mut accepted = files.first().await;
        while let Some(pair) = accepted {
            gauge.set(pair.not_after.unwrap_or(0));
            channels.renew();
            accepted = files.next().await;
        }
    });
}

fn serving_certificate(
    args: &Args,
    readiness: &Readiness,
    metrics: &Metrics,
    drain: &Drain,
) -> TlsFiles<Arc<CertifiedKey>> {
    let files = tls_files::watch("serving certificate", &args.tls_dir, drain, |pair| {
        Ok(certified_key(&pair.cert_pem, &pair.key_pem)?)
    });
    hold_until_first(files.clone(), readiness.register("serving certificate"), drain);
    let (mut newer, gauge) = (files.clone(), metrics.certificate_not_after.clone());
    drain.spawn_background("certificate metric", async move {
        let mut accepted = newer.first().await;
        while let Some(pair) = accepted {
            gauge.set(pair.not_after.unwrap_or(0));
            accepted = newer.next().await;
        }
    });
    files
}

fn hold_until_first<T: Send + Sync + 'static>(mut files: TlsFiles<T>, guard: Guard, drain: &Drain) {
    drain.spawn_background("first certificate", async move {
        files.first().await;
        drop(guard);
    });
}

fn sweep(channels: &Arc<Channels>, routes: &Arc<Shared>, drain: &Drain) {
    let (channels, routes) = (Arc::clone(channels), Arc::clone(routes));
    drain.spawn_background("channel sweep", async move {
        loop {
            tokio::time::sleep(SWEEP).await;
            channels.retain(&routes.owners());
        }
    });
}

fn admin(
    ops: &OpsArgs,
    metrics: &Metrics,
    readiness: &Readiness,
    tracer: &Tracer,
    sources: Sources,
) -> anyhow::Result<Admin> {
    let mut registered = Registered::new();
    tracer.register(registered.kruntimes());
    metrics.register(&mut registered, sources);
    Ok(admin::serve(
        ops.admin_address,
        Arc::new(registered),
        readiness.clone(),
    )?)
}

impl Authorize for Authorizer {
    async fn authorize(&self, bearer: &Bearer, verb: &'static str, key: &RunKey) -> Verdict {
        let question = Question {
            verb,
            namespace: key.namespace.as_str().into(),
            name: key.name.as_str().into(),
            uid: key.uid.to_string().into(),
        };
        Self::authorize(self, bearer, &question).await
    }
}
