//! What an upload costs in memory. In a binary of its own, because of its counting allocator.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::convert::Infallible;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::{Config, IdempotencyLayer, MemoryStore, Scope};

const LENGTH: usize = 1 << 20;

/// The most memory that was held at once while a body of 1 MiB in such frames was taken in.
fn peak(frame: usize) -> u64 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let config = Config::builder().scope(Scope::global()).request_limit(LENGTH).build().unwrap();
    let layer = IdempotencyLayer::new(config, MemoryStore::new());
    let service = layer.layer(service_fn(async |request: Request<Body>| {
        let body = axum::body::to_bytes(request.into_body(), LENGTH).await.unwrap();
        assert_eq!(body.len(), LENGTH);
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    // Frames are slices of one buffer, as a server makes them.
    let sent = Bytes::from(vec![b'x'; LENGTH]);
    let frames = (0..LENGTH / frame).map(move |n| sent.slice(n * frame..(n + 1) * frame));
    let body = Body::from_stream(stream::iter(frames.map(Ok::<_, Infallible>)));
    let request = Request::post("/").header("idempotency-key", "k").body(body).unwrap();
    let counted = allocation_counter::measure(|| {
        let response = runtime.block_on(service.oneshot(request)).unwrap();
        assert_eq!(response.status(), 200);
    });
    counted.bytes_max
}

#[test]
fn a_body_in_tiny_frames_takes_hardly_more_memory_than_its_length() {
    for frame in [LENGTH, 1024, 1] {
        let peak = peak(frame);
        assert!(peak < 4 * LENGTH as u64, "frames of {frame}: {peak} bytes");
    }
}
