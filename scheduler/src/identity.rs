//! The peer CA and the gateway's client certificate: kept in Secrets, and published with the gateway's
//! URL and serving CA (C-4).
//!
//! `keep` decides what is made and when; here it is read, stored and told.

mod issue;
mod keep;

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kruntimes_api::names::{
    GATEWAY_CA, GATEWAY_PEER_CA, GATEWAY_URL, MANAGER_SCHEDULER, SECRET_GATEWAY_PEER, SECRET_PEER_CA,
};
use kube::{Api, api::PostParams};
use tokio::{sync::watch, time::sleep};

use self::keep::{Recent, keep, serving_ca};
use crate::{hub::Clock, leader::Context, lease::Term, metrics::Metrics, pools::Published};

/// How often the Secrets are read; a new serving certificate reaches pools within this and the
/// kubelet's own time.
const LOOK: Duration = Duration::from_secs(30);
/// While something is missing.
const LOOK_SOON: Duration = Duration::from_secs(2);
/// Largest serving CA bundle that fits `endpoint.caBundle`, bytes.
const CA_BUNDLE_MAX: usize = 16 * 1024;

/// Keeps the identities of one installation for one term.
pub(crate) struct Identity {
    secrets: Api<Secret>,
    term: Term,
    clock: Clock,
    gateway_url: String,
    serving_secret: String,
    published: watch::Sender<Published>,
    metrics: Metrics,
    /// Serving CAs and peer CAs of others, current and shortly before.
    serving: Recent,
    peers: Recent,
}

/// Why the identities could not be kept.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Keep(#[from] keep::Error),
    #[error("this process leads no more")]
    NotLeader,
}

// === impl Identity ===

impl Identity {
    pub(crate) fn new(context: &Context, term: Term, published: watch::Sender<Published>) -> Self {
        Self {
            secrets: Api::namespaced(context.client.clone(), &context.system_namespace),
            term,
            clock: context.clock,
            gateway_url: context.gateway_url.clone(),
            serving_secret: context.serving_secret.clone(),
            published,
            metrics: context.metrics.clone(),
            serving: Recent::default(),
            peers: Recent::default(),
        }
    }

    /// Runs until dropped.
    pub(crate) async fn run(mut self) {
        loop {
            let pause = match self.look((self.clock)()).await {
                Ok(true) => LOOK,
                Ok(false) => LOOK_SOON,
                // Another term's scheduler was first: read what it made.
                Err(Error::Api(kube::Error::Api(status)))
                    if status.is_conflict() || status.is_already_exists() =>
                {
                    LOOK_SOON
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot keep the peer certificates");
                    2 * LOOK_SOON
                }
            };
            sleep(pause).await;
        }
    }

    /// Makes what is missing or due and publishes; whether all is there.
    async fn look(&mut self, now: Timestamp) -> Result<bool, Error> {
        let ca = self.secrets.get_opt(SECRET_PEER_CA).await?;
        let leaf = self.secrets.get_opt(SECRET_GATEWAY_PEER).await?;
        let kept = keep(ca.as_ref(), leaf.as_ref(), now)?;
        // The CA first: nothing is signed by what is not stored.
        for (name, secret, exists) in [
            (SECRET_PEER_CA, &kept.ca, ca.is_some()),
            (SECRET_GATEWAY_PEER, &kept.leaf, leaf.is_some()),
        ] {
            if let Some(secret) = secret {
                self.store(name, secret, exists).await?;
                tracing::info!(secret = name, "a certificate of the hop is made or renewed");
            }
        }
        self.metrics
            .peer_not_after
            .set(kept.leaf_not_after.map_or(0, |it| it.as_second()));
        let peers = self.peers.bundle(kept.foreign, kept.own, now, usize::MAX);
        let mut data = BTreeMap::from([(GATEWAY_PEER_CA.to_owned(), peers)]);
        let serving = self.secrets.get_opt(&self.serving_secret).await?;
        let complete = serving.is_some();
        if let Some(serving) = serving {
            // Without a serving certificate there is nothing to call, hence no URL.
            data.insert(GATEWAY_URL.to_owned(), self.gateway_url.clone());
            match serving_ca(&serving) {
                Some(bundle) if bundle.len() <= CA_BUNDLE_MAX => {
                    let bundle = self.serving.bundle(vec![bundle], Vec::new(), now, CA_BUNDLE_MAX);
                    data.insert(GATEWAY_CA.to_owned(), bundle);
                }
                Some(bundle) => tracing::error!(
                    secret = self.serving_secret,
                    bytes = bundle.len(),
                    "the serving CA bundle is over 16 KiB and is not published; shorten ca.crt"
                ),
                None => tracing::error!(
                    secret = self.serving_secret,
                    "the serving Secret has no tls.crt in PEM"
                ),
            }
        } else {
            tracing::warn!(
                secret = self.serving_secret,
                "the gateway's serving Secret does not exist yet"
            );
        }
        self.published.send_if_modified(|known| {
            let changed = known.as_ref() != Some(&data);
            *known = Some(data);
            changed
        });
        Ok(complete)
    }

    /// Creates the Secret, or replaces exactly the one that was read.
    async fn store(&self, name: &str, secret: &Secret, exists: bool) -> Result<(), Error> {
        if !self.term.holds() {
            return Err(Error::NotLeader);
        }
        let params = PostParams {
            dry_run: false,
            field_manager: Some(MANAGER_SCHEDULER.to_owned()),
        };
        if exists {
            self.secrets.replace(name, &params, secret).await?;
        } else {
            self.secrets.create(&params, secret).await?;
        }
        Ok(())
    }
}
