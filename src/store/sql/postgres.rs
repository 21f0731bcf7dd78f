//! The stores in PostgreSQL.

use std::fmt::Write as _;
use std::time::Duration;

use bytes::Bytes;
use sqlx::postgres::{
    PgConnectOptions, PgConnection, PgDatabaseError, PgPool, PgPoolOptions, PgQueryResult,
    PgTransactionManager,
};
use sqlx::{AssertSqlSafe, Connection as _, Postgres, Row as _, SqlSafeStr, SqlStr};
use sqlx_core::transaction::TransactionManager as _;

use super::inspect::{inspect, inspected};
use super::lease::LeaseCore;
use super::line::{Handing, Line};
use super::session::reason;
use super::transactional::{Core, SAVEPOINT, Texts};
use super::{Found, Opened, Opening, Peeked, Row, Weight, backend, not_done, store};
use crate::error::{StoreError, StoreErrorKind};
use crate::record::Millis;
use crate::scope::StorageKey;

/// The table, for a migration of one's own. [`PostgresStore::migrate`] runs it; it may run again.
///
/// The table is found by the connection's `search_path`.
///
/// It has no CHECK constraints: PostgreSQL reads their text anew for each statement that writes, which was a third of
/// what it did for a request. A record that cannot be read is found when it is read, and then nothing
/// runs.
pub const SCHEMA: &str = "\
CREATE TABLE IF NOT EXISTS idempotency_records (
    -- 24 bytes
    storage_key bytea PRIMARY KEY,
    -- for people, the record says it too: 1 in flight, 2 open, 3 outcome unknown, 4 completed (or in
    -- flight, in the transaction that is to complete it), 5 in flight and nothing has happened yet
    state smallint NOT NULL,
    -- milliseconds since 1970; a row past it counts as absent
    expires_at bigint NOT NULL,
    record bytea NOT NULL
);
CREATE INDEX IF NOT EXISTS idempotency_records_expires_at ON idempotency_records (expires_at);
-- what nobody has settled, for operators
CREATE INDEX IF NOT EXISTS idempotency_records_unsettled
    ON idempotency_records (expires_at, storage_key) WHERE state IN (1, 3, 5);
-- what operators changed; rows may be removed when nobody needs them any more
CREATE TABLE IF NOT EXISTS idempotency_trail (
    id bytea PRIMARY KEY CHECK (octet_length(id) = 16),
    -- milliseconds since 1970
    noted_at bigint NOT NULL,
    storage_key bytea NOT NULL CHECK (octet_length(storage_key) = 24),
    action text NOT NULL,
    who text NOT NULL,
    why text NOT NULL,
    -- none: it was begun, and whoever did so did not get to say more
    outcome text
);
CREATE INDEX IF NOT EXISTS idempotency_trail_noted_at ON idempotency_trail (noted_at);
";

const LOOK: &str = "
    SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, k.record, k.expires_at
      FROM (SELECT 1) AS one
      LEFT JOIN idempotency_records AS k ON k.storage_key = $1";

/// The clock is read when the lock is there, however long that took.
const LOOK_AND_LOCK: &str = "
    SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, k.record, k.expires_at
      FROM (SELECT 1) AS one
      LEFT JOIN LATERAL (SELECT record, expires_at FROM idempotency_records
                          WHERE storage_key = $1 FOR UPDATE) AS k ON TRUE";

/// The clock is read once, by a query of its own, and the keys are gathered before anything is deleted:
/// so both ends go by an index. Compared with each row, or joined, they would read the whole table.
const SWEEP: &str = "
    DELETE FROM idempotency_records WHERE storage_key = ANY (ARRAY(
        SELECT storage_key FROM idempotency_records
         WHERE expires_at <= (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint)
         ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED))";

/// A look works on a server that takes no payment.
const WHY_READ_ONLY: &str = "
    SELECT CASE
        WHEN pg_is_in_recovery() THEN
            'the server is a standby and read-only: connect to the primary, or promote it'
        WHEN current_setting('transaction_read_only') = 'on' THEN
            'default_transaction_read_only is on, so no key can be claimed: an operator has set it for \
the server, this database or this user, and RESET takes it back'
        END";

