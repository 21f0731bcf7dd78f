//! The scripts: what goes in, and what each reply code means.
//!
//! This is the only place that knows reply codes. The headers of the Lua files name the same ones,
//! and a test compares the two.

use std::time::Duration;

use ::redis::{RedisError, RedisResult, Value};
use bytes::Bytes;

use super::call::{
    AMEND, CLAIM, COMPLETE, COMPLETE_LARGE, Call, FORGET, LOOK, MAX_EXPIRY, NOTE, READY, RELEASE,
    RENEW, RESOLVE,
};
use crate::fingerprint::{Fingerprint, Fingerprints};
use crate::mistakes::{Mistake, made};
use crate::record::{
    self, Amend, Claim, ClaimOutcome, CompleteOutcome, Completion, Effects, Finding, Forget,
    ForgetOutcome, Grant, Millis, OnExpired, Owner, Release, ReleaseOutcome, RenewOutcome, Renewal,
    Resolution, ResolveOutcome, Seen, Terms, Unsettled, Verdict, millis,
};
use crate::token::{Attempt, Fence, HolderId};

macro_rules! codes {
    ($($name:ident { $($code:ident = $number:literal),+ $(,)? })+) => {$(
        #[derive(Clone, Copy, Debug)]
        enum $name { $($code = $number),+ }

        impl $name {
            fn of(number: i64) -> Result<Self, BadReply> {
                match number {
                    $($number => Ok(Self::$code),)+
                    _ => Err(BadReply),
                }
            }
        }
    )+};
}

// The table. Names and numbers are those of the headers in lua/.
codes! {
    ClaimCode {
        Acquired = 1, InFlight = 2, Completed = 3, Mismatch = 4, Indeterminate = 5, Unreadable = 6,
    }
    RenewCode { Renewed = 1, Restored = 2, Lost = 3, Unreadable = 4 }
    CompleteCode {
        Stored = 1, Healed = 2, Restored = 3, Superseded = 4, Mismatch = 5, Lost = 6,
        Unreadable = 7,
    }
    CompleteLargeCode {
        Stored = 1, Healed = 2, Restored = 3, Superseded = 4, Mismatch = 5, Lost = 6,
        Unreadable = 7, NothingBeside = 8,
    }
    ReleaseCode { Released = 1, NotHeld = 2, Unreadable = 3 }
    ResolveCode { Resolved = 1, Changed = 2, Unreadable = 3 }
    ReadyCode { Ready = 1, TooOld = 2 }
    LookCode { Found = 1, Absent = 2 }
    ForgetCode { Forgotten = 1, Absent = 2, InFlight = 3, Changed = 4, Unreadable = 5 }
    AmendCode { Resolved = 1, Changed = 2, Unreadable = 3 }
    NoteCode { Noted = 1 }
}

/// What a script answered cannot be understood. It ran, so nobody knows what it did.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the script's reply is none that this release knows")]
pub(super) struct BadReply;

/// True if the key holds something else than a string. It is foreign, so the record cannot be read;
/// a script finds out before it writes anything.
fn is_foreign_type(error: &RedisError) -> bool {
    error.code() == Some("WRONGTYPE")
}

/// What a verb makes of a reply, or of an error that is an outcome.
pub(super) fn outcome<T>(
    reply: RedisResult<Value>,
    unreadable: T,
    read: impl FnOnce(Value) -> Result<T, BadReply>,
) -> RedisResult<Result<T, BadReply>> {
    match reply {
        Ok(value) => Ok(read(value)),
        Err(error) if is_foreign_type(&error) => Ok(Ok(unreadable)),
        Err(error) => Err(error),
    }
}

/// The values of a reply, one after another.
pub(super) struct Reply {
    code: i64,
    values: std::vec::IntoIter<Value>,
}

