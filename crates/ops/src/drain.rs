//! How a process ends: signal, stop accepting, wait for work, deadline.
//!
//! ```text
//! running ──stop()──▶ stopping ──work done, or deadline──▶ ended
//!            │            │                                  │
//!      `stopping()`   tasks of `spawn` and        tasks of `spawn_background`
//!      is cancelled   guards are waited for       are dropped
//! ```
//!
//! This is the one place that spawns tasks, so that stopping can wait for all of them.

use std::{
    collections::BTreeMap,
    fmt, io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    task::JoinHandle,
    time::{Instant, timeout, timeout_at},
};
pub use tokio_util::sync::CancellationToken;
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};

/// How long background tasks get to be dropped once the work is over. They hold no caller's work.
const BACKGROUND_END: Duration = Duration::from_secs(1);

/// The life of this process; clones share it.
#[derive(Clone)]
pub struct Drain {
    shared: Arc<Shared>,
}

struct Shared {
    stopping: CancellationToken,
    hurry: CancellationToken,
    ended: CancellationToken,
    work: TaskTracker,
    background: TaskTracker,
    cause: Mutex<Option<Cause>>,
    names: Mutex<BTreeMap<u64, &'static str>>,
    next: AtomicU64,
}

/// Why a process stops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cause {
    /// Somebody asked, by a signal or in the program: the exit code is 0.
    Asked(&'static str),
    /// A task that must run as long as the process has panicked: the exit code is not 0.
    Panicked(&'static str),
}

/// How waiting ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Why the process stopped.
    pub cause: Cause,
    /// Names of tasks that were cut off at the deadline, sorted, with repetitions.
    pub cut_off: Vec<&'static str>,
    /// How many guards and tasks had not ended at the deadline.
    pub unfinished: usize,
}

/// One piece of work in flight; waiting takes until it drops.
#[must_use = "the work counts as finished when the guard drops"]
pub struct InFlight {
    _token: TaskTrackerToken,
}

/// SIGTERM and SIGINT, for a process with its own idea of when to stop.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

// === impl Drain ===

impl Default for Drain {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Drain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drain")
            .field("stopping", &self.is_stopping())
            .field("in_flight", &self.in_flight())
            .finish()
    }
}

impl Drain {
    /// A running process with no work.
    #[must_use]
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Shared {
                stopping: CancellationToken::new(),
                hurry: CancellationToken::new(),
                ended: CancellationToken::new(),
                work: TaskTracker::new(),
                background: TaskTracker::new(),
                cause: Mutex::new(None),
                names: Mutex::new(BTreeMap::new()),
                next: AtomicU64::new(0),
            }),
        }
    }

    /// Starts work that ends by itself, at the latest soon after [`Drain::stopping`]; [`Drain::wait`]
    /// waits for it. A panic is logged and ends this task only.
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place where tasks start, so that stopping can wait for them"
    )]
    pub fn spawn<F>(&self, name: &'static str, work: F) -> JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let entry = Entry::new(self, name, Kind::Work);
        tokio::spawn(self.shared.work.track_future(async move {
            let _entry = entry;
            work.await
        }))
    }

    /// Starts a task that serves the work of others, such as a watch: it runs until all work is
    /// over and is dropped then. If it panics, the process stops: it would go on without that part.
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place where tasks start, so that stopping can wait for them"
    )]
    pub fn spawn_background<F>(&self, name: &'static str, task: F) -> JoinHandle<()>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let entry = Entry::new(self, name, Kind::Background);
        let ended = self.shared.ended.clone();
        tokio::spawn(self.shared.background.track_future(async move {
            let _entry = entry;
            tokio::select! {
                () = task => {}
                () = ended.cancelled() => {}
            }
        }))
    }

    /// Counts one piece of work that is no task of its own.
    pub fn guard(&self) -> InFlight {
        InFlight {
            _token: self.shared.work.token(),
        }
    }

    /// How many guards and tasks of [`Drain::spawn`] are alive.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.work.len()
    }

    /// Cancelled when the process shall accept nothing new.
    #[must_use]
    pub fn stopping(&self) -> CancellationToken {
        self.shared.stopping.clone()
    }

    /// Whether the process accepts nothing new.
    #[must_use]
    pub fn is_stopping(&self) -> bool {
        self.shared.stopping.is_cancelled()
    }

    /// Begins to stop. The first cause stays.
    pub fn stop(&self, cause: Cause) {
        lock(&self.shared.cause).get_or_insert(cause);
        self.shared.stopping.cancel();
    }

    /// Stops at the first SIGTERM or SIGINT and cuts waiting short at the second.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub fn stop_on_signals(&self) -> io::Result<()> {
        let mut signals = Signals::new()?;
        let drain = self.clone();
        self.spawn_background("signals", async move {
            let name = signals.next().await;
            tracing::info!(signal = name, "stopping");
            drain.stop(Cause::Asked(name));
            let name = signals.next().await;
            tracing::warn!(signal = name, "stopping at once");
            drain.shared.hurry.cancel();
        });
        Ok(())
    }

    /// Waits until the process begins to stop, then for all work, at most `grace`, and ends the
    /// background tasks. Call it once, last.
    pub async fn wait(&self, grace: Duration) -> Outcome {
        self.shared.stopping.cancelled().await;
        let deadline = Instant::now() + grace;
        self.shared.work.close();
        let finished = tokio::select! {
            done = timeout_at(deadline, self.shared.work.wait()) => done.is_ok(),
            () = self.shared.hurry.cancelled() => false,
        };
        let (cut_off, unfinished) = if finished {
            (Vec::new(), 0)
        } else {
            (self.names(), self.in_flight())
        };
        if unfinished > 0 {
            tracing::warn!(unfinished, tasks = ?cut_off, "work is cut off");
        }
        self.shared.ended.cancel();
        self.shared.background.close();
        if timeout(BACKGROUND_END, self.shared.background.wait())
            .await
            .is_err()
        {
            tracing::warn!(tasks = ?self.names(), "background tasks do not end");
        }
        let cause = lock(&self.shared.cause).clone().unwrap_or(Cause::Asked("stop"));
        Outcome {
            cause,
            cut_off,
            unfinished,
        }
    }

    /// Names of the tasks that are alive, background tasks included once the work is over.
    fn names(&self) -> Vec<&'static str> {
        let ended = self.shared.ended.is_cancelled();
        let mut names: Vec<_> = lock(&self.shared.names)
            .iter()
            .filter(|(number, _)| ended || Kind::of(**number) == Kind::Work)
            .map(|(_, name)| *name)
            .collect();
        names.sort_unstable();
        names
    }
}

