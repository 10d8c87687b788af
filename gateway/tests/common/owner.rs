//! A fake owner: takes the hop over mutual TLS and answers as a test says.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::future::BoxFuture;
use kruntimes_peer::{Incoming, OwnKey, TrustBundle, accept::Counts, accept::server_config};
use kruntimes_proto::{
    executor::{
        FunctionStatusRequest, FunctionStatusResponse, InvokeFunctionRequest, InvokeFunctionResponse,
        RegisterFunctionRequest, RegisterFunctionResponse, UnregisterFunctionRequest,
        UnregisterFunctionResponse,
        function_runtime_server::{FunctionRuntime, FunctionRuntimeServer},
    },
    failure::{Failure, Reason},
    owner::{
        CancelRequest, CancelResponse, ExplainRequest, ExplainResponse,
        owner_server::{Owner as Asked, OwnerServer},
    },
};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::{Notify, Semaphore, watch},
};
use tonic::{Request, Response, Status, metadata::MetadataMap, transport::Server};

use super::Pki;

type Answer = Result<Response<InvokeFunctionResponse>, Status>;
type Behaviour = Arc<dyn Fn(InvokeFunctionRequest) -> BoxFuture<'static, Answer> + Send + Sync>;

pub(crate) struct Owner {
    key: OwnKey,
    address: SocketAddr,
    service: Service,
    process: Mutex<Option<Runtime>>,
    frozen: Arc<AtomicBool>,
    pub(crate) trust: TrustBundle,
    pub(crate) handshakes: Arc<Counts>,
}

#[derive(Clone)]
struct Service {
    running: Arc<Mutex<HashMap<String, Arc<Notify>>>>,
    asked: Arc<Mutex<Vec<(&'static str, MetadataMap)>>>,
    explains: Arc<Mutex<Result<ExplainResponse, Status>>>,
    behaviour: Arc<Mutex<Behaviour>>,
    calls: Arc<Mutex<Vec<(MetadataMap, InvokeFunctionRequest)>>>,
    count: watch::Sender<usize>,
    ended: watch::Sender<usize>,
}

impl Owner {
    pub(crate) async fn start(pki: &Pki) -> Self {
        Self::start_at(pki, "127.0.0.1:0").await
    }

    pub(crate) async fn start_at(pki: &Pki, address: &str) -> Self {
        let key = OwnKey::generate().expect("a key");
        // Threads of its own stand for a process of its own: all its connections end with it.
        let process = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build();
        let process = process.expect("threads");
        let address = address.to_owned();
        let bind = async move { TcpListener::bind(address).await };
        let socket = process.spawn(bind).await.expect("bound").expect("a port");
        let address = socket.local_addr().expect("an address");
        let trust = pki.peer_trust();
        let incoming = Incoming::new(socket, server_config(&key, trust.clone()).expect("TLS"));
        let handshakes = incoming.counts();
        let service = Service {
            running: Arc::default(),
            asked: Arc::default(),
            explains: Arc::new(Mutex::new(Ok(ExplainResponse {
                callable: true,
                state: "Ready".to_owned(),
                ..ExplainResponse::default()
            }))),
            behaviour: Arc::new(Mutex::new(Arc::new(|request| {
                Box::pin(async move { echo(request) })
            }))),
            calls: Arc::default(),
            count: watch::Sender::new(0),
            ended: watch::Sender::new(0),
        };
        let served = FunctionRuntimeServer::new(service.clone())
            .max_decoding_message_size(4 << 20)
            .max_encoding_message_size(4 << 20);
        let questions = OwnerServer::new(service.clone());
        process.spawn(async move {
            Server::builder()
                .add_service(served)
                .add_service(questions)
                .serve_with_incoming(incoming)
                .await
        });
        Self {
            key,
            address,
            service,
            process: Mutex::new(Some(process)),
            frozen: Arc::default(),
            trust,
            handshakes,
        }
    }

    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    pub(crate) fn key(&self) -> String {
        self.key.peer_key().to_string()
    }

