//! What lies outside of a transaction and decides about it: a process that dies while its database is
//! busy, a provider that is called in the middle, a disk that is full, a server that only reads.
//! (Fault matrix, D6, D7, D12 and D13.)

#![allow(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod support;

use std::convert::Infallible;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Postgres, Sqlite};
use support::postgres::PostgresServer;
use support::relay::Relay;
use tower::{Layer as _, ServiceExt as _, service_fn};
use tower_idempotency::store::sql::{Tx, sqlx};
use tower_idempotency::{
    Config, Execution, IdempotencyLayer, PostgresStore, Scope, SqliteStore, Store,
};

const EFFECTS: &str = "CREATE TABLE effects (what TEXT NOT NULL)";
const PAY: &str = "INSERT INTO effects VALUES ('paid')";
const RECORDS: &str = "SELECT COUNT(*) FROM idempotency_records";
/// Longer than a test has patience, shorter than the limit of a statement.
const LONG: &str = "SELECT pg_sleep(25)";

/// Whoever finds its key in use is told so at once.
fn layer<S: Store>(store: S) -> IdempotencyLayer {
    let config = Config::builder().scope(Scope::global()).wait(Duration::ZERO);
    IdempotencyLayer::new(config.build().unwrap(), store)
}

fn answer(status: StatusCode) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut response = Response::new(Full::default());
    *response.status_mut() = status;
    Ok(response)
}

fn request(key: &str) -> Request<Full<Bytes>> {
    Request::post("/pay").header("idempotency-key", key).body(Full::default()).unwrap()
}

/// Status, and if it is a replay.
fn told<B>(response: &Response<B>) -> (u16, bool) {
    (response.status().as_u16(), response.headers().contains_key("idempotent-replayed"))
}

async fn pool(url: &str) -> PgPool {
    PgPoolOptions::new().max_connections(5).connect(url).await.unwrap()
}

async fn database() -> (Arc<PostgresServer>, String, PgPool) {
    let (server, url) = PostgresServer::shared();
    let pool = pool(&url).await;
    PostgresStore::from_pool(pool.clone()).migrate().await.unwrap();
    sqlx::raw_sql(EFFECTS).execute(&pool).await.unwrap();
    (server, url, pool)
}

async fn count(pool: &PgPool, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(pool).await.unwrap()
}

async fn effects(pool: &PgPool) -> i64 {
    count(pool, "SELECT COUNT(*) FROM effects").await
}

/// Pays, with one more statement behind it.
async fn pay_with(layer: &IdempotencyLayer, key: &str, then: &'static str) -> (u16, bool) {
    let handler = service_fn(move |request: Request<Full<Bytes>>| async move {
        let mut tx = Tx::<Postgres>::take(request.extensions()).unwrap();
        for sql in [PAY, then] {
            if sqlx::query(sql).execute(&mut tx).await.is_err() {
                return answer(StatusCode::INTERNAL_SERVER_ERROR);
            }
        }
        answer(StatusCode::CREATED)
    });
    told(&layer.layer(handler).oneshot(request(key)).await.unwrap())
}

async fn pay(layer: &IdempotencyLayer, key: &str) -> (u16, bool) {
    pay_with(layer, key, "SELECT 1").await
}

