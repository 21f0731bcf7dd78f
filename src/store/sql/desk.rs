//! The keys that this process has open transactions for, or is opening them.
//!
//! A twin of such a key is answered here, without a connection: however many come, they take nothing
//! of the pool. And a claim whose caller had to give up waiting keeps its place: when the same holder
//! asks again, it is the same claim.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::unstoppable::Unstoppable;
use crate::by_digest::DigestMap;
use crate::error::StoreError;
use crate::fingerprint::{Comparison, Fingerprints};
use crate::record::{Claim, ClaimOutcome};
use crate::scope::StorageKey;
use crate::store::Lease;
use crate::token::HolderId;

type Answer = Result<ClaimOutcome<Lease>, StoreError>;

/// How long a granted claim waits to be fetched. Callers ask again within a fraction of this; one
/// that has not done so is gone, and its transaction must not keep the key.
const FETCHED_WITHIN: Duration = Duration::from_secs(1);

/// Who is at work on which key.
#[derive(Default)]
pub(super) struct Desk {
    keys: Mutex<DigestMap<StorageKey, Entry>>,
}

struct Entry {
    holder: HolderId,
    fingerprints: Fingerprints,
    stage: Stage,
}

enum Stage {
    Claiming(Arc<Pending>),
    Running,
}

/// A claim that is being made.
#[derive(Default)]
struct Pending {
    answer: Mutex<Option<Answer>>,
    answered: Notify,
    abandoned: AtomicBool,
}

/// Keeps a key at the desk until it is dropped.
#[derive(Debug)]
pub(super) struct Seat {
    desk: Arc<Desk>,
    key: StorageKey,
    holder: HolderId,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic runs while what is inside is half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Desk {
    /// Makes a claim by `work`, which nobody can interrupt, or answers what is known of one that is under
    /// way.
    ///
    /// # Cancel safety
    /// Dropping the future leaves the claim going on; the same holder may ask for its answer again.
    pub(super) async fn claim<W>(
        self: &Arc<Self>,
        key: StorageKey,
        claim: Claim,
        gone: fn() -> StoreError,
        work: W,
    ) -> Answer
    where
        W: FnOnce(Seat) -> BoxFuture<'static, Answer>,
    {
        let (pending, seat) = {
            let mut keys = lock(&self.keys);
            match keys.get(&key) {
                Some(entry) => match &entry.stage {
                    Stage::Claiming(pending) if entry.holder == claim.holder => {
                        (Arc::clone(pending), None)
                    }
                    stage @ (Stage::Claiming(_) | Stage::Running) => {
                        return Ok(entry.tell(stage, &claim));
                    }
                },
                None => {
                    let pending = Arc::<Pending>::default();
                    let Claim { holder, fingerprints, .. } = claim;
                    let stage = Stage::Claiming(Arc::clone(&pending));
                    keys.insert(key, Entry { holder, fingerprints, stage });
                    let seat = Seat { desk: Arc::clone(self), key, holder };
                    (pending, Some(seat))
                }
            }
        };
        let answer = match seat {
            Some(seat) => {
                let work = AssertUnwindSafe(work(seat)).catch_unwind();
                let work = Unstoppable::new(work, move |work| {
                    tokio::spawn(async move { pending.serve(work, gone).await });
                });
                work.await.unwrap_or_else(|_| Err(gone()))
            }
            None => pending.fetch().await,
        };
        if let (Ok(ClaimOutcome::Acquired(_)), Some(entry)) =
            (&answer, lock(&self.keys).get_mut(&key))
        {
            entry.stage = Stage::Running;
        }
        answer
    }

    /// Gives up a claim that may be under way.
    pub(super) fn abandon(&self, key: StorageKey, holder: HolderId) {
        let pending = match lock(&self.keys).get(&key) {
            Some(Entry { holder: known, stage: Stage::Claiming(pending), .. })
                if *known == holder =>
            {
                Arc::clone(pending)
            }
            Some(_) | None => return,
        };
        pending.abandoned.store(true, Ordering::SeqCst);
        pending.answered.notify_one();
        // Whatever was granted is rolled back by being dropped.
        drop(lock(&pending.answer).take());
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut keys = lock(&self.desk.keys);
        if keys.get(&self.key).is_some_and(|entry| entry.holder == self.holder) {
            keys.remove(&self.key);
        }
    }
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Desk").field("keys", &lock(&self.keys).len()).finish_non_exhaustive()
    }
}

impl Entry {
    /// What a twin is told.
    fn tell(&self, stage: &Stage, claim: &Claim) -> ClaimOutcome<Lease> {
        let compared = claim.fingerprints.compare(self.fingerprints.current());
        match (stage, compared) {
            (Stage::Running, Comparison::Different) => ClaimOutcome::Mismatch,
            // While it is being claimed it may turn out that an earlier request holds the key.
            (Stage::Running | Stage::Claiming(_), _) => {
                ClaimOutcome::InFlight { remaining: Duration::ZERO }
            }
        }
    }
}

impl Pending {
    /// Goes on with a claim whose caller has left.
    async fn serve(
        &self,
        work: BoxFuture<'static, std::thread::Result<Answer>>,
        gone: fn() -> StoreError,
    ) {
        let answer = work.await.unwrap_or_else(|_| Err(gone()));
        let granted = matches!(answer, Ok(ClaimOutcome::Acquired(_)));
        if self.abandoned.load(Ordering::SeqCst) {
            return;
        }
        *lock(&self.answer) = Some(answer);
        self.answered.notify_one();
        if granted {
            tokio::time::sleep(FETCHED_WITHIN).await;
            drop(lock(&self.answer).take());
        }
    }

    async fn fetch(&self) -> Answer {
        loop {
            if let Some(answer) = lock(&self.answer).take() {
                return answer;
            }
            if self.abandoned.load(Ordering::SeqCst) {
                // Only its own sender gives a claim up, and then does not wait for it.
                return Ok(ClaimOutcome::InFlight { remaining: Duration::ZERO });
            }
            self.answered.notified().await;
        }
    }
}
