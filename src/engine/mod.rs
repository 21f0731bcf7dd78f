//! The engine: claim, run in a task of its own, renew, complete. Knows no HTTP and no particular store.
//!
//! One request goes through four phases, all in **one tracked task**, so that a client that leaves
//! interrupts nothing:
//!
//! 1. *Claim*, sent again with the same holder id while its outcome is unknown, and after each end
//!    of a running twin.
//! 2. *Run* the handler, the lease being renewed meanwhile.
//! 3. *Settle*: complete or release, sent again within a bound.
//! 4. *Answer* whoever still waits.
//!
//! Before them a request may find its twin in this process, claiming or running: then it waits for that one where its
//! connection polls it, and begins the four only if that did not answer it (see `arrive`).

mod arrive;
mod attend;
mod behind;
mod claim;
mod execution;
mod keeper;
pub(crate) mod observe;
mod quota;
mod reconcile;
mod reuse;
mod settle;
mod shadow;
mod signal;
#[cfg(test)]
mod tests;
mod wait;

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use tracing::{Instrument as _, Span};

pub use execution::Execution;
pub use wait::WaitLimits;

use crate::config::{Enforcement, Policy, StoreDown};
use crate::error::{NoAnswer, Rejection, RejectionKind, StoreError, StoreErrorKind};
use crate::fingerprint::Fingerprints;
use crate::key::IdempotencyKey;
use crate::record::{Claim, Completion, Grant, Millis, RenewOutcome, Renewal, Verdict, Writes};
use crate::response::{StoredBody, StoredResponse};
use crate::scope::{CallerId, DownstreamSeed, Identity, StorageKey};
use crate::store::{Lease, Store, StoreFuture};
use crate::token::{Attempt, Fence, HolderId};
use arrive::Arrival;
use attend::{Attendance, Watched};
use behind::Behind;
use claim::{Before, Held, Unclaimed};
use keeper::Kept;
pub(crate) use observe::Seen;
use observe::{Gauge, StoreSeries};
use quota::{Place, Quota};
use reconcile::Inquiries;
use settle::{Entry, Settled};
use signal::Signal;
use wait::{Room, Stored};

/// Runs handlers under their keys. Shared by the layers of all routes
/// ([`IdempotencyLayer::on`](crate::IdempotencyLayer::on)).
///
/// Work runs on the runtime that its request came on, and ends with it. An engine may serve on several, one after another.
///
/// # Clone
/// Clones share the store, the running tasks and the limits on waiting.
#[derive(Clone)]
pub struct Engine(Arc<Shared>);

struct Shared {
    store: Arc<dyn Store>,
    room: Arc<Room>,
    quota: Arc<Quota>,
    tracker: TaskTracker,
    closing: Signal,
    running: Mutex<BTreeMap<u64, Running>>,
    next_run: AtomicU64,
    inquiries: Inquiries,
    behind: Arc<Behind>,
    series: StoreSeries,
}

/// A handler that runs now: what a shutdown has to settle in its place.
struct Running {
    execution: Execution,
    since: Instant,
}

/// A request as the engine sees it.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) key: IdempotencyKey,
    pub(crate) storage_key: StorageKey,
    pub(crate) caller: CallerId,
    pub(crate) identity: Identity,
    pub(crate) fingerprints: Fingerprints,
    pub(crate) policy: Arc<Policy>,
    /// The span the request came in, for its handler: handlers record fields in it.
    pub(crate) span: Span,
    /// Told when nobody waits for the answer any more.
    pub(crate) departure: Notify,
}

impl Watched for Arc<Call> {
    fn departure(&self) -> &Notify {
        &self.departure
    }
}

impl Call {
    /// A claim of its key, for a new holder.
    fn claim(&self) -> Claim {
        let policy = &self.policy;
        Claim {
            holder: HolderId::random(),
            fingerprints: self.fingerprints,
            terms: policy.terms,
            on_expired: policy.recovery.on_expired(),
            effects: policy.effects,
        }
    }

    /// Made when somebody asks for a key for a call outward, which most handlers do not.
    fn seed(&self) -> DownstreamSeed {
        DownstreamSeed::new(&self.identity, &self.key)
    }
}

/// What a handler is told when it is started.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) execution: Execution,
    /// What the store wants the handler to find.
    pub(crate) attachments: http::Extensions,
    /// True if it may be started again in this request, so that its input must be kept.
    pub(crate) may_repeat: bool,
}

