//! The Lease that says that runtimed is alive and which modes its server supports (C-6.7),
//! and what this process concludes when nobody hears it any more (C-6.4).
//!
//! The scheduler may give a Run to another Pod 40 s after it last saw this Lease renewed. So calls are
//! refused from 30 s after the last renewal that succeeded, counted from before it was sent.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kruntimes_api::names;
use kruntimes_ops::readiness::Guard;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::{lifecycle::facts::Me, metrics::Numbers, server_watch::ServerSilence};

/// How often the Lease is renewed.
pub const RENEW: Duration = Duration::from_secs(10);
/// Without a renewal for this long, calls are refused.
pub const ISOLATED_AFTER: Duration = Duration::from_secs(30);
/// After a failed renewal.
const RETRY: Duration = Duration::from_secs(2);
/// One attempt.
const ATTEMPT: Duration = Duration::from_secs(5);

/// Whether Kubernetes hears us. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Contact {
    /// When the last renewal that succeeded was sent.
    last: Arc<watch::Sender<Option<Instant>>>,
}

// === impl Contact ===

impl Contact {
    /// Nobody has heard of us yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A renewal that was sent at `sent` has succeeded.
    pub fn heard(&self, sent: Instant) {
        self.last.send_replace(Some(sent));
    }

    /// How long ago the last renewal was; `None` before the first.
    #[must_use]
    pub fn silence(&self, now: Instant) -> Option<Duration> {
        let last = *self.last.borrow();
        last.map(|last| now.saturating_duration_since(last))
    }

    /// Whether the last renewal is too long ago.
    #[must_use]
    pub fn is_lost(&self, now: Instant) -> bool {
        self.silence(now).is_none_or(is_long)
    }

    /// Returns once there is contact.
    pub async fn found(&self) {
        let fresh = |last: &Option<Instant>| last.is_some_and(|last| !is_long(last.elapsed()));
        // The sender lives as long as `self`, so that an error cannot happen.
        let _ = self.last.subscribe().wait_for(fresh).await;
    }
}

fn is_long(silence: Duration) -> bool {
    silence >= ISOLATED_AFTER
}

/// Renews for ever, except while the Runtime Server is lost. `ready` drops after the first success.
pub async fn run(
    client: Client,
    me: Me,
    modes: &'static [&'static str],
    contact: Contact,
    silence: ServerSilence,
    numbers: Numbers,
    ready: Guard,
) {
    let leases: Api<Lease> = Api::namespaced(client, &me.namespace);
    let name = names::heartbeat_lease(&me.pod);
    let params = PatchParams::apply(names::MANAGER_RUNTIMED).force();
    let mut ready = Some(ready);
    let mut failing = false;
    loop {
        let sent = Instant::now();
        if silence.is_lost(sent) {
            // The scheduler takes the Pod for lost then and deletes it; nothing less makes sure that no
            // code of its Runs goes on.
            if !failing {
                tracing::warn!(
                    lease = name,
                    "the heartbeat stops, because the Runtime Server is silent or keeps a function that was to end"
                );
            }
            failing = true;
            numbers.isolated.set(i64::from(contact.is_lost(sent)));
            sleep(RETRY).await;
            continue;
        }
        let lease = lease(&me, modes, Timestamp::now());
        let patch = Patch::Apply(&lease);
        let renewed = match timeout(ATTEMPT, leases.patch(&name, &params, &patch)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("no answer within {ATTEMPT:?}")),
        };
        match renewed {
            Ok(()) => {
                contact.heard(sent);
                drop(ready.take());
                if failing {
                    tracing::info!("the heartbeat is heard again");
                }
                failing = false;
                numbers.isolated.set(0);
                sleep(RENEW).await;
            }
            Err(error) => {
                if !failing {
                    tracing::warn!(%error, lease = name, "the heartbeat cannot be renewed");
                }
                failing = true;
                numbers.isolated.set(i64::from(contact.is_lost(Instant::now())));
                sleep(RETRY).await;
            }
        }
    }
}

/// What is applied: owned by the Pod, so that it goes with it.
fn lease(me: &Me, modes: &[&str], now: Timestamp) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": names::heartbeat_lease(&me.pod),
            "namespace": me.namespace,
            "labels": { names::LEASE_LABEL_RUNTIME: me.runtime },
            "annotations": { names::ANNOTATION_MODES: modes.join(",") },
            "ownerReferences": [{
                "apiVersion": "v1",
                "kind": "Pod",
                "name": me.pod,
                "uid": me.pod_uid.as_str(),
            }],
        },
        "spec": {
            "holderIdentity": me.pod_uid.as_str(),
            "leaseDurationSeconds": ISOLATED_AFTER.as_secs(),
            // Kubernetes reads exactly six digits.
            "renewTime": now.strftime("%Y-%m-%dT%H:%M:%S%.6fZ").to_string(),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// C-6.4: contact is lost after 30 seconds.
    #[tokio::test(start_paused = true)]
    async fn contact_is_lost_after_30_seconds() {
        let contact = Contact::new();
        let start = Instant::now();
        assert!(contact.is_lost(start), "before the first renewal");
        contact.heard(start);
        assert!(!contact.is_lost(start + ISOLATED_AFTER - Duration::from_millis(1)));
        assert!(contact.is_lost(start + ISOLATED_AFTER));
        contact.heard(start + ISOLATED_AFTER);
        assert!(!contact.is_lost(start + ISOLATED_AFTER), "resumes by itself");
    }

    #[test]
    fn the_lease_names_pod_modes_and_time() {
        let me = crate::lifecycle::facts::tests::me();
        let now = Timestamp::from_millisecond(1_500).unwrap();
        let lease = lease(&me, &["function"], now);
        assert_eq!(lease["metadata"]["name"], "runtimed-pod-a");
        assert_eq!(lease["metadata"]["annotations"]["kruntimes.io/modes"], "function");
        assert_eq!(lease["spec"]["renewTime"], "1970-01-01T00:00:01.500000Z");
        let parsed: Lease = serde_json::from_value(lease).unwrap();
        assert_eq!(
            parsed.spec.unwrap().holder_identity.as_deref(),
            Some(me.pod_uid.as_str())
        );
    }
}
