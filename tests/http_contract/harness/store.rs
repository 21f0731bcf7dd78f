//! A store that counts its calls and fails when it is told to.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

use tower_idempotency::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Release, ReleaseOutcome, RenewOutcome,
    Renewal, Resolution, ResolveOutcome,
};
use tower_idempotency::store::StoreFuture;
use tower_idempotency::{Lease, MemoryStore, StorageKey, Store, StoreError, StoreErrorKind};

use super::Gate;

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) enum Verb {
    Claim,
    Renew,
    Complete,
    Release,
}

/// How a call fails.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Fault {
    /// Not done, and said so.
    Is(StoreErrorKind),
    /// Done, but the reply is lost.
    LostReply,
    /// Not done, and never answered.
    Hangs,
}

#[derive(Debug, Default)]
struct Script {
    once: HashMap<Verb, VecDeque<Fault>>,
    always: HashMap<Verb, Fault>,
    calls: HashMap<Verb, usize>,
    last_claim: Option<(StorageKey, Claim)>,
    /// Answers claims as if the record could not be read.
    unreadable: bool,
    /// So many claims to come stop at a gate before they reach the record.
    held: Option<(usize, Gate)>,
}

#[derive(Clone, Debug)]
pub(crate) struct WatchedStore {
    inner: Arc<MemoryStore>,
    script: Arc<Mutex<Script>>,
}

impl WatchedStore {
    pub(crate) fn new(inner: MemoryStore) -> Self {
        Self { inner: Arc::new(inner), script: Arc::default() }
    }

    pub(crate) fn inner(&self) -> &MemoryStore {
        &self.inner
    }

    /// All calls so far.
    pub(crate) fn calls(&self) -> usize {
        self.script.lock().unwrap().calls.values().sum()
    }

    pub(crate) fn calls_of(&self, verb: Verb) -> usize {
        self.script.lock().unwrap().calls.get(&verb).copied().unwrap_or_default()
    }

    /// What was claimed last.
    pub(crate) fn last_claim(&self) -> (StorageKey, Claim) {
        self.script.lock().unwrap().last_claim.expect("something was claimed")
    }

    /// The next call of this verb fails so, the one after it is not affected.
    pub(crate) fn fail_once(&self, verb: Verb, fault: Fault) {
        self.script.lock().unwrap().once.entry(verb).or_default().push_back(fault);
    }

    pub(crate) fn fail(&self, verb: Verb, fault: Fault) {
        self.script.lock().unwrap().always.insert(verb, fault);
    }

    /// Every verb fails as if nothing listened.
    pub(crate) fn go_down(&self) {
        for verb in [Verb::Claim, Verb::Renew, Verb::Complete, Verb::Release] {
            self.fail(verb, Fault::Is(StoreErrorKind::Unavailable));
        }
    }

    pub(crate) fn recover(&self) {
        self.script.lock().unwrap().always.clear();
    }

    /// Drops the faults that were planned for single calls.
    pub(crate) fn forget_faults(&self) {
        self.script.lock().unwrap().once.clear();
    }

    /// The next claims, as many as this, are slow: they wait at the gate that is given back.
    pub(crate) fn hold_claims(&self, count: usize) -> Gate {
        let gate = Gate::closed();
        self.script.lock().unwrap().held = Some((count, gate.clone()));
        gate
    }

    pub(crate) fn become_unreadable(&self) {
        self.script.lock().unwrap().unreadable = true;
    }

    async fn through<T>(
        &self,
        verb: Verb,
        name: &'static str,
        call: StoreFuture<'_, T>,
    ) -> Result<T, StoreError> {
        let fault = {
            let mut script = self.script.lock().unwrap();
            *script.calls.entry(verb).or_default() += 1;
            let once = script.once.get_mut(&verb).and_then(VecDeque::pop_front);
            once.or_else(|| script.always.get(&verb).copied())
        };
        match fault {
            None => call.await,
            Some(Fault::Is(kind)) => Err(StoreError::new(kind, "watched", name)),
            Some(Fault::Hangs) => std::future::pending().await,
            Some(Fault::LostReply) => {
                call.await?;
                Err(StoreError::new(StoreErrorKind::OutcomeUnknown, "watched", name))
            }
        }
    }
}

impl Store for WatchedStore {
    fn name(&self) -> &'static str {
        "watched"
    }

    fn claim<'a>(
        &'a self,
        key: StorageKey,
        claim: &'a Claim,
    ) -> StoreFuture<'a, ClaimOutcome<Lease>> {
        Box::pin(async move {
            let (unreadable, gate) = {
                let mut script = self.script.lock().unwrap();
                script.last_claim = Some((key, *claim));
                let held = script.held.as_mut().filter(|(count, _)| *count > 0);
                let gate = held.map(|(count, gate)| {
                    *count -= 1;
                    gate.clone()
                });
                (script.unreadable, gate)
            };
            if let Some(gate) = gate {
                gate.pass().await;
            }
            // Made when it is called, so that a call that fails has not touched the record.
            let call = Box::pin(async move { self.inner.claim(key, claim).await });
            let outcome = self.through(Verb::Claim, "claim", call).await?;
            Ok(if unreadable { ClaimOutcome::Unreadable } else { outcome })
        })
    }

    fn renew<'a>(
        &'a self,
        lease: &'a Lease,
        renewal: &'a Renewal,
    ) -> StoreFuture<'a, RenewOutcome> {
        let call = Box::pin(async move { self.inner.renew(lease, renewal).await });
        Box::pin(self.through(Verb::Renew, "renew", call))
    }

    fn complete<'a>(
        &'a self,
        lease: &'a Lease,
        completion: &'a Completion,
    ) -> StoreFuture<'a, CompleteOutcome> {
        let call = Box::pin(async move { self.inner.complete(lease, completion).await });
        Box::pin(self.through(Verb::Complete, "complete", call))
    }

    fn release<'a>(
        &'a self,
        lease: &'a Lease,
        release: &'a Release,
    ) -> StoreFuture<'a, ReleaseOutcome> {
        let call = Box::pin(async move { self.inner.release(lease, release).await });
        Box::pin(self.through(Verb::Release, "release", call))
    }

    fn resolve<'a>(
        &'a self,
        key: StorageKey,
        resolution: &'a Resolution,
    ) -> StoreFuture<'a, ResolveOutcome> {
        self.inner.resolve(key, resolution)
    }

    fn ready(&self) -> StoreFuture<'_, ()> {
        self.inner.ready()
    }
}
