//! What the Redis store does when something is wrong with the server or the way to it.

#![allow(clippy::wildcard_enum_match_arm, reason = "what was not expected is printed")]
#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::error::Error as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use support::redis::RedisServer;
use tokio::net::TcpListener;
use tower_idempotency::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Effects, Finding, OnExpired, Release,
    ReleaseOutcome, RenewOutcome, Renewal, Resolution, ResolveOutcome, Terms, Verdict,
};
use tower_idempotency::store::redis::deadpool_redis::{Manager, Pool, Runtime};
use tower_idempotency::{
    Fingerprint, Fingerprints, HolderId, Lease, RecipeId, RedisStore, StorageKey, Store,
    StoreError, StoreErrorKind,
};

const LONG: Duration = Duration::from_secs(600);
const TERMS: Terms = Terms { lease: LONG, retention: LONG, unknown_retention: LONG };

/// Short, so that tests that wait for it end soon; long enough for a busy machine.
const CALL_TIMEOUT: Duration = Duration::from_millis(300);

/// What a verb may take at most: a wait for a connection and one for a reply, and some time to run.
const LIMIT: Duration = Duration::from_millis(2 * 300 + 500);

/// The two ways to reach the server; every fault is tried with both.
#[derive(Clone, Copy, Debug)]
enum Way {
    Shared,
    Pool,
}

const WAYS: [Way; 2] = [Way::Shared, Way::Pool];

async fn connect(way: Way, server: &RedisServer) -> RedisStore {
    let builder = RedisStore::builder()
        .call_timeout(CALL_TIMEOUT)
        .connect_timeout(Duration::from_millis(500));
    match way {
        Way::Shared => builder.connect(&server.url()).await.unwrap(),
        Way::Pool => builder.pool(pool(server, 4)).unwrap(),
    }
}

fn pool(server: &RedisServer, size: usize) -> Pool {
    let manager = Manager::new(server.url()).unwrap();
    Pool::builder(manager).max_size(size).runtime(Runtime::Tokio1).build().unwrap()
}

fn new_key() -> StorageKey {
    let mut bytes = [0; 24];
    bytes[..16].copy_from_slice(HolderId::random().as_bytes());
    StorageKey::from_bytes(bytes)
}

fn name_of(key: StorageKey) -> String {
    format!("idem:{{{}}}", key.to_text())
}

fn claim() -> Claim {
    let print = Fingerprint::from_stored(RecipeId::from_bytes([1; 4]), [1; 32]);
    Claim {
        holder: HolderId::random(),
        fingerprints: Fingerprints::one(print),
        terms: TERMS,
        on_expired: OnExpired::Refuse,
        effects: Effects::Anywhere,
    }
}

fn completion(response: &[u8]) -> Completion {
    Completion { terms: TERMS, response: Bytes::copy_from_slice(response) }
}

async fn granted(store: &RedisStore, key: StorageKey) -> Lease {
    match store.claim(key, &claim()).await.unwrap() {
        ClaimOutcome::Acquired(lease) => lease,
        other => panic!("expected a grant, got {other:?}"),
    }
}

/// Takes a new key, which succeeds unless something is wrong.
async fn works(store: &RedisStore) {
    drop(granted(store, new_key()).await);
}

fn is_replay(outcome: &Result<ClaimOutcome<Lease>, StoreError>, response: &[u8]) -> bool {
    matches!(outcome, Ok(ClaimOutcome::Completed(stored)) if stored == response)
}

