//! Connections of their own for calls that wait for replicas.
//!
//! WAIT holds back everything behind it on its connection, so on a shared one the calls would go
//! through one by one, a round trip to the replicas each. Here a call has its connection for itself
//! until its reply is there.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::shared::Shared;
use super::{DialError, Dialer, Failure, Message, TooLong, Urgency};
use crate::store::redis::call::Answer;

/// The most connections, and so the most calls that wait at once. With replicas a millisecond away
/// that is 32,000 calls a second; they are made when they are needed.
const LANES: usize = 32;

/// Lanes that claims leave free, so that a completion finds one however many claims wait.
const KEPT_FREE: usize = 8;

pub(super) struct Lanes {
    dialer: Arc<Dialer>,
    call_timeout: Duration,
    /// The one used last is used next, so that the others rest when there is little to do.
    idle: Mutex<Vec<Shared>>,
    all: Semaphore,
    claims: Semaphore,
}

impl Lanes {
    pub(super) fn new(dialer: Arc<Dialer>, call_timeout: Duration) -> Self {
        Self {
            dialer,
            call_timeout,
            idle: Mutex::default(),
            all: Semaphore::new(LANES),
            claims: Semaphore::new(LANES - KEPT_FREE),
        }
    }

    /// Connects the first one.
    pub(super) async fn begin(&self) -> Result<(), DialError> {
        let lane = self.lazy();
        lane.begin().await?;
        self.idle().push(lane);
        Ok(())
    }

    fn lazy(&self) -> Shared {
        Shared::lazy(Arc::clone(&self.dialer), self.call_timeout)
    }

    /// Sends a message on a connection of its own.
    ///
    /// # Cancel safety
    /// A connection whose call was dropped half-way, or had no answer, is not used again.
    pub(super) async fn run(
        &self,
        message: Message<'_>,
        urgency: Urgency,
    ) -> Result<Answer, Failure> {
        let turn = async {
            // The semaphores are never closed; without a turn a claim would only wait for less.
            let claim = match urgency {
                Urgency::Ordinary => self.claims.acquire().await.ok(),
                Urgency::Urgent => None,
            };
            (claim, self.all.acquire().await.ok())
        };
        let Ok(_turn) = timeout(self.call_timeout, turn).await else {
            return Err(Failure::NotSent(TooLong::Lane(self.call_timeout).into()));
        };
        let lane = self.idle().pop();
        let lane = lane.unwrap_or_else(|| self.lazy());
        let result = lane.run(message).await;
        if !matches!(result, Err(Failure::NoAnswer(_))) {
            self.idle().push(lane);
        }
        result
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Shared>> {
        // Nothing that can panic runs while the list is half changed.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
