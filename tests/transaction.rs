//! Key, effect and answer in one transaction, on a real PostgreSQL and on SQLite. Effects are counted
//! in the database, in a table without any unique constraint.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, join_all};
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use sqlx::{AssertSqlSafe, Pool, Postgres, Sqlite};
use support::postgres::PostgresServer;
use tower::{Layer as _, Service, ServiceExt as _, service_fn};
use tower_idempotency::store::sql::{Backend, Tx, sqlx};
use tower_idempotency::{
    Config, ConfigBuilder, IdempotencyLayer, Outcome, PostgresStore, Scope, SqliteStore, Store,
};

/// What the tests need of a database.
trait Sql: Backend {
    /// How many connections a transaction takes from the pool; that of SQLite is beside it.
    const TAKEN: usize;
    fn exec<'a>(tx: &'a mut Tx<Self>, sql: &str) -> BoxFuture<'a, sqlx::Result<()>>;
    fn exec_outside<'a>(pool: &'a Pool<Self>, sql: &'static str) -> BoxFuture<'a, ()>;
    fn number<'a>(pool: &'a Pool<Self>, sql: &'static str) -> BoxFuture<'a, i64>;
    fn sweep_some(pool: &Pool<Self>) -> BoxFuture<'_, u64>;
}

macro_rules! sql {
    ($database:ty, $taken:literal, $sweep:expr) => {
        impl Sql for $database {
            const TAKEN: usize = $taken;
            fn exec<'a>(tx: &'a mut Tx<Self>, sql: &str) -> BoxFuture<'a, sqlx::Result<()>> {
                let sql = sql.to_owned();
                Box::pin(async move {
                    sqlx::query(AssertSqlSafe(sql)).execute(&mut *tx).await.map(drop)
                })
            }
            fn exec_outside<'a>(pool: &'a Pool<Self>, sql: &'static str) -> BoxFuture<'a, ()> {
                Box::pin(async move {
                    sqlx::query(sql).execute(pool).await.unwrap();
                })
            }
            fn number<'a>(pool: &'a Pool<Self>, sql: &'static str) -> BoxFuture<'a, i64> {
                Box::pin(async move { sqlx::query_scalar(sql).fetch_one(pool).await.unwrap() })
            }
            fn sweep_some(pool: &Pool<Self>) -> BoxFuture<'_, u64> {
                let swept = async { ($sweep)(pool.clone()).await.sweep(10).await.unwrap() };
                Box::pin(swept)
            }
        }
    };
}
sql!(Postgres, 1, async |pool| PostgresStore::from_pool(pool));
sql!(Sqlite, 0, async |pool| SqliteStore::from_pool(pool).await.unwrap());

const TABLES: &str = "
    CREATE TABLE effects (id INTEGER, what TEXT);
    CREATE TABLE once (id INTEGER PRIMARY KEY);
    INSERT INTO once VALUES (1);
";
const PAY: &str = "INSERT INTO effects (id, what) VALUES (1, 'paid')";
/// Breaks a rule of the schema.
const CLASH: &str = "INSERT INTO once VALUES (1)";

type Answer = Result<Response<Full<Bytes>>, Infallible>;

/// A database, a layer on it, and what keeps both alive.
struct World<DB: Sql> {
    layer: IdempotencyLayer,
    pool: Pool<DB>,
    runs: Arc<AtomicUsize>,
    _server: Option<Arc<PostgresServer>>,
    _folder: Option<tempfile::TempDir>,
}

fn config() -> ConfigBuilder {
    Config::builder().scope(Scope::global())
}

async fn on_sqlite(config: ConfigBuilder) -> World<Sqlite> {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("test.db")).await.unwrap();
    store.migrate().await.unwrap();
    let pool = store.pool().clone();
    sqlx::raw_sql(TABLES).execute(&pool).await.unwrap();
    world(config, store, pool, None, Some(folder))
}

async fn on_postgres(config: ConfigBuilder) -> World<Postgres> {
    let (server, url) = PostgresServer::shared();
    let store = PostgresStore::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    let pool = store.pool().clone();
    sqlx::raw_sql(TABLES).execute(&pool).await.unwrap();
    world(config, store, pool, Some(server), None)
}

