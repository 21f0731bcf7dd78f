//! A store that fails on purpose, for tests.

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, pending};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use super::{
    AuditCursor, AuditStep, Glance, Inspect, Lease, Listing, LogId, Sealing, Sight, Store,
    StoreFuture, TrailEntry, Wanted,
};
use crate::error::{StoreError, StoreErrorKind};
use crate::record::{
    Amend, Claim, ClaimOutcome, CompleteOutcome, Completion, Forget, ForgetOutcome, Release,
    ReleaseOutcome, RenewOutcome, Renewal, Resolution, ResolveOutcome,
};
use crate::scope::StorageKey;
use crate::token::HolderId;

/// A store around another one, whose calls go wrong as a test orders.
///
/// Faults of one verb are used up in order, one per call; a verb without any works. Clones share
/// faults and counters, so a test keeps one and hands the other to the engine.
///
/// # Example
/// ```
/// use tower_idempotency::MemoryStore;
/// use tower_idempotency::store::{Fault, Faulty, Verb};
///
/// let store = Faulty::new(MemoryStore::new());
/// store.inject(Verb::Claim, Fault::LoseReply); // done, but the caller is not told
/// assert_eq!(store.calls(Verb::Claim), 0);
/// ```
pub struct Faulty<S> {
    inner: Arc<Inner<S>>,
}

struct Inner<S> {
    store: S,
    script: Mutex<[Line; Verb::ALL.len()]>,
}

/// What is ordered for one verb, and what became of it.
#[derive(Default)]
struct Line {
    once: VecDeque<Fault>,
    always: Option<Fault>,
    calls: usize,
    reached: usize,
}

/// A verb of [`Store`], or one of [`Inspect`] that can be made to fail.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub enum Verb {
    /// [`Store::claim`].
    Claim,
    /// [`Store::renew`].
    Renew,
    /// [`Store::complete`].
    Complete,
    /// [`Store::release`].
    Release,
    /// [`Store::resolve`].
    Resolve,
    /// [`Store::ready`].
    Ready,
    /// [`Inspect::look`].
    Look,
    /// [`Inspect::forget`].
    Forget,
    /// [`Inspect::amend`].
    Amend,
    /// [`Inspect::note`].
    Note,
}

impl Verb {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::Claim,
        Self::Renew,
        Self::Complete,
        Self::Release,
        Self::Resolve,
        Self::Ready,
        Self::Look,
        Self::Forget,
        Self::Amend,
        Self::Note,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Renew => "renew",
            Self::Complete => "complete",
            Self::Release => "release",
            Self::Resolve => "resolve",
            Self::Ready => "ready",
            Self::Look => "look",
            Self::Forget => "forget",
            Self::Amend => "amend",
            Self::Note => "note",
        }
    }
}

/// What goes wrong with one call.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Fault {
    /// It fails with an error of this kind, and nothing is done.
    Fail(StoreErrorKind),
    /// It never arrives, and the caller cannot know: nothing is done, the outcome is unknown.
    LoseRequest,
    /// It is done, and the caller is not told: the outcome is unknown.
    LoseReply,
    /// It is done after this time.
    Delay(Duration),
    /// It is done, and the reply takes this time.
    DelayReply(Duration),
    /// It never ends, and nothing is done.
    Hang,
    /// It is done, and never ends.
    HangAfter,
    /// It waits at a gate before it is done.
    Hold(Gate),
    /// It is done, and the reply waits at a gate.
    HoldReply(Gate),
}

/// A gate that calls wait at until a test opens it. Clones are the same gate.
#[derive(Clone, Debug)]
pub struct Gate {
    open: Arc<watch::Sender<bool>>,
    waiting: Arc<watch::Sender<usize>>,
}

impl Default for Gate {
    fn default() -> Self {
        Self::new()
    }
}

impl Gate {
    /// A closed gate.
    #[must_use]
    pub fn new() -> Self {
        Self { open: Arc::new(watch::Sender::new(false)), waiting: Arc::default() }
    }

    /// Opens it, for those who wait and those who come later.
    pub fn open(&self) {
        self.open.send_replace(true);
    }

    /// Waits until that many calls have come to the gate.
    ///
    /// # Cancel safety
    /// It only looks.
    pub async fn reached_by(&self, calls: usize) {
        // The sender lives as long as this gate, so the wait cannot fail.
        drop(self.waiting.subscribe().wait_for(|waiting| *waiting >= calls).await);
    }

    async fn pass(&self) {
        self.waiting.send_modify(|waiting| *waiting += 1);
        drop(self.open.subscribe().wait_for(|open| *open).await);
    }
}

impl<S> Faulty<S> {
    /// A store that works until told otherwise.
    pub fn new(store: S) -> Self {
        Self { inner: Arc::new(Inner { store, script: Mutex::default() }) }
    }

