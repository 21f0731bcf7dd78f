//! What operators need of a store, beside the verbs that requests use.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::{Sealing, Store, StoreFuture};
use crate::error::{StoreError, StoreErrorKind};
use crate::record::{
    Amend, Current, Forget, ForgetOutcome, Millis, Record, ResolveOutcome, Sighting, Standing,
};
use crate::scope::StorageKey;
use crate::token::HolderId;

/// Looking at records and taking care of those that need a person. Not for handling requests: between a look
/// and what follows from it anything can happen, so every change names what was seen.
///
/// The module `admin` (feature `admin`) is made of this.
///
/// # Errors
/// As [`Store`]: [`OutcomeUnknown`](crate::StoreErrorKind::OutcomeUnknown) means that the same call may be sent
/// again to find out.
///
/// # Cancel safety
/// As [`Store`]: a dropped future leaves things done or not done, never half done.
pub trait Inspect: Store {
    /// Looks at one key and changes nothing: a lease that is over is seen as it stands.
    fn look(&self, key: StorageKey) -> StoreFuture<'_, Sight>;

    /// Removes a record; see [`record::forget`](crate::record::forget).
    fn forget<'a>(&'a self, key: StorageKey, forget: &'a Forget) -> StoreFuture<'a, ForgetOutcome>;

    /// Puts an answer in the place of one that nobody can read; see [`record::amend`](crate::record::amend).
    fn amend<'a>(&'a self, key: StorageKey, amend: &'a Amend) -> StoreFuture<'a, ResolveOutcome>;

    /// Lists records that nobody has settled, oldest first as far as the store can tell. Bounded: it never
    /// reads all records, but an index. What is no page of this store is refused.
    fn list<'a>(&'a self, wanted: &'a Wanted) -> StoreFuture<'a, Listing>;

    /// The keys whose log id this is: all of them, or those that the index has.
    fn find(&self, id: LogId) -> StoreFuture<'_, Vec<StorageKey>>;

    /// One step of a slow pass that builds the index anew, over about `at_most` keys; `None` begins one. The
    /// listing goes on to read the index of the last complete pass until this one is complete. A pass that is
    /// never finished leaves nothing behind but some memory, for an hour.
    fn audit<'a>(
        &'a self,
        cursor: Option<&'a AuditCursor>,
        at_most: u32,
    ) -> StoreFuture<'a, AuditStep>;

    /// Writes an entry of the trail; one with the same id takes its place.
    fn note<'a>(&'a self, entry: &'a TrailEntry) -> StoreFuture<'a, ()>;

    /// The latest entries of the trail, newest first. The store keeps ten thousand at least.
    fn trail(&self, at_most: u32) -> StoreFuture<'_, Vec<TrailEntry>>;

    /// A short look around, for who found nothing and may have looked in the wrong place; `None` if the store cannot
    /// say. Bounded, and never needed for anything else.
    fn glance(&self) -> StoreFuture<'_, Option<Glance>> {
        Box::pin(async { Ok(None) })
    }

    /// Whether an answer that is settled here for a record of this holder is sealed as its service seals its own.
    /// What is around another store asks that one.
    fn sealing(&self, key: StorageKey, holder: HolderId) -> Sealing {
        Sealing::without_key(key, holder)
    }
}

/// What a short look around found. Names nobody's keys.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate build it")]
pub struct Glance {
    /// How many records of this store it saw.
    pub records: u64,
    /// There may be more: it did not see everything.
    pub more: bool,
    /// Where else records are, as far as it saw: prefixes, databases.
    pub elsewhere: Vec<Box<str>>,
}

/// What stands under a key.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate build it")]
pub struct Sight {
    /// What was found. What is past its retention is absent.
    pub current: Current,
    /// If response and checkpoint can be read.
    pub contents: Contents,
    /// The store's clock.
    pub now: Millis,
    /// When the store forgets the record.
    pub expires: Option<Millis>,
}

/// If response and checkpoint of a record can be read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "they open, or not")]
pub enum Contents {
    /// As they are.
    Readable,
    /// They are sealed, and the key is not here.
    Sealed,
}

/// What a listing should hold.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate are handed it")]
pub struct Wanted {
    /// Which records.
    pub survey: Survey,
    /// At most so many.
    pub at_most: u32,
    /// Where the last page ended.
    pub after: Option<Page>,
}

