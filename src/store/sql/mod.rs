//! Stores in PostgreSQL and SQLite (features `postgres`, `sqlite`), through [`sqlx`] 0.9.
//!
//! | | keeps | for handlers that |
//! |---|---|---|
//! | [`PostgresStore`], [`SqliteStore`] | key, the handler's writes and the stored response in **one transaction** | write to that database, through [`Tx`] |
//! | [`PostgresLeaseStore`], [`SqliteLeaseStore`] | the record alone, under a lease, as Redis does | call outside |
//!
//! All of them use one table, [`postgres::SCHEMA`] or [`sqlite::SCHEMA`], and the records of
//! [`record`]. The [guide](crate::guide::transactions) says how answers decide about
//! writes, and what is promised.
//!
//! # Versions
//! `sqlx` is a public dependency: a pool of another version does not fit, so use the one that is
//! exported here. With `sqlite`, the program links the `libsqlite3-sys` of sqlx 0.9 (below 0.38), and
//! cargo refuses a second one: `rusqlite` up to 0.39 fits, newer ones do not.

mod cause;
mod claim;
mod desk;
mod fate;
mod inspect;
mod lease;
mod line;
mod notice;
#[cfg(feature = "postgres")]
pub mod postgres;
mod session;
#[cfg(feature = "sqlite")]
pub mod sqlite;
mod transactional;
mod tx;
mod unstoppable;

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use sqlx::{Database, SqlStr};

#[cfg(feature = "postgres")]
pub use postgres::{Isolation, PostgresLeaseStore, PostgresStore};
#[cfg(feature = "sqlite")]
pub use sqlite::{SqliteLeaseStore, SqliteStore};
pub use sqlx;
pub use tx::{NoTx, Savepoint, Tx};

use crate::error::{StoreError, StoreErrorKind};
use crate::record::{self, Change, Current, Expires, Millis, Record, Step, Terms};
use crate::scope::StorageKey;

/// A database that records can be kept in. Implemented here for both, and not to be implemented
/// elsewhere.
pub trait Backend: Database + sealed::Sealed {
    /// Its name in errors and logs.
    #[doc(hidden)]
    const STORE: &'static str;

    /// The database's time and what stands under a key; with `lock`, locked until the transaction
    /// ends.
    #[doc(hidden)]
    fn look(
        connection: &mut Self::Connection,
        key: StorageKey,
        lock: Lock,
    ) -> BoxFuture<'_, sqlx::Result<Found>>;

    /// Writes a row that was not there; 0 if it is there after all.
    #[doc(hidden)]
    fn insert(connection: &mut Self::Connection, row: Row) -> BoxFuture<'_, sqlx::Result<u64>>;

    /// Writes a row that was there; 0 if it has gone.
    #[doc(hidden)]
    fn update(connection: &mut Self::Connection, row: Row) -> BoxFuture<'_, sqlx::Result<u64>>;

    /// Removes a row; 0 if it has gone.
    #[doc(hidden)]
    fn remove(
        connection: &mut Self::Connection,
        key: StorageKey,
    ) -> BoxFuture<'_, sqlx::Result<u64>>;

    /// The database's time, where that is the clock of this process. Then [`open`](Self::open) looks too.
    #[doc(hidden)]
    fn here() -> Option<Millis>;

    /// A look without a lock, of one who may go on to [`open`](Self::open).
    #[doc(hidden)]
    fn peek(
        connection: &mut Self::Connection,
        key: StorageKey,
    ) -> BoxFuture<'_, sqlx::Result<Peeked>>;

