//! What the Redis store does when the server, or the way to it, fails.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

#[path = "support/line.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod line;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use support::redis::RedisServer;
use support::relay::Relay;
use support::store::{
    CALL_TIMEOUT, LIMIT, TERMS, WAYS, claim, completion, connect, connect_hasty, granted,
    is_replay, may_be_sent_again, new_key, pool, recovers, run_one_operation, works,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tower_idempotency::record::{Claim, ClaimOutcome, CompleteOutcome, Renewal, Terms};
use tower_idempotency::store::redis::deadpool_redis::{Manager, Pool};
use tower_idempotency::{RedisStore, Store, StoreErrorKind};

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

#[tokio::test]
async fn a_connection_that_had_ended_costs_the_next_call_nothing() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    for _ in 0..5 {
        let lease = granted(&store, new_key()).await;
        for kind in ["claim", "completion"] {
            server.cli(&["client", "kill", "type", "normal"]);
            // The end is there; this side takes note of it as soon as it may.
            tokio::time::sleep(Duration::from_millis(100)).await;
            match kind {
                "claim" => {
                    let claimed = store.claim(new_key(), &claim()).await.unwrap();
                    assert!(matches!(claimed, ClaimOutcome::Acquired(_)), "{claimed:?}");
                }
                _ => {
                    let stored = store.complete(&lease, &completion(b"done")).await.unwrap();
                    assert_eq!(stored, CompleteOutcome::Stored);
                }
            }
        }
    }
}

/// Leads to a server, and answers the next script that it does not know it, as its last word.
async fn forgetful(server: u16, next: Arc<AtomicBool>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut redis = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
            let next = Arc::clone(&next);
            tokio::spawn(async move {
                let (mut asked, mut said) = ([0; 4096], [0; 4096]);
                loop {
                    tokio::select! {
                        Ok(read @ 1..) = client.read(&mut asked) => {
                            let asked = &asked[..read];
                            let is_script = asked.windows(7).any(|bytes| bytes == b"EVALSHA");
                            if is_script && next.swap(false, Ordering::SeqCst) {
                                client.write_all(b"-NOSCRIPT No matching script.\r\n").await.unwrap();
                                return;
                            }
                            redis.write_all(asked).await.unwrap();
                        }
                        Ok(read @ 1..) = redis.read(&mut said) => {
                            client.write_all(&said[..read]).await.unwrap();
                        }
                        else => return,
                    }
                }
            });
        }
    });
    format!("redis://127.0.0.1:{port}/")
}

/// On one thread, so that the end of the connection is there when its last reply is read.
#[tokio::test]
async fn a_connection_that_ends_behind_a_reply_that_asks_for_another_way_costs_the_call_nothing() {
    let server = RedisServer::start();
    let next = Arc::new(AtomicBool::new(false));
    let url = forgetful(server.port(), Arc::clone(&next)).await;
    let store = RedisStore::connect(&url).await.unwrap();
    for _ in 0..10 {
        let lease = granted(&store, new_key()).await;
        next.store(true, Ordering::SeqCst);
        let stored = store.complete(&lease, &completion(b"done")).await.unwrap();
        assert_eq!(stored, CompleteOutcome::Stored);
        assert!(!next.load(Ordering::SeqCst), "no script was sent by its name");
    }
}

#[tokio::test]
async fn a_server_that_dies_and_comes_back_is_found_again() {
    for way in WAYS {
        let mut server = RedisServer::start();
        let store = connect_hasty(way, &server).await;
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
        let store = connect_hasty(way, &server).await;
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
            // It checks that no reply of a call from before goes to one of these.
            run_one_operation(&store).await;
        }
    }
}