impl Reply {
    fn new(value: Value) -> Result<Self, BadReply> {
        let Value::Array(values) = value else { return Err(BadReply) };
        let mut values = values.into_iter();
        let Some(Value::Int(code)) = values.next() else { return Err(BadReply) };
        Ok(Self { code, values })
    }

    fn number(&mut self) -> Result<u64, BadReply> {
        match self.values.next() {
            Some(Value::Int(number)) => u64::try_from(number).map_err(|_| BadReply),
            _ => Err(BadReply),
        }
    }

    fn bytes(&mut self) -> Result<Bytes, BadReply> {
        match self.values.next() {
            Some(Value::BulkString(bytes)) => Ok(bytes.into()),
            _ => Err(BadReply),
        }
    }

    fn attempt(&mut self) -> Result<Attempt, BadReply> {
        let number = u32::try_from(self.number()?).map_err(|_| BadReply)?;
        Ok(Attempt::from_number(number))
    }

    fn fence(&mut self) -> Result<Fence, BadReply> {
        Ok(Fence::from_number(self.number()?))
    }

    fn holder(&mut self) -> Result<HolderId, BadReply> {
        let bytes = self.bytes()?;
        let bytes = bytes.as_ref().try_into().map_err(|_| BadReply)?;
        Ok(HolderId::from_bytes(bytes))
    }
}

/// How long the record of a new lease is kept, in milliseconds.
pub(super) fn forget_in_flight(terms: &Terms) -> u64 {
    if made(Mistake::RedisOneTime) {
        return millis(terms.lease);
    }
    millis(terms.lease).saturating_add(millis(terms.unknown_retention))
}

fn lease(terms: &Terms) -> u64 {
    millis(terms.lease).min(MAX_EXPIRY)
}

/// What the arguments of a call take, but for a response: fingerprint and owner.
const ROOM: usize = 128;

/// Recipe id and digest, as in the record.
fn print(fingerprint: Fingerprint) -> [u8; PRINT_LENGTH] {
    let mut bytes = [0; PRINT_LENGTH];
    bytes[..4].copy_from_slice(fingerprint.recipe().as_bytes());
    bytes[4..].copy_from_slice(fingerprint.digest());
    bytes
}

const PRINT_LENGTH: usize = 36;

/// The fingerprints by older recipes that are accepted beside the current one.
fn accepted(fingerprints: &Fingerprints) -> Vec<u8> {
    fingerprints.as_slice()[1..].iter().flat_map(|&older| print(older)).collect()
}

/// Holder, attempt, fence and time of creation, in the layout of the record.
fn owner(owner: &Owner) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(owner.holder.as_bytes());
    bytes[16..20].copy_from_slice(&owner.attempt.number().to_be_bytes());
    bytes[20..26].copy_from_slice(&six_bytes(owner.fence.number()));
    bytes[26..].copy_from_slice(&six_bytes(owner.created.0));
    bytes
}

fn six_bytes(number: u64) -> [u8; 6] {
    let [_, _, low @ ..] = number.min(Fence::MAX.number()).to_be_bytes();
    low
}

pub(super) fn claim(key: &[u8], claim: &Claim) -> Call {
    let mode = match (claim.effects, claim.on_expired) {
        (Effects::Anywhere, OnExpired::Refuse) => 1,
        (Effects::Anywhere, OnExpired::Reexecute) => 2,
        (Effects::Marked, OnExpired::Refuse) => 3,
        (Effects::Marked, OnExpired::Reexecute) => 4,
    };
    let mut claimant = [0; PRINT_LENGTH + 16];
    claimant[..PRINT_LENGTH].copy_from_slice(&print(claim.fingerprints.current()));
    claimant[PRINT_LENGTH..].copy_from_slice(claim.holder.as_bytes());
    let call = Call::new(&CLAIM, key, ROOM)
        .arg(&claimant)
        .number(lease(&claim.terms))
        .lasting(forget_in_flight(&claim.terms))
        .number(mode);
    match accepted(&claim.fingerprints) {
        older if older.is_empty() => call,
        older => call.arg(&older),
    }
}

