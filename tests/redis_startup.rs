//! What is said at the start when the address leads to the wrong place, or the server is not what it
//! should be: each message tells what to change.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::error::Error as _;
use std::time::Duration;

use support::groups::RedisCluster;
use support::redis::{RedisServer, free_port};
use support::store::{completion, granted, new_key, works};
use tower_idempotency::store::redis::deadpool_redis::{Manager, Pool, Runtime};
use tower_idempotency::store::redis::{Concern, RedisAddress, RedisStoreBuilder, StartupChecks};
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
    for url in [at(""), at("pay@"), at("") + "?protocol=resp3"] {
        is_a_mistake(&url, &["asks for a password", "user:password@host"]).await;
    }
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

#[tokio::test]
async fn what_a_program_prints_without_looking_for_causes_says_what_to_change() {
    let port = free_port();
    let error = patient().connect(&format!("redis://127.0.0.1:{port}/")).await.unwrap_err();
    let printed = error.to_string();
    assert!(printed.contains("refused") && printed.contains("correct the address"), "{printed}");
    assert!(error.source().is_none(), "whoever prints causes too prints nothing twice: {error:?}");
    assert!(error.reason().is_some(), "{error:?}");
    // As `main() -> Result<(), Box<dyn Error>>` does.
    let of_main = format!("{:?}", Box::<dyn std::error::Error>::from(error));
    assert!(of_main.contains(&format!("127.0.0.1:{port}")), "{of_main}");

    let mut server = RedisServer::start();
    let store = patient().connect(&server.url()).await.unwrap();
    server.cli(&["acl", "setuser", "default", "-pexpire"]);
    let printed = store.ready().await.unwrap_err().to_string();
    assert!(printed.contains("may not run `pexpire`"), "{printed}");
    let printed = store.check().await.unwrap_err().to_string();
    assert!(printed.contains("may not run `pexpire`"), "{printed}");
    server.kill();
    let printed = store.check().await.unwrap_err().to_string();
    assert!(!printed.ends_with("is unavailable"), "{printed}");
    let printed = "redis://h/?wait=x".parse::<RedisAddress>().unwrap_err().to_string();
    assert!(printed.contains("?wait=2"), "{printed}");
}

#[tokio::test]
async fn a_server_of_another_kind_is_told_to_be_none() {
    use std::io::{Read as _, Write as _};
    for says in ["HTTP/1.1 400 Bad Request\r\n\r\n", "SSH-2.0-OpenSSH_9.2\r\n"] {
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let place = other.local_addr().unwrap();
        std::thread::spawn(move || {
            while let Ok((mut line, _)) = other.accept() {
                let _ = line.read(&mut [0; 512]);
                let _ = line.write_all(says.as_bytes());
            }
        });
        let (_, said) = refused(&format!("redis://pay:{SECRET}@{place}/")).await;
        let expected = format!("what answers at {place} does not speak the protocol of Redis");
        assert!(said.contains(&expected), "{said}");
    }
}

/// Answers as Redis 6 would: its scripts do not know which version runs them.
fn old_server() -> std::net::SocketAddr {
    use std::io::{BufRead as _, BufReader, Read as _, Write as _};
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let place = server.local_addr().unwrap();
    std::thread::spawn(move || {
        for line in server.incoming() {
            let mut out = line.unwrap();
            let mut lines = BufReader::new(out.try_clone().unwrap());
            std::thread::spawn(move || {
                let number = |lines: &mut BufReader<_>| {
                    let mut text = String::new();
                    lines.read_line(&mut text).ok()?;
                    text.get(1..)?.trim_end().parse::<usize>().ok()
                };
                while let Some(words) = number(&mut lines) {
                    let mut command = Vec::new();
                    for _ in 0..words {
                        let length = number(&mut lines).unwrap();
                        let mut word = vec![0; length + 2];
                        lines.read_exact(&mut word).unwrap();
                        command.push(String::from_utf8_lossy(&word).trim_end().to_uppercase());
                    }
                    let reply =
                        if command[0].starts_with("EVAL") { "*1\r\n:2\r\n" } else { "+OK\r\n" };
                    out.write_all(reply.as_bytes()).unwrap();
                }
            });
        }
    });
    place
}

