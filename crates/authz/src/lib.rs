//! May this caller use this Run? One code for gateway and owner.
//!
//! The caller's own token asks Kubernetes (a SelfSubjectAccessReview for exactly that Run); the
//! answer is kept for seconds, under a digest of the token. Nothing here can print a token (C-3.6).
//!
//! ```text
//! headers ─ token ─▶ Bearer ─ cache ─┬─ hit ──────────────────▶ Verdict
//!                                    └─ miss ─ review ─ ttl ──▶ Verdict, kept
//! ```

pub mod cache;
pub mod review;
pub mod token;
pub mod ttl;
pub mod turns;

mod authorizer;

pub use authorizer::{Authorizer, Limits, NoObserver, Observer, Verdict};
pub use review::{NotAnonymous, Question};
pub use token::{Bearer, TokenError};
pub use ttl::{Caps, CapsError};
