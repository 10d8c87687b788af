//! Connections that are given up soon when nobody acknowledges.

use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client as Pool, connect::HttpConnector},
    rt::TokioExecutor,
};
use kube::{
    Client, Config, Error,
    client::{Body, ClientBuilder, ConfigExt as _},
};
use tower::{BoxError, ServiceBuilder, ServiceExt as _, util::BoxService};

/// How long making a connection may take. The kernel asks again after one second.
const CONNECT: Duration = Duration::from_secs(2);
/// A connection on which nothing comes, a watch for instance, is tried after this rest, this often, with this
/// pause: it is over 6 s after the network was cut.
const REST: Duration = Duration::from_secs(3);
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_secs(1);
/// What was sent is acknowledged within this time, or the connection is over.
const SILENCE: Duration = Duration::from_secs(6);

/// The service under a client: a pool of connections with the identity of the configuration.
pub type Service = BoxService<Request<Body>, Response<Incoming>, BoxError>;

/// A client for everything that a daemon asks. It never tries again by itself.
///
/// # Errors
/// When TLS or the identity cannot be set up from `config`, or it wants a proxy.
pub fn client(config: &Config) -> Result<Client, Error> {
    Ok(builder(config)?.build())
}

/// The same, for one more layer.
///
/// # Errors
/// As for [`client`].
pub fn builder(config: &Config) -> Result<ClientBuilder<Service>, Error> {
    if let Some(proxy_url) = &config.proxy_url {
        return Err(Error::ProxyProtocolUnsupported {
            proxy_url: Box::new(proxy_url.clone()),
        });
    }
    let https = config.rustls_https_connector_with_connector(connector())?;
    let pool = Pool::builder(TokioExecutor::new()).build::<_, Body>(https);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(pool);
    Ok(ClientBuilder::new(
        service.boxed(),
        config.default_namespace.clone(),
    ))
}

fn connector() -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(CONNECT));
    connector.set_keepalive(Some(REST));
    connector.set_keepalive_interval(Some(PAUSE));
    connector.set_keepalive_retries(Some(TRIES));
    connector.set_tcp_user_timeout(Some(SILENCE));
    connector
}
