//! The protocol as a pure function: what each verb does to each state of a record.
//!
//! Nothing here does I/O or reads a clock: the record and the store's time come in, the change and
//! the outcome go out. The memory store runs this code, and the Lua scripts are compared with it
//! operation by operation.
//!
//! ```text
//!                    claim                    complete
//!        Absent ───────────────▶ InFlight ───────────────▶ Completed
//!                                 │    │  ▲
//!            release(no effect)   │    │  │ claim (attempt + 1)
//!                                 ▼    │  │
//!                               Open ──┼──┘
//!                                 ▲    │ lease over, or release(unknown)
//!                  resolve(open)  │    ▼
//!                                 └─ Indeterminate ── complete (late, by the last holder) or
//!                                                     resolve(completed) ──▶ Completed
//! ```
//! An operator may also [`forget`] any record under which nobody runs: its key is Absent again; and
//! [`amend`] an answer that nobody can read.
//!
//! Two times, never one: the **lease** is a field compared with the store's clock, **retention** is
//! how long the store keeps a record. What survives the end of a lease is everything, above all the
//! fingerprint and the holder.

mod codec;
#[cfg(any(feature = "redis", feature = "postgres", feature = "sqlite"))]
mod first;
mod sighting;
#[cfg(test)]
mod tests;
mod verbs;

use std::time::Duration;

use bytes::Bytes;

pub use codec::{Current, HEADER_LENGTH, Unreadable};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) use first::first_kept;
#[cfg(any(feature = "redis", feature = "postgres", feature = "sqlite"))]
pub(crate) use first::written_out;
#[cfg(feature = "redis")]
pub(crate) use first::{NEAR, completed_head, first, is_first, is_near};
pub use sighting::{
    Amend, Forget, ForgetOutcome, MARK_LENGTH, Seen, Sighting, Standing, amend, forget,
};
pub use verbs::*;

use crate::fingerprint::{Comparison, Fingerprint};
use crate::mistakes::{Mistake, made};
use crate::token::{Attempt, Fence, HolderId};

/// A moment on the store's clock, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
#[expect(clippy::exhaustive_structs, reason = "a number with a unit")]
pub struct Millis(pub u64);

impl Millis {
    /// The moment `duration` later, rounded up to a whole millisecond.
    #[must_use]
    pub fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(millis(duration)))
    }

    /// How long it is from `earlier` until this moment; nothing if it is not later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

/// Whole milliseconds, rounded up, so that no wait is shorter than asked for.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// How long things last.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate are handed it in tests")]
pub struct Terms {
    /// How long a claim holds without being renewed.
    pub lease: Duration,
    /// How long a completed or open record is kept, from that change.
    pub retention: Duration,
    /// How long a record without a known outcome is kept, from the end of its lease.
    pub unknown_retention: Duration,
}

/// What may happen to a key whose lease ran out, or whose outcome is unknown.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum OnExpired {
    /// Nothing runs: the outcome is unknown until it is settled.
    Refuse,
    /// The handler runs again.
    Reexecute,
}

/// Where in a handler effects may happen.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Effects {
    /// Anywhere: an attempt that dies may have had its effect.
    #[default]
    Anywhere,
    /// Only behind a checkpoint: an attempt that dies before its first one has done nothing, and
    /// its key is free again. **The handler must not touch anything before
    /// [`Execution::checkpoint`](crate::Execution::checkpoint) has succeeded.**
    Marked,
}

/// How far an attempt in flight may have come.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "an effect may have happened, or not")]
pub enum Progress {
    /// Nothing has happened: its effects are [marked](Effects::Marked), and none was.
    Untouched,
    /// The effect may have happened.
    MayHaveActed,
}

