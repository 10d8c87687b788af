//! What callers saw and what functions did, in a form that can be compared.

use serde::Deserialize;

/// Milliseconds since the run began.
pub type Millis = u64;

/// One call, as its caller saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Called {
    /// Name of the function that was meant.
    pub function: String,
    /// The call's own invocation id.
    pub invocation: String,
    /// When it began.
    pub sent: Millis,
    /// When its end was known.
    pub ended: Millis,
    /// How it ended.
    pub end: End,
}

/// How a call ended for its caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// There was no connection, so nothing of it left.
    NotSent(String),
    /// It left, at least in part, and no whole answer came.
    Broken(String),
    /// An answer came.
    Answered(Answered),
}

/// An answer, as far as it is compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answered {
    /// HTTP status.
    pub status: u16,
    /// `X-Kruntime-Invocation-ID`.
    pub invocation: String,
    /// The body.
    pub body: String,
}

/// One execution, as the function told it while it ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// What the code says it is.
    pub function: String,
    /// The invocation id it was given.
    pub invocation: String,
    /// The Run's attempt that ran it.
    pub attempt: i64,
    /// When the function wrote it. Network cuts can let it arrive much later.
    pub at: Millis,
}

/// What a function returns.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Output {
    /// What the code says it is.
    pub function: String,
    /// The invocation id it was given.
    pub invocation: String,
}

/// What an error says.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Problem {
    /// Of docs/reasons.md.
    pub reason: String,
    /// `no`, `yes` or `unknown`.
    pub dispatched: String,
}

// === impl Answered ===

impl Answered {
    /// What the function returned; `None` for errors and for what no function of ours returns.
    #[must_use]
    pub fn output(&self) -> Option<Output> {
        (self.status == 200)
            .then(|| serde_json::from_str(&self.body).ok())
            .flatten()
    }

    /// What the error says; `None` for a success and for what is no problem document.
    #[must_use]
    pub fn problem(&self) -> Option<Problem> {
        (self.status != 200)
            .then(|| serde_json::from_str(&self.body).ok())
            .flatten()
    }
}

// === impl Called ===

impl Called {
    /// Whether the function answered.
    #[must_use]
    pub fn succeeded(&self) -> bool {
        matches!(&self.end, End::Answered(answer) if answer.status == 200)
    }

    /// How it ended, in two or three words: what calls are counted by.
    #[must_use]
    pub fn word(&self) -> String {
        match &self.end {
            End::NotSent(_) => "not sent".to_owned(),
            End::Broken(_) => "no answer".to_owned(),
            End::Answered(answer) => match answer.problem() {
                Some(problem) => format!("{} {}", answer.status, problem.reason),
                None => answer.status.to_string(),
            },
        }
    }
}
