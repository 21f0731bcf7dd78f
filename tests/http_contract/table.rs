//! The table of cases is complete and true.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use crate::named::tests_in;

const CASES: u32 = 151;
/// What may stand in place of a test, with a reason behind it.
const ELSEWHERE: [&str; 4] = ["elsewhere", "optional", "documented", "sandbox"];

/// Every test function of this suite, as `module::name`, with the cases its comment names.
fn tests() -> BTreeMap<String, BTreeSet<u32>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/http_contract");
    let mut tests = BTreeMap::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let module = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let source = fs::read_to_string(&path).unwrap();
        let (mut cases, mut is_test) = (BTreeSet::new(), false);
        for line in source.lines().map(str::trim) {
            if let Some(numbers) = line.strip_prefix("// cases: ") {
                cases = numbers.split(", ").map(|number| number.parse().unwrap()).collect();
            } else if line.starts_with("#[tokio::test") || line == "#[test]" {
                is_test = true;
            } else if let Some(name) = line.trim_start_matches("async ").strip_prefix("fn ")
                && std::mem::take(&mut is_test)
            {
                let name = name.split('(').next().unwrap();
                tests.insert(format!("{module}::{name}"), std::mem::take(&mut cases));
            }
        }
    }
    tests
}

/// The rows of the table: a case, and what stands for it.
fn rows() -> Vec<(u32, String)> {
    let table = include_str!("cases.md");
    let rows = table.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| ")?.split(" | ");
        let number = cells.next()?.parse().ok()?;
        Some((number, cells.next()?.trim_end_matches(" |").to_owned()))
    });
    rows.collect()
}

#[test]
fn every_case_stands_in_the_table_exactly_once() {
    let numbers: Vec<u32> = rows().into_iter().map(|(number, _)| number).collect();
    assert_eq!(numbers, (1..=CASES).collect::<Vec<_>>());
}

/// The tests in a row, and its words about what is not tested here.
fn taken_apart(stands: &str) -> (Vec<&str>, Option<&str>) {
    if !stands.starts_with('`') {
        return (Vec::new(), Some(stands));
    }
    let (tests, words) =
        stands.split_once("; ").map_or((stands, None), |(tests, words)| (tests, Some(words)));
    (tests.split(", ").map(|name| name.trim_matches('`')).collect(), words)
}

#[test]
fn every_row_names_tests_that_exist_and_name_the_case_or_says_why_there_is_none() {
    let tests = tests();
    for (number, stands) in rows() {
        let (names, words) = taken_apart(&stands);
        assert!(!names.is_empty() || words.is_some(), "case {number} has nothing");
        for name in names {
            let cases = tests.get(name).unwrap_or_else(|| panic!("case {number}: no test {name}"));
            assert!(cases.contains(&number), "{name} does not name case {number}");
        }
        if let Some(words) = words {
            let (word, reason) = words.split_once(": ").expect("a word, a colon and a reason");
            assert!(ELSEWHERE.contains(&word), "case {number}: {word}");
            assert!(reason.len() > 10, "case {number}: {reason}");
            if word == "elsewhere" {
                let named: Vec<_> = reason.split('`').skip(1).step_by(2).collect();
                assert!(!named.is_empty(), "case {number} names no test");
                for test in named {
                    let (program, function) = test.split_once("::").expect("program::function");
                    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
                    let source = fs::read_to_string(path.join(format!("{program}.rs"))).unwrap();
                    assert!(tests_in(&source).contains(function), "case {number}: {test}");
                }
            }
        }
    }
}

#[test]
fn every_test_that_names_a_case_stands_in_its_row() {
    let rows: BTreeMap<_, _> = rows().into_iter().collect();
    for (name, cases) in tests() {
        for case in cases.into_iter().filter(|case| *case <= CASES) {
            assert!(rows[&case].contains(&format!("`{name}`")), "case {case} misses {name}");
        }
    }
}

#[test]
fn a_test_named_after_a_case_names_it_in_its_comment() {
    for (name, cases) in tests() {
        let (_, function) = name.split_once("::").unwrap();
        if let Some(rest) = function.strip_prefix("case_") {
            let number = rest[..3].parse().unwrap();
            assert!(cases.contains(&number), "{name} says otherwise in its comment");
        }
    }
}
