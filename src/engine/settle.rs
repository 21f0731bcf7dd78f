//! Settling: recording what a run came to, sent again within a bound, and longer in the background.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, sleep};
use tracing::Instrument as _;

use super::observe::Seen;
use super::{Conclusion, Engine, Said, Settle, observe, pause, unavailable};
use crate::config::{Policy, Recovery};
use crate::error::{RejectionKind, StoreError, StoreErrorKind};
use crate::mistakes::{Mistake, made};
use crate::record::{
    CompleteOutcome, Completion, OnExpired, Release, ReleaseOutcome, Verdict, Writes,
};
use crate::store::Lease;

/// How long something is recorded in the background at least: longer than a failover, or than a person takes
/// to bring a server back.
const BACKGROUND_MIN: Duration = Duration::from_secs(120);
/// When a claim is given back again. A server that goes on may still find claims on lines that are closed: it reads
/// them all in its first turns. And a primary that was given up has the claim, and may get its place back before it
/// was made a replica, which takes some ten seconds.
const AGAIN: [Duration; 3] =
    [Duration::from_secs(1), Duration::from_secs(4), Duration::from_secs(15)];
/// The longest pause of what goes on in the background: a store that is back is found within a second. Within a lease it is tried three times: a claim
/// that is done when a server goes on should be given back before its lease is over.
const PATIENT_PAUSE_MAX: Duration = Duration::from_millis(800);

fn in_background(policy: &Policy) -> Duration {
    policy.terms.lease.max(BACKGROUND_MIN)
}

fn patient_pause(tries: u32, policy: &Policy) -> Duration {
    let longest = PATIENT_PAUSE_MAX.min(policy.terms.lease / 3);
    pause(tries).saturating_mul(1 << tries.saturating_sub(3).min(10)).min(longest)
}

/// What came of recording a run.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Settled {
    /// The response is recorded.
    Stored,
    /// The claim is given up, or was not ours any more.
    Released,
    /// Another run of the same request was first; this is its response.
    Superseded(Bytes),
    /// Somebody else holds the key, or it was settled otherwise.
    Lost,
    /// The store undid everything, and the whole unit may run again.
    RolledBack,
    /// The store undid everything, and that is how this run ends.
    Undone,
    /// Nobody knows, within the bound.
    Unconfirmed,
    /// The store refuses for good.
    Refused,
}

impl Settled {
    /// For operators.
    fn in_words(&self) -> &'static str {
        match self {
            Self::Stored => "the answer is stored",
            Self::Released => "the key is given back",
            Self::Superseded(_) => "the answer of another run stands",
            Self::Lost => "somebody else holds the key, or has settled it",
            Self::RolledBack => "the store rolled back all that was written, and it may run again",
            Self::Undone => "the store rolled back whatever was written, and the key is free",
            Self::Unconfirmed => "nobody knows",
            Self::Refused => "the store refuses to record it",
        }
    }
}

/// What the store is sent of a run: made once, however often it is sent.
#[derive(Clone, Debug)]
pub(super) enum Entry {
    Complete(Completion),
    Release(Release),
}

impl Entry {
    /// What may be recorded of a run. That nothing happened is not to be said by one that followed a run which may have
    /// acted: the key stays as unknown as it was, so it is not free for another request, and the next run is told
    /// that it takes over.
    pub(super) fn of(settle: Settle, policy: &Policy, takeover: bool) -> Self {
        let terms = policy.terms;
        let repeats = policy.recovery.on_expired() == OnExpired::Reexecute;
        let verdict = match settle {
            Settle::Complete { response, writes } => {
                return Self::Complete(Completion { terms, response, writes });
            }
            Settle::Release(Verdict::NoEffect) if repeats && takeover => Verdict::Unknown,
            Settle::Release(verdict) => verdict,
        };
        Self::Release(Release { terms, verdict })
    }
}

