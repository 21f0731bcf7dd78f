//! Stripe's official clients for Python and Node, unchanged, against the sandbox: what they make of
//! answers, and what becomes of a payment when the connection does not hold.
//!
//! The exchanges go through a proxy that cuts them; effects are counted in the ledger.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

#[path = "support/narrow.rs"]
mod narrow;
#[path = "support/proxy.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod proxy;
#[path = "support/sandbox.rs"]
mod sandbox;
#[path = "support/sdk.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod sdk;
#[path = "support/tools.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod tools;

use narrow::Narrow;
use proxy::{Fate, Proxy};
use sandbox::{Call, Sandbox};
use sdk::{Language, Outcome, Sdk};

/// A sandbox, and a way to it that can be cut.
struct Shop {
    sandbox: Sandbox,
    proxy: Proxy,
}

impl Shop {
    async fn open(args: &[&str]) -> Self {
        let sandbox = Sandbox::start(args);
        let proxy = Proxy::to(sandbox.address).await;
        Self { sandbox, proxy }
    }

    fn client(&self, language: Language) -> Sdk {
        Sdk::start(language, &self.proxy.url())
    }

    async fn charges(&self) -> u64 {
        self.sandbox.charges().await
    }
}

fn intent(amount: u32, source: &str) -> Value {
    json!({ "amount": amount, "currency": "usd", "source": source })
}

fn key(key: &str) -> Value {
    json!({ "idempotency_key": key })
}

#[tokio::test]
async fn they_create_retrieve_and_refund_with_keys_of_their_own_and_with_given_ones() {
    let shop = Shop::open(&[]).await;
    for (round, language) in Language::ALL.into_iter().enumerate() {
        let sdk = shop.client(language);
        for (options, given) in [(json!({}), None), (key(&format!("k{round}")), Some(round))] {
            let paid = sdk.call("intents.create", intent(1999, "tok_visa"), options.clone()).await;
            let id = paid.object()["id"].as_str().unwrap().to_owned();
            assert!(id.starts_with("pi_"), "{id}");
            assert_eq!(paid.object()["object"], "payment_intent");
            assert_eq!(paid.object()["status"], "succeeded");
            assert_eq!(paid.told("replayed"), None);
            let sent = paid.told("key").expect("case 176: the key is echoed");
            if let Some(round) = given {
                assert_eq!(sent, format!("k{round}"));
            }
            let same = sdk.call("intents.retrieve", json!({ "id": id }), json!({})).await;
            assert_eq!(same.object()["id"], paid.object()["id"]);
            assert_eq!(same.told("key"), None);

            let refund = json!({ "payment_intent": id, "amount": 500 });
            let refund = sdk.call("refunds.create", refund, json!({})).await;
            assert_eq!(refund.object()["object"], "refund");
            assert_eq!(refund.object()["amount"], 500);
            let rest = json!({ "charge": paid.object()["latest_charge"] });
            let rest = sdk.call("refunds.create", rest, json!({})).await;
            assert_eq!(rest.object()["amount"], 1499);
            let found = json!({ "id": rest.object()["id"] });
            let found = sdk.call("refunds.retrieve", found, json!({})).await;
            assert_eq!(found.object()["id"], rest.object()["id"]);
            let charge = json!({ "id": paid.object()["latest_charge"] });
            let charge = sdk.call("charges.retrieve", charge, json!({})).await;
            assert_eq!(charge.object()["refunded"], true);
        }
        let charge = sdk.call("charges.create", intent(5, "tok_visa"), json!({})).await;
        assert!(charge.object()["id"].as_str().unwrap().starts_with("ch_"));
    }
    let ledger = shop.sandbox.ledger().await;
    assert_eq!((&ledger["charges"], &ledger["refunds"]), (&json!(6), &json!(8)));
}

