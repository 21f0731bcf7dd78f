//! The contract of the payments sandbox, row by row, from outside: over sockets, with signals, and
//! by counting what stands in the ledger.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::time::{Duration, Instant};

use http::{Method, StatusCode};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

#[path = "support/postgres.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod postgres;
#[path = "support/sandbox.rs"]
mod sandbox;

use postgres::PostgresServer;
use sandbox::{Answer, Call, Connection, Sandbox, refused, send_http2};

fn delete(id: &str) -> Call {
    Call::new(Method::DELETE, format!("/v1/payments/{id}")).account("acme")
}

fn refund(id: &str, key: &str) -> Call {
    Call::new(Method::POST, format!("/v1/payments/{id}/refunds")).account("acme").key(key)
}

#[track_caller]
fn check(answer: &Answer, status: u16, code: &str) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (status, code), "{answer:?}");
}

// ---- In Stripe's shape

#[tokio::test]
async fn the_routes_in_stripes_shape_take_forms_and_need_no_key() {
    let sandbox = Sandbox::start(&[]);
    let form = |path: &str, body: &str| {
        Call::new(Method::POST, path).account("acme").form(body.to_owned())
    };
    let pay = form("/v1/payment_intents", "amount=1999&currency=usd&description=two+books");
    for charges in [1, 2] {
        let paid = sandbox.send(pay.clone()).await;
        assert_eq!((paid.status.as_u16(), paid.header("idempotency-key")), (200, None));
        assert_eq!(paid.json()["description"], "two books");
        assert_eq!(sandbox.charges().await, charges, "without a key every request is the first");
    }
    for replay in [false, true] {
        assert_eq!(sandbox.send(pay.clone().key("k")).await.is_replay(), replay);
    }
    let json = pay.clone().key("j").json(r#"{"amount":1999,"currency":"usd"}"#);
    check(&sandbox.send(json).await, 415, "unsupported_media_type");
    check(&sandbox.send(pay.clone().key("k,")).await, 400, "idempotency_key_invalid");
    let both = sandbox.send(form("/v1/refunds", "charge=ch_1&payment_intent=pi_1")).await;
    check(&both, 400, "parameters_exclusive");
    assert_eq!(both.json()["error"]["type"], "invalid_request_error");
    assert!(both.json()["error"]["message"].as_str().unwrap().contains("charge, payment_intent"));
    check(&sandbox.send(form("/v1/refunds", "amount=1")).await, 400, "parameter_missing");
    let other = form("/v1/refunds", "charge=pi_1");
    check(&sandbox.send(other).await, 404, "resource_missing");
    let twice = form("/v1/charges", "amount=1&amount=2&currency=usd");
    check(&sandbox.send(twice).await, 400, "parameter_repeated");
    let panic = form("/v1/charges", "amount=1&currency=usd&source=tok_panic_before");
    check(&sandbox.send(panic.clone()).await, 500, "internal_error");
    check(&sandbox.send(panic.key("p")).await, 500, "idempotency_rolled_back");
    let foreign = Call::get("/v1/payment_intents/pi_0");
    check(&sandbox.send(foreign).await, 404, "resource_missing");
    assert_eq!(sandbox.charges().await, 3);
}

#[tokio::test]
async fn a_key_of_a_json_route_is_a_mismatch_on_a_form_route_and_the_other_way_round() {
    let sandbox = Sandbox::start(&[]);
    let form = |key: &str| {
        let charge = "amount=5&currency=usd&source=tok_visa";
        Call::new(Method::POST, "/v1/charges").account("acme").form(charge.to_owned()).key(key)
    };
    assert_eq!(sandbox.send(Call::pay("json", "tok_visa")).await.status, 201);
    check(&sandbox.send(form("json")).await, 422, "idempotency_key_reused");
    assert_eq!(sandbox.send(form("form")).await.status, 200);
    check(&sandbox.send(Call::pay("form", "tok_visa")).await, 422, "idempotency_key_reused");
    check(&sandbox.send(delete("pay_1").key("form")).await, 422, "idempotency_key_reused");
    assert_eq!(sandbox.charges().await, 2);
}

// ---- Starting and stopping

#[tokio::test]
async fn it_says_where_it_listens_and_what_to_try() {
    let mut sandbox = Sandbox::start(&[]);
    assert_eq!(sandbox.send(Call::get("/healthz")).await.status, 200);
    let (output, _) = sandbox.said();
    let first = format!("listening on http://{}", sandbox.address);
    assert_eq!(output.lines().next(), Some(first.as_str()));
    assert!(output.contains("sqlite:") && output.contains("ledger.db"), "{output}");
    let lines: Vec<_> = output.lines().filter(|line| line.starts_with("curl ")).collect();
    assert_eq!(lines.len(), 3, "{output}");
    assert_eq!(lines[0], lines[1]);
    assert_ne!(lines[0], lines[2]);
    for signal in ["INT", "TERM"] {
        sandbox.signal(signal);
        assert_eq!(sandbox.ended().code(), Some(0), "SIG{signal}");
        sandbox = Sandbox::start(&[]);
    }
}

#[test]
fn what_it_cannot_do_is_refused_with_an_exit_code() {
    let usage: [(&[&str], &str); 16] = [
        (&["--bogus"], "--bogus"),
        (&["--listen", "nowhere"], "--listen"),
        (&["--store", "mongodb://h"], "unknown store"),
        (&["--store", "rediss:"], "rediss://127.0.0.1:6379"),
        (&["--store", "redis+cluster://"], "redis+cluster://host:7000,host:7001"),
        (&["--store", "redis://h:1?wait=x"], "a number of replicas"),
        (&["--store", "sqlite:x.db", "--ledger", "y.db"], "in the store's file"),
        (&["--store", "postgres://h/d", "--ledger", "y.db"], "in the store's database"),
        (&["--recovery", "sometimes"], "--recovery"),
        (&["--lease", "NaN"], "--lease"),
        (&["--lease=-1"], "--lease"),
        (&["--lease", "2", "--retention", "1"], "retention (1s) must not be shorter"),
        (&["--retention", "1e30"], "--retention"),
        (&["--wait", "61"], "wait is 61s"),
        (&["--drain", "inf"], "--drain"),
        (&["--body-limit", "0"], "--body-limit"),
    ];
    for (args, said) in usage {
        let (code, error) = refused(args, &[]);
        assert_eq!(code, Some(2), "{args:?}: {error}");
        assert!(error.contains(said), "{args:?}: {error}");
    }
    for (name, value) in [("PAYMENTS_BODY_LIMIT", "x"), ("PAYMENTS_STRIPE_ERRORS", "maybe")] {
        assert_eq!(refused(&[], &[(name, value)]).0, Some(2), "{name}");
    }
    let started = Instant::now();
    let (code, error) = refused(&["--store", "rdis://user:secret@127.0.0.1:1"], &[]);
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("--store: unknown store") && !error.contains("secret"), "{error}");
    let (code, error) = refused(&["--store", "redis://user:secret@127.0.0.1:1"], &[]);
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("127.0.0.1:1") && !error.contains("secret"), "{error}");
    for url in ["redis+sentinel://:secret@127.0.0.1:1/m", "redis+cluster://:secret@127.0.0.1:1"] {
        let (code, error) = refused(&["--store", url], &[]);
        assert_eq!(code, Some(1), "{error}");
        assert!(error.contains("127.0.0.1:1") && !error.contains("secret"), "{error}");
    }
    let (code, error) = refused(&["--store", "postgres://user:secret@127.0.0.1:1/d"], &[]);
    assert_eq!(code, Some(1), "{error}");
    assert!(error.contains("127.0.0.1:1") && !error.contains("secret"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(25));
}

