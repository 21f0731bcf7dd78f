//! What a tower layer owes to the services around it: faults B24, B25, B30, B32, B56.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Extension, OriginalUri, Request as AxumRequest};
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse as _;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, stream};
use http::{HeaderMap, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use tokio::time::{Instant, timeout};
use tower::buffer::Buffer;
use tower::limit::ConcurrencyLimit;
use tower::{Layer as _, Service, ServiceExt as _, service_fn};
use tower_idempotency::middleware::{ResponseBody, ResponseFuture};
use tower_idempotency::{Config, Idempotency, IdempotencyLayer, MemoryStore, MissingKey, Scope};

use crate::harness::{Ask, Gate, Ledger, Seen, Shop, defaults, get, post, secs, settle_down};
use crate::log::Log;

fn layer() -> IdempotencyLayer {
    let config = Config::builder().scope(Scope::global()).missing_key(MissingKey::PassThrough);
    let config = config.wait(std::time::Duration::ZERO).request_limit(100).build().unwrap();
    IdempotencyLayer::new(config, MemoryStore::new())
}

fn pay() -> Ask {
    post("/payments").key("k")
}

/// Panics if an instance is called that was not made ready, as a careful service does.
#[derive(Debug)]
struct Probe {
    ready: bool,
    ledger: Ledger,
    gate: Option<Gate>,
}

impl Probe {
    fn new(ledger: &Ledger, gate: Option<&Gate>) -> Self {
        Self { ready: false, ledger: ledger.clone(), gate: gate.cloned() }
    }
}

impl Clone for Probe {
    fn clone(&self) -> Self {
        // Readiness belongs to one instance.
        Self::new(&self.ledger, self.gate.as_ref())
    }
}

impl Service<Request<Body>> for Probe {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        assert!(std::mem::take(&mut self.ready), "called without having been made ready");
        let (ledger, gate) = (self.ledger.clone(), self.gate.clone());
        async move {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            ledger.note(String::from_utf8_lossy(&body));
            if let Some(gate) = gate {
                gate.pass().await;
            }
            Ok(Response::new(Body::from("paid")))
        }
        .boxed()
    }
}

async fn read<B>(response: Response<ResponseBody<B>>) -> Seen
where
    B: http_body::Body + Send + 'static,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    Seen::read(response.map(Body::new)).await
}

/// Runs every path through one long-lived instance: claim, replay, 409, refusals, pass-through.
async fn every_path<S>(inner: S, ledger: &Ledger, gate: &Gate)
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Error: std::fmt::Debug + Send,
    S::Future: Send,
{
    let mut service = layer().layer(inner);
    let mut call = async |ask: Ask| {
        let exchange = async { service.ready().await.unwrap().call(ask.request()).await.unwrap() };
        read(timeout(secs(20), exchange).await.expect("nothing that was reserved is kept")).await
    };
    gate.open_once();
    let first = call(pay()).await.fresh(200);
    for _ in 0..3 {
        call(pay()).await.replay_of(&first);
        call(pay().body("other")).await.refused(422, "key_reused");
        call(pay().with("idempotency-key", "bad key")).await.refused(400, "key_invalid");
        call(pay().body("x".repeat(101))).await.refused(413, "request_too_large");
        gate.open_once();
        call(post("/payments")).await.fresh(200);
        gate.open_once();
        call(get("/payments").key("k")).await.fresh(200);
    }
    ledger.expect(7);
}

#[tokio::test]
async fn fault_b24_the_instance_that_was_ready_is_the_one_that_is_called() {
    let (ledger, gate) = (Ledger::default(), Gate::closed());
    every_path(Probe::new(&ledger, Some(&gate)), &ledger, &gate).await;
}

#[tokio::test]
async fn fault_b24_every_path_works_over_a_concurrency_limit_of_one() {
    let (ledger, gate) = (Ledger::default(), Gate::closed());
    let inner = ConcurrencyLimit::new(Probe::new(&ledger, Some(&gate)), 1);
    every_path(inner, &ledger, &gate).await;
}

#[tokio::test]
async fn fault_b24_every_path_works_over_a_buffer_of_one() {
    let (ledger, gate) = (Ledger::default(), Gate::closed());
    let inner = Buffer::new(Probe::new(&ledger, Some(&gate)), 1);
    every_path(inner, &ledger, &gate).await;
}

