//! The sandbox under load, killed at random moments, with key, ledger and answer in one transaction:
//! for every key that any client saw succeed there is one row, for no key two, and what was told is
//! what is stored.
//!
//! `KILLS` sets the number of kills for each database: the promise is for 300, a usual run has fewer.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::Rng as _;
use sha2::{Digest as _, Sha256};

#[path = "support/postgres.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod postgres;
#[path = "support/sandbox.rs"]
mod sandbox;

use postgres::PostgresServer;
use sandbox::{Call, Connection, Sandbox};

/// Pairs of clients with the same keys, so that each key has a twin.
const PAIRS: usize = 4;
/// As many kills as fit into a usual run.
const KILLS: usize = 20;
/// What clients do between two tries.
const PAUSE: Duration = Duration::from_millis(10);

/// What all clients know of each other.
#[derive(Default)]
struct Shared {
    address: Mutex<Option<SocketAddr>>,
    stop: AtomicBool,
    /// The first success that was told for each key.
    told: Mutex<BTreeMap<String, Vec<u8>>>,
    cut: AtomicUsize,
}

fn kills() -> usize {
    std::env::var("KILLS").map_or(KILLS, |kills| kills.parse().expect("a number"))
}

fn source(n: usize) -> &'static str {
    ["tok_visa", "tok_slow_5", "tok_charge_then_slow_5", "tok_large_3"][n % 4]
}

/// Pays under one key after the other, each until it succeeds.
async fn client(shared: Arc<Shared>, pair: usize) {
    for n in 0.. {
        let key = format!("pair-{pair}-{n}");
        loop {
            if shared.stop.load(Ordering::SeqCst) {
                return;
            }
            let Some(address) = *shared.address.lock().unwrap() else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let answer = match Connection::open(address).await {
                Ok(mut connection) => connection.send(Call::pay(&key, source(n))).await.ok(),
                Err(_) => None,
            };
            match answer {
                Some(answer) if answer.status == 201 => {
                    let mut told = shared.told.lock().unwrap();
                    let first = told.entry(key.clone()).or_insert_with(|| answer.body.to_vec());
                    assert!(*first == answer.body, "{key}: two different successes");
                    break;
                }
                Some(answer) => {
                    let status = answer.status.as_u16();
                    assert!(matches!(status, 409 | 500 | 503), "{key}: {answer:?}");
                }
                None => {
                    shared.cut.fetch_add(1, Ordering::Relaxed);
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

async fn survives(start: impl Fn() -> Sandbox) {
    let shared = Arc::new(Shared::default());
    let clients: Vec<_> =
        (0..2 * PAIRS).map(|n| tokio::spawn(client(Arc::clone(&shared), n / 2))).collect();
    for _ in 0..kills() {
        let mut sandbox = start();
        *shared.address.lock().unwrap() = Some(sandbox.address);
        let life = rand::rng().random_range(5..150);
        tokio::time::sleep(Duration::from_millis(life)).await;
        sandbox.signal("KILL");
        sandbox.ended();
        *shared.address.lock().unwrap() = None;
    }
    let last = start();
    *shared.address.lock().unwrap() = Some(last.address);
    tokio::time::sleep(Duration::from_millis(500)).await;
    shared.stop.store(true, Ordering::SeqCst);
    for client in clients {
        client.await.unwrap();
    }

    let ledger = last.ledger().await;
    let mut rows = BTreeMap::<String, usize>::new();
    for entry in ledger["entries"].as_array().unwrap() {
        *rows.entry(entry["key_id"].as_str().unwrap().to_owned()).or_default() += 1;
    }
    let doubled: Vec<_> = rows.iter().filter(|(_, rows)| **rows > 1).collect();
    assert!(doubled.is_empty(), "{doubled:?}");
    let told = std::mem::take(&mut *shared.told.lock().unwrap());
    let cut = shared.cut.load(Ordering::Relaxed);
    println!("{} kills: {} keys succeeded, {cut} tries were cut", kills(), told.len());
    assert!(told.len() > kills() && cut > kills(), "there was load");
    for (key, body) in &told {
        let digest = Sha256::digest(key);
        let id: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(rows.get(&id), Some(&1), "{key}");
        let n: usize = key.rsplit('-').next().unwrap().parse().unwrap();
        let replay = last.send(Call::pay(key, source(n))).await;
        assert!(replay.is_replay() && replay.body == body, "{key}: {replay:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whenever_the_sandbox_is_killed_sqlite_has_each_payment_once() {
    let folder = tempfile::tempdir().unwrap();
    let ledger = folder.path().join("ledger.db");
    survives(|| Sandbox::start_on(&ledger, &[])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whenever_the_sandbox_is_killed_postgres_has_each_payment_once() {
    let (_server, url) = PostgresServer::shared();
    survives(|| Sandbox::start_with_store(&["--store", &url])).await;
}
