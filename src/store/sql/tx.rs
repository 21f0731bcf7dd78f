//! The transaction that the handler writes in.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use futures_util::{StreamExt as _, TryFutureExt as _, TryStreamExt as _};
use sqlx::{Database, Either, Execute, Executor, SqlSafeStr as _, SqlStr};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

use super::cause::in_words;
use super::desk::Seat;
use super::session::{Session, silent};
use super::{Backend, Weight, weigh};

/// The request's transaction: what is written through it is committed together with the stored
/// response, or not at all.
///
/// With axum it is an extractor; elsewhere [`Tx::take`] finds it in the request's extensions.
/// `&mut tx` is a [`sqlx::Executor`]:
///
/// ```
/// # #[cfg(all(feature = "axum", feature = "sqlite"))] {
/// use http::StatusCode;
/// use tower_idempotency::store::sql::{Tx, sqlx};
///
/// async fn create_payment(mut tx: Tx<sqlx::Sqlite>, amount: String) -> StatusCode {
///     let written = sqlx::query("INSERT INTO payments (amount) VALUES ($1)")
///         .bind(amount)
///         .execute(&mut tx)
///         .await;
///     match written {
///         Ok(_) => StatusCode::CREATED,
///         Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
///     }
/// }
/// # let _ = create_payment;
/// # }
/// ```
///
/// # What ends it
/// The answer, not the handler: there is no `commit` here. 2xx and 3xx commit; 4xx undo the writes and
/// are stored (unless marked [`Outcome::KeepWrites`](crate::Outcome::KeepWrites)); 5xx and panics undo
/// everything and free the key. So do:
///
/// * a `Tx` that is still held somewhere when the handler has answered, in a task or in a stream;
/// * a statement that failed, even if the handler went on without a word about it. Use
///   [`savepoint`](Self::savepoint) for one that may fail.
pub struct Tx<DB: Backend> {
    unit: Arc<Unit<DB>>,
    open: Option<Open<DB>>,
}

/// A request has no transaction, or it is taken already.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NoTx {
    /// Nothing of a transactional store is around this route, or its database is another one.
    #[error(
        "the request has no transaction: is `IdempotencyLayer` around this route, with a \
         transactional store of this database, and does the request carry a key?"
    )]
    Missing,
    /// Somebody else has taken it: there is one `Tx` for a request.
    #[error("the request's transaction is taken already")]
    Taken,
}

/// What the handler's run shares with the store.
pub(crate) struct Unit<DB: Backend> {
    slot: Mutex<Slot<DB>>,
    failure: Mutex<Option<Failure>>,
    /// The database may have ended the transaction, so that a statement now would be committed by itself;
    /// or it does not answer any more.
    ended: AtomicBool,
    /// A statement failed in a way in which some do end it, so that it has to be asked before the next one.
    doubted: AtomicBool,
    /// How long a statement may go without a sign of life from the database. A server that is frozen
    /// or cut off does not keep its own limits.
    patience: Option<Duration>,
}

enum Slot<DB: Backend> {
    Ready(Open<DB>),
    Taken,
    Closed,
}

/// A statement that failed.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) weight: Weight,
    /// For the log.
    pub(super) cause: Box<str>,
}

/// An open transaction, and what is given back when it ends.
pub(super) struct Open<DB: Backend> {
    session: Option<Session<DB>>,
    held: Option<Held>,
}

/// The key's place at the desk, and the right to have a transaction open.
pub(super) type Held = (Seat, OwnedSemaphorePermit);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic runs while what is inside is half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<DB: Backend> Open<DB> {
    pub(super) fn new(session: Session<DB>, seat: Seat, turn: OwnedSemaphorePermit) -> Self {
        Self { session: Some(session), held: Some((seat, turn)) }
    }

    pub(super) fn session(&mut self) -> sqlx::Result<&mut Session<DB>> {
        self.session.as_mut().ok_or(sqlx::Error::PoolClosed)
    }

    /// For a COMMIT: what is held stays so until it is known what became of it.
    pub(super) fn into_parts(mut self) -> Option<(Session<DB>, Held)> {
        self.session.take().zip(self.held.take())
    }

    pub(super) async fn rollback(mut self) {
        if let Some(mut session) = self.session.take() {
            session.rollback().await;
        }
    }

    /// Leaves a connection that does not answer. Without a COMMIT its transaction can only end in
    /// nothing; until the server has found out, the key is taken there.
    pub(super) fn abandon(mut self) {
        if let Some(session) = &mut self.session {
            session.close();
        }
        self.session = None;
    }
}

