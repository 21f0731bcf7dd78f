//! Two servers and a Redis, with a proxy between the first server and the Redis.

use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tower_idempotency::RedisStore;

use crate::history::{History, assert_breaks, assert_holds, runs_in};
use crate::invariants::{Broken, End, Promise, key_id};
use crate::line::Proxy;
use crate::redis::RedisServer;
use crate::sandbox::{Answer, Call, Connection, Sandbox};

/// Nothing here takes longer, except when it hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a payment is of, where that does not matter.
pub(crate) const USUAL: u32 = 1999;

/// Two servers that charge into one ledger, and what their clients saw.
pub(crate) struct Pair {
    pub(crate) one: Sandbox,
    pub(crate) two: Sandbox,
    pub(crate) history: History,
    _folder: tempfile::TempDir,
}

/// A pair on one Redis.
pub(crate) struct Site {
    pub(crate) redis: RedisServer,
    pub(crate) proxy: Proxy,
    /// The first server reaches Redis through the proxy, the second directly.
    pub(crate) pair: Pair,
}

impl Deref for Site {
    type Target = Pair;

    fn deref(&self) -> &Pair {
        &self.pair
    }
}

impl DerefMut for Site {
    fn deref_mut(&mut self) -> &mut Pair {
        &mut self.pair
    }
}