async fn until(what: &str, mut reached: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !reached().await {
        assert!(Instant::now() < end, "{what}: not within 20 seconds");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

// ---- A process of its own, which dies

const DATABASE: &str = "TEST_PAYS_INTO";
const PROVIDER: &str = "TEST_CALLS_PROVIDER";
const PAUSED: &str = "TEST_IS_PAUSED";
/// What it is told, as an exit code: its writes are gone; or its connection is, and the run that follows
/// found the answer of another process.
const UNDONE: i32 = 3;
const FOUND: i32 = 4;
/// How long a process that is stopped keeps its key.
const IDLE: Duration = Duration::from_secs(1);

/// The other process: this program, told by its environment what to do.
struct Owner(Child);

impl Owner {
    fn start(url: &str, provider: Option<&Provider>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "another_process_serves_one_request_when_it_is_told_to"])
            .env(DATABASE, url)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if let Some(provider) = provider {
            command.env(PROVIDER, provider.folder.join(provider.kind()));
        }
        Self(command.spawn().unwrap())
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.0.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }

    /// As SIGKILL does.
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// No test by itself.
#[tokio::test]
async fn another_process_serves_one_request_when_it_is_told_to() {
    let Ok(url) = std::env::var(DATABASE) else { return };
    let layer = layer(PostgresStore::from_pool(pool(&url).await));
    if std::env::var(PAUSED).is_ok() {
        // Whoever started this stops it between the two, for longer than the limit.
        let store = PostgresStore::builder(pool(&url).await).idle_timeout(IDLE).build();
        let told = pay_with(&self::layer(store), "k", "SELECT pg_sleep(0.3)").await;
        std::process::exit(match told {
            (500, false) => UNDONE,
            (201, true) => FOUND,
            _ => 1,
        });
    }
    match std::env::var(PROVIDER) {
        Err(_) => drop(pay_with(&layer, "k", LONG).await),
        Ok(folder) => drop(charge(&layer, &Provider::at(Path::new(&folder)), true).await),
    }
}

// ---- D7: a dead client and a busy backend

async fn is_busy(pool: &PgPool) -> bool {
    let busy = "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()
                   AND state = 'active' AND query = 'SELECT pg_sleep(25)'";
    count(pool, busy).await == 1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_killed_during_a_long_statement_frees_its_key_long_before_the_statement_ends() {
    let (_server, url, watch) = database().await;
    let mut owner = Owner::start(&url, None);
    until("the long statement", async || is_busy(&watch).await).await;
    let twin = layer(PostgresStore::from_pool(watch.clone()));
    assert_eq!(pay(&twin, "k").await, (409, false), "it is in flight");
    assert_eq!(effects(&watch).await, 0);
    owner.kill();
    let killed = Instant::now();
    let mut told = pay(&twin, "k").await;
    while told.0 == 409 {
        assert!(killed.elapsed() < Duration::from_secs(8), "a dead process keeps its key");
        told = pay(&twin, "k").await;
    }
    println!("D7: free {:?} after the kill, of a statement of 25 s", killed.elapsed());
    assert_eq!(told, (201, false));
    assert_eq!(pay(&twin, "k").await, (201, true));
    // It lets go of the key before the list of what is active forgets it.
    while is_busy(&watch).await {
        assert!(killed.elapsed() < Duration::from_secs(8), "the statement goes on");
    }
    assert_eq!((effects(&watch).await, count(&watch, RECORDS).await), (1, 1));
}

/// The same, where the server looks once in an hour: that the key is free above is the look's doing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_interval_that_the_server_has_for_dead_clients_is_left_as_it_is() {
    let (_server, url, watch) = database().await;
    let hourly = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET \
                  client_connection_check_interval = ''1h''', current_database()); END $$";
    sqlx::raw_sql(hourly).execute(&watch).await.unwrap();
    let mut owner = Owner::start(&url, None);
    until("the long statement", async || is_busy(&watch).await).await;
    owner.kill();
    let twin = layer(PostgresStore::from_pool(pool(&url).await));
    let killed = Instant::now();
    while killed.elapsed() < Duration::from_secs(2) {
        assert_eq!(pay(&twin, "k").await, (409, false));
    }
    assert!(is_busy(&watch).await, "the statement of a dead process goes on");
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                WHERE datname = current_database() AND query = 'SELECT pg_sleep(25)'";
    sqlx::query(end).execute(&watch).await.unwrap();
    until("the twin", async || pay(&twin, "k").await.0 == 201).await;
    assert_eq!(effects(&watch).await, 1);
    println!("D7: with an interval of 1 h the key was in use for the 2 s that were looked at");
}

// ---- D6: a process that does not go on

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_is_stopped_in_its_transaction_loses_the_key_and_cannot_commit_later() {
    let (_server, url, watch) = database().await;
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "another_process_serves_one_request_when_it_is_told_to"]);
    command.env(DATABASE, &url).env(PAUSED, "1").stdout(Stdio::null());
    let mut owner = Owner(command.spawn().unwrap());
    let pays = "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database()
                   AND query = 'SELECT pg_sleep(0.3)' AND state LIKE '";
    let in_state = async |state: &str| {
        let asked = AssertSqlSafe(format!("{pays}{state}%'"));
        sqlx::query_scalar::<_, i64>(asked).fetch_one(&watch).await.unwrap() == 1
    };
    until("the statement behind the payment", async || in_state("active").await).await;
    owner.signal("STOP");
    until("the end of that statement", async || in_state("idle in transaction").await).await;
    let twin = layer(PostgresStore::from_pool(watch.clone()));
    assert_eq!(pay(&twin, "k").await, (409, false), "it is in flight");
    let mut told = (409, false);
    until("the end of the pause", async || {
        told = pay(&twin, "k").await;
        told.0 != 409
    })
    .await;
    assert_eq!(told, (201, false));
    owner.signal("CONT");
    let code = owner.0.wait().unwrap().code().unwrap();
    assert!(
        matches!(code, UNDONE | FOUND),
        "it told its client of a success that was undone: {code}"
    );
    assert_eq!((effects(&watch).await, count(&watch, RECORDS).await), (1, 1));
}

// ---- D12: a call to somebody else within the transaction

/// A provider with a ledger that outlives us: one file for each charge.
#[derive(Clone)]
struct Provider {
    folder: PathBuf,
    /// One that knows our keys charges once for each.
    knows_keys: bool,
}

impl Provider {
    fn kind(&self) -> &'static str {
        if self.knows_keys { "knows-keys" } else { "plain" }
    }

    fn at(ledger: &Path) -> Self {
        let knows_keys = ledger.ends_with("knows-keys");
        Self { folder: ledger.parent().unwrap().to_owned(), knows_keys }
    }

    fn charge(&self, key: &str) {
        let name = match self.knows_keys {
            true => key.replace(|letter: char| !letter.is_ascii_alphanumeric(), "_"),
            false => format!("charge-{}", std::process::id()),
        };
        let ledger = self.folder.join(self.kind());
        fs::create_dir_all(&ledger).unwrap();
        fs::write(ledger.join(name), key).unwrap();
    }

    /// The key of each charge.
    fn charges(&self) -> Vec<String> {
        let ledger = fs::read_dir(self.folder.join(self.kind())).into_iter().flatten();
        ledger.map(|charge| fs::read_to_string(charge.unwrap().path()).unwrap()).collect()
    }
}

/// Writes a row and charges at the provider. The process may end right behind the charge.
async fn charge(layer: &IdempotencyLayer, provider: &Provider, abort: bool) -> (u16, bool) {
    let provider = provider.clone();
    let handler = service_fn(move |request: Request<Full<Bytes>>| {
        let provider = provider.clone();
        async move {
            let mut tx = Tx::<Postgres>::take(request.extensions()).unwrap();
            let execution = request.extensions().get::<Execution>().unwrap();
            let paid = sqlx::query(PAY).execute(&mut tx).await;
            provider.charge(&execution.downstream_key("charge"));
            if abort {
                std::process::abort();
            }
            answer(paid.map_or(StatusCode::INTERNAL_SERVER_ERROR, |_| StatusCode::CREATED))
        }
    });
    told(&layer.layer(handler).oneshot(request("k")).await.unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_within_the_transaction_is_made_again_unless_the_provider_knows_our_key() {
    for knows_keys in [false, true] {
        let (_server, url, watch) = database().await;
        let folder = tempfile::tempdir().unwrap();
        let provider = Provider { folder: folder.path().to_owned(), knows_keys };
        let mut owner = Owner::start(&url, Some(&provider));
        assert!(!owner.0.wait().unwrap().success(), "it ends behind the charge");
        assert_eq!(provider.charges().len(), 1, "nobody takes that back");
        assert_eq!((effects(&watch).await, count(&watch, RECORDS).await), (0, 0));
        let retry = layer(PostgresStore::from_pool(watch.clone()));
        let mut told = charge(&retry, &provider, false).await;
        if told.0 == 409 {
            // The server has not noticed yet.
            until("the retry", async || {
                told = charge(&retry, &provider, false).await;
                told.0 != 409
            })
            .await;
        }
        assert_eq!(told, (201, false));
        assert_eq!(charge(&retry, &provider, false).await, (201, true));
        let (inside, charges) = (effects(&watch).await, provider.charges());
        println!("D12: {}: {} outside, {inside} inside", provider.kind(), charges.len());
        assert_eq!(inside, 1, "the database has it once in any case");
        assert_eq!(charges.len(), if knows_keys { 1 } else { 2 }, "{charges:?}");
        assert!(charges.iter().all(|key| *key == charges[0]), "both runs send the same key");
    }
}

// ---- D13: a disk that is full, a server that only reads

/// A file system of a megabyte or two.
#[derive(Clone)]
struct Disk(Arc<Mounted>);

struct Mounted(tempfile::TempDir);

impl Disk {
    fn of(size: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("disk").tempdir().unwrap();
        let size = format!("size={size},mode=0777");
        as_root(&["mount", "-t", "tmpfs", "-o", &size, "tmpfs", folder.path().to_str().unwrap()]);
        Self(Arc::new(Mounted(folder)))
    }

    fn path(&self) -> &Path {
        self.0.0.path()
    }

    fn filler(&self) -> PathBuf {
        self.path().join("filler")
    }

    /// Takes what is left.
    fn fill(&self) {
        use std::io::Write as _;
        let mut file = fs::File::create(self.filler()).unwrap();
        while file.write(&[0; 4096]).is_ok_and(|written| written > 0) {}
    }

    fn clear(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        as_root(&["umount", "--lazy", self.0.path().to_str().unwrap()]);
    }
}

#[track_caller]
fn as_root(command: &[&str]) {
    let run = |prefix: &[&str]| {
        let words: Vec<_> = prefix.iter().chain(command).collect();
        let status = Command::new(words[0]).args(&words[1..]).stdin(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    let done = run(&[]) || run(&["sudo", "-n"]);
    assert!(
        done || std::thread::panicking(),
        "{command:?}: needs root, or sudo without a password"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_under_sqlite_stores_nothing_and_frees_the_key() {
    let disk = Disk::of("1m");
    let store = SqliteStore::open(disk.path().join("test.db")).await.unwrap();
    store.migrate().await.unwrap();
    let pool = store.pool().clone();
    sqlx::raw_sql(EFFECTS).execute(&pool).await.unwrap();
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&runs);
    let service = layer(store).layer(service_fn(move |request: Request<Full<Bytes>>| {
        counted.fetch_add(1, Ordering::SeqCst);
        async move {
            let mut tx = Tx::<Sqlite>::take(request.extensions()).unwrap();
            let paid = sqlx::query(PAY).execute(&mut tx).await;
            answer(paid.map_or(StatusCode::INTERNAL_SERVER_ERROR, |_| StatusCode::CREATED))
        }
    }));
    let pay = async |key| told(&service.clone().oneshot(request(key)).await.unwrap());
    let both = async || -> (i64, i64) {
        let effects = sqlx::query_scalar("SELECT COUNT(*) FROM effects").fetch_one(&pool);
        let effects = effects.await.unwrap();
        (effects, sqlx::query_scalar(RECORDS).fetch_one(&pool).await.unwrap())
    };
    assert_eq!(pay("before").await, (201, false));
    disk.fill();
    // More often than the pool has connections.
    for _ in 0..12 {
        let told = pay("k").await;
        println!("D13: SQLite on a full disk: {}", told.0);
        assert_eq!(told, (503, false));
        assert_eq!(both().await, (1, 1));
    }
    assert_eq!(pay("before").await, (201, true), "what stands is still told");
    disk.clear();
    assert_eq!(pay("k").await, (201, false));
    assert_eq!(pay("k").await, (201, true));
    assert_eq!(both().await, (2, 2));
    println!("D13: SQLite with space again: 201, after {} runs", runs.load(Ordering::SeqCst));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_under_postgresql_stores_nothing_and_frees_the_key() {
    // Under the record the claim fails, under the effect the handler's own statement.
    for table in ["idempotency_records", "effects"] {
        let (server, url, watch) = database().await;
        let disk = Disk::of("2m");
        let folder = disk.path().join("space");
        fs::create_dir(&folder).unwrap();
        let folder = folder.to_str().unwrap();
        as_root(&["chmod", "0777", folder]);
        let owner = fs::metadata(server.data()).unwrap();
        std::os::unix::fs::chown(folder, Some(owner_of(&owner)), None).unwrap();
        let space = format!("small_{table}");
        server.psql(&format!("CREATE TABLESPACE {space} LOCATION '{folder}'"));
        let moved = format!("ALTER TABLE {table} SET TABLESPACE {space}");
        sqlx::query(AssertSqlSafe(moved)).execute(&watch).await.unwrap();
        let layer = layer(PostgresStore::from_pool(watch.clone()));
        // The table has no page yet, and cannot get one.
        disk.fill();
        for _ in 0..3 {
            let told = pay(&layer, "k").await;
            println!("D13: PostgreSQL, full under {table}: {}", told.0);
            assert_eq!(told, (503, false));
            assert_eq!((effects(&watch).await, count(&watch, RECORDS).await), (0, 0));
        }
        disk.clear();
        assert_eq!(pay(&layer, "k").await, (201, false));
        assert_eq!(pay(&layer, "k").await, (201, true));
        assert_eq!((effects(&watch).await, count(&watch, RECORDS).await), (1, 1));
        watch.close().await;
        let name = url.split(['/', '?']).nth(3).unwrap();
        server.psql(&format!("DROP DATABASE {name} WITH (FORCE)"));
        server.psql(&format!("DROP TABLESPACE {space}"));
    }
}

fn owner_of(file: &fs::Metadata) -> u32 {
    std::os::unix::fs::MetadataExt::uid(file)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_only_reads_replays_and_runs_nothing_until_it_writes() {
    let mut primary = PostgresServer::start();
    let pool = pool(&primary.url()).await;
    PostgresStore::from_pool(pool.clone()).migrate().await.unwrap();
    sqlx::raw_sql(EFFECTS).execute(&pool).await.unwrap();
    assert_eq!(pay(&layer(PostgresStore::from_pool(pool.clone())), "before").await, (201, false));
    let relay = Relay::to(primary.port()).await;
    let standby = primary.standby_through(relay.port());
    let copy = self::pool(&standby.url()).await;
    let layer = layer(PostgresStore::from_pool(copy.clone()));
    for _ in 0..3 {
        let told = pay(&layer, "k").await;
        println!("D13: PostgreSQL that only reads: {}", told.0);
        assert_eq!(told, (503, false));
    }
    assert_eq!(pay(&layer, "before").await, (201, true), "what stands is still told");
    pool.close().await;
    primary.stop_at_once();
    standby.psql("SELECT pg_promote()");
    assert_eq!(pay(&layer, "k").await, (201, false));
    assert_eq!(pay(&layer, "k").await, (201, true));
    assert_eq!((effects(&copy).await, count(&copy, RECORDS).await), (2, 2));
}

/// An operator who freezes a database means payments first of all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_set_to_read_only_is_obeyed_and_its_key_stays_free() {
    let (_server, url, watch) = database().await;
    let set = |on: &str| {
        format!(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_read_only = {on}', \
             current_database()); END $$"
        )
    };
    let frozen = async |on: &'static str| {
        let mut operator = watch.begin_with("BEGIN READ WRITE").await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(set(on))).execute(&mut *operator).await.unwrap();
        operator.commit().await.unwrap();
        layer(PostgresStore::from_pool(pool(&url).await))
    };
    let free = layer(PostgresStore::from_pool(watch.clone()));
    assert_eq!(pay(&free, "before").await, (201, false));
    let only_reads = frozen("on").await;
    for _ in 0..2 {
        assert_eq!(pay(&only_reads, "k").await, (503, false));
    }
    assert_eq!(pay(&only_reads, "before").await, (201, true), "what stands is still told");
    assert_eq!((effects(&watch).await, count(&watch, RECORDS).await), (1, 1));
    let thawed = frozen("off").await;
    assert_eq!(pay(&thawed, "k").await, (201, false));
    assert_eq!(effects(&watch).await, 2);
}

/// SQLite may undo a whole transaction when a statement fails: what comes next would stand alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_goes_on_after_a_full_disk_writes_nothing_outside_of_its_transaction() {
    let disk = Disk::of("4m");
    let store = SqliteStore::open(disk.path().join("test.db")).await.unwrap();
    store.migrate().await.unwrap();
    let pool = store.pool().clone();
    sqlx::raw_sql(EFFECTS).execute(&pool).await.unwrap();
    let room = disk.clone();
    let service = layer(store).layer(service_fn(move |request: Request<Full<Bytes>>| {
        let room = room.clone();
        async move {
            let mut tx = Tx::<Sqlite>::take(request.extensions()).unwrap();
            // More than is kept in memory, so that it has to be written before the COMMIT.
            let much =
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 64)
                        INSERT INTO effects SELECT hex(randomblob(65536)) FROM n";
            let much = sqlx::query(much).execute(&mut tx).await;
            let code =
                much.unwrap_err().into_database_error().and_then(|e| Some(e.code()?.into_owned()));
            assert_eq!(code.as_deref(), Some("13"), "SQLITE_FULL");
            room.clear();
            let next = sqlx::query(PAY).execute(&mut tx).await.map(drop);
            println!("D13: SQLite, a statement behind SQLITE_FULL: {next:?}");
            answer(StatusCode::CREATED)
        }
    }));
    for _ in 0..3 {
        disk.fill();
        let told = told(&service.clone().oneshot(request("k")).await.unwrap());
        assert_eq!(told, (503, false));
        for table in ["SELECT COUNT(*) FROM effects", RECORDS] {
            let rows: i64 = sqlx::query_scalar(table).fetch_one(&pool).await.unwrap();
            assert_eq!(rows, 0, "{table}");
        }
    }
}
