//! The peer CA and the gateway's client certificate: made, rotated, and published with the
//! gateway's URL and serving CA (C-4).
//!
//! A new CA is published beside the old one at once; the gateway's certificate changes to it at
//! its own next renewal and not before pools had time to learn the new CA. A Secret without our
//! annotation belongs to somebody else, such as cert-manager: it is used and left alone.

mod issue;

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use kruntimes_api::names::{
    ANNOTATION_NOT_AFTER, GATEWAY_CA, GATEWAY_PEER_CA, GATEWAY_URL, MANAGER_SCHEDULER, SECRET_GATEWAY_PEER,
    SECRET_PEER_CA,
};
use kruntimes_ops::certificate::not_after_of_pem;
use kube::{
    Api, Client, ResourceExt as _,
    api::{ObjectMeta, PostParams},
};
use tokio::{sync::watch, time::sleep};

use crate::{lease::Term, metrics::Metrics, pool::LABEL_MANAGED_BY, pools::Published};
use issue::{Ca, Pair, fingerprint};

/// How often the Secrets are read; a new serving certificate reaches pools within this and the
/// kubelet's own time.
const LOOK: Duration = Duration::from_secs(30);
/// While something is missing.
const LOOK_SOON: Duration = Duration::from_secs(2);
/// A new CA signs nothing before pools had this time to learn it.
const SPREAD: Duration = Duration::from_secs(600);
const CA_LIFE: Duration = Duration::from_secs(365 * 86_400);
const LEAF_LIFE: Duration = Duration::from_secs(30 * 86_400);
/// Largest serving CA bundle that fits `endpoint.caBundle`, bytes.
const CA_BUNDLE_MAX: usize = 16 * 1024;

const TLS_CRT: &str = "tls.crt";
const TLS_KEY: &str = "tls.key";
const CA_CRT: &str = "ca.crt";
/// Key in the CA's Secret: the CA before this one, while its certificates may still be shown.
const PREVIOUS_CRT: &str = "previous.crt";
/// When a certificate was made, RFC 3339.
const ANNOTATION_MADE_AT: &str = "kruntimes.io/made-at";
/// On the gateway's certificate: SHA-256 of the CA certificate that it is made under.
const ANNOTATION_ISSUER: &str = "kruntimes.io/issuer-sha256";

/// Keeps the identities of one installation for one term.
pub(crate) struct Identity {
    secrets: Api<Secret>,
    term: Term,
    gateway_url: String,
    serving_secret: String,
    published: watch::Sender<Published>,
    metrics: Metrics,
}

// === impl Identity ===

impl Identity {
    pub(crate) fn new(
        client: Client,
        namespace: &str,
        term: Term,
        gateway_url: String,
        serving_secret: String,
        published: watch::Sender<Published>,
        metrics: Metrics,
    ) -> Self {
        let secrets = Api::namespaced(client, namespace);
        Self {
            secrets,
            term,
            gateway_url,
            serving_secret,
            published,
            metrics,
        }
    }

