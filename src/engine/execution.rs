//! What a handler may know about its own run.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

use super::signal::Signal;
use super::{Call, Engine};
use crate::checkpoint;
use crate::config::Policy;
use crate::error::CheckpointError;
use crate::key::IdempotencyKey;
use crate::mistakes::{Mistake, made};
use crate::record::{Effects, RenewOutcome, Renewal, Verdict};
use crate::store::Lease;
use crate::token::{Attempt, Fence};

/// The run of a handler under a key: its number, its fence, its keys for calls outward.
///
/// A handler gets it from the request's extensions (with axum: as an extractor).
///
/// # Clone
/// Clones are the same run.
///
/// # Example
/// ```
/// # #[cfg(feature = "axum")] {
/// use tower_idempotency::Execution;
///
/// async fn create_payment(execution: Execution) -> String {
///     // The same over all runs of this operation, so the provider charges once.
///     let provider_key = execution.downstream_key("charge");
///     format!("attempt {}, provider key {provider_key}", execution.attempt().number())
/// }
/// # let _ = create_payment;
/// # }
/// ```
#[derive(Clone)]
pub struct Execution(Arc<Inner>);

struct Inner {
    call: Arc<Call>,
    held: Option<Held>,
    lost: Arc<Signal>,
}

struct Held {
    engine: Engine,
    lease: Lease,
    marks: Marks,
    /// The checkpoint that was made last, in this run or an earlier one.
    last: Mutex<Bytes>,
    /// One checkpoint is sent at a time, so that the last one made is the one that is kept.
    turn: tokio::sync::Mutex<()>,
}

/// Whether a run has made a checkpoint, or may not make any more.
///
/// A run that [marks its effects](Effects::Marked) and ends without a word has done nothing if it has
/// not marked anything. That is decided once: from then on its checkpoints fail.
#[derive(Debug, Default)]
pub(super) struct Marks(AtomicU8);

const NONE: u8 = 0;
const MADE: u8 = 1;
const CLOSED: u8 = 2;

impl Marks {
    /// Says that a checkpoint is about to be made; false if none may be.
    fn make(&self) -> bool {
        let set = self.0.compare_exchange(NONE, MADE, Ordering::AcqRel, Ordering::Acquire);
        set.map_or_else(|found| found == MADE, |_| true)
    }

    /// Allows no checkpoint any more; false if one was made.
    fn close(&self) -> bool {
        let set = self.0.compare_exchange(NONE, CLOSED, Ordering::AcqRel, Ordering::Acquire);
        set.map_or_else(|found| found == CLOSED, |_| true)
    }

    /// What is known of a run that ended without a word, or has to.
    pub(super) fn verdict(&self, lease: &Lease, policy: &Policy) -> Verdict {
        if made(Mistake::ErrorsFreeTheKey) {
            return Verdict::NoEffect;
        }
        // One that followed an interrupted run says nothing about that one.
        let clean = policy.effects == Effects::Marked && !lease.grant().takeover;
        if clean && self.close() { Verdict::NoEffect } else { Verdict::Unknown }
    }
}

impl Execution {
    pub(super) fn held(
        engine: &Engine,
        call: &Arc<Call>,
        lease: &Lease,
        lost: &Arc<Signal>,
    ) -> Self {
        let held = Held {
            engine: engine.clone(),
            lease: lease.clone(),
            marks: Marks::default(),
            last: Mutex::new(lease.grant().checkpoint.clone()),
            turn: tokio::sync::Mutex::default(),
        };
        Self(Arc::new(Inner { call: Arc::clone(call), held: Some(held), lost: Arc::clone(lost) }))
    }

    pub(super) fn unprotected(call: &Arc<Call>) -> Self {
        let lost = Arc::new(Signal::default());
        lost.give();
        Self(Arc::new(Inner { call: Arc::clone(call), held: None, lost }))
    }

    /// What is known of this run if it ends without a word: nothing, of one without a lease.
    pub(super) fn verdict(&self) -> Verdict {
        let policy = &self.0.call.policy;
        let held = self.0.held.as_ref();
        held.map_or(Verdict::Unknown, |held| held.marks.verdict(&held.lease, policy))
    }

    /// Gives the run up while it goes on, at a shutdown: tells it so, and what is to be recorded.
    pub(super) fn abandon(&self) -> Option<(&Lease, &Policy, Verdict)> {
        let held = self.0.held.as_ref()?;
        let verdict = self.verdict();
        self.0.lost.give();
        Some((&held.lease, &self.0.call.policy, verdict))
    }

    /// The key of the operation.
    #[must_use]
    pub fn key(&self) -> &IdempotencyKey {
        &self.0.call.key
    }

    /// Which run this is: 1, and one more for each time the key was claimed again, also if the
    /// handler of an earlier claim never started. What an earlier run may have done is
    /// [`is_takeover`](Self::is_takeover).
    #[must_use]
    pub fn attempt(&self) -> Attempt {
        self.0.held.as_ref().map_or(Attempt::FIRST, |held| held.lease.grant().attempt)
    }

