//! One trace from the caller to the function, told by every process on the way (conventions of OpenTelemetry).

use anyhow::{Context as _, Result, ensure};
use http::StatusCode;
use kruntimes_e2e::{
    call::Call,
    cluster::{Cluster, eventually},
    stack::{Choices, Stack},
};
use kruntimes_trace::testing::{Collector, Seen};
use serde_json::json;

const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const STATE: &str = "vendor=a:b";

/// Contract 4, C-8.2: client, gateway, runtimed, Runtime Server and handler are one trace, each below the one before. The
/// token is in none of it.
#[tokio::test]
async fn a_call_is_one_trace_from_the_caller_to_the_handler() -> Result<()> {
    let collector = Collector::start();
    let choices = Choices {
        collector: Some(collector.endpoint()),
        ..Choices::default()
    };
    let stack = Stack::start(&Cluster::api().await?, choices).await?;
    let world = &stack.world;
    let code = "def handler(event, context):\n    return [context.traceparent, context.tracestate]\n";
    let function = world.function("traced", code).await?;
    let answer = eventually("the call is answered", || async {
        let call = Call::invoke(&function.path, &world.token, "1")
            .with("traceparent", PARENT)
            .with("tracestate", STATE);
        let answer = world.gateway.send(&call).await?;
        Ok((answer.status == StatusCode::OK).then_some(answer))
    })
    .await?;
    let handler: serde_json::Value = serde_json::from_slice(&answer.body)?;
    let named: Seen = eventually("the innermost span arrives", || async {
        Ok(collector
            .seen()
            .into_iter()
            .find(|span| handler[0] == span.traceparent()))
    })
    .await?;
    ensure!(handler == json!([named.traceparent(), STATE]), "{handler}");
    // From the handler outwards.
    let path = eventually("the whole trace arrives", || async {
        let spans = collector.seen();
        let mut path = vec![named.clone()];
        while let Some(outer) = path
            .last()
            .and_then(|inner| spans.iter().find(|span| span.id == inner.parent))
        {
            path.push(outer.clone());
        }
        Ok((path.len() >= 5).then_some(path))
    })
    .await
    .with_context(|| format!("{:#?}", collector.seen()))?;
    let told: Vec<_> = path
        .iter()
        .rev()
        .map(|span| (span.service.as_str(), span.kind.as_str()))
        .collect();
    ensure!(
        told == [
            ("kruntimes-gateway", "SERVER"),
            ("kruntimes-gateway", "CLIENT"),
            ("kruntimes-runtimed", "SERVER"),
            ("kruntimes-runtimed", "CLIENT"),
            ("kruntimes-runtime-server", "SERVER"),
        ],
        "{told:?}"
    );
    ensure!(
        path.iter()
            .all(|span| span.trace == PARENT[3..35] && span.state == STATE)
    );
    ensure!(
        path.last()
            .is_some_and(|outermost| outermost.parent == PARENT[36..52])
    );
    let ids: Vec<_> = path
        .iter()
        .map(|span| span.get("kruntimes.invocation_id"))
        .filter(|id| !id.is_empty())
        .collect();
    ensure!(ids.len() == 3 && ids.iter().all(|id| id == &ids[0]), "{ids:?}");
    let bytes = String::from_utf8_lossy(&collector.bytes()).into_owned();
    ensure!(!bytes.contains(&world.token), "a collector was told a token");
    Ok(())
}
