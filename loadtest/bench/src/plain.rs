//! A gateway as many would write it: axum in front, a tonic channel behind, a table and a token that never change.
//!
//! It checks the token and the route and translates, and leaves out everything else: no watch, no access reviews, no
//! fence, no deadlines, no limits but the body's, no metrics, no log.

use std::{collections::HashMap, fs, io, net::SocketAddr, path::PathBuf, sync::Arc};

use anyhow::Context as _;
use axum::{
    Router,
    body::Bytes,
    extract::{DefaultBodyLimit, Path, State},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::post,
};
use hyper_util::rt::TokioIo;
use kruntimes_ops::threads;
use kruntimes_peer::{PeerKey, PinnedServer, RotatingIdentity, identity::certified_key};
use kruntimes_proto::{
    executor::{FunctionRegistration, InvokeFunctionRequest, function_runtime_client::FunctionRuntimeClient},
    limits,
};
use rustls::{ClientConfig, ServerConfig, crypto::ring::default_provider, pki_types::ServerName};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Endpoint};

use crate::{functions, http1::TlsListener};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where HTTPS is served.
    #[arg(long)]
    listen: SocketAddr,

    /// What `serve` wrote.
    #[arg(long)]
    dir: PathBuf,

    /// The owner of all functions.
    #[arg(long)]
    owner: SocketAddr,

    /// The key it must have.
    #[arg(long)]
    owner_key: PeerKey,

    /// How many functions there are.
    #[arg(long, default_value_t = 10_000)]
    routes: usize,

    /// Threads that serve.
    #[arg(long, default_value_t = 1, value_parser = threads::parse)]
    pub(crate) threads: usize,
}

struct Gateway {
    authorization: HeaderValue,
    /// UID → name, as a real one would need it for a review.
    routes: HashMap<String, String>,
    client: FunctionRuntimeClient<Channel>,
}

/// Serves until it is ended.
pub(crate) async fn serve(args: Args) -> anyhow::Result<()> {
    let token = fs::read_to_string(args.dir.join("token")).context("reading the token")?;
    let channel = connect(&args).await.context("connecting to the owner")?;
    let gateway = Gateway {
        authorization: HeaderValue::try_from(format!("Bearer {token}"))?,
        routes: (0..args.routes)
            .map(|number| (functions::uid(number), format!("function-{number:06}")))
            .collect(),
        client: FunctionRuntimeClient::new(channel)
            .max_decoding_message_size(limits::MESSAGE_BYTES)
            .max_encoding_message_size(limits::MESSAGE_BYTES),
    };
    let path = "/v1/namespaces/{namespace}/runtimes/{runtime}/functions/{call}";
    let router = Router::new()
        .route(path, post(invoke))
        .layer(DefaultBodyLimit::max(limits::INPUT_BYTES))
        .with_state(Arc::new(gateway));
    let socket = TcpListener::bind(args.listen).await?;
    let listener = TlsListener::new(socket, serving(&args)?);
    Ok(axum::serve(listener, router).await?)
}

async fn invoke(
    State(gateway): State<Arc<Gateway>>,
    Path((namespace, runtime, call)): Path<(String, String, String)>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if headers.get(header::AUTHORIZATION) != Some(&gateway.authorization) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let known = call.strip_suffix(":invoke").filter(|uid| {
        namespace == functions::NAMESPACE
            && runtime == functions::RUNTIME
            && gateway.routes.contains_key(*uid)
    });
    let Some(uid) = known else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    let request = InvokeFunctionRequest {
        registration: Some(FunctionRegistration {
            run_uid: uid.to_owned(),
            registration_id: String::new(),
        }),
        invocation_id: uuid::Uuid::now_v7().to_string(),
        input: body,
        content_type: kind.unwrap_or_default().to_owned(),
        timeout_millis: 30_000,
    };
    match gateway.client.clone().invoke_function(request).await {
        Ok(response) => {
            let answer = response.into_inner();
            ([(header::CONTENT_TYPE, answer.content_type)], answer.output).into_response()
        }
        Err(status) => (StatusCode::BAD_GATEWAY, status.message().to_owned()).into_response(),
    }
}

fn serving(args: &Args) -> anyhow::Result<ServerConfig> {
    let pair = read_pair(args, "tls")?;
    let identity = Arc::new(rustls::sign::SingleCertAndKey::from(pair));
    let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(identity);
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

async fn connect(args: &Args) -> anyhow::Result<Channel> {
    let identity = RotatingIdentity::fixed(read_pair(args, "peer")?);
    let mut config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(PinnedServer::new(args.owner_key)))
        .with_client_cert_resolver(Arc::new(identity));
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connector = TlsConnector::from(Arc::new(config));
    let owner = args.owner;
    let dial = tower::service_fn(move |_| {
        let connector = connector.clone();
        async move {
            let tcp = TcpStream::connect(owner).await?;
            tcp.set_nodelay(true)?;
            let tls = connector
                .connect(ServerName::IpAddress(owner.ip().into()), tcp)
                .await?;
            Ok::<_, io::Error>(TokioIo::new(tls))
        }
    });
    Ok(Endpoint::try_from(format!("http://{owner}"))?
        .connect_with_connector(dial)
        .await?)
}

fn read_pair(args: &Args, name: &str) -> anyhow::Result<Arc<rustls::sign::CertifiedKey>> {
    let dir = args.dir.join(name);
    let read = |file: &str| {
        fs::read(dir.join(file)).with_context(|| format!("reading {}", dir.join(file).display()))
    };
    Ok(certified_key(&read("tls.crt")?, &read("tls.key")?)?)
}
