//! Promises about leases and retention, which are two times and never one.

use bytes::Bytes;
use tokio::time::sleep;

use super::{
    AFTER_SHORT, Case, LONG, SHORT, STEADY, reexecuting, request, request_for, unsettled_of,
};
use crate::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Effects, Finding, Grant, RenewOutcome,
    Renewal, ResolveOutcome, Terms, Verdict, Writes,
};
use crate::store::Store;
use crate::token::Attempt;

/// By default nothing runs again after a crash: the outcome is unknown, and stays so.
pub async fn a_lease_that_is_over_leaves_the_outcome_unknown(store: &dyn Store) {
    let case = Case::new(store);
    let lease = case.granted(&request_for(1, SHORT)).await;
    sleep(AFTER_SHORT).await;
    let expected = unsettled_of(&lease);
    for _ in 0..2 {
        match case.claim(&request(1)).await {
            ClaimOutcome::Indeterminate(unsettled) => {
                case.assert_eq(&unsettled, &expected, "an unknown outcome names its holder");
            }
            other => panic!("{} store: an ended lease is unknown, got {other:?}", store.name()),
        }
    }

    let case = Case::new(store);
    let lease = case.granted(&request_for(1, SHORT)).await;
    sleep(AFTER_SHORT).await;
    let resolved = case.resolve(&unsettled_of(&lease), Finding::NothingHappened).await;
    let promise = "an ended lease can be settled before anybody claims the key again";
    case.assert_eq(&resolved, &ResolveOutcome::Resolved, promise);
}

/// Where running again is allowed: the next attempt, a greater fence, and the old holder is out.
pub async fn a_lease_that_is_over_is_taken_over_where_that_is_allowed(store: &dyn Store) {
    let case = Case::new(store);
    let _lease = case.granted(&request(1)).await;
    let outcome = case.claim(&reexecuting(request(1))).await;
    let in_flight = matches!(outcome, ClaimOutcome::InFlight { .. });
    case.assert(in_flight, "a lease that runs is not taken over");

    let case = Case::new(store);
    let first = case.granted(&request_for(1, SHORT)).await;
    sleep(AFTER_SHORT).await;
    let second = case.granted(&reexecuting(request(1))).await;
    case.assert_eq(&second.grant().attempt, &Attempt::from_number(2), "a takeover is attempt 2");
    case.assert(second.grant().takeover, "a takeover says that it is one");
    case.assert(second.grant().fence > first.grant().fence, "a takeover raises the fence");
    case.assert_eq(&second.grant().created, &first.grant().created, "a key keeps its first time");
    let lost = case.renew(&first, STEADY).await;
    case.assert_eq(&lost, &RenewOutcome::Lost, "who was taken over cannot renew");
    let lost = case.complete(&first, b"late").await;
    case.assert_eq(&lost, &CompleteOutcome::Lost, "who was taken over cannot complete");
    case.complete(&second, b"answer").await;
    case.assert_replays(b"answer", "the one who took over can").await;
}

/// Nobody else ran, so what the last holder says late is the truth.
pub async fn a_late_completion_heals(store: &dyn Store) {
    let case = Case::new(store);
    let lease = case.granted(&request_for(1, SHORT)).await;
    sleep(AFTER_SHORT).await;
    let unknown = matches!(case.claim(&request(1)).await, ClaimOutcome::Indeterminate(_));
    case.assert(unknown, "an ended lease is unknown");
    let healed = case.complete(&lease, b"late").await;
    case.assert_eq(&healed, &CompleteOutcome::Healed, "a late completion heals");
    case.assert_replays(b"late", "and is replayed").await;

    let case = Case::new(store);
    let lease = case.granted(&request_for(1, SHORT)).await;
    sleep(AFTER_SHORT).await;
    let stored = case.complete(&lease, b"late").await;
    case.assert_eq(&stored, &CompleteOutcome::Stored, "nor does a lease nobody missed matter");
}