/// Everything a store keeps under one storage key.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "the format is versioned by its codec")]
pub struct Record {
    /// The digest of the request that the record is about, and its recipe.
    pub fingerprint: Fingerprint,
    /// The last holder; [`HolderId::NOBODY`] once an outcome was settled from outside.
    pub holder: HolderId,
    /// Which run this is.
    pub attempt: Attempt,
    /// The fence of that run.
    pub fence: Fence,
    /// When the first claim was made.
    pub created: Millis,
    /// What a handler noted down on its way; a later attempt reads it.
    pub checkpoint: Bytes,
    /// Where the record stands.
    pub state: State,
}

/// Where a record stands.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "a new state must break every match")]
pub enum State {
    /// Claimed; its holder may be alive.
    InFlight {
        /// When the lease ends.
        until: Millis,
        /// How long it was granted for.
        lease: Duration,
        /// How far its holder may have come.
        progress: Progress,
    },
    /// Its holder said that nothing happened: the key is free again.
    Open {
        /// When it said so.
        since: Millis,
    },
    /// The effect may have happened.
    Indeterminate {
        /// When that was found.
        since: Millis,
    },
    /// There is an answer.
    Completed {
        /// When it was stored.
        at: Millis,
        /// The encoded [`StoredResponse`](crate::StoredResponse).
        response: Bytes,
    },
}

/// A change of the record and the outcome that is told.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "there is nothing else a verb can do")]
pub struct Step<T> {
    /// What is written.
    pub change: Change,
    /// What is told.
    pub outcome: T,
}

/// What a verb writes.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "there is nothing else a verb can do")]
pub enum Change {
    /// Nothing.
    Keep,
    /// This record, kept until the given moment.
    Write {
        /// The record.
        record: Box<Record>,
        /// When the store may forget it.
        expires: Expires,
    },
    /// The record goes. Only [`forget`] asks for this.
    Remove,
}

/// When the store may forget a record.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "there is nothing else a verb can ask for")]
pub enum Expires {
    /// At this moment.
    At(Millis),
    /// When it was going to anyway.
    AsBefore,
}

fn keep<T>(outcome: T) -> Step<T> {
    Step { change: Change::Keep, outcome }
}

fn write<T>(record: Record, expires: Expires, outcome: T) -> Step<T> {
    Step { change: Change::Write { record: Box::new(record), expires }, outcome }
}

impl Terms {
    /// When a record in flight may be forgotten: long after its lease, so that a crash that nobody
    /// retries for a day is still known.
    fn forget_in_flight(&self, now: Millis) -> Expires {
        if made(Mistake::OneTime) {
            return Expires::At(now.after(self.lease));
        }
        Expires::At(now.after(self.lease).after(self.unknown_retention))
    }

    fn forget_settled(&self, now: Millis) -> Expires {
        Expires::At(now.after(self.retention))
    }

    fn in_flight(&self, now: Millis, progress: Progress) -> State {
        State::InFlight { until: now.after(self.lease), lease: self.lease, progress }
    }
}

impl Record {
    fn is_held_by(&self, holder: HolderId) -> bool {
        self.holder == holder
    }
}

/// True if a lease does not hold any more.
///
/// A deadline that is more than two leases away was written before the clock went back; it counts
/// as over, so that a key is never stuck for as long as the clock went back.
fn lease_is_over(now: Millis, until: Millis, lease: Duration) -> bool {
    now >= until || until.since(now) > lease.saturating_mul(2)
}

