//! Large answers in Redis: they are written beside their record, and what may go wrong between.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

#[path = "support/gap.rs"]
mod gap;
mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use gap::Gap;
use support::groups::{RedisCluster, slot_of};
use support::redis::RedisServer;
use tower_idempotency::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Effects, OnExpired, Terms, Writes,
};
use tower_idempotency::store::redis::deadpool_redis::{Manager, Pool};
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
    for right in ["setrange", "pexpire", "rename", "getrange", "strlen"] {
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

/// A server with a large answer under a key, and a way to it that does something to that key between the
/// claim that said "large" and the GET that reads it.
struct Scene {
    way: Way,
    server: Arc<RedisServer>,
    gap: Gap,
    store: RedisStore,
    key: StorageKey,
}

/// The ways to reach a server; what happens on one of them has to be noticed on each.
#[derive(Clone, Copy, Debug)]
enum Way {
    Shared,
    Pool,
    Cluster,
}

const WAYS: [Way; 3] = [Way::Shared, Way::Pool, Way::Cluster];

impl Way {
    fn server(self) -> Arc<RedisServer> {
        Arc::new(match self {
            Self::Shared | Self::Pool => RedisServer::start(),
            Self::Cluster => RedisCluster::start(1, 0).nodes.remove(0),
        })
    }
}

impl Scene {
    async fn new(way: Way) -> Self {
        Self::on(way, &way.server()).await
    }

    async fn on(way: Way, server: &Arc<RedisServer>) -> Self {
        let gap = Gap::to(server.port()).await;
        let (port, patience) = (gap.port(), Duration::from_secs(10));
        let builder = RedisStore::builder().call_timeout(patience);
        let store = match way {
            Way::Shared => builder.connect(&format!("redis://127.0.0.1:{port}/")).await.unwrap(),
            Way::Pool => {
                let manager = Manager::new(format!("redis://127.0.0.1:{port}/")).unwrap();
                builder.pool(Pool::builder(manager).max_size(2).build().unwrap()).unwrap()
            }
            Way::Cluster => {
                // So that it sends its clients through the gap.
                server.cli(&["config", "set", "cluster-announce-port", &port.to_string()]);
                server.wait_until("it names the gap", &["cluster", "slots"], |said| {
                    said.lines().any(|line| line == port.to_string())
                });
                let url = format!("redis+cluster://127.0.0.1:{port}");
                builder.connect(&url).await.unwrap()
            }
        };
        let key = new_key();
        let lease = granted(&store, key).await;
        let stored = store.complete(&lease, &completion(b'a', LARGE)).await.unwrap();
        assert_eq!(stored, CompleteOutcome::Stored);
        Self { way, server: Arc::clone(server), gap, store, key }
    }

    /// Has `redis-cli` say this in the gap, where the word `KEY` is the key.
    fn meanwhile(&self, command: &[&str]) {
        let name = name_of(self.key);
        let word = |&word: &&str| if word == "KEY" { name.clone() } else { word.to_owned() };
        let command: Vec<String> = command.iter().map(word).collect();
        let server = Arc::clone(&self.server);
        self.gap.meanwhile(move || {
            let words: Vec<&str> = command.iter().map(String::as_str).collect();
            let said = server.cli(&words);
            assert!(!said.contains("ERR"), "{words:?}: {said}");
        });
    }

    async fn claimed(&self) -> ClaimOutcome<Lease> {
        let outcome = self.store.claim(self.key, &claim()).await.unwrap();
        assert_eq!(self.gap.met(), 1, "{:?}: the gap was never hit: {outcome:?}", self.way);
        outcome
    }

    fn record(&self) -> String {
        self.server.cli(&["dump", &name_of(self.key)])
    }
}

#[tokio::test]
async fn an_answer_that_is_deleted_before_it_is_read_is_claimed_again() {
    for way in WAYS {
        let scene = Scene::new(way).await;
        scene.meanwhile(&["del", "KEY"]);
        let outcome = scene.claimed().await;
        let ClaimOutcome::Acquired(lease) = outcome else { panic!("{way:?}: {outcome:?}") };
        assert_eq!(lease.grant().attempt.number(), 1, "{way:?}");
        let twin = scene.store.claim(scene.key, &claim()).await.unwrap();
        assert!(matches!(twin, ClaimOutcome::InFlight { .. }), "{way:?} holds the key: {twin:?}");
        let stored = scene.store.complete(&lease, &completion(b'b', LARGE)).await.unwrap();
        assert_eq!(stored, CompleteOutcome::Stored, "{way:?}");
        assert_eq!(replay(&scene.store, scene.key).await, vec![b'b'; LARGE], "{way:?}");
    }
}

/// An answer that is there whenever it is looked for and gone whenever it is read: nobody looks for ever,
/// nothing is claimed, and nothing is made up.
#[tokio::test]
async fn an_answer_that_is_gone_each_time_it_is_read_is_looked_for_three_times() {
    for way in WAYS {
        let scene = Scene::new(way).await;
        let before = scene.record();
        let (name, away) = (name_of(scene.key), format!("{}:away", name_of(scene.key)));
        let to = |from: &str, to: &str| {
            let (server, from, to) = (Arc::clone(&scene.server), from.to_owned(), to.to_owned());
            move || assert_eq!(server.cli(&["rename", &from, &to]), "OK")
        };
        scene.gap.always(to(&name, &away), to(&away, &name));
        let error = scene.store.claim(scene.key, &claim()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{way:?}: {error:?}");
        assert_eq!(scene.gap.met(), 3, "{way:?}");
        scene.gap.never();
        assert_eq!(scene.record(), before, "{way:?}: the record is as it was");
        assert_eq!(replay(&scene.store, scene.key).await, vec![b'a'; LARGE], "{way:?}");
    }
}

#[tokio::test]
async fn an_answer_that_is_damaged_before_it_is_read_is_unreadable_and_left_as_it_is() {
    let shorten = "redis.call('SET', KEYS[1], redis.call('GETRANGE', KEYS[1], 0, -2), 'KEEPTTL')";
    let replace = "redis.call('DEL', KEYS[1]) redis.call('RPUSH', KEYS[1], 'a')";
    let damages: [&[&str]; 5] = [
        &["eval", replace, "1", "KEY"],
        &["set", "KEY", "", "keepttl"],
        &["eval", shorten, "1", "KEY"],
        &["append", "KEY", "a"],
        &["set", "KEY", "no record", "keepttl"],
    ];
    for way in WAYS {
        let server = way.server();
        for damage in damages {
            let scene = Scene::on(way, &server).await;
            scene.meanwhile(damage);
            let outcome = scene.claimed().await;
            assert!(matches!(outcome, ClaimOutcome::Unreadable), "{way:?} {damage:?}: {outcome:?}");
            let left = scene.record();
            let again = scene.store.claim(scene.key, &claim()).await.unwrap();
            assert!(matches!(again, ClaimOutcome::Unreadable), "{way:?} {damage:?}: {again:?}");
            assert_eq!(scene.record(), left, "{way:?} {damage:?}");
        }
    }
}

#[tokio::test]
async fn an_answer_to_another_request_that_comes_before_it_is_read_is_not_given() {
    for way in WAYS {
        let scene = Scene::new(way).await;
        scene.meanwhile(&["setrange", "KEY", "6", "another request's digest"]);
        let outcome = scene.claimed().await;
        assert!(matches!(outcome, ClaimOutcome::Mismatch), "{way:?}: {outcome:?}");
    }
}

#[tokio::test]
async fn what_has_taken_the_place_of_an_answer_before_it_is_read_is_what_counts() {
    for way in WAYS {
        let server = way.server();
        // A request that runs: the answer was deleted and its key claimed again. Or its answer, large again
        // or not.
        for length in [None, Some(LARGE), Some(3)] {
            let scene = Scene::on(way, &server).await;
            let other = in_the_same_slot(scene.key, way);
            let lease = granted(&scene.store, other).await;
            if let Some(length) = length {
                scene.store.complete(&lease, &completion(b'b', length)).await.unwrap();
            }
            scene.meanwhile(&["copy", &name_of(other), "KEY", "replace"]);
            match (length, scene.claimed().await) {
                (None, ClaimOutcome::InFlight { .. }) => {}
                (Some(length), ClaimOutcome::Completed(response)) => {
                    assert_eq!(response, vec![b'b'; length], "{way:?}");
                }
                (_, outcome) => panic!("{way:?} {length:?}: {outcome:?}"),
            }
        }
    }
}

/// Another key; on a cluster one that can be copied from.
fn in_the_same_slot(key: StorageKey, way: Way) -> StorageKey {
    let slot = |key: StorageKey| slot_of(&key.to_text());
    std::iter::repeat_with(new_key)
        .find(|&other| !matches!(way, Way::Cluster) || slot(other) == slot(key))
        .unwrap()
}

#[tokio::test]
async fn a_connection_that_ends_before_the_answer_is_read_costs_a_retry() {
    for way in WAYS {
        let scene = Scene::new(way).await;
        scene.meanwhile(&["client", "kill", "type", "normal", "skipme", "yes"]);
        let claim = claim();
        let error = scene.store.claim(scene.key, &claim).await.unwrap_err();
        let fits = [StoreErrorKind::OutcomeUnknown, StoreErrorKind::Unavailable];
        assert!(fits.contains(&error.kind()), "{way:?}: {error:?}");
        assert_eq!(scene.gap.met(), 1, "{way:?}: the gap was never hit");
        let end = Instant::now() + Duration::from_secs(10);
        let outcome = loop {
            match scene.store.claim(scene.key, &claim).await {
                Ok(outcome) => break outcome,
                Err(error) => assert!(Instant::now() < end, "{way:?}: {error:?}"),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let ClaimOutcome::Completed(response) = outcome else { panic!("{way:?}: {outcome:?}") };
        assert_eq!(response, vec![b'a'; LARGE], "{way:?}");
    }
}
