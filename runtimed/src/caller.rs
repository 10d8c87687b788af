//! May the caller use this Run? Asked again by the owner, with the token that the gateway forwards
//! (C-3.6).

use async_trait::async_trait;
use kruntimes_api::keys::RunKey;
use kruntimes_authz::{Authorizer, Bearer, Question, Verdict};
use kruntimes_proto::{
    failure::{Failure, Reason},
    hop,
};
use tonic::metadata::MetadataMap;

/// What a caller wants of a Run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// To run it, or to know whether it could.
    Invoke,
    /// To end somebody's running call.
    Cancel,
}

/// Answers for the caller of one call.
#[async_trait]
pub trait Callers: Send + Sync + 'static {
    /// Whether whoever sent this metadata may do that with the Run.
    ///
    /// # Errors
    /// Why not, or that it cannot be found out.
    async fn may(&self, wish: Wish, metadata: &MetadataMap, run: &RunKey) -> Result<(), Failure>;
}

/// `--caller-credential omit`: the gateway's identity, which TLS has checked, is enough.
#[derive(Debug, Clone, Copy)]
pub struct GatewayIsEnough;

#[async_trait]
impl Callers for GatewayIsEnough {
    async fn may(&self, _wish: Wish, _metadata: &MetadataMap, _run: &RunKey) -> Result<(), Failure> {
        Ok(())
    }
}

#[async_trait]
impl Callers for Authorizer {
    async fn may(&self, wish: Wish, metadata: &MetadataMap, run: &RunKey) -> Result<(), Failure> {
        let values = metadata
            .get_all(hop::AUTHORIZATION)
            .iter()
            .map(|value| value.as_bytes());
        let bearer = Bearer::parse(values)
            .map_err(|error| Failure::new(Reason::Unauthenticated, error.to_string()))?;
        let question = Question {
            verb: wish.verb(),
            namespace: run.namespace.as_str().into(),
            name: run.name.as_str().into(),
            uid: run.uid.to_string().into(),
        };
        match self.authorize(&bearer, &question).await {
            Verdict::Allowed { .. } => Ok(()),
            Verdict::Denied => Err(Failure::new(
                Reason::PermissionDenied,
                format!("the caller may not {} this Run", wish.verb()),
            )),
            Verdict::Rejected => Err(Failure::new(
                Reason::Unauthenticated,
                "Kubernetes does not accept the token",
            )),
            Verdict::Unavailable => Err(Failure::new(
                Reason::AuthorizationUnavailable,
                "no access review was possible",
            )),
        }
    }
}

// === impl Wish ===

impl Wish {
    /// The verb on the Run that is reviewed.
    #[must_use]
    pub fn verb(self) -> &'static str {
        match self {
            Self::Invoke => "get",
            Self::Cancel => "update",
        }
    }
}
