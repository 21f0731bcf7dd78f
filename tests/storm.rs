//! Many requests under one key at once: what each of them costs the store, and whose answer it gets.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use tokio::sync::Semaphore;
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::record::{Claim, ClaimOutcome, Effects, OnExpired, Release, Terms, Verdict};
use tower_idempotency::store::{Fault, Faulty, Gate, Verb};
use tower_idempotency::{
    Config, Engine, Fingerprint, Fingerprints, HolderId, IdempotencyKey, IdempotencyLayer,
    Identity, MemoryStore, Outcome, Recipe, Scope, StorageKey, Store as _, StoreErrorKind,
    WaitLimits,
};

/// A server whose handler waits at a gate, and counts how often it ran.
#[derive(Clone)]
struct Server {
    layer: IdempotencyLayer,
    store: Faulty<MemoryStore>,
    runs: Arc<AtomicUsize>,
    started: Arc<Semaphore>,
    gate: Arc<Semaphore>,
}

impl Server {
    fn new() -> Self {
        Self::with_limits(WaitLimits::default())
    }

    fn with_limits(limits: WaitLimits) -> Self {
        let store = Faulty::new(MemoryStore::new());
        let config = Config::builder().scope(Scope::global()).build().unwrap();
        let engine = Engine::with_limits(store.clone(), limits);
        Self {
            layer: IdempotencyLayer::on(engine, config),
            store,
            runs: Arc::default(),
            started: Arc::new(Semaphore::new(0)),
            gate: Arc::new(Semaphore::new(0)),
        }
    }

    /// Waits until one more handler runs. The clock goes on when nothing else does, so a test whose handler never runs
    /// ends soon.
    async fn starts(&self) {
        let started = tokio::time::timeout(Duration::from_secs(60), self.started.acquire());
        started.await.expect("a handler runs").unwrap().forget();
    }

    /// Status and body of the answer.
    async fn pay(self, body: &'static str) -> (u16, String) {
        let Self { layer, runs, started, gate, .. } = self;
        let handler = service_fn(move |request: Request<Full<Bytes>>| {
            let (runs, started, gate) =
                (Arc::clone(&runs), Arc::clone(&started), Arc::clone(&gate));
            async move {
                let order = request.into_body().collect().await.unwrap().to_bytes();
                runs.fetch_add(1, Ordering::SeqCst);
                started.add_permits(1);
                gate.acquire().await.unwrap().forget();
                let mut response = Response::new(Full::<Bytes>::from(order.clone()));
                if order == "nothing" {
                    response.extensions_mut().insert(Outcome::NoEffect);
                }
                Ok::<_, Infallible>(response)
            }
        });
        let response = layer.layer(handler).oneshot(request(body)).await.unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }
}

fn request(body: &'static str) -> Request<Full<Bytes>> {
    let request = Request::post("/pay").header("content-type", "application/json");
    request.header("idempotency-key", "k").body(body.into()).unwrap()
}

