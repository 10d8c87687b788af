//! A Runtime Server that does what a test tells it to, and remembers what it was asked.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
};

use jiff::Timestamp;
use kruntimes_proto::{
    executor::{
        FunctionRegistration, FunctionRegistrationState as State, FunctionStatusRequest,
        FunctionStatusResponse, InvokeFunctionRequest, InvokeFunctionResponse, RegisterFunctionRequest,
        RegisterFunctionResponse, UnregisterFunctionRequest, UnregisterFunctionResponse,
        function_runtime_server::{FunctionRuntime, FunctionRuntimeServer},
    },
    limits,
};
use kruntimes_runtimed::{
    runtime_server::RuntimeServer,
    server_channel::{Io, ServerChannel},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream},
    sync::{Notify, Semaphore, mpsc},
    time::Instant,
};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status, metadata::MetadataMap, transport::Server};

use super::Fate;

/// Clones share it.
#[derive(Clone)]
pub(crate) struct FakeServer(Arc<Shared>);

struct Shared {
    state: Mutex<Inner>,
    changed: Notify,
    /// One permit lets one call of `wait` end.
    go: Semaphore,
    /// HTTP/2 pings of the client's own.
    pings: AtomicUsize,
    /// Clock of the node, which a paused test moves.
    began: (Timestamp, Instant),
}

#[derive(Default)]
struct Inner {
    registrations: HashMap<String, Registration>,
    next: u32,
    starts: Starts,
    silent: bool,
    /// Takes requests and answers none.
    hangs: bool,
    /// Answers about registrations, and nothing about what it does not know.
    ignores_strangers: bool,
    /// So many unregistrations fail.
    keeps: usize,
    /// A call runs in each registration that no caller here began.
    occupied: bool,
    /// A call goes on when its caller is gone.
    finishes: bool,
    /// What each call leaves where `KRUNTIME_OUTPUTS` says.
    leaves: Option<String>,
    unsupported: bool,
    registered: Vec<RegisterFunctionRequest>,
    unregistered: Vec<String>,
    invoked: Vec<InvokeFunctionRequest>,
    /// What came with each.
    metadata: Vec<MetadataMap>,
    /// Bare statuses to answer calls with.
    answers: Vec<Status>,
    output: Option<InvokeFunctionResponse>,
    ended_by_caller: usize,
    fate: Fate,
}

struct Registration {
    id: String,
    attempt: i32,
    digest: String,
    state: State,
    in_flight: i32,
    last_activity: i64,
    fatal: String,
}

/// How registrations begin.
#[derive(Clone, Default, PartialEq)]
pub(crate) enum Starts {
    /// Ready at once.
    #[default]
    Ready,
    /// Registering until told otherwise.
    Slowly,
    /// Failed with this text.
    Failed(String),
    /// Refused with InvalidArgument.
    Refused(String),
}