/// Locks that keep claims out, also while they wait themselves: claims then wait behind them.
const TABLE_LOCKED: &str = "
    SELECT EXISTS (SELECT FROM pg_locks
        WHERE locktype = 'relation' AND relation = to_regclass('idempotency_records')
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'))";

/// A look, and whether this session has prepared a [`claim`].
const PEEK: &str = "
    SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint, k.record, k.expires_at,
           current_setting('tower_idempotency.enabled', true) IS NOT DISTINCT FROM '3'
      FROM (SELECT 1) AS one
      LEFT JOIN idempotency_records AS k ON k.storage_key = $1";

/// The claim of a key that nobody has, prepared at the server by name: a message of several statements
/// takes no arguments, and this one would be planned anew each time.
///
/// The row expires so long from now as `$4` says, by the server's clock, and what it says of times follows from that.
///
/// It sets the limits of its transaction on the way, which as statements of their own would cost more
/// than the claim. Behind BEGIN and SET, and within the statement, since a SELECT before it would take the
/// snapshot too early:
///
/// * `$5`, `$6`: how long the handler may leave its transaction alone, and how long a statement may take.
/// * `$7`: how long the handler's statements wait for a lock. What is returned is made when the row is there, and so
///   behind the claim's own wait. (How long that may be is said before, since the table is locked before anything of
///   this is run.)
/// * Warnings are to be told, since a COMMIT may come with one ([`TELL_WARNINGS`]), and dead clients and lines are noticed
///   ([`notice_dead_clients`], [`notice_dead_lines`]): once a session in a pool of our own, and here in others.
///
/// Whoever is there already is a row less.
fn claim(name: &str, notices: &str) -> String {
    format!(
        "PREPARE {name} (bytea, smallint, bytea, bigint, text, text, text) AS \
         INSERT INTO idempotency_records (storage_key, state, record, expires_at) \
         SELECT $1, $2, $3, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + $4 \
          WHERE set_config('idle_in_transaction_session_timeout', $5, true) IS NOT NULL \
            AND set_config('statement_timeout', $6, true) IS NOT NULL{notices} \
         ON CONFLICT DO NOTHING \
         RETURNING expires_at, set_config('lock_timeout', $7, true)"
    )
}

/// The name of [`claim`] in sessions that are set already.
const CLAIM: &str = "tower_idempotency_claim_3";
/// And in pools whose sessions are others' to set.
const CLAIM_AND_NOTICE: &str = "tower_idempotency_claim_3n";

/// A COMMIT that was kept from waiting for its standby comes with one.
const TELL_WARNINGS: &str = "SET client_min_messages = warning";

/// What [`TELL_WARNINGS`], [`notice_dead_clients`] and [`notice_dead_lines`] say, as conditions that are always true.
const NOTICES: &str = "
       AND set_config('client_min_messages', 'warning', true) IS NOT NULL
       AND CASE WHEN current_setting('client_connection_check_interval', true) = '0'
                 AND version() LIKE '%linux%'
                THEN set_config('client_connection_check_interval', '250', true) IS NOT NULL
                ELSE true END
       AND CASE WHEN current_setting('tcp_user_timeout', true) = '0'
                 AND current_setting('tcp_keepalives_idle')::int > 5
                 AND version() LIKE '%linux%'
                THEN set_config('tcp_keepalives_idle', '5', true) IS NOT NULL
                 AND set_config('tcp_keepalives_interval', '1', true) IS NOT NULL
                 AND set_config('tcp_keepalives_count', '3', true) IS NOT NULL
                 AND set_config('tcp_user_timeout', '10000', true) IS NOT NULL
                ELSE true END";

/// Says that [`claim`] is prepared, and what it needs is set. A session that is reset loses both.
const ENABLED: &str = "SET tower_idempotency.enabled = '3'";

struct Sql;

impl Sql {
    const LOOK: &str = LOOK;
    const LOOK_AND_LOCK: &str = LOOK_AND_LOCK;
    const SWEEP: &str = SWEEP;
    /// And COMMIT, which comes next, has no limit at the server, and its warnings are told, whatever handlers have set.
    const CLOSE: &str = "
        UPDATE idempotency_records
           SET state = $2, record = $3, expires_at = COALESCE($4, expires_at)
         WHERE storage_key = $1 AND record = $5
           AND set_config('statement_timeout', '0', true) IS NOT NULL
           AND CASE WHEN current_setting('client_min_messages') = 'warning' THEN true
                    ELSE set_config('client_min_messages', 'warning', true) IS NOT NULL END";
    const REMOTE: bool = true;
    const CLOSING_COMMITS: bool = false;

    /// A wait for a row, or for whoever is about to insert the same key, is told with the tuple that it was for. The
    /// second who waits for a row is told none either, so this alone is no proof.
    fn may_be_the_table(error: &sqlx::Error) -> bool {
        let error = error.as_database_error();
        let error = error.and_then(|error| error.try_downcast_ref::<PgDatabaseError>());
        error.is_some_and(|error| error.r#where().is_none())
    }

    async fn is_table_locked(connection: &mut PgConnection) -> sqlx::Result<bool> {
        sqlx::query_scalar(TABLE_LOCKED).fetch_one(connection).await
    }

    async fn why_read_only(connection: &mut PgConnection) -> sqlx::Result<Option<String>> {
        sqlx::query_scalar(WHY_READ_ONLY).fetch_one(connection).await
    }

    fn may_end(_: &str) -> bool {
        false
    }

    async fn is_open(_: &mut PgConnection) -> sqlx::Result<bool> {
        Ok(true)
    }

    /// invalid_sql_statement_name: somebody has taken away what the driver had prepared (`DEALLOCATE ALL`).
    fn is_bare(error: &sqlx::Error) -> bool {
        let code = error.as_database_error().and_then(|error| error.code());
        code.as_deref() == Some("26000")
    }

    /// A transaction with a failed statement stays open, and refuses every other one.
    fn ends(_: &str) -> bool {
        false
    }

    async fn peek(connection: &mut PgConnection, key: StorageKey) -> sqlx::Result<Peeked> {
        let row = sqlx::query(PEEK).bind(&key.as_bytes()[..]).fetch_one(connection).await?;
        let record: Option<Vec<u8>> = row.try_get(1)?;
        let expires: Option<i64> = row.try_get(2)?;
        let found = Found { now: row.try_get(0)?, row: record.map(Bytes::from).zip(expires) };
        Ok(Peeked { found, able: row.try_get(3)? })
    }

    /// Preparing takes a lock of the table, and so waits no longer for it than a claim. What is prepared outlives the
    /// transaction.
    async fn enable(connection: &mut PgConnection, opening: &Opening) -> sqlx::Result<()> {
        for setting in &opening.settings {
            match sqlx::raw_sql(setting.clone()).execute(&mut *connection).await {
                // What a server refuses is lived without.
                Ok(_) | Err(sqlx::Error::Database(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let prepare = &opening.prepare;
        let prepare = format!("BEGIN; SET LOCAL lock_timeout = {}; {prepare}", ms(CLAIM_LOCK));
        let end = match sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut *connection).await {
            Ok(_) => "COMMIT",
            // `RESET ALL` forgets the setting and keeps the statement.
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("42P05") => {
                "ROLLBACK"
            }
            Err(error) => {
                sqlx::raw_sql("ROLLBACK").execute(connection).await?;
                return Err(error);
            }
        };
        let enabled = AssertSqlSafe(format!("{end}; {ENABLED}"));
        sqlx::raw_sql(enabled).execute(connection).await.map(drop)
    }

    /// The driver counts no transaction that is begun by a text of several statements; see [`Self::commit`].
    async fn open(
        connection: &mut PgConnection,
        opening: &Opening,
        row: &Row,
    ) -> sqlx::Result<Opened> {
        let Opening { before, behind, .. } = opening;
        let room = 2 * (row.key.as_bytes().len() + row.record.len()) + 64;
        let mut text = String::with_capacity(before.len() + room + behind.len());
        text.push_str(before);
        push_bytes(&mut text, row.key.as_bytes());
        let expires = row.expires.unwrap_or_default();
        // A `String` takes everything.
        let _ = write!(text, ", {}, ", row.state);
        push_bytes(&mut text, &row.record);
        let _ = write!(text, ", {expires}");
        text.push_str(behind);
        let claimed = sqlx::raw_sql(AssertSqlSafe(text)).fetch_optional(connection).await?;
        Ok(match claimed {
            Some(row) => Opened::Claimed(Some(row.try_get(0)?)),
            None => Opened::Taken,
        })
    }

    fn here() -> Option<Millis> {
        None
    }

    fn closed(done: sqlx::Result<PgQueryResult>) -> sqlx::Result<u64> {
        done.map(|done| done.rows_affected())
    }

    async fn begin(connection: &mut PgConnection, sql: SqlStr) -> sqlx::Result<()> {
        PgTransactionManager::begin(connection, Some(sql)).await
    }

    async fn commit(connection: &mut PgConnection) -> sqlx::Result<()> {
        match PgTransactionManager::get_transaction_depth(connection) {
            0 => sqlx::raw_sql("COMMIT").execute(connection).await.map(drop),
            _ => PgTransactionManager::commit(connection).await,
        }
    }

    async fn rollback(connection: &mut PgConnection) -> sqlx::Result<()> {
        // Nor one whose first message failed behind BEGIN. The server does.
        match PgTransactionManager::get_transaction_depth(connection) {
            0 => sqlx::raw_sql("ROLLBACK").execute(connection).await.map(drop),
            _ => PgTransactionManager::rollback(connection).await,
        }
    }
}

/// As a literal, whatever the server makes of backslashes in plain ones.
fn push_bytes(text: &mut String, bytes: &[u8]) {
    const DIGITS: [u8; 16] = *b"0123456789abcdef";
    text.push_str("E'\\\\x");
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text.push('\'');
}

/// Two processes that make the table at the same moment would both try: one after the other.
const MIGRATION_LOCK: &str = "SELECT pg_advisory_xact_lock(7262958203417365)";

/// How long a claim waits for a twin in another process before it is "in flight". Short: it holds a
/// connection meanwhile, and whoever waits longer waits in this process, without one.
const CLAIM_LOCK: Duration = Duration::from_millis(100);
/// How long a statement of the handler waits for a lock. Longer than any other short transaction
/// lasts, shorter than a client's patience.
const HANDLER_LOCK: Duration = Duration::from_secs(5);
/// How long the handler may leave its transaction alone. A paused server gives the key back after
/// this; a handler that calls outside for longer should not do so within a transaction.
const IDLE: Duration = Duration::from_secs(30);
/// How long one statement may take.
const STATEMENT: Duration = Duration::from_secs(30);
/// Within the transaction the server looks every 250 ms if its client is still there. Otherwise the
/// backend of a process that died would go on with its statement, and hold the key until that ends. A
/// look is one system call, and only statements that take longer than this are ever looked at.
///
/// In a transaction it stands behind the claim, since a SELECT before it would take the snapshot too early. A server
/// whose interval is set keeps it; one that is older than 14 has none, and outside of Linux some refuse it.
fn notice_dead_clients(local: bool) -> String {
    format!(
        "SELECT set_config('client_connection_check_interval', '250', {local}) \
          WHERE current_setting('client_connection_check_interval', true) = '0' \
            AND version() LIKE '%linux%'"
    )
}
/// And the kernel finds out about clients that cannot be heard: after five seconds without a sign it
/// asks three times, a second apart, and what was sent and is not confirmed after ten seconds is given
/// up. Otherwise a key would wait for the idle limit, or, behind a busy backend, for hours.
///
/// As above: behind the claim, if `local` to a transaction, and a server that is set to find out sooner keeps that.
fn notice_dead_lines(local: bool) -> String {
    format!(
        "SELECT set_config('tcp_keepalives_idle', '5', {local}), \
                set_config('tcp_keepalives_interval', '1', {local}), \
                set_config('tcp_keepalives_count', '3', {local}), \
                set_config('tcp_user_timeout', '10000', {local}) \
          WHERE current_setting('tcp_user_timeout', true) = '0' \
            AND current_setting('tcp_keepalives_idle')::int > 5 \
            AND version() LIKE '%linux%'"
    )
}

/// How much later than its own limit a server's answer may come before it is taken for frozen.
const SILENCE: Duration = Duration::from_secs(1);

/// How far the handler's transaction is kept apart from others.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Isolation {
    /// PostgreSQL's own default.
    #[default]
    ReadCommitted,
    /// One snapshot for the whole transaction.
    RepeatableRead,
    /// As if one transaction ran after the other. Conflicts run the whole unit again.
    Serializable,
}

/// A transactional store in PostgreSQL: key, the handler's writes and the stored response commit
/// together or not at all.
///
/// # The pool
/// A request takes one connection, for the claim, the handler and the answer. One connection of the
/// pool is kept out of that (of a pool of one: none), for finding out what became of a COMMIT, for
/// replays, and for handlers that use the pool beside their [`Tx`](super::Tx). Twins take none.
///
/// On its first claim a connection prepares a statement by the name of `tower_idempotency_claim_3` (`…_3n` where
/// connections are not [handed on](PostgresStoreBuilder::hand_on)), and the setting `tower_idempotency.enabled` of its session says so. A pool that
/// [`connect`](Self::connect) makes does not ask a connection that was used within a second if it is alive, and while
/// requests wait for their turn, connections are handed from one to the next without it: with one that has just claimed
/// a new key, the next key is claimed without a look whether it has an answer, which is one message less, and two more if it
/// has.
///
/// # Limits
/// Within the transaction: `lock_timeout` 5 s, `idle_in_transaction_session_timeout` 30 s,
/// `statement_timeout` 30 s; [`PostgresStore::builder`] sets others. If the server has no
/// `client_connection_check_interval` (and is 14 or newer, on Linux), 250 ms: a statement whose process
/// died ends, and its key is free.
#[derive(Clone, Debug)]
pub struct PostgresStore(Core<Postgres>);

/// A lease store in PostgreSQL, for handlers whose effects are elsewhere: the record is committed
/// before the handler starts, and outlives a crash of the server.
#[derive(Clone, Debug)]
pub struct PostgresLeaseStore(LeaseCore<Postgres>);

/// Sets the limits of a [`PostgresStore`].
#[derive(Clone, Debug)]
#[must_use]
pub struct PostgresStoreBuilder {
    pool: PgPool,
    isolation: Isolation,
    lock_timeout: Duration,
    idle_timeout: Duration,
    statement_timeout: Duration,
    handing: Handing,
}

backend!(Postgres, PgConnection, "postgres", Sql, weigh);
store!(PostgresStore);
store!(PostgresLeaseStore);
inspected!(
    Postgres,
    PgConnection,
    "floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint",
    "octet_length(record)",
    "state IN (1, 3, 5)",
    // Long enough for a busy server, short enough that nobody believes the tools hang.
    Some("BEGIN; SET LOCAL lock_timeout = 2000; SET LOCAL statement_timeout = 5000")
);
inspect!(PostgresStore, |store| store.0.lease());
inspect!(PostgresLeaseStore, |store| &store.0);

/// By SQLSTATE (PostgreSQL, appendix A).
fn weigh(code: &str) -> Weight {
    match code {
        // serialization_failure, deadlock_detected
        "40001" | "40P01" => Weight::Conflict,
        // lock_not_available
        "55P03" => Weight::Locked,
        // too_many_connections, cannot_connect_now; read_only_sql_transaction
        "53300" | "57P03" | "25006" => Weight::Unreached,
        // disk_full
        "53100" => Weight::Full,
        // admin_shutdown, crash_shutdown: perhaps after the COMMIT was done
        "57P01" | "57P02" => Weight::Lost,
        code if code.starts_with("08") => Weight::Lost,
        code if code.starts_with("23") => Weight::Constraint,
        _ => Weight::Refused,
    }
}

impl PostgresStore {
    /// Connects, with a pool of ten.
    ///
    /// # Errors
    /// [`StoreError`] if the URL is not one, or the server cannot be reached.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        let pool = PgPoolOptions::new().test_before_acquire(false).before_acquire(|line, about| {
            Box::pin(async move {
                if about.idle_for > TRUSTED {
                    line.ping().await?;
                }
                Ok(true)
            })
        });
        Ok(Self::builder(connect(url, pool).await?).hand_on(true).build())
    }

    /// On a pool that is there.
    #[must_use]
    pub fn from_pool(pool: PgPool) -> Self {
        Self::builder(pool).build()
    }

    /// On a pool that is there, with other limits.
    pub fn builder(pool: PgPool) -> PostgresStoreBuilder {
        PostgresStoreBuilder {
            pool,
            isolation: Isolation::default(),
            lock_timeout: HANDLER_LOCK,
            idle_timeout: IDLE,
            statement_timeout: STATEMENT,
            handing: Handing::Off,
        }
    }

    /// Makes the table if it is not there.
    ///
    /// # Errors
    /// [`StoreError`] with the server's reason.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        migrate(self.pool()).await
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        self.0.pool()
    }

    /// Removes up to `at_most` records whose retention is over, except those that somebody uses:
    /// any number of servers may do it at the same time. Nothing depends on it but the disk.
    ///
    /// # Errors
    /// [`StoreError`] with the server's reason.
    pub async fn sweep(&self, at_most: u32) -> Result<u64, StoreError> {
        self.0.lease().sweep(at_most).await
    }
}