/// Which records are listed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum Survey {
    /// Nobody knows what became of them: said so, or their lease is over and nobody claimed them since.
    Unknown,
    /// In flight by an attempt that is at least so old, with a lease that holds or one that is over.
    InFlightFor(Duration),
    /// Both, of any age.
    Unsettled,
}

impl Survey {
    /// True if a record belongs into this listing.
    #[must_use]
    pub fn takes(self, seen: &Sighting, now: Millis) -> bool {
        let in_flight = matches!(seen.standing, Standing::InFlight | Standing::Untouched);
        match self {
            Self::Unknown => seen.is_unknown(now),
            Self::InFlightFor(age) => in_flight && now.since(seen.since(now)) >= age,
            Self::Unsettled => in_flight || seen.is_unknown(now),
        }
    }
}

/// Where a page of a listing ended. Opaque; as text for those who page over a network.
#[derive(Clone, Eq, PartialEq)]
pub struct Page(Box<str>);

impl Page {
    /// A page from its text.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        Self(text.into())
    }

    /// Its text: letters, digits and few signs.
    #[must_use]
    pub fn as_text(&self) -> &str {
        &self.0
    }

    /// The place of an entry in an order by number and key.
    pub(crate) fn at(number: i64, key: StorageKey) -> Self {
        Self(format!("{number}.{}", key.to_text()).into())
    }

    /// Number and key; none if the text is no place.
    pub(crate) fn place(&self) -> Option<(i64, StorageKey)> {
        let (number, key) = self.0.split_once('.')?;
        Some((number.parse().ok()?, StorageKey::from_text(key)?))
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Page(..)")
    }
}

/// The cause of a listing that fails since a page is none.
#[derive(Debug, thiserror::Error)]
#[error("there is no such page of a listing")]
pub(crate) struct NoPage;

impl NoPage {
    pub(crate) fn of(store: &'static str) -> StoreError {
        StoreError::new(StoreErrorKind::Backend, store, "list").with_source(Self)
    }

    #[cfg(feature = "admin")]
    pub(crate) fn is_in(error: &StoreError) -> bool {
        std::error::Error::source(error).is_some_and(|cause| cause.is::<Self>())
    }
}

/// One page of a listing.
#[derive(Clone, Debug)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate build it")]
pub struct Listing {
    /// The records as they stand now.
    pub entries: Vec<Entry>,
    /// There may be more behind this.
    pub more: Option<Page>,
    /// Where it comes from.
    pub source: Source,
    /// The store's clock.
    pub now: Millis,
}

/// A record in a listing.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate build it")]
pub struct Entry {
    /// Its key.
    pub key: StorageKey,
    /// What its header says.
    pub sighting: Sighting,
}

/// How fresh a listing is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "a new source must break every match")]
pub enum Source {
    /// The store has an index that is always right.
    Direct,
    /// The index of this pass: what became overdue since is not in it.
    Index(Pass),
    /// No pass was ever completed, so nothing can be listed.
    NoIndex,
}

/// A complete pass over all records.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate build it")]
pub struct Pass {
    /// When it began: whatever was overdue then is in the index.
    pub started: Millis,
    /// When it was complete.
    pub ended: Millis,
    /// How many records it read.
    pub scanned: u64,
    /// How many of them it found in flight or unknown.
    pub found: u64,
    /// How many of those had no place in the index: the newest.
    pub left_out: u64,
}

/// Where a pass stands. Opaque.
#[derive(Clone, Eq, PartialEq)]
pub struct AuditCursor(Box<str>);

impl AuditCursor {
    /// A cursor from its text.
    #[must_use]
    pub fn from_text(text: impl Into<Box<str>>) -> Self {
        Self(text.into())
    }

    /// Its text.
    #[must_use]
    pub fn as_text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for AuditCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AuditCursor({})", self.0)
    }
}

/// What one step of a pass came to.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate build it")]
pub struct AuditStep {
    /// Where to go on; `None` when the pass is complete.
    pub next: Option<AuditCursor>,
    /// How many records were read in all steps of the pass.
    pub scanned: u64,
    /// How many of them are in flight or unknown.
    pub found: u64,
    /// How many of those are unknown.
    pub unknown: u64,
    /// How many keys there are, about. For progress.
    pub about: u64,
}

