use proptest::prelude::*;

use super::*;

const UID: &str = "2c24c1f0-9f8f-4f80-82d5-3dd16a12d1e6";
const TIMEOUTS: Timeouts = Timeouts {
    default: Duration::from_secs(30),
    max: Duration::from_secs(300),
};

fn function() -> String {
    format!("/v1/namespaces/demo/runtimes/python/functions/{UID}")
}

fn path() -> String {
    format!("{}:invoke", function())
}

fn good<'a>() -> Vec<(&'static str, &'a [u8])> {
    vec![
        ("authorization", b"Bearer t"),
        ("content-type", b"application/json"),
    ]
}

fn head_of(method: &Method, path: &str, headers: &[(&str, &[u8])]) -> Result<Request, InvokeError> {
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

fn with(name: &'static str, value: &[u8]) -> Result<Invocation, InvokeError> {
    let mut headers = good();
    headers.retain(|(kept, _)| *kept != name);
    headers.push((name, value));
    head_of(&Method::POST, &path(), &headers).map(call)
}

fn call(request: Request) -> Invocation {
    match request {
        Request::Invoke(call) => call,
        other => panic!("{other:?}"),
    }
}

fn reason<T: std::fmt::Debug>(result: Result<T, InvokeError>) -> (u16, &'static str) {
    let row = result.unwrap_err().row();
    (row.status, row.reason)
}

/// C-3.5
#[test]
fn a_good_head() {
    let call = call(head_of(&Method::POST, &format!("{}?x=1", path()), &good()).unwrap());
    let subject = &call.subject;
    assert_eq!(
        (subject.namespace.as_str(), subject.runtime.as_str()),
        ("demo", "python")
    );
    assert_eq!(subject.uid.to_string(), UID);
    assert_eq!(call.timeout, Duration::from_secs(30));
    assert!(subject.id.as_str().starts_with("inv_"));
    assert!(!call.envelope && !call.expects_continue);
}

/// C-3.5; scenario 30.
#[test]
fn only_the_exact_path_and_its_method() {
    for bad in [
        format!("{}/", path()),
        path().replace(':', "%3A"),
        format!("/{}", path()),
        "/".into(),
    ] {
        for method in [Method::POST, Method::GET] {
            assert_eq!(
                reason(head_of(&method, &bad, &good())),
                (404, "NoSuchRoute"),
                "{bad}"
            );
        }
    }
    let all = [
        Method::GET,
        Method::PUT,
        Method::HEAD,
        Method::OPTIONS,
        Method::POST,
        Method::DELETE,
    ];
    for (path, right) in [
        (path(), Method::POST),
        (function(), Method::GET),
        (format!("{}/invocations/a", function()), Method::DELETE),
    ] {
        for method in all.iter().filter(|method| **method != right) {
            let error = head_of(method, &path, &[]).unwrap_err();
            assert_eq!(
                error,
                InvokeError::MethodNotAllowed(method_name(&right)),
                "{path}"
            );
        }
        assert!(head_of(&right, &path, &good()).is_ok(), "{path}");
    }
}

/// C-3.10, C-3.11.
#[test]
fn to_explain_and_to_cancel_need_a_token_and_nothing_else() {
    let token = [("authorization", &b"Bearer t"[..])];
    let invocation = format!("{}/invocations/my-id", function());
    let Request::Cancel(subject, id) = head_of(&Method::DELETE, &invocation, &token).unwrap() else {
        panic!("not a cancel")
    };
    assert_eq!((id.as_str(), subject.uid.to_string().as_str()), ("my-id", UID));
    assert_ne!(subject.id, id, "the request has an id of its own");
    let explain = head_of(&Method::GET, &function(), &token).unwrap();
    assert!(matches!(explain, Request::Explain(_)), "{explain:?}");
    for (method, path) in [(Method::DELETE, &invocation), (Method::GET, &function())] {
        assert_eq!(reason(head_of(&method, path, &[])), (401, "Unauthenticated"));
    }
    let long = format!("{}/invocations/{}", function(), "a".repeat(129));
    assert_eq!(
        reason(head_of(&Method::DELETE, &long, &token)),
        (404, "NoSuchRoute")
    );
}

/// C-3.2; scenario 32.
#[test]
fn invocation_ids_are_kept_or_refused_never_changed() {
    let kept = with("x-kruntime-invocation-id", b"<\"a\">").unwrap();
    assert_eq!(kept.subject.id.as_str(), "<\"a\">");
    for bad in [&b"\xff"[..], b"", b"a b", &[b'a'; 129]] {
        assert_eq!(
            reason(with("x-kruntime-invocation-id", bad)),
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

/// C-3.9
#[test]
fn timeouts_are_clamped_and_zero_is_the_default() {
    for (text, seconds) in [
        (&b"1500"[..], 1.5),
        (b"0", 30.0),
        (b"000", 30.0),
        (b"300001", 300.0),
        (b"99999999999999999999999", 300.0),
    ] {
        let call = with("x-kruntime-timeout-millis", text).unwrap();
        assert_eq!(call.timeout.as_secs_f64(), seconds);
    }
    for bad in [&b""[..], b"+5", b"-1", b"1.5", b"5s", b" 5 5", b"\xff", b"0x5"] {
        assert_eq!(
            reason(with("x-kruntime-timeout-millis", bad)),
            (400, "InvalidTimeout")
        );
    }
}

/// C-3.5; scenario 55.
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
        assert_eq!(
            reason(with("authorization", bad)),
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

/// C-3.5
#[test]
fn json_only() {
    for fine in [
        &b"application/json"[..],
        b"Application/JSON; charset=UTF-8",
        b"application/json;charset=\"utf-8\"",
    ] {
        assert!(with("content-type", fine).is_ok(), "{fine:?}");
    }
    for bad in [
        &b"text/plain"[..],
        b"application/jsonp",
        b"application/json; charset=latin1",
        b"\xff",
        b"",
    ] {
        assert_eq!(
            reason(with("content-type", bad)),
            (415, "UnsupportedMediaType"),
            "{bad:?}"
        );
    }
    assert_eq!(
        reason(with("content-encoding", b"identity")),
        (415, "UnsupportedContentEncoding")
    );
}

/// C-3.5; scenario 26.
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

/// C-3.5
#[test]
fn a_declared_length_over_the_limit_is_refused_at_once() {
    assert!(with("content-length", b"1048576").is_ok());
    assert_eq!(
        reason(with("content-length", b"1048577")),
        (413, "PayloadTooLarge")
    );
    for bad in [&b"+5"[..], b"5, 5", b"", b"99999999999999999999"] {
        assert_eq!(
            reason(with("content-length", bad)),
            (400, "BadRequest"),
            "{bad:?}"
        );
    }
}

/// C-3.5: over HTTP/2 there are no bytes of a head to count.
#[test]
fn a_header_list_has_a_limit() {
    let long = vec![b'a'; HEAD_BYTES - 1000];
    assert!(with("x-long", &long).is_ok());
    let too_long = vec![b'a'; HEAD_BYTES];
    assert_eq!(reason(with("x-long", &too_long)), (431, "HeadersTooLarge"));
}

/// C-3.1
#[test]
fn the_envelope_is_asked_for_by_its_media_type() {
    let asked = with("accept", b"*/*, application/vnd.kruntimes.invocation+json;q=0.9").unwrap();
    assert!(asked.envelope);
    assert!(!with("accept", b"application/json").unwrap().envelope);
}

/// Contract 4
#[test]
fn trace_context_passes_if_it_is_sane() {
    let trace = |name, value: &[u8]| with(name, value).unwrap().subject.trace;
    assert!(trace("traceparent", b"00-ab-cd-01").traceparent().is_some());
    assert!(trace("traceparent", &[b'a'; 129]).traceparent().is_none());
    assert!(trace("tracestate", b"\xff").tracestate().is_none());
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
        let invocation = format!("{}/invocations/{}", function(), String::from_utf8_lossy(&target));
        for (method, target, raw) in [
            (Method::POST, &target[..], Some(&raw[..])),
            (Method::POST, path().as_bytes(), None),
            (Method::DELETE, invocation.as_bytes(), None),
        ] {
            let head = Head { method: &method, target, headers: &map, raw, no_body: true };
            let _ = parse(&head, TIMEOUTS);
        }
    }
}
