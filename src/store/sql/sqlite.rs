//! The stores in SQLite.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqlitePool, SqlitePoolOptions,
    SqliteQueryResult, SqliteRow, SqliteSynchronous,
};
use sqlx::{AssertSqlSafe, Row as _, SqlSafeStr as _, SqlStr, Sqlite};

use super::inspect::{inspect, inspected};
use super::lease::LeaseCore;
use super::line::{Handing, Line};
use super::transactional::{Core, SAVEPOINT, Texts};
use super::{Found, Opened, Opening, Peeked, Row, Weight, backend, not_done, store};
use crate::error::{StoreError, StoreErrorKind};
use crate::record::Millis;
use crate::scope::StorageKey;

/// The table, for a migration of one's own. [`SqliteStore::migrate`] runs it; it may run again.
pub const SCHEMA: &str = "\
CREATE TABLE IF NOT EXISTS idempotency_records (
    storage_key BLOB NOT NULL PRIMARY KEY CHECK (typeof(storage_key) = 'blob' AND length(storage_key) = 24),
    -- for people, the record says it too: 1 in flight, 2 open, 3 outcome unknown, 4 completed (or in
    -- flight, in the transaction that is to complete it), 5 in flight and nothing has happened yet
    state INTEGER NOT NULL CHECK (state BETWEEN 1 AND 5),
    -- milliseconds since 1970; a row past it counts as absent
    expires_at INTEGER NOT NULL CHECK (expires_at > 0),
    record BLOB NOT NULL CHECK (typeof(record) = 'blob' AND length(record) > 0),
    CHECK (substr(record, 1, 1) <> x'01'
           OR (length(record) >= 84
               AND (state = 4 OR hex(substr(record, 2, 1)) = printf('%02X', state))))
);
CREATE INDEX IF NOT EXISTS idempotency_records_expires_at ON idempotency_records (expires_at);
-- what nobody has settled, for operators; of a list of states SQLite makes a table for each row that is written
CREATE INDEX IF NOT EXISTS idempotency_records_unsettled
    ON idempotency_records (expires_at, storage_key) WHERE state <> 2 AND state <> 4;
-- what operators changed; rows may be removed when nobody needs them any more
CREATE TABLE IF NOT EXISTS idempotency_trail (
    id BLOB NOT NULL PRIMARY KEY CHECK (typeof(id) = 'blob' AND length(id) = 16),
    -- milliseconds since 1970
    noted_at INTEGER NOT NULL,
    storage_key BLOB NOT NULL CHECK (typeof(storage_key) = 'blob' AND length(storage_key) = 24),
    action TEXT NOT NULL,
    who TEXT NOT NULL,
    why TEXT NOT NULL,
    -- none: it was begun, and whoever did so did not get to say more
    outcome TEXT
);
CREATE INDEX IF NOT EXISTS idempotency_trail_noted_at ON idempotency_trail (noted_at);
";

struct Sql;

