//! Every store of this crate passes the suite that stores of other crates are checked by.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::sync::Arc;

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
