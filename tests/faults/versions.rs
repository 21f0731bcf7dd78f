//! B13 and B14: two releases, or two settings, at work on one store.

use std::fs;
use std::path::Path;

use redis::Commands as _;
use serde_json::json;
use tower_idempotency::{IdempotencyKey, Identity, StorageKey};

use crate::invariants::{End, Promise};
use crate::sandbox::Call;
use crate::site::{Site, USUAL, is, is_paid, server};

/// The keys of all records, in order. (What servers leave for a moment at their start is none.)
fn records(site: &Site) -> Vec<String> {
    let mut records = site.records();
    records.sort_unstable();
    records
}

/// Processes that run side by side during a deploy: one compares requests byte by byte, the other as JSON,
/// and understands records of the first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b14_processes_with_two_recipes_tell_no_request_that_it_is_another_one() {
    let redis = crate::redis::RedisServer::start();
    let (old, new) = (["--fingerprint", "bytes"], ["--fingerprint", "json,bytes"]);
    let mut site = Site::on(redis, &old, &new).await;
    let records = || records(&site);

    // What the old one has recorded, the new one compares as the old one would.
    let first = site.ask_one("by-old", "tok_visa").await;
    let retry = site.ask_two("by-old", "tok_visa").await;
    assert!(retry.is_replay(), "{retry:?}");
    assert_eq!(first.body, retry.body);
    let other = site.history.pay(site.two.address, "by-old", "tok_visa", 7).await;
    assert_eq!(other, End::Mismatch);
    is(&site.two.send(said_otherwise("by-old")).await, 422, "idempotency_key_reused");

    // What the new one has recorded, the old one cannot compare: it refuses, and neither runs nor accuses.
    let first = site.ask_two("by-new", "tok_visa").await;
    let before = records();
    for amount in [USUAL, 7] {
        let call = Call::pay_amount("by-new", "tok_visa", amount);
        let refused = site.one.send(call).await;
        is(&refused, 503, "idempotency_record_unreadable");
        assert!(refused.header("retry-after").is_some());
    }
    assert_eq!(records(), before);
    assert_eq!(site.two.charges().await, 2);
    let same = site.two.send(said_otherwise("by-new")).await;
    assert!(same.is_replay(), "to the new one it is the same request: {same:?}");
    assert_eq!(same.body, first.body);

    // The step that was left out: first all understand the new recipe, then they use it.
    let taught = ["--fingerprint", "bytes,json"];
    site.one.signal("TERM");
    site.one.ended();
    site.history.keep_runs_of(&site.one);
    site.one = server(&site.proxy.redis_url(), &site.two.ledger, &taught);
    let retry = site.ask_one("by-new", "tok_visa").await;
    assert!(retry.is_replay(), "{retry:?}");
    assert_eq!(first.body, retry.body);
    let other = site.history.pay(site.one.address, "by-new", "tok_visa", 7).await;
    assert_eq!(other, End::Mismatch);
    assert_eq!(site.two.charges().await, 2);
    site.check(Promise::AtMostOnce).await;
}

/// The usual payment, with its members in another order.
fn said_otherwise(key: &str) -> Call {
    let body = format!(r#"{{ "source": "tok_visa", "currency": "usd", "amount": {USUAL} }}"#);
    let said: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(said, json!({ "amount": USUAL, "currency": "usd", "source": "tok_visa" }));
    Call::pay(key, "tok_visa").json(body)
}

/// The bytes of a record of a released version.
fn released(name: &str) -> Vec<u8> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}.hex"));
    let text = fs::read_to_string(file).unwrap();
    let digits = text.lines().flat_map(|line| line.split('#').next().unwrap().trim().bytes());
    let digits: Vec<u8> = digits.collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

fn storage_key(key: &str) -> String {
    let identity = Identity::of_parts(["acme"]);
    let key = StorageKey::new(&identity, &IdempotencyKey::new(key).unwrap());
    format!("idem:{{{}}}", key.to_text())
}

