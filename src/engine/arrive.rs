//! A request that comes for a key: beside a twin of this process, or in a task of its own that claims.
//!
//! Whoever waits for a twin here owes nobody anything, and is dropped with its connection; what claims goes on without it.

use std::sync::Arc;

use tokio::time::Instant;

use super::claim::{Before, Seated, is_for};
use super::wait::{Met, Seat, Woken};
use super::{Attendance, Call, Conclusion, Engine, RETRY_AFTER_UNAVAILABLE, Ran, Run, in_use};
use crate::error::{Rejection, RejectionKind};

/// A request that is about to claim its key.
pub(super) struct Arrival {
    /// When it came: it waits so long from then, however it waits.
    pub(super) at: Instant,
    pub(super) before: Before,
}

/// A request that has begun.
enum Begun<T> {
    Beside(futures_util::future::BoxFuture<'static, Conclusion<T>>),
    Claims(Attendance<Arc<Call>, Conclusion<T>>),
    Refused(Rejection),
}

impl Engine {
    /// Takes a request to its conclusion.
    ///
    /// # Cancel safety
    /// Dropping the future leaves a handler that was started running: it finishes and is recorded.
    pub(crate) fn execute<T, H, F>(
        &self,
        call: Arc<Call>,
        handler: H,
    ) -> impl Future<Output = Conclusion<T>> + Send + use<T, H, F>
    where
        H: FnMut(Run) -> F + Send + 'static,
        F: Future<Output = Ran<T>> + Send + 'static,
        T: Send + 'static,
    {
        // Not within the future: what it is given would take its room in there to the end.
        let at = Instant::now();
        let met = match call.policy.wait.is_zero() || self.0.closing.is_given() {
            true => Met::Stranger,
            false => self.0.room.enter(call.storage_key, &call.fingerprints),
        };
        let begun = match met {
            // In a box, as it is rare and what a request takes is large enough.
            Met::Twin(seat) => {
                Begun::Beside(Box::pin(self.clone().beside(call, handler, at, seat)))
            }
            Met::Nobody(claiming) => {
                self.begun(call, handler, Arrival { at, before: Before::First(claiming, at) })
            }
            Met::Stranger => self.begun(call, handler, Arrival { at, before: Before::Nothing }),
        };
        async move {
            match begun {
                Begun::Beside(waits) => waits.await,
                Begun::Claims(attendance) => attended(attendance).await,
                Begun::Refused(rejection) => Conclusion::Refused(rejection),
            }
        }
    }

    fn begun<T, H, F>(&self, call: Arc<Call>, handler: H, arrival: Arrival) -> Begun<T>
    where
        H: FnMut(Run) -> F + Send + 'static,
        F: Future<Output = Ran<T>> + Send + 'static,
        T: Send + 'static,
    {
        match self.begin(call, handler, arrival) {
            Ok(attendance) => Begun::Claims(attendance),
            Err(rejection) => Begun::Refused(rejection),
        }
    }

    /// Waits for a twin of this process. If that does not answer the request, the store has to be asked.
    async fn beside<T, H, F>(
        self,
        call: Arc<Call>,
        handler: H,
        at: Instant,
        seat: Seat,
    ) -> Conclusion<T>
    where
        H: FnMut(Run) -> F + Send + 'static,
        F: Future<Output = Ran<T>> + Send + 'static,
        T: Send + 'static,
    {
        let mut seated = Seated::on(seat, &call.policy);
        let before = loop {
            let woken = tokio::select! {
                biased;
                // As long as it runs and holds its lease, the store could only say that it does.
                woken = seated.seat.wait(at + call.policy.wait) => woken,
                // After a shutdown has begun nothing is claimed any more. What is left of the lease is for the store to say.
                () = self.0.closing.given() => {
                    let conclusion = Conclusion::refused(in_use(RETRY_AFTER_UNAVAILABLE));
                    conclusion.tell(&call, at.elapsed());
                    return conclusion;
                }
            };
            match woken {
                Woken::Stored(stored) if is_for(&call, &stored) => {
                    let conclusion = Conclusion::replay(stored.response);
                    conclusion.tell(&call, at.elapsed());
                    return conclusion;
                }
                // One of those who waited claims, and the others wait for that one.
                Woken::Ended => {
                    let Seated { seat, _waiting } = seated;
                    drop(seat);
                    match self.0.room.enter(call.storage_key, &call.fingerprints) {
                        Met::Twin(seat) => seated = Seated { seat, _waiting },
                        Met::Nobody(claiming) => break Before::First(claiming, Instant::now()),
                        Met::Stranger => break Before::Nothing,
                    }
                }
                Woken::Elsewhere => break Before::Elsewhere(seated),
                Woken::Stored(_) | Woken::ClaimAgain | Woken::TimedOut => {
                    break Before::Waited(seated);
                }
            }
        };
        let arrival = Arrival { at, before };
        match self.begin(call, handler, arrival) {
            Ok(attendance) => attended(attendance).await,
            Err(rejection) => Conclusion::Refused(rejection),
        }
    }
}

async fn attended<T>(attendance: Attendance<Arc<Call>, Conclusion<T>>) -> Conclusion<T> {
    // Nobody knows what it had done when it panicked, or the runtime ended under it.
    let unknown = || Conclusion::refused(RejectionKind::OutcomeUnknown);
    attendance.await.unwrap_or_else(unknown)
}
