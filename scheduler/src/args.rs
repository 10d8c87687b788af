//! Flags of the scheduler; nonsense is refused before anything starts.

use clap::Parser;
use kruntimes_ops::args::OpsArgs;
use serde_json::Value;

/// Longest `--gateway-url`: with the longest invoke path it stays below what `endpoint.url` may hold.
const URL_MAX: usize = 1700;

/// Assigns Runs to Pods and keeps the pools of Runtimes.
#[derive(Debug, Clone, Parser)]
#[command(name = "kruntimes-scheduler", version)]
pub struct Args {
    #[command(flatten)]
    pub ops: OpsArgs,

    /// Namespace of the leader Lease, the gateway's certificates and the serving Secret.
    #[arg(long, env = "KRUNTIMES_SYSTEM_NAMESPACE", default_value = "kruntimes-system")]
    pub system_namespace: String,

    /// Who this process is in the leader Lease; give the Pod's name. A random one when absent.
    #[arg(long, env = "KRUNTIMES_IDENTITY")]
    pub identity: Option<String>,

    /// Public URL of the gateway, for `status.endpoint` of Runs.
    #[arg(
        long,
        env = "KRUNTIMES_GATEWAY_URL",
        default_value = "https://kruntimes-gateway.kruntimes-system.svc.cluster.local",
        value_parser = gateway_url
    )]
    pub gateway_url: String,

    /// Secret in the system namespace with the gateway's serving certificate.
    #[arg(
        long,
        env = "KRUNTIMES_SERVING_SECRET",
        default_value = "kruntimes-gateway-tls"
    )]
    pub serving_secret: String,

    /// Image of the runtimed container of every pool.
    #[arg(long, env = "KRUNTIMES_RUNTIMED_IMAGE")]
    pub runtimed_image: String,

    /// ClusterRole that pools' ServiceAccounts are bound to.
    #[arg(
        long,
        env = "KRUNTIMES_RUNTIMED_CLUSTER_ROLE",
        default_value = "kruntimes-runtimed"
    )]
    pub runtimed_cluster_role: String,

    /// Namespace from which gateways may reach runtimed.
    #[arg(long, env = "KRUNTIMES_GATEWAY_NAMESPACE", default_value = "kruntimes-system")]
    pub gateway_namespace: String,

    /// When the runtimed image is pulled.
    #[arg(
        long,
        env = "KRUNTIMES_IMAGE_PULL_POLICY",
        value_enum,
        default_value = "IfNotPresent"
    )]
    pub image_pull_policy: PullPolicy,

    /// Namespaces to serve, separated by commas; empty serves all.
    #[arg(long, env = "KRUNTIMES_NAMESPACES", value_delimiter = ',')]
    pub namespaces: Vec<String>,

    /// Egress rules of every pool's NetworkPolicy, a JSON list as in Kubernetes. Absent: egress is not
    /// restricted. A list must let runtimed reach the Kubernetes API and functions resolve names.
    #[arg(long, env = "KRUNTIMES_POOL_EGRESS", value_name = "JSON", value_parser = egress)]
    pub pool_egress: Option<Value>,

    /// One more argument for every runtimed; may be repeated.
    #[arg(
        long,
        env = "KRUNTIMES_RUNTIMED_EXTRA_ARG",
        allow_hyphen_values = true,
        value_name = "ARG"
    )]
    pub runtimed_extra_arg: Vec<String>,

    /// One of OpenTelemetry's variables for the Pods of every pool, such as
    /// OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317; may be repeated. A Runtime's template may have its own for
    /// the Runtime Server.
    #[arg(long, env = "KRUNTIMES_POOL_OTEL", value_name = "OTEL_NAME=VALUE", value_delimiter = ';', value_parser = otel)]
    pub pool_otel: Vec<(String, String)>,
}

/// The words of `imagePullPolicy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "PascalCase")]
pub enum PullPolicy {
    Always,
    IfNotPresent,
    Never,
}

// === impl PullPolicy ===

impl PullPolicy {
    /// As Kubernetes writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Always => "Always",
            Self::IfNotPresent => "IfNotPresent",
            Self::Never => "Never",
        }
    }
}

// === impl Args ===

impl Args {
    /// Namespaces without empty entries, sorted, each once; none means all.
    #[must_use]
    pub fn scopes(&self) -> Vec<String> {
        let mut scopes: Vec<_> = self
            .namespaces
            .iter()
            .map(|it| it.trim().to_owned())
            .filter(|it| !it.is_empty())
            .collect();
        scopes.sort_unstable();
        scopes.dedup();
        scopes
    }
}