    /// Orders a fault for the next call of a verb that has none ordered yet.
    pub fn inject(&self, verb: Verb, fault: Fault) {
        self.lock()[verb as usize].once.push_back(fault);
    }

    /// Orders the same fault for that many calls.
    pub fn inject_times(&self, verb: Verb, fault: Fault, times: usize) {
        self.lock()[verb as usize].once.extend(std::iter::repeat_n(fault, times));
    }

    /// Orders a fault for every call of a verb, from when the ordered ones are used up.
    pub fn inject_always(&self, verb: Verb, fault: Fault) {
        self.lock()[verb as usize].always = Some(fault);
    }

    /// Takes all orders back.
    pub fn heal(&self) {
        for line in self.lock().iter_mut() {
            line.once.clear();
            line.always = None;
        }
    }

    /// How many calls of a verb were made.
    #[must_use]
    pub fn calls(&self, verb: Verb) -> usize {
        self.lock()[verb as usize].calls
    }

    /// How many of them reached the store inside.
    #[must_use]
    pub fn reached(&self, verb: Verb) -> usize {
        self.lock()[verb as usize].reached
    }

    /// The store inside, to which nothing happens on purpose.
    #[must_use]
    pub fn inner(&self) -> &S {
        &self.inner.store
    }

    fn lock(&self) -> MutexGuard<'_, [Line; Verb::ALL.len()]> {
        self.inner.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self, verb: Verb) -> Option<Fault> {
        let line = &mut self.lock()[verb as usize];
        line.calls += 1;
        line.once.pop_front().or_else(|| line.always.clone())
    }
}

impl<S: Store> Faulty<S> {
    async fn run<T>(
        &self,
        verb: Verb,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let fail = |kind| StoreError::new(kind, self.inner.store.name(), verb.name());
        let lost = || fail(StoreErrorKind::OutcomeUnknown);
        let call = async {
            self.lock()[verb as usize].reached += 1;
            call.await
        };
        match self.next(verb) {
            None => call.await,
            Some(Fault::Fail(kind)) => Err(fail(kind)),
            Some(Fault::LoseRequest) => Err(lost()),
            Some(Fault::LoseReply) => call.await.and(Err(lost())),
            Some(Fault::Delay(time)) => {
                sleep(time).await;
                call.await
            }
            Some(Fault::DelayReply(time)) => {
                let reply = call.await;
                sleep(time).await;
                reply
            }
            Some(Fault::Hang) => pending().await,
            Some(Fault::HangAfter) => {
                drop(call.await);
                pending().await
            }
            Some(Fault::Hold(gate)) => {
                gate.pass().await;
                call.await
            }
            Some(Fault::HoldReply(gate)) => {
                let reply = call.await;
                gate.pass().await;
                reply
            }
        }
    }
}

impl<S> Clone for Faulty<S> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<S: fmt::Debug> fmt::Debug for Faulty<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Faulty").field(&self.inner.store).finish()
    }
}

impl<S: Store> Store for Faulty<S> {
    fn name(&self) -> &'static str {
        self.inner.store.name()
    }

    fn claim<'a>(
        &'a self,
        key: StorageKey,
        claim: &'a Claim,
    ) -> StoreFuture<'a, ClaimOutcome<Lease>> {
        // Inside of `async`: the memory store acts when it is called, not when it is awaited.
        let call = async move { self.inner.store.claim(key, claim).await };
        Box::pin(self.run(Verb::Claim, call))
    }

    fn renew<'a>(
        &'a self,
        lease: &'a Lease,
        renewal: &'a Renewal,
    ) -> StoreFuture<'a, RenewOutcome> {
        let call = async move { self.inner.store.renew(lease, renewal).await };
        Box::pin(self.run(Verb::Renew, call))
    }

    fn complete<'a>(
        &'a self,
        lease: &'a Lease,
        completion: &'a Completion,
    ) -> StoreFuture<'a, CompleteOutcome> {
        let call = async move { self.inner.store.complete(lease, completion).await };
        Box::pin(self.run(Verb::Complete, call))
    }

    fn release<'a>(
        &'a self,
        lease: &'a Lease,
        release: &'a Release,
    ) -> StoreFuture<'a, ReleaseOutcome> {
        let call = async move { self.inner.store.release(lease, release).await };
        Box::pin(self.run(Verb::Release, call))
    }

    fn resolve<'a>(
        &'a self,
        key: StorageKey,
        resolution: &'a Resolution,
    ) -> StoreFuture<'a, ResolveOutcome> {
        let call = async move { self.inner.store.resolve(key, resolution).await };
        Box::pin(self.run(Verb::Resolve, call))
    }

    fn ready(&self) -> StoreFuture<'_, ()> {
        Box::pin(self.run(Verb::Ready, async move { self.inner.store.ready().await }))
    }
}

