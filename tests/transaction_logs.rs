//! What the log says of transactions that wait, fail or are undone: the cause, in words, once.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "support/log.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod log;
#[path = "support/postgres.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod postgres;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use log::Log;
use sqlx::{Executor as _, Postgres, Sqlite};
use tokio::sync::Semaphore;
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::store::sql::{Tx, sqlx};
use tower_idempotency::{Config, IdempotencyLayer, Outcome, PostgresStore, Scope, SqliteStore};
use tracing::Level;

struct Shop {
    store: SqliteStore,
    layer: IdempotencyLayer,
    _folder: tempfile::TempDir,
}

impl Shop {
    async fn open() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(folder.path().join("shop.db")).await.unwrap();
        store.migrate().await.unwrap();
        let tables = "CREATE TABLE effects (what TEXT NOT NULL);
                      CREATE TABLE names (name TEXT NOT NULL UNIQUE);
                      INSERT INTO names VALUES ('taken')";
        store.pool().execute(tables).await.unwrap();
        let config = Config::builder()
            .scope(Scope::global())
            .claim_within(Duration::from_millis(400))
            .store_call_timeout(Duration::from_millis(200));
        let layer = IdempotencyLayer::new(config.build().unwrap(), store.clone());
        Self { store, layer, _folder: folder }
    }

    /// Runs the statements one by one, whose errors are nothing to the handler, and answers with this status.
    async fn pay(&self, key: &str, statements: &'static [&'static str], status: u16) -> u16 {
        let handler = service_fn(move |request: Request<Full<Bytes>>| async move {
            let mut tx = Tx::<Sqlite>::take(request.extensions()).unwrap();
            for statement in statements {
                let _ = (&mut tx).execute(*statement).await;
            }
            let mut response = Response::new(Full::<Bytes>::default());
            *response.status_mut() = http::StatusCode::from_u16(status).unwrap();
            Ok::<_, Infallible>(response)
        });
        let request = Request::post("/pay").header("idempotency-key", key);
        let request = request.body(Full::default()).unwrap();
        let response = self.layer.layer(handler).oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        response.into_body().collect().await.unwrap();
        status
    }

    async fn effects(&self) -> i64 {
        let count = "SELECT count(*) FROM effects";
        sqlx::query_scalar(count).fetch_one(self.store.pool()).await.unwrap()
    }
}

const TAKEN: &str = "INSERT INTO names VALUES ('taken')";
const PAID: &str = "INSERT INTO effects VALUES ('paid')";
const CAUSE: &str = "UNIQUE constraint failed: names.name";

#[tokio::test]
async fn a_request_that_waited_for_a_slow_transaction_in_vain_says_so_in_the_log() {
    let (log, _guard) = Log::install(Level::INFO);
    let shop = Shop::open().await;
    let (begun, go) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let slow = {
        let (begun, go) = (Arc::clone(&begun), Arc::clone(&go));
        shop.layer.layer(service_fn(move |_: Request<Full<Bytes>>| {
            let (begun, go) = (Arc::clone(&begun), Arc::clone(&go));
            async move {
                begun.add_permits(1);
                go.acquire().await.unwrap().forget();
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }
        }))
    };
    let request = Request::post("/pay").header("idempotency-key", "slow");
    let slow = tokio::spawn(slow.oneshot(request.body(Full::default()).unwrap()));
    begun.acquire().await.unwrap().forget();
    assert_eq!(shop.pay("other", &[PAID], 201).await, 503);
    let told = log.take();
    for words in [
        "another transaction holds the database",
        "one writer at a time",
        "shorter",
        "claim_within",
        "store_call_timeout",
    ] {
        assert!(told.contains(words), "no {words:?} in\n{told}");
    }
    assert_eq!(told.matches("another transaction holds the database").count(), 1, "{told}");
    go.add_permits(1);
    assert_eq!(slow.await.unwrap().unwrap().status(), 200);
    // Nobody is blamed for what is over.
    log.take();
    assert_eq!(shop.pay("later", &[PAID], 201).await, 201);
    assert_eq!(log.take(), "");
}

#[tokio::test]
async fn a_database_that_another_process_holds_is_said_to_be_held() {
    let (log, _guard) = Log::install(Level::INFO);
    let shop = Shop::open().await;
    // A connection that the store knows nothing of, as another process has it.
    let mut other = shop.store.pool().acquire().await.unwrap();
    (&mut *other).execute("BEGIN IMMEDIATE").await.unwrap();
    assert_eq!(shop.pay("k", &[PAID], 201).await, 503);
    let told = log.take();
    assert!(told.contains("another transaction holds the database"), "{told}");
    (&mut *other).execute("ROLLBACK").await.unwrap();
}

