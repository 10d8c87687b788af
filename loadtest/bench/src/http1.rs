//! The backend for reverse proxies: gives back what was posted, over HTTP/1.1; and listening with TLS.

use std::{io, net::SocketAddr, sync::Arc};

use axum::{
    Router,
    body::Bytes,
    extract::DefaultBodyLimit,
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};
use kruntimes_proto::limits;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// Connections that have shaken hands, one after the other: nobody here is slow on purpose.
pub(crate) struct TlsListener {
    tcp: TcpListener,
    acceptor: TlsAcceptor,
}

/// Answers everything with its own body.
pub(crate) fn echo() -> Router {
    Router::new()
        .fallback(give_back)
        .layer(DefaultBodyLimit::max(limits::INPUT_BYTES))
}

async fn give_back(headers: HeaderMap, body: Bytes) -> Response {
    let kind = headers.get(header::CONTENT_TYPE).cloned();
    let mut response = body.into_response();
    if let Some(kind) = kind {
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    response
}

// === impl TlsListener ===

impl TlsListener {
    pub(crate) fn new(tcp: TcpListener, config: ServerConfig) -> Self {
        Self {
            tcp,
            acceptor: TlsAcceptor::from(Arc::new(config)),
        }
    }

    async fn next(&self) -> io::Result<(TlsStream<TcpStream>, SocketAddr)> {
        let (tcp, remote) = self.tcp.accept().await?;
        tcp.set_nodelay(true)?;
        Ok((self.acceptor.accept(tcp).await?, remote))
    }
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            match self.next().await {
                Ok(accepted) => return accepted,
                Err(error) => eprintln!("a connection was not accepted: {error}"),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.tcp.local_addr()
    }
}
