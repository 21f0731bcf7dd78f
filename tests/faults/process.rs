//! B. The server process.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tower_idempotency::record::State;
use tower_idempotency::store::Inspect;
use tower_idempotency::{PostgresStore, SqliteStore};

use crate::history::{History, assert_breaks, assert_holds, record, runs_in};
use crate::invariants::{End, Promise, key_id};
use crate::line::{Proxy, Way};
use crate::postgres::PostgresServer;
use crate::redis::RedisServer;
use crate::sandbox::{Answer, Call, Connection, Sandbox};
use crate::site::{Site, USUAL, begins, is, is_paid, is_unknown, metric_on, ms, sleep};

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

/// How often the processor has set money aside, and charged.
async fn steps(site: &Site) -> [usize; 2] {
    let ledger = site.two.ledger().await;
    let entries = ledger["entries"].as_array().unwrap();
    ["hold", "charge"]
        .map(|action| entries.iter().filter(|entry| entry["action"] == action).count())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b3_a_crash_between_two_steps_leaves_the_second_to_who_may_run_and_does_neither_twice() {
    // At most once: one step was done, and nobody goes on.
    let (site, end) = crash("tok_crash_between", "at-most-once", 0).await;
    is_unknown(&end);
    assert_eq!(steps(&site).await, [1, 0]);
    site.check(Promise::AtMostOnce).await;
    // A second attempt finds what the first one did, and does the rest.
    for recovery in ["at-least-once", "reconcile"] {
        let (site, end) = crash("tok_crash_between", recovery, 0).await;
        let End::Paid { body, .. } = end else { panic!("{recovery}: {end:?}") };
        let paid: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(paid["attempt"], 2, "{recovery}");
        assert_eq!(steps(&site).await, [1, 1], "{recovery}");
        site.check(Promise::Deduplicated).await;
    }
}

/// In a database both steps and the record are one transaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b3_a_crash_between_two_steps_of_a_transaction_leaves_neither() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("payments.db");
    let (_server, url) = PostgresServer::shared();
    for (ledger, args) in [(Some(&*file), &[][..]), (None, &["--store", &url])] {
        let history = History::with_lease(ms(30_000));
        let mut first = Sandbox::start_telling_runs(ledger, args);
        assert!(history.ask(first.address, "k", "tok_crash_between", USUAL).await.is_none());
        first.ended();
        history.keep_runs_of(&first);
        let second = Sandbox::start_telling_runs(ledger, args);
        assert_eq!(second.ledger().await["entries"], serde_json::json!([]));
        let store: Box<dyn Inspect> = match ledger {
            Some(file) => Box::new(SqliteStore::open(file).await.unwrap()),
            None => Box::new(PostgresStore::connect(&url).await.unwrap()),
        };
        let evidence = history.evidence(&[&second], &*store).await;
        assert_eq!(evidence.runs.len(), 1, "the handler had begun");
        // The client has no answer yet: every attempt of this one is a first one, and dies.
        assert_breaks(&evidence.broken(Promise::Transactional), &["L1"]);
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
async fn b5_an_answer_that_is_cut_in_its_middle_is_replayed_whole() {
    let site = Site::start(&[]).await;
    let front = Proxy::to(site.one.address.port()).await;
    front.cut_after(Way::Down, 20_000);
    let address = ([127, 0, 0, 1], front.port()).into();
    let cut = site.history.ask(address, "k", "tok_large_64", USUAL).await;
    assert!(cut.is_none() && front.hits() > 0, "{cut:?}");
    site.one.signal("KILL");
    let retry = site.ask_two("k", "tok_large_64").await;
    assert!(retry.is_replay() && retry.status == 201, "{retry:?}");
    assert!(retry.body.len() > 64 * 1024, "{} bytes", retry.body.len());
    assert_eq!(site.two.charges().await, 1);
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

/// Stops the first server in a handler, before its charge or after it, until its lease is over. The second one has
/// a lease of its own.
async fn paused(
    recovery: &str,
    source: &str,
    lease_of_two: &str,
) -> (Site, tokio::task::JoinHandle<Option<Answer>>) {
    let args = |lease| ["--lease", lease, "--wait", "0", "--recovery", recovery];
    let site = Site::on(RedisServer::start(), &args("0.5"), &args(lease_of_two)).await;
    let running = site.pay("k", source);
    begins(&site.one, "k").await;
    let charged = u64::from(source.starts_with("tok_charge"));
    site.charged(charged).await;
    site.one.signal("STOP");
    assert_eq!(site.two.charges().await, charged, "stopped where it should be");
    (site, running)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b10_a_server_paused_past_its_lease_leaves_its_key_unknown_and_heals_it_when_it_wakes() {
    for source in ["tok_slow_1500", "tok_charge_then_slow_1500"] {
        let (site, running) = paused("at-most-once", source, "0.5").await;
        is_unknown(&site.settled_without_one("k", source).await);
        is_unknown(&site.settled_without_one("k", source).await);
        site.one.signal("CONT");
        let late = running.await.unwrap().unwrap();
        assert_eq!((late.status.as_u16(), late.is_replay()), (201, false), "{source}: {late:?}");
        let healed = site.ask_two("k", source).await;
        assert!(healed.is_replay(), "{source}: {healed:?}");
        assert_eq!(healed.body, late.body);
        assert_eq!(site.two.charges().await, 1);
        site.check(Promise::AtMostOnce).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b10_a_server_paused_past_its_lease_runs_beside_its_successor_whose_answer_stands() {
    for source in ["tok_slow_1500", "tok_charge_then_slow_1500"] {
        let (site, running) = paused("at-least-once", source, "0.5").await;
        let end = site.settled_without_one("k", source).await;
        let End::Paid { body, replay: false, .. } = end else { panic!("{source}: {end:?}") };
        site.one.signal("CONT");
        // Both handlers went to the processor: only that it knows the key of both makes one charge of it.
        let late = running.await.unwrap().unwrap();
        assert!(late.is_replay(), "what it would have stored is refused: {late:?}");
        assert_eq!(late.body, body, "{source}");
        assert_eq!(late.json()["attempt"], 2);
        let again = site.ask_one("k", source).await;
        assert!(again.is_replay());
        assert_eq!(again.body, body);
        assert_eq!(site.handlers_of("k"), [1, 2], "{source}");
        assert_eq!(site.two.charges().await, 1);
        site.check(Promise::Deduplicated).await;
        // And two at once is what only `AtMostOnce` excludes.
        site.check_breaks(Promise::AtMostOnce, &["I5"]).await;
    }
}

/// The other order: the first server wakes, and its handler ends, while the one that took its key over still runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b10_a_server_that_wakes_while_its_successor_runs_is_refused_and_the_successors_answer_stands()
 {
    for (recovery, source) in [
        ("at-least-once", "tok_slow_1500"),
        ("at-least-once", "tok_charge_then_slow_1500"),
        // The hook finds no charge, and the key runs again.
        ("reconcile", "tok_slow_1500"),
    ] {
        let (site, running) = paused(recovery, source, "30").await;
        let watch = site.history.watch(Box::new(site.store().await));
        let (history, two) = (site.history.clone(), site.two.address);
        let successor =
            tokio::spawn(async move { history.pay_surely(&[two], "k", source, USUAL).await });
        begins(&site.two, "k").await;
        // It holds the key for half a minute from here on, and ends nothing until the other one has its answer.
        site.two.signal("STOP");
        site.one.signal("CONT");
        let late = running.await.unwrap().unwrap();
        // It has ended its handler and knows an answer, which nobody will ever see.
        is(&late, 409, "idempotency_key_in_use");
        assert!(late.header("retry-after").is_some(), "{late:?}");
        assert!(site.one.said().1.contains("payments::runs: answers"), "its handler has ended");
        assert!(!site.two.said().1.contains("payments::runs: answers"), "the other one has not");
        assert!(!successor.is_finished());
        let metrics = site.one.send(Call::get("/metrics")).await.body;
        let refused = "\nidempotency_completions_refused 1\n";
        assert!(String::from_utf8_lossy(&metrics).contains(refused), "{recovery}, {source}");
        site.two.signal("CONT");
        let End::Paid { body, replay: false, .. } = successor.await.unwrap() else {
            panic!("{recovery}, {source}")
        };
        for answer in [site.ask_one("k", source).await, site.ask_two("k", source).await] {
            assert!(answer.is_replay(), "{answer:?}");
            assert_eq!(answer.body, body);
            assert_eq!(answer.json()["attempt"], 2);
        }
        drop(watch);
        assert_eq!(site.handlers_of("k"), [1, 2], "{recovery}, {source}");
        assert_eq!(site.two.charges().await, 1);
        site.check(Promise::Deduplicated).await;
        site.check_breaks(Promise::AtMostOnce, &["I5"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b11_a_claim_whose_reply_took_most_of_its_lease_is_renewed_before_the_handler_starts() {
    let site = Site::start(&["--lease", "0.6"]).await;
    // All scripts are known from here on: one trip each.
    is_paid(&site.settled("warm", "tok_slow_400").await);
    let before = site.redis.calls_of("evalsha");
    site.proxy.delay(Way::Down, ms(450));
    let asked = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let running = site.pay("k", "tok_visa");
    site.charged(2).await;
    site.assert_hit();
    assert!(site.redis.calls_of("evalsha") > before, "it was renewed");
    // Claimed, and renewed before the handler began: two replies were waited for. Renewals beside a handler come as well.
    let runs = runs_in(&site.one.said().1);
    let run = runs.iter().find(|run| run.key_id == key_id("k")).expect("a run");
    let waited = Duration::from_micros(run.began).saturating_sub(asked);
    assert!(waited >= ms(2 * 450), "the handler began after {waited:?}");
    site.proxy.heal();
    drop(running.await);
    is_paid(&site.settled("k", "tok_visa").await);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b11_where_such_a_claim_cannot_be_renewed_nothing_starts() {
    let site = Site::start(&["--lease", "0.6"]).await;
    site.proxy.delay(Way::Down, ms(450));
    let running = site.pay("k", "tok_visa");
    site.claimed().await;
    site.proxy.swallow(Way::Up);
    is(&running.await.unwrap().unwrap(), 503, "idempotency_store_unavailable");
    site.assert_hit();
    assert_eq!(site.two.charges().await, 0, "it was not renewed, so nothing has started");
    site.proxy.heal();
    // Free again; or unknown to whoever asks after the lease and before the release has come.
    let end = site.settled("k", "tok_visa").await;
    let charges = u64::from(!matches!(end, End::Unknown));
    assert_eq!(site.two.charges().await, charges, "{end:?}");
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b12_a_server_that_is_told_to_stop_lets_running_handlers_finish_and_starts_no_more() {
    let mut site = Site::start(&["--lease", "0.6", "--wait", "10", "--drain", "20"]).await;
    // Connections on which something was answered before, one to look at the server and some to pay on.
    let (mut look, mut open) = (Connection::open(site.one.address).await.unwrap(), Vec::new());
    assert_eq!(look.send(Call::get("/readyz")).await.unwrap().status, 200);
    for _ in 0..20 {
        let mut connection = Connection::open(site.one.address).await.unwrap();
        assert_eq!(connection.send(Call::get("/readyz")).await.unwrap().json()["status"], "ready");
        open.push(connection);
    }
    let source = "tok_charge_then_slow_3000";
    let running = site.pay("stays", source);
    // Its client is gone before the server is told to stop.
    let gone = site.pay("leaves", source);
    for key in ["stays", "leaves"] {
        begins(&site.one, key).await;
    }
    gone.abort();
    let claimed: BTreeSet<_> = site.records().into_iter().collect();
    assert_eq!(claimed.len(), 2);
    site.one.signal("TERM");
    // While those run, nothing else begins: neither on a new connection nor on one that was there.
    let end = Instant::now() + ms(10_000);
    loop {
        let ready = look.send(Call::get("/readyz")).await.unwrap();
        if ready.status == 503 {
            assert_eq!(ready.json()["status"], "stopping");
            break;
        }
        assert!(Instant::now() < end, "it was told to stop");
        sleep(5).await;
    }
    assert!(Connection::open(site.one.address).await.is_err(), "it takes no more connections");
    for (number, connection) in open.iter_mut().enumerate() {
        let key = format!("meanwhile-{number}");
        let answer = site.history.ask_on(connection, &key, "tok_visa", USUAL).await.unwrap();
        is(&answer, 503, "idempotency_store_unavailable");
        assert!(answer.is_problem() && answer.header("retry-after").is_some(), "{answer:?}");
        let kind = answer.json()["type"].as_str().unwrap().to_owned();
        assert!(kind.ends_with("#idempotency_store_unavailable"), "{kind}");
    }
    let refused = metric_on(&mut look, "idempotency_requests", "\"store_unavailable\"").await;
    assert_eq!(refused, open.len() as u64, "refused by the layer, each of them");
    let asked = metric_on(&mut look, "idempotency_store_duration_count", "\"claim\"").await;
    assert_eq!(asked, 2, "and for none of them the store was asked");
    assert_eq!(site.records().into_iter().collect::<BTreeSet<_>>(), claimed);
    assert!(!running.is_finished(), "the server was draining all the time");
    // Longer than a lease: it is renewed meanwhile. Its twin waits elsewhere.
    let twin = site.ask_two("stays", source).await;
    assert!(twin.is_replay(), "{twin:?}");
    assert_eq!(running.await.unwrap().unwrap().status, 201);
    assert_eq!(site.one.ended().code(), Some(0));
    for key in ["stays", "leaves"] {
        let end = site.settled_without_one(key, source).await;
        assert!(matches!(end, End::Paid { replay: true, .. }), "{key}: {end:?}");
    }
    // Connections that were open all the time have come to their end as well.
    for mut connection in open {
        assert!(connection.send(Call::pay("late", "tok_visa")).await.is_err());
    }
    for number in 0..20 {
        let end = site.settled_without_one(&format!("meanwhile-{number}"), "tok_visa").await;
        assert!(
            matches!(end, End::Paid { replay: false, .. }),
            "it comes again elsewhere: {end:?}"
        );
    }
    assert_eq!(site.two.charges().await, 22);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b12_what_still_runs_when_the_limit_of_a_stop_is_over_is_unknown_at_once() {
    // A lease so long that nobody could wait for its end.
    let mut site = Site::start(&["--lease", "300", "--wait", "0", "--drain", "0.4"]).await;
    let before = site.pay("before", "tok_slow_60000");
    begins(&site.one, "before").await;
    let after = site.pay("after", "tok_charge_then_slow_60000");
    site.charged(1).await;
    site.one.signal("TERM");
    assert_eq!(site.one.ended().code(), Some(0));
    for (key, source) in [("before", "tok_slow_60000"), ("after", "tok_charge_then_slow_60000")] {
        is(&site.ask_two(key, source).await, 409, "idempotency_outcome_unknown");
    }
    for client in [before, after] {
        // Told so, or cut off: never that it is paid.
        if let Some(answer) = client.await.unwrap() {
            is(&answer, 500, "idempotency_outcome_unknown");
        }
    }
    assert_eq!(site.two.charges().await, 1);
    site.check(Promise::AtMostOnce).await;
}

/// By its own word, whoever else can see it.
fn has_charged(server: &Sandbox) -> bool {
    server.said().1.contains("payments::runs: has charged")
}

/// In a database a payment that a stop meets is done together with its record, or nothing of it is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b12_a_transaction_that_a_stop_meets_is_whole_or_nothing_and_its_retry_pays_once() {
    for in_file in [true, false] {
        for (drain, source) in [
            ("20", "tok_charge_then_slow_1500"),
            // Before its charge, and after it.
            ("0.4", "tok_slow_1500"),
            ("0.4", "tok_charge_then_slow_1500"),
        ] {
            let whole = drain == "20";
            let case = format!("in a file: {in_file}, {source}, {drain} s");
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join("payments.db");
            let (_server, url) = PostgresServer::shared();
            let ledger = in_file.then_some(&*file);
            let mut args = vec!["--wait", "0", "--drain", drain];
            if !in_file {
                args.extend(["--store", &url]);
            }
            let history = History::with_lease(ms(30_000));
            let mut first = Sandbox::start_telling_runs(ledger, &args);
            let mut open = first.connect().await;
            assert_eq!(open.send(Call::get("/readyz")).await.unwrap().status, 200);
            let (asking, address) = (history.clone(), first.address);
            let running =
                tokio::spawn(async move { asking.ask(address, "k", source, USUAL).await });
            begins(&first, "k").await;
            let charges_first = source.starts_with("tok_charge");
            let end = Instant::now() + ms(20_000);
            while charges_first && !has_charged(&first) {
                assert!(Instant::now() < end, "{case}: it does not charge");
                sleep(2).await;
            }
            assert_eq!(has_charged(&first), charges_first, "{case}");
            // It is in its transaction, of which nobody else sees anything.
            assert_eq!(first.charges().await, 0, "{case}");
            first.signal("TERM");
            while open.send(Call::get("/readyz")).await.unwrap().status == 200 {
                sleep(5).await;
            }
            let refused = history.ask_on(&mut open, "new", "tok_visa", USUAL).await.unwrap();
            is(&refused, 503, "idempotency_store_unavailable");
            let answer = running.await.unwrap();
            assert_eq!(first.ended().code(), Some(0), "{case}");
            if whole {
                history.keep_runs_of(&first);
                let answer = answer.as_ref().expect("its answer was written");
                assert_eq!((answer.status.as_u16(), answer.is_replay()), (201, false), "{case}");
            } else {
                history.keep_runs_of_killed(&first);
                // Cut off, or told that it is not done or not known: never that it is paid.
                let told = answer.as_ref().map(|answer| answer.status.as_u16());
                assert!(matches!(told, None | Some(500 | 503)), "{answer:?}");
                assert!(!first.said().1.contains("payments::runs: answers"), "it was cut off");
                assert_eq!(
                    has_charged(&first),
                    charges_first,
                    "{case}: cut off where it should be"
                );
            }
            // Looked at before anybody takes the key over: a record that was left alone would be healed by the retry.
            let store: Box<dyn Inspect> = match ledger {
                Some(file) => Box::new(SqliteStore::open(file).await.unwrap()),
                None => Box::new(PostgresStore::connect(&url).await.unwrap()),
            };
            let left = record(&*store, "k").await;
            let completed =
                left.as_ref().map(|record| matches!(record.state, State::Completed { .. }));
            assert_eq!(completed, whole.then_some(true), "{case}: {left:?}");

            let second = Sandbox::start_telling_runs(ledger, &args);
            let charges = u64::from(whole);
            assert_eq!(second.charges().await, charges, "{case}: effect and record are one");
            let end = history.pay(second.address, "k", source, USUAL).await;
            let End::Paid { body, replay, .. } = end else { panic!("{case}: {end:?}") };
            assert_eq!(replay, whole, "{case}");
            if let Some(answer) = answer.filter(|_| whole) {
                assert_eq!(answer.body, body, "{case}");
            }
            for key in ["k", "new"] {
                let source = if key == "k" { source } else { "tok_visa" };
                is_paid(&history.pay_surely(&[second.address], key, source, USUAL).await);
            }
            let entries = second.ledger().await["entries"].as_array().unwrap().len();
            assert_eq!(entries, 2, "{case}: one line each");
            let evidence = history.evidence(&[&second], &*store).await;
            assert_holds(&evidence.broken(Promise::Transactional));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b16_a_server_says_at_its_start_what_its_redis_could_lose_and_serves() {
    let sound = ["--appendonly", "yes", "--maxmemory-policy", "noeviction"];
    let evicting = ["--appendonly", "yes", "--maxmemory-policy", "allkeys-lru"];
    let forgetful = ["--maxmemory-policy", "noeviction"];
    for (options, hint) in
        [(&sound[..], None), (&evicting, Some("noeviction")), (&forgetful, Some("appendonly yes"))]
    {
        let site = Site::with_redis(options, &[]).await;
        for server in [&site.one, &site.two] {
            let said = server.said().1;
            let warned = said.lines().filter(|line| line.contains("WARN")).collect::<Vec<_>>();
            match hint {
                None => assert_eq!(warned, [""; 0], "{options:?}"),
                Some(hint) => {
                    let [line] = &warned[..] else { panic!("{options:?}: {warned:?}") };
                    assert!(line.contains(hint), "{options:?}: {line}");
                }
            }
        }
        // What such a Redis then does to the promise is C10 and C16; until then it is kept.
        let paid = site.ask_one("k", "tok_visa").await;
        assert_eq!((paid.status.as_u16(), paid.is_replay()), (201, false));
        assert!(site.ask_two("k", "tok_visa").await.is_replay());
        site.check(Promise::AtMostOnce).await;
    }
}
