//! Where the key of a request comes from: its headers, a place in its body, or its content.

use bytes::Bytes;
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use serde_json::Value;

use crate::config::{Config, KeySource};
use crate::fingerprint::{Fingerprints, JsonPointer, Unreadable, read_json};
use crate::key::{IdempotencyKey, KeyError};

/// The key in the headers of a request, if there is one.
///
/// Lines are counted before anything is parsed: two lines can be joined into one valid key.
pub(super) fn in_headers(
    headers: &HeaderMap,
    config: &Config,
) -> Result<Option<IdempotencyKey>, KeyError> {
    let mut found = None;
    for name in &config.key_headers {
        let mut lines = headers.get_all(name).iter();
        let Some(line) = lines.next() else { continue };
        if lines.next().is_some() {
            return Err(KeyError::Repeated);
        }
        let key = IdempotencyKey::of_header(line, config.key_syntax)?;
        if found.as_ref().is_some_and(|other| *other != key) {
            return Err(KeyError::Repeated);
        }
        found = Some(key);
    }
    Ok(found)
}

/// The key of a request whose body has been read, given the one in its headers.
pub(super) fn of_request(
    in_headers: Option<IdempotencyKey>,
    config: &Config,
    parts: &Parts,
    body: &Bytes,
    fingerprints: &Fingerprints,
) -> Result<Option<IdempotencyKey>, KeyError> {
    match &config.key_source {
        KeySource::Headers => Ok(in_headers),
        KeySource::Body(pointer) => match (in_headers, in_body(pointer, parts, body)?) {
            (Some(header), Some(body)) if header != body => Err(KeyError::Repeated),
            (header, body) => Ok(header.or(body)),
        },
        KeySource::Content => Ok(Some(in_headers.unwrap_or_else(|| of_content(fingerprints)))),
    }
}

fn in_body(
    pointer: &JsonPointer,
    parts: &Parts,
    body: &[u8],
) -> Result<Option<IdempotencyKey>, KeyError> {
    let media_type = parts.headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    let media_type = media_type.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    let media_type = media_type.to_ascii_lowercase();
    if media_type != b"application/json" && !media_type.ends_with(b"+json") {
        return Ok(None);
    }
    match read_json(body) {
        Ok(document) => match pointer.find(&document) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => IdempotencyKey::new(text).map(Some),
            Some(Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
                Err(KeyError::NotText)
            }
        },
        // The handler will say what is wrong with it, where a key is optional.
        Err(Unreadable::Malformed) => Ok(None),
        Err(Unreadable::Ambiguous(doubt)) => Err(KeyError::Ambiguous(doubt)),
    }
}

/// A key that equal requests share: the fingerprint's digest in hexadecimal.
fn of_content(fingerprints: &Fingerprints) -> IdempotencyKey {
    use std::fmt::Write as _;
    let digest =
        fingerprints.current().digest().iter().fold(String::with_capacity(64), |mut text, byte| {
            write!(text, "{byte:02x}").expect("writing to a String cannot fail");
            text
        });
    IdempotencyKey::new(&digest).expect("64 hexadecimal digits are a key")
}
