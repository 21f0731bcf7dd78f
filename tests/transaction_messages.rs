//! What a request of a transactional store says to its database: exact, on any machine. And what happens
//! when one of its shortcuts cannot be taken.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

#[path = "support/spoken.rs"]
mod spoken;
mod support;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use spoken::{BOUNDED, CLAIM, CLOSE, EFFECTS, LOOK, PAY, TRIES, World, all_back, fits, pay, serve};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Postgres, Sqlite};
use support::breaking::Breaking;
use tokio::sync::Semaphore;
use tower_idempotency::store::sql::{Backend, Tx, sqlx};
use tower_idempotency::{PostgresStore, SqliteStore, Store};
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

// ---- PostgreSQL

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fresh_request_is_four_messages_around_the_handlers_own_and_a_replay_is_one_look() {
    let world = World::new().await;
    let store = PostgresStore::connect(&world.by_way).await.unwrap();
    let send = serve(store.clone(), pay);
    // A connection that has prepared everything.
    for key in ["first", "second", "declined-first"] {
        send(key).await;
        all_back(store.pool()).await;
    }
    let said = async |key: &str, told: (u16, bool)| {
        drop(world.way.said());
        assert_eq!(send(key).await, told);
        all_back(store.pool()).await;
        world.way.said()
    };
    // The pool's own, when a connection comes back to it; none when it is lent.
    let back = "(ping)";
    let undo = "ROLLBACK TO SAVEPOINT idempotency_claim";
    for (name, told, expected) in [
        ("k", (201, false), &[LOOK, CLAIM, PAY, CLOSE, "COMMIT", back][..]),
        ("declined", (402, false), &[LOOK, CLAIM, PAY, undo, CLOSE, "COMMIT", back]),
    ] {
        for n in 0..TRIES {
            let said = said(&format!("{name}{n}"), told).await;
            if fits(&said, expected) {
                let claim = ", '30000', '30000', '5000'); SAVEPOINT idempotency_claim";
                assert!(said[1].ends_with(claim), "{said:#?}");
                break;
            }
            assert!(n + 1 < TRIES, "{said:#?}");
        }
    }
    let again = said("first", (201, true)).await;
    assert!(fits(&again, &[LOOK, back]), "{again:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_was_reset_is_made_able_again() {
    let world = World::new().await;
    let pool = PgPoolOptions::new().max_connections(1).connect(&world.by_way).await.unwrap();
    let send = serve(PostgresStore::from_pool(pool.clone()), pay);
    assert_eq!(send("k").await.0, 201);
    for (n, reset) in ["RESET ALL", "DEALLOCATE tower_idempotency_claim_3n"].into_iter().enumerate()
    {
        sqlx::raw_sql(reset).execute(&pool).await.unwrap();
        assert_eq!(send(&format!("after-{n}")).await, (201, false), "{reset}");
        all_back(&pool).await;
        drop(world.way.said());
        assert_eq!(send(&format!("later-{n}")).await, (201, false), "{reset}");
        let said = world.way.said();
        let claims = said.iter().filter(|said| said.contains("EXECUTE tower_")).count();
        let begins = said.iter().filter(|said| said.contains("BEGIN")).count();
        assert_eq!((claims, begins), (1, 1), "{reset}: {said:#?}");
    }
    assert_eq!((world.effects().await, world.open_transactions().await), (5, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_has_lost_what_the_driver_prepared_costs_no_request() {
    let world = World::new().await;
    let pool = PgPoolOptions::new().max_connections(1).connect(&world.by_way).await.unwrap();
    let send = serve(PostgresStore::from_pool(pool.clone()), pay);
    assert_eq!(send("k").await.0, 201);
    for (n, reset) in ["DEALLOCATE ALL", "DISCARD ALL"].into_iter().enumerate() {
        all_back(&pool).await;
        sqlx::raw_sql(reset).execute(&pool).await.unwrap();
        assert_eq!(send(&format!("after-{n}")).await, (201, false), "{reset}");
    }
    assert_eq!((world.effects().await, world.open_transactions().await), (3, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_a_handler_has_made_read_only_costs_one_request() {
    let world = World::new().await;
    let pool = PgPoolOptions::new().max_connections(1).connect(&world.by_way).await.unwrap();
    let store = PostgresStore::from_pool(pool.clone());
    let send = serve(store, |mut tx: Tx<Postgres>, key: String, fence| async move {
        if key == "leaves" {
            let read_only = "SET default_transaction_read_only = on";
            sqlx::raw_sql(read_only).execute(&mut tx).await.unwrap();
        }
        pay(tx, key, fence).await
    });
    assert_eq!(send("leaves").await, (201, false));
    all_back(&pool).await;
    send("one").await;
    for key in ["next", "later"] {
        assert_eq!(send(key).await, (201, false), "{key}");
    }
    assert_eq!(world.open_transactions().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_have_died_in_the_pool_cost_no_request() {
    let world = World::new().await;
    let store = PostgresStore::connect(&world.url).await.unwrap();
    let send = serve(store.clone(), pay);
    let end = "SELECT COUNT(pg_terminate_backend(pid)) FROM pg_stat_activity
                WHERE datname = current_database() AND pid <> pg_backend_pid()
                  AND application_name <> 'watch'";
    for round in 0..5 {
        drop(join_all((0..4).map(|_| store.pool().acquire())).await);
        all_back(store.pool()).await;
        // A fixed connection, which is not ended.
        let mut watch = world.watch.acquire().await.unwrap();
        sqlx::raw_sql("SET application_name = 'watch'").execute(&mut *watch).await.unwrap();
        let ended: i64 = sqlx::query_scalar(end).fetch_one(&mut *watch).await.unwrap();
        assert!(ended >= 4, "{ended}");
        // Used a moment ago, so that the pool does not ask them.
        assert_eq!(send(&format!("k{round}")).await, (201, false), "{round}");
    }
    let fresh = PgPoolOptions::new().max_connections(1).connect(&world.url).await.unwrap();
    let effects: i64 =
        sqlx::query_scalar("SELECT COUNT(*) FROM effects").fetch_one(&fresh).await.unwrap();
    assert_eq!(effects, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_have_gone_silent_in_the_pool_cost_a_request_little_time() {
    let world = World::new().await;
    let way = Breaking::to(world.server.port()).await;
    let store = PostgresStore::connect(&way.url(&world.url, world.server.port())).await.unwrap();
    let send = serve(store.clone(), pay);
    assert_eq!(send("before").await.0, 201);
    all_back(store.pool()).await;
    way.go_silent();
    let began = Instant::now();
    assert_eq!(send("k").await, (201, false));
    // One second for the look, and a new connection.
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    assert_eq!(world.effects().await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_loses_the_race_behind_its_look_replays_the_winners_answer() {
    let world = World::new().await;
    let pool = PgPoolOptions::new().max_connections(1).connect(&world.by_way).await.unwrap();
    let late = serve(PostgresStore::from_pool(pool.clone()), pay);
    let winner = serve(PostgresStore::from_pool(world.watch.clone()), pay);
    assert_eq!(late("before").await.0, 201);
    let gate = world.way.hold("EXECUTE tower_");
    let sent = tokio::spawn(late("k"));
    world.way.held().await;
    assert_eq!(winner("k").await, (201, false));
    gate.add_permits(1);
    assert_eq!(sent.await.unwrap(), (201, true));
    assert_eq!((world.effects().await, world.open_transactions().await), (2, 0));
    assert_eq!(late("after").await, (201, false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_waited_for_one_that_came_to_nothing_has_the_higher_fence() {
    let world = World::new().await;
    let pool = PgPoolOptions::new().max_connections(1).connect(&world.by_way).await.unwrap();
    let fences = Arc::new(Mutex::new(Vec::new()));
    let (begun, undo) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let noted = Arc::clone(&fences);
    let late = serve(PostgresStore::from_pool(pool), move |tx: Tx<Postgres>, key, fence| {
        noted.lock().unwrap().push(fence);
        pay(tx, key, fence)
    });
    let (noted, tell, wait) = (Arc::clone(&fences), Arc::clone(&begun), Arc::clone(&undo));
    let first = serve(
        PostgresStore::from_pool(world.watch.clone()),
        move |tx: Tx<Postgres>, key, fence| {
            noted.lock().unwrap().push(fence);
            let (tell, wait) = (Arc::clone(&tell), Arc::clone(&wait));
            async move {
                assert_eq!(pay(tx, key, fence).await, 201);
                tell.add_permits(1);
                wait.acquire().await.unwrap().forget();
                500
            }
        },
    );
    assert_eq!(late("before").await.0, 201);
    fences.lock().unwrap().clear();
    let gate = world.way.hold("EXECUTE tower_");
    let sent = tokio::spawn(late("k"));
    world.way.held().await;
    // It claims later, and so its fence is higher than what the one that is held would say.
    tokio::time::sleep(Duration::from_millis(20)).await;
    let failed = tokio::spawn(first("k"));
    begun.acquire().await.unwrap().forget();
    gate.add_permits(1);
    let waits = "SELECT COUNT(*) FROM pg_stat_activity
                  WHERE datname = current_database() AND wait_event_type = 'Lock'";
    while world.count(waits).await == 0 && !sent.is_finished() {
        tokio::task::yield_now().await;
    }
    // Long enough not to be taken for a claim that waited for nobody.
    tokio::time::sleep(Duration::from_millis(20)).await;
    let now = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint";
    let undone = u64::try_from(world.count(now).await).unwrap();
    undo.add_permits(1);
    assert_eq!(failed.await.unwrap().0, 500);
    assert_eq!(sent.await.unwrap(), (201, false));
    let fences = fences.lock().unwrap().clone();
    assert!(fences.len() >= 2 && fences.is_sorted_by(|before, after| before < after), "{fences:?}");
    assert!(
        fences.last() >= Some(&undone),
        "others may have come and gone meanwhile: {fences:?} {undone}"
    );
    assert_eq!(world.effects().await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_are_handed_on_in_a_line_and_all_of_them_come_back() {
    let world = World::new().await;
    let store = PostgresStore::connect(&world.by_way).await.unwrap();
    let send = serve(store.clone(), pay);
    drop(join_all((0..20).map(|n| send(&format!("warm{n}")))).await);
    all_back(store.pool()).await;
    drop(world.way.said());
    // As many replays as fresh ones: neither keeps a connection.
    let told = join_all((0..400).map(|n| send(&format!("k{}", n / 2)))).await;
    assert!(told.iter().all(|told| told.0 == 201), "{told:?}");
    assert_eq!(told.iter().filter(|told| !told.1).count(), 200);
    all_back(store.pool()).await;
    let back = world.way.said().iter().filter(|said| *said == "(ping)").count();
    assert!(back < 300, "{back} of 400 requests gave their connection back");
    assert_eq!((world.effects().await, world.open_transactions().await), (220, 0));
}

// ---- SQLite

/// What the driver says it has run, from its threads.
static RUN: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Statements;

struct Summary(Option<String>);

impl Visit for Summary {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "summary" {
            self.0 = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

impl Subscriber for Statements {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "sqlx::query"
    }

    fn event(&self, event: &Event<'_>) {
        let mut summary = Summary(None);
        event.record(&mut summary);
        RUN.lock().unwrap().extend(summary.0);
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

#[test]
fn a_fresh_request_goes_to_sqlite_three_times_and_a_replay_once() {
    // In a process of its own, whose other tests say nothing.
    if std::env::var_os("STATEMENTS").is_none() {
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let name = "a_fresh_request_goes_to_sqlite_three_times_and_a_replay_once";
        let done = alone.args(["--exact", name]).env("STATEMENTS", "1").output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
        return;
    }
    tracing::subscriber::set_global_default(Statements).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let store = SqliteStore::open(folder.path().join("test.db")).await.unwrap();
        store.migrate().await.unwrap();
        sqlx::raw_sql(EFFECTS).execute(store.pool()).await.unwrap();
        let pool = store.pool().clone();
        let send = serve(store, |mut tx: Tx<Sqlite>, _, _| async move {
            sqlx::query(PAY).execute(&mut tx).await.map_or(500, |_| 201)
        });
        let run = async |key: &str, told: (u16, bool)| {
            RUN.lock().unwrap().clear();
            assert_eq!(send(key).await, told);
            while pool.num_idle() < pool.size() as usize {
                tokio::task::yield_now().await;
            }
            std::mem::take(&mut *RUN.lock().unwrap())
        };
        run("first", (201, false)).await;
        // Behind the look in the same message are BEGIN and the claim.
        let open = "SELECT record";
        // Behind it in the same message is COMMIT.
        let close = "UPDATE idempotency_records";
        let fresh = &[open, "INSERT INTO effects", close][..];
        for n in 0..TRIES {
            let run = run(&format!("k{n}"), (201, false)).await;
            if fits(&run, fresh) {
                break;
            }
            assert!(n + 1 < TRIES, "{run:#?}");
        }
        let again = run("first", (201, true)).await;
        assert!(fits(&again, &[open]), "{again:#?}");
    });
}

#[tokio::test]
async fn a_handler_that_takes_its_claim_away_commits_nothing_in_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("test.db")).await.unwrap();
    store.migrate().await.unwrap();
    sqlx::raw_sql(EFFECTS).execute(store.pool()).await.unwrap();
    let pool = store.pool().clone();
    let send = serve(store, |mut tx: Tx<Sqlite>, key: String, _| async move {
        sqlx::query(PAY).execute(&mut tx).await.unwrap();
        let sql = match &*key {
            "removed" => "DELETE FROM idempotency_records",
            "changed" => {
                "UPDATE idempotency_records SET record = x'010501' || substr(record, 4), state = 5"
            }
            _ => "SELECT 1",
        };
        sqlx::query(sql).execute(&mut tx).await.unwrap();
        201
    });
    for key in ["removed", "changed"] {
        assert!(send(key).await.0 >= 500, "{key}");
    }
    assert_eq!(send("left").await, (201, false));
    let effects: i64 =
        sqlx::query_scalar("SELECT COUNT(*) FROM effects").fetch_one(&pool).await.unwrap();
    let records: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM idempotency_records")
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!((effects, records), (1, 1));
}

/// SQLite removes its log with the last connection.
#[tokio::test]
async fn the_connection_that_writes_is_one_beside_the_pool_and_goes_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("test.db-wal");
    let gone = async |how: &str| {
        let end = Instant::now() + BOUNDED;
        while log.exists() {
            assert!(Instant::now() < end, "{how}: a connection is left");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    for how in ["closed", "dropped"] {
        let store = SqliteStore::open(folder.path().join("test.db")).await.unwrap();
        store.migrate().await.unwrap();
        let pool = store.pool().clone();
        sqlx::raw_sql("CREATE TABLE IF NOT EXISTS effects (id INTEGER)")
            .execute(&pool)
            .await
            .unwrap();
        let send = serve(store, |mut tx: Tx<Sqlite>, _, _| async move {
            sqlx::query(PAY).execute(&mut tx).await.map_or(500, |_| 201)
        });
        let before = pool.size();
        for n in 0..5 {
            assert_eq!(send(&format!("{how}{n}")).await, (201, false));
        }
        assert_eq!(pool.size(), before, "transactions take none of the pool");
        assert!(log.exists());
        if how == "closed" {
            pool.close().await;
            gone(how).await;
            assert_eq!(send("late").await.0, 503);
            assert!(!log.exists());
        }
        drop((pool, send));
        gone(how).await;
    }
}

/// A second store on the file is as a second process: its look sees nothing, and its BEGIN waits for the first one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_loses_the_race_behind_its_look_replays_the_winners_answer_in_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let (begun, go) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let mut sends = Vec::new();
    for _ in 0..2 {
        let store = SqliteStore::open(folder.path().join("test.db")).await.unwrap();
        store.migrate().await.unwrap();
        let (tell, wait) = (Arc::clone(&begun), Arc::clone(&go));
        sends.push(serve(store, move |mut tx: Tx<Sqlite>, _, _| {
            let (tell, wait) = (Arc::clone(&tell), Arc::clone(&wait));
            async move {
                tell.add_permits(1);
                wait.acquire().await.unwrap().forget();
                sqlx::query("CREATE TABLE IF NOT EXISTS effects (id)")
                    .execute(&mut tx)
                    .await
                    .unwrap();
                sqlx::query(PAY).execute(&mut tx).await.map_or(500, |_| 201)
            }
        }));
    }
    for round in 0..10 {
        let key = format!("k{round}");
        let first = tokio::spawn(sends[round % 2](&key));
        begun.acquire().await.unwrap().forget();
        let second = tokio::spawn(sends[1 - round % 2](&key));
        // Nothing tells that it waits.
        tokio::time::sleep(Duration::from_millis(10)).await;
        go.add_permits(1);
        assert_eq!(first.await.unwrap(), (201, false), "{round}");
        assert_eq!(second.await.unwrap(), (201, true), "{round}");
    }
    assert_eq!(begun.available_permits(), 0, "a handler ran twice");
}

/// Three processes that want one key, and whose handlers all come to nothing: whoever runs later has no lower fence,
/// though it may have asked sooner. (A claim that waits for less than 10 ms does not ask what time it is.)
async fn whoever_runs_later_has_no_lower_fence<DB: Backend>(stores: [impl Store; 3])
where
    Tx<DB>: Send,
{
    let fences = Arc::new(Mutex::new(Vec::new()));
    let (begun, go) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let sends = stores.map(|store| {
        let (noted, tell, wait) = (Arc::clone(&fences), Arc::clone(&begun), Arc::clone(&go));
        serve(store, move |_: Tx<DB>, key, fence| {
            noted.lock().unwrap().push((key.clone(), fence));
            let (tell, wait) = (Arc::clone(&tell), Arc::clone(&wait));
            async move {
                if key != "before" {
                    tell.add_permits(1);
                    wait.acquire().await.unwrap().forget();
                }
                500
            }
        })
    });
    for send in &sends {
        send("before").await;
    }
    let mut all = 0;
    for round in 0..20 {
        let key = format!("k{round}");
        let first = tokio::spawn(sends[0](&key));
        begun.acquire().await.unwrap().forget();
        let mut later = Vec::new();
        for send in &sends[1..] {
            later.push(tokio::spawn(send(&key)));
            // Nothing tells that it waits.
            tokio::time::sleep(Duration::from_millis(12)).await;
        }
        go.add_permits(3);
        first.await.unwrap();
        drop(join_all(later).await);
        go.forget_permits(3);
        begun.forget_permits(3);
        let mut fences = fences.lock().unwrap();
        fences.retain(|(of, _)| *of == key);
        all += fences.len();
        assert!(fences.is_sorted_by(|before, after| before.1 < after.1 + 10), "{fences:?}");
    }
    assert!(all > 40, "{all} of 60 runs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_runs_later_has_no_lower_fence_in_postgres() {
    let world = World::new().await;
    let mut stores = Vec::new();
    for _ in 0..3 {
        stores.push(PostgresStore::connect(&world.url).await.unwrap());
    }
    let stores = <[PostgresStore; 3]>::try_from(stores).unwrap();
    whoever_runs_later_has_no_lower_fence::<Postgres>(stores).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_runs_later_has_no_lower_fence_in_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let mut stores = Vec::new();
    for _ in 0..3 {
        let store = SqliteStore::open(folder.path().join("test.db")).await.unwrap();
        store.migrate().await.unwrap();
        stores.push(store);
    }
    let stores = <[SqliteStore; 3]>::try_from(stores).unwrap();
    whoever_runs_later_has_no_lower_fence::<Sqlite>(stores).await;
}

#[tokio::test]
async fn a_claim_that_waited_for_another_process_keeps_its_answer_no_shorter_in_sqlite() {
    let folder = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(folder.path().join("test.db")).await.unwrap();
    store.migrate().await.unwrap();
    let pool = store.pool().clone();
    let fences = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&fences);
    let send = serve(store, move |_: Tx<Sqlite>, _, fence| {
        noted.lock().unwrap().push(fence);
        async { 201 }
    });
    let mut other = pool.acquire().await.unwrap();
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut *other).await.unwrap();
    let sent = tokio::spawn(send("k"));
    // Nothing tells that it waits.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let left = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis();
    sqlx::raw_sql("ROLLBACK").execute(&mut *other).await.unwrap();
    assert_eq!(sent.await.unwrap(), (201, false));
    let fences = fences.lock().unwrap().clone();
    assert!(fences.len() == 1 && u128::from(fences[0]) >= left, "{fences:?}, {left}");
    let expires = sqlx::query_scalar::<_, i64>("SELECT expires_at FROM idempotency_records");
    let expires = u128::try_from(expires.fetch_one(&mut *other).await.unwrap()).unwrap();
    // A day, and the margin that each row has.
    assert!(expires >= left + 86_400_000 + 86_400_000 / 65_536, "{expires}, {left}");
}
