//! Flags → a configuration that makes sense, or an error that names the flag.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use clap::{ArgAction, Parser, ValueEnum};
use kruntimes_api::{keys::PodUid, run::Owner};
use kruntimes_ops::{args::OpsArgs, threads};
use kruntimes_peer::PeerKey;

use crate::{
    admission::{Vector, parse_capacity},
    lifecycle::facts::Me,
    server_channel::ServerAddress,
};

/// The daemon that owns the Runs of one Pod.
#[derive(Debug, Clone, Parser)]
#[command(name = "kruntimes-runtimed", version)]
pub struct Args {
    /// Namespace of the Pod and of its Runs.
    #[arg(long, env = "KRUNTIMES_NAMESPACE")]
    pub namespace: String,

    /// Name of the Pod.
    #[arg(long, env = "KRUNTIMES_POD_NAME")]
    pub pod_name: String,

    /// UID of the Pod.
    #[arg(long, env = "KRUNTIMES_POD_UID", value_parser = pod_uid)]
    pub pod_uid: PodUid,

    /// IP address of the Pod.
    #[arg(long, env = "KRUNTIMES_POD_IP")]
    pub pod_ip: IpAddr,

    /// Name of the Runtime whose pool the Pod belongs to.
    #[arg(long, env = "KRUNTIMES_RUNTIME")]
    pub runtime: String,

    /// Where gateways are accepted; port 0 takes any free one.
    #[arg(long, env = "KRUNTIMES_LISTEN", default_value = "0.0.0.0:9443")]
    pub listen: SocketAddr,

    /// Where gateways find this Pod; by default the Pod's IP and the port of --listen.
    #[arg(long, env = "KRUNTIMES_ADVERTISE_ADDRESS", value_name = "IP:PORT")]
    pub advertise_address: Option<SocketAddr>,

    /// The Runtime Server: unix:///path or http://127.0.0.1:PORT.
    #[arg(
        long,
        env = "KRUNTIMES_SERVER",
        default_value = "unix:///run/kruntimes/runtime.sock"
    )]
    pub server: ServerAddress,

    /// Directory, shared with the Runtime Server, that holds one directory a Run.
    #[arg(long, env = "KRUNTIMES_WORKSPACE", default_value = "/workspace")]
    pub workspace: PathBuf,

    /// Directory, not shared, that remembers registrations across a restart.
    #[arg(long, env = "KRUNTIMES_JOURNAL_DIR", default_value = "/var/lib/kruntimes")]
    pub journal_dir: PathBuf,

    /// The mounted ConfigMap kruntimes-gateway: url, ca.crt, peer-ca.crt. May be empty at first.
    #[arg(
        long,
        env = "KRUNTIMES_GATEWAY_CONFIG_DIR",
        default_value = "/etc/kruntimes/gateway"
    )]
    pub gateway_config_dir: PathBuf,

    /// What the Pod can hold, for example runs=2,memory=1Gi.
    #[arg(long, env = "KRUNTIMES_CAPACITY", default_value = "", value_parser = capacity, value_name = "NAME=QUANTITY,…")]
    pub capacity: Capacity,

    /// Threads that serve. One costs least per call, and is seldom the one that limits.
    #[arg(long, env = "KRUNTIMES_THREADS", default_value_t = 1, value_parser = threads::parse)]
    pub threads: usize,

    /// Whether the gateway forwards the caller's token, to be reviewed here again.
    #[arg(
        long,
        env = "KRUNTIMES_CALLER_CREDENTIAL",
        value_enum,
        default_value = "forward"
    )]
    pub caller_credential: CallerCredential,

    /// Whether callers are told what a function raised when a Runtime Server says only Unknown.
    #[arg(long, env = "KRUNTIMES_EXPOSE_ERRORS", action = ArgAction::Set, default_value_t = false, value_name = "true|false")]
    pub expose_errors: bool,

    #[command(flatten)]
    pub ops: OpsArgs,
}

/// What the Pod can hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capacity(pub Vector);

/// What happens with the caller's token on the hop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CallerCredential {
    /// It comes along, and the owner asks Kubernetes again.
    Forward,
    /// It stays at the gateway, whose identity is enough.
    Omit,
}

// === impl Args ===

impl Args {
    /// Who this process is, once the port and the key are known.
    #[must_use]
    pub fn me(&self, bound: SocketAddr, key: PeerKey) -> Me {
        let address = self
            .advertise_address
            .unwrap_or_else(|| SocketAddr::new(self.pod_ip, bound.port()));
        Me {
            namespace: self.namespace.clone(),
            pod: self.pod_name.clone(),
            pod_uid: self.pod_uid.clone(),
            runtime: self.runtime.clone(),
            owner: Owner {
                address: address.to_string(),
                peer_key: key.to_string(),
            },
        }
    }
}

fn pod_uid(text: &str) -> Result<PodUid, &'static str> {
    PodUid::new(text).ok_or("must not be empty; in a Pod it comes from fieldRef metadata.uid")
}

fn capacity(text: &str) -> Result<Capacity, String> {
    parse_capacity(text).map(Capacity)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: [&str; 11] = [
        "x",
        "--namespace",
        "ns",
        "--pod-name",
        "pod-a",
        "--pod-uid",
        "u",
        "--pod-ip",
        "10.0.0.7",
        "--runtime",
        "python",
    ];

    #[test]
    fn defaults_are_those_of_a_pod() {
        let args = Args::parse_from(GOOD);
        assert_eq!(args.listen.port(), 9443);
        assert_eq!(args.caller_credential, CallerCredential::Forward);
        assert_eq!(args.server, "unix:///run/kruntimes/runtime.sock".parse().unwrap());
        let key: PeerKey = "0a".repeat(32).parse().unwrap();
        let me = args.me(args.listen, key);
        assert_eq!(me.owner.address, "10.0.0.7:9443");
        assert_eq!(me.owner.peer_key, "0a".repeat(32));
    }

    #[test]
    fn a_wrong_flag_is_named_with_a_remedy() {
        for (flag, value, needle) in [
            ("--server", "10.0.0.1:80", "unix:///"),
            ("--capacity", "runs", "NAME=QUANTITY"),
            ("--pod-uid", "", "fieldRef"),
            ("--advertise-address", "here", "--advertise-address"),
            ("--threads", "0", "1 to 256"),
        ] {
            let mut args: Vec<_> = GOOD.iter().copied().filter(|it| *it != flag).collect();
            args.extend([flag, value]);
            if flag == "--pod-uid" {
                args.retain(|it| *it != "u");
            }
            let error = Args::try_parse_from(args).unwrap_err().to_string();
            assert!(error.contains(needle) && error.contains(flag), "{error}");
        }
    }
}
