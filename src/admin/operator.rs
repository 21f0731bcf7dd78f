//! The functions: show, find, list, settle, forget, trail.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use super::answer::{self, AnswerError};
use super::by::By;
use super::known::Known;
use super::surely::{NotDone, surely};
use super::time::rfc3339;
use crate::config::{RETENTION, RETENTION_MAX};
use crate::error::{StoreError, StoreErrorKind};
use crate::record::{
    Amend, Current, Finding, Forget, ForgetOutcome, Millis, Record, Resolution, ResolveOutcome,
    Seen, Sighting, State, Terms,
};
use crate::response::{CodecError, StoredResponse};
use crate::scope::StorageKey;

use crate::store::{Contents, Inspect, Listing, LogId, NoPage, Sealing, Sight, TrailEntry, Wanted};
use crate::token::{Attempt, HolderId};

/// The target of the events that every change leaves: one when it begins, one when it has ended.
pub const AUDIT_TARGET: &str = "tower_idempotency::audit";

/// Looks at records and changes them on behalf of a person. See the [module](super).
///
/// # Clone
/// Clones share the store.
#[derive(Clone, Debug)]
pub struct Operator {
    store: Arc<dyn Inspect>,
    retention: Duration,
    seals: Seals,
    replaces: Replaces,
}

/// Whether an answer that cannot be read here may be replaced.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Replaces {
    Nothing,
    Unreadable,
}

/// Whether an answer is settled only where it is sealed as the service seals its own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Seals {
    Compared,
    Ignored,
}

/// What becomes of an operation whose outcome was unknown.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "there is no third thing to find out")]
pub enum Settlement {
    /// It was done, and this answers for it: the client's next retry gets it as a replay. Nothing that the layer
    /// would not have stored itself ([`AnswerError`]); a server error is marked as final, as it does.
    Done(StoredResponse),
    /// It was not done, **and the old attempt cannot act any more**: the next retry runs the handler.
    NotApplied,
}

/// What a record looked like to somebody who judges it. As text, 16 hex digits, or `unreadable`.
///
/// Two looks give the same version if nothing happened to the record in between.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Version(Option<[u8; 8]>);

/// A text is no [`Version`].
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("a version is 16 hex digits, or the word `unreadable`")]
#[non_exhaustive]
pub struct VersionError;

impl Version {
    /// The version of what this release cannot read. To forget such a record, one has to say so.
    pub const UNREADABLE: Self = Self(None);

    /// The version of a record.
    #[must_use]
    pub fn of(sighting: &Sighting) -> Self {
        // A hash, since whoever knows a holder could settle in its name.
        let digest: [u8; 32] = Sha256::digest(sighting.mark()).into();
        let mut version = [0; 8];
        version.copy_from_slice(&digest[..8]);
        Self(Some(version))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(version) => write!(f, "{:016x}", u64::from_be_bytes(*version)),
            None => f.write_str("unreadable"),
        }
    }
}

impl FromStr for Version {
    type Err = VersionError;

    fn from_str(text: &str) -> Result<Self, VersionError> {
        if text == "unreadable" {
            return Ok(Self::UNREADABLE);
        }
        let hex = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u64::from_str_radix(text, 16).ok().filter(|_| hex).ok_or(VersionError)?;
        Ok(Self(Some(number.to_be_bytes())))
    }
}

/// A record as it was shown.
#[derive(Clone, Debug)]
pub struct Shown {
    key: StorageKey,
    sight: Sight,
}

impl Shown {
    /// Its key.
    #[must_use]
    pub fn key(&self) -> StorageKey {
        self.key
    }

    /// What a change has to name.
    #[must_use]
    pub fn version(&self) -> Version {
        self.record().map_or(Version::UNREADABLE, |record| Version::of(&record.sighting()))
    }

    /// The record; none if it cannot be read.
    #[must_use]
    pub fn record(&self) -> Option<&Record> {
        self.sight.record()
    }

    /// The store's clock when it was looked at.
    #[must_use]
    pub fn now(&self) -> Millis {
        self.sight.now
    }

    /// When the store forgets it.
    #[must_use]
    pub fn expires(&self) -> Option<Millis> {
        self.sight.expires
    }