/// Tries to become the one who runs the handler.
#[must_use]
pub fn claim(current: Current, now: Millis, claim: &Claim) -> Step<ClaimOutcome<Grant>> {
    let record = match current {
        Current::Absent => return grant_first(now, claim),
        Current::Unreadable(_) if made(Mistake::UnreadableIsAbsent) => {
            return grant_first(now, claim);
        }
        Current::Unreadable(_) => return keep(ClaimOutcome::Unreadable),
        Current::Present(record) => record,
    };
    let unjudged =
        made(Mistake::StateBeforeRequest) && matches!(record.state, State::InFlight { .. });
    if !matches!(record.state, State::Open { .. }) && !unjudged {
        match claim.fingerprints.compare(record.fingerprint) {
            Comparison::Same => {}
            Comparison::Different => return keep(ClaimOutcome::Mismatch),
            Comparison::UnknownRecipe => return keep(ClaimOutcome::Unreadable),
        }
    }
    let mine = record.is_held_by(claim.holder);
    match record.state {
        State::InFlight { progress, .. } if mine => grant_again(record, now, claim, progress),
        State::InFlight { until, lease, .. } if !lease_is_over(now, until, lease) => {
            keep(ClaimOutcome::InFlight { remaining: until.since(now) })
        }
        // It died before it did anything: the key is as free as after its own word.
        State::InFlight { progress: Progress::Untouched, .. } => {
            grant_next(record, now, claim, false)
        }
        State::InFlight { progress: Progress::MayHaveActed, .. } => match claim.on_expired {
            OnExpired::Refuse => {
                let unsettled = Unsettled::of(&record);
                let record = Record { state: State::Indeterminate { since: now }, ..record };
                write(record, Expires::AsBefore, ClaimOutcome::Indeterminate(unsettled))
            }
            OnExpired::Reexecute => grant_next(record, now, claim, true),
        },
        // A claim that arrives after its own sender gave the key up has nobody behind it.
        State::Open { .. } if mine => keep(ClaimOutcome::InFlight { remaining: Duration::ZERO }),
        State::Open { .. } => grant_next(record, now, claim, false),
        State::Indeterminate { .. } => match claim.on_expired {
            OnExpired::Refuse => keep(ClaimOutcome::Indeterminate(Unsettled::of(&record))),
            OnExpired::Reexecute => grant_next(record, now, claim, true),
        },
        State::Completed { response, .. } => keep(ClaimOutcome::Completed(response)),
    }
}

impl Unsettled {
    fn of(record: &Record) -> Self {
        let Record { holder, attempt, fence, .. } = *record;
        Self { holder, attempt, fence, checkpoint: record.checkpoint.clone() }
    }
}

impl Effects {
    fn at_start(self) -> Progress {
        match self {
            Self::Anywhere => Progress::MayHaveActed,
            Self::Marked => Progress::Untouched,
        }
    }
}

fn grant_first(now: Millis, claim: &Claim) -> Step<ClaimOutcome<Grant>> {
    let Grant { attempt, fence, created, checkpoint, .. } = Grant::first(now);
    let state = claim.terms.in_flight(now, claim.effects.at_start());
    let (fingerprint, holder) = (claim.fingerprints.current(), claim.holder);
    let record = Record { fingerprint, holder, attempt, fence, created, checkpoint, state };
    grant(record, now, claim, false)
}

fn grant_again(
    record: Record,
    now: Millis,
    claim: &Claim,
    progress: Progress,
) -> Step<ClaimOutcome<Grant>> {
    // The record does not say what the first reply said. Calling a free run a takeover costs the
    // handler a look; the other way round costs a second effect.
    let takeover = record.attempt > Attempt::FIRST;
    let record = Record { state: claim.terms.in_flight(now, progress), ..record };
    grant(record, now, claim, takeover)
}

fn grant_next(
    record: Record,
    now: Millis,
    claim: &Claim,
    takeover: bool,
) -> Step<ClaimOutcome<Grant>> {
    // What an earlier attempt may have done is not undone by one that has not begun.
    let may_have = takeover && !made(Mistake::TakeoverIsUntouched);
    let progress = if may_have { Progress::MayHaveActed } else { claim.effects.at_start() };
    let fence = record.fence.number().saturating_add(1).max(now.0).min(Fence::MAX.number());
    let record = Record {
        fingerprint: claim.fingerprints.current(),
        holder: claim.holder,
        attempt: record.attempt.next(),
        fence: Fence::from_number(fence),
        state: claim.terms.in_flight(now, progress),
        ..record
    };
    grant(record, now, claim, takeover)
}

