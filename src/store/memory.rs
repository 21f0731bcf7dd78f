//! The memory store: one process, nothing survives it. For tests, examples and single-node services
//! whose retries never outlive a restart.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::future::ready;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::time::Instant;

use super::{Lease, Store, StoreFuture};
use crate::error::{ConfigError, StoreError, StoreErrorKind};
use crate::record::{
    self, Change, Claim, ClaimOutcome, CompleteOutcome, Completion, Current, Expires, Millis,
    Record, Release, ReleaseOutcome, RenewOutcome, Renewal, Resolution, ResolveOutcome, State,
    Step,
};
use crate::scope::StorageKey;

/// A store in this process's memory.
///
/// It holds a bounded number of records and bytes. When it is full, **new** keys are refused (503)
/// until records reach the end of their retention; nothing that is kept is ever evicted, since an
/// evicted record is a duplicate payment.
///
/// # Defaults
/// 100,000 records (a day of one payment a second, and then some) and 256 MiB of responses.
pub struct MemoryStore {
    records: Mutex<Records>,
    clock: Clock,
    max_records: usize,
    max_bytes: usize,
}

/// Sets the bounds of a [`MemoryStore`].
#[derive(Clone, Debug)]
#[must_use]
pub struct MemoryStoreBuilder {
    max_records: usize,
    max_bytes: usize,
}

#[derive(Default)]
struct Records {
    by_key: HashMap<StorageKey, Slot>,
    by_expiry: BTreeSet<(Millis, StorageKey)>,
    bytes: usize,
}

struct Slot {
    record: Record,
    expires: Millis,
}

/// How many expired records one verb removes on its way: more than it can add, so that memory goes
/// down whenever the store is used, and few enough that no call is held up by it.
const SWEPT_PER_CALL: usize = 4;

impl MemoryStore {
    /// A store with the default bounds.
    #[must_use]
    pub fn new() -> Self {
        let MemoryStoreBuilder { max_records, max_bytes } = Self::builder();
        Self { records: Mutex::default(), clock: Clock::start(), max_records, max_bytes }
    }

    /// A store with other bounds.
    pub fn builder() -> MemoryStoreBuilder {
        MemoryStoreBuilder { max_records: 100_000, max_bytes: 256 << 20 }
    }

    /// How many records are held, those past their retention included until they are swept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().by_key.len()
    }

    /// True if nothing is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Records> {
        // No code that can panic runs while records are half changed.
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one verb of the protocol on a key, atomically.
    fn step<T>(
        &self,
        key: StorageKey,
        verb: impl FnOnce(Current, Millis) -> Step<T>,
    ) -> Result<T, NoRoom> {
        let mut records = self.lock();
        let now = self.clock.now();
        records.sweep(now, SWEPT_PER_CALL);
        let current = match records.by_key.get(&key) {
            Some(slot) if slot.expires > now => Current::Present(slot.record.clone()),
            Some(_) | None => Current::Absent,
        };
        let is_new = current == Current::Absent;
        let Step { change, outcome } = verb(current, now);
        if let Change::Write { record, expires } = change {
            let starts = matches!(record.state, State::InFlight { .. });
            if is_new && starts && !self.has_room(&mut records, now) {
                return Err(NoRoom);
            }
            records.put(key, *record, expires);
        }
        Ok(outcome)
    }

    fn has_room(&self, records: &mut Records, now: Millis) -> bool {
        if records.by_key.len() >= self.max_records || records.bytes >= self.max_bytes {
            records.sweep(now, usize::MAX);
        }
        records.by_key.len() < self.max_records && records.bytes < self.max_bytes
    }

    fn answer<T: Send + 'static>(
        operation: &'static str,
        result: Result<T, NoRoom>,
    ) -> StoreFuture<'static, T> {
        let result =
            result.map_err(|NoRoom| StoreError::new(StoreErrorKind::Full, NAME, operation));
        Box::pin(ready(result))
    }
}

const NAME: &str = "memory";

struct NoRoom;

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("records", &self.len())
            .field("max_records", &self.max_records)
            .field("max_bytes", &self.max_bytes)
            .finish_non_exhaustive()
    }
}

impl MemoryStoreBuilder {
    /// The most records that are held.
    pub fn max_records(mut self, max_records: usize) -> Self {
        self.max_records = max_records;
        self
    }

    /// How many bytes of responses and checkpoints are held before new keys are refused. Operations
    /// that run already may still store their answers.
    pub fn max_bytes(mut self, max_bytes: usize) -> Self {
        self.max_bytes = max_bytes;
        self
    }