pub(super) fn claimed(reply: Value) -> Result<ClaimOutcome<Grant>, BadReply> {
    let mut reply = Reply::new(reply)?;
    Ok(match ClaimCode::of(reply.code)? {
        ClaimCode::Acquired => ClaimOutcome::Acquired(Grant {
            attempt: reply.attempt()?,
            fence: reply.fence()?,
            created: Millis(reply.number()?),
            takeover: reply.number()? == 1,
            checkpoint: reply.bytes()?,
        }),
        ClaimCode::InFlight => {
            ClaimOutcome::InFlight { remaining: Duration::from_millis(reply.number()?) }
        }
        ClaimCode::Completed => ClaimOutcome::Completed(reply.bytes()?),
        ClaimCode::Mismatch => ClaimOutcome::Mismatch,
        ClaimCode::Indeterminate => ClaimOutcome::Indeterminate(Unsettled {
            holder: reply.holder()?,
            attempt: reply.attempt()?,
            fence: reply.fence()?,
            checkpoint: reply.bytes()?,
        }),
        ClaimCode::Unreadable => ClaimOutcome::Unreadable,
    })
}

pub(super) fn renew(key: &[u8], by: &Owner, renewal: &Renewal) -> Call {
    let call = Call::new(&RENEW, key, ROOM)
        .arg(&print(by.fingerprints.current()))
        .arg(&owner(by))
        .number(lease(&renewal.terms))
        .lasting(forget_in_flight(&renewal.terms));
    match &renewal.checkpoint {
        Some(checkpoint) => call.arg(checkpoint),
        None => call,
    }
}

pub(super) fn renewed(reply: Value) -> Result<RenewOutcome, BadReply> {
    let reply = Reply::new(reply)?;
    Ok(match RenewCode::of(reply.code)? {
        RenewCode::Renewed => RenewOutcome::Renewed,
        RenewCode::Restored => RenewOutcome::Restored,
        RenewCode::Lost => RenewOutcome::Lost,
        RenewCode::Unreadable => RenewOutcome::Unreadable,
    })
}

/// Responses from here on are written beside the record. Below, the second command costs more than the
/// copies that it saves.
pub(super) const LARGE: usize = 4_096;

pub(super) fn complete(key: &[u8], by: &Owner, at: Millis, completion: &Completion) -> Call {
    let response = &completion.response;
    let head = record::completed_head(by, at, response.len());
    let (call, large) = if response.len() < LARGE {
        (Call::new(&COMPLETE, key, ROOM + response.len()).parts([&head, response]), None)
    } else {
        (Call::new(&COMPLETE_LARGE, key, ROOM).arg(&head), Some(response.clone()))
    };
    let call = call.lasting(millis(completion.terms.retention));
    let call = match accepted(&by.fingerprints) {
        older if older.is_empty() => call,
        older => call.arg(&older),
    };
    match large {
        None => call,
        Some(response) => call.beside(&COMPLETE, &by.holder.to_text(), response),
    }
}

/// True if the response that a script was to fetch was not there.
pub(super) fn found_nothing_beside(reply: &Value) -> bool {
    const NOTHING: i64 = CompleteLargeCode::NothingBeside as i64;
    matches!(reply, Value::Array(values) if matches!(values[..], [Value::Int(NOTHING)]))
}

pub(super) fn completed(reply: Value) -> Result<CompleteOutcome, BadReply> {
    completion(Reply::new(reply)?)
}

fn completion(mut reply: Reply) -> Result<CompleteOutcome, BadReply> {
    Ok(match CompleteCode::of(reply.code)? {
        CompleteCode::Stored => CompleteOutcome::Stored,
        CompleteCode::Healed => CompleteOutcome::Healed,
        CompleteCode::Restored => CompleteOutcome::Restored,
        CompleteCode::Superseded => CompleteOutcome::Superseded(reply.bytes()?),
        CompleteCode::Mismatch => CompleteOutcome::Mismatch,
        CompleteCode::Lost => CompleteOutcome::Lost,
        CompleteCode::Unreadable => CompleteOutcome::Unreadable,
    })
}

