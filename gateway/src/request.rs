//! The only parser of what callers send: a head becomes an [`Invocation`] or an [`InvokeError`].
//!
//! Pure and in one order (C-3.5): framing, path, method, invocation id, timeout, authorization, content
//! type, content encoding, declared length. Nothing later looks at raw input again.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use kruntimes_api::{invoke_path, keys::RunUid};
use kruntimes_authz::{Bearer, TokenError};
use kruntimes_proto::{ids::InvocationId, limits};

use crate::error::InvokeError;

mod framing;

/// Carries the invocation id, both ways.
pub const INVOCATION_ID: HeaderName = HeaderName::from_static("x-kruntime-invocation-id");
/// Carries the caller's deadline, milliseconds.
pub const TIMEOUT_MILLIS: HeaderName = HeaderName::from_static("x-kruntime-timeout-millis");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The media type that asks for an envelope (C-3.1).
pub const ENVELOPE: &str = "application/vnd.kruntimes.invocation+json";

/// Longest head of a request over HTTP/1.1, bytes; HTTP/2 has the same limit for its header list.
pub const HEAD_BYTES: usize = 64 * 1024;

/// A request without its body, as the front received it.
#[derive(Debug, Clone, Copy)]
pub struct Head<'a> {
    /// Method.
    pub method: &'a Method,
    /// Path and query, as sent.
    pub target: &'a [u8],
    /// Headers; over HTTP/1.1 the server may have dropped a Content-Length from them.
    pub headers: &'a HeaderMap<HeaderValue>,
    /// The bytes of the head over HTTP/1.1, where framing is text.
    pub raw: Option<&'a [u8]>,
    /// Whether it is certain that no body follows.
    pub no_body: bool,
}

/// How long calls may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// Of a call that names none.
    pub default: Duration,
    /// Of any call; longer wishes are clamped.
    pub max: Duration,
}

/// A request that was read whole, apart from its body.
#[derive(Debug, Clone)]
pub struct Invocation {
    /// Namespace in the path.
    pub namespace: String,
    /// Runtime in the path.
    pub runtime: String,
    /// UID in the path.
    pub uid: RunUid,
    /// The caller's id, or a new one.
    pub id: InvocationId,
    /// How long the call may take.
    pub timeout: Duration,
    /// The caller's token.
    pub bearer: Bearer,
    /// Whether the answer shall be an envelope.
    pub envelope: bool,
    /// Whether the caller waits for `100 Continue` before it sends the body.
    pub expects_continue: bool,
    /// W3C trace context, passed through.
    pub traceparent: Option<HeaderValue>,
    /// W3C trace state, passed through.
    pub tracestate: Option<HeaderValue>,
}

/// The id under which a request is answered, whatever is wrong with it: the caller's, when valid.
#[must_use]
pub fn id_for_answer(headers: &HeaderMap<HeaderValue>) -> InvocationId {
    invocation_id(headers).unwrap_or_else(|_| InvocationId::generate())
}

/// Reads a head.
///
/// # Errors
/// The first thing that is wrong with it, in the order of the contract.
pub fn parse(head: &Head<'_>, timeouts: Timeouts) -> Result<Invocation, InvokeError> {
    if let Some(raw) = head.raw {
        framing::check(raw)?;
    }
    let path = head.target.split(|byte| *byte == b'?').next().unwrap_or_default();
    let path = std::str::from_utf8(path).map_err(|_| InvokeError::NoSuchRoute)?;
    let target = invoke_path::parse(path).map_err(|_| InvokeError::NoSuchRoute)?;
    if head.method != Method::POST {
        return Err(InvokeError::MethodNotAllowed);
    }
    let id = invocation_id(head.headers)?;
    let timeout = timeout(head.headers, timeouts)?;
    let bearer =
        Bearer::from_headers(head.headers).map_err(|error| InvokeError::NoBearer(token_error(error)))?;
    content_type(head)?;
    if head.headers.contains_key(header::CONTENT_ENCODING) {
        return Err(InvokeError::UnsupportedContentEncoding);
    }
    if declared_length(head.headers)? > limits::INPUT_BYTES as u64 {
        return Err(InvokeError::PayloadTooLarge(limits::INPUT_BYTES));
    }
    Ok(Invocation {
        namespace: target.namespace.to_owned(),
        runtime: target.runtime.to_owned(),
        uid: target.uid,
        id,
        timeout,
        bearer,
        envelope: accepts_envelope(head.headers),
        expects_continue: expects_continue(head.headers),
        traceparent: one(head.headers, &TRACEPARENT, 128),
        tracestate: one(head.headers, &TRACESTATE, 512),
    })
}