/// Repeats a verb until it works, as a caller would; a second is ample for any pause in between.
async fn recovers(store: &RedisStore, what: &str) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match store.claim(new_key(), &claim()).await {
            Ok(ClaimOutcome::Acquired(_)) => return,
            Ok(other) => panic!("{what}: a new key is free, got {other:?}"),
            Err(error) => assert!(Instant::now() < deadline, "{what}: {error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_forgotten_script_costs_one_more_trip_and_no_load() {
    let server = RedisServer::start();
    for way in WAYS {
        let store = connect(way, &server).await;
        store.ready().await.unwrap();
        works(&store).await;
        server.cli(&["script", "flush"]);
        server.cli(&["config", "resetstat"]);
        let key = new_key();
        let lease = granted(&store, key).await;
        assert_eq!(server.calls_of("evalsha"), 1, "{way:?}");
        assert_eq!(server.calls_of("eval"), 1, "{way:?}");
        assert_eq!(server.calls_of("script|load"), 0, "{way:?}");
        let stored = store.complete(&lease, &completion(b"answer")).await.unwrap();
        assert_eq!(stored, CompleteOutcome::Stored);
        assert!(is_replay(&store.claim(key, &claim()).await, b"answer"));
        assert_eq!(server.calls_of("eval"), 2, "{way:?}: once per script");
    }
}

#[tokio::test]
async fn under_a_storm_of_forgotten_scripts_every_call_ends_well() {
    let server = RedisServer::start();
    for way in WAYS {
        let store = connect(way, &server).await;
        let calls = (0..200).map(|number| {
            let (store, server) = (&store, &server);
            async move {
                if number % 50 == 0 {
                    server.cli(&["script", "flush"]);
                }
                let key = new_key();
                let lease = granted(store, key).await;
                store.complete(&lease, &completion(key.as_bytes())).await.unwrap();
                assert!(is_replay(&store.claim(key, &claim()).await, key.as_bytes()));
            }
        });
        join_all(calls).await;
    }
}

#[tokio::test]
async fn killed_connections_are_replaced_and_leave_no_reply_to_the_wrong_call() {
    let server = RedisServer::start();
    for way in WAYS {
        let store = connect(way, &server).await;
        let workers = (0..8).map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let mut unanswered = 0;
                for _ in 0..150 {
                    unanswered += run_one_operation(&store).await;
                }
                unanswered
            })
        });
        let workers: Vec<_> = workers.collect();
        let mut killed = 0;
        while workers.iter().any(|worker| !worker.is_finished()) {
            killed += 1;
            server.cli(&["client", "kill", "type", "normal", "skipme", "yes"]);
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
        let mut unanswered = 0;
        for worker in workers {
            unanswered += worker.await.unwrap();
        }
        println!("{way:?}: {killed} kills, {unanswered} calls without an answer");
        recovers(&store, "after the kills").await;
    }
}

/// Claims, completes and replays a key, sending again what had no answer. Checks that the replay
/// is this key's. Gives the number of calls that had no answer.
async fn run_one_operation(store: &RedisStore) -> usize {
    let (key, claim, response) =
        (new_key(), claim(), completion(&HolderId::random().as_bytes()[..]));
    let mut unanswered = 0;
    let lease = loop {
        match store.claim(key, &claim).await {
            Ok(ClaimOutcome::Acquired(lease)) => break lease,
            Ok(other) => panic!("a claim that is sent again is one's own, got {other:?}"),
            Err(error) => unanswered += may_be_sent_again(&error).await,
        }
    };
    assert_eq!(lease.grant().attempt.number(), 1, "the same attempt");
    loop {
        match store.complete(&lease, &response).await {
            Ok(outcome) => break assert_eq!(outcome, CompleteOutcome::Stored),
            Err(error) => unanswered += may_be_sent_again(&error).await,
        }
    }
    loop {
        match store.claim(key, &claim).await {
            Ok(ClaimOutcome::Completed(stored)) => break assert_eq!(stored, response.response),
            Ok(other) => panic!("a completed key is replayed, got {other:?}"),
            Err(error) => unanswered += may_be_sent_again(&error).await,
        }
    }
    unanswered
}

async fn may_be_sent_again(error: &StoreError) -> usize {
    let kind = error.kind();
    let fits = matches!(kind, StoreErrorKind::OutcomeUnknown | StoreErrorKind::Unavailable);
    assert!(fits, "{error:?}");
    tokio::time::sleep(Duration::from_millis(5)).await;
    1
}

