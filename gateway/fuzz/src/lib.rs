//! What strangers send, in any order of bytes: each function takes some and panics when the gateway breaks a promise.

mod front;
mod hop;
mod stream;

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use kruntimes_api::invoke_path;
use kruntimes_authz::Bearer;
use kruntimes_gateway::{
    error::InvokeError,
    reply::{self, Timing},
    request::{self, Head, Request, Timeouts},
};

pub use front::{front_h1, front_h2};
pub use hop::hop;

/// How long calls may take in all targets.
const TIMEOUTS: Timeouts = Timeouts {
    default: Duration::from_secs(30),
    max: Duration::from_secs(300),
};

/// A path that names a route is one that [`invoke_path::build`] would write (C-3).
pub fn path(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(target) = invoke_path::parse(text) else {
        return;
    };
    let built = invoke_path::build(target.namespace, target.runtime, target.uid);
    let built = built.trim_end_matches(":invoke");
    let same = text == built
        || text
            .strip_prefix(built)
            .is_some_and(|rest| rest.starts_with([':', '/']));
    // Not the first one of the text: a namespace may have that name.
    let (before, uid) = built.rsplit_once("/functions/").expect("a path of a function");
    let older = format!("{before}/runs/{uid}");
    assert!(same || text.starts_with(&older), "{text:?} is read as {built:?}");
    for label in [target.namespace, target.runtime] {
        assert!(!label.is_empty() && label.len() <= 63, "{label:?}");
    }
}

/// A token goes on as it came, and is never shown (C-3.6).
pub fn token(data: &[u8]) {
    let Ok(bearer) = Bearer::parse([data]) else { return };
    let forwarded = bearer.header().as_bytes();
    assert!(bearer.header().is_sensitive());
    assert_eq!(&forwarded[..7], b"Bearer ");
    assert_eq!(&forwarded[7..], &data[7..]);
    let again = Bearer::parse([forwarded]).expect("what is forwarded is well-formed");
    assert_eq!(again.header(), bearer.header());
    let _ = bearer.kind();
    let token = std::str::from_utf8(&forwarded[7..]).expect("a token is ASCII");
    assert!(token.len() < 8 || !format!("{bearer:?}").contains(token));
}

/// Lines of a head: method and target first, then headers. Whatever comes is a request with checked parts, or an error
/// with a status of the contract (C-3.2, C-3.5).
pub fn head(data: &[u8]) {
    let mut lines = data.split(|byte| *byte == b'\n');
    let first = lines.next().unwrap_or_default();
    let (method, target) = match first.iter().position(|byte| *byte == b' ') {
        Some(at) => (&first[..at], &first[at + 1..]),
        None => (&b"POST"[..], first),
    };
    let Ok(method) = Method::from_bytes(method) else {
        return;
    };
    let mut headers = HeaderMap::new();
    for line in lines {
        let Some(at) = line.iter().position(|byte| *byte == b':') else {
            continue;
        };
        let name = HeaderName::from_bytes(&line[..at]);
        let value = HeaderValue::from_bytes(line[at + 1..].trim_ascii());
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
    let head = Head {
        method: &method,
        target,
        headers: &headers,
        raw: Some(data),
        no_body: data.len() % 2 == 0,
    };
    match request::parse(&head, TIMEOUTS) {
        Ok(Request::Invoke(call)) => {
            assert!(!call.timeout.is_zero() && call.timeout <= TIMEOUTS.max);
            assert_eq!(method, Method::POST);
        }
        Ok(Request::Explain(_)) => assert_eq!(method, Method::GET),
        Ok(Request::Cancel(..)) => assert_eq!(method, Method::DELETE),
        Err(error) => refused(&error, &headers),
    }
}

fn refused(error: &InvokeError, headers: &HeaderMap) {
    let row = error.row();
    assert!((400..500).contains(&row.status), "{error}: {}", row.status);
    let id = request::id_for_answer(headers);
    let reply = reply::problem(error, &id, Timing::default());
    let problem: serde_json::Value = serde_json::from_slice(&reply.body).expect("a problem is JSON");
    assert_eq!(problem["status"], row.status);
    assert_eq!(problem["dispatched"], "no");
}
