//! Protected records: every store keeps its promises with them, they open nowhere else, keys rotate, and nothing
//! of a request or an answer can be found at rest, in the log or in the metrics.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::convert::Infallible;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Full};
use tower::{Layer as _, ServiceExt as _};
use tower_idempotency::store::{Protected, ProtectionKeyId, ProtectionKeys, conformance};
use tower_idempotency::{
    Config, IdempotencyLayer, MemoryStore, Recipe, RedisStore, Scope, Store, StoredBodies,
};

mod support;

use support::redis::RedisServer;

fn keys(number: u8) -> ProtectionKeys {
    ProtectionKeys::new(ProtectionKeyId::from_number(number.into()), &[number; 32])
}

/// A shop on a store; the answer says how often its handler has run.
struct Shop {
    layer: IdempotencyLayer,
    runs: Arc<AtomicUsize>,
}

struct Answer {
    status: u16,
    headers: HeaderMap,
    body: Bytes,
}

impl Shop {
    fn new(store: impl Store) -> Self {
        Self::with(store, StoredBodies::Keep)
    }

    fn with(store: impl Store, bodies: StoredBodies) -> Self {
        let config = Config::builder()
            .scope(Scope::principal(|_: &_| Some(ACCOUNT)))
            .fingerprint(Recipe::new().keyed("1", b"a secret"))
            .stored_bodies(bodies)
            .build()
            .unwrap();
        Self { layer: IdempotencyLayer::new(config, store), runs: Arc::default() }
    }

    async fn pay(&self, key: &str) -> Answer {
        let runs = Arc::clone(&self.runs);
        let service = self.layer.layer(tower::service_fn(move |_: Request<Full<Bytes>>| {
            runs.fetch_add(1, Ordering::SeqCst);
            let response = Response::builder().status(201).header("location", "/p/1");
            let response = response.header("x-receipt", ANSWER_HEADER);
            let response = response.body(Full::<Bytes>::from(ANSWER_BODY)).unwrap();
            std::future::ready(Ok::<_, Infallible>(response))
        }));
        let request = Request::post("/pay").header("idempotency-key", key);
        let request = request.header("x-card", REQUEST_HEADER).body(Full::from(REQUEST_BODY));
        let (head, body) = service.oneshot(request.unwrap()).await.unwrap().into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer { status: head.status.as_u16(), headers: head.headers, body }
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

const ACCOUNT: &str = "planted-account-jane";
const KEY: &str = "planted-key-5512";
const REQUEST_HEADER: &str = "planted-request-header";
const REQUEST_BODY: &str = "{\"card\":\"planted-request-4242424242424242\"}";
const ANSWER_HEADER: &str = "planted-answer-header";
const ANSWER_BODY: &str = "{\"iban\":\"planted-answer-DE89370400440532013000\"}";

#[tokio::test]
async fn the_memory_store_keeps_its_promises_with_protected_records() {
    conformance::run_all(&Protected::new(MemoryStore::new(), keys(1))).await;
}

#[tokio::test]
async fn the_redis_store_keeps_its_promises_with_protected_records() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    conformance::run_all(&Protected::new(store, keys(1))).await;
}

#[tokio::test]
async fn a_record_that_is_moved_to_another_key_does_not_open() {
    let server = RedisServer::start();
    // The checks at the start leave a record of their own for some seconds.
    let checks = tower_idempotency::store::redis::StartupChecks::Skip;
    let builder = RedisStore::builder().startup_checks(checks);
    let store = builder.connect(&server.url()).await.unwrap();
    let shop = Shop::new(Protected::new(store, keys(1)));
    assert_eq!(shop.pay("one").await.status, 201);
    let records = || -> Vec<String> {
        let names = server.cli(&["keys", "*"]);
        names.lines().filter(|name| *name != "idem:{ready}").map(str::to_owned).collect()
    };
    let one = records().pop().unwrap();
    assert_eq!(shop.pay("two").await.status, 201);
    let two = records().into_iter().find(|name| *name != one).unwrap();
    assert_eq!(server.cli(&["copy", &one, &two, "replace"]), "1");

    // The same request, so without protection the answer to "one" would be given for "two".
    let refused = shop.pay("two").await;
    assert_eq!(refused.status, 503);
    assert!(String::from_utf8_lossy(&refused.body).contains("idempotency_record_unreadable"));
    assert_eq!(shop.pay("one").await.headers["idempotent-replayed"], "true");
    assert_eq!(shop.runs(), 2, "nothing ran");
}

#[tokio::test]
async fn keys_rotate_without_losing_a_record() {
    let id = ProtectionKeyId::from_number;
    let inside = Arc::new(MemoryStore::new());
    let shop = |keys| Shop::new(Protected::new(Arc::clone(&inside), keys));
    let first = shop(keys(1));
    assert_eq!(first.pay("a").await.status, 201);
    // Every process can read both before one writes the new one.
    let prepared = shop(keys(1).also_open(id(2), &[2; 32]));
    let rotated = shop(keys(2).also_open(id(1), &[1; 32]));
    assert_eq!(rotated.pay("a").await.headers["idempotent-replayed"], "true");
    assert_eq!(rotated.pay("b").await.status, 201);
    for key in ["a", "b"] {
        assert_eq!(prepared.pay(key).await.headers["idempotent-replayed"], "true");
    }
    // Too early without the old key: refused, and nothing is lost.
    let hasty = shop(keys(2));
    assert_eq!(hasty.pay("a").await.status, 503);
    assert_eq!(hasty.pay("b").await.headers["idempotent-replayed"], "true");
    assert_eq!(rotated.pay("a").await.headers["idempotent-replayed"], "true");
    assert_eq!((hasty.runs(), prepared.runs()), (0, 0));
}

#[tokio::test]
async fn protection_can_be_switched_on_over_records_that_have_none() {
    let inside = Arc::new(MemoryStore::new());
    let before = Shop::new(Arc::clone(&inside));
    assert_eq!(before.pay("a").await.status, 201);
    let strict = Shop::new(Protected::new(Arc::clone(&inside), keys(1)));
    assert_eq!(strict.pay("a").await.status, 503);
    let during = Shop::new(Protected::new(Arc::clone(&inside), keys(1).also_open_unprotected()));
    let replay = during.pay("a").await;
    assert_eq!((replay.status, replay.body), (201, Bytes::from(ANSWER_BODY)));
    assert_eq!((strict.runs(), during.runs()), (0, 0));
    // The other way, which forgets the key: refused as well, never taken for an answer.
    assert_eq!(during.pay("b").await.status, 201);
    assert_eq!(before.pay("b").await.status, 503);
}

#[tokio::test]
async fn a_route_that_keeps_no_bodies_keeps_none() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let shop = Shop::with(store, StoredBodies::Never);
    let first = shop.pay(KEY).await;
    assert_eq!((first.status, first.body), (201, Bytes::from(ANSWER_BODY)));
    let retry = shop.pay(KEY).await;
    assert_eq!((retry.status, shop.runs()), (409, 1));
    assert_eq!(retry.headers["location"], "/p/1");
    let body: serde_json::Value = serde_json::from_slice(&retry.body).unwrap();
    assert_eq!(body["code"], "idempotency_result_unavailable");
    assert_eq!(body["original_status"], 201);
    assert_eq!(planted(&at_rest(&server)), Vec::<&str>::new());
}