fn grant(record: Record, now: Millis, claim: &Claim, takeover: bool) -> Step<ClaimOutcome<Grant>> {
    let grant = Grant {
        attempt: record.attempt,
        fence: record.fence,
        created: record.created,
        takeover,
        checkpoint: record.checkpoint.clone(),
    };
    write(record, claim.terms.forget_in_flight(now), ClaimOutcome::Acquired(grant))
}

/// Extends a lease, and writes a checkpoint if one is given.
#[must_use]
pub fn renew(
    current: Current,
    now: Millis,
    owner: &Owner,
    renewal: &Renewal,
) -> Step<RenewOutcome> {
    let terms = &renewal.terms;
    let (record, outcome) = match current {
        Current::Absent => {
            // Whether it has acted is lost with the record.
            let state = terms.in_flight(now, Progress::MayHaveActed);
            (owner.lost_record(state), RenewOutcome::Restored)
        }
        Current::Unreadable(_) => return keep(RenewOutcome::Unreadable),
        Current::Present(record) => match record.state {
            State::InFlight { progress, .. } if record.is_held_by(owner.holder) => {
                // What follows a checkpoint may be the effect.
                let progress = match renewal.checkpoint {
                    Some(_) => Progress::MayHaveActed,
                    None => progress,
                };
                (Record { state: terms.in_flight(now, progress), ..record }, RenewOutcome::Renewed)
            }
            State::InFlight { .. }
            | State::Open { .. }
            | State::Indeterminate { .. }
            | State::Completed { .. } => return keep(RenewOutcome::Lost),
        },
    };
    let checkpoint = renewal.checkpoint.clone().unwrap_or_else(|| record.checkpoint.clone());
    write(Record { checkpoint, ..record }, terms.forget_in_flight(now), outcome)
}

impl Owner {
    /// The record of this owner, as far as it can be known after the store lost it.
    fn lost_record(&self, state: State) -> Record {
        Record {
            fingerprint: self.fingerprints.current(),
            holder: self.holder,
            attempt: self.attempt,
            fence: self.fence,
            created: self.created,
            checkpoint: Bytes::new(),
            state,
        }
    }
}

/// Stores the response.
#[must_use]
pub fn complete(
    current: Current,
    now: Millis,
    owner: &Owner,
    completion: &Completion,
) -> Step<CompleteOutcome> {
    let state = State::Completed { at: now, response: completion.response.clone() };
    let record = match current {
        Current::Absent => {
            let expires = completion.terms.forget_settled(now);
            return write(owner.lost_record(state), expires, CompleteOutcome::Restored);
        }
        Current::Unreadable(_) => return keep(CompleteOutcome::Unreadable),
        Current::Present(record) => record,
    };
    if made(Mistake::CompleteByAnybody) {
        let record = Record { state, holder: owner.holder, ..record };
        return write(record, completion.terms.forget_settled(now), CompleteOutcome::Stored);
    }
    let mine = record.is_held_by(owner.holder);
    let outcome = match &record.state {
        State::InFlight { .. } if mine => CompleteOutcome::Stored,
        State::Indeterminate { .. } if mine => CompleteOutcome::Healed,
        State::Completed { response, .. } if mine => {
            let same = *response == completion.response;
            return keep(if same { CompleteOutcome::Stored } else { CompleteOutcome::Lost });
        }
        State::Completed { response, .. } => {
            return keep(match owner.fingerprints.compare(record.fingerprint) {
                Comparison::Same => CompleteOutcome::Superseded(response.clone()),
                Comparison::Different if made(Mistake::LoserComparesNothing) => {
                    CompleteOutcome::Superseded(response.clone())
                }
                Comparison::Different | Comparison::UnknownRecipe => CompleteOutcome::Mismatch,
            });
        }
        State::InFlight { .. } | State::Open { .. } | State::Indeterminate { .. } => {
            return keep(CompleteOutcome::Lost);
        }
    };
    // A checkpoint is for a later attempt, and there will be none.
    let record = Record { state, checkpoint: Bytes::new(), ..record };
    write(record, completion.terms.forget_settled(now), outcome)
}

