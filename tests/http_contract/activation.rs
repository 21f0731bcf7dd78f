//! A. Activation: methods, routes, header names.

use http::{HeaderName, Method};
use tower_http::cors::{Any, CorsLayer};
use tower_idempotency::MissingKey;

use crate::harness::{Shop, delete, get, method, patch, post, put};

fn optional_key() -> Shop {
    Shop::with(|config| config.missing_key(MissingKey::PassThrough))
}

// cases: 1, 152
#[tokio::test]
async fn case_001_a_required_key_that_is_missing_is_refused_and_nothing_is_recorded() {
    let shop = Shop::open();
    let seen = shop.send(&post("/payments")).await.refused(400, "key_missing");
    assert!(seen.header("link").unwrap().contains("rel=\"describedby\""));
    assert_eq!(seen.json()["safe_new_key"], true);
    shop.expect_untouched();
}

// cases: 2
#[tokio::test]
async fn case_002_without_a_key_an_optional_route_runs_each_time_and_marks_nothing() {
    let shop = optional_key();
    for effects in 1..=3 {
        let seen = shop.send(&post("/payments")).await.fresh(201);
        assert_eq!(seen.header("idempotency-key"), None);
        shop.ledger.expect(effects);
    }
    assert_eq!(shop.store.calls(), 0);
}

// cases: 3
#[tokio::test]
async fn case_003_safe_methods_pass_with_a_key_before_and_after_a_post_with_it() {
    let shop = Shop::open();
    for safe in [Method::GET, Method::HEAD, Method::OPTIONS] {
        shop.send(&method(safe.clone(), "/payments").key("k")).await.fresh(201);
        shop.send(&method(safe, "/payments")).await.fresh(201);
    }
    assert_eq!(shop.store.calls(), 0);
    shop.send(&post("/payments").key("k")).await.fresh(201);
    for safe in [Method::GET, Method::HEAD, Method::OPTIONS] {
        shop.send(&method(safe, "/payments").key("k")).await.fresh(201);
    }
    shop.ledger.expect(10);
    assert_eq!(shop.records(), 1);
}

// cases: 4
#[tokio::test]
async fn case_004_a_redirected_client_that_keeps_the_key_may_get_the_other_place() {
    let shop = Shop::open();
    shop.send(&post("/payments").key("k")).await.fresh(201);
    shop.send(&get("/payments/1").key("k")).await.fresh(201);
    shop.ledger.expect(2);
}

// cases: 5
#[tokio::test]
async fn case_005_put_and_delete_pass_by_default() {
    let shop = Shop::open();
    for ask in [put("/payments/1"), delete("/payments/1")] {
        shop.send(&ask.clone().key("k")).await.fresh(201);
        shop.send(&ask.key("k")).await.fresh(201);
    }
    shop.ledger.expect(4);
    assert_eq!(shop.store.calls(), 0);
}

// cases: 6
#[tokio::test]
async fn case_006_delete_can_be_opted_in_and_its_success_is_replayed() {
    let shop = Shop::with(|config| config.methods([Method::POST, Method::DELETE]));
    let ask = delete("/payments/1").key("k");
    let first = shop.send(&ask).await.fresh(201);
    shop.send(&ask).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 7
#[tokio::test]
async fn case_007_patch_is_protected_like_post() {
    let shop = Shop::open();
    let ask = patch("/payments/1").key("k");
    let first = shop.send(&ask).await.fresh(201);
    shop.send(&ask).await.replay_of(&first);
    shop.send(&patch("/payments/1")).await.refused(400, "key_missing");
    shop.ledger.expect(1);
}

// cases: 8
#[tokio::test]
async fn case_008_a_route_without_the_layer_ignores_keys() {
    let shop = Shop::open();
    let unprotected = (shop.routes)(shop.ledger.clone());
    let shop = shop.wrapped(|app| axum::Router::new().nest("/safe", app).merge(unprotected));
    shop.send(&post("/payments").key("k")).await.fresh(201);
    shop.send(&post("/payments").key("k")).await.fresh(201);
    shop.ledger.expect(2);
    assert_eq!(shop.store.calls(), 0);
}

// cases: 10
#[tokio::test]
async fn case_010_a_preflight_is_answered_without_the_store() {
    let cors = CorsLayer::new().allow_origin(Any).allow_headers(Any).allow_methods(Any);
    let shop = Shop::open();
    let preflight = || {
        method(Method::OPTIONS, "/payments")
            .header("origin", "https://shop.example")
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "idempotency-key")
    };
    let outside = shop.clone().wrapped(|app| app.layer(cors.clone()));
    outside.send(&preflight()).await.fresh(200);
    let inside = shop.lined(|app| app.layer(cors));
    inside.send(&preflight()).await.fresh(200);
    inside.expect_untouched();
}

// cases: 11
#[tokio::test]
async fn case_011_two_accepted_headers_must_name_one_key() {
    let names = ["idempotency-key", "paypal-request-id"].map(HeaderName::from_static);
    let shop = Shop::with(|config| config.key_headers(names));
    let both = |a: &str, b: &str| post("/payments").key(a).header("paypal-request-id", b);
    shop.send(&both("k", "other")).await.refused(400, "key_invalid");
    shop.send(&both("k", "")).await.refused(400, "key_invalid");
    shop.expect_untouched();
    let first = shop.send(&both("k", "\"k\"")).await.fresh(201);
    shop.send(&post("/payments").header("paypal-request-id", "k")).await.replay_of(&first);
    shop.send(&post("/payments").key("k")).await.replay_of(&first);
    shop.ledger.expect(1);
}

/// Internal state travels in typed extensions, so no header of a client can be taken for it.
#[tokio::test]
async fn fault_b15_marks_of_the_layer_in_a_request_are_ignored() {
    let shop = Shop::open();
    let ask = post("/payments")
        .key("k")
        .header("idempotent-replayed", "true")
        .header("idempotency-status", "unprotected")
        .header("stripe-should-retry", "true");
    let first = shop.send(&ask).await.fresh(201);
    assert_eq!(first.header("idempotency-status"), None);
    assert_eq!(first.header("stripe-should-retry"), None);
    shop.send(&ask).await.replay_of(&first);
    shop.ledger.expect(1);
}
