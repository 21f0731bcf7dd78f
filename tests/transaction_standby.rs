//! Transactions of a primary with a standby: what a synchronous one adds, and what an asynchronous one
//! takes away. (Fault matrix, D4, D8 and D9.)

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::convert::Infallible;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use sqlx::Postgres;
use sqlx::postgres::{PgPool, PgPoolOptions};
use support::postgres::PostgresServer;
use support::relay::Relay;
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::store::sql::{Tx, sqlx};
use tower_idempotency::{Config, ConfigBuilder, IdempotencyLayer, PostgresStore, Scope};

async fn pool(server: &PostgresServer) -> PgPool {
    PgPoolOptions::new().max_connections(5).connect(&server.url()).await.unwrap()
}

async fn prepare(server: &PostgresServer) -> PgPool {
    let pool = pool(server).await;
    PostgresStore::from_pool(pool.clone()).migrate().await.unwrap();
    sqlx::raw_sql("CREATE TABLE effects (id INTEGER)").execute(&pool).await.unwrap();
    pool
}

async fn count(pool: &PgPool, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
}

async fn both(pool: &PgPool) -> (i64, i64) {
    let effects = count(pool, "SELECT COUNT(*) FROM effects").await;
    (effects, count(pool, "SELECT COUNT(*) FROM idempotency_records").await)
}

/// Pays under one key: status, and if it is a replay.
async fn pay(layer: &IdempotencyLayer) -> (u16, bool) {
    let handler = service_fn(|request: Request<Full<Bytes>>| async move {
        let mut tx = Tx::<Postgres>::take(request.extensions()).unwrap();
        let paid = sqlx::query("INSERT INTO effects VALUES (1)").execute(&mut tx).await;
        let mut response = Response::new(Full::<Bytes>::default());
        *response.status_mut() = match paid {
            Ok(_) => StatusCode::CREATED,
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Ok::<_, Infallible>(response)
    });
    let request = Request::post("/pay").header("idempotency-key", "k").body(Full::default());
    let answer = layer.layer(handler).oneshot(request.unwrap()).await.unwrap();
    (answer.status().as_u16(), answer.headers().contains_key("idempotent-replayed"))
}

fn config() -> ConfigBuilder {
    Config::builder().scope(Scope::global())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_waits_for_its_standby_is_no_success_until_the_standby_has_it() {
    let primary = PostgresServer::start();
    let pool = prepare(&primary).await;
    let relay = Relay::to(primary.port()).await;
    let standby = primary.standby_through(relay.port());
    primary.psql("ALTER SYSTEM SET synchronous_standby_names = '*'");
    primary.psql("SELECT pg_reload_conf()");
    let end = Instant::now() + Duration::from_secs(20);
    while primary.psql("SELECT COUNT(*) FROM pg_stat_replication WHERE sync_state = 'sync'") != "1"
    {
        assert!(Instant::now() < end, "the standby does not connect");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // The limit of a statement must not end the wait of the COMMIT: that would be told as a success.
    let store =
        PostgresStore::builder(pool.clone()).statement_timeout(Duration::from_millis(300)).build();
    let hasty = config()
        .store_call_timeout(Duration::from_millis(500))
        .claim_within(Duration::from_millis(500))
        .complete_within(Duration::from_millis(900))
        .wait(Duration::ZERO)
        .build()
        .unwrap();
    let layer = IdempotencyLayer::new(hasty, store);
    standby.freeze();
    assert_eq!(pay(&layer).await, (503, false));
    // Another process asks meanwhile: the COMMIT is still going on.
    let other = PostgresStore::from_pool(self::pool(&primary).await);
    let other = IdempotencyLayer::new(config().wait(Duration::ZERO).build().unwrap(), other);
    assert_eq!(pay(&other).await, (409, false));
    standby.thaw();
    let end = Instant::now() + Duration::from_secs(20);
    let mut told = pay(&other).await;
    while told.0 == 409 {
        assert!(Instant::now() < end, "{told:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
        told = pay(&other).await;
    }
    assert_eq!(told, (201, true));
    assert_eq!(both(&pool).await, (1, 1));
    let copy = self::pool(&standby).await;
    assert_eq!(both(&copy).await, (1, 1), "and the standby has it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_that_loses_a_commit_loses_key_and_effect_together() {
    let mut primary = PostgresServer::start();
    let pool = prepare(&primary).await;
    let relay = Relay::to(primary.port()).await;
    let standby = primary.standby_through(relay.port());
    let end = Instant::now() + Duration::from_secs(20);
    while primary.psql("SELECT COUNT(*) FROM pg_stat_replication WHERE state = 'streaming'") != "1"
    {
        assert!(Instant::now() < end, "the standby does not connect");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // From here on nothing arrives there, and nobody waits for it.
    relay.swallow_open_connections();
    let layer =
        IdempotencyLayer::new(config().build().unwrap(), PostgresStore::from_pool(pool.clone()));
    assert_eq!(pay(&layer).await, (201, false));
    assert_eq!(both(&pool).await, (1, 1));
    primary.stop_at_once();
    standby.psql("SELECT pg_promote()");
    let survivor = self::pool(&standby).await;
    assert_eq!(both(&survivor).await, (0, 0), "neither is there without the other");
    let layer = IdempotencyLayer::new(
        config().build().unwrap(),
        PostgresStore::from_pool(survivor.clone()),
    );
    assert_eq!(pay(&layer).await, (201, false), "it runs again: one effect in what survives");
    assert_eq!(both(&survivor).await, (1, 1));
}
