//! A claim in a transaction of its own: a look, and if nobody has the key, one message that opens the
//! transaction and takes it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;

use super::desk::Seat;
use super::line::Turn;
use super::session::{ANSWER_WITHIN, Session, bounded};
use super::transactional::{Claimed, Clock, Core, HELD, LENT, Running};
use super::tx::{Open, Unit};
use super::{
    Backend, Found, Lock, Opened, Opening, Peeked, Row, Weight, maybe_done, moment, not_done, step,
    weigh,
};
use crate::error::{StoreError, StoreErrorKind};
use crate::record::{self, Change, Claim, ClaimOutcome, Current, Expires, Grant, Millis, Step};
use crate::scope::StorageKey;
use crate::store::Lease;

/// How long the first look may take, on a connection that nobody has asked if it is alive.
const FIRST_LOOK: Duration = Duration::from_secs(1);
/// A claim that took longer than this waited for somebody, and what it says of the time is old.
const CLAIM_FRESH: Duration = Duration::from_millis(10);

/// What came of a first claim.
enum First {
    Run(Grant, Claimed),
    /// This is there, and nothing is open.
    Found(Found),
    /// Somebody has the key, or it cannot be done in one message.
    Not,
}

impl First {
    /// With a row that was written at this moment.
    fn run(row: Row, made: Millis, clock: Clock) -> Self {
        let Row { record, expires, .. } = row;
        let expires = expires.unwrap_or_default();
        Self::Run(Grant::first(made), Claimed { record, expires, clock })
    }
}

impl<DB: Backend> Core<DB> {
    /// Makes a claim. Nobody drops it: a BEGIN that is dropped on its way leaves an open transaction in the
    /// pool.
    pub(super) async fn open(
        self,
        key: StorageKey,
        claim: Claim,
        seat: Seat,
    ) -> Result<ClaimOutcome<Lease>, StoreError> {
        let failed = |error| not_done::<DB>("claim", error);
        let line = &self.shared().line;
        // Here and below what is rarely done has a future of its own: all others are moved, and so should
        // be small.
        let acquire = || Session::acquire(self.pool()).boxed();
        // An answer that stands already needs no turn.
        let look = |acquired: sqlx::Result<Session<DB>>| {
            let looked = async {
                let mut session = acquired?;
                match session.peek(key, ANSWER_WITHIN).await {
                    // Nothing has happened on it, and there are others.
                    Err(error) if DB::is_bare(&error) => {
                        session.close();
                        acquire().await?.peek(key, ANSWER_WITHIN).await
                    }
                    peeked => peeked,
                }
            };
            let answer = looked.map(|peeked| match peeked {
                Ok(peeked) => stands(&peeked.found, &claim).map(Ok),
                Err(error) => Some(Err(failed(error))),
            });
            answer.boxed()
        };
        let (turn, session) = match line.turn(acquire, look).await {
            Ok(Turn { turn, session }) => (turn, session),
            Err(Some(answer)) => return answer,
            Err(None) => {
                let error = StoreError::new(StoreErrorKind::Unavailable, DB::STORE, "claim");
                return Err(error.with_source(if DB::REMOTE { LENT } else { HELD }));
            }
        };
        let (mut session, first) = match DB::here() {
            Some(now) => {
                let mut session = self.connected(session).await.map_err(failed)?;
                let first = self.first(&mut session, key, &claim, Some(now)).await;
                (session, first)
            }
            None => match self.unseen(session, key, &claim).await {
                Ok(first) => first,
                Err(session) => {
                    let (mut session, peeked) = self.look(key, session).await.map_err(failed)?;
                    if let Some(outcome) = stands(&peeked.found, &claim) {
                        line.hand_on(session);
                        return Ok(outcome);
                    }
                    let first = self.seen(&mut session, key, &claim, &peeked).await;
                    // It could be written on before: a handler may have made it read-only.
                    if peeked.able && first.as_ref().is_err_and(is_unwritable::<DB>) {
                        session.close();
                    }
                    (session, first)
                }
            },
        };
        match first {
            Ok(First::Run(grant, claimed)) => {
                let open = Open::new(session, seat, turn);
                return Ok(self.granted(key, &claim, grant, open, Some(claimed)));
            }
            Ok(First::Found(found)) => {
                if let Some(outcome) = stands(&found, &claim) {
                    line.hand_on(session);
                    return Ok(outcome);
                }
            }
            // Who has it will be seen.
            Ok(First::Not) => Box::pin(session.rollback()).await,
            Err(error) => {
                Box::pin(session.rollback()).await;
                return Box::pin(self.refused(error)).await;
            }
        }
        let begin = self.shared().texts.begin.clone();
        match Box::pin(session.begin_here(begin)).await {
            Ok(()) => Box::pin(self.take(key, claim, Open::new(session, seat, turn))).await,
            Err(error) => {
                if is_unfit::<DB>(&error) {
                    session.close();
                }
                Box::pin(self.refused(error)).await
            }
        }
    }

