//! Where the layer goes among others: one test for each row of the table in the guide's chapter on
//! layers, with the layers of tower-http outside of ours and inside of it.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]
#![allow(clippy::result_large_err, reason = "tower-http's trait for validation wants a response")]

use std::io::{Read as _, Write as _};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, ACCESS_CONTROL_ALLOW_ORIGIN, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH,
    CONTENT_TYPE, ORIGIN, VARY,
};
use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode};
use http_body_util::BodyExt as _;
use tower::ServiceExt as _;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::cors::{AllowOrigin, CorsLayer};
use tower_http::decompression::RequestDecompressionLayer;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::request_id::{
    MakeRequestId, PropagateRequestIdLayer, RequestId, SetRequestIdLayer,
};
use tower_http::timeout::TimeoutLayer;
use tower_http::trace::TraceLayer;
use tower_http::validate_request::ValidateRequestHeaderLayer;
use tower_idempotency::{
    Config, EXPOSED_HEADERS, IDEMPOTENCY_KEY, IDEMPOTENT_REPLAYED, IdempotencyLayer, MemoryStore,
    Scope,
};

/// What a handler did, how long it takes after that, and whether it then panics.
#[derive(Clone, Debug, Default)]
struct Shop {
    effects: Arc<AtomicUsize>,
    slow: Duration,
    panics: bool,
}

impl Shop {
    fn effects(&self) -> usize {
        self.effects.load(Ordering::SeqCst)
    }

    fn routes(&self) -> Router {
        Router::new().route("/pay", post(pay)).with_state(self.clone())
    }
}

async fn pay(State(shop): State<Shop>, headers: HeaderMap, body: Bytes) -> Response {
    let effect = shop.effects.fetch_add(1, Ordering::SeqCst) + 1;
    tokio::time::sleep(shop.slow).await;
    assert!(!shop.panics, "as asked");
    assert!(!headers.contains_key(CONTENT_ENCODING) || body.starts_with(b"\x1f\x8b"));
    let receipt = format!("receipt {effect} for {} bytes {}", body.len(), "x".repeat(200));
    (StatusCode::CREATED, [(CONTENT_TYPE, "text/plain")], receipt).into_response()
}

fn ours() -> IdempotencyLayer {
    let config = Config::builder().scope(Scope::global()).wait(Duration::ZERO).build().unwrap();
    IdempotencyLayer::new(config, MemoryStore::new())
}

fn keyed() -> http::request::Builder {
    Request::post("/pay").header(IDEMPOTENCY_KEY, "k")
}

fn with(name: HeaderName, value: &'static str) -> Request<Body> {
    keyed().header(name, value).body(Body::from("1999")).unwrap()
}

fn plain() -> Request<Body> {
    keyed().body(Body::from("1999")).unwrap()
}

struct Got {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Got {
    fn is_replay(&self) -> bool {
        self.headers.get(IDEMPOTENT_REPLAYED).is_some_and(|value| value == "true")
    }

    fn code(&self) -> String {
        let body: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        body["code"].as_str().unwrap().to_owned()
    }