impl Sql {
    const LOOK: &str = "
        SELECT CAST(strftime('%s', 'now') AS INTEGER) * 1000
                 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER),
               k.record, k.expires_at
          FROM (SELECT 1) AS one
          LEFT JOIN idempotency_records AS k ON k.storage_key = $1";
    /// The whole database is locked already.
    const LOOK_AND_LOCK: &str = Self::LOOK;
    const SWEEP: &str = "
        DELETE FROM idempotency_records WHERE storage_key IN (
            SELECT storage_key FROM idempotency_records
             WHERE expires_at <= CAST(strftime('%s', 'now') AS INTEGER) * 1000
                                   + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)
             ORDER BY expires_at LIMIT $1)";
    const REMOTE: bool = false;
    const CLOSING_COMMITS: bool = true;
    /// A sum that is too large is an error, behind which nothing is committed. There is no plainer one
    /// outside of triggers.
    const CLOSE: &str = "
        UPDATE idempotency_records
           SET state = $2, record = $3, expires_at = COALESCE($4, expires_at)
         WHERE storage_key = $1 AND record = $5;
        SELECT CASE changes() WHEN 1 THEN 1 ELSE abs(-9223372036854775807 - 1) END;
        COMMIT";
    const PEEK: &str = "SELECT record, expires_at FROM idempotency_records WHERE storage_key = $1";
    /// One way to the thread of the connection instead of four. The driver keeps each of the statements
    /// prepared.
    ///
    /// Behind a row that is there nothing is to run: the driver leaves off at the first row, and a second one would
    /// be an error, as in [`CLOSE`](Self::CLOSE).
    const OPEN: &str = "
        SELECT record, expires_at FROM idempotency_records WHERE storage_key = $1
         UNION ALL
        SELECT NULL, CASE WHEN state IS NOT NULL THEN abs(-9223372036854775807 - 1) END
          FROM idempotency_records WHERE storage_key = $1;
        BEGIN IMMEDIATE;
        INSERT INTO idempotency_records (storage_key, state, record, expires_at)
        VALUES ($1, $2, $3, $4);
        SAVEPOINT idempotency_claim";

    /// SQLITE_NOMEM, SQLITE_INTERRUPT, SQLITE_IOERR, SQLITE_FULL
    /// (<https://www.sqlite.org/lang_transaction.html>, "response to errors within a transaction").
    fn ends(code: &str) -> bool {
        matches!(code.parse::<u32>().map(|code| code & 0xff), Ok(7 | 9 | 10 | 13))
    }

    /// SQLITE_CONSTRAINT, behind which a statement with OR ROLLBACK, or a trigger, has ended it.
    fn may_end(code: &str) -> bool {
        matches!(code.parse::<u32>().map(|code| code & 0xff), Ok(19))
    }

    fn is_bare(_: &sqlx::Error) -> bool {
        false
    }

    /// There is no BEGIN within a transaction.
    async fn is_open(connection: &mut SqliteConnection) -> sqlx::Result<bool> {
        match sqlx::query("BEGIN").execute(&mut *connection).await {
            Ok(_) => sqlx::query("ROLLBACK").execute(connection).await.map(|_| false),
            Err(error) if primary(&error) == Some(ERROR) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// There is one lock for everything, and [`weigh`] takes it for that.
    fn may_be_the_table(_: &sqlx::Error) -> bool {
        false
    }

    async fn is_table_locked(_: &mut SqliteConnection) -> sqlx::Result<bool> {
        Ok(false)
    }

    /// Writes nothing, as a statement that writes. (BEGIN IMMEDIATE does not tell: where nothing can be written, it begins to
    /// read.) A file that may only be read refuses it before anything else; one whose lock somebody has is written at
    /// this moment, and is not waited for.
    async fn why_read_only(connection: &mut SqliteConnection) -> sqlx::Result<Option<String>> {
        let patience: i64 =
            sqlx::query_scalar("PRAGMA busy_timeout").fetch_one(&mut *connection).await?;
        sqlx::query("PRAGMA busy_timeout = 0").execute(&mut *connection).await?;
        let written = sqlx::query("DELETE FROM idempotency_records WHERE 0");
        let written = written.execute(&mut *connection).await;
        let patience = AssertSqlSafe(format!("PRAGMA busy_timeout = {patience}"));
        sqlx::query(patience).execute(connection).await?;
        match written {
            Ok(_) => Ok(None),
            Err(error) if super::weigh::<Sqlite>(&error) == Weight::Unreached => Ok(None),
            Err(error) => match primary(&error) {
                // There is no table yet: whoever makes it will be told.
                Some(ERROR) => Ok(None),
                Some(READONLY) => Ok(Some(format!("{READ_ONLY} ({error})"))),
                _ => Err(error),
            },
        }
    }

    async fn peek(connection: &mut SqliteConnection, key: StorageKey) -> sqlx::Result<Peeked> {
        let peek = sqlx::query(Self::PEEK).bind(&key.as_bytes()[..]);
        let row = peek.fetch_optional(connection).await?;
        let row = row.as_ref().map(Self::row).transpose()?;
        Ok(Peeked { found: Found { now: Self::now(), row }, able: true })
    }

    fn row(row: &SqliteRow) -> sqlx::Result<(Bytes, i64)> {
        Ok((Bytes::from(row.try_get::<Vec<u8>, _>(0)?), row.try_get(1)?))
    }

    /// A clock of this machine is this process's clock.
    fn now() -> i64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
    }

    fn here() -> Option<Millis> {
        Some(Millis(Self::now().unsigned_abs()))
    }

    /// SQLITE_ERROR is what the sum comes to.
    fn closed(done: sqlx::Result<SqliteQueryResult>) -> sqlx::Result<u64> {
        match done {
            Ok(_) => Ok(1),
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("1") => Ok(0),
            Err(error) => Err(error),
        }
    }

    async fn enable(_: &mut SqliteConnection, _: &Opening) -> sqlx::Result<()> {
        Ok(())
    }

    async fn open(
        connection: &mut SqliteConnection,
        _: &Opening,
        row: &Row,
    ) -> sqlx::Result<Opened> {
        let open = sqlx::query(Self::OPEN)
            .bind(&row.key.as_bytes()[..])
            .bind(row.state)
            .bind(&row.record[..])
            .bind(row.expires);
        let found = open.fetch_optional(connection).await?;
        let found = found.as_ref().map(Self::row).transpose()?;
        Ok(match found {
            Some(row) => Opened::Found(Found { now: Self::now(), row: Some(row) }),
            None => Opened::Claimed(None),
        })
    }

    // Transactions are begun and ended by statements, not by the driver's own commands: these are parsed
    // anew each time, and count a transaction that the database has ended by itself as open.

    async fn begin(connection: &mut SqliteConnection, sql: SqlStr) -> sqlx::Result<()> {
        sqlx::query(sql).execute(connection).await.map(drop)
    }

    async fn commit(connection: &mut SqliteConnection) -> sqlx::Result<()> {
        sqlx::query("COMMIT").execute(connection).await.map(drop)
    }

    /// SQLite may have done it already, when a disk was full: then there is nothing to roll back, and
    /// something can be begun.
    async fn rollback(connection: &mut SqliteConnection) -> sqlx::Result<()> {
        let rollback = "ROLLBACK";
        match sqlx::query(rollback).execute(&mut *connection).await {
            Ok(_) => Ok(()),
            Err(_) => {
                sqlx::query("BEGIN").execute(&mut *connection).await?;
                sqlx::query(rollback).execute(connection).await.map(drop)
            }
        }
    }
}

