//! One transaction for key, effect and answer. The same for both databases.

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt as _;
use sqlx::{Pool, SqlStr};
use tokio::sync::watch;

use super::desk::Desk;
use super::lease::LeaseCore;
use super::line::Line;
use super::session::bounded;
use super::tx::{Open, Unit};
use super::unstoppable::Unstoppable;
use super::{Backend, Opening, Row, Weight, current_of, step, task_gone, weigh};
use crate::error::{StoreError, StoreErrorKind};
use crate::record::{
    self, Change, Claim, ClaimOutcome, CompleteOutcome, Completion, Current, Millis, Owner,
    Release, ReleaseOutcome, RenewOutcome, Renewal, Resolution, ResolveOutcome, Step, Writes,
};
use crate::scope::StorageKey;
use crate::store::Lease;

/// The part of a transactional store that knows no particular database.
pub(super) struct Core<DB: Backend>(Arc<Shared<DB>>);

pub(super) struct Shared<DB: Backend> {
    pool: Pool<DB>,
    /// What transactions take their connections from: the pool, or one beside it that nobody else uses.
    writers: Pool<DB>,
    pub(super) texts: Texts,
    desk: Arc<Desk>,
    pub(super) line: Line<DB>,
    /// How many turns wait to be told what became of a COMMIT, and nobody knows when.
    pub(super) adrift: AtomicUsize,
    lease: LeaseCore<DB>,
}

/// What is said around the handler's own statements.
#[derive(Clone, Debug)]
pub(super) struct Texts {
    pub(super) begin: SqlStr,
    /// After the claim: sets the handler's limits, and the savepoint.
    pub(super) claimed: SqlStr,
    /// All of that in one message, around the claim of a key that nobody has.
    pub(super) opening: Opening,
    /// Before COMMIT, which has no limit at the server: one that is cancelled while it waits for a standby
    /// reports a success that may still be lost.
    pub(super) unlimited: Option<SqlStr>,
    /// How long the handler's statements and the COMMIT wait for a sign of life, if the database is another
    /// machine.
    pub(super) patience: Option<Duration>,
}

/// Where the claim ends and the handler's writes begin.
pub(super) const SAVEPOINT: &str = "SAVEPOINT idempotency_claim";
/// What keeps a claim waiting at a file.
pub(super) const HELD: &str = "another transaction holds the database, of this process or another: SQLite has one \
                               writer at a time. Keep transactions shorter (what is slow goes before or behind them), \
                               or let claims wait longer: claim_within, store_call_timeout";
/// And at a pool.
pub(super) const LENT: &str = "every connection that transactions may have is in use: all of the pool but one. Keep what \
                               handlers do in them shorter, or give the pool more (max_connections, which the server \
                               limits too)";
const UNDO: &str = "ROLLBACK TO SAVEPOINT idempotency_claim";

/// A run with an open transaction: what the lease carries.
pub(super) struct Running<DB: Backend> {
    unit: Arc<Unit<DB>>,
    /// What the row of the key says in this transaction, if it is known.
    claimed: Option<Claimed>,
    /// The end that is under way, or was reached.
    ending: Mutex<Option<watch::Receiver<Option<Ended>>>>,
}

/// A row that this transaction has written.
pub(super) struct Claimed {
    pub(super) record: Bytes,
    pub(super) expires: i64,
    pub(super) clock: Clock,
}

/// The database's clock, as it was read, and how long ago: from when it was asked for, since what is kept too long harms
/// nobody.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    pub(super) at: Millis,
    pub(super) read: Instant,
}

impl Clock {
    pub(super) fn now(&self) -> Millis {
        let since = u64::try_from(self.read.elapsed().as_millis()).unwrap_or(u64::MAX);
        Millis(self.at.0.saturating_add(since))
    }
}

/// How a run ended.
#[derive(Clone, Debug)]
pub(super) enum Ended {
    Told(CompleteOutcome),
    /// Everything is undone, and the whole unit may run again.
    Again,
    /// Everything is undone, since there is no room.
    Full,
}

/// Where a transaction stands whose response was stored.
enum Stage {
    Open,
    Committed,
}

/// How a run is to end.
#[derive(Clone, Debug)]
enum End {
    Complete(Completion),
    RollBack,
}

