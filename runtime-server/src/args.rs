//! The command line, and the `SERVER_*` names that a Runtime may set.

use std::{path::PathBuf, time::Duration};

use clap::{Parser, Subcommand, ValueEnum};
use kruntimes_ops::{
    args::{OpsArgs, parse_duration},
    threads,
};
use kruntimes_proto::limits;

use crate::{adapter::Language, listen::ListenAddress, worker::exec::ExecArgs};

/// Runs the functions of one Pod behind executor.v1.FunctionRuntime.
#[derive(Debug, Parser)]
#[command(
    name = "kruntimes-runtime-server",
    version,
    args_conflicts_with_subcommands = true
)]
#[command(mut_arg("admin_address", |arg| arg.default_value("off")))]
pub struct Args {
    /// Another role of this binary.
    #[command(subcommand)]
    pub role: Option<Role>,

    /// The server's own flags.
    #[command(flatten)]
    pub server: ServerArgs,
}

/// Other roles of this binary.
#[derive(Debug, Subcommand)]
pub enum Role {
    /// Becomes a worker; the server starts this.
    #[command(hide = true)]
    WorkerExec(ExecArgs),
}

/// Flags of the server.
#[derive(Debug, Clone, clap::Args)]
pub struct ServerArgs {
    /// Logs, health, stopping.
    #[command(flatten)]
    pub ops: OpsArgs,

    /// The language of the functions.
    #[arg(long, env = "KRUNTIMES_ADAPTER", value_enum, default_value = "python")]
    pub adapter: Language,

    /// Where runtimed connects: unix:///path or tcp://ADDRESS:PORT.
    #[arg(
        long,
        env = "KRUNTIMES_LISTEN",
        default_value = "unix:///run/kruntimes/runtime.sock",
        value_name = "URL"
    )]
    pub listen: ListenAddress,

    /// Working directories of functions lie beneath this one.
    #[arg(
        long,
        env = "KRUNTIMES_WORKSPACE",
        default_value = "/workspace",
        value_name = "PATH"
    )]
    pub workspace: PathBuf,

    /// Whether to turn away processes of the server's own PID namespace, where the
    /// functions run. Only for the Unix socket.
    #[arg(long, env = "KRUNTIMES_PEER_CHECK", value_enum, default_value = "on")]
    pub peer_check: Switch,

    /// The Python interpreter: a path, or a name to look up in PATH.
    #[arg(
        long,
        env = "KRUNTIMES_PYTHON",
        default_value = "python3",
        value_name = "PATH"
    )]
    pub python: PathBuf,

    /// The Bash interpreter: a path, or a name to look up in PATH.
    #[arg(long, env = "KRUNTIMES_BASH", default_value = "bash", value_name = "PATH")]
    pub bash: PathBuf,

    /// Threads that serve, apart from the functions' own processes. One costs least per call.
    #[arg(long, env = "KRUNTIMES_THREADS", default_value_t = 1, value_parser = threads::parse)]
    pub threads: usize,

    /// Where private files of the server and its functions go; created below the
    /// system's temporary directory when not given.
    #[arg(long, env = "KRUNTIMES_STATE_DIR", value_name = "PATH")]
    pub state_dir: Option<PathBuf>,

    /// Isolation of functions: the best that works here, or a fixed level.
    #[arg(long, env = "KRUNTIMES_ISOLATION", value_enum, default_value = "auto")]
    pub isolation: Isolation,

    /// Paths that functions must not reach although the image shows them; repeatable.
    #[arg(long, env = "KRUNTIMES_HIDE", value_delimiter = ',', value_name = "PATH")]
    pub hide: Vec<PathBuf>,

    /// How long a function may take to be loaded.
    #[arg(long, env = "KRUNTIMES_START_TIMEOUT", default_value = "30s", value_parser = parse_duration, value_name = "DURATION")]
    pub start_timeout: Duration,

    /// How long RegisterFunction waits for the function to be loaded before it
    /// answers REGISTERING.
    #[arg(long, env = "KRUNTIMES_REGISTER_WAIT", default_value = "10s", value_parser = parse_duration, value_name = "DURATION")]
    pub register_wait: Duration,

    /// Longest call, seconds, whatever its caller asks for; more than 300 means 300.
    #[arg(long, env = "SERVER_CALL_TIMEOUT", default_value = "180", value_parser = parse_seconds, value_name = "SECONDS")]
    pub call_timeout: Duration,

    /// What happens to a call whose caller is gone.
    #[arg(
        long,
        env = "SERVER_ON_CALLER_GONE",
        value_enum,
        ignore_case = true,
        default_value = "cancel"
    )]
    pub on_caller_gone: OnCallerGone,

    /// Whether callers see type and message of what a function raised.
    #[arg(long, env = "SERVER_EXPOSE_ERRORS", action = clap::ArgAction::Set, default_value_t = false, value_name = "true|false")]
    pub expose_errors: bool,
}

/// A number above 0, with a fraction if need be; at most what the protocol allows.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.trim().parse::<f64>().ok().filter(|seconds| *seconds > 0.0);
    seconds
        .map(|seconds| seconds.min(limits::MAX_TIMEOUT.as_secs_f64()))
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|timeout| *timeout >= Duration::from_millis(1))
        .ok_or_else(|| format!("SERVER_CALL_TIMEOUT takes seconds above 0, such as 180 or 0.5, not `{text}`"))
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Do it.
    On,
    /// Do not.
    Off,
}

/// What happens to a call whose caller is gone (C-3.8).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnCallerGone {
    /// The call is ended.
    Cancel,
    /// The call ends by itself, at its deadline at the latest.
    Finish,
}

/// How much functions are kept apart (C-8.7).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Isolation {
    /// The highest level that works here.
    Auto,
    /// Own session, limits, no new privileges.
    #[value(name = "0")]
    Zero,
    /// Landlock and seccomp as well; the server does not start where they fail.
    #[value(name = "1")]
    One,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Args::command().debug_assert();
    }

    /// C-8.4: `SERVER_CALL_TIMEOUT` is 180 s where nobody sets it, and nonsense is refused.
    #[test]
    fn the_longest_call_is_a_number_of_seconds() {
        let default = Args::parse_from(["server"]).server.call_timeout;
        assert_eq!(default, Duration::from_secs(180));
        for (text, millis) in [("0.5", 500), ("9", 9000), ("300", 300_000), ("1e9", 300_000)] {
            assert_eq!(parse_seconds(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for bad in ["", "0", "-1", "NaN", "-inf", "soon", "0.0000001"] {
            assert!(parse_seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_trampoline_is_a_role_of_its_own() {
        let line = [
            "server",
            "worker-exec",
            "--parent",
            "1",
            "--level",
            "1",
            "--write",
            "/w",
            "--",
            "python",
            "-c",
            "x",
        ];
        assert!(matches!(Args::parse_from(line).role, Some(Role::WorkerExec(_))));
        assert!(Args::parse_from(["server"]).role.is_none());
    }
}
