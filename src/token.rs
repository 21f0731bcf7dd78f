//! The numbers that tell one attempt from another: holder id, attempt, fence.

use std::fmt;

/// 128 random bits that name one server-side attempt to own a key.
///
/// Made **before** the claim is sent and kept over every repetition of that claim, so that a claim
/// whose reply was lost is recognised as one's own instead of being waited for.
#[derive(Clone, Copy, Eq, Hash, PartialEq)]
pub struct HolderId([u8; 16]);

impl HolderId {
    /// No holder: what a record names once its outcome was settled from outside.
    pub const NOBODY: Self = Self([0; 16]);

    /// Draws a new id from the operating system.
    ///
    /// # Panics
    /// If the operating system has no randomness to give, in which case no claim could be told
    /// from another and nothing may run.
    #[must_use]
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
        Self(bytes)
    }

    /// An id from given bytes: for tests, and for stores that read a record back.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes as they are stored.
    #[must_use]
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// A name in a text store: 22 characters of base64url.
    #[cfg(feature = "redis")]
    pub(crate) fn to_text(self) -> String {
        use base64::Engine as _;
        base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(self.0)
    }
}

impl fmt::Debug for HolderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Eight digits tell attempts apart in a log; the whole id is nobody's business.
        write!(
            f,
            "HolderId({:08x}..)",
            u32::from_be_bytes([self.0[0], self.0[1], self.0[2], self.0[3]])
        )
    }
}

/// Which run of the handler this is: 1 at first, one more whenever a key is claimed again.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Attempt(u32);

impl Attempt {
    /// The first run.
    pub const FIRST: Self = Self(1);

    /// An attempt with this number, as read from a record.
    #[must_use]
    pub const fn from_number(number: u32) -> Self {
        Self(number)
    }

    /// The number, from 1.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// The attempt after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }
}

/// A number that grows with every claim of one key, for resources that refuse late writers.
///
/// It is the greater of "the previous fence plus one" and the store's clock in milliseconds, so it
/// goes on growing when a record was lost, as long as that clock does not go back. A fence keeps a
/// *late* attempt out. It does not make a *repeated* one harmless: that takes a downstream key.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Fence(u64);

impl Fence {
    /// The greatest fence a record can hold: 48 bits, the store's milliseconds until the year 10889.
    pub const MAX: Self = Self((1 << 48) - 1);

    /// A fence with this number, as read from a record.
    #[must_use]
    pub const fn from_number(number: u64) -> Self {
        Self(number)
    }

    /// The number.
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }
}