#[tokio::test]
async fn a_server_that_is_too_old_is_refused_with_the_version_that_it_takes() {
    is_a_mistake(&format!("redis://{}/", old_server()), &["older than Redis 7.0"]).await;
}

#[tokio::test]
async fn who_cannot_be_reached_is_named_by_host_and_port() {
    let port = free_port();
    for url in [
        format!("redis://pay:{SECRET}@127.0.0.1:{port}/"),
        format!("redis://pay:{SECRET}@127.0.0.1:{port}/?protocol=resp3"),
        format!("redis+sentinel://pay:{SECRET}@127.0.0.1:{port}/main"),
        format!("redis+cluster://pay:{SECRET}@127.0.0.1:{port}"),
    ] {
        let hasty = patient().connect_timeout(Duration::from_millis(1_500));
        let (kind, told) = told(&hasty.connect(&url).await.unwrap_err());
        assert_eq!(kind, StoreErrorKind::Unavailable, "{told}");
        let place = format!("nobody listens at 127.0.0.1:{port} (");
        assert!(told.contains(&place), "{told}");
    }
    // No name server has to be asked about a name that is too long for one.
    let host = "h".repeat(70);
    let (kind, said) = refused(&format!("redis://pay:{SECRET}@{host}:6379/")).await;
    assert_eq!(kind, StoreErrorKind::Unavailable, "{said}");
    assert!(said.contains(&format!("the host of {host}:6379 has no address")), "{said}");
    let (_, said) = refused(&format!("unix:///nowhere/redis.sock?pass={SECRET}")).await;
    assert!(said.contains("nobody listens at /nowhere/redis.sock"), "{said}");
    // One that takes connections and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let place = silent.local_addr().unwrap();
    let hasty = patient().connect_timeout(Duration::from_millis(200));
    let error = hasty.connect(&format!("redis://pay:{SECRET}@{place}/")).await.unwrap_err();
    let (_, said) = told(&error);
    assert!(said.contains(&format!("{place} does not answer in time")), "{said}");
}

#[tokio::test]
async fn a_password_that_is_not_percent_encoded_is_told_and_never_shown() {
    let server = RedisServer::start();
    let port = server.port();
    for (mark, encoded) in [('/', "%2F"), ('#', "%23"), ('?', "%3F")] {
        // Behind digits, what stands before the mark could be a port.
        for before in [SECRET, "12"] {
            for (scheme, path) in [
                ("redis", ""),
                ("redis", "/2?wait=1"),
                ("redis+cluster", ""),
                ("redis+sentinel", "/main"),
            ] {
                let url = format!("{scheme}://pay:{before}{mark}{SECRET}@127.0.0.1:{port}{path}");
                let told = is_a_mistake(&url, &["percent-encoded", encoded]).await;
                assert_eq!(
                    url.parse::<RedisAddress>().unwrap_err().to_string().len() + "connect".len(),
                    told.len() + "address".len(),
                    "before anybody connects, in the same words"
                );
            }
        }
    }
    for url in [
        format!("redis://pay:%ff{SECRET}@127.0.0.1:{port}"),
        format!("unix:///run/redis.sock?pass=a&{SECRET}"),
        format!("unix:///run/redis.sock?pass=a#{SECRET}"),
    ] {
        is_a_mistake(&url, &["percent-encoded", "& as %26"]).await;
    }
    // What works is left alone; and where a password is read as another one, it is told how to write it.
    server.cli(&["acl", "setuser", "pay", "on", ">a/b@c#d%41", "~*", "+@all"]);
    let at = |password: &str| format!("redis://pay:{password}@127.0.0.1:{port}/");
    works(&patient().connect(&at("a%2Fb@c%23d%2541")).await.unwrap()).await;
    works(&patient().connect(&at("a%2Fb%40c%23d%2541")).await.unwrap()).await;
    is_a_mistake(&at("a%2Fb@c%23d%41"), &["WRONGPASS", "% as %25"]).await;
}

