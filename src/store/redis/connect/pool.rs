//! A pool that the program runs already.
//!
//! Each check-out costs a round trip of its own (deadpool sends a PING), so this is for programs
//! that have a pool, not for speed.

use std::time::Duration;

use ::deadpool_redis::{Connection, Pool, PoolError};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};

use super::reasons::of_select;
use super::{Cause, DialError, Failure, Message, TooLong, Urgency, is_about_login, is_readonly};
use crate::store::redis::call::Answer;

/// The pool, and who may ask it for a connection.
pub(in crate::store::redis) struct Pooled {
    pool: Pool,
    /// One for each slot. Whoever waits does so here: a call whose time is up while the pool looks at a connection
    /// or makes one takes that along, and of many that have waited since the same moment each would do so.
    seats: Semaphore,
    /// Claims may use all slots but one, so that a renewal or a completion finds one.
    claims: Semaphore,
    call_timeout: Duration,
}

impl Pooled {
    pub(in crate::store::redis) fn new(pool: Pool, call_timeout: Duration) -> Self {
        let slots = pool.status().max_size.clamp(1, Semaphore::MAX_PERMITS);
        let of_claims = (slots - 1).max(1);
        let [seats, claims] = [slots, of_claims].map(Semaphore::new);
        Self { pool, seats, claims, call_timeout }
    }

    pub(super) fn call_timeout(&self) -> Duration {
        self.call_timeout
    }

    /// Sends a message and waits for its reply.
    ///
    /// # Cancel safety
    /// A connection whose call was dropped half-way leaves the pool, as one that timed out does.
    pub(super) async fn run(
        &self,
        message: Message<'_>,
        urgency: Urgency,
    ) -> Result<Answer, Failure> {
        let limit = self.call_timeout;
        let begun = Instant::now();
        // The semaphores are never closed; without them a call would only wait for less.
        let waiting = async {
            let turn = match urgency {
                Urgency::Ordinary => self.claims.acquire().await.ok(),
                Urgency::Urgent => None,
            };
            (turn, self.seats.acquire().await.ok())
        };
        // The last quarter is for the pool, which may have to make a connection.
        let patience = limit / 4 * 3;
        // `_seat` is held until the end: one call, one slot.
        let Ok(_seat) = timeout_at(begun + patience, waiting).await else {
            return Err(Failure::NotSent(TooLong::Seat(patience).into()));
        };
        let mut slot = match timeout_at(begun + limit, self.pool.get()).await {
            Ok(Ok(connection)) => Slot(Some(connection)),
            Ok(Err(error)) => return Err(Failure::NotSent(why(error))),
            Err(_) => return Err(Failure::NotSent(TooLong::Slot(limit).into())),
        };
        let Some(connection) = &mut slot.0 else { return Err(Failure::NotSent("no slot".into())) };
        let failure = match timeout(limit, message.send(&mut **connection)).await {
            Ok(Ok(answer)) => {
                slot.give_back();
                return Ok(answer);
            }
            Ok(Err(failure)) => failure,
            Err(_) => Failure::NoAnswer(TooLong::Reply(limit).into()),
        };
        if matches!(&failure, Failure::Refused(error) if !is_readonly(error)) {
            slot.give_back();
        }
        Err(failure)
    }
}

/// Why the pool has no connection. What it does not get past by trying again is told as such.
fn why(error: PoolError) -> Cause {
    let PoolError::Backend(error) = error else { return error.into() };
    if is_about_login(&error) {
        return DialError::PoolLogin { reason: error.to_string().into() }.into();
    }
    match of_select(&error) {
        Some((reason, advice)) => DialError::PoolSelect { reason, advice }.into(),
        None => DialError::from(error).into(),
    }
}

/// A connection that leaves the pool for good unless it is given back.
///
/// One that timed out, broke, or whose call was dropped may be silent; one to a replica refuses
/// every write and still answers the pool's PING.
struct Slot(Option<Connection>);

impl Slot {
    fn give_back(mut self) {
        drop(self.0.take());
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(connection) = self.0.take() {
            drop(Connection::take(connection));
        }
    }
}
