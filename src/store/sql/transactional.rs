//! One transaction for key, effect and answer. The same for both databases.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use sqlx::{Pool, SqlStr};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::timeout;

use super::desk::{Desk, Seat};
use super::lease::LeaseCore;
use super::session::{ANSWER_WITHIN, Session, bounded};
use super::tx::{Open, Unit};
use super::{Backend, Lock, Weight, maybe_done, not_done, step, task_gone, weigh};
use crate::error::{StoreError, StoreErrorKind};
use crate::record::{
    self, Change, Claim, ClaimOutcome, CompleteOutcome, Completion, Owner, Release, ReleaseOutcome,
    RenewOutcome, Renewal, Resolution, ResolveOutcome, Step, Writes,
};
use crate::scope::StorageKey;
use crate::store::Lease;

/// The part of a transactional store that knows no particular database.
pub(super) struct Core<DB: Backend>(Arc<Shared<DB>>);

pub(super) struct Shared<DB: Backend> {
    pool: Pool<DB>,
    pub(super) texts: Texts,
    desk: Arc<Desk>,
    /// The right to have a transaction open.
    turns: Arc<Semaphore>,
    /// How many turns there are.
    turns_max: usize,
    /// How many of them wait to be told what became of a COMMIT, and nobody knows when.
    pub(super) adrift: AtomicUsize,
    lease: LeaseCore<DB>,
}

/// What is said around the handler's own statements.
#[derive(Clone, Debug)]
pub(super) struct Texts {
    pub(super) begin: SqlStr,
    /// After the claim: sets the handler's limits, and the savepoint.
    pub(super) claimed: SqlStr,
    /// Before COMMIT, which has no limit at the server: one that is cancelled while it waits for a standby
    /// reports a success that may still be lost.
    pub(super) unlimited: Option<SqlStr>,
    /// How long the handler's statements and the COMMIT wait for a sign of life, if the database is another
    /// machine.
    pub(super) patience: Option<Duration>,
}

/// Where the claim ends and the handler's writes begin.
pub(super) const SAVEPOINT: &str = "SAVEPOINT idempotency_claim";
const UNDO: &str = "ROLLBACK TO SAVEPOINT idempotency_claim";

/// How long a claim waits for its turn and for a connection. Its caller asks for seconds at most;
/// whoever waits longer finds nobody.
const TURN_WITHIN: Duration = Duration::from_secs(10);

/// A run with an open transaction: what the lease carries.
struct Running<DB: Backend> {
    unit: Arc<Unit<DB>>,
    /// The end that is under way, or was reached.
    ending: Mutex<Option<watch::Receiver<Option<Ended>>>>,
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
    pub(super) fn new(pool: Pool<DB>, turns: usize, texts: Texts, lease: LeaseCore<DB>) -> Self {
        let (turns_max, turns) = (turns, Arc::new(Semaphore::new(turns)));
        let (desk, adrift) = (Arc::default(), AtomicUsize::new(0));
        Self(Arc::new(Shared { pool, texts, desk, turns, turns_max, adrift, lease }))
    }

