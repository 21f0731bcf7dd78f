//! B2 and B3 where a handler notes down how far it is: `examples/checkpoints.rs` as processes, of which the first is
//! killed. Its provider deduplicates nothing: each step that is done twice stands in the ledger twice.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Deserialize;
use tokio::task::JoinHandle;
use tower_idempotency::RedisStore;

use crate::history::{History, assert_holds, record};
use crate::invariants::{End, Promise};
use crate::redis::RedisServer;
use crate::sandbox::{Answer, Sandbox};
use crate::site::{USUAL, begins, is_unknown, ms, sleep};

const LEASE: &str = "0.6";

/// What the handler notes down, as somebody else reads it.
#[derive(Debug, Deserialize)]
enum Step {
    Reserving,
    Charging { reservation: String },
}

/// One process after the other, on one store and one ledger.
struct Shop {
    redis: RedisServer,
    folder: tempfile::TempDir,
    history: History,
    rules: [&'static str; 4],
}

impl Shop {
    fn new(recovery: &'static str, effects: &'static str) -> Self {
        let (redis, folder) = (RedisServer::start(), tempfile::tempdir().unwrap());
        let history = History::with_lease(Duration::from_secs_f64(LEASE.parse().unwrap()));
        Self { redis, folder, history, rules: ["--recovery", recovery, "--effects", effects] }
    }

    fn ledger(&self) -> PathBuf {
        self.folder.path().join("ledger.jsonl")
    }

    fn server(&self, args: &[&str]) -> Sandbox {
        let url = self.redis.url();
        let args = [&["--store", &url, "--lease", LEASE], &self.rules[..], args].concat();
        tokio::task::block_in_place(|| Sandbox::start_example("checkpoints", &self.ledger(), &args))
    }

    /// A process whose handler runs, and stands still there.
    async fn stopped_at(&self, place: &str) -> (Sandbox, JoinHandle<Option<Answer>>) {
        let server = self.server(&["--stop-at", place]);
        let (history, address) = (self.history.clone(), server.address);
        let client =
            tokio::spawn(async move { history.ask(address, "k", "tok_visa", USUAL).await });
        begins(&server, "k").await;
        (server, client)
    }

    /// What the record of the key says that was noted down last.
    async fn noted(&self) -> Option<Step> {
        let store = RedisStore::connect(&self.redis.url()).await.unwrap();
        let noted = record(&store, "k").await.unwrap().checkpoint;
        // A version, and JSON.
        noted.split_first().map(|(_, json)| serde_json::from_slice(json).unwrap())
    }

    async fn killed(&self, mut server: Sandbox, client: JoinHandle<Option<Answer>>) {
        server.signal("KILL");
        server.ended();
        self.history.keep_runs_of_killed(&server);
        assert!(client.await.unwrap().is_none(), "its client is told nothing");
    }

    /// Another process, and what it answers in the end.
    async fn settled(&self) -> (Sandbox, End) {
        let server = self.server(&[]);
        let end = self.history.pay_surely(&[server.address], "k", "tok_visa", USUAL).await;
        (server, end)
    }

    /// The steps in the ledger, and by which attempt.
    async fn steps(&self, server: &Sandbox) -> Vec<(String, u64)> {
        let ledger = server.ledger().await;
        let entries = ledger["entries"].as_array().unwrap().iter();
        let step = |entry: &serde_json::Value| {
            (entry["action"].as_str().unwrap().to_owned(), entry["attempt"].as_u64().unwrap())
        };
        entries.map(step).collect()
    }

    async fn check(&self, server: &Sandbox, promise: Promise) {
        let store = RedisStore::connect(&self.redis.url()).await.unwrap();
        assert_holds(&self.history.evidence(&[server], &store).await.broken(promise));
    }

