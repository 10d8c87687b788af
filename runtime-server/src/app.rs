//! The one file that knows every part: flags in, a running server out.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use kruntimes_ops::{
    admin,
    drain::{Cause, Drain, Signals},
    metrics::Metrics as Registry,
    readiness::Readiness,
};
use kruntimes_proto::{
    executor::{function_runtime_server::FunctionRuntimeServer, runtime_server::RuntimeServer},
    limits,
};
use kruntimes_trace::Tracer;
use tokio::signal::unix::{SignalKind, signal};
use tonic::transport::{Server, server::Router};
use tracing::{info, warn};

use crate::{
    adapter::{Adapter, Function, Language, bash::Bash, python::Python},
    args::{Isolation, ServerArgs, Switch},
    environment::{Inherited, PUBLISHER_PROXY_ADDRESS, TRACE_COLLECTOR_ENDPOINT},
    functions::{Functions, Host},
    listen::{self, ListenAddress},
    metrics::Metrics,
    service::{FunctionService, RuntimeService},
    start_lines,
    worker::{
        exec::{self, Confinement},
        process::Spawner,
        supervise::Settings,
        sweep::Children,
    },
};

/// Stays below what HTTP/2 peers have to accept and takes a whole message at once.
const WINDOW_BYTES: u32 = 2 * 1024 * 1024;
/// Fewer, larger frames for large inputs.
const FRAME_BYTES: u32 = 256 * 1024;

/// So that a deadline of a call is seldom the earliest one.
const TICK: Duration = Duration::from_secs(1);

/// Runs the server until it is told to stop and its last function is gone.
///
/// # Errors
/// When something it needs is missing: the interpreter, the socket, a directory.
pub async fn run(args: ServerArgs, tracer: Tracer) -> anyhow::Result<()> {
    let state = StateDir::create(args.state_dir.clone(), &args.workspace)?;
    let adapter: Arc<dyn Adapter> = match args.adapter {
        Language::Python => Arc::new(Python::prepare(&args.python, state.path())?),
        Language::Bash => Arc::new(Bash::prepare(&args.bash, state.path())?),
    };
    let mut confinement = Confinement {
        level: 1,
        hide: hidden(&args, state.path()),
        ..Confinement::default()
    };
    confinement.level = probe(args.isolation, adapter.as_ref(), &confinement, state.path())?;
    let about = format!("{}, isolation level {}", adapter.name(), confinement.level);

    let mut registry = Registry::new();
    let metrics = Arc::new(Metrics::register(registry.kruntimes()));
    metrics.isolation_level(confinement.level);
    tracer.register(registry.kruntimes());
    let readiness = Readiness::new();
    let starting = readiness.register("listener");
    let admin = admin::serve(args.ops.admin_address, Arc::new(registry), readiness)
        .context("serve --admin-address")?;

    let drain = Drain::new();
    // Before the first child: descendants of workers become our children when their
    // parents end, and so can be found and reaped.
    nix::sys::prctl::set_child_subreaper(true).context("become the reaper of descendants")?;
    let children = Children::default();
    let mut child_ended = signal(SignalKind::child()).context("listen for SIGCHLD")?;
    let orphans = children.clone();
    drain.spawn_background("orphans", async move {
        while child_ended.recv().await.is_some() {
            let orphans = orphans.clone();
            let _ = tokio::task::spawn_blocking(move || orphans.reap_orphans()).await;
        }
    });

    let inherited = Inherited::pick(std::env::vars_os(), &adapter.runtime(), args.call_timeout);
    let runtime = inherited.runtime().to_owned();
    start_lines::print(&start_lines::tracing(inherited.get(TRACE_COLLECTOR_ENDPOINT)));
    start_lines::print(&start_lines::publisher(inherited.get(PUBLISHER_PROXY_ADDRESS)));
    let host = Host {
        adapter,
        spawner: Spawner::start(children).context("start the spawner thread")?,
        settings: Settings {
            start_timeout: args.start_timeout,
            on_caller_gone: args.on_caller_gone,
            expose_errors: args.expose_errors,
        },
        confinement,
        inherited,
        state_dir: state.path().to_owned(),
        register_wait: args.register_wait,
        metrics,
    };
    drain.spawn_background("tick", async {
        // The runtime wakes itself up for each deadline that is earlier than all others, which that of a call would be.
        let mut tick = tokio::time::interval(TICK);
        loop {
            tick.tick().await;
        }
    });
    let functions = Functions::new(host, drain.clone());
    let signals = Signals::new().context("listen for SIGTERM")?;
    drain.spawn_background(
        "signals",
        stop_when_emptied(signals, functions.clone(), drain.clone()),
    );

    let router = services(functions.clone(), &args, &about, tracer);
    let stopping = drain.stopping();
    let stop = async move { stopping.cancelled().await };
    let server = match &args.listen {
        ListenAddress::Unix(path) => {
            let listener =
                listen::bind_unix(path).with_context(|| format!("listen on unix://{}", path.display()))?;
            let connections = listen::unix_connections(listener, args.peer_check == Switch::On);
            let address = format!("unix://{}", path.display());
            start_lines::print(&start_lines::starting(&runtime, &address));
            info!(%address, about, "serving");
            drain.spawn("server", router.serve_with_incoming_shutdown(connections, stop))
        }
        ListenAddress::Tcp(address) => {
            let (listener, bound) = listen::bind_tcp(*address)
                .await
                .with_context(|| format!("listen on tcp://{address}"))?;
            warn!("--listen is a TCP address: functions can use the server's API");
            start_lines::print(&start_lines::starting(&runtime, &bound.to_string()));
            info!(address = %format_args!("tcp://{bound}"), about, "serving");
            drain.spawn(
                "server",
                router.serve_with_incoming_shutdown(listen::tcp_connections(listener), stop),
            )
        }
    };
    drop(starting);

    let outcome = drain.wait(args.ops.grace_period).await;
    if let ListenAddress::Unix(path) = &args.listen {
        let _ = fs::remove_file(path);
    }
    drop((admin, state));
    info!(cause = ?outcome.cause, "stopped");
    match tokio::time::timeout(Duration::ZERO, server).await {
        Ok(Ok(served)) => served.context("serve gRPC"),
        Ok(Err(panicked)) => Err(panicked).context("serve gRPC"),
        Err(_) => Ok(()),
    }
}

