//! D. Fingerprint and payload.

use std::convert::Infallible;

use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::HeaderName;
use tower::ServiceExt as _;
use tower_idempotency::{QueryOrder, Recipe};

use crate::harness::{Ask, Seen, Shop, no_wait, post, secs};

const JSON: &str = r#"{"amount":100,"to":"a"}"#;

fn json(body: &'static str) -> Ask {
    post("/payments").key("k").header("content-type", "application/json").body(body)
}

/// The first runs; each of the others is another request.
async fn different<const N: usize>(shop: &Shop, asks: [Ask; N]) {
    let (first, others) = asks.split_first().unwrap();
    let seen = shop.send(first).await.fresh(201);
    for other in others {
        shop.send(other).await.refused(422, "key_reused");
    }
    shop.send(first).await.replay_of(&seen);
    shop.ledger.expect(1);
}

/// The first runs; the others are the same request.
async fn same<const N: usize>(shop: &Shop, asks: [Ask; N]) {
    let (first, others) = asks.split_first().unwrap();
    let seen = shop.send(first).await.fresh(201);
    for other in others {
        shop.send(other).await.replay_of(&seen);
    }
    shop.ledger.expect(1);
}

// cases: 48
#[tokio::test]
async fn case_048_the_same_bytes_are_the_same_request() {
    same(&Shop::open(), [json(JSON), json(JSON)]).await;
}