    async fn connected(&self, handed: Option<Session<DB>>) -> sqlx::Result<Session<DB>> {
        match handed {
            Some(session) if session.is_there() => Ok(session),
            Some(_) | None => Box::pin(Session::acquire_untested(self.writers())).await,
        }
    }

    /// Looks, with a connection that may turn out to be dead: nothing has happened on it, and there are
    /// others.
    async fn look(
        &self,
        key: StorageKey,
        handed: Option<Session<DB>>,
    ) -> sqlx::Result<(Session<DB>, Peeked)> {
        let mut session = self.connected(handed).await?;
        match session.peek(key, FIRST_LOOK).await {
            Ok(peeked) => Ok((session, peeked)),
            Err(error) if weigh::<DB>(&error) == Weight::Lost || DB::is_bare(&error) => {
                session.close();
                let again = async {
                    let mut session = Session::acquire(self.writers()).await?;
                    let peeked = session.peek(key, ANSWER_WITHIN).await?;
                    Ok((session, peeked))
                };
                Box::pin(again).await
            }
            Err(error) => Err(error),
        }
    }

    /// Takes a key without a look, on a connection whose last key was new, so that this one probably is. Whoever is
    /// wrong gives the connection back: nothing has happened, and an answer is found by a look.
    async fn unseen(
        &self,
        handed: Option<Session<DB>>,
        key: StorageKey,
        claim: &Claim,
    ) -> Result<(Session<DB>, sqlx::Result<First>), Option<Session<DB>>> {
        let mut session = match handed {
            Some(session) if session.expects_new() => session,
            other => return Err(other),
        };
        match self.first(&mut session, key, claim, None).await {
            Ok(First::Not) => {}
            Err(error) if weigh::<DB>(&error) != Weight::Locked => {}
            first => return Ok((session, first)),
        }
        session.expect_new(false);
        Box::pin(session.rollback()).await;
        Err(Some(session))
    }

    /// Takes a key that nobody had when it was looked. A row that is there may be past its retention: that is judged
    /// under its lock.
    async fn seen(
        &self,
        session: &mut Session<DB>,
        key: StorageKey,
        claim: &Claim,
        peeked: &Peeked,
    ) -> sqlx::Result<First> {
        let new = peeked.found.row.is_none();
        let opening = &self.shared().texts.opening;
        if !new || !(peeked.able || Box::pin(session.enable(opening)).await?) {
            return Ok(First::Not);
        }
        self.first(session, key, claim, None).await
    }

