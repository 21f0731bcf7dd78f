//! Promises about who gets a key, and what others see meanwhile.

use std::time::Duration;

use futures_util::future::join_all;

use super::{
    Case, FORGOTTEN_RECIPE, LONG, OLD_RECIPE, RECIPE, STEADY, print, reexecuting, request,
    request_for,
};
use crate::fingerprint::Fingerprints;
use crate::record::{
    Claim, ClaimOutcome, CompleteOutcome, ReleaseOutcome, RenewOutcome, Terms, Verdict,
};
use crate::store::{Lease, Store};
use crate::token::{Attempt, HolderId};

/// [`Store::ready`] answers, and more than once.
pub async fn a_store_in_order_says_that_it_is_ready(store: &dyn Store) {
    let case = Case::new(store);
    case.must(store.ready()).await;
    case.must(store.ready()).await;
}

/// Guarantee 1: many claims at once, one grant; everybody else is told that it is running.
pub async fn of_64_concurrent_claims_one_is_granted(store: &dyn Store) {
    let case = Case::new(store);
    let claims: Vec<Claim> = (0..64).map(|_| request(1)).collect();
    let outcomes = join_all(claims.iter().map(|claim| case.claim(claim))).await;
    let granted = outcomes.iter().filter(|o| matches!(o, ClaimOutcome::Acquired(_))).count();
    let waiting = outcomes.iter().filter(|o| matches!(o, ClaimOutcome::InFlight { .. })).count();
    case.assert_eq(&(granted, waiting), &(1, 63), "of 64 concurrent claims exactly one is granted");
}

/// Guarantee 3: a claim whose reply was lost is granted again, as the same attempt.
pub async fn a_claim_that_is_sent_again_is_recognised_by_its_holder(store: &dyn Store) {
    let case = Case::new(store);
    let claim = request(1);
    let first = case.granted(&claim).await;
    let again = case.granted(&claim).await;
    let promise = "a claim that is sent again is the same attempt";
    case.assert_eq(again.grant(), first.grant(), promise);
    case.assert_eq(&first.grant().attempt, &Attempt::FIRST, "the first run is attempt 1");
    case.assert(!again.grant().takeover, "nobody was taken over");
    case.assert(first.key() == case.key, "a lease names its key");
}

/// A refused claim says how long it makes sense to wait.
pub async fn a_running_claim_tells_what_is_left_of_its_lease(store: &dyn Store) {
    let case = Case::new(store);
    let _lease = case.granted(&request_for(1, LONG)).await;
    match case.claim(&request(1)).await {
        ClaimOutcome::InFlight { remaining } => {
            let plausible = remaining <= LONG && remaining > LONG - Duration::from_secs(60);
            case.assert(plausible, "what is left of a lease is at most the lease, and nearly that");
        }
        other => panic!("{} store: a running claim is in flight, got {other:?}", store.name()),
    }
}

/// Nothing that happens to one key is seen at another.
pub async fn keys_are_independent(store: &dyn Store) {
    let cases: Vec<Case<'_>> = (0..32).map(|_| Case::new(store)).collect();
    let rounds = cases.iter().map(async |case| {
        let claim = request(1);
        let lease = case.granted(&claim).await;
        case.complete(&lease, b"mine").await;
        case.assert_replays(b"mine", "each key has its own answer").await;
    });
    join_all(rounds).await;
}

/// A key that comes back with another request never runs it, whatever the first one came to.
pub async fn another_request_is_a_mismatch_in_each_state_but_open(store: &dyn Store) {
    let promise = |state| format!("another request is a mismatch while the first is {state}");
    let is_mismatch = |outcome: &ClaimOutcome<Lease>| matches!(outcome, ClaimOutcome::Mismatch);

    let case = Case::new(store);
    let lease = case.granted(&request(1)).await;
    for other in [request(2), reexecuting(request(2))] {
        case.assert(is_mismatch(&case.claim(&other).await), &promise("in flight"));
    }
    case.complete(&lease, b"answer").await;
    case.assert(is_mismatch(&case.claim(&request(2)).await), &promise("completed"));

    let case = Case::new(store);
    let _unsettled = case.make_indeterminate().await;
    for other in [request(2), reexecuting(request(2))] {
        case.assert(is_mismatch(&case.claim(&other).await), &promise("of unknown outcome"));
    }

    let case = Case::new(store);
    let _lease = case.granted(&request_for(1, Duration::from_millis(1))).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    case.assert(is_mismatch(&case.claim(&request(2)).await), &promise("past its lease"));
}

