//! What operators need of a table: looking, forgetting, an indexed listing, the trail.

use std::time::Duration;

use futures_util::future::BoxFuture;
use sqlx::SqlSafeStr as _;

use super::lease::LeaseCore;
use super::session::{Session, bounded};
use super::{Backend, Lock, maybe_done, moment, not_done};
use crate::error::StoreError;
use crate::record::{self, Amend, Forget, ForgetOutcome, Millis, ResolveOutcome, Sighting};
use crate::scope::StorageKey;
use crate::store::inspect::{LOOKS_PER_PAGE, NoPage};
use crate::store::{
    AuditStep, Contents, Entry, Glance, Listing, LogId, Page, Sight, Source, TrailEntry, Wanted,
};

/// How long looking may take, and the server's own limits: a lock that is held longer is somebody's maintenance.
const LOOK_WITHIN: Duration = Duration::from_secs(8);

/// How many rows one query of a listing reads.
const ROWS_AT_ONCE: usize = 200;

/// How many keys with one log id are told: more than two are an accident that nobody has seen.
const MOST_OF_ONE_ID: i64 = 100;

/// How many rows a glance counts: it is there to tell some from none.
const COUNTED: i64 = 1_000;

/// The header of a row: when it expires, its key, its header, its length.
pub(super) type HeaderRow = (i64, Vec<u8>, Vec<u8>, i64);

/// An entry of the trail: id, moment, key, action, who, why, outcome.
pub(super) type TrailRow = (Vec<u8>, i64, Vec<u8>, String, String, String, Option<String>);

/// What is said to a database that operators look at.
pub(super) trait Inspected: Backend {
    /// Opens a transaction in which nothing waits for long; none where a statement stands alone.
    const LOOKING: Option<&'static str>;

    /// Rows that nobody has settled, behind this place.
    fn unsettled(
        connection: &mut Self::Connection,
        after: (i64, StorageKey),
        at_most: i64,
    ) -> BoxFuture<'_, sqlx::Result<Vec<HeaderRow>>>;

    /// Keys that begin like this and are not past their retention.
    fn keys(
        connection: &mut Self::Connection,
        id: LogId,
        at_most: i64,
    ) -> BoxFuture<'_, sqlx::Result<Vec<Vec<u8>>>>;

    /// How many rows there are, up to so many.
    fn count(connection: &mut Self::Connection, at_most: i64) -> BoxFuture<'_, sqlx::Result<i64>>;

    fn note<'a>(
        connection: &'a mut Self::Connection,
        entry: &'a TrailEntry,
    ) -> BoxFuture<'a, sqlx::Result<()>>;

    fn trail(
        connection: &mut Self::Connection,
        at_most: i64,
    ) -> BoxFuture<'_, sqlx::Result<Vec<TrailRow>>>;
}