/// Whether the caller waits for `100 Continue`.
#[must_use]
pub fn expects_continue(headers: &HeaderMap<HeaderValue>) -> bool {
    headers
        .get(header::EXPECT)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

fn invocation_id(headers: &HeaderMap<HeaderValue>) -> Result<InvocationId, InvokeError> {
    let mut values = headers.get_all(INVOCATION_ID).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(InvocationId::generate()),
        (Some(value), None) => {
            InvocationId::parse(value.as_bytes()).map_err(InvokeError::InvalidInvocationId)
        }
        (Some(_), Some(_)) => Err(InvokeError::RepeatedInvocationId),
    }
}

fn timeout(headers: &HeaderMap<HeaderValue>, timeouts: Timeouts) -> Result<Duration, InvokeError> {
    let mut values = headers.get_all(TIMEOUT_MILLIS).iter();
    let value = match (values.next(), values.next()) {
        (None, _) => return Ok(timeouts.default.min(timeouts.max)),
        (Some(value), None) => value.as_bytes(),
        (Some(_), Some(_)) => return Err(InvokeError::InvalidTimeout),
    };
    if value.is_empty() || !value.iter().all(u8::is_ascii_digit) {
        return Err(InvokeError::InvalidTimeout);
    }
    // More digits than fit are more than the maximum.
    let millis = value
        .iter()
        .try_fold(0_u64, |sum, digit| {
            sum.checked_mul(10)?.checked_add(u64::from(digit - b'0'))
        })
        .unwrap_or(u64::MAX);
    match millis {
        0 => Ok(timeouts.default.min(timeouts.max)),
        millis => Ok(Duration::from_millis(millis).min(timeouts.max)),
    }
}

/// The words for the caller; the remedy is added by [`InvokeError`].
fn token_error(error: TokenError) -> &'static str {
    match error {
        TokenError::Absent => "the Authorization header is absent",
        TokenError::Twice => "there is more than one Authorization header",
        TokenError::NotBearer => "the Authorization scheme is not Bearer",
        TokenError::Empty => "the bearer token is empty",
        TokenError::Malformed => "the bearer token contains a character that tokens do not have",
        TokenError::TooLong => "the bearer token is too long",
    }
}

fn content_type(head: &Head<'_>) -> Result<(), InvokeError> {
    let mut values = head.headers.get_all(header::CONTENT_TYPE).iter();
    let value = match (values.next(), values.next()) {
        // Nothing has no type.
        (None, _) if head.no_body => return Ok(()),
        (Some(value), None) => value.to_str().map_err(|_| InvokeError::UnsupportedMediaType)?,
        _ => return Err(InvokeError::UnsupportedMediaType),
    };
    let mut parts = value.split(';').map(str::trim);
    let json = parts
        .next()
        .is_some_and(|kind| kind.eq_ignore_ascii_case("application/json"));
    let utf8 = parts.all(|parameter| match parameter.split_once('=') {
        Some((name, charset)) if name.trim().eq_ignore_ascii_case("charset") => {
            charset.trim().trim_matches('"').eq_ignore_ascii_case("utf-8")
        }
        _ => true,
    });
    if json && utf8 {
        Ok(())
    } else {
        Err(InvokeError::UnsupportedMediaType)
    }
}

/// 0 when none is declared. Over HTTP/1.1 the value was checked with the framing.
fn declared_length(headers: &HeaderMap<HeaderValue>) -> Result<u64, InvokeError> {
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let Some(value) = lengths.next() else { return Ok(0) };
    let length = value
        .to_str()
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    match (length.map(str::parse), lengths.next()) {
        (Some(Ok(length)), None) => Ok(length),
        _ => Err(InvokeError::BadRequest(
            "Content-Length must be there once, in digits only",
        )),
    }
}

fn accepts_envelope(headers: &HeaderMap<HeaderValue>) -> bool {
    headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|range| range.split(';').next())
        .any(|kind| kind.trim().eq_ignore_ascii_case(ENVELOPE))
}

