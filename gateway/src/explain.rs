//! One page about a function: whether a call made now would be let through, and if not, why (C-3.11).
//!
//! Pure: what the route table knows, and what the owner said, if anybody asked it.

use std::time::Duration;

use bytes::Bytes;
use kruntimes_proto::{
    failure::{Failure, Reason},
    owner::{ExplainResponse, Told},
};
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    error::InvokeError,
    hop::HopError,
    routes::{Entry, Route, State},
};

/// What an owner was asked for, and what came of it.
pub type Said<'a> = (&'a Route, Result<ExplainResponse, HopError>);

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Page<'a> {
    namespace: &'a str,
    name: &'a str,
    runtime: &'a str,
    uid: String,
    /// Whether a call made now would be let through.
    callable: bool,
    /// Status and reason it would be answered with; `Ready` when it would be let through.
    status: u16,
    reason: &'a str,
    detail: String,
    /// What the Run's conditions say against it.
    conditions: Option<&'a str>,
    attempt: i32,
    /// Age of what the gateway knows of Runs.
    route_age_millis: u64,
    owner: Option<Value>,
}

/// The page, as JSON for people.
#[must_use]
pub fn page(entry: &Entry, age: Duration, said: Option<&Said<'_>>) -> Bytes {
    let refusal = refusal(entry, said);
    let row = refusal.as_ref().map(InvokeError::row);
    let page = Page {
        namespace: &entry.key.namespace,
        name: &entry.key.name,
        runtime: &entry.runtime,
        uid: entry.key.uid.to_string(),
        callable: refusal.is_none(),
        status: row.map_or(200, |row| row.status),
        reason: row.map_or("Ready", |row| row.reason),
        detail: refusal.map_or_else(
            || "a call made now would be let through".to_owned(),
            |refusal| refusal.to_string(),
        ),
        conditions: entry.why.as_deref(),
        attempt: entry.attempt,
        route_age_millis: u64::try_from(age.as_millis()).unwrap_or(u64::MAX),
        owner: said.map(owner),
    };
    // Texts and numbers only: this cannot fail.
    let mut body = serde_json::to_vec_pretty(&page).unwrap_or_default();
    body.push(b'\n');
    body.into()
}

/// What a call would be refused with: by the gateway first, then by the owner.
fn refusal(entry: &Entry, said: Option<&Said<'_>>) -> Option<InvokeError> {
    match &entry.state {
        State::NotReady(why) => return Some(InvokeError::NotReady(*why)),
        State::Ended { phase, reason } => {
            return Some(InvokeError::FunctionEnded {
                phase: phase.clone(),
                reason: reason.clone(),
            });
        }
        State::Ready(_) => {}
    }
    match said {
        Some((_, Ok(says))) if says.callable => None,
        Some((_, Ok(says))) => {
            // A newer owner may have words that are not known here.
            let reason = Reason::parse(&says.reason).unwrap_or(Reason::ServerUnavailable);
            Some(InvokeError::Answered(Failure::new(reason, says.detail.clone())))
        }
        Some((_, Err(error))) => Some(unreached(error)),
        // A route that is Ready has an owner.
        None => None,
    }
}

/// No call was made, so nothing is said of one.
fn unreached(error: &HopError) -> InvokeError {
    InvokeError::OwnerUnreachable(match error {
        HopError::Answered(failure) => return InvokeError::Answered(failure.clone()),
        HopError::NotSent(why) | HopError::Unknown(why) => why.clone(),
        HopError::TooLate | HopError::Deadline => "it does not answer in time".to_owned(),
        HopError::BadAnswer(what) => (*what).to_owned(),
    })
}

fn owner((route, said): &Said<'_>) -> Value {
    let mut page = match said {
        Ok(says) => told(says),
        Err(error) => json!({ "answers": false, "error": unreached(error).to_string() }),
    };
    page["address"] = json!(route.owner.address);
    page["podUid"] = json!(route.pod_uid.as_str());
    page
}

