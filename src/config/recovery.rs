//! What happens to a key whose handler died, and the hook that finds out.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use http::Response;
use serde::de::DeserializeOwned;

use crate::checkpoint;
use crate::error::CheckpointError;
use crate::key::IdempotencyKey;
use crate::record::{OnExpired, Unsettled};
use crate::response::{HeaderRules, StoredResponse};
use crate::scope::{DownstreamSeed, Identity};
use crate::token::{Attempt, Fence};

/// What happens to a key whose handler died, or was paused past its lease.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Recovery {
    /// Nothing runs: retries are told that the outcome is unknown (409) until it is settled.
    #[default]
    AtMostOnce,
    /// The handler runs again. Only for handlers whose every effect deduplicates on
    /// [`Execution::downstream_key`](crate::Execution::downstream_key).
    AtLeastOnce,
    /// Your hook is asked what happened, and its answer settles the key.
    /// Made by [`Recovery::reconcile`].
    Reconcile(Reconciler),
}

impl Recovery {
    /// Asks `hook` what became of an interrupted attempt, when its key is claimed again.
    ///
    /// **Fence first, then look.** A handler that is only paused may still act after the hook has
    /// looked and found nothing. So before it looks, the hook must make the old attempt unable to
    /// act: raise the fence at the resource above [`Interrupted::fence`], void the authorisation,
    /// or rely on a provider that deduplicates on [`Interrupted::downstream_key`].
    ///
    /// It is asked at most once at a time for a key in each process, and dropped after
    /// [`reconcile_within`](crate::ConfigBuilder::reconcile_within); an answer that did not come, or
    /// a panic, counts as [`Found::StillUnknown`]. Two processes may ask at the same time: the store
    /// takes the first answer, and the second changes nothing.
    ///
    /// # Example
    /// ```
    /// use bytes::Bytes;
    /// use tower_idempotency::{Found, Interrupted, Recovery};
    /// # async fn find_charge(provider_key: &str) -> Result<Option<String>, ()> { Ok(None) }
    ///
    /// let recovery = Recovery::reconcile(async |interrupted: Interrupted| {
    ///     // The provider deduplicates on this key, so a late charge finds the one of the retry.
    ///     match find_charge(&interrupted.downstream_key("charge")).await {
    ///         Ok(Some(charge)) => Found::happened(http::Response::new(Bytes::from(charge))),
    ///         Ok(None) => Found::NothingHappened,
    ///         Err(_) => Found::StillUnknown,
    ///     }
    /// });
    /// # let _ = recovery;
    /// ```
    pub fn reconcile<H, F>(hook: H) -> Self
    where
        H: Fn(Interrupted) -> F + Send + Sync + 'static,
        F: Future<Output = Found> + Send + 'static,
    {
        Self::Reconcile(Reconciler(Arc::new(move |interrupted| Box::pin(hook(interrupted)))))
    }

    pub(crate) fn on_expired(&self) -> OnExpired {
        match self {
            Self::AtMostOnce | Self::Reconcile(_) => OnExpired::Refuse,
            Self::AtLeastOnce => OnExpired::Reexecute,
        }
    }
}

type Asked = Pin<Box<dyn Future<Output = Found> + Send>>;

/// A hook that finds out what happened. Made by [`Recovery::reconcile`].
///
/// # Clone
/// Clones are the same hook.
#[derive(Clone)]
pub struct Reconciler(Arc<dyn Fn(Interrupted) -> Asked + Send + Sync>);

impl Reconciler {
    pub(crate) fn ask(&self, interrupted: Interrupted) -> Asked {
        (self.0)(interrupted)
    }
}

impl fmt::Debug for Reconciler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reconciler(..)")
    }
}

/// What a hook found out.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_enums, reason = "there is no fourth thing to find")]
pub enum Found {
    /// The effect happened: this is the answer, for this retry and all later ones.
    Happened(StoredResponse),
    /// Nothing happened, and the old attempt cannot act any more: the handler runs again, from its beginning. What the
    /// old one noted down is gone with what it marked; where a part was done, this is not to be said.
    NothingHappened,
    /// It cannot be said now: retries are told so, and the next one asks again.
    StillUnknown,
}

impl Found {
    /// The effect happened, and this is the answer to it.
    #[must_use]
    pub fn happened(response: Response<Bytes>) -> Self {
        let (head, body) = response.into_parts();
        Self::Happened(StoredResponse::new(&head, body, &HeaderRules::default()))
    }
}

/// An attempt whose outcome nobody knows: all that is known of it.
#[derive(Clone)]
pub struct Interrupted {
    key: IdempotencyKey,
    identity: Identity,
    seed: DownstreamSeed,
    unsettled: Unsettled,
}

impl Interrupted {
    pub(crate) fn new(
        key: IdempotencyKey,
        identity: Identity,
        seed: DownstreamSeed,
        unsettled: Unsettled,
    ) -> Self {
        Self { key, identity, seed, unsettled }
    }

    /// The key of the operation.
    #[must_use]
    pub fn key(&self) -> &IdempotencyKey {
        &self.key
    }

    /// Whose operation it is: what the [`Scope`](crate::Scope) found in the request.
    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Which run was interrupted.
    #[must_use]
    pub fn attempt(&self) -> Attempt {
        self.unsettled.attempt
    }

    /// The fence of that run. A resource that refuses this fence and all below it is safe from it.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.unsettled.fence
    }

    /// The key that the run gave to its provider for this effect.
    #[must_use]
    pub fn downstream_key(&self, effect: &str) -> String {
        self.seed.key_for(effect)
    }

    /// What was noted down last by [`Execution::checkpoint`](crate::Execution::checkpoint), in this
    /// run or an earlier one; `None` if nothing was.
    ///
    /// # Errors
    /// [`CheckpointError`] if what is there is no `T`.
    pub fn last_checkpoint<T: DeserializeOwned>(&self) -> Result<Option<T>, CheckpointError> {
        checkpoint::decode(&self.unsettled.checkpoint)
    }
}

impl fmt::Debug for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interrupted")
            .field("attempt", &self.attempt())
            .field("fence", &self.fence())
            .finish_non_exhaustive()
    }
}
