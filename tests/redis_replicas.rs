//! Replicas: what `wait(n)` keeps through a failover, and what a failover forgets without it. The
//! names begin with the rows of the fault matrix.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

mod support;

use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use support::redis::RedisServer;
use support::relay::Relay;
use support::store::{
    CALL_TIMEOUT, LIMIT, TERMS, WAYS, Way, claim, completion, connect_hasty, connect_waiting,
    granted, is_replay, name_of, new_key, recovers, surely_completed, surely_granted, works,
};
use tower_idempotency::record::{
    Claim, ClaimOutcome, CompleteOutcome, RenewOutcome, Renewal, Terms,
};
use tower_idempotency::{RedisStore, Store, StoreErrorKind};

fn pair(primary: RedisServer) -> (RedisServer, RedisServer) {
    let replica = primary.start_replica(primary.port());
    primary.wait_for_replicas(1);
    (primary, replica)
}

/// A primary, and a replica whose stream can be swallowed. (A frozen replica would not do: what the
/// kernel has taken for it arrives when it wakes, also from a primary that is dead.)
async fn pair_with_a_stream() -> (RedisServer, RedisServer, Relay) {
    let primary = RedisServer::start();
    let stream = Relay::to(primary.port()).await;
    let replica = primary.start_replica(stream.port());
    let online = tokio::task::spawn_blocking(move || {
        primary.wait_for_replicas(1);
        primary
    });
    (online.await.unwrap(), replica, stream)
}

fn promote(replica: &RedisServer) {
    replica.cli(&["replicaof", "no", "one"]);
}

async fn c15(primary: RedisServer) {
    let (primary, replica) = pair(primary);
    for way in WAYS {
        let store = connect_waiting(way, &primary, 1).await;
        store.ready().await.unwrap();
        let done = new_key();
        let lease = granted(&store, done).await;
        store.complete(&lease, &completion(b"answer")).await.unwrap();
        let running = granted(&store, new_key()).await;

        replica.stop();
        let (key, claim_of_mine) = (new_key(), claim());
        for _ in 0..2 {
            let begun = Instant::now();
            let error = store.claim(key, &claim_of_mine).await.unwrap_err();
            assert!(begun.elapsed() < LIMIT, "{way:?}: {:?}", begun.elapsed());
            assert_eq!(error.kind(), StoreErrorKind::OutcomeUnknown, "{way:?}: {error:?}");
            let cause = error.source().unwrap().to_string();
            assert!(cause.contains("0 of the 1 replicas"), "{cause}");
        }
        // The second of them finds it stored; that must not count as confirmed. They come on several
        // connections, one of which has written nothing.
        let fresh = connect_waiting(way, &primary, 1).await;
        for store in [&store, &store, &fresh] {
            let error = store.complete(&running, &completion(b"answer")).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::OutcomeUnknown, "{way:?}: {error:?}");
        }
        let renewal = Renewal { terms: TERMS, checkpoint: None };
        let lease = running.clone();
        store.renew(&lease, &renewal).await.unwrap();
        store.ready().await.unwrap_err();
        assert!(is_replay(&store.claim(done, &claim()).await, b"answer"), "{way:?}: replays");

        replica.cont();
        let outcome = store.claim(key, &claim_of_mine).await;
        let Ok(ClaimOutcome::Acquired(lease)) = outcome else { panic!("{way:?}: {outcome:?}") };
        assert_eq!(lease.grant().attempt.number(), 1, "{way:?}: asked again, it is one's own");
        let stored = store.complete(&running, &completion(b"answer")).await.unwrap();
        assert_eq!(stored, CompleteOutcome::Stored, "{way:?}");
        let renewal = Renewal { terms: TERMS, checkpoint: Some(b"note".as_slice().into()) };
        replica.stop();
        let error = store.renew(&lease, &renewal).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::OutcomeUnknown, "{way:?}: a checkpoint counts");
        replica.cont();
        assert_eq!(store.renew(&lease, &renewal).await.unwrap(), RenewOutcome::Renewed);
    }
}

