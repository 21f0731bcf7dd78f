//! The floor: the least that an idempotent endpoint can do, written by hand.
//!
//! In Redis one script that claims and one that stores the answer if the claim is still its own, over one
//! shared connection; in a database one transaction with an insert that does nothing on a conflict.
//! There is no fingerprint, no lease, no waiting and no error handling worth the name.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use axum::routing::{get, post};
use tower_idempotency::store::redis::redis::aio::MultiplexedConnection;
use tower_idempotency::store::redis::redis::{Client, Cmd, Value};
use tower_idempotency::store::sql::sqlx::{self, PgPool, SqlitePool};

use crate::server::{EXECUTIONS, receipt};

type Fallible<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const CLAIM: &str = "return redis.call('SET', KEYS[1], ARGV[1], 'NX', 'GET', 'PX', ARGV[2])";
const COMPLETE: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then \
                        redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3]) return 1 end return 0";
const DAY: u64 = 86_400_000;
/// The first byte of a stored answer; a claim begins with another one.
const DONE: u8 = 1;
static JSON: HeaderValue = HeaderValue::from_static("application/json");

static TOKENS: AtomicU64 = AtomicU64::new(1);

fn answer(status: u16, body: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = StatusCode::from_u16(status).expect("a status");
    response.headers_mut().insert(header::CONTENT_TYPE, JSON.clone());
    response
}

async fn work<const LENGTH: usize, const MILLIS: u64>() -> Bytes {
    if MILLIS > 0 {
        tokio::time::sleep(std::time::Duration::from_millis(MILLIS)).await;
    }
    receipt(LENGTH)
}

async fn plain<const LENGTH: usize, const MILLIS: u64>(_order: Bytes) -> Response<Body> {
    answer(201, work::<LENGTH, MILLIS>().await)
}

#[derive(Clone)]
struct Redis {
    connection: MultiplexedConnection,
    claim: Arc<str>,
    complete: Arc<str>,
}

fn stored(status: u16, body: &[u8]) -> Vec<u8> {
    let json = JSON.as_bytes();
    let mut bytes = Vec::with_capacity(4 + json.len() + body.len());
    bytes.push(DONE);
    bytes.extend_from_slice(&status.to_le_bytes());
    bytes.push(json.len() as u8);
    bytes.extend_from_slice(json);
    bytes.extend_from_slice(body);
    bytes
}

