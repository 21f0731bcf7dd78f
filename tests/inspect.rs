//! What every store promises to operators, on real servers.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::sync::Arc;

use support::groups::{RedisCluster, SentinelGroup};
use support::postgres::PostgresServer;
use support::redis::RedisServer;
use tower_idempotency::store::redis::StartupChecks;
use tower_idempotency::store::redis::deadpool_redis::{Manager, Pool, Runtime};
use tower_idempotency::store::{
    Inspect, Protected, ProtectionKeyId, ProtectionKeys, Source, Survey, Wanted, conformance,
};
use tower_idempotency::{
    MemoryStore, PostgresLeaseStore, PostgresStore, RedisStore, SqliteLeaseStore, SqliteStore,
};

#[tokio::test]
async fn the_memory_store_can_be_inspected() {
    conformance::run_all_inspect(&MemoryStore::new()).await;
    let store: Arc<dyn Inspect> = Arc::new(MemoryStore::new());
    conformance::run_all_inspect(&store).await;
}

#[tokio::test]
async fn a_protected_store_can_be_inspected_as_the_one_inside() {
    let keys = || ProtectionKeys::new(ProtectionKeyId::from_number(1), &[7; 32]);
    conformance::run_all_inspect(&Protected::new(MemoryStore::new(), keys())).await;
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    conformance::run_all_inspect(&Protected::new(store, keys())).await;
}

#[tokio::test]
async fn redis_can_be_inspected_over_a_shared_connection() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    conformance::run_all_inspect(&store).await;
    let wanted = Wanted { survey: Survey::Unknown, at_most: 1, after: None };
    let listing = store.list(&wanted).await.unwrap();
    let Source::Index(pass) = listing.source else { panic!("{listing:?}") };
    assert!(pass.started <= pass.ended && pass.ended <= listing.now, "{pass:?}");
    assert!(pass.scanned >= pass.found && pass.found >= 7 && pass.left_out == 0, "{pass:?}");
    assert_eq!(server.calls_of("keys"), 0, "KEYS is never used");
}

#[tokio::test]
async fn redis_can_be_inspected_over_a_newer_protocol() {
    let server = RedisServer::start();
    let url = format!("{}?protocol=resp3", server.url());
    conformance::run_all_inspect(&RedisStore::connect(&url).await.unwrap()).await;
}

#[tokio::test]
async fn redis_can_be_inspected_over_a_pool_of_one() {
    let server = RedisServer::start();
    let pool = Pool::builder(Manager::new(server.url()).unwrap()).max_size(1);
    let pool = pool.runtime(Runtime::Tokio1).build().unwrap();
    conformance::run_all_inspect(&RedisStore::from_pool(pool)).await;
}

#[tokio::test]
async fn redis_can_be_inspected_through_sentinels() {
    let group = SentinelGroup::start(1);
    conformance::run_all_inspect(&RedisStore::connect(&group.url()).await.unwrap()).await;
}

#[tokio::test]
async fn a_cluster_can_be_inspected_on_all_of_its_primaries() {
    let cluster = RedisCluster::start(3, 0);
    let store = RedisStore::connect(&cluster.url()).await.unwrap();
    conformance::run_all_inspect(&store).await;
    for node in &cluster.nodes {
        assert!(node.calls_of("scan") > 0, "a primary was passed over");
        assert_eq!(node.calls_of("keys"), 0, "KEYS is never used");
    }
}

/// As `src/guide/redis.md` and `src/guide/operations.md` name them.
#[tokio::test]
async fn the_rights_that_the_guide_names_are_enough() {
    let guide = include_str!("../src/guide/operations.md");
    let (_, rights) = guide.split_once("an operator's ACL user needs `").unwrap();
    let rights = rights.split_once('`').unwrap().0;
    let server = RedisServer::start();
    let mut user = vec!["acl", "setuser", "operator", "on", ">secret", "~idem:*"];
    user.extend("+eval +evalsha +time +get +set +pexpiretime".split_whitespace());
    user.extend(rights.split_whitespace());
    server.cli(&user);
    let url = server.url().replace("redis://", "redis://operator:secret@");
    let builder = RedisStore::builder().startup_checks(StartupChecks::Skip);
    conformance::run_all_inspect(&builder.connect(&url).await.unwrap()).await;
    // Each of them is needed: the same without it does not get through.
    for right in rights.split_whitespace() {
        server.cli(&["acl", "setuser", "operator", &right.replace('+', "-")]);
        let store = RedisStore::builder().startup_checks(StartupChecks::Skip);
        let store = store.connect(&url).await.unwrap();
        let suite = tokio::spawn(async move { conformance::run_all_inspect(&store).await });
        let refused = right != "+zremrangebyrank" && right != "+dbsize";
        assert_eq!(suite.await.is_err(), refused, "{right}");
        server.cli(&["acl", "setuser", "operator", right]);
    }
}

#[tokio::test]
async fn valkey_can_be_inspected() {
    let server = RedisServer::start_valkey(&[]);
    conformance::run_all_inspect(&RedisStore::connect(&server.url()).await.unwrap()).await;
}

#[tokio::test]
async fn postgres_can_be_inspected() {
    let (_server, url) = PostgresServer::shared();
    let store = PostgresLeaseStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    conformance::run_all_inspect(&store).await;
    // A transaction of its own store ends without a trace of "unknown", so operators see the table only.
    let store = PostgresStore::from_pool(store.pool().clone());
    let listing = store.list(&Wanted { survey: Survey::Unknown, at_most: 5, after: None }).await;
    let listing = listing.unwrap();
    assert_eq!((listing.source, listing.entries.len()), (Source::Direct, 5));
    assert!(store.trail(10).await.unwrap().len() >= 3);
}

#[tokio::test]
async fn sqlite_can_be_inspected() {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteLeaseStore::open(folder.path().join("test.db")).await.unwrap();
    store.migrate().await.unwrap();
    conformance::run_all_inspect(&store).await;
    let store = SqliteStore::from_pool(store.pool().clone()).await.unwrap();
    let listing = store.list(&Wanted { survey: Survey::Unknown, at_most: 5, after: None }).await;
    assert_eq!(listing.unwrap().entries.len(), 5);
}

#[tokio::test]
async fn the_listing_of_a_table_goes_by_its_index() {
    let (server, url) = PostgresServer::shared();
    let store = PostgresLeaseStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    let name = url.split('/').next_back().unwrap().split('?').next().unwrap().to_owned();
    let psql = |sql: &str| server.psql_in(&name, sql);
    psql(
        "INSERT INTO idempotency_records
         SELECT decode(lpad(to_hex(n), 48, '0'), 'hex'), 4, 9999999999999, '\\x0204' || '00'::bytea
           FROM generate_series(1, 20000) AS n; ANALYZE idempotency_records",
    );
    store.list(&Wanted { survey: Survey::Unknown, at_most: 5, after: None }).await.unwrap();
    let plan = psql(
        "EXPLAIN SELECT expires_at, storage_key FROM idempotency_records WHERE state IN (1, 3, 5)
            AND (expires_at, storage_key) > (1, '\\x00') ORDER BY expires_at, storage_key LIMIT 200",
    );
    assert!(plan.contains("idempotency_records_unsettled"), "{plan}");
}
