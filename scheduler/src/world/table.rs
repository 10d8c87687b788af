//! Objects of one kind by key, and what a whole new list of them changes.

use std::collections::{BTreeSet, HashMap};

use crate::facts::ObjectKey;

/// Objects of one kind by key.
#[derive(Debug)]
pub(super) struct Table<V> {
    pub(super) rows: HashMap<ObjectKey, V>,
}

// === impl Table ===

impl<V> Default for Table<V> {
    fn default() -> Self {
        Self { rows: HashMap::new() }
    }
}

impl<V: Clone> Table<V> {
    /// Takes a whole list, of one namespace or of all; yields what was and what is for each key.
    pub(super) fn reset(
        &mut self,
        scope: Option<&str>,
        rows: impl IntoIterator<Item = (ObjectKey, V)>,
    ) -> Vec<(ObjectKey, Option<V>, Option<V>)> {
        let mut changes = Vec::new();
        let mut kept = BTreeSet::new();
        for (key, new) in rows {
            let old = self.rows.insert(key.clone(), new.clone());
            kept.insert(key.clone());
            changes.push((key, old, Some(new)));
        }
        let mut gone: Vec<_> = self
            .rows
            .keys()
            .filter(|key| scope.is_none_or(|it| it == key.namespace) && !kept.contains(*key))
            .cloned()
            .collect();
        // The same list changes the same things in the same order.
        gone.sort_unstable();
        for key in gone {
            let old = self.rows.remove(&key);
            changes.push((key, old, None));
        }
        changes
    }
}
