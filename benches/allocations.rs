//! What a request allocates within a service, next to the floor: `cargo bench --bench allocations`.
//!
//! Counted from the router on, and with what the connection to Redis allocates for it; a server's own reading and
//! writing comes on top, for both alike. In a program of its own, because its allocator counts.

#[path = "servers/floor.rs"]
#[allow(dead_code, reason = "a server elsewhere")]
mod floor;
#[path = "../tests/support/redis.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "written for tests, which use the rest"
)]
mod redis;
#[path = "../examples/bench_server.rs"]
#[allow(dead_code, reason = "a server elsewhere")]
mod server;

use allocation_counter::{AllocationInfo, measure};
use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use tokio::runtime::Runtime;
use tower::ServiceExt as _;

use redis::RedisServer;

/// Requests that are counted, and as many before them, which fill maps and threads' supplies.
const REQUESTS: usize = 1_000;
/// What a payment weighs.
const ORDER: &str = "{\"amount\":1999,\"currency\":\"EUR\",\"description\":\"an order of about two hundred bytes, as \
                     payments have them, with the name of a customer, a reference, and a note on it\",\"pad\":\"xxxxxxx\"}";

fn main() {
    let redis = RedisServer::start();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let ours = |store: &str| runtime.block_on(server::app(store, &redis.url())).expect("a service");
    let floor = |store: &str| runtime.block_on(floor::app(store, &redis.url())).expect("a service");
    let row = |name: &str, ours: &Router, floor: &Router, key: fn(&str, usize) -> String| {
        let [ours, floor] = [("ours", ours), ("floor", floor)]
            .map(|(who, app)| counted(&runtime, app, &|n| key(who, n)));
        let of = |counted: &AllocationInfo| {
            let requests = REQUESTS as f64;
            (counted.count_total as f64 / requests, counted.bytes_total as f64 / requests)
        };
        let ((ours, our_bytes), (floor, floor_bytes)) = (of(&ours), of(&floor));
        println!("| {name} | {ours:.1} | {floor:.1} | {our_bytes:.0} | {floor_bytes:.0} |");
    };
    println!(
        "| a request | allocations | of the floor | bytes | of the floor |\n|---|---|---|---|---|"
    );
    let (in_redis, by_hand) = (ours(""), floor(""));
    row("fresh key, Redis", &in_redis, &by_hand, |who, n| format!("{who}-{n:030}"));
    row("replay, Redis", &in_redis, &by_hand, |who, _| format!("{who}-once"));
    let (in_memory, without) = (ours("memory"), floor("none"));
    row("fresh key, memory store; no layer at all", &in_memory, &without, |who, n| {
        format!("{who}-{n:030}")
    });
    row("replay, memory store; no layer at all", &in_memory, &without, |who, _| {
        format!("{who}-once")
    });
}

fn counted(runtime: &Runtime, app: &Router, key: &dyn Fn(usize) -> String) -> AllocationInfo {
    let request = |number| {
        let request = Request::post("/v1/payments").header("content-type", "application/json");
        let request = request.header("idempotency-key", key(number));
        request.body(Body::from(ORDER)).expect("a request")
    };
    let requests: Vec<_> = (0..2 * REQUESTS).map(request).collect();
    let mut requests = requests.into_iter();
    let mut send = |count| {
        runtime.block_on(async {
            for request in requests.by_ref().take(count) {
                let response = app.clone().oneshot(request).await.expect("an answer");
                assert_eq!(response.status(), StatusCode::CREATED);
                let body = to_bytes(response.into_body(), usize::MAX).await.expect("its body");
                assert_eq!(body.len(), 300);
            }
        });
    };
    send(REQUESTS);
    measure(|| send(REQUESTS))
}