/// What a handler's run came to.
#[derive(Debug)]
pub(crate) struct Ran<T> {
    pub(crate) settle: Settle,
    pub(crate) reply: T,
}

/// What is to be recorded of a run.
#[derive(Clone, Debug)]
pub(crate) enum Settle {
    /// This encoded response, and what it means for the handler's writes.
    Complete { response: Bytes, writes: Writes },
    /// No response, but what is known of the effect.
    Release(Verdict),
}

/// The same without the response: what a run said of itself.
#[derive(Clone, Copy, Debug)]
enum Said {
    Done(Writes),
    Ended(Verdict),
}

impl Settle {
    fn said(&self) -> Said {
        match self {
            Self::Complete { writes, .. } => Said::Done(*writes),
            Self::Release(verdict) => Said::Ended(*verdict),
        }
    }
}

/// How a request ends.
#[derive(Debug)]
pub(crate) enum Conclusion<T> {
    /// With the handler's own reply, recorded as it asked.
    Ran(T, Seen),
    /// With the handler's own reply, which could not be recorded.
    NotStored(T),
    /// With the handler's own reply, without any protection.
    Unprotected(T),
    /// With the response of an earlier run.
    Replay(Box<StoredResponse>),
    /// With the response to an interrupted run that was found out for this very request.
    Reconciled(Box<StoredResponse>),
    /// With a refusal.
    Refused(Rejection),
}

/// How a shutdown went.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Drained {
    /// How many handlers were still running at the end of the grace; their keys are marked as of
    /// unknown outcome, as far as the store could be reached.
    pub unfinished: usize,
    /// How much else the store did not confirm by then: answers that were made (clients have them marked `not-stored`, or
    /// were told 503, as [`Recovery`](crate::Recovery) says), and claims and handlers that were given up. As far as the store did what it was asked first, these keys are of unknown outcome
    /// when their leases are over, also where nothing ran. Their references are logged.
    pub unrecorded: usize,
}

/// How often a handler may be started for one request whose store rolled it back.
const RUNS_MAX: u32 = 4;
/// Pauses before a call is sent again; the third and later ones are equal.
const PAUSES: [Duration; 3] =
    [Duration::from_millis(20), Duration::from_millis(60), Duration::from_millis(150)];
/// When to come back if the store cannot be asked: outages are seconds long, clients are many.
const RETRY_AFTER_UNAVAILABLE: Duration = Duration::from_secs(1);
/// When a caller with too many operations in flight should come back: payments take about a second.
const RETRY_AFTER_TOO_MANY: Duration = Duration::from_secs(1);
/// How long a shutdown tries to mark what is left: a healthy store takes a millisecond, and one that is
/// not must not hold the process.
const MARK_WITHIN: Duration = Duration::from_millis(500);
/// A lease of which this part has passed before the handler could start is renewed first.
const STALE_AFTER: (u32, u32) = (2, 3);
/// What bounds one call, in the words of [`ConfigBuilder`](crate::ConfigBuilder).
const CALL_LIMIT: &str = "store_call_timeout, or what was left of claim_within or complete_within";

impl Engine {
    /// An engine on this store.
    pub fn new(store: impl Store) -> Self {
        Self::with_limits(store, WaitLimits::default())
    }

    /// An engine on this store with other limits on waiting.
    pub fn with_limits(store: impl Store, limits: WaitLimits) -> Self {
        observe::describe();
        Self(Arc::new(Shared {
            series: StoreSeries::of(store.name()),
            store: Arc::new(store),
            room: Room::new(limits),
            quota: Arc::default(),
            tracker: TaskTracker::new(),
            closing: Signal::default(),
            running: Mutex::default(),
            next_run: AtomicU64::new(0),
            inquiries: Inquiries::default(),
            behind: Arc::default(),
        }))
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.0.store
    }

