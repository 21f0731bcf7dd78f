//! I. Retention and expiry.

use crate::harness::{Ask, Shop, post, secs};

const DAY: u64 = 24 * 3600;

fn pay() -> Ask {
    post("/payments").key("k")
}

// cases: 132
#[tokio::test(start_paused = true)]
async fn case_132_just_inside_the_window_it_is_a_replay() {
    let shop = Shop::open();
    let first = shop.send(&pay()).await.fresh(201);
    tokio::time::advance(secs(DAY - 1)).await;
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 133
#[tokio::test(start_paused = true)]
async fn case_133_after_the_window_the_key_is_new() {
    let shop = Shop::open();
    shop.send(&pay()).await.fresh(201);
    tokio::time::advance(secs(DAY + 1)).await;
    assert_eq!(shop.send(&pay()).await.fresh(201).text(), "payment 2");
    shop.ledger.expect(2);
}

/// It counts from the end of the run, not from its beginning.
#[tokio::test(start_paused = true)]
async fn the_window_starts_at_completion() {
    let (shop, gate) = Shop::gated(|config| config.retention(secs(60)));
    let running = shop.sending(&pay());
    gate.entered().await;
    tokio::time::sleep(secs(50)).await;
    gate.open();
    let first = running.await.unwrap().fresh(201);
    tokio::time::advance(secs(59)).await;
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 136
#[tokio::test(start_paused = true)]
async fn case_136_a_replay_does_not_prolong_the_window() {
    let shop = Shop::with(|config| config.retention(secs(100)));
    shop.send(&pay()).await.fresh(201);
    for _ in 0..9 {
        tokio::time::advance(secs(11)).await;
        shop.send(&pay()).await.replayed(201);
    }
    tokio::time::advance(secs(2)).await;
    shop.send(&pay()).await.fresh(201);
    shop.ledger.expect(2);
}

// cases: 137
#[tokio::test(start_paused = true)]
async fn case_137_after_the_window_another_body_is_no_mismatch() {
    let shop = Shop::open();
    shop.send(&pay()).await.fresh(201);
    tokio::time::advance(secs(DAY + 1)).await;
    shop.send(&pay().body("other")).await.fresh(201);
    shop.ledger.expect(2);
}

/// An answer that could not be kept is remembered as long as one that was.
#[tokio::test(start_paused = true)]
async fn a_result_that_was_not_kept_is_remembered_for_the_window() {
    let shop = Shop::with(|config| config.response_limit(3));
    shop.send(&pay()).await.fresh(201);
    tokio::time::advance(secs(DAY - 1)).await;
    shop.send(&pay()).await.refused(409, "result_unavailable");
    tokio::time::advance(secs(2)).await;
    shop.send(&pay()).await.fresh(201);
    shop.ledger.expect(2);
}
