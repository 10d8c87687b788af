//! The invoke URL (C-3): built for `status.endpoint`, parsed at the gateway; each
//! is the inverse of the other. Beside it two routes of the same function: to explain
//! whether it can be called (C-3.11), and to cancel a call (C-3.10).
//!
//! Parsing works on the raw path. Nothing is decoded: a `%`, an empty or dot
//! segment, a trailing slash or another case names no route.

use crate::keys::RunUid;

/// What a path names. Namespace and runtime are checked DNS labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target<'a> {
    /// Namespace of the Run.
    pub namespace: &'a str,
    /// Name of the Runtime the caller believes the Run to be in.
    pub runtime: &'a str,
    /// UID of the Run.
    pub uid: RunUid,
    /// What is to be done with it.
    pub action: Action<'a>,
}

/// What a path asks for; each has one method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action<'a> {
    /// `POST …/functions/UID:invoke`
    Invoke,
    /// `GET …/functions/UID` (C-3.11)
    Explain,
    /// `DELETE …/functions/UID/invocations/ID` (C-3.10); the id as it stands in the path, not empty.
    Cancel(&'a str),
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
///
/// # Errors
/// When it names none of the three routes.
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
    let last = next()?;
    let (uid, action) = match (last.strip_suffix(":invoke"), segments.next()) {
        (Some(uid), None) => (uid, Action::Invoke),
        (None, None) => (last, Action::Explain),
        (None, Some("invocations")) => (last, Action::Cancel(plain(segments.next())?)),
        _ => return Err(NoSuchRoute),
    };
    let uid = uid.parse().map_err(|_| NoSuchRoute)?;
    if segments.next().is_some() {
        return Err(NoSuchRoute);
    }
    Ok(Target {
        namespace,
        runtime,
        uid,
        action,
    })
}

/// A segment that means what it says: not empty, no dot segment, nothing escaped.
fn plain(segment: Option<&str>) -> Result<&str, NoSuchRoute> {
    segment
        .filter(|text| !matches!(*text, "" | "." | "..") && !text.contains('%'))
        .ok_or(NoSuchRoute)
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

    /// C-3.10, C-3.11.
    #[test]
    fn a_function_is_explained_and_its_calls_are_cancelled() {
        let function = format!("/v1/namespaces/demo/runtimes/python/functions/{UID}");
        fn action(path: &str) -> Result<Action<'_>, NoSuchRoute> {
            parse(path).map(|target| target.action)
        }
        assert_eq!(action(&function), Ok(Action::Explain));
        assert_eq!(
            action(&format!("{function}/invocations/inv_1:x\"<")),
            Ok(Action::Cancel("inv_1:x\"<"))
        );
        let runs = function.replace("functions", "runs");
        assert_eq!(parse(&runs), parse(&function));
    }

    /// C-3.5: 404 `NoSuchRoute`.
    #[test]
    fn nothing_else_is_a_route() {
        let good = format!("/v1/namespaces/demo/runtimes/python/functions/{UID}:invoke");
        for bad in [
            good.replace(":invoke", ":invoke/"),
            good.replace(":invoke", "%3Ainvoke"),
            good.replace(":invoke", ":Invoke"),
            good.replace(":invoke", "/"),
            good.replace(":invoke", ":invoke/invocations/a"),
            good.replace(":invoke", "/invocations"),
            good.replace(":invoke", "/invocations/"),
            good.replace(":invoke", "/invocations/."),
            good.replace(":invoke", "/invocations/.."),
            good.replace(":invoke", "/invocations/a%20b"),
            good.replace(":invoke", "/invocations/a/"),
            good.replace(":invoke", "/Invocations/a"),
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
            let action = Action::Invoke;
            prop_assert_eq!(parse(&path), Ok(Target { namespace: &namespace, runtime: &runtime, uid, action }));
        }

        #[test]
        fn parsing_never_panics(path in "\\PC*") {
            let _ = parse(&path);
        }
    }
}
