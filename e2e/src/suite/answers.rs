//! Every status of C-3.5 that the first path can give, with invocation id, reason
//! and `dispatched`, over HTTP/1.1 and HTTP/2.

use anyhow::{Context as _, Result, ensure};

use crate::{
    call::{Answer, Call, Version},
    world::{self, STRANGER, World},
};

const FUNCTION: &str = r#"
import time

def handler(event, context):
    if event and "raise" in event:
        raise ValueError(event["raise"])
    if event and "sleep" in event:
        time.sleep(event["sleep"])
    return {"echo": event, "invocation": context.invocation_id}
"#;

const INVOCATION_ID: &str = "x-kruntime-invocation-id";

/// Checks one refusal whole: status, reason, dispatched, problem document, id.
pub fn expect_problem(answer: &Answer, status: u16, reason: &str, dispatched: &str) -> Result<()> {
    let shown = format!(
        "{} {:?} {}",
        answer.status,
        answer.headers,
        String::from_utf8_lossy(&answer.body)
    );
    ensure!(
        answer.status.as_u16() == status,
        "expected {status} {reason}, got {shown}"
    );
    ensure!(
        answer.header("content-type") == "application/problem+json",
        "not a problem document: {shown}"
    );
    ensure!(
        answer.problem("reason") == reason,
        "expected reason {reason}: {shown}"
    );
    ensure!(
        answer.problem("dispatched") == dispatched,
        "expected dispatched {dispatched}: {shown}"
    );
    ensure!(
        answer.json()["status"] == status,
        "the document's status differs: {shown}"
    );
    for field in ["title", "detail", "component", "invocationId"] {
        ensure!(
            !answer.problem(field).is_empty(),
            "field {field} is missing: {shown}"
        );
    }
    ensure!(
        answer.header(INVOCATION_ID) == answer.problem("invocationId"),
        "two invocation ids: {shown}"
    );
    Ok(())
}

/// Runs the table.
pub async fn every_status(world: &World) -> Result<()> {
    let function = world.function("answers", FUNCTION).await?;
    world.invoke_until(&function, "{}", 200).await?;
    let stranger = world::token(&world.client, &world.namespace, STRANGER).await?;
    let waiting = World {
        runtime: "nowhere".to_owned(),
        ..world.clone()
    };
    let pending = waiting.create("pending", waiting.spec(FUNCTION)).await?;

    for version in [Version::Http1, Version::Http2] {
        let send = async |call: Call| world.gateway.send(&call.over(version)).await;
        let call = |body: &str| Call::invoke(&function.path, &world.token, body.to_owned());

        let answer = send(call(r#"{"a": 1}"#).with("X-Kruntime-Invocation-ID", "mine-1")).await?;
        ensure!(answer.status == 200, "{} {:?}", answer.status, answer.body);
        ensure!(
            answer.header(INVOCATION_ID) == "mine-1",
            "the caller's own id is kept"
        );
        ensure!(
            answer.json()["echo"]["a"] == 1 && answer.json()["invocation"] == "mine-1",
            "{:?}",
            answer.body
        );
        ensure!(
            answer.header("server-timing").contains("hop"),
            "timing: {:?}",
            answer.headers
        );

        let answer = send(Call::invoke(&function.path, "not-a-token", "{}")).await?;
        expect_problem(&answer, 401, "Unauthenticated", "no").context("garbage token")?;
        ensure!(
            answer.header("www-authenticate").starts_with("Bearer"),
            "{:?}",
            answer.headers
        );

        let mut anonymous = call("{}");
        anonymous.headers.retain(|(name, _)| name != "authorization");
        expect_problem(&send(anonymous).await?, 401, "Unauthenticated", "no").context("no token")?;

        let answer = send(Call::invoke(&function.path, &stranger, "{}")).await?;
        expect_problem(&answer, 403, "PermissionDenied", "no")?;

        for (what, path) in elsewhere(world, &function.path) {
            let answer = send(Call::invoke(&path, &world.token, "{}")).await?;
            expect_problem(&answer, 404, "NoSuchFunction", "no").context(what)?;
        }

        let answer = send(call("").withholding(1024 * 1024 + 1)).await?;
        expect_problem(&answer, 413, "PayloadTooLarge", "no")?;

        let answer = send(call(r#"{"raise": "the-secret-of-the-function"}"#)).await?;
        expect_problem(&answer, 500, "HandlerError", "yes")?;
        ensure!(
            !answer.problem("detail").contains("secret"),
            "a caller sees what the function raised"
        );

        let answer = send(Call::invoke(&pending.path, &world.token, "{}")).await?;
        expect_problem(&answer, 503, "Pending", "no")?;
        ensure!(
            !answer.header("retry-after").is_empty(),
            "503 says when to try again"
        );

        let answer = send(call(r#"{"sleep": 20}"#).with("X-Kruntime-Timeout-Millis", "300")).await?;
        expect_problem(&answer, 504, "DeadlineExceeded", "yes")?;
        let answer = world
            .invoke_until(&function, "{}", 200)
            .await
            .context("after a timeout")?;
        ensure!(
            answer.json()["echo"] == serde_json::json!({}),
            "a late answer reached the next caller"
        );

        busy(world, &function.path, version).await?;
    }
    world.delete("pending").await?;
    world.delete("answers").await
}

/// The same UID under names it does not belong to, and a UID that is nobody's.
fn elsewhere(world: &World, path: &str) -> [(&'static str, String); 3] {
    let uid = path.rsplit('/').next().unwrap_or_default();
    [
        (
            "unknown UID",
            path.replace(uid, "00000000-0000-4000-8000-000000000000:invoke"),
        ),
        ("wrong namespace", path.replace(&world.namespace, "default")),
        ("wrong runtime", path.replace("runtimes/python", "runtimes/bash")),
    ]
}

/// Of two calls at once, one is answered and the other refused, whichever came first.
async fn busy(world: &World, path: &str, version: Version) -> Result<()> {
    let call = Call::invoke(path, &world.token, r#"{"sleep": 2}"#).over(version);
    let (one, other) = tokio::join!(world.gateway.send(&call), world.gateway.send(&call));
    let (one, other) = (one?, other?);
    let (served, refused) = if one.status == 200 {
        (one, other)
    } else {
        (other, one)
    };
    ensure!(
        served.status == 200,
        "neither was served: {} {:?}",
        served.status,
        served.body
    );
    expect_problem(&refused, 429, "Busy", "no")?;
    ensure!(refused.header("retry-after") == "1", "{:?}", refused.headers);
    let left = refused.json()["busyAtMostMillis"].as_u64();
    ensure!(left.is_some_and(|millis| millis > 0), "{:?}", refused.body);
    Ok(())
}