impl FakeServer {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Shared {
            state: Mutex::default(),
            changed: Notify::new(),
            go: Semaphore::new(0),
            pings: AtomicUsize::new(0),
            began: (Timestamp::now(), Instant::now()),
        }))
    }

    /// A client over pipes in memory, so that a paused clock waits for nothing real.
    pub(crate) fn client(&self) -> RuntimeServer {
        let (dial, accept) = mpsc::unbounded_channel::<Result<DuplexStream, std::io::Error>>();
        let service = FunctionRuntimeServer::new(self.clone())
            .max_decoding_message_size(limits::MESSAGE_BYTES)
            .max_encoding_message_size(2 * limits::MESSAGE_BYTES);
        let serve = Server::builder()
            .add_service(service)
            .serve_with_incoming(UnboundedReceiverStream::new(accept));
        spawn(async move { serve.await.expect("the fake server serves") });
        let frames = self.clone();
        RuntimeServer::over(ServerChannel::by(move || {
            let (ours, tapped) = tokio::io::duplex(64 * 1024);
            let (onward, theirs) = tokio::io::duplex(64 * 1024);
            spawn(tap(tapped, onward, frames.clone()));
            let dialled = dial
                .send(Ok(theirs))
                .map_err(|_| std::io::Error::other("the server is gone"));
            std::future::ready(dialled.map(|()| Box::new(ours) as Box<dyn Io>))
        }))
    }

    /// How the next registrations begin.
    pub(crate) fn starts(&self, starts: Starts) {
        self.state().starts = starts;
    }

    /// Moves every registration to a state.
    pub(crate) fn set_all(&self, state: State) {
        let now = self.now();
        for registration in self.state().registrations.values_mut() {
            registration.state = state;
            registration.last_activity = now;
        }
    }

    /// Answers nothing about registrations but Unavailable.
    pub(crate) fn set_silent(&self, silent: bool) {
        self.state().silent = silent;
    }

    /// Takes requests and answers nothing at all while `hangs`, as a stopped process.
    pub(crate) fn set_hanging(&self, hangs: bool) {
        self.state().hangs = hangs;
        self.changed();
    }

    /// Answers about registrations and calls, but not to the question whether it is there.
    pub(crate) fn set_ignores_strangers(&self) {
        self.state().ignores_strangers = true;
    }

    /// Does not let go of registrations, so many times.
    pub(crate) fn keep(&self, times: usize) {
        self.state().keeps = times;
    }

    /// A call runs in each registration that is there: one from before a restart of runtimed.
    pub(crate) fn occupy(&self) {
        let mut state = self.state();
        state.occupied = true;
        for registration in state.registrations.values_mut() {
            registration.in_flight += 1;
        }
    }

    /// As `onCallerGone: Finish`.
    pub(crate) fn set_finishes(&self) {
        self.state().finishes = true;
    }

    /// Each call leaves this in the file of its outputs; `None`: it leaves that alone.
    pub(crate) fn set_leaves(&self, text: Option<&str>) {
        self.state().leaves = text.map(ToOwned::to_owned);
    }

    /// Where a Run's calls leave their outputs.
    pub(crate) fn outputs_file(&self, run: &str) -> std::path::PathBuf {
        let state = self.state();
        let request = state.registered.iter().rev().find(|it| it.run_uid == run);
        request.expect("it was registered").env["KRUNTIME_OUTPUTS"]
            .clone()
            .into()
    }

    /// Unregistrations are steps of this process.
    pub(crate) fn set_fate(&self, fate: Fate) {
        self.state().fate = fate;
    }

    /// A server without the service for functions.
    pub(crate) fn set_unsupported(&self) {
        self.state().unsupported = true;
    }

    /// Loses every registration, as a restarted server does.
    pub(crate) fn restart(&self) {
        self.state().registrations.clear();
    }

    /// The next call is answered with this status.
    pub(crate) fn answer_once(&self, status: Status) {
        self.state().answers.push(status);
    }

    /// Every call is answered with this.
    pub(crate) fn set_output(&self, output: InvokeFunctionResponse) {
        self.state().output = Some(output);
    }

    /// Lets one call with input `wait` end.
    pub(crate) fn go(&self) {
        self.0.go.add_permits(1);
    }

    pub(crate) fn registered(&self) -> Vec<RegisterFunctionRequest> {
        self.state().registered.clone()
    }

    pub(crate) fn unregistered(&self) -> Vec<String> {
        self.state().unregistered.clone()
    }

    /// What came with each call.
    pub(crate) fn metadata(&self) -> Vec<MetadataMap> {
        self.state().metadata.clone()
    }

    pub(crate) fn invoked(&self) -> Vec<InvokeFunctionRequest> {
        self.state().invoked.clone()
    }

    /// Ids of what is registered now.
    pub(crate) fn live(&self) -> Vec<String> {
        self.state()
            .registrations
            .values()
            .map(|it| it.id.clone())
            .collect()
    }

    /// Pings that came and were no answers.
    pub(crate) fn pings(&self) -> usize {
        self.0.pings.load(Ordering::SeqCst)
    }

    /// Waits until so many calls have begun.
    pub(crate) async fn until_invoked(&self, calls: usize) {
        self.until(|state| state.invoked.len() >= calls).await;
    }

    /// Waits until so many RegisterFunction calls have come.
    pub(crate) async fn until_registered(&self, calls: usize) {
        self.until(|state| state.registered.len() >= calls).await;
    }

    /// Waits until so many calls were given up by the caller.
    pub(crate) async fn until_abandoned(&self, calls: usize) {
        self.until(|state| state.ended_by_caller >= calls).await;
    }

    async fn unless_hanging(&self) {
        self.until(|state| !state.hangs).await;
    }

    async fn until(&self, wanted: impl Fn(&Inner) -> bool) {
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if wanted(&self.state()) {
                return;
            }
            changed.await;
        }
    }

    fn now(&self) -> i64 {
        let (wall, instant) = self.0.began;
        let now = wall.as_nanosecond() + i128::try_from(instant.elapsed().as_nanos()).expect("small");
        i64::try_from(now).expect("this century")
    }

    fn state(&self) -> MutexGuard<'_, Inner> {
        self.0.state.lock().expect("not poisoned")
    }

    fn changed(&self) {
        self.0.changed.notify_waiters();
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a test's own task, which ends with its runtime"
)]
fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(task);
}