    /// The fence of this run, for resources that can refuse a smaller one than they have seen.
    /// Zero if the run is [unprotected](Self::is_protected).
    ///
    /// It keeps a late run out. It does not keep the next one from repeating the effect; for that,
    /// pass a [`downstream_key`](Self::downstream_key).
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.0.held.as_ref().map_or(Fence::from_number(0), |held| held.lease.grant().fence)
    }

    /// True if an earlier run of this operation may have had its effect.
    #[must_use]
    pub fn is_takeover(&self) -> bool {
        self.0.held.as_ref().is_some_and(|held| held.lease.grant().takeover)
    }

    /// False if the store was down and the route runs unprotected then
    /// ([`StoreDown::RunUnprotected`](crate::StoreDown::RunUnprotected)).
    #[must_use]
    pub fn is_protected(&self) -> bool {
        self.0.held.is_some()
    }

    /// The idempotency key to hand to a provider for one effect of this handler, say `"charge"`.
    ///
    /// Made from scope, key and `effect` alone, so it is the same over all runs, processes and
    /// restarts. 36 characters, in the form of a UUID.
    #[must_use]
    pub fn downstream_key(&self, effect: &str) -> String {
        if made(Mistake::FenceDownstream) {
            return self.0.call.seed().key_for(&format!("{effect} {}", self.fence().number()));
        }
        self.0.call.seed().key_for(effect)
    }

    /// Notes `state` down for a later attempt, which reads it by
    /// [`last_checkpoint`](Self::last_checkpoint), and extends the lease. Up to 16 KiB of JSON.
    ///
    /// When it returns `Ok`, the store has it, and this run still holds the key. So it is also the
    /// place to stop: on an error nothing irreversible may follow. On a route with
    /// [`Effects::Marked`](crate::Effects::Marked) the first checkpoint stands before the first effect.
    ///
    /// A run without [protection](Self::is_protected) has nowhere to note anything down; it is not
    /// stopped, and this does nothing.
    ///
    /// # Errors
    /// [`CheckpointError`] if the lease is lost, the store does not confirm in time, or the state
    /// cannot be kept.
    ///
    /// # Cancel safety
    /// Dropping the future leaves it open whether the checkpoint is made.
    ///
    /// # Example
    /// ```
    /// use serde::{Deserialize, Serialize};
    /// use tower_idempotency::{CheckpointError, Execution};
    /// # async fn charge() -> String { String::new() }
    ///
    /// #[derive(Serialize, Deserialize)]
    /// enum Step {
    ///     Charging,
    ///     Charged(String),
    /// }
    ///
    /// async fn pay(execution: Execution) -> Result<String, CheckpointError> {
    ///     if let Some(Step::Charged(id)) = execution.last_checkpoint()? {
    ///         return Ok(id); // an earlier attempt came this far
    ///     }
    ///     execution.checkpoint(&Step::Charging).await?;
    ///     let id = charge().await;
    ///     execution.checkpoint(&Step::Charged(id.clone())).await?;
    ///     Ok(id)
    /// }
    /// # let _ = pay;
    /// ```
    pub async fn checkpoint<T: Serialize + ?Sized>(
        &self,
        state: &T,
    ) -> Result<(), CheckpointError> {
        let bytes = checkpoint::encode(state)?;
        let Some(held) = &self.0.held else { return Ok(()) };
        let _turn = held.turn.lock().await;
        if !held.marks.make() {
            return Err(CheckpointError::LeaseLost);
        }
        let policy = &self.0.call.policy;
        let renewal = Renewal { terms: policy.terms, checkpoint: Some(bytes.clone()) };
        let renew = || held.engine.store().renew(&held.lease, &renewal);
        let key = held.lease.key();
        match held.engine.surely("checkpoint", key, policy, Instant::now(), renew).await.outcome {
            Ok(RenewOutcome::Renewed | RenewOutcome::Restored) => {
                *held.last.lock().unwrap_or_else(PoisonError::into_inner) = bytes;
                Ok(())
            }
            Ok(RenewOutcome::Lost | RenewOutcome::Unreadable) => {
                self.0.lost.give();
                Err(CheckpointError::LeaseLost)
            }
            Err(error) => Err(CheckpointError::Unconfirmed(error)),
        }
    }

    /// What was noted down last by [`checkpoint`](Self::checkpoint), in this run or an earlier one of
    /// the operation; `None` if nothing was.
    ///
    /// # Errors
    /// [`CheckpointError`] if what is there is no `T`.
    pub fn last_checkpoint<T: DeserializeOwned>(&self) -> Result<Option<T>, CheckpointError> {
        let Some(held) = &self.0.held else { return Ok(None) };
        let bytes = held.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        checkpoint::decode(&bytes)
    }

    /// Completes when the lease of this run is lost: it could not be renewed in time, or somebody
    /// else holds the key. Stop before the next irreversible step.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect; the next one completes as well.
    pub async fn lease_lost(&self) {
        self.0.lost.given().await;
    }

    /// True once the lease of this run is lost.
    #[must_use]
    pub fn is_lease_lost(&self) -> bool {
        self.0.lost.is_given()
    }
}

impl fmt::Debug for Execution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Execution")
            .field("attempt", &self.attempt())
            .field("fence", &self.fence())
            .field("protected", &self.is_protected())
            .field("lease_lost", &self.is_lease_lost())
            .finish_non_exhaustive()
    }
}
