//! A connection of the pool on which nothing is waited for without a bound.
//!
//! A peer may go silent instead of closing: a relay that swallows a reply, a link that is down, a server
//! that is frozen. The driver waits for it without end, also when it gives a connection back to its pool.
//! So here a connection that does not answer in time is taken out of the pool and closed, and its place in
//! the pool is free for another one.

use std::future::Future;
use std::time::{Duration, Instant};

use sqlx::pool::PoolConnection;
use sqlx::{Connection as _, Pool, SqlStr};
use tokio::time::timeout;

use super::notice::watched;
use super::{Backend, Opened, Opening, Row, Weight, weigh};

/// How long a statement of the store itself may take. It waits for a lock for a tenth of a second, and
/// reads or writes one row by its key: whoever does not answer by then does not answer.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// How long a COMMIT may go without an answer until it is asked on another connection what became of it.
/// One takes milliseconds, and there has to be time for that before the client is told 503
/// ([`complete_within`](crate::ConfigBuilder::complete_within), four seconds).
pub(super) const COMMIT_SILENT: Duration = Duration::from_secs(1);
/// The longest pause between two such questions. Each waits a tenth of a second for the row with a
/// connection, and many may ask at once.
pub(super) const ASK_PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long a ROLLBACK may take, and the driver's last look before a connection goes back to the pool.
/// The database throws work away at once; what it is still busy with ends when the connection does.
const ROLLBACK_WITHIN: Duration = Duration::from_secs(2);
/// How long getting a connection may take at first; each further try has twice as long. An idle
/// connection that has gone silent costs one try, a server that is slow to connect gets the last.
const ACQUIRE_FIRST: Duration = Duration::from_secs(1);
const ACQUIRE_LAST: Duration = Duration::from_secs(4);
/// How long it is looked for the reason why there is no connection.
const REASON_WITHIN: Duration = Duration::from_secs(1);

/// Waits for an answer, and takes the connection for lost if there is none. A database in this process
/// is waited for: it has no line that could be cut, and nothing is gained by leaving it alone.
pub(super) async fn bounded<DB: Backend, T>(
    limit: Duration,
    work: impl Future<Output = sqlx::Result<T>>,
) -> sqlx::Result<T> {
    match DB::REMOTE {
        true => timeout(limit, work).await.unwrap_or_else(|_| Err(silent())),
        false => work.await,
    }
}

pub(super) fn silent() -> sqlx::Error {
    std::io::Error::new(std::io::ErrorKind::TimedOut, "the database does not answer").into()
}

/// A connection, and perhaps an open transaction on it.
pub(super) struct Session<DB: Backend> {
    /// None when it was closed or given back.
    connection: Option<PoolConnection<DB>>,
    open: bool,
    since: Instant,
    /// The last claim on it was of a key that nobody had, and the next one probably is.
    expects_new: bool,
}

impl<DB: Backend> Session<DB> {
    /// Takes a connection of the pool, one that answers.
    pub(super) async fn acquire(pool: &Pool<DB>) -> sqlx::Result<Self> {
        // Each that does not answer is out of the pool, and behind the last one is a new one.
        for _ in 0..=pool.options().get_max_connections() {
            let mut session = Self::acquire_untested(pool).await?;
            if !DB::REMOTE || pool.options().get_test_before_acquire() {
                return Ok(session);
            }
            let asked = async { session.connection()?.ping().await };
            let asked = bounded::<DB, _>(ACQUIRE_FIRST, asked).await;
            if session.seen(asked).is_ok() {
                return Ok(session);
            }
        }
        Err(sqlx::Error::PoolTimedOut)
    }

    /// Takes a connection of the pool, which may be dead where the pool does not ask.
    pub(super) async fn acquire_untested(pool: &Pool<DB>) -> sqlx::Result<Self> {
        let mut limit = ACQUIRE_FIRST;
        let acquired = loop {
            if !DB::REMOTE {
                break Box::pin(pool.acquire()).await;
            }
            match timeout(limit, Box::pin(pool.acquire())).await {
                Ok(acquired) => break acquired,
                Err(_) if limit < ACQUIRE_LAST => limit *= 2,
                Err(_) => break Err(sqlx::Error::PoolTimedOut),
            }
        };
        match acquired {
            Ok(connection) => {
                let since = Instant::now();
                Ok(Self { connection: Some(connection), open: false, since, expects_new: false })
            }
            Err(error) => Err(Box::pin(reason(pool, error)).await),
        }
    }

    /// Takes a connection and begins a transaction.
    pub(super) async fn begin(pool: &Pool<DB>, begin: SqlStr) -> sqlx::Result<Self> {
        Self::acquire(pool).await?.begun(begin).await
    }

    /// Begins a transaction.
    async fn begun(mut self, begin: SqlStr) -> sqlx::Result<Self> {
        self.begin_here(begin).await?;
        Ok(self)
    }