/// Everything the server holds, as it writes it to its disk.
fn at_rest(server: &RedisServer) -> Vec<u8> {
    server.cli(&["config", "set", "rdbcompression", "no"]);
    server.cli(&["save"]);
    let value = |name| server.cli(&["config", "get", name]).lines().last().unwrap().to_owned();
    std::fs::read(Path::new(&value("dir")).join(value("dbfilename"))).unwrap()
}

/// Which secrets are in there.
fn planted(haystack: &[u8]) -> Vec<&'static str> {
    let secrets = [ACCOUNT, KEY, REQUEST_HEADER, REQUEST_BODY, ANSWER_HEADER, ANSWER_BODY];
    let more = ["4242424242424242", "DE89370400440532013000", "planted"];
    let found =
        |secret: &&str| haystack.windows(secret.len()).any(|window| window == secret.as_bytes());
    secrets.into_iter().chain(more).filter(found).collect()
}

static LOG: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Log;

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        LOG.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn nothing_of_a_request_or_an_answer_is_at_rest_in_the_log_or_in_the_metrics() {
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(|| Log)
        .try_init()
        .unwrap();
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    let _recording = metrics::set_default_local_recorder(&recorder);

    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let shop = Shop::new(Protected::new(store, keys(1)));
    assert_eq!(shop.pay(KEY).await.status, 201);
    let replay = shop.pay(KEY).await;
    assert_eq!((replay.status, replay.body), (201, Bytes::from(ANSWER_BODY)));
    assert_eq!(replay.headers["x-receipt"], ANSWER_HEADER);
    // Also what is said when things go wrong.
    server.cli(&["config", "set", "maxmemory", "1"]);
    assert_eq!(shop.pay("planted-key-other").await.status, 503);
    server.cli(&["config", "set", "maxmemory", "0"]);
    let wrong = RedisStore::connect(&server.url()).await.unwrap();
    let wrong = Shop::new(Protected::new(wrong, keys(2)));
    assert_eq!(wrong.pay(KEY).await.status, 503);

    let dump = at_rest(&server);
    assert!(dump.len() > 200, "the record is there");
    assert_eq!(planted(&dump), Vec::<&str>::new(), "at rest");
    let log = LOG.lock().unwrap().clone();
    assert!(String::from_utf8_lossy(&log).contains("idempotent_request"), "the log is there");
    assert_eq!(planted(&log), Vec::<&str>::new(), "in the log");
    let metrics = handle.render();
    assert!(metrics.contains("idempotency_requests"), "{metrics}");
    assert_eq!(planted(metrics.as_bytes()), Vec::<&str>::new(), "in the metrics");

    // That this search finds things: the same without protection.
    let open = RedisStore::connect(&server.url()).await.unwrap();
    assert_eq!(Shop::new(open).pay("planted-key-open").await.status, 201);
    assert!(planted(&at_rest(&server)).contains(&ANSWER_BODY));
}