async fn pay<const LENGTH: usize, const MILLIS: u64>(
    State(redis): State<Redis>,
    headers: HeaderMap,
    _order: Bytes,
) -> Response<Body> {
    let Some(key) = headers.get("idempotency-key") else { return answer(400, Bytes::new()) };
    let key = [b"i:", key.as_bytes()].concat();
    let mut token = [0; 9];
    token[1..].copy_from_slice(&TOKENS.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    let mut connection = redis.connection.clone();
    let mut claim = Cmd::new();
    claim.arg("EVALSHA").arg(&*redis.claim).arg(1).arg(&key).arg(&token).arg(DAY);
    match claim.query_async(&mut connection).await {
        Ok(Value::Nil) => {}
        Ok(Value::BulkString(found)) if found.first() == Some(&DONE) => {
            let status = u16::from_le_bytes([found[1], found[2]]);
            let body = 4 + usize::from(found[3]);
            return answer(status, Bytes::from(found).slice(body..));
        }
        Ok(_) => return answer(409, Bytes::from_static(b"{}")),
        Err(error) => return answer(500, error.to_string().into()),
    }
    let body = work::<LENGTH, MILLIS>().await;
    let mut complete = Cmd::new();
    complete.arg("EVALSHA").arg(&*redis.complete).arg(1).arg(&key).arg(&token);
    complete.arg(stored(201, &body)).arg(DAY);
    match complete.query_async::<i64>(&mut connection).await {
        Ok(1) => answer(201, body),
        _ => answer(500, Bytes::new()),
    }
}

async fn redis_routes(url: &str) -> Fallible<Router> {
    let mut connection = Client::open(url)?.get_multiplexed_async_connection().await?;
    let mut load = async |text: &str| {
        let mut script = Cmd::new();
        script.arg("SCRIPT").arg("LOAD").arg(text);
        script.query_async::<String>(&mut connection).await
    };
    let (claim, complete) = (load(CLAIM).await?.into(), load(COMPLETE).await?.into());
    Ok(Router::new()
        .route("/v1/payments", post(pay::<300, 0>))
        .route("/v1/payments/large", post(pay::<65_536, 0>))
        .route("/v1/payments/slow", post(pay::<300, 50>))
        .with_state(Redis { connection, claim, complete }))
}

/// One transaction: the key if it is new, a row, the answer.
macro_rules! transaction {
    ($pool:ty, $claim:literal, $insert:literal, $complete:literal, $find:literal) => {{
        async fn pay(
            State(pool): State<$pool>,
            headers: HeaderMap,
            _order: Bytes,
        ) -> Response<Body> {
            let key = headers.get("idempotency-key").map(|key| key.as_bytes().to_vec());
            let work = async {
                let mut tx = pool.begin().await?;
                let claimed = sqlx::query($claim).bind(&key).execute(&mut *tx).await?;
                if claimed.rows_affected() == 0 {
                    let found = sqlx::query_scalar($find).bind(&key).fetch_one(&mut *tx).await?;
                    return Ok::<Vec<u8>, sqlx::Error>(found);
                }
                let receipt = receipt(300).to_vec();
                sqlx::query($insert).bind(1999_i64).bind(&receipt).execute(&mut *tx).await?;
                sqlx::query($complete).bind(&key).bind(&receipt).execute(&mut *tx).await?;
                tx.commit().await?;
                Ok(receipt)
            };
            match work.await {
                Ok(receipt) => answer(201, receipt.into()),
                Err(error) => answer(500, error.to_string().into()),
            }
        }
        post(pay)
    }};
}

pub(crate) async fn app(store: &str, redis_url: &str) -> Fallible<Router> {
    match store {
        "" => redis_routes(redis_url).await,
        "none" => Ok(Router::new()
            .route("/v1/payments", post(plain::<300, 0>))
            .route("/open/payments", post(plain::<300, 0>))),
        sqlite if sqlite.starts_with("sqlite:") => {
            use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
            let options = SqliteConnectOptions::new()
                .filename(&sqlite["sqlite:".len()..])
                .create_if_missing(true)
                .journal_mode(SqliteJournalMode::Wal);
            // SQLite has one writer; a second connection would only wait for it.
            let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options).await?;
            sqlx::raw_sql(
                "CREATE TABLE keys (key BLOB PRIMARY KEY, answer BLOB) WITHOUT ROWID;
                 CREATE TABLE payments (amount INTEGER NOT NULL, receipt BLOB NOT NULL)",
            )
            .execute(&pool)
            .await?;
            let pay = transaction!(
                SqlitePool,
                "INSERT INTO keys (key) VALUES ($1) ON CONFLICT DO NOTHING",
                "INSERT INTO payments (amount, receipt) VALUES ($1, $2)",
                "UPDATE keys SET answer = $2 WHERE key = $1",
                "SELECT answer FROM keys WHERE key = $1"
            );
            Ok(Router::new().route("/v1/payments", pay).with_state(pool))
        }
        postgres => {
            let pool = PgPool::connect(postgres).await?;
            sqlx::raw_sql(
                "CREATE TABLE IF NOT EXISTS keys (key BYTEA PRIMARY KEY, answer BYTEA);
                 CREATE TABLE IF NOT EXISTS floor_payments (amount BIGINT NOT NULL, receipt BYTEA NOT NULL)",
            )
            .execute(&pool)
            .await?;
            let pay = transaction!(
                PgPool,
                "INSERT INTO keys (key) VALUES ($1) ON CONFLICT DO NOTHING",
                "INSERT INTO floor_payments (amount, receipt) VALUES ($1, $2)",
                "UPDATE keys SET answer = $2 WHERE key = $1",
                "SELECT answer FROM keys WHERE key = $1"
            );
            Ok(Router::new().route("/v1/payments", pay).with_state(pool))
        }
    }
}

async fn serve() -> Fallible<()> {
    let executions = get(|| async { EXECUTIONS.load(Ordering::Relaxed).to_string() });
    let store = std::env::var("STORE").unwrap_or_default();
    let redis_url = std::env::var("REDIS_URL").unwrap_or_default();
    let app = app(&store, &redis_url).await?.route("/executions", executions);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}

/// Serves on one thread, as the other side does.
pub(crate) fn main() -> Fallible<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async { tokio::spawn(serve()).await? })
}
