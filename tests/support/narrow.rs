//! A shop in the process of the test, in which a caller may have one payment at a time.

use std::sync::{Arc, Mutex};

use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::routing::post;
use axum::{Json, Router};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tower_idempotency::{Config, ErrorFlavour, IdempotencyLayer, MemoryStore, Scope};

/// Its handlers wait until they are let through.
pub(crate) struct Narrow {
    pub(crate) url: String,
    /// A permit for each handler that has begun.
    pub(crate) entered: Arc<Semaphore>,
    /// Takes a permit for each handler that may go on.
    pub(crate) open: Arc<Semaphore>,
    /// Key and status of every answer.
    told: Arc<Mutex<Vec<(String, u16)>>>,
}

impl Narrow {
    pub(crate) async fn start() -> Self {
        let (entered, open) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let told: Arc<Mutex<Vec<(String, u16)>>> = Arc::default();
        let config = Config::builder()
            .scope(Scope::principal(|_: &http::request::Parts| Some("acme")))
            .in_flight_per_caller(1)
            .error_flavour(ErrorFlavour::Stripe);
        let layer = IdempotencyLayer::new(config.build().unwrap(), MemoryStore::new());
        let gate = (Arc::clone(&entered), Arc::clone(&open));
        let pay = async move || {
            gate.0.add_permits(1);
            gate.1.acquire().await.unwrap().forget();
            Json(json!({ "id": "pi_1", "object": "payment_intent", "amount": 16 }))
        };
        let seen = Arc::clone(&told);
        let watch = from_fn(move |request: Request, next: Next| {
            let seen = Arc::clone(&seen);
            async move {
                let key = request.headers()["idempotency-key"].to_str().unwrap().to_owned();
                let answer = next.run(request).await;
                seen.lock().unwrap().push((key, answer.status().as_u16()));
                answer
            }
        });
        let routes = Router::new().route("/v1/payment_intents", post(pay));
        let app = routes.layer(layer).layer(watch);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, entered, open, told }
    }

    /// The statuses of the answers under a key.
    pub(crate) fn told(&self, key: &str) -> Vec<u16> {
        let told = self.told.lock().unwrap();
        told.iter().filter(|(other, _)| other == key).map(|(_, status)| *status).collect()
    }
}