#[tokio::test]
async fn a_failed_statement_that_the_handler_swallowed_is_logged_once_with_its_cause() {
    let (log, _guard) = Log::install(Level::INFO);
    let shop = Shop::open().await;
    // Answered as if nothing had happened, and with an error of the handler's own.
    for (key, status, told_status) in [("kept", 201, 500), ("failed", 500, 500)] {
        assert_eq!(shop.pay(key, &[PAID, TAKEN], status).await, told_status, "{key}");
        let told = log.take();
        assert_eq!(told.matches(CAUSE).count(), 1, "{key}: {told}");
        assert_eq!(told.matches("a statement failed").count(), 1, "{key}: {told}");
        assert!(told.contains("rolled back"), "{key}: {told}");
    }
    assert_eq!(shop.effects().await, 0);
    // A refusal that is stored needs no words: its writes were to be undone, and that is what it says.
    assert_eq!(shop.pay("declined", &[PAID, TAKEN], 402).await, 402);
    assert_eq!(log.take(), "");
}

#[tokio::test]
async fn the_cause_of_a_failed_statement_never_holds_what_was_written() {
    let (log, _guard) = Log::install(Level::INFO);
    let shop = Shop::open().await;
    for (key, statement, cause) in [
        ("syntax", "INSERT INTO 's3cret' 's3cret'", "the database refused it"),
        ("token", "INSERT INTO names VALUES ('s3cret", "the database refused it"),
        ("table", "INSERT INTO nowhere VALUES ('s3cret')", "no such table: nowhere"),
        ("null", "INSERT INTO names VALUES (NULL)", "NOT NULL constraint failed: names.name"),
    ] {
        // A statement per request: PAID stands there to be undone.
        let statements: &'static [&'static str] = Box::leak(Box::new([PAID, statement]));
        assert_eq!(shop.pay(key, statements, 201).await, 500, "{key}");
        let told = log.take();
        assert!(told.contains(cause), "{key}: no {cause:?} in {told}");
        assert!(!told.contains("s3cret"), "{key}: {told}");
    }
    assert_eq!(shop.effects().await, 0);
}

#[tokio::test]
async fn postgresql_is_told_by_its_constraint_and_never_by_a_value() {
    let (log, _guard) = Log::install(Level::INFO);
    let (_server, url) = postgres::PostgresServer::shared();
    let store = PostgresStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    let tables = "CREATE TABLE names (name TEXT CONSTRAINT one_name UNIQUE, age INTEGER);
                  INSERT INTO names VALUES ('s3cret', 1)";
    store.pool().execute(tables).await.unwrap();
    let config = Config::builder().scope(Scope::global()).build().unwrap();
    let layer = IdempotencyLayer::new(config, store);
    for (key, statement, cause) in [
        (
            "unique",
            "INSERT INTO names VALUES ('s3cret', 2)",
            r#""one_name" of the table "names" (code 23505)"#,
        ),
        (
            "value",
            "INSERT INTO names VALUES ('x', 's3cret')",
            "the database refused it (code 22P02)",
        ),
        (
            "table",
            "INSERT INTO nowhere VALUES ('s3cret')",
            r#"relation "nowhere" does not exist (code 42P01)"#,
        ),
    ] {
        let handler = service_fn(move |request: Request<Full<Bytes>>| async move {
            let mut tx = Tx::<Postgres>::take(request.extensions()).unwrap();
            let _ = (&mut tx).execute(statement).await;
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        });
        let request = Request::post("/pay").header("idempotency-key", key);
        let request = request.body(Full::default()).unwrap();
        assert_eq!(layer.layer(handler).oneshot(request).await.unwrap().status(), 500, "{key}");
        let told = log.take();
        assert!(
            told.contains(&cause.replace('"', "\\\"")) || told.contains(cause),
            "{key}: {told}"
        );
        assert_eq!(told.matches("a statement failed").count(), 1, "{key}: {told}");
        assert!(!told.contains("s3cret"), "{key}: {told}");
    }
}

#[tokio::test]
async fn a_savepoint_that_was_dropped_is_named_as_the_cause() {
    let (log, _guard) = Log::install(Level::INFO);
    let shop = Shop::open().await;
    let handler = service_fn(|request: Request<Full<Bytes>>| async move {
        let mut tx = Tx::<Sqlite>::take(request.extensions()).unwrap();
        drop(tx.savepoint().await.unwrap());
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    });
    let request = Request::post("/pay").header("idempotency-key", "k");
    let request = request.body(Full::default()).unwrap();
    assert_eq!(shop.layer.layer(handler).oneshot(request).await.unwrap().status(), 500);
    let told = log.take();
    assert!(told.contains("a savepoint was dropped"), "{told}");
}

