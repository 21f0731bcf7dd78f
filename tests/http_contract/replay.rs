//! E. Replay fidelity. What only shows on the wire is in `wire_answers`.

use axum::body::Body;
use axum::middleware::from_fn;
use axum::response::{IntoResponse as _, Response as AxumResponse};
use http::header::{AUTHORIZATION, SET_COOKIE};
use http::{HeaderName, HeaderValue, Response};
use tower_http::cors::{AllowOrigin, CorsLayer};
use tower_idempotency::{
    HeaderRules, IDEMPOTENCY_KEY, IDEMPOTENCY_STATUS, IDEMPOTENT_REPLAYED, StoredResponse,
};

use crate::harness::{Ask, Seen, Shop, defaults, ms, post};

fn pay() -> Ask {
    post("/payments").key("k")
}

/// A shop whose handler answers with these headers.
fn with_headers(headers: &'static [(&'static str, &'static str)]) -> Shop {
    Shop::answering(defaults, move |number| {
        let mut response = Response::builder().status(201);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        response.body(format!("payment {number}").into()).unwrap()
    })
}

async fn twice(shop: &Shop) -> (Seen, Seen) {
    let first = shop.send(&pay()).await;
    let status = first.status.as_u16();
    let first = first.fresh(status);
    let second = shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
    (first, second)
}

// cases: 67, 68
#[tokio::test]
async fn case_067_the_first_answer_has_no_marker_and_the_replay_has_it() {
    let (first, second) = twice(&Shop::open()).await;
    assert!(first.headers.get(IDEMPOTENT_REPLAYED).is_none());
    assert_eq!(second.headers[IDEMPOTENT_REPLAYED], "true");
}

// cases: 69
#[tokio::test]
async fn case_069_a_hundred_retries_are_all_alike() {
    let shop = Shop::open();
    let first = shop.send(&pay()).await.fresh(201);
    let second = shop.send(&pay()).await.replay_of(&first);
    for _ in 0..99 {
        let seen = shop.send(&pay()).await.replay_of(&first);
        assert_eq!(seen.headers, second.headers);
    }
    shop.ledger.expect(1);
}

// cases: 70, 73
#[tokio::test]
async fn case_070_headers_of_the_result_are_replayed_with_number_order_and_value() {
    let shop = with_headers(&[
        ("content-type", "text/csv; charset=utf-8"),
        ("location", "/payments/1"),
        ("etag", "\"v1\""),
        ("last-modified", "Sun, 06 Nov 1994 08:49:37 GMT"),
        ("link", "</a>; rel=next"),
        ("link", "</b>; rel=last"),
        ("content-language", "de"),
        ("content-disposition", "attachment; filename=\"r.csv\""),
        ("cache-control", "private"),
        ("x-application", "yes"),
        ("x-application", "and no"),
    ]);
    let (first, mut second) = twice(&shop).await;
    assert_eq!(first.headers.get_all("link").iter().count(), 2);
    second.headers.remove(IDEMPOTENT_REPLAYED);
    assert_eq!(second.headers, first.headers);
}

// cases: 71, 72, 98
#[tokio::test]
async fn case_071_every_status_is_replayed_as_it_was() {
    for status in [200, 201, 202, 204, 205, 206, 301, 303, 307, 400, 402, 404, 410, 418, 451, 599] {
        let shop = Shop::answering(defaults, move |_| {
            let response = Response::builder().status(status).header("location", "/operations/1");
            let bodiless = status == 204 || status == 205;
            response.body(if bodiless { Body::empty() } else { Body::from("done") }).unwrap()
        });
        let (_, second) = twice(&shop).await;
        assert_eq!(second.header("location"), Some("/operations/1"));
        assert_eq!(second.header("content-type"), None);
        assert_eq!(second.body.is_empty(), status == 204 || status == 205);
    }
}