#[tokio::test]
async fn c15_what_too_few_replicas_confirm_is_not_believed() {
    c15(RedisServer::start()).await;
}

#[tokio::test]
async fn c15_what_too_few_replicas_confirm_is_not_believed_on_valkey() {
    c15(RedisServer::start_valkey(&[])).await;
}

#[tokio::test]
async fn what_is_found_waits_for_nobody_while_replicas_are_away() {
    let (primary, replica) = pair(RedisServer::start());
    for way in WAYS {
        let store = connect_waiting(way, &primary, 1).await;
        let (done, running) = (new_key(), new_key());
        let lease = granted(&store, done).await;
        store.complete(&lease, &completion(b"answer")).await.unwrap();
        let mine = claim();
        let held = store.claim(running, &mine).await;
        assert!(matches!(held, Ok(ClaimOutcome::Acquired(_))), "{way:?}: {held:?}");

        replica.stop();
        let error = store.claim(new_key(), &claim()).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::OutcomeUnknown, "{way:?}: {error:?}");
        // It is known by now, and each look that waited in vain would hold a connection.
        let waited = primary.calls_of("wait");
        let replays = join_all((0..200).map(|_| async { store.claim(done, &claim()).await })).await;
        let other = replays.iter().find(|replay| !is_replay(replay, b"answer"));
        assert!(other.is_none(), "{way:?}: {other:?}");
        let twin = store.claim(running, &claim()).await;
        assert!(matches!(twin, Ok(ClaimOutcome::InFlight { .. })), "{way:?}: {twin:?}");
        assert_eq!(primary.calls_of("wait"), waited, "{way:?}");

        // What is new waits all the same, and what is one's own, of which nobody knows if they have it.
        for (key, claim) in [(new_key(), claim()), (running, mine)] {
            let error = store.claim(key, &claim).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::OutcomeUnknown, "{way:?}: {error:?}");
        }
        assert!(primary.calls_of("wait") >= waited + 2, "{way:?}");

        // The first write that is confirmed ends it.
        replica.cont();
        let _ = granted(&store, new_key()).await;
        let looked = primary.calls_of("get");
        assert!(is_replay(&store.claim(done, &claim()).await, b"answer"), "{way:?}");
        assert_eq!(primary.calls_of("get"), looked, "{way:?}: nobody looks first");
    }
}

#[tokio::test]
async fn calls_that_wait_do_not_wait_for_one_another() {
    let (primary, replica) = pair(RedisServer::start());
    let store = RedisStore::builder()
        .call_timeout(Duration::from_secs(4))
        .wait(1)
        .connect(&primary.url())
        .await
        .unwrap();
    let lease = granted(&store, new_key()).await;
    replica.stop();
    let begun = Instant::now();
    let claims = join_all((0..20).map(|_| async { store.claim(new_key(), &claim()).await }));
    let release = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        replica.cont();
    };
    let (claims, ()) = tokio::join!(claims, release);
    for claim in claims {
        assert!(matches!(claim, Ok(ClaimOutcome::Acquired(_))), "{claim:?}");
    }
    // One after another they would have had two seconds each.
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());

    // Many more claims than connections wait, and a completion still finds one.
    replica.stop();
    let storm = join_all((0..200).map(|_| async { store.claim(new_key(), &claim()).await }));
    let completing = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        replica.cont();
        let answer = completion(b"answer");
        tokio::time::timeout(Duration::from_secs(1), store.complete(&lease, &answer)).await
    };
    let (_, completed) = tokio::join!(storm, completing);
    assert_eq!(completed.unwrap().unwrap(), CompleteOutcome::Stored);
}

