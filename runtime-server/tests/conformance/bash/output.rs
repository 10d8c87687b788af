//! Standard output on its way to the caller.

use std::time::Duration;

use kruntimes_proto::failure::Reason;

use super::{answer, function, server};
use crate::harness::{appears, processes};

/// C-8.2 and scenario 83: bytes stay as they are; the content type says what they are.
#[tokio::test]
async fn the_output_is_what_was_written_byte_for_byte() {
    let server = server().await;
    let code = r#"
handler() {
  case $1 in
    '"nul"') printf 'a\0b\n\n' ;;
    '"nothing"') ;;
    '"text"') printf ' ü\r\n\n' ;;
    '"latin"') printf 'caf\xe9\n' ;;
    '"cut"') printf '\xe2\x82' ;;
    '"json"') printf '\n{"a": [1, null]}\n\n' ;;
    '"two"') printf '1\n2\n' ;;
    '"null"') echo null ;;
    '"device"') echo first >/dev/stdout; echo second >/dev/fd/1 ;;
    '"child"') /bin/echo from a child ;;
  esac
}
"#;
    let function = function(&server, code).await;
    let cases: [(&str, &[u8], &str); 10] = [
        ("nul", b"a\0b\n\n", "text/plain"),
        ("nothing", b"", "text/plain"),
        ("text", " ü\r\n\n".as_bytes(), "text/plain"),
        ("latin", b"caf\xe9\n", "application/octet-stream"),
        ("cut", b"\xe2\x82", "application/octet-stream"),
        ("json", b"\n{\"a\": [1, null]}\n\n", "application/json"),
        ("two", b"1\n2\n", "text/plain"),
        ("null", b"null\n", "application/json"),
        ("device", b"first\nsecond\n", "text/plain"),
        ("child", b"from a child\n", "text/plain"),
    ];
    for (word, output, content_type) in cases {
        let got = answer(&function, format!("\"{word}\"")).await;
        assert_eq!(
            (&got.output[..], got.content_type.as_str()),
            (output, content_type),
            "{word}"
        );
        assert!(got.outputs.is_empty());
    }
}

/// C-5.3 and scenario 28: the limit is exact, and nothing is ever cut.
#[tokio::test]
async fn the_largest_output_passes_and_one_byte_more_does_not() {
    let server = server().await;
    let function = function(&server, "handler() { head -c \"$1\" /dev/zero | tr '\\0' x; }\n").await;
    for bytes in [1_048_575, 1_048_576] {
        let got = answer(&function, bytes.to_string()).await.output;
        assert!(
            got.len() == bytes && got.iter().all(|&byte| byte == b'x'),
            "{bytes}: {}",
            got.len()
        );
    }
    let failure = function.call("1048577").await.expect_err("too long");
    assert_eq!(failure.reason, Reason::InvalidOutput);
    assert!(failure.detail.contains("1048576"), "{}", failure.detail);
    assert_eq!(function.call("1").await.as_deref(), Ok("x"));
}

/// Output without end fills neither memory nor disk, and holds nobody up.
#[tokio::test]
async fn a_flood_ends_its_call_and_leaves_nothing() {
    let server = server().await;
    let code = "handler() { case $1 in 1) yes ;; 2) trap '' PIPE; while :; do echo y; done ;; *) pwd; ls -A \"$TMPDIR\" ;; esac; }\n";
    let function = function(&server, code).await;
    let mark = format!(
        "KRUNTIME_REGISTRATION_ID={}",
        function.registration.registration_id
    );
    for input in ["1", "2"] {
        assert_eq!(function.reason(input).await, Reason::InvalidOutput);
        // The files of the running call, and no others: those of the last one go beside its end.
        for attempt in 0.. {
            let left = function.call("3").await.expect("next call");
            if left.lines().filter(|line| line.starts_with(".call-")).count() == 2 {
                break;
            }
            assert!(attempt < 100, "{left}");
        }
        assert_eq!(processes(server.pid(), &mark).len(), 1, "the new worker alone");
    }
}

