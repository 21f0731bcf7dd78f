//! Every store of this crate passes the suite that stores of other crates are checked by.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::sync::Arc;
use std::time::Duration;

use support::groups::{RedisCluster, SentinelGroup};
use support::postgres::PostgresServer;
use support::redis::RedisServer;
use tower_idempotency::store::redis::deadpool_redis::{Manager, Pool, Runtime};
use tower_idempotency::store::{Faulty, conformance};
use tower_idempotency::{MemoryStore, PostgresLeaseStore, RedisStore, SqliteLeaseStore, Store};

#[tokio::test]
async fn the_memory_store_keeps_its_promises() {
    conformance::run_all(&MemoryStore::new()).await;
}

#[tokio::test]
async fn a_store_behind_an_arc_keeps_its_promises() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    conformance::run_all(&store).await;
}

#[tokio::test]
async fn the_faulty_store_without_faults_keeps_its_promises() {
    conformance::run_all(&Faulty::new(MemoryStore::new())).await;
}

#[tokio::test]
async fn the_redis_store_keeps_its_promises_over_a_shared_connection() {
    let server = RedisServer::start();
    conformance::run_all(&RedisStore::connect(&server.url()).await.unwrap()).await;
}

#[tokio::test]
async fn the_redis_store_keeps_its_promises_over_a_newer_protocol() {
    let server = RedisServer::start();
    let url = format!("{}?protocol=resp3", server.url());
    conformance::run_all(&RedisStore::connect(&url).await.unwrap()).await;
}

#[tokio::test]
async fn the_redis_store_keeps_its_promises_over_a_pool() {
    let server = RedisServer::start();
    for size in [1, 4] {
        let pool = Pool::builder(Manager::new(server.url()).unwrap())
            .max_size(size)
            .runtime(Runtime::Tokio1)
            .build()
            .unwrap();
        conformance::run_all(&RedisStore::from_pool(pool)).await;
    }
}

#[tokio::test]
async fn the_postgres_lease_store_keeps_its_promises() {
    let (_server, url) = PostgresServer::shared();
    let store = PostgresLeaseStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    conformance::run_all(&store).await;
}

#[tokio::test]
async fn the_sqlite_lease_store_keeps_its_promises() {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteLeaseStore::open(folder.path().join("test.db")).await.unwrap();
    store.migrate().await.unwrap();
    conformance::run_all(&store).await;
}

#[tokio::test]
async fn the_redis_store_keeps_its_promises_when_it_waits_for_replicas() {
    let server = RedisServer::start();
    let _replica = server.start_replica(server.port());
    server.wait_for_replicas(1);
    let builder = || RedisStore::builder().wait(1).call_timeout(Duration::from_secs(8));
    conformance::run_all(&builder().connect(&server.url()).await.unwrap()).await;
    let pool = Pool::builder(Manager::new(server.url()).unwrap()).max_size(4).build().unwrap();
    conformance::run_all(&builder().pool(pool).unwrap()).await;
}

#[tokio::test]
async fn the_redis_store_keeps_its_promises_through_sentinels() {
    let group = SentinelGroup::start(1);
    conformance::run_all(&RedisStore::connect(&group.url()).await.unwrap()).await;
}

#[tokio::test]
async fn the_redis_store_keeps_its_promises_in_a_cluster() {
    let cluster = RedisCluster::start(3, 0);
    conformance::run_all(&RedisStore::connect(&cluster.url()).await.unwrap()).await;
}

#[tokio::test]
async fn the_redis_store_keeps_its_promises_in_a_valkey_cluster() {
    let cluster = RedisCluster::start_with(3, 0, RedisServer::start_valkey);
    conformance::run_all(&RedisStore::connect(&cluster.url()).await.unwrap()).await;
}

#[tokio::test]
async fn the_redis_store_keeps_its_promises_on_valkey() {
    let server = RedisServer::start_valkey(&[]);
    conformance::run_all(&RedisStore::connect(&server.url()).await.unwrap()).await;
}
