//! The lease protocol with its record in a table: each verb is one short transaction.

use std::fmt;

use sqlx::{Pool, SqlStr};

use super::{Backend, Lock, maybe_done, not_done, step, task_gone};
use crate::error::StoreError;
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

/// A verb with its arguments, as a task of its own needs it.
pub(super) type Verb<T> = Box<dyn Fn(Current, Millis) -> Step<T> + Send + Sync>;

impl<DB: Backend> LeaseCore<DB> {
    pub(super) fn new(pool: Pool<DB>, begin: SqlStr) -> Self {
        Self { pool, begin }
    }

    pub(super) fn name(&self) -> &'static str {
        DB::STORE
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
            let mut transaction = core.pool.begin_with(core.begin.clone()).await.map_err(failed)?;
            match step::<DB, _>(&mut transaction, key, &*verb).await {
                Ok(outcome) => {
                    let committed = super::commit(transaction).await;
                    committed.map_err(|error| maybe_done::<DB>(operation, error))?;
                    Ok(outcome)
                }
                Err(error) => {
                    // A connection that cannot do this is gone, and its transaction with it.
                    drop(super::undo(transaction).await);
                    Err(failed(error))
                }
            }
        });
        work.await.unwrap_or_else(|_| Err(task_gone::<DB>(operation)))
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

    /// Reads the table.
    pub(super) async fn ready(&self) -> Result<(), StoreError> {
        let failed = |error| not_done::<DB>("ready", error);
        let mut connection = self.pool.acquire().await.map_err(failed)?;
        let nobody = StorageKey::from_bytes([0; 24]);
        DB::look(&mut connection, nobody, Lock::None).await.map(drop).map_err(failed)
    }

    /// Removes up to `at_most` rows whose retention is over.
    pub(super) async fn sweep(&self, at_most: u32) -> Result<u64, StoreError> {
        let core = self.clone();
        let work = tokio::spawn(async move {
            let mut connection = core.pool.acquire().await?;
            DB::sweep(&mut connection, at_most).await
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
