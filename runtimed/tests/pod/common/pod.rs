//! A runtimed of Pod `pod-a` in namespace `ns`, Runtime `python`, and a gateway that calls it.

use std::{
    io,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex},
};

use clap::Parser as _;
use kruntimes_api::{Run, fixtures};
use kruntimes_ops::drain::{Cause, Drain};
use kruntimes_peer::{AddressRule, Dialer, RotatingIdentity, UnaryChannel, identity::certified_key};
use kruntimes_proto::{
    executor::{
        FunctionRegistration, InvokeFunctionRequest, InvokeFunctionResponse,
        function_runtime_client::FunctionRuntimeClient,
    },
    failure::Failure,
    owner::{CancelRequest, ExplainRequest, ExplainResponse, owner_client::OwnerClient},
};
use kruntimes_runtimed::{
    app::{App, Outside},
    args::Args,
    caller::{Callers, GatewayIsEnough},
};
use kruntimes_trace::Tracer;
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType};
use serde_json::Value;
use tempfile::TempDir;
use tonic::{Request, Response, Status};

use super::{FakeServer, Kubernetes};

/// A Pod and what is around it.
pub(crate) struct Pod {
    pub(crate) kubernetes: Kubernetes,
    pub(crate) server: FakeServer,
    pub(crate) disk: Arc<TempDir>,
    pub(crate) audit: Lines,
    pub(crate) app: App,
    gateway: Arc<rustls::sign::CertifiedKey>,
}

/// Audit lines.
#[derive(Clone, Default)]
pub(crate) struct Lines(Arc<Mutex<Vec<u8>>>);

