//! When a process ends: at a certain one of the steps that others see of it.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::Notify;

/// Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Fate(Arc<Inner>);

struct Inner {
    passed: AtomicUsize,
    ends_at: AtomicUsize,
    met: Notify,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            passed: AtomicUsize::new(0),
            ends_at: AtomicUsize::new(usize::MAX),
            met: Notify::new(),
        }
    }
}

impl Fate {
    /// From now on so many more steps are passed, and at the next one nothing goes on.
    pub(crate) fn ends_after(&self, steps: usize) {
        self.0.ends_at.store(self.passed() + steps, Ordering::SeqCst);
    }

    /// The process that comes next lives on.
    pub(crate) fn is_over(&self) {
        self.0.ends_at.store(usize::MAX, Ordering::SeqCst);
    }

    /// How many steps there were.
    pub(crate) fn passed(&self) -> usize {
        self.0.passed.load(Ordering::SeqCst)
    }

    /// A step is about to be done, or done and about to be answered; does not return where the process is to end.
    pub(crate) async fn pass(&self) {
        let step = self.0.passed.fetch_add(1, Ordering::SeqCst);
        if step >= self.0.ends_at.load(Ordering::SeqCst) {
            self.0.met.notify_one();
            std::future::pending::<()>().await;
        }
    }

    /// Waits until the process is to end.
    pub(crate) async fn met(&self) {
        self.0.met.notified().await;
    }
}
