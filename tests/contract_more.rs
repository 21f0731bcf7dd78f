//! Sections K and L of the contract, as far as no other suite has them: what refusals say and do not
//! say, and what operators see.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::routing::post;
use bytes::Bytes;
use http::{HeaderMap, Request, StatusCode};
use http_body_util::BodyExt as _;
use metrics_exporter_prometheus::PrometheusBuilder;
use rand::RngCore as _;
use serde_json::Value;
use tokio::sync::Semaphore;
use tower::ServiceExt as _;
use tower_idempotency::{
    Config, ErrorFlavour, IdempotencyKey, IdempotencyLayer, Identity, MemoryStore, Outcome,
    PostgresLeaseStore, PostgresStore, RedisStore, Scope, SqliteLeaseStore, SqliteStore,
    StorageKey, Store,
};

#[path = "support/postgres.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod postgres;
#[path = "support/redis.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod redis;

/// Something that must be seen nowhere.
const SECRET: &str = "jane.doe@example.com";

/// Answers with the status that its body names; `slow`, `panic` and `unknown` do what they say.
async fn handler(body: String) -> axum::response::Response {
    use axum::response::IntoResponse as _;
    let unknown = || (StatusCode::BAD_GATEWAY, Outcome::Unknown, "");
    match body.split(' ').next().unwrap() {
        "slow" => tokio::time::sleep(Duration::from_millis(200)).await,
        "panic" => panic!("as asked"),
        "unknown" => return unknown().into_response(),
        status => {
            if let Ok(status) = status.parse::<u16>() {
                return StatusCode::from_u16(status).unwrap().into_response();
            }
        }
    }
    (StatusCode::CREATED, "done").into_response()
}

fn app_with(store: impl Store, flavour: ErrorFlavour) -> Router {
    let config = Config::builder()
        .scope(Scope::global())
        .wait(Duration::ZERO)
        .request_limit(100)
        .error_flavour(flavour)
        .build()
        .unwrap();
    Router::new().route("/pay", post(handler)).layer(IdempotencyLayer::new(config, store))
}

fn app() -> Router {
    app_with(MemoryStore::new(), ErrorFlavour::Problem)
}

async fn send(
    app: &Router,
    headers: &[(&str, &str)],
    body: &str,
) -> (StatusCode, HeaderMap, Bytes) {
    let mut request = Request::post("/pay");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Body::from(body.to_owned())).unwrap();
    let (head, body) = app.clone().oneshot(request).await.unwrap().into_parts();
    (head.status, head.headers, body.collect().await.unwrap().to_bytes())
}

const KEY: (&str, &str) = ("idempotency-key", "k");

#[tokio::test]
async fn case_157_whatever_a_client_accepts_a_refusal_is_a_problem_document() {
    for accept in ["text/html", "image/png;q=1", "", "*/*", "application/json"] {
        let (status, headers, body) = send(&app(), &[("accept", accept)], "").await;
        assert_eq!(
            (status.as_u16(), &headers["content-type"]),
            (400, &"application/problem+json".parse().unwrap())
        );
        let body: Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(body["code"], "idempotency_key_missing");
    }
}

#[tokio::test]
async fn case_158_a_refusal_repeats_neither_key_nor_body_and_no_digest() {
    for flavour in [ErrorFlavour::Problem, ErrorFlavour::Stripe] {
        let app = app_with(MemoryStore::new(), flavour);
        let quoted = format!("\"{SECRET}\"");
        let keyed = [("idempotency-key", quoted.as_str())];
        let malformed = format!("{SECRET},");
        let long = SECRET.repeat(20);
        let body = format!("201 {SECRET}");
        send(&app, &keyed, &body).await;
        send(&app, &[("idempotency-key", "panic")], &format!("panic {SECRET}")).await;
        let refusals = [
            send(&app, &keyed, &format!("other {SECRET}")).await,
            send(&app, &[("idempotency-key", malformed.as_str())], &body).await,
            send(&app, &[("idempotency-key", long.as_str())], &body).await,
            send(&app, &[("idempotency-key", "panic")], &format!("panic {SECRET}")).await,
            send(&app, &[("idempotency-key", "large")], &SECRET.repeat(20)).await,
        ];
        for (status, headers, body) in refusals {
            assert!(status.is_client_error(), "{status}");
            let text = String::from_utf8(body.to_vec()).unwrap();
            assert!(!text.contains("jane"), "{text}");
            // Nothing as long as a digest, in any of the usual alphabets.
            let words = text.split(|c: char| !c.is_ascii_alphanumeric());
            assert!(words.clone().all(|word| word.len() < 32), "{text}");
            for (name, value) in headers.iter().filter(|(name, _)| *name != "idempotency-key") {
                assert!(!value.to_str().unwrap().contains("jane"), "{name}");
            }
        }
    }
}