#[tokio::test]
async fn cases_166_to_168_a_dropped_connection_is_retried_under_the_same_key_and_charges_once() {
    let shop = Shop::open(&[]).await;
    for language in Language::ALL {
        let sdk = shop.client(language);
        let mut actions = vec!["intents.create", "charges.create", "refunds.create"];
        if language == Language::Python {
            actions.push("module.create");
        }
        for action in actions {
            for (fate, replayed) in [(Fate::CutRequest, false), (Fate::CutBeforeAnswer, true)] {
                let mut params = intent(1999, "tok_visa");
                if action == "refunds.create" {
                    let paid = sdk.call("charges.create", params, json!({})).await;
                    params = json!({ "charge": paid.object()["id"] });
                }
                let (before, exchanges) = (effects(&shop).await, shop.proxy.exchanges());
                shop.proxy.next(&[fate]);
                let done = sdk.call(action, params, json!({})).await;
                let what = format!("{language:?} {action} {fate:?}");
                assert_eq!(done.is_replay(), replayed, "{what}: {done:?}");
                assert_eq!(shop.proxy.exchanges() - exchanges, 2, "{what}");
                assert_eq!(effects(&shop).await - before, 1, "{what}");
            }
        }
    }
}

async fn effects(shop: &Shop) -> usize {
    shop.sandbox.ledger().await["entries"].as_array().unwrap().len()
}

#[tokio::test]
async fn an_answer_that_ends_the_connection_costs_nothing() {
    let shop = Shop::open(&[]).await;
    for language in Language::ALL {
        let (sdk, before) = (shop.client(language), shop.charges().await);
        shop.proxy.next(&[Fate::CutAfterAnswer, Fate::CutAfterAnswer]);
        for amount in [1, 2] {
            let paid = sdk.call("intents.create", intent(amount, "tok_visa"), json!({})).await;
            assert_eq!(paid.object()["amount"], amount);
        }
        assert_eq!(shop.charges().await - before, 2);
    }
}

#[tokio::test]
async fn case_169_node_retries_a_reset_connection_once_even_without_retries() {
    let shop = Shop::open(&[]).await;
    let sdk = shop.client(Language::Node);
    let none = json!({ "max_network_retries": 0, "idempotency_key": "k" });
    shop.proxy.next(&[Fate::CutBeforeAnswer]);
    let paid = sdk.call("intents.create", intent(7, "tok_visa"), none).await;
    assert!(paid.is_replay(), "{paid:?}");
    assert_eq!((shop.proxy.exchanges(), shop.charges().await), (2, 1));
}

#[tokio::test]
async fn case_170_a_truncated_answer_is_not_retried_and_the_same_key_gets_the_whole_one() {
    let shop = Shop::open(&[]).await;
    for language in Language::ALL {
        let sdk = shop.client(language);
        let (before, exchanges) = (shop.charges().await, shop.proxy.exchanges());
        let again =
            || sdk.call("intents.create", intent(8, "tok_visa"), key(&format!("{language:?}")));
        shop.proxy.next(&[Fate::CutInBody]);
        let cut = again().await;
        assert_eq!(cut.class(), language.connection_error(), "{cut:?}");
        assert_eq!(shop.proxy.exchanges() - exchanges, 1, "{language:?}");
        assert!(again().await.is_replay());
        assert_eq!(shop.charges().await - before, 1);
    }
}

/// What the client of a slow handler gives up on: three tenths of a second an answer.
const HASTE: Duration = Duration::from_millis(300);

/// One payment by a client that gives up after [`HASTE`]: what became of it, and in how many requests.
async fn hastily(shop: &Shop, language: Language, source: &str) -> (Outcome, u64) {
    let sdk = Sdk::start_with(language, &shop.proxy.url(), HASTE);
    let exchanges = shop.proxy.exchanges();
    let paid = sdk.call("intents.create", intent(9, source), key("k")).await;
    (paid, shop.proxy.exchanges() - exchanges)
}

/// The same payment by a client with time; there was one charge however often it was asked for.
async fn patiently(shop: &Shop, language: Language, source: &str) {
    let sdk = shop.client(language);
    let mut paid = sdk.call("intents.create", intent(9, source), key("k")).await;
    while let Outcome::Error(error) = &paid {
        assert_eq!(error["code"], "idempotency_key_in_use", "{language:?} {error}");
        paid = sdk.call("intents.create", intent(9, source), key("k")).await;
    }
    assert!(paid.is_replay(), "{language:?} {paid:?}");
    assert_eq!(shop.charges().await, 1, "{language:?}");
}