impl Engine {
    /// Records what a run came to; calls the store again until it answers, at most for `within`.
    ///
    /// Nearly all are recorded by the first call. So that is all that stands here, and what else may happen is in a box.
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn keeps all it is given twice, and every request has this"
    )]
    pub(super) fn settle<'a>(
        &'a self,
        lease: &'a Lease,
        entry: &'a Entry,
        policy: &'a Policy,
        within: Duration,
    ) -> impl Future<Output = Settled> + Send + use<'a> {
        async move {
            let now = Instant::now();
            let bound = policy.store_call.min(within);
            let said = match entry {
                Entry::Complete(completion) => {
                    let call = self.store().complete(lease, completion);
                    let (outcome, _) = self.timed("complete", now, bound, call).await;
                    outcome.map(|outcome| self.completed(lease, outcome))
                }
                Entry::Release(release) => {
                    Box::pin(self.release_once(lease, release, now, bound)).await
                }
            };
            match said {
                Ok(settled) if within <= policy.complete_within => settled,
                said => Box::pin(self.settle_on(lease, entry, policy, within, now, said)).await,
            }
        }
    }

    /// Goes on with it: what the store said first, and again if it has to be.
    async fn settle_on(
        &self,
        lease: &Lease,
        entry: &Entry,
        policy: &Policy,
        within: Duration,
        since: Instant,
        mut said: Result<Settled, StoreError>,
    ) -> Settled {
        let deadline = since + within;
        let mut tries = 0;
        loop {
            let error = match said {
                Ok(settled) => {
                    if within > policy.complete_within {
                        let what = match entry {
                            Entry::Complete(_) => {
                                "what could not be recorded in time is recorded after all"
                            }
                            Entry::Release(_) => "what was given up is given up in the store too",
                        };
                        tracing::info!(
                            key = %lease.key().in_logs(), came_to = settled.in_words(), "{what}"
                        );
                    }
                    return settled;
                }
                Err(error) => error,
            };
            tries += 1;
            match error.kind() {
                StoreErrorKind::RolledBack => return Settled::RolledBack,
                // The transaction is gone with everything in it: there is nothing left to be stored.
                StoreErrorKind::Full if lease.is_repeatable() => return Settled::Refused,
                StoreErrorKind::OutcomeUnknown
                | StoreErrorKind::Unavailable
                | StoreErrorKind::Full
                | StoreErrorKind::Backend => {}
            }
            // Whoever waits for the answer waits for seconds; what goes on behind must not press a store
            // that comes back.
            let pause = match within > policy.complete_within {
                true => patient_pause(tries, policy),
                false => pause(tries),
            };
            if Instant::now() + pause >= deadline {
                tracing::error!(
                    key = %lease.key().in_logs(), tries, error = %error.in_full(), "a run cannot be recorded in time"
                );
                return Settled::Unconfirmed;
            }
            observe::call_again("settle");
            sleep(pause).await;
            let now = Instant::now();
            let bound = policy.store_call.min(deadline.saturating_duration_since(now));
            said = match entry {
                Entry::Complete(completion) => {
                    let call = self.store().complete(lease, completion);
                    let (outcome, _) = self.timed("complete", now, bound, call).await;
                    outcome.map(|outcome| self.completed(lease, outcome))
                }
                Entry::Release(release) => self.release_once(lease, release, now, bound).await,
            };
        }
    }

    async fn release_once(
        &self,
        lease: &Lease,
        release: &Release,
        now: Instant,
        bound: Duration,
    ) -> Result<Settled, StoreError> {
        let call = self.store().release(lease, release);
        match self.timed("release", now, bound, call).await.0? {
            ReleaseOutcome::Released | ReleaseOutcome::NotHeld => Ok(Settled::Released),
            ReleaseOutcome::Unreadable => Ok(Settled::Refused),
            ReleaseOutcome::RolledBack => Ok(Settled::Undone),
        }
    }

    fn completed(&self, lease: &Lease, outcome: CompleteOutcome) -> Settled {
        let key = lease.key();
        match outcome {
            CompleteOutcome::Stored => Settled::Stored,
            CompleteOutcome::Healed => {
                observe::completion_healed();
                tracing::info!(key = %key.in_logs(), "a late answer settled an unknown outcome");
                Settled::Stored
            }
            CompleteOutcome::Restored => {
                tracing::warn!(key = %key.in_logs(), "the store had lost a record; it is restored");
                Settled::Stored
            }
            CompleteOutcome::Superseded(response) => {
                observe::completion_refused();
                Settled::Superseded(response)
            }
            CompleteOutcome::Mismatch | CompleteOutcome::Lost => {
                observe::completion_refused();
                tracing::warn!(key = %key.in_logs(), "an answer came too late: the key is held by somebody else");
                Settled::Lost
            }
            CompleteOutcome::Unreadable => Settled::Refused,
            CompleteOutcome::RolledBack => Settled::Undone,
        }
    }

    /// What the client is told after a run, given what could be recorded of it.
    pub(super) fn conclude<T>(
        reply: T,
        said: Said,
        settled: Settled,
        policy: &Policy,
        lease: &Lease,
    ) -> Conclusion<T> {
        match (settled, said) {
            (Settled::Stored | Settled::Released, Said::Done(_)) => {
                Conclusion::Ran(reply, Seen::Executed)
            }
            (
                Settled::Stored | Settled::Released | Settled::Undone,
                Said::Ended(Verdict::NoEffect),
            ) => Conclusion::Ran(reply, Seen::Released),
            (Settled::Stored | Settled::Released, Said::Ended(Verdict::Unknown)) => {
                Conclusion::Ran(reply, Seen::Unknown)
            }
            (Settled::Undone, Said::Done(Writes::RollBack) | Said::Ended(Verdict::Unknown)) => {
                Conclusion::Ran(reply, Seen::RolledBack)
            }
            // The handler's answer speaks of writes that are gone.
            (Settled::Undone, Said::Done(Writes::Keep | Writes::Undo)) => {
                Conclusion::refused(RejectionKind::RolledBack)
            }
            (Settled::Superseded(response), _) => Conclusion::replay(response),
            (Settled::Lost, _) => Conclusion::refused(match &policy.recovery {
                // Somebody settled the key otherwise while the handler ran.
                Recovery::AtMostOnce => RejectionKind::OutcomeUnknown,
                // A later run holds the key, or may; its answer will be the one.
                Recovery::AtLeastOnce | Recovery::Reconcile(_) => RejectionKind::KeyInUse,
            }),
            // There is no answer that a later run could contradict.
            (_, Said::Ended(_)) => Conclusion::NotStored(reply),
            (Settled::Unconfirmed | Settled::Refused | Settled::RolledBack, Said::Done(_)) => {
                match &policy.recovery {
                    // What a store may undo can run again, and may then be answered otherwise.
                    _ if lease.is_repeatable() => Conclusion::refused(unavailable()),
                    // Nothing will run again, so the true answer cannot be contradicted later.
                    Recovery::AtMostOnce => Conclusion::NotStored(reply),
                    // A later run may give another answer, so this one must not be given.
                    Recovery::AtLeastOnce if made(Mistake::AnswerUnstored) => {
                        Conclusion::NotStored(reply)
                    }
                    Recovery::AtLeastOnce | Recovery::Reconcile(_) => {
                        Conclusion::refused(unavailable())
                    }
                }
            }
        }
    }

    /// Records in a tracked task what could not be recorded in time, for as long as a lease lasts and for two minutes at
    /// least: a record whose lease is over takes the word of its last holder still, as long as nobody else holds it.
    pub(super) fn settle_in_background(&self, lease: &Lease, entry: Entry, policy: &Policy) {
        let (engine, lease, policy) = (self.clone(), lease.clone(), policy.clone());
        let recording = self.0.behind.begin(lease.key(), &entry);
        let task = async move {
            let _recording = recording;
            engine.settle(&lease, &entry, &policy, in_background(&policy)).await;
        };
        self.0.tracker.spawn(task.in_current_span());
    }

    /// The same for a claim that nobody knows the fate of, and behind which nothing runs.
    ///
    /// A server that was frozen reads one line after another when it goes on, and the claim may stand on a
    /// line that is closed by now: it may be done after the release. Or it was done by a server that was a primary
    /// then and is one again. So that is said again; after a shutdown has begun, once.
    pub(super) fn give_up_in_background(&self, lease: Lease, entry: Entry, policy: &Policy) {
        let (engine, policy) = (self.clone(), policy.clone());
        let recording = self.0.behind.begin(lease.key(), &entry);
        let task = async move {
            let within = in_background(&policy);
            let mut settled = engine.settle(&lease, &entry, &policy, within).await;
            drop(recording);
            for (time, pause) in AGAIN.into_iter().enumerate() {
                if settled != Settled::Released || (time > 0 && engine.0.closing.is_given()) {
                    return;
                }
                tokio::select! {
                    () = sleep(pause) => {}
                    () = engine.0.closing.given(), if time > 0 => {}
                }
                settled = engine.settle(&lease, &entry, &policy, within).await;
            }
        };
        self.0.tracker.spawn(task.in_current_span());
    }
}
