//! Calls that end well, and what a function can know.

use std::time::Duration;

use kruntimes_proto::{executor::InvokeFunctionRequest, failure::Reason};
use tonic::Request;

use crate::harness::{PATIENCE, Server, appears, failure};

/// C-8.1, C-8.2.
#[tokio::test]
async fn a_handler_gets_the_event_and_its_value_is_the_answer() {
    let server = Server::start().await;
    let function = server
        .function("def handler(event, context):\n    return {'got': event, 'ä': None}\n")
        .await;
    let request = InvokeFunctionRequest {
        invocation_id: "mine-1".into(),
        ..function.request(r#"{"a":[1,2.5,true]}"#)
    };
    let answer = function.send(request).await.expect("answer");
    let micros = answer
        .metadata()
        .get("kruntime-handler-us")
        .expect("handler time")
        .to_str()
        .expect("text");
    assert!(micros.parse::<u64>().is_ok(), "{micros}");
    let answer = answer.into_inner();
    assert_eq!(
        &answer.output[..],
        r#"{"got":{"a":[1,2.5,true]},"ä":null}"#.as_bytes()
    );
    assert_eq!(
        (answer.content_type.as_str(), answer.invocation_id.as_str()),
        ("application/json", "mine-1")
    );
    assert_eq!(answer.registration, Some(function.registration.clone()));
    let unnamed = function
        .send(function.request("null"))
        .await
        .expect("answer")
        .into_inner();
    assert!(!unnamed.invocation_id.is_empty() && unnamed.invocation_id.len() <= 128);
}

/// C-8.2.
#[tokio::test]
async fn an_empty_input_is_null_and_a_bad_one_never_reaches_the_handler() {
    let server = Server::start().await;
    let function = server
        .function(
            "count = 0\ndef handler(event):\n    global count\n    count += 1\n    return [event, count]\n",
        )
        .await;
    assert_eq!(function.call("").await.as_deref(), Ok("[null,1]"));
    for bad in ["{", "NaN", "[1,]", "\"\u{1}\""] {
        assert_eq!(function.reason(bad).await, Reason::InvalidPayload, "{bad:?}");
    }
    let deep = "[".repeat(100_000);
    assert_eq!(function.reason(&deep).await, Reason::InvalidPayload);
    let not_utf8 = function
        .send(function.request(vec![b'"', 0xff, b'"']))
        .await
        .expect_err("refused");
    assert_eq!(failure(&not_utf8).reason, Reason::InvalidPayload);
    let xml = InvokeFunctionRequest {
        content_type: "text/xml".into(),
        ..function.request("1")
    };
    assert_eq!(
        failure(&function.send(xml).await.expect_err("refused")).reason,
        Reason::InvalidPayload
    );
    assert_eq!(
        function.call("1").await.as_deref(),
        Ok("[1,2]"),
        "the same warm worker, called twice"
    );
}

/// C-8.1.
#[tokio::test]
async fn async_handlers_are_awaited_and_one_argument_is_enough() {
    let server = Server::start().await;
    let code = "import asyncio\nasync def handler(event):\n    await asyncio.sleep(0)\n    return event\n";
    let function = server.function(code).await;
    assert_eq!(function.call("1").await.as_deref(), Ok("1"));
    assert_eq!(function.call("2").await.as_deref(), Ok("2"));
    let code = "class Handler:\n    async def __call__(self, event, context):\n        return context.invocation_id != ''\nhandler = Handler()\n";
    assert_eq!(
        server.function(code).await.call("null").await.as_deref(),
        Ok("true")
    );
}

/// C-8.1: each form of a handler that takes one or two positional arguments.
#[tokio::test]
async fn a_handler_may_take_the_context_or_not_in_any_form() {
    let server = Server::start().await;
    let two = r#"["i",1]"#;
    let cases = [
        ("handler = lambda event: event", "1"),
        (
            "def handler(event, context=None):\n    return [context.invocation_id, event]",
            two,
        ),
        (
            "def handler(*args):\n    return [args[1].invocation_id, args[0]]",
            two,
        ),
        (
            "def handler(event, context, extra=3):\n    return [context.invocation_id, event]",
            two,
        ),
        ("def handler(event, *, option=2):\n    return event", "1"),
        (
            "import functools\ndef inner(option, event, context):\n    return [context.invocation_id, event]\n\
             handler = functools.partial(inner, 'x')",
            two,
        ),
        (
            "class Shop:\n    def sell(self, event, context):\n        return [context.invocation_id, event]\n\
             handler = Shop().sell",
            two,
        ),
    ];
    for (code, want) in cases {
        let function = server.function(code).await;
        let request = InvokeFunctionRequest {
            invocation_id: "i".into(),
            ..function.request("1")
        };
        let answer = function.send(request).await.expect(code).into_inner();
        assert_eq!(String::from_utf8_lossy(&answer.output), want, "{code}");
        function.unregister(true, 0).await.expect("unregister");
    }
}

/// C-8.1: what an `async` handler raises, returns late, or leaves running.
#[tokio::test]
async fn an_async_handler_fails_and_ends_like_any_other() {
    let server = Server::start().await;
    let code = r#"
import asyncio, os
async def handler(event):
    if event == 'raise':
        raise ValueError('x')
    if event == 'cancel':
        raise asyncio.CancelledError
    if event == 'exit':
        raise SystemExit(3)
    if event == 'leave':
        asyncio.get_running_loop().create_task(asyncio.sleep(1000))
    if event == 'hang':
        await asyncio.sleep(1000)
    return 'alive'
"#;
    let function = server.function(code).await;
    for (event, reason) in [
        ("raise", Reason::HandlerError),
        ("cancel", Reason::HandlerError),
        ("exit", Reason::WorkerExited),
        ("hang", Reason::DeadlineExceeded),
    ] {
        let failure = function
            .call_within(&format!("\"{event}\""), Duration::from_secs(2))
            .await
            .expect_err(event);
        assert_eq!(failure.reason, reason, "{event}");
        for next in ["\"leave\"", "1"] {
            assert_eq!(
                function.call(next).await.as_deref(),
                Ok("\"alive\""),
                "after {event}"
            );
        }
    }
}

/// C-8.2.
#[tokio::test]
async fn a_context_knows_call_run_and_deadline() {
    let server = Server::start().await;
    let code = "def handler(event, context):\n    context.logger.info('from-the-logger')\n    \
                return [context.invocation_id, context.run_name, context.run_namespace, context.run_uid, \
                context.run_labels, context.runtime, context.traceparent, context.tracestate, 4 < context.remaining <= 5, context.deadline > 1e9]\n";
    let mut source = server.source(&[("main.py", code)]);
    source.env = [
        ("FUNC_NAME", "hello"),
        ("FUNC_NAMESPACE", "demo"),
        (
            "FUNC_LABELS",
            r#"{"team":"a","app.kubernetes.io/name":"","x":"y"}"#,
        ),
        ("FUNC_RUNTIME", "python"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec();
    let function = server.ready(&source).await;
    let body = InvokeFunctionRequest {
        invocation_id: "i".into(),
        timeout_millis: 5000,
        ..function.request("1")
    };
    let mut request = Request::new(body);
    let trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    request
        .metadata_mut()
        .insert("traceparent", trace.parse().expect("ascii"));
    request
        .metadata_mut()
        .insert("tracestate", "a=1,b=x:y".parse().expect("ascii"));
    let answer = function
        .client
        .clone()
        .invoke_function(request)
        .await
        .expect("answer")
        .into_inner();
    let want = format!(
        r#"["i","hello","demo","{}",{{"team":"a","app.kubernetes.io/name":"","x":"y"}},"python","{trace}","a=1,b=x:y",true,true]"#,
        source.run_uid
    );
    assert_eq!(String::from_utf8_lossy(&answer.output), want);
    server.log.wait_for(&["from-the-logger", &source.run_uid]).await;
    assert_eq!(
        server
            .function("def handler(event, context):\n    return context.run_labels\n")
            .await
            .call("1")
            .await
            .as_deref(),
        Ok("{}")
    );
}

/// C-5.3: one call in flight, no queue.
#[tokio::test]
async fn a_second_call_is_busy_and_learns_how_long() {
    let server = Server::start().await;
    let code = "import os, time\ndef handler(event):\n    if event == 1:\n        open('started', 'w').write('x')\n        \
                while not os.path.exists('go'): time.sleep(0.002)\n    return event\n";
    let function = server.function(code).await;
    let first = tokio::spawn({
        let function = function.clone();
        async move { function.call_within("1", Duration::from_secs(20)).await }
    });
    appears(&function.file("started")).await;
    let busy = function.call("2").await.expect_err("busy");
    assert_eq!(busy.reason, Reason::Busy);
    let left = busy.busy_at_most.expect("busyAtMostMillis");
    assert!(
        left <= Duration::from_secs(20) && left > Duration::ZERO,
        "{left:?}"
    );
    assert_eq!(function.status().await.expect("status").in_flight, 1);
    std::fs::write(function.file("go"), "x").expect("go");
    assert_eq!(first.await.expect("join").as_deref(), Ok("1"));
    assert_eq!(
        function.call("3").await.as_deref(),
        Ok("3"),
        "the slot is free with the answer"
    );
}

/// C-5.2.
#[tokio::test]
async fn activity_moves_with_calls_and_not_with_polls_or_refusals() {
    let server = Server::start().await;
    let function = server.function("def handler(event):\n    return 1\n").await;
    let ready = function.status().await.expect("status").last_activity_unix_nano;
    assert!(
        ready > 0,
        "a function that is never called is idle since it became ready"
    );
    function.call("1").await.expect("answer");
    let called = function.status().await.expect("status").last_activity_unix_nano;
    assert!(called > ready);
    let refused = InvokeFunctionRequest {
        timeout_millis: -1,
        ..function.request("1")
    };
    function.send(refused).await.expect_err("refused");
    assert_eq!(
        function.status().await.expect("status").last_activity_unix_nano,
        called
    );
}

/// C-5.5.
#[tokio::test]
async fn what_a_handler_raises_is_hidden_unless_the_operator_shows_it() {
    let code = "def handler(event):\n    raise KeyError('secret-word')\n";
    let hiding = Server::start().await;
    let function = hiding.function(code).await;
    let failure = function.call("1").await.expect_err("raised");
    assert_eq!(failure.reason, Reason::HandlerError);
    assert!(
        !failure.detail.contains("secret-word") && !failure.detail.contains("KeyError"),
        "{}",
        failure.detail
    );
    let logged = hiding.log.wait_for(&["secret-word"]).await;
    assert!(!logged.is_empty());
    assert!(
        hiding
            .log
            .lines()
            .iter()
            .any(|line| line.contains("main.py") && line.contains("line 2")),
        "a traceback"
    );

    let showing = Server::with(&[], &[("SERVER_EXPOSE_ERRORS", "true")]).await;
    let failure = showing.function(code).await.call("1").await.expect_err("raised");
    assert!(
        failure.detail.contains("KeyError") && failure.detail.contains("secret-word"),
        "{}",
        failure.detail
    );
}

/// Scenario 67, C-8.6: nothing that is printed can be taken for the result.
#[tokio::test]
async fn printed_text_goes_to_the_log_with_the_invocation() {
    let server = Server::start().await;
    let code = r#"
import os, subprocess, sys
def handler(event):
    print('{"status":"printed"}')
    os.write(1, b'\x00\x00\x00\x05\x04raw\n')
    subprocess.run(['/bin/echo', 'from-a-child'], check=True)
    print('to-stderr', file=sys.stderr)
    sys.stdout.write('no-newline')
    return 'returned'
"#;
    let function = server.function(code).await;
    let request = InvokeFunctionRequest {
        invocation_id: "inv-67".into(),
        ..function.request("1")
    };
    let answer = function.send(request).await.expect("answer").into_inner();
    assert_eq!(&answer.output[..], b"\"returned\"");
    for text in ["printed", "from-a-child", "to-stderr", "no-newline"] {
        server
            .log
            .wait_for(&[text, "inv-67", &function.registration.run_uid])
            .await;
    }
    assert!(function.call("1").await.is_ok());
}

/// Scenario 76, C-8.6: nobody blocks on output that nobody reads, and the log is bounded.
#[tokio::test]
async fn floods_of_text_are_cut_and_the_result_is_intact() {
    let server = Server::start().await;
    let code = r#"
import sys
def handler(event):
    for stream in (sys.stdout, sys.stderr):
        stream.write('x' * 5_000_000)
    print()
    for i in range(100_000):
        print('line', i)
    return 'intact'
"#;
    let function = server.function(code).await;
    let call = function.call_within("1", PATIENCE).await;
    assert_eq!(call.as_deref(), Ok("\"intact\""));
    server.log.wait_for(&["(line cut)"]).await;
    server
        .log
        .wait_for(&["further output of this call is dropped"])
        .await;
    let bytes: usize = server.log.lines().iter().map(String::len).sum();
    assert!(bytes < 4 * 1024 * 1024, "{bytes}");
}

/// Scenario 90: a handler need not read its input.
#[tokio::test]
async fn a_large_input_that_nobody_reads_is_no_error() {
    let server = Server::start().await;
    let code = "import os, sys\ndef handler(event):\n    sys.stdin.close()\n    try:\n        os.close(0)\n    except OSError:\n        pass\n    return len(event)\n";
    let function = server.function(code).await;
    let input = format!("\"{}\"", "x".repeat(1_048_574));
    for _ in 0..3 {
        assert_eq!(function.call(&input).await.as_deref(), Ok("1048574"));
    }
}

/// Scenario 68, C-8.7: equal module names, different functions.
#[tokio::test]
async fn two_functions_with_the_same_module_names_run_their_own_code() {
    let server = Server::start().await;
    let files = |word: &str| {
        [
            (
                "main.py".to_owned(),
                "import util\ndef handler(event):\n    return util.word\n".to_owned(),
            ),
            ("util.py".to_owned(), format!("word = '{word}'\n")),
        ]
    };
    let mut functions = Vec::new();
    for word in ["one", "two"] {
        let files = files(word);
        let files: Vec<(&str, &str)> = files
            .iter()
            .map(|(name, text)| (name.as_str(), text.as_str()))
            .collect();
        functions.push(server.ready(&server.source(&files)).await);
    }
    for _ in 0..3 {
        assert_eq!(functions[0].call("1").await.as_deref(), Ok("\"one\""));
        assert_eq!(functions[1].call("1").await.as_deref(), Ok("\"two\""));
    }
    // Deleted and made again in the same place, with the same size and within the second.
    functions[0].unregister(true, 0).await.expect("unregister");
    std::fs::write(functions[0].file("util.py"), "word = 'new'\n").expect("source");
    let mut again = server.source(&[]);
    again.working_dir.clone_from(&functions[0].working_dir);
    let again = server.ready(&again).await;
    assert_eq!(again.call("1").await.as_deref(), Ok("\"new\""));
    assert_eq!(functions[1].call("1").await.as_deref(), Ok("\"two\""));
    assert!(!again.file("__pycache__").exists());
}

/// Scenario 80: a name, a text or a traceback that no protocol likes is delivered, and
/// bounded wherever it goes.
#[tokio::test]
async fn any_error_can_be_told() {
    let server = Server::with(&[], &[("SERVER_EXPOSE_ERRORS", "true")]).await;
    let code = r#"
class Hidden(type):
    __name__ = property(lambda self: 1 / 0)
class Odd(Exception, metaclass=Hidden):
    def __str__(self):
        raise RuntimeError('no text')
class Text(str):
    def encode(self, *args):
        raise RuntimeError('no bytes')
class Strange(Exception):
    def __str__(self):
        return Text('strange-text')
def deep(depth):
    try:
        raise ValueError('link')
    except ValueError as error:
        if depth:
            deep(depth - 1)
        raise KeyError('last-link') from error
ERRORS = {
    'newline': ValueError('one\ntwo\r\n\x00three'), 'emoji': ValueError('\U0001f389' * 10), 'long': ValueError('y' * 1_000_000),
    'surrogate': ValueError('left \ud800 right'), 'odd': Odd(), 'strange': Strange(), 'name': type('N' * 100_000, (Exception,), {})('x'),
    'group': None, 'interrupt': KeyboardInterrupt('stop'), 'generator': GeneratorExit('bye'),
}
def handler(event):
    if event == 'chain':
        deep(200)
    if event == 'recursion':
        return handler(event)
    raise ERRORS[event] or TypeError('none')
"#;
    let function = server.function(code).await;
    for (event, told) in [
        ("newline", "two"),
        ("emoji", "🎉"),
        ("long", "yyy"),
        ("surrogate", "left \\ud800 right"),
        ("odd", "Odd"),
        ("strange", "strange-text"),
        ("name", "NNN"),
        ("group", "TypeError"),
        ("interrupt", "KeyboardInterrupt"),
        ("generator", "GeneratorExit"),
        ("chain", "last-link"),
        ("recursion", "RecursionError"),
    ] {
        let failure = function.call(&format!("\"{event}\"")).await.expect_err(event);
        assert_eq!(failure.reason, Reason::HandlerError, "{event}: {failure}");
        assert!(failure.detail.contains(told), "{event}: {}", failure.detail);
        assert!(failure.detail.len() <= 1024, "{event}");
    }
    let longest = server.log.lines().iter().map(String::len).max();
    assert!(longest < Some(20 * 1024), "a log line of {longest:?} bytes");
    assert_eq!(server.log.loads().await, 1, "the same worker told all");
}
