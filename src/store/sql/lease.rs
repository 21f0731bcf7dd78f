//! The lease protocol with its record in a table: each verb is one short transaction.

use std::fmt;
use std::time::Duration;

use sqlx::{Pool, SqlStr};
use tokio::time::{Instant, timeout};

use super::session::{ANSWER_WITHIN, ASK_PAUSE_MAX, COMMIT_SILENT, Session, bounded, silent};
use super::{Backend, Lock, Row, maybe_done, not_done, step, task_gone};
use crate::error::{StoreError, StoreErrorKind};
use crate::record::{
    self, Claim, ClaimOutcome, CompleteOutcome, Completion, Current, Millis, Release,
    ReleaseOutcome, RenewOutcome, Renewal, Resolution, ResolveOutcome, Step,
};
use crate::scope::StorageKey;
use crate::store::Lease;

/// The part of a lease store that knows no particular database.
pub(super) struct LeaseCore<DB: Backend> {
    pool: Pool<DB>,
    begin: SqlStr,
}

impl<DB: Backend> Clone for LeaseCore<DB> {
    fn clone(&self) -> Self {
        Self { pool: self.pool.clone(), begin: self.begin.clone() }
    }
}

/// How long a COMMIT of a verb may take while the key is still in its hands. It may wait for a standby, and
/// the server goes on with it when its client has gone: so each that is given up is one more backend there,
/// and a bound as short as that of a statement would fill the server while a standby is away.
const COMMIT_WITHIN: Duration = Duration::from_secs(30);
/// How long one sweep may take: it is as large as its caller wants it.
const SWEEP_WITHIN: Duration = Duration::from_secs(300);

/// A verb with its arguments, as a task of its own needs it.
pub(super) type Verb<T> = Box<dyn Fn(Current, Millis) -> Step<T> + Send + Sync>;

impl<DB: Backend> LeaseCore<DB> {
    pub(super) fn new(pool: Pool<DB>, begin: SqlStr) -> Self {
        Self { pool, begin }
    }

