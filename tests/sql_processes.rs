//! The sandbox as processes of their own on an SQL store: what is killed at a boundary of the transaction,
//! what two processes do with one file, and what a database that is locked, frozen by its operator or not
//! there at all does to a request. (B88, B94, B95; fault matrix, D11 and D13.)
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use http::Method;
use sha2::{Digest as _, Sha256};
use sqlx::postgres::{PgPool, PgPoolOptions};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tower_idempotency::store::sql::sqlx;

#[path = "support/breaking.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod breaking;
#[path = "support/postgres.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod postgres;
#[path = "support/sandbox.rs"]
mod sandbox;

use breaking::{Breaking, Fault};
use postgres::PostgresServer;
use sandbox::{Answer, Call, Connection, Sandbox, refused};

/// A request is answered within this, whatever the store does.
const ANSWERED: Duration = Duration::from_secs(10);

struct World {
    server: Arc<PostgresServer>,
    url: String,
    way: Breaking,
    watch: PgPool,
}

impl World {
    async fn new() -> Self {
        let (server, url) = PostgresServer::shared();
        let watch = PgPoolOptions::new().max_connections(3).connect(&url).await.unwrap();
        let way = Breaking::to(server.port()).await;
        Self { server, url, way, watch }
    }

    fn start(&self) -> Sandbox {
        Sandbox::start_with_store(&["--store", &self.url, "--wait", "0"])
    }

    /// One that reaches its database by the way that breaks.
    fn start_by_the_way(&self) -> Sandbox {
        let url = self.way.url(&self.url, self.server.port());
        Sandbox::start_with_store(&["--store", &url])
    }

    /// How many backends of this database are idle in a transaction, behind such a statement.
    async fn open(&self, like: &'static str) -> i64 {
        let open = "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()
                       AND state LIKE 'idle in transaction%' AND query LIKE $1";
        sqlx::query_scalar(open).bind(like).fetch_one(&self.watch).await.unwrap()
    }
}

