//! The flags that every binary has, to be flattened into its own.

use std::{
    fmt,
    net::{AddrParseError, SocketAddr},
    str::FromStr,
    time::Duration,
};

use thiserror::Error;

/// Flags about logs, health and stopping; use with `#[command(flatten)]`.
///
/// A binary whose default differs says so on its command, for example
/// `#[command(mut_arg("admin_address", |arg| arg.default_value("off")))]`.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
#[command(next_help_heading = "Operation")]
pub struct OpsArgs {
    /// Form of log lines on standard error.
    #[arg(long, env = "KRUNTIMES_LOG_FORMAT", value_enum, default_value = "json")]
    pub log_format: LogFormat,

    /// What to log: a level, or `target=level` pairs separated by commas.
    #[arg(long, env = "KRUNTIMES_LOG_FILTER", default_value = "info")]
    pub log_filter: String,

    /// Plain HTTP for /livez, /readyz and /metrics; `off` disables it.
    #[arg(
        long,
        env = "KRUNTIMES_ADMIN_ADDRESS",
        default_value = "0.0.0.0:9090",
        value_name = "ADDRESS|off"
    )]
    pub admin_address: AdminAddress,

    /// How long running work may take to finish after SIGTERM.
    #[arg(
        long,
        env = "KRUNTIMES_GRACE_PERIOD",
        default_value = "300s",
        value_parser = parse_duration,
        value_name = "DURATION"
    )]
    pub grace_period: Duration,
}

/// How a log line is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// One JSON object a line, for machines.
    Json,
    /// Text, for terminals.
    Plain,
}

/// Where the admin server listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminAddress {
    /// Nowhere.
    Off,
    /// On this address; port 0 takes any free one.
    On(SocketAddr),
}

// === impl AdminAddress ===

impl FromStr for AdminAddress {
    type Err = AdminAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.eq_ignore_ascii_case("off") {
            return Ok(Self::Off);
        }
        text.parse().map(Self::On).map_err(AdminAddressError)
    }
}

impl fmt::Display for AdminAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::On(address) => address.fmt(f),
        }
    }
}

/// Not an address for the admin server.
#[derive(Debug, Error)]
#[error("write IP:PORT, such as 0.0.0.0:9090 or [::]:9090, or `off` ({0})")]
pub struct AdminAddressError(#[source] AddrParseError);

/// Why a text is no duration.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DurationError {
    /// Nothing was given.
    #[error("is empty; write a number and a unit, such as 30s, 500ms, 5m or 1h30m")]
    Empty,
    /// A number without a unit.
    #[error("`{0}` lacks a unit; write {0}s, {0}ms, {0}m or {0}h")]
    NoUnit(String),
    /// A unit without a number, a sign, a fraction or a blank.
    #[error("`{0}` does not begin with a whole number; write for example 30s or 1h30m")]
    NoNumber(String),
    /// A unit that does not exist here.
    #[error("unit `{0}` is unknown; use ms, s, m or h")]
    UnknownUnit(String),
    /// Units repeat or grow from left to right.
    #[error("unit `{0}` repeats or comes after a smaller one; write for example 1h30m")]
    Order(String),
    /// More than can be counted in milliseconds.
    #[error("is longer than can be counted")]
    TooLong,
}

/// Reads `30s`, `500ms`, `5m` or `1h30m`: whole numbers, each with a unit, units falling.
///
/// `0s` is a duration; a flag for which zero is nonsense refuses it itself.
///
/// # Errors
/// Names the part that is wrong and what to write instead.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    if text.is_empty() {
        return Err(DurationError::Empty);
    }
    let mut total = 0_u64;
    let mut smallest = u64::MAX;
    let mut rest = text;
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        if digits == 0 {
            return Err(DurationError::NoNumber(rest.to_owned()));
        }
        let (number, tail) = rest.split_at(digits);
        let letters = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, next) = tail.split_at(letters);
        let scale = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "" => return Err(DurationError::NoUnit(number.to_owned())),
            other => return Err(DurationError::UnknownUnit(other.to_owned())),
        };
        if scale >= smallest {
            return Err(DurationError::Order(unit.to_owned()));
        }
        smallest = scale;
        let number: u64 = number.parse().map_err(|_| DurationError::TooLong)?;
        total = number
            .checked_mul(scale)
            .and_then(|part| total.checked_add(part))
            .ok_or(DurationError::TooLong)?;
        rest = next;
    }
    Ok(Duration::from_millis(total))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        ops: OpsArgs,
    }

    #[derive(Debug, Parser)]
    #[command(mut_arg("admin_address", |arg| arg.default_value("off")))]
    struct Quiet {
        #[command(flatten)]
        ops: OpsArgs,
    }

    #[test]
    fn durations_that_people_write() {
        for (text, milliseconds) in [
            ("30s", 30_000),
            ("500ms", 500),
            ("5m", 300_000),
            ("1h30m", 5_400_000),
            ("1m1s1ms", 61_001),
            ("0s", 0),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_millis(milliseconds)),
                "{text}"
            );
        }
    }

    #[test]
    fn a_wrong_duration_says_what_is_wrong() {
        for (text, needle) in [
            ("", "empty"),
            ("30", "write 30s"),
            ("s", "whole number"),
            ("-5s", "whole number"),
            ("1.5h", "unit `.`"),
            ("5 s", "unit ` s`"),
            ("5d", "unit `d`"),
            ("30m1h", "unit `h`"),
            ("1s1s", "unit `s` repeats"),
            ("99999999999999999999h", "longer"),
            ("18446744073709551615h", "longer"),
        ] {
            let error = parse_duration(text).expect_err(text).to_string();
            assert!(error.contains(needle), "{text}: {error}");
        }
    }

    #[test]
    fn defaults_are_those_of_the_manual() {
        let ops = Cli::parse_from(["x"]).ops;
        assert_eq!(ops.log_format, LogFormat::Json);
        assert_eq!(ops.log_filter, "info");
        assert_eq!(
            ops.admin_address,
            AdminAddress::On(SocketAddr::from(([0, 0, 0, 0], 9090)))
        );
        assert_eq!(ops.grace_period, Duration::from_secs(300));
        assert_eq!(Quiet::parse_from(["x"]).ops.admin_address, AdminAddress::Off);
    }

    #[test]
    fn a_wrong_flag_names_the_flag_and_the_remedy() {
        let error = Cli::try_parse_from(["x", "--grace-period", "30"])
            .expect_err("no unit")
            .to_string();
        assert!(
            error.contains("--grace-period") && error.contains("write 30s"),
            "{error}"
        );
        let error = Cli::try_parse_from(["x", "--admin-address", "localhost:1"])
            .expect_err("a name")
            .to_string();
        assert!(error.contains("`off`"), "{error}");
    }
}
