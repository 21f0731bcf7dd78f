//! Connections that are lent out one by one: B80 and B81 of the faults that people met, over a pool.
//!
//! The server is in this process, as only here its pool can be looked at.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::routing::post;
use axum::{Json, Router};
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tower_idempotency::store::redis::deadpool_redis::{Manager, Pool};
use tower_idempotency::{Config, Execution, IdempotencyKey, IdempotencyLayer, RedisStore, Scope};

use crate::history::{History, assert_holds};
use crate::invariants::{Charge, End, Finish, Promise, Run, key_id};
use crate::load::{leave_at_random, number, seed};
use crate::redis::RedisServer;
use crate::site::{USUAL, is, is_paid, sleep};

/// What the handlers did.
#[derive(Debug, Default)]
struct Done {
    runs: Vec<Run>,
    charges: Vec<Charge>,
}

#[derive(Debug, Deserialize)]
struct Payment {
    amount: u64,
    source: String,
}

/// A shop whose store is a pool, and what is known of it.
struct Shop {
    redis: RedisServer,
    pool: Pool,
    address: SocketAddr,
    done: Arc<Mutex<Done>>,
    history: History,
}

impl Shop {
    /// With a pool of this many connections, as a program makes one.
    async fn start(connections: usize) -> Self {
        let redis = RedisServer::start();
        let manager = Manager::new(redis.url()).unwrap();
        let pool = Pool::builder(manager).max_size(connections).build().unwrap();
        let scope = Scope::principal(|_: &http::request::Parts| Some("acme"));
        let config = Config::builder().scope(scope).build().unwrap();
        let lease = Duration::from_secs(30);
        let layer = IdempotencyLayer::new(config, RedisStore::from_pool(pool.clone()));
        let done = Arc::new(Mutex::new(Done::default()));
        let of_handlers = Arc::clone(&done);
        let pay =
            post(async move |key: IdempotencyKey, execution: Execution, payment: Json<Payment>| {
                handle(&of_handlers, &key, &execution, payment.0).await
            });
        let routes = Router::new().route("/v1/payments", pay).layer(layer);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
        Self { redis, pool, address, done, history: History::with_lease(lease) }
    }

    fn pay(&self, key: &str, source: &str) -> tokio::task::JoinHandle<crate::sandbox::Answer> {
        let (history, address) = (self.history.clone(), self.address);
        let (key, source) = (key.to_owned(), source.to_owned());
        tokio::spawn(
            async move { history.ask(address, &key, &source, USUAL).await.expect("an answer") },
        )
    }

    async fn settled(&self, key: &str, source: &str) -> End {
        self.history.pay_surely(&[self.address], key, source, USUAL).await
    }

    fn charges(&self) -> usize {
        self.done.lock().unwrap().charges.len()
    }

    /// Fails if anything that is promised does not hold.
    async fn check(&self) {
        let (runs, charges) = {
            let done = self.done.lock().unwrap();
            (done.runs.clone(), done.charges.clone())
        };
        let store = RedisStore::connect(&self.redis.url()).await.unwrap();
        let evidence = self.history.evidence_of(charges, runs, &store).await;
        assert_holds(&evidence.broken(Promise::AtMostOnce));
    }

    /// Waits until every connection that was lent out is back, or has left for good.
    async fn all_is_back(&self) {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            let status = self.pool.status();
            if status.waiting == 0 && status.available == status.size {
                assert!(status.size <= status.max_size, "{status:?}");
                return;
            }
            assert!(Instant::now() < end, "a connection does not come back: {status:?}");
            sleep(5).await;
        }
    }
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(now.as_micros()).unwrap()
}