/// A transaction that reads first and then writes is refused at once, whatever the busy time-out; one
/// that begins by taking the lock waits for it.
const BEGIN: &str = "BEGIN IMMEDIATE";

/// How long a transaction waits for those of other processes. Within this process they queue.
const BUSY: Duration = Duration::from_secs(5);
/// How often a file that others are making is opened, and after which pause: two seconds in all.
const OPENINGS: u32 = 20;
const OPENING_PAUSE: Duration = Duration::from_millis(100);
/// For reading, for operators, and for handlers that use the pool beside their transaction.
const CONNECTIONS: u32 = 4;

/// A transactional store in an SQLite file: key, the handler's writes and the stored response commit
/// together or not at all.
///
/// SQLite has **one writer at a time**: from its claim to its answer a request has the file for itself,
/// whatever its key, and others queue. So handlers should be short. Replays do not queue.
///
/// # Durability
/// The file is opened in WAL mode with `synchronous = FULL`: a commit survives a power cut.
#[derive(Clone, Debug)]
pub struct SqliteStore(Core<Sqlite>);

/// A lease store in an SQLite file, for handlers whose effects are elsewhere: the record is committed
/// before the handler starts, and outlives a crash of the process. Handlers run side by side.
#[derive(Clone, Debug)]
pub struct SqliteLeaseStore(LeaseCore<Sqlite>);

backend!(Sqlite, SqliteConnection, "sqlite", Sql, weigh);
store!(SqliteStore);
store!(SqliteLeaseStore);
inspected!(
    Sqlite,
    SqliteConnection,
    "CAST(strftime('%s', 'now') AS INTEGER) * 1000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER)",
    "length(record)",
    "state <> 2 AND state <> 4",
    None
);
inspect!(SqliteStore, |store| store.0.lease());
inspect!(SqliteLeaseStore, |store| &store.0);

/// SQLITE_ERROR, SQLITE_READONLY, SQLITE_CANTOPEN
const ERROR: u32 = 1;
const READONLY: u32 = 8;
const CANTOPEN: u32 = 14;

/// What to change where a file is not written.
const READ_ONLY: &str = "the database is read-only for this program: let its user write the file, those beside it \
                         (-wal, -shm), and the folder, in which SQLite makes them";
const NO_FILE: &str = "the file cannot be opened or made: is there its folder, and may this program's user read and \
                       write both?";

fn primary(error: &sqlx::Error) -> Option<u32> {
    let code = error.as_database_error()?.code()?;
    Some(code.parse::<u32>().ok()? & 0xff)
}

