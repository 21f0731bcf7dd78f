//! Everything at random: faults in two places at once, while clients pay, repeat themselves, leave nothing
//! out and contradict one another. In the end the whole history is held against every invariant.
//!
//! A run goes on until it has met all that it claims, or is red. It prints its seed and each fault as it comes:
//! the same seed deals the same faults to the same targets at the same times.

mod reached;
mod schedule;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tower_idempotency::RedisStore;

use self::reached::{Reached, series};
use self::schedule::{Fault, Kind, Place, Schedule};
use crate::history::{History, assert_holds};
use crate::invariants::{End, Promise};
use crate::line::Proxy;
use crate::load::{number, seed};
use crate::redis::RedisServer;
use crate::sandbox::{Call, Connection, Sandbox};
use crate::site::{USUAL, sleep};

const SOURCES: [&str; 8] = [
    "tok_visa",
    "tok_slow_60",
    "tok_charge_then_slow_60",
    "tok_slow_200",
    "tok_charge_then_slow_400",
    "tok_charge_then_slow_700",
    "tok_unavailable_once",
    // Its answer is written beside its record.
    "tok_large_8",
];
const CLIENTS: usize = 8;
/// Of another request under the same key.
const OTHER: u32 = 7;
/// A run that has not met all that it claims by then is red.
const LONGEST: Duration = Duration::from_secs(90);
/// A long run is made of runs of this length, each with a seed of its own.
const ROUND: Duration = Duration::from_secs(50);

/// One server after another in the same place, and the way from there to Redis.
struct Seat {
    proxy: Proxy,
    ledger: PathBuf,
    args: Vec<String>,
    server: Mutex<Option<Sandbox>>,
    address: Mutex<SocketAddr>,
    /// Counts the servers that sat here.
    life: AtomicU64,
}

impl Seat {
    /// Starts a server. One that is started while Redis is out of order says so and ends, and whatever looks
    /// after it starts it again.
    fn start(&self) {
        let url = self.proxy.redis_url();
        let args = self.args.iter().map(String::as_str);
        let args: Vec<&str> = ["--store", &url].into_iter().chain(args).collect();
        let end = Instant::now() + Duration::from_secs(20);
        let server = loop {
            match Sandbox::try_telling_runs(Some(&self.ledger), &args) {
                Ok(server) => break server,
                Err(said) => assert!(Instant::now() < end, "no start: {said}"),
            }
        };
        *self.address.lock().unwrap() = server.address;
        *self.server.lock().unwrap() = Some(server);
        self.life.fetch_add(1, Ordering::SeqCst);
    }

    fn address(&self) -> SocketAddr {
        *self.address.lock().unwrap()
    }

    fn signal(&self, name: &str) {
        self.server.lock().unwrap().as_ref().unwrap().signal(name);
    }
}

/// What all tasks of a run share.
struct Stage {
    redis: RedisServer,
    seats: [Seat; 2],
    history: History,
    promise: Promise,
    reached: Mutex<Reached>,
    /// The last page of metrics of each server, by seat and life.
    pages: Mutex<BTreeMap<(usize, u64), String>>,
    stop: AtomicBool,
    began: Instant,
}

impl Stage {
    async fn new(recovery: &str, promise: Promise, folder: &std::path::Path) -> Self {
        let options = ["--enable-debug-command", "local", "--maxmemory-policy", "noeviction"];
        let redis = RedisServer::start_with(&options);
        let args = ["--lease", "0.5", "--wait", "0.3", "--recovery", recovery];
        let mut seats = Vec::new();
        for _ in 0..2 {
            let seat = Seat {
                proxy: Proxy::to(redis.port()).await,
                ledger: folder.join("ledger.db"),
                args: args.map(str::to_owned).to_vec(),
                server: Mutex::default(),
                address: Mutex::new(([127, 0, 0, 1], 0).into()),
                life: AtomicU64::new(0),
            };
            tokio::task::block_in_place(|| seat.start());
            seats.push(seat);
        }
        Self {
            redis,
            seats: seats.try_into().ok().expect("two"),
            history: History::with_lease(Duration::from_millis(500)),
            promise,
            reached: Mutex::default(),
            pages: Mutex::default(),
            stop: AtomicBool::new(false),
            began: Instant::now(),
        }
    }

    fn met(&self, name: &'static str, times: u64) {
        self.reached.lock().unwrap().add(name, times);
    }