    /// Shuts down: takes no more claims (new requests get 503), waits for running handlers up to
    /// `grace`, then marks the keys of those that are left as of unknown outcome and tells them
    /// that their lease is lost. Those that [mark their effects](crate::Effects::Marked) and have marked none
    /// cannot do so any more, and their keys are free.
    ///
    /// Call it after the server has stopped accepting, and before the runtime ends: handlers run
    /// in tasks of their own, and their clients may have left long ago.
    ///
    /// # Cancel safety
    /// Dropping the future stops the waiting, not the handlers. It may be called again.
    pub async fn drain(&self, grace: Duration) -> Drained {
        self.0.closing.give();
        self.0.tracker.close();
        let finished = timeout(grace, self.0.tracker.wait()).await.is_ok();
        if finished {
            return Drained { unfinished: 0, unrecorded: 0 };
        }
        let left: Vec<_> = {
            let running = self.running();
            running.values().map(|run| run.execution.clone()).collect()
        };
        let unfinished = left.len();
        join_all(left.into_iter().enumerate().map(async |(number, execution)| {
            let Some((lease, policy, verdict)) = execution.abandon() else { return };
            if policy.enforcement == Enforcement::Enforce && number < observe::TOLD_AT_MOST {
                observe::abandoned(lease.key(), verdict);
            }
            let within = policy.claim_within.min(MARK_WITHIN);
            let entry = Entry::of(Settle::Release(verdict), policy, false);
            self.settle(lease, &entry, policy, within).await;
        }))
        .await;
        let unrecorded = self.0.behind.tell();
        tracing::warn!(
            unfinished,
            unrecorded,
            "a shutdown did not wait for all that was under way"
        );
        Drained { unfinished, unrecorded }
    }

    /// For how long the oldest handler that runs now has been running.
    #[must_use]
    pub fn oldest_in_flight(&self) -> Option<Duration> {
        // Numbered in the order of their starts.
        self.running().first_key_value().map(|(_, run)| run.since.elapsed())
    }

    /// Brings the gauges that age by themselves up to date: call it before metrics are read. Without it they
    /// are as old as the last renewal of a handler, or as the last time that another one became the oldest.
    pub fn refresh_gauges(&self) {
        observe::oldest(self.oldest_in_flight());
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<u64, Running>> {
        // Nothing that can panic runs while the map is half changed.
        self.0.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to take a request from its claim to its conclusion, in a task that outlives the caller.
    fn begin<T, H, F>(
        &self,
        call: Arc<Call>,
        handler: H,
        arrival: Arrival,
    ) -> Result<Attendance<Arc<Call>, Conclusion<T>>, Rejection>
    where
        H: FnMut(Run) -> F + Send + 'static,
        F: Future<Output = Ran<T>> + Send + 'static,
        T: Send + 'static,
    {
        if self.0.closing.is_given() {
            let rejection = unavailable();
            observe::refused(rejection.kind(), Some(call.storage_key));
            return Err(rejection);
        }
        let most = call.policy.in_flight_per_caller;
        let Some(place) = self.0.quota.enter(call.caller, call.storage_key, most) else {
            let rejection = Rejection::new(RejectionKind::TooManyInFlight)
                .with_retry_after(RETRY_AFTER_TOO_MANY);
            observe::refused(rejection.kind(), Some(call.storage_key));
            return Err(rejection);
        };
        let span = observe::span(call.storage_key, &call.span);
        let work = self.clone().conduct(Arc::clone(&call), handler, arrival, place);
        Ok(Attendance::begin(&self.0.tracker, call, work.instrument(span)))
    }

    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn keeps all it is given twice, and this is the larger part of what a request takes"
    )]
    fn conduct<T, H, F>(
        self,
        call: Arc<Call>,
        mut handler: H,
        mut arrival: Arrival,
        // The handler counts to its end, not only for as long as its client stays.
        place: Place,
    ) -> impl Future<Output = Conclusion<T>> + Send + use<T, H, F>
    where
        H: FnMut(Run) -> F + Send + 'static,
        F: Future<Output = Ran<T>> + Send + 'static,
        T: Send + 'static,
    {
        async move {
            let (_place, at) = (&place, arrival.at);
            for run in 1..=RUNS_MAX {
                let from = if run == 1 { at } else { Instant::now() };
                let claimed = self.claim(&call, from, &mut arrival.before).await;
                // Whoever has waited waits no more.
                arrival.before = Before::Nothing;
                let held = match claimed {
                    Ok(held) => held,
                    Err(unclaimed) => {
                        let conclusion = match unclaimed {
                            Unclaimed::StoreDown { claim, .. }
                                if call.policy.store_down == StoreDown::RunUnprotected =>
                            {
                                // What is rare must not make the future of every request larger.
                                Box::pin(self.run_unprotected(&call, &claim, &mut handler)).await
                            }
                            Unclaimed::StoreDown { claim, in_doubt } => {
                                // What the store certainly has not done leaves nothing to free; and under load these
                                // calls would take the connections that others wait for.
                                if in_doubt {
                                    self.give_up(&call, &claim);
                                }
                                Conclusion::refused(unavailable())
                            }
                            Unclaimed::Concluded(conclusion) => conclusion,
                        };
                        conclusion.tell(&call, at.elapsed());
                        return conclusion;
                    }
                };
                if let Some(conclusion) = self.run(&call, held, &mut handler, run).await {
                    conclusion.tell(&call, at.elapsed());
                    return conclusion;
                }
            }
            let conclusion = Conclusion::refused(unavailable());
            conclusion.tell(&call, at.elapsed());
            conclusion
        }
    }