fn told(says: &ExplainResponse) -> Value {
    let registration = says.registration.as_ref().map(|registration| {
        json!({
            "heldMillis": registration.held_millis,
            "serverAnswers": registration.answers,
            "state": registration.state,
            "inFlight": registration.in_flight,
            "idleMillis": registration.idle_millis,
            "fatalError": registration.fatal_error,
        })
    });
    let running = says.running.as_ref().map(|running| {
        json!({
            "invocationId": running.invocation_id,
            "runningMillis": running.running_millis,
            "atMostMillis": running.at_most_millis,
            "cancelled": running.cancelled,
        })
    });
    let answered = |told: &Option<Told>| {
        told.as_ref()
            .map(|told| json!({ "reason": told.reason, "millisAgo": told.millis_ago }))
    };
    json!({
        "answers": true,
        "attempt": says.attempt,
        "state": says.state,
        "callable": says.callable,
        "reason": says.reason,
        "detail": says.detail,
        "registration": registration,
        "running": running,
        "lastRefusal": answered(&says.last_refusal),
        "lastFailure": answered(&says.last_failure),
        "heardMillisAgo": says.heard_millis_ago,
        "lifeLeftMillis": says.life_left_millis,
    })
}

#[cfg(test)]
mod tests {
    use kruntimes_proto::owner::RunningCall;

    use super::*;
    use crate::routes::{
        NotReady,
        table::tests::{entry, ready},
    };

    fn shown(entry: &Entry, said: Option<Result<ExplainResponse, HopError>>) -> Value {
        let route = entry.route.clone();
        let said = said.map(|said| (route.as_ref().unwrap(), said));
        serde_json::from_slice(&page(entry, Duration::from_millis(1500), said.as_ref())).unwrap()
    }

    fn says(callable: bool, reason: &str) -> ExplainResponse {
        ExplainResponse {
            state: "Ready".into(),
            callable,
            reason: reason.into(),
            detail: "the words of the owner".into(),
            ..ExplainResponse::default()
        }
    }

    /// C-3.11
    #[test]
    fn the_page_says_what_a_call_would_be_answered_with() {
        let mut pending = entry(0, State::NotReady(NotReady::Pending));
        pending.why = Some("Scheduled=CapacityFull: every Pod is full".into());
        let ended = entry(
            1,
            State::Ended {
                phase: "Timeout".into(),
                reason: "IdleTimeout".into(),
            },
        );
        let ready = ready(2, "p");
        let stale = HopError::Answered(Failure::new(Reason::StaleRoute, "not mine"));
        for (entry, said, status, reason) in [
            (&pending, None, 503, "Pending"),
            (&ended, None, 410, "FunctionEnded"),
            (&ready, Some(Ok(says(true, ""))), 200, "Ready"),
            (&ready, Some(Ok(says(false, "Busy"))), 429, "Busy"),
            (
                &ready,
                Some(Ok(says(false, "OwnerIsolated"))),
                503,
                "OwnerIsolated",
            ),
            (&ready, Some(Ok(says(false, "Novel"))), 503, "ServerUnavailable"),
            (
                &ready,
                Some(Err(HopError::NotSent("gone".into()))),
                503,
                "OwnerUnreachable",
            ),
            (&ready, Some(Err(HopError::Deadline)), 503, "OwnerUnreachable"),
            (&ready, Some(Err(stale)), 503, "StaleRoute"),
        ] {
            let page = shown(entry, said);
            assert_eq!(
                (page["status"].clone(), page["reason"].clone()),
                (json!(status), json!(reason))
            );
            assert_eq!(page["callable"], status == 200, "{page}");
            assert_eq!(page["routeAgeMillis"], 1500);
            assert!(!page["detail"].as_str().unwrap().is_empty(), "{page}");
        }
        assert_eq!(
            shown(&pending, None)["conditions"],
            "Scheduled=CapacityFull: every Pod is full"
        );
    }

    /// C-3.11
    #[test]
    fn the_owner_s_word_is_on_the_page() {
        let entry = ready(2, "p");
        let mut busy = says(false, "Busy");
        busy.running = Some(RunningCall {
            invocation_id: "inv_1".into(),
            running_millis: 10,
            at_most_millis: 20,
            cancelled: false,
        });
        let owner = &shown(&entry, Some(Ok(busy)))["owner"];
        assert_eq!(owner["running"]["invocationId"], "inv_1");
        assert_eq!(owner["address"], "10.0.0.1:9443");
        assert_eq!(
            (owner["answers"].clone(), owner["registration"].clone()),
            (json!(true), json!(null))
        );
        let silent = &shown(&entry, Some(Err(HopError::Deadline)))["owner"];
        assert_eq!(silent["answers"], false);
    }
}
