//! Flags → what the gateway works with. Nonsense is refused here, by the flag's name.

use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use kruntimes_authz::Caps;
use kruntimes_ops::{
    args::{OpsArgs, parse_duration},
    threads,
};
use kruntimes_proto::limits;
use kruntimes_trace::Tracer;

use crate::{
    hop::{
        channels::{MAX_AGE, RESTED},
        client::CallerCredential,
    },
    request::Timeouts,
    routes::table::Scope,
};

/// HTTPS gateway of kruntimes: calls functions by their UID.
#[derive(Debug, Clone, Parser)]
#[command(name = "kruntimes-gateway", version)]
pub struct Args {
    /// Where HTTPS is served; port 0 takes any free one.
    #[arg(long, env = "KRUNTIMES_LISTEN", default_value = "0.0.0.0:8443")]
    pub listen: SocketAddr,

    /// Directory with the serving certificate: tls.crt and tls.key; read again when they change.
    #[arg(long, env = "KRUNTIMES_TLS_DIR", default_value = "/etc/kruntimes/tls")]
    pub tls_dir: PathBuf,

    /// Oldest TLS version that callers may use.
    #[arg(long, env = "KRUNTIMES_TLS_MIN_VERSION", value_enum, default_value = "1.2")]
    pub tls_min_version: TlsVersion,

    /// Directory with the certificate that owners know the gateway by: tls.crt and tls.key; may be empty at first.
    #[arg(long, env = "KRUNTIMES_PEER_DIR", default_value = "/etc/kruntimes/peer")]
    pub peer_dir: PathBuf,

    /// How long an allowed access review is kept, at most 30s.
    #[arg(long, env = "KRUNTIMES_AUTHORIZATION_TTL", default_value = "10s", value_parser = parse_duration)]
    pub authorization_ttl: Duration,

    /// The same for tokens whose expiry cannot be read.
    #[arg(long, env = "KRUNTIMES_AUTHORIZATION_OPAQUE_TTL", default_value = "5s", value_parser = parse_duration)]
    pub authorization_opaque_ttl: Duration,

    /// Whether the owner gets the caller's token, to authorize again.
    #[arg(
        long,
        env = "KRUNTIMES_CALLER_CREDENTIAL",
        value_enum,
        default_value = "forward"
    )]
    pub caller_credential: CallerCredential,

    /// Deadline of a call that names none.
    #[arg(long, env = "KRUNTIMES_DEFAULT_TIMEOUT", default_value = "30s", value_parser = parse_duration)]
    pub default_timeout: Duration,

    /// Longest deadline of a call, at most 300s; longer wishes are clamped.
    #[arg(long, env = "KRUNTIMES_MAX_TIMEOUT", default_value = "300s", value_parser = parse_duration)]
    pub max_timeout: Duration,

    /// Calls at once, in all.
    #[arg(long, env = "KRUNTIMES_MAX_IN_FLIGHT", default_value_t = 1024)]
    pub max_in_flight: usize,

    /// Calls at once of one namespace.
    #[arg(long, env = "KRUNTIMES_MAX_IN_FLIGHT_PER_NAMESPACE", default_value_t = 512)]
    pub max_in_flight_per_namespace: usize,

    /// How long a call waits while one Pod hands its function over to another, as in a rollout, from the hand-over's
    /// beginning; 0s refuses such calls at once.
    #[arg(long, env = "KRUNTIMES_HANDOVER_WAIT", default_value = "3s", value_parser = parse_duration)]
    pub handover_wait: Duration,

    /// Namespaces to serve, separated by commas; all when empty.
    #[arg(long, env = "KRUNTIMES_NAMESPACES", value_delimiter = ',')]
    pub namespaces: Vec<String>,

    /// Lets owners listen on loopback and on any port; for one machine, never for a cluster.
    #[arg(long, env = "KRUNTIMES_ALLOW_LOCAL_OWNERS")]
    pub allow_local_owners: bool,

    /// Time between SIGTERM, when readiness fails, and closing the listener.
    #[arg(long, env = "KRUNTIMES_SHUTDOWN_DELAY", default_value = "5s", value_parser = parse_duration)]
    pub shutdown_delay: Duration,

    /// Threads that serve; no more than the Pod has CPUs. One costs least per call.
    #[arg(long, env = "KRUNTIMES_THREADS", default_value_t = 1, value_parser = threads::parse)]
    pub threads: usize,

    #[command(flatten)]
    #[allow(missing_docs, reason = "each flag has its own")]
    pub ops: OpsArgs,
}

/// A version of TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TlsVersion {
    /// TLS 1.2.
    #[value(name = "1.2")]
    V1_2,
    /// TLS 1.3.
    #[value(name = "1.3")]
    V1_3,
}

/// Everything that starting needs to know, checked.
#[derive(Debug, Clone)]
pub struct Config {
    /// The flags, as far as they need no change.
    pub args: Args,
    /// How long answers of access reviews are kept.
    pub caps: Caps,
    /// How long calls may take.
    pub timeouts: Timeouts,
    /// What is watched.
    pub scopes: Vec<Scope>,
    /// How long callers may take.
    pub patience: Patience,
    /// After how long without calls a connection to an owner is tried before use.
    pub rested: Duration,
    /// After how long a connection to an owner carries no new calls.
    pub max_age: Duration,
    /// How many connections callers may have open.
    pub connections: usize,
    /// Whom spans are told; off unless the environment names a collector.
    pub tracer: Tracer,
}

