//! The operators' functions, and their router.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

#[allow(dead_code, reason = "its main is not called")]
#[path = "../../examples/admin.rs"]
mod example;
mod router;
#[path = "../support/mod.rs"]
mod support;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use support::log::Log;
use support::redis::RedisServer;
use tower_idempotency::admin::{
    Auditor, By, Detail, Operator, OperatorError, RecordView, Settlement, Version, Who, Why,
};
use tower_idempotency::record::{
    Claim, ClaimOutcome, Completion, Effects, OnExpired, Release, Terms, Verdict, Writes,
};
use tower_idempotency::store::{
    Fault, Faulty, Inspect, LogId, Protected, ProtectionKeyId, ProtectionKeys, Source, Survey,
    Verb, Wanted,
};
use tower_idempotency::{
    Fingerprint, Fingerprints, HeaderRules, HolderId, IdempotencyKey, Identity, Lease, MemoryStore,
    RecipeId, RedisStore, StorageKey, Store, StoredBody, StoredResponse,
};

const TERMS: Terms = Terms {
    lease: Duration::from_secs(600),
    retention: Duration::from_secs(600),
    unknown_retention: Duration::from_secs(600),
};

fn key(name: &str) -> StorageKey {
    StorageKey::new(&Identity::from("acme"), &IdempotencyKey::new(name).unwrap())
}

fn claim_for(lease: Duration) -> Claim {
    let fingerprint = Fingerprint::from_stored(RecipeId::from_bytes([1; 4]), [7; 32]);
    Claim {
        holder: HolderId::random(),
        fingerprints: Fingerprints::one(fingerprint),
        terms: Terms { lease, ..TERMS },
        on_expired: OnExpired::Refuse,
        effects: Effects::Anywhere,
    }
}

async fn claimed(store: &dyn Store, key: StorageKey) -> Lease {
    match store.claim(key, &claim_for(TERMS.lease)).await.unwrap() {
        ClaimOutcome::Acquired(lease) => lease,
        other => panic!("{other:?}"),
    }
}

/// A key whose outcome nobody knows.
async fn unknown(store: &dyn Store, name: &str) -> StorageKey {
    let key = key(name);
    let lease = claimed(store, key).await;
    store.release(&lease, &Release { terms: TERMS, verdict: Verdict::Unknown }).await.unwrap();
    key
}

async fn complete(store: &dyn Store, lease: &Lease, body: &'static str) {
    let response = answer(201, body).encode();
    let completion = Completion { terms: TERMS, response, writes: Writes::Keep };
    store.complete(lease, &completion).await.unwrap();
}

fn answer(status: u16, body: &'static str) -> StoredResponse {
    let (head, ()) = http::Response::builder().status(status).body(()).unwrap().into_parts();
    StoredResponse::new(&head, Bytes::from_static(body.as_bytes()), &HeaderRules::default())
}

fn by(why: &str) -> By {
    By { who: Who::new("ana").unwrap(), why: Why::new(why).unwrap() }
}

async fn version(operator: &Operator, key: StorageKey) -> Version {
    operator.show(key).await.unwrap().version()
}

#[tokio::test]
async fn what_is_settled_as_done_is_replayed() {
    let store = Arc::new(MemoryStore::new());
    let operator = Operator::new(Arc::clone(&store));
    let key = unknown(&*store, "k").await;
    let seen = version(&operator, key).await;
    let settled = Settlement::Done(answer(201, "paid"));
    let made = operator.settle(key, seen, settled, by("T-1")).await.unwrap();
    assert!(made.outcome_noted);
    let ClaimOutcome::Completed(replayed) =
        store.claim(key, &claim_for(TERMS.lease)).await.unwrap()
    else {
        panic!("it is completed")
    };
    assert_eq!(StoredResponse::decode(replayed).unwrap(), answer(201, "paid"));

    let trail = operator.trail(10).await.unwrap();
    assert_eq!(trail.len(), 1);
    assert_eq!((&*trail[0].who, &*trail[0].why), ("ana", "T-1"));
    assert_eq!((&*trail[0].action, trail[0].outcome.as_deref()), ("settle done", Some("done")));
}

