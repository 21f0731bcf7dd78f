//! What the Redis store does with the values, the settings and the slots it is given.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use support::redis::RedisServer;
use support::store::{
    CALL_TIMEOUT, LIMIT, TERMS, WAYS, Way, claim, completion, connect, granted, is_replay, name_of,
    new_key, pool, works,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tower_idempotency::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Finding, Release, ReleaseOutcome,
    RenewOutcome, Renewal, Resolution, ResolveOutcome, Terms, Verdict, Writes,
};
use tower_idempotency::{Lease, RedisStore, StorageKey, Store, StoreErrorKind};

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
        // A claim of a new key takes no script.
        let lease = granted(&store, key).await;
        assert_eq!(server.calls_of("evalsha"), 0, "{way:?}");
        let stored = store.complete(&lease, &completion(b"answer")).await.unwrap();
        assert_eq!(stored, CompleteOutcome::Stored);
        assert_eq!(server.calls_of("evalsha"), 1, "{way:?}");
        assert_eq!(server.calls_of("eval"), 1, "{way:?}");
        assert_eq!(server.calls_of("script|load"), 0, "{way:?}");
        assert!(is_replay(&store.claim(key, &claim()).await, b"answer"));
        assert_eq!(server.calls_of("eval"), 1, "{way:?}: once per script");
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
    // All slots are lent out, as if claims were stuck in them, and many more claims come.
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(pool.get().await.unwrap());
    }
    let claims: Vec<_> = (0..50)
        .map(|_| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { store.claim(new_key(), &claim()).await })
        })
        .collect();
    // One thread runs all this: after some rounds every claim waits for something.
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
    assert_eq!(pool.status().waiting, 2, "of three slots claims may use two");
    let completion = completion(b"answer");
    let completing = store.complete(&lease, &completion);
    drop(held);
    let outcome = tokio::time::timeout(Duration::from_secs(2), completing).await;
    assert_eq!(outcome.unwrap().unwrap(), CompleteOutcome::Stored);
    for claim in claims {
        claim.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn an_absent_server_is_told_at_once() {
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let begun = Instant::now();
    let error = RedisStore::connect(&format!("redis://127.0.0.1:{port}/")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable);
    assert!(error.to_string().contains("refused"), "{error:?}");
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
    let lease = granted(&store, new_key()).await;
    server.cli(&["acl", "setuser", "guest", "-evalsha", "-set"]);
    let error = store.claim(new_key(), &claim()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Backend, "{error:?}");
    let error = store.complete(&lease, &completion(b"answer")).await.unwrap_err();
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
        assert!(error.to_string().contains("prefix"), "{error:?}");
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
        let completion =
            Completion { terms, response: Bytes::from_static(b"answer"), writes: Writes::Keep };
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

#[tokio::test]
async fn a_server_that_is_too_old_is_refused() {
    // Redis 6 does not name its version to scripts, and the readiness script then says so. Such a
    // server is played here: it accepts every command of the handshake and answers that one.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut client, _) = listener.accept().await.unwrap();
        let mut said = vec![0; 64 << 10];
        while let Ok(length @ 1..) = client.read(&mut said).await {
            let said = String::from_utf8_lossy(&said[..length]);
            let handshake = "+OK\r\n".repeat(said.matches("CLIENT").count());
            // Who it is, is asked ahead of everything else.
            let info = if said.contains("\r\nINFO\r\n") { "$0\r\n\r\n" } else { "" };
            let reply = if said.contains("EVALSHA") { "*1\r\n:2\r\n" } else { "" };
            client.write_all((handshake + info + reply).as_bytes()).await.unwrap();
        }
    });
    let error = RedisStore::connect(&format!("redis://127.0.0.1:{port}/")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Backend, "{error:?}");
    assert!(error.to_string().contains("older than Redis 7.0"), "{error:?}");
}
