//! Claiming a key: sent again until its outcome is known, waiting for a running twin, asking what
//! became of an interrupted one.

use bytes::Bytes;
use tokio::time::{Instant, sleep};

use super::observe::Waiting;
use super::reconcile::Answered;
use super::wait::{Claiming, Seat, Stored, Woken};
use super::{
    Call, Conclusion, Engine, RETRY_AFTER_UNAVAILABLE, in_use, observe, pause, unavailable,
    unreadable,
};
use crate::config::{Enforcement, Policy, Recovery};
use crate::error::{Rejection, RejectionKind, StoreError, StoreErrorKind};
use crate::fingerprint::Comparison;
use crate::mistakes::{Mistake, made};
use crate::record::{Claim, ClaimOutcome, Unsettled};
use crate::scope::StorageKey;
use crate::store::{Lease, StoreFuture};
use crate::token::HolderId;

/// A claim that the store certainly refused is sent this often: a restart or a dropped connection
/// is over by then, and a store that is down is reported quickly.
const UNAVAILABLE_TRIES: u32 = 3;
/// How often one request asks what became of interrupted attempts: once, and once more if somebody
/// else took the key in between and was interrupted too.
const INQUIRIES_MAX: u32 = 2;

/// What was before a claim.
#[derive(Default)]
pub(super) enum Before {
    /// Nothing that matters to it.
    #[default]
    Nothing,
    /// Nobody had the key here at that moment: others wait for what comes of the claim.
    First(Claiming, Instant),
    /// It waited for a twin of this process, which did not answer it, and keeps its seat.
    Waited(Seated),
    /// So it did, and that one was told that the same request runs elsewhere.
    Elsewhere(Seated),
}

/// A seat that is taken, counted.
pub(super) struct Seated {
    pub(super) seat: Seat,
    pub(super) _waiting: Waiting,
}

impl Seated {
    pub(super) fn on(seat: Seat, policy: &Policy) -> Self {
        if policy.enforcement == Enforcement::Shadow {
            observe::shadow_waits();
        }
        Self { seat, _waiting: Waiting::begin() }
    }
}

impl Before {
    fn seat(&mut self) -> Option<&mut Seat> {
        match self {
            Self::Waited(seated) | Self::Elsewhere(seated) => Some(&mut seated.seat),
            Self::Nothing | Self::First(..) => None,
        }
    }

    /// Its seat, if it is to wait before it claims. That is asked once.
    fn seat_elsewhere(&mut self) -> Option<&mut Seat> {
        let Self::Elsewhere(..) = self else { return None };
        if let Self::Elsewhere(seated) = std::mem::take(self) {
            *self = Self::Waited(seated);
        }
        self.seat()
    }

    /// Whoever waits for what comes of this claim, which is told once.
    fn take_claiming(&mut self) -> Option<Claiming> {
        let Self::First(..) = self else { return None };
        let Self::First(claiming, _) = std::mem::take(self) else { return None };
        Some(claiming)
    }
}

/// A lease, when it was asked for, and when it came.
pub(super) struct Held {
    pub(super) lease: Lease,
    pub(super) since: Instant,
    pub(super) granted: Instant,
    /// Whoever came meanwhile waits for what comes of it.
    pub(super) claiming: Option<Claiming>,
}

/// How claiming ended without a lease.
pub(super) enum Unclaimed<T> {
    StoreDown {
        claim: Box<Claim>,
        /// It may have reached the store.
        in_doubt: bool,
    },
    Concluded(Conclusion<T>),
}

impl<T> Unclaimed<T> {
    fn refused<H>(rejection: impl Into<Rejection>) -> Result<H, Self> {
        Err(Self::Concluded(Conclusion::refused(rejection)))
    }
}

/// What came of a call that was sent until its outcome was known.
pub(super) struct Reply<T> {
    pub(super) outcome: Result<T, StoreError>,
    pub(super) at: Instant,
    /// A call whose outcome is not known any more may have reached the store.
    pub(super) in_doubt: bool,
}

/// True if what a twin stored answers this very request.
pub(super) fn is_for(call: &Call, stored: &Stored) -> bool {
    call.fingerprints.compare(stored.fingerprint) == Comparison::Same
}

