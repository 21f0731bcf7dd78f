//! The sweep takes small parts by the index, however much there is, while claims go on. (B96.)

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, Response};
use http_body_util::Full;
use sqlx::AssertSqlSafe;
use sqlx::postgres::{PgPool, PgPoolOptions};
use support::postgres::PostgresServer;
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::store::sql::sqlx;
use tower_idempotency::{Config, IdempotencyLayer, PostgresStore, Scope};

const RECORDS: &str = "SELECT COUNT(*) FROM idempotency_records";

async fn pool(url: &str) -> PgPool {
    PgPoolOptions::new().max_connections(5).connect(url).await.unwrap()
}

async fn database() -> (Arc<PostgresServer>, String, PgPool) {
    let (server, url) = PostgresServer::shared();
    let pool = pool(&url).await;
    PostgresStore::from_pool(pool.clone()).migrate().await.unwrap();
    (server, url, pool)
}

async fn count(pool: &PgPool, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
}

async fn until(what: &str, mut reached: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !reached().await {
        assert!(Instant::now() < end, "{what}: not within 20 seconds");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn fill(pool: &PgPool, rows: u32, expires_at: &str) {
    let fill = format!(
        "INSERT INTO idempotency_records (storage_key, state, expires_at, record)
         SELECT substr(sha256(n::text::bytea), 1, 24), 4, {expires_at},
                '\\x0104'::bytea || substr(sha256('x'), 1, 32) || sha256('y') || sha256('z')
           FROM generate_series(1, {rows}) AS n"
    );
    sqlx::query(AssertSqlSafe(fill)).execute(pool).await.unwrap();
    sqlx::raw_sql("VACUUM ANALYZE idempotency_records").execute(pool).await.unwrap();
}

const READ_IN_SEQUENCE: &str = "SELECT COALESCE(SUM(seq_tup_read), 0)::bigint
      FROM pg_stat_user_tables WHERE relname = 'idempotency_records'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweep_over_many_rows_takes_its_part_by_the_index_while_claims_go_on() {
    const EXPIRED: u32 = 50_000;
    let (_server, url, watch) = database().await;
    fill(&watch, EXPIRED, "n").await;
    let swept_by = pool(&url).await;
    let sweeper = PostgresStore::from_pool(swept_by.clone());
    let sweeping = tokio::spawn(async move {
        let mut parts = Vec::new();
        for _ in 0..20 {
            parts.push(sweeper.sweep(500).await.unwrap());
        }
        parts
    });
    let config = Config::builder().scope(Scope::global()).build().unwrap();
    let layer = IdempotencyLayer::new(config, PostgresStore::from_pool(watch.clone()));
    let service = layer.layer(service_fn(|_: Request<Full<Bytes>>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    }));
    let claims = (0..40).map(|n| {
        let request = Request::post("/pay").header("idempotency-key", format!("k{n}"));
        let claim = service.clone().oneshot(request.body(Full::default()).unwrap());
        async move { claim.await.unwrap().status().as_u16() }
    });
    let told = join_all(claims).await;
    assert!(told.iter().all(|&status| status == 200), "{told:?}");
    let parts = sweeping.await.unwrap();
    assert!(parts.iter().all(|&part| part == 500), "each takes what it was told: {parts:?}");
    // A connection tells what it has read when it ends, at the latest.
    swept_by.close().await;
    let deleted = "SELECT COALESCE(SUM(n_tup_del), 0)::bigint FROM pg_stat_user_tables
                    WHERE relname = 'idempotency_records'";
    until("the server's count", async || count(&watch, deleted).await == 10_000).await;
    let read = count(&watch, READ_IN_SEQUENCE).await;
    println!("B96: 20 sweeps of 500 among {EXPIRED} expired rows read {read} in sequence");
    assert_eq!(read, 0, "a sweep reads the whole table");
    assert_eq!(count(&watch, RECORDS).await, i64::from(EXPIRED) - 20 * 500 + 40);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweep_that_finds_nothing_reads_nothing_however_many_rows_live() {
    let (_server, url, watch) = database().await;
    fill(&watch, 20_000, "9000000000000000 + n").await;
    let swept_by = pool(&url).await;
    let sweeper = PostgresStore::from_pool(swept_by.clone());
    for _ in 0..5 {
        assert_eq!(sweeper.sweep(500).await.unwrap(), 0);
    }
    swept_by.close().await;
    let looks = "SELECT idx_scan FROM pg_stat_user_indexes
                  WHERE indexrelname = 'idempotency_records_expires_at'";
    until("the server's count", async || count(&watch, looks).await >= 5).await;
    let by_index = "SELECT idx_tup_read FROM pg_stat_user_indexes
                     WHERE indexrelname = 'idempotency_records_expires_at'";
    let read = count(&watch, by_index).await + count(&watch, READ_IN_SEQUENCE).await;
    println!("B96: 5 sweeps among 20000 live rows read {read} of them");
    assert!(read < 10, "a sweep reads what lives: {read}");
    assert_eq!(count(&watch, RECORDS).await, 20_000);
}