/// A renewed lease ends when the renewal says, and not before.
pub async fn a_renewal_extends_the_lease(store: &dyn Store) {
    let case = Case::new(store);
    let lease = case.granted(&request_for(1, SHORT)).await;
    let renewed = case.renew(&lease, STEADY).await;
    case.assert_eq(&renewed, &RenewOutcome::Renewed, "a lease can be renewed");
    sleep(AFTER_SHORT).await;
    match case.claim(&request(1)).await {
        ClaimOutcome::InFlight { remaining } => {
            case.assert(remaining > LONG / 2, "a renewed lease runs from the renewal");
        }
        other => panic!("{} store: a renewed lease holds, got {other:?}", store.name()),
    }
    let shortened = case.renew(&lease, Terms { lease: SHORT, ..STEADY }).await;
    case.assert_eq(&shortened, &RenewOutcome::Renewed, "also to a shorter lease");
    sleep(AFTER_SHORT).await;
    let renewed = case.renew(&lease, STEADY).await;
    case.assert_eq(&renewed, &RenewOutcome::Renewed, "and even late, if nobody took over");
}

/// What an attempt noted down is read by the next one, and lasts until a newer note.
pub async fn a_checkpoint_survives_its_attempt(store: &dyn Store) {
    let case = Case::new(store);
    let note = Bytes::from_iter(0..=255_u8);
    let claim = request(1);
    let lease = case.granted(&claim).await;
    case.assert(lease.grant().checkpoint.is_empty(), "a first attempt finds no checkpoint");
    let brief = Terms { lease: SHORT, ..STEADY };
    let renewal = Renewal { terms: brief, checkpoint: Some(note.clone()) };
    case.must(store.renew(&lease, &renewal)).await;
    let again = case.granted(&Claim { terms: brief, ..claim }).await;
    case.assert_eq(&again.grant().checkpoint, &note, "a claim sent again keeps the checkpoint");
    case.renew(&lease, brief).await;
    sleep(AFTER_SHORT).await;
    let second = case.granted(&reexecuting(request(1))).await;
    case.assert_eq(&second.grant().checkpoint, &note, "the next attempt reads the checkpoint");
    let renewal = Renewal { terms: STEADY, checkpoint: Some(Bytes::new()) };
    case.must(store.renew(&second, &renewal)).await;
    case.release(&second, Verdict::NoEffect).await;
    let third = case.granted(&request(1)).await;
    case.assert(third.grant().checkpoint.is_empty(), "a checkpoint can be cleared");
}

/// Where effects are marked, a death before the first mark is no reason to ask anybody.
pub async fn an_attempt_that_marks_its_effects_and_dies_before_the_first_frees_its_key(
    store: &dyn Store,
) {
    let case = Case::new(store);
    let marked = |lease| Claim { effects: Effects::Marked, ..request_for(1, lease) };
    let first = case.granted(&marked(SHORT)).await;
    case.renew(&first, Terms { lease: SHORT, ..STEADY }).await;
    sleep(AFTER_SHORT).await;
    let mismatch = matches!(case.claim(&request(2)).await, ClaimOutcome::Mismatch);
    case.assert(mismatch, "the fingerprint counts as long as nobody gave the key up");
    // Whoever comes next says for itself where its effects are.
    let second = case.granted(&marked(SHORT)).await;
    let Grant { attempt, takeover, .. } = *second.grant();
    case.assert_eq(&attempt, &Attempt::from_number(2), "attempts are counted on");
    case.assert(!takeover, "nothing happened, so nothing is taken over");
    let lost = case.renew(&first, STEADY).await;
    case.assert_eq(&lost, &RenewOutcome::Lost, "who died and wakes cannot mark anything");
    sleep(AFTER_SHORT).await;
    let third = case.granted(&request_for(1, SHORT)).await;
    sleep(AFTER_SHORT).await;
    match case.claim(&request(1)).await {
        ClaimOutcome::Indeterminate(found) => {
            case.assert_eq(
                &found,
                &unsettled_of(&third),
                "an attempt that marks nothing is unknown",
            );
        }
        other => panic!("{} store: an ended lease is unknown, got {other:?}", store.name()),
    }
}

