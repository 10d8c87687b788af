//! Backends over gRPC: the owner of functions, the same for Envoy's transcoder, and an authorizer for `ext_authz`.
//!
//! The messages that Envoy needs are written by hand, with the fields that matter here: code generation would bring
//! a tree of foreign definitions.

use std::{
    collections::HashMap,
    convert::Infallible,
    task::{Context, Poll},
};

use bytes::Bytes;
use futures::future::BoxFuture;
use kruntimes_proto::{
    executor::{InvokeFunctionRequest, InvokeFunctionResponse},
    hop, limits,
};
use tonic::{
    Request, Response, Status,
    body::Body,
    metadata::MetadataValue,
    server::{Grpc, NamedService},
    transport::{Server, server::Router},
};
use tonic_prost::ProstCodec;
use tower::Service;

/// A service with one unary method.
pub(crate) trait Method: Clone + Send + Sync + 'static {
    /// Package and name of the service.
    const SERVICE: &'static str;
    /// What requests name.
    const PATH: &'static str;
    /// What comes in.
    type Question: prost::Message + Default + Send + 'static;
    /// What goes out.
    type Answer: prost::Message + Default + Send + 'static;

    /// Answers at once.
    fn answer(&self, question: Self::Question) -> Response<Self::Answer>;
}

/// Makes a server of a [`Method`].
#[derive(Debug, Clone)]
struct Served<M>(M);

/// `executor.v1.FunctionRuntime/InvokeFunction`: gives the input back, as an owner would answer.
#[derive(Debug, Clone)]
struct Owner;

/// `bench.v1.Bridge/InvokeHttp`: the same, as raw HTTP bodies.
#[derive(Debug, Clone)]
struct Bridge;

/// `envoy.service.auth.v3.Authorization/Check`: allows one token.
#[derive(Debug, Clone)]
struct Authorizer {
    header: String,
}

/// The backends, on one port: whatever gateway calls, the same server with the same settings answers.
pub(crate) fn backends() -> Router {
    server().add_service(Served(Owner)).add_service(Served(Bridge))
}

/// Who answers Envoy's questions about callers.
pub(crate) fn authorizer(token: &str) -> Router {
    let header = format!("Bearer {token}");
    server().add_service(Served(Authorizer { header }))
}

/// With the sizes of runtimed's hop.
fn server() -> Server {
    Server::builder()
        .max_frame_size(256 * 1024)
        .initial_stream_window_size(2 * 1024 * 1024)
        .initial_connection_window_size(16 * 1024 * 1024)
        .max_concurrent_streams(1024)
        .http2_max_header_list_size(64 * 1024)
}

// === impl Owner ===

impl Method for Owner {
    const SERVICE: &'static str = "executor.v1.FunctionRuntime";
    const PATH: &'static str = "/executor.v1.FunctionRuntime/InvokeFunction";
    type Question = InvokeFunctionRequest;
    type Answer = InvokeFunctionResponse;

    fn answer(&self, question: Self::Question) -> Response<Self::Answer> {
        let mut response = Response::new(InvokeFunctionResponse {
            registration: question.registration,
            invocation_id: question.invocation_id,
            output: question.input,
            content_type: question.content_type,
            outputs: HashMap::new(),
        });
        let took = MetadataValue::from_static("1");
        response.metadata_mut().insert(hop::HANDLER_US, took);
        response
    }
}

// === impl Bridge ===

/// `google.api.HttpBody`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HttpBody {
    #[prost(string, tag = "1")]
    content_type: String,
    #[prost(bytes = "bytes", tag = "2")]
    data: Bytes,
}

/// `bench.v1.InvokeHttpRequest`; the transcoder fills it from path and body (see `bridge.py`).
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct InvokeHttpRequest {
    #[prost(string, tag = "1")]
    namespace: String,
    #[prost(string, tag = "2")]
    runtime: String,
    #[prost(string, tag = "3")]
    uid: String,
    #[prost(message, optional, tag = "4")]
    body: Option<HttpBody>,
}

impl Method for Bridge {
    const SERVICE: &'static str = "bench.v1.Bridge";
    const PATH: &'static str = "/bench.v1.Bridge/InvokeHttp";
    type Question = InvokeHttpRequest;
    type Answer = HttpBody;

    fn answer(&self, question: Self::Question) -> Response<Self::Answer> {
        Response::new(question.body.unwrap_or_default())
    }
}

// === impl Authorizer ===

/// `envoy.service.auth.v3.CheckRequest`, down to the headers.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct CheckRequest {
    #[prost(message, optional, tag = "1")]
    attributes: Option<AttributeContext>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct AttributeContext {
    #[prost(message, optional, tag = "4")]
    request: Option<CheckedRequest>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct CheckedRequest {
    #[prost(message, optional, tag = "2")]
    http: Option<CheckedHttp>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct CheckedHttp {
    #[prost(map = "string, string", tag = "3")]
    headers: HashMap<String, String>,
}

/// `envoy.service.auth.v3.CheckResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct CheckResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<CheckStatus>,
}

/// `google.rpc.Status`; 0 allows.
#[derive(Clone, PartialEq, prost::Message)]
struct CheckStatus {
    #[prost(int32, tag = "1")]
    code: i32,
}

impl Method for Authorizer {
    const SERVICE: &'static str = "envoy.service.auth.v3.Authorization";
    const PATH: &'static str = "/envoy.service.auth.v3.Authorization/Check";
    type Question = CheckRequest;
    type Answer = CheckResponse;

    fn answer(&self, question: Self::Question) -> Response<Self::Answer> {
        let http = question
            .attributes
            .and_then(|attributes| attributes.request)
            .and_then(|request| request.http)
            .unwrap_or_default();
        let known = http.headers.get("authorization") == Some(&self.header);
        let code = if known {
            tonic::Code::Ok
        } else {
            tonic::Code::Unauthenticated
        };
        let status = Some(CheckStatus { code: code.into() });
        Response::new(CheckResponse { status })
    }
}

// === impl Served ===

impl<M: Method> NamedService for Served<M> {
    const NAME: &'static str = M::SERVICE;
}

impl<M: Method> Service<http::Request<Body>> for Served<M> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let method = self.0.clone();
        Box::pin(async move {
            if request.uri().path() != M::PATH {
                return Ok(Status::unimplemented("only one method is served").into_http());
            }
            let codec = ProstCodec::<M::Answer, M::Question>::default();
            let mut grpc = Grpc::new(codec)
                .apply_max_message_size_config(Some(limits::MESSAGE_BYTES), Some(limits::MESSAGE_BYTES));
            let answer = tower::service_fn(move |question: Request<M::Question>| {
                let answer = method.answer(question.into_inner());
                async move { Ok::<_, Status>(answer) }
            });
            Ok(grpc.unary(answer, request).await)
        })
    }
}
