//! Large answers in Redis: they are written beside their record, and what may go wrong between.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

#[path = "support/redis.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod redis;

use std::time::Duration;

use bytes::Bytes;
use redis::RedisServer;
use tower_idempotency::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Effects, OnExpired, Terms, Writes,
};
use tower_idempotency::{
    Fingerprint, Fingerprints, HolderId, Lease, RecipeId, RedisStore, StorageKey, Store as _,
    StoreErrorKind,
};

const LARGE: usize = 64 * 1024;

fn terms() -> Terms {
    let minute = Duration::from_secs(60);
    Terms { lease: minute, retention: minute * 10, unknown_retention: minute * 10 }
}

fn claim() -> Claim {
    let print = Fingerprint::from_stored(RecipeId::from_bytes([1; 4]), [2; 32]);
    Claim {
        holder: HolderId::random(),
        fingerprints: Fingerprints::one(print),
        terms: terms(),
        on_expired: OnExpired::Refuse,
        effects: Effects::Anywhere,
    }
}

fn completion(byte: u8, length: usize) -> Completion {
    let response = Bytes::from(vec![byte; length]);
    Completion { terms: terms(), response, writes: Writes::Keep }
}

fn new_key() -> StorageKey {
    let mut key = [0; 24];
    key[..16].copy_from_slice(HolderId::random().as_bytes());
    StorageKey::from_bytes(key)
}

fn name_of(key: StorageKey) -> String {
    format!("idem:{{{}}}", key.to_text())
}

async fn granted(store: &RedisStore, key: StorageKey) -> Lease {
    match store.claim(key, &claim()).await.unwrap() {
        ClaimOutcome::Acquired(lease) => lease,
        other @ (ClaimOutcome::InFlight { .. }
        | ClaimOutcome::Mismatch
        | ClaimOutcome::Indeterminate(_)
        | ClaimOutcome::Unreadable
        | ClaimOutcome::Completed(_)) => panic!("{other:?}"),
    }
}

async fn replay(store: &RedisStore, key: StorageKey) -> Bytes {
    match store.claim(key, &claim()).await.unwrap() {
        ClaimOutcome::Completed(response) => response,
        other @ (ClaimOutcome::InFlight { .. }
        | ClaimOutcome::Mismatch
        | ClaimOutcome::Indeterminate(_)
        | ClaimOutcome::Unreadable
        | ClaimOutcome::Acquired(_)) => panic!("{other:?}"),
    }
}

/// What is in the server but for what the checks at the start left for two seconds.
fn keys(server: &RedisServer) -> Vec<String> {
    let all = server.cli(&["--scan"]);
    let stays = |key: &&str| server.cli(&["pttl", key]).parse::<i64>().unwrap() > 2_000;
    all.lines().filter(stays).map(str::to_owned).collect()
}

#[tokio::test]
async fn an_answer_of_any_size_is_replayed_whole_and_nothing_stays_beside_it() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let mut names = Vec::new();
    // Around both borders: what goes beside, and what a claim reads at once.
    for length in [1, 4_011, 4_012, 4_013, 4_095, 4_096, 4_097, LARGE, 1 << 20] {
        let key = new_key();
        names.push(name_of(key));
        let lease = granted(&store, key).await;
        let stored = store.complete(&lease, &completion(b'a', length)).await.unwrap();
        assert_eq!(stored, CompleteOutcome::Stored, "{length}");
        // Sent again after a lost reply.
        let again = store.complete(&lease, &completion(b'a', length)).await.unwrap();
        assert_eq!(again, CompleteOutcome::Stored, "{length}");
        let other = store.complete(&lease, &completion(b'b', length)).await.unwrap();
        assert_eq!(other, CompleteOutcome::Lost, "{length}");
        assert_eq!(replay(&store, key).await, vec![b'a'; length], "{length}");
        let left: i64 = server.cli(&["pttl", &name_of(key)]).parse().unwrap();
        assert!((590_000..=600_000).contains(&left), "{length}: {left} ms");
    }
    let mut found = keys(&server);
    found.sort();
    names.sort();
    assert_eq!(found, names);
}

#[tokio::test]
async fn a_server_that_forgot_the_scripts_gets_them_with_the_answer() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let key = new_key();
    let lease = granted(&store, key).await;
    server.cli(&["script", "flush"]);
    let stored = store.complete(&lease, &completion(b'a', LARGE)).await.unwrap();
    assert_eq!(stored, CompleteOutcome::Stored);
    server.cli(&["script", "flush"]);
    assert_eq!(replay(&store, key).await.len(), LARGE);
}

#[tokio::test]
async fn without_room_for_it_the_answer_goes_through_the_script() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let key = new_key();
    let lease = granted(&store, key).await;
    server.cli(&["config", "set", "maxmemory", "1"]);
    let stored = store.complete(&lease, &completion(b'a', LARGE)).await.unwrap();
    assert_eq!(stored, CompleteOutcome::Stored);
    assert_eq!(replay(&store, key).await.len(), LARGE);
    let full = store.claim(new_key(), &claim()).await.unwrap_err();
    assert_eq!(full.kind(), StoreErrorKind::Full);
}

#[tokio::test]
async fn a_right_that_is_lost_on_the_way_leaves_the_record_as_it_was() {
    let server = RedisServer::start();
    server.cli(&["acl", "setuser", "app", "on", ">pass", "~*", "+@all"]);
    let url = format!("redis://app:pass@127.0.0.1:{}/", server.port());
    let store = RedisStore::connect(&url).await.unwrap();
    for right in ["pexpire", "rename", "getrange", "strlen"] {
        let key = new_key();
        let lease = granted(&store, key).await;
        let before = server.cli(&["get", &name_of(key)]);
        server.cli(&["acl", "setuser", "app", &format!("-{right}")]);
        let refused = store.complete(&lease, &completion(b'a', LARGE)).await.unwrap_err();
        assert_eq!(refused.kind(), StoreErrorKind::Backend, "{right}: {refused:?}");
        server.cli(&["acl", "setuser", "app", &format!("+{right}")]);
        assert_eq!(server.cli(&["get", &name_of(key)]), before, "{right}");
        let left: i64 = server.cli(&["pttl", &name_of(key)]).parse().unwrap();
        assert!(left > 600_000, "{right}: {left} ms");
        let healed = store.complete(&lease, &completion(b'a', LARGE)).await.unwrap();
        assert_eq!(healed, CompleteOutcome::Stored, "{right}");
        assert_eq!(replay(&store, key).await.len(), LARGE, "{right}");
    }
}

#[tokio::test]
async fn a_large_answer_to_another_request_and_a_damaged_one_are_not_given() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let key = new_key();
    let lease = granted(&store, key).await;
    store.complete(&lease, &completion(b'a', LARGE)).await.unwrap();
    server.cli(&["setrange", &name_of(key), "6", "\\x00another request's digest"]);
    let outcome = store.claim(key, &claim()).await.unwrap();
    assert!(matches!(outcome, ClaimOutcome::Mismatch), "{outcome:?}");
    server.cli(&["setrange", &name_of(key), "70000", "more than the header says"]);
    let outcome = store.claim(key, &claim()).await.unwrap();
    assert!(matches!(outcome, ClaimOutcome::Unreadable), "{outcome:?}");
}
