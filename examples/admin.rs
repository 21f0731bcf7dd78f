//! The operators' router behind an authentication of your own: `cargo run --features admin --example admin`.
//!
//! The payment here never knows what became of it. Pay, list, settle, and pay again:
//!
//! ```text
//! curl -i 127.0.0.1:8080/payments -H 'Idempotency-Key: k1' -d ''
//! curl -s 127.0.0.1:8080/operators/records -H 'Authorization: Bearer ana-secret'
//! curl -s 127.0.0.1:8080/operators/records/REFERENCE/settle -H 'Authorization: Bearer ana-secret' \
//!      -H 'Content-Type: application/json' -d '{"version": "VERSION", "why": "T-1: paid, says the bank",
//!      "outcome": "done", "response": {"status": 201,
//!      "headers": [["content-type", "text/plain"]], "body": "paid\n"}}'
//! curl -i 127.0.0.1:8080/payments -H 'Idempotency-Key: k1' -d ''
//! ```

use std::error::Error;
use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use http::StatusCode;
use http::header::AUTHORIZATION;
use tower_idempotency::admin::{Operator, Who, router};
use tower_idempotency::{Config, IdempotencyLayer, MemoryStore, Outcome, Scope};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
    println!("listening on http://{}", listener.local_addr()?);
    Ok(axum::serve(listener, app()?).await?)
}

pub(crate) fn app() -> Result<Router, Box<dyn Error>> {
    // One store for both. On Redis, `Auditor::new(store).spawn()` beside it keeps the listing fresh.
    let store = Arc::new(MemoryStore::new());
    let config = Config::builder().scope(Scope::global()).build()?;
    let layer = IdempotencyLayer::new(config, Arc::clone(&store));
    let operators = router(Operator::new(store)).layer(from_fn(authenticate));
    Ok(Router::new()
        .route("/payments", post(async || (Outcome::Unknown, StatusCode::BAD_GATEWAY)))
        .layer(layer)
        .nest("/operators", operators))
}

/// Yours: whatever you know your operators by. Better on a port of its own, that clients do not reach.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let token = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let name = match token {
        Some("Bearer ana-secret") => "ana",
        _ => return StatusCode::UNAUTHORIZED.into_response(),
    };
    let who = Who::new(name).expect("a short name");
    request.extensions_mut().insert(who);
    next.run(request).await
}