#[tokio::test]
async fn an_address_that_cannot_be_read_is_told_with_one_that_can() {
    for (url, words) in [
        ("localhost:6379", &["begins with a scheme", "redis://localhost:6379"][..]),
        ("pay:s3cret-of-pay@localhost", &["begins with a scheme"]),
        ("", &["begins with a scheme"]),
        ("redis:localhost:6379", &["begins with a scheme"]),
        (
            "redis://host:99999",
            &["the port is no number from 1 to 65535", "redis://localhost:6379"],
        ),
        ("redis://host:0", &["the port is no number"]),
        ("redis://host:abc", &["the port is no number", "user:password@localhost"]),
        ("redis://pay:s3cret-of-pay", &["the port is no number", "user:password@localhost"]),
        ("redis://::1:6379", &["redis://[::1]:6379"]),
        ("redis+sentinel://a:1,b:x/main", &["the port is no number"]),
        ("redis+cluster://a:1,:2", &["names no host"]),
        ("redis://", &["names no host"]),
        ("redis://a:1,b:2", &["redis+cluster://", "redis+sentinel://"]),
        ("redis://host/pay", &["the database is no number", "redis://localhost:6379/0"]),
        ("redis+sentinel://host/main/pay", &["the database is no number"]),
        ("http://host", &["\"http\"", "known are redis, rediss"]),
    ] {
        let told = is_a_mistake(url, words).await;
        assert!(!told.contains("InvalidClientConfig"), "{told}");
    }
}

#[tokio::test]
async fn a_database_that_is_refused_is_told_with_the_right_that_is_missing() {
    let server = RedisServer::start();
    server.cli(&["acl", "setuser", "pay", "on", ">right", "~*", "+@all", "-select"]);
    let at = |database: u32| format!("redis://pay:right@127.0.0.1:{}/{database}", server.port());
    works(&patient().connect(&at(0)).await.unwrap()).await;
    is_a_mistake(&at(2), &["refuses database 2", "`+select`"]).await;
    is_a_mistake(&format!("{}?protocol=resp3", at(2)), &["`+select`"]).await;
    let store = patient().pool(pool_at(&at(2))).unwrap();
    let (kind, said) = told(&store.ready().await.unwrap_err());
    assert_eq!(kind, StoreErrorKind::Backend, "{said}");
    assert!(said.contains("`+select`"), "{said}");
    server.cli(&["acl", "setuser", "pay", "+select"]);
    works(&patient().connect(&at(2)).await.unwrap()).await;
    is_a_mistake(&at(99), &["refuses database 99", "`databases`"]).await;
    server.cli(&["config", "set", "requirepass", "right"]);
    is_a_mistake(&format!("{}2", server.url()), &["asks for a password"]).await;
    let node = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    is_a_mistake(&format!("{}2", node.url()), &["redis+cluster://"]).await;
}

#[tokio::test]
async fn keys_that_the_user_may_not_use_are_told_with_the_pattern_to_grant() {
    let server = RedisServer::start();
    server.cli(&["acl", "setuser", "pay", "on", ">right", "~other:*", "+@all"]);
    let url = format!("redis://pay:right@127.0.0.1:{}/", server.port());
    is_a_mistake(&url, &["SETUSER pay ~idem:*`"]).await;
    let prefixed = patient().prefix("pay[1]*");
    let (kind, said) = told(&prefixed.clone().connect(&url).await.unwrap_err());
    assert_eq!(kind, StoreErrorKind::Backend, "{said}");
    assert!(said.contains(r"SETUSER pay ~pay\[1\]\*:*`"), "{said}");
    server.cli(&["acl", "setuser", "pay", r"~pay\[1\]\*:*"]);
    works(&prefixed.connect(&url).await.unwrap()).await;

    // The records, but not what stands beside them.
    server.cli(&["acl", "setuser", "pay", "resetkeys", "~idem:{*}"]);
    is_a_mistake(&url, &["SETUSER pay ~idem:*`", "large answers"]).await;
    // Reading only.
    server.cli(&["acl", "setuser", "pay", "resetkeys", "%R~idem:*"]);
    is_a_mistake(&url, &["SETUSER pay ~idem:*`"]).await;
    // A command too: that is told with the pattern.
    server.cli(&["acl", "setuser", "pay", "resetkeys", "~idem:*", "-pexpire"]);
    is_a_mistake(&url, &["may not run `pexpire`", "`~idem:*`"]).await;
    server.cli(&["acl", "setuser", "pay", "+pexpire"]);
    let store = patient().connect(&url).await.unwrap();
    server.cli(&["acl", "setuser", "pay", "resetkeys", "~other:*"]);
    let (_, said) = told(&store.ready().await.unwrap_err());
    assert!(said.contains("SETUSER pay ~idem:*`"), "{said}");
}

