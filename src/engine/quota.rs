//! How many keys one caller may have in flight in this process, so that nobody starves the others.

use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::by_digest::DigestMap;
use crate::scope::{CallerId, StorageKey};

/// The keys in flight, by caller. Entries live as long as there are requests in them.
#[derive(Debug, Default)]
pub(super) struct Quota {
    callers: Mutex<Callers>,
}

type Callers = DigestMap<CallerId, DigestMap<StorageKey, usize>>;

/// A place among the keys of a caller, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    quota: Arc<Quota>,
    caller: CallerId,
    key: StorageKey,
}

impl Quota {
    /// A place, or `None` if the caller has so many keys in flight already. Requests with one key share
    /// one place: how many of them may wait is another limit.
    pub(super) fn enter(
        self: &Arc<Self>,
        caller: CallerId,
        key: StorageKey,
        limit: usize,
    ) -> Option<Place> {
        let mut callers = self.lock();
        let hasher = callers.hasher().clone();
        // One that is empty would stay behind.
        let keys = match callers.entry(caller) {
            Entry::Occupied(keys) => keys.into_mut(),
            Entry::Vacant(_) if limit == 0 => return None,
            Entry::Vacant(nobody) => nobody.insert(DigestMap::with_hasher(hasher)),
        };
        let inside = keys.len();
        match keys.entry(key) {
            Entry::Occupied(mut requests) => *requests.get_mut() += 1,
            Entry::Vacant(_) if inside >= limit => return None,
            Entry::Vacant(first) => {
                first.insert(1);
            }
        }
        Some(Place { quota: Arc::clone(self), caller, key })
    }

    fn lock(&self) -> MutexGuard<'_, Callers> {
        // Nothing that can panic runs while entries are half changed.
        self.callers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut callers = self.quota.lock();
        let Entry::Occupied(mut keys) = callers.entry(self.caller) else { return };
        if let Entry::Occupied(mut requests) = keys.get_mut().entry(self.key) {
            *requests.get_mut() -= 1;
            if *requests.get() == 0 {
                requests.remove();
            }
        }
        if keys.get().is_empty() {
            keys.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scope::Identity;

    fn key(n: u8) -> StorageKey {
        StorageKey::from_bytes([n; 24])
    }

    #[test]
    fn places_are_counted_by_caller_and_key_and_come_back() {
        let quota = Arc::new(Quota::default());
        let (acme, other) = (Identity::from("acme").caller_id(), Identity::from("b").caller_id());
        let first = quota.enter(acme, key(1), 2).unwrap();
        let twin = quota.enter(acme, key(1), 2).unwrap();
        let second = quota.enter(acme, key(2), 2).unwrap();
        assert!(quota.enter(acme, key(3), 2).is_none());
        // A full house still lets a twin of somebody inside in, and other callers.
        let third = quota.enter(acme, key(2), 2).unwrap();
        let elsewhere = quota.enter(other, key(3), 2).unwrap();
        drop(first);
        assert!(quota.enter(acme, key(3), 2).is_none(), "its twin is still there");
        drop(twin);
        assert!(quota.enter(acme, key(3), 2).is_some());
        drop((second, third, elsewhere));
        assert!(quota.lock().is_empty());
    }

    #[test]
    fn a_limit_of_zero_refuses_everything_and_leaves_nothing_behind() {
        let quota = Arc::new(Quota::default());
        assert!(quota.enter(Identity::from("a").caller_id(), key(1), 0).is_none());
        assert!(quota.lock().is_empty());
    }
}
