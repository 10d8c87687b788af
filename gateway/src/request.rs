//! The only parser of what callers send: a head becomes a [`Request`] or an [`InvokeError`].
//!
//! Pure and in one order (C-3.5): framing, path, method, invocation id, timeout, authorization, content
//! type, content encoding, declared length. Nothing later looks at raw input again.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Method, header};
use kruntimes_api::{
    invoke_path::{self, Action},
    keys::RunUid,
};
use kruntimes_authz::{Bearer, TokenError};
use kruntimes_proto::{ids::InvocationId, limits};
use kruntimes_trace::Trace;

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

/// Longest head of a request, bytes: as sent over HTTP/1.1, as RFC 9113 counts a header list over HTTP/2.
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
pub enum Request {
    /// Call the function.
    Invoke(Invocation),
    /// Say why it can or cannot be called (C-3.11).
    Explain(Subject),
    /// End the call of this id (C-3.10).
    Cancel(Subject, InvocationId),
}

/// Which function it is about, and who asks.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Namespace in the path.
    pub namespace: String,
    /// Runtime in the path.
    pub runtime: String,
    /// UID in the path.
    pub uid: RunUid,
    /// The caller's id for this request, or a new one.
    pub id: InvocationId,
    /// The caller's token.
    pub bearer: Bearer,
    /// W3C trace context, as it came until somebody here begins a span.
    pub trace: Trace,
}

/// A call of a function.
#[derive(Debug, Clone)]
pub struct Invocation {
    /// Of which function, and by whom.
    pub subject: Subject,
    /// How long the call may take.
    pub timeout: Duration,
    /// Whether the answer shall be an envelope.
    pub envelope: bool,
    /// Whether the caller waits for `100 Continue` before it sends the body.
    pub expects_continue: bool,
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
pub fn parse(head: &Head<'_>, timeouts: Timeouts) -> Result<Request, InvokeError> {
    match head.raw {
        Some(raw) if raw.len() > HEAD_BYTES => return Err(InvokeError::HeadersTooLarge),
        Some(raw) => framing::check(raw)?,
        None if list_bytes(head) > HEAD_BYTES => return Err(InvokeError::HeadersTooLarge),
        None => {}
    }
    let path = head.target.split(|byte| *byte == b'?').next().unwrap_or_default();
    let path = std::str::from_utf8(path).map_err(|_| InvokeError::NoSuchRoute)?;
    let target = invoke_path::parse(path).map_err(|_| InvokeError::NoSuchRoute)?;
    let (method, cancelled) = match target.action {
        Action::Invoke => (Method::POST, None),
        Action::Explain => (Method::GET, None),
        // An id that no call can have names no route.
        Action::Cancel(id) => {
            let id = InvocationId::parse(id.as_bytes()).map_err(|_| InvokeError::NoSuchRoute)?;
            (Method::DELETE, Some(id))
        }
    };
    if *head.method != method {
        return Err(InvokeError::MethodNotAllowed(method_name(&method)));
    }
    let id = invocation_id(head.headers)?;
    let timeout = match target.action {
        Action::Invoke => timeout(head.headers, timeouts)?,
        // There is no function to wait for.
        Action::Explain | Action::Cancel(_) => timeouts.default,
    };
    let bearer =
        Bearer::from_headers(head.headers).map_err(|error| InvokeError::NoBearer(token_error(error)))?;
    let subject = Subject {
        namespace: target.namespace.to_owned(),
        runtime: target.runtime.to_owned(),
        uid: target.uid,
        id,
        bearer,
        trace: Trace::received(
            one(head.headers, &TRACEPARENT, 128),
            one(head.headers, &TRACESTATE, 512),
        ),
    };
    match (target.action, cancelled) {
        (Action::Invoke, _) => invocation(head, subject, timeout).map(Request::Invoke),
        (_, Some(id)) => Ok(Request::Cancel(subject, id)),
        (_, None) => Ok(Request::Explain(subject)),
    }
}

fn invocation(head: &Head<'_>, subject: Subject, timeout: Duration) -> Result<Invocation, InvokeError> {
    content_type(head)?;
    if head.headers.contains_key(header::CONTENT_ENCODING) {
        return Err(InvokeError::UnsupportedContentEncoding);
    }
    if declared_length(head.headers)? > limits::INPUT_BYTES as u64 {
        return Err(InvokeError::PayloadTooLarge(limits::INPUT_BYTES));
    }
    Ok(Invocation {
        subject,
        timeout,
        envelope: accepts_envelope(head.headers),
        expects_continue: expects_continue(head.headers),
    })
}

/// The three that are used here; a label, so never what a caller made up.
fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::DELETE => "DELETE",
        _ => "POST",
    }
}

/// Size of a header list as RFC 9113, 6.5.2 counts it, without what is not kept of the pseudo-headers.
fn list_bytes(head: &Head<'_>) -> usize {
    let fields = head
        .headers
        .iter()
        .map(|(name, value)| name.as_str().len() + value.len() + 32);
    head.target.len() + fields.sum::<usize>()
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

// === impl Request ===

impl Request {
    /// Which function, and who asks.
    #[must_use]
    pub fn subject(&self) -> &Subject {
        match self {
            Self::Invoke(call) => &call.subject,
            Self::Explain(subject) | Self::Cancel(subject, _) => subject,
        }
    }

    /// The same, to begin a span for it.
    pub fn subject_mut(&mut self) -> &mut Subject {
        match self {
            Self::Invoke(call) => &mut call.subject,
            Self::Explain(subject) | Self::Cancel(subject, _) => subject,
        }
    }

    /// Its method, from a closed list.
    #[must_use]
    pub fn method(&self) -> &'static str {
        match self {
            Self::Invoke(_) => "POST",
            Self::Explain(_) => "GET",
            Self::Cancel(..) => "DELETE",
        }
    }
}

#[cfg(test)]
mod tests;