#[tokio::test]
async fn a_server_that_dies_and_comes_back_is_found_again() {
    for way in WAYS {
        let mut server = RedisServer::start();
        let store = connect(way, &server).await;
        let lease = granted(&store, new_key()).await;
        server.kill();
        for _ in 0..3 {
            let begun = Instant::now();
            let error = store.claim(new_key(), &claim()).await.unwrap_err();
            assert!(begun.elapsed() < LIMIT, "{way:?}: {:?}", begun.elapsed());
            may_be_sent_again(&error).await;
        }
        server.restart();
        recovers(&store, "after the restart").await;
        let restored = store.complete(&lease, &completion(b"answer")).await.unwrap();
        assert_eq!(restored, CompleteOutcome::Restored, "{way:?}: the owner restores its record");
    }
}

#[tokio::test]
async fn while_a_server_is_away_calls_say_that_nothing_was_done() {
    let mut server = RedisServer::start();
    for way in WAYS {
        let store = connect(way, &server).await;
        works(&store).await;
        server.kill();
        // The connections break under these; after them nothing is sent any more.
        for _ in 0..8 {
            let _ = store.claim(new_key(), &claim()).await;
        }
        for _ in 0..20 {
            let error = store.claim(new_key(), &claim()).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{way:?}: {error:?}");
        }
        server.restart();
    }
}

#[tokio::test]
async fn a_frozen_server_holds_no_call_longer_than_the_limit() {
    for way in WAYS {
        let server = RedisServer::start();
        let store = connect(way, &server).await;
        works(&store).await;
        server.stop();
        let first = claim();
        let key = new_key();
        let begun = Instant::now();
        let error = store.claim(key, &first).await.unwrap_err();
        assert!(begun.elapsed() < LIMIT, "{way:?}: {:?}", begun.elapsed());
        may_be_sent_again(&error).await;
        let calls = (0..40).map(|_| async {
            let begun = Instant::now();
            let error = store.claim(new_key(), &claim()).await.unwrap_err();
            assert!(begun.elapsed() < LIMIT, "{way:?}: {:?}", begun.elapsed());
            may_be_sent_again(&error).await;
        });
        join_all(calls).await;
        let begun = Instant::now();
        store.ready().await.unwrap_err();
        assert!(begun.elapsed() < LIMIT, "{way:?}: {:?}", begun.elapsed());
        server.cont();
        recovers(&store, "after the freeze").await;
        // Whether the first one arrived or not: it is one's own.
        match store.claim(key, &first).await {
            Ok(ClaimOutcome::Acquired(lease)) => assert_eq!(lease.grant().attempt.number(), 1),
            other => panic!("{way:?}: {other:?}"),
        }
        for _ in 0..50 {
            assert_eq!(run_one_operation(&store).await, 0, "{way:?}: no reply goes astray");
        }
    }
}

#[tokio::test]
async fn a_connection_that_turns_silent_is_given_up() {
    // The server is well; only what this connection sends arrives nowhere.
    let server = RedisServer::start();
    let way_there = support::relay::Relay::to(server.port()).await;
    let store = RedisStore::builder()
        .call_timeout(CALL_TIMEOUT)
        .connect(&format!("redis://127.0.0.1:{}/", way_there.port()))
        .await
        .unwrap();
    works(&store).await;
    way_there.swallow_open_connections();
    for _ in 0..3 {
        let error = store.claim(new_key(), &claim()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::OutcomeUnknown, "{error:?}");
    }
    works(&store).await;
}