/// Passes bytes on and counts the pings from client to server.
async fn tap(client: DuplexStream, server: DuplexStream, counts: FakeServer) {
    const PREFACE: usize = 24;
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let up = async {
        let mut preface = [0; PREFACE];
        from_client.read_exact(&mut preface).await?;
        to_server.write_all(&preface).await?;
        loop {
            // Length (3 bytes), type, flags, stream.
            let mut head = [0; 9];
            from_client.read_exact(&mut head).await?;
            let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
            let mut frame = vec![0; length];
            from_client.read_exact(&mut frame).await?;
            if head[3] == 6 && head[4] & 1 == 0 {
                counts.0.pings.fetch_add(1, Ordering::SeqCst);
            }
            to_server.write_all(&head).await?;
            to_server.write_all(&frame).await?;
        }
    };
    let down = tokio::io::copy(&mut from_server, &mut to_client);
    let up: std::pin::Pin<Box<dyn Future<Output = std::io::Result<()>> + Send>> = Box::pin(up);
    tokio::select! {
        _ = up => {}
        _ = down => {}
    }
}

/// Ends the accounting of a call, also of one whose caller went away.
struct Running {
    server: FakeServer,
    run: String,
    id: String,
    finished: bool,
}

impl Running {
    /// The registration runs it no more.
    fn over(&self) {
        let now = self.server.now();
        let mut state = self.server.state();
        if let Some(registration) = state.registrations.get_mut(&self.run)
            && registration.id == self.id
        {
            registration.in_flight -= 1;
            registration.last_activity = now;
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut goes_on = false;
        if !self.finished {
            let mut state = self.server.state();
            state.ended_by_caller += 1;
            goes_on = state.finishes;
        }
        if goes_on {
            let rest = Self {
                server: self.server.clone(),
                run: self.run.clone(),
                id: self.id.clone(),
                finished: true,
            };
            spawn(async move {
                rest.server.0.go.acquire().await.expect("open").forget();
                drop(rest);
            });
        } else {
            self.over();
        }
        self.server.changed();
    }
}

#[async_trait::async_trait]
impl FunctionRuntime for FakeServer {
    async fn register_function(
        &self,
        request: Request<RegisterFunctionRequest>,
    ) -> Result<Response<RegisterFunctionResponse>, Status> {
        self.unless_hanging().await;
        let request = request.into_inner();
        let now = self.now();
        let mut state = self.state();
        state.registered.push(request.clone());
        self.changed();
        if state.silent {
            return Err(Status::unavailable("silent"));
        }
        let (begins, fatal) = match &state.starts {
            Starts::Ready => (State::Ready, String::new()),
            Starts::Slowly => (State::Registering, String::new()),
            Starts::Failed(text) => (State::Failed, text.clone()),
            Starts::Refused(text) => return Err(Status::invalid_argument(text.clone())),
        };
        let known = state.registrations.get(&request.run_uid);
        if known.is_some_and(|it| it.attempt > request.registration_attempt) {
            return Err(Status::failed_precondition("an older attempt"));
        }
        if known.is_some_and(|it| {
            it.attempt == request.registration_attempt && it.digest != request.registration_digest
        }) {
            return Err(Status::already_exists("another digest"));
        }
        if known.is_none_or(|it| it.attempt < request.registration_attempt) {
            state.next += 1;
            let id = format!("reg_{}", state.next);
            state.registrations.insert(
                request.run_uid.clone(),
                Registration {
                    id,
                    attempt: request.registration_attempt,
                    digest: request.registration_digest.clone(),
                    state: begins,
                    in_flight: 0,
                    last_activity: now,
                    fatal,
                },
            );
        }
        let registration = &state.registrations[&request.run_uid];
        let mut response = RegisterFunctionResponse {
            registration: Some(FunctionRegistration {
                run_uid: request.run_uid.clone(),
                registration_id: registration.id.clone(),
            }),
            ..RegisterFunctionResponse::default()
        };
        response.set_state(registration.state);
        Ok(Response::new(response))
    }

