//! The invoke URL (C-3): built for `status.endpoint`, parsed at the gateway; each
//! is the inverse of the other.
//!
//! Parsing works on the raw path. Nothing is decoded: a `%`, an empty or dot
//! segment, a trailing slash or another case names no route.

use crate::keys::RunUid;

/// What an invoke path names. Namespace and runtime are checked DNS labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target<'a> {
    /// Namespace of the Run.
    pub namespace: &'a str,
    /// Name of the Runtime the caller believes the Run to be in.
    pub runtime: &'a str,
    /// UID of the Run.
    pub uid: RunUid,
}

/// The path names no route (404 `NoSuchRoute`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no such route; expected /v1/namespaces/NAMESPACE/runtimes/RUNTIME/functions/UID:invoke")]
pub struct NoSuchRoute;

/// The path by which `target` is called.
#[must_use]
pub fn build(namespace: &str, runtime: &str, uid: RunUid) -> String {
    format!("/v1/namespaces/{namespace}/runtimes/{runtime}/functions/{uid}:invoke")
}

/// Reads a path (without query). `/functions/` and `/runs/` are the same route.
pub fn parse(path: &str) -> Result<Target<'_>, NoSuchRoute> {
    let mut segments = path.strip_prefix('/').ok_or(NoSuchRoute)?.split('/');
    let mut next = || segments.next().ok_or(NoSuchRoute);
    let literal = |segment: &str, expected: &str| {
        if segment == expected {
            Ok(())
        } else {
            Err(NoSuchRoute)
        }
    };
    literal(next()?, "v1")?;
    literal(next()?, "namespaces")?;
    let namespace = dns_label(next()?, 63)?;
    literal(next()?, "runtimes")?;
    let runtime = dns_label(next()?, 50)?;
    if !matches!(next()?, "functions" | "runs") {
        return Err(NoSuchRoute);
    }
    let uid = next()?
        .strip_suffix(":invoke")
        .ok_or(NoSuchRoute)?
        .parse()
        .map_err(|_| NoSuchRoute)?;
    if segments.next().is_some() {
        return Err(NoSuchRoute);
    }
    Ok(Target {
        namespace,
        runtime,
        uid,
    })
}

/// RFC 1123 label: lower-case letters, digits and inner hyphens.
fn dns_label(segment: &str, max: usize) -> Result<&str, NoSuchRoute> {
    let bytes = segment.as_bytes();
    let inner = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
    let edge = |byte: Option<&u8>| byte.is_some_and(|byte| *byte != b'-');
    let ok = bytes.len() <= max && edge(bytes.first()) && edge(bytes.last()) && bytes.iter().all(inner);
    if ok { Ok(segment) } else { Err(NoSuchRoute) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UID: &str = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";

    #[test]
    fn functions_and_runs_are_the_same_route() {
        let functions = format!("/v1/namespaces/demo/runtimes/python/functions/{UID}:invoke");
        let runs = format!("/v1/namespaces/demo/runtimes/python/runs/{UID}:invoke");
        assert_eq!(parse(&functions), parse(&runs));
        assert_eq!(parse(&functions).unwrap().runtime, "python");
    }

    #[test]
    fn nothing_else_is_a_route() {
        let good = format!("/v1/namespaces/demo/runtimes/python/functions/{UID}:invoke");
        for bad in [
            good.replace(":invoke", ":invoke/"),
            good.replace(":invoke", "%3Ainvoke"),
            good.replace(":invoke", ":Invoke"),
            good.replace(":invoke", ""),
            good.replace(":invoke", ":invoke:invoke"),
            good.replace("/v1/", "//v1/"),
            good.replace("/v1/", "/v1/./"),
            good.replace("/v1/", "/v1/../v1/"),
            good.replace("/v1/", "/v1/%2e%2e/v1/"),
            good.replace("/v1/", "/v2/"),
            good.replace("/v1/", "/V1/"),
            good.replace("demo", ""),
            good.replace("demo", "Demo"),
            good.replace("demo", "-demo"),
            good.replace("python", &"p".repeat(51)),
            good.replace(UID, &UID.to_uppercase()),
            good.replace("functions", "function"),
            good.trim_start_matches('/').to_owned(),
            "/".to_owned(),
            String::new(),
        ] {
            assert_eq!(parse(&bad), Err(NoSuchRoute), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn parse_is_the_inverse_of_build(
            namespace in "[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
            runtime in "[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?",
            uid in "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
        ) {
            let uid: RunUid = uid.parse().unwrap();
            let path = build(&namespace, &runtime, uid);
            prop_assert_eq!(parse(&path), Ok(Target { namespace: &namespace, runtime: &runtime, uid }));
        }

        #[test]
        fn parsing_never_panics(path in "\\PC*") {
            let _ = parse(&path);
        }
    }
}