/// Charges at once, and answers `tok_charge_then_slow_<ms>` that much later.
async fn handle(
    done: &Mutex<Done>,
    key: &IdempotencyKey,
    execution: &Execution,
    payment: Payment,
) -> (StatusCode, Json<Value>) {
    let Payment { amount, source } = payment;
    let (key_id, attempt) = (key_id(key.as_str()), execution.attempt().number());
    let number = {
        let (key_id, request) = (key_id.clone(), (amount, source.clone()));
        let fence = execution.fence().number();
        let mut done = done.lock().unwrap();
        done.runs.push(Run { key_id, attempt, fence, request, began: now(), ended: None });
        done.runs.len() - 1
    };
    done.lock().unwrap().charges.push(Charge { key_id, attempt, amount });
    if let Some(ms) = source.strip_prefix("tok_charge_then_slow_") {
        sleep(ms.parse().unwrap()).await;
    }
    done.lock().unwrap().runs[number].ended = Some((now(), Finish::Answers));
    let answer = json!({ "amount": amount, "source": source, "run": number });
    (StatusCode::CREATED, Json(answer))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b80_a_redis_frozen_behind_a_pool_of_two_ends_every_request_within_bounds_and_recovers() {
    let frozen_for = Duration::from_secs(number("FAULTS_FROZEN_SECONDS", 5));
    let shop = Shop::start(2).await;
    let source = "tok_charge_then_slow_1500";
    let running: Vec<_> = (0..10).map(|n| shop.pay(&format!("running-{n}"), source)).collect();
    let end = Instant::now() + Duration::from_secs(20);
    while shop.charges() < 10 {
        assert!(Instant::now() < end, "not all run: {}", shop.charges());
        sleep(5).await;
    }
    // In the middle of a crowd, and while a connection is lent out: writes wait first, and then everything.
    let new: Vec<_> = (0..200).map(|n| shop.pay(&format!("new-{n}"), "tok_visa")).collect();
    while shop.charges() < 20 {
        assert!(Instant::now() < end, "not enough of them run: {}", shop.charges());
        tokio::task::yield_now().await;
    }
    shop.redis.cli(&["client", "pause", "600000", "write"]);
    let clients = ["client", "list", "type", "normal"];
    shop.redis.wait_until("a call waits", &clients, |list| list.contains(" flags=b "));
    shop.redis.stop();
    let began = Instant::now();
    let mut refused = 0;
    for request in new {
        let answer = request.await.unwrap();
        if answer.status != 201 {
            is(&answer, 503, "idempotency_store_unavailable");
            assert!(answer.header("retry-after").is_some());
            refused += 1;
        }
    }
    let longest = began.elapsed();
    assert!(longest < Duration::from_secs(10), "{longest:?}");
    assert!(refused >= 20, "only {refused} met a frozen server");
    let charged = shop.charges();
    let size = shop.pool.status().size;
    assert!(size <= 2, "{size} connections");
    tokio::time::sleep(frozen_for.saturating_sub(began.elapsed())).await;
    assert_eq!(shop.charges(), charged, "nothing starts that could not be stored");
    shop.redis.cont();
    shop.redis.cli(&["client", "unpause"]);
    let thawed = Instant::now();
    // What ran has its answer; unless nobody could store it for so long that it was given up.
    let given_up = frozen_for > Duration::from_secs(8);
    for n in 0..200 {
        let end = shop.settled(&format!("new-{n}"), "tok_visa").await;
        assert!(matches!(end, End::Paid { .. }) || given_up, "{end:?}");
    }
    for request in running {
        assert!(request.await.unwrap().status == 201 || given_up);
    }
    for n in 0..10 {
        let end = shop.settled(&format!("running-{n}"), source).await;
        let unknown = matches!(end, End::Unknown) && given_up;
        assert!(matches!(end, End::Paid { replay: true, .. }) || unknown, "{end:?}");
    }
    println!(
        "{refused} of 200 requests refused, the last after {longest:?}; all paid {:?} after",
        thawed.elapsed()
    );
    shop.all_is_back().await;
    let unknown = shop.history.ends().get("unknown").copied().unwrap_or_default();
    assert!(shop.charges() == 210 || (given_up && unknown > 0));
    shop.check().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b81_answers_are_never_mixed_up_over_a_pool_although_clients_leave_at_random() {
    let requests = number("FAULTS_REQUESTS", 3_000);
    let shop = Shop::start(4).await;
    let (answered, left) = leave_at_random(&shop.history, shop.address, requests, seed()).await;
    shop.all_is_back().await;
    assert_eq!(shop.charges(), answered + left);
    shop.check().await;
}

/// B79: a pool lends out a connection that was closed meanwhile no more than once, and to nobody's harm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b79_a_connection_of_a_pool_that_an_idle_redis_has_closed_is_replaced_without_an_error() {
    let shop = Shop::start(4).await;
    let first =
        futures_util::future::join_all((0..8).map(|n| shop.pay(&format!("k-{n}"), "tok_visa")));
    for answer in first.await {
        assert_eq!(answer.unwrap().status, 201);
    }
    let open = shop.pool.status().available;
    assert!(open > 0);
    shop.redis.cli(&["config", "set", "timeout", "1"]);
    let others = |list: &str| list.lines().all(|line| line.contains(" cmd=client"));
    shop.redis.wait_until("closed", &["client", "list", "type", "normal"], others);
    shop.redis.cli(&["config", "set", "timeout", "0"]);
    assert_eq!(shop.pool.status().available, open, "the pool has not noticed");
    let again =
        futures_util::future::join_all((0..8).map(|n| shop.pay(&format!("k-{n}"), "tok_visa")));
    for answer in again.await {
        assert!(answer.unwrap().is_replay());
    }
    is_paid(&shop.settled("new", "tok_visa").await);
    shop.all_is_back().await;
    assert_eq!(shop.charges(), 9);
    shop.check().await;
}
