//! C22 and C23: the store's clock jumps, under a real server.
//!
//! A record's times are the store's. So a jump ends leases early or late, and the retention of what is done; the
//! clocks of the servers have nothing to do with it, and are left alone here.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use tower_idempotency::record::{Current, State};
use tower_idempotency::store::Inspect as _;
use tower_idempotency::{IdempotencyKey, Identity, RedisStore, StorageKey};

use crate::invariants::Promise;
use crate::redis::RedisServer;
use crate::site::{Site, is, is_paid, is_unknown, ms};

const HOUR: i64 = 3600;

/// The clock of one Redis server, which this can put forward and back.
struct Clock {
    offset: PathBuf,
    _folder: tempfile::TempDir,
}

impl Clock {
    /// A server by a clock of its own.
    fn start() -> (Self, RedisServer) {
        let folder = tempfile::tempdir().unwrap();
        let (library, offset) = (folder.path().join("clock.so"), folder.path().join("offset"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/faults/clock.c");
        let mut build = Command::new("cc");
        build.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&library).arg(source);
        let built = build.output();
        let built = built.expect("cc is needed to build a clock that jumps: install a C compiler");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        fs::write(&offset, 0_i64.to_ne_bytes()).unwrap();
        // The script becomes the server: it is the process that was started.
        let program = folder.path().join("redis-server");
        let script = format!(
            "#!/bin/sh\nexport LD_PRELOAD='{}' CLOCK_OFFSET='{}'\nexec redis-server \"$@\"\n",
            library.display(),
            offset.display()
        );
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let redis = RedisServer::start_program(&program, &[]);
        (Self { offset, _folder: folder }, redis)
    }

    /// Puts the clock this far from the true time, and sees that the server has noticed.
    fn jump(&self, site: &Site, seconds: i64) {
        let before = time_of(site);
        let from = i64::from_ne_bytes(fs::read(&self.offset).unwrap().try_into().unwrap());
        // In place: the server has mapped this very file.
        let mut file = fs::OpenOptions::new().write(true).open(&self.offset).unwrap();
        std::io::Write::write_all(&mut file, &seconds.to_ne_bytes()).unwrap();
        let moved = time_of(site) - before;
        let expected = seconds - from;
        assert!((expected..expected + 10).contains(&moved), "the clock moved by {moved} s");
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
