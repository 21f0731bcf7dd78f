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
//!
//! Two times, never one: the **lease** is a field compared with the store's clock, **retention** is
//! how long the store keeps a record. What survives the end of a lease is everything, above all the
//! fingerprint and the holder.

mod codec;
#[cfg(test)]
mod tests;

use std::time::Duration;

use bytes::Bytes;

pub use codec::{Current, HEADER_LENGTH, Unreadable};

use crate::fingerprint::{Comparison, Fingerprint, Fingerprints};
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

/// The plain part of a lease: who holds what.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate build it")]
pub struct Owner {
    /// Who holds the claim.
    pub holder: HolderId,
    /// The request's fingerprints.
    pub fingerprints: Fingerprints,
    /// Which run this is.
    pub attempt: Attempt,
    /// The fence of this run.
    pub fence: Fence,
    /// When the first claim was made.
    pub created: Millis,
}

/// Arguments of `claim`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate are handed it in tests")]
pub struct Claim {
    /// Who claims; the same over all repetitions of one claim.
    pub holder: HolderId,
    /// The request's fingerprints.
    pub fingerprints: Fingerprints,
    /// How long things last.
    pub terms: Terms,
    /// What may happen to a key whose lease ran out.
    pub on_expired: OnExpired,
}

/// What a granted claim gives.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate build it")]
pub struct Grant {
    /// Which run this is.
    pub attempt: Attempt,
    /// The fence of this run.
    pub fence: Fence,
    /// When the first claim was made.
    pub created: Millis,
    /// True if an earlier attempt may have had its effect. Also true for any later attempt whose
    /// first reply was lost, as the record does not keep which of the two it was.
    pub takeover: bool,
    /// What an earlier attempt noted down; empty if nothing.
    pub checkpoint: Bytes,
}

/// What came of a claim; `G` is what a granted one gives.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "a new outcome must break every match")]
pub enum ClaimOutcome<G> {
    /// The claim is granted: run the handler.
    Acquired(G),
    /// Another attempt is running.
    InFlight {
        /// What is left of its lease.
        remaining: Duration,
    },
    /// There is an answer: the encoded stored response.
    Completed(Bytes),
    /// The key was used with another request.
    Mismatch,
    /// The effect may have happened, and nothing may run.
    Indeterminate(Unsettled),
    /// The record cannot be read or compared, so nothing may run.
    Unreadable,
}

impl<G> ClaimOutcome<G> {
    /// The same outcome with another kind of grant.
    pub fn map<H>(self, grant: impl FnOnce(G) -> H) -> ClaimOutcome<H> {
        match self {
            Self::Acquired(given) => ClaimOutcome::Acquired(grant(given)),
            Self::InFlight { remaining } => ClaimOutcome::InFlight { remaining },
            Self::Completed(response) => ClaimOutcome::Completed(response),
            Self::Mismatch => ClaimOutcome::Mismatch,
            Self::Indeterminate(unsettled) => ClaimOutcome::Indeterminate(unsettled),
            Self::Unreadable => ClaimOutcome::Unreadable,
        }
    }
}

/// An attempt whose outcome nobody knows; what `resolve` has to name.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate build it")]
pub struct Unsettled {
    /// Its holder.
    pub holder: HolderId,
    /// Its number.
    pub attempt: Attempt,
    /// Its fence: raise it at the resource before looking there.
    pub fence: Fence,
}

/// Arguments of `renew`.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate are handed it in tests")]
pub struct Renewal {
    /// How long things last.
    pub terms: Terms,
    /// A new checkpoint, if there is one.
    pub checkpoint: Option<Bytes>,
}

/// What came of a renewal.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "a new outcome must break every match")]
pub enum RenewOutcome {
    /// The lease is extended.
    Renewed,
    /// The store had lost the record; it is written again.
    Restored,
    /// Somebody else holds the key, or it is settled.
    Lost,
    /// The record cannot be read.
    Unreadable,
}

/// Arguments of `complete`.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate are handed it in tests")]
pub struct Completion {
    /// How long things last.
    pub terms: Terms,
    /// The encoded stored response.
    pub response: Bytes,
    /// What becomes of the handler's writes, where the store holds them. This module, and every
    /// store that keeps nothing but records, does the same whatever it says.
    pub writes: Writes,
}

/// What an answer means for what the handler wrote through the store's transaction.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "there is no third thing to do with writes")]
pub enum Writes {
    /// They are committed together with the response.
    Keep,
    /// They are undone, and the response is stored: a refusal leaves no half of an operation.
    Undo,
    /// They are undone, nothing is stored, and the key is free: the operation may be tried again.
    RollBack,
}

/// What came of a completion.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "a new outcome must break every match")]
pub enum CompleteOutcome {
    /// The response is stored, now or by an earlier sending of the same completion.
    Stored,
    /// Stored, although the outcome had been declared unknown: nobody else ran, so it is the truth.
    Healed,
    /// The store had lost the record; it is written again, with the response.
    Restored,
    /// Another attempt at the same request was first; this is its response.
    Superseded(Bytes),
    /// The key holds the answer to another request.
    Mismatch,
    /// Somebody else holds the key, or it was settled.
    Lost,
    /// The record cannot be read.
    Unreadable,
    /// The store undid everything that the handler wrote through it, and the key is free. Only a
    /// store that holds the handler's transaction says this: because [`Writes::RollBack`] asked for
    /// it, or because the transaction cannot be committed as it is.
    RolledBack,
}

/// What a holder knows of its effect when it gives a claim up.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "there is no third thing to know")]
pub enum Verdict {
    /// Nothing happened: the key is free again, also for a corrected body.
    NoEffect,
    /// The effect may have happened.
    Unknown,
}

