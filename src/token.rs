//! The numbers that tell one attempt from another: holder id, attempt, fence.

use std::cell::RefCell;
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

    /// Draws a new id: 16 bytes of the operating system's randomness, which is asked for many at a time.
    ///
    /// # Panics
    /// If the operating system has no randomness to give, in which case no claim could be told
    /// from another and nothing may run.
    #[must_use]
    pub fn random() -> Self {
        // A thread that is going down has no supply any more.
        let drawn = SUPPLY.try_with(|supply| supply.borrow_mut().draw());
        Self(drawn.unwrap_or_else(|_| {
            let mut bytes = [0; 16];
            getrandom::fill(&mut bytes).expect(NO_RANDOMNESS);
            bytes
        }))
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

const NO_RANDOMNESS: &str = "the operating system gives random bytes";

thread_local! {
    static SUPPLY: RefCell<Supply> = const { RefCell::new(Supply::empty()) };
}

/// Random bytes that were not drawn yet.
struct Supply {
    bytes: [u8; Self::SIZE],
    drawn: usize,
    /// Whose they are: a process that is forked off must not draw the same ones.
    process: u32,
}

impl Supply {
    /// So many that asking for them costs next to nothing per id, and so few that they fit anywhere.
    const SIZE: usize = 16 * 64;

    const fn empty() -> Self {
        Self { bytes: [0; Self::SIZE], drawn: Self::SIZE, process: 0 }
    }

    fn draw(&mut self) -> [u8; 16] {
        let process = std::process::id();
        if self.drawn == Self::SIZE || self.process != process {
            getrandom::fill(&mut self.bytes).expect(NO_RANDOMNESS);
            (self.drawn, self.process) = (0, process);
        }
        let id = &mut self.bytes[self.drawn..self.drawn + 16];
        self.drawn += 16;
        let mut drawn = [0; 16];
        // None is left behind for anybody to find.
        drawn.swap_with_slice(id);
        drawn
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