macro_rules! inspected {
    ($database:ty, $connection:ty, $now:literal, $length:literal, $unsettled:literal, $looking:expr) => {
        impl $crate::store::sql::inspect::Inspected for $database {
            const LOOKING: Option<&'static str> = $looking;

            fn unsettled(
                connection: &mut $connection,
                (expires, key): (i64, $crate::scope::StorageKey),
                at_most: i64,
            ) -> futures_util::future::BoxFuture<
                '_,
                sqlx::Result<Vec<$crate::store::sql::inspect::HeaderRow>>,
            > {
                // The states as they stand in the index, or it is not used.
                const UNSETTLED: &str = concat!(
                    "SELECT expires_at, storage_key, substr(record, 1, 84), CAST(",
                    $length,
                    " AS bigint) FROM idempotency_records
                      WHERE ",
                    $unsettled,
                    " AND (expires_at, storage_key) > ($1, $2)
                      ORDER BY expires_at, storage_key LIMIT $3"
                );
                Box::pin(async move {
                    sqlx::query_as(UNSETTLED)
                        .bind(expires)
                        .bind(key.as_bytes().to_vec())
                        .bind(at_most)
                        .fetch_all(connection)
                        .await
                })
            }

            fn keys(
                connection: &mut $connection,
                id: $crate::store::LogId,
                at_most: i64,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<Vec<Vec<u8>>>> {
                const KEYS: &str = concat!(
                    "SELECT storage_key FROM idempotency_records
                      WHERE storage_key BETWEEN $1 AND $2 AND expires_at > ",
                    $now,
                    " LIMIT $3"
                );
                Box::pin(async move {
                    let (mut first, mut last) = ([0; 24], [u8::MAX; 24]);
                    first[..6].copy_from_slice(id.as_bytes());
                    last[..6].copy_from_slice(id.as_bytes());
                    sqlx::query_scalar(KEYS)
                        .bind(first.to_vec())
                        .bind(last.to_vec())
                        .bind(at_most)
                        .fetch_all(connection)
                        .await
                })
            }

            fn count(
                connection: &mut $connection,
                at_most: i64,
            ) -> futures_util::future::BoxFuture<'_, sqlx::Result<i64>> {
                const COUNT: &str = concat!(
                    "SELECT count(*) FROM (SELECT 1 FROM idempotency_records WHERE expires_at > ",
                    $now,
                    " LIMIT $1) AS counted"
                );
                Box::pin(async move {
                    sqlx::query_scalar(COUNT).bind(at_most).fetch_one(connection).await
                })
            }

            fn note<'a>(
                connection: &'a mut $connection,
                entry: &'a $crate::store::TrailEntry,
            ) -> futures_util::future::BoxFuture<'a, sqlx::Result<()>> {
                const NOTE: &str = concat!(
                    "INSERT INTO idempotency_trail
                            (id, noted_at, storage_key, action, who, why, outcome)
                     VALUES ($1, ",
                    $now,
                    ", $2, $3, $4, $5, $6)
                     ON CONFLICT (id) DO UPDATE SET outcome = excluded.outcome"
                );
                Box::pin(async move {
                    sqlx::query(NOTE)
                        .bind(&entry.id[..])
                        .bind(&entry.key.as_bytes()[..])
                        .bind(&*entry.action)
                        .bind(&*entry.who)
                        .bind(&*entry.why)
                        .bind(entry.outcome.as_deref())
                        .execute(connection)
                        .await
                        .map(drop)
                })
            }

            fn trail(
                connection: &mut $connection,
                at_most: i64,
            ) -> futures_util::future::BoxFuture<
                '_,
                sqlx::Result<Vec<$crate::store::sql::inspect::TrailRow>>,
            > {
                Box::pin(async move {
                    sqlx::query_as(
                        "SELECT id, noted_at, storage_key, action, who, why, outcome
                           FROM idempotency_trail ORDER BY noted_at DESC, id DESC LIMIT $1",
                    )
                    .bind(at_most)
                    .fetch_all(connection)
                    .await
                })
            }
        }
    };
}
pub(super) use inspected;

impl<DB: Inspected> LeaseCore<DB> {
    async fn looking(&self) -> sqlx::Result<Session<DB>> {
        match DB::LOOKING {
            Some(begin) => Session::begin(self.pool(), begin.into_sql_str()).await,
            None => Session::acquire(self.pool()).await,
        }
    }