/// The first six bytes of a storage key: what logs and the *outcome unknown* answers show of it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct LogId([u8; 6]);

impl LogId {
    /// Reads twelve hex digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let hex = text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u64::from_str_radix(text, 16).ok().filter(|_| hex)?;
        let [_, _, low @ ..] = number.to_be_bytes();
        Some(Self(low))
    }

    /// The six bytes.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 6] {
        &self.0
    }

    /// True if it is the log id of this key.
    #[must_use]
    pub fn names(&self, key: StorageKey) -> bool {
        key.as_bytes()[..6] == self.0
    }
}

/// A change by an operator, as the store keeps it. Holds no key of a client, and no body.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "stores outside this crate build it")]
pub struct TrailEntry {
    /// Names the change.
    pub id: [u8; 16],
    /// When it was noted, by the store's clock; what a caller of `note` puts here is not read.
    pub at: Millis,
    /// Who made it.
    pub who: Box<str>,
    /// Why.
    pub why: Box<str>,
    /// What it is: `settle done`, `settle not applied`, `forget`.
    pub action: Box<str>,
    /// Which record.
    pub key: StorageKey,
    /// What came of it. `None`: it was begun, and whoever did so did not get to say more.
    pub outcome: Option<Box<str>>,
}

/// How many entries of the trail a store keeps at least.
pub(crate) const TRAIL_LENGTH: u32 = 10_000;

/// How many index entries one page may read: more would hold up a store.
#[cfg(any(feature = "redis", feature = "postgres", feature = "sqlite"))]
pub(crate) const LOOKS_PER_PAGE: usize = 1_000;

impl Sight {
    /// The record, if there is one that can be read.
    #[must_use]
    pub fn record(&self) -> Option<&Record> {
        match &self.current {
            Current::Present(record) => Some(record),
            Current::Absent | Current::Unreadable(_) => None,
        }
    }
}

impl<S: Inspect + ?Sized> Inspect for Arc<S> {
    fn look(&self, key: StorageKey) -> StoreFuture<'_, Sight> {
        (**self).look(key)
    }

    fn forget<'a>(&'a self, key: StorageKey, forget: &'a Forget) -> StoreFuture<'a, ForgetOutcome> {
        (**self).forget(key, forget)
    }

    fn amend<'a>(&'a self, key: StorageKey, amend: &'a Amend) -> StoreFuture<'a, ResolveOutcome> {
        (**self).amend(key, amend)
    }

    fn list<'a>(&'a self, wanted: &'a Wanted) -> StoreFuture<'a, Listing> {
        (**self).list(wanted)
    }

    fn find(&self, id: LogId) -> StoreFuture<'_, Vec<StorageKey>> {
        (**self).find(id)
    }

    fn audit<'a>(
        &'a self,
        cursor: Option<&'a AuditCursor>,
        at_most: u32,
    ) -> StoreFuture<'a, AuditStep> {
        (**self).audit(cursor, at_most)
    }

    fn note<'a>(&'a self, entry: &'a TrailEntry) -> StoreFuture<'a, ()> {
        (**self).note(entry)
    }

    fn trail(&self, at_most: u32) -> StoreFuture<'_, Vec<TrailEntry>> {
        (**self).trail(at_most)
    }

    fn glance(&self) -> StoreFuture<'_, Option<Glance>> {
        (**self).glance()
    }

    fn sealing(&self, key: StorageKey, holder: HolderId) -> Sealing {
        (**self).sealing(key, holder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_id_is_twelve_hex_digits_and_names_its_key() {
        let key = StorageKey::from_bytes([0xAB; 24]);
        let id = LogId::parse(&key.log_id()).unwrap();
        assert!(id.names(key) && !id.names(StorageKey::from_bytes([0xAC; 24])));
        for bad in ["", "abc", "+bcdefabcdef", "abcdefabcdeg", "abcdefabcdef0"] {
            assert_eq!(LogId::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_page_is_read_back_from_its_text_or_refused() {
        let key = StorageKey::from_bytes([7; 24]);
        let page = Page::from_text(Page::at(-3, key).as_text());
        assert_eq!(page.place(), Some((-3, key)));
        for bad in ["", ".", "1.", "x.AAAA", "1.!!"] {
            assert_eq!(Page::from_text(bad).place(), None, "{bad}");
        }
    }
}
