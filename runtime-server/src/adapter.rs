//! How a language runs functions: one trait, one file per language.
//!
//! An adapter decides and prepares; it starts nothing. The server does that the
//! same way for every language (`worker`).

pub mod bash;
pub mod python;

use std::{ffi::OsString, path::PathBuf};

use crate::worker::wire::Speech;

/// A function as the adapter sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// `file.function` or `pkg.module.function`, as settled by [`crate::handler`].
    pub handler: String,
    /// Where its files are, and where it starts.
    pub working_dir: PathBuf,
    /// Where its module is looked for: the working directory, or a folder in it.
    pub folder: PathBuf,
}

/// What to start for a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    /// The interpreter, absolute.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// How its shim speaks.
    pub speech: Speech,
    /// What the language needs in the environment.
    pub env: Vec<(String, String)>,
    /// What the worker must be able to read besides the image.
    pub read: Vec<PathBuf>,
}

/// One language.
pub trait Adapter: Send + Sync + std::fmt::Debug {
    /// For logs and the health text, for example `python 3.14.2`.
    fn name(&self) -> String;

    /// What to start for `function`.
    ///
    /// # Errors
    /// Says what is wrong with the handler's name; whether the handler exists is
    /// for the worker to find out.
    fn program(&self, function: &Function) -> Result<Program, String>;

    /// Arguments with which the interpreter starts, uses its own library, and ends
    /// well: shows whether an isolation level leaves it able to work.
    fn trial(&self) -> Vec<OsString>;

    /// The file that holds `module`, below its folder; for people.
    fn source_file(&self, module: &str) -> PathBuf;

    /// What `FUNC_RUNTIME` is where nobody sets it: language and version, such as
    /// `python314`.
    fn runtime(&self) -> String {
        let name = self.name();
        let (language, version) = name.split_once(' ').unwrap_or((&name, ""));
        let mut parts = version.split('.');
        format!(
            "{language}{}{}",
            parts.next().unwrap_or_default(),
            parts.next().unwrap_or_default()
        )
    }
}

/// The languages this server has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Language {
    /// CPython 3.9 or later.
    Python,
    /// GNU Bash 4.4 or later.
    Bash,
}
