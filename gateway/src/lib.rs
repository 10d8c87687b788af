//! HTTPS in, one gRPC hop out.
//!
//! One invocation, file by file:
//!
//! 1. [`listen`] accepts, shakes hands with the newest good certificate, and gives the stream to Pingora.
//! 2. [`front`] turns a Pingora session into a plain head, and later a plain body. Pingora's types end there.
//! 3. [`request`] is the only parser of what callers send: out comes a `Request` or an [`error::InvokeError`].
//! 4. [`invoke`] opens: [`routes`] (who owns that UID), access review, [`admit`]; then `front` reads the body.
//! 5. [`invoke`] sends: [`hop`] calls the owner once, with the fence. What is no call goes through [`ask`]: cancel,
//!    and [`explain`].
//! 6. [`error`] has the table of statuses; [`reply`] makes the answer; [`metrics`] and the access log note it once,
//!    and [`spans`] where somebody traces.
//!
//! Off that path, [`routes::watch`] feeds [`routes::table`] from one watch on Runs. Nothing on the path reads
//! Kubernetes, except one access review on a cache miss (C-1.2).

pub mod admit;
pub mod app;
pub mod args;
pub mod ask;
pub mod error;
pub mod explain;
pub mod front;
pub mod hop;
pub mod invoke;
pub mod listen;
pub mod metrics;
pub mod reply;
pub mod request;
pub mod routes;
pub mod spans;
