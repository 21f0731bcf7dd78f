//! A server with next to nothing in it but the layer: what `benches/` and other load tests measure.
//!
//! ```text
//! cargo run --release --example bench_server
//! ```
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `PORT` | 8080 | on 127.0.0.1; 0 picks a free one, which is printed |
//! | `REDIS_URL` | `redis://127.0.0.1/` | where records are kept |
//! | `STORE` | | instead of that: `memory`, `pool` (Redis through deadpool), `sqlite:PATH`, `postgres://…`; `none` is no layer at all |
//! | `WAIT` | the crate's | for how many milliseconds a request waits for one with its key |
//! | `WORKERS` | 1 | threads of the runtime; 0 for a runtime on the main thread |
//!
//! `POST /v1/payments` answers 300 bytes, `/v1/payments/large` 64 KiB, `/v1/payments/slow` 300 bytes
//! after 50 ms, `/open/payments` 300 bytes without the layer; `GET /executions` says how often handlers ran.
//! All defaults of the crate are in force; keys are one name space.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tower_idempotency::store::redis::deadpool_redis;
use tower_idempotency::store::sql::sqlx;
use tower_idempotency::{
    Config, IdempotencyLayer, MemoryStore, PostgresStore, RedisStore, Scope, SqliteStore, Store, Tx,
};

type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Clients of a pool: as many as the runtime of a small service has requests in the air.
const POOL: usize = 16;

pub(crate) static EXECUTIONS: AtomicU64 = AtomicU64::new(0);

/// The work of every handler: a JSON text of exactly this length.
pub(crate) fn receipt(length: usize) -> Bytes {
    let number = EXECUTIONS.fetch_add(1, Ordering::Relaxed);
    let mut json = Vec::with_capacity(length);
    json.extend_from_slice(
        format!(
            r#"{{"id":"pay_{number:016}","status":"succeeded","amount":1999,"currency":"EUR","pad":""#
        )
        .as_bytes(),
    );
    json.resize(length - 2, b'x');
    json.extend_from_slice(b"\"}");
    json.into()
}

fn created(body: Bytes) -> Response {
    let json = HeaderValue::from_static("application/json");
    (StatusCode::CREATED, [(header::CONTENT_TYPE, json)], body).into_response()
}

async fn pay(_order: Bytes) -> Response {
    created(receipt(300))
}

async fn pay_large(_order: Bytes) -> Response {
    created(receipt(65_536))
}

async fn pay_slowly(_order: Bytes) -> Response {
    tokio::time::sleep(Duration::from_millis(50)).await;
    created(receipt(300))
}

fn routes() -> Router {
    Router::new()
        .route("/v1/payments", post(pay))
        .route("/v1/payments/large", post(pay_large))
        .route("/v1/payments/slow", post(pay_slowly))
}

/// The same, with one row a payment in the transaction of the key.
macro_rules! ledger_routes {
    ($database:ty, $insert:literal) => {{
        async fn pay(tx: Tx<$database>, _order: Bytes) -> Response {
            let mut tx = tx;
            let receipt = receipt(300);
            let row = sqlx::query($insert).bind(1999_i64).bind(&receipt[..]);
            match row.execute(&mut tx).await {
                Ok(_) => created(receipt),
                Err(error) => {
                    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
                }
            }
        }
        Router::new().route("/v1/payments", post(pay))
    }};
}

fn protected(routes: Router, store: impl Store) -> Fallible<Router> {
    let mut config = Config::builder().scope(Scope::global());
    if let Ok(wait) = std::env::var("WAIT") {
        config = config.wait(Duration::from_millis(wait.parse()?));
    }
    Ok(routes.layer(IdempotencyLayer::new(config.build()?, store)))
}

pub(crate) async fn app(store: &str, redis_url: &str) -> Fallible<Router> {
    match store {
        "" => protected(routes(), RedisStore::connect(redis_url).await?),
        "none" => Ok(routes()),
        "memory" => {
            // As many records as a benchmark makes, not as many as a service should keep here.
            let store = MemoryStore::builder().max_records(4_000_000).max_bytes(8 << 30).build()?;
            protected(routes(), store)
        }
        "pool" => {
            let manager = deadpool_redis::Manager::new(redis_url)?;
            let pool = deadpool_redis::Pool::builder(manager).max_size(POOL).build()?;
            protected(routes(), RedisStore::from_pool(pool))
        }
        sqlite if sqlite.starts_with("sqlite:") => {
            let store = SqliteStore::open(&sqlite["sqlite:".len()..]).await?;
            store.migrate().await?;
            sqlx::query("CREATE TABLE IF NOT EXISTS payments (amount INTEGER NOT NULL, receipt BLOB NOT NULL)")
                .execute(store.pool())
                .await?;
            let insert = ledger_routes!(
                sqlx::Sqlite,
                "INSERT INTO payments (amount, receipt) VALUES ($1, $2)"
            );
            protected(insert, store)
        }
        postgres => {
            let store = PostgresStore::connect(postgres).await?;
            store.migrate().await?;
            sqlx::query("CREATE TABLE IF NOT EXISTS payments (amount BIGINT NOT NULL, receipt BYTEA NOT NULL)")
                .execute(store.pool())
                .await?;
            let insert = ledger_routes!(
                sqlx::Postgres,
                "INSERT INTO payments (amount, receipt) VALUES ($1, $2)"
            );
            protected(insert, store)
        }
    }
}

async fn serve() -> Fallible<()> {
    let port = std::env::var("PORT").unwrap_or_else(|_| "8080".to_owned());
    let open = Router::new().route("/open/payments", post(pay));
    let executions = get(|| async { EXECUTIONS.load(Ordering::Relaxed).to_string() });
    let store = std::env::var("STORE").unwrap_or_default();
    let redis_url = std::env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1/".to_owned());
    let app = app(&store, &redis_url).await?.merge(open).route("/executions", executions);
    let listener = tokio::net::TcpListener::bind(format!("127.0.0.1:{port}")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}

pub(crate) fn main() -> Fallible<()> {
    let workers: usize = std::env::var("WORKERS").map_or(Ok(1), |text| text.parse())?;
    let mut builder = match workers {
        0 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if workers > 0 {
        builder.worker_threads(workers);
    }
    // Within a task, as a service's main future is behind `#[tokio::main]` only in part: tasks are cheaper
    // to wake than the future of `block_on`.
    builder.enable_all().build()?.block_on(async { tokio::spawn(serve()).await? })
}
