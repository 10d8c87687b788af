//! A fake owner: takes the hop over mutual TLS and answers as a test says.

use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::future::BoxFuture;
use kruntimes_peer::{Incoming, OwnKey, accept::server_config};
use kruntimes_proto::executor::{
    FunctionStatusRequest, FunctionStatusResponse, InvokeFunctionRequest, InvokeFunctionResponse,
    RegisterFunctionRequest, RegisterFunctionResponse, UnregisterFunctionRequest, UnregisterFunctionResponse,
    function_runtime_server::{FunctionRuntime, FunctionRuntimeServer},
};
use tokio::{net::TcpListener, runtime::Runtime, sync::watch};
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
}

#[derive(Clone)]
struct Service {
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
        let incoming = Incoming::new(socket, server_config(&key, pki.peer_trust()).expect("TLS"));
        let service = Service {
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
        process.spawn(async move {
            Server::builder()
                .add_service(served)
                .serve_with_incoming(incoming)
                .await
        });
        Self {
            key,
            address,
            service,
            process: Mutex::new(Some(process)),
            frozen: Arc::default(),
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

struct Ended(watch::Sender<usize>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count += 1);
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
        let _ended = Ended(self.ended.clone());
        self.count.send_modify(|count| *count += 1);
        behaviour(request).await
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