    /// Reads, without waiting for a lock or an answer longer than a person would.
    async fn read<T>(
        &self,
        operation: &'static str,
        work: impl for<'c> FnOnce(&'c mut DB::Connection) -> BoxFuture<'c, sqlx::Result<T>>,
    ) -> Result<T, StoreError> {
        let failed = |error| not_done::<DB>(operation, error);
        let mut session = self.looking().await.map_err(failed)?;
        let connection = session.connection().map_err(failed)?;
        let done = bounded::<DB, _>(LOOK_WITHIN, work(connection)).await;
        let done = session.seen(done);
        session.rollback().await;
        done.map_err(failed)
    }

    pub(super) async fn sight(&self, key: StorageKey) -> Result<Sight, StoreError> {
        let found = self.read("look", |line| DB::look(line, key, Lock::None)).await?;
        let (current, now) = found.current();
        let expires = found.row.filter(|_| current != record::Current::Absent);
        let expires = expires.map(|(_, at)| Millis(u64::try_from(at).unwrap_or_default()));
        Ok(Sight { current, contents: Contents::Readable, now, expires })
    }

    pub(super) async fn forget(
        &self,
        key: StorageKey,
        forget: Forget,
    ) -> Result<ForgetOutcome, StoreError> {
        let verb = Box::new(move |current, now| record::forget(&current, now, &forget));
        self.run("forget", key, verb).await
    }

    pub(super) async fn amend(
        &self,
        key: StorageKey,
        amend: Amend,
    ) -> Result<ResolveOutcome, StoreError> {
        let verb = Box::new(move |current, now| record::amend(current, now, &amend));
        self.run("amend", key, verb).await
    }

    pub(super) async fn list(&self, wanted: &Wanted) -> Result<Listing, StoreError> {
        let place = wanted.after.as_ref().map(|page| page.place().ok_or(NoPage::of(DB::STORE)));
        let place = place.transpose()?;
        let wanted = wanted.clone();
        self.read("list", |line| Box::pin(page::<DB>(line, wanted, place))).await
    }

    pub(super) async fn find(&self, id: LogId) -> Result<Vec<StorageKey>, StoreError> {
        let keys = self.read("find", |line| DB::keys(line, id, MOST_OF_ONE_ID)).await?;
        let keys = keys.into_iter().filter_map(|key| key.try_into().ok());
        Ok(keys.map(StorageKey::from_bytes).collect())
    }

    pub(super) async fn glance(&self) -> Result<Option<Glance>, StoreError> {
        let count = self.read("glance", |line| DB::count(line, COUNTED)).await?;
        let records = u64::try_from(count).unwrap_or_default();
        Ok(Some(Glance { records, more: count == COUNTED, elsewhere: Vec::new() }))
    }

    /// The index of the table is always right.
    pub(super) async fn audit(&self) -> Result<AuditStep, StoreError> {
        Ok(AuditStep { next: None, scanned: 0, found: 0, unknown: 0, about: 0 })
    }

    pub(super) async fn note(&self, entry: &TrailEntry) -> Result<(), StoreError> {
        let failed = |error| not_done::<DB>("note", error);
        let mut session = self.looking().await.map_err(failed)?;
        let connection = session.connection().map_err(failed)?;
        let noted = bounded::<DB, _>(LOOK_WITHIN, DB::note(connection, entry)).await;
        if let Err(error) = session.seen(noted) {
            session.rollback().await;
            // Where a statement is its own transaction, it may have been done.
            return Err(if DB::REMOTE { failed(error) } else { maybe_done::<DB>("note", error) });
        }
        if !DB::REMOTE {
            return Ok(());
        }
        let committed = bounded::<DB, _>(LOOK_WITHIN, session.commit()).await;
        let committed = session.seen(committed);
        committed.map_err(|error| maybe_done::<DB>("note", error))
    }

    pub(super) async fn trail(&self, at_most: u32) -> Result<Vec<TrailEntry>, StoreError> {
        let rows = self.read("trail", |line| DB::trail(line, i64::from(at_most))).await?;
        Ok(rows.into_iter().filter_map(entry).collect())
    }
}

