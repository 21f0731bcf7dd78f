//! What happens after an interruption: reconcile hooks, checkpoints, marked effects.
//! The store is the memory store behind faults; time is tokio's paused clock.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::convert::Infallible;
use std::future::pending;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::store::{Fault, Faulty, Verb};
use tower_idempotency::{
    CheckpointError, Config, ConfigBuilder, Effects, Execution, Found, IdempotencyKey,
    IdempotencyLayer, Identity, Interrupted, KeySyntax, MemoryStore, Outcome, Recovery, Scope,
    StorageKey, StoreErrorKind,
};

const LEASE: Duration = Duration::from_secs(30);

type TestStore = Faulty<Arc<MemoryStore>>;
type Reply = Pin<Box<dyn Future<Output = Response<Full<Bytes>>> + Send>>;

/// One server process on a store that may be shared.
#[derive(Clone)]
struct Server {
    layer: IdempotencyLayer,
    store: TestStore,
    runs: Arc<Mutex<Vec<Execution>>>,
}

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

    fn is_replay(&self) -> bool {
        self.headers.contains_key("idempotent-replayed")
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

fn config() -> ConfigBuilder {
    Config::builder().scope(Scope::principal(|_| Some("acme"))).lease(LEASE).wait(Duration::ZERO)
}

fn created(text: impl Into<String>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text.into()));
    *response.status_mut() = StatusCode::CREATED;
    response
}

impl Server {
    fn new(config: ConfigBuilder) -> Self {
        Self::on(Arc::new(MemoryStore::new()), config)
    }

    fn on(shared: Arc<MemoryStore>, config: ConfigBuilder) -> Self {
        let store = Faulty::new(shared);
        let layer = IdempotencyLayer::new(config.build().unwrap(), store.clone());
        Self { layer, store, runs: Arc::default() }
    }

    fn runs(&self) -> usize {
        self.runs.lock().unwrap().len()
    }

    /// Sends one request whose handler is `handler`; the future owns all it needs.
    fn pay<H, F>(&self, handler: H) -> impl Future<Output = Answer> + Send + use<H, F>
    where
        H: Fn(Execution) -> F + Clone + Send + 'static,
        F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
    {
        let runs = Arc::clone(&self.runs);
        let service = service_fn(move |request: Request<Full<Bytes>>| {
            let execution = request.extensions().get::<Execution>().unwrap().clone();
            runs.lock().unwrap().push(execution.clone());
            let reply: Reply = Box::pin(handler(execution));
            async move { Ok::<_, Infallible>(reply.await) }
        });
        let service = self.layer.layer(service);
        let request = Request::post("/").header("idempotency-key", "k").body(Full::from("{}"));
        async move {
            let (head, body) = service.oneshot(request.unwrap()).await.unwrap().into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let body = String::from_utf8(body.into()).unwrap();
            Answer { status: head.status, headers: head.headers, body }
        }
    }

    /// A request whose handler answers which attempt it is.
    fn retry(&self) -> impl Future<Output = Answer> + Send + use<> {
        self.pay(async |execution: Execution| {
            created(format!("attempt {}", execution.attempt().number()))
        })
    }

    /// Leaves the key with an unknown outcome.
    async fn interrupt(&self) {
        let interrupted = self.pay(async |_| {
            let mut response = created("interrupted");
            response.extensions_mut().insert(Outcome::Unknown);
            response
        });
        interrupted.await.expect(201, "interrupted");
    }
}

/// A hook that always finds the same, and counts how often it was asked.
fn finds(found: Found) -> (Recovery, Arc<AtomicUsize>) {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    let recovery = Recovery::reconcile(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        let found = found.clone();
        async move {
            sleep(Duration::from_millis(100)).await;
            found
        }
    });
    (recovery, asked)
}

fn receipt() -> Found {
    Found::happened(Response::builder().status(201).body(Bytes::from_static(b"found")).unwrap())
}