    /// Opens a transaction and takes a key that nobody has, by the clock of this process or else of the database.
    async fn first(
        &self,
        session: &mut Session<DB>,
        key: StorageKey,
        claim: &Claim,
        here: Option<Millis>,
    ) -> sqlx::Result<First> {
        let Some(mut row) = first_row(key, claim, here) else { return Ok(First::Not) };
        let opening = &self.shared().texts.opening;
        let asked = Instant::now();
        let told = match session.open(opening, &row).await {
            Ok(Opened::Claimed(expires)) => expires,
            Ok(Opened::Found(found)) => return Ok(First::Found(found)),
            Ok(Opened::Taken) => return Ok(First::Not),
            Err(error) => {
                return match weigh::<DB>(&error) {
                    // Somebody was there first, behind the look or behind a snapshot that does not see it.
                    Weight::Constraint | Weight::Conflict => Ok(First::Not),
                    // The session may have been reset. Whatever else it is, the longer way says it too.
                    Weight::Refused => {
                        Box::pin(session.rollback()).await;
                        Box::pin(session.enable(opening)).await.map(|_| First::Not)
                    }
                    Weight::Locked | Weight::Lost | Weight::Unreached | Weight::Full => Err(error),
                };
            }
        };
        let clock = match (here, told) {
            (Some(now), _) => Clock { at: now, read: asked },
            // Read a little later than that.
            (None, Some(expires)) => {
                let kept = row.expires.replace(expires).unwrap_or_default();
                Clock { at: moment(expires.saturating_sub(kept)), read: asked }
            }
            (None, None) => return Err(sqlx::Error::RowNotFound),
        };
        session.expect_new(true);
        if asked.elapsed() <= CLAIM_FRESH {
            return Ok(First::run(row, clock.at, clock));
        }
        // It waited for somebody who may have claimed later than this claim says, with a higher fence; and an answer would
        // be kept for its retention from before the wait. Only the database knows what its clock says now.
        let asked = Instant::now();
        let now = Box::pin(session.now(key)).await?;
        let clock = Clock { at: now, read: asked };
        let Some(row) = first_row(key, claim, Some(now)) else { return Ok(First::Not) };
        match Box::pin(session.rewrite(row.clone())).await? {
            1 => Ok(First::run(row, now, clock)),
            _ => Err(sqlx::Error::RowNotFound),
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
            let verb = |current, now: Millis| {
                let mut step = record::claim(current, now, &claim);
                // Its row was to be completed by its own transaction, and so is kept no longer than an answer.
                if let (ClaimOutcome::Indeterminate(_), Change::Write { expires, .. }) =
                    (&step.outcome, &mut step.change)
                {
                    *expires = Expires::At(now.after(claim.terms.unknown_retention));
                }
                step
            };
            let outcome = step::<DB, _>(connection, key, &verb).await?;
            if let ClaimOutcome::Acquired(_) = &outcome {
                DB::run(connection, self.shared().texts.claimed.clone()).await?;
            }
            Ok::<_, sqlx::Error>(outcome)
        };
        let claimed = bounded::<DB, _>(ANSWER_WITHIN, claimed).await;
        match open.session().and_then(|session| session.seen(claimed)) {
            Ok(ClaimOutcome::Acquired(grant)) => Ok(self.granted(key, &claim, grant, open, None)),
            Ok(outcome @ ClaimOutcome::Indeterminate(_)) => {
                // The record says so from now on.
                let committed = async { open.session()?.commit().await };
                let committed = bounded::<DB, _>(ANSWER_WITHIN, committed).await;
                let committed = open.session().and_then(|session| session.seen(committed));
                committed.map_err(|error| maybe_done::<DB>("claim", error))?;
                Ok(outcome.map(|_| unreachable!("an outcome without a grant")))
            }
            Ok(outcome) => {
                open.rollback().await;
                Ok(outcome.map(|_| unreachable!("an outcome without a grant")))
            }
            Err(error) => {
                match is_unfit::<DB>(&error) {
                    true => open.abandon(),
                    false => open.rollback().await,
                }
                Box::pin(self.refused(error)).await
            }
        }
    }

    fn granted(
        &self,
        key: StorageKey,
        claim: &Claim,
        grant: Grant,
        open: Open<DB>,
        claimed: Option<Claimed>,
    ) -> ClaimOutcome<Lease> {
        let unit = Arc::new(Unit::new(open, self.shared().texts.patience));
        let running = Running::new(Arc::clone(&unit), claimed);
        let mut lease = Lease::new(key, claim, grant).repeatable();
        lease.attachments_mut().insert(unit);
        lease.attachments_mut().insert(Arc::new(running));
        ClaimOutcome::Acquired(lease)
    }

    /// Boxed where it is called: it is rare.
    async fn refused(&self, error: sqlx::Error) -> Result<ClaimOutcome<Lease>, StoreError> {
        match weigh::<DB>(&error) {
            Weight::Locked if self.is_table_locked(&error).await => {
                let unavailable = StoreErrorKind::Unavailable;
                Err(StoreError::new(unavailable, DB::STORE, "claim")
                    .with_source(TableLocked(error)))
            }
            Weight::Locked => Ok(ClaimOutcome::InFlight { remaining: Duration::ZERO }),
            // SQLITE_BUSY, of another process.
            Weight::Unreached if !DB::REMOTE && error.as_database_error().is_some() => {
                let unavailable = StoreErrorKind::Unavailable;
                Err(StoreError::new(unavailable, DB::STORE, "claim")
                    .with_source(DatabaseHeld(error)))
            }
            Weight::Conflict
            | Weight::Lost
            | Weight::Unreached
            | Weight::Full
            | Weight::Constraint
            | Weight::Refused => Err(not_done::<DB>("claim", error)),
        }
    }

