//! Pods that own Runs say so to those who remove Pods (C-7.2).
//!
//! A ReplicaSet that has to give up Pods begins with the lowest deletion cost. So a Pod that owns Runs
//! carries one: in a roll, and when a scaler takes Pods away, it goes last. Marks are brought up to date
//! once in a while and before a roll begins, not with every Run: a Pod that Runs come to and leave all
//! the time is written at most once a period.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::{
    bind::{Writer, Written},
    facts::ObjectKey,
    hub::Hub,
    metrics::{Metrics, PoolLabels},
};

const PERIOD: Duration = Duration::from_secs(10);
/// How long marks are written in a row; the rest follows.
const BUDGET: Duration = Duration::from_secs(10);

/// Runs until dropped.
pub(crate) async fn mark_for_ever(hub: &Hub, writer: &Writer, metrics: &Metrics) {
    let mut last = None;
    loop {
        sleep(PERIOD).await;
        last = mark(hub, writer, metrics, None, last.as_ref()).await;
    }
}

/// Brings the marks up to date, of one pool or of all, beginning behind `last`, and returns the last one that was
/// tried: Pods that cannot be marked must not keep the others from it.
pub(crate) async fn mark(
    hub: &Hub,
    writer: &Writer,
    metrics: &Metrics,
    pool: Option<&ObjectKey>,
    last: Option<&ObjectKey>,
) -> Option<ObjectKey> {
    let mut mismarked = hub.lock().world.mismarked(pool);
    let done = last.map_or(0, |last| mismarked.partition_point(|(pod, _)| pod.key <= *last));
    mismarked.rotate_left(done);
    let began = Instant::now();
    let mut tried = None;
    for (pod, owns) in mismarked {
        if began.elapsed() >= BUDGET {
            break;
        }
        let result = writer.mark_pod(&pod, owns).await;
        let labels = PoolLabels {
            kind: "Pod",
            result: if result == Written::Done { "done" } else { "failed" },
        };
        metrics.pool_writes.get_or_create(&labels).inc();
        if let Written::Refused(error) | Written::Unknown(error) = result {
            tracing::warn!(pod = pod.key.name, error, "cannot mark a Pod that owns Runs");
        }
        tried = Some(pod.key);
    }
    tried
}
