//! The memory store: one process, nothing survives it. For tests, examples and single-node services
//! whose retries never outlive a restart.

use std::collections::hash_map::Entry::{Occupied, Vacant};
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::future::ready;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::time::Instant;

use super::inspect::{NoPage, TRAIL_LENGTH};
use super::{
    AuditCursor, AuditStep, Contents, Entry, Inspect, Lease, Listing, LogId, Page, Sight, Source,
    Store, StoreFuture, TrailEntry, Wanted,
};
use crate::by_digest::DigestMap;
use crate::error::{ConfigError, StoreError, StoreErrorKind};
use crate::record::{
    self, Amend, Change, Claim, ClaimOutcome, CompleteOutcome, Completion, Current, Expires,
    Forget, ForgetOutcome, Millis, Record, Release, ReleaseOutcome, RenewOutcome, Renewal,
    Resolution, ResolveOutcome, State, Step,
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
    trail: Mutex<VecDeque<TrailEntry>>,
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
    by_key: DigestMap<StorageKey, Slot>,
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
        Self::bounded(max_records, max_bytes)
    }

    /// A store with other bounds.
    pub fn builder() -> MemoryStoreBuilder {
        MemoryStoreBuilder { max_records: 100_000, max_bytes: 256 << 20 }
    }

    fn bounded(max_records: usize, max_bytes: usize) -> Self {
        let (records, trail) = (Mutex::default(), Mutex::default());
        Self { records, trail, clock: Clock::start(), max_records, max_bytes }
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
        match change {
            Change::Keep => {}
            Change::Write { record, expires } => {
                let starts = matches!(record.state, State::InFlight { .. });
                if is_new && starts && !self.has_room(&mut records, now) {
                    return Err(NoRoom);
                }
                records.put(key, *record, expires);
            }
            Change::Remove => drop(records.take(key)),
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
        Ok(MemoryStore::bounded(max_records, max_bytes))
    }
}

impl Records {
    fn take(&mut self, key: StorageKey) -> Option<Slot> {
        let old = self.by_key.remove(&key)?;
        self.by_expiry.remove(&(old.expires, key));
        self.bytes -= weight(&old.record);
        Some(old)
    }