#[tokio::test(start_paused = true)]
async fn a_settlement_never_shortens_the_life_of_a_record() {
    let store = Arc::new(MemoryStore::new());
    let operator = Operator::new(Arc::clone(&store));
    let (day, month) = (Duration::from_secs(86_400), Duration::from_secs(30 * 86_400));
    let terms = Terms { lease: TERMS.lease, retention: month, unknown_retention: month };
    for (name, settlement) in
        [("done", Settlement::Done(answer(201, "paid"))), ("not", Settlement::NotApplied)]
    {
        let key = key(name);
        let claim = Claim { terms, ..claim_for(TERMS.lease) };
        let ClaimOutcome::Acquired(lease) = store.claim(key, &claim).await.unwrap() else {
            panic!("it is new")
        };
        store.release(&lease, &Release { terms, verdict: Verdict::Unknown }).await.unwrap();
        let before = operator.show(key).await.unwrap();
        let made = operator.settle(key, before.version(), settlement, by("x")).await.unwrap();
        let after = operator.show(key).await.unwrap();
        assert!(after.expires() >= before.expires(), "{name}: {before:?} {after:?}");
        assert_eq!(made.kept_until, after.expires());
    }
    // What has less left is kept for a day, or as long as the operator is told.
    for (operator, least) in [(operator.clone(), day), (operator.retention(month), month)] {
        let key = unknown(&*store, &format!("{least:?}")).await;
        let seen = version(&operator, key).await;
        operator.settle(key, seen, Settlement::NotApplied, by("x")).await.unwrap();
        let shown = operator.show(key).await.unwrap();
        assert_eq!(shown.expires().unwrap().since(shown.now()), least);
    }
}

#[tokio::test]
async fn an_answer_that_the_layer_would_not_store_settles_nothing() {
    let store = Arc::new(MemoryStore::new());
    let operator = Operator::new(Arc::clone(&store));
    let key = unknown(&*store, "k").await;
    let seen = version(&operator, key).await;
    for refused in [answer(101, ""), answer(204, "x"), answer(429, "later"), answer(600, "")] {
        let refused = operator.settle(key, seen, Settlement::Done(refused), by("x")).await;
        assert_eq!(refused.unwrap_err().code(), "answer_refused");
    }
    assert_eq!(operator.trail(10).await.unwrap().len(), 0);
    let failed = Settlement::Done(answer(502, "no"));
    operator.settle(key, seen, failed, by("x")).await.unwrap();
    let stored = operator.show(key).await.unwrap().response().unwrap().unwrap();
    assert_eq!(stored.headers()["stripe-should-retry"], "false");
}

#[tokio::test]
async fn an_answer_that_its_service_could_not_open_settles_nothing() {
    let inner = Arc::new(MemoryStore::new());
    let keys = |n| ProtectionKeys::new(ProtectionKeyId::from_number(n), &[n as u8; 32]);
    let service = Protected::new(Arc::clone(&inner), keys(1));
    let (sealed, open) = (unknown(&service, "sealed").await, unknown(&*inner, "open").await);
    let done = || Settlement::Done(answer(201, "paid"));
    let keyless = Operator::new(Arc::clone(&inner));
    let stranger = Operator::new(Protected::new(Arc::clone(&inner), keys(2)));
    let faulty = Operator::new(Faulty::new(Arc::clone(&inner)));
    for (operator, key) in
        [(&keyless, sealed), (&stranger, sealed), (&stranger, open), (&faulty, sealed)]
    {
        let seen = version(operator, key).await;
        let refused = operator.settle(key, seen, done(), by("x")).await.unwrap_err();
        assert_eq!(refused.code(), "sealed");
        assert_eq!(version(operator, key).await, seen, "something was changed");
    }
    // During a rotation, and while protection is being switched on, the service can read both.
    let rotating = keys(2).also_open(ProtectionKeyId::from_number(1), &[1; 32]);
    let rotating = Operator::new(Protected::new(inner, rotating.also_open_unprotected()));
    for key in [sealed, open] {
        let seen = version(&rotating, key).await;
        rotating.settle(key, seen, done(), by("x")).await.unwrap();
    }
}