#[tokio::test]
async fn calls_dropped_half_way_do_not_disturb_those_after_them() {
    let server = RedisServer::start();
    for way in WAYS {
        let store = connect(way, &server).await;
        for round in 0..60_u64 {
            let key = new_key();
            let dropped = granted(&store, new_key()).await;
            {
                let answer = completion(b"dropped");
                let calls = async {
                    tokio::join!(
                        store.complete(&dropped, &answer),
                        store.renew(&dropped, &Renewal { terms: TERMS, checkpoint: None }),
                    )
                };
                // Anywhere between not begun and done.
                let _ = tokio::time::timeout(Duration::from_micros(round * 20), calls).await;
            }
            let lease = granted(&store, key).await;
            let response = completion(key.as_bytes());
            let stored = store.complete(&lease, &response).await.unwrap();
            assert_eq!(stored, CompleteOutcome::Stored, "{way:?}");
            assert!(is_replay(&store.claim(key, &claim()).await, key.as_bytes()), "{way:?}");
        }
    }
}

#[tokio::test]
async fn a_demoted_server_is_left_and_recognised_when_it_is_primary_again() {
    let server = RedisServer::start();
    let other = RedisServer::start();
    for way in WAYS {
        let store = connect(way, &server).await;
        let lease = granted(&store, new_key()).await;
        server.cli(&["replicaof", "127.0.0.1", &other.port().to_string()]);
        for _ in 0..5 {
            let error = store.claim(new_key(), &claim()).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{way:?}: {error:?}");
            let error = store.complete(&lease, &completion(b"answer")).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{way:?}: {error:?}");
            store.ready().await.unwrap_err();
        }
        let connections = server.cli(&["info", "stats"]);
        let made = connections.lines().find(|line| line.starts_with("total_connections_received"));
        println!("{way:?}: {made:?}");
        server.cli(&["replicaof", "no", "one"]);
        recovers(&store, "primary again").await;
    }
}

#[tokio::test]
async fn a_replica_that_became_primary_behind_the_same_address_is_found() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let address = support::relay::Relay::to(old.port()).await;
    let url = format!("redis://127.0.0.1:{}/", address.port());
    let shared = RedisStore::builder().call_timeout(CALL_TIMEOUT).connect(&url).await.unwrap();
    let manager = Manager::new(url).unwrap();
    let pooled = RedisStore::from_pool(Pool::builder(manager).max_size(2).build().unwrap());
    for store in [&shared, &pooled] {
        works(store).await;
    }
    // The old primary lives on as a replica: no connection breaks.
    old.cli(&["replicaof", "127.0.0.1", &new.port().to_string()]);
    address.lead_to(new.port());
    for store in [&shared, &pooled] {
        recovers(store, "at the new primary").await;
    }
}

#[tokio::test]
async fn a_full_server_refuses_new_keys_and_ends_what_it_has() {
    let server = RedisServer::start_with(&["--maxmemory-policy", "noeviction"]);
    for way in WAYS {
        let store = connect(way, &server).await;
        let (done, running, unsure) = (new_key(), new_key(), new_key());
        let lease = granted(&store, done).await;
        store.complete(&lease, &completion(b"answer")).await.unwrap();
        let lease = granted(&store, running).await;
        let unsure_lease = granted(&store, unsure).await;
        let open_lease = granted(&store, new_key()).await;
        server.cli(&["config", "set", "maxmemory", "1"]);

        let error = store.claim(new_key(), &claim()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Full, "{way:?}: {error:?}");
        assert_eq!(store.ready().await.unwrap_err().kind(), StoreErrorKind::Full, "{way:?}");
        assert!(is_replay(&store.claim(done, &claim()).await, b"answer"), "{way:?}: replays");
        let renewal = Renewal { terms: TERMS, checkpoint: Some(Bytes::from_static(b"note")) };
        assert_eq!(store.renew(&lease, &renewal).await.unwrap(), RenewOutcome::Renewed);
        let stored = store.complete(&lease, &completion(&[7; 4096])).await.unwrap();
        assert_eq!(stored, CompleteOutcome::Stored, "{way:?}: what runs can end");
        assert!(is_replay(&store.claim(running, &claim()).await, &[7; 4096]), "{way:?}");
        let release = |verdict| Release { terms: TERMS, verdict };
        let released = store.release(&open_lease, &release(Verdict::NoEffect)).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released, "{way:?}");
        let released = store.release(&unsure_lease, &release(Verdict::Unknown)).await.unwrap();
        assert_eq!(released, ReleaseOutcome::Released, "{way:?}");
        let owner = unsure_lease.owner();
        let finding = Finding::Happened(Bytes::from_static(b"found"));
        let resolution =
            Resolution { holder: owner.holder, attempt: owner.attempt, finding, terms: TERMS };
        let resolved = store.resolve(unsure, &resolution).await.unwrap();
        assert_eq!(resolved, ResolveOutcome::Resolved, "{way:?}: and be settled");
        // A start in this state must be possible, or a deploy would end what still works.
        RedisStore::connect(&server.url()).await.unwrap();
        server.cli(&["config", "set", "maxmemory", "0"]);
        works(&store).await;
    }
}