    pub(super) fn name(&self) -> &'static str {
        DB::STORE
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
        let work = move |seat| async move { core.open(key, claim, seat).await };
        self.0.desk.claim(key, claim, work).await
    }

    /// Makes a claim. Runs in a task that nobody drops: a BEGIN that is dropped on its way leaves an
    /// open transaction in the pool.
    async fn open(
        self,
        key: StorageKey,
        claim: Claim,
        seat: Seat,
    ) -> Result<ClaimOutcome<Lease>, StoreError> {
        let failed = |error| not_done::<DB>("claim", error);
        let mut looked = false;
        let turn = match Arc::clone(&self.0.turns).try_acquire_owned() {
            Ok(turn) => turn,
            Err(_) => {
                // An answer that stands already needs no turn.
                let mut session = Session::acquire(&self.0.pool).await.map_err(failed)?;
                if let Some(outcome) = stands::<DB>(&mut session, key, &claim).await? {
                    return Ok(outcome);
                }
                drop(session);
                looked = true;
                self.turn().await?
            }
        };
        let mut session = Session::acquire(&self.0.pool).await.map_err(failed)?;
        if !looked && let Some(outcome) = stands::<DB>(&mut session, key, &claim).await? {
            return Ok(outcome);
        }
        match session.begun(self.0.texts.begin.clone()).await {
            Ok(session) => self.take(key, claim, Open::new(session, seat, turn)).await,
            Err(error) => Self::refused(error),
        }
    }

    async fn turn(&self) -> Result<OwnedSemaphorePermit, StoreError> {
        let turn = Arc::clone(&self.0.turns).acquire_owned();
        match timeout(TURN_WITHIN, turn).await {
            Ok(Ok(turn)) => Ok(turn),
            Ok(Err(_)) | Err(_) => {
                Err(StoreError::new(StoreErrorKind::Unavailable, DB::STORE, "claim"))
            }
        }
    }

    /// Claims the key in an open transaction.
    async fn take(
        &self,
        key: StorageKey,
        claim: Claim,
        mut open: Open<DB>,
    ) -> Result<ClaimOutcome<Lease>, StoreError> {
        let claimed = async {
            let connection = open.session()?.connection()?;
            let verb = |current, now| record::claim(current, now, &claim);
            let outcome = step::<DB, _>(connection, key, &verb).await?;
            if let ClaimOutcome::Acquired(_) = &outcome {
                DB::run(connection, self.0.texts.claimed.clone()).await?;
            }
            Ok::<_, sqlx::Error>(outcome)
        };
        let claimed = bounded::<DB, _>(ANSWER_WITHIN, claimed).await;
        let grant = match open.session().and_then(|session| session.seen(claimed)) {
            Ok(ClaimOutcome::Acquired(grant)) => grant,
            Ok(outcome @ ClaimOutcome::Indeterminate(_)) => {
                // The record says so from now on.
                let committed = async { open.session()?.commit().await };
                let committed = bounded::<DB, _>(ANSWER_WITHIN, committed).await;
                let committed = open.session().and_then(|session| session.seen(committed));
                committed.map_err(|error| maybe_done::<DB>("claim", error))?;
                return Ok(outcome.map(|_| unreachable!("an outcome without a grant")));
            }
            Ok(outcome) => {
                open.rollback().await;
                return Ok(outcome.map(|_| unreachable!("an outcome without a grant")));
            }
            Err(error) => {
                open.rollback().await;
                return Self::refused(error);
            }
        };
        let unit = Arc::new(Unit::new(open, self.0.texts.patience));
        let running = Running { unit: Arc::clone(&unit), ending: Mutex::default() };
        let mut lease = Lease::new(key, &claim, grant).repeatable();
        lease.attachments_mut().insert(unit);
        lease.attachments_mut().insert(Arc::new(running));
        Ok(ClaimOutcome::Acquired(lease))
    }

    fn refused(error: sqlx::Error) -> Result<ClaimOutcome<Lease>, StoreError> {
        match weigh::<DB>(&error) {
            Weight::Locked => Ok(ClaimOutcome::InFlight { remaining: Duration::ZERO }),
            Weight::Conflict
            | Weight::Lost
            | Weight::Unreached
            | Weight::Full
            | Weight::Constraint
            | Weight::Refused => Err(not_done::<DB>("claim", error)),
        }
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
        if self.0.adrift.load(Ordering::Acquire) < self.0.turns_max {
            return Ok(());
        }
        let why = "every turn waits to be told what became of its COMMIT: no key can be claimed";
        Err(StoreError::new(StoreErrorKind::Unavailable, DB::STORE, "ready").with_source(why))
    }

    /// Ends a run, or waits for the end that is under way.
    async fn end(
        &self,
        running: &Arc<Running<DB>>,
        lease: &Lease,
        end: End,
        operation: &'static str,
    ) -> Result<CompleteOutcome, StoreError> {
        let mut ended = {
            let mut ending = running.ending.lock().unwrap_or_else(PoisonError::into_inner);
            let started = || self.settle(running, lease, end);
            ending.get_or_insert_with(started).clone()
        };
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

    /// Ends a run in a task that nobody drops: a COMMIT is sent once, and asked after until it is known
    /// what became of it.
    fn settle(
        &self,
        running: &Arc<Running<DB>>,
        lease: &Lease,
        end: End,
    ) -> watch::Receiver<Option<Ended>> {
        let (tell, told) = watch::channel(None);
        let (core, unit) = (self.clone(), Arc::clone(&running.unit));
        let (key, owner) = (lease.key(), *lease.owner());
        tokio::spawn(async move {
            let ended = core.finish(&unit, key, &owner, &end).await;
            tell.send_replace(Some(ended));
        });
        told
    }

    async fn finish(&self, unit: &Unit<DB>, key: StorageKey, owner: &Owner, end: &End) -> Ended {
        let undone = Ended::Told(CompleteOutcome::RolledBack);
        let held = unit.close();
        let failure = unit.failure();
        let Some(mut open) = held else {
            tracing::error!(
                key = %key.in_logs(),
                "the transaction was still held when the handler had answered: everything is rolled back"
            );
            return undone;
        };
        match failure.as_ref().map(|failure| failure.weight) {
            Some(Weight::Lost) => {
                open.abandon();
                return Ended::Again;
            }
            Some(Weight::Conflict) => {
                open.rollback().await;
                return Ended::Again;
            }
            // Whatever the handler made of it, it could not do its work.
            Some(Weight::Full) if matches!(end, End::Complete(_)) => {
                open.rollback().await;
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
                open.rollback().await;
                return undone;
            }
        };
        if let (Writes::Keep, Some(failure)) = (completion.writes, &failure) {
            tracing::error!(
                key = %key.in_logs(), code = failure.code,
                "a statement failed and the handler answered as if it had not: everything is rolled back"
            );
            open.rollback().await;
            return undone;
        }
        match self.store(&mut open, key, owner, completion).await {
            Ok(CompleteOutcome::Stored) => {}
            Ok(outcome) => {
                tracing::error!(key = %key.in_logs(), ?outcome, "the claim has vanished from its transaction");
                open.rollback().await;
                return undone;
            }
            Err(error) => {
                open.rollback().await;
                return self.undone_by(key, &error);
            }
        }
        self.commit(open, key, owner, completion).await
    }

    /// Stores the response in the open transaction, with the handler's writes or without.
    async fn store(
        &self,
        open: &mut Open<DB>,
        key: StorageKey,
        owner: &Owner,
        completion: &Completion,
    ) -> sqlx::Result<CompleteOutcome> {
        let stored = async {
            let connection = open.session()?.connection()?;
            if completion.writes == Writes::Undo {
                DB::run(connection, sqlx::SqlSafeStr::into_sql_str(UNDO)).await?;
            }
            let verb = |current, now| record::complete(current, now, owner, completion);
            let outcome = step::<DB, _>(connection, key, &verb).await?;
            if let Some(unlimited) = &self.0.texts.unlimited {
                DB::run(connection, unlimited.clone()).await?;
            }
            Ok(outcome)
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

/// What is known of a key without claiming it, if that is an answer.
async fn stands<DB: Backend>(
    session: &mut Session<DB>,
    key: StorageKey,
    claim: &Claim,
) -> Result<Option<ClaimOutcome<Lease>>, StoreError> {
    let look = async { DB::look(session.connection()?, key, Lock::None).await };
    let found = bounded::<DB, _>(ANSWER_WITHIN, look).await;
    let found = session.seen(found).map_err(|error| not_done::<DB>("claim", error))?;
    let (current, now) = found.current();
    let Step { change, outcome } = record::claim(current, now, claim);
    Ok((change == Change::Keep).then(|| outcome.map(|_| unreachable!("a grant without a change"))))
}

fn running<DB: Backend>(lease: &Lease) -> Option<&Arc<Running<DB>>> {
    lease.attachments().get::<Arc<Running<DB>>>()
}

impl<DB: Backend> fmt::Debug for Core<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("database", &DB::STORE)
            .field("desk", &self.0.desk)
            .field("turns", &self.0.turns.available_permits())
            .finish_non_exhaustive()
    }
}

impl<DB: Backend> fmt::Debug for Running<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("ending", &self.ending).finish_non_exhaustive()
    }
}