    pub(super) fn name(&self) -> &'static str {
        DB::STORE
    }

    /// Each verb is a transaction of its own: what one waits for, the database does not say.
    pub(super) fn holdup(&self) -> Option<&'static str> {
        None
    }

    pub(super) fn pool(&self) -> &Pool<DB> {
        &self.pool
    }

    /// Runs a verb in a task that nobody drops: neither BEGIN nor COMMIT is left half way.
    pub(super) async fn run<T: Clone + Send + Sync + 'static>(
        &self,
        operation: &'static str,
        key: StorageKey,
        verb: Verb<T>,
    ) -> Result<T, StoreError> {
        let core = self.clone();
        let work = tokio::spawn(async move {
            let failed = |error| not_done::<DB>(operation, error);
            let begin = core.begin.clone();
            let mut session = Session::begin(&core.pool, begin).await.map_err(failed)?;
            let connection = session.connection().map_err(failed)?;
            let done = step::<DB, _>(connection, key, &*verb);
            let done = bounded::<DB, _>(ANSWER_WITHIN, done).await;
            match session.seen(done) {
                Ok(outcome) => {
                    let committed = core.commit(&mut session, key).await;
                    let committed = session.seen(committed);
                    committed.map_err(|error| maybe_done::<DB>(operation, error))?;
                    Ok(outcome)
                }
                Err(error) => {
                    session.rollback().await;
                    Err(failed(error))
                }
            }
        });
        work.await.unwrap_or_else(|_| Err(task_gone::<DB>(operation)))
    }

    /// Sends the COMMIT of a verb, and does not wait for an answer that was lost: its caller sends the
    /// verb again.
    async fn commit(&self, session: &mut Session<DB>, key: StorageKey) -> sqlx::Result<()> {
        let mut committing = std::pin::pin!(session.commit());
        if !DB::REMOTE {
            return committing.await;
        }
        let (began, mut pause) = (Instant::now(), COMMIT_SILENT);
        loop {
            if let Ok(done) = timeout(pause, committing.as_mut()).await {
                return done;
            }
            if began.elapsed() > COMMIT_WITHIN || self.is_over(key).await.is_ok() {
                return Err(silent());
            }
            pause = (pause * 2).min(ASK_PAUSE_MAX);
        }
    }

    /// Fails while somebody else's transaction has this key.
    async fn is_over(&self, key: StorageKey) -> sqlx::Result<()> {
        let mut session = Session::begin(&self.pool, self.begin.clone()).await?;
        let asked = async {
            let connection = session.connection()?;
            if DB::look(connection, key, Lock::Row).await?.row.is_none() {
                // A row that is not committed cannot be seen, but it is in the way of another one.
                let nothing = Row { key, state: 1, record: [0].to_vec().into(), expires: Some(1) };
                DB::insert(connection, nothing).await?;
            }
            Ok(())
        };
        let asked = bounded::<DB, _>(ANSWER_WITHIN, asked).await;
        let asked = session.seen(asked);
        session.rollback().await;
        asked
    }

    pub(super) async fn claim(
        &self,
        key: StorageKey,
        claim: Claim,
    ) -> Result<ClaimOutcome<Lease>, StoreError> {
        let verb = Box::new(move |current, now| record::claim(current, now, &claim));
        let outcome = self.run("claim", key, verb).await?;
        Ok(outcome.map(|grant| Lease::new(key, &claim, grant)))
    }

    pub(super) async fn renew(
        &self,
        lease: &Lease,
        renewal: &Renewal,
    ) -> Result<RenewOutcome, StoreError> {
        let (owner, renewal) = (*lease.owner(), renewal.clone());
        let verb = Box::new(move |current, now| record::renew(current, now, &owner, &renewal));
        self.run("renew", lease.key(), verb).await
    }

    pub(super) async fn complete(
        &self,
        lease: &Lease,
        completion: &Completion,
    ) -> Result<CompleteOutcome, StoreError> {
        let (owner, completion) = (*lease.owner(), completion.clone());
        let verb =
            Box::new(move |current, now| record::complete(current, now, &owner, &completion));
        self.run("complete", lease.key(), verb).await
    }

    pub(super) async fn release(
        &self,
        lease: &Lease,
        release: &Release,
    ) -> Result<ReleaseOutcome, StoreError> {
        let (owner, release) = (*lease.owner(), *release);
        let verb = Box::new(move |current, now| record::release(current, now, &owner, &release));
        self.run("release", lease.key(), verb).await
    }

    pub(super) async fn resolve(
        &self,
        key: StorageKey,
        resolution: &Resolution,
    ) -> Result<ResolveOutcome, StoreError> {
        let resolution = resolution.clone();
        let verb = Box::new(move |current, now| record::resolve(current, now, &resolution));
        self.run("resolve", key, verb).await
    }

    /// Reads the table, and asks if it may be written, in a task of its own: whoever asks may have less patience than a dead line needs
    /// to be found out.
    pub(super) async fn ready(&self) -> Result<(), StoreError> {
        let pool = self.pool.clone();
        let work = tokio::spawn(async move {
            let mut session = Session::<DB>::acquire(&pool).await?;
            let nobody = StorageKey::from_bytes([0; 24]);
            let look = DB::look(session.connection()?, nobody, Lock::None);
            let found = bounded::<DB, _>(ANSWER_WITHIN, look).await;
            session.seen(found)?;
            let question = DB::why_read_only(session.connection()?);
            let said = bounded::<DB, _>(ANSWER_WITHIN, question).await;
            session.seen(said)
        });
        match work.await {
            Ok(Ok(None)) => Ok(()),
            // It may pass: a standby is promoted, an operator thaws what was frozen.
            Ok(Ok(Some(reason))) => {
                let error = StoreError::new(StoreErrorKind::Unavailable, DB::STORE, "ready");
                Err(error.with_source(reason).saying_why())
            }
            Ok(Err(error)) => Err(not_done::<DB>("ready", error).saying_why()),
            Err(_) => Err(task_gone::<DB>("ready")),
        }
    }

    /// Removes up to `at_most` rows whose retention is over.
    pub(super) async fn sweep(&self, at_most: u32) -> Result<u64, StoreError> {
        let core = self.clone();
        let work = tokio::spawn(async move {
            let mut session = Session::<DB>::acquire(&core.pool).await?;
            let swept = DB::sweep(session.connection()?, at_most);
            let swept = bounded::<DB, _>(SWEEP_WITHIN, swept).await;
            session.seen(swept)
        });
        match work.await {
            Ok(swept) => swept.map_err(|error| not_done::<DB>("sweep", error)),
            Err(_) => Err(task_gone::<DB>("sweep")),
        }
    }
}

impl<DB: Backend> fmt::Debug for LeaseCore<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseCore").field("database", &DB::STORE).finish_non_exhaustive()
    }
}
