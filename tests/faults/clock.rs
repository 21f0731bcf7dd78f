//! Clocks that jump or stand still, under real servers: the end of a retention to the millisecond (A6), a
//! server whose own clock is off (B13 of the faults that people met), and the store's jumps (C22 and C23).
//!
//! A record's times are the store's. So a jump of its clock ends leases early or late, and the retention of what is
//! done; the clocks of the servers have nothing to do with it.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use tower_idempotency::record::{Current, State};
use tower_idempotency::store::Inspect as _;
use tower_idempotency::{IdempotencyKey, Identity, RedisStore, StorageKey};

use crate::invariants::{End, Promise};
use crate::redis::RedisServer;
use crate::sandbox::Sandbox;
use crate::site::{Site, USUAL, begins, is, is_paid, is_unknown, ms, server};

const HOUR: i64 = 3600;

/// The clock of one process, which this can put forward and back, and stop.
struct Clock {
    folder: tempfile::TempDir,
    library: PathBuf,
    hands: PathBuf,
}

impl Clock {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (library, hands) = (folder.path().join("clock.so"), folder.path().join("hands"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults/clock.c");
        let mut build = Command::new("cc");
        build.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&library).arg(source);
        let built = build.output();
        let built = built.expect("cc is needed to build a clock that jumps: install a C compiler");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        fs::write(&hands, [0; 16]).unwrap();
        Self { folder, library, hands }
    }

    /// What makes a process live by this clock.
    fn environment(&self) -> [(&str, &str); 2] {
        [
            ("LD_PRELOAD", self.library.to_str().unwrap()),
            ("CLOCK_HANDS", self.hands.to_str().unwrap()),
        ]
    }

    /// A Redis server by a clock of its own.
    fn start() -> (Self, RedisServer) {
        let clock = Self::new();
        // The script becomes the server: it is the process that was started.
        let program = clock.folder.path().join("redis-server");
        let [library, hands] = clock.environment().map(|(name, value)| format!("{name}='{value}'"));
        let script = format!("#!/bin/sh\nexport {library} {hands}\nexec redis-server \"$@\"\n");
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let redis = RedisServer::start_program(&program, &[]);
        (clock, redis)
    }

    fn set(&self, seconds_ahead: i64, standing_at_micros: i64) {
        // In place: the server has mapped this very file.
        let mut file = fs::OpenOptions::new().write(true).open(&self.hands).unwrap();
        let hands = [seconds_ahead.to_ne_bytes(), standing_at_micros.to_ne_bytes()].concat();
        std::io::Write::write_all(&mut file, &hands).unwrap();
    }

    fn ahead(&self) -> i64 {
        i64::from_ne_bytes(fs::read(&self.hands).unwrap()[..8].try_into().unwrap())
    }

    /// Puts the clock of a Redis server this far from the true time, and sees that it has noticed.
    fn jump(&self, site: &Site, seconds: i64) {
        let (before, expected) = (time_of(site), seconds - self.ahead());
        self.set(seconds, 0);
        let moved = time_of(site) - before;
        assert!((expected..expected + 10).contains(&moved), "the clock moved by {moved} s");
    }

    /// Stops the clock of a Redis server at this millisecond.
    fn stand(&self, site: &Site, at: u64) {
        self.set(0, i64::try_from(at * 1_000).unwrap());
        let time = site.redis.cli(&["time"]);
        let (seconds, micros) = time.split_once('\n').unwrap();
        let number = |text: &str| text.trim().parse::<u64>().unwrap();
        assert_eq!(number(seconds) * 1_000 + number(micros) / 1_000, at);
    }
}

fn time_of(site: &Site) -> i64 {
    let time = site.redis.cli(&["time"]);
    time.lines().next().unwrap().parse().unwrap()
}

/// What is left of a lease by the store's clock, in milliseconds.
async fn left_of_the_lease(store: &RedisStore, key: &str) -> u64 {
    let identity = Identity::of_parts(["acme"]);
    let key = StorageKey::new(&identity, &IdempotencyKey::new(key).unwrap());
    let seen = store.look(key).await.unwrap();
    let Current::Present(record) = seen.current else { panic!("no record") };
    let State::InFlight { until, .. } = record.state else { panic!("{:?}", record.state) };
    until.0.saturating_sub(seen.now.0)
}

