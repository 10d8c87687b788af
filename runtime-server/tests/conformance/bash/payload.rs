//! The payload on its way into the function.

use kruntimes_proto::failure::Reason;

use super::{answer, function, json_of, server};

/// C-8.1 and scenario 81: one argument of any size, usable in all three ways.
#[tokio::test]
async fn a_payload_of_any_size_is_one_argument() {
    let server = server().await;
    let argument = function(&server, "handler() { printf '%s %s' \"$#\" \"$1\"; }\n").await;
    let jq = function(&server, "handler() { jq -r 'length' <<<\"$1\"; }\n").await;
    let program = function(&server, "handler() { printf '%s' \"$1\" | wc -c; }\n").await;
    for bytes in [3, 131_071, 131_072, 200_000, 1_048_570] {
        let input = json_of(bytes);
        let got = argument.call(&input).await.expect("argument");
        assert!(got == format!("1 {input}"), "{bytes}: {} bytes", got.len());
    }
    for bytes in [3, 131_071, 131_072, 200_000, 1_048_576] {
        let input = json_of(bytes);
        assert_eq!(jq.call(&input).await, Ok(format!("{}\n", bytes - 2)));
        assert_eq!(program.call(&input).await, Ok(format!("{bytes}\n")));
    }
}

/// The argument is what was sent, to the last blank.
#[tokio::test]
async fn the_argument_is_the_payload_byte_for_byte() {
    let server = server().await;
    let function = function(&server, "handler() { printf '%s' \"$1\"; }\n").await;
    for input in [
        " [1,\t2]\n\n",
        "\"ü \\u0000 \\\\ \\n\"",
        "\"-n\"",
        "-1",
        "[\"a\",\r\n\"b\"]",
        "\"* ? [a] ~ {a,b} !x #\"",
    ] {
        assert_eq!(answer(&function, input).await.output, input, "{input:?}");
    }
    assert_eq!(answer(&function, "").await.output, "null");
}

/// What is no JSON never reaches the function, and costs nothing.
#[tokio::test]
async fn what_is_no_json_is_refused() {
    let server = server().await;
    let function = function(&server, "handler() { echo run >>calls; echo \"$1\"; }\n").await;
    for bad in ["{", "NaN", "[1,]", "1 2", "\"\u{1}\"", "\"\u{0}\""] {
        assert_eq!(function.reason(bad).await, Reason::InvalidPayload, "{bad:?}");
    }
    let not_utf8 = function.send(function.request(vec![b'"', 0xff, b'"'])).await;
    assert!(not_utf8.is_err());
    assert_eq!(function.call("1").await.as_deref(), Ok("1\n"));
    let calls = std::fs::read_to_string(function.file("calls")).expect("calls");
    assert_eq!(calls, "run\n");
}

/// Scenario 86: neither handler nor payload is ever shell source.
#[tokio::test]
async fn a_payload_is_never_source() {
    let server = server().await;
    let code = "handler() { printf '%s' \"$1\"; }\nlist() { echo $1; printf '[%s]' \"$@\"; }\n";
    let function = function(&server, code).await;
    let mark = function.file("executed");
    let path = mark.display();
    for text in [
        format!("$(touch {path})"),
        format!("`touch {path}`"),
        format!("'; touch {path} #"),
        format!("\\\"; touch {path} #"),
        format!("x\\ntouch {path}\\n"),
        format!("a[$(touch {path})]"),
        format!("$(( a[$(touch {path})] ))"),
        format!("<(touch {path})"),
        format!("{{x,$(touch {path})}}"),
        "%s%n%d ${IFS} $HOME ~ $$".to_owned(),
    ] {
        let input = format!("\"{text}\"");
        assert_eq!(function.call(&input).await.as_deref(), Ok(input.as_str()));
        assert!(!mark.exists(), "{text}");
    }
}

/// Scenario 90: a function need not read anything.
#[tokio::test]
async fn a_large_payload_that_nobody_reads_is_no_error() {
    let server = server().await;
    let code = "handler() { exec 0<&-; if [[ ${#1} -gt 9 ]]; then echo large; else echo small; fi; }\nstdin() { cat; echo end; }\n";
    let function = function(&server, code).await;
    for _ in 0..3 {
        assert_eq!(function.call(&json_of(1_048_576)).await.as_deref(), Ok("large\n"));
        assert_eq!(function.call("1").await.as_deref(), Ok("small\n"));
    }
    let mut source = server.source(&[("main.sh", code)]);
    source.handler = "main.stdin".into();
    let stdin = server.ready(&source).await;
    assert_eq!(
        stdin.call(&json_of(1_048_576)).await.as_deref(),
        Ok("end\n"),
        "empty input"
    );
}
