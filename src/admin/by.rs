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
    #[error("{0} has a control character in it, or one that cannot be seen")]
    Control(&'static str),
}

/// True for characters that cannot be seen, or that turn the direction of what stands beside them: with them a text
/// can look like another one. [`Who`] and [`Why`] have none; escape them where you show what came from elsewhere.
#[must_use]
pub fn misleads(letter: char) -> bool {
    matches!(letter,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

fn checked(text: &str, what: &'static str, max: usize) -> Result<Box<str>, ByError> {
    let text = text.trim();
    match text.len() {
        0 => Err(ByError::Empty(what)),
        length if length > max => Err(ByError::TooLong { what, length, max }),
        _ if text.chars().any(|letter| letter.is_control() || misleads(letter)) => {
            Err(ByError::Control(what))
        }
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
    /// [`ByError`] if it is empty, too long, or has control characters or invisible ones in it.
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
    /// [`ByError`] if it is empty, too long, or has control characters or invisible ones in it.
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
        let hidden = "\u{200b}\u{200f}\u{2028}\u{2029}\u{202a}\u{202e}\u{2066}\u{2069}\u{feff}";
        for letter in hidden.chars() {
            assert_eq!(Why::new(&format!("a{letter}b")), Err(ByError::Control("why")));
        }
        assert!(Who::new("Zo\u{eb} \u{5d0}\u{5d1}").is_ok(), "other scripts are no disguise");
        assert!(Why::new(&"x".repeat(Why::MAX_LENGTH)).is_ok());
        assert!(Why::new(&"x".repeat(Why::MAX_LENGTH + 1)).is_err());
    }
}
