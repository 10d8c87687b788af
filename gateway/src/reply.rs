//! An outcome → status, headers and body, without any server's types.

use std::{collections::HashMap, fmt::Write as _, time::Duration};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode, header};
use kruntimes_proto::ids::InvocationId;
use serde::Serialize;
use serde::de::IgnoredAny;

use crate::{
    error::{InvokeError, Row},
    request::{ENVELOPE, INVOCATION_ID},
};

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");

/// What the function returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Its bytes.
    pub body: Bytes,
    /// Their type, as the function's server says.
    pub content_type: String,
    /// Named texts beside the output; only an envelope shows them (C-3.1).
    pub outputs: HashMap<String, String>,
}

/// Where the time went (C-3.3); what was not reached is absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Timing {
    /// Finding the route, waiting for it included.
    pub route: Option<Duration>,
    /// The access review, or its kept answer.
    pub authz: Option<Duration>,
    /// From sending to the owner until its answer.
    pub hop: Option<Duration>,
    /// The handler, as its server says.
    pub handler: Option<Duration>,
}

/// An answer, ready to be written.
#[derive(Debug, Clone)]
pub struct Reply {
    /// HTTP status.
    pub status: StatusCode,
    /// Headers, without length, date and connection.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The whole body.
    pub body: Bytes,
    /// The connection must not be used again.
    pub close: bool,
}

/// The answer of a call that worked.
#[must_use]
pub fn success(output: Output, id: &InvocationId, envelope: bool, timing: Timing) -> Reply {
    let (content_type, body) = if envelope {
        (HeaderValue::from_static(ENVELOPE), wrap(&output, id))
    } else {
        let content_type = match HeaderValue::from_str(&output.content_type) {
            Ok(content_type) if !content_type.is_empty() => content_type,
            _ => OCTETS,
        };
        (content_type, output.body)
    };
    let mut headers = common(id, timing);
    headers.push((header::CONTENT_TYPE, content_type));
    Reply {
        status: StatusCode::OK,
        headers,
        body,
        close: false,
    }
}

/// The page that explains a function (C-3.11).
#[must_use]
pub fn page(body: Bytes, id: &InvocationId, timing: Timing) -> Reply {
    let mut headers = common(id, timing);
    headers.push((header::CONTENT_TYPE, JSON));
    Reply {
        status: StatusCode::OK,
        headers,
        body,
        close: false,
    }
}

/// A call was cancelled: there is nothing to show (C-3.10).
#[must_use]
pub fn cancelled(id: &InvocationId, timing: Timing) -> Reply {
    Reply {
        status: StatusCode::NO_CONTENT,
        headers: common(id, timing),
        body: Bytes::new(),
        close: false,
    }
}

/// The answer of a call that did not.
#[must_use]
pub fn problem(error: &InvokeError, id: &InvocationId, timing: Timing) -> Reply {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Problem<'a> {
        title: &'a str,
        status: u16,
        detail: String,
        reason: &'a str,
        component: &'a str,
        invocation_id: &'a str,
        dispatched: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        busy_at_most_millis: Option<u64>,
    }
    let row = error.row();
    let body = Problem {
        title: row.title(),
        status: row.status,
        detail: error.to_string(),
        reason: row.reason,
        component: row.component.as_str(),
        invocation_id: id.as_str(),
        dispatched: row.dispatched.as_str(),
        busy_at_most_millis: error
            .busy_at_most()
            .map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
    };
    let mut headers = common(id, timing);
    headers.push((header::CONTENT_TYPE, PROBLEM));
    headers.extend(hints(error, row));
    Reply {
        status: StatusCode::from_u16(row.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR),
        headers,
        // Texts and numbers only: this cannot fail.
        body: serde_json::to_vec(&body).unwrap_or_default().into(),
        close: error.closes(),
    }
}

fn hints(error: &InvokeError, row: Row) -> Vec<(HeaderName, HeaderValue)> {
    let mut hints = Vec::new();
    if let Some(seconds) = row.retry_after {
        hints.push((header::RETRY_AFTER, HeaderValue::from(seconds)));
    }
    if row.status == 401 {
        // RFC 6750: an error code only when there was a token.
        let challenge = match error {
            InvokeError::NoBearer(_) => "Bearer realm=\"kruntimes\"",
            _ => "Bearer realm=\"kruntimes\", error=\"invalid_token\"",
        };
        hints.push((header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge)));
    }
    if let InvokeError::MethodNotAllowed(method) = error {
        hints.push((header::ALLOW, HeaderValue::from_static(method)));
    }
    hints
}

