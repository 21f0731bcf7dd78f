//! One caller with too many operations in flight is refused, and nobody else notices.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use metrics_exporter_prometheus::PrometheusBuilder;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tower::{Layer as _, Service, ServiceExt as _};
use tower_idempotency::{Config, IdempotencyLayer, MemoryStore, Rejection, RejectionKind, Scope};

type Answer = Response<Bytes>;

/// A payment service whose handlers stay inside until they are let go.
struct Payments {
    gate: Arc<Semaphore>,
    started: Arc<AtomicUsize>,
    layer: IdempotencyLayer,
}

impl Payments {
    fn new(most: usize) -> Self {
        let account = |parts: &Parts| {
            parts.headers.get("account").map(|account| account.to_str().unwrap().to_owned())
        };
        let config = Config::builder()
            .scope(Scope::principal(account))
            .in_flight_per_caller(most)
            .build()
            .unwrap();
        let layer = IdempotencyLayer::new(config, MemoryStore::new());
        Self { gate: Arc::new(Semaphore::new(0)), started: Arc::default(), layer }
    }

    fn service(
        &self,
    ) -> impl Service<
        Request<Full<Bytes>>,
        Response = Response<impl http_body::Body<Data = Bytes, Error = Infallible> + use<>>,
        Error = Infallible,
        Future: Send,
    > + Send
    + use<> {
        let (gate, started) = (Arc::clone(&self.gate), Arc::clone(&self.started));
        self.layer.layer(tower::service_fn(move |_: Request<Full<Bytes>>| {
            let (gate, started) = (Arc::clone(&gate), Arc::clone(&started));
            async move {
                started.fetch_add(1, Ordering::SeqCst);
                gate.acquire().await.unwrap().forget();
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("paid")))
            }
        }))
    }

    fn pay(&self, account: &str, key: &str) -> JoinHandle<Answer> {
        let request = Request::post("/pay").header("account", account);
        let request = request.header("idempotency-key", key).body(Full::from("1")).unwrap();
        let service = self.service();
        tokio::spawn(async move {
            let (head, body) = service.oneshot(request).await.unwrap().into_parts();
            Response::from_parts(head, body.collect().await.unwrap().to_bytes())
        })
    }

    async fn wait_until_started(&self, handlers: usize) {
        while self.started.load(Ordering::SeqCst) < handlers {
            tokio::task::yield_now().await;
        }
    }
}

fn is_refused(answer: &Answer) -> bool {
    let rejection = answer.extensions().get::<Rejection>();
    rejection.is_some_and(|rejection| *rejection.kind() == RejectionKind::TooManyInFlight)
}

#[tokio::test(start_paused = true)]
async fn a_caller_at_its_limit_is_refused_and_counted_and_the_others_are_not() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let counters = recorder.handle();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let payments = Payments::new(2);
    let running = [payments.pay("acme", "1"), payments.pay("acme", "2")];
    payments.wait_until_started(2).await;

    let refused = payments.pay("acme", "3").await.unwrap();
    assert!(is_refused(&refused));
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "1");
    assert_eq!(refused.headers()["stripe-should-retry"], "true");
    let body: serde_json::Value = serde_json::from_slice(refused.body()).unwrap();
    assert_eq!(body["code"], "idempotency_too_many_in_flight");
    // An earlier request under this key may have been.
    let detail = body["detail"].as_str().unwrap();
    assert!(!detail.contains("executed") && detail.contains("by this request"), "{detail}");
    assert_eq!(body["safe_new_key"], false);
    let counted = "idempotency_requests{outcome=\"too_many_in_flight\"} 1\n";
    assert!(counters.render().contains(counted), "{}", counters.render());

    let other = payments.pay("other", "3");
    payments.wait_until_started(3).await;
    payments.gate.add_permits(3);
    for answer in running.into_iter().chain([other]) {
        assert_eq!(answer.await.unwrap().status(), 200);
    }
    // Nothing was claimed for the one that was refused: it runs, and for the first time.
    payments.gate.add_permits(1);
    let later = payments.pay("acme", "3").await.unwrap();
    assert_eq!(later.status(), 200);
    assert!(!later.headers().contains_key("idempotent-replayed"));
}

#[tokio::test(start_paused = true)]
async fn a_twin_takes_no_second_place() {
    let payments = Payments::new(1);
    let first = payments.pay("acme", "1");
    payments.wait_until_started(1).await;
    let twins: Vec<_> = (0..20).map(|_| payments.pay("acme", "1")).collect();
    tokio::time::sleep(Duration::from_millis(10)).await;
    payments.gate.add_permits(1);
    assert_eq!(first.await.unwrap().status(), 200);
    for twin in twins {
        let twin = twin.await.unwrap();
        assert_eq!((twin.status().as_u16(), twin.body().as_ref()), (200, &b"paid"[..]));
        assert_eq!(twin.headers()["idempotent-replayed"], "true");
    }
    assert_eq!(payments.started.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_handler_whose_client_has_left_counts_to_its_end() {
    let payments = Payments::new(1);
    let left = payments.pay("acme", "1");
    payments.wait_until_started(1).await;
    left.abort();
    assert!(left.await.unwrap_err().is_cancelled());
    assert!(is_refused(&payments.pay("acme", "2").await.unwrap()));
    payments.gate.add_permits(2);
    while is_refused(&payments.pay("acme", "2").await.unwrap()) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(payments.started.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn layers_of_one_engine_count_together() {
    let payments = Payments::new(1);
    let config = Config::builder()
        .scope(Scope::principal(|_: &Parts| Some("acme")))
        .in_flight_per_caller(1)
        .build()
        .unwrap();
    let other_route = Payments {
        gate: Arc::clone(&payments.gate),
        started: Arc::default(),
        layer: payments.layer.with_config(config),
    };
    let running = payments.pay("acme", "1");
    payments.wait_until_started(1).await;
    assert!(is_refused(&other_route.pay("acme", "2").await.unwrap()));
    payments.gate.add_permits(1);
    assert_eq!(running.await.unwrap().status(), 200);
}
