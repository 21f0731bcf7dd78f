//! Streams, endless and slow bodies, and clients that leave while the handler runs.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use bytes::Bytes;
use futures_util::{FutureExt as _, StreamExt as _, stream};
use http::Response;
use http_body_util::BodyExt as _;
use tokio::sync::{Mutex, Semaphore, mpsc};
use tokio::time::{Instant, timeout};
use tower::ServiceExt as _;

use crate::harness::{Ask, Builder, Gate, Seen, Server, Shop, defaults, no_wait, post, secs};

const POST: &str = "POST /payments HTTP/1.1\r\nhost: shop\r\naccount: acme\r\n\
    idempotency-key: k\r\ncontent-length: 0\r\n\r\n";

fn pay() -> Ask {
    post("http://shop/payments").key("k").body("")
}

/// A body that gives what the test sends, and ends when the test lets go of the sender.
fn channel() -> (mpsc::UnboundedSender<&'static str>, Arc<Mutex<Option<Body>>>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let frames = stream::unfold(receiver, async |mut receiver| {
        Some((Ok::<_, Infallible>(receiver.recv().await?), receiver))
    });
    (sender, Arc::new(Mutex::new(Some(Body::from_stream(frames)))))
}

// cases: 100
#[tokio::test]
async fn case_100_events_arrive_while_the_handler_still_streams_and_nothing_runs_again() {
    for media_type in [
        "text/event-stream",
        "Text/Event-Stream; charset=utf-8",
        "application/x-ndjson",
        "application/ndjson",
        "multipart/x-mixed-replace; boundary=x",
        "application/grpc+proto",
    ] {
        let (sender, body) = channel();
        // Not because the answer is slow.
        let configure = |config: Builder| config.response_timeout(secs(3600));
        let shop = Shop::running(configure, move |_| {
            let body = Arc::clone(&body);
            async move {
                let body = body.lock().await.take().expect("it runs once");
                Response::builder().header("content-type", media_type).body(body).unwrap()
            }
            .boxed()
        });
        let server = Server::start(shop.app()).await;
        let mut raw = server.connect().await;
        raw.send(POST).await;
        sender.send("data: 1\n\n").unwrap();
        let head = timeout(secs(20), raw.head()).await.expect("the first byte comes at once");
        head.expect(200, false);
        assert_eq!(head.header("transfer-encoding"), Some("chunked"));
        raw.until(b"data: 1").await;
        // It is recorded as done before its first byte went out.
        let retry = server.exchange(POST).await;
        retry.expect_code(409, "result_unavailable");
        sender.send("data: 2\n\n").unwrap();
        raw.until(b"data: 2").await;
        drop(sender);
        raw.until(b"0\r\n\r\n").await;
        server.exchange(POST).await.expect_code(409, "result_unavailable");
        shop.ledger.expect(1);
    }
}

/// Counts down when the body that it stands in is dropped.
struct Alive(Arc<AtomicUsize>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

// cases: 99
#[tokio::test]
async fn case_099_an_endless_answer_is_passed_on_without_being_held_in_memory() {
    let (alive, pulled) = (Arc::new(AtomicUsize::new(1)), Arc::new(AtomicUsize::new(0)));
    let (kept, counted) = (Arc::clone(&alive), Arc::clone(&pulled));
    let shop = Shop::answering(
        |config| config.response_limit(10_000),
        move |_| {
            let alive = Alive(Arc::clone(&kept));
            let counted = Arc::clone(&counted);
            let frames = stream::repeat(()).map(move |()| {
                let _ = &alive;
                counted.fetch_add(1000, Ordering::SeqCst);
                Ok::<_, Infallible>(Bytes::from_static(&[b'x'; 1000]))
            });
            Response::new(Body::from_stream(frames))
        },
    );
    let response = shop.app().oneshot(pay().request()).await.unwrap();
    // So much was read to see that it is too long, and no more until somebody wants it.
    assert_eq!(pulled.load(Ordering::SeqCst), 11_000);
    shop.send(&pay()).await.refused(409, "result_unavailable");
    let mut body = response.into_body();
    for _ in 0..2000 {
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap().len(), 1000);
    }
    assert_eq!(pulled.load(Ordering::SeqCst), 2_000_000);
    assert_eq!(alive.load(Ordering::SeqCst), 1);
    drop(body);
    assert_eq!(alive.load(Ordering::SeqCst), 0);
    shop.ledger.expect(1);
}

/// A body that trickles is taken for a stream before its client loses patience.
#[tokio::test(start_paused = true)]
async fn a_slow_answer_is_passed_on_after_the_bound_and_recorded_as_done() {
    let (sender, body) = channel();
    let shop = Shop::running(
        |config| no_wait(config).response_timeout(secs(10)),
        move |_| {
            let body = Arc::clone(&body);
            async move { Response::new(body.lock().await.take().expect("it runs once")) }.boxed()
        },
    );
    sender.send("first").unwrap();
    let start = Instant::now();
    let response = shop.app().oneshot(pay().request()).await.unwrap();
    assert_eq!(start.elapsed(), secs(10));
    shop.send(&pay()).await.refused(409, "result_unavailable");
    sender.send(" and last").unwrap();
    drop(sender);
    assert_eq!(Seen::read(response).await.fresh(200).text(), "first and last");
    shop.ledger.expect(1);
}

