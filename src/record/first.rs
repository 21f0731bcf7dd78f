//! What a store writes that learns the time only from what it writes: the record of a first claim, and the
//! head of an answer.
//!
//! Redis tells the time with the command that claims, and PostgreSQL with the statement, which is a trip too late to
//! write it down. But the record's expiry is by the same clock, and is set by the same command: the times follow from
//! it. Any change of such a record writes them out.

use bytes::{Buf, BufMut, Bytes, BytesMut};

#[cfg(any(feature = "redis", test))]
use super::codec::COMPLETED;
use super::codec::{HEADER_LENGTH, IN_FLIGHT, MAX_48, UNTOUCHED, VERSION, head};
use super::{Claim, Effects, Millis, Owner, millis};
#[cfg(any(feature = "redis", test))]
use crate::mistakes::{Mistake, made};
use crate::token::{Attempt, Fence};

/// As [`IN_FLIGHT`] and [`UNTOUCHED`].
const FIRST: u8 = 6;
const FIRST_UNTOUCHED: u8 = 7;

/// The record of a first claim, by somebody who does not know the time. `None` if its times take more
/// room than there is.
#[cfg(any(feature = "redis", test))]
pub(crate) fn first(claim: &Claim, fence: Fence) -> Option<[u8; HEADER_LENGTH]> {
    let beyond = millis(claim.terms.unknown_retention);
    let beyond = if made(Mistake::RedisOneTime) { 0 } else { beyond };
    first_beyond(claim, fence, beyond)
}

/// The same where the record is kept for so many milliseconds, whatever becomes of its lease. Its fence is the
/// moment that it was made.
#[cfg(any(feature = "postgres", feature = "sqlite", test))]
pub(crate) fn first_kept(claim: &Claim, kept: u64) -> Option<[u8; HEADER_LENGTH]> {
    let beyond = kept.checked_sub(millis(claim.terms.lease))?;
    first_beyond(claim, Fence::from_number(0), beyond)
}

fn first_beyond(claim: &Claim, fence: Fence, beyond: u64) -> Option<[u8; HEADER_LENGTH]> {
    let lease = millis(claim.terms.lease);
    let fits = u32::try_from(lease).is_ok() && beyond <= MAX_BEYOND;
    let state = match claim.effects {
        Effects::Anywhere => FIRST,
        Effects::Marked => FIRST_UNTOUCHED,
    };
    let Claim { holder, fingerprints, .. } = *claim;
    let owner = Owner { holder, fingerprints, attempt: Attempt::FIRST, fence, created: Millis(0) };
    fits.then(|| head(state, &owner, Millis(beyond), [lease, 0]))
}

/// The longest that a record of a first claim is kept beyond its lease, in milliseconds: a thousand years.
const MAX_BEYOND: u64 = 1 << 45;

/// The head of a completed record, whose response has this many bytes.
#[cfg(any(feature = "redis", test))]
pub(crate) fn completed_head(owner: &Owner, at: Millis, response: usize) -> [u8; HEADER_LENGTH] {
    head(COMPLETED, owner, at, [response as u64, 0])
}

/// How far off a fence may be that was chosen before the time was known, in milliseconds.
pub(crate) const NEAR: u64 = 1_000;

/// True if a fence is not too early for a claim that was made at this moment.
pub(crate) fn is_near(fence: Fence, made: Millis) -> bool {
    fence.number().saturating_add(NEAR) >= made.0
}

/// True of a record of a first claim, whose times take its expiry to tell.
#[cfg(feature = "redis")]
pub(crate) fn is_first(bytes: &[u8]) -> bool {
    matches!(bytes, [VERSION, FIRST | FIRST_UNTOUCHED, ..])
}