    /// Begins a transaction.
    pub(super) async fn begin_here(&mut self, begin: SqlStr) -> sqlx::Result<()> {
        // From here on something may be open.
        self.open = true;
        let begun = DB::begin(self.connection()?, begin);
        let begun = bounded::<DB, _>(ANSWER_WITHIN, begun).await;
        self.seen(begun)
    }

    /// Begins a transaction and claims in it; or tells what is there.
    pub(super) async fn open(&mut self, opening: &Opening, row: &Row) -> sqlx::Result<Opened> {
        // From here on something may be open.
        self.open = true;
        let opened = DB::open(self.connection()?, opening, row);
        let opened = bounded::<DB, _>(ANSWER_WITHIN, opened).await;
        let opened = self.seen(opened)?;
        self.open = !matches!(opened, Opened::Found(_));
        Ok(opened)
    }

    /// For whoever claims next on it: whether the key was one that nobody had.
    pub(super) fn expect_new(&mut self, new: bool) {
        self.expects_new = new;
    }

    pub(super) fn expects_new(&self) -> bool {
        self.expects_new
    }

    /// False when it was closed.
    pub(super) fn is_there(&self) -> bool {
        self.connection.is_some()
    }

    /// How long it has been out of its pool.
    pub(super) fn age(&self) -> Duration {
        self.since.elapsed()
    }

    pub(super) fn connection(&mut self) -> sqlx::Result<&mut DB::Connection> {
        self.connection.as_deref_mut().ok_or(sqlx::Error::PoolClosed)
    }

    /// Looks at what a statement came to: a connection that is lost is closed at once.
    pub(super) fn seen<T>(&mut self, done: sqlx::Result<T>) -> sqlx::Result<T> {
        if let Err(error) = &done
            && weigh::<DB>(error) == Weight::Lost
        {
            self.close();
        }
        done
    }

    /// Closes the connection without a word to the other side, which may not listen. The pool has room
    /// for another one at once.
    pub(super) fn close(&mut self) {
        if let Some(connection) = self.connection.take() {
            drop(connection.detach());
        }
    }

    /// Commits. What waits is the caller's to bound: one that is dropped on its way may have been done.
    ///
    /// A COMMIT that the server warns of is an error here, as one whose reply was lost.
    pub(super) async fn commit(&mut self) -> sqlx::Result<()> {
        let (done, warned) = watched(DB::commit(self.connection()?)).await;
        match (self.seen(done), warned) {
            (Ok(()), false) => {
                self.open = false;
                Ok(())
            }
            (Ok(()), true) => {
                self.open = false;
                let why = "the server did the COMMIT and warned of it";
                self.seen(Err(sqlx::Error::Protocol(why.to_owned())))
            }
            (Err(error), _) => {
                Box::pin(self.rollback()).await;
                Err(error)
            }
        }
    }

    /// A statement has committed.
    pub(super) fn committed(&mut self) {
        self.open = false;
    }

    /// Rolls back; a connection that cannot even do this is closed, and its transaction goes with it.
    pub(super) async fn rollback(&mut self) {
        let Some(connection) = self.connection.as_deref_mut() else { return };
        if !std::mem::take(&mut self.open) {
            return;
        }
        if let Err(error) = bounded::<DB, _>(ROLLBACK_WITHIN, DB::rollback(connection)).await {
            tracing::debug!(%error, "a transaction ended without a rollback");
            self.close();
        }
    }
}

impl<DB: Backend> Drop for Session<DB> {
    /// Gives the connection back, with nothing open on it.
    fn drop(&mut self) {
        let (connection, open, since) = (self.connection.take(), self.open, self.since);
        let Some(connection) = connection else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                let mut session = Self { connection: None, open, since, expects_new: false };
                runtime.spawn(async move {
                    session.connection = Some(connection);
                    if open {
                        Box::pin(session.rollback()).await;
                    }
                    if let Some(mut connection) = session.connection.take() {
                        let back = Box::pin(async {
                            connection.return_to_pool().await;
                            Ok(())
                        });
                        drop(bounded::<DB, ()>(ROLLBACK_WITHIN, back).await);
                    }
                });
            }
            Err(_) => drop(connection.detach()),
        }
    }
}

/// The pool keeps to itself what it met when it tried to connect: so one more try, for the reason.
pub(super) async fn reason<DB: Backend>(pool: &Pool<DB>, error: sqlx::Error) -> sqlx::Error {
    let all_in_use = pool.size() >= pool.options().get_max_connections();
    if !DB::REMOTE || all_in_use || !matches!(error, sqlx::Error::PoolTimedOut) {
        return error;
    }
    let options = pool.connect_options();
    match timeout(REASON_WITHIN, DB::Connection::connect_with(&options)).await {
        Ok(Err(reason)) => reason,
        Ok(Ok(_)) => error,
        Err(_) => silent(),
    }
}
