//! JSON bodies: reading them without losing anything, and their canonical form (RFC 8785).
//!
//! Two requests must never meet by what a parser leaves out. So whatever cannot be told apart after
//! parsing has no canonical form, and its raw bytes are compared instead: members that are given
//! twice, numbers that a double cannot hold, lone surrogates, what is nested too deeply.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use crate::key::BodyDoubt;

/// A place in a JSON document (RFC 6901), such as `/payment/sent_at`. The whole document, which RFC 6901
/// names by the empty string, is none: nobody's key is a whole body, and to exclude it would compare nothing.
///
/// # Example
/// ```
/// use tower_idempotency::JsonPointer;
///
/// let pointer = JsonPointer::from_static("/payment/sent_at");
/// assert_eq!(pointer.as_str(), "/payment/sent_at");
/// assert!("payment.sent_at".parse::<JsonPointer>().is_err());
/// # Ok::<(), tower_idempotency::JsonPointerError>(())
/// ```
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct JsonPointer(Arc<str>);

/// A text that is no JSON pointer to a part of a document.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{}", self.reason())]
pub struct JsonPointerError(String);

impl JsonPointerError {
    fn reason(&self) -> String {
        if self.0.is_empty() {
            return "the empty JSON pointer is the whole document (RFC 6901); name a part of it, as in \
                    /payment/sent_at"
                .to_owned();
        }
        format!(
            "{:?} is no JSON pointer: one starts with a slash, as in /payment/sent_at (RFC 6901)",
            self.0
        )
    }
}

impl JsonPointer {
    /// A pointer that is written in the program.
    ///
    /// # Panics
    /// If it does not start with a slash, or is empty, which would be the whole document.
    #[must_use]
    #[track_caller]
    pub fn from_static(text: &'static str) -> Self {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    /// The pointer as it was written.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// What stands there.
    pub(crate) fn find<'v>(&self, document: &'v Value) -> Option<&'v Value> {
        document.pointer(&self.0)
    }

    /// Takes away what stands there. `false`: nothing does.
    #[cfg(feature = "json")]
    pub(super) fn remove(&self, document: &mut Value) -> bool {
        let Some((parent, last)) = self.0.rsplit_once('/') else { return false };
        match document.pointer_mut(parent) {
            Some(Value::Object(members)) => members.remove(&unescaped(last)).is_some(),
            Some(Value::Array(items)) => match last.parse::<usize>() {
                Ok(index) if index < items.len() => {
                    items.remove(index);
                    true
                }
                Ok(_) | Err(_) => false,
            },
            Some(Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_)) | None => {
                false
            }
        }
    }

    /// The name of a field of a form, which has one level only.
    pub(super) fn field(&self) -> Option<String> {
        let name = self.0.strip_prefix('/')?;
        (!name.contains('/')).then(|| unescaped(name))
    }
}

impl std::str::FromStr for JsonPointer {
    type Err = JsonPointerError;

    fn from_str(text: &str) -> Result<Self, JsonPointerError> {
        match text.starts_with('/') {
            true => Ok(Self(text.into())),
            false => Err(JsonPointerError(text.to_owned())),
        }
    }
}

fn unescaped(token: &str) -> String {
    token.replace("~1", "/").replace("~0", "~")
}

/// Why a body is no document that can be looked into.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Unreadable {
    /// It is no JSON.
    Malformed,
    /// Readers of it may disagree.
    Ambiguous(BodyDoubt),
}

/// Reads a document in which every member is given once.
pub(crate) fn read(body: &[u8]) -> Result<Value, Unreadable> {
    if names_a_marker(body) {
        return Err(Unreadable::Ambiguous(BodyDoubt::ReservedName));
    }
    // A handler that does not look at a value does not stumble over it either: what it would accept
    // is not taken for something else than JSON.
    let beyond = |_| match serde_json::from_slice::<IgnoredAny>(body) {
        Ok(_) => Unreadable::Ambiguous(beyond_the_reader(body)),
        Err(_) => Unreadable::Malformed,
    };
    let document = serde_json::from_slice(body).map_err(beyond)?;
    // Another pass: whatever another crate makes of numbers in `Value`, this one looks at names only.
    let twice = |_| Unreadable::Ambiguous(BodyDoubt::MemberTwice);
    serde_json::from_slice::<Unique>(body).map_err(twice)?;
    Ok(document)
}