/// Without any wait at the server: a time-out, a 409, and what the third request finds.
#[tokio::test]
async fn case_171_a_handler_slower_than_the_client_ends_in_the_replay_or_in_a_typed_error() {
    join_all(Language::ALL.map(async |language| {
        // Half a second after the first attempt the handler runs still; when the third request comes,
        // half a second to one later, it may have ended.
        let shop = Shop::open(&["--wait", "0"]).await;
        let (ended, requests) = hastily(&shop, language, "tok_slow_1500").await;
        assert_eq!(requests, 3, "{language:?} {ended:?}");
        match &ended {
            Outcome::Object(_) => assert!(ended.is_replay(), "{language:?} {ended:?}"),
            Outcome::Error(error) => {
                assert_eq!(error["status"], 409, "{language:?} {error}");
                assert_eq!(error["code"], "idempotency_key_in_use", "{language:?} {error}");
            }
        }
        patiently(&shop, language, "tok_slow_1500").await;
        // This one certainly runs on.
        let shop = Shop::open(&["--wait", "0"]).await;
        let (busy, requests) = hastily(&shop, language, "tok_slow_5000").await;
        assert_eq!(requests, 3, "{language:?} {busy:?}");
        assert_eq!(busy.error()["status"], 409, "{language:?} {busy:?}");
        assert_eq!(busy.error()["code"], "idempotency_key_in_use", "{language:?} {busy:?}");
    }))
    .await;
}

/// A wait that ends before the client's patience does turns the 409 into the answer.
#[tokio::test]
async fn case_171_a_wait_shorter_than_the_clients_patience_saves_a_request() {
    join_all(Language::ALL.map(async |language| {
        let shop = Shop::open(&["--wait", "0.2"]).await;
        // Over when the retry, which comes after eight tenths of a second, has not waited long.
        let (paid, requests) = hastily(&shop, language, "tok_slow_850").await;
        assert!(paid.is_replay(), "{language:?} {paid:?}");
        assert_eq!(requests, 2, "{language:?} {paid:?}");
        patiently(&shop, language, "tok_slow_850").await;
    }))
    .await;
}

/// A wait that is longer than the client's patience is none for it: no answer ever comes in time.
#[tokio::test]
async fn case_171_a_wait_longer_than_the_clients_patience_ends_in_a_connection_error() {
    join_all(Language::ALL.map(async |language| {
        let shop = Shop::open(&["--wait", "2"]).await;
        let (lost, requests) = hastily(&shop, language, "tok_slow_5000").await;
        assert_eq!(lost.class(), language.connection_error(), "{lost:?}");
        assert_eq!(requests, 3, "{language:?} {lost:?}");
        patiently(&shop, language, "tok_slow_5000").await;
    }))
    .await;
}

#[tokio::test]
async fn case_172_without_waiting_a_long_run_is_409_after_three_requests_and_a_replay_later() {
    let shop = Shop::open(&["--wait", "0", "--stripe-errors"]).await;
    for language in Language::ALL {
        let sdk = Arc::new(shop.client(language));
        let before = shop.charges().await;
        let (params, options) = (intent(10, "tok_slow_5000"), key(&format!("{language:?}")));
        let first = tokio::spawn({
            let (sdk, params, options) = (Arc::clone(&sdk), params.clone(), options.clone());
            async move { sdk.call("intents.create", params, options).await }
        });
        while running_handlers(&shop).await == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let exchanges = shop.proxy.exchanges();
        let busy = sdk.call("intents.create", params.clone(), options.clone()).await;
        assert_eq!(busy.error()["status"], 409, "{busy:?}");
        assert_eq!(busy.error()["code"], "idempotency_key_in_use", "{busy:?}");
        assert_eq!(shop.proxy.exchanges() - exchanges, 3, "{language:?}");
        let first = first.await.unwrap();
        assert_eq!(first.object()["amount"], 10);
        let later = sdk.call("intents.create", params, options).await;
        assert!(later.is_replay());
        assert_eq!(later.object()["id"], first.object()["id"]);
        assert_eq!(shop.charges().await - before, 1);
    }
}

/// How many handlers run now.
async fn running_handlers(shop: &Shop) -> u32 {
    let metrics = shop.sandbox.send(Call::get("/metrics")).await;
    let text = String::from_utf8(metrics.body.to_vec()).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("idempotency_in_flight "));
    line.map_or(0, |number| number.parse().unwrap())
}

