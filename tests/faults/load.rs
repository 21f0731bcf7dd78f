//! Random faults under load, and what must hold however many there are.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::sync::Mutex;
use tower_idempotency::store::Inspect;
use tower_idempotency::{PostgresStore, RedisStore, SqliteStore};

use crate::history::{History, assert_holds};
use crate::invariants::{End, Promise};
use crate::line::{Proxy, Way};
use crate::pool::Seats;
use crate::postgres::PostgresServer;
use crate::redis::RedisServer;
use crate::sandbox::{Answer, Call, Connection, Sandbox};
use crate::site::{Site, is, is_paid, server, sleep};

pub(crate) fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().expect("a number"))
}

pub(crate) fn seed() -> u64 {
    let seed = number("FAULTS_SEED", rand::random::<u32>().into());
    println!("FAULTS_SEED={seed}");
    seed
}

const SOURCES: [&str; 6] = [
    "tok_visa",
    "tok_slow_60",
    "tok_charge_then_slow_60",
    "tok_slow_150",
    // Its answer is written beside its record.
    "tok_large_8",
    // Only where a store remembers the first attempt.
    "tok_unavailable_once",
];
const CLIENTS: usize = 8;

/// Where records are.
enum Store {
    /// With what stands behind its address, for the servers.
    Redis(RedisServer, Proxy, &'static str),
    Sqlite(PathBuf),
    Postgres(String),
}

impl Store {
    async fn redis(query: &'static str) -> Self {
        let redis = RedisServer::start();
        let proxy = Proxy::to(redis.port()).await;
        Self::Redis(redis, proxy, query)
    }

    fn server(&self, ledger: &Path, args: &[&str]) -> Sandbox {
        match self {
            Self::Redis(_, proxy, query) => {
                server(&format!("{}{query}", proxy.redis_url()), ledger, args)
            }
            Self::Sqlite(file) => Sandbox::start_telling_runs(Some(file), args),
            Self::Postgres(url) => {
                Sandbox::start_telling_runs(None, &[&["--store", url], args].concat())
            }
        }
    }

    async fn open(&self) -> Box<dyn Inspect> {
        match self {
            Self::Redis(redis, ..) => Box::new(RedisStore::connect(&redis.url()).await.unwrap()),
            Self::Sqlite(file) => Box::new(SqliteStore::open(file).await.unwrap()),
            Self::Postgres(url) => Box::new(PostgresStore::connect(url).await.unwrap()),
        }
    }

    fn sources(&self) -> &'static [&'static str] {
        match self {
            Self::Redis(..) => &SOURCES,
            Self::Sqlite(_) | Self::Postgres(_) => &SOURCES[..5],
        }
    }
}