    /// Runs the handler under its lease and records what it came to. `None`: the store rolled
    /// everything back, and the whole unit runs again.
    ///
    /// No async fn: those keep all they are given twice.
    fn run<'a, T, H, F>(
        &'a self,
        call: &'a Arc<Call>,
        held: Held,
        handler: &'a mut H,
        run: u32,
    ) -> impl Future<Output = Option<Conclusion<T>>> + Send + use<'a, T, H, F>
    where
        H: FnMut(Run) -> F + Send,
        F: Future<Output = Ran<T>> + Send,
        T: Send,
    {
        let Held { lease, since, granted, claiming } = held;
        async move {
            let policy = &call.policy;
            let _in_flight = Gauge::in_flight();
            let lost = Arc::new(Signal::default());
            let fingerprint = call.fingerprints.current();
            let until = since + policy.terms.lease;
            let owning =
                self.0.room.own(call.storage_key, fingerprint, Arc::clone(&lost), until, claiming);
            let (part, whole) = STALE_AFTER;
            let is_stale = granted.duration_since(since) >= policy.terms.lease * part / whole;
            let since = match is_stale {
                false => since,
                true => match Box::pin(self.freshen(&lease, policy)).await {
                    Ok(since) => since,
                    Err(rejection) => return Some(Conclusion::Refused(rejection)),
                },
            };
            observe::granted(lease.grant());
            if lease.grant().takeover {
                observe::takeover();
            }
            let execution = Execution::held(self, call, &lease, &lost);
            let _registered = self.register(&execution, granted);
            let input = Run {
                execution: execution.clone(),
                attachments: lease.attachments().clone(),
                may_repeat: lease.is_repeatable() && run < RUNS_MAX,
            };
            let settling = AtomicBool::new(false);
            let kept = Kept {
                engine: self,
                lease: &lease,
                policy,
                since,
                lost: &lost,
                owning: &owning,
                settling: &settling,
            };
            // Pinned here, and not handed on: it is large.
            let work = pin!(async {
                // The call itself may panic, not only the future it makes.
                let ran = async { handler(input).await }.instrument(call.span.clone());
                let (settle, reply) = match AssertUnwindSafe(ran).catch_unwind().await {
                    Ok(Ran { settle, reply }) => (settle, Some(reply)),
                    Err(_) => (Settle::Release(execution.verdict()), None),
                };
                let (said, takeover) = (settle.said(), lease.grant().takeover);
                let entry = Entry::of(settle, policy, takeover);
                settling.store(true, Ordering::Relaxed);
                let settled = self.settle(&lease, &entry, policy, policy.complete_within).await;
                (reply, said, entry, settled)
            });
            let (reply, said, entry, settled) = kept.during(work).await;
            match (&settled, entry) {
                (Settled::Stored, Entry::Complete(Completion { response, .. })) => {
                    owning.stored(Stored { fingerprint, response });
                }
                (Settled::Unconfirmed, entry) => {
                    drop(owning);
                    self.settle_in_background(&lease, entry, policy);
                }
                _ => drop(owning),
            }
            if settled == Settled::RolledBack && lease.is_repeatable() {
                return None;
            }
            let Some(reply) = reply else {
                let undone = settled == Settled::Undone;
                let untouched = matches!(said, Said::Ended(Verdict::NoEffect));
                let became = match (undone, untouched) {
                    (true, _) => {
                        "a handler panicked, and the store rolled back all that it had written: the key is free"
                    }
                    (false, true) => {
                        "a handler panicked before its first checkpoint: the key is free"
                    }
                    (false, false) => "a handler panicked, and nobody knows what it had done",
                };
                tracing::error!(key = %call.storage_key.in_logs(), "{became}");
                return Some(Conclusion::refused(match (undone, untouched) {
                    (true, _) => RejectionKind::RolledBack,
                    (false, true) => RejectionKind::HandlerFailedUntouched,
                    (false, false) => RejectionKind::HandlerFailed,
                }));
            };
            Some(Self::conclude(reply, said, settled, policy, &lease))
        }
    }

    /// Makes sure that enough of the lease is left to start a handler, after a slow claim.
    async fn freshen(&self, lease: &Lease, policy: &Policy) -> Result<Instant, Rejection> {
        let sent = Instant::now();
        let renewal = Renewal { terms: policy.terms, checkpoint: None };
        match self.renew(lease, &renewal, policy).await {
            Ok(RenewOutcome::Renewed | RenewOutcome::Restored) => Ok(sent),
            Ok(RenewOutcome::Lost | RenewOutcome::Unreadable) | Err(_) => {
                // The handler has not started, so the key can be freed if it is still ours.
                let settle = Settle::Release(Verdict::NoEffect);
                let entry = Entry::of(settle, policy, lease.grant().takeover);
                self.settle_in_background(lease, entry, policy);
                Err(unavailable())
            }
        }
    }

    /// Runs the handler without a lease, because the route says so.
    async fn run_unprotected<T, H, F>(
        &self,
        call: &Arc<Call>,
        claim: &Claim,
        handler: &mut H,
    ) -> Conclusion<T>
    where
        H: FnMut(Run) -> F + Send,
        F: Future<Output = Ran<T>> + Send,
        T: Send,
    {
        let execution = Execution::unprotected(call);
        let input = Run { execution, attachments: http::Extensions::new(), may_repeat: false };
        let ran = async { handler(input).await }.instrument(call.span.clone());
        let ran = AssertUnwindSafe(ran).catch_unwind().await;
        // The claim may have reached the store after all. If so this settles it; if the store
        // comes back in time, the answer is kept for retries.
        let (settle, conclusion) = match ran {
            Ok(Ran { settle, reply }) => (settle, Conclusion::Unprotected(reply)),
            Err(_) => (
                Settle::Release(Verdict::Unknown),
                Conclusion::refused(RejectionKind::HandlerFailed),
            ),
        };
        let entry = Entry::of(settle, &call.policy, false);
        self.settle_in_background(&unconfirmed(call, claim), entry, &call.policy);
        conclusion
    }

    /// Frees a key whose claim may have reached the store although nobody will run.
    fn give_up(&self, call: &Call, claim: &Claim) {
        let lease = unconfirmed(call, claim);
        // Nobody knows what the claim was granted for: it may have been a takeover.
        let entry = Entry::of(Settle::Release(Verdict::NoEffect), &call.policy, true);
        self.give_up_in_background(lease, entry, &call.policy);
    }

    async fn renew(
        &self,
        lease: &Lease,
        renewal: &Renewal,
        policy: &Policy,
    ) -> Result<RenewOutcome, StoreError> {
        let renew = self.0.store.renew(lease, renewal);
        self.timed("renew", Instant::now(), policy.store_call, renew).await.0
    }

    /// One call to the store, bounded and measured, and when it was answered. It is sent now; each look at the clock
    /// is seen in what a request costs, so callers hand on what they have.
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn keeps all it is given twice, and every request has two of these"
    )]
    fn timed<'a, T>(
        &'a self,
        verb: &'static str,
        now: Instant,
        bound: Duration,
        call: StoreFuture<'a, T>,
    ) -> impl Future<Output = (Result<T, StoreError>, Instant)> + Send + use<'a, T> {
        async move {
            let result = match self.0.store.answers_within() {
                // A second clock for the same wait would cost and say nothing.
                Some(within) if within <= bound => call.await,
                Some(_) | None => match timeout(bound, call).await {
                    Ok(result) => result,
                    Err(_) => Err(self.unanswered(verb, bound)),
                },
            };
            let kind = result.as_ref().err().map(StoreError::kind);
            let answered = Instant::now();
            self.0.series.called(verb, answered.duration_since(now), kind);
            (result, answered)
        }
    }

    fn unanswered(&self, verb: &'static str, within: Duration) -> StoreError {
        let store = &self.0.store;
        // A run has its turn already, and does not wait for one to end.
        let holdup = store.holdup().filter(|_| verb == "claim");
        let silence = NoAnswer { within, limit: CALL_LIMIT, holdup };
        StoreError::new(StoreErrorKind::OutcomeUnknown, store.name(), verb).with_source(silence)
    }

    fn register(&self, execution: &Execution, since: Instant) -> Registered {
        let id = self.0.next_run.fetch_add(1, Ordering::Relaxed);
        let run = Running { execution: execution.clone(), since };
        let mut running = self.running();
        let is_oldest = running.is_empty();
        running.insert(id, run);
        drop(running);
        if is_oldest {
            observe::oldest(Some(Duration::ZERO));
        }
        Registered { engine: self.clone(), id }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("store", &self.0.store)
            .field("running", &self.running().len())
            .field("closing", &self.0.closing.is_given())
            .finish_non_exhaustive()
    }
}

