//! An inventory that hears of each sale at least once and books it once: `cargo run --example inventory`.
//!
//! Events come from a broker that repeats itself. The scope is the consumer and the key is the event's
//! id, so that two consumers of one event do not disturb each other. The stock, the key and the answer
//! change in one transaction of SQLite. What to see: the same event twice moves the stock once; other
//! content under the same id is refused; and where there is not enough, the consumer chooses between an
//! answer that is kept and one that leaves no trace, so that the event may be tried again later.

use std::error::Error;

use axum::Router;
use axum::body::Body;
use axum::extract::Path;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use http::request::Parts;
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use tower::ServiceExt as _;
use tower_idempotency::store::sql::sqlx;
use tower_idempotency::{Config, IdempotencyLayer, Outcome, Scope, SqliteStore, Tx};

const TABLES: &str = "CREATE TABLE stock (item TEXT PRIMARY KEY, pieces INTEGER NOT NULL);
                      INSERT INTO stock VALUES ('book', 10)";

/// What becomes of a sale of more than there is.
#[derive(Clone, Copy)]
enum OutOfStock {
    /// The refusal is kept: the event is settled, whatever arrives later.
    Settled,
    /// Nothing is kept: the broker may bring the event again when there is more.
    TryAgain,
}

/// Takes sold pieces out of the stock. What it writes is committed with its answer, or not at all.
async fn sell(
    policy: OutOfStock,
    Path((_, item)): Path<(String, String)>,
    mut tx: Tx<sqlx::Sqlite>,
    pieces: String,
) -> Result<Response, StatusCode> {
    let pieces: i64 = pieces.parse().map_err(|_| StatusCode::BAD_REQUEST)?;
    let left = "UPDATE stock SET pieces = pieces - $2 WHERE item = $1 RETURNING pieces";
    let left: Option<i64> = sqlx::query_scalar(left)
        .bind(item)
        .bind(pieces)
        .fetch_optional(&mut tx)
        .await
        .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    Ok(match (left, policy) {
        (None, _) => StatusCode::NOT_FOUND.into_response(),
        // The pieces that were taken come back by themselves: a 4xx undoes what was written.
        (Some(..0), OutOfStock::Settled) => (StatusCode::CONFLICT, "out of stock").into_response(),
        (Some(..0), OutOfStock::TryAgain) => {
            (StatusCode::CONFLICT, Outcome::NoEffect, "out of stock, for now").into_response()
        }
        (Some(left), _) => format!("{left} left").into_response(),
    })
}

/// The consumer of a request; one that is not named in the path is nobody.
fn consumer(parts: &Parts) -> Option<String> {
    let mut path = parts.uri.path().trim_start_matches('/').split('/');
    path.next().filter(|name| !name.is_empty()).map(str::to_owned)
}

async fn inventory(store: SqliteStore) -> Result<Router, Box<dyn Error>> {
    store.migrate().await?;
    sqlx::raw_sql(TABLES).execute(store.pool()).await?;
    let config = Config::builder().scope(Scope::principal(consumer)).build()?;
    let settled = post(async |path, tx, body| sell(OutOfStock::Settled, path, tx, body).await);
    let try_again = post(async |path, tx, body| sell(OutOfStock::TryAgain, path, tx, body).await);
    Ok(Router::new()
        .route("/{consumer}/sold/{item}", settled)
        .route("/{consumer}/wanted/{item}", try_again)
        .layer(IdempotencyLayer::new(config, store)))
}

/// Delivers an event, as a broker would: again and again.
async fn deliver(
    inventory: &Router,
    event: &str,
    path: &str,
    pieces: &str,
) -> Result<(u16, bool, String), Box<dyn Error>> {
    let request = Request::post(path)
        .header("idempotency-key", event)
        .header("content-type", "text/plain")
        .body(Body::from(pieces.to_owned()))?;
    let (head, body) = inventory.clone().oneshot(request).await?.into_parts();
    let body = body.collect().await?.to_bytes();
    let known = head.headers.contains_key("idempotent-replayed");
    let said = match head.status {
        StatusCode::UNPROCESSABLE_ENTITY => "refused: another event had this id".to_owned(),
        _ => String::from_utf8_lossy(&body).into_owned(),
    };
    Ok((head.status.as_u16(), known, said))
}

const DELIVERIES: [(&str, &str, &str); 8] = [
    ("e1", "/warehouse/sold/book", "3"),
    ("e1", "/warehouse/sold/book", "3"),
    ("e1", "/warehouse/sold/book", "4"),
    ("e1", "/shop/sold/book", "3"),
    ("e2", "/warehouse/sold/book", "5"),
    ("e2", "/warehouse/sold/book", "5"),
    ("e3", "/warehouse/wanted/book", "5"),
    ("e3", "/warehouse/wanted/book", "5"),
];

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let inventory = inventory(SqliteStore::open(folder.path().join("stock.db")).await?).await?;
    for (event, path, pieces) in DELIVERIES {
        let (status, known, said) = deliver(&inventory, event, path, pieces).await?;
        let known = if known { " (known already)" } else { "" };
        println!("{event} {path} {pieces}: {status} {said}{known}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn each_event_moves_the_stock_once_for_each_consumer() {
        let folder = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(folder.path().join("stock.db")).await.unwrap();
        let pool = store.pool().clone();
        let inventory = inventory(store).await.unwrap();
        let mut told = Vec::new();
        for (event, path, pieces) in DELIVERIES {
            let (status, known, _) = deliver(&inventory, event, path, pieces).await.unwrap();
            told.push((status, known));
        }
        let expected = [
            (200, false),
            (200, true),
            (422, false),
            (200, false),
            (409, false),
            (409, true),
            (409, false),
            (409, false),
        ];
        assert_eq!(told, expected);
        let left: i64 =
            sqlx::query_scalar("SELECT pieces FROM stock").fetch_one(&pool).await.unwrap();
        assert_eq!(left, 4);
        // What left no trace may be tried again, also with less.
        let (status, _, said) =
            deliver(&inventory, "e3", "/warehouse/wanted/book", "4").await.unwrap();
        assert_eq!((status, said.as_str()), (200, "0 left"));
    }
}
