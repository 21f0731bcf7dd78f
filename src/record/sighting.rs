//! What somebody who only looks sees of a record, and `forget`, which takes what was seen.

use std::time::Duration;

use bytes::Bytes;

use super::codec::{COMPLETED, IN_FLIGHT, INDETERMINATE, OPEN, UNTOUCHED};
use super::{
    Change, Current, Millis, Progress, Record, ResolveOutcome, State, Step, Terms, Unreadable,
    keep, lease_is_over, write,
};
use crate::mistakes::{Mistake, made};
use crate::token::{Attempt, Fence, HolderId};

/// What the fixed header of a record says: enough to judge where it stands, nothing of its contents.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "it is the header of the versioned format")]
pub struct Sighting {
    /// Where it stands.
    pub standing: Standing,
    /// The last holder.
    pub holder: HolderId,
    /// Which run this is.
    pub attempt: Attempt,
    /// The fence of that run.
    pub fence: Fence,
    /// When the first claim was made.
    pub created: Millis,
    /// In flight: when the lease ends. Otherwise: since when it stands there.
    pub at: Millis,
    /// In flight: how long the lease was granted for.
    pub lease: Duration,
}

/// The states of a record, without what they hold.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "a new state must break every match")]
pub enum Standing {
    /// Claimed; its holder may be alive, and may have acted.
    InFlight,
    /// Claimed by an attempt that marks its effects, and has marked none.
    Untouched,
    /// Its holder, or somebody outside, said that nothing happened.
    Open,
    /// The effect may have happened.
    Indeterminate,
    /// There is an answer.
    Completed,
}

impl Standing {
    /// The state byte of a record.
    #[must_use]
    pub const fn byte(self) -> u8 {
        match self {
            Self::InFlight => IN_FLIGHT,
            Self::Untouched => UNTOUCHED,
            Self::Open => OPEN,
            Self::Indeterminate => INDETERMINATE,
            Self::Completed => COMPLETED,
        }
    }

    /// The state of this byte, if it is one.
    #[must_use]
    pub const fn of(byte: u8) -> Option<Self> {
        Some(match byte {
            IN_FLIGHT => Self::InFlight,
            UNTOUCHED => Self::Untouched,
            OPEN => Self::Open,
            INDETERMINATE => Self::Indeterminate,
            COMPLETED => Self::Completed,
            _ => return None,
        })
    }
}

/// How many bytes [`Sighting::mark`] has.
pub const MARK_LENGTH: usize = 27;

impl Sighting {
    /// True if it is in flight, and its lease does not hold any more.
    #[must_use]
    pub fn lease_is_over(&self, now: Millis) -> bool {
        match self.standing {
            Standing::InFlight | Standing::Untouched => lease_is_over(now, self.at, self.lease),
            Standing::Open | Standing::Indeterminate | Standing::Completed => false,
        }
    }

    /// True if nobody knows what became of the attempt: it was said so, or its lease is over and nobody
    /// has claimed the key since.
    #[must_use]
    pub fn is_unknown(&self, now: Millis) -> bool {
        match self.standing {
            Standing::Indeterminate => true,
            Standing::InFlight => self.lease_is_over(now),
            Standing::Untouched | Standing::Open | Standing::Completed => false,
        }
    }

    /// True if `resolve` may settle it: its outcome is unknown, or it died untouched.
    #[must_use]
    pub fn can_be_settled(&self, now: Millis) -> bool {
        self.is_unknown(now) || self.lease_is_over(now)
    }

    /// Since when it stands where it does; in flight, and where the outcome is unknown, since when the last attempt
    /// runs or ran. That is its fence, which is the time of its claim unless the clock went back in between.
    #[must_use]
    pub fn since(&self, now: Millis) -> Millis {
        match self.standing {
            // Who asks how old an unknown outcome is asks about the operation, and not when it was found out.
            Standing::InFlight | Standing::Untouched | Standing::Indeterminate => {
                let claimed = Millis(self.fence.number()).max(self.created);
                if claimed > now { self.created } else { claimed }
            }
            Standing::Open | Standing::Completed => self.at,
        }
    }

    /// What tells this sight of the record from any later one: state, holder, attempt, and the moment. A
    /// renewal changes it, and so does every other verb that writes.
    #[must_use]
    pub fn mark(&self) -> [u8; MARK_LENGTH] {
        let mut mark = [0; MARK_LENGTH];
        mark[0] = self.standing.byte();
        mark[1..17].copy_from_slice(self.holder.as_bytes());
        mark[17..21].copy_from_slice(&self.attempt.number().to_be_bytes());
        mark[21..].copy_from_slice(&self.at.0.min(Fence::MAX.number()).to_be_bytes()[2..]);
        mark
    }
}

