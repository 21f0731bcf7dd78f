//! A server whose store is a pool, with connections that are lent out one by one: B79, B80 and B81 of the faults that
//! people met. `exhausted.rs` has more requests than connections.
//!
//! What the pool holds is what Redis says that its client holds.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tower_idempotency::RedisStore;
use tower_idempotency::store::redis::redis as client;

use crate::history::{History, assert_holds, runs_in};
use crate::invariants::{End, Promise};
use crate::line::{Loss, Proxy};
use crate::load::{leave_at_random, number, seed};
use crate::redis::RedisServer;
use crate::sandbox::{Answer, Connection, Sandbox};
use crate::site::{USUAL, begins, is, is_paid, is_unknown, metric, server, sleep};

/// Nothing here takes longer, except when it hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// A server with a pool, in a process of its own; and its Redis and its ledger.
pub(crate) struct Shop {
    pub(crate) redis: RedisServer,
    pub(crate) server: Sandbox,
    pub(crate) history: History,
    connections: usize,
    ledger: PathBuf,
    _folder: tempfile::TempDir,
}

impl Shop {
    /// With a pool of this many connections and a lease of this many seconds.
    fn start(connections: usize, lease: f64) -> Self {
        let redis = RedisServer::start();
        let url = redis.url();
        Self::on(redis, &url, connections, lease)
    }

    /// The same on this Redis, which is reached at this address.
    pub(crate) fn on(redis: RedisServer, url: &str, connections: usize, lease: f64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ledger = folder.path().join("ledger.db");
        let server = with_pool(url, connections, &ledger, lease);
        let history = History::with_lease(Duration::from_secs_f64(lease));
        Self { redis, server, history, connections, ledger, _folder: folder }
    }

    /// Another server of this kind on the same Redis and ledger.
    pub(crate) fn second(&self) -> Sandbox {
        let lease = self.history.lease().as_secs_f64();
        let url = self.redis.url();
        tokio::task::block_in_place(|| with_pool(&url, self.connections, &self.ledger, lease))
    }

    pub(crate) fn pay(&self, key: &str, source: &str) -> JoinHandle<Option<Answer>> {
        let (history, address) = (self.history.clone(), self.server.address);
        let (key, source) = (key.to_owned(), source.to_owned());
        tokio::spawn(async move { history.ask(address, &key, &source, USUAL).await })
    }

    async fn settled(&self, key: &str, source: &str) -> End {
        self.history.pay_surely(&[self.server.address], key, source, USUAL).await
    }

    /// How many handlers have begun, by the word of the server.
    pub(crate) fn begun(&self) -> usize {
        runs_in(&self.server.said().1).len()
    }

    pub(crate) async fn begin(&self, runs: usize) {
        let end = Instant::now() + PATIENCE;
        while self.begun() < runs {
            assert!(Instant::now() < end, "not enough handlers begin: {}", self.begun());
            sleep(1).await;
        }
    }

    /// How many calls to the store, of this kind, were given up since no connection was to be had.
    pub(crate) fn starved(&self, verb: &str) -> usize {
        let of_it = format!("verb=\"{verb}\"");
        let said = self.server.said().1;
        said.lines()
            .filter(|line| line.contains(&of_it) && line.contains("no free slot in the pool"))
            .count()
    }

    /// Fails if anything that is promised does not hold.
    pub(crate) async fn check(&self, servers: &[&Sandbox]) {
        let store = RedisStore::connect(&self.redis.url()).await.unwrap();
        let evidence = self.history.evidence(servers, &store).await;
        assert_holds(&evidence.broken(Promise::AtMostOnce));
    }

    /// The ids of all connections that servers hold.
    pub(crate) fn held(&self) -> Vec<String> {
        let list = self.redis.cli(&["client", "list", "type", "normal"]);
        held_in(&list).map(str::to_owned).collect()
    }

