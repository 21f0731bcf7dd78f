//! What is said at the start when the address leads to the wrong place, or the server is not what it
//! should be: each message tells what to change.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::error::Error as _;
use std::time::Duration;

use support::groups::RedisCluster;
use support::redis::{RedisServer, free_port};
use support::store::{completion, granted, new_key, works};
use tower_idempotency::store::redis::{Concern, RedisStoreBuilder, StartupChecks};
use tower_idempotency::{RedisStore, Store as _, StoreError, StoreErrorKind};

const SECRET: &str = "s3cret-of-pay";

/// A busy machine needs its time; what fails here fails at once, or after the time to connect.
fn patient() -> RedisStoreBuilder {
    RedisStore::builder()
        .call_timeout(Duration::from_secs(4))
        .connect_timeout(Duration::from_secs(4))
}

/// The kind, and all that is told, as a program prints it: an error, then its causes.
fn told(error: &StoreError) -> (StoreErrorKind, String) {
    let mut told = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        told = format!("{told}: {cause}");
        next = cause.source();
    }
    assert!(!told.contains(SECRET) && !format!("{error:?}").contains(SECRET), "{told}");
    (error.kind(), told)
}

async fn refused(url: &str) -> (StoreErrorKind, String) {
    told(&patient().connect(url).await.unwrap_err())
}

/// Refused for good, by a message with these words in it.
async fn is_a_mistake(url: &str, words: &[&str]) -> String {
    let (kind, told) = refused(url).await;
    assert_eq!(kind, StoreErrorKind::Backend, "it does not pass by waiting: {told}");
    for word in words {
        assert!(told.contains(word), "no {word:?} in: {told}");
    }
    told
}

#[tokio::test]
async fn the_address_of_a_replica_is_told_with_its_primary() {
    let primary = RedisServer::start();
    let replica = primary.start_replica(primary.port());
    primary.wait_for_replicas(1);
    let (kind, told) = refused(&replica.url()).await;
    assert_eq!(kind, StoreErrorKind::Unavailable, "a failover may make it the primary: {told}");
    let of = format!("a read-only replica of 127.0.0.1:{}", primary.port());
    assert!(told.contains(&of) && told.contains("redis+sentinel://"), "{told}");
    // One whose user may not ask for the primary.
    replica.cli(&["acl", "setuser", "default", "-role"]);
    let (_, told) = refused(&replica.url()).await;
    assert!(told.contains("a read-only replica; connect to its primary"), "{told}");
}