fn world<DB: Sql>(
    config: ConfigBuilder,
    store: impl Store,
    pool: Pool<DB>,
    server: Option<Arc<PostgresServer>>,
    folder: Option<tempfile::TempDir>,
) -> World<DB> {
    let layer = IdempotencyLayer::new(config.build().unwrap(), store);
    World { layer, pool, runs: Arc::default(), _server: server, _folder: folder }
}

/// What came back.
#[derive(Clone, Debug, PartialEq)]
struct Told {
    status: u16,
    replayed: bool,
    retry: Option<String>,
    body: String,
}

impl<DB: Sql> World<DB> {
    /// A service around this handler, which is told how many runs there have been with it.
    fn serve<H, F>(&self, handler: H) -> impl Fn(&str, &str) -> BoxFuture<'static, Told> + Clone
    where
        H: Fn(Tx<DB>, usize) -> F + Clone + Send + Sync + 'static,
        F: Future<Output = Response<Full<Bytes>>> + Send + 'static,
    {
        let runs = Arc::clone(&self.runs);
        let handler =
            service_fn(move |request: Request<Full<Bytes>>| -> BoxFuture<'static, Answer> {
                let run = runs.fetch_add(1, Ordering::SeqCst) + 1;
                let tx = Tx::take(request.extensions()).unwrap();
                let handling = handler(tx, run);
                drop(request);
                async move { Ok(handling.await) }.boxed()
            });
        sender(self.layer.layer(handler))
    }

    async fn effects(&self) -> i64 {
        DB::number(&self.pool, "SELECT COUNT(*) FROM effects").await
    }

    async fn records(&self) -> i64 {
        DB::number(&self.pool, "SELECT COUNT(*) FROM idempotency_records").await
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

fn sender<S, B>(service: S) -> impl Fn(&str, &str) -> BoxFuture<'static, Told> + Clone
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible>
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send,
    B: http_body::Body + Send,
    B::Data: Send,
    B::Error: std::fmt::Debug + Send,
{
    move |key: &str, body: &str| {
        let request = Request::post("/pay").header("idempotency-key", key);
        let request = request.body(Full::from(body.to_owned())).unwrap();
        let service = service.clone();
        async move {
            let (head, body) = service.oneshot(request).await.unwrap().into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let retry = head.headers.get("stripe-should-retry");
            Told {
                status: head.status.as_u16(),
                replayed: head.headers.contains_key("idempotent-replayed"),
                retry: retry.map(|value| value.to_str().unwrap().to_owned()),
                body: String::from_utf8_lossy(&body).into_owned(),
            }
        }
        .boxed()
    }
}

fn answer(status: u16, body: impl Into<String>) -> Response<Full<Bytes>> {
    let body: String = body.into();
    Response::builder().status(status).body(Full::from(body)).unwrap()
}

/// It should not; then the record is all that is left to say so.
async fn a_handler_that_commits_by_itself_and_dies_leaves_a_claim_that_nobody_runs_over<DB: Sql>(
    world: World<DB>,
) {
    let pay = world.serve(|mut tx, run| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        DB::exec(&mut tx, "COMMIT").await.unwrap();
        assert_ne!(run, 1, "dies");
        answer(201, "")
    });
    assert_eq!(pay("k", "").await.status, 500);
    for _ in 0..3 {
        // It waits for the end of the lease.
        assert_eq!(pay("k", "").await.status, 409);
    }
    let settled = "SELECT COUNT(*) FROM idempotency_records WHERE state = 3";
    assert_eq!(DB::number(&world.pool, settled).await, 1, "and operators see it");
    assert_eq!((world.effects().await, world.runs()), (1, 1));
}

async fn an_answer_is_kept_as_long_as_asked_and_little_longer<DB: Sql>(world: World<DB>) {
    const RETENTION: i64 = 3_600_000;
    let expires = "SELECT expires_at FROM idempotency_records";
    let now = || {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        i64::try_from(now.as_millis()).unwrap()
    };
    let pay = world.serve(|mut tx, run| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        // Longer than the margin of the retention, or not.
        tokio::time::sleep(Duration::from_millis(if run == 1 { 0 } else { 200 })).await;
        answer(201, "")
    });
    for key in ["quick", "slow"] {
        let began = now();
        assert_eq!(pay(key, "").await.status, 201);
        let ended = now();
        let kept = DB::number(&world.pool, expires).await - RETENTION;
        let margin = RETENTION / 65_536 + 1;
        assert!(kept <= ended + margin, "{key}: {} ms more", kept - ended);
        let least = if key == "slow" { began + 200 } else { began };
        assert!(kept >= least, "{key}: {} ms less", least - kept);
        DB::exec_outside(&world.pool, "DELETE FROM idempotency_records").await;
    }
}