fn services(functions: Functions, args: &ServerArgs, about: &str, tracer: Tracer) -> Router {
    let service = FunctionService::new(functions, args.workspace.clone(), args.call_timeout, tracer);
    let functions = FunctionRuntimeServer::new(service)
        .max_decoding_message_size(limits::MESSAGE_BYTES)
        .max_encoding_message_size(limits::MESSAGE_BYTES);
    // No keepalive pings: the peer is in the same Pod, and servers of other languages
    // answer them with GOAWAY, so clients must not get used to them.
    Server::builder()
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES)
        .add_service(functions)
        .add_service(RuntimeServer::new(RuntimeService::new(about)))
}

/// SIGTERM is no reason to end a call: runtimed drains and unregisters, then we go
/// (C-6.4). SIGINT, or a second signal, ends everything now.
async fn stop_when_emptied(mut signals: Signals, functions: Functions, drain: Drain) {
    let first = signals.next().await;
    info!(signal = first, "stopping when the last function is gone");
    if first == "SIGINT" {
        functions.cancel_all();
    }
    let emptied = functions.emptied();
    tokio::pin!(emptied);
    loop {
        tokio::select! {
            () = &mut emptied => break,
            signal = signals.next() => {
                if signal == "SIGINT" {
                    functions.cancel_all();
                }
            }
        }
    }
    drain.stop(Cause::Asked(first));
}

/// What functions must not reach: each other's files, the socket, the server's state.
fn hidden(args: &ServerArgs, state: &Path) -> Vec<PathBuf> {
    let mut paths: BTreeSet<PathBuf> = args.hide.iter().cloned().collect();
    paths.extend([
        args.workspace.clone(),
        state.to_owned(),
        std::env::temp_dir(),
        PathBuf::from("/dev"),
    ]);
    if let ListenAddress::Unix(path) = &args.listen {
        paths.extend(
            path.parent()
                .filter(|parent| *parent != Path::new("/"))
                .map(Path::to_owned),
        );
    }
    paths
        .into_iter()
        .map(|path| path.canonicalize().unwrap_or(path))
        .collect()
}

/// Starts the interpreter once as a worker would be, and lowers the level if that
/// fails where it may.
fn probe(
    wanted: Isolation,
    adapter: &dyn Adapter,
    confinement: &Confinement,
    state: &Path,
) -> anyhow::Result<u8> {
    if wanted == Isolation::Zero {
        return Ok(0);
    }
    let function = Function {
        handler: "probe.probe".to_owned(),
        working_dir: state.to_owned(),
        folder: state.to_owned(),
    };
    let program = adapter.program(&function).map_err(anyhow::Error::msg)?;
    let mut confinement = confinement.clone();
    confinement.read.extend(program.read);
    let output = exec::command(&confinement, &program.program, &adapter.trial())
        .output()
        .context("start a worker on trial")?;
    if output.status.success() {
        return Ok(1);
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let why = limits::clip(text.trim(), 1024);
    anyhow::ensure!(
        wanted == Isolation::Auto,
        "--isolation 1 does not work here: {why}"
    );
    warn!(
        why,
        "functions are not isolated from each other against intent: level 0"
    );
    Ok(0)
}

/// A private directory, removed at the end.
struct StateDir(PathBuf);

impl StateDir {
    fn create(given: Option<PathBuf>, workspace: &Path) -> anyhow::Result<Self> {
        let name = format!("kruntimes-runtime-server-{}", uuid::Uuid::new_v4().simple());
        let candidates = match given {
            Some(path) => vec![path.join(name)],
            // A read-only image has no other writable place than the workspace.
            None => vec![
                std::env::temp_dir().join(&name),
                workspace.join(format!(".{name}")),
            ],
        };
        let mut result = Err(anyhow::anyhow!("no place for private files"));
        for path in candidates {
            match fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) => {
                    result = Err(error).with_context(|| format!("create {}; set --state-dir", path.display()))
                }
            }
        }
        result
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
