//! Everything at random: faults in two places at once, while clients pay, repeat themselves, leave nothing
//! out and contradict one another. In the end the whole history is held against every invariant.
//!
//! A run goes on until it has met all that it claims, or is red. It prints its seed and each fault as it comes:
//! the same seed deals the same faults to the same targets at the same times. (What comes after a failover comes later: it
//! takes its time; and while a WAIT falls short nothing else happens to a server, so that one can tell by what.)
//!
//! What chance would rarely bring together is brought together: a server is paused while it runs a payment, past its
//! lease, and another one is asked for the same (an unknown outcome that is healed, or a takeover and a refused
//! zombie); and large answers are recorded while their slot is open (TRYAGAIN). Answers that are not stored are claimed
//! on one Redis only: `claimed` says why.

mod ground;
mod reached;
mod schedule;
mod seat;
mod stage;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tower_idempotency::RedisStore;

use self::ground::Ground;
use self::schedule::{Place, Schedule};
use self::stage::Stage;
use crate::history::assert_holds;
use crate::invariants::Promise;
use crate::load::number;
use crate::site::sleep;

const CLIENTS: usize = 8;
/// A long run is made of runs of this length, each with a seed of its own.
const ROUND: Duration = Duration::from_secs(50);
/// The tests that a long run is divided among.
const TESTS: u32 = 5;

/// What the servers keep their records in.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum On {
    OneRedis,
    Sentinels,
    Cluster,
}

impl On {
    fn start(self) -> Ground {
        tokio::task::block_in_place(|| match self {
            Self::OneRedis => Ground::alone(),
            Self::Sentinels => Ground::sentinels(),
            Self::Cluster => Ground::cluster(),
        })
    }

    /// Where faults are, at the same time.
    fn places(self, promise: Promise) -> [Place; 2] {
        let servers = Place::Servers { behind_proxies: self == Self::OneRedis };
        let store = match self {
            Self::OneRedis => Place::Redis { outages: promise == Promise::AtMostOnce },
            Self::Sentinels => Place::Sentinels,
            Self::Cluster => Place::Cluster,
        };
        [servers, store]
    }
}

/// How servers recover, and what follows.
#[derive(Clone, Copy, Debug)]
struct Recovery {
    name: &'static str,
    promise: Promise,
}

const AT_MOST_ONCE: Recovery = Recovery { name: "at-most-once", promise: Promise::AtMostOnce };
const AT_LEAST_ONCE: Recovery = Recovery { name: "at-least-once", promise: Promise::Deduplicated };
const RECONCILE: Recovery = Recovery { name: "reconcile", promise: Promise::Deduplicated };

/// What a run has to meet.
fn claimed(on: On, recovery: Recovery) -> BTreeSet<&'static str> {
    let mut claimed = BTreeSet::from([
        "paid",
        "replayed",
        "mismatch",
        "in use",
        "did nothing",
        "come back",
        "lost",
        "calls sent again",
        "twins that waited",
        "scripts sent again",
    ]);
    for place in on.places(recovery.promise) {
        // Any deck: each has all kinds.
        let faults = Schedule::new(place, StdRng::seed_from_u64(0)).deal();
        claimed.extend(faults.iter().map(|fault| fault.kind.name()));
    }
    // A server is paused over a payment whose key another one is asked for: so each of these is met for sure, wherever
    // the records are.
    claimed.extend(match recovery.name {
        "at-most-once" => &["leases lost", "unknown", "healed completions"][..],
        "reconcile" => &[
            "leases lost",
            "effects found by the hook",
            "none found by the hook",
            "refused zombies",
        ],
        _ => &["leases lost", "takeovers", "refused zombies"],
    });
    claimed.extend(match (on, recovery.name) {
        // It takes an outage, which no group is promised to have: servers wait for all replicas, and go on when they
        // have another primary.
        (On::OneRedis, "at-most-once") => &["answers not stored"][..],
        (On::OneRedis | On::Sentinels, _) => &[],
        // That a slot was open for a large answer is counted, too, but takes a moment that a busy machine may miss: the
        // test of C20 that holds a slot open is certain of it.
        (On::Cluster, _) => &["sent after a slot that moved", "sent after a key that moved"],
    });
    claimed
}

