//! A record as one string of bytes: a fixed header, a checkpoint, the response.
//!
//! All numbers are big-endian. The Lua scripts read and write the header by the same offsets.
//!
//! ```text
//!  0  1  version (1)
//!  1  1  state (1 in flight, 2 open, 3 indeterminate, 4 completed, 5 in flight and untouched;
//!        6 and 7 as 1 and 5, of a first claim whose times follow from its expiry)
//!  2  4  recipe id of the fingerprint
//!  6 32  digest of the fingerprint
//! 38 16  holder id
//! 54  4  attempt
//! 58  6  fence
//! 64  6  created, milliseconds
//! 70  6  in flight: end of the lease; otherwise: when the state was entered; milliseconds
//! 76  4  in flight: the lease's length in milliseconds; completed: the response's length in bytes;
//!        otherwise 0
//! 80  4  length of the checkpoint
//! 84  .  checkpoint, then (completed only) the encoded response
//! ```
//!
//! Whoever writes states 6 and 7 does not know the time: Redis learns it from the command that writes them.
//! They hold zeros as moment of creation, and at 70 how long the record is kept beyond its lease. The
//! store's expiry less that is the end of the lease, and that less the lease's length is the moment of creation.
//! The fence is the writer's guess at that moment, which stands if it is not more than a second too early;
//! otherwise the moment counts. [`Record::decode`] does not know the expiry and refuses them; see `first.rs`.

use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{Millis, Owner, Progress, Record, Sighting, Standing, State, millis};
use crate::fingerprint::{Fingerprint, Fingerprints, RecipeId};
use crate::token::{Attempt, Fence, HolderId};

/// The length of the fixed header in bytes.
pub const HEADER_LENGTH: usize = 84;

/// Times and fences take six bytes: the store's milliseconds until the year 10889.
pub(super) const MAX_48: u64 = (1 << 48) - 1;

pub(super) const VERSION: u8 = 1;
pub(super) const IN_FLIGHT: u8 = 1;
pub(super) const OPEN: u8 = 2;
pub(super) const INDETERMINATE: u8 = 3;
pub(super) const COMPLETED: u8 = 4;
pub(super) const UNTOUCHED: u8 = 5;
/// What a store found under a storage key.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "a record is there, or not, or cannot be read")]
pub enum Current {
    /// Nothing, or something past its retention.
    Absent,
    /// Bytes that are no record of a version that this release reads.
    Unreadable(Unreadable),
    /// A record.
    Present(Record),
}

/// Why bytes are no record. They are refused, never run over and never deleted.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Unreadable {
    /// A record of another version, or something foreign.
    #[error("unknown version of the record")]
    Version,
    /// The bytes are damaged.
    #[error("the record is damaged")]
    Damaged,
}

impl Current {
    /// Reads what a store found.
    #[must_use]
    pub fn from_stored(bytes: Option<Bytes>) -> Self {
        match bytes.map(Record::decode) {
            None => Self::Absent,
            Some(Ok(record)) => Self::Present(record),
            Some(Err(unreadable)) => Self::Unreadable(unreadable),
        }
    }
}

/// The head of a record. What is measured stands in the last two fields, each in four bytes.
pub(super) fn head(
    state: u8,
    by: &Owner,
    at: Millis,
    [measure, checkpoint]: [u64; 2],
) -> [u8; HEADER_LENGTH] {
    let mut head = [0; HEADER_LENGTH];
    let mut rest = &mut head[..];
    let fingerprint = by.fingerprints.current();
    rest.put_u8(VERSION);
    rest.put_u8(state);
    rest.put_slice(fingerprint.recipe().as_bytes());
    rest.put_slice(fingerprint.digest());
    rest.put_slice(by.holder.as_bytes());
    rest.put_u32(by.attempt.number());
    for number in [by.fence.number(), by.created.0, at.0] {
        rest.put_uint(number.min(MAX_48), 6);
    }
    for length in [measure, checkpoint] {
        rest.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    }
    head
}

