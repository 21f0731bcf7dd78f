//! Promises about completing, giving up, and settling.

use bytes::Bytes;

use super::{Case, STEADY, reexecuting, request, unsettled_of};
use crate::record::{
    ClaimOutcome, CompleteOutcome, Completion, Finding, Grant, Millis, ReleaseOutcome,
    RenewOutcome, ResolveOutcome, Unsettled, Verdict, Writes,
};
use crate::store::{Lease, Store};
use crate::token::{Attempt, Fence, HolderId};

/// A stored response comes back byte for byte: all 256 values, and a mebibyte.
pub async fn responses_are_opaque_bytes(store: &dyn Store) {
    let all_values: Vec<u8> = (0..=255).collect();
    let long: Vec<u8> =
        (0..1 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let of_zeros = vec![0; 3];
    let of_one = vec![b'1'];
    for bytes in [all_values, long, of_zeros, of_one] {
        let case = Case::new(store);
        let lease = case.granted(&request(1)).await;
        let response = Bytes::from(bytes);
        let completion =
            Completion { terms: STEADY, response: response.clone(), writes: Writes::Keep };
        let stored = case.must(store.complete(&lease, &completion)).await;
        case.assert_eq(&stored, &CompleteOutcome::Stored, "a completion is stored");
        match case.claim(&request(1)).await {
            ClaimOutcome::Completed(replayed) => {
                case.assert(replayed == response, "a response comes back byte for byte");
            }
            other => panic!("{} store: a response is replayed, got {other:?}", store.name()),
        }
    }
}

/// Guarantee 4: the first response wins and never changes, under either policy.
pub async fn a_completed_record_is_returned_unchanged(store: &dyn Store) {
    let case = Case::new(store);
    let claim = request(1);
    let lease = case.granted(&claim).await;
    case.complete(&lease, b"first").await;
    let second = case.complete(&lease, b"second").await;
    case.assert_eq(&second, &CompleteOutcome::Lost, "a second, different completion is refused");
    let renewed = case.renew(&lease, STEADY).await;
    case.assert_eq(&renewed, &RenewOutcome::Lost, "a completed record cannot be renewed");
    for verdict in [Verdict::NoEffect, Verdict::Unknown] {
        let released = case.release(&lease, verdict).await;
        case.assert_eq(&released, &ReleaseOutcome::NotHeld, "nor can it be given up");
    }
    for again in [claim, request(1), reexecuting(request(1))] {
        let outcome = case.claim(&again).await;
        let replayed = matches!(&outcome, ClaimOutcome::Completed(bytes) if bytes == "first");
        case.assert(replayed, "the first response is replayed to everybody");
    }
}

/// Guarantee 3: a completion whose reply was lost is recognised by holder and response.
pub async fn a_completion_may_be_sent_again(store: &dyn Store) {
    let case = Case::new(store);
    let lease = case.granted(&request(1)).await;
    for _ in 0..3 {
        let stored = case.complete(&lease, b"answer").await;
        case.assert_eq(&stored, &CompleteOutcome::Stored, "a completion may be sent again");
    }
    case.assert_replays(b"answer", "and is stored once").await;
}

/// A store that lost a record gets it back from its owner, with the answer.
pub async fn a_completion_of_a_lost_record_restores_it(store: &dyn Store) {
    let case = Case::new(store);
    let lease = lost_lease(&case);
    let restored = case.complete(&lease, b"answer").await;
    case.assert_eq(&restored, &CompleteOutcome::Restored, "a lost record is restored and told");
    case.assert_replays(b"answer", "a restored answer is replayed").await;
}

/// A store that lost a record gets it back from its owner while the handler runs.
pub async fn a_renewal_of_a_lost_record_restores_it(store: &dyn Store) {
    let case = Case::new(store);
    let lease = lost_lease(&case);
    let restored = case.renew(&lease, STEADY).await;
    case.assert_eq(&restored, &RenewOutcome::Restored, "a lost record is restored and told");
    let renewed = case.renew(&lease, STEADY).await;
    case.assert_eq(&renewed, &RenewOutcome::Renewed, "and renewed from then on");
    let in_flight = matches!(case.claim(&request(1)).await, ClaimOutcome::InFlight { .. });
    case.assert(in_flight, "a restored record holds its key");
}

/// A lease whose record the store does not have.
fn lost_lease(case: &Case<'_>) -> Lease {
    let grant = Grant {
        attempt: Attempt::from_number(3),
        fence: Fence::from_number(1_700_000_000_000),
        created: Millis(1_600_000_000_000),
        takeover: false,
        checkpoint: Bytes::new(),
    };
    Lease::new(case.key, &request(1), grant)
}

/// Whoever comes second with the same request passes the first response on; with another request
/// it learns that, and not the response.
pub async fn the_loser_of_a_completion_gets_the_first_response(store: &dyn Store) {
    let case = Case::new(store);
    let lease = case.granted(&request(1)).await;
    case.complete(&lease, b"first").await;
    let twin = Lease::new(case.key, &request(1), lease.grant().clone());
    let outcome = case.complete(&twin, b"second").await;
    let first = CompleteOutcome::Superseded(Bytes::from_static(b"first"));
    case.assert_eq(&outcome, &first, "the loser of a completion gets the first response");
    let other = Lease::new(case.key, &request(2), lease.grant().clone());
    let outcome = case.complete(&other, b"second").await;
    case.assert_eq(&outcome, &CompleteOutcome::Mismatch, "but not that of another request");
}

/// "Nothing happened" frees the key, also for another body; attempt and fence go on.
pub async fn an_open_key_is_free_for_a_corrected_request(store: &dyn Store) {
    let case = Case::new(store);
    let first = case.granted(&request(1)).await;
    let released = case.release(&first, Verdict::NoEffect).await;
    case.assert_eq(&released, &ReleaseOutcome::Released, "a claim can be given up");
    let stale = case.complete(&first, b"late").await;
    case.assert_eq(&stale, &CompleteOutcome::Lost, "who gave up cannot complete");
    let second = case.granted(&request(2)).await;
    let Grant { attempt, fence, takeover, .. } = second.grant();
    case.assert_eq(attempt, &Attempt::from_number(2), "an open key counts its attempts on");
    case.assert(*fence > first.grant().fence, "an open key's fence grows");
    case.assert(!takeover, "nothing happened, so nothing is taken over");
    case.complete(&second, b"answer").await;
    let mismatch = matches!(case.claim(&request(1)).await, ClaimOutcome::Mismatch);
    case.assert(mismatch, "then the corrected request is the one that counts");
}

/// A panic, or a shutdown: the outcome is unknown at once, and not when the lease ends.
pub async fn giving_up_without_knowing_leaves_the_outcome_unknown(store: &dyn Store) {
    let case = Case::new(store);
    let (lease, expected) = case.make_indeterminate().await;
    match case.claim(&request(1)).await {
        ClaimOutcome::Indeterminate(unsettled) => {
            case.assert_eq(&unsettled, &expected, "an unknown outcome names its holder");
        }
        other => panic!("{} store: the outcome is unknown, got {other:?}", store.name()),
    }
    let renewed = case.renew(&lease, STEADY).await;
    case.assert_eq(&renewed, &RenewOutcome::Lost, "who gave up cannot renew");
    let next = case.granted(&reexecuting(request(1))).await;
    case.assert(next.grant().takeover, "running again after that is a takeover");
}

/// Guarantee 3, for releases.
pub async fn a_release_may_be_sent_again(store: &dyn Store) {
    for verdict in [Verdict::NoEffect, Verdict::Unknown] {
        let case = Case::new(store);
        let lease = case.granted(&request(1)).await;
        for _ in 0..2 {
            let released = case.release(&lease, verdict).await;
            case.assert_eq(&released, &ReleaseOutcome::Released, "a release may be sent again");
        }
    }
    let case = Case::new(store);
    let gone = case.release(&lost_lease(&case), Verdict::NoEffect).await;
    case.assert_eq(&gone, &ReleaseOutcome::NotHeld, "what is not there is not held");
}

/// An operator, or a hook, settles an unknown outcome; from then on the old holder is nobody.
pub async fn a_resolution_settles_and_clears_the_holder(store: &dyn Store) {
    let happened = || Finding::Happened(Bytes::from_static(b"found"));

    let case = Case::new(store);
    let (lease, unsettled) = case.make_indeterminate().await;
    for _ in 0..2 {
        let resolved = case.resolve(&unsettled, happened()).await;
        case.assert_eq(&resolved, &ResolveOutcome::Resolved, "a resolution may be sent again");
    }
    case.assert_replays(b"found", "what was found is the answer").await;
    let stale = case.complete(&lease, b"late").await;
    let found = CompleteOutcome::Superseded(Bytes::from_static(b"found"));
    case.assert_eq(&stale, &found, "a paused handler cannot complete after that");
    let changed = case.resolve(&unsettled, Finding::NothingHappened).await;
    case.assert_eq(&changed, &ResolveOutcome::Changed, "nor can it be settled otherwise");

    let case = Case::new(store);
    let (lease, unsettled) = case.make_indeterminate().await;
    for _ in 0..2 {
        let resolved = case.resolve(&unsettled, Finding::NothingHappened).await;
        case.assert_eq(&resolved, &ResolveOutcome::Resolved, "a resolution may be sent again");
    }
    let stale = case.complete(&lease, b"late").await;
    case.assert_eq(&stale, &CompleteOutcome::Lost, "a paused handler cannot complete after that");
    let next = case.granted(&request(2)).await;
    case.assert_eq(&next.grant().attempt, &Attempt::from_number(2), "the key is free again");
    case.assert(!next.grant().takeover, "since nothing happened");
}

/// A resolution names what was judged; anything else stays as it is.
pub async fn a_resolution_of_something_else_changes_nothing(store: &dyn Store) {
    let case = Case::new(store);
    let (lease, unsettled) = case.make_indeterminate().await;
    let other_holder = Unsettled { holder: HolderId::random(), ..unsettled.clone() };
    let other_attempt = Unsettled { attempt: unsettled.attempt.next(), ..unsettled };
    for wrong in [other_holder, other_attempt] {
        let changed = case.resolve(&wrong, Finding::NothingHappened).await;
        case.assert_eq(&changed, &ResolveOutcome::Changed, "a wrong judgement changes nothing");
    }
    let healed = case.complete(&lease, b"late").await;
    case.assert_eq(&healed, &CompleteOutcome::Healed, "so its holder can still complete");

    let case = Case::new(store);
    let lease = case.granted(&request(1)).await;
    let running = unsettled_of(&lease);
    let changed = case.resolve(&running, Finding::NothingHappened).await;
    case.assert_eq(&changed, &ResolveOutcome::Changed, "a running claim is not settled");

    let case = Case::new(store);
    let changed = case.resolve(&running, Finding::NothingHappened).await;
    case.assert_eq(&changed, &ResolveOutcome::Changed, "what is not there is not settled");
}
