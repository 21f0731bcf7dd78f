//! Who makes a change, and why.

use std::fmt;

/// Why a name or a reason was refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ByError {
    /// There is nothing in it.
    #[error("{0} is missing")]
    Empty(&'static str),
    /// It is longer than a trail keeps.
    #[error("{what} has {length} bytes; at most {max} are kept")]
    TooLong {
        /// Which of the two.
        what: &'static str,
        /// How long it is.
        length: usize,
        /// How long it may be.
        max: usize,
    },
    /// It could pass for another line of a log.
    #[error("{0} has a control character in it")]
    Control(&'static str),
}

fn checked(text: &str, what: &'static str, max: usize) -> Result<Box<str>, ByError> {
    let text = text.trim();
    match text.len() {
        0 => Err(ByError::Empty(what)),
        length if length > max => Err(ByError::TooLong { what, length, max }),
        _ if text.chars().any(char::is_control) => Err(ByError::Control(what)),
        _ => Ok(text.into()),
    }
}

/// Who makes a change: whatever your authentication knows a person by. For the
/// [`router`](super::router), its layer puts this into the request's extensions.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Who(Box<str>);

impl Who {
    /// The longest name, in bytes.
    pub const MAX_LENGTH: usize = 200;

    /// A name.
    ///
    /// # Errors
    /// [`ByError`] if it is empty, too long, or has control characters in it.
    pub fn new(name: &str) -> Result<Self, ByError> {
        checked(name, "who makes the change", Self::MAX_LENGTH).map(Self)
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Why a change is made: a ticket, and what the provider said. Anybody who may read the trail or the log reads
/// it, so keys and bodies do not belong into it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Why(Box<str>);

impl Why {
    /// The longest reason, in bytes.
    pub const MAX_LENGTH: usize = 1_000;

    /// A reason.
    ///
    /// # Errors
    /// [`ByError`] if it is empty, too long, or has control characters in it.
    pub fn new(reason: &str) -> Result<Self, ByError> {
        checked(reason, "why", Self::MAX_LENGTH).map(Self)
    }

    /// The reason.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Who makes a change, and why. No change is made without.
#[derive(Clone, Debug, Eq, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "there is nothing more to say")]
pub struct By {
    /// Who.
    pub who: Who,
    /// Why.
    pub why: Why,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_reasons_are_there_short_and_of_one_line() {
        assert_eq!(Who::new("  ana ").unwrap().as_str(), "ana");
        assert_eq!(Why::new(" \t "), Err(ByError::Empty("why")));
        assert_eq!(Who::new("a\nb"), Err(ByError::Control("who makes the change")));
        assert!(Why::new(&"x".repeat(Why::MAX_LENGTH)).is_ok());
        assert!(Why::new(&"x".repeat(Why::MAX_LENGTH + 1)).is_err());
    }
}
