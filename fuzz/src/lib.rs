//! What holds for any bytes: one function for each fuzz target. `tests/fuzzing.rs` calls them too,
//! on stable Rust, with bytes from a seeded generator.
//!
//! `cargo fuzz run -s none key` (or `record`, `response`, `canonical`) runs one without end.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use tower_idempotency::record::{Claim, Current, Effects, Millis, OnExpired, Record, Terms, claim};
use tower_idempotency::{
    Fingerprint, Fingerprints, HeaderRules, HolderId, IdempotencyKey, JsonPointer, KeySyntax,
    Recipe, RecipeId, StoredBody, StoredResponse, canonical_json,
};

/// The key parser: what it takes is printable, and comes back from its own header.
pub fn key(data: &[u8]) {
    let lenient = IdempotencyKey::parse(data, KeySyntax::BareOrQuoted);
    let strict = IdempotencyKey::parse(data, KeySyntax::QuotedOnly);
    if let Ok(strict) = &strict {
        assert_eq!(lenient.as_ref(), Ok(strict), "what is strict is lenient too");
    }
    let Ok(key) = lenient else { return };
    let text = key.as_str();
    assert!((1..=IdempotencyKey::MAX_LENGTH).contains(&text.len()));
    assert!(text.bytes().all(|byte| matches!(byte, b' '..=b'~')));
    assert_eq!(IdempotencyKey::new(text).as_ref(), Ok(&key));
    let header = key.to_header_value();
    let again = IdempotencyKey::parse(header.as_bytes(), KeySyntax::BareOrQuoted);
    assert_eq!(again.as_ref(), Ok(&key));
    let quoted = format!("\"{}\"", text.replace('\\', r"\\").replace('"', "\\\""));
    let quoted = IdempotencyKey::parse(quoted.as_bytes(), KeySyntax::QuotedOnly);
    assert_eq!(quoted.as_ref(), Ok(&key), "both notations name one key");
}

/// The record codec: what it reads, it writes back as it was, and the rules take it.
pub fn record(data: &[u8]) {
    let Ok(record) = Record::decode(Bytes::copy_from_slice(data)) else { return };
    let written = record.encode();
    let mut expected = data.to_vec();
    if !matches!(data[1], 1 | 4 | 5) {
        // A length says nothing unless there is a lease or a response.
        expected[76..80].fill(0);
    }
    assert_eq!(written, expected, "a record has one form");
    let again = Record::decode(written).expect("what was written can be read");
    assert_eq!(again, record);
    // The rules go on from any record without a panic, at any time.
    let mut head = [0; 32];
    head[..data.len().min(32)].copy_from_slice(&data[..data.len().min(32)]);
    let fingerprint = Fingerprint::from_stored(RecipeId::from_bytes([1; 4]), head);
    let second = std::time::Duration::from_secs(1);
    let terms = Terms { lease: second, retention: second, unknown_retention: second };
    for on_expired in [OnExpired::Refuse, OnExpired::Reexecute] {
        for now in [0, 1 << 40, (1 << 48) - 1] {
            let holder = HolderId::from_bytes([7; 16]);
            let fingerprints = Fingerprints::one(fingerprint);
            let wish =
                Claim { holder, fingerprints, terms, on_expired, effects: Effects::Anywhere };
            let _ = claim(Current::Present(record.clone()), Millis(now), &wish);
        }
    }
}