    /// From now on calls are answered like this.
    pub(crate) fn answers<F>(&self, behaviour: impl Fn(InvokeFunctionRequest) -> F + Send + Sync + 'static)
    where
        F: Future<Output = Answer> + Send + 'static,
    {
        *self.service.behaviour.lock().expect("not poisoned") =
            Arc::new(move |request| Box::pin(behaviour(request)));
    }

    /// From now on calls wait, each for a permit, and then get their input back.
    pub(crate) fn gate(&self) -> Arc<Semaphore> {
        let gate = Arc::new(Semaphore::new(0));
        let wait = Arc::clone(&gate);
        self.answers(move |request| {
            let wait = Arc::clone(&wait);
            async move {
                wait.acquire().await.expect("never closed").forget();
                echo(request)
            }
        });
        gate
    }

    /// From now on it explains like this.
    pub(crate) fn explains(&self, answer: Result<ExplainResponse, Status>) {
        *self.service.explains.lock().expect("not poisoned") = answer;
    }

    /// What it was asked besides calls: the method, and the metadata.
    pub(crate) fn asked(&self) -> Vec<(&'static str, MetadataMap)> {
        self.service.asked.lock().expect("not poisoned").clone()
    }

    /// Every call that arrived.
    pub(crate) fn calls(&self) -> Vec<(MetadataMap, InvokeFunctionRequest)> {
        self.service.calls.lock().expect("not poisoned").clone()
    }

    /// Waits until that many calls arrived.
    pub(crate) async fn arrived(&self, calls: usize) {
        self.service
            .count
            .subscribe()
            .wait_for(|count| *count >= calls)
            .await
            .expect("the owner lives");
    }

    /// Waits until that many calls ended, by an answer or because they were given up.
    pub(crate) async fn ended(&self, calls: usize) {
        self.service
            .ended
            .subscribe()
            .wait_for(|count| *count >= calls)
            .await
            .expect("the owner lives");
    }

    /// Stops the process without ending it: its connections stay and say nothing.
    pub(crate) fn freeze(&self) {
        let (asleep, wait) = std::sync::mpsc::channel();
        let frozen = Arc::clone(&self.frozen);
        frozen.store(true, Ordering::SeqCst);
        let process = self.process.lock().expect("not poisoned");
        process.as_ref().expect("running").spawn(async move {
            asleep.send(()).expect("the test waits");
            while frozen.load(Ordering::SeqCst) {
                // Blocks the only thread on purpose.
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        wait.recv().expect("the thread is blocked");
    }

    /// Lets it go on.
    pub(crate) fn thaw(&self) {
        self.frozen.store(false, Ordering::SeqCst);
    }

    /// Ends the process, as far as others can see.
    pub(crate) fn stop(&self) {
        self.thaw();
        if let Some(process) = self.process.lock().expect("not poisoned").take() {
            process.shutdown_background();
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Fails for the reason that the payload names, as JSON text.
pub(crate) fn fail(request: InvokeFunctionRequest) -> Answer {
    let word: String = serde_json::from_slice(&request.input).expect("a JSON text");
    let reason = Reason::parse(&word).expect("a reason");
    Err(Failure::new(reason, "the words of the owner").to_status())
}

/// Gives the input back.
pub(crate) fn echo(request: InvokeFunctionRequest) -> Answer {
    let input = request.input.clone();
    output(request, input, "application/json")
}

pub(crate) fn output(
    request: InvokeFunctionRequest,
    body: impl Into<bytes::Bytes>,
    content_type: &str,
) -> Answer {
    let mut response = Response::new(InvokeFunctionResponse {
        registration: request.registration,
        invocation_id: request.invocation_id,
        output: body.into(),
        content_type: content_type.to_owned(),
        outputs: Default::default(),
    });
    response
        .metadata_mut()
        .insert("kruntime-handler-us", "1500".parse().expect("digits"));
    Ok(response)
}

/// A call that runs, until this drops.
struct Running {
    service: Service,
    id: String,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.service
            .running
            .lock()
            .expect("not poisoned")
            .remove(&self.id);
        self.service.ended.send_modify(|count| *count += 1);
    }
}

#[tonic::async_trait]
impl FunctionRuntime for Service {
    async fn invoke_function(&self, request: Request<InvokeFunctionRequest>) -> Answer {
        let (metadata, _, request) = request.into_parts();
        let behaviour = Arc::clone(&self.behaviour.lock().expect("not poisoned"));
        self.calls
            .lock()
            .expect("not poisoned")
            .push((metadata, request.clone()));
        let cancelled = Arc::new(Notify::new());
        let running = Running {
            service: self.clone(),
            id: request.invocation_id.clone(),
        };
        self.running
            .lock()
            .expect("not poisoned")
            .insert(running.id.clone(), Arc::clone(&cancelled));
        self.count.send_modify(|count| *count += 1);
        tokio::select! {
            answer = behaviour(request) => answer,
            () = cancelled.notified() => {
                Err(Failure::new(Reason::Cancelled, "somebody ended the call").to_status())
            }
        }
    }

    async fn register_function(
        &self,
        _: Request<RegisterFunctionRequest>,
    ) -> Result<Response<RegisterFunctionResponse>, Status> {
        Err(Status::unimplemented("not on the hop"))
    }

    async fn function_status(
        &self,
        _: Request<FunctionStatusRequest>,
    ) -> Result<Response<FunctionStatusResponse>, Status> {
        Err(Status::unimplemented("not on the hop"))
    }

    async fn unregister_function(
        &self,
        _: Request<UnregisterFunctionRequest>,
    ) -> Result<Response<UnregisterFunctionResponse>, Status> {
        Err(Status::unimplemented("not on the hop"))
    }
}

#[tonic::async_trait]
impl Asked for Service {
    async fn cancel(&self, request: Request<CancelRequest>) -> Result<Response<CancelResponse>, Status> {
        let (metadata, _, request) = request.into_parts();
        self.asked
            .lock()
            .expect("not poisoned")
            .push(("cancel", metadata));
        let call = self
            .running
            .lock()
            .expect("not poisoned")
            .get(&request.invocation_id)
            .cloned();
        if let Some(call) = &call {
            call.notify_one();
        }
        Ok(Response::new(CancelResponse {
            was_running: call.is_some(),
        }))
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        let (metadata, _, _) = request.into_parts();
        self.asked
            .lock()
            .expect("not poisoned")
            .push(("explain", metadata));
        self.explains
            .lock()
            .expect("not poisoned")
            .clone()
            .map(Response::new)
    }
}