#[tokio::test]
async fn an_answer_that_nobody_can_read_is_replaced_if_somebody_says_so() {
    let inner = Arc::new(MemoryStore::new());
    let keys = |n| ProtectionKeys::new(ProtectionKeyId::from_number(n), &[n as u8; 32]);
    let service = Arc::new(Protected::new(Arc::clone(&inner), keys(1)));
    let key = unknown(&*service, "k").await;
    // As an operator without the key left it.
    let blind = Operator::new(Arc::clone(&inner)).without_seal_check();
    let seen = version(&blind, key).await;
    let done = |body| Settlement::Done(answer(201, body));
    blind.settle(key, seen, done("plain"), by("x")).await.unwrap();
    let claim = claim_for(TERMS.lease);
    assert!(matches!(service.claim(key, &claim).await.unwrap(), ClaimOutcome::Unreadable));

    let operator = Operator::new(Arc::clone(&service));
    let seen = version(&operator, key).await;
    let refused = operator.settle(key, seen, done("paid"), by("x")).await.unwrap_err();
    assert_eq!(refused.code(), "not_unknown", "it was not said that it should be replaced");
    let replacing = operator.clone().replacing_unreadable();
    let not_applied = replacing.settle(key, seen, Settlement::NotApplied, by("x")).await;
    assert_eq!(not_applied.unwrap_err().code(), "not_unknown", "its retry would run");
    replacing.settle(key, seen, done("paid"), by("x")).await.unwrap();
    let ClaimOutcome::Completed(replayed) = service.claim(key, &claim).await.unwrap() else {
        panic!("the service can read it")
    };
    assert_eq!(StoredResponse::decode(replayed).unwrap(), answer(201, "paid"));
    let again = replacing.settle(key, seen, done("other"), by("x")).await.unwrap_err();
    assert_eq!(again.code(), "changed");
    let seen = version(&replacing, key).await;
    let readable = replacing.settle(key, seen, done("other"), by("x")).await.unwrap_err();
    assert_eq!(readable.code(), "not_unknown", "what can be read is an answer");
    // What another key sealed may be readable to the service.
    let stranger = Operator::new(Protected::new(inner, keys(2))).replacing_unreadable();
    let sealed = stranger.settle(key, seen, done("other"), by("x")).await.unwrap_err();
    assert_eq!(sealed.code(), "sealed");
}

#[tokio::test]
async fn a_change_names_what_was_seen_or_is_not_made() {
    let store = Arc::new(MemoryStore::new());
    let operator = Operator::new(Arc::clone(&store));
    let code = |result: Result<_, OperatorError>| result.unwrap_err().code();
    let nobody = key("nobody");
    let seen = Version::UNREADABLE;
    assert_eq!(code(operator.forget(nobody, seen, by("x")).await), "not_found");

    let running = key("running");
    let lease = claimed(&*store, running).await;
    let seen = version(&operator, running).await;
    assert_eq!(code(operator.forget(running, seen, by("x")).await), "in_flight");
    let not_applied = || Settlement::NotApplied;
    assert_eq!(code(operator.settle(running, seen, not_applied(), by("x")).await), "in_flight");
    complete(&*store, &lease, "done").await;
    assert_eq!(code(operator.settle(running, seen, not_applied(), by("x")).await), "changed");
    let seen = version(&operator, running).await;
    assert_eq!(code(operator.settle(running, seen, not_applied(), by("x")).await), "not_unknown");

    let first = unknown(&*store, "first").await;
    let seen = version(&operator, first).await;
    operator.settle(first, seen, not_applied(), by("x")).await.unwrap();
    assert_eq!(code(operator.forget(first, seen, by("x")).await), "changed");
    let seen = version(&operator, first).await;
    operator.forget(first, seen, by("test data")).await.unwrap();
    assert_eq!(operator.show(first).await.unwrap_err().code(), "not_found");
    // What was refused before it began left nothing in the trail.
    assert_eq!(operator.trail(10).await.unwrap().len(), 2);
}