// cases: 74
#[tokio::test]
async fn case_074_headers_of_the_exchange_are_delivered_once_and_not_replayed() {
    const EXCHANGE: &[(&str, &str)] = &[
        ("set-cookie", "session=a"),
        ("set-cookie", "csrf=b"),
        ("connection", "x-hop"),
        ("x-hop", "1"),
        ("keep-alive", "timeout=5"),
        ("proxy-authenticate", "Basic"),
        ("proxy-connection", "keep-alive"),
        ("www-authenticate", "Basic"),
        ("authorization", "Bearer secret"),
        ("date", "Sun, 06 Nov 1994 08:49:37 GMT"),
        ("age", "3"),
        ("server-timing", "db;dur=1"),
        ("ratelimit", "limit=10"),
        ("x-ratelimit-remaining", "3"),
        ("x-request-id", "first"),
        ("request-id", "first"),
        ("x-csrf-token", "t"),
        ("access-control-allow-origin", "https://a.example"),
    ];
    let shop = with_headers(EXCHANGE);
    let (first, second) = twice(&shop).await;
    for (name, _) in EXCHANGE {
        assert!(first.headers.contains_key(*name), "{name} belongs to the first answer");
        assert!(!second.headers.contains_key(*name), "{name} must not be replayed");
    }
    // The values are not in the store either.
    let (key, claim) = shop.store.last_claim();
    let record = tower_idempotency::Store::claim(&shop.store, key, &claim).await.unwrap();
    let tower_idempotency::record::ClaimOutcome::Completed(bytes) = record else {
        panic!("the record is completed");
    };
    for (_, value) in EXCHANGE.iter().filter(|(_, value)| value.len() > 3) {
        let found = bytes.windows(value.len()).any(|window| window == value.as_bytes());
        assert!(!found, "{value} rests in the store");
    }
    assert_eq!(StoredResponse::decode(bytes).unwrap().headers().len(), 0);
}

#[tokio::test]
async fn dropped_headers_can_be_kept_and_kept_ones_dropped() {
    let rules = HeaderRules::default().keep(SET_COOKIE).drop(HeaderName::from_static("etag"));
    let shop = Shop::answering(
        |config| config.response_headers(rules),
        |_| {
            let response = Response::builder().header("set-cookie", "a=1").header("etag", "\"1\"");
            response.body(Body::empty()).unwrap()
        },
    );
    let (_, second) = twice(&shop).await;
    assert_eq!(second.header("set-cookie"), Some("a=1"));
    assert_eq!(second.header("etag"), None);
}

// cases: 76
#[tokio::test]
async fn case_076_all_bytes_survive() {
    let all: Vec<u8> = (0..=255).collect();
    let shop = Shop::answering(defaults, move |_| {
        let response = Response::builder().header("content-type", "application/json");
        response.body(all.clone().into()).unwrap()
    });
    let (first, _) = twice(&shop).await;
    assert_eq!(first.body, (0..=255).collect::<Vec<u8>>());
}

// cases: 77, 78
#[tokio::test]
async fn case_077_the_replay_shows_the_first_values_not_the_present_ones() {
    let shop = Shop::answering(defaults, |number| {
        Body::from(format!("{{\"id\":{number},\"random\":{}}}", rand::random::<u64>()))
            .into_response()
    });
    let (first, _) = twice(&shop).await;
    shop.send(&post("/payments").key("other")).await.fresh(200);
    shop.send(&pay()).await.replay_of(&first);
}