    fn header(&self, name: impl http::header::AsHeaderName) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    fn unzipped(&self) -> String {
        let mut text = String::new();
        flate2::read::GzDecoder::new(&*self.body).read_to_string(&mut text).unwrap();
        text
    }
}

async fn send(app: &Router, request: Request<Body>) -> Got {
    let response = app.clone().oneshot(request).await.unwrap();
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Got { status: head.status, headers: head.headers, body }
}

fn zipped(text: &str) -> Request<Body> {
    zipped_at(text, flate2::Compression::default())
}

/// With its length, as a client sends it.
fn zipped_at(text: &str, level: flate2::Compression) -> Request<Body> {
    let mut zip = flate2::write::GzEncoder::new(Vec::new(), level);
    zip.write_all(text.as_bytes()).unwrap();
    let zip = zip.finish().unwrap();
    let request = keyed().header(CONTENT_ENCODING, "gzip").header(CONTENT_LENGTH, zip.len());
    request.body(Body::from(zip)).unwrap()
}

#[tokio::test]
async fn row_time_limit() {
    let limit = |status| TimeoutLayer::with_status_code(status, Duration::from_millis(60));
    let shop = Shop { slow: Duration::from_millis(250), ..Shop::default() };
    let outside = shop.routes().layer(ours()).layer(limit(StatusCode::REQUEST_TIMEOUT));
    assert_eq!(send(&outside, plain()).await.status, 408);
    assert_eq!(send(&outside, plain()).await.code(), "idempotency_key_in_use");
    tokio::time::sleep(Duration::from_millis(300)).await;
    let retry = send(&outside, plain()).await;
    assert!(retry.is_replay() && retry.status == 201, "the handler went on");
    assert_eq!(shop.effects(), 1);

    for (status, code) in [(408, Some("idempotency_outcome_unknown")), (504, None)] {
        let shop = Shop { slow: Duration::from_millis(250), ..Shop::default() };
        let status = StatusCode::from_u16(status).unwrap();
        let inside = shop.routes().layer(limit(status)).layer(ours());
        assert_eq!(send(&inside, plain()).await.status, status);
        tokio::time::sleep(Duration::from_millis(300)).await;
        let retry = send(&inside, plain()).await;
        match code {
            Some(code) => assert_eq!((retry.status.as_u16(), retry.code()), (409, code.to_owned())),
            None => assert!(retry.is_replay() && retry.status == status),
        }
        assert_eq!(shop.effects(), 1);
    }
}

#[tokio::test]
async fn row_compression() {
    let shop = Shop::default();
    let outside = shop.routes().layer(ours()).layer(CompressionLayer::new());
    let first = send(&outside, with(ACCEPT_ENCODING, "gzip")).await;
    assert_eq!((first.header(CONTENT_ENCODING), first.is_replay()), (Some("gzip"), false));
    for refused in ["identity", "gzip;q=0"] {
        let retry = send(&outside, with(ACCEPT_ENCODING, refused)).await;
        assert_eq!((retry.header(CONTENT_ENCODING), retry.is_replay()), (None, true), "{refused}");
        assert_eq!(retry.body, first.unzipped());
    }
    let again = send(&outside, with(ACCEPT_ENCODING, "gzip")).await;
    assert!(again.is_replay());
    assert_eq!(
        (again.unzipped(), again.header(CONTENT_ENCODING)),
        (first.unzipped(), Some("gzip"))
    );
    assert_eq!(shop.effects(), 1);

    let inside = Shop::default().routes().layer(CompressionLayer::new()).layer(ours());
    let first = send(&inside, with(ACCEPT_ENCODING, "gzip")).await;
    let retry = send(&inside, with(ACCEPT_ENCODING, "identity")).await;
    assert_eq!((&retry.body, retry.header(CONTENT_ENCODING)), (&first.body, Some("gzip")));
    assert_eq!(retry.header(VARY), Some("accept-encoding"));
}

#[tokio::test]
async fn row_decompression() {
    let shop = Shop::default();
    let outside = shop.routes().layer(ours()).layer(RequestDecompressionLayer::new());
    assert_eq!(send(&outside, zipped("1999")).await.status, 201);
    let retry = send(&outside, plain()).await;
    assert!(retry.is_replay(), "both forms of a body are one request");
    assert!(retry.body.starts_with(b"receipt 1 for 4 bytes"));

    let shop = Shop::default();
    let inside = shop.routes().layer(RequestDecompressionLayer::new()).layer(ours());
    assert!(send(&inside, zipped("1999")).await.body.starts_with(b"receipt 1 for 4 bytes"));
    assert_eq!(send(&inside, plain()).await.code(), "idempotency_key_reused");
    assert!(send(&inside, zipped("1999")).await.is_replay());
    assert_eq!(shop.effects(), 1);
}

/// Fault B75: one text at several levels of gzip, and what the handler is told of the body's form.
#[tokio::test]
async fn fault_b75_another_level_of_gzip_and_the_headers_that_the_handler_sees() {
    use flate2::Compression;
    let text = "all work and no play makes jack a dull boy. ".repeat(20);
    let levels = [Compression::best(), Compression::none(), Compression::fast()];
    let given = Arc::new(Mutex::new(Vec::new()));
    let routes = || {
        let given = Arc::clone(&given);
        let note = async move |headers: HeaderMap, body: Bytes| {
            let of = |name| headers.get(name).map(|it: &HeaderValue| it.to_str().unwrap().into());
            let (coding, length) = (of(CONTENT_ENCODING), of(CONTENT_LENGTH));
            given.lock().unwrap().push((coding, length, body));
        };
        Router::new().route("/pay", post(note))
    };
    let run = || -> (Option<String>, Option<String>, Bytes) {
        let mut runs = given.lock().unwrap();
        assert_eq!(runs.len(), 1);
        runs.pop().unwrap()
    };
    let plain =
        || keyed().header(CONTENT_LENGTH, text.len()).body(Body::from(text.clone())).unwrap();

    // Outside: all forms are one request, and no header speaks of the form that is gone.
    for first in levels {
        let outside = routes().layer(ours()).layer(RequestDecompressionLayer::new());
        assert!(!send(&outside, zipped_at(&text, first)).await.is_replay());
        for level in levels {
            assert!(send(&outside, zipped_at(&text, level)).await.is_replay(), "{level:?}");
        }
        assert!(send(&outside, plain()).await.is_replay());
        let (coding, length, body) = run();
        assert_eq!((coding, &body[..]), (None, text.as_bytes()));
        assert!(length.is_none_or(|length| length == body.len().to_string()));
    }

    // Inside: bytes are compared as they came, and the handler sees no more of gzip than before.
    let inside = routes().layer(RequestDecompressionLayer::new()).layer(ours());
    assert!(!send(&inside, zipped_at(&text, levels[0])).await.is_replay());
    for level in &levels[1..] {
        let code = send(&inside, zipped_at(&text, *level)).await.code();
        assert_eq!(code, "idempotency_key_reused", "{level:?}");
    }
    assert_eq!(send(&inside, plain()).await.code(), "idempotency_key_reused");
    assert!(send(&inside, zipped_at(&text, levels[0])).await.is_replay());
    let (coding, length, body) = run();
    assert_eq!((coding, &body[..]), (None, text.as_bytes()));
    assert!(length.is_none_or(|length| length == body.len().to_string()));

    // Nowhere: the handler has the bytes as they came, and both headers describe them.
    let nowhere = routes().layer(ours());
    assert!(!send(&nowhere, zipped_at(&text, levels[0])).await.is_replay());
    let (coding, length, body) = run();
    assert_eq!(coding.as_deref(), Some("gzip"));
    assert_eq!(length, Some(body.len().to_string()));
    assert!(body.len() < text.len() && body.starts_with(b"\x1f\x8b"));
}

#[tokio::test]
async fn row_cors() {
    const SITES: [&str; 2] = ["https://a.example", "https://b.example"];
    let cors = || {
        CorsLayer::new()
            .allow_origin(AllowOrigin::list(SITES.map(HeaderValue::from_static)))
            .allow_headers([IDEMPOTENCY_KEY, CONTENT_TYPE])
            .allow_methods([http::Method::POST])
            .expose_headers(EXPOSED_HEADERS)
    };
    let preflight = || {
        Request::options("/pay")
            .header(ORIGIN, SITES[0])
            .header(IDEMPOTENCY_KEY, "k")
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "idempotency-key")
            .body(Body::empty())
            .unwrap()
    };
    let shop = Shop::default();
    let outside = shop.routes().layer(ours()).layer(cors());
    let allowed = send(&outside, preflight()).await;
    assert!(allowed.header("access-control-allow-headers").unwrap().contains("idempotency-key"));
    for (origin, replay) in [(SITES[0], false), (SITES[1], true), (SITES[0], true)] {
        let got = send(&outside, with(ORIGIN, origin)).await;
        assert_eq!(got.is_replay(), replay, "a preflight takes no claim");
        assert_eq!(got.header(ACCESS_CONTROL_ALLOW_ORIGIN), Some(origin));
        let exposed = got.header("access-control-expose-headers").unwrap();
        for name in EXPOSED_HEADERS {
            assert!(exposed.contains(name.as_str()), "{name} in {exposed}");
        }
    }
    assert_eq!(shop.effects(), 1);