#[tokio::test]
async fn what_cannot_be_read_is_forgotten_only_if_somebody_says_so() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let operator = Operator::new(store.clone());
    let key = unknown(&store, "k").await;
    let known = version(&operator, key).await;
    server.cli(&["set", &format!("idem:{{{}}}", key.to_text()), "of another release", "ex", "600"]);
    let shown = operator.show(key).await.unwrap();
    assert_eq!(RecordView::of(&shown, Detail::Facts).state, "unreadable");
    let refused = operator.forget(key, known, by("x")).await.unwrap_err();
    assert_eq!(refused.code(), "unreadable");
    let settled = operator.settle(key, shown.version(), Settlement::NotApplied, by("x")).await;
    assert_eq!(settled.unwrap_err().code(), "unreadable");
    operator.forget(key, Version::UNREADABLE, by("from a test of the next release")).await.unwrap();
    assert_eq!(operator.show(key).await.unwrap_err().code(), "not_found");

    // Something else than a string is not ours.
    server.cli(&["rpush", &format!("idem:{{{}}}", key.to_text()), "foreign"]);
    let refused = operator.forget(key, Version::UNREADABLE, by("x")).await.unwrap_err();
    assert_eq!(refused.code(), "unreadable");
}

#[tokio::test]
async fn without_a_trail_nothing_is_changed() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let operator = Operator::new(store.clone());
    let key = unknown(&store, "k").await;
    let seen = version(&operator, key).await;
    server.cli(&["set", "idem:{operators}:trail", "in the way"]);
    for settle in [true, false] {
        let refused = match settle {
            true => operator.settle(key, seen, Settlement::NotApplied, by("x")).await,
            false => operator.forget(key, seen, by("x")).await,
        };
        assert_eq!(refused.unwrap_err().code(), "no_trail");
        assert_eq!(version(&operator, key).await, seen, "something was changed");
    }
    server.cli(&["del", "idem:{operators}:trail"]);
    operator.forget(key, seen, by("x")).await.unwrap();
}

#[tokio::test]
async fn in_a_full_redis_an_operator_can_settle_and_forget() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let operator = Operator::new(store.clone());
    let (one, two) = (unknown(&store, "one").await, unknown(&store, "two").await);
    server.cli(&["config", "set", "maxmemory", "1"]);
    assert!(store.claim(key("three"), &claim_for(TERMS.lease)).await.is_err(), "it is full");
    let seen = version(&operator, one).await;
    operator.settle(one, seen, Settlement::Done(answer(201, "paid")), by("x")).await.unwrap();
    let seen = version(&operator, two).await;
    operator.forget(two, seen, by("x")).await.unwrap();
    assert_eq!(operator.trail(10).await.unwrap().len(), 2);
}

