//! What may be returned, and what the caller is told otherwise (scenarios 28, 71, 72).

use kruntimes_proto::{executor::InvokeFunctionRequest, failure::Reason};

use crate::harness::Server;

/// C-5.3, scenario 28.
#[tokio::test]
async fn an_output_may_have_1_048_576_bytes() {
    let server = Server::start().await;
    // Two quotes are part of the JSON.
    let function = server
        .function("def handler(size):\n    return 'x' * (size - 2)\n")
        .await;
    for size in [1_048_575, 1_048_576] {
        let output = function.call(&size.to_string()).await.expect("fits");
        assert_eq!(output.len(), size);
    }
    let failure = function.call("1048577").await.expect_err("too large");
    assert_eq!(failure.reason, Reason::InvalidOutput);
    assert!(failure.detail.contains("1048577"), "{}", failure.detail);
    assert_eq!(
        function.call("2").await.as_deref(),
        Ok("\"\""),
        "the worker is fit for the next call"
    );
}

/// C-5.3.
#[tokio::test]
async fn an_input_may_have_1_048_576_bytes() {
    let server = Server::start().await;
    let function = server
        .function("def handler(event):\n    return len(event)\n")
        .await;
    for size in [1_048_575_usize, 1_048_576] {
        let input = format!(
            "\"{}\"",
            "é".repeat((size - 2) / 2) + if size % 2 == 1 { "x" } else { "" }
        );
        assert_eq!(input.len(), size);
        assert!(function.call(&input).await.is_ok(), "{size}");
    }
    assert_eq!(
        function.reason(&format!("\"{}\"", "x".repeat(1_048_575))).await,
        Reason::InvalidPayload
    );
}

/// Scenario 72: text counts as UTF-8, not as escapes.
#[tokio::test]
async fn text_is_not_swollen_by_escapes() {
    let server = Server::start().await;
    let function = server
        .function("def handler(event):\n    return 'é' * 350_000\n")
        .await;
    assert_eq!(function.call("1").await.expect("fits").len(), 700_002);
}

/// Scenario 71: never invalid JSON, never a crash, and the type is named.
#[tokio::test]
async fn what_json_cannot_say_is_refused_by_its_type() {
    let server = Server::start().await;
    let code = r#"
import datetime, decimal
def cycle():
    value = {}
    value['self'] = value
    return value
def deep():
    value = []
    for _ in range(10_000):
        value = [value]
    return value
class Odd(dict):
    def __init__(self, error):
        super().__init__(a=1)
        self.error = error
    def items(self):
        raise self.error
class Hidden(type):
    __name__ = property(lambda self: 1 / 0)
class Nameless(metaclass=Hidden):
    pass
VALUES = {
    'nan': float('nan'), 'inf': [float('inf')], 'datetime': datetime.datetime.now(), 'bytes': b'x', 'set': {1},
    'decimal': decimal.Decimal(1), 'cycle': cycle(), 'deep': deep(), 'surrogate': '\ud800', 'digits': 10**5000,
    'odd-type': Odd(TypeError('secret-word')), 'odd-value': Odd(ValueError('secret-word')), 'odd-other': Odd(OSError('secret-word')),
    'nameless': Nameless(), 'nan-key': {float('nan'): 1}, 'nested-bytes': [{'a': b'secret-word'}],
    'key': {(1, 2): 3}, 'outputs-list': {'outputs': [1]}, 'outputs-number': {'outputs': {'a': 1}}, 'object': object(),
}
def handler(event):
    return VALUES[event]
"#;
    let function = server.function(code).await;
    let cases = [
        ("nan", "float"),
        ("inf", "float"),
        ("datetime", "datetime"),
        ("bytes", "bytes"),
        ("set", "set"),
        ("decimal", "Decimal"),
        ("cycle", "dict"),
        ("deep", "list"),
        ("surrogate", "str"),
        ("digits", "int"),
        ("key", "tuple"),
        ("outputs-list", "list"),
        ("outputs-number", "int"),
        ("object", "object"),
        ("odd-type", "Odd"),
        ("odd-value", "Odd"),
        ("odd-other", "Odd"),
        ("nameless", "Nameless"),
        ("nan-key", "float"),
        ("nested-bytes", "bytes"),
    ];
    for (name, kind) in cases {
        let failure = function.call(&format!("\"{name}\"")).await.expect_err(name);
        assert_eq!(failure.reason, Reason::InvalidOutput, "{name}");
        assert!(failure.detail.contains(kind), "{name}: {}", failure.detail);
        // C-5.5: an exception's text is nobody's business, nor is what was returned.
        assert!(
            !failure.detail.contains("secret-word"),
            "{name}: {}",
            failure.detail
        );
    }
    assert_eq!(server.log.loads().await, 1, "the same worker answered all");
}

