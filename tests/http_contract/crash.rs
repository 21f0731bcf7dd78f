//! H. Crashes, leases, unknown outcomes. A process that dies is a runtime that ends under its tasks.

use std::thread;

use axum::response::IntoResponse as _;
use futures_util::FutureExt as _;
use http::Response;
use tokio::runtime::Builder as Runtime;
use tower_idempotency::record::{Finding, Resolution, ResolveOutcome, Terms};
use tower_idempotency::{
    Execution, HeaderRules, Recovery, Store as _, StoreErrorKind, StoredResponse,
};

use crate::harness::{Ask, Fault, Gate, Shop, Verb, defaults, no_wait, post, secs, settle_down};
use crate::log::Log;

fn pay() -> Ask {
    post("/payments").key("k")
}

const TERMS: Terms =
    Terms { lease: secs(30), retention: secs(24 * 3600), unknown_retention: secs(7 * 24 * 3600) };

/// A process that takes a request, comes as far with it as it can without time going on, and dies.
fn process_that_dies(shop: &Shop) {
    let doomed = shop.second_process();
    thread::spawn(move || {
        let runtime = Runtime::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            drop(doomed.sending(&pay()));
            settle_down().await;
        });
        // Tasks end here, wherever they are.
        runtime.shutdown_background();
    })
    .join()
    .unwrap();
}

/// A process that dies while its handler runs, after the effect.
async fn process_that_dies_in_the_handler(shop: &Shop, gate: &Gate) {
    process_that_dies(shop);
    gate.entered().await;
    shop.ledger.expect(1);
}

fn gated(
    configure: impl FnOnce(crate::harness::Builder) -> crate::harness::Builder,
) -> (Shop, Gate) {
    Shop::gated(|config| no_wait(configure(config)))
}

// cases: 120
#[tokio::test(start_paused = true)]
async fn case_120_a_death_between_claim_and_handler_is_not_told_from_one_after_it() {
    let shop = Shop::with(no_wait);
    // The claim is made, and its sender never learns of it.
    shop.store.fail_once(Verb::Claim, Fault::LostReply);
    shop.store.fail_once(Verb::Claim, Fault::Hangs);
    process_that_dies(&shop);
    shop.store.forget_faults();
    shop.send(&pay()).await.refused(409, "key_in_use");
    tokio::time::advance(secs(35)).await;
    shop.send(&pay()).await.refused(409, "outcome_unknown");
    shop.ledger.expect(0);
}

// cases: 121, 129
#[tokio::test(start_paused = true)]
async fn case_121_after_a_crash_the_key_is_in_use_until_the_lease_ends_and_then_unknown() {
    let (shop, gate) = gated(defaults);
    process_that_dies_in_the_handler(&shop, &gate).await;
    // The dead process had a clock of its own, a little ahead of the one that is paused here.
    let seen = shop.send(&pay()).await.refused(409, "key_in_use");
    assert!((30..=32).contains(&seen.retry_after()));
    tokio::time::advance(secs(15)).await;
    let seen = shop.send(&pay()).await.refused(409, "key_in_use");
    assert!((15..=17).contains(&seen.retry_after()));
    tokio::time::advance(secs(20)).await;
    let seen = shop.send(&pay()).await.refused(409, "outcome_unknown");
    assert_eq!(seen.json()["safe_new_key"], false);
    assert_eq!(seen.header("stripe-should-retry"), Some("false"));
    assert_eq!(seen.header("retry-after"), None);
    // It is remembered for longer than any answer, and the other body is still a mismatch.
    tokio::time::advance(secs(6 * 24 * 3600)).await;
    shop.send(&pay()).await.refused(409, "outcome_unknown");
    shop.send(&pay().body("other")).await.refused(422, "key_reused");
    shop.ledger.expect(1);
}

