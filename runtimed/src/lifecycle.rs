//! From an assignment to a callable function, and back to nothing (C-6).
//!
//! ```text
//! watch ── object ──▶ mailbox ──▶ drive ── facts, local state ──▶ decide ── one action ──▶ act
//!   one per Pod                     one task a Run                 pure                     I/O
//! ```
//!
//! `decide` looks at what the Run object says and at what this process holds, and names the single
//! next step. Each step is idempotent, and each write names the version it was decided on; after
//! every step, successful or not, it is decided anew. There is no other state: a restart, a lost
//! answer and a second event all come out at the same step.

pub mod act;
pub mod decide;
pub mod drive;
pub mod drivers;
pub mod facts;
pub mod health;
pub mod statuses;
pub mod timers;
pub mod watch;

pub use facts::{Facts, Told};
