//! C. Scope: whose keys these are.

use axum::Router;
use axum::routing::post as post_route;
use http::request::Parts;
use tower_idempotency::{Config, IdempotencyLayer, Identity, MemoryStore, Scope};

use crate::harness::{Ledger, Shop, no_wait, patch, post};

fn header(parts: &Parts, name: &str) -> Option<String> {
    Some(parts.headers.get(name)?.to_str().ok()?.to_owned())
}

// cases: 35
#[tokio::test]
async fn case_035_two_tenants_never_meet_under_one_key() {
    let (shop, gate) = Shop::gated(no_wait);
    let a = shop.sending(&post("/payments").key("k").by("a"));
    gate.entered().await;
    // A is in flight: B is neither told so nor refused for its other body.
    let b = shop.sending(&post("/payments").key("k").by("b").body("amount=7"));
    gate.entered().await;
    gate.open();
    assert_eq!(a.await.unwrap().fresh(201).text(), "payment 1");
    assert_eq!(b.await.unwrap().fresh(201).text(), "payment 2");
    let again = shop.send(&post("/payments").key("k").by("b").body("amount=7")).await;
    assert_eq!(again.replayed(201).text(), "payment 2");
    shop.ledger.expect(2);
}

// cases: 36, 45
#[tokio::test]
async fn case_036_credentials_of_one_tenant_share_its_keys() {
    let shop = Shop::open();
    let with = |token: &str| post("/payments").key("k").header("authorization", token);
    let first = shop.send(&with("Bearer old")).await.fresh(201);
    shop.send(&with("Bearer rotated")).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 37, 46
#[tokio::test]
async fn case_037_environment_and_connected_account_are_parts_of_the_tenant() {
    let scope = Scope::principal(|parts: &Parts| {
        let part = |name| header(parts, name).unwrap_or_default();
        Some(Identity::of_parts([part("environment"), part("account"), part("on-behalf-of")]))
    });
    let shop = Shop::with(|config| config.scope(scope));
    let ask = post("/payments").key("k");
    for ask in [
        ask.clone(),
        ask.clone().header("environment", "test"),
        ask.clone().header("environment", "live"),
        ask.clone().header("on-behalf-of", "acct_1"),
        ask.header("on-behalf-of", "acct_2"),
    ] {
        shop.send(&ask).await.fresh(201);
        shop.send(&ask).await.replayed(201);
    }
    shop.ledger.expect(5);
}

// cases: 38, 39
#[tokio::test]
async fn case_038_a_key_on_another_endpoint_is_refused() {
    let shop = Shop::open();
    shop.send(&post("/payments/1/refunds").key("k")).await.fresh(201);
    for other in [
        "/payments",
        "/payments/2/refunds",
        "/payments/1/refunds/",
        "/Payments/1/refunds",
        "/payments/%31/refunds",
    ] {
        shop.send(&post(other).key("k")).await.refused(422, "key_reused");
    }
    shop.ledger.expect(1);
}

/// Fault B68: a path is compared as it was sent; where it was sent to is not compared.
#[tokio::test]
async fn fault_b68_slash_case_and_encoding_are_other_paths_and_the_host_is_none() {
    let shop = Shop::open();
    let first = shop.send(&post("/orders/a1").key("k").header("host", "shop")).await.fresh(201);
    for other in [
        "/orders/a1/",
        "//orders/a1",
        "/orders//a1",
        "/orders/./a1",
        "/Orders/a1",
        "/orders/A1",
        "/orders/%61%31",
        "/orders/a%31",
        "/orders/a2",
    ] {
        let other = post(other).key("k").header("host", "shop");
        shop.send(&other).await.refused(422, "key_reused");
    }
    // Escapes are compared as they are written, too.
    shop.send(&post("/orders/%2a").key("escaped")).await.fresh(201);
    shop.send(&post("/orders/%2A").key("escaped")).await.refused(422, "key_reused");
    for host in ["eu.shop.example", "SHOP", "shop:8443"] {
        let elsewhere = post("/orders/a1").key("k").header("host", host);
        shop.send(&elsewhere).await.replay_of(&first);
    }
    // As HTTP/2 names it.
    shop.send(&post("http://eu.shop.example/orders/a1").key("k")).await.replay_of(&first);
    shop.send(&post("https://shop:8443/orders/a1").key("k")).await.replay_of(&first);
    shop.ledger.expect(2);
}

// cases: 40
#[tokio::test]
async fn case_040_keys_per_endpoint_can_be_chosen() {
    let shop = Shop::with(|config| {
        config.scope(Scope::principal(|parts: &Parts| header(parts, "account")).per_endpoint())
    });
    for ask in
        [post("/payments/1/refunds"), post("/payments/2/refunds"), patch("/payments/1/refunds")]
    {
        shop.send(&ask.clone().key("k")).await.fresh(201);
        shop.send(&ask.clone().key("k")).await.replayed(201);
        shop.send(&ask.key("k").body("other")).await.refused(422, "key_reused");
    }
    shop.ledger.expect(3);
}

// cases: 41
#[tokio::test]
async fn case_041_the_method_counts() {
    let shop = Shop::open();
    shop.send(&post("/payments/1").key("k")).await.fresh(201);
    shop.send(&patch("/payments/1").key("k")).await.refused(422, "key_reused");
    shop.ledger.expect(1);
}

// cases: 42
#[tokio::test]
async fn case_042_without_an_identity_nothing_runs() {
    let shop = Shop::open();
    shop.send(&post("/payments").key("k").by("")).await.refused(401, "scope_missing");
    let nobody = Shop::with(|config| config.scope(Scope::principal(|_: &Parts| None::<String>)));
    nobody.send(&post("/payments").key("k")).await.refused(401, "scope_missing");
    let empty = Scope::principal(|_: &Parts| Some(Identity::of_parts(["", ""])));
    let empty = Shop::with(|config| config.scope(empty));
    empty.send(&post("/payments").key("k")).await.refused(401, "scope_missing");
    for shop in [shop, nobody, empty] {
        shop.expect_untouched();
    }
}

// cases: 43
#[tokio::test]
async fn case_043_tenant_and_key_are_not_glued_together() {
    let shop = Shop::open();
    let pairs = [("a:b", "c"), ("a", "b:c"), ("a:b:c", "d"), ("a", "b:c:d")];
    for (tenant, key) in pairs {
        shop.send(&post("/payments").key(key).by(tenant)).await.fresh(201);
    }
    for (tenant, key) in pairs {
        shop.send(&post("/payments").key(key).by(tenant)).await.replayed(201);
    }
    shop.ledger.expect(pairs.len());
}

// cases: 47
#[tokio::test]
async fn case_047_two_regions_with_stores_of_their_own_both_run() {
    let (east, west) = (Shop::open(), Shop::open());
    east.send(&post("/payments").key("k")).await.fresh(201);
    west.send(&post("/payments").key("k")).await.fresh(201);
    east.ledger.expect(1);
    west.ledger.expect(1);
}

/// Inside `nest` a handler sees a part of the path only; the fingerprint sees all of it.
#[tokio::test]
async fn nested_routers_with_the_same_inner_path_are_different_endpoints() {
    let ledger = Ledger::default();
    let config = Config::builder().scope(Scope::global()).build().unwrap();
    let layer = IdempotencyLayer::new(config, MemoryStore::new());
    let inner = |name: &'static str| {
        let ledger = ledger.clone();
        let handler = async move || {
            ledger.note(name);
            name
        };
        Router::new().route("/create", post_route(handler)).layer(layer.clone())
    };
    let v1 = Router::new().nest("/orders", inner("order")).nest("/refunds", inner("refund"));
    let app = Router::new().nest("/v1", v1);
    let shop = Shop::open().wrapped(|_| app);
    shop.send(&post("/v1/orders/create").key("k")).await.fresh(200);
    shop.send(&post("/v1/refunds/create").key("k")).await.refused(422, "key_reused");
    shop.send(&post("/v1/orders/create").key("k")).await.replayed(200);
    assert_eq!(ledger.entries(), ["order"]);
}