async fn round(on: On, recovery: Recovery, seed: u64, until: Duration) {
    let folder = tempfile::tempdir().unwrap();
    let Recovery { name, promise } = recovery;
    let claimed = claimed(on, recovery);
    let stage = Stage::new(on.start(), name, promise, claimed, folder.path()).await;
    let stage = Arc::new(stage);
    let store = || async { RedisStore::connect(stage.ground.url()).await.unwrap() };
    // What a primary holds that its replicas do not have may be gone with it, and nobody was told of it: in a group
    // only the end counts.
    let watch = match on {
        On::OneRedis => Some(stage.history.watch(Box::new(store().await))),
        On::Sentinels | On::Cluster => None,
    };
    let clients: Vec<_> =
        (0..CLIENTS).map(|number| tokio::spawn(Arc::clone(&stage).client(number, seed))).collect();
    let reader = tokio::spawn({
        let stage = Arc::clone(&stage);
        async move {
            loop {
                stage.read_metrics(0).await;
                stage.read_metrics(1).await;
                sleep(150).await;
            }
        }
    });
    let [servers, redis] = on.places(promise);
    let schedule = |place, salt| Schedule::new(place, StdRng::seed_from_u64(seed ^ salt));
    let servers = tokio::spawn(Arc::clone(&stage).faults(schedule(servers, 0x5eed), until));
    let redis = tokio::spawn(Arc::clone(&stage).faults(schedule(redis, 0x0fa1), until));
    let faults = servers.await.unwrap() + redis.await.unwrap();
    for client in clients {
        client.await.unwrap();
    }
    reader.abort();
    stage.read_metrics(0).await;
    stage.read_metrics(1).await;
    drop(watch);

    let servers = stage.seats.each_ref().map(|seat| seat.server.lock().unwrap().take().unwrap());
    let evidence = stage.history.evidence(&[&servers[0], &servers[1]], &store().await).await;
    println!(
        "{on:?}, {name}, seed {seed}: {faults} faults, {} requests, {} runs, {} charges, {} sights, {:.0} s\n{}",
        evidence.operations.len(),
        evidence.runs.len(),
        evidence.charges.len(),
        evidence.sights.len(),
        stage.began.elapsed().as_secs_f64(),
        stage.reached().lines()
    );
    assert_holds(&evidence.broken(promise));
    let missing = stage.missing();
    assert!(missing.is_empty(), "never met: {missing:?}");
}

/// Once with the first of these; or, for a long run, by turns with each and with new seeds, for a part of that time.
async fn rounds(on: On, recoveries: &[Recovery]) {
    // The seed says also which it is.
    let turns = recoveries.len() as u64;
    let random = u64::from(rand::random::<u32>()) / turns * turns;
    let first = number("FAULTS_SEED", random);
    let minutes = number("FAULTS_SOAK", 0);
    let end = Instant::now() + Duration::from_secs(minutes * 60) / TESTS;
    for seed in first.. {
        let recovery = recoveries[usize::try_from(seed % turns).expect("few")];
        let left = end.saturating_duration_since(Instant::now());
        let again = if minutes > 0 { "--soak MINUTES" } else { "--test faults random::" };
        println!("== {on:?}, {}: FAULTS_SEED={seed} tests/run {again}", recovery.name);
        round(on, recovery, seed, left.min(ROUND)).await;
        if Instant::now() >= end {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_at_random_break_no_promise_of_at_most_once() {
    rounds(On::OneRedis, &[AT_MOST_ONCE]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_at_random_break_no_promise_of_at_least_once() {
    rounds(On::OneRedis, &[AT_LEAST_ONCE]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_at_random_break_no_promise_of_a_hook() {
    rounds(On::OneRedis, &[RECONCILE]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_at_random_break_no_promise_on_a_group_that_sentinels_watch() {
    rounds(On::Sentinels, &[AT_MOST_ONCE, AT_LEAST_ONCE, RECONCILE]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_at_random_break_no_promise_in_a_cluster() {
    rounds(On::Cluster, &[AT_MOST_ONCE, RECONCILE, AT_LEAST_ONCE]).await;
}
