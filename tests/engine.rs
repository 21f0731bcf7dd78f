//! What the engine does when the store fails, the handler is slow, or the process shuts down.
//! The store is the memory store behind faults; time is tokio's paused clock.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Release, ReleaseOutcome, RenewOutcome,
    Renewal, Resolution, ResolveOutcome, Verdict, Writes,
};
use tower_idempotency::store::{Fault, Faulty, StoreFuture, Verb};
use tower_idempotency::{
    Config, ConfigBuilder, Execution, IdempotencyLayer, Lease, MemoryStore, Outcome, Recovery,
    Scope, StorageKey, Store, StoreDown, StoreError, StoreErrorKind,
};

const LEASE: Duration = Duration::from_secs(30);
type TestStore = Faulty<Arc<MemoryStore>>;

/// One server process: a layer on a store that may be shared, and a ledger of runs.
struct Server {
    layer: IdempotencyLayer,
    store: TestStore,
    runs: Arc<Mutex<Vec<Execution>>>,
    /// What the handler waits for after its effect, if anything.
    gate: Option<HandlerGate>,
}

/// A gate of the handler: it says that it was reached, and waits.
#[derive(Clone, Default)]
struct HandlerGate {
    reached: Arc<Notify>,
    open: Arc<Notify>,
}

#[derive(Debug)]
struct Answer {
    status: StatusCode,
    headers: HeaderMap,
    body: String,
}

impl Answer {
    #[track_caller]
    fn expect(&self, status: u16, part: &str) -> &Self {
        assert_eq!(self.status, status, "{}", self.body);
        assert!(self.body.contains(part), "{part:?} is not in {}", self.body);
        self
    }

    fn has(&self, header: &str, value: &str) -> bool {
        self.headers.get(header).is_some_and(|found| found == value)
    }
}

fn config() -> ConfigBuilder {
    Config::builder().scope(Scope::global()).lease(LEASE)
}

impl Server {
    fn new(config: ConfigBuilder) -> Self {
        Self::on(Arc::new(MemoryStore::new()), config)
    }

    fn on(shared: Arc<MemoryStore>, config: ConfigBuilder) -> Self {
        let store = Faulty::new(shared);
        let layer = IdempotencyLayer::new(config.build().unwrap(), store.clone());
        Self { layer, store, runs: Arc::default(), gate: None }
    }

    fn gated(mut self) -> (Self, HandlerGate) {
        let gate = HandlerGate::default();
        self.gate = Some(gate.clone());
        (self, gate)
    }

    fn runs(&self) -> usize {
        self.runs.lock().unwrap().len()
    }