impl PostgresStoreBuilder {
    /// How far the handler's transaction is kept apart from others.
    pub fn isolation(mut self, isolation: Isolation) -> Self {
        self.isolation = isolation;
        self
    }

    /// How long a statement of the handler waits for a lock.
    pub fn lock_timeout(mut self, limit: Duration) -> Self {
        self.lock_timeout = limit;
        self
    }

    /// How long the handler may leave its transaction alone; then the database ends it.
    pub fn idle_timeout(mut self, limit: Duration) -> Self {
        self.idle_timeout = limit;
        self
    }

    /// How long one statement may take.
    pub fn statement_timeout(mut self, limit: Duration) -> Self {
        self.statement_timeout = limit;
        self
    }

    /// Whether a connection is handed on to the next request that waits, without the pool, for up to 100 ms: fewer messages
    /// for each request while there is a line, see the [guide](crate::guide::transactions). [`PostgresStore::connect`]
    /// does so; on a pool of yours it is off, since nothing runs then that the pool does with a connection
    /// that comes back or goes out (`after_release`, `before_acquire`). It also sets `client_min_messages` and, where a
    /// server has none, `client_connection_check_interval` and TCP keepalive for each session instead of each transaction.
    pub fn hand_on(mut self, whether: bool) -> Self {
        self.handing = if whether { Handing::On } else { Handing::Off };
        self
    }