impl Lines {
    /// The first line; they are written a little after the call.
    pub(crate) async fn first(&self) -> Value {
        loop {
            if let Some(line) = self.all().into_iter().next() {
                return line;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    }

    pub(crate) fn all(&self) -> Vec<Value> {
        let bytes = self.0.lock().expect("not poisoned").clone();
        let text = String::from_utf8(bytes).expect("UTF-8");
        text.lines()
            .map(|line| serde_json::from_str(line).expect("a JSON line"))
            .collect()
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("not poisoned").extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Pod {
    pub(crate) async fn start() -> Self {
        Self::with(Kubernetes::new(), FakeServer::new(), Arc::new(GatewayIsEnough)).await
    }

    pub(crate) async fn with(kubernetes: Kubernetes, server: FakeServer, callers: Arc<dyn Callers>) -> Self {
        let disk = Arc::new(tempfile::tempdir().expect("a directory"));
        Self::on(kubernetes, server, callers, disk).await
    }

    /// A Pod that can hold so many Runs.
    pub(crate) async fn of_size(runs: u32) -> Self {
        let disk = Arc::new(tempfile::tempdir().expect("a directory"));
        let capacity = format!("runs={runs},memory=1Gi");
        let callers = Arc::new(GatewayIsEnough);
        let tracer = Tracer::default();
        Self::made(
            Kubernetes::new(),
            FakeServer::new(),
            callers,
            disk,
            &capacity,
            tracer,
        )
        .await
    }

    /// On a disk that an earlier process may have used.
    pub(crate) async fn on(
        kubernetes: Kubernetes,
        server: FakeServer,
        callers: Arc<dyn Callers>,
        disk: Arc<TempDir>,
    ) -> Self {
        Self::made(
            kubernetes,
            server,
            callers,
            disk,
            "runs=2,memory=1Gi",
            Tracer::default(),
        )
        .await
    }

    /// One that tells this tracer.
    pub(crate) async fn traced(tracer: Tracer) -> Self {
        let disk = Arc::new(tempfile::tempdir().expect("a directory"));
        let callers = Arc::new(GatewayIsEnough);
        Self::made(
            Kubernetes::new(),
            FakeServer::new(),
            callers,
            disk,
            "runs=2,memory=1Gi",
            tracer,
        )
        .await
    }

    async fn made(
        kubernetes: Kubernetes,
        server: FakeServer,
        callers: Arc<dyn Callers>,
        disk: Arc<TempDir>,
        capacity: &str,
        tracer: Tracer,
    ) -> Self {
        let gateway = trust_a_gateway(&disk.path().join("gateway"));
        let audit = Lines::default();
        let outside = Outside {
            client: kubernetes.client(),
            callers,
            anonymous: None,
            server: server.client(),
            audit: Box::new(audit.clone()),
            tracer,
        };
        let app = App::start(args(disk.path(), capacity), Drain::new(), outside)
            .await
            .expect("started");
        Self {
            kubernetes,
            server,
            disk,
            audit,
            app,
            gateway,
        }
    }

    /// As SIGTERM does; returns when the process would exit.
    pub(crate) async fn stop(self) -> kruntimes_ops::drain::Outcome {
        self.app.drain.stop(Cause::Asked("SIGTERM"));
        self.app.wait().await.expect("the configuration is fine")
    }

    /// A connection as the gateway makes it.
    pub(crate) async fn dial(&self) -> UnaryChannel {
        dial(&self.gateway, self.app.hop, &self.app.owner.peer_key).await
    }

    /// A call as the gateway makes it.
    pub(crate) async fn invoke(&self, run: &Run, input: &str) -> Result<InvokeFunctionResponse, Failure> {
        let called = call(self.dial().await, request(run, input)).await;
        called.map(Response::into_inner)
    }

    /// Cancels a call as the gateway does; says whether it was running.
    pub(crate) async fn cancel(&self, run: &Run, id: &str) -> Result<bool, Failure> {
        let message = CancelRequest {
            run_uid: uid(run),
            invocation_id: id.to_owned(),
        };
        let mut client = OwnerClient::new(self.dial().await);
        let answer = client.cancel(routed(run, message)).await;
        answer.map(|it| it.into_inner().was_running).map_err(ours)
    }

    /// Asks for an explanation as the gateway does.
    pub(crate) async fn explain(&self, run: &Run) -> Result<ExplainResponse, Failure> {
        let message = ExplainRequest { run_uid: uid(run) };
        let mut client = OwnerClient::new(self.dial().await);
        let answer = client.explain(routed(run, message)).await;
        answer.map(Response::into_inner).map_err(ours)
    }

    /// Whether the work directory of the Run exists.
    pub(crate) fn has_directory(&self, run: &Run) -> bool {
        let uid = run.metadata.uid.as_deref().expect("a UID");
        self.disk.path().join("workspace").join(uid).exists()
    }

    /// Replaces a file of the mounted ConfigMap.
    pub(crate) fn configure(&self, name: &str, text: &str) {
        std::fs::write(self.disk.path().join("gateway").join(name), text).expect("written");
    }

    /// How many records the journal has.
    pub(crate) fn records(&self) -> usize {
        std::fs::read_dir(self.disk.path().join("journal"))
            .expect("a directory")
            .count()
    }
}

/// A function Run that the scheduler has just assigned to `pod-a`.
pub(crate) fn assigned(name: &str) -> fixtures::RunBuilder {
    fixtures::run("ns", name).scheduled_on("pod-a")
}

pub(crate) async fn dial(
    gateway: &Arc<rustls::sign::CertifiedKey>,
    hop: SocketAddr,
    peer_key: &str,
) -> UnaryChannel {
    let identity = Arc::new(RotatingIdentity::fixed(Arc::clone(gateway)));
    let dialer = Dialer::new(
        identity,
        AddressRule::AllowLocal,
        std::time::Duration::from_secs(30),
    );
    let pin = peer_key.parse().expect("a key");
    dialer.dial(hop, &pin).await.expect("a connection")
}

/// What the gateway sends for this version of the Run.
pub(crate) fn request(run: &Run, input: &str) -> Request<InvokeFunctionRequest> {
    let message = InvokeFunctionRequest {
        registration: Some(FunctionRegistration {
            run_uid: uid(run),
            registration_id: String::new(),
        }),
        invocation_id: "inv_test".to_owned(),
        input: input.to_owned().into(),
        content_type: "application/json".to_owned(),
        timeout_millis: 20_000,
    };
    routed(run, message)
}

/// A message with the metadata of the hop.
pub(crate) fn routed<T>(run: &Run, message: T) -> Request<T> {
    let status = run.status.as_ref().expect("a status");
    let mut request = Request::new(message);
    let attempt = status.attempt.expect("an attempt").to_string();
    let pod_uid = status.assigned_pod_uid.clone().expect("a Pod");
    for (name, value) in [
        ("kruntime-hop", "1"),
        ("kruntime-attempt", &attempt),
        ("kruntime-pod-uid", &pod_uid),
        ("authorization", "Bearer token"),
    ] {
        request.metadata_mut().insert(name, value.parse().expect("ASCII"));
    }
    request
}

fn uid(run: &Run) -> String {
    run.metadata.uid.clone().expect("a UID")
}

pub(crate) async fn call(
    channel: UnaryChannel,
    request: Request<InvokeFunctionRequest>,
) -> Result<Response<InvokeFunctionResponse>, Failure> {
    let limit = 2 * kruntimes_proto::limits::MESSAGE_BYTES;
    let mut client = FunctionRuntimeClient::new(channel).max_decoding_message_size(limit);
    client.invoke_function(request).await.map_err(ours)
}

fn ours(status: Status) -> Failure {
    Failure::from_status(&status).unwrap_or_else(|| panic!("no answer of ours: {status:?}"))
}

fn args(disk: &Path, capacity: &str) -> Args {
    let dir = |name: &str| {
        let path = disk.join(name);
        std::fs::create_dir_all(&path).expect("a directory");
        path.display().to_string()
    };
    Args::parse_from([
        "kruntimes-runtimed",
        "--namespace=ns",
        "--pod-name=pod-a",
        &format!("--pod-uid={}", fixtures::uid("pod-a")),
        "--pod-ip=127.0.0.1",
        "--runtime=python",
        "--listen=127.0.0.1:0",
        &format!("--workspace={}", dir("workspace")),
        &format!("--journal-dir={}", dir("journal")),
        &format!("--gateway-config-dir={}", dir("gateway")),
        &format!("--capacity={capacity}"),
        "--admin-address=off",
    ])
}

/// Writes what the scheduler publishes and returns the gateway's client certificate.
fn trust_a_gateway(dir: &Path) -> Arc<rustls::sign::CertifiedKey> {
    std::fs::create_dir_all(dir).expect("a directory");
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    let key = KeyPair::generate().expect("a key");
    let ca = params.self_signed(&key).expect("a certificate").pem();
    let issuer = Issuer::new(params, key);
    for (name, text) in [
        ("url", "https://gateway.example"),
        ("ca.crt", "PEM"),
        ("peer-ca.crt", &ca),
    ] {
        std::fs::write(dir.join(name), text).expect("written");
    }
    let mut params = CertificateParams::default();
    let uri = "spiffe://kruntimes.io/gateway".try_into().expect("a URI");
    params.subject_alt_names = vec![SanType::URI(uri)];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, &issuer).expect("a certificate");
    certified_key(certificate.pem().as_bytes(), key.serialize_pem().as_bytes()).expect("they fit")
}
