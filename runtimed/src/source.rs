//! Where code comes from, and the digest that names a registration's inputs.
//!
//! Each Run has one directory, `<workspace>/<run uid>`. It is made before the Run is registered and
//! removed after it is not.

pub mod clear;
pub mod digest;
pub mod inline;

pub use inline::Workspace;

/// Why there is no code. The text goes into the Run's status; it quotes no content.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// `inlinePath` leaves the directory or is none.
    #[error("spec.source.inlinePath must be relative, without an empty, `.` or `..` segment")]
    Path,
    /// `inlinePath` leads into the platform's own directory.
    #[error("spec.source.inlinePath must not begin with .kruntimes, which belongs to the platform")]
    Reserved,
    /// A source this version cannot fetch.
    #[error("spec.source.repoURL is not supported by this version of runtimed; use spec.source.inline")]
    Unsupported,
    /// The file system refused.
    #[error("preparing the work directory: {0}")]
    Io(#[from] std::io::Error),
}