// cases: 129
#[tokio::test(start_paused = true)]
async fn case_129_a_crash_that_nobody_retries_for_days_is_still_known() {
    let (shop, gate) = gated(defaults);
    process_that_dies_in_the_handler(&shop, &gate).await;
    tokio::time::advance(secs(6 * 24 * 3600)).await;
    shop.send(&pay()).await.refused(409, "outcome_unknown");
    shop.ledger.expect(1);
}

// cases: 122, 123
#[tokio::test(start_paused = true)]
async fn case_122_at_least_once_runs_again_after_the_lease_and_the_old_owner_is_refused() {
    let gate = Gate::closed();
    let shop = Shop::serving(|config| no_wait(config).recovery(Recovery::AtLeastOnce), {
        let gate = gate.clone();
        move |ledger| {
            let gate = gate.clone();
            axum::Router::new().fallback(move |execution: Execution| {
                let (ledger, gate) = (ledger.clone(), gate.clone());
                async move {
                    ledger.note(format!(
                        "{} {} {}",
                        execution.attempt().number(),
                        execution.is_takeover(),
                        execution.downstream_key("charge")
                    ));
                    let attempt = execution.attempt().number();
                    if attempt == 1 {
                        gate.pass().await;
                    }
                    format!("attempt {attempt}, fence {}", execution.fence().number())
                }
            })
        }
    });
    // The first run is paused past its lease: its renewals do not arrive.
    shop.store.fail(Verb::Renew, Fault::Is(StoreErrorKind::Unavailable));
    let paused = shop.sending(&pay());
    gate.entered().await;
    shop.send(&pay()).await.refused(409, "key_in_use");
    tokio::time::sleep(secs(31)).await;
    let second = shop.send(&pay()).await.fresh(200);
    assert!(second.text().starts_with("attempt 2"));
    let entries = shop.ledger.entries();
    let (first_run, second_run) = (&entries[0], &entries[1]);
    assert!(first_run.starts_with("1 false ") && second_run.starts_with("2 true "));
    assert_eq!(first_run[8..], second_run[7..], "the downstream key is that of the operation");
    // The first owner wakes up: it is given the answer that stands.
    gate.open();
    let late = paused.await.unwrap();
    assert_eq!(late.text(), second.text());
    shop.send(&pay()).await.replay_of(&second);
    shop.ledger.expect(2);
}

