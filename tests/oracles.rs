//! Parsers that others wrote say the same: `rfc8785` of canonical JSON, `http-sf` of quoted keys.
#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::io::Write as _;
use std::process::{Command, Stdio};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};
use tower_idempotency::{IdempotencyKey, KeySyntax, canonical_json};

#[path = "support/tools.rs"]
#[allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]
mod tools;

const QUESTIONS: usize = 4_000;

fn ask(questions: &[Value]) -> Vec<Value> {
    let mut oracle = Command::new(tools::python())
        .arg(tools::file("sdk/oracle.py"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = oracle.stdin.take().unwrap();
    let lines: String = questions.iter().map(|question| format!("{question}\n")).collect();
    let asking = std::thread::spawn(move || stdin.write_all(lines.as_bytes()));
    let output = oracle.wait_with_output().unwrap();
    asking.join().unwrap().unwrap();
    assert!(output.status.success());
    let answers = String::from_utf8(output.stdout).unwrap();
    let answers: Vec<Value> =
        answers.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(answers.len(), questions.len());
    answers
}

/// A document as some client might write it, now and then broken.
fn document(random: &mut StdRng, depth: u32) -> String {
    const SPACES: [&str; 4] = ["", " ", "\n", "\t "];
    const TEXTS: [&str; 12] = [
        "",
        "a",
        "b",
        "é",
        "€",
        "\u{fb33}",
        "😀",
        "\\u0061",
        "\\u20ac",
        "\\/",
        "\\ud83d\\ude00",
        "\\u000f\\n",
    ];
    const NUMBERS: [&str; 16] = [
        "0",
        "-0",
        "1",
        "1.0",
        "1e2",
        "-1.50",
        "0.1",
        "1e21",
        "1e-7",
        "123456789012345",
        "0.000001",
        "4.35",
        "1E+20",
        "9007199254740991",
        "333333333.333333",
        "-2e-9",
    ];
    let mut pick = |from: &[&'static str]| *from.choose(random).unwrap();
    let space = pick(&SPACES);
    let text = format!("\"{}{}\"", pick(&TEXTS), pick(&TEXTS));
    let number = pick(&NUMBERS);
    let kind = if depth == 0 { random.random_range(0..4) } else { random.random_range(0..7) };
    match kind {
        0 => format!("{space}{text}"),
        1 => number.to_owned(),
        2 => format!("{:?}", f64::from(random.random_range(-1_000_000..1_000_000_i32)) / 128.0),
        3 => ["null", "true", "false"].choose(random).unwrap().to_string(),
        4 => {
            let items = (0..random.random_range(0..4)).map(|_| document(random, depth - 1));
            format!("{space}[{}]", items.collect::<Vec<_>>().join(","))
        }
        _ => {
            let names = ["a", "b", "é", "€", "\u{fb33}", "😀", "A", "\\u0061b", "10", "2"];
            let members = (0..random.random_range(0..5)).map(|_| {
                let name = names.choose(random).unwrap();
                format!("{space}\"{name}\":{}", document(random, depth - 1))
            });
            format!("{{{}}}", members.collect::<Vec<_>>().join(","))
        }
    }
}

#[test]
fn canonical_json_is_that_of_rfc8785() {
    let mut random = StdRng::seed_from_u64(8785);
    let documents: Vec<String> = (0..QUESTIONS).map(|_| document(&mut random, 3)).collect();
    let questions: Vec<Value> = documents.iter().map(|text| json!({ "json": text })).collect();
    let mut compared = 0;
    for (text, answer) in documents.iter().zip(ask(&questions)) {
        // What has no canonical form here is compared byte for byte, whatever others make of it.
        let Some(form) = canonical_json(text.as_bytes()) else { continue };
        compared += 1;
        assert_eq!(
            Some(std::str::from_utf8(&form).unwrap()),
            answer["canonical"].as_str(),
            "{text}"
        );
    }
    assert!(compared > QUESTIONS / 2, "{compared}");
}

#[test]
fn a_quoted_key_is_what_a_parser_of_structured_fields_says() {
    let mut random = StdRng::seed_from_u64(9651);
    let pieces = [
        "\"", "\"", "a", "pay-1", " ", "\\\"", "\\\\", "\\x", ";", "v=1", ";a", ",", "=", ":",
        "?1", "~", "\t",
    ];
    let values: Vec<String> = (0..QUESTIONS)
        .map(|_| {
            let inside =
                (0..random.random_range(0..6)).map(|_| *pieces.choose(&mut random).unwrap());
            let inside: String = inside.collect();
            match random.random_range(0..3) {
                0 => format!("\"{inside}\""),
                1 => format!("\"{inside}\";v=1"),
                _ => format!("\"{inside}"),
            }
        })
        .collect();
    // Space around a field value is no part of it (RFC 9110, 5.5); a tab is none of the parser's.
    let trimmed = |text: &String| json!({ "header": text.trim_matches([' ', '\t']) });
    let questions: Vec<Value> = values.iter().map(trimmed).collect();
    let mut keys = 0;
    for (value, answer) in values.iter().zip(ask(&questions)) {
        let ours = IdempotencyKey::parse(value.as_bytes(), KeySyntax::QuotedOnly).ok();
        // An empty string is one there, and no key here.
        let theirs = answer["key"].as_str().filter(|text| !text.is_empty());
        assert_eq!(ours.as_ref().map(IdempotencyKey::as_str), theirs, "{value:?}");
        keys += usize::from(ours.is_some());
    }
    assert!(keys > QUESTIONS / 10, "{keys}");
}