    /// If response and checkpoint are sealed, and cannot be opened here.
    #[must_use]
    pub fn contents(&self) -> Contents {
        self.sight.contents
    }

    /// The stored response, body included; none if it is not completed, or sealed.
    ///
    /// # Errors
    /// [`CodecError`] if its bytes are no response of a version that this release reads.
    pub fn response(&self) -> Result<Option<StoredResponse>, CodecError> {
        match self.record().map(|record| &record.state) {
            Some(State::Completed { response, .. }) if self.contents() == Contents::Readable => {
                StoredResponse::decode(response.clone()).map(Some)
            }
            Some(
                State::Completed { .. }
                | State::InFlight { .. }
                | State::Open { .. }
                | State::Indeterminate { .. },
            )
            | None => Ok(None),
        }
    }
}

impl Shown {
    /// True if there is an answer, and it cannot be opened or decoded here.
    fn is_answered_unreadably(&self) -> bool {
        let Some(Record { state: State::Completed { .. }, .. }) = self.record() else {
            return false;
        };
        self.contents() == Contents::Sealed || self.response().is_err()
    }
}

/// Names a change in the trail and in the log.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct ChangeId([u8; 16]);

impl ChangeId {
    /// An id as it stands in the trail.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for ChangeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// A change that was made.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Made {
    /// Its name in the trail.
    pub change: ChangeId,
    /// False if the trail could not be told any more that it succeeded. The log was.
    pub outcome_noted: bool,
    /// Until when the record is kept now, at least; none if it was forgotten.
    pub kept_until: Option<Millis>,
}

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OperatorError {
    /// There is no such record.
    #[error("there is no record under this key")]
    NotFound,
    /// Several records have this log id.
    #[error("{0} records have this reference: name the storage key")]
    Ambiguous(usize),
    /// A handler runs. Nothing was changed.
    #[error("the operation is running{}, and its lease holds for another {remaining:?}; nothing was changed", as_attempt(*attempt))]
    InFlight {
        /// What is left of its lease.
        remaining: Duration,
        /// Which attempt it is; none where the key was claimed while the change was being made.
        attempt: Option<Attempt>,
    },
    /// The record is not the one that was seen any more. Nothing was changed.
    #[error("the record changed since it was looked at; nothing was changed")]
    Changed,
    /// Its outcome is known already. Nothing was changed.
    #[error("the outcome of this key is not unknown: it is {0}; nothing was changed")]
    NotUnknown(Known),
    /// It cannot be read, and nobody said that this is meant. Nothing was changed.
    #[error("this release cannot read the record; nothing was changed")]
    Unreadable,
    /// There is no such page of a listing (any more): begin again.
    #[error("there is no such page of a listing (any more): begin again, without it")]
    NoPage,
    /// An operation cannot be settled with this answer. Nothing was changed.
    #[error("{0}; nothing was changed")]
    Answer(AnswerError),
    /// The record's service would not be able to read the answer: it seals its own with a key that is not known
    /// here, or it does not seal them and a key was given here. Nothing was changed.
    #[error(
        "the answer would not be sealed as the service of this record seals its own, and it could not \
         read it: give its protection key, or none if it has none; nothing was changed"
    )]
    Sealed,
    /// The trail could not be written, so nothing was changed.
    #[error("the trail cannot be written, and nothing was changed")]
    NoTrail(#[source] StoreError),
    /// The store did not say whether the change was made. Look again.
    #[error("the store did not say whether the change was made: look again")]
    Unconfirmed(#[source] StoreError),
    /// The store failed. Nothing was changed.
    #[error("the store failed")]
    Store(#[source] StoreError),
}

fn as_attempt(attempt: Option<Attempt>) -> String {
    attempt.map_or(String::new(), |attempt| format!(" as attempt {}", attempt.number()))
}

impl OperatorError {
    /// In one word, for the trail, the log and scripts.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotFound => "not_found",
            Self::Ambiguous(_) => "ambiguous",
            Self::InFlight { .. } => "in_flight",
            Self::Changed => "changed",
            Self::NotUnknown(_) => "not_unknown",
            Self::Unreadable => "unreadable",
            Self::NoPage => "no_page",
            Self::Answer(_) => "answer_refused",
            Self::Sealed => "sealed",
            Self::NoTrail(_) => "no_trail",
            Self::Unconfirmed(_) => "unconfirmed",
            Self::Store(_) => "store_failed",
        }
    }
}