    /// Fails unless all connections of the pool can be used at once: a seat that was lost is never lent out again.
    async fn all_seats_work(&self) {
        // One of them is kept for what runs; so something has to end, too.
        let running = self.pay("seat-of-a-completion", "tok_charge_then_slow_300");
        begins(&self.server, "seat-of-a-completion").await;
        self.redis.cli(&["client", "pause", "600000", "write"]);
        let claims: Vec<_> = (0..8)
            .map(|n| (format!("seat-{n}"), self.pay(&format!("seat-{n}"), "tok_visa")))
            .collect();
        let waiting = |list: &str| list.matches(" flags=b ").count() == self.connections;
        let clients = ["client", "list", "type", "normal"];
        self.redis.wait_until("all seats are taken", &clients, waiting);
        self.redis.cli(&["client", "unpause"]);
        assert_eq!(running.await.unwrap().unwrap().status, 201);
        for (key, claim) in claims {
            claim.await.unwrap();
            is_paid(&self.settled(&key, "tok_visa").await);
        }
        let held = self.held();
        assert!(held.len() <= self.connections, "{held:?}");
    }
}

fn with_pool(url: &str, connections: usize, ledger: &std::path::Path, lease: f64) -> Sandbox {
    let (url, lease) = (format!("{url}?pool={connections}"), lease.to_string());
    let server = server(&url, ledger, &["--lease", &lease, "--wait", "0"]);
    // It says so behind its first line.
    let (end, pool) = (Instant::now() + PATIENCE, format!("(a pool of {connections})\n"));
    while !server.said().0.contains(&pool) {
        assert!(Instant::now() < end, "{}", server.said().0);
        std::thread::sleep(Duration::from_millis(1));
    }
    server
}

/// Of a list of clients, the ids of those that do not ask for this list.
fn held_in(list: &str) -> impl Iterator<Item = &str> {
    let others = list.lines().filter(|line| !line.contains(" cmd=client"));
    others.filter_map(|line| line.split(' ').next())
}

/// Asks a Redis all the time how many connections its clients hold.
pub(crate) struct Seats {
    counts: Arc<Mutex<Vec<usize>>>,
    task: JoinHandle<()>,
}

impl Seats {
    pub(crate) async fn watch(redis: &RedisServer) -> Self {
        let client = client::Client::open(redis.url()).unwrap();
        let mut connection = client.get_multiplexed_async_connection().await.unwrap();
        let counts: Arc<Mutex<Vec<usize>>> = Arc::default();
        let seen = Arc::clone(&counts);
        let task = tokio::spawn(async move {
            loop {
                let mut ask = client::cmd("CLIENT");
                ask.arg("LIST").arg("TYPE").arg("normal");
                let list: String = ask.query_async(&mut connection).await.unwrap();
                seen.lock().unwrap().push(held_in(&list).count());
                sleep(2).await;
            }
        });
        Self { counts, task }
    }

    /// Fails if it was ever more than these, but for one whose call was given up and that is being closed while the
    /// next one is made; and gives in how many looks all of them were held.
    pub(crate) fn were_at_most(self, connections: usize) -> usize {
        self.task.abort();
        let counts = self.counts.lock().unwrap();
        let looks = |which: &dyn Fn(usize) -> bool| counts.iter().filter(|n| which(**n)).count();
        let (all, above) = (looks(&|n| n == connections), looks(&|n| n > connections));
        let most = *counts.iter().max().unwrap();
        println!(
            "in {} looks {connections} connections {all} times, above that {above} times: {most}",
            counts.len()
        );
        assert!(most <= connections + 1 && above * 50 <= counts.len(), "{most}, and {above} times");
        all
    }
}

