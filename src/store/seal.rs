//! The mark of a protected store: its holders are named so that whoever looks at a record can tell that its answer
//! will be sealed, and who has the key, that it is this one.
//!
//! Without it an operator who forgets the key, or has another one, would settle a payment with an answer that no
//! process of the service can read.
//!
//! ```text
//!  0  8  random
//!  8  4  from storage key and the random bytes: says to everybody that the store is protected
//! 12  4  the same, by the protection key: says to who has it that it is this one
//! ```

use sha2::{Digest as _, Sha256};

use crate::scope::StorageKey;
use crate::token::HolderId;

/// How many of a holder's bytes are random. Of one key there are a few holders, never millions.
pub(super) const RANDOM: usize = 8;
/// How many come before those that the key makes.
pub(super) const OPEN: usize = 12;

/// Whether an answer that is settled would be sealed as the record's service seals its own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "it is, or it is not")]
pub enum Sealing {
    /// It would be.
    Fits,
    /// The service could not read it.
    Foreign,
}

/// What sealed bytes begin with: no version of an unprotected response.
#[cfg(any(feature = "admin", feature = "protect"))]
pub(super) const VERSION: u8 = 0xE1;

impl Sealing {
    /// True for bytes that are sealed, by whatever key.
    #[cfg(feature = "admin")]
    pub(crate) fn is_sealed(bytes: &[u8]) -> bool {
        bytes.first() == Some(&VERSION)
    }

    /// In a store that seals nothing.
    #[must_use]
    pub fn without_key(key: StorageKey, holder: HolderId) -> Self {
        match is_protected(key, holder) {
            true => Self::Foreign,
            false => Self::Fits,
        }
    }
}

/// True if the holder claimed through a store that is protected, by whatever key.
pub(super) fn is_protected(key: StorageKey, holder: HolderId) -> bool {
    let bytes = holder.as_bytes();
    let (random, rest) = bytes.split_at(RANDOM);
    rest[..OPEN - RANDOM] == public(key, random)
}

/// What everybody can tell a protected holder by.
pub(super) fn public(key: StorageKey, random: &[u8]) -> [u8; 4] {
    let mut hasher = Sha256::new();
    hasher.update(b"tower-idempotency protected holder 1");
    hasher.update(key.as_bytes());
    hasher.update(random);
    let digest: [u8; 32] = hasher.finalize().into();
    [digest[0], digest[1], digest[2], digest[3]]
}
