//! A claim by a plain command, before any script.
//!
//! `SET … NX GET` writes the record of a first claim if nothing is there, and else returns what is there. A
//! script that does the same costs the server about twice as much, and most claims need no more: the key is new,
//! or has its answer. What the reply shows is judged here, by the same rules; whatever it takes to change
//! a record that is there is left to the script, which looks again.
//!
//! The clock comes along in the same write: TIME before, the moment of a new claim, and the key's expiry behind, from which
//! a record of a first claim has its times. The fence stands in the record, as whoever takes over has to have a
//! greater one, also on another server to which the key has moved and whose clock differs. It is what the clock will
//! say, as far as one can tell from the last time that it was read. If that is far off, the script begins anew.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use ::redis::Value;
use bytes::Bytes;
use tokio::time::Instant;

use super::call::Call;
use super::connect::redis_error;
use super::script::{BadReply, forget_in_flight};
use super::words::Words;
use crate::error::StoreError;
use crate::mistakes::{Mistake, made};
use crate::record::{self, Change, Claim, ClaimOutcome, Current, Grant, Millis, millis};
use crate::token::Fence;

/// For a look, which claims nothing.
pub(super) const ANY_FENCE: Fence = Fence::from_number(0);

/// The server's clock, as it was last read. In a cluster those of all nodes, which should be about the same.
pub(super) struct Clock {
    start: Instant,
    /// What it said at the start, in milliseconds; zero if it was never read.
    offset: AtomicU64,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), offset: AtomicU64::new(0) }
    }

    /// A fence for a claim that is sent now.
    pub(super) fn fence(&self, now: Instant) -> Fence {
        let offset = match self.offset.load(Ordering::Relaxed) {
            // As this machine has it. If that is far off, it is only once.
            0 => return Fence::from_number(of_this_machine().0),
            offset => Millis(offset),
        };
        Fence::from_number(offset.after(now.duration_since(self.start)).0)
    }

    fn learn(&self, said: Millis, heard: Instant) {
        let since = millis(heard.duration_since(self.start));
        self.offset.store(said.0.saturating_sub(since), Ordering::Relaxed);
    }
}

