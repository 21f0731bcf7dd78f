//! The scripts: what goes in, and what each reply code means.
//!
//! This is the only place that knows reply codes. The headers of the Lua files name the same ones,
//! and a test compares the two.

use std::sync::LazyLock;
use std::time::Duration;

use ::redis::aio::MultiplexedConnection;
use ::redis::{Cmd, RedisError, RedisResult, Value};
use bytes::Bytes;

use crate::record::{
    Claim, ClaimOutcome, CompleteOutcome, Completion, Effects, Finding, Forget, ForgetOutcome,
    Grant, Millis, OnExpired, Owner, Release, ReleaseOutcome, RenewOutcome, Renewal, Resolution,
    ResolveOutcome, Seen, Terms, Unsettled, Verdict, millis,
};
use crate::token::{Attempt, Fence, HolderId};

/// A Lua script and the name that Redis caches it under.
#[derive(Debug)]
pub(super) struct Script {
    text: &'static str,
    sha: LazyLock<String>,
}

macro_rules! scripts {
    ($($name:ident $file:literal),+ $(,)?) => {$(
        static $name: Script = {
            const TEXT: &str = include_str!(concat!("../../../lua/", $file));
            Script {
                text: TEXT,
                sha: LazyLock::new(|| ::redis::Script::new(TEXT).get_hash().to_owned()),
            }
        };
    )+};
}

scripts! {
    CLAIM "claim.lua",
    RENEW "renew.lua",
    COMPLETE "complete.lua",
    RELEASE "release.lua",
    RESOLVE "resolve.lua",
    READY "ready.lua",
    LOOK "look.lua",
    FORGET "forget.lua",
    NOTE "note.lua",
}

macro_rules! codes {
    ($($name:ident { $($code:ident = $number:literal),+ $(,)? })+) => {$(
        #[derive(Clone, Copy, Debug)]
        enum $name { $($code),+ }

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
    ReleaseCode { Released = 1, NotHeld = 2, Unreadable = 3 }
    ResolveCode { Resolved = 1, Changed = 2, Unreadable = 3 }
    ReadyCode { Ready = 1, TooOld = 2 }
    LookCode { Found = 1, Absent = 2 }
    ForgetCode { Forgotten = 1, Absent = 2, InFlight = 3, Changed = 4, Unreadable = 5 }
    NoteCode { Noted = 1 }
}

/// What a script answered cannot be understood. It ran, so nobody knows what it did.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the script's reply is none that this release knows")]
pub(super) struct BadReply;

/// How many replicas have to have a write before it is believed, and how long it waits for them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Wait {
    pub(super) replicas: u32,
    /// At least a millisecond: zero would be for ever.
    pub(super) milliseconds: u64,
}

/// A write may not survive a failover.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{confirmed} of the {needed} replicas it takes confirmed the write in time")]
pub(super) struct TooFewReplicas {
    pub(super) confirmed: u32,
    pub(super) needed: u32,
}

/// What came back of a call that the server answered.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) value: Value,
    /// How many replicas had the write when the wait was over. `None` if nobody asked.
    pub(super) replicas: Option<u32>,
}

/// One run of a script: everything that has to be sent, ready to be sent more than once.
pub(super) struct Call {
    script: &'static Script,
    arguments: Cmd,
    key: String,
    wait: Option<Wait>,
    in_full: bool,
}

impl Call {
    fn new(script: &'static Script, key: &str) -> Self {
        let mut arguments = Cmd::new();
        arguments.arg("EVALSHA").arg(script.sha.as_str()).arg(1).arg(key);
        Self { script, arguments, key: key.to_owned(), wait: None, in_full: false }
    }

    /// A command on one key, its first argument. It goes the way that scripts go.
    pub(super) fn plain(command: Cmd) -> Self {
        let key = match command.args_iter().nth(1) {
            Some(::redis::Arg::Simple(key)) => std::str::from_utf8(key).unwrap_or_default(),
            // The other kind stands for the cursor of a scan.
            Some(_) | None => "",
        };
        let key = key.to_owned();
        // Nobody answers a plain command with NOSCRIPT, so the script is never sent.
        Self { script: &READY, arguments: command, key, wait: None, in_full: false }
    }

