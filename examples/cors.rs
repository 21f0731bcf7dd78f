//! A browser in front: `cargo run --example cors`, then open the page that it names.
//!
//! The page and the API are two origins, so the browser asks the API what the page's script may
//! send and see. [`EXPOSED_HEADERS`] lets it see whether an answer was a replay, and when to try again.

use std::error::Error;
use std::time::Duration;

use axum::response::Html;
use axum::routing::{get, post};
use axum::{Json, Router};
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Method, StatusCode};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower_http::cors::CorsLayer;
use tower_idempotency::{
    Config, ConfigError, EXPOSED_HEADERS, IDEMPOTENCY_KEY, IdempotencyLayer, MemoryStore, Scope,
};

/// The API, for the page at this origin.
pub(crate) fn api(page: HeaderValue) -> Result<Router, ConfigError> {
    let config = Config::builder().scope(Scope::global()).wait(Duration::ZERO).build()?;
    let cors = CorsLayer::new()
        .allow_origin(page)
        .allow_methods([Method::POST])
        .allow_headers([IDEMPOTENCY_KEY, CONTENT_TYPE])
        .expose_headers(EXPOSED_HEADERS);
    Ok(Router::new()
        .route("/pay", post(pay))
        .layer(IdempotencyLayer::new(config, MemoryStore::new()))
        // Added last, so outermost: it answers preflights, and its headers are made for each answer.
        .layer(cors))
}

async fn pay(Json(order): Json<Value>) -> (StatusCode, Json<Value>) {
    // Long enough for a second click.
    tokio::time::sleep(Duration::from_millis(400)).await;
    (StatusCode::CREATED, Json(json!({ "paid": order["amount"] })))
}

/// The page, which pays twice at the same time, and once more afterwards, under one key.
pub(crate) fn page(api: &str) -> Router {
    let html = include_str!("cors.html").replace("API", api);
    Router::new().route("/", get(async || Html(html)))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (api_at, page_at) =
        (TcpListener::bind("127.0.0.1:0").await?, TcpListener::bind("127.0.0.1:0").await?);
    let (api_url, page_url) =
        (format!("http://{}", api_at.local_addr()?), format!("http://{}", page_at.local_addr()?));
    println!("open {page_url}");
    let api = api(page_url.parse()?)?;
    tokio::try_join!(axum::serve(api_at, api), axum::serve(page_at, page(&api_url)))?;
    Ok(())
}
