//! The four lines that say how a server is set up, on standard output (C-8.5).
//!
//! Three are printed when the server starts, the one about sources whenever a function
//! is registered: one server runs many functions.

use std::{io::Write as _, path::Path};

use kruntimes_proto::limits;

/// Longest value shown, bytes.
const VALUE_BYTES: usize = 1024;

/// Where a function's code comes from.
#[must_use]
pub fn importing(file: &Path, function: &str) -> String {
    format!(
        "Importing function sources from {}:{}",
        shown(&file.display().to_string()),
        shown(function)
    )
}

/// Where spans go.
#[must_use]
pub fn tracing(endpoint: Option<&str>) -> String {
    format!("Tracing configured with endpoint {}", address(endpoint))
}

/// Where events go.
#[must_use]
pub fn publisher(proxy: Option<&str>) -> String {
    format!("Publisher Proxy available on address {}", address(proxy))
}

/// Which language listens where.
#[must_use]
pub fn starting(runtime: &str, address: &str) -> String {
    format!("Starting {} server {}", shown(runtime), shown(address))
}

/// Prints one. Nobody may read it, which is no reason to stop.
pub fn print(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

fn address(given: Option<&str>) -> String {
    match given {
        Some(url) => shown(&without_user(url)),
        None => "(not set)".to_owned(),
    }
}

/// A URL may carry a password, which is nobody's business in a log.
fn without_user(url: &str) -> String {
    let (scheme, rest) = url
        .split_once("://")
        .map_or(("", url), |(scheme, rest)| (scheme, rest));
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let separator = if scheme.is_empty() { "" } else { "://" };
    format!("{scheme}{separator}{host}{path}")
}

/// One line, whatever the value holds.
fn shown(value: &str) -> String {
    let one_line: String = value
        .chars()
        .map(|letter| if letter.is_control() { '\u{fffd}' } else { letter })
        .collect();
    limits::clip(&one_line, VALUE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C-8.5: the form is fixed, so that people can search for it.
    #[test]
    fn the_four_lines_have_the_agreed_form() {
        assert_eq!(
            importing(Path::new("/workspace/u/main.py"), "handler"),
            "Importing function sources from /workspace/u/main.py:handler"
        );
        assert_eq!(
            tracing(Some("http://collector:4318/v1/traces")),
            "Tracing configured with endpoint http://collector:4318/v1/traces"
        );
        assert_eq!(tracing(None), "Tracing configured with endpoint (not set)");
        assert_eq!(
            publisher(Some("http://proxy/publish")),
            "Publisher Proxy available on address http://proxy/publish"
        );
        assert_eq!(
            starting("python314", "127.0.0.1:8080"),
            "Starting python314 server 127.0.0.1:8080"
        );
    }

    #[test]
    fn a_value_neither_breaks_the_line_nor_shows_a_password() {
        assert_eq!(
            tracing(Some("http://me:secret@host/path@x")),
            "Tracing configured with endpoint http://host/path@x"
        );
        assert!(!publisher(Some("me:secret@host")).contains("secret"));
        let long = "x\n".repeat(10_000);
        let line = starting(&long, "a");
        assert!(!line.contains('\n') && line.len() < 1200);
    }
}