/// Gives a claim up.
#[must_use]
pub fn release(
    current: Current,
    now: Millis,
    owner: &Owner,
    release: &Release,
) -> Step<ReleaseOutcome> {
    let record = match current {
        Current::Absent => return keep(ReleaseOutcome::NotHeld),
        Current::Unreadable(_) => return keep(ReleaseOutcome::Unreadable),
        Current::Present(record) => record,
    };
    if made(Mistake::ReleaseByAnybody) {
        // A checkpoint is gone with what it marked.
        let checkpoint = Bytes::new();
        let record = Record { state: State::Open { since: now }, checkpoint, ..record };
        return write(record, release.terms.forget_settled(now), ReleaseOutcome::Released);
    }
    if !record.is_held_by(owner.holder) {
        return keep(ReleaseOutcome::NotHeld);
    }
    match (&record.state, release.verdict) {
        (State::InFlight { .. } | State::Indeterminate { .. }, Verdict::NoEffect) => {
            // A checkpoint is gone with what it marked.
            let checkpoint = Bytes::new();
            let record = Record { state: State::Open { since: now }, checkpoint, ..record };
            write(record, release.terms.forget_settled(now), ReleaseOutcome::Released)
        }
        (State::InFlight { .. }, Verdict::Unknown) => {
            let record = Record { state: State::Indeterminate { since: now }, ..record };
            write(record, Expires::AsBefore, ReleaseOutcome::Released)
        }
        (State::Open { .. }, Verdict::NoEffect)
        | (State::Indeterminate { .. }, Verdict::Unknown) => keep(ReleaseOutcome::Released),
        (State::Open { .. }, Verdict::Unknown) | (State::Completed { .. }, _) => {
            keep(ReleaseOutcome::NotHeld)
        }
    }
}

/// Settles an outcome that was unknown. The record must still be the one that was judged, and the
/// holder is cleared, so that a paused handler can no longer complete.
#[must_use]
pub fn resolve(current: Current, now: Millis, resolution: &Resolution) -> Step<ResolveOutcome> {
    let record = match current {
        Current::Absent => return keep(ResolveOutcome::Changed),
        Current::Unreadable(_) => return keep(ResolveOutcome::Unreadable),
        Current::Present(record) => record,
    };
    let anything = made(Mistake::ResolveAnything);
    if record.attempt != resolution.attempt && !anything {
        return keep(ResolveOutcome::Changed);
    }
    let unknown = match record.state {
        State::Indeterminate { .. } => true,
        // Unknown too, only that nobody has claimed it since.
        State::InFlight { until, lease, .. } => lease_is_over(now, until, lease),
        State::Open { .. } | State::Completed { .. } => false,
    };
    if unknown && record.is_held_by(resolution.holder) || anything {
        let state = match &resolution.finding {
            Finding::Happened(response) => State::Completed { at: now, response: response.clone() },
            Finding::NothingHappened => State::Open { since: now },
        };
        let unfenced = made(Mistake::ResolveUnfenced);
        let holder = if unfenced { record.holder } else { HolderId::NOBODY };
        let checkpoint = Bytes::new();
        let record = Record { state, checkpoint, holder, ..record };
        return write(record, resolution.terms.forget_settled(now), ResolveOutcome::Resolved);
    }
    // Settled from outside already, in the same way: this is the same resolution sent again.
    let again = record.is_held_by(HolderId::NOBODY)
        && match (&record.state, &resolution.finding) {
            (State::Completed { response, .. }, Finding::Happened(mine)) => response == mine,
            (State::Open { .. }, Finding::NothingHappened) => true,
            (
                State::InFlight { .. }
                | State::Open { .. }
                | State::Indeterminate { .. }
                | State::Completed { .. },
                _,
            ) => false,
        };
    keep(if again { ResolveOutcome::Resolved } else { ResolveOutcome::Changed })
}