/// The same of a response that was put beside, or went through the other script after all: what both answer
/// has the same codes.
pub(super) fn completed_large(reply: Value) -> Result<CompleteOutcome, BadReply> {
    let reply = Reply::new(reply)?;
    match CompleteLargeCode::of(reply.code)? {
        CompleteLargeCode::NothingBeside => Err(BadReply),
        CompleteLargeCode::Stored | CompleteLargeCode::Healed | CompleteLargeCode::Restored => {
            completion(reply)
        }
        CompleteLargeCode::Superseded | CompleteLargeCode::Mismatch | CompleteLargeCode::Lost => {
            completion(reply)
        }
        CompleteLargeCode::Unreadable => completion(reply),
    }
}

pub(super) fn release(key: &[u8], by: &Owner, release: &Release) -> Call {
    let verdict = match release.verdict {
        Verdict::NoEffect => 1,
        Verdict::Unknown => 2,
    };
    Call::new(&RELEASE, key, ROOM)
        .arg(by.holder.as_bytes())
        .lasting(millis(release.terms.retention))
        .number(verdict)
}

pub(super) fn released(reply: Value) -> Result<ReleaseOutcome, BadReply> {
    let reply = Reply::new(reply)?;
    Ok(match ReleaseCode::of(reply.code)? {
        ReleaseCode::Released => ReleaseOutcome::Released,
        ReleaseCode::NotHeld => ReleaseOutcome::NotHeld,
        ReleaseCode::Unreadable => ReleaseOutcome::Unreadable,
    })
}

pub(super) fn resolve(key: &[u8], resolution: &Resolution) -> Call {
    let call = Call::new(&RESOLVE, key, ROOM)
        .arg(resolution.holder.as_bytes())
        .number(u64::from(resolution.attempt.number()))
        .lasting(millis(resolution.terms.retention));
    match &resolution.finding {
        Finding::Happened(response) => call.arg(response),
        Finding::NothingHappened => call,
    }
}

pub(super) fn resolved(reply: Value) -> Result<ResolveOutcome, BadReply> {
    let reply = Reply::new(reply)?;
    Ok(match ResolveCode::of(reply.code)? {
        ResolveCode::Resolved => ResolveOutcome::Resolved,
        ResolveCode::Changed => ResolveOutcome::Changed,
        ResolveCode::Unreadable => ResolveOutcome::Unreadable,
    })
}

/// What a server says of itself.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Readiness {
    Ready,
    TooOld,
}

/// What a server is asked to do before it counts as ready.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Work {
    /// That it would take a write. Nothing is written to a key that is not there.
    Nothing = 0,
    /// That it takes writes.
    Write = 1,
    /// Every command that a request needs.
    Everything = 2,
}

pub(super) fn ready(key: &[u8], work: Work) -> Call {
    Call::new(&READY, key, ROOM).lasting(READY_MARK).number(work as u64)
}

/// How long the mark of a readiness check stays if it is not removed, in milliseconds.
const READY_MARK: u64 = 1_000;

pub(super) fn readiness(reply: Value) -> Result<Readiness, BadReply> {
    let reply = Reply::new(reply)?;
    Ok(match ReadyCode::of(reply.code)? {
        ReadyCode::Ready => Readiness::Ready,
        ReadyCode::TooOld => Readiness::TooOld,
    })
}

/// What a look came to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Looked {
    Found {
        now: Millis,
        expires: Option<Millis>,
        length: usize,
        bytes: Bytes,
    },
    Absent {
        now: Millis,
    },
    /// Something that is no string.
    Foreign,
}

