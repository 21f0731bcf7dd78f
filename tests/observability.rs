//! What can be seen from outside: every series is described, the dashboard shows series that exist, spans say
//! what happened, and nothing of keys and bodies is in any of it.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::io::Write;
use std::sync::{Arc, Mutex, Once};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
    SharedString, Unit,
};
use serde_json::Value;
use tower::{Layer as _, ServiceExt as _};
use tower_idempotency::store::{Fault, Faulty, Verb};
use tower_idempotency::{
    Config, IdempotencyLayer, JsonPointer, MemoryStore, Outcome, Recipe, Scope, StoreDown,
    StoreErrorKind,
};

/// A recorder that keeps everything.
#[derive(Clone, Debug, Default)]
struct Seen(Arc<Mutex<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    described: BTreeSet<String>,
    values: BTreeMap<String, f64>,
}

impl Seen {
    fn describe(&self, name: &KeyName) {
        self.0.lock().unwrap().described.insert(name.as_str().to_owned());
    }

    /// The series by its name and labels, for example `requests{outcome=replayed}`.
    fn series(&self, key: &Key) -> Series {
        let labels: Vec<_> =
            key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        let name = format!("{}{{{}}}", key.name(), labels.join(","));
        self.0.lock().unwrap().values.entry(name.clone()).or_default();
        Series { seen: self.clone(), name }
    }

    fn value(&self, name: &str) -> Option<f64> {
        self.0.lock().unwrap().values.get(name).copied()
    }

    fn names(&self) -> BTreeSet<String> {
        let inner = self.0.lock().unwrap();
        inner.values.keys().map(|name| name.split('{').next().unwrap().to_owned()).collect()
    }
}

#[derive(Debug)]
struct Series {
    seen: Seen,
    name: String,
}

impl Series {
    fn change(&self, change: impl FnOnce(&mut f64)) {
        change(self.seen.0.lock().unwrap().values.get_mut(&self.name).unwrap());
    }
}

#[expect(clippy::cast_precision_loss, reason = "tests count to a few")]
impl CounterFn for Series {
    fn increment(&self, by: u64) {
        self.change(|value| *value += by as f64);
    }
    fn absolute(&self, to: u64) {
        self.change(|value| *value = to as f64);
    }
}

impl GaugeFn for Series {
    fn increment(&self, by: f64) {
        self.change(|value| *value += by);
    }
    fn decrement(&self, by: f64) {
        self.change(|value| *value -= by);
    }
    fn set(&self, to: f64) {
        self.change(|value| *value = to);
    }
}

/// Counts what was recorded.
impl HistogramFn for Series {
    fn record(&self, _: f64) {
        self.change(|value| *value += 1.0);
    }
}

impl Recorder for Seen {
    fn describe_counter(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.describe(&name);
    }
    fn describe_gauge(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.describe(&name);
    }
    fn describe_histogram(&self, name: KeyName, _: Option<Unit>, _: SharedString) {
        self.describe(&name);
    }
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(self.series(key)))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(Arc::new(self.series(key)))
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(Arc::new(self.series(key)))
    }
}

