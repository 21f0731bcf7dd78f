//! A cluster: every key on its node, whatever its text; slots that move and masters that die while
//! payments are made.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]
#![allow(clippy::wildcard_enum_match_arm, reason = "every other outcome fails the test")]

mod support;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use support::groups::{RedisCluster, slot_of};
use support::load::Load;
use support::log::Log;
use support::redis::RedisServer;
use support::store::{
    CALL_TIMEOUT, claim, completion, granted, is_replay, may_be_sent_again, name_of, new_key, works,
};
use tower_idempotency::record::{ClaimOutcome, CompleteOutcome};
use tower_idempotency::store::redis::Concern;
use tower_idempotency::{
    IdempotencyKey, Identity, KeySyntax, Lease, RedisStore, StorageKey, Store, StoreErrorKind,
};

const SECONDS: Duration = Duration::from_secs(15);

async fn connect(cluster: &RedisCluster, replicas: u32) -> RedisStore {
    let builder = RedisStore::builder().call_timeout(CALL_TIMEOUT).wait(replicas);
    builder.connect(&cluster.url()).await.unwrap()
}

#[tokio::test]
async fn b77_keys_of_any_text_are_spread_evenly_and_no_script_crosses_slots() {
    let cluster = RedisCluster::start(3, 0);
    let patient = RedisStore::builder().call_timeout(Duration::from_secs(20));
    let store = patient.connect(&cluster.url()).await.unwrap();
    let texts = ["{", "}", "{}", "{a}", "}{", "{a}b{c}", "idem:{x}", "~", "!", "*", "a:b"];
    let keys = (0..6_000).map(|number| {
        let text = texts[number % texts.len()];
        let caller = Identity::of_parts([format!("{text}{}", number % 97)]);
        let key = format!("{text}{number}");
        let key = IdempotencyKey::parse(key.as_bytes(), KeySyntax::default()).unwrap();
        StorageKey::new(&caller, &key)
    });
    let keys: Vec<StorageKey> = keys.collect();
    let runs = futures_util::stream::iter(keys).map(async |key| {
        let lease = granted(&store, key).await;
        let stored = store.complete(&lease, &completion(key.as_bytes())).await.unwrap();
        assert_eq!(stored, CompleteOutcome::Stored);
        assert!(is_replay(&store.claim(key, &claim()).await, key.as_bytes()));
    });
    runs.buffer_unordered(64).collect::<Vec<()>>().await;
    let sizes = cluster.nodes.iter().map(|node| node.cli(&["dbsize"]).parse::<i64>().unwrap());
    let sizes: Vec<_> = sizes.collect();
    println!("{sizes:?}");
    assert!(sizes.iter().all(|size| (size - 2_000).abs() < 200), "evenly: {sizes:?}");
    assert_eq!(cluster.errors("CROSSSLOT"), 0);
    assert_eq!(cluster.errors("MOVED"), 0, "every key is sought where it is");
    assert_eq!(store.check().await.unwrap(), [Concern::NotPersistent], "masters alike");
}

/// Keys whose slots are among these.
fn key_in(slots: &[usize]) -> StorageKey {
    loop {
        let key = new_key();
        if slots.contains(&slot_of(&key.to_text())) {
            return key;
        }
    }
}

