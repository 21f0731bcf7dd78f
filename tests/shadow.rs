//! Shadow mode changes nothing and counts everything; and the guard of replays.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt as _;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use tower::ServiceExt as _;
use tower_idempotency::{
    Config, ConfigBuilder, Enforcement, Execution, IdempotencyLayer, MemoryStore, Outcome,
    ReplayDecision, Scope, Store,
};

type Effects = Arc<AtomicUsize>;
type MakeRequest = fn() -> Request<Body>;

/// Answers by its body: `slow`, `invalid`, `panic`, or anything else.
async fn pay(State(effects): State<Effects>, run: Option<Execution>, body: Bytes) -> Response {
    let effect = effects.fetch_add(1, Ordering::SeqCst) + 1;
    match &*body {
        b"slow" => tokio::time::sleep(Duration::from_millis(300)).await,
        b"invalid" => return (StatusCode::BAD_REQUEST, Outcome::NoEffect, "no").into_response(),
        _ => {}
    }
    let seen = if run.is_some() { "under a key" } else { "as ever" };
    let cookie = [("set-cookie", "a=1"), ("x-effect", "yes")];
    (StatusCode::CREATED, cookie, format!("effect {effect} {seen}")).into_response()
}

struct Shop {
    app: Router,
    effects: Effects,
}

fn shop(store: &Arc<dyn Store>, rules: ConfigBuilder) -> Shop {
    let effects = Effects::default();
    let layer = IdempotencyLayer::new(rules.build().unwrap(), Arc::clone(store));
    let app = Router::new().route("/pay", post(pay)).layer(layer).with_state(Arc::clone(&effects));
    Shop { app, effects }
}

fn memory() -> Arc<dyn Store> {
    Arc::new(MemoryStore::new())
}

fn watching() -> ConfigBuilder {
    Config::builder().scope(Scope::principal(account)).enforcement(Enforcement::Shadow)
}

fn account(parts: &Parts) -> Option<String> {
    parts.headers.get("x-account").map(|value| value.to_str().unwrap().to_owned())
}

fn ask(key: Option<&str>, account: Option<&str>, body: impl Into<Body>) -> Request<Body> {
    let mut request = Request::post("/pay");
    for (name, value) in [("idempotency-key", key), ("x-account", account)] {
        if let Some(value) = value {
            request = request.header(name, value);
        }
    }
    request.body(body.into()).unwrap()
}

type Got = (StatusCode, HeaderMap, Bytes);

async fn send(app: &Router, request: Request<Body>) -> Got {
    let (head, body) = app.clone().oneshot(request).await.unwrap().into_parts();
    (head.status, head.headers, body.collect().await.unwrap().to_bytes())
}

/// Counters of this test alone.
fn counters() -> (&'static PrometheusRecorder, PrometheusHandle) {
    let recorder = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
    let handle = recorder.handle();
    (recorder, handle)
}

fn count(counters: &PrometheusHandle, series: &str) -> u64 {
    let text = counters.render();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{series} ")));
    line.map_or(0, |number| number.parse().unwrap())
}

fn outcome(counters: &PrometheusHandle, outcome: &str) -> u64 {
    count(counters, &format!("idempotency_shadow_requests{{outcome=\"{outcome}\"}}"))
}

/// What is judged beside a request may take a moment longer than the request.
async fn settled() {
    tokio::time::sleep(Duration::from_millis(60)).await;
}

#[tokio::test]
async fn every_request_runs_and_is_answered_as_if_the_layer_were_not_there() {
    let (recorder, counters) = counters();
    let _recording = metrics::set_default_local_recorder(recorder);
    let shop = shop(&memory(), watching());
    let (bare_effects, a) = (Effects::default(), Some("a"));
    let bare = Router::new().route("/pay", post(pay)).with_state(Arc::clone(&bare_effects));
    let requests: [(&str, MakeRequest); 9] = [
        ("executed", || ask(Some("k"), Some("a"), "1")),
        ("replayed", || ask(Some("k"), Some("a"), "1")),
        ("mismatch", || ask(Some("k"), Some("a"), "2")),
        ("missing_key", || ask(None, Some("a"), "1")),
        ("invalid_key", || ask(Some("k,"), Some("a"), "1")),
        ("scope_missing", || ask(Some("k"), None, "1")),
        ("released", || ask(Some("n"), Some("a"), "invalid")),
        ("executed", || ask(Some("n"), Some("a"), "valid")),
        ("unjudged", || {
            let parts = [Ok::<_, std::io::Error>("1")];
            ask(Some("s"), Some("a"), Body::from_stream(futures_util::stream::iter(parts)))
        }),
    ];
    for (what, request) in requests {
        let before = outcome(&counters, what);
        let (with, without) = (send(&shop.app, request()).await, send(&bare, request()).await);
        assert_eq!(with, without, "{what}");
        settled().await;
        assert_eq!(outcome(&counters, what) - before, 1, "{what}: {}", counters.render());
    }
    let too_large = watching().request_limit(3);
    let limited = self::shop(&memory(), too_large);
    assert_eq!(send(&limited.app, ask(Some("k"), a, "1234")).await.0, 201);
    assert_eq!(outcome(&counters, "request_too_large"), 1);
    assert_eq!(shop.effects.load(Ordering::SeqCst), bare_effects.load(Ordering::SeqCst));
    assert_eq!(count(&counters, "idempotency_requests{outcome=\"executed\"}"), 0);
}