    /// Pays until there is a final answer, now here and now there.
    async fn settle(&self, random: &mut StdRng, key: &str, source: &str, amount: u32) {
        let began = Instant::now();
        loop {
            let to = self.seats[random.random_range(0..2)].address();
            let end = self.history.pay(to, key, source, amount).await;
            // Where it is settled by somebody or something, a client asks again.
            let wait = end == End::Unknown && self.promise != Promise::AtMostOnce;
            if end.is_final() && !wait {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{key}: {end:?}");
            sleep(20).await;
        }
    }

    /// One client, that pays under new keys.
    async fn client(self: Arc<Self>, number: usize, seed: u64) {
        let mut random = StdRng::seed_from_u64(seed * 1_000 + number as u64);
        for payment in 0.. {
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let key = format!("c{number}-{payment}");
            let source = SOURCES[random.random_range(0..SOURCES.len())];
            // A twin at the same time, another request under the key, and a late duplicate.
            let twin = random.random_bool(0.4).then(|| StdRng::from_rng(&mut random));
            let other = random.random_bool(0.15).then(|| StdRng::from_rng(&mut random));
            tokio::join!(
                self.settle(&mut random, &key, source, USUAL),
                async {
                    let Some(mut random) = twin else { return };
                    sleep(random.random_range(0..200)).await;
                    self.settle(&mut random, &key, source, USUAL).await;
                },
                async {
                    let Some(mut random) = other else { return };
                    sleep(random.random_range(0..200)).await;
                    self.settle(&mut random, &key, source, OTHER).await;
                },
            );
            if random.random_bool(0.2) {
                self.settle(&mut random, &key, source, USUAL).await;
            }
        }
    }

    /// Reads the metrics of a server, if it answers.
    async fn read_metrics(&self, seat: usize) {
        let life = self.seats[seat].life.load(Ordering::SeqCst);
        let address = self.seats[seat].address();
        let asked = async {
            let mut connection = Connection::open(address).await.ok()?;
            connection.send(Call::get("/metrics")).await.ok()
        };
        let answer = tokio::time::timeout(Duration::from_millis(300), asked).await;
        if let Ok(Some(answer)) = answer {
            let page = String::from_utf8_lossy(&answer.body).into_owned();
            self.pages.lock().unwrap().insert((seat, life), page);
        }
    }

    /// All that was met so far: by the faults, by the clients, and by the servers' own count.
    fn reached(&self) -> Reached {
        let mut reached = self.reached.lock().unwrap().clone();
        for (name, times) in self.history.ends() {
            reached.add(name, times as u64);
        }
        for page in self.pages.lock().unwrap().values() {
            for (name, counter, label) in COUNTERS {
                reached.add(name, series(page, counter, label));
            }
        }
        let errors = tokio::task::block_in_place(|| self.redis.cli(&["info", "errorstats"]));
        let missing =
            errors.lines().find_map(|line| line.strip_prefix("errorstat_NOSCRIPT:count="));
        reached.add("scripts sent again", missing.map_or(0, |count| count.trim().parse().unwrap()));
        reached
    }

    /// One place, in which one fault follows the other until all that is claimed was met. It gives the number of
    /// faults.
    async fn faults(self: Arc<Self>, mut schedule: Schedule, until: Duration) -> usize {
        let mut count = 0;
        loop {
            for fault in schedule.deal() {
                let wait = fault.at.saturating_sub(self.began.elapsed());
                tokio::time::sleep(wait).await;
                println!("{fault}");
                // A fault that hits nobody is none.
                let busy = self.history.in_flight() > 0;
                if self.strike(fault).await && busy {
                    self.met(fault.kind.name(), 1);
                }
                count += 1;
                if self.stop.load(Ordering::SeqCst) {
                    return count;
                }
            }
            let missing = self.reached().missing(&claimed(self.promise, &self.seats[0].args));
            let late = self.began.elapsed() > LONGEST.max(until);
            if late || (missing.is_empty() && self.began.elapsed() >= until) {
                self.stop.store(true, Ordering::SeqCst);
                return count;
            }
        }
    }

    /// Makes a fault, and takes it back. False if it certainly hit nobody.
    async fn strike(&self, Fault { kind, lasts, .. }: Fault) -> bool {
        let cli = |command: &[&str]| tokio::task::block_in_place(|| self.redis.cli(command));
        let millis = lasts.as_millis().to_string();
        match kind {
            Kind::Kill(number) => {
                self.read_metrics(number).await;
                let seat = &self.seats[number];
                tokio::task::block_in_place(|| {
                    let mut server = seat.server.lock().unwrap().take().expect("it lives");
                    server.signal("KILL");
                    server.ended();
                    self.history.keep_runs_of(&server);
                    drop(server);
                    seat.start();
                });
                true
            }
            Kind::Stop(number) => {
                self.seats[number].signal("STOP");
                tokio::time::sleep(lasts).await;
                self.seats[number].signal("CONT");
                true
            }
            Kind::Cut(number, ..)
            | Kind::Swallow(number, _)
            | Kind::Slow(number, ..)
            | Kind::Refuse(number) => self.disturb(&self.seats[number].proxy, kind, lasts).await,
            Kind::KillClients => cli(&["client", "kill", "type", "normal"]) != "0",
            Kind::FlushScripts => cli(&["script", "flush"]) == "OK",
            Kind::PauseWrites => {
                cli(&["client", "pause", &millis, "write"]);
                tokio::time::sleep(lasts).await;
                true
            }
            Kind::DebugSleep => {
                cli(&["debug", "sleep", &lasts.as_secs_f64().to_string()]);
                true
            }
            Kind::Freeze => {
                self.redis.stop();
                tokio::time::sleep(lasts).await;
                self.redis.cont();
                true
            }
            Kind::Full => {
                cli(&["config", "set", "maxmemory", "1"]);
                tokio::time::sleep(lasts).await;
                cli(&["config", "set", "maxmemory", "0"]);
                let errors = cli(&["info", "errorstats"]);
                errors.contains("errorstat_OOM")
            }
        }
    }

    /// A fault on the way between a server and Redis.
    async fn disturb(&self, proxy: &Proxy, kind: Kind, lasts: Duration) -> bool {
        proxy.hits();
        match kind {
            Kind::Cut(_, way, bytes) => proxy.cut_after(way, bytes),
            Kind::Swallow(_, way) => proxy.swallow(way),
            Kind::Slow(_, way, by) => proxy.delay(way, by),
            _ => proxy.refuse(),
        }
        tokio::time::sleep(lasts).await;
        proxy.heal();
        proxy.hits() > 0
    }
}

/// What servers count: our name for it, their series, and a label.
const COUNTERS: [(&str, &str, &str); 9] = [
    ("takeovers", "idempotency_takeovers", ""),
    ("refused zombies", "idempotency_completions_refused", ""),
    ("healed completions", "idempotency_completions_healed", ""),
    ("leases lost", "idempotency_leases_lost", ""),
    ("calls sent again", "idempotency_store_retries", ""),
    ("twins that waited", "idempotency_wait_duration_count", ""),
    ("answers not stored", "idempotency_requests", "outcome=\"not_stored\""),
    ("effects found by the hook", "idempotency_reconciliations", "found=\"happened\""),
    ("none found by the hook", "idempotency_reconciliations", "found=\"nothing_happened\""),
];

/// What a run with this promise has to meet.
fn claimed(promise: Promise, args: &[String]) -> BTreeSet<&'static str> {
    let mut claimed = BTreeSet::from([
        "paid",
        "replayed",
        "mismatch",
        "in use",
        "did nothing",
        "come back",
        "lost",
        "leases lost",
        "calls sent again",
        "twins that waited",
        "scripts sent again",
    ]);
    for place in [Place::Servers, Place::Redis] {
        // Any deck: each has all kinds.
        let faults = Schedule::new(place, StdRng::seed_from_u64(0)).deal();
        claimed.extend(faults.iter().map(|fault| fault.kind.name()));
    }
    let reconciles = args.iter().any(|arg| arg == "reconcile");
    claimed.extend(match (promise, reconciles) {
        (Promise::AtMostOnce, _) => vec!["unknown", "healed completions"],
        (_, true) => vec!["effects found by the hook", "none found by the hook", "refused zombies"],
        (_, false) => vec!["takeovers", "refused zombies"],
    });
    claimed
}