    let inside = Shop::default().routes().layer(cors()).layer(ours());
    assert!(send(&inside, preflight()).await.status.is_success());
    let first = send(&inside, with(ORIGIN, SITES[0])).await;
    assert_eq!(first.header(ACCESS_CONTROL_ALLOW_ORIGIN), Some(SITES[0]));
    let retry = send(&inside, with(ORIGIN, SITES[1])).await;
    assert_eq!((retry.is_replay(), retry.header(ACCESS_CONTROL_ALLOW_ORIGIN)), (true, None));
}

/// Ids that count up.
#[derive(Clone, Default)]
struct Counting(Arc<AtomicUsize>);

impl MakeRequestId for Counting {
    fn make_request_id<B>(&mut self, _: &Request<B>) -> Option<RequestId> {
        let id = self.0.fetch_add(1, Ordering::SeqCst) + 1;
        Some(RequestId::new(HeaderValue::from(id)))
    }
}

#[tokio::test]
async fn row_request_ids() {
    let name = HeaderName::from_static("x-request-id");
    let set = || SetRequestIdLayer::new(name.clone(), Counting::default());
    let propagate = || PropagateRequestIdLayer::new(name.clone());
    let outside = Shop::default().routes().layer(ours()).layer(propagate()).layer(set());
    for (id, replay) in [("1", false), ("2", true)] {
        let got = send(&outside, plain()).await;
        let ids: Vec<_> =
            got.headers.get_all(&name).iter().map(|id| id.to_str().unwrap()).collect();
        assert_eq!((ids, got.is_replay()), (vec![id], replay));
    }

    let inside = Shop::default().routes().layer(propagate()).layer(set()).layer(ours());
    assert_eq!(send(&inside, plain()).await.header(&name), Some("1"));
    let retry = send(&inside, plain()).await;
    assert_eq!((retry.is_replay(), retry.header(&name)), (true, None));
}