#[tokio::test]
async fn twins_both_run_and_one_is_counted_as_waiting_for_the_other() {
    let (recorder, counters) = counters();
    let _recording = metrics::set_default_local_recorder(recorder);
    let shop = shop(&memory(), watching());
    let twin = || send(&shop.app, ask(Some("k"), Some("a"), "slow"));
    let (one, other) = tokio::join!(twin(), twin());
    assert_eq!((one.0, other.0), (StatusCode::CREATED, StatusCode::CREATED));
    assert_eq!(shop.effects.load(Ordering::SeqCst), 2);
    settled().await;
    assert_eq!(count(&counters, "idempotency_shadow_waits"), 1);
    assert_eq!((outcome(&counters, "executed"), outcome(&counters, "replayed")), (1, 1));
}

#[tokio::test]
async fn a_store_that_has_no_room_is_counted_and_nobody_notices() {
    let (recorder, counters) = counters();
    let _recording = metrics::set_default_local_recorder(recorder);
    let full: Arc<dyn Store> = Arc::new(MemoryStore::builder().max_records(1).build().unwrap());
    let shop = shop(&full, watching());
    for key in ["one", "two"] {
        assert_eq!(send(&shop.app, ask(Some(key), Some("a"), "1")).await.0, 201);
        settled().await;
    }
    assert_eq!((outcome(&counters, "executed"), outcome(&counters, "store_unavailable")), (1, 1));
}

#[tokio::test]
async fn what_was_only_watched_does_not_bind_what_is_enforced_later() {
    let store = memory();
    let watched = shop(&store, watching());
    send(&watched.app, ask(Some("k"), Some("a"), "1")).await;
    settled().await;
    let enforced = shop(&store, watching().enforcement(Enforcement::Enforce));
    let (status, headers, body) = send(&enforced.app, ask(Some("k"), Some("a"), "2")).await;
    assert_eq!((status, &*body), (StatusCode::CREATED, &b"effect 1 under a key"[..]));
    assert!(!headers.contains_key("idempotent-replayed"));
    let (_, headers, _) = send(&enforced.app, ask(Some("k"), Some("a"), "2")).await;
    assert_eq!(headers["idempotent-replayed"], "true");
}

// ---- The guard of replays

fn code(body: &Bytes) -> String {
    let body: serde_json::Value = serde_json::from_slice(body).unwrap();
    body["code"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_caller_who_lost_the_right_gets_no_replay_and_gets_it_again_with_the_right() {
    let allowed = Arc::new(AtomicBool::new(true));
    let asked = Arc::new(AtomicUsize::new(0));
    let guard = {
        let (allowed, asked) = (Arc::clone(&allowed), Arc::clone(&asked));
        move |request: tower_idempotency::ReplayRequest| {
            assert_eq!(request.key().as_str(), "k");
            assert_eq!(request.head().headers["x-account"], "a");
            assert_eq!(request.status(), 201);
            asked.fetch_add(1, Ordering::SeqCst);
            let decision = match allowed.load(Ordering::SeqCst) {
                true => ReplayDecision::Allow,
                false => ReplayDecision::Refuse,
            };
            async move { decision }
        }
    };
    let rules = watching().enforcement(Enforcement::Enforce).authorize_replay(guard);
    let shop = shop(&memory(), rules);
    let again = || send(&shop.app, ask(Some("k"), Some("a"), "1"));
    assert_eq!(again().await.0, 201);
    assert_eq!(asked.load(Ordering::SeqCst), 0, "a first answer is no replay");
    let replay = again().await;
    assert_eq!(replay.1["idempotent-replayed"], "true");
    allowed.store(false, Ordering::SeqCst);
    let (status, headers, body) = again().await;
    assert_eq!(
        (status, code(&body).as_str()),
        (StatusCode::FORBIDDEN, "idempotency_replay_forbidden")
    );
    assert!(!headers.contains_key("idempotent-replayed") && !headers.contains_key("x-effect"));
    assert_eq!(headers["idempotency-key"], "k");
    // A mismatch tells nothing of the answer, so nobody is asked.
    let (status, ..) = send(&shop.app, ask(Some("k"), Some("a"), "2")).await;
    assert_eq!(status, 422);
    allowed.store(true, Ordering::SeqCst);
    assert_eq!(again().await.2, replay.2);
    assert_eq!((asked.load(Ordering::SeqCst), shop.effects.load(Ordering::SeqCst)), (3, 1));
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_does_not_answer_is_a_refusal() {
    let silent = |_| std::future::pending::<ReplayDecision>();
    refuses(watching().authorize_replay(silent)).await;
}

#[tokio::test]
async fn a_guard_that_panics_is_a_refusal() {
    refuses(watching().authorize_replay(|_| async { panic!("a guard") })).await;
    let at_once = |_| -> std::future::Ready<ReplayDecision> { panic!("a guard") };
    refuses(watching().authorize_replay(at_once)).await;
}

async fn refuses(rules: ConfigBuilder) {
    let shop = shop(&memory(), rules.enforcement(Enforcement::Enforce));
    assert_eq!(send(&shop.app, ask(Some("k"), Some("a"), "1")).await.0, 201);
    let (status, _, body) = send(&shop.app, ask(Some("k"), Some("a"), "1")).await;
    assert_eq!((status.as_u16(), code(&body).as_str()), (403, "idempotency_replay_forbidden"));
}
