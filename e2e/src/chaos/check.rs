//! The two histories compared: nothing twice, nothing for another function, and no answer that the
//! functions' own log contradicts.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
};

use super::history::{Answered, Called, End, Millis, Recorded};

/// How long an attempt may go on running after the next one has begun. A Pod deleted without grace is
/// gone from Kubernetes at once, while the kubelet still has to end its processes.
const OVERLAP: Millis = 5_000;

/// What the comparison found.
#[derive(Debug, Default)]
pub struct Verdict {
    /// How many calls ended how.
    pub ends: BTreeMap<String, usize>,
    /// Calls of which their callers cannot know whether they ran.
    pub unknown: usize,
    /// What must not be.
    pub violations: Vec<Violation>,
}

/// One thing that must not be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Which promise it breaks.
    pub kind: Kind,
    /// The invocation concerned.
    pub invocation: String,
    /// What is wrong.
    pub what: String,
}

/// Kinds of violations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// One call ran more than once (C-3.7).
    Double,
    /// A function ran or answered a call that was not for it.
    WrongFunction,
    /// The answer says what the function's log does not (C-3.2).
    Disagreement,
    /// An attempt ran although the next one had taken over long ago (C-7.3).
    LateAttempt,
}

/// Compares. Every call must be there with its end, and every record that arrived.
#[must_use]
pub fn check(calls: &[Called], records: &[Recorded]) -> Verdict {
    let mut verdict = Verdict::default();
    let mut of: HashMap<&str, Vec<&Recorded>> = HashMap::new();
    for record in records {
        of.entry(&record.invocation).or_default().push(record);
    }
    for call in calls {
        let records = of.remove(call.invocation.as_str()).unwrap_or_default();
        *verdict.ends.entry(call.word()).or_default() += 1;
        executions(&mut verdict, call, &records);
        match &call.end {
            End::NotSent(_) if !records.is_empty() => {
                verdict.add(Kind::Disagreement, call, "it was not sent, and it ran".to_owned());
            }
            End::NotSent(_) => {}
            End::Broken(_) => verdict.unknown += 1,
            End::Answered(answer) => answered(&mut verdict, call, answer, records.len()),
        }
    }
    let mut strays: Vec<_> = of.into_iter().collect();
    strays.sort_unstable_by_key(|(invocation, _)| *invocation);
    for (invocation, records) in strays {
        verdict.violations.push(Violation {
            kind: Kind::WrongFunction,
            invocation: invocation.to_owned(),
            what: format!("nobody made this call, and it ran {} times", records.len()),
        });
    }
    late_attempts(&mut verdict, records);
    verdict
}

fn executions(verdict: &mut Verdict, call: &Called, records: &[&Recorded]) {
    if records.len() > 1 {
        verdict.add(Kind::Double, call, format!("it ran {} times", records.len()));
    }
    for record in records {
        if record.function != call.function {
            let what = format!("{} ran a call of {}", record.function, call.function);
            verdict.add(Kind::WrongFunction, call, what);
        }
    }
}

fn answered(verdict: &mut Verdict, call: &Called, answer: &Answered, ran: usize) {
    if answer.invocation != call.invocation {
        let what = format!("it was answered as {:?}", answer.invocation);
        verdict.add(Kind::WrongFunction, call, what);
    }
    if answer.status == 200 {
        match answer.output() {
            Some(output) if output.function == call.function && output.invocation == call.invocation => {}
            _ => verdict.add(
                Kind::WrongFunction,
                call,
                format!("it was answered with {}", answer.body),
            ),
        }
        if ran == 0 {
            verdict.add(Kind::Disagreement, call, "200, and it did not run".to_owned());
        }
        return;
    }
    let problem = answer.problem();
    match problem.as_ref().map(|it| it.dispatched.as_str()) {
        Some("no") if ran > 0 => {
            verdict.add(Kind::Disagreement, call, "dispatched no, and it ran".to_owned());
        }
        Some("no" | "yes") => {}
        Some("unknown") => verdict.unknown += 1,
        _ => verdict.add(
            Kind::Disagreement,
            call,
            "an error that does not say whether it ran".to_owned(),
        ),
    }
}

/// Attempts of a function follow each other.
fn late_attempts(verdict: &mut Verdict, records: &[Recorded]) {
    // Of each function: when each attempt first ran.
    let mut began: HashMap<&str, BTreeMap<i64, Millis>> = HashMap::new();
    for record in records {
        let first = began
            .entry(&record.function)
            .or_default()
            .entry(record.attempt)
            .or_insert(record.at);
        *first = record.at.min(*first);
    }
    for record in records {
        let later = began.get(record.function.as_str()).and_then(|attempts| {
            attempts
                .range(record.attempt + 1..)
                .min_by_key(|(_, began)| **began)
        });
        if let Some((later, began)) = later
            && record.at > began + OVERLAP
        {
            verdict.violations.push(Violation {
                kind: Kind::LateAttempt,
                invocation: record.invocation.clone(),
                what: format!(
                    "attempt {} of {} ran it {} ms after attempt {later} had begun",
                    record.attempt,
                    record.function,
                    record.at - began
                ),
            });
        }
    }
}

// === impl Verdict ===

impl Verdict {
    /// How many violations there are of a kind.
    #[must_use]
    pub fn count(&self, kind: Kind) -> usize {
        self.violations.iter().filter(|it| it.kind == kind).count()
    }

    fn add(&mut self, kind: Kind, call: &Called, what: String) {
        self.violations.push(Violation {
            kind,
            invocation: call.invocation.clone(),
            what,
        });
    }
}

// === impl Violation ===

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}: {}", self.kind, self.invocation, self.what)
    }
}

#[cfg(test)]
mod tests;