#[tokio::test]
async fn fault_b24_the_409_path_works_over_a_probe_too() {
    let (ledger, gate) = (Ledger::default(), Gate::closed());
    let service = layer().layer(Probe::new(&ledger, Some(&gate)));
    let running = tokio::spawn(service.clone().oneshot(pay().request()));
    gate.entered().await;
    let refused = service.clone().oneshot(pay().request()).await.unwrap();
    read(refused).await.refused(409, "key_in_use");
    gate.open();
    read(running.await.unwrap().unwrap()).await.fresh(200);
    ledger.expect(1);
}

#[tokio::test]
async fn fault_b25_replays_and_refusals_leave_no_permit_reserved() {
    let (ledger, gate) = (Ledger::default(), Gate::closed());
    let limited = ConcurrencyLimit::new(Probe::new(&ledger, Some(&gate)), 2);
    let mut service = layer().layer(limited.clone());
    gate.open_once();
    let first = service.ready().await.unwrap().call(pay().request()).await.unwrap();
    let first = read(first).await.fresh(200);
    gate.entered().await;
    for _ in 0..100 {
        let again = async { service.ready().await.unwrap().call(pay().request()).await.unwrap() };
        read(timeout(secs(20), again).await.expect("a permit is left")).await.replay_of(&first);
        let bad = pay().with("idempotency-key", "bad key").request();
        let bad = service.ready().await.unwrap().call(bad).await.unwrap();
        read(bad).await.refused(400, "key_invalid");
    }
    // Both permits are there, while that service lives on.
    let elsewhere = [(); 2].map(|()| tokio::spawn(limited.clone().oneshot(pay().request())));
    gate.entered().await;
    gate.entered().await;
    gate.open();
    for answer in elsewhere {
        answer.await.unwrap().unwrap();
    }
    ledger.expect(3);
    drop(service);
}

#[derive(Debug, PartialEq, thiserror::Error)]
#[error("the upstream hung up ({0})")]
struct HungUp(u32);

#[tokio::test]
async fn an_error_of_the_inner_service_passes_unchanged_and_leaves_the_outcome_unknown() {
    let ledger = Ledger::default();
    let counted = ledger.clone();
    let inner = service_fn(move |_: Request<Body>| {
        let number = counted.note("run");
        async move { Err::<Response<Body>, _>(HungUp(u32::try_from(number).unwrap())) }
    });
    let service = layer().layer(inner);
    let error = service.clone().oneshot(pay().request()).await.unwrap_err();
    assert_eq!(error, HungUp(1));
    let retry = service.clone().oneshot(pay().request()).await.unwrap();
    read(retry).await.refused(409, "outcome_unknown");
    ledger.expect(1);
    // So do those of requests that are not covered.
    assert_eq!(service.oneshot(get("/").request()).await.unwrap_err(), HungUp(2));
}

/// Never ready: whoever waits for it gets its own error.
#[derive(Clone, Debug)]
struct Broken;

impl Service<Request<Body>> for Broken {
    type Response = Response<Body>;
    type Error = HungUp;
    type Future = std::future::Ready<Result<Response<Body>, HungUp>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), HungUp>> {
        Poll::Ready(Err(HungUp(7)))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        unreachable!("it is never ready")
    }
}

#[tokio::test]
async fn an_error_of_readiness_passes_unchanged() {
    let mut service = layer().layer(Broken);
    assert_eq!(service.ready().await.unwrap_err(), HungUp(7));
}

/// Frames as they were sent, and whatever trailers there are.
async fn frames<B>(body: B) -> Vec<Result<Bytes, HeaderMap>>
where
    B: http_body::Body<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    let mut body = std::pin::pin!(body);
    let mut frames = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.unwrap();
        frames.push(frame.into_data().map_err(|frame| frame.into_trailers().unwrap()));
    }
    frames
}

fn framed() -> Body {
    let mut trailers = HeaderMap::new();
    trailers.insert("x-checksum", "7".parse().unwrap());
    let frames = [
        Ok::<_, Infallible>(Frame::data(Bytes::from("one"))),
        Ok(Frame::data(Bytes::from("two"))),
        Ok(Frame::trailers(trailers)),
    ];
    Body::new(StreamBody::new(stream::iter(frames)))
}

#[tokio::test]
async fn what_is_not_covered_streams_both_ways_frame_by_frame_with_trailers() {
    let service = layer().layer(service_fn(async |request: Request<Body>| {
        // The frames of the request come back as frames of the response.
        Ok::<_, Infallible>(Response::new(request.into_body()))
    }));
    for ask in [get("/"), post("/")] {
        let sent = frames(framed()).await;
        let response = service.clone().oneshot(ask.request_with(framed())).await.unwrap();
        assert_eq!(frames(response.into_body()).await, sent);
        assert_eq!(sent.len(), 3);
    }
}

