//! A handler that calls a payment provider, so that one payment is one charge there too.
//!
//! Run with `cargo run --features client --example provider_call`. It starts a shop and a provider, each behind
//! the layer. The provider charges, and then loses its first answer. See that the shop's handler asks again
//! under the same derived key and gets the first charge, and that the buyer's own retry is a replay.

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Router, middleware};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tower::{Layer as _, ServiceExt as _};
use tower_idempotency::client::{Answered, Keys, Retry, RetryLayer, RetryPolicy};
use tower_idempotency::{
    Config, Execution, IDEMPOTENCY_KEY, IdempotencyLayer, MemoryStore, Outcome, Recovery, Scope,
};

type Http = Retry<Client<HttpConnector, Full<Bytes>>>;

/// What the shop's handler needs.
#[derive(Clone)]
struct Shop {
    provider: SocketAddr,
    client: Http,
}

/// The handler: one charge at the provider for one payment, however often either is repeated.
async fn create_payment(State(shop): State<Shop>, execution: Execution, order: Bytes) -> Response {
    // Made from scope and key alone: a second run of this handler, in another process after a crash, sends
    // the same, and the provider knows it. A random key here would charge again.
    let key = execution.downstream_key("charge");
    let request = Request::post(format!("http://{}/charges", shop.provider))
        .header(IDEMPOTENCY_KEY, key)
        .body(Full::new(order));
    let Ok(request) = request else {
        return (StatusCode::INTERNAL_SERVER_ERROR, Outcome::NoEffect, "no request")
            .into_response();
    };
    match shop.client.oneshot(request).await {
        Ok(response) => {
            let answered = response.extensions().get::<Answered>();
            let (tries, replay) =
                answered.map_or((1, false), |answered| (answered.tries(), answered.is_replay()));
            let status = response.status();
            match response.into_body().collect().await {
                Ok(body) => {
                    let charge = String::from_utf8_lossy(&body.to_bytes()).into_owned();
                    (status, format!("{charge} ({tries} tries at the provider, replay: {replay})"))
                        .into_response()
                }
                Err(error) => unknown(&error),
            }
        }
        Err(error) => unknown(&error),
    }
}

/// The provider may have charged. The buyer's retry is told so; with `Recovery::AtLeastOnce`, as here, it runs
/// the handler again under the same derived key.
fn unknown(error: &dyn Error) -> Response {
    (StatusCode::BAD_GATEWAY, Outcome::Unknown, error.to_string()).into_response()
}

/// The provider's handler: charges.
async fn charge(State(charges): State<Arc<AtomicU32>>) -> String {
    format!("charge {}", charges.fetch_add(1, Ordering::SeqCst) + 1)
}

/// Stands outside of the provider's layer and loses the first answer, as a cut connection would.
async fn lose_the_first_answer(
    State(answers): State<Arc<AtomicU32>>,
    request: axum::extract::Request,
    next: middleware::Next,
) -> Response {
    let response = next.run(request).await;
    if answers.fetch_add(1, Ordering::SeqCst) == 0 {
        return StatusCode::BAD_GATEWAY.into_response();
    }
    response
}

async fn serve(router: Router) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(address)
}

/// Pays twice under one key; what the buyer saw each time, and how often the provider charged.
async fn pay_twice() -> Result<(Vec<String>, u32), Box<dyn Error>> {
    let charges = Arc::new(AtomicU32::new(0));
    let config = Config::builder().scope(Scope::global()).build()?;
    let provider = Router::new()
        .route("/charges", post(charge))
        .layer(IdempotencyLayer::new(config, MemoryStore::new()))
        .layer(middleware::from_fn_with_state(Arc::default(), lose_the_first_answer))
        .with_state(Arc::clone(&charges));
    let provider = serve(provider).await?;

    // No key of its own making: a call outward without a derived key is a mistake that must not be retried. All
    // tries together end well before the buyer has gone.
    let policy = RetryPolicy::new().keys(Keys::OnlyGiven).within(Duration::from_secs(20));
    let client = RetryLayer::new(policy).layer(Client::builder(TokioExecutor::new()).build_http());
    // The handler may run again after a crash, because its only effect deduplicates on the derived key.
    let config =
        Config::builder().scope(Scope::global()).recovery(Recovery::AtLeastOnce).build()?;
    let shop = Router::new()
        .route("/payments", post(create_payment))
        .layer(IdempotencyLayer::new(config, MemoryStore::new()))
        .with_state(Shop { provider, client: client.clone() });
    let shop = serve(shop).await?;

    let mut seen = Vec::new();
    for _ in 0..2 {
        let request = Request::post(format!("http://{shop}/payments"))
            .header(IDEMPOTENCY_KEY, "order-17")
            .body(Full::from("19.99"))?;
        let response = client.clone().oneshot(request).await?;
        let replay = response.extensions().get::<Answered>().is_some_and(Answered::is_replay);
        let body = response.into_body().collect().await?.to_bytes();
        seen.push(format!("{}, replay: {replay}", String::from_utf8_lossy(&body)));
    }
    Ok((seen, charges.load(Ordering::SeqCst)))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (seen, charges) = pay_twice().await?;
    for line in seen {
        println!("the buyer got: {line}");
    }
    println!("the provider charged: {charges}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lost_answer_and_a_retry_of_the_buyer_are_one_charge() {
        let (seen, charges) = pay_twice().await.expect("the example runs");
        let line = "charge 1 (2 tries at the provider, replay: true)";
        assert_eq!(seen, [format!("{line}, replay: false"), format!("{line}, replay: true")]);
        assert_eq!(charges, 1);
    }
}
