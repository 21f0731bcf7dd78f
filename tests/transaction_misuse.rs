//! What handlers can do to their transaction that they should not, and replays beside a full line.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use sqlx::{Executor as _, Sqlite};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::store::sql::{Tx, sqlx};
use tower_idempotency::{Config, IdempotencyLayer, Scope, SqliteStore};

const PAID: &str = "SELECT count(*) FROM effects WHERE what = 'paid'";

/// Does what the body says: SQL to run one by one, whose errors are nothing to it, or a number of milliseconds to wait.
async fn handle(request: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut tx = Tx::<Sqlite>::take(request.extensions()).unwrap();
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let body = String::from_utf8(body.to_vec()).unwrap();
    for part in body.split(';') {
        match part.parse() {
            Ok(pause) => tokio::time::sleep(Duration::from_millis(pause)).await,
            Err(_) => {
                let _ = tx.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(part.to_owned()))).await;
            }
        }
    }
    let mut response = Response::new(Full::default());
    *response.status_mut() = StatusCode::CREATED;
    Ok(response)
}

/// Status, and if it is a replay.
async fn ask(layer: &IdempotencyLayer, key: &str, body: &str) -> (u16, bool) {
    let request = Request::post("/pay").header("idempotency-key", key);
    let request = request.body(Full::from(body.to_owned())).unwrap();
    let response = layer.layer(service_fn(handle)).oneshot(request).await.unwrap();
    (response.status().as_u16(), response.headers().contains_key("idempotent-replayed"))
}

async fn shop() -> (tempfile::TempDir, SqliteStore, IdempotencyLayer) {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("shop.db")).await.unwrap();
    store.migrate().await.unwrap();
    let tables = "CREATE TABLE effects (what TEXT NOT NULL);
                  CREATE TABLE names (name TEXT NOT NULL UNIQUE);
                  INSERT INTO names VALUES ('taken')";
    store.pool().execute(tables).await.unwrap();
    let config = Config::builder().scope(Scope::global()).build().unwrap();
    let layer = IdempotencyLayer::new(config, store.clone());
    (folder, store, layer)
}

async fn paid(store: &SqliteStore) -> i64 {
    sqlx::query_scalar(PAID).fetch_one(store.pool()).await.unwrap()
}

#[tokio::test]
async fn a_replay_needs_no_turn_while_new_keys_wait_for_theirs() {
    let (_folder, _store, layer) = shop().await;
    assert_eq!(ask(&layer, "old", "0").await, (201, false));
    let others = ["6000", "0"].map(|body| {
        let layer = layer.clone();
        tokio::spawn(async move { ask(&layer, &format!("new-{body}"), body).await })
    });
    // One is with its handler, and the other one has looked and waits.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let replay = ask(&layer, "old", "0").await;
    others.iter().for_each(tokio::task::JoinHandle::abort);
    assert_eq!(replay, (201, true));
}

#[tokio::test]
async fn what_follows_a_statement_that_rolled_back_is_not_committed_by_itself() {
    let (_folder, store, layer) = shop().await;
    let body = "INSERT OR ROLLBACK INTO names VALUES ('taken');INSERT INTO effects VALUES ('paid')";
    let told = ask(&layer, "k", body).await;
    // It is told 500, rolled back.
    assert_eq!((told.0, paid(&store).await), (500, 0));
}

#[tokio::test]
async fn a_transaction_that_the_handler_rolled_back_leaves_no_answer_to_replay() {
    let (_folder, store, layer) = shop().await;
    let body = "INSERT INTO effects VALUES ('paid');ROLLBACK";
    let first = ask(&layer, "k", body).await;
    let again = ask(&layer, "k", body).await;
    assert_eq!((first.0, paid(&store).await), (500, 0));
    assert_ne!(again, (201, true), "a success is told of which there is nothing");
}

#[tokio::test]
async fn what_a_handler_leaves_on_its_connection_costs_one_request() {
    let (_folder, store, layer) = shop().await;
    let pay = "INSERT INTO effects VALUES ('paid')";
    assert_eq!(ask(&layer, "k1", &format!("{pay};PRAGMA query_only = 1")).await.0, 500);
    assert_eq!(ask(&layer, "k2", pay).await.0, 503);
    assert_eq!(ask(&layer, "k2", pay).await, (201, false));
    assert_eq!(paid(&store).await, 1);
}

#[tokio::test]
async fn a_statement_that_fails_and_rolls_nothing_back_leaves_its_transaction_open() {
    let (_folder, store, layer) = shop().await;
    // Within a savepoint of its own it may fail, and the rest is written.
    let body = "SAVEPOINT mine;INSERT INTO names VALUES ('taken');ROLLBACK TO mine;\
                INSERT INTO effects VALUES ('paid')";
    // A failed statement that nobody has forgiven undoes everything, and nothing was committed by itself.
    assert_eq!((ask(&layer, "k", body).await.0, paid(&store).await), (500, 0));
    assert_eq!(ask(&layer, "k", "INSERT INTO effects VALUES ('paid')").await, (201, false));
    assert_eq!(paid(&store).await, 1);
}

#[tokio::test]
async fn what_a_handler_committed_by_itself_is_unknown_for_as_long_as_that_is_kept() {
    let (_folder, store, _) = shop().await;
    let retention = Duration::from_secs(1);
    let config = Config::builder().scope(Scope::global()).wait(Duration::ZERO);
    let config = config.lease(Duration::from_millis(50)).retention(retention);
    let config = config.unknown_retention(Duration::from_secs(60)).build().unwrap();
    let layer = IdempotencyLayer::new(config, store.clone());
    let body = "INSERT INTO effects VALUES ('paid');COMMIT;there is no such statement";
    assert_eq!(ask(&layer, "k", body).await, (500, false));
    // Its lease ends, and then what an answer is kept for.
    for pause in [Duration::from_millis(100), retention] {
        tokio::time::sleep(pause).await;
        assert_eq!(ask(&layer, "k", body).await, (409, false));
    }
    assert_eq!(paid(&store).await, 1);
}
