//! The idempotency key: parsing the header, limits, and what may be shown of it.
//!
//! Two notations name one key. The IETF draft (section 2.1) asks for a Structured Field string,
//! `"8e03978e-40d5-43e8-bc93-6894a57f9324"`; every official payment SDK sends the same text bare.
//! A leading quote means the first, anything else the second, and both give the same
//! [`IdempotencyKey`], so that an SDK upgrade or a proxy in the middle of a retry changes nothing.

use std::fmt;

use http::HeaderValue;

/// A key that a client chose to name one intended operation, as it stands after unquoting.
///
/// It is 1 to 255 bytes of printable ASCII and compared byte for byte (`ABC` and `abc` are two keys).
/// `Debug` never shows it, and there is no `Display`: keys may hold personal data although clients are
/// told not to do that. Its text is [`as_str`](Self::as_str).
///
/// # Clone
/// Clones share one allocation. That is the head of the request where the key came bare in a header: whoever keeps
/// keys for long keeps it too, unless he copies them (`IdempotencyKey::new(key.as_str())`).
///
/// # Example
/// ```
/// use tower_idempotency::{IdempotencyKey, KeySyntax};
///
/// let bare = IdempotencyKey::parse(b"pay-1", KeySyntax::BareOrQuoted)?;
/// let quoted = IdempotencyKey::parse(br#""pay-1";v=1"#, KeySyntax::BareOrQuoted)?;
/// assert_eq!(bare, quoted);
/// assert!(IdempotencyKey::parse(b"pay 1", KeySyntax::BareOrQuoted).is_err());
/// # Ok::<(), tower_idempotency::KeyError>(())
/// ```
#[derive(Clone, Eq, Hash, PartialEq)]
// A header value, since that is how it comes, and how it is echoed: nothing is copied either time.
pub struct IdempotencyKey {
    text: HeaderValue,
    /// It needs no quotes.
    bare: bool,
}

/// Which notations of a key are accepted in the header.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum KeySyntax {
    /// A Structured Field string, or bare visible ASCII without `"`, `\`, `,` and `;`.
    #[default]
    BareOrQuoted,
    /// Only a Structured Field string, as the IETF draft writes it. Official payment SDKs send
    /// keys bare and are refused by this.
    QuotedOnly,
}

/// Why a key was refused. Says what the rule is and never repeats the key.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// The value is empty, or an empty string in quotes.
    #[error("the key is empty")]
    Empty,
    /// The key is longer than the limit, counted in bytes after unquoting.
    #[error("the key is {length} bytes long; at most {limit} are allowed")]
    TooLong {
        /// Bytes after unquoting.
        length: usize,
        /// The limit, [`IdempotencyKey::MAX_LENGTH`].
        limit: usize,
    },
    /// A bare key holds a byte that only a quoted one may hold, or none may.
    #[error(
        "a bare key is visible ASCII without quotes, backslashes, commas, semicolons and spaces"
    )]
    BareCharacter,
    /// The value starts with a quote and is no Structured Field string (RFC 9651, section 3.3.3).
    #[error("the quoted key is not a Structured Field string (RFC 9651)")]
    Quoted,
    /// A bare value where only quoted ones are accepted.
    #[error("the key must be a Structured Field string in double quotes")]
    QuotesRequired,
    /// The key in the body is no string.
    #[error("the key in the body is not a string")]
    NotText,
    /// The key in the body holds something else than printable ASCII.
    #[error("a key is printable ASCII")]
    Character,
    /// The body's key cannot be told, since readers of the body may disagree about it.
    #[error("the key in the body cannot be told: {0}")]
    Ambiguous(BodyDoubt),
    /// More than one header line carries a key, or two accepted places disagree.
    #[error("the request carries more than one idempotency key")]
    Repeated,
}

/// Why readers of a JSON body may disagree about it. A handler that skips such a value may accept the
/// body, so it is not taken for one without a key.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BodyDoubt {
    /// A member is given twice: one reader takes the first, another the last.
    #[error("the body gives a member twice")]
    MemberTwice,
    /// Objects and arrays are nested more than 127 levels deep.
    #[error("the body is nested more than 127 levels deep")]
    TooDeep,
    /// A number is greater than a double can be.
    #[error("a number in the body is greater than a double can be")]
    NumberTooGreat,
    /// A string holds half of a surrogate pair, so it is no text.
    #[error("a string in the body holds half of a surrogate pair")]
    LoneSurrogate,
    /// A member has a name that begins with `$serde_json::private::`, which the reader itself uses.
    #[error("a member of the body has a name that is reserved")]
    ReservedName,
}

impl IdempotencyKey {
    /// The longest key, in bytes after unquoting: what Stripe accepts, and no provider accepts more.
    pub const MAX_LENGTH: usize = 255;