/// Makes two tests of a function over both databases.
macro_rules! both {
    ($($(#[$attribute:meta])* $name:ident($config:expr);)+) => {
        mod sqlite { $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(super::on_sqlite($config).await).await; }
        )+ use super::{Duration, config}; }
        mod postgres { $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(super::on_postgres($config).await).await; }
        )+ use super::{Duration, config}; }
    };
}

both! {
    an_effect_and_its_answer_are_there_together_and_once(config());
    a_refusal_leaves_nothing_but_its_answer(config());
    a_refusal_may_keep_its_writes(config());
    a_server_error_leaves_nothing_and_frees_the_key(config());
    a_panic_leaves_nothing_and_frees_the_key(config());
    no_effect_and_unknown_leave_nothing(config());
    a_swallowed_failure_is_never_a_success(config());
    a_savepoint_may_fail_without_harm(config());
    a_savepoint_that_is_forgotten_undoes_everything(config());
    a_transaction_that_is_still_held_undoes_everything(config());
    a_twin_waits_and_gets_the_answer_without_a_connection(config());
    a_twin_that_may_not_wait_is_told_so_and_another_request_is_refused(config().wait(Duration::ZERO));
    a_client_that_leaves_changes_nothing(config());
    a_record_past_its_retention_counts_as_absent_without_a_sweep(
        config().retention(Duration::from_millis(300)).lease(Duration::from_millis(200))
    );
    a_sweep_takes_what_is_over_in_batches_and_nothing_else(
        config().retention(Duration::from_millis(300)).lease(Duration::from_millis(200))
    );
    a_transaction_is_taken_once_at_a_time(config());
    a_handler_that_commits_by_itself_and_dies_leaves_a_claim_that_nobody_runs_over(
        config().lease(Duration::from_secs(1))
    );
    an_answer_is_kept_as_long_as_asked_and_little_longer(
        config().retention(Duration::from_secs(3_600))
    );
}

async fn an_effect_and_its_answer_are_there_together_and_once<DB: Sql>(world: World<DB>) {
    let pay = world.serve(|mut tx, run| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        answer(201, format!("run {run}"))
    });
    let first = pay("k", "1999").await;
    assert_eq!((first.status, first.replayed), (201, false));
    let again = pay("k", "1999").await;
    assert_eq!(again, Told { replayed: true, ..first });
    assert_eq!(pay("k", "2999").await.status, 422);
    assert_eq!((world.effects().await, world.records().await, world.runs()), (1, 1, 1));
}

async fn a_refusal_leaves_nothing_but_its_answer<DB: Sql>(world: World<DB>) {
    let pay = world.serve(|mut tx, _| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        answer(402, "declined")
    });
    assert_eq!(pay("k", "").await.status, 402);
    assert!(pay("k", "").await.replayed);
    assert_eq!((world.effects().await, world.records().await, world.runs()), (0, 1, 1));
}

async fn a_refusal_may_keep_its_writes<DB: Sql>(world: World<DB>) {
    let pay = world.serve(|mut tx, _| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        let mut response = answer(402, "declined");
        response.extensions_mut().insert(Outcome::KeepWrites);
        response
    });
    assert_eq!(pay("k", "").await.status, 402);
    assert!(pay("k", "").await.replayed);
    assert_eq!((world.effects().await, world.runs()), (1, 1));
}

async fn a_server_error_leaves_nothing_and_frees_the_key<DB: Sql>(world: World<DB>) {
    let pay = world.serve(|mut tx, run| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        answer(if run == 1 { 500 } else { 201 }, format!("run {run}"))
    });
    let first = pay("k", "").await;
    assert_eq!((first.status, first.retry.as_deref()), (500, Some("true")));
    assert_eq!((world.effects().await, world.records().await), (0, 0));
    assert_eq!(pay("k", "").await.body, "run 2");
    assert_eq!(pay("k", "").await.body, "run 2");
    assert_eq!((world.effects().await, world.runs()), (1, 2));
}

