//! What kruntimes keeps in Kubernetes: the kinds [`Run`] and [`Runtime`], the
//! rules that guard them, and the names and keys that every component shares.
//!
//! | Module | Holds |
//! | --- | --- |
//! | [`run`], [`runtime`] | the two kinds with their validation and transition rules |
//! | [`keys`] | UIDs, attempts and object keys as types of their own |
//! | [`names`] | group, labels, annotations, finalizer, ports, field managers |
//! | [`invoke_path`] | the invoke URL, built and parsed |
//! | [`crd`] | the CRDs as text |
//! | [`quantity`] | Kubernetes quantities as exact integers |
//! | [`retry`] | policy and failures → next attempt or exhausted |
//! | [`status`] | conditions and guarded status patches |
//!
//! Nothing here does I/O.

pub mod crd;
pub mod invoke_path;
pub mod keys;
pub mod names;
pub mod quantity;
pub mod retry;
#[allow(unreachable_pub, reason = "KubeSchema repeats each type inside a function")]
pub mod run;
#[allow(unreachable_pub, reason = "KubeSchema repeats each type inside a function")]
pub mod runtime;
pub mod status;

#[cfg(any(test, feature = "testing"))]
pub mod fixtures;

pub use run::{Run, RunSpec, RunStatus};
pub use runtime::{Runtime, RuntimeSpec, RuntimeStatus};