#[tokio::test]
async fn case_173_a_stored_500_is_asked_for_once() {
    let shop = Shop::open(&["--store", "memory:"]).await;
    for language in Language::ALL {
        let sdk = shop.client(language);
        let before = shop.charges().await;
        for _ in 0..2 {
            let exchanges = shop.proxy.exchanges();
            let options = key(&format!("{language:?}"));
            let broken =
                sdk.call("intents.create", intent(11, "tok_charge_then_500"), options).await;
            assert_eq!(broken.class(), language.class("APIError"), "{broken:?}");
            assert_eq!(broken.error()["status"], 500);
            assert_eq!(shop.proxy.exchanges() - exchanges, 1, "{language:?}");
        }
        assert_eq!(shop.charges().await - before, 1);
    }
}

#[tokio::test]
async fn a_500_that_was_rolled_back_is_asked_for_again_and_charges_nothing() {
    let shop = Shop::open(&[]).await;
    for language in Language::ALL {
        let sdk = shop.client(language);
        let exchanges = shop.proxy.exchanges();
        let options = key(&format!("{language:?}"));
        let broken = sdk.call("intents.create", intent(11, "tok_charge_then_500"), options).await;
        assert_eq!(broken.error()["status"], 500);
        assert!(shop.proxy.exchanges() - exchanges > 1, "{language:?}");
    }
    assert_eq!(shop.charges().await, 0);
}