    /// Runs until dropped.
    pub(crate) async fn run(self) {
        loop {
            let pause = match self.look(seconds(Timestamp::now())).await {
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
    async fn look(&self, now: Timestamp) -> Result<bool, Error> {
        let ca = self.ca(now).await?;
        self.leaf(&ca, now).await?;
        let mut data = BTreeMap::from([(GATEWAY_PEER_CA.to_owned(), ca.bundle.clone())]);
        let serving = self.secrets.get_opt(&self.serving_secret).await?;
        let complete = serving.is_some();
        if let Some(serving) = serving {
            // Without a serving certificate there is nothing to call, hence no URL.
            data.insert(GATEWAY_URL.to_owned(), self.gateway_url.clone());
            match serving_ca(&serving) {
                Some(bundle) if bundle.len() <= CA_BUNDLE_MAX => {
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

    /// The CA: found, made or rotated.
    async fn ca(&self, now: Timestamp) -> Result<Authority, Error> {
        let stored = self.secrets.get_opt(SECRET_PEER_CA).await?;
        let known = stored.as_ref().and_then(Stored::of);
        if let (Some(known), false) = (&known, due(known.as_ref(), CA_LIFE, now)) {
            return Authority::of(known);
        }
        if let Some(secret) = &stored
            && !is_ours(secret)
        {
            return Err(Error::Foreign(SECRET_PEER_CA));
        }
        let made = Ca::make(now, CA_LIFE)?;
        let mut data = pair_data(&made.pair);
        // Certificates under the old one may be shown until they are renewed.
        let previous = known
            .as_ref()
            .filter(|it| it.not_after.is_some_and(|end| end > now))
            .map(|it| it.cert.clone());
        if let Some(previous) = &previous {
            data.insert(PREVIOUS_CRT.to_owned(), bytes(previous));
        }
        self.store(SECRET_PEER_CA, stored, data, &made.pair, now).await?;
        tracing::info!(not_after = %made.pair.not_after, rotated = known.is_some(), "a peer CA is made");
        let bundle = format!("{}{}", made.pair.cert, previous.as_deref().unwrap_or_default());
        let mut issuers = vec![made.pair.issuer.clone()];
        issuers.extend(previous.as_deref().map(fingerprint));
        Ok(Authority {
            ca: Some(made),
            issuers,
            bundle,
            made_at: Some(now),
            rotated: known.is_some(),
        })
    }

    /// The gateway's client certificate: found, made or renewed.
    async fn leaf(&self, authority: &Authority, now: Timestamp) -> Result<(), Error> {
        let stored = self.secrets.get_opt(SECRET_GATEWAY_PEER).await?;
        let known = stored.as_ref().and_then(Stored::of);
        if let Some(secret) = &stored
            && known.is_some()
            && !is_ours(secret)
        {
            return Ok(());
        }
        let bundle_is_known = stored
            .as_ref()
            .is_some_and(|it| text(it, CA_CRT).as_deref() == Some(&authority.bundle));
        let fresh = known.as_ref().filter(|it| authority.keeps(it, now));
        let pair = match (fresh, &authority.ca) {
            (Some(known), _) if bundle_is_known => {
                self.observe(known.not_after);
                return Ok(());
            }
            (Some(known), _) => Pair::known(
                known.cert.clone(),
                known.key.clone(),
                known.not_after.unwrap_or(now),
                known.issuer.clone().unwrap_or_default(),
            ),
            (None, Some(ca)) => {
                let made = ca.gateway(now, LEAF_LIFE)?;
                tracing::info!(not_after = %made.not_after, "a client certificate for gateways is made");
                made
            }
            (None, None) => return Err(Error::NoCaKey),
        };
        let mut data = pair_data(&pair);
        data.insert(CA_CRT.to_owned(), bytes(&authority.bundle));
        self.store(SECRET_GATEWAY_PEER, stored, data, &pair, now).await?;
        self.observe(Some(pair.not_after));
        Ok(())
    }

    /// Creates the Secret, or replaces exactly the one that was read.
    async fn store(
        &self,
        name: &str,
        stored: Option<Secret>,
        data: BTreeMap<String, ByteString>,
        pair: &Pair,
        now: Timestamp,
    ) -> Result<(), Error> {
        if !self.term.holds() {
            return Err(Error::NotLeader);
        }
        let params = PostParams {
            dry_run: false,
            field_manager: Some(MANAGER_SCHEDULER.to_owned()),
        };
        let exists = stored.is_some();
        let mut secret = stored.unwrap_or_else(|| Secret {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
            type_: Some("kubernetes.io/tls".to_owned()),
            ..Secret::default()
        });
        secret
            .labels_mut()
            .insert(LABEL_MANAGED_BY.0.to_owned(), LABEL_MANAGED_BY.1.to_owned());
        let annotations = secret.annotations_mut();
        annotations.insert(ANNOTATION_NOT_AFTER.to_owned(), pair.not_after.to_string());
        annotations.insert(ANNOTATION_ISSUER.to_owned(), pair.issuer.clone());
        annotations.insert(ANNOTATION_MADE_AT.to_owned(), now.to_string());
        secret.data = Some(data);
        if exists {
            self.secrets.replace(name, &params, &secret).await?;
        } else {
            self.secrets.create(&params, &secret).await?;
        }
        Ok(())
    }

    fn observe(&self, not_after: Option<Timestamp>) {
        self.metrics
            .peer_not_after
            .set(not_after.map_or(0, |it| it.as_second()));
    }
}

/// Why the identities could not be kept.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(transparent)]
    Issue(#[from] issue::Error),
    #[error("Secret {0} has no usable tls.crt and is not ours to change; fill it or delete it")]
    Foreign(&'static str),
    #[error(
        "Secret kruntimes-peer-ca has no tls.key in PKCS #8, so that no client certificate can be made; provide Secret kruntimes-gateway-peer too"
    )]
    NoCaKey,
    #[error("this process leads no more")]
    NotLeader,
}

/// The CA as it is used.
struct Authority {
    /// `None` when only its certificate is here.
    ca: Option<Ca>,
    /// Fingerprints of the certificates in the bundle.
    issuers: Vec<String>,
    /// New and old, PEM.
    bundle: String,
    made_at: Option<Timestamp>,
    rotated: bool,
}

impl Authority {
    fn of(known: &Stored) -> Result<Self, Error> {
        let ca = match Ca::load(&known.cert, &known.key) {
            Ok(ca) => Some(ca),
            // It may be there for its certificate only, beside a certificate for gateways from elsewhere.
            Err(error) if !known.ours => {
                tracing::debug!(%error, "the key of the peer CA is not used");
                None
            }
            Err(error) => return Err(error.into()),
        };
        let previous = known.previous.clone().unwrap_or_default();
        let certificates = [Some(&known.cert), known.previous.as_ref()];
        Ok(Self {
            ca,
            issuers: certificates
                .into_iter()
                .flatten()
                .map(|it| fingerprint(it))
                .collect(),
            bundle: format!("{}{previous}", known.cert),
            made_at: known.made_at,
            rotated: known.previous.is_some(),
        })
    }

    /// Whether a certificate for gateways stays. One of a CA that nobody trusts any more does not,
    /// however young it is: the CA's Secret was deleted or replaced.
    fn keeps(&self, leaf: &Stored, now: Timestamp) -> bool {
        let trusted = leaf.issuer.as_ref().is_some_and(|it| self.issuers.contains(it));
        trusted && (!due(Some(leaf), LEAF_LIFE, now) || self.is_spreading(now))
    }

    /// Whether pools may not know it yet: the old certificate is still the better one.
    fn is_spreading(&self, now: Timestamp) -> bool {
        let age = self
            .made_at
            .map(|made| Duration::try_from(now.duration_since(made)).unwrap_or_default());
        self.rotated && age.is_some_and(|age| age < SPREAD)
    }
}

/// A certificate as a Secret holds it.
struct Stored {
    cert: String,
    key: String,
    previous: Option<String>,
    not_after: Option<Timestamp>,
    made_at: Option<Timestamp>,
    issuer: Option<String>,
    ours: bool,
}

impl Stored {
    /// `None` without a certificate that parses.
    fn of(secret: &Secret) -> Option<Self> {
        let cert = text(secret, TLS_CRT)?;
        let not_after = Timestamp::from_second(not_after_of_pem(cert.as_bytes())?).ok();
        let made_at = secret
            .annotations()
            .get(ANNOTATION_MADE_AT)
            .and_then(|it| it.parse().ok());
        let key = text(secret, TLS_KEY).unwrap_or_default();
        Some(Self {
            cert,
            key,
            previous: text(secret, PREVIOUS_CRT),
            not_after,
            made_at,
            issuer: secret.annotations().get(ANNOTATION_ISSUER).cloned(),
            ours: is_ours(secret),
        })
    }
}

/// Whether a certificate is missing, or ours and within its last third.
fn due(known: Option<&Stored>, life: Duration, now: Timestamp) -> bool {
    let Some(known) = known else { return true };
    if !known.ours {
        return false;
    }
    let Some(end) = known.not_after else { return true };
    let left = Duration::try_from(end.duration_since(now)).unwrap_or_default();
    left < life / 3
}

/// Certificates count in whole seconds.
fn seconds(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second()).unwrap_or(at)
}

fn is_ours(secret: &Secret) -> bool {
    secret.annotations().contains_key(ANNOTATION_NOT_AFTER)
}

/// What clients must trust: the CA beside the serving certificate, else the certificate itself.
fn serving_ca(secret: &Secret) -> Option<String> {
    text(secret, CA_CRT)
        .filter(|it| is_pem(it))
        .or_else(|| text(secret, TLS_CRT).filter(|it| is_pem(it)))
}

fn is_pem(text: &str) -> bool {
    not_after_of_pem(text.as_bytes()).is_some()
}

fn text(secret: &Secret, key: &str) -> Option<String> {
    let bytes = secret.data.as_ref()?.get(key)?;
    let text = String::from_utf8(bytes.0.clone()).ok()?;
    (!text.trim().is_empty()).then_some(text)
}

fn pair_data(pair: &Pair) -> BTreeMap<String, ByteString> {
    BTreeMap::from([
        (TLS_CRT.to_owned(), bytes(&pair.cert)),
        (TLS_KEY.to_owned(), bytes(&pair.key)),
    ])
}

fn bytes(text: &str) -> ByteString {
    ByteString(text.as_bytes().to_vec())
}

#[cfg(test)]
mod tests;