    /// Whether a lock was refused since the whole table is locked, and not since a twin has the key.
    async fn is_table_locked(&self, error: &sqlx::Error) -> bool {
        if !DB::may_be_the_table(error) {
            return false;
        }
        let asked = async {
            let mut session = Session::acquire(self.pool()).await?;
            let asked = async { DB::is_table_locked(session.connection()?).await };
            let asked = bounded::<DB, _>(FIRST_LOOK, asked).await;
            session.seen(asked)
        };
        // Who cannot be asked leaves it at what is usual: a twin.
        asked.await.unwrap_or(false)
    }
}

/// A claim waited for a lock that is no twin's.
#[derive(Debug, thiserror::Error)]
#[error(
    "the table idempotency_records is locked as a whole, by a migration or other maintenance: no key can be \
     claimed until it ends ({0})"
)]
struct TableLocked(#[source] sqlx::Error);

/// A claim waited for the one writer of a file.
#[derive(Debug, thiserror::Error)]
#[error("{HELD} ({0})")]
struct DatabaseHeld(#[source] sqlx::Error);

impl<DB: Backend> Session<DB> {
    async fn peek(&mut self, key: StorageKey, limit: Duration) -> sqlx::Result<Peeked> {
        let peek = async { DB::peek(self.connection()?, key).await };
        let peeked = bounded::<DB, _>(limit, peek).await;
        self.seen(peeked)
    }

    /// False if it cannot be done. Then claims take several messages.
    async fn enable(&mut self, opening: &Opening) -> sqlx::Result<bool> {
        let enable = async { DB::enable(self.connection()?, opening).await };
        let enabled = bounded::<DB, _>(ANSWER_WITHIN, enable).await;
        match self.seen(enabled) {
            Ok(()) => Ok(true),
            Err(error) if weigh::<DB>(&error) == Weight::Lost => Err(error),
            Err(error) => {
                tracing::debug!(%error, "claims on this connection take several messages");
                Ok(false)
            }
        }
    }

    /// What the database's clock says.
    async fn now(&mut self, key: StorageKey) -> sqlx::Result<Millis> {
        let look = async { DB::look(self.connection()?, key, Lock::None).await };
        let looked = bounded::<DB, _>(ANSWER_WITHIN, look).await;
        self.seen(looked).map(|found| moment(found.now))
    }

    async fn rewrite(&mut self, row: Row) -> sqlx::Result<u64> {
        let update = async { DB::update(self.connection()?, row).await };
        let updated = bounded::<DB, _>(ANSWER_WITHIN, update).await;
        self.seen(updated)
    }
}

/// Whether it may be the connection's own fault, of one that is kept: a handler may have left something on it, as
/// `PRAGMA query_only`.
fn is_unfit<DB: Backend>(error: &sqlx::Error) -> bool {
    DB::here().is_some() && weigh::<DB>(error) == Weight::Refused
}

fn is_unwritable<DB: Backend>(error: &sqlx::Error) -> bool {
    weigh::<DB>(error) == Weight::Unreached && error.as_database_error().is_some()
}

/// What is written for the first claim of a key, by the clock of this process, or one that only the database knows.
fn first_row(key: StorageKey, claim: &Claim, here: Option<Millis>) -> Option<Row> {
    let Some(now) = here else { return Row::to_complete_from_then(key, claim) };
    match record::claim(Current::Absent, now, claim).change {
        Change::Write { record, .. } => Some(Row::to_complete(key, &record, now, &claim.terms)),
        Change::Keep | Change::Remove => None,
    }
}

/// What is known of a key without claiming it, if that is an answer.
fn stands(found: &Found, claim: &Claim) -> Option<ClaimOutcome<Lease>> {
    let (current, now) = found.current();
    let Step { change, outcome } = record::claim(current, now, claim);
    (change == Change::Keep).then(|| outcome.map(|_| unreachable!("a grant without a change")))
}