/// Why a file could not be opened, or the tables not made.
fn not_set_up(operation: &'static str, error: sqlx::Error) -> StoreError {
    let advice = match primary(&error) {
        Some(READONLY) => READ_ONLY,
        Some(CANTOPEN) => NO_FILE,
        _ => return not_done::<Sqlite>(operation, error).saying_why(),
    };
    let why = format!("{advice} ({error})");
    StoreError::new(StoreErrorKind::Backend, "sqlite", operation).with_source(why).saying_why()
}

/// By the primary code, which is the low byte (<https://www.sqlite.org/rescode.html>).
fn weigh(code: &str) -> Weight {
    match code.parse::<u32>().map(|code| code & 0xff) {
        // SQLITE_BUSY, SQLITE_LOCKED: there is one lock for all keys, so this says nothing of ours.
        Ok(5 | 6) => Weight::Unreached,
        // SQLITE_FULL
        Ok(13) => Weight::Full,
        // SQLITE_CONSTRAINT
        Ok(19) => Weight::Constraint,
        _ => Weight::Refused,
    }
}

impl SqliteStore {
    /// Opens the file, and makes it if there is none.
    ///
    /// # Errors
    /// [`StoreError`] if it cannot be opened, or may not be written. `:memory:` is refused: a database in
    /// memory belongs to one connection.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let pool = open(path.as_ref()).await?;
        let store = Self::new(writer(&pool), pool, Handing::Kept);
        store.0.close_with_pool();
        Ok(store)
    }

    /// On a pool that is there.
    ///
    /// # Errors
    /// [`StoreError`] if the pool's connections are not set to survive a power cut: `synchronous` must
    /// be `FULL` (or `EXTRA`), which is the default.
    pub async fn from_pool(pool: SqlitePool) -> Result<Self, StoreError> {
        durable(&pool).await?;
        Ok(Self::new(pool.clone(), pool, Handing::Off))
    }

    fn new(writers: SqlitePool, pool: SqlitePool, handing: Handing) -> Self {
        let lease = LeaseCore::new(pool.clone(), BEGIN.into_sql_str());
        let claimed = SAVEPOINT.into_sql_str();
        let opening = Opening {
            prepare: Box::default(),
            settings: Box::default(),
            before: Box::default(),
            behind: Box::default(),
        };
        let begin = BEGIN.into_sql_str();
        let texts = Texts { begin, claimed, opening, unlimited: None, patience: None };
        Self(Core::new(writers, pool, Line::new(1, handing), texts, lease))
    }

    /// Makes the table if it is not there.
    ///
    /// # Errors
    /// [`StoreError`] with the database's reason.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        migrate(self.pool()).await
    }

    /// The pool. A store that [`open`](Self::open) made has one more connection, for its transactions; it is
    /// closed with the pool.
    #[must_use]
    pub fn pool(&self) -> &SqlitePool {
        self.0.pool()
    }

    /// Removes up to `at_most` records whose retention is over. Nothing depends on it but the disk.
    ///
    /// # Errors
    /// [`StoreError`] with the database's reason.
    pub async fn sweep(&self, at_most: u32) -> Result<u64, StoreError> {
        self.0.lease().sweep(at_most).await
    }
}

impl SqliteLeaseStore {
    /// Opens the file, and makes it if there is none.
    ///
    /// # Errors
    /// [`StoreError`] if it cannot be opened, or may not be written. `:memory:` is refused: a database in
    /// memory belongs to one connection.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        Ok(Self(LeaseCore::new(open(path.as_ref()).await?, BEGIN.into_sql_str())))
    }

    /// Opens a file that is there, and changes nothing about it: neither is it made, nor is its journal changed. For
    /// tools, which may be given the wrong path.
    ///
    /// # Errors
    /// [`StoreError`] if it cannot be opened.
    pub async fn open_existing(path: impl AsRef<Path>) -> Result<Self, StoreError> {
        let pool = connect(options(path.as_ref())?.create_if_missing(false)).await?;
        Ok(Self(LeaseCore::new(pool, BEGIN.into_sql_str())))
    }

    /// On a pool that is there.
    ///
    /// # Errors
    /// As [`SqliteStore::from_pool`].
    pub async fn from_pool(pool: SqlitePool) -> Result<Self, StoreError> {
        durable(&pool).await?;
        Ok(Self(LeaseCore::new(pool, BEGIN.into_sql_str())))
    }

    /// Makes the table if it is not there.
    ///
    /// # Errors
    /// [`StoreError`] with the database's reason.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        migrate(self.pool()).await
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &SqlitePool {
        self.0.pool()
    }

    /// Removes up to `at_most` records whose retention is over. Nothing depends on it but the disk.
    ///
    /// # Errors
    /// [`StoreError`] with the database's reason.
    pub async fn sweep(&self, at_most: u32) -> Result<u64, StoreError> {
        self.0.sweep(at_most).await
    }
}

