//! The suite that every store passes: one function per promise, and [`run_all`].
//!
//! A store of your own is checked by one test:
//!
//! ```
//! # use tower_idempotency::MemoryStore;
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let store = MemoryStore::new(); // yours
//! tower_idempotency::store::conformance::run_all(&store).await;
//! # }
//! ```
//!
//! Each function draws keys of its own, so they can run against a store that holds other records,
//! and at the same time. Some wait for a lease or a retention of a tenth of a second to end, on
//! tokio's clock.
//!
//! # Panics
//! Every function panics when the store breaks the promise that the function is named after. The
//! message begins with the store's name.

#![allow(clippy::missing_panics_doc, reason = "panicking is what these functions are for")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome breaks the promise")]

mod inspecting;
mod settling;
mod sharing;
mod timing;

use std::future::Future;
use std::time::Duration;

use bytes::Bytes;

pub use inspecting::run_all_inspect;
pub use settling::*;
pub use sharing::*;
pub use timing::*;

use super::{Lease, Store};
use crate::error::StoreError;
use crate::fingerprint::{Fingerprint, Fingerprints, RecipeId};
use crate::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Effects, Finding, OnExpired, Release,
    ReleaseOutcome, RenewOutcome, Renewal, Resolution, ResolveOutcome, Terms, Unsettled, Verdict,
    Writes,
};
use crate::scope::StorageKey;
use crate::token::HolderId;

/// A lease, or a retention, that ends while a test waits.
const SHORT: Duration = Duration::from_millis(100);

/// How long a test waits for it: half as long again, for clocks that tick differently.
const AFTER_SHORT: Duration = Duration::from_millis(150);

/// One that does not end during a test, however slow the machine.
const LONG: Duration = Duration::from_secs(600);

const STEADY: Terms = Terms { lease: LONG, retention: LONG, unknown_retention: LONG };

macro_rules! suite {
    ($($promise:ident),+ $(,)?) => {
        /// Runs the whole suite against a store, one promise after another.
        pub async fn run_all(store: &dyn Store) {
            $($promise(store).await;)+
        }

        /// The names of all promises, in the order of [`run_all`].
        pub const PROMISES: &[&str] = &[$(stringify!($promise)),+];
    };
}

suite! {
    a_store_in_order_says_that_it_is_ready,
    of_64_concurrent_claims_one_is_granted,
    a_claim_that_is_sent_again_is_recognised_by_its_holder,
    a_running_claim_tells_what_is_left_of_its_lease,
    keys_are_independent,
    another_request_is_a_mismatch_in_each_state_but_open,
    a_record_by_an_older_recipe_is_compared_by_that_recipe,
    a_record_by_an_unknown_recipe_is_unreadable_and_stays,
    a_stranger_changes_nothing,
    responses_are_opaque_bytes,
    a_completed_record_is_returned_unchanged,
    a_completion_may_be_sent_again,
    a_completion_of_a_lost_record_restores_it,
    a_renewal_of_a_lost_record_restores_it,
    the_loser_of_a_completion_gets_the_first_response,
    an_open_key_is_free_for_a_corrected_request,
    giving_up_without_knowing_leaves_the_outcome_unknown,
    a_release_may_be_sent_again,
    a_resolution_settles_and_clears_the_holder,
    a_resolution_of_something_else_changes_nothing,
    a_lease_that_is_over_leaves_the_outcome_unknown,
    a_lease_that_is_over_is_taken_over_where_that_is_allowed,
    a_late_completion_heals,
    a_renewal_extends_the_lease,
    a_checkpoint_survives_its_attempt,
    an_attempt_that_marks_its_effects_and_dies_before_the_first_frees_its_key,
    an_attempt_that_dies_behind_a_checkpoint_leaves_the_outcome_unknown,
    the_fence_grows_with_every_claim,
    after_its_retention_a_record_is_gone,
    an_unknown_outcome_outlives_the_retention_of_answers,
    a_record_in_flight_outlives_its_lease,
}

/// A key of its own, and the store it is used in.
struct Case<'a> {
    store: &'a dyn Store,
    key: StorageKey,
}

