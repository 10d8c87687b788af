//! Asks the API server with the caller's token, over connections that carry no identity.
//!
//! With a client certificate on the connection, an API server authenticates the certificate and
//! ignores the token: every garbage token would be the gateway. So the pool is built from a
//! configuration without any identity, and [`Reviewer::verify_anonymous`] tries it at start.

use std::{borrow::Cow, fmt, time::Duration};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kruntimes_api::names;
use kube::{Config, client::ConfigExt};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::time::{sleep, timeout};

use crate::{token::Bearer, ttl::Answer, turns::Turns};

/// How long a review may take, and separately how long it may wait for its turn.
pub const DEADLINE: Duration = Duration::from_secs(2);

/// A review's answer has some hundred bytes.
const MAX_ANSWER_BYTES: usize = 64 * 1024;

/// How long between tries while the API server cannot be reached at start.
const RETRY: Duration = Duration::from_secs(1);

/// May the token's owner do `verb` with exactly this Run?
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Question<'a> {
    /// `get` to invoke, `update` to cancel.
    pub verb: &'static str,
    /// The Run's namespace.
    pub namespace: Cow<'a, str>,
    /// The Run's name.
    pub name: Cow<'a, str>,
    /// The Run's UID: an answer is not kept beyond the object it was given for.
    pub uid: Cow<'a, str>,
}

// === impl Question ===

impl Question<'_> {
    /// The same, with texts of its own.
    #[must_use]
    pub fn into_owned(self) -> Question<'static> {
        Question {
            verb: self.verb,
            namespace: self.namespace.into_owned().into(),
            name: self.name.into_owned().into(),
            uid: self.uid.into_owned().into(),
        }
    }
}

/// The pool of connections and its bounds.
pub struct Reviewer {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    uri: Uri,
    turns: Turns,
}

/// Why no pool could be built.
#[derive(Debug, Error)]
pub enum BuildError {
    /// The CA bundle or the like.
    #[error("the TLS configuration of the Kubernetes client: {0}")]
    Kube(#[from] kube::Error),
    /// `tls-server-name` is no name.
    #[error("tls-server-name `{0}` is not a host name")]
    ServerName(String),
    /// The server's URL is not one.
    #[error("the Kubernetes server's URL: {0}")]
    Url(#[from] http::uri::InvalidUri),
}

/// The API server took a garbage token: it sees another identity on the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "the API server answered a made-up token with `{0:?}` instead of 401: something between here \
     and it adds an identity, such as a client certificate; remove it, or every token would be \
     taken for that identity"
)]
pub struct NotAnonymous(Answer);

// === impl Reviewer ===

impl Reviewer {
    /// Uses where the API server is and whom to trust, and nothing else of `config`.
    ///
    /// # Errors
    /// When TLS cannot be set up from it.
    pub fn new(config: &Config) -> Result<Self, BuildError> {
        let mut config = config.clone();
        config.auth_info = kube::config::AuthInfo::default();
        let mut tls = config.rustls_client_config()?;
        // Belt and braces: whatever the line above kept, nothing is shown.
        tls.client_auth_cert_resolver = std::sync::Arc::new(NoIdentity);
        let mut builder = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
        if let Some(name) = &config.tls_server_name {
            let name = name
                .clone()
                .try_into()
                .map_err(|_| BuildError::ServerName(name.clone()))?;
            builder = builder.with_server_name_resolver(FixedServerNameResolver::new(name));
        }
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_nodelay(true);
        http.set_connect_timeout(Some(DEADLINE));
        let connector = builder.enable_http1().enable_http2().wrap_connector(http);
        let client = Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            // One dead HTTP/2 connection must not be every review's time-out until TCP notices.
            .http2_keep_alive_interval(Duration::from_secs(5))
            .http2_keep_alive_timeout(DEADLINE)
            .http2_keep_alive_while_idle(true)
            .build(connector);
        Ok(Self {
            client,
            uri: review_uri(&config.cluster_url)?,
            turns: Turns::new(),
        })
    }