#[tokio::test(start_paused = true)]
async fn what_a_hook_finds_is_the_answer_of_this_retry_and_the_replay_of_later_ones() {
    let (recovery, asked) = finds(receipt());
    let server = Server::new(config().recovery(recovery));
    server.interrupt().await;
    let retry = server.retry().await;
    // Nobody was given it before.
    assert!(!retry.expect(201, "found").is_replay());
    assert!(server.retry().await.expect(201, "found").is_replay());
    assert_eq!((server.runs(), asked.load(Ordering::SeqCst)), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_hook_is_told_all_that_is_known_of_the_interrupted_attempt() {
    let told = Arc::new(Mutex::new(None));
    let teller = Arc::clone(&told);
    let recovery = Recovery::reconcile(move |interrupted: Interrupted| {
        *teller.lock().unwrap() = Some(interrupted);
        async { Found::StillUnknown }
    });
    let server = Server::new(config().recovery(recovery));
    let interrupted = server.pay(async |execution: Execution| {
        execution.checkpoint(&("charging", 7)).await.unwrap();
        panic!("the handler dies");
    });
    interrupted.await.expect(500, "idempotency_outcome_unknown");
    server.retry().await.expect(409, "idempotency_outcome_unknown");
    let told = told.lock().unwrap().take().unwrap();
    let runs = server.runs.lock().unwrap();
    assert_eq!(told.key().as_str(), "k");
    assert_eq!(told.identity().parts().collect::<Vec<_>>(), ["acme"]);
    assert_eq!((told.attempt(), told.fence()), (runs[0].attempt(), runs[0].fence()));
    assert_eq!(told.downstream_key("charge"), runs[0].downstream_key("charge"));
    let noted = told.last_checkpoint::<(String, u32)>().unwrap();
    assert_eq!(noted, Some(("charging".to_owned(), 7)));
    assert_eq!(format!("{told:?}").matches("acme").count(), 0, "nobody's name in logs");
}

#[tokio::test(start_paused = true)]
async fn where_nothing_happened_the_retry_runs_as_the_next_attempt() {
    let (recovery, asked) = finds(Found::NothingHappened);
    let server = Server::new(config().recovery(recovery));
    server.interrupt().await;
    assert!(!server.retry().await.expect(201, "attempt 2").is_replay());
    assert!(server.retry().await.expect(201, "attempt 2").is_replay());
    assert_eq!((server.runs(), asked.load(Ordering::SeqCst)), (2, 1));
    assert!(!server.runs.lock().unwrap()[1].is_takeover());
}

#[tokio::test(start_paused = true)]
async fn an_outcome_that_is_still_unknown_is_asked_for_again_by_the_next_retry() {
    let (recovery, asked) = finds(Found::StillUnknown);
    let server = Server::new(config().recovery(recovery));
    server.interrupt().await;
    for expected in 1..=3 {
        let answer = server.retry().await;
        answer.expect(409, "idempotency_outcome_unknown");
        assert!(!answer.headers.contains_key("retry-after"));
        assert_eq!(asked.load(Ordering::SeqCst), expected);
    }
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_hangs_is_dropped_at_its_bound() {
    let recovery = Recovery::reconcile(|_| pending());
    let bound = Duration::from_secs(1);
    let server = Server::new(config().recovery(recovery).reconcile_within(bound));
    server.interrupt().await;
    let began = Instant::now();
    server.retry().await.expect(409, "idempotency_outcome_unknown");
    assert_eq!(began.elapsed(), bound);
}

#[tokio::test(start_paused = true)]
async fn a_hook_that_panics_leaves_the_outcome_unknown() {
    let recovery = Recovery::reconcile(|_| async { panic!("the hook") });
    let server = Server::new(config().recovery(recovery));
    server.interrupt().await;
    for _ in 0..2 {
        server.retry().await.expect(409, "idempotency_outcome_unknown");
    }
}

#[tokio::test(start_paused = true)]
async fn simultaneous_retries_ask_once_and_share_the_answer() {
    for (found, body) in [(receipt(), "found"), (Found::NothingHappened, "attempt 2")] {
        let (recovery, asked) = finds(found);
        let server = Server::new(config().recovery(recovery).wait(Duration::from_secs(2)));
        server.interrupt().await;
        let retries = join_all((0..20).map(|_| tokio::spawn(server.retry()))).await;
        let mut first = 0;
        for retry in retries {
            let retry = retry.unwrap();
            first += usize::from(!retry.expect(201, body).is_replay());
        }
        assert_eq!((first, asked.load(Ordering::SeqCst)), (1, 1));
    }
    let (recovery, asked) = finds(Found::StillUnknown);
    let server = Server::new(config().recovery(recovery));
    server.interrupt().await;
    for retry in join_all((0..20).map(|_| tokio::spawn(server.retry()))).await {
        retry.unwrap().expect(409, "idempotency_outcome_unknown");
    }
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_does_not_interrupt_the_question() {
    let (recovery, asked) = finds(receipt());
    let server = Server::new(config().recovery(recovery));
    server.interrupt().await;
    let retry = tokio::spawn(server.retry());
    sleep(Duration::from_millis(50)).await;
    retry.abort();
    sleep(Duration::from_millis(100)).await;
    assert!(server.retry().await.expect(201, "found").is_replay());
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_was_alive_after_all_wins_over_what_a_hook_found() {
    let (recovery, _) = finds(Found::NothingHappened);
    let server = Server::new(config().recovery(recovery));
    // A paused process renews nothing.
    server.store.inject_always(Verb::Renew, Fault::Hang);
    let (reached, wake) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (at, by) = (Arc::clone(&reached), Arc::clone(&wake));
    let paused = tokio::spawn(server.pay(move |_| {
        let (at, by) = (Arc::clone(&at), Arc::clone(&by));
        async move {
            at.notify_one();
            by.notified().await;
            created("late")
        }
    }));
    reached.notified().await;
    sleep(LEASE).await;
    let retry = tokio::spawn(server.retry());
    sleep(Duration::from_millis(50)).await;
    wake.notify_one(); // while the hook is looking
    paused.await.unwrap().expect(201, "late");
    assert!(retry.await.unwrap().expect(201, "late").is_replay());
    assert_eq!(server.runs(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_wakes_after_its_key_was_settled_cannot_complete() {
    let (recovery, _) = finds(Found::NothingHappened);
    let server = Server::new(config().recovery(recovery));
    server.store.inject_always(Verb::Renew, Fault::Hang);
    let wake = Arc::new(Notify::new());
    let by = Arc::clone(&wake);
    let paused = tokio::spawn(server.pay(move |_| {
        let by = Arc::clone(&by);
        async move {
            by.notified().await;
            created("late")
        }
    }));
    sleep(LEASE).await;
    server.retry().await.expect(201, "attempt 2");
    wake.notify_one();
    assert!(paused.await.unwrap().expect(201, "attempt 2").is_replay());
}

#[tokio::test(start_paused = true)]
async fn a_finding_that_cannot_be_stored_is_no_answer() {
    let (recovery, asked) = finds(receipt());
    let server = Server::new(config().recovery(recovery));
    server.interrupt().await;
    server.store.inject_always(Verb::Resolve, Fault::Fail(StoreErrorKind::Unavailable));
    server.retry().await.expect(503, "idempotency_store_unavailable");
    server.store.heal();
    server.store.inject(Verb::Resolve, Fault::LoseReply);
    server.retry().await.expect(201, "found");
    assert_eq!(asked.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_cannot_be_stored_is_not_given_where_a_hook_may_find_another() {
    let (recovery, _) = finds(receipt());
    let server = Server::new(config().recovery(recovery));
    server.store.inject_always(Verb::Complete, Fault::Hang);
    server.retry().await.expect(503, "idempotency_store_unavailable");
    sleep(LEASE * 3).await;
    server.store.heal();
    server.retry().await.expect(201, "found");
}

#[tokio::test(start_paused = true)]
async fn an_unknown_outcome_names_the_record_for_an_operator() {
    let server = Server::new(config());
    let key = IdempotencyKey::parse(b"k", KeySyntax::BareOrQuoted).unwrap();
    let reference = StorageKey::new(&Identity::from("acme"), &key).log_id();
    let first = server.pay(async |_| -> Response<Full<Bytes>> { panic!("the handler") }).await;
    first.expect(500, "idempotency_outcome_unknown");
    assert_eq!(first.json()["reference"], *reference);
    let retry = server.retry().await;
    retry.expect(409, "idempotency_outcome_unknown");
    assert_eq!(retry.json()["reference"], *reference);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_takes_over_cannot_say_that_nothing_happened_before_it() {
    let server = Server::new(config().recovery(Recovery::AtLeastOnce));
    server.interrupt().await;
    let second = server.pay(async |_| {
        let mut response = created("the provider is down");
        response.extensions_mut().insert(Outcome::NoEffect);
        response
    });
    second.await.expect(201, "the provider is down");
    // Its own word frees the key for the same request, and the next run knows that it takes over.
    server.retry().await.expect(201, "attempt 3");
    assert!(server.runs.lock().unwrap()[2].is_takeover());
}

#[derive(Debug, Deserialize, Eq, PartialEq, Serialize)]
enum Step {
    Charging,
    Charged { id: String },
}

#[tokio::test(start_paused = true)]
async fn a_later_attempt_reads_what_an_earlier_one_noted_down() {
    let server = Server::new(config().recovery(Recovery::AtLeastOnce));
    let first = server.pay(async |execution: Execution| {
        assert_eq!(execution.last_checkpoint::<Step>().unwrap(), None);
        execution.checkpoint(&Step::Charging).await.unwrap();
        execution.checkpoint(&Step::Charged { id: "ch_1".into() }).await.unwrap();
        panic!("the handler dies");
    });
    first.await.expect(500, "idempotency_outcome_unknown");
    let second = server.pay(async |execution: Execution| {
        let step = execution.last_checkpoint::<Step>().unwrap();
        assert!(execution.last_checkpoint::<u32>().is_err());
        created(format!("{step:?}"))
    });
    second.await.expect(201, r#"Charged { id: "ch_1" }"#);
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_whose_reply_was_lost_is_made_again() {
    let server = Server::new(config());
    server.store.inject_times(Verb::Renew, Fault::LoseReply, 2);
    let answer = server.pay(async |execution: Execution| {
        execution.checkpoint("noted").await.unwrap();
        created(execution.last_checkpoint::<String>().unwrap().unwrap())
    });
    answer.await.expect(201, "noted");
}

#[tokio::test(start_paused = true)]
async fn a_checkpoint_that_is_not_confirmed_in_time_is_an_error() {
    let server = Server::new(config());
    server.store.inject_always(Verb::Renew, Fault::Hang);
    let began = Instant::now();
    let answer = server.pay(async |execution: Execution| {
        let error = execution.checkpoint("noted").await.unwrap_err();
        assert!(matches!(error, CheckpointError::Unconfirmed(_)), "{error:?}");
        assert_eq!(execution.last_checkpoint::<String>().unwrap(), None);
        created(error.to_string())
    });
    answer.await.expect(201, "not confirmed");
    assert!(began.elapsed() <= Duration::from_millis(2500), "{:?}", began.elapsed());
}

fn marked() -> ConfigBuilder {
    config().effects(Effects::Marked)
}

#[tokio::test(start_paused = true)]
async fn a_panic_before_the_first_checkpoint_frees_the_key_and_one_behind_it_does_not() {
    let server = Server::new(marked());
    let first = server.pay(async |_| -> Response<Full<Bytes>> { panic!("before") }).await;
    first.expect(500, "idempotency_not_executed");
    assert_eq!(first.json()["safe_new_key"], true);
    assert_eq!(first.headers["stripe-should-retry"], "true");
    let second = server.pay(async |execution: Execution| {
        execution.checkpoint(&Step::Charging).await.unwrap();
        panic!("behind");
    });
    second.await.expect(500, "idempotency_outcome_unknown");
    server.retry().await.expect(409, "idempotency_outcome_unknown");
    assert_eq!(server.runs(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_run_that_follows_one_that_may_have_acted_frees_nothing() {
    let server = Server::new(marked().recovery(Recovery::AtLeastOnce));
    let first = server.pay(async |execution: Execution| {
        execution.checkpoint(&Step::Charging).await.unwrap();
        panic!("behind");
    });
    first.await.expect(500, "idempotency_outcome_unknown");
    let second = server.pay(async |_| -> Response<Full<Bytes>> { panic!("before") });
    second.await.expect(500, "idempotency_outcome_unknown");
    server.retry().await.expect(201, "attempt 3");
    assert!(server.runs.lock().unwrap()[2].is_takeover());
}

#[tokio::test(start_paused = true)]
async fn a_process_that_dies_before_its_first_checkpoint_frees_the_key_and_cannot_mark_it_late() {
    let shared = Arc::new(MemoryStore::new());
    let paused = Server::on(Arc::clone(&shared), marked());
    let other = Server::on(shared, marked());
    paused.store.inject_always(Verb::Renew, Fault::Hang);
    let wake = Arc::new(Notify::new());
    let by = Arc::clone(&wake);
    let first = tokio::spawn(paused.pay(move |execution| {
        let by = Arc::clone(&by);
        async move {
            by.notified().await;
            match execution.checkpoint(&Step::Charging).await {
                Ok(()) => created("charged"),
                Err(error) => {
                    let mut response = created(error.to_string());
                    response.extensions_mut().insert(Outcome::NoEffect);
                    response
                }
            }
        }
    }));
    sleep(LEASE / 2).await;
    other.retry().await.expect(409, "idempotency_key_in_use");
    sleep(LEASE / 2).await;
    other.retry().await.expect(201, "attempt 2");
    assert!(!other.runs.lock().unwrap()[0].is_takeover());
    paused.store.heal();
    wake.notify_one();
    first.await.unwrap().expect(201, "the lease is lost");
    assert!(paused.runs.lock().unwrap()[0].is_lease_lost());
    assert!(other.retry().await.expect(201, "attempt 2").is_replay());
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_frees_the_keys_of_runs_that_have_marked_nothing() {
    let shared = Arc::new(MemoryStore::new());
    let stopping = Server::on(Arc::clone(&shared), marked());
    let other = Server::on(shared, marked());
    let wake = Arc::new(Notify::new());
    let by = Arc::clone(&wake);
    let first = tokio::spawn(stopping.pay(move |execution| {
        let by = Arc::clone(&by);
        async move {
            by.notified().await;
            created(format!("{:?}", execution.checkpoint(&Step::Charging).await.is_ok()))
        }
    }));
    sleep(Duration::from_millis(1)).await;
    assert_eq!(stopping.layer.drain(Duration::from_secs(1)).await.unfinished, 1);
    other.retry().await.expect(201, "attempt 2");
    wake.notify_one();
    let late = first.await.unwrap();
    assert!(late.is_replay(), "{}", late.body);
}
