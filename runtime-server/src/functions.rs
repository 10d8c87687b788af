//! The registrations of this server and the tasks that run them.
//!
//! One lock guards the pure [`Registry`] and the handles of the supervisors; it is
//! held for moments and never across an await. A call that was admitted is at its
//! supervisor's desk before the lock is free, so that whoever drains a registration
//! afterwards finds the call there.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use kruntimes_ops::drain::Drain;
use kruntimes_proto::{
    failure::{Failure, Reason},
    ids::RegistrationId,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::Instant,
};

use crate::{
    adapter::{Adapter, Function},
    environment::{self, Inherited},
    metrics::Metrics,
    outcome::Answer,
    registry::{Moment, Registered, Registry, State, Status},
    request::{Invoke, Reference, Register, Unregister},
    start_lines,
    worker::{
        desk::{Call, Desk, Stop},
        exec::Confinement,
        process::{Plan, Spawner},
        supervise::{Phase, Settings, Supervisor},
    },
};

/// Everything functions need from this server.
#[derive(Debug)]
pub struct Host {
    /// The language.
    pub adapter: Arc<dyn Adapter>,
    /// Where workers are started.
    pub spawner: Spawner,
    /// What is the same for all supervisors.
    pub settings: Settings,
    /// Level and hidden paths; each function adds its own directories.
    pub confinement: Confinement,
    /// What workers see of the server's environment.
    pub inherited: Inherited,
    /// Holds a private directory per registration.
    pub state_dir: PathBuf,
    /// How long registering waits for the handler to be loaded.
    pub register_wait: Duration,
    /// Numbers.
    pub metrics: Arc<Metrics>,
}

/// The functions of one server.
#[derive(Debug, Clone)]
pub struct Functions {
    host: Arc<Host>,
    held: Held,
    drain: Drain,
}

/// Registry and supervisors, shared with the supervisors.
#[derive(Debug, Clone)]
pub struct Held(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<Inner>,
    /// How many supervisors there are.
    count: watch::Sender<usize>,
}

#[derive(Debug, Default)]
struct Inner {
    registry: Registry,
    supervisors: HashMap<RegistrationId, Handle>,
    /// After SIGTERM: nothing new.
    closed: bool,
    /// Registrations ever made.
    registered: u64,
}

#[derive(Debug)]
struct Handle {
    calls: mpsc::Sender<Call>,
    stop: watch::Sender<Stop>,
    phase: watch::Receiver<Phase>,
}

impl Functions {
    /// A server without functions.
    #[must_use]
    pub fn new(host: Host, drain: Drain) -> Self {
        let shared = Shared {
            state: Mutex::default(),
            count: watch::Sender::new(0),
        };
        Self {
            host: Arc::new(host),
            held: Held(Arc::new(shared)),
            drain,
        }
    }

    /// Registers a function whose module is in `folder`, or joins an earlier wish for the
    /// same one, and waits a bounded time until it is loaded. Giving up waiting changes
    /// nothing.
    ///
    /// # Errors
    /// As [`Registry::register`]; `InvalidPayload` when the language refuses the
    /// handler's name; `ServerUnavailable` while the server stops.
    pub async fn register(
        &self,
        wish: Register,
        folder: PathBuf,
    ) -> Result<(RegistrationId, State), Failure> {
        let run_uid = wish.run_uid.clone();
        let (id, mut phase) = self.start(wish, folder)?;
        let settled = phase.wait_for(|phase| *phase != Phase::Starting);
        let _ = tokio::time::timeout(self.host.register_wait, settled).await;
        let status = self.held.lock().registry.status(&run_uid, &id)?;
        Ok((id, status.state))
    }

    /// Reads one registration.
    ///
    /// # Errors
    /// As [`Registry::status`].
    pub fn status(&self, of: &Reference) -> Result<Status, Failure> {
        self.held.lock().registry.status(&of.run_uid, &of.id)
    }

    /// Runs one call. Dropping the future tells the supervisor that nobody waits.
    ///
    /// # Errors
    /// As [`Registry::begin`], and every failure of a call.
    pub async fn invoke(&self, wish: Invoke) -> Result<Answer, Failure> {
        let (reply, answer) = oneshot::channel();
        {
            let mut inner = self.held.lock();
            let Reference { run_uid, id } = &wish.function;
            inner
                .registry
                .begin(run_uid, id, wish.deadline.into_std(), now())?;
            let slot = Slot {
                held: self.held.clone(),
                function: wish.function.clone(),
            };
            let call = Call {
                id: wish.invocation_id,
                trace: wish.trace,
                input: wish.input,
                timeout: wish.timeout,
                deadline: wish.deadline,
                slot,
                reply,
            };
            let sent = match inner.supervisors.get(id) {
                Some(handle) => handle
                    .calls
                    .try_send(call)
                    .map_err(mpsc::error::TrySendError::into_inner),
                None => Err(call),
            };
            // A call that came back frees its slot when it drops: not under this lock.
            drop(inner);
            if sent.is_err() {
                return Err(Failure::new(Reason::Draining, "the function takes no more calls"));
            }
        }
        answer.await.unwrap_or_else(|_| {
            Err(Failure::new(
                Reason::RuntimeServerError,
                "the call was lost inside the server",
            ))
        })
    }