/// What is changed, and by whom.
struct Change {
    key: StorageKey,
    version: Version,
    by: By,
    kind: Kind,
}

enum Kind {
    Settle(Settlement),
    Forget,
}

impl Kind {
    fn action(&self) -> &'static str {
        match self {
            Self::Settle(Settlement::Done(_)) => "settle done",
            Self::Settle(Settlement::NotApplied) => "settle not applied",
            Self::Forget => "forget",
        }
    }
}

impl Operator {
    /// For the records of this store. Give it the very store of the layer, with its
    /// `Protected` around it if there is one: what is settled must be sealed as other answers are.
    #[must_use]
    pub fn new(store: impl Inspect) -> Self {
        Self {
            store: Arc::new(store),
            retention: RETENTION,
            seals: Seals::Compared,
            replaces: Replaces::Nothing,
        }
    }

    /// How long a record is kept at least that is settled, from then on. What is left of its time is never
    /// shortened, so this matters only where it is longer. Default: 24 hours, as in
    /// [`ConfigBuilder::retention`](crate::ConfigBuilder::retention).
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention.min(RETENTION_MAX);
        self
    }

    /// Settles also where the answer would not be sealed as the record's service seals its own
    /// ([`OperatorError::Sealed`]): for who knows that the service can read it all the same.
    #[must_use]
    pub fn without_seal_check(mut self) -> Self {
        self.seals = Seals::Ignored;
        self
    }

    /// Settles as done also what is completed with an answer that cannot be opened or decoded here: for who knows
    /// that no process of the service can read it, and what it should have been.
    #[must_use]
    pub fn replacing_unreadable(mut self) -> Self {
        self.replaces = Replaces::Unreadable;
        self
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn Inspect> {
        &self.store
    }

    /// Looks at one record, and changes nothing.
    ///
    /// # Errors
    /// [`OperatorError::NotFound`], or that the store failed.
    pub async fn show(&self, key: StorageKey) -> Result<Shown, OperatorError> {
        let sight = self.store.look(key).await.map_err(OperatorError::Store)?;
        match sight.current {
            Current::Absent => Err(OperatorError::NotFound),
            Current::Unreadable(_) | Current::Present(_) => Ok(Shown { key, sight }),
        }
    }

    /// The key that this log id stands for: the `reference` of an *outcome unknown* answer, or what logs show.
    ///
    /// Redis knows only those that its index holds: an [`Auditor`](super::Auditor) has to have seen them.
    ///
    /// # Errors
    /// [`OperatorError::NotFound`], [`OperatorError::Ambiguous`], or that the store failed.
    pub async fn find(&self, id: LogId) -> Result<StorageKey, OperatorError> {
        let found = self.store.find(id).await.map_err(OperatorError::Store)?;
        match found[..] {
            [] => Err(OperatorError::NotFound),
            [key] => Ok(key),
            _ => Err(OperatorError::Ambiguous(found.len())),
        }
    }

    /// One page of what nobody has settled.
    ///
    /// # Errors
    /// [`OperatorError::NoPage`], or that the store failed.
    pub async fn list(&self, wanted: &Wanted) -> Result<Listing, OperatorError> {
        self.store.list(wanted).await.map_err(|error| match NoPage::is_in(&error) {
            true => OperatorError::NoPage,
            false => OperatorError::Store(error),
        })
    }

    /// The latest changes, newest first.
    ///
    /// # Errors
    /// That the store failed.
    pub async fn trail(&self, at_most: u32) -> Result<Vec<TrailEntry>, OperatorError> {
        self.store.trail(at_most).await.map_err(OperatorError::Store)
    }

    /// Settles an outcome that is unknown: said so, or in flight with a lease that is over.
    ///
    /// The record is kept for what is left of its time, or for [`retention`](Self::retention) if that is longer.
    /// Of two people who say the same of one record at the same moment both may be told that they settled it; the
    /// trail has both.
    ///
    /// The old attempt cannot complete any more after this. It may still *act*: before
    /// [`Settlement::NotApplied`], see to it that it cannot.
    ///
    /// # Errors
    /// [`OperatorError`]. All but [`Unconfirmed`](OperatorError::Unconfirmed) mean that nothing was changed.
    ///
    /// # Cancel safety
    /// A change that has begun is carried through, with its trail, also if the future is dropped.
    pub async fn settle(
        &self,
        key: StorageKey,
        version: Version,
        settlement: Settlement,
        by: By,
    ) -> Result<Made, OperatorError> {
        self.carry_through(Change { key, version, by, kind: Kind::Settle(settlement) }).await
    }

    /// Forgets a record under which nobody runs: its key is new, and **the next retry runs the handler**. For
    /// records that nobody can read, and for test data; an unknown outcome is better settled.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    ///
    /// # Cancel safety
    /// As [`settle`](Self::settle).
    pub async fn forget(
        &self,
        key: StorageKey,
        version: Version,
        by: By,
    ) -> Result<Made, OperatorError> {
        self.carry_through(Change { key, version, by, kind: Kind::Forget }).await
    }

    async fn carry_through(&self, change: Change) -> Result<Made, OperatorError> {
        let this = self.clone();
        // A task of its own, so that a request that is given up leaves no half of a change.
        let task = tokio::spawn(async move { this.make(change).await });
        task.await.unwrap_or_else(|gone| {
            let error =
                StoreError::new(StoreErrorKind::OutcomeUnknown, self.store.name(), "change");
            Err(OperatorError::Unconfirmed(error.with_source(gone)))
        })
    }

    async fn make(&self, mut change: Change) -> Result<Made, OperatorError> {
        if let Kind::Settle(Settlement::Done(response)) = change.kind {
            let response = answer::checked(response).map_err(OperatorError::Answer)?;
            change.kind = Kind::Settle(Settlement::Done(response));
        }
        let shown = self.show(change.key).await?;
        let seen = self.judge(&shown, &change)?;
        let retention = self.keeps(&shown);
        let mut entry = TrailEntry {
            id: *HolderId::random().as_bytes(),
            at: shown.now(),
            who: change.by.who.as_str().into(),
            why: change.by.why.as_str().into(),
            action: change.kind.action().into(),
            key: change.key,
            outcome: None,
        };
        self.note(&entry).await.map_err(OperatorError::NoTrail)?;
        tell(&entry, "begun");
        let done = match &change.kind {
            Kind::Settle(settlement) => self.resolve(&shown, settlement, retention).await,
            Kind::Forget => self.remove(change.key, seen).await,
        };
        let outcome = done.as_ref().map_or_else(OperatorError::code, |()| "done");
        entry.outcome = Some(outcome.into());
        tell(&entry, outcome);
        let noted = self.note(&entry).await;
        if let Err(error) = &noted {
            tracing::warn!(
                target: AUDIT_TARGET, change = %ChangeId(entry.id), error = %error.in_full(),
                "the trail does not know what came of a change"
            );
        }
        let kept_until = match change.kind {
            Kind::Settle(_) => Some(shown.now().after(retention)),
            Kind::Forget => None,
        };
        let (change, outcome_noted) = (ChangeId(entry.id), noted.is_ok());
        done.map(|()| Made { change, outcome_noted, kept_until })
    }

    /// How long a record is kept once it is settled: never less than it would have been kept anyway, or a late
    /// retry would find its key new.
    fn keeps(&self, shown: &Shown) -> Duration {
        let left = shown.expires().map_or(RETENTION_MAX, |expires| expires.since(shown.now()));
        self.retention.max(left)
    }

    /// Whether what stands there now is what was judged, and can be changed so.
    fn judge(&self, shown: &Shown, change: &Change) -> Result<Seen, OperatorError> {
        let Some(record) = shown.record() else {
            return match (&change.kind, change.version) {
                (Kind::Forget, Version::UNREADABLE) => Ok(Seen::Unreadable),
                (Kind::Forget | Kind::Settle(_), _) => Err(OperatorError::Unreadable),
            };
        };
        let (sighting, now) = (record.sighting(), shown.now());
        let runs = matches!(record.state, State::InFlight { .. }) && !sighting.lease_is_over(now);
        if shown.version() != change.version {
            return Err(OperatorError::Changed);
        }
        if runs {
            let (remaining, attempt) = (sighting.at.since(now), Some(sighting.attempt));
            return Err(OperatorError::InFlight { remaining, attempt });
        }
        let done = matches!(change.kind, Kind::Settle(Settlement::Done(_)));
        let replaced =
            done && self.replaces == Replaces::Unreadable && shown.is_answered_unreadably();
        if let (Kind::Settle(_), false, Some(known)) = (&change.kind, replaced, Known::of(shown)) {
            return Err(OperatorError::NotUnknown(known));
        }
        if done && self.seals == Seals::Compared && !self.fits(shown.key, record, replaced) {
            return Err(OperatorError::Sealed);
        }
        Ok(Seen::Record(sighting))
    }

    /// Whether the answer would be sealed as the record's service seals its own.
    fn fits(&self, key: StorageKey, record: &Record, replaced: bool) -> bool {
        match &record.state {
            // Whoever settled it before has taken the holder out of it.
            State::Completed { response, .. } if replaced && record.holder == HolderId::NOBODY => {
                !Sealing::is_sealed(response)
            }
            State::Completed { .. }
            | State::InFlight { .. }
            | State::Open { .. }
            | State::Indeterminate { .. } => {
                self.store.sealing(key, record.holder) == Sealing::Fits
            }
        }
    }

    async fn resolve(
        &self,
        shown: &Shown,
        settlement: &Settlement,
        retention: Duration,
    ) -> Result<(), OperatorError> {
        let Some(record) = shown.record() else { return Err(OperatorError::Unreadable) };
        let finding = match settlement {
            Settlement::Done(response) => Finding::Happened(response.encode()),
            Settlement::NotApplied => Finding::NothingHappened,
        };
        let Record { holder, attempt, .. } = *record;
        let terms = Terms { lease: retention, retention, unknown_retention: retention };
        let (resolved, _) = match finding {
            Finding::Happened(response) if matches!(record.state, State::Completed { .. }) => {
                let amend = Amend { seen: record.sighting(), response, terms };
                surely(|| self.store.amend(shown.key, &amend)).await?
            }
            finding @ (Finding::Happened(_) | Finding::NothingHappened) => {
                let resolution = Resolution { holder, attempt, finding, terms };
                surely(|| self.store.resolve(shown.key, &resolution)).await?
            }
        };
        match resolved {
            ResolveOutcome::Resolved => Ok(()),
            ResolveOutcome::Changed => Err(OperatorError::Changed),
            ResolveOutcome::Unreadable => Err(OperatorError::Unreadable),
        }
    }

    async fn remove(&self, key: StorageKey, seen: Seen) -> Result<(), OperatorError> {
        let forget = Forget { seen };
        let (forgotten, again) = surely(|| self.store.forget(key, &forget)).await?;
        match forgotten {
            ForgetOutcome::Forgotten => Ok(()),
            // An earlier sending did it, and its reply was lost.
            ForgetOutcome::Absent if again => Ok(()),
            ForgetOutcome::Absent | ForgetOutcome::Changed => Err(OperatorError::Changed),
            ForgetOutcome::InFlight { remaining } => {
                Err(OperatorError::InFlight { remaining, attempt: None })
            }
            ForgetOutcome::Unreadable => Err(OperatorError::Unreadable),
        }
    }

    async fn note(&self, entry: &TrailEntry) -> Result<(), StoreError> {
        surely(|| self.store.note(entry)).await.map(drop).map_err(NotDone::into_cause)
    }
}

/// Leaves an event.
fn tell(entry: &TrailEntry, outcome: &str) {
    tracing::info!(
        target: AUDIT_TARGET,
        change = %ChangeId(entry.id),
        action = &*entry.action,
        who = &*entry.who,
        why = &*entry.why,
        at = rfc3339(entry.at),
        key = entry.key.log_id(),
        outcome,
        "an operator changes a record"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_survives_its_own_text() {
        for version in [Version(Some([0, 1, 2, 3, 4, 5, 6, 255])), Version::UNREADABLE] {
            assert_eq!(version.to_string().parse(), Ok(version));
        }
        for bad in ["", "0", "+00000000000000f", "0123456789abcdefa"] {
            assert_eq!(bad.parse::<Version>(), Err(VersionError), "{bad}");
        }
    }
}