    /// Makes a connection able to [`open`](Self::open), until it ends.
    #[doc(hidden)]
    fn enable<'c>(
        connection: &'c mut Self::Connection,
        opening: &'c Opening,
    ) -> BoxFuture<'c, sqlx::Result<()>>;

    /// Begins a transaction, writes a row that was not there, and sets the handler's limits and the
    /// savepoint, all in one message. An error leaves a transaction that has to be rolled back.
    ///
    /// Where the clock is [not this process's](Self::here), the row's expiry is how long from then.
    #[doc(hidden)]
    fn open<'c>(
        connection: &'c mut Self::Connection,
        opening: &'c Opening,
        row: &'c Row,
    ) -> BoxFuture<'c, sqlx::Result<Opened>>;

    /// Writes the last row of a transaction, in the place of this record, and of no other one: 0 if it is
    /// not there. Only COMMIT comes behind it, unless it [commits](Self::CLOSING_COMMITS) itself.
    #[doc(hidden)]
    fn close(
        connection: &mut Self::Connection,
        claimed: Bytes,
        row: Row,
    ) -> BoxFuture<'_, sqlx::Result<u64>>;

    /// Begins a transaction.
    #[doc(hidden)]
    fn begin(connection: &mut Self::Connection, sql: SqlStr) -> BoxFuture<'_, sqlx::Result<()>>;

    #[doc(hidden)]
    fn commit(connection: &mut Self::Connection) -> BoxFuture<'_, sqlx::Result<()>>;

    /// Rolls back what is open, in whatever state it is.
    #[doc(hidden)]
    fn rollback(connection: &mut Self::Connection) -> BoxFuture<'_, sqlx::Result<()>>;

    /// Runs statements without arguments.
    #[doc(hidden)]
    fn run(connection: &mut Self::Connection, sql: SqlStr) -> BoxFuture<'_, sqlx::Result<()>>;

    /// Removes up to so many rows whose retention is over, except those that somebody uses.
    #[doc(hidden)]
    fn sweep(connection: &mut Self::Connection, at_most: u32) -> BoxFuture<'_, sqlx::Result<u64>>;

    /// What an error of the database means.
    #[doc(hidden)]
    fn weigh(code: &str) -> Weight;

    /// True if the database may have ended the whole transaction with this error, so that a statement
    /// behind it would stand alone.
    #[doc(hidden)]
    fn ends(code: &str) -> bool;

    /// True if some statements end the whole transaction with this error, and most do not: then
    /// [`is_open`](Self::is_open) tells.
    #[doc(hidden)]
    fn may_end(code: &str) -> bool;

    /// Whether a transaction is open.
    #[doc(hidden)]
    fn is_open(connection: &mut Self::Connection) -> BoxFuture<'_, sqlx::Result<bool>>;

    /// True if the session has lost what the driver needs, so that it fails for good.
    #[doc(hidden)]
    fn is_bare(error: &sqlx::Error) -> bool;

    /// True if [`close`](Self::close) has committed what it has written, which then it does in one go.
    #[doc(hidden)]
    const CLOSING_COMMITS: bool;

    /// True if the database is at the other end of a line, which may be cut, or go silent.
    #[doc(hidden)]
    const REMOTE: bool;

    /// Whether a refusal of a lock may be about the table as a whole instead of one key.
    #[doc(hidden)]
    fn may_be_the_table(error: &sqlx::Error) -> bool;

    /// Whether somebody has locked the table as a whole, or is about to, so that no key can be taken.
    #[doc(hidden)]
    fn is_table_locked(connection: &mut Self::Connection) -> BoxFuture<'_, sqlx::Result<bool>>;

    /// Why nothing can be written, and what to change, if the database says so.
    #[doc(hidden)]
    fn why_read_only(
        connection: &mut Self::Connection,
    ) -> BoxFuture<'_, sqlx::Result<Option<String>>>;
}

mod sealed {
    /// Keeps [`Backend`](super::Backend) closed.
    #[allow(unnameable_types, reason = "that is its purpose")]
    pub trait Sealed {}
}

/// Whether a look takes the row's lock.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "not for use outside")]
pub enum Lock {
    None,
    Row,
}

/// What a look found.
#[doc(hidden)]
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "not for use outside")]
pub struct Found {
    pub now: i64,
    pub row: Option<(Bytes, i64)>,
}

/// What was found by a look without a lock.
#[doc(hidden)]
#[derive(Debug)]
#[expect(clippy::exhaustive_structs, reason = "not for use outside")]
pub struct Peeked {
    pub found: Found,
    /// The connection can open a transaction and claim in one message.
    pub able: bool,
}

