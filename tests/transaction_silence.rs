//! Connections to PostgreSQL that go silent instead of closing, as where a link is down or a relay
//! swallows what is sent: nothing waits for them without a bound, and neither a key nor a place in the
//! pool is lost to them. (Fault matrix, D2, D3 and D6.)

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::collections::HashSet;
use std::convert::Infallible;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::{BoxFuture, join_all};
use futures_util::{FutureExt as _, TryStreamExt as _};
use http::{Request, Response};
use http_body_util::Full;
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{Executor as _, Postgres, SqlSafeStr as _};
use support::breaking::{Breaking, Fault};
use support::postgres::PostgresServer;
use tokio::sync::{Notify, Semaphore};
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::store::sql::{Tx, sqlx};
use tower_idempotency::{
    Config, IdempotencyLayer, PostgresLeaseStore, PostgresStore, Scope, Store,
};

const EFFECTS: &str = "CREATE TABLE effects (id INTEGER)";
const PAY: &str = "INSERT INTO effects VALUES (1)";
/// All bounds of the store together are less, and nothing here needs as long.
const BOUNDED: Duration = Duration::from_secs(20);

type Send = Arc<dyn Fn(&str) -> BoxFuture<'static, (u16, bool)> + std::marker::Send + Sync>;

/// One process around whose handler a store stands. Answers with status and "is a replay".
fn serve<H, F>(store: impl Store, handler: H) -> Send
where
    H: Fn(Option<Tx<Postgres>>, String) -> F + Clone + std::marker::Send + Sync + 'static,
    F: Future<Output = u16> + std::marker::Send + 'static,
{
    let handler = service_fn(move |request: Request<Full<Bytes>>| {
        let key = request.headers()["idempotency-key"].to_str().unwrap().to_owned();
        let handling = handler(Tx::take(request.extensions()).ok(), key);
        drop(request);
        async move {
            let status = handling.await;
            let answer = Response::builder().status(status).body(Full::<Bytes>::default());
            Ok::<_, Infallible>(answer.unwrap())
        }
    });
    let config = Config::builder().scope(Scope::global()).wait(Duration::ZERO).build().unwrap();
    let service = IdempotencyLayer::new(config, store).layer(handler);
    Arc::new(move |key: &str| {
        let request = Request::post("/pay").header("idempotency-key", key);
        let request = request.body(Full::default()).unwrap();
        let service = service.clone();
        async move {
            let answer = tokio::time::timeout(BOUNDED, service.oneshot(request)).await;
            let answer = answer.expect("a bound").unwrap();
            (answer.status().as_u16(), answer.headers().contains_key("idempotent-replayed"))
        }
        .boxed()
    })
}

/// Pays, and answers 500 where it cannot.
async fn pay(tx: Option<Tx<Postgres>>, _: String) -> u16 {
    let mut tx = tx.unwrap();
    sqlx::query(PAY).execute(&mut tx).await.map_or(500, |_| 201)
}

struct World {
    server: Arc<PostgresServer>,
    way: Breaking,
    url: String,
    watch: PgPool,
}

impl World {
    async fn new() -> Self {
        let (server, url) = PostgresServer::shared();
        let watch = PgPoolOptions::new().max_connections(3).connect(&url).await.unwrap();
        PostgresStore::from_pool(watch.clone()).migrate().await.unwrap();
        sqlx::raw_sql(EFFECTS).execute(&watch).await.unwrap();
        let way = Breaking::to(server.port()).await;
        Self { server, way, url, watch }
    }

    /// A pool whose connections go by the way that breaks.
    async fn pool(&self, size: u32) -> PgPool {
        let url = self.way.url(&self.url, self.server.port());
        PgPoolOptions::new().max_connections(size).connect(&url).await.unwrap()
    }

    async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.watch).await.unwrap()
    }

    async fn effects(&self) -> i64 {
        self.count("SELECT COUNT(*) FROM effects").await
    }
}