async fn until(what: &str, mut reached: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !reached().await {
        assert!(Instant::now() < end, "{what}: not within 20 seconds");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// How often this key charged.
async fn rows(sandbox: &Sandbox, key: &str) -> usize {
    let digest = Sha256::digest(key);
    let id: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    let ledger = sandbox.ledger().await;
    let entries = ledger["entries"].as_array().unwrap();
    entries.iter().filter(|entry| entry["key_id"] == id.as_str()).count()
}

/// Sends until it is charged, as a client would.
async fn until_charged(sandbox: &Sandbox, key: &str, source: &str) -> Answer {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let answer = sandbox.send(Call::pay(key, source)).await;
        let status = answer.status.as_u16();
        if status == 201 {
            return answer;
        }
        assert!(matches!(status, 409 | 503) && Instant::now() < end, "{answer:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

// ---- B88: SIGKILL at each boundary of the transaction

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_killed_at_a_boundary_of_its_transaction_has_done_all_or_nothing() {
    for (boundary, source, fault, done) in [
        ("after the claim", "tok_slow_20000", None, false),
        ("after the effect", "tok_charge_then_slow_20000", None, false),
        ("before the COMMIT", "tok_visa", Some(Fault::RequestHeld), false),
        ("after the COMMIT", "tok_visa", Some(Fault::ReplySwallowed), true),
    ] {
        let world = World::new().await;
        let (mut owner, other) = (world.start_by_the_way(), world.start());
        if let Some(fault) = fault {
            world.way.arm(fault);
        }
        let mut first = owner.connect().await;
        let sent = tokio::spawn(async move { first.send(Call::pay("k", source)).await });
        until(boundary, async || match boundary {
            "after the claim" => world.open("%SAVEPOINT idempotency_claim%").await == 1,
            "after the effect" => world.open("%FROM payments WHERE payment%").await == 1,
            "before the COMMIT" => world.way.met() == 1,
            _ => rows(&other, "k").await == 1,
        })
        .await;
        // A duplicate meets the open transaction, or what came of it.
        let duplicate = other.send(Call::pay("k", source)).await;
        let told = (duplicate.status.as_u16(), duplicate.is_replay());
        assert_eq!(
            told,
            if done { (201, true) } else { (409, false) },
            "{boundary}: {duplicate:?}"
        );
        owner.signal("KILL");
        owner.ended();
        assert!(sent.await.unwrap().is_err(), "{boundary}: nobody was told");
        assert_eq!(rows(&other, "k").await, usize::from(done), "{boundary}");
        // The same request, by a card that is not slow: that is no longer of interest here.
        if source == "tok_visa" {
            let retry = until_charged(&other, "k", source).await;
            assert_eq!(retry.is_replay(), done, "{boundary}");
        } else {
            // The key is free, also for another request: nothing is left of the first.
            until_charged(&other, "k", "tok_visa").await;
        }
        assert_eq!(rows(&other, "k").await, 1, "{boundary}");
    }
}

// ---- B94: sockets that are closed at any moment, before a database that is far away

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sockets_closed_at_any_moment_leave_no_open_transaction() {
    let world = World::new().await;
    let sandbox = world.start_by_the_way();
    world.way.delay(Duration::from_millis(10));
    let address = sandbox.address;
    let left = (0..40u64).map(|n| async move {
        let mut socket = TcpStream::connect(address).await.unwrap();
        let body = r#"{"amount":1999,"currency":"usd","source":"tok_visa"}"#;
        let head = format!(
            "POST /v1/payments HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk_test_acme\r\n\
             Content-Type: application/json\r\nIdempotency-Key: l{n}\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        socket.write_all(head.as_bytes()).await.unwrap();
        tokio::time::sleep(Duration::from_millis(n * 5)).await;
    });
    drop(join_all(left).await);
    until("the detached runs", async || world.open("%").await == 0).await;
    world.way.delay(Duration::ZERO);
    for n in 0..40 {
        let key = format!("l{n}");
        until_charged(&sandbox, &key, "tok_visa").await;
        assert_eq!(rows(&sandbox, &key).await, 1, "{key}");
    }
    assert_eq!(world.open("%").await, 0);
}

// ---- D11, B95: two processes, one file

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_write_one_file_beside_a_long_reader_and_a_strangers_transaction() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ledger.db");
    let both = [Sandbox::start_on(&file, &[]), Sandbox::start_on(&file, &[])];
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(&file);
    let outside = sqlx::SqlitePool::connect_with(options).await.unwrap();
    let mut reader = outside.begin().await.unwrap();
    let count = "SELECT COUNT(*) FROM ledger";
    let before: i64 = sqlx::query_scalar(count).fetch_one(&mut *reader).await.unwrap();
    let stranger = outside.begin_with("BEGIN IMMEDIATE").await.unwrap();
    let storm = (0..80).map(|n| {
        let sandbox = &both[n % 2];
        async move { until_charged(sandbox, &format!("k{}", n / 2), "tok_visa").await }
    });
    let (told, ()) = tokio::join!(join_all(storm), async {
        // Longer than any of them tries at once, shorter than they wait.
        tokio::time::sleep(Duration::from_millis(500)).await;
        stranger.rollback().await.unwrap();
    });
    assert_eq!(told.iter().filter(|answer| !answer.is_replay()).count(), 40);
    let seen: i64 = sqlx::query_scalar(count).fetch_one(&mut *reader).await.unwrap();
    reader.rollback().await.unwrap();
    let after: i64 = sqlx::query_scalar(count).fetch_one(&outside).await.unwrap();
    assert_eq!((before, seen, after), (0, 0, 40));
}

// ---- A database that is locked, that only reads, that is not there

fn charge() -> Call {
    Call::new(Method::POST, "/v1/charges")
        .account("acme")
        .form("amount=100&currency=usd&source=tok_visa")
}

async fn in_time(connection: &mut Connection, call: Call) -> u16 {
    let began = Instant::now();
    let answer = connection.send(call).await.unwrap();
    assert!(began.elapsed() < ANSWERED, "{:?}", began.elapsed());
    answer.status.as_u16()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_ledger_is_503_in_time_with_a_key_or_without_and_starves_nobody_after() {
    let world = World::new().await;
    let sandbox = world.start();
    let mut lock = world.watch.begin().await.unwrap();
    sqlx::raw_sql("LOCK TABLE ledger IN ACCESS EXCLUSIVE MODE").execute(&mut *lock).await.unwrap();
    let mut calls = vec![charge(); 12];
    calls.push(Call::get("/v1/ledger"));
    calls.extend((0..3).map(|n| Call::pay(&format!("k{n}"), "tok_visa")));
    let told = join_all(calls.into_iter().map(async |call| {
        let mut connection = sandbox.connect().await;
        in_time(&mut connection, call).await
    }));
    let told = told.await;
    assert!(told.iter().all(|&status| status == 503), "{told:?}");
    lock.rollback().await.unwrap();
    assert_eq!(sandbox.send(charge()).await.status, 200);
    until_charged(&sandbox, "k0", "tok_visa").await;
    assert_eq!(sandbox.charges().await, 2, "what was refused is not done later");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_the_table_of_keys_is_locked_as_a_whole_new_keys_are_503_and_what_stands_is_replayed()
{
    let world = World::new().await;
    let sandbox = world.start();
    until_charged(&sandbox, "before", "tok_visa").await;
    let mut lock = world.watch.begin().await.unwrap();
    // As CREATE INDEX takes it.
    let text = "LOCK TABLE idempotency_records IN SHARE MODE";
    sqlx::raw_sql(text).execute(&mut *lock).await.unwrap();
    let refused = sandbox.send(Call::pay("new", "tok_visa")).await;
    assert_eq!(refused.code(), "idempotency_store_unavailable", "{refused:?}");
    assert!(sandbox.send(Call::pay("before", "tok_visa")).await.is_replay());
    lock.rollback().await.unwrap();
    until_charged(&sandbox, "new", "tok_visa").await;
    assert_eq!(sandbox.charges().await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_its_operator_froze_takes_no_payment_with_a_key_or_without() {
    let world = World::new().await;
    let sandbox = world.start();
    until_charged(&sandbox, "before", "tok_visa").await;
    let name = world.url.split(['/', '?']).nth(3).unwrap();
    let set = |how: &str| {
        world.server.psql(&format!("ALTER DATABASE {name} {how}"));
        // It counts for new connections.
        let others = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = ";
        world.server.psql(&format!("{others}'{name}'"));
    };
    set("SET default_transaction_read_only = on");
    for call in [Call::pay("k", "tok_visa"), charge()] {
        assert_eq!(sandbox.send(call).await.status, 503);
    }
    assert!(sandbox.send(Call::pay("before", "tok_visa")).await.is_replay());
    let not_ready = sandbox.send(Call::get("/readyz")).await;
    assert_eq!(not_ready.status, 503, "{not_ready:?}");
    let reason = not_ready.json()["reason"].to_string();
    assert!(reason.contains("default_transaction_read_only is on"), "{reason}");
    assert_eq!(sandbox.charges().await, 1);
    set("RESET default_transaction_read_only");
    assert!(!until_charged(&sandbox, "k", "tok_visa").await.is_replay(), "its key was free");
    assert_eq!(sandbox.send(Call::get("/readyz")).await.status, 200);
}

#[tokio::test]
async fn a_store_that_cannot_be_reached_is_reported_by_its_reason_and_once() {
    let (server, _) = PostgresServer::shared();
    for (url, reason) in [
        ("postgres://test@127.0.0.1:1/d".to_owned(), "Connection refused"),
        (
            format!("postgres://test@127.0.0.1:{}/nothing", server.port()),
            "\"nothing\" does not exist",
        ),
        ("postgres://test@nowhere.invalid/d".to_owned(), "failed to lookup address"),
    ] {
        let began = Instant::now();
        let (code, said) = refused(&["--store", &url], &[]);
        assert_eq!((code, said.matches(reason).count()), (Some(1), 1), "{said}");
        assert!(began.elapsed() < Duration::from_secs(20));
    }
}