/// Nothing was ever answered on these connections but what a connection begins with.
#[tokio::test]
async fn a_server_that_freezes_right_after_it_was_connected_holds_no_call_longer_than_the_limit() {
    for way in WAYS {
        let server = RedisServer::start();
        let store = connect_hasty(way, &server).await;
        for again in [false, true] {
            if again {
                server.cli(&["client", "kill", "type", "normal", "skipme", "yes"]);
                recovers(&store, "a connection is made again").await;
            }
            server.stop();
            let calls = (0..20).map(|_| async {
                let begun = Instant::now();
                let error = store.claim(new_key(), &claim()).await.unwrap_err();
                assert!(begun.elapsed() < LIMIT, "{way:?} {again}: {:?}", begun.elapsed());
                may_be_sent_again(&error).await;
            });
            join_all(calls).await;
            server.cont();
            recovers(&store, "after the freeze").await;
        }
    }
}

/// What starts could not be recorded: the first that finds out is told, and then nothing starts.
#[tokio::test]
async fn without_the_right_to_run_scripts_no_key_is_claimed_until_it_is_back() {
    let server = RedisServer::start();
    server.cli(&["acl", "setuser", "app", "on", ">pass", "~*", "+@all"]);
    let url = format!("redis://app:pass@127.0.0.1:{}/", server.port());
    let store = RedisStore::connect(&url).await.unwrap();
    let lease = granted(&store, new_key()).await;
    server.cli(&["acl", "setuser", "app", "-evalsha", "-eval"]);
    let refused = store.complete(&lease, &completion(b"answer")).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Backend, "{refused:?}");
    let keys = server.cli(&["dbsize"]);
    let refused = store.claim(new_key(), &claim()).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Backend, "{refused:?}");
    assert_eq!(server.cli(&["dbsize"]), keys, "nothing was claimed");
    server.cli(&["acl", "setuser", "app", "+evalsha", "+eval"]);
    works(&store).await;
    // Nor without a right that large answers alone need; what is there is replayed.
    let (done, large) = (new_key(), vec![b'a'; 64 * 1024]);
    let lease = granted(&store, done).await;
    store.complete(&lease, &completion(b"answer")).await.unwrap();
    let lease = granted(&store, new_key()).await;
    server.cli(&["acl", "setuser", "app", "-rename"]);
    store.complete(&lease, &completion(&large)).await.unwrap_err();
    store.claim(new_key(), &claim()).await.unwrap_err();
    assert!(is_replay(&store.claim(done, &claim()).await, b"answer"));
    server.cli(&["acl", "setuser", "app", "+rename"]);
    works(&store).await;
    server.cli(&["config", "resetstat"]);
    drop(granted(&store, new_key()).await);
    assert_eq!(server.calls_of("evalsha"), 0, "a claim goes without a script again");
    // Without the clock the claim is written, and said to be refused, by whom it was.
    server.cli(&["acl", "setuser", "app", "-time"]);
    let refused = store.claim(new_key(), &claim()).await.unwrap_err();
    assert_eq!(refused.kind(), StoreErrorKind::Backend, "{refused:?}");
    assert!(format!("{refused:?}").contains("time"), "{refused:?}");
}

/// Each of the two is in time, and both together are not within the time of one.
#[tokio::test]
async fn a_claim_behind_a_trial_of_rights_has_the_whole_time_of_a_call() {
    let server = RedisServer::start();
    server.cli(&["acl", "setuser", "app", "on", ">pass", "~*", "+@all"]);
    let proxy = line::Proxy::to(server.port()).await;
    let url = proxy.redis_url().replace("redis://", "redis://app:pass@");
    let patient = RedisStore::builder().call_timeout(Duration::from_secs(1));
    let store = patient.connect(&url).await.unwrap();
    let lease = granted(&store, new_key()).await;
    server.cli(&["acl", "setuser", "app", "-evalsha", "-eval"]);
    store.complete(&lease, &completion(b"answer")).await.unwrap_err();
    server.cli(&["acl", "setuser", "app", "+evalsha", "+eval"]);
    proxy.delay(line::Way::Down, Duration::from_millis(650));
    let claimed = store.claim(new_key(), &claim()).await;
    assert!(matches!(claimed, Ok(ClaimOutcome::Acquired(_))), "{claimed:?}");
}