/// A header that is passed through if it is there once, visible and not too long; else it is dropped.
fn one(headers: &HeaderMap<HeaderValue>, name: &HeaderName, max: usize) -> Option<HeaderValue> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    let fine = values.next().is_none() && value.len() <= max && value.to_str().is_ok();
    fine.then(|| value.clone())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UID: &str = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";
    const TIMEOUTS: Timeouts = Timeouts {
        default: Duration::from_secs(30),
        max: Duration::from_secs(300),
    };

    fn path() -> String {
        format!("/v1/namespaces/demo/runtimes/python/functions/{UID}:invoke")
    }

    fn good() -> Vec<(&'static str, &'static [u8])> {
        vec![
            ("authorization", b"Bearer t"),
            ("content-type", b"application/json"),
        ]
    }

    fn head_of(method: &Method, path: &str, headers: &[(&str, &[u8])]) -> Result<Invocation, InvokeError> {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                HeaderValue::from_bytes(value).unwrap(),
            );
        }
        let head = Head {
            method,
            target: path.as_bytes(),
            headers: &map,
            raw: None,
            no_body: false,
        };
        parse(&head, TIMEOUTS)
    }

    fn with(name: &'static str, value: &'static [u8]) -> Result<Invocation, InvokeError> {
        let mut headers = good();
        headers.retain(|(kept, _)| *kept != name);
        headers.push((name, value));
        head_of(&Method::POST, &path(), &headers)
    }

    fn reason(result: Result<Invocation, InvokeError>) -> (u16, &'static str) {
        let row = result.unwrap_err().row();
        (row.status, row.reason)
    }

    #[test]
    fn a_good_head() {
        let call = head_of(&Method::POST, &format!("{}?x=1", path()), &good()).unwrap();
        assert_eq!(
            (call.namespace.as_str(), call.runtime.as_str()),
            ("demo", "python")
        );
        assert_eq!(call.uid.to_string(), UID);
        assert_eq!(call.timeout, Duration::from_secs(30));
        assert!(call.id.as_str().starts_with("inv_"));
        assert!(!call.envelope && !call.expects_continue);
    }

    #[test]
    fn only_the_exact_path_and_post() {
        for bad in [
            format!("{}/", path()),
            path().replace(':', "%3A"),
            format!("/{}", path()),
            "/".into(),
        ] {
            assert_eq!(
                reason(head_of(&Method::POST, &bad, &good())),
                (404, "NoSuchRoute"),
                "{bad}"
            );
            assert_eq!(
                reason(head_of(&Method::GET, &bad, &good())),
                (404, "NoSuchRoute"),
                "{bad}"
            );
        }
        for method in [Method::GET, Method::PUT, Method::HEAD, Method::OPTIONS] {
            assert_eq!(reason(head_of(&method, &path(), &[])), (405, "MethodNotAllowed"));
        }
    }

    #[test]
    fn invocation_ids_are_kept_or_refused_never_changed() {
        assert_eq!(
            with("x-kruntime-invocation-id", b"<\"a\">").unwrap().id.as_str(),
            "<\"a\">"
        );
        for bad in [&b"\xff"[..], b"", b"a b", &[b'a'; 129]] {
            let leaked: &'static [u8] = bad.to_vec().leak();
            assert_eq!(
                reason(with("x-kruntime-invocation-id", leaked)),
                (400, "InvalidInvocationId")
            );
        }
        let mut twice = good();
        twice.extend([
            ("x-kruntime-invocation-id", &b"a"[..]),
            ("x-kruntime-invocation-id", b"a"),
        ]);
        assert_eq!(
            reason(head_of(&Method::POST, &path(), &twice)),
            (400, "InvalidInvocationId")
        );
    }

    #[test]
    fn timeouts_are_clamped_and_zero_is_the_default_c_3_9() {
        for (text, seconds) in [
            (&b"1500"[..], 1.5),
            (b"0", 30.0),
            (b"300001", 300.0),
            (b"99999999999999999999999", 300.0),
        ] {
            let leaked: &'static [u8] = text.to_vec().leak();
            assert_eq!(
                with("x-kruntime-timeout-millis", leaked)
                    .unwrap()
                    .timeout
                    .as_secs_f64(),
                seconds
            );
        }
        for bad in [&b""[..], b"+5", b"-1", b"1.5", b"5s", b" 5 5"] {
            let leaked: &'static [u8] = bad.to_vec().leak();
            assert_eq!(
                reason(with("x-kruntime-timeout-millis", leaked)),
                (400, "InvalidTimeout")
            );
        }
    }

    #[test]
    fn exactly_one_bearer_token() {
        for bad in [
            &b"Basic x"[..],
            b"Bearer",
            b"Bearer ",
            b"Bearer  x",
            b"Bearer\tx",
            b"Bearer a,b",
            b"Bearer \xff",
        ] {
            let leaked: &'static [u8] = bad.to_vec().leak();
            assert_eq!(
                reason(with("authorization", leaked)),
                (401, "Unauthenticated"),
                "{bad:?}"
            );
        }
        assert!(with("authorization", b"bEaReR x").is_ok());
        let mut twice = good();
        twice.push(("authorization", b"Bearer t"));
        assert_eq!(
            reason(head_of(&Method::POST, &path(), &twice)),
            (401, "Unauthenticated")
        );
        let error = with("authorization", b"Bearer secret,token").unwrap_err();
        assert!(!format!("{error} {error:?}").contains("secret"));
    }

    #[test]
    fn json_only() {
        for fine in [
            &b"application/json"[..],
            b"Application/JSON; charset=UTF-8",
            b"application/json;charset=\"utf-8\"",
        ] {
            let leaked: &'static [u8] = fine.to_vec().leak();
            assert!(with("content-type", leaked).is_ok(), "{fine:?}");
        }
        for bad in [
            &b"text/plain"[..],
            b"application/jsonp",
            b"application/json; charset=latin1",
            b"\xff",
            b"",
        ] {
            let leaked: &'static [u8] = bad.to_vec().leak();
            assert_eq!(
                reason(with("content-type", leaked)),
                (415, "UnsupportedMediaType"),
                "{bad:?}"
            );
        }
        assert_eq!(
            reason(with("content-encoding", b"identity")),
            (415, "UnsupportedContentEncoding")
        );
    }

    #[test]
    fn no_body_needs_no_type() {
        let mut map = HeaderMap::new();
        map.insert("authorization", HeaderValue::from_static("Bearer t"));
        let path = path();
        let head = |no_body| Head {
            method: &Method::POST,
            target: path.as_bytes(),
            headers: &map,
            raw: None,
            no_body,
        };
        assert!(parse(&head(true), TIMEOUTS).is_ok());
        assert_eq!(
            reason(parse(&head(false), TIMEOUTS)),
            (415, "UnsupportedMediaType")
        );
    }

    #[test]
    fn a_declared_length_over_the_limit_is_refused_at_once() {
        assert!(with("content-length", b"1048576").is_ok());
        assert_eq!(
            reason(with("content-length", b"1048577")),
            (413, "PayloadTooLarge")
        );
        for bad in [&b"+5"[..], b"5, 5", b"", b"99999999999999999999"] {
            let leaked: &'static [u8] = bad.to_vec().leak();
            assert_eq!(
                reason(with("content-length", leaked)),
                (400, "BadRequest"),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn the_envelope_is_asked_for_by_its_media_type() {
        assert!(
            with("accept", b"*/*, application/vnd.kruntimes.invocation+json;q=0.9")
                .unwrap()
                .envelope
        );
        assert!(!with("accept", b"application/json").unwrap().envelope);
    }

    #[test]
    fn trace_context_passes_if_it_is_sane() {
        let long: &'static [u8] = vec![b'a'; 129].leak();
        assert!(with("traceparent", b"00-ab-cd-01").unwrap().traceparent.is_some());
        assert!(with("traceparent", long).unwrap().traceparent.is_none());
        assert!(with("tracestate", b"\xff").unwrap().tracestate.is_none());
    }

    proptest! {
        #[test]
        fn parsing_never_panics(
            target in proptest::collection::vec(any::<u8>(), 0..100),
            raw in proptest::collection::vec(any::<u8>(), 0..200),
            value in proptest::collection::vec(0x20..=0xff_u8, 0..64),
            name in 0..7_usize,
        ) {
            const NAMES: [&str; 7] = ["authorization", "content-type", "content-length", "accept",
                "x-kruntime-invocation-id", "x-kruntime-timeout-millis", "expect"];
            let mut map = HeaderMap::new();
            if let Ok(value) = HeaderValue::from_bytes(&value) {
                map.append(NAMES[name], value);
            }
            for (target, raw) in [(&target[..], Some(&raw[..])), (path().as_bytes(), None)] {
                let head = Head { method: &Method::POST, target, headers: &map, raw, no_body: true };
                let _ = parse(&head, TIMEOUTS);
            }
        }
    }
}