/// With several, nobody here knows by which of them the store found the request to be the same, and twins that are the
/// same by one may differ by another.
fn has_one_recipe(call: &Call) -> bool {
    call.fingerprints.as_slice().len() == 1
}

/// A replay; or what this request found out, if `found` is what the key has now. Whoever waits for the claim is told.
fn concluded<T>(
    call: &Call,
    claiming: Option<Claiming>,
    response: Bytes,
    found: Option<&Bytes>,
) -> Conclusion<T> {
    if let Some(claiming) = claiming.filter(|_| has_one_recipe(call)) {
        let fingerprint = call.fingerprints.current();
        claiming.stored(Stored { fingerprint, response: response.clone() });
    }
    match found == Some(&response) {
        true => Conclusion::reconciled(response),
        false => Conclusion::replay(response),
    }
}

/// What came of sitting down.
enum Sat<T> {
    /// It is time to claim.
    Claims,
    Answered(Conclusion<T>),
    /// A shutdown has begun, or nobody waits for the answer.
    Leaves,
}

/// What is known when the answer to a claim is looked at.
struct Progress {
    /// The last answer found by asking, if it was this request that asked.
    found: Option<Bytes>,
    inquiries: u32,
}

/// A claim that was sent, and what it needs to be sent again.
struct Sent<'a> {
    claim: Claim,
    wait_until: Instant,
    before: &'a mut Before,
    since: Instant,
}