    /// Sends one request; the future owns all it needs, so it can be spawned and dropped.
    fn pay(&self, key: &str) -> impl Future<Output = Answer> + Send + use<> {
        let (runs, gate) = (Arc::clone(&self.runs), self.gate.clone());
        let handler = service_fn(move |request: Request<Full<Bytes>>| {
            let (runs, gate) = (Arc::clone(&runs), gate.clone());
            async move {
                let execution = request.extensions().get::<Execution>().unwrap().clone();
                let run = {
                    let mut runs = runs.lock().unwrap();
                    runs.push(execution);
                    runs.len()
                };
                if let Some(gate) = gate {
                    gate.reached.notify_one();
                    gate.open.notified().await;
                }
                let mut response = Response::new(Full::<Bytes>::from(format!("run {run}")));
                *response.status_mut() = StatusCode::CREATED;
                Ok::<_, Infallible>(response)
            }
        });
        let service = self.layer.layer(handler);
        let request = Request::post("/").header("idempotency-key", key);
        let request = request.body(Full::from("{}")).unwrap();
        async move {
            let (head, body) = service.oneshot(request).await.unwrap().into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let body = String::from_utf8(body.into()).unwrap();
            Answer { status: head.status, headers: head.headers, body }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_reply_was_lost_is_recognised_as_ones_own() {
    let server = Server::new(config());
    server.store.inject_times(Verb::Claim, Fault::LoseReply, 2);
    let began = Instant::now();
    server.pay("k").await.expect(201, "run 1");
    assert!(began.elapsed() < Duration::from_secs(1), "it did not wait for its own lease");
    assert_eq!(server.store.calls(Verb::Claim), 3);
    assert_eq!(server.runs.lock().unwrap()[0].attempt().number(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_hangs_is_sent_again_and_given_up_within_the_bound() {
    let server = Server::new(config());
    server.store.inject_always(Verb::Claim, Fault::Hang);
    let began = Instant::now();
    let answer = server.pay("k").await;
    answer.expect(503, "idempotency_store_unavailable");
    assert!(answer.has("retry-after", "1"));
    assert!(began.elapsed() <= Duration::from_millis(2500), "{:?}", began.elapsed());
    assert_eq!(server.runs(), 0);
    server.store.heal();
    server.pay("k").await.expect(201, "run 1");
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_was_given_up_is_released_so_that_a_retry_need_not_wait() {
    let server = Server::new(config());
    server.store.inject_always(Verb::Claim, Fault::LoseReply);
    server.pay("k").await.expect(503, "idempotency_store_unavailable");
    server.store.heal();
    // The release runs in the background.
    sleep(Duration::from_millis(10)).await;
    server.pay("k").await.expect(201, "run 1");
    assert_eq!(server.runs.lock().unwrap()[0].attempt().number(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_full_refuses_at_once() {
    let server = Server::new(config());
    server.store.inject(Verb::Claim, Fault::Fail(StoreErrorKind::Full));
    server.pay("k").await.expect(503, "idempotency_store_unavailable");
    assert_eq!(server.store.calls(Verb::Claim), 1);
    assert_eq!(server.runs(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_for_a_moment_is_not_noticed() {
    let server = Server::new(config());
    server.store.inject_times(Verb::Claim, Fault::Fail(StoreErrorKind::Unavailable), 2);
    server.pay("k").await.expect(201, "run 1");
}

#[tokio::test(start_paused = true)]
async fn a_completion_whose_reply_was_lost_is_sent_again_and_stored_once() {
    let server = Server::new(config());
    server.store.inject_times(Verb::Complete, Fault::LoseReply, 2);
    let answer = server.pay("k").await;
    answer.expect(201, "run 1");
    assert!(!answer.headers.contains_key("idempotency-status"));
    let retry = server.pay("k").await;
    assert!(retry.expect(201, "run 1").has("idempotent-replayed", "true"));
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn at_most_once_tells_the_true_answer_when_it_cannot_be_stored_and_heals_later() {
    let server = Server::new(config());
    server.store.inject_always(Verb::Complete, Fault::Fail(StoreErrorKind::Unavailable));
    let began = Instant::now();
    let answer = server.pay("k").await;
    assert!(answer.expect(201, "run 1").has("idempotency-status", "not-stored"));
    assert!(began.elapsed() <= Duration::from_secs(4), "{:?}", began.elapsed());
    // The store is back before the lease ends: the background finishes the job.
    server.store.heal();
    sleep(Duration::from_secs(1)).await;
    let retry = server.pay("k").await;
    assert!(retry.expect(201, "run 1").has("idempotent-replayed", "true"));
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn at_most_once_never_runs_again_when_the_answer_was_never_stored() {
    let server = Server::new(config());
    server.store.inject_always(Verb::Complete, Fault::Hang);
    server.pay("k").await.expect(201, "run 1");
    sleep(LEASE * 3).await;
    server.store.heal();
    server.pay("k").await.expect(409, "idempotency_outcome_unknown");
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn at_least_once_answers_503_instead_of_what_a_later_run_may_contradict() {
    let server = Server::new(config().recovery(Recovery::AtLeastOnce));
    server.store.inject_always(Verb::Complete, Fault::Hang);
    server.pay("k").await.expect(503, "idempotency_store_unavailable");
    sleep(LEASE * 3).await;
    server.store.heal();
    server.pay("k").await.expect(201, "run 2");
    let runs = server.runs.lock().unwrap();
    assert_eq!(runs[1].attempt().number(), 2);
    assert!(runs[1].is_takeover());
    assert!(runs[1].fence() > runs[0].fence());
    assert_eq!(runs[0].downstream_key("charge"), runs[1].downstream_key("charge"));
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_outlives_its_lease_keeps_it() {
    let (server, gate) = Server::new(config().wait(Duration::ZERO)).gated();
    let first = tokio::spawn(server.pay("k"));
    gate.reached.notified().await;
    for _ in 0..10 {
        sleep(LEASE / 2).await;
        server.pay("k").await.expect(409, "idempotency_key_in_use");
    }
    assert!(!server.runs.lock().unwrap()[0].is_lease_lost());
    gate.open.notify_one();
    first.await.unwrap().expect(201, "run 1");
    assert_eq!(server.runs(), 1);
    assert!(server.store.calls(Verb::Renew) >= 14);
}

/// A completion that waits for replicas is done long before it is answered.
#[tokio::test(start_paused = true)]
async fn a_renewal_that_finds_the_key_settled_by_its_own_run_is_no_lost_lease() {
    let server = Server::new(config().lease(Duration::from_secs(1)));
    server.store.inject(Verb::Complete, Fault::DelayReply(Duration::from_millis(500)));
    server.pay("k").await.expect(201, "run 1");
    assert_eq!(server.store.calls(Verb::Renew), 1, "it was renewed meanwhile");
    assert!(!server.runs.lock().unwrap()[0].is_lease_lost());
}

#[tokio::test(start_paused = true)]
async fn a_handler_is_told_when_its_lease_cannot_be_renewed_and_its_late_answer_heals() {
    let (server, gate) = Server::new(config().wait(Duration::ZERO)).gated();
    let first = tokio::spawn(server.pay("k"));
    gate.reached.notified().await;
    let execution = server.runs.lock().unwrap()[0].clone();
    server.store.inject_always(Verb::Renew, Fault::Fail(StoreErrorKind::Unavailable));
    let began = Instant::now();
    execution.lease_lost().await;
    assert!((LEASE..LEASE * 2).contains(&began.elapsed()), "{:?}", began.elapsed());
    server.pay("k").await.expect(409, "idempotency_outcome_unknown");
    // The handler was alive after all, and nobody else ran: its answer is the truth.
    gate.open.notify_one();
    first.await.unwrap().expect(201, "run 1");
    let retry = server.pay("k").await;
    assert!(retry.expect(201, "run 1").has("idempotent-replayed", "true"));
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_paused_process_that_lost_its_key_tells_its_client_to_come_back() {
    let shared = Arc::new(MemoryStore::new());
    let (paused, gate) =
        Server::on(Arc::clone(&shared), config().recovery(Recovery::AtLeastOnce)).gated();
    let other = Server::on(shared, config().recovery(Recovery::AtLeastOnce));
    let first = tokio::spawn(paused.pay("k"));
    gate.reached.notified().await;
    // A paused process renews nothing.
    paused.store.inject_always(Verb::Renew, Fault::Hang);
    sleep(LEASE * 2).await;
    let second = other.pay("k").await;
    second.expect(201, "run 1");
    assert_eq!(other.runs.lock().unwrap()[0].attempt().number(), 2);
    gate.open.notify_one();
    // The stored answer stands, and the late one is refused: both clients are told the same.
    let late = first.await.unwrap();
    assert!(late.expect(201, "run 1").has("idempotent-replayed", "true"));
}

#[tokio::test(start_paused = true)]
async fn a_record_that_the_store_lost_is_restored_by_the_keeper() {
    let shared = Arc::new(MemoryStore::new());
    let hour = Duration::from_secs(3_600);
    let config = config().wait(Duration::ZERO).retention(hour).unknown_retention(hour);
    let (server, gate) = Server::on(Arc::clone(&shared), config).gated();
    let first = tokio::spawn(server.pay("k"));
    gate.reached.notified().await;
    // Losing everything: the record is gone when its retention ends, so make renewals miss it.
    server.store.inject_always(Verb::Renew, Fault::Hang);
    sleep(LEASE + 2 * hour).await;
    server.store.heal();
    sleep(LEASE).await;
    server.pay("k").await.expect(409, "idempotency_key_in_use");
    gate.open.notify_one();
    first.await.unwrap().expect(201, "run 1");
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_stale_before_the_handler_starts_is_renewed_first() {
    let server = Server::new(config().lease(Duration::from_millis(600)));
    server.store.inject(Verb::Claim, Fault::DelayReply(Duration::from_millis(500)));
    server.pay("k").await.expect(201, "run 1");
    assert_eq!(server.store.calls(Verb::Renew), 1);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_was_lost_before_the_handler_starts_starts_nothing() {
    let server = Server::new(config().lease(Duration::from_millis(600)));
    server.store.inject(Verb::Claim, Fault::DelayReply(Duration::from_millis(500)));
    server.store.inject_always(Verb::Renew, Fault::Fail(StoreErrorKind::Unavailable));
    server.pay("k").await.expect(503, "idempotency_store_unavailable");
    assert_eq!(server.runs(), 0);
    sleep(Duration::from_millis(10)).await;
    server.pay("k").await.expect(201, "run 1");
}

#[tokio::test(start_paused = true)]
async fn failing_open_is_marked_and_leaves_the_answer_for_retries_if_the_store_comes_back() {
    let server = Server::new(config().store_down(StoreDown::RunUnprotected));
    server.store.inject_always(Verb::Claim, Fault::Fail(StoreErrorKind::Unavailable));
    let answer = server.pay("k").await;
    assert!(answer.expect(201, "run 1").has("idempotency-status", "unprotected"));
    assert!(!server.runs.lock().unwrap()[0].is_protected());
    server.store.heal();
    sleep(Duration::from_secs(1)).await;
    let retry = server.pay("k").await;
    assert!(retry.expect(201, "run 1").has("idempotent-replayed", "true"));
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_running_handlers_and_takes_no_new_ones() {
    let (server, gate) = Server::new(config()).gated();
    let first = server.pay("k");
    let first = tokio::spawn(first);
    gate.reached.notified().await;
    // The client of another one leaves; its handler counts all the same.
    let second = tokio::spawn(server.pay("gone"));
    gate.reached.notified().await;
    second.abort();
    let layer = server.layer.clone();
    let drain = tokio::spawn(async move { layer.drain(Duration::from_secs(10)).await });
    sleep(Duration::from_secs(1)).await;
    assert!(!drain.is_finished());
    server.pay("new").await.expect(503, "idempotency_store_unavailable");
    gate.open.notify_one();
    gate.open.notify_one();
    sleep(Duration::from_millis(1)).await;
    gate.open.notify_one();
    assert_eq!(drain.await.unwrap().unfinished, 0);
    first.await.unwrap().expect(201, "run");
    assert_eq!(server.store.calls(Verb::Complete), 2);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_marks_what_does_not_finish_in_time_as_unknown() {
    let shared = Arc::new(MemoryStore::new());
    let (server, gate) = Server::on(Arc::clone(&shared), config()).gated();
    let first = tokio::spawn(server.pay("k"));
    gate.reached.notified().await;
    let drained = server.layer.drain(Duration::from_secs(5)).await;
    assert_eq!(drained.unfinished, 1);
    assert!(server.runs.lock().unwrap()[0].is_lease_lost());
    // Another process need not wait for the lease to know.
    let other = Server::on(shared, config());
    other.pay("k").await.expect(409, "idempotency_outcome_unknown");
    drop(first);
}

#[tokio::test(start_paused = true)]
async fn a_waiter_in_another_process_learns_of_the_answer_within_tens_of_milliseconds() {
    let shared = Arc::new(MemoryStore::new());
    let (owner, gate) = Server::on(Arc::clone(&shared), config()).gated();
    let other = Server::on(shared, config());
    let first = tokio::spawn(owner.pay("k"));
    gate.reached.notified().await;
    let waiters: Vec<_> = (0..50).map(|_| tokio::spawn(other.pay("k"))).collect();
    sleep(Duration::from_secs(1)).await;
    // One asks for all, and then one polls at a time, more and more slowly.
    let polls = other.store.calls(Verb::Claim);
    assert!((20..40).contains(&polls), "{polls} polls of 50 waiters in a second");
    let done = Instant::now();
    gate.open.notify_one();
    for waiter in waiters {
        assert!(waiter.await.unwrap().expect(201, "run 1").has("idempotent-replayed", "true"));
    }
    assert!(done.elapsed() < Duration::from_millis(60), "{:?}", done.elapsed());
    first.await.unwrap().expect(201, "run 1");
    assert_eq!(other.runs(), 0);
}

/// A store that undoes everything: its leases are repeatable, and its first completions fail.
#[derive(Debug)]
struct Transactional {
    store: MemoryStore,
    conflicts: AtomicUsize,
}

impl Store for Transactional {
    fn name(&self) -> &'static str {
        "transactional"
    }
    fn claim<'a>(
        &'a self,
        key: StorageKey,
        claim: &'a Claim,
    ) -> StoreFuture<'a, ClaimOutcome<Lease>> {
        Box::pin(async move { Ok(self.store.claim(key, claim).await?.map(Lease::repeatable)) })
    }
    fn renew<'a>(
        &'a self,
        lease: &'a Lease,
        renewal: &'a Renewal,
    ) -> StoreFuture<'a, RenewOutcome> {
        self.store.renew(lease, renewal)
    }
    fn complete<'a>(
        &'a self,
        lease: &'a Lease,
        completion: &'a Completion,
    ) -> StoreFuture<'a, CompleteOutcome> {
        Box::pin(async move {
            let left = |left: usize| left.checked_sub(1);
            if self.conflicts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, left).is_ok() {
                let terms = completion.terms;
                let verdict = Verdict::NoEffect;
                self.store.release(lease, &Release { terms, verdict }).await?;
                return Err(StoreError::new(
                    StoreErrorKind::RolledBack,
                    "transactional",
                    "complete",
                ));
            }
            if completion.writes == Writes::RollBack {
                let release = Release { terms: completion.terms, verdict: Verdict::NoEffect };
                self.store.release(lease, &release).await?;
                return Ok(CompleteOutcome::RolledBack);
            }
            self.store.complete(lease, completion).await
        })
    }
    fn release<'a>(
        &'a self,
        lease: &'a Lease,
        release: &'a Release,
    ) -> StoreFuture<'a, ReleaseOutcome> {
        Box::pin(async move {
            let release = Release { verdict: Verdict::NoEffect, ..*release };
            self.store.release(lease, &release).await?;
            Ok(ReleaseOutcome::RolledBack)
        })
    }
    fn resolve<'a>(
        &'a self,
        key: StorageKey,
        resolution: &'a Resolution,
    ) -> StoreFuture<'a, ResolveOutcome> {
        self.store.resolve(key, resolution)
    }
    fn ready(&self) -> StoreFuture<'_, ()> {
        self.store.ready()
    }
}

async fn pay_transactional(conflicts: usize) -> (Answer, usize) {
    let store = Transactional { store: MemoryStore::new(), conflicts: AtomicUsize::new(conflicts) };
    let layer = IdempotencyLayer::new(config().build().unwrap(), store);
    let runs = Arc::new(AtomicUsize::new(0));
    let handler = {
        let runs = Arc::clone(&runs);
        service_fn(move |request: Request<Full<Bytes>>| {
            let runs = Arc::clone(&runs);
            async move {
                assert_eq!(request.headers()["x-mine"], "kept");
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
                let text = format!("run {run} of {}", String::from_utf8_lossy(&body));
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(text)))
            }
        })
    };
    let request = Request::post("/").header("idempotency-key", "k").header("x-mine", "kept");
    let request = request.body(Full::from("body")).unwrap();
    let (head, body) = layer.layer(handler).oneshot(request).await.unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let body = String::from_utf8(body.into()).unwrap();
    let answer = Answer { status: head.status, headers: head.headers, body };
    (answer, runs.load(Ordering::SeqCst))
}

#[tokio::test(start_paused = true)]
async fn a_unit_that_the_store_rolled_back_runs_again_with_the_same_request() {
    let (answer, runs) = pay_transactional(2).await;
    answer.expect(200, "run 3 of body");
    assert_eq!(runs, 3);
}

#[tokio::test(start_paused = true)]
async fn running_again_has_a_bound() {
    let (answer, runs) = pay_transactional(1000).await;
    answer.expect(503, "idempotency_store_unavailable");
    assert_eq!(runs, 4);
}

/// Answers twice under one key with a store that undoes writes: both answers, and the runs.
async fn pay_twice(
    handler: impl Fn() -> Response<Full<Bytes>> + Clone + Send + Sync + 'static,
) -> ([Answer; 2], usize) {
    let store = Transactional { store: MemoryStore::new(), conflicts: AtomicUsize::new(0) };
    let layer = IdempotencyLayer::new(config().build().unwrap(), store);
    let runs = Arc::new(AtomicUsize::new(0));
    let service = {
        let runs = Arc::clone(&runs);
        layer.layer(service_fn(move |_: Request<Full<Bytes>>| {
            let (runs, handler) = (Arc::clone(&runs), handler.clone());
            async move {
                runs.fetch_add(1, Ordering::SeqCst);
                Ok::<_, Infallible>(handler())
            }
        }))
    };
    let pay = async || {
        let request = Request::post("/").header("idempotency-key", "k");
        let response = service.clone().oneshot(request.body(Full::default()).unwrap()).await;
        let (head, body) = response.unwrap().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let body = String::from_utf8(body.into()).unwrap();
        Answer { status: head.status, headers: head.headers, body }
    };
    ([pay().await, pay().await], runs.load(Ordering::SeqCst))
}

fn answering(status: u16) -> Response<Full<Bytes>> {
    Response::builder().status(status).body(Full::default()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn where_writes_can_be_undone_a_server_error_frees_the_key_and_asks_for_a_retry() {
    let (answers, runs) = pay_twice(|| answering(500)).await;
    for answer in &answers {
        assert_eq!(answer.status, 500);
        assert!(answer.has("stripe-should-retry", "true"), "{answer:?}");
        assert!(!answer.headers.contains_key("idempotent-replayed"), "{answer:?}");
    }
    assert_eq!(runs, 2);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_says_itself_whether_to_retry_has_the_last_word() {
    let handler = || {
        let mut response = answering(503);
        response.headers_mut().insert("stripe-should-retry", "false".parse().unwrap());
        response
    };
    let (answers, _) = pay_twice(handler).await;
    assert!(answers[0].has("stripe-should-retry", "false"), "{answers:?}");
}

#[tokio::test(start_paused = true)]
async fn an_error_whose_writes_are_to_be_kept_is_stored() {
    let handler = || {
        let mut response = answering(500);
        response.extensions_mut().insert(Outcome::KeepWrites);
        response
    };
    let (answers, runs) = pay_twice(handler).await;
    assert!(answers[1].has("idempotent-replayed", "true"), "{answers:?}");
    assert!(answers[0].has("stripe-should-retry", "false"), "{answers:?}");
    assert_eq!(runs, 1);
}

#[tokio::test(start_paused = true)]
async fn where_writes_can_be_undone_refusals_are_stored() {
    for status in [200, 302, 402, 422] {
        let (answers, runs) = pay_twice(move || answering(status)).await;
        assert!(answers[1].has("idempotent-replayed", "true"), "{status}: {answers:?}");
        assert_eq!(runs, 1, "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn where_writes_can_be_undone_a_panic_leaves_the_key_free() {
    let (answers, runs) = pay_twice(|| panic!("on purpose")).await;
    for answer in answers {
        assert!(answer.has("stripe-should-retry", "true"), "{answer:?}");
        answer.expect(500, "idempotency_rolled_back");
    }
    assert_eq!(runs, 2);
}
