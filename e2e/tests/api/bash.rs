//! The whole path for a function in Bash: HTTPS POST with a real token, through gateway
//! and owner, against a real API server.

use anyhow::{Result, ensure};
use kruntimes_e2e::{
    call::Call,
    cluster::Cluster,
    stack::{Choices, Stack},
    suite::answers,
    world::{Function, World},
};
use serde_json::{Value, json};

const ENVELOPE: &str = "application/vnd.kruntimes.invocation+json";

async fn stack() -> Result<Stack> {
    let choices = Choices {
        language: "bash",
        ..Choices::default()
    };
    Stack::start(&Cluster::api().await?, choices).await
}

async fn function(world: &World, name: &str, code: &str) -> Result<Function> {
    let mut spec = world.spec(code);
    if let Some(source) = &mut spec.source {
        source.inline_path = Some("main.sh".to_owned());
    }
    let function = world.create(name, spec).await?;
    world.ready(&function).await?;
    Ok(function)
}

/// C-3.1, C-5.4, C-8.1, C-8.2 and scenarios 28 and 81: payloads and outputs up to the limit,
/// each with its content type; named results in the envelope.
#[tokio::test]
async fn a_function_in_bash_answers_over_https() -> Result<()> {
    let stack = stack().await?;
    let world = &stack.world;
    let code = r#"
set -euo pipefail
sourced=yes
handler() {
  echo "log of $KRUNTIME_INVOCATION_ID" >&2
  local type
  type=$(jq -r type <<<"$1")
  echo "type=$type" >>"$KRUNTIME_OUTPUTS"
  case $type in
    string) printf '%s' "$1" ;;
    object) jq '{sourced: $ARGS.named.sourced, name}' --arg sourced "$sourced" <<<"$1" ;;
    number) head -c "$1" /dev/zero ;;
    null) printf 'caf\xe9' ;;
    boolean) exit 3 ;;
  esac
}
"#;
    let echo = function(world, "echo", code).await?;
    let answer = world.invoke_until(&echo, r#"{"name": "Ada"}"#, 200).await?;
    ensure!(answer.header("content-type") == "application/json", "{answer:?}");
    ensure!(
        answer.body == "{\n  \"sourced\": \"yes\",\n  \"name\": \"Ada\"\n}\n",
        "{answer:?}"
    );
    for size in [131_071, 131_072, 200_000, 1_048_576] {
        let payload = format!("\"{}\"", "x".repeat(size - 2));
        let answer = world.invoke(&echo, &payload).await?;
        ensure!(
            answer.status == 200 && answer.body == payload,
            "{size}: {}",
            answer.status
        );
    }
    for (payload, length, content_type) in [
        ("1048576", 1_048_576, "text/plain"),
        ("", 4, "application/octet-stream"),
    ] {
        let answer = world.invoke(&echo, payload).await?;
        ensure!(
            answer.status == 200 && answer.body.len() == length,
            "{payload}: {} with {} bytes",
            answer.status,
            answer.body.len()
        );
        ensure!(answer.header("content-type") == content_type, "{payload}");
    }
    for (payload, key, output, kind) in [
        ("\"hi\"", "output", json!("hi"), "string"),
        ("", "outputBase64", json!("Y2Fm6Q=="), "null"),
    ] {
        let call = Call::invoke(&echo.path, &world.token, payload.to_owned());
        let answer = world.gateway.send(&call.with("accept", ENVELOPE)).await?;
        let envelope: Value = serde_json::from_slice(&answer.body)?;
        ensure!(envelope[key] == output, "{envelope}");
        ensure!(envelope["outputs"] == json!({ "type": kind }), "{envelope}");
    }
    let failed = world.invoke(&echo, "true").await?;
    answers::expect_problem(&failed, 500, "HandlerError", "yes")?;
    let large = world.invoke(&echo, "1048577").await?;
    answers::expect_problem(&large, 502, "InvalidOutput", "yes")?;
    ensure!(
        world.invoke(&echo, "\"on\"").await?.body == "\"on\"",
        "it goes on"
    );
    Ok(())
}