    /// Asks, and once more where the connection broke. Everything that is no answer of Kubernetes is `Unavailable`,
    /// never a refusal.
    pub async fn ask(&self, bearer: &Bearer, question: &Question<'_>) -> Answer {
        // An empty name in a review means "every Run", which is another question.
        if question.namespace.is_empty() || question.name.is_empty() {
            return Answer::Denied;
        }
        let Ok(Some(_turn)) = timeout(DEADLINE, self.turns.take(&question.namespace)).await else {
            tracing::debug!("too many access reviews at once");
            return Answer::Unavailable;
        };
        match timeout(DEADLINE, self.post_again(bearer, question)).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(failure)) => {
                tracing::debug!(%failure, "an access review failed");
                Answer::Unavailable
            }
            Err(_) => {
                tracing::debug!("an access review took too long");
                Answer::Unavailable
            }
        }
    }

    /// Sends a made-up token until the API server answers, however long that takes.
    ///
    /// # Errors
    /// When the answer is anything but 401. The process must not start then.
    pub async fn verify_anonymous(&self) -> Result<(), NotAnonymous> {
        const MADE_UP: &[u8] = b"Bearer kruntimes-made-up-token-that-must-be-refused";
        let Ok(bearer) = Bearer::parse([MADE_UP]) else {
            // It is well-formed; a test holds that.
            return Err(NotAnonymous(Answer::Unavailable));
        };
        let question = Question {
            verb: "get",
            namespace: "kruntimes-system".into(),
            name: "anonymous-check".into(),
            uid: "".into(),
        };
        let mut told = false;
        loop {
            match self.ask(&bearer, &question).await {
                Answer::Rejected => return Ok(()),
                Answer::Unavailable => {
                    if !told {
                        tracing::warn!("waiting for the API server to answer access reviews");
                        told = true;
                    }
                    sleep(RETRY).await;
                }
                other => return Err(NotAnonymous(other)),
            }
        }
    }

    /// An API server that is replaced breaks its connections under what is on its way. A review changes nothing, so it
    /// may be sent twice.
    async fn post_again(&self, bearer: &Bearer, question: &Question<'_>) -> Result<Answer, Failure> {
        match self.post(bearer, question).await {
            Err(Failure::Send(_) | Failure::Body(_)) => self.post(bearer, question).await,
            answer => answer,
        }
    }

    async fn post(&self, bearer: &Bearer, question: &Question<'_>) -> Result<Answer, Failure> {
        let mut request = Request::new(Full::new(body(question)?));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        let headers = request.headers_mut();
        let json = HeaderValue::from_static("application/json");
        headers.insert(header::AUTHORIZATION, bearer.header().clone());
        headers.insert(header::CONTENT_TYPE, json.clone());
        headers.insert(header::ACCEPT, json);
        let user_agent = HeaderValue::from_static(concat!("kruntimes/", env!("CARGO_PKG_VERSION")));
        headers.insert(header::USER_AGENT, user_agent);
        let response = self.client.request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES)
            .collect()
            .await
            .map_err(Failure::Body)?
            .to_bytes();
        judge(status, &body)
    }
}

impl fmt::Debug for Reviewer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reviewer")
            .field("uri", &self.uri)
            .field("turns", &self.turns)
            .finish_non_exhaustive()
    }
}

