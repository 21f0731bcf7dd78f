//! C12 to C15 and C21: primaries that die, are cut off, or are demoted, with and without `wait` on their
//! replicas.

use std::collections::BTreeSet;
use std::time::Instant;

use tokio::task::JoinHandle;

use crate::crowd::Crowd;
use crate::groups::SentinelGroup;
use crate::invariants::{Broken, End, Promise};
use crate::line::{Proxy, Way};
use crate::redis::{RedisServer, free_port};
use crate::relay::Relay;
use crate::sandbox::Answer;
use crate::site::{Pair, USUAL, is, is_paid, is_unknown, ms, sleep};

/// A primary and a replica. Each of the two servers has an address for the primary, which leads to the
/// replica when that is promoted; and the stream to the replica can be swallowed. (To stop a replica would not
/// do: what the kernel has taken for it arrives when it goes on, also from a primary that is dead.)
struct Replicated {
    primary: RedisServer,
    replica: RedisServer,
    /// Of the one that was promoted, so that somebody can confirm what it writes.
    next_replica: Option<RedisServer>,
    stream: Proxy,
    addresses: [Relay; 2],
}

impl Replicated {
    async fn start() -> Self {
        let primary = RedisServer::start();
        let stream = Proxy::to(primary.port()).await;
        let replica = primary.start_replica(stream.port());
        primary.wait_for_replicas(1);
        let addresses = [Relay::to(primary.port()).await, Relay::to(primary.port()).await];
        Self { primary, replica, next_replica: None, stream, addresses }
    }

    /// Two servers, with these parameters behind the address of their store.
    fn pair(&self, parameters: &str, args: &[&str]) -> Pair {
        let url = |relay: &Relay| format!("redis://127.0.0.1:{}/{parameters}", relay.port());
        let [one, two] = &self.addresses;
        Pair::start((&url(one), args), (&url(two), args))
    }

    /// Waits until the replica has what the primary has by now.
    fn in_step(&self) {
        let offset = |said: &str, name: &str| -> u64 {
            let line = said.lines().find_map(|line| line.strip_prefix(name));
            line.expect("an offset").trim().parse().expect("a number")
        };
        let goal = offset(&self.primary.cli(&["info", "replication"]), "master_repl_offset:");
        self.replica.wait_until("in step", &["info", "replication"], |said| {
            offset(said, "slave_repl_offset:") >= goal
        });
    }

    /// From here on the replica gets nothing, and neither side knows.
    fn cut_stream(&self) {
        self.in_step();
        self.stream.swallow(Way::Down);
    }

    fn promote(&self) {
        assert_eq!(self.replica.cli(&["replicaof", "no", "one"]), "OK");
    }

    /// The primary dies, and what the replica has is all there is.
    fn fail_over(&mut self) {
        assert!(self.stream.hits() > 0, "the fault was never hit: nothing was swallowed");
        self.primary.kill();
        self.promote();
        for address in &self.addresses {
            address.lead_to(self.replica.port());
        }
    }

    /// Gives the new primary a replica of its own.
    fn replicate_again(&mut self) {
        self.next_replica = Some(self.replica.start_replica(self.replica.port()));
        self.replica.wait_for_replicas(1);
    }
}

/// What is broken, by key.
pub(crate) fn by_key(broken: &[Broken]) -> BTreeSet<(&str, &str)> {
    let key = |broken: &Broken| broken.what.split(':').next().map(str::len);
    broken.iter().map(|one| (&one.what[..key(one).unwrap_or(0)], one.invariant)).collect()
}

#[track_caller]
fn is_refused(answer: &Answer) {
    is(answer, 503, "idempotency_store_unavailable");
    assert!(answer.header("retry-after").is_some(), "{answer:?}");
}

#[track_caller]
fn is_fresh(end: &End) {
    assert!(matches!(end, End::Paid { replay: false, .. }), "{end:?}");
}