#[tokio::test]
async fn a_short_retention_lowers_the_lease_and_ends_a_key() {
    let sandbox = Sandbox::start(&["--retention", "1"]);
    let first = sandbox.send(Call::pay("k", "tok_visa")).await;
    assert!(sandbox.send(Call::pay("k", "tok_visa")).await.is_replay());
    tokio::time::sleep(Duration::from_millis(1200)).await;
    let second = sandbox.send(Call::pay("k", "tok_visa")).await;
    assert!(!second.is_replay());
    assert_ne!(first.id(), second.id());
    assert_eq!(sandbox.charges().await, 2);
    assert!(sandbox.said().1.contains("the lease is 500ms"), "{:?}", sandbox.said());
}

#[tokio::test]
async fn a_stop_lets_running_payments_finish_and_starts_no_new_ones() {
    let mut sandbox = Sandbox::start(&[]);
    let (mut running, mut open) = (sandbox.connect().await, sandbox.connect().await);
    let paid = sandbox.send(Call::pay("paid", "tok_visa")).await;
    let slow = tokio::spawn(async move { running.send(Call::pay("slow", "tok_slow_1500")).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    sandbox.signal("TERM");
    tokio::time::sleep(Duration::from_millis(300)).await;

    assert!(Connection::open(sandbox.address).await.is_err(), "it still accepts");
    let new = open.send(Call::pay("new", "tok_visa")).await.unwrap();
    check(&new, 503, "idempotency_store_unavailable");
    let void = open.send(delete(&paid.id())).await.unwrap();
    check(&void, 503, "unavailable");
    assert_eq!(open.send(Call::get("/readyz")).await.unwrap().status, 503);
    let ledger = open.send(Call::get("/v1/ledger")).await.unwrap().json();
    assert_eq!(ledger["charges"], 1);

    assert_eq!(slow.await.unwrap().unwrap().status, 201);
    assert_eq!(sandbox.ended().code(), Some(0));
    let again = Sandbox::start_on(&sandbox.ledger, &[]);
    assert_eq!(again.charges().await, 2);
}

#[tokio::test]
async fn a_stop_is_bounded() {
    let mut sandbox = Sandbox::start(&["--drain", "0.3"]);
    let mut running = sandbox.connect().await;
    tokio::spawn(async move { running.send(Call::pay("slow", "tok_slow_60000")).await });
    tokio::time::sleep(Duration::from_millis(200)).await;
    let stopped = Instant::now();
    sandbox.signal("TERM");
    assert_eq!(sandbox.ended().code(), Some(0));
    assert!(stopped.elapsed() < Duration::from_secs(3), "{:?}", stopped.elapsed());
}

#[tokio::test]
async fn a_crash_keeps_the_ledger_and_forgets_what_was_in_memory() {
    for (source, charged) in [("tok_crash_before", 0), ("tok_crash_after", 1)] {
        let mut sandbox = Sandbox::start(&["--store", "memory:"]);
        let mut connection = sandbox.connect().await;
        assert!(connection.send(Call::pay("k", source)).await.is_err(), "{source}");
        assert!(!sandbox.ended().success());
        let again = Sandbox::start_on(&sandbox.ledger, &["--store", "memory:"]);
        assert_eq!(again.charges().await, charged, "{source}");
    }
    let mut sandbox = Sandbox::start(&["--store", "memory:"]);
    let paid = sandbox.send(Call::pay("k", "tok_visa")).await;
    sandbox.signal("KILL");
    sandbox.ended();
    let again = Sandbox::start_on(&sandbox.ledger, &["--store", "memory:"]);
    let path = paid.header("location").unwrap();
    assert_eq!(again.send(Call::get(path)).await.body, paid.body);
    assert!(!again.send(Call::pay("k", "tok_visa")).await.is_replay());
    assert_eq!(again.charges().await, 2);
}

#[tokio::test]
async fn a_crash_leaves_nothing_of_a_payment_and_keeps_what_was_answered() {
    for source in ["tok_crash_before", "tok_crash_after"] {
        let mut sandbox = Sandbox::start(&[]);
        let mut connection = sandbox.connect().await;
        assert!(connection.send(Call::pay("k", source)).await.is_err(), "{source}");
        assert!(!sandbox.ended().success());
        let again = Sandbox::start_on(&sandbox.ledger, &[]);
        assert_eq!(again.charges().await, 0, "{source}");
        // There is no trace of it, so the key is good for another request.
        assert_eq!(again.send(Call::pay("k", "tok_visa")).await.status, 201);
    }
    let mut sandbox = Sandbox::start(&[]);
    let paid = sandbox.send(Call::pay("k", "tok_visa")).await;
    sandbox.signal("KILL");
    sandbox.ended();
    let again = Sandbox::start_on(&sandbox.ledger, &[]);
    let retry = again.send(Call::pay("k", "tok_visa")).await;
    assert_eq!((retry.is_replay(), retry.body), (true, paid.body));
    assert_eq!(again.charges().await, 1);
}

#[tokio::test]
async fn several_processes_share_a_ledger() {
    let one = Sandbox::start(&[]);
    let two = Sandbox::start_on(&one.ledger, &[]);
    let pay = async |sandbox: &Sandbox, name: &str| {
        for n in 0..20 {
            let paid = sandbox.send(Call::pay(&format!("{name}-{n}"), "tok_visa")).await;
            assert_eq!(paid.status, 201);
        }
    };
    tokio::join!(pay(&one, "one"), pay(&two, "two"));
    assert_eq!((one.charges().await, two.charges().await), (40, 40));
}

#[tokio::test]
async fn http_2_with_prior_knowledge_is_served() {
    let sandbox = Sandbox::start(&[]);
    let first = send_http2(sandbox.address, Call::pay("k", "tok_visa")).await;
    let second = sandbox.send(Call::pay("k", "tok_visa")).await;
    assert_eq!((first.status, &first.body), (second.status, &second.body));
    assert!(!first.is_replay() && second.is_replay());
}

#[tokio::test]
async fn operators_need_no_authorization() {
    let sandbox = Sandbox::start(&[]);
    sandbox.send(Call::pay("k", "tok_visa")).await;
    for path in ["/healthz", "/readyz", "/metrics", "/v1/ledger"] {
        let answer = sandbox.send(Call::get(path).without("authorization")).await;
        assert_eq!(answer.status, 200, "{path}");
    }
    let metrics = sandbox.send(Call::get("/metrics")).await;
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain"));
    assert!(String::from_utf8_lossy(&metrics.body).contains("idempotency_requests"));
}

// ---- Who is calling

#[tokio::test]
async fn nobody_is_refused_before_the_store_is_touched() {
    let sandbox = Sandbox::start(&[]);
    let pay = Call::pay("k", "tok_visa");
    let nobody = [
        pay.clone().without("authorization"),
        pay.clone().header("authorization", "Bearer sk_live_acme"),
        pay.clone().header("authorization", "Basic ???"),
        pay.clone().header("stripe-account", "x"),
    ];
    for call in nobody {
        let answer = sandbox.send(call).await;
        check(&answer, 401, "authentication_required");
        assert!(answer.is_problem());
        assert!(answer.header("www-authenticate").is_some());
        assert_eq!(answer.header("idempotency-key"), Some("k"));
    }
    let claimed = async || {
        let metrics = sandbox.send(Call::get("/metrics")).await;
        String::from_utf8_lossy(&metrics.body).contains("verb=\"claim\"")
    };
    assert!(!claimed().await);
    for path in ["/v1/payments", "/v1/payments/pay_1"] {
        assert_eq!(sandbox.send(Call::get(path).without("authorization")).await.status, 401);
    }
    // "sk_test_acme_2:" as `curl -u` sends it.
    let basic = pay.header("authorization", "Basic c2tfdGVzdF9hY21lXzI6");
    assert_eq!(sandbox.send(basic).await.json()["account"], "acme");
    assert!(claimed().await);
}

#[tokio::test]
async fn a_key_belongs_to_an_account() {
    let sandbox = Sandbox::start(&[]);
    let pay = Call::pay("k", "tok_visa");
    let acme = sandbox.send(pay.clone().account("acme_1")).await;
    assert!(sandbox.send(pay.clone().account("acme_2")).await.is_replay());
    let other = sandbox.send(pay.clone().account("other")).await;
    let connected = sandbox.send(pay.clone().header("stripe-account", "acct_x")).await;
    assert!(!other.is_replay() && !connected.is_replay());
    assert_eq!(other.json()["account"], "other");
    assert_eq!(connected.json()["account"], "acme/acct_x");
    assert_eq!(sandbox.charges().await, 3);

    let path = acme.header("location").unwrap().to_owned();
    assert_eq!(sandbox.send(Call::get(&path)).await.body, acme.body);
    check(&sandbox.send(Call::get(&path).account("other")).await, 404, "resource_missing");
    let connected = Call::get(&path).header("stripe-account", "acct_x");
    check(&sandbox.send(connected).await, 404, "resource_missing");
}

// ---- Payments

#[tokio::test]
async fn a_payment_is_made_once_and_its_answer_replayed() {
    let sandbox = Sandbox::start(&[]);
    let body = r#"{"amount":1999,"currency":"USD","source":"tok_visa","description":"two books"}"#;
    let pay = Call::pay("k", "tok_visa").json(body);
    let first = sandbox.send(pay.clone()).await;
    let id = first.id();
    assert_eq!(first.status, StatusCode::CREATED);
    assert_eq!(first.header("location"), Some(format!("/v1/payments/{id}").as_str()));
    assert_eq!(first.header("idempotency-key"), Some("k"));
    assert_eq!(first.header("idempotent-replayed"), None);
    let mut shown = first.json();
    assert!(shown["created"].as_u64().unwrap() > 1_700_000_000);
    shown.as_object_mut().unwrap().remove("created");
    let expected = json!({
        "id": id, "object": "payment", "account": "acme", "amount": 1999, "currency": "usd",
        "status": "succeeded", "source": "tok_visa", "attempt": 1, "description": "two books",
    });
    assert_eq!(shown, expected);

    let again = sandbox.send(pay.clone().key("\"k\";v=1")).await;
    assert_eq!((again.status, &again.body), (first.status, &first.body));
    assert_eq!(again.header("location"), first.header("location"));
    assert!(again.is_replay());
    let changed = sandbox.send(Call::pay_amount("k", "tok_visa", 1)).await;
    check(&changed, 422, "idempotency_key_reused");
    assert!(changed.is_problem());
    check(&sandbox.send(pay.without("idempotency-key")).await, 400, "idempotency_key_missing");

    let ledger = sandbox.ledger().await;
    assert_eq!((&ledger["charges"], &ledger["refunds"]), (&json!(1), &json!(0)));
    let mut entry = ledger["entries"][0].clone();
    assert!(entry["at"].as_u64().unwrap() > 1_700_000_000_000);
    entry.as_object_mut().unwrap().remove("at");
    let digest = Sha256::digest(b"k");
    let key_id: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        entry,
        json!({ "account": "acme", "key_id": key_id, "action": "charge", "amount": 1999, "attempt": 1 })
    );
}

/// Source, first status, second status, is the second a replay, charges after both.
const SOURCES: [(&str, u16, u16, bool, u64); 16] = [
    ("tok_visa", 201, 201, true, 1),
    ("tok_declined", 402, 402, true, 0),
    ("tok_slow_50", 201, 201, true, 1),
    ("tok_charge_then_slow_50", 201, 201, true, 1),
    ("tok_charge_then_500", 500, 500, true, 1),
    ("tok_unavailable", 503, 503, false, 0),
    ("tok_unavailable_once", 503, 201, false, 1),
    ("tok_rate_limited", 429, 429, false, 0),
    ("tok_panic_before", 500, 409, false, 0),
    ("tok_panic_after", 500, 409, false, 1),
    ("tok_large_3", 201, 201, true, 1),
    ("tok_large_64", 201, 409, false, 1),
    ("tok_stream", 200, 409, false, 1),
    ("tok_empty", 204, 204, true, 1),
    ("tok_amex", 400, 400, false, 0),
    ("tok_slow_99999999", 400, 400, false, 0),
];

/// Where the store and the ledger share a transaction: what differs from the above.
const SOURCES_IN_ONE_TRANSACTION: [(&str, u16, u16, bool, u64); 4] = [
    ("tok_charge_then_500", 500, 500, false, 0),
    ("tok_unavailable_once", 503, 503, false, 0),
    ("tok_panic_before", 500, 500, false, 0),
    ("tok_panic_after", 500, 500, false, 0),
];

async fn sources_do_what_they_say(store: &[&str], differ: &[(&str, u16, u16, bool, u64)]) {
    let sandbox = match store {
        [] => Sandbox::start(&["--response-limit", "8192"]),
        store => Sandbox::start_with_store(&[store, &["--response-limit", "8192"]].concat()),
    };
    let mut charges = 0;
    for usual in SOURCES {
        let row = differ.iter().find(|row| row.0 == usual.0).copied().unwrap_or(usual);
        let (source, first_status, second_status, replayed, charged) = row;
        let first = sandbox.send(Call::pay(source, source)).await;
        assert_eq!(first.status, first_status, "{source}: {first:?}");
        assert_eq!(first.header("idempotency-key"), Some(source));
        assert!(!first.is_replay());
        let second = sandbox.send(Call::pay(source, source)).await;
        assert_eq!(second.status, second_status, "{source}: {second:?}");
        assert_eq!(second.is_replay(), replayed, "{source}: {second:?}");
        if replayed {
            assert_eq!(first.body, second.body, "{source}");
        }
        charges += charged;
        assert_eq!(sandbox.charges().await, charges, "{source}");
    }
    let panicked = match differ {
        [] => "idempotency_outcome_unknown",
        _ => "idempotency_rolled_back",
    };
    let code = async |source| sandbox.send(Call::pay(source, source)).await.code();
    assert_eq!(code("tok_declined").await, "card_declined");
    assert_eq!(code("tok_panic_after").await, panicked);
    assert_eq!(code("tok_stream").await, "idempotency_result_unavailable");
    assert_eq!(code("tok_large_64").await, "idempotency_result_unavailable");
}

#[tokio::test]
async fn every_source_does_what_it_says() {
    sources_do_what_they_say(&["--store", "memory:"], &[]).await;
}

#[tokio::test]
async fn every_source_does_what_it_says_in_one_transaction_of_sqlite() {
    sources_do_what_they_say(&[], &SOURCES_IN_ONE_TRANSACTION).await;
}

#[tokio::test]
async fn every_source_does_what_it_says_in_one_transaction_of_postgres() {
    let (_server, url) = PostgresServer::shared();
    sources_do_what_they_say(&["--store", &url], &SOURCES_IN_ONE_TRANSACTION).await;
}

#[tokio::test]
async fn a_stream_comes_in_five_events() {
    let sandbox = Sandbox::start(&[]);
    let started = Instant::now();
    let answer = sandbox.send(Call::pay("k", "tok_stream")).await;
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!(String::from_utf8_lossy(&answer.body).matches("data: ").count(), 5);
    assert!(started.elapsed() >= Duration::from_millis(800));
    let padded = sandbox.send(Call::pay("l", "tok_large_3")).await;
    assert_eq!(padded.json()["padding"].as_str().unwrap().len(), 3 * 1024);
}

#[tokio::test]
async fn at_least_once_the_processor_recognises_its_charge() {
    let sandbox = Sandbox::start(&["--store", "memory:", "--recovery", "at-least-once"]);
    for (source, charged) in [("tok_panic_after", 1), ("tok_panic_before", 2)] {
        assert_eq!(sandbox.send(Call::pay(source, source)).await.status, 500);
        let second = sandbox.send(Call::pay(source, source)).await;
        assert_eq!(second.status, 201, "{second:?}");
        assert_eq!(second.json()["attempt"], 2);
        assert_eq!(sandbox.charges().await, charged);
    }
    let entries = sandbox.ledger().await["entries"].clone();
    assert_eq!((&entries[0]["attempt"], &entries[1]["attempt"]), (&json!(1), &json!(2)));
}

#[tokio::test]
async fn a_twin_waits_or_is_told_to() {
    let waiting = Sandbox::start(&[]);
    let hasty = Sandbox::start(&["--wait", "0"]);
    for (sandbox, waits) in [(&waiting, true), (&hasty, false)] {
        let twin = async {
            tokio::time::sleep(Duration::from_millis(150)).await;
            let other = sandbox.send(Call::pay_amount("k", "tok_slow_500", 1)).await;
            (sandbox.send(Call::pay("k", "tok_slow_500")).await, other)
        };
        let (first, (second, other)) =
            tokio::join!(sandbox.send(Call::pay("k", "tok_slow_500")), twin);
        assert_eq!(first.status, 201);
        assert_eq!(other.status, 422, "a mismatch wins over in flight");
        if waits {
            assert_eq!((second.is_replay(), &second.body), (true, &first.body));
        } else {
            check(&second, 409, "idempotency_key_in_use");
            assert!(second.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
        }
        assert_eq!(sandbox.charges().await, 1);
    }
}

#[tokio::test]
async fn a_refused_body_leaves_the_key_free() {
    let sandbox = Sandbox::start(&["--body-limit", "200"]);
    let pay = Call::pay("k", "tok_visa");
    let body =
        |amount: &str| format!(r#"{{"amount":{amount},"currency":"usd","source":"tok_visa"}}"#);
    for amount in ["0", "100000000", "-1", "1.5", "1e3", "\"1\"", "true", "null", "[]", "}"] {
        let answer = sandbox.send(pay.clone().json(body(amount))).await;
        assert_eq!(answer.status, 400, "{amount}");
        assert!(answer.json()["error"]["message"].is_string());
    }
    let form = pay.clone().header("content-type", "application/x-www-form-urlencoded");
    check(&sandbox.send(form).await, 415, "unsupported_media_type");
    let large = sandbox.send(pay.clone().json(body(&" ".repeat(200)))).await;
    check(&large, 413, "idempotency_request_too_large");
    assert_eq!(sandbox.send(pay).await.status, 201);
    assert_eq!(sandbox.charges().await, 1);
}

#[tokio::test]
async fn other_routes_and_methods_are_refused_in_json() {
    let sandbox = Sandbox::start(&[]);
    check(&sandbox.send(Call::get("/v1/nothing")).await, 404, "resource_missing");
    check(&sandbox.send(Call::get("/v1/payments/%FF")).await, 404, "resource_missing");
    let put = sandbox.send(Call::new(Method::PUT, "/v1/payments").account("acme")).await;
    check(&put, 405, "method_not_allowed");
    assert!(put.header("allow").unwrap().contains("POST"));
}

#[tokio::test]
async fn the_newest_payments_come_first() {
    let sandbox = Sandbox::start(&[]);
    for n in 1..=12 {
        sandbox.send(Call::pay_amount(&format!("k{n}"), "tok_visa", n)).await;
    }
    sandbox.send(Call::pay("k", "tok_visa").account("other")).await;
    let amounts = |list: &Value| -> Vec<u64> {
        list["data"].as_array().unwrap().iter().map(|p| p["amount"].as_u64().unwrap()).collect()
    };
    let list = sandbox.send(Call::get("/v1/payments?limit=2")).await.json();
    assert_eq!(amounts(&list), [12, 11]);
    assert_eq!((&list["total_count"], &list["has_more"]), (&json!(12), &json!(true)));
    assert_eq!(amounts(&sandbox.send(Call::get("/v1/payments")).await.json()).len(), 10);
    let none = sandbox.send(Call::get("/v1/payments").account("nobody")).await.json();
    assert_eq!(none["total_count"], 0);
    for limit in ["0", "101", "-1", "x", "", "1&limit=2"] {
        let answer = sandbox.send(Call::get(format!("/v1/payments?limit={limit}"))).await;
        check(&answer, 400, "limit_invalid");
    }
}

#[tokio::test]
async fn refunds_end_where_the_payment_does() {
    let sandbox = Sandbox::start(&[]);
    let id = sandbox.send(Call::pay("k", "tok_visa")).await.id();
    let part = refund(&id, "r1").json(r#"{"amount": 500}"#);
    let first = sandbox.send(part.clone()).await;
    assert_eq!((first.status.as_u16(), &first.json()["amount"]), (201, &json!(500)));
    assert_eq!(first.json()["payment"], id.as_str());
    let again = sandbox.send(part).await;
    assert_eq!((again.is_replay(), &again.body), (true, &first.body));
    let more = refund(&id, "r2").json(r#"{"amount": 1500}"#);
    check(&sandbox.send(more.clone()).await, 409, "refund_too_large");
    assert!(sandbox.send(more).await.is_replay());
    check(&sandbox.send(refund(&id, "r3").json(r#"{"amount":0}"#)).await, 400, "amount_invalid");
    // What is left, under the key that the refused body left free.
    assert_eq!(sandbox.send(refund(&id, "r3")).await.json()["amount"], 1499);
    check(&sandbox.send(refund(&id, "r4")).await, 409, "refund_too_large");
    check(&sandbox.send(refund("pay_0", "r5")).await, 404, "resource_missing");
    check(&sandbox.send(refund(&id, "r6").account("other")).await, 404, "resource_missing");
    let keyless = refund(&id, "r").without("idempotency-key");
    check(&sandbox.send(keyless).await, 400, "idempotency_key_missing");
    let status = sandbox.send(Call::get(format!("/v1/payments/{id}"))).await.json();
    assert_eq!(status["status"], "refunded");
    assert_eq!(sandbox.ledger().await["refunds"], 2);
}

#[tokio::test]
async fn a_void_may_carry_a_key() {
    let sandbox = Sandbox::start(&[]);
    let one = sandbox.send(Call::pay("k1", "tok_visa")).await.id();
    let two = sandbox.send(Call::pay("k2", "tok_visa")).await.id();
    let first = sandbox.send(delete(&one).key("v")).await;
    assert_eq!((first.status.as_u16(), &first.json()["status"]), (200, &json!("voided")));
    assert!(sandbox.send(delete(&one).key("v")).await.is_replay());
    check(&sandbox.send(delete(&two).key("v")).await, 422, "idempotency_key_reused");
    check(&sandbox.send(delete(&two).key("a b")).await, 400, "idempotency_key_invalid");

    let bare = sandbox.send(delete(&two)).await;
    assert_eq!((bare.status.as_u16(), bare.header("idempotency-key")), (200, None));
    check(&sandbox.send(delete(&two)).await, 409, "payment_not_voidable");
    check(&sandbox.send(refund(&two, "r")).await, 409, "refund_too_large");
    check(&sandbox.send(delete("pay_0")).await, 404, "resource_missing");
    let entries = sandbox.ledger().await["entries"].clone();
    let voids: Vec<_> =
        entries.as_array().unwrap().iter().filter(|entry| entry["action"] == "void").collect();
    assert_eq!(voids.len(), 2);
    assert_eq!(voids[1]["key_id"], "");
}
