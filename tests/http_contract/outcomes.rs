//! F. Which outcomes are stored. Streams are in `wire_streams`, panics in `unwinding`.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::Body;
use axum::middleware::from_fn;
use axum::response::IntoResponse as _;
use futures_util::{StreamExt as _, stream};
use http::{Response, StatusCode};
use tower_idempotency::{Outcome, Rejection, RejectionKind};

use crate::harness::{Ask, Shop, defaults, no_wait, post};

fn pay() -> Ask {
    post("/payments").key("k")
}

/// Answers this status first, and 201 from then on.
fn first_answers(status: u16, outcome: Option<Outcome>) -> Shop {
    Shop::answering(no_wait, move |number| {
        let status = if number == 1 { status } else { 201 };
        let response = Response::builder().status(status);
        let mut response = response.body(Body::from(format!("answer {number}"))).unwrap();
        if let (1, Some(outcome)) = (number, outcome) {
            response.extensions_mut().insert(outcome);
        }
        response
    })
}

// cases: 86, 87, 90
#[tokio::test]
async fn case_086_a_handlers_own_4xx_is_a_result() {
    for status in [400, 402, 404, 405, 406, 409, 410, 411, 412, 413, 415, 422, 423, 451] {
        let shop = first_answers(status, None);
        let first = shop.send(&pay()).await.fresh(status);
        let second = shop.send(&pay()).await.replay_of(&first);
        assert!(!second.text().contains("idempotency_"), "it can be told from the layer's own");
        // The corrected body is another request under this key.
        shop.send(&pay().body("corrected")).await.refused(422, "key_reused");
        shop.ledger.expect(1);
    }
}

// cases: 88
#[tokio::test]
async fn case_088_answers_before_any_work_free_the_key() {
    for status in [401, 403, 407, 425, 429] {
        let shop = first_answers(status, None);
        shop.send(&pay()).await.fresh(status);
        let second = shop.send(&pay()).await.fresh(201);
        shop.send(&pay()).await.replay_of(&second);
        shop.ledger.expect(2);
    }
}

// cases: 88
#[tokio::test]
async fn case_088_a_408_may_have_come_after_the_effect() {
    let shop = first_answers(408, None);
    let first = shop.send(&pay()).await.fresh(408);
    assert_eq!(first.text(), "answer 1");
    for _ in 0..2 {
        let seen = shop.send(&pay()).await.refused(409, "outcome_unknown");
        assert_eq!(seen.header("stripe-should-retry"), Some("false"));
        assert_eq!(seen.json()["safe_new_key"], false);
    }
    shop.ledger.expect(1);
}

// cases: 89, 94
#[tokio::test]
async fn case_089_no_effect_frees_the_key_whatever_the_status_and_for_another_body_too() {
    for status in [200, 400, 422, 500, 503] {
        let shop = first_answers(status, Some(Outcome::NoEffect));
        let first = shop.send(&pay()).await.fresh(status);
        assert_eq!(first.header("stripe-should-retry"), None);
        let corrected = shop.send(&pay().body("corrected")).await.fresh(201);
        shop.send(&pay().body("corrected")).await.replay_of(&corrected);
        shop.send(&pay()).await.refused(422, "key_reused");
        shop.ledger.expect(2);
    }
}

#[tokio::test]
async fn unknown_says_that_the_effect_may_have_happened_whatever_the_status() {
    for status in [200, 401, 429, 502] {
        let shop = first_answers(status, Some(Outcome::Unknown));
        shop.send(&pay()).await.fresh(status);
        shop.send(&pay()).await.refused(409, "outcome_unknown");
        shop.send(&pay().body("other")).await.refused(422, "key_reused");
        shop.ledger.expect(1);
    }
}

// cases: 91, 92, 93
#[tokio::test]
async fn case_091_server_errors_are_final_and_say_so_from_the_first_time_on() {
    for status in [500, 501, 502, 503, 504, 507] {
        let shop = first_answers(status, None);
        let first = shop.send(&pay()).await.fresh(status);
        assert_eq!(first.header("stripe-should-retry"), Some("false"));
        let second = shop.send(&pay()).await.replay_of(&first);
        assert_eq!(second.header("stripe-should-retry"), Some("false"));
        shop.ledger.expect(1);
    }
}