/// Two of a kind come for one key. Exactly one may run.
async fn twins(store: &RedisStore, key: StorageKey) -> usize {
    let ends = Instant::now() + Duration::from_secs(30);
    let twin = async || {
        let (claim, answer) = (claim(), completion(key.as_bytes()));
        let mut ran = 0;
        let lease = loop {
            assert!(Instant::now() < ends, "a key is never served");
            match store.claim(key, &claim).await {
                Ok(ClaimOutcome::Acquired(lease)) => break lease,
                Ok(ClaimOutcome::Completed(stored)) => {
                    assert_eq!(stored, answer.response);
                    return ran;
                }
                Ok(ClaimOutcome::InFlight { .. }) => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Ok(other) => panic!("{other:?}"),
                Err(error) => drop(may_be_sent_again(&error).await),
            }
        };
        ran += 1;
        loop {
            assert!(Instant::now() < ends, "a key is never completed");
            match store.complete(&lease, &answer).await {
                Ok(CompleteOutcome::Stored) => return ran,
                Ok(other) => panic!("{other:?}"),
                Err(error) => drop(may_be_sent_again(&error).await),
            }
        }
    };
    let (one, other) = tokio::join!(twin(), twin());
    one + other
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c20_slots_that_move_back_and_forth_under_load_let_no_key_run_twice() {
    let cluster = RedisCluster::start(3, 0);
    let store = connect(&cluster, 0).await;
    let slots: Vec<usize> = (0..4).collect();
    let (done, runs) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let workers: Vec<_> = (0..6)
        .map(|_| {
            let (store, done, runs, slots) =
                (store.clone(), Arc::clone(&done), Arc::clone(&runs), slots.clone());
            tokio::spawn(async move {
                while !done.load(Ordering::Relaxed) {
                    let key = key_in(&slots);
                    assert_eq!(twins(&store, key).await, 1, "one of two twins runs");
                    runs.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let moving = tokio::task::spawn_blocking(move || {
        let mut moves = 0;
        for round in 0..6 {
            let (from, to) = if round % 2 == 0 { (0, 1) } else { (1, 0) };
            for &slot in &slots {
                cluster.move_slot(slot, from, to);
                moves += 1;
            }
            // A node that takes a slot over may not know the scripts.
            cluster.nodes[from].cli(&["script", "flush"]);
        }
        (cluster, moves)
    });
    let (cluster, moves) = moving.await.unwrap();
    done.store(true, Ordering::Relaxed);
    for worker in workers {
        worker.await.unwrap();
    }
    let (asked, moved) = (cluster.errors("ASK"), cluster.errors("MOVED"));
    let runs = runs.load(Ordering::Relaxed);
    println!("{moves} moves, {runs} keys, ASK {asked}, MOVED {moved}");
    assert!(asked > 0 && moved > 0 && runs > 50, "reached: ASK {asked}, MOVED {moved}, {runs}");
    works(&store).await;
}

/// How many keys of a slot a node has.
fn keys_in(node: &RedisServer, slot: usize) -> usize {
    node.cli(&["cluster", "getkeysinslot", &slot.to_string(), "100"]).lines().count()
}

/// A large answer takes a second key for a moment, beside its record. A slot that is open may have one of
/// the two here and the other one there.
#[tokio::test]
async fn c20_a_large_answer_is_stored_once_and_whole_while_its_slot_is_open() {
    const SLOT: usize = 7;
    let cluster = RedisCluster::start(3, 0);
    let patient = RedisStore::builder().call_timeout(Duration::from_secs(20));
    let store = patient.connect(&cluster.url()).await.unwrap();
    let (source, target) = (&cluster.nodes[0], &cluster.nodes[1]);
    let answers = ["at the source", "moved under the handler", "at the target"];
    let answers =
        answers.map(|text| (key_in(&[SLOT]), text.repeat(64 << 10)[..64 << 10].to_owned()));
    let [staying, moved, other_side] = &answers;
    let (mut tried_again, mut asked) = (0, 0);
    // How many answers of TRYAGAIN and ASK there were since this was called last.
    let mut counted = || {
        let now = (cluster.errors("TRYAGAIN"), cluster.errors("ASK"));
        let since = (now.0 - tried_again, now.1 - asked);
        (tried_again, asked) = now;
        since
    };
    let complete = async |lease: &Lease, (key, answer): &(StorageKey, String)| {
        // Sent once, and once more as after a lost reply.
        for _ in 0..2 {
            let stored = store.complete(lease, &completion(answer.as_bytes())).await.unwrap();
            assert_eq!(stored, CompleteOutcome::Stored);
        }
        assert!(is_replay(&store.claim(*key, &claim()).await, answer.as_bytes()));
    };

    let lease = granted(&store, moved.0).await;
    let of_staying = granted(&store, staying.0).await;
    cluster.open_slot(SLOT, 0, 1);

    // The record is here, and a new key has to go there.
    assert_eq!(counted(), (0, 0));
    complete(&of_staying, staying).await;
    let (tried_again, asked) = counted();
    assert!(tried_again >= 2 && asked >= 2, "reached: TRYAGAIN {tried_again}, ASK {asked}");
    assert_eq!((keys_in(source, SLOT), keys_in(target, SLOT)), (2, 0));

    let port = target.port().to_string();
    let name = name_of(moved.0);
    let done = source.cli(&["migrate", "127.0.0.1", &port, &name, "0", "5000"]);
    assert_eq!(done, "OK");
    complete(&lease, moved).await;
    assert_eq!((keys_in(source, SLOT), keys_in(target, SLOT)), (1, 1));

    let lease = granted(&store, other_side.0).await;
    complete(&lease, other_side).await;
    let (_, asked) = counted();
    // A claim for one, two completions and a replay for each; a SET that asks beside them is counted, too.
    assert!(asked >= 7, "reached: ASK {asked}");
    assert_eq!((keys_in(source, SLOT), keys_in(target, SLOT)), (1, 2));

    cluster.move_slot(SLOT, 0, 1);
    assert_eq!((keys_in(source, SLOT), keys_in(target, SLOT)), (0, 3), "nothing stays beside");
    for (key, answer) in &answers {
        assert!(is_replay(&store.claim(*key, &claim()).await, answer.as_bytes()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c12_a_master_killed_under_load_charges_nobody_twice_with_wait_on_its_replica() {
    let mut cluster = RedisCluster::start(3, 1);
    let load = Load::start(connect(&cluster, 1).await, 8);
    load.go_on(200).await;
    cluster.nodes[0].kill();
    let replica = &cluster.nodes[3];
    replica.wait_until("its replica takes over", &["role"], |said| said.starts_with("master"));
    // The old one comes back as a replica of the new one.
    cluster.nodes[0].restart();
    load.go_on(300).await;
    let report = load.finish().await;
    println!("{report:?}");
    assert!(report.refusals > 0, "the failover was noticed");
    assert!(report.longest_gap < SECONDS, "{report:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c12_a_master_that_hands_over_under_load_charges_nobody_twice() {
    let cluster = RedisCluster::start(3, 1);
    let load = Load::start(connect(&cluster, 1).await, 8);
    load.go_on(100).await;
    for now in [3, 0, 3] {
        let node = &cluster.nodes[now];
        let deadline = Instant::now() + Duration::from_secs(30);
        // A replica refuses while it is not in step, as it is for a moment after the last change.
        while !node.cli(&["role"]).starts_with("master") {
            assert!(Instant::now() < deadline, "it does not take over");
            node.cli(&["cluster", "failover"]);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        load.go_on(60).await;
    }
    let report = load.finish().await;
    println!("{report:?}");
    assert!(report.longest_gap < SECONDS, "{report:?}");
}

#[tokio::test]
async fn c20_a_shard_that_is_down_takes_only_its_own_keys_with_it() {
    let mut cluster = RedisCluster::start(3, 0);
    let store = connect(&cluster, 0).await;
    let first: Vec<usize> = (0..100).collect();
    let last: Vec<usize> = (16_000..16_384).collect();
    for slots in [&first, &last] {
        drop(granted(&store, key_in(slots)).await);
    }
    cluster.nodes[0].kill();
    for _ in 0..20 {
        let begun = Instant::now();
        let error = store.claim(key_in(&first), &claim()).await.unwrap_err();
        may_be_sent_again(&error).await;
        assert!(begun.elapsed() < 2 * CALL_TIMEOUT + Duration::from_secs(1));
        drop(granted(&store, key_in(&last)).await);
    }
    // One of three has no majority: it refuses, and says that nothing was done.
    cluster.nodes[1].kill();
    cluster.nodes[2].wait_until("the cluster is down", &["cluster", "info"], |said| {
        said.contains("cluster_state:fail")
    });
    let error = store.claim(key_in(&last), &claim()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    assert!(cluster.nodes[2].cli(&["info", "errorstats"]).contains("errorstat_CLUSTERDOWN"));
}

/// An address outlives its server. Another Redis that gets the one of a dead master would run everything anew that was
/// done there.
async fn the_dead_masters_address_is_taken_by(options: &[&str], its_keys_come_back: bool) {
    let mut cluster = RedisCluster::start(3, 1);
    let store = connect(&cluster, 0).await;
    let first: Vec<usize> = (0..5_000).collect();
    let last: Vec<usize> = (11_000..16_000).collect();
    let mut done = Vec::new();
    for _ in 0..20 {
        let key = key_in(&first);
        let lease = granted(&store, key).await;
        let stored = store.complete(&lease, &completion(b"paid")).await.unwrap();
        assert_eq!(stored, CompleteOutcome::Stored);
        done.push(key);
    }
    cluster.nodes[0].wait_for_replicas(1);
    let port = cluster.nodes[0].port();
    cluster.nodes[0].kill();
    if its_keys_come_back {
        // While it still follows that address, it would copy what is there.
        let replica = &cluster.nodes[3];
        replica.wait_until("its replica takes over", &["role"], |said| said.starts_with("master"));
    }
    let stranger = RedisServer::start_on_one_of(|| port, Path::new("redis-server"), options);
    if !options.is_empty() {
        stranger.cli(&["cluster", "addslotsrange", "0", "16383"]);
    }
    let ends = Instant::now() + SECONDS;
    let (mut told, mut rounds) = (0, 0);
    while !done.is_empty() && (its_keys_come_back || told == 0 || rounds < 20) {
        assert!(Instant::now() < ends, "{told} times told what is wrong, left {done:?}");
        let mut left = Vec::new();
        for key in done {
            match store.claim(key, &claim()).await {
                Ok(ClaimOutcome::Completed(_)) => {}
                Ok(other) => panic!("done, and given again: {other:?}"),
                Err(error) => {
                    told += usize::from(format!("{error:?}").contains("is not of the cluster"));
                    may_be_sent_again(&error).await;
                    left.push(key);
                }
            }
        }
        (done, rounds) = (left, rounds + 1);
        // Others are not disturbed.
        drop(granted(&store, key_in(&last)).await);
    }
    assert!(told > 0, "nobody says what is wrong with the server that is there");
    assert_eq!(done.is_empty(), its_keys_come_back);
    assert_eq!(stranger.cli(&["dbsize"]), "0", "nothing is written there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_has_the_address_of_a_dead_master_is_not_believed() {
    the_dead_masters_address_is_taken_by(&[], true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_another_cluster_that_has_the_address_of_a_dead_master_is_not_believed() {
    // The others take it for the dead one, and put nobody in its place.
    the_dead_masters_address_is_taken_by(&["--cluster-enabled", "yes"], false).await;
}

#[tokio::test]
async fn c19_scripts_forgotten_by_every_node_under_load_disturb_nobody() {
    let cluster = RedisCluster::start(3, 0);
    let load = Load::start(connect(&cluster, 0).await, 8);
    for _ in 0..10 {
        load.go_on(20).await;
        for node in &cluster.nodes {
            node.cli(&["script", "flush"]);
        }
    }
    let report = load.finish().await;
    println!("{report:?}");
    assert!(cluster.errors("NOSCRIPT") > 0);
    assert_eq!((report.unknown, report.refusals), (0, 0), "{report:?}");
}

#[tokio::test]
async fn a_right_that_the_user_lacks_on_one_node_is_told_as_that() {
    let cluster = RedisCluster::start(3, 0);
    for (number, node) in cluster.nodes.iter().enumerate() {
        let right = if number == 1 { "-cluster" } else { "+cluster" };
        node.cli(&["acl", "setuser", "pay", "on", ">right", "~*", "+@all", right]);
    }
    let url = format!("redis+cluster://pay:right@127.0.0.1:{}", cluster.nodes[0].port());
    let error = RedisStore::connect(&url).await.unwrap_err();
    let said = format!("{error} {error:?}");
    assert_eq!(error.kind(), StoreErrorKind::Backend, "{said}");
    assert!(said.contains("cluster|slots") && !said.contains("is not of the cluster"), "{said}");
}

#[tokio::test]
async fn a_cluster_that_is_gone_is_told_of_once_and_not_with_every_look() {
    let (log, _guard) = Log::install(tracing::Level::INFO);
    let mut cluster = RedisCluster::start(3, 0);
    let store = connect(&cluster, 0).await;
    works(&store).await;
    cluster.nodes.iter_mut().for_each(RedisServer::kill);
    let (mut said, begun) = (String::new(), Instant::now());
    // So many looks, one each tenth of a second at most.
    while begun.elapsed() < Duration::from_secs(2) {
        may_be_sent_again(&store.claim(new_key(), &claim()).await.unwrap_err()).await;
        said += &log.take();
    }
    assert_eq!(said.matches("says who has which slots").count(), 1, "{said}");
}

#[tokio::test]
async fn what_is_no_cluster_is_told_apart() {
    let single = RedisServer::start();
    let url = format!("redis+cluster://127.0.0.1:{}", single.port());
    let error = RedisStore::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Backend, "{error:?}");
    let absent = format!("redis+cluster://127.0.0.1:{}", support::redis::free_port());
    let begun = Instant::now();
    let error = RedisStore::connect(&absent).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error:?}");
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());

    // One of the seeds is enough.
    let cluster = RedisCluster::start(3, 0);
    let url = format!("{absent},127.0.0.1:{}", cluster.nodes[1].port());
    let store = RedisStore::connect(&url).await.unwrap();
    let mut spread: HashMap<String, usize> = HashMap::new();
    for _ in 0..30 {
        drop(granted(&store, new_key()).await);
    }
    for node in &cluster.nodes {
        *spread.entry(node.cli(&["dbsize"])).or_default() += 1;
    }
    assert!(!spread.contains_key("0"), "{spread:?}");
}
