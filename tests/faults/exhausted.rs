//! C24: many more requests than connections. The program of the payments has no pool, so the server is one of this
//! test's own: real HTTP, a real Redis, a ledger without a unique constraint.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Json, Router};
use http::StatusCode;
use http::request::Parts;
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tower_idempotency::store::redis::deadpool_redis::{Manager, Pool, Runtime};
use tower_idempotency::{
    Config, Execution, IdempotencyKey, IdempotencyLayer, Identity, RedisStore, Scope,
};

use crate::history::{History, assert_holds};
use crate::invariants::{Charge, Finish, Promise, Run, key_id};
use crate::line::{Proxy, Way};
use crate::redis::RedisServer;
use crate::site::{USUAL, is, ms};

const REQUESTS: usize = 200;
/// Renewed once while the handler runs, after a third.
const LEASE: Duration = Duration::from_secs(3);
const HANDLER: Duration = Duration::from_millis(1_200);

/// What really happened. It knows nothing of uniqueness.
#[derive(Default)]
struct Till {
    charges: Mutex<Vec<Charge>>,
    runs: Mutex<Vec<Run>>,
    /// Handlers that were told that they have lost their lease.
    lost: AtomicUsize,
}

#[derive(Deserialize, Serialize)]
struct Payment {
    amount: u64,
    source: String,
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(since.as_micros()).unwrap()
}

async fn pay(
    State(till): State<Arc<Till>>,
    key: IdempotencyKey,
    execution: Execution,
    Json(payment): Json<Payment>,
) -> Response {
    let (key_id, attempt) = (key_id(key.as_str()), execution.attempt().number());
    let (fence, amount) = (execution.fence().number(), payment.amount);
    let request = (amount, payment.source.clone());
    let run = Run { key_id: key_id.clone(), attempt, fence, request, began: now(), ended: None };
    let number = {
        let mut runs = till.runs.lock().unwrap();
        runs.push(run);
        runs.len() - 1
    };
    till.charges.lock().unwrap().push(Charge { key_id, attempt, amount });
    let end = Instant::now() + HANDLER;
    if tokio::time::timeout(HANDLER, execution.lease_lost()).await.is_ok() {
        till.lost.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep_until(end.into()).await;
    }
    till.runs.lock().unwrap()[number].ended = Some((now(), Finish::Answers));
    (StatusCode::CREATED, Json(payment)).into_response()
}

/// Whoever is refused comes again, so that there are always claims that wait. How often that was, and how long
/// the longest request took.
async fn pay_surely(history: History, address: SocketAddr, key: String) -> (usize, Duration) {
    let (mut refused, mut longest) = (0, Duration::ZERO);
    loop {
        let asked = Instant::now();
        let answer = history.ask(address, &key, "tok_visa", USUAL).await.unwrap();
        longest = longest.max(asked.elapsed());
        if answer.status == 201 {
            assert_eq!(answer.header("idempotency-status"), None, "charged and not stored");
            return (refused, longest);
        }
        is(&answer, 503, "idempotency_store_unavailable");
        assert!(answer.header("retry-after").is_some(), "{answer:?}");
        refused += 1;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c24_two_hundred_requests_on_a_pool_of_one_end_within_bounds_and_what_runs_is_stored() {
    let redis = RedisServer::start();
    let proxy = Proxy::to(redis.port()).await;
    let pool = Pool::builder(Manager::new(proxy.redis_url()).unwrap()).max_size(1);
    let pool = pool.runtime(Runtime::Tokio1).build().unwrap();
    let scope = Scope::principal(|_: &Parts| Some(Identity::of_parts(["acme"])));
    let config = Config::builder().scope(scope).lease(LEASE).build().unwrap();
    let layer = IdempotencyLayer::new(config, RedisStore::from_pool(pool.clone()));
    let till = Arc::new(Till::default());
    let app = Router::new().route("/v1/payments", post(pay)).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(axum::serve(listener, app.with_state(Arc::clone(&till))).into_future());

    let history = History::with_lease(LEASE);
    // A network of some milliseconds: so a claim takes what two trips take, and two hundred do not get through.
    proxy.delay(Way::Down, ms(4));
    let clients: Vec<_> = (0..REQUESTS)
        .map(|number| tokio::spawn(pay_surely(history.clone(), address, format!("k{number}"))))
        .collect();
    let (mut refused, mut longest) = (0, Duration::ZERO);
    for client in clients {
        let (refusals, answered) = client.await.unwrap();
        refused += refusals;
        longest = longest.max(answered);
    }
    let runs = till.runs.lock().unwrap().clone();
    println!("C24: {} paid, {refused} refused, the longest request {longest:?}", runs.len());
    assert!(longest < ms(10_000), "{longest:?}");
    assert!(refused > 0, "the fault was never hit: a pool of one was enough");
    assert_eq!(till.lost.load(Ordering::SeqCst), 0, "a renewal starved");
    assert!(pool.status().size <= 1, "{:?}", pool.status());
    proxy.heal();
    let store = RedisStore::connect(&redis.url()).await.unwrap();
    let charges = till.charges.lock().unwrap().clone();
    assert_eq!(charges.len(), REQUESTS);
    let evidence = history.evidence_of(charges, runs, &store).await;
    assert_holds(&evidence.broken(Promise::AtMostOnce));
}