/// The stored response: what it reads, it keeps over writing and reading; and what a handler
/// answers comes back with its headers, in their number and order.
pub fn response(data: &[u8]) {
    if let Ok(stored) = StoredResponse::decode(Bytes::copy_from_slice(data)) {
        let again = StoredResponse::decode(stored.encode()).expect("what was written can be read");
        assert_eq!(again, stored);
    }
    // Lines of the form "name:value", then an empty line and the body.
    let mut answer = Response::new(());
    let mut rest = data;
    while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
        let (line, tail) = (&rest[..end], &rest[end + 1..]);
        rest = tail;
        if line.is_empty() {
            break;
        }
        let Some(middle) = line.iter().position(|byte| *byte == b':') else { continue };
        let name = HeaderName::from_bytes(&line[..middle]);
        let value = HeaderValue::from_bytes(&line[middle + 1..]);
        if let (Ok(name), Ok(value)) = (name, value) {
            answer.headers_mut().append(name, value);
        }
    }
    *answer.status_mut() =
        StatusCode::from_u16(200 + u16::from(rest.first().copied().unwrap_or(0)))
            .unwrap_or(StatusCode::OK);
    let (head, ()) = answer.into_parts();
    let body = Bytes::copy_from_slice(rest);
    let stored = StoredResponse::new(&head, body.clone(), &HeaderRules::default());
    let read = StoredResponse::decode(stored.encode()).expect("what was written can be read");
    assert_eq!(read, stored);
    assert_eq!(read.status(), head.status);
    assert_eq!(read.body(), &StoredBody::Kept(body));
    for name in read.headers().keys() {
        let (kept, given) = (read.headers().get_all(name), head.headers.get_all(name));
        assert!(kept.iter().eq(given.iter()), "{name}: number, order and bytes are kept");
    }
    for never in ["connection", "content-length", "transfer-encoding", "set-cookie", "date"] {
        assert!(!read.headers().contains_key(never), "{never}");
    }
}

/// What is compared of bodies: the canonical form of JSON is its own, and no body is read as
/// another one.
pub fn canonical(data: &[u8]) {
    if let Some(canonical) = canonical_json(data) {
        assert_eq!(canonical_json(&canonical).as_ref(), Some(&canonical), "it is its own form");
        let document: serde_json::Value = serde_json::from_slice(data).expect("it is JSON");
        let reread: serde_json::Value = serde_json::from_slice(&canonical).expect("it is JSON");
        assert!(equal(&document, &reread), "it says the same");
        let pretty = serde_json::to_vec_pretty(&document).expect("it can be written");
        assert_eq!(canonical_json(&pretty).as_ref(), Some(&canonical), "spacing does not count");
    }
    let recipe = Recipe::new()
        .canonical_json()
        .canonical_form()
        .multipart_parts()
        .exclude(JsonPointer::from_static("/a"))
        .exclude(JsonPointer::from_static("/a/0/b~1c"));
    let digest = |recipe: &Recipe, content_type: &'static str, body: &[u8]| {
        let request = Request::post("/p").header(CONTENT_TYPE, content_type).body(());
        let (parts, ()) = request.expect("a request").into_parts();
        *recipe.fingerprint(&parts, "/p", &Bytes::copy_from_slice(body)).digest()
    };
    for content_type in [
        "application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=-",
        "text/plain",
    ] {
        let first = digest(&recipe, content_type, data);
        assert_eq!(first, digest(&recipe, content_type, data), "the same is the same");
    }
    // One byte more is another body, wherever bodies are compared byte for byte.
    let longer = [data, b"\0"].concat();
    assert_ne!(digest(&recipe, "text/plain", data), digest(&recipe, "text/plain", &longer));
    // A broken form and a broken multipart body are not guessed at.
    if data.contains(&b'%') && !data.windows(3).any(is_escape) {
        let other = data.iter().map(|byte| if *byte == b'+' { b'-' } else { *byte });
        let other: Vec<u8> = other.collect();
        let form = "application/x-www-form-urlencoded";
        assert_eq!(digest(&recipe, form, data) == digest(&recipe, form, &other), data == other);
    }
}

fn is_escape(three: &[u8]) -> bool {
    three[0] == b'%' && three[1].is_ascii_hexdigit() && three[2].is_ascii_hexdigit()
}

/// Equal as JSON: 1 and 1.0 are one number.
fn equal(one: &serde_json::Value, other: &serde_json::Value) -> bool {
    use serde_json::Value::{Array, Number, Object};
    match (one, other) {
        (Number(one), Number(other)) => one.as_f64() == other.as_f64(),
        (Array(one), Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| equal(one, other))
        }
        (Object(one), Object(other)) => {
            one.len() == other.len()
                && one.iter().all(|(name, it)| other.get(name).is_some_and(|o| equal(it, o)))
        }
        _ => one == other,
    }
}
