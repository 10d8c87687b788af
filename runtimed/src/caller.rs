//! May the caller use this Run? Asked again by the owner, with the token that the gateway forwards
//! (contract 3.6).

use async_trait::async_trait;
use kruntimes_api::keys::RunKey;
use kruntimes_authz::{Authorizer, Bearer, Question, Verdict};
use kruntimes_proto::{
    failure::{Failure, Reason},
    hop,
};
use tonic::metadata::MetadataMap;

/// Answers for the caller of one call.
#[async_trait]
pub trait Callers: Send + Sync + 'static {
    /// Whether whoever sent this metadata may invoke the Run.
    ///
    /// # Errors
    /// Why not, or that it cannot be found out.
    async fn may_invoke(&self, metadata: &MetadataMap, run: &RunKey) -> Result<(), Failure>;
}

/// `--caller-credential omit`: the gateway's identity, which TLS has checked, is enough.
#[derive(Debug, Clone, Copy)]
pub struct GatewayIsEnough;

#[async_trait]
impl Callers for GatewayIsEnough {
    async fn may_invoke(&self, _metadata: &MetadataMap, _run: &RunKey) -> Result<(), Failure> {
        Ok(())
    }
}

#[async_trait]
impl Callers for Authorizer {
    async fn may_invoke(&self, metadata: &MetadataMap, run: &RunKey) -> Result<(), Failure> {
        let values = metadata
            .get_all(hop::AUTHORIZATION)
            .iter()
            .map(|value| value.as_bytes().to_vec());
        let bearer = Bearer::parse(values)
            .map_err(|error| Failure::new(Reason::Unauthenticated, error.to_string()))?;
        let question = Question {
            verb: "get",
            namespace: run.namespace.clone(),
            name: run.name.clone(),
            uid: run.uid.to_string(),
        };
        match self.authorize(&bearer, &question).await {
            Verdict::Allowed { .. } => Ok(()),
            Verdict::Denied => Err(Failure::new(
                Reason::PermissionDenied,
                "the caller may not get this Run",
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