    async fn function_status(
        &self,
        request: Request<FunctionStatusRequest>,
    ) -> Result<Response<FunctionStatusResponse>, Status> {
        self.unless_hanging().await;
        let asked = request.into_inner().registration.unwrap_or_default();
        let known =
            |state: &Inner| !state.ignores_strangers || state.registrations.contains_key(&asked.run_uid);
        self.until(known).await;
        let state = self.state();
        if state.unsupported {
            return Err(Status::unimplemented("no such service"));
        }
        if state.silent {
            return Err(Status::unavailable("silent"));
        }
        let Some(registration) = state.registrations.get(&asked.run_uid) else {
            return Err(Status::not_found("no such registration"));
        };
        if registration.id != asked.registration_id {
            return Err(Status::failed_precondition("stale"));
        }
        let mut response = FunctionStatusResponse {
            registration: Some(asked),
            in_flight: registration.in_flight,
            last_activity_unix_nano: registration.last_activity,
            fatal_error: registration.fatal.clone(),
            ..FunctionStatusResponse::default()
        };
        response.set_state(registration.state);
        Ok(Response::new(response))
    }

    async fn invoke_function(
        &self,
        request: Request<InvokeFunctionRequest>,
    ) -> Result<Response<InvokeFunctionResponse>, Status> {
        self.unless_hanging().await;
        let (metadata, _, request) = request.into_parts();
        let asked = request.registration.clone().unwrap_or_default();
        let now = self.now();
        let mut running = {
            let mut state = self.state();
            let occupied = state.occupied;
            let Some(registration) = state.registrations.get_mut(&asked.run_uid) else {
                return Err(Status::not_found("no such registration"));
            };
            if registration.id != asked.registration_id || registration.state != State::Ready {
                return Err(Status::failed_precondition("stale or not ready"));
            }
            if occupied && registration.in_flight > 0 {
                return Err(Status::resource_exhausted("a call is running"));
            }
            assert_eq!(registration.in_flight, 0, "two calls of one function at once");
            registration.in_flight += 1;
            registration.last_activity = now;
            state.invoked.push(request.clone());
            state.metadata.push(metadata);
            Running {
                server: self.clone(),
                run: asked.run_uid.clone(),
                id: asked.registration_id.clone(),
                finished: false,
            }
        };
        self.changed();
        if request.input == "wait" {
            let (run, id) = (running.run.clone(), running.id.clone());
            let unregistered = self.until(|state| state.registrations.get(&run).is_none_or(|it| it.id != id));
            tokio::select! {
                go = self.0.go.acquire() => go.expect("open").forget(),
                () = unregistered => {
                    running.finished = true;
                    return Err(Status::cancelled("unregistered"));
                }
            }
        }
        running.finished = true;
        let leaves = self.state().leaves.clone();
        if let Some(text) = leaves {
            std::fs::write(self.outputs_file(&asked.run_uid), text).expect("written");
        }
        let mut state = self.state();
        if let Some(status) = state.answers.pop() {
            drop(state);
            return Err(status);
        }
        let output = state.output.clone().unwrap_or_else(|| InvokeFunctionResponse {
            output: request.input.clone(),
            content_type: "application/json".to_owned(),
            ..InvokeFunctionResponse::default()
        });
        drop(state);
        let mut response = Response::new(InvokeFunctionResponse {
            registration: Some(asked),
            invocation_id: request.invocation_id,
            ..output
        });
        response
            .metadata_mut()
            .insert("kruntime-handler-us", "123".parse().expect("ASCII"));
        Ok(response)
    }

    async fn unregister_function(
        &self,
        request: Request<UnregisterFunctionRequest>,
    ) -> Result<Response<UnregisterFunctionResponse>, Status> {
        self.unless_hanging().await;
        let fate = self.state().fate.clone();
        fate.pass().await;
        let answer = self.unregister(request.into_inner());
        fate.pass().await;
        answer
    }
}

impl FakeServer {
    fn unregister(
        &self,
        request: UnregisterFunctionRequest,
    ) -> Result<Response<UnregisterFunctionResponse>, Status> {
        let asked = request.registration.unwrap_or_default();
        let mut state = self.state();
        if state.silent {
            return Err(Status::unavailable("silent"));
        }
        match state.registrations.get(&asked.run_uid) {
            Some(registration) if registration.id != asked.registration_id => {
                return Err(Status::failed_precondition("stale"));
            }
            _ => {}
        }
        if state.keeps > 0 {
            state.keeps -= 1;
            return Err(Status::internal("it runs on"));
        }
        state.registrations.remove(&asked.run_uid);
        state.unregistered.push(asked.registration_id.clone());
        drop(state);
        self.changed();
        Ok(Response::new(UnregisterFunctionResponse {
            registration: Some(asked),
        }))
    }
}