    /// Makes the store.
    #[must_use]
    pub fn build(self) -> PostgresStore {
        let Self { pool, isolation, lock_timeout, idle_timeout, statement_timeout, handing } = self;
        let level = match isolation {
            Isolation::ReadCommitted => "READ COMMITTED",
            Isolation::RepeatableRead => "REPEATABLE READ",
            Isolation::Serializable => "SERIALIZABLE",
        };
        let begin = begin(level, idle_timeout, Some(statement_timeout));
        let claimed = format!(
            "SET LOCAL lock_timeout = {}; {}; {}; {SAVEPOINT}",
            ms(lock_timeout),
            notice_dead_clients(true),
            notice_dead_lines(true),
        );
        let claimed = AssertSqlSafe(claimed).into_sql_str();
        let turns = pool.options().get_max_connections().saturating_sub(1).max(1) as usize;
        let lease = lease(pool.clone());
        let notices =
            [TELL_WARNINGS.to_owned(), notice_dead_clients(false), notice_dead_lines(false)]
                .map(AssertSqlSafe);
        let (name, settings, notices) = match handing {
            Handing::On => (CLAIM, notices.map(SqlSafeStr::into_sql_str).into(), ""),
            Handing::Off | Handing::Kept => (CLAIM_AND_NOTICE, Box::default(), NOTICES),
        };
        let opening = Opening {
            prepare: claim(name, notices).into(),
            settings,
            before: format!(
                "BEGIN ISOLATION LEVEL {level}; SET LOCAL lock_timeout = {}; EXECUTE {name}(",
                ms(CLAIM_LOCK)
            )
            .into(),
            behind: format!(
                ", '{}', '{}', '{}'); {SAVEPOINT}",
                ms(idle_timeout),
                ms(statement_timeout),
                ms(lock_timeout)
            )
            .into(),
        };
        let patience = Some(statement_timeout.saturating_add(SILENCE));
        let unlimited = "SET LOCAL statement_timeout = 0; SET LOCAL client_min_messages = warning";
        let unlimited = Some(unlimited.into_sql_str());
        let texts = Texts { begin, claimed, opening, unlimited, patience };
        PostgresStore(Core::new(pool.clone(), pool, Line::new(turns, handing), texts, lease))
    }
}