/// Looks at the first so many bytes, or at all.
pub(super) fn look(key: &[u8], first: Option<usize>) -> Call {
    match first {
        Some(first) => Call::new(&LOOK, key, ROOM).number(first.saturating_sub(1) as u64),
        None => Call::new(&LOOK, key, ROOM).arg(b"-1"),
    }
}

pub(super) fn looked(reply: Value) -> Result<Looked, BadReply> {
    let mut reply = Reply::new(reply)?;
    let (code, now) = (LookCode::of(reply.code)?, Millis(reply.number()?));
    Ok(match code {
        LookCode::Absent => Looked::Absent { now },
        LookCode::Found => {
            let Some(Value::Int(expires)) = reply.values.next() else { return Err(BadReply) };
            let expires = u64::try_from(expires).ok().map(Millis);
            let length = usize::try_from(reply.number()?).map_err(|_| BadReply)?;
            Looked::Found { now, expires, length, bytes: reply.bytes()? }
        }
    })
}

pub(super) fn amend(key: &[u8], amend: &Amend) -> Call {
    Call::new(&AMEND, key, ROOM)
        .arg(&amend.seen.mark())
        .lasting(millis(amend.terms.retention))
        .arg(&amend.response)
}

pub(super) fn amended(reply: Value) -> Result<ResolveOutcome, BadReply> {
    let reply = Reply::new(reply)?;
    Ok(match AmendCode::of(reply.code)? {
        AmendCode::Resolved => ResolveOutcome::Resolved,
        AmendCode::Changed => ResolveOutcome::Changed,
        AmendCode::Unreadable => ResolveOutcome::Unreadable,
    })
}

pub(super) fn forget(key: &[u8], forget: &Forget) -> Call {
    match &forget.seen {
        Seen::Record(sighting) => Call::new(&FORGET, key, ROOM).arg(&sighting.mark()),
        Seen::Unreadable => Call::new(&FORGET, key, ROOM).arg(b""),
    }
}

pub(super) fn forgotten(reply: Value) -> Result<ForgetOutcome, BadReply> {
    let mut reply = Reply::new(reply)?;
    Ok(match ForgetCode::of(reply.code)? {
        ForgetCode::Forgotten => ForgetOutcome::Forgotten,
        ForgetCode::Absent => ForgetOutcome::Absent,
        ForgetCode::InFlight => {
            ForgetOutcome::InFlight { remaining: Duration::from_millis(reply.number()?) }
        }
        ForgetCode::Changed => ForgetOutcome::Changed,
        ForgetCode::Unreadable => ForgetOutcome::Unreadable,
    })
}

/// Adds to the trail; each argument as it stands in the script's header.
pub(super) fn note(key: &[u8], arguments: [&[u8]; 6], length: u64) -> Call {
    let room = arguments.iter().map(|argument| argument.len()).sum();
    let call = Call::new(&NOTE, key, room);
    arguments.iter().fold(call, |call, bytes| call.arg(bytes)).number(length)
}

pub(super) fn noted(reply: Value) -> Result<(), BadReply> {
    let reply = Reply::new(reply)?;
    match NoteCode::of(reply.code)? {
        NoteCode::Noted => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_that_no_release_sends_is_refused() {
        let reply = |values| Reply::new(Value::Array(values));
        assert!(Reply::new(Value::Okay).is_err());
        assert!(reply(vec![]).is_err());
        let claim = |values| claimed(Value::Array(values));
        assert_eq!(claim(vec![Value::Int(7)]), Err(BadReply));
        assert_eq!(claim(vec![Value::Int(2)]), Err(BadReply));
        assert_eq!(claim(vec![Value::Int(5), Value::BulkString(vec![0; 15])]), Err(BadReply));
    }

    #[test]
    fn a_number_beyond_six_bytes_is_the_greatest_of_six_bytes() {
        assert_eq!(six_bytes(u64::MAX), [255; 6]);
        assert_eq!(six_bytes(258), [0, 0, 0, 0, 1, 2]);
    }
}
