//! C. Redis, one server. Groups are in `failover.rs` and `cluster.rs`.

use std::fs::{self, OpenOptions};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Instant;

use futures_util::future::join_all;
use tower_idempotency::record::State as Recorded;

use crate::history::record;
use crate::invariants::{End, Promise};
use crate::line::Way;
use crate::redis::RedisServer;
use crate::sandbox::Call;
use crate::site::{Site, USUAL, begins, is, is_paid, ms, sleep};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c2_a_claim_whose_reply_was_cut_off_is_recognised_as_ones_own() {
    // Nothing of the reply arrives, or a part of it.
    for bytes in [0, 1, 5] {
        let site = Site::start(&[]).await;
        site.proxy.cut_after(Way::Down, bytes);
        let answer = site.ask_one("k", "tok_visa").await;
        site.assert_hit();
        assert_eq!(answer.status, 201, "{answer:?}");
        assert_eq!(answer.json()["attempt"], 1);
        is_paid(&site.settled("k", "tok_visa").await);
        site.check(Promise::AtMostOnce).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c2_a_claim_that_never_arrives_is_given_up_and_its_key_is_free() {
    let site = Site::start(&[]).await;
    site.proxy.swallow(Way::Up);
    let answer = site.ask_one("k", "tok_visa").await;
    is(&answer, 503, "idempotency_store_unavailable");
    site.assert_hit();
    site.proxy.heal();
    is_paid(&site.settled("k", "tok_visa").await);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c3_a_claim_that_arrives_late_has_nobody_behind_it_and_runs_nothing() {
    let site = Site::start(&["--lease", "1"]).await;
    // A claim is a plain command; the release behind it is a script.
    let claims = || site.redis.calls_of("set");
    let before = claims();
    site.redis.stop();
    let answer = site.ask_one("k", "tok_visa").await;
    is(&answer, 503, "idempotency_store_unavailable");
    site.redis.cont();
    let end = Instant::now() + ms(10_000);
    while claims() == before {
        assert!(Instant::now() < end, "the fault was never hit: no claim came late");
        sleep(20).await;
    }
    assert_eq!(site.two.charges().await, 0, "nobody is behind it");
    // Free again by the release that follows the claim.
    is_paid(&site.settled("k", "tok_visa").await);
    assert_eq!(site.two.charges().await, 1);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c4_a_partition_under_a_running_handler_is_survived() {
    let site = Site::start(&["--lease", "1", "--wait", "0"]).await;
    let running = site.pay("k", "tok_charge_then_slow_3000");
    site.charged(1).await;
    site.proxy.swallow(Way::Up);
    // Its handler is told, so that it can stop before its next step. (This one has none.)
    let told = async || {
        let metrics = site.one.send(Call::get("/metrics")).await.body;
        let metrics = String::from_utf8_lossy(&metrics).into_owned();
        metrics.lines().any(|line| line == "idempotency_leases_lost 1")
    };
    let end = Instant::now() + ms(2800);
    while !told().await {
        assert!(Instant::now() < end, "nobody tells the handler that its lease is lost");
        sleep(20).await;
    }
    site.assert_hit();
    // For everybody else it is over as well.
    is(&site.ask_two("k", "tok_charge_then_slow_3000").await, 409, "idempotency_outcome_unknown");
    site.proxy.heal();
    let answer = running.await.unwrap().unwrap();
    assert_eq!(answer.status, 201, "{answer:?}");
    // And its late answer heals the record.
    is_paid(&site.settled("k", "tok_charge_then_slow_3000").await);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c5_an_answer_that_cannot_be_stored_is_the_true_one_or_none() {
    let site = Site::start(&["--lease", "8"]).await;
    let running = site.pay("k", "tok_charge_then_slow_300");
    site.charged(1).await;
    site.proxy.swallow(Way::Up);
    let answer = running.await.unwrap().unwrap();
    assert_eq!(answer.status, 201, "{answer:?}");
    assert_eq!(answer.header("idempotency-status"), Some("not-stored"));
    site.assert_hit();
    site.proxy.heal();
    is_paid(&site.settled("k", "tok_charge_then_slow_300").await);
    site.check(Promise::AtMostOnce).await;

    let site = Site::start(&["--lease", "1", "--recovery", "at-least-once"]).await;
    let running = site.pay("k", "tok_charge_then_slow_300");
    site.charged(1).await;
    site.proxy.swallow(Way::Up);
    is(&running.await.unwrap().unwrap(), 503, "idempotency_store_unavailable");
    site.assert_hit();
    is_paid(&site.settled("k", "tok_charge_then_slow_300").await);
    site.check(Promise::Deduplicated).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c6_a_completion_whose_reply_was_cut_off_is_stored_once() {
    let site = Site::start(&[]).await;
    let running = site.pay("k", "tok_charge_then_slow_500");
    site.charged(1).await;
    // What comes down next is the reply to the completion: the lease is long.
    site.proxy.cut_after(Way::Down, 0);
    let answer = running.await.unwrap().unwrap();
    site.assert_hit();
    assert_eq!(answer.status, 201, "{answer:?}");
    assert_eq!(answer.header("idempotency-status"), None);
    is_paid(&site.settled("k", "tok_charge_then_slow_500").await);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c7_a_completion_that_arrives_late_settles_the_key() {
    let site = Site::start(&["--lease", "2"]).await;
    let running = site.pay("k", "tok_charge_then_slow_500");
    site.charged(1).await;
    site.redis.stop();
    let answer = running.await.unwrap().unwrap();
    assert_eq!(answer.header("idempotency-status"), Some("not-stored"), "{answer:?}");
    site.redis.cont();
    is_paid(&site.settled("k", "tok_charge_then_slow_500").await);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c8_a_slow_redis_refuses_within_bounds() {
    let options = ["--enable-debug-command", "local", "--busy-reply-threshold", "100"];
    let site = Site::with_redis(&options, &[]).await;
    let endless = "local t = redis.call('TIME')[1] + 4 while redis.call('TIME')[1] + 0 < t do end";
    let faults: [&[&str]; 3] =
        [&["debug", "sleep", "4"], &["client", "pause", "4000", "write"], &["eval", endless, "0"]];
    for (number, fault) in faults.into_iter().enumerate() {
        let key = format!("slow-{number}");
        std::thread::scope(|scope| {
            let redis = &site.redis;
            scope.spawn(move || redis.cli(fault));
            tokio::task::block_in_place(|| std::thread::sleep(ms(300)));
            let began = Instant::now();
            let asked = site.ask_one(&key, "tok_visa");
            let answer =
                tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(asked));
            is(&answer, 503, "idempotency_store_unavailable");
            assert!(began.elapsed() < ms(4000), "{fault:?}: {:?}", began.elapsed());
        });
        sleep(1000).await;
        assert_eq!(
            site.two.charges().await,
            number as u64,
            "{fault:?}: what was refused has not run"
        );
        is_paid(&site.settled(&key, "tok_visa").await);
    }
    let errors = site.redis.cli(&["info", "errorstats"]);
    assert!(errors.contains("errorstat_BUSY:count="), "the script was never in the way: {errors}");
    assert_eq!(site.two.charges().await, 3);
    site.check(Promise::AtMostOnce).await;
}

/// Waits until a request has sent this command, of so many bytes, which the server does not answer while writes are
/// paused, and kills its connection.
async fn kill_what_waits(site: &Site, command: &str, bytes: usize) {
    let end = Instant::now() + ms(10_000);
    loop {
        let clients = site.redis.cli(&["client", "list", "type", "normal"]);
        let said = |line: &str, what: &str| {
            let fields = line.split(' ').filter_map(|field| field.split_once('='));
            fields.into_iter().find(|(name, _)| *name == what).map(|(_, value)| value.to_owned())
        };
        let waits = |line: &&str| {
            let size = said(line, "argv-mem").and_then(|size| size.parse::<usize>().ok());
            line.contains(" flags=b ")
                && said(line, "cmd").is_some_and(|cmd| cmd == command)
                && size.is_some_and(|size| size >= bytes)
        };
        if let Some(line) = clients.lines().find(waits) {
            let id = line.split([' ', '=']).nth(1).unwrap();
            assert_eq!(site.redis.cli(&["client", "kill", "id", id]), "1", "{line}");
            return;
        }
        assert!(Instant::now() < end, "no kill hit a request: {clients}");
        sleep(5).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c9_killed_and_refused_connections_lose_nothing() {
    let site = Site::start(&[]).await;
    for number in 0..10 {
        let running = site.pay(&format!("kill-{number}"), "tok_slow_100");
        sleep(5 * number).await;
        site.redis.cli(&["client", "kill", "type", "normal"]);
        drop(running.await);
    }
    // Those may have hit nothing. These hit a completion, which is larger than any other script's call, and a claim.
    let completion = ("completion", "tok_charge_then_slow_300", 1, "evalsha", 250);
    for (key, source, charged, command, bytes) in [completion, ("claim", "tok_visa", 0, "set", 100)]
    {
        let before = site.two.charges().await;
        let pause = || site.redis.cli(&["client", "pause", "10000", "write"]);
        if charged == 0 {
            pause();
        }
        let running = site.pay(key, source);
        if charged == 1 {
            site.charged(before + 1).await;
            pause();
        }
        kill_what_waits(&site, command, bytes).await;
        site.redis.cli(&["client", "unpause"]);
        drop(running.await);
        is_paid(&site.settled(key, source).await);
    }
    // The one connection that is allowed is this one.
    let mut control = TcpStream::connect(("127.0.0.1", site.redis.port())).unwrap();
    let mut say = |command: &str| {
        control.write_all(format!("{command}\r\n").as_bytes()).unwrap();
        let mut reply = [0; 64];
        let length = control.read(&mut reply).unwrap();
        String::from_utf8_lossy(&reply[..length]).into_owned()
    };
    assert_eq!(say("config set maxclients 1"), "+OK\r\n");
    assert!(say("client kill type normal skipme yes").starts_with(':'));
    let refused = site.pay("refused", "tok_visa").await.unwrap().unwrap();
    is(&refused, 503, "idempotency_store_unavailable");
    assert_eq!(say("config set maxclients 1000"), "+OK\r\n");
    let stats = site.redis.cli(&["info", "stats"]);
    assert!(!stats.contains("rejected_connections:0"), "the fault was never hit");
    for number in 0..10 {
        site.settled(&format!("kill-{number}"), "tok_slow_100").await;
    }
    is_paid(&site.settled("refused", "tok_visa").await);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c10_a_restart_without_persistence_forgets_what_is_done_and_not_what_runs() {
    let mut site = Site::start(&["--lease", "1"]).await;
    is_paid(&site.settled("done", "tok_visa").await);
    let running = site.pay("running", "tok_charge_then_slow_1500");
    site.charged(2).await;
    site.redis.kill();
    site.redis.restart();
    assert_eq!(running.await.unwrap().unwrap().status, 201);
    is_paid(&site.settled("running", "tok_charge_then_slow_1500").await);
    assert_eq!(site.two.charges().await, 2, "its owner has put the record back");
    // The promise for the other is void, as the README says: it has an effect and no record of it.
    site.check_breaks(Promise::AtMostOnce, &["I8"]).await;
    let fresh = site.ask_two("done", "tok_visa").await;
    assert!(!fresh.is_replay());
    assert_eq!(site.two.charges().await, 3);
    site.check_breaks(Promise::AtMostOnce, &["I1", "I2"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c11_a_power_cut_loses_the_last_write_and_nothing_before_it() {
    let options = ["--appendonly", "yes", "--aof-load-truncated", "yes"];
    let mut site = Site::with_redis(&options, &["--lease", "0.5"]).await;
    is_paid(&site.settled("first", "tok_visa").await);
    is_paid(&site.settled("last", "tok_visa").await);
    let folder = site.redis.cli(&["config", "get", "dir"]).lines().last().unwrap().to_owned();
    // A killed process loses nothing, since the kernel has it; so a piece is cut off instead.
    site.redis.kill();
    let files = fs::read_dir(format!("{folder}/appendonlydir")).unwrap();
    let log = files
        .map(|file| file.unwrap().path())
        .find(|path| path.to_string_lossy().ends_with(".incr.aof"));
    let log = OpenOptions::new().write(true).open(log.unwrap()).unwrap();
    log.set_len(log.metadata().unwrap().len() - 5).unwrap();
    site.redis.restart();
    assert!(site.ask_two("first", "tok_visa").await.is_replay());
    // The last completion is gone, its claim is not: nothing runs.
    let end = site.settled("last", "tok_visa").await;
    assert!(matches!(end, End::Unknown), "{end:?}");
    assert_eq!(site.two.charges().await, 2);
    // An answer is forgotten, and neither its effect nor that there may be one.
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c16_eviction_forgets_what_is_done_and_charges_again() {
    let options = ["--enable-debug-command", "local"];
    let site = Site::with_redis(&options, &[]).await;
    is_paid(&site.settled("k", "tok_visa").await);
    site.redis.cli(&["config", "set", "maxmemory-policy", "volatile-lru"]);
    site.redis.cli(&["config", "set", "maxmemory", "4mb"]);
    // Other data without an expiry: records are all that can be evicted.
    site.redis.cli(&["eval", "for n = 1, 3 do redis.call('SET', n, ('x'):rep(700000)) end", "0"]);
    for number in 4..20 {
        let add = format!("return redis.pcall('SET', {number}, ('x'):rep(300000))");
        site.redis.cli(&["eval", &add, "0"]);
    }
    let evicted = site.redis.cli(&["info", "stats"]);
    assert!(!evicted.contains("evicted_keys:0"), "the fault was never hit");
    site.redis.cli(&["config", "set", "maxmemory", "0"]);
    let fresh = site.ask_two("k", "tok_visa").await;
    assert!(!fresh.is_replay(), "as the README says");
    assert_eq!(site.two.charges().await, 2);
    site.check_breaks(Promise::AtMostOnce, &["I1", "I2"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c17_a_full_redis_refuses_new_keys_and_lets_running_ones_finish() {
    let site = Site::with_redis(&["--maxmemory-policy", "noeviction"], &["--lease", "0.6"]).await;
    is_paid(&site.settled("done", "tok_visa").await);
    let running = site.pay("running", "tok_charge_then_slow_1500");
    site.charged(2).await;
    site.redis.cli(&["config", "set", "maxmemory", "1"]);
    let refused = site.ask_one("new", "tok_visa").await;
    is(&refused, 503, "idempotency_store_unavailable");
    assert!(site.ask_one("done", "tok_visa").await.is_replay());
    let answer = running.await.unwrap().unwrap();
    assert_eq!(answer.status, 201, "renewed and completed: {answer:?}");
    assert!(site.ask_two("running", "tok_charge_then_slow_1500").await.is_replay());
    site.redis.cli(&["config", "set", "maxmemory", "0"]);
    is_paid(&site.settled("new", "tok_visa").await);
    site.check(Promise::AtMostOnce).await;
}

/// How often commands were refused for want of memory.
fn refused_as_full(redis: &RedisServer) -> u64 {
    let said = redis.cli(&["info", "errorstats"]);
    let count = said.lines().find_map(|line| line.strip_prefix("errorstat_OOM:count="));
    count.map_or(0, |count| count.trim().parse().unwrap())
}

/// Handlers that outlive their leases in a full Redis, and then say that they did nothing: each key is free again, and
/// nobody is told that its outcome is unknown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c17_a_full_redis_renews_the_leases_of_running_handlers_and_takes_their_keys_back() {
    const SOURCE: &str = "tok_unavailable_once_after_1500";
    let site = Site::with_redis(&["--maxmemory-policy", "noeviction"], &["--lease", "0.6"]).await;
    let running = ["a", "b", "c"].map(|key| (key, site.pay(key, SOURCE)));
    for (key, _) in &running {
        begins(&site.one, key).await;
    }
    let store = site.store().await;
    let held = async |key| record(&store, key).await.expect("a record");
    let until = async |key| match held(key).await.state {
        Recorded::InFlight { until, .. } => until,
        other => panic!("{other:?}"),
    };
    let leases = [until("a").await, until("b").await, until("c").await];
    site.redis.cli(&["config", "set", "maxmemory", "1"]);
    is(&site.ask_one("new", "tok_visa").await, 503, "idempotency_store_unavailable");
    let full = refused_as_full(&site.redis);
    assert!(full > 0, "the fault was never hit: it is not full");
    // Each of them is renewed from here on: more than once, so that it was not on its way.
    let end = Instant::now() + ms(1_400);
    for (key, lease) in ["a", "b", "c"].into_iter().zip(leases) {
        while until(key).await.0 < lease.0 + 300 {
            assert!(Instant::now() < end, "the lease of {key} is not renewed");
            sleep(10).await;
        }
    }
    let answers = running.map(|(key, running)| async move { (key, running.await.unwrap()) });
    for (key, answer) in join_all(answers).await {
        let answer = answer.unwrap();
        // The handler's own word, and that it is recorded: a key that was not taken back says so.
        is(&answer, 503, "unavailable");
        assert_eq!(answer.header("idempotency-status"), None, "{answer:?}");
        let record = held(key).await;
        assert!(matches!(record.state, Recorded::Open { .. }), "{key}: {record:?}");
    }
    assert_eq!(refused_as_full(&site.redis), full, "a renewal or a release was refused");
    assert_eq!(site.two.charges().await, 0);
    // As free as a new key, which the full server does not take either.
    is(&site.ask_two("a", SOURCE).await, 503, "idempotency_store_unavailable");
    assert!(refused_as_full(&site.redis) > full);
    site.redis.cli(&["config", "set", "maxmemory", "0"]);
    for key in ["a", "b", "c"] {
        let paid = site.settled(key, SOURCE).await;
        let End::Paid { body, replay: false, .. } = paid else { panic!("{key}: {paid:?}") };
        let paid: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(paid["attempt"], 2);
    }
    is_paid(&site.settled("new", "tok_visa").await);
    assert_eq!(site.two.charges().await, 4);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c18_flushall_is_healed_by_who_runs_and_forgets_the_rest() {
    let site = Site::start(&["--lease", "0.6"]).await;
    let running = site.pay("running", "tok_charge_then_slow_1200");
    site.charged(1).await;
    site.redis.cli(&["flushall"]);
    sleep(500).await;
    let twin = site.ask_two("running", "tok_charge_then_slow_1200");
    assert!(twin.await.is_replay(), "it waited for the owner, who had put the record back");
    assert_eq!(running.await.unwrap().unwrap().status, 201);
    site.redis.cli(&["flushall"]);
    site.check_breaks(Promise::AtMostOnce, &["I8"]).await; // an effect, and no record of it
    // And another request may have the key.
    let fresh = site.ask_two("running", "tok_visa").await;
    assert!(!fresh.is_replay(), "a finished record is gone, and with it the promise");
    assert_eq!(site.two.charges().await, 2);
    site.check_breaks(Promise::AtMostOnce, &["I1", "I2", "I6"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c18_flushall_makes_a_key_new_whose_outcome_is_unknown_or_that_was_given_up() {
    let site = Site::start(&[]).await;
    is(&site.ask_one("unknown", "tok_panic_after").await, 500, "idempotency_outcome_unknown");
    is(&site.ask_one("open", "tok_unavailable_once").await, 503, "unavailable");
    assert_eq!((site.records().len(), site.two.charges().await), (2, 1));
    site.redis.cli(&["flushall"]);
    // An effect without a record; and a client that has no answer yet.
    site.check_breaks(Promise::AtMostOnce, &["I8", "L1"]).await;
    // Both run as if for the first time, which is harmless only for the one that did nothing.
    let again = site.ask_two("unknown", "tok_panic_after").await;
    is(&again, 500, "idempotency_outcome_unknown");
    is(&site.ask_two("open", "tok_unavailable_once").await, 503, "unavailable");
    is_paid(&site.settled("open", "tok_unavailable_once").await);
    assert_eq!(site.two.charges().await, 3);
    site.check_breaks(Promise::AtMostOnce, &["I1"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c19_forgotten_scripts_are_sent_again_under_load() {
    let site = Site::start(&[]).await;
    let before = site.redis.calls_of("eval");
    for number in 0..20 {
        let key = format!("flush-{number}");
        let running = site.pay(&key, "tok_slow_20");
        site.redis.cli(&["script", "flush"]);
        assert_eq!(running.await.unwrap().unwrap().status, 201);
        is_paid(&site.settled(&key, "tok_slow_20").await);
    }
    assert!(site.redis.calls_of("eval") > before, "no script was ever missing");
    site.check(Promise::AtMostOnce).await;
}

/// B79 of the faults that people met: a server may close a connection that was idle for long enough.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b79_a_connection_that_an_idle_redis_has_closed_is_replaced_without_an_error() {
    let site = Site::start(&[]).await;
    let clients = || -> Vec<String> {
        let list = site.redis.cli(&["client", "list", "type", "normal"]);
        let ids = list.lines().filter(|line| !line.contains(" cmd=client"));
        ids.map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    };
    for round in 0..2 {
        let key = |of: &str| format!("{of}-{round}");
        for (key, to) in [(key("one"), &site.one), (key("two"), &site.two)] {
            let answer = site.history.ask(to.address, &key, "tok_visa", USUAL).await.unwrap();
            assert_eq!(answer.status, 201, "{answer:?}");
        }
        let open = clients();
        assert!(open.len() >= 2, "{open:?}");
        site.redis.cli(&["config", "set", "timeout", "1"]);
        let end = Instant::now() + ms(20_000);
        while clients().iter().any(|client| open.contains(client)) {
            assert!(Instant::now() < end, "Redis closes none");
            sleep(20).await;
        }
        site.redis.cli(&["config", "set", "timeout", "0"]);
        // The very next request: what is stored, and what is new.
        for (key, to) in [(key("one"), &site.one), (key("two"), &site.two)] {
            let answer = site.history.ask(to.address, &key, "tok_visa", USUAL).await.unwrap();
            assert!(answer.is_replay(), "{answer:?}");
        }
        for (key, to) in [(key("new-one"), &site.one), (key("new-two"), &site.two)] {
            let answer = site.history.ask(to.address, &key, "tok_visa", USUAL).await.unwrap();
            assert_eq!((answer.status.as_u16(), answer.is_replay()), (201, false), "{answer:?}");
        }
    }
    assert_eq!(site.two.charges().await, 8);
    site.check(Promise::AtMostOnce).await;
}