// cases: 124, 135
#[tokio::test(start_paused = true)]
async fn case_124_a_handler_slower_than_lease_and_retention_is_not_taken_over() {
    let (shop, gate) =
        gated(|config| config.lease(secs(10)).retention(secs(20)).unknown_retention(secs(20)));
    let running = shop.sending(&pay());
    gate.entered().await;
    for _ in 0..30 {
        tokio::time::sleep(secs(5)).await;
        shop.send(&pay()).await.refused(409, "key_in_use");
    }
    assert!(shop.store.calls_of(Verb::Renew) >= 40);
    gate.open();
    let first = running.await.unwrap().fresh(201);
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

#[tokio::test(start_paused = true)]
async fn one_or_two_lost_renewals_do_not_lose_a_lease() {
    let (shop, gate) = gated(defaults);
    let running = shop.sending(&pay());
    gate.entered().await;
    shop.store.fail_once(Verb::Renew, Fault::Is(StoreErrorKind::Unavailable));
    shop.store.fail_once(Verb::Renew, Fault::LostReply);
    tokio::time::sleep(secs(60)).await;
    shop.send(&pay()).await.refused(409, "key_in_use");
    gate.open();
    running.await.unwrap().fresh(201);
    shop.ledger.expect(1);
}

/// Nobody else ran, so the late answer is the truth.
#[tokio::test(start_paused = true)]
async fn a_late_answer_of_the_only_run_settles_an_unknown_outcome() {
    let (shop, gate) = gated(defaults);
    shop.store.fail(Verb::Renew, Fault::Is(StoreErrorKind::Unavailable));
    let paused = shop.sending(&pay());
    gate.entered().await;
    tokio::time::sleep(secs(31)).await;
    shop.send(&pay()).await.refused(409, "outcome_unknown");
    gate.open();
    let first = paused.await.unwrap().fresh(201);
    assert_eq!(first.header("idempotency-status"), None);
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 125
#[tokio::test(start_paused = true)]
async fn case_125_a_claim_whose_reply_is_lost_is_recognised_when_it_is_sent_again() {
    let shop = Shop::open();
    shop.store.fail_once(Verb::Claim, Fault::LostReply);
    shop.store.fail_once(Verb::Claim, Fault::LostReply);
    let first = shop.send(&pay()).await.fresh(201);
    assert_eq!(shop.store.calls_of(Verb::Claim), 3);
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 125
#[tokio::test(start_paused = true)]
async fn case_125_a_claim_that_stays_unconfirmed_is_503_and_the_key_is_not_stuck() {
    let shop = Shop::with(no_wait);
    shop.store.fail(Verb::Claim, Fault::LostReply);
    shop.send(&pay()).await.refused(503, "store_unavailable");
    shop.ledger.expect(0);
    shop.store.recover();
    settle_down().await;
    // Nothing ran, so the claim has been given back.
    let first = shop.send(&pay()).await.fresh(201);
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 125
#[tokio::test(start_paused = true)]
async fn case_125_if_the_claim_cannot_even_be_given_back_it_is_in_use_and_then_unknown() {
    let shop = Shop::with(no_wait);
    shop.store.fail(Verb::Claim, Fault::LostReply);
    shop.store.fail(Verb::Release, Fault::Is(StoreErrorKind::Unavailable));
    shop.send(&pay()).await.refused(503, "store_unavailable");
    shop.store.fail(Verb::Claim, Fault::Is(StoreErrorKind::Unavailable));
    tokio::time::sleep(secs(5)).await;
    let other = shop.second_process();
    shop.store.recover();
    shop.store.fail(Verb::Release, Fault::Is(StoreErrorKind::Unavailable));
    other.send(&pay()).await.refused(409, "key_in_use");
    tokio::time::sleep(secs(60)).await;
    other.send(&pay()).await.refused(409, "outcome_unknown");
    shop.ledger.expect(0);
}

// cases: 126
#[tokio::test(start_paused = true)]
async fn case_126_a_completion_whose_reply_is_lost_is_sent_again() {
    let shop = Shop::open();
    shop.store.fail_once(Verb::Complete, Fault::LostReply);
    let first = shop.send(&pay()).await.fresh(201);
    assert_eq!(first.header("idempotency-status"), None);
    assert_eq!(shop.store.calls_of(Verb::Complete), 2);
    shop.send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 127
#[tokio::test(start_paused = true)]
async fn case_127_if_the_answer_cannot_be_stored_the_client_still_gets_it_marked() {
    let shop = Shop::with(no_wait);
    shop.store.fail(Verb::Complete, Fault::Is(StoreErrorKind::Unavailable));
    let first = shop.send(&pay()).await.fresh(201);
    assert_eq!(first.header("idempotency-status"), Some("not-stored"));
    assert_eq!(first.text(), "payment 1");
    shop.send(&pay()).await.refused(409, "key_in_use");
    shop.ledger.expect(1);
    // Not renewed any more, so that the next one is not told to wait for nobody.
    tokio::time::sleep(secs(150)).await;
    shop.store.recover();
    shop.send(&pay()).await.refused(409, "outcome_unknown");
    shop.ledger.expect(1);
}

// cases: 127
#[tokio::test(start_paused = true)]
async fn case_127_a_store_that_comes_back_within_the_lease_gets_the_answer_after_all() {
    let shop = Shop::with(no_wait);
    shop.store.fail(Verb::Complete, Fault::Is(StoreErrorKind::Unavailable));
    let first = shop.send(&pay()).await.fresh(201);
    assert_eq!(first.header("idempotency-status"), Some("not-stored"));
    tokio::time::sleep(secs(10)).await;
    shop.store.recover();
    tokio::time::sleep(secs(1)).await;
    let second = shop.send(&pay()).await.replay_of(&first);
    assert_eq!(second.header("idempotency-status"), None);
    shop.ledger.expect(1);
}

/// A later run may answer otherwise, so this answer must not be given.
#[tokio::test(start_paused = true)]
async fn at_least_once_gives_no_answer_that_is_not_stored() {
    let shop = Shop::with(|config| no_wait(config).recovery(Recovery::AtLeastOnce));
    shop.store.fail(Verb::Complete, Fault::Is(StoreErrorKind::Unavailable));
    shop.send(&pay()).await.refused(503, "store_unavailable");
    shop.ledger.expect(1);
}

// cases: 128
#[tokio::test(start_paused = true)]
async fn case_128_a_shutdown_waits_for_running_handlers_and_takes_no_new_ones() {
    let (shop, gate) = gated(defaults);
    let running = shop.sending(&pay());
    gate.entered().await;
    let layer = shop.layer.clone();
    let drain = tokio::spawn(async move { layer.drain(secs(60)).await });
    settle_down().await;
    let late = shop.send(&post("/payments").key("late")).await.refused(503, "store_unavailable");
    assert_eq!(late.retry_after(), 1);
    assert!(!drain.is_finished());
    gate.open();
    assert_eq!(drain.await.unwrap().unfinished, 0);
    let first = running.await.unwrap().fresh(201);
    shop.second_process().send(&pay()).await.replay_of(&first);
    shop.ledger.expect(1);
}

// cases: 128
#[tokio::test(start_paused = true)]
async fn case_128_what_does_not_finish_in_time_is_marked_as_unknown() {
    let (log, _guard) = Log::install(tracing::Level::WARN);
    let (shop, gate) = gated(defaults);
    drop(shop.sending(&pay()));
    gate.entered().await;
    assert_eq!(shop.layer.drain(secs(5)).await.unfinished, 1);
    let said = log.take();
    let unknown = shop.second_process().send(&pay()).await.refused(409, "outcome_unknown");
    // An operator finds it by what the log said, also if nobody retries.
    let reference = unknown.json()["reference"].as_str().unwrap().to_owned();
    let line = said.lines().find(|line| line.contains(&format!("reference={reference}")));
    assert!(line.is_some_and(|line| line.contains("the grace of a shutdown was over")), "{said}");
    assert!(said.contains("unfinished=1 unrecorded=0"), "{said}");
    shop.ledger.expect(1);
}

// cases: 128
#[tokio::test(start_paused = true)]
async fn case_128_a_shutdown_says_what_the_store_was_not_told_in_time() {
    // A claim that was made, and of which nobody knows; and an answer that could not be stored.
    for (verb, answer) in [(Verb::Claim, false), (Verb::Complete, true)] {
        let (log, _guard) = Log::install(tracing::Level::WARN);
        let shop = Shop::with(defaults);
        shop.store.fail(verb, Fault::LostReply);
        shop.store.fail(Verb::Release, Fault::Is(StoreErrorKind::Unavailable));
        if answer {
            // Not stored, whatever the reply says.
            shop.store.fail(Verb::Complete, Fault::Is(StoreErrorKind::Unavailable));
            let given = shop.send(&pay()).await;
            assert_eq!(given.header("idempotency-status"), Some("not-stored"), "{given:?}");
        } else {
            shop.send(&pay()).await.refused(503, "store_unavailable");
        }
        let key = shop.store.last_claim().0;
        log.take();
        let drained = shop.layer.drain(secs(5)).await;
        assert_eq!((drained.unfinished, drained.unrecorded), (0, 1), "{verb:?}");
        let said = log.take();
        let words = if answer { "an answer was made" } else { "a key was not given back" };
        assert!(said.contains("unfinished=0 unrecorded=1"), "{said}");
        let line = said.lines().find(|line| line.contains(words)).expect(words);
        assert!(line.contains(&format!("reference={}", key.log_id())), "{line}");
        shop.ledger.expect(usize::from(answer));
    }
    // What was recorded after all is no loss.
    let shop = Shop::with(defaults);
    shop.store.fail(Verb::Complete, Fault::Is(StoreErrorKind::Unavailable));
    shop.send(&pay()).await;
    shop.store.recover();
    let drained = shop.layer.drain(secs(60)).await;
    assert_eq!((drained.unfinished, drained.unrecorded), (0, 0));
    shop.second_process().send(&pay()).await.replayed(201);
}

// cases: 130
#[tokio::test(start_paused = true)]
async fn case_130_an_operator_settles_an_unknown_outcome() {
    for happened in [true, false] {
        let (shop, gate) = gated(defaults);
        process_that_dies_in_the_handler(&shop, &gate).await;
        let (key, of_the_dead) = shop.store.last_claim();
        tokio::time::advance(secs(35)).await;
        shop.send(&pay()).await.refused(409, "outcome_unknown");
        let (head, ()) = Response::builder().status(201).body(()).unwrap().into_parts();
        let answer = StoredResponse::new(&head, "found".into(), &HeaderRules::default()).encode();
        let finding = if happened { Finding::Happened(answer) } else { Finding::NothingHappened };
        let attempt = tower_idempotency::Attempt::FIRST;
        let resolution = Resolution { holder: of_the_dead.holder, attempt, finding, terms: TERMS };
        let resolved = shop.store.resolve(key, &resolution).await.unwrap();
        assert_eq!(resolved, ResolveOutcome::Resolved);
        gate.open();
        let seen = shop.send(&pay()).await;
        if happened {
            assert_eq!(seen.replayed(201).text(), "found");
            shop.ledger.expect(1);
        } else {
            assert_eq!(seen.fresh(201).text(), "payment 2");
            shop.ledger.expect(2);
        }
    }
}

// cases: 131
#[tokio::test]
async fn case_131_a_handler_knows_its_key_attempt_and_downstream_key() {
    let shop = Shop::serving(defaults, |ledger| {
        axum::Router::new().fallback(async move |execution: Execution| {
            let run = ledger.note("run");
            let about = format!(
                "{} {} {}",
                execution.key().as_str(),
                execution.attempt().number(),
                execution.downstream_key("charge")
            );
            let status = if run == 1 { 429 } else { 201 };
            (http::StatusCode::from_u16(status).unwrap(), about).into_response()
        })
    });
    let first = shop.send(&post("/p").key("\"k 1\"")).await.fresh(429);
    let second = shop.send(&post("/p").key("\"k 1\"")).await.fresh(201);
    let downstream = first.text().strip_prefix("k 1 1 ").unwrap();
    assert_eq!(second.text(), format!("k 1 2 {downstream}"));
    assert_eq!(downstream.len(), 36);
}

/// A handler that cannot go on safely stops before its next step.
#[tokio::test(start_paused = true)]
async fn a_handler_is_told_when_its_lease_is_lost() {
    let shop = Shop::serving(no_wait, |ledger| {
        axum::Router::new().fallback(move |execution: Execution| {
            let ledger = ledger.clone();
            async move {
                ledger.note("step 1");
                tokio::select! {
                    () = execution.lease_lost() => "stopped",
                    () = tokio::time::sleep(secs(300)) => { ledger.note("step 2"); "done" }
                }
            }
            .boxed()
        })
    });
    shop.store.fail(Verb::Renew, Fault::Is(StoreErrorKind::Unavailable));
    let seen = shop.send(&pay()).await;
    assert_eq!(seen.text(), "stopped");
    shop.ledger.expect(1);
}