    /// Makes the store.
    ///
    /// # Errors
    /// [`ConfigError::Zero`] if a bound is zero.
    pub fn build(self) -> Result<MemoryStore, ConfigError> {
        let Self { max_records, max_bytes } = self;
        if max_records == 0 {
            return Err(ConfigError::Zero("max_records"));
        }
        if max_bytes == 0 {
            return Err(ConfigError::Zero("max_bytes"));
        }
        Ok(MemoryStore { records: Mutex::default(), clock: Clock::start(), max_records, max_bytes })
    }
}

impl Records {
    fn put(&mut self, key: StorageKey, record: Record, expires: Expires) {
        let old = self.by_key.remove(&key);
        if let Some(old) = &old {
            self.by_expiry.remove(&(old.expires, key));
            self.bytes -= weight(&old.record);
        }
        let expires = match (expires, old) {
            (Expires::At(at), _) => at,
            (Expires::AsBefore, Some(old)) => old.expires,
            // The protocol asks for this only where there is a record.
            (Expires::AsBefore, None) => return,
        };
        self.bytes += weight(&record);
        self.by_expiry.insert((expires, key));
        self.by_key.insert(key, Slot { record, expires });
    }

    fn sweep(&mut self, now: Millis, at_most: usize) {
        for _ in 0..at_most {
            match self.by_expiry.first() {
                Some(&(expires, key)) if expires <= now => {
                    self.by_expiry.remove(&(expires, key));
                    if let Some(slot) = self.by_key.remove(&key) {
                        self.bytes -= weight(&slot.record);
                    }
                }
                Some(_) | None => return,
            }
        }
    }
}

fn weight(record: &Record) -> usize {
    let response = match &record.state {
        State::Completed { response, .. } => response.len(),
        State::InFlight { .. } | State::Open { .. } | State::Indeterminate { .. } => 0,
    };
    record.checkpoint.len() + response
}

/// A clock that never goes back: the wall clock at the start, then monotonic time.
struct Clock {
    started: Instant,
    started_at: Millis,
}

impl Clock {
    fn start() -> Self {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { started: Instant::now(), started_at: Millis(0).after(since_epoch) }
    }

    fn now(&self) -> Millis {
        // Rounded down, while durations are rounded up: nothing ends before its time.
        let elapsed = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Millis(self.started_at.0.saturating_add(elapsed))
    }
}

impl Store for MemoryStore {
    fn name(&self) -> &'static str {
        NAME
    }

    fn claim<'a>(
        &'a self,
        key: StorageKey,
        claim: &'a Claim,
    ) -> StoreFuture<'a, ClaimOutcome<Lease>> {
        let result = self.step(key, |current, now| record::claim(current, now, claim));
        let result = result.map(|outcome| outcome.map(|grant| Lease::new(key, claim, grant)));
        Self::answer("claim", result)
    }

    fn renew<'a>(
        &'a self,
        lease: &'a Lease,
        renewal: &'a Renewal,
    ) -> StoreFuture<'a, RenewOutcome> {
        let verb = |current, now| record::renew(current, now, lease.owner(), renewal);
        Self::answer("renew", self.step(lease.key(), verb))
    }

    fn complete<'a>(
        &'a self,
        lease: &'a Lease,
        completion: &'a Completion,
    ) -> StoreFuture<'a, CompleteOutcome> {
        // A copy of its own: a slice would keep the whole buffer alive that it was cut from.
        let response = Bytes::copy_from_slice(&completion.response);
        let completion = Completion { response, ..completion.clone() };
        let verb = |current, now| record::complete(current, now, lease.owner(), &completion);
        Self::answer("complete", self.step(lease.key(), verb))
    }

    fn release<'a>(
        &'a self,
        lease: &'a Lease,
        release: &'a Release,
    ) -> StoreFuture<'a, ReleaseOutcome> {
        let verb = |current, now| record::release(current, now, lease.owner(), release);
        Self::answer("release", self.step(lease.key(), verb))
    }

    fn resolve<'a>(
        &'a self,
        key: StorageKey,
        resolution: &'a Resolution,
    ) -> StoreFuture<'a, ResolveOutcome> {
        let verb = |current, now| record::resolve(current, now, resolution);
        Self::answer("resolve", self.step(key, verb))
    }

    fn ready(&self) -> StoreFuture<'_, ()> {
        drop(self.lock());
        Box::pin(ready(Ok(())))
    }
}
