//! The contract that every store keeps.
//!
//! A store holds one [`Record`](crate::record::Record) per [`StorageKey`] and offers five verbs. What each does to each
//! state is written once, in [`record`](crate::record); a store is that, made atomic and durable.
//!
//! # Guarantees
//! Checked by `store::conformance` (feature `conformance`) for every store:
//! 1. Of any number of concurrent claims for one key at most one is granted, until its lease ends.
//! 2. `renew`, `complete` and `release` change nothing unless the lease's holder is still the last one.
//! 3. Every verb may be sent again with the same arguments after a lost reply: a claim is then
//!    recognised by its holder id, a completion by holder and response.
//! 4. A completed record is returned unchanged until its retention ends. Nothing evicts it earlier.
//! 5. Leases and retention are judged by the store's clock, never by the caller's.
//!
//! There is no verb that only reads: it would invite "check, then act". Operators have a trait of their
//! own, [`Inspect`], which the layer never sees.

#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(feature = "conformance")]
mod faulty;
mod inspect;
mod memory;
#[cfg(feature = "protect")]
mod protected;
#[cfg(feature = "redis")]
pub mod redis;
mod seal;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub mod sql;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::Extensions;
#[cfg(feature = "redis")]
use tokio::time::Instant;

#[cfg(feature = "conformance")]
pub use faulty::{Fault, Faulty, Gate, Verb};
#[cfg(feature = "admin")]
pub(crate) use inspect::NoPage;
pub use inspect::{
    AuditCursor, AuditStep, Contents, Entry, Glance, Inspect, Listing, LogId, Page, Pass, Sight,
    Source, Survey, TrailEntry, Wanted,
};
pub use memory::{MemoryStore, MemoryStoreBuilder};
#[cfg(feature = "protect")]
pub use protected::{Protected, ProtectionKeyId, ProtectionKeys};
pub use seal::Sealing;

use crate::error::StoreError;
#[cfg(feature = "redis")]
use crate::record::Millis;
use crate::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Grant, Owner, Release, ReleaseOutcome,
    RenewOutcome, Renewal, Resolution, ResolveOutcome,
};
use crate::scope::StorageKey;

/// The future of a store's verb: boxed, so that a store can be a trait object.
pub type StoreFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'a>>;

/// The time-limited right to run the handler of one key.
///
/// # Clone
/// Clones are the same lease.
#[derive(Clone, Debug)]
#[must_use = "a lease that is not completed or released blocks its key until it ends"]
pub struct Lease(Arc<Held>);

/// Shared, since a lease passes through many hands and is large.
#[derive(Clone, Debug)]
struct Held {
    key: StorageKey,
    owner: Owner,
    grant: Grant,
    attachments: Extensions,
    repeatable: bool,
    #[cfg(feature = "redis")]
    granted: Instant,
    /// The key as Redis has it, if it was made for the claim.
    #[cfg(feature = "redis")]
    text: Option<[u8; StorageKey::TEXT_LENGTH]>,
}

impl Lease {
    /// The lease of a granted claim.
    pub fn new(key: StorageKey, claim: &Claim, grant: Grant) -> Self {
        Self(Arc::new(Held {
            key,
            owner: Self::owner_of(claim, &grant),
            grant,
            attachments: Extensions::new(),
            repeatable: false,
            #[cfg(feature = "redis")]
            granted: Instant::now(),
            #[cfg(feature = "redis")]
            text: None,
        }))
    }

    /// The same with what its store knows already.
    #[cfg(feature = "redis")]
    pub(crate) fn named(
        key: StorageKey,
        text: [u8; StorageKey::TEXT_LENGTH],
        claim: &Claim,
        grant: Grant,
        granted: Instant,
    ) -> Self {
        Self(Arc::new(Held {
            key,
            owner: Self::owner_of(claim, &grant),
            grant,
            attachments: Extensions::new(),
            repeatable: false,
            granted,
            text: Some(text),
        }))
    }

    fn owner_of(claim: &Claim, grant: &Grant) -> Owner {
        Owner {
            holder: claim.holder,
            fingerprints: claim.fingerprints,
            attempt: grant.attempt,
            fence: grant.fence,
            created: grant.created,
        }
    }

    fn held(&mut self) -> &mut Held {
        Arc::make_mut(&mut self.0)
    }

    /// Which key it is for.
    #[must_use]
    pub fn key(&self) -> StorageKey {
        self.0.key
    }

    /// Who holds it.
    #[must_use]
    pub fn owner(&self) -> &Owner {
        &self.0.owner
    }

    /// What the store's clock says now in a first attempt, as far as one can tell who read it at the claim.
    /// Nothing is decided by it.
    #[cfg(feature = "redis")]
    pub(crate) fn about_now(&self, now: Instant) -> Millis {
        self.0.owner.created.after(now.saturating_duration_since(self.0.granted))
    }