/// Removes a run from the register when it is over.
struct Registered {
    engine: Engine,
    id: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut running = self.engine.running();
        let was_oldest = running.first_key_value().is_some_and(|(&id, _)| id == self.id);
        running.remove(&self.id);
        drop(running);
        if was_oldest {
            self.engine.refresh_gauges();
        }
    }
}

impl<T> Conclusion<T> {
    fn refused(rejection: impl Into<Rejection>) -> Self {
        Self::Refused(rejection.into())
    }

    fn replay(encoded: Bytes) -> Self {
        Self::stored(encoded, Self::Replay)
    }

    fn reconciled(encoded: Bytes) -> Self {
        Self::stored(encoded, Self::Reconciled)
    }

    fn stored(encoded: Bytes, conclusion: fn(Box<StoredResponse>) -> Self) -> Self {
        match StoredResponse::decode(encoded) {
            Ok(response) => conclusion(Box::new(response)),
            Err(error) => {
                tracing::error!(%error, "a stored response cannot be read");
                Self::refused(unreadable())
            }
        }
    }

    fn tell(&self, call: &Call, elapsed: Duration) {
        let seen = match self {
            Self::Ran(_, seen) => *seen,
            Self::NotStored(_) => Seen::NotStored,
            Self::Unprotected(_) => Seen::Unprotected,
            // Done, and the one who asks gets no answer: no replay, in the eyes of whoever counts. (What is
            // only watched never keeps a body.)
            Self::Replay(stored)
                if *stored.body() == StoredBody::NotKept
                    && call.policy.enforcement == Enforcement::Enforce =>
            {
                let (status, location) = (stored.status(), None);
                let kind = RejectionKind::ResultUnavailable { status, location };
                return observe::concluded(&kind, call.storage_key, elapsed);
            }
            Self::Replay(_) => Seen::Replayed,
            Self::Reconciled(_) => Seen::Reconciled,
            Self::Refused(rejection) => {
                return match call.policy.enforcement {
                    Enforcement::Enforce => {
                        observe::concluded(rejection.kind(), call.storage_key, elapsed);
                    }
                    Enforcement::Shadow => observe::shadowed(rejection.kind()),
                };
            }
        };
        match call.policy.enforcement {
            Enforcement::Enforce => observe::seen(seen, call.storage_key, elapsed),
            Enforcement::Shadow => observe::shadow_seen(seen),
        }
    }
}