/// Sends until the answer is final, as a client would.
async fn until_done(send: &Send, key: &str) -> (u16, bool) {
    let end = Instant::now() + BOUNDED;
    loop {
        let told = send(key).await;
        if told.0 < 400 {
            return told;
        }
        assert!(matches!(told.0, 409 | 503) && Instant::now() < end, "{key}: {told:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

// ---- COMMIT

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_reply_is_swallowed_is_answered_from_its_record_and_costs_no_connection() {
    let world = World::new().await;
    let pool = world.pool(4).await;
    let store = PostgresStore::from_pool(pool.clone());
    let send = serve(store.clone(), pay);
    // More often than there are turns, and connections.
    for n in 0..6 {
        world.way.arm(Fault::ReplySwallowed);
        let began = Instant::now();
        assert_eq!(send(&format!("k{n}")).await, (201, false), "k{n}");
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        assert_eq!(send(&format!("k{n}")).await, (201, true));
    }
    assert_eq!(world.way.met(), 6);
    assert_eq!(world.effects().await, 6);
    store.ready().await.unwrap();
    // All of the pool is there.
    let all = join_all((0..4).map(|_| pool.acquire())).await;
    assert!(all.iter().all(Result::is_ok));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_is_swallowed_runs_again_when_the_server_has_given_the_transaction_up() {
    let world = World::new().await;
    let store = PostgresStore::builder(world.pool(2).await).idle_timeout(Duration::from_secs(1));
    let send = serve(store.build(), pay);
    for n in 0..2 {
        world.way.arm(Fault::RequestSwallowed);
        let key = format!("k{n}");
        assert_eq!(until_done(&send, &key).await.0, 201);
        assert_eq!(send(&key).await, (201, true));
    }
    assert_eq!((world.way.met(), world.effects().await), (2, 2));
}

/// The server does the COMMIT on its own when its standby comes back. Meanwhile it is known that no key
/// can be claimed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_turns_all_wait_for_a_lost_commit_is_not_ready_and_is_again() {
    let server = PostgresServer::start();
    PostgresStore::connect(&server.url()).await.unwrap().migrate().await.unwrap();
    server.psql(EFFECTS);
    let standby = |name: &str| {
        server.psql(&format!("ALTER SYSTEM SET synchronous_standby_names = '{name}'"));
        server.psql("SELECT pg_reload_conf()");
        let end = Instant::now() + BOUNDED;
        while server.psql("SHOW synchronous_standby_names") != name {
            assert!(Instant::now() < end, "the setting is not read");
        }
    };
    standby("nobody");
    // Connections that know it from the start.
    let pool = PgPoolOptions::new().max_connections(2).connect(&server.url()).await.unwrap();
    let store = PostgresStore::builder(pool.clone()).statement_timeout(Duration::from_millis(300));
    let store = store.build();
    let send = serve(store.clone(), pay);
    assert_eq!(send("k").await, (503, false));
    let end = Instant::now() + BOUNDED;
    while store.ready().await.is_ok() {
        assert!(Instant::now() < end, "ready, and no key can be claimed");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(send("other").await, (503, false), "that is true");
    assert_eq!(send("k").await, (409, false));
    standby("");
    assert_eq!(until_done(&send, "k").await, (201, true));
    assert_eq!(until_done(&send, "other").await.0, 201);
    store.ready().await.unwrap();
}

// ---- The handler's connection

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handlers_whose_connections_go_silent_give_key_and_turn_back() {
    let world = World::new().await;
    let store = PostgresStore::builder(world.pool(3).await)
        .statement_timeout(Duration::from_millis(500))
        .idle_timeout(Duration::from_secs(2))
        .build();
    let (silent, paid) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let first = Arc::new(Mutex::new(HashSet::new()));
    let (wait, tell) = (Arc::clone(&silent), Arc::clone(&paid));
    let send = serve(store.clone(), move |tx, key| {
        let first = first.lock().unwrap().insert(key.clone());
        let (wait, tell) = (Arc::clone(&wait), Arc::clone(&tell));
        async move {
            let mut tx = tx.unwrap();
            let paid = sqlx::query(PAY).execute(&mut tx).await;
            if first && key.starts_with("held") {
                tell.add_permits(1);
                wait.acquire().await.unwrap().forget();
                // One finds out by a statement, the other has nothing more to say and gives up.
                if key == "held-gives-up" {
                    return 500;
                }
                let next = sqlx::query("SELECT 1").execute(&mut tx).await;
                return next.map_or(500, |_| 201);
            }
            paid.map_or(500, |_| 201)
        }
    });
    let held = ["held-asks", "held-gives-up"].map(|key| tokio::spawn(send(key)));
    let both = paid.acquire_many(2).await.unwrap();
    world.way.go_silent();
    silent.add_permits(2);
    drop(both);
    let began = Instant::now();
    for told in join_all(held).await {
        let told = told.unwrap();
        assert!(matches!(told.0, 201 | 409 | 500 | 503), "{told:?}");
    }
    // Both turns were in their hands.
    assert_eq!(until_done(&send, "new").await.0, 201);
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    store.ready().await.unwrap();
    for key in ["held-asks", "held-gives-up"] {
        assert_eq!(until_done(&send, key).await.0, 201);
    }
    assert_eq!(world.effects().await, 3, "what was undone is undone");
}

/// Every way to run a statement.
const VERBS: [&str; 9] = [
    "execute",
    "execute-raw",
    "fetch",
    "fetch_all",
    "fetch_one",
    "fetch_optional",
    "prepare",
    "describe",
    "savepoint",
];

async fn by(verb: &str, tx: &mut Tx<Postgres>) -> sqlx::Result<()> {
    let sql = "SELECT id FROM effects FOR UPDATE";
    let query = sqlx::query(sql);
    match verb {
        "execute" => query.execute(tx).await.map(drop),
        "execute-raw" => sqlx::raw_sql(sql).execute(tx).await.map(drop),
        "fetch" => query.fetch(tx).try_next().await.map(drop),
        "fetch_all" => query.fetch_all(tx).await.map(drop),
        "fetch_one" => query.fetch_one(tx).await.map(drop),
        "fetch_optional" => query.fetch_optional(tx).await.map(drop),
        "prepare" => tx.prepare(sql.into_sql_str()).await.map(drop),
        "describe" => tx.describe(sql.into_sql_str()).await.map(drop),
        "savepoint" => tx.savepoint().await.map(drop),
        verb => unreachable!("{verb}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_way_to_run_a_statement_is_given_up_when_the_database_does_not_answer() {
    let world = World::new().await;
    let mut patient = Vec::new();
    for verb in VERBS {
        let store = PostgresStore::builder(world.pool(2).await)
            .statement_timeout(Duration::from_millis(200))
            .idle_timeout(Duration::from_millis(500));
        let (begun, silent) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let told = Arc::new(Mutex::new(None));
        let (tell, wait, seen) = (Arc::clone(&begun), Arc::clone(&silent), Arc::clone(&told));
        let send = serve(store.build(), move |tx, _| {
            let (tell, wait, seen) = (Arc::clone(&tell), Arc::clone(&wait), Arc::clone(&seen));
            async move {
                let mut tx = tx.unwrap();
                if seen.lock().unwrap().is_some() {
                    return 201;
                }
                tell.notify_one();
                wait.notified().await;
                let limit = Duration::from_secs(4);
                let done = tokio::time::timeout(limit, by(verb, &mut tx)).await;
                *seen.lock().unwrap() = Some(done.is_ok_and(|done| done.is_err()));
                // What comes behind it is not answered with what was for it.
                assert!(sqlx::query("SELECT 1").execute(&mut tx).await.is_err());
                500
            }
        });
        let sent = tokio::spawn(send(verb));
        begun.notified().await;
        world.way.go_silent();
        silent.notify_one();
        sent.await.unwrap();
        if *told.lock().unwrap() != Some(true) {
            patient.push(verb);
        }
    }
    assert!(patient.is_empty(), "these wait for ever: {patient:?}");
}

// ---- Lease stores, and what needs no transaction

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_store_sends_again_what_was_swallowed_and_keeps_its_pool() {
    let world = World::new().await;
    let pool = world.pool(2).await;
    let store = PostgresLeaseStore::from_pool(pool.clone());
    let way = Arc::new(world.way);
    let silent = Arc::clone(&way);
    let send = serve(store.clone(), move |_, key| {
        // The claim has been committed; this is for the completion, or the release.
        silent.arm(Fault::ReplySwallowed);
        async move { if key == "release" { 429 } else { 201 } }
    });
    for n in 0..3 {
        let key = format!("k{n}");
        way.arm(Fault::ReplySwallowed);
        let began = Instant::now();
        assert_eq!(send(&key).await.0, 201, "{key}");
        assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
        assert_eq!(send(&key).await, (201, true));
    }
    assert_eq!(send("release").await, (429, false));
    assert_eq!(send("release").await, (429, false), "the key is free");
    assert!(way.met() >= 8, "{}", way.met());
    store.ready().await.unwrap();
    let all = join_all((0..2).map(|_| pool.acquire())).await;
    assert!(all.iter().all(Result::is_ok));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_whose_idle_connections_have_gone_silent_serves_again_soon() {
    let world = World::new().await;
    let pool = world.pool(2).await;
    let (store, lease) =
        (PostgresStore::from_pool(pool.clone()), PostgresLeaseStore::from_pool(pool.clone()));
    let send = serve(store.clone(), pay);
    for n in 0..4 {
        drop(join_all((0..2).map(|_| pool.acquire())).await);
        while pool.num_idle() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        world.way.go_silent();
        let began = Instant::now();
        match n {
            0 => assert_eq!(until_done(&send, "k").await.0, 201),
            1 => store.ready().await.unwrap(),
            2 => assert_eq!(store.sweep(10).await.unwrap(), 0),
            _ => assert_eq!(lease.sweep(10).await.unwrap(), 0),
        }
        assert!(began.elapsed() < Duration::from_secs(6), "{n}: {:?}", began.elapsed());
    }
}
