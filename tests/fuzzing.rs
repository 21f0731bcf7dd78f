//! A short run of the fuzz targets on stable Rust: the functions of `fuzz/src/lib.rs` with bytes that
//! were mutated from seeds of the real formats. The long runs are `cargo fuzz`'s.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

#[path = "../fuzz/src/lib.rs"]
#[allow(unreachable_pub, missing_docs, reason = "it is a crate of its own there")]
mod targets;

/// Runs of each target; `FUZZ_RUNS` makes more.
const RUNS: u32 = 5_000;

/// Mutates seeds by cutting, doubling, overwriting and splicing, and gives each result to a target.
fn run(name: &str, seeds: &[Vec<u8>], target: fn(&[u8])) {
    let runs = std::env::var("FUZZ_RUNS").map_or(RUNS, |text| text.parse().expect("a number"));
    let mut random = StdRng::seed_from_u64(0x1de_0b07);
    for _ in 0..runs {
        let mut bytes = seeds[random.random_range(0..seeds.len())].clone();
        for _ in 0..random.random_range(0..6) {
            let at = random.random_range(0..=bytes.len());
            match random.random_range(0..5) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, random.random()),
                2 if at < bytes.len() => bytes[at] = random.random(),
                3 if at < bytes.len() => bytes[at] ^= 1 << random.random_range(0..8),
                _ => {
                    let other = &seeds[random.random_range(0..seeds.len())];
                    let from = random.random_range(0..=other.len());
                    let piece = other[from..].iter().take(8).copied().collect::<Vec<_>>();
                    bytes.splice(at..at, piece);
                }
            }
        }
        target(&bytes);
    }
    println!("{name}: {runs} runs");
}

fn seeds(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

/// The records and responses whose bytes are pinned.
fn golden(prefix: &str) -> Vec<Vec<u8>> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            let text = std::fs::read_to_string(entry.path()).unwrap();
            let lines = text.lines().map(|line| line.split('#').next().unwrap());
            let digits: String =
                lines.flat_map(str::chars).filter(char::is_ascii_hexdigit).collect();
            let bytes = digits
                .as_bytes()
                .chunks_exact(2)
                .map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap());
            found.push(bytes.collect());
        }
    }
    assert!(!found.is_empty(), "no golden files named {prefix}*");
    found
}

#[test]
fn any_header_value_is_a_key_that_comes_back_or_none() {
    let texts = [
        "pay-1",
        "\"pay-1\"",
        r#""a\"b\\c";v=1"#,
        "8e03978e-40d5-43e8-bc93-6894a57f9324",
        " \"k\" ",
    ];
    run("key", &seeds(&texts), targets::key);
}

#[test]
fn any_bytes_are_a_record_of_one_form_or_none() {
    run("record", &golden("record"), targets::record);
}

#[test]
fn any_bytes_are_a_response_that_stays_the_same_or_none() {
    let mut all = golden("response");
    all.extend(seeds(&[
        "content-type: text/plain\nlink: </a>\nlink: </b>\nset-cookie: a=1\n\nbody",
    ]));
    run("response", &all, targets::response);
}

#[test]
fn any_body_is_read_faithfully_or_compared_byte_for_byte() {
    let texts = [
        r#"{"b":[2,1,{"c":null}],"a":"é\u20ac","d":1.50e2}"#,
        r#"{"a":[{"b/c":1}],"\ud83d\ude00":-0.0}"#,
        "a=x+y&b=%20&a=2",
        "--\r\nx: y\r\n\r\n1\r\n----",
        "9007199254740992",
    ];
    run("canonical", &seeds(&texts), targets::canonical);
}