#[tokio::test]
async fn row_tracing() {
    let seen = Arc::new(AtomicUsize::new(0));
    let trace = || {
        let seen = Arc::clone(&seen);
        TraceLayer::new_for_http().on_response(
            move |_: &Response<_>, _: Duration, _: &tracing::Span| {
                seen.fetch_add(1, Ordering::SeqCst);
            },
        )
    };
    let outside = Shop::default().routes().layer(ours()).layer(trace());
    let (first, retry) = (send(&outside, plain()).await, send(&outside, plain()).await);
    assert_eq!((&first.body, retry.is_replay()), (&retry.body, true));
    assert_eq!(seen.swap(0, Ordering::SeqCst), 2, "outside it sees every request");

    let inside = Shop::default().routes().layer(trace()).layer(ours());
    let (first, retry) = (send(&inside, plain()).await, send(&inside, plain()).await);
    assert_eq!((&first.body, retry.is_replay()), (&retry.body, true));
    assert_eq!(seen.load(Ordering::SeqCst), 1, "inside it sees the handler's runs");
}

#[tokio::test]
async fn row_body_limit() {
    let long = || keyed().body(Body::from("x".repeat(100))).unwrap();
    let streamed = || {
        let parts = (0..10).map(|_| Ok::<_, std::io::Error>("x".repeat(9)));
        let parts = futures_util::stream::iter(parts);
        keyed().body(Body::from_stream(parts)).unwrap()
    };
    let declared = |request: Request<Body>| {
        let (mut head, body) = request.into_parts();
        head.headers.insert("content-length", HeaderValue::from_static("100"));
        Request::from_parts(head, body)
    };
    let shop = Shop::default();
    let outside = shop.routes().layer(ours()).layer(RequestBodyLimitLayer::new(10));
    assert_eq!(send(&outside, declared(long())).await.status, 413);
    assert_eq!(send(&outside, streamed()).await.code(), "idempotency_request_too_large");
    let smaller = send(&outside, plain()).await;
    assert_eq!((smaller.status.as_u16(), smaller.is_replay()), (201, false), "no claim was taken");
    assert_eq!(shop.effects(), 1);

    let shop = Shop::default();
    let inside = shop.routes().layer(RequestBodyLimitLayer::new(10)).layer(ours());
    assert_eq!(send(&inside, declared(long())).await.status, 413);
    assert!(send(&inside, declared(long())).await.is_replay(), "it is the handler's answer");
    assert_eq!(send(&inside, plain()).await.code(), "idempotency_key_reused");
    assert_eq!(shop.effects(), 0);
}

