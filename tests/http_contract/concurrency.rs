//! G. Concurrency: twins in one process and in two, waiting, leaving.

use std::sync::Arc;

use axum::body::Body;
use axum::response::IntoResponse as _;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use http::Response;
use tokio::sync::Barrier;
use tokio::time::Instant;
use tower_idempotency::Outcome;

use crate::harness::{Ask, Gate, Seen, Shop, defaults, ms, no_wait, post, secs, settle_down};

fn pay() -> Ask {
    post("/payments").key("k")
}

/// Sends all at the same moment.
async fn at_once(asks: impl IntoIterator<Item = (Shop, Ask)>) -> Vec<Seen> {
    let asks: Vec<_> = asks.into_iter().collect();
    let barrier = Arc::new(Barrier::new(asks.len()));
    let tasks = asks.into_iter().map(|(shop, ask)| {
        let barrier = Arc::clone(&barrier);
        tokio::spawn(async move {
            barrier.wait().await;
            shop.send(&ask).await
        })
    });
    join_all(tasks).await.into_iter().map(|seen| seen.unwrap()).collect()
}

fn is_replay(seen: &Seen) -> bool {
    seen.headers.contains_key("idempotent-replayed")
}

// cases: 105, 106, 118, 119
#[tokio::test(start_paused = true)]
async fn case_105_without_waiting_the_twin_is_told_at_once_and_its_answer_is_not_stored() {
    let (shop, gate) = Shop::gated(no_wait);
    let running = shop.sending(&pay());
    gate.entered().await;
    let start = Instant::now();
    let refused = shop.send(&pay()).await.refused(409, "key_in_use");
    assert_eq!(start.elapsed(), secs(0));
    assert_eq!(refused.retry_after(), 30);
    assert_eq!(refused.header("stripe-should-retry"), Some("true"));
    assert_eq!(refused.json()["error"]["type"], "invalid_request_error");
    assert_eq!(refused.json()["safe_new_key"], false);
    gate.open();
    let first = running.await.unwrap().fresh(201);
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 107, 108
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_107_of_many_simultaneous_twins_over_two_processes_one_runs() {
    let one = Shop::with(|config| config.wait(ms(500)));
    let two = one.second_process();
    const ROUNDS: usize = 40;
    for round in 1..=ROUNDS {
        let ask = post("/payments").key(format!("round-{round}"));
        let shops = [one.clone(), two.clone()].into_iter().cycle().take(50);
        let seen = at_once(shops.map(|shop| (shop, ask.clone()))).await;
        one.ledger.expect(round);
        let fresh = seen.iter().filter(|seen| seen.status == 201 && !is_replay(seen)).count();
        assert_eq!(fresh, 1, "round {round}");
        let first = seen.iter().find(|seen| seen.status == 201).unwrap().body.clone();
        for seen in seen {
            match seen.status.as_u16() {
                201 => assert_eq!(seen.body, first),
                _ => drop(seen.refused(409, "key_in_use")),
            }
        }
    }
}

// cases: 107
#[tokio::test]
async fn case_107_a_thousand_twins_of_a_slow_run() {
    let (shop, gate) = Shop::gated(no_wait);
    let running = shop.sending(&pay());
    gate.entered().await;
    let seen = at_once((0..999).map(|_| (shop.clone(), pay()))).await;
    for seen in seen {
        seen.refused(409, "key_in_use");
    }
    gate.open();
    running.await.unwrap().fresh(201);
    shop.ledger.expect(1);
}

// cases: 109
#[tokio::test(start_paused = true)]
async fn case_109_a_waiter_in_this_process_is_woken_the_moment_its_twin_is_done() {
    let (shop, gate) = Shop::gated(defaults);
    let first = shop.sending(&pay());
    gate.entered().await;
    let waiter = shop.sending(&pay());
    settle_down().await;
    let start = Instant::now();
    gate.open();
    let first = first.await.unwrap().fresh(201);
    waiter.await.unwrap().replay_of(&first);
    assert_eq!(start.elapsed(), secs(0));
    shop.ledger.expect(1);
}

// cases: 109
#[tokio::test(start_paused = true)]
async fn case_109_a_waiter_in_another_process_learns_of_it_within_tens_of_milliseconds() {
    let (shop, gate) = Shop::gated(defaults);
    let first = shop.sending(&pay());
    gate.entered().await;
    let waiter = shop.second_process().sending(&pay());
    tokio::time::sleep(ms(1000)).await;
    let start = Instant::now();
    gate.open();
    let first = first.await.unwrap().fresh(201);
    waiter.await.unwrap().replay_of(&first);
    assert!(start.elapsed() <= ms(50), "{:?}", start.elapsed());
    shop.ledger.expect(1);
}

// cases: 110, 118
#[tokio::test(start_paused = true)]
async fn case_110_when_the_wait_ends_the_advice_is_what_is_left_of_the_lease() {
    let (shop, gate) = Shop::gated(|config| config.lease(secs(30)).wait(secs(6)));
    let running = shop.sending(&pay());
    gate.entered().await;
    tokio::time::sleep(ms(1500)).await;
    let start = Instant::now();
    let refused = shop.send(&pay()).await.refused(409, "key_in_use");
    assert_eq!(start.elapsed(), secs(6));
    // 30 s less 7.5 s, rounded up.
    assert_eq!(refused.retry_after(), 23);
    // It has left no seat behind.
    let one_seat = shop.limited(1, 1);
    one_seat.send(&pay()).await.refused(409, "key_in_use");
    one_seat.send(&pay()).await.refused(409, "key_in_use");
    gate.open();
    running.await.unwrap().fresh(201);
    shop.ledger.expect(1);
}

// cases: 111
#[tokio::test(start_paused = true)]
async fn case_111_when_the_owner_did_nothing_exactly_one_of_fifty_waiters_runs_next() {
    for processes in [1, 2] {
        let gate = Gate::closed();
        let passed = gate.clone();
        let shop = Shop::running(defaults, move |number| {
            let gate = passed.clone();
            async move {
                gate.pass().await;
                let outcome = (number == 1).then_some(Outcome::NoEffect);
                let mut response = Response::new(Body::from(format!("run {number}")));
                outcome.map(|outcome| response.extensions_mut().insert(outcome));
                response
            }
            .boxed()
        });
        let first = shop.sending(&pay());
        gate.entered().await;
        let other = if processes == 1 { shop.clone() } else { shop.second_process() };
        let waiters: Vec<_> = (0..50).map(|_| other.sending(&pay())).collect();
        settle_down().await;
        gate.open_once();
        assert_eq!(first.await.unwrap().fresh(200).text(), "run 1");
        gate.entered().await;
        settle_down().await;
        shop.ledger.expect(2);
        gate.open();
        let seen: Vec<_> = join_all(waiters).await.into_iter().map(|seen| seen.unwrap()).collect();
        assert_eq!(seen.iter().filter(|seen| is_replay(seen)).count(), 49);
        assert!(seen.iter().all(|seen| seen.text() == "run 2"));
        shop.ledger.expect(2);
    }
}

// cases: 112
#[tokio::test(start_paused = true)]
async fn case_112_a_waiter_that_leaves_changes_nothing_and_frees_its_seat() {
    let (shop, gate) = Shop::gated(|config| config.wait(secs(60)));
    let shop = shop.limited(1, 1);
    let running = shop.sending(&pay());
    gate.entered().await;
    let leaver = shop.sending(&pay());
    settle_down().await;
    shop.send(&pay()).await.refused(409, "too_many_waiting");
    leaver.abort();
    settle_down().await;
    let waiter = shop.sending(&pay());
    settle_down().await;
    gate.open();
    let first = running.await.unwrap().fresh(201);
    waiter.await.unwrap().replay_of(&first);
    shop.ledger.expect(1);
}

/// A storm of retries of one key must not hold a body in memory each.
#[tokio::test(start_paused = true)]
async fn too_many_waiters_for_one_key_are_refused_and_other_keys_are_not() {
    let (shop, gate) = Shop::gated(|config| config.wait(secs(60)));
    let shop = shop.limited(2, 3);
    let other = post("/payments").key("other");
    let owners = [shop.sending(&pay()), shop.sending(&other)];
    gate.entered().await;
    gate.entered().await;
    let waiters = [shop.sending(&pay()), shop.sending(&pay())];
    settle_down().await;
    let refused = shop.send(&pay()).await.refused(409, "too_many_waiting");
    assert_eq!(refused.retry_after(), 30);
    assert_eq!(refused.header("stripe-should-retry"), Some("false"));
    let third = shop.sending(&other);
    settle_down().await;
    shop.send(&other).await.refused(409, "too_many_waiting");
    gate.open();
    for answer in owners.into_iter().chain(waiters).chain([third]) {
        assert_eq!(answer.await.unwrap().status, 201);
    }
    shop.ledger.expect(2);
}

// cases: 113
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn case_113_of_simultaneous_different_bodies_one_runs_and_the_rest_are_mismatches() {
    let shop = Shop::open();
    let two = shop.second_process();
    for round in 1..=20 {
        let asks = (0..30).map(|n| {
            let ask = post("/payments").key(format!("round-{round}")).body(format!("amount={n}"));
            (if n % 2 == 0 { shop.clone() } else { two.clone() }, ask)
        });
        let mut ran = 0;
        for seen in at_once(asks).await {
            match seen.status.as_u16() {
                201 => {
                    drop(seen.fresh(201));
                    ran += 1;
                }
                _ => drop(seen.refused(422, "key_reused")),
            }
        }
        assert_eq!(ran, 1);
        shop.ledger.expect(round);
    }
}

// cases: 114
#[tokio::test]
async fn case_114_different_keys_run_side_by_side() {
    let (shop, gate) = Shop::gated(defaults);
    let running: Vec<_> =
        (0..100).map(|n| shop.sending(&post("/payments").key(format!("k{n}")))).collect();
    for _ in 0..100 {
        gate.entered().await;
    }
    gate.open();
    for seen in join_all(running).await {
        seen.unwrap().fresh(201);
    }
    shop.ledger.expect(100);
}

// cases: 115
#[tokio::test(start_paused = true)]
async fn case_115_a_client_that_leaves_does_not_stop_the_handler() {
    let (shop, gate) = Shop::gated(defaults);
    let leaver = shop.sending(&pay());
    gate.entered().await;
    leaver.abort();
    assert!(leaver.await.unwrap_err().is_cancelled());
    let retry = shop.sending(&pay());
    settle_down().await;
    gate.open();
    assert_eq!(retry.await.unwrap().replayed(201).text(), "payment 1");
    shop.ledger.expect(1);
}

/// Fault B17: effects on both sides of a pause, with a client that leaves in the pause.
#[tokio::test(start_paused = true)]
async fn both_effects_of_an_abandoned_handler_happen_once() {
    let shop = Shop::serving(defaults, |ledger| {
        let handler = async move || {
            ledger.note("charge");
            tokio::time::sleep(secs(1)).await;
            ledger.note("receipt");
            "done".into_response()
        };
        axum::Router::new().route("/payments", axum::routing::post(handler))
    });
    let leaver = shop.sending(&pay());
    tokio::time::sleep(ms(300)).await;
    leaver.abort();
    tokio::time::sleep(ms(1700)).await;
    shop.send(&pay()).await.replayed(200);
    assert_eq!(shop.ledger.entries(), ["charge", "receipt"]);
}

// cases: 117
#[tokio::test(start_paused = true)]
async fn case_117_a_retry_that_overtakes_the_original_runs_in_its_place() {
    let (shop, gate) = Shop::gated(defaults);
    let original = pay().header("x-try", "1");
    let retry = shop.sending(&pay().header("x-try", "2"));
    gate.entered().await;
    let late = shop.sending(&original);
    settle_down().await;
    gate.open();
    let first = retry.await.unwrap().fresh(201);
    late.await.unwrap().replay_of(&first);
    shop.ledger.expect(1);
}

/// Fault B10: what the loser of the race is told depends on what the winner has come to.
#[tokio::test]
async fn the_loser_of_the_race_never_gets_a_server_error() {
    let (shop, gate) = Shop::gated(no_wait);
    let winner = shop.sending(&pay());
    gate.entered().await;
    shop.send(&pay()).await.refused(409, "key_in_use");
    gate.open();
    let first = winner.await.unwrap().fresh(201);
    shop.send(&pay()).await.replay_of(&first);
    shop.send(&pay().body("other")).await.refused(422, "key_reused");
    shop.ledger.expect(1);
}