/// A pool as a program makes it.
fn pool_at(url: &str) -> Pool {
    let manager = Manager::new(url).unwrap();
    Pool::builder(manager).max_size(2).runtime(Runtime::Tokio1).build().unwrap()
}

#[tokio::test]
async fn a_pool_with_a_wrong_password_is_a_mistake_and_not_an_absent_server() {
    let server = RedisServer::start();
    server.cli(&["acl", "setuser", "pay", "on", ">right", "~*", "+@all"]);
    let at = |password: &str| format!("redis://pay:{password}@127.0.0.1:{}/", server.port());
    for protocol in ["", "?protocol=resp3"] {
        let store = patient().pool(pool_at(&format!("{}{protocol}", at(SECRET)))).unwrap();
        let claimed = store.claim(new_key(), &support::store::claim()).await;
        for error in [
            store.ready().await.unwrap_err(),
            store.check().await.unwrap_err(),
            claimed.unwrap_err(),
        ] {
            let (kind, told) = told(&error);
            assert_eq!(kind, StoreErrorKind::Backend, "{told}");
            assert!(told.contains("does not let the pool in"), "{told}");
            assert!(told.contains("password") && told.contains("ACL LIST"), "{told}");
        }
    }
    let store = patient().pool(pool_at(&at("right"))).unwrap();
    store.ready().await.unwrap();
    works(&store).await;
    server.cli(&["config", "set", "requirepass", "right"]);
    let store = patient().pool(pool_at(&server.url())).unwrap();
    let (kind, said) = told(&store.ready().await.unwrap_err());
    assert_eq!(kind, StoreErrorKind::Backend, "{said}");
    assert!(said.contains("asks for a password"), "{said}");
}

#[tokio::test]
async fn every_master_of_a_cluster_has_to_be_ready_and_the_one_that_is_not_is_named() {
    let mut cluster = RedisCluster::start(3, 0);
    let skipping = patient().startup_checks(StartupChecks::Skip);
    let store = skipping.connect(&cluster.url()).await.unwrap();
    let counted = |cluster: &RedisCluster| -> Vec<u64> {
        cluster.nodes.iter().map(|node| node.calls_of("pexpiretime")).collect()
    };
    let before = counted(&cluster);
    store.ready().await.unwrap();
    let after = counted(&cluster);
    assert!(
        before.iter().zip(&after).all(|(before, after)| before < after),
        "{before:?} {after:?}"
    );
    for node in &cluster.nodes {
        assert_eq!(node.cli(&["keys", "*"]), "", "nothing is left behind");
    }
    // A right that one of them lacks.
    for node in &cluster.nodes {
        node.cli(&["acl", "setuser", "default", "-strlen"]);
        let (kind, told) = told(&store.ready().await.unwrap_err());
        node.cli(&["acl", "setuser", "default", "+strlen"]);
        assert_eq!(kind, StoreErrorKind::Backend, "{told}");
        assert!(
            told.contains(&format!("the master 127.0.0.1:{} of the cluster", node.port())),
            "{told}"
        );
        assert!(told.contains("may not run `strlen`"), "{told}");
        store.ready().await.unwrap();
    }
    // Whichever it is that is killed.
    let killed = cluster.nodes[1].port();
    cluster.nodes[1].kill();
    let begun = std::time::Instant::now();
    let error = store.ready().await.unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(16), "bounded: {:?}", begun.elapsed());
    let (kind, said) = told(&error);
    assert_ne!(kind, StoreErrorKind::Backend, "it may come back: {said}");
    assert!(said.contains(&format!("the master 127.0.0.1:{killed} of the cluster")), "{said}");
}