impl Pair {
    /// Each of them with the address of its store and its arguments.
    pub(crate) fn start(one: (&str, &[&str]), two: (&str, &[&str])) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let ledger = folder.path().join("ledger.db");
        let start = |(url, args): (&str, &[&str])| server(url, &ledger, args);
        let lease = one.1.iter().skip_while(|arg| **arg != "--lease").nth(1);
        let lease = lease.map_or(30.0, |lease| lease.parse().expect("seconds"));
        let history = History::with_lease(Duration::from_secs_f64(lease));
        Self { one: start(one), two: start(two), history, _folder: folder }
    }

    /// Sends a payment of the usual amount to the first server, in the background.
    pub(crate) fn pay(&self, key: &str, source: &str) -> JoinHandle<Option<Answer>> {
        let (history, address) = (self.history.clone(), self.one.address);
        let (key, source) = (key.to_owned(), source.to_owned());
        tokio::spawn(async move { history.ask(address, &key, &source, USUAL).await })
    }

    /// Sends a payment of the usual amount to the first server.
    pub(crate) async fn ask_one(&self, key: &str, source: &str) -> Answer {
        self.history.ask(self.one.address, key, source, USUAL).await.expect("an answer")
    }

    /// Sends a payment of the usual amount to the second server.
    pub(crate) async fn ask_two(&self, key: &str, source: &str) -> Answer {
        self.history.ask(self.two.address, key, source, USUAL).await.expect("an answer")
    }

    /// Asks both servers in turn until there is a final answer.
    pub(crate) async fn settled(&self, key: &str, source: &str) -> End {
        let addresses: [SocketAddr; 2] = [self.two.address, self.one.address];
        self.history.pay_surely(&addresses, key, source, USUAL).await
    }

    /// Asks the second server until there is a final answer; the first is gone.
    pub(crate) async fn settled_without_one(&self, key: &str, source: &str) -> End {
        self.history.pay_surely(&[self.two.address], key, source, USUAL).await
    }

    /// The attempts of all handlers that ran under a key, by the word of both servers.
    pub(crate) fn handlers_of(&self, key: &str) -> Vec<u32> {
        let runs = [&self.one, &self.two].map(|server| runs_in(&server.said().1));
        let mut runs: Vec<_> = runs.into_iter().flatten().collect();
        runs.retain(|run| run.key_id == key_id(key));
        runs.iter().map(|run| run.attempt).collect()
    }

    /// Waits until that many charges are in the ledger.
    pub(crate) async fn charged(&self, charges: u64) {
        let end = Instant::now() + PATIENCE;
        while self.two.charges().await < charges {
            assert!(Instant::now() < end, "no charge");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Fails if anything that is promised does not hold, by what the store at this address has in the end.
    pub(crate) async fn check_at(&self, url: &str, promise: Promise) {
        assert_holds(&self.broken_at(url, promise).await);
    }

    /// Fails unless exactly this is broken: what the fault ends by its nature.
    pub(crate) async fn check_breaks_at(&self, url: &str, promise: Promise, expected: &[&str]) {
        assert_breaks(&self.broken_at(url, promise).await, expected);
    }

    pub(crate) async fn broken_at(&self, url: &str, promise: Promise) -> Vec<Broken> {
        let store = RedisStore::connect(url).await.expect("a store");
        let evidence = self.history.evidence(&[&self.two, &self.one], &store).await;
        evidence.broken(promise)
    }
}

impl Site {
    pub(crate) async fn start(args: &[&str]) -> Self {
        Self::with_redis(&[], args).await
    }

    pub(crate) async fn with_redis(options: &[&str], args: &[&str]) -> Self {
        Self::on(RedisServer::start_with(options), args, args).await
    }

    /// With other arguments for each of the servers.
    pub(crate) async fn on(redis: RedisServer, args: &[&str], args_of_two: &[&str]) -> Self {
        let proxy = Proxy::to(redis.port()).await;
        let pair = Pair::start((&proxy.redis_url(), args), (&redis.url(), args_of_two));
        Self { redis, proxy, pair }
    }

    /// The store itself, for whoever looks into it.
    pub(crate) async fn store(&self) -> RedisStore {
        RedisStore::connect(&self.redis.url()).await.expect("a store")
    }

    /// Fails if anything that is promised does not hold.
    pub(crate) async fn check(&self, promise: Promise) {
        self.check_at(&self.redis.url(), promise).await;
    }

    /// Fails unless exactly this is broken: what the fault ends by its nature.
    pub(crate) async fn check_breaks(&self, promise: Promise, expected: &[&str]) {
        self.check_breaks_at(&self.redis.url(), promise, expected).await;
    }

    /// The keys of all records in Redis.
    pub(crate) fn records(&self) -> Vec<String> {
        let keys = self.redis.cli(&["keys", "idem:*"]);
        // The readiness check leaves a mark for a second, the check at the start a record for some:
        // its storage key ends in zeros, which no hash does.
        keys.lines()
            .filter(|key| *key != "idem:{ready}" && !key.ends_with("AAAAAAAAAA}"))
            .map(str::to_owned)
            .collect()
    }

    /// Waits until a claim is in Redis.
    pub(crate) async fn claimed(&self) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(key) = self.records().into_iter().next() {
                return key;
            }
            assert!(Instant::now() < end, "no claim");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Fails if the fault of this test was never hit.
    #[track_caller]
    pub(crate) fn assert_hit(&self) {
        assert!(self.proxy.hits() > 0, "the fault was never hit");
    }
}

/// The sum of a series of a server's metrics, over all labels that have this in them, as it says itself on this
/// connection.
pub(crate) async fn metric_on(connection: &mut Connection, name: &str, label: &str) -> u64 {
    let answer = connection.send(Call::get("/metrics")).await.expect("an answer");
    let text = String::from_utf8(answer.body.to_vec()).expect("text");
    let lines = text.lines().filter_map(|line| line.strip_prefix(name)?.rsplit_once(' '));
    let lines = lines.filter(|(labels, _)| {
        (labels.is_empty() || labels.starts_with('{')) && labels.contains(label)
    });
    lines.map(|(_, value)| value.parse::<u64>().expect("a count")).sum()
}

pub(crate) async fn metric(server: &Sandbox, name: &str, label: &str) -> u64 {
    metric_on(&mut server.connect().await, name, label).await
}

/// Waits until a handler of this key runs in this server, by its own word.
pub(crate) async fn begins(server: &Sandbox, key: &str) {
    let (end, id) = (Instant::now() + PATIENCE, key_id(key));
    while !runs_in(&server.said().1).iter().any(|run| run.key_id == id) {
        assert!(Instant::now() < end, "no handler of {key} begins");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub(crate) fn server(url: &str, ledger: &Path, args: &[&str]) -> Sandbox {
    Sandbox::start_telling_runs(Some(ledger), &[&["--store", url], args].concat())
}

#[track_caller]
pub(crate) fn is(answer: &Answer, status: u16, code: &str) {
    assert_eq!((answer.status.as_u16(), answer.code().as_str()), (status, code), "{answer:?}");
}

#[track_caller]
pub(crate) fn is_paid(end: &End) {
    assert!(matches!(end, End::Paid { .. }), "{end:?}");
}

#[track_caller]
pub(crate) fn is_unknown(end: &End) {
    assert!(matches!(end, End::Unknown), "{end:?}");
}

pub(crate) fn ms(number: u64) -> Duration {
    Duration::from_millis(number)
}

pub(crate) async fn sleep(number: u64) {
    tokio::time::sleep(ms(number)).await;
}