// cases: 103
#[tokio::test]
async fn case_103_trailers_of_a_covered_answer_are_dropped_the_first_time_too() {
    let service = layer().layer(service_fn(async |_: Request<Body>| {
        let mut response = Response::new(framed());
        response.headers_mut().insert("trailer", "x-checksum".parse().unwrap());
        Ok::<_, Infallible>(response)
    }));
    for _ in 0..2 {
        let response = service.clone().oneshot(pay().request()).await.unwrap();
        assert_eq!(response.headers().get("trailer"), None, "it would announce what never comes");
        assert_eq!(frames(response.into_body()).await, [Ok(Bytes::from("onetwo"))]);
    }
}

#[tokio::test]
async fn fault_b56_the_layer_applied_twice_is_harmless() {
    let shop = Shop::open();
    let twice = shop.clone().wrapped(|app| app.layer(shop.layer.clone()));
    let two_engines = shop.clone().wrapped(|app| app.layer(shop.second_process().layer.clone()));
    for (shop, key) in [(twice, "a"), (two_engines, "b")] {
        let ask = post("/payments").key(key);
        let first = shop.send(&ask).await.fresh(201);
        shop.send(&ask).await.replay_of(&first);
        shop.send(&ask.body("other")).await.refused(422, "key_reused");
    }
    shop.ledger.expect(2);
}

#[tokio::test]
async fn it_works_with_from_fn_inside_and_outside_and_extensions_survive() {
    #[derive(Clone)]
    struct Mark(&'static str);
    let add = from_fn(async |mut request: AxumRequest, next: Next| {
        request.extensions_mut().insert(Mark("from outside"));
        next.run(request).await
    });
    let inside = from_fn(async |request: AxumRequest, next: Next| next.run(request).await);
    let shop = Shop::serving(defaults, |ledger| {
        Router::new().fallback(
            async move |OriginalUri(uri): OriginalUri, Extension(mark): Extension<Mark>| {
                ledger.note(mark.0);
                uri.to_string()
            },
        )
    });
    let shop = shop.lined(|app| app.layer(inside)).wrapped(|app| app.layer(add));
    let first = shop.send(&post("/a/b?c").key("k")).await.fresh(200);
    assert_eq!(first.text(), "/a/b?c");
    shop.send(&post("/a/b?c").key("k")).await.replay_of(&first);
    assert_eq!(shop.ledger.entries(), ["from outside"]);
}

/// The layer's own limit is one thing, the limit of the handler's extractors another.
#[tokio::test]
async fn fault_b32_the_body_limit_of_the_handler_is_unchanged() {
    for (limit, status) in [(200, 201), (99, 413)] {
        let shop = Shop::with(|config| config.request_limit(150));
        let shop = shop.lined(|app| app.layer(DefaultBodyLimit::max(limit)));
        let seen = shop.send(&pay().body("x".repeat(100))).await.fresh(status);
        assert_eq!(seen.header("content-type").is_some(), status == 413);
        let ours = shop.send(&post("/p").key("long").body("x".repeat(151))).await;
        ours.refused(413, "request_too_large");
    }
}

/// A limit that a layer outside put around the body is a limit too, not a broken upload.
#[tokio::test]
async fn fault_b32_a_body_limit_outside_is_413_as_well() {
    let limit = tower_http::limit::RequestBodyLimitLayer::new(50);
    let shop = Shop::open();
    let shop = shop.wrapped(|app| app.layer(limit));
    let chunks = stream::iter((0..10).map(|_| Ok::<_, Infallible>(Bytes::from("0123456789"))));
    let request = pay().request_with(Body::from_stream(chunks));
    let seen = Seen::read(shop.app().oneshot(request).await.unwrap()).await;
    assert_eq!(seen.status, 413);
    shop.expect_untouched();
}

#[tokio::test]
async fn route_layer_and_layer_on_a_method_router_work_like_layer_on_the_app() {
    let ledger = Ledger::default();
    let handler = {
        let ledger = ledger.clone();
        async move |body: Bytes| {
            ledger.note("run");
            body
        }
    };
    let methods = axum::routing::post(handler).layer(layer());
    let app = Router::new().route("/p", methods).route_layer(layer());
    let shop = Shop::open().wrapped(|_| app);
    let first = shop.send(&post("/p").key("k")).await.fresh(200);
    shop.send(&post("/p").key("k")).await.replay_of(&first);
    shop.send(&post("/nowhere").key("k")).await.fresh(404);
    ledger.expect(1);
}

#[tokio::test]
async fn a_body_type_other_than_axums_will_do() {
    let service = layer().layer(service_fn(async |request: Request<Full<Bytes>>| {
        Ok::<_, Infallible>(Response::new(request.into_body()))
    }));
    for replayed in [false, true] {
        let request = pay().request_with(Full::new(Bytes::from("whole")));
        let response = service.clone().oneshot(request).await.unwrap();
        assert_eq!(response.headers().contains_key("idempotent-replayed"), replayed);
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), "whole");
    }
}

