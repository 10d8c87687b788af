//! Policy and failures → next attempt or exhausted.
//!
//! The budget counts failed attempts (`status.failedAttempts`), not assignments:
//! `status.attempt` is the fence and also grows when a Pod hands its Runs over.

use std::time::Duration;

use crate::run::{Mode, RetryPolicy};

/// Attempts of a function without a policy.
pub const FUNCTION_ATTEMPTS: i32 = 10;
/// Attempts of a task without a policy.
pub const TASK_ATTEMPTS: i32 = 1;
/// Pause before the second attempt without a policy.
pub const DEFAULT_BACKOFF: Duration = Duration::from_secs(1);
/// Longest pause between two attempts, before jitter.
pub const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Longest pause between two attempts: what is further away was not written by a clock like ours.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(72);
/// A function that was Ready for this long begins a new count of failures.
pub const HEALTHY_AFTER: Duration = Duration::from_secs(600);
/// The reason no policy tries again.
pub const REASON_CANCELLED: &str = "Cancelled";

/// What follows a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Another attempt after a pause.
    Retry {
        /// Failed attempts so far, this one included.
        failed: i32,
        /// Pause before the next assignment.
        after: Duration,
    },
    /// No further attempt: the Run has failed.
    Exhausted {
        /// Failed attempts, this one included.
        failed: i32,
    },
}

/// Decides after an attempt failed.
///
/// `failed_before` is `status.failedAttempts`; `ready_for` says how long the failed
/// attempt had been Ready, if it was; `jitter` is drawn from 0.0..1.0 and spreads
/// the pause by ±20 %.
#[must_use]
pub fn next(
    mode: &Mode,
    policy: Option<&RetryPolicy>,
    reason: &str,
    failed_before: i32,
    ready_for: Option<Duration>,
    jitter: f64,
) -> Next {
    let healthy = mode.function.is_some() && ready_for.is_some_and(|time| time >= HEALTHY_AFTER);
    let failed = if healthy {
        1
    } else {
        failed_before.max(0).saturating_add(1)
    };
    let usual = if mode.function.is_some() {
        FUNCTION_ATTEMPTS
    } else {
        TASK_ATTEMPTS
    };
    let attempts = policy.and_then(|policy| policy.max_attempts).unwrap_or(usual);
    let reasons = policy
        .and_then(|policy| policy.retryable_reasons.as_deref())
        .unwrap_or_default();
    let retryable =
        reason != REASON_CANCELLED && (reasons.is_empty() || reasons.iter().any(|it| it == reason));
    if !retryable || failed >= attempts {
        return Next::Exhausted { failed };
    }
    let first = policy
        .and_then(|policy| policy.backoff.as_deref())
        .and_then(parse_duration)
        .unwrap_or(DEFAULT_BACKOFF);
    let doublings = u32::try_from(failed - 1).unwrap_or(0).min(16);
    let pause = first.saturating_mul(1 << doublings).min(MAX_BACKOFF);
    Next::Retry {
        failed,
        after: pause.mul_f64(0.8 + 0.4 * jitter.clamp(0.0, 1.0)),
    }
}

/// Reads a duration as the CRD accepts it, for example `1h30m` or `500ms`;
/// `None` for anything else and for negative ones.
#[must_use]
pub fn parse_duration(text: &str) -> Option<Duration> {
    let parsed: kube::core::Duration = text.parse().ok()?;
    let negative = text.starts_with('-');
    (!negative).then(|| parsed.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::{FunctionMode, TaskMode};

    fn function() -> Mode {
        Mode {
            task: None,
            function: Some(FunctionMode {
                handler: "main.handler".to_owned(),
                idle_timeout_seconds: None,
            }),
        }
    }

    fn task() -> Mode {
        Mode {
            task: Some(TaskMode::default()),
            function: None,
        }
    }

    /// C-2, `retryPolicy`.
    #[test]
    fn without_a_policy_a_task_has_one_attempt_and_a_function_ten() {
        assert_eq!(
            next(&task(), None, "RuntimeError", 0, None, 0.5),
            Next::Exhausted { failed: 1 }
        );
        for before in 0..9 {
            assert!(matches!(
                next(&function(), None, "PodGone", before, None, 0.5),
                Next::Retry { .. }
            ));
        }
        assert_eq!(
            next(&function(), None, "PodGone", 9, None, 0.5),
            Next::Exhausted { failed: 10 }
        );
    }

    /// C-2, `retryPolicy.backoff`.
    #[test]
    fn the_pause_doubles_up_to_a_minute_and_jitters_by_a_fifth() {
        let pause = |before, jitter| match next(&function(), None, "PodGone", before, None, jitter) {
            Next::Retry { after, .. } => after,
            Next::Exhausted { .. } => unreachable!("within the budget"),
        };
        assert_eq!(pause(0, 0.5), Duration::from_secs(1));
        assert_eq!(pause(3, 0.5), Duration::from_secs(8));
        assert_eq!(pause(8, 0.5), MAX_BACKOFF);
        assert_eq!(pause(8, 0.0), Duration::from_secs(48));
        assert_eq!(pause(8, 1.0), Duration::from_secs(72));
    }

    #[test]
    fn ten_minutes_of_service_begin_a_new_count() {
        let healthy = Some(HEALTHY_AFTER);
        let after = next(&function(), None, "PodGone", 9, healthy, 0.5);
        assert_eq!(
            after,
            Next::Retry {
                failed: 1,
                after: DEFAULT_BACKOFF
            }
        );
    }

    /// C-2, `retryPolicy.retryableReasons`.
    #[test]
    fn only_listed_reasons_are_tried_again_and_never_a_cancel() {
        let policy = RetryPolicy {
            max_attempts: Some(5),
            backoff: Some("250ms".to_owned()),
            retryable_reasons: Some(vec!["PodGone".to_owned()]),
        };
        let after = |reason| next(&function(), Some(&policy), reason, 0, None, 0.5);
        assert_eq!(
            after("PodGone"),
            Next::Retry {
                failed: 1,
                after: Duration::from_millis(250)
            }
        );
        assert_eq!(after("HandlerInvalid"), Next::Exhausted { failed: 1 });
        assert_eq!(
            next(&function(), None, REASON_CANCELLED, 0, None, 0.5),
            Next::Exhausted { failed: 1 }
        );
    }

    #[test]
    fn durations_are_read_as_the_api_accepts_them() {
        assert_eq!(parse_duration("1h30m"), Some(Duration::from_secs(5400)));
        assert_eq!(parse_duration("1.5s"), Some(Duration::from_millis(1500)));
        assert_eq!(parse_duration("-1s"), None);
        assert_eq!(parse_duration("soon"), None);
    }
}
