//! What is shown of a record, as the router and the program write it in JSON.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;

use super::operator::{ChangeId, Made, Shown, Version};
use super::time::rfc3339;
use crate::record::{Millis, Sighting, Standing};
use crate::response::{StoredBody, StoredResponse};
use crate::store::{Contents, Entry, Listing, Source, TrailEntry};

/// How much is shown.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "there is nothing in between")]
pub enum Detail {
    /// State, numbers and times. Nothing that came from a client or a handler but the status.
    #[default]
    Facts,
    /// Headers and body of the stored response as well.
    Contents,
}

/// In words where a record stands, for people.
#[must_use]
pub fn state_of(sighting: &Sighting, now: Millis) -> &'static str {
    match (sighting.standing, sighting.lease_is_over(now)) {
        (Standing::InFlight, false) => "in flight",
        (Standing::Untouched, false) => "in flight, no effect yet",
        (Standing::InFlight, true) => "unknown, lease over",
        (Standing::Untouched, true) => "no effect, lease over",
        (Standing::Open, _) => "open",
        (Standing::Indeterminate, _) => "outcome unknown",
        (Standing::Completed, _) => "completed",
    }
}

/// One record.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct RecordView {
    /// 32 characters: the storage key.
    pub storage_key: String,
    /// 12 hex digits: what logs and *outcome unknown* answers call it.
    pub reference: String,
    /// `in_flight`, `open`, `indeterminate`, `completed` or `unreadable`.
    pub state: &'static str,
    /// The same for people.
    pub summary: &'static str,
    /// True if nobody knows what became of it.
    pub outcome_unknown: bool,
    /// What a change has to name.
    pub version: String,
    /// Which run it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<u32>,
    /// When the first claim was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
    /// Since when it stands there; in flight or unknown, since when the last attempt runs or ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// How long that is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_seconds: Option<u64>,
    /// In flight: when the lease ends, or ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_until: Option<String>,
    /// When the store forgets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires: Option<String>,
    /// The status of the stored response.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// How many bytes of its body are kept; none if it was not kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_bytes: Option<usize>,
    /// How many bytes a handler noted down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint_bytes: Option<usize>,
    /// True if the contents are sealed, and the key is not here.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub sealed: bool,
    /// The stored response, if it was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response: Option<ResponseView>,
    /// What the handler gives to its providers, by the names of the effects: empty until somebody who has the client's key
    /// puts them there, as [`DownstreamSeed`](crate::DownstreamSeed) makes them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub downstream_keys: BTreeMap<String, String>,
}

/// A stored response.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct ResponseView {
    /// Its status.
    pub status: u16,
    /// Its headers, in order.
    pub headers: Vec<(String, String)>,
    /// Its body, if that is UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// Its body, if it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_base64: Option<String>,
}

impl ResponseView {
    fn of(response: &StoredResponse) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let headers = response.headers().iter();
        let headers = headers.map(|(name, value)| (name.to_string(), text(value.as_bytes())));
        let (body, body_base64) = match response.body() {
            StoredBody::NotKept => (None, None),
            StoredBody::Kept(bytes) => match std::str::from_utf8(bytes) {
                Ok(text) => (Some(text.to_owned()), None),
                Err(_) => (None, Some(STANDARD.encode(bytes))),
            },
        };
        let status = response.status().as_u16();
        Self { status, headers: headers.collect(), body, body_base64 }
    }
}

fn state_name(standing: Standing) -> &'static str {
    match standing {
        Standing::InFlight | Standing::Untouched => "in_flight",
        Standing::Open => "open",
        Standing::Indeterminate => "indeterminate",
        Standing::Completed => "completed",
    }
}

impl RecordView {
    /// A record as it was shown.
    #[must_use]
    pub fn of(shown: &Shown, detail: Detail) -> Self {
        let Some(record) = shown.record() else { return Self::unreadable(shown) };
        let entry = Entry { key: shown.key(), sighting: record.sighting() };
        let response = shown.response().ok().flatten();
        let body_bytes = response.as_ref().and_then(|response| match response.body() {
            StoredBody::Kept(bytes) => Some(bytes.len()),
            StoredBody::NotKept => None,
        });
        let noted = record.checkpoint.len();
        Self {
            expires: shown.expires().map(rfc3339),
            status: response.as_ref().map(|response| response.status().as_u16()),
            body_bytes,
            checkpoint_bytes: (noted > 0).then_some(noted),
            sealed: shown.contents() == Contents::Sealed,
            response: response
                .as_ref()
                .filter(|_| detail == Detail::Contents)
                .map(ResponseView::of),
            ..Self::of_entry(&entry, shown.now())
        }
    }

