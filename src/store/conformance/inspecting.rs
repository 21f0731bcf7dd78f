//! Promises to operators: [`run_all_inspect`].

use std::time::Duration;

use bytes::Bytes;
use tokio::time::sleep;

use super::{AFTER_SHORT, Case, LONG, SHORT, STEADY, request, request_for};
use crate::record::{
    Amend, ClaimOutcome, CompleteOutcome, Current, Finding, Forget, ForgetOutcome, ResolveOutcome,
    Seen, Sighting, Standing, Verdict,
};
use crate::scope::StorageKey;
use crate::store::{Contents, Entry, Inspect, LogId, Sight, Source, Survey, TrailEntry, Wanted};
use crate::token::{Attempt, HolderId};

/// Checks everything that a store promises to operators. The store may hold other records.
pub async fn run_all_inspect(store: &dyn Inspect) {
    looking_changes_nothing_and_shows_a_lease_that_is_over(store).await;
    a_look_tells_attempt_times_and_expiry(store).await;
    what_is_forgotten_is_new(store).await;
    nobody_is_forgotten_who_runs(store).await;
    what_changed_since_it_was_seen_is_not_forgotten(store).await;
    an_answer_is_amended_that_was_seen(store).await;
    a_listing_holds_what_nobody_has_settled(store).await;
    a_listing_is_read_page_by_page(store).await;
    a_key_is_found_by_its_log_id(store).await;
    the_trail_keeps_a_change_and_what_came_of_it(store).await;
}

async fn look(store: &dyn Inspect, case: &Case<'_>) -> Sight {
    case.must(store.look(case.key)).await
}

async fn seen(store: &dyn Inspect, case: &Case<'_>) -> Sighting {
    let sight = look(store, case).await;
    match sight.record() {
        Some(record) => record.sighting(),
        None => panic!("{} store: there is a record, {sight:?}", store.name()),
    }
}

async fn forget(store: &dyn Inspect, case: &Case<'_>, seen: Seen) -> ForgetOutcome {
    case.must(store.forget(case.key, &Forget { seen })).await
}

async fn looking_changes_nothing_and_shows_a_lease_that_is_over(store: &dyn Inspect) {
    let case = Case::new(store);
    case.assert_eq(&look(store, &case).await.current, &Current::Absent, "there is nothing yet");
    let lease = case.granted(&request_for(1, SHORT)).await;
    sleep(AFTER_SHORT).await;
    for _ in 0..3 {
        let sight = look(store, &case).await;
        let sighting = seen(store, &case).await;
        case.assert_eq(&sighting.standing, &Standing::InFlight, "a look changes nothing");
        case.assert(sighting.lease_is_over(sight.now), "a lease that is over is seen");
        case.assert(sighting.is_unknown(sight.now), "and its outcome is unknown");
    }
    let stored = case.complete(&lease, b"late").await;
    case.assert_eq(&stored, &CompleteOutcome::Stored, "its holder may still complete");
}

async fn a_look_tells_attempt_times_and_expiry(store: &dyn Inspect) {
    let case = Case::new(store);
    let lease = case.granted(&request_for(1, LONG)).await;
    case.release(&lease, Verdict::NoEffect).await;
    let lease = case.granted(&request_for(1, LONG)).await;
    let sight = look(store, &case).await;
    let sighting = seen(store, &case).await;
    case.assert_eq(&sighting.attempt, &Attempt::from_number(2), "the attempt is told");
    case.assert_eq(&sighting.holder, &lease.owner().holder, "and its holder");
    case.assert_eq(&sighting.created, &lease.grant().created, "and the first claim");
    let age = sight.now.since(sighting.since(sight.now));
    case.assert(age < Duration::from_secs(60), "and since when it runs");
    let left = sight.expires.map(|at| at.since(sight.now));
    let about = left.is_some_and(|left| left > LONG && left <= LONG * 2);
    case.assert(about, "the store says when it forgets the record");
    case.complete(&lease, b"answer").await;
    let sight = look(store, &case).await;
    let standing = sight.record().map(|record| record.sighting().standing);
    case.assert_eq(&standing, &Some(Standing::Completed), "an answer is seen");
    case.assert_eq(&sight.contents, &Contents::Readable, "and can be read");
}

async fn what_is_forgotten_is_new(store: &dyn Inspect) {
    for end in 0..4 {
        let case = Case::new(store);
        let first = request_for(1, if end == 0 { SHORT } else { LONG });
        let lease = case.granted(&first).await;
        match end {
            0 => sleep(AFTER_SHORT).await,
            1 => drop(case.release(&lease, Verdict::Unknown).await),
            2 => drop(case.release(&lease, Verdict::NoEffect).await),
            _ => drop(case.complete(&lease, b"answer").await),
        }
        let sighting = seen(store, &case).await;
        let forgotten = forget(store, &case, Seen::Record(sighting)).await;
        case.assert_eq(&forgotten, &ForgetOutcome::Forgotten, "what is seen can be forgotten");
        let again = forget(store, &case, Seen::Record(sighting)).await;
        case.assert_eq(&again, &ForgetOutcome::Absent, "once");
        case.assert_eq(&look(store, &case).await.current, &Current::Absent, "it is gone");
        let next = case.granted(&request(2)).await;
        case.assert_eq(&next.grant().attempt, &Attempt::FIRST, "its key is new");
    }
}

