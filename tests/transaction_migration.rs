//! Making the tables while payments are open: nobody waits for a process that starts.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/postgres.rs"]
#[allow(dead_code, unreachable_pub, reason = "other tests use the rest")]
mod postgres;

use std::time::Duration;

use postgres::PostgresServer;
use tower_idempotency::store::sql::sqlx::{self, PgPool};
use tower_idempotency::{PostgresStore, SqliteStore};

const ROW: &str = "INSERT INTO idempotency_records (storage_key, state, expires_at, record) \
                   VALUES (decode(repeat('07', 24), 'hex'), 2, 1, '\\x02')";

#[tokio::test]
async fn tables_that_are_there_are_found_without_waiting_for_an_open_payment() {
    let (server, url) = PostgresServer::shared();
    let pool = PgPool::connect(&url).await.unwrap();
    let store = PostgresStore::from_pool(pool.clone());
    store.migrate().await.unwrap();
    // As a payment does: a row that is not committed.
    let mut payment = pool.begin().await.unwrap();
    sqlx::raw_sql(ROW).execute(&mut *payment).await.unwrap();
    let within = Duration::from_secs(5);
    tokio::time::timeout(within, store.migrate()).await.expect("it waits for the payment").unwrap();
    payment.rollback().await.unwrap();
    drop(server);
}

#[tokio::test]
async fn an_index_that_is_missing_is_made_between_payments_and_holds_none_of_them_up() {
    let (server, url) = PostgresServer::shared();
    let pool = PgPool::connect(&url).await.unwrap();
    let store = PostgresStore::from_pool(pool.clone());
    store.migrate().await.unwrap();
    sqlx::raw_sql("DROP INDEX idempotency_records_unsettled").execute(&pool).await.unwrap();
    let mut payment = pool.begin().await.unwrap();
    sqlx::raw_sql(ROW).execute(&mut *payment).await.unwrap();
    let migrating = tokio::spawn(async move { store.migrate().await });
    // Until it stands in the queue, and the others behind it.
    let queued = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND mode = 'ShareLock'";
    while !sqlx::query_scalar::<_, bool>(queued).fetch_one(&pool).await.unwrap() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let other = ROW.replace("'07'", "'08'");
    let other = sqlx::raw_sql(sqlx::AssertSqlSafe(other)).execute(&pool);
    tokio::time::timeout(Duration::from_secs(3), other).await.expect("it waits").unwrap();
    assert!(!migrating.is_finished());
    payment.rollback().await.unwrap();
    migrating.await.unwrap().unwrap();
    let made = "SELECT to_regclass('idempotency_records_unsettled') IS NOT NULL";
    assert!(sqlx::query_scalar::<_, bool>(made).fetch_one(&pool).await.unwrap());
    drop(server);
}

#[tokio::test]
async fn a_file_with_its_tables_is_opened_beside_a_long_write() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("payments.db");
    let store = SqliteStore::open(&path).await.unwrap();
    store.migrate().await.unwrap();
    let mut payment = store.pool().begin_with("BEGIN IMMEDIATE").await.unwrap();
    sqlx::raw_sql("CREATE TABLE mine (a)").execute(&mut *payment).await.unwrap();
    let other = SqliteStore::open(&path).await.unwrap();
    let within = Duration::from_secs(3);
    tokio::time::timeout(within, other.migrate()).await.expect("it waits for the writer").unwrap();
    payment.rollback().await.unwrap();
}
