//! A group of servers that Sentinels watch: failovers are followed without a restart, and with
//! `wait` on all replicas nothing is charged twice.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::time::{Duration, Instant};

use support::groups::SentinelGroup;
use support::load::Load;
use support::log::Log;
use support::redis::RedisServer;
use support::store::{CALL_TIMEOUT, TERMS, claim, granted, name_of, new_key, recovers, works};
use tower_idempotency::record::{Release, ReleaseOutcome, RenewOutcome, Renewal, Verdict};
use tower_idempotency::{RedisStore, Store as _, StoreErrorKind};

/// How long it may take until somebody is served again: the Sentinels look for a second, elect, and
/// promote; and machines are busy.
const SECONDS: Duration = Duration::from_secs(15);

async fn connect(group: &SentinelGroup, replicas: u32) -> RedisStore {
    let builder = RedisStore::builder().call_timeout(CALL_TIMEOUT).wait(replicas);
    builder.connect(&group.url()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c12_a_primary_killed_under_load_charges_nobody_twice_with_wait_on_all_replicas() {
    let mut group = SentinelGroup::start(2);
    let load = Load::start(connect(&group, 2).await, 8);
    load.go_on(200).await;
    let first = group.servers[0].port();
    group.servers[0].kill();
    group.wait_for_failover_from(first);
    // It comes back as a replica, so that there are two again.
    group.servers[0].restart();
    load.go_on(200).await;
    let report = load.finish().await;
    println!("{report:?}");
    assert!(report.refusals > 0, "the failover was noticed");
    assert!(report.longest_gap < SECONDS, "{report:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c14_a_frozen_primary_is_left_and_not_believed_when_it_wakes() {
    let group = SentinelGroup::start(2);
    let store = connect(&group, 1).await;
    let load = Load::start(store.clone(), 8);
    load.go_on(100).await;
    let first = group.servers[0].port();
    group.servers[0].stop();
    group.wait_for_failover_from(first);
    load.go_on(100).await;
    group.servers[0].cont();
    load.go_on(100).await;
    let report = load.finish().await;
    println!("{report:?}");
    assert!(report.longest_gap < SECONDS, "{report:?}");
    store.ready().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c21_an_ordered_failover_is_followed_and_charges_nobody_twice() {
    let group = SentinelGroup::start(2);
    let load = Load::start(connect(&group, 2).await, 8);
    load.go_on(100).await;
    let first = group.servers[0].port();
    group.sentinels[0].cli(&["sentinel", "failover", "main"]);
    group.wait_for_failover_from(first);
    load.go_on(100).await;
    let report = load.finish().await;
    println!("{report:?}");
    assert!(report.longest_gap < SECONDS, "{report:?}");
}

/// Gives the first server's place to another one, without its knowing: the Sentinels may not tell it.
fn depose_unnoticed(group: &SentinelGroup) -> u16 {
    let first = group.servers[0].port();
    group.servers[0].cli(&["acl", "setuser", "default", "-replicaof", "-slaveof"]);
    group.sentinels[0].cli(&["sentinel", "failover", "main"]);
    group.wait_for_failover_from(first);
    assert!(group.servers[0].cli(&["info", "replication"]).contains("role:master"));
    group.primary_port()
}

/// Until the Sentinels have heard of it from one another, and have been asked: two seconds and one.
const LEFT_WITHIN: Duration = Duration::from_secs(6);

#[tokio::test]
async fn c21_a_primary_that_was_given_up_and_still_serves_is_left() {
    let group = SentinelGroup::start(1);
    let (busy, idle) = (connect(&group, 0).await, connect(&group, 0).await);
    works(&busy).await;
    works(&idle).await;
    let now = depose_unnoticed(&group);
    let primary = group.servers.iter().find(|server| server.port() == now).unwrap();
    let begun = Instant::now();
    loop {
        let key = new_key();
        drop(granted(&busy, key).await);
        if primary.cli(&["exists", &name_of(key)]) == "1" {
            break;
        }
        assert!(begun.elapsed() < LEFT_WITHIN, "it still claims where nobody looks");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // One that has had nothing to do since does not go back to it either.
    tokio::time::sleep(LEFT_WITHIN.saturating_sub(begun.elapsed())).await;
    let key = new_key();
    drop(granted(&idle, key).await);
    assert_eq!(primary.cli(&["exists", &name_of(key)]), "1");
}

#[tokio::test]
async fn c21_what_is_renewed_and_given_back_goes_where_claims_go() {
    let group = SentinelGroup::start(2);
    let store = connect(&group, 1).await;
    works(&store).await;
    let (running, given_up) = (new_key(), new_key());
    let lease = granted(&store, running).await;
    let other = granted(&store, given_up).await;
    // Both replicas have them.
    for server in &group.servers[1..] {
        server.wait_until("the claims are there", &["dbsize"], |count| count >= "3");
    }
    let now = depose_unnoticed(&group);
    let primary = group.servers.iter().find(|server| server.port() == now).unwrap();
    // Claims that wait for replicas are refused by the old one, and find the new one by that.
    let begun = Instant::now();
    while store.claim(new_key(), &claim()).await.is_err() {
        assert!(begun.elapsed() < SECONDS, "nobody grants anything");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let expiry = || -> u64 { primary.cli(&["pexpiretime", &name_of(running)]).parse().unwrap() };
    let before = expiry();
    let renewal = Renewal { terms: TERMS, checkpoint: None };
    assert_eq!(store.renew(&lease, &renewal).await.unwrap(), RenewOutcome::Renewed);
    assert!(expiry() > before, "renewed where nobody looks");
    let release = Release { terms: TERMS, verdict: Verdict::NoEffect };
    assert_eq!(store.release(&other, &release).await.unwrap(), ReleaseOutcome::Released);
    drop(granted(&connect(&group, 0).await, given_up).await);
}

#[tokio::test]
async fn without_wait_a_killed_primary_is_replaced_within_seconds() {
    let mut group = SentinelGroup::start(1);
    let store = connect(&group, 0).await;
    works(&store).await;
    let begun = Instant::now();
    group.servers[0].kill();
    while store.ready().await.is_err() {
        assert!(begun.elapsed() < SECONDS, "nobody answers");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    works(&store).await;
}

#[tokio::test]
async fn dead_and_ignorant_sentinels_are_outvoted() {
    let mut group = SentinelGroup::start(1);
    let dead = support::redis::free_port();
    group.sentinels[0].stop();
    let sentinels: Vec<_> = group.sentinels.iter().map(|node| node.port()).collect();
    let [frozen, ref well @ ..] = sentinels[..] else { panic!("three") };
    let url = format!(
        "redis+sentinel://127.0.0.1:{frozen},127.0.0.1:{dead},127.0.0.1:{},127.0.0.1:{}/main",
        well[0], well[1]
    );
    let begun = Instant::now();
    let store = RedisStore::connect(&url).await.unwrap();
    works(&store).await;
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    group.sentinels[0].cont();

    let nobody = group.url().replace("/main", "/other");
    let error = RedisStore::connect(&nobody).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Backend, "all of them say so: {error:?}");
    let cause = error.to_string();
    assert!(cause.contains("no Sentinel watches a master named \"other\""), "{error:?}");

    for sentinel in &mut group.sentinels {
        sentinel.kill();
    }
    // What is connected stays connected: they are needed to find somebody, not to talk.
    works(&store).await;
    let begun = Instant::now();
    let error = RedisStore::connect(&group.url()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

/// Each new connection asks all Sentinels, and a silent one may take longer than a call may.
#[tokio::test]
async fn a_start_that_waits_for_replicas_has_the_time_that_silent_sentinels_take() {
    let group = SentinelGroup::start(2);
    group.sentinels[..2].iter().for_each(RedisServer::stop);
    let answer_of_a_sentinel = CALL_TIMEOUT + Duration::from_secs(1);
    let builder = RedisStore::builder().call_timeout(CALL_TIMEOUT).wait(2);
    let builder = builder.connect_timeout(answer_of_a_sentinel * 2);
    works(&builder.connect(&group.url()).await.unwrap()).await;
}

#[tokio::test]
async fn passwords_of_servers_and_of_sentinels_are_two_things() {
    let group = SentinelGroup::start(1);
    for server in &group.servers {
        server.cli(&["config", "set", "masterauth", "secret"]);
    }
    for server in &group.servers {
        server.cli(&["config", "set", "requirepass", "secret"]);
    }
    for sentinel in &group.sentinels {
        sentinel.cli(&["acl", "setuser", "default", "resetpass", ">door"]);
    }
    let url = group.url().replace("redis+sentinel://", "redis+sentinel://:secret@");
    RedisStore::connect(&url).await.unwrap_err();
    // None for the servers.
    for protocol in ["", "?protocol=resp3"] {
        let url = format!("{}{protocol}", group.url());
        let error =
            RedisStore::builder().sentinel_password("door").connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Backend, "{error:?}");
        let advice = "redis+sentinel://user:password@host:port,host:port/master-name";
        assert!(error.to_string().contains(advice), "{error}");
        assert!(error.to_string().contains("NOAUTH"), "{error}");
    }
    let store = RedisStore::builder().sentinel_password("door").connect(&url).await.unwrap();
    drop(granted(&store, new_key()).await);
    recovers(&store, "with both").await;
}

/// Waits until this has been logged, and gives all that was.
async fn logged(log: &Log, words: &str) -> String {
    let (mut said, begun) = (String::new(), Instant::now());
    loop {
        said += &log.take();
        if said.contains(words) {
            return said;
        }
        assert!(begun.elapsed() < SECONDS, "{words:?}: {said}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn sentinels_that_answer_and_watch_no_such_master_are_told_as_that() {
    let (log, _guard) = Log::install(tracing::Level::INFO);
    let group = SentinelGroup::start(1);
    let store = connect(&group, 0).await;
    works(&store).await;
    // A reason from before, that is none any more.
    group.sentinels[0].stop();
    tokio::time::sleep(Duration::from_secs(2)).await;
    group.sentinels[0].cont();
    tokio::time::sleep(Duration::from_secs(2)).await;
    for sentinel in &group.sentinels {
        sentinel.cli(&["sentinel", "remove", "main"]);
    }
    let said = logged(&log, "most Sentinels do not say where the primary is").await;
    for sentinel in &group.sentinels {
        let reason = format!("127.0.0.1:{} answers, and watches no master", sentinel.port());
        assert!(said.contains(&reason), "{reason}: {said}");
    }
    assert!(!said.contains("not answer"), "{said}");
    let port = group.servers[0].port().to_string();
    for sentinel in &group.sentinels {
        sentinel.cli(&["sentinel", "monitor", "main", "127.0.0.1", &port, "2"]);
    }
    logged(&log, "most Sentinels name the primary again").await;
    works(&store).await;
}

#[tokio::test]
async fn a_sentinel_that_names_another_primary_than_the_others_is_told_once() {
    let (log, _guard) = Log::install(tracing::Level::INFO);
    let (group, other) = (SentinelGroup::start(1), RedisServer::start());
    let store = connect(&group, 0).await;
    works(&store).await;
    let (odd, port) = (&group.sentinels[2], other.port().to_string());
    odd.cli(&["sentinel", "remove", "main"]);
    odd.cli(&["sentinel", "monitor", "main", "127.0.0.1", &port, "2"]);
    let mut said = logged(&log, "a Sentinel contradicts most of the others").await;
    for words in [
        format!("sentinel=\"127.0.0.1:{}\"", odd.port()),
        format!("names=\"127.0.0.1:{port}\""),
        format!("most_name=\"127.0.0.1:{}\"", group.servers[0].port()),
    ] {
        assert!(said.contains(&words), "{words}: {said}");
    }
    // It is asked five times more, and outvoted.
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    said += &log.take();
    assert_eq!(said.matches("contradicts").count(), 1, "{said}");
    assert!(!said.contains("is another Redis server"), "{said}");
    works(&store).await;
}