/// C-8.2.
#[tokio::test]
async fn a_response_has_its_own_body_and_type() {
    let server = Server::start().await;
    let code = r#"
from kruntimes_function import Response
def handler(event):
    return Response(bytes([0, 255]) if event == 1 else b'', 'image/x-test' if event != 3 else 'a\r\nb/c')
"#;
    let function = server.function(code).await;
    let answer = function
        .send(function.request("1"))
        .await
        .expect("answer")
        .into_inner();
    assert_eq!(
        (&answer.output[..], answer.content_type.as_str()),
        (&[0, 255][..], "image/x-test")
    );
    let empty = function
        .send(function.request("2"))
        .await
        .expect("answer")
        .into_inner();
    assert_eq!(
        (empty.output.len(), empty.content_type.as_str()),
        (0, "image/x-test")
    );
    assert_eq!(
        function.reason("3").await,
        Reason::InvalidOutput,
        "a type cannot split a header"
    );
}

/// C-8.2: a Response that was changed after it was made is refused, and harms nobody.
#[tokio::test]
async fn a_response_that_was_spoilt_is_an_invalid_output() {
    let server = Server::start().await;
    let code = r#"
from kruntimes_function import Response
class Mine(Response):
    @property
    def body(self):
        raise KeyError('secret-word')
    @body.setter
    def body(self, value):
        pass
def handler(event):
    response = Response('text', 'text/plain')
    if event == 'body': response.body = 'str'
    if event == 'type': response.content_type = 3
    if event == 'gone': del response.body
    if event == 'mine': response = Mine()
    if event == 'class': response = Response
    return response
"#;
    let function = server.function(code).await;
    for event in ["body", "type", "gone", "mine", "class"] {
        let failure = function.call(&format!("\"{event}\"")).await.expect_err(event);
        assert_eq!(failure.reason, Reason::InvalidOutput, "{event}: {failure}");
        assert!(!failure.detail.contains("secret-word"), "{}", failure.detail);
        assert_eq!(function.call("1").await.as_deref(), Ok("text"), "after {event}");
    }
    assert_eq!(server.log.loads().await, 1, "the same worker answered all");
}

/// C-5.4: a top-level `outputs` map travels beside the whole output.
#[tokio::test]
async fn outputs_travel_beside_the_output_and_keep_to_their_bounds() {
    let server = Server::start().await;
    let code = "def handler(event):\n    return {'outputs': {f'k{i}': 'v' * event['size'] for i in range(event['keys'])}}\n";
    let function = server.function(code).await;
    let answer = function
        .send(function.request(r#"{"keys":2,"size":3}"#))
        .await
        .expect("answer")
        .into_inner();
    assert_eq!(&answer.output[..], br#"{"outputs":{"k0":"vvv","k1":"vvv"}}"#);
    assert_eq!(answer.outputs.len(), 2);
    assert_eq!(answer.outputs["k1"], "vvv");
    for too_much in [
        r#"{"keys":65,"size":1}"#,
        r#"{"keys":1,"size":8193}"#,
        r#"{"keys":60,"size":8000}"#,
    ] {
        assert_eq!(
            function.reason(too_much).await,
            Reason::InvalidOutput,
            "{too_much}"
        );
    }
    let fits = InvokeFunctionRequest {
        ..function.request(r#"{"keys":64,"size":1000}"#)
    };
    assert_eq!(
        function
            .send(fits)
            .await
            .expect("answer")
            .into_inner()
            .outputs
            .len(),
        64
    );
}
