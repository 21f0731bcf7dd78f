//! The ways in which Redis is set up: what is found out about a server before it is trusted, users,
//! sockets and databases.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::time::Duration;

use support::redis::RedisServer;
use support::store::{claim, completion, granted, is_replay, name_of, new_key, works};
use tower_idempotency::store::redis::{Concern, RedisStoreBuilder, StartupChecks};
use tower_idempotency::{RedisStore, Store, StoreErrorKind};

/// A server to which nobody could object.
const SOUND: [&str; 4] = ["--appendonly", "yes", "--maxmemory-policy", "noeviction"];

/// A busy machine needs its time.
fn patient() -> RedisStoreBuilder {
    RedisStore::builder().call_timeout(Duration::from_secs(4))
}

fn refusing() -> RedisStoreBuilder {
    patient().startup_checks(StartupChecks::Refuse)
}

#[tokio::test]
async fn b16_a_sound_server_is_accepted_without_a_word() {
    let server = RedisServer::start_with(&SOUND);
    let store = refusing().connect(&server.url()).await.unwrap();
    assert_eq!(store.check().await.unwrap(), []);
    let left = server.cli(&["keys", "*"]);
    for key in left.lines() {
        let expiry: i64 = server.cli(&["pttl", key]).parse().unwrap();
        assert!((0..=2_000).contains(&expiry), "the check leaves nothing behind: {key} {expiry}");
    }
}

#[tokio::test]
async fn b16_a_server_that_could_lose_records_is_named_and_refused_on_request() {
    let cases: [(&[&str], &[&str]); 4] = [
        (&["--appendonly", "yes", "--maxmemory-policy", "allkeys-lru"], &["noeviction"]),
        (&["--maxmemory-policy", "noeviction"], &["appendonly yes"]),
        (&["--appendonly", "yes", "--appendfsync", "no"], &["appendfsync everysec"]),
        (&["--maxmemory-policy", "volatile-ttl"], &["noeviction", "appendonly yes"]),
    ];
    for (options, hints) in cases {
        let server = RedisServer::start_with(options);
        let error = refusing().connect(&server.url()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Backend, "{error:?}");
        let cause = error.to_string();
        for hint in hints {
            assert!(cause.contains(hint), "{options:?}: {cause}");
        }
        let store = RedisStore::connect(&server.url()).await.unwrap();
        assert_eq!(store.check().await.unwrap().len(), hints.len(), "a warning is no refusal");
        let skipping = patient().startup_checks(StartupChecks::Skip);
        works(&skipping.connect(&server.url()).await.unwrap()).await;
    }
}

#[tokio::test]
async fn b16_what_is_wrong_with_a_full_server_is_said_too() {
    let server = RedisServer::start();
    server.cli(&["config", "set", "maxmemory", "1"]);
    let store = patient().connect(&server.url()).await.unwrap();
    assert!(store.check().await.unwrap().contains(&Concern::NotPersistent));
    let error = refusing().connect(&server.url()).await.unwrap_err();
    assert!(error.to_string().contains("appendonly yes"), "{error:?}");
}

#[tokio::test]
async fn b16_replicas_are_compared_with_what_is_waited_for() {
    let server = RedisServer::start_with(&SOUND);
    let none = patient().wait(1).connect(&server.url()).await.unwrap();
    let expected = [Concern::TooFewReplicas { confirmed: 0, needed: 1 }];
    assert_eq!(none.check().await.unwrap(), expected, "a start is possible, and a word is said");
    let error = refusing().wait(1).connect(&server.url()).await.unwrap_err();
    assert!(error.to_string().contains("wait(1)"), "{error:?}");

    let _replica = server.start_replica(server.port());
    server.wait_for_replicas(1);
    refusing().wait(1).connect(&server.url()).await.unwrap();
    let error = refusing().connect(&server.url()).await.unwrap_err();
    let cause = error.to_string();
    assert!(cause.contains("1 replicas and wait(0)") && cause.contains("set wait(1)"), "{cause}");
}

#[tokio::test]
async fn b16_a_user_with_the_least_rights_works_and_what_is_hidden_is_said() {
    let server = RedisServer::start_with(&SOUND);
    let least = [
        "+eval",
        "+evalsha",
        "+time",
        "+get",
        "+set",
        "+getrange",
        "+setrange",
        "+strlen",
        "+exists",
        "+rename",
        "+unlink",
        "+pexpire",
        "+pexpiretime",
    ];
    let mut user = vec!["acl", "setuser", "pay", "on", ">pass", "~idem:*"];
    user.extend(least);
    server.cli(&user);
    let url = format!("redis://pay:pass@127.0.0.1:{}/", server.port());
    // What cannot be looked at is no reason to refuse.
    let store = refusing().connect(&url).await.unwrap();
    let key = new_key();
    let lease = granted(&store, key).await;
    store.complete(&lease, &completion(b"answer")).await.unwrap();
    assert!(is_replay(&store.claim(key, &claim()).await, b"answer"));
    let concerns = store.check().await.unwrap();
    assert_eq!(concerns.len(), 2, "{concerns:?}");
    assert!(concerns.iter().all(|concern| concern.to_string().contains("+info")), "{concerns:?}");

    for missing in least {
        server.cli(&["script", "flush"]);
        let right = missing.trim_start_matches('+');
        server.cli(&["acl", "setuser", "pay", &format!("-{right}")]);
        let error = RedisStore::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Backend, "{missing}: {error:?}");
        let cause = error.to_string();
        assert!(cause.contains(&format!("`ACL SETUSER pay {missing}`")), "{missing}: {cause}");
        assert!(cause.contains(&format!("may not run `{right}`")), "{missing}: {cause}");
        server.cli(&["acl", "setuser", "pay", missing]);
    }
    server.cli(&["acl", "setuser", "pay", "resetkeys", "~other:*"]);
    let error = RedisStore::connect(&url).await.unwrap_err();
    assert!(error.to_string().contains("prefix"), "{error:?}");
    works(&RedisStore::builder().prefix("other").connect(&url).await.unwrap()).await;

    // Without the right to WAIT no replica is ever counted.
    server.cli(&["acl", "setuser", "pay", "~idem:*"]);
    let store = patient().wait(1).connect(&url).await.unwrap();
    let concerns = store.check().await.unwrap();
    assert!(concerns.iter().any(|concern| concern.to_string().contains("+wait")), "{concerns:?}");
}

#[tokio::test]
async fn a_socket_and_a_database_are_reached_by_their_addresses() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("redis.sock");
    let socket = socket.to_str().unwrap();
    let server = RedisServer::start_with(&["--unixsocket", socket]);
    server.cli(&["acl", "setuser", "pay", "on", ">pass", "~*", "+@all"]);
    for (scheme, database) in [("unix", "0"), ("redis+unix", "5")] {
        let url = format!("{scheme}://{socket}?db={database}&user=pay&pass=pass");
        let store = RedisStore::connect(&url).await.unwrap();
        let key = new_key();
        drop(granted(&store, key).await);
        assert_eq!(server.cli(&["-n", database, "exists", &name_of(key)]), "1", "{url}");
    }
    let error = RedisStore::connect("unix:///nowhere/redis.sock").await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
}