/// Behind its first mark an attempt may have acted, and so may every one after it.
pub async fn an_attempt_that_dies_behind_a_checkpoint_leaves_the_outcome_unknown(
    store: &dyn Store,
) {
    let case = Case::new(store);
    let marked = |lease| Claim { effects: Effects::Marked, ..request_for(1, lease) };
    let first = case.granted(&marked(LONG)).await;
    let brief = Terms { lease: SHORT, ..STEADY };
    let note = Bytes::from_static(b"noted");
    let renewal = Renewal { terms: brief, checkpoint: Some(note.clone()) };
    case.must(store.renew(&first, &renewal)).await;
    case.renew(&first, brief).await;
    sleep(AFTER_SHORT).await;
    match case.claim(&marked(SHORT)).await {
        ClaimOutcome::Indeterminate(found) => {
            case.assert_eq(&found.checkpoint, &note, "an unknown outcome tells what was noted");
            case.assert_eq(&found.attempt, &Attempt::FIRST, "and whose it is");
        }
        other => panic!("{} store: a marked effect is unknown, got {other:?}", store.name()),
    }
    let second = case.granted(&reexecuting(marked(SHORT))).await;
    case.assert(second.grant().takeover, "running again after that is a takeover");
    sleep(AFTER_SHORT).await;
    let unknown = matches!(case.claim(&marked(SHORT)).await, ClaimOutcome::Indeterminate(_));
    case.assert(unknown, "one that has not begun does not undo what another may have done");
}

/// Resources that refuse late writers can rely on the fence.
pub async fn the_fence_grows_with_every_claim(store: &dyn Store) {
    let case = Case::new(store);
    let mut fences = Vec::new();
    for _ in 0..8 {
        let lease = case.granted(&request(1)).await;
        fences.push(lease.grant().fence);
        case.release(&lease, Verdict::NoEffect).await;
    }
    case.assert(fences.is_sorted_by(|a, b| a < b), "the fence grows with every claim");
}

/// After its retention a key is new, for any request.
pub async fn after_its_retention_a_record_is_gone(store: &dyn Store) {
    let brief = Terms { retention: SHORT, ..STEADY };
    let completed = Case::new(store);
    let lease = completed.granted(&request(1)).await;
    let completion =
        Completion { terms: brief, response: Bytes::from_static(b"answer"), writes: Writes::Keep };
    completed.must(store.complete(&lease, &completion)).await;

    let open = Case::new(store);
    let lease = open.granted(&request(1)).await;
    let release = crate::record::Release { terms: brief, verdict: Verdict::NoEffect };
    open.must(store.release(&lease, &release)).await;

    sleep(AFTER_SHORT).await;
    for case in [completed, open] {
        let lease = case.granted(&request(2)).await;
        let promise = "after its retention a key is new";
        case.assert_eq(&lease.grant().attempt, &Attempt::FIRST, promise);
    }
}

/// A crash that nobody retries for longer than answers are kept is still known.
pub async fn an_unknown_outcome_outlives_the_retention_of_answers(store: &dyn Store) {
    let terms = Terms { lease: SHORT, retention: SHORT, unknown_retention: LONG };
    let case = Case::new(store);
    let lease = case.granted(&Claim { terms, ..request(1) }).await;
    let release = crate::record::Release { terms, verdict: Verdict::Unknown };
    case.must(store.release(&lease, &release)).await;
    sleep(AFTER_SHORT * 2).await;
    let unknown = matches!(case.claim(&request(1)).await, ClaimOutcome::Indeterminate(_));
    case.assert(unknown, "an unknown outcome outlives the retention of answers");
}

/// The end of a lease is not the end of its record: fingerprint and holder survive.
pub async fn a_record_in_flight_outlives_its_lease(store: &dyn Store) {
    let terms = Terms { lease: SHORT, retention: SHORT, unknown_retention: LONG };
    let case = Case::new(store);
    let _lease = case.granted(&Claim { terms, ..request(1) }).await;
    sleep(AFTER_SHORT * 2).await;
    let mismatch = matches!(case.claim(&request(2)).await, ClaimOutcome::Mismatch);
    case.assert(mismatch, "the fingerprint survives the end of the lease");
    let unknown = matches!(case.claim(&request(1)).await, ClaimOutcome::Indeterminate(_));
    case.assert(unknown, "and so does the holder");
}