/// Two servers whose lease is long enough that nothing is renewed meanwhile.
async fn site(args: &[&str]) -> (Clock, Site) {
    let (clock, redis) = Clock::start();
    let args = [&["--wait", "0"], args].concat();
    (clock, Site::on(redis, &args, &args).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a6_a_key_is_replayed_to_the_last_millisecond_of_its_retention_and_then_new() {
    // Asked one millisecond before the end of its retention, and in the very one: Redis keeps a key until that is
    // over. A replay extends nothing, so a key for which nobody asked goes in the same millisecond.
    // With the retention ends what it is for: one effect, one answer to it, and one that is replayed.
    for (asked, broken) in [(&[1, 0][..], &["I1", "I2", "I3"][..]), (&[], &["I1", "I2"])] {
        let (clock, site) = site(&["--retention", "3600"]).await;
        let completed = u64::try_from(time_of(&site)).unwrap() * 1_000 + 5;
        clock.stand(&site, completed);
        let first = site.ask_one("k", "tok_visa").await;
        assert_eq!((first.status.as_u16(), first.is_replay()), (201, false));
        let end: u64 = site.redis.cli(&["pexpiretime", &site.claimed().await]).parse().unwrap();
        assert_eq!(end, completed + 3_600_000);
        for before in asked {
            clock.stand(&site, end - before);
            for replay in [site.ask_one("k", "tok_visa").await, site.ask_two("k", "tok_visa").await]
            {
                assert!(replay.is_replay(), "{before} ms before: {replay:?}");
                assert_eq!(replay.body, first.body);
            }
        }
        clock.stand(&site, end + 1);
        let fresh = site.ask_two("k", "tok_visa").await;
        assert_eq!((fresh.status.as_u16(), fresh.is_replay()), (201, false), "{fresh:?}");
        assert_ne!(first.id(), fresh.id());
        // Which is a payment like any other.
        let replay = site.ask_one("k", "tok_visa").await;
        assert!(replay.is_replay());
        assert_eq!(replay.id(), fresh.id());
        assert_eq!(site.two.charges().await, 2);
        site.check_breaks(Promise::AtMostOnce, broken).await;
    }
}

/// B13 of the faults that people met: written by one clock, judged by another. Only the store's counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fault_b13_a_server_whose_own_clock_is_hours_off_changes_nothing() {
    let args = ["--lease", "1", "--wait", "0", "--retention", "600"];
    for off in [5 * HOUR, -5 * HOUR] {
        let mut site = Site::start(&args).await;
        let clock = Clock::new();
        clock.set(off, 0);
        let url = site.proxy.redis_url();
        let args = [&["--store", &url], &args[..]].concat();
        let wrong =
            Sandbox::start_telling_runs_knowing(&site.one.ledger, &clock.environment(), &args);
        site.one = wrong;
        site.history.is_ahead(&site.one, off);

        // What it stores is kept for as long as anything, and replayed by both.
        let paid = site.ask_one("paid", "tok_visa").await;
        assert_eq!((paid.status.as_u16(), paid.is_replay()), (201, false));
        let told = paid.json()["created"].as_i64().unwrap() - time_of(&site);
        assert!((told - off).abs() < 60, "the server's clock is off by {told} s");
        let left: u64 = site.redis.cli(&["pttl", &site.claimed().await]).parse().unwrap();
        assert!((540_000..=600_000).contains(&left), "{left}");
        assert!(site.ask_two("paid", "tok_visa").await.is_replay());
        assert!(site.ask_one("paid", "tok_visa").await.is_replay());
        // Whichever of them runs it, the other one finds the key in use.
        let running = site.pay("by-it", "tok_slow_1500");
        begins(&site.one, "by-it").await;
        is(&site.ask_two("by-it", "tok_slow_1500").await, 409, "idempotency_key_in_use");
        let (history, two) = (site.history.clone(), site.two.address);
        let other =
            tokio::spawn(
                async move { history.ask(two, "by-the-other", "tok_slow_1500", USUAL).await },
            );
        begins(&site.two, "by-the-other").await;
        is(&site.ask_one("by-the-other", "tok_slow_1500").await, 409, "idempotency_key_in_use");
        assert_eq!(running.await.unwrap().unwrap().status, 201);
        assert_eq!(other.await.unwrap().unwrap().status, 201);
        assert!(site.ask_one("by-the-other", "tok_slow_1500").await.is_replay());
        // Whichever of them dies, the other one sees its lease end as it would have: not before, and not hours
        // after. First the one whose clock is right.
        let (history, asked) = (site.history.clone(), [site.one.address]);
        assert!(
            history.ask(site.two.address, "two-dies", "tok_crash_after", USUAL).await.is_none()
        );
        is(&site.ask_one("two-dies", "tok_crash_after").await, 409, "idempotency_key_in_use");
        let died = Instant::now();
        is_unknown(&history.pay_surely(&asked, "two-dies", "tok_crash_after", USUAL).await);
        assert!(died.elapsed() < ms(10_000));
        site.two.ended();
        history.keep_runs_of(&site.two);
        site.two = server(&site.redis.url(), &site.one.ledger, &args[2..]);
        assert!(site.pay("one-dies", "tok_crash_after").await.unwrap().is_none());
        is(&site.ask_two("one-dies", "tok_crash_after").await, 409, "idempotency_key_in_use");
        let died = Instant::now();
        is_unknown(&site.settled_without_one("one-dies", "tok_crash_after").await);
        assert!(died.elapsed() < ms(10_000));
        let end = site.settled_without_one("by-it", "tok_slow_1500").await;
        assert!(matches!(end, End::Paid { replay: true, .. }), "{end:?}");
        assert_eq!(site.two.charges().await, 5);
        site.check(Promise::AtMostOnce).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c22_a_clock_that_jumps_an_hour_ahead_ends_a_lease_and_its_late_answer_heals_the_key() {
    let (clock, site) = site(&[]).await;
    is_paid(&site.settled("done", "tok_visa").await);
    let running = site.pay("running", "tok_charge_then_slow_3000");
    site.charged(2).await;
    is(&site.ask_two("running", "tok_charge_then_slow_3000").await, 409, "idempotency_key_in_use");
    clock.jump(&site, HOUR);
    let early = site.ask_two("running", "tok_charge_then_slow_3000").await;
    is(&early, 409, "idempotency_outcome_unknown");
    // Within its retention what is done stays so.
    assert!(site.ask_two("done", "tok_visa").await.is_replay());
    assert_eq!(running.await.unwrap().unwrap().status, 201);
    assert!(site.ask_two("running", "tok_charge_then_slow_3000").await.is_replay(), "healed");
    assert_eq!(site.two.charges().await, 2);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c22_a_clock_that_jumps_past_the_retention_makes_keys_new_but_not_those_that_nobody_settled()
 {
    let (clock, mut site) = site(&[]).await;
    is_paid(&site.settled("done", "tok_visa").await);
    let running = site.pay("running", "tok_charge_then_slow_60000");
    site.charged(2).await;
    site.one.signal("KILL");
    site.one.ended();
    drop(running.await);
    // More than a day, less than the seven for which an unknown outcome is kept.
    clock.jump(&site, 26 * HOUR);
    is_unknown(&site.settled_without_one("running", "tok_charge_then_slow_60000").await);
    assert_eq!(site.two.charges().await, 2);
    // Nothing is known of it any more, by anybody: this is another payment.
    site.check_breaks(Promise::AtMostOnce, &["I8"]).await;
    let fresh = site.ask_two("done", "tok_visa").await;
    assert_eq!(fresh.status, 201);
    assert!(!fresh.is_replay());
    assert_eq!(site.two.charges().await, 3);
    site.check_breaks(Promise::AtMostOnce, &["I1", "I2"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c23_a_clock_that_jumps_back_leaves_no_key_in_use_for_as_long_as_that() {
    let (clock, mut site) = site(&["--lease", "5"]).await;
    is_paid(&site.settled("done", "tok_visa").await);
    let running = site.pay("dead", "tok_charge_then_slow_60000");
    site.charged(2).await;
    site.one.signal("KILL");
    site.one.ended();
    drop(running.await);
    is(&site.ask_two("dead", "tok_charge_then_slow_60000").await, 409, "idempotency_key_in_use");
    // As little as two leases: the deadline may be true.
    clock.jump(&site, -4);
    is(&site.ask_two("dead", "tok_charge_then_slow_60000").await, 409, "idempotency_key_in_use");
    clock.jump(&site, -HOUR);
    is_unknown(&site.settled_without_one("dead", "tok_charge_then_slow_60000").await);
    assert!(site.ask_two("done", "tok_visa").await.is_replay());
    assert_eq!(site.two.charges().await, 2);
    // And back to where it was.
    clock.jump(&site, 0);
    is_unknown(&site.settled_without_one("dead", "tok_charge_then_slow_60000").await);
    assert!(site.ask_two("done", "tok_visa").await.is_replay());
    assert_eq!(site.two.charges().await, 2);
    site.check(Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c23_a_handler_that_runs_while_the_clock_jumps_back_keeps_its_key() {
    // Renewed every 200 ms: what was renewed after the jump is in use again, by the new time.
    let (clock, site) = site(&["--lease", "0.6"]).await;
    let running = site.pay("running", "tok_charge_then_slow_3000");
    site.charged(1).await;
    clock.jump(&site, -HOUR);
    let store = RedisStore::connect(&site.redis.url()).await.unwrap();
    let end = Instant::now() + ms(2000);
    while left_of_the_lease(&store, "running").await > 600 {
        assert!(Instant::now() < end, "nothing is renewed");
        tokio::time::sleep(ms(10)).await;
    }
    is(&site.ask_two("running", "tok_charge_then_slow_3000").await, 409, "idempotency_key_in_use");
    assert_eq!(running.await.unwrap().unwrap().status, 201);
    assert!(site.ask_two("running", "tok_charge_then_slow_3000").await.is_replay());
    assert_eq!(site.two.charges().await, 1);
    site.check(Promise::AtMostOnce).await;
}