#[tokio::test]
async fn row_catch_panic() {
    let shop = Shop { panics: true, ..Shop::default() };
    let outside = shop.routes().layer(ours()).layer(CatchPanicLayer::new());
    let first = send(&outside, plain()).await;
    assert_eq!(
        (first.status.as_u16(), first.code().as_str()),
        (500, "idempotency_outcome_unknown")
    );
    let retry = send(&outside, plain()).await;
    assert_eq!(
        (retry.status.as_u16(), retry.code().as_str()),
        (409, "idempotency_outcome_unknown")
    );
    assert_eq!(shop.effects(), 1);

    let shop = Shop { panics: true, ..Shop::default() };
    let inside = shop.routes().layer(CatchPanicLayer::new()).layer(ours());
    for replay in [false, true] {
        let got = send(&inside, plain()).await;
        assert_eq!((got.status.as_u16(), got.is_replay()), (500, replay));
        assert_eq!(got.header("stripe-should-retry"), Some("false"));
    }
    assert_eq!(shop.effects(), 1);
}

#[tokio::test]
async fn row_authentication() {
    let valid = Arc::new(AtomicBool::new(true));
    let auth = || {
        let valid = Arc::clone(&valid);
        ValidateRequestHeaderLayer::custom(move |request: &mut Request<Body>| {
            let known = request.headers().get(AUTHORIZATION).is_some_and(|it| it == "Bearer a");
            let allowed = known && valid.load(Ordering::SeqCst);
            allowed.then_some(()).ok_or_else(|| StatusCode::UNAUTHORIZED.into_response())
        })
    };
    let shop = Shop::default();
    let outside = shop.routes().layer(ours()).layer(auth());
    assert_eq!(send(&outside, plain()).await.status, 401);
    assert_eq!(send(&outside, with(AUTHORIZATION, "Bearer a")).await.status, 201);
    assert!(send(&outside, with(AUTHORIZATION, "Bearer a")).await.is_replay());
    valid.store(false, Ordering::SeqCst);
    assert_eq!(send(&outside, with(AUTHORIZATION, "Bearer a")).await.status, 401, "revoked");
    assert_eq!(shop.effects(), 1);

    valid.store(true, Ordering::SeqCst);
    let shop = Shop::default();
    let inside = shop.routes().layer(auth()).layer(ours());
    assert_eq!(send(&inside, plain()).await.status, 401);
    assert_eq!(
        send(&inside, with(AUTHORIZATION, "Bearer a")).await.status,
        201,
        "401 frees the key"
    );
    valid.store(false, Ordering::SeqCst);
    assert!(send(&inside, plain()).await.is_replay(), "nobody asks");
    assert_eq!(shop.effects(), 1);
}

#[tokio::test]
async fn row_rate_limit() {
    let exhausted = Arc::new(AtomicBool::new(true));
    let limit = || {
        let exhausted = Arc::clone(&exhausted);
        ValidateRequestHeaderLayer::custom(move |_: &mut Request<Body>| {
            let free = !exhausted.load(Ordering::SeqCst);
            free.then_some(()).ok_or_else(|| StatusCode::TOO_MANY_REQUESTS.into_response())
        })
    };
    for outer in [true, false] {
        exhausted.store(true, Ordering::SeqCst);
        let shop = Shop::default();
        let app = match outer {
            true => shop.routes().layer(ours()).layer(limit()),
            false => shop.routes().layer(limit()).layer(ours()),
        };
        assert_eq!(send(&app, plain()).await.status, 429);
        exhausted.store(false, Ordering::SeqCst);
        let run = send(&app, plain()).await;
        assert_eq!((run.status.as_u16(), run.is_replay()), (201, false), "the key is free");
        exhausted.store(true, Ordering::SeqCst);
        let retry = send(&app, plain()).await;
        match outer {
            true => assert_eq!(retry.status, 429, "replays count"),
            false => assert!(retry.is_replay(), "replays do not count"),
        }
        assert_eq!(shop.effects(), 1);
    }
}

#[test]
fn every_row_of_the_guides_table_has_a_test_and_every_test_a_row() {
    let guide = include_str!("../src/guide/layers.md");
    let rows = guide.lines().filter(|line| line.starts_with("| **"));
    let name = |row: &str| {
        let name = row.split("**").nth(1).unwrap();
        format!("row_{}", name.to_lowercase().replace([' ', '-'], "_"))
    };
    let rows: Vec<String> = rows.map(name).collect();
    let tests: Vec<&str> = include_str!("layers.rs")
        .lines()
        .filter_map(|line| line.strip_prefix("async fn row_"))
        .map(|line| line.trim_end_matches("() {"))
        .collect();
    assert_eq!(rows.len(), tests.len(), "{rows:?} {tests:?}");
    for test in tests {
        assert!(rows.contains(&format!("row_{test}")), "{test} is not in {rows:?}");
    }
}
