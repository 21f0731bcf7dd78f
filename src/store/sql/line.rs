//! The line of those who wait for the right to have a transaction open, and what is handed down it.
//!
//! A connection that goes back to its pool is asked there if it is alive, by the next one it is asked
//! again, and in SQLite each connection has a page cache of its own, which another one's write makes
//! worthless. So while somebody waits, whoever has committed hands turn and connection on; and a connection that
//! is there for nothing else stays here.

use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, Either, select};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::Backend;
use super::session::Session;

/// How long a claim waits for its turn and for a connection. Its caller asks for seconds at most;
/// whoever waits longer finds nobody.
const TURN_WITHIN: Duration = Duration::from_secs(10);
/// How long nobody may have got a turn until whoever waits for one looks first if there is an answer
/// already, which needs none.
const TURN_SOON: Duration = Duration::from_millis(10);
/// And how often that is waited for while the line moves. A look beside the line is work for the
/// database, which has enough of it when there is a line.
const TURN_STEPS: u32 = 10;
/// For how long a connection may be handed on: then its pool has it back, which may have others who wait,
/// and closes what is old.
const HANDED_WITHIN: Duration = Duration::from_millis(100);
/// The same of one that nobody else uses.
const KEPT_WITHIN: Duration = Duration::from_secs(60);

pub(super) struct Line<DB: Backend> {
    /// The right to have a transaction open.
    turns: Arc<Semaphore>,
    /// How many turns there are.
    turns_max: usize,
    /// How often one was given.
    given: AtomicUsize,
    /// For looks beside the line, one at a time: it has the connection that is kept out of the turns.
    window: Semaphore,
    handing: Handing,
    shelf: Mutex<Shelf<DB>>,
}

/// Whether connections are handed on. A pool that somebody else has made may do something with each that
/// comes back.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Handing {
    /// To whoever waits.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "PostgreSQL's"))]
    On,
    Off,
    /// To whoever comes next, for up to a minute: there is one connection for all turns, and nobody else uses it.
    #[cfg_attr(not(feature = "sqlite"), expect(dead_code, reason = "SQLite's"))]
    Kept,
}

struct Shelf<DB: Backend> {
    waiting: usize,
    /// Never more than there are who wait; or the one that is kept.
    sessions: Vec<Session<DB>>,
    closed: bool,
}

impl<DB: Backend> Shelf<DB> {
    /// For how many connections there is a use.
    fn room(&self, handing: Handing) -> usize {
        match handing {
            Handing::On => self.waiting,
            Handing::Kept if !self.closed => 1,
            Handing::Off | Handing::Kept => 0,
        }
    }
}

/// A place in the line.
struct Place<'l, DB: Backend> {
    line: &'l Line<DB>,
}

/// The right to have a transaction open, and perhaps a connection that was handed on with it.
pub(super) struct Turn<DB: Backend> {
    pub(super) turn: OwnedSemaphorePermit,
    pub(super) session: Option<Session<DB>>,
}

impl<DB: Backend> Line<DB> {
    pub(super) fn new(turns: usize, handing: Handing) -> Self {
        let shelf = Mutex::new(Shelf { waiting: 0, sessions: Vec::new(), closed: false });
        let (given, window) = (AtomicUsize::new(0), Semaphore::new(1));
        let (turns_max, turns) = (turns, Arc::new(Semaphore::new(turns)));
        Self { turns, turns_max, given, window, handing, shelf }
    }

    pub(super) fn turns_max(&self) -> usize {
        self.turns_max
    }

    pub(super) fn is_full(&self) -> bool {
        self.turns.available_permits() == 0
    }

    /// A turn. If none comes while others get theirs, what comes first: the turn, or a connection, with
    /// which is looked if there is an answer.
    ///
    /// # Errors
    /// The answer; none if there was no turn for too long.
    pub(super) async fn turn<'b, T>(
        &self,
        acquire: impl FnOnce() -> BoxFuture<'b, sqlx::Result<Session<DB>>>,
        look: impl FnOnce(sqlx::Result<Session<DB>>) -> BoxFuture<'b, Option<T>>,
    ) -> Result<Turn<DB>, Option<T>> {
        if let Ok(turn) = Arc::clone(&self.turns).try_acquire_owned() {
            self.given.fetch_add(1, Ordering::Relaxed);
            let session = match self.handing {
                Handing::Kept => self.shelf().sessions.pop(),
                // Those that are there are for whoever waits.
                Handing::On | Handing::Off => None,
            };
            return Ok(Turn { turn, session });
        }
        let place = self.stand();
        let turn = Arc::clone(&self.turns).acquire_owned();
        let mut turn = pin!(timeout(TURN_WITHIN, turn));
        let turn = match self.soon(turn.as_mut()).await {
            Some(turn) => turn,
            None => {
                let beside = async {
                    let window = self.window.acquire().await;
                    (acquire().await, window)
                };
                match select(turn.as_mut(), Box::pin(beside)).await {
                    Either::Left((turn, _)) => turn,
                    Either::Right(((session, window), _)) => {
                        let found = look(session).await;
                        // Who waits on is in nobody's way to an answer.
                        drop(window);
                        match found {
                            Some(found) => return Err(Some(found)),
                            None => turn.await,
                        }
                    }
                }
            }
        };
        let Ok(Ok(turn)) = turn else { return Err(None) };
        self.given.fetch_add(1, Ordering::Relaxed);
        Ok(Turn { turn, session: place.called() })
    }

    fn stand(&self) -> Place<'_, DB> {
        self.shelf().waiting += 1;
        Place { line: self }
    }

    /// Waits for a turn while others get theirs.
    async fn soon<T>(&self, mut turn: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        for _ in 0..TURN_STEPS {
            let before = self.given.load(Ordering::Relaxed);
            if let Ok(turn) = timeout(TURN_SOON, turn.as_mut()).await {
                return Some(turn);
            }
            if self.given.load(Ordering::Relaxed) == before {
                break;
            }
        }
        None
    }

    /// For a session with nothing open on it: whoever waits gets it with the turn that comes next. Or else
    /// it goes back to its pool.
    pub(super) fn hand_on(&self, session: Session<DB>) {
        let limit = match self.handing {
            Handing::On => HANDED_WITHIN,
            Handing::Kept => KEPT_WITHIN,
            Handing::Off => return,
        };
        if session.age() > limit {
            return;
        }
        let mut shelf = self.shelf();
        if shelf.room(self.handing) > shelf.sessions.len() {
            shelf.sessions.push(session);
        }
    }

    /// Keeps no connection any more.
    #[cfg(feature = "sqlite")]
    pub(super) fn close(&self) {
        let kept = {
            let mut shelf = self.shelf();
            shelf.closed = true;
            std::mem::take(&mut shelf.sessions)
        };
        drop(kept);
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf<DB>> {
        // Nothing that can panic runs while what is inside is half changed.
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<DB: Backend> Place<'_, DB> {
    /// Its turn has come.
    fn called(self) -> Option<Session<DB>> {
        self.line.shelf().sessions.pop()
    }
}

impl<DB: Backend> Drop for Place<'_, DB> {
    fn drop(&mut self) {
        let nobodys = {
            let mut shelf = self.line.shelf();
            shelf.waiting -= 1;
            let wanted = shelf.room(self.line.handing).min(shelf.sessions.len());
            shelf.sessions.split_off(wanted)
        };
        drop(nobodys);
    }
}

impl<DB: Backend> fmt::Debug for Line<DB> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line")
            .field("free", &self.turns.available_permits())
            .field("waiting", &self.shelf().waiting)
            .finish_non_exhaustive()
    }
}