#[tokio::test]
async fn what_a_handler_does_not_know_and_panics_are_told_in_words_with_the_reference() {
    let (log, _guard) = Log::install(Level::INFO);
    let store = Arc::new(tower_idempotency::MemoryStore::new());
    let marked = || Config::builder().effects(tower_idempotency::Effects::Marked);
    let ask = async |config: tower_idempotency::ConfigBuilder, key: &str, panics: bool| {
        let config = config.scope(Scope::global()).build().unwrap();
        let layer = IdempotencyLayer::new(config, Arc::clone(&store));
        let handler = service_fn(move |_: Request<Full<Bytes>>| async move {
            assert!(!panics, "as it is meant to be");
            let mut response = Response::new(Full::<Bytes>::default());
            *response.status_mut() = http::StatusCode::BAD_GATEWAY;
            response.extensions_mut().insert(Outcome::Unknown);
            Ok::<_, Infallible>(response)
        });
        let request = Request::post("/pay").header("idempotency-key", key);
        let request = request.body(Full::default()).unwrap();
        let response = layer.layer(handler).oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        (status, response.into_body().collect().await.unwrap().to_bytes())
    };
    assert_eq!(ask(Config::builder(), "unknown", false).await.0, 502);
    let told = log.take();
    let (status, body) = ask(Config::builder(), "unknown", false).await;
    let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
    let reference = body["reference"].as_str().unwrap();
    let expected = format!("reference={reference} ");
    assert_eq!(status, 409);
    assert!(told.contains(&expected) && told.contains("outcome of a request is unknown"), "{told}");

    log.take();
    assert_eq!(ask(Config::builder(), "panic", true).await.0, 500);
    let told = log.take();
    assert!(told.contains("a handler panicked, and nobody knows what it had done"), "{told}");
    assert_eq!(ask(marked(), "marked", true).await.0, 500);
    let told = log.take();
    assert!(told.contains("a handler panicked before its first checkpoint"), "{told}");
    assert!(told.contains("the key is free"), "{told}");

    let shop = Shop::open().await;
    let handler = service_fn(|_: Request<Full<Bytes>>| async {
        panic!("as it is meant to be");
        #[allow(unreachable_code, reason = "it says what the handler would answer")]
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    });
    let request = Request::post("/pay").header("idempotency-key", "k");
    let request = request.body(Full::default()).unwrap();
    assert_eq!(shop.layer.layer(handler).oneshot(request).await.unwrap().status(), 500);
    let told = log.take();
    assert!(told.contains("a handler panicked, and the store rolled back"), "{told}");
    assert!(!told.contains("undone=") && !told.contains("untouched="), "{told}");
}

#[tokio::test]
async fn a_request_that_finds_every_connection_in_use_says_so_in_the_log() {
    let (log, _guard) = Log::install(Level::INFO);
    let (_server, url) = postgres::PostgresServer::shared();
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(2).connect(&url).await.unwrap();
    let store = PostgresStore::from_pool(pool);
    store.migrate().await.unwrap();
    let config = Config::builder()
        .scope(Scope::global())
        .claim_within(Duration::from_millis(400))
        .store_call_timeout(Duration::from_millis(200));
    let layer = IdempotencyLayer::new(config.build().unwrap(), store);
    let (begun, go) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let (tell, wait) = (Arc::clone(&begun), Arc::clone(&go));
    let service = layer.layer(service_fn(move |_: Request<Full<Bytes>>| {
        let (tell, wait) = (Arc::clone(&tell), Arc::clone(&wait));
        async move {
            tell.add_permits(1);
            wait.acquire().await.unwrap().forget();
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        }
    }));
    let pay = |key: &str| {
        let request = Request::post("/pay").header("idempotency-key", key);
        service.clone().oneshot(request.body(Full::default()).unwrap())
    };
    let slow = tokio::spawn(pay("slow"));
    begun.acquire().await.unwrap().forget();
    assert_eq!(pay("other").await.unwrap().status(), 503);
    let told = log.take();
    for words in ["every connection that transactions may have is in use", "max_connections"] {
        assert!(told.contains(words), "no {words:?} in\n{told}");
    }
    go.add_permits(1);
    assert_eq!(slow.await.unwrap().unwrap().status(), 200);
}
