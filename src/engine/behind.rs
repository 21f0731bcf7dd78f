//! What is recorded behind its request, and what a shutdown says of it that comes too early.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::observe;
use super::settle::Entry;
use crate::scope::StorageKey;

/// What is recorded in the background at the moment.
#[derive(Debug, Default)]
pub(super) struct Behind(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    entries: BTreeMap<u64, (StorageKey, Unrecorded)>,
}

/// What the store does not know yet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Unrecorded {
    /// The answer of a handler.
    Answer,
    /// That nobody will answer: of a claim which may have been made, or of a handler.
    End,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(super) struct Recording {
    behind: Arc<Behind>,
    id: u64,
}

impl Behind {
    pub(super) fn begin(self: &Arc<Self>, key: StorageKey, entry: &Entry) -> Recording {
        let what = match entry {
            Entry::Complete(_) => Unrecorded::Answer,
            Entry::Release(_) => Unrecorded::End,
        };
        let mut behind = self.lock();
        let id = behind.next;
        behind.next += 1;
        behind.entries.insert(id, (key, what));
        drop(behind);
        Recording { behind: Arc::clone(self), id }
    }

    /// Logs what is left, the first ones by their references, and says how much there is.
    pub(super) fn tell(&self) -> usize {
        let left: Vec<_> = self.lock().entries.values().copied().collect();
        for (key, what) in left.iter().take(observe::TOLD_AT_MOST) {
            observe::unrecorded(*key, *what);
        }
        left.len()
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        // Nothing that can panic runs while the map is half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.behind.lock().entries.remove(&self.id);
    }
}