#[tokio::test]
async fn c19_a_forgotten_script_is_sent_again_together_with_its_wait() {
    let (primary, _replica) = pair(RedisServer::start());
    for way in WAYS {
        let store = connect_waiting(way, &primary, 1).await;
        for _ in 0..20 {
            primary.cli(&["script", "flush"]);
            let key = new_key();
            let lease = granted(&store, key).await;
            primary.cli(&["script", "flush"]);
            let stored = store.complete(&lease, &completion(b"answer")).await.unwrap();
            assert_eq!(stored, CompleteOutcome::Stored, "{way:?}");
        }
    }
}

#[tokio::test]
async fn c12_without_wait_a_failover_can_forget_a_claim_and_the_key_runs_twice() {
    let (mut primary, replica, stream) = pair_with_a_stream().await;
    let store = connect_hasty(Way::Shared, &primary).await;
    let key = new_key();
    stream.swallow_open_connections();
    drop(granted(&store, key).await);
    primary.kill();
    promote(&replica);
    // This is the window that the README speaks of: a second holder for one key.
    let other = connect_hasty(Way::Shared, &replica).await;
    let lease = granted(&other, key).await;
    assert_eq!(lease.grant().attempt.number(), 1, "the first attempt is forgotten");
}

#[tokio::test]
async fn c12_with_wait_a_failover_forgets_no_claim_that_was_believed() {
    let (mut primary, replica, stream) = pair_with_a_stream().await;
    let store = connect_waiting(Way::Shared, &primary, 1).await;
    let (before, after) = (new_key(), new_key());
    drop(granted(&store, before).await);
    stream.swallow_open_connections();
    let error = store.claim(after, &claim()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::OutcomeUnknown, "nothing may run: {error:?}");
    primary.kill();
    promote(&replica);
    let other = connect_hasty(Way::Shared, &replica).await;
    let twin = other.claim(before, &claim()).await;
    assert!(matches!(twin, Ok(ClaimOutcome::InFlight { .. })), "{twin:?}");
    // It ran nowhere, so it may run now.
    drop(granted(&other, after).await);
}

#[tokio::test]
async fn c13_a_failover_that_forgets_a_completion_leaves_the_outcome_unknown() {
    let (mut primary, replica, stream) = pair_with_a_stream().await;
    let store = connect_hasty(Way::Shared, &primary).await;
    let second = Duration::from_secs(1);
    let terms = Terms { lease: second, retention: TERMS.retention, ..TERMS };
    let claim_shortly = || Claim { terms, ..claim() };
    let key = new_key();
    let waiting = connect_waiting(Way::Shared, &primary, 1).await;
    let Ok(ClaimOutcome::Acquired(lease)) = waiting.claim(key, &claim_shortly()).await else {
        panic!("a new key is free")
    };
    stream.swallow_open_connections();
    let stored = store.complete(&lease, &completion(b"answer")).await.unwrap();
    assert_eq!(stored, CompleteOutcome::Stored);
    primary.kill();
    promote(&replica);
    let other = connect_hasty(Way::Shared, &replica).await;
    tokio::time::sleep(second + Duration::from_millis(200)).await;
    let retry = other.claim(key, &claim_shortly()).await;
    assert!(matches!(retry, Ok(ClaimOutcome::Indeterminate(_))), "not run again: {retry:?}");
}

#[tokio::test]
async fn c13_with_wait_a_completion_is_sent_until_the_new_primary_has_it() {
    let (mut primary, replica, stream) = pair_with_a_stream().await;
    let address = Relay::to(primary.port()).await;
    let url = format!("redis://127.0.0.1:{}/", address.port());
    let builder = || RedisStore::builder().call_timeout(CALL_TIMEOUT);
    let store = builder().wait(1).connect(&url).await.unwrap();
    let key = new_key();
    let lease = granted(&store, key).await;
    stream.swallow_open_connections();
    let error = store.complete(&lease, &completion(b"answer")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::OutcomeUnknown, "{error:?}");
    primary.kill();
    promote(&replica);
    let third = RedisServer::start_with(&["--replicaof", "127.0.0.1", &replica.port().to_string()]);
    replica.wait_for_replicas(1);
    address.lead_to(replica.port());
    let outcome = surely_completed(&store, &lease, "the new primary").await;
    assert_eq!(outcome, CompleteOutcome::Stored);
    assert!(is_replay(&store.claim(key, &claim()).await, b"answer"));
    assert_eq!(third.cli(&["exists", &name_of(key)]), "1");
}

