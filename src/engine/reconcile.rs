//! Asking the route's hook what became of an interrupted attempt, and settling the key by it.
//!
//! One question at a time per key in this process: whoever comes meanwhile waits for its answer
//! instead of asking the provider as well. Two processes may ask at once; the store takes the first
//! answer, since a resolution names the attempt that it is about.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures_util::FutureExt as _;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::{Call, Engine, observe};
use crate::config::{Found, Interrupted, Reconciler};
use crate::record::{Finding, Resolution, ResolveOutcome, Unsettled};
use crate::scope::StorageKey;

/// What came of asking.
#[derive(Clone, Debug)]
pub(super) enum Answered {
    /// The key is settled, by this answer or otherwise: claim again. The encoded response, if it was
    /// this very request that found one.
    Settled(Option<Bytes>),
    StillUnknown,
    Unreadable,
    StoreDown,
}

/// The questions that are being asked now, by key.
#[derive(Debug, Default)]
pub(super) struct Inquiries(Mutex<HashMap<StorageKey, watch::Receiver<Option<Answered>>>>);

/// The right to ask about a key. Whoever waits learns the answer, or that there is none.
struct Asking<'a> {
    inquiries: &'a Inquiries,
    key: StorageKey,
    answer: watch::Sender<Option<Answered>>,
}

impl Inquiries {
    fn lock(&self) -> MutexGuard<'_, HashMap<StorageKey, watch::Receiver<Option<Answered>>>> {
        // Nothing that can panic runs while the map is half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, key: StorageKey) -> Result<Asking<'_>, watch::Receiver<Option<Answered>>> {
        let mut open = self.lock();
        if let Some(other) = open.get(&key) {
            return Err(other.clone());
        }
        let (answer, waiting) = watch::channel(None);
        open.insert(key, waiting);
        Ok(Asking { inquiries: self, key, answer })
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.inquiries.lock().remove(&self.key);
    }
}

impl Engine {
    /// Finds out what became of an attempt, or waits for somebody who does.
    pub(super) async fn reconcile(
        &self,
        call: &Call,
        hook: &Reconciler,
        unsettled: Unsettled,
    ) -> Answered {
        match self.0.inquiries.begin(call.storage_key) {
            Ok(asking) => {
                let answered = self.ask_and_settle(call, hook, unsettled).await;
                let others = match &answered {
                    Answered::Settled(_) => Answered::Settled(None),
                    Answered::StillUnknown | Answered::Unreadable | Answered::StoreDown => {
                        answered.clone()
                    }
                };
                asking.answer.send_replace(Some(others));
                answered
            }
            Err(mut other) => {
                // Who asks is bounded, so this is. An error: it ended without an answer.
                let answer = other.wait_for(Option::is_some).await;
                answer.ok().and_then(|answer| answer.clone()).unwrap_or(Answered::StillUnknown)
            }
        }
    }

    async fn ask_and_settle(
        &self,
        call: &Call,
        hook: &Reconciler,
        unsettled: Unsettled,
    ) -> Answered {
        let (holder, attempt) = (unsettled.holder, unsettled.attempt);
        let interrupted =
            Interrupted::new(call.key.clone(), call.identity.clone(), call.seed(), unsettled);
        // The call itself may panic, not only the future it makes.
        let asked = async { hook.ask(interrupted).await };
        let asked = AssertUnwindSafe(asked).catch_unwind();
        let key = call.storage_key.log_id();
        let found = match timeout(call.policy.reconcile_within, asked).await {
            Ok(Ok(found)) => found,
            Ok(Err(_)) => {
                tracing::error!(key, "a reconcile hook panicked");
                Found::StillUnknown
            }
            Err(_) => {
                tracing::warn!(key, "a reconcile hook gave no answer in time");
                Found::StillUnknown
            }
        };
        let (finding, response) = match found {
            Found::Happened(response) => {
                let response = response.encode();
                (Finding::Happened(response.clone()), Some(response))
            }
            Found::NothingHappened => (Finding::NothingHappened, None),
            Found::StillUnknown => {
                observe::reconciled("still_unknown");
                return Answered::StillUnknown;
            }
        };
        let what = if response.is_some() { "happened" } else { "nothing_happened" };
        observe::reconciled(what);
        let terms = call.policy.terms;
        let resolution = Resolution { holder, attempt, finding, terms };
        let resolve = || self.0.store.resolve(call.storage_key, &resolution);
        match self
            .surely("resolve", call.storage_key, &call.policy, Instant::now(), resolve)
            .await
            .outcome
        {
            Ok(ResolveOutcome::Resolved) => {
                tracing::info!(
                    key,
                    attempt = attempt.number(),
                    found = what,
                    "an unknown outcome is settled by its hook"
                );
                Answered::Settled(response)
            }
            // Somebody else was first, or the attempt was alive after all.
            Ok(ResolveOutcome::Changed) => Answered::Settled(None),
            Ok(ResolveOutcome::Unreadable) => Answered::Unreadable,
            Err(_) => Answered::StoreDown,
        }
    }
}