    /// Asks how many replicas have what the script wrote.
    pub(super) fn waiting(mut self, wait: Option<Wait>) -> Self {
        self.wait = wait;
        self
    }

    /// Sends the text at once, as after every restart of the server.
    pub(super) fn in_full(mut self) -> Self {
        self.in_full = true;
        self
    }

    pub(super) fn waits(&self) -> bool {
        self.wait.is_some()
    }

    /// How far the replicas fell short of what was asked for.
    pub(super) fn shortfall(&self, answer: &Answer) -> Option<TooFewReplicas> {
        let needed = self.wait?.replicas;
        let confirmed = answer.replicas.unwrap_or(0);
        (confirmed < needed).then_some(TooFewReplicas { confirmed, needed })
    }

    /// The one key that the script touches.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    fn arg(mut self, bytes: &[u8]) -> Self {
        self.arguments.arg(bytes);
        self
    }

    fn number(mut self, number: u64) -> Self {
        self.arguments.arg(number);
        self
    }

    fn lasting(self, milliseconds: u64) -> Self {
        // SET refuses an expiry of zero and one that overflows; ten thousand years are for ever.
        self.number(milliseconds.clamp(1, MAX_EXPIRY))
    }

    /// Runs the script. By its hash first; a server that does not know the hash gets the text, on
    /// the same connection and to the same key. `SCRIPT LOAD` would go to every node of a cluster.
    ///
    /// `asking` is for a node that takes a slot over and has been named by the one that gives it.
    pub(super) async fn send(
        &self,
        connection: &mut MultiplexedConnection,
        asking: bool,
    ) -> RedisResult<Answer> {
        if self.in_full {
            return self.send_once(&self.with_text(), connection, asking).await;
        }
        match self.send_once(&self.arguments, connection, asking).await {
            Err(error) if error.code() == Some("NOSCRIPT") => {
                self.send_once(&self.with_text(), connection, asking).await
            }
            reply => reply,
        }
    }

    async fn send_once(
        &self,
        script: &Cmd,
        connection: &mut MultiplexedConnection,
        asking: bool,
    ) -> RedisResult<Answer> {
        if self.wait.is_none() && !asking {
            let value = script.query_async(connection).await?;
            return Ok(Answer { value, replicas: None });
        }
        // One pipeline is one write on one connection. WAIT counts what its own connection wrote: on
        // another one it would be content at once.
        let mut pipeline = ::redis::pipe();
        if asking {
            pipeline.cmd("ASKING");
        }
        pipeline.add_command(script.clone());
        if let Some(wait) = self.wait {
            pipeline.cmd("WAIT").arg(wait.replicas).arg(wait.milliseconds);
        }
        let replies = pipeline.len();
        let mut replies = connection.send_packed_commands(&pipeline, 0, replies).await?.into_iter();
        if asking {
            replies.next();
        }
        let value = match replies.next() {
            Some(Value::ServerError(error)) => return Err(error.into()),
            Some(value) => value,
            None => Value::Nil,
        };
        let replicas = self.wait.map(|_| match replies.next() {
            Some(Value::Int(replicas)) => u32::try_from(replicas).unwrap_or(u32::MAX),
            // An error, from a user without the right to WAIT or a server without the command.
            _ => 0,
        });
        Ok(Answer { value, replicas })
    }

    fn with_text(&self) -> Cmd {
        let mut cmd = Cmd::new();
        cmd.arg("EVAL").arg(self.script.text);
        for argument in self.arguments.args_iter().skip(2) {
            // The other kind stands for the cursor of a scan, and no script call has one.
            if let ::redis::Arg::Simple(bytes) = argument {
                cmd.arg(bytes);
            }
        }
        cmd
    }
}

const MAX_EXPIRY: u64 = 1 << 48;

