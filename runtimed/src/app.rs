//! The one file that knows every part.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use jiff::Timestamp;
use kruntimes_api::names::{GATEWAY_CA, GATEWAY_PEER_CA, GATEWAY_URL, MODE_FUNCTION};
use kruntimes_authz::{Authorizer, Limits, NoObserver};
use kruntimes_ops::{
    admin::{self, Admin},
    drain::{Cause, Drain, Outcome},
    files::WatchedDir,
    metrics::Metrics,
    readiness::{Guard, Readiness},
};
use kruntimes_peer::{Incoming, OwnKey, TrustBundle, accept};
use kruntimes_proto::{
    executor::function_runtime_server::FunctionRuntimeServer, limits, owner::owner_server::OwnerServer,
};
use kruntimes_trace::Tracer;
use kube::{Api, Client};
use tokio::{
    net::TcpListener,
    sync::Semaphore,
    time::{Interval, MissedTickBehavior, interval, sleep},
};
use tonic::transport::Server;

use crate::{
    admission::Admission,
    args::{Args, CallerCredential},
    audit::Audit,
    caller::{Callers, GatewayIsEnough},
    events, gateway_config,
    heartbeat::{self, Contact},
    held::Held,
    invoker::Invoker,
    journal::Journal,
    lifecycle::{
        act::{Pod, REGISTERING},
        drivers::Drivers,
        watch,
    },
    metrics::Numbers,
    owner::OwnerService,
    runtime_server::RuntimeServer,
    server_watch::{self, ServerSilence},
    source::Workspace,
};

/// Largest HTTP/2 frame of the hop, bytes: few frames a message, and no buffer of a mebibyte.
const FRAME: u32 = 256 * 1024;
/// Windows of the hop, bytes: a message and some more for a stream, several for a connection.
const STREAM_WINDOW: u32 = 2 * 1024 * 1024;
const CONNECTION_WINDOW: u32 = 16 * 1024 * 1024;
/// Calls of one gateway at once.
const STREAMS: u32 = 1024;
/// Headers of a call: a token of 16 KiB and some more.
const HEADERS: u32 = 64 * 1024;
/// Between two rewrites of Runs that are Ready, after a change of the gateway or of our key.
const REFRESH: Duration = Duration::from_millis(200);
/// Between two attempts to ask the server which modes it supports.
const PROBE: Duration = Duration::from_millis(500);

/// A running daemon.
pub struct App {
    /// Where gateways are accepted, with the real port.
    pub hop: SocketAddr,
    /// What `status.owner` says of its Runs.
    pub owner: kruntimes_api::run::Owner,
    /// Its life.
    pub drain: Drain,
    /// Whether it is ready.
    pub readiness: Readiness,
    invoker: Invoker,
    admin: Admin,
    audit: Audit,
    refused: Arc<AtomicBool>,
    grace: Duration,
}

/// What comes from outside: tests bring their own.
pub struct Outside {
    /// Kubernetes, for Runs and Leases.
    pub client: Client,
    /// Who may call.
    pub callers: Arc<dyn Callers>,
    /// What must be seen to ask Kubernetes without an identity of its own before any Run is taken
    /// (C-3.6).
    pub anonymous: Option<Authorizer>,
    /// The Runtime Server.
    pub server: RuntimeServer,
    /// Where audit lines go.
    pub audit: Box<dyn io::Write + Send>,
    /// Whom spans are told.
    pub tracer: Tracer,
}

// === impl Outside ===

impl Outside {
    /// Kubernetes as configured, standard output, the server of the flags.
    ///
    /// # Errors
    /// When the configuration is wrong.
    pub async fn from_environment(args: &Args) -> anyhow::Result<Self> {
        let config = kube::Config::infer()
            .await
            .context("reading the Kubernetes configuration")?;
        let anonymous = match args.caller_credential {
            CallerCredential::Omit => None,
            CallerCredential::Forward => {
                let authorizer = Authorizer::new(&config, Limits::default(), NoObserver);
                Some(authorizer.context("setting up access reviews")?)
            }
        };
        let callers: Arc<dyn Callers> = match &anonymous {
            Some(authorizer) => Arc::new(authorizer.clone()),
            None => Arc::new(GatewayIsEnough),
        };
        Ok(Self {
            client: kruntimes_cluster::client(&config).context("setting up the Kubernetes client")?,
            callers,
            anonymous,
            server: RuntimeServer::connect_lazy(&args.server),
            audit: Box::new(io::stdout()),
            tracer: Tracer::default(),
        })
    }
}