/// One page, behind this place.
async fn page<DB: Inspected>(
    connection: &mut DB::Connection,
    wanted: Wanted,
    place: Option<(i64, StorageKey)>,
) -> sqlx::Result<Listing> {
    let nobody = StorageKey::from_bytes([0; 24]);
    let found = DB::look(connection, nobody, Lock::None).await?;
    let now = moment(found.now);
    // What is past its retention comes first, and is none.
    let alive = (found.now, StorageKey::from_bytes([u8::MAX; 24]));
    let mut after = place.unwrap_or(alive).max(alive);
    let mut listing = Listing { entries: Vec::new(), more: None, source: Source::Direct, now };
    let at_most = wanted.at_most.max(1) as usize;
    for _ in 0..LOOKS_PER_PAGE / ROWS_AT_ONCE {
        let rows = DB::unsettled(connection, after, ROWS_AT_ONCE as i64).await?;
        let last = rows.len() < ROWS_AT_ONCE;
        for (expires, key, header, length) in rows {
            let Ok(key) = <[u8; 24]>::try_from(key) else { continue };
            if listing.entries.len() == at_most {
                listing.more = Some(Page::at(after.0, after.1));
                return Ok(listing);
            }
            let key = StorageKey::from_bytes(key);
            after = (expires, key);
            let length = usize::try_from(length).unwrap_or_default();
            let header = record::written_out(header.into(), Some(moment(expires)));
            if let Ok(sighting) = Sighting::read(&header, length)
                && wanted.survey.takes(&sighting, now)
            {
                listing.entries.push(Entry { key, sighting });
            }
        }
        if last {
            return Ok(listing);
        }
    }
    listing.more = Some(Page::at(after.0, after.1));
    Ok(listing)
}

fn entry((id, at, key, action, who, why, outcome): TrailRow) -> Option<TrailEntry> {
    Some(TrailEntry {
        id: id.try_into().ok()?,
        at: Millis(u64::try_from(at).unwrap_or_default()),
        who: who.into(),
        why: why.into(),
        action: action.into(),
        key: StorageKey::from_bytes(key.try_into().ok()?),
        outcome: outcome.map(Into::into),
    })
}

/// Implements `Inspect` by the lease store inside.
macro_rules! inspect {
    ($type:ty, |$store:ident| $core:expr) => {
        impl $crate::store::Inspect for $type {
            fn look(
                &self,
                key: $crate::scope::StorageKey,
            ) -> $crate::store::StoreFuture<'_, $crate::store::Sight> {
                let $store = self;
                Box::pin($core.sight(key))
            }
            fn forget<'a>(
                &'a self,
                key: $crate::scope::StorageKey,
                forget: &'a $crate::record::Forget,
            ) -> $crate::store::StoreFuture<'a, $crate::record::ForgetOutcome> {
                let $store = self;
                Box::pin($core.forget(key, *forget))
            }
            fn amend<'a>(
                &'a self,
                key: $crate::scope::StorageKey,
                amend: &'a $crate::record::Amend,
            ) -> $crate::store::StoreFuture<'a, $crate::record::ResolveOutcome> {
                let $store = self;
                Box::pin($core.amend(key, amend.clone()))
            }
            fn list<'a>(
                &'a self,
                wanted: &'a $crate::store::Wanted,
            ) -> $crate::store::StoreFuture<'a, $crate::store::Listing> {
                let $store = self;
                Box::pin($core.list(wanted))
            }
            fn find(
                &self,
                id: $crate::store::LogId,
            ) -> $crate::store::StoreFuture<'_, Vec<$crate::scope::StorageKey>> {
                let $store = self;
                Box::pin($core.find(id))
            }
            fn glance(&self) -> $crate::store::StoreFuture<'_, Option<$crate::store::Glance>> {
                let $store = self;
                Box::pin($core.glance())
            }
            fn audit<'a>(
                &'a self,
                _: Option<&'a $crate::store::AuditCursor>,
                _: u32,
            ) -> $crate::store::StoreFuture<'a, $crate::store::AuditStep> {
                let $store = self;
                Box::pin($core.audit())
            }
            fn note<'a>(
                &'a self,
                entry: &'a $crate::store::TrailEntry,
            ) -> $crate::store::StoreFuture<'a, ()> {
                let $store = self;
                Box::pin($core.note(entry))
            }
            fn trail(
                &self,
                at_most: u32,
            ) -> $crate::store::StoreFuture<'_, Vec<$crate::store::TrailEntry>> {
                let $store = self;
                Box::pin($core.trail(at_most))
            }
        }
    };
}
pub(super) use inspect;
