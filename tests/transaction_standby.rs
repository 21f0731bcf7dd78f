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
use tower_idempotency::{
    Config, ConfigBuilder, IdempotencyLayer, PostgresLeaseStore, PostgresStore, Scope, Store,
    StoreErrorKind,
};

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
    pay_and(layer, "k", "SELECT 1").await
}

/// Pays, and says this too in its transaction.
async fn pay_and(layer: &IdempotencyLayer, key: &str, also: &str) -> (u16, bool) {
    let also = also.to_owned();
    let handler = service_fn(move |request: Request<Full<Bytes>>| {
        let also = sqlx::AssertSqlSafe(also.clone());
        async move {
            let mut tx = Tx::<Postgres>::take(request.extensions()).unwrap();
            sqlx::raw_sql(also).execute(&mut tx).await.unwrap();
            let paid = sqlx::query("INSERT INTO effects VALUES (1)").execute(&mut tx).await;
            let mut response = Response::new(Full::<Bytes>::default());
            *response.status_mut() = match paid {
                Ok(_) => StatusCode::CREATED,
                Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
            };
            Ok::<_, Infallible>(response)
        }
    });
    let request = Request::post("/pay").header("idempotency-key", key).body(Full::default());
    let answer = layer.layer(handler).oneshot(request.unwrap()).await.unwrap();
    (answer.status().as_u16(), answer.headers().contains_key("idempotent-replayed"))
}

fn config() -> ConfigBuilder {
    Config::builder().scope(Scope::global())
}

/// A primary whose COMMITs wait for its standby, and the pool on it.
async fn synchronous() -> (PostgresServer, PostgresServer, PgPool) {
    let primary = PostgresServer::start();
    let pool = prepare(&primary).await;
    let relay = Relay::to(primary.port()).await;
    let standby = primary.standby_through(relay.port());
    primary.psql("ALTER SYSTEM SET synchronous_standby_names = '*'");
    primary.psql("SELECT pg_reload_conf()");
    let sync = "SELECT COUNT(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
    until("a synchronous standby", async || primary.psql(sync) == "1").await;
    (primary, standby, pool)
}

