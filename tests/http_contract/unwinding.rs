//! Panics, errors and time limits around a run: faults B19, B20, B21.

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse as _;
use futures_util::FutureExt as _;
use http::{Response, StatusCode};
use tokio::time::Instant;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::timeout::TimeoutLayer;
use tower_idempotency::RejectionKind;

use crate::harness::{Ask, Shop, defaults, ms, no_wait, post, secs, settle_down};

fn pay() -> Ask {
    post("/payments").key("k")
}

/// Panics in its first run, after its effect.
fn panicking() -> Shop {
    Shop::running(no_wait, |number| {
        async move {
            tokio::task::yield_now().await;
            assert!(number != 1, "the card terminal is on fire");
            Response::new(Body::from("fine"))
        }
        .boxed()
    })
}

/// Takes two seconds, with its effect at the beginning.
fn slow() -> Shop {
    Shop::running(no_wait, |number| {
        async move {
            tokio::time::sleep(secs(2)).await;
            Response::builder().status(201).body(format!("payment {number}").into()).unwrap()
        }
        .boxed()
    })
}

// cases: 102
#[tokio::test]
async fn case_102_a_panic_is_500_at_once_then_unknown_and_never_a_second_run() {
    let absent = panicking();
    let outside = panicking().wrapped(|app| app.layer(CatchPanicLayer::new()));
    for shop in [absent, outside] {
        let first = shop.send(&pay()).await.refused(500, "outcome_unknown");
        assert!(!first.text().contains("fire"));
        assert_eq!(first.header("stripe-should-retry"), Some("false"));
        for _ in 0..2 {
            shop.send(&pay()).await.refused(409, "outcome_unknown");
        }
        shop.ledger.expect(1);
        // Nobody else is affected.
        shop.send(&post("/payments").key("other")).await.fresh(200);
    }
}

// cases: 102
#[tokio::test]
async fn case_102_a_panic_caught_further_in_is_a_500_like_any_other() {
    let shop = panicking().lined(|app| app.layer(CatchPanicLayer::new()));
    let first = shop.send(&pay()).await.fresh(500);
    assert_eq!(first.header("stripe-should-retry"), Some("false"));
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

/// Not only the future may panic, but also the call that makes it.
#[tokio::test]
async fn a_panic_in_the_call_itself_is_settled_too() {
    let shop = Shop::running(no_wait, |_| panic!("before there is a future"));
    let calling = tower::service_fn(|_: http::Request<Body>| -> std::future::Ready<_> {
        if true {
            panic!("in the call");
        }
        std::future::ready(Ok::<_, std::convert::Infallible>(Response::new(Body::empty())))
    });
    let service = tower::Layer::layer(&shop.layer, calling);
    for (status, code) in [(500, "outcome_unknown"), (409, "outcome_unknown")] {
        let answer = tower::ServiceExt::oneshot(service.clone(), pay().request()).await.unwrap();
        crate::harness::Seen::read(answer.map(Body::new)).await.refused(status, code);
    }
}

#[tokio::test(start_paused = true)]
async fn waiters_of_a_run_that_panics_are_told_that_its_outcome_is_unknown() {
    let shop = Shop::running(defaults, |_| {
        async move {
            tokio::time::sleep(secs(1)).await;
            panic!("late");
        }
        .boxed()
    });
    let first = shop.sending(&pay());
    settle_down().await;
    let waiter = shop.sending(&pay());
    first.await.unwrap().refused(500, "outcome_unknown");
    waiter.await.unwrap().refused(409, "outcome_unknown");
    shop.ledger.expect(1);
}

// cases: 116
#[tokio::test(start_paused = true)]
async fn case_116_a_time_limit_outside_answers_while_the_handler_finishes() {
    for status in [StatusCode::REQUEST_TIMEOUT, StatusCode::GATEWAY_TIMEOUT] {
        let limit = TimeoutLayer::with_status_code(status, ms(500));
        let shop = slow().wrapped(|app| app.layer(limit));
        shop.send(&pay()).await.fresh(status.as_u16());
        tokio::time::sleep(ms(500)).await;
        shop.send(&pay()).await.refused(409, "key_in_use");
        tokio::time::sleep(ms(2000)).await;
        assert_eq!(shop.send(&pay()).await.replayed(201).text(), "payment 1");
        shop.ledger.expect(1);
    }
}

/// The work is cut off, and nobody can know how far it had come. Retries one second and three seconds
/// after the first request: before and after the handler would have ended.
#[tokio::test(start_paused = true)]
async fn fault_b19_a_time_limit_inside_leaves_the_outcome_unknown() {
    let limit = TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, ms(500));
    let shop = slow().lined(|app| app.layer(limit));
    let start = Instant::now();
    shop.send(&pay()).await.fresh(408);
    for seconds in [1, 3] {
        tokio::time::sleep_until(start + secs(seconds)).await;
        shop.send(&pay()).await.refused(409, "outcome_unknown");
    }
    shop.ledger.expect(1);
}

/// As a gateway's 504 does, it may have come after the effect: stored as final, like every 5xx.
#[tokio::test(start_paused = true)]
async fn fault_b19_a_504_from_inside_is_final() {
    let limit = TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, ms(500));
    let shop = slow().lined(|app| app.layer(limit));
    let start = Instant::now();
    let first = shop.send(&pay()).await.fresh(504);
    assert_eq!(first.header("stripe-should-retry"), Some("false"));
    for seconds in [1, 3] {
        tokio::time::sleep_until(start + secs(seconds)).await;
        let retry = shop.send(&pay()).await.replay_of(&first);
        assert_eq!(retry.header("stripe-should-retry"), Some("false"));
    }
    shop.ledger.expect(1);
}

#[tokio::test]
async fn fault_b21_an_error_after_the_effect_does_not_run_it_again() {
    let shop = Shop::answering(no_wait, |_| {
        let receipt: Result<&str, StatusCode> = Err(StatusCode::INTERNAL_SERVER_ERROR);
        receipt.into_response()
    });
    let first = shop.send(&pay()).await.fresh(500);
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

/// A layer outside can count refusals without parsing their text.
#[tokio::test]
async fn the_reason_of_a_refusal_stands_in_the_extensions() {
    let shop = Shop::open();
    let app: Router = shop.app();
    let response = tower::ServiceExt::oneshot(app, post("/payments").request()).await.unwrap();
    let rejection = response.extensions().get::<tower_idempotency::Rejection>().unwrap();
    assert_eq!(rejection.kind(), &RejectionKind::KeyMissing);
}
