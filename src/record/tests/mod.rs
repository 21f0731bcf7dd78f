//! The rules, checked in three ways: case by case against a table that is written from the
//! specification ([`table`]), in random sequences against what must always hold ([`sequences`]),
//! and as bytes ([`bytes`]).

#![allow(
    clippy::needless_pass_by_value,
    clippy::wildcard_enum_match_arm,
    reason = "tests name what they are about, and nothing else"
)]

mod bytes;
mod sequences;
mod table;

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::fingerprint::{Fingerprints, RecipeId};

/// Where the clock stands: 2025-11-29, in milliseconds.
const NOW: u64 = 1_764_403_200_000;

const ME: HolderId = HolderId::from_bytes([0xA1; 16]);
const SOMEBODY: HolderId = HolderId::from_bytes([0xB2; 16]);

fn fingerprint(recipe: u8, digest: u8) -> Fingerprint {
    Fingerprint::from_stored(RecipeId::from_bytes([recipe; 4]), [digest; 32])
}

/// Any record that a store can hold: whole milliseconds, 48-bit times, and an answer that is not
/// empty where there is one (an encoded response has at least its version).
fn any_record() -> impl Strategy<Value = Record> {
    let time = || (0..1_u64 << 48).prop_map(Millis);
    let bytes = |least| prop::collection::vec(any::<u8>(), least..40).prop_map(Bytes::from);
    let state = prop_oneof![
        (time(), any::<u32>(), any::<bool>()).prop_map(|(until, lease, acted)| State::InFlight {
            until,
            lease: Duration::from_millis(lease.into()),
            progress: if acted { Progress::MayHaveActed } else { Progress::Untouched },
        }),
        time().prop_map(|since| State::Open { since }),
        time().prop_map(|since| State::Indeterminate { since }),
        (time(), bytes(1)).prop_map(|(at, response)| State::Completed { at, response }),
    ];
    let holder = prop_oneof![
        Just(ME),
        Just(SOMEBODY),
        Just(HolderId::NOBODY),
        any::<[u8; 16]>().prop_map(HolderId::from_bytes),
    ];
    let fingerprint = (0..4_u8, 0..3_u8).prop_map(|(recipe, digest)| fingerprint(recipe, digest));
    let fence = (0..1_u64 << 48).prop_map(Fence::from_number);
    let attempt = prop_oneof![1..5_u32, any::<u32>()].prop_map(Attempt::from_number);
    (fingerprint, holder, attempt, fence, time(), bytes(0), state).prop_map(
        |(fingerprint, holder, attempt, fence, created, checkpoint, state)| Record {
            fingerprint,
            holder,
            attempt,
            fence,
            created,
            checkpoint,
            state,
        },
    )
}

fn any_current() -> impl Strategy<Value = Current> {
    prop_oneof![
        1 => Just(Current::Absent),
        1 => Just(Current::Unreadable(Unreadable::Version)),
        1 => Just(Current::Unreadable(Unreadable::Damaged)),
        9 => any_record().prop_map(Current::Present),
    ]
}

/// What the store holds after a step.
fn after<T>(before: &Current, step: &Step<T>) -> Current {
    match &step.change {
        Change::Keep => before.clone(),
        Change::Remove => Current::Absent,
        Change::Write { record, .. } => Current::Present((**record).clone()),
    }
}