async fn open(path: &Path) -> Result<SqlitePool, StoreError> {
    let options = options(path)?.create_if_missing(true).journal_mode(SqliteJournalMode::Wal);
    let pool = connect(options).await?;
    // SQLite opens a file that may not be written as well, to read it.
    let asked = async { Sql::why_read_only(&mut *pool.acquire().await?).await };
    match asked.await.map_err(|error| not_set_up("open", error))? {
        None => Ok(pool),
        Some(why) => {
            pool.close().await;
            let error = StoreError::new(StoreErrorKind::Backend, "sqlite", "open");
            Err(error.with_source(why).saying_why())
        }
    }
}

fn options(path: &Path) -> Result<SqliteConnectOptions, StoreError> {
    if path.as_os_str() == ":memory:" {
        let why = "a database in memory belongs to one connection: give a file";
        return Err(StoreError::new(StoreErrorKind::Backend, "sqlite", "open")
            .with_source(why)
            .saying_why());
    }
    Ok(SqliteConnectOptions::new()
        .filename(path)
        .synchronous(SqliteSynchronous::Full)
        .busy_timeout(BUSY))
}

/// The one that writes, apart from those that read: another connection's write makes all that one remembers of the
/// file worthless.
fn writer(pool: &SqlitePool) -> SqlitePool {
    let options = SqliteConnectOptions::clone(&pool.connect_options());
    SqlitePoolOptions::new()
        .max_connections(1)
        .test_before_acquire(false)
        .connect_lazy_with(options)
}

async fn connect(options: SqliteConnectOptions) -> Result<SqlitePool, StoreError> {
    let mut tries = 0;
    loop {
        // A connection to a file is a thread of this process: asked or not, it is there.
        let pool = SqlitePoolOptions::new().max_connections(CONNECTIONS).test_before_acquire(false);
        match pool.connect_with(options.clone()).await {
            // Several processes may make the file at the same moment; SQLite lets one of them do it,
            // and refuses the others without waiting.
            Err(sqlx::Error::Database(error))
                if tries < OPENINGS
                    && error.code().is_some_and(|code| weigh(&code) == Weight::Unreached) =>
            {
                tries += 1;
                tokio::time::sleep(OPENING_PAUSE).await;
            }
            opened => {
                return opened.map_err(|error| not_set_up("open", error));
            }
        }
    }
}

async fn durable(pool: &SqlitePool) -> Result<(), StoreError> {
    let level: i64 = sqlx::query_scalar("PRAGMA synchronous")
        .fetch_one(pool)
        .await
        .map_err(|error| not_set_up("open", error))?;
    // 2 is FULL, 3 is EXTRA.
    if level < 2 {
        let why = "synchronous is below FULL: a power cut would lose commits";
        return Err(StoreError::new(StoreErrorKind::Backend, "sqlite", "open")
            .with_source(why)
            .saying_why());
    }
    Ok(())
}

/// What [`SCHEMA`] makes.
const PRESENT: &str = "\
    SELECT count(*) = 5 FROM sqlite_master \
     WHERE name IN ('idempotency_records', 'idempotency_records_expires_at', \
                    'idempotency_records_unsettled', 'idempotency_trail', 'idempotency_trail_noted_at')";

async fn migrate(pool: &SqlitePool) -> Result<(), StoreError> {
    let made = async {
        // Whoever writes waits for the one writer, whose payment may be long.
        if sqlx::query_scalar(PRESENT).fetch_one(pool).await? {
            return Ok(());
        }
        let mut transaction = pool.begin_with(BEGIN).await?;
        sqlx::raw_sql(SCHEMA).execute(&mut *transaction).await?;
        transaction.commit().await
    };
    made.await.map_err(|error| not_set_up("migrate", error))
}
