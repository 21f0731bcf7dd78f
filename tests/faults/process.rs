//! B. The server process.

use crate::invariants::{End, Promise};
use crate::line::{Proxy, Way};
use crate::site::{Site, USUAL, is, is_paid, is_unknown, ms, sleep};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b1_a_crash_before_the_claim_leaves_nothing() {
    let site = Site::start(&[]).await;
    site.proxy.swallow(Way::Up);
    let running = site.pay("k", "tok_visa");
    sleep(200).await;
    site.assert_hit();
    site.one.signal("KILL");
    assert!(running.await.unwrap().is_none());
    let end = site.settled_without_one("k", "tok_visa").await;
    assert!(matches!(end, End::Paid { replay: false, .. }), "{end:?}");
    assert_eq!(site.two.ledger().await["entries"][0]["attempt"], 1);
    site.check(Promise::AtMostOnce).await;
}

async fn crash(source: &str, recovery: &str, charges_before: u64) -> (Site, End) {
    let site = Site::start(&["--lease", "0.5", "--recovery", recovery]).await;
    assert!(site.pay("k", source).await.unwrap().is_none(), "the process is gone");
    assert_eq!(site.two.charges().await, charges_before);
    let end = site.settled_without_one("k", source).await;
    (site, end)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b2_after_a_crash_before_the_effect_nobody_knows_unless_somebody_asks() {
    let (site, end) = crash("tok_crash_before", "at-most-once", 0).await;
    is_unknown(&end);
    site.check(Promise::AtMostOnce).await;
    assert_eq!(site.two.charges().await, 0);
    for recovery in ["at-least-once", "reconcile"] {
        let (site, end) = crash("tok_crash_before", recovery, 0).await;
        is_paid(&end);
        site.check(Promise::Deduplicated).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b4_after_a_crash_behind_the_effect_there_is_one_charge_in_every_mode() {
    let (site, end) = crash("tok_crash_after", "at-most-once", 1).await;
    is_unknown(&end);
    site.check(Promise::AtMostOnce).await;
    for recovery in ["at-least-once", "reconcile"] {
        let (site, end) = crash("tok_crash_after", recovery, 1).await;
        is_paid(&end);
        site.check(Promise::Deduplicated).await;
        assert_eq!(site.two.charges().await, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b5_a_crash_after_the_completion_loses_the_answer_and_not_the_record() {
    let site = Site::start(&[]).await;
    // The client's side of the first server.
    let front = Proxy::to(site.one.address.port()).await;
    front.swallow(Way::Down);
    let address = ([127, 0, 0, 1], front.port()).into();
    let history = site.history.clone();
    let running = tokio::spawn(async move { history.ask(address, "k", "tok_visa", USUAL).await });
    site.charged(1).await;
    sleep(300).await;
    assert!(front.hits() > 0, "the answer was sent, and swallowed");
    site.one.signal("KILL");
    assert!(running.await.unwrap().is_none());
    let end = site.settled_without_one("k", "tok_visa").await;
    assert!(matches!(end, End::Paid { replay: true, .. }), "{end:?}");
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b6_a_panic_leaves_the_outcome_unknown_at_once() {
    let site = Site::start(&[]).await;
    for (key, source, charges) in [("a", "tok_panic_before", 0), ("b", "tok_panic_after", 1)] {
        let answer = site.ask_one(key, source).await;
        is(&answer, 500, "idempotency_outcome_unknown");
        assert!(answer.json()["reference"].is_string());
        is_unknown(&site.settled(key, source).await);
        assert_eq!(site.two.charges().await, charges);
    }
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b7_an_error_after_the_effect_is_stored_and_replayed() {
    let site = Site::start(&[]).await;
    let first = site.ask_one("k", "tok_charge_then_500").await;
    let retry = site.ask_two("k", "tok_charge_then_500").await;
    assert_eq!((first.status.as_u16(), retry.status.as_u16()), (500, 500));
    assert!(retry.is_replay());
    assert_eq!(site.two.charges().await, 1);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b8_a_handler_that_did_nothing_frees_the_key() {
    let site = Site::start(&[]).await;
    let first = site.ask_one("k", "tok_unavailable_once").await;
    assert_eq!(first.status.as_u16(), 503);
    is_paid(&site.settled("k", "tok_unavailable_once").await);
    assert_eq!(site.two.ledger().await["entries"][0]["attempt"], 2);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b9_a_handler_longer_than_its_lease_keeps_it() {
    let site = Site::start(&["--lease", "0.5", "--wait", "0"]).await;
    let running = site.pay("k", "tok_slow_2500");
    site.claimed().await;
    for _ in 0..6 {
        sleep(300).await;
        is(&site.ask_two("k", "tok_slow_2500").await, 409, "idempotency_key_in_use");
    }
    assert_eq!(running.await.unwrap().unwrap().status, 201);
    is_paid(&site.settled("k", "tok_slow_2500").await);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b11_a_claim_whose_reply_took_most_of_its_lease_is_renewed_before_the_handler_starts() {
    let site = Site::start(&["--lease", "0.6"]).await;
    // All scripts are known from here on: one trip each.
    is_paid(&site.settled("warm", "tok_slow_400").await);
    let before = site.redis.calls_of("evalsha");
    site.proxy.delay(Way::Down, ms(450));
    let running = site.pay("k", "tok_visa");
    site.charged(2).await;
    site.assert_hit();
    // Claimed, and renewed before the handler charged.
    assert!(site.redis.calls_of("evalsha") - before >= 2);
    site.proxy.heal();
    drop(running.await);
    is_paid(&site.settled("k", "tok_visa").await);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b13_a_record_of_another_version_is_neither_run_over_nor_deleted() {
    let site = Site::start(&[]).await;
    is_paid(&site.settled("k", "tok_visa").await);
    let key = site.claimed().await;
    for (offset, byte, original) in [("0", "\u{2}", "\u{1}"), ("1", "\u{7}", "\u{4}")] {
        site.redis.cli(&["setrange", &key, offset, byte]);
        let before = site.redis.cli(&["get", &key]);
        let answer = site.ask_two("k", "tok_visa").await;
        is(&answer, 503, "idempotency_record_unreadable");
        assert!(answer.header("retry-after").is_some());
        assert_eq!(site.redis.cli(&["get", &key]), before);
        site.redis.cli(&["setrange", &key, offset, original]);
    }
    // Nothing of it is lost: whoever can read it replays it.
    assert!(site.ask_one("k", "tok_visa").await.is_replay());
    assert_eq!(site.two.charges().await, 1);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b15_an_answer_that_is_not_kept_is_given_once_and_never_made_again() {
    let site = Site::start(&["--response-limit", "4096"]).await;
    for (key, source) in [("large", "tok_large_8"), ("stream", "tok_stream")] {
        let first = site.ask_one(key, source).await;
        assert!(first.status.is_success());
        assert!(first.body.len() > 500, "all of it arrives");
        let retry = site.ask_two(key, source).await;
        is(&retry, 409, "idempotency_result_unavailable");
    }
    assert_eq!(site.two.charges().await, 2);
    site.check(Promise::AtMostOnce).await;
}
