//! What handlers can extract, and what they are told without the layer.

use axum::Router;
use axum::response::IntoResponse as _;
use tower_idempotency::middleware::NotIdempotent;
use tower_idempotency::{Execution, IdempotencyKey, MissingKey};

use crate::harness::{Shop, defaults, get, post};

fn optional_key() -> Shop {
    Shop::serving(
        |config| config.missing_key(MissingKey::PassThrough),
        |ledger| {
            Router::new().fallback(
                async move |key: Option<IdempotencyKey>, execution: Option<Execution>| {
                    ledger.note("run");
                    match (key, execution) {
                        (Some(key), Some(run)) => {
                            format!("{} {}", key.as_str(), run.is_protected())
                        }
                        (None, None) => "no key".to_owned(),
                        (Some(_), None) | (None, Some(_)) => "half".to_owned(),
                    }
                },
            )
        },
    )
}

#[tokio::test]
async fn an_optional_key_can_be_extracted() {
    let shop = optional_key();
    assert_eq!(shop.send(&post("/p").key("\"a b\"")).await.fresh(200).text(), "a b true");
    assert_eq!(shop.send(&post("/p")).await.fresh(200).text(), "no key");
    assert_eq!(shop.send(&get("/p").key("k")).await.fresh(200).text(), "no key");
}

#[tokio::test]
async fn a_required_key_without_the_layer_is_a_clear_500_and_nothing_runs() {
    for extract_key in [true, false] {
        let routes = move |ledger: crate::harness::Ledger| {
            let other = ledger.clone();
            let by_key = async move |_: IdempotencyKey| ledger.note("run").to_string();
            let by_run = async move |_: Execution| other.note("run").to_string();
            match extract_key {
                true => Router::new().fallback(by_key),
                false => Router::new().fallback(by_run),
            }
        };
        let shop = Shop::serving(defaults, routes);
        let bare = shop.clone().wrapped(|_| (shop.routes)(shop.ledger.clone()));
        let seen = bare.send(&post("/p").key("k")).await.fresh(500);
        assert!(seen.text().contains("IdempotencyLayer"), "{}", seen.text());
        // Also under the layer, where the method is not covered.
        let seen = shop.send(&get("/p").key("k")).await.fresh(500);
        assert!(seen.text().contains("does it cover this method"), "{}", seen.text());
        shop.ledger.expect(0);
        shop.send(&post("/p").key("k")).await.fresh(200);
        shop.ledger.expect(1);
    }
}

#[tokio::test]
async fn the_rejection_of_the_extractors_is_one_that_frees_the_key() {
    let shop = Shop::answering(defaults, |_| missing().into_response());
    shop.send(&post("/p").key("k")).await.fresh(500);
    shop.send(&post("/p").key("k")).await.fresh(500);
    shop.ledger.expect(2);
}

fn missing() -> NotIdempotent {
    // There is no constructor outside, so it is taken from where it comes from.
    use axum::extract::FromRequestParts as _;
    let (mut parts, ()) = http::Request::new(()).into_parts();
    let extracting = IdempotencyKey::from_request_parts(&mut parts, &());
    futures_util::FutureExt::now_or_never(extracting).unwrap().unwrap_err()
}