#[tokio::test]
async fn c14_on_the_wrong_side_of_a_split_no_claim_is_believed() {
    let (primary, replica, stream) = pair_with_a_stream().await;
    let waiting = connect_waiting(Way::Shared, &primary, 1).await;
    let trusting = connect_hasty(Way::Shared, &primary).await;
    let key = new_key();
    stream.swallow_open_connections();
    promote(&replica);
    let other_side = connect_hasty(Way::Shared, &replica).await;
    drop(granted(&other_side, key).await);
    let not_believed = claim();
    for _ in 0..3 {
        let error = waiting.claim(key, &not_believed).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::OutcomeUnknown, "{error:?}");
    }
    // Without waiting both sides grant it: void, as the README says. (Another key, since the claim
    // that was not believed is still there.)
    let key = new_key();
    drop(granted(&other_side, key).await);
    drop(granted(&trusting, key).await);
}

#[tokio::test]
async fn c10_after_a_restart_without_persistence_an_owner_puts_its_record_back() {
    let mut server = RedisServer::start();
    let store = connect_hasty(Way::Shared, &server).await;
    let (done, running, idle) = (new_key(), new_key(), new_key());
    let lease = granted(&store, done).await;
    store.complete(&lease, &completion(b"answer")).await.unwrap();
    let lease = granted(&store, running).await;
    drop(granted(&store, idle).await);
    server.restart();
    let renewal = Renewal { terms: TERMS, checkpoint: None };
    let renewed = loop {
        match store.renew(&lease, &renewal).await {
            Ok(outcome) => break outcome,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    assert_eq!(renewed, RenewOutcome::Restored);
    let twin = store.claim(running, &claim()).await;
    assert!(matches!(twin, Ok(ClaimOutcome::InFlight { .. })), "{twin:?}");
    assert_eq!(surely_completed(&store, &lease, "after it").await, CompleteOutcome::Stored);
    // The promise is void for whoever does not run: the key is new.
    for forgotten in [done, idle] {
        assert_eq!(granted(&store, forgotten).await.grant().attempt.number(), 1);
    }
}

#[tokio::test]
async fn c11_an_append_only_file_keeps_all_but_its_torn_end() {
    let options = ["--appendonly", "yes", "--appendfsync", "everysec"];
    let mut server = RedisServer::start_with(&options);
    let store = connect_hasty(Way::Shared, &server).await;
    let (kept, torn) = (new_key(), new_key());
    let lease = granted(&store, kept).await;
    store.complete(&lease, &completion(b"answer")).await.unwrap();
    drop(granted(&store, torn).await);
    // A killed process loses nothing: the kernel has it.
    server.kill();
    server.restart();
    let twin = surely_answered(&store, torn).await;
    assert!(matches!(twin, ClaimOutcome::InFlight { .. }), "{twin:?}");
    // A power cut does: played by cutting the end of the file off.
    server.kill();
    let folder = server.folder().join("appendonlydir");
    let file = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let file = file.filter(|path| path.to_string_lossy().contains(".incr.")).max().unwrap();
    let length = std::fs::metadata(&file).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(length - 5).unwrap();
    server.restart();
    assert_eq!(surely_granted(&store, torn, "torn").await.grant().attempt.number(), 1);
    assert!(is_replay(&store.claim(kept, &claim()).await, b"answer"));
}

async fn surely_answered(
    store: &RedisStore,
    key: tower_idempotency::StorageKey,
) -> ClaimOutcome<tower_idempotency::Lease> {
    let claim = claim();
    for _ in 0..200 {
        if let Ok(outcome) = store.claim(key, &claim).await {
            return outcome;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("no answer")
}

#[tokio::test]
async fn c16_eviction_makes_keys_new_and_is_told_at_the_start() {
    let server = RedisServer::start_with(&["--maxmemory-policy", "volatile-lru"]);
    let store = connect_hasty(Way::Shared, &server).await;
    let concerns: Vec<_> = store.check().await.unwrap().iter().map(ToString::to_string).collect();
    assert!(
        concerns.iter().any(|text| text.contains("maxmemory-policy noeviction")),
        "{concerns:?}"
    );
    let key = new_key();
    drop(granted(&store, key).await);
    let used = server.cli(&["info", "memory"]);
    let used = used.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    let used: u64 = used.trim().parse().unwrap();
    server.cli(&["config", "set", "maxmemory", &(used + (64 << 10)).to_string()]);
    for number in 0..200 {
        let filler = "x".repeat(4096);
        server.cli(&["set", &format!("other:{number}"), &filler, "ex", "1000"]);
    }
    assert_eq!(server.cli(&["exists", &name_of(key)]), "0", "it was evicted");
    assert_eq!(granted(&store, key).await.grant().attempt.number(), 1, "the promise is void");
    works(&store).await;
}

/// How often a server has refused to write because it is a replica.
fn readonly(server: &RedisServer) -> u64 {
    let said = server.cli(&["info", "errorstats"]);
    let count = said.lines().find_map(|line| line.strip_prefix("errorstat_READONLY:count="));
    count.map_or(0, |count| count.trim().parse().unwrap())
}

/// Waits, while the load goes on, until a number has grown to this.
async fn reaches(what: &str, goal: u64, number: impl Fn() -> u64) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while number() < goal {
        assert!(Instant::now() < deadline, "{what}: {} of {goal}", number());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c21_a_demoted_primary_is_left_for_the_promoted_one_under_load() {
    let (old, new) = pair(RedisServer::start());
    let address = Relay::to(old.port()).await;
    let url = format!("redis://127.0.0.1:{}/", address.port());
    let store = RedisStore::builder().call_timeout(CALL_TIMEOUT).connect(&url).await.unwrap();
    let (stop, runs) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let workers: Vec<_> = (0..8)
        .map(|_| {
            let (store, stop, runs) = (store.clone(), Arc::clone(&stop), Arc::clone(&runs));
            tokio::spawn(async move {
                while !stop.load(Ordering::SeqCst) {
                    let key = new_key();
                    let lease = surely_granted(&store, key, "through the change").await;
                    assert_eq!(lease.grant().attempt.number(), 1);
                    // Restored: the copy of its claim may be lost, since nobody waited for it.
                    let outcome = surely_completed(&store, &lease, "through the change").await;
                    let fits = [CompleteOutcome::Stored, CompleteOutcome::Restored];
                    assert!(fits.contains(&outcome), "{outcome:?}");
                    runs.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    let done = || runs.load(Ordering::SeqCst);
    reaches("keys before the change", 50, done).await;
    promote(&new);
    old.cli(&["replicaof", "127.0.0.1", &new.port().to_string()]);
    // The name leads to the old one for a while, as it does until a change has gone round.
    reaches("calls that met the replica", 1, || readonly(&old)).await;
    address.lead_to(new.port());
    let before = done();
    // The eight that were under way, and as many others as to show that they go to the new one.
    reaches("keys after the change", before + 200, done).await;
    stop.store(true, Ordering::SeqCst);
    for worker in workers {
        worker.await.unwrap();
    }
    println!("{} keys, READONLY {}", done(), readonly(&old));
    recovers(&store, "after the change").await;
}