/// Where the fingerprint stands in a record: recipe and digest.
const FINGERPRINT: std::ops::Range<usize> = 2..38;

/// What one release has written, as the golden files have it, under a process of this one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b13_records_of_every_released_version_are_understood_and_of_no_other_run_over() {
    let site = Site::start(&[]).await;
    let mut redis =
        redis::Client::open(site.redis.url()).unwrap().get_connection().expect("a connection");
    // The fingerprint of the request that is sent from here on.
    is_paid(&site.settled("model", "tok_visa").await);
    let model: Vec<u8> = redis.get(storage_key("model")).unwrap();
    assert!(!model.is_empty(), "this is not where records are");
    site.check(Promise::AtMostOnce).await;

    let unknown = Some((409, "idempotency_outcome_unknown"));
    let cases = [
        ("completed", None),
        ("completed-from-outside", None),
        ("completed-body-not-kept", Some((409, "idempotency_result_unavailable"))),
        ("in-flight", unknown),
        ("in-flight-checkpoint", unknown),
        ("first", unknown),
        ("indeterminate", unknown),
        // These are free: the request runs.
        ("open", Some((201, ""))),
        ("in-flight-untouched", Some((201, ""))),
        ("first-untouched", Some((201, ""))),
    ];
    let files = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")).unwrap();
    let files = files.filter(|file| {
        file.as_ref().unwrap().file_name().to_string_lossy().starts_with("record-v1-")
    });
    assert_eq!(files.count(), cases.len() + 1, "all of them, but the one of greatest numbers");

    let mut charges = 1;
    for (name, expected) in cases {
        let mut record = released(&format!("record-v1-{name}"));
        record[FINGERPRINT].copy_from_slice(&model[FINGERPRINT]);
        let at = storage_key(name);
        let call = || Call::pay(name, "tok_visa");

        // As a release to come might write it, and as none does.
        for version in [0, 2, u8::MAX] {
            let mut other = record.clone();
            other[0] = version;
            let _: () = redis.set_ex(&at, &other, 3600).unwrap();
            let keys = records(&site);
            for server in [&site.one, &site.two] {
                let refused = server.send(call()).await;
                is(&refused, 503, "idempotency_record_unreadable");
                assert!(refused.header("retry-after").is_some());
            }
            let left: Vec<u8> = redis.get(&at).unwrap();
            assert_eq!(left, other, "{name}, version {version}: not a byte is changed");
            let expires: i64 = redis.ttl(&at).unwrap();
            assert!((1..=3600).contains(&expires), "{name}, version {version}: {expires}");
            assert_eq!(records(&site), keys, "{name}, version {version}");
            assert_eq!(site.two.charges().await, charges);
        }

        // And as version 1 is.
        let _: () = redis.set_ex(&at, &record, 3600).unwrap();
        let answer = site.two.send(call()).await;
        match expected {
            None => {
                assert!(answer.is_replay(), "{name}: {answer:?}");
                assert_eq!(answer.status, 201);
                assert_eq!(answer.body, r#"{"id":"pay_1","amount":1250,"currency":"eur"}"#);
                assert_eq!(answer.header("location"), Some("/v1/payments/pay_1"));
            }
            Some((201, _)) => {
                assert_eq!(answer.status, 201, "{name}: {answer:?}");
                let before = u32::from_be_bytes(record[54..58].try_into().unwrap());
                assert_eq!(answer.json()["attempt"], before + 1, "{name}");
                charges += 1;
            }
            Some((status, code)) => is(&answer, status, code),
        }
        assert_eq!(site.two.charges().await, charges, "{name}");
        // Another request is a mismatch, by the fingerprint that the old release wrote.
        let other = site.two.send(Call::pay_amount(name, "tok_visa", 7)).await;
        is(&other, 422, "idempotency_key_reused");
    }
    assert_eq!(charges, 4);
}