    fn put(&mut self, key: StorageKey, record: Record, expires: Expires) {
        match (self.by_key.entry(key), expires) {
            (Occupied(slot), expires) => {
                let slot = slot.into_mut();
                self.bytes = self.bytes - weight(&slot.record) + weight(&record);
                slot.record = record;
                if let Expires::At(at) = expires
                    && at != slot.expires
                {
                    self.by_expiry.remove(&(slot.expires, key));
                    self.by_expiry.insert((at, key));
                    slot.expires = at;
                }
            }
            (Vacant(place), Expires::At(at)) => {
                self.bytes += weight(&record);
                self.by_expiry.insert((at, key));
                place.insert(Slot { record, expires: at });
            }
            // The protocol asks for this only where there is a record.
            (Vacant(_), Expires::AsBefore) => {}
        }
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

    /// No time at all: every verb is done when it is looked at first.
    fn answers_within(&self) -> Option<Duration> {
        Some(Duration::ZERO)
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
        let Completion { terms, writes, .. } = *completion;
        let completion = Completion { terms, response, writes };
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

/// All records are here, so lists and searches go over them directly.
impl Inspect for MemoryStore {
    fn look(&self, key: StorageKey) -> StoreFuture<'_, Sight> {
        let records = self.lock();
        let now = self.clock.now();
        let slot = records.by_key.get(&key).filter(|slot| slot.expires > now);
        let (current, expires) = match slot {
            Some(slot) => (Current::Present(slot.record.clone()), Some(slot.expires)),
            None => (Current::Absent, None),
        };
        Box::pin(ready(Ok(Sight { current, contents: Contents::Readable, now, expires })))
    }

    fn forget<'a>(&'a self, key: StorageKey, forget: &'a Forget) -> StoreFuture<'a, ForgetOutcome> {
        let verb = |current, now| record::forget(&current, now, forget);
        Self::answer("forget", self.step(key, verb))
    }

    fn amend<'a>(&'a self, key: StorageKey, amend: &'a Amend) -> StoreFuture<'a, ResolveOutcome> {
        Self::answer("amend", self.step(key, |current, now| record::amend(current, now, amend)))
    }

    fn list<'a>(&'a self, wanted: &'a Wanted) -> StoreFuture<'a, Listing> {
        let records = self.lock();
        let now = self.clock.now();
        let order = |entry: &Entry| {
            let since = entry.sighting.since(now).0;
            (i64::try_from(since).unwrap_or(i64::MAX), entry.key)
        };
        let after = wanted.after.as_ref().and_then(Page::place);
        if wanted.after.is_some() && after.is_none() {
            return Box::pin(ready(Err(NoPage::of(self.name()))));
        }
        let alive = records.by_key.iter().filter(|(_, slot)| slot.expires > now);
        let mut entries: Vec<Entry> = alive
            .map(|(&key, slot)| Entry { key, sighting: slot.record.sighting() })
            .filter(|entry| wanted.survey.takes(&entry.sighting, now))
            .filter(|entry| after.is_none_or(|after| order(entry) > after))
            .collect();
        entries.sort_by_key(order);
        let at_most = wanted.at_most.max(1) as usize;
        let more = (entries.len() > at_most).then(|| order(&entries[at_most - 1]));
        entries.truncate(at_most);
        let more = more.map(|(number, key)| Page::at(number, key));
        Box::pin(ready(Ok(Listing { entries, more, source: Source::Direct, now })))
    }

    fn find(&self, id: LogId) -> StoreFuture<'_, Vec<StorageKey>> {
        let records = self.lock();
        let now = self.clock.now();
        let alive = records.by_key.iter().filter(|(_, slot)| slot.expires > now);
        let keys = alive.map(|(&key, _)| key).filter(|key| id.names(*key)).collect();
        Box::pin(ready(Ok(keys)))
    }

    fn audit<'a>(&'a self, _: Option<&'a AuditCursor>, _: u32) -> StoreFuture<'a, AuditStep> {
        let scanned = self.len() as u64;
        Box::pin(ready(Ok(AuditStep { next: None, scanned, found: 0, unknown: 0, about: scanned })))
    }

    fn note<'a>(&'a self, entry: &'a TrailEntry) -> StoreFuture<'a, ()> {
        let at = self.clock.now();
        let mut trail = self.trail.lock().unwrap_or_else(PoisonError::into_inner);
        match trail.iter_mut().find(|known| known.id == entry.id) {
            Some(known) => *known = TrailEntry { at: known.at, ..entry.clone() },
            None => trail.push_front(TrailEntry { at, ..entry.clone() }),
        }
        trail.truncate(TRAIL_LENGTH as usize);
        Box::pin(ready(Ok(())))
    }

    fn trail(&self, at_most: u32) -> StoreFuture<'_, Vec<TrailEntry>> {
        let trail = self.trail.lock().unwrap_or_else(PoisonError::into_inner);
        Box::pin(ready(Ok(trail.iter().take(at_most as usize).cloned().collect())))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::wildcard_enum_match_arm, reason = "what is not expected is a failure")]

    use std::sync::Arc;
    use std::time::Duration;

    use tokio::sync::Barrier;
    use tokio::time::advance;

    use super::*;
    use crate::fingerprint::{Fingerprint, Fingerprints, RecipeId};
    use crate::key::{IdempotencyKey, KeySyntax};
    use crate::record::{Effects, Finding, OnExpired, Terms, Verdict, Writes};
    use crate::token::{Attempt, HolderId};

    const TERMS: Terms = Terms {
        lease: Duration::from_secs(30),
        retention: Duration::from_secs(60),
        unknown_retention: Duration::from_secs(120),
    };

    fn key(number: usize) -> StorageKey {
        let text = format!("key-{number}");
        let key = IdempotencyKey::parse(text.as_bytes(), KeySyntax::BareOrQuoted).unwrap();
        StorageKey::new(&"caller".into(), &key)
    }

    fn claim_of(holder: HolderId) -> Claim {
        let fingerprint = Fingerprint::from_stored(RecipeId::from_bytes([1; 4]), [7; 32]);
        let fingerprints = Fingerprints::one(fingerprint);
        let (on_expired, effects) = (OnExpired::Refuse, Effects::Anywhere);
        Claim { holder, fingerprints, terms: TERMS, on_expired, effects }
    }

    async fn claim(store: &MemoryStore, key: StorageKey) -> ClaimOutcome<Lease> {
        store.claim(key, &claim_of(HolderId::random())).await.unwrap()
    }

    #[track_caller]
    fn granted(outcome: ClaimOutcome<Lease>) -> Lease {
        match outcome {
            ClaimOutcome::Acquired(lease) => lease,
            other => panic!("not granted: {other:?}"),
        }
    }

    async fn complete(store: &MemoryStore, lease: &Lease, response: Bytes) -> CompleteOutcome {
        store
            .complete(lease, &Completion { terms: TERMS, response, writes: Writes::Keep })
            .await
            .unwrap()
    }

    async fn refused_as_full(store: &MemoryStore, key: StorageKey) {
        let error = store.claim(key, &claim_of(HolderId::random())).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Full);
        assert_eq!((error.store(), error.operation()), ("memory", "claim"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_store_refuses_new_keys_but_completes_and_replays_the_others() {
        let store = MemoryStore::builder().max_records(3).build().unwrap();
        let running = granted(claim(&store, key(1)).await);
        let open = granted(claim(&store, key(2)).await);
        let unknown = granted(claim(&store, key(3)).await);
        refused_as_full(&store, key(4)).await;

        let renewal = Renewal { terms: TERMS, checkpoint: Some(Bytes::from_static(b"noted")) };
        assert_eq!(store.renew(&running, &renewal).await.unwrap(), RenewOutcome::Renewed);
        let answer = Bytes::from_static(b"\x01answer");
        let stored = complete(&store, &running, answer.clone()).await;
        assert_eq!(stored, CompleteOutcome::Stored);
        assert!(matches!(claim(&store, key(1)).await, ClaimOutcome::Completed(it) if it == answer));

        // A key that the store knows is no new key, also when it is claimed again.
        let release = Release { terms: TERMS, verdict: Verdict::NoEffect };
        assert_eq!(store.release(&open, &release).await.unwrap(), ReleaseOutcome::Released);
        let again = granted(claim(&store, key(2)).await);
        assert_eq!(again.grant().attempt.number(), 2);

        let release = Release { terms: TERMS, verdict: Verdict::Unknown };
        assert_eq!(store.release(&unknown, &release).await.unwrap(), ReleaseOutcome::Released);
        assert!(matches!(claim(&store, key(3)).await, ClaimOutcome::Indeterminate(_)));
        refused_as_full(&store, key(4)).await;
        assert_eq!(store.len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_full_of_bytes_refuses_new_keys_but_stores_the_answers_of_running_ones() {
        let store = MemoryStore::builder().max_bytes(100).build().unwrap();
        let mut leases = Vec::new();
        for number in 0..10 {
            leases.push(granted(claim(&store, key(number)).await));
        }
        for lease in &leases {
            let stored = complete(&store, lease, Bytes::from(vec![1; 100])).await;
            assert_eq!(stored, CompleteOutcome::Stored);
        }
        refused_as_full(&store, key(10)).await;
        assert_eq!(store.lock().bytes, 1_000);
        // Here more has to go than what one call sweeps on its way.
        advance(TERMS.retention).await;
        let _lease = granted(claim(&store, key(10)).await);
        assert_eq!(store.len(), 1);
        assert_eq!(store.lock().bytes, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_past_its_retention_is_gone_also_before_it_is_swept() {
        let store = MemoryStore::new();
        for number in 0..20 {
            let lease = granted(claim(&store, key(number)).await);
            complete(&store, &lease, Bytes::from_static(b"\x01")).await;
            advance(Duration::from_millis(1)).await;
        }
        advance(TERMS.retention).await;
        let lease = granted(claim(&store, key(19)).await);
        assert_eq!(lease.grant().attempt, Attempt::FIRST);
        assert!(store.len() > 1, "everything was swept before, so this shows nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn records_past_their_retention_make_room_all_at_once_if_need_be() {
        let store = MemoryStore::builder().max_records(50).build().unwrap();
        for number in 0..50 {
            let lease = granted(claim(&store, key(number)).await);
            complete(&store, &lease, Bytes::from_static(b"\x01")).await;
        }
        advance(TERMS.retention - Duration::from_millis(1)).await;
        refused_as_full(&store, key(50)).await;
        assert!(matches!(claim(&store, key(0)).await, ClaimOutcome::Completed(_)));
        advance(Duration::from_millis(1)).await;
        for number in 50..100 {
            let _lease = granted(claim(&store, key(number)).await);
        }
        assert_eq!(store.len(), 50);
    }

    #[tokio::test(start_paused = true)]
    async fn memory_goes_back_to_nothing_after_a_million_keys() {
        let store = MemoryStore::builder().max_records(20_000).build().unwrap();
        let terms = Terms { retention: Duration::from_secs(1), ..TERMS };
        let response = Bytes::from(vec![1; 16]);
        let mut most = 0;
        for round in 0..10_000 {
            for number in 0..100 {
                let holder = HolderId::from_bytes([1; 16]);
                let claim = Claim { terms, ..claim_of(holder) };
                let bytes: [u8; 24] = std::array::from_fn(|index| {
                    (round * 100 + number as u64).to_le_bytes().get(index).copied().unwrap_or(0)
                });
                let lease =
                    granted(store.claim(StorageKey::from_bytes(bytes), &claim).await.unwrap());
                let completion =
                    Completion { terms, response: response.clone(), writes: Writes::Keep };
                store.complete(&lease, &completion).await.unwrap();
            }
            advance(Duration::from_millis(10)).await;
            most = most.max(store.len());
        }
        assert!(most <= 10_200, "{most} records are held, of which 10,000 can be alive");
        advance(Duration::from_secs(1)).await;
        let resolution = Resolution {
            holder: HolderId::NOBODY,
            attempt: Attempt::FIRST,
            finding: Finding::NothingHappened,
            terms,
        };
        for _ in 0..=10_200 / SWEPT_PER_CALL {
            store.resolve(key(0), &resolution).await.unwrap();
        }
        assert!(store.is_empty());
        let records = store.lock();
        assert_eq!((records.bytes, records.by_expiry.len()), (0, 0));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn of_sixty_four_concurrent_claims_one_is_granted() {
        for round in 0..20 {
            let store = Arc::new(MemoryStore::new());
            let together = Arc::new(Barrier::new(64));
            let tasks: Vec<_> = (0..64)
                .map(|_| {
                    let (store, together) = (Arc::clone(&store), Arc::clone(&together));
                    tokio::spawn(async move {
                        together.wait().await;
                        claim(&store, key(round)).await
                    })
                })
                .collect();
            let mut granted = 0;
            for task in tasks {
                match task.await.unwrap() {
                    ClaimOutcome::Acquired(_) => granted += 1,
                    ClaimOutcome::InFlight { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(granted, 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn replays_give_the_same_bytes_and_keep_nothing_else_alive() {
        let store = MemoryStore::new();
        let lease = granted(claim(&store, key(1)).await);
        let whole: Bytes = (0..=u8::MAX).cycle().take(70_000).collect();
        let answer = whole.slice(1_000..2_000);
        complete(&store, &lease, answer.clone()).await;
        for _ in 0..3 {
            let ClaimOutcome::Completed(replay) = claim(&store, key(1)).await else {
                panic!("no replay");
            };
            assert_eq!(replay, answer);
            assert!(!whole.as_ptr_range().contains(&replay.as_ptr()), "the buffer is kept alive");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_ends_by_the_clock_and_its_record_much_later() {
        let store = MemoryStore::new();
        let lease = granted(claim(&store, key(1)).await);
        advance(Duration::from_secs(29)).await;
        let ClaimOutcome::InFlight { remaining } = claim(&store, key(1)).await else {
            panic!("the lease runs");
        };
        assert_eq!(remaining, Duration::from_secs(1));
        advance(remaining).await;
        let ClaimOutcome::Indeterminate(unsettled) = claim(&store, key(1)).await else {
            panic!("the lease is over");
        };
        assert_eq!(unsettled.holder, lease.owner().holder);

        // Found out now, but kept from the end of the lease.
        advance(TERMS.unknown_retention - Duration::from_millis(1)).await;
        assert!(matches!(claim(&store, key(1)).await, ClaimOutcome::Indeterminate(_)));
        advance(Duration::from_millis(1)).await;
        let _lease = granted(claim(&store, key(1)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_is_renewed_holds_for_as_long_as_it_is() {
        let store = MemoryStore::new();
        let lease = granted(claim(&store, key(1)).await);
        for _ in 0..100 {
            advance(Duration::from_secs(10)).await;
            let renewal = Renewal { terms: TERMS, checkpoint: None };
            assert_eq!(store.renew(&lease, &renewal).await.unwrap(), RenewOutcome::Renewed);
            assert!(matches!(claim(&store, key(1)).await, ClaimOutcome::InFlight { .. }));
        }
        assert_eq!(store.len(), 1);
        assert_eq!(store.lock().by_expiry.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_completion_whose_record_is_gone_is_stored_also_in_a_full_store() {
        let store = MemoryStore::builder().max_records(1).build().unwrap();
        let late = granted(claim(&store, key(1)).await);
        advance(TERMS.lease + TERMS.unknown_retention).await;
        let _other = granted(claim(&store, key(2)).await);
        let restored = complete(&store, &late, Bytes::from_static(b"\x01")).await;
        assert_eq!(restored, CompleteOutcome::Restored);
        assert!(matches!(claim(&store, key(1)).await, ClaimOutcome::Completed(_)));
    }

    #[test]
    fn bounds_of_zero_are_refused() {
        let records = MemoryStore::builder().max_records(0).build();
        assert_eq!(records.unwrap_err(), ConfigError::Zero("max_records"));
        let bytes = MemoryStore::builder().max_bytes(0).build();
        assert_eq!(bytes.unwrap_err(), ConfigError::Zero("max_bytes"));
    }

    #[tokio::test]
    async fn debug_shows_how_much_is_held_and_nothing_of_it() {
        let store = MemoryStore::new();
        let lease = granted(claim(&store, key(1)).await);
        complete(&store, &lease, Bytes::from_static(b"secret")).await;
        let shown = format!("{store:?}");
        assert!(shown.contains("records: 1"), "{shown}");
        assert!(!shown.contains("secret"), "{shown}");
        assert!(store.ready().await.is_ok());
    }
}
