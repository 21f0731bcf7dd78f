//! Payments under way while something goes wrong with the store.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse as _;
use axum::routing::post;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt as _;
use tower::ServiceExt as _;
use tower_idempotency::{Config, IdempotencyKey, IdempotencyLayer, Scope, Store};

/// How long a client goes on with one key. Everything that is done to a store here is over by then.
const PATIENCE: Duration = Duration::from_secs(40);

/// What really happened, by key. It knows nothing of uniqueness.
type Ledger = Arc<Mutex<HashMap<String, u32>>>;

/// Clients that pay under new keys, one after another, and send each until it has a final answer.
#[derive(Debug)]
pub struct Load {
    clients: Vec<tokio::task::JoinHandle<Vec<Payment>>>,
    stop: Arc<AtomicBool>,
    ledger: Ledger,
    app: Router,
}

#[derive(Debug)]
struct Payment {
    key: String,
    /// The answer, and whether it said that it was recorded. `None`: the outcome is unknown.
    told: Option<(Vec<u8>, bool)>,
    refusals: u32,
    at: Instant,
}

/// What came of it.
#[derive(Debug)]
pub struct Report {
    pub payments: usize,
    pub unknown: usize,
    pub refusals: u32,
    /// The longest time in which nobody was served.
    pub longest_gap: Duration,
}

impl Load {
    pub fn start(store: impl Store, clients: usize) -> Self {
        let ledger = Ledger::default();
        let config = Config::builder().scope(Scope::global()).lease(Duration::from_secs(5));
        let layer = IdempotencyLayer::new(config.build().unwrap(), store);
        let charged = Arc::clone(&ledger);
        let handler = move |key: IdempotencyKey| async move {
            *charged.lock().unwrap().entry(key.as_str().to_owned()).or_default() += 1;
            tokio::time::sleep(Duration::from_millis(2)).await;
            (StatusCode::CREATED, format!("receipt for {}", key.as_str())).into_response()
        };
        let app = Router::new().route("/pay", post(handler)).layer(layer);
        let stop = Arc::new(AtomicBool::new(false));
        let clients = (0..clients)
            .map(|client| {
                let (app, stop) = (app.clone(), Arc::clone(&stop));
                tokio::spawn(async move {
                    let mut payments = Vec::new();
                    while !stop.load(Ordering::Relaxed) {
                        let key = format!("{client}-{}", payments.len());
                        payments.push(pay(&app, key).await);
                    }
                    payments
                })
            })
            .collect();
        Self { clients, stop, ledger, app }
    }

    /// How many effects there have been so far.
    pub fn effects(&self) -> usize {
        self.ledger.lock().unwrap().len()
    }

    /// Waits for this many more effects, so that a fault does not hit an idle store.
    pub async fn go_on(&self, more: usize) {
        let goal = self.effects() + more;
        let deadline = Instant::now() + PATIENCE;
        while self.effects() < goal {
            assert!(Instant::now() < deadline, "no payments are made any more");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Lets the clients finish what they are at, then compares what they were told with what
    /// happened: no key twice, every success with its effect, every retry with the same answer.
    pub async fn finish(self) -> Report {
        self.stop.store(true, Ordering::Relaxed);
        let mut payments = Vec::new();
        for client in self.clients {
            payments.extend(client.await.unwrap());
        }
        for payment in &payments {
            let effects = self.ledger.lock().unwrap().get(&payment.key).copied().unwrap_or(0);
            assert!(effects <= 1, "{} was charged {effects} times", payment.key);
            let Some((body, recorded)) = &payment.told else { continue };
            assert_eq!(effects, 1, "{}: a success that was told has its effect", payment.key);
            if *recorded {
                let again = pay(&self.app, payment.key.clone()).await;
                let again = again.told.map(|(body, _)| body);
                assert_eq!(again.as_ref(), Some(body), "{}: the same answer again", payment.key);
            }
        }
        let charged = self.ledger.lock().unwrap().values().copied().max();
        assert_eq!(charged, Some(1), "no key twice, whoever was told of it");
        let mut ends: Vec<_> = payments.iter().map(|payment| payment.at).collect();
        ends.sort_unstable();
        Report {
            payments: payments.len(),
            unknown: payments.iter().filter(|payment| payment.told.is_none()).count(),
            refusals: payments.iter().map(|payment| payment.refusals).sum(),
            longest_gap: ends.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default(),
        }
    }
}

async fn pay(app: &Router, key: String) -> Payment {
    let deadline = Instant::now() + PATIENCE;
    let mut refusals = 0;
    loop {
        let (status, headers, body) = send(app, &key).await;
        let code = || String::from_utf8_lossy(&body).into_owned();
        let told = if status == StatusCode::CREATED {
            let status = headers.get("idempotency-status");
            Some((body, status.is_none_or(|status| status != "not-stored")))
        } else if code().contains("idempotency_outcome_unknown") {
            None
        } else {
            let again = [StatusCode::SERVICE_UNAVAILABLE, StatusCode::CONFLICT].contains(&status);
            assert!(again && Instant::now() < deadline, "{key}: {status} {}", code());
            refusals += 1;
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        return Payment { key, told, refusals, at: Instant::now() };
    }
}

async fn send(app: &Router, key: &str) -> (StatusCode, HeaderMap, Vec<u8>) {
    let request = Request::post("/pay").header("idempotency-key", key).body(Body::from("{}"));
    let response = app.clone().oneshot(request.unwrap()).await.unwrap();
    let (head, body) = response.into_parts();
    (head.status, head.headers, body.collect().await.unwrap().to_bytes().to_vec())
}