/// Kubernetes judges the rules; that they are a list of objects is judged here, before anything starts.
fn egress(text: &str) -> Result<Value, String> {
    let rules: Value = serde_json::from_str(text).map_err(|error| format!("is no JSON: {error}"))?;
    let list = rules
        .as_array()
        .ok_or("must be a list of egress rules, for example [{\"to\":[{\"namespaceSelector\":{}}]}]")?;
    if let Some(at) = list.iter().position(|it| !it.is_object()) {
        return Err(format!("rule {at} is no object"));
    }
    Ok(rules)
}

fn otel(text: &str) -> Result<(String, String), &'static str> {
    let known = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    let (name, value) = text
        .split_once('=')
        .filter(|(name, _)| name.starts_with("OTEL_") && name.bytes().all(known))
        .ok_or("must be OTEL_NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

fn gateway_url(text: &str) -> Result<String, &'static str> {
    let url = text.trim_end_matches('/');
    let host = url
        .strip_prefix("https://")
        .ok_or("must begin with https://: tokens travel over it")?;
    if host.is_empty() || host.contains(['@', '?', '#']) || host.chars().any(char::is_whitespace) {
        return Err("must be https://HOST[:PORT][/PREFIX] without user information, query or blanks");
    }
    if url.len() > URL_MAX {
        return Err("is too long; at most 1700 characters leave room for the invoke path");
    }
    Ok(url.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Args, clap::Error> {
        Args::try_parse_from([&["x", "--runtimed-image", "kruntimes/runtimed:dev"], args].concat())
    }

    #[test]
    fn defaults_are_those_of_the_manual() {
        let args = parse(&[]).unwrap();
        assert_eq!(args.system_namespace, "kruntimes-system");
        assert_eq!(args.serving_secret, "kruntimes-gateway-tls");
        assert_eq!(args.runtimed_cluster_role, "kruntimes-runtimed");
        assert_eq!(args.image_pull_policy.as_str(), "IfNotPresent");
        assert!(args.scopes().is_empty(), "all namespaces");
    }

    #[test]
    fn lists_and_repeated_flags() {
        let args = parse(&[
            "--namespaces=b,a,,a",
            "--runtimed-extra-arg=--log-filter=debug",
            "--runtimed-extra-arg",
            "--caller-credential=omit",
        ])
        .unwrap();
        assert_eq!(args.scopes(), ["a", "b"]);
        assert_eq!(
            args.runtimed_extra_arg,
            ["--log-filter=debug", "--caller-credential=omit"]
        );
    }

    #[test]
    fn only_variables_of_opentelemetry_go_into_pools() {
        let args = parse(&["--pool-otel=OTEL_A=x=y", "--pool-otel", "OTEL_B="]).unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(args.pool_otel, [pair("OTEL_A", "x=y"), pair("OTEL_B", "")]);
        for bad in ["OTEL_A", "KRUNTIMES_SERVER=x", "OTEL_a=b", "=x"] {
            let refusal = parse(&["--pool-otel", bad]).unwrap_err().to_string();
            assert!(
                refusal.contains("--pool-otel") && refusal.contains("OTEL_NAME=VALUE"),
                "{refusal}"
            );
        }
    }

    #[test]
    fn egress_rules_are_a_json_list() {
        assert_eq!(parse(&[]).unwrap().pool_egress, None);
        let rules = parse(&["--pool-egress", "[{\"ports\":[{\"port\":53}]}]"]).unwrap();
        assert_eq!(rules.pool_egress.unwrap()[0]["ports"][0]["port"], 53);
        for bad in ["no", "{}", "[1]"] {
            let refusal = parse(&["--pool-egress", bad]).unwrap_err().to_string();
            assert!(refusal.contains("--pool-egress"), "{bad}: {refusal}");
        }
    }

    #[test]
    fn the_url_is_https_and_has_no_trailing_slash() {
        assert_eq!(
            parse(&["--gateway-url=https://gw.example:8443/"])
                .unwrap()
                .gateway_url,
            "https://gw.example:8443"
        );
        for bad in [
            "http://gw",
            "https://",
            "https://u@gw",
            "https://gw?x",
            "https://g w",
        ] {
            let refusal = parse(&["--gateway-url", bad]).unwrap_err().to_string();
            assert!(refusal.contains("--gateway-url"), "{bad}: {refusal}");
        }
    }
}