/// On a full server the claim of a key whose lease is over takes three: one that is refused, a look, and the script.
#[tokio::test]
async fn a_claim_of_several_calls_takes_no_longer_than_one_of_one() {
    let server = RedisServer::start_with(&["--maxmemory-policy", "noeviction"]);
    let proxy = line::Proxy::to(server.port()).await;
    let patient = RedisStore::builder().call_timeout(Duration::from_secs(1));
    let store = patient.connect(&proxy.redis_url()).await.unwrap();
    let brief = Terms { lease: Duration::from_millis(1), ..TERMS };
    let key = new_key();
    let granted = store.claim(key, &Claim { terms: brief, ..claim() }).await.unwrap();
    assert!(matches!(granted, ClaimOutcome::Acquired(_)), "{granted:?}");
    server.cli(&["config", "set", "maxmemory", "1"]);
    let full = store.claim(key, &claim()).await.unwrap_err();
    assert_eq!(full.kind(), StoreErrorKind::Full, "{full:?}");

    // Each of them is in time; the third would be answered after 2.7 of two seconds.
    proxy.delay(line::Way::Down, Duration::from_millis(900));
    let begun = Instant::now();
    let late = store.claim(key, &claim()).await.unwrap_err();
    assert_eq!(late.kind(), StoreErrorKind::OutcomeUnknown, "{late:?}");
    assert!(begun.elapsed() < Duration::from_millis(2_600), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_connection_that_turns_silent_is_given_up() {
    // The server is well; only what this connection sends arrives nowhere.
    let server = RedisServer::start();
    let way_there = Relay::to(server.port()).await;
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
async fn a_silent_connection_is_also_given_up_when_the_caller_is_less_patient_than_the_store() {
    let server = RedisServer::start();
    let way_there = Relay::to(server.port()).await;
    let store = RedisStore::builder()
        .call_timeout(Duration::from_secs(30))
        .connect(&format!("redis://127.0.0.1:{}/", way_there.port()))
        .await
        .unwrap();
    works(&store).await;
    way_there.swallow_open_connections();
    for _ in 0..3 {
        let impatient = Duration::from_millis(200);
        let (key, claim) = (new_key(), claim());
        let call = store.claim(key, &claim);
        assert!(tokio::time::timeout(impatient, call).await.is_err());
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
    let address = Relay::to(old.port()).await;
    let url = format!("redis://127.0.0.1:{}/", address.port());
    let shared = RedisStore::connect(&url).await.unwrap();
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
async fn a_connection_in_doubt_never_goes_back_to_its_pool() {
    let server = RedisServer::start();
    let pool = pool(&server, 1);
    let store = RedisStore::builder().call_timeout(CALL_TIMEOUT).pool(pool.clone()).unwrap();
    works(&store).await;
    assert_eq!(pool.status().size, 1);
    // Scripts wait, and the pool's PING does not: so the connection is lent out before it is silent.
    server.cli(&["client", "pause", "60000", "write"]);
    let error = store.claim(new_key(), &claim()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::OutcomeUnknown, "{error:?}");
    assert_eq!(pool.status().size, 0, "a connection that timed out has left");
    server.cli(&["client", "unpause"]);
    works(&store).await;

    let (claim, renewal) = (claim(), Renewal { terms: TERMS, checkpoint: None });
    let lease = granted(&store, new_key()).await;
    server.cli(&["client", "pause", "60000", "write"]);
    {
        let dropped = tokio::time::timeout(CALL_TIMEOUT / 4, store.renew(&lease, &renewal));
        dropped.await.unwrap_err();
    }
    server.cli(&["client", "unpause"]);
    assert_eq!(pool.status().size, 0, "one whose call was dropped does not come back either");
    let outcome = store.claim(new_key(), &claim).await;
    assert!(matches!(outcome, Ok(ClaimOutcome::Acquired(_))), "{outcome:?}");
}