fn of_this_machine() -> Millis {
    Millis(0).after(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// What a plain claim found.
#[derive(Debug, PartialEq)]
pub(super) struct Seen {
    /// When it came.
    now: Millis,
    /// The record that was there; none if it was written now.
    found: Option<Bytes>,
    /// When the record goes.
    expires: Option<Millis>,
    /// The user may not ask when it goes.
    unasked: bool,
}

/// The bytes of a claim, but for the key.
const ROOM: usize = 176;

/// A plain claim. `None` if its times do not fit into the record of a first claim.
pub(super) fn plain(key: &[u8], claim: &Claim, fence: Fence) -> Option<Call> {
    let record = record::first(claim, fence)?;
    let mut set = Words::with_room(ROOM + key.len());
    let key = set.word(b"SET").placed(key);
    set.word(&record).all(&NX_GET_PX).number(forget_in_flight(&claim.terms));
    Some(Call::plain(set, key).timed())
}

/// Only if nothing is there, and what is there otherwise; for so many milliseconds.
static NX_GET_PX: LazyLock<Words> = LazyLock::new(|| {
    let mut words = Words::default();
    words.word(b"NX").word(b"GET").word(b"PX");
    words
});

/// The same without the claim, for a server that takes no writes.
pub(super) fn look(key: &[u8]) -> Call {
    let mut get = Words::default();
    let key = get.word(b"GET").placed(key);
    Call::plain(get, key).timed()
}

pub(super) fn seen(reply: Value) -> Result<Seen, BadReply> {
    let Value::Array(mut replies) = reply else { return Err(BadReply) };
    let [time, found, expires] = &mut replies[..] else { return Err(BadReply) };
    let found = if let Value::BulkString(bytes) = found {
        Some(std::mem::take(bytes).into())
    } else if *found == Value::Nil {
        None
    } else {
        return Err(BadReply);
    };
    let unasked = matches!(expires, Value::ServerError(_));
    let expires = if let Value::Int(expires) = expires { *expires } else { -1 };
    let expires = u64::try_from(expires).ok().map(Millis);
    Ok(Seen { now: now(time).ok_or(BadReply)?, found, expires, unasked })
}

/// The answer to TIME: seconds, and microseconds of the next one; or milliseconds, from a connection of our own.
pub(super) fn now(time: &Value) -> Option<Millis> {
    if let Value::Int(millis) = time {
        return u64::try_from(*millis).ok().map(Millis);
    }
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
        Self { now: Millis(0), found: Some(Bytes::new()), expires: None, unasked: false }
    }

    pub(super) fn is_new(&self) -> bool {
        self.found.is_none()
    }

    /// What a claim makes of it that was sent with this fence, and when it was heard; `None` if that takes the script.
    pub(super) fn judge(
        self,
        claim: &Claim,
        fence: Fence,
        clock: &Clock,
    ) -> (Option<ClaimOutcome<Grant>>, Instant) {
        let heard = Instant::now();
        if self.now.0 > 0 {
            clock.learn(self.now, heard);
        }
        (self.outcome(claim, fence), heard)
    }

    fn outcome(self, claim: &Claim, fence: Fence) -> Option<ClaimOutcome<Grant>> {
        let Self { now, found, expires, unasked } = self;
        let Some(found) = found else {
            // The clock went back just now, or is far from where it was thought to be.
            // Who may not ask has the key all the same, and nothing is left behind; only twins cannot
            // read its times.
            let due =
                expires.or_else(|| unasked.then(|| Millis(now.0 + forget_in_flight(&claim.terms))));
            let made = Millis(due?.0.checked_sub(forget_in_flight(&claim.terms))?);
            let in_order = made >= now && record::is_near(fence, made);
            let in_time = fence.number() <= now.0.saturating_add(record::NEAR);
            // What the record says from then on, which may be the next millisecond.
            let grant = Grant { fence, ..Grant::first(made) };
            return (in_order && in_time).then_some(ClaimOutcome::Acquired(grant));
        };
        // It went, or was changed, between the one look and the other; or the user may not ask.
        if expires.is_none() && record::is_first(&found) {
            return None;
        }
        let current = Current::from_stored(Some(record::written_out(found, expires)));
        if made(Mistake::ScriptUnreadableIsAbsent) && matches!(current, Current::Unreadable(_)) {
            return None;
        }
        let step = record::claim(current, now, claim);
        matches!(step.change, Change::Keep).then_some(step.outcome)
    }
}

/// True if the server takes no writes for now, or has no room. An answer that is there can still be read.
pub(super) fn writes_are_refused(error: &StoreError) -> bool {
    redis_error(error)
        .is_some_and(|said| matches!(said.code(), Some("OOM" | "MISCONF" | "NOREPLICAS")))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fingerprint::{Fingerprint, Fingerprints, RecipeId};
    use crate::record::{Effects, OnExpired, Terms};
    use crate::token::HolderId;

    fn claim() -> Claim {
        let day = Duration::from_secs(24 * 3_600);
        Claim {
            holder: HolderId::random(),
            fingerprints: Fingerprints::one(Fingerprint::from_stored(
                RecipeId::from_bytes([1; 4]),
                [7; 32],
            )),
            terms: Terms {
                lease: Duration::from_secs(30),
                retention: day,
                unknown_retention: day * 7,
            },
            on_expired: OnExpired::Refuse,
            effects: Effects::Anywhere,
        }
    }

    const NOW: Millis = Millis(1_764_457_200_000);

    fn after(claim: &Claim) -> Option<Millis> {
        Some(Millis(NOW.0 + forget_in_flight(&claim.terms)))
    }

    #[test]
    fn a_new_key_is_granted_unless_the_clock_is_far_from_its_fence_or_went_back() {
        let (claim, clock) = (claim(), Clock::new());
        let fence = Fence::from_number(NOW.0 - 3);
        let new =
            |now: u64, expires| Seen { now: Millis(now), found: None, expires, unasked: false };
        match new(NOW.0, after(&claim)).judge(&claim, fence, &clock).0 {
            Some(ClaimOutcome::Acquired(grant)) => {
                assert_eq!(grant, Grant { fence, ..Grant::first(NOW) });
            }
            other => panic!("{other:?}"),
        }
        let next = Millis(NOW.0 + 1 + forget_in_flight(&claim.terms));
        match new(NOW.0, Some(next)).judge(&claim, fence, &clock).0 {
            Some(ClaimOutcome::Acquired(grant)) => assert_eq!(grant.created, Millis(NOW.0 + 1)),
            other => panic!("{other:?}"),
        }
        for far in [NOW.0 + 998, NOW.0 - 1_004] {
            let expires = Some(Millis(far + forget_in_flight(&claim.terms)));
            assert_eq!(new(far, expires).judge(&claim, fence, &clock).0, None, "{far}");
        }
        let back = Some(Millis(NOW.0 + forget_in_flight(&claim.terms) - 1));
        assert_eq!(new(NOW.0, back).judge(&claim, fence, &clock).0, None);
        assert_eq!(new(NOW.0, None).judge(&claim, fence, &clock).0, None);
        let unasked = Seen { unasked: true, ..new(NOW.0, None) };
        assert!(matches!(unasked.judge(&claim, fence, &clock).0, Some(ClaimOutcome::Acquired(_))));
    }

    #[test]
    fn a_first_claim_whose_expiry_is_not_known_is_left_to_the_script() {
        let (ours, theirs, clock) = (claim(), claim(), Clock::new());
        let fence = Fence::from_number(NOW.0 - 3);
        let found = record::first(&theirs, fence).unwrap();
        let found = Some(Bytes::copy_from_slice(&found));
        let seen = |expires| Seen { now: NOW, found: found.clone(), expires, unasked: false };
        assert_eq!(seen(None).judge(&ours, fence, &clock).0, None);
        match seen(after(&theirs)).judge(&ours, fence, &clock).0 {
            Some(ClaimOutcome::InFlight { remaining }) => assert_eq!(remaining, theirs.terms.lease),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_fence_is_what_the_clock_will_say_by_the_last_time_that_it_was_read() {
        let clock = Clock::new();
        let first = clock.fence(Instant::now());
        assert!(of_this_machine().0 - first.number() < 500, "{first:?}");
        clock.learn(NOW, Instant::now());
        let next = clock.fence(Instant::now());
        assert!((NOW.0..NOW.0 + 500).contains(&next.number()), "{next:?}");
    }

    #[test]
    fn a_time_comes_as_two_strings_or_as_one_number() {
        let string = |text: &str| Value::BulkString(text.into());
        let strings = Value::Array(vec![string("1764457200"), string("000999")]);
        assert_eq!((now(&strings), now(&Value::Int(1_764_457_200_000))), (Some(NOW), Some(NOW)));
    }

    #[test]
    fn a_time_that_cannot_be_read_is_no_time() {
        assert_eq!(now(&Value::Int(-1)), None);
        let time = |parts: &[&str]| {
            now(&Value::Array(
                parts.iter().map(|part| Value::BulkString(part.as_bytes().to_vec())).collect(),
            ))
        };
        assert_eq!(time(&["1764457200", "999999"]), Some(Millis(1_764_457_200_999)));
        for bad in [&[][..], &["1"], &["1", "2", "3"], &["x", "1"], &["99999999999999999999", "1"]]
        {
            assert_eq!(time(bad), None, "{bad:?}");
        }
    }
}