// === impl App ===

impl App {
    /// Starts everything and returns what was bound.
    ///
    /// # Errors
    /// When a flag cannot be fulfilled; the text names it.
    pub async fn start(args: Args, drain: Drain, outside: Outside) -> anyhow::Result<Self> {
        let mut metrics = Metrics::new();
        let numbers = Numbers::register(&mut metrics);
        outside.tracer.register(metrics.kruntimes());
        let readiness = Readiness::new();
        let guards = ["access-reviews", server_watch::PART, "heartbeat", "watch"];
        let guards = guards.map(|part| readiness.register(part));

        let key = OwnKey::generate()?;
        let listener = TcpListener::bind(args.listen)
            .await
            .with_context(|| format!("--listen {}", args.listen))?;
        let hop = listener.local_addr()?;
        let me = args.me(hop, key.peer_key());
        let owner = me.owner.clone();
        let admin = admin::serve(args.ops.admin_address, Arc::new(metrics), readiness.clone())?;

        let trust = TrustBundle::new();
        let files = WatchedDir::new(
            &args.gateway_config_dir,
            &[GATEWAY_URL, GATEWAY_CA, GATEWAY_PEER_CA],
        );
        let gateway = gateway_config::watch(files, trust.clone(), &drain);
        let audit = Audit::new(&args.runtime, outside.audit, numbers.clone())?;
        let contact = Contact::new();
        let (events, publisher) = events::channel(outside.client.clone(), &me.pod);
        drain.spawn_background("events", publisher.run());
        let pod = Arc::new(Pod {
            runs: Api::namespaced(outside.client.clone(), &me.namespace),
            me,
            server: outside
                .server
                .exposing_errors(args.expose_errors)
                .tracing(outside.tracer.clone()),
            contact: contact.clone(),
            silence: ServerSilence::new(),
            functions: OnceLock::new(),
            held: Held::new(),
            admission: Mutex::new(Admission::new(args.capacity.0)),
            journal: Journal::open(&args.journal_dir)?,
            workspace: Workspace::new(&args.workspace)?,
            gateway,
            registering: Semaphore::new(REGISTERING),
            refresh: tokio::sync::Mutex::new(paced(REFRESH)),
            events,
            numbers,
            drain: drain.clone(),
            grace: args.ops.grace_period,
            wall: Timestamp::now,
        });
        let invoker = Invoker {
            pod: pod.me.pod_uid.clone(),
            held: pod.held.clone(),
            server: pod.server.clone(),
            callers: outside.callers,
            contact,
            audit: audit.clone(),
            drain: drain.clone(),
            tracer: outside.tracer,
        };
        let incoming = Incoming::new(listener, accept::server_config(&key, trust)?);
        let drivers = Drivers::new(Arc::clone(&pod));
        serve_hop(invoker.clone(), incoming, drivers.clone(), &drain);
        close_when_stopping(&pod, &readiness);
        let refused = Arc::new(AtomicBool::new(false));
        own_runs(
            Owning {
                pod,
                drivers,
                client: outside.client,
                readiness: readiness.clone(),
                anonymous: outside.anonymous,
                refused: Arc::clone(&refused),
            },
            guards,
        );
        tracing::info!(%hop, address = owner.address, key = owner.peer_key, "started");
        Ok(Self {
            hop,
            owner,
            drain,
            readiness,
            invoker,
            admin,
            audit,
            refused,
            grace: args.ops.grace_period,
        })
    }

    /// Where health and metrics are served, if anywhere.
    #[must_use]
    pub fn admin(&self) -> Option<SocketAddr> {
        self.admin.address()
    }

    /// What serves the hop, for a caller in the same process.
    #[must_use]
    pub fn invoker(&self) -> &Invoker {
        &self.invoker
    }

    /// What serves the rest of the hop, for a caller in the same process.
    #[must_use]
    pub fn owner_service(&self) -> OwnerService {
        OwnerService::new(self.invoker.clone(), Timestamp::now)
    }

