//! Names that components, users, charts and checks share.

/// API group of both kinds.
pub const GROUP: &str = "kruntimes.io";
/// Served and stored version.
pub const VERSION: &str = "v1alpha1";
/// Plural of [`crate::Run`], as in RBAC rules and access reviews.
pub const RUNS: &str = "runs";

/// Set before a function is registered, removed after its Pod-local state is gone (C-6.1).
pub const FINALIZER: &str = "kruntimes.io/registration-cleanup";

/// Pod label: name of the Runtime whose pool the Pod belongs to.
pub const LABEL_RUNTIME: &str = "runtime";
/// Pod label: `kruntimes-<runtime>`.
pub const LABEL_APP: &str = "app";
/// Pod annotation prefix: capacity of one resource, a quantity.
pub const CAPACITY_PREFIX: &str = "kruntimes.io/capacity.";
/// Lease annotation: comma-separated modes the Pod's server supports (C-6.7).
pub const ANNOTATION_MODES: &str = "kruntimes.io/modes";
/// Lease label: name of the Runtime.
pub const LEASE_LABEL_RUNTIME: &str = "kruntimes.io/runtime";
/// Annotation: RFC 3339 time after which a certificate made here is not valid.
pub const ANNOTATION_NOT_AFTER: &str = "kruntimes.io/not-after";
/// The only topology key of Run affinity.
pub const TOPOLOGY_RUNTIME_POD: &str = "kruntimes.io/runtime-pod";

/// The mode word of function Runs in [`ANNOTATION_MODES`].
pub const MODE_FUNCTION: &str = "function";
/// The mode word of task Runs in [`ANNOTATION_MODES`].
pub const MODE_TASK: &str = "task";

/// Resource every Pod has: how many Runs it may hold at once.
pub const RESOURCE_RUNS: &str = "runs";

/// Field manager of the scheduler's writes.
pub const MANAGER_SCHEDULER: &str = "kruntimes-scheduler";
/// Field manager of runtimed's writes.
pub const MANAGER_RUNTIMED: &str = "kruntimes-runtimed";

/// HTTPS port of the gateway.
pub const PORT_GATEWAY: u16 = 8443;
/// Port on which an owner takes the gateway's hop.
pub const PORT_HOP: u16 = 9443;
/// Plain port for health and metrics on every binary.
pub const PORT_ADMIN: u16 = 9090;

/// ConfigMap in each pool namespace: `url`, `ca.crt`, `peer-ca.crt` (C-4).
pub const CONFIGMAP_GATEWAY: &str = "kruntimes-gateway";
/// Key of [`CONFIGMAP_GATEWAY`]: public URL of the gateway, without a trailing slash.
pub const GATEWAY_URL: &str = "url";
/// Key of [`CONFIGMAP_GATEWAY`]: PEM bundle the serving certificate chains to, at most 16 KiB.
pub const GATEWAY_CA: &str = "ca.crt";
/// Key of [`CONFIGMAP_GATEWAY`]: PEM bundle of the peer CA, old and new during a rotation.
pub const GATEWAY_PEER_CA: &str = "peer-ca.crt";
/// Secret with the peer CA's certificate and key.
pub const SECRET_PEER_CA: &str = "kruntimes-peer-ca";
/// Secret with the gateway's client certificate.
pub const SECRET_GATEWAY_PEER: &str = "kruntimes-gateway-peer";
/// Lease of the active scheduler.
pub const LEASE_SCHEDULER: &str = "kruntimes-scheduler";
/// URI SAN of the gateway's client certificate (C-4).
pub const GATEWAY_IDENTITY: &str = "spiffe://kruntimes.io/gateway";

/// Name of a Pod's heartbeat Lease.
#[must_use]
pub fn heartbeat_lease(pod: &str) -> String {
    format!("runtimed-{pod}")
}

/// Name of the Deployment and headless Service of a Runtime's pool.
#[must_use]
pub fn pool(runtime: &str) -> String {
    format!("runtime-{runtime}")
}

/// Value of [`LABEL_APP`] on a Runtime's Pods.
#[must_use]
pub fn app_label(runtime: &str) -> String {
    format!("kruntimes-{runtime}")
}