/// A payment of a crowd: when it was sent, on a connection that was there, and when it was answered.
async fn ask_at_once(
    history: History,
    mut connection: Connection,
    key: String,
    asked: Arc<AtomicUsize>,
) -> (Answer, Instant) {
    asked.fetch_add(1, Ordering::SeqCst);
    let answer = history.ask_on(&mut connection, &key, "tok_visa", USUAL).await;
    (answer.expect("an answer"), Instant::now())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b80_a_redis_frozen_behind_a_pool_of_two_ends_every_request_within_bounds_and_recovers() {
    const CROWD: usize = 200;
    let frozen_for = Duration::from_secs(number("FAULTS_FROZEN_SECONDS", 5));
    let shop = Shop::start(2, 30.0);
    let source = "tok_charge_then_slow_1500";
    let running: Vec<_> = (0..10).map(|n| shop.pay(&format!("running-{n}"), source)).collect();
    shop.begin(10).await;
    let mut open = Vec::new();
    for _ in 0..CROWD {
        open.push(shop.server.connect().await);
    }
    // Writes wait first, so that none of the crowd is served, and that a connection is lent out; and then everything.
    shop.redis.cli(&["client", "pause", "600000", "write"]);
    let (asked, began) = (Arc::new(AtomicUsize::new(0)), Instant::now());
    let new: Vec<_> = (open.into_iter().enumerate())
        .map(|(n, connection)| {
            let (history, asked) = (shop.history.clone(), Arc::clone(&asked));
            tokio::spawn(ask_at_once(history, connection, format!("new-{n}"), asked))
        })
        .collect();
    while asked.load(Ordering::SeqCst) < CROWD {
        sleep(1).await;
    }
    let clients = ["client", "list", "type", "normal"];
    shop.redis.wait_until("a call waits", &clients, |list| list.contains(" flags=b "));
    shop.redis.stop();
    let frozen = Instant::now();
    let mut longest = Duration::ZERO;
    for request in new {
        let (answer, answered) = request.await.unwrap();
        assert!(answered > frozen, "it was not in flight: {answer:?}");
        is(&answer, 503, "idempotency_store_unavailable");
        assert!(answer.header("retry-after").is_some());
        longest = longest.max(answered - began);
    }
    // The limit of a claim; a frozen server is asked for no longer.
    assert!(longest < Duration::from_secs(5), "{longest:?}");
    // One at a time may claim; the others have waited for its connection in vain.
    let starved = shop.starved("claim");
    assert!(starved >= CROWD * 9 / 10, "{starved} waited for a connection in vain");
    assert_eq!(shop.begun(), 10);
    tokio::time::sleep(frozen_for.saturating_sub(frozen.elapsed())).await;
    assert_eq!(shop.server.charges().await, 10, "nothing starts that could not be stored");
    shop.redis.cont();
    shop.redis.cli(&["client", "unpause"]);
    let thawed = Instant::now();
    // What ran has its answer; unless nobody could store it for so long that it was given up.
    let given_up = frozen_for > Duration::from_secs(8);
    for n in 0..CROWD {
        let end = shop.settled(&format!("new-{n}"), "tok_visa").await;
        assert!(matches!(end, End::Paid { .. }) || given_up, "{end:?}");
    }
    let recovered = thawed.elapsed();
    for request in running {
        assert!(request.await.unwrap().unwrap().status == 201 || given_up);
    }
    for n in 0..10 {
        let end = shop.settled(&format!("running-{n}"), source).await;
        let unknown = matches!(end, End::Unknown) && given_up;
        assert!(matches!(end, End::Paid { replay: true, .. }) || unknown, "{end:?}");
    }
    println!(
        "all of {CROWD} requests refused, the last after {longest:?}, {starved} for want of a connection; all paid \
         {recovered:?} after"
    );
    assert!(recovered < Duration::from_secs(20) || given_up, "{recovered:?}");
    let unknown = shop.history.ends().get("unknown").copied().unwrap_or_default();
    assert!(shop.server.charges().await == 210 || (given_up && unknown > 0));
    shop.all_seats_work().await;
    shop.check(&[&shop.server]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b81_answers_are_never_mixed_up_over_a_pool_although_clients_leave_at_random() {
    let requests = number("FAULTS_REQUESTS", 3_000);
    let shop = Shop::start(4, 30.0);
    let seats = Seats::watch(&shop.redis).await;
    let address = shop.server.address;
    let (answered, left) = leave_at_random(&shop.history, address, requests, seed()).await;
    assert!(seats.were_at_most(4) > 0, "the pool was never used up");
    assert_eq!(shop.server.charges().await, (answered + left) as u64);
    shop.all_seats_work().await;
    shop.check(&[&shop.server]).await;
}

/// B79: a pool lends out a connection that was closed meanwhile no more than once, and to nobody's harm.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b79_a_connection_of_a_pool_that_an_idle_redis_has_closed_is_replaced_without_an_error() {
    let shop = Shop::start(4, 30.0);
    for answer in join_all((0..8).map(|n| shop.pay(&format!("k-{n}"), "tok_visa"))).await {
        assert_eq!(answer.unwrap().unwrap().status, 201);
    }
    let open = shop.held();
    assert!((1..=4).contains(&open.len()), "{open:?}");
    shop.redis.cli(&["config", "set", "timeout", "1"]);
    let none = |list: &str| held_in(list).next().is_none();
    shop.redis.wait_until("closed", &["client", "list", "type", "normal"], none);
    shop.redis.cli(&["config", "set", "timeout", "0"]);
    for answer in join_all((0..8).map(|n| shop.pay(&format!("k-{n}"), "tok_visa"))).await {
        assert!(answer.unwrap().unwrap().is_replay());
    }
    assert_eq!(shop.pay("new", "tok_visa").await.unwrap().unwrap().status, 201);
    assert_eq!(shop.server.charges().await, 9);
    shop.all_seats_work().await;
    assert!(!shop.held().iter().any(|id| open.contains(id)), "an id is given once");
    shop.check(&[&shop.server]).await;
}

/// B79: connections die while calls wait on them that Redis has not looked at, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b79_connections_of_a_pool_that_are_killed_under_a_call_are_replaced_and_their_calls_made_once()
 {
    let shop = Shop::start(2, 30.0);
    let (rounds, mut killed) = (10, 0);
    for round in 0..rounds {
        shop.redis.cli(&["client", "pause", "600000", "write"]);
        let requests = join_all((0..8).map(|n| shop.pay(&format!("k-{round}-{n}"), "tok_visa")));
        let clients = ["client", "list", "type", "normal"];
        shop.redis.wait_until("a call waits", &clients, |list| list.contains(" flags=b "));
        killed += shop.redis.cli(&["client", "kill", "type", "normal"]).parse::<usize>().unwrap();
        shop.redis.cli(&["client", "unpause"]);
        for answer in requests.await {
            // The call that was cut off is made again; nobody sees anything of it.
            assert_eq!(answer.unwrap().unwrap().status, 201);
        }
        assert_eq!(shop.server.charges().await, 8 * (round + 1));
    }
    let again = metric(&shop.server, "idempotency_store_retries", "").await;
    println!("{killed} connections killed, {again} calls made again");
    assert!(killed as u64 >= rounds && again >= rounds, "{killed} killed, {again} made again");
    shop.all_seats_work().await;
    shop.check(&[&shop.server]).await;
}

/// B79: Redis has done what it was asked, and its reply is lost with the connection. For certain: it was cut when the reply
/// had come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b79_a_call_over_a_pool_that_was_done_and_whose_reply_was_lost_is_known_as_ones_own() {
    let redis = RedisServer::start();
    let proxy = Proxy::to(redis.port()).await;
    let shop = Shop::on(redis, &proxy.redis_url(), 2, 30.0);
    // The scripts are known from here on.
    assert_eq!(shop.pay("first", "tok_visa").await.unwrap().unwrap().status, 201);
    let (mut charged, lost) = (1, 4);
    // What is in a claim, and what is in a completion: the answer says the source.
    for (verb, word) in [("claim", "\r\nNX\r\n"), ("settle", "tok_visa")] {
        for round in 0..3 {
            let again = metric(&shop.server, "idempotency_store_retries", verb).await;
            proxy.lose_replies(Loss::Cut, word, lost);
            let keys = (0..8).map(|n| format!("{verb}-{round}-{n}"));
            for answer in join_all(keys.map(|key| shop.pay(&key, "tok_visa"))).await {
                let answer = answer.unwrap().unwrap();
                // No conflict with itself, and nothing unknown.
                assert_eq!(
                    (answer.status.as_u16(), answer.is_replay()),
                    (201, false),
                    "{answer:?}"
                );
                assert_eq!(answer.header("idempotency-status"), None, "{answer:?}");
            }
            assert_eq!(proxy.hits(), lost as u64, "{verb}: not all replies were lost");
            let made = metric(&shop.server, "idempotency_store_retries", verb).await - again;
            assert!(made >= lost as u64, "{verb}: {made} made again");
            charged += 8;
            assert_eq!(shop.server.charges().await, charged);
        }
    }
    for n in 0..8 {
        assert!(shop.pay(&format!("claim-0-{n}"), "tok_visa").await.unwrap().unwrap().is_replay());
    }
    shop.all_seats_work().await;
    shop.check(&[&shop.server]).await;
}

/// B79: everything goes, and comes back on the same port with what it had.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b79_a_redis_killed_under_a_pool_of_two_is_found_again_and_everything_is_paid_once() {
    let redis = RedisServer::start_with(&["--appendonly", "yes"]);
    let url = redis.url();
    let mut shop = Shop::on(redis, &url, 2, 30.0);
    let source = "tok_charge_then_slow_1000";
    let running: Vec<_> = (0..10).map(|n| shop.pay(&format!("running-{n}"), source)).collect();
    shop.begin(10).await;
    let new: Vec<_> = (0..200).map(|n| shop.pay(&format!("new-{n}"), "tok_visa")).collect();
    shop.begin(20).await;
    tokio::task::block_in_place(|| shop.redis.kill());
    let mut refused = 0;
    for request in new {
        let answer = request.await.unwrap().unwrap();
        if answer.status != 201 {
            is(&answer, 503, "idempotency_store_unavailable");
            refused += 1;
        }
    }
    assert!(refused >= 20, "only {refused} met a server that was gone");
    let charged = shop.server.charges().await;
    tokio::task::block_in_place(|| shop.redis.restart());
    for request in running {
        let answer = request.await.unwrap().unwrap();
        assert_eq!(answer.status, 201, "{answer:?}");
        assert_eq!(answer.header("idempotency-status"), None, "stored after all");
    }
    for n in 0..200 {
        is_paid(&shop.settled(&format!("new-{n}"), "tok_visa").await);
    }
    for n in 0..10 {
        let end = shop.settled(&format!("running-{n}"), source).await;
        assert!(matches!(end, End::Paid { replay: true, .. }), "{end:?}");
    }
    println!("{charged} charged before, {refused} refused meanwhile");
    assert_eq!(shop.server.charges().await, 210);
    shop.all_seats_work().await;
    shop.check(&[&shop.server]).await;
}