    /// A new key: a random UUID (version 4, RFC 9562), as official payment SDKs make them.
    ///
    /// # Panics
    /// If the operating system has no randomness to give: a key that is not unique is worse than none.
    #[must_use]
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
        bytes[6] = (bytes[6] & 0x0f) | 0x40;
        bytes[8] = (bytes[8] & 0x3f) | 0x80;
        let hex = |range: std::ops::Range<usize>| {
            bytes[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        let parts = [hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16)];
        Self::checked(&parts.join("-")).expect("it is 36 bytes long")
    }

    /// A key from its text, as it stands after unquoting: 1 to 255 bytes of printable ASCII.
    ///
    /// # Errors
    /// [`KeyError`] says which rule was broken.
    pub fn new(text: &str) -> Result<Self, KeyError> {
        match text.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
            true => Self::checked(text),
            false => Err(KeyError::Character),
        }
    }

    /// Reads one header value.
    ///
    /// Leading and trailing spaces are not part of it, and parameters after a quoted key are
    /// parsed and ignored.
    ///
    /// # Errors
    /// [`KeyError`] says which rule was broken. A malformed key is never "no key".
    pub fn parse(value: &[u8], syntax: KeySyntax) -> Result<Self, KeyError> {
        let value = value.trim_ascii();
        match (value.first(), syntax) {
            (None, _) => Err(KeyError::Empty),
            (Some(b'"'), _) => {
                let item: sfv::Item =
                    sfv::Parser::new(value).parse().map_err(|_| KeyError::Quoted)?;
                let sfv::BareItem::String(text) = item.bare_item else {
                    return Err(KeyError::Quoted);
                };
                Self::checked(text.as_str())
            }
            (Some(_), KeySyntax::QuotedOnly) => Err(KeyError::QuotesRequired),
            (Some(_), KeySyntax::BareOrQuoted) => {
                if !all_bare(value) {
                    return Err(KeyError::BareCharacter);
                }
                Self::checked(std::str::from_utf8(value).map_err(|_| KeyError::BareCharacter)?)
            }
        }
    }

    /// Reads the value of a header, as [`parse`](Self::parse) does. What comes bare is not copied.
    pub(crate) fn of_header(value: &HeaderValue, syntax: KeySyntax) -> Result<Self, KeyError> {
        let is_whole = syntax == KeySyntax::BareOrQuoted && all_bare(value.as_bytes());
        match is_whole {
            true => {
                Self::within_limits(value.len()).map(|()| Self { text: value.clone(), bare: true })
            }
            false => Self::parse(value.as_bytes(), syntax),
        }
    }

    fn checked(text: &str) -> Result<Self, KeyError> {
        Self::within_limits(text.len())?;
        let bare = all_bare(text.as_bytes());
        let text = HeaderValue::from_str(text).expect("printable ASCII is a header value");
        Ok(Self { text, bare })
    }

    fn within_limits(length: usize) -> Result<(), KeyError> {
        match length {
            0 => Err(KeyError::Empty),
            1..=Self::MAX_LENGTH => Ok(()),
            _ => Err(KeyError::TooLong { length, limit: Self::MAX_LENGTH }),
        }
    }

    /// The key after unquoting.
    ///
    /// # Panics
    /// Never: every key is printable ASCII.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.text.to_str().expect("every key is printable ASCII")
    }

    /// The same, for what looks at bytes only.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.text.as_bytes()
    }

    /// The key as a header value that parses back to it: bare where that is possible, else quoted.
    ///
    /// # Panics
    /// Never: every key is printable ASCII.
    #[must_use]
    pub fn to_header_value(&self) -> HeaderValue {
        if self.bare {
            return self.text.clone();
        }
        let escaped = self.as_str().replace('\\', r"\\").replace('"', r#"\""#);
        HeaderValue::from_str(&format!("\"{escaped}\"")).expect("printable ASCII is a header value")
    }
}

/// Bare keys may hold what needs no quoting and cannot be taken for a list, a parameter or an escape.
const fn is_bare(byte: u8) -> bool {
    byte.is_ascii_graphic() && !matches!(byte, b'"' | b'\\' | b',' | b';')
}

/// [`is_bare`] of each byte: every key is looked through when it comes.
const BARE: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0;
    while byte < table.len() {
        table[byte] = is_bare(byte as u8);
        byte += 1;
    }
    table
};