impl PostgresLeaseStore {
    /// Connects, with a pool of ten.
    ///
    /// # Errors
    /// [`StoreError`] if the URL is not one, or the server cannot be reached.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Ok(Self::from_pool(connect(url, PgPoolOptions::new()).await?))
    }

    /// On a pool that is there.
    #[must_use]
    pub fn from_pool(pool: PgPool) -> Self {
        Self(lease(pool))
    }

    /// Makes the table if it is not there.
    ///
    /// # Errors
    /// [`StoreError`] with the server's reason.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        migrate(self.pool()).await
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        self.0.pool()
    }

    /// Removes up to `at_most` records whose retention is over, except those that somebody uses.
    ///
    /// # Errors
    /// [`StoreError`] with the server's reason.
    pub async fn sweep(&self, at_most: u32) -> Result<u64, StoreError> {
        self.0.sweep(at_most).await
    }
}

fn lease(pool: PgPool) -> LeaseCore<Postgres> {
    // No limit at the server: it would end the wait of a COMMIT for its standby.
    LeaseCore::new(pool, begin("READ COMMITTED", IDLE, None))
}

/// One round trip: BEGIN, and the limits of the transaction; and warnings are to be told, since a COMMIT
/// may come with one. If the server is set to read only, so is the transaction: an operator who froze it
/// meant payments first of all.
fn begin(level: &str, idle: Duration, statement: Option<Duration>) -> SqlStr {
    let text = format!(
        "BEGIN ISOLATION LEVEL {level}; \
         SET LOCAL lock_timeout = {}; \
         SET LOCAL idle_in_transaction_session_timeout = {}; \
         SET LOCAL statement_timeout = {}; \
         SET LOCAL client_min_messages = warning",
        ms(CLAIM_LOCK),
        ms(idle),
        statement.map_or(0, ms),
    );
    AssertSqlSafe(text).into_sql_str()
}