/// What the reader could not hold of a body that is JSON. It gives three things up, and says which in
/// words only.
fn beyond_the_reader(body: &[u8]) -> BodyDoubt {
    let (mut rest, mut depth) = (body, 0_usize);
    let mut too_great = false;
    while let Some((&first, tail)) = rest.split_first() {
        rest = match first {
            b'"' => after_string(tail),
            b'[' | b'{' => {
                depth += 1;
                if depth >= TOO_DEEP {
                    return BodyDoubt::TooDeep;
                }
                tail
            }
            b']' | b'}' => {
                depth = depth.saturating_sub(1);
                tail
            }
            b'-' | b'0'..=b'9' => {
                let (number, tail) = rest.split_at(end_of_number(rest));
                let double = std::str::from_utf8(number).ok().and_then(|it| it.parse().ok());
                too_great |= double.is_none_or(f64::is_infinite);
                tail
            }
            _ => tail,
        };
    }
    if too_great { BodyDoubt::NumberTooGreat } else { BodyDoubt::LoneSurrogate }
}

/// The reader ends at this level.
const TOO_DEEP: usize = 128;

/// How the names begin by which `serde_json` marks raw values and numbers within itself. An object
/// of a client with such a member would be read as the text within it.
const MARKER: &[u8] = b"$serde_json::private::";

/// True if the marker may be in the body, escaped or not. It is ASCII, so `\u00XX` is all that hides it.
fn names_a_marker(body: &[u8]) -> bool {
    let holds = |text: &[u8]| text.windows(MARKER.len()).any(|part| part == MARKER);
    if !body.windows(4).any(|part| part == br"\u00") {
        return holds(body);
    }
    let mut plain = Vec::with_capacity(body.len());
    let mut rest = body;
    while let Some((&first, tail)) = rest.split_first() {
        let escaped = rest.strip_prefix(br"\u00").and_then(|hex| hex.split_at_checked(2));
        let code = escaped.and_then(|(hex, tail)| {
            let code = u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?;
            Some((code, tail))
        });
        let (byte, tail) = code.unwrap_or((first, tail));
        plain.push(byte);
        rest = tail;
    }
    holds(&plain)
}

/// A document that is only looked through, for members that are given twice.
struct Unique;

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Look)
    }
}

struct Look;