impl<DB: Backend> Drop for Open<DB> {
    /// The key stays at the desk until the database has undone everything, or was given up.
    fn drop(&mut self) {
        let (session, held) = (self.session.take(), self.held.take());
        if let (Some(mut session), Ok(runtime)) = (session, tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move {
                session.rollback().await;
                drop((session, held));
            });
        }
    }
}

impl<DB: Backend> Unit<DB> {
    pub(super) fn new(open: Open<DB>, patience: Option<Duration>) -> Self {
        let slot = Mutex::new(Slot::Ready(open));
        let [ended, doubted] = [false, false].map(AtomicBool::new);
        Self { slot, failure: Mutex::default(), ended, doubted, patience }
    }

    /// Takes the transaction for good: whoever holds it now cannot use it any more.
    pub(super) fn close(&self) -> Option<Open<DB>> {
        match std::mem::replace(&mut *lock(&self.slot), Slot::Closed) {
            Slot::Ready(open) => Some(open),
            Slot::Taken | Slot::Closed => None,
        }
    }

    pub(super) fn failure(&self) -> Option<Failure> {
        lock(&self.failure).clone()
    }

    fn note(&self, error: &sqlx::Error) {
        let code = error.as_database_error().and_then(|error| error.code());
        let weight = weigh::<DB>(error);
        // On a connection that does not answer, a statement would get the reply to the one before it.
        if weight == Weight::Lost || code.as_deref().is_some_and(DB::ends) {
            self.ended.store(true, Ordering::Release);
        }
        if code.as_deref().is_some_and(DB::may_end) {
            self.doubted.store(true, Ordering::Release);
        }
        let failure = Failure { weight, cause: in_words(error, weight).into() };
        let mut first = lock(&self.failure);
        // The first one is the cause: after it, PostgreSQL refuses everything with 25P02. Only the
        // loss of the connection says more.
        if first.is_none() || failure.weight == Weight::Lost {
            *first = Some(failure);
        }
    }

    fn is_closed(&self) -> bool {
        matches!(*lock(&self.slot), Slot::Closed)
    }

    fn take(self: &Arc<Self>) -> Result<Tx<DB>, NoTx> {
        let mut slot = lock(&self.slot);
        match std::mem::replace(&mut *slot, Slot::Taken) {
            Slot::Ready(open) => Ok(Tx { unit: Arc::clone(self), open: Some(open) }),
            Slot::Taken => Err(NoTx::Taken),
            Slot::Closed => {
                *slot = Slot::Closed;
                Err(NoTx::Taken)
            }
        }
    }
}

impl<DB: Backend> Tx<DB> {
    /// Takes the transaction of a request. It comes back when the `Tx` is dropped.
    ///
    /// # Errors
    /// [`NoTx`] if there is none, or if it is taken.
    pub fn take(extensions: &http::Extensions) -> Result<Self, NoTx> {
        extensions.get::<Arc<Unit<DB>>>().ok_or(NoTx::Missing)?.take()
    }