fn common(id: &InvocationId, timing: Timing) -> Vec<(HeaderName, HeaderValue)> {
    let mut headers = Vec::with_capacity(6);
    // Visible ASCII, checked when it was parsed.
    if let Ok(id) = HeaderValue::from_str(id.as_str()) {
        headers.push((INVOCATION_ID, id));
    }
    if let Some(timing) = timing.to_header() {
        headers.push((SERVER_TIMING, timing));
    }
    headers
}

/// `{invocationId, contentType, output | outputBase64, outputs}` (C-3.1). JSON is put in as it came, so that
/// no number changes on its way; other UTF-8 text becomes a JSON text; the rest base64.
fn wrap(output: &Output, id: &InvocationId) -> Bytes {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Envelope<'a> {
        invocation_id: &'a str,
        content_type: &'a str,
        #[serde(skip_serializing_if = "Option::is_none")]
        output: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        output_base64: Option<String>,
        outputs: &'a HashMap<String, String>,
    }
    let kind = output
        .content_type
        .split(';')
        .next()
        .unwrap_or_default()
        .trim()
        .to_ascii_lowercase();
    // What is skipped is not decoded: bytes that are no UTF-8 would pass as JSON, and spoil the envelope.
    let utf8 = std::str::from_utf8(&output.body).ok();
    let json = (kind == "application/json" || kind.ends_with("+json"))
        && utf8.is_some_and(|text| serde_json::from_str::<IgnoredAny>(text).is_ok());
    let text = if json { None } else { utf8 };
    let envelope = Envelope {
        invocation_id: id.as_str(),
        content_type: &output.content_type,
        output: text,
        output_base64: (!json && text.is_none()).then(|| BASE64_STANDARD.encode(&output.body)),
        outputs: &output.outputs,
    };
    let mut body = serde_json::to_vec(&envelope).unwrap_or_default();
    if json {
        body.pop();
        body.extend_from_slice(b",\"output\":");
        body.extend_from_slice(output.body.trim_ascii());
        body.push(b'}');
    }
    body.into()
}

// === impl Timing ===

impl Timing {
    /// `authz;dur=0.021, route;dur=…`, milliseconds.
    fn to_header(self) -> Option<HeaderValue> {
        let parts = [
            ("authz", self.authz),
            ("route", self.route),
            ("hop", self.hop),
            ("handler", self.handler),
        ];
        let mut text = String::with_capacity(80);
        for (name, took) in parts {
            if let Some(took) = took {
                if !text.is_empty() {
                    text.push_str(", ");
                }
                text.push_str(name);
                text.push_str(";dur=");
                put_millis(&mut text, took);
            }
        }
        if text.is_empty() {
            None
        } else {
            HeaderValue::from_maybe_shared(Bytes::from(text)).ok()
        }
    }
}

/// Milliseconds with three decimals, without the general way of formatting: each call has four of them.
fn put_millis(text: &mut String, took: Duration) {
    let digit = |number: u32| char::from(b'0' + (number % 10) as u8);
    let (millis, micros) = (took.as_millis(), took.subsec_micros());
    if millis < 10 {
        text.push(digit(micros / 1000));
    } else {
        // Writing into a String cannot fail.
        let _ = write!(text, "{millis}");
    }
    text.push('.');
    for place in [100, 10, 1] {
        text.push(digit(micros / place));
    }
}

#[cfg(test)]
mod tests {
    use kruntimes_proto::failure::{Failure, Reason};
    use serde_json::{Value, json};

    use super::*;

    fn id() -> InvocationId {
        InvocationId::parse(b"<script>\"x\"").unwrap()
    }

    fn output(content_type: &str, body: &'static [u8]) -> Output {
        Output {
            body: Bytes::from_static(body),
            content_type: content_type.into(),
            outputs: HashMap::from([("k".into(), "v".into())]),
        }
    }