fn all_bare(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| BARE[usize::from(*byte)])
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdempotencyKey({} bytes)", self.text.len())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(value: &[u8], expect: Result<&str, KeyError>) {
        let parsed = IdempotencyKey::parse(value, KeySyntax::BareOrQuoted);
        assert_eq!(parsed.as_ref().map(IdempotencyKey::as_str), expect.as_ref().copied());
    }

    #[test]
    fn both_notations_name_one_key() {
        check(b"8e03978e-40d5-43e8-bc93-6894a57f9324", Ok("8e03978e-40d5-43e8-bc93-6894a57f9324"));
        check(b"\"8e03978e\"", Ok("8e03978e"));
        check(b"  abc\t", Ok("abc"));
        check(b"\"abc\";v=1; w=\"x\"", Ok("abc"));
        check(br#""a\"b\\c""#, Ok("a\"b\\c"));
        check(b"\"with space, and comma\"", Ok("with space, and comma"));
    }

    #[test]
    fn the_keys_of_official_sdks_are_accepted_bare() {
        check(
            b"stripe-node-retry-0f8fad5b-d9cb-469f-a165-70867728950e",
            Ok("stripe-node-retry-0f8fad5b-d9cb-469f-a165-70867728950e"),
        );
        check(b"1764403200000000000_a-b_C9", Ok("1764403200000000000_a-b_C9"));
        check(b"*{x}[%0d%0a:?1=@", Ok("*{x}[%0d%0a:?1=@"));
    }

    #[test]
    fn what_is_malformed_is_refused() {
        check(b"", Err(KeyError::Empty));
        check(b"   ", Err(KeyError::Empty));
        check(b"\"\"", Err(KeyError::Empty));
        for bad in [r#""a\x""#, "\"abc", r#""k";=1"#, r#""k" x"#, r#""k","#, r#""a", "b""#] {
            check(bad.as_bytes(), Err(KeyError::Quoted));
        }
        for bad in
            ["a b", "a\tb", "a,b", "a;b=1", "a\"b", "a\\b", "caf\u{e9}", "a\u{0}b", "a\u{7f}"]
        {
            check(bad.as_bytes(), Err(KeyError::BareCharacter));
        }
        check(b"ab\xff", Err(KeyError::BareCharacter));
        check(b"\"ab\xff\"", Err(KeyError::Quoted));
    }

    #[test]
    fn the_length_is_counted_in_bytes_after_unquoting() {
        let longest = "k".repeat(255);
        check(longest.as_bytes(), Ok(&longest));
        check(format!("\"{longest}\"").as_bytes(), Ok(&longest));
        let over = KeyError::TooLong { length: 256, limit: 255 };
        check("k".repeat(256).as_bytes(), Err(over));
        check(format!("\"{}\"", r"\\".repeat(255)).as_bytes(), Ok(&"\\".repeat(255)));
    }

    #[test]
    fn strict_syntax_takes_strings_only() {
        for value in ["abc", "42", "?1", ":YWJj:", "@1"] {
            let parsed = IdempotencyKey::parse(value.as_bytes(), KeySyntax::QuotedOnly);
            assert_eq!(parsed, Err(KeyError::QuotesRequired));
        }
        assert!(IdempotencyKey::parse(b"\"abc\"", KeySyntax::QuotedOnly).is_ok());
    }

    #[test]
    fn a_random_key_is_a_uuid_of_version_4_and_never_the_same() {
        let keys: Vec<_> = (0..100).map(|_| IdempotencyKey::random()).collect();
        for key in &keys {
            let text = key.as_str().as_bytes();
            assert_eq!((text.len(), text[14]), (36, b'4'), "{}", key.as_str());
            assert!(b"89ab".contains(&text[19]), "{}", key.as_str());
            check(text, Ok(key.as_str()));
        }
        let distinct: std::collections::HashSet<_> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
    }

    #[test]
    fn debug_shows_the_length_and_not_the_key() {
        let key = IdempotencyKey::parse(b"jane@example.com", KeySyntax::BareOrQuoted).unwrap();
        assert_eq!(format!("{key:?}"), "IdempotencyKey(16 bytes)");
    }

    proptest! {
        #[test]
        fn a_key_survives_its_own_header_value(text in "[ -~]{1,255}") {
            let key = IdempotencyKey::checked(&text).unwrap();
            let value = key.to_header_value();
            // An outer space of a bare value would be trimmed, so such a key must come quoted.
            prop_assert_eq!(IdempotencyKey::parse(value.as_bytes(), KeySyntax::BareOrQuoted), Ok(key));
        }

        #[test]
        fn any_bytes_are_parsed_or_refused_without_a_panic(bytes: Vec<u8>) {
            let _ = IdempotencyKey::parse(&bytes, KeySyntax::BareOrQuoted);
        }

        #[test]
        fn a_header_is_read_as_its_bytes_are(text in "[ -~]{0,4}|[!-~]{250,260}|[ -~\t\u{e9}]{0,300}") {
            let value = HeaderValue::from_bytes(text.as_bytes()).unwrap();
            for syntax in [KeySyntax::BareOrQuoted, KeySyntax::QuotedOnly] {
                let parsed = IdempotencyKey::parse(value.as_bytes(), syntax);
                prop_assert_eq!(IdempotencyKey::of_header(&value, syntax), parsed);
            }
        }
    }
}