impl Record {
    /// What its header says.
    #[must_use]
    pub fn sighting(&self) -> Sighting {
        let (standing, at, lease) = match &self.state {
            State::InFlight { until, lease, progress } => {
                let standing = match progress {
                    Progress::MayHaveActed => Standing::InFlight,
                    Progress::Untouched => Standing::Untouched,
                };
                (standing, *until, *lease)
            }
            State::Open { since } => (Standing::Open, *since, Duration::ZERO),
            State::Indeterminate { since } => (Standing::Indeterminate, *since, Duration::ZERO),
            State::Completed { at, .. } => (Standing::Completed, *at, Duration::ZERO),
        };
        let Self { holder, attempt, fence, created, .. } = *self;
        Sighting { standing, holder, attempt, fence, created, at, lease }
    }
}

/// Arguments of `forget`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate are handed it in tests")]
pub struct Forget {
    /// What was seen under the key when somebody decided that it should go.
    pub seen: Seen,
}

/// What somebody saw under a key.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "a record can be read, or not")]
pub enum Seen {
    /// A record.
    Record(Sighting),
    /// Something that this release cannot read. It may be a payment.
    Unreadable,
}

/// What came of forgetting.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "a new outcome must break every match")]
pub enum ForgetOutcome {
    /// The record is gone, and its key is new.
    Forgotten,
    /// There was none; perhaps since an earlier sending of the same.
    Absent,
    /// Its holder runs. Nothing was changed.
    InFlight {
        /// What is left of its lease.
        remaining: Duration,
    },
    /// The record is not the one that was seen any more. Nothing was changed.
    Changed,
    /// It cannot be read, and nobody said that it should go all the same. Nothing was changed.
    Unreadable,
}

/// Removes a record, if it is still the one that was seen and nobody runs under it.
#[must_use]
pub fn forget(current: &Current, now: Millis, forget: &Forget) -> Step<ForgetOutcome> {
    let remove = Step { change: Change::Remove, outcome: ForgetOutcome::Forgotten };
    let sighting = match (current, &forget.seen) {
        (Current::Absent, _) => return keep(ForgetOutcome::Absent),
        _ if made(Mistake::ForgetAnything) => return remove,
        (Current::Unreadable(_), Seen::Unreadable) => return remove,
        (Current::Unreadable(_), Seen::Record(_)) => return keep(ForgetOutcome::Unreadable),
        (Current::Present(record), _) => record.sighting(),
    };
    match sighting.standing {
        Standing::InFlight | Standing::Untouched if !sighting.lease_is_over(now) => {
            return keep(ForgetOutcome::InFlight { remaining: sighting.at.since(now) });
        }
        Standing::InFlight
        | Standing::Untouched
        | Standing::Open
        | Standing::Indeterminate
        | Standing::Completed => {}
    }
    match &forget.seen {
        Seen::Record(seen) if seen.mark() == sighting.mark() => remove,
        Seen::Record(_) | Seen::Unreadable => keep(ForgetOutcome::Changed),
    }
}

/// Arguments of `amend`.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate are handed it in tests")]
pub struct Amend {
    /// What was seen under the key when somebody found that nobody can read its answer.
    pub seen: Sighting,
    /// The encoded response that answers for it from now on.
    pub response: Bytes,
    /// How long things last.
    pub terms: Terms,
}

/// Puts an answer in the place of one that nobody can read, if the record is still the one that was seen.
#[must_use]
pub fn amend(current: Current, now: Millis, amend: &Amend) -> Step<ResolveOutcome> {
    let record = match current {
        Current::Absent => return keep(ResolveOutcome::Changed),
        Current::Unreadable(_) => return keep(ResolveOutcome::Unreadable),
        Current::Present(record) => record,
    };
    let State::Completed { response, at } = &record.state else {
        return keep(ResolveOutcome::Changed);
    };
    if record.sighting().mark() == amend.seen.mark() {
        // Later than what was seen, also within one millisecond: it is amended once.
        let at = now.max(Millis(at.0.saturating_add(1)));
        let state = State::Completed { at, response: amend.response.clone() };
        let (checkpoint, holder) = (Bytes::new(), HolderId::NOBODY);
        let record = Record { state, checkpoint, holder, ..record };
        return write(record, amend.terms.forget_settled(now), ResolveOutcome::Resolved);
    }
    // Amended already, in the same way: this is the same sent again.
    let again = record.is_held_by(HolderId::NOBODY) && *response == amend.response;
    keep(if again { ResolveOutcome::Resolved } else { ResolveOutcome::Changed })
}

impl Sighting {
    /// Reads the header of a record that is `length` bytes long in all.
    ///
    /// # Errors
    /// [`Unreadable`] if this release cannot say what the record means.
    pub fn read(header: &[u8], length: usize) -> Result<Self, Unreadable> {
        super::codec::sighting(header, length)
    }
}