/// B10 of the matrix over a pool: what the frozen process holds harms nobody, and works when it wakes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b10_a_server_with_a_pool_frozen_past_its_leases_heals_its_keys_when_it_wakes() {
    let shop = Shop::start(2, 0.5);
    let second = shop.second();
    let source = "tok_charge_then_slow_1500";
    let running: Vec<_> = (0..10).map(|n| shop.pay(&format!("running-{n}"), source)).collect();
    shop.begin(10).await;
    // And claims are on their way.
    let new: Vec<_> = (0..100).map(|n| shop.pay(&format!("new-{n}"), "tok_visa")).collect();
    shop.begin(20).await;
    shop.server.signal("STOP");
    // Once a lease is over nothing is on its way to the ledger any more.
    is_unknown(&shop.history.pay_surely(&[second.address], "running-0", source, USUAL).await);
    let frozen = second.charges().await;
    assert!((1..110).contains(&frozen), "{frozen} charges: not in the middle of them");
    for n in 0..10 {
        let key = format!("running-{n}");
        is_unknown(&shop.history.pay_surely(&[second.address], &key, source, USUAL).await);
    }
    assert_eq!(second.charges().await, frozen);
    assert!(shop.held().len() <= 4, "{:?}", shop.held());
    shop.server.signal("CONT");
    for request in running {
        let late = request.await.unwrap().unwrap();
        assert_eq!((late.status.as_u16(), late.is_replay()), (201, false), "{late:?}");
    }
    for n in 0..10 {
        let key = format!("running-{n}");
        let end = shop.history.pay_surely(&[second.address], &key, source, USUAL).await;
        assert!(matches!(end, End::Paid { replay: true, .. }), "{end:?}");
    }
    for request in new {
        request.await.unwrap();
    }
    for n in 0..100 {
        is_paid(&shop.settled(&format!("new-{n}"), "tok_visa").await);
    }
    println!("{frozen} of 110 charges before it froze");
    assert_eq!(shop.server.charges().await, 110);
    shop.check(&[&shop.server, &second]).await;
}