/// What a server would claim for such a request.
fn claim(body: &'static str) -> (StorageKey, Claim) {
    let (parts, _) = request(body).into_parts();
    let print = Recipe::new().fingerprint(&parts, "/pay", &Bytes::from_static(body.as_bytes()));
    let key = IdempotencyKey::new("k").unwrap();
    let minute = Duration::from_secs(60);
    let claim = Claim {
        holder: HolderId::random(),
        fingerprints: Fingerprints::one(Fingerprint::from_stored(print.recipe(), *print.digest())),
        terms: Terms { lease: minute, retention: minute, unknown_retention: minute },
        on_expired: OnExpired::Refuse,
        effects: Effects::Anywhere,
    };
    (StorageKey::new(&Identity::of_parts::<[&str; 0]>([]), &key), claim)
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_a_twin_in_its_process_asks_the_store_nothing_and_gets_the_twins_answer() {
    let server = Server::new();
    let first = tokio::spawn(server.clone().pay("order"));
    server.starts().await;
    let waiters: Vec<_> = (0..50).map(|_| tokio::spawn(server.clone().pay("order"))).collect();
    // All tasks have come to rest when the paused clock moves.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(server.store.calls(Verb::Claim), 1);
    server.gate.add_permits(1);
    assert_eq!(first.await.unwrap(), (200, "order".to_owned()));
    for waiter in waiters {
        assert_eq!(waiter.await.unwrap(), (200, "order".to_owned()));
    }
    assert_eq!(server.runs.load(Ordering::SeqCst), 1);
    assert_eq!(server.store.calls(Verb::Claim), 1, "nobody asked at the end either");
}

#[tokio::test(start_paused = true)]
async fn retries_that_arrive_while_the_key_is_claimed_wait_for_what_comes_of_it() {
    let server = Server::new();
    let gate = Gate::new();
    server.store.inject(Verb::Claim, Fault::HoldReply(gate.clone()));
    let all: Vec<_> = (0..50).map(|_| tokio::spawn(server.clone().pay("order"))).collect();
    gate.reached_by(1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    gate.open();
    server.starts().await;
    // Longer than they would wait for a claim.
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.gate.add_permits(1);
    for one in all {
        assert_eq!(one.await.unwrap(), (200, "order".to_owned()));
    }
    assert_eq!(server.runs.load(Ordering::SeqCst), 1);
    assert_eq!(server.store.calls(Verb::Claim), 1);
}

#[tokio::test(start_paused = true)]
async fn retries_that_arrive_while_a_replay_is_fetched_share_it() {
    let server = Server::new();
    server.gate.add_permits(1);
    assert_eq!(server.clone().pay("order").await.0, 200);
    let gate = Gate::new();
    server.store.inject(Verb::Claim, Fault::HoldReply(gate.clone()));
    let all: Vec<_> = (0..50).map(|_| tokio::spawn(server.clone().pay("order"))).collect();
    gate.reached_by(1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    let another = server.clone().pay("another order").await;
    assert_eq!(another.0, 422, "{another:?}");
    gate.open();
    for one in all {
        assert_eq!(one.await.unwrap(), (200, "order".to_owned()));
    }
    assert_eq!(server.runs.load(Ordering::SeqCst), 1);
    assert_eq!(server.store.calls(Verb::Claim), 3, "the run, the others together, the other one");
}

#[tokio::test(start_paused = true)]
async fn runs_that_store_nothing_cost_a_claim_each_however_many_wait() {
    let server = Server::new();
    let all: Vec<_> = (0..30).map(|_| tokio::spawn(server.clone().pay("nothing"))).collect();
    for _ in 0..30 {
        server.starts().await;
        // Everybody else has come to rest.
        tokio::time::sleep(Duration::from_millis(10)).await;
        server.gate.add_permits(1);
    }
    for one in all {
        assert_eq!(one.await.unwrap().0, 200);
    }
    assert_eq!(server.runs.load(Ordering::SeqCst), 30);
    assert_eq!(server.store.calls(Verb::Claim), 30);
}

#[tokio::test(start_paused = true)]
async fn retries_of_what_runs_elsewhere_ask_once_and_then_one_at_a_time() {
    let server = Server::new();
    let (key, elsewhere) = claim("order");
    let Ok(ClaimOutcome::Acquired(lease)) = server.store.inner().claim(key, &elsewhere).await
    else {
        panic!("the key was free");
    };
    let gate = Gate::new();
    server.store.inject(Verb::Claim, Fault::HoldReply(gate.clone()));
    let all: Vec<_> = (0..50).map(|_| tokio::spawn(server.clone().pay("order"))).collect();
    gate.reached_by(1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    gate.open();
    tokio::time::sleep(Duration::from_millis(200)).await;
    // Each of 50 would have asked by itself, and then polled.
    let calls = server.store.calls(Verb::Claim);
    assert!((2..=20).contains(&calls), "{calls} claims");
    let release = Release { terms: elsewhere.terms, verdict: Verdict::NoEffect };
    server.store.inner().release(&lease, &release).await.unwrap();
    server.gate.add_permits(1);
    for one in all {
        assert_eq!(one.await.unwrap(), (200, "order".to_owned()));
    }
    assert_eq!(server.runs.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn where_several_recipes_are_understood_each_retry_is_judged_by_itself() {
    let server = Server::new();
    server.gate.add_permits(1);
    assert_eq!(server.clone().pay("{\"a\": 1}").await.0, 200);
    // From now on members count, and not bytes; the old recipe is still understood.
    let config = Config::builder().scope(Scope::global());
    let config = config.fingerprint(Recipe::new().canonical_json());
    let config = config.also_accept(Recipe::new()).build().unwrap();
    let layer = IdempotencyLayer::new(config, server.store.clone());
    let server = Server { layer, ..server };
    let gate = Gate::new();
    server.store.inject(Verb::Claim, Fault::HoldReply(gate.clone()));
    let same = tokio::spawn(server.clone().pay("{\"a\": 1}"));
    gate.reached_by(1).await;
    let other = tokio::spawn(server.clone().pay("{\"a\":1}"));
    tokio::time::sleep(Duration::from_millis(100)).await;
    gate.open();
    assert_eq!(same.await.unwrap().0, 200);
    assert_eq!(other.await.unwrap().0, 422, "as it is told when it comes alone");
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_takes_long_holds_up_nobody_else_for_long() {
    let server = Server::new();
    server.gate.add_permits(2);
    let gate = Gate::new();
    server.store.inject(Verb::Claim, Fault::HoldReply(gate.clone()));
    let first = tokio::spawn(server.clone().pay("order"));
    gate.reached_by(1).await;
    let began = tokio::time::Instant::now();
    server.store.inject(Verb::Claim, Fault::Fail(StoreErrorKind::Full));
    assert_eq!(server.clone().pay("order").await.0, 503);
    assert_eq!(began.elapsed(), Duration::from_millis(250));
    gate.open();
    assert_eq!(first.await.unwrap().0, 200);
}

#[tokio::test(start_paused = true)]
async fn after_a_claim_that_failed_each_retry_asks_for_itself() {
    let server = Server::new();
    server.store.inject(Verb::Claim, Fault::LoseRequest);
    server.store.inject(Verb::Claim, Fault::Fail(StoreErrorKind::Full));
    let first = tokio::spawn(server.clone().pay("order"));
    let others: Vec<_> = (0..5).map(|_| tokio::spawn(server.clone().pay("order"))).collect();
    server.gate.add_permits(1);
    assert_eq!(first.await.unwrap().0, 503);
    let failed = tokio::time::Instant::now();
    for other in others {
        assert_eq!(other.await.unwrap(), (200, "order".to_owned()));
    }
    assert_eq!(server.runs.load(Ordering::SeqCst), 1);
    assert_eq!(server.store.calls(Verb::Claim), 2 + 5);
    assert_eq!(failed.elapsed(), Duration::ZERO, "at once, and not when somebody has polled");
}

#[tokio::test(start_paused = true)]
async fn whoever_waits_in_vain_is_told_by_the_store_what_is_left_of_the_lease() {
    let server = Server::new();
    let first = tokio::spawn(server.clone().pay("order"));
    server.starts().await;
    let (status, body) = server.clone().pay("order").await;
    assert_eq!(status, 409, "{body}");
    assert_eq!(server.store.calls(Verb::Claim), 2);
    server.gate.add_permits(1);
    first.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn another_request_under_the_key_of_a_run_is_refused_at_once() {
    let server = Server::new();
    let first = tokio::spawn(server.clone().pay("order"));
    server.starts().await;
    let began = tokio::time::Instant::now();
    let (status, body) = server.clone().pay("another order").await;
    assert_eq!((status, began.elapsed()), (422, Duration::ZERO), "{body}");
    server.gate.add_permits(1);
    first.await.unwrap();
}

/// A run that has lost its lease says nothing about its key: another process may have settled it meanwhile.
#[tokio::test(start_paused = true)]
async fn a_twin_of_a_run_that_has_lost_its_lease_asks_the_store() {
    let server = Server::new();
    let first = tokio::spawn(server.clone().pay("order"));
    server.starts().await;
    server.store.inject_always(Verb::Renew, Fault::LoseRequest);
    // The lease of 30 seconds is over, and was not renewed.
    tokio::time::sleep(Duration::from_secs(40)).await;
    let before = server.store.calls(Verb::Claim);
    let began = tokio::time::Instant::now();
    let (status, body) = server.clone().pay("order").await;
    assert_eq!((status, began.elapsed()), (409, Duration::ZERO), "{body}");
    assert!(body.contains("outcome_unknown"), "{body}");
    assert_eq!(server.store.calls(Verb::Claim), before + 1);
    server.store.heal();
    server.gate.add_permits(1);
    assert_eq!(first.await.unwrap().0, 200, "its late answer heals the record");
}

#[tokio::test(start_paused = true)]
async fn a_twin_that_stored_nothing_leaves_the_key_to_one_of_those_who_waited() {
    let server = Server::new();
    let first = tokio::spawn(server.clone().pay("nothing"));
    server.starts().await;
    let waiters: Vec<_> = (0..5).map(|_| tokio::spawn(server.clone().pay("nothing"))).collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.gate.add_permits(6);
    first.await.unwrap();
    for waiter in waiters {
        assert_eq!(waiter.await.unwrap().0, 200);
    }
    // Each said that it did nothing, so each of them ran, one after the other.
    assert_eq!(server.runs.load(Ordering::SeqCst), 6);
}

#[tokio::test(start_paused = true)]
async fn who_has_waited_and_runs_leaves_the_only_seat_to_the_next() {
    let mut limits = WaitLimits::default();
    limits.total = 1;
    let server = Server::with_limits(limits);
    let (key, elsewhere) = claim("order");
    let Ok(ClaimOutcome::Acquired(lease)) = server.store.inner().claim(key, &elsewhere).await
    else {
        panic!("the key was free");
    };
    let first = tokio::spawn(server.clone().pay("order"));
    tokio::time::sleep(Duration::from_millis(100)).await;
    let refused = server.clone().pay("order").await;
    assert_eq!(refused.0, 409, "the seat is taken: {}", refused.1);
    let release = Release { terms: elsewhere.terms, verdict: Verdict::NoEffect };
    server.store.inner().release(&lease, &release).await.unwrap();
    server.starts().await;
    let second = tokio::spawn(server.clone().pay("order"));
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.gate.add_permits(1);
    assert_eq!(first.await.unwrap(), (200, "order".to_owned()));
    assert_eq!(second.await.unwrap(), (200, "order".to_owned()));
    assert_eq!(server.runs.load(Ordering::SeqCst), 1);
}

/// The reply that says "in flight" is about another run than the one whose end wakes the waiter: the
/// key was free in between, and went to a request with another body.
#[tokio::test(start_paused = true)]
async fn a_waiter_never_gets_the_answer_to_another_request_under_its_key() {
    let server = Server::new();
    let (key, elsewhere) = claim("order A");
    let Ok(ClaimOutcome::Acquired(lease)) = server.store.inner().claim(key, &elsewhere).await
    else {
        panic!("the key was free");
    };
    let gate = Gate::new();
    server.store.inject(Verb::Claim, Fault::HoldReply(gate.clone()));
    let waiter = tokio::spawn(server.clone().pay("order A"));
    gate.reached_by(1).await;

    let release = Release { terms: elsewhere.terms, verdict: Verdict::NoEffect };
    server.store.inner().release(&lease, &release).await.unwrap();
    let other = tokio::spawn(server.clone().pay("order B"));
    server.starts().await;
    gate.open();
    // The waiter sits down beside the run of the other one.
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.gate.add_permits(1);
    assert_eq!(other.await.unwrap(), (200, "order B".to_owned()));
    let (status, body) = waiter.await.unwrap();
    assert_eq!(status, 422, "{body}");
    assert_eq!(server.runs.load(Ordering::SeqCst), 1);
}