/// Pays until there is a final answer. Servers come back elsewhere, so every try looks where they are now.
async fn settle(
    history: &History,
    addresses: &Mutex<Vec<SocketAddr>>,
    random: &mut StdRng,
    key: &str,
    source: &str,
) {
    let began = Instant::now();
    loop {
        let to = {
            let addresses = addresses.lock().await;
            addresses[random.random_range(0..addresses.len())]
        };
        let end = history.pay(to, key, source, 1999).await;
        if matches!(end, End::Paid { .. } | End::Unknown) {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{key}: {end:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Two servers of which one after the other is killed and started again, while clients pay. How many payments there were.
async fn kill_servers(
    store: &Store,
    kills: u64,
    recovery: &str,
    promise: Promise,
    seed: u64,
) -> usize {
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().join("ledger.db");
    let args = ["--lease", "0.5", "--wait", "0.3", "--recovery", recovery];
    let start = || store.server(&ledger, &args);
    let sources = store.sources();
    let mut servers = [start(), start()];
    let addresses: Arc<Mutex<Vec<SocketAddr>>> =
        Arc::new(Mutex::new(servers.iter().map(|server| server.address).collect()));
    let history = History::with_lease(Duration::from_millis(500));
    let watch = history.watch(store.open().await);
    let stop = Arc::new(AtomicBool::new(false));
    let paid = Arc::new(AtomicUsize::new(0));

    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let (history, stop, paid) = (history.clone(), Arc::clone(&stop), Arc::clone(&paid));
            let addresses = Arc::clone(&addresses);
            let mut random = StdRng::seed_from_u64(seed + client as u64);
            tokio::spawn(async move {
                for payment in 0.. {
                    if stop.load(Ordering::SeqCst) {
                        return;
                    }
                    let key = format!("c{client}-{payment}");
                    let source = sources[random.random_range(0..sources.len())];
                    settle(&history, &addresses, &mut random, &key, source).await;
                    // And once more, as a late duplicate.
                    if random.random_bool(0.2) {
                        settle(&history, &addresses, &mut random, &key, source).await;
                    }
                    paid.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();

    let mut random = StdRng::seed_from_u64(seed ^ 0x5eed);
    let began = Instant::now();
    for kill in 0..kills {
        sleep(random.random_range(20..350)).await;
        let cut = random.random_bool(0.2).then(|| random.random_range(0..200));
        if let (Store::Redis(_, proxy, _), Some(bytes)) = (store, cut) {
            proxy.cut_after(Way::Down, bytes);
        }
        let victim = usize::from(kill % 2 == 1);
        servers[victim].signal("KILL");
        servers[victim].ended();
        history.keep_runs_of(&servers[victim]);
        if let Store::Redis(_, proxy, _) = store {
            proxy.heal(); // a server that cannot start is another test
        }
        servers[victim] = tokio::task::block_in_place(start);
        addresses.lock().await[victim] = servers[victim].address;
    }
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        client.await.unwrap();
    }
    drop(watch);
    let opened = store.open().await;
    let evidence = history.evidence(&[&servers[0], &servers[1]], &*opened).await;
    assert_holds(&evidence.broken(promise));
    let (ends, paid) = (history.ends(), paid.load(Ordering::SeqCst));
    println!(
        "{recovery}: {kills} kills, {paid} payments, {} runs, {} sights, {:.0} s: {ends:?}",
        evidence.runs.len(),
        history.sights(),
        began.elapsed().as_secs_f64()
    );
    assert!(history.sights() > kills as usize, "nobody looked into the store");
    assert!(ends.contains_key("lost"), "no kill ever hit a request");
    assert!(ends.contains_key("replayed"), "nothing was ever replayed");
    if promise == Promise::AtMostOnce && kills > 20 {
        assert!(ends.contains_key("unknown"), "no kill ever hit a running handler");
    }
    paid
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_servers_charge_nobody_twice() {
    let (kills, seed) = (number("FAULTS_KILLS", 12), seed());
    for (recovery, promise) in [
        ("at-most-once", Promise::AtMostOnce),
        ("at-least-once", Promise::Deduplicated),
        ("reconcile", Promise::Deduplicated),
    ] {
        kill_servers(&Store::redis("").await, kills, recovery, promise, seed).await;
    }
}

/// The same where connections are lent out one by one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_servers_with_a_pool_charge_nobody_twice() {
    let (kills, seed) = (number("FAULTS_KILLS", 12), seed());
    let store = Store::redis("?pool=2").await;
    let Store::Redis(redis, ..) = &store else { unreachable!("it was just started") };
    let seats = Seats::watch(redis).await;
    let paid = kill_servers(&store, kills, "at-most-once", Promise::AtMostOnce, seed).await;
    // Two of each server, and that of whoever looks at the records. Without a pool a server has one.
    assert!(seats.were_at_most(5) > 0, "the pools were never used up");
    // With this a pool lends out a connection that was used before; each payment took two calls.
    let lent = redis.calls_of("unwatch");
    println!("{lent} times a connection was lent out");
    assert!(lent > paid as u64, "{lent} for {paid} payments");
}

/// What leases do not offer: record and effect are one (I8), and no outcome is ever unknown.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_servers_leave_record_and_effect_together_in_a_database() {
    let (kills, seed) = (number("FAULTS_KILLS", 8), seed());
    let folder = tempfile::tempdir().unwrap();
    let (_server, url) = PostgresServer::shared();
    for store in [Store::Sqlite(folder.path().join("payments.db")), Store::Postgres(url)] {
        kill_servers(&store, kills, "at-most-once", Promise::Transactional, seed).await;
    }
}

/// The claims of all these requests stand in the sockets of the frozen server, which takes them when it goes
/// on, long after their senders have given them up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_frozen_for_longer_than_a_lease_leaves_no_key_unknown_whose_handler_never_ran() {
    let site = Site::start(&["--lease", "2"]).await;
    site.redis.stop();
    let requests: Vec<_> = (0..200)
        .map(|n| {
            let address = site.one.address;
            tokio::spawn(async move {
                let mut connection = Connection::open(address).await.unwrap();
                connection.send(Call::pay(&format!("asleep-{n}"), "tok_visa")).await.unwrap()
            })
        })
        .collect();
    for request in requests {
        is(&request.await.unwrap(), 503, "idempotency_store_unavailable");
    }
    // As long as two leases more.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(site.two.charges().await, 0);
    site.redis.cont();
    for n in 0..200 {
        is_paid(&site.settled(&format!("asleep-{n}"), "tok_visa").await);
    }
    site.check(Promise::AtMostOnce).await;
    assert_eq!(site.two.charges().await, 200);
}

/// Sixteen clients, each with one payment after the other, of which some leave at any moment. Every answer
/// must be the one to its own request, the first one as well as a replay. Gives how many were answered at
/// once and how many left; in the end each has its answer.
pub(crate) async fn leave_at_random(
    history: &History,
    address: SocketAddr,
    requests: u64,
    seed: u64,
) -> (usize, usize) {
    leave(history, address, requests, seed, false).await
}

/// The same where some may be refused as the store is too slow: they count as having left.
pub(crate) async fn leave(
    history: &History,
    address: SocketAddr,
    requests: u64,
    seed: u64,
    may_be_refused: bool,
) -> (usize, usize) {
    let refused = move |answer: &Answer| may_be_refused && answer.status == 503;
    let clients: Vec<_> = (0..16)
        .map(|client| {
            let history = history.clone();
            let mut random = StdRng::seed_from_u64(seed + client);
            tokio::spawn(async move {
                let mut connection = Connection::open(address).await.unwrap();
                let (mut answered, mut left) = (0, Vec::new());
                for n in 0..requests / 16 {
                    // A unique amount, so that every answer shows whose it is.
                    let amount = u32::try_from(1 + client * 1_000_000 + n).unwrap();
                    let key = format!("mix-{client}-{n}");
                    let patience = match random.random_bool(0.2) {
                        true => Duration::from_micros(random.random_range(0..20_000)),
                        false => Duration::from_secs(60),
                    };
                    let asked = history.ask_on(&mut connection, &key, "tok_visa", amount);
                    let Ok(first) = tokio::time::timeout(patience, asked).await else {
                        connection = Connection::open(address).await.unwrap();
                        left.push((key, amount));
                        continue;
                    };
                    let first = first.expect("an answer");
                    if refused(&first) {
                        left.push((key, amount));
                        continue;
                    }
                    answered += 1;
                    is_of(&first, &key, amount);
                    if random.random_bool(0.2) {
                        let again = history.ask_on(&mut connection, &key, "tok_visa", amount);
                        let again = again.await.expect("an answer");
                        if refused(&again) {
                            // It comes again, as every client does that has no final answer.
                            let to = [address];
                            is_paid(&history.pay_surely(&to, &key, "tok_visa", amount).await);
                            continue;
                        }
                        is_of(&again, &key, amount);
                        assert!(again.is_replay(), "{again:?}");
                    }
                }
                for (key, amount) in &left {
                    is_paid(&history.pay_surely(&[address], key, "tok_visa", *amount).await);
                }
                (answered, left.len())
            })
        })
        .collect();
    let (mut answered, mut left) = (0, 0);
    for client in clients {
        let (of_it, gone) = client.await.unwrap();
        answered += of_it;
        left += gone;
    }
    println!("{answered} answered, {left} left");
    assert!(left > 0, "nobody ever left");
    (answered, left)
}

#[track_caller]
fn is_of(answer: &Answer, key: &str, amount: u32) {
    assert_eq!(answer.status, 201, "{answer:?}");
    assert_eq!(answer.json()["amount"], amount, "{answer:?}");
    assert_eq!(answer.header("idempotency-key").unwrap().trim_matches('"'), key);
}

/// Also when their connection to the store is shared with others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_never_mixed_up_although_clients_leave_at_random() {
    let requests = number("FAULTS_REQUESTS", 3_000);
    let site = Site::start(&[]).await;
    let (answered, left) = leave_at_random(&site.history, site.one.address, requests, seed()).await;
    assert_eq!(site.two.charges().await, (answered + left) as u64);
    site.check(Promise::AtMostOnce).await;
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_memory_of_a_server_is_flat_over_distinct_keys() {
    let keys = number("FAULTS_KEYS", 6_000);
    let redis = RedisServer::start();
    // Declined: no rows in the ledger, whose file is not what is measured.
    let sandbox = Sandbox::start(&["--store", &redis.url(), "--retention", "5", "--lease", "2"]);
    let resident = |pid: u32| -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    let mut measured = Vec::new();
    for part in 0..4 {
        let clients: Vec<_> = (0..8)
            .map(|client| {
                let address = sandbox.address;
                tokio::spawn(async move {
                    let mut connection = Connection::open(address).await.unwrap();
                    for n in 0..keys / 32 {
                        let key = format!("distinct-{part}-{client}-{n}");
                        let answer =
                            connection.send(Call::pay(&key, "tok_declined")).await.unwrap();
                        assert_eq!(answer.status.as_u16(), 402);
                    }
                })
            })
            .collect();
        for client in clients {
            client.await.unwrap();
        }
        measured.push(resident(sandbox.pid()));
    }
    println!("{keys} keys; resident KiB after each quarter: {measured:?}");
    // The first quarter warms up; after it, a key that left even 100 bytes behind would show.
    let grown = measured[3].saturating_sub(measured[1]);
    let allowed = 2_048 + keys / 2 * 20 / 1_024;
    assert!(grown < allowed, "{grown} KiB more in the second half; {allowed} allowed");
}
