//! What to look at next: keys with a time, each at most once, the earliest first.
//!
//! A key that is added again keeps the earlier time, so that a wake-up is never lost behind a
//! slow safety look, and a burst of events costs one look.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until},
};

/// Keys to look at; shared by those who wake and the one who works.
pub(crate) struct Queue<K> {
    due: Mutex<Due<K>>,
    changed: Notify,
}

/// Keys by time. Pure: `now` is passed in.
#[derive(Debug)]
pub struct Due<K> {
    order: BTreeMap<(Instant, u64), K>,
    times: HashMap<K, (Instant, u64)>,
    serial: u64,
}

// === impl Queue ===

impl<K: Clone + Eq + Hash> Queue<K> {
    pub(crate) fn new() -> Self {
        Self {
            due: Mutex::new(Due::default()),
            changed: Notify::new(),
        }
    }

    /// Looks at `key` as soon as possible.
    pub(crate) fn wake(&self, key: K) {
        self.wake_at(key, Instant::now());
    }

    /// Looks at `key` after a pause, unless something wakes it before.
    pub(crate) fn wake_after(&self, key: K, pause: Duration) {
        self.wake_at(key, Instant::now() + pause);
    }

    fn wake_at(&self, key: K, at: Instant) {
        if self.lock().add(key, at) {
            self.changed.notify_one();
        }
    }

    /// The next key that is due. One caller at a time.
    pub(crate) async fn next(&self) -> K {
        loop {
            let next = self.lock().take(Instant::now());
            match next {
                Ok(key) => return key,
                Err(Some(at)) => tokio::select! {
                    () = sleep_until(at) => {}
                    () = self.changed.notified() => {}
                },
                Err(None) => self.changed.notified().await,
            }
        }
    }

    /// Keys that wait, whether due or not.
    pub(crate) fn len(&self) -> usize {
        self.lock().times.len()
    }

    /// Nothing that holds the lock can panic half-way, so a poisoned one is still good.
    fn lock(&self) -> MutexGuard<'_, Due<K>> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Due ===

impl<K> Default for Due<K> {
    fn default() -> Self {
        Self {
            order: BTreeMap::new(),
            times: HashMap::new(),
            serial: 0,
        }
    }
}

impl<K: Clone + Eq + Hash> Due<K> {
    /// Whether the key is now earlier than it was.
    pub fn add(&mut self, key: K, at: Instant) -> bool {
        if let Some(known) = self.times.get(&key) {
            if known.0 <= at {
                return false;
            }
            self.order.remove(known);
        }
        self.serial += 1;
        let place = (at, self.serial);
        self.order.insert(place, key.clone());
        self.times.insert(key, place);
        true
    }

    /// The earliest key that is due, else the time to come back.
    pub fn take(&mut self, now: Instant) -> Result<K, Option<Instant>> {
        let Some((place, _)) = self.order.first_key_value() else {
            return Err(None);
        };
        if place.0 > now {
            return Err(Some(place.0));
        }
        let Some((_, key)) = self.order.pop_first() else {
            return Err(None);
        };
        self.times.remove(&key);
        Ok(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due() -> Due<&'static str> {
        Due {
            order: BTreeMap::new(),
            times: HashMap::new(),
            serial: 0,
        }
    }

    #[test]
    fn the_earlier_time_wins_and_a_key_comes_once() {
        let mut due = due();
        let now = Instant::now();
        let soon = now + Duration::from_secs(30);
        assert!(due.add("slow", soon));
        assert!(
            !due.add("slow", soon + Duration::from_secs(30)),
            "it is known, and earlier"
        );
        assert!(due.add("fast", now));
        assert!(!due.add("fast", now));
        assert_eq!(due.take(now), Ok("fast"));
        assert_eq!(due.take(now), Err(Some(soon)));
        assert!(due.add("slow", now), "woken before its time");
        assert_eq!(due.take(now), Ok("slow"));
        assert_eq!(due.take(now), Err(None));
    }

    #[test]
    fn keys_of_one_time_come_in_the_order_they_were_added() {
        let mut due = due();
        let now = Instant::now();
        for key in ["b", "a", "c"] {
            due.add(key, now);
        }
        assert_eq!(
            [due.take(now), due.take(now), due.take(now)],
            [Ok("b"), Ok("a"), Ok("c")]
        );
    }

    #[tokio::test]
    async fn a_waiting_worker_is_woken() {
        let queue = Queue::new();
        queue.wake_after("later", Duration::from_secs(3600));
        let (key, ()) = tokio::join!(queue.next(), async {
            tokio::task::yield_now().await;
            queue.wake("now");
        });
        assert_eq!((key, queue.len()), ("now", 1));
    }
}