thread_local! {
    static LOG: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// What is logged on the thread of a test, which is all of it: its runtime has no other.
///
/// One subscriber for all tests: with one each, a place in the code that is reached for the first time while
/// another test installs its own may be taken for switched off.
#[derive(Clone, Copy)]
struct Log;

impl Log {
    fn install() -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            tracing_subscriber::fmt()
                .with_max_level(tracing::Level::TRACE)
                .with_ansi(false)
                .with_writer(|| Self)
                .init();
        });
        Self
    }

    fn text(self) -> String {
        LOG.with_borrow(|log| String::from_utf8(log.clone()).unwrap())
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.with_borrow_mut(|log| log.extend_from_slice(bytes));
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A payment service; the body says what becomes of the payment.
struct Shop {
    layer: IdempotencyLayer,
    store: Faulty<MemoryStore>,
}

impl Shop {
    fn new(store_down: StoreDown) -> Self {
        Log::install();
        let store = Faulty::new(MemoryStore::new());
        let config = Config::builder()
            .scope(Scope::global())
            .store_down(store_down)
            .wait(Duration::from_millis(500))
            .in_flight_per_caller(2)
            .build()
            .unwrap();
        Self { layer: IdempotencyLayer::new(config, store.clone()), store }
    }

    async fn pay(&self, key: Option<&str>, body: &'static str) -> StatusCode {
        let service = self.layer.layer(tower::service_fn(handler));
        let mut request = Request::post("/pay");
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        service.oneshot(request.body(Full::from(body)).unwrap()).await.unwrap().status()
    }
}

async fn handler(request: Request<Full<Bytes>>) -> Result<Response<Full<Bytes>>, Infallible> {
    use http_body_util::BodyExt as _;
    let body = request.into_body().collect().await?.to_bytes();
    let mut response = Response::new(Full::from("4242424242424242"));
    match &body[..] {
        b"slow" => tokio::time::sleep(Duration::from_millis(100)).await,
        b"very slow" => tokio::time::sleep(Duration::from_secs(60)).await,
        b"panic" => panic!("the handler of this test panics"),
        b"nothing" => drop(response.extensions_mut().insert(Outcome::NoEffect)),
        b"unknown" => drop(response.extensions_mut().insert(Outcome::Unknown)),
        _ => {}
    }
    Ok(response)
}

fn dashboard() -> Value {
    serde_json::from_str(include_str!("../examples/observability/dashboard.json")).unwrap()
}

/// Every name of a series in a text of PromQL.
fn series_in(query: &str) -> impl Iterator<Item = &str> {
    query
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("idempotency_"))
}

/// A name as the Prometheus exporter writes it.
fn exported(name: &str) -> String {
    name.replace('.', "_")
}

#[tokio::test(start_paused = true)]
async fn every_series_is_described_moves_and_is_on_the_dashboard() {
    let seen = Seen::default();
    let _recording = metrics::set_default_local_recorder(&seen);
    let shop = Shop::new(StoreDown::Reject);
    let requests = |outcome| seen.value(&format!("idempotency.requests{{outcome={outcome}}}"));
    assert_eq!(requests("unprotected"), Some(0.0), "an alarm needs a series that is there");

    assert_eq!(shop.pay(Some("a"), "fine").await, 200);
    assert_eq!(shop.pay(Some("a"), "fine").await, 200);
    assert_eq!(shop.pay(Some("a"), "other").await, 422);
    assert_eq!(shop.pay(None, "fine").await, 400);
    assert_eq!(shop.pay(Some("b"), "panic").await, 500);
    assert_eq!(shop.pay(Some("b"), "panic").await, 409);
    assert_eq!(shop.pay(Some("c"), "nothing").await, 200);
    assert_eq!(shop.pay(Some("d"), "unknown").await, 200);
    let twins = tokio::join!(shop.pay(Some("e"), "slow"), shop.pay(Some("e"), "slow"));
    assert_eq!(twins, (StatusCode::OK, StatusCode::OK));
    for (outcome, count) in [
        ("executed", 2.0),
        ("replayed", 2.0),
        ("mismatch", 1.0),
        ("missing_key", 1.0),
        ("handler_failed", 1.0),
        ("outcome_unknown", 1.0),
        ("released", 1.0),
        ("unknown", 1.0),
        ("unprotected", 0.0),
        ("not_stored", 0.0),
    ] {
        assert_eq!(requests(outcome), Some(count), "{outcome}");
    }
    // Each answer of the store once, whichever step it is met in; one of the twins asked it nothing.
    for (outcome, count) in
        [("acquired", 5.0), ("completed", 1.0), ("mismatch", 1.0), ("indeterminate", 1.0)]
    {
        let claims = seen.value(&format!("idempotency.claims{{outcome={outcome}}}"));
        assert_eq!(claims, Some(count), "{outcome}");
    }
    assert_eq!(seen.value("idempotency.wait.duration{}"), Some(1.0));
    assert_eq!(seen.value("idempotency.waiting{}"), Some(0.0));
    assert_eq!(seen.value("idempotency.in_flight{}"), Some(0.0));
    assert_eq!(seen.value("idempotency.in_flight.oldest_age{}"), Some(0.0));

    // A store that fails for a while.
    shop.store.inject(Verb::Claim, Fault::Fail(StoreErrorKind::Unavailable));
    assert_eq!(shop.pay(Some("f"), "fine").await, 200);
    let errors = "idempotency.store.errors{store=memory,verb=claim,kind=unavailable}";
    assert_eq!(seen.value(errors), Some(1.0));
    assert_eq!(seen.value("idempotency.store.retries{verb=claim}"), Some(1.0));

    // The client's own series.
    let client = tower::service_fn(async |_: Request<Full<Bytes>>| {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    });
    let policy = tower_idempotency::client::RetryPolicy::new();
    let client = tower_idempotency::client::RetryLayer::new(policy.clone()).layer(client);
    client.oneshot(Request::post("/").body(Full::default()).unwrap()).await.unwrap();
    let down = tower::service_fn(async |_: Request<Full<Bytes>>| {
        Err::<Response<Full<Bytes>>, _>(std::io::Error::other("down"))
    });
    let down = tower_idempotency::client::RetryLayer::new(policy.max_tries(2)).layer(down);
    down.oneshot(Request::post("/").body(Full::default()).unwrap()).await.unwrap_err();

    let described = seen.0.lock().unwrap().described.clone();
    assert_eq!(described, seen.names(), "described, and seen");
    let known: BTreeSet<String> = described.iter().map(|name| exported(name)).collect();
    let dashboard = dashboard();
    let mut shown = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            shown.extend(
                series_in(target["expr"].as_str().unwrap())
                    .map(|name| name.trim_end_matches("_bucket").to_owned()),
            );
        }
    }
    assert_eq!(shown, known, "shown on the dashboard, and known");
    let guide = include_str!("../src/guide/operations.md");
    for name in series_in(guide) {
        assert!(known.contains(name.trim_end_matches("_bucket")), "{name} in the guide");
    }
}