impl<'a> Case<'a> {
    fn new(store: &'a dyn Store) -> Self {
        let mut bytes = [0; 24];
        bytes[..16].copy_from_slice(HolderId::random().as_bytes());
        Self { store, key: StorageKey::from_bytes(bytes) }
    }

    #[track_caller]
    fn assert(&self, holds: bool, promise: &str) {
        assert!(holds, "{} store: {promise}", self.store.name());
    }

    #[track_caller]
    fn assert_eq<T: PartialEq + std::fmt::Debug>(&self, got: &T, expected: &T, promise: &str) {
        assert_eq!(got, expected, "{} store: {promise}", self.store.name());
    }

    async fn must<T>(&self, call: impl Future<Output = Result<T, StoreError>>) -> T {
        match call.await {
            Ok(outcome) => outcome,
            Err(error) => panic!("{} store: failed: {error:?}", self.store.name()),
        }
    }

    async fn claim(&self, claim: &Claim) -> ClaimOutcome<Lease> {
        self.must(self.store.claim(self.key, claim)).await
    }

    async fn granted(&self, claim: &Claim) -> Lease {
        match self.claim(claim).await {
            ClaimOutcome::Acquired(lease) => lease,
            other => panic!("{} store: expected a grant, got {other:?}", self.store.name()),
        }
    }

    async fn renew(&self, lease: &Lease, terms: Terms) -> RenewOutcome {
        let renewal = Renewal { terms, checkpoint: None };
        self.must(self.store.renew(lease, &renewal)).await
    }

    async fn complete(&self, lease: &Lease, response: &'static [u8]) -> CompleteOutcome {
        let completion = Completion {
            terms: STEADY,
            response: Bytes::from_static(response),
            writes: Writes::Keep,
        };
        self.must(self.store.complete(lease, &completion)).await
    }

    async fn release(&self, lease: &Lease, verdict: Verdict) -> ReleaseOutcome {
        let release = Release { terms: STEADY, verdict };
        self.must(self.store.release(lease, &release)).await
    }

    async fn resolve(&self, unsettled: &Unsettled, finding: Finding) -> ResolveOutcome {
        let Unsettled { holder, attempt, .. } = *unsettled;
        let resolution = Resolution { holder, attempt, finding, terms: STEADY };
        self.must(self.store.resolve(self.key, &resolution)).await
    }

    /// Brings the key into the state "nobody knows", and says whose outcome that is.
    async fn make_indeterminate(&self) -> (Lease, Unsettled) {
        let lease = self.granted(&request(1)).await;
        self.release(&lease, Verdict::Unknown).await;
        let unsettled = unsettled_of(&lease);
        (lease, unsettled)
    }

    async fn assert_replays(&self, response: &'static [u8], promise: &str) {
        match self.claim(&request(1)).await {
            ClaimOutcome::Completed(stored) => self.assert_eq(&&stored[..], &response, promise),
            other => panic!("{} store: {promise}, got {other:?}", self.store.name()),
        }
    }
}

/// What a claim is told of this lease once it is over.
fn unsettled_of(lease: &Lease) -> Unsettled {
    let owner = lease.owner();
    let checkpoint = lease.grant().checkpoint.clone();
    Unsettled { holder: owner.holder, attempt: owner.attempt, fence: owner.fence, checkpoint }
}

const RECIPE: RecipeId = RecipeId::from_bytes(*b"now.");
const OLD_RECIPE: RecipeId = RecipeId::from_bytes(*b"old.");
const FORGOTTEN_RECIPE: RecipeId = RecipeId::from_bytes(*b"gone");

fn print(recipe: RecipeId, body: u8) -> Fingerprint {
    Fingerprint::from_stored(recipe, [body; 32])
}

/// A claim by somebody new, of a request that is told from others by `body`.
fn request(body: u8) -> Claim {
    Claim {
        holder: HolderId::random(),
        fingerprints: Fingerprints::one(print(RECIPE, body)),
        terms: STEADY,
        on_expired: OnExpired::Refuse,
        effects: Effects::Anywhere,
    }
}

fn request_for(body: u8, lease: Duration) -> Claim {
    let claim = request(body);
    Claim { terms: Terms { lease, ..claim.terms }, ..claim }
}

fn reexecuting(claim: Claim) -> Claim {
    Claim { on_expired: OnExpired::Reexecute, ..claim }
}
