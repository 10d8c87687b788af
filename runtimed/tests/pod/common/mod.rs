//! What the tests share: Kubernetes, a Runtime Server and the daemon between them.

pub(crate) mod fate;
pub(crate) mod kubernetes;
pub(crate) mod pod;
pub(crate) mod server;

pub(crate) use fate::Fate;
pub(crate) use kubernetes::{Kubernetes, comes_true};
pub(crate) use pod::{Pod, call};
pub(crate) use server::{FakeServer, Starts};
