//! What the PostgreSQL stores say of a table that is locked as a whole, which is no twin, and of a bad address.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

mod support;

use std::error::Error as _;
use std::time::{Duration, Instant};

use sqlx::{AssertSqlSafe, PgPool, Postgres, Transaction};
use support::postgres::PostgresServer;
use support::store::{claim, new_key};
use tower_idempotency::record::ClaimOutcome;
use tower_idempotency::store::sql::sqlx;
use tower_idempotency::{Lease, PostgresStore, SqliteStore, StorageKey, Store, StoreErrorKind};

async fn locked<'a>(pool: &'a PgPool, mode: &str) -> Transaction<'a, Postgres> {
    let mut lock = pool.begin().await.unwrap();
    let text = format!("LOCK TABLE idempotency_records IN {mode} MODE");
    sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut *lock).await.unwrap();
    lock
}

async fn granted(store: &PostgresStore, key: StorageKey) -> Lease {
    match store.claim(key, &claim()).await.unwrap() {
        ClaimOutcome::Acquired(lease) => lease,
        other => panic!("expected a grant, got {other:?}"),
    }
}

async fn is_no_twin(store: &PostgresStore, key: StorageKey) {
    let asked = Instant::now();
    let error = store.claim(key, &claim()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    let told = error.source().unwrap().to_string();
    assert!(told.contains("idempotency_records is locked as a whole"), "{told}");
    assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
}

async fn is_a_twin(store: &PostgresStore, key: StorageKey) {
    let outcome = store.claim(key, &claim()).await.unwrap();
    assert!(matches!(outcome, ClaimOutcome::InFlight { .. }), "{outcome:?}");
}

#[tokio::test]
async fn a_lock_of_the_whole_table_is_told_from_a_twin() {
    let (_server, url) = PostgresServer::shared();
    let store = PostgresStore::connect(&url).await.unwrap();
    let other = PostgresStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    let watch = PgPool::connect(&url).await.unwrap();
    // As CREATE INDEX takes it: what stands is read, and nothing is claimed. On a connection that has claimed nothing
    // yet, and on one that has.
    for _ in 0..2 {
        let lock = locked(&watch, "SHARE").await;
        is_no_twin(&store, new_key()).await;
        lock.rollback().await.unwrap();
        drop(granted(&store, new_key()).await);
    }

    // A twin in another process is one; so it is with a lock beside it that keeps nobody out.
    let key = new_key();
    let lease = granted(&other, key).await;
    is_a_twin(&store, key).await;
    let lock = locked(&watch, "ROW EXCLUSIVE").await;
    is_a_twin(&store, key).await;
    lock.rollback().await.unwrap();

    // One that waits for that payment to end keeps all others out.
    let mut waiting = watch.acquire().await.unwrap();
    let text = "SET lock_timeout = 5000; LOCK TABLE idempotency_records IN SHARE MODE";
    let begin = sqlx::raw_sql("BEGIN").execute(&mut *waiting).await;
    begin.unwrap();
    let waiting = tokio::spawn(async move {
        sqlx::raw_sql(text).execute(&mut *waiting).await.unwrap();
        sqlx::raw_sql("ROLLBACK").execute(&mut *waiting).await.unwrap();
    });
    let count = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'ShareLock'";
    while sqlx::query_scalar::<_, i64>(count).fetch_one(&watch).await.unwrap() == 0 {
        tokio::task::yield_now().await;
    }
    is_no_twin(&store, new_key()).await;
    drop(lease);
    waiting.await.unwrap();
    drop(granted(&store, new_key()).await);
}

#[tokio::test]
async fn a_blank_around_an_address_is_told() {
    for address in [" postgres://u:s3cret@h/d", "postgres://u:s3cret@h/d\r\n"] {
        let told = PostgresStore::connect(address).await.unwrap_err().to_string();
        assert!(told.contains("a blank or a line end") && !told.contains("s3cret"), "{told}");
    }
}

#[tokio::test]
async fn a_table_that_nobody_has_made_is_told_with_what_makes_it() {
    let (_server, url) = PostgresServer::shared();
    let postgres = PostgresStore::connect(&url).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let sqlite = SqliteStore::open(folder.path().join("test.db")).await.unwrap();
    let made = async |store: &dyn Store, migrated: bool| {
        for said in [store.ready().await, store.claim(new_key(), &claim()).await.map(drop)] {
            match said {
                Ok(()) => assert!(migrated, "{store:?}"),
                Err(error) => {
                    let why = error.reason().unwrap().to_string();
                    assert!(!migrated && why.contains("migrate()"), "{why}");
                    assert!(why.contains("idempotency_records"), "{why}");
                }
            }
        }
    };
    made(&postgres, false).await;
    made(&sqlite, false).await;
    postgres.migrate().await.unwrap();
    sqlite.migrate().await.unwrap();
    made(&postgres, true).await;
    made(&sqlite, true).await;
}