/// The instance that was made ready keeps what it has reserved while its request waits for a twin:
/// a limit on concurrency inside the layer counts waiters. Put such limits outside.
#[tokio::test(start_paused = true)]
async fn fault_b25_a_waiter_holds_its_permit_of_the_inner_service_until_its_wait_ends() {
    let (ledger, gate) = (Ledger::default(), Gate::closed());
    let config = Config::builder().scope(Scope::global()).build().unwrap();
    let layer = IdempotencyLayer::new(config, MemoryStore::new());
    let limited = ConcurrencyLimit::new(Probe::new(&ledger, Some(&gate)), 2);
    let service = layer.layer(limited);
    let start = Instant::now();
    let running = tokio::spawn(service.clone().oneshot(pay().request()));
    gate.entered().await;
    let waiter = tokio::spawn(service.clone().oneshot(pay().request()));
    settle_down().await;
    let third = tokio::spawn(service.oneshot(pay().with("idempotency-key", "third").request()));
    gate.entered().await;
    assert_eq!(start.elapsed(), secs(2));
    read(waiter.await.unwrap().unwrap()).await.refused(409, "key_in_use");
    gate.open();
    for answer in [running, third] {
        read(answer.await.unwrap().unwrap()).await.fresh(200);
    }
    ledger.expect(2);
}

/// Ready when it is asked first, broken when it is asked again, as a connection that breaks.
#[derive(Clone, Debug, Default)]
struct BreaksDown {
    asked: u32,
}

impl Service<Request<Body>> for BreaksDown {
    type Response = Response<Body>;
    type Error = HungUp;
    type Future = std::future::Ready<Result<Response<Body>, HungUp>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), HungUp>> {
        self.asked += 1;
        Poll::Ready(if self.asked == 1 { Ok(()) } else { Err(HungUp(self.asked)) })
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        unreachable!("it has broken down")
    }
}

#[tokio::test]
async fn a_service_that_breaks_down_before_its_call_has_done_nothing() {
    let service = layer().layer(BreaksDown::default());
    for _ in 0..2 {
        // The second one would be told that the outcome is unknown if the first had not freed it.
        assert_eq!(service.clone().oneshot(pay().request()).await.unwrap_err(), HungUp(2));
    }
}

#[test]
fn public_types_can_be_cloned_and_sent_and_shared_where_a_server_needs_it() {
    fn layer_like<T: Clone + Send + Sync + std::fmt::Debug + 'static>() {}
    fn future_like<T: Send + std::fmt::Debug>() {}
    type Inner = BoxFuture<'static, Result<Response<Body>, Infallible>>;
    layer_like::<IdempotencyLayer>();
    layer_like::<Idempotency<Probe>>();
    layer_like::<Config>();
    layer_like::<tower_idempotency::Engine>();
    layer_like::<tower_idempotency::Execution>();
    layer_like::<tower_idempotency::IdempotencyKey>();
    future_like::<ResponseFuture<Inner, Body, Infallible>>();
    future_like::<ResponseBody<Body>>();
    let _ = "ok".into_response();
}

/// The layer has a span of its own around the handler, and handlers record fields in the one of whoever called.
#[tokio::test]
async fn the_span_of_the_caller_is_carried_into_the_handler() {
    use tracing::Instrument as _;
    let (_log, _guard) = Log::install(tracing::Level::INFO);
    let shop = Shop::serving(defaults, |ledger| {
        Router::new().fallback(async move || {
            let span = tracing::Span::current();
            ledger.note(span.metadata().map_or("none", tracing::Metadata::name));
        })
    });
    let span = tracing::info_span!("request");
    assert!(!span.is_disabled());
    shop.send(&pay()).instrument(span).await.fresh(200);
    assert_eq!(shop.ledger.entries(), ["request"]);
}