/// C-8.6 and scenario 39: what a call leaves behind writes into nobody's answer.
#[tokio::test]
async fn a_late_writer_reaches_no_later_call() {
    let server = server().await;
    let code = r#"
handler() {
  case $1 in
    '"leave"') (trap '' PIPE; until [[ -e go ]]; do sleep 0.01; done; echo late; echo >wrote) & echo left ;;
    '"stay"') : >go; until [[ -e wrote ]]; do sleep 0.01; done; echo stayed ;;
  esac
}
"#;
    let function = function(&server, code).await;
    assert_eq!(function.call("\"leave\"").await.as_deref(), Ok("left\n"));
    assert_eq!(function.call("\"stay\"").await.as_deref(), Ok("stayed\n"));
}

/// Scenario 39: a late answer never reaches the next caller.
#[tokio::test]
async fn a_late_answer_is_never_the_next_callers() {
    let server = server().await;
    let code = "handler() { if [[ $1 == '\"A\"' ]]; then sleep 0.05; fi; echo \"$1\"; }\n";
    let function = function(&server, code).await;
    for round in 0..20 {
        let late = function
            .call_within("\"A\"", Duration::from_millis(46 + round % 12))
            .await;
        match late {
            Ok(answer) => assert_eq!(answer, "\"A\"\n"),
            Err(failure) => assert_eq!(failure.reason, Reason::DeadlineExceeded),
        }
        assert_eq!(
            function.call("\"B\"").await.as_deref(),
            Ok("\"B\"\n"),
            "round {round}"
        );
    }
}

/// C-8.6: stderr is the log, with its call; stdout is not logged.
#[tokio::test]
async fn stderr_is_logged_and_stdout_is_not() {
    let server = server().await;
    let code = "echo sourced-word\nhandler() { echo answer-word; echo log-word >&2; ls /nowhere-word; printf 'no-newline' >&2; return 0; }\n";
    let function = function(&server, code).await;
    server
        .log
        .wait_for(&["sourced-word", &function.registration.run_uid])
        .await;
    let mut request = function.request("\"payload-word\"");
    request.invocation_id = "inv-bash".into();
    let got = function.send(request).await.expect("answer").into_inner();
    assert_eq!(got.output, "answer-word\n");
    for word in ["log-word", "nowhere-word", "no-newline"] {
        server
            .log
            .wait_for(&[word, "inv-bash", &function.registration.run_uid])
            .await;
    }
    function.unregister(true, 0).await.expect("unregister");
    let all = server.log.lines().join("\n");
    assert!(
        !all.contains("answer-word") && !all.contains("payload-word"),
        "{all}"
    );
}

/// Scenario 86: an output is no format and no source.
#[tokio::test]
async fn an_output_is_never_a_format() {
    let server = server().await;
    let text = "%s%n%d {} ${x} $(id) `id`\n";
    let code = format!(
        "handler() {{ echo '{}'; echo '{}' >&2; }}\n",
        text.trim(),
        text.trim()
    );
    let function = function(&server, &code).await;
    assert_eq!(function.call("1").await.as_deref(), Ok(text));
    server.log.wait_for(&[text.trim()]).await;
}

/// A caller that hangs up ends its call; the next one has a pipe of its own.
#[tokio::test]
async fn a_call_whose_caller_is_gone_is_ended() {
    let server = server().await;
    let code = "handler() { if [[ $1 == 1 ]]; then echo old; echo x >started; sleep 1000; fi; echo new; }\n";
    let function = function(&server, code).await;
    for _ in 0..3 {
        let call = tokio::spawn({
            let function = function.clone();
            async move { function.call("1").await }
        });
        appears(&function.file("started")).await;
        call.abort();
        let _ = call.await;
        function.until(|status| status.in_flight == 0).await;
        std::fs::remove_file(function.file("started")).expect("remove");
        assert_eq!(function.call("2").await.as_deref(), Ok("new\n"));
    }
}