/// A gated shop behind a layer that says when the server has dropped a request.
fn watched() -> (Shop, Gate, Arc<Semaphore>) {
    struct Dropped(Arc<Semaphore>);
    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.add_permits(1);
        }
    }
    let dropped = Arc::new(Semaphore::new(0));
    let (shop, gate) = Shop::gated(defaults);
    let guard = Arc::clone(&dropped);
    let shop = shop.wrapped(|app| {
        app.layer(from_fn(move |request: Request, next: Next| {
            let guard = Dropped(Arc::clone(&guard));
            async move {
                let response = next.run(request).await;
                drop(guard);
                response
            }
        }))
    });
    (shop, gate, dropped)
}

// cases: 115
#[tokio::test]
async fn case_115_a_client_that_closes_its_http_1_connection_does_not_stop_the_handler() {
    let (shop, gate, dropped) = watched();
    let server = Server::start(shop.app()).await;
    let mut raw = server.connect().await;
    raw.send(POST).await;
    gate.entered().await;
    drop(raw);
    dropped.acquire().await.unwrap().forget();
    gate.open();
    let retry = server.exchange(POST).await;
    retry.expect(201, true);
    assert_eq!(retry.body, b"payment 1");
    shop.ledger.expect(1);
}

// cases: 115
#[tokio::test]
async fn case_115_a_client_that_resets_its_http_2_stream_does_not_stop_the_handler() {
    let (shop, gate, dropped) = watched();
    let server = Server::start(shop.app()).await;
    let mut client = server.http2().await;
    let exchange = tokio::spawn(client.sending(pay().request()));
    gate.entered().await;
    exchange.abort();
    dropped.acquire().await.unwrap().forget();
    gate.open();
    let retry = client.send(pay().request()).await;
    assert_eq!(retry.status(), 201);
    assert_eq!(retry.headers()["idempotent-replayed"], "true");
    assert_eq!(retry.into_body().collect().await.unwrap().to_bytes(), "payment 1");
    shop.ledger.expect(1);
}

/// A stream that its client does not want any more is of a done operation.
#[tokio::test]
async fn a_client_that_leaves_in_the_middle_of_a_stream_changes_nothing() {
    let (sender, body) = channel();
    let shop = Shop::running(defaults, move |_| {
        let body = Arc::clone(&body);
        async move {
            let body = body.lock().await.take().expect("it runs once");
            Response::builder().header("content-type", "text/event-stream").body(body).unwrap()
        }
        .boxed()
    });
    let server = Server::start(shop.app()).await;
    let mut raw = server.connect().await;
    raw.send(POST).await;
    sender.send("data: 1\n\n").unwrap();
    raw.until(b"data: 1").await;
    drop(raw);
    sender.closed().await;
    server.exchange(POST).await.expect_code(409, "result_unavailable");
    shop.ledger.expect(1);
}

// cases: 107, 108
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_108_many_connections_to_two_servers_on_one_store() {
    let shop = Shop::open();
    let two = shop.second_process();
    let servers = Arc::new([Server::start(shop.app()).await, Server::start(two.app()).await]);
    for round in 1..=10 {
        let request = POST.replace("idempotency-key: k", &format!("idempotency-key: r{round}"));
        let exchanges = (0..50).map(|n| {
            let (servers, request) = (Arc::clone(&servers), request.clone());
            tokio::spawn(async move { servers[n % 2].exchange(request).await })
        });
        let mut fresh = 0;
        for wire in futures_util::future::join_all(exchanges).await {
            let wire = wire.unwrap();
            match wire.status {
                201 => fresh += usize::from(wire.header("idempotent-replayed").is_none()),
                _ => wire.expect_code(409, "key_in_use"),
            }
        }
        assert_eq!(fresh, 1);
        shop.ledger.expect(round);
    }
}

// cases: 107
#[tokio::test]
async fn case_107_many_streams_of_one_http_2_connection() {
    let (shop, gate) = Shop::gated(no_wait);
    let server = Server::start(shop.app()).await;
    let mut client = server.http2().await;
    let first = tokio::spawn(client.sending(pay().request()));
    gate.entered().await;
    let twins = (0..50).map(|_| tokio::spawn(client.sending(pay().request())));
    for twin in futures_util::future::join_all(twins).await {
        assert_eq!(twin.unwrap().unwrap().status(), 409);
    }
    gate.open();
    let first = first.await.unwrap().unwrap();
    assert_eq!(first.status(), 201);
    assert!(!first.headers().contains_key("idempotent-replayed"));
    shop.ledger.expect(1);
}