#[test]
fn the_dashboard_can_be_loaded() {
    let dashboard = dashboard();
    assert!(dashboard["title"].is_string() && dashboard["schemaVersion"].as_u64() > Some(30));
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "every panel has an id of its own");
    let mut places = BTreeSet::new();
    for panel in panels {
        let place = &panel["gridPos"];
        assert!(places.insert((place["x"].as_u64(), place["y"].as_u64())), "panels overlap");
        assert!(!panel["targets"].as_array().unwrap().is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn the_age_of_the_oldest_handler_grows_while_it_runs() {
    let seen = Seen::default();
    let _recording = metrics::set_default_local_recorder(&seen);
    let shop = Shop::new(StoreDown::Reject);
    let age = || seen.value("idempotency.in_flight.oldest_age{}").unwrap();
    let engine = shop.layer.engine().clone();
    let (slow, ()) = tokio::join!(shop.pay(Some("a"), "very slow"), async {
        // Without any request to the engine: its keeper renews after ten seconds each.
        tokio::time::sleep(Duration::from_secs(25)).await;
        assert!((10.0..=25.0).contains(&age()), "{}", age());
        assert_eq!(seen.value("idempotency.in_flight{}"), Some(1.0));
        engine.refresh_gauges();
        assert!((24.9..=25.1).contains(&age()), "{}", age());
        assert!(engine.oldest_in_flight().is_some());
    });
    assert_eq!(slow, 200);
    assert_eq!((age(), engine.oldest_in_flight()), (0.0, None));
}

#[tokio::test(start_paused = true)]
async fn a_run_without_protection_is_counted_and_warned_of() {
    let (seen, log) = (Seen::default(), Log::install());
    let _recording = metrics::set_default_local_recorder(&seen);
    let shop = Shop::new(StoreDown::RunUnprotected);
    for _ in 0..3 {
        shop.store.inject(Verb::Claim, Fault::Fail(StoreErrorKind::Unavailable));
    }
    assert_eq!(shop.pay(Some("a"), "fine").await, 200);
    assert_eq!(seen.value("idempotency.requests{outcome=unprotected}"), Some(1.0));
    let log = log.text();
    assert!(log.lines().any(|line| line.contains("WARN") && line.contains("unprotected")), "{log}");
}

#[tokio::test(start_paused = true)]
async fn one_span_says_what_became_of_a_request_and_no_secret_is_in_it() {
    const SECRET: &str = "jane@example.com";
    let log = Log::install();
    let shop = Shop::new(StoreDown::Reject);
    let service = shop.layer.layer(tower::service_fn(async |_: Request<Full<Bytes>>| {
        tracing::info!("inside of the handler");
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("4242424242424242")))
    }));
    for _ in 0..2 {
        let request = Request::post("/pay").header("idempotency-key", SECRET);
        let request = request.body(Full::from("sk_live_1")).unwrap();
        let outer = tracing::info_span!("outer");
        let service = service.clone();
        tracing::Instrument::instrument(service.oneshot(request), outer).await.unwrap();
    }
    let log = log.text();
    let line = |part: &str| {
        log.lines()
            .find(|line| line.contains(part))
            .unwrap_or_else(|| panic!("no line with {part} in\n{log}"))
    };
    let inside = line("inside of the handler");
    assert!(inside.contains(" outer:") && !inside.contains("idempotent_request"), "{inside}");
    let executed = line("outcome=\"executed\"");
    assert!(executed.contains(" outer:idempotent_request{key="), "{executed}");
    assert!(executed.contains("attempt=1") && executed.contains("takeover=false"), "{executed}");
    let replayed = line("outcome=\"replayed\"");
    assert!(replayed.contains("elapsed_ms"), "{replayed}");
    for secret in [SECRET, "4242424242424242", "sk_live_1"] {
        assert!(!log.contains(secret), "{secret} in\n{log}");
    }
}