    /// The key as Redis has it, if it was made for the claim.
    #[cfg(feature = "redis")]
    pub(crate) fn text(&self) -> Option<&[u8; StorageKey::TEXT_LENGTH]> {
        self.0.text.as_ref()
    }

    /// What the store granted.
    #[must_use]
    pub fn grant(&self) -> &Grant {
        &self.0.grant
    }

    /// True if `complete` may answer [`RolledBack`](crate::StoreErrorKind::RolledBack), after which
    /// the handler may run again within the same request.
    #[must_use]
    pub fn is_repeatable(&self) -> bool {
        self.0.repeatable
    }

    /// Says that the store undoes all of the handler's effects when it answers
    /// [`RolledBack`](crate::StoreErrorKind::RolledBack). Only a store that holds the handler's
    /// transaction can say this.
    pub fn repeatable(mut self) -> Self {
        self.held().repeatable = true;
        self
    }

    /// What the store wants the handler to find in its request, for example a transaction.
    #[must_use]
    pub fn attachments(&self) -> &Extensions {
        &self.0.attachments
    }

    /// Lets a store attach something for the handler, before the lease is given away.
    pub fn attachments_mut(&mut self) -> &mut Extensions {
        &mut self.held().attachments
    }
}

/// Where records are kept. See the [module](self) for what a store guarantees.
///
/// # Errors
/// Every verb fails with a [`StoreError`] whose kind says whether it may have been done:
/// [`OutcomeUnknown`](crate::StoreErrorKind::OutcomeUnknown) means that the same call has to be
/// sent again to find out, and that this is safe.
///
/// # Cancel safety
/// Dropping a verb's future leaves the record either changed or as it was, and nothing else.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// The store's name in logs, metrics and errors, for example `redis`.
    fn name(&self) -> &'static str;

    /// How long a verb takes at most, if the store bounds that by itself. Without a promise the engine
    /// bounds each call.
    fn answers_within(&self) -> Option<Duration> {
        None
    }

    /// What keeps claims waiting at this moment, if the store knows, and what to change: for the log, where one was
    /// not answered in time.
    fn holdup(&self) -> Option<&'static str> {
        None
    }

    /// Tries to become the one who runs the handler of `key`.
    fn claim<'a>(
        &'a self,
        key: StorageKey,
        claim: &'a Claim,
    ) -> StoreFuture<'a, ClaimOutcome<Lease>>;

    /// Extends a lease from now.
    fn renew<'a>(&'a self, lease: &'a Lease, renewal: &'a Renewal)
    -> StoreFuture<'a, RenewOutcome>;

    /// Stores the response and ends the lease.
    fn complete<'a>(
        &'a self,
        lease: &'a Lease,
        completion: &'a Completion,
    ) -> StoreFuture<'a, CompleteOutcome>;

    /// Gives the claim up.
    fn release<'a>(
        &'a self,
        lease: &'a Lease,
        release: &'a Release,
    ) -> StoreFuture<'a, ReleaseOutcome>;

    /// Settles an outcome that was unknown.
    fn resolve<'a>(
        &'a self,
        key: StorageKey,
        resolution: &'a Resolution,
    ) -> StoreFuture<'a, ResolveOutcome>;

    /// Answers if the store can do its work now: runs a real script or statement, not a ping.
    fn ready(&self) -> StoreFuture<'_, ()>;
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn answers_within(&self) -> Option<Duration> {
        (**self).answers_within()
    }

    fn holdup(&self) -> Option<&'static str> {
        (**self).holdup()
    }

    fn claim<'a>(
        &'a self,
        key: StorageKey,
        claim: &'a Claim,
    ) -> StoreFuture<'a, ClaimOutcome<Lease>> {
        (**self).claim(key, claim)
    }

    fn renew<'a>(
        &'a self,
        lease: &'a Lease,
        renewal: &'a Renewal,
    ) -> StoreFuture<'a, RenewOutcome> {
        (**self).renew(lease, renewal)
    }

    fn complete<'a>(
        &'a self,
        lease: &'a Lease,
        completion: &'a Completion,
    ) -> StoreFuture<'a, CompleteOutcome> {
        (**self).complete(lease, completion)
    }

    fn release<'a>(
        &'a self,
        lease: &'a Lease,
        release: &'a Release,
    ) -> StoreFuture<'a, ReleaseOutcome> {
        (**self).release(lease, release)
    }

    fn resolve<'a>(
        &'a self,
        key: StorageKey,
        resolution: &'a Resolution,
    ) -> StoreFuture<'a, ResolveOutcome> {
        (**self).resolve(key, resolution)
    }

    fn ready(&self) -> StoreFuture<'_, ()> {
        (**self).ready()
    }
}
