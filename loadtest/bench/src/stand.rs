//! Everything that is the same for all gateways, bound to free ports of loopback.

use std::{fs, net::SocketAddr, path::PathBuf, sync::atomic::AtomicUsize, time::Duration};

use anyhow::Context as _;
use axum::serve::ListenerExt as _;
use kruntimes_peer::{Incoming, OwnKey, TrustBundle, accept::server_config};
use rustls::ServerConfig;
use serde_json::json;
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;

use crate::{
    functions, grpc,
    http1::{self, TlsListener},
    kubernetes::{self, Cluster, Reviews},
    pki,
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where certificates, the token and the Kubernetes configuration are written.
    #[arg(long)]
    dir: PathBuf,

    /// How many functions the Kubernetes API knows.
    #[arg(long, default_value_t = 10_000)]
    routes: usize,

    /// How many more functions come and go each second.
    #[arg(long, default_value_t = 0)]
    churn: u32,

    /// How long an access review takes, milliseconds.
    #[arg(long, default_value_t = 0)]
    review_millis: u64,
}

/// Prints one line of JSON, where everything is, once all of it is served.
pub(crate) async fn serve(args: Args) -> anyhow::Result<()> {
    fs::create_dir_all(&args.dir).with_context(|| format!("--dir {}", args.dir.display()))?;
    let key = OwnKey::generate()?;
    let token = functions::token();
    let trust = pki::write(&args.dir, &key)?;

    let (owner, owner_at) = bind().await?;
    let (owner_plaintext, owner_plaintext_at) = bind().await?;
    let (http, http_at) = bind().await?;
    let (http_plaintext, http_plaintext_at) = bind().await?;
    let (authorizer, authorizer_at) = bind().await?;
    let (api, api_at) = bind().await?;

    fs::write(args.dir.join("token"), &token)?;
    fs::write(args.dir.join("kubeconfig"), kubeconfig(api_at))?;
    println!(
        "{}",
        json!({
            "owner": owner_at, "owner_plaintext": owner_plaintext_at, "owner_key": key.peer_key().to_string(),
            "http": http_at, "http_plaintext": http_plaintext_at,
            "authorizer": authorizer_at, "kubernetes": api_at,
            "paths": functions::called(args.routes),
        })
    );

    let incoming = Incoming::new(owner, server_config(&key, trust.clone())?);
    let listener = TlsListener::new(http, http1_config(&key, trust)?);
    // Without waiting for more to send, as all others here.
    let plaintext = http_plaintext.tap_io(|tcp| {
        let _ = tcp.set_nodelay(true);
    });
    let authorize = grpc::authorizer(&token);
    let cluster = kubernetes::api(Cluster {
        routes: args.routes,
        owner: owner_at,
        key: key.peer_key(),
        token,
        churn: args.churn,
        review: Duration::from_millis(args.review_millis),
        reviews: Reviews::default(),
        came: AtomicUsize::default(),
    });
    tokio::try_join!(
        async { Ok::<_, anyhow::Error>(grpc::backends().serve_with_incoming(incoming).await?) },
        async {
            Ok(grpc::backends()
                .serve_with_incoming(prompt(owner_plaintext))
                .await?)
        },
        async { Ok(authorize.serve_with_incoming(prompt(authorizer)).await?) },
        async { Ok(axum::serve(listener, http1::echo()).await?) },
        async { Ok(axum::serve(plaintext, http1::echo()).await?) },
        async { Ok(axum::serve(api, cluster).await?) },
    )?;
    Ok(())
}

async fn bind() -> anyhow::Result<(TcpListener, SocketAddr)> {
    let socket = TcpListener::bind("127.0.0.1:0").await?;
    let address = socket.local_addr()?;
    Ok((socket, address))
}

/// Without waiting for more to send.
fn prompt(socket: TcpListener) -> TcpIncoming {
    TcpIncoming::from(socket).with_nodelay(Some(true))
}

/// The TLS of the hop, for another protocol.
fn http1_config(key: &OwnKey, trust: TrustBundle) -> anyhow::Result<ServerConfig> {
    let mut config = ServerConfig::clone(&*server_config(key, trust)?);
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Without any user: reviews carry the caller's token, and this API asks nobody who lists.
fn kubeconfig(api: SocketAddr) -> String {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "bench",
        "clusters": [{ "name": "bench", "cluster": { "server": format!("http://{api}") } }],
        "contexts": [{ "name": "bench", "context": { "cluster": "bench", "user": "nobody" } }],
        "users": [{ "name": "nobody", "user": {} }],
    })
    .to_string()
}
