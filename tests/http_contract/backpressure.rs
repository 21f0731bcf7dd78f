//! What a limit on concurrency inside of the layer counts, beside running handlers: fault B25.
//!
//! Over tower's own services a permit is taken by `poll_ready`, before the layer has seen the request.
//! Under axum's `layer` it is taken when the handler is called. Both are in the guide's chapter on
//! layers.

use std::convert::Infallible;

use axum::body::Body;
use bytes::Bytes;
use futures_util::{FutureExt as _, Stream, stream};
use http::{Request, Response};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tower::limit::{ConcurrencyLimitLayer, GlobalConcurrencyLimitLayer};
use tower::{ServiceBuilder, ServiceExt as _, service_fn};

use crate::harness::{Ask, Builder, Seen, Shop, post, secs, settle_down};

/// Nothing here is to end by a time limit, however slow the machine.
fn patient(config: Builder) -> Builder {
    let config =
        config.store_call_timeout(secs(20)).claim_within(secs(25)).complete_within(secs(25));
    config.lease(secs(300)).request_timeout(secs(60)).wait(secs(20))
}

fn pay(key: &str) -> Ask {
    post("/payments").key(key)
}

/// A body that comes when it is sent.
fn upload() -> (mpsc::UnboundedSender<&'static str>, Body) {
    let (send, chunks) = mpsc::unbounded_channel();
    (send, Body::from_stream(received(chunks)))
}

fn received(
    chunks: mpsc::UnboundedReceiver<&'static str>,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send + 'static {
    stream::unfold(chunks, async |mut chunks| {
        let chunk = chunks.recv().await?;
        Some((Ok(Bytes::from(chunk)), chunks))
    })
}

#[tokio::test]
async fn fault_b25_over_towers_services_a_slow_claim_and_an_upload_hold_a_permit_each() {
    let shop = Shop::with(patient);
    let ledger = shop.ledger.clone();
    let handler = service_fn(move |_: Request<Body>| {
        ledger.note("paid");
        std::future::ready(Ok::<_, Infallible>(Response::new(Body::empty())))
    });
    let service = ServiceBuilder::new()
        .layer(shop.layer.clone())
        .layer(ConcurrencyLimitLayer::new(2))
        .service(handler);
    // Of another instance each time, which gives back at once what it has reserved or waits for.
    let is_free = || service.clone().ready_oneshot().now_or_never().is_some();
    let send = |request: Request<Body>| -> JoinHandle<Seen> {
        let service = service.clone();
        tokio::spawn(async move {
            let answer = service.oneshot(request).await.unwrap();
            Seen::read(answer.map(Body::new)).await
        })
    };

    // Two requests wait for slow claims: there is no permit for a third.
    let gate = shop.store.hold_claims(2);
    let claiming = [send(pay("a").request()), send(pay("b").request())];
    gate.entered().await;
    gate.entered().await;
    assert!(!is_free(), "two slow claims hold two permits");
    shop.ledger.expect(0);
    gate.open();
    for answer in claiming {
        answer.await.unwrap().fresh(200);
    }
    shop.ledger.expect(2);

    // Two uploads do so too, long before anything is claimed.
    let claims = shop.store.calls();
    let uploads = ["c", "d"].map(|key| {
        let (body, received) = upload();
        (body, send(pay(key).request_with(received)))
    });
    settle_down().await;
    assert!(!is_free(), "two uploads hold two permits");
    assert_eq!(shop.store.calls(), claims);
    for (body, answer) in uploads {
        body.send("amount=100").unwrap();
        drop(body);
        answer.await.unwrap().fresh(200);
    }
    assert!(is_free(), "nothing is held for longer");
    shop.ledger.expect(4);
}

#[tokio::test]
async fn fault_b25_under_axums_layer_neither_claims_nor_uploads_nor_waiters_hold_a_permit() {
    let (shop, inside) = Shop::gated(patient);
    // One limit for all routes: axum may apply a layer anew, and with it a limit of its own.
    let shop = shop.lined(|app| app.layer(GlobalConcurrencyLimitLayer::new(2)));
    // One handler runs, its twin waits for it, one request waits for its claim, one for its body.
    let running = shop.sending(&pay("runs"));
    inside.entered().await;
    let twin = shop.sending(&pay("runs"));
    settle_down().await;
    let slow = shop.store.hold_claims(1);
    let claiming = shop.sending(&pay("claims"));
    slow.entered().await;
    let (body, chunks) = upload();
    let uploading = shop.app().oneshot(pay("uploads").request_with(chunks));
    let uploading = tokio::spawn(uploading);
    settle_down().await;
    // There is room for another handler all the same, and for no more than that.
    let other = shop.sending(&pay("other"));
    timeout(secs(20), inside.entered()).await.expect("a permit is left");
    let one_too_many = shop.sending(&pay("one-too-many"));
    settle_down().await;
    shop.ledger.expect(2);
    inside.open();
    slow.open();
    body.send("amount=100").unwrap();
    drop(body);
    running.await.unwrap().fresh(201);
    twin.await.unwrap().replayed(201);
    for answer in [claiming, other, one_too_many] {
        answer.await.unwrap().fresh(201);
    }
    Seen::read(uploading.await.unwrap().unwrap()).await.fresh(201);
    shop.ledger.expect(5);
}
