//! J. Failures of the store.

use tokio::time::Instant;
use tower_idempotency::{Execution, MissingKey, StoreDown, StoreErrorKind};

use crate::harness::{Ask, Fault, Shop, Verb, ms, no_wait, post, secs};

fn pay() -> Ask {
    post("/payments").key("k")
}

// cases: 142, 146
#[tokio::test(start_paused = true)]
async fn case_142_with_the_store_down_nothing_runs_and_after_it_the_request_runs_once() {
    let shop = Shop::open();
    shop.store.go_down();
    let refused = shop.send(&pay()).await.refused(503, "store_unavailable");
    assert!(refused.retry_after() >= 1);
    assert_eq!(refused.header("stripe-should-retry"), Some("true"));
    assert_eq!(refused.json()["safe_new_key"], false);
    shop.ledger.expect(0);
    shop.store.recover();
    let first = shop.send(&pay()).await.fresh(201);
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 143
#[tokio::test]
async fn case_143_requests_without_a_key_do_not_need_the_store() {
    let shop = Shop::with(|config| config.missing_key(MissingKey::PassThrough));
    shop.store.go_down();
    shop.send(&post("/payments")).await.fresh(201);
    shop.ledger.expect(1);
    assert_eq!(shop.store.calls(), 0);
}

// cases: 144
#[tokio::test(start_paused = true)]
async fn case_144_a_replay_needs_the_store_and_is_never_a_second_run() {
    let shop = Shop::open();
    let first = shop.send(&pay()).await.fresh(201);
    shop.store.go_down();
    shop.send(&pay()).await.refused(503, "store_unavailable");
    shop.store.recover();
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

/// A call for each request that was refused would take the connections that all others wait for.
#[tokio::test(start_paused = true)]
async fn a_claim_that_is_certainly_not_done_is_not_given_up_and_one_in_doubt_is() {
    let shop = Shop::open();
    let once = [StoreErrorKind::OutcomeUnknown, StoreErrorKind::Unavailable];
    let cases: [(&[_], bool); 2] = [(&once[1..], false), (&once, true)];
    for (kinds, given_up) in cases {
        for kind in kinds {
            shop.store.fail_once(Verb::Claim, Fault::Is(*kind));
        }
        shop.store.fail(Verb::Claim, Fault::Is(StoreErrorKind::Unavailable));
        shop.send(&pay()).await.refused(503, "store_unavailable");
        tokio::time::sleep(secs(200)).await;
        assert_eq!(shop.store.calls_of(Verb::Release) > 0, given_up, "{kinds:?}");
    }
    shop.ledger.expect(0);
}

// cases: 145
#[tokio::test(start_paused = true)]
async fn case_145_a_store_that_does_not_answer_is_given_up_within_the_bound() {
    let shop = Shop::with(|config| config.store_call_timeout(ms(100)).claim_within(ms(350)));
    shop.store.fail(Verb::Claim, Fault::Hangs);
    let start = Instant::now();
    shop.send(&pay()).await.refused(503, "store_unavailable");
    assert!(start.elapsed() <= ms(450), "{:?}", start.elapsed());
    shop.ledger.expect(0);
}

#[tokio::test(start_paused = true)]
async fn a_short_hiccup_is_not_seen_by_the_client() {
    let shop = Shop::open();
    shop.store.fail_once(Verb::Claim, Fault::Is(StoreErrorKind::Unavailable));
    shop.store.fail_once(Verb::Claim, Fault::Hangs);
    shop.store.fail_once(Verb::Complete, Fault::Is(StoreErrorKind::Backend));
    let first = shop.send(&pay()).await.fresh(201);
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 147
#[tokio::test]
async fn case_147_a_record_that_cannot_be_read_is_refused_and_stays() {
    let shop = Shop::open();
    shop.send(&pay()).await.fresh(201);
    shop.store.become_unreadable();
    let refused = shop.send(&pay()).await.refused(503, "record_unreadable");
    assert_eq!(refused.header("stripe-should-retry"), Some("true"));
    assert!(refused.retry_after() >= 1);
    assert_eq!(shop.records(), 1);
    shop.ledger.expect(1);
}

// cases: 149
#[tokio::test(start_paused = true)]
async fn case_149_a_store_without_room_or_that_may_not_write_refuses_new_keys() {
    for kind in [StoreErrorKind::Full, StoreErrorKind::Backend] {
        let shop = Shop::open();
        shop.store.fail(Verb::Claim, Fault::Is(kind));
        shop.send(&pay()).await.refused(503, "store_unavailable");
        assert_eq!(shop.store.calls_of(Verb::Claim), 1, "asking again would change nothing");
        shop.ledger.expect(0);
    }
}

// cases: 151
#[tokio::test(start_paused = true)]
async fn case_151_failing_open_is_a_choice_and_shows_on_every_answer() {
    let shop = Shop::serving(
        |config| no_wait(config).store_down(StoreDown::RunUnprotected),
        |ledger| {
            axum::Router::new().fallback(async move |execution: Execution| {
                ledger.note("run");
                format!("protected: {}", execution.is_protected())
            })
        },
    );
    shop.store.go_down();
    for run in 1..=2 {
        let seen = shop.send(&pay()).await.fresh(200);
        assert_eq!(seen.header("idempotency-status"), Some("unprotected"));
        assert_eq!(seen.header("idempotency-key"), Some("k"));
        assert_eq!(seen.text(), "protected: false");
        shop.ledger.expect(run);
    }
}

/// What ran without protection is protected from then on, if the store comes back soon.
#[tokio::test(start_paused = true)]
async fn the_first_answer_of_an_unprotected_run_is_stored_once_the_store_is_back() {
    for fault in [Fault::Is(StoreErrorKind::Unavailable), Fault::LostReply] {
        let shop = Shop::with(|config| no_wait(config).store_down(StoreDown::RunUnprotected));
        shop.store.fail(Verb::Claim, fault);
        shop.store.fail(Verb::Complete, Fault::Is(StoreErrorKind::Unavailable));
        let first = shop.send(&pay()).await.fresh(201);
        assert_eq!(first.header("idempotency-status"), Some("unprotected"));
        tokio::time::sleep(secs(5)).await;
        shop.store.recover();
        tokio::time::sleep(secs(1)).await;
        let second = shop.send(&pay()).await.replay_of(&first);
        assert_eq!(second.header("idempotency-status"), None);
        shop.ledger.expect(1);
    }
}

/// Failing open is about the store: keys, scope and limits are checked as ever.
#[tokio::test(start_paused = true)]
async fn failing_open_does_not_open_anything_else() {
    let shop = Shop::with(|config| config.store_down(StoreDown::RunUnprotected).request_limit(20));
    shop.store.go_down();
    shop.send(&post("/payments")).await.refused(400, "key_missing");
    shop.send(&pay().by("")).await.refused(401, "scope_missing");
    shop.send(&pay().body("0123456789 and longer")).await.refused(413, "request_too_large");
    shop.ledger.expect(0);
}