/// What came of opening a transaction.
#[doc(hidden)]
#[derive(Debug)]
#[expect(clippy::exhaustive_enums, reason = "not for use outside")]
pub enum Opened {
    /// The row is written. When it expires, where only the database knew.
    Claimed(Option<i64>),
    /// This is there, and nothing is begun.
    Found(Found),
    /// Something is there, and the transaction has to be rolled back.
    Taken,
}

/// What stands around a claim in the message that opens a transaction, and what has to be prepared for it.
#[doc(hidden)]
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "not for use outside")]
pub struct Opening {
    /// What the claim is, prepared at the database by name.
    pub prepare: Box<str>,
    /// What a session has to be set to, each of which a database may refuse.
    pub settings: Box<[SqlStr]>,
    pub before: Box<str>,
    pub behind: Box<str>,
}

/// What is written.
#[doc(hidden)]
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "not for use outside")]
pub struct Row {
    pub key: StorageKey,
    pub state: i16,
    pub record: Bytes,
    /// `None`: as before.
    pub expires: Option<i64>,
}

/// What an error of the driver means for the transaction.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "not for use outside")]
pub enum Weight {
    /// The whole unit may succeed when it runs again: a serialization failure, a deadlock.
    Conflict,
    /// Somebody else holds the lock.
    Locked,
    /// The connection is gone, and what was sent last may have been done.
    Lost,
    /// The database was not reached, or takes no writes now.
    Unreached,
    /// There is no room. Nothing was written.
    Full,
    /// A rule of the schema is broken. Found at COMMIT, it may be a matter of who was first.
    Constraint,
    /// The database refused.
    Refused,
}

/// What the column says of an answer.
const COMPLETED: i16 = 4;
/// The part of a retention by which a row may stay longer, while handlers that take no longer than that need not move
/// it: for a day more than a second.
const RETENTION_MARGIN: u32 = 65_536;

/// How often a row is looked at that vanishes or appears between two statements. Each further look
/// needs a commit of somebody else's in between.
const LOOKS_MAX: u32 = 4;

impl Found {
    fn current(&self) -> (Current, Millis) {
        let current = match &self.row {
            // A row past its retention counts as absent, swept or not.
            Some((record, expires)) if *expires > self.now => current_of(record, *expires),
            Some(_) | None => Current::Absent,
        };
        (current, moment(self.now))
    }
}

/// What a row says that expires then.
fn current_of(record: &Bytes, expires: i64) -> Current {
    Current::from_stored(Some(record::written_out(record.clone(), Some(moment(expires)))))
}

/// What a database says of its clock.
fn moment(at: i64) -> Millis {
    Millis(u64::try_from(at).unwrap_or_default())
}

/// For how long a row is kept from its claim on.
fn kept(terms: &Terms) -> Duration {
    terms.retention.saturating_add(terms.retention / RETENTION_MARGIN)
}

impl Row {
    /// What is written by a transaction that is to complete it as well. Nobody else sees it before that, unless the
    /// handler commits by itself; then the record says what is so.
    ///
    /// A row whose state and expiry do not change has a place in the indexes once, and none among what nobody has
    /// settled. So it says that it is completed, and that it expires as it will then, a little later than asked for.
    fn to_complete(key: StorageKey, record: &Record, now: Millis, terms: &Terms) -> Self {
        let at = Expires::At(now.after(kept(terms)));
        Self { state: COMPLETED, ..Self::new(key, record, at) }
    }

    /// The same by somebody who does not know the time: it expires so much later than it is written. None if its times
    /// take more room than there is.
    fn to_complete_from_then(key: StorageKey, claim: &record::Claim) -> Option<Self> {
        let kept = record::millis(kept(&claim.terms));
        let record = Bytes::copy_from_slice(&record::first_kept(claim, kept)?);
        Some(Self { key, state: COMPLETED, record, expires: Some(i64::try_from(kept).ok()?) })
    }

    /// Leaves the expiry of the row that it replaces, if that is late enough.
    fn expiring(mut self, before: Option<i64>) -> Self {
        if self.expires <= before {
            self.expires = None;
        }
        self
    }