impl<'de> Visitor<'de> for Look {
    type Value = Unique;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_str<E>(self, _: &str) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_unit<E>(self) -> Result<Unique, E> {
        Ok(Unique)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Unique, A::Error> {
        while items.next_element::<Unique>()?.is_some() {}
        Ok(Unique)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Unique, A::Error> {
        let mut names = HashSet::new();
        while let Some(name) = members.next_key::<String>()? {
            if !names.insert(name) {
                return Err(A::Error::custom("a member is given twice"));
            }
            members.next_value::<Unique>()?;
        }
        Ok(Unique)
    }
}

/// A document whose canonical form stands for it, or `None` if its raw bytes have to.
#[cfg(feature = "json")]
pub(super) fn faithful(body: &[u8]) -> Option<Value> {
    let document = read(body).ok()?;
    numbers_are_exact(body).then_some(document)
}

/// The one place that knows who makes canonical forms. `None` also if the form would not be its own.
#[cfg(feature = "json")]
pub(super) fn canonical(document: &Value) -> Option<Vec<u8>> {
    let form = serde_json_canonicalizer::to_vec(document).ok()?;
    numbers_are_exact(&form).then_some(form)
}

/// The canonical form of a JSON body (RFC 8785), as fingerprints by
/// [`Recipe::canonical_json`](crate::Recipe::canonical_json) see it. `None` if the body has none
/// that stands for it alone: it is no JSON, a member is given twice or named like a mark of the parser, a number has more digits than
/// a double keeps, a surrogate stands alone, or it is nested more than 127 levels deep.
///
/// # Example
/// ```
/// use tower_idempotency::canonical_json;
///
/// let one = canonical_json(br#"{ "b": 1.0, "a": "\u00e9" }"#);
/// assert_eq!(one.as_deref(), Some(r#"{"a":"é","b":1}"#.as_bytes()));
/// assert_eq!(canonical_json(br#"{"a":1,"a":2}"#), None);
/// assert_eq!(canonical_json(b"9007199254740993"), None);
/// ```
#[cfg(feature = "json")]
#[must_use]
pub fn canonical_json(body: &[u8]) -> Option<Vec<u8>> {
    faithful(body).as_ref().and_then(canonical)
}

/// The greatest integer up to which every integer is a double of its own.
#[cfg(feature = "json")]
const EXACT: u64 = 1 << 53;
/// Decimals of this many digits are doubles of their own.
#[cfg(feature = "json")]
const EXACT_DIGITS: usize = 15;

/// True if no two numbers that differ could be read as the same double. `body` is valid JSON.
#[cfg(feature = "json")]
fn numbers_are_exact(body: &[u8]) -> bool {
    let mut rest = body;
    while let Some((&first, tail)) = rest.split_first() {
        rest = match first {
            b'"' => after_string(tail),
            b'-' | b'0'..=b'9' => {
                let (number, tail) = rest.split_at(end_of_number(rest));
                if !is_exact(number) {
                    return false;
                }
                tail
            }
            _ => tail,
        };
    }
    true
}

/// Where the number ends that a text begins with.
fn end_of_number(text: &[u8]) -> usize {
    let of_number = |byte: &u8| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E');
    text.iter().position(|byte| !of_number(byte)).unwrap_or(text.len())
}

fn after_string(mut rest: &[u8]) -> &[u8] {
    while let Some((&first, tail)) = rest.split_first() {
        match first {
            b'"' => return tail,
            b'\\' => rest = tail.get(1..).unwrap_or_default(),
            _ => rest = tail,
        }
    }
    rest
}

#[cfg(feature = "json")]
fn is_exact(number: &[u8]) -> bool {
    let exponent_at = number.iter().position(|byte| matches!(byte, b'e' | b'E'));
    let (mantissa, exponent) = number.split_at(exponent_at.unwrap_or(number.len()));
    // Zeros at either end say how great a number is, not how exact.
    let significant = |text: &[u8]| {
        let digits: Vec<u8> = text.iter().copied().filter(u8::is_ascii_digit).collect();
        let first = digits.iter().position(|digit| *digit != b'0');
        let last = digits.iter().rposition(|digit| *digit != b'0');
        first.zip(last).map_or(0, |(first, last)| last - first + 1)
    };
    let exponent_digits = exponent.iter().filter(|byte| byte.is_ascii_digit()).count();
    // Far from the smallest and the greatest double, so that nothing is rounded to zero.
    if exponent_digits > 2 {
        return false;
    }
    let is_integer = exponent.is_empty() && !mantissa.contains(&b'.');
    let integer =
        || std::str::from_utf8(mantissa).ok()?.trim_start_matches('-').parse::<u64>().ok();
    significant(mantissa) <= EXACT_DIGITS
        || (is_integer && integer().is_some_and(|integer| integer <= EXACT))
}

#[cfg(test)]
#[cfg(feature = "json")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(body: &str) -> Option<String> {
        canonical_json(body.as_bytes()).map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn order_spacing_and_notation_do_not_count_and_arrays_keep_theirs() {
        for (one, canonical) in [
            (r#" { "b" : [2, 1] , "a" : null } "#, r#"{"a":null,"b":[2,1]}"#),
            (r#"{"x":1.50,"y":1e2,"z":-0}"#, r#"{"x":1.5,"y":100,"z":0}"#),
            (r#"{"\u0061":"\/\u20ac"}"#, r#"{"a":"/€"}"#),
            (
                "{\"\u{fb33}\":4,\"😀\":3,\"€\":2,\"é\":1}",
                "{\"é\":1,\"€\":2,\"😀\":3,\"\u{fb33}\":4}",
            ),
            ("9007199254740992", "9007199254740992"),
            ("34434943499499.5e2", "3443494349949950"),
            ("3443494349949950.0", "3443494349949950"),
            ("1234567890e12", "1.23456789e+21"),
            ("-9007199254740992", "-9007199254740992"),
        ] {
            assert_eq!(text(one).as_deref(), Some(canonical), "{one}");
        }
    }

    #[test]
    fn what_a_parser_would_lose_has_no_canonical_form() {
        let deep = format!("{}{}", "[".repeat(128), "]".repeat(128));
        for lossy in [
            r#"{"amount":1,"amount":2}"#,
            r#"{"a":{"b":1,"\u0062":2}}"#,
            "9007199254740993",
            "-9007199254740993",
            "[18446744073709551616]",
            "0.10000000000000000001",
            "1234567890.1234567",
            "1e400",
            "1e-400",
            "1e100",
            "1e099",
            "123456789012345e99",
            "5e-324",
            r#""\ud800""#,
            r#"{"\udc00":1}"#,
            &deep,
            "",
            "{",
            "{} {}",
            "nul",
            "[1,]",
        ] {
            assert_eq!(text(lossy), None, "{lossy}");
        }
        assert!(canonical_json(b"\"\xff\"").is_none());
        assert!(text(&format!("{}{}", "[".repeat(127), "]".repeat(127))).is_some());
    }

    #[test]
    fn what_cannot_be_read_says_why() {
        let deep = format!("{}{}", "[".repeat(128), "]".repeat(128));
        let as_deep_as_it_may = format!("[{}{}, 1e400]", "[".repeat(126), "]".repeat(126));
        for (body, doubt) in [
            (r#"{"a":1,"a":2}"#, BodyDoubt::MemberTwice),
            (r#"{"a":{"b":1,"\u0062":2}}"#, BodyDoubt::MemberTwice),
            (&deep, BodyDoubt::TooDeep),
            (&as_deep_as_it_may, BodyDoubt::NumberTooGreat),
            ("[1e400]", BodyDoubt::NumberTooGreat),
            (r#"{"a":"1e400 \" [[","b":-1.5E+999}"#, BodyDoubt::NumberTooGreat),
            (r#"{"a":"\ud83d"}"#, BodyDoubt::LoneSurrogate),
            (r#"{"1e400":12,"\udc00":1}"#, BodyDoubt::LoneSurrogate),
            (r#"{"$serde_json::private::RawValue":"1"}"#, BodyDoubt::ReservedName),
        ] {
            assert_eq!(read(body.as_bytes()), Err(Unreadable::Ambiguous(doubt)), "{body}");
        }
        for malformed in ["", "{", "1e", "[1,]", "nul"] {
            assert_eq!(read(malformed.as_bytes()), Err(Unreadable::Malformed), "{malformed}");
        }
    }

    #[test]
    fn digits_in_strings_are_no_numbers() {
        let long = r#"{"card":"4242424242424242424242","\"1e999":"\\"}"#;
        assert!(text(long).is_some());
    }

    #[test]
    fn a_pointer_finds_and_removes_what_it_names() {
        let document = || read(br#"{"a":{"b/c":1,"m~n":2,"l":[7,8]},"":3}"#).unwrap();
        for (pointer, rest) in [
            ("/a/b~1c", r#"{"":3,"a":{"l":[7,8],"m~n":2}}"#),
            ("/a/m~0n", r#"{"":3,"a":{"b/c":1,"l":[7,8]}}"#),
            ("/a/l/0", r#"{"":3,"a":{"b/c":1,"l":[8],"m~n":2}}"#),
            ("/", r#"{"a":{"b/c":1,"l":[7,8],"m~n":2}}"#),
        ] {
            let pointer = JsonPointer::from_static(pointer);
            let mut document = document();
            assert!(pointer.find(&document).is_some(), "{pointer:?}");
            assert!(pointer.remove(&mut document), "{pointer:?}");
            assert_eq!(canonical(&document).unwrap(), rest.as_bytes());
            assert!(pointer.as_str() == "/a/l/0" || !pointer.remove(&mut document));
        }
        for missing in ["/b", "/a/l/2", "/a/l/-", "/a/l/x", "/a/b~1c/d"] {
            assert!(!JsonPointer::from_static(missing).remove(&mut document()), "{missing}");
        }
        let refused = |text: &str| text.parse::<JsonPointer>().unwrap_err().to_string();
        assert!(refused("").contains("the whole document"), "{}", refused(""));
        assert!(refused("a/b").contains("starts with a slash"), "{}", refused("a/b"));
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            (-1_000_000i64..1_000_000).prop_map(Value::from),
            (-1_000_000i32..1_000_000).prop_map(|n| Value::from(f64::from(n) / 64.0)),
            ".{0,6}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(".{0,4}", inner, 0..4)
                    .prop_map(|members| members.into_iter().collect()),
            ]
        })
    }

    proptest! {
        #[test]
        fn spacing_does_not_count_and_the_form_is_its_own(document in any_json()) {
            let compact = serde_json::to_vec(&document).unwrap();
            let pretty = serde_json::to_vec_pretty(&document).unwrap();
            let canonical = canonical_json(&compact);
            prop_assert_eq!(&canonical_json(&pretty), &canonical);
            if let Some(canonical) = canonical {
                let again = canonical_json(&canonical);
                prop_assert_eq!(again.as_ref(), Some(&canonical));
            }
        }

        #[test]
        fn different_documents_have_different_forms(one in any_json(), other in any_json()) {
            let form = |value: &Value| canonical_json(&serde_json::to_vec(value).unwrap());
            if let (Some(left), Some(right)) = (form(&one), form(&other)) {
                prop_assert_eq!(left == right, equal(&one, &other), "{} {}", one, other);
            }
        }
    }

    /// Equal as JSON: 1 and 1.0 are one number.
    fn equal(one: &Value, other: &Value) -> bool {
        match (one, other) {
            (Value::Number(one), Value::Number(other)) => one.as_f64() == other.as_f64(),
            (Value::Array(one), Value::Array(other)) => {
                one.len() == other.len()
                    && one.iter().zip(other).all(|(one, other)| equal(one, other))
            }
            (Value::Object(one), Value::Object(other)) => {
                one.len() == other.len()
                    && one.iter().all(|(name, it)| other.get(name).is_some_and(|o| equal(it, o)))
            }
            _ => one == other,
        }
    }
}