/// How long a caller may keep a connection waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// For the TLS handshake.
    pub handshake: Duration,
    /// From the first to the last byte of a head.
    pub head: Duration,
    /// Between two pieces of a body.
    pub body_gap: Duration,
    /// For the whole body: 1 MiB at 17 KiB/s.
    pub body: Duration,
    /// Between two requests on a connection.
    pub idle: Duration,
    /// For taking a piece of the answer.
    pub write: Duration,
}

/// How many connections callers may have open, once their handshake is done. Each costs some 50 KiB, over HTTP/2 at most the connection's
/// window of 256 KiB more.
pub const CONNECTIONS: usize = 2048;

/// The library's own words about callers: all of them can be provoked, so they would fill a log. A filter may
/// name the target again and thereby lift this.
const QUIET: &str = "pingora_core=off";

impl Args {
    /// The flags of logging, with what is always filtered.
    #[must_use]
    pub fn log(&self) -> OpsArgs {
        OpsArgs {
            log_filter: format!("{QUIET},{}", self.ops.log_filter),
            ..self.ops.clone()
        }
    }

    /// Checks what a single flag cannot know.
    ///
    /// # Errors
    /// Names the flag and the remedy.
    pub fn check(self) -> anyhow::Result<Config> {
        let caps = Caps::new(self.authorization_ttl, self.authorization_opaque_ttl)?;
        anyhow::ensure!(
            !self.max_timeout.is_zero(),
            "--max-timeout is zero; give at least 1ms"
        );
        anyhow::ensure!(
            self.max_timeout <= limits::MAX_TIMEOUT,
            "--max-timeout is {:?}; Runtime Servers allow at most {:?}",
            self.max_timeout,
            limits::MAX_TIMEOUT,
        );
        anyhow::ensure!(
            !self.default_timeout.is_zero(),
            "--default-timeout is zero; give at least 1ms"
        );
        anyhow::ensure!(
            self.default_timeout <= self.max_timeout,
            "--default-timeout is {:?}, which is more than --max-timeout {:?}",
            self.default_timeout,
            self.max_timeout,
        );
        anyhow::ensure!(
            self.max_in_flight > 0,
            "--max-in-flight is 0: no call would ever be let in"
        );
        anyhow::ensure!(
            self.max_in_flight_per_namespace > 0,
            "--max-in-flight-per-namespace is 0: no call would ever be let in"
        );
        let names: BTreeSet<&str> = self
            .namespaces
            .iter()
            .map(|name| name.trim())
            .filter(|name| !name.is_empty())
            .collect();
        for name in &names {
            let label = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            anyhow::ensure!(
                name.len() <= 63 && name.bytes().all(label),
                "--namespaces: `{name}` is not the name of a namespace"
            );
        }
        let scopes = if names.is_empty() {
            vec![Scope::All]
        } else {
            names
                .iter()
                .map(|name| Scope::Namespace((*name).to_owned()))
                .collect()
        };
        Ok(Config {
            caps,
            timeouts: Timeouts {
                default: self.default_timeout,
                max: self.max_timeout,
            },
            scopes,
            patience: Patience::default(),
            rested: RESTED,
            max_age: MAX_AGE,
            connections: CONNECTIONS,
            tracer: Tracer::default(),
            args: self,
        })
    }
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(10),
            head: Duration::from_secs(10),
            body_gap: Duration::from_secs(10),
            body: Duration::from_secs(60),
            idle: Duration::from_secs(60),
            write: Duration::from_secs(30),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(flags: &[&str]) -> anyhow::Result<Config> {
        Args::try_parse_from([&["kruntimes-gateway"], flags].concat())
            .map_err(Into::into)
            .and_then(Args::check)
    }

    /// C-3.6, C-3.9
    #[test]
    fn defaults_are_those_of_the_contract() {
        let config = check(&[]).unwrap();
        assert_eq!(config.args.listen.port(), 8443);
        assert_eq!(config.timeouts.default, Duration::from_secs(30));
        assert_eq!(config.timeouts.max, Duration::from_secs(300));
        assert_eq!(config.scopes, [Scope::All]);
        assert_eq!(config.args.caller_credential, CallerCredential::Forward);
        assert_eq!(config.args.tls_min_version, TlsVersion::V1_2);
    }

    #[test]
    fn nonsense_names_the_flag() {
        for (flags, flag) in [
            (&["--max-timeout", "301s"][..], "--max-timeout"),
            (&["--max-timeout", "0s"], "--max-timeout"),
            (&["--default-timeout", "0s"], "--default-timeout"),
            (
                &["--default-timeout", "60s", "--max-timeout", "30s"],
                "--default-timeout",
            ),
            (&["--authorization-ttl", "31s"], "--authorization-ttl"),
            (
                &["--authorization-opaque-ttl", "31s"],
                "--authorization-opaque-ttl",
            ),
            (&["--max-in-flight", "0"], "--max-in-flight"),
            (&["--threads", "0"], "--threads"),
            (&["--namespaces", "a,B"], "--namespaces"),
            (&["--tls-min-version", "1.1"], "--tls-min-version"),
            (&["--listen", "8443"], "--listen"),
            (&["--caller-credential", "hide"], "--caller-credential"),
        ] {
            let error = check(flags).unwrap_err().to_string();
            assert!(error.contains(flag), "{flags:?}: {error}");
        }
    }

    #[test]
    fn namespaces_are_separated_by_commas() {
        let scopes = check(&["--namespaces", "b,a,b,"]).unwrap().scopes;
        assert_eq!(
            scopes,
            [Scope::Namespace("a".into()), Scope::Namespace("b".into())]
        );
    }
}