impl Engine {
    /// Claims the key, waiting for a running twin within the policy's bound from `at` on.
    ///
    /// Nearly all keys are new or have their answer, which one call says. So that is all that stands here, and whatever
    /// else may happen has a future of its own, in a box.
    #[expect(
        clippy::manual_async_fn,
        reason = "an async fn keeps all it is given twice, and every request has this"
    )]
    pub(super) fn claim<'a, T: Send>(
        &'a self,
        call: &'a Call,
        at: Instant,
        before: &'a mut Before,
    ) -> impl Future<Output = Result<Held, Unclaimed<T>>> + Send + use<'a, T> {
        async move {
            let policy = &*call.policy;
            let claim = call.claim();
            let since = match before {
                Before::First(_, since) => *since,
                Before::Waited(..) | Before::Elsewhere(..) => Instant::now(),
                Before::Nothing => at,
            };
            let waits = matches!(before, Before::Elsewhere(..));
            if waits || made(Mistake::FreshHolder) {
                let sent = Sent { claim, wait_until: at + policy.wait, before, since };
                return Box::pin(self.claim_on(call, sent, None)).await;
            }
            let bound = policy.store_call.min(policy.claim_within);
            let asked = self.0.store.claim(call.storage_key, &claim);
            let (outcome, granted) = self.timed("claim", since, bound, asked).await;
            if let Ok(outcome) = &outcome {
                observe::claimed(outcome);
            }
            match outcome {
                Ok(ClaimOutcome::Acquired(lease)) if before.seat().is_none() => {
                    Ok(Held { lease, since, granted, claiming: before.take_claiming() })
                }
                Ok(ClaimOutcome::Completed(response)) if before.seat().is_none() => {
                    let conclusion = concluded(call, before.take_claiming(), response, None);
                    Err(Unclaimed::Concluded(conclusion))
                }
                outcome => {
                    let sent = Sent { claim, wait_until: at + policy.wait, before, since };
                    Box::pin(self.claim_on(call, sent, Some((outcome, granted)))).await
                }
            }
        }
    }

    /// Goes on with a claim, and with what the store said first if it was asked.
    async fn claim_on<T>(
        &self,
        call: &Call,
        sent: Sent<'_>,
        mut said: Option<(Result<ClaimOutcome<Lease>, StoreError>, Instant)>,
    ) -> Result<Held, Unclaimed<T>> {
        let policy = &call.policy;
        let Sent { claim, wait_until, before, mut since } = sent;
        let mut progress = Progress { found: None, inquiries: 0 };
        let mut in_doubt = false;
        loop {
            if let Some(seat) = before.seat_elsewhere() {
                match self.sit(call, seat, wait_until).await {
                    Sat::Claims => {}
                    Sat::Answered(conclusion) => return Err(Unclaimed::Concluded(conclusion)),
                    // What is left of the lease is for the store to say.
                    Sat::Leaves => return Unclaimed::refused(in_use(RETRY_AFTER_UNAVAILABLE)),
                }
                since = Instant::now();
            }
            let Reply { outcome, at: granted, in_doubt: doubtful } =
                self.claim_surely(call.storage_key, &claim, policy, since, said.take()).await;
            in_doubt |= doubtful;
            let claiming = before.take_claiming();
            if let (Some(seat), false) =
                (before.seat(), matches!(outcome, Ok(ClaimOutcome::InFlight { .. })))
            {
                Seat::wake_others(seat);
            }
            let remaining = match outcome {
                Err(_) => return Err(Unclaimed::StoreDown { claim: Box::new(claim), in_doubt }),
                Ok(ClaimOutcome::Acquired(lease)) => {
                    return Ok(Held { lease, since, granted, claiming });
                }
                Ok(ClaimOutcome::InFlight { remaining }) => {
                    if let Some(claiming) = claiming.filter(|_| has_one_recipe(call)) {
                        claiming.elsewhere();
                    }
                    remaining
                }
                Ok(ClaimOutcome::Completed(response)) => {
                    let conclusion = concluded(call, claiming, response, progress.found.as_ref());
                    return Err(Unclaimed::Concluded(conclusion));
                }
                Ok(ClaimOutcome::Mismatch) => return Unclaimed::refused(RejectionKind::KeyReused),
                Ok(ClaimOutcome::Indeterminate(unsettled)) => {
                    drop(claiming);
                    match Box::pin(self.inquire(call, unsettled, &mut progress)).await {
                        Ok(()) => {
                            since = Instant::now();
                            continue;
                        }
                        Err(rejection) => return Unclaimed::refused(rejection),
                    }
                }
                Ok(ClaimOutcome::Unreadable) => {
                    tracing::error!(
                        key = %call.storage_key.in_logs(),
                        store = self.0.store.name(),
                        "a record cannot be read, or was made by a recipe that is not accepted"
                    );
                    return Unclaimed::refused(unreadable());
                }
            };
            if Instant::now() >= wait_until || self.0.closing.is_given() {
                return Unclaimed::refused(in_use(remaining));
            }
            if before.seat().is_none()
                && let Some(seat) = self.0.room.take_seat(call.storage_key)
            {
                *before = Before::Waited(Seated::on(seat, policy));
            }
            let Some(seat) = before.seat() else {
                return Unclaimed::refused(
                    Rejection::new(RejectionKind::TooManyWaiting).with_retry_after(remaining),
                );
            };
            match self.sit(call, seat, wait_until).await {
                Sat::Claims => {}
                Sat::Answered(conclusion) => return Err(Unclaimed::Concluded(conclusion)),
                Sat::Leaves => return Unclaimed::refused(in_use(remaining)),
            }
            since = Instant::now();
        }
    }

    /// Waits for a twin, wherever it runs.
    async fn sit<T>(&self, call: &Call, seat: &mut Seat, until: Instant) -> Sat<T> {
        tokio::select! {
            biased;
            // Also when the time is up: only the store knows what is left of the lease by now.
            woken = seat.wait(until) => match woken {
                // The store said that the request was the same as the one in flight. Whether that
                // was the one that has ended is for the fingerprint to say.
                Woken::Stored(stored) if is_for(call, &stored) => {
                    Sat::Answered(Conclusion::replay(stored.response))
                }
                Woken::Stored(_)
                | Woken::Ended
                | Woken::Elsewhere
                | Woken::ClaimAgain
                | Woken::TimedOut => Sat::Claims,
            },
            () = self.0.closing.given() => Sat::Leaves,
            // Nobody waits for this answer any more, and nothing of ours is running.
            () = call.departure.notified() => Sat::Leaves,
        }
    }

    /// Asks the route's hook about an interrupted attempt, if there is one: `Ok` if it is worth
    /// claiming again.
    async fn inquire(
        &self,
        call: &Call,
        unsettled: Unsettled,
        progress: &mut Progress,
    ) -> Result<(), Rejection> {
        let Recovery::Reconcile(hook) = &call.policy.recovery else {
            return Err(RejectionKind::OutcomeUnknown.into());
        };
        if progress.inquiries >= INQUIRIES_MAX {
            return Err(RejectionKind::OutcomeUnknown.into());
        }
        progress.inquiries += 1;
        match self.reconcile(call, hook, unsettled).await {
            Answered::Settled(found) => progress.found = found,
            Answered::StillUnknown => return Err(RejectionKind::OutcomeUnknown.into()),
            Answered::Unreadable => return Err(unreadable()),
            Answered::StoreDown => return Err(unavailable()),
        }
        Ok(())
    }

    /// Sends a claim, and again under the same holder id until its outcome is known. `said`: what the store said when it
    /// was sent first, if it was.
    async fn claim_surely(
        &self,
        key: StorageKey,
        claim: &Claim,
        policy: &Policy,
        now: Instant,
        said: Option<(Result<ClaimOutcome<Lease>, StoreError>, Instant)>,
    ) -> Reply<ClaimOutcome<Lease>> {
        let call = || match made(Mistake::FreshHolder) {
            true => Box::pin(async move {
                let claim = Claim { holder: HolderId::random(), ..*claim };
                self.0.store.claim(key, &claim).await
            }),
            false => self.0.store.claim(key, claim),
        };
        let is_counted = matches!(said, Some((Ok(_), _)));
        let reply = self.surely_after(said, "claim", key, policy, now, call).await;
        if let (Ok(outcome), false) = (&reply.outcome, is_counted) {
            observe::claimed(outcome);
        }
        reply
    }

    /// Makes a call to the store now, and again until its outcome is known, at most for
    /// [`claim_within`](crate::ConfigBuilder::claim_within).
    pub(super) async fn surely<'a, T>(
        &self,
        verb: &'static str,
        key: StorageKey,
        policy: &Policy,
        now: Instant,
        call: impl Fn() -> StoreFuture<'a, T>,
    ) -> Reply<T> {
        self.surely_after(None, verb, key, policy, now, call).await
    }

    /// The same where the first call was made already, at this moment.
    async fn surely_after<'a, T>(
        &self,
        mut said: Option<(Result<T, StoreError>, Instant)>,
        verb: &'static str,
        key: StorageKey,
        policy: &Policy,
        mut now: Instant,
        call: impl Fn() -> StoreFuture<'a, T>,
    ) -> Reply<T> {
        let deadline = now + policy.claim_within;
        let (mut tries, mut in_doubt, mut before) = (0, false, None);
        loop {
            let bound = policy.store_call.min(deadline.saturating_duration_since(now));
            let (outcome, answered) = match said.take() {
                Some(said) => said,
                None => self.timed(verb, now, bound, call()).await,
            };
            let error = match outcome {
                Ok(outcome) => return Reply { outcome: Ok(outcome), at: answered, in_doubt },
                Err(error) => error,
            };
            tries += 1;
            // Of the others a store may have done a part before it refused.
            in_doubt |=
                !matches!(error.kind(), StoreErrorKind::Unavailable | StoreErrorKind::RolledBack);
            let again = match error.kind() {
                StoreErrorKind::OutcomeUnknown => true,
                StoreErrorKind::Unavailable | StoreErrorKind::RolledBack => {
                    tries < UNAVAILABLE_TRIES
                }
                StoreErrorKind::Full | StoreErrorKind::Backend => false,
            };
            let pause = pause(tries);
            if !again || answered + pause >= deadline {
                // A last try may have had no time left to fail of itself; the one before it says more.
                let telling =
                    before.as_ref().filter(|_| bound < policy.store_call).unwrap_or(&error);
                tracing::error!(key = %key.in_logs(), verb, tries, error = %telling.in_full(), "the store does not do what it is asked");
                return Reply { outcome: Err(error), at: answered, in_doubt };
            }
            observe::call_again(verb);
            before = Some(error);
            sleep(pause).await;
            now = Instant::now();
        }
    }
}