impl Record {
    /// The record as a store keeps it.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let (state, at, measure, response) = match &self.state {
            State::InFlight { until, lease, progress } => {
                let state = match progress {
                    Progress::MayHaveActed => IN_FLIGHT,
                    Progress::Untouched => UNTOUCHED,
                };
                (state, *until, millis(*lease), None)
            }
            State::Open { since } => (OPEN, *since, 0, None),
            State::Indeterminate { since } => (INDETERMINATE, *since, 0, None),
            State::Completed { at, response } => {
                (COMPLETED, *at, response.len() as u64, Some(response))
            }
        };
        let response = response.map_or(&[][..], |bytes| bytes);
        let length = HEADER_LENGTH + self.checkpoint.len() + response.len();
        let mut bytes = BytesMut::with_capacity(length);
        bytes.put_slice(&head(
            state,
            &Owner {
                holder: self.holder,
                fingerprints: Fingerprints::one(self.fingerprint),
                attempt: self.attempt,
                fence: self.fence,
                created: self.created,
            },
            at,
            [measure, self.checkpoint.len() as u64],
        ));
        bytes.put_slice(&self.checkpoint);
        bytes.put_slice(response);
        bytes.freeze()
    }

    /// Reads a record; checkpoint and response share the bytes' memory.
    ///
    /// # Errors
    /// [`Unreadable`] if this release cannot say what the bytes mean.
    pub fn decode(mut bytes: Bytes) -> Result<Self, Unreadable> {
        if bytes.first() != Some(&VERSION) {
            return Err(Unreadable::Version);
        }
        if bytes.len() < HEADER_LENGTH {
            return Err(Unreadable::Damaged);
        }
        bytes.advance(1);
        let state = bytes.get_u8();
        let mut recipe = [0; 4];
        bytes.copy_to_slice(&mut recipe);
        let mut digest = [0; 32];
        bytes.copy_to_slice(&mut digest);
        let mut holder = [0; 16];
        bytes.copy_to_slice(&mut holder);
        let attempt = Attempt::from_number(bytes.get_u32());
        let fence = Fence::from_number(bytes.get_uint(6));
        let created = Millis(bytes.get_uint(6));
        let at = Millis(bytes.get_uint(6));
        let measure = bytes.get_u32();
        let lease = Duration::from_millis(u64::from(measure));
        let checkpoint_length = bytes.get_u32() as usize;
        if bytes.len() < checkpoint_length {
            return Err(Unreadable::Damaged);
        }
        let checkpoint = bytes.split_to(checkpoint_length);
        let state = match state {
            IN_FLIGHT => State::InFlight { until: at, lease, progress: Progress::MayHaveActed },
            UNTOUCHED => State::InFlight { until: at, lease, progress: Progress::Untouched },
            OPEN => State::Open { since: at },
            INDETERMINATE => State::Indeterminate { since: at },
            COMPLETED if !bytes.is_empty() && bytes.len() == measure as usize => {
                State::Completed { at, response: bytes.split_off(0) }
            }
            _ => return Err(Unreadable::Damaged),
        };
        if !bytes.is_empty() {
            return Err(Unreadable::Damaged);
        }
        Ok(Self {
            fingerprint: Fingerprint::from_stored(RecipeId::from_bytes(recipe), digest),
            holder: HolderId::from_bytes(holder),
            attempt,
            fence,
            created,
            checkpoint,
            state,
        })
    }
}

/// Reads the header of a record that is `length` bytes long in all.
pub(super) fn sighting(mut header: &[u8], length: usize) -> Result<Sighting, Unreadable> {
    if header.first() != Some(&VERSION) {
        return Err(Unreadable::Version);
    }
    if header.len() < HEADER_LENGTH || length < header.len() {
        return Err(Unreadable::Damaged);
    }
    header.advance(1);
    let standing = Standing::of(header.get_u8()).ok_or(Unreadable::Damaged)?;
    header.advance(36);
    let mut holder = [0; 16];
    header.copy_to_slice(&mut holder);
    let attempt = Attempt::from_number(header.get_u32());
    let fence = Fence::from_number(header.get_uint(6));
    let created = Millis(header.get_uint(6));
    let at = Millis(header.get_uint(6));
    let measure = header.get_u32();
    let checkpoint = header.get_u32() as usize;
    let (response, lease) = match standing {
        Standing::Completed if measure == 0 => return Err(Unreadable::Damaged),
        Standing::Completed => (measure as usize, Duration::ZERO),
        Standing::InFlight | Standing::Untouched => (0, Duration::from_millis(u64::from(measure))),
        Standing::Open | Standing::Indeterminate => (0, Duration::ZERO),
    };
    if length - HEADER_LENGTH != checkpoint + response {
        return Err(Unreadable::Damaged);
    }
    let holder = HolderId::from_bytes(holder);
    Ok(Sighting { standing, holder, attempt, fence, created, at, lease })
}