    /// Begins a part that may fail: undone, it leaves no trace, and the request may still succeed.
    ///
    /// # Errors
    /// The driver's, if the savepoint cannot be set.
    pub async fn savepoint(&mut self) -> sqlx::Result<Savepoint<'_, DB>> {
        self.run("SAVEPOINT idempotency_part".into_sql_str()).await?;
        Ok(Savepoint { tx: self, ended: false })
    }

    async fn run(&mut self, sql: SqlStr) -> sqlx::Result<()> {
        let unit = Arc::clone(&self.unit);
        let connection = self.sure().await?.connection()?;
        within(unit.patience, DB::run(connection, sql)).await.inspect_err(|error| unit.note(error))
    }

    /// Asks if the transaction is still open, where that is in doubt.
    async fn sure(&mut self) -> sqlx::Result<&mut Self> {
        if self.unit.doubted.load(Ordering::Acquire) {
            let unit = Arc::clone(&self.unit);
            let asked = within(unit.patience, DB::is_open(self.connection()?)).await;
            let open = asked.inspect_err(|error| unit.note(error))?;
            unit.ended.fetch_or(!open, Ordering::AcqRel);
            unit.doubted.store(false, Ordering::Release);
        }
        Ok(self)
    }

    fn is_doubted(&self) -> bool {
        self.unit.doubted.load(Ordering::Acquire)
    }

    fn connection(&mut self) -> sqlx::Result<&mut DB::Connection> {
        if self.unit.ended.load(Ordering::Acquire) {
            let why = "an earlier statement failed in a way that ends the transaction";
            return Err(sqlx::Error::Protocol(why.to_owned()));
        }
        match &mut self.open {
            // A shutdown has settled this run: what would be written now would be undone.
            Some(open) if !self.unit.is_closed() => open.session()?.connection(),
            Some(_) | None => Err(sqlx::Error::PoolClosed),
        }
    }
}

impl<DB: Backend> Drop for Tx<DB> {
    fn drop(&mut self) {
        let mut slot = lock(&self.unit.slot);
        if let (Slot::Taken, Some(_)) = (&*slot, &self.open)
            && let Some(open) = self.open.take()
        {
            *slot = Slot::Ready(open);
        }
        // Else the run is settled; the transaction is undone by being dropped.
    }
}

/// A part of a [`Tx`] that may fail. Either [`keep`](Self::keep) it or [`undo`](Self::undo) it;
/// dropped without either, nothing of the whole transaction is committed.
#[must_use = "a savepoint that is dropped undoes the whole transaction"]
pub struct Savepoint<'t, DB: Backend> {
    tx: &'t mut Tx<DB>,
    ended: bool,
}

impl<DB: Backend> Savepoint<'_, DB> {
    /// Keeps what was written since.
    ///
    /// # Errors
    /// The driver's; after a failed statement PostgreSQL refuses this.
    pub async fn keep(mut self) -> sqlx::Result<()> {
        self.ended = true;
        self.tx.run("RELEASE SAVEPOINT idempotency_part".into_sql_str()).await
    }

    /// Undoes what was written since, and forgives what failed since.
    ///
    /// # Errors
    /// The driver's.
    pub async fn undo(mut self) -> sqlx::Result<()> {
        self.ended = true;
        let sql = "ROLLBACK TO SAVEPOINT idempotency_part; RELEASE SAVEPOINT idempotency_part";
        self.tx.run(sql.into_sql_str()).await?;
        let mut failure = lock(&self.tx.unit.failure);
        // A conflict with another transaction is one of the whole transaction.
        if failure.as_ref().is_some_and(|failure| {
            matches!(failure.weight, Weight::Constraint | Weight::Refused | Weight::Locked)
        }) {
            *failure = None;
        }
        Ok(())
    }
}

impl<DB: Backend> Drop for Savepoint<'_, DB> {
    fn drop(&mut self) {
        if !self.ended {
            let cause = "a savepoint was dropped, and neither kept nor undone".into();
            lock(&self.tx.unit.failure).get_or_insert(Failure { weight: Weight::Refused, cause });
        }
    }
}

impl<DB: Backend> fmt::Debug for Tx<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tx").field("database", &DB::STORE).finish_non_exhaustive()
    }
}

impl<DB: Backend> fmt::Debug for Savepoint<'_, DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Savepoint").field("database", &DB::STORE).finish_non_exhaustive()
    }
}

impl<DB: Backend> fmt::Debug for Unit<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unit").field("database", &DB::STORE).finish_non_exhaustive()
    }
}

/// Waits for an answer, and takes the connection for lost if there is none.
async fn within<T>(
    patience: Option<Duration>,
    work: impl Future<Output = sqlx::Result<T>>,
) -> sqlx::Result<T> {
    match patience {
        None => work.await,
        Some(patience) => timeout(patience, work).await.unwrap_or_else(|_| Err(silent())),
    }
}

