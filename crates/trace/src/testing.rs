//! A collector on loopback, for tests of what leaves a process.

use std::{
    collections::BTreeMap,
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
    trace::v1::{Span, status::StatusCode},
};
use prost::Message as _;
use tokio::{runtime::Builder, sync::watch, time::timeout};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{
    Request, Response, Status,
    transport::{Identity, Server, ServerTlsConfig},
};

/// How long a test waits for spans; they come in half a second.
const PATIENCE: Duration = Duration::from_secs(30);

/// Takes every span. On a thread of its own, so that it serves whatever clock a test has.
#[derive(Debug)]
pub struct Collector {
    address: SocketAddr,
    took: Took,
    stop: CancellationToken,
    scheme: &'static str,
}

#[derive(Debug, Clone)]
struct Took {
    requests: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
    spans: watch::Sender<usize>,
}

/// One span, as texts.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "they are named as in OTLP")]
pub struct Seen {
    pub service: String,
    pub name: String,
    /// `SERVER`, `CLIENT`, …
    pub kind: String,
    pub trace: String,
    pub id: String,
    /// Empty at a root.
    pub parent: String,
    pub parent_is_remote: bool,
    pub state: String,
    pub failed: bool,
    /// What is said of the failure, which must be nothing.
    pub message: String,
    pub attributes: BTreeMap<String, String>,
}

// === impl Collector ===

impl Collector {
    /// Speaks plain gRPC on a free port.
    #[must_use]
    pub fn start() -> Self {
        Self::serve(None)
    }

    /// Speaks TLS, in the name of `localhost`; certificate and key are PEM.
    #[must_use]
    pub fn with_tls(certificate: &str, key: &str) -> Self {
        Self::serve(Some(Identity::from_pem(certificate, key)))
    }

    fn serve(identity: Option<Identity>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("an address");
        let took = Took {
            requests: Arc::default(),
            spans: watch::Sender::new(0),
        };
        let stop = CancellationToken::new();
        let scheme = if identity.is_some() { "https" } else { "http" };
        let (service, stopping) = (TraceServiceServer::new(took.clone()), stop.clone());
        thread::spawn(move || {
            let runtime = Builder::new_current_thread()
                .enable_all()
                .build()
                .expect("a runtime");
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::from_std(listener).expect("a listener");
                let mut server = Server::builder();
                if let Some(identity) = identity {
                    let tls = ServerTlsConfig::new().identity(identity);
                    server = server.tls_config(tls).expect("TLS");
                }
                let served = server
                    .add_service(service)
                    .serve_with_incoming(TcpListenerStream::new(listener));
                tokio::select! {
                    served = served => served.expect("it serves"),
                    () = stopping.cancelled() => {}
                }
            });
        });
        Self {
            address,
            took,
            stop,
            scheme,
        }
    }

    /// For `OTEL_EXPORTER_OTLP_ENDPOINT`.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("{}://localhost:{}", self.scheme, self.address.port())
    }

    /// Every span, once there are so many.
    pub async fn spans(&self, count: usize) -> Vec<Seen> {
        let mut spans = self.took.spans.subscribe();
        let enough = timeout(PATIENCE, spans.wait_for(|spans| *spans >= count)).await;
        let seen = self.seen();
        assert!(enough.is_ok(), "there are only {} spans: {seen:#?}", seen.len());
        seen
    }

    /// Every span so far.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        let mut seen = Vec::new();
        for resource in self.requests().iter().flat_map(|request| &request.resource_spans) {
            let attributes = resource.resource.iter().flat_map(|it| &it.attributes);
            let service = attributes
                .filter(|it| it.key == "service.name")
                .map(text)
                .collect::<String>();
            let spans = resource.scope_spans.iter().flat_map(|scope| &scope.spans);
            seen.extend(spans.map(|span| Seen::new(&service, span)));
        }
        seen
    }

    /// Every byte so far.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        self.requests()
            .iter()
            .flat_map(|request| request.encode_to_vec())
            .collect()
    }

    fn requests(&self) -> Vec<ExportTraceServiceRequest> {
        self.took
            .requests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[tonic::async_trait]
impl TraceService for Took {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let request = request.into_inner();
        let scopes = request
            .resource_spans
            .iter()
            .flat_map(|resource| &resource.scope_spans);
        let spans = scopes.map(|scope| scope.spans.len()).sum::<usize>();
        self.requests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(request);
        self.spans.send_modify(|count| *count += spans);
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

// === impl Seen ===

impl Seen {
    fn new(service: &str, span: &Span) -> Self {
        let status = span.status.clone().unwrap_or_default();
        Self {
            service: service.to_owned(),
            name: span.name.clone(),
            kind: span
                .kind()
                .as_str_name()
                .trim_start_matches("SPAN_KIND_")
                .to_owned(),
            trace: hex(&span.trace_id),
            id: hex(&span.span_id),
            parent: hex(&span.parent_span_id),
            parent_is_remote: span.flags & 0x200 != 0,
            state: span.trace_state.clone(),
            failed: status.code() == StatusCode::Error,
            message: status.message,
            attributes: span
                .attributes
                .iter()
                .map(|it| (it.key.clone(), text(it)))
                .collect(),
        }
    }

    /// One attribute; empty when it is not there.
    #[must_use]
    pub fn get(&self, key: &str) -> &str {
        self.attributes.get(key).map_or("", String::as_str)
    }

    /// The `traceparent` that names it.
    #[must_use]
    pub fn traceparent(&self) -> String {
        format!("00-{}-{}-01", self.trace, self.id)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text(attribute: &KeyValue) -> String {
    match attribute.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::BoolValue(value)) => value.to_string(),
        other => format!("{other:?}"),
    }
}