async fn a_panic_leaves_nothing_and_frees_the_key<DB: Sql>(world: World<DB>) {
    let pay = world.serve(|mut tx, run| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        assert_ne!(run, 1, "on purpose");
        answer(201, "paid")
    });
    let first = pay("k", "").await;
    assert_eq!((first.status, first.retry.as_deref()), (500, Some("true")));
    assert!(first.body.contains("idempotency_rolled_back"), "{}", first.body);
    assert_eq!(world.effects().await, 0);
    assert_eq!(pay("k", "").await.status, 201);
    assert_eq!(world.effects().await, 1);
}

async fn no_effect_and_unknown_leave_nothing<DB: Sql>(world: World<DB>) {
    for (n, outcome) in [Outcome::NoEffect, Outcome::Unknown].into_iter().enumerate() {
        let pay = world.serve(move |mut tx, _| async move {
            DB::exec(&mut tx, PAY).await.unwrap();
            let mut response = answer(200, "");
            response.extensions_mut().insert(outcome);
            response
        });
        for run in 1..=2 {
            assert_eq!(pay("k", "").await.status, 200);
            assert_eq!(world.runs(), n * 2 + run);
        }
    }
    assert_eq!((world.effects().await, world.records().await), (0, 0));
}

async fn a_swallowed_failure_is_never_a_success<DB: Sql>(world: World<DB>) {
    let pay = world.serve(|mut tx, _| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        assert!(DB::exec(&mut tx, CLASH).await.is_err());
        drop(DB::exec(&mut tx, PAY).await);
        answer(201, "paid, or so it thinks")
    });
    let told = pay("k", "").await;
    assert_eq!((told.status, told.retry.as_deref()), (500, Some("true")));
    assert!(told.body.contains("idempotency_rolled_back"), "{}", told.body);
    assert_eq!((world.effects().await, world.records().await), (0, 0));
    // A refusal speaks of no writes, so it may be stored.
    let refuse = world.serve(|mut tx, _| async move {
        assert!(DB::exec(&mut tx, CLASH).await.is_err());
        answer(409, "there is one already")
    });
    assert_eq!(refuse("l", "").await.status, 409);
    assert!(refuse("l", "").await.replayed);
}

async fn a_savepoint_may_fail_without_harm<DB: Sql>(world: World<DB>)
where
    for<'t, 'c> &'c mut tower_idempotency::store::sql::Savepoint<'t, DB>:
        sqlx::Executor<'c, Database = DB>,
{
    let pay = world.serve(|mut tx, _| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        let mut part = tx.savepoint().await.unwrap();
        assert!(sqlx::raw_sql(CLASH).execute(&mut part).await.is_err());
        part.undo().await.unwrap();
        let mut part = tx.savepoint().await.unwrap();
        sqlx::raw_sql(PAY).execute(&mut part).await.unwrap();
        part.keep().await.unwrap();
        answer(201, "paid")
    });
    assert_eq!(pay("k", "").await.status, 201);
    assert_eq!((world.effects().await, world.runs()), (2, 1));
}

async fn a_savepoint_that_is_forgotten_undoes_everything<DB: Sql>(world: World<DB>) {
    let pay = world.serve(|mut tx, _| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        drop(tx.savepoint().await.unwrap());
        answer(201, "paid")
    });
    assert_eq!(pay("k", "").await.status, 500);
    assert_eq!((world.effects().await, world.records().await), (0, 0));
}

async fn a_transaction_that_is_still_held_undoes_everything<DB: Sql>(world: World<DB>) {
    let pay = world.serve(|mut tx, run| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        if run == 1 {
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(200)).await;
                assert!(DB::exec(&mut tx, PAY).await.is_err(), "the run is over");
            });
        }
        answer(201, "paid")
    });
    let told = pay("k", "").await;
    assert_eq!((told.status, told.retry.as_deref()), (500, Some("true")));
    assert_eq!((world.effects().await, world.records().await), (0, 0));
    assert_eq!(pay("k", "").await.status, 201);
    assert_eq!(world.effects().await, 1);
}

