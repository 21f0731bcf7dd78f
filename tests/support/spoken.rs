//! Services around transactional stores whose messages to PostgreSQL are written down.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use http::{Request, Response};
use http_body_util::Full;
use sqlx::Postgres;
use sqlx::postgres::{PgPool, PgPoolOptions};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::store::sql::{Backend, Tx, sqlx};
use tower_idempotency::{Config, Execution, IdempotencyLayer, PostgresStore, Scope, Store};

use crate::support::frontend::Frontend;
use crate::support::postgres::PostgresServer;

pub(crate) const EFFECTS: &str = "CREATE TABLE effects (id INTEGER)";
pub(crate) const PAY: &str = "INSERT INTO effects VALUES (1)";
pub(crate) const BOUNDED: Duration = Duration::from_secs(20);

pub(crate) const RECORDS: &str = "SELECT COUNT(*) FROM idempotency_records";
pub(crate) const LOOK: &str = "SELECT floor(";
pub(crate) const CLOSE: &str = "UPDATE idempotency_records";
pub(crate) const CLAIM: &str =
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = 100; EXECUTE tower_";

pub(crate) type Send =
    Arc<dyn Fn(&str) -> BoxFuture<'static, (u16, bool)> + std::marker::Send + Sync>;

/// One process around whose handler a store stands. Answers with status and "is a replay".
pub(crate) fn serve<DB, H, F>(store: impl Store, handler: H) -> Send
where
    DB: Backend,
    H: Fn(Tx<DB>, String, u64) -> F + Clone + std::marker::Send + Sync + 'static,
    F: Future<Output = u16> + std::marker::Send + 'static,
{
    let handler = service_fn(move |request: Request<Full<Bytes>>| {
        let key = request.headers()["idempotency-key"].to_str().unwrap().to_owned();
        let fence = request.extensions().get::<Execution>().unwrap().fence().number();
        let handling = handler(Tx::take(request.extensions()).unwrap(), key, fence);
        drop(request);
        async move {
            let status = handling.await;
            let answer = Response::builder().status(status).body(Full::<Bytes>::default());
            Ok::<_, Infallible>(answer.unwrap())
        }
    });
    let config = Config::builder().scope(Scope::global()).build().unwrap();
    let service = IdempotencyLayer::new(config, store).layer(handler);
    Arc::new(move |key: &str| {
        let request = Request::post("/pay").header("idempotency-key", key);
        let request = request.body(Full::default()).unwrap();
        let service = service.clone();
        async move {
            let answer = tokio::time::timeout(BOUNDED, service.oneshot(request)).await;
            let answer = answer.expect("a bound").unwrap();
            (answer.status().as_u16(), answer.headers().contains_key("idempotent-replayed"))
        }
        .boxed()
    })
}

/// Pays; a key that begins so is declined.
pub(crate) async fn pay(mut tx: Tx<Postgres>, key: String, _: u64) -> u16 {
    match sqlx::query(PAY).execute(&mut tx).await {
        Ok(_) if key.starts_with("declined") => 402,
        Ok(_) => 201,
        Err(_) => 500,
    }
}

pub(crate) struct World {
    pub(crate) server: Arc<PostgresServer>,
    pub(crate) url: String,
    pub(crate) watch: PgPool,
    pub(crate) way: Frontend,
    pub(crate) by_way: String,
}

impl World {
    pub(crate) async fn new() -> Self {
        let (server, url) = PostgresServer::shared();
        let watch = PgPoolOptions::new().max_connections(3).connect(&url).await.unwrap();
        PostgresStore::from_pool(watch.clone()).migrate().await.unwrap();
        sqlx::raw_sql(EFFECTS).execute(&watch).await.unwrap();
        let way = Frontend::to(server.port()).await;
        let by_way = url.replace(&format!(":{}/", server.port()), &format!(":{}/", way.port()));
        Self { server, url, watch, way, by_way }
    }

    pub(crate) async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.watch).await.unwrap()
    }

    pub(crate) async fn effects(&self) -> i64 {
        self.count("SELECT COUNT(*) FROM effects").await
    }

    pub(crate) async fn open_transactions(&self) -> i64 {
        self.count(
            "SELECT COUNT(*) FROM pg_stat_activity
              WHERE state LIKE 'idle in transaction%' AND datname = current_database()",
        )
        .await
    }
}

pub(crate) async fn all_back(pool: &PgPool) {
    let end = Instant::now() + BOUNDED;
    while pool.num_idle() < pool.size() as usize {
        assert!(Instant::now() < end, "a connection did not come back");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// How often a request may say more: a claim that took long on a busy machine writes its time anew, and a
/// connection that was idle for long is asked if it is alive.
pub(crate) const TRIES: usize = 50;

pub(crate) fn fits(said: &[String], expected: &[&str]) -> bool {
    said.len() == expected.len()
        && said.iter().zip(expected).all(|(said, expected)| said.starts_with(expected))
}
