//! A claim by a plain command, before any script.
//!
//! `SET … NX GET` writes the record of a first claim if nothing is there, and else returns what is there. A
//! script that does the same costs the server about twice as much, and most claims need no more: the key is new,
//! or has its answer. What the reply shows is judged here, by the same rules; whatever it takes to change
//! a record that is there is left to the script, which looks again.
//!
//! The clock comes along in the same write: TIME before, whose answer is the fence of a new claim, and the key's
//! expiry behind, from which a record of a first claim has its times. TIME comes first, so that the
//! fence is never greater than what others will find in the record.

use ::redis::Value;
use bytes::Bytes;

use super::call::Call;
use super::connect::redis_error;
use super::script::BadReply;
use super::words::Words;
use crate::error::StoreError;
use crate::record::{self, Change, Claim, ClaimOutcome, Current, Grant, Millis, millis};

/// What a plain claim found.
#[derive(Debug, PartialEq)]
pub(super) struct Seen {
    /// When it came.
    now: Millis,
    /// The record that was there; none if it was written now.
    found: Option<Bytes>,
    /// When the record goes.
    expires: Option<Millis>,
}

/// The bytes of a claim, but for the key.
const ROOM: usize = 176;

/// A plain claim. `None` if its times do not fit into the record of a first claim.
pub(super) fn plain(key: &[u8], claim: &Claim) -> Option<Call> {
    let record = record::first(claim)?;
    let mut set = Words::with_room(ROOM + key.len());
    set.word(b"SET").word(key).word(&record).word(b"NX").word(b"GET").word(b"PX");
    set.number(kept_for(claim));
    Some(Call::plain(set).timed())
}

/// The same without the claim, for a server that takes no writes.
pub(super) fn look(key: &[u8]) -> Call {
    let mut get = Words::default();
    get.word(b"GET").word(key);
    Call::plain(get).timed()
}

fn kept_for(claim: &Claim) -> u64 {
    millis(claim.terms.lease).saturating_add(millis(claim.terms.unknown_retention))
}

pub(super) fn seen(reply: Value) -> Result<Seen, BadReply> {
    let Value::Array(replies) = reply else { return Err(BadReply) };
    let Ok([time, found, expires]) = <[Value; 3]>::try_from(replies) else { return Err(BadReply) };
    let found = if let Value::BulkString(bytes) = found {
        Some(bytes.into())
    } else if found == Value::Nil {
        None
    } else {
        return Err(BadReply);
    };
    // An error, if the user may not ask: what needs the answer is left to the script, which says so.
    let expires = if let Value::Int(expires) = expires { expires } else { -1 };
    let expires = u64::try_from(expires).ok().map(Millis);
    Ok(Seen { now: now(&time).ok_or(BadReply)?, found, expires })
}

/// The answer to TIME: seconds, and microseconds of the next one.
pub(super) fn now(time: &Value) -> Option<Millis> {
    let Value::Array(parts) = time else { return None };
    let number = |part: &Value| {
        let Value::BulkString(digits) = part else { return None };
        digits.iter().try_fold(0_u64, |number, digit| {
            let digit = digit.checked_sub(b'0').filter(|&digit| digit < 10)?;
            number.checked_mul(10)?.checked_add(u64::from(digit))
        })
    };
    let [seconds, micros] = parts.as_slice() else { return None };
    Some(Millis(number(seconds)?.saturating_mul(1_000) + number(micros)? / 1_000))
}

impl Seen {
    /// What stands for something that is no string: no record.
    pub(super) fn foreign() -> Self {
        Self { now: Millis(0), found: Some(Bytes::new()), expires: None }
    }

    pub(super) fn is_new(&self) -> bool {
        self.found.is_none()
    }

    /// What a claim makes of it; `None` if that takes the script.
    pub(super) fn judge(self, claim: &Claim) -> Option<ClaimOutcome<Grant>> {
        let Self { now, found, expires } = self;
        let Some(found) = found else {
            // The clock went back just now: the script makes up its mind what the time is.
            let due = now.0.saturating_add(kept_for(claim));
            let in_order = expires.is_some_and(|expires| expires.0 >= due);
            return in_order.then(|| ClaimOutcome::Acquired(Grant::first(now)));
        };
        let current = Current::from_stored(Some(record::written_out(found, expires)));
        let step = record::claim(current, now, claim);
        matches!(step.change, Change::Keep).then_some(step.outcome)
    }
}

/// True if the server takes no writes for now, or has no room. An answer that is there can still be read.
pub(super) fn writes_are_refused(error: &StoreError) -> bool {
    redis_error(error)
        .is_some_and(|said| matches!(said.code(), Some("OOM" | "MISCONF" | "NOREPLICAS")))
}