async fn nobody_is_forgotten_who_runs(store: &dyn Inspect) {
    let case = Case::new(store);
    let lease = case.granted(&request(1)).await;
    let sighting = seen(store, &case).await;
    for seen in [Seen::Record(sighting), Seen::Unreadable] {
        let outcome = forget(store, &case, seen).await;
        let runs = matches!(outcome, ForgetOutcome::InFlight { remaining } if remaining <= LONG);
        case.assert(runs, "nobody is forgotten who runs");
    }
    let stored = case.complete(&lease, b"answer").await;
    case.assert_eq(&stored, &CompleteOutcome::Stored, "and he completes");
}

async fn an_answer_is_amended_that_was_seen(store: &dyn Inspect) {
    let case = Case::new(store);
    let amend = async |seen: Sighting, response: &'static [u8]| {
        let response = Bytes::from_static(response);
        case.must(store.amend(case.key, &Amend { seen, response, terms: STEADY })).await
    };
    let (lease, _) = case.make_indeterminate().await;
    let unknown = seen(store, &case).await;
    let outcome = amend(unknown, b"amended").await;
    case.assert_eq(&outcome, &ResolveOutcome::Changed, "there is no answer to amend");
    case.complete(&lease, b"wrong").await;
    let outcome = amend(unknown, b"amended").await;
    case.assert_eq(&outcome, &ResolveOutcome::Changed, "it is not what was seen");
    case.assert_replays(b"wrong", "and stays as it is").await;
    let completed = seen(store, &case).await;
    for sending in ["what was seen is amended", "the same sent again is told the same"] {
        let outcome = amend(completed, b"amended").await;
        case.assert_eq(&outcome, &ResolveOutcome::Resolved, sending);
        case.assert_replays(b"amended", sending).await;
    }
    let outcome = amend(completed, b"another").await;
    case.assert_eq(&outcome, &ResolveOutcome::Changed, "once");
    case.assert_replays(b"amended", "the first stays").await;
    let late = case.complete(&lease, b"wrong").await;
    case.assert(late != CompleteOutcome::Stored, "the old holder changes nothing any more");
    case.assert_replays(b"amended", "still").await;

    let case = Case::new(store);
    let response = Bytes::from_static(b"x");
    let absent = Amend { seen: completed, response, terms: STEADY };
    let outcome = case.must(store.amend(case.key, &absent)).await;
    case.assert_eq(&outcome, &ResolveOutcome::Changed, "nothing is made");
}

async fn what_changed_since_it_was_seen_is_not_forgotten(store: &dyn Inspect) {
    let case = Case::new(store);
    let (lease, unsettled) = case.make_indeterminate().await;
    let unknown = seen(store, &case).await;
    let outcome = forget(store, &case, Seen::Unreadable).await;
    case.assert_eq(&outcome, &ForgetOutcome::Changed, "it can be read");
    case.complete(&lease, b"late").await;
    let outcome = forget(store, &case, Seen::Record(unknown)).await;
    case.assert_eq(&outcome, &ForgetOutcome::Changed, "an answer that came meanwhile stays");
    case.assert_replays(b"late", "and is replayed").await;

    let case = Case::new(store);
    let (_, other) = case.make_indeterminate().await;
    case.assert(other.holder != unsettled.holder, "two keys, two holders");
    let unknown = seen(store, &case).await;
    case.resolve(&other, Finding::NothingHappened).await;
    let outcome = forget(store, &case, Seen::Record(unknown)).await;
    case.assert_eq(&outcome, &ForgetOutcome::Changed, "nor what somebody else settled");
    let free = matches!(case.claim(&request(2)).await, ClaimOutcome::Acquired(_));
    case.assert(free, "which is as he left it");
}

/// Makes whatever index the store has new.
async fn audit(store: &dyn Inspect) {
    let mut cursor = None;
    loop {
        match store.audit(cursor.as_ref(), 100).await {
            Ok(step) => match step.next {
                Some(next) => cursor = Some(next),
                None => return,
            },
            Err(error) => panic!("{} store: an audit failed: {error:?}", store.name()),
        }
    }
}