/// Why there is no answer; for the log, so without bodies.
#[derive(Debug, Error)]
enum Failure {
    #[error("sending: {0}")]
    Send(#[from] hyper_util::client::legacy::Error),
    #[error("reading the answer: {0}")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the API server answered {0}")]
    Status(StatusCode),
    #[error("the API server's answer is not a review")]
    NoReview,
    #[error("writing the question: {0}")]
    Write(#[from] serde_json::Error),
}

/// What an HTTP answer says about the question.
fn judge(status: StatusCode, body: &[u8]) -> Result<Answer, Failure> {
    #[derive(Deserialize)]
    struct Review {
        status: Status,
    }
    #[derive(Deserialize)]
    struct Status {
        allowed: bool,
        #[serde(default)]
        denied: bool,
    }
    match status {
        StatusCode::OK | StatusCode::CREATED => {
            let Review { status } = serde_json::from_slice(body).map_err(|_| Failure::NoReview)?;
            Ok(if status.allowed && !status.denied {
                Answer::Allowed
            } else {
                Answer::Denied
            })
        }
        StatusCode::UNAUTHORIZED => Ok(Answer::Rejected),
        // The token is good but may not even ask: `system:basic-user` was removed.
        StatusCode::FORBIDDEN => Ok(Answer::Denied),
        other => Err(Failure::Status(other)),
    }
}

fn body(question: &Question<'_>) -> Result<Bytes, serde_json::Error> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Review<'a> {
        api_version: &'a str,
        kind: &'a str,
        spec: Spec<'a>,
    }
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Spec<'a> {
        resource_attributes: Attributes<'a>,
    }
    #[derive(Serialize)]
    struct Attributes<'a> {
        group: &'a str,
        resource: &'a str,
        verb: &'a str,
        namespace: &'a str,
        name: &'a str,
    }
    let review = Review {
        api_version: "authorization.k8s.io/v1",
        kind: "SelfSubjectAccessReview",
        spec: Spec {
            resource_attributes: Attributes {
                group: names::GROUP,
                resource: names::RUNS,
                verb: question.verb,
                namespace: &question.namespace,
                name: &question.name,
            },
        },
    };
    serde_json::to_vec(&review).map(Bytes::from)
}

/// The server's URL may have a path of its own, as behind a proxy.
fn review_uri(cluster: &Uri) -> Result<Uri, http::uri::InvalidUri> {
    const PATH: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    let text = cluster.to_string();
    format!("{}{PATH}", text.trim_end_matches('/')).parse()
}

/// Shows no certificate to anybody.
#[derive(Debug)]
struct NoIdentity;

// === impl NoIdentity ===

impl rustls::client::ResolvesClientCert for NoIdentity {
    fn resolve(
        &self,
        _root_hint_subjects: &[&[u8]],
        _sigschemes: &[rustls::SignatureScheme],
    ) -> Option<std::sync::Arc<rustls::sign::CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C-3.6
    #[test]
    fn only_allowed_and_not_denied_passes() {
        let ok = StatusCode::CREATED;
        for (status, body, answer) in [
            (ok, r#"{"status":{"allowed":true}}"#, Some(Answer::Allowed)),
            (
                ok,
                r#"{"status":{"allowed":true,"denied":true}}"#,
                Some(Answer::Denied),
            ),
            (ok, r#"{"status":{"allowed":false}}"#, Some(Answer::Denied)),
            (ok, r#"{"status":{}}"#, None),
            (ok, "<html>", None),
            (StatusCode::UNAUTHORIZED, "", Some(Answer::Rejected)),
            (StatusCode::FORBIDDEN, "", Some(Answer::Denied)),
            (StatusCode::TOO_MANY_REQUESTS, "", None),
            (StatusCode::NOT_FOUND, "", None),
            (StatusCode::INTERNAL_SERVER_ERROR, "", None),
            (StatusCode::FOUND, "", None),
        ] {
            assert_eq!(judge(status, body.as_bytes()).ok(), answer, "{status} {body}");
        }
    }

    #[test]
    fn the_question_names_exactly_one_run() {
        let question = Question {
            verb: "get",
            namespace: "team".into(),
            name: "resize".into(),
            uid: "u".into(),
        };
        let body: serde_json::Value = serde_json::from_slice(&body(&question).expect("json")).expect("json");
        assert_eq!(
            body,
            serde_json::json!({
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": {
                    "group": "kruntimes.io", "resource": "runs",
                    "verb": "get", "namespace": "team", "name": "resize",
                }},
            })
        );
    }

    #[test]
    fn a_path_in_the_server_s_url_stays() {
        for (cluster, uri) in [
            (
                "https://10.0.0.1",
                "https://10.0.0.1/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
            ),
            (
                "https://proxy:1/k8s/c1/",
                "https://proxy:1/k8s/c1/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
            ),
        ] {
            assert_eq!(review_uri(&cluster.parse().expect("uri")).expect("uri"), uri);
        }
    }
}