    fn header<'a>(reply: &'a Reply, name: &str) -> Option<&'a str> {
        let (_, value) = reply.headers.iter().find(|(header, _)| header == name)?;
        Some(value.to_str().unwrap())
    }

    fn body(reply: &Reply) -> Value {
        serde_json::from_slice(&reply.body).unwrap()
    }

    /// C-3.1
    #[test]
    fn the_body_is_the_output_with_its_type() {
        let reply = success(
            output("text/x-y; charset=utf-8", b"abc"),
            &id(),
            false,
            Timing::default(),
        );
        assert_eq!((reply.status.as_u16(), &reply.body[..]), (200, &b"abc"[..]));
        assert_eq!(header(&reply, "content-type"), Some("text/x-y; charset=utf-8"));
        assert_eq!(header(&reply, "x-kruntime-invocation-id"), Some("<script>\"x\""));
        assert_eq!(header(&reply, "server-timing"), None);
        let odd = success(output("a\nb", b"abc"), &id(), false, Timing::default());
        assert_eq!(header(&odd, "content-type"), Some("application/octet-stream"));
        let none = success(output("", b"abc"), &id(), false, Timing::default());
        assert_eq!(header(&none, "content-type"), Some("application/octet-stream"));
    }

    /// C-3.1
    #[test]
    fn an_envelope_shows_outputs_and_changes_no_number() {
        let big = success(
            output("application/json", b" [1e400, 123456789012345678901] "),
            &id(),
            true,
            Timing::default(),
        );
        assert_eq!(header(&big, "content-type"), Some(ENVELOPE));
        let text = std::str::from_utf8(&big.body).unwrap();
        assert!(
            text.ends_with(",\"output\":[1e400, 123456789012345678901]}"),
            "{text}"
        );
        let reply = success(
            output("text/plain", "é".as_bytes()),
            &id(),
            true,
            Timing::default(),
        );
        let expected = json!({
            "invocationId": "<script>\"x\"", "contentType": "text/plain", "output": "é", "outputs": { "k": "v" },
        });
        assert_eq!(body(&reply), expected);
        let bytes = success(output("image/png", b"\xff\x00"), &id(), true, Timing::default());
        assert_eq!(body(&bytes)["outputBase64"], "/wA=");
        let broken = success(output("application/json", b"{"), &id(), true, Timing::default());
        assert_eq!(body(&broken)["output"], "{");
        let no_text = success(
            output("application/json", b"\"\xff\""),
            &id(),
            true,
            Timing::default(),
        );
        assert_eq!(body(&no_text)["outputBase64"], "Iv8i");
    }

    /// C-3.2
    #[test]
    fn a_problem_says_it_all() {
        let failure =
            Failure::new(Reason::Busy, "a call is in flight").busy_at_most(Duration::from_millis(1500));
        let reply = problem(&InvokeError::Answered(failure), &id(), Timing::default());
        let expected = json!({
            "title": "Too Many Requests", "status": 429, "detail": "a call is in flight", "reason": "Busy",
            "component": "runtimed", "invocationId": "<script>\"x\"", "dispatched": "no", "busyAtMostMillis": 1500,
        });
        assert_eq!(body(&reply), expected);
        assert_eq!(header(&reply, "retry-after"), Some("1"));
        assert_eq!(header(&reply, "content-type"), Some("application/problem+json"));
    }

    /// C-3.5
    #[test]
    fn statuses_have_the_headers_that_belong_to_them() {
        let absent = problem(&InvokeError::NoBearer("x"), &id(), Timing::default());
        assert_eq!(
            header(&absent, "www-authenticate"),
            Some("Bearer realm=\"kruntimes\"")
        );
        let rejected = problem(&InvokeError::TokenRejected, &id(), Timing::default());
        assert!(
            header(&rejected, "www-authenticate")
                .unwrap()
                .contains("invalid_token")
        );
        let method = problem(&InvokeError::MethodNotAllowed("POST"), &id(), Timing::default());
        assert_eq!((header(&method, "allow"), method.close), (Some("POST"), false));
        assert!(problem(&InvokeError::BadRequest("x"), &id(), Timing::default()).close);
    }

    /// C-3.3
    #[test]
    fn server_timing_tells_what_was_reached() {
        let timing = Timing {
            route: Some(Duration::from_micros(12)),
            authz: Some(Duration::from_millis(2)),
            ..Timing::default()
        };
        let reply = problem(&InvokeError::PermissionDenied("get"), &id(), timing);
        assert_eq!(
            header(&reply, "server-timing"),
            Some("authz;dur=2.000, route;dur=0.012")
        );
    }
}
