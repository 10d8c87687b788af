//! The functions that exist, made from their numbers, and the token that may call them.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use serde_json::json;

/// Where all of them are.
pub(crate) const NAMESPACE: &str = "bench";
/// What all of them run on.
pub(crate) const RUNTIME: &str = "python";

/// How many of them are called.
const CALLED: usize = 16;

/// The UID of the Run with this number.
pub(crate) fn uid(number: usize) -> String {
    format!("5f0c2a1e-7b3d-4c68-9e21-{number:012x}")
}

/// Paths of the functions that are called, spread over all of them.
pub(crate) fn called(routes: usize) -> Vec<String> {
    let step = (routes / CALLED).max(1);
    (0..routes)
        .step_by(step)
        .take(CALLED)
        .map(|number| {
            let uid = uid(number);
            format!("/v1/namespaces/{NAMESPACE}/runtimes/{RUNTIME}/functions/{uid}:invoke")
        })
        .collect()
}

/// A token of the size and form that Kubernetes gives to Pods. Nobody checks its signature.
pub(crate) fn token() -> String {
    let header = json!({ "alg": "RS256", "kid": "4f1Jd0ZkQ7cQxYh2m9v3bWqTtRrA5sUeLnKpGiXoCyE" });
    let claims = json!({
        "aud": ["https://kubernetes.default.svc.cluster.local"],
        // The first second of 2100.
        "exp": 4_102_444_800_u64, "iat": 1_767_225_600, "nbf": 1_767_225_600,
        "iss": "https://kubernetes.default.svc.cluster.local",
        "jti": "a3c1b1de-1f0b-4a57-8d2b-6f3f5a0d9c11",
        "kubernetes.io": {
            "namespace": NAMESPACE,
            "serviceaccount": { "name": "caller", "uid": "0d7b9a52-55d0-4b7e-8a39-0c9be1f4d7aa" },
        },
        "sub": format!("system:serviceaccount:{NAMESPACE}:caller"),
    });
    let part = |text: &[u8]| URL_SAFE_NO_PAD.encode(text);
    format!(
        "{}.{}.{}",
        part(header.to_string().as_bytes()),
        part(claims.to_string().as_bytes()),
        part(&[0x5a; 256])
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn called_functions_exist_and_differ() {
        for routes in [1, 10, 16, 17, 10_000] {
            let mut paths = called(routes);
            assert_eq!(paths.len(), routes.min(CALLED), "of {routes}");
            paths.dedup();
            assert_eq!(paths.len(), routes.min(CALLED), "of {routes}");
        }
    }

    #[test]
    fn the_token_is_as_long_as_real_ones() {
        assert!((700..1200).contains(&token().len()), "{}", token().len());
    }
}
