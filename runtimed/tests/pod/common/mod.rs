//! What the tests share: Kubernetes, a Runtime Server and the daemon between them.

pub(crate) mod kubernetes;
pub(crate) mod pod;
pub(crate) mod server;

pub(crate) use kubernetes::Kubernetes;
pub(crate) use pod::{Pod, call};
pub(crate) use server::{FakeServer, Starts};
