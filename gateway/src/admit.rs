//! How many calls at once, in all and for each namespace; a guard per call.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Counts calls; clones share it.
#[derive(Debug, Clone)]
pub struct Admission {
    shared: Arc<Shared>,
}

/// A call that was let in; it counts until this drops.
#[derive(Debug)]
#[must_use = "the call counts until the guard drops"]
pub struct Admitted {
    shared: Arc<Shared>,
    namespace: Arc<str>,
}

/// Which limit is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// Of the whole gateway.
    Gateway,
    /// Of this namespace.
    Namespace,
}

#[derive(Debug)]
struct Shared {
    all: usize,
    per_namespace: usize,
    calls: Mutex<Calls>,
}

#[derive(Debug, Default)]
struct Calls {
    all: usize,
    by_namespace: HashMap<Arc<str>, usize>,
}

// === impl Admission ===

impl Admission {
    /// At most `all` calls at once, and `per_namespace` of one namespace.
    #[must_use]
    pub fn new(all: usize, per_namespace: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                all,
                per_namespace,
                calls: Mutex::default(),
            }),
        }
    }

    /// Lets one more call in.
    ///
    /// # Errors
    /// Says which limit is reached.
    pub fn admit(&self, namespace: &str) -> Result<Admitted, Full> {
        let mut calls = self.shared.lock();
        if calls.all >= self.shared.all {
            return Err(Full::Gateway);
        }
        let namespace = match calls.by_namespace.get_key_value(namespace) {
            Some((_, count)) if *count >= self.shared.per_namespace => return Err(Full::Namespace),
            Some((name, _)) => Arc::clone(name),
            None if self.shared.per_namespace == 0 => return Err(Full::Namespace),
            None => Arc::from(namespace),
        };
        calls.all += 1;
        *calls.by_namespace.entry(Arc::clone(&namespace)).or_default() += 1;
        drop(calls);
        Ok(Admitted {
            shared: Arc::clone(&self.shared),
            namespace,
        })
    }

    /// How many calls are in.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.lock().all
    }
}

// === impl Admitted ===

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut calls = self.shared.lock();
        calls.all -= 1;
        if let Some(count) = calls.by_namespace.get_mut(&self.namespace) {
            *count -= 1;
            if *count == 0 {
                // Names come from callers' Runs; those without calls are forgotten.
                calls.by_namespace.remove(&self.namespace);
            }
        }
    }
}

// === impl Shared ===

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_namespace_cannot_take_everything() {
        let admission = Admission::new(3, 2);
        let first = admission.admit("a").unwrap();
        let _second = admission.admit("a").unwrap();
        assert_eq!(admission.admit("a").unwrap_err(), Full::Namespace);
        let _third = admission.admit("b").unwrap();
        assert_eq!(admission.admit("c").unwrap_err(), Full::Gateway);
        drop(first);
        assert_eq!(admission.in_flight(), 2);
        let _fourth = admission.admit("a").unwrap();
    }

    #[test]
    fn a_namespace_without_calls_is_forgotten() {
        let admission = Admission::new(3, 2);
        drop(admission.admit("a").unwrap());
        assert!(admission.shared.lock().by_namespace.is_empty());
        assert_eq!(admission.in_flight(), 0);
    }
}