impl From<RejectionKind> for Rejection {
    fn from(kind: RejectionKind) -> Self {
        Self::new(kind)
    }
}

fn unavailable() -> Rejection {
    Rejection::new(RejectionKind::StoreUnavailable).with_retry_after(RETRY_AFTER_UNAVAILABLE)
}

/// It runs, here or elsewhere, and `remaining` is when it makes sense to come back.
fn in_use(remaining: Duration) -> Rejection {
    Rejection::new(RejectionKind::KeyInUse).with_retry_after(remaining)
}

fn unreadable() -> Rejection {
    Rejection::new(RejectionKind::RecordUnreadable).with_retry_after(RETRY_AFTER_UNAVAILABLE)
}

/// The lease of a claim that was never confirmed, as far as it is known: enough to give it up.
fn unconfirmed(call: &Call, claim: &Claim) -> Lease {
    let grant = Grant {
        attempt: Attempt::FIRST,
        fence: Fence::from_number(0),
        created: Millis(0),
        takeover: false,
        checkpoint: Bytes::new(),
    };
    Lease::new(call.storage_key, claim, grant)
}

/// The pause after the given number of tries, between half of it and all of it.
fn pause(tries: u32) -> Duration {
    let index = (tries.saturating_sub(1) as usize).min(PAUSES.len() - 1);
    let mut random = [0; 1];
    // Without randomness the pauses are equal, which is no reason to fail.
    let _ = getrandom::fill(&mut random);
    PAUSES[index] * (256 + u32::from(random[0])) / 512
}