// === impl Outcome ===

impl Outcome {
    /// Whether somebody asked to stop and everything finished in time.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        matches!(self.cause, Cause::Asked(_)) && self.unfinished == 0
    }
}

// === impl InFlight ===

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InFlight")
    }
}

// === impl Signals ===

impl Signals {
    /// From now on these signals end nothing by themselves.
    ///
    /// # Errors
    /// When the handlers cannot be installed.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// The name of the next signal.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Work,
    Background,
}

// === impl Kind ===

impl Kind {
    /// The kind is kept in the lowest bit of a task's number.
    fn of(number: u64) -> Self {
        if number & 1 == 0 {
            Self::Work
        } else {
            Self::Background
        }
    }
}

/// A task's name in the list of those alive; notices when its task unwinds.
struct Entry {
    drain: Drain,
    number: u64,
    name: &'static str,
}

// === impl Entry ===

impl Entry {
    fn new(drain: &Drain, name: &'static str, kind: Kind) -> Self {
        let serial = drain.shared.next.fetch_add(2, Ordering::Relaxed);
        let number = serial | u64::from(kind == Kind::Background);
        lock(&drain.shared.names).insert(number, name);
        Self {
            drain: drain.clone(),
            number,
            name,
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        lock(&self.drain.shared.names).remove(&self.number);
        if std::thread::panicking() {
            tracing::error!(task = self.name, "a task panicked");
            if Kind::of(self.number) == Kind::Background {
                self.drain.stop(Cause::Panicked(self.name));
            }
        }
    }
}

/// Nothing that holds these locks can panic half-way, so a poisoned one is still good.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::sync::oneshot;

    use super::*;

    const GRACE: Duration = Duration::from_secs(300);

    /// C-3.13
    #[tokio::test(start_paused = true)]
    async fn waits_for_work_and_ends_the_background_afterwards() {
        let drain = Drain::new();
        let (finish, finished) = oneshot::channel::<()>();
        let (alive, dropped) = oneshot::channel::<()>();
        drain.spawn("call", async move {
            let _ = finished.await;
        });
        drain.spawn_background("watch", async move {
            let _alive = alive;
            pending::<()>().await;
        });
        let waiting = drain.spawn("test", {
            // A task of the test's own drain, or it would wait for itself.
            let drain = drain.clone();
            async move { drain.is_stopping() }
        });
        assert!(!waiting.await.expect("no panic"));
        drain.stop(Cause::Asked("test"));
        let outcome = {
            let wait = drain.wait(GRACE);
            tokio::pin!(wait);
            tokio::select! {
                biased;
                _ = &mut wait => unreachable!("work is in flight"),
                () = tokio::task::yield_now() => {}
            }
            finish.send(()).expect("the call waits");
            wait.await
        };
        assert!(outcome.is_clean(), "{outcome:?}");
        assert!(dropped.await.is_err(), "the watch was dropped");
    }

    #[tokio::test(start_paused = true)]
    async fn a_guard_holds_the_process_until_the_deadline() {
        let drain = Drain::new();
        let _call = drain.guard();
        drain.spawn("stuck", pending::<()>());
        drain.stop(Cause::Asked("test"));
        let began = Instant::now();
        let outcome = drain.wait(GRACE).await;
        assert_eq!(began.elapsed(), GRACE);
        assert_eq!((outcome.cut_off, outcome.unfinished), (vec!["stuck"], 2));
    }

    /// C-3.13
    #[tokio::test(start_paused = true)]
    async fn nothing_in_flight_exits_at_once() {
        let drain = Drain::new();
        drop(drain.guard());
        drain.stop(Cause::Asked("test"));
        let began = Instant::now();
        assert!(drain.wait(GRACE).await.is_clean());
        assert_eq!(began.elapsed(), Duration::ZERO);
    }

    #[tokio::test]
    async fn a_background_panic_stops_the_process_a_panic_of_work_does_not() {
        let drain = Drain::new();
        let work = drain.spawn("call", async { panic!("provoked") });
        assert!(work.await.is_err());
        assert!(!drain.is_stopping());
        assert_eq!(drain.in_flight(), 0, "its place is free");
        drain.spawn_background("watch", async { panic!("provoked") });
        let outcome = drain.wait(GRACE).await;
        assert_eq!(outcome.cause, Cause::Panicked("watch"));
        assert!(!outcome.is_clean());
    }

    #[tokio::test]
    async fn the_first_cause_stays() {
        let drain = Drain::new();
        drain.stop(Cause::Asked("first"));
        drain.stop(Cause::Panicked("second"));
        assert_eq!(drain.wait(GRACE).await.cause, Cause::Asked("first"));
    }
}