async fn a_twin_waits_and_gets_the_answer_without_a_connection<DB: Sql>(world: World<DB>) {
    let pay = world.serve(|mut tx, _| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        tokio::time::sleep(Duration::from_millis(300)).await;
        answer(201, "paid")
    });
    let (told, connections) = tokio::join!(join_all((0..50).map(|_| pay("k", ""))), async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        world.pool.size() as usize - world.pool.num_idle()
    });
    assert_eq!(connections, DB::TAKEN, "only the owner has one");
    assert!(told.iter().all(|told| told.status == 201), "{told:?}");
    assert_eq!(told.iter().filter(|told| !told.replayed).count(), 1);
    assert_eq!((world.effects().await, world.runs()), (1, 1));
}

async fn a_twin_that_may_not_wait_is_told_so_and_another_request_is_refused<DB: Sql>(
    world: World<DB>,
) {
    let pay = world.serve(|mut tx, _| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        tokio::time::sleep(Duration::from_millis(400)).await;
        answer(201, "paid")
    });
    let first = tokio::spawn(pay("k", "1"));
    tokio::time::sleep(Duration::from_millis(150)).await;
    let twin = pay("k", "1").await;
    assert!(twin.body.contains("idempotency_key_in_use"), "{}", twin.body);
    assert_eq!(pay("k", "2").await.status, 422);
    assert_eq!(first.await.unwrap().status, 201);
    assert!(pay("k", "1").await.replayed);
    assert_eq!((world.effects().await, world.runs()), (1, 1));
}

async fn a_client_that_leaves_changes_nothing<DB: Sql>(world: World<DB>) {
    let pay = world.serve(|mut tx, _| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        tokio::time::sleep(Duration::from_millis(100)).await;
        DB::exec(&mut tx, PAY).await.unwrap();
        answer(201, "paid")
    });
    // B94: at any moment of the claim, of the handler and of the COMMIT.
    for n in 0..40 {
        let left = tokio::spawn(pay(&format!("k{n}"), ""));
        tokio::time::sleep(Duration::from_micros(n * 400)).await;
        left.abort();
    }
    for n in 0..40 {
        let mut told = pay(&format!("k{n}"), "").await;
        while told.status == 503 || told.status == 409 {
            told = pay(&format!("k{n}"), "").await;
        }
        assert_eq!(told.status, 201, "{told:?}");
    }
    assert_eq!((world.effects().await, world.runs()), (80, 40));
}

async fn a_record_past_its_retention_counts_as_absent_without_a_sweep<DB: Sql>(world: World<DB>) {
    let pay = world.serve(|mut tx, run| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        answer(201, format!("run {run}"))
    });
    assert_eq!(pay("k", "").await.body, "run 1");
    tokio::time::sleep(Duration::from_millis(350)).await;
    assert_eq!(world.records().await, 1);
    let told = pay("k", "other").await;
    assert_eq!((told.body.as_str(), told.replayed), ("run 2", false));
    assert_eq!((world.effects().await, world.records().await), (2, 1));
}

async fn a_sweep_takes_what_is_over_in_batches_and_nothing_else<DB: Sql>(world: World<DB>) {
    let pay = world.serve(|mut tx, _| async move {
        DB::exec(&mut tx, PAY).await.unwrap();
        answer(201, "")
    });
    for n in 0..25 {
        pay(&format!("k{n}"), "").await;
    }
    tokio::time::sleep(Duration::from_millis(350)).await;
    pay("live", "").await;
    let mut swept = Vec::new();
    for _ in 0..4 {
        swept.push(DB::sweep_some(&world.pool).await);
    }
    assert_eq!(swept, [10, 10, 5, 0]);
    assert!(pay("live", "").await.replayed);
    assert_eq!(world.records().await, 1);
}

async fn a_transaction_is_taken_once_at_a_time<DB: Sql>(world: World<DB>) {
    let handler = service_fn(|request: Request<Full<Bytes>>| async move {
        let first = Tx::<DB>::take(request.extensions()).unwrap();
        let second = Tx::<DB>::take(request.extensions());
        assert!(second.is_err());
        drop(first);
        drop(Tx::<DB>::take(request.extensions()).unwrap());
        Ok::<_, Infallible>(answer(200, ""))
    });
    let send = sender(world.layer.layer(handler));
    assert_eq!(send("k", "").await.status, 200);
    assert!(send("k", "").await.replayed);
}