impl<DB: Backend> Clone for Core<DB> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<DB: Backend> Core<DB> {
    pub(super) fn new(
        writers: Pool<DB>,
        pool: Pool<DB>,
        line: Line<DB>,
        texts: Texts,
        lease: LeaseCore<DB>,
    ) -> Self {
        let (desk, adrift) = (Arc::default(), AtomicUsize::new(0));
        Self(Arc::new(Shared { pool, writers, texts, desk, line, adrift, lease }))
    }

    /// Closes what is beside the pool when the pool is closed, or nobody has it any more.
    #[cfg(feature = "sqlite")]
    pub(super) fn close_with_pool(&self) {
        let (shared, writers) = (Arc::downgrade(&self.0), self.0.writers.clone());
        let closed = self.0.pool.close_event();
        drop(tokio::spawn(async move {
            closed.await;
            if let Some(shared) = shared.upgrade() {
                shared.line.close();
            }
            writers.close().await;
        }));
    }

    pub(super) fn writers(&self) -> &Pool<DB> {
        &self.0.writers
    }

    pub(super) fn name(&self) -> &'static str {
        DB::STORE
    }

    /// Whoever has a turn is with its handler, or waits for the transaction of another process.
    pub(super) fn holdup(&self) -> Option<&'static str> {
        self.0.line.is_full().then_some(if DB::REMOTE { LENT } else { HELD })
    }

    pub(super) fn pool(&self) -> &Pool<DB> {
        &self.0.pool
    }

    pub(super) fn shared(&self) -> &Shared<DB> {
        &self.0
    }

    pub(super) fn lease(&self) -> &LeaseCore<DB> {
        &self.0.lease
    }

    pub(super) async fn claim(
        &self,
        key: StorageKey,
        claim: Claim,
    ) -> Result<ClaimOutcome<Lease>, StoreError> {
        let core = self.clone();
        let work = move |seat| core.open(key, claim, seat).boxed();
        let gone = || task_gone::<DB>("claim");
        self.0.desk.claim(key, claim, gone, work).await
    }

    /// There is nothing to renew: the open transaction is the lease.
    pub(super) async fn renew(
        &self,
        lease: &Lease,
        _: &Renewal,
    ) -> Result<RenewOutcome, StoreError> {
        Ok(match running::<DB>(lease) {
            Some(_) => RenewOutcome::Renewed,
            None => RenewOutcome::Lost,
        })
    }

    pub(super) async fn complete(
        &self,
        lease: &Lease,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        let Some(running) = running::<DB>(lease) else {
            // A claim that was never confirmed: no transaction, and nothing that was written.
            self.0.desk.abandon(lease.key(), lease.owner().holder);
            return Ok(CompleteOutcome::Lost);
        };
        self.end(running, lease, End::Complete(completion.clone()), "complete").await
    }

    pub(super) async fn release(
        &self,
        lease: &Lease,
        _: &Release,
    ) -> Result<ReleaseOutcome, StoreError> {
        let Some(running) = running::<DB>(lease) else {
            self.0.desk.abandon(lease.key(), lease.owner().holder);
            return Ok(ReleaseOutcome::RolledBack);
        };
        let ended = self.end(running, lease, End::RollBack, "release").await?;
        Ok(match ended {
            CompleteOutcome::RolledBack => ReleaseOutcome::RolledBack,
            CompleteOutcome::Stored
            | CompleteOutcome::Healed
            | CompleteOutcome::Restored
            | CompleteOutcome::Superseded(_)
            | CompleteOutcome::Mismatch
            | CompleteOutcome::Lost
            | CompleteOutcome::Unreadable => ReleaseOutcome::NotHeld,
        })
    }

    pub(super) async fn resolve(
        &self,
        key: StorageKey,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, StoreError> {
        self.0.lease.resolve(key, resolution).await
    }

    pub(super) async fn ready(&self) -> Result<(), StoreError> {
        self.0.lease.ready().await?;
        if self.0.adrift.load(Ordering::Acquire) < self.0.line.turns_max() {
            return Ok(());
        }
        let why = "every turn waits to be told what became of its COMMIT: no key can be claimed";
        Err(StoreError::new(StoreErrorKind::Unavailable, DB::STORE, "ready")
            .with_source(why)
            .saying_why())
    }

    /// Ends a run, or waits for the end that is under way.
    async fn end(
        &self,
        running: &Arc<Running<DB>>,
        lease: &Lease,
        end: End,
        operation: &'static str,
    ) -> Result<CompleteOutcome, StoreError> {
        let (mut ended, work) = {
            let mut ending = running.ending.lock().unwrap_or_else(PoisonError::into_inner);
            match &*ending {
                Some(ended) => (ended.clone(), None),
                None => {
                    let (ended, work) = self.settle(running, lease, end);
                    (ending.insert(ended).clone(), Some(work))
                }
            }
        };
        if let Some(work) = work {
            work.await;
        }
        let told = ended.wait_for(Option::is_some).await.map(|ended| ended.clone());
        match told.ok().flatten() {
            Some(Ended::Told(outcome)) => Ok(outcome),
            Some(Ended::Again) => {
                Err(StoreError::new(StoreErrorKind::RolledBack, DB::STORE, operation))
            }
            Some(Ended::Full) => Err(StoreError::new(StoreErrorKind::Full, DB::STORE, operation)),
            None => Err(task_gone::<DB>(operation)),
        }
    }

    /// Ends a run by work that goes on though nobody waits: a COMMIT is sent once, and asked after until it
    /// is known what became of it.
    fn settle(
        &self,
        running: &Arc<Running<DB>>,
        lease: &Lease,
        end: End,
    ) -> (watch::Receiver<Option<Ended>>, impl Future<Output = ()> + Send + use<DB>) {
        let (tell, told) = watch::channel(None);
        let (core, running) = (self.clone(), Arc::clone(running));
        let (key, owner) = (lease.key(), *lease.owner());
        let work = Box::pin(async move {
            let ended = core.finish(&running, key, &owner, &end).await;
            tell.send_replace(Some(ended));
        });
        // A panic is seen by the channel being closed.
        let work = AssertUnwindSafe(work).catch_unwind().map(drop);
        (told, Unstoppable::new(work, |work| drop(tokio::spawn(work))))
    }

    async fn finish(
        &self,
        running: &Running<DB>,
        key: StorageKey,
        owner: &Owner,
        end: &End,
    ) -> Ended {
        let undone = Ended::Told(CompleteOutcome::RolledBack);
        let held = running.unit.close();
        let failure = running.unit.failure();
        let Some(mut open) = held else {
            tracing::error!(
                key = %key.in_logs(),
                "the transaction was still held when the handler had answered: everything is rolled back"
            );
            return undone;
        };
        let cause = failure.as_ref().map(|failure| &*failure.cause).unwrap_or_default();
        let key_id = key.in_logs();
        match failure.as_ref().map(|failure| failure.weight) {
            Some(weight @ (Weight::Lost | Weight::Conflict)) => {
                tracing::info!(
                    key = %key_id, cause,
                    "a statement failed for the moment: everything is rolled back, and the request runs again, or \
                     is told 503 after several times"
                );
                // One that does not answer cannot be told to roll back.
                if weight == Weight::Lost {
                    open.abandon();
                } else {
                    Box::pin(open.rollback()).await;
                }
                return Ended::Again;
            }
            // Whatever the handler made of it, it could not do its work.
            Some(Weight::Full) if matches!(end, End::Complete(_)) => {
                tracing::error!(key = %key_id, cause, "a statement failed: everything is rolled back, and the request is told 503");
                Box::pin(open.rollback()).await;
                return Ended::Full;
            }
            Some(
                Weight::Locked
                | Weight::Unreached
                | Weight::Full
                | Weight::Constraint
                | Weight::Refused,
            )
            | None => {}
        }
        let completion = match end {
            End::Complete(completion) if completion.writes != Writes::RollBack => completion,
            End::Complete(_) | End::RollBack => {
                if failure.is_some() {
                    tracing::warn!(key = %key_id, cause, "a statement failed, and so did its handler: everything is rolled back");
                }
                Box::pin(open.rollback()).await;
                return undone;
            }
        };
        if let (Writes::Keep, Some(_)) = (completion.writes, &failure) {
            tracing::error!(
                key = %key_id, cause,
                "a statement failed and the handler answered as if it had not: everything is rolled back"
            );
            Box::pin(open.rollback()).await;
            return undone;
        }
        match self.store(&mut open, running.claimed.as_ref(), key, owner, completion).await {
            Ok((CompleteOutcome::Stored, Stage::Open)) => {}
            Ok((CompleteOutcome::Stored, Stage::Committed)) => {
                if let Some((mut session, _held)) = open.into_parts() {
                    session.committed();
                    self.0.line.hand_on(session);
                }
                return Ended::Told(CompleteOutcome::Stored);
            }
            Ok((outcome, _)) => {
                tracing::error!(key = %key.in_logs(), ?outcome, "the claim has vanished from its transaction");
                Box::pin(open.rollback()).await;
                return undone;
            }
            Err(error) => {
                Box::pin(open.rollback()).await;
                // A deferred constraint: who runs again may find that the other one was there first.
                if DB::CLOSING_COMMITS && weigh::<DB>(&error) == Weight::Constraint {
                    return Ended::Again;
                }
                return self.undone_by(key, &error);
            }
        }
        self.commit(open, key, owner, completion).await
    }

    /// Stores the response in the open transaction, with the handler's writes or without.
    async fn store(
        &self,
        open: &mut Open<DB>,
        claimed: Option<&Claimed>,
        key: StorageKey,
        owner: &Owner,
        completion: &Completion,
    ) -> sqlx::Result<(CompleteOutcome, Stage)> {
        let stored = async {
            let connection = open.session()?.connection()?;
            if completion.writes == Writes::Undo {
                DB::run(connection, sqlx::SqlSafeStr::into_sql_str(UNDO)).await?;
            }
            let verb = |current, now| record::complete(current, now, owner, completion);
            if let Some(Claimed { record, expires: before, clock }) = claimed {
                // Nobody else can have changed what this transaction has written; whether the handler
                // has, the statement sees.
                let current = current_of(record, *before);
                let Step { change, outcome } = verb(current, clock.now());
                if let (Change::Write { record: completed, expires }, CompleteOutcome::Stored) =
                    (change, &outcome)
                {
                    let row = Row::new(key, &completed, expires).expiring(Some(*before));
                    if DB::close(connection, record.clone(), row).await? == 1 {
                        let committed = DB::CLOSING_COMMITS;
                        return Ok((
                            outcome,
                            if committed { Stage::Committed } else { Stage::Open },
                        ));
                    }
                }
            }
            // A row that is not there any more is not written anew: the transaction was rolled back by the handler, and
            // its writes with it.
            let held = |current: Current, now| match current {
                Current::Absent => Step { change: Change::Keep, outcome: CompleteOutcome::Lost },
                Current::Present(_) | Current::Unreadable(_) => verb(current, now),
            };
            let outcome = Box::pin(step::<DB, _>(connection, key, &held)).await?;
            if let Some(unlimited) = &self.0.texts.unlimited {
                DB::run(connection, unlimited.clone()).await?;
            }
            Ok((outcome, Stage::Open))
        };
        // It may have to wait for a statement that the handler has left alone.
        let stored = match self.0.texts.patience {
            Some(patience) => bounded::<DB, _>(patience, stored).await,
            None => stored.await,
        };
        open.session()?.seen(stored)
    }

    /// What an error before COMMIT, or in answer to it, comes to: nothing was done.
    pub(super) fn undone_by(&self, key: StorageKey, error: &sqlx::Error) -> Ended {
        match weigh::<DB>(error) {
            Weight::Conflict | Weight::Lost | Weight::Locked => Ended::Again,
            Weight::Full => {
                tracing::error!(key = %key.in_logs(), %error, "there is no room: everything is rolled back");
                Ended::Full
            }
            Weight::Unreached | Weight::Constraint | Weight::Refused => {
                tracing::error!(key = %key.in_logs(), %error, "everything is rolled back");
                Ended::Told(CompleteOutcome::RolledBack)
            }
        }
    }
}

fn running<DB: Backend>(lease: &Lease) -> Option<&Arc<Running<DB>>> {
    lease.attachments().get::<Arc<Running<DB>>>()
}

impl<DB: Backend> fmt::Debug for Core<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("database", &DB::STORE)
            .field("desk", &self.0.desk)
            .field("line", &self.0.line)
            .finish_non_exhaustive()
    }
}

impl<DB: Backend> Running<DB> {
    pub(super) fn new(unit: Arc<Unit<DB>>, claimed: Option<Claimed>) -> Self {
        Self { unit, claimed, ending: Mutex::default() }
    }
}

impl<DB: Backend> fmt::Debug for Running<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("ending", &self.ending).finish_non_exhaustive()
    }
}
