//! What can go wrong between a transaction and its database: conflicts, connections that break at any
//! moment, a COMMIT whose reply is lost, a paused server, twins that would use the pool up. Effects are
//! counted in a table without any unique constraint.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Postgres, Sqlite};
use support::breaking::{Breaking, Fault};
use support::log::Log;
use support::postgres::PostgresServer;
use tokio::sync::Barrier;
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::store::sql::{Backend, Isolation, Tx, sqlx};
use tower_idempotency::{
    Config, ConfigBuilder, IdempotencyLayer, PostgresStore, Scope, SqliteStore, Store,
};

const TABLES: &str = "
    CREATE TABLE effects (id INTEGER, what TEXT);
    CREATE TABLE accounts (name TEXT PRIMARY KEY, balance BIGINT NOT NULL);
    INSERT INTO accounts VALUES ('A', 1000), ('B', 1000);
";
const PAY: &str = "INSERT INTO effects (id, what) VALUES (1, 'paid')";

type Reply = Response<Full<Bytes>>;
type Send = Arc<dyn Fn(&str) -> BoxFuture<'static, (u16, bool, String)> + std::marker::Send + Sync>;

/// One process with a handler around which a store stands. Answers with status, "is a replay", body.
fn serve<DB, H, F>(config: ConfigBuilder, store: impl Store, handler: H) -> Send
where
    DB: Backend,
    H: Fn(Tx<DB>, String) -> F + Clone + std::marker::Send + Sync + 'static,
    F: Future<Output = Reply> + std::marker::Send + 'static,
{
    let handler = service_fn(move |request: Request<Full<Bytes>>| {
        let tx = Tx::take(request.extensions()).unwrap();
        let key = request.headers()["idempotency-key"].to_str().unwrap().to_owned();
        let handling = handler(tx, key);
        drop(request);
        async move { Ok::<_, Infallible>(handling.await) }
    });
    let service = IdempotencyLayer::new(config.build().unwrap(), store).layer(handler);
    Arc::new(move |key: &str| {
        let request = Request::post("/pay").header("idempotency-key", key);
        let request = request.body(Full::default()).unwrap();
        let service = service.clone();
        async move {
            let (head, body) = service.oneshot(request).await.unwrap().into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let replayed = head.headers.contains_key("idempotent-replayed");
            (head.status.as_u16(), replayed, String::from_utf8_lossy(&body).into_owned())
        }
        .boxed()
    })
}

fn answer(status: u16) -> Reply {
    Response::builder().status(status).body(Full::default()).unwrap()
}

fn config() -> ConfigBuilder {
    Config::builder().scope(Scope::global())
}

async fn run(tx: &mut Tx<Postgres>, sql: &str) -> sqlx::Result<()> {
    sqlx::query(AssertSqlSafe(sql.to_owned())).execute(tx).await.map(drop)
}

/// A handler that pays, and answers 500 when it cannot.
async fn pay(mut tx: Tx<Postgres>, _: String) -> Reply {
    answer(if run(&mut tx, PAY).await.is_ok() { 201 } else { 500 })
}

async fn database() -> (Arc<PostgresServer>, String, PgPool) {
    let (server, url) = PostgresServer::shared();
    let pool = pool(&url, 10).await;
    PostgresStore::from_pool(pool.clone()).migrate().await.unwrap();
    sqlx::raw_sql(TABLES).execute(&pool).await.unwrap();
    (server, url, pool)
}

async fn pool(url: &str, size: u32) -> PgPool {
    PgPoolOptions::new().max_connections(size).connect(url).await.unwrap()
}

async fn count(pool: &PgPool, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
}

async fn effects(pool: &PgPool) -> i64 {
    count(pool, "SELECT COUNT(*) FROM effects").await
}