/// The same for each item.
fn each_within<'e, T: Send + 'e>(
    patience: Option<Duration>,
    items: BoxStream<'e, sqlx::Result<T>>,
) -> BoxStream<'e, sqlx::Result<T>> {
    let Some(patience) = patience else { return items };
    futures_util::stream::unfold(Some(items), move |items| async move {
        let mut items = items?;
        match timeout(patience, items.next()).await {
            Ok(item) => Some((item?, Some(items))),
            Err(_) => Some((Err(silent()), None)),
        }
    })
    .boxed()
}

type Rows<'e, DB> =
    BoxStream<'e, sqlx::Result<Either<<DB as Database>::QueryResult, <DB as Database>::Row>>>;

/// By a macro, since the compiler does not see through `DB::Connection` in a bound of an impl.
macro_rules! executor {
    ($database:ty, $type:ty, |$this:ident| $tx:expr) => {
        impl<'c> Executor<'c> for &'c mut $type {
            type Database = $database;

            fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> Rows<'e, $database>
            where
                'c: 'e,
                E: 'q + Execute<'q, $database>,
            {
                let $this = self;
                let tx: &'c mut Tx<$database> = $tx;
                if tx.is_doubted() {
                    let sure =
                        async move { Ok::<_, sqlx::Error>(tx.sure().await?.fetch_many(query)) };
                    return futures_util::stream::once(sure).try_flatten().boxed();
                }
                let unit = Arc::clone(&tx.unit);
                match tx.connection() {
                    Ok(connection) => each_within(unit.patience, connection.fetch_many(query))
                        .inspect_err(move |error| unit.note(error))
                        .boxed(),
                    Err(error) => {
                        futures_util::stream::once(std::future::ready(Err(error))).boxed()
                    }
                }
            }

            fn fetch_optional<'e, 'q: 'e, E>(
                self,
                query: E,
            ) -> BoxFuture<'e, sqlx::Result<Option<<$database as Database>::Row>>>
            where
                'c: 'e,
                E: 'q + Execute<'q, $database>,
            {
                let $this = self;
                let tx: &'c mut Tx<$database> = $tx;
                if tx.is_doubted() {
                    return Box::pin(async move { tx.sure().await?.fetch_optional(query).await });
                }
                let unit = Arc::clone(&tx.unit);
                match tx.connection() {
                    Ok(connection) => Box::pin(
                        within(unit.patience, connection.fetch_optional(query))
                            .inspect_err(move |error| unit.note(error)),
                    ),
                    Err(error) => Box::pin(std::future::ready(Err(error))),
                }
            }

            fn prepare_with<'e>(
                self,
                sql: SqlStr,
                parameters: &'e [<$database as Database>::TypeInfo],
            ) -> BoxFuture<'e, sqlx::Result<<$database as Database>::Statement>>
            where
                'c: 'e,
            {
                let $this = self;
                let tx: &'c mut Tx<$database> = $tx;
                let unit = Arc::clone(&tx.unit);
                match tx.connection() {
                    Ok(connection) => Box::pin(
                        within(unit.patience, connection.prepare_with(sql, parameters))
                            .inspect_err(move |error| unit.note(error)),
                    ),
                    Err(error) => Box::pin(std::future::ready(Err(error))),
                }
            }

            fn describe<'e>(
                self,
                sql: SqlStr,
            ) -> BoxFuture<'e, sqlx::Result<sqlx_core::describe::Describe<$database>>>
            where
                'c: 'e,
            {
                let $this = self;
                let tx: &'c mut Tx<$database> = $tx;
                let unit = Arc::clone(&tx.unit);
                match tx.connection() {
                    Ok(connection) => Box::pin(
                        within(unit.patience, connection.describe(sql))
                            .inspect_err(move |error| unit.note(error)),
                    ),
                    Err(error) => Box::pin(std::future::ready(Err(error))),
                }
            }
        }
    };
}

#[cfg(feature = "postgres")]
executor!(sqlx::Postgres, Tx<sqlx::Postgres>, |this| this);
#[cfg(feature = "postgres")]
executor!(sqlx::Postgres, Savepoint<'_, sqlx::Postgres>, |this| &mut *this.tx);
#[cfg(feature = "sqlite")]
executor!(sqlx::Sqlite, Tx<sqlx::Sqlite>, |this| this);
#[cfg(feature = "sqlite")]
executor!(sqlx::Sqlite, Savepoint<'_, sqlx::Sqlite>, |this| &mut *this.tx);