// cases: 79
#[tokio::test]
async fn case_079_every_answer_to_a_key_echoes_it_in_its_canonical_form() {
    for (sent, echoed) in [
        ("abc", "abc"),
        ("\"abc\";v=1", "abc"),
        (r#""a\"b\\c d""#, r#""a\"b\\c d""#),
        ("%0d%0aset-cookie:x", "%0d%0aset-cookie:x"),
    ] {
        let shop = Shop::open();
        let ask = post("/payments").key(sent);
        assert_eq!(shop.send(&ask).await.fresh(201).header("idempotency-key"), Some(echoed));
        assert_eq!(shop.send(&ask).await.replayed(201).header("idempotency-key"), Some(echoed));
        let refused = shop.send(&ask.clone().body("x")).await.refused(422, "key_reused");
        assert_eq!(refused.header("idempotency-key"), Some(echoed));
        let nobody = shop.send(&ask.by("")).await.refused(401, "scope_missing");
        assert_eq!(nobody.header("idempotency-key"), Some(echoed));
    }
}

/// A handler, or a service it relays, that sets the layer's own headers cannot fake its marks.
#[tokio::test]
async fn marks_that_a_handler_sets_are_replaced() {
    let shop = with_headers(&[
        ("idempotent-replayed", "true"),
        ("idempotency-status", "unprotected"),
        ("idempotency-key", "another"),
    ]);
    let (first, second) = twice(&shop).await;
    for seen in [first, second] {
        assert_eq!(seen.header("idempotency-status"), None);
        assert_eq!(seen.header("idempotency-key"), Some("k"));
    }
}

// cases: 80
#[tokio::test]
async fn case_080_a_problem_document_of_the_handler_is_replayed_unwrapped() {
    const PROBLEM: &str = r#"{"type":"https://api.example/no-funds","status":402}"#;
    let shop = Shop::answering(defaults, |_| {
        let response = Response::builder().status(402);
        response.header("content-type", "application/problem+json").body(PROBLEM.into()).unwrap()
    });
    let (_, second) = twice(&shop).await;
    assert_eq!(second.text(), PROBLEM);
    assert_eq!(second.header("content-type"), Some("application/problem+json"));
}

// cases: 82
#[tokio::test]
async fn case_082_a_revoked_credential_gets_no_replay_from_behind_the_guard() {
    let guard =
        from_fn(
            async |request: axum::extract::Request, next: axum::middleware::Next| match request
                .headers()
                .get(AUTHORIZATION)
            {
                Some(token) if token == "Bearer good" => next.run(request).await,
                Some(_) | None => http::StatusCode::UNAUTHORIZED.into_response(),
            },
        );
    let shop = Shop::open().wrapped(|app| app.layer(guard));
    let good = pay().header("authorization", "Bearer good");
    let first = shop.send(&good).await.fresh(201);
    for ask in [pay(), pay().header("authorization", "Bearer revoked")] {
        let seen = shop.send(&ask).await.fresh(401);
        assert!(seen.body.is_empty());
    }
    shop.send(&good).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 83
#[tokio::test]
async fn case_083_cors_outside_gives_each_origin_its_headers_and_shows_the_marks() {
    let origins = ["https://a.example", "https://b.example"];
    let cors = || {
        CorsLayer::new()
            .allow_origin(AllowOrigin::list(origins.map(HeaderValue::from_static)))
            .expose_headers([IDEMPOTENCY_KEY, IDEMPOTENT_REPLAYED, IDEMPOTENCY_STATUS])
    };
    let shop = Shop::open().wrapped(|app| app.layer(cors()));
    let from = |origin: &str| pay().header("origin", origin);
    let a = shop.send(&from(origins[0])).await.fresh(201);
    let b = shop.send(&from(origins[1])).await.replayed(201);
    assert_eq!(a.header("access-control-allow-origin"), Some(origins[0]));
    assert_eq!(b.header("access-control-allow-origin"), Some(origins[1]));
    assert!(b.header("access-control-expose-headers").unwrap().contains("idempotent-replayed"));
    // Inside, the first origin's headers are at least not kept for the second.
    let shop = Shop::open().lined(|app| app.layer(cors()));
    let a = shop.send(&from(origins[0])).await.fresh(201);
    let b = shop.send(&from(origins[1])).await.replayed(201);
    assert_eq!(a.header("access-control-allow-origin"), Some(origins[0]));
    assert_eq!(b.header("access-control-allow-origin"), None);
}

// cases: 84
#[tokio::test]
async fn case_084_refusals_must_not_be_cached() {
    // `refused` looks at Cache-Control.
    let shop = Shop::open();
    shop.send(&post("/payments")).await.refused(400, "key_missing");
    shop.send(&pay()).await.fresh(201);
    shop.send(&pay().body("other")).await.refused(422, "key_reused");
}

/// Fault B39: what layers outside add is of this exchange, exactly once.
#[tokio::test(start_paused = true)]
async fn a_request_id_from_a_layer_outside_is_that_of_the_retry() {
    let ids = from_fn(async |request: axum::extract::Request, next: axum::middleware::Next| {
        let id = request.headers()["x-test-id"].clone();
        let mut response: AxumResponse = next.run(request).await;
        response.headers_mut().append("x-request-id", id);
        response
    });
    let shop = with_headers(&[("x-application", "1")]).wrapped(|app| app.layer(ids));
    let first = shop.send(&pay().header("x-test-id", "1")).await.fresh(201);
    assert_eq!(first.header("x-request-id"), Some("1"));
    tokio::time::advance(ms(10_000)).await;
    let second = shop.send(&pay().header("x-test-id", "2")).await.replay_of(&first);
    assert_eq!(second.header("x-request-id"), Some("2"));
}
