//! When a Run's time is over (C-6.2).
//!
//! Both deadlines run on the monotonic clock: what the wall clock says enters once, and bounded, so
//! that setting the node's clock ends no function.

use std::time::Duration;

use jiff::Timestamp;
use kruntimes_api::Run;
use tokio::time::Instant;

use crate::runtime_server::Observed;

/// How often the server is asked for its state and activity.
pub const POLL: Duration = Duration::from_secs(2);

/// The end of the Run's life: `spec.timeout` after `startTime`, both as seen `now`.
#[must_use]
pub fn lifetime(run: &Run, wall: Timestamp, now: Instant) -> Option<Instant> {
    let timeout = parse(run.spec.timeout.as_deref()?)?;
    let started = run.status.as_ref()?.start_time.as_ref()?.0;
    // A start in the future is a clock that runs ahead: the whole life is left.
    let lived = Duration::try_from(wall.duration_since(started)).unwrap_or(Duration::ZERO);
    now.checked_add(timeout.saturating_sub(lived))
}

/// A duration as the CRD accepts it, at most about 292 years.
fn parse(text: &str) -> Option<Duration> {
    let parsed: kube::core::Duration = text.parse().ok()?;
    (!parsed.is_negative()).then(|| parsed.into())
}

/// How long one registration has been idle.
#[derive(Debug, Clone)]
pub struct Idle {
    timeout: Duration,
    last: Option<Seen>,
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    at: Instant,
    activity_unix_nano: i64,
    /// `None` while a call runs.
    since: Option<Instant>,
}

// === impl Idle ===

impl Idle {
    /// Of a registration that has not been polled yet; `None` if the function may idle for ever.
    #[must_use]
    pub fn new(run: &Run) -> Option<Self> {
        let seconds = run.spec.mode.function.as_ref()?.idle_timeout_seconds?;
        Some(Self {
            timeout: Duration::from_secs(u64::try_from(seconds).ok()?),
            last: None,
        })
    }

    /// Takes in what the server said.
    pub fn observe(&mut self, observed: &Observed, wall: Timestamp, now: Instant) {
        let activity = observed.last_activity_unix_nano;
        let since = match self.last {
            _ if observed.in_flight > 0 => None,
            Some(last) if last.since.is_some() && last.activity_unix_nano == activity => last.since,
            last => {
                // New since the last poll; how long ago, within that, is the wall clock's word.
                let elapsed =
                    i64::try_from(wall.as_nanosecond()).map_or(0, |wall| wall.saturating_sub(activity));
                let elapsed = Duration::from_nanos(u64::try_from(elapsed).unwrap_or(0));
                let bound = last.map_or(self.timeout, |last| now.saturating_duration_since(last.at));
                now.checked_sub(elapsed.min(bound)).or(Some(now))
            }
        };
        self.last = Some(Seen {
            at: now,
            activity_unix_nano: activity,
            since,
        });
    }

    /// When it expires if nothing happens; `None` while a call runs or nothing is known.
    #[must_use]
    pub fn expires(&self) -> Option<Instant> {
        self.last?.since?.checked_add(self.timeout)
    }
}

#[cfg(test)]
mod tests {
    use kruntimes_api::fixtures;
    use kruntimes_proto::executor::FunctionRegistrationState;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn wall(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).unwrap()
    }

    fn observed(activity_second: i64, in_flight: i32) -> Observed {
        Observed {
            state: FunctionRegistrationState::Ready,
            in_flight,
            last_activity_unix_nano: (1_000_000 + activity_second) * 1_000_000_000,
            fatal_error: String::new(),
        }
    }

    fn idle(seconds: i32) -> Idle {
        let run = fixtures::run("ns", "n")
            .with(|run| run.spec.mode.function.as_mut().unwrap().idle_timeout_seconds = Some(seconds))
            .build();
        Idle::new(&run).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn the_life_ends_a_timeout_after_the_start() {
        let now = Instant::now();
        let run = |timeout: &str, started: Option<i64>| {
            fixtures::run("ns", "n")
                .scheduled_on("pod-a")
                .with(|run| {
                    run.spec.timeout = Some(timeout.to_owned());
                    run.status.as_mut().unwrap().start_time =
                        started.map(|it| k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime(wall(it)));
                })
                .build()
        };
        assert_eq!(
            lifetime(&run("1m30s", Some(0)), wall(30), now),
            Some(now + 60 * SECOND)
        );
        assert_eq!(lifetime(&run("10s", Some(0)), wall(30), now), Some(now), "over");
        assert_eq!(
            lifetime(&run("10s", Some(99)), wall(30), now),
            Some(now + 10 * SECOND),
            "skewed clock"
        );
        assert_eq!(lifetime(&run("10s", None), wall(30), now), None, "not claimed");
        assert_eq!(lifetime(&fixtures::run("ns", "n").build(), wall(30), now), None);
        assert!(lifetime(&run("2562047h", Some(0)), wall(0), now).is_none_or(|end| end > now));
    }

    #[tokio::test(start_paused = true)]
    async fn idle_counts_from_the_last_activity() {
        let now = Instant::now();
        let mut idle = idle(10);
        assert_eq!(idle.expires(), None);
        idle.observe(&observed(-1, 0), wall(0), now);
        assert_eq!(idle.expires(), Some(now + 9 * SECOND));
        idle.observe(&observed(-1, 0), wall(2), now + 2 * SECOND);
        assert_eq!(idle.expires(), Some(now + 9 * SECOND), "the same activity");
        idle.observe(&observed(3, 0), wall(4), now + 4 * SECOND);
        assert_eq!(idle.expires(), Some(now + 13 * SECOND));
    }

    #[tokio::test(start_paused = true)]
    async fn never_during_a_call_however_long() {
        let now = Instant::now();
        let mut idle = idle(1);
        idle.observe(&observed(0, 1), wall(0), now);
        assert_eq!(idle.expires(), None);
        idle.observe(&observed(0, 1), wall(100), now + 100 * SECOND);
        assert_eq!(idle.expires(), None);
        idle.observe(&observed(101, 0), wall(102), now + 102 * SECOND);
        assert_eq!(idle.expires(), Some(now + 102 * SECOND));
    }

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_jumps_ends_nothing() {
        let now = Instant::now();
        let mut idle = idle(10);
        idle.observe(&observed(0, 0), wall(0), now);
        // One hour forward, then an activity written by that clock, then an hour back.
        idle.observe(&observed(0, 0), wall(3600), now + 2 * SECOND);
        assert_eq!(idle.expires(), Some(now + 10 * SECOND));
        idle.observe(&observed(3601, 0), wall(7200), now + 4 * SECOND);
        assert_eq!(idle.expires(), Some(now + 12 * SECOND), "at most one poll ago");
        idle.observe(&observed(5, 0), wall(4), now + 6 * SECOND);
        assert_eq!(
            idle.expires(),
            Some(now + 16 * SECOND),
            "in the future counts as now"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn after_a_restart_the_server_s_clock_goes_on() {
        let now = Instant::now();
        let mut idle = idle(10);
        idle.observe(&observed(-300, 0), wall(0), now + 60 * SECOND);
        assert_eq!(idle.expires(), Some(now + 60 * SECOND));
    }
}