#[track_caller]
fn is_replayed(end: &End) {
    assert!(matches!(end, End::Paid { replay: true, .. }), "{end:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c12_without_wait_a_failover_that_forgets_claims_charges_again() {
    let mut group = Replicated::start().await;
    let mut pair = group.pair("", &["--wait", "0"]);
    is_paid(&pair.settled("before", "tok_visa").await);
    group.cut_stream();
    assert_eq!(pair.ask_one("done", "tok_visa").await.status, 201);
    let running = pair.pay("running", "tok_charge_then_slow_60000");
    pair.charged(3).await;
    group.fail_over();
    is_replayed(&pair.settled("before", "tok_visa").await);
    is_fresh(&pair.settled("done", "tok_visa").await);
    // A second owner beside the first, and of another request.
    let two = [pair.two.address];
    is_fresh(&pair.history.pay_surely(&two, "running", "tok_visa", 7).await);
    pair.one.signal("KILL");
    pair.one.ended();
    assert!(running.await.unwrap().is_none(), "it ran all the time");
    let late = pair.ask_two("running", "tok_charge_then_slow_60000").await;
    is(&late, 422, "idempotency_key_reused");
    assert_eq!(pair.two.charges().await, 5, "as the README says");
    let broken = pair.broken_at(&group.replica.url(), Promise::AtMostOnce).await;
    let void = [
        ("done", "I1"),
        ("done", "I2"),
        ("running", "I1"),
        ("running", "I4"),
        ("running", "I5"),
        ("running", "I6"),
    ];
    assert_eq!(by_key(&broken), BTreeSet::from(void), "{broken:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c12_with_wait_a_failover_that_forgets_a_claim_charges_nobody_twice() {
    let mut group = Replicated::start().await;
    let pair = group.pair("?wait=1", &["--wait", "0"]);
    is_paid(&pair.settled("before", "tok_visa").await);
    let running = pair.pay("running", "tok_charge_then_slow_3000");
    pair.charged(2).await;
    group.cut_stream();
    // This one only the primary has. So nobody believes it, and nothing runs.
    is_refused(&pair.ask_one("forgotten", "tok_visa").await);
    assert_eq!(pair.two.charges().await, 2);
    group.fail_over();
    group.replicate_again();
    is_replayed(&pair.settled("before", "tok_visa").await);
    is_replayed(&pair.settled_without_one("running", "tok_charge_then_slow_3000").await);
    assert_eq!(running.await.unwrap().unwrap().status, 201);
    is_paid(&pair.settled("forgotten", "tok_visa").await);
    assert_eq!(pair.two.charges().await, 3);
    pair.check_at(&group.replica.url(), Promise::AtMostOnce).await;
}

/// Has a completion forgotten by a failover; its client was told of it.
async fn forgotten_completion(recovery: &str) -> (Replicated, Pair) {
    let mut group = Replicated::start().await;
    let pair = group.pair("", &["--lease", "1", "--recovery", recovery]);
    let running = pair.pay("k", "tok_charge_then_slow_1500");
    pair.charged(1).await;
    group.cut_stream();
    assert_eq!(running.await.unwrap().unwrap().status, 201);
    group.fail_over();
    (group, pair)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c13_a_completion_that_a_failover_forgets_is_unknown_or_found_by_the_next_run() {
    let (group, pair) = forgotten_completion("at-most-once").await;
    is_unknown(&pair.settled("k", "tok_charge_then_slow_1500").await);
    assert_eq!(pair.two.charges().await, 1);
    pair.check_at(&group.replica.url(), Promise::AtMostOnce).await;

    let (group, pair) = forgotten_completion("at-least-once").await;
    is_fresh(&pair.settled("k", "tok_charge_then_slow_1500").await);
    assert_eq!(pair.two.charges().await, 1, "the processor has recognised it");
    let twice = pair.two.said().1 + &pair.one.said().1;
    assert_eq!(twice.matches("payments::runs: begins").count(), 2, "{twice}");
    // The answer that was given is gone, and the one of attempt 2 is another.
    pair.check_breaks_at(&group.replica.url(), Promise::Deduplicated, &["I2"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c13_with_wait_a_completion_is_sent_again_until_the_new_primary_has_it() {
    let mut group = Replicated::start().await;
    let pair = group.pair("?wait=1", &[]);
    let running = pair.pay("k", "tok_charge_then_slow_1500");
    pair.charged(1).await;
    group.cut_stream();
    // Once is a completion that is not confirmed, and twice one that is sent again for that.
    let again = group.primary.calls_of("wait") + 2;
    group.primary.wait_until("a completion that is sent again", &["ping"], |_| {
        group.primary.calls_of("wait") >= again
    });
    group.fail_over();
    group.replicate_again();
    let answer = running.await.unwrap().unwrap();
    assert_eq!(answer.status, 201, "{answer:?}");
    let replayed = pair.settled_without_one("k", "tok_charge_then_slow_1500").await;
    is_replayed(&replayed);
    assert_eq!(pair.two.charges().await, 1);
    // Both of those that are left have it.
    for server in [Some(&group.replica), group.next_replica.as_ref()].into_iter().flatten() {
        server.wait_until("the record", &["keys", "idem:*"], |keys| !keys.is_empty());
    }
    pair.check_at(&group.replica.url(), Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c14_on_the_wrong_side_of_a_split_nothing_runs_with_wait_and_everything_without() {
    for (parameters, believed) in [("?wait=1", false), ("", true)] {
        let mut group = Replicated::start().await;
        let pair = group.pair(parameters, &["--wait", "0"]);
        is_paid(&pair.settled("before", "tok_visa").await);
        group.in_step();
        group.promote();
        group.replicate_again();
        // The second server finds the new primary; the first one stays where it was.
        group.addresses[1].lead_to(group.replica.port());
        group.primary.cli(&["client", "kill", "type", "normal"]);
        for server in [&group.primary, &group.replica] {
            assert_eq!(server.cli(&["role"]).lines().next(), Some("master"), "there are two");
        }
        is_paid(&pair.settled_without_one("k", "tok_visa").await);
        let on_the_old = group.primary.calls_of("set");
        if believed {
            assert_eq!(pair.ask_one("k", "tok_visa").await.status, 201);
            assert_eq!(pair.two.charges().await, 3, "as the README says");
            pair.check_breaks_at(&group.replica.url(), Promise::AtMostOnce, &["I1", "I2"]).await;
            continue;
        }
        for _ in 0..2 {
            let end = Instant::now() + ms(5_000);
            let mut told = pair.ask_one("k", "tok_visa").await;
            // The claim of the one before is given back beside its answer.
            while told.code() == "idempotency_key_in_use" && Instant::now() < end {
                sleep(20).await;
                told = pair.ask_one("k", "tok_visa").await;
            }
            is_refused(&told);
        }
        assert!(group.primary.calls_of("set") > on_the_old, "the fault was never hit");
        assert!(pair.ask_one("before", "tok_visa").await.is_replay(), "what is done is done");
        assert_eq!(pair.two.charges().await, 2);
        // The split is over, and the old primary follows the new one.
        group.addresses[0].lead_to(group.replica.port());
        let new = group.replica.port().to_string();
        assert_eq!(group.primary.cli(&["replicaof", "127.0.0.1", &new]), "OK");
        let end = pair.history.pay_surely(&[pair.one.address], "k", "tok_visa", USUAL).await;
        is_replayed(&end);
        assert_eq!(pair.two.charges().await, 2);
        pair.check_at(&group.replica.url(), Promise::AtMostOnce).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c15_where_wait_falls_short_nothing_runs_and_what_runs_is_stored_later() {
    let group = Replicated::start().await;
    let pair = group.pair("?wait=1", &["--lease", "3"]);
    is_paid(&pair.settled("before", "tok_visa").await);
    let hit = |before: u64| {
        assert!(group.primary.calls_of("wait") > before, "the fault was never hit");
    };
    let waits = group.primary.calls_of("wait");
    // Once the replica is frozen, and once its stream is swallowed.
    for (number, stream) in [false, true].into_iter().enumerate() {
        let (new, late) = (format!("new-{number}"), format!("late-{number}"));
        let charged = pair.two.charges().await;
        let running = pair.pay(&late, "tok_charge_then_slow_2500");
        pair.charged(charged + 1).await;
        if stream {
            group.cut_stream();
        } else {
            group.replica.stop();
        }
        is_refused(&pair.ask_one(&new, "tok_visa").await);
        hit(waits);
        assert!(pair.ask_two("before", "tok_visa").await.is_replay());
        assert_eq!(pair.two.charges().await, charged + 1, "nothing runs");
        if stream {
            assert!(group.stream.hits() > 0, "the fault was never hit");
            group.stream.heal();
        } else {
            group.replica.cont();
        }
        let answer = running.await.unwrap().unwrap();
        assert_eq!((answer.status.as_u16(), answer.header("idempotency-status")), (201, None));
        is_paid(&pair.settled(&new, "tok_visa").await);
        assert_eq!(pair.two.charges().await, charged + 2);
    }
    pair.check_at(&group.primary.url(), Promise::AtMostOnce).await;
}

/// Two servers that find their primary through Sentinels, and wait for all replicas.
pub(crate) fn pair_of(group: &SentinelGroup, replicas: usize) -> Pair {
    let url = format!("{}?wait={replicas}", group.url());
    let args = ["--lease", "4", "--wait", "1"];
    Pair::start((&url, &args), (&url, &args))
}

/// Enough keys that each of three masters has some.
const AHEAD: usize = 36;

/// Kills a primary that has written what its replicas will never get: frozen, they cannot come back to it when it has
/// lost them. What was claimed there is paid in the end, unless that never ends.
pub(crate) async fn kill_ahead_of(
    pair: &Pair,
    primary: &mut RedisServer,
    replicas: &[&RedisServer],
) -> Vec<JoinHandle<End>> {
    let records = |primary: &RedisServer| primary.cli(&["dbsize"]).parse::<u64>().unwrap();
    replicas.iter().for_each(|replica| replica.stop());
    let lost = primary.cli(&["client", "kill", "type", "replica"]);
    assert_eq!(lost, replicas.len().to_string());
    let (before, end) = (records(primary), Instant::now() + ms(20_000));
    let payers = (0..AHEAD).map(|number| {
        let (history, servers) = (pair.history.clone(), [pair.one.address, pair.two.address]);
        let key = format!("ahead-{number}");
        tokio::spawn(async move { history.pay_surely(&servers, &key, "tok_visa", USUAL).await })
    });
    let payers = payers.collect();
    while records(primary) < before + 2 {
        assert!(Instant::now() < end, "nobody claims anything");
        sleep(5).await;
    }
    // By now whoever did not count the replicas believes these claims.
    sleep(1_500).await;
    primary.kill();
    replicas.iter().for_each(|replica| replica.cont());
    payers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c12_a_primary_under_sentinels_killed_under_load_charges_nobody_twice() {
    let mut group = SentinelGroup::start(2);
    let pair = pair_of(&group, 2);
    let crowd = Crowd::start(&pair, 6, &["tok_visa", "tok_slow_60", "tok_large_8"]);
    crowd.go_on(30).await;
    let first = group.servers[0].port();
    let (primary, replicas) = group.servers.split_first_mut().unwrap();
    let replicas: Vec<_> = replicas.iter().collect();
    let payers = kill_ahead_of(&pair, primary, &replicas).await;
    crowd.have_ended("come back", 2).await;
    group.wait_for_failover_from(first);
    // It comes back as a replica, so that there are two again.
    group.servers[0].restart();
    crowd.go_on(60).await;
    crowd.finish().await;
    for payer in payers {
        payer.await.unwrap();
    }
    pair.check_at(&group.url(), Promise::AtMostOnce).await;
}

/// How often a server has refused to write because it is a replica.
fn refusals_to_write(server: &RedisServer) -> u64 {
    let said = server.cli(&["info", "errorstats"]);
    let count = said.lines().find_map(|line| line.strip_prefix("errorstat_READONLY:count="));
    count.map_or(0, |count| count.trim().parse().unwrap())
}

/// Most connections to it stay open, and it answers on them: so they have to be left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c21_a_primary_that_is_demoted_under_load_is_left_for_the_promoted_one() {
    let group = Replicated::start().await;
    let pair = group.pair("?wait=1", &["--lease", "10", "--wait", "1"]);
    let crowd = Crowd::start(&pair, 6, &["tok_visa", "tok_slow_60", "tok_large_8"]);
    crowd.go_on(30).await;
    group.promote();
    let new = group.replica.port().to_string();
    assert_eq!(group.primary.cli(&["replicaof", "127.0.0.1", &new]), "OK");
    // The address leads to the old one for a while, as it does until a change has gone round.
    crowd.have_ended("come back", 6).await;
    assert!(refusals_to_write(&group.primary) > 0, "the fault was never hit");
    for address in &group.addresses {
        address.lead_to(group.replica.port());
    }
    crowd.go_on(60).await;
    crowd.finish().await;
    pair.check_at(&group.replica.url(), Promise::AtMostOnce).await;
}

/// Redis itself closes those connections on which somebody waits for replicas. Here none does: each server has one, at rest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c21_a_primary_that_is_demoted_while_nothing_is_asked_is_left_by_the_next_requests() {
    let group = Replicated::start().await;
    let pair = group.pair("?wait=1", &["--wait", "0"]);
    assert_eq!(pair.ask_one("one", "tok_visa").await.status, 201);
    assert_eq!(pair.ask_two("two", "tok_visa").await.status, 201);
    group.in_step();
    group.promote();
    let new = group.replica.port().to_string();
    assert_eq!(group.primary.cli(&["replicaof", "127.0.0.1", &new]), "OK");
    group.replica.wait_for_replicas(1);
    for address in &group.addresses {
        address.lead_to(group.replica.port());
    }
    for (server, key) in [(&pair.one, "new-one"), (&pair.two, "new-two")] {
        let end = Instant::now() + ms(20_000);
        loop {
            let asked = pair.history.ask(server.address, key, "tok_visa", USUAL).await;
            let answer = asked.unwrap();
            if answer.status == 201 {
                break;
            }
            is_refused(&answer);
            assert!(Instant::now() < end, "{key}: it stays where nobody may write");
            sleep(50).await;
        }
    }
    assert!(refusals_to_write(&group.primary) > 0, "the fault was never hit");
    assert!(pair.ask_two("one", "tok_visa").await.is_replay());
    assert!(pair.ask_one("two", "tok_visa").await.is_replay());
    assert_eq!(pair.two.charges().await, 4);
    pair.check_at(&group.replica.url(), Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c21_a_primary_under_sentinels_that_is_demoted_under_load_is_found_again() {
    let group = SentinelGroup::start(1);
    let pair = pair_of(&group, 1);
    let crowd = Crowd::start(&pair, 6, &["tok_visa", "tok_slow_60", "tok_large_8"]);
    crowd.go_on(30).await;
    let (first, other) = (&group.servers[0], &group.servers[1]);
    let looked = first.calls_of("role");
    // A replica of somebody who is not there: it keeps what it has, and refuses to write.
    first.cli(&["replicaof", "127.0.0.1", &free_port().to_string()]);
    crowd.have_ended("come back", 6).await;
    assert!(refusals_to_write(first) > 0, "the fault was never hit");
    for server in [&pair.one, &pair.two] {
        let answer = pair.history.ask(server.address, "meanwhile", "tok_visa", USUAL).await;
        is_refused(&answer.unwrap());
    }
    assert!(first.calls_of("role") > looked, "another primary is looked for");
    // The Sentinels wait for some twenty seconds until they take it for lost.
    assert_eq!(group.primary_port(), first.port());
    first.cli(&["replicaof", "no", "one"]);
    crowd.go_on(30).await;
    is_paid(&pair.settled("meanwhile", "tok_visa").await);
    // And for good: its replica is promoted, and it becomes the replica of that one.
    first.wait_for_sync(1);
    let end = Instant::now() + ms(20_000);
    while group.sentinels[0].cli(&["sentinel", "failover", "main"]) != "OK" {
        assert!(Instant::now() < end, "no failover");
        sleep(200).await;
    }
    group.wait_for_failover_from(first.port());
    other.wait_for_sync(1);
    crowd.go_on(30).await;
    assert_eq!(first.cli(&["role"]).lines().next(), Some("slave"));
    crowd.finish().await;
    pair.check_at(&group.url(), Promise::AtMostOnce).await;
}