/// PostgreSQL's limits are 32 bits of milliseconds, and zero would mean none.
fn ms(limit: Duration) -> i32 {
    i32::try_from(limit.as_millis()).unwrap_or(i32::MAX).max(1)
}

/// How long a start waits for the server.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Ten requests at a time: a good start for a small service, and a tenth of a server's default.
const CONNECTIONS: u32 = 10;

/// For how long an idle connection is believed to be alive without being asked. A request whose first
/// look finds it dead takes another one.
const TRUSTED: Duration = Duration::from_secs(1);

/// Without the address, which may hold a password.
const BLANK: &str = "the address begins or ends with a blank or a line end: take it away, also where it comes from \
                     (a file of settings, a secret)";

async fn connect(url: &str, pool: PgPoolOptions) -> Result<PgPool, StoreError> {
    if url.trim() != url {
        let error = StoreError::new(StoreErrorKind::Backend, "postgres", "connect");
        return Err(error.with_source(BLANK).saying_why());
    }
    let options: PgConnectOptions =
        url.parse().map_err(|error| not_done::<Postgres>("connect", error).saying_why())?;
    let pool = pool
        .max_connections(CONNECTIONS)
        .acquire_timeout(CONNECT_WITHIN)
        .connect_lazy_with(options);
    match pool.acquire().await {
        Ok(_) => Ok(pool),
        Err(error) => Err(not_done::<Postgres>("connect", reason(&pool, error).await).saying_why()),
    }
}