async fn round(recovery: &str, promise: Promise, seed: u64, until: Duration) {
    let folder = tempfile::tempdir().unwrap();
    let stage = Arc::new(Stage::new(recovery, promise, folder.path()).await);
    let store = || async { RedisStore::connect(&stage.redis.url()).await.unwrap() };
    let watch = stage.history.watch(Box::new(store().await));
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
    let schedule = |place, salt| Schedule::new(place, StdRng::seed_from_u64(seed ^ salt));
    let servers = schedule(Place::Servers, 0x5eed);
    let redis = schedule(Place::Redis, 0x0fa1);
    let servers = tokio::spawn(Arc::clone(&stage).faults(servers, until));
    let redis = tokio::spawn(Arc::clone(&stage).faults(redis, until));
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
    let reached = stage.reached();
    println!(
        "{recovery}, seed {seed}: {faults} faults, {} requests, {} runs, {} charges, {} sights, {:.0} s\n{}",
        evidence.operations.len(),
        evidence.runs.len(),
        evidence.charges.len(),
        evidence.sights.len(),
        stage.began.elapsed().as_secs_f64(),
        reached.lines()
    );
    assert_holds(&evidence.broken(promise));
    let missing = reached.missing(&claimed(promise, &stage.seats[0].args));
    assert!(missing.is_empty(), "never met: {missing:?}");
}

/// Once; or, for a long run, again and again with new seeds for a third of that time.
async fn rounds(recovery: &str, promise: Promise) {
    let first = seed();
    let minutes = number("FAULTS_SOAK", 0);
    let end = Instant::now() + Duration::from_secs(minutes * 60) / 3;
    for seed in first.. {
        let left = end.saturating_duration_since(Instant::now());
        let again = if minutes > 0 { "--soak MINUTES" } else { "--test faults random::faults" };
        println!("== {recovery}: FAULTS_SEED={seed} tests/run {again}");
        round(recovery, promise, seed, left.min(ROUND)).await;
        if Instant::now() >= end {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_at_random_break_no_promise_of_at_most_once() {
    rounds("at-most-once", Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_at_random_break_no_promise_of_at_least_once() {
    rounds("at-least-once", Promise::Deduplicated).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_at_random_break_no_promise_of_a_hook() {
    rounds("reconcile", Promise::Deduplicated).await;
}