    /// Waits until the process is asked to stop and has handed over its Runs.
    ///
    /// # Errors
    /// When it must not run in this configuration.
    pub async fn wait(self) -> anyhow::Result<Outcome> {
        let outcome = self.drain.wait(self.grace).await;
        self.audit.finish();
        anyhow::ensure!(
            !self.refused.load(Ordering::Relaxed),
            "access reviews would be answered for an identity of this process"
        );
        Ok(outcome)
    }
}

/// Ticks at most so often: what was not used while nothing was to do is not made up for later.
fn paced(period: Duration) -> Interval {
    let mut interval = interval(period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    interval
}

/// Until every Run is handed over: who calls meanwhile is told `Draining`, which is an answer, and
/// not that the connection is closing, after which nobody knows what became of a call.
fn serve_hop(invoker: Invoker, incoming: Incoming, drivers: Drivers, drain: &Drain) {
    let owner = OwnerServer::new(OwnerService::new(invoker.clone(), Timestamp::now));
    let service = FunctionRuntimeServer::new(invoker)
        .max_decoding_message_size(limits::MESSAGE_BYTES)
        .max_encoding_message_size(limits::MESSAGE_BYTES);
    let stopping = drain.stopping();
    let server = Server::builder()
        // A gateway must show again that its certificate is valid and trusted.
        .max_connection_age(accept::MAX_AGE)
        .max_frame_size(FRAME)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(STREAMS)
        .http2_max_header_list_size(HEADERS)
        .add_service(service)
        .add_service(owner)
        .serve_with_incoming_shutdown(incoming, async move {
            stopping.cancelled().await;
            drivers.none_left().await;
        });
    drain.spawn("hop", async move {
        if let Err(error) = server.await {
            tracing::error!(%error, "the hop ended");
        }
    });
}

/// The moment the process is asked to stop, before any Run's own task gets its turn.
fn close_when_stopping(pod: &Arc<Pod>, readiness: &Readiness) {
    let (pod, readiness) = (Arc::clone(pod), readiness.clone());
    let drain = pod.drain.clone();
    drain.spawn("close gates", async move {
        pod.drain.stopping().cancelled().await;
        readiness.fail("draining");
        pod.held.drain();
    });
}

/// What is needed to own Runs.
struct Owning {
    pod: Arc<Pod>,
    drivers: Drivers,
    client: Client,
    readiness: Readiness,
    anonymous: Option<Authorizer>,
    refused: Arc<AtomicBool>,
}

/// Sees that reviews are anonymous, asks the server what it can do, then tells Kubernetes and takes
/// Runs. Nothing is held before, so that calls are refused.
fn own_runs(owning: Owning, guards: [Guard; 4]) {
    let drain = owning.pod.drain.clone();
    drain.clone().spawn_background("runs", async move {
        let Owning {
            pod,
            drivers,
            client,
            readiness,
            anonymous,
            refused,
        } = owning;
        let [reviews, server, heartbeat, watched] = guards;
        if let Some(authorizer) = anonymous
            && let Err(error) = authorizer.verify_pool_is_anonymous().await
        {
            tracing::error!("{error}");
            refused.store(true, Ordering::Relaxed);
            return drain.stop(Cause::Asked("access reviews are not anonymous"));
        }
        drop(reviews);
        let functions = probe(&pod.server).await;
        let _ = pod.functions.set(functions);
        drop(server);
        let modes: &[&str] = if functions { &[MODE_FUNCTION] } else { &[] };
        tracing::info!(?modes, "the Runtime Server supports these modes");
        drain.spawn_background(
            "runtime server",
            server_watch::run(pod.server.clone(), pod.silence.clone(), readiness),
        );
        let beat = heartbeat::run(
            client,
            pod.me.clone(),
            modes,
            pod.contact.clone(),
            pod.silence.clone(),
            pod.numbers.clone(),
            heartbeat,
        );
        drain.spawn_background("heartbeat", beat);
        watch::run(
            pod.runs.clone(),
            &pod.me.pod,
            drivers,
            pod.journal.clone(),
            watched,
        )
        .await;
    });
}

async fn probe(server: &RuntimeServer) -> bool {
    let mut told = false;
    loop {
        match server.supports_functions().await {
            Ok(functions) => return functions,
            Err(error) if !told => {
                tracing::info!(%error, "waiting for the Runtime Server");
                told = true;
            }
            Err(_) => {}
        }
        sleep(PROBE).await;
    }
}