/// Sends until the answer is final, as a client would.
async fn until_done(send: &Send, key: &str) -> (u16, bool, String) {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let answer = send(key).await;
        if answer.0 < 400 {
            return answer;
        }
        assert!(matches!(answer.0, 409 | 503), "{answer:?}");
        assert!(Instant::now() < end, "{answer:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

// ---- D1, B92: conflicts

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transfers_in_opposite_order_end_well_whatever_the_isolation() {
    for isolation in [Isolation::ReadCommitted, Isolation::Serializable] {
        let (_server, url, watch) = database().await;
        // So that a deadlock costs no time.
        let soon = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = 5',
                    current_database()); END $$";
        sqlx::raw_sql(soon).execute(&watch).await.unwrap();
        let pool = pool(&url, 10).await;
        let store = PostgresStore::builder(pool.clone()).isolation(isolation).build();
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&runs);
        let send = serve(config(), store, move |mut tx, key| {
            counted.fetch_add(1, Ordering::SeqCst);
            async move {
                let (from, to) = if key.starts_with('a') { ("A", "B") } else { ("B", "A") };
                for (name, amount) in [(from, -1), (to, 1)] {
                    let change = format!(
                        "UPDATE accounts SET balance = balance + {amount} WHERE name = '{name}'"
                    );
                    if run(&mut tx, &change).await.is_err() {
                        return answer(500);
                    }
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                pay(tx, key).await
            }
        });
        for round in 0..100 {
            let keys = [format!("a{round}"), format!("b{round}")];
            let told = join_all(keys.iter().chain([&keys[0]]).map(|key| until_done(&send, key)));
            assert!(told.await.iter().all(|told| told.0 == 201));
        }
        assert_eq!(effects(&pool).await, 200);
        assert_eq!(count(&pool, "SELECT MIN(balance) FROM accounts").await, 1000);
        let runs = runs.load(Ordering::SeqCst);
        assert!(runs > 200, "no conflict was met: {runs} runs");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unit_that_conflicts_every_time_runs_four_times_then_is_503_and_its_key_free() {
    for code in ["40001", "40P01"] {
        let (_server, _, pool) = database().await;
        let conflicts =
            format!("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$");
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&runs);
        let send = serve(config(), PostgresStore::from_pool(pool.clone()), move |mut tx, key| {
            let run_number = counted.fetch_add(1, Ordering::SeqCst);
            let conflicts = conflicts.clone();
            async move {
                run(&mut tx, PAY).await.unwrap();
                if run_number < 4 && run(&mut tx, &conflicts).await.is_err() {
                    return answer(500);
                }
                pay(tx, key).await
            }
        });
        let told = send("k").await;
        assert_eq!((told.0, told.1), (503, false), "{told:?}");
        assert!(told.2.contains("idempotency_store_unavailable"), "{told:?}");
        assert_eq!(runs.load(Ordering::SeqCst), 4);
        let records = "SELECT COUNT(*) FROM idempotency_records";
        assert_eq!((effects(&pool).await, count(&pool, records).await), (0, 0));
        assert_eq!(send("k").await.0, 201, "the key is free");
        assert_eq!(effects(&pool).await, 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deferred_constraint_that_fails_at_commit_leaves_nothing_and_a_free_key() {
    let (_server, _, pool) = database().await;
    let deferred = "CREATE TABLE strict (id INTEGER UNIQUE DEFERRABLE INITIALLY DEFERRED);
                    INSERT INTO strict VALUES (1)";
    sqlx::raw_sql(deferred).execute(&pool).await.unwrap();
    let send = serve(config(), PostgresStore::from_pool(pool.clone()), |mut tx, key| async move {
        run(&mut tx, "INSERT INTO strict VALUES (1)").await.unwrap();
        pay(tx, key).await
    });
    assert_eq!(send("k").await.0, 503);
    assert_eq!(effects(&pool).await, 0);
    assert_eq!(count(&pool, "SELECT COUNT(*) FROM idempotency_records").await, 0);
    sqlx::query("DELETE FROM strict").execute(&pool).await.unwrap();
    assert_eq!(send("k").await.0, 201);
    assert_eq!(effects(&pool).await, 1);
}

// ---- D2, D3, D5: connections that break

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_reply_is_lost_is_found_and_answered_with_what_is_stored() {
    let (server, url, watch) = database().await;
    let breaking = Breaking::to(server.port()).await;
    let url = breaking.url(&url, server.port());
    let store = PostgresStore::from_pool(pool(&url, 5).await);
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let send = serve(config(), store, move |tx, key| {
        counted.fetch_add(1, Ordering::SeqCst);
        pay(tx, key)
    });
    for n in 0..5 {
        breaking.arm(Fault::ReplyLost);
        let told = send(&format!("k{n}")).await;
        assert_eq!(breaking.met(), n + 1, "the fault was met");
        assert_eq!((told.0, told.1), (201, false), "{told:?}");
    }
    assert_eq!((effects(&watch).await, runs.load(Ordering::SeqCst)), (5, 5));
    assert!(send("k0").await.1, "and it is on record");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrived_runs_the_unit_again() {
    let (server, url, watch) = database().await;
    let breaking = Breaking::to(server.port()).await;
    let url = breaking.url(&url, server.port());
    let store = PostgresStore::from_pool(pool(&url, 5).await);
    let send = serve(config(), store, pay);
    for n in 0..5 {
        breaking.arm(Fault::RequestLost);
        let told = send(&format!("k{n}")).await;
        assert_eq!(breaking.met(), n + 1, "the fault was met");
        assert_eq!((told.0, told.1), (201, false), "{told:?}");
    }
    assert_eq!(effects(&watch).await, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_that_is_terminated_under_the_handler_runs_the_unit_again() {
    let (_server, _, pool) = database().await;
    let watch = pool.clone();
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let send = serve(config(), PostgresStore::from_pool(pool.clone()), move |mut tx, key| {
        let (first, watch) = (counted.fetch_add(1, Ordering::SeqCst) == 0, watch.clone());
        async move {
            run(&mut tx, PAY).await.unwrap();
            if first {
                let pid: i32 =
                    sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut tx).await.unwrap();
                let end = format!("SELECT pg_terminate_backend({pid}, 2000)");
                sqlx::query(AssertSqlSafe(end)).execute(&watch).await.unwrap();
            }
            pay(tx, key).await
        }
    });
    let told = send("k").await;
    assert_eq!((told.0, told.1), (201, false), "{told:?}");
    assert_eq!((effects(&pool).await, runs.load(Ordering::SeqCst)), (2, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stops_at_once_and_comes_back_has_every_effect_once() {
    let mut server = PostgresServer::start_with(&["fsync=on"]);
    let pool = pool(&server.url(), 5).await;
    PostgresStore::from_pool(pool.clone()).migrate().await.unwrap();
    sqlx::raw_sql(TABLES).execute(&pool).await.unwrap();
    let send = serve(config(), PostgresStore::from_pool(pool.clone()), pay);
    let storm: Vec<_> = (0..40)
        .map(|n| {
            let send = Arc::clone(&send);
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(n * 10)).await;
                until_done(&send, &format!("k{n}")).await
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.stop_at_once();
    tokio::time::sleep(Duration::from_millis(300)).await;
    server.restart();
    for request in storm {
        assert_eq!(request.await.unwrap().0, 201);
    }
    assert_eq!(effects(&pool).await, 40);
}

// ---- D6: a server that does not go on

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_leaves_its_transaction_alone_for_too_long_loses_the_key() {
    let (_server, _, pool) = database().await;
    let store =
        PostgresStore::builder(pool.clone()).idle_timeout(Duration::from_millis(300)).build();
    let paused = serve(config(), store, |mut tx, key| async move {
        run(&mut tx, PAY).await.unwrap();
        tokio::time::sleep(Duration::from_millis(900)).await;
        pay(tx, key).await
    });
    let other = serve(config(), PostgresStore::from_pool(pool.clone()), pay);
    let first = tokio::spawn(paused("k"));
    tokio::time::sleep(Duration::from_millis(100)).await;
    // Another process waits for it, and then runs.
    let told = other("k").await;
    assert_eq!((told.0, told.1), (201, false), "{told:?}");
    let late = first.await.unwrap();
    // Its own answer speaks of writes that are gone. Where the driver meets only the end of the connection
    // and not its reason, the unit runs again, and finds the other's answer.
    assert!(late.0 == 500 || (late.0, late.1) == (201, true), "{late:?}");
    assert!(paused("k").await.1);
    assert_eq!(effects(&pool).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_server_is_answered_for_within_bounds_and_pays_once_when_it_goes_on() {
    let server = PostgresServer::start();
    let pool = pool(&server.url(), 5).await;
    PostgresStore::from_pool(pool.clone()).migrate().await.unwrap();
    sqlx::raw_sql(TABLES).execute(&pool).await.unwrap();
    let store =
        PostgresStore::builder(pool.clone()).statement_timeout(Duration::from_secs(2)).build();
    let frozen = Arc::new(tokio::sync::Notify::new());
    let wait = Arc::clone(&frozen);
    let runs = Arc::new(AtomicUsize::new(0));
    let send = serve(config(), store, move |mut tx, key| {
        let wait = Arc::clone(&wait);
        let first = runs.fetch_add(1, Ordering::SeqCst) == 0;
        async move {
            run(&mut tx, PAY).await.unwrap();
            if first {
                wait.notified().await;
            }
            pay(tx, key).await
        }
    });
    let within = tokio::spawn(send("within"));
    tokio::time::sleep(Duration::from_millis(300)).await;
    server.freeze();
    let began = Instant::now();
    frozen.notify_one();
    let (within, new) = tokio::join!(within, send("new"));
    let took = began.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    for told in [within.unwrap(), new] {
        assert!(matches!(told.0, 409 | 503), "{told:?}");
    }
    server.thaw();
    for key in ["within", "new"] {
        let told = until_done(&send, key).await;
        assert_eq!(told.0, 201);
    }
    assert_eq!(effects(&pool).await, 4);
}

// ---- D10: the pool

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_twins_never_use_up_a_pool_of_five() {
    let (_server, url, watch) = database().await;
    let three_statements = |mut tx: Tx<Postgres>, key: String| async move {
        for _ in 0..2 {
            tokio::time::sleep(Duration::from_millis(150)).await;
            run(&mut tx, PAY).await.unwrap();
        }
        pay(tx, key).await
    };
    // Two processes, each with a pool of its own.
    let one = serve(config(), PostgresStore::from_pool(pool(&url, 5).await), three_statements);
    let two = serve(config(), PostgresStore::from_pool(pool(&url, 5).await), three_statements);
    for round in 0..3 {
        let key = format!("k{round}");
        let twins = (0..50).map(|n| if n % 2 == 0 { one(&key) } else { two(&key) });
        let others = (0..6).map(|n| {
            let (send, key) = (Arc::clone(&two), format!("other-{round}-{n}"));
            async move {
                tokio::time::sleep(Duration::from_millis(50)).await;
                send(&key).await
            }
        });
        let began = Instant::now();
        let (twins, others) = tokio::join!(join_all(twins), join_all(others));
        let stalled = began.elapsed();
        assert!(stalled < Duration::from_secs(2), "{stalled:?}");
        assert!(twins.iter().all(|told| told.0 == 201), "{twins:?}");
        assert_eq!(twins.iter().filter(|told| !told.1).count(), 1, "one run");
        assert!(others.iter().all(|told| told.0 == 201), "other keys go on: {others:?}");
    }
    assert_eq!(effects(&watch).await, 3 * 3 * 7);
}

// ---- B91, B96: claims and the sweep

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_barrier_of_claims_under_a_running_sweep_has_one_owner_in_every_isolation() {
    for isolation in [Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable]
    {
        let (_server, _, pool) = database().await;
        let brief = config().retention(Duration::from_millis(60)).lease(Duration::from_millis(50));
        let processes: Vec<_> = (0..5)
            .map(|_| {
                let store = PostgresStore::builder(pool.clone()).isolation(isolation).build();
                serve(brief.clone(), store, pay)
            })
            .collect();
        let sweeper = PostgresStore::from_pool(pool.clone());
        let sweeping = tokio::spawn(async move {
            loop {
                sweeper.sweep(10).await.unwrap();
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
        });
        let mut runs = 0;
        for round in 0..5 {
            let barrier = Arc::new(Barrier::new(50));
            let claims = (0..50).map(|n| {
                let (send, barrier) = (Arc::clone(&processes[n % 5]), Arc::clone(&barrier));
                async move {
                    barrier.wait().await;
                    until_done(&send, &format!("k{round}")).await
                }
            });
            runs += join_all(claims).await.iter().filter(|told| !told.1).count();
        }
        sweeping.abort();
        // A key past its retention is new: every run has its effect, and there is one for each.
        assert_eq!(usize::try_from(effects(&pool).await), Ok(runs), "{isolation:?}");
        assert!(runs >= 5);
    }
}

#[tokio::test]
async fn a_record_that_vanishes_under_its_owner_is_a_loud_error_and_no_success() {
    let (_server, _, pool) = database().await;
    let (log, _guard) = Log::install(tracing::Level::INFO);
    let send = serve(config(), PostgresStore::from_pool(pool.clone()), |mut tx, key| async move {
        run(&mut tx, "DELETE FROM idempotency_records").await.unwrap();
        pay(tx, key).await
    });
    let told = send("k").await;
    assert_eq!((told.0, told.1), (500, false), "{told:?}");
    assert!(told.2.contains("idempotency_rolled_back"), "{told:?}");
    assert_eq!(effects(&pool).await, 0);
    let log = log.take();
    let loud = |line: &str| line.contains("ERROR") && line.contains("the claim has vanished");
    assert!(log.lines().any(loud), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sweeps_of_several_servers_are_disjoint_and_leave_what_is_used() {
    let (_server, _, pool) = database().await;
    let fill = "INSERT INTO idempotency_records (storage_key, state, expires_at, record)
                SELECT substr(sha256(n::text::bytea), 1, 24), 4,
                       CASE WHEN n <= 20000 THEN 1 ELSE 9000000000000000 END,
                       '\\x0104'::bytea || substr(sha256('x'), 1, 32) || sha256('y') || sha256('z')
                  FROM generate_series(1, 21000) AS n";
    sqlx::query(fill).execute(&pool).await.unwrap();
    // One that is over is in use: its key has been claimed again.
    let mut used = pool.begin().await.unwrap();
    let lock = "SELECT 1 FROM idempotency_records WHERE expires_at = 1 LIMIT 1 FOR UPDATE";
    sqlx::query(lock).execute(&mut *used).await.unwrap();
    let nodes = (0..3).map(|_| {
        let store = PostgresStore::from_pool(pool.clone());
        async move {
            let mut mine = 0;
            loop {
                match store.sweep(500).await.unwrap() {
                    0 => return mine,
                    swept => mine += swept,
                }
            }
        }
    });
    let swept = join_all(nodes).await;
    assert_eq!(swept.iter().sum::<u64>(), 19_999, "{swept:?}");
    used.rollback().await.unwrap();
    assert_eq!(count(&pool, "SELECT COUNT(*) FROM idempotency_records").await, 1001);
}

// ---- B94: nothing open goes back into the pool

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_leave_at_any_moment_leave_no_open_transaction() {
    let (server, url, watch) = database().await;
    let way = Breaking::to(server.port()).await;
    let pool = pool(&way.url(&url, server.port()), 1).await;
    let send = serve(config(), PostgresStore::from_pool(pool.clone()), pay);
    // A database that is far away: each step of a request can be met.
    way.delay(Duration::from_millis(10));
    for n in 0..60 {
        let left = tokio::spawn(send(&format!("k{n}")));
        tokio::time::sleep(Duration::from_millis(n * 2)).await;
        left.abort();
    }
    way.delay(Duration::ZERO);
    for n in 0..60 {
        assert_eq!(until_done(&send, &format!("k{n}")).await.0, 201);
    }
    assert_eq!(effects(&watch).await, 60);
    let open = "SELECT COUNT(*) FROM pg_stat_activity
                 WHERE state LIKE 'idle in transaction%' AND datname = current_database()";
    assert_eq!(count(&watch, open).await, 0);
}

// ---- D11, B95: one writer

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writers_of_two_processes_wait_for_the_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("test.db");
    let handler = |mut tx: Tx<Sqlite>, _: String| async move {
        let read: i64 =
            sqlx::query_scalar("SELECT COUNT(*) FROM effects").fetch_one(&mut tx).await.unwrap();
        let write = sqlx::query("INSERT INTO effects VALUES ($1, 'paid')").bind(read);
        write.execute(&mut tx).await.unwrap();
        answer(201)
    };
    let mut processes = Vec::new();
    for n in 0..2 {
        let store = SqliteStore::open(&path).await.unwrap();
        store.migrate().await.unwrap();
        if n == 0 {
            sqlx::raw_sql(TABLES).execute(store.pool()).await.unwrap();
        }
        processes.push((store.pool().clone(), serve(config(), store, handler)));
    }
    // A long reader keeps nobody from writing.
    let mut reader = processes[0].0.begin().await.unwrap();
    let count = "SELECT COUNT(*) FROM effects";
    let before: i64 = sqlx::query_scalar(count).fetch_one(&mut *reader).await.unwrap();
    let storm = (0..200).map(|n| {
        let send = Arc::clone(&processes[n % 2].1);
        async move { until_done(&send, &format!("k{}", n / 2)).await }
    });
    let told = join_all(storm).await;
    assert_eq!(told.iter().filter(|told| !told.1).count(), 100);
    reader.rollback().await.unwrap();
    let after: i64 = sqlx::query_scalar(count).fetch_one(&processes[1].0).await.unwrap();
    assert_eq!((before, after), (0, 100));
    let distinct = "SELECT COUNT(DISTINCT id) FROM effects";
    let distinct: i64 = sqlx::query_scalar(distinct).fetch_one(&processes[1].0).await.unwrap();
    assert_eq!(distinct, 100, "each saw what the one before it wrote");
}