/// Fault B74: whoever misspells an excluded field is told so where operators look, once for each.
#[tokio::test(start_paused = true)]
async fn an_excluded_field_that_never_comes_is_warned_of_once() {
    let log = Log::install();
    let recipe = ["/sent_at", "/amunt", "/auth/tokn"].map(JsonPointer::from_static).into_iter();
    let recipe = recipe.fold(Recipe::new().canonical_json(), Recipe::exclude);
    let config = Config::builder().scope(Scope::global()).fingerprint(recipe).build().unwrap();
    let layer = IdempotencyLayer::new(config, MemoryStore::new());
    // Two routes that share the recipe, as one that is made by `with_config`, count together.
    let services = [layer.clone(), layer].map(|it| it.layer(tower::service_fn(handler)));
    let warnings = |pointer: &str| {
        let field = format!("pointer=\"{pointer}\"");
        let of_it = |line: &&str| line.contains("WARN") && line.contains(&field);
        log.text().lines().filter(of_it).count()
    };
    for number in 0..300 {
        let request = Request::post("/pay").header("idempotency-key", number.to_string());
        let request = request.header("content-type", "application/json");
        let body = format!(
            r#"{{"amount":{number},"auth":{{"token":"t"}}{}}}"#,
            match number {
                150 => r#","sent_at":1"#,
                _ if number < 99 => r#","sent_at":2"#,
                _ => "",
            }
        );
        let request = request.body(Full::from(body)).unwrap();
        services[number % 2].clone().oneshot(request).await.unwrap();
        let told = usize::from(number >= 99);
        assert_eq!(warnings("/amunt"), told, "after {} bodies", number + 1);
        assert_eq!(warnings("/auth/tokn"), told, "after {} bodies", number + 1);
    }
    assert_eq!(warnings("/sent_at"), 0);
    let log = log.text();
    assert!(log.contains("is it misspelt?") && !log.contains("\"token\""), "{log}");
}
