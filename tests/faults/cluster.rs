//! C12, C20 and C25 on a cluster: a master that dies, slots that move, a majority that is gone, replies that
//! are lost.

use std::ops::Range;
use std::sync::mpsc::sync_channel;

use tower_idempotency::store::redis::redis::{Client, Connection, cmd};
use tower_idempotency::{IdempotencyKey, Identity, StorageKey};

use crate::crowd::Crowd;
use crate::failover::kill_ahead_of;
use crate::groups::{RedisCluster, slot_of};
use crate::invariants::Promise;
use crate::line::{Proxy, Way};
use crate::redis::RedisServer;
use crate::site::{Pair, USUAL, is, is_paid};

/// The account's keys whose records are in these slots. They are sought on a thread of their own.
fn keys_in(slots: Range<usize>) -> impl Iterator<Item = String> + Send {
    let (found, keys) = sync_channel(32);
    std::thread::spawn(move || {
        let account = Identity::of_parts(["acme"]);
        let all = (0..).map(|number| format!("slot-{number}"));
        let slot = |key: &str| {
            let key = IdempotencyKey::new(key).expect("a key");
            slot_of(&StorageKey::new(&account, &key).to_text())
        };
        // Ends with the test.
        for key in all.filter(|key| slots.contains(&slot(key))) {
            if found.send(key).is_err() {
                return;
            }
        }
    });
    keys.into_iter()
}

fn pair_on(url: &str, args: &[&str]) -> Pair {
    Pair::start((url, args), (url, args))
}

/// The slots of the last of three masters.
const OF_THE_LAST: Range<usize> = 10_923..16_384;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c12_a_master_of_a_cluster_killed_under_load_charges_nobody_twice() {
    let mut cluster = RedisCluster::start(3, 1);
    let url = format!("{}?wait=1", cluster.url());
    let pair = pair_on(&url, &["--lease", "10", "--wait", "1"]);
    let crowd = Crowd::start(&pair, 6, &["tok_visa", "tok_slow_60", "tok_large_8"]);
    crowd.go_on(30).await;
    let (masters, replicas) = cluster.nodes.split_at_mut(3);
    let payers = kill_ahead_of(&pair, &mut masters[0], &[&replicas[0]]).await;
    crowd.have_ended("come back", 2).await;
    let replica = &cluster.nodes[3];
    replica.wait_until("its replica takes over", &["role"], |said| said.starts_with("master"));
    // The old one comes back as a replica of the new one.
    cluster.nodes[0].restart();
    crowd.go_on(60).await;
    crowd.finish().await;
    for payer in payers {
        payer.await.unwrap();
    }
    pair.check_at(&url, Promise::AtMostOnce).await;
}

/// Slots on their way from one master to another, many at a time: `redis-cli` would be started for every step
/// of each.
struct Moving {
    from: (Connection, String),
    to: (Connection, String),
    port: u16,
}

impl Moving {
    fn between(cluster: &RedisCluster, from: usize, to: usize) -> Self {
        let open = |node: usize| {
            let client = Client::open(cluster.nodes[node].url()).unwrap();
            (client.get_connection().unwrap(), cluster.id(node))
        };
        Self { from: open(from), to: open(to), port: cluster.nodes[to].port() }
    }

    /// Keys that are there stay, and new ones go to the node that takes the slot over.
    fn open(&mut self, slots: Range<usize>) {
        let ((from, source), (to, target)) = (&mut self.from, &mut self.to);
        for slot in slots {
            let set = |state: &str, id: &str| {
                cmd("CLUSTER").arg("SETSLOT").arg(slot).arg(state).arg(id).to_owned()
            };
            set("IMPORTING", source).exec(to).unwrap();
            set("MIGRATING", target).exec(from).unwrap();
        }
    }