    fn new(key: StorageKey, record: &Record, expires: Expires) -> Self {
        let record = record.encode();
        // The same byte that says it in the record.
        let state = record.get(1).copied().map_or(0, i16::from);
        let expires = match expires {
            Expires::At(Millis(at)) => Some(i64::try_from(at).unwrap_or(i64::MAX)),
            Expires::AsBefore => None,
        };
        Self { key, state, record, expires }
    }
}

/// Runs one verb of the protocol on a row, within a transaction that the caller ends.
async fn step<DB: Backend, T: Send>(
    connection: &mut DB::Connection,
    key: StorageKey,
    verb: &(dyn Fn(Current, Millis) -> Step<T> + Sync),
) -> sqlx::Result<T> {
    for _ in 0..LOOKS_MAX {
        let found = DB::look(connection, key, Lock::Row).await?;
        let (current, now) = found.current();
        let Step { change, outcome } = verb(current, now);
        let rows = match change {
            Change::Keep => return Ok(outcome),
            Change::Write { record, expires } => {
                let row = Row::new(key, &record, expires);
                match found.row {
                    Some(_) => DB::update(connection, row).await?,
                    None => DB::insert(connection, row).await?,
                }
            }
            Change::Remove => DB::remove(connection, key).await?,
        };
        // Otherwise somebody else wrote or removed it meanwhile.
        if rows == 1 {
            return Ok(outcome);
        }
    }
    Err(sqlx::Error::RowNotFound)
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the driver's enum is open, and long")]
fn weigh<DB: Backend>(error: &sqlx::Error) -> Weight {
    match error {
        sqlx::Error::Database(error) => {
            error.code().map_or(Weight::Refused, |code| DB::weigh(&code))
        }
        sqlx::Error::Io(_)
        | sqlx::Error::Tls(_)
        | sqlx::Error::Protocol(_)
        | sqlx::Error::WorkerCrashed => Weight::Lost,
        sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed => Weight::Unreached,
        // What `step` says when a row never stands still.
        sqlx::Error::RowNotFound => Weight::Conflict,
        _ => Weight::Refused,
    }
}

/// The error of something that was certainly not done.
fn not_done<DB: Backend>(operation: &'static str, error: sqlx::Error) -> StoreError {
    let kind = match weigh::<DB>(&error) {
        Weight::Conflict => StoreErrorKind::RolledBack,
        Weight::Locked | Weight::Lost | Weight::Unreached => StoreErrorKind::Unavailable,
        Weight::Full => StoreErrorKind::Full,
        Weight::Constraint | Weight::Refused => StoreErrorKind::Backend,
    };
    let failed = StoreError::new(kind, DB::STORE, operation);
    match is_without_table(&error) {
        true => failed.with_source(NoTable(error)),
        false => failed.with_source(error),
    }
}

/// Nobody has made the table.
#[derive(Debug, thiserror::Error)]
#[error(
    "the table idempotency_records is not there: run the store's migrate() when the program starts, or the statements \
     of its SCHEMA, in the database and the search_path that it connects with ({0})"
)]
struct NoTable(#[source] sqlx::Error);

fn is_without_table(error: &sqlx::Error) -> bool {
    let Some(error) = error.as_database_error() else { return false };
    // undefined_table; SQLite has no number for it.
    let undefined = error.code().as_deref() == Some("42P01");
    let said = error.message();
    said.contains("idempotency_records") && (undefined || said.contains("no such table"))
}

/// The error of something that may have been done.
fn maybe_done<DB: Backend>(operation: &'static str, error: sqlx::Error) -> StoreError {
    match weigh::<DB>(&error) {
        Weight::Lost => {
            StoreError::new(StoreErrorKind::OutcomeUnknown, DB::STORE, operation).with_source(error)
        }
        Weight::Conflict
        | Weight::Locked
        | Weight::Unreached
        | Weight::Full
        | Weight::Constraint
        | Weight::Refused => not_done::<DB>(operation, error),
    }
}

/// A task of ours ended without an answer: its runtime is going down, or it panicked.
fn task_gone<DB: Backend>(operation: &'static str) -> StoreError {
    StoreError::new(StoreErrorKind::OutcomeUnknown, DB::STORE, operation)
}

macro_rules! backend {
    ($database:ty, $connection:ty, $name:literal, $texts:ident, $weigh:path) => {
        impl $crate::store::sql::sealed::Sealed for $database {}

        impl $crate::store::sql::Backend for $database {
            const STORE: &'static str = $name;

            fn look(
                connection: &mut $connection,
                key: $crate::scope::StorageKey,
                lock: $crate::store::sql::Lock,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<$crate::store::sql::Found>> {
                Box::pin(async move {
                    let text = match lock {
                        $crate::store::sql::Lock::None => $texts::LOOK,
                        $crate::store::sql::Lock::Row => $texts::LOOK_AND_LOCK,
                    };
                    let row = sqlx::query(text)
                        .bind(&key.as_bytes()[..])
                        .fetch_one(connection)
                        .await?;
                    let record: Option<Vec<u8>> = sqlx::Row::try_get(&row, 1)?;
                    let expires: Option<i64> = sqlx::Row::try_get(&row, 2)?;
                    let now = sqlx::Row::try_get(&row, 0)?;
                    let row = record.map(bytes::Bytes::from).zip(expires);
                    Ok($crate::store::sql::Found { now, row })
                })
            }

            fn insert(
                connection: &mut $connection,
                row: $crate::store::sql::Row,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<u64>> {
                Box::pin(async move {
                    let done = sqlx::query(
                        "INSERT INTO idempotency_records (storage_key, state, record, expires_at)
                         VALUES ($1, $2, $3, $4) ON CONFLICT (storage_key) DO NOTHING",
                    )
                    .bind(&row.key.as_bytes()[..])
                    .bind(row.state)
                    .bind(&row.record[..])
                    .bind(row.expires)
                    .execute(connection)
                    .await?;
                    Ok(done.rows_affected())
                })
            }

            fn update(
                connection: &mut $connection,
                row: $crate::store::sql::Row,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<u64>> {
                Box::pin(async move {
                    let done = sqlx::query(
                        "UPDATE idempotency_records
                            SET state = $2, record = $3, expires_at = COALESCE($4, expires_at)
                          WHERE storage_key = $1",
                    )
                    .bind(&row.key.as_bytes()[..])
                    .bind(row.state)
                    .bind(&row.record[..])
                    .bind(row.expires)
                    .execute(connection)
                    .await?;
                    Ok(done.rows_affected())
                })
            }

            fn remove(
                connection: &mut $connection,
                key: $crate::scope::StorageKey,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<u64>> {
                Box::pin(async move {
                    let remove = "DELETE FROM idempotency_records WHERE storage_key = $1";
                    let remove = sqlx::query(remove).bind(&key.as_bytes()[..]);
                    Ok(remove.execute(connection).await?.rows_affected())
                })
            }

            fn peek(
                connection: &mut $connection,
                key: $crate::scope::StorageKey,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<$crate::store::sql::Peeked>> {
                Box::pin($texts::peek(connection, key))
            }

            fn enable<'c>(
                connection: &'c mut $connection,
                opening: &'c $crate::store::sql::Opening,
            ) -> futures_util::future::BoxFuture<'c, sqlx::Result<()>> {
                Box::pin($texts::enable(connection, opening))
            }

            fn open<'c>(
                connection: &'c mut $connection,
                opening: &'c $crate::store::sql::Opening,
                row: &'c $crate::store::sql::Row,
            ) -> futures_util::future::BoxFuture<'c, sqlx::Result<$crate::store::sql::Opened>> {
                Box::pin($texts::open(connection, opening, row))
            }

            fn here() -> Option<$crate::record::Millis> {
                $texts::here()
            }

            fn close(
                connection: &mut $connection,
                claimed: bytes::Bytes,
                row: $crate::store::sql::Row,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<u64>> {
                Box::pin(async move {
                    let close = sqlx::query($texts::CLOSE)
                        .bind(&row.key.as_bytes()[..])
                        .bind(row.state)
                        .bind(&row.record[..])
                        .bind(row.expires)
                        .bind(&claimed[..]);
                    $texts::closed(close.execute(connection).await)
                })
            }

            fn begin(
                connection: &mut $connection,
                sql: sqlx::SqlStr,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<()>> {
                Box::pin($texts::begin(connection, sql))
            }

            fn commit(
                connection: &mut $connection,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<()>> {
                Box::pin($texts::commit(connection))
            }

            fn rollback(
                connection: &mut $connection,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<()>> {
                Box::pin($texts::rollback(connection))
            }

            fn run(
                connection: &mut $connection,
                sql: sqlx::SqlStr,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<()>> {
                Box::pin(async move { sqlx::raw_sql(sql).execute(connection).await.map(drop) })
            }

            fn sweep(
                connection: &mut $connection,
                at_most: u32,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<u64>> {
                Box::pin(async move {
                    let done = sqlx::query($texts::SWEEP)
                        .bind(i64::from(at_most))
                        .execute(connection)
                        .await?;
                    Ok(done.rows_affected())
                })
            }

            fn weigh(code: &str) -> $crate::store::sql::Weight {
                $weigh(code)
            }

            fn ends(code: &str) -> bool {
                $texts::ends(code)
            }

            fn may_end(code: &str) -> bool {
                $texts::may_end(code)
            }

            fn is_open(
                connection: &mut $connection,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<bool>> {
                Box::pin($texts::is_open(connection))
            }

            fn is_bare(error: &sqlx::Error) -> bool {
                $texts::is_bare(error)
            }

            const REMOTE: bool = $texts::REMOTE;
            const CLOSING_COMMITS: bool = $texts::CLOSING_COMMITS;

            fn may_be_the_table(error: &sqlx::Error) -> bool {
                $texts::may_be_the_table(error)
            }

            fn is_table_locked(
                connection: &mut $connection,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<bool>> {
                Box::pin($texts::is_table_locked(connection))
            }

            fn why_read_only(
                connection: &mut $connection,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<Option<String>>> {
                Box::pin($texts::why_read_only(connection))
            }
        }
    };
}
pub(super) use backend;

/// Implements `Store` by an inner field.
macro_rules! store {
    ($type:ty) => {
        impl $crate::store::Store for $type {
            fn name(&self) -> &'static str {
                self.0.name()
            }
            fn holdup(&self) -> Option<&'static str> {
                self.0.holdup()
            }
            fn claim<'a>(
                &'a self,
                key: $crate::scope::StorageKey,
                claim: &'a $crate::record::Claim,
            ) -> $crate::store::StoreFuture<'a, $crate::record::ClaimOutcome<$crate::store::Lease>>
            {
                Box::pin(self.0.claim(key, *claim))
            }
            fn renew<'a>(
                &'a self,
                lease: &'a $crate::store::Lease,
                renewal: &'a $crate::record::Renewal,
            ) -> $crate::store::StoreFuture<'a, $crate::record::RenewOutcome> {
                Box::pin(self.0.renew(lease, renewal))
            }
            fn complete<'a>(
                &'a self,
                lease: &'a $crate::store::Lease,
                completion: &'a $crate::record::Completion,
            ) -> $crate::store::StoreFuture<'a, $crate::record::CompleteOutcome> {
                Box::pin(self.0.complete(lease, completion))
            }
            fn release<'a>(
                &'a self,
                lease: &'a $crate::store::Lease,
                release: &'a $crate::record::Release,
            ) -> $crate::store::StoreFuture<'a, $crate::record::ReleaseOutcome> {
                Box::pin(self.0.release(lease, release))
            }
            fn resolve<'a>(
                &'a self,
                key: $crate::scope::StorageKey,
                resolution: &'a $crate::record::Resolution,
            ) -> $crate::store::StoreFuture<'a, $crate::record::ResolveOutcome> {
                Box::pin(self.0.resolve(key, resolution))
            }
            fn ready(&self) -> $crate::store::StoreFuture<'_, ()> {
                Box::pin(self.0.ready())
            }
        }
    };
}
pub(super) use store;