#[tokio::test]
async fn case_174_a_reused_key_is_their_idempotency_error_in_stripes_flavour_and_an_error_in_ours()
{
    for (flags, status) in [(&["--stripe-errors"][..], 400), (&[], 422)] {
        let shop = Shop::open(flags).await;
        for language in Language::ALL {
            let sdk = shop.client(language);
            let options = key(&format!("{language:?}"));
            let paid = sdk.call("intents.create", intent(12, "tok_visa"), options.clone()).await;
            assert_eq!(paid.object()["amount"], 12);
            let (before, exchanges) = (shop.charges().await, shop.proxy.exchanges());
            let reused = sdk.call("intents.create", intent(13, "tok_visa"), options).await;
            let class = if status == 400 { "IdempotencyError" } else { "APIError" };
            assert_eq!(reused.class(), language.class(class), "{reused:?}");
            assert_eq!(reused.error()["status"], status);
            assert_eq!(reused.error()["type"], "idempotency_error");
            assert_eq!(reused.error()["code"], "idempotency_key_reused");
            assert_eq!(shop.proxy.exchanges() - exchanges, 1, "{language:?}");
            assert_eq!(shop.charges().await, before);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_175_two_hundred_calls_at_once_under_one_key_charge_once() {
    let shop = Shop::open(&["--stripe-errors"]).await;
    for language in Language::ALL {
        let (sdk, before) = (shop.client(language), shop.charges().await);
        let options = key(&format!("{language:?}"));
        let calls = (0..200)
            .map(|_| sdk.call("intents.create", intent(14, "tok_slow_300"), options.clone()));
        let mut ids = std::collections::BTreeSet::new();
        for ended in join_all(calls).await {
            match ended {
                Outcome::Object(answer) => drop(ids.insert(answer["object"]["id"].to_string())),
                Outcome::Error(error) => {
                    assert_eq!(error["code"], "idempotency_key_in_use", "{error}");
                }
            }
        }
        assert_eq!(ids.len(), 1, "{language:?}");
        assert_eq!(shop.charges().await - before, 1);
    }
}

#[tokio::test]
async fn case_176_key_and_marker_can_be_read_from_the_client() {
    let shop = Shop::open(&[]).await;
    for language in Language::ALL {
        let sdk = shop.client(language);
        let options = key(&format!("{language:?}"));
        for replayed in [None, Some("true")] {
            let paid = sdk.call("intents.create", intent(15, "tok_visa"), options.clone()).await;
            assert_eq!(paid.told("replayed"), replayed);
            assert_eq!(paid.told("key"), options["idempotency_key"].as_str());
        }
    }
}

#[tokio::test]
async fn both_clients_make_the_same_request_although_they_write_it_differently() {
    let shop = Shop::open(&[]).await;
    let params = json!({ "amount": 18, "currency": "usd", "description": "two books & more" });
    for (language, replay) in [(Language::Python, false), (Language::Node, true)] {
        let paid = shop.client(language).call("charges.create", params.clone(), key("k")).await;
        assert_eq!(paid.is_replay(), replay, "{language:?} {paid:?}");
        assert_eq!(paid.object()["description"], "two books & more");
    }
    assert_eq!(shop.charges().await, 1);
}

#[tokio::test]
async fn case_177_a_429_is_not_retried_and_frees_the_key() {
    let shop = Shop::open(&[]).await;
    for language in Language::ALL {
        let sdk = shop.client(language);
        let (before, exchanges) = (shop.charges().await, shop.proxy.exchanges());
        let options = key(&format!("{language:?}"));
        let limited =
            sdk.call("intents.create", intent(16, "tok_rate_limited"), options.clone()).await;
        assert_eq!(limited.class(), language.class("RateLimitError"), "{limited:?}");
        assert_eq!(shop.proxy.exchanges() - exchanges, 1, "{language:?}");
        let paid = sdk.call("intents.create", intent(16, "tok_visa"), options).await;
        assert!(!paid.is_replay());
        assert_eq!(shop.charges().await - before, 1);
    }
}

#[tokio::test]
async fn case_177_a_429_that_asks_for_a_retry_is_retried_and_gets_its_object() {
    for language in Language::ALL {
        let shop = Narrow::start().await;
        let sdk = Arc::new(Sdk::start(language, &shop.url));
        let pay = |options: Value| {
            let sdk = Arc::clone(&sdk);
            let call =
                async move { sdk.call("intents.create", intent(16, "tok_visa"), options).await };
            tokio::spawn(call)
        };
        let first = pay(key("first"));
        shop.entered.acquire().await.unwrap().forget();
        // Without retries it is the client's own class of error.
        let none = json!({ "max_network_retries": 0, "idempotency_key": "none" });
        let limited = pay(none).await.unwrap();
        assert_eq!(limited.class(), language.class("RateLimitError"), "{limited:?}");
        assert_eq!(limited.error()["code"], "idempotency_too_many_in_flight", "{limited:?}");
        assert_eq!(shop.told("none"), [429], "{language:?}");
        // With them it comes again, and meanwhile there is room.
        let second = pay(key("second"));
        while shop.told("second").is_empty() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        shop.open.add_permits(2);
        let second = second.await.unwrap();
        assert_eq!(second.object()["id"], "pi_1", "{language:?} {second:?}");
        assert_eq!(shop.told("second"), [429, 200], "{language:?}");
        assert_eq!(first.await.unwrap().object()["id"], "pi_1");
        assert_eq!(shop.told("first"), [200], "{language:?}");
    }
}

#[tokio::test]
async fn errors_of_the_sandbox_are_the_clients_own_classes() {
    let shop = Shop::open(&["--stripe-errors"]).await;
    let cases = [
        (intent(17, "tok_declined"), "CardError", 402),
        (intent(0, "tok_visa"), "InvalidRequestError", 400),
        (json!({ "currency": "usd" }), "InvalidRequestError", 400),
    ];
    for language in Language::ALL {
        let sdk = shop.client(language);
        for (params, class, status) in cases.clone() {
            let refused = sdk.call("intents.create", params, json!({})).await;
            assert_eq!(refused.class(), language.class(class), "{refused:?}");
            assert_eq!(refused.error()["status"], status);
        }
        let long = json!({ "idempotency_key": "k".repeat(256) });
        let refused = sdk.call("intents.create", intent(17, "tok_visa"), long).await;
        assert_eq!(refused.class(), language.class("InvalidRequestError"), "{refused:?}");
        assert_eq!(refused.error()["code"], "idempotency_key_invalid");
        let nobody = sdk.call("intents.retrieve", json!({ "id": "pi_0" }), json!({})).await;
        assert_eq!(nobody.class(), language.class("InvalidRequestError"), "{nobody:?}");
        assert_eq!(nobody.error()["status"], 404);
    }
    let unnamed = Call::new(http::Method::POST, "/v1/payment_intents").key("k");
    let unnamed = shop.sandbox.send(unnamed).await;
    assert_eq!(
        (unnamed.status.as_u16(), unnamed.header("content-type")),
        (401, Some("application/json"))
    );
    assert_eq!(unnamed.json().as_object().unwrap().len(), 1, "{unnamed:?}");
    assert_eq!(shop.charges().await, 0);
}

/// How many calls the storm makes; `SDK_CALLS=2000` makes those that are promised.
const CALLS: u32 = 300;
/// How many run at a time in each language.
const AT_A_TIME: usize = 24;
/// An application that knows its key sends it again this often.
const PATIENT_TRIES: usize = 30;

/// Exchanges are cut with a probability of 3 in 10, in four ways; by their number, so that a run
/// can be repeated.
fn cut_three_in_ten(exchange: u64) -> Fate {
    // SplitMix64.
    let mut z = exchange.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    if z % 10 >= 3 {
        return Fate::Pass;
    }
    match (z >> 32) % 4 {
        0 => Fate::CutRequest,
        1 => Fate::CutBeforeAnswer,
        2 => Fate::CutInBody,
        _ => Fate::CutAfterAnswer,
    }
}

/// What a logical call came to: its amount is its name.
struct Ended {
    amount: u32,
    own_key: bool,
    object: bool,
    tries: usize,
}

async fn logical_call(sdk: &Sdk, amount: u32, permits: &Semaphore) -> Ended {
    let _permit = permits.acquire().await.unwrap();
    // Half know their key and go on until they have the object; the others leave it to the client.
    let own_key = amount.is_multiple_of(2);
    let options = if own_key { key(&format!("call-{amount}")) } else { json!({}) };
    let mut tries = 0;
    loop {
        tries += 1;
        let ended = sdk.call("intents.create", intent(amount, "tok_visa"), options.clone()).await;
        if let Outcome::Object(answer) = &ended {
            assert_eq!(answer["object"]["amount"], amount, "another call's object: {answer}");
            return Ended { amount, own_key, object: true, tries };
        }
        if !own_key {
            return Ended { amount, own_key, object: false, tries };
        }
        assert!(tries < PATIENT_TRIES, "no object after {tries} tries: {ended:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn through_a_proxy_that_cuts_three_in_ten_there_is_one_charge_per_logical_call() {
    let calls = std::env::var("SDK_CALLS").map_or(CALLS, |text| text.parse().expect("a number"));
    let shop = Shop::open(&[]).await;
    let clients = Language::ALL.map(|language| (shop.client(language), Semaphore::new(AT_A_TIME)));
    shop.proxy.choose(cut_three_in_ten);
    let running = (1..=calls).map(|amount| {
        let (sdk, permits) = &clients[(amount / 2) as usize % clients.len()];
        logical_call(sdk, amount, permits)
    });
    let ended = join_all(running).await;

    let ledger = shop.sandbox.ledger().await;
    let mut charges: HashMap<u64, usize> = HashMap::new();
    for entry in ledger["entries"].as_array().unwrap() {
        *charges.entry(entry["amount"].as_u64().unwrap()).or_default() += 1;
    }
    let (mut objects, mut errors, mut tries) = (0, 0, 0);
    for Ended { amount, own_key, object, tries: tried } in ended {
        let charged = charges.remove(&amount.into()).unwrap_or_default();
        if object {
            assert_eq!(charged, 1, "call {amount} (own key: {own_key})");
            objects += 1;
        } else {
            assert!(
                charged <= 1,
                "call {amount} ended in a typed error and charged {charged} times"
            );
            errors += 1;
        }
        tries += tried;
    }
    assert!(charges.is_empty(), "charges that nobody made: {charges:?}");
    assert!(objects >= calls / 2);
    let (exchanges, cut) = (shop.proxy.exchanges(), shop.proxy.cut());
    println!(
        "{calls} logical calls, {tries} calls of the clients, {exchanges} exchanges, {cut} of them \
         cut: {objects} objects, {errors} typed errors, {} charges, none twice",
        ledger["charges"]
    );
    assert!(cut * 10 > exchanges * 2, "{cut} of {exchanges}");
}