async fn until(what: &str, mut reached: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !reached().await {
        assert!(Instant::now() < end, "{what}: not within 20 seconds");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Backends whose COMMIT waits for the standby.
fn waiting(primary: &PostgresServer) -> String {
    primary.psql("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
}

// ---- D9: somebody ends the wait, and the server says that it is done

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_wait_for_the_standby_is_cancelled_is_no_success() {
    for end in ["pg_cancel_backend", "pg_terminate_backend"] {
        let (primary, standby, pool) = synchronous().await;
        let store = PostgresStore::from_pool(self::pool(&primary).await);
        let layer = IdempotencyLayer::new(config().wait(Duration::ZERO).build().unwrap(), store);
        standby.freeze();
        let paying = {
            let layer = layer.clone();
            tokio::spawn(async move { pay(&layer).await })
        };
        until("the wait for the standby", async || !waiting(&primary).is_empty()).await;
        let backend = waiting(&primary);
        assert_eq!(primary.psql(&format!("SELECT {end}({backend})")), "t");
        // What it wrote is there, and would not outlive a failover.
        until("the local commit", async || both(&pool).await == (1, 1)).await;
        assert_eq!(paying.await.unwrap(), (503, false), "{end}: the standby has nothing");
        standby.thaw();
        let mut told = pay(&layer).await;
        until("the answer", async || {
            told = pay(&layer).await;
            told.0 != 409
        })
        .await;
        assert_eq!(told, (201, true), "{end}");
        assert_eq!(both(&self::pool(&standby).await).await, (1, 1), "now the standby has it");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_handlers_set_hides_no_cancelled_wait_for_the_standby() {
    const QUIET: &str = "SET client_min_messages = error";
    // Said by the payment's own handler, or by an earlier one on the same connection.
    for (earlier, own) in [("SELECT 1", QUIET), (QUIET, "SELECT 1")] {
        let (primary, standby, pool) = synchronous().await;
        // A COMMIT that is slow is asked after on a second connection.
        let (mut layer, mut paid) = (None, 0);
        until("a payment on the only connection", async || {
            let store = PostgresStore::connect(&primary.url()).await.unwrap();
            let made = IdempotencyLayer::new(config().build().unwrap(), store.clone());
            paid += 1;
            assert_eq!(pay_and(&made, &format!("earlier-{paid}"), earlier).await, (201, false));
            until("all connections", async || store.pool().num_idle() > 0).await;
            layer = Some(made);
            store.pool().size() == 1
        })
        .await;
        let layer = layer.unwrap();
        standby.freeze();
        let paying = {
            let layer = layer.clone();
            tokio::spawn(async move { pay_and(&layer, "k", own).await })
        };
        until("the wait for the standby", async || !waiting(&primary).is_empty()).await;
        let backend = waiting(&primary);
        assert_eq!(primary.psql(&format!("SELECT pg_cancel_backend({backend})")), "t");
        until("the local commit", async || both(&pool).await == (paid + 1, paid + 1)).await;
        assert_eq!(
            paying.await.unwrap(),
            (503, false),
            "{earlier}, {own}: the standby has nothing"
        );
        standby.thaw();
    }
}

// ---- D4: whoever sent the COMMIT is gone

const DATABASE: &str = "TEST_PAYS_WITH_A_STANDBY";

/// No test by itself.
#[tokio::test]
async fn another_process_pays_when_it_is_told_to() {
    let Ok(url) = std::env::var(DATABASE) else { return };
    let pool = PgPoolOptions::new().max_connections(2).connect(&url).await.unwrap();
    let store = PostgresStore::from_pool(pool);
    pay(&IdempotencyLayer::new(config().build().unwrap(), store)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_goes_on_when_its_process_is_killed_and_nobody_runs_meanwhile() {
    let (primary, standby, pool) = synchronous().await;
    standby.freeze();
    let mut owner = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "another_process_pays_when_it_is_told_to"])
        .env(DATABASE, primary.url())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    until("the wait for the standby", async || !waiting(&primary).is_empty()).await;
    owner.kill().unwrap();
    owner.wait().unwrap();
    let other = PostgresStore::from_pool(self::pool(&primary).await);
    let other = IdempotencyLayer::new(config().wait(Duration::ZERO).build().unwrap(), other);
    for _ in 0..10 {
        assert_eq!(pay(&other).await, (409, false));
    }
    assert!(!waiting(&primary).is_empty(), "the backend is an orphan, and goes on");
    standby.thaw();
    let mut told = (409, false);
    until("the orphan's answer", async || {
        told = pay(&other).await;
        told.0 != 409
    })
    .await;
    assert_eq!(told, (201, true), "it is the orphan's");
    assert_eq!(both(&pool).await, (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_waits_for_its_standby_is_no_success_until_the_standby_has_it() {
    let (primary, standby, pool) = synchronous().await;
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_standby_is_not_ready_until_it_is_promoted() {
    let primary = PostgresServer::start();
    let pool_on_primary = prepare(&primary).await;
    let standby = primary.standby_through(primary.port());
    let copy = pool(&standby).await;
    let stores: [Box<dyn Store>; 2] = [
        Box::new(PostgresStore::from_pool(copy.clone())),
        Box::new(PostgresLeaseStore::from_pool(copy)),
    ];
    PostgresStore::from_pool(pool_on_primary).ready().await.unwrap();
    for store in &stores {
        let error = store.ready().await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
        let reason = error.to_string();
        assert!(reason.contains("a standby") && reason.contains("primary"), "{reason}");
    }
    standby.psql("SELECT pg_promote()");
    for store in &stores {
        until("it is promoted", async || store.ready().await.is_ok()).await;
    }
}