    /// Moves the keys, some at a time, while clients go on; then the slots.
    fn finish(&mut self, slots: Range<usize>) {
        let ((from, _), (to, target)) = (&mut self.from, &mut self.to);
        for slot in slots {
            loop {
                let some = cmd("CLUSTER").arg("GETKEYSINSLOT").arg(slot).arg(5).to_owned();
                let keys: Vec<String> = some.query(from).unwrap();
                if keys.is_empty() {
                    break;
                }
                let mut command = cmd("MIGRATE");
                command.arg("127.0.0.1").arg(self.port).arg("").arg(0).arg(5000).arg("KEYS");
                let moved: String = command.arg(keys).query(from).unwrap();
                // What was there for a moment may be gone.
                assert!(["OK", "NOKEY"].contains(&moved.as_str()), "{moved}");
            }
            for node in [&mut *to, &mut *from] {
                let set =
                    cmd("CLUSTER").arg("SETSLOT").arg(slot).arg("NODE").arg(&*target).exec(node);
                set.unwrap();
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c20_slots_that_move_back_and_forth_under_load_charge_nobody_twice() {
    const SLOTS: usize = 32;
    let cluster = RedisCluster::start(3, 0);
    let pair = pair_on(&cluster.url(), &["--wait", "1"]);
    // A large answer takes a second key for a moment: one of the two may be here, and the other one there.
    let sources = &["tok_large_8", "tok_visa", "tok_large_8", "tok_slow_60"];
    let crowd = Crowd::under_keys(&pair, 6, sources, keys_in(0..SLOTS));
    crowd.go_on(5).await;
    for round in 0..5 {
        let (from, to) = if round % 2 == 0 { (0, 1) } else { (1, 0) };
        let mut moving = Moving::between(&cluster, from, to);
        moving.open(0..SLOTS);
        // More than there are clients: so some of them began when it was open.
        crowd.go_on(8).await;
        moving.finish(0..SLOTS);
        crowd.go_on(3).await;
        // A node that takes a slot over may not know the scripts.
        cluster.nodes[from].cli(&["script", "flush"]);
    }
    crowd.go_on(10).await;
    crowd.finish().await;
    // TRYAGAIN takes a slot that opens within the milliseconds between the claim and the record of a large answer: most
    // runs meet it, and `c20_a_large_answer_is_stored_once_and_whole_while_its_slot_is_open` does for certain.
    let [moved, ask, again] = ["MOVED", "ASK", "TRYAGAIN"].map(|code| cluster.errors(code));
    println!("MOVED {moved}, ASK {ask}, TRYAGAIN {again}");
    assert!(moved > 0 && ask > 0, "a fault was never hit: MOVED {moved}, ASK {ask}");
    pair.check_at(&cluster.url(), Promise::AtMostOnce).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c20_a_cluster_without_a_majority_runs_nothing_and_pays_when_it_is_up_again() {
    let cluster = RedisCluster::start(3, 0);
    let pair = pair_on(&cluster.url(), &[]);
    let mut keys = keys_in(OF_THE_LAST);
    let (done, new) = (keys.next().unwrap(), keys.next().unwrap());
    is_paid(&pair.settled(&done, "tok_visa").await);
    let (gone, last) = cluster.nodes.split_at(2);
    gone.iter().for_each(RedisServer::stop);
    last[0].wait_until("the cluster is down", &["cluster", "info"], |said| {
        said.contains("cluster_state:fail")
    });
    for server in [&pair.one, &pair.two] {
        let asked = pair.history.ask(server.address, &new, "tok_visa", USUAL).await;
        let answer = asked.unwrap();
        is(&answer, 503, "idempotency_store_unavailable");
        assert!(answer.header("retry-after").is_some());
    }
    let errors = last[0].cli(&["info", "errorstats"]);
    assert!(errors.contains("errorstat_CLUSTERDOWN"), "the fault was never hit: {errors}");
    assert_eq!(pair.two.charges().await, 1);
    gone.iter().for_each(RedisServer::cont);
    for node in &cluster.nodes {
        node.wait_until("the cluster is up", &["cluster", "info"], |said| {
            said.contains("cluster_state:ok")
        });
    }
    is_paid(&pair.settled(&new, "tok_visa").await);
    assert!(pair.ask_two(&done, "tok_visa").await.is_replay());
    pair.check_at(&cluster.url(), Promise::AtMostOnce).await;
}

/// A cluster whose nodes are all reached through proxies, as their own map says.
async fn behind_proxies() -> (RedisCluster, Vec<Proxy>, String) {
    let cluster = RedisCluster::start(3, 0);
    let mut proxies = Vec::new();
    for node in &cluster.nodes {
        let proxy = Proxy::to(node.port()).await;
        let port = proxy.port().to_string();
        assert_eq!(node.cli(&["config", "set", "cluster-announce-port", &port]), "OK");
        proxies.push(proxy);
    }
    let named = |said: &str| {
        proxies.iter().all(|proxy| said.lines().any(|line| line == proxy.port().to_string()))
    };
    for node in &cluster.nodes {
        node.wait_until("the map names the proxies", &["cluster", "slots"], named);
    }
    let places: Vec<_> =
        proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
    let url = format!("redis+cluster://{}", places.join(","));
    (cluster, proxies, url)
}

/// The node did what it was asked and its reply is lost, for a claim and for a completion. Whoever sends again,
/// client library or server, says the same thing twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c25_what_is_sent_again_to_a_cluster_is_done_once() {
    let (cluster, proxies, url) = behind_proxies().await;
    let pair = pair_on(&url, &[]);
    let (node, proxy) = (&cluster.nodes[2], &proxies[2]);
    let mut keys = keys_in(OF_THE_LAST);
    let mut key = || keys.next().unwrap();
    let sources = [("set", "tok_visa"), ("evalsha", "tok_charge_then_slow_1000")];
    for (command, source) in sources {
        // Connections and scripts are there: what is cut off is the reply that is meant.
        is_paid(&pair.settled(&key(), "tok_visa").await);
        let (key, charged) = (key(), pair.two.charges().await);
        let calls = || node.calls_of(command);
        let mut before = calls();
        let running = if command == "set" {
            proxy.cut_after(Way::Down, 0);
            pair.pay(&key, source)
        } else {
            let running = pair.pay(&key, source);
            pair.charged(charged + 1).await;
            before = calls();
            proxy.cut_after(Way::Down, 0);
            running
        };
        let answer = running.await.unwrap().unwrap();
        assert!(proxy.hits() > 0, "the fault was never hit");
        assert!(calls() - before >= 2, "{command} was not done twice");
        assert_eq!(answer.status, 201, "{answer:?}");
        assert_eq!(answer.json()["attempt"], 1);
        assert_eq!(answer.header("idempotency-status"), None);
        assert!(pair.ask_two(&key, source).await.is_replay());
        assert_eq!(pair.two.charges().await, charged + 1);
    }
    pair.check_at(&url, Promise::AtMostOnce).await;
}