/// A deploy that changes the recipe gives no false mismatch, and hides no real one.
pub async fn a_record_by_an_older_recipe_is_compared_by_that_recipe(store: &dyn Store) {
    let case = Case::new(store);
    let old = Claim { fingerprints: Fingerprints::one(print(OLD_RECIPE, 1)), ..request(1) };
    let lease = case.granted(&old).await;
    case.complete(&lease, b"answer").await;
    for (body, expected) in [(1, true), (2, false)] {
        let mut fingerprints = Fingerprints::one(print(RECIPE, 9));
        let accepted = fingerprints.push(print(OLD_RECIPE, body));
        case.assert(accepted, "there is room for two recipes");
        let replayed = matches!(
            case.claim(&Claim { fingerprints, ..request(9) }).await,
            ClaimOutcome::Completed(_)
        );
        case.assert_eq(&replayed, &expected, "a record is compared by its own recipe");
    }
}

/// A record that cannot be compared is refused. It is neither run over nor called a mismatch.
pub async fn a_record_by_an_unknown_recipe_is_unreadable_and_stays(store: &dyn Store) {
    let case = Case::new(store);
    let old = Claim { fingerprints: Fingerprints::one(print(FORGOTTEN_RECIPE, 1)), ..request(1) };
    let lease = case.granted(&old).await;
    for claim in [request(1), reexecuting(request(1))] {
        let outcome = case.claim(&claim).await;
        let unreadable = matches!(outcome, ClaimOutcome::Unreadable);
        case.assert(unreadable, "a record by an unknown recipe is unreadable");
    }
    let stored = case.complete(&lease, b"answer").await;
    case.assert_eq(&stored, &CompleteOutcome::Stored, "its own holder still completes it");
}

/// Guarantee 2: whoever is not the last holder changes nothing.
pub async fn a_stranger_changes_nothing(store: &dyn Store) {
    let case = Case::new(store);
    let lease = case.granted(&request(1)).await;
    let stranger = Lease::new(case.key, &request(1), lease.grant().clone());
    let lost = case.complete(&stranger, b"forged").await;
    case.assert_eq(&lost, &CompleteOutcome::Lost, "a foreign completion is refused");
    let brief = Terms { lease: Duration::from_millis(1), ..STEADY };
    let lost = case.renew(&stranger, brief).await;
    case.assert_eq(&lost, &RenewOutcome::Lost, "a foreign renewal is refused");
    for verdict in [Verdict::NoEffect, Verdict::Unknown] {
        let refused = case.release(&stranger, verdict).await;
        case.assert_eq(&refused, &ReleaseOutcome::NotHeld, "a foreign release is refused");
    }
    let nobody = Claim { holder: HolderId::NOBODY, ..request(1) };
    let outcome = case.claim(&nobody).await;
    let in_flight = matches!(outcome, ClaimOutcome::InFlight { .. });
    case.assert(in_flight, "after all that the claim still stands");
    let stored = case.complete(&lease, b"answer").await;
    case.assert_eq(&stored, &CompleteOutcome::Stored, "and its holder completes it");
    case.assert_replays(b"answer", "with its own answer").await;

    let case = Case::new(store);
    let (lease, _) = case.make_indeterminate().await;
    let stranger = Lease::new(case.key, &request(1), lease.grant().clone());
    let lost = case.complete(&stranger, b"forged").await;
    case.assert_eq(&lost, &CompleteOutcome::Lost, "a stranger does not heal");
    let healed = case.complete(&lease, b"answer").await;
    case.assert_eq(&healed, &CompleteOutcome::Healed, "and the holder still does");
}