    /// An entry of a listing.
    #[must_use]
    pub fn of_entry(entry: &Entry, now: Millis) -> Self {
        let Entry { key, sighting } = entry;
        let since = sighting.since(now);
        let in_flight = matches!(sighting.standing, Standing::InFlight | Standing::Untouched);
        Self {
            storage_key: key.to_text(),
            reference: key.log_id(),
            state: state_name(sighting.standing),
            summary: state_of(sighting, now),
            outcome_unknown: sighting.is_unknown(now),
            version: Version::of(sighting).to_string(),
            attempt: Some(sighting.attempt.number()),
            created: Some(rfc3339(sighting.created)),
            since: Some(rfc3339(since)),
            age_seconds: Some(now.since(since).as_secs()),
            lease_until: in_flight.then(|| rfc3339(sighting.at)),
            expires: None,
            status: None,
            body_bytes: None,
            checkpoint_bytes: None,
            sealed: false,
            response: None,
            downstream_keys: BTreeMap::new(),
        }
    }

    fn unreadable(shown: &Shown) -> Self {
        Self {
            storage_key: shown.key().to_text(),
            reference: shown.key().log_id(),
            state: "unreadable",
            summary: "unreadable",
            outcome_unknown: false,
            version: shown.version().to_string(),
            attempt: None,
            created: None,
            since: None,
            age_seconds: None,
            lease_until: None,
            expires: shown.expires().map(rfc3339),
            status: None,
            body_bytes: None,
            checkpoint_bytes: None,
            sealed: false,
            response: None,
            downstream_keys: BTreeMap::new(),
        }
    }
}

/// One page of a listing.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct ListingView {
    /// The records.
    pub records: Vec<RecordView>,
    /// What to give as `page` for the next ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_page: Option<String>,
    /// How fresh it is.
    pub index: IndexView,
}

/// How fresh a listing is.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct IndexView {
    /// `direct`: always right. `audit`: made by a pass over all records. `none`: there was no pass yet.
    pub kind: &'static str,
    /// How long ago the pass began: what became overdue since may be missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_seconds: Option<u64>,
    /// When the pass began.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started: Option<String>,
    /// When it was complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<String>,
    /// How many records it read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scanned: Option<u64>,
    /// How many found no place in the index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_out: Option<u64>,
}

impl ListingView {
    /// A page as it was listed.
    #[must_use]
    pub fn of(listing: &Listing) -> Self {
        let now = listing.now;
        let records = listing.entries.iter().map(|entry| RecordView::of_entry(entry, now));
        Self {
            records: records.collect(),
            next_page: listing.more.as_ref().map(|page| page.as_text().to_owned()),
            index: IndexView::of(listing.source, now),
        }
    }
}

impl IndexView {
    /// The index of a listing.
    #[must_use]
    pub fn of(source: Source, now: Millis) -> Self {
        let kind = match source {
            Source::Direct => "direct",
            Source::Index(_) => "audit",
            Source::NoIndex => "none",
        };
        let pass = match source {
            Source::Index(pass) => Some(pass),
            Source::Direct | Source::NoIndex => None,
        };
        let age = |started| -> Duration { now.since(started) };
        Self {
            kind,
            age_seconds: pass.map(|pass| age(pass.started).as_secs()),
            started: pass.map(|pass| rfc3339(pass.started)),
            ended: pass.map(|pass| rfc3339(pass.ended)),
            scanned: pass.map(|pass| pass.scanned),
            left_out: pass.map(|pass| pass.left_out),
        }
    }
}

/// A change that was made.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct MadeView {
    /// Its name in the trail.
    pub change: String,
    /// False if the trail does not know that it succeeded.
    pub outcome_noted: bool,
    /// Until when the record is kept now, at least; none if it was forgotten.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept_until: Option<String>,
}

impl MadeView {
    /// A change that was made.
    #[must_use]
    pub fn of(made: &Made) -> Self {
        Self {
            change: made.change.to_string(),
            outcome_noted: made.outcome_noted,
            kept_until: made.kept_until.map(rfc3339),
        }
    }
}

/// An entry of the trail.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct TrailView {
    /// The name of the change.
    pub change: String,
    /// When it was begun.
    pub at: String,
    /// Who made it.
    pub who: String,
    /// Why.
    pub why: String,
    /// `settle done`, `settle not applied` or `forget`.
    pub action: String,
    /// The record's key.
    pub storage_key: String,
    /// What logs call it.
    pub reference: String,
    /// `done`, or why not; none if nobody knows.
    pub outcome: Option<String>,
}

impl TrailView {
    /// An entry as the store keeps it.
    #[must_use]
    pub fn of(entry: &TrailEntry) -> Self {
        Self {
            change: ChangeId::from_bytes(entry.id).to_string(),
            at: rfc3339(entry.at),
            who: entry.who.to_string(),
            why: entry.why.to_string(),
            action: entry.action.to_string(),
            storage_key: entry.key.to_text(),
            reference: entry.key.log_id(),
            outcome: entry.outcome.as_deref().map(str::to_owned),
        }
    }
}
