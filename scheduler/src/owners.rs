//! Pods that own Runs say so to those who remove Pods (C-7.2).
//!
//! A ReplicaSet that has to give up Pods begins with the lowest deletion cost. So a Pod that owns Runs
//! carries one: in a roll, and when a scaler takes Pods away, it goes last. Marks are brought up to date
//! once in a while and before a roll begins, not with every Run: a Pod that Runs come to and leave all
//! the time is written at most once a period.

use std::time::Duration;

use tokio::time::sleep;

use crate::{
    bind::{Writer, Written},
    facts::ObjectKey,
    hub::Hub,
    metrics::{Metrics, PoolLabels},
};

const PERIOD: Duration = Duration::from_secs(10);
/// Marks written at once; the rest follows.
const BATCH: usize = 50;

/// Runs until dropped.
pub(crate) async fn mark_for_ever(hub: &Hub, writer: &Writer, metrics: &Metrics) {
    loop {
        sleep(PERIOD).await;
        mark(hub, writer, metrics, None).await;
    }
}

/// Brings the marks up to date, of one pool or of all.
pub(crate) async fn mark(hub: &Hub, writer: &Writer, metrics: &Metrics, pool: Option<&ObjectKey>) {
    let mismarked = hub.lock().world.mismarked(pool);
    for (pod, owns) in mismarked.iter().take(BATCH) {
        let result = writer.mark_pod(pod, *owns).await;
        let labels = PoolLabels {
            kind: "Pod",
            result: if result == Written::Done { "done" } else { "failed" },
        };
        metrics.pool_writes.get_or_create(&labels).inc();
        if let Written::Refused(error) | Written::Unknown(error) = result {
            tracing::warn!(pod = pod.key.name, error, "cannot mark a Pod that owns Runs");
        }
    }
}