/// A record of a first claim with the times that follow from its expiry; any other as it is.
pub(crate) fn written_out(bytes: Bytes, expires: Option<Millis>) -> Bytes {
    let state = match bytes.get(..2) {
        Some([VERSION, FIRST]) => IN_FLIGHT,
        Some([VERSION, FIRST_UNTOUCHED]) => UNTOUCHED,
        _ => return bytes,
    };
    let (Some(expires), Some(mut fence)) = (expires, bytes.get(58..64)) else { return bytes };
    let fence = fence.get_uint(6);
    let Some(times) = bytes.get(70..80) else { return bytes };
    let (mut times, mut all) = (times, BytesMut::from(&bytes[..]));
    let Some(until) = expires.0.checked_sub(times.get_uint(6)) else { return bytes };
    let made = until.saturating_sub(u64::from(times.get_u32()));
    all[1] = state;
    let mut out = &mut all[58..76];
    let fence = if is_near(Fence::from_number(fence), Millis(made)) { fence } else { made };
    for time in [fence, made, until] {
        out.put_uint(time.min(MAX_48), 6);
    }
    all.freeze()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fingerprint::{Fingerprint, Fingerprints, RecipeId};
    use crate::record::{
        Change, Completion, OnExpired, Record, Step, Terms, Writes, claim, complete,
    };
    use crate::record::{Current, HEADER_LENGTH};
    use crate::token::HolderId;

    const FILES: [(Effects, &str); 2] = [
        (Effects::Anywhere, include_str!("../../tests/golden/record-v1-first.hex")),
        (Effects::Marked, include_str!("../../tests/golden/record-v1-first-untouched.hex")),
    ];

    const FENCE: Fence = Fence::from_number(1_764_457_201_123);

    fn bytes_of(file: &str) -> Vec<u8> {
        let digits: String =
            file.lines().filter_map(|line| line.split(" #").next()).collect::<Vec<_>>().concat();
        let pairs = (0..digits.len()).step_by(2);
        pairs.map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap()).collect()
    }

    fn claim_of(effects: Effects) -> Claim {
        let digest = std::array::from_fn(|at| u8::try_from(at).unwrap());
        let recipe = RecipeId::from_bytes([0xfd, 0x1b, 0x99, 0x57]);
        Claim {
            holder: HolderId::from_bytes(std::array::from_fn(|at| {
                0xf0 + u8::try_from(at).unwrap()
            })),
            fingerprints: Fingerprints::one(Fingerprint::from_stored(recipe, digest)),
            terms: Terms {
                lease: Duration::from_secs(30),
                retention: Duration::from_secs(24 * 3_600),
                unknown_retention: Duration::from_secs(7 * 24 * 3_600),
            },
            on_expired: OnExpired::Refuse,
            effects,
        }
    }

    #[test]
    fn a_first_claim_has_the_bytes_that_were_released() {
        for (effects, file) in FILES {
            assert_eq!(first(&claim_of(effects), FENCE).unwrap()[..], bytes_of(file)[..]);
        }
    }

    #[test]
    fn with_its_expiry_it_is_the_record_that_the_rules_write() {
        for (effects, file) in FILES {
            let (claim_of, now) = (claim_of(effects), Millis(1_764_457_200_123));
            let Step { change: Change::Write { record, .. }, .. } =
                claim(Current::Absent, now, &claim_of)
            else {
                panic!("it is granted")
            };
            let terms = claim_of.terms;
            let expires = now.after(terms.lease + terms.unknown_retention);
            let out = written_out(bytes_of(file).into(), Some(expires));
            // But for the guess in the place of the fence.
            assert!(FENCE != record.fence && !is_near(FENCE, Millis(now.0 + 2_001)));
            assert_eq!(Record::decode(out).unwrap(), Record { fence: FENCE, ..*record });
        }
    }

    #[test]
    fn one_that_is_kept_for_its_retention_has_the_moment_for_a_fence() {
        for effects in [Effects::Anywhere, Effects::Marked] {
            let (claim_of, now) = (claim_of(effects), Millis(1_764_457_200_123));
            let Step { change: Change::Write { record, .. }, .. } =
                claim(Current::Absent, now, &claim_of)
            else {
                panic!("it is granted")
            };
            let kept = 90_000_000;
            let bytes = Bytes::copy_from_slice(&first_kept(&claim_of, kept).unwrap());
            let out = written_out(bytes, Some(Millis(now.0 + kept)));
            assert_eq!(Record::decode(out).unwrap(), *record);
            assert_eq!(first_kept(&claim_of, 29_999), None, "shorter than its lease");
        }
    }

    #[test]
    fn without_an_expiry_that_fits_it_stays_as_it_is() {
        let bytes = Bytes::from(bytes_of(FILES[0].1));
        for expires in [None, Some(Millis(0)), Some(Millis(604_799_999))] {
            assert_eq!(written_out(bytes.clone(), expires), bytes, "{expires:?}");
        }
        // Cut, or another record.
        for other in [&bytes[..75], &b"\x01\x04"[..], b"\x02\x06", b""] {
            let other = Bytes::copy_from_slice(other);
            assert_eq!(written_out(other.clone(), Some(Millis(1 << 40))), other);
        }
    }

    #[test]
    fn times_that_take_more_room_are_left_to_others() {
        let with = |change: fn(&mut Terms)| {
            let mut claim = claim_of(Effects::Anywhere);
            change(&mut claim.terms);
            first(&claim, FENCE)
        };
        assert!(with(|_| {}).is_some());
        assert!(with(|terms| terms.lease = Duration::from_secs(60 * 24 * 3_600)).is_none());
        assert!(with(|terms| terms.unknown_retention = Duration::MAX).is_none());
    }

    #[test]
    fn the_head_of_an_answer_is_that_of_the_record_that_the_rules_write() {
        let claim_of = claim_of(Effects::Anywhere);
        let owner = Owner {
            holder: claim_of.holder,
            fingerprints: claim_of.fingerprints,
            attempt: Attempt::FIRST,
            fence: Fence::from_number(7),
            created: Millis(5),
        };
        let response = Bytes::from_static(b"answer");
        let completion = Completion { terms: claim_of.terms, response, writes: Writes::Keep };
        let Step { change: Change::Write { record, .. }, .. } =
            complete(Current::Absent, Millis(9), &owner, &completion)
        else {
            panic!("it is stored")
        };
        let bytes = record.encode();
        assert_eq!(completed_head(&owner, Millis(9), 6)[..], bytes[..HEADER_LENGTH]);
    }
}