#[tokio::test]
async fn a_wrong_user_or_password_is_a_mistake_that_names_the_user_and_never_the_password() {
    let server = RedisServer::start();
    server.cli(&["acl", "setuser", "pay", "on", ">right", "~*", "+@all"]);
    let at = |user: &str| format!("redis://{user}127.0.0.1:{}/", server.port());
    let wrong = at(&format!("pay:{SECRET}@"));
    is_a_mistake(&wrong, &["user \"pay\"", "WRONGPASS", "ACL LIST"]).await;
    is_a_mistake(&format!("{wrong}?protocol=resp3"), &["user \"pay\"", "WRONGPASS"]).await;
    is_a_mistake(&at(&format!("nobody:{SECRET}@")), &["user \"nobody\"", "WRONGPASS"]).await;
    // A server that asks for no password, and one that does.
    is_a_mistake(&at(&format!(":{SECRET}@")), &["user \"default\"", "without any password"]).await;
    server.cli(&["config", "set", "requirepass", "right"]);
    is_a_mistake(&at(&format!(":{SECRET}@")), &["user \"default\"", "WRONGPASS"]).await;
    is_a_mistake(&at(""), &["asks for a password", "user:password@host"]).await;
    works(&patient().connect(&at("pay:right@")).await.unwrap()).await;

    // And while it runs: the password is changed, and the connection breaks.
    let store = patient().connect(&at("pay:right@")).await.unwrap();
    let change = ["-a", "right", "--no-auth-warning"];
    server.cli(&[&change[..], &["acl", "setuser", "pay", "resetpass", ">other"]].concat());
    server.cli(&[&change[..], &["client", "kill", "user", "pay"]].concat());
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        let (kind, told) = told(&store.ready().await.unwrap_err());
        if kind == StoreErrorKind::Backend {
            assert!(told.contains("user \"pay\"") && told.contains("WRONGPASS"), "{told}");
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "{told}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn sentinels_that_are_none_and_masters_that_nobody_watches_are_told() {
    let server = RedisServer::start();
    let sentinel = RedisServer::start_sentinel(server.port());
    let place = format!("127.0.0.1:{}", server.port());
    let url = format!("redis+sentinel://{place}/main");
    is_a_mistake(&url, &[&format!("{place} is no Sentinel"), "26379"]).await;
    let url = format!("redis+sentinel://127.0.0.1:{}/mian", sentinel.port());
    is_a_mistake(&url, &["no Sentinel watches a master named \"mian\"", "they watch main"]).await;
    // One that is away may know it: that may pass.
    let url =
        format!("redis+sentinel://127.0.0.1:{},127.0.0.1:{}/mian", sentinel.port(), free_port());
    let (kind, told) = refused(&url).await;
    assert_eq!(kind, StoreErrorKind::Unavailable, "{told}");

    let url = format!("redis://127.0.0.1:{}/", sentinel.port());
    is_a_mistake(&url, &["the server is a Sentinel", "redis+sentinel://", "/main"]).await;
    let url = format!("redis+cluster://127.0.0.1:{}", sentinel.port());
    is_a_mistake(&url, &["no node of a cluster", "redis+sentinel://"]).await;

    sentinel.cli(&["acl", "setuser", "default", ">other"]);
    let url = format!("redis+sentinel://:{SECRET}@127.0.0.1:{}/main", sentinel.port());
    is_a_mistake(&url, &["does not let us in", "sentinel_password"]).await;
}

#[tokio::test]
async fn a_cluster_without_slots_a_node_of_one_and_one_that_is_down_are_told() {
    let bare = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    let hasty = RedisStore::builder().connect_timeout(Duration::from_millis(500));
    let url = format!("redis+cluster://127.0.0.1:{},127.0.0.1:{}", bare.port(), free_port());
    let (kind, said) = told(&hasty.connect(&url).await.unwrap_err());
    assert_eq!(kind, StoreErrorKind::Unavailable, "it may be on its way: {said}");
    assert!(
        said.contains("no slot of the cluster is assigned") && said.contains("--cluster create")
    );
    is_a_mistake(&bare.url(), &["one node of a cluster", "redis+cluster://"]).await;

    let mut cluster = RedisCluster::start(3, 0);
    // Each of them: one has the slot of the readiness mark, the others do not.
    for node in &cluster.nodes {
        is_a_mistake(&node.url(), &["one node of a cluster", "redis+cluster://"]).await;
        let skipping = patient().startup_checks(StartupChecks::Skip);
        let (_, told) = told(&skipping.connect(&node.url()).await.unwrap_err());
        assert!(told.contains("one node of a cluster"), "{told}");
    }
    let single = RedisServer::start();
    let url = format!("redis+cluster://127.0.0.1:{}", single.port());
    is_a_mistake(&url, &["no node of a cluster", "redis://host:port"]).await;

    let url = cluster.url();
    cluster.nodes[0].cli(&["acl", "setuser", "pay", "on", ">right", "~*", "+@all", "-cluster"]);
    let limited = format!("redis+cluster://pay:right@127.0.0.1:{}", cluster.nodes[0].port());
    is_a_mistake(&limited, &["+cluster|slots"]).await;

    for node in &cluster.nodes {
        node.cli(&["config", "set", "cluster-require-full-coverage", "yes"]);
    }
    cluster.nodes[2].kill();
    for node in &cluster.nodes[..2] {
        node.wait_until("it is down", &["cluster", "info"], |said| {
            said.contains("cluster_state:fail")
        });
    }
    let hasty = RedisStore::builder().connect_timeout(Duration::from_secs(1));
    let (kind, told) = told(&hasty.connect(&url).await.unwrap_err());
    assert_eq!(kind, StoreErrorKind::Unavailable, "nodes may come back: {told}");
    assert!(told.contains("the cluster is down") && told.contains("CLUSTER INFO"), "{told}");
}

#[tokio::test]
async fn slots_that_nobody_has_are_a_concern() {
    let cluster = RedisCluster::start(1, 0);
    let url = cluster.url();
    let store = patient().connect(&url).await.unwrap();
    let nobody = |concerns: &[Concern]| concerns.contains(&Concern::SlotsOfNobody { slots: 1 });
    assert!(!nobody(&store.check().await.unwrap()));
    // Not the slot of a key that the check uses.
    cluster.nodes[0].cli(&["cluster", "delslots", "0"]);
    let store = patient().connect(&url).await.unwrap();
    let concerns = store.check().await.unwrap();
    assert!(nobody(&concerns), "{concerns:?}");
}

#[tokio::test]
async fn a_user_who_may_not_wait_is_told_from_replicas_that_are_missing() {
    let server = RedisServer::start_with(&["--appendonly", "yes"]);
    server.cli(&["acl", "setuser", "pay", "on", ">right", "~*", "+@all", "-wait"]);
    let url = format!("redis://pay:right@127.0.0.1:{}/?wait=1", server.port());
    let store = patient().connect(&url).await.unwrap();
    let concerns = store.check().await.unwrap();
    let [Concern::CannotWait { reason }] = &concerns[..] else { panic!("{concerns:?}") };
    assert!(reason.contains("refused WAIT") && reason.contains("+wait"), "{reason}");
    let (_, not_ready) = told(&store.ready().await.unwrap_err());
    assert!(not_ready.contains("+wait"), "{not_ready}");

    server.cli(&["acl", "setuser", "pay", "+wait"]);
    let concerns = store.check().await.unwrap();
    assert_eq!(concerns, [Concern::TooFewReplicas { confirmed: 0, needed: 1 }]);
    assert!(!concerns[0].to_string().contains("+wait"), "{concerns:?}");
    let (_, not_ready) = told(&store.ready().await.unwrap_err());
    assert!(not_ready.contains("0 of the 1 replicas"), "{not_ready}");
}

#[tokio::test]
async fn an_address_says_how_many_replicas_have_to_confirm() {
    let server = RedisServer::start();
    let _replica = server.start_replica(server.port());
    server.wait_for_replicas(1);
    for (address, builder, waits) in [
        ("", patient(), 0),
        ("?wait=1", patient(), 1),
        ("?wait=1", patient().wait(1), 1),
        ("", patient().wait(1), 1),
        ("?wait=0", patient(), 0),
    ] {
        let store = builder.connect(&format!("{}{address}", server.url())).await.unwrap();
        let before = server.calls_of("wait");
        let lease = granted(&store, new_key()).await;
        store.complete(&lease, &completion(b"answer")).await.unwrap();
        assert_eq!(server.calls_of("wait") - before, 2 * waits, "{address:?}");
    }
    for (url, builder) in [
        ("?wait=1", patient().wait(2)),
        ("?wait=0", patient().wait(2)),
        ("?wait=", patient()),
        ("?wait=one", patient()),
        ("?wait=1&wait=1", patient()),
    ] {
        let error = builder.connect(&format!("{}{url}", server.url())).await.unwrap_err();
        let (kind, told) = told(&error);
        assert_eq!(kind, StoreErrorKind::Backend, "{told}");
        assert!(told.contains("wait="), "{told}");
    }
}

#[tokio::test]
async fn readiness_leaves_nothing_behind_and_names_what_is_missing_on_every_kind_of_server() {
    let server = RedisServer::start();
    let cluster = RedisCluster::start(1, 0);
    let skipping = || patient().startup_checks(StartupChecks::Skip);
    let stores = [
        (&server, skipping().connect(&server.url()).await.unwrap()),
        (&server, skipping().pool(support::store::pool(&server, 2)).unwrap()),
        (&cluster.nodes[0], skipping().connect(&cluster.url()).await.unwrap()),
    ];
    for (server, store) in stores {
        // Something of another kind in its place is no reason to fail.
        server.cli(&["rpush", "idem:{ready}", "a"]);
        store.ready().await.unwrap();
        assert_eq!(server.cli(&["keys", "*"]), "", "{store:?}");
        server.cli(&["acl", "setuser", "default", "-pexpire", "-rename"]);
        let (kind, told) = told(&store.ready().await.unwrap_err());
        server.cli(&["acl", "setuser", "default", "+pexpire", "+rename"]);
        assert_eq!(kind, StoreErrorKind::Backend, "{store:?}: {told}");
        assert!(told.contains("may not run `pexpire`, `rename`,"), "{store:?}: {told}");
        let left: i64 = server.cli(&["pttl", "idem:{ready}"]).parse().unwrap();
        assert!(left <= 1_000, "{store:?}: gone within a second, not {left} ms");
        store.ready().await.unwrap();
        assert_eq!(server.cli(&["keys", "*"]), "", "{store:?}");
    }
}

#[tokio::test]
async fn no_cause_is_told_twice() {
    let url = format!("redis://127.0.0.1:{}/", free_port());
    let (kind, told) = refused(&url).await;
    assert_eq!(kind, StoreErrorKind::Unavailable);
    assert_eq!(told.matches("refused").count(), 1, "{told}");

    // Over the life of a store, and over a pool.
    let mut server = RedisServer::start();
    let store = patient().connect(&server.url()).await.unwrap();
    let pooled = patient().pool(support::store::pool(&server, 2)).unwrap();
    server.kill();
    for store in [store, pooled] {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
        loop {
            let (_, told) = self::told(&store.ready().await.unwrap_err());
            assert!(told.matches("refused").count() <= 1, "{told}");
            if told.contains("refused") {
                break;
            }
            assert!(tokio::time::Instant::now() < deadline, "{told}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}
