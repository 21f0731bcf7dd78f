//! What a handler may know about its own run.

use std::fmt;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::key::IdempotencyKey;
use crate::scope::DownstreamSeed;
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
    key: IdempotencyKey,
    seed: DownstreamSeed,
    held: Option<Held>,
    lost: CancellationToken,
}

struct Held {
    attempt: Attempt,
    fence: Fence,
    takeover: bool,
}

impl Execution {
    pub(super) fn held(
        key: &IdempotencyKey,
        seed: DownstreamSeed,
        lease: &Lease,
        lost: &CancellationToken,
    ) -> Self {
        let grant = lease.grant();
        let held = Held { attempt: grant.attempt, fence: grant.fence, takeover: grant.takeover };
        Self(Arc::new(Inner { key: key.clone(), seed, held: Some(held), lost: lost.clone() }))
    }

    pub(super) fn unprotected(key: &IdempotencyKey, seed: DownstreamSeed) -> Self {
        let lost = CancellationToken::new();
        lost.cancel();
        Self(Arc::new(Inner { key: key.clone(), seed, held: None, lost }))
    }

    /// The key of the operation.
    #[must_use]
    pub fn key(&self) -> &IdempotencyKey {
        &self.0.key
    }

    /// Which run this is: 1, and one more for each time the key was claimed again, also if the
    /// handler of an earlier claim never started. What an earlier run may have done is
    /// [`is_takeover`](Self::is_takeover).
    #[must_use]
    pub fn attempt(&self) -> Attempt {
        self.0.held.as_ref().map_or(Attempt::FIRST, |held| held.attempt)
    }

    /// The fence of this run, for resources that can refuse a smaller one than they have seen.
    /// Zero if the run is [unprotected](Self::is_protected).
    ///
    /// It keeps a late run out. It does not keep the next one from repeating the effect; for that,
    /// pass a [`downstream_key`](Self::downstream_key).
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.0.held.as_ref().map_or(Fence::from_number(0), |held| held.fence)
    }

    /// True if an earlier run of this operation may have had its effect.
    #[must_use]
    pub fn is_takeover(&self) -> bool {
        self.0.held.as_ref().is_some_and(|held| held.takeover)
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
        self.0.seed.key_for(effect)
    }

    /// Completes when the lease of this run is lost: it could not be renewed in time, or somebody
    /// else holds the key. Stop before the next irreversible step.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect; the next one completes as well.
    pub async fn lease_lost(&self) {
        self.0.lost.cancelled().await;
    }

    /// True once the lease of this run is lost.
    #[must_use]
    pub fn is_lease_lost(&self) -> bool {
        self.0.lost.is_cancelled()
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