#[tokio::test]
async fn a_stored_server_error_is_final_although_the_handler_asks_for_a_retry() {
    let shop = Shop::answering(no_wait, |_| {
        let builder = Response::builder().status(503).header("stripe-should-retry", "true");
        builder.body(Body::from("come back")).unwrap()
    });
    let first = shop.send(&pay()).await.fresh(503);
    assert_eq!(first.header("stripe-should-retry"), Some("false"));
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 95, 96
#[tokio::test]
async fn case_095_a_limiter_outside_refuses_first_and_touches_nothing() {
    let left = Arc::new(AtomicUsize::new(0));
    let limiter = {
        let left = Arc::clone(&left);
        from_fn(move |request: axum::extract::Request, next: axum::middleware::Next| {
            let granted =
                left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok();
            async move {
                if granted {
                    return next.run(request).await;
                }
                StatusCode::TOO_MANY_REQUESTS.into_response()
            }
        })
    };
    let shop = Shop::open().wrapped(|app| app.layer(limiter));
    shop.send(&pay()).await.fresh(429);
    shop.expect_untouched();
    left.store(1, Ordering::SeqCst);
    let first = shop.send(&pay()).await.fresh(201);
    shop.send(&pay()).await.fresh(429);
    left.store(1, Ordering::SeqCst);
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 97
#[tokio::test]
async fn case_097_the_layers_own_answers_are_never_stored() {
    let (shop, gate) = Shop::gated(|config| no_wait(config).request_limit(20));
    shop.send(&pay().with("idempotency-key", "bad key")).await.refused(400, "key_invalid");
    shop.send(&pay().body("0123456789 and longer")).await.refused(413, "request_too_large");
    shop.store.go_down();
    shop.send(&pay()).await.refused(503, "store_unavailable");
    shop.store.recover();
    let running = shop.sending(&pay());
    gate.entered().await;
    shop.send(&pay()).await.refused(409, "key_in_use");
    shop.send(&pay().body("other")).await.refused(422, "key_reused");
    gate.open();
    let first = running.await.unwrap().fresh(201);
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 99
#[tokio::test]
async fn case_099_an_answer_over_the_limit_is_delivered_once_and_never_made_again() {
    const LIMIT: usize = 1000;
    for (length, kept) in [(LIMIT, true), (LIMIT + 1, false), (50 * LIMIT, false)] {
        for known in [true, false] {
            let shop = Shop::answering(
                |config| config.response_limit(LIMIT),
                move |_| {
                    let body = vec![b'x'; length];
                    let frames: Vec<_> = body
                        .chunks(300)
                        .map(|frame| Ok::<_, axum::Error>(frame.to_vec()))
                        .collect();
                    let body = match known {
                        true => Body::from(body),
                        false => Body::from_stream(stream::iter(frames)),
                    };
                    Response::builder().status(201).header("location", "/p/1").body(body).unwrap()
                },
            );
            let first = shop.send(&pay()).await.fresh(201);
            assert_eq!(first.body.len(), length);
            assert!(first.body.iter().all(|byte| *byte == b'x'));
            let second = shop.send(&pay()).await;
            if kept {
                second.replay_of(&first);
            } else {
                let second = second.refused(409, "result_unavailable");
                assert_eq!(second.header("location"), Some("/p/1"));
                assert_eq!(second.json()["original_status"], 201);
                assert_eq!(second.json()["safe_new_key"], false);
                assert_eq!(second.header("stripe-should-retry"), Some("false"));
            }
            shop.ledger.expect(1);
        }
    }
}

#[tokio::test]
async fn a_body_can_be_kept_out_of_the_store_on_purpose() {
    let shop = first_answers(200, Some(Outcome::DoneBodyNotKept));
    assert_eq!(shop.send(&pay()).await.fresh(200).text(), "answer 1");
    let second = shop.send(&pay()).await.refused(409, "result_unavailable");
    assert_eq!(second.json()["original_status"], 200);
    shop.ledger.expect(1);
}

// cases: 101
#[tokio::test]
async fn case_101_a_body_that_breaks_off_leaves_the_outcome_unknown() {
    let shop = Shop::answering(defaults, |_| {
        let frames = [Ok("half a "), Err(std::io::Error::other("the disk is gone"))];
        Body::from_stream(stream::iter(frames)).into_response()
    });
    let first = shop.send(&pay()).await.refused(500, "outcome_unknown");
    assert!(!first.text().contains("disk"));
    assert_eq!(first.header("stripe-should-retry"), Some("false"));
    for _ in 0..2 {
        shop.send(&pay()).await.refused(409, "outcome_unknown");
    }
    shop.ledger.expect(1);
}

/// Once the answer is too long to keep it is recorded as done, so a later failure changes nothing.
#[tokio::test]
async fn a_body_that_breaks_off_after_the_limit_is_of_a_done_operation() {
    let shop = Shop::answering(
        |config| config.response_limit(10),
        |_| {
            let frames = stream::iter((0..4).map(|_| Ok("0123456789")));
            let broken = stream::once(async { Err(std::io::Error::other("gone")) });
            Body::from_stream(frames.chain(broken)).into_response()
        },
    );
    let response = tower::ServiceExt::oneshot(shop.app(), pay().request()).await.unwrap();
    let body = http_body_util::BodyExt::collect(response.into_body()).await;
    assert!(body.is_err());
    shop.send(&pay()).await.refused(409, "result_unavailable");
    shop.ledger.expect(1);
}

/// Fault B56: a refusal of a layer further in, whose own record counts, is not kept out here;
/// but one that says that the effect may have happened does not free the key.
#[tokio::test]
async fn a_relayed_refusal_frees_the_key_only_if_nothing_can_have_happened() {
    let relaying = |kind: RejectionKind| {
        Shop::answering(no_wait, move |number| {
            let mut response = Response::new(Body::from("relayed"));
            if number == 1 {
                *response.status_mut() = StatusCode::CONFLICT;
                response.extensions_mut().insert(Rejection::new(kind.clone()));
            }
            response
        })
    };
    for kind in [RejectionKind::KeyMissing, RejectionKind::StoreUnavailable] {
        let shop = relaying(kind);
        assert_eq!(shop.send(&pay()).await.status, 409);
        shop.send(&pay()).await.fresh(200);
        shop.ledger.expect(2);
    }
    for kind in [RejectionKind::HandlerFailed, RejectionKind::OutcomeUnknown] {
        let shop = relaying(kind);
        assert_eq!(shop.send(&pay()).await.status, 409);
        shop.send(&pay()).await.refused(409, "outcome_unknown");
        shop.ledger.expect(1);
    }
}

/// Fault B56: an upstream's 409 that a handler relays is a result like any other.
#[tokio::test]
async fn a_relayed_409_of_an_upstream_is_stored_unless_marked() {
    let shop = first_answers(409, None);
    let first = shop.send(&pay()).await.fresh(409);
    shop.send(&pay()).await.replay_of(&first);
    let shop = first_answers(409, Some(Outcome::NoEffect));
    shop.send(&pay()).await.fresh(409);
    shop.send(&pay()).await.fresh(201);
}