/// Arguments of `release`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate are handed it in tests")]
pub struct Release {
    /// How long things last.
    pub terms: Terms,
    /// What the holder knows.
    pub verdict: Verdict,
}

/// What came of a release.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "a new outcome must break every match")]
pub enum ReleaseOutcome {
    /// The claim is given up, now or by an earlier sending of the same release.
    Released,
    /// The claim was not held any more; nothing was changed.
    NotHeld,
    /// The record cannot be read.
    Unreadable,
    /// The store undid everything that the handler wrote through it, and the key is free, whatever
    /// the holder knew. Only a store that holds the handler's transaction says this.
    RolledBack,
}

/// Arguments of `resolve`: an outcome that somebody found out.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate are handed it in tests")]
pub struct Resolution {
    /// The holder whose outcome is unknown.
    pub holder: HolderId,
    /// Its attempt.
    pub attempt: Attempt,
    /// What happened.
    pub finding: Finding,
    /// How long things last.
    pub terms: Terms,
}

/// What an operator or a hook found out.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "there is no third thing to find")]
pub enum Finding {
    /// The effect happened; this encoded response answers for it.
    Happened(Bytes),
    /// Nothing happened, and the old attempt cannot act any more.
    NothingHappened,
}

/// What came of a resolution.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "a new outcome must break every match")]
pub enum ResolveOutcome {
    /// The outcome is settled, now or by an earlier sending of the same resolution.
    Resolved,
    /// The record is not in the state that was judged any more; nothing was changed.
    Changed,
    /// The record cannot be read.
    Unreadable,
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
        Expires::At(now.after(self.lease).after(self.unknown_retention))
    }

    fn forget_settled(&self, now: Millis) -> Expires {
        Expires::At(now.after(self.retention))
    }

    fn in_flight(&self, now: Millis) -> State {
        State::InFlight { until: now.after(self.lease), lease: self.lease }
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
        Current::Unreadable(_) => return keep(ClaimOutcome::Unreadable),
        Current::Present(record) => record,
    };
    if !matches!(record.state, State::Open { .. }) {
        match claim.fingerprints.compare(record.fingerprint) {
            Comparison::Same => {}
            Comparison::Different => return keep(ClaimOutcome::Mismatch),
            Comparison::UnknownRecipe => return keep(ClaimOutcome::Unreadable),
        }
    }
    let mine = record.is_held_by(claim.holder);
    match record.state {
        State::InFlight { .. } if mine => grant_again(record, now, claim),
        State::InFlight { until, lease } if !lease_is_over(now, until, lease) => {
            keep(ClaimOutcome::InFlight { remaining: until.since(now) })
        }
        State::InFlight { .. } => match claim.on_expired {
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
        Self { holder: record.holder, attempt: record.attempt, fence: record.fence }
    }
}

fn grant_first(now: Millis, claim: &Claim) -> Step<ClaimOutcome<Grant>> {
    let record = Record {
        fingerprint: claim.fingerprints.current(),
        holder: claim.holder,
        attempt: Attempt::FIRST,
        fence: Fence::from_number(now.0.min(Fence::MAX.number())),
        created: now,
        checkpoint: Bytes::new(),
        state: claim.terms.in_flight(now),
    };
    grant(record, now, claim, false)
}

fn grant_again(record: Record, now: Millis, claim: &Claim) -> Step<ClaimOutcome<Grant>> {
    // The record does not say what the first reply said. Calling a free run a takeover costs the
    // handler a look; the other way round costs a second effect.
    let takeover = record.attempt > Attempt::FIRST;
    let record = Record { state: claim.terms.in_flight(now), ..record };
    grant(record, now, claim, takeover)
}

fn grant_next(
    record: Record,
    now: Millis,
    claim: &Claim,
    takeover: bool,
) -> Step<ClaimOutcome<Grant>> {
    let fence = record.fence.number().saturating_add(1).max(now.0).min(Fence::MAX.number());
    let record = Record {
        fingerprint: claim.fingerprints.current(),
        holder: claim.holder,
        attempt: record.attempt.next(),
        fence: Fence::from_number(fence),
        state: claim.terms.in_flight(now),
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
        Current::Absent => (owner.lost_record(terms.in_flight(now)), RenewOutcome::Restored),
        Current::Unreadable(_) => return keep(RenewOutcome::Unreadable),
        Current::Present(record) => match record.state {
            State::InFlight { .. } if record.is_held_by(owner.holder) => {
                (Record { state: terms.in_flight(now), ..record }, RenewOutcome::Renewed)
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
    if !record.is_held_by(owner.holder) {
        return keep(ReleaseOutcome::NotHeld);
    }
    match (&record.state, release.verdict) {
        (State::InFlight { .. } | State::Indeterminate { .. }, Verdict::NoEffect) => {
            let record = Record { state: State::Open { since: now }, ..record };
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
    if record.attempt != resolution.attempt {
        return keep(ResolveOutcome::Changed);
    }
    let unknown = match record.state {
        State::Indeterminate { .. } => true,
        // Unknown too, only that nobody has claimed it since.
        State::InFlight { until, lease } => lease_is_over(now, until, lease),
        State::Open { .. } | State::Completed { .. } => false,
    };
    if unknown && record.is_held_by(resolution.holder) {
        let state = match &resolution.finding {
            Finding::Happened(response) => State::Completed { at: now, response: response.clone() },
            Finding::NothingHappened => State::Open { since: now },
        };
        let checkpoint = match &resolution.finding {
            Finding::Happened(_) => Bytes::new(),
            Finding::NothingHappened => record.checkpoint.clone(),
        };
        let record = Record { state, checkpoint, holder: HolderId::NOBODY, ..record };
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
