//! Short ways to use a Redis store.

use std::time::{Duration, Instant};

use bytes::Bytes;
use tower_idempotency::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Effects, OnExpired, Terms, Writes,
};
use tower_idempotency::store::redis::deadpool_redis::{Manager, Pool, Runtime};
use tower_idempotency::store::redis::redis::AsyncConnectionConfig;
use tower_idempotency::{
    Fingerprint, Fingerprints, HolderId, Lease, RecipeId, RedisStore, StorageKey, Store,
    StoreError, StoreErrorKind,
};

use super::redis::RedisServer;

pub const LONG: Duration = Duration::from_secs(600);
pub const TERMS: Terms = Terms { lease: LONG, retention: LONG, unknown_retention: LONG };

/// Short, so that tests that wait for it end soon; long enough for a busy machine.
pub const CALL_TIMEOUT: Duration = Duration::from_millis(500);

const PATIENCE: Duration = Duration::from_secs(30);

/// What a verb may take at most: a wait for a connection and one for a reply, and some time to run.
pub const LIMIT: Duration = Duration::from_millis(2 * 500 + 1_000);

/// The two ways to reach the server; every fault is tried with both.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    Shared,
    Pool,
}

pub const WAYS: [Way; 2] = [Way::Shared, Way::Pool];

/// A store that waits as long as a busy machine may need.
pub async fn connect(way: Way, server: &RedisServer) -> RedisStore {
    connect_with(way, server, PATIENCE).await
}

/// A store that gives up soon, for tests in which it has to.
pub async fn connect_hasty(way: Way, server: &RedisServer) -> RedisStore {
    connect_with(way, server, CALL_TIMEOUT).await
}

async fn connect_with(way: Way, server: &RedisServer, call_timeout: Duration) -> RedisStore {
    let builder = RedisStore::builder().call_timeout(call_timeout);
    match way {
        Way::Shared => builder.connect(&server.url()).await.unwrap(),
        Way::Pool => builder.pool(pool(server, 4)).unwrap(),
    }
}

/// A store that waits for this many replicas, and gives up soon.
pub async fn connect_waiting(way: Way, server: &RedisServer, replicas: u32) -> RedisStore {
    let builder = RedisStore::builder().call_timeout(CALL_TIMEOUT).wait(replicas);
    match way {
        Way::Shared => builder.connect(&server.url()).await.unwrap(),
        Way::Pool => builder.pool(pool(server, 4)).unwrap(),
    }
}

/// A pool without limits of its own, so that those of the store are what is tried.
pub fn pool(server: &RedisServer, size: usize) -> Pool {
    let config =
        AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
    let manager = Manager::new_with_config(server.url(), config).unwrap();
    Pool::builder(manager).max_size(size).runtime(Runtime::Tokio1).build().unwrap()
}

pub fn new_key() -> StorageKey {
    let mut bytes = [0; 24];
    bytes[..16].copy_from_slice(HolderId::random().as_bytes());
    StorageKey::from_bytes(bytes)
}

pub fn name_of(key: StorageKey) -> String {
    format!("idem:{{{}}}", key.to_text())
}

pub fn claim() -> Claim {
    let print = Fingerprint::from_stored(RecipeId::from_bytes([1; 4]), [1; 32]);
    Claim {
        holder: HolderId::random(),
        fingerprints: Fingerprints::one(print),
        terms: TERMS,
        on_expired: OnExpired::Refuse,
        effects: Effects::Anywhere,
    }
}

pub fn completion(response: &[u8]) -> Completion {
    Completion { terms: TERMS, response: Bytes::copy_from_slice(response), writes: Writes::Keep }
}

pub async fn granted(store: &RedisStore, key: StorageKey) -> Lease {
    match store.claim(key, &claim()).await.unwrap() {
        ClaimOutcome::Acquired(lease) => lease,
        other => panic!("expected a grant, got {other:?}"),
    }
}

/// Claims a key until it has an answer, under one holder id; it has to be granted.
pub async fn surely_granted(store: &RedisStore, key: StorageKey, what: &str) -> Lease {
    let claim = claim();
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match store.claim(key, &claim).await {
            Ok(ClaimOutcome::Acquired(lease)) => return lease,
            Ok(other) => panic!("{what}: expected a grant, got {other:?}"),
            Err(error) => assert!(Instant::now() < deadline, "{what}: {error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Completes a lease until it is confirmed; gives the outcome.
pub async fn surely_completed(store: &RedisStore, lease: &Lease, what: &str) -> CompleteOutcome {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        match store.complete(lease, &completion(b"answer")).await {
            Ok(outcome) => return outcome,
            Err(error) => assert!(Instant::now() < deadline, "{what}: {error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Takes a new key, which succeeds unless something is wrong.
pub async fn works(store: &RedisStore) {
    drop(granted(store, new_key()).await);
}

pub fn is_replay(outcome: &Result<ClaimOutcome<Lease>, StoreError>, response: &[u8]) -> bool {
    matches!(outcome, Ok(ClaimOutcome::Completed(stored)) if stored == response)
}

/// Repeats a verb until it works, as a caller would; a second is ample for any pause in between.
pub async fn recovers(store: &RedisStore, what: &str) {
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

/// Claims, completes and replays a key, sending again what had no answer. Checks that the replay
/// is this key's. Gives the number of calls that had no answer.
pub async fn run_one_operation(store: &RedisStore) -> usize {
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

pub async fn may_be_sent_again(error: &StoreError) -> usize {
    let kind = error.kind();
    let fits = matches!(kind, StoreErrorKind::OutcomeUnknown | StoreErrorKind::Unavailable);
    assert!(fits, "{error:?}");
    tokio::time::sleep(Duration::from_millis(5)).await;
    1
}