/// True if the key holds something else than a string. It is foreign, so the record cannot be read;
/// a script finds out before it writes anything.
fn is_foreign_type(error: &RedisError) -> bool {
    error.code() == Some("WRONGTYPE")
}

/// What a verb makes of a reply, or of an error that is an outcome.
pub(super) fn outcome<T>(
    reply: RedisResult<Value>,
    unreadable: T,
    read: impl FnOnce(&mut Reply) -> Result<T, BadReply>,
) -> RedisResult<Result<T, BadReply>> {
    match reply {
        Ok(value) => Ok(Reply::new(value).and_then(|mut reply| read(&mut reply))),
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

fn forget_in_flight(terms: &Terms) -> u64 {
    millis(terms.lease).saturating_add(millis(terms.unknown_retention))
}

fn lease(terms: &Terms) -> u64 {
    millis(terms.lease).min(MAX_EXPIRY)
}

fn fingerprints(owner: &crate::fingerprint::Fingerprints) -> Vec<u8> {
    let all = owner.as_slice();
    let mut bytes = Vec::with_capacity(all.len() * FINGERPRINT_LENGTH);
    for fingerprint in all {
        bytes.extend_from_slice(fingerprint.recipe().as_bytes());
        bytes.extend_from_slice(fingerprint.digest());
    }
    bytes
}

/// Recipe id and digest.
const FINGERPRINT_LENGTH: usize = 36;

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

pub(super) fn claim(key: &str, claim: &Claim) -> Call {
    let on_expired = match claim.on_expired {
        OnExpired::Refuse => 1,
        OnExpired::Reexecute => 2,
    };
    let effects = match claim.effects {
        Effects::Anywhere => 1,
        Effects::Marked => 2,
    };
    Call::new(&CLAIM, key)
        .arg(claim.holder.as_bytes())
        .arg(&fingerprints(&claim.fingerprints))
        .number(lease(&claim.terms))
        .lasting(forget_in_flight(&claim.terms))
        .number(on_expired)
        .number(effects)
}

pub(super) fn claimed(reply: &mut Reply) -> Result<ClaimOutcome<Grant>, BadReply> {
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

pub(super) fn renew(key: &str, by: &Owner, renewal: &Renewal) -> Call {
    let fingerprint = fingerprints(&by.fingerprints);
    let call = Call::new(&RENEW, key)
        .arg(&fingerprint[..FINGERPRINT_LENGTH])
        .arg(&owner(by))
        .number(lease(&renewal.terms))
        .lasting(forget_in_flight(&renewal.terms));
    match &renewal.checkpoint {
        Some(checkpoint) => call.arg(checkpoint),
        None => call,
    }
}

pub(super) fn renewed(reply: &mut Reply) -> Result<RenewOutcome, BadReply> {
    Ok(match RenewCode::of(reply.code)? {
        RenewCode::Renewed => RenewOutcome::Renewed,
        RenewCode::Restored => RenewOutcome::Restored,
        RenewCode::Lost => RenewOutcome::Lost,
        RenewCode::Unreadable => RenewOutcome::Unreadable,
    })
}

pub(super) fn complete(key: &str, by: &Owner, completion: &Completion) -> Call {
    Call::new(&COMPLETE, key)
        .arg(&fingerprints(&by.fingerprints))
        .arg(&owner(by))
        .lasting(millis(completion.terms.retention))
        .arg(&completion.response)
}

pub(super) fn completed(reply: &mut Reply) -> Result<CompleteOutcome, BadReply> {
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

pub(super) fn release(key: &str, by: &Owner, release: &Release) -> Call {
    let verdict = match release.verdict {
        Verdict::NoEffect => 1,
        Verdict::Unknown => 2,
    };
    Call::new(&RELEASE, key)
        .arg(by.holder.as_bytes())
        .lasting(millis(release.terms.retention))
        .number(verdict)
}

pub(super) fn released(reply: &mut Reply) -> Result<ReleaseOutcome, BadReply> {
    Ok(match ReleaseCode::of(reply.code)? {
        ReleaseCode::Released => ReleaseOutcome::Released,
        ReleaseCode::NotHeld => ReleaseOutcome::NotHeld,
        ReleaseCode::Unreadable => ReleaseOutcome::Unreadable,
    })
}

pub(super) fn resolve(key: &str, resolution: &Resolution) -> Call {
    let call = Call::new(&RESOLVE, key)
        .arg(resolution.holder.as_bytes())
        .number(u64::from(resolution.attempt.number()))
        .lasting(millis(resolution.terms.retention));
    match &resolution.finding {
        Finding::Happened(response) => call.arg(response),
        Finding::NothingHappened => call,
    }
}

pub(super) fn resolved(reply: &mut Reply) -> Result<ResolveOutcome, BadReply> {
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

pub(super) fn ready(key: &str) -> Call {
    Call::new(&READY, key).lasting(READY_MARK)
}

/// How long the mark of a readiness check stays, in milliseconds: no time at all, but a whole second
/// so that it can be seen by somebody who looks for it.
const READY_MARK: u64 = 1_000;

pub(super) fn readiness(reply: &mut Reply) -> Result<Readiness, BadReply> {
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
        left: Option<u64>,
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
pub(super) fn look(key: &str, first: Option<usize>) -> Call {
    match first {
        Some(first) => Call::new(&LOOK, key).number(first.saturating_sub(1) as u64),
        None => Call::new(&LOOK, key).arg(b"-1"),
    }
}

pub(super) fn looked(reply: &mut Reply) -> Result<Looked, BadReply> {
    let (code, now) = (LookCode::of(reply.code)?, Millis(reply.number()?));
    Ok(match code {
        LookCode::Absent => Looked::Absent { now },
        LookCode::Found => {
            let Some(Value::Int(left)) = reply.values.next() else { return Err(BadReply) };
            let length = usize::try_from(reply.number()?).map_err(|_| BadReply)?;
            Looked::Found { now, left: u64::try_from(left).ok(), length, bytes: reply.bytes()? }
        }
    })
}

pub(super) fn forget(key: &str, forget: &Forget) -> Call {
    match &forget.seen {
        Seen::Record(sighting) => Call::new(&FORGET, key).arg(&sighting.mark()),
        Seen::Unreadable => Call::new(&FORGET, key).arg(b""),
    }
}

pub(super) fn forgotten(reply: &mut Reply) -> Result<ForgetOutcome, BadReply> {
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
pub(super) fn note(key: &str, arguments: [&[u8]; 6], length: u64) -> Call {
    arguments.iter().fold(Call::new(&NOTE, key), |call, bytes| call.arg(bytes)).number(length)
}

pub(super) fn noted(reply: &mut Reply) -> Result<(), BadReply> {
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
        let claim = |values| reply(values).and_then(|mut reply| claimed(&mut reply));
        assert_eq!(claim(vec![Value::Int(7)]), Err(BadReply));
        assert_eq!(claim(vec![Value::Int(2)]), Err(BadReply));
        assert_eq!(claim(vec![Value::Int(5), Value::BulkString(vec![0; 15])]), Err(BadReply));
    }

    #[test]
    fn the_text_is_sent_with_the_same_key_and_arguments() {
        let call = Call::new(&RELEASE, "idem:{k}").arg(&[0, 255]).lasting(0).number(2);
        let mut expected = Cmd::new();
        expected.arg("EVAL").arg(RELEASE.text).arg(1).arg("idem:{k}").arg(&[0_u8, 255]);
        expected.arg(1).arg(2);
        assert_eq!(call.with_text().get_packed_command(), expected.get_packed_command());
    }

    #[test]
    fn a_number_beyond_six_bytes_is_the_greatest_of_six_bytes() {
        assert_eq!(six_bytes(u64::MAX), [255; 6]);
        assert_eq!(six_bytes(258), [0, 0, 0, 0, 1, 2]);
    }
}
