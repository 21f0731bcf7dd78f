//! What the verbs take and what they tell.

use std::time::Duration;

use bytes::Bytes;

use super::{Effects, Millis, OnExpired, Terms};
use crate::fingerprint::Fingerprints;
use crate::token::{Attempt, Fence, HolderId};

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
    /// Where in the handler effects may happen.
    pub effects: Effects,
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

impl Grant {
    /// What the first claim of a key is granted at this moment.
    #[must_use]
    pub fn first(now: Millis) -> Self {
        Self {
            attempt: Attempt::FIRST,
            fence: Fence::from_number(now.0.min(Fence::MAX.number())),
            created: now,
            takeover: false,
            checkpoint: Bytes::new(),
        }
    }
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
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate build it")]
pub struct Unsettled {
    /// Its holder.
    pub holder: HolderId,
    /// Its number.
    pub attempt: Attempt,
    /// Its fence: raise it at the resource before looking there.
    pub fence: Fence,
    /// What it noted down last; empty if nothing.
    pub checkpoint: Bytes,
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