    /// Kills a process between its two steps, once both its notes are in the store; gives its reservation.
    async fn killed_between_steps(&self) -> String {
        let (server, client) = self.stopped_at("between-steps").await;
        let end = Instant::now() + ms(20_000);
        let reservation = loop {
            if let Some(Step::Charging { reservation }) = self.noted().await {
                break reservation;
            }
            assert!(Instant::now() < end, "the second note does not come");
            sleep(5).await;
        };
        assert_eq!(self.steps(&server).await, [("reserve".to_owned(), 1)]);
        self.killed(server, client).await;
        reservation
    }
}

fn steps(expected: &[(&str, u64)]) -> Vec<(String, u64)> {
    expected.iter().map(|&(action, attempt)| (action.to_owned(), attempt)).collect()
}

#[track_caller]
fn paid(end: &End) -> serde_json::Value {
    let End::Paid { body, replay: false, .. } = end else { panic!("{end:?}") };
    serde_json::from_slice(body).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b3_a_process_killed_behind_a_checkpoint_leaves_only_the_rest_to_the_one_that_reads_it() {
    for effects in ["anywhere", "marked"] {
        let shop = Shop::new("at-least-once", effects);
        let reservation = shop.killed_between_steps().await;
        let (server, end) = shop.settled().await;
        let answer = paid(&end);
        assert_eq!(answer["attempt"], 2, "{effects}");
        assert_eq!(answer["reservation"], reservation, "read from what was noted");
        assert_eq!(shop.steps(&server).await, steps(&[("reserve", 1), ("charge", 2)]), "{effects}");
        shop.check(&server, Promise::Deduplicated).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b3_a_process_killed_behind_its_mark_leaves_the_outcome_unknown_where_nobody_may_run_again()
{
    for effects in ["anywhere", "marked"] {
        let shop = Shop::new("at-most-once", effects);
        shop.killed_between_steps().await;
        let (server, end) = shop.settled().await;
        is_unknown(&end);
        assert_eq!(shop.steps(&server).await, steps(&[("reserve", 1)]), "{effects}");
        // For whoever settles it: how far it came.
        assert!(matches!(shop.noted().await, Some(Step::Charging { .. })));
        shop.check(&server, Promise::AtMostOnce).await;
    }
}

/// Of what was begun behind a mark only somebody who looks can say more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b4_a_process_killed_behind_its_last_step_is_answered_for_by_a_hook_that_reads_its_checkpoint()
 {
    let shop = Shop::new("reconcile", "marked");
    let (server, client) = shop.stopped_at("after-charge").await;
    let end = Instant::now() + ms(20_000);
    while server.charges().await == 0 {
        assert!(Instant::now() < end, "no charge");
        sleep(5).await;
    }
    let Some(Step::Charging { reservation }) = shop.noted().await else { panic!("no note") };
    shop.killed(server, client).await;
    let (server, end) = shop.settled().await;
    let answer = paid(&end);
    assert_eq!(answer["reservation"], reservation.as_str());
    assert_eq!(shop.steps(&server).await, steps(&[("reserve", 1), ("charge", 1)]));
    shop.check(&server, Promise::Deduplicated).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b2_a_process_killed_before_its_mark_frees_its_key_where_effects_are_marked() {
    for effects in ["marked", "anywhere"] {
        let shop = Shop::new("at-most-once", effects);
        let (server, client) = shop.stopped_at("before-mark").await;
        assert!(shop.noted().await.is_none());
        shop.killed(server, client).await;
        let (server, end) = shop.settled().await;
        let unknown = shop.history.ends().get("unknown").copied();
        if effects == "marked" {
            assert_eq!(paid(&end)["attempt"], 2);
            assert_eq!(unknown, None, "nobody was ever told that it is");
            assert_eq!(shop.steps(&server).await, steps(&[("reserve", 2), ("charge", 2)]));
        } else {
            // What marks nothing may have done anything.
            is_unknown(&end);
            assert_eq!(shop.steps(&server).await, []);
        }
        shop.check(&server, Promise::AtMostOnce).await;
    }
}