/// Lists, searches and audits work always.
impl<S: Inspect> Inspect for Faulty<S> {
    fn look(&self, key: StorageKey) -> StoreFuture<'_, Sight> {
        let call = async move { self.inner.store.look(key).await };
        Box::pin(self.run(Verb::Look, call))
    }

    fn forget<'a>(&'a self, key: StorageKey, forget: &'a Forget) -> StoreFuture<'a, ForgetOutcome> {
        let call = async move { self.inner.store.forget(key, forget).await };
        Box::pin(self.run(Verb::Forget, call))
    }

    fn amend<'a>(&'a self, key: StorageKey, amend: &'a Amend) -> StoreFuture<'a, ResolveOutcome> {
        let call = async move { self.inner.store.amend(key, amend).await };
        Box::pin(self.run(Verb::Amend, call))
    }

    fn list<'a>(&'a self, wanted: &'a Wanted) -> StoreFuture<'a, Listing> {
        self.inner.store.list(wanted)
    }

    fn find(&self, id: LogId) -> StoreFuture<'_, Vec<StorageKey>> {
        self.inner.store.find(id)
    }

    fn audit<'a>(
        &'a self,
        cursor: Option<&'a AuditCursor>,
        at_most: u32,
    ) -> StoreFuture<'a, AuditStep> {
        self.inner.store.audit(cursor, at_most)
    }

    fn note<'a>(&'a self, entry: &'a TrailEntry) -> StoreFuture<'a, ()> {
        let call = async move { self.inner.store.note(entry).await };
        Box::pin(self.run(Verb::Note, call))
    }

    fn trail(&self, at_most: u32) -> StoreFuture<'_, Vec<TrailEntry>> {
        self.inner.store.trail(at_most)
    }

    fn glance(&self) -> StoreFuture<'_, Option<Glance>> {
        self.inner.store.glance()
    }

    fn sealing(&self, key: StorageKey, holder: HolderId) -> Sealing {
        self.inner.store.sealing(key, holder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fingerprint::{Fingerprint, Fingerprints, RecipeId};
    use crate::record::{Effects, OnExpired, Terms};
    use crate::store::MemoryStore;

    const KEY: StorageKey = StorageKey::from_bytes([7; 24]);

    fn claim() -> Claim {
        let minute = Duration::from_secs(60);
        let print = Fingerprint::from_stored(RecipeId::from_bytes([1; 4]), [1; 32]);
        Claim {
            holder: HolderId::random(),
            fingerprints: Fingerprints::one(print),
            terms: Terms { lease: minute, retention: minute, unknown_retention: minute },
            on_expired: OnExpired::Refuse,
            effects: Effects::Anywhere,
        }
    }

    fn is_granted(outcome: &Result<ClaimOutcome<Lease>, StoreError>) -> bool {
        matches!(outcome, Ok(ClaimOutcome::Acquired(_)))
    }

    #[tokio::test]
    async fn a_lost_request_is_not_done_and_a_lost_reply_is() {
        let store = Faulty::new(MemoryStore::new());
        store.inject(Verb::Claim, Fault::LoseRequest);
        store.inject(Verb::Claim, Fault::LoseReply);
        let (first, second) = (claim(), claim());
        for claim in [&first, &second] {
            let error = store.claim(KEY, claim).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::OutcomeUnknown);
        }
        assert!(!is_granted(&store.claim(KEY, &first).await));
        assert!(is_granted(&store.claim(KEY, &second).await), "the second one has the key");
        assert_eq!((store.calls(Verb::Claim), store.reached(Verb::Claim)), (4, 3));
        assert_eq!(store.calls(Verb::Renew), 0);
    }

    #[tokio::test]
    async fn a_held_call_is_done_when_its_gate_opens() {
        let store = Faulty::new(MemoryStore::new());
        let gate = Gate::new();
        store.inject(Verb::Claim, Fault::Hold(gate.clone()));
        let held = claim();
        let mut call = store.claim(KEY, &held);
        let came = async { gate.reached_by(1).await };
        tokio::select! {
            _ = &mut call => panic!("the gate is closed"),
            () = came => {}
        }
        assert_eq!(store.reached(Verb::Claim), 0);
        gate.open();
        assert!(is_granted(&call.await));
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_hangs_never_ends_and_a_healed_store_works() {
        let store = Faulty::new(MemoryStore::new());
        store.inject_always(Verb::Ready, Fault::Hang);
        let day = Duration::from_secs(24 * 3600);
        tokio::time::timeout(day, store.ready()).await.unwrap_err();
        store.heal();
        store.ready().await.unwrap();
        store.inject_times(Verb::Ready, Fault::Fail(StoreErrorKind::Full), 2);
        for expected in [Some(StoreErrorKind::Full), Some(StoreErrorKind::Full), None] {
            assert_eq!(store.ready().await.err().map(|error| error.kind()), expected);
        }
    }
}