/// What [`SCHEMA`] makes, as the connection's `search_path` finds it.
const PRESENT: &str = "\
    SELECT count(*) = 5 FROM unnest(ARRAY['idempotency_records', 'idempotency_records_expires_at', \
           'idempotency_records_unsettled', 'idempotency_trail', 'idempotency_trail_noted_at']) AS name \
     WHERE to_regclass(name) IS NOT NULL";
/// Making an index waits for open payments, and new ones wait behind it: so it waits for this long at
/// most, lets them pass, and comes again.
const MIGRATION_STEP: &str = "BEGIN; SET LOCAL lock_timeout = 1000";
const MIGRATION_PAUSE: Duration = Duration::from_secs(1);
/// How often it comes again: about a minute of payments that are open all the time.
const MIGRATION_TRIES: u32 = 30;

async fn migrate(pool: &PgPool) -> Result<(), StoreError> {
    let mut tries = 0;
    loop {
        tries += 1;
        match migrate_once(pool).await {
            Err(error) if weigh_of(&error) == Weight::Locked && tries < MIGRATION_TRIES => {
                tokio::time::sleep(MIGRATION_PAUSE).await;
            }
            made => {
                return made.map_err(|error| not_done::<Postgres>("migrate", error).saying_why());
            }
        }
    }
}

fn weigh_of(error: &sqlx::Error) -> Weight {
    super::weigh::<Postgres>(error)
}

async fn migrate_once(pool: &PgPool) -> sqlx::Result<()> {
    // Even an index that exists is locked to say so, and payments would wait for each process that starts.
    if sqlx::query_scalar(PRESENT).fetch_one(pool).await? {
        return Ok(());
    }
    let mut transaction = pool.begin_with(MIGRATION_STEP).await?;
    sqlx::raw_sql(MIGRATION_LOCK).execute(&mut *transaction).await?;
    sqlx::raw_sql(SCHEMA).execute(&mut *transaction).await?;
    transaction.commit().await
}