// cases: 49
#[tokio::test]
async fn case_049_one_other_byte_is_another_request_and_the_original_still_replays() {
    let other = json(r#"{"amount":900,"to":"a"}"#);
    different(&Shop::open(), [json(JSON), other, json("")]).await;
}

// cases: 50
#[tokio::test]
async fn case_050_a_mismatch_wins_over_in_flight() {
    let (shop, gate) = Shop::gated(no_wait);
    let first = shop.sending(&json(JSON));
    gate.entered().await;
    shop.send(&json("{}")).await.refused(422, "key_reused");
    shop.send(&json(JSON)).await.refused(409, "key_in_use");
    gate.open();
    let first = first.await.unwrap().fresh(201);
    shop.send(&json("{}")).await.refused(422, "key_reused");
    shop.send(&json(JSON)).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 51
#[tokio::test(start_paused = true)]
async fn case_051_a_mismatch_tells_nothing_and_changes_nothing() {
    let shop = Shop::with(|config| config.retention(secs(100)));
    shop.send(&json(JSON)).await.fresh(201);
    tokio::time::advance(secs(99)).await;
    let seen = shop.send(&json("{\"amount\":900}")).await.refused(422, "key_reused");
    let text = seen.text();
    for secret in ["payment 1", "900", "amount", "/payments/1", "\"k\""] {
        assert!(!text.contains(secret), "{secret} in {text}");
    }
    assert_eq!(seen.json()["safe_new_key"], false);
    assert_eq!(seen.header("location"), None);
    // The window still ends when it would have ended.
    tokio::time::advance(secs(2)).await;
    shop.send(&json(JSON)).await.fresh(201);
    shop.ledger.expect(2);
}

// cases: 52
#[tokio::test]
async fn case_052_json_in_another_order_or_spacing_is_another_request_by_default() {
    let reordered = json(r#"{"to":"a","amount":100}"#);
    let spaced = json(r#"{"amount": 100, "to": "a"}"#);
    different(&Shop::open(), [json(JSON), reordered, spaced]).await;
}

// cases: 53, 54, 55
#[tokio::test]
async fn case_053_the_query_counts_as_it_was_sent() {
    let to = |uri: &str| post(uri).key("k");
    different(&Shop::open(), [to("/p?to=a"), to("/p?to=b"), to("/p"), to("/p?"), to("/p?to=a&")])
        .await;
    different(&Shop::open(), [to("/p?a=1&b=2"), to("/p?b=2&a=1")]).await;
    different(&Shop::open(), [to("/p?a=&a=b&c="), to("/p?a=&b=c&b=")]).await;
    different(&Shop::open(), [to("/p?x=%41"), to("/p?x=A")]).await;
    different(&Shop::open(), [to("/p?x=+"), to("/p?x=%20")]).await;
    different(&Shop::open(), [to("/a").body("b"), to("/ab").body("")]).await;
}

// cases: 54
#[tokio::test]
async fn case_054_the_order_of_query_parameters_can_be_ignored() {
    let recipe = || Recipe::new().query_order(QueryOrder::ByName);
    let to = |uri: &str| post(uri).key("k");
    let shop = Shop::with(|config| config.fingerprint(recipe()));
    same(&shop, [to("/p?a=1&b=2"), to("/p?b=2&a=1")]).await;
    let shop = Shop::with(|config| config.fingerprint(recipe()));
    different(&shop, [to("/p?a=1&a=2"), to("/p?a=2&a=1")]).await;
}

// cases: 56
#[tokio::test]
async fn case_056_the_media_type_counts_and_its_parameters_do_not() {
    let of = |media_type: &str| json(JSON).with("content-type", media_type);
    same(&Shop::open(), [of("application/json"), of("Application/JSON; charset=utf-8")]).await;
    let none = post("/payments").key("k").body(JSON);
    different(&Shop::open(), [of("application/json"), of("text/plain"), none]).await;
}

// cases: 57
#[tokio::test]
async fn case_057_headers_that_vary_by_nature_do_not_count() {
    let varied = json(JSON)
        .header("host", "eu.shop.example")
        .header("user-agent", "sdk/2")
        .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        .header("x-stripe-client-telemetry", "{}")
        .header("date", "Sun, 06 Nov 1994 08:49:37 GMT")
        .header("accept-encoding", "gzip");
    same(&Shop::open(), [json(JSON), varied]).await;
}

// cases: 58
#[tokio::test]
async fn case_058_a_chosen_header_counts() {
    let recipe = Recipe::new().header(HeaderName::from_static("api-version"));
    let shop = Shop::with(|config| config.fingerprint(recipe));
    let of = |version: &str| json(JSON).header("api-version", version);
    different(&shop, [of("1"), of("2"), json(JSON), of("1").header("api-version", "1")]).await;
}

// cases: 59
#[tokio::test]
async fn case_059_how_a_body_is_framed_does_not_count() {
    let shop = Shop::open();
    let first = shop.send(&json(JSON).header("content-length", "23")).await.fresh(201);
    let frames = JSON.as_bytes().chunks(3).map(|chunk| Ok::<_, Infallible>(Bytes::from(chunk)));
    let chunked = json(JSON).request_with(Body::from_stream(stream::iter(frames)));
    let seen = Seen::read(shop.app().oneshot(chunked).await.unwrap()).await;
    seen.replay_of(&first);
    let empty = post("/payments").key("empty").body("");
    let first = shop.send(&empty).await.fresh(201);
    shop.send(&empty.header("content-length", "0")).await.replay_of(&first);
    shop.ledger.expect(2);
}

// cases: 61
#[tokio::test]
async fn case_061_a_body_over_the_limit_is_refused_and_nothing_is_recorded() {
    let shop = Shop::with(|config| config.request_limit(10));
    let seen = shop.send(&post("/payments").key("k").body("12345678901")).await;
    let seen = seen.refused(413, "request_too_large");
    assert_eq!(seen.json()["safe_new_key"], true);
    assert_eq!(seen.header("idempotency-key"), Some("k"));
    shop.expect_untouched();
    shop.send(&post("/payments").key("k").body("1234567890")).await.fresh(201);
}

// cases: 62
#[tokio::test(start_paused = true)]
async fn case_062_a_body_that_breaks_off_or_does_not_come_leaves_nothing() {
    let shop = Shop::with(|config| config.request_timeout(secs(30)));
    let half = || stream::iter([Ok(Bytes::from("amount="))]);
    let broken = half().chain(stream::iter([Err(std::io::Error::other("the client left"))]));
    let stuck = half().chain(stream::pending());
    for body in [Body::from_stream(broken), Body::from_stream(stuck)] {
        let request = post("/payments").key("k").request_with(body);
        let seen = Seen::read(shop.app().oneshot(request).await.unwrap()).await;
        let seen = seen.refused(408, "request_incomplete");
        assert_eq!(seen.json()["safe_new_key"], true);
        shop.expect_untouched();
    }
    shop.send(&post("/payments").key("k")).await.fresh(201);
    shop.ledger.expect(1);
}

// cases: 63
#[tokio::test]
async fn case_063_content_can_be_ignored_on_purpose() {
    let shop = Shop::with(|config| config.fingerprint(Recipe::ignoring_content()));
    same(&shop, [json(JSON), json("{}"), post("/other").key("k")]).await;
}

// cases: 64
#[tokio::test]
async fn case_064_equal_payloads_under_two_keys_are_two_operations() {
    let shop = Shop::open();
    shop.send(&json(JSON).with("idempotency-key", "a")).await.fresh(201);
    shop.send(&json(JSON).with("idempotency-key", "b")).await.fresh(201);
    shop.ledger.expect(2);
}

// cases: 65
#[tokio::test]
async fn case_065_a_record_of_an_older_recipe_is_compared_by_it_or_refused() {
    let old = Shop::open();
    let first = old.send(&json(JSON)).await.fresh(201);
    let recipe = || Recipe::new().header(HeaderName::from_static("api-version"));
    let accepting =
        old.reconfigured(|config| config.fingerprint(recipe()).also_accept(Recipe::new()));
    accepting.send(&json(JSON)).await.replay_of(&first);
    accepting.send(&json("{}")).await.refused(422, "key_reused");
    let forgetful = old.reconfigured(|config| config.fingerprint(recipe()));
    let seen = forgetful.send(&json(JSON)).await.refused(503, "record_unreadable");
    assert_eq!(seen.header("stripe-should-retry"), Some("true"));
    forgetful.ledger.expect(1);
}

// cases: 66
#[tokio::test]
async fn case_066_with_a_secret_the_digest_cannot_be_guessed_from_the_request() {
    let digest = async |recipe: Recipe| {
        let shop = Shop::with(|config| config.fingerprint(recipe));
        same(&shop, [json(JSON), json(JSON)]).await;
        let (_, claim) = shop.store.last_claim();
        *claim.fingerprints.current().digest()
    };
    let plain = digest(Recipe::new()).await;
    let keyed = digest(Recipe::new().keyed("2026", b"one secret")).await;
    let other = digest(Recipe::new().keyed("2026", b"another secret")).await;
    assert!(plain != keyed && keyed != other);
}