async fn all(case: &Case<'_>, store: &dyn Inspect, survey: Survey, at_most: u32) -> Vec<Entry> {
    let mut wanted = Wanted { survey, at_most, after: None };
    let mut entries = Vec::new();
    loop {
        let listing = case.must(store.list(&wanted)).await;
        case.assert(listing.source != Source::NoIndex, "there is an index");
        case.assert(listing.entries.len() <= at_most as usize, "a page is no longer than asked");
        entries.extend(listing.entries);
        match listing.more {
            Some(more) => wanted.after = Some(more),
            None => return entries,
        }
    }
}

async fn a_listing_holds_what_nobody_has_settled(store: &dyn Inspect) {
    let cases: Vec<_> = (0..6).map(|_| Case::new(store)).collect();
    let [running, dead, unknown, settled, open, done] = &cases[..] else { return };
    let _running = running.granted(&request(1)).await;
    let _dead = dead.granted(&request_for(1, SHORT)).await;
    let _ended = unknown.make_indeterminate().await;
    let (_, unsettled) = settled.make_indeterminate().await;
    let lease = open.granted(&request(1)).await;
    open.release(&lease, Verdict::NoEffect).await;
    let lease = done.granted(&request(1)).await;
    done.complete(&lease, b"answer").await;
    sleep(AFTER_SHORT).await;
    audit(store).await;
    // Since then, so that the index has it still.
    settled.resolve(&unsettled, Finding::NothingHappened).await;

    let which = async |survey| {
        let entries = all(running, store, survey, 1_000).await;
        let listed = |case: &Case<'_>| entries.iter().any(|entry| entry.key == case.key);
        cases.iter().map(listed).collect::<Vec<_>>()
    };
    let lists = [
        (Survey::Unknown, [false, true, true, false, false, false]),
        (Survey::InFlightFor(Duration::ZERO), [true, true, false, false, false, false]),
        (Survey::InFlightFor(LONG), [false; 6]),
        (Survey::Unsettled, [true, true, true, false, false, false]),
    ];
    for (survey, expected) in lists {
        let listed = which(survey).await;
        running.assert_eq(&listed, &expected.to_vec(), &format!("what {survey:?} lists"));
    }
}

async fn a_listing_is_read_page_by_page(store: &dyn Inspect) {
    let mut keys = Vec::new();
    for _ in 0..7 {
        let case = Case::new(store);
        let _ended = case.make_indeterminate().await;
        keys.push(case.key);
    }
    audit(store).await;
    let case = Case::new(store);
    for at_most in [1, 3, 1_000] {
        let entries = all(&case, store, Survey::Unknown, at_most).await;
        let mut listed: Vec<_> = entries.iter().map(|entry| entry.key).collect();
        listed.retain(|key| keys.contains(key));
        case.assert_eq(&listed.len(), &keys.len(), "each is on one page");
        listed.sort();
        listed.dedup();
        case.assert_eq(&listed.len(), &keys.len(), "and on one only");
    }
}

async fn a_key_is_found_by_its_log_id(store: &dyn Inspect) {
    let case = Case::new(store);
    let _ended = case.make_indeterminate().await;
    audit(store).await;
    let id = |key: StorageKey| LogId::parse(&key.log_id());
    let Some(own) = id(case.key) else { panic!("a log id can be read") };
    let found = case.must(store.find(own)).await;
    case.assert_eq(&found, &vec![case.key], "a key is found by its log id");
    let Some(other) = id(Case::new(store).key) else { panic!("a log id can be read") };
    let found = case.must(store.find(other)).await;
    case.assert_eq(&found, &Vec::new(), "and by no other");
}

async fn the_trail_keeps_a_change_and_what_came_of_it(store: &dyn Inspect) {
    let case = Case::new(store);
    let mut expected = Vec::new();
    for outcome in [None, Some("done"), None] {
        let mut entry = TrailEntry {
            id: *HolderId::random().as_bytes(),
            at: crate::record::Millis(0),
            who: "ana".into(),
            why: "the provider says: \u{201e}paid\u{201c}".into(),
            action: "settle done".into(),
            key: case.key,
            outcome: None,
        };
        case.must(store.note(&entry)).await;
        if let Some(outcome) = outcome {
            entry.outcome = Some(outcome.into());
            case.must(store.note(&entry)).await;
        }
        expected.insert(0, entry);
        // Entries of one millisecond have no order.
        sleep(Duration::from_millis(3)).await;
    }
    let mut trail = case.must(store.trail(1_000)).await;
    trail.retain(|entry| entry.key == case.key);
    let now = look(store, &case).await.now;
    for entry in &mut trail {
        case.assert(now.since(entry.at) < Duration::from_secs(60), "with the store's time");
        entry.at = crate::record::Millis(0);
    }
    case.assert_eq(&trail, &expected, "the trail keeps what was noted, the newest first");
    let one = case.must(store.trail(1)).await;
    case.assert_eq(&one.len(), &1, "and tells no more than asked");
}