#[tokio::test]
async fn foreign_values_are_refused_and_left_alone() {
    let server = RedisServer::start();
    for way in WAYS {
        let store = connect(way, &server).await;
        let makers: [(&[&str], &[&str]); 5] = [
            (&["rpush", "KEY", "x"], &["lrange", "KEY", "0", "-1"]),
            (&["hset", "KEY", "x", "y"], &["hgetall", "KEY"]),
            (&["zadd", "KEY", "1", "x"], &["zrange", "KEY", "0", "-1"]),
            (&["set", "KEY", "hello"], &["get", "KEY"]),
            (&["set", "KEY", ""], &["get", "KEY"]),
        ];
        for (make, look) in makers {
            let key = new_key();
            let name = name_of(key);
            let run = |command: &[&str]| {
                let command: Vec<_> =
                    command.iter().map(|&part| if part == "KEY" { &name } else { part }).collect();
                server.cli(&command)
            };
            run(make);
            let before = run(look);
            let claim = claim();
            let lease = Lease::new(key, &claim, granted(&store, new_key()).await.grant().clone());
            let release = Release { terms: TERMS, verdict: Verdict::NoEffect };
            let owner = lease.owner();
            let resolution = Resolution {
                holder: owner.holder,
                attempt: owner.attempt,
                finding: Finding::NothingHappened,
                terms: TERMS,
            };
            let renewal = Renewal { terms: TERMS, checkpoint: None };
            let outcome = store.claim(key, &claim).await;
            assert!(matches!(outcome, Ok(ClaimOutcome::Unreadable)), "{make:?}: {outcome:?}");
            let outcome = store.renew(&lease, &renewal).await.unwrap();
            assert_eq!(outcome, RenewOutcome::Unreadable, "{make:?}");
            let outcome = store.complete(&lease, &completion(b"answer")).await.unwrap();
            assert_eq!(outcome, CompleteOutcome::Unreadable, "{make:?}");
            let outcome = store.release(&lease, &release).await.unwrap();
            assert_eq!(outcome, ReleaseOutcome::Unreadable, "{make:?}");
            let outcome = store.resolve(key, &resolution).await.unwrap();
            assert_eq!(outcome, ResolveOutcome::Unreadable, "{make:?}");
            assert_eq!(run(look), before, "{make:?} is left alone");
        }
    }
}

