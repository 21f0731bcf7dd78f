//! A pool that the program runs already.
//!
//! Each check-out costs a round trip of its own (deadpool sends a PING), so this is for programs
//! that have a pool, not for speed.

use std::time::Duration;

use ::deadpool_redis::{Connection, Pool, PoolError};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::reasons::of_select;
use super::{Cause, DialError, Failure, Message, TooLong, Urgency, is_about_login, is_readonly};
use crate::store::redis::call::Answer;

/// The pool, and a cap on the claims in it.
pub(in crate::store::redis) struct Pooled {
    pool: Pool,
    /// Claims may use all slots but one, so that a renewal or a completion finds one.
    claims: Semaphore,
    call_timeout: Duration,
}

impl Pooled {
    pub(in crate::store::redis) fn new(pool: Pool, call_timeout: Duration) -> Self {
        let slots = pool.status().max_size.saturating_sub(1).clamp(1, Semaphore::MAX_PERMITS);
        Self { pool, claims: Semaphore::new(slots), call_timeout }
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
        let waiting = async {
            let turn = match urgency {
                // The semaphore is never closed; without it a claim would only wait for less.
                Urgency::Ordinary => self.claims.acquire().await.ok(),
                Urgency::Urgent => None,
            };
            self.pool.get().await.map(|connection| (turn, Slot(Some(connection))))
        };
        // `_turn` is held until the end: one claim, one slot.
        let (_turn, mut slot) = match timeout(limit, waiting).await {
            Ok(Ok(given)) => given,
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