#[tokio::test]
async fn a_protected_store_shows_contents_to_who_has_the_key_only() {
    let inner = Arc::new(MemoryStore::new());
    let keys = |n| ProtectionKeys::new(ProtectionKeyId::from_number(n), &[n as u8; 32]);
    let store = Arc::new(Protected::new(Arc::clone(&inner), keys(1)));
    let operator = Operator::new(Arc::clone(&store));
    let done = key("done");
    let lease = claimed(&*store, done).await;
    complete(&*store, &lease, "secret body").await;
    let shown = operator.show(done).await.unwrap();
    let body = shown.response().unwrap().unwrap().body().clone();
    assert_eq!(body, StoredBody::Kept(Bytes::from_static(b"secret body")));

    let stranger = Operator::new(Protected::new(Arc::clone(&inner), keys(2)));
    let shown = stranger.show(done).await.unwrap();
    let view = RecordView::of(&shown, Detail::Contents);
    assert!(view.sealed && view.response.is_none() && view.status.is_none(), "{view:?}");
    assert_eq!(view.state, "completed");

    // What an operator settles is sealed as other answers are.
    let lost = unknown(&*store, "lost").await;
    let seen = version(&operator, lost).await;
    operator.settle(lost, seen, Settlement::Done(answer(201, "paid")), by("x")).await.unwrap();
    let raw = Operator::new(inner).show(lost).await.unwrap();
    assert!(raw.response().is_err(), "it rests in the open");
    assert!(operator.show(lost).await.unwrap().response().unwrap().is_some());
}

#[tokio::test]
async fn a_change_is_carried_through_though_its_caller_leaves() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let operator = Operator::new(store.clone());
    let key = unknown(&store, "k").await;
    let seen = version(&operator, key).await;
    let change = operator.settle(key, seen, Settlement::NotApplied, by("x"));
    assert!(change.now_or_never().is_none(), "a change takes a while");
    for _ in 0..200 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let trail = operator.trail(1).await.unwrap();
        if trail.first().is_some_and(|entry| entry.outcome.as_deref() == Some("done")) {
            return;
        }
    }
    panic!("half of a change: {:?}", operator.trail(1).await);
}

#[tokio::test(start_paused = true)]
async fn a_change_whose_reply_is_lost_is_asked_for_again() {
    use tower_idempotency::StoreErrorKind::{OutcomeUnknown, Unavailable};
    let store = Faulty::new(MemoryStore::new());
    let operator = Operator::new(store.clone());
    for (verb, name) in [(Verb::Resolve, "settled"), (Verb::Forget, "forgotten")] {
        let change = async |name: &str| {
            let key = unknown(&store, name).await;
            let seen = version(&operator, key).await;
            match verb {
                Verb::Resolve => operator.settle(key, seen, Settlement::NotApplied, by("x")).await,
                _ => operator.forget(key, seen, by("x")).await,
            }
        };
        let last = async || operator.trail(1).await.unwrap()[0].outcome.clone();
        store.inject(verb, Fault::LoseReply);
        change(name).await.unwrap();
        assert_eq!(last().await.as_deref(), Some("done"));
        store.inject(verb, Fault::LoseRequest);
        change(&format!("{name} later")).await.unwrap();

        store.inject_always(verb, Fault::Fail(OutcomeUnknown));
        let unsure = change(&format!("{name} perhaps")).await.unwrap_err();
        assert_eq!(unsure.code(), "unconfirmed");
        assert_eq!(last().await.as_deref(), Some("unconfirmed"));
        store.heal();
        store.inject(verb, Fault::Fail(Unavailable));
        let failed = change(&format!("{name} not")).await.unwrap_err();
        assert_eq!(failed.code(), "store_failed");

        // The trail is away behind the change: it is made all the same, and its caller is told.
        let key = unknown(&store, &format!("{name} unnoted")).await;
        let seen = version(&operator, key).await;
        store.inject(verb, Fault::DelayReply(Duration::from_secs(5)));
        let changed = async {
            match verb {
                Verb::Resolve => operator.settle(key, seen, Settlement::NotApplied, by("x")).await,
                _ => operator.forget(key, seen, by("x")).await,
            }
        };
        let away = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            store.inject_always(Verb::Note, Fault::Fail(Unavailable));
        };
        let (made, ()) = tokio::join!(changed, away);
        assert!(!made.unwrap().outcome_noted);
        store.heal();
        assert_eq!(last().await, None);
    }
}