    /// Ends a registration and returns when no process of it is left. Giving up
    /// waiting changes nothing.
    ///
    /// # Errors
    /// As [`Registry::drain`].
    pub async fn unregister(&self, wish: Unregister) -> Result<(), Failure> {
        let phase = {
            let mut inner = self.held.lock();
            let Reference { run_uid, id } = &wish.function;
            if !inner.registry.drain(run_uid, id)? {
                return Ok(());
            }
            inner.supervisors.get(id).map(|handle| {
                handle.order(if wish.cancel {
                    Stop::Cancel
                } else {
                    Stop::Drain(wish.drain_until)
                });
                handle.phase.clone()
            })
        };
        if let Some(mut phase) = phase {
            let _ = phase.wait_for(|phase| *phase == Phase::Gone).await;
        }
        Ok(())
    }

    /// Takes no new registrations and waits until the last one is gone.
    pub async fn emptied(&self) {
        self.held.lock().closed = true;
        let _ = self.held.0.count.subscribe().wait_for(|count| *count == 0).await;
    }

    /// Ends every function at once.
    pub fn cancel_all(&self) {
        for handle in self.held.lock().supervisors.values() {
            handle.order(Stop::Cancel);
        }
    }

    fn start(
        &self,
        wish: Register,
        folder: PathBuf,
    ) -> Result<(RegistrationId, watch::Receiver<Phase>), Failure> {
        let function = Function {
            handler: wish.handler.name.clone(),
            working_dir: wish.working_dir,
            folder,
        };
        let program = self
            .host
            .adapter
            .program(&function)
            .map_err(|why| Failure::new(Reason::InvalidPayload, why))?;
        let mut inner = self.held.lock();
        let new = RegistrationId::generate();
        if inner.closed && !inner.registry.holds(&wish.run_uid, wish.attempt) {
            return Err(Failure::new(Reason::ServerUnavailable, "the server is stopping"));
        }
        let registered = inner
            .registry
            .register(&wish.run_uid, wish.attempt, &wish.digest, &new)?;
        let replaces = match registered {
            Registered::Known(id) => {
                let gone = || Failure::new(Reason::ServerUnavailable, "the registration is ending");
                let phase = inner.supervisors.get(&id).map(|handle| handle.phase.clone());
                return Ok((id, phase.ok_or_else(gone)?));
            }
            Registered::New { replaces } => replaces,
        };
        let before = replaces.and_then(|old| inner.supervisors.get(&old)).map(|old| {
            old.order(Stop::Cancel);
            old.phase.clone()
        });
        let private = self.host.state_dir.join(new.as_str());
        let env = environment::worker(
            &self.host.inherited,
            &wish.run_uid,
            &new,
            &private,
            &wish.handler,
            program.env,
            wish.env,
        );
        let mut confinement = self.host.confinement.clone();
        inner.registered += 1;
        confinement.mark = inner.registered;
        confinement.read.extend(program.read);
        confinement
            .write
            .extend([function.working_dir.clone(), private.clone()]);
        let plan = Plan {
            run_uid: wish.run_uid,
            program: program.program,
            args: program.args,
            speech: program.speech,
            env,
            working_dir: function.working_dir.clone(),
            confinement,
            mark_in_env: environment::mark(&new),
            private,
        };
        let (calls, desk) = mpsc::channel(1);
        let (stop, orders) = watch::channel(Stop::No);
        let (phase, progress) = watch::channel(Phase::Starting);
        let supervisor = Supervisor {
            id: new.clone(),
            plan: Arc::new(plan),
            spawner: self.host.spawner.clone(),
            held: self.held.clone(),
            settings: self.host.settings.clone(),
            metrics: Arc::clone(&self.host.metrics),
            desk: Desk::new(desk, orders),
            phase,
        };
        inner.supervisors.insert(
            new.clone(),
            Handle {
                calls,
                stop,
                phase: progress.clone(),
            },
        );
        self.held.0.count.send_replace(inner.supervisors.len());
        drop(inner);
        self.announce(&function);
        self.drain.spawn("function", supervisor.run(before));
        Ok((new, progress))
    }

    fn announce(&self, function: &Function) {
        let (module, name) = function
            .handler
            .rsplit_once('.')
            .unwrap_or((&function.handler, ""));
        let file = function.folder.join(self.host.adapter.source_file(module));
        start_lines::print(&start_lines::importing(&file, name));
    }
}

impl Handle {
    /// Orders only become more urgent.
    fn order(&self, stop: Stop) {
        self.stop.send_if_modified(|ordered| {
            let sooner = match (*ordered, stop) {
                (Stop::Drain(until), Stop::Drain(earlier)) => earlier < until,
                (now, then) => then > now,
            };
            if sooner {
                *ordered = stop;
            }
            sooner
        });
    }
}

impl Held {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first worker loaded the handler.
    pub(crate) fn ready(&self, run_uid: &str, id: &RegistrationId) {
        self.lock().registry.ready(run_uid, id, now());
    }

    /// No worker can be started.
    pub(crate) fn failed(&self, run_uid: &str, id: &RegistrationId, why: &str) {
        self.lock().registry.failed(run_uid, id, why);
    }

    /// The supervisor has ended.
    pub(crate) fn gone(&self, run_uid: &str, id: &RegistrationId) {
        let mut inner = self.lock();
        inner.registry.remove(run_uid, id);
        // Calls at its desk free their slots when they drop: not under this lock.
        let handle = inner.supervisors.remove(id);
        self.0.count.send_replace(inner.supervisors.len());
        drop(inner);
        drop(handle);
    }
}

/// The slot of one call; free when it drops.
#[derive(Debug)]
pub struct Slot {
    held: Held,
    function: Reference,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.held
            .lock()
            .registry
            .end(&self.function.run_uid, &self.function.id, now());
    }
}

/// Both clocks, read at the edge.
fn now() -> Moment {
    let unix_nano = i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX);
    Moment {
        monotonic: Instant::now().into_std(),
        unix_nano,
    }
}