#[tokio::test]
async fn an_exhausted_pool_ends_in_an_error_and_not_in_a_wait() {
    let server = RedisServer::start();
    for size in [1, 2] {
        let pool = pool(&server, size);
        let builder = RedisStore::builder().call_timeout(CALL_TIMEOUT);
        let store = builder.pool(pool.clone()).unwrap();
        let lease = granted(&store, new_key()).await;
        let mut held = Vec::new();
        for _ in 0..size {
            held.push(pool.get().await.unwrap());
        }
        let begun = Instant::now();
        let error = store.claim(new_key(), &claim()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
        let error = store.complete(&lease, &completion(b"answer")).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
        assert!(begun.elapsed() < LIMIT, "{:?}", begun.elapsed());
        drop(held);
        let stored = store.complete(&lease, &completion(b"answer")).await.unwrap();
        assert_eq!(stored, CompleteOutcome::Stored);
    }
}

#[tokio::test]
async fn a_completion_does_not_queue_behind_claims() {
    let server = RedisServer::start();
    let pool = pool(&server, 3);
    let store = Arc::new(
        RedisStore::builder().call_timeout(Duration::from_secs(5)).pool(pool.clone()).unwrap(),
    );
    let lease = granted(&store, new_key()).await;
    // Two slots are taken by somebody else, as if claims were stuck in them; the claims that wait
    // for a slot are many, and none of them may get the last one.
    let held = [pool.get().await.unwrap(), pool.get().await.unwrap()];
    let claims: Vec<_> = (0..50)
        .map(|_| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { store.claim(new_key(), &claim()).await })
        })
        .collect();
    let completion = completion(b"answer");
    let completing = store.complete(&lease, &completion);
    let outcome = tokio::time::timeout(Duration::from_secs(2), completing).await;
    assert_eq!(outcome.unwrap().unwrap(), CompleteOutcome::Stored);
    drop(held);
    for claim in claims {
        claim.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn a_connection_in_doubt_never_goes_back_to_its_pool() {
    let server = RedisServer::start();
    let pool = pool(&server, 1);
    let store = RedisStore::builder().call_timeout(CALL_TIMEOUT).pool(pool.clone()).unwrap();
    works(&store).await;
    assert_eq!(pool.status().size, 1);
    server.stop();
    let error = store.claim(new_key(), &claim()).await.unwrap_err();
    may_be_sent_again(&error).await;
    server.cont();
    assert_eq!(pool.status().size, 0, "a connection that timed out has left");
    works(&store).await;

    let (claim, renewal) = (claim(), Renewal { terms: TERMS, checkpoint: None });
    let lease = granted(&store, new_key()).await;
    server.stop();
    {
        let dropped = tokio::time::timeout(CALL_TIMEOUT / 4, store.renew(&lease, &renewal));
        dropped.await.unwrap_err();
    }
    server.cont();
    tokio::task::yield_now().await;
    assert_eq!(pool.status().available, 0, "one whose call was dropped does not come back either");
    let outcome = store.claim(new_key(), &claim).await;
    assert!(matches!(outcome, Ok(ClaimOutcome::Acquired(_))), "{outcome:?}");
}

#[tokio::test]
async fn an_absent_server_is_told_at_once() {
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let begun = Instant::now();
    let error = RedisStore::connect(&format!("redis://127.0.0.1:{port}/")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.source().unwrap().to_string().contains("refused"), "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_told_within_five_seconds() {
    let server = RedisServer::start();
    server.stop();
    let begun = Instant::now();
    let error = RedisStore::connect(&server.url()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    server.cont();
}

#[tokio::test]
async fn a_password_and_a_database_are_taken_from_the_address() {
    let server = RedisServer::start();
    server.cli(&["config", "set", "requirepass", "open sesame"]);
    let authority = format!("127.0.0.1:{}", server.port());
    let url = format!("redis://:open%20sesame@{authority}/3");
    let store = RedisStore::connect(&url).await.unwrap();
    let key = new_key();
    drop(granted(&store, key).await);
    let name = name_of(key);
    let found = server.cli(&["-a", "open sesame", "--no-auth-warning", "-n", "3", "exists", &name]);
    assert_eq!(found, "1");
    let shown = format!("{store:?}");
    assert!(!shown.contains("sesame") && !shown.contains(&authority), "{shown}");

    for wrong in [format!("redis://:wrong@{authority}/"), format!("redis://{authority}/")] {
        let error = RedisStore::connect(&wrong).await.unwrap_err();
        assert_ne!(error.kind(), StoreErrorKind::OutcomeUnknown, "{error:?}");
        assert!(!format!("{error:?}").contains("wrong@"), "{error:?}");
    }
    for nonsense in ["", "127.0.0.1", "http://127.0.0.1/", "redis://", "redis://127.0.0.1/x"] {
        let error = RedisStore::connect(nonsense).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Backend, "{nonsense}: {error:?}");
    }
}

#[tokio::test]
async fn a_user_without_permission_is_told_that_nothing_was_done() {
    let server = RedisServer::start();
    server.cli(&["acl", "setuser", "guest", "on", ">pass", "~idem:*", "+@all", "-set"]);
    let url = format!("redis://guest:pass@127.0.0.1:{}/", server.port());
    let error = RedisStore::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Backend, "{error:?}");
    server.cli(&["acl", "setuser", "guest", "+set"]);
    let store = RedisStore::connect(&url).await.unwrap();
    works(&store).await;
    server.cli(&["acl", "setuser", "guest", "-evalsha"]);
    let error = store.claim(new_key(), &claim()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Backend, "{error:?}");
}

#[tokio::test]
async fn prefixes_keep_two_services_in_one_server_apart() {
    let server = RedisServer::start();
    let key = new_key();
    for prefix in ["a", "b"] {
        let store = RedisStore::builder().prefix(prefix).connect(&server.url()).await.unwrap();
        drop(granted(&store, key).await);
        let name = format!("{prefix}:{{{}}}", key.to_text());
        assert_eq!(server.cli(&["exists", &name]), "1");
    }
    for bad in ["", "a{b}", "a\n", &"x".repeat(65)] {
        let error = RedisStore::builder().prefix(bad).connect(&server.url()).await.unwrap_err();
        assert!(error.source().unwrap().to_string().contains("prefix"), "{error:?}");
    }
}

#[tokio::test]
async fn no_key_is_ever_without_an_expiry() {
    let server = RedisServer::start();
    let store = connect(Way::Shared, &server).await;
    let left = |key: StorageKey| server.cli(&["pttl", &name_of(key)]).parse::<i64>().unwrap();
    // The longest and the shortest times that a configuration could ask for.
    let for_ever = Duration::MAX;
    for time in [Duration::from_secs(60), for_ever] {
        let terms = Terms { lease: time, retention: time, unknown_retention: time };
        let claim = Claim { terms, ..claim() };
        let renewal = Renewal { terms, checkpoint: None };
        let completion = Completion { terms, response: Bytes::from_static(b"answer") };
        for verdict in [None, Some(Verdict::NoEffect), Some(Verdict::Unknown)] {
            let key = new_key();
            let Ok(ClaimOutcome::Acquired(lease)) = store.claim(key, &claim).await else {
                panic!("a new key is free")
            };
            assert!(left(key) > 0, "claimed");
            store.renew(&lease, &renewal).await.unwrap();
            assert!(left(key) > 0, "renewed");
            match verdict {
                None => drop(store.complete(&lease, &completion).await.unwrap()),
                Some(verdict) => {
                    store.release(&lease, &Release { terms, verdict }).await.unwrap();
                }
            }
            assert!(left(key) > 0, "{verdict:?}");
            let owner = lease.owner();
            let finding = Finding::NothingHappened;
            let resolution =
                Resolution { holder: owner.holder, attempt: owner.attempt, finding, terms };
            store.resolve(key, &resolution).await.unwrap();
            assert!(left(key) > 0, "{verdict:?}, settled");
        }
    }
    let without = server.cli(&["info", "keyspace"]);
    let keys = |name: &str| -> u64 {
        let (_, rest) = without.split_once(&format!("{name}=")).unwrap();
        rest.split([',', '\r', '\n']).next().unwrap().parse().unwrap()
    };
    assert_eq!(keys("keys"), keys("expires"), "{without}");
}