#[tokio::test]
async fn an_auditor_keeps_the_index_fresh_until_it_is_dropped() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let operator = Operator::new(store.clone());
    let key = unknown(&store, "k").await;
    let wanted = Wanted { survey: Survey::Unknown, at_most: 10, after: None };
    assert_eq!(operator.list(&wanted).await.unwrap().source, Source::NoIndex);
    let task = Auditor::new(store.clone()).interval(Duration::from_millis(20)).spawn();
    let mut listed = Vec::new();
    for _ in 0..200 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        listed = operator.list(&wanted).await.unwrap().entries;
        if !listed.is_empty() {
            break;
        }
    }
    assert_eq!(listed.first().map(|entry| entry.key), Some(key));
    assert_eq!(operator.find(LogId::parse(&key.log_id()).unwrap()).await.unwrap(), key);
    drop(task);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let scans = server.calls_of("scan");
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(server.calls_of("scan"), scans, "it goes on");
}

#[tokio::test]
async fn a_pass_keeps_to_its_rate() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    for number in 0..300 {
        let lease = claimed(&store, key(&number.to_string())).await;
        complete(&store, &lease, "x").await;
    }
    let begun = std::time::Instant::now();
    let auditor = Auditor::new(store).keys_per_second(NonZeroU32::new(400).unwrap());
    let mut steps = 0;
    let step = auditor.pass(|_| steps += 1).await.unwrap();
    // SCAN may name a key twice.
    assert!(step.scanned >= 300 && step.next.is_none(), "{step:?}");
    assert!(steps >= 5, "{steps} steps");
    assert!(begun.elapsed() >= Duration::from_millis(550), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_pass_that_is_given_up_leaves_the_last_listing() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    for number in 0..50 {
        unknown(&store, &number.to_string()).await;
    }
    Auditor::new(store.clone()).pass(|_| {}).await.unwrap();
    let half = store.audit(None, 5).await.unwrap();
    assert!(half.next.is_some(), "a step of five is not everything");
    let wanted = Wanted { survey: Survey::Unknown, at_most: 100, after: None };
    assert_eq!(store.list(&wanted).await.unwrap().entries.len(), 50);
    let keys = server.cli(&["--scan", "--pattern", "idem:{operators}:*"]);
    for index in keys.lines() {
        let left: i64 = server.cli(&["ttl", index]).parse().unwrap();
        assert!(left > 0, "{index} stays for ever");
    }
}

#[tokio::test]
async fn a_change_leaves_two_events_and_nothing_of_key_or_body() {
    let (log, _guard) = Log::install(tracing::Level::TRACE);
    let store = Arc::new(MemoryStore::new());
    let operator = Operator::new(Arc::clone(&store));
    let key = unknown(&*store, "planted-key-4242").await;
    let seen = version(&operator, key).await;
    let settled = Settlement::Done(answer(201, "planted-body-4242"));
    operator.settle(key, seen, settled, by("T-9: the bank says so")).await.unwrap();
    let seen = version(&operator, key).await;
    operator.forget(key, seen, by("cleared")).await.unwrap();

    let text = log.take();
    let events = text.lines().filter(|line| line.contains("tower_idempotency::audit"));
    let events: Vec<_> = events.collect();
    assert_eq!(events.len(), 4, "{text}");
    for (event, outcome) in events.iter().zip(["begun", "done", "begun", "done"]) {
        for part in [key.log_id().as_str(), "who=\"ana\"", &format!("outcome=\"{outcome}\"")] {
            assert!(event.contains(part), "{part} is not in {event}");
        }
    }
    assert!(events[0].contains("T-9: the bank says so") && events[0].contains("settle done"));
    let trail = format!("{:?}", operator.trail(10).await.unwrap());
    for secret in ["planted-key", "planted-body"] {
        assert!(!text.contains(secret), "{text}");
        assert!(!trail.contains(secret), "{trail}");
    }
}
