//! The bytes of records and stored responses, as released: what one release wrote, every later one
//! reads as the same values, and the same values give the same bytes.
//!
//! The files are hexadecimal text with a comment for each part, so that a change can be reviewed.
//! A file of a released version never changes. To write those that are missing, set
//! `GOLDEN=write`; to change one on purpose before its release, delete it first.

#![allow(clippy::unwrap_used, reason = "a test says what is wrong by failing")]

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response};
use tower_idempotency::record::{HEADER_LENGTH, Millis, Progress, Record, State, Unreadable};
use tower_idempotency::{
    Attempt, Fence, Fingerprint, HeaderRules, HolderId, RecipeId, StoredBody, StoredResponse,
};

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// The bytes of a file: hexadecimal digits, anything behind `#` is a comment.
#[track_caller]
fn read(name: &str) -> Bytes {
    let text = fs::read_to_string(path(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    let digits: Vec<u32> = text
        .lines()
        .flat_map(|line| line.split('#').next().unwrap_or_default().chars())
        .filter(|c| !c.is_whitespace())
        .map(|c| c.to_digit(16).unwrap_or_else(|| panic!("{name}: {c:?} is no digit")))
        .collect();
    assert_eq!(digits.len() % 2, 0, "{name}: half a byte");
    digits.chunks(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).unwrap()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Compares with the file, or writes a file that is missing if that is asked for.
#[track_caller]
fn check(name: &str, bytes: &Bytes, layout: impl Fn(&[u8]) -> String) {
    if env::var_os("GOLDEN").is_some_and(|what| what == "write") && !path(name).exists() {
        fs::write(path(name), layout(bytes)).unwrap();
    }
    assert_eq!(hex(bytes), hex(&read(name)), "{name}: these values have other bytes now");
}

const PARTS: [(usize, &str); 10] = [
    (1, "version"),
    (1, "state"),
    (4, "recipe of the fingerprint"),
    (32, "digest of the fingerprint"),
    (16, "holder"),
    (4, "attempt"),
    (6, "fence"),
    (6, "created"),
    (6, "end of the lease, or when the state was entered"),
    (4, "length of the lease"),
];

fn record_layout(bytes: &[u8]) -> String {
    let mut text = String::new();
    let mut rest = bytes;
    let mut part = |rest: &mut &[u8], length: usize, what: &str| {
        let (head, tail) = rest.split_at(length);
        *rest = tail;
        if !head.is_empty() {
            let _ = writeln!(text, "{} # {what}", hex(head));
        }
    };
    for (length, what) in PARTS {
        part(&mut rest, length, what);
    }
    let checkpoint = usize::try_from(u32::from_be_bytes(rest[..4].try_into().unwrap())).unwrap();
    part(&mut rest, 4, "length of the checkpoint");
    part(&mut rest, checkpoint, "checkpoint");
    let response = rest.len();
    part(&mut rest, response, "response");
    text
}

fn response_layout(bytes: &[u8]) -> String {
    let (version, message) = bytes.split_at(1);
    let mut text = format!("{} # version\n", hex(version));
    for line in message.chunks(32) {
        let _ = writeln!(text, "{}", hex(line));
    }
    text
}

const AT: Millis = Millis(1_764_403_200_000);

fn record(state: State, checkpoint: &'static [u8]) -> Record {
    let digest = std::array::from_fn(|index| u8::try_from(index).unwrap());
    Record {
        fingerprint: Fingerprint::from_stored(
            RecipeId::from_bytes([0xfd, 0x1b, 0x99, 0x57]),
            digest,
        ),
        holder: HolderId::from_bytes(std::array::from_fn(|i| 0xf0 + u8::try_from(i).unwrap())),
        attempt: Attempt::from_number(2),
        fence: Fence::from_number(AT.0 - 250),
        created: Millis(AT.0 - 90_000),
        checkpoint: Bytes::from_static(checkpoint),
        state,
    }
}

fn created() -> StoredResponse {
    let mut response = Response::builder().status(201).body(()).unwrap();
    for (name, value) in [
        ("content-type", "application/json"),
        ("location", "/v1/payments/pay_1"),
        ("link", "</a>; rel=\"next\""),
        ("link", "</b>; rel=\"prev\""),
    ] {
        let (name, value) = (HeaderName::from_static(name), HeaderValue::from_static(value));
        response.headers_mut().append(name, value);
    }
    let body = Bytes::from_static(br#"{"id":"pay_1","amount":1250,"currency":"eur"}"#);
    StoredResponse::new(&response.into_parts().0, body, &HeaderRules::default())
}

fn not_kept() -> StoredResponse {
    let response = Response::builder().status(200).header("location", "/v1/exports/7").body(());
    StoredResponse::without_body(&response.unwrap().into_parts().0)
}

fn empty() -> StoredResponse {
    let response = Response::builder().status(204).body(()).unwrap();
    StoredResponse::new(&response.into_parts().0, Bytes::new(), &HeaderRules::default())
}

fn opaque() -> StoredResponse {
    let mut response = Response::builder().status(402).body(()).unwrap();
    let latin1 = HeaderValue::from_bytes(b"caf\xe9").unwrap();
    response.headers_mut().append("x-reason", latin1);
    let body = Bytes::from((0..=u8::MAX).collect::<Vec<u8>>());
    StoredResponse::new(&response.into_parts().0, body, &HeaderRules::default())
}

fn records() -> Vec<(&'static str, Record)> {
    let running = |progress| State::InFlight {
        until: Millis(AT.0 + 30_000),
        lease: Duration::from_secs(30),
        progress,
    };
    let in_flight = || running(Progress::MayHaveActed);
    let completed =
        |response: StoredResponse| State::Completed { at: AT, response: response.encode() };
    let mut settled = record(completed(created()), b"");
    settled.holder = HolderId::NOBODY;
    vec![
        ("record-v1-in-flight.hex", record(in_flight(), b"")),
        ("record-v1-in-flight-untouched.hex", record(running(Progress::Untouched), b"")),
        ("record-v1-in-flight-checkpoint.hex", record(in_flight(), b"charge ch_1 sent")),
        ("record-v1-open.hex", record(State::Open { since: AT }, b"")),
        ("record-v1-indeterminate.hex", record(State::Indeterminate { since: AT }, b"ch_1")),
        ("record-v1-completed.hex", record(completed(created()), b"")),
        ("record-v1-completed-body-not-kept.hex", record(completed(not_kept()), b"")),
        ("record-v1-completed-from-outside.hex", settled),
        ("record-v1-greatest.hex", {
            Record {
                attempt: Attempt::from_number(u32::MAX),
                fence: Fence::MAX,
                created: Millis(Fence::MAX.number()),
                ..record(State::Open { since: Millis(Fence::MAX.number()) }, b"")
            }
        }),
    ]
}

fn responses() -> Vec<(&'static str, StoredResponse)> {
    vec![
        ("response-v1-created.hex", created()),
        ("response-v1-empty.hex", empty()),
        ("response-v1-body-not-kept.hex", not_kept()),
        ("response-v1-opaque-bytes.hex", opaque()),
    ]
}

#[test]
fn records_have_the_bytes_that_were_released() {
    for (name, record) in records() {
        check(name, &record.encode(), record_layout);
    }
}

#[test]
fn released_records_are_read_as_what_was_written() {
    for (name, record) in records() {
        assert_eq!(Record::decode(read(name)), Ok(record), "{name}");
    }
}

#[test]
fn responses_have_the_bytes_that_were_released() {
    for (name, response) in responses() {
        check(name, &response.encode(), response_layout);
    }
}

#[test]
fn released_responses_are_read_as_what_was_written() {
    for (name, response) in responses() {
        assert_eq!(StoredResponse::decode(read(name)).unwrap(), response, "{name}");
    }
}

#[test]
fn the_answer_in_a_released_record_is_a_released_answer() {
    let Ok(record) = Record::decode(read("record-v1-completed-body-not-kept.hex")) else {
        panic!("a record");
    };
    let State::Completed { response, .. } = record.state else { panic!("an answer") };
    assert_eq!(response, read("response-v1-body-not-kept.hex"));
    assert_eq!(StoredResponse::decode(response).unwrap().body(), &StoredBody::NotKept);
}

/// A later release may add fields to the response: this one reads what it knows.
#[test]
fn fields_that_a_later_release_adds_to_a_response_are_passed_over() {
    let mut bytes = read("response-v1-created.hex").to_vec();
    bytes.extend([0x98, 0x06, 0x2a]); // field 99, varint 42
    bytes.extend([0xa2, 0x06, 0x03, b'n', b'e', b'w']); // field 100, three bytes
    assert_eq!(StoredResponse::decode(bytes.into()).unwrap(), created());
}

/// The record has no room for guesses: another version is refused.
#[test]
fn a_record_of_a_later_version_is_refused() {
    let mut bytes = read("record-v1-open.hex").to_vec();
    assert_eq!(bytes.len(), HEADER_LENGTH);
    bytes[0] = 2;
    assert_eq!(Record::decode(bytes.into()), Err(Unreadable::Version));
}

/// Of first claims; what writes them and reads them has its test in `src/record/first.rs`.
const FIRST: [&str; 2] = ["record-v1-first.hex", "record-v1-first-untouched.hex"];

#[test]
fn the_record_of_a_first_claim_is_refused_by_whoever_does_not_know_its_expiry() {
    for name in FIRST {
        assert_eq!(Record::decode(read(name)), Err(Unreadable::Damaged), "{name}");
    }
}

#[test]
fn every_file_is_read_by_a_test() {
    let known: Vec<&str> = records()
        .iter()
        .map(|(name, _)| *name)
        .chain(responses().iter().map(|(name, _)| *name))
        .chain(FIRST)
        .collect();
    for entry in fs::read_dir(path("")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(known.contains(&name.as_str()), "tests/golden/{name} is read by no test");
    }
}