#[tokio::test]
async fn case_159_a_status_without_a_body_has_none_in_replays_either() {
    for status in ["204", "304"] {
        let app = app();
        for replay in [false, true] {
            let (got, headers, body) = send(&app, &[KEY], status).await;
            assert_eq!((got.as_str(), body.len()), (status, 0));
            assert!(!headers.contains_key("content-type"));
            assert_eq!(headers.contains_key("idempotent-replayed"), replay);
        }
    }
}

/// One store of each kind, by its name, and what keeps them alive.
struct Stores {
    all: Vec<(&'static str, Arc<dyn Store>)>,
    _redis: redis::RedisServer,
    _postgres: Arc<postgres::PostgresServer>,
    _folder: tempfile::TempDir,
}

impl Stores {
    async fn start() -> Self {
        let redis = redis::RedisServer::start();
        let (postgres, url) = postgres::PostgresServer::shared();
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let on_redis = RedisStore::connect(&redis.url()).await.unwrap();
        let sqlite = SqliteStore::open(file("one.db")).await.unwrap();
        sqlite.migrate().await.unwrap();
        let sqlite_leases = SqliteLeaseStore::open(file("leases.db")).await.unwrap();
        sqlite_leases.migrate().await.unwrap();
        let in_postgres = PostgresStore::connect(&url).await.unwrap();
        in_postgres.migrate().await.unwrap();
        // In a database of its own: the two kinds share a table.
        let (_, url) = postgres::PostgresServer::shared();
        let postgres_leases = PostgresLeaseStore::connect(&url).await.unwrap();
        postgres_leases.migrate().await.unwrap();
        let all: Vec<(_, Arc<dyn Store>)> = vec![
            ("memory", Arc::new(MemoryStore::new())),
            ("redis", Arc::new(on_redis)),
            ("sqlite", Arc::new(sqlite)),
            ("sqlite_leases", Arc::new(sqlite_leases)),
            ("postgres", Arc::new(in_postgres)),
            ("postgres_leases", Arc::new(postgres_leases)),
        ];
        Self { all, _redis: redis, _postgres: postgres, _folder: folder }
    }
}

/// What is logged at every level, on all threads: stores have some of their own.
///
/// One subscriber for the whole program: with one for each test, a place in the code that is reached
/// for the first time meanwhile may be taken for switched off.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn install() -> &'static Self {
        static LOG: OnceLock<Log> = OnceLock::new();
        LOG.get_or_init(|| {
            let log = Self::default();
            let writer = log.clone();
            tracing_subscriber::fmt()
                .with_max_level(tracing::Level::TRACE)
                .with_ansi(false)
                .with_writer(move || writer.clone())
                .init();
            log
        })
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// One of everything: a run, a replay, a mismatch, a twin, a panic, an unknown outcome, a refusal.
async fn one_of_everything(app: &Router, key: &str, body: &str) {
    let sub = |name: &str| format!("\"{key} {name}\"");
    for (name, text) in [
        ("run", body),
        ("run", body),
        ("run", "201 other"),
        ("panic", "panic"),
        ("panic", "panic"),
        ("unknown", "unknown"),
        ("unknown", "unknown"),
        ("declined", "402"),
        ("declined", "402"),
    ] {
        send(app, &[("idempotency-key", &sub(name))], text).await;
    }
    let (one, two) = (sub("slow"), sub("slow"));
    let (one, two) = ([("idempotency-key", one.as_str())], [("idempotency-key", two.as_str())]);
    tokio::join!(send(app, &one, "slow"), send(app, &two, "slow"));
    send(app, &[("idempotency-key", &format!("{key},"))], body).await;
    send(app, &[], body).await;
}

#[tokio::test]
async fn case_161_neither_logs_nor_metrics_hold_a_key_or_a_body_and_spans_carry_the_hashed_one() {
    let log = Log::install();
    let recorder = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
    let _recording = metrics::set_default_local_recorder(recorder);
    let stores = Stores::start().await;
    for (name, store) in &stores.all {
        let key = format!("{SECRET} {name}");
        let app = app_with(Arc::clone(store), ErrorFlavour::Problem);
        one_of_everything(&app, &key, &format!("201 {SECRET}")).await;
        let logged = log.text();
        for (what, outcome) in [
            ("run", "executed"),
            ("run", "replayed"),
            ("run", "mismatch"),
            ("declined", "executed"),
        ] {
            let key = IdempotencyKey::new(&format!("{key} {what}")).unwrap();
            let id = StorageKey::new(&Identity::of_parts([""; 0]), &key).log_id();
            assert!(id.len() == 12 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
            let span = format!("idempotent_request{{key={id}");
            let outcome = format!("outcome=\"{outcome}\"");
            let told = |line: &str| line.contains(&span) && line.contains(&outcome);
            assert!(logged.lines().any(told), "{name}, {what}: {span} {outcome} in\n{logged}");
        }
    }
    let logged = log.text();
    assert!(logged.contains("idempotent request"), "{logged}");
    let counted = recorder.handle().render();
    assert!(counted.contains("idempotency_requests"), "{counted}");
    for text in [logged, counted] {
        assert!(!text.contains("jane") && !text.contains("example.com"), "{text}");
    }
}

#[tokio::test]
async fn case_162_a_key_with_an_address_in_it_is_not_in_the_store() {
    let server = redis::RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let app = app_with(store, ErrorFlavour::Problem);
    one_of_everything(&app, SECRET, &format!("201 {SECRET}")).await;
    let names = server.cli(&["keys", "*"]);
    assert!(names.lines().count() >= 4, "{names}");
    for name in names.lines() {
        // In a form that shows every byte.
        let value = server.cli(&["--no-raw", "get", name]);
        assert!(!name.contains("jane") && !value.contains("jane"), "{name}: {value}");
    }
}

#[tokio::test]
async fn case_163_replays_conflicts_mismatches_and_unknown_outcomes_are_counted_apart() {
    let recorder = Box::leak(Box::new(PrometheusBuilder::new().build_recorder()));
    let handle = recorder.handle();
    let _recording = metrics::set_default_local_recorder(recorder);
    one_of_everything(&app(), "k", "201").await;
    let text = handle.render();
    let count = |outcome: &str| {
        let series = format!("idempotency_requests{{outcome=\"{outcome}\"}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&series));
        line.map_or(0, |number| number.parse::<u64>().unwrap())
    };
    for (outcome, expected) in [
        ("executed", 3),
        ("replayed", 2),
        ("mismatch", 1),
        ("in_use", 1),
        ("handler_failed", 1),
        ("unknown", 1),
        ("outcome_unknown", 2),
        ("invalid_key", 1),
        ("missing_key", 1),
    ] {
        assert_eq!(count(outcome), expected, "{outcome}: {text}");
    }
}

#[tokio::test]
async fn case_164_every_replay_is_marked_also_of_an_error_and_no_first_answer_is() {
    for status in ["200", "201", "204", "302", "400", "402", "404", "409", "422", "500", "503"] {
        let app = app();
        for replay in [false, true, true] {
            let (got, headers, _) = send(&app, &[KEY], status).await;
            let marker = headers.get("idempotent-replayed").map(|value| value.to_str().unwrap());
            assert_eq!((got.as_str(), marker), (status, replay.then_some("true")));
        }
    }
}

/// Where handlers stop until they are let through.
#[derive(Clone)]
struct Gate {
    entered: Arc<Semaphore>,
    open: Arc<Semaphore>,
}

/// An answer of the kind that its body names.
async fn kinds(State(gate): State<Gate>, body: String) -> axum::response::Response {
    use axum::response::IntoResponse as _;
    gate.entered.add_permits(1);
    gate.open.acquire().await.unwrap().forget();
    match body.as_str() {
        "none" => http::Response::new(Body::from("no type")),
        _ => ([("content-type", body)], "a;b\r\n1;2").into_response(),
    }
}

/// The client stays, or leaves while the handler runs; the answer is stored by a lease store, or
/// committed with the handler's transaction.
#[tokio::test]
async fn fault_b44_the_content_type_is_the_handlers_on_every_path() {
    let types = ["text/csv", "text/plain; charset=iso-8859-1", "application/problem+json", "none"];
    let stores = Stores::start().await;
    for (store, kept) in &stores.all {
        let gate = Gate { entered: Arc::new(Semaphore::new(0)), open: Arc::new(Semaphore::new(0)) };
        let config = Config::builder().scope(Scope::global()).build().unwrap();
        let layer = IdempotencyLayer::new(config, Arc::clone(kept));
        let app = Router::new().route("/pay", post(kinds)).layer(layer);
        let app = app.with_state(gate.clone());
        for (path, leaves) in [("stays", false), ("leaves", true)] {
            for content_type in types {
                let key = format!("\"{path} {content_type}\"");
                let headers = [("idempotency-key", key.as_str())];
                if leaves {
                    tokio::select! {
                        _ = send(&app, &headers, content_type) => panic!("the gate is closed"),
                        entered = gate.entered.acquire() => entered.unwrap().forget(),
                    }
                }
                gate.open.add_permits(1);
                for replay in [leaves, true] {
                    let (status, headers, _) = send(&app, &headers, content_type).await;
                    let what = format!("{store}, {path}, {content_type}");
                    assert_eq!(status, 200, "{what}");
                    assert_eq!(headers.contains_key("idempotent-replayed"), replay, "{what}");
                    let got = headers.get("content-type").map(|value| value.to_str().unwrap());
                    assert_eq!(got, (content_type != "none").then_some(content_type), "{what}");
                }
                if !leaves {
                    gate.entered.acquire().await.unwrap().forget();
                }
            }
        }
    }
}

/// Bodies that are no text, or not the text that they are said to be.
fn bodies() -> Vec<(&'static str, Option<&'static str>, Vec<u8>)> {
    let mut random = vec![0; 1_000_000];
    rand::rng().fill_bytes(&mut random);
    let mut zip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    zip.write_all(&b"all work and no play ".repeat(100)).unwrap();
    vec![
        ("application/octet-stream", None, (0..=255).collect()),
        ("text/plain", Some("gzip"), zip.finish().unwrap()),
        ("application/octet-stream", None, random),
        ("application/json", None, b"{\"name\":\"\xff\xfe\0\xc3\"}".to_vec()),
    ]
}

#[tokio::test]
async fn fault_b33_bytes_that_are_no_text_come_back_from_every_store() {
    let bodies = Arc::new(bodies());
    let answers = Arc::clone(&bodies);
    let give = move |number: String| {
        let (media_type, encoding, body) = answers[number.parse::<usize>().unwrap()].clone();
        let mut response = http::Response::builder().header("content-type", media_type);
        if let Some(encoding) = encoding {
            response = response.header("content-encoding", encoding);
        }
        std::future::ready(response.body(Body::from(body)).unwrap())
    };
    let stores = Stores::start().await;
    for (store, kept) in &stores.all {
        let config = Config::builder().scope(Scope::global()).build().unwrap();
        let layer = IdempotencyLayer::new(config, Arc::clone(kept));
        let app = Router::new().route("/pay", post(give.clone())).layer(layer);
        for (number, (media_type, encoding, body)) in bodies.iter().enumerate() {
            let number = number.to_string();
            for replay in [false, true] {
                let (status, headers, got) =
                    send(&app, &[("idempotency-key", &number)], &number).await;
                let what = format!("{store}, body {number}, replay {replay}");
                assert_eq!(status, 200, "{what}");
                assert_eq!(headers.contains_key("idempotent-replayed"), replay, "{what}");
                assert!(got == body, "{what}: {} bytes became {}", body.len(), got.len());
                let header = |name| headers.get(name).map(|value| value.to_str().unwrap());
                assert_eq!(header("content-type"), Some(*media_type), "{what}");
                assert_eq!(header("content-encoding"), *encoding, "{what}");
            }
        }
    }
}

#[tokio::test]
async fn fault_b47_odd_json_comes_back_byte_for_byte() {
    let odd = "{ \"b\":[] ,\"a\":{},\"n\":9007199254740993, \"e\":1e2,\"f\":1.0,\"u\":\"\\u00e9\\u0000\", \"b\":1}";
    async fn echo(body: String) -> ([(&'static str, &'static str); 1], String) {
        ([("content-type", "application/json")], body)
    }
    let server = redis::RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let config = Config::builder().scope(Scope::global()).build().unwrap();
    let app = Router::new().route("/pay", post(echo)).layer(IdempotencyLayer::new(config, store));
    for replay in [false, true] {
        let (_, headers, body) = send(&app, &[KEY], odd).await;
        assert_eq!((&*body, headers.contains_key("idempotent-replayed")), (odd.as_bytes(), replay));
    }
}
