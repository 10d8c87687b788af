//! Tasks of which only so many may be open: when one more comes, the oldest gives way.
//!
//! For handshakes: a thousand of them that never end must keep nobody out (bug scenario 64). The newest are
//! worth more than the oldest, because an honest one takes milliseconds.

use std::{
    collections::VecDeque,
    future::poll_fn,
    task::{Context, Poll},
};

use tokio::task::{AbortHandle, JoinSet};

/// At most so many open tasks. Dropping it ends them all.
#[derive(Debug)]
pub struct Crowd<T> {
    most: usize,
    tasks: JoinSet<T>,
    oldest_first: VecDeque<AbortHandle>,
}

// === impl Crowd ===

impl<T: Send + 'static> Crowd<T> {
    /// Empty, with room for `most`.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self {
            most,
            tasks: JoinSet::new(),
            oldest_first: VecDeque::new(),
        }
    }

    /// Starts one more. Says whether the oldest had to give way.
    pub fn begin(&mut self, task: impl Future<Output = T> + Send + 'static) -> bool {
        self.oldest_first.retain(|handle| !handle.is_finished());
        let full = self.oldest_first.len() >= self.most;
        if full && let Some(oldest) = self.oldest_first.pop_front() {
            oldest.abort();
        }
        self.oldest_first.push_back(self.tasks.spawn(task));
        full
    }

    /// What the next one made that came to its end; `None` while none is open. Those that gave way, or
    /// panicked, are passed over: each concerns itself only.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<T>> {
        loop {
            match self.tasks.poll_join_next(cx) {
                Poll::Ready(Some(Ok(made))) => return Poll::Ready(Some(made)),
                Poll::Ready(Some(Err(_))) => {}
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// [`Crowd::poll_next`] to wait for; nothing is lost when the waiting is given up.
    pub async fn next(&mut self) -> Option<T> {
        poll_fn(|cx| self.poll_next(cx)).await
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    /// Contract 4; bug scenario 64.
    #[tokio::test]
    async fn the_oldest_gives_way_and_the_newest_is_served() {
        let mut crowd = Crowd::new(2);
        assert!(!crowd.begin(pending()));
        assert!(!crowd.begin(pending()));
        assert!(crowd.begin(async { 1 }));
        assert_eq!(crowd.next().await, Some(1));
        // Its place is free again: the second one stays.
        assert!(!crowd.begin(async { 2 }));
        assert_eq!(crowd.next().await, Some(2));
    }

    #[tokio::test]
    async fn a_panic_concerns_nobody_else() {
        let mut crowd = Crowd::new(2);
        crowd.begin(async { panic!("provoked") });
        crowd.begin(async { 1 });
        assert_eq!((crowd.next().await, crowd.next().await), (Some(1), None));
    }
}
